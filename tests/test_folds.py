"""The upper loss by cross-validation: what it is, fold by fold, and what it is good for."""

from __future__ import annotations

import pytest
import torch
from sklearn.linear_model import Ridge

import bisls

ROWS, COLUMNS = 60, 12


def made(folds=5, prior=None, seed=0, log=0.0):
    generator = torch.Generator().manual_seed(0)
    X = torch.randn(ROWS, COLUMNS, dtype=torch.float64, generator=generator)
    y = X[:, :2].sum(1) + torch.randn(ROWS, dtype=torch.float64, generator=generator)
    model = torch.nn.Linear(COLUMNS, 1, dtype=torch.float64)
    logs = torch.full((2,), log, dtype=torch.float64, requires_grad=True)
    group = (torch.arange(COLUMNS) >= 2).long()
    tuned = bisls.CrossValidated(
        model,
        loss=lambda outputs, targets: (outputs[:, 0] - targets) ** 2,
        data=(X, y),
        upper_params=[logs],
        penalty=lambda parameters: (logs.exp()[group] * parameters["weight"][0] ** 2).sum(),
        folds=folds,
        prior=prior,
        seed=seed,
    )
    return tuned, model, logs, X, y


def by_hand(tuned, X, y, penalties) -> float:
    """Every fold by scikit-learn."""
    total = 0.0
    for held in tuned.held:
        n = int((~held).sum())
        scale = penalties.exp().sqrt()  # columns divided by the root of their penalty share one
        model = Ridge(alpha=float(n)).fit((X / scale)[~held].numpy(), y[~held].numpy())
        total += float(((model.predict((X / scale)[held].numpy()) - y[held].numpy()) ** 2).sum())
    return total / len(y)


def test_every_row_is_held_out_once():
    tuned, *_ = made(folds=7)
    assert tuned.held.shape == (7, ROWS)
    assert torch.all(tuned.held.sum(0) == 1)
    assert tuned.held.sum(1).max() - tuned.held.sum(1).min() <= 1
    assert not torch.equal(tuned.held, made(folds=7, seed=1)[0].held)


def test_the_upper_loss_is_that_of_the_folds_one_by_one():
    tuned, _, logs, X, y = made(log=-1.0)
    solver = bisls.BiSLS(tuned.problem, upper_step=bisls.Constant(1e-30), lower_iters=300)
    for _ in range(5):
        solver.step(None, None)
    group = (torch.arange(COLUMNS) >= 2).long()
    assert tuned.held_out() == pytest.approx(by_hand(tuned, X, y, logs.detach()[group]), rel=1e-6)


def test_the_hypergradient_passes_its_check():
    tuned, *_ = made(prior=bisls.Spread(0.5))
    with torch.no_grad():
        tuned.problem.x.tensors[0].copy_(torch.tensor([-1.0, 0.5]))
    assert bisls.check_hypergradient(tuned.problem, None, None, bisls.Implicit(bisls.CG(iters=200, tol=1e-12))).passed


def test_tuning_and_training_on_all_rows():
    tuned, model, logs, X, y = made()
    bisls.fit(bisls.BiSLS(tuned.problem), steps=40, progress=False)
    assert logs[1] > logs[0] + 1.0
    tuned.refit()
    group = (torch.arange(COLUMNS) >= 2).long()
    scale = logs.detach().exp()[group].sqrt()
    reference = Ridge(alpha=float(ROWS)).fit((X / scale).numpy(), y.numpy())
    torch.testing.assert_close(model.weight.detach()[0], torch.tensor(reference.coef_) / scale, rtol=1e-5, atol=1e-6)


def test_a_prior_keeps_penalties_together():
    spreads = []
    for prior in (None, bisls.Spread(1.0), bisls.Spread(0.01)):
        tuned, _, logs, *_ = made(prior=prior)
        bisls.fit(bisls.BiSLS(tuned.problem), steps=40, progress=False)
        spreads.append((logs[1] - logs[0]).item())
    assert spreads[0] > spreads[1] > 50 * spreads[2] > 0


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"model": 3}, r"model must be a torch.nn.Module"),
        ({"folds": 1}, r"`CrossValidated\(folds=1\)`"),
        ({"folds": 61}, r"at most the number of rows, 60"),
        ({"loss": lambda outputs, targets: ((outputs[:, 0] - targets) ** 2).mean()}, r"one number a row"),
    ],
)
def test_what_cannot_be_meant_is_refused(change, said):
    X, y, logs = torch.randn(60, 2), torch.randn(60), torch.zeros(1, requires_grad=True)
    arguments = {
        "model": torch.nn.Linear(2, 1),
        "loss": lambda outputs, targets: (outputs[:, 0] - targets) ** 2,
        "data": (X, y),
        "upper_params": [logs],
        "penalty": lambda parameters: (logs.exp() * parameters["weight"] ** 2).sum(),
    }
    with pytest.raises(ValueError, match=said):
        bisls.BiSLS(bisls.CrossValidated(**{**arguments, **change}).problem).step(None, None)


def test_a_spread_that_is_none_is_refused():
    with pytest.raises(ValueError, match=r"`Spread\(width=0\)`: width must be positive"):
        bisls.Spread(0)
    assert bisls.Spread(float("inf"))([torch.tensor([1.0, 5.0])]) == 0
