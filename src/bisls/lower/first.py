"""How the lower steps of an iteration begin; the first of a run, with another opinion on how long they may be."""

from __future__ import annotations

from math import inf

from torch import Tensor

from bisls.batches import Sample
from bisls.lower.base import Began, LowerPart, State
from bisls.oracle import Oracle
from bisls.status import Status

ASTRAY = 2.0  # the first lower steps may raise the upper loss by so many times what it was
TRIES = 8  # and are shortened at most so often


def begin(oracle: Oracle, part: LowerPart, sample: Sample, y: Tensor, k: int, state: State) -> tuple[Tensor, Began]:
    """Where the lower steps of an iteration begin: at the present y, or anew where the problem says so; and in which state.

    The scale of the first step of a run is found on one batch of the lower loss alone. Where that falls on and on as y gets
    worse (weights that depend on the losses do so), y would be lost before anything is learnt. The upper loss is another
    opinion: while the first loop multiplies it, or raises it where one with a tenth of the step lowers it, the loop begins
    anew with that. These looks leave no trace.

    Args:
        oracle: Evaluates the losses.
        part: What will train y.
        sample: The batches of the iteration.
        y: The present one.
        k: The outer iteration.
        state: That of the part.
    """
    problem = oracle.problem
    if problem.lower_start is None:
        if part.restarts and not state:
            state = _shortened(oracle, part, sample, y, k, state)
        return y, Began(y, state, problem.moment(), k)
    moment, batch = problem.moment(), sample.lower.newest
    start = oracle.start(batch)
    if not problem.y.holds(start.y):
        raise ValueError(
            "`Bilevel(lower_start=...)` returned numbers that are not finite, or that lower_params can't hold"
        )
    problem.y.write_(start.y)
    return problem.y.read(), Began(None, part.anew(state), moment, k, batch)


def _shortened(oracle: Oracle, part: LowerPart, sample: Sample, y: Tensor, k: int, state: State) -> State:
    """The state that the first loop is to begin in."""
    moment = oracle.problem.moment()

    def tried(state: State) -> tuple[float, float, State]:
        """f before and after the loop, and the state to try next."""
        with oracle.problem.probing(moment):
            began = oracle.upper_value(sample.upper)
            lowered = part.descend(oracle, sample.lower, y, k, state)
            ended = oracle.upper_value(sample.upper) if lowered.status is not Status.NON_FINITE else inf
        oracle.problem.y.write_(y)
        return began, ended, part.shortened(lowered.state)

    for _ in range(TRIES):
        began, ended, shorter = tried(state)
        if ended < began:
            break
        if ended - began <= ASTRAY * abs(began):
            return shorter if tried(shorter)[1] < began else state
        state = shorter
    return state
