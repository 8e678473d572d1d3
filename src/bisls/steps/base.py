"""What a step rule takes and gives back, and bounds that change with k."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf, isfinite
from typing import Any, Protocol

from bisls.line import Line
from bisls.record import Status


@dataclass(frozen=True)
class Memory:
    """What a rule carries from one search to the next: plain numbers, so that it can be saved.

    Attributes:
        k: How many steps the rule has been asked for.
        step: The remembered step; None before the first.
        extra: Room for rules that remember more.
    """

    k: int = 0
    step: float | None = None
    extra: tuple[float, ...] = ()

    def later(self, step: float | None = None) -> Memory:
        """One step on; the remembered step replaced where one is given, kept otherwise."""
        return Memory(self.k + 1, self.step if step is None else step, self.extra)


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


class StepRule(Protocol):
    """Chooses a step along a line. It never knows which level it serves.

    A rule that often needs no value of the loss may also have ``blind(slope, k, memory)``: the step where it can be chosen
    without one, or None. Where a lower loop asks it, the loss is not evaluated.
    """

    def choose(self, line: Line, memory: Memory) -> Step:
        """The step for this line; ``memory`` is `Memory()` at the first call and the last step's memory afterwards."""
        ...


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


def is_bound(bound: Any, least: float = 0.0) -> bool:
    """Whether this can be used as a bound: None, a number above ``least``, or a schedule."""
    if bound is None or callable(getattr(bound, "bound", None)):
        return True
    return isinstance(bound, int | float) and not isinstance(bound, bool) and bound > least


def trouble(line: Line) -> Status | None:
    """Why no rule that looks at the line can use it, or None."""
    if not (isfinite(line.value) and isfinite(line.slope)):
        return Status.NON_FINITE
    if line.slope == 0.0:
        return Status.STATIONARY
    return Status.NOT_DESCENT if line.slope > 0.0 else None
