"""The figures on data distillation: each runs at the smallest scale, and each statement can hold and can fail."""

from __future__ import annotations

from math import inf, isfinite, nan

import numpy as np
import pytest
from watching import Quiet

from bisls.experiments import Plan, Store, figure, reproduce
from bisls.experiments.asking import Tuned, gather
from bisls.experiments.base import RunRecord
from bisls.experiments.bilevel import OWN
from bisls.experiments.distillation import (
    CONSTANT,
    LOWER,
    NEUMANN,
    album,
    beyond,
    distillation,
    grid,
    recognised,
    reference,
    searched,
    tuned,
)
from bisls.experiments.evidence import polyak_share
from bisls.experiments.figures import datadist, demo_3, mnist50, mnist_sample, mnist_sps
from bisls.experiments.readings import DISTILLING
from bisls.outcome import Judgement, Outcome

NAMES = ("demo_3", "mnist_sps", "datadist", "mnist50", "mnist_sample")
HOLDS, FAILS, UNDECIDED = Judgement.HOLDS, Judgement.FAILS, Judgement.UNDECIDED


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    store = Store(tmp_path_factory.mktemp("runs"))
    found = reproduce([figure(name) for name in NAMES], Plan("smoke", 1), store, Quiet())
    return {outcome.name: outcome for outcome in found}


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_a_figure_runs_at_the_smallest_scale(outcomes, name):
    outcome = outcomes[name]
    assert outcome.panels
    assert outcome.settings
    assert {verdict.ours for verdict in outcome.verdicts} == {True, False}
    for panel in outcome.panels:
        assert sum(series.ours for series in panel.series) == 1
        assert panel.alt
        for series in panel.series:
            assert len(series.x) == len(series.y) >= 2
            assert all(isfinite(value) for value in series.y)
    assert Outcome.from_json(outcome.to_json()).to_json() == outcome.to_json()


@pytest.mark.slow
def test_the_learnt_pictures_are_shown(outcomes):
    rows = outcomes["datadist"].pictures
    assert len(rows) == 2
    for row in rows:
        assert row.labels == tuple("0123456789")
        grey = np.array(row.images)
        assert grey.shape == (10, 28, 28)
        assert grey.min() == 0
        assert grey.max() == 1


def made(end, exact=None, alpha=10.0, error="", share=1.0, **curves):
    """A record that ends where it is told to."""
    own = {"loss": (2.3, end), "k": (0.0, 300.0), "alpha": (alpha, share * alpha / np.sqrt(2)), "accuracy": (0.1, 0.85)}
    return RunRecord({}, own | curves, {"exact": end if exact is None else exact, "ceiling": alpha}, error)


def several(*ends, **others):
    return [made(end, **others) for end in ends]


def polyak(*ends, **others):
    """Runs in which the Polyak step decides every other time."""
    return several(*ends, share=0.5, **others)


def sps_runs(sps, sgd, silent=()):
    """Ends by alpha_b0, the same for both hypergradients."""
    return {
        (linear, method, alpha): several(end) if alpha in silent else polyak(end)
        for linear in demo_3.LINEAR
        for method, ends in ((demo_3.SPS, sps), (demo_3.SGD, sgd))
        for alpha, end in zip((10.0, 100.0), ends, strict=True)
    }


def judged(verdicts):
    return [verdict.judgement for verdict in verdicts]


@pytest.mark.parametrize(
    ("sps", "sgd", "default", "expected"),
    [
        ((1.5, 1.6), (1.6, 2.2), 0.5, (HOLDS, HOLDS, HOLDS)),
        ((2.2, 2.2), (2.2, 2.3), 2.2, (UNDECIDED, UNDECIDED, UNDECIDED)),  # none got anywhere
        ((2.2, 1.4), (2.0, 1.5), 0.5, (FAILS, FAILS, HOLDS)),
        ((2.3, 1.4), (2.2, 1.5), 0.5, (HOLDS, FAILS, HOLDS)),  # from 10 none got anywhere
        ((1.5, 1.6), (1.6, 1.2), 1.5, (FAILS, HOLDS, FAILS)),  # BiSPS above at 100, and the default above the best
        ((1.5, 2.2), (1.6, 2.3), 1.52, (HOLDS, UNDECIDED, UNDECIDED)),  # just as spread
        ((1.5, 1.52), (1.5, 1.5), 0.5, (UNDECIDED, FAILS, HOLDS)),
        ((1.5, inf), (1.5, 1.5), 0.5, (FAILS, FAILS, HOLDS)),
        ((1.5, 1.5), (1.5, inf), 0.5, (HOLDS, HOLDS, HOLDS)),
    ],
)
def test_demo_3(sps, sgd, default, expected):
    each, spread, own = expected
    verdicts = demo_3.judge(sps_runs(sps, sgd), several(default))
    assert judged(verdicts) == [each, each, spread] * 2 + [own, own]


def test_demo_3_where_the_ceiling_decides():
    runs = sps_runs((1.9, 1.5), (1.5, 1.6), silent=(10.0,))
    verdicts = demo_3.judge(runs, several(0.5))
    assert judged(verdicts)[:2] == [HOLDS, HOLDS]  # by 100 alone
    assert "not counted: 10 (the Polyak step decides in less than 5%" in verdicts[0].numbers
    assert "alpha_b0 = 10 " in demo_3.remarks(runs)
    nothing = demo_3.judge(sps_runs((1.5, 1.4), (1.6, 2.0), silent=(10.0, 100.0)), several(0.5))
    assert judged(nothing)[:3] == [UNDECIDED] * 3


def test_demo_3_judges_the_solved_problem_too():
    runs = {key: polyak(1.5, exact=1.9 if key[1] == demo_3.SPS else 1.2) for key in sps_runs((1, 1), (1, 1))}
    assert judged(demo_3.judge(runs, several(0.5)))[:2] == [HOLDS, FAILS]


@pytest.mark.parametrize(("searched", "expected"), [(0.7, HOLDS), (0.9, FAILS), (0.82, UNDECIDED), (inf, FAILS)])
def test_mnist_sps(searched, expected):
    readings = {
        "one": {"BiSPS, 10": several(0.8), "BiSPS, 100": several(1.8)},
        "two": {"BiSPS, 10": several(2.0)},
    }
    verdicts = mnist_sps.judge(readings, several(searched), several(0.5))
    assert judged(verdicts)[0] is expected
    assert judged(verdicts)[1] is (FAILS if searched == inf else HOLDS)
    assert judged(verdicts)[2:] == [HOLDS, HOLDS]


@pytest.mark.parametrize(("searched", "expected"), [(0.7, HOLDS), (0.9, FAILS), (0.79, UNDECIDED), (nan, FAILS)])
def test_mnist50(searched, expected):
    searches = {mnist50.SLS: several(searched), mnist50.SLS_FIXED: several(2.3)}
    verdicts = mnist50.judge(searches, {"Adam": several(0.8), "SGD": several(1.1)}, several(1.0))
    assert judged(verdicts) == [expected, FAILS, FAILS, FAILS]


def test_mnist50_judges_the_solved_problem_apart():
    rivals = {"Adam": [made(0.8, exact=1.4)], "SGD": [made(0.9, exact=1.5)]}
    verdicts = mnist50.judge({mnist50.SLS: several(2.0)}, rivals, [made(1.0, exact=1.0)])
    assert judged(verdicts) == [FAILS, FAILS, HOLDS]


@pytest.mark.parametrize(
    ("one", "two", "decay", "expected"),
    [
        (1.5, 1.6, 1.7, [HOLDS, HOLDS, HOLDS]),
        (1.5, 1.9, 1.7, [FAILS, FAILS, FAILS]),
        (1.5, inf, 1.7, [FAILS, FAILS, FAILS]),
        (1.5, 1.7, 1.68, [UNDECIDED, UNDECIDED, UNDECIDED]),
    ],
)
def test_mnist_sample(one, two, decay, expected):
    ends = {mnist_sample.ONE: polyak(one), mnist_sample.TWO: polyak(two), mnist_sample.DECAY: several(decay)}
    verdicts = mnist_sample.judge({10.0: ends, 100.0: ends}, several(0.5))
    assert judged(verdicts) == [*expected, HOLDS, HOLDS]


def test_mnist_sample_where_the_ceiling_decides():
    def groups(one, two, decay, make):
        return {mnist_sample.ONE: make(one), mnist_sample.TWO: make(two), mnist_sample.DECAY: several(decay)}

    runs = {10.0: groups(1.5, 1.5, 1.5, several), 100.0: groups(1.5, 1.5, 1.4, polyak)}
    verdicts = mnist_sample.judge(runs, several(0.5))
    assert judged(verdicts)[:3] == [UNDECIDED, HOLDS, FAILS]
    assert "not counted: 10" in verdicts[0].numbers
    assert "same run" in mnist_sample.remarks(runs)
    nowhere = mnist_sample.judge({10.0: groups(2.2, 2.2, 2.3, polyak)}, several(2.2))
    assert judged(nowhere) == [UNDECIDED] * 4


@pytest.mark.parametrize(("searched", "expected"), [(0.3, HOLDS), (0.7, FAILS), (0.49, UNDECIDED)])
def test_datadist(searched, expected):
    rivals = {
        linear: {datadist.FIXED: {"SGD": several(1.5)}, datadist.FREE: {"Adam": several(0.6), "SGD": several(0.5)}}
        for linear in datadist.LINEAR
    }
    searches = {linear: several(searched) for linear in datadist.LINEAR}
    verdicts = datadist.judge_losses(rivals, searches, several(0.29))
    assert judged(verdicts) == [HOLDS, expected, HOLDS, expected, HOLDS, HOLDS]


def test_pictures_that_are_digits_and_pictures_that_are_not():
    draw = np.random.default_rng(3)
    means = draw.random((10, 784))
    like = tuple((4.0 * means + draw.random((10, 784)) - 7.0).ravel())
    moved = tuple(np.roll(means, 1, axis=0).ravel())
    runs = {datadist.SLS: made(1.0, pictures=moved, accuracy=(0.1, 0.4)), OWN: made(1.0, pictures=like)}
    verdicts = datadist.judge_pictures(runs, means, 0.8)
    assert judged(verdicts) == [FAILS, FAILS, HOLDS, HOLDS]
    assert [verdict.ours for verdict in verdicts] == [False, False, True, True]
    lost = datadist.judge_pictures({OWN: made(nan, error="lost", pictures=like)}, means, 0.8)
    assert judged(lost) == [FAILS, FAILS]
    near = datadist.judge_pictures({OWN: made(1.0, pictures=like, accuracy=(0.1, 0.795))}, means, 0.8)
    assert judged(near) == [HOLDS, UNDECIDED]
    assert recognised(np.full((10, 784), nan), means) == recognised(np.zeros((10, 784)), means) == 0


def test_an_album_is_grey_whatever_was_learnt():
    flat = np.arange(40.0).reshape(10, 4)
    flat[3], flat[4, 0] = 7.0, nan
    images = np.array(album("learnt", made(1.0, pictures=tuple(flat.ravel()))).images)
    assert images.shape == (10, 2, 2)
    assert images.min() == 0
    assert images.max() == 1


def test_in_which_iterations_the_polyak_step_decides():
    assert polyak_share([made(1.0, alpha=8.0)]) == 0
    record = RunRecord({}, {"alpha": (8.0, 1.0)}, {"ceiling": 8.0})
    assert polyak_share([record]) == 0.5


def steps(config):
    """The constant steps of a run."""
    return config.method["upper_step"].step, config.method["lower_step"].step


def test_the_best_pair_of_a_grid_is_run_on_all_seeds():
    plan = Plan("smoke", 3)
    method = CONSTANT["SGD"].but(hypergrad=NEUMANN)
    asking = tuned(plan, {"SGD": (method, [(1.0, 0.1), (2.0, 0.1), (4.0, 0.1)])})
    first = next(asking)
    assert [(steps(config)[0], config.seed) for config in first] == [(1.0, 0), (2.0, 0), (4.0, 0)]
    second = asking.send([made(1.0), made(0.5), made(0.1, error="lost")])
    assert [(steps(config)[0], config.seed) for config in second] == [(2.0, 0), (2.0, 1), (2.0, 2)]
    assert {config.method["hypergrad"] for config in second} == {NEUMANN}
    with pytest.raises(StopIteration) as end:
        asking.send(several(0.5, 0.6, 0.7))
    best = end.value.value["SGD"]
    assert (*best.pair, len(best.runs)) == (2.0, 0.1, 3)
    assert str(best) == "alpha = 2, beta = 0.1 (best of 3 pairs)"
    assert "at the edge" in str(Tuned((4.0, 0.1), best.tried, best.runs))


def test_a_grid_is_extended_while_its_best_upper_step_is_at_an_edge():
    def drive(ends, pairs):
        asking, asked = tuned(Plan("quick", 1), {"SGD": (CONSTANT["SGD"], pairs)}), []
        wanted = next(asking)
        while True:
            asked.append([steps(config) for config in wanted])
            try:
                wanted = asking.send([made(ends(*steps(config))) for config in wanted])
            except StopIteration as end:
                return asked, end.value["SGD"]

    pairs = [(1.0, LOWER), (10.0, LOWER), (0.1, 0.3), (1.0, 0.3)]
    asked, best = drive(lambda alpha, beta: abs(np.log10(alpha) - 2) + (beta != LOWER), pairs)
    assert asked == [pairs, [(100.0, LOWER)], [(1000.0, LOWER)], [(100.0, LOWER)]]
    assert str(best) == "alpha = 100, beta = 0.0001 (best of 6 pairs; beta at the edge of the grid)"
    asked, best = drive(lambda alpha, beta: alpha, pairs)
    assert asked[1:-1] == [[(0.01, 0.3)], [(0.001, 0.3)], [(0.0001, 0.3)]]
    assert "alpha and beta at the edge" in str(best)
    asked, best = drive(lambda alpha, beta: inf, pairs)
    assert asked[-1] == [(0.0001, 0.3)]
    assert beyond({(1.0, 0.3): 2.0}) == [(10.0, 0.3), (0.1, 0.3)]


def test_the_class_means_teach_something_but_not_all():
    assert 0.5 < reference("digits", DISTILLING["raw"]) < 1.0
    assert 0.5 < reference("digits", DISTILLING["drawn once"]) < 1.0


def test_records_come_back_under_their_names():
    asking = gather({"a": [1, 2], "b": [], "c": [3]})
    assert next(asking) == [1, 2, 3]
    with pytest.raises(StopIteration) as end:
        asking.send(["one", "two", "three"])
    assert end.value.value == {"a": ["one", "two"], "b": [], "c": ["three"]}
    asking = gather({"a": [1, 2]})
    next(asking)
    with pytest.raises(ValueError, match="asked for 2 runs, was sent 1"):
        asking.send(["one"])
    with pytest.raises(StopIteration):
        next(gather({"a": []}))


@pytest.mark.slow
def test_the_axis_ends_below_the_lowest_loss_and_not_far_above_the_highest(outcomes):
    for name in NAMES:
        for panel in outcomes[name].panels:
            if panel.ylim:
                drawn = [value for series in panel.series for value in series.y]
                top = min(3.0, 1.25 * max(drawn))
                assert panel.ylim == pytest.approx((min(0.8 * min(drawn), 0.5 * top), top))


@pytest.mark.parametrize("scale", ["quick", "paper"])
def test_full_scales_are_as_the_paper_says(scale):
    plan = Plan(scale, 1)
    config = distillation(plan, 0, searched(plan))
    begin = config.method["alpha"], config.method["beta"]
    assert (*begin, config.lower_iters, config.batch) == (10.0, 100.0, 20, 10)
    assert {beta for _, beta in grid(plan, "Adam", LOWER)} == {LOWER}
    assert {beta for _, beta in grid(plan, "SGD")} > {LOWER}
