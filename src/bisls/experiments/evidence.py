"""Whether runs say anything: a statement that would hold of runs that got nowhere, or that are one run twice, does not."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from bisls.experiments.base import RunRecord
from bisls.experiments.judging import both, mean
from bisls.outcome import Judgement

PROGRESS = 0.9  # a run has progressed where it ends at or below 90 % of where it began
DECIDES = 0.05  # below this share of the iterations, a Polyak step is its ceiling for all purposes


def initial(*groups: Sequence[RunRecord], name: str = "loss") -> float:
    """Where the runs began, on average."""
    return mean([run.first(name) for runs in groups for run in runs])


def progressed(first: float, *ends: Sequence[float]) -> bool:
    """Whether one of the groups, at least, has progressed.

    Examples:
        >>> progressed(2.0, [1.9], [1.7]), progressed(2.0, [1.9], [float("inf")])
        (True, False)
    """
    return any(mean(values) <= PROGRESS * first for values in ends)


def if_progressed(judgement: Judgement, first: float, *ends: Sequence[float]) -> Judgement:
    """What holds of runs of which none has progressed is undecided; give those that the statement is in favour of.

    Args:
        judgement: Of a statement.
        first: Where the runs began.
        ends: Where they ended, by group.
    """
    nothing = judgement is Judgement.HOLDS and not progressed(first, *ends)
    return Judgement.UNDECIDED if nothing else judgement


def polyak_share(records: Sequence[RunRecord]) -> float:
    """In which share of the iterations the Polyak step, not its ceiling alpha_b0 / sqrt(k + 1), decided."""
    shares = []
    for record in records:
        steps = record.curve("alpha")
        ceiling = record.numbers["ceiling"] / np.sqrt(np.arange(1, len(steps) + 1))
        shares.append(float(np.mean(steps < ceiling * (1 - 1e-6))) if len(steps) else 0.0)
    return float(np.mean(shares))


def uninformative(polyak: Sequence[Sequence[RunRecord]], first: float, *ends: Sequence[float]) -> str:
    """Why runs under one ceiling say nothing of the Polyak step; empty where they do.

    Args:
        polyak: The runs that have it, by group: where it hardly ever decides, all are decaying SGD.
        first: Where the runs began.
        ends: Where those that are compared ended, by group.
    """
    if max(map(polyak_share, polyak)) < DECIDES:
        return f"the Polyak step decides in less than {DECIDES:.0%} of the iterations"
    return "" if progressed(first, *ends) else f"none ends below {PROGRESS:.0%} of where it began"


def informative(judgements: Iterable[tuple[Judgement, str]]) -> Judgement:
    """All of those that say something, that is, with no reason why not; undecided where none does."""
    left = [judgement for judgement, reason in judgements if not reason]
    return both(*left) if left else Judgement.UNDECIDED


def left_out(reasons: Iterable[tuple[str, str]]) -> str:
    """What says nothing and why, for the numbers of a verdict.

    Examples:
        >>> left_out([("alpha_b0 = 1", "it fell ill"), ("alpha_b0 = 2", ""), ("alpha_b0 = 3", "it fell ill")])
        '; not counted: alpha_b0 = 1 and alpha_b0 = 3 (it fell ill)'
    """
    names: dict[str, list[str]] = {}
    for name, reason in reasons:
        if reason:
            names.setdefault(reason, []).append(name)
    told = ", ".join(f"{' and '.join(own)} ({reason})" for reason, own in names.items())
    return f"; not counted: {told}" if told else ""
