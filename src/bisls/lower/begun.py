"""Lower steps from a start that x computes: how long they are is learnt from the upper loss."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from math import exp, inf, isfinite, log, sqrt

from torch import Tensor

from bisls._check import POSITIVE, optional, settle
from bisls.batches import Minibatches
from bisls.derivatives import Following
from bisls.line import Line
from bisls.lower.base import Effect, Lowered, State
from bisls.lower.loop import Loop
from bisls.oracle import Oracle
from bisls.pace import START
from bisls.states import Fields, Kind, Number, Whole
from bisls.steps.base import Memory, Step, StepRule
from bisls.steps.curvature import Curvature
from bisls.still import Moment
from bisls.vector import Vector

RATE = 0.1  # by so much of its logarithm a step changes in an iteration, at most; the k-th change may be one of 1 / k
EASE = 0.3  # where gradients grow on their way back: by so much of the logarithm of what is too much
SHORT, LONG = 0.9, 0.95  # how much of the slopes before is kept: of their mean, of their size
OUTLIER = 3.0  # a slope counts for at most so many times their size
SHORTEST, LEAST = 0.1, 1e-3  # of the first step, no shorter for f's sake, and in any case
NOTHING = {"n": 0, "mean": 0.0, "size": 0.0}  # what is known of slopes before the first


@dataclass(frozen=True)
class Held(StepRule):
    """One step for all: a part of what `Curvature` finds at its first call, until somebody changes what is remembered.

    Args:
        start: Where `Curvature` begins.
    """

    start: float | None = None

    def __post_init__(self) -> None:
        settle(self, start=optional(POSITIVE))

    @property
    def searches(self) -> bool:
        """It does, once."""
        return True

    def choose(self, line: Line, memory: Memory) -> Step:
        """The step that is remembered; at first a part of the one that suits this line."""
        if memory.step is not None:
            return Step(memory.step, memory.later())
        found = Curvature(self.start, watch=True).choose(line, memory)
        if found.memory.step is None:
            return found
        size = START * found.memory.step
        return replace(found, size=size, memory=Memory(memory.k + 1, size, {"first": size}))

    def blind(self, slope: float, k: int, memory: Memory) -> Step | None:
        """The step that is remembered."""
        return None if memory.step is None else Step(memory.step, memory.later())

    def keeps(self) -> Kind:
        """The first step."""
        return Fields(optional={"first": Number(0.0)})


@dataclass(frozen=True)
class Begun(Loop):
    """Steps of one size, from where ``lower_start`` says, in every iteration anew: that size is a variable of f as x is.

    f(x, y_T(x)) says by its slope whether shorter or longer steps would have been better for it, and the steps follow, by no more
    than a tenth an iteration. But x may as well follow the steps into places where g is so steep that they overshoot: f is
    hardly worse on average there, and its gradient says nothing any more, since it grows from step to step on its way back. So
    steps are shortened where that has become longer than 1 + 1 / sqrt(T) times what it was, whatever f says. Where it has not,
    none is shorter than a tenth of the first one: x may have left the place where they had to be.
    """

    rule: StepRule = field(default_factory=Held)

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
        """Make the steps, one for each batch."""
        found = super().descend(oracle, batches, y, k, state, trace=trace, replay=replay)
        return replace(found, learns=True, state={**found.state, "slopes": state.get("slopes", NOTHING)})

    def taught(self, state: State, effect: Effect) -> State:
        """Steps follow the slope of f by their logarithm, and are shorter where gradients grow on their way back."""
        memory, own = Memory.unpacked(state["memory"]), state["slopes"]
        if memory.step is None:
            return state
        n = own["n"] + 1
        usual = own["size"] / (1 - LONG ** own["n"]) if own["n"] else inf
        slope = min(max(effect.slope, -OUTLIER * usual), OUTLIER * usual)
        mean = SHORT * own["mean"] + (1 - SHORT) * slope
        size = LONG * own["size"] + (1 - LONG) * abs(slope)
        shorter = RATE * mean / (1 - SHORT**n) * (1 - LONG**n) / size if size > 0.0 else 0.0
        allowed, least = 1.0 + 1.0 / sqrt(effect.steps), SHORTEST
        if effect.growth > allowed:
            least = LEAST
            most = max(RATE, 1.0 / n)
            shorter = max(shorter, min(EASE * log(effect.growth / allowed), most) if isfinite(effect.growth) else most)
        step = max(memory.step * exp(-shorter), least * memory.notes.get("first", 0.0))
        learnt = {"n": n, "mean": mean, "size": size}
        return {**state, "memory": replace(memory, step=step).packed(), "slopes": learnt}

    def keeps(self, y: Vector | None) -> Fields:
        """What a loop keeps, and what is known of slopes."""
        slopes = Fields({"n": Whole(), "mean": Number(), "size": Number(0.0)})
        return Fields({**super().keeps(y).needed, "slopes": slopes}, empty=True)
