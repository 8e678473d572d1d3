"""A lower level inside a box: a start on the bound is left, and what sits there does not follow. The lasso, w = u - v."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from sklearn.linear_model import Lasso

import bisls
from bisls.batches import Minibatches, Sample
from bisls.lower.newton import Newton

ROWS, COLUMNS = 80, 12
TRAIN, HELD = slice(0, ROWS), slice(ROWS, 2 * ROWS)


def lasso(start: float, penalty: float = -2.0):
    """Weights u - v with u, v >= 0: the L1 norm is their sum, and everything is smooth."""
    generator = torch.Generator().manual_seed(0)
    X = torch.randn(2 * ROWS, COLUMNS, dtype=torch.float64, generator=generator)
    y = X[:, :3].sum(1) + 0.5 * torch.randn(2 * ROWS, dtype=torch.float64, generator=generator)
    u, v = (torch.full((COLUMNS,), start, dtype=torch.float64, requires_grad=True) for _ in range(2))
    log = torch.tensor([penalty], dtype=torch.float64, requires_grad=True)

    def fit_loss(rows):
        return 0.5 * ((X[rows] @ (u - v) - y[rows]) ** 2).mean()

    problem = bisls.Bilevel(
        fit_loss,
        lambda rows: fit_loss(rows) + log.exp() * (u + v).sum(),
        [log],
        [u, v],
        lower_bounds=bisls.Box(low=0.0),
    )
    return problem, X.numpy(), y.numpy(), log


def held_out(X, y, penalty: float) -> float:
    model = Lasso(alpha=penalty, fit_intercept=False, tol=1e-12, max_iter=100_000).fit(X[TRAIN], y[TRAIN])
    return 0.5 * float(np.mean((X[HELD] @ model.coef_ - y[HELD]) ** 2))


@pytest.mark.parametrize("start", [0.0, 0.1])
@pytest.mark.parametrize("direction", [bisls.Steepest(), bisls.LBFGS()])
def test_a_lower_start_on_its_bound_is_left(start, direction):
    problem, X, y, log = lasso(start)
    solver = bisls.BiSLS(problem, lower_direction=direction, lower_iters=200)
    solver.step(HELD, TRAIN)
    log.data.fill_(-2.0)
    solver.step(HELD, TRAIN)
    reference = Lasso(alpha=float(np.exp(-2.0)), fit_intercept=False, tol=1e-12).fit(X[TRAIN], y[TRAIN]).coef_
    with torch.no_grad():
        log.fill_(-2.0)
    Newton().descend(bisls.Oracle(problem), Minibatches([TRAIN]), problem.y.read(), 0, {})
    u, v = problem.y.tensors
    np.testing.assert_allclose((u - v).detach().numpy(), reference, atol=1e-6)
    assert np.count_nonzero(reference) == 3


@pytest.mark.parametrize("start", [0.0, 0.1])
def test_the_default_finds_the_penalty_of_the_lasso(start):
    problem, X, y, log = lasso(start)
    first = held_out(X, y, float(np.exp(-2.0)))
    solver = bisls.BiSLS(problem)
    records = [solver.step(HELD, TRAIN) for _ in range(15)]
    grid = np.exp(np.linspace(-5, -2, 301))
    values = [held_out(X, y, penalty) for penalty in grid]
    assert first > 1.15 * min(values)
    assert held_out(X, y, log.exp().item()) < min(values) * (1 + 1e-4)
    assert abs(log.item() - np.log(grid[int(np.argmin(values))])) < 0.02
    assert min(record.alpha for record in records[:3]) > 1e-3  # steps, not rounding


def test_what_sits_on_a_bound_does_not_follow():
    problem, *_ = lasso(0.0)
    oracle = bisls.Oracle(problem)
    Newton().descend(oracle, Minibatches([TRAIN]), problem.y.read(), 0, {})
    y = problem.y.read()
    held = y == 0
    assert 0 < int(held.sum()) < len(y)
    solver = bisls.BiSLS(problem, lower_iters=1)
    solver.step(HELD, TRAIN)
    estimate = bisls.Implicit(bisls.CG(iters=50)).estimate(oracle, HELD, TRAIN, {})
    scene = bisls.Scene(
        oracle=oracle,
        method=bisls.Implicit(bisls.CG(iters=50)),
        estimate=estimate,
        search=estimate.flat,
        x=problem.x.read(),
        y=problem.y.read(),
        sample=Sample(HELD, Minibatches([TRAIN])),
        lower=solver.lower,
        lowered=None,
        alpha=1.0,  # so that a difference stands for g_yx d
        max_step=float("inf"),
    )
    now, grad = problem.y.read(), oracle.lower(TRAIN).grad
    held = problem.lower_bounds.held(now, grad, problem.y)
    assert 0 < int(held.sum()) < len(y)
    ray = bisls.Tangent().ray(scene, {})
    moved = ray.follow(0.1) - now
    assert torch.all(moved[held] == 0)
    assert moved[~held].abs().max() > 1e-3
