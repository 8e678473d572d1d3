"""Statements about records: holds, fails, undecided. One set of rules for every figure.

Values that are compared are final losses, one for each seed; a run that diverged counts as infinite. Means over seeds are
compared. With two seeds or more a difference within two standard errors is noise; with one seed a difference of less than
``ONE_SEED`` of the larger value is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import inf, isfinite, sqrt
from statistics import fmean, variance

from bisls.outcome import Judgement, Verdict

ONE_SEED = 0.05


def mean(values: Sequence[float]) -> float:
    """The mean; infinite where one of them is."""
    return fmean(values) if values and all(isfinite(v) for v in values) else inf


def noise(one: Sequence[float], two: Sequence[float]) -> float:
    """How large a difference of the means may be by chance."""
    a, b = mean(one), mean(two)
    if not (isfinite(a) and isfinite(b)):
        return 0.0
    if len(one) >= 2 and len(two) >= 2:
        return 2.0 * sqrt(variance(one) / len(one) + variance(two) / len(two))
    return ONE_SEED * max(abs(a), abs(b))


def at_most(one: Sequence[float], two: Sequence[float]) -> Judgement:
    """ "One is at or below two": holds where its mean is, fails where it is above by more than noise.

    Examples:
        >>> at_most([1.0, 1.1], [1.2, 1.3]), at_most([2.0], [1.0]), at_most([1.01], [1.0])
        (<Judgement.HOLDS: 'holds'>, <Judgement.FAILS: 'fails'>, <Judgement.UNDECIDED: 'undecided'>)
    """
    a, b = mean(one), mean(two)
    if a == b == inf:
        return Judgement.UNDECIDED
    if a <= b:
        return Judgement.HOLDS
    return Judgement.FAILS if a - b > noise(one, two) else Judgement.UNDECIDED


def below(one: Sequence[float], two: Sequence[float]) -> Judgement:
    """ "One is below two": holds where it is by more than noise, fails where it is above.

    Examples:
        >>> below([1.0], [1.2]), below([1.2], [1.0]), below([1.0], [1.01])
        (<Judgement.HOLDS: 'holds'>, <Judgement.FAILS: 'fails'>, <Judgement.UNDECIDED: 'undecided'>)
    """
    a, b = mean(one), mean(two)
    if a == b == inf:
        return Judgement.UNDECIDED
    if b - a > noise(one, two):
        return Judgement.HOLDS
    return Judgement.FAILS if a - b > noise(one, two) else Judgement.UNDECIDED


def alike(groups: Mapping[str, Sequence[float]], within: float) -> tuple[Judgement, float]:
    """ "All are alike": the largest mean is at most ``1 + within`` times the smallest. Also that ratio."""
    means = [mean(values) for values in groups.values()]
    low, high = min(means), max(means)
    if not isfinite(high):
        return Judgement.FAILS, inf
    ratio = high / low if low > 0 else inf
    if ratio <= 1 + within:
        return Judgement.HOLDS, ratio
    worst, best = (next(v for v in groups.values() if mean(v) == m) for m in (high, low))
    return (Judgement.UNDECIDED if high - noise(worst, best) <= (1 + within) * low else Judgement.FAILS), ratio


def both(*judgements: Judgement) -> Judgement:
    """All of them: fails where one does, holds where all do; nothing at all is undecided."""
    if Judgement.FAILS in judgements:
        return Judgement.FAILS
    return Judgement.HOLDS if set(judgements) == {Judgement.HOLDS} else Judgement.UNDECIDED


def yes(condition: bool) -> Judgement:
    """A statement that is true or not."""
    return Judgement.HOLDS if condition else Judgement.FAILS


def show(value: float) -> str:
    """A number as the page shows it."""
    return f"{value:.3g}" if isfinite(value) else "diverged"


def listed(groups: Mapping[str, Sequence[float]]) -> str:
    """Means by name, as the page shows them."""
    return ", ".join(f"{name} {show(mean(values))}" for name, values in groups.items())


def claim(statement: str, judgement: Judgement, numbers: str, told: str = "") -> Verdict:
    """A verdict on what the paper says; `told` are the numbers that it has itself."""
    return Verdict(statement, judgement, numbers, told=told)


def ours(statement: str, judgement: Judgement, numbers: str) -> Verdict:
    """A verdict on this package's default."""
    return Verdict(statement, judgement, numbers, ours=True)
