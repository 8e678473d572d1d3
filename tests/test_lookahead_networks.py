"""Looking through the steps of networks: against autograd through the same steps, with lean layers and without."""

from __future__ import annotations

import gc
from contextlib import suppress
from copy import deepcopy

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

import bisls
from bisls.evaluate import Graph, Lean, lean
from bisls.lower import Trained

RATE, STEPS = 0.05, 3


class Tied(nn.Module):
    """An embedding whose weights are those of the last layer as well."""

    def __init__(self):
        super().__init__()
        self.embedding, self.inner, self.last = nn.Embedding(7, 6), nn.Linear(6, 6), nn.Linear(6, 7, bias=False)
        self.last.weight = self.embedding.weight

    def forward(self, rows: Tensor) -> Tensor:
        return self.last(torch.tanh(self.inner(self.embedding(rows.abs().mul(3).long() % 7).mean(1))))


class Twice(nn.Module):
    """One layer, called twice."""

    def __init__(self):
        super().__init__()
        self.layer, self.last = nn.Linear(6, 6), nn.Linear(6, 7)

    def forward(self, rows: Tensor) -> Tensor:
        return self.last(torch.tanh(self.layer(torch.tanh(self.layer(rows)))))


class Checkpointed(nn.Module):
    """A part of it is evaluated again on the way back."""

    def __init__(self, really: bool = True):
        super().__init__()
        self.really = really
        self.first, self.last = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6)), nn.Linear(6, 7)

    def forward(self, rows: Tensor) -> Tensor:
        inner = checkpoint(self.first, rows, use_reentrant=False) if self.really else self.first(rows)
        return self.last(torch.tanh(inner))


class Attending(nn.Module):
    """Rows of a table that look at each other."""

    def __init__(self):
        super().__init__()
        self.attention, self.norm, self.last = nn.MultiheadAttention(6, 2), nn.LayerNorm(6), nn.Linear(6, 7)

    def forward(self, rows: Tensor) -> Tensor:
        inner = rows[:, None] + torch.zeros(1, 2, 1, dtype=rows.dtype)
        return self.last(self.norm(inner + self.attention(inner, inner, inner)[0])).mean(1)


def convolution(**how) -> nn.Module:
    groups = how.get("groups", 1)
    first = nn.Linear(6, 128), nn.Unflatten(1, (2, 8, 8)), nn.Conv2d(2, 4, 3, **how), nn.Tanh()
    rest = nn.AdaptiveAvgPool2d(2), nn.Conv2d(4, 4, 2, groups=groups), nn.Flatten(), nn.Linear(4, 7)
    return nn.Sequential(*first, *rest)


def strided() -> nn.Module:
    """Parameters that do not lie in memory in the order of their indices."""
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 7))
    for layer in (model[0], model[2]):
        layer.weight = nn.Parameter(layer.weight.detach().t().contiguous().t())
    return model


MODELS = {
    "linear": lambda: nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 7, bias=False)),
    "convolution": convolution,
    "strides and padding": lambda: convolution(stride=2, padding=1),
    "dilation and groups": lambda: convolution(dilation=2, groups=2),
    "padding by name": lambda: convolution(padding="same"),
    "other padding": lambda: convolution(padding=1, padding_mode="circular", bias=False),
    "over one dimension": lambda: nn.Sequential(
        nn.Unflatten(1, (2, 3)), nn.Conv1d(2, 4, 2), nn.Tanh(), nn.Flatten(), nn.Linear(8, 7)
    ),
    "over three": lambda: nn.Sequential(
        nn.Linear(6, 54), nn.Unflatten(1, (2, 3, 3, 3)), nn.Conv3d(2, 3, 2), nn.Tanh(), nn.Flatten(), nn.Linear(24, 7)
    ),
    "BatchNorm": lambda: nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 7)),
    "dropout": lambda: nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.4), nn.Tanh(), nn.Linear(8, 7)),
    "tied": Tied,
    "called twice": Twice,
    "checkpointed": Checkpointed,
    "attention": Attending,
    "weight norm": lambda: nn.Sequential(
        parametrizations.weight_norm(nn.Linear(6, 8)), nn.Tanh(), nn.Linear(8, 7)
    ),
    "strided": strided,
}  # fmt: skip
ROWS = torch.randn(STEPS, 10, 6, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
LABELS = torch.arange(10) % 7


def weighted(logits: Tensor, x: Tensor) -> Tensor:
    return (functional.cross_entropy(logits, LABELS, reduction="none") * x.exp()).mean() * x.sum().cos()


def made(name: str, dtype: torch.dtype = torch.float64) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(3)
    model = MODELS[name]().to(dtype)
    return model, torch.linspace(-0.5, 0.5, 10, dtype=dtype).requires_grad_()


def found(name: str, penalty: bool = False) -> Tensor:
    """The hypergradient of the solver: what a step of length 1 moves x by."""
    model, x = made(name)

    def lower(batch: Tensor) -> Tensor:
        loss = weighted(model(batch), x)
        if penalty:  # a loss that differentiates by itself, in rows and in weights
            rows = batch.clone().requires_grad_()
            inner = weighted(model(rows), x)
            own = torch.autograd.grad(inner, [rows, *model.parameters()], create_graph=True)
            loss = loss + sum(g.square().sum() for g in own)
        return loss

    problem = bisls.Bilevel(
        lambda batch: functional.cross_entropy(model(batch), LABELS) + x.square().sum(),
        lower,
        [x],
        model.parameters(),
    )
    solver = bisls.Alternating(
        problem,
        upper_step=bisls.Constant(1.0),
        direction=bisls.Steepest(),
        hypergrad=bisls.Lookahead(),
        lower_optimizer=torch.optim.SGD(model.parameters(), RATE),
    )
    before = x.detach().clone()
    torch.manual_seed(1)
    solver.step(ROWS[0], list(ROWS))
    return before - x.detach()


def truth(name: str, penalty: bool = False) -> Tensor:
    """The same by autograd through the steps."""
    model, x = made(name)
    model.really = False  # a functional call is over when its checkpoint evaluates again
    y = dict(model.named_parameters())
    torch.manual_seed(1)
    for batch in ROWS:
        loss = weighted(functional_call(model, y, (batch,)), x)
        if penalty:
            rows = batch.clone().requires_grad_()
            inner = weighted(functional_call(model, y, (rows,)), x)
            own = torch.autograd.grad(inner, [rows, *y.values()], create_graph=True)
            loss = loss + sum(g.square().sum() for g in own)
        grads = torch.autograd.grad(loss, list(y.values()), create_graph=True)
        y = {key: own - RATE * g for (key, own), g in zip(y.items(), grads, strict=True)}
    upper = functional.cross_entropy(functional_call(model, y, (ROWS[0],)), LABELS) + x.square().sum()
    (h,) = torch.autograd.grad(upper, x)
    through = h - 2 * x.detach()
    assert through.norm() > 1e-4  # something goes through the steps
    return h


def least(monkeypatch, work: int) -> None:
    monkeypatch.setattr(lean, "LEAST", work)
    monkeypatch.setattr(lean, "LEAST_CONVOLVED", work)


@pytest.fixture(params=[True, False], ids=["lean", "as they are"])
def layers(request, monkeypatch):
    """All layers lean, or none."""
    least(monkeypatch, 0 if request.param else 1 << 60)
    return request.param


@pytest.mark.parametrize("name", MODELS)
def test_networks_are_looked_through(name, layers):
    torch.testing.assert_close(found(name), truth(name), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("name", ["linear", "convolution", "called twice"])
def test_a_loss_may_differentiate_by_itself(name, layers):
    """What it differentiates has numbers that are looked at: nothing of them is left out."""
    torch.testing.assert_close(found(name, penalty=True), truth(name, penalty=True), rtol=1e-9, atol=1e-12)


def graph_of(model: nn.Module, x: Tensor, batch: Tensor, mode: Lean | None) -> Graph:
    problem = bisls.Bilevel(lambda _: x.sum(), lambda b: weighted(model(b), x), [x], model.parameters())
    torch.manual_seed(1)
    return Graph(problem, batch, None, mode)


@pytest.mark.parametrize("name", MODELS)
def test_lean_layers_give_the_same_products(name, monkeypatch):
    """Products, their slope, what is taken in place; with and without the value of the gradient."""
    least(monkeypatch, 0)
    model, x = made(name)
    y = list(model.parameters())
    rng = torch.Generator().manual_seed(2)
    v = [torch.randn(own.shape, generator=rng, dtype=own.dtype) for own in y]
    plain = graph_of(model, x, ROWS[0], None)
    by_y, by_x = plain.hessian(v), plain.mixed(v)
    grad = [torch.zeros_like(own) if g is None else g for g, own in zip(plain.grad, y, strict=True)]
    slope = sum((g * own).sum() for g, own in zip(grad, v, strict=True))
    for valued in (False, True):
        mode = Lean(y, valued)
        graph = graph_of(model, x, ROWS[0], mode)
        if valued:
            numbers = [torch.zeros_like(own) if g is None else g for g, own in zip(graph.grad, y, strict=True)]
            torch.testing.assert_close(numbers, grad)
        target = [torch.zeros_like(own) for own in y]
        rest, mixed = graph.last(v, True, target)
        for own, part in zip(target, rest, strict=True):
            own.sub_(0 if part is None else part)
        torch.testing.assert_close([-own for own in target], by_y, rtol=1e-10, atol=1e-12)
        torch.testing.assert_close(mixed, by_x, rtol=1e-10, atol=1e-12)
        left = sum((g * own).sum() for g, own in zip(graph.grad, v, strict=True) if g is not None)
        torch.testing.assert_close(torch.as_tensor(left + graph.slope), slope, rtol=1e-10, atol=1e-12)
        none, alone = graph_of(model, x, ROWS[0], Lean(y, valued)).last(v, False)
        assert len(none) == 0
        torch.testing.assert_close(alone, by_x, rtol=1e-10, atol=1e-12)


def test_hooks_on_weights_are_gone_through(monkeypatch):
    def product(work: int) -> list[Tensor]:
        least(monkeypatch, work)
        model, x = made("linear")
        model[0].weight.register_hook(lambda g: g.tanh() * 0.7)
        y = list(model.parameters())
        return list(graph_of(model, x, ROWS[0], Lean(y)).last([own.detach() for own in y], True)[0])

    torch.testing.assert_close(product(0), product(1 << 60), rtol=1e-10, atol=1e-12)


def test_lean_layers_multiply_less(monkeypatch):
    """One product less of the nine (three of the four where the rows need no gradient)."""
    from torch.utils.flop_counter import FlopCounterMode

    def flops(work: int) -> int:
        least(monkeypatch, work)
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 50), nn.Tanh(), nn.Linear(50, 50), nn.Tanh(), nn.Linear(50, 7)).double()
        x, y = made("linear")[1], list(model.parameters())
        with FlopCounterMode(display=False) as counter:
            graph_of(model, x, ROWS[0], Lean(y)).last([torch.ones_like(own) for own in y], True)
        return counter.get_total_flops() // (2 * 10)

    inner, first, last = 50 * 50, 6 * 50, 50 * 7
    assert flops(1 << 60) == 4 * first + 9 * inner + 9 * last
    assert flops(0) == 3 * first + 8 * inner + 8 * last


def test_numbers_of_different_precision_and_autocast(layers):
    """Parameters of several types, and a loss in half precision: as near to the same in double precision as those allow."""

    def h(types: tuple[torch.dtype, torch.dtype], cast: bool) -> Tensor:
        torch.manual_seed(3)
        model = nn.Sequential(nn.Linear(6, 8).to(types[0]), nn.Tanh(), nn.Linear(8, 7).to(types[1]))
        x = torch.linspace(-0.5, 0.5, 10, dtype=torch.float64).requires_grad_()

        def logits(batch: Tensor) -> Tensor:
            with torch.autocast("cpu", torch.bfloat16, enabled=cast):
                return model[2](torch.tanh(model[0](batch.to(types[0]))).to(types[1])).double()

        problem = bisls.Bilevel(
            lambda batch: functional.cross_entropy(logits(batch), LABELS),
            lambda batch: weighted(logits(batch), x),
            [x],
            model.parameters(),
        )
        solver = bisls.Alternating(
            problem,
            upper_step=bisls.Constant(1.0),
            direction=bisls.Steepest(),
            hypergrad=bisls.Lookahead(),
            lower_optimizer=torch.optim.SGD(model.parameters(), RATE),
        )
        solver.step(ROWS[0], list(ROWS))
        return torch.linspace(-0.5, 0.5, 10, dtype=torch.float64) - x.detach()

    single, double, half = torch.float32, torch.float64, torch.bfloat16
    exact = h((double, double), False)
    assert exact.norm() > 1e-3
    for types, cast, far in (
        ((single, double), False, 1e-5),
        ((single, single), True, 0.05),
        ((half, single), False, 0.05),
    ):
        assert (h(types, cast) - exact).norm() < far * exact.norm()


# --- memory that is written into again


def network(optimizer: bool) -> bisls.Solver:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 7))
    x = torch.zeros(10, requires_grad=True)
    problem = bisls.Bilevel(
        lambda batch: functional.cross_entropy(model(batch.float()), LABELS),
        lambda batch: weighted(model(batch.float()), x + 0.1),
        [x],
        model.parameters(),
    )
    below = {"lower_optimizer": torch.optim.Adam(model.parameters(), 0.01)} if optimizer else {}
    return bisls.BiSLS(problem, hypergrad=bisls.Lookahead(), lower_optimizer=below.get("lower_optimizer", Trained()))


@pytest.mark.parametrize("optimizer", [False, True], ids=["trained", "Adam"])
def test_nothing_that_is_kept_is_written_over(optimizer):
    """A state, and where the last iteration led, are the same after more iterations."""
    solver = network(optimizer)
    for _ in range(3):
        solver.step(ROWS[0], list(ROWS))
    state, measured = solver.state_dict(), solver.measured
    copies = deepcopy((state, measured))
    for _ in range(3):
        solver.step(ROWS[1], list(ROWS))

    def leaves(value: object) -> list:
        if isinstance(value, dict):
            return [leaf for own in value.values() for leaf in leaves(own)]
        return [leaf for own in value for leaf in leaves(own)] if isinstance(value, list | tuple) else [value]

    for one, copy in zip(leaves((state, measured)), leaves(copies), strict=True):
        assert torch.equal(one, copy) if isinstance(one, Tensor) else one == copy


@pytest.mark.parametrize(("below", "most"), [("SGD", 26), ("Adam", 50)])
def test_how_many_copies_of_y_there_are(below, most, monkeypatch):
    """With T = 20: T of y, with Adam T of its scaling, and few beside them; whatever Python knows of, at every product."""
    from bisls.oracle import StepBack

    torch.manual_seed(0)
    model = nn.Linear(300, 300)
    x = torch.zeros(4, requires_grad=True)
    problem = bisls.Bilevel(
        lambda batch: model(batch).square().mean(),
        lambda batch: (model(batch).sin() * (x + 1).prod()).mean() + model(batch).square().mean(),
        [x],
        model.parameters(),
    )
    optimizer = getattr(torch.optim, below)(model.parameters(), lr=1e-3)
    solver = bisls.Alternating(
        problem, upper_step=bisls.Constant(0.01), hypergrad=bisls.Lookahead(), lower_optimizer=optimizer
    )

    def there() -> dict[int, int]:
        sizes = {}
        for own in gc.get_objects():
            if type(own) in (Tensor, nn.Parameter):
                with suppress(NotImplementedError):  # what other tests left behind may have no storage: sparse, batched
                    sizes[own.untyped_storage().data_ptr()] = own.untyped_storage().nbytes()
        return sizes

    others, seen, inner = set(there()), [], StepBack.take

    def take(self, *args):
        if len(seen) % 7 == 0:
            seen.append(sum(size for place, size in there().items() if place not in others))
        else:
            seen.append(0)
        return inner(self, *args)

    monkeypatch.setattr(StepBack, "take", take)
    for _ in range(3):
        solver.step(torch.randn(8, 300), [torch.randn(8, 300) for _ in range(20)])
    assert max(seen) < most * problem.y.numel * 4
