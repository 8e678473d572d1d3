"""The solver: each composition against the formulas, the responses against differences, failures, boxes, saved state."""

from __future__ import annotations

import io
from contextlib import suppress
from dataclasses import dataclass
from math import inf, isfinite, sqrt

import pytest
import torch
from problems import CASES, lowered, quadratic
from torch import Tensor, nn
from torch.nn import functional

import bisls
from bisls.batches import Minibatches, Sample
from bisls.record import Status
from bisls.response import Scene
from bisls.steps import Memory

EXACT = bisls.Implicit(bisls.CG(iters=200, tol=1e-12))


def toy(noise: float = 0.0, dtype=torch.float64):
    """f = 1/2 ||y - 1 - b||^2 + 0.05 ||x||^2, g = 1/2 (y - Ax)' H (y - Ax): smooth; the batch b shifts both targets."""
    rng = torch.Generator().manual_seed(4)
    matrix = torch.randn(4, 3, generator=rng, dtype=dtype)
    curvature = torch.tensor([1.0, 3.0, 10.0, 30.0], dtype=dtype)
    x = torch.tensor([0.5, -1.0, 2.0], dtype=dtype, requires_grad=True)
    y = torch.tensor([0.1, 0.2, -0.3, 0.4], dtype=dtype, requires_grad=True)

    def shift(batch):
        return 0.0 if batch is None else noise * batch

    problem = bisls.Bilevel(
        lambda b: 0.5 * ((y - 1.0 - shift(b)) ** 2).sum() + 0.05 * (x**2).sum(),
        lambda b: 0.5 * (curvature * (y - matrix @ x - shift(b)) ** 2).sum(),
        [x],
        [y],
    )
    return problem, x, y, matrix


def best(matrix: Tensor) -> float:
    """The least value of F(x) = 1/2 ||Ax - 1||^2 + 0.05 ||x||^2."""
    x = torch.linalg.solve(matrix.T @ matrix + 0.1 * torch.eye(3, dtype=matrix.dtype), matrix.T.sum(1))
    return (0.5 * ((matrix @ x - 1) ** 2).sum() + 0.05 * (x**2).sum()).item()


METHODS = {
    "BiSLS": lambda p: bisls.BiSLS(p),
    "BiSLS steepest": lambda p: bisls.BiSLS(p, direction=bisls.Steepest()),
    "BiSLS L-BFGS": lambda p: bisls.BiSLS(p, direction=bisls.LBFGS()),
    "BiSLS.paper": lambda p: bisls.BiSLS.paper(p),
    "BiSLS.paper SGD": lambda p: bisls.BiSLS.paper(p, direction=bisls.Steepest()),
    "BiSPS": lambda p: bisls.BiSPS(p),
    "BiSPS two samples": lambda p: bisls.BiSPS(p, samples=2),
    "Alternating": lambda p: bisls.Alternating(
        p, upper_step=bisls.Constant(0.05), lower_step=bisls.Constant(0.03), direction=bisls.Steepest()
    ),
    "Alternating Adam": lambda p: bisls.Alternating(
        p, upper_step=bisls.Constant(0.02), lower_step=bisls.Constant(0.03)
    ),
    "upper search only": lambda p: bisls.BiSLS(p, lower_step=bisls.Constant(0.03)),
    "lower search only": lambda p: bisls.BiSLS(p, upper_step=bisls.Constant(0.02), response=bisls.Frozen()),
    "Neumann": lambda p: bisls.BiSLS(p, hypergrad=bisls.Implicit(bisls.Neumann(100)), direction=bisls.Steepest()),
    "identity": lambda p: bisls.BiSLS(p, hypergrad=bisls.Implicit(bisls.Identity(0.1)), direction=bisls.Steepest()),
    "unrolled": lambda p: bisls.BiSLS(p, hypergrad=bisls.Unrolled(30), direction=bisls.Steepest()),
    "stochastic Neumann": lambda p: bisls.BiSPS(p, hypergrad=bisls.StochasticNeumann(20), alpha=0.3),
}


@pytest.mark.parametrize("name", METHODS)
def test_every_composition_descends(name):
    torch.manual_seed(0)
    problem, x, _, matrix = toy()
    solver = METHODS[name](problem)
    start = (0.5 * ((matrix @ x - 1) ** 2).sum() + 0.05 * (x**2).sum()).item()
    for _ in range(60):
        record = solver.step(None, None)
        assert record.alpha >= 0
        assert isfinite(record.upper_value)
    end = (0.5 * ((matrix @ x - 1) ** 2).sum() + 0.05 * (x**2).sum()).item()
    assert end - best(matrix) < 0.5 * (start - best(matrix))


@pytest.mark.parametrize("name", ["BiSLS", "BiSLS steepest", "BiSLS L-BFGS"])
def test_the_default_solves_a_smooth_problem(name):
    problem, x, _, matrix = toy()
    solver = METHODS[name](problem)
    for _ in range(150):
        solver.step(None, None)
    end = (0.5 * ((matrix @ x - 1) ** 2).sum() + 0.05 * (x**2).sum()).item()
    assert end <= best(matrix) * 1.001


def test_alternating_is_the_plain_loop():
    problem, x, y, _ = toy()
    solver = bisls.Alternating(
        problem,
        upper_step=bisls.Constant(0.1),
        lower_step=bisls.Constant(0.02),
        direction=bisls.Adam(search_momentum=False),
        hypergrad=EXACT,
        lower_iters=3,
    )
    twin, x2, y2, _ = toy()
    adam = torch.optim.Adam([x2], lr=0.1)
    for _ in range(5):
        solver.step(None, None)
        for _ in range(3):
            (grad,) = torch.autograd.grad(twin.lower_loss(None), [y2])
            y2.data -= 0.02 * grad
        x2.grad = bisls.hypergradient(twin, None, None, EXACT).flat
        adam.step()
    assert torch.allclose(x, x2, rtol=0, atol=1e-12)
    assert torch.allclose(y, y2, rtol=0, atol=1e-12)


def scene_of(problem, search: Tensor | None = None, upper_batch=None, step_batch=None) -> Scene:
    oracle = bisls.Oracle(problem)
    estimate = EXACT.estimate(oracle, upper_batch, None, {})
    return Scene(
        oracle=oracle,
        method=EXACT,
        estimate=estimate,
        search=estimate.flat if search is None else search,
        x=problem.x.read(),
        y=problem.y.read(),
        sample=Sample(upper_batch, Minibatches([None]), step_batch, step_batch is not None),
        **lowered(problem, 0.03),
        alpha=None,
        max_step=inf,
    )


@pytest.mark.parametrize("case", CASES)
def test_the_tangent_line_begins_at_the_loss_and_has_the_slope_of_the_hypergradient(case):
    made = CASES[case]()
    scene = scene_of(made.problem)
    ray = bisls.Tangent().ray(scene, {})
    assert ray.line.value == scene.estimate.value
    assert ray.line.slope == pytest.approx(-(made.hypergradient @ made.hypergradient).item(), rel=1e-8)
    h = 1e-6
    difference = (ray.line.at(h) - ray.line.at(-h)) / (2 * h)
    assert difference == pytest.approx(ray.line.slope, rel=1e-5)
    assert abs(ray.line.slope) > 1e-4  # far above the tolerances


def test_on_another_batch_the_tangent_line_is_that_of_the_other_batch():
    problem, *_ = toy(noise=1.0)
    one, two = torch.tensor([1.0, 0.0, -1.0, 2.0]).double(), torch.tensor([-2.0, 1.0, 0.5, 0.0]).double()
    scene = scene_of(problem, upper_batch=one, step_batch=two)
    ray = bisls.Tangent().ray(scene, {})
    h = 1e-6
    assert (ray.line.at(h) - ray.line.at(-h)) / (2 * h) == pytest.approx(ray.line.slope, rel=1e-6)
    problem.x.write_(scene.x)
    problem.y.write_(scene.y)
    assert ray.line.value == pytest.approx(problem.upper_loss(two).item(), rel=1e-12)


def test_the_tangent_follows_the_lower_solution_to_second_order():
    """On ridge y*(x) is curved: halving the step must quarter the distance from the tangent."""
    made = CASES["ridge"]()
    problem = made.problem
    scene = scene_of(problem)
    ray = bisls.Tangent().ray(scene, {})
    gaps = []
    for t in (0.5, 0.25, 0.125):
        problem.x.write_(scene.x - t * scene.search)
        problem.y.write_(ray.follow(t))
        graph = bisls.Oracle(problem).lower_graph(None)
        solution = bisls.Dense().solve(graph.hessian, graph.grad, {}).z  # g is quadratic in y: one Newton step is exact
        gaps.append(solution.norm().item())
    assert gaps[0] / gaps[1] == pytest.approx(4, rel=0.1)
    assert gaps[1] / gaps[2] == pytest.approx(4, rel=0.1)


def test_a_prediction_that_is_believed_too_far_is_shortened():
    x = torch.tensor([0.0], dtype=torch.float64, requires_grad=True)
    y = torch.tensor([1.0], dtype=torch.float64, requires_grad=True)  # y* = exp(-x), f falls for ever along the tangent
    problem = bisls.Bilevel(
        lambda _: (y + 10).square().sum(), lambda _: 0.5 * (x.exp() * y * y).sum() - y.sum(), [x], [y]
    )
    scene = scene_of(problem)
    ray = bisls.Tangent().ray(scene, {})
    far = 10.0 / scene.search.norm().item()
    taken, _ = ray.trust(far)
    assert 0 < taken < far / 3
    problem.x.write_(scene.x - taken * scene.search)
    problem.y.write_(ray.follow(taken))
    seen = bisls.Oracle(problem).lower(None).grad.norm().item()
    assert seen <= 0.5 * taken * abs((scene.y * scene.search).item()) + 1e-12  # theta t ||g_yx d||


def test_gradient_steps_is_the_papers_formula():
    problem, *_ = toy()
    scene = scene_of(problem)
    ray = bisls.GradientSteps(2).ray(scene, {})
    x0, y0 = scene.x, scene.y
    twin, x2, y2, _ = toy()
    x2.data = x0 - 0.3 * scene.search
    y2.data = y0.clone()
    for _ in range(2):
        y2.data -= 0.03 * torch.autograd.grad(twin.lower_loss(None), [y2])[0]
    assert ray.line.at(0.3) == pytest.approx(twin.upper_loss(None).item(), rel=1e-12)
    assert ray.line.slope == pytest.approx(-(scene.estimate.flat @ scene.estimate.flat).item(), rel=1e-12)
    assert ray.line.value == scene.estimate.value
    assert ray.follow is None


@pytest.mark.slow
@pytest.mark.parametrize("restart", [bisls.Restart(), bisls.Keep(), bisls.Grow(2.0)])
@pytest.mark.parametrize("slack", [0.0, 0.1])
def test_the_papers_armijo_inequality_holds_at_the_step_taken(restart, slack):
    problem, x, y, _ = toy()
    solver = bisls.BiSLS.paper(problem, direction=bisls.Steepest(), restart=restart, slack=slack, hypergrad=EXACT)
    passed = 0
    for _ in range(20):
        before = x.detach().clone()
        record = solver.step(None, None)
        if record.upper_status is not Status.OK:
            continue
        passed += 1
        beta, x1, y1 = record.beta, x.detach().clone(), y.detach().clone()
        grad = torch.autograd.grad(problem.lower_loss(None), [y])[0]
        y.data = y1 - beta * grad
        bound = record.upper_value - 0.1 * record.alpha * record.hypergrad_norm**2 + slack
        assert problem.upper_loss(None).item() <= bound + 1e-12
        assert torch.allclose(before - x1, record.alpha * (before - x1) / record.alpha)
        y.data = y1
    assert passed >= 5


def test_bisps_is_the_papers_formula_with_one_and_two_samples():
    one, two = torch.tensor([0.3, 0.0, -0.3, 0.6]).double(), torch.tensor([-0.6, 0.3, 0.1, 0.0]).double()
    for samples, judge in ((1, one), (2, two)):
        problem, *_ = toy(noise=1.0)
        solver = bisls.BiSPS(problem, samples, alpha=0.5, beta=0.05, c=2.0, hypergrad=EXACT)
        for k in range(4):
            twin, x2, y2, _ = toy(noise=1.0)
            x2.data, y2.data = problem.x.read(), problem.y.read()
            record = solver.step(one, one, step_batch=two if samples == 2 else None)
            for _ in range(10):
                loss = twin.lower_loss(one)
                grad = torch.autograd.grad(loss, [y2])[0]
                y2.data -= min(loss.item() / (2 * (grad @ grad).item()), 0.05 / (k + 1)) * grad
            estimate = bisls.hypergradient(twin, judge, one, EXACT)
            polyak = estimate.value / (2 * (estimate.flat @ estimate.flat).item())
            assert record.alpha == pytest.approx(min(polyak, 0.5 / sqrt(k + 1)), rel=1e-9)


def test_bisps_has_a_decaying_floor():
    problem, *_ = toy()
    solver = bisls.BiSPS(problem, alpha=2.0, alpha_floor=1.9, c=1e6)
    assert [solver.step(None, None).alpha for _ in range(3)] == pytest.approx([1.9, 1.9 / sqrt(2), 1.9 / sqrt(3)])


def test_the_record_counts_what_was_evaluated():
    made = quadratic()
    calls = {"upper": 0, "lower": 0}
    upper, lower = made.problem.upper_loss, made.problem.lower_loss

    def counted(name, loss):
        def call(batch):
            calls[name] += 1
            return loss(batch)

        return call

    problem = bisls.Bilevel(
        counted("upper", upper), counted("lower", lower), made.problem.x.tensors, made.problem.y.tensors
    )
    for solver in (bisls.BiSLS(problem), bisls.BiSLS.paper(problem), bisls.BiSPS(problem, samples=2)):
        for k in range(5):
            calls.update(upper=0, lower=0)
            record = solver.step(None, None)
            cost, first = record.cost, k == 0  # each loss is called once more, to see how exact it is
            assert calls["upper"] == cost.upper_values + cost.upper_gradients + first
            assert calls["lower"] == cost.lower_values + cost.lower_gradients + cost.lower_graphs + first
            assert record.upper_checks == cost.upper_values
            assert record.lower_checks == cost.lower_values
            solved = type(solver) is bisls.BiSLS and not first  # nothing is noise: one Newton step on a quadratic
            assert record.lower_steps == (1 if solved else 10)


def test_alternating_evaluates_nothing_it_does_not_need():
    problem, *_ = toy()
    record = bisls.Alternating(problem, lower_iters=7).step(None, None)
    cost = record.cost
    assert (cost.upper_values, cost.lower_values) == (0, 0)
    assert (cost.upper_gradients, cost.lower_gradients, cost.lower_graphs, cost.mixed_products) == (1, 7, 1, 1)


def test_a_lower_loop_that_is_done_ends_early():
    problem, *_ = toy()
    solver = bisls.BiSLS(problem, lower_iters=200, lower_tol=1e-3)
    record = solver.step(None, None)
    assert record.lower_steps < 200
    assert record.lower_grad_norm <= 1e-3


def test_a_list_is_one_batch_for_each_lower_step():
    problem, *_ = toy(noise=1.0)
    seen = []
    loss = problem.lower_loss
    problem.lower_loss = lambda batch: seen.append(batch) or loss(batch)
    batches = [torch.full((4,), float(i)).double() for i in range(3)]
    bisls.Alternating(problem, lower_iters=3).step(None, batches)
    assert [batch[0].item() for batch in seen] == [0.0, 1.0, 2.0, 2.0]  # the hypergradient sees the last one
    with pytest.raises(ValueError, match="one batch for each of the lower_iters = 3 lower steps, got 2"):
        bisls.Alternating(problem, lower_iters=3).step(None, batches[:2])


@pytest.mark.parametrize("name", ["BiSLS", "BiSLS.paper", "BiSPS two samples", "Alternating Adam", "BiSLS L-BFGS"])
def test_a_saved_state_goes_on_bit_for_bit(name):
    def run(interrupted: bool):
        rng = torch.Generator().manual_seed(1)
        batches = torch.randn(30, 4, generator=rng, dtype=torch.float64)
        problem, x, y, _ = toy(noise=0.3)
        solver = METHODS[name](problem)
        records = []
        for k in range(12):
            if interrupted and k == 6:
                file = io.BytesIO()
                torch.save(solver.state_dict(), file)
                file.seek(0)
                state = torch.load(file, weights_only=True)
                fresh, x2, y2, _ = toy(noise=0.3)
                x2.data, y2.data = x.data.clone(), y.data.clone()
                x, y, solver = x2, y2, METHODS[name](fresh)
                solver.load_state_dict(state)
            records.append(solver.step(batches[2 * k], batches[2 * k + 1]))
        return x.tolist(), y.tolist(), [record.to_dict() for record in records]

    assert repr(run(True)) == repr(run(False))


def test_a_foreign_state_is_refused_before_anything_is_changed():
    problem, *_ = toy()
    solver = bisls.BiSLS(problem)
    solver.step(None, None)
    before = repr(solver.state_dict())
    with pytest.raises(ValueError, match="it lacks"):
        solver.load_state_dict({"k": 3})
    other = bisls.BiSLS(quadratic().problem)
    other.step(None, None)
    with pytest.raises(ValueError, match="7 upper and 12 lower"):
        solver.load_state_dict(other.state_dict())
    assert repr(solver.state_dict()) == before


@dataclass
class Fault:
    """A loss that is not finite on chosen calls, or beyond a wall."""

    bad: float
    on: range = range(0)
    wall: float = inf
    calls: int = 0

    def __call__(self, loss: Tensor, where: Tensor) -> Tensor:
        self.calls += 1
        hit = self.calls in self.on or bool(where.detach().abs().max() > self.wall)
        return loss * self.bad if hit else loss


@pytest.mark.slow
@pytest.mark.parametrize("bad", [float("nan"), inf, -inf])
@pytest.mark.parametrize("level", ["upper", "lower"])
@pytest.mark.parametrize("name", ["BiSLS", "BiSLS.paper", "BiSPS two samples", "Alternating Adam", "BiSLS L-BFGS"])
@pytest.mark.parametrize("fault", ["now and then", "wall"])
def test_nothing_that_is_not_finite_is_written_into_the_parameters(bad, level, name, fault):
    problem, x, y, _ = toy()
    made = (
        Fault(bad, on=range(20, 200, 7))
        if fault == "now and then"
        else Fault(bad, wall=1.5 if level == "lower" else 2.5)
    )
    f, g = problem.upper_loss, problem.lower_loss
    if level == "upper":
        problem.upper_loss = lambda b: made(f(b), x)
    else:
        problem.lower_loss = lambda b: made(g(b), y)
    solver = METHODS[name](problem)
    for _ in range(30):
        record = None
        with suppress(bisls.SolverError):  # a wall that constant steps can't get around ends in an error
            record = solver.step(None, None)
        assert bool(torch.isfinite(x).all())
        assert bool(torch.isfinite(y).all())
        if record is not None and record.status is Status.NON_FINITE:
            assert "level" in record.advice


def test_the_solver_goes_back_to_the_last_good_point_and_on_from_there():
    """A step of constant length lands beyond the wall, where nothing is finite: the next iteration is made from before it."""
    problem, x, _, _ = toy()
    fault, f = Fault(float("nan"), wall=2.05), problem.upper_loss
    problem.upper_loss = lambda b: fault(f(b), x)
    x.data = torch.tensor([2.04, 0.0, 0.0], dtype=torch.float64)
    solver = bisls.Alternating(problem, upper_step=bisls.Constant(5.0), direction=bisls.Steepest(), hypergrad=EXACT)
    start = x.detach().clone()
    statuses = [solver.step(None, None).upper_status for _ in range(4)]
    assert Status.NON_FINITE in statuses
    assert torch.equal(x.detach(), start) or x.detach().abs().max() <= 2.05 or statuses[-1] is not Status.NON_FINITE


def test_giving_up_names_the_level_and_the_remedy():
    problem, x, y, _ = toy()
    start = x.detach().clone(), y.detach().clone()
    problem.lower_loss = lambda b: (y * float("nan")).sum()
    solver = bisls.BiSLS(problem)
    for _ in range(19):
        assert solver.step(None, None).lower_status is Status.NON_FINITE
    with pytest.raises(bisls.SolverError, match=r"20 iterations in a row.*lower level: NON_FINITE.*log\(0\)"):
        solver.step(None, None)
    assert torch.equal(x, start[0])
    assert torch.equal(y, start[1])


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_an_exception_leaves_the_parameters_as_they_were_before_the_iteration(error):
    problem, x, y, _ = toy()
    solver = bisls.BiSLS(problem)
    solver.step(None, None)
    before = x.detach().clone(), y.detach().clone()
    loss, calls = problem.upper_loss, []

    def failing(batch):
        calls.append(batch)
        if len(calls) == 2:
            raise error("stop")
        return loss(batch)

    problem.upper_loss = failing
    with pytest.raises(error):
        solver.step(None, None)
    assert len(calls) == 2
    assert torch.equal(x, before[0])
    assert torch.equal(y, before[1])
    assert x.requires_grad


def test_negative_curvature_is_reported_and_survived():
    x = torch.tensor([0.5], dtype=torch.float64, requires_grad=True)
    y = torch.tensor([0.05, 0.02], dtype=torch.float64, requires_grad=True)
    problem = bisls.Bilevel(
        lambda _: ((y - x) ** 2).sum(),
        lambda _: 0.25 * (y**4).sum() - 0.5 * (y**2).sum() + 0.01 * x * y.sum(),
        [x],
        [y],
    )
    solver = bisls.BiSLS(problem, lower_iters=1, lower_step=bisls.Constant(1e-6))
    record = solver.step(None, None)
    assert record.linear_status is Status.DAMPED  # the default handles it: said, and no failure
    assert not record.status.failed
    undamped = bisls.BiSLS(
        problem, lower_iters=1, lower_step=bisls.Constant(1e-6), hypergrad=bisls.Implicit(bisls.CG())
    ).step(None, None)
    assert undamped.linear_status is Status.NEGATIVE_CURVATURE
    assert "linear solve" in undamped.advice
    solver = bisls.BiSLS(problem)
    for _ in range(30):
        record = solver.step(None, None)
    assert record.linear_status is Status.OK  # the lower loop has found a minimum by itself


def test_boxes_are_kept_and_the_constrained_minimum_is_found():
    problem, x, y, matrix = toy()
    box = bisls.Box(low=-0.3, high=0.3)
    x.data.clamp_(-0.3, 0.3)
    bounded = bisls.Bilevel(problem.upper_loss, problem.lower_loss, [x], [y], upper_bounds=box)
    for direction in (bisls.Steepest(), bisls.Adam(betas=(0.0, 0.999))):
        solver = bisls.BiSLS(bounded, direction=direction)
        for _ in range(150):
            solver.step(None, None)
            assert x.abs().max() <= 0.3
        gradient = matrix.T @ (matrix @ x - 1) + 0.1 * x
        stationarity = x - (x - gradient).clamp(-0.3, 0.3)
        assert stationarity.norm() < 1e-3 * gradient.norm() + 1e-3
    assert (x.abs() > 0.299).any()  # the box is felt


def test_lower_coordinates_on_a_bound_do_not_respond():
    """y = clip(Ax): the hypergradient counts the free coordinates alone."""
    problem, x, y, matrix = toy()
    with torch.no_grad():
        y.copy_((matrix @ x).clamp(-1.0, 1.0))
    assert 0 < (y.abs() < 1).sum() < 4
    bounded = bisls.Bilevel(problem.upper_loss, problem.lower_loss, [x], [y], lower_bounds=bisls.Box(-1.0, 1.0))
    free = (y.detach().abs() < 1).double()
    truth = matrix.T @ (free * (y.detach() - 1)) + 0.1 * x.detach()
    assert torch.allclose(bisls.hypergradient(bounded, None, None, EXACT).flat, truth, rtol=1e-8)
    solver = bisls.BiSLS(bounded, direction=bisls.Steepest())
    for _ in range(100):
        solver.step(None, None)
        assert y.abs().max() <= 1.0


def test_a_start_outside_its_bounds_is_refused():
    x, y = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)
    with pytest.raises(ValueError, match=r"upper_bounds=.*start outside their bounds \(by 0.5 at most\)"):
        bisls.Bilevel(lambda _: x.sum(), lambda _: (x * y).sum(), [x], [y], upper_bounds=bisls.Box(-0.5, 0.5))
    with pytest.raises(ValueError, match="must be a Box"):
        bisls.Bilevel(lambda _: x.sum(), lambda _: (x * y).sum(), [x], [y], lower_bounds=(0, 1))
    with pytest.raises(ValueError, match=r"`Box\(low=2\)`: low must be below high"):
        bisls.Box(low=2, high=1)


def test_warm_linear_solves_need_fewer_products():
    def products(warm: bool) -> int:
        made = quadratic(n_y=40, condition=300)
        solver = bisls.BiSLS(
            made.problem,
            hypergrad=bisls.Implicit(bisls.CG(iters=100, tol=1e-4, warm=warm)),
            upper_step=bisls.Constant(1e-5),
            response=bisls.Frozen(),
            direction=bisls.Steepest(),
            polish=None,
        )
        return sum(solver.step(None, None).cost.hessian_products for _ in range(10))

    assert products(True) < 0.8 * products(False)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda p: bisls.BiSLS("x"), "problem must be a Bilevel"),
        (lambda p: bisls.BiSLS(p, direction=bisls.Adam), r"direction must have a method head"),
        (lambda p: bisls.BiSLS(p, hypergrad=bisls.CG()), r"hypergrad must have a method estimate"),
        (lambda p: bisls.BiSLS(p, upper_step=0.1), r"`BiSLS\(upper_step=0.1\)`: upper_step must have a method choose"),
        (lambda p: bisls.BiSLS(p, lower_iters=0), r"`BiSLS\(lower_iters=0\)`: lower_iters must be a whole number"),
        (lambda p: bisls.BiSLS(p, lower_tol=-1.0), r"lower_tol must be at least 0"),
        (lambda p: bisls.BiSPS(p, samples=3), r"`BiSPS\(samples=3\)`: samples must be 1 or 2"),
        (lambda p: bisls.Tangent(theta=0), "theta must be positive"),
        (lambda p: bisls.GradientSteps(0), "n must be a whole number, at least 1"),
    ],
)
def test_bad_arguments_are_named(call, message):
    with pytest.raises(ValueError, match=message):
        call(toy()[0])


def test_schedules_of_the_lower_rule_count_outer_iterations():
    problem, *_ = toy()
    solver = bisls.Alternating(problem, lower_step=bisls.Decay(0.01, power=1.0), lower_iters=5)
    assert [solver.step(None, None).beta for _ in range(3)] == pytest.approx([0.01, 0.005, 0.01 / 3])


def test_a_rule_of_ones_own_serves_both_levels():
    class Tiny:
        def choose(self, line, memory):
            return bisls.Step(1e-3, memory.later(1e-3))

    problem, *_ = toy()
    record = bisls.BiSLS(problem, upper_step=Tiny(), lower_step=Tiny()).step(None, None)
    assert (record.alpha, record.beta) == (1e-3, 1e-3)
    assert isinstance(Memory(), Memory)


@pytest.mark.parametrize("batches", [False, True])
def test_batch_norm_below_keeps_its_statistics_through_probes(batches):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 2))
    weights = torch.zeros(32, requires_grad=True)
    features, labels = torch.randn(32, 4), torch.arange(32) % 2

    def each(rows):
        return functional.cross_entropy(model(features[rows]), labels[rows], reduction="none")

    def lower(rows):
        return (weights[rows].sigmoid() * each(rows)).mean() + 0.01 * sum((p**2).sum() for p in model.parameters())

    problem = bisls.Bilevel(lambda rows: each(rows).mean(), lower, [weights], model.parameters())
    solver = bisls.BiSLS(problem, lower_iters=3)
    for _ in range(6):
        rows = [torch.randperm(32)[:16] for _ in range(3)] if batches else torch.arange(32)
        record = solver.step(torch.arange(32), rows)
    assert record.alpha >= 0
    assert torch.isfinite(problem.y.read()).all()


GRAPH = torch.ones(1, requires_grad=True).exp().grad_fn


@pytest.mark.skipif(not hasattr(GRAPH, "_input_metadata"), reason="the graphs of this torch do not tell their types")
def test_a_loss_made_of_coarse_numbers_is_not_believed_to_the_last_digit():
    """Autocast computes in bfloat16 and hands over float32: a search must not look for differences that are rounding."""
    torch.manual_seed(0)
    body, head = nn.Sequential(nn.Linear(20, 16), nn.Tanh()), nn.Linear(16, 3)
    features = torch.randn(200, 20)
    labels = features[:, :3].argmax(1)

    def fit_loss(rows):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            outputs = head(body(features[rows]))
        return functional.cross_entropy(outputs.float(), labels[rows])

    def lower(rows):
        return fit_loss(rows) + 0.01 * sum((p**2).sum() for p in head.parameters())

    problem = bisls.Bilevel(fit_loss, lower, body.parameters(), head.parameters())
    oracle = bisls.Oracle(problem)
    with torch.no_grad():
        points = [oracle.lower(slice(100)) for _ in range(2)] + [
            oracle.upper(slice(100)),
            oracle.lower_graph(slice(100)),
        ]
    assert {point.eps for point in points} == {torch.finfo(torch.bfloat16).eps}
    solver = bisls.BiSLS(problem)
    batches = [torch.randperm(100)[:50] for _ in range(11 * 40)]
    for k in range(40):
        record = solver.step(100 + batches[11 * k], batches[11 * k + 1 : 11 * k + 11])
    assert record.alpha > 1e-3
    assert record.upper_value < 0.6


def test_a_state_without_what_came_later_loads_with_its_default():
    """A version that adds a field to the state goes on from states of those before it."""
    problem, *_ = toy()
    solver = bisls.BiSLS(problem)
    solver.step(None, None)
    state = solver.state_dict()
    older = {name: own for name, own in state.items() if name != "trend"}
    again = bisls.BiSLS(toy()[0])
    fresh = again.state_dict()["trend"]
    again.load_state_dict(older)
    assert again.k == 1
    assert again.state_dict()["trend"] == fresh != state["trend"]
    for needed in ("method", "k", "upper", "lower", "hypergrad", "good"):
        with pytest.raises(ValueError, match=rf"not the state of a solver, it lacks \['{needed}'\]"):
            again.load_state_dict({name: own for name, own in state.items() if name != needed})


def test_a_batch_that_was_written_into_again_does_not_judge_and_the_log_says_so(caplog):
    """A loader that refills one buffer has overwritten the batch of the last step."""
    rows = [torch.randn(4, generator=torch.Generator().manual_seed(k), dtype=torch.float64) for k in range(8)]

    def run(hand_over) -> list:
        made = bisls.BiSLS(toy(noise=0.3)[0], search_every=1)
        return [made.step(hand_over(row), row.clone()) for row in rows]

    judged = run(lambda row: row)
    assert not caplog.records
    buffer = torch.empty_like(rows[0])
    refilled = run(buffer.copy_)
    (said,) = [record.getMessage() for record in caplog.records]
    assert "`BiSLS.step(upper_batch=...)`: the previous upper batch was changed in place" in said
    assert "clone()" in said
    assert repr(run(lambda row: buffer.copy_(row).clone())) == repr(judged)
    assert repr(refilled) != repr(judged)
    # the same batch at every step is no other batch, and nobody has to be told
    caplog.clear()
    made = bisls.BiSLS(toy(noise=0.3)[0])
    for _ in range(3):
        made.step(rows[0], rows[0])
    assert not caplog.records
    # what was overwritten is not saved as the judge either
    made.step(buffer, rows[0])
    buffer.add_(1.0)
    assert made.state_dict()["last_batch"] is None
