"""What trains the lower level, and what it hands over."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import inf
from typing import Any

import torch
from torch import Tensor

from bisls.batches import Minibatches
from bisls.line import Line
from bisls.oracle import LowerGraph, LowerPoint, MeanGraph, Oracle
from bisls.states import FREE, Kind
from bisls.status import Status
from bisls.still import Moment
from bisls.vector import Vector

State = Mapping[str, Any]  # numbers, tensors and mappings of these, so that it can be saved


@dataclass(frozen=True)
class TraceStep:
    """One lower step, as differentiating through it needs it: ``y <- y - D grad_y g(x, y; batch)``.

    Attributes:
        y: Where the gradient was taken.
        batch: On which batch.
        moment: With which random numbers; None where none are drawn.
        scale: D, the derivative of the step by the gradient, the state of the direction held still: a number, or one for each
            coordinate. None where the step can't be described like this.
    """

    y: Tensor
    batch: Any
    moment: Moment | None
    scale: Tensor | float | None


@dataclass(frozen=True)
class Lowered:
    """What a lower level did.

    Attributes:
        y: Where it ended; the parameters are there.
        step: The last step size taken; 0 where none was.
        steps: Number of steps taken.
        checks: Trial points.
        status: The most serious ending of a step.
        state: What the next one goes on from.
        accepted: The last step size taken in this or an earlier iteration; 0 before the first.
        first: Loss and gradient where it began, on the first batch; None where they were not finite.
        last: The same before the last step.
        promised: How much the loss would have fallen if it had followed its slopes.
        trace: The steps, where they were asked for.
    """

    y: Tensor
    step: float
    steps: int
    checks: int
    status: Status
    state: State
    accepted: float
    first: LowerPoint | None = field(default=None, repr=False)
    last: LowerPoint | None = field(default=None, repr=False)
    promised: float = 0.0
    trace: tuple[TraceStep, ...] = field(default=(), repr=False)

    def rose(self, oracle: Oracle, batches: Minibatches, ended: LowerGraph | MeanGraph, start: Tensor) -> bool:
        """Whether the loss ended above where it began by more than can be put down to rounding or noise.

        Without noise any rise counts that is larger than rounding. A step on a noisy batch may well raise the loss a little,
        so with noise it is looked at on the same batch and random numbers at both ends, and a rise counts if it is larger than
        the fall that the slopes promised.

        Args:
            oracle: Evaluates the lower loss.
            batches: The batches of the steps.
            ended: The loss where they ended, on the newest batch.
            start: Where they began.
        """
        if self.first is None or self.status is Status.ROUNDING:
            return False
        noisy = batches.several or ended.random

        def higher(began: float) -> bool:
            slack = self.promised if noisy else SEEN * ended.eps * max(abs(began), abs(ended.value))
            return ended.value - began > slack

        if not (higher(self.first.value) and noisy):
            return higher(self.first.value)
        with oracle.problem.y.lent(start):  # the graph is still needed
            return higher(oracle.lower_value(batches.newest, ended.moment))


class LowerPart(ABC):
    """Trains y: a loop of our own, or the user's optimiser.

    Attributes:
        settings: Numbers that may change from step to step, and must be the same on every rank when a run begins.
    """

    settings: Any = None

    @abstractmethod
    def descend(
        self,
        oracle: Oracle,
        batches: Minibatches,
        y: Tensor,
        k: int,
        state: State,
        *,
        trace: bool = False,
        replay: Moment | None = None,
    ) -> Lowered:
        """Train y on batches, one for each step, and write the result into the parameters.

        Args:
            oracle: Evaluates the lower loss.
            batches: One for each step.
            y: Where to begin.
            k: The outer iteration, for schedules.
            state: That of the last `Lowered`, or empty.
            trace: Hand over every step: it costs a copy of y for each.
            replay: Every evaluation is a probe with the random numbers of this moment.
        """

    def repeated(
        self, oracle: Oracle, batches: Minibatches, lowered: Lowered, y: Tensor, moment: Moment | None
    ) -> Tensor | None:
        """Where more steps like the last one lead from y at the present x, as probes; None where they are not finite.

        Nothing of it is remembered, so it can be asked at many x one after another.
        """
        again = self.descend(oracle, batches, y, 0, lowered.state, replay=moment)
        return None if again.status is Status.NON_FINITE else again.y

    def followed(self, state: State, before: Tensor, after: Tensor) -> State:
        """The state after y was moved from one point to another by somebody else, along with x."""
        return state

    def careful(self, state: State) -> State:
        """The state to go on from after values that were not finite."""
        return state

    def keeps(self, y: Vector | None) -> Kind:
        """What its state may be with these parameters, for one that is loaded; anything, where it does not say."""
        return FREE

    def checked(self, state: State) -> State:
        """A state that was read from a file, in the form that `descend` gives it; ValueError where it is none."""
        return state


def lower_line(
    oracle: Oracle, here: LowerPoint | LowerGraph, batch: Any, slope: float, point: Any, clock: int | None
) -> Line:
    """g along a ray of lower points, ``t -> point(t)``; a point that the parameters can't hold counts as infinite."""

    def at(t: float) -> float:
        y = point(t)
        if not oracle.problem.y.holds(y):
            return inf
        return oracle.lower_value(batch, here.moment, y)

    return Line(here.value, slope, at, eps=here.eps, clock=clock)


def moved(oracle: Oracle, y: Tensor, direction: Tensor, t: float) -> Tensor:
    """``y - t direction``, inside the bounds of y."""
    point = torch.add(y, direction, alpha=-t) if t < FAR else y - t * direction  # the first refuses what overflows
    bounds = oracle.problem.lower_bounds
    return point if bounds is None else bounds.project(point, oracle.problem.y)


SEEN = 1e3  # a rise of the lower loss counts from so many units in its last place on
FAR = 1e30  # no shorter step can lead out of the finite numbers
