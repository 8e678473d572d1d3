"""The lower problem of one fold, solved exactly: a penalised linear model by Newton's method and Cholesky factors.

The loss is summed over rows, each with its weight, as scikit-learn sums it: ``sum_i s_i l(y_i, x_i w) + 1/2 sum_j p_j w_j^2``,
with ``l`` half the squared error, or the log-loss. So p is the ``alpha`` of `Ridge` and the ``1 / C`` of `LogisticRegression`.
The last column is the intercept's; its penalty is 0.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from scipy.linalg import LinAlgError, cho_factor, cho_solve
from scipy.linalg.lapack import dpotrs
from scipy.special import expit, softmax

Array = NDArray[np.float64]
JITTER = 1e-10  # of the rows' weight: what is neither penalised nor decided by the data stays where it is
WIDE = 2  # columns over rows from which on a factor is one of the rows
LITTLE = 1e-6  # the same in a factor by rows, which only preconditions
CLOSE = 1e-14  # the Newton decrement, of the rows' weight, at which a solution is one
FLAT = 1e-10  # below this values of the loss tell nothing any more: steps are taken as they are, while they shrink
SINGLE = 1e-4  # tolerances from which on conjugate gradients see columns in single precision
ENOUGH = 1e-7  # decrements from which on the Hessian of a Newton step may be one of single precision
COARSE: Array = 10.0 ** np.arange(2.0, -6.5, -1.0)
PATIENCE = 5  # conjugate gradients with a factor nearby that need more are slower than a new factor
NEWTON = 60  # Newton steps at most; some ten are usual from nothing, one or two from a neighbour


@dataclass(frozen=True)
class Rows:
    """Some rows of a table: columns (the intercept's last), targets and weights."""

    X: Array
    y: Array
    s: Array

    def at(self, which: NDArray[np.intp]) -> Rows:
        """Some of them."""
        return Rows(np.ascontiguousarray(self.X[which]), self.y[which], self.s[which])

    @property
    def weight(self) -> float:
        """The sum of the weights."""
        return float(self.s.sum())

    @cached_property
    def single(self) -> NDArray[np.float32]:
        """The columns in single precision, for products of which three digits are wanted: half as much to read."""
        return self.X.astype(np.float32)

    def columns(self, tol: float) -> Any:
        """The columns as exactly as products that are right to this tolerance want them."""
        return self.single if tol >= SINGLE else self.X

    @property
    def wide(self) -> bool:
        """Whether there are so many columns that the matrix of rows is the cheaper one."""
        return self.X.shape[1] > WIDE * len(self.X)


@dataclass(frozen=True)
class Solved:
    """A lower solution, and how to solve with the Hessian there.

    Attributes:
        w: The coefficients, a column a class.
        solve: Solves with the Hessian.
        factor: The Cholesky factor that the next solution, for penalties nearby, may use; None for none yet.
        closed: Whether it is a solution.
        pull: How the lower gradient changes with the logarithm of each penalty; None for ``p w``.
    """

    w: Array
    solve: Callable[[Array], Array]
    factor: Any = None
    closed: bool = True
    pull: Array | None = None


class Wide:
    """A factor for many more columns than rows: ``(X'SX + D)^-1`` by the matrix of rows, ``I + S^1/2 X D^-1 X' S^1/2``.

    Args:
        X: Rows times the roots of their weights.
        d: What is added on the diagonal; positive.
    """

    def __init__(self, X: Array, d: Array):
        self.X, self.d = X, d
        kernel = (X / d) @ X.T
        kernel[np.diag_indices_from(kernel)] += 1.0
        self.factor = cho_factor(kernel, lower=True, overwrite_a=True, check_finite=False)

    def solve(self, v: Array) -> Array:
        """The product with a vector."""
        inner, _ = dpotrs(self.factor[0], self.X @ (v / self.d), lower=1)
        return np.asarray((v - self.X.T @ inner) / self.d)


class Loss(ABC):
    """How predictions are judged, and how the lower problem with it is solved."""

    outputs: int = 1

    @property
    def coarse(self) -> Array:
        """Common penalties that a search looks at first, from above, in units of `unit`."""
        return COARSE

    def unit(self, rows: Rows) -> float:
        """What a penalty is compared with: the rows' weight, where losses are summed."""
        return rows.weight

    @abstractmethod
    def each(self, rows: Rows, w: Array) -> tuple[Array, Array]:
        """The loss of every row, not weighted, and its derivative by the linear predictor (a column a class)."""

    @abstractmethod
    def bent(self, rows: Rows, w: Array) -> Callable[[Array], Array]:
        """The second derivatives by the linear predictor, as what they make of a change of it; weighted."""

    @abstractmethod
    def curved(self, rows: Rows, w: Array, single: bool = False) -> Array:
        """The Hessian of the summed loss by w, flattened class after class; in single precision where that is enough."""

    def prepared(self, rows: Rows) -> Any:
        """What can be computed once for rows that are solved again and again."""
        return None

    def diagonal(self, rows: Rows, w: Array) -> Array | None:
        """The second derivatives by the linear predictor, weighted, where there is one a row; None where there are more."""
        return None

    def solve(
        self,
        rows: Rows,
        penalties: Array,
        start: Array,
        *,
        near: Any = None,
        prepared: Any = None,
        close: float = CLOSE,
    ) -> Solved:
        """The lower solution for these penalties, by Newton's method with step halving.

        The factor of a solution nearby preconditions the Newton systems; the Hessian is formed anew where that takes long.

        Args:
            rows: The training rows.
            penalties: One a column, the intercept's 0 last.
            start: Where to begin, shaped (columns, outputs).
            near: The factor of a solution nearby.
            prepared: What `prepared` gave for these rows.
            close: The Newton decrement, of the rows' weight, at which a solution is one.
        """
        p, weight, factor = penalties[:, None], rows.weight, near
        w, closed, last = start, False, np.inf
        each, slope = self.each(rows, w)
        value = float(rows.s @ each) + 0.5 * float((p * w * w).sum())
        for _ in range(NEWTON):
            gradient = rows.X.T @ (rows.s[:, None] * slope) + p * w
            step = None if factor is None else self._conjugate(rows, p, w, factor, gradient, 0.05, PATIENCE)
            if step is None:
                factor = self._factor(rows, penalties, w, close >= ENOUGH)
                step = self._back(factor, gradient)
            decrement = float((gradient * step).sum())
            if not np.isfinite(decrement):
                raise LinAlgError("the Newton step is not finite")
            t, moved = 1.0, False
            while t > 1e-6 and not moved:
                trial = w - t * step
                each, slope_t = self.each(rows, trial)
                value_t = float(rows.s @ each) + 0.5 * float((p * trial * trial).sum())
                moved = value_t <= value - 1e-4 * t * decrement or decrement <= FLAT * weight
                t *= 0.5
            if moved:
                w, value, slope = trial, value_t, slope_t
            settled = decrement <= close * weight or (decrement <= FLAT * weight and decrement > 0.2 * last)
            if settled or not moved:
                closed = decrement <= max(close, FLAT) * weight
                break
            last = decrement
        return Solved(w, self._solver(rows, penalties, w, factor, close**0.5), factor, closed)

    def _factor(self, rows: Rows, penalties: Array, w: Array, single: bool = False) -> Any:
        second = self.diagonal(rows, w) if rows.wide else None
        if second is not None:
            # what is not penalised must have something to divide by; conjugate gradients see to the rest
            d = penalties + np.where(penalties == 0, LITTLE, JITTER) * rows.weight
            return Wide(rows.X * np.sqrt(second)[:, None], d)
        hessian = self.curved(rows, w, single)
        hessian[np.diag_indices_from(hessian)] += np.tile(penalties, self.outputs) + JITTER * rows.weight
        try:
            return cho_factor(hessian, lower=True, overwrite_a=True, check_finite=False)
        except LinAlgError:
            if single:  # columns that are alike
                return self._factor(rows, penalties, w)
            raise

    def _back(self, factor: Any, v: Array) -> Array:
        if isinstance(factor, Wide):
            return factor.solve(v[:, 0])[:, None]
        found, _ = dpotrs(factor[0], v.T.ravel(), lower=1)  # as cho_solve, without its looking at what came
        return np.asarray(found.reshape(self.outputs, -1).T)

    def _solver(self, rows: Rows, penalties: Array, w: Array, factor: Any, tol: float) -> Callable[[Array], Array]:
        def solve(v: Array) -> Array:
            found = self._conjugate(rows, penalties[:, None], w, factor, v, max(tol, 1e-11), 4 * PATIENCE)
            return self._back(self._factor(rows, penalties, w), v) if found is None else found

        return solve

    def _conjugate(self, rows: Rows, p: Array, w: Array, factor: Any, b: Array, tol: float, most: int) -> Array | None:
        """The solution of H z = b by conjugate gradients, preconditioned by a factor nearby; None where that takes long."""
        bend, jitter, X = self.bent(rows, w), JITTER * rows.weight, rows.columns(tol)
        z, r = np.zeros_like(b), b
        m = self._back(factor, r)
        d, rho = m, float((r * m).sum())
        goal = tol * tol * rho
        for _ in range(most):
            if rho <= goal or rho <= 0.0:
                return z
            Hd = X.T @ bend(X @ d.astype(X.dtype, copy=False)).astype(X.dtype, copy=False) + (p + jitter) * d
            along = rho / float((d * Hd).sum())
            z = z + along * d
            r = r - along * Hd
            m = self._back(factor, r)
            rho, before = float((r * m).sum()), rho
            d = m + rho / before * d
        return z if rho <= goal else None


class Bent(Protocol):
    """A loss of one linear predictor, with its derivatives by it."""

    def bends(self, eta: Array, y: Array) -> tuple[Array, Array, Array, Array]:
        """The loss of each row and its first three derivatives by the linear predictor, not weighted."""


class Squared(Loss):
    """Half the squared error. The Hessian does not depend on w, so one factor solves it."""

    def bends(self, eta: Array, y: Array) -> tuple[Array, Array, Array, Array]:
        """Half the square of the residual, the residual, 1 and 0."""
        residual = eta - y
        return 0.5 * residual * residual, residual, np.ones_like(eta), np.zeros_like(eta)

    def each(self, rows: Rows, w: Array) -> tuple[Array, Array]:
        """Half the square of the residual, and the residual."""
        residual = rows.X @ w[:, 0] - rows.y
        return 0.5 * residual * residual, residual[:, None]

    def curved(self, rows: Rows, w: Array, single: bool = False) -> Array:
        """X' S X."""
        return np.asarray(rows.X.T @ (rows.s[:, None] * rows.X))

    def diagonal(self, rows: Rows, w: Array) -> Array:
        """The weights."""
        return rows.s

    def prepared(self, rows: Rows) -> tuple[Array, Array] | None:
        """X' S X and X' S y; nothing where there are many more columns than rows."""
        return None if rows.wide else self._products(rows)

    def _products(self, rows: Rows) -> tuple[Array, Array]:
        return self.curved(rows, rows.X[:0].T), rows.X.T @ (rows.s * rows.y)

    def bent(self, rows: Rows, w: Array) -> Callable[[Array], Array]:
        """The weights."""
        return lambda eta: rows.s[:, None] * eta

    def solve(
        self,
        rows: Rows,
        penalties: Array,
        start: Array,
        *,
        near: Any = None,
        prepared: Any = None,
        close: float = CLOSE,
    ) -> Solved:
        """By one Cholesky factorisation."""
        if rows.wide:
            return super().solve(rows, penalties, start, close=close)
        gram, right = prepared if prepared is not None else self._products(rows)
        hessian = gram.copy()
        hessian[np.diag_indices_from(hessian)] += penalties + JITTER * rows.weight
        factor = cho_factor(hessian, lower=True, overwrite_a=True, check_finite=False)
        w = cho_solve(factor, right, check_finite=False)
        w = w + cho_solve(factor, right - gram @ w - penalties * w, check_finite=False)  # what the jitter took away
        return Solved(w[:, None], lambda v: self._back(factor, v))


class Logistic(Loss):
    """The log-loss of two classes; targets are 0 and 1."""

    def bends(self, eta: Array, y: Array) -> tuple[Array, Array, Array, Array]:
        """``log(1 + exp(eta)) - y eta``, p - y, p (1 - p) and p (1 - p) (1 - 2 p)."""
        p = expit(eta)
        second = p * (1.0 - p)
        return np.logaddexp(0.0, eta) - y * eta, p - y, second, second * (1.0 - 2.0 * p)

    def each(self, rows: Rows, w: Array) -> tuple[Array, Array]:
        """``log(1 + exp(eta)) - y eta``."""
        eta = rows.X @ w[:, 0]
        return np.logaddexp(0.0, eta) - rows.y * eta, (expit(eta) - rows.y)[:, None]

    def bent(self, rows: Rows, w: Array) -> Callable[[Array], Array]:
        """s p (1 - p)."""
        scale = self.diagonal(rows, w)[:, None]
        return lambda eta: scale * eta

    def diagonal(self, rows: Rows, w: Array) -> Array:
        """s p (1 - p)."""
        p = expit(rows.X @ w[:, 0])
        return np.asarray(rows.s * p * (1.0 - p))

    def curved(self, rows: Rows, w: Array, single: bool = False) -> Array:
        """X' S diag(p (1 - p)) X."""
        p = expit(rows.X @ w[:, 0])
        X: Any = rows.single if single else rows.X
        scaled = X * np.sqrt(rows.s * p * (1.0 - p))[:, None].astype(X.dtype, copy=False)
        return np.asarray(scaled.T @ scaled, dtype=float)


@dataclass(frozen=True)
class Multinomial(Loss):
    """The log-loss of several classes, one column of coefficients each; targets are class numbers."""

    outputs: int = 3

    def solve(
        self,
        rows: Rows,
        penalties: Array,
        start: Array,
        *,
        near: Any = None,
        prepared: Any = None,
        close: float = CLOSE,
    ) -> Solved:
        """As any other; what no penalty decides is 0 on the mean over the classes, which the loss does not see."""
        found = super().solve(rows, penalties, start, near=near, prepared=prepared, close=close)
        free = penalties == 0
        found.w[free] -= found.w[free].mean(1, keepdims=True)
        return found

    def each(self, rows: Rows, w: Array) -> tuple[Array, Array]:
        """``logsumexp(eta) - eta_y``."""
        eta = rows.X @ w
        eta -= eta.max(1, keepdims=True)
        at = (np.arange(len(eta)), rows.y.astype(np.intp))
        slope = np.exp(eta)
        total = slope.sum(1, keepdims=True)
        each = np.log(total[:, 0]) - eta[at]
        slope /= total
        slope[at] -= 1.0
        return each, slope

    def bent(self, rows: Rows, w: Array) -> Callable[[Array], Array]:
        """``s (P u - P <P, u>)``."""
        P = softmax(rows.X @ w, axis=1)
        return lambda eta: rows.s[:, None] * P * (eta - (P * eta).sum(1, keepdims=True))

    def curved(self, rows: Rows, w: Array, single: bool = False) -> Array:
        """Blocks X' S diag(P_a (1[a = b] - P_b)) X."""
        P = softmax(rows.X @ w, axis=1)
        n = rows.X.shape[1]
        hessian = np.empty((self.outputs * n, self.outputs * n))
        for a in range(self.outputs):
            for b in range(a + 1):
                scale = rows.s * P[:, a] * (float(a == b) - P[:, b])
                block = rows.X.T @ (scale[:, None] * rows.X)
                hessian[a * n : (a + 1) * n, b * n : (b + 1) * n] = block
                hessian[b * n : (b + 1) * n, a * n : (a + 1) * n] = block
        return hessian
