"""Line: a loss along a ray. All that a step rule ever sees."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import inf


@dataclass(frozen=True)
class Line:
    """A loss along a ray, ``phi(t) = loss(point - t d)``, on a frozen batch and a frozen random state.

    Attributes:
        value: phi(0).
        slope: phi'(0), that is ``-<gradient, d>``; negative where d descends.
        at: t -> phi(t), one evaluation without a gradient.
        max_step: No rule may go further than this along the ray (a ceiling, or the border of a box).
        clock: The k that schedules see, where it is not the number of calls (the outer iteration, for lower steps).
        eps: The relative spacing of the numbers that the loss is computed in (``torch.finfo(dtype).eps``).

    Examples:
        >>> line = Line(value=4.0, slope=-8.0, at=lambda t: 2.0 * (1.4142135 - 2.8284271 * t) ** 2)
        >>> round(line.at(0.5), 3)
        0.0
    """

    value: float
    slope: float
    at: Callable[[float], float]
    max_step: float = inf
    eps: float = 2.0**-52
    clock: int | None = None

    @property
    def rounding(self) -> float:
        """Values of the loss that differ by less than this are the same: four units in the last place."""
        return 4.0 * self.eps * abs(self.value)
