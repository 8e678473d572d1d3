"""Lasso and elastic net with a penalty a group of columns: coordinate descent below, the hypergradient on what is not zero."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from scipy.linalg import cho_factor, cho_solve
from sklearn.base import RegressorMixin

from bisls.signs import by_coordinates, by_signs
from bisls.sklearn.base import GroupCV
from bisls.sklearn.columns import Columns
from bisls.sklearn.lower import CLOSE, JITTER, Array, Loss, Rows, Solved, Squared

PRODUCTS = 3 * 10**8  # numbers in the products of columns of all folds, at most
FINE = 10.0 ** np.arange(0.25, -4.1, -0.25)  # common penalties tried first, a row; targets have variance 1


@dataclass(frozen=True)
class Sparse(Squared):
    """Half the mean squared error with ``sum_j p_j (r |w_j| + (1 - r) / 2 w_j^2)``.

    Args:
        ratio: r, in (0, 1]; 1 is the lasso.
    """

    ratio: float = 1.0

    @property
    def coarse(self) -> Array:
        """Where the search for a common penalty looks first: the held-out loss has kinks, so the steps are smaller."""
        return FINE

    def prepared(self, rows: Rows) -> tuple[Array, Array]:
        """X' S X and X' S y, whatever the number of rows."""
        return self._products(rows)

    def unit(self, rows: Rows) -> float:
        """1: as in scikit-learn's lasso, and unlike its ridge, the loss is a mean over the rows, so the penalty is one a row."""
        return 1.0

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
        """By search over signs and zeros from those of a neighbour, exact; where it does not end, by coordinate descent first.

        With A the coordinates that are not zero, ``(X'SX + P (1 - r))_AA w_A = (X'Sy - r p sign(w))_A``, and nothing else moves
        when penalties change a little.
        """
        gram, right = prepared if prepared is not None else self._products(rows)
        penalties = penalties * rows.weight
        l1, l2 = self.ratio * penalties, (1.0 - self.ratio) * penalties + JITTER * rows.weight
        w, closed = start[:, 0].copy(), False
        back: Any = None
        found = by_signs(gram, right, l1, l2, w, _factorised)
        if found is None:  # columns that are alike: by coordinates, which always get there
            by_coordinates(gram, right, l1, l2, w)
            found = by_signs(gram, right, l1, l2, w, _factorised)
        if found is not None:
            w, back, closed = *found, True
        active = np.flatnonzero(w)
        if back is None and len(active):
            back = _factorised(gram, l2, active)
        pull = penalties * (self.ratio * np.sign(w) + (1.0 - self.ratio) * w)
        return Solved(w[:, None], _on(active, back), None, closed, pull[:, None])


def _factorised(gram: Array, l2: Array, active: Any) -> Callable[[Array], Array]:
    block = gram[np.ix_(active, active)]
    block[np.diag_indices_from(block)] += l2[active]
    factor = cho_factor(block, lower=True, check_finite=False)
    return lambda v: cho_solve(factor, v, check_finite=False)


def _on(active: Any, back: Any) -> Callable[[Array], Array]:
    def solve(v: Array) -> Array:
        found = np.zeros_like(v)
        if len(active):
            found[active, 0] = back(v[active, 0])
        return found

    return solve


class WeightedElasticNetCV(RegressorMixin, GroupCV):
    """The elastic net with a penalty for each group of columns, tuned by cross-validation.

    ``min_w  1/2 sum_i s_i (y_i - b - x_i w)^2 / sum_i s_i + sum_j f_j p_g(j) (r |w_j| + (1 - r) / 2 w_j^2)``

    is the lower problem, on standardised columns and for a target of variance 1: p is the ``alpha`` and r the
    ``l1_ratio`` of `sklearn.linear_model.ElasticNet`. Everything else is as in `GroupRidgeCV`. (It is not the group lasso,
    which sets groups to zero as a whole.)

    A penalty a feature without a prior overfits here as it does there.

    Args:
        groups: Which columns share a penalty; as in `GroupRidgeCV`.
        l1_ratio: r, in (0, 1].
        penalty_factors: As in `GroupRidgeCV`; 0 is never penalised.
        spread: As in `GroupRidgeCV`.
        cv: As in `GroupRidgeCV`.
        solver: "auto" or "exact".
        fit_intercept: As in `GroupRidgeCV`.
        standardize: As in `GroupRidgeCV`.
        tol: As in `GroupRidgeCV`.
        max_iter: As in `GroupRidgeCV`.
        n_jobs: As in `GroupRidgeCV`.
        random_state: As in `GroupRidgeCV`.

    Attributes:
        coef_: The coefficients, in the user's units; the other attributes are those of `GroupRidgeCV`.

    Examples:
        >>> import numpy as np
        >>> from bisls.sklearn import WeightedElasticNetCV
        >>> rng = np.random.default_rng(0)
        >>> X = rng.normal(size=(120, 60))
        >>> y = X[:, :5] @ [3.0, -2.0, 1.0, 2.0, -1.0] + rng.normal(size=120)
        >>> model = WeightedElasticNetCV(groups={"measured": slice(0, 5), "noise": slice(5, 60)}).fit(X, y)
        >>> int(np.count_nonzero(model.coef_[:5])), bool(np.count_nonzero(model.coef_[5:]) < 20)
        (5, True)
    """

    def __init__(
        self,
        groups: Any = None,
        *,
        l1_ratio: float = 0.5,
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
        super().__init__(
            groups,
            penalty_factors=penalty_factors,
            spread=spread,
            cv=cv,
            solver=solver,
            fit_intercept=fit_intercept,
            standardize=standardize,
            tol=tol,
            max_iter=max_iter,
            n_jobs=n_jobs,
            random_state=random_state,
        )
        self.l1_ratio = l1_ratio

    _squares: ClassVar[bool] = False
    _solvers: ClassVar[tuple[str, ...]] = ("auto", "exact")

    def _engine(self, loss: Loss, rows: Rows, columns: Columns, splits: Any) -> Any:
        tables = len(splits) * (len(splits) + 1 if len(columns.groups) > 1 and self.spread == "auto" else 1)
        count = rows.X.shape[1]
        if tables * count**2 > PRODUCTS:
            raise ValueError(
                f"`{type(self).__name__}.fit(X=...)`: the products of {count:,} columns, for {tables} folds and nested folds, "
                f"would be {tables * count**2:,} numbers; at most {PRODUCTS:,} are held. GroupRidgeCV takes more columns"
            )
        return super()._engine(loss, rows, columns, splits)

    def _ratio(self) -> float:
        ratio = self.l1_ratio
        if isinstance(ratio, bool) or not isinstance(ratio, int | float | np.number) or not 0 < ratio <= 1:
            raise ValueError(f"`{type(self).__name__}(l1_ratio={ratio!r})`: l1_ratio must lie in (0, 1]")
        return float(ratio)

    def _targets(self, y: Any, s: Array) -> tuple[Array, Array, Loss]:
        y = np.asarray(y, dtype=float)
        middle = float(s @ y / s.sum()) if self.fit_intercept else 0.0
        size = float(np.sqrt(s @ (y - middle) ** 2 / s.sum()))
        size = size if size > 10 * np.finfo(float).eps * np.abs(y).max() else 1.0
        self._line = (middle, size)
        return (y - middle) / size, s, Sparse(self._ratio())

    def _scale(self, value: float) -> float:
        return 2.0 * value

    def _unit(self) -> float:
        return 2.0 * self._line[1] ** 2

    def _keep(self, coef: Array, intercept: Array, dtype: Any) -> None:
        middle, size = self._line
        del self._line
        self.coef_ = (coef[0] * size).astype(dtype, copy=False)
        self.intercept_ = float(intercept[0]) * size + middle if self.fit_intercept else 0.0

    def predict(self, X: Any) -> Any:
        """The predictions for the rows of a table."""
        return self._linear(X)[:, 0]


class WeightedLassoCV(WeightedElasticNetCV):
    """The lasso with a penalty for each group of columns, tuned by cross-validation: `WeightedElasticNetCV` with ``l1_ratio=1``.

    Args:
        groups: Which columns share a penalty; as in `GroupRidgeCV`, and so are the others.
        penalty_factors: 0 is never penalised.
        spread: The width of the prior.
        cv: Folds.
        solver: "auto" or "exact".
        fit_intercept: Whether there is an intercept.
        standardize: Divide columns by their standard deviation before they are penalised.
        tol: Relative change of the upper value at which it ends.
        max_iter: Upper iterations for each width of the prior at most.
        n_jobs: Nested folds side by side.
        random_state: Shuffles the rows where ``cv`` is a number.

    Examples:
        >>> import numpy as np
        >>> from bisls.sklearn import WeightedLassoCV
        >>> rng = np.random.default_rng(0)
        >>> X = rng.normal(size=(80, 30))
        >>> y = 3.0 * X[:, 0] - 2.0 * X[:, 1] + rng.normal(size=80)
        >>> model = WeightedLassoCV().fit(X, y)
        >>> bool(np.all(model.coef_[:2] != 0)), bool(np.count_nonzero(model.coef_) < 20)
        (True, True)
    """

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
        super().__init__(
            groups,
            penalty_factors=penalty_factors,
            spread=spread,
            cv=cv,
            solver=solver,
            fit_intercept=fit_intercept,
            standardize=standardize,
            tol=tol,
            max_iter=max_iter,
            n_jobs=n_jobs,
            random_state=random_state,
        )
        del self.l1_ratio

    def _ratio(self) -> float:
        return 1.0
