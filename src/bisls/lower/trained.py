"""Training with nothing set: the steps of `optim.Auto`, for a lower level that is a network."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import isfinite, nan
from typing import Any, ClassVar

import torch
from torch import Tensor

from bisls.batches import Minibatches
from bisls.derivatives import Averaged, Derivative, Following, Within
from bisls.lower.base import Effect, Lowered, LowerPart, State, TraceStep, lower_line
from bisls.oracle import LowerPoint, Oracle
from bisls.pace import SHARE
from bisls.states import Fields, Number
from bisls.status import Status
from bisls.steps.base import Memory
from bisls.steps.curvature import Curvature
from bisls.still import Moment
from bisls.vector import Vector, dot, finite
from bisls.walk import Room, Scaled, Walk


@dataclass(frozen=True)
class Trained(LowerPart):
    """Adam's scaling, an average, and steps from two measurements: a look at the average now and then, and noise.

    ``z <- z - gamma g / a``, the average a weighted mean of the z's, gradients taken at ``y = average + 0.2 (z - average)``; y is
    what the parameters hold. The rule is that of `optim.Auto`, whose page says why, but one for all tensors.

    Args:
        start: Where the first trials for a step begin; the result hardly depends on it.
    """

    restarts: ClassVar[bool] = True

    start: float = 1.0

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
        """One step for each batch."""
        following = Following.of(trace)
        first = len(batches) if following is None else following.first(len(batches))
        run = _Run(self, oracle, y, state, following, replay, len(batches) - first)
        with oracle.upper_frozen():
            for i, batch in enumerate(batches):
                if not run.step(batch, i - first):
                    break
        return run.lowered()

    def rerun(self, oracle: Oracle, batches: Minibatches, lowered: Lowered) -> Tensor | None:
        """The same steps, of the sizes that they had."""
        began = lowered.beginning
        with oracle.problem.probing(began.moment), oracle.upper_frozen():
            y = began.start(oracle)
            walk, rooms = _walk(began.state, y), _Again(oracle)
            for taken, batch in zip(lowered.trace, batches, strict=False):
                gradient = oracle.lower(batch, y, room=rooms.gradient).grad
                if not finite(gradient):
                    return None
                room = rooms.of(walk)
                walk, scaled = walk.learn(gradient, room)
                after = walk.moved(scaled.direction, taken.size, taken.weight, room)
                y = _inside(oracle, after.point)
                pace = walk.pace.stepped(scaled.square, scaled.usual)[-1]  # what counts as an outlier depends on it
                walk = replace(after, point=y, pace=pace)
        return y.clone() if finite(y) else None  # what it lies in is written into again

    def anew(self, state: State) -> State:
        """Scaling and pace stay, the path begins anew."""
        return {**state, "anew": 1.0} if state else state

    def followed(self, state: State, before: Tensor, after: Tensor) -> State:
        """Iterate and average move with y."""
        return {**state, **Walk.unpacked(state).moved_to(after).packed()} if state else state

    def shortened(self, state: State) -> State:
        """Back at the start, with a tenth of the first step."""
        return {**state, **Walk.unpacked(state).lost().packed()} if state else state

    def calmed(self, state: State) -> State:
        """A third of the step from now on."""
        if not state:
            return state
        walk = Walk.unpacked(state)
        return {**state, **replace(walk, pace=walk.pace.calmed()).packed()}

    def taught(self, state: State, effect: Effect) -> State:
        """Steps are shorter while the upper loss would fall with shorter ones: y is learning what x has still to leave out."""
        if not state:
            return state
        walk = Walk.unpacked(state)
        return {**state, **replace(walk, pace=walk.pace.taught(effect.slope)).packed()}

    def careful(self, state: State) -> State:
        """A tenth of the step."""
        return {**state, **Walk.unpacked(state).shorter().packed()} if state else state

    def keeps(self, y: Vector | None) -> Fields:
        """The walk, and the last step."""
        return Fields({**Walk.kind(y), "accepted": Number(0.0)}, {"anew": Number(0.0)}, empty=True)

    def checked(self, state: State) -> State:
        """Read a state from a file."""
        return self.keeps(None).read(state, "state")


class _Run:
    """The steps of one iteration."""

    def __init__(
        self,
        own: Trained,
        oracle: Oracle,
        y: Tensor,
        state: State,
        following: Following | None,
        replay: Moment | None,
        traced: int,
    ):
        self.own, self.oracle, self.following, self.replay = own, oracle, following, replay
        self.began, self.walk = y, _walk(state, y)
        self.trace: list[TraceStep] = []
        self.rooms = _Rooms(oracle, traced)
        self.first: LowerPoint | None = None
        self.steps, self.checks, self.size, self.promised, self.status = 0, 0, 0.0, 0.0, Status.OK
        self.accepted: float = state.get("accepted", 0.0)
        self.left = nan  # the norm of the last gradient

    def step(self, batch: Any, i: int) -> bool:
        """One step, number i of those that are looked through; False where there can be no further one."""
        walk, oracle, seen = self.walk, self.oracle, i >= 0
        here = oracle.lower(batch, walk.point, self.replay, self.rooms.gradient)
        if not (isfinite(here.value) and finite(here.grad)):
            self.status, self.walk = Status.NON_FINITE, walk.anew(self.began).shorter()
            return False
        self.first = self.first or here.without_gradient()
        if walk.pace.lost and self._stays_lost(batch, here):
            self.status, self.walk = Status.RESTARTED, walk.lost()
            self.trace.clear()
            return False
        walk = self.walk
        looked = walk.pace.due
        if looked:
            value = oracle.lower_value(batch, here.moment, walk.average)
            self.checks += 1
            walk = walk.voted(here.value, value)
        room = self.rooms.of(walk, i)
        walk, scaled = walk.learn(here.grad, room)
        if scaled.square <= 0.0:
            self.walk = walk.died(here.value)
            return True
        if walk.pace.ceiling == 0.0:
            walk, looked = self._first_step(walk, here, batch, scaled), True
            if walk.pace.ceiling == 0.0:
                return True
        before = walk.point
        after, size, weight = walk.step(scaled, room=room)
        self.rooms.left(walk, after)
        y = _inside(oracle, after.point)
        fall = dot(here.grad, torch.sub(before, y, out=room.one))
        if not (isfinite(fall) and oracle.problem.y.alike) and not oracle.problem.y.holds(y):
            self.status, self.walk = Status.NON_FINITE, walk.shorter()
            return False
        self.walk = after.at(y, scaled.scale if looked else None, here.value)
        back = self._back(after, y, scaled, size, weight) if seen else None
        if self.following is not None:
            self.trace.append(TraceStep(before if seen else None, batch, here.moment, back, size, weight))
        self.steps += 1
        self.promised += fall
        self.size, self.accepted, self.left = size, size, scaled.norm
        return True

    def _stays_lost(self, batch: Any, here: LowerPoint) -> bool:
        """Whether the loss is above that at the start with the present x as well: x may have moved both."""
        began = self.oracle.lower_value(batch, here.moment, self.walk.start)
        self.checks += 1
        if self.walk.pace.gone or not here.value <= began:
            return True
        self.walk = self.walk.pardoned(began)
        return False

    def _back(self, after: Walk, y: Tensor, scaled: Scaled, size: float, weight: float) -> Derivative:
        assert self.following is not None
        # of what is written over now nobody has any more use
        scale = scaled.floor_(self.oracle.problem.y, self.following.floor).reciprocal_().mul_(size / scaled.unit)
        back = Averaged(scale, weight, SHARE)
        return back if y is after.point else Within(back, y == after.point)

    def _first_step(self, walk: Walk, here: LowerPoint, batch: Any, scaled: Scaled) -> Walk:
        """The ceiling from the step that is best for the first batch."""
        oracle, d = self.oracle, scaled.direction
        slope = -scaled.square * scaled.unit
        line = lower_line(oracle, here, batch, slope, lambda t: _inside(oracle, walk.point - t * d), None)
        step = Curvature(start=self.own.start).choose(line, Memory())
        self.checks += step.checks
        return walk.begun(step.size)

    def lowered(self) -> Lowered:
        self.walk = self.rooms.cleared(self.walk)
        y = self.walk.point
        self.oracle.problem.y.write_(y)
        return Lowered(
            y=y,
            step=self.size,
            steps=self.steps,
            checks=self.checks,
            status=self.status,
            state={**self.walk.packed(), "accepted": self.accepted} if self.walk.seen else {},
            accepted=self.accepted,
            first=self.first,
            left=self.left,
            learns=True,
            promised=self.promised,
            trace=tuple(self.trace),
        )


class _Rooms:
    """Memory that the steps of an iteration write into, again and again.

    Args:
        oracle: Has it.
        traced: How many steps will be looked through: their points and scalings are kept.
    """

    def __init__(self, oracle: Oracle, traced: int = 0):
        self.gradient, self._one, self._two = oracle.rooms("work", 3)
        self._points, self._scales = oracle.rooms("y", traced), oracle.rooms("scale", traced)
        self._mine: Walk | None = None  # made by the last step, so that nobody else has its vectors
        self._spare: Walk | None = None  # the one before

    def of(self, walk: Walk, i: int = -1) -> Room:
        """For a step from a walk, and number i of those that are looked through."""
        mine, spare, traced = self._mine, self._spare, i >= 0
        return Room(
            self._one,
            self._two,
            squares=walk.squares if mine is not None and walk.squares is mine.squares else None,
            scale=self._scales[i] if traced else None,
            z=None if spare is None else spare.z,
            average=None if spare is None else spare.average,
            point=self._points[i] if traced else None,
        )

    def left(self, before: Walk, after: Walk) -> None:
        """After a step from one walk to another."""
        mine = self._mine
        own = mine is not None and before.z is mine.z and before.average is mine.average
        self._mine, self._spare = after, before if own else None

    def cleared(self, walk: Walk) -> Walk:
        """With vectors that nobody writes into any more."""
        kept = self._points.untyped_storage().data_ptr()
        ours = {name: own for name, own in walk.vectors.items() if own.untyped_storage().data_ptr() == kept}
        copies = {id(own): own.clone() for own in ours.values()}
        changed: dict[str, Any] = {name: copies[id(own)] for name, own in ours.items()}
        return replace(walk, **changed)


class _Again(_Rooms):
    """The same for steps that are repeated, in the memory of a trace that has been looked back through."""

    def __init__(self, oracle: Oracle):
        super().__init__(oracle)
        self._pool, self._step = oracle.rooms("y", 7), 0

    def of(self, walk: Walk, i: int = -1) -> Room:
        """For a step: it writes beside what the one before has written."""
        self._step = 1 - self._step
        z, average, point = (self._pool[k + self._step] for k in (0, 2, 4))
        return Room(self._one, self._two, self._pool[6], None, z, average, point)


def _walk(state: State, y: Tensor) -> Walk:
    if not state:
        return Walk.begin(y)
    walk = Walk.unpacked(state)
    return walk.anew(y) if "anew" in state else walk.moved_to(y)


def _inside(oracle: Oracle, y: Tensor) -> Tensor:
    bounds = oracle.problem.lower_bounds
    return y if bounds is None else bounds.project(y, oracle.problem.y)
