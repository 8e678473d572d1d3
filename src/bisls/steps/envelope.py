"""Any rule between a floor and a ceiling."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from bisls._check import having, settle
from bisls.line import Line
from bisls.states import Kind
from bisls.status import Status
from bisls.steps.base import Memory, Schedule, Step, StepRule, bound_at, bound_kind, clock


@dataclass(frozen=True)
class Envelope(StepRule):
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
        settle(
            self,
            rule=having(StepRule, "must be a step rule such as Polyak()"),
            floor=bound_kind("must be at least 0, a schedule, or None", "[0, inf]"),
            ceiling=bound_kind("must be positive, a schedule, or None"),
        )

    def choose(self, line: Line, memory: Memory) -> Step:
        """The rule's step, held between the bounds."""
        return self._between(self.rule.choose, line, memory)

    def rest(self, line: Line, memory: Memory) -> Step:
        """The rule's step without a search, held between the bounds."""
        return self._between(self.rule.rest, line, memory)

    def blind(self, slope: float, k: int, memory: Memory) -> Step | None:
        """The rule's step without a value, held between the bounds."""
        step = self.rule.blind(slope, k, memory)
        if step is None:
            return None
        ceiling = bound_at(self.ceiling, k)
        if step.size > ceiling:
            # as `choose`: a step that was settled beforehand is remembered as it was taken, a measured one as it was measured
            kept = replace(step.memory, step=ceiling) if self.scheduled else step.memory
            step = replace(step, size=ceiling, memory=kept)
        return self._raised(step, k, ceiling)

    @property
    def scheduled(self) -> bool:
        """As the rule inside."""
        return self.rule.scheduled

    @property
    def searches(self) -> bool:
        """As the rule inside."""
        return self.rule.searches

    @property
    def rests(self) -> bool:
        """As the rule inside."""
        return self.rule.rests

    def keeps(self) -> Kind:
        """As the rule inside."""
        return self.rule.keeps()

    def _between(self, choose: Callable[[Line, Memory], Step], line: Line, memory: Memory) -> Step:
        k = clock(line, memory)
        ceiling = min(line.max_step, bound_at(self.ceiling, k))
        return self._raised(choose(replace(line, max_step=ceiling), memory), k, ceiling)

    def _raised(self, step: Step, k: int, ceiling: float) -> Step:
        """The step, lifted to the floor where it is below it and there is something to go for."""
        if step.status in (Status.NON_FINITE, Status.STATIONARY, Status.NOT_DESCENT):
            return step
        floor = min(bound_at(self.floor, k, missing=0.0), ceiling)
        return step if step.size >= floor else replace(step, size=floor, value=None)
