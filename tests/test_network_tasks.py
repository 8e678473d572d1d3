"""Tasks with a network below: functions of their seed, no trace left, right measures, and what came out after training anew."""

from __future__ import annotations

import math
import sys
import sysconfig

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits
from torch.nn import functional

import bisls
from bisls import tasks
from bisls.tasks.denoising import _cleaned
from bisls.tasks.few_shot import stacked
from bisls.tasks.mixture import Transformer, library
from bisls.tasks.training import drawn

DIGITS, LABELS = load_digits(return_X_y=True)
DIGITS = DIGITS.reshape(-1, 8, 8) / 16.0


def clusters():
    """Forty classes of twelve samples, which four of twelve features tell apart."""
    draw = torch.Generator().manual_seed(7)
    labels = torch.arange(40).repeat_interleave(12)
    centres = 2.0 * torch.randn(40, 12, generator=draw) * (torch.arange(12) < 4)
    return centres[labels] + torch.randn(480, 12, generator=draw), labels


CLUSTERS = clusters()
WORDS = "the quick brown fox jumps over the lazy dog while a cat sleeps "
TEXTS = [WORDS * 20, "0123456789 " * 100, "zq" * 600], "a lazy cat jumps over the brown dog " * 40


def pictures(make, **fixed):
    def task(**options):
        return make(
            DIGITS[:400], LABELS[:400], **{"train": 150, "validation": 100, "batch_size": 32, **fixed} | options
        )

    return task


# every task, small; the options are those that all of them take
TASKS = {
    "sample_weights": pictures(tasks.sample_weights, hidden=16),
    "sample_weights_normalised": pictures(tasks.sample_weights, hidden=16, normalised=True),
    "architecture": pictures(tasks.architecture, channels=4),
    "few_shot": lambda **options: tasks.few_shot(**{"hidden": 8, "batch_size": 3} | options),
    "few_shot_rates": lambda **options: tasks.few_shot(hidden=8, batch_size=3, rates=True, proximal=0.1, **options),
    "few_shot_pictures": lambda **options: tasks.few_shot(
        tasks.Pictures(*CLUSTERS, ways=2), **{"hidden": 8, "batch_size": 3, "shots": 2} | options
    ),
    "weight_network": pictures(tasks.weight_network, corrupted=0.2),
    "decays": pictures(tasks.decays),
    "mixture": lambda **options: tasks.mixture(*TEXTS, context=8, width=8, layers=1, **options),
    "mixture_simplex": lambda **options: tasks.mixture(*TEXTS, simplex=True, context=8, width=8, layers=1, **options),
    "denoising": lambda **options: tasks.denoising(DIGITS, train=4, test_size=3, **options),
    "adversarial": lambda **options: tasks.adversarial(
        DIGITS[:400], LABELS[:400], **{"train": 300, "batch_size": 32, "lower_iters": 3} | options
    ),
}
STARTED = ["few_shot", "few_shot_rates", "few_shot_pictures", "adversarial"]  # y begins anew in every iteration


# plain steps below, and how many iterations; Adam at 0.01 and 20 otherwise
RATES = {"few_shot": 0.02, "few_shot_rates": 0.02, "few_shot_pictures": 0.2, "adversarial": 0.1, "denoising": 0.3}
ITERATIONS = {"few_shot": 400, "few_shot_rates": 400, "few_shot_pictures": 100, "adversarial": 60, "denoising": 60}


def batches(task: tasks.Task):
    """A batch for each level, without moving the sampler of the task."""

    def one(data):
        if isinstance(data, tuple):
            return data
        place = data.state_dict()
        batch = next(data)
        data.load_state_dict(place)
        return batch

    upper = one(task.upper_data)
    return upper, upper if task.lower_data is None else one(task.lower_data)


def moved(task: tasks.Task, scale: float = 0.03, seed: int = 5) -> tasks.Task:
    """The same task at another x and y."""
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for tensor in (*task.problem.x.tensors, *task.problem.y.tensors):
            tensor += scale * torch.rand(tensor.shape, generator=draw, dtype=tensor.dtype)
    return task


@pytest.mark.parametrize("name", TASKS)
def test_a_task_is_a_function_of_its_seed(name):
    state, numpy_state = torch.get_rng_state(), np.random.get_state()[1].copy()  # noqa: NPY002
    one, same, other = (TASKS[name](seed=seed) for seed in (4, 4, 5))
    assert torch.equal(one.problem.x.read(), same.problem.x.read())
    assert torch.equal(one.problem.y.read(), same.problem.y.read())
    for mine, yours in zip(batches(one)[1], batches(same)[1], strict=True):
        assert torch.equal(mine, yours)
    assert one.exact() == same.exact() != other.exact()
    assert one.metrics() == same.metrics()
    assert torch.equal(state, torch.get_rng_state()), "torch's global generator was used"
    assert np.array_equal(numpy_state, np.random.get_state()[1])  # noqa: NPY002


@pytest.mark.parametrize("name", TASKS)
def test_measures_leave_no_trace(name):
    task = moved(TASKS[name](seed=3))
    tensors = [*task.problem.x.tensors, *task.problem.y.tensors]
    before = [(tensor.clone(), tensor.requires_grad, tensor.grad) for tensor in tensors]
    state = torch.get_rng_state()
    places = [data.state_dict() for data in (task.upper_data, task.lower_data) if hasattr(data, "state_dict")]
    values = [task.exact(), *task.metrics().values()] + ([task.retrained()] if task.retrained else [])
    assert all(math.isfinite(value) for value in values)
    assert torch.equal(state, torch.get_rng_state())
    assert torch.is_grad_enabled()
    for tensor, (own, requires_grad, grad) in zip(tensors, before, strict=True):
        assert torch.equal(tensor, own)
        assert tensor.requires_grad is requires_grad
        assert tensor.grad is grad
    after = [data.state_dict() for data in (task.upper_data, task.lower_data) if hasattr(data, "state_dict")]
    for one, two in zip(places, after, strict=True):
        assert all(np.array_equal(one[key], two[key]) for key in one)


@pytest.mark.parametrize("name", TASKS)
def test_second_derivatives_work_and_x_matters(name):
    task = moved(TASKS[name](dtype=torch.float64))
    problem = task.problem
    _, batch = batches(task)
    gradient = torch.autograd.grad(problem.lower_loss(batch), problem.y.tensors, create_graph=True)
    draw = torch.Generator().manual_seed(0)
    v = torch.randn(problem.y.numel, generator=draw, dtype=torch.float64)
    graph = [part for part in gradient if part.requires_grad]
    along = [own for part, own in zip(gradient, problem.y.split(v), strict=True) if part.requires_grad]
    wanted = (*problem.y.tensors, *problem.x.tensors)
    products = torch.autograd.grad(graph, wanted, along, allow_unused=True)
    curved, mixed = products[: len(problem.y.tensors)], products[len(problem.y.tensors) :]
    # the derivative of the gradient along v, by a central difference
    here, step, sides = problem.y.read(), 1e-7, []
    for sign in (1, -1):
        problem.y.write_(here + sign * step * v)
        sides.append(
            problem.y.join(torch.autograd.grad(problem.lower_loss(batch), problem.y.tensors, allow_unused=True))
        )
    expected = (sides[0] - sides[1]) / (2 * step)
    assert float(expected.norm()) > 1e-3
    if name != "weight_network":  # whose gradients do not go through the weights
        assert torch.allclose(problem.y.join(curved), expected, rtol=1e-4, atol=1e-6)
    assert name in STARTED or float(problem.x.join(mixed).norm()) > 1e-6, "x acts through the lower loss"


@pytest.mark.parametrize("name", [*STARTED, "denoising"])
def test_there_is_no_training_anew_where_the_score_depends_on_x_alone(name):
    task = TASKS[name]()
    assert task.retrained is None
    before = task.exact()
    for tensor in task.problem.y.tensors:
        tensor.data.mul_(0.5).add_(0.01)
    assert task.exact() == before


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in TASKS if name not in {*STARTED, "denoising"}])
def test_training_anew_begins_at_the_start_and_learns(name):
    task = TASKS[name]()
    before, again = task.exact(), task.retrained()
    assert again < 0.9 * before
    for tensor in task.problem.y.tensors:
        tensor.data.mul_(3.0)  # where y stands does not matter
    assert task.retrained() == again
    other = TASKS[name]()
    with torch.no_grad():
        for tensor in other.problem.x.tensors:
            tensor += torch.linspace(-2, 2, tensor.numel(), dtype=tensor.dtype).view(tensor.shape)
    assert other.retrained() != again, "x matters"


@pytest.mark.slow
@pytest.mark.parametrize("name", TASKS)
def test_a_few_iterations_make_it_better(name):
    task = TASKS[name]()
    before = task.exact()
    solver = bisls.Alternating(
        task.problem,
        upper_step=bisls.Constant(0.01),
        hypergrad=bisls.Lookahead(),
        lower_step=bisls.Constant(RATES.get(name, 0.01)),
        lower_direction=bisls.Steepest() if name in RATES else bisls.Adam(),
        lower_iters=task.lower_iters,
    )
    bisls.fit(solver, task.upper_data, task.lower_data, ITERATIONS.get(name, 20), progress=False)
    assert task.exact() < 0.95 * before


WRONG = [
    (tasks.sample_weights, {"corrupted": 1.2}, r"`sample_weights\(corrupted=1.2\)`: corrupted must lie in \[0, 1\]"),
    (tasks.sample_weights, {"hidden": 0}, r"`sample_weights\(hidden=0\)`: hidden must be a whole number, at least 1"),
    (tasks.sample_weights, {"normalised": 1}, "normalised must be True or False"),
    (tasks.sample_weights, {"train": 1797}, "must leave samples that neither level sees"),
    (tasks.sample_weights, {"test_size": 0}, "test_size must be None .* or a whole number, at least 1"),
    (tasks.weight_network, {"corrupted": "half"}, "corrupted must lie in"),
    (tasks.weight_network, {"hidden": 0}, "hidden must be a whole number, at least 1"),
    (tasks.decays, {"start": math.inf}, r"`decays\(start=inf\)`: start must be finite"),
    (tasks.adversarial, {"reach": 0.0}, "reach must be a finite number above 0"),
    (tasks.adversarial, {"train": 1797}, "train must leave samples that neither level sees"),
    (tasks.adversarial, {"batch_size": 0, "train": 100}, "batch_size must be a whole number from 1"),
    (tasks.architecture, {"places": 0}, r"`architecture\(places=0\)`: places must be a whole number, at least 1"),
    (tasks.architecture, {"channels": 1.5}, "channels must be a whole number"),
    (tasks.architecture, {"batch_size": 10_000}, "batch_size must be None"),
]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"shots": 0}, r"`few_shot\(shots=0\)`: shots must be a whole number, at least 1"),
        ({"queries": 1.5}, "queries must be a whole number"),
        ({"batch_size": 0}, "batch_size must be a whole number"),
        ({"lower_iters": 0}, "lower_iters must be a whole number"),
        ({"rates": "yes"}, "rates must be True or False"),
        ({"proximal": -1.0}, r"proximal must lie in \[0, inf\)"),
        ({"source": tasks.Sinusoids}, "must be a Source.*this is the class; call it"),
        (
            {"source": tasks.Pictures(DIGITS, LABELS, ways=4)},
            "three groups of at least so many classes, got 10 classes",
        ),
        (
            {"source": tasks.Pictures(DIGITS, LABELS, ways=2), "shots": 170, "queries": 10},
            "at most what the smallest class",
        ),
    ],
)
def test_wrong_arguments_of_few_shot_are_named(options, said):
    with pytest.raises(ValueError, match=said):
        tasks.few_shot(**options)
    with pytest.raises(ValueError, match=r"`Pictures\(ways=1\)`: ways must be a whole number, at least 2"):
        tasks.Pictures(DIGITS, LABELS, ways=1)


@pytest.mark.parametrize(("make", "options", "said"), WRONG, ids=[f"{m.__name__}-{next(iter(o))}" for m, o, _ in WRONG])
def test_wrong_arguments_are_named(make, options, said):
    with pytest.raises(ValueError, match=said):
        make(DIGITS, LABELS, **options)


@pytest.mark.parametrize("make", [tasks.architecture, tasks.weight_network, tasks.decays, tasks.adversarial])
def test_pictures_that_are_too_small_are_refused(make):
    with pytest.raises(ValueError, match=rf"`{make.__name__}\(images=...\)` must have at least \d x \d pixels"):
        make(DIGITS[:, :3], LABELS, train=100)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"noise": 0.0}, "noise must be positive and finite"),
        ({"size": 1}, "size must be a whole number, at least 2"),
        ({"size": 9}, r"must fit into pictures \(8, 8\)"),
        ({"train": 1790}, "must be at most the number of pictures, 1797"),
    ],
)
def test_wrong_arguments_of_denoising_are_named(options, said):
    with pytest.raises(ValueError, match=said):
        tasks.denoising(DIGITS, **options)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"width": 7}, r"`mixture\(width=7\)`: width must be an even number, at least 2"),
        ({"windows": 0}, "windows must be a whole number, at least 1"),
        ({"sources": "one text"}, "sources must be a list of at least two texts"),
        ({"sources": ["x" * 1000, 7]}, "sources must be a list of at least two texts"),
        (
            {"sources": ["x" * 1000, "short"]},
            r"`mixture\(sources\[1\]=...\)` must be a text of at least 1,000 characters",
        ),
        ({"target": None}, "give both or neither"),
        ({"target": 7}, r"`mixture\(target=...\)` must be a text of at least 1,000 characters"),
        ({"context": 800}, "context must be shorter than the shortest text, 720"),
        ({"simplex": 1}, "simplex must be True or False"),
    ],
)
def test_wrong_arguments_of_mixture_are_named(options, said):
    with pytest.raises(ValueError, match=said):
        tasks.mixture(**{"sources": TEXTS[0], "target": TEXTS[1]} | options)


# ---- sample weights


def test_sample_weights_tell_wrong_labels_apart():
    clean, task = TASKS["sample_weights"](corrupted=0.0), TASKS["sample_weights"](corrupted=0.4)
    wrong = clean.lower_data.tensors[1] != task.lower_data.tensors[1]
    assert int(wrong.sum()) == 60
    assert torch.equal(clean.upper_data.tensors[1], task.upper_data.tensors[1])
    assert task.metrics()["auc"] == 0.5
    assert "auc" not in clean.metrics()
    before = task.retrained()
    with torch.no_grad():
        task.problem.x.tensors[0].copy_(torch.where(wrong, -6.0, 6.0))
    assert task.metrics()["auc"] == 1.0
    assert task.retrained() < 0.9 * before, "the right weights help"


def test_normalised_weights_do_not_act_as_a_rate():
    task = TASKS["sample_weights_normalised"](dtype=torch.float64)
    _, batch = batches(task)
    values = []
    for level in (0.0, -3.0, 2.0):
        with torch.no_grad():
            task.problem.x.tensors[0].fill_(level)
        values.append(task.problem.lower_loss(batch).item())
    assert values == pytest.approx(values[:1] * 3, rel=1e-12)
    assert values[0] > 1.0


# ---- architecture


def test_an_architecture_with_one_operation_is_that_operation():
    task = TASKS["architecture"](dtype=torch.float64, places=1)
    upper, _ = batches(task)
    (x,) = task.problem.x.tensors
    with torch.no_grad():
        x.fill_(-50.0)
        x[0, 3] = 50.0  # the input itself
        skipped = task.problem.upper_loss(upper).item()
        stem, stem_bias, *_, head, head_bias = task.problem.y.tensors
        features = functional.max_pool2d(torch.relu(functional.conv2d(upper[0], stem, stem_bias, padding=1)), 2)
        outputs = functional.linear(features.flatten(1), head, head_bias)
        assert skipped == pytest.approx(functional.cross_entropy(outputs, upper[1]).item(), rel=1e-12)
        x.fill_(-50.0)
        x[0, 4] = 50.0  # nothing
        outputs = head_bias.expand(len(upper[1]), -1)
        expected = functional.cross_entropy(outputs, upper[1]).item()
    assert task.problem.upper_loss(upper).item() == pytest.approx(expected, rel=1e-12)
    assert task.metrics()["entropy"] == pytest.approx(0.0, abs=1e-12)


# ---- few-shot


def test_tasks_of_a_batch_are_learnt_side_by_side():
    task = TASKS["few_shot"](dtype=torch.float64)
    batch = next(task.upper_data)
    weights = [tensor.detach() for tensor in task.problem.y.tensors]
    each = []
    for i in range(3):
        here = batch[0][i]
        for layer in range(0, 6, 2):
            here = functional.linear(torch.relu(here) if layer else here, weights[layer][i], weights[layer + 1][i])
        each.append(functional.mse_loss(here, batch[1][i]).item())
    assert task.problem.lower_loss(batch).item() == pytest.approx(sum(each), rel=1e-12)
    assert min(each) > 0.01
    starts = task.problem.lower_start()
    assert all(torch.equal(own, start) for own, start in zip(task.problem.y.tensors, starts, strict=True))
    assert all(start.requires_grad for start in starts), "gradients flow back to x"


def test_a_learnt_rate_is_the_rate_of_its_tensor():
    plain, task = (tasks.few_shot(hidden=8, batch_size=3, rates=rates, dtype=torch.float64) for rates in (False, True))
    batch = next(plain.upper_data)
    rates = [0.5, -1.0, 0.2, 0.0, 1.0, -0.3]
    with torch.no_grad():
        for r, value in zip(task.problem.x.tensors[6:], rates, strict=True):
            r.fill_(value)
    for own, factors in ((plain, [0.1 * math.exp(r) for r in rates]), (task, [0.1] * 6)):
        for _ in range(2):
            slopes = torch.autograd.grad(own.problem.lower_loss(batch), own.problem.y.tensors)
            with torch.no_grad():
                for tensor, slope, factor in zip(own.problem.y.tensors, slopes, factors, strict=True):
                    tensor -= factor * slope
    values = [own.problem.upper_loss(batch).item() for own in (plain, task)]
    assert values[0] == pytest.approx(values[1], rel=1e-10)
    assert values[0] > 0.01


@pytest.mark.parametrize("rates", [False, True])
def test_looking_through_the_steps_of_a_task_is_differentiating_through_them(rates):
    task = tasks.few_shot(hidden=8, batch_size=3, rates=rates, proximal=0.2, dtype=torch.float64)
    batch, (start, learnt) = next(task.upper_data), (task.problem.x.tensors[:6], task.problem.x.tensors[6:])
    with torch.no_grad():
        for i, r in enumerate(learnt):
            r.fill_(0.3 * i - 1.0)
    scales = [torch.exp(r / 2) for r in learnt] if rates else [1.0] * 6
    changes = [torch.zeros(3, *w.shape, dtype=torch.float64, requires_grad=True) for w in start]

    def weights():
        return [w + scale * z for w, scale, z in zip(start, scales, changes, strict=True)]

    for _ in range(5):
        own = weights()
        far = sum(((w - x) ** 2).sum() for w, x in zip(own, start, strict=True))
        loss = 3 * functional.mse_loss(stacked(own, batch[0]), batch[1]) + 0.1 * far
        slopes = torch.autograd.grad(loss, changes, create_graph=True)
        changes = [z - 0.02 * slope for z, slope in zip(changes, slopes, strict=True)]
    upper = functional.mse_loss(stacked(weights(), batch[2]), batch[3])
    expected = task.problem.x.join(torch.autograd.grad(upper, [*start, *learnt]))
    options = {"direction": bisls.Steepest(), "hypergrad": bisls.Lookahead(), "lower_iters": 5}
    steps = {"upper_step": bisls.Constant(1.0), "lower_step": bisls.Constant(0.02)}
    before = task.problem.x.read()
    bisls.Alternating(task.problem, **options, **steps).step(batch, batch)
    assert float(expected.norm()) > 0.1
    assert torch.allclose(before - task.problem.x.read(), expected, rtol=1e-9, atol=1e-12)


def test_pictures_for_training_and_judging_share_no_class():
    labels = np.repeat(np.arange(30), 6)
    images = np.stack([labels, np.arange(180)], 1).astype(np.float32)  # a picture says which class and which one it is
    source = tasks.Pictures(images, labels, ways=4, held_out=0.2)
    width, outputs, draws = source.open(torch.Generator().manual_seed(0))
    assert (width, outputs) == (2, 4)
    seen = []
    for draw in draws:
        support, wanted, query, targets = draw(torch.Generator().manual_seed(1), 50, 2, 3)
        assert (support.shape, wanted.shape, query.shape, targets.shape) == ((50, 8, 2), (50, 8), (50, 12, 2), (50, 12))
        for i in range(50):
            kinds = {int(k): int(c) for k, c in zip(wanted[i], support[i, :, 0], strict=True)}
            assert len(set(kinds.values())) == 4
            assert all(kinds[int(k)] == int(c) for k, c in zip(targets[i], query[i, :, 0], strict=True))
            assert not set(support[i, :, 1].tolist()) & set(query[i, :, 1].tolist())
        seen.append(set(support[:, :, 0].flatten().tolist()))
    assert [len(kinds) for kinds in seen] == [18, 6, 6]
    assert len(seen[0] | seen[1] | seen[2]) == 30


def test_drawn_batches_resume_bit_for_bit(tmp_path):
    task = TASKS["few_shot"]()
    for _ in range(3):
        next(task.upper_data)
    torch.save(task.upper_data.state_dict(), tmp_path / "place.pt")
    expected = [next(task.upper_data) for _ in range(4)]
    again = TASKS["few_shot"]().upper_data
    again.load_state_dict(torch.load(tmp_path / "place.pt", weights_only=True))
    for batch in expected:
        assert all(torch.equal(one, two) for one, two in zip(batch, next(again), strict=True))
    with pytest.raises(ValueError, match="lacks generator"):
        again.load_state_dict({})
    with pytest.raises(ValueError, match=r"`Drawn\(make=.*must be a callable that takes a torch.Generator"):
        tasks.Drawn(lambda: 1)


# ---- Meta-Weight-Net, decays


def test_the_weight_of_a_sample_is_a_function_of_its_loss_alone():
    task = TASKS["weight_network"](dtype=torch.float64)
    _, (rows, labels) = batches(task)
    first, bias, second, last = (tensor.detach() for tensor in task.problem.x.tensors)
    with torch.no_grad():
        both = torch.cat([rows, rows]), torch.cat([labels, labels])
        assert task.problem.lower_loss(both).item() == pytest.approx(task.problem.lower_loss((rows, labels)).item())
        # a weight of sigmoid(40) everywhere: the plain loss
        for tensor, value in zip(task.problem.x.tensors, (0.0, 0.0, 0.0, 40.0), strict=True):
            tensor.fill_(value)
    plain = task.problem.upper_loss((rows, labels)).item()
    assert task.problem.lower_loss((rows, labels)).item() == pytest.approx(plain, rel=1e-12)
    assert (first.shape, bias.shape, second.shape, last.shape) == ((50, 1), (50,), (1, 50), (1,))


def test_decays_are_the_penalties_of_their_layers():
    task = TASKS["decays"](dtype=torch.float64)
    _, batch = batches(task)
    (x,), y = task.problem.x.tensors, task.problem.y.tensors
    assert len(x) == 5
    with torch.no_grad():
        x.fill_(-60.0)
        bare = task.problem.lower_loss(batch).item()
        assert bare == pytest.approx(task.problem.upper_loss(batch).item(), rel=1e-12)
        x[1] = math.log(0.3)
        squares = float((y[2] ** 2).sum() + (y[3] ** 2).sum())
        assert task.problem.lower_loss(batch).item() - bare == pytest.approx(0.15 * squares, rel=1e-9)
        x.fill_(-60.0)
        x[-1] = math.log(0.25 / 0.75)
        smoothed = task.problem.lower_loss(batch).item()
    rows, labels = batch
    for layer in (0, 2):
        rows = torch.relu(functional.conv2d(rows, y[layer], y[layer + 1], padding=1))
        rows = functional.max_pool2d(rows, 2)
    outputs = functional.linear(torch.relu(functional.linear(rows.flatten(1), y[4], y[5])), y[6], y[7])
    expected = functional.cross_entropy(outputs, labels, label_smoothing=0.25).item()
    assert smoothed == pytest.approx(expected, rel=1e-12)


# ---- mixture


def test_the_weights_of_a_mixture_are_a_mean_over_its_sources():
    logits, direct = (TASKS[name](dtype=torch.float64) for name in ("mixture", "mixture_simplex"))
    _, batch = batches(logits)
    assert batch[0].shape == (3, 8, 9)
    each = [direct.problem.upper_loss((rows,)).item() for rows in batch[0]]
    assert logits.problem.lower_loss(batch).item() == pytest.approx(sum(each) / 3, rel=1e-12)
    with torch.no_grad():
        direct.problem.x.tensors[0].copy_(torch.tensor([0.5, 0.2, 0.3], dtype=torch.float64))
        expected = 0.5 * each[0] + 0.2 * each[1] + 0.3 * each[2]
    assert direct.problem.lower_loss(batch).item() == pytest.approx(expected, rel=1e-12)
    assert direct.problem.upper_bounds == bisls.Simplex(floor=1e-3)
    assert direct.metrics()["weight_1"] == pytest.approx(0.2)


def test_a_prediction_sees_nothing_that_comes_later():
    network = drawn(Transformer(8, 8, 2), torch.Generator().manual_seed(0), torch.float64)
    rows = torch.arange(8)[None]
    other = rows.clone()
    other[0, 5:] += 20
    one, two = network(rows), network(other)
    assert torch.equal(one[:, :5], two[:, :5])
    assert not torch.allclose(one[:, 5:], two[:, 5:])


def test_the_texts_of_python_itself_make_a_mixture():
    sources, target = library()
    assert len(sources) == 5
    assert min(len(text) for text in (*sources, target)) > 10_000
    assert sorted(sources[0]) == sorted(sources[4]) != sources[0]
    assert target != sources[0]


def test_a_python_without_its_texts_says_what_to_pass(monkeypatch, tmp_path):
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path)})
    with pytest.raises(ImportError, match=r"without the source of its library .*; pass sources and target"):
        tasks.mixture()
    monkeypatch.setitem(sys.modules, "pydoc_data.topics", None)
    with pytest.raises(ImportError, match="without its help topics; pass sources and target"):
        tasks.mixture()


# ---- denoising


def test_cleaned_pictures_are_a_minimum_of_the_lower_loss():
    task = tasks.denoising(DIGITS, train=4, test_size=4, dtype=torch.float64)
    filters, logs = (tensor.detach() for tensor in task.problem.x.tensors)
    (y,) = task.problem.y.tensors
    with torch.no_grad():
        y.copy_(_cleaned(task.lower_data[0], filters, logs.exp()))
    loss = task.problem.lower_loss(task.lower_data)
    (gradient,) = torch.autograd.grad(loss, [y])
    assert float(gradient.norm()) < 1e-6
    assert task.metrics()["psnr"] == pytest.approx(-10 * math.log10(2 * task.exact() / 64), rel=1e-9)
    assert torch.allclose(filters.flatten(1) @ filters.flatten(1).T, torch.eye(8, dtype=torch.float64), atol=1e-12)


# ---- adversarial


def test_perturbations_begin_at_zero_and_stay_in_their_box():
    task = TASKS["adversarial"](dtype=torch.float64)
    (start,) = task.problem.lower_start()
    assert start.shape == (32, 1, 8, 8)
    assert not start.any()
    upper, lower = batches(task)
    assert task.problem.lower_loss(lower).item() == pytest.approx(
        -32 * task.problem.upper_loss(upper).item(), rel=1e-12
    )
    solver = bisls.Alternating(
        task.problem, hypergrad=bisls.Lookahead(), lower_step=bisls.Constant(100.0), lower_iters=task.lower_iters
    )
    bisls.fit(solver, task.upper_data, task.lower_data, 2, progress=False, on_failure="ignore")
    (y,) = task.problem.y.tensors
    assert float(y.detach().abs().max()) == pytest.approx(0.1)


def test_an_attack_makes_it_worse():
    task = TASKS["adversarial"]()
    assert task.metrics()["robust"] <= task.metrics()["accuracy"]
    clean = tasks.adversarial(DIGITS[:400], LABELS[:400], train=300, batch_size=32, reach=1e-9)
    assert task.exact() > clean.exact()
