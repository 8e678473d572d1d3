"""Where nothing is noise: Newton steps below, quasi-Newton steps above, and what keeps them from running away."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

import bisls
from bisls.batches import Minibatches, Sample
from bisls.directions import LBFGS
from bisls.linear import CG, Dense, Direct
from bisls.lower import solved as newton
from bisls.lower.solved import Goal, solved
from bisls.oracle import Oracle
from bisls.response import Scene, Tangent
from bisls.response.solved import on_solutions
from bisls.sampling import Steady
from bisls.smooth import GROW, LONGER, Smooth


def follows(x: Tensor) -> Tensor:
    """The lower solution in closed form."""
    return x + 0.1 * torch.sin(x)


def rosenbrock(y: Tensor) -> Tensor:
    return (100 * (y[1:] - y[:-1] ** 2) ** 2 + (1 - y[:-1]) ** 2).sum()


def valley(n: int = 6, bounds: bisls.Box | None = None) -> tuple[bisls.Bilevel, Tensor, Tensor]:
    """f is Rosenbrock's valley in y, and y*(x) = x + sin(x) / 10 by a g that is no quadratic."""
    x = torch.full((n,), -1.0, dtype=torch.float64, requires_grad=True)
    y = torch.zeros(n, dtype=torch.float64, requires_grad=True)
    curvature = torch.logspace(0, 2, n, dtype=torch.float64)

    def lower(_: object) -> Tensor:
        gap = y - follows(x)
        return (curvature * (gap**2 / 2 + gap**4)).sum()

    return bisls.Bilevel(lambda _: rosenbrock(y), lower, [x], [y], upper_bounds=bounds), x, y


def value(x: Tensor) -> float:
    """F itself."""
    return float(rosenbrock(follows(x.detach())))


def is_on(solver: bisls.Solver) -> bool:
    return bool(solver.state_dict()["upper"].get("past", {}).get("on"))


def run(solver: bisls.Solver, times: int) -> list[bisls.Record]:
    return [solver.step(None, None) for _ in range(times)]


def on(times: int = 40) -> tuple[bisls.Solver, Tensor, Tensor]:
    problem, x, y = valley()
    solver = bisls.BiSLS(problem)
    run(solver, times)
    assert is_on(solver)
    return solver, x, y


def test_a_valley_is_followed_to_its_end():
    """Steps along a scaled gradient, with everything else alike, are nowhere near it."""
    ends = []
    for smooth in (True, False):
        problem, x, _ = valley()
        solver = bisls.BiSLS(problem)
        if not smooth:
            assert isinstance(solver.upper, Smooth)
            solver._offer(replace(solver._views[0], upper=solver.upper.upper))
        start = value(x)
        run(solver, 120)
        ends.append(value(x))
    assert ends[0] < 1e-12 * start
    assert ends[1] > 1e-2


def test_f_falls_and_no_step_outgrows_the_last():
    problem, x, _ = valley()
    solver, moved, points = bisls.BiSLS(problem), [], [x.detach().clone()]
    for k in range(80):
        record = solver.step(None, None)
        before = points[-1]
        points.append(x.detach().clone())
        if is_on(solver) and record.alpha > 0:
            assert value(x) <= value(before)
            size = float((x.detach() - before).abs().max())
            assert not moved or size <= GROW * LONGER * moved[-1] * (1 + 1e-12), k
            moved.append(size)
    assert len(moved) > 20


def test_newton_steps_stand_in_for_the_loop_below():
    _, records = (solver := on()[0]), run(solver, 10)
    assert all(record.lower_steps <= 4 for record in records)
    assert all(record.lower_grad_norm < 1e-3 for record in records)


def test_batches_that_change_are_searched_as_before():
    problem, _, _ = valley()
    solver = bisls.BiSLS(problem)
    for k in range(40):
        assert solver.step(torch.tensor(float(k)), torch.tensor(float(k))).lower_steps == 10
    assert not is_on(solver)


def test_a_loss_that_draws_numbers_is_not_smooth():
    problem, _, y = valley()
    noisy = bisls.Bilevel(
        lambda b: problem.upper_loss(b) + 1e-3 * (torch.randn(len(y), dtype=y.dtype) * y).sum(),
        problem.lower_loss,
        problem.x.tensors,
        problem.y.tensors,
    )
    solver = bisls.BiSLS(noisy)
    run(solver, 40)
    assert "past" not in solver.state_dict()["upper"]


def test_an_f_that_has_risen_leads_back():
    solver, x, y = on()
    state = solver.state_dict()
    past = state["upper"]["past"]
    state["upper"] = {**state["upper"], "past": {**past, "value": past["value"] - 1.0}}  # as if f had been lower there
    solver.load_state_dict(state)
    record = solver.step(None, None)
    assert record.upper_status is bisls.Status.RETURNED
    assert record.alpha == 0.0
    assert torch.equal(x.detach(), past["x"])
    assert torch.equal(y.detach(), past["y"])
    limit = solver.state_dict()["upper"]["past"]["widest"]
    assert 0.0 < limit == pytest.approx(0.25 * float((past["end"] - past["x"]).abs().max()))
    solver.step(None, None)
    assert 0.0 < float((x.detach() - past["x"]).abs().max()) <= LONGER * limit * (1 + 1e-12)


def test_after_a_return_a_step_is_not_lengthened_to_where_it_came_from():
    solver, x, _ = on()
    state = solver.state_dict()
    past = state["upper"]["past"]
    state["upper"] = {**state["upper"], "past": {**past, "value": past["value"] - 1.0}}
    solver.load_state_dict(state)
    solver.step(None, None)
    limit = solver.state_dict()["upper"]["past"]["widest"]
    solver.step(None, None)
    assert 0.0 < float((x.detach() - past["x"]).abs().max()) <= limit * (1 + 1e-12)
    solver.step(None, None)
    assert solver.state_dict()["upper"]["past"]["widest"] == 0.0  # from here on the last step counts again


def test_x_that_somebody_else_has_moved_begins_anew():
    solver, x, _ = on()
    with torch.no_grad():
        x.fill_(3.0)
    record = solver.step(None, None)
    assert record.upper_status is not bisls.Status.RETURNED
    assert solver.state_dict()["upper"]["past"]["count"] == 1


def test_a_run_that_goes_on_from_a_state_is_the_same_to_the_last_bit():
    solver, x, y = on(30)
    state, there = solver.state_dict(), (x.detach().clone(), y.detach().clone())
    run(solver, 10)
    problem, other, below = valley()
    with torch.no_grad():
        other.copy_(there[0])
        below.copy_(there[1])
    again = bisls.BiSLS(problem)
    again.load_state_dict(state)
    run(again, 10)
    assert torch.equal(x, other)
    assert torch.equal(y, below)


def test_it_stays_inside_bounds():
    problem, x, _ = valley(bounds=bisls.Box(-1.5, 0.6))
    solver = bisls.BiSLS(problem)
    for _ in range(80):
        solver.step(None, None)
        assert -1.5 <= float(x.detach().min()) <= float(x.detach().max()) <= 0.6
    assert is_on(solver)
    free = [int(i) for i in ((x > -1.5 + 1e-6) & (x < 0.6 - 1e-6)).nonzero()]
    (gradient,) = torch.autograd.grad(rosenbrock(follows(x)), x)
    assert float(gradient[free].abs().max()) < 1e-2


# --- the line of F itself


def test_along_the_line_the_lower_problem_is_solved():
    problem, x, y = valley()
    with torch.no_grad():
        y.copy_(follows(x))
    oracle = Oracle(problem)
    method = bisls.Implicit(bisls.linear.Direct(CG(tol=1e-12)))
    estimate = method.estimate(oracle, None, None, {})
    batches = Minibatches.repeated(None, 10)
    scene = Scene(
        oracle, method, estimate, estimate.flat, problem.x.read(), problem.y.read(), Sample(None, batches), None, None, None, 1.0
    )  # fmt: skip
    ray = Tangent().ray(scene, {})
    exact = on_solutions(scene, estimate.graph, ray, Dense())
    begun = x.detach().clone()
    for t in (1e-4, 1e-3):
        true = value(begun - t * estimate.flat)
        assert abs(exact.line.at(t) - true) < 0.05 * abs(ray.line.at(t) - true)
        there = follows(begun - t * estimate.flat)
        assert float((exact.follow(t) - there).norm()) < 0.01 * float((there - follows(begun)).norm())
    assert exact.line.slope == pytest.approx(-float(estimate.flat @ estimate.flat))


def test_where_y_is_not_solved_for_the_line_is_the_tangent():
    """No trial can be closer to the solution than the point where the line begins."""
    problem, x, y = valley()
    with torch.no_grad():
        y.copy_(follows(x) + 0.1)
    oracle = Oracle(problem)
    estimate = bisls.Implicit(bisls.linear.Direct(CG(tol=1e-12))).estimate(oracle, None, None, {})
    sample, search = Sample(None, Minibatches.repeated(None, 10)), 1e-6 * estimate.flat
    point = problem.x.read(), problem.y.read()
    scene = Scene(oracle, None, estimate, search, *point, sample, None, None, None, 1.0)
    ray = Tangent(linear=Dense()).ray(scene, {})
    assert on_solutions(scene, estimate.graph, ray, Dense()) is ray


# --- Newton steps below


def bowl(curvature: float = 3.0) -> tuple[Oracle, Tensor]:
    """g = sum of c cosh(y - 1): its solution is 1, its Hessian there c."""
    x = torch.zeros(2, dtype=torch.float64, requires_grad=True)
    y = torch.full((4,), 1.3, dtype=torch.float64, requires_grad=True)

    def lower(_: object) -> Tensor:
        return curvature * torch.cosh(y - 1).sum() + 0 * x.sum()

    return Oracle(bisls.Bilevel(lambda _: (y**2).sum(), lower, [x], [y])), y.detach().clone()


def test_an_inverse_from_nearby_leads_to_the_solution_without_another():
    oracle, y = bowl()
    found = solved(oracle, None, y, Goal(1e-9), Dense(), lambda v: v / 3.0)
    assert found.done
    assert float((found.y - 1).abs().max()) < 1e-9
    assert oracle.cost.lower_graphs == 0
    assert found.steps < oracle.cost.lower_gradients <= 4


@pytest.mark.parametrize("wrong", [0.1, 1.9, 5.0])
def test_an_inverse_that_leads_on_too_slowly_is_made_anew(wrong):
    """Too short steps, steps that come back, and steps that lead away."""
    oracle, y = bowl()
    found = solved(oracle, None, y, Goal(1e-9), Direct(), lambda v: wrong * v / 3.0)
    assert found.done
    assert float((found.y - 1).abs().max()) < 1e-9
    assert oracle.cost.lower_graphs == 1


def test_without_an_inverse_each_step_is_newtons_own():
    oracle, y = bowl()
    found = solved(oracle, None, y, Goal(1e-6), CG(tol=1e-8), None)
    assert found.done
    assert found.inverse is None
    assert float((found.y - 1).abs().max()) < 1e-6


def test_a_solution_at_infinity_is_not_looked_for_for_ever():
    """A penalty that has vanished: every Newton step goes on by 1. What they have gained is kept."""
    x = torch.zeros(1, dtype=torch.float64, requires_grad=True)
    y = torch.zeros(2, dtype=torch.float64, requires_grad=True)
    oracle = Oracle(bisls.Bilevel(lambda _: (y**2).sum(), lambda _: torch.exp(-y).sum() + 0 * x.sum(), [x], [y]))
    found = solved(oracle, None, torch.zeros(2, dtype=torch.float64), Goal(1e-6), Dense(), None)
    assert not found.done
    assert found.y.tolist() == pytest.approx([float(newton.NEW)] * 2)
    assert oracle.cost.lower_graphs == newton.NEW


def test_a_step_that_raises_the_gradient_and_lowers_nothing_is_too_long():
    """Newton's steps on sqrt(1 + y^2) lead from y to -y^3; here values are too rough to show that."""
    x = torch.zeros(1, requires_grad=True)
    y = torch.full((2,), 2.0, requires_grad=True)
    lower_loss = lambda _: 1000 + 0.01 * torch.sqrt(1 + y**2).sum() + 0 * x.sum()  # noqa: E731
    oracle = Oracle(bisls.Bilevel(lambda _: (y**2).sum(), lower_loss, [x], [y]))
    found = solved(oracle, None, oracle.problem.y.read(), Goal(1e-3), Dense(), None)
    assert found is None or float(found.y.abs().max()) < 2.0
    found = solved(oracle, None, torch.full((2,), 2.0), Goal(1e-3), Dense(), lambda v: 1000 * v)
    assert found is None or float(found.y.abs().max()) < 2.0


def test_what_does_not_matter_above_is_not_solved_for_below():
    oracle, y = bowl()
    heed = torch.tensor([1.0, -1.0, 1.0, -1.0], dtype=torch.float64)  # all steps here are alike: f does not see them
    assert solved(oracle, None, y, Goal(0.0, heed, 1e-12), Dense(), lambda v: v / 3.0).steps == 1
    assert solved(oracle, None, y, Goal(0.0, heed.abs(), 1e-12), Dense(), lambda v: v / 3.0).steps > 1


def test_a_problem_that_newton_cannot_solve_is_left_to_the_loop():
    x = torch.zeros(2, requires_grad=True)
    y = torch.tensor([0.1, 0.0], requires_grad=True)
    bent = bisls.Bilevel(lambda _: (y**2).sum(), lambda _: (y[0] ** 4 - y[0] ** 2 + y[1] ** 2) + 0 * x.sum(), [x], [y])
    oracle, goal = Oracle(bent), Goal(1e-6)
    assert solved(oracle, None, bent.y.read(), goal, CG(), None) is None
    drawn = bisls.Bilevel(lambda _: (y**2).sum(), lambda _: ((y - torch.randn(2)) ** 2).sum() + 0 * x.sum(), [x], [y])
    assert solved(Oracle(drawn), None, bent.y.read(), goal, CG(), None) is None
    assert solved(Oracle(drawn), None, bent.y.read(), goal, CG(), lambda v: 0.5 * v) is None


def made_up(kind: str, seed: int) -> bisls.tasks.Task:
    """One penalty a feature, on columns of very different sizes."""
    draw = np.random.RandomState(seed)
    d, n = (8, 80) if kind == "logistic" else (12, 60)
    features = draw.randn(2 * n, d) * (1.0 + np.arange(d)) ** -0.5
    scores = features @ draw.randn(d) + 0.5 * draw.randn(2 * n)
    targets = (scores > 0).astype(float) if kind == "logistic" else scores
    make = bisls.tasks.logistic_penalties if kind == "logistic" else bisls.tasks.ridge_penalties
    return make((features[:n], targets[:n]), (features[n:], targets[n:]), penalty=torch.exp)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["logistic", "ridge"])
def test_inverses_used_again_end_where_new_ones_do(kind, monkeypatch):
    for seed in range(2):
        ends = []
        for faster in (newton.FASTER, 0.0):  # 0: every step has a Hessian of its own
            monkeypatch.setattr(newton, "FASTER", faster)
            task = made_up(kind, seed)
            solver = bisls.BiSLS(task.problem, lower_iters=task.lower_iters)
            for _ in range(80):
                record = solver.step(task.upper_data, task.lower_data)
                assert record.upper_value < 10.0
            ends.append(task.exact())
        assert ends[0] <= ends[1] * (1 + 1e-5)  # of single precision


@pytest.mark.slow
def test_f_stays_where_it_is_lowest_when_penalties_vanish():
    """Exponents reach where single precision ends; a step that knew no limit had led away from there."""
    task = bisls.tasks.logistic_penalties(penalty=torch.exp)
    solver = bisls.BiSLS(task.problem, lower_iters=10)
    values = [solver.step(task.upper_data, task.lower_data).upper_value for _ in range(200)]
    assert values[-1] <= min(values) * (1 + 1e-3)
    assert task.exact() <= min(values) * (1 + 1e-3)


def test_pictures_without_a_whole_inverse_are_solved_for_too():
    """Where products were fewer than the loop's steps; here the Hessian can't be written out in one piece."""
    x = torch.zeros(3, requires_grad=True)
    y = torch.zeros(1100, requires_grad=True)
    target = torch.linspace(-1, 1, 1100)
    scale = 1 + torch.arange(1100) % 3

    def lower(_: object) -> Tensor:
        return (0.5 * scale * (y - target) ** 2 * torch.exp(x).mean() + 0.5 * torch.exp(x[0]) * y**2).sum() / 100

    solver = bisls.BiSLS(bisls.Bilevel(lambda _: ((y - 0.7 * target) ** 2).mean(), lower, [x], [y]), lower_iters=10)
    records = run(solver, 6)
    assert records[0].lower_steps == 10
    assert all(record.lower_steps <= 4 for record in records[1:])
    assert len(solver.oracle.memory.learnt.inverse or []) != 1


# --- what it is made of


def test_batches_that_hold_the_same_numbers_are_steady():
    steady, one = Steady(), Minibatches.repeated(torch.ones(3), 4)
    assert not steady.again(None, one)
    steady.keep(Sample(None, one))
    assert steady.again(None, Minibatches.repeated(torch.ones(3), 4))
    assert not steady.again(None, Minibatches.repeated(torch.zeros(3), 4))
    assert not steady.again(torch.ones(1), one)
    loaded = Steady()
    loaded.load(steady.mark)
    assert loaded.again(None, one)
    assert not loaded.again(None, Minibatches.repeated(torch.zeros(3), 4))
    one.newest.add_(1.0)  # written into since: nobody knows what it was
    assert not steady.again(None, one)


def test_batches_that_no_file_can_hold_are_never_steady():
    steady, strange = Steady(), Minibatches.repeated(object(), 2)
    steady.keep(Sample(None, strange))
    assert not steady.again(None, strange)


def test_pairs_on_a_scaling_are_those_of_scaled_coordinates():
    from bisls.directions.lbfgs import two_loops

    generator = torch.Generator().manual_seed(0)
    scale = torch.rand(5, generator=generator, dtype=torch.float64) + 0.5
    matrix = torch.randn(5, 5, generator=generator, dtype=torch.float64)
    matrix = matrix @ matrix.T + torch.eye(5, dtype=torch.float64)
    moves = torch.randn(3, 5, generator=generator, dtype=torch.float64)
    gradient = torch.randn(5, generator=generator, dtype=torch.float64)
    root = scale.sqrt()
    plain = two_loops(gradient / root, moves * root, (moves @ matrix) / root)
    assert torch.allclose(two_loops(gradient, moves, moves @ matrix, scale), plain / root, rtol=1e-12)
    assert LBFGS().history == 10
