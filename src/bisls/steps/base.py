"""What a step rule takes and gives back, and bounds that change with k."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from math import inf, isfinite
from typing import Any, Protocol

from bisls._check import Wanted, number
from bisls.line import Line
from bisls.states import Fields, Kind, Maybe, Number, Whole
from bisls.status import Status


@dataclass(frozen=True)
class Memory:
    """What a rule carries from one search to the next: plain numbers, so that it can be saved.

    Attributes:
        k: How many steps the rule has been asked for.
        step: The remembered step; None before the first.
        notes: What else the rule remembers, by name.
    """

    k: int = 0
    step: float | None = None
    notes: Mapping[str, float] = field(default_factory=dict)

    def later(self, step: float | None = None) -> Memory:
        """One step on; the remembered step replaced where one is given, kept otherwise."""
        return Memory(self.k + 1, self.step if step is None else step, self.notes)

    def noting(self, **notes: float) -> Memory:
        """With these notes in place of all others."""
        return Memory(self.k, self.step, notes)

    def shortened(self) -> Memory:
        """The remembered step a tenth as long: the last one led to values that are not finite."""
        return self if self.step is None else Memory(self.k, 0.1 * self.step, self.notes)

    def packed(self) -> dict[str, Any]:
        """Plain numbers, for a checkpoint."""
        return {"k": self.k, "step": self.step, "notes": dict(self.notes)}

    @classmethod
    def unpacked(cls, state: Mapping[str, Any]) -> Memory:
        """What `packed` gave; an empty state is that of a rule that was never asked."""
        if not state:
            return cls()
        step = state["step"]
        notes = {str(name): float(value) for name, value in state["notes"].items()}
        return cls(int(state["k"]), None if step is None else float(step), notes)

    @staticmethod
    def kind(rule: StepRule) -> Fields:
        """What `packed` gives with a rule."""
        return Fields({"k": Whole(), "step": Maybe(Number(0.0)), "notes": rule.keeps()}, empty=True)


@dataclass(frozen=True)
class Step:
    """The answer of a step rule.

    Attributes:
        size: The step t; 0 where none can be taken. Always finite and never negative.
        memory: To be given back at the next call.
        checks: How often the loss was evaluated along the ray.
        status: How it ended.
        value: The loss at the step, where the rule has seen it.
    """

    size: float
    memory: Memory
    checks: int = 0
    status: Status = Status.OK
    value: float | None = None


class StepRule(ABC):
    """Chooses a step along a line. It never knows which level it serves.

    One method is needed, `choose`; the rest says what else a rule can do, and a rule that wraps another one forwards it.
    """

    @abstractmethod
    def choose(self, line: Line, memory: Memory) -> Step:
        """The step for this line; ``memory`` is `Memory()` at the first call and the last step's memory afterwards."""

    @property
    def scheduled(self) -> bool:
        """Whether the step is settled beforehand, whatever the line looks like."""
        return False

    @property
    def searches(self) -> bool:
        """Whether the loss is evaluated at trial points along the line."""
        return False

    @property
    def rests(self) -> bool:
        """Whether the rule can do without a search for an iteration, by `rest`."""
        return False

    def rest(self, line: Line, memory: Memory) -> Step:
        """The step of an iteration without a search."""
        return self.choose(line, memory)

    def blind(self, slope: float, k: int, memory: Memory) -> Step | None:
        """The step at clock k where the rule needs no value of the loss for it, so that none is computed; None where it does."""
        return None

    def keeps(self) -> Kind:
        """What the notes of its memory may be, for a state that is loaded; any numbers, where a rule does not say."""
        return Fields(rest=Number(any_value=True))


class Schedule(Protocol):
    """A bound that depends on k alone: `Constant` and `Decay` are schedules, and a plain number stands for `Constant`."""

    def bound(self, k: int) -> float:
        """The bound at step k = 0, 1, ..."""
        ...


def clock(line: Line, memory: Memory) -> int:
    """The k that schedules see."""
    return memory.k if line.clock is None else line.clock


def bound_at(bound: float | Schedule | None, k: int, missing: float = inf) -> float:
    """The value of a bound at step k: a number, a schedule, or none."""
    if bound is None:
        return missing
    return bound if isinstance(bound, int | float) else bound.bound(k)


@cache
def bound_kind(rule: str, within: str = "(0, inf]") -> Wanted:
    """What can be used as a bound: None, a number in the interval, or a schedule."""
    plain = number(within, rule)

    def read(bound: Any) -> Any:
        if bound is None or (callable(getattr(bound, "bound", None)) and not isinstance(bound, type)):
            return bound
        return plain.read(bound)

    return Wanted(rule, read)


def trouble(line: Line) -> Status | None:
    """Why no rule that looks at the line can use it, or None."""
    if not (isfinite(line.value) and isfinite(line.slope)):
        return Status.NON_FINITE
    if line.slope == 0.0:
        return Status.STATIONARY
    return Status.NOT_DESCENT if line.slope > 0.0 else None
