"""How wide the prior is to be: nested folds, penalties tuned anew in their training rows and judged by the others."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from joblib import Parallel, delayed

from bisls.sklearn.lower import Array
from bisls.sklearn.tuning import Index, Splits, Tuned

logger = logging.getLogger("bisls.sklearn")
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
        theta: The logarithms of the penalties found with it, a row a fold.
    """

    losses: dict[float, float]
    errors: dict[float, float]
    spread: float
    theta: Array


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

    def _each(self, jobs: Any, what: str = "") -> list[Any]:
        found = []
        for one in Parallel(n_jobs=self.n_jobs, prefer="threads", return_as="generator")(jobs):
            found.append(one)
            if what:
                logger.info("nested folds, %s: %d of %d tuned", what, len(found), len(self.inner))
        return found

    def common(self, near: float) -> list[Tuned]:
        """One penalty for all, within each fold."""
        return self._each((delayed(one.common)(near) for one in self.inner), "one penalty")

    def widened(self, before: list[Tuned], spread: float, scale: float) -> list[Tuned]:
        """A penalty a group, within each fold."""
        pairs = zip(self.inner, before, strict=True)
        return self._each((delayed(one.widened)(last, spread, scale) for one, last in pairs), f"width {spread:g}")

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
    losses: dict[float, float] = {}
    errors: dict[float, float] = {}
    found: dict[float, list[Tuned]] = {0.0: nest.common(near)}
    shared, weights = nest.judged(found[0.0])
    share = weights / weights.sum()
    losses[0.0], errors[0.0] = float(share @ shared), 0.0
    logger.info("nested folds, one penalty: %.6g", losses[0.0])

    def better(width: float, before: float) -> bool:
        found[width] = nest.widened(found[before], width, scale)
        each, _ = nest.judged(found[width])
        gain = shared - each
        losses[width] = float(share @ each)
        errors[width] = float(np.sqrt(share**2 @ (gain - share @ gain) ** 2))
        logger.info("nested folds, width %g: %.6g", width, losses[width])
        return losses[width] <= losses[before] + (0.0 if before else WORSE * errors[width])

    before = 0.0
    for width in WIDTHS:
        if not better(width, before):
            break
        before = width
    best = min(losses, key=lambda width: losses[width])
    spread = best if losses[0.0] - losses[best] > SURE * errors[best] else 0.0
    return Choice(losses, errors, spread, np.array([one.theta for one in found[spread]]))
