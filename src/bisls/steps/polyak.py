"""Stochastic Polyak steps: SPS_max, SPSB, DecSPS."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf, sqrt

from bisls._check import FINITE, POSITIVE, number, settle
from bisls.line import Line
from bisls.states import Fields, Kind
from bisls.status import Status
from bisls.steps.base import Memory, Schedule, Step, StepRule, bound_at, bound_kind, clock, trouble


@dataclass(frozen=True)
class Polyak(StepRule):
    """The stochastic Polyak step ``gamma_k = min{ (f - f_min) / (c ||d||^2), gamma_bk }``.

    For a direction other than the gradient ||d||^2 is read as ``-slope = <gradient, d>``. With a constant ``max_step`` this is
    SPS_max, with a decaying one SPSB (the paper's equations 5 and 7); no evaluation is made.

    Args:
        c: Positive; larger is more careful. 1/2 is the classical Polyak step.
        f_min: A lower bound of the loss on any batch; 0 suits cross-entropy and least squares.
        max_step: The ceiling gamma_bk: a positive number, a schedule such as ``Decay(1.0)``, or None.

    Examples:
        >>> from bisls.line import Line
        >>> rule = Polyak(c=1.0, max_step=1.0)
        >>> rule.choose(Line(value=3.0, slope=-12.0, at=float), Memory()).size
        0.25
        >>> rule.choose(Line(value=3.0, slope=-0.5, at=float), Memory()).size
        1.0
    """

    c: float = 1.0
    f_min: float = 0.0
    max_step: float | Schedule | None = None

    def __post_init__(self) -> None:
        settle(self, c=POSITIVE, f_min=FINITE)
        settle(self, max_step=bound_kind("must be positive, a schedule such as Decay(1.0), or None"))

    def choose(self, line: Line, memory: Memory) -> Step:
        """The step; none, with a status, where the line is unusable or the loss lies below ``f_min``."""
        problem = trouble(line) or _spent(line, self.f_min)
        if problem is not None:
            return Step(0.0, memory.later(), status=problem)
        ceiling = min(line.max_step, bound_at(self.max_step, clock(line, memory)))
        size = min(_ratio(line, self.f_min) / self.c, ceiling)
        if size == inf:  # a slope so small that the ratio overflows: as good as stationary
            return Step(0.0, memory.later(), status=Status.STATIONARY)
        return Step(size, memory.later(size))

    def keeps(self) -> Kind:
        """Nothing beside the step."""
        return Fields()


@dataclass(frozen=True)
class DecreasingPolyak(StepRule):
    """DecSPS: ``gamma_k = (1/c_k) min{ (f - f_min) / ||d||^2, c_(k-1) gamma_(k-1) }``, ``c_k = c sqrt(k + 1)``.

    The steps never grow (the paper's equation 6). The first one uses ``max_step``:
    ``gamma_0 = (1/c) min{ (f - f_min) / ||d||^2, c gamma_b0 }``.

    Args:
        c: c_0, positive.
        f_min: A lower bound of the loss on any batch.
        max_step: gamma_b0, a positive number.

    Examples:
        >>> from bisls.line import Line
        >>> first = DecreasingPolyak(max_step=1.0).choose(Line(value=3.0, slope=-1.0, at=float), Memory())
        >>> second = DecreasingPolyak(max_step=1.0).choose(Line(value=3.0, slope=-1.0, at=float), first.memory)
        >>> first.size, round(second.size, 4)
        (1.0, 0.7071)
    """

    c: float = 1.0
    f_min: float = 0.0
    max_step: float = 1.0

    def __post_init__(self) -> None:
        settle(self, c=POSITIVE, f_min=FINITE, max_step=number("(0, inf]", "must be a positive number"))

    def choose(self, line: Line, memory: Memory) -> Step:
        """The step; where the line is unusable none is taken and the recursion waits."""
        problem = trouble(line) or _spent(line, self.f_min)
        if problem is not None:
            # k stays as well: it counts the terms of the recursion, and this one was left out
            return Step(0.0, memory, status=problem)
        k = memory.k
        # c stands on both sides of the second bound; left out, it can't overflow
        bound = self.max_step / sqrt(k + 1) if memory.step is None else memory.step * (sqrt(k) / sqrt(k + 1))
        size = min(_ratio(line, self.f_min) / self.c / sqrt(k + 1), bound)
        if size == 0.0:  # underflow; remembered, it would end the recursion
            return Step(0.0, memory, status=Status.STATIONARY)
        return Step(min(size, line.max_step), memory.later(size))

    def keeps(self) -> Kind:
        """Nothing beside the step."""
        return Fields()


def _spent(line: Line, f_min: float) -> Status | None:
    """Why a loss at or below its bound has no Polyak step, or None."""
    if line.value < f_min:
        return Status.BELOW_BOUND
    return Status.STATIONARY if line.value == f_min else None


def _ratio(line: Line, f_min: float) -> float:
    """(f - f_min) / -slope, without overflow errors."""
    return (line.value - f_min) / -line.slope if -line.slope > 1e-300 else inf
