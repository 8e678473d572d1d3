"""Readings of the paper: what each changes in a task, how they are scored, and that scores can go either way."""

from __future__ import annotations

from math import inf

import numpy as np
import pytest
import torch
from watching import Quiet

from bisls import tasks
from bisls.directions import Steepest
from bisls.experiments import READINGS, Plan, Store, bilevel, reproduce
from bisls.experiments.base import Figure, Findings, RunRecord
from bisls.experiments.bilevel import Distillation, Representation, constant
from bisls.experiments.distillation import CONSTANT, LOWER, distillation, polyak, searched
from bisls.experiments.figures import calibration
from bisls.experiments.figures.calibration import Item, chosen, judge_distillation, judge_representation, table
from bisls.experiments.readings import (
    ADAM,
    DISTILLING,
    REPRESENTING,
    Distilling,
    MeanSquares,
    OnBatches,
    Representing,
    SquaresOverData,
)
from bisls.tasks.hyper_representation import _body, _Kept, _Pool

SHORT = {"data": "digits", "batch": 8, "steps": 4, "lower_iters": 3, "every": 2}


def drawn(rows, seed=3):
    draw = torch.Generator().manual_seed(seed)
    images = torch.randint(256, (rows, 28, 28), generator=draw, dtype=torch.uint8)
    return images, torch.arange(rows) % 10


def test_features_are_those_of_the_network_whatever_was_changed():
    """Kept or not: also where somebody writes through ``.data``, which leaves no trace in a tensor's version."""
    body = _body(torch.Generator().manual_seed(1), torch.float32).requires_grad_(False)
    kept, pictures = _Kept(body), torch.rand(3, 1, 32, 32, generator=torch.Generator().manual_seed(2))
    calls = []
    body.register_forward_hook(lambda *_: calls.append(1))
    first = kept(pictures)
    assert kept(pictures.clone()) is first
    assert len(calls) == 1
    body[0].weight.data.mul_(1.5)
    assert torch.equal(kept(pictures), body(pictures))
    pictures.data[1] += 0.25
    assert torch.equal(kept(pictures), body(pictures))
    body.requires_grad_(True)
    assert kept(pictures).requires_grad
    with torch.no_grad():
        assert not kept(pictures).requires_grad


def test_pooling_is_that_of_torch_with_and_without_a_gradient():
    pictures = torch.randn(2, 3, 6, 8, generator=torch.Generator().manual_seed(5))
    pictures[0, 0, 0, 0] = torch.nan
    expected = torch.nn.functional.max_pool2d(pictures, 2)
    assert torch.equal(_Pool(2)(pictures).nan_to_num(9.0), expected.nan_to_num(9.0))
    assert torch.equal(_Pool(2)(pictures.requires_grad_()).nan_to_num(9.0), expected.nan_to_num(9.0))


def test_a_lower_search_sends_a_batch_through_the_network_once():
    images, labels = drawn(40)
    task = tasks.hyper_representation(images, labels, lower_size=20, test_size=5, batch_size=8)
    calls = []
    weights = {p.data_ptr() for p in task.problem.x.tensors}
    linear = torch.nn.functional.conv2d

    def counted(*arguments, **more):
        calls.append(arguments[1].data_ptr() in weights)
        return linear(*arguments, **more)

    batch = next(task.lower_data)
    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        patch.setattr(torch.nn.functional, "conv2d", counted)
        for step in (1.0, 0.5, 0.25):
            task.problem.y.tensors[0].fill_(step)
            task.problem.lower_loss(batch)
    assert calls == [True] * 3  # the three convolutions, once


def test_other_pictures_may_be_below():
    images, labels = drawn(30)
    others, known = drawn(12, seed=4)
    task = tasks.hyper_representation(images, labels, lower=(others, known), test_size=5, batch_size=4, lower_size=99)
    assert len(task.upper_data.tensors[0]) == 25
    expected = ((torch.nn.functional.pad(others / 255.0, (2, 2, 2, 2)) - 0.1307) / 0.3081).unsqueeze(1)
    torch.testing.assert_close(task.lower_data.tensors[0], expected)
    assert torch.equal(task.lower_data.tensors[1], known)
    with pytest.raises(ValueError, match="pictures and labels"):
        tasks.hyper_representation(images, labels, lower=others, test_size=5)


def test_distillation_from_a_standardised_pool():
    images, labels = drawn(60)
    plain = tasks.distillation(images, labels, test_size=10)
    pool = tasks.distillation(images, labels, test_size=10, pool=20, mean=0.2, sd=0.5)
    assert [len(task.upper_data.tensors[0]) for task in (plain, pool)] == [50, 20]
    torch.testing.assert_close(pool.upper_data.tensors[0], (plain.upper_data.tensors[0][:20] - 0.2) / 0.5)
    for wrong in (0, 51, 2.5):
        with pytest.raises(ValueError, match="pool"):
            tasks.distillation(images, labels, test_size=10, pool=wrong)


@pytest.mark.parametrize("loss", [MeanSquares(), SquaresOverData(0.3)])
def test_squares_are_solved(loss):
    draw = torch.Generator().manual_seed(0)
    features, labels = torch.rand(30, 4, generator=draw, dtype=torch.float64), torch.arange(30) % 10
    head = loss.solve(features, labels, 0.1, torch.zeros(5, 10, dtype=torch.float64)).requires_grad_()
    outputs = torch.cat([features, torch.ones(30, 1)], 1) @ head
    (loss(outputs, labels) + 0.05 * head.square().sum()).backward()
    assert head.detach().abs().max() > 0.05
    assert head.grad.abs().max() < 1e-12


def test_the_fixed_rate_below_is_that_of_the_reading():
    """Adam below is torch's: after one step from zero each coordinate has moved by the rate."""
    plan = Plan("smoke", 1, READINGS["paper"])
    fixed, free = distillation(plan, 0, polyak(10.0)), distillation(plan, 0, searched(plan))
    assert (fixed.method["lower_direction"], free.method["lower_direction"]) == (ADAM, None)
    assert distillation(plan, 0, constant(CONSTANT["SGD"], 1.0, 0.3)).method["lower_direction"] is None
    second = distillation(Plan("smoke", 1, READINGS["second"]), 0, polyak(10.0))
    assert second.method["lower_direction"] is None
    task = fixed.task()
    with torch.no_grad():
        task.problem.x.tensors[0].normal_(generator=torch.Generator().manual_seed(0))
    fixed.method(task.problem, lower_iters=1).step(next(task.upper_data), task.lower_data)
    moved = task.problem.y.tensors[0]
    torch.testing.assert_close(moved.abs(), torch.full_like(moved, LOWER), rtol=1e-2, atol=0.0)


def test_a_reading_is_part_of_the_run():
    method = constant(CONSTANT["SGD"], 1.0, 0.1)
    keys = {Distillation(0, method, reading=one).key for one in DISTILLING.values()}
    keys |= {Representation(0, method, reading=one).key for one in REPRESENTING.values()}
    assert len(keys) == len(DISTILLING) + len(REPRESENTING)
    assert len({str(one) for one in (*DISTILLING.values(), *REPRESENTING.values())}) == len(keys)
    assert Representing().split.settings(None) == {}
    with pytest.raises(ValueError, match="ridge"):
        Representing(ridge=0.0)


def test_the_loss_on_the_batches_themselves():
    made = Distillation(
        0, constant(CONSTANT["SGD"], 1.0, 0.1), reading=Distilling(plotted=OnBatches()), **SHORT
    ).execute()
    seen = made.curve("upper_value")
    assert made.curves["loss"][1:] == pytest.approx([seen[:2].mean(), seen[2:].mean()])
    assert made.curves["loss"][0] == pytest.approx(np.log(10))


def test_a_lost_run_ends_early():
    lost = {**SHORT, "steps": 40, "every": 2}
    made = Distillation(0, constant(CONSTANT["SGD"], 1e6, 0.1), **lost).execute()
    assert made.error.startswith("lost: a loss of ")
    assert made.numbers["iterations"] < 40
    assert made.last("loss") == inf
    kept = Distillation(0, constant(CONSTANT["SGD"], 0.1, 0.1), **lost).execute()
    assert (kept.error, kept.numbers["iterations"]) == ("", 40)


def test_a_run_that_comes_back_is_not_lost():
    curves = bilevel.Curves(
        Distillation(0, searched(Plan("smoke", 1)), **SHORT).task(), 1, 9, DISTILLING["raw"].plotted
    )
    for losses, expected in (([1.0, 200.0], False), ([1.0, 200.0, 0.5], False), ([1.0, 0.5, 200.0, inf], True)):
        curves.values["loss"], curves.values["k"] = list(losses), list(range(len(losses)))
        assert bool(curves._lost()) is expected


def record(end=0.5, checks=1.0, lower=1.0, share=0.5, error=""):
    ceiling = np.array([1.0, 2**-0.5])
    curves = {
        "loss": (1.0, end), "alpha": tuple(ceiling * share), "upper_checks": (checks, checks),
        "lower_checks": (lower * 10, lower * 10), "lower_steps": (10.0, 10.0),
    }  # fmt: skip
    return [RunRecord({}, curves, {"ceiling": 1.0}, error)]


def reported():
    """Records of hyper-representation that are just as the paper reports."""
    tried = [(1e-4, 1.0), (1e-5, 1.0), (1e-4, 0.1)]
    runs = {f"Adam {pair}": record(0.4) for pair in tried} | {f"Adam {tried[0]}": record(0.3)}
    runs |= {"SGD (0.005, 0.01)": record(), "SGD (0.005, 10.0)": record(error="lost"), "SGD (0.1, 0.01)": record(0.9)}
    runs |= {name: record() for name in ("BiSPS, one sample", "BiSPS, two samples", "decaying SGD")}
    runs |= {f"{m}, {r}": record(checks=told) for r, by in calibration.COUNTS.items() for m, told in by.items()}
    return runs, tried


def test_what_the_paper_reports_is_met_by_itself():
    items = judge_representation(*reported())
    assert all(item.met for item in items)
    assert len(items) == 15


@pytest.mark.parametrize(
    ("name", "instead", "missed"),
    [
        ("Adam (0.0001, 0.1)", {"end": 0.2}, "tuned Adam: beta"),
        ("Adam (1e-05, 1.0)", {"end": 0.2}, "tuned Adam: alpha"),
        ("SGD (0.005, 0.01)", {"end": 0.9}, "SGD, alpha = 0.005"),
        ("SGD (0.005, 10.0)", {"end": 0.5}, "the largest beta"),
        ("BiSPS, two samples", {"error": "lost"}, "BiSPS, two samples"),
        ("BiSLS-SGD, option 1", {"checks": 40.0}, "BiSLS-SGD, option 1"),
        ("BiSLS-Adam, eta = 1", {"checks": 9.0}, "BiSLS-Adam, eta = 1"),
        ("BiSLS-Adam, option 1", {"checks": 115.0, "lower": 4.0}, "option 1 below"),
    ],
)
def test_each_line_can_be_missed(name, instead, missed):
    runs, tried = reported()
    items = judge_representation({**runs, name: record(**instead)}, tried)
    assert [item.told.startswith(missed) for item in items if not item.met] == [True]


def test_distillation_must_move_and_tell_two_methods_apart():
    runs = {f"{name}, 10, identity": record() for name in ("BiSPS", "decaying SGD")}
    assert [item.met for item in judge_distillation(runs)] == [True, True, True]
    assert [item.met for item in judge_distillation({**runs, "BiSPS, 10, identity": record(share=1.0)})] == [
        True,
        True,
        False,
    ]
    assert [item.met for item in judge_distillation({**runs, "BiSPS, 10, identity": record(0.95)})] == [
        False,
        True,
        True,
    ]


def test_the_reading_that_meets_most_is_asked_for():
    name = next(n for n, one in DISTILLING.items() if one == READINGS["paper"].distillation)
    met, missed = [Item("a", "1", True)], [Item("a", "0", False)]
    good = chosen("distillation", {name: met, "raw, Adam": missed}, "distillation")
    bad = chosen("distillation", {name: missed, "raw, Adam": met}, "distillation")
    assert (good.judgement, bad.judgement) == ("holds", "fails")
    shown = table("T", {name: met, "raw": missed})
    assert shown.rows == (("a", "✓ 1", "✗ 0"), ("met of 1", "1", "0"))


def test_the_second_reading_is_the_one_that_was_first():
    assert READINGS["second"].representation == Representing()
    assert READINGS["second"].distillation == Distilling()
    assert isinstance(Distilling().lower, Steepest)


def test_figures_come_one_after_another_at_the_standard_scale(tmp_path):
    def asking(plan):
        yield [Distillation(0, constant(CONSTANT["SGD"], 1.0, 0.1), **SHORT)]
        yield [Distillation(0, constant(CONSTANT["SGD"], 2.0, 0.1), **SHORT)]
        return Findings((), (), {})

    def other(plan):
        yield [Distillation(0, constant(CONSTANT["SGD"], 3.0, 0.1), **SHORT)]
        return Findings((), (), {})

    figures = [Figure("mine", "", "", other), Figure("demo_3", "", "", asking)]
    watcher = Quiet()
    found = reproduce(figures, Plan("standard", 1), Store(tmp_path), watcher)
    assert watcher.names == ["demo_3", "mine"]
    assert [len(runs) for runs in watcher.asked if runs] == [1, 1, 1]
    assert [outcome.name for outcome in found] == ["mine", "demo_3"]
    assert found[0].command.endswith("--scale standard --seeds 1")
    assert (
        "--reading second"
        in reproduce(figures[:1], Plan("standard", 1, READINGS["second"]), Store(tmp_path), Quiet())[0].command
    )
