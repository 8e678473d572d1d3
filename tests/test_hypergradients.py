"""Hypergradients against closed form, in float64, with the norm of the truth far above every tolerance."""

from __future__ import annotations

from math import ceil, log

import pytest
import torch
from problems import CASES, quadratic, ridge

import bisls

EXACT = 1e-8


def error(estimate: torch.Tensor, truth: torch.Tensor) -> float:
    return ((estimate - truth).norm() / truth.norm()).item()


@pytest.fixture(params=CASES, name="case")
def _case(request):
    return CASES[request.param]()


def test_the_truth_is_far_above_the_tolerance(case):
    assert case.hypergradient.norm() > 1e-2
    assert error(torch.zeros_like(case.hypergradient), case.hypergradient) == 1.0


@pytest.mark.parametrize("linear", [bisls.CG(iters=50, tol=1e-13), bisls.CG(iters=50), bisls.Dense()], ids=repr)
def test_exact_solvers_give_the_closed_form(case, linear):
    hg = bisls.hypergradient(case.problem, None, None, bisls.Implicit(linear))
    assert error(hg.flat, case.hypergradient) < EXACT
    assert hg.status is bisls.Status.OK
    assert hg.residual < 1e-9
    assert [g.shape for g in hg.grads] == [p.shape for p in case.problem.x.tensors]
    assert torch.equal(torch.cat([g.reshape(-1) for g in hg.grads]), hg.flat)


def test_parameters_and_grads_are_left_alone(case):
    x, y = case.problem.x.read(), case.problem.y.read()
    for method in (bisls.Implicit(bisls.CG()), bisls.StochasticNeumann(3), bisls.Unrolled(3)):
        bisls.hypergradient(case.problem, None, None, method)
    assert torch.equal(x, case.problem.x.read())
    assert torch.equal(y, case.problem.y.read())
    assert all(p.grad is None and p.requires_grad for p in (*case.problem.x.tensors, *case.problem.y.tensors))


def test_cg_reports_the_residual_of_what_it_returns(case):
    for iters in (1, 2, 5, 9):
        solution = bisls.CG(iters=iters, tol=0.0).solve(lambda v: case.hessian @ v, case.grad_y, {})
        true = (case.grad_y - case.hessian @ solution.z).norm() / case.grad_y.norm()
        assert true > 0
        assert solution.residual == pytest.approx(true.item(), rel=1e-6, abs=1e-15)


def test_cg_solves_the_identity_in_one_iteration():
    b = torch.tensor([3.0, -1.0, 0.5], dtype=torch.float64)
    solution = bisls.CG(iters=1).solve(lambda v: v, b, {})
    assert torch.allclose(solution.z, b, rtol=1e-15)
    assert solution.status is bisls.Status.OK


def test_cg_stops_on_its_tolerance_and_says_when_it_does_not_get_there(case):
    products = []

    def hessian(v):
        products.append(1)
        return case.hessian @ v

    loose = bisls.CG(iters=50, tol=0.5).solve(hessian, case.grad_y, {})
    spent = len(products)
    assert loose.status is bisls.Status.OK
    assert 0.0 < loose.residual <= 0.5
    assert spent <= 5
    assert bisls.CG(iters=2, tol=1e-12).solve(hessian, case.grad_y, {}).status is bisls.Status.MAX_ITERS


def test_cg_warm_start_saves_products(case):
    cold = bisls.CG(iters=50, tol=1e-6, warm=True).solve(lambda v: case.hessian @ v, case.grad_y, {})
    products = []

    def hessian(v):
        products.append(1)
        return case.hessian @ v

    warm = bisls.CG(iters=50, tol=1e-6, warm=True).solve(hessian, case.grad_y, cold.state)
    assert len(products) == 1
    assert warm.residual <= 1e-6


def test_cg_detects_negative_curvature_and_keeps_a_finite_iterate():
    h = torch.diag(torch.tensor([2.0, 1.0, -0.5], dtype=torch.float64))
    solution = bisls.CG(iters=10).solve(lambda v: h @ v, torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64), {})
    assert solution.status is bisls.Status.NEGATIVE_CURVATURE
    assert torch.isfinite(solution.z).all()
    assert "not positive definite" in solution.status.advice


def test_a_linear_solve_that_meets_nan_says_so():
    nan = float("nan")
    b = torch.ones(3, dtype=torch.float64)
    for linear in (bisls.CG(), bisls.Neumann(5), bisls.Neumann(5, scale=0.1), bisls.Dense()):
        solution = linear.solve(lambda v: v * nan, b, {})
        assert solution.status is bisls.Status.NON_FINITE, linear
        assert torch.isfinite(solution.z).all()


def test_dense_names_singular_and_indefinite_systems():
    b = torch.tensor([1.0, 2.0], dtype=torch.float64)
    singular = torch.tensor([[1.0, 1.0], [1.0, 1.0]], dtype=torch.float64)
    assert bisls.Dense().solve(lambda v: singular @ v, b, {}).status is bisls.Status.SINGULAR
    saddle = torch.tensor([[1.0, 2.0], [2.0, 1.0]], dtype=torch.float64)
    solution = bisls.Dense().solve(lambda v: saddle @ v, b, {})
    assert solution.status is bisls.Status.NEGATIVE_CURVATURE
    assert torch.allclose(saddle @ solution.z, b)
    with pytest.raises(ValueError, match=r"`Dense\(max_size=1\)`.*2 numbers; use `CG\(\)`"):
        bisls.Dense(max_size=1).solve(lambda v: v, b, {})


# --- Neumann


def test_neumann_equals_its_definition(case):
    scale = 0.9 / torch.linalg.eigvalsh(case.hessian).max().item()
    eye = torch.eye(len(case.hessian), dtype=torch.float64)
    series = sum(torch.linalg.matrix_power(eye - scale * case.hessian, j) for j in range(7)) * scale
    expected = case.grad_x - case.mixed @ series @ case.grad_y
    hg = bisls.hypergradient(case.problem, None, None, bisls.Implicit(bisls.Neumann(terms=7, scale=scale)))
    assert error(hg.flat, expected) < 1e-10
    assert error(hg.flat, case.hypergradient) > 1e-3  # truncated, so not yet the truth


def test_neumann_error_falls_at_the_rate_its_scale_predicts(case):
    curvatures = torch.linalg.eigvalsh(case.hessian)
    scale = 1.0 / curvatures.max().item()
    rate = 1 - scale * curvatures.min().item()
    exact = torch.linalg.solve(case.hessian, case.grad_y)
    errors = []
    begin = ceil(log(1e-7) / log(rate))
    for terms in (begin, begin + 20):
        z = bisls.Neumann(terms, scale).solve(lambda v: case.hessian @ v, case.grad_y, {}).z
        errors.append(error(z, exact))
    # far into the series the smallest curvature alone decides, so the observed rate is the predicted one
    assert errors[1] > 1e-12
    assert (errors[1] / errors[0]) ** (1 / 20) == pytest.approx(rate, rel=1e-3)


def test_neumann_finds_its_scale_and_converges(case):
    linear = bisls.Neumann(terms=1500)
    hg = bisls.hypergradient(case.problem, None, None, bisls.Implicit(linear))
    assert error(hg.flat, case.hypergradient) < EXACT
    assert hg.residual < 1e-8


def test_neumann_curvature_is_warm_started(case):
    products = []

    def hessian(v):
        products.append(1)
        return case.hessian @ v

    first = bisls.Neumann(terms=3).solve(hessian, case.grad_y, {})
    cold = len(products)
    bisls.Neumann(terms=3).solve(hessian, case.grad_y, first.state)
    assert len(products) - cold < cold


def test_a_diverging_series_is_detected(case):
    scale = 3.0 / torch.linalg.eigvalsh(case.hessian).max().item()
    solution = bisls.Neumann(terms=200, scale=scale).solve(lambda v: case.hessian @ v, case.grad_y, {})
    assert solution.status is bisls.Status.DIVERGED
    assert torch.isfinite(solution.z).all()
    assert "smaller scale" in solution.status.advice


# --- Identity, Unrolled, StochasticNeumann: equal to their definitions


@pytest.mark.parametrize("scale", [1.0, 0.03])
def test_identity_equals_its_definition(case, scale):
    hg = bisls.hypergradient(case.problem, None, None, bisls.Implicit(bisls.Identity(scale)))
    assert error(hg.flat, case.grad_x - scale * case.mixed @ case.grad_y) < 1e-12
    assert error(hg.flat, case.hypergradient) > 1e-2


def test_unrolled_equals_autograd_through_the_steps():
    # the same steps, written with differentiable tensors in place of the problem's parameters
    def build(x, y):
        h = torch.tensor([[3.0, 0.4], [0.4, 1.2]], dtype=torch.float64)

        def lower():
            gap = y - torch.stack([x[0] * x[1], x[0] ** 2])
            return 0.5 * gap @ h @ gap + 0.1 * (y**4).sum()

        return lower, lambda: ((y - 1.7) ** 2).sum() * x[1]

    x0, y0 = torch.tensor([0.7, -1.3], dtype=torch.float64), torch.tensor([0.4, 2.0], dtype=torch.float64)
    step = 0.11
    x, y = x0.clone().requires_grad_(), y0.clone().requires_grad_()
    lower, upper = build(x, y)
    problem = bisls.Bilevel(lambda _: upper(), lambda _: lower(), [x], [y])
    hg = bisls.hypergradient(problem, None, None, bisls.Unrolled(iters=6, step=step))

    xt, yt = x0.clone().requires_grad_(), y0.clone().requires_grad_()
    for _ in range(6):
        (g,) = torch.autograd.grad(build(xt, yt)[0](), yt, create_graph=True)
        yt = yt - step * g
    value = build(xt, yt)[1]()
    (truth,) = torch.autograd.grad(value, xt)
    assert truth.norm() > 0.1
    assert error(hg.flat, truth) < 1e-12
    assert hg.value == pytest.approx(value.item(), rel=1e-12)
    assert torch.equal(y, y0)


@pytest.mark.slow
def test_unrolled_finds_its_step_and_tends_to_the_truth(case):
    hg = bisls.hypergradient(case.problem, None, None, bisls.Unrolled(iters=1200))
    assert error(hg.flat, case.hypergradient) < 1e-6


@pytest.mark.slow
def test_the_mean_of_stochastic_neumann_is_its_expectation():
    case = ridge()
    smoothness, terms, draws = 1.2 * torch.linalg.eigvalsh(case.hessian).max().item(), 12, 4000
    eye = torch.eye(len(case.hessian), dtype=torch.float64)
    series = sum(torch.linalg.matrix_power(eye - case.hessian / smoothness, j) for j in range(terms)) / smoothness
    expected = case.grad_x - case.mixed @ series @ case.grad_y
    torch.manual_seed(0)
    method = bisls.StochasticNeumann(terms, smoothness)
    samples = torch.stack([bisls.hypergradient(case.problem, None, None, method).flat for _ in range(draws)])
    deviation = samples.mean(0) - expected
    spread = samples.std(0) / draws**0.5
    assert expected.norm() > 10 * spread.norm()  # zero is far outside
    assert (deviation.abs() <= 3 * spread).all()


def test_stochastic_neumann_draws_a_fresh_batch_for_every_factor():
    x = torch.tensor([0.3, -0.4], dtype=torch.float64, requires_grad=True)
    y = torch.tensor([1.0, 2.0], dtype=torch.float64, requires_grad=True)
    problem = bisls.Bilevel(
        lambda _: ((y - 3.0) ** 2).sum(), lambda scale: 0.5 * scale * ((y - x) ** 2).sum(), [x], [y]
    )
    batches = [1.0, 0.5, 0.25, 0.8, 0.9, 0.7]
    expected = {}
    for length in range(4):
        factor = 4 / 2.0
        for scale in batches[1 : 1 + length]:
            factor *= 1 - scale / 2.0
        expected[length] = factor * batches[0] * 2 * (y - 3.0).detach()  # minus mixed = + scale_0
    seen = set()
    torch.manual_seed(1)
    for _ in range(40):
        stream = iter(batches)
        hg = bisls.hypergradient(problem, None, stream, bisls.StochasticNeumann(4, smoothness=2.0))
        length = len(batches) - len(list(stream)) - 1
        assert torch.allclose(hg.flat, expected[length], rtol=1e-12)
        seen.add(length)
    assert seen == {0, 1, 2, 3}


# --- what it costs


@pytest.mark.parametrize("iters", [1, 4, 7])
def test_counts_of_a_cg_hypergradient(iters):
    case = quadratic()
    calls = {"upper": 0, "lower": 0}
    upper, lower = case.problem.upper_loss, case.problem.lower_loss

    def counted(name, loss):
        def call(batch):
            calls[name] += 1
            return loss(batch)

        return call

    case.problem.upper_loss, case.problem.lower_loss = counted("upper", upper), counted("lower", lower)
    oracle = bisls.Oracle(case.problem)
    bisls.Implicit(bisls.CG(iters=iters, tol=0.0)).estimate(oracle, None, None, {})
    assert oracle.cost == bisls.Cost(upper_gradients=1, lower_graphs=1, hessian_products=iters, mixed_products=1)
    assert calls == {"upper": 1, "lower": 1}  # the losses themselves were run once each


def test_both_mixed_products_are_each_others_transpose(case):
    graph = bisls.Oracle(case.problem).lower_graph(None)
    v = torch.linspace(-1, 2, case.problem.y.numel, dtype=torch.float64)
    d = torch.linspace(3, -1, case.problem.x.numel, dtype=torch.float64)
    assert torch.allclose(graph.mixed(v), case.mixed @ v, rtol=1e-10)
    assert torch.allclose(graph.mixed_transposed(d), case.mixed.T @ d, rtol=1e-10)
    assert torch.allclose(graph.hessian(v), case.hessian @ v, rtol=1e-10)


# --- check_hypergradient


@pytest.mark.slow
def test_check_passes_the_right_and_fails_the_wrong(case):
    case.problem.y.write_(case.problem.y.read() + 0.3)  # it solves the lower problem by itself
    before = case.problem.x.read(), case.problem.y.read()
    right = bisls.check_hypergradient(case.problem, None, None, bisls.Implicit(bisls.CG(tol=1e-12)))
    assert right.passed
    assert right.relative_error < 1e-6
    assert right.lower_grad_norm < 1e-10
    assert 1.7 < right.rate < 2.3
    assert "passed" in str(right)
    for wrong in (bisls.Implicit(bisls.Identity(0.5)), bisls.Implicit(bisls.CG(iters=1)), bisls.Unrolled(1)):
        report = bisls.check_hypergradient(case.problem, None, None, wrong)
        assert not report.passed
        assert report.relative_error > 1e-3
        assert "FAILED" in str(report)
        assert "advice" in str(report)
    assert torch.equal(before[0], case.problem.x.read())
    assert torch.equal(before[1], case.problem.y.read())


class Zero:
    """A method that claims that the hypergradient is zero."""

    def estimate(self, oracle, upper_batch, lower_batch, state):
        hg = bisls.Implicit(bisls.CG()).estimate(oracle, upper_batch, lower_batch, state)
        flat = torch.zeros_like(hg.flat)
        return bisls.Hypergradient(
            hg.value, flat, oracle.problem.x.split(flat), 0.0, bisls.Status.OK, hg.lower_grad_norm
        )


@pytest.mark.slow
def test_check_fails_a_zero_estimate(case):
    report = bisls.check_hypergradient(case.problem, None, None, Zero())
    assert not report.passed
    assert report.relative_error > 0.5


@pytest.mark.slow
def test_check_works_in_single_precision_with_dropout_and_batchnorm():
    torch.manual_seed(3)
    body = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.BatchNorm1d(8), torch.nn.Tanh(), torch.nn.Dropout(0.2))
    head = torch.nn.Linear(8, 1)
    data, target = torch.randn(64, 6), torch.randn(64, 1)

    def lower(_):
        out = head(body(data[:32])) - target[:32]
        return (out**2).mean() + 0.1 * sum((p**2).sum() for p in head.parameters())

    problem = bisls.Bilevel(
        lambda _: ((head(body(data[32:])) - target[32:]) ** 2).mean(), lower, body.parameters(), head.parameters()
    )
    mean = body[1].running_mean.clone()
    report = bisls.check_hypergradient(problem, None, None, bisls.Implicit(bisls.CG(iters=30, tol=1e-6)))
    assert report.passed, str(report)
    assert torch.equal(mean, body[1].running_mean)
    assert not bisls.check_hypergradient(problem, None, None, bisls.Implicit(bisls.Identity(0.1))).passed


def test_check_sees_a_component_that_is_missing_in_many():
    # the classic slip: a .detach() in the lower loss, so that half of the upper parameters lose their hypergradient
    def check(cut):
        a = torch.linspace(-1, 1, 3000).requires_grad_()
        b = torch.linspace(0, 2, 3000).requires_grad_()
        y = torch.zeros(3000, requires_grad=True)

        def lower(_):
            return ((y - a - torch.cos((b.detach() if cut else b) + 1)) ** 2).sum() + 0 * b.sum()

        problem = bisls.Bilevel(lambda _: ((y - 1) ** 2).mean(), lower, [a, b], [y])
        if not cut:
            return bisls.check_hypergradient(problem, None, None, bisls.Implicit(bisls.CG()))
        whole = bisls.Bilevel(
            lambda _: ((y - 1) ** 2).mean(), lambda _: ((y - a - torch.cos(b + 1)) ** 2).sum(), [a, b], [y]
        )
        return bisls.check_hypergradient(whole, None, None, Lacking(problem))

    assert check(cut=False).passed
    report = check(cut=True)
    assert not report.passed
    assert report.relative_error > 0.2


class Lacking:
    """The hypergradient of another problem."""

    def __init__(self, other):
        self.other = other

    def estimate(self, oracle, upper_batch, lower_batch, state):
        return bisls.hypergradient(self.other, upper_batch, lower_batch, bisls.Implicit(bisls.CG()))


def test_check_survives_a_loss_that_is_infinite_a_long_step_away():
    x = torch.tensor([0.005, 1.0], dtype=torch.float64, requires_grad=True)
    y = torch.zeros(2, dtype=torch.float64, requires_grad=True)
    problem = bisls.Bilevel(lambda _: (y**2).sum() - 1e-3 * x.log().sum(), lambda _: ((y - x) ** 2).sum(), [x], [y])
    report = bisls.check_hypergradient(problem, None, None, bisls.Implicit(bisls.CG()))
    assert max(row[2] for row in report.rows) == float("inf")
    assert report.passed, str(report)


def test_unrolled_sees_the_same_dropout_masks_on_the_way_back():
    x, y = torch.ones(6, requires_grad=True), torch.full((6,), 2.0, requires_grad=True)
    masks = []

    def lower(_):
        masks.append(torch.nn.functional.dropout(torch.ones(6), 0.5))
        return (masks[-1] * (y - x) ** 2).sum()

    problem = bisls.Bilevel(lambda _: (y**3).sum(), lower, [x], [y])
    bisls.hypergradient(problem, None, None, bisls.Unrolled(3, step=0.05))
    there, back = masks[:3], masks[3:]
    assert not torch.equal(there[0], there[1])
    assert all(torch.equal(a, b) for a, b in zip(there, reversed(back), strict=True))


def test_slips_in_the_call_are_answered():
    case = quadratic()
    with pytest.raises(ValueError, match=r"wrap the linear solver: `Implicit\(CG\("):
        bisls.hypergradient(case.problem, None, None, bisls.CG())
    with pytest.raises(ValueError, match="the iterator ran out of batches"):
        bisls.hypergradient(case.problem, None, iter([None]), bisls.Unrolled(3, step=0.01))
    case.problem.x.tensors[1].requires_grad_(False)
    with pytest.raises(ValueError, match=r"upper_params=...\)`: tensor 1 .* no longer requires grad"):
        bisls.hypergradient(case.problem, None, None, bisls.Implicit(bisls.CG()))


def test_neumann_says_when_the_curvature_is_negative():
    h = torch.diag(torch.tensor([2.0, 1.0, -0.9], dtype=torch.float64))
    solution = bisls.Neumann(200).solve(lambda v: h @ v, torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64), {})
    assert solution.status is bisls.Status.NEGATIVE_CURVATURE


def test_cg_goes_on_where_its_solution_is_too_rough_and_still_ends():
    spectrum = torch.logspace(-4, 0, 60, dtype=torch.float64)
    b, products = torch.ones(60, dtype=torch.float64), []

    def hessian(v):
        products.append(v)
        return spectrum * v

    short = bisls.CG(iters=20, tol=1e-3).solve(hessian, b, {})
    assert short.residual > 1e-2
    assert len(products) == 20
    products.clear()
    long = bisls.CG(iters=20, tol=1e-3, stretch=10).solve(hessian, b, {})
    assert long.residual <= 1e-2
    assert 20 < len(products) <= 200
    products.clear()
    spectrum = torch.logspace(-9, 0, 60, dtype=torch.float32)  # hopeless in single precision
    bisls.CG(iters=20, tol=1e-3, stretch=10).solve(hessian, b.float(), {})
    assert len(products) <= 200


def test_damped_cg_solves_where_the_hessian_is_not_positive_definite():
    spectrum = torch.tensor([-0.5, 0.1, 1.0, 3.0, 10.0], dtype=torch.float64)
    b, products = torch.linspace(1, 2, 5, dtype=torch.float64), []

    def hessian(v):
        products.append(v)
        return spectrum * v

    cut = bisls.CG(iters=50).solve(hessian, b, {})
    solution = bisls.CG(iters=50, damp=True).solve(hessian, b, {})
    assert cut.status is bisls.Status.NEGATIVE_CURVATURE
    assert solution.status is bisls.Status.DAMPED
    assert cut.status.failed
    assert not solution.status.failed
    damping = float(solution.state["damping"])
    assert damping > 0.5  # enough for H + s I to be positive definite
    torch.testing.assert_close(solution.z, b / (spectrum + damping), rtol=1e-6, atol=0)
    assert torch.dot(solution.z, b) > 0  # a descent direction, whatever the curvature
    assert len(products) < 150
    # the next solve begins with half of it, and a Hessian that has become positive definite is soon solved undamped
    spectrum = spectrum.abs()
    state = solution.state
    for _ in range(60):
        solution = bisls.CG(iters=50, damp=True).solve(hessian, b, state)
        state = solution.state
    assert solution.status is bisls.Status.OK
    torch.testing.assert_close(solution.z, b / spectrum, rtol=1e-6, atol=0)
