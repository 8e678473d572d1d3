"""Curves from records: the mean over seeds with the range of all seeds around it, or the median with the middle half."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from bisls.experiments.base import RunRecord
from bisls.outcome import Series


def curve(
    label: str,
    records: Sequence[RunRecord],
    y: str,
    x: str | None = "k",
    *,
    ours: bool = False,
    dashed: bool = False,
    points: bool = False,
    smooth: int = 1,
    typical: bool = False,
) -> Series:
    """One curve for the runs of several seeds.

    Args:
        label: Its name.
        records: One run for each seed.
        y: Which curve of the records.
        x: Which curve has the x values; None counts 1, 2, 3, ...
        ours: Whether it is this package's default.
        dashed: Whether it is a reference line.
        points: Draw marks.
        smooth: Average over so many neighbours (for step sizes and checks, which jump).
        typical: The median with the middle half, for many seeds of problems that differ: their range would cover all.
    """
    longest = max((len(record.curves[y]) for record in records), default=0)
    if not longest:  # runs that were lost before their first value
        return Series(label, (), (), ours=ours, dashed=dashed, points=points)
    values = np.full((len(records), longest), np.nan)
    for row, record in zip(values, records, strict=True):
        found = record.curve(y)
        row[: len(found)] = np.where(np.isfinite(found), found, np.nan)
    if smooth > 1:
        edges = np.array_split(np.arange(longest), max(1, longest // smooth))
        values = np.stack([_mean(values[:, edge]) for edge in edges], axis=1)
        places = np.array([edge.mean() + 1 for edge in edges])
    elif x is None:
        places = np.arange(1, longest + 1, dtype=float)
    else:
        places = max((record.curve(x) for record in records), key=len)
    middle = np.where(
        np.isnan(values).any(axis=0), np.nan, np.median(values, axis=0) if typical else values.mean(axis=0)
    )
    low, high = np.quantile(values, (0.25, 0.75), axis=0) if typical else (values.min(axis=0), values.max(axis=0))
    several = len(records) > 1
    return Series(
        label,
        tuple(places.tolist()),
        tuple(middle.tolist()),
        tuple(low.tolist()) if several else None,
        tuple(high.tolist()) if several else None,
        ours=ours,
        dashed=dashed,
        points=points,
    )


def _mean(values: np.ndarray) -> np.ndarray:
    """The mean of each row but for its gaps, and a gap where there is nothing else."""
    there = ~np.isnan(values)
    return np.where(there.any(axis=1), np.nansum(values, axis=1) / np.maximum(there.sum(axis=1), 1), np.nan)


def dots(
    label: str, x: Sequence[float | str], groups: Sequence[Sequence[float]], *, ours: bool = False, dashed: bool = False
) -> Series:
    """One value for each x: the mean of a group, with its range; a value that is not finite leaves a gap."""
    finite = [[v if np.isfinite(v) else float("nan") for v in group] for group in groups]
    several = any(len(group) > 1 for group in groups)
    return Series(
        label,
        tuple(x),
        tuple(float(np.mean(group)) for group in finite),
        tuple(float(np.min(group)) for group in finite) if several else None,
        tuple(float(np.max(group)) for group in finite) if several else None,
        ours=ours,
        dashed=dashed,
        points=True,
    )


def begun(series: Sequence[Series]) -> float:
    """The highest of the first values of all curves."""
    first = [next((value for value in one.y if np.isfinite(value)), 0.0) for one in series]
    return max(first, default=0.0) or 1.0


def limits(series: Sequence[Series], top: float) -> tuple[float, float]:
    """The range of a y axis from a little below the smallest value up to ``top``, beyond which runs that diverge are cut off.

    Examples:
        >>> limits([Series("a", (1.0, 2.0), (0.5, 0.25)), Series("b", (1.0, 2.0), (float("nan"), 1e9))], 3.0)
        (0.2, 3.0)
        >>> limits([Series("a", (1.0, 2.0), (0.5, 0.25))], 3.0)  # nothing to be cut off, and no room for nothing
        (0.2, 0.625)
    """
    drawn = [value for one in series for value in (*one.y, *(one.low or ()), *(one.high or ()))]
    values = [value for value in drawn if np.isfinite(value) and value > 0]
    top = min(top, 1.25 * max(values, default=top))
    return min(0.8 * min(values, default=top), 0.5 * top), top


def not_above_start(series: Sequence[Series]) -> tuple[float, float]:
    """The range of a y axis for losses: no higher than a third above where they began, whatever diverges later."""
    return limits(series, 1.3 * begun(series))
