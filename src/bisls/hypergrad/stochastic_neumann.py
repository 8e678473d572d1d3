"""The stochastic Neumann product of random length."""

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
class StochasticNeumann:
    """The stochastic Neumann estimate (the paper's equation 13, with the 1/L that it leaves out).

    ``h = grad_x f - g_xy(batch 0) [(N/L) prod_(j=1..M) (I - g_yy(batch j) / L)] grad_y f``, with M uniform on 0 .. N - 1. Its
    mean is the truncated Neumann series of N terms. Where the lower batch is an iterator every factor, and the mixed
    product, draws a fresh batch from it; otherwise all see the one given.

    Args:
        terms: N, at least 1.
        smoothness: L, at least the largest curvature of the lower loss on any batch; None estimates it on the first batch by
            power iteration, warm-started from the previous estimate.
    """

    terms: int = 10
    smoothness: float | None = None

    def __post_init__(self) -> None:
        require(self, "terms", self.terms >= 1, "must be at least 1")
        require(
            self,
            "smoothness",
            self.smoothness is None or 0 < self.smoothness < float("inf"),
            "must be positive, or None",
        )

    def estimate(self, oracle: Oracle, upper_batch: Any, lower_batch: Any, state: State) -> Hypergradient:
        """Draw one estimate of the hypergradient at the present (x, y)."""
        upper = oracle.upper(upper_batch)
        first = oracle.lower_graph(next_batch(lower_batch))
        smoothness, status = self.smoothness, Status.OK
        if smoothness is None:
            smoothness, vector = largest_curvature(first.hessian, upper.grad_y, state.get("vector"))
            state = {**state, "vector": vector}
            if not 0 < smoothness < float("inf"):
                status = Status.NON_FINITE if smoothness != smoothness else Status.NEGATIVE_CURVATURE
                smoothness = float("inf")  # no curvature to divide by: only the direct part of the gradient is kept
        z = upper.grad_y * (self.terms / smoothness)
        for _ in range(oracle.draw(self.terms)):
            fresh = next_batch(lower_batch)
            graph = first if fresh is lower_batch else oracle.lower_graph(fresh)
            longer = z - graph.hessian(z) / smoothness
            if norm(longer) > norm(z) * (1 + 1e-3):
                status = Status.DIVERGED
            z = longer
        flat = upper.grad_x - first.mixed(z)
        return Hypergradient(
            value=upper.value,
            flat=flat,
            grads=oracle.problem.x.split(flat),
            residual=float("nan"),
            status=status,
            lower_grad_norm=norm(first.grad),
            state=state,
            graph=first,
            upper=upper,
        )
