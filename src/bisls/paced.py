"""The upper step where the lower level is trained: a walk of its own, judged by lower steps that are repeated."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import inf, isfinite
from statistics import median

import torch
from torch import Tensor

from bisls.batches import Sample
from bisls.bounds import inside
from bisls.hypergrad.base import Hypergradient, HypergradientMethod
from bisls.line import Line
from bisls.lower import Lowered, LowerPart
from bisls.oracle import Oracle
from bisls.pace import WORSE
from bisls.response.base import Response
from bisls.response.rerun import Rerun
from bisls.states import Fields, Number, Numbers
from bisls.status import Status
from bisls.steps.base import Memory
from bisls.steps.curvature import Curvature
from bisls.upper import State, Taken
from bisls.vector import Vector, norm
from bisls.walk import Scaled, Walk

OPENING = (0, 1, 2, 4, 7)  # after so many steps the scale of a step is looked for,
LAST = 3  # the shortest is taken, and in the end the median of so many: while y is not trained, lines say little
CLIP, RECENT = 2.0, 0.1  # a hypergradient is no longer than so many times the running mean of their norms, and its rate


@dataclass(frozen=True)
class Paced:
    """The walk of `optim.Auto` above: Adam's scaling, an average, steps from looks at the average and from noise.

    What is minimised is f(x, y_T(x)), and its value at another x costs the T lower steps of the iteration once more, from the
    same start, on the same batches. That is done for the scale of the first step and when the average is looked at. y stays
    where the lower steps led it. A hypergradient longer than twice the running mean of their norms is shortened to that.

    Args:
        alpha: Where the first trials begin; None finds it from the loss and its slope.
    """

    alpha: float | None = None
    response: Response = field(default_factory=Rerun, repr=False)

    def take(
        self,
        oracle: Oracle,
        sample: Sample,
        method: HypergradientMethod,
        estimate: Hypergradient,
        lower: LowerPart,
        lowered: Lowered,
        x: Tensor,
        k: int,
        state: State,
        call: str = "Solver",
    ) -> Taken:
        """One step from (x, y), y as the lower level left it; the arguments are those of `Upper.take`."""
        scene = _Scene(oracle, sample, estimate, lower, lowered)
        mean = state.get("norm", norm(estimate.flat))
        gradient, mean = _clipped(estimate.flat, mean)
        walk = Walk.unpacked(state).moved_to(x) if state else Walk.begin(x)
        found: list[float] = state["found"].tolist() if state else []
        checks, opening = 0, walk.pace.k in OPENING
        looked = walk.pace.due or opening
        if walk.pace.lost:
            return scene.stay(walk.lost(), mean, found, Status.RESTARTED)
        if looked and not opening:
            # a share of what was gained is slack where all of it is x's gain; with a y that goes on, most of it is y's own
            worse = 0.0 if oracle.problem.lower_start is None else WORSE
            walk, checks = walk.voted(estimate.value, scene.value(walk.average), worse), 1
        walk, scaled = walk.learn(gradient)
        if walk.pace.ceiling == 0.0:  # the first gradients were forgotten: the scale is looked for again
            opening = looked = True
        if scaled.square <= 0.0:
            return scene.stay(walk.died(estimate.value), mean, found, Status.STATIONARY, checks)
        if opening:
            own = Curvature(start=self.alpha).choose(scene.line(x, scaled), Memory())
            checks, found = own.checks, [*found, own.size][-len(OPENING) :] if own.size > 0.0 else found
            if not found:
                return scene.stay(walk, mean, found, own.status, checks)
            walk = walk.begun(min(found) if len(found) < len(OPENING) else median(found[-LAST:]))
        bounds = oracle.problem.upper_bounds
        bent = None if bounds is None else lambda z, d, size: inside(bounds, z, d, size, oracle.problem.x)
        after, size, _ = walk.step(scaled, bent)
        there = after.point if bounds is None else bounds.project(after.point, oracle.problem.x)
        if not oracle.problem.x.holds(there):
            return scene.stay(walk.shorter(), mean, found, Status.NON_FINITE, checks)
        walk = after.at(there, scaled.scale if looked else None, estimate.value)
        oracle.problem.x.write_(there)
        oracle.problem.y.write_(lowered.y)
        return Taken(lowered.y, size, checks, Status.OK, Status.OK, _kept(walk, mean, found))

    def careful(self, state: State) -> State:
        """The state to go on from after values that were not finite: a tenth of the step."""
        return {**state, **Walk.unpacked(state).shorter().packed()} if state else state

    def keeps(self, x: Vector, y: Vector, method: HypergradientMethod) -> Fields:
        """The walk, and the mean of the norms."""
        found = Numbers(((0, len(OPENING)),), (torch.float64,), least=0.0)
        return Fields({**Walk.kind(x), "norm": Number(0.0), "found": found}, empty=True)


@dataclass(frozen=True)
class _Scene:
    """One iteration, to be repeated at another x."""

    oracle: Oracle
    sample: Sample
    estimate: Hypergradient
    lower: LowerPart
    lowered: Lowered

    def value(self, x: Tensor) -> float:
        """f at another x, with the lower steps repeated there, on the batch and the random numbers of the hypergradient."""
        problem = self.oracle.problem
        if problem.upper_bounds is not None:
            x = problem.upper_bounds.project(x, problem.x)
        if not problem.x.holds(x):
            return inf
        problem.x.write_(x)
        y = self.lower.rerun(self.oracle, self.sample.lower, self.lowered)
        if y is None or not problem.y.holds(y):
            return inf
        problem.y.write_(y)
        moment = None if self.estimate.upper is None else self.estimate.upper.moment
        return self.oracle.upper_value(self.sample.upper, moment)

    def line(self, x: Tensor, scaled: Scaled) -> Line:
        """f along the direction."""
        slope = -scaled.square * scaled.unit
        upper = self.estimate.upper
        eps = torch.finfo(x.dtype).eps if upper is None else upper.eps
        return Line(self.estimate.value, slope, lambda t: self.value(x - t * scaled.direction), eps=eps)

    def stay(self, walk: Walk, mean: float, found: list[float], status: Status, checks: int = 0) -> Taken:
        """No step, or one back to the start of the walk."""
        self.oracle.problem.x.write_(walk.point)
        self.oracle.problem.y.write_(self.lowered.y)
        return Taken(self.lowered.y, 0.0, checks, status, Status.OK, _kept(walk, mean, found))


def _kept(walk: Walk, mean: float, found: list[float]) -> State:
    return {**walk.packed(), "norm": mean, "found": torch.tensor(found, dtype=torch.float64)}


def _clipped(gradient: Tensor, mean: float) -> tuple[Tensor, float]:
    """The hypergradient, not longer than it may be, and the running mean of the norms."""
    length = norm(gradient)
    if isfinite(length) and length > CLIP * mean > 0.0:
        gradient, length = gradient * (CLIP * mean / length), CLIP * mean
    return gradient, mean + RECENT * (length - mean)
