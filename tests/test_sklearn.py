"""Estimators for tables: scikit-learn's own checks, its answers with one penalty, and better ones where groups differ."""

from __future__ import annotations

import pickle
import subprocess
import sys
import warnings

import numpy as np
import pytest
from scipy import sparse
from sklearn.base import clone
from sklearn.compose import make_column_transformer
from sklearn.datasets import load_breast_cancer, load_diabetes, load_iris
from sklearn.exceptions import ConvergenceWarning
from sklearn.linear_model import ElasticNet, LinearRegression, LogisticRegression, Ridge
from sklearn.metrics import log_loss
from sklearn.model_selection import (
    GridSearchCV,
    KFold,
    ShuffleSplit,
    StratifiedKFold,
    cross_val_score,
    train_test_split,
)
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import OneHotEncoder, StandardScaler
from sklearn.utils.estimator_checks import parametrize_with_checks

from bisls.signs import by_coordinates, by_signs
from bisls.sklearn import GroupLogisticRegressionCV, GroupRidgeCV, WeightedElasticNetCV, WeightedLassoCV, base
from bisls.sklearn.batched import BatchedFolds
from bisls.sklearn.lower import Logistic, Multinomial, Rows, Squared
from bisls.sklearn.nested import nested_splits
from bisls.sklearn.sparse import Sparse, _factorised
from bisls.sklearn.tuning import Folds, Grouping

warnings.filterwarnings("ignore", message="Skipping check check_array_api_input")


@pytest.mark.filterwarnings("ignore::sklearn.exceptions.SkipTestWarning")
@parametrize_with_checks(
    [
        GroupRidgeCV(),
        GroupLogisticRegressionCV(),
        GroupRidgeCV("features", spread=0.5),
        WeightedLassoCV(),
        WeightedElasticNetCV(),
    ]
)
def test_scikit_learn_has_nothing_to_complain_of(estimator, check):
    check(estimator)


# --- the hypergradient


def problem(kind: str, seed: int = 0) -> Folds:
    rng = np.random.default_rng(seed)
    X = np.column_stack([rng.normal(size=(60, 6)) * [1, 2, 0.5, 1, 3, 1], np.ones(60)])
    eta = X[:, :6] @ rng.normal(size=6)
    if kind in ("squared", "lasso", "elastic"):
        loss = {"squared": Squared(), "lasso": Sparse(1.0), "elastic": Sparse(0.5)}[kind]
        y = eta + rng.normal(size=60)
    elif kind == "logistic":
        loss, y = Logistic(), (eta + rng.normal(size=60) > 0).astype(float)
    else:
        loss, y = Multinomial(3), np.digitize(eta + rng.normal(size=60), [-1.0, 1.0]).astype(float)
    factors = np.array([1.0, 2.0, 1.0, 0.5, 1.0, 1.0, 0.0]) * (0.02 if isinstance(loss, Sparse) else 1.0)
    grouping = Grouping(np.array([0, 0, 1, 1, 2, 2, 0]), factors, 3)
    splits = list(KFold(4).split(X))
    return Folds(loss, Rows(X, y, rng.uniform(0.5, 2.0, size=60)), splits, grouping, close=1e-18)


@pytest.mark.parametrize("kind", ["squared", "logistic", "multinomial", "lasso", "elastic"])
def test_the_hypergradient_is_that_of_finite_differences(kind):
    folds, theta = problem(kind), np.log([2.0, 0.7, 5.0])
    gradient = folds.value(theta)[1]
    step = 1e-4
    numeric = [(folds.value(theta + step * e)[0] - folds.value(theta - step * e)[0]) / (2 * step) for e in np.eye(3)]
    assert np.abs(numeric).max() > 1e-3  # far above the tolerance
    np.testing.assert_allclose(gradient, numeric, atol=3e-7)


@pytest.mark.parametrize("kind", ["logistic", "multinomial"])
def test_a_factor_nearby_leads_to_the_same_solution(kind):
    folds, far = problem(kind), np.log([200.0, 0.01, 5.0])
    folds.value(np.zeros(3))
    value = folds.value(far)[0]
    assert value == pytest.approx(problem(kind).value(far)[0], rel=1e-9)
    assert folds.closed


def test_nested_folds_see_neither_fold():
    splits = list(KFold(5).split(np.zeros(50)))
    for outer, (train, held) in enumerate(splits):
        inner = nested_splits(splits, outer)
        assert len(inner) == 4
        for a, b in inner:
            assert set(a) | set(b) == set(train)
            assert not set(a) & set(b)
            assert not (set(a) | set(b)) & set(held)
    two = list(KFold(2).split(np.zeros(10)))
    assert all(set(a) | set(b) == set(two[0][0]) for a, b in nested_splits(two, 0))


# --- the answers of scikit-learn


def test_one_penalty_is_that_of_a_fine_grid_of_ridge():
    X, y = load_diabetes(return_X_y=True)
    X, cv = X[:, :6], KFold(4, shuffle=True, random_state=0)
    ours = GroupRidgeCV(cv=cv).fit(X, y)
    scaled = StandardScaler().fit(X)
    grid = {"alpha": ours.group_penalties_["all"] * np.exp(np.linspace(-1, 1, 41))}
    theirs = GridSearchCV(Ridge(), grid, scoring=_pooled(cv, scaled.transform(X), y), cv=[(np.arange(len(y)),) * 2])
    theirs.fit(scaled.transform(X), y)
    assert theirs.best_params_["alpha"] == pytest.approx(ours.group_penalties_["all"])
    own = Ridge(alpha=ours.group_penalties_["all"]).fit(scaled.transform(X), y)
    np.testing.assert_allclose(ours.predict(X), own.predict(scaled.transform(X)), rtol=1e-8)
    assert (ours.improved_, ours.spread_, ours.nested_loss_) == (None, 0.0, {})


def _pooled(cv, X, y):
    """The error over all held-out rows together, as ours is; GridSearchCV itself takes the mean of the folds' means."""

    def score(model, *_):
        errors = [(clone(model).fit(X[a], y[a]).predict(X[b]) - y[b]) ** 2 for a, b in cv.split(X, y)]
        return -np.concatenate(errors).mean()

    return score


@pytest.mark.parametrize("load", [load_breast_cancer, load_iris])
def test_one_penalty_is_that_of_logistic_regression(load):
    X, y = load(return_X_y=True)
    X, cv = X[:, :6], StratifiedKFold(4, shuffle=True, random_state=0)
    ours = GroupLogisticRegressionCV(cv=cv).fit(X, y)
    Z = StandardScaler().fit_transform(X)

    def pooled(penalty):
        losses = []
        for a, b in cv.split(Z, y):
            model = LogisticRegression(C=1 / penalty, tol=1e-10, max_iter=10_000).fit(Z[a], y[a])
            losses.append(log_loss(y[b], model.predict_proba(Z[b]), labels=np.unique(y)) * len(b))
        return sum(losses) / len(y)

    best = ours.group_penalties_["all"]
    assert pooled(best) == pytest.approx(ours.cv_loss_, rel=1e-6)
    assert pooled(best) <= min(pooled(0.8 * best), pooled(1.25 * best))
    own = LogisticRegression(C=1 / best, tol=1e-12, max_iter=20_000).fit(Z, y)
    np.testing.assert_allclose(ours.predict_proba(X), own.predict_proba(Z), atol=1e-5)
    assert ours.coef_.shape == ((1, 6) if load is load_breast_cancer else (3, 4))


def test_a_factor_of_0_is_never_penalised():
    X, y = load_diabetes(return_X_y=True)
    free = GroupRidgeCV(penalty_factors=np.zeros(10)).fit(X, y)
    np.testing.assert_allclose(free.coef_, LinearRegression().fit(X, y).coef_, rtol=1e-5)
    assert np.all(free.penalties_ == 0)
    assert free.group_penalties_ == {"all": 0.0}
    heavy = GroupRidgeCV(penalty_factors={2: 0.0}, groups={"rest": range(10)}, spread=0).fit(X, 1e-3 * y)
    assert heavy.penalties_[2] == 0
    assert np.all(np.delete(heavy.penalties_, 2) > 0)


def test_a_factor_of_0_among_noise_keeps_its_coefficient():
    rng = np.random.default_rng(0)
    X = rng.normal(size=(80, 200))
    y = 2.0 * X[:, 0] + 3.0 * rng.normal(size=80)
    shrunk = GroupRidgeCV().fit(X, y).coef_[0]
    kept = GroupRidgeCV(penalty_factors={0: 0}).fit(X, y).coef_[0]
    assert shrunk < 1.0 < kept < 3.0


# --- groups


def noisy(kind: str, noise: int = 60, rows: int = 150, seed: int = 0):
    rng = np.random.default_rng(seed)
    X = rng.normal(size=(rows + 500, 5 + noise))
    eta = X[:, :5] @ np.array([2.0, -1.5, 1.0, 1.0, -1.0])
    y = eta + 2.0 * rng.normal(size=len(X)) if kind == "r" else (eta + rng.normal(size=len(X)) > 0).astype(int)
    return X[:rows], y[:rows], X[rows:], y[rows:], ["signal"] * 5 + ["noise"] * noise


def test_groups_that_differ_are_found_and_help_on_new_rows():
    X, y, new, truth, labels = noisy("r")
    shared, grouped = GroupRidgeCV().fit(X, y), GroupRidgeCV(labels).fit(X, y)
    assert grouped.improved_
    assert grouped.spread_ > 0
    assert grouped.nested_loss_[grouped.spread_] < 0.8 * grouped.nested_loss_[0.0]
    assert grouped.cv_loss_ < grouped.cv_loss_shared_ == pytest.approx(shared.cv_loss_)
    assert grouped.group_penalties_["noise"] > 10 * grouped.group_penalties_["signal"]
    assert grouped.score(new, truth) > shared.score(new, truth) + 0.05


def test_groups_that_differ_help_classification_too():
    X, y, new, truth, labels = noisy("c")
    shared, grouped = GroupLogisticRegressionCV().fit(X, y), GroupLogisticRegressionCV(labels).fit(X, y)
    assert grouped.improved_
    before, after = (log_loss(truth, model.predict_proba(new)) for model in (shared, grouped))
    assert after < 0.8 * before


def test_groups_that_are_alike_are_left_alone():
    rng = np.random.default_rng(1)
    X = rng.normal(size=(200, 20))
    y = X @ rng.normal(size=20) + 3.0 * rng.normal(size=200)
    model = GroupRidgeCV(np.arange(20) % 4).fit(X, y)
    assert model.improved_ is False
    assert model.spread_ == 0
    assert len(set(model.group_penalties_.values())) == 1
    np.testing.assert_allclose(model.coef_, GroupRidgeCV().fit(X, y).coef_, rtol=1e-6)


def test_a_free_penalty_a_feature_overfits_and_auto_does_not():
    X, y, new, truth, _ = noisy("c", noise=30, rows=100)
    free = GroupLogisticRegressionCV("features", spread=np.inf, max_iter=60).fit(X, y)
    auto = GroupLogisticRegressionCV("features").fit(X, y)
    shared = GroupLogisticRegressionCV().fit(X, y)
    losses = [log_loss(truth, model.predict_proba(new)) for model in (free, auto, shared)]
    assert free.cv_loss_ < auto.cv_loss_  # what it was given to minimise
    assert losses[0] > 1.1 * losses[2]  # new rows
    assert losses[1] < 1.02 * losses[2]


def test_another_minimum_than_the_one_of_the_nested_folds_is_not_taken():
    """With all folds the held-out loss falls to half towards almost no penalty; new rows had .34 there, .18 with one penalty."""
    X, y = load_breast_cancer(return_X_y=True)
    train, new, labels, truth = train_test_split(X, y, train_size=300, random_state=4, stratify=y)
    scaler = StandardScaler().fit(train)
    train, new = scaler.transform(train), scaler.transform(new)
    model = GroupLogisticRegressionCV("features", random_state=0).fit(train, labels)
    shared = GroupLogisticRegressionCV(random_state=0).fit(train, labels)
    losses = [log_loss(truth, one.predict_proba(new)) for one in (model, shared)]
    assert losses[0] < 1.05 * losses[1]
    assert np.all(model.penalties_ > 0.02 * shared.penalties_)


FORMS = {
    "labels": ["a", "a", "b", "b", "b"],
    "numbers": np.array([0, 0, 1, 1, 1]),
    "indices": {"a": [0, 1], "b": [2, 3, 4]},
    "slices": {"a": slice(0, 2), "b": slice(2, 5)},
    "masks": {"a": [True, True, False, False, False], "b": [False, False, True, True, True]},
    "rest": {"a": [0, 1]},
    "negative": {"b": [-1, -2, -3], "a": [0, 1]},
}


@pytest.mark.parametrize("form", FORMS)
def test_groups_in_every_form_are_the_same(form):
    X, y, *_ = noisy("r", noise=0)
    model = GroupRidgeCV(FORMS[form], spread=1.0).fit(X, y)
    assert [columns.tolist() for columns in model.groups_.values()] == [[0, 1], [2, 3, 4]]
    reference = GroupRidgeCV(FORMS["labels"], spread=1.0).fit(X, y)
    np.testing.assert_allclose(model.coef_, reference.coef_)


@pytest.mark.parametrize(
    ("parameters", "said"),
    [
        ({"groups": [1, 2]}, r"one label for each of the 5 columns.*these are 2 labels"),
        ({"groups": "columns"}, r"groups='columns'.*must be \"features\" or \"blocks\""),
        ({"groups": "blocks"}, r"set_output\(transform='pandas'\)"),
        ({"groups": 3}, r"must be None, \"features\""),
        ({"groups": {"a": [0, 1], "b": [1, 2]}}, r"column 1 is in 'a' and 'b'"),
        ({"groups": {"a": ["age"]}}, r"a column 'age' that is not there; the columns have no names"),
        ({"groups": {"a": [7]}}, r"names column 7; there are 5"),
        ({"groups": {"a": [True]}}, r"mask of 1 columns"),
        ({"penalty_factors": [1, 1, -1, 1, 1]}, r"must be at least 0 and finite"),
        ({"penalty_factors": [1, 1]}, r"one for each of the 5 columns"),
        ({"penalty_factors": {"x": 1}}, r"that is not there"),
        ({"penalty_factors": "none"}, r"penalty_factors"),
        ({"spread": -1}, r"`GroupRidgeCV\(spread=-1\)`: spread must be \"auto\" or a number"),
        ({"spread": "wide"}, r"spread='wide'"),
        ({"solver": "newton"}, r"must be \"auto\", \"exact\" or \"bisls\""),
        ({"tol": 0}, r"tol must be positive"),
        ({"max_iter": 0}, r"max_iter must be a whole number"),
        ({"cv": []}, r"at least one fold"),
        ({"cv": [([0, 1], [])]}, r"rows to train on and rows held out"),
    ],
)
def test_what_cannot_be_meant_is_refused(parameters, said):
    X, y, *_ = noisy("r", noise=0, rows=30)
    with pytest.raises(ValueError, match=said):
        GroupRidgeCV(**parameters).fit(X, y)


def test_one_class_and_no_weight_are_refused():
    X, y, *_ = noisy("c", noise=0, rows=30)
    with pytest.raises(ValueError, match=r"two classes; this has one class, 'only'"):
        GroupLogisticRegressionCV().fit(X, ["only"] * 30)
    with pytest.raises(ValueError, match=r"at least one (weight must be positive|non-zero)"):
        GroupRidgeCV().fit(X, y, sample_weight=np.zeros(30))


def test_too_few_iterations_are_said():
    X, y, _, _, labels = noisy("r")
    with pytest.warns(ConvergenceWarning, match=r"max_iter=1 upper iterations"):
        GroupRidgeCV(labels, spread=1.0, max_iter=1).fit(X, y)


# --- scikit-learn's habits


def test_text_classes_weights_and_float32():
    X, y, new, truth, labels = noisy("c", noise=10)
    words = np.where(y == 1, "yes", "no")
    model = GroupLogisticRegressionCV(labels, class_weight="balanced").fit(X.astype(np.float32), words)
    assert model.classes_.tolist() == ["no", "yes"]
    assert model.coef_.dtype == np.float32
    assert (model.predict(new.astype(np.float32)) == np.where(truth == 1, "yes", "no")).mean() > 0.8
    np.testing.assert_allclose(np.exp(model.predict_log_proba(new)), model.predict_proba(new))
    one = GroupLogisticRegressionCV(class_weight={"no": 5.0, "yes": 1.0}).fit(X, words)
    assert (one.predict(new) == "no").mean() > (model.predict(new) == "no").mean()


def test_sparse_tables_give_what_dense_ones_give():
    rng = np.random.default_rng(0)
    X = rng.normal(size=(100, 8)) * (rng.random((100, 8)) < 0.3)
    y = X @ rng.normal(size=8) + rng.normal(size=100)
    dense = GroupRidgeCV(np.arange(8) % 2).fit(X, y)
    for kind in (sparse.csr_matrix, sparse.csc_array):
        model = GroupRidgeCV(np.arange(8) % 2).fit(kind(X), y)
        np.testing.assert_allclose(model.coef_, dense.coef_, rtol=1e-6)
        np.testing.assert_allclose(model.predict(kind(X)), dense.predict(X), rtol=1e-6)


def test_units_of_columns_do_not_matter_and_coefficients_are_in_them():
    X, y, *_ = noisy("r", noise=5)
    model = GroupRidgeCV(np.arange(10) // 5).fit(X, y)
    units = np.array([1e-3, 1e3, 7.0, 1.0, 1.0, 2.0, 1e6, 1e-6, 3.0, 1.0])
    other = GroupRidgeCV(np.arange(10) // 5).fit(X * units + 4.0, y)
    np.testing.assert_allclose(other.coef_ * units, model.coef_, rtol=1e-4)
    np.testing.assert_allclose(other.predict(X * units + 4.0), model.predict(X), rtol=1e-4, atol=1e-4)


def test_constant_and_repeated_columns_are_taken():
    X, y, *_ = noisy("r", noise=5)
    wide = np.column_stack([X, X[:, 0], np.full(len(X), 3.0), np.zeros(len(X)), np.full(len(X), 1e-9)])
    model = GroupRidgeCV("features").fit(wide, y)
    assert np.all(np.isfinite(model.coef_))
    free = GroupRidgeCV(penalty_factors=np.zeros(wide.shape[1])).fit(wide, y)  # singular, and not penalised
    np.testing.assert_allclose(free.predict(wide), LinearRegression().fit(X, y).predict(X), rtol=1e-4, atol=1e-4)


def test_splitters_of_all_kinds():
    X, y, _, _, labels = noisy("r", noise=10)
    for cv in (2, KFold(3), ShuffleSplit(4, random_state=0), list(KFold(3).split(X))):
        assert np.isfinite(GroupRidgeCV(labels, cv=cv).fit(X, y).cv_loss_)
    shuffled = [GroupRidgeCV(labels, random_state=seed).fit(X, y).cv_loss_ for seed in (0, 0, 1)]
    assert shuffled[0] == shuffled[1] != shuffled[2]


def test_side_by_side_is_the_same():
    X, y, *_ = noisy("r", noise=30)  # more groups than are tuned in step
    one, two = (GroupRidgeCV("features", n_jobs=jobs).fit(X, y) for jobs in (None, 2))
    np.testing.assert_array_equal(one.coef_, two.coef_)
    assert one.nested_loss_ == two.nested_loss_


def test_progress_is_logged(caplog):
    X, y, _, _, labels = noisy("r", noise=20, rows=80)
    with caplog.at_level("INFO", logger="bisls.sklearn"):
        GroupRidgeCV(labels).fit(X, y)
        WeightedLassoCV(labels, cv=3).fit(X, y)
    said = " | ".join(caplog.messages)
    for words in ("one penalty: held-out loss", "nested folds, width 0.3:", "nested folds, width 0.3: 3 of 3 tuned"):
        assert words in said


@pytest.mark.parametrize("scale", [1e300, 1e-300])
def test_columns_of_any_size_are_taken(scale):
    X, y, *_ = noisy("r", noise=5, rows=60)
    plain, other = GroupRidgeCV().fit(X, y), GroupRidgeCV().fit(X * [scale] + [0.0] * 10, y)
    np.testing.assert_allclose(other.coef_ * scale, plain.coef_, rtol=1e-6)
    sparser = GroupRidgeCV().fit(sparse.csr_matrix(X * scale), y)
    np.testing.assert_allclose(sparser.coef_ * scale, plain.coef_, rtol=1e-6)


def test_tables_of_two_and_three_rows_have_one_penalty():
    X, y, *_ = noisy("r", noise=0)
    for rows, cv in ((2, 2), (3, 2), (3, 3)):
        model = GroupRidgeCV([0, 0, 1, 1, 1], cv=cv).fit(X[:rows], y[:rows])
        assert cv == 3 or (model.spread_, model.improved_, model.nested_loss_) == (0.0, False, {})
        assert np.all(np.isfinite(model.coef_))
    with pytest.raises(ValueError, match=r"`GroupRidgeCV\(cv=\.\.\.\)`: a fold has rows that are not there"):
        GroupRidgeCV(cv=[([0, 1], [200])]).fit(X, y)


def test_groups_are_not_judged_by_fewer_than_twenty_rows():
    rng = np.random.default_rng(0)
    X = rng.normal(size=(40, 6))
    y, groups = X[:, 0] + X[:, 1], ["a", "a", "b", "b", "b", "b"]
    few = GroupRidgeCV(groups).fit(X, y, sample_weight=np.arange(40) < 19)
    assert (few.improved_, few.spread_, few.nested_loss_) == (False, 0.0, {})
    assert GroupRidgeCV(groups).fit(X[:20], y[:20]).nested_loss_
    assert GroupRidgeCV(groups, spread=1.0).fit(X[:19], y[:19]).spread_ == 1.0  # as it is told


def test_a_fold_without_a_class_is_taken():
    X, y, *_ = noisy("c", noise=0, rows=60)
    three = np.where(np.arange(60) < 4, 2, y)
    model = GroupLogisticRegressionCV(cv=list(KFold(3).split(X))).fit(X, three)
    assert np.all(np.isfinite(model.coef_))
    assert np.isfinite(model.cv_loss_)


def test_frames_pipelines_blocks_and_pickles():
    pandas = pytest.importorskip("pandas")
    rng = np.random.default_rng(0)
    frame = pandas.DataFrame(rng.normal(size=(200, 4)), columns=list("abcd"))
    frame["town"] = rng.choice(["north", "south", "west"], size=200)
    target = frame["a"] - 2.0 * (frame["town"] == "north") + 0.3 * rng.normal(size=200)
    columns = make_column_transformer(
        (StandardScaler(), list("abcd")), (OneHotEncoder(sparse_output=False), ["town"])
    ).set_output(transform="pandas")
    model = make_pipeline(columns, GroupRidgeCV("blocks"))
    assert cross_val_score(model, frame, target).mean() > 0.9
    fitted = model.fit(frame, target)
    assert list(fitted[-1].groups_) == ["standardscaler", "onehotencoder"]
    again = pickle.loads(pickle.dumps(fitted))
    np.testing.assert_array_equal(again.predict(frame), fitted.predict(frame))
    assert "town_north" in "".join(fitted[-1].feature_names_in_)
    by_slices = GroupRidgeCV(columns.fit(frame).output_indices_).fit(columns.transform(frame), target)
    assert [len(at) for at in by_slices.groups_.values()] == [4, 3]


def test_polars_frames_have_names():
    polars = pytest.importorskip("polars")
    X, y, *_ = noisy("r", noise=0)
    frame = polars.DataFrame({name: X[:, i] for i, name in enumerate("abcde")})
    model = GroupRidgeCV({"first": ["a", "b"]}, penalty_factors={"c": 0}).fit(frame, y)
    assert model.feature_names_in_.tolist() == list("abcde")
    assert model.penalties_[2] == 0
    assert list(model.groups_) == ["first", "rest"]


def test_both_engines_agree():
    X, y, _, _, labels = noisy("c", noise=10, rows=100)
    cv = StratifiedKFold(3)
    exact, many = (
        GroupLogisticRegressionCV(labels, spread=1.0, solver=name, cv=cv).fit(X, y) for name in ("exact", "bisls")
    )
    assert many.cv_loss_ == pytest.approx(exact.cv_loss_, rel=1e-2)
    np.testing.assert_allclose(many.predict_proba(X), exact.predict_proba(X), atol=0.05)


def test_many_columns_are_for_the_engine_without_factors(monkeypatch):
    X, y, _, _, labels = noisy("r", noise=10, rows=60)
    assert GroupRidgeCV(labels, cv=3, spread=1.0).fit(X, y).n_iter_ > 0
    monkeypatch.setattr(base, "FEW", 10)
    solved = []
    plain = BatchedFolds.value
    monkeypatch.setattr(BatchedFolds, "value", lambda self, *given: solved.append(given) or plain(self, *given))
    with pytest.warns(ConvergenceWarning, match="max_iter=2"):
        model = GroupRidgeCV(labels, cv=3, spread=1.0, max_iter=2).fit(X, y)
    assert model.n_iter_ == 2
    assert 5 < len(solved) < 30  # a coarse search, both ends of each width, and the fit


# --- lasso and elastic net


@pytest.mark.parametrize("ratio", [1.0, 0.5])
def test_the_sparse_solution_is_that_of_scikit_learn(ratio):
    X, y, *_ = noisy("r", noise=20)
    y = (y - y.mean()) / y.std()
    Z = StandardScaler().fit_transform(X)
    rows = Rows(Z, y, np.ones(len(y)))
    for alpha in (0.5, 0.1, 0.01):
        found = Sparse(ratio).solve(rows, np.full(25, alpha), np.zeros((25, 1)))
        theirs = ElasticNet(alpha=alpha, l1_ratio=ratio, fit_intercept=False, tol=1e-12, max_iter=100_000).fit(Z, y)
        assert found.closed
        np.testing.assert_allclose(found.w[:, 0], theirs.coef_, atol=1e-7)


def test_signs_and_coordinates_lead_to_the_same():
    rng = np.random.default_rng(0)
    X = rng.normal(size=(40, 60))
    gram, right = X.T @ X, X.T @ rng.normal(size=40)
    l1, l2 = rng.uniform(0.5, 5.0, size=60), np.full(60, 0.1)
    l1[:2] = 0.0
    signs, _ = by_signs(gram, right, l1, l2, np.zeros(60), _factorised)
    coordinates = np.zeros(60)
    by_coordinates(gram, right, l1, l2, coordinates)
    np.testing.assert_allclose(signs, coordinates, atol=1e-6)
    assert 2 < np.count_nonzero(signs) < 40


def test_one_penalty_is_that_of_a_fine_grid_of_the_lasso():
    X, y, *_ = noisy("r", noise=20)
    cv = KFold(4)
    ours = WeightedLassoCV(cv=cv).fit(X, y)
    Z, scale = StandardScaler().fit_transform(X), y.std()

    def pooled(alpha):
        model = ElasticNet(alpha=alpha, l1_ratio=1.0, tol=1e-10, max_iter=100_000)
        return np.concatenate([(clone(model).fit(Z[a], y[a]).predict(Z[b]) - y[b]) ** 2 for a, b in cv.split(Z)]).mean()

    alpha = ours.group_penalties_["all"] * scale
    assert pooled(alpha) == pytest.approx(ours.cv_loss_, rel=1e-4)
    assert pooled(alpha) < 1.005 * min(pooled(value) for value in np.geomspace(0.1 * alpha, 10 * alpha, 60))
    theirs = ElasticNet(alpha=alpha, l1_ratio=1.0, tol=1e-12, max_iter=100_000).fit(Z, y)
    np.testing.assert_allclose(ours.predict(X), theirs.predict(Z), rtol=1e-4, atol=1e-4)


def test_groups_help_the_lasso_too_and_0_is_never_penalised():
    X, y, new, truth, labels = noisy("r", noise=40, rows=100)
    shared, grouped = WeightedLassoCV().fit(X, y), WeightedLassoCV(labels).fit(X, y)
    assert grouped.improved_
    assert np.count_nonzero(grouped.coef_[5:]) < np.count_nonzero(shared.coef_[5:])
    assert grouped.score(new, truth) > shared.score(new, truth)
    kept = WeightedElasticNetCV(penalty_factors={44: 0}).fit(X, y)
    assert kept.coef_[44] != 0


@pytest.mark.parametrize("ratio", [0, 1.5, "half", True])
def test_a_ratio_that_is_none_is_refused(ratio):
    X, y, *_ = noisy("r", noise=0, rows=30)
    with pytest.raises(ValueError, match=r"l1_ratio must lie in \(0, 1\]"):
        WeightedElasticNetCV(l1_ratio=ratio).fit(X, y)
    with pytest.raises(ValueError, match=r'solver must be "auto" or "exact"'):
        WeightedLassoCV(solver="bisls").fit(X, y)


def test_without_scikit_learn_it_is_said_what_to_install():
    script = "import sys; sys.modules['sklearn'] = None; import bisls.sklearn"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert "bisls.sklearn needs scikit-learn: pip install 'bisls[sklearn]'" in done.stderr


@pytest.mark.parametrize("loss", [Squared(), Logistic()])
def test_more_columns_than_rows_are_solved_by_the_rows(loss):
    """The same by the columns: rows of no weight do not change a solution, but make the table tall."""
    rng = np.random.default_rng(0)
    X = np.column_stack([rng.normal(size=(30, 60)), np.ones(30)])
    y = (X[:, 0] + rng.normal(size=30) > 0).astype(float)
    penalties = np.append(rng.uniform(0.5, 20.0, size=60), 0.0)
    wide = loss.solve(Rows(X, y, np.ones(30)), penalties, np.zeros((61, 1)))
    tall = Rows(
        np.vstack([X, rng.normal(size=(60, 61))]), np.append(y, np.zeros(60)), np.append(np.ones(30), np.zeros(60))
    )
    other = loss.solve(tall, penalties, np.zeros((61, 1)))
    np.testing.assert_allclose(wide.w, other.w, atol=1e-7)
    v = rng.normal(size=(61, 1))
    np.testing.assert_allclose(wide.solve(v), other.solve(v), atol=1e-6)
    assert wide.closed
    assert np.abs(other.w).max() > 0.05
