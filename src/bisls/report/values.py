"""What can be drawn of a panel: numbers that are finite, and not too many of them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from bisls.outcome import Panel

Array = np.ndarray
LONG = 2000  # beyond as many values a curve is thinned
KEPT = 800
HUGE = 1e250  # axes can't span more; such a value is a gap


def _number(value: Any) -> float | None:
    """The value as a float; None where it is a name."""
    if value is None:
        return math.nan
    try:
        return float(value)
    except ValueError:
        return None


@dataclass(frozen=True)
class Values:
    """What can be drawn of a panel: the names along its x axis (none where it has numbers), and arrays for each series."""

    names: list[str]
    points: list[tuple[Array, Array]]

    @classmethod
    def of(cls, panel: Panel) -> Values:
        """Those of a panel."""
        named = panel.bars or any(_number(value) is None for series in panel.series for value in series.x)
        ticks = [[_tick(value) for value in series.x] if named else [] for series in panel.series]
        names = list(dict.fromkeys(tick for row in ticks for tick in row))
        points = []
        for series, row in zip(panel.series, ticks, strict=True):
            n = min(len(series.x), len(series.y))
            numbers = [names.index(tick) for tick in row] if named else series.x
            x = numeric(numbers, n, panel.xscale == "log" and not named)
            y = numeric(series.y, n, panel.yscale == "log")
            points.append((x, np.where(np.isfinite(x), y, np.nan)))
        return cls(names, points)

    def drawable(self, i: int) -> bool:
        """Whether anything of the series can be drawn."""
        return bool(np.isfinite(self.points[i][1]).any())

    def single(self, i: int) -> bool:
        """Whether the series is one point."""
        return int(np.isfinite(self.points[i][1]).sum()) == 1

    @property
    def any(self) -> bool:
        """Whether there is anything to draw."""
        return any(map(self.drawable, range(len(self.points))))


def _tick(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def numeric(values: Sequence[Any], n: int, positive: bool) -> Array:
    """The first n values, nan where they can't be drawn."""
    array = np.full(n, np.nan)
    found = [math.nan if (number := _number(value)) is None else number for value in values[:n]]
    array[: len(found)] = found
    with np.errstate(invalid="ignore"):
        bad = ~np.isfinite(array) | (np.abs(array) > HUGE) | ((array <= 0) if positive else False)
    return np.where(bad, np.nan, array)


def names_of(panel: Panel, values: Values) -> list[str]:
    """The series' names; those that can't be drawn say why."""
    made = []
    for i, series in enumerate(panel.series):
        if values.drawable(i):
            why = ""
        elif not len(values.points[i][1]):
            why = " (no values)"
        elif panel.yscale == "log" and np.isfinite(numeric(series.y, len(series.y), False)).any():
            why = " (no value above 0)"
        else:
            why = " (not finite)"
        made.append(series.label + why)
    return made


def thin(y: Array, limit: int = KEPT) -> Array:
    """The places of the values to draw: of each stretch the least, the greatest and the first gap, and both ends.

    Examples:
        >>> y = np.zeros(10_000)
        >>> y[7123], y[8999] = 5.0, np.nan
        >>> kept = thin(y)
        >>> 7123 in kept, 8999 in kept, len(kept) < 1000
        (True, True, True)
    """
    if len(y) <= LONG:
        return np.arange(len(y))
    size = math.ceil(len(y) / (limit // 2))
    stretches = np.append(y, np.full(-len(y) % size, np.nan)).reshape(-1, size)
    finite = np.isfinite(stretches)
    places = [
        np.where(finite, stretches, np.inf).argmin(axis=1),
        np.where(finite, stretches, -np.inf).argmax(axis=1),
        (~finite).argmax(axis=1),
    ]
    starts = np.arange(len(stretches)) * size
    kept = np.unique(np.concatenate([starts + place for place in places] + [[0, len(y) - 1]]))
    return kept[kept < len(y)]
