"""Penalties of some groups by Newton's method above, all nested folds in step: what `tuning` does by L-BFGS for any number."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np

from bisls.sklearn.cells import Cells, Products, Ridges, Sets
from bisls.sklearn.descent import Evaluated, descend
from bisls.sklearn.kernels import ByColumns, ByRows, OneByOne
from bisls.sklearn.lower import WIDE, Array, Logistic, Loss, Rows, Solved, Squared
from bisls.sklearn.nested import nested_splits
from bisls.sklearn.tuning import (
    LOOSE,
    REACH,
    RISES,
    SHORT,
    TIGHT,
    Exact,
    Grouping,
    Index,
    Search,
    Splits,
    Tuned,
)

MANY = 32  # groups up to which Hessians are formed
KERNELS = 5 * 10**6  # numbers in the kernels of all groups, at most
FREE = 10  # columns of no penalty, at most, beside kernels
MAIN, INNER, COARSE = 1e-8, 1e-6, 1e-3  # Newton decrements, of the rows' weight, before the last step of lower problems
TURNS = 8  # Newton steps for the last digits of one penalty
NOWHERE = 1e-2  # a step for the last digits that is longer has no root nearby


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
        nested: Whether only widths are compared by them: the last step of a descent is taken unseen.
    """

    cells: Any  # `Cells`, and whether all lower problems were solved
    weights: Array
    loss: Loss
    rows: Rows
    grouping: Grouping
    search: Search
    close: float
    nested: bool
    seen: list[dict[str, float]] = field(default_factory=list)

    @property
    def closed(self) -> bool:
        """Whether all lower problems were solved."""
        return bool(self.cells.closed)

    def common(self, near: float | None) -> list[Tuned]:
        """One penalty for all; to the last digits where nothing is known of it yet."""
        every, ones = np.arange(len(self.weights)), np.ones((1, self.grouping.count))
        unit = self.loss.unit(self.rows)
        start = self._coarse(every, unit) if near is None else near
        first: list[Any] = []

        def evaluate(x: Array, which: Index) -> Evaluated:
            values, gradients, hessians = self.cells.evaluate(x * ones, which, self.close, ones.T)
            self._see(0.0, values)
            if not first:
                first.append(np.maximum(values, 1e-300))
            scale = self.rows.weight / first[0][which]
            return (
                values * scale,
                gradients * scale[:, None],
                hessians * scale[:, None, None],
            )

        low, high = np.log(1e-7 * unit), np.log(1e6 * unit)
        begin = np.full((len(every), 1), float(start))
        ended = self._descended(evaluate, begin, (np.array([low]), np.array([high])), np.ones(1))
        values = ended.values * first[0] / self.rows.weight
        found = [
            Tuned(x * ones[0], 0.0, float(value), ended.steps, ended.converged, tuple(self.seen))
            for x, value in zip(ended.x, values, strict=True)
        ]
        return [self._polished(found[0])] if near is None and len(found) == 1 else found

    def widened(self, before: list[Tuned], spread: float, scale: float, on_the_way: bool = False) -> list[Tuned]:
        """A penalty a group under a prior of this width, from where a narrower one ended; roughly where a wider one follows."""
        G = self.grouping.count
        free = not np.isfinite(spread)
        tau = 1.0 if free else spread
        to = np.hstack([np.ones((G, 1)), tau * np.eye(G)])  # theta = to x
        own = np.eye(G)
        prior = np.append(0.0, np.full(G, 0.0 if free else 1.0))
        self.seen.clear()

        def evaluate(x: Array, which: Index) -> Evaluated:
            values, gradients, hessians = self.cells.evaluate(x @ to.T, which, self.close, own)
            self._see(spread, values)
            factor = self.weights[which] / scale
            return (
                values * factor + 0.5 * (prior * x * x).sum(1),
                factor[:, None] * (gradients @ to) + prior * x,
                factor[:, None, None] * (to.T @ hessians @ to) + np.diag(prior),
            )

        unit = self.loss.unit(self.rows)
        low = np.append(np.log(1e-7 * unit), np.full(G, -REACH / tau))
        high = np.append(np.log(1e6 * unit), np.full(G, REACH / tau))
        start = np.array([np.append(one.common, (one.theta - one.common) / tau) for one in before])
        ended = self._descended(evaluate, start, (low, high), np.append(1.0, np.full(G, tau)), on_the_way)
        values = (ended.values - 0.5 * (prior * ended.x**2).sum(1)) * scale / self.weights
        return [
            Tuned(to @ x, spread, float(value), ended.steps, ended.converged, (*one.history, *self.seen))
            for x, value, one in zip(ended.x, values, before, strict=True)
        ]

    def _descended(
        self, evaluate: Any, start: Array, room: tuple[Array, Array], units: Array, rough: bool = False
    ) -> Any:
        tol = max(self.search.tol, LOOSE) if rough else self.search.tol
        unseen = rough or self.nested
        return descend(evaluate, start, room, units, tol=tol, max_iter=self.search.max_iter, unseen=unseen)

    def _see(self, spread: float, values: Array) -> None:
        self.seen.append({"spread": spread, "cv_loss": float(values[0])})

    def _coarse(self, every: Index, unit: float) -> float:
        """The best of some common penalties, from above."""
        best, near, risen, memory = np.inf, 0.0, 0, self.cells.remembered()
        for share in self.loss.coarse:
            theta = np.full((len(every), self.grouping.count), np.log(share * unit))
            value = float(self.cells.values(theta, every, COARSE).sum())
            if value < best:
                best, near, risen, memory = value, float(theta[0, 0]), 0, self.cells.remembered()
            else:
                risen += 1
            if risen >= RISES:
                break
        self.cells.recall(memory)
        return near

    def _polished(self, tuned: Tuned) -> Tuned:
        """One penalty to the last digits, by Newton's method for the root of the derivative; see `Search.polished`."""
        every, ones = np.zeros(1, dtype=np.intp), np.ones((1, self.grouping.count))
        x = tuned.common
        for _ in range(TURNS):
            _, gradients, hessians = self.cells.evaluate(x * ones, every, TIGHT, ones.T)
            slope, bend = float(gradients.sum()), float(hessians.sum())
            step = -slope / bend if bend > 0 else np.inf
            if not abs(step) <= NOWHERE:  # the minimum lies on the border
                return tuned
            x += step
            if abs(step) < 1e-6:  # its square is below rounding
                break
        value = float(self.cells.values(x * ones, every, TIGHT)[0])
        better = value <= tuned.value * (1 + 1e-6)  # which was of lower problems solved less exactly
        return replace(tuned, theta=x * ones[0], value=value) if better else tuned


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
        loss: The loss of both levels: squared, or of two classes.
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
        """Whether it is for this table: one output, some groups, and kernels, if they are needed, of some size."""
        if type(self.loss) not in (Squared, Logistic) or self.grouping.count > MANY:
            return False
        few = self.grouping.count * len(self.rows.y) ** 2 <= KERNELS
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
        weights = np.concatenate([self.rows.s[held] for _, held in self.splits])
        return Nest(inner, outer, weights)

    def fitted(self, theta: Array) -> Solved:
        """The coefficients on all rows."""
        return Exact(self.loss, self.rows, self.grouping, self.search).fitted(theta)

    @cached_property
    def _inner(self) -> list[Any]:
        return [nested_splits(self.splits, fold, self.rows.s) for fold in range(len(self.splits))]

    @cached_property
    def _by_rows(self) -> bool:
        problems = self._inner if self.grouping.count > 1 else [self.splits]
        fewest = min(len(train) for inner in problems for train, _ in inner)
        return self.rows.X.shape[1] > (WIDE if isinstance(self.loss, Squared) else 1) * fewest

    @cached_property
    def _products(self) -> Products:
        return Products(self.rows, [held for _, held in self.splits])

    def _problems(self, problems: list[Any], search: Search, close: float, nested: bool) -> Problems:
        sets = Sets(self.rows, problems)
        return Problems(self._cells(sets), sets.weights(), self.loss, self.rows, self.grouping, search, close, nested)

    def _cells(self, sets: Sets) -> Any:
        if self._by_rows:
            return ByRows(self.loss, sets, self.grouping)
        if isinstance(self.loss, Squared):
            return Ridges(sets, self.grouping, self._products)
        return ByColumns(self.loss, sets, self.grouping)
