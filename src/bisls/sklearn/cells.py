"""Held-out losses with their first and second derivatives by the logarithms of the penalties, fold by fold.

A *cell* is a set of training rows and a set of held-out rows. With H the Hessian of the lower problem, P_g the penalties of a
group (0 elsewhere), r the slope of the held-out loss and v = H^-1 r::

    dF/dtheta_g = -v' P_g w,    dw_g = -H^-1 P_g w,
    d2F/dtheta_g dtheta_h = dw_g' F'' dw_h - v' P_g dw_h - v' P_h dw_g - [g = h] v' P_g w
                            - sum_i l'''_i (x_i v)(x_i dw_g)(x_i dw_h)

The nested folds of a partition share their training rows in pairs (without a and b, tuned for a or for b), so what a training set
had last is where its next solution begins, moved along dw.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from scipy.linalg import LinAlgError
from scipy.linalg.lapack import dpotrf, dpotrs, dtrtri

from bisls.sklearn.lower import JITTER, Array, Rows
from bisls.sklearn.tuning import Grouping, Index, Splits

TINY, SMALL = 16, 48  # columns up to which cells are solved in one batch, by inverses and by inverse factors
Evaluated = tuple[Array, Array, Array]


@dataclass
class Sets:
    """The cells of some upper problems: which training rows, which held-out rows, and whose they are.

    Args:
        rows: All rows.
        problems: The splits of each upper problem.
    """

    rows: Rows
    problems: list[Splits]
    train: list[Index] = field(init=False)
    held: list[Index] = field(init=False)
    cells: list[tuple[int, int, int]] = field(init=False)  # problem, training set, held-out set

    def __post_init__(self) -> None:
        found: tuple[dict[bytes, int], dict[bytes, int]] = ({}, {})
        self.train, self.held, self.cells = [], [], []
        for problem, splits in enumerate(self.problems):
            for pair in splits:
                numbers = []
                for at, known, kept in zip(pair, found, (self.train, self.held), strict=True):
                    key = at.tobytes()
                    if key not in known:
                        known[key] = len(kept)
                        kept.append(at)
                    numbers.append(known[key])
                self.cells.append((problem, numbers[0], numbers[1]))

    def of(self, which: Index, some: int | None = None) -> list[tuple[int, int, int]]:
        """The cells of these problems; of each the first ones alone, if it is said how many."""
        taken = dict.fromkeys(which.tolist(), 0)
        found = []
        for cell in self.cells:
            if cell[0] in taken and (some is None or taken[cell[0]] < some):
                taken[cell[0]] += 1
                found.append(cell)
        return found

    def weights(self) -> Array:
        """The weight of the held-out rows of each problem."""
        each = np.array([self.rows.s[at].sum() for at in self.held])
        total = np.zeros(len(self.problems))
        for problem, _, held in self.cells:
            total[problem] += each[held]
        return total


class Cells(Protocol):
    """The cells of some upper problems."""

    def evaluate(self, theta: Array, which: Index, close: float, to: Array) -> Evaluated:
        """Mean held-out losses of these problems; gradients and Hessians along some directions, columns of ``to``."""

    def values(self, theta: Array, which: Index, close: float, some: int | None = None) -> Array:
        """The losses alone, of the first cells of each problem or of all."""

    def remembered(self) -> Any:
        """The solutions as they are now, where the next ones begin with them."""

    def recall(self, memory: Any) -> None:
        """Go on from solutions that were remembered."""

    def each(self, theta: Array, close: float, to: Array) -> list[Array]:
        """The losses of the held-out rows of each cell."""


def gathered(cells: list[tuple[int, int, int]], which: Index, parts: Array, weights: Array) -> Array:
    """What the cells of each problem sum up to, over the weight of its rows."""
    number = {int(b): i for i, b in enumerate(which)}
    total = np.zeros((len(which), *parts.shape[1:]))
    for (b, _, _), part in zip(cells, parts, strict=True):
        total[number[b]] += part
    return total / weights[which].reshape(-1, *[1] * (parts.ndim - 1))


class Products:
    """``X' S X`` and ``X' S y`` of training sets: sums over the folds that they hold, where folds are a partition of all rows.

    Args:
        rows: All rows.
        folds: Held-out rows of the folds.
    """

    def __init__(self, rows: Rows, folds: list[Index]):
        self.rows, self.owner = rows, np.full(len(rows.y), -1)
        for number, at in enumerate(folds):
            self.owner[at] = number
        self.sizes = np.array([len(at) for at in folds])
        self.parted = int(self.sizes.sum()) == len(rows.y) and bool(np.all(self.owner >= 0))
        self.parts = [_product(rows.at(at)) for at in folds] if self.parted else []

    def of(self, train: list[Index]) -> tuple[Array, Array, Array]:
        """Of each training set, and its weight."""
        made = []
        for at in train:
            inside = np.bincount(self.owner[at], minlength=len(self.sizes)) if self.parted else self.sizes - 1
            if self.parted and np.all((inside == 0) | (inside == self.sizes)):
                made.append(sum(self.parts[i] for i in np.flatnonzero(inside)))
            else:
                made.append(_product(self.rows.at(at)))
        whole = np.array(made)
        weight = np.array([self.rows.s[at].sum() for at in train])
        return np.ascontiguousarray(whole[:, :-1, :-1]), np.ascontiguousarray(whole[:, :-1, -1]), weight


def _product(rows: Rows) -> Array:
    both = np.column_stack([rows.X, rows.y]) * np.sqrt(rows.s)[:, None]
    return np.asarray(both.T @ both)


class Ridges:
    """Cells of the squared error: products of columns once, then factors of them; all cells together where columns are few.

    Args:
        sets: The cells.
        grouping: The groups.
        products: Of the columns, by folds.
    """

    def __init__(self, sets: Sets, grouping: Grouping, products: Products):
        self.sets, self.grouping = sets, grouping
        self.gram, self.right, self.weight = products.of(sets.train)
        self.member = np.zeros((len(grouping.index), grouping.count))
        self.member[np.arange(len(grouping.index)), grouping.index] = 1.0
        self.weights = sets.weights()
        most = max(map(len, sets.held))
        p = sets.rows.X.shape[1]
        self.X, self.y, self.s = (np.zeros((len(sets.held), most, *tail)) for tail in ((p,), (), ()))
        for number, at in enumerate(sets.held):
            held = sets.rows.at(at)
            self.X[number, : len(at)], self.y[number, : len(at)], self.s[number, : len(at)] = held.X, held.y, held.s
        self.closed, self.kept = True, dict[tuple[int | None, ...], Any]()

    def evaluate(self, theta: Array, which: Index, close: float, to: Array) -> Evaluated:
        """Mean held-out losses of these problems, gradients and Hessians along some directions."""
        cells, penalties, solve, w, residual, X, s = self._solved(theta, which)
        pulled = penalties * w
        slope, member = s * residual, self.member @ to
        rights = np.concatenate([(slope[:, None, :] @ X)[:, 0, :, None], -pulled[:, :, None] * member], axis=2)
        found = solve(rights)
        v, moves = found[:, :, 0], found[:, :, 1:]
        seen = X @ moves
        gradient = -(v * pulled) @ self.member
        crossed = member.T @ ((v * penalties)[:, :, None] * moves)
        hessian = seen.transpose(0, 2, 1) @ (s[:, :, None] * seen) - crossed - crossed.transpose(0, 2, 1)
        hessian += (to.T * gradient[:, None, :]) @ to
        losses = 0.5 * (slope * residual).sum(1)
        return (
            gathered(cells, which, losses, self.weights),
            gathered(cells, which, gradient @ to, self.weights),
            gathered(cells, which, hessian, self.weights),
        )

    def values(self, theta: Array, which: Index, close: float, some: int | None = None) -> Array:
        """The losses alone, of the first cells of each problem or of all."""
        cells, _, _, _, residual, _, s = self._solved(theta, which, some)
        return gathered(cells, which, 0.5 * (s * residual**2).sum(1), self.weights)

    def each(self, theta: Array, close: float, to: Array) -> list[Array]:
        """The losses of the held-out rows of each cell."""
        every = np.arange(len(self.sets.problems))
        cells, _, _, _, residual, _, _ = self._solved(theta, every)
        return [0.5 * one[: len(self.sets.held[h])] ** 2 for (_, _, h), one in zip(cells, residual, strict=True)]

    def remembered(self) -> None:
        """Nothing: solutions do not begin with others."""

    def recall(self, memory: Any) -> None:
        """Nothing."""

    def _taken(self, which: Index, some: int | None) -> Any:
        key = (some, *which.tolist())
        if key not in self.kept:
            cells = self.sets.of(which, some)
            owner, train, held = (np.array(part, dtype=np.intp) for part in zip(*cells, strict=True))
            right = self.right[train][:, :, None]
            arrays = (self.X[held], self.y[held], self.s[held])
            self.kept = {key: (cells, np.searchsorted(which, owner), train, right, *arrays)}
        return self.kept[key]

    def _solved(self, theta: Array, which: Index, some: int | None = None) -> Any:
        cells, owner, train, right, X, y, s = self._taken(which, some)
        penalties = (self.grouping.factors * np.exp(theta)[:, self.grouping.index])[owner]
        jitter = JITTER * self.weight[train]
        factored = _batched if penalties.shape[1] <= SMALL else _factors
        solve, times = factored(self.gram, train, penalties, jitter)
        w = solve(right)
        w = (w + solve(right - times(w)))[:, :, 0]  # what the jitter took away
        residual = (X @ w[:, :, None])[:, :, 0] - y
        return cells, penalties, solve, w, residual, X, s


def _batched(gram: Array, train: Index, penalties: Array, jitter: Array) -> Any:
    matrix = gram[train]
    diagonal = matrix.reshape(len(matrix), -1)[:, :: matrix.shape[1] + 1]
    diagonal += penalties
    plain = diagonal.copy()
    diagonal += jitter[:, None]
    if matrix.shape[1] <= TINY:
        inverse = np.linalg.inv(matrix)
        diagonal[:] = plain
        return (lambda right: inverse @ right), (lambda w: matrix @ w)
    back = matrix.copy()
    for one in back:
        halved(one)
    diagonal[:] = plain
    return (lambda right: back @ (back.transpose(0, 2, 1) @ right)), (lambda w: matrix @ w)


def _factors(gram: Array, train: Index, penalties: Array, jitter: Array) -> Any:
    factors = []
    for t, own, little in zip(train, penalties, jitter, strict=True):
        matrix = gram[t].copy()
        matrix.flat[:: len(matrix) + 1] += own + little
        factor, failed = dpotrf(matrix.T, lower=1, clean=0, overwrite_a=1)
        if failed:
            raise LinAlgError("the penalised products of columns are not positive definite")
        factors.append(factor)

    def solve(right: Array) -> Array:
        return np.array([dpotrs(f, one, lower=1)[0] for f, one in zip(factors, right, strict=True)])

    def times(w: Array) -> Array:
        return np.array([gram[t] @ one for t, one in zip(train, w, strict=True)]) + penalties[:, :, None] * w

    return solve, times


def halved(matrix: Array) -> None:
    """The transposed inverse of the Cholesky factor, in the place of the matrix."""
    factor, failed = dpotrf(matrix.T, lower=1, clean=1, overwrite_a=1)
    if failed:
        raise LinAlgError("a penalised matrix of products is not positive definite")
    inverse, _ = dtrtri(factor, lower=1, overwrite_c=1)
    if not np.may_share_memory(inverse, matrix):
        matrix[...] = inverse.T
