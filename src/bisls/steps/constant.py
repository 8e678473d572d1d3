"""The same step always."""

from __future__ import annotations

from dataclasses import dataclass
from math import isfinite

from bisls._check import POSITIVE, settle
from bisls.line import Line
from bisls.states import Fields, Kind
from bisls.status import Status
from bisls.steps.base import Memory, Step, StepRule


@dataclass(frozen=True)
class Constant(StepRule):
    """The same step always: plain gradient descent.

    Args:
        step: A positive number.

    Examples:
        >>> from bisls.line import Line
        >>> Constant(0.1).choose(Line(3.0, -2.0, at=float), Memory()).size
        0.1
    """

    step: float

    def __post_init__(self) -> None:
        settle(self, step=POSITIVE)

    @property
    def scheduled(self) -> bool:
        """It is."""
        return True

    def bound(self, k: int) -> float:
        """The step at k: always the same."""
        return self.step

    def choose(self, line: Line, memory: Memory) -> Step:
        """The step; none where the loss or its slope is not finite."""
        return scheduled(self.step, line, memory)

    def blind(self, slope: float, k: int, memory: Memory) -> Step | None:
        """The step, which no value changes."""
        return Step(self.step, memory.later(self.step))

    def keeps(self) -> Kind:
        """Nothing beside the step."""
        return Fields()


def scheduled(size: float, line: Line, memory: Memory) -> Step:
    """A step that was settled beforehand, unless the line is not finite or does not reach that far."""
    size = min(size, line.max_step)
    if not (isfinite(line.value) and isfinite(line.slope) and isfinite(size)):
        return Step(0.0, memory.later(), status=Status.NON_FINITE)
    return Step(size, memory.later(size))
