"""The lower problem solved by Newton's method, where its data are one batch for ever; by a loop everywhere else."""

from __future__ import annotations

from dataclasses import dataclass
from math import isfinite
from typing import Any

import torch
from torch import Tensor

from bisls.batches import Minibatches
from bisls.derivatives import Following
from bisls.linear.base import LinearSolver
from bisls.linear.direct import due
from bisls.lower.base import SEEN, Lowered, State
from bisls.lower.loop import Loop
from bisls.operators import Inverse
from bisls.oracle import LowerGraph, LowerPoint, Oracle
from bisls.states import Fields, Number
from bisls.status import Status
from bisls.still import Moment
from bisls.vector import Vector, dot, norm

SHARE = 0.01  # y is solved for up to so much of the way that x moved it
NEW = 3  # at most so many inverses are made
FASTER = 0.3  # an inverse is kept for as long as each step with it is at most so much of the one before
STALLED = 0.5  # a full Newton step that leaves more than this, and lowers nothing, has come down to rounding
SHORTEST = 1e-3  # a Newton step is shortened to no less than this


@dataclass(frozen=True)
class Found:
    """Where the lower problem was solved.

    Attributes:
        y: The solution, or how far so many steps have led.
        steps: How many steps led there.
        checks: How many trials were too long.
        first: The loss where they began.
        inverse: The inverse Hessian that the last of them was made with; None where it is not known as a whole.
        done: Whether it is the solution.
    """

    y: Tensor
    steps: int
    checks: int
    first: LowerPoint | LowerGraph
    inverse: Inverse | None
    done: bool


@dataclass(frozen=True)
class Solved(Loop):
    """A `Loop`; where all data are those of the last iteration, Newton steps in its place, as long as they converge.

    After an upper step y is nearly solved for already: it moved along. Steps with the inverse Hessian that the linear solves have
    left behind bring it to the solution, one or two as a rule, where the loop makes T. Each is compared with the one before:
    where they do not become shorter fast, the inverse is made anew, a few times at most, and what is gained by then is kept.
    Where there is no inverse, Newton steps by products, if these were fewer than the loop's steps; the loop where nothing is
    to be gained (negative curvature, random numbers).
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
        if self.polish is not None and not trace and replay is None:
            found = self._found(oracle, batches, y, state, self.polish)
            if found is not None:
                oracle.problem.y.write_(found.y)
                size, last = float(found.steps > 0), state["accepted"]
                steps, checks = found.steps, found.checks
                seen = norm(found.y - y) > _unseen(y)  # nothing but rounding may raise the loss
                status = Status.OK if seen else Status.ROUNDING
                return Lowered(found.y, size, steps, checks, status, state, last, found.first, promised=0.0)
            oracle.problem.y.write_(y)
        return super().descend(oracle, batches, y, k, state, trace=trace, replay=replay)

    def _found(
        self, oracle: Oracle, batches: Minibatches, y: Tensor, state: State, linear: LinearSolver
    ) -> Found | None:
        """The solution, where it is to be looked for and is found."""
        if not batches.steady or "moved" not in state or oracle.problem.lower_bounds is not None:
            return None
        inverse, learnt = whole(oracle), oracle.memory.learnt
        # without an inverse, where one will be made in any case, or one solve (there were two) takes no longer than the loop
        if inverse is None and not (due(learnt, y.numel()) or 0.0 < learnt.here <= 2 * len(batches)):
            return None
        return solved(oracle, batches.newest, y, Goal(SHARE * state["moved"]), linear, inverse)

    def followed(self, state: State, before: Tensor, after: Tensor) -> State:
        """It is remembered how far y was moved."""
        return {**super().followed(state, before, after), "moved": norm(after - before)}

    def keeps(self, y: Vector | None) -> Fields:
        """As the loop, and how far y was moved last."""
        return super().keeps(y).more(moved=Number(0.0))


def whole(oracle: Oracle) -> Inverse | None:
    """The inverse Hessian that linear solves have left behind, where it is that of all of y, and y has no bounds."""
    learnt = oracle.memory.learnt
    known = learnt.inverse is not None and len(learnt.inverse) == 1 and oracle.problem.lower_bounds is None
    return learnt.applied if known else None


def inverse_of(graph: LowerGraph, oracle: Oracle) -> Inverse | None:
    """The inverse Hessian at this very point, where it has been written out; otherwise the one that is known."""
    factor = graph.hessian.factor() if graph.hessian.written else None
    if factor is None or len(factor) > 1:
        return whole(oracle)
    return lambda v: torch.cholesky_solve(v[:, None], factor[0])[:, 0]


@dataclass(frozen=True)
class Goal:
    """How far off the solution may be.

    Attributes:
        tol: So far in all; no more than rounding where that is more.
        heed: A gradient in y of what the solution is wanted for,
        slack: and by how much that may be off: where it is off by less, nothing else counts.
    """

    tol: float
    heed: Tensor | None = None
    slack: float = 0.0

    def met(self, step: Tensor, share: float, least: float) -> bool:
        """Whether so large a share of a step is not worth taking."""
        if share * norm(step) <= max(self.tol, least):
            return True
        return self.heed is not None and share * abs(dot(self.heed, step)) <= self.slack


def solved(
    oracle: Oracle,
    batch: Any,
    y: Tensor,
    goal: Goal,
    linear: LinearSolver,
    inverse: Inverse | None,
    replay: Moment | None = None,
) -> Found | None:
    """The solution near y at the present x; None where Newton steps lead nowhere. The lower parameters are left anywhere.

    Args:
        oracle: Evaluates the lower loss.
        batch: Its batch.
        y: Where to begin.
        goal: How far off it may be.
        linear: Makes full Newton steps.
        inverse: An inverse Hessian from nearby; None: at once with a full step.
        replay: Every evaluation is a probe with the random numbers of this moment.
    """
    return _Solve(oracle, batch, goal, linear, replay, _unseen(y)).found(y, inverse)


def _unseen(y: Tensor) -> float:
    """The length of a step that is nothing but rounding."""
    return 8 * torch.finfo(y.dtype).eps * norm(y)


class _Solve:
    """Newton steps. Each inverse is used again for as long as it is seen to lead on fast: such a step costs one gradient."""

    def __init__(
        self, oracle: Oracle, batch: Any, goal: Goal, linear: LinearSolver, replay: Moment | None, least: float
    ):
        self.oracle, self.batch, self.goal, self.linear, self.replay = oracle, batch, goal, linear, replay
        self.least = least
        self.first: LowerPoint | LowerGraph | None = None
        self.steps = self.checks = 0

    def found(self, y: Tensor, inverse: Inverse | None) -> Found | None:
        """The solution from y."""
        here: LowerPoint | LowerGraph | None = None
        step, done = y, False
        if inverse is not None:
            here = self._at(y)
            if here.moment.passed:
                return None
            step = inverse(here.grad)
        for _ in range(NEW + (inverse is not None)):
            new = here is None
            if here is None:
                made = self._newton(y)
                if made is None and self.steps > self.checks:
                    break  # as far as they have led, the loss has not risen
                if made is None:
                    return None
                here, step, inverse = made
            end = self._along(y, here, step, inverse, new)
            if end is None:
                return None
            (y, done), here = end, None
            if done:
                break
        assert self.first is not None
        return Found(y, self.steps, self.checks, self.first, inverse, done)

    def _at(self, y: Tensor) -> LowerPoint:
        here = self.oracle.lower(self.batch, y, self.replay)
        self.first = self.first or here
        return here

    def _newton(self, y: Tensor) -> tuple[LowerGraph, Tensor, Inverse | None] | None:
        """The Newton step at y, and the inverse that it was made with; None where there is none."""
        self.oracle.problem.y.write_(y)
        graph = self.oracle.lower_graph(self.batch, self.replay)
        self.first = self.first or graph
        if graph.random or not isfinite(graph.value):
            return None
        solution = self.linear.solve(graph.hessian, graph.grad, {})
        if solution.status not in (Status.OK, Status.MAX_ITERS):
            return None
        return graph, solution.z, inverse_of(graph, self.oracle)

    def _along(
        self, y: Tensor, here: LowerPoint | LowerGraph, step: Tensor, inverse: Inverse | None, new: bool
    ) -> tuple[Tensor, bool] | None:
        """Steps with one inverse: where they lead, and whether that is the solution; None where not even a short one does."""
        t = 1.0
        while t >= SHORTEST:
            there = y - t * step
            if self.oracle.problem.y.holds(there):
                self.steps += 1
                if t == 1.0 and self.goal.met(step, 1.0, self.least):
                    return there, True
                point, slack = self._at(there), SEEN * here.eps * abs(here.value)
                follow = point.grad if inverse is None else inverse(point.grad)
                left = norm(follow) / norm(here.grad if inverse is None else step)
                lowered = here.value - point.value > slack
                if left > 1.0 and not lowered and not _seen(here, step):
                    return y, True
                # what raises the gradient, and lowers nothing, is too long
                if point.value <= here.value + slack and (lowered or left <= 1.0):
                    if t < 1.0 or left > FASTER:
                        seen = lowered if new else _seen(here, step)
                        return there, t == 1.0 and left > STALLED and not seen
                    met = self.goal.met(step, left / (1.0 - left), self.least)
                    if met or inverse is None:
                        return there, met
                    y, here, step, new = there, point, follow, False
                    continue
                self.checks += 1
            if not new:
                return y, False
            t /= 4
        return None


def _seen(here: LowerPoint | LowerGraph, step: Tensor) -> bool:
    """Whether the loss falls by more than its own rounding along a step."""
    return dot(here.grad, step) > 2 * here.eps * abs(here.value)
