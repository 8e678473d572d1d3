"""The upper level: penalties by group from the mean loss on held-out folds and a prior, and how wide the prior is to be.

``theta_g = mu + tau z_g`` are the logarithms of the penalties of the groups, around a common one, and ``mu = mu_0 + tau z_0``
around that of the one penalty which is best. Above is minimised ``N F(theta) / scale + 1/2 sum_g z_g^2``, with F the mean
held-out loss over the folds, N the weight of the rows, and the scale that of a log-likelihood (1 for the log-loss, the error
variance for the squared error). Without z_0 all penalties together may fall to nothing where many columns separate few rows.
``tau = 0`` is one penalty, ``tau = inf`` has no prior. A wide prior has several minima, of which some overfit; so tau is widened
in steps from 0, each beginning where the one before ended, and no wider than nested folds say.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import minimize

from bisls.sklearn.lower import Array, Loss, Rows, Solved

REACH = 12.0  # a group's penalty stays within exp(+-REACH) of the common one
RISES = 3  # a coarse search from above ends after so many values in turn that are no better
TIGHT = 1e-20  # the Newton decrement of lower problems where the last digits count
LOOSE, SHORT = 1e-3, 15

Index = NDArray[np.intp]
Splits = Sequence[tuple[Index, Index]]


@dataclass(frozen=True)
class Grouping:
    """Which group each column belongs to, and its factor; the intercept's column, if any, comes last with the factor 0."""

    index: Index
    factors: Array
    count: int

    def penalties(self, theta: Array) -> Array:
        """A penalty a column."""
        return np.asarray(self.factors * np.exp(theta)[self.index])

    def gathered(self, each: Array) -> Array:
        """The sums over the columns of each group."""
        return np.bincount(self.index, each, minlength=self.count).astype(np.float64)


@dataclass
class Folds:
    """Held-out losses as a function of the penalties: every fold with a lower solution of its own, kept for the next call.

    Args:
        loss: The loss of both levels.
        rows: All rows.
        splits: Pairs of training and held-out rows.
        grouping: The groups.
        search: How the upper level is minimised.
        close: How exactly lower problems are solved.
    """

    loss: Loss
    rows: Rows
    splits: Splits
    grouping: Grouping
    search: Search = field(default_factory=lambda: Search())
    close: float = 1e-10
    starts: list[tuple[Array, Any]] = field(init=False)
    evaluations: int = 0
    closed: bool = True

    def __post_init__(self) -> None:
        self.train = [self.rows.at(train) for train, _ in self.splits]
        self.held = [self.rows.at(held) for _, held in self.splits]
        self.prepared = [self.loss.prepared(rows) for rows in self.train]
        self.starts = [(np.zeros((self.rows.X.shape[1], self.loss.outputs)), None) for _ in self.splits]
        self.weight = sum(rows.weight for rows in self.held)

    @property
    def room(self) -> tuple[float, float]:
        """Between which logarithms a common penalty may lie."""
        unit = self.loss.unit(self.rows)
        return float(np.log(1e-7 * unit)), float(np.log(1e6 * unit))

    def solved(self, fold: int, theta: Array) -> Solved:
        """The lower solution of a fold."""
        start, near = self.starts[fold]
        found = self.loss.solve(
            self.train[fold],
            self.grouping.penalties(theta),
            start,
            near=near,
            prepared=self.prepared[fold],
            close=self.close,
        )
        self.starts[fold] = (found.w, found.factor)
        self.closed = self.closed and found.closed
        return found

    def value(self, theta: Array) -> tuple[float, Array]:
        """The mean held-out loss and its gradient: ``dF/dtheta_g = -sum_{j in g} v_j p_j w_j`` with ``H v = grad_w F``."""
        self.evaluations += 1
        total, gradient = 0.0, np.zeros(self.grouping.count)
        penalties = self.grouping.penalties(theta)
        for fold, held in enumerate(self.held):
            found = self.solved(fold, theta)
            each, slope = self.loss.each(held, found.w)
            total += float(held.s @ each)
            v = found.solve(held.X.T @ (held.s[:, None] * slope))
            pull = penalties[:, None] * found.w if found.pull is None else found.pull
            gradient -= self.grouping.gathered((v * pull).sum(1))
        return total / self.weight, gradient / self.weight

    def common(self, near: float | None = None) -> Tuned:
        """One penalty for all; to the last digits where nothing is known of it yet."""
        found = self.search.common(self, near)
        return self.search.polished(self, found) if near is None else found

    def widened(self, before: Tuned, spread: float, scale: float) -> Tuned:
        """A penalty a group."""
        return self.search.widened(self, before, spread, scale)

    def at(self, theta: Array) -> float:
        """The mean held-out loss."""
        return self.value(theta)[0]

    def each(self, theta: Array) -> tuple[Array, Array, Index]:
        """The losses of all held-out rows, their weights, and which rows they are."""
        values = [self.loss.each(held, self.solved(fold, theta).w)[0] for fold, held in enumerate(self.held)]
        rows = np.concatenate([held for _, held in self.splits])
        return np.concatenate(values), np.concatenate([held.s for held in self.held]), rows


@dataclass(frozen=True)
class Place:
    """What is known of the mean held-out loss at some penalties, for each group."""

    theta: Array
    value: float
    gradient: Array
    hessian: Array


@dataclass(frozen=True)
class Tuned:
    """Where the upper level ended.

    Attributes:
        theta: The logarithm of each group's penalty.
        spread: The width of the prior.
        value: The mean held-out loss.
        steps: Upper iterations.
        converged: Whether they ended by themselves.
        history: What was seen on the way: spread and held-out loss, one entry an evaluation.
        place: Where the last look was, if derivatives were looked at.
        centre: The logarithm of the one penalty that groups began with.
    """

    theta: Array
    spread: float
    value: float
    steps: int
    converged: bool
    history: tuple[dict[str, float], ...] = ()
    place: Place | None = None
    centre: float | None = None

    @property
    def origin(self) -> float:
        """Around which logarithm the prior lies."""
        return self.common if self.centre is None else self.centre

    @property
    def common(self) -> float:
        """The logarithm of the common penalty."""
        return float(self.theta.mean())


@dataclass(frozen=True)
class Search:
    """How exactly the upper level is minimised.

    Args:
        tol: Relative change of the upper value at which it ends.
        max_iter: Upper iterations for each width at most.
    """

    tol: float = 1e-6
    max_iter: int = 100

    def common(self, folds: Folds, near: float | None = None) -> Tuned:
        """One penalty for all: a coarse search from above, then downhill; or downhill from a value that is near."""
        history: list[dict[str, float]] = []
        ones = np.ones(folds.grouping.count)
        weight = folds.rows.weight
        if near is None:
            best, risen = np.inf, 0
            for share in folds.loss.coarse:
                theta = np.log(share * folds.loss.unit(folds.rows)) * ones
                value = folds.value(theta)[0]
                if value < best:
                    best, near, risen = value, float(theta[0]), 0
                else:
                    risen += 1
                if risen >= RISES * (1 + len(folds.loss.coarse) // 10):
                    break
            assert near is not None

        def upper(x: Array) -> tuple[float, Array]:
            value, gradient = folds.value(x[0] * ones)
            history.append({"spread": 0.0, "cv_loss": value})
            return value, np.array([gradient.sum()])

        scale = max(upper(np.array([near]))[0], 1e-300)
        done = self._minimise(lambda x: _scaled(upper(x), weight / scale), np.array([near]), [folds.room])
        return Tuned(done.x[0] * ones, 0.0, done.fun * scale / weight, int(done.nit), done.status != 1, tuple(history))

    def polished(self, folds: Folds, tuned: Tuned) -> Tuned:
        """One penalty for all to the last digits: the root of the derivative, by secants with lower problems solved tightly.

        Values are flat around a minimum and end a descent early; the same table, written otherwise, would differ in the sixth
        digit.
        """
        ones, close = np.ones(folds.grouping.count), folds.close

        def slope(x: float) -> float:
            return float(folds.value(x * ones)[1].sum())

        folds.close = TIGHT
        try:
            a, b = tuned.common, tuned.common + 1e-3
            at_a, at_b = slope(a), slope(b)
            for _ in range(12):
                if at_a == at_b or not abs(at_b) > 0:
                    break
                step = -at_b * (b - a) / (at_b - at_a)
                if not abs(step) <= 1e-2:  # no root nearby: the minimum lies on the border
                    return tuned
                a, at_a, b = b, at_b, b + step
                if abs(step) < 1e-11:
                    break
                at_b = slope(b)
            value = folds.value(b * ones)[0]
        finally:
            folds.close = close
        better = value <= tuned.value * (1 + 1e-9)
        return replace(tuned, theta=b * ones, value=value) if better else tuned

    def widened(self, folds: Folds, before: Tuned, spread: float, scale: float) -> Tuned:
        """A penalty a group under a prior of this width, from where a narrower one ended."""
        G, weight = folds.grouping.count, folds.weight
        free = not np.isfinite(spread)
        tau = 1.0 if free else spread
        history: list[dict[str, float]] = []

        def upper(x: Array) -> tuple[float, Array]:
            value, gradient = folds.value(x[0] + tau * x[1:])
            history.append({"spread": spread, "cv_loss": value})
            factor, z = weight / scale, x[1:]
            slope = np.concatenate([[gradient.sum()], tau * gradient]) * factor
            if free:
                return value * factor, slope
            off = (x[0] - before.origin) / tau
            slope += np.append(off / tau, z)
            return value * factor + 0.5 * float(z @ z + off * off), slope

        mu = before.common
        start = np.concatenate([[mu], (before.theta - mu) / tau])
        room = [folds.room] + [(-REACH / tau, REACH / tau)] * G
        done = self._minimise(upper, start, room)
        theta = done.x[0] + tau * done.x[1:]
        value = folds.value(theta)[0]
        seen = (*before.history, *history)
        return Tuned(theta, spread, value, int(done.nit), done.status != 1, seen, centre=before.origin)

    def _minimise(self, upper: Callable[[Array], Any], start: Array, room: Sequence[tuple[float, float]]) -> Any:
        start = np.clip(start, [low for low, _ in room], [high for _, high in room])
        options = {"maxiter": self.max_iter, "ftol": self.tol, "gtol": 1e-8, "maxcor": 20}
        return minimize(upper, start, jac=True, method="L-BFGS-B", bounds=room, options=options)


def _scaled(pair: tuple[float, Array], factor: float) -> tuple[float, Array]:
    return pair[0] * factor, pair[1] * factor


@dataclass(frozen=True)
class Exact:
    """Lower problems solved exactly, L-BFGS above.

    Args:
        loss: The loss of both levels.
        rows: All rows.
        grouping: The groups.
        search: How the upper level is minimised.
    """

    loss: Loss
    rows: Rows
    grouping: Grouping
    search: Search

    def on(self, splits: Splits, nested: bool = False) -> Folds:
        """The folds as a function of the penalties; within a fold less exactly, since only widths are compared there."""
        if nested:
            search = Search(max(self.search.tol, LOOSE), min(self.search.max_iter, SHORT))
            return Folds(self.loss, self.rows, splits, self.grouping, search, 1e-8)
        return Folds(self.loss, self.rows, splits, self.grouping, self.search)

    def fitted(self, theta: Array) -> Solved:
        """The coefficients on all rows."""
        start = np.zeros((self.rows.X.shape[1], self.loss.outputs))
        return self.loss.solve(self.rows, self.grouping.penalties(theta), start)
