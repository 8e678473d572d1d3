"""Implicit differentiation with any linear solver."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from bisls.hypergrad.base import Hypergradient, next_batch
from bisls.linear.base import LinearSolver, State
from bisls.linear.cg import CG
from bisls.oracle import Oracle
from bisls.vector import norm


@dataclass(frozen=True)
class Implicit:
    """Implicit differentiation: ``h = grad_x f - g_xy z`` with ``g_yy z = grad_y f`` (second derivatives of g).

    One upper gradient, one lower graph, the products of the linear solver, and one mixed product.

    Args:
        linear: Solves the linear system: `CG`, `Neumann`, `Identity` or `Dense`.
    """

    linear: LinearSolver = field(default_factory=CG)

    def __post_init__(self) -> None:
        if not callable(getattr(self.linear, "solve", None)) or isinstance(self.linear, type):
            raise ValueError(
                f"`Implicit(linear={self.linear!r})`: linear must be a linear solver such as `CG()`; "
                "it lacks solve(hessian, b, state)"
            )

    def estimate(self, oracle: Oracle, upper_batch: Any, lower_batch: Any, state: State) -> Hypergradient:
        """Estimate the hypergradient at the present (x, y)."""
        upper = oracle.upper(upper_batch)
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
