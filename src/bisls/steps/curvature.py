"""A step from the mean curvature along the rays: one trial now and then, no search."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf, isfinite, isnan

from bisls._check import FLAG, POSITIVE, number, optional, settle, whole_number
from bisls.line import Line
from bisls.states import Fields, Kind, Number
from bisls.status import Status
from bisls.steps.base import Memory, Step, StepRule, trouble

LEAST = 1e-290  # shorter steps are not measured: one over them would not be a number
FAR = 50  # a search for the scale that has doubled its trials so often begins anew, from the loss and its slope
FADE = 0.97  # how fast the largest squared gradient of late is forgotten, a call


@dataclass(frozen=True)
class Curvature(StepRule):
    """``t = 1 / m``, m the running mean of the curvature along the rays.

    A trial at t shows the curvature of the line, ``q = 2 (phi(t) - phi(0) - t phi'(0)) / (t^2 |phi'(0)|)``; for steepest descent
    it lies between the smallest and the largest curvature of the loss. The mean of q over many batches is that of the
    full loss along typical gradients; a search would follow the single batch instead. The first call finds the scale, from
    any start: it shortens the trial until the parabola holds, then doubles it for as long as t <= 1/q.

    Args:
        start: Where the first call begins; positive, or None for the size of the loss over the squared gradient. What it finds
            hardly depends on it.
        trials: Every one of the first calls measures, this many of them; at least 1.
        every: Afterwards one call in so many does; at least 1.
        recent: The least weight of a new measurement in the mean, in [0, 1]: 0 is the plain mean of all.
        watch: For iterates that nobody averages: a call whose squared gradient is more than twice the largest of late measures at
            once; a trial that does not lower the loss is shortened until it does, and believed; and a gradient
            too small for any trial to show its curvature gives no step.

    Examples:
        >>> from bisls.line import Line
        >>> from bisls.steps.base import Memory
        >>> line = Line(value=8.0, slope=-64.0, at=lambda t: 8.0 * (1 - 4 * t) ** 2)  # curvature 4
        >>> steps = [Curvature(start=start).choose(line, Memory()).size for start in (1e-6, 1.0, 1e6)]
        >>> all(0.12 < step <= 0.25 for step in steps)
        True
    """

    start: float | None = 1.0
    trials: int = 30
    every: int = 10
    recent: float = 0.0
    watch: bool = False

    def __post_init__(self) -> None:
        settle(self, start=optional(POSITIVE), trials=whole_number(1), every=whole_number(1))
        settle(self, recent=number("[0, 1]"), watch=FLAG)

    @property
    def searches(self) -> bool:
        """It does, now and then."""
        return True

    def choose(self, line: Line, memory: Memory) -> Step:
        """The step; it is measured anew where a trial is due."""
        problem = trouble(line)
        if problem is not None:
            return Step(0.0, memory.later(), status=problem)
        if memory.step is None:
            return self._begin(line, memory)
        memory, due = self._noted(line.slope, memory)
        size, count = min(memory.step or inf, line.max_step), memory.notes.get("count", 1.0)
        if not due or size < LEAST:
            return Step(size, memory.later())
        q, value = self._measure(line, size)
        if q is None:
            return Step(size, memory.later(), 1, Status.ROUNDING, value)
        # one batch may not halve the mean, nor raise it by more than ten; negative curvature counts as little
        m, weight, checks = 1.0 / (memory.step or size), max(1.0 / (count + 1), self.recent), 1
        while self.watch and q * size >= 2.0 and checks < 50:
            size = max(1.0 / q, 0.1 * size)
            if size < LEAST:
                return Step(0.0, memory.later(), checks, Status.NON_FINITE if not isfinite(value) else Status.CAPPED)
            shown, value = self._measure(line, size)
            q, m, weight, checks = shown or 1.0 / size, 1.0 / size, 1.0, checks + 1
        m += weight * (min(max(q, 0.5 * m), 10.0 * m) - m)
        found = 1.0 / max(m, 1e-300)
        later = Memory(memory.k + 1, found, {**memory.notes, "count": count + 1})
        return Step(min(found, line.max_step), later, checks)

    def blind(self, slope: float, k: int, memory: Memory) -> Step | None:
        """The step where none is measured, so that the loss need not be evaluated; None where one is."""
        if memory.step is None or not slope < 0:
            return None
        memory, due = self._noted(slope, memory)
        return None if due else Step(memory.step or 0.0, memory.later())

    def keeps(self) -> Kind:
        """How many measurements the mean is over, and the largest squared gradient of late."""
        return Fields(optional={"count": Number(1.0), **({"peak": Number(0.0)} if self.watch else {})})

    def _noted(self, slope: float, memory: Memory) -> tuple[Memory, bool]:
        """The memory with the largest squared gradient of late, and whether to measure."""
        count, peak = memory.notes.get("count", 1.0), memory.notes.get("peak", inf)
        jumped = self.watch and -slope > 2.0 * peak
        peak = -slope if peak == inf else max(-slope, FADE * peak)
        due = memory.k < self.trials or memory.k % self.every == 0 or jumped
        return memory.noting(count=count, peak=peak) if self.watch else memory.noting(count=count), due

    def _begin(self, line: Line, memory: Memory) -> Step:
        # a line without curvature would be followed for ever; no loss that stays above 0 can go on falling beyond this
        most = min(line.max_step, 1e300)
        limit = min(most, 4.0 * (abs(line.value) or 1.0) / max(-line.slope, 1e-300))
        start = self.start or (abs(line.value) or 1.0) / max(-line.slope, 1e-300)
        t, inside, finite, shown = min(start, limit), False, False, not self.watch
        if t < LEAST:  # a loss so small beside its slope that no step is a number
            return Step(0.0, memory.later(), status=Status.STATIONARY)
        for checks in range(1, 101):
            if checks == FAR and inside:  # the start was far too short: the size of the loss says more
                t, inside = max(t, limit / 4), False
            q, value = self._measure(line, t)
            finite, shown = finite or isfinite(value), shown or q is not None
            fits = inf if q is None else 1.0 / max(q, 1e-300)
            if not inside and fits < 4 * t:
                # six, not a power of two: doubling must not come back to 1/q itself, where rounding would decide
                t = max(min(fits, t) / 6, t / 100)
            elif fits >= t and t < limit:
                inside, t = True, min(2 * t, limit)
            elif fits >= t and q is not None and limit < most and self._bends(line, t, value):
                # a loss that falls below 0: there is curvature, so doubling has an end
                inside, limit = True, min(1e3 * limit, most)
                t = min(2 * t, limit)
            else:
                hidden = self.watch and fits < t / 2 and -line.slope * t / 2 <= 2 * line.rounding
                if not shown or hidden:
                    return Step(0.0, memory.later(), checks, Status.ROUNDING)
                t = t / 2 if fits < t else t
                return Step(t, Memory(memory.k + 1, t, {"count": 1.0}), checks)
            if t == 0.0:
                break
        return Step(0.0, memory.later(), checks, Status.CAPPED if finite else Status.NON_FINITE)

    def _bends(self, line: Line, t: float, value: float) -> bool:
        """Whether the value at t shows an upward curvature above its rounding."""
        return value - line.value - t * line.slope > 8.0 * line.eps * max(abs(value), abs(line.value))

    def _measure(self, line: Line, t: float) -> tuple[float | None, float]:
        """The curvature that a trial at t shows, None where rounding hides it, and the value there."""
        value = line.at(t)
        if not isfinite(value):
            return 10.0 / t, value
        if -line.slope * t <= 2 * line.rounding:
            return None, value
        q = 2 * ((value - line.value) / (t * -line.slope) + 1.0) / t
        return (10.0 / t if isnan(q) else q), value
