"""Ready problems: their published numbers, exact values against independent solves, no trace left, and the sampler."""

from __future__ import annotations

import math
import sys

import numpy as np
import pytest
import scipy.optimize
import torch
from sklearn.datasets import load_digits
from sklearn.metrics import roc_auc_score
from torch.nn import functional

import bisls
from bisls import tasks
from bisls.tasks.solve import Design, logistic
from bisls.tasks.training import auc

DIGITS, LABELS = load_digits(return_X_y=True)
DIGITS = DIGITS / 16.0


def big_digits(n: int = 200):
    """Digits of 8 x 8, enlarged to 28 x 28."""
    images = torch.tensor(DIGITS[:n]).reshape(-1, 1, 8, 8)
    return functional.interpolate(images, size=(28, 28), mode="bilinear").squeeze(1).clamp(0, 1), LABELS[:n]


def hyper_representation(**options):
    images, labels = big_digits()
    options = {"lower_size": 80, "test_size": 40, "batch_size": None, "ridge": 0.1, "seed": 1} | options
    return tasks.hyper_representation(images, labels, **options)


def distillation(**options):
    images = DIGITS[:600].reshape(-1, 8, 8)
    return tasks.distillation(images, LABELS[:600], **{"test_size": 200, "batch_size": None, "l2": 1e-2} | options)


def cleaning(**options):
    return tasks.cleaning(
        DIGITS, LABELS, **{"train": 500, "validation": 300, "batch_size": None, "l2": 1e-2, "corrupted": 0.4} | options
    )


# every task on all of its data at every step; the options are those that all of them take
TASKS = {
    "quadratic": tasks.quadratic,
    "logistic": tasks.logistic_penalties,
    "logistic_exp": lambda **options: tasks.logistic_penalties(penalty=torch.exp, **options),
    "ridge": tasks.ridge_penalties,
    "least_squares": hyper_representation,
    "cross_entropy": lambda **options: hyper_representation(loss=tasks.CrossEntropy(), **options),
    "distillation": distillation,
    "distillation_many": lambda **options: distillation(per_class=8, **options),  # more rows than features
    "cleaning": cleaning,
}
# the largest relative difference measured between exact() and L-BFGS on the task's own losses in float64 was 1.3e-9
EXACT = 1e-7


def moved(task: tasks.Task, scale: float = 0.3, seed: int = 5) -> tasks.Task:
    """The same task at another x."""
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for tensor in task.problem.x.tensors:
            tensor += scale * torch.randn(tensor.shape, generator=draw, dtype=tensor.dtype)
    return task


def independent(task: tasks.Task) -> float:
    """F(x) by torch's L-BFGS on the task's own losses."""
    y = task.problem.y.tensors
    optimiser = torch.optim.LBFGS(
        y, max_iter=400, tolerance_grad=1e-10, tolerance_change=0.0, history_size=50, line_search_fn="strong_wolfe"
    )

    def closure():
        loss = task.problem.lower_loss(task.lower_data)
        for tensor, gradient in zip(y, torch.autograd.grad(loss, y), strict=True):
            tensor.grad = gradient
        return loss

    optimiser.step(closure)
    assert math.sqrt(sum(float((tensor.grad**2).sum()) for tensor in y)) < 1e-8
    with torch.no_grad():
        return float(task.problem.upper_loss(task.upper_data))


@pytest.mark.parametrize("name", TASKS)
def test_exact_agrees_with_an_independent_solve(name):
    scale = 0.02 if name in ("least_squares", "cross_entropy") else 0.7
    task = moved(TASKS[name](dtype=torch.float64), scale)
    at_start = task.exact()
    assert at_start == pytest.approx(independent(task), rel=EXACT)
    assert task.exact() == pytest.approx(at_start, rel=1e-9), "exact depends on where y stands"
    assert task.exact() > 1e-3, "the truth is far above the tolerance"

    # y is at y*(x) now: the implicit hypergradient is the slope of exact() along its own direction
    method = bisls.Implicit(bisls.CG(iters=2000, tol=1e-10))
    h = bisls.hypergradient(task.problem, task.upper_data, task.lower_data, method).flat
    x, here = task.problem.x, task.problem.x.read()
    values = []
    for step in (1e-5, -1e-5):
        x.write_(here + step * h / h.norm())
        values.append(task.exact())
    slope = (values[0] - values[1]) / 2e-5
    assert slope > 1e-3
    assert slope == pytest.approx(float(h.norm()), rel=1e-4)


@pytest.mark.parametrize("name", TASKS)
def test_exact_and_metrics_leave_no_trace(name):
    task = moved(TASKS[name](seed=3), 0.02)
    problem = task.problem
    frozen = problem.x.tensors[0].requires_grad_(False)
    tensors = [*problem.x.tensors, *problem.y.tensors]
    before = [(tensor.clone(), tensor.requires_grad, tensor.grad) for tensor in tensors]
    state, numpy_state = torch.get_rng_state(), np.random.get_state()[1].copy()  # noqa: NPY002
    value, found = task.exact(), task.metrics()
    assert math.isfinite(value)
    assert all(math.isfinite(measure) for measure in found.values())
    assert torch.equal(state, torch.get_rng_state())
    assert np.array_equal(numpy_state, np.random.get_state()[1])  # noqa: NPY002
    assert not frozen.requires_grad
    for tensor, (values, requires_grad, grad) in zip(tensors, before, strict=True):
        assert torch.equal(tensor, values)
        assert tensor.requires_grad is requires_grad
        assert tensor.grad is grad
    assert torch.is_grad_enabled()


@pytest.mark.parametrize("name", TASKS)
def test_a_task_is_a_function_of_its_seed(name):
    state = torch.get_rng_state()
    one, same, other = (TASKS[name](seed=seed) for seed in (4, 4, 5))
    assert torch.equal(state, torch.get_rng_state()), "torch's global generator was used"
    assert torch.equal(one.problem.x.read(), same.problem.x.read())
    assert one.exact() == same.exact()
    assert one.metrics() == same.metrics()
    if name not in ("logistic", "logistic_exp", "ridge"):  # where the seed is of the batches alone
        assert one.exact() != other.exact() or name.startswith("distillation")  # which starts at the logarithm of 10
    assert one.name in repr(one)


@pytest.mark.parametrize("name", TASKS)
def test_the_lower_loss_is_strongly_convex(name):
    task = TASKS[name](dtype=torch.float64)
    y = task.problem.y
    moved(task, 0.02)
    lower = task.problem.lower_loss(task.lower_data)
    gradient = torch.autograd.grad(lower, y.tensors, create_graph=True)
    draw = torch.Generator().manual_seed(0)
    for _ in range(5):
        v = torch.randn(y.numel, generator=draw, dtype=torch.float64)
        product = y.join(torch.autograd.grad(gradient, y.tensors, y.split(v), retain_graph=True))
        assert float(v @ product) > 1e-4 * float(v @ v)


# ---- quadratic


def test_quadratic_reaches_its_known_minimum():
    task = tasks.quadratic(condition=100.0, seed=2)
    gap, value = task.metrics()["gap"], task.exact()
    x = task.problem.x.tensors[0]
    assert gap > 0.1
    optimiser = torch.optim.LBFGS(
        [x], max_iter=500, tolerance_grad=1e-12, tolerance_change=0.0, line_search_fn="strong_wolfe"
    )

    def closure():  # F by central differences is exact on a quadratic
        gradient = torch.zeros_like(x)
        with torch.no_grad():
            for i in range(len(x)):
                for sign in (1.0, -1.0):
                    x[i] += sign
                    gradient[i] += sign * task.exact() / 2
                    x[i] -= sign
        x.grad = gradient
        return torch.tensor(task.exact(), dtype=torch.float64)

    optimiser.step(closure)
    assert task.metrics()["gap"] == pytest.approx(0.0, abs=1e-12)
    assert value - task.exact() == pytest.approx(gap, rel=1e-9)


# ---- penalties


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("penalty", "start"), [(torch.sigmoid, 0.2628), (torch.exp, 0.3232)])
def test_logistic_starts_at_the_published_value(penalty, start, dtype):
    task = tasks.logistic_penalties(penalty=penalty, dtype=dtype)
    assert round(task.exact(), 4) == start
    assert [len(part[0]) for part in (task.lower_data, task.upper_data)] == [227, 171]
    assert (task.problem.x.numel, task.problem.y.numel, task.lower_iters) == (30, 30, 20)
    assert task.problem.x.dtype == dtype


def test_logistic_reaches_the_published_reference():
    task = tasks.logistic_penalties(dtype=torch.float64)
    (a, b), (av, bv) = ([part.numpy() for part in parts] for parts in (task.lower_data, task.upper_data))
    x = task.problem.x.tensors[0]

    def value_and_gradient(at):
        with torch.no_grad():
            x.copy_(torch.tensor(at))
        s = torch.sigmoid(x.detach())
        w = logistic(Design(task.lower_data[0]), task.lower_data[1], s, torch.zeros_like(s)).numpy()
        s, p = s.numpy(), 1 / (1 + np.exp(-a @ w))
        assert np.abs(a.T @ (p - b) / len(a) + s * w).max() < 1e-12
        hessian = (a * (p * (1 - p))[:, None]).T @ a / len(a) + np.diag(s)
        scores = av @ w
        grad_w = av.T @ (1 / (1 + np.exp(-scores)) - bv) / len(av)
        return np.mean(np.logaddexp(0, scores) - bv * scores), -s * (1 - s) * w * np.linalg.solve(hessian, grad_w)

    # F is not convex, and flat far out: without the box this very method stops at 0.084
    found = scipy.optimize.minimize(
        value_and_gradient, np.zeros(30), jac=True, method="L-BFGS-B", bounds=[(-15, 15)] * 30, options={"maxiter": 60}
    )
    with torch.no_grad():
        x.copy_(torch.tensor(found.x))
    assert task.exact() == pytest.approx(found.fun, rel=1e-10)
    assert 0.075 < task.exact() < 0.0765, "0.0758 is the published reference, 0.0753 the least value known"


def test_arrays_of_any_kind_give_the_same_task():
    rows, labels = DIGITS[:300], LABELS[:300] % 2
    made = [
        tasks.logistic_penalties(train=(kind(rows), kind(labels)), validation=(kind(rows[:50]), kind(labels[:50])))
        for kind in (np.asarray, torch.tensor, np.ndarray.tolist)
    ]
    assert len({task.exact() for task in made}) == 1
    assert made[0].metrics() == {}
    floats = tasks.logistic_penalties(train=(rows, labels.astype(float)), validation=(rows[:50], labels[:50] > 0))
    assert floats.exact() == made[0].exact()


def test_penalties_far_apart_and_numbers_that_are_not_finite():
    for make in (tasks.logistic_penalties, tasks.ridge_penalties):
        task = make(penalty=torch.exp, dtype=torch.float64)
        x = task.problem.x.tensors[0]
        with torch.no_grad():
            x.copy_(torch.linspace(-12, 60, len(x)))
            task.problem.y.tensors[0].fill_(math.inf)  # a run that diverged below says nothing about F
            assert 0.05 < task.exact() < 10.0
            x[2] = math.nan
        assert math.isnan(task.exact())


def test_a_lower_problem_without_a_solution_is_said_to_be_one():
    rows = [
        [1.0, 0.0],
        [2.0, 0.0],
        [-1.0, 0.0],
    ]  # the second feature is empty: without a penalty its weight is anything
    task = tasks.logistic_penalties(train=(rows, [1, 1, 0]), validation=(rows, [1, 1, 0]), penalty=torch.exp)
    with torch.no_grad():
        task.problem.x.tensors[0].fill_(-1000.0)
    with pytest.warns(RuntimeWarning, match="could not be solved tightly"):
        assert math.isnan(task.exact())


def test_the_default_data_say_what_they_need(monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn", None)
    for make in (tasks.logistic_penalties, tasks.ridge_penalties):
        with pytest.raises(ImportError, match=r"pip install bisls\[cli\]"):
            make()
    rows = [[1.0, 0.5], [2.0, 0.0], [-1.0, 0.3]]
    tasks.logistic_penalties(train=(rows, [1, 1, 0]), validation=(rows, [1, 1, 0]))


# ---- pictures


def test_hyper_representation_has_the_published_sizes():
    images, labels = big_digits()
    task = tasks.hyper_representation(images, labels, lower_size=80, test_size=40, batch_size=32, dtype=torch.float64)
    assert (task.problem.x.numel, task.problem.y.numel, task.lower_iters) == (60_856, 850, 10)
    assert not task.problem.y.read().any()
    batch = next(task.upper_data)
    assert [tuple(part.shape) for part in batch] == [(32, 1, 32, 32), (32,)]
    assert float(batch[0].min()) == pytest.approx(-0.1307 / 0.3081)
    assert [len(data.tensors[0]) for data in (task.upper_data, task.lower_data)] == [80, 80]
    # at y = 0 each sample is at distance 1 from its one-hot vector, and the mean over samples is 1/2 of that
    assert task.problem.upper_loss(batch).item() == pytest.approx(0.5)
    assert task.exact() < 0.5


def test_bytes_and_numbers_are_the_same_pictures():
    images, labels = big_digits()
    octets = (images * 255).round().to(torch.uint8)
    made = [
        tasks.hyper_representation(kind, labels, lower_size=80, test_size=40, dtype=torch.float64, batch_size=8).exact()
        for kind in (octets, octets.numpy(), octets.double() / 255)
    ]
    assert made[0] == made[1] == pytest.approx(made[2], rel=1e-12)


def test_no_sample_is_in_two_parts():
    n = 120
    images = torch.zeros(n, 28, 28, dtype=torch.float64)
    images[:, 0, 0] = torch.arange(n) / n
    labels = torch.arange(n) % 10
    task = tasks.hyper_representation(images, labels, lower_size=50, test_size=30, batch_size=None, dtype=torch.float64)
    marks = [
        {round((float(image[0, 2, 2]) * 0.3081 + 0.1307) * n) for image in part[0]}
        for part in (task.lower_data, task.upper_data)
    ]
    assert [len(part) for part in marks] == [50, 40]
    assert not marks[0] & marks[1]


def test_distillation_learns_pictures_in_the_order_of_the_classes():
    task = distillation(per_class=2, dtype=torch.float64)
    learnt = task.problem.x.tensors[0]
    assert learnt.shape == (20, 8, 8)
    assert task.problem.y.numel == 650
    assert task.lower_data[0].tolist() == [kind for kind in range(10) for _ in range(2)]
    assert task.exact() == pytest.approx(math.log(10), rel=1e-12)
    with torch.no_grad():  # the mean of each class is a good picture of it
        means = torch.stack([torch.tensor(DIGITS[kind == LABELS].mean(0)) for kind in range(10)])
        learnt.copy_(means.repeat_interleave(2, dim=0).reshape(20, 8, 8))
    assert task.metrics()["accuracy"] > 0.8
    assert task.exact() < 2.0


def test_cleaning_corrupts_a_fixed_share_once():
    clean, task = cleaning(corrupted=0.0), cleaning(corrupted=0.4)
    assert torch.equal(clean.lower_data[0], task.lower_data[0])
    wrong = clean.lower_data[1] != task.lower_data[1]
    assert int(wrong.sum()) == 200
    assert torch.equal(clean.upper_data[1], task.upper_data[1])
    assert task.metrics()["auc"] == 0.5
    assert "auc" not in clean.metrics()
    before = task.exact()
    with torch.no_grad():
        task.problem.x.tensors[0].copy_(torch.where(wrong, -4.0, 4.0))
    assert task.metrics()["auc"] == 1.0
    assert task.exact() < before - 0.1
    assert set(cleaning(train=1000, validation=797).metrics()) == {"auc"}, "no rows are left for the accuracy"


def test_a_lower_batch_of_cleaning_uses_its_own_weights():
    task = cleaning(batch_size=16)
    rows, labels, indices = next(task.lower_data)
    (gradient,) = torch.autograd.grad(task.problem.lower_loss((rows, labels, indices)), task.problem.x.tensors)
    assert set(gradient.nonzero().flatten().tolist()) == set(indices.tolist())
    assert torch.equal(task.lower_data.tensors[0][indices], rows)


def test_auc_agrees_with_scikit_learn_with_ties():
    draw = np.random.default_rng(0)
    scores, truth = draw.integers(0, 12, 300) / 3.0, draw.random(300) < 0.3
    scores = scores + truth
    ours = auc(torch.tensor(scores[truth]), torch.tensor(scores[~truth]))
    assert ours == pytest.approx(roc_auc_score(truth, scores), rel=1e-12)
    assert ours > 0.6


# ---- batches


def rows(n: int = 23):
    return torch.arange(n, dtype=torch.float32)[:, None] * torch.tensor([1.0, -2.0]), torch.arange(n)


def test_an_epoch_takes_each_row_at_most_once_and_no_batch_twice():
    batches = tasks.Batches(rows(24), batch_size=6, seed=1)
    epochs = [torch.cat([next(batches)[1] for _ in range(4)]) for _ in range(3)]
    assert all(sorted(epoch.tolist()) == list(range(24)) for epoch in epochs)
    assert not torch.equal(epochs[0], epochs[1])
    short = tasks.Batches(rows(23), batch_size=6, seed=1)
    drawn = [next(short)[1] for _ in range(30)]
    assert all(len(batch) == 6 for batch in drawn)
    for k in range(10):
        assert len(set(torch.cat(drawn[3 * k : 3 * k + 3]).tolist())) == 18
    assert len({tuple(sorted(batch.tolist())) for batch in drawn}) == 30
    assert len(set(torch.cat(drawn).tolist())) == 23, "other rows are left out the next time"


def test_batches_keep_rows_together_and_name_them():
    state = torch.get_rng_state()
    batches = tasks.Batches(rows(), batch_size=5, seed=2, indices=True)
    assert iter(batches) is batches
    for _ in range(9):
        features, labels, indices = next(batches)
        assert torch.equal(labels, indices)
        assert torch.equal(features[:, 1], -2.0 * labels)
    assert torch.equal(state, torch.get_rng_state())
    assert "23 rows" in repr(batches)


@pytest.mark.parametrize("after", [0, 2, 4, 7])
def test_batches_resume_bit_for_bit(after, tmp_path):
    batches = tasks.Batches(rows(), batch_size=5, seed=3)
    for _ in range(after):
        next(batches)
    torch.save(batches.state_dict(), tmp_path / "place.pt")
    expected = [next(batches)[1] for _ in range(15)]
    again = tasks.Batches(rows(), batch_size=5, seed=99)
    again.load_state_dict(torch.load(tmp_path / "place.pt", weights_only=True))
    assert all(torch.equal(next(again)[1], batch) for batch in expected)
    with pytest.raises(ValueError, match="the state is of 23 rows, the data have 9"):
        tasks.Batches(rows(9), batch_size=5).load_state_dict(batches.state_dict())
    with pytest.raises(ValueError, match="lacks generator, order"):
        batches.load_state_dict({"position": 0})


def test_ranks_share_the_same_global_batches():
    whole = tasks.Batches(rows(), batch_size=6, seed=4, indices=True)
    shares = [tasks.Batches(rows(), 6, seed=4, indices=True, rank=rank, world=3) for rank in range(3)]
    for _ in range(10):
        parts = [next(share) for share in shares]
        assert all(len(part[0]) == 2 for part in parts)
        for joined, full in zip(zip(*parts, strict=True), next(whole), strict=True):
            assert torch.equal(torch.cat(joined), full)
    assert torch.equal(shares[0].state_dict()["order"], shares[2].state_dict()["order"])
    assert "rank=2, world=3" in repr(shares[2])


def test_both_levels_draw_different_batches():
    task = cleaning(train=300, validation=300, batch_size=300)
    assert not torch.equal(task.upper_data.state_dict()["order"], task.lower_data.state_dict()["order"])
    penalties = tasks.logistic_penalties(batch_size=16, lower_batch_size=8)
    assert [len(next(data)[0]) for data in (penalties.upper_data, penalties.lower_data)] == [16, 8]


# ---- complaints

ROWS = [[0.5, 2.0], [-1.0, 1.0], [1.5, -0.5]]
PART = (ROWS, [1, 0, 1])
IMAGES = torch.zeros(30, 28, 28)
KINDS = torch.arange(30) % 10
COMPLAINTS = [
    (lambda: tasks.Batches(rows(), 24), r"`Batches\(batch_size=24\)`.* from 1 to the number of rows, 23"),
    (lambda: tasks.Batches(rows(), 0), r"`Batches\(batch_size=0\)`"),
    (lambda: tasks.Batches(rows(), 5.0), r"`Batches\(batch_size=5.0\)`.* whole number"),
    (lambda: tasks.Batches(torch.zeros(3), 1), "must be a tuple of at least one tensor"),
    (lambda: tasks.Batches((torch.zeros(3), torch.zeros(4)), 1), r"equally many rows, got \[3, 4\]"),
    (lambda: tasks.Batches((torch.zeros(0, 2),), 1), "no rows"),
    (lambda: tasks.Batches(rows(), 6, world=4), r"`Batches\(world=4\)`: world must divide batch_size=6"),
    (lambda: tasks.Batches(rows(), 6, rank=3, world=3), r"`Batches\(rank=3\)`.* from 0 to world - 1 = 2"),
    (lambda: tasks.Batches(rows(), 6, seed=-1), r"`Batches\(seed=-1\)`"),
    (lambda: tasks.quadratic(n_upper=0), r"`quadratic\(n_upper=0\)`"),
    (lambda: tasks.quadratic(condition=0.5), r"`quadratic\(condition=0.5\)`.* at least 1"),
    (lambda: tasks.quadratic(dtype=torch.float16), r"`quadratic\(dtype=torch.float16\)`"),
    (lambda: tasks.quadratic(seed="a"), r"`quadratic\(seed='a'\)`"),
    (
        lambda: tasks.logistic_penalties(train=(ROWS, [1, -1, 1]), validation=PART),
        r"`logistic_penalties\(train=...\)`: labels must be 0 or 1, got -1, 1",
    ),
    (
        lambda: tasks.logistic_penalties(train=PART, validation=(ROWS, [0, 1, 2])),
        r"\(validation=...\)`: labels must be 0 or 1, got 0, 1, 2",
    ),
    (lambda: tasks.logistic_penalties(train=PART), "give both parts, or neither"),
    (lambda: tasks.ridge_penalties(test=PART), "give both parts, or neither"),
    (lambda: tasks.ridge_penalties(train=ROWS, validation=PART), r"\(train=...\)` must be a pair"),
    (lambda: tasks.ridge_penalties(train=([1.0, 2.0], [1, 0]), validation=PART), r"a matrix.*got shape \(2,\)"),
    (lambda: tasks.ridge_penalties(train=PART, validation=([[1.0]], [1])), "1 features, but train has 2"),
    (lambda: tasks.ridge_penalties(train=(ROWS, [1, 0]), validation=PART), "3 rows need as many labels"),
    (lambda: tasks.ridge_penalties(train=([[math.nan, 1.0]], [1]), validation=PART), "NaN or infinite"),
    (lambda: tasks.ridge_penalties(train=([["a", "b"]], [1]), validation=PART), "array of real numbers"),
    (lambda: tasks.ridge_penalties(penalty="exp"), r"`ridge_penalties\(penalty='exp'\)`: penalty must be a callable"),
    (lambda: tasks.ridge_penalties(penalty=torch.sin), "finite number above 0"),
    (lambda: tasks.ridge_penalties(batch_size=1000), r"\(batch_size=1000\)`.*None.*number of rows, 133"),
    (lambda: tasks.hyper_representation(IMAGES[:, :8], KINDS), r"N x 28 x 28, got shape \(30, 8, 28\)"),
    (lambda: tasks.hyper_representation(IMAGES + 2.0, KINDS), r"must lie in \[0, 1\], got values from 2 to 2"),
    (lambda: tasks.hyper_representation(IMAGES, KINDS + 1), "0 to 9, got 10"),
    (lambda: tasks.hyper_representation(IMAGES, KINDS), r"lower_size=10000.* test_size=10000 .* 30 rows"),
    (lambda: tasks.hyper_representation(IMAGES, KINDS, ridge=0.0), r"\(ridge=0.0\)`.* above 0"),
    (lambda: tasks.hyper_representation(IMAGES, KINDS, loss="cross_entropy"), r"loss must be a HeadLoss"),
    (lambda: tasks.distillation(IMAGES, KINDS[:5]), r"one label a row, shape \(30,\), got shape \(5,\)"),
    (lambda: tasks.distillation(IMAGES, KINDS.float()), "whole numbers 0, 1, 2, ..., got dtype torch.float32"),
    (lambda: tasks.distillation(IMAGES, KINDS - 1), "got values from -1 to 8"),
    (lambda: tasks.distillation(IMAGES, KINDS), r"\(test_size=10000\)`.* from 0 to 29"),
    (lambda: tasks.distillation(IMAGES, KINDS, per_class=0), r"\(per_class=0\)`"),
    (lambda: tasks.cleaning(IMAGES, KINDS), r"\(train=20000\)`: train \+ validation=5000 .* rows, 30"),
    (lambda: tasks.cleaning(IMAGES, KINDS, corrupted=1.5), r"\(corrupted=1.5\)`.*\[0, 1\]"),
    (lambda: tasks.cleaning(IMAGES, KINDS, l2=0.0), r"\(l2=0.0\)`"),
    (lambda: tasks.cleaning(IMAGES, KINDS, train=20, validation=5), r"\(batch_size=64\)`.*number of rows, 5"),
]


@pytest.mark.parametrize(("make", "message"), COMPLAINTS, ids=[message[:30] for _, message in COMPLAINTS])
def test_complaints_quote_the_call(make, message):
    with pytest.raises(ValueError, match=message):
        make()
