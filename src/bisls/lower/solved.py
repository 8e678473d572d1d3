"""The lower problem solved by Newton's method, where its data are one batch for ever; by a loop everywhere else."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf, isfinite
from typing import Any

import torch
from torch import Tensor

from bisls.batches import Minibatches
from bisls.derivatives import Following
from bisls.linear.base import LinearSolver
from bisls.lower.base import SEEN, Lowered, State
from bisls.lower.loop import Loop
from bisls.operators import Inverse
from bisls.oracle import LowerGraph, LowerPoint, Oracle
from bisls.states import Fields, Number
from bisls.status import Status
from bisls.still import Moment
from bisls.vector import Vector, norm

SHARE = 0.01  # y is solved for up to so much of the way that x moved it
CHORDS, STEPS = 5, 8  # at most so many steps with an old inverse, and so many of Newton's own
FASTER = 0.3  # an old inverse is kept for as long as each step leaves at most this share of the gradient
STALLED = 0.5  # a full Newton step that leaves more than this share of it has come down to rounding
SHORTEST = 1e-3  # a Newton step is shortened to no less than this


@dataclass(frozen=True)
class Found:
    """Where the lower problem was solved, in how many steps, after how many looks at the loss, and the loss where they began."""

    y: Tensor
    steps: int
    checks: int
    first: LowerPoint | LowerGraph


@dataclass(frozen=True)
class Solved(Loop):
    """A `Loop`; where all data are those of the last iteration, Newton steps in its place, as long as they converge.

    After an upper step y is nearly solved for already: it moved along. A step with the inverse Hessian that the linear solves
    have left behind brings it to the solution, one or two as a rule, where the loop makes T. Where that does not converge at
    once, full Newton steps follow; and where these do not (negative curvature, random numbers), or there is no inverse, the loop.
    """

    def descend(
        self,
        oracle: Oracle,
        batches: Minibatches,
        y: Tensor,
        k: int,
        state: State,
        *,
        trace: Following | bool = False,
        replay: Moment | None = None,
    ) -> Lowered:
        """Solve, or make the steps of the loop."""
        known = batches.steady and "moved" in state and solvable(oracle)
        if known and self.polish is not None and not trace and replay is None:
            tol, inverse = SHARE * state["moved"], oracle.memory.learnt.applied
            found = solved(oracle, batches.newest, y, tol, self.polish, inverse)
            if found is not None:
                oracle.problem.y.write_(found.y)
                size, last = float(found.steps > 0), state["accepted"]
                steps, checks = found.steps, found.checks
                seen = norm(found.y - y) > _unseen(y)  # nothing but rounding may raise the loss
                status = Status.OK if seen else Status.ROUNDING
                return Lowered(found.y, size, steps, checks, status, state, last, found.first, promised=0.0)
            oracle.problem.y.write_(y)
        return super().descend(oracle, batches, y, k, state, trace=trace, replay=replay)

    def followed(self, state: State, before: Tensor, after: Tensor) -> State:
        """It is remembered how far y was moved."""
        return {**super().followed(state, before, after), "moved": norm(after - before)}

    def keeps(self, y: Vector | None) -> Fields:
        """As the loop, and how far y was moved last."""
        return super().keeps(y).more(moved=Number(0.0))


def solvable(oracle: Oracle) -> bool:
    """Whether the inverse of a whole Hessian is known, and y has no bounds."""
    inverse = oracle.memory.learnt.inverse
    return inverse is not None and len(inverse) == 1 and oracle.problem.lower_bounds is None


def solved(
    oracle: Oracle,
    batch: Any,
    y: Tensor,
    tol: float,
    linear: LinearSolver,
    inverse: Inverse | None,
    replay: Moment | None = None,
) -> Found | None:
    """The solution near y at the present x; None where it is not found. The lower parameters are left anywhere.

    Args:
        oracle: Evaluates the lower loss.
        batch: Its batch.
        y: Where to begin.
        tol: The length of a Newton step after which none is needed.
        linear: Makes full Newton steps.
        inverse: An inverse Hessian from nearby; None: at once with full steps.
        replay: Every evaluation is a probe with the random numbers of this moment.
    """
    tol = max(tol, _unseen(y))
    first: LowerPoint | LowerGraph | None = None
    steps = 0
    if inverse is not None:
        y, steps, first, done = _by_chords(oracle, batch, y, tol, inverse, replay)
        if done or first is None:
            return Found(y, steps, 0, first) if first is not None else None
    return _by_newton(oracle, batch, y, tol, linear, replay, steps, first)


def _unseen(y: Tensor) -> float:
    """The length of a step that is nothing but rounding."""
    return 8 * torch.finfo(y.dtype).eps * norm(y)


def _by_chords(
    oracle: Oracle, batch: Any, y: Tensor, tol: float, inverse: Inverse, replay: Moment | None
) -> tuple[Tensor, int, LowerPoint | None, bool]:
    """Steps with one inverse: where they lead, how many, the loss at first (None: it is random), whether that is all."""
    vector, first, before, left = oracle.problem.y, None, y, inf
    for steps in range(CHORDS):
        with oracle.upper_frozen():
            here = oracle.lower(batch, y, replay)
        if first is None:
            if here.moment.passed:
                return y, 0, None, False
            first = here
        size = norm(here.grad)
        if not size <= FASTER * left:
            return before, max(steps - 1, 0), first, False
        step = inverse(here.grad)
        before, left = y, size
        if not vector.holds(y - step):
            return before, steps, first, False
        y = y - step
        if norm(step) <= tol:
            return y, steps + 1, first, True
    return y, CHORDS, first, False


def _by_newton(
    oracle: Oracle,
    batch: Any,
    y: Tensor,
    tol: float,
    linear: LinearSolver,
    replay: Moment | None,
    steps: int,
    first: LowerPoint | LowerGraph | None,
) -> Found | None:
    """Newton's own steps, from where others have led; each is shortened until the loss does not rise."""
    vector, left, values = oracle.problem.y, inf, oracle.cost.lower_values
    for _ in range(STEPS):
        vector.write_(y)
        graph = oracle.lower_graph(batch, replay)
        first = first or graph
        size = norm(graph.grad)
        if graph.random or not isfinite(graph.value):
            return None
        if size > STALLED * left:
            return Found(y, steps, oracle.cost.lower_values - values, first)
        solution = linear.solve(graph.hessian, graph.grad, {})
        if solution.status not in (Status.OK, Status.MAX_ITERS):
            return None
        t, length, steps = 1.0, norm(solution.z), steps + 1
        slack = SEEN * graph.eps * abs(graph.value)
        while not (
            vector.holds(y - t * solution.z) and _falls(oracle, graph, y - t * solution.z, slack, length <= tol)
        ):
            t /= 4
            if t < SHORTEST:
                return None
        y, left = y - t * solution.z, size if t == 1.0 else inf
        if t * length <= tol:
            return Found(y, steps, oracle.cost.lower_values - values, first)
    return None


def _falls(oracle: Oracle, graph: LowerGraph, y: Tensor, slack: float, short: bool) -> bool:
    """Whether the loss does not rise; a step that needs no other is too short to raise it."""
    return short or oracle.lower_value(graph.batch, graph.moment, y) <= graph.value + slack
