"""Losses that try to be played wrongly: whatever `tape=` says, the run is the same to the last bit."""

import random

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.nn.utils import parametrizations

import bisls

X, Y = torch.tensor([0.3, -0.4]), torch.tensor([0.5, -0.5])


def ran(make, tape: bool, steps: int = 8, **options):
    """The run of a problem: its records, its end, what is left in the generators, and whether something was played."""
    torch.manual_seed(0)
    np.random.seed(0)  # noqa: NPY002
    random.seed(0)
    torch.manual_seed(0)
    upper, lower, x, y, batches, between = make()
    solver = bisls.BiSLS(bisls.Bilevel(upper, lower, x, y, tape=tape), lower_iters=4, **options)
    records, played = [], False
    for k in range(steps):
        between(k)
        records.append(repr(solver.step(*batches(k))))
        played = played or bool(solver.oracle._lower_players._players or solver.oracle._upper_players._players)
    left = (torch.rand(1).item(), np.random.rand(), random.random())  # noqa: NPY002
    problem = solver.problem
    return records, problem.x.read(), problem.y.read(), left, played


def must_be_the_same(make, **options) -> bool:
    """Taped and called to the last bit; tells whether anything was played."""
    taped, called = ran(make, True, **options), ran(make, False, **options)
    assert taped[0] == called[0]
    assert torch.equal(taped[1], called[1])
    assert torch.equal(taped[2], called[2])
    assert taped[3] == called[3]
    assert not called[4]
    return taped[4]


def simple(loss, between=lambda k: None, upper=None, batches=lambda k: (None, None)):
    """A problem of two and two numbers, whose lower loss is given."""

    def make():
        x, y = X.clone().requires_grad_(), Y.clone().requires_grad_()
        above = (lambda batch: ((y - 1) ** 2).sum()) if upper is None else (lambda batch: upper(x, y, batch))
        return above, lambda batch: loss(x, y, batch), [x], [y], batches, between

    return make


def plain(x, y):
    return ((y - x) ** 2).sum() + 0.1 * (y**4).sum()


# --- a loss that changes between iterations, and hardly shows it


class State:
    factor = 0.0


@pytest.fixture(autouse=True)
def fresh():
    State.factor = 0.0


def switched(k):
    State.factor = float(k >= 3)


def test_a_factor_that_switches_on_the_influence_of_x_is_noticed():
    """At y = 0 neither the value nor the gradient of the lower loss shows it."""

    def lower(x, y, _):
        return ((y - State.factor * x.exp()) ** 2).sum() if State.factor else (y**2).sum() + 0.0 * x.sum()

    must_be_the_same(simple(lower, switched))

    def hidden(x, y, _):
        return 1e6 + ((y - 0.1) ** 2).sum() + State.factor * (x.exp() * (y - y.detach()) ** 2).sum()

    must_be_the_same(simple(hidden, switched))


def test_a_penalty_under_a_large_constant_is_noticed():
    must_be_the_same(
        simple(lambda x, y, _: 1e6 + plain(x, y) + 1e-4 * State.factor * (x.exp() * y * y).sum(), switched)
    )


class Reversed(torch.autograd.Function):
    """The value stays; the gradient is what a strength says."""

    @staticmethod
    def forward(ctx, y):
        return y.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad * (1.0 - 1.5 * State.factor)


def test_gradient_reversal_is_noticed():
    must_be_the_same(simple(lambda x, y, _: plain(x, Reversed.apply(y)) + 0.2 * (y**2).sum(), switched))


def test_the_temperature_of_a_straight_through_estimate_is_noticed():
    def lower(x, y, _):
        soft = torch.sigmoid(y * (1.0 + State.factor))
        hard = (soft > 0.5).float()
        return ((hard + soft - soft.detach() - x) ** 2).sum() + 0.1 * (y**2).sum()

    must_be_the_same(simple(lower, switched))


def test_annealing_in_tiny_steps_is_noticed():
    def annealed(k):
        State.factor = 1e-7 * k

    must_be_the_same(simple(lambda x, y, _: plain(x, y) * (1 + State.factor), annealed))


def test_a_tensor_behind_the_back_of_autograd_is_noticed():
    weight = torch.ones(2)

    def between(k):
        weight.data.fill_(1.0 + (k >= 3))

    must_be_the_same(simple(lambda x, y, _: plain(x, y) + (weight * y * y).sum(), between))


def test_an_array_that_a_tensor_shares_is_noticed():
    array = np.ones(2, dtype=np.float32)
    weight = torch.from_numpy(array)

    def between(k):
        array[:] = 1.0 + (k >= 3)

    must_be_the_same(simple(lambda x, y, _: plain(x, y) + (weight * y * y).sum(), between))


# --- a loss that changes while an iteration lasts


class Counter:
    def __init__(self):
        self.calls = 0


@pytest.mark.parametrize("every", [1, 3, 10])
def test_a_loss_that_counts_its_calls_is_called(every):
    counter = Counter()

    def lower(x, y, _):
        counter.calls += 1
        return plain(x, y) * (1.0 + 0.1 * (counter.calls // every))

    problem = bisls.Bilevel(*simple(lower)()[:4], tape=True)
    solver = bisls.BiSLS(problem, lower_iters=4)
    for _ in range(4):
        solver.step(None, None)
    assert not solver.oracle._lower_players._players
    assert counter.calls > 4 * 5


def test_a_loss_that_logs_is_called():
    log = []

    def lower(x, y, _):
        log.append(float(len(log)))
        return plain(x, y)

    solver = bisls.BiSLS(bisls.Bilevel(*simple(lower)()[:4], tape=True), lower_iters=4)
    for _ in range(3):
        solver.step(None, None)
    assert not solver.oracle._lower_players._players
    assert len(log) > 3 * 5


# --- numbers that are read back into Python


READINGS = {
    "tolist": lambda rows: rows.tolist()[0],
    "numpy": lambda rows: rows.numpy()[0],
    "asarray": lambda rows: np.asarray(rows)[0],
    "item": lambda rows: rows[0].item(),
    "float": lambda rows: float(rows[0]),
    "dlpack": lambda rows: np.from_dlpack(rows)[0],
    "iteration": lambda rows: float(next(iter(rows))),
    "storage": lambda rows: rows.untyped_storage().tolist()[0] + rows[0].item() * 0,
    "format": lambda rows: float(f"{rows[0]:.3f}"),
    "repr": lambda rows: float(repr(rows[0])[7:].split(",")[0].rstrip(")")),
    "max": lambda rows: max(rows.tolist()),
    "detached": lambda rows: rows.detach().cpu().numpy().mean(),
}


@pytest.mark.parametrize("read", READINGS.values(), ids=READINGS)
def test_numbers_that_are_read_back_are_not_kept(read):
    rows = [torch.tensor([float(k), 2.0]) for k in range(1, 9)]

    def lower(x, y, batch):
        return plain(x, y) * (1 + 0.1 * float(read(batch)))

    assert ran(simple(lower, batches=lambda k: (None, rows[k])), True)[4]  # the upper loss is played
    must_be_the_same(simple(lower, batches=lambda k: (None, rows[k])))


def test_row_counts_read_from_a_tensor_are_not_kept():
    """Each batch of its own composition, all of one shape."""
    counts = [torch.tensor([k % 3 + 1, 4 - (k % 3 + 1)]) for k in range(8)]

    def lower(x, y, batch):
        first = batch.tolist()[0]
        rows = torch.arange(4.0)
        return plain(x, y) + (rows[:first].mean() - y[0]) ** 2 + (rows[first:].mean() - y[1]) ** 2

    must_be_the_same(simple(lower, batches=lambda k: (None, counts[k])))


def test_numbers_read_inside_of_a_backward_pass_are_not_kept():
    class Scaled(torch.autograd.Function):
        @staticmethod
        def forward(ctx, y, batch):
            ctx.save_for_backward(batch)
            return y.clone()

        @staticmethod
        def backward(ctx, grad):
            (batch,) = ctx.saved_tensors
            return grad * batch.tolist()[0], None

    rows = [torch.tensor([1.0 + 0.1 * k]) for k in range(8)]
    must_be_the_same(simple(lambda x, y, b: plain(x, Scaled.apply(y, b)), batches=lambda k: (None, rows[k])))


# --- random numbers


DRAWS = {
    "NumPy's": lambda: np.random.rand(),  # noqa: NPY002
    "Python's": random.random,
    "torch's": lambda: torch.rand(1).item(),
    "torch's as a tensor": lambda: torch.rand(()),
}


def own_draws():
    yield "a NumPy generator", lambda: np.random.default_rng(0).random
    yield "a Random", lambda: random.Random(0).random

    def torchs():
        own = torch.Generator().manual_seed(0)
        return lambda: torch.rand((), generator=own)

    yield "a torch generator", torchs


@pytest.mark.parametrize(
    "source", [*(lambda draw=draw: draw for draw in DRAWS.values()), *(make for _, make in own_draws())],
    ids=[*DRAWS, *(name for name, _ in own_draws())],
)  # fmt: skip
def test_a_loss_that_draws_is_called(source):
    def make():
        draw = source()
        return simple(lambda x, y, _: plain(x, y) * (1 + 0.1 * draw()))()

    must_be_the_same(make)


# --- operations that torch runs in other ways where a gradient is wanted


def networks():
    yield "SiLU", lambda: nn.Sequential(nn.Linear(3, 4), nn.SiLU(), nn.Linear(4, 1))
    yield "Mish", lambda: nn.Sequential(nn.Linear(3, 4), nn.Mish(), nn.Linear(4, 1))
    yield "GELU", lambda: nn.Sequential(nn.Linear(3, 4), nn.GELU(), nn.Linear(4, 1))
    yield "Softplus", lambda: nn.Sequential(nn.Linear(3, 4), nn.Softplus(), nn.Linear(4, 1))
    yield (
        "weight_norm",
        lambda: nn.Sequential(parametrizations.weight_norm(nn.Linear(3, 4)), nn.Tanh(), nn.Linear(4, 1)),
    )
    yield "LayerNorm", lambda: nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 1))
    yield "GroupNorm", lambda: nn.Sequential(nn.Linear(3, 4), nn.GroupNorm(2, 4), nn.Linear(4, 1))
    yield "LSTM", lambda: Recurrent()
    yield "MultiheadAttention", lambda: Attending()
    yield "MultiheadAttention, eval", lambda: Attending().eval()


class Attending(nn.Module):
    def __init__(self):
        super().__init__()
        self.into, self.attention, self.out = (
            nn.Linear(3, 4),
            nn.MultiheadAttention(4, 2, batch_first=True),
            nn.Linear(4, 1),
        )

    def forward(self, rows):
        inner = self.into(rows)[None]
        return self.out(self.attention(inner, inner, inner, need_weights=True)[0][0])


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.cell, self.out = nn.LSTM(3, 3, batch_first=True), nn.Linear(3, 1)

    def forward(self, rows):
        return self.out(self.cell(rows[None])[0][0])


@pytest.mark.parametrize("network", [make for _, make in networks()], ids=[name for name, _ in networks()])
def test_networks_are_played_to_the_last_bit_or_called(network):
    def make():
        torch.manual_seed(1)
        model, penalty = network(), torch.tensor([-3.0], requires_grad=True)
        rows = torch.randn(7, 3)
        labels = rows.sum(1, keepdim=True).sin()

        def fit(batch):
            return functional.mse_loss(model(batch[0]), batch[1])

        def lower(batch):
            return fit(batch) + penalty.exp().sum() * sum((p**2).sum() for p in model.parameters())

        data = (rows[:4], labels[:4]), (rows[4:], labels[4:])
        return fit, lower, [penalty], list(model.parameters()), lambda k: data, lambda k: None

    must_be_the_same(make, steps=5)


def test_six_shapes_of_batches_in_turn_give_the_same_run():
    rows = [torch.linspace(0, 1, 2 * (k % 6 + 1)).reshape(-1, 2) for k in range(12)]

    def lower(x, y, batch):
        return ((y - x * batch) ** 2).mean() + 0.1 * (y**4).sum()

    make = simple(lower, batches=lambda k: (rows[-k], rows[k]), upper=lambda x, y, b: ((y - 1 + 0 * b) ** 2).mean())
    assert must_be_the_same(make, steps=12)


@pytest.mark.parametrize("tape", [True, False])
def test_how_exact_a_loss_is_does_not_depend_on_who_evaluates_it(tape):
    """Half precision on the way from x alone."""
    x, y = X.clone().requires_grad_(), Y.clone().requires_grad_()
    problem = bisls.Bilevel(
        lambda _: ((y - 1) ** 2).sum(), lambda _: ((y - x.bfloat16().float()) ** 2).sum(), [x], [y], tape=tape
    )
    solver = bisls.BiSLS(problem, lower_iters=2)
    solver.step(None, None)
    with torch.no_grad():
        assert solver.oracle.lower(None).eps == torch.finfo(torch.bfloat16).eps
        assert solver.oracle.lower_graph(None).eps == torch.finfo(torch.bfloat16).eps


def test_plain_losses_are_played():
    assert must_be_the_same(simple(lambda x, y, _: plain(x, y)))
