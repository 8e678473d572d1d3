"""Differentiation through the steps of a lower loop."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from bisls._check import number, optional, settle, whole_number
from bisls.batches import Minibatches, supply
from bisls.hypergrad.base import Hypergradient, HypergradientMethod, estimated
from bisls.hypergrad.lookahead import through
from bisls.linear.base import State
from bisls.linear.neumann import largest_curvature
from bisls.lower import Loop
from bisls.oracle import Oracle
from bisls.states import Fields, flat
from bisls.status import Status
from bisls.steps.constant import Constant
from bisls.vector import Vector, norm


@dataclass(frozen=True)
class Unrolled(HypergradientMethod):
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
        settle(self, iters=whole_number(1), step=optional(number("(0, inf)", "must be positive, or None")))

    @property
    def view(self) -> str:
        """It is that of steps."""
        return "t-step"

    def estimate(self, oracle: Oracle, upper_batch: Any, lower_batch: Any, state: State) -> Hypergradient:
        """Estimate the hypergradient at the present (x, y)."""
        y, batches = oracle.problem.y, supply(lower_batch)
        start, step, status = y.read(), self.step, Status.OK
        if step is None:
            graph = oracle.lower_graph(batches.fresh())
            curvature, vector = largest_curvature(graph.hessian, graph.grad, state.get("vector"))
            state = {**state, "vector": vector}
            if (
                not 0 < curvature < float("inf")
            ):  # no curvature to divide by: only the direct part of the gradient is kept
                status = Status.NON_FINITE if curvature != curvature else Status.NEGATIVE_CURVATURE
                upper = oracle.upper(upper_batch)
                return estimated(
                    oracle,
                    upper,
                    upper.grad_x,
                    status=status,
                    state=state,
                    lower_grad_norm=norm(graph.grad),
                    here=False,
                )
            step = 1.0 / curvature
        chosen = Minibatches([batches.fresh() for _ in range(self.iters)])
        try:
            lowered = Loop(Constant(step)).descend(oracle, chosen, start, 0, {}, trace=True)
            upper = oracle.upper(upper_batch)
            gradient, _ = through(oracle, lowered.trace, upper)
        finally:
            y.write_(start)
        status = lowered.status
        return estimated(oracle, upper, gradient, status=status, state=state, lower_grad_norm=lowered.left, here=False)

    def keeps(self, y: Vector | None) -> Fields:
        """Where the next power iteration begins."""
        return Fields(optional={} if self.step is not None else {"vector": flat(y)})
