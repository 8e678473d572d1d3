"""The parts that the default is made of, put together: batches that differ, rests, means, differences, and the promise."""

from __future__ import annotations

import io
from math import inf

import pytest
import torch
from problems import lowered
from sklearn.datasets import load_breast_cancer
from torch import Tensor, nn

import bisls
from bisls import tasks
from bisls.batches import Minibatches, Sample
from bisls.response import Scene
from bisls.vector import Vector

EXACT = bisls.CG(iters=200, tol=1e-13)


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def noisy(noise: float = 0.3) -> tuple[bisls.Bilevel, Tensor, Tensor]:
    """f = 1/2 ||y - 1 - b||^2 + 0.05 ||x||^2, g = 1/2 (y - Ax - b)' H (y - Ax - b)."""
    matrix, curvature = drawn(4, 3, seed=4), torch.tensor([1.0, 3.0, 10.0, 30.0], dtype=torch.float64)
    x = torch.tensor([0.5, -1.0, 2.0], dtype=torch.float64, requires_grad=True)
    y = torch.tensor([0.1, 0.2, -0.3, 0.4], dtype=torch.float64, requires_grad=True)
    problem = bisls.Bilevel(
        lambda b: 0.5 * ((y - 1.0 - noise * b) ** 2).sum() + 0.05 * (x**2).sum(),
        lambda b: 0.5 * (curvature * (y - matrix @ x - noise * b) ** 2).sum(),
        [x],
        [y],
    )
    return problem, x, y


# --- Implicit(spread=...)


def weighted(rows: int = 12, parts: int = 4) -> tuple[bisls.Bilevel, list[Tensor], Tensor, Tensor]:
    """Least squares with a weight exp(x_i) for every row; a batch is a part of the rows, so it speaks of no other x."""
    data, target = drawn(rows, 3), drawn(rows, seed=1)
    x = (0.3 * drawn(rows, seed=2)).requires_grad_()
    y = drawn(3, seed=3).requires_grad_()

    def lower(batch: Tensor) -> Tensor:
        return 0.5 * (x[batch].exp() * (data[batch] @ y - target[batch]) ** 2).mean() + 0.05 * (y**2).sum()

    problem = bisls.Bilevel(lambda _: ((y - 1.0) ** 2).sum(), lower, [x], [y])
    return problem, list(torch.arange(rows).chunk(parts)), data, target


def run(problem, batches, method, times: int) -> tuple[list[int], bisls.Hypergradient]:
    """How many lower graphs each estimate has built, and the last estimate."""
    state, graphs, estimate = {}, [], None
    for _ in range(times):
        oracle = bisls.Oracle(problem)
        estimate = method.estimate(oracle, None, Minibatches(batches), state)
        state = estimate.state
        graphs.append(oracle.cost.lower_graphs)
    assert estimate is not None
    return graphs, estimate


def test_batches_that_speak_of_other_coordinates_are_all_looked_at():
    problem, batches, _, _ = weighted()
    graphs, estimate = run(problem, batches, bisls.Implicit(EXACT, spread=0.1), 4)
    assert graphs[0] == 2  # a first look
    assert graphs[-1] == 4
    assert bool((estimate.flat != 0).all())


def test_batches_that_agree_are_looked_at_one_at_a_time_but_for_a_glance():
    problem, x, y = noisy()
    slopes = [1.0 + 1e-4 * i for i in range(5)]  # almost the same: their spread is tiny, not zero
    problem = bisls.Bilevel(
        lambda _: ((y - 1.0) ** 2).sum(), lambda b: 0.5 * ((y[:3] - b * x) ** 2).sum() + 0.5 * y[3] ** 2, [x], [y]
    )
    graphs, estimate = run(problem, slopes, bisls.Implicit(EXACT, spread=4.0), 45)
    assert estimate.state["spread"][2].item() == 1.0
    assert graphs[:3] == [2, 1, 1]
    assert 2 <= graphs.count(2) - 1 <= 3  # one in EVERY = 20 looks at one more


def test_batches_that_are_equal_are_looked_at_one_at_a_time():
    problem, _, _ = noisy()
    batches = [torch.zeros(4, dtype=torch.float64) for _ in range(4)]
    problem.upper_loss = lambda _: ((problem.y.tensors[0] - 1.0) ** 2).sum()
    graphs, _ = run(problem, batches, bisls.Implicit(EXACT, spread=4.0), 4)
    assert graphs == [2, 1, 1, 1]


def test_two_batches_give_the_hypergradient_of_their_mean_loss():
    """h = -g_xy g_yy^-1 grad_y f of the mean over both halves, in closed form."""
    problem, _, data, target = weighted(parts=2)
    batches = list(torch.arange(12).chunk(2))
    x, y = problem.x.read(), problem.y.read()
    hessian = data.T @ (x.exp()[:, None] * data) / 12 + 0.1 * torch.eye(3, dtype=torch.float64)
    mixed = (x.exp() * (data @ y - target))[:, None] * data / 12
    truth = -mixed @ torch.linalg.solve(hessian, 2 * (y - 1.0))
    estimate = bisls.Implicit(EXACT, spread=4.0).estimate(bisls.Oracle(problem), None, Minibatches(batches), {})
    torch.testing.assert_close(estimate.flat, truth, rtol=1e-9, atol=1e-12)
    assert truth.norm() > 0.1
    one = bisls.Implicit(EXACT).estimate(bisls.Oracle(problem), None, batches[-1], {})
    assert (one.flat - truth).norm() > 0.1 * truth.norm()  # one of the two is something else


def test_the_spread_measured_is_the_variance_of_the_mixed_products():
    problem, batches, _, _ = weighted()
    oracle = bisls.Oracle(problem)
    estimate = bisls.Implicit(EXACT, spread=1e9).estimate(oracle, None, Minibatches(batches), {})
    graphs = [oracle.lower_graph(batch) for batch in (batches[3], batches[2])]
    z = EXACT.solve(lambda v: (graphs[0].hessian(v) + graphs[1].hessian(v)) / 2, oracle.upper(None).grad_y, {}).z
    pulls = torch.stack([graph.mixed(z) for graph in graphs])
    variance = pulls.var(0).sum().item()
    seen, square, wanted, _ = estimate.state["spread"].tolist()
    assert seen == pytest.approx(variance, rel=1e-9)
    assert square == pytest.approx((estimate.flat @ estimate.flat).item() - variance / 2, rel=1e-9)
    assert variance > 1e-3
    assert wanted in (1.0, 4.0)


# --- Solver(search_every=...)


def test_with_another_batch_to_judge_every_second_iteration_searches():
    problem, _, _ = noisy()
    solver = bisls.BiSLS(problem, search_every=2)
    batches = drawn(60, 4)
    records = [solver.step(batches[3 * k], batches[3 * k + 1], step_batch=batches[3 * k + 2]) for k in range(20)]
    for k, record in enumerate(records):
        assert record.upper_checks == record.cost.upper_values
        assert record.cost.upper_gradients == (1 if k % 2 else 2)  # a rest does not look at the other batch
        if k % 2:
            assert record.upper_checks == 0
            assert record.alpha > 0
    assert sum(record.upper_checks > 0 for record in records) >= 5  # the others are where the judge saw an ascent


def test_the_previous_batch_judges_where_no_other_is_given():
    problem, _, _ = noisy()
    solver = bisls.BiSLS(problem, search_every=3)
    batches = drawn(20, 4)
    counts = [solver.step(batches[2 * k], batches[2 * k + 1]).cost.upper_gradients for k in range(10)]
    assert counts == [1, 1, 1, 2, 1, 1, 2, 1, 1, 2]


def test_without_noise_every_iteration_searches():
    problem, _, _ = noisy()
    solver, batch = bisls.BiSLS(problem, search_every=2), drawn(4)
    for _ in range(8):
        record = solver.step(batch, batch)
        assert record.upper_checks >= 1
        assert record.cost.upper_gradients == 1


def test_a_rest_takes_the_remembered_step_within_what_the_direction_allows():
    problem, x, _ = noisy(noise=1.0)
    solver, batches = bisls.BiSLS(problem, search_every=2), drawn(60, 4)
    shortened = 0
    for k in range(30):
        remembered, before = solver.state_dict()["upper"].get("memory", {}).get("step"), x.detach().clone()
        record = solver.step(batches[2 * k], batches[2 * k + 1])
        if k % 2 and k > 1:
            assert 0 < record.alpha <= remembered
            shortened += record.alpha < remembered
            assert not torch.equal(before, x)
    assert shortened  # the bound that noise sets was felt


# --- Solver(lower_average=True)


def averaging(problem: bisls.Bilevel, lower_iters: int) -> bisls.Solver:
    return bisls.Solver(
        problem,
        direction=bisls.Steepest(),
        response=bisls.Frozen(),
        hypergrad=bisls.Implicit(EXACT),
        upper_step=bisls.Constant(1e-300),  # x stays
        lower_step=bisls.Constant(0.02),
        lower_iters=lower_iters,
        lower_average=True,
    )


def test_the_parameters_hold_the_mean_and_the_steps_go_on_from_the_last_iterate():
    problem, x, y = noisy(noise=2.0)
    solver, batches = averaging(problem, lower_iters=5), drawn(100, 4)
    matrix, curvature = drawn(4, 3, seed=4), torch.tensor([1.0, 3.0, 10.0, 30.0], dtype=torch.float64)
    last, mean, n, kept = y.detach().clone(), None, 0, 0
    for k in range(15):
        lower = list(batches[5 * k : 5 * k + 5])
        for b in lower:
            gap = last - matrix @ x.detach() - 2.0 * b
            if b is lower[-1] and mean is not None:  # the mean is judged on a batch that it has not seen
                other = mean - matrix @ x.detach() - 2.0 * b
                if not (curvature * other**2).sum() < (curvature * gap**2).sum():
                    mean, n = None, 0
                else:
                    kept += 1
            last = last - 0.02 * curvature * gap
            n += 1
            weight = max(min(1.0, 4.0 / (n + 3)), 0.05)
            mean = last if mean is None else mean + weight * (last - mean)
        solver.step(batches[-1], lower)
        torch.testing.assert_close(y.detach(), mean, rtol=1e-10, atol=1e-12)
        torch.testing.assert_close(solver.state_dict()["lower"]["average"]["last"], last, rtol=1e-10, atol=1e-12)
    assert kept >= 5
    assert (last - mean).norm() > 0.05


def test_somebody_elses_change_of_y_begins_a_new_mean():
    problem, _, y = noisy(noise=2.0)
    solver, batches = averaging(problem, lower_iters=3), drawn(40, 4)
    for k in range(4):
        solver.step(batches[-1], list(batches[3 * k : 3 * k + 3]))
    with torch.no_grad():
        y += 100.0
    twin, _, y2 = noisy(noise=2.0)
    y2.data = y.detach().clone()
    fresh = averaging(twin, lower_iters=3)
    for s in (solver, fresh):
        s.step(batches[-1], list(batches[12:15]))
    assert torch.equal(y, y2)
    assert y.max() > 50  # neither has gone back


def test_one_batch_for_all_lower_steps_is_not_averaged():
    problem, _, y = noisy()
    solver, batch = averaging(problem, lower_iters=400), drawn(4)
    solver.step(batch, batch)
    assert solver.state_dict()["lower"]["average"] == {}
    assert torch.autograd.grad(problem.lower_loss(batch), y)[0].norm() < 1e-2


def test_one_batch_after_several_is_solved_all_the_same():
    problem, _, y = noisy()
    solver, batches = averaging(problem, lower_iters=10), drawn(10, 4)
    solver.step(batches[0], list(batches))
    before = y.detach().clone()
    solver.step(batches[0], batches[0])
    assert not torch.equal(before, y)


def test_an_iterate_whose_loss_is_not_finite_does_not_end_the_run():
    problem, _, y = noisy(noise=1.0)
    loss = problem.lower_loss
    problem.lower_loss = lambda b: loss(b) * (float("nan") if y.detach().norm() > 30 else 1.0)
    solver, batches = averaging(problem, lower_iters=10), drawn(200, 4)
    for k in range(6):
        solver.step(batches[0], list(batches[10 * k : 10 * k + 10]))
    bad = list(batches[60:70])
    bad[3] = torch.full((4,), 60.0).double()  # an outlier throws the iterate over the wall, not the mean
    record = solver.step(batches[0], bad)
    assert (record.lower_status, record.upper_status) == (bisls.Status.NON_FINITE, bisls.Status.OK)
    later = [solver.step(batches[0], list(batches[k : k + 10])).lower_status for k in range(70, 100, 10)]
    assert bisls.Status.OK in later


# --- all of it, saved


OPTIONS = {
    "default": {},
    "averaged": {"lower_average": True},
    "three": {"search_every": 3, "lower_average": True},
}


@pytest.mark.parametrize("cut", [5, 6, 7])
@pytest.mark.parametrize("given", [False, True])
@pytest.mark.parametrize("name", OPTIONS)
def test_a_saved_state_goes_on_bit_for_bit_with_batches(name, given, cut):
    batches = drawn(200, 4, seed=7)

    def records(cut: int | None):
        problem, x, y = noisy()
        solver, found = bisls.BiSLS(problem, lower_iters=4, **OPTIONS[name]), []
        for k in range(14):
            if k == cut:
                file = io.BytesIO()
                torch.save(solver.state_dict(), file)
                file.seek(0)
                fresh, x2, y2 = noisy()
                x2.data, y2.data = x.detach().clone(), y.detach().clone()
                x, y, solver = x2, y2, bisls.BiSLS(fresh, lower_iters=4, **OPTIONS[name])
                solver.load_state_dict(torch.load(file, weights_only=True))
            judge = batches[150 + k] if given else None
            found.append(solver.step(batches[k], list(batches[20 + 4 * k : 24 + 4 * k]), judge).to_dict())
        return repr((x.tolist(), y.tolist(), found))

    assert records(cut) == records(None)


@pytest.mark.parametrize("cut", [5, 7])
def test_a_saved_state_goes_on_bit_for_bit_without_noise(cut):
    def records(cut: int | None):
        problem, _, _ = noisy()
        solver, found, batch = bisls.BiSLS(problem), [], drawn(4)
        for k in range(10):
            if k == cut:
                file = io.BytesIO()
                torch.save(solver.state_dict(), file)
                file.seek(0)
                solver = bisls.BiSLS(problem)
                solver.load_state_dict(torch.load(file, weights_only=True))
            found.append(solver.step(batch, batch).to_dict())
        return repr(found)

    assert records(cut) == records(None)


# --- boxes


def test_trial_points_stay_inside_the_box_once_a_step_is_known():
    solver, outside = boxed()
    solver.step(None, None)
    outside.clear()
    for _ in range(20):
        solver.step(None, None)
    assert not outside


def test_trial_points_of_the_first_search_stay_inside_the_box():
    solver, outside = boxed()
    solver.step(None, None)
    assert not outside


def boxed() -> tuple[bisls.Solver, list[list[float]]]:
    matrix = drawn(6, 6)
    matrix = matrix @ matrix.T / 6 + 0.05 * torch.eye(6, dtype=torch.float64)
    target = torch.tensor([2.0, -1.0, 0.5, 0.3, 0.7, 0.2], dtype=torch.float64)
    x = torch.full((6,), 0.5, dtype=torch.float64, requires_grad=True)
    y = torch.full((6,), 0.5, dtype=torch.float64, requires_grad=True)
    outside: list[list[float]] = []

    def upper(_: object) -> Tensor:
        if x.detach().min() < -1e-12 or x.detach().max() > 1 + 1e-12:
            outside.append(x.tolist())
        return 0.5 * (y - target) @ matrix @ (y - target) + 0.1

    problem = bisls.Bilevel(upper, lambda _: 0.5 * ((y - x) ** 2).sum(), [x], [y], upper_bounds=bisls.Box(0.0, 1.0))
    return bisls.BiSLS(problem), outside


# --- Tangent: the difference that stands for g_yx d


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 0.05), (torch.float64, 0.05)])
@pytest.mark.parametrize("alpha", [1e-2, 1.0])
def test_the_difference_agrees_with_the_exact_product(dtype, tolerance, alpha):
    """g_yx d = exp(x) y d on a smooth problem whose pull changes along the ray."""
    x = torch.linspace(-2.0, 1.0, 10, dtype=dtype).requires_grad_()
    y = torch.linspace(0.5, 1.5, 10, dtype=dtype).requires_grad_()
    problem = bisls.Bilevel(
        lambda _: ((y - 1.0) ** 2).sum() + 0.1 * x.sum(),
        lambda _: 0.5 * ((y - 2.0) ** 2).sum() + 0.5 * (x.exp() * y**2).sum(),
        [x],
        [y],
    )
    method = bisls.Implicit(bisls.CG(iters=100, tol=1e-6))
    oracle = bisls.Oracle(problem)
    estimate = method.estimate(oracle, None, None, {})
    scene = Scene(
        oracle=oracle,
        method=method,
        estimate=estimate,
        search=estimate.flat / estimate.flat.norm(),
        x=problem.x.read(),
        y=problem.y.read(),
        sample=Sample(None, Minibatches([None])),
        **lowered(problem, 0.1),
        alpha=alpha,
        max_step=inf,
    )
    pull = bisls.Tangent(exact=True)._pull(scene, estimate.graph)
    products = oracle.cost.mixed_products
    near = bisls.Tangent()._pull(scene, estimate.graph)
    assert oracle.cost.mixed_products == products  # none was needed
    torch.testing.assert_close(pull, (x.exp() * y).detach() * scene.search, rtol=1e-5, atol=1e-6)
    assert 0 < (near - pull).norm() < tolerance * pull.norm()
    assert torch.equal(problem.x.read(), scene.x)
    slopes = [bisls.Tangent(exact=exact).ray(scene, {}).line.slope for exact in (True, False)]
    assert slopes[1] == pytest.approx(slopes[0], rel=tolerance)


def test_a_step_too_short_to_be_seen_is_answered_by_the_exact_product():
    problem, _, _ = noisy()
    oracle = bisls.Oracle(problem)
    method = bisls.Implicit(EXACT)
    batch = torch.zeros(4, dtype=torch.float64)
    estimate = method.estimate(oracle, batch, batch, {})
    scene = Scene(
        oracle=oracle,
        method=method,
        estimate=estimate,
        search=estimate.flat,
        x=problem.x.read(),
        y=problem.y.read(),
        sample=Sample(batch, Minibatches([batch])),
        **lowered(problem, 0.1),
        alpha=1e-18,
        max_step=inf,
    )
    before = oracle.cost.mixed_products
    pull = bisls.Tangent()._pull(scene, estimate.graph)
    assert oracle.cost.mixed_products == before + 1
    assert pull.norm() > 0.1


# --- Vector.lent


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_lent_values_come_back_exactly_and_graphs_stay_usable(dtype):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).to(dtype)
    tensors = list(model.parameters())
    vector = Vector(tensors)
    before = [tensor.detach().clone() for tensor in tensors]
    loss = (model(torch.ones(2, 3, dtype=dtype)) ** 2).sum()
    first = torch.autograd.grad(loss, tensors, create_graph=True)
    with vector.lent(vector.read() + 1.0):
        assert not torch.equal(tensors[0], before[0])
        model(torch.ones(2, 3, dtype=dtype)).sum()
    assert all(torch.equal(tensor, own) for tensor, own in zip(tensors, before, strict=True))
    second = torch.autograd.grad(first[0].sum(), tensors)
    again = torch.autograd.grad((model(torch.ones(2, 3, dtype=dtype)) ** 2).sum(), tensors, create_graph=True)
    for mine, fresh in zip(second, torch.autograd.grad(again[0].sum(), tensors), strict=True):
        assert torch.equal(mine, fresh)


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_lent_values_come_back_after_an_exception(error):
    tensors = [torch.tensor([0.1, 0.2], requires_grad=True), torch.tensor([[0.3]], requires_grad=True)]
    vector, before = Vector(tensors), Vector(tensors).read()
    with pytest.raises(error), vector.lent(torch.tensor([1.0, 2.0, 3.0])):
        raise error
    assert torch.equal(vector.read(), before)
    assert all(tensor.requires_grad for tensor in tensors)


# --- lower losses that pass through 0


@pytest.mark.parametrize("beta", [None, 1.0])
def test_a_lower_loss_that_is_zero_at_the_start_and_negative_below_is_solved(beta):
    x = torch.tensor([1.0, 2.0], dtype=torch.float64, requires_grad=True)
    y = torch.zeros(2, dtype=torch.float64, requires_grad=True)
    problem = bisls.Bilevel(
        lambda _: ((y / 1e3 - 3.0) ** 2).sum(), lambda b: 0.5 * (y**2).sum() - (1e3 * x + b) @ y, [x], [y]
    )
    solver, noise = bisls.BiSLS(problem, beta=beta), drawn(600, 2)
    for k in range(60):
        solver.step(None, list(noise[10 * k : 10 * k + 10]))
    assert x.tolist() == pytest.approx([3.0, 3.0], abs=1e-2)


# --- the promise

STARTS = [(None, None), (1e-4, 1e-3), (1e2, 1e3)]


@pytest.mark.parametrize(("alpha", "beta"), STARTS)
def test_the_quadratic_is_solved_from_any_start(alpha, beta):
    task = tasks.quadratic()
    start = task.metrics()["gap"]
    solver = bisls.BiSLS(task.problem, alpha=alpha, beta=beta, lower_iters=task.lower_iters)
    for _ in range(60):
        assert solver.step(task.upper_data, task.lower_data).upper_value >= 0
    assert task.metrics()["gap"] < 1e-4 * start


@pytest.mark.parametrize(
    ("penalty", "alpha", "beta"),
    [*((torch.sigmoid, *start) for start in STARTS), (torch.exp, None, None)],
    ids=lambda part: getattr(part, "__name__", str(part)),
)
def test_penalties_are_chosen_from_any_start(penalty, alpha, beta):
    task = tasks.logistic_penalties(penalty=penalty)
    solver = bisls.BiSLS(task.problem, alpha=alpha, beta=beta, lower_iters=task.lower_iters)
    values = []
    for k in range(200):
        solver.step(task.upper_data, task.lower_data)
        if k % 10 == 9:
            values.append(task.exact())
            if values[-1] <= 0.0783:
                break
    assert values[-1] <= 0.0783


@pytest.mark.slow
def test_weight_decay_of_a_network_is_tuned_though_its_loss_is_not_convex():
    """The whole network below, labels with noise: held-out loss against training as long with the decay it starts from."""

    def held_out(seed, **parts):
        torch.manual_seed(seed)
        features, labels = (torch.tensor(part) for part in load_breast_cancer(return_X_y=True))
        features = ((features - features.mean(0)) / features.std(0)).float()
        order = torch.randperm(len(labels))
        features, labels = features[order], labels[order]
        noisy = torch.where(torch.rand(len(labels)) < 0.25, torch.randint(0, 2, labels.shape), labels)
        model = torch.nn.Sequential(torch.nn.Linear(30, 32), torch.nn.Tanh(), torch.nn.Linear(32, 2))
        decay = torch.full((4,), -6.0, requires_grad=True)

        def upper(rows):
            return torch.nn.functional.cross_entropy(model(features[rows]), labels[rows])

        def lower(rows):
            penalty = sum(d.exp() * (p**2).sum() for d, p in zip(decay, model.parameters(), strict=True))
            return torch.nn.functional.cross_entropy(model(features[rows]), noisy[rows]) + penalty

        solver = bisls.BiSLS(bisls.Bilevel(upper, lower, [decay], model.parameters()), **parts)
        for _ in range(60):
            record = solver.step(slice(227, 398), slice(227))
        return record.upper_value

    ratios = [held_out(seed) / held_out(seed, upper_step=bisls.Constant(1e-12)) for seed in range(4)]
    assert max(ratios) < 1.0
    assert sum(ratios) / 4 < 0.9
