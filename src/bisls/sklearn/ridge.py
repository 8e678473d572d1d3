"""Ridge regression with a penalty a group of columns."""

from __future__ import annotations

from typing import Any

import numpy as np
from sklearn.base import RegressorMixin

from bisls.sklearn.base import GroupCV
from bisls.sklearn.lower import Array, Loss, Squared


class GroupRidgeCV(RegressorMixin, GroupCV):
    """Ridge regression with a penalty for each group of columns, tuned by cross-validation.

    ``min_w  1/2 sum_i s_i (y_i - b - x_i w)^2 + 1/2 sum_j f_j p_g(j) w_j^2``

    is the lower problem, on standardised columns: p is the ``alpha`` of `sklearn.linear_model.Ridge`, s are weights, f factors.
    Above, the penalties p minimise the mean squared error on held-out folds, under a prior that keeps them within a
    factor of about ``exp(spread)`` of a common one. How far is decided by nested folds; where groups are no better there than one
    penalty, one penalty is used, and the answer is that of `RidgeCV` with the same folds.

    Penalties without a prior (``spread=inf``), one a feature above all, overfit the held-out rows.

    Args:
        groups: Which columns share a penalty. None: all of them. "features": each has its own. "blocks": by what stands before
            ``__`` in the names, as a ColumnTransformer writes them. A label a column. A mapping of names to columns (names,
            numbers, masks or slices); columns that it does not name are a group of their own, "rest".
        penalty_factors: A factor a column, or a mapping of columns to factors; the others have 1. 0 is never penalised.
        spread: The width of the prior on the logarithm of the penalties: "auto" (by nested folds; one penalty where fewer than 20
            rows have a weight), 0 (one penalty), inf (free).
        cv: Folds: a number, a splitter, or an iterable of splits.
        solver: "exact": lower problems by Cholesky factors, Newton's method above (L-BFGS for more than 100 groups). "bisls":
            both levels by `bisls.BiSLS`, for many columns (it imports torch). "auto": the first up to 2,000 columns or rows.
        fit_intercept: Whether there is an intercept; it is never penalised.
        standardize: Divide columns by their standard deviation before they are penalised. Coefficients are in the user's units.
        tol: Relative change of the upper value at which it ends; positive.
        max_iter: Upper iterations for each width of the prior at most, at least 1.
        n_jobs: Nested folds side by side, in threads, where they are not tuned in step (more than 100 groups).
        random_state: Where ``cv`` is a number: shuffles the rows before they are cut into folds. None does not shuffle.

    Attributes:
        coef_: The coefficients, in the user's units.
        intercept_: The intercept.
        penalties_: A penalty a column, factors included, on standardised columns.
        group_penalties_: Name of a group -> its penalty.
        groups_: Name of a group -> its columns.
        spread_: The width of the prior that was used; 0 is one penalty.
        cv_loss_: The mean squared error on held-out rows with these penalties. They were chosen by it: see ``nested_loss_``.
        cv_loss_shared_: The same with one penalty.
        nested_loss_: Width -> the error on rows that neither coefficients nor penalties have seen; empty where it was not asked.
        nested_error_: Width -> the standard error of its difference from one penalty.
        improved_: Whether a penalty a group was better there; None where that was not asked.
        n_iter_: Upper iterations.
        n_features_in_: How many columns.
        feature_names_in_: Their names, where the table has them.
        history_: What was seen on the way: a mapping with "spread" and "cv_loss" for each evaluation.

    Examples:
        >>> import numpy as np
        >>> from bisls.sklearn import GroupRidgeCV
        >>> rng = np.random.default_rng(0)
        >>> X = rng.normal(size=(120, 60))
        >>> y = X[:, :5] @ [3.0, -2.0, 1.0, 2.0, -1.0] + rng.normal(size=120)
        >>> model = GroupRidgeCV(groups={"measured": slice(0, 5), "noise": slice(5, 60)}).fit(X, y)
        >>> bool(model.improved_), model.group_penalties_["noise"] > 10 * model.group_penalties_["measured"]
        (True, True)
    """

    def _targets(self, y: Any, s: Array) -> tuple[Array, Array, Loss]:
        try:
            y = np.asarray(y, dtype=float)
        except (TypeError, ValueError):
            raise ValueError(
                f"`{type(self).__name__}.fit(y=...)`: y must be numbers; classes are for GroupLogisticRegressionCV"
            ) from None
        # a constant is the intercept's: without it the numbers keep their digits; a power of two keeps squares in range
        middle = float(s @ y / s.sum()) if self.fit_intercept else 0.0
        power = float(np.ldexp(1.0, int(np.frexp(np.abs(y - middle).max())[1])))
        self._line = (middle, power)
        return (y - middle) / power, s, Squared()

    def _scale(self, value: float) -> float:
        return 2.0 * value  # the error variance

    def _unit(self) -> float:
        return float(2.0 * np.square(self._line[1]))  # of half the squared error

    def _keep(self, coef: Array, intercept: Array, dtype: Any) -> None:
        middle, power = self._line
        self.coef_ = coef[0] * coef.dtype.type(power)
        self.intercept_ = float(intercept[0]) * power + middle if self.fit_intercept else 0.0
        del self._line

    def predict(self, X: Any) -> Any:
        """The predictions for the rows of a table."""
        return self._linear(X)[:, 0]
