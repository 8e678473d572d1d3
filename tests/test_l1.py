"""A lower problem with an L1 term: solved by coordinate descent, exact zeros, a hypergradient on what is not zero."""

from __future__ import annotations

import copy
import io

import numpy as np
import pytest
import torch
from sklearn.linear_model import ElasticNet, Lasso

import bisls
from bisls.batches import Minibatches
from bisls.sklearn import WeightedLassoCV
from bisls.status import Status

ROWS = 80
TRAIN, HELD = slice(0, ROWS), slice(ROWS, 2 * ROWS)
EXACT = bisls.Implicit(bisls.Dense())


def table(columns: int, seed: int = 0, strong: int = 3, rows: int = ROWS):
    """Centred columns of size 1, the first of them of influence."""
    generator = torch.Generator().manual_seed(seed)
    X = torch.randn(2 * rows, columns, dtype=torch.float64, generator=generator)
    y = X[:, :strong].sum(1) + 0.5 * torch.randn(2 * rows, dtype=torch.float64, generator=generator)
    X, y = X - X.mean(0), y - y.mean()
    return X / X.std(0, unbiased=False), y / y.std(unbiased=False)


def lasso(X, y, groups, penalty: float, ridge: float = 0.0, dtype=torch.float64):
    """A weight a group of columns."""
    X, y, count = X.to(dtype), y.to(dtype), int(max(groups)) + 1
    log = torch.full((count,), penalty, dtype=dtype, requires_grad=True)
    w = torch.zeros(X.shape[1], dtype=dtype, requires_grad=True)
    index = torch.as_tensor(groups)

    def fit_loss(rows):
        return 0.5 * ((X[rows] @ w - y[rows]) ** 2).mean()

    def below(rows):
        return fit_loss(rows) + 0.5 * ridge * (w**2).sum()

    problem = bisls.Bilevel(fit_loss, below, [log], [w], lower_l1=lambda: log.exp()[index])
    return problem, log, w


def solve(problem, batch=TRAIN, state=None, **settings):
    part = bisls.CoordinateDescent(**settings)
    return part.descend(bisls.Oracle(problem), Minibatches([batch]), problem.y.read(), 0, state or {})


def reference(X, y, penalty: float, ratio: float = 1.0):
    model = ElasticNet(alpha=penalty, l1_ratio=ratio, fit_intercept=False, tol=1e-15, max_iter=10**6)
    return model.fit(X[TRAIN].numpy(), y[TRAIN].numpy()).coef_


@pytest.mark.parametrize("columns", [12, 120])  # fewer and more than rows
def test_the_solution_is_that_of_the_lasso_from_zero_and_from_where_others_were(columns):
    X, y = table(columns)
    problem, log, w = lasso(X, y, [0] * columns, -2.0)
    state, sizes = {}, []
    for penalty in (-1.0, -3.0, -5.0, -2.0, -0.8):  # columns come and go
        with torch.no_grad():
            log.fill_(penalty)
        done = solve(problem, state=state)
        state = done.state
        expected = reference(X, y, float(np.exp(penalty)))
        assert done.status is Status.OK
        np.testing.assert_allclose(w.detach().numpy(), expected, atol=1e-8)
        np.testing.assert_array_equal(w.detach().numpy() == 0, expected == 0)
        sizes.append(np.count_nonzero(expected))
    assert 0 < sizes[0] < sizes[1] < sizes[2] > sizes[3] >= sizes[4] > 0


def test_an_elastic_net_has_its_square_in_the_lower_loss():
    X, y = table(30)
    alpha, ratio = 0.1, 0.6
    problem, _, w = lasso(X, y, [0] * 30, float(np.log(alpha * ratio)), ridge=alpha * (1 - ratio))
    solve(problem)
    np.testing.assert_allclose(w.detach().numpy(), reference(X, y, alpha, ratio), atol=1e-8)


def logistic(columns: int = 20, penalty: float = -3.0):
    """Classes, an intercept of no weight, and a tensor of another shape."""
    X, y = table(columns)
    labels = (y > 0).double()
    log = torch.full((2,), penalty, dtype=torch.float64, requires_grad=True)
    w = torch.zeros(columns // 2, 2, dtype=torch.float64, requires_grad=True)
    b = torch.zeros(1, dtype=torch.float64, requires_grad=True)

    def loss(rows):
        eta = X[rows] @ w.reshape(-1) + b + 0.3
        return torch.nn.functional.binary_cross_entropy_with_logits(eta, labels[rows])

    return bisls.Bilevel(loss, loss, [log], [w, b], lower_l1=lambda: [log.exp(), 0.0]), log, w, b


def test_a_loss_that_is_no_quadratic_is_solved_to_its_conditions():
    problem, log, w, b = logistic()
    done = solve(problem)
    assert done.status is Status.OK
    assert 2 <= done.steps <= 12
    w_slope, b_slope = torch.autograd.grad(problem.lower_loss(TRAIN), [w, b])  # of what is zero without the L1 term
    held = w == 0
    assert 3 < int(held.sum()) < w.numel() - 3
    assert w_slope[~held].abs().max() < 1e-9
    assert b_slope.abs().max() < 1e-9
    assert abs(b.item()) > 1e-3
    assert bool((w_slope.abs() <= log.exp().detach() * (1 + 1e-9))[held].all())
    before = solve(problem)
    assert before.steps == 0  # it is there already


@pytest.mark.parametrize(
    "made",
    [
        lambda: lasso(*table(12), [0] * 4 + [1] * 8, -3.0)[0],
        lambda: lasso(*table(120, strong=10), [0] * 20 + [1] * 100, -3.0, ridge=0.01)[0],
        lambda: logistic()[0],
    ],
    ids=["lasso", "elastic net, more columns than rows", "classes"],
)
def test_the_hypergradient_is_that_of_finite_differences(made):
    problem = made()
    solve(problem)
    report = bisls.check_hypergradient(problem, HELD, TRAIN, EXACT, tolerance=1e-6)
    assert report.passed, report
    assert report.hypergrad_norm > 1e-3


def test_what_is_held_at_zero_does_not_respond():
    problem, log, w = lasso(*table(12), [0] * 12, -1.0)
    solve(problem)
    graph = bisls.Oracle(problem).lower_graph(TRAIN)
    held = (w == 0).detach()
    assert 0 < int(held.sum()) < 12
    v = torch.ones(12, dtype=torch.float64)
    assert torch.equal(graph.hessian(v)[held], v[held])
    assert torch.all(graph.mixed_transposed(torch.ones(1, dtype=torch.float64))[held] == 0)
    everything = graph.unheld.hessian.matrix()
    X = table(12)[0][TRAIN]
    torch.testing.assert_close(everything, X.T @ X / ROWS)
    assert log.grad is None


def test_the_default_ends_where_the_estimator_ends():
    groups = [0] * 15 + [1] * 15
    X, y = table(30, seed=3, strong=0)
    generator = torch.Generator().manual_seed(7)
    shares = torch.zeros(30, dtype=torch.float64)
    shares[:6], shares[15:17] = 0.6, 0.3
    y = X @ shares + torch.randn(len(X), dtype=torch.float64, generator=generator)
    y = (y - y.mean()) / y.std(unbiased=False)
    rows = np.arange(2 * ROWS)
    model = WeightedLassoCV(
        groups, spread=np.inf, cv=[(rows[TRAIN], rows[HELD])], fit_intercept=False, standardize=False, tol=1e-12
    ).fit(X.numpy(), y.numpy())
    problem, log, _ = lasso(X, y, groups, -5.0)
    solver = bisls.BiSLS(problem)
    for _ in range(40):
        record = solver.step(HELD, TRAIN)
    assert record.upper_value == pytest.approx(model.cv_loss_ / 2, rel=1e-5)
    theirs = np.log(list(model.group_penalties_.values()))
    np.testing.assert_allclose(log.detach().numpy(), theirs, atol=0.02)
    assert abs(theirs[0] - theirs[1]) > 0.1


def test_a_run_that_is_resumed_is_the_same_run(tmp_path):
    def run(steps, resume=False):
        problem, log, w = lasso(*table(40, strong=8), [0] * 10 + [1] * 30, -2.0)
        bisls.fit(
            bisls.BiSLS(problem),
            lambda: HELD,
            lambda: TRAIN,
            steps=steps,
            progress=False,
            checkpoint=bisls.Checkpoint(tmp_path / f"run-{resume}.pt", every=1) if resume else None,
            resume=resume,
        )
        return log.detach().clone(), w.detach().clone()

    whole = run(9)
    run(4, resume=True)
    again = run(9, resume=True)
    assert all(torch.equal(one, two) for one, two in zip(whole, again, strict=True))
    assert not torch.equal(whole[0], run(4)[0])


@pytest.mark.slow
def test_more_coordinates_than_a_matrix_is_written_out_for():
    X, y = table(1100, strong=5)
    problem, log, w = lasso(X, y, [0] * 1100, -1.5)
    done = solve(problem)
    np.testing.assert_allclose(w.detach().numpy(), reference(X, y, float(np.exp(-1.5))), atol=1e-8)
    assert done.state["hessian"] is None
    assert bisls.check_hypergradient(problem, HELD, TRAIN, EXACT, directions=1).passed
    assert log.grad is None


def test_single_precision_is_solved_as_far_as_it_goes():
    X, y = table(30)
    problem, _, w = lasso(X, y, [0] * 30, -2.0, dtype=torch.float32)
    done = solve(problem)
    assert done.status is Status.OK
    np.testing.assert_allclose(w.detach().numpy(), reference(X, y, float(np.exp(-2.0))), atol=1e-6)


def test_columns_that_are_alike_are_solved_and_a_saddle_is_said():
    X, y = table(10)
    X[:, 5:] = X[:, :5]
    problem, log, w = lasso(X, y, [0] * 10, -3.0)
    assert solve(problem).status is Status.OK
    total = (w[:5] + w[5:]).detach().numpy()
    expected = Lasso(alpha=float(np.exp(-3.0)), fit_intercept=False, tol=1e-15).fit(X[TRAIN, :5], y[TRAIN]).coef_
    np.testing.assert_allclose(total, expected, atol=1e-7)

    v = torch.zeros(2, dtype=torch.float64, requires_grad=True)
    saddle = bisls.Bilevel(
        lambda _: (v**2).sum(), lambda _: -((v - 1) ** 2).sum(), [log], [v], lower_l1=lambda: log.exp()[0]
    )
    done = solve(saddle, batch=None)
    assert done.status is Status.NEGATIVE_CURVATURE
    assert torch.equal(done.y, torch.zeros(2, dtype=torch.float64))


def test_what_does_not_fit_is_refused_with_what_would():
    problem, log, w = lasso(*table(6), [0] * 6, -2.0)
    plain = bisls.Bilevel(
        problem.upper_loss, lambda rows: problem.upper_loss(rows) + log.exp()[0] * (w**2).sum(), [log], [w]
    )
    with pytest.raises(ValueError, match=r"`BiSLS\(lower_optimizer=CoordinateDescent.*lower_l1"):
        bisls.BiSLS(plain, lower_optimizer=bisls.CoordinateDescent())
    with pytest.raises(ValueError, match=r"`BiSPS\(problem=...\)`.*lower_optimizer=CoordinateDescent\(\)"):
        bisls.BiSPS(problem)
    with pytest.raises(ValueError, match=r"`BiSLS\(problem=...\)`.*CoordinateDescent"):
        bisls.BiSLS(problem, lower_optimizer=torch.optim.SGD([w], lr=0.1))
    for method in (bisls.Unrolled(), bisls.Lookahead()):
        with pytest.raises(ValueError, match=r"`BiSLS\(hypergrad=.*Implicit\(CG\(\)\)"):
            bisls.BiSLS(problem, hypergrad=method)
    with pytest.raises(ValueError, match=r"`hypergradient\(method=Unrolled"):
        bisls.hypergradient(problem, HELD, TRAIN, bisls.Unrolled())
    with pytest.raises(ValueError, match="one batch, and was given 2 different ones"):
        bisls.BiSLS(problem).step(HELD, [slice(0, 40), slice(40, 80)])
    with pytest.raises(ValueError, match=r"lower_l1=..., lower_bounds=...\)`.*u - v"):
        bisls.Bilevel(
            problem.upper_loss, problem.upper_loss, [log], [w], lower_l1=lambda: 1.0, lower_bounds=bisls.Box()
        )
    with pytest.raises(ValueError, match=r"`Bilevel\(lower_l1=0.1\)`: lower_l1 must be a function of nothing"):
        bisls.Bilevel(problem.upper_loss, problem.upper_loss, [log], [w], lower_l1=0.1)
    for weights, words in (
        (lambda: -log.exp(), "must be at least 0, and one is -0.135"),
        (lambda: torch.ones(4), r"shape \(4,\), which do not go with a lower parameter of shape \(6,\)"),
        (lambda: [1.0, 2.0], "returned 2 weights; lower_params has 1 tensors"),
    ):
        wrong = bisls.Bilevel(problem.upper_loss, problem.upper_loss, [log], [w], lower_l1=weights)
        with pytest.raises(ValueError, match=words):
            bisls.BiSLS(wrong).step(HELD, TRAIN)
    noisy = bisls.Bilevel(
        problem.upper_loss,
        lambda rows: problem.upper_loss(rows) + (torch.randn(6, dtype=torch.float64) * w).sum(),
        [log],
        [w],
        lower_l1=lambda: log.exp()[0],
    )
    with pytest.raises(ValueError, match="draws random numbers"):
        bisls.BiSLS(noisy).step(HELD, TRAIN)


def test_other_methods_solve_by_it_when_they_are_told():
    for make in (
        lambda p, part: bisls.BiSLS.paper(p, lower_optimizer=part),
        lambda p, part: bisls.BiSPS(p, lower_optimizer=part),
        lambda p, part: bisls.Alternating(p, upper_step=bisls.Constant(0.3), lower_optimizer=part),
        lambda p, part: bisls.BiSLS(p, lower_optimizer=part, response=bisls.Tangent()),
    ):
        problem, log, _ = lasso(*table(12), [0] * 12, -1.0)
        solver = make(problem, bisls.CoordinateDescent())
        records = [solver.step(HELD, TRAIN) for _ in range(15)]
        assert records[-1].upper_value < 0.9 * records[0].upper_value
        assert log.item() < -1.3
        assert all(record.lower_grad_norm < 1e-9 for record in records)


class Wrapped(bisls.lower.LowerPart):
    """Somebody else's, around one of ours."""

    solves_kinks = True

    def __init__(self, part):
        self.part = part

    def descend(self, *arguments, **settings):
        return self.part.descend(*arguments, **settings)

    def rerun(self, *arguments):
        return self.part.rerun(*arguments)

    def keeps(self, y):
        return self.part.keeps(y)


def test_in_a_wrapper_and_with_a_state_from_a_file_it_does_the_same():
    runs = []
    for part in (bisls.CoordinateDescent(), Wrapped(bisls.CoordinateDescent())):
        problem, log, _ = lasso(*table(12), [0] * 6 + [1] * 6, -2.0)
        solver = bisls.BiSLS(problem, lower_optimizer=part)
        records = [repr(solver.step(HELD, TRAIN)) for _ in range(5)]
        runs.append((records, log.tolist()))
        file = io.BytesIO()
        torch.save(solver.state_dict(), file)
        file.seek(0)
        other = bisls.BiSLS(problem, lower_optimizer=part)
        other.load_state_dict(torch.load(file, weights_only=True))
        kept = copy.deepcopy((problem.x.read(), problem.y.read()))
        went = repr(solver.step(HELD, TRAIN))
        problem.x.write_(kept[0])
        problem.y.write_(kept[1])
        assert repr(other.step(HELD, TRAIN)) == went
    assert runs[0] == runs[1]

    class Silent(Wrapped):
        solves_kinks = False

    with pytest.raises(ValueError, match="CoordinateDescent"):
        bisls.BiSLS(lasso(*table(6), [0] * 6, -2.0)[0], lower_optimizer=Silent(bisls.CoordinateDescent()))


def test_values_that_are_not_finite_leave_y_where_it_was():
    problem, log, w = lasso(*table(6), [0] * 6, -2.0)
    solve(problem)
    before = w.detach().clone()
    with torch.no_grad():
        log.fill_(float("inf"))
    done = solve(problem)
    assert done.status is Status.NON_FINITE
    assert torch.equal(w.detach(), before)


def test_a_problem_with_an_l1_term_can_be_copied():
    problem, log, w = lasso(*table(6), [0] * 6, -2.0)
    assert copy.copy(problem).lower_l1 is problem.lower_l1
    value = problem.lower_loss(TRAIN).item()
    with torch.no_grad():
        w += 1.0
    assert problem.lower_loss(TRAIN).item() == pytest.approx(
        problem.upper_loss(TRAIN).item() + 6 * log.exp().item(), rel=1e-12
    )
    assert value != problem.lower_loss(TRAIN).item()
