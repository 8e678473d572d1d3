"""Cells solved one after the other: by the columns, or by the rows where these are fewer; see `cells` for what is computed."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from scipy.linalg import LinAlgError
from scipy.linalg.lapack import dpotrf, dpotrs

from bisls.sklearn.cells import Evaluated, Sets, gathered
from bisls.sklearn.lower import FLAT, JITTER, NEWTON, Array, Rows
from bisls.sklearn.tuning import Grouping, Index

NEAR = 2.0  # how far, in logarithms of penalties, a solution is followed along its derivative
ROUGH = 1e-2  # how exactly derivatives of solutions are solved for: they only serve Newton's method above
TURNS = 8  # of conjugate gradients with a factor nearby, before there is a new one
THIN = 1e-12  # the least second derivative that is divided by


@dataclass(frozen=True)
class Derived:
    """What a cell hands back: the losses of its held-out rows, their sum, its gradient and its Hessian."""

    each: Array
    value: float
    gradient: Array
    hessian: Array


@dataclass
class State:
    """The last solution of a training set: where, what, how it moves with the penalties, and a factor there."""

    theta: Array
    at: Any
    moves: Any = None
    factor: Any = None
    close: float = np.inf
    to: Array | None = None

    def moved(self, theta: Array) -> Array:
        """How far it is from here, in the directions that it moves in, where derivatives are of use."""
        assert self.to is not None
        far = np.clip(theta - self.theta, -NEAR, NEAR)
        return np.asarray(self.to.T @ far / (self.to**2).sum(0))


class OneByOne:
    """Cells, each solved from what its training rows had last.

    Args:
        loss: The loss of both levels; one of those with ``bends``.
        sets: The cells.
        grouping: The groups.
    """

    def __init__(self, loss: Any, sets: Sets, grouping: Grouping):
        self.loss, self.sets, self.grouping = loss, sets, grouping
        self.weights = sets.weights()
        self.states: dict[int, dict[int, State]] = {}  # training set -> problem -> its last
        self.closed = True

    def evaluate(self, theta: Array, which: Index, close: float, to: Array, some: int | None = None) -> Evaluated:
        """Mean held-out losses of these problems, gradients and Hessians along some directions."""
        number = {int(b): i for i, b in enumerate(which)}
        cells = self.sets.of(which, some)
        found = [self._derived(theta[number[b]], b, t, h, close, to) for b, t, h in cells]
        parts = ([one.value for one in found], [one.gradient for one in found], [one.hessian for one in found])
        values, gradients, hessians = (gathered(cells, which, np.array(part), self.weights) for part in parts)
        return values, gradients, hessians

    def values(self, theta: Array, which: Index, close: float, some: int | None = None) -> Array:
        """The losses alone; how solutions move is looked at still, since the next ones begin with it."""
        return self.evaluate(theta, which, close, np.ones((self.grouping.count, 1)), some)[0]

    def each(self, theta: Array, close: float, to: Array) -> list[Array]:
        """The losses of the held-out rows of each cell."""
        return [self._derived(theta[b], b, t, h, close, to).each for b, t, h in self.sets.cells]

    def remembered(self) -> Any:
        """The solutions as they are now."""
        return {train: dict(known) for train, known in self.states.items()}

    def recall(self, memory: Any) -> None:
        """Go on from solutions that were remembered, as if there had been none since."""
        self.states = {train: dict(known) for train, known in memory.items()}

    def follow(self, other: OneByOne) -> None:
        """Begin where another one is whose training sets, one a problem of ours, hold all of these rows."""
        for problem, train, _ in self.sets.cells:
            for state in other.states.get(problem, {}).values():
                mine = self._within(state, other.sets.train[problem], self.sets.train[train])
                self.states.setdefault(train, {})[problem] = mine

    def _within(self, state: State, every: Index, some: Index) -> State:
        """What a solution on all of these rows says of one on some of them."""
        return replace(state, close=np.inf)

    def _last(self, theta: Array, train: int) -> State | None:
        """The nearest of what was solved for these rows, for this problem or for another one."""
        known = self.states.get(train, {})
        return min(known.values(), key=lambda one: float(np.abs(one.theta - theta).max())) if known else None

    def _keep(self, problem: int, train: int, state: State) -> State:
        self.states.setdefault(train, {})[problem] = state
        return state

    def _derived(self, theta: Array, problem: int, train: int, held: int, close: float, to: Array) -> Derived:
        raise NotImplementedError


class ByColumns(OneByOne):
    """With the Hessian by the coefficients, formed anew where conjugate gradients with an older one take long."""

    def __init__(self, loss: Any, sets: Sets, grouping: Grouping):
        super().__init__(loss, sets, grouping)
        self.train, self.held = ([sets.rows.at(at) for at in parts] for parts in (sets.train, sets.held))
        self.member = np.zeros((len(grouping.index), grouping.count))
        self.member[np.arange(len(grouping.index)), grouping.index] = 1.0

    def _solved(self, theta: Array, problem: int, train: int, close: float) -> State:
        state = self._last(theta, train)
        if state is not None and np.array_equal(state.theta, theta) and state.close <= close:
            return state
        w, factor = np.zeros(len(self.member)), None
        if state is not None:
            w, factor = state.at, state.factor
        penalties = self.grouping.penalties(theta)
        if state is not None and state.moves is not None:
            moved = w + state.moves @ state.moved(theta)
            w = min(moved, w, key=lambda one: self._value(train, penalties, one))
        found = self.loss.solve(self.train[train], penalties, w[:, None], near=factor, close=close)
        self.closed = self.closed and found.closed
        return self._keep(problem, train, State(theta, found.w[:, 0], None, found.factor, close))

    def _value(self, train: int, penalties: Array, w: Array) -> float:
        rows = self.train[train]
        return float(rows.s @ self.loss.bends(rows.X @ w, rows.y)[0]) + 0.5 * float(penalties @ (w * w))

    def _derived(self, theta: Array, problem: int, train: int, held: int, close: float, to: Array) -> Derived:
        state, penalties = self._solved(theta, problem, train, close), self.grouping.penalties(theta)
        rows, out = self.train[train], self.held[held]
        each, slope, second, _ = self.loss.bends(out.X @ state.at, out.y)
        _, _, bend, third = self.loss.bends(rows.X @ state.at, rows.y)
        pulled = penalties * state.at
        member = self.member @ to
        right = np.column_stack([out.X.T @ (out.s * slope), -pulled[:, None] * member])
        exact = max(close**0.5, 1e-11)
        goals = np.array([exact] + [min(ROUGH, 1e3 * exact)] * to.shape[1])
        found = self._back(rows, rows.s * bend, penalties, state, right, goals)
        v, state.moves, state.to = found[:, 0], found[:, 1:], to
        seen, inside = out.X @ state.moves, rows.X @ found
        gradient = -(v * pulled) @ self.member
        crossed = member.T @ ((v * penalties)[:, None] * state.moves)
        hessian = seen.T @ ((out.s * second)[:, None] * seen) - crossed - crossed.T + (to.T * gradient) @ to
        hessian -= inside[:, 1:].T @ ((rows.s * third * inside[:, 0])[:, None] * inside[:, 1:])
        return Derived(each, float(out.s @ each), gradient @ to, hessian)

    def _back(self, rows: Rows, bend: Array, penalties: Array, state: State, right: Array, goals: Array) -> Array:
        """Solves with the Hessian, all right sides at once: conjugate gradients with the factor that is there, then a new one."""
        diagonal = (penalties + JITTER * rows.weight)[:, None]
        X = rows.columns(float(goals.min()))
        bent = bend[:, None].astype(X.dtype)
        for turns in (TURNS, 4 * TURNS):
            if state.factor is None or turns > TURNS:
                state.factor = self.loss._factor(rows, penalties, state.at[:, None], X is not rows.X)
            z, r = np.zeros_like(right), right
            m = dpotrs(state.factor[0], r, lower=1)[0]
            d, rho = m, (r * m).sum(0)
            goal = goals**2 * rho
            for _ in range(turns):
                if np.all(rho <= goal):
                    return z
                Hd = X.T @ (bent * (X @ d.astype(X.dtype, copy=False))) + diagonal * d
                along = rho / np.maximum((d * Hd).sum(0), np.finfo(float).tiny)
                z, r = z + along * d, r - along * Hd
                m = dpotrs(state.factor[0], r, lower=1)[0]
                rho, before = (r * m).sum(0), rho
                d = m + rho / np.maximum(before, np.finfo(float).tiny) * d
            if np.all(rho <= goal):
                return z
        state.factor = self.loss._factor(rows, penalties, state.at[:, None])
        return np.asarray(dpotrs(state.factor[0], right, lower=1)[0])


@dataclass(frozen=True)
class Place:
    """Where the dual of a lower problem is: a and b, K a, the linear predictor, the value, and derivatives of the loss."""

    a: Array
    b: Array
    Ka: Array
    eta: Array
    value: float
    slope: Array
    second: Array


@dataclass(frozen=True)
class Kernel:
    """A lower problem by its rows: ``sum_i s_i l(y_i, eta_i) + 1/2 a'Ka`` with ``eta = K a + Z b``."""

    loss: Any
    K: Array
    Z: Array
    y: Array
    s: Array

    def place(self, a: Array, b: Array, Ka: Array | None = None) -> Place:
        """The value there, and what Newton's method needs."""
        Ka = self.K @ a if Ka is None else Ka
        eta = Ka + self.Z @ b
        each, slope, second, _ = self.loss.bends(eta, self.y)
        return Place(a, b, Ka, eta, float(self.s @ each) + 0.5 * float(a @ Ka), self.s * slope, second)

    def beginnings(self, state: State, theta: Array) -> list[Place]:
        """Where the solution may be, going by one for other penalties: there, along its derivative, and what this predicts."""
        a, b, eta = state.at
        found = [self.place(a, b)]
        if state.moves is not None:
            move = state.moved(theta)
            da, db, along = (own @ move for own in state.moves)
            found.append(self.place(a + da, b + db))
            found.append(self.place(-self.s * self.loss.bends(eta + along, self.y)[1], b + db))
        return found

    def solve(self, here: Place, close: float) -> tuple[Place, Any, bool]:
        """Newton's method with step halving; the factor before the last step serves after it too."""
        weight, last = float(self.s.sum()), np.inf
        for _ in range(NEWTON):
            factor = Bordered(self.K, self.Z, self.s * here.second)
            a, b = factor.newton(here.eta, here.slope)
            step, shift = a - here.a, b - here.b
            Kstep = self.K @ step
            decrement = -float(here.slope @ (Kstep + self.Z @ shift) + here.a @ Kstep)
            if not np.isfinite(decrement):
                raise LinAlgError("the Newton step is not finite")
            t, moved, there = 1.0, False, here
            while t > 1e-6 and not moved:
                there = self.place(here.a + t * step, here.b + t * shift, here.Ka + t * Kstep)
                moved = there.value <= here.value - 1e-4 * t * decrement or decrement <= FLAT * weight
                t *= 0.5
            here = there if moved else here
            settled = decrement <= close * weight or (decrement <= FLAT * weight and decrement > 0.2 * last)
            if settled or not moved:
                return here, factor, abs(decrement) <= max(close, FLAT) * weight
            last = decrement
        return here, factor, False


class ByRows(OneByOne):
    """With kernels of the rows, one a group: ``eta = sum_g exp(-theta_g) K_g a + Z b``, Z the columns of no penalty.

    a is minus the weighted slope of the loss; Newton's step for it solves with ``I + D^1/2 K D^1/2``, D the second derivatives.
    """

    def __init__(self, loss: Any, sets: Sets, grouping: Grouping):
        super().__init__(loss, sets, grouping)
        X, factors = sets.rows.X, grouping.factors
        self.Z = X[:, factors == 0]
        kernels = []
        for group in range(grouping.count):
            own = (grouping.index == group) & (factors > 0)
            kernels.append((X[:, own] / factors[own]) @ X[:, own].T)
        self.kernels = np.array(kernels)
        self.inner: dict[int, Array] = {}
        self.outer: dict[tuple[int, int], Array] = {}

    def _within(self, state: State, every: Index, some: Index) -> State:
        place = np.full(len(self.sets.rows.y), -1)
        place[every] = np.arange(len(every))
        at = place[some]
        a, b, eta = state.at
        moves = None if state.moves is None else (state.moves[0][at], state.moves[1], state.moves[2][at])
        return State(state.theta, (a[at], b, eta[at]), moves, None, np.inf, state.to)

    def _kernels(self, train: int, held: int | None = None) -> Array:
        at = self.sets.train[train]
        if held is None:
            if train not in self.inner:
                self.inner[train] = np.ascontiguousarray(self.kernels[:, at[:, None], at])
            return self.inner[train]
        if (train, held) not in self.outer:
            self.outer[train, held] = np.ascontiguousarray(self.kernels[:, self.sets.held[held][:, None], at])
        return self.outer[train, held]

    def _solved(self, theta: Array, problem: int, train: int, close: float) -> State:
        """The solution, as (a, b, eta), with a factor there."""
        state = self._last(theta, train)
        if state is not None and np.array_equal(state.theta, theta) and state.close <= close:
            return state
        at = self.sets.train[train]
        K = np.tensordot(np.exp(-theta), self._kernels(train), 1)
        kernel = Kernel(self.loss, K, self.Z[at], self.sets.rows.y[at], self.sets.rows.s[at])
        nothing = kernel.place(np.zeros(len(at)), np.zeros(self.Z.shape[1]), np.zeros(len(at)))
        places = [nothing] if state is None else [nothing, *kernel.beginnings(state, theta)]
        place, factor, closed = kernel.solve(min(places, key=lambda one: one.value), close)
        if not closed:
            place, factor, closed = kernel.solve(nothing, close)
        self.closed = self.closed and closed
        return self._keep(problem, train, State(theta, (place.a, place.b, place.eta), None, factor, close))

    def _derived(self, theta: Array, problem: int, train: int, held: int, close: float, to: Array) -> Derived:
        state = self._solved(theta, problem, train, close)
        (a, b, eta), factor = state.at, state.factor
        at, out, shares = self.sets.train[train], self.sets.held[held], np.exp(-theta)
        rows, Z = self.sets.rows, self.Z[out]
        _, _, _, third = self.loss.bends(eta, rows.y[at])
        across = self._kernels(train, held)
        pulls_out = shares[:, None] * (across @ a)  # a row a group
        each, slope, second, _ = self.loss.bends(pulls_out.sum(0) + Z @ b, rows.y[out])
        r = rows.s[out] * slope
        inner = self._kernels(train)
        pulls = shares[:, None] * (inner @ a)
        over = shares[:, None] * (r @ across)  # what the held-out rows want of each group, at the training rows
        border = np.zeros((Z.shape[1], 1 + to.shape[1]))
        border[:, 0] = Z.T @ r
        moved, shifts = factor.solve(np.column_stack([over.sum(0), -pulls.T @ to]), border)
        u, along = moved[:, 0], moved[:, 1:]
        c = -factor.second * u
        da, db = -factor.second[:, None] * along, shifts[:, 1:]
        wanted = shares[:, None] * (inner @ c) + over
        gradient = -(wanted @ a)
        seen = -pulls_out.T @ to + np.tensordot(shares, across, 1) @ da + Z @ db
        crossed = to.T @ wanted @ da
        hessian = seen.T @ ((rows.s[out] * second)[:, None] * seen) - crossed - crossed.T - (to.T * gradient) @ to
        hessian -= along.T @ ((rows.s[at] * third * u)[:, None] * along)
        state.moves, state.to = (da, db, along), to
        return Derived(each, float(rows.s[out] @ each), gradient @ to, hessian)


class Bordered:
    """Solves with ``I + D^1/2 K D^1/2``, bordered by columns of no penalty.

    Args:
        K: The kernel of the training rows.
        Z: Columns of no penalty.
        second: D, the weighted second derivatives of the loss.
    """

    def __init__(self, K: Array, Z: Array, second: Array):
        self.second = np.maximum(second, THIN)
        self.root = np.sqrt(self.second)
        matrix = K * self.root
        matrix *= self.root[:, None]
        matrix.flat[:: len(matrix) + 1] += 1.0
        self.factor, failed = dpotrf(matrix.T, lower=1, clean=0, overwrite_a=1)
        if failed:
            raise LinAlgError("the kernel of the rows is not positive definite")
        self.U = self.root[:, None] * Z
        self.VU = self._back(self.U)
        self.inner = _inverse(self.U.T @ self.VU)

    def _back(self, right: Array) -> Array:
        return np.asarray(dpotrs(self.factor, right, lower=1)[0]) if right.shape[1] else right

    def newton(self, eta: Array, slope: Array) -> tuple[Array, Array]:
        """The next a and b: ``a + D (K a + Z b) = D eta - slope``, with Z'a = 0."""
        e = self.root * eta - slope / self.root
        back = self._back(e[:, None])[:, 0]
        b = self.inner @ (self.U.T @ back)
        return self.root * (back - self.VU @ b), b

    def solve(self, right: Array, border: Array) -> tuple[Array, Array]:
        """u and b with ``(I + K D) u = right + Z b`` and ``Z' D u = border``."""
        back = self._back(self.root[:, None] * right)
        b = self.inner @ (border - self.U.T @ back)
        return (back + self.VU @ b) / self.root[:, None], b


def _inverse(matrix: Array) -> Array:
    """Of a small matrix, which may be singular where columns are alike."""
    if len(matrix) == 1 and matrix[0, 0] > 0:
        return np.asarray(1.0 / matrix)
    return np.asarray(np.linalg.pinv(matrix, hermitian=True)) if len(matrix) else matrix
