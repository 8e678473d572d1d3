"""Any rule between a floor and a ceiling."""

from __future__ import annotations

from dataclasses import dataclass, replace

from bisls._check import require
from bisls.line import Line
from bisls.record import Status
from bisls.steps.base import Memory, Schedule, Step, StepRule, bound_at, clock, is_bound


@dataclass(frozen=True)
class Envelope:
    """The envelope-type step ``gamma_k = min{ max{gamma_lk, gamma~_k}, gamma_bk }``.

    The general member of the paper's family (its equation 9): SPSB and SLSB are ``Polyak`` and ``Armijo`` under a decaying
    ceiling, BiSPS has a decaying floor as well. A search inside begins at or below the ceiling.

    Args:
        rule: Gives gamma~_k.
        floor: gamma_lk: a number, a schedule, or None. It holds where the rule found nothing, but not where the loss or the
            slope is not finite, the gradient is zero, or the direction does not descend.
        ceiling: gamma_bk: a number, a schedule, or None.

    Examples:
        >>> from bisls.line import Line
        >>> from bisls.steps import Decay, Polyak
        >>> rule = Envelope(Polyak(), floor=0.5, ceiling=Decay(1.0))
        >>> rule.choose(Line(value=3.0, slope=-12.0, at=float), Memory()).size  # the Polyak step is 0.25
        0.5
    """

    rule: StepRule
    floor: float | Schedule | None = None
    ceiling: float | Schedule | None = None

    def __post_init__(self) -> None:
        require(self, "rule", callable(getattr(self.rule, "choose", None)), "must be a step rule such as Polyak()")
        require(self, "floor", is_bound(self.floor, least=-1e-300), "must be at least 0, a schedule, or None")
        require(self, "ceiling", is_bound(self.ceiling), "must be positive, a schedule, or None")

    def choose(self, line: Line, memory: Memory) -> Step:
        """The rule's step, held between the bounds."""
        k = clock(line, memory)
        ceiling = min(line.max_step, bound_at(self.ceiling, k))
        step = self.rule.choose(replace(line, max_step=ceiling), memory)
        if step.status in (Status.NON_FINITE, Status.STATIONARY, Status.NOT_DESCENT):
            return step
        floor = bound_at(self.floor, k, missing=0.0)
        if step.size >= min(floor, ceiling):
            return step
        return replace(step, size=min(floor, ceiling), value=None)
