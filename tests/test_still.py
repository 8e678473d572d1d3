"""A probe leaves no trace, and draws the same numbers again: whatever the loss draws from, whatever its modules keep."""

import random

import numpy as np
import pytest
import torch
from torch import nn

import bisls
from bisls import optim


class Replacing(nn.Module):
    """Keeps a running mean by putting a new tensor in the place of the old one, and counts in plain attributes."""

    def __init__(self):
        super().__init__()
        self.register_buffer("ema", torch.zeros(2))
        self.calls, self.last = 0, None

    def forward(self, y):
        self.ema = 0.9 * self.ema + 0.1 * y.detach()
        self.calls += 1
        self.last = y.detach()
        return y - 0.1 * self.ema


class Scripted(nn.Module):
    """BatchNorm, and a buffer that is replaced, where Python does not see them run."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(2)
        self.register_buffer("ema", torch.zeros(2))

    def forward(self, y):
        self.ema = 0.9 * self.ema + 0.1 * y.detach().mean(0)
        return self.norm(y)


def problem_of(lower, y=None, x=None):
    y = torch.tensor([0.5, -0.5], requires_grad=True) if y is None else y
    x = torch.tensor([1.0, 2.0], requires_grad=True) if x is None else x
    return bisls.Bilevel(lambda _: ((y - 1) ** 2).sum(), lambda _: lower(x, y), [x], [y])


def test_a_buffer_that_is_replaced_is_put_back():
    model = Replacing()
    model(torch.ones(2))
    ema, value, last = model.ema, model.ema.clone(), model.last
    problem = problem_of(lambda x, y: ((model(y) - x) ** 2).sum())
    with problem.probing():
        one = problem.lower_loss(None).item()
        problem.lower_loss(None)
        assert model.calls == 3
    assert model.ema is ema
    assert torch.equal(model.ema, value)
    assert model.calls == 1
    assert model.last is last
    with problem.probing():
        assert problem.lower_loss(None).item() == one


def test_what_a_probe_that_raises_has_replaced_is_put_back():
    class Fails(Replacing):
        def forward(self, y):
            super().forward(y)
            raise RuntimeError("no")

    model = Fails()
    outer = nn.Sequential(model)
    ema = model.ema
    problem = problem_of(lambda x, y: outer(y).sum())
    with pytest.raises(RuntimeError, match="no"), problem.probing():
        problem.lower_loss(None)
    assert model.ema is ema
    assert model.calls == 0


def test_a_functional_call_keeps_the_modules_own_buffers():
    model = Replacing()
    own, given = model.ema, torch.ones(2)
    problem = problem_of(lambda x, y: ((torch.func.functional_call(model, {"ema": given}, (y,)) - x) ** 2).sum())
    with problem.probing():
        problem.lower_loss(None)
    assert model.ema is own
    assert torch.equal(own, torch.zeros(2))
    assert torch.equal(given, torch.ones(2))


class Encoder(nn.Module):
    """Changes a buffer in place, and replaces an attribute, in a method that is no call."""

    def __init__(self):
        super().__init__()
        self.register_buffer("centre", torch.zeros(2))
        self.plain, self.calls = torch.zeros(2), 0

    def encode(self, rows):
        self.centre += rows.detach().mean(0)
        self.plain.add_(1.0)
        self.calls += 1
        return rows - self.centre - self.plain


def kept_in():
    """Ways to keep something outside of a call of a module: how the rows go through, and all that is kept."""
    norm, encoder, mean, var = nn.BatchNorm1d(2), Encoder(), torch.zeros(2), torch.ones(2)
    yield "forward", lambda rows: norm.forward(rows), lambda: list(norm.buffers())
    yield "a method", encoder.encode, lambda: [encoder.centre, encoder.plain, torch.tensor(encoder.calls)]
    functional = nn.functional.batch_norm
    yield "a function", lambda rows: functional(rows, mean, var, training=True), lambda: [mean, var]


@pytest.mark.parametrize(("through", "kept"), [case[1:] for case in kept_in()], ids=[case[0] for case in kept_in()])
def test_what_changes_without_the_call_of_a_module_is_put_back(through, kept):
    rows = torch.randn(5, 2, generator=torch.Generator().manual_seed(0))
    y = torch.tensor([0.5, -0.5], requires_grad=True)
    problem = problem_of(lambda x, y: ((through(rows * y) - x) ** 2).sum(), y)
    problem.lower_loss(None)
    before = [own.clone() for own in kept()]
    with problem.probing():
        one = problem.lower_loss(None).item()
    assert all(map(torch.equal, before, kept()))
    with problem.probing():
        assert problem.lower_loss(None).item() == one
    assert all(map(torch.equal, before, kept()))
    optimizer = optim.SLS([y])
    calls = []

    def closure():
        calls.append(1)
        return (through(rows * y) ** 2).sum()

    fresh = [own.clone() for own in kept()]
    with torch.no_grad():
        closure()
    once = [own.clone() for own in kept()]
    for own, value in zip(kept(), fresh, strict=True):
        own.data.copy_(value)
    optimizer.step(closure)
    assert len(calls) > 2
    # the trials are not to be seen: one call has changed what is kept, as it does by itself
    assert all(map(torch.equal, once[:2], kept()[:2]))


def test_tensors_that_must_not_be_written_are_left_alone():
    """Memory that is mapped for reading ends the process when it is written to; views of parameters are the solver's."""
    x, y = torch.tensor([1.0, 2.0], requires_grad=True), torch.tensor([0.5, -0.5], requires_grad=True)
    view, large, missing = y.detach(), torch.zeros(1 << 15), torch.tensor([float("nan")])
    problem = problem_of(lambda x, y: ((y - x) ** 2).sum() + 0 * view.sum() + 0 * large.sum() + len(missing), y, x)
    x.requires_grad_(False)  # as while the lower level is trained
    assert [own is missing for own in problem.around.tensors] == [True]
    x.requires_grad_()
    version = missing._version
    with problem.probing():
        problem.lower_loss(None)
        problem.y.write_(torch.tensor([3.0, 4.0]))
    assert y.tolist() == [3.0, 4.0]
    assert missing._version == version


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_modules_inside_of_a_script_are_put_back():
    model = torch.jit.script(Scripted())
    rows = torch.randn(5, 2, generator=torch.Generator().manual_seed(0))
    model(rows)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    problem = problem_of(lambda x, y: ((model(rows * y) - x) ** 2).sum())
    with problem.probing():
        problem.lower_loss(None)
        assert model.norm.num_batches_tracked == 2
    assert before.keys() == model.state_dict().keys()
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


OWN = {
    "NumPy's": (lambda: np.random.normal(), lambda: np.random.get_state()[2:]),  # noqa: NPY002
    "Python's": (random.random, random.getstate),
    "torch's": (lambda: torch.rand(1).item(), lambda: torch.get_rng_state().tolist()),
}


def own_generators():
    numpys, legacy, pythons = np.random.default_rng(0), np.random.RandomState(0), random.Random(0)
    torchs = torch.Generator().manual_seed(0)
    yield "a NumPy generator", numpys.normal, lambda: numpys.bit_generator.state["state"]
    yield "a RandomState", legacy.normal, lambda: legacy.get_state()[3:]
    yield "a Random", pythons.gauss, pythons.getstate
    yield "a torch generator", lambda: torch.rand(1, generator=torchs).item(), lambda: torchs.get_state().tolist()


CASES = [(name, *case) for name, case in OWN.items()] + list(own_generators())


@pytest.mark.parametrize(("draw", "state"), [case[1:] for case in CASES], ids=[case[0] for case in CASES])
def test_a_generator_is_put_back_and_draws_again_what_it_drew(draw, state):
    class Noisy(nn.Module):
        def __init__(self):
            super().__init__()
            self.draw = draw

        def forward(self, y):
            return y * (1 + 0.1 * self.draw())

    model = Noisy()
    problem = problem_of(lambda x, y: ((model(y) - x) ** 2).sum())
    moment, before = problem.moment(), state()
    drawn = problem.lower_loss(None).item()
    assert moment.passed
    after = state()
    assert before != after
    with problem.probing(moment):
        again = [problem.lower_loss(None).item() for _ in range(3)]
    assert again[0] == drawn
    assert len(set(again)) == 3
    assert state() == after


@pytest.mark.parametrize(("draw", "state"), [case[1:] for case in CASES], ids=[case[0] for case in CASES])
def test_a_search_compares_losses_of_the_same_noise(draw, state):
    """Along the ray the loss is a parabola for one draw; with other draws at every trial the step would be luck."""
    w = torch.tensor([1.0, -2.0], requires_grad=True)
    optimizer = optim.SLS([w], lr=100.0)
    drawn = []

    def closure():
        drawn.append(draw())
        return ((w - 10 * drawn[-1]) ** 2).sum()

    for _ in range(3):
        start = len(drawn)
        optimizer.step(closure)
        assert len(set(drawn[start:])) == 1
        assert len(drawn) > start + 1
    assert len(set(drawn)) == 3  # and the next step has numbers of its own


def test_a_run_draws_from_each_generator_what_its_losses_draw():
    """One draw for a call that is no probe: the number of trials is not to be seen in the generators."""
    own = np.random.default_rng(3)
    calls = []

    def lower(x, y):
        calls.append(own.normal())
        return ((y - x) ** 2).sum() * (1.5 + np.tanh(calls[-1]))

    problem = problem_of(lower)
    solver = bisls.BiSLS(problem, lower_iters=4)
    for _ in range(3):
        solver.step(None, None)
    points = solver.oracle.cost.lower_gradients + solver.oracle.cost.lower_graphs
    fresh = np.random.default_rng(3)
    row = [fresh.normal() for _ in range(points + 1)]
    assert set(calls) <= set(row)
    assert len(calls) > len(set(calls))  # probes have drawn again what was drawn
    assert own.normal() in row
