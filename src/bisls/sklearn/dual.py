"""Ridge cells by their rows, where these are fewer than the columns; see `cells` for what is computed.

With rows times the roots of their weights, ``K = sum_g exp(-theta_g) K_g`` and ``A = (I + K)^-1`` over all rows of an upper
problem, the errors of the rows F, left out, are ``A_FF^-1 (A y)_F``: one factor serves all folds of a problem. With ``A = W'W``
and N an orthonormal basis of the columns F of W, and of what columns of no penalty add to it, for each fold::

    a = W'(I - N'N) W y,    e = J N W y,    q = W'N'J'e,    dF/dtheta_g = q' L_g a,    L_g = exp(-theta_g) K_g
    d2F/dtheta_g dtheta_h = (J N W L_g a)'(J N W L_h a) - [g = h] q'L_g a
                            + (L_g q)' W'(I - N'N) W L_h a + (L_h q)' W'(I - N'N) W L_g a

All folds of all problems lie in arrays of one shape, short ones filled up with rows of zeros, which change nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from scipy.linalg import LinAlgError
from scipy.linalg.lapack import dpotrf, dpotrs, dtrtrs

from bisls.sklearn.cells import Evaluated, Sets, halved
from bisls.sklearn.lower import Array, Rows, Solved
from bisls.sklearn.tuning import Grouping, Index

LARGE = 32  # columns a group, on average, from which on products of rows are kept for each group, not the columns
ROOM = 4 * 10**6  # numbers that they may be, and at once in each array
NOTHING = 1e-20  # of the square of a column of no penalty: with less of it in training rows they do not see it


@dataclass(frozen=True)
class Parts:
    """What the kernels of the groups are made of, for some sets of rows, each ``X_g X_g'``.

    Attributes:
        X: Rows times the roots of their weights, columns over those of their factors, in the order of the groups.
        starts: Where each group begins; the end last.
        K: The kernels themselves, a group each; None where columns are few.
    """

    X: Array
    starts: Index
    K: Array | None = None

    @staticmethod
    def of(rows: Rows, grouping: Grouping) -> Parts:
        """All rows, and one of zeros."""
        blocks, n = [], len(rows.y)
        X = rows.X * np.sqrt(rows.s)[:, None]
        for group in range(grouping.count):
            own = np.flatnonzero((grouping.index == group) & (grouping.factors > 0))
            some = X.take(own, 1)
            if np.any(grouping.factors[own] != 1.0):
                some /= np.sqrt(grouping.factors[own])
            blocks.append(np.transpose(np.linalg.qr(some.T, mode="r")) if len(own) > n else some)
        starts = np.cumsum([0, *(block.shape[1] for block in blocks)])
        return Parts(np.vstack([np.hstack(blocks), np.zeros(starts[-1])]), starts)

    @property
    def count(self) -> int:
        """How many groups."""
        return len(self.starts) - 1

    def at(self, which: Index) -> Parts:
        """Sets of these rows."""
        number, many = which.shape
        X = self.X[which]
        if self.starts[-1] <= LARGE * self.count or number * self.count * many**2 > ROOM:
            return Parts(X, self.starts)
        K = np.empty((number, self.count, many, many))
        for own, rows in zip(K, which, strict=True):
            np.take(self._kernels.take(rows, 1), rows, 2, out=own)
        return Parts(X, self.starts, K)

    @cached_property
    def _kernels(self) -> Array:
        """Of all rows, a group each: those of sets of rows are parts of them."""
        return np.array([self.X[:, own] @ self.X[:, own].T for own in self._own()])

    def some(self, which: Index) -> Parts:
        """Some of the sets."""
        if np.array_equal(which, np.arange(len(self.X))):
            return self
        return Parts(self.X[which], self.starts, None if self.K is None else self.K[which])

    def _own(self) -> list[slice]:
        return [slice(begin, end) for begin, end in zip(self.starts[:-1], self.starts[1:], strict=True)]

    def added(self, shares: Array) -> Array:
        """``I + K`` of each set."""
        number, many = self.X.shape[:2]
        if self.K is not None:
            K = (shares[:, None] @ self.K.reshape(number, self.count, -1)).reshape(number, many, many)
        else:
            scaled = self.X * np.repeat(np.sqrt(shares), np.diff(self.starts), axis=1)[:, None]
            K = scaled @ scaled.transpose(0, 2, 1)
        K.reshape(number, -1)[:, :: many + 1] += 1.0
        return np.asarray(K)

    def pulled(self, shares: Array, vectors: Array) -> Array:
        """``L_g v`` for each set, vector and group."""
        if self.K is not None:
            return np.asarray((shares[:, :, None, None] * (vectors[:, None] @ self.K)).transpose(0, 2, 1, 3))
        w = vectors @ self.X
        w *= np.repeat(shares, np.diff(self.starts), axis=1)[:, None]
        if self.starts[-1] == self.count:  # a column each
            return np.asarray(w[..., None] * self.X.transpose(0, 2, 1)[:, None])
        found = np.empty((*vectors.shape[:2], self.count, vectors.shape[2]))
        for group, own in enumerate(self._own()):
            np.matmul(w[..., own], self.X[:, :, own].transpose(0, 2, 1), out=found[:, :, group])
        return found


@dataclass(frozen=True)
class Layout:
    """Which rows lie where: of each system its folds, then what is held out in none.

    Attributes:
        rows: A row a system; what is filled up has the number of the row of zeros.
        owner: The problem of each system.
        cells: The number of the cell of each fold, -1 for none.
        size: The length of a fold.
    """

    rows: Index
    owner: Index
    cells: Index
    size: int

    @staticmethod
    def of(sets: Sets) -> Layout:
        """Cells of a problem share a system where training and held-out rows are the same together, and held-out ones differ."""
        count, known = len(sets.rows.y), dict[Any, list[tuple[int, Index, list[int]]]]()
        for number, (problem, t, h) in enumerate(sets.cells):
            train, held = np.bincount(sets.train[t], minlength=count), np.bincount(sets.held[h], minlength=count)
            both = train + held
            alone = both.max() > 1  # a row that is there twice
            systems = known.setdefault((problem, number if alone else both.tobytes()), [])
            for _, left, numbers in systems:
                if not np.any(held > left):
                    left -= held
                    numbers.append(number)
                    break
            else:
                systems.append((problem, train.copy(), [number]))
        found = [one for systems in known.values() for one in systems]
        folds, size = max(len(numbers) for _, _, numbers in found), max(map(len, sets.held))
        rest = max(int(left.sum()) for _, left, _ in found)
        rows = np.full((len(found), folds * size + rest), count)
        cells = np.full((len(found), folds), -1)
        for own, named, (_, left, numbers) in zip(rows, cells, found, strict=True):
            named[: len(numbers)] = numbers
            for place, number in enumerate(numbers):
                at = sets.held[sets.cells[number][2]]
                own[place * size : place * size + len(at)] = at
            at = np.repeat(np.arange(count), left)
            own[folds * size : folds * size + len(at)] = at
        return Layout(rows, np.array([problem for problem, _, _ in found]), cells, size)


@dataclass(frozen=True)
class Taken:
    """The systems of some problems."""

    owner: Index
    parts: Parts
    Zy: Array


class RowRidges:
    """Cells of the squared error by kernels of the rows.

    Args:
        sets: The cells.
        grouping: The groups.
        parts: What kernels are made of, of all rows.
    """

    def __init__(self, sets: Sets, grouping: Grouping, parts: Parts):
        self.sets, self.grouping, self.parts = sets, grouping, parts
        self.root = np.sqrt(sets.rows.s)
        Zy = np.column_stack([sets.rows.X[:, grouping.factors == 0], sets.rows.y]) * self.root[:, None]
        self.Zy = np.vstack([Zy, np.zeros(Zy.shape[1])])
        self.weights, self.closed = sets.weights(), True
        self.kept, self.inner = dict[bytes, Taken](), self

    def evaluate(self, theta: Array, which: Index, close: float, to: Array) -> Evaluated:
        """Mean held-out losses of these problems, gradients and Hessians along some directions."""
        folds, size = self.layout.cells.shape[1], self.layout.size
        some = max(1, ROOM // (2 * folds * self.parts.count * self.layout.rows.shape[1]))
        if len(which) > some:
            pieces = [slice(begin, begin + some) for begin in range(0, len(which), some)]
            found = [self.evaluate(theta[piece], which[piece], close, to) for piece in pieces]
            values, gradients, hessians = (np.concatenate(each) for each in zip(*found, strict=True))
            return values, gradients, hessians
        total = len(self.sets.problems)
        if (
            total <= some and total > len(which) > total // 2 and self._all.parts.K is not None
        ):  # copies would take longer
            whole = np.repeat(theta[:1], total, axis=0)
            whole[which] = theta
            values, gradients, hessians = self.evaluate(whole, np.arange(total), close, to)
            return values[which], gradients[which], hessians[which]
        taken = self._taken(which)
        systems, shares = len(taken.owner), np.exp(-theta)[taken.owner]
        back = taken.parts.added(shares)
        many = back.shape[1]
        for matrix in back:
            halved(matrix)  # W'
        seen = back.transpose(0, 2, 1) @ taken.Zy
        N, J, moved = _bases(back[:, : folds * size].reshape(systems, folds, size, many), seen)
        error = J @ moved
        pair = np.empty((systems, 2, folds, many))
        np.subtract(seen[:, None, :, -1], (moved.transpose(0, 1, 3, 2) @ N)[:, :, 0], out=pair[:, 0])
        np.matmul(error.transpose(0, 1, 3, 2) @ J, N, out=pair[:, 1, :, None])
        aq = pair.reshape(systems, 2 * folds, many) @ back.transpose(0, 2, 1)
        pulls = taken.parts.pulled(shares, aq)  # a system, a and then q of each fold, a group, a row
        gradient = (pulls[:, :folds] @ aq[:, folds:, :, None])[..., 0]
        if to.shape[0] != to.shape[1] or np.any(to != np.eye(len(to))):
            pulls = to.T @ pulls
        count = pulls.shape[2]
        pulls = (pulls.reshape(systems, -1, many) @ back).reshape(systems, 2, folds, count, many)
        along = pulls @ N.transpose(0, 1, 3, 2)[:, None]
        ahead = along[:, 0] @ J.transpose(0, 1, 3, 2)
        crossed = pulls[:, 0] @ pulls[:, 1].transpose(0, 1, 3, 2) - along[:, 0] @ along[:, 1].transpose(0, 1, 3, 2)
        hessian = ahead @ ahead.transpose(0, 1, 3, 2) + crossed + crossed.transpose(0, 1, 3, 2)
        hessian, gradient = hessian.sum(1), gradient.sum(1)
        hessian -= (to.T * gradient[:, None, :]) @ to
        parts = (0.5 * (error**2).sum((1, 2, 3)), gradient @ to, hessian)
        values, gradients, hessians = (self._gathered(part, taken.owner, which) for part in parts)
        return values, gradients, hessians

    def values(self, theta: Array, which: Index, close: float, some: int | None = None) -> Array:
        """The losses alone, of the first cells of each problem or of all."""
        cells, number = self.sets.of(which, some), {int(b): i for i, b in enumerate(which)}
        owner = np.array([number[b] for b, _, _ in cells])
        losses = np.array([0.5 * float(e @ e) for e in self._errors(theta[owner], cells)])
        return self._gathered(losses, owner, which)

    def each(self, theta: Array, close: float, to: Array) -> list[Array]:
        """The losses of the held-out rows of each cell; 0 for rows of no weight."""
        root, cells = np.where(self.root > 0, self.root, 1.0), self.sets.cells
        theta = theta[[b for b, _, _ in cells]]
        errors = self._errors(theta, cells) if self._beside is None else self._beside_errors(theta)
        held = [self.sets.held[h] for _, _, h in cells]
        return [0.5 * (e[: len(at)] / root[at]) ** 2 for e, at in zip(errors, held, strict=True)]

    def fitted(self, theta: Array) -> Solved:
        """The coefficients on all rows."""
        K = Parts(self.parts.X[None, :-1], self.parts.starts).added(np.exp(-theta)[None])[0]
        Zy = self.Zy[:-1]
        back = dpotrs(_factor(K), Zy, lower=1)[0]
        Z = Zy[:, :-1]
        root = _roots((Z.T @ back[:, :-1])[None], (Z**2).sum(0)[None])[0]
        b = root @ (root.T @ (Z.T @ back[:, -1]))
        penalties = self.grouping.penalties(theta)
        free = penalties == 0
        w = self.sets.rows.X.T @ (self.root * (back[:, -1] - back[:, :-1] @ b)) / np.where(free, 1.0, penalties)
        w[free] = b
        return Solved(w[:, None], lambda v: v)

    def follow(self, inner: RowRidges) -> None:
        """Let ``each`` use the arrays of nested folds, whose rows may be the training rows of cells of ours."""
        self.inner = inner

    def remembered(self) -> None:
        """Nothing: solutions do not begin with others."""

    def recall(self, memory: Any) -> None:
        """Nothing."""

    @cached_property
    def layout(self) -> Layout:
        """Of all problems."""
        return Layout.of(self.sets)

    @cached_property
    def _all(self) -> Taken:
        return Taken(self.layout.owner, self.parts.at(self.layout.rows), self.Zy[self.layout.rows])

    def _taken(self, which: Index) -> Taken:
        if len(which) == len(self.sets.problems):
            return self._all
        if which.tobytes() not in self.kept:
            own = np.flatnonzero(np.isin(self.layout.owner, which))
            owner = np.searchsorted(which, self.layout.owner[own])
            self.kept = {which.tobytes(): Taken(owner, self._all.parts.some(own), self._all.Zy[own])}
        return self.kept[which.tobytes()]

    @cached_property
    def _beside(self) -> Any:
        """The training rows of each cell as systems of the nested folds, and its held-out rows; None where they are none."""
        layout, count, found = self.inner.layout, len(self.root), []
        if self.inner is self:
            return None
        known = {np.sort(own[own < count]).tobytes(): number for number, own in enumerate(layout.rows)}
        for _, t, _ in self.sets.cells:
            found.append(known.get(np.sort(self.sets.train[t]).tobytes(), -1))
        if min(found) < 0:
            return None
        held = np.full((len(found), max(map(len, self.sets.held))), count)
        for own, (_, _, h) in zip(held, self.sets.cells, strict=True):
            own[: len(self.sets.held[h])] = self.sets.held[h]
        return self.inner._all.parts.some(np.array(found)), self.inner._all.Zy[found], self.parts.X[held], self.Zy[held]

    def _beside_errors(self, theta: Array) -> Array:
        parts, inside, X, Zy = self._beside
        shares = np.exp(-theta)
        K, back = parts.added(shares), np.empty_like(inside)
        for matrix, own, made in zip(K, inside, back, strict=True):
            made[:] = dpotrs(_factor(matrix), own, lower=1)[0]
        root = _roots(inside[..., :-1].transpose(0, 2, 1) @ back[..., :-1], (inside[..., :-1] ** 2).sum(1))
        b = root @ (root.transpose(0, 2, 1) @ (inside[..., :-1].transpose(0, 2, 1) @ back[..., -1:]))
        w = (back[..., -1:] - back[..., :-1] @ b).transpose(0, 2, 1) @ parts.X
        w *= np.repeat(shares, np.diff(parts.starts), axis=1)[:, None]
        return np.asarray((Zy[..., -1:] - Zy[..., :-1] @ b - X @ w.transpose(0, 2, 1))[..., 0])

    def _gathered(self, parts: Array, owner: Index, which: Index) -> Array:
        total = np.zeros((len(which), *parts.shape[1:]))
        if len(owner) == len(which):
            total[owner] = parts
        else:
            np.add.at(total, owner, parts)
        return total / self.weights[which].reshape(-1, *[1] * (parts.ndim - 1))

    def _errors(self, theta: Array, cells: list[tuple[int, int, int]]) -> list[Array]:
        """What the training rows of cells get wrong of the held-out ones, which come last in a factor of all of them."""
        found = []
        for at, (_, t, h) in zip(theta, cells, strict=True):
            order, inside = np.concatenate([self.sets.train[t], self.sets.held[h]]), len(self.sets.train[t])
            K = Parts(self.parts.X[None, order], self.parts.starts).added(np.exp(-at)[None])[0]
            factor = _factor(K)
            seen = dtrtrs(factor, self.Zy[order], lower=1)[0]
            Z, y = seen[:inside, :-1], seen[:inside, -1]
            b = _roots((Z.T @ Z)[None], (self.Zy[order, :-1] ** 2).sum(0)[None])[0]
            left = seen[inside:, -1] - seen[inside:, :-1] @ (b @ (b.T @ (Z.T @ y)))
            found.append(np.tril(factor[inside:, inside:]) @ left)
        return found


def _bases(B: Array, seen: Array) -> tuple[Array, Array, Array]:
    """N, J, and what N makes of W y, for each system and fold; from the rows of W' and from W times Z and y."""
    systems, folds, size, many = B.shape
    free = seen.shape[2] - 1
    M = B @ B.transpose(0, 1, 3, 2)
    for matrix in M.reshape(-1, size, size):
        halved(matrix)
    N, J = np.empty((systems, folds, size + free, many)), np.empty((systems, folds, size, size + free))
    np.matmul(M.transpose(0, 1, 3, 2), B, out=N[:, :, :size])
    J[..., :size] = M
    moved = np.empty((systems, folds, size + free, 1))
    inside = N[:, :, :size] @ seen[:, None]
    moved[:, :, :size] = inside[..., -1:]
    if free:
        Z = seen[:, None, :, :-1].transpose(0, 1, 3, 2) - inside[..., :-1].transpose(0, 1, 3, 2) @ N[:, :, :size]
        whole = (seen[..., :-1] ** 2).sum(1)[:, None]
        roots = _roots(Z @ Z.transpose(0, 1, 3, 2), np.broadcast_to(whole, (systems, folds, free)))
        N[:, :, size:] = roots.transpose(0, 1, 3, 2) @ Z
        J[..., size:] = M @ (inside[..., :-1] @ -roots)
        moved[:, :, size:] = N[:, :, size:] @ seen[:, None, :, -1:]
    return N, J, moved


def _roots(grams: Array, whole: Array) -> Array:
    """R with ``R R'`` the inverse of products of columns of no penalty; 0 for what training rows do not see."""
    if grams.shape[-1] == 1:
        return np.where(grams > NOTHING * whole[..., None], grams, np.inf) ** -0.5
    if not grams.shape[-1]:
        return grams
    size = np.sqrt(np.maximum(whole, np.finfo(float).tiny))
    values, vectors = np.linalg.eigh(grams / size[..., None] / size[..., None, :])
    values = np.where(values > 1e-14, values, np.inf)
    return np.asarray(vectors * values[..., None, :] ** -0.5 / size[..., None])


def _factor(K: Array) -> Array:
    """The Cholesky factor, in the place of the matrix."""
    factor, failed = dpotrf(K.T, lower=1, clean=0, overwrite_a=1)
    if failed:
        raise LinAlgError("the kernel of the rows is not positive definite")
    return np.asarray(factor)
