"""Cells of several classes; see `cells` for what is computed.

The Hessian of all coefficients would be as many times larger as there are classes, on each side. Its blocks on the diagonal, one
a class, precondition conjugate gradients, with all right sides at once. With P the probabilities and ``~`` for what is left of a
change of the linear predictors without its mean under P, the second derivative of the loss is ``sum_k P_k a~_k b~_k`` and the
third ``sum_k P_k a~_k b~_k c~_k``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.linalg import LinAlgError
from scipy.linalg.lapack import dpotrf, dpotrs

from bisls.sklearn.cells import Sets
from bisls.sklearn.kernels import ROUGH, Derived, OneByOne, State
from bisls.sklearn.lower import CLOSE, FLAT, LITTLE, NEWTON, Array, Multinomial, Rows, Solved
from bisls.sklearn.tuning import Grouping

WHOLE = 300  # coefficients up to which all of them are one block
SMALL = 200  # columns up to which blocks are inverted
TURNS = 400  # of conjugate gradients at most
LONG, LONG_WHOLE = 20, 3  # of them, from which on the next solution begins with blocks of its own
INEXACT, EXACT = 0.1, 1e-6  # how exactly the first Newton systems are solved, and the last where it must be


@dataclass(frozen=True)
class ByKernel:
    """What solves with the blocks by the rows: ``(X'R^2 X + D)^-1 = D^-1 - D^-1 X'R (I + R X D^-1 X'R)^-1 R X D^-1``.

    Attributes:
        X: The columns.
        Xd: The same by D^-1.
        d: D, of all blocks.
        roots: R of each class, a column each.
        inner: The inverses of the matrices of rows.
    """

    X: Array
    Xd: Array
    d: Array
    roots: Array
    inner: Array

    @staticmethod
    def of(lower: Lower) -> ByKernel:
        """Of a lower problem."""
        rows, P = lower.rows, lower.P
        d = lower.penalties + LITTLE * rows.weight
        roots = np.sqrt(rows.s[:, None] * P * (1.0 - P))
        each = np.ascontiguousarray(roots.T)
        Xd = rows.X / d
        kernels = each[:, :, None] * (Xd @ rows.X.T) * each[:, None]
        kernels[:, np.arange(len(roots)), np.arange(len(roots))] += 1.0
        return ByKernel(rows.X, Xd, d, roots, np.linalg.inv(kernels))

    def back(self, vectors: Array) -> Array:
        """The solutions for vectors, shaped (columns, classes, vectors)."""
        p, C, k = vectors.shape
        scaled = vectors / self.d[:, None, None]
        seen = (self.X @ scaled.reshape(p, C * k)).reshape(-1, C, k)
        seen *= self.roots[:, :, None]
        inner = (self.inner @ seen.transpose(1, 0, 2)).transpose(1, 0, 2) * self.roots[:, :, None]
        scaled -= (self.Xd.T @ inner.reshape(-1, C * k)).reshape(p, C, k)
        return scaled


class Lower:
    """A lower problem at some coefficients: products with its Hessian, and its blocks.

    Args:
        rows: The training rows.
        penalties: One a column.
        w: The coefficients, a column a class.
    """

    def __init__(self, rows: Rows, penalties: Array, w: Array):
        self.rows, self.penalties = rows, penalties
        P = rows.X @ w  # the softmax of it, in place: it is made at every trial
        P -= P.max(1, keepdims=True)
        np.exp(P, out=P)
        P /= P.sum(1, keepdims=True)
        self.P = P
        self.weighted = rows.s[:, None] * self.P

    def centred(self, eta: Array) -> Array:
        """Changes of the linear predictors, shaped (rows, classes, ...), without their means under P."""
        return np.asarray(eta - np.einsum("nc,nck->nk", self.P, eta)[:, None])

    def times(self, vectors: Array) -> Array:
        """The Hessian times vectors, shaped (columns, classes, vectors)."""
        p, C, k = vectors.shape
        bent = (self.rows.X @ vectors.reshape(p, C * k)).reshape(-1, C, k)
        bent -= np.einsum("nc,nck->nk", self.P, bent)[:, None]
        bent *= self.weighted[:, :, None]
        return np.asarray(
            (self.rows.X.T @ bent.reshape(-1, C * k)).reshape(p, C, k) + self.penalties[:, None, None] * vectors
        )

    def blocks(self) -> Any:
        """The blocks of the Hessian, one a class: their inverses where columns are few, otherwise Cholesky factors.

        Where coefficients are few it is one block of all of them; where rows are fewer than columns inverses are by the rows.
        """
        if self.P.shape[1] * len(self.penalties) <= WHOLE:
            return self._whole()
        if len(self.penalties) > max(SMALL, len(self.rows.y)):
            return ByKernel.of(self)
        found = []
        for P in self.P.T:
            scaled = self.rows.X * np.sqrt(self.rows.s * P * (1.0 - P))[:, None]
            block = scaled.T @ scaled
            block.flat[:: len(block) + 1] += self.penalties + LITTLE * self.rows.weight
            found.append(block)
        if len(self.penalties) <= SMALL:
            return np.linalg.inv(np.array(found))
        factors = [dpotrf(block.T, lower=1, clean=0, overwrite_a=1) for block in found]
        if any(failed for _, failed in factors):
            raise LinAlgError("the penalised products of columns are not positive definite")
        return [factor for factor, _ in factors]

    def _whole(self) -> Array:
        """The Cholesky factor of the Hessian, classes of a column side by side."""
        (n, C), p = self.P.shape, len(self.penalties)
        U = (self.rows.X[:, :, None] * (self.P * np.sqrt(self.rows.s)[:, None])[:, None]).reshape(n, p * C)
        hessian = -U.T @ U
        parts = hessian.reshape(p, C, p, C)
        for c, own in enumerate(self.weighted.T):
            parts[:, c, :, c] += self.rows.X.T @ (own[:, None] * self.rows.X)
        hessian.flat[:: len(hessian) + 1] += np.repeat(self.penalties, C) + LITTLE * self.rows.weight
        factor, failed = dpotrf(hessian.T, lower=1, clean=0, overwrite_a=1)
        if failed:
            raise LinAlgError("the penalised products of columns are not positive definite")
        return np.asarray(factor)

    def solve(self, right: Array, blocks: Any, goals: Array) -> tuple[Array, int]:
        """Solutions for right sides, shaped (columns, classes, sides), each as exactly as its goal; and how long that took."""

        def back(vectors: Array) -> Array:
            own = vectors.transpose(1, 0, 2)
            if isinstance(blocks, ByKernel):
                found = blocks.back(vectors)
            elif isinstance(blocks, list):
                own = np.array([dpotrs(factor, one, lower=1)[0] for factor, one in zip(blocks, own, strict=True)])
                found = own.transpose(1, 0, 2)
            elif blocks.ndim == 3:
                found = (blocks @ own).transpose(1, 0, 2)
            else:
                flat = vectors.reshape(len(blocks), -1)
                found = np.ascontiguousarray(dpotrs(blocks, flat, lower=1)[0]).reshape(vectors.shape)
            found -= found.mean(1, keepdims=True)
            return found

        # a mean over the classes the loss does not see, and there is none in any solution: without it blocks are much nearer to H
        z, r = np.zeros_like(right), right - right.mean(1, keepdims=True)
        d = back(r)
        rho = _products(r, d)
        goal, sides = goals**2 * rho, np.arange(len(rho))
        for turn in range(TURNS):
            open_ = rho > goal
            if not open_.all():  # a side that has ended stays as it is: rounding would lead it away
                d, r, rho, goal, sides = d[..., open_], r[..., open_], rho[open_], goal[open_], sides[open_]
            if not len(sides):
                return z, turn
            Hd = self.times(d)
            along = rho / _products(d, Hd)
            if len(sides) == z.shape[2]:
                z += along * d
            else:
                z[..., sides] += along * d
            Hd *= along
            r -= Hd
            m = back(r)
            rho, before = _products(r, m), rho
            d *= rho / before
            d += m
        return z, TURNS


def _products(one: Array, other: Array) -> Array:
    """Inner products of the sides."""
    return np.asarray(np.einsum("pck,pck->k", one, other))


def _long(blocks: Any) -> int:
    """Turns of conjugate gradients from which on new blocks take less time."""
    return LONG if isinstance(blocks, list | ByKernel) or blocks.ndim == 3 else LONG_WHOLE


class ByClasses(OneByOne):
    """With the blocks of a solution nearby."""

    def __init__(self, loss: Multinomial, sets: Sets, grouping: Grouping):
        super().__init__(loss, sets, grouping)
        self.train, self.held = ([sets.rows.at(at) for at in parts] for parts in (sets.train, sets.held))
        self.member = np.zeros((len(grouping.index), grouping.count))
        self.member[np.arange(len(grouping.index)), grouping.index] = 1.0

    def fitted(self, theta: Array) -> Solved:
        """The coefficients on all rows, from those of a fold."""
        known = [state.at for states in self.states.values() for state in states.values()]
        start = known[-1] if known else np.zeros((len(self.member), self.loss.outputs))
        w, _, closed = self._newton(self.sets.rows, self.grouping.penalties(theta), start, None, CLOSE)
        return Solved(w, lambda v: v, closed=closed)

    def each(self, theta: Array, close: float, to: Array) -> list[Array]:
        """The losses of the held-out rows of each cell; how solutions move would take longer than it saves."""
        found = [(self._solved(theta[b], b, t, close).at, h) for b, t, h in self.sets.cells]
        return [self.loss.each(self.held[h], w)[0] for w, h in found]

    def _solved(self, theta: Array, problem: int, train: int, close: float) -> State:
        state = self._last(theta, train)
        if state is not None and np.array_equal(state.theta, theta) and state.close <= close:
            return state
        rows, penalties = self.train[train], self.grouping.penalties(theta)
        w, blocks = np.zeros((len(self.member), self.loss.outputs)), None
        if state is not None:
            w, blocks = state.at, state.factor
        if state is not None and state.moves is not None:
            moved = w + state.moves @ state.moved(theta)
            w = min(moved, w, key=lambda one: self._value(rows, penalties, one)[0])
        w, blocks, closed = self._newton(rows, penalties, w, blocks, close)
        self.closed = self.closed and closed
        return self._keep(problem, train, State(theta, w, None, blocks, close))

    def _value(self, rows: Rows, penalties: Array, w: Array) -> tuple[float, Array]:
        each, slope = self.loss.each(rows, w)
        return float(rows.s @ each) + 0.5 * float(penalties @ (w * w).sum(1)), slope

    def _newton(self, rows: Rows, penalties: Array, w: Array, blocks: Any, close: float) -> tuple[Array, Any, bool]:
        """Newton's method with step halving, its systems solved the more exactly the nearer the end is."""
        w = w - w.mean(1, keepdims=True)  # which the loss does not see, and penalties hold at 0
        weight, last, (value, slope) = rows.weight, np.inf, self._value(rows, penalties, w)
        tol = INEXACT if close > FLAT**1.2 else EXACT  # a decrement that is not exact is too small
        for _ in range(NEWTON):
            here = Lower(rows, penalties, w)
            gradient = rows.X.T @ (rows.s[:, None] * slope) + penalties[:, None] * w
            blocks = here.blocks() if blocks is None else blocks
            steps, turns = here.solve(gradient[:, :, None], blocks, np.array([tol]))
            blocks = None if turns >= _long(blocks) else blocks
            step = steps[:, :, 0]
            decrement = float((gradient * step).sum())
            if not np.isfinite(decrement):
                raise LinAlgError("the Newton step is not finite")
            t, moved = 1.0, False
            if decrement <= 0.0 or turns == TURNS:  # nothing but rounding is left
                break
            while t > 1e-6 and not moved:
                trial = w - t * step
                there, slope_t = self._value(rows, penalties, trial)
                moved = there <= value - 1e-4 * t * decrement or decrement <= FLAT * weight
                t *= 0.5
            if moved:
                w, value, slope = trial, there, slope_t
            slow = decrement > 0.2 * last
            if decrement <= close * weight or not moved or (decrement <= FLAT * weight and slow and tol <= EXACT):
                break
            last, tol = decrement, max(min(tol, (decrement / weight) ** 0.5) * (0.1 if slow else 1.0), EXACT)
        return w, blocks, abs(decrement) <= max(close, FLAT) * weight

    def _derived(self, theta: Array, problem: int, train: int, held: int, close: float, to: Array) -> Derived:
        state, penalties = self._solved(theta, problem, train, close), self.grouping.penalties(theta)
        rows, out, w = self.train[train], self.held[held], state.at
        here, there = Lower(rows, penalties, w), Lower(out, penalties, w)
        each, slope = self.loss.each(out, w)
        pulled, member = penalties[:, None] * w, self.member @ to
        right = np.concatenate(
            [(out.X.T @ (out.s[:, None] * slope))[:, :, None], -pulled[:, :, None] * member[:, None]], axis=2
        )
        exact = max(close**0.5, 1e-11)
        goals = np.array([exact] + [min(ROUGH, 10 * exact)] * to.shape[1])
        if state.factor is None:
            state.factor = here.blocks()
        found, turns = here.solve(right, state.factor, goals)
        if turns >= _long(state.factor):
            state.factor = None
        v, state.moves, state.to = found[:, :, 0], found[:, :, 1:], to
        gradient = -(v * pulled).sum(1) @ self.member
        crossed = member.T @ ((v * penalties[:, None])[:, :, None] * state.moves).sum(1)
        p, C, k = found.shape
        inside = here.centred((rows.X @ found.reshape(p, C * k)).reshape(-1, C, k))
        seen = there.centred((out.X @ state.moves.reshape(p, -1)).reshape(-1, C, k - 1))
        weigh = (here.weighted * inside[:, :, 0])[:, :, None]
        both, across = inside[:, :, 1:].reshape(-1, k - 1), seen.reshape(-1, k - 1)
        hessian = across.T @ (there.weighted.reshape(-1, 1) * across)
        hessian += (to.T * gradient) @ to - crossed - crossed.T - both.T @ (weigh * inside[:, :, 1:]).reshape(-1, k - 1)
        return Derived(each, float(out.s @ each), gradient @ to, hessian)
