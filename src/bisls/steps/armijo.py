"""Armijo line search: how it starts, how it shrinks, and when it says that it cannot tell."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import ceil, inf, isfinite, log

from bisls._check import FINITE, FLAG, POSITIVE, either, instance, number, optional, require, settle, whole_number
from bisls.line import Line
from bisls.states import Fields, Kind, Number
from bisls.status import Status
from bisls.steps.base import Memory, Schedule, Step, StepRule, bound_at, bound_kind, clock, trouble


@dataclass(frozen=True)
class Restart:
    """Begin every search at ``start`` (the paper's reset option 1)."""

    factor = None


@dataclass(frozen=True)
class Keep:
    """Begin at the step found last (the paper's reset option 2): steps never grow."""

    factor = 1.0


@dataclass(frozen=True)
class Grow:
    """Begin at eta times the step found last (the paper's reset option 3).

    Args:
        eta: At least 1.
    """

    eta: float = 2.0

    def __post_init__(self) -> None:
        settle(self, eta=number("[1, inf)", "must be at least 1"))

    @property
    def factor(self) -> float:
        """By how much to lengthen the remembered step."""
        return self.eta


@dataclass(frozen=True)
class Backtrack:
    """Multiply the step by a fixed factor (the paper's w).

    Args:
        factor: In (0, 1).
    """

    factor: float = 0.9

    def __post_init__(self) -> None:
        settle(self, factor=number("(0, 1)"))

    @property
    def slowest(self) -> float:
        """The largest factor by which a failed check may shorten the step."""
        return self.factor

    def shorten(self, line: Line, t: float, value: float) -> float:
        """The next trial after the value at t failed; one that is not finite says nothing, so it shortens by ten."""
        return t * (self.factor if isfinite(value) else min(self.factor, 0.1))


@dataclass(frozen=True)
class Interpolate:
    """Go to the minimiser of the parabola through phi(0), phi'(0) and phi(t), kept within [low t, high t].

    Args:
        low: The most that one failed check may shorten the step; also where a value that is not finite leads.
        high: The least; 0 < low <= high < 1.
    """

    low: float = 0.1
    high: float = 0.5

    def __post_init__(self) -> None:
        settle(self, low=number("(0, inf)", "must be positive and at most high"), high=number("(0, 1)"))
        require(self, "low", self.low <= self.high, f"must be positive and at most high ({self.high!r})")

    @property
    def slowest(self) -> float:
        """The largest factor by which a failed check may shorten the step."""
        return self.high

    def shorten(self, line: Line, t: float, value: float) -> float:
        """The next trial after the value at t failed."""
        bend = value - line.value - line.slope * t
        if not 0 < bend < 1e307:  # twice as much must be a number too
            return t * (self.low if not isfinite(value) or bend > 0 else self.high)
        return min(max(-line.slope * t * t / (2 * bend), self.low * t), self.high * t)


_SHRINK = either(
    "must be a number in (0, 1), Backtrack() or Interpolate()",
    number("(0, 1)"),
    instance((Backtrack, Interpolate), ""),
)
_RESTART = instance((Restart, Keep, Grow), "must be Restart(), Keep() or Grow(eta)")


@dataclass(frozen=True)
class Armijo(StepRule):
    """Line search: the first t of a shrinking sequence with ``phi(t) <= phi(0) + sufficient t phi'(0) + slack``.

    With ``restart=Restart()`` and a number for ``shrink`` this is SLS (the paper's equation 8), under a decaying ceiling SLSB,
    and with ``slack`` the test of BiSLS (equation 14).

    What a search must survive when nobody watches it:

    - *Rounding.* Where the decrease asked for is below the rounding of the loss, the test cannot be decided by values. The step
      is accepted if the loss does not rise by more than its rounding (`Status.ROUNDING`) and the remembered step is kept. A
      remembered step that is too short to be seen at all is first tried at the shortest length that can be: if the loss
      then falls, that is the step.
    - *No end.* After ``max_checks`` trials the search falls back on the trial with the lowest loss, if that is below phi(0),
      and takes no step otherwise (`Status.CAPPED`, or `Status.NON_FINITE` if no trial was finite). The remembered step is kept;
      only where the trials show that the start was far too long does the next search go on where this one ended.
    - *Hopeless trials.* No step beyond (phi(0) + slack - f_min) / (sufficient |phi'(0)|) can pass the test, so none is tried:
      a start that is far too long costs nothing.

    Args:
        start: The first trial of the first search (of every search, with `Restart`), positive; None begins at the Polyak step
            (phi(0) - f_min) / -phi'(0), which has the right scale whatever the units of loss and parameters.
        sufficient: The share of the linear decrease that is asked for, in (0, 1).
        shrink: `Interpolate()`, `Backtrack(w)`, or a number w in (0, 1) for the latter.
        restart: Where the next search begins: `Restart()`, `Keep()` or `Grow(eta)`.
        slack: Tolerance delta added to the right side, at least 0.
        max_step: A ceiling: a positive number, a schedule, or None.
        max_checks: Most trials a search, at least 1; None allows as many as reach 1e-12 of the first trial.
        f_min: A lower bound of the loss, or None where there is none to declare (then ``start`` must be given).
        expand: The first search of all goes on doubling a first trial that passed, for as long as the test holds and the loss
            falls: a start that is far too short costs a few checks once.
        uphill: Where the line does not descend, take so many times the remembered step all the same, at least 0. For two samples:
            there the judge is another batch, and one that disagrees is no proof against the direction.

    Examples:
        >>> from bisls.line import Line
        >>> from bisls.steps import Memory
        >>> line = Line(value=8.0, slope=-64.0, at=lambda t: 8.0 * (1 - 4 * t) ** 2)
        >>> step = Armijo(start=100.0).choose(line, Memory())
        >>> step.size, step.checks, step.status.name
        (0.25, 2, 'OK')
    """

    start: float | None = None
    sufficient: float = 0.1
    shrink: float | Backtrack | Interpolate = field(default_factory=Interpolate)
    restart: Restart | Keep | Grow = field(default_factory=Grow)
    slack: float = 0.0
    max_step: float | Schedule | None = None
    max_checks: int | None = None
    f_min: float | None = 0.0
    expand: bool = False
    uphill: float = 0.0

    def __post_init__(self) -> None:
        settle(self, start=optional(POSITIVE), sufficient=number("(0, 1)"), shrink=_SHRINK, restart=_RESTART)
        settle(self, slack=number("[0, inf)", "must be at least 0"), uphill=number("[0, inf)", "must be at least 0"))
        settle(self, max_step=bound_kind("must be positive, a schedule such as Decay(1.0), or None"))
        settle(self, max_checks=optional(whole_number(1)), f_min=optional(FINITE), expand=FLAG)
        require(
            self,
            "start",
            self.start is not None or self.f_min is not None,
            "needs f_min, from which the Polyak step is measured; give a start where f_min is None",
        )

    @property
    def searches(self) -> bool:
        """It does."""
        return True

    @property
    def rests(self) -> bool:
        """It can: on the remembered step."""
        return True

    def choose(self, line: Line, memory: Memory) -> Step:
        """Search along the line."""
        problem = trouble(line)
        if problem is Status.NOT_DESCENT and self.uphill > 0 and memory.step is not None:
            limit = min(line.max_step, bound_at(self.max_step, clock(line, memory)))
            return Step(min(self.uphill * memory.step, limit), memory.later(), status=problem)
        if problem is not None:
            return Step(0.0, memory.later(), status=problem)
        shrink = Backtrack(self.shrink) if isinstance(self.shrink, int | float) else self.shrink
        limit = min(line.max_step, bound_at(self.max_step, clock(line, memory)), self._hopeless(line))
        first = min(self._first(line, memory), limit)
        seen = min(2 * line.rounding / -line.slope, limit)  # the shortest step whose effect can be seen
        best, lowest, finite = 0.0, line.value, False
        # the first finite trial that failed: t, and by how much it rose relative to what the slope promised
        steepest: tuple[float, float] | None = None
        t = max(first, seen)
        if t == 0.0:  # a loss so small beside its slope that no step is a number
            return Step(0.0, memory.later(), status=Status.STATIONARY)
        checks, rise, tried = 0, 0.0, t
        for checks in range(1, self._cap(shrink) + 1):
            value = line.at(t)
            if not isfinite(value):
                value = inf  # minus infinity is no success either
            finite = finite or value < inf
            told = -line.slope * t > line.rounding and abs(value - line.value) > line.rounding
            if value <= line.value + self.sufficient * t * line.slope + self.slack and (told or t <= first):
                if self.expand and told and checks == 1 and memory.step is None:
                    t, value, checks = self._expanded(line, t, value, limit)
                later = memory.later(t if told else None).noting()
                return Step(t, later, checks, Status.OK if told else Status.ROUNDING, value)
            asked = -self.sufficient * t * line.slope
            if t <= first and value <= line.value + line.rounding and asked <= line.rounding:
                return Step(t, memory.later().noting(), checks, Status.ROUNDING, value)
            if value < lowest:
                best, lowest = t, value
            if value < inf:
                rise = (value - line.value) / max(-line.slope * t, 1e-300)
                steepest = steepest or (t, rise)
            if t > first:
                # a longer trial, made only because the remembered step can't be seen: go on until something is, then give it up
                unseen = abs(value - line.value) <= line.rounding and t < min(limit, 1e300)
                t = min(10 * t, limit, 1e300) if unseen else first
                continue
            tried, t = t, shrink.shorten(line, t, value)
            if t == 0.0:
                break
        status = Status.CAPPED if finite else Status.NON_FINITE
        later = memory.later().noting()
        if steepest and steepest[1] > 1 and rise < steepest[1] * (tried / steepest[0]) ** 0.5:
            # what rose was curvature (it fades as t does; a wrong slope or a jump would not): the start was far too long, and
            # the next search goes on from here. The remembered step stays what it was until a search succeeds.
            later = later.noting(begin=t)
        return Step(best, later, checks, status, lowest if best > 0 else None)

    def rest(self, line: Line, memory: Memory) -> Step:
        """The remembered step, without a search, under today's ceiling."""
        if memory.step is None or not (isfinite(line.value) and isfinite(line.slope)):
            return Step(0.0, memory.later(), status=Status.NON_FINITE)
        limit = min(line.max_step, bound_at(self.max_step, clock(line, memory)))
        return Step(min(memory.step, limit), memory.later())

    def keeps(self) -> Kind:
        """Where the next search begins, after one that began far too long."""
        return Fields(optional={"begin": Number(0.0)})

    def _expanded(self, line: Line, t: float, value: float, limit: float) -> tuple[float, float, int]:
        """Double a step that passed for as long as the test holds and the loss falls."""
        for checks in range(2, 100):
            if 2 * t > limit:
                return t, value, checks - 1
            longer = line.at(2 * t)
            if not (
                isfinite(longer) and longer <= line.value + self.sufficient * 2 * t * line.slope and longer < value
            ):
                return t, value, checks
            t, value = 2 * t, longer
        return t, value, checks

    def _first(self, line: Line, memory: Memory) -> float:
        if "begin" in memory.notes:
            return memory.notes["begin"]
        factor = self.restart.factor
        if factor is not None and memory.step is not None:
            return min(memory.step * factor, 1e300)
        if self.start is not None:
            return self.start
        # the Polyak step; a loss at or below its bound has no such step, so the size of the loss stands in for the gap
        gap = line.value - (self.f_min or 0.0)
        gap = gap if gap > 0 else abs(line.value) or 1.0
        return min(gap / -line.slope, 1e300) if -line.slope > 1e-300 else 1e300

    def _hopeless(self, line: Line) -> float:
        if self.f_min is None or line.value <= self.f_min or self.sufficient * -line.slope < 1e-300:
            return inf
        return (line.value + self.slack - self.f_min) / (self.sufficient * -line.slope)

    def _cap(self, shrink: Backtrack | Interpolate) -> int:
        return self.max_checks or ceil(log(1e-12) / log(shrink.slowest))
