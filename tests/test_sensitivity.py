"""The sweep over first steps: runs that can be compared, runs that cannot, runs that fail, and the report."""

from __future__ import annotations

import json
import logging
import math
import random

import numpy as np
import pytest
import torch
from problems import ridge
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import bisls
from bisls.methods import Alternating, BiSLS
from bisls.randomness import random_state
from bisls.sensitivity import SensitivityReport, sensitivity
from bisls.tasks.base import Batches

pytestmark = pytest.mark.slow  # `make quick` leaves it out

GRID = {"alphas": (1e-2, 10.0), "betas": (0.1, 100.0), "progress": False}
ROWS = (torch.randn(30, 3, generator=torch.Generator().manual_seed(0)), torch.linspace(-1, 2, 30))


def searched(alpha, beta):
    return BiSLS(ridge().problem, alpha=alpha, beta=beta, lower_iters=3)


def fixed(alpha, beta):
    steps = {"upper_step": bisls.Constant(alpha), "lower_step": bisls.Constant(beta)}
    return Alternating(ridge().problem, lower_iters=3, **steps)


def stochastic(alpha, beta):
    net = nn.Linear(3, 1)
    x = torch.zeros(3, requires_grad=True)

    def loss(batch):
        return ((torch.dropout(net(batch[0])[:, 0], 0.3, True) - batch[1]) ** 2).mean()

    problem = bisls.Bilevel(
        loss, lambda batch: loss(batch) + (x.exp() * net.weight**2).sum(), [x], list(net.parameters())
    )
    return BiSLS(problem, alpha=alpha, beta=beta, lower_iters=2)


def test_searches_do_not_mind_their_first_steps_and_fixed_steps_do():
    before = str(random_state())
    calm, wild = sensitivity(searched, steps=20, **GRID), sensitivity(fixed, steps=20, **GRID)
    assert str(random_state()) == before
    assert calm.scores.shape == calm.checks.shape == (2, 2, 1)
    assert calm.spread < 1.2 < wild.spread
    assert calm.best.score <= calm.median <= calm.worst.score
    assert calm.checks.min() > 0
    assert calm.best.alpha in calm.alphas
    assert calm.best.beta in calm.betas
    assert calm.curves.shape == (2, 2, 1, 20)
    assert calm.scores[0, 0, 0] == pytest.approx(calm.curves[0, 0, 0, -2:].mean())


DATA = {
    "loader": lambda: DataLoader(TensorDataset(*ROWS), 5, shuffle=True),
    "loader with a generator": lambda: DataLoader(
        TensorDataset(*ROWS), 5, shuffle=True, generator=torch.Generator().manual_seed(2)
    ),
    "factory of an iterator": lambda: lambda: Batches(ROWS, 5, seed=1),
    "factory of a callable": lambda: lambda: lambda: tuple(part[torch.randint(30, (5,))] for part in ROWS),
}


@pytest.mark.parametrize("kind", DATA)
def test_every_run_sees_the_same_batches(kind):
    # both pairs are the same method: the steps are only a name here
    first, other = (
        sensitivity(
            lambda alpha, beta: stochastic(1.0, 1.0),
            DATA[kind](),
            DATA[kind](),
            steps=6,
            alphas=(1.0, 2.0),
            betas=(1.0,),
            seeds=seeds,
            progress=False,
        )
        for seeds in ((0, 1), (1,))
    )
    assert np.array_equal(first.curves[0], first.curves[1])
    assert not np.array_equal(first.curves[0, 0, 0], first.curves[0, 0, 1])
    assert np.array_equal(first.curves[:, :, 1], other.curves[:, :, 0])


def test_the_data_may_come_with_the_solver_and_the_score_may_be_ones_own():
    report = sensitivity(
        lambda alpha, beta: (stochastic(alpha, beta), Batches(ROWS, 5), ROWS),
        steps=3,
        score=lambda solver: solver.problem.x.read().sum(),
        **GRID,
    )
    assert np.isfinite(report.scores).all()


def test_runs_that_fail_count_as_infinite_and_are_named():
    def make(alpha, beta):
        made = searched(alpha, beta)
        if alpha == 10.0:
            upper = made.problem.upper_loss
            made.problem.upper_loss = lambda batch: upper(batch) * (float("nan") if beta > 1 else 1.0)
        return made

    report = sensitivity(make, steps=30, **GRID)
    assert np.isinf(report.scores).sum() == 1
    assert report.worst.score == report.spread == math.inf
    assert list(report.failures) == [(10.0, 100.0, 0)]
    text = str(report)
    assert "failed: alpha 10, beta 100, seed 0: SolverError" in text
    short = sensitivity(make, steps=3, **GRID)  # too short for the solver to give up
    assert short.failures[10.0, 100.0, 0] == "ended with a score of nan"
    assert short.scores[1, 1, 0] == math.inf
    json.dumps(report.to_dict(), allow_nan=False)

    def fails(alpha, beta):
        made = searched(alpha, beta)
        made.problem.upper_loss = lambda batch: torch.ones(3) @ torch.ones(4)
        return made

    with pytest.raises(RuntimeError, match=r"all 4 runs failed, the first with: .*size"):
        sensitivity(fails, steps=3, **GRID)


SHARED = ridge().problem
LINEAR = nn.Linear(3, 1)


def from_numpy(generator):
    def make(alpha, beta):
        made = searched(alpha, beta)
        made.problem.x.write_(torch.from_numpy(generator.random(10)))
        return made

    return make


def used(alpha, beta):
    made = searched(alpha, beta)
    made.step(None, None)
    return made


@pytest.mark.parametrize(
    ("make", "data", "message"),
    [
        (
            lambda a, b: BiSLS(SHARED, alpha=a, beta=b),
            (),
            r"two calls returned solvers with the same parameters .*deepcopy",
        ),
        (
            lambda a, b: BiSLS(
                bisls.Bilevel(
                    lambda _: LINEAR.weight.sum() ** 2,
                    lambda _: (LINEAR.weight**2).sum() + LINEAR.bias.sum() ** 2,
                    [LINEAR.bias],
                    [LINEAR.weight],
                )
            ),
            (),
            r"`sensitivity\(make_solver=...\)`: two calls returned solvers with the same parameters",
        ),
        (from_numpy(np.random.default_rng(0)), (), r"two calls with seed 0 start from different points"),
        (used, (), r"a solver with 1 iterations behind it; make a new one in each call"),
        (lambda a, b: 3, (), r"it must return a solver, such as BiSLS\(problem\), got int"),
        (lambda a, b: (searched(a, b), None), (), r"that must be \(solver, upper_data, lower_data\)"),
        (BiSLS, (), r"make_solver must be a function of \(alpha, beta\) that returns a new solver"),
        (
            searched,
            (iter([]),),
            r"`sensitivity\(upper_data=list_iterator\(...\)\)`: an iterator would go on from run to run",
        ),
        (searched, (None, Batches(ROWS, 5)), r"`sensitivity\(lower_data=Batches\(...\)\)`: an iterator would go on"),
        (searched, (lambda: ROWS,), r"the function is called once a run and returned one batch"),
        (searched, ([1],), r"`sensitivity\(upper_data=\[...\]\)`: a list may mean one batch or several"),
    ],
)
def test_runs_that_cannot_be_compared_are_refused(make, data, message):
    with pytest.raises(ValueError, match=message):
        sensitivity(make, *data, steps=2, **GRID)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"steps": 0}, r"`sensitivity\(steps=0\)`: steps must be a whole number, at least 1"),
        ({"alphas": ()}, r"`sensitivity\(alphas=\(\)\)`: alphas must be at least one number"),
        ({"betas": (1.0, -1.0)}, r"betas must be at least one number, all different, finite and above 0"),
        ({"betas": 3}, r"`sensitivity\(betas=3\)`"),
        ({"alphas": (1.0, 1.0)}, r"all different"),
        ({"seeds": ()}, r"seeds must be at least one whole number"),
        ({"score": 3}, r"score must be a function of the solver"),
    ],
)
def test_arguments_that_cannot_be_used_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        sensitivity(searched, **{"steps": 2, "progress": False, **options})


def test_a_function_that_ignores_the_steps_is_noticed(caplog):
    with caplog.at_level(logging.WARNING):
        sensitivity(lambda alpha, beta: searched(1.0, 1.0), steps=2, **GRID)
    assert "all solvers are alike (BiSLS(" in caplog.text


def test_global_generators_other_than_torchs_are_seeded_too():
    def make(alpha, beta):
        made = searched(alpha, beta)
        made.problem.x.write_(torch.full((10,), random.random() + np.random.random(), dtype=torch.float64))  # noqa: NPY002
        return made

    assert sensitivity(make, steps=2, **GRID).scores.shape == (2, 2, 1)


def test_the_report_prints_plots_and_serialises(tmp_path):
    scores = np.array([[[1.0], [2.0]], [[4.0], [np.inf]]])
    curves = np.array([[[[3.0, 1.0]], [[3.0, 2.0]]], [[[3.0, 1e250]], [[3.0, np.nan]]]])
    report = SensitivityReport(
        (0.1, 1.0), (10.0, 100.0), (7,), scores, np.full((2, 2, 1), 2.5), curves, {(1.0, 100.0, 7): "SolverError: no"}
    )
    assert (report.best.alpha, report.best.beta, report.best.score) == (0.1, 10.0, 1.0)
    assert (report.worst.alpha, report.worst.beta, report.worst.score) == (1.0, 100.0, math.inf)
    assert (report.median, report.spread) == (3.0, math.inf)
    lines = str(report).splitlines()
    assert lines[0] == "sensitivity to the first steps: mean score over 1 seed, 2 iterations a run"
    assert lines[3].split() == ["1", "4", "inf"]
    assert lines[-1] == "  failed: alpha 1, beta 100, seed 7: SolverError: no"
    figure = report.plot(tmp_path / "report.png")
    assert (tmp_path / "report.png").stat().st_size > 1000
    assert len(figure.axes) == 3  # heat map, curves, colour bar
    stored = json.loads(json.dumps(report.to_dict(), allow_nan=False))
    assert stored["scores"] == [[[1.0], [2.0]], [[4.0], ["inf"]]]
    assert stored["curves"][1][1][0] == [3.0, None]
    assert stored["failures"][0]["reason"] == "SolverError: no"


def flat_report(scores):
    scores = np.asarray(scores, dtype=float)[..., None]
    return SensitivityReport(
        tuple(10.0**i for i in range(scores.shape[0])),
        tuple(10.0**j for j in range(scores.shape[1])),
        (0,),
        scores,
        np.ones_like(scores),
        np.linspace(3.0, 1.0, 6) * np.ones((*scores.shape, 6)),
    )


def colours(report):
    image = report.plot().axes[0].images[0]
    return image.cmap(image.norm(image.get_array()))


def test_the_colours_of_the_map_do_not_depend_on_how_close_the_scores_are():
    near, far = flat_report([[1.0, 1.02], [1.01, 1.005]]), flat_report([[1.0, 12.0], [3.0, 1.005]])
    assert np.ptp(colours(near).reshape(-1, 4), axis=0).max() < 0.02  # 2 % apart: one colour
    assert np.ptp(colours(far).reshape(-1, 4), axis=0).max() > 0.5
    for report in (near, far, flat_report([[5e-9, 6e-9]])):
        figure = report.plot()
        assert figure.axes[0].images[0].get_clim() == (1.0, 10.0)
        assert figure.axes[2].get_ylabel() == "score / best score (smaller is better)"


@pytest.mark.parametrize(
    "scores",
    [[[0.0, 0.0]], [[0.0, 2.0]], [[-3.0, -2.9]], [[-3.0, 5.0]], [[1.0, np.inf]], [[np.inf, np.inf]]],
    ids=["zero", "from zero", "below zero", "across zero", "one failed", "all failed"],
)
def test_every_score_has_a_colour(scores, tmp_path):
    report = flat_report(scores)
    figure = report.plot(tmp_path / "map.png")
    shown = np.ma.filled(figure.axes[0].images[0].get_array(), np.nan)
    assert (np.isnan(shown) == ~np.isfinite(report.means)).all()
    if np.isfinite(report.means).any():
        assert np.nanmin(shown) == 1.0
    assert [text.get_text() == "failed" for text in figure.axes[0].texts] == (
        ~np.isfinite(report.means)
    ).ravel().tolist()
