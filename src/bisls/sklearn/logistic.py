"""Logistic regression, of two or more classes, with a penalty a group of columns."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
from scipy.special import expit, log_expit, log_softmax, softmax
from sklearn.base import ClassifierMixin
from sklearn.utils.class_weight import compute_class_weight
from sklearn.utils.multiclass import check_classification_targets

from bisls.sklearn.base import GroupCV
from bisls.sklearn.lower import Array, Logistic, Loss, Multinomial


class GroupLogisticRegressionCV(ClassifierMixin, GroupCV):
    """Logistic regression with a penalty for each group of columns, tuned by cross-validation.

    ``min_w  sum_i s_i logloss(y_i, b + x_i w) + 1/2 sum_j f_j p_g(j) ||w_j||^2``

    is the lower problem, on standardised columns: p is ``1 / C`` of `sklearn.linear_model.LogisticRegression`, s are weights, f
    factors; with more than two classes it is the multinomial loss, and w_j has a number for each class. Above, the penalties p
    minimise the mean log-loss on held-out folds, under a prior that keeps them within a factor of about ``exp(spread)`` of a
    common one. How far is decided by nested folds; where groups are no better there than one penalty, one penalty is used, and
    the answer is that of `LogisticRegressionCV` with the same folds and ``scoring="neg_log_loss"``.

    Penalties without a prior (``spread=inf``), one a feature above all, overfit the held-out rows.

    Args:
        groups: Which columns share a penalty; as in `GroupRidgeCV`.
        penalty_factors: A factor a column, or a mapping of columns to factors; the others have 1. 0 is never penalised.
        spread: The width of the prior on the logarithm of the penalties: "auto" (by nested folds; one penalty where fewer than 20
            rows have a weight), 0 (one penalty), inf (free).
        cv: Folds: a number (stratified), a splitter, or an iterable of splits.
        solver: "exact", "bisls" or "auto"; as in `GroupRidgeCV`.
        fit_intercept: Whether there is an intercept; it is never penalised.
        standardize: Divide columns by their standard deviation before they are penalised. Coefficients are in the user's units.
        class_weight: None, "balanced" or a mapping of classes to weights: weighs the loss of training and of held-out rows.
        tol: Relative change of the upper value at which it ends; positive.
        max_iter: Upper iterations for each width of the prior at most, at least 1.
        n_jobs: Nested folds side by side, in threads, where they are not tuned in step (more than 64 groups, 32 where
            columns are more than rows).
        random_state: Where ``cv`` is a number: shuffles the rows before they are cut into folds. None does not shuffle.

    Attributes:
        classes_: The classes.
        coef_: The coefficients, in the user's units: one row for two classes, otherwise a row a class.
        intercept_: The intercepts.
        penalties_: A penalty a column, factors included, on standardised columns.
        group_penalties_: Name of a group -> its penalty.
        groups_: Name of a group -> its columns.
        spread_: The width of the prior that was used; 0 is one penalty.
        cv_loss_: The mean log-loss on held-out rows with these penalties. They were chosen by it: see ``nested_loss_``.
        cv_loss_shared_: The same with one penalty.
        nested_loss_: Width -> the loss on rows that neither coefficients nor penalties have seen; empty where it was not asked.
        nested_error_: Width -> the standard error of its difference from one penalty.
        improved_: Whether a penalty a group was better there; None where that was not asked.
        n_iter_: Upper iterations.
        n_features_in_: How many columns.
        feature_names_in_: Their names, where the table has them.
        history_: What was seen on the way: a mapping with "spread" and "cv_loss" for each evaluation.

    Examples:
        >>> import numpy as np
        >>> from bisls.sklearn import GroupLogisticRegressionCV
        >>> rng = np.random.default_rng(0)
        >>> X = rng.normal(size=(200, 60))
        >>> y = np.where(X[:, :5].sum(1) + rng.normal(size=200) > 0, "yes", "no")
        >>> labels = ["measured"] * 5 + ["noise"] * 55
        >>> model = GroupLogisticRegressionCV(groups=labels).fit(X, y)
        >>> bool(model.improved_), model.nested_loss_[model.spread_] < model.nested_loss_[0.0]
        (True, True)
    """

    _classifies: ClassVar[bool] = True

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
        class_weight: Any = None,
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
        self.class_weight = class_weight

    def _targets(self, y: Any, s: Array) -> tuple[Array, Array, Loss]:
        check_classification_targets(y)
        self.classes_, numbers = np.unique(y, return_inverse=True)
        if len(self.classes_) < 2:
            only = self.classes_.tolist()[0]
            raise ValueError(
                f"`{type(self).__name__}.fit(y=...)`: y needs at least two classes; this has one class, {only!r}"
            )
        if self.class_weight is not None:
            s = s * compute_class_weight(self.class_weight, classes=self.classes_, y=y)[numbers]
        loss = Logistic() if len(self.classes_) == 2 else Multinomial(len(self.classes_))
        return numbers.astype(float), s, loss

    def _keep(self, coef: Array, intercept: Array, dtype: Any) -> None:
        self.coef_, self.intercept_ = coef, intercept

    def decision_function(self, X: Any) -> Any:
        """The linear predictor: a number a row for two classes, otherwise one for each class."""
        eta = self._linear(X)
        return eta[:, 0] if len(self.classes_) == 2 else eta

    def predict_proba(self, X: Any) -> Any:
        """The probability of each class, in the order of ``classes_``."""
        eta = self._linear(X)
        if len(self.classes_) > 2:
            return softmax(eta, axis=1)
        return np.column_stack([expit(-eta[:, 0]), expit(eta[:, 0])])

    def predict_log_proba(self, X: Any) -> Any:
        """The logarithm of `predict_proba`."""
        eta = self._linear(X)
        if len(self.classes_) > 2:
            return log_softmax(eta, axis=1)
        return np.column_stack([log_expit(-eta[:, 0]), log_expit(eta[:, 0])])

    def predict(self, X: Any) -> Any:
        """The most probable class of each row."""
        eta = self.decision_function(X)
        return self.classes_[(eta > 0).astype(int) if eta.ndim == 1 else eta.argmax(1)]
