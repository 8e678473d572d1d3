"""scikit-learn's own models with one penalty, measured on the same folds."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from sklearn.linear_model import LassoCV, LogisticRegressionCV, RidgeCV
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

LARGE = 1_000_000  # numbers in a table beyond which an L1 rival would take longer than all the rest
Make = Callable[[], Any]


def rivals(task: str, X: np.ndarray, y: np.ndarray) -> list[tuple[str, Make]]:
    """Names, and what makes each; L1 only where the table is not large."""
    if task == "regression":
        found: list[tuple[str, Make]] = [("RidgeCV", lambda: RidgeCV(np.logspace(-3, 6, 28)))]
        sparse: tuple[str, Make] = ("LassoCV (L1)", lambda: LassoCV(cv=5))
    else:
        two = len(np.unique(y)) == 2
        found = [("LogisticRegressionCV (L2)", lambda: logistic_cv(l1=False))]
        sparse = ("LogisticRegressionCV (L1)", lambda: logistic_cv(l1=True, two=two))
    return found + ([sparse] if X.size <= LARGE else [])


def logistic_cv(l1: bool, two: bool = True) -> Any:
    """`LogisticRegressionCV` judged by its log-loss; its arguments have changed over the versions."""
    known = inspect.signature(LogisticRegressionCV).parameters
    solver = ("liblinear" if two else "saga") if l1 else "lbfgs"
    common: dict[str, Any] = {"scoring": "neg_log_loss", "solver": solver, "max_iter": 1000, "random_state": 0}
    if l1:  # weak penalties, which are not chosen, would take minutes to the last digit
        common |= {"Cs": np.logspace(-3, 1, 8), "max_iter": 50, "tol": 1e-2}
    if "use_legacy_attributes" in known:
        return LogisticRegressionCV(l1_ratios=(float(l1),), use_legacy_attributes=False, **common)
    return LogisticRegressionCV(penalty="l1" if l1 else "l2", **common)


def losses_of(
    make: Make, task: str, X: np.ndarray, y: np.ndarray, splits: Sequence[tuple[np.ndarray, np.ndarray]]
) -> np.ndarray:
    """The loss of every held-out row, the rival tuned on the other folds alone."""
    each = np.zeros(len(y))
    classes = np.unique(y)
    for train, held in splits:
        model = make_pipeline(StandardScaler(), make())
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model.fit(X[train], y[train])
        if task == "regression":
            each[held] = (model.predict(X[held]) - y[held]) ** 2
            continue
        chances = np.full((len(held), len(classes)), 1e-15)
        chances[:, np.searchsorted(classes, model.classes_)] = model.predict_proba(X[held])
        each[held] = -np.log(chances[np.arange(len(held)), np.searchsorted(classes, y[held])].clip(1e-15))
    return each
