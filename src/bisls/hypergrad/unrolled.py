"""Differentiation through the steps of a lower loop."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from bisls._check import require
from bisls.hypergrad.base import Hypergradient, next_batch
from bisls.linear.base import State
from bisls.linear.neumann import largest_curvature
from bisls.oracle import Oracle
from bisls.record import Status
from bisls.vector import norm


@dataclass(frozen=True)
class Unrolled:
    """The exact gradient of ``x -> f(x, y_n(x))``, y_n from n gradient steps on g that begin at the present y.

    Reverse mode by hand: with ``l_n = grad_y f(x, y_n)``, going back over t,
    ``h <- h - b g_xy(x, y_t) l_(t+1)`` and ``l_t = (I - b g_yy(x, y_t)) l_(t+1)``.
    A step back costs one lower graph, one Hessian product and one mixed product, and only one graph is alive at a time:
    memory is n copies of y, not n graphs. The parameters are back where they were at the end.

    Args:
        iters: n, at least 1.
        step: The step b of the gradient steps; None takes 1 / L, L the largest curvature at the present point.
    """

    iters: int = 10
    step: float | None = None

    def __post_init__(self) -> None:
        require(self, "iters", self.iters >= 1, "must be at least 1")
        require(self, "step", self.step is None or 0 < self.step < float("inf"), "must be positive, or None")

    def estimate(self, oracle: Oracle, upper_batch: Any, lower_batch: Any, state: State) -> Hypergradient:
        """Estimate the hypergradient at the present (x, y)."""
        y = oracle.problem.y
        start = y.read()
        step, status = self.step, Status.OK
        if step is None:
            graph = oracle.lower_graph(next_batch(lower_batch))
            curvature, vector = largest_curvature(graph.hessian, graph.grad, state.get("vector"))
            state = {**state, "vector": vector}
            if not 0 < curvature < float("inf"):
                status = Status.NON_FINITE if curvature != curvature else Status.NEGATIVE_CURVATURE
            step = 1.0 / curvature if status is Status.OK else 0.0
        points, batches, moments = [start], [], []
        try:
            with oracle.upper_frozen():
                for _ in range(self.iters):
                    batches.append(next_batch(lower_batch))
                    here = oracle.lower(batches[-1])
                    moments.append(here.moment)  # the way back sees the same dropout masks
                    points.append(points[-1] - step * here.grad)
                    y.write_(points[-1])
            upper = oracle.upper(upper_batch)
            flat, adjoint = upper.grad_x.clone(), upper.grad_y
            lower_grad_norm = float("nan")
            for point, batch, moment in zip(points[-2::-1], batches[::-1], moments[::-1], strict=True):
                y.write_(point)
                graph = oracle.lower_graph(batch, moment)
                if lower_grad_norm != lower_grad_norm:
                    lower_grad_norm = norm(graph.grad)
                flat -= step * graph.mixed(adjoint)
                adjoint = adjoint - step * graph.hessian(adjoint)
        finally:
            y.write_(start)
        return Hypergradient(
            value=upper.value,
            flat=flat,
            grads=oracle.problem.x.split(flat),
            residual=float("nan"),
            status=status,
            lower_grad_norm=lower_grad_norm,
            state=state,
        )
