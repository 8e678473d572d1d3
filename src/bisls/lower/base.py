"""What trains the lower level, and what it hands over."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import inf, isfinite, nan
from typing import Any, ClassVar

import torch
from torch import Tensor

from bisls.batches import Minibatches
from bisls.derivatives import Derivative, Following
from bisls.line import Line
from bisls.oracle import LowerGraph, LowerPoint, MeanGraph, Oracle
from bisls.ranks import on_any_rank
from bisls.states import FREE, Kind
from bisls.status import Status
from bisls.still import Moment
from bisls.vector import Vector, norm

State = Mapping[str, Any]  # numbers, tensors and mappings of these, so that it can be saved


@dataclass(frozen=True)
class TraceStep:
    """One lower step, as differentiating through it and repeating it need it.

    Attributes:
        y: Where the gradient was taken; None where nobody looks that far back.
        batch: On which batch.
        moment: With which random numbers; None where none are drawn.
        derivative: The step, to be gone back through; None where nobody knows it, or looks that far back.
        size: Its size.
        weight: The weight of its end in an average, where there is one.
    """

    y: Tensor | None
    batch: Any
    moment: Moment | None
    derivative: Derivative | None
    size: float = 0.0
    weight: float = 1.0


@dataclass(frozen=True)
class Effect:
    """What the lower steps do to f, as far as a method has seen it that looks back through them.

    Attributes:
        slope: The derivative of f by the logarithm of the steps' size; NaN where nobody knows it.
        growth: How many times as long the gradient of f by y is where the steps began as where they ended; NaN where that is
            not known, or does not go through the start into x.
        steps: How many steps that is seen through.
    """

    slope: float = nan
    growth: float = nan
    steps: int = 1


@dataclass(frozen=True)
class Began:
    """How a lower level began.

    Attributes:
        y: Where; None where ``lower_start`` says so, from x.
        state: In which state.
        moment: With which random numbers.
        k: In which outer iteration.
        batch: What ``lower_start`` was called with.
    """

    y: Tensor | None
    state: State
    moment: Moment
    k: int
    batch: Any = None

    def start(self, oracle: Oracle) -> Tensor:
        """Where the steps begin at the present x; within a probe of `moment`."""
        return oracle.start(self.batch).y if self.y is None else self.y


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
        first: The loss where it began, on the first batch; None where it was not finite, or is not known.
        alive: How many numbers of the gradient were not zero there, and before the last step; None where nobody has counted.
        left: The norm of the gradient before the last step; NaN where nobody knows it.
        learns: Whether the part learns from what the sizes of its steps do to f (`LowerPart.taught`).
        usual: The size of the loss where the run began; a loop that leads far above it is undone. None: nothing is.
        promised: How much the loss would have fallen if it had followed its slopes; None where nobody has added it up.
        trace: The steps, where they were asked for.
        began: Where, in which state, at which moment and in which iteration it began, for `LowerPart.rerun`.
    """

    y: Tensor
    step: float
    steps: int
    checks: int
    status: Status
    state: State
    accepted: float
    first: LowerPoint | LowerGraph | None = field(default=None, repr=False)
    alive: tuple[int, int] | None = None
    left: float = nan
    learns: bool = False
    promised: float | None = None
    usual: float | None = None
    trace: tuple[TraceStep, ...] = field(default=(), repr=False)
    began: Began | None = field(default=None, repr=False)

    @property
    def beginning(self) -> Began:
        """How it began, where somebody is to repeat it: a solver has said so."""
        assert self.began is not None
        return self.began

    def rose(self, oracle: Oracle, batches: Minibatches, ended: Ended, start: Tensor) -> bool:
        """Whether the loss ended above where it began by more than can be put down to rounding or noise.

        Without noise any rise counts that is larger than rounding. A step on a noisy batch may well raise the loss a little,
        so with noise it is looked at on the same batch and random numbers at both ends, and a rise counts if it is larger than
        the fall that the slopes promised. What a part does not say (`first`, `promised`) is evaluated here.

        Args:
            oracle: Evaluates the lower loss.
            batches: The batches of the steps.
            ended: The loss where they ended.
            start: Where they began.
        """
        if self.status is Status.ROUNDING:
            return False
        noisy = batches.several or bool(ended.random)
        if self.first is not None:
            slack = self.promised if noisy else None
            slack = ended.rounding(oracle, self.first.value) if slack is None else slack
            if not ended.value - self.first.value > slack:
                return False
            if not noisy and ended.random is not None:
                return True
        with oracle.problem.y.lent(start):  # a graph at the end is still needed
            began = oracle.lower_value(ended.batch, ended.moment)
            rise, promised = ended.value - began, self.promised
            if not rise > ended.rounding(oracle, began):
                return False
            if not noisy and ended.random is None:
                noisy = _draws(oracle, ended)
            if noisy and promised is None:  # the most that a slope as steep as those here could say of so long a way
                promised = 2.0 * _steepness(oracle, batches, ended) * norm(start - self.y)
            return not noisy or promised is None or rise > promised

    def lost(self, oracle: Oracle, ended: Ended, start: Tensor) -> bool:
        """Whether the steps led astray, so that they had better be undone.

        The loss rose by more than all of the loss that the run began with; or it did not fall, and nine of ten gradients have
        become exactly zero (a dead model). It is looked at on the same batch and random numbers at both ends.

        Args:
            oracle: Evaluates the lower loss.
            ended: The loss where they ended.
            start: Where they began.
        """
        if self.usual is None or self.first is None or self.alive is None:
            return False
        dead = self.alive[1] < ALIVE * self.alive[0]
        if not dead and ended.value - self.first.value <= self.usual / 2:  # far from it: one value is spared
            return False
        with oracle.problem.y.lent(start):
            began = oracle.lower_value(ended.batch, ended.moment)
        rise = ended.value - began
        return (dead and rise >= 0.0) or rise > max(self.usual, abs(began)) > 0.0


@dataclass(frozen=True)
class Ended:
    """The lower loss where the steps ended.

    Attributes:
        value: The loss.
        batch: On which batch.
        moment: With which random numbers.
        random: Whether any were drawn; None where that is not known.
    """

    value: float
    batch: Any
    moment: Moment | None
    random: bool | None = None

    @staticmethod
    def at(oracle: Oracle, batches: Minibatches, graph: LowerGraph | MeanGraph | None) -> Ended:
        """At the present y: what the graph there knows, or one value more."""
        if graph is not None:
            return Ended(graph.value, graph.batch, graph.moment, graph.random)
        moment = oracle.problem.moment()
        return Ended(oracle.lower_value(batches.newest, moment), batches.newest, moment)

    def rounding(self, oracle: Oracle, began: float) -> float:
        """The largest difference between this value and an earlier one that may be rounding."""
        return SEEN * oracle.precision("lower_loss", self.batch) * max(abs(began), abs(self.value))


def _draws(oracle: Oracle, ended: Ended) -> bool:
    """Whether the loss draws random numbers, on any rank: one evaluation without a trace."""
    with oracle.problem.probing(ended.moment):
        before = oracle.problem.moment()
        oracle.lower(ended.batch)
        return on_any_rank(before.passed)[0]


def _steepness(oracle: Oracle, batches: Minibatches, ended: Ended) -> float:
    """The mean norm of the gradient at the present y over a few of the batches, or draws: without a trace."""
    chosen = [batches[-1 - i] for i in range(min(len(batches), SAMPLED))]
    with oracle.problem.probing(ended.moment):
        return sum(norm(oracle.lower(batch).grad) for batch in chosen) / len(chosen)


class LowerPart(ABC):
    """Trains y: a loop of our own, or the user's optimiser.

    Attributes:
        restarts: Whether y may begin again, or go back, with shorter steps: they are its own to choose.
        solves_kinks: Whether it brings y to exactly 0 where an L1 term (``Bilevel(lower_l1=...)``) holds it.
        settings: Numbers that may change from step to step, and must be the same on every rank when a run begins.
    """

    restarts: ClassVar[bool] = False
    solves_kinks: ClassVar[bool] = False
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
        trace: Following | bool = False,
        replay: Moment | None = None,
    ) -> Lowered:
        """Train y on batches, one for each step, and write the result into the parameters.

        Args:
            oracle: Evaluates the lower loss.
            batches: One for each step.
            y: Where to begin.
            k: The outer iteration, for schedules.
            state: That of the last `Lowered`, or empty.
            trace: Hand over every step: it costs a copy of y for each. What of the optimiser's state will be differentiated, or
                True for what is usual.
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

    def rerun(self, oracle: Oracle, batches: Minibatches, lowered: Lowered) -> Tensor | None:
        """Where the same steps lead at the present x: from the same start, on the same batches and random numbers.

        A part whose steps have sizes takes them as they were. Nothing of it is remembered; None where it is not finite.
        """
        began = lowered.beginning
        with oracle.problem.probing(began.moment):
            again = self.descend(oracle, batches, began.start(oracle), began.k, began.state)
        return None if again.status is Status.NON_FINITE else again.y

    def anew(self, state: State) -> State:
        """The state to go on from where y begins anew: what it learnt of steps may stay, what belongs to a path may not."""
        return state

    def shortened(self, state: State) -> State:
        """The state to begin once more in, at the start and with shorter steps, after a first loop, where it `restarts`."""
        return state

    def calmed(self, state: State) -> State:
        """The state with shorter steps, after the upper loss has risen and y went back, where it `restarts`."""
        return state

    def taught(self, state: State, effect: Effect) -> State:
        """The state after it was seen what the size of the steps does to the upper loss; most parts do not learn so."""
        return state

    def followed(self, state: State, before: Tensor, after: Tensor) -> State:
        """The state after y was moved from one point to another by somebody else, along with x."""
        return state

    def careful(self, state: State) -> State:
        """The state to go on from after values that were not finite."""
        return state

    def saved(self, state: State) -> State:
        """The state as a file is to have it, with what somebody has changed since."""
        return state

    def keeps(self, y: Vector | None) -> Kind:
        """What its state may be with these parameters, for one that is loaded; anything, where it does not say."""
        return FREE

    def checked(self, state: State) -> State:
        """A state that was read from a file, in the form that `descend` gives it; ValueError where it is none."""
        return state


def told(part: LowerPart, lowered: Lowered, y: Tensor, effect: Effect, returned: bool) -> State:
    """The state of a part after the upper step.

    Args:
        part: What trains y.
        lowered: What it did.
        y: Where y is now.
        effect: What the size of the steps does to the upper loss.
        returned: Whether y went back to where the upper loss was lowest.
    """
    state = part.followed(lowered.state, lowered.y, y)
    if returned:
        return part.calmed(state)
    return part.taught(state, effect) if isfinite(effect.slope) else state


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


def stepped(y: Tensor, direction: Tensor, t: float) -> Tensor:
    """``y - t direction``, wherever that is."""
    return torch.add(y, direction, alpha=-t) if t < FAR else y - t * direction  # the first refuses what overflows


def freed(oracle: Oracle, grad: Tensor, y: Tensor) -> Tensor:
    """The gradient with 0 where y sits on a bound that a step would cross: nothing moves there, so no slope counts."""
    bounds = oracle.problem.lower_bounds
    held = None if bounds is None else bounds.held(y, grad, oracle.problem.y)
    return grad if held is None else grad.masked_fill(held, 0.0)


def moved(oracle: Oracle, y: Tensor, direction: Tensor, t: float) -> Tensor:
    """``y - t direction``, inside the bounds of y."""
    point, bounds = stepped(y, direction, t), oracle.problem.lower_bounds
    return point if bounds is None else bounds.project(point, oracle.problem.y)


SAMPLED = 4  # on so many batches the noise of a part that promises nothing is measured
ALIVE = 0.1  # a model with a smaller part of its gradients left is dead
SEEN = 1e3  # a rise of the lower loss counts from so many units in its last place on
FAR = 1e30  # no shorter step can lead out of the finite numbers
