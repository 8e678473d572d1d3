"""Implicit differentiation with any linear solver."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import ceil
from typing import Any

import torch
from torch import Tensor

from bisls._check import require
from bisls.hypergrad.base import Hypergradient, Several, next_batch
from bisls.linear.base import LinearSolver, State
from bisls.linear.cg import CG
from bisls.oracle import LowerGraph, MeanGraph, Oracle
from bisls.vector import dot, norm

HESSIANS = 2  # Hessian products are averaged over at most so many batches
EVERY = 20  # one estimate in so many looks at one batch more than it needs, to see whether it needs it
RECENT = 0.3  # the weight of a new measurement of the spread


@dataclass(frozen=True)
class Implicit:
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
        if not callable(getattr(self.linear, "solve", None)) or isinstance(self.linear, type):
            raise ValueError(
                f"`Implicit(linear={self.linear!r})`: linear must be a linear solver such as `CG()`; "
                "it lacks solve(hessian, b, state)"
            )
        require(self, "spread", self.spread is None or self.spread > 0, "must be positive, or None")

    def estimate(self, oracle: Oracle, upper_batch: Any, lower_batch: Any, state: State) -> Hypergradient:
        """Estimate the hypergradient at the present (x, y)."""
        upper = oracle.upper(upper_batch)
        if self.spread is not None and isinstance(lower_batch, Several) and len(lower_batch.batches) > 1:
            return self._averaged(oracle, upper, lower_batch, state)
        graph = oracle.lower_graph(next_batch(lower_batch))
        solution = self.linear.solve(graph.hessian, upper.grad_y, state)
        flat = upper.grad_x - graph.mixed(solution.z)
        return Hypergradient(
            value=upper.value,
            flat=flat,
            grads=oracle.problem.x.split(flat),
            residual=solution.residual,
            status=solution.status,
            lower_grad_norm=norm(graph.grad),
            state=solution.state,
            graph=graph,
            upper=upper,
        )

    def _averaged(self, oracle: Oracle, upper: Any, several: Several, state: State) -> Hypergradient:
        most = len(several.batches)
        # V, ||h||^2 without the noise, how many batches to look at, and how many estimates ago that was measured
        variance, square, wanted, age = state["spread"].tolist() if "spread" in state else (0.0, 0.0, 2.0, 0.0)
        m = min(max(int(wanted), 2 if age + 1 >= EVERY or "spread" not in state else 1), most)
        graphs: list[LowerGraph] = [oracle.lower_graph(several.fresh()) for _ in range(m)]
        mean = MeanGraph(graphs, HESSIANS)
        rest = {name: tensor for name, tensor in state.items() if name != "spread"}
        solution = self.linear.solve(mean.hessian, upper.grad_y, rest)
        pulls: list[Tensor] = [graph.mixed(solution.z) for graph in graphs]
        pull = torch.stack(pulls).mean(0)
        flat = upper.grad_x - pull
        if m > 1:
            seen = sum(dot(own - pull, own - pull) for own in pulls) / (m - 1)
            clean = dot(flat, flat) - seen / m
            weight = RECENT if "spread" in state else 1.0
            variance, square = variance + weight * (seen - variance), square + weight * (clean - square)
            enough = variance / (self.spread * square) if square > 0 else float(most)  # type: ignore[operator]
            wanted, age = float(min(max(ceil(min(enough, most) - 1e-9), 1), most)), 0.0
        kept = torch.tensor([variance, square, wanted, age + 1], dtype=torch.float64)
        return Hypergradient(
            value=upper.value,
            flat=flat,
            grads=oracle.problem.x.split(flat),
            residual=solution.residual,
            status=solution.status,
            lower_grad_norm=norm(graphs[0].grad),
            state={**solution.state, "spread": kept},
            graph=mean,
            upper=upper,
        )
