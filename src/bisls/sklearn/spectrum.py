"""One penalty by the rows: with the spectrum of all columns any penalty costs little; see `dual` for what is computed.

``A = V diag(h) V' - Z Z'`` with ``h = 1 / (1 + kappa exp(-theta))``, Z an orthonormal basis of the columns of no penalty, and
kappa and V of what is orthogonal to it. The errors of rows F that are left out, ``A_FF^-1 (A y)_F``, have their derivatives by
theta through ``h' = h (1 - h)`` and ``h'' = (1 - 2 h) h'``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from bisls.sklearn.cells import Evaluated, Sets, halved
from bisls.sklearn.dual import Parts
from bisls.sklearn.lower import Array
from bisls.sklearn.tuning import Grouping, Index

SEEN = 1e-6  # of each column of no penalty, squared, that training rows must have
ROWS = 1000  # up to which a spectrum takes less time than the factors in its place


class Spectrum:
    """Cells of one upper problem with one penalty, for the squared error.

    Args:
        sets: The cells.
        grouping: The groups.
        parts: What kernels are made of, of all rows.
    """

    def __init__(self, sets: Sets, grouping: Grouping, parts: Parts):
        self.sets, self.weights, self.closed = sets, sets.weights(), True
        root = np.sqrt(sets.rows.s)
        X, y, Z = parts.X[:-1], sets.rows.y * root, _free(sets, grouping)
        X, y = X - Z @ (Z.T @ X), y - Z @ (Z.T @ y)
        kappa, V = np.linalg.eigh(X @ X.T)
        self.kappa, self.turned = np.maximum(kappa, 0.0), V.T @ y
        held = [sets.held[h] for _, _, h in sets.cells]
        size = max(map(len, held))
        self.V, free = (np.zeros((len(held), size, part.shape[1])) for part in (V, Z))
        self.rest = np.zeros((len(held), size, size))
        for own, left, rest, at in zip(self.V, free, self.rest, held, strict=True):
            own[: len(at)], left[: len(at)] = V[at], Z[at]
            rest.flat[len(at) * (size + 1) :: size + 1] = 1.0  # rows of zeros fill it up
        self.rest -= free @ free.transpose(0, 2, 1)

    @staticmethod
    def suits(sets: Sets, grouping: Grouping) -> bool:
        """Whether the training rows of each cell are all the others, and see the columns of no penalty."""
        count = len(sets.rows.y)
        if len(sets.problems) > 1 or count > ROWS:
            return False
        Z = _free(sets, grouping)
        for _, t, h in sets.cells:
            at = Z[sets.held[h]]
            both = np.concatenate([sets.train[t], sets.held[h]])
            if len(both) != count or np.bincount(both, minlength=count).max() > 1:
                return False
            if Z.shape[1] and np.linalg.norm(at.T @ at, 2) > 1.0 - SEEN:
                return False
        return True

    def evaluate(self, theta: Array, which: Index, close: float, to: Array) -> Evaluated:
        """The mean held-out loss and its derivatives by the logarithm of the one penalty."""
        h, V, back = self._factored(theta, None)
        error, one = back(V @ (h * self.turned)[:, None]), h * (1.0 - h)
        left = self.turned - self._inside(error)
        first = back(V @ (one * left)[..., None])
        second = back(V @ (one * ((1.0 - 2.0 * h) * left - 2.0 * self._inside(first)))[..., None])
        slope, bend = (error * first).sum(), (first * first + error * second).sum()
        parts = (0.5 * (error * error).sum(), slope, bend)
        value, gradient, hessian = (np.array([float(part)]) / self.weights for part in parts)
        return value, gradient[:, None], hessian[:, None, None]

    def values(self, theta: Array, which: Index, close: float, some: int | None = None) -> Array:
        """The losses alone, of the first cells or of all."""
        h, V, back = self._factored(theta, some)
        error = back(V @ (h * self.turned)[:, None])
        return np.asarray(0.5 * float((error * error).sum()) / self.weights)

    def remembered(self) -> None:
        """Nothing: solutions do not begin with others."""

    def recall(self, memory: Any) -> None:
        """Nothing."""

    def _factored(self, theta: Array, some: int | None) -> tuple[Array, Array, Callable[[Array], Array]]:
        """h, V, and what solves with A_FF for each fold."""
        h, V = 1.0 / (1.0 + self.kappa * np.exp(-theta[0, 0])), self.V[:some]
        M = (V * h) @ V.transpose(0, 2, 1) + self.rest[:some]
        for matrix in M:
            halved(matrix)
        return h, V, lambda vectors: np.asarray(M @ (M.transpose(0, 2, 1) @ vectors))

    def _inside(self, vectors: Array) -> Array:
        return np.asarray((self.V.transpose(0, 2, 1) @ vectors)[..., 0])


def _free(sets: Sets, grouping: Grouping) -> Array:
    """An orthonormal basis of the columns of no penalty."""
    Z = sets.rows.X[:, grouping.factors == 0] * np.sqrt(sets.rows.s)[:, None]
    if Z.shape[1] == 1:
        size = float(np.linalg.norm(Z))
        return Z / size if size > 0 else Z[:, :0]
    basis, sizes, _ = np.linalg.svd(Z, full_matrices=False)
    return np.asarray(basis[:, sizes > 1e-12 * sizes.max(initial=0.0)])
