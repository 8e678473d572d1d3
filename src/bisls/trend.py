"""Whether a noisy row of numbers has been rising for long."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from math import inf, isfinite, sqrt
from typing import Any, ClassVar

from bisls.states import Fields, Number, Whole

WINDOW = 20  # the running mean is over about so many
PATIENCE = 30  # the mean must be too high so many times in a row
FAR = 8.0  # too high: above its lowest level by so many of its own standard deviations


@dataclass(frozen=True)
class Trend:
    """The running mean of a row of numbers, the lowest it has been, and for how long it has been clearly above that.

    Examples:
        >>> trend = Trend()
        >>> for k in range(200):
        ...     trend = trend.with_value(10.0 - 0.01 * k)
        >>> trend.risen
        False
        >>> for k in range(200):
        ...     trend = trend.with_value(8.0 + 0.01 * k)
        >>> trend.risen
        True
    """

    KIND: ClassVar[Fields] = Fields(
        {
            "n": Whole(),
            "mean": Number(),
            "variance": Number(0.0),
            "lowest": Number(infinite=True),
            "above": Whole(),
        }
    )

    n: int = 0
    mean: float = 0.0
    variance: float = 0.0
    lowest: float = inf
    above: int = 0

    def with_value(self, value: float) -> Trend:
        """With the next number; one that is not finite says nothing."""
        if not isfinite(value):
            return self
        n = self.n + 1
        rate = max(1.0 / n, 1.0 / WINDOW)
        away = value - self.mean if n > 1 else 0.0
        mean = self.mean + rate * away if n > 1 else value
        variance = self.variance + rate * (away * away - self.variance)
        if not isfinite(mean):  # numbers so far apart that their difference is none: it begins anew
            return Trend()
        if n < WINDOW or not isfinite(variance):
            return Trend(n, mean, variance if isfinite(variance) else 0.0)
        lowest = min(self.lowest, mean)
        high = mean > lowest + FAR * sqrt(variance * rate / (2.0 - rate)) + 1e-6 * abs(lowest)
        return Trend(n, mean, variance, lowest, self.above + 1 if high else 0)

    @property
    def risen(self) -> bool:
        """Whether it has."""
        return self.above >= PATIENCE

    def packed(self) -> dict[str, Any]:
        """Plain numbers, for a checkpoint."""
        return asdict(self)

    @classmethod
    def unpacked(cls, state: Mapping[str, Any]) -> Trend:
        """What `packed` gave."""
        return cls(**state)
