"""Implicit differentiation with any linear solver."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import ceil, isfinite
from typing import Any

import torch
from torch import Tensor

from bisls._check import having, number, optional, settle
from bisls.batches import Minibatches, Stream, supply
from bisls.hypergrad.base import Hypergradient, HypergradientMethod, estimated
from bisls.linear.base import LinearSolver, State
from bisls.linear.cg import CG
from bisls.oracle import LowerGraph, MeanGraph, Oracle, UpperPoint
from bisls.states import Fields, Number, Row
from bisls.vector import Vector, dot

HESSIANS = 2  # Hessian products are averaged over at most so many batches
EVERY = 20  # one estimate in so many looks at one batch more than it needs, to see whether it needs it
RECENT = 0.3  # the weight of a new measurement of the spread


@dataclass(frozen=True)
class Implicit(HypergradientMethod):
    """Implicit differentiation: ``h = grad_x f - g_xy z`` with ``g_yy z = grad_y f`` (second derivatives of g).

    One upper gradient, one lower graph, the products of the linear solver, and one mixed product.

    With ``spread``, and several lower batches to choose from (a solver hands over those of its lower loop), the mixed product
    is a mean over m of them, the newest first. m is measured: with V the variance of ``g_xy z`` from batch to batch, it is the
    smallest number that brings V / m down to ``spread ||h||^2``. Where every batch speaks of other coordinates of x (a weight for
    each sample) that is all of them; where the batches agree it is one.

    Args:
        linear: Solves the linear system: `CG`, `Neumann`, `Identity` or `Dense`.
        spread: How large the variance of the mixed product may be, relative to ||h||^2; positive. None looks at one batch.
    """

    linear: LinearSolver = field(default_factory=CG)
    spread: float | None = None

    def __post_init__(self) -> None:
        solves = having(LinearSolver, "must be a linear solver such as `CG()`, with solve(hessian, b, state)")
        settle(self, linear=solves, spread=optional(number("(0, inf]", "must be positive, or None")))

    @property
    def several(self) -> bool:
        """With ``spread``."""
        return self.spread is not None

    @property
    def solver(self) -> LinearSolver:
        """The linear solver."""
        return self.linear

    def estimate(self, oracle: Oracle, upper_batch: Any, lower_batch: Any, state: State) -> Hypergradient:
        """Estimate the hypergradient at the present (x, y)."""
        upper, batches = oracle.upper(upper_batch), supply(lower_batch)
        if self.spread is not None and len(batches) > 1 and batches.several:
            return self._averaged(oracle, upper, batches, state)
        graph = oracle.lower_graph(batches.fresh())
        solution = self.linear.solve(graph.hessian, upper.grad_y, state)
        return estimated(oracle, upper, upper.grad_x - graph.mixed(solution.z), solution=solution, graph=graph)

    def keeps(self, y: Vector | None) -> Fields:
        """What the linear solver keeps, and the measured spread."""
        own = {"V": Number(0.0), "||h||^2": Number(), "batches": Number(1.0), "age": Number(0.0)}
        return self.linear.keeps(y).more(**({} if self.spread is None else {"spread": Row(own)}))

    def _averaged(
        self, oracle: Oracle, upper: UpperPoint, batches: Minibatches | Stream, state: State
    ) -> Hypergradient:
        most = len(batches)
        # V, ||h||^2 without the noise, how many batches to look at, and how many estimates ago that was measured
        variance, square, wanted, age = state["spread"].tolist() if "spread" in state else (0.0, 0.0, 2.0, 0.0)
        m = min(max(int(wanted), 2 if age + 1 >= EVERY or "spread" not in state else 1), most)
        graphs: list[LowerGraph] = [oracle.lower_graph(batches.fresh()) for _ in range(m)]
        mean = MeanGraph(graphs, HESSIANS)
        rest = {name: tensor for name, tensor in state.items() if name != "spread"}
        solution = self.linear.solve(mean.hessian, upper.grad_y, rest)
        pulls: list[Tensor] = [graph.mixed(solution.z) for graph in graphs]
        pull = torch.stack(pulls).mean(0)
        flat = upper.grad_x - pull
        seen = sum(dot(own - pull, own - pull) for own in pulls) / (m - 1) if m > 1 else 0.0
        clean = dot(flat, flat) - seen / m
        if m > 1 and isfinite(seen) and isfinite(clean):
            weight = RECENT if "spread" in state else 1.0
            variance, square = variance + weight * (seen - variance), square + weight * (clean - square)
            enough = variance / (self.spread * square) if square > 0 else float(most)  # type: ignore[operator]
            wanted, age = float(min(max(ceil(min(enough, most) - 1e-9), 1), most)), 0.0
        kept = torch.tensor([variance, square, wanted, age + 1], dtype=torch.float64)
        state = {**solution.state, "spread": kept}
        return estimated(oracle, upper, flat, solution=solution, state=state, graph=mean)
