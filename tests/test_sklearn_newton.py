"""Penalties of some groups by Newton's method above: its derivatives, its descent, and the answers of the other engine."""

from __future__ import annotations

import numpy as np
import pytest
from sklearn.model_selection import KFold, LeaveOneOut, RepeatedKFold, ShuffleSplit, TimeSeriesSplit

from bisls.sklearn import GroupLogisticRegressionCV, GroupRidgeCV, WeightedLassoCV, classes
from bisls.sklearn.cells import Products, Ridges, Sets
from bisls.sklearn.classes import ByClasses, Lower
from bisls.sklearn.descent import descend
from bisls.sklearn.dual import Parts, RowRidges
from bisls.sklearn.kernels import ByColumns, ByRows
from bisls.sklearn.lower import Logistic, Multinomial, Rows, Squared
from bisls.sklearn.nested import nested_splits
from bisls.sklearn.spectrum import Spectrum
from bisls.sklearn.together import Newton
from bisls.sklearn.tuning import Folds, Grouping

EXACT = 1e-20  # how closely lower problems are solved here


def by_products(loss, sets, grouping):
    return Ridges(sets, grouping, Products(sets.rows, sets.held))


def by_kernels(loss, sets, grouping):
    return RowRidges(sets, grouping, Parts.of(sets.rows, grouping))


CELLS = [
    (by_products, Squared()),
    (by_kernels, Squared()),
    (ByRows, Logistic()),
    (ByColumns, Logistic()),
    (ByClasses, Multinomial(3)),
]


def table(loss, columns: int = 6):
    rng = np.random.default_rng(0)
    X = np.column_stack([rng.normal(size=(60, columns)) * rng.uniform(0.5, 3.0, size=columns), np.ones(60)])
    y = X[:, :6] @ rng.normal(size=6) + rng.normal(size=60)
    y = (y > 0).astype(float) if isinstance(loss, Logistic) else y
    y = np.digitize(y, [-1.0, 1.0]).astype(float) if isinstance(loss, Multinomial) else y
    factors = np.append(rng.uniform(0.5, 2.0, size=columns), 0.0)
    grouping = Grouping(np.append(np.arange(columns) % 3, 0), factors, 3)
    return Rows(X, y, rng.uniform(0.5, 2.0, size=60)), grouping


@pytest.mark.parametrize("columns", [6, 80])
@pytest.mark.parametrize(("kind", "loss"), CELLS, ids=lambda one: getattr(one, "__name__", type(one).__name__))
def test_gradients_are_those_of_the_folds_and_hessians_those_of_finite_differences(kind, loss, columns):
    rows, grouping = table(loss, columns)
    if kind is ByColumns and columns > 60:
        pytest.skip("more columns than rows are solved by the rows")
    splits, theta, own = list(KFold(4).split(rows.X)), np.log([2.0, 0.7, 5.0]), np.eye(3)
    cells, one = kind(loss, Sets(rows, [splits]), grouping), np.arange(1)
    value, gradient = Folds(loss, rows, splits, grouping, close=EXACT).value(theta)
    values, gradients, hessians = cells.evaluate(theta[None], one, EXACT, own)
    assert values[0] == pytest.approx(value, rel=1e-9)
    np.testing.assert_allclose(gradients[0], gradient, atol=1e-8)
    assert cells.values(theta[None], one, EXACT)[0] == pytest.approx(value, rel=1e-9)
    assert np.concatenate(cells.each(theta[None].repeat(4, 0), EXACT, own)) @ rows.s / rows.weight == pytest.approx(
        value
    )

    def slope(at):
        return cells.evaluate(at[None], one, EXACT, own)[1][0]

    numeric = np.array([(slope(theta + 1e-4 * e) - slope(theta - 1e-4 * e)) / 2e-4 for e in own])
    assert np.abs(numeric).max() > 1e-3  # far above the tolerance
    np.testing.assert_allclose(hessians[0], numeric, atol=1e-6)
    along = cells.evaluate(theta[None], one, EXACT, np.ones((3, 1)))
    np.testing.assert_allclose(along[1][0], gradient.sum(), atol=1e-8)
    np.testing.assert_allclose(along[2][0], numeric.sum(), atol=3e-6)
    assert cells.closed


@pytest.mark.parametrize("columns", [6, 110])
def test_a_block_a_class_and_one_of_all_coefficients_lead_to_the_same(columns, monkeypatch):
    """Inverses where columns are few, factors where they are not; beside columns of no penalty, of which two are alike."""
    loss = Multinomial(3)
    rows, grouping = table(loss, columns)
    rows.X[:, 4] = rows.X[:, 3]
    grouping = Grouping(grouping.index, np.where(np.arange(columns + 1) < 5, 0.0, grouping.factors), 3)
    sets, theta, one = Sets(rows, [list(KFold(3).split(rows.X))]), np.log([[2.0, 0.7, 5.0]]), np.arange(1)
    found = {}
    for most in (0, 10_000):
        monkeypatch.setattr(classes, "WHOLE", most)
        lower = classes.Lower(rows, grouping.penalties(theta[0]), np.zeros((columns + 1, 3)))
        blocks = lower.blocks()
        assert (isinstance(blocks, np.ndarray) and blocks.ndim == 2) == (most > 0)
        cells = ByClasses(loss, sets, grouping)
        found[most] = cells.evaluate(theta, one, EXACT, np.eye(3))
        assert cells.closed
    assert np.abs(found[0][1]).max() > 1e-3
    for with_blocks, whole, atol in zip(found[0], found[10_000], (1e-9, 1e-8, 1e-6), strict=True):
        np.testing.assert_allclose(with_blocks, whole, rtol=0, atol=atol)


@pytest.mark.parametrize("columns", [6, 80])
@pytest.mark.parametrize(("kind", "loss"), CELLS, ids=lambda one: getattr(one, "__name__", type(one).__name__))
def test_problems_in_step_are_those_alone(kind, loss, columns):
    """Nested folds share training sets; at other penalties one must not have what is the other's."""
    rows, grouping = table(loss, columns)
    if kind is ByColumns and columns > 60:
        pytest.skip("more columns than rows are solved by the rows")
    splits = list(KFold(4).split(rows.X))
    problems = [nested_splits(splits, fold) for fold in range(4)]
    theta, own = np.log([[2.0, 0.7, 5.0], [1.0, 1.0, 1.0], [9.0, 2.0, 0.3], [1.0, 1.0, 1.0]]), np.eye(3)
    together = kind(loss, Sets(rows, problems), grouping)
    for which in (np.arange(4), np.array([1, 3])):
        found = together.evaluate(theta[which], which, EXACT, own)
        for place, b in enumerate(which):
            alone = kind(loss, Sets(rows, [problems[b]]), grouping).evaluate(theta[b : b + 1], np.arange(1), EXACT, own)
            for some, other in zip(found, alone, strict=True):
                np.testing.assert_allclose(some[place], other[0], atol=1e-6)
    first = together.values(theta, np.arange(4), EXACT, 1)
    each = together.each(theta, EXACT, own)
    for b, (_, held) in enumerate(p[0] for p in problems):
        at = [cell[0] for cell in together.sets.cells].index(b)
        assert first[b] * rows.s[np.concatenate([h for _, h in problems[b]])].sum() == pytest.approx(
            float(rows.s[held] @ each[at]), rel=1e-6
        )


SPLITS = {
    "leave one out": list(LeaveOneOut().split(np.zeros(60))),
    "folds twice": list(RepeatedKFold(n_splits=3, n_repeats=2, random_state=0).split(np.zeros(60))),
    "later rows": list(TimeSeriesSplit(4).split(np.zeros(60))),
    "folds of other lengths": [(np.arange(25, 60), np.arange(25)), (np.arange(30), np.arange(50, 60))],
    "held-out rows among the others": [(np.arange(60), np.arange(20)), (np.arange(40), np.arange(30, 60))],
    "rows drawn twice": [(np.arange(60) // 2, np.arange(30, 60)), (np.repeat([3, 9, 17, 40], 9), np.array([1, 2, 2]))],
}


@pytest.mark.parametrize("splits", SPLITS.values(), ids=SPLITS)
def test_one_factor_serves_folds_of_any_kind(splits):
    """Left-out rows by one inverse for a problem are those by each training set; columns of no penalty may be alike."""
    rows, grouping = table(Squared(), 80)
    X = rows.X.copy()
    X[:, 5] = X[:, 4]
    factors = grouping.factors.copy()
    factors[3:6] = 0.0
    s = rows.s.copy()
    s[7] = 0.0
    rows, grouping = Rows(X, rows.y, s), Grouping(grouping.index, factors, 3)
    theta, own = np.log([2.0, 0.7, 5.0]), np.eye(3)
    cells = by_kernels(Squared(), Sets(rows, [splits]), grouping)
    values, gradients, hessians = cells.evaluate(theta[None], np.arange(1), EXACT, own)
    value, gradient = Folds(Squared(), rows, splits, grouping).value(theta)
    assert values[0] == pytest.approx(value, rel=1e-6)
    np.testing.assert_allclose(gradients[0], gradient, atol=1e-6 * value)
    assert cells.values(theta[None], np.arange(1), EXACT)[0] == pytest.approx(values[0], rel=1e-9)
    numeric = [
        (cells.evaluate((theta + e)[None], np.arange(1), EXACT, own)[1][0] - gradients[0]) / 1e-4 for e in 1e-4 * own
    ]
    np.testing.assert_allclose(hessians[0], numeric, atol=2e-4 * value)


def test_one_penalty_by_the_spectrum_is_that_by_factors():
    rows, grouping = table(Squared(), 80)
    grouping = Grouping(grouping.index, np.where(np.arange(81) < 3, 0.0, grouping.factors), 3)
    sets = Sets(rows, [list(KFold(7).split(rows.X))])
    assert Spectrum.suits(sets, grouping)
    parts, one, ones = Parts.of(rows, grouping), np.arange(1), np.ones((3, 1))
    spectrum, factors = Spectrum(sets, grouping, parts), RowRidges(sets, grouping, parts)
    for common in (-3.0, 1.0, 6.0):
        theta = np.full((1, 3), common)
        for found, other in zip(
            spectrum.evaluate(theta, one, EXACT, ones), factors.evaluate(theta, one, EXACT, ones), strict=True
        ):
            # the second derivative is four hundred times below the value there, and rounds with it: 1.5e-8 apart were seen
            np.testing.assert_allclose(found, other, rtol=1e-6, atol=2e-8 * factors.values(theta, one, EXACT, 1)[0])
        assert spectrum.values(theta, one, EXACT, 1) == pytest.approx(factors.values(theta, one, EXACT, 1), rel=1e-8)
    blind = rows.X.copy()
    blind[:, 0] = np.arange(60) < 5  # a column of no penalty that some training rows do not have
    for own in (Sets(Rows(blind, rows.y, rows.s), sets.problems), Sets(rows, [SPLITS["later rows"]])):
        assert not Spectrum.suits(own, grouping)


@pytest.mark.parametrize("cv", [KFold(4), ShuffleSplit(3, random_state=0)])
def test_products_by_folds_are_those_of_the_rows(cv):
    rows, _ = table(Squared())
    splits = list(cv.split(rows.X))
    gram, right, weight = Products(rows, [held for _, held in splits]).of([train for train, _ in splits])
    for one, (train, _) in enumerate(splits):
        X, y, s = rows.X[train], rows.y[train], rows.s[train]
        np.testing.assert_allclose(gram[one], X.T @ (s[:, None] * X), rtol=1e-12, atol=1e-12)
        np.testing.assert_allclose(right[one], X.T @ (s * y), rtol=1e-12, atol=1e-12)
        assert weight[one] == pytest.approx(s.sum())


def test_a_descent_in_step_goes_through_bent_valleys_and_stops_at_bounds():
    """Rosenbrock's function, another whose Hessian is indefinite at the start, and one whose minimum lies outside the box."""
    asked = []

    def functions(b, x):
        u, v = x
        if b == 0:
            return (
                (1 - u) ** 2 + 5 * (v - u**2) ** 2,
                np.array([-2 * (1 - u) - 20 * u * (v - u**2), 10 * (v - u**2)]),
                np.array([[2 - 20 * v + 60 * u**2, -20 * u], [-20 * u, 10.0]]),
            )
        if b == 1:
            return (u**2 - 1) ** 2 + v**2, np.array([4 * u * (u**2 - 1), 2 * v]), np.diag([12 * u**2 - 4, 2.0])
        return (u - 9) ** 2 + 3 * (v - 0.5) ** 2, np.array([2 * (u - 9), 6 * (v - 0.5)]), np.diag([2.0, 6.0])

    def evaluate(x, which):
        asked.append(which.tolist())
        parts = [functions(b, one) for b, one in zip(which, x, strict=True)]
        return tuple(np.array([part[i] for part in parts]) for i in range(3))

    start = np.array([[-1.0, 2.0], [0.1, 1.0], [0.0, 3.0]])
    box = (np.full(2, -4.0), np.full(2, 4.0))
    ended = descend(evaluate, start, box, np.ones(2), tol=1e-12, max_iter=60)
    assert ended.converged
    np.testing.assert_allclose(ended.x, [[1.0, 1.0], [1.0, 0.0], [4.0, 0.5]], atol=1e-5)
    np.testing.assert_allclose(ended.values, [0.0, 0.0, 25.0], atol=1e-9)
    assert asked[0] == [0, 1, 2]
    assert asked[-1] == [0]  # those that ended are not asked again
    assert len(asked) < 25
    assert not descend(evaluate, start, box, np.ones(2), tol=1e-12, max_iter=2).converged


@pytest.mark.parametrize("columns", [20, 150])
@pytest.mark.parametrize("estimator", [GroupRidgeCV, GroupLogisticRegressionCV])
def test_both_ways_above_lead_to_the_same_penalties(estimator, columns, monkeypatch):
    rng = np.random.default_rng(1)
    X = rng.normal(size=(90, columns))
    y = X[:, :5] @ [2.0, -1.5, 1.0, 1.0, -1.0] + 2.0 * rng.normal(size=90)
    y = (y > 0).astype(int) if estimator is GroupLogisticRegressionCV else y
    labels = ["signal"] * 5 + ["noise"] * (columns - 5)
    newton = estimator(labels, spread=1.0, tol=1e-9).fit(X, y)
    one = estimator().fit(X, y)
    monkeypatch.setattr(Newton, "suits", False)
    other = estimator(labels, spread=1.0, tol=1e-9).fit(X, y)
    assert newton.cv_loss_ == pytest.approx(other.cv_loss_, rel=1e-4)  # a prior is part of what is minimised
    for name in ("signal", "noise"):
        assert newton.group_penalties_[name] == pytest.approx(other.group_penalties_[name], rel=1e-2)
    assert one.group_penalties_["all"] == pytest.approx(estimator().fit(X, y).group_penalties_["all"], rel=1e-4)
    assert newton.group_penalties_["noise"] > 2 * newton.group_penalties_["signal"]
    assert len(newton.history_) < len(other.history_)


def test_columns_that_are_not_standardised_may_have_any_unit():
    """Penalties have bounds, which go with the columns."""
    rng = np.random.default_rng(0)
    X = rng.normal(size=(60, 8))
    y, half = X[:, 0] + rng.normal(size=60), [0] * 4 + [1] * 4
    plain = GroupRidgeCV(half, spread=1.0, standardize=False).fit(X, y)
    for size in (2.0**-30, 2.0**30):
        other = GroupRidgeCV(half, spread=1.0, standardize=False).fit(X * size, y)
        np.testing.assert_allclose(other.coef_ * size, plain.coef_, rtol=1e-9)
        np.testing.assert_allclose(other.penalties_ / size**2, plain.penalties_, rtol=1e-9)


def test_what_cannot_be_solved_is_said():
    rng = np.random.default_rng(0)
    X, factors = rng.normal(size=(40, 90)), np.ones(90)
    factors[:2] = 1e300, 1e-300
    with pytest.raises(ValueError, match="double precision does not do for these columns and penalty factors"):
        GroupRidgeCV([0] * 40 + [1] * 50, penalty_factors=factors).fit(X, X[:, 0])
    with pytest.raises(ValueError, match=r"y must be numbers; classes are for GroupLogisticRegressionCV"):
        GroupRidgeCV().fit(X, ["a", "b"] * 20)
    with pytest.raises(ValueError, match=r"groups has None where columns should be: names, numbers, a mask or a slice"):
        GroupRidgeCV({"a": None}).fit(X, X[:, 0])


@pytest.mark.filterwarnings("error")
def test_logarithms_of_chances_are_finite_where_chances_are_not():
    rng = np.random.default_rng(0)
    X = rng.normal(size=(60, 3))
    for y in (X[:, 0] + rng.normal(size=60) > 0, np.digitize(X[:, 0] + rng.normal(size=60), [-1, 1])):
        model = GroupLogisticRegressionCV(cv=3).fit(X, y)
        found = model.predict_log_proba(1e4 * X)
        assert np.all(np.isfinite(found))
        assert found.min() < -800
        # numbers below the smallest normal one are zero on some processors
        np.testing.assert_allclose(np.exp(found), model.predict_proba(1e4 * X), atol=np.finfo(float).tiny)


def test_hostile_numbers_are_taken_or_said():
    rng = np.random.default_rng(0)
    X = rng.normal(size=(60, 8))
    y, half = X[:, 0] + rng.normal(size=60), [0] * 4 + [1] * 4
    plain = GroupRidgeCV(half).fit(X, y)
    for size in (1e140, 1e-140):  # squares of the target would leave the range of numbers
        other = GroupRidgeCV(half).fit(X, y * size)
        np.testing.assert_allclose(other.coef_ / size, plain.coef_, rtol=1e-9)
        assert other.spread_ == plain.spread_
    assert GroupRidgeCV(half).fit(X, np.ones(60)).cv_loss_ == 0
    wide = GroupRidgeCV(np.arange(10_000) % 5).fit(rng.normal(size=(60, 10_000)), y)
    assert np.all(np.isfinite(wide.coef_))
    with pytest.raises(ValueError, match="the training rows of a fold weigh nothing"):
        GroupRidgeCV(half).fit(X, y, sample_weight=(np.arange(60) < 12).astype(float))
    some = GroupRidgeCV(half).fit(X, y, sample_weight=(np.arange(60) < 20).astype(float))
    assert np.isfinite(some.cv_loss_)
    with pytest.raises(ValueError, match=r"products of 5,001 columns.*GroupRidgeCV takes more columns"):
        WeightedLassoCV(np.arange(5000) % 5).fit(rng.normal(size=(60, 5000)), y)


@pytest.mark.parametrize(
    ("count", "columns", "kind"), [(150, 110, np.ndarray), (150, 250, classes.ByKernel), (300, 250, list)]
)
def test_several_classes_are_solved_for_without_what_the_loss_does_not_see(count, columns, kind):
    """Products, and solutions, have no mean over the classes; few turns of conjugate gradients do, whatever the penalties."""
    rng = np.random.default_rng(0)
    X = np.column_stack([rng.normal(size=(count, columns)), np.ones(count)])
    rows = Rows(X, rng.integers(0, 4, count).astype(float), rng.uniform(0.5, 2.0, count))
    penalties = np.append(np.exp(rng.uniform(-4, 4, columns)), 0.0)
    w, right = (one - one.mean(1, keepdims=True) for one in rng.normal(size=(2, columns + 1, 4)))
    here = Lower(rows, penalties, 0.1 * w)
    blocks = here.blocks()
    assert isinstance(blocks, kind)
    found, turns = here.solve(right[:, :, None], blocks, np.array([1e-9]))
    np.testing.assert_allclose(here.times(found)[:, :, 0], right, atol=1e-6)
    np.testing.assert_allclose(found.mean(1), 0.0, atol=1e-12)
    assert turns < 60
