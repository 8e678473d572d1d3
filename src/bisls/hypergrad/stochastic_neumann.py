"""The stochastic Neumann product of random length."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from bisls._check import number, optional, settle, whole_number
from bisls.batches import supply
from bisls.hypergrad.base import Hypergradient, HypergradientMethod, estimated
from bisls.linear.base import State
from bisls.linear.neumann import largest_curvature
from bisls.oracle import Oracle
from bisls.ranks import draw
from bisls.states import Fields, flat
from bisls.status import Status
from bisls.vector import Vector, norm


@dataclass(frozen=True)
class StochasticNeumann(HypergradientMethod):
    """The stochastic Neumann estimate (the paper's equation 13, with the 1/L that it leaves out).

    ``h = grad_x f - g_xy(batch 0) [(N/L) prod_(j=1..M) (I - g_yy(batch j) / L)] grad_y f``, with M uniform on 0 .. N - 1. Its
    mean is the truncated Neumann series of N terms. Every factor, and the mixed product, sees a fresh batch: the next of an
    iterator or, under `fit`, one of N that are drawn beside those of the lower steps. Where `Solver.step` is called without
    ``extra_batches``, the batches of the lower steps stand in, the newest first, and again where N is larger than T. Where there
    is one batch all see it.

    Args:
        terms: N, at least 1.
        smoothness: L, at least the largest curvature of the lower loss on any batch; None estimates it on the first batch by
            power iteration, warm-started from the previous estimate.
    """

    terms: int = 10
    smoothness: float | None = None

    def __post_init__(self) -> None:
        settle(self, terms=whole_number(1), smoothness=optional(number("(0, inf)", "must be positive, or None")))

    @property
    def several(self) -> bool:
        """A fresh batch for each factor."""
        return True

    @property
    def extra_batches(self) -> int:
        """One for the mixed product, and one for each of N - 1 factors at most."""
        return self.terms

    def estimate(self, oracle: Oracle, upper_batch: Any, lower_batch: Any, state: State) -> Hypergradient:
        """Draw one estimate of the hypergradient at the present (x, y)."""
        upper, batches = oracle.upper(upper_batch), supply(lower_batch)
        first = oracle.lower_graph(batches.fresh())
        smoothness, status = self.smoothness, Status.OK
        if smoothness is None:
            smoothness, vector = largest_curvature(first.hessian, upper.grad_y, state.get("vector"))
            state = {**state, "vector": vector}
            if not 0 < smoothness < float("inf"):
                status = Status.NON_FINITE if smoothness != smoothness else Status.NEGATIVE_CURVATURE
                smoothness = float("inf")  # no curvature to divide by: only the direct part of the gradient is kept
        z = upper.grad_y * (self.terms / smoothness)
        for _ in range(draw(self.terms)):
            graph = oracle.lower_graph(batches.fresh()) if batches.several else first
            longer = z - graph.hessian(z) / smoothness
            if norm(longer) > norm(z) * (1 + 1e-3):
                status = Status.DIVERGED
            z = longer
        return estimated(oracle, upper, upper.grad_x - first.mixed(z), status=status, state=state, graph=first)

    def keeps(self, y: Vector | None) -> Fields:
        """Where the next power iteration begins."""
        return Fields(optional={} if self.smoothness is not None else {"vector": flat(y)})
