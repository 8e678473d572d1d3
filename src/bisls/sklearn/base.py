"""What the estimators share: reading a table, tuning penalties, coefficients in the user's units."""

from __future__ import annotations

import logging
import warnings
from dataclasses import dataclass, replace
from functools import cache
from math import inf
from numbers import Integral, Real
from typing import Any, ClassVar

import numpy as np
from scipy import sparse
from sklearn.base import BaseEstimator
from sklearn.exceptions import ConvergenceWarning
from sklearn.model_selection import KFold, StratifiedKFold, check_cv
from sklearn.utils import check_random_state
from sklearn.utils.validation import _check_sample_weight, check_is_fitted, validate_data
from threadpoolctl import ThreadpoolController

from bisls._check import shown
from bisls.sklearn.columns import Columns
from bisls.sklearn.lower import Array, Loss, Rows
from bisls.sklearn.nested import Choice, Nested, choose, path
from bisls.sklearn.together import Newton
from bisls.sklearn.tuning import Exact, Search, Tuned

logger = logging.getLogger("bisls.sklearn")
FEW = 2000  # coefficients, or rows if they are fewer, up to which factors take less time, and some gigabytes at most
DENSE = 2 * 10**8  # numbers up to which a sparse table is made dense
HUGE = 2.0**480  # columns with numbers beyond it, or all below its inverse, are scaled in parts
FEWEST = 20  # rows: with fewer, chance decides between groups and one penalty, and is wrong in one table of eight
LEAST = 1e-290  # what a loss is divided by, at least: a constant target has none
STRAYED = 1.0  # logarithms of penalties below those of all nested folds, from which on a minimum is another one
FAR = (
    1e3  # the typical size of columns that are not standardised, or its inverse, up to which they are taken as they are
)
NARROW = 600  # columns up to which BLAS is given one thread: more of them would wait for each other


@cache
def _threads() -> ThreadpoolController:
    """The libraries that have threads, looked for once: that takes longer than a small fit."""
    return ThreadpoolController()


@dataclass(frozen=True)
class Standard:
    """Columns moved to mean 0 and divided by their standard deviation, and the way back."""

    mean: Array
    scale: Array

    @staticmethod
    def of(X: Any, s: Array, centred: bool, scaled: bool) -> Standard:
        """The weighted moments of the columns; a constant column is not scaled."""
        weight = s.sum()
        top = np.abs(X).max(axis=0)
        top = np.asarray(top.todense() if sparse.issparse(top) else top, dtype=float).ravel()
        part = np.where(top > HUGE, HUGE, np.where((top > 0) & (top < 1 / HUGE), 1 / HUGE, 1.0))
        if np.any(part != 1.0):  # squares would leave the range of numbers
            inner = Standard.of(X.multiply(1 / part).tocsr() if sparse.issparse(X) else X / part, s, centred, scaled)
            return Standard(inner.mean * part, inner.scale * part if scaled else inner.scale)
        mean = np.asarray(X.T @ s).ravel() / weight
        if sparse.issparse(X):
            square = np.asarray(X.multiply(X).T @ s).ravel() / weight
            variance = square - mean**2 if centred else square
        else:
            variance = np.asarray(((X - mean) ** 2 if centred else X**2).T @ s).ravel() / weight
        size = np.sqrt(np.maximum(variance, 0.0))
        scale = np.where(size > 10 * np.finfo(float).eps * top, size, 1.0)
        return Standard(mean if centred else np.zeros_like(mean), scale if scaled else np.ones_like(scale))

    def sized(self, sizes: Array) -> Standard:
        """Where columns of these sizes stay as they are: all over one number if that is far from 1, as penalties have bounds."""
        size = float(np.exp(np.log(sizes).mean()))
        power = 1.0 if 1 / FAR <= size <= FAR else 2.0 ** np.clip(np.round(np.log2(size)), -480, 480)
        return Standard(self.mean, np.full_like(self.scale, power))

    def applied(self, X: Any) -> Array:
        """The table, dense."""
        dense = X.toarray() if sparse.issparse(X) else X
        return np.asarray((dense - self.mean) / self.scale, dtype=float)

    def back(self, w: Array, intercept: bool) -> tuple[Array, Array]:
        """Coefficients (a row a class) and intercepts in the user's units."""
        slopes = (w[:-1] if intercept else w) / self.scale[:, None]
        constant = w[-1] - self.mean @ slopes if intercept else np.zeros(w.shape[1])
        return slopes.T, constant


class GroupCV(BaseEstimator):
    """A linear model whose penalties are tuned by groups of columns; see its subclasses."""

    _classifies: ClassVar[bool] = False
    _solvers: ClassVar[tuple[str, ...]] = ("auto", "exact", "bisls")
    _squares: ClassVar[bool] = True  # penalties go with the squares of coefficients

    def __init__(
        self,
        groups: Any = None,
        *,
        penalty_factors: Any = None,
        spread: Any = "auto",
        cv: Any = 5,
        solver: str = "auto",
        fit_intercept: bool = True,
        standardize: bool = True,
        tol: float = 1e-6,
        max_iter: int = 100,
        n_jobs: int | None = None,
        random_state: Any = None,
    ):
        self.groups = groups
        self.penalty_factors = penalty_factors
        self.spread = spread
        self.cv = cv
        self.solver = solver
        self.fit_intercept = fit_intercept
        self.standardize = standardize
        self.tol = tol
        self.max_iter = max_iter
        self.n_jobs = n_jobs
        self.random_state = random_state

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.sparse = True
        return tags

    # --- what subclasses say

    def _targets(self, y: Any, s: Array) -> tuple[Array, Array, Loss]:
        """The targets as the loss has them, the weights, and the loss."""
        raise NotImplementedError

    def _scale(self, value: float) -> float:
        """What divides the loss where it meets the prior."""
        return 1.0

    def _unit(self) -> float:
        """What a loss of the engine is multiplied by for the user."""
        return 1.0

    def _keep(self, coef: Array, intercept: Array, dtype: Any) -> None:
        """Set ``coef_`` and ``intercept_``."""
        raise NotImplementedError

    def _engine(self, loss: Loss, rows: Rows, columns: Columns, splits: Any) -> Any:
        """What tunes the penalties."""
        grouping = columns.grouping(self.fit_intercept)
        search = Search(self.tol, self.max_iter)
        newton = Newton(loss, rows, grouping, search, splits)
        solver = self.solver
        if solver == "auto":
            # with one output, more columns than rows are solved by the rows; with several Newton's method has a factor a class
            many = rows.X.shape[1] * loss.outputs ** (0.5 if newton.suits else 1.0)
            size = min(rows.X.shape) if loss.outputs == 1 else many
            solver = "exact" if size <= FEW or "bisls" not in self._solvers else "bisls"
        if solver == "exact":
            return newton if newton.suits else Exact(loss, rows, grouping, search)
        from bisls.sklearn.batched import Batched  # torch comes with it

        return Batched(loss, rows, grouping, search)

    # --- fit

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> Any:
        """Tune the penalties by cross-validation, and fit the coefficients on all rows.

        Args:
            X: The table: an array, a data frame or a sparse matrix, without missing values.
            y: The target.
            sample_weight: A weight a row, at least 0; None for 1 each. It weighs the loss of training and of held-out rows.

        Returns:
            The estimator itself.
        """
        self._check()
        X, y = validate_data(
            self,
            X,
            y,
            accept_sparse=["csr", "csc"],
            dtype=[np.float64, np.float32],
            y_numeric=not self._classifies,
            ensure_min_samples=2,
        )
        dtype = X.dtype
        s = np.asarray(_check_sample_weight(sample_weight, X, dtype=np.float64, ensure_non_negative=True), dtype=float)
        if not s.sum() > 0:
            raise ValueError(f"`{type(self).__name__}.fit(sample_weight=...)`: at least one weight must be positive")
        targets, s, loss = self._targets(y, s)
        columns = self._columns(X.shape[1])
        if sparse.issparse(X) and X.shape[0] * X.shape[1] > DENSE:
            raise ValueError(
                f"`{type(self).__name__}.fit(X=...)`: a sparse table of {X.shape[0]:,} x {X.shape[1]:,} would have "
                f"{X.shape[0] * X.shape[1]:,} numbers when made dense; at most {DENSE:,} are"
            )
        X64 = X.astype(np.float64)
        standard = Standard.of(X64, s, centred=self.fit_intercept, scaled=self.standardize)
        if not self.standardize and self._squares:
            standard = standard.sized(Standard.of(X64, s, centred=self.fit_intercept, scaled=True).scale)
        table = standard.applied(X64)
        if self.fit_intercept:
            table = np.column_stack([table, np.ones(len(table))])
        rows = Rows(table, targets, s)
        splits = self._splits(X, y, s)
        with _threads().limit(limits=1 if table.shape[1] <= NARROW else None, user_api="blas"):
            engine = self._engine(loss, rows, columns, splits)
            try:
                tuned = self._tune(engine, splits, columns)
                fitted = engine.fitted(tuned.theta)
            except np.linalg.LinAlgError as error:
                raise ValueError(
                    f"`{type(self).__name__}.fit(X=...)`: double precision does not do for these columns and penalty factors "
                    f"({error}); leave out columns that are alike, or bring the factors nearer to each other"
                ) from error
        self._tell(tuned, columns, fitted.closed, 1.0 if self.standardize else float(standard.scale[0]) ** 2)
        coef, intercept = standard.back(fitted.w, self.fit_intercept)
        self._keep(coef.astype(dtype, copy=False), intercept.astype(dtype, copy=False), dtype)
        return self

    def _check(self) -> None:
        """Refuse parameters that can't be meant."""

        def refuse(name: str, rule: str) -> ValueError:
            value = getattr(self, name)
            return ValueError(f"`{type(self).__name__}({name}={shown(value)})`: {name} {rule}")

        def number(value: Any) -> bool:
            return isinstance(value, Real) and not isinstance(value, bool)

        if not (self.spread == "auto" if isinstance(self.spread, str) else number(self.spread) and self.spread >= 0):
            raise refuse("spread", 'must be "auto" or a number of at least 0 (inf: no prior)')
        if self.solver not in self._solvers:
            *most, last = (f'"{name}"' for name in self._solvers)
            raise refuse("solver", f"must be {', '.join(most)} or {last}")
        if not (number(self.tol) and 0 < self.tol < inf):
            raise refuse("tol", "must be positive")
        if not (isinstance(self.max_iter, Integral) and not isinstance(self.max_iter, bool) and self.max_iter >= 1):
            raise refuse("max_iter", "must be a whole number of at least 1")

    def _columns(self, count: int) -> Columns:
        names = getattr(self, "feature_names_in_", None)
        return Columns.read(type(self).__name__, count, names, self.groups, self.penalty_factors)

    def _splits(self, X: Any, y: Any, s: Array) -> list[tuple[np.ndarray, np.ndarray]]:
        cv = self.cv
        if isinstance(cv, Integral) and not isinstance(cv, bool) and self.random_state is not None:
            kind = StratifiedKFold if self._classifies else KFold
            seed = check_random_state(self.random_state).randint(2**31 - 1)
            cv = kind(int(cv), shuffle=True, random_state=seed)
        found = list(check_cv(cv, y, classifier=self._classifies).split(X, y))
        made = []
        for train, held in found:
            try:
                pair = tuple(np.arange(X.shape[0])[at] for at in (train, held))  # masks too
            except IndexError as error:
                raise ValueError(
                    f"`{type(self).__name__}(cv=...)`: a fold has rows that are not there: {error}"
                ) from None
            if not len(pair[0]) or not len(pair[1]):
                raise ValueError(
                    f"`{type(self).__name__}(cv=...)`: every fold needs rows to train on and rows held out"
                )
            if not s[pair[0]].sum() > 0:
                raise ValueError(
                    f"`{type(self).__name__}.fit(sample_weight=...)`: the training rows of a fold weigh nothing"
                )
            made.append(pair)
        if not made:
            raise ValueError(f"`{type(self).__name__}(cv=...)`: there must be at least one fold")
        return made

    def _tune(self, engine: Any, splits: Any, columns: Columns) -> Tuned:
        """One penalty, then one a group where nested folds, or the user, ask for it."""
        folds = engine.all if isinstance(engine, Newton) else engine.on(splits)
        shared: Tuned = folds.common()
        rows = engine.rows
        scale, unit = max(self._scale(shared.value), LEAST), self._unit()
        logger.info("one penalty: held-out loss %.6g", shared.value)
        tuned, spread = shared, 0.0
        self.nested_loss_, self.nested_error_, self.improved_ = {}, {}, None
        if engine.grouping.count > 1:
            few = np.count_nonzero(rows.s) < FEWEST or min(np.count_nonzero(rows.s[train]) for train, _ in splits) < 2
            if self.spread == "auto" and few:  # nothing is left to judge by
                logger.info("one penalty is used: fewer than %d rows do not tell whether groups are better", FEWEST)
                self.improved_ = False
            elif self.spread == "auto":
                nest = engine.nest if isinstance(engine, Newton) else Nested.of(engine, splits, self.n_jobs)
                choice = choose(nest, shared.common, scale)
                spread = choice.spread
                if spread > 0:
                    tuned = self._vouched(folds, shared, choice, scale)
                self.nested_loss_ = {width: unit * loss for width, loss in choice.losses.items()}
                self.nested_error_ = {width: unit * error for width, error in choice.errors.items()}
                self.improved_ = spread > 0
            else:
                spread = float(self.spread)
                for width in path(spread):
                    way = {"on_the_way": width < spread} if isinstance(engine, Newton) else {}
                    tuned = folds.widened(tuned, width, scale, **way)
        self.cv_loss_, self.cv_loss_shared_ = unit * tuned.value, unit * shared.value
        self.spread_ = spread
        self._closed = folds.closed
        return tuned

    def _vouched(self, folds: Any, shared: Tuned, choice: Choice, scale: float) -> Tuned:
        """Penalties of all folds with the width that nested folds chose, from theirs on.

        Where it is a minimum of much weaker penalties than all of theirs it is another one, which overfits: then it is their mean
        that was judged.
        """
        middle = replace(shared, theta=choice.theta.mean(0))
        found = folds.widened(middle, choice.spread, scale)
        if np.all(found.theta >= choice.theta.min(0) - STRAYED):
            return found
        return replace(found, theta=middle.theta, value=folds.at(middle.theta))

    def _tell(self, tuned: Tuned, columns: Columns, closed: bool, unit: float) -> None:
        """The attributes about penalties, and a warning where something did not end by itself."""
        self.n_iter_ = max(1, tuned.steps)
        if not (tuned.converged and closed and self._closed):
            warnings.warn(
                f"{type(self).__name__} stopped before it converged (max_iter={self.max_iter} upper iterations); increase "
                "max_iter, or look at columns that are very alike",
                ConvergenceWarning,
                stacklevel=4,
            )
        del self._closed
        self.groups_ = dict(columns.groups)
        self.group_penalties_ = {name: unit * penalty for name, penalty in columns.by_group(tuned.theta).items()}
        self.penalties_ = unit * columns.grouping(False).penalties(tuned.theta)
        self.history_ = [dict(entry) for entry in tuned.history]

    def _linear(self, X: Any) -> Any:
        check_is_fitted(self)
        X = validate_data(self, X, accept_sparse=["csr", "csc"], dtype=[np.float64, np.float32], reset=False)
        return X @ np.atleast_2d(self.coef_).T + self.intercept_
