"""Figures on hyper-representation: each runs at the smallest scale, and each statement holds and fails on made-up records."""

from __future__ import annotations

from dataclasses import replace
from math import isfinite

import pytest
from watching import Quiet

from bisls.experiments import Plan, Store, figure, reproduce
from bisls.experiments.base import RunRecord
from bisls.experiments.bilevel import OWN
from bisls.experiments.figures import (
    delta_opt1,
    demo_1,
    demo_4,
    eta,
    hyper_more,
    opt,
    sample_hyper,
    search_and_runtime,
    search_cost,
    search_cost_beta,
)
from bisls.experiments.representation import BETAS, all_alike, best_pair, finals, neighbours, tuned
from bisls.outcome import Judgement

NAMES = (
    "demo_4",
    "hyper_more",
    "search_and_runtime",
    "opt",
    "eta",
    "search_cost",
    "search_cost_beta",
    "delta_opt1",
    "delta_opt3",
    "sample_hyper",
)
HOLDS, FAILS, UNDECIDED = Judgement.HOLDS, Judgement.FAILS, Judgement.UNDECIDED


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    figures = [figure(name) for name in NAMES]
    found = reproduce(figures, Plan("smoke", 1), Store(tmp_path_factory.mktemp("runs")), Quiet())
    return {one.name: one for one in found}


def run(
    loss=0.1,
    *,
    accuracy=0.9,
    first=0.5,
    seconds=10.0,
    alpha=(1.0,),
    beta=(1.0,),
    upper=1.0,
    lower=10.0,
    error="",
    ceiling=2.0,
):
    """A run of one hundred iterations that ends at a loss, with the accuracy reached half-way."""
    curves = {
        "k": (0.0, 50.0, 100.0),
        "loss": (first, (first + loss) / 2, loss),
        "accuracy": (0.1, accuracy, accuracy),
        "seconds": (0.0, seconds / 2, seconds),
        "alpha": tuple(alpha),
        "beta": tuple(beta),
        "upper_checks": (upper,) * 4,
        "lower_checks": (lower,) * 4,
        "lower_steps": (10.0,) * 4,
    }
    facts = {"evaluations": {"upper_gradients": 100, "lower_gradients": 1000}}
    return RunRecord({}, curves, {"iterations": 100.0, "ceiling": ceiling}, error, facts)


def runs(*losses, **others):
    return [run(loss, **others) for loss in losses]


def judged(verdicts):
    return [verdict.judgement for verdict in verdicts]


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_runs_at_the_smallest_scale(outcomes, name):
    one = outcomes[name]
    assert one.panels
    assert any(verdict.ours for verdict in one.verdicts)
    assert any(not verdict.ours for verdict in one.verdicts)
    assert one.settings["iterations"].startswith("K = ")
    assert one.facts["runs"] > 0
    for panel in one.panels:
        assert [series.ours for series in panel.series].count(True) == 1
        assert len({series.label for series in panel.series}) == len(panel.series)
        if "85" in panel.title:  # four iterations reach no such accuracy
            continue
        (own,) = (series for series in panel.series if series.ours)
        assert all(isfinite(value) for value in own.y)


def test_a_loss_that_exploded_counts_as_infinite():
    assert finals([run(0.1), run(5.1), run(0.1, error="lost"), run(float("nan"))]) == [0.1, *[float("inf")] * 3]


def test_alike_needs_progress():
    assert all_alike("a", {"one": runs(0.1), "two": runs(0.12)}).judgement is HOLDS
    assert all_alike("a", {"one": runs(0.1), "two": runs(0.2)}).judgement is FAILS
    assert all_alike("a", {"one": runs(0.1), "two": runs(900.0)}).judgement is FAILS
    assert all_alike("a", {"one": runs(0.5), "two": runs(0.5)}).judgement is UNDECIDED


def drive(asking, loss):
    """Answer a generator by runs whose final loss is a function of the configuration."""
    asked = []
    try:
        wanted = next(asking)
        while True:
            asked += wanted
            wanted = asking.send([run(loss(config)) for config in wanted])
    except StopIteration as end:
        return asked, end.value


def steps(config):
    """The constant steps of a run."""
    return config.method["upper_step"].step, config.method["lower_step"].step


def distance(config):
    """Least at alpha = 1e-3, beta = 0.5, both of the paper's grid; too large a lower step diverges."""
    alpha, beta = steps(config)
    return 0.1 + 0.1 * abs(alpha - 1e-3) + 0.01 * abs(BETAS.index(beta) - 3) + 1e3 * (beta > 5)


@pytest.mark.parametrize(("scale", "most"), [("quick", 16), ("paper", 42)])
def test_tuning_finds_the_best_pair_of_the_grid(scale, most):
    asked, (best, _) = drive(tuned(Plan(scale, 2), ("adam",)), distance)
    assert best["adam"].pair == (1e-3, 0.5)
    assert len(best["adam"].tried) <= most
    assert len(best["adam"].runs) == 2
    assert {config.seed for config in asked[: len(best["adam"].tried)]} == {0}
    assert len({(*steps(c), c.seed) for c in asked}) == len(best["adam"].tried) + 1  # the best pair on a second seed


def test_a_pair_that_another_seed_loses_is_no_rival():
    def loss(config):
        return 1e9 if steps(config) == (1e-3, 0.5) and config.seed == 1 else distance(config)

    asked, (best, _) = drive(tuned(Plan("quick", 2), ("adam",)), loss)
    assert best["adam"].lost == ((1e-3, 0.5),)
    low, second = min((distance(c), steps(c)) for c in asked if steps(c) != (1e-3, 0.5))
    assert best["adam"].pair == second
    assert finals(best["adam"].runs) == [low, low]
    assert "0.001 and 0.5 diverge on another seed" in str(best["adam"])
    nowhere = drive(tuned(Plan("quick", 2), ("adam",)), lambda config: 1e9)[1][0]["adam"]
    assert nowhere.lost == ()  # where all are lost none is looked for


def test_a_best_pair_at_the_edge_of_the_grid_is_told():
    _, (best, _) = drive(tuned(Plan("quick", 1), ("adam",)), distance)
    assert "edge" not in str(best["adam"])
    _, (best, _) = drive(
        tuned(Plan("quick", 1), ("adam",)), lambda config: 0.1 - steps(config)[0] + steps(config)[1] / 100
    )
    assert str(best["adam"]).endswith("; alpha and beta at the edge of the grid)")


def test_tuning_where_everything_diverges():
    grid = {(0.1, 10.0): run(1e9), (0.05, 5.0): run(float("nan"))}
    assert best_pair(grid) == (0.05, 5.0)
    assert neighbours("sgd", grid) == [(0.1, 5.0), (0.01, 5.0), (0.05, 10.0), (0.05, 1.0)]


FALLING = (1.0,) * 10 + (0.1,) * 30
RISING = (0.1,) * 10 + (1.0,) * 30
LOW = (1.0,) * 10 + (0.01,) * 30


def demo_4_verdicts(bisls, own, alpha, beta):
    compared = {"BiSLS-Adam": runs(bisls), "BiSLS-SGD": runs(0.3), "adam, tuned": runs(0.2), "sgd, tuned": runs(0.25)}
    begun = {"a": runs(0.1, alpha=FALLING, beta=FALLING), "b": runs(0.1, alpha=alpha, beta=beta)}
    return judged(demo_4.judge(compared, begun, runs(own), 1e-4))


def test_demo_4():
    assert demo_4_verdicts(0.1, 0.05, FALLING, FALLING) == [HOLDS] * 6
    assert demo_4_verdicts(0.3, 0.4, LOW, RISING) == [FAILS, FAILS, HOLDS, FAILS, FAILS, FAILS]
    assert demo_4_verdicts(0.202, 0.202, FALLING, FALLING)[0] is UNDECIDED


def test_nothing_holds_of_runs_that_got_nowhere():
    still = {name: runs(0.49) for name in ("BiSLS-Adam", "BiSLS-SGD", "adam, tuned", "sgd, tuned")}
    begun = {name: runs(0.5, alpha=FALLING, beta=FALLING) for name in "ab"}
    assert judged(demo_4.judge(still, begun, runs(0.48), 1e-4)) == [UNDECIDED] * 6
    levels = {name: runs(loss) for name, loss in zip(hyper_more.LEVELS, (0.48, 0.6, 0.48, 0.6), strict=True)}
    assert judged(hyper_more.judge(levels, still, begun, begun, runs(0.48))) == [UNDECIDED] * 7
    assert judged(opt.judge(two_methods(option_1=0.49, option_2=0.6, option_3=0.49), runs(0.48))) == [UNDECIDED] * 5
    assert judged(eta.judge(named("eta", {"1": 0.6, "2": 0.49, "10": 0.49}), runs(0.48))) == [UNDECIDED] * 5
    assert judged(search_cost_beta.judge({"BiSLS-Adam": {1.0: runs(0.5)}}, runs(0.5, lower=1.0))) == [UNDECIDED] * 2
    grids = {"beta 1": runs(0.6), "alpha 1": runs(0.6), OWN: runs(0.49)}
    assert judged(demo_1.judge(grids))[2] is UNDECIDED


def hyper_verdicts(levels, accurate, start, own):
    searched = {name: runs(loss) for name, loss in zip(hyper_more.LEVELS, levels, strict=True)}
    compared = {name: runs(0.1, accuracy=accurate) for name in ("BiSLS-SGD", "BiSLS-Adam")}
    compared |= {"adam, tuned": runs(0.1, accuracy=0.9), "sgd, tuned": runs(0.1, accuracy=0.8)}
    starts = {"1": runs(0.1), "2": runs(start)}
    return judged(hyper_more.judge(searched, compared, starts, starts, own))


def test_a_run_that_flies_off_does_not_flatten_the_others():
    """The axis of losses ends a third above where they began; that of accuracies has no such end."""
    groups = {"both levels": runs(0.1), "upper only": runs(1e6)}
    panel = hyper_more._panel("Search at", groups, runs(0.05), "loss")
    assert panel.ylim == pytest.approx((0.04, 0.65))
    assert hyper_more._panel("Accuracy", groups, runs(0.05), "accuracy").ylim is None


def test_hyper_more():
    assert hyper_verdicts((0.1, 0.2, 0.1, 0.2), 0.95, 0.11, runs(0.05, accuracy=0.96)) == [HOLDS] * 7
    assert hyper_verdicts((0.2, 0.1, 0.2, 0.1), 0.7, 0.3, runs(0.5, accuracy=0.5)) == [FAILS] * 7
    assert hyper_verdicts((0.1, 0.2, 0.2, 0.1), 0.95, 0.1, runs(0.5, accuracy=0.96, error="lost"))[0] is FAILS


def test_yhat():
    good = {1: runs(0.1, accuracy=0.89, seconds=5.0), 5: runs(0.1, accuracy=0.9, seconds=9.0)}
    bad = {1: runs(0.1, accuracy=0.7, seconds=9.0), 5: runs(0.1, accuracy=0.9, seconds=5.0)}
    assert judged(search_and_runtime.judge_yhat(good)) == [HOLDS, HOLDS]
    assert judged(search_and_runtime.judge_yhat(bad)) == [FAILS, FAILS]
    nothing = {n: runs(0.49, accuracy=0.1, seconds=5.0 + n) for n in (1, 5)}
    assert judged(search_and_runtime.judge_yhat(nothing)) == [UNDECIDED, UNDECIDED]


def test_times_are_told_beside_counts():
    verdict = search_and_runtime.judge_yhat({1: runs(0.1), 5: runs(0.1)})[1]
    assert "times of one machine" in verdict.numbers
    assert "evaluations an iteration: 1 steps 11, 5 steps 11" in verdict.numbers
    timed = {"BiSLS-Adam": {5: [run()]}, "tuned Adam": {5: [run()]}}
    verdict = search_and_runtime.judge_timed(timed, [run()])[0]
    assert "times of one machine" in verdict.numbers
    assert "iterations: BiSLS-Adam, CG 5 50, tuned Adam, CG 5 50" in verdict.numbers


def test_upper_checks():
    def verdicts(first, second, kept, own):
        by = {"option 1": runs(0.1, upper=first), "eta = 1": runs(0.1, upper=kept), "eta = 2": runs(0.1, upper=second)}
        costs = {"BiSLS-SGD": by, "BiSLS-Adam": by}
        return judged(search_cost.judge(costs, runs(0.1, upper=own), 200))

    assert verdicts(100.0, 9.0, 4.0, 1.0) == [HOLDS] * 5
    assert verdicts(100.0, 80.0, 90.0, 5.0)[:4] == [FAILS] * 4
    assert verdicts(1000.0, 9.0, 4.0, 9.0) == [HOLDS, FAILS, HOLDS, FAILS, FAILS]


def test_checks_are_told_with_and_without_searches_that_do_not_end():
    mixed = replace(run(0.1), curves={**run(0.1).curves, "upper_checks": (80.0, 8.0, 200.0, 10.0)})
    by = {name: [mixed] for name in ("option 1", "eta = 1", "eta = 2")}
    told = search_cost.judge({"BiSLS-SGD": by, "BiSLS-Adam": by}, runs(0.1), 200)[1].numbers
    assert "option 1 74.5" in told
    assert "of searches that end, the first of a run not counted: option 1 9 ± 1" in told


def test_time_to_an_accuracy():
    def verdicts(bisls, adam, own):
        timed = {"BiSLS-Adam": {5: [bisls], 10: [bisls]}, "tuned Adam": {5: [adam], 10: [adam]}}
        return judged(search_and_runtime.judge_timed(timed, [own]))

    quick, slow, never = run(seconds=4.0), run(seconds=8.0), run(accuracy=0.8)
    assert search_and_runtime.reached([quick, never], "seconds") == [2.0, float("inf")]
    assert verdicts(quick, slow, quick) == [HOLDS] * 4
    assert verdicts(slow, quick, slow) == [FAILS, FAILS, HOLDS, HOLDS]
    assert verdicts(never, quick, never) == [FAILS] * 4
    assert verdicts(never, never, quick) == [UNDECIDED, HOLDS, UNDECIDED, HOLDS]


def two_methods(**losses):
    one = {name.replace("_", " "): runs(loss) for name, loss in losses.items()}
    return {"BiSLS-SGD": one, "BiSLS-Adam": one}


def test_opt():
    good = two_methods(option_1=0.1, option_2=0.2, option_3=0.11)
    bad = two_methods(option_1=0.1, option_2=0.05, option_3=0.2)
    assert judged(opt.judge(good, runs(0.1))) == [HOLDS] * 5
    assert judged(opt.judge(bad, runs(0.1))) == [FAILS] * 5


def named(head, losses):
    one = {f"{head} = {name}": runs(loss) for name, loss in losses.items()}
    return {"BiSLS-SGD": one, "BiSLS-Adam": one}


def test_eta():
    assert judged(eta.judge(named("eta", {"1": 0.2, "2": 0.1, "10": 0.12}), runs(0.1))) == [HOLDS] * 5
    assert judged(eta.judge(named("eta", {"1": 0.05, "2": 0.1, "10": 0.2}), runs(0.1))) == [FAILS] * 5


def test_delta():
    good = named("delta", {"0": 0.4, "1e-08": 0.1, "0.01": 0.12})
    assert judged(delta_opt1.judge(good, runs(0.1))) == [HOLDS] * 3
    bad = named("delta", {"0": 0.1, "1e-08": 0.1, "0.01": 0.2})
    assert judged(delta_opt1.judge(bad, runs(0.2))) == [FAILS] * 3


def test_search_cost_beta():
    def verdicts(lower, own):
        by = {1.0: runs(0.1, lower=10.0), 100.0: runs(0.1, lower=lower)}
        return judged(search_cost_beta.judge({"BiSLS-Adam": by}, runs(0.1, lower=own)))

    assert verdicts(12.0, 3.0) == [HOLDS, HOLDS]
    assert verdicts(400.0, 20.0) == [FAILS, FAILS]


def test_sample_hyper():
    def verdicts(one, two, own):
        methods = {"BiSPS, one sample": runs(one), "BiSPS, two samples": runs(two), "decaying SGD": runs(0.3)}
        return judged(sample_hyper.judge({10.0: {0.1: methods}}, runs(own)))

    assert verdicts(0.1, 0.12, 0.1) == [HOLDS, HOLDS]
    assert verdicts(0.1, 0.3, 0.2) == [FAILS, FAILS]
    assert verdicts(0.1, 1e9, 0.2) == [FAILS, FAILS]
    assert verdicts(1e9, 1e9, 0.2) == [UNDECIDED, HOLDS]
    assert verdicts(0.5, 0.5, 0.2) == [UNDECIDED, HOLDS]


def test_sample_hyper_where_the_ceiling_decides():
    def named(one, two, ceiling):
        methods = {"BiSPS, one sample": runs(one, ceiling=ceiling), "BiSPS, two samples": runs(two, ceiling=ceiling)}
        return methods | {"decaying SGD": runs(0.3)}

    (verdict, _) = sample_hyper.judge({10.0: {1.0: named(0.1, 0.1, 1.0)}}, runs(0.1))
    assert verdict.judgement is UNDECIDED
    assert "not counted: 1 (" in verdict.numbers
    (verdict, _) = sample_hyper.judge({10.0: {1.0: named(0.1, 0.3, 1.0), 2.0: named(0.1, 0.1, 2.0)}}, runs(0.1))
    assert verdict.judgement is HOLDS  # by 2 alone
