"""The upper step where the lower level is trained: a walk of its own, judged by lower steps that are repeated."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from math import inf, isfinite
from statistics import median
from typing import Any

import torch
from torch import Tensor

from bisls.batches import Sample
from bisls.best import Best
from bisls.bounds import inside
from bisls.hypergrad.base import Hypergradient, HypergradientMethod
from bisls.line import Line
from bisls.lower import Lowered, LowerPart
from bisls.oracle import Oracle
from bisls.pace import WORSE
from bisls.response.base import Response
from bisls.response.rerun import Rerun
from bisls.states import Fields, Number, Numbers, Whole
from bisls.status import Status
from bisls.steps.base import Memory
from bisls.steps.curvature import Curvature
from bisls.upper import State, Taken
from bisls.vector import Vector, dot, norm
from bisls.walk import Scaled, Walk

OPENING = (0, 1, 2, 4, 7)  # after so many steps the scale of a step is looked for,
LAST = 3  # the shortest is taken, and in the end the median of so many: while y is not trained, lines say little
NUMBERS = ("norm", "influence", "most", "longest", "faint")  # what is known beside the walk, as numbers
FAINT = 1e-3  # next to nothing, in units of the most that has been
SELDOM = 4  # where y begins anew, f at the best x costs T lower steps: it is asked for every so many iterations while f falls
DEAD = 5  # so many hypergradients in a row that are exactly zero, after others that were not: x has gone too far
LATER, APART = (
    (11, 16, 22, 29),
    30.0,
)  # and after so many again, while the longest of these is so many times the shortest
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
        free, pulled = scene.freed(x)
        walk = Walk.unpacked(state).moved_to(free) if state else Walk.begin(free)
        kept = _Kept.unpacked(state) if state else _Kept(norm(pulled))
        gradient, kept = kept.clipped(pulled)
        if lowered.status is Status.RESTARTED:  # nothing that was measured with that y is of use
            return scene.stay(Walk.begin(walk.start), _Kept(kept.norm), Status.RESTARTED)
        checks, kept = 0, kept.weighed(norm(pulled), lowered.left)
        if walk.pace.dead >= DEAD:
            return scene.stay(walk.lost(), kept, Status.RESTARTED)
        if kept.faint >= DEAD and scene.value(walk.start) < estimate.value:
            return scene.stay(walk.lost(), _Kept(kept.norm, best=kept.best), Status.RESTARTED, 1)
        if walk.pace.lost:  # y may have raised f as well, as it does where the two levels want opposite things
            began, checks = scene.value(walk.start), 1
            if not estimate.value <= began < inf:
                return scene.stay(walk.lost(), kept, Status.RESTARTED, checks)
            walk = walk.pardoned(began)
        if lower.restarts or scene.anew:
            start = lowered.beginning.y
            best = kept.best or Best(x, lowered.y if start is None else start, step=lowered.step)
            if not scene.anew or best.doubtful or k % SELDOM == 0:
                known = scene.again(best) if scene.anew else scene.there(best.x, best.y)
                best = best.seen(estimate.value, known, x, lowered.y, lowered.step)
            if best.risen:
                # it is y that has learnt too much: what x has learnt since stays, where f is no higher with it
                stays = not scene.anew and scene.there(x, best.y) <= scene.there(best.x, best.y)
                return scene.back(walk, replace(kept, best=replace(best.again(), x=x if stays else best.x)))
            kept = replace(kept, best=best)
        # with a y that begins anew nothing is learnt of lines later on: what sets them apart are single batches
        opening = walk.pace.k in OPENING or (walk.pace.k in LATER and kept.apart and not scene.anew)
        if walk.pace.due and not opening:
            # a share of what was gained is slack where all of it is x's gain; with a y that goes on, most of it is y's own
            worse = WORSE if scene.anew else 0.0
            walk, checks = walk.voted(estimate.value, scene.value(walk.average), worse), checks + 1
        walk, scaled = walk.learn(gradient)
        if scaled.square <= 0.0:
            return scene.stay(walk.died(estimate.value), kept, Status.STATIONARY, checks)
        if opening or walk.pace.ceiling == 0.0:  # the latter where the first gradients were forgotten
            own = Curvature(start=self.alpha).choose(scene.line(free, scaled), Memory())
            checks, kept = checks + own.checks, kept.scaled(own.size)
            if not kept.found:
                return scene.stay(walk, kept, own.status, checks)
            walk = walk.begun(kept.scale)
        after, size, _ = walk.step(scaled, scene.bent)
        there = scene.placed(after.point)
        if not oracle.problem.x.holds(there):
            return scene.stay(walk.shorter(), kept, Status.NON_FINITE, checks)
        walk = after.at(scene.walked(there), scaled.scale, estimate.value)
        oracle.problem.x.write_(there)
        oracle.problem.y.write_(lowered.y)
        return Taken(lowered.y, size, checks, Status.OK, Status.OK, {**walk.packed(), **kept.packed()})

    def careful(self, state: State) -> State:
        """The state to go on from after values that were not finite: a tenth of the step."""
        return {**state, **Walk.unpacked(state).shorter().packed()} if state else state

    def keeps(self, x: Vector, y: Vector, method: HypergradientMethod) -> Fields:
        """The walk, and what is known beside it."""
        found = Numbers(((0, len(OPENING)),), (torch.float64,), least=0.0)
        numbers = {name: Whole() if name == "faint" else Number(0.0) for name in NUMBERS}
        needed = {**Walk.kind(x), **numbers, "found": found}
        return Fields(needed, {"best": Best.kind(x, y)}, empty=True)


@dataclass(frozen=True)
class _Kept:
    """What is known beside the walk.

    Attributes:
        norm: The running mean of the norms of hypergradients.
        found: The scales of a step that were found.
        best: Where f was lowest, and how it has been since; None where nobody would go back.
        influence: The running mean of the norms of hypergradients over those of the lower gradients where y ended.
        most: The largest that it has been.
        longest: The largest that the running mean of the norms has been.
        faint: How many in a row were next to nothing beside both.
    """

    norm: float
    found: tuple[float, ...] = ()
    best: Best | None = None
    influence: float = 0.0
    most: float = 0.0
    longest: float = 0.0
    faint: int = 0

    @property
    def scale(self) -> float:
        """The one to take."""
        return min(self.found) if len(self.found) < len(OPENING) else median(self.found[-LAST:])

    @property
    def apart(self) -> bool:
        """Whether the last ones say different things."""
        last = self.found[-LAST:]
        return bool(last) and max(last) > APART * min(last)

    def scaled(self, size: float) -> _Kept:
        """With another scale."""
        return replace(self, found=(*self.found, size)[-len(OPENING) :]) if size > 0.0 else self

    def weighed(self, length: float, left: float) -> _Kept:
        """With the norms of another hypergradient, and of the lower gradient that was left."""
        if not (length > 0.0 and 0.0 < left < inf):
            return self
        own = length / left
        mean = self.influence + RECENT * (own - self.influence) if self.most else own
        faint = self.faint + 1 if own < FAINT * self.most and length < FAINT * self.longest else 0
        most, longest = max(self.most, mean), max(self.longest, self.norm)
        return replace(self, influence=mean, most=most, longest=longest, faint=faint)

    def clipped(self, gradient: Tensor) -> tuple[Tensor, _Kept]:
        """The hypergradient, not longer than it may be, and what is known with it."""
        length = norm(gradient)
        if isfinite(length) and length > CLIP * self.norm > 0.0:
            gradient, length = gradient * (CLIP * self.norm / length), CLIP * self.norm
        return gradient, replace(self, norm=self.norm + RECENT * (length - self.norm))

    def packed(self) -> dict[str, Any]:
        """Tensors and numbers, for a checkpoint."""
        found = torch.tensor(self.found, dtype=torch.float64)
        own: dict[str, Any] = {"found": found} | {name: getattr(self, name) for name in NUMBERS}
        return own if self.best is None else {**own, "best": self.best.packed()}

    @classmethod
    def unpacked(cls, state: State) -> _Kept:
        """What `packed` gave; other entries are left alone."""
        best = Best.unpacked(state["best"]) if "best" in state else None
        return cls(found=tuple(state["found"].tolist()), best=best, **{name: state[name] for name in NUMBERS})


@dataclass(frozen=True)
class _Scene:
    """One iteration, to be repeated at another x."""

    oracle: Oracle
    sample: Sample
    estimate: Hypergradient
    lower: LowerPart
    lowered: Lowered

    def freed(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Where the walk is, and the hypergradient by that: in coordinates without bounds, where there are such."""
        bounds, vector = self.oracle.problem.upper_bounds, self.oracle.problem.x
        free = None if bounds is None else bounds.free(x, vector)
        if bounds is None or free is None:
            return x, self.estimate.flat
        return free, bounds.pulled(x, self.estimate.flat, vector)

    @property
    def anew(self) -> bool:
        """Whether y begins in every iteration at a function of x, so that f belongs to x alone."""
        return self.oracle.problem.lower_start is not None

    def walked(self, x: Tensor) -> Tensor:
        """The point of the walk that belongs to an x."""
        return self.freed(x)[0]

    def placed(self, free: Tensor) -> Tensor:
        """The x that belongs to a point of the walk."""
        bounds = self.oracle.problem.upper_bounds
        return free if bounds is None else bounds.placed(free, self.oracle.problem.x)

    @property
    def bent(self) -> Callable[[Tensor, Tensor, float], Tensor] | None:
        """What keeps a step of the walk inside the bounds, where its coordinates have any."""
        bounds, vector = self.oracle.problem.upper_bounds, self.oracle.problem.x
        if bounds is None or bounds.free(vector.read(), vector) is not None:
            return None
        return lambda z, d, size: inside(bounds, z, d, size, vector)

    def value(self, free: Tensor) -> float:
        """f at another point of the walk, with the lower steps repeated there, on the batch of the hypergradient."""
        problem, x = self.oracle.problem, self.placed(free)
        if not problem.x.holds(x):
            return inf
        problem.x.write_(x)
        y = self.lower.rerun(self.oracle, self.sample.lower, self.lowered)
        if y is None or not problem.y.holds(y):
            return inf
        return self.there(x, y)

    def again(self, best: Best) -> float:
        """f at the best x where y begins anew: the lower steps are as long as they were there, for x is made for these."""
        lowered, size = self.lowered, self.lowered.step
        if best.step > 0.0 and size > 0.0 and best.step != size:
            longer = best.step / size
            trace = tuple(replace(taken, size=longer * taken.size) for taken in lowered.trace)
            lowered = replace(lowered, trace=trace)
        return replace(self, lowered=lowered).value(self.walked(best.x))

    def there(self, x: Tensor, y: Tensor) -> float:
        """f at another point, on the batch and the random numbers of the hypergradient."""
        self.oracle.problem.x.write_(x)
        self.oracle.problem.y.write_(y)
        moment = None if self.estimate.upper is None else self.estimate.upper.moment
        return self.oracle.upper_value(self.sample.upper, moment)

    def line(self, x: Tensor, scaled: Scaled) -> Line:
        """f along the direction, in which nothing moves that sits on a bound."""
        bounds, direction, slope = self.oracle.problem.upper_bounds, scaled.direction, -scaled.square * scaled.unit
        held = None if bounds is None else bounds.held(x, direction, self.oracle.problem.x)
        if held is not None and bool(held.any()):
            direction = direction.masked_fill(held, 0.0)
            slope = -dot(direction, direction * scaled.scale) * scaled.unit
        upper = self.estimate.upper
        eps = torch.finfo(x.dtype).eps if upper is None else upper.eps
        return Line(self.estimate.value, slope, lambda t: self.value(x - t * direction), eps=eps)

    def stay(self, walk: Walk, kept: _Kept, status: Status, checks: int = 0) -> Taken:
        """No step, or one back to the start of the walk."""
        return self._left(walk, self.lowered.y, kept, status, checks)

    def back(self, walk: Walk, kept: _Kept) -> Taken:
        """Back to the best point. Where y begins anew, it is x that went too far: its path begins there, with shorter steps."""
        assert kept.best is not None
        there = self.walked(kept.best.x)
        if not self.anew:
            return self._left(walk.moved_to(there), kept.best.y, kept, Status.RETURNED)
        again = walk.anew(there)
        return self._left(replace(again, pace=again.pace.calmed()), self.lowered.y, kept, Status.RETURNED)

    def _left(self, walk: Walk, y: Tensor, kept: _Kept, status: Status, checks: int = 0) -> Taken:
        self.oracle.problem.x.write_(self.placed(walk.point))
        self.oracle.problem.y.write_(y)
        return Taken(y, 0.0, checks, status, Status.OK, {**walk.packed(), **kept.packed()})
