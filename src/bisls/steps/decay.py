"""A step that decays with k."""

from __future__ import annotations

from dataclasses import dataclass

from bisls._check import number, settle
from bisls.line import Line
from bisls.states import Fields, Kind
from bisls.steps.base import Memory, Step, StepRule, clock
from bisls.steps.constant import scheduled


@dataclass(frozen=True)
class Decay(StepRule):
    """step / (k + 1)^power: decaying gradient descent, and the ceiling gamma_bk of the paper's rules.

    Args:
        step: The first step, positive (inf is allowed where it serves as a bound).
        power: 0.5 for convex, 1 for strongly convex problems (Theorems 1 and 2); at least 0.

    Examples:
        >>> [Decay(2.0).bound(k) for k in (0, 3, 99)]
        [2.0, 1.0, 0.2]
    """

    step: float
    power: float = 0.5

    def __post_init__(self) -> None:
        settle(self, step=number("(0, inf]", "must be positive"), power=number("[0, inf)", "must be at least 0"))

    @property
    def scheduled(self) -> bool:
        """It is."""
        return True

    def bound(self, k: int) -> float:
        """The step at k = 0, 1, ..."""
        try:
            return self.step / float(k + 1) ** self.power
        except OverflowError:  # smaller than any number there is
            return 0.0

    def choose(self, line: Line, memory: Memory) -> Step:
        """The step at the memory's k; none where the loss or its slope is not finite."""
        return scheduled(self.bound(clock(line, memory)), line, memory)

    def blind(self, slope: float, k: int, memory: Memory) -> Step | None:
        """The step at k, which no value changes."""
        size = self.bound(k)
        return Step(size, memory.later(size))

    def keeps(self) -> Kind:
        """Nothing beside the step."""
        return Fields()
