"""Penalties of some groups by Newton's method above, all nested folds in step: what `tuning` does by L-BFGS for any number."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np

from bisls.sklearn.cells import Cells, Products, Ridges, Sets
from bisls.sklearn.classes import ByClasses
from bisls.sklearn.descent import BLIND, Evaluated, descend
from bisls.sklearn.dual import Parts, RowRidges
from bisls.sklearn.kernels import ByColumns, ByRows, OneByOne
from bisls.sklearn.lower import Array, Logistic, Loss, Multinomial, Rows, Solved, Squared
from bisls.sklearn.nested import nested_splits
from bisls.sklearn.spectrum import Spectrum
from bisls.sklearn.tuning import (
    LOOSE,
    REACH,
    RISES,
    SHORT,
    TIGHT,
    Exact,
    Grouping,
    Index,
    Place,
    Search,
    Splits,
    Tuned,
)

MANY, FEWER = 64, 32  # groups up to which Hessians are formed, of classes: by the columns, and by the rows
RIDGE = 100  # the same for the squared error, where they cost less
KERNELS = 5 * 10**6  # numbers in the kernels of all groups, at most, which classes need
FREE = 10  # columns of no penalty, at most, beside kernels
MAIN, INNER, COARSE = 1e-8, 1e-6, 1e-3  # Newton decrements, of the rows' weight, before the last step of lower problems
LITTLE = 0.5  # of a log-likelihood: what nested folds may promise still, where that is more than their tolerance
SOME = 1  # fold that the coarse search looks at, which only says where to begin
TURNS = 8  # Newton steps for the last digits of one penalty
NEARLY = 0.1  # a step after which lower problems are solved to the last digits


@dataclass
class Problems:
    """Upper problems in step with each other.

    Args:
        cells: Their folds.
        weights: The weight of the held-out rows of each.
        loss: The loss of both levels.
        rows: All rows.
        grouping: The groups.
        search: How the upper level is minimised.
        close: How exactly lower problems are solved.
        nested: Whether only widths are compared by them, so that what matters little is left.
        one: Their folds with one penalty, where these are computed apart.
    """

    cells: Any  # `Cells`, and whether all lower problems were solved
    weights: Array
    loss: Loss
    rows: Rows
    grouping: Grouping
    search: Search
    close: float
    nested: bool
    one: Any = None
    seen: list[dict[str, float]] = field(default_factory=list)

    @property
    def closed(self) -> bool:
        """Whether all lower problems were solved."""
        return bool(self.cells.closed)

    def common(self, near: float | None) -> list[Tuned]:
        """One penalty for all; to the last digits where nothing is known of it yet."""
        every, ones = np.arange(len(self.weights)), np.ones((self.grouping.count, 1))
        cells = self.cells if self.one is None else self.one
        unit = self.loss.unit(self.rows)
        room = (np.array([np.log(1e-7 * unit)]), np.array([np.log(1e6 * unit)]))
        # nested folds go on with groups from here, and want to know how each of them matters
        own = np.eye(len(ones)) if self.nested else ones
        scale: list[Array] = []

        def upper(raw: Evaluated, which: Index, x: Array) -> Evaluated:
            if not scale:
                scale.append(self.rows.weight / np.maximum(raw[0], 1e-300))
            factor = scale[0][which]
            return (
                raw[0] * factor,
                (raw[1].sum(1) * factor)[:, None],
                (raw[2].sum((1, 2)) * factor)[:, None, None],
            )

        def descended(start: float, rough: bool) -> list[Tuned]:
            begin = np.full((len(every), 1), start)
            return self._descended(upper, begin, room, np.ones(1), ones, own, 0.0, rough, cells=cells)

        if near is not None or len(every) > 1:
            return descended(self._coarse(cells, every, unit) if near is None else near, False)
        rough = descended(self._coarse(cells, every, unit), True)[0]
        polished = self._polished(cells, rough)
        return descended(rough.common, False) if polished is None else [polished]

    def widened(self, before: list[Tuned], spread: float, scale: float, on_the_way: bool = False) -> list[Tuned]:
        """A penalty a group under a prior of this width, from where a narrower one ended; roughly where a wider one follows."""
        G = self.grouping.count
        free = not np.isfinite(spread)
        tau = 1.0 if free else spread
        to = np.hstack([np.ones((G, 1)), tau * np.eye(G)])  # theta = to x
        prior = np.zeros(1 + G) if free else np.append(1.0 / tau**2, np.ones(G))
        centres = np.zeros((len(before), 1 + G))
        centres[:, 0] = [one.origin for one in before]
        self.seen.clear()

        def upper(raw: Evaluated, which: Index, x: Array) -> Evaluated:
            values, gradients, hessians = raw
            factor, off = self.weights[which] / scale, x - centres[which]
            return (
                values * factor + 0.5 * (prior * off * off).sum(1),
                factor[:, None] * (gradients @ to) + prior * off,
                factor[:, None, None] * (to.T @ hessians @ to) + np.diag(prior),
            )

        unit = self.loss.unit(self.rows)
        low = np.append(np.log(1e-7 * unit), np.full(G, -REACH / tau))
        high = np.append(np.log(1e6 * unit), np.full(G, REACH / tau))
        units = np.append(1.0, np.full(G, tau))
        places = [one.place for one in before if one.place is not None]
        known = len(places) == len(before)  # then the first value, and more, is there
        theta = np.array([one.theta for one in (places if known else before)])
        common = theta.mean(1, keepdims=True)
        start = np.hstack([common, (theta - common) / tau])
        first = None
        if known and np.all((start >= low) & (start <= high)):
            values, gradients, hessians = (
                np.array([getattr(one, name) for one in places]) for name in ("value", "gradient", "hessian")
            )
            first = upper((values, gradients, hessians), np.arange(len(before)), start)
        found = self._descended(upper, start, (low, high), units, to, np.eye(G), spread, on_the_way, first, places)
        return [
            replace(one, history=(*last.history, *one.history), centre=last.origin)
            for one, last in zip(found, before, strict=True)
        ]

    def _descended(
        self,
        upper: Callable[[Evaluated, Index, Array], Evaluated],
        start: Array,
        room: tuple[Array, Array],
        units: Array,
        to: Array,
        own: Array,
        spread: float,
        rough: bool,
        first: Evaluated | None = None,
        places: Sequence[Place] = (),
        cells: Any = None,
    ) -> list[Tuned]:
        """Down from a start, a row a problem, with ``theta = to x``; derivatives of the losses are along ``own``."""
        looked: list[Any] = [] if first is None else [None]

        def evaluate(x: Array, which: Index) -> Evaluated:
            theta = x @ to.T
            raw = (cells or self.cells).evaluate(theta, which, self.close, own)
            looked.append((which, theta, *raw))
            self.seen.append({"spread": spread, "cv_loss": float(raw[0][0])})
            return upper(raw, which, x)

        ended = descend(
            evaluate,
            start,
            room,
            units,
            tol=max(self.search.tol, LOOSE) if rough else self.search.tol,
            max_iter=self.search.max_iter,
            least=LITTLE / self.search.tol if self.nested else 1.0,
            first=first,
            ahead=isinstance(self.loss, Squared),
        )
        found, unseen = [], (ended.x - ended.at) @ to.T @ own / (own**2).sum(0)  # the last step was not looked at
        for b, (x, step, look) in enumerate(zip(ended.x, unseen, ended.looks, strict=True)):
            if looked[look] is None:
                last = places[b]
            else:
                which, *parts = looked[look]
                last = Place(*(part[np.searchsorted(which, b)] for part in parts))
            value = float(last.value + (0.0 if rough else last.gradient @ step + 0.5 * step @ last.hessian @ step))
            place = last if own.shape[1] == len(last.theta) else None
            found.append(Tuned(to @ x, spread, value, ended.steps, ended.converged, tuple(self.seen), place))
        return found

    def _coarse(self, cells: Any, every: Index, unit: float) -> float:
        """The best of some common penalties, from above, by some of the folds."""
        best, near, risen, memory = np.inf, 0.0, 0, cells.remembered()
        for share in self.loss.coarse:
            theta = np.full((len(every), self.grouping.count), np.log(share * unit))
            value = float(cells.values(theta, every, COARSE, SOME).sum())
            if value < best:
                best, near, risen, memory = value, float(theta[0, 0]), 0, cells.remembered()
            else:
                risen += 1
            if risen >= RISES:
                break
        cells.recall(memory)
        return near

    def _polished(self, cells: Any, rough: Tuned) -> Tuned | None:
        """One penalty to the last digits, by Newton's method for the root of the derivative; None where it leads nowhere."""
        every, ones = np.zeros(1, dtype=np.intp), np.ones((1, self.grouping.count))
        x, step = rough.common, 1.0
        for turn in range(TURNS):
            close = TIGHT if abs(step) <= NEARLY else self.close
            values, gradients, hessians = cells.evaluate(x * ones, every, close, ones.T)
            self.seen.append({"spread": 0.0, "cv_loss": float(values[0])})
            slope, bend = float(gradients.sum()), float(hessians.sum())
            step = -slope / bend if bend > 0 else np.inf
            if not abs(step) <= BLIND:  # the minimum lies on the border
                return None
            x += step
            if abs(step) < 1e-5 and close == TIGHT:  # its square is below rounding
                value = float(values[0]) + 0.5 * slope * step
                if value > rough.value * (1 + 1e-6):
                    return None
                steps, history = rough.steps + turn + 1, tuple(self.seen)
                return replace(rough, theta=x * ones[0], value=value, steps=steps, converged=True, history=history)
        return None


@dataclass
class Alone:
    """One upper problem, as `tuning.Folds` is one."""

    problems: Problems

    @property
    def closed(self) -> bool:
        """Whether all lower problems were solved."""
        return self.problems.closed

    def common(self, near: float | None = None) -> Tuned:
        """One penalty for all."""
        return self.problems.common(near)[0]

    def widened(self, before: Tuned, spread: float, scale: float, on_the_way: bool = False) -> Tuned:
        """A penalty a group."""
        return self.problems.widened([before], spread, scale, on_the_way)[0]

    def at(self, theta: Array) -> float:
        """The mean held-out loss."""
        return float(self.problems.cells.values(theta[None], np.zeros(1, dtype=np.intp), self.problems.close)[0])


@dataclass
class Nest:
    """Nested folds in step with each other, as `tuning.Nested` has them side by side."""

    problems: Problems
    outer: Cells
    weights: Array

    def common(self, near: float) -> list[Tuned]:
        """One penalty for all, within each fold."""
        return self.problems.common(near)

    def widened(self, before: list[Tuned], spread: float, scale: float) -> list[Tuned]:
        """A penalty a group, within each fold."""
        return self.problems.widened(before, spread, scale)

    def judged(self, tuned: list[Tuned]) -> tuple[Array, Array]:
        """The losses of the rows of each fold, and their weights."""
        theta = np.array([one.theta for one in tuned])
        return np.concatenate(self.outer.each(theta, self.problems.close, np.eye(theta.shape[1]))), self.weights


@dataclass(frozen=True)
class Newton:
    """Lower problems solved exactly, Newton's method above.

    Args:
        loss: The loss of both levels: squared, or of classes.
        rows: All rows.
        grouping: The groups.
        search: How the upper level is minimised.
        splits: The folds.
    """

    loss: Loss
    rows: Rows
    grouping: Grouping
    search: Search
    splits: Splits

    @property
    def suits(self) -> bool:
        """Whether it is for this table: some groups, and kernels, if they are needed, of some size."""
        squared = type(self.loss) is Squared
        if type(self.loss) not in (Squared, Logistic, Multinomial) or self.grouping.count > max(RIDGE, MANY):
            return False
        if self.grouping.count > (RIDGE if squared else FEWER if self._by_rows else MANY):
            return False
        few = squared or self.grouping.count * len(self.rows.y) ** 2 <= KERNELS
        return (few and int((self.grouping.factors == 0).sum()) <= FREE) or not self._by_rows

    @cached_property
    def all(self) -> Alone:
        """The folds as a function of the penalties."""
        return Alone(self._problems([self.splits], self.search, MAIN, False))

    @cached_property
    def nest(self) -> Nest:
        """Nested folds, less exactly; in step, so not side by side."""
        search = Search(max(self.search.tol, LOOSE), min(self.search.max_iter, SHORT))
        inner = self._problems(self._inner, search, INNER, True)
        outer = self._cells(Sets(self.rows, [[split] for split in self.splits]))
        for cells in (inner.cells, outer):
            if isinstance(cells, OneByOne):  # a training set of the folds for each problem
                cells.follow(self.all.problems.cells)
        if isinstance(outer, RowRidges):
            outer.follow(inner.cells)
        weights = np.concatenate([self.rows.s[held] for _, held in self.splits])
        return Nest(inner, outer, weights)

    def fitted(self, theta: Array) -> Solved:
        """The coefficients on all rows."""
        cells = self.all.problems.cells
        other = (
            cells
            if isinstance(cells, ByClasses | RowRidges)
            else Exact(self.loss, self.rows, self.grouping, self.search)
        )
        return other.fitted(theta)

    @cached_property
    def _inner(self) -> list[Any]:
        return [nested_splits(self.splits, fold, self.rows.s) for fold in range(len(self.splits))]

    @cached_property
    def _by_rows(self) -> bool:
        problems = self._inner if self.grouping.count > 1 else [self.splits]
        fewest = min(len(train) for inner in problems for train, _ in inner)
        return not isinstance(self.loss, Multinomial) and self.rows.X.shape[1] > fewest

    @cached_property
    def _products(self) -> Products:
        return Products(self.rows, [held for _, held in self.splits])

    @cached_property
    def _parts(self) -> Parts:
        return Parts.of(self.rows, self.grouping)

    def _problems(self, problems: list[Any], search: Search, close: float, nested: bool) -> Problems:
        sets = Sets(self.rows, problems)
        cells, one = self._cells(sets), None
        if isinstance(cells, RowRidges) and Spectrum.suits(sets, self.grouping):
            one = Spectrum(sets, self.grouping, self._parts)
        return Problems(cells, sets.weights(), self.loss, self.rows, self.grouping, search, close, nested, one)

    def _cells(self, sets: Sets) -> Any:
        if isinstance(self.loss, Squared):
            if self._by_rows:
                return RowRidges(sets, self.grouping, self._parts)
            return Ridges(sets, self.grouping, self._products)
        if isinstance(self.loss, Multinomial):
            return ByClasses(self.loss, sets, self.grouping)
        return (ByRows if self._by_rows else ByColumns)(self.loss, sets, self.grouping)
