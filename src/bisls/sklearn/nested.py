"""How wide the prior is to be: nested folds, penalties tuned anew in their training rows and judged by the others."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from joblib import Parallel, delayed

from bisls.sklearn.lower import Array
from bisls.sklearn.tuning import Index, Splits, Tuned

WIDTHS = (0.3, 1.0, 3.0)  # the widths that "auto" tries beside 0
WORSE = 0.5  # by how many the first width must be worse for no other to be tried
SURE = 1.5  # by how many standard errors of the paired differences groups must be better than one penalty


def path(spread: float) -> tuple[float, ...]:
    """The widths on the way to this one, itself last; none for 0."""
    return (*(width for width in WIDTHS if width < spread), spread) if spread > 0 else ()


def nested_splits(splits: Splits, outer: int, s: Array | None = None) -> list[tuple[Index, Index]]:
    """The other folds, within the training rows of one: no splitter is asked again, so any list of splits can be nested.

    With two folds nothing of the other is left; then the training rows are halved. Where weights are given, splits whose rows
    weigh nothing are left out.
    """
    inside = splits[outer][0]
    known = np.zeros(1 + max(int(at.max()) for pair in splits for at in pair), dtype=bool)
    known[inside] = True
    inner = []
    for fold, (train, held) in enumerate(splits):
        pair = (train[known[train]], held[known[held]])
        if fold != outer and all(len(at) and (s is None or s[at].sum() > 0) for at in pair):
            inner.append(pair)
    if s is not None and not inner:
        inside = inside[s[inside] > 0]
    return inner or [(inside[::2], inside[1::2]), (inside[1::2], inside[::2])]


@dataclass(frozen=True)
class Choice:
    """What nested folds say of the widths.

    Attributes:
        losses: Width -> the mean loss on rows that neither the coefficients nor the penalties have seen.
        errors: Width -> the standard error of its difference from one penalty.
        spread: The width chosen; 0 where none is better than one penalty by `SURE` standard errors.
    """

    losses: dict[float, float]
    errors: dict[float, float]
    spread: float


class Nest(Protocol):
    """Penalties tuned anew within the training rows of each fold, and judged by its held-out rows."""

    def common(self, near: float) -> list[Tuned]:
        """One penalty for all, within each fold."""

    def widened(self, before: list[Tuned], spread: float, scale: float) -> list[Tuned]:
        """A penalty a group, within each fold."""

    def judged(self, tuned: list[Tuned]) -> tuple[Array, Array]:
        """The losses of the rows of each fold, and their weights."""


@dataclass(frozen=True)
class Nested:
    """A nest of upper problems that are solved each for itself, side by side in threads.

    Args:
        inner: The problem within each fold.
        outer: Each fold itself.
        n_jobs: How many at once.
    """

    inner: list[Any]
    outer: list[Any]
    n_jobs: int | None = None

    @staticmethod
    def of(engine: Any, splits: Splits, n_jobs: int | None) -> Nested:
        """By an engine with ``on(splits, nested)``."""
        inner = [engine.on(nested_splits(splits, fold, engine.rows.s), True) for fold in range(len(splits))]
        return Nested(inner, [engine.on([split], True) for split in splits], n_jobs)

    def _each(self, jobs: Any) -> list[Any]:
        return list(Parallel(n_jobs=self.n_jobs, prefer="threads")(jobs))

    def common(self, near: float) -> list[Tuned]:
        """One penalty for all, within each fold."""
        return self._each(delayed(one.common)(near) for one in self.inner)

    def widened(self, before: list[Tuned], spread: float, scale: float) -> list[Tuned]:
        """A penalty a group, within each fold."""
        pairs = zip(self.inner, before, strict=True)
        return self._each(delayed(one.widened)(last, spread, scale) for one, last in pairs)

    def judged(self, tuned: list[Tuned]) -> tuple[Array, Array]:
        """The losses of the rows of each fold, and their weights."""
        pairs = zip(self.outer, tuned, strict=True)
        found = self._each(delayed(one.each)(last.theta) for one, last in pairs)
        each, weights = (np.concatenate([one[part] for one in found]) for part in (0, 1))
        return each, weights


def choose(nest: Nest, near: float, scale: float) -> Choice:
    """The width of the prior, by nested folds.

    In the training rows of each fold penalties are tuned anew, by the other folds; the rows of the fold judge them. Widths are
    tried from the narrowest on, until one is worse than the one before (the first: clearly).

    Args:
        nest: Tunes and judges.
        near: The logarithm of a common penalty to begin with.
        scale: Divides the loss where it meets the prior.
    """
    tuned: list[Tuned] = []
    losses: dict[float, float] = {}
    errors: dict[float, float] = {}
    shared = np.zeros(0)
    for width in (0.0, *WIDTHS):
        tuned = nest.common(near) if width == 0.0 else nest.widened(tuned, width, scale)
        each, weights = nest.judged(tuned)
        shared = each if width == 0.0 else shared
        share = weights / weights.sum()
        losses[width] = float(share @ each)
        gain = shared - each
        errors[width] = float(np.sqrt(share**2 @ (gain - share @ gain) ** 2))
        before = list(losses.values())[-2:][0]
        if losses[width] > before + (WORSE * errors[width] if before == losses[0.0] else 0.0):
            break
    best = min(losses, key=lambda width: losses[width])
    sure = losses[0.0] - losses[best] > SURE * errors[best]
    return Choice(losses, errors, best if sure else 0.0)
