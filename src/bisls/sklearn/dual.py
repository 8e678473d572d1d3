"""Ridge cells by their rows, where these are fewer than the columns; see `cells` for what is computed.

With rows times the roots of their weights, ``K = sum_g exp(-theta_g) K_g`` and Z the columns of no penalty, the residual a of the
training rows solves ``(I + K) a + Z b = y`` with ``Z'a = 0``. Factors are made one by one, in memory that is used again; all else
is done for all cells at once, with vectors over all rows that are 0 beyond a cell's training rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from scipy.linalg import LinAlgError
from scipy.linalg.lapack import dpotrf, dpotrs

from bisls.sklearn.cells import Evaluated, Sets, gathered
from bisls.sklearn.lower import Array, Rows, Solved
from bisls.sklearn.tuning import Grouping, Index


def kernels(rows: Rows, grouping: Grouping) -> Array:
    """The kernel of each group, of all rows times the roots of their weights."""
    factors, found = grouping.factors, np.empty((grouping.count, len(rows.y), len(rows.y)))
    X = rows.X * np.sqrt(rows.s)[:, None]
    for group, kernel in enumerate(found):
        own = np.flatnonzero((grouping.index == group) & (factors > 0))
        some = X.take(own, 1)
        if np.any(factors[own] != 1.0):
            some /= np.sqrt(factors[own])
        np.matmul(some, some.T, out=kernel)
    return found


@dataclass(frozen=True)
class Factors:
    """Of ``I + K`` in the training rows of some cells, bordered by the columns of no penalty.

    Attributes:
        each: Training rows and Cholesky factor of each cell.
        Z: The columns of no penalty, of all rows.
        back: What the factors make of them, a row a column.
        inner: The inverses of ``Z' (I + K)^-1 Z``.
    """

    each: list[tuple[Index, Array]]
    Z: Array
    back: Array
    inner: Array

    def solve(self, sides: Array, border: Array) -> tuple[Array, Array]:
        """u and b with ``(I + K) u = side + Z b`` and ``Z'u = border``, for each cell a row a system."""
        found = np.zeros_like(sides)
        for own, side, (rows, factor) in zip(found, sides, self.each, strict=True):
            own[:, rows] = dpotrs(factor, side.take(rows, 1).T, lower=1)[0].T
        b = (border - found @ self.Z) @ self.inner
        return found + b @ self.back, b


@dataclass(frozen=True)
class Half:
    """The solutions of some cells, a row a cell, and what they leave of the held-out rows."""

    cells: list[tuple[int, int, int]]
    factors: Factors
    K: Array
    parts: list[slice]
    a: Array
    residual: Array
    held: Array

    @property
    def losses(self) -> Array:
        """The losses of the held-out rows of each cell, summed."""
        return np.asarray(0.5 * (self.residual**2).sum(1))


class RowRidges:
    """Cells of the squared error by kernels of the rows, one a group.

    Args:
        sets: The cells.
        grouping: The groups.
        kernels: As `kernels` makes them.
        memory: Arrays that are used again and again, since fresh pages take longer than a factor; several may share them.
    """

    def __init__(self, sets: Sets, grouping: Grouping, kernels: Array, memory: dict[Any, Array]):
        self.memory = memory
        self.sets, self.grouping, self.kernels = sets, grouping, kernels
        self.root = np.sqrt(sets.rows.s)
        self.Zy = np.column_stack([sets.rows.X[:, grouping.factors == 0], sets.rows.y]) * self.root[:, None]
        self.Z, self.y = self.Zy[:, :-1], self.Zy[:, -1]
        self.weights, self.closed = sets.weights(), True
        self.masks = np.zeros((len(sets.held), len(self.Zy)))
        for mask, at in zip(self.masks, sets.held, strict=True):
            mask[at] = 1.0

    def evaluate(self, theta: Array, which: Index, close: float, to: Array) -> Evaluated:
        """Mean held-out losses of these problems, gradients and Hessians along some directions."""
        half = self._solved(theta, which)
        owner = np.repeat(np.arange(len(which)), [part.stop - part.start for part in half.parts])
        shares = np.exp(-theta)[owner].T[:, :, None]
        pulls = shares * (half.a @ self.kernels)  # a group, a cell, a row
        (cells, rows), count = half.a.shape, 1 + to.shape[1]
        sides, border = np.empty((cells, count, rows)), np.zeros((cells, count, self.Z.shape[1]))
        sides[:, 0], border[:, 0] = _times(half.K, half.parts, half.residual), half.residual @ self.Z
        sides[:, 1:] = (-to.T @ pulls.reshape(len(pulls), -1)).reshape(-1, cells, rows).transpose(1, 0, 2)
        found, shifts = half.factors.solve(sides, border)
        moves = found[:, 1:]  # less: the solutions go the other way
        wishes = shares * ((half.residual - found[:, 0]) @ self.kernels)
        gradient = -(wishes * half.a).sum(2).T
        seen = sides[:, 1:] - _times(half.K, half.parts, moves) + shifts[:, 1:] @ self.Z.T
        seen *= half.held[:, None]
        crossed = (to.T @ wishes.transpose(1, 0, 2)) @ moves.transpose(0, 2, 1)
        hessian = seen @ seen.transpose(0, 2, 1) + crossed + crossed.transpose(0, 2, 1)
        hessian -= (to.T * gradient[:, None, :]) @ to
        parts = (half.losses, gradient @ to, hessian)
        values, gradients, hessians = (gathered(half.cells, which, part, self.weights) for part in parts)
        return values, gradients, hessians

    def values(self, theta: Array, which: Index, close: float, some: int | None = None) -> Array:
        """The losses alone, of the first cells of each problem or of all."""
        half = self._solved(theta, which, some)
        return gathered(half.cells, which, half.losses, self.weights)

    def each(self, theta: Array, close: float, to: Array) -> list[Array]:
        """The losses of the held-out rows of each cell; 0 for rows of no weight."""
        every = np.arange(len(self.sets.problems))
        half = self._solved(theta[every], every)
        residual = half.residual / np.where(self.root > 0, self.root, 1.0)
        return [0.5 * own[self.sets.held[h]] ** 2 for own, (_, _, h) in zip(residual, half.cells, strict=True)]

    def fitted(self, theta: Array) -> Solved:
        """The coefficients on all rows."""
        factor = _factor(np.tensordot(np.exp(-theta), self.kernels, 1))
        back = dpotrs(factor, self.Zy, lower=1)[0]
        b = _inverses((self.Z.T @ back[:, :-1])[None])[0] @ (self.Z.T @ back[:, -1])
        penalties = self.grouping.penalties(theta)
        free = penalties == 0
        w = self.sets.rows.X.T @ (self.root * (back[:, -1] - back[:, :-1] @ b)) / np.where(free, 1.0, penalties)
        w[free] = b
        return Solved(w[:, None], lambda v: v)

    def remembered(self) -> None:
        """Nothing: solutions do not begin with others."""

    def recall(self, memory: Any) -> None:
        """Nothing."""

    def _solved(self, theta: Array, which: Index, some: int | None = None) -> Half:
        cells = self.sets.of(which, some)
        flat = self.kernels.reshape(theta.shape[1], -1)
        K = np.matmul(np.exp(-theta), flat, out=self._room(len(which), flat.shape[1]))
        K = K.reshape(-1, *self.kernels.shape[1:])
        ends = np.searchsorted([b for b, _, _ in cells], [*which, which[-1] + 1]).tolist()
        parts = [slice(begin, end) for begin, end in pairwise(ends)]
        known: dict[tuple[int, bytes], int] = {}  # problems share training sets, and at first penalties
        each: list[tuple[Index, Array]] = []
        back = np.zeros((len(cells), *self.Zy.T.shape))
        for own, at, part in zip(K, theta, parts, strict=True):
            for _, train, _ in cells[part]:
                cell = known.setdefault((train, at.tobytes()), len(each))
                if cell == len(each):
                    rows, factor = self.sets.train[train], self._factor(own, len(each), train)
                    back[cell][:, rows] = dpotrs(factor, self.Zy.take(rows, 0), lower=1)[0].T
                    each.append((rows, factor))
                else:
                    back[len(each)] = back[cell]
                    each.append(each[cell])
        crossed = back @ self.Z
        inner = _inverses(crossed[:, :-1])
        b = crossed[:, -1:] @ inner
        factors = Factors(each, self.Z, back[:, :-1], inner)
        a = back[:, -1] - (b @ factors.back)[:, 0]
        held = self.masks[[held for _, _, held in cells]]
        return Half(cells, factors, K, parts, a, held * (_times(K, parts, a) + b[:, 0] @ self.Z.T - self.y), held)

    def _factor(self, K: Array, number: int, train: int) -> Array:
        rows = self.sets.train[train]
        some, own = self._room(len(rows), len(K)), self._room(len(rows), len(rows), number)
        return _factor(K.take(rows, 0, some, "clip").take(rows, 1, own, "clip"))

    def _room(self, *key: int) -> Array:
        if key not in self.memory:
            self.memory[key] = np.empty(key[:2])
        return self.memory[key]


def _factor(K: Array) -> Array:
    """Of ``I + K``, in its place."""
    K.ravel()[:: len(K) + 1] += 1.0
    factor, failed = dpotrf(K.T, lower=1, clean=0, overwrite_a=1)
    if failed:
        raise LinAlgError("the kernel of the rows is not positive definite")
    return np.asarray(factor)


def _times(K: Array, parts: list[slice], vectors: Array) -> Array:
    """The kernel of each cell's problem times its vectors, which lie along the last axis."""
    found = np.empty_like(vectors)
    for one, part in zip(K, parts, strict=True):
        own = vectors[part]
        found[part] = (own.reshape(-1, len(one)) @ one).reshape(own.shape)
    return found


def _inverses(matrices: Array) -> Array:
    """Of small matrices, which may be singular where columns are alike."""
    if matrices.shape[1] == 1:
        return np.asarray(1.0 / np.where(matrices > 0, matrices, np.inf))
    return np.asarray(np.linalg.pinv(matrices, hermitian=True)) if matrices.shape[1] else matrices
