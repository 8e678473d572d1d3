"""Habits of those who train with torch: decay and no-decay groups, clipping in the closure, compiled models."""

from __future__ import annotations

import copy
import logging
import warnings

import pytest
import torch
from test_optim import TABLE, Task, make, run, same
from torch import nn
from torch._dynamo.testing import CompileCounter
from torch.nn.utils import clip_grad_norm_, clip_grad_value_

from bisls import Status, optim
from bisls.steps import Constant


@pytest.fixture(params=TABLE, name="row")
def _row(request):
    return TABLE[request.param]


def averages(optimizer):
    """Whether the parameters hold something else than the iterate that moves."""
    return isinstance(optimizer, optim.Auto)


def unscaled(row):
    """Skip the Adam versions: what the closure clipped is what their direction sees, as torch's Adam does (test_optim.py)."""
    if row[1].get("direction") is not None:
        pytest.skip("an Adam version: compared with torch's AdamW in test_optim.py")


def headed(optimizer, p, grad):
    """The direction that a gradient becomes: itself, or as `Auto` scales it after this step."""
    if not isinstance(optimizer, optim.Auto):
        return grad
    state, unit = optimizer.state[p], optimizer.param_groups[0]["unit"]
    return grad / unit / ((state["squares"] / (1 - 0.999 ** state["seen"])).sqrt() + 1e-8)


# --- keys of a group


def test_an_unknown_key_of_a_group_is_named(row):
    name = row[0].__name__
    w, v = torch.ones(2, requires_grad=True), torch.ones(1, requires_grad=True)
    with pytest.raises(ValueError, match=rf"`{name}\(params=\[\{{'momentum': 0.9, ...\}}\]\)`: momentum is no option"):
        make(row, [{"params": [w], "momentum": 0.9}])
    optimizer = make(row, [w])
    with pytest.raises(ValueError, match=r"A group may have params, name, lr and weight_decay of its own; .*maximize"):
        optimizer.add_param_group({"params": [v], "weight_decays": 0.1})
    with pytest.raises(ValueError, match="maximize must be the same in all groups"):
        optimizer.add_param_group({"params": [v], "maximize": True})
    assert len(optimizer.param_groups) == 1  # what was refused does not train all the same
    optimizer.add_param_group({"params": [v], "name": "head", "initial_lr": 1.0, "lr": 0.5})
    assert optimizer.param_groups[1]["name"] == "head"


def test_named_parameters_and_groups_of_another_optimiser_are_taken(row):
    task = Task()
    optimizer = make(row, task.model.parameters())
    torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1.0, total_steps=10, cycle_momentum=False)
    again = make(row, optimizer.param_groups)
    run(task, again, 1)
    if torch.__version__ >= "2.6":
        assert len(make(row, task.model.named_parameters()).param_groups[0]["param_names"]) == 4


# --- weight decay


def test_weight_decay_is_adamws_with_the_step_that_was_taken(row):
    unscaled(row)
    # p <- p - step * weight_decay * p - step * gradient, both at the point before, each group with its own
    task = Task(dtype=torch.float64)
    weights = [p for p in task.model.parameters() if p.dim() > 1]
    biases = [p for p in task.model.parameters() if p.dim() == 1]
    top = row[1].get("lr", 1.0)
    optimizer = make(
        row,
        [{"params": weights}, {"params": biases, "lr": top / 4, "weight_decay": 0.0}],
        weight_decay=0.03,
    )
    decayed = 0.0
    for k in range(25):
        params = list(task.model.parameters())
        states = [copy.deepcopy(optimizer.state[p]) for p in params]
        before = task.parameters()
        grads = torch.autograd.grad(task.loss(k), params)
        run(task, optimizer, 1, first=k)
        for p, old, grad, state in zip(params, before, grads, states, strict=True):
            group = optimizer.param_groups[0 if p.dim() > 1 else 1]
            step, decay = group["last_step_size"], 0.03 if p.dim() > 1 else 0.0
            step *= optimizer.state[p].get("share", 1.0)  # Auto's tensors each have their own
            moved = state.get("z", old) - step * decay * old - step * headed(optimizer, p, grad)
            decayed += step * decay
            if averages(optimizer):
                now = optimizer.state[p]
                weight = (now["weight_sum"] - state.get("weight_sum", 0.0)) / now["weight_sum"]
                mean = state.get("average", old) + weight * (moved - state.get("average", old))
                torch.testing.assert_close(now["z"], moved, rtol=1e-12, atol=1e-12)
                moved = mean + 0.2 * (moved - mean)
            torch.testing.assert_close(p.detach(), moved, rtol=1e-12, atol=1e-12)
    assert decayed > 0.01


def test_the_rule_does_not_see_the_decay(row):
    plain, decayed = Task(dtype=torch.float64), Task(dtype=torch.float64)
    a, b = make(row, plain.model.parameters()), make(row, decayed.model.parameters(), weight_decay=0.1)
    assert run(plain, a, 1) == run(decayed, b, 1)
    assert (a.last_step_size, a.last_checks) == (b.last_step_size, b.last_checks)
    for p, q, start in zip(
        plain.parameters(), decayed.parameters(), Task(dtype=torch.float64).parameters(), strict=True
    ):
        torch.testing.assert_close(q, p - 0.1 * a.last_step_size * start, rtol=1e-12, atol=1e-12)


def test_averages_are_of_the_points_after_the_decay():
    task = Task(dtype=torch.float64)
    optimizer = optim.SPSB(task.model.parameters(), averaging=True, weight_decay=0.2)
    iterates = []
    for k in range(6):
        run(task, optimizer, 1, first=k)
        iterates.append(task.parameters())
    optimizer.eval()
    for i, p in enumerate(task.parameters()):
        torch.testing.assert_close(p, sum(it[i] for it in iterates) / 6, rtol=1e-12, atol=1e-12)


def test_a_decay_never_goes_beyond_zero():
    w = torch.tensor([2.0, -1.0], dtype=torch.float64, requires_grad=True)
    optimizer = optim.SPSMax([w], lr=100.0, weight_decay=1.0, f_min=-1e6)
    optimizer.step(lambda: 1e-3 * w[0])
    assert optimizer.last_step_size == 100.0
    torch.testing.assert_close(w.detach(), torch.tensor([-0.1, 0.0], dtype=torch.float64), rtol=1e-12, atol=1e-12)


def test_without_a_step_nothing_decays(row):
    w, unused = torch.tensor([1.0, -2.0], requires_grad=True), torch.tensor([5.0], requires_grad=True)
    still = torch.tensor([3.0], requires_grad=True)
    optimizer = make(row, [{"params": [w, unused]}, {"params": [still], "lr": 0.0}], weight_decay=0.1)
    optimizer.step(lambda: (w * 0.0).sum() + 3.0)
    optimizer.step(lambda: (w * float("nan")).sum())
    assert w.tolist() == [1.0, -2.0]
    optimizer.step(lambda: (w**2).sum() + (still**2).sum() + 1.0)
    assert w.tolist() != [1.0, -2.0]
    assert (unused.item(), still.item()) == (5.0, 3.0)


def test_weight_decay_is_saved_and_older_states_load(row):
    whole, part = Task(), Task()
    losses = run(whole, make(row, whole.model.parameters(), weight_decay=0.05), 12)
    optimizer = make(row, part.model.parameters(), weight_decay=0.05)
    run(part, optimizer, 5)
    state = copy.deepcopy(optimizer.state_dict())
    again = Task()
    again.model.load_state_dict(part.model.state_dict())
    resumed = make(row, again.model.parameters())
    resumed.load_state_dict(copy.deepcopy(state))
    assert run(again, resumed, 7, first=5) == losses[5:]
    for group in state["param_groups"]:
        del group["weight_decay"]  # as saved before there was such an option
    old = make(row, Task().model.parameters())
    old.load_state_dict(state)
    assert [group["weight_decay"] for group in old.param_groups] == [0.0]


@pytest.mark.parametrize("bad", [-0.1, float("nan"), float("inf"), "0.1", None, True])
def test_a_bad_weight_decay_is_named(row, bad):
    w = torch.ones(2, requires_grad=True)
    with pytest.raises(ValueError, match=rf"`{row[0].__name__}\(weight_decay=.*\)`: weight_decay must be a number"):
        make(row, [w], weight_decay=bad)
    with pytest.raises(ValueError, match="weight_decay must be a number"):
        make(row, [{"params": [w], "weight_decay": bad}])


def test_an_optimiser_that_was_written_before_there_was_weight_decay_has_it():
    class Fixed(optim.LineOptimizer):
        def __init__(self, params, lr=0.5):
            super().__init__(params, {"lr": lr, "averaging": None, "maximize": False, "foreach": None})

        def _rule(self, group):
            return Constant(group["lr"])

    w, v = (torch.tensor([2.0], dtype=torch.float64, requires_grad=True) for _ in range(2))
    Fixed([{"params": [w], "weight_decay": 0.25}, {"params": [v]}]).step(lambda: (w + v).sum())
    assert (w.item(), v.item()) == (2.0 - 0.5 * 0.25 * 2.0 - 0.5, 1.5)


# --- clipping in the closure


def clipping(optimizer, loss, clip, parts=1):
    """The usual closure, with the gradients clipped after the last of several backward passes."""

    def closure():
        optimizer.zero_grad()
        value = loss()
        for part in range(parts):
            (value / parts).backward(retain_graph=part < parts - 1)
        clip([p for group in optimizer.param_groups for p in group["params"]])
        return value

    return closure


def by_norm(most):
    return lambda params: clip_grad_norm_(params, most)


def by_value(most):
    return lambda params: clip_grad_value_(params, most)


def bowl(w):
    return (torch.tensor([3.0, 1.0], dtype=torch.float64) * (w - 0.3) ** 2).sum()


@pytest.mark.parametrize("parts", [1, 3])
@pytest.mark.parametrize("maximize", [False, True])
def test_clipping_shortens_the_move_by_what_was_clipped(row, parts, maximize):
    unscaled(row)
    free, held = (torch.tensor([1.5, -0.5], dtype=torch.float64, requires_grad=True) for _ in range(2))
    start, sign = free.detach().clone(), -1 if maximize else 1
    a, b = (make(row, [w], maximize=maximize) for w in (free, held))
    most = 0.25
    length = torch.autograd.grad(bowl(free), free)[0].norm().item()
    assert length > 5
    a.step(clipping(a, lambda: sign * bowl(free), lambda _: None, parts))
    b.step(clipping(b, lambda: sign * bowl(held), by_norm(most), parts))
    assert a.last_step_size == pytest.approx(b.last_step_size, rel=1e-12)  # the step is that of the true gradient
    torch.testing.assert_close(  # clip_grad_norm_ adds 1e-6 to the norm
        (held - start).detach(), (free - start).detach() * most / (length + 1e-6), rtol=1e-10, atol=0.0
    )
    assert (held - start).norm() <= b.last_step_size * most * (1 + 1e-12)


def test_clipping_at_every_step_is_honoured(row):
    unscaled(row)
    task = Task(dtype=torch.float64)
    optimizer = make(row, task.model.parameters())
    clipped = 0
    for k in range(30):
        before = [optimizer.state[p].get("z", p.detach()).clone() for p in task.model.parameters()]
        gradient = torch.autograd.grad(task.loss(k), list(task.model.parameters()))
        length = torch.cat([g.flatten() for g in gradient]).norm()
        value = optimizer.step(clipping(optimizer, lambda k=k: task.loss(k), by_norm(0.1))).item()
        after = [optimizer.state[p].get("z", p.detach()) for p in task.model.parameters()]
        moved = torch.cat([(p - q).flatten() for p, q in zip(before, after, strict=True)]).norm().item()
        clipped += length.item() > 0.1
        free = [headed(optimizer, p, g) for p, g in zip(task.model.parameters(), gradient, strict=True)]
        most = min(0.1 / length.item(), 1.0) * torch.cat([d.flatten() for d in free]).norm().item()
        assert 0 < moved <= optimizer.last_step_size * most * (1 + 1e-9)
        if isinstance(
            optimizer, optim.SPSMax | optim.SPSB
        ):  # by the true gradient; by the clipped one it would be longer
            assert optimizer.last_step_size <= value / length.item() ** 2 * (1 + 1e-9)
    assert clipped > 20


def test_a_clip_that_does_not_bind_changes_nothing(row):
    plain, clipped = Task(), Task()
    a, b = make(row, plain.model.parameters()), make(row, clipped.model.parameters())
    for k in range(8):
        a.step(lambda k=k: plain.loss(k))
        b.step(clipping(b, lambda k=k: clipped.loss(k), by_norm(1e6)))
        assert (a.last_checks, a.last_step_size) == (b.last_checks, b.last_step_size)
    assert same(plain.parameters(), clipped.parameters())


def test_clipping_by_value_moves_along_what_is_left(row):
    unscaled(row)
    w = torch.tensor([1.5, -0.5], dtype=torch.float64, requires_grad=True)
    start, gradient = w.detach().clone(), torch.autograd.grad(bowl(w), w)[0]
    direction = gradient.clamp(-2.0, 2.0)
    assert 0 < gradient.dot(direction) < 0.9 * gradient.norm() * direction.norm()  # another direction
    optimizer = make(row, [w])
    optimizer.step(clipping(optimizer, lambda: bowl(w), by_value(2.0)))
    step = optimizer.last_step_size
    moved = start - step * headed(optimizer, w, direction)
    torch.testing.assert_close(w.detach(), moved, rtol=1e-12, atol=1e-12)
    if isinstance(optimizer, optim.SPSMax | optim.SPSB):
        ceiling = row[1].get("lr", 1.0)
        assert step == pytest.approx(min(ceiling, bowl(start).item() / gradient.dot(gradient).item()), rel=1e-12)
    if isinstance(optimizer, optim.SLSB):
        assert bowl(w) <= bowl(start) - 0.1 * step * gradient.dot(direction)


@pytest.mark.parametrize("cls", [optim.SLS, optim.SLSB])
def test_a_search_tries_the_point_that_the_clipped_gradient_leads_to(cls):
    # the gradient leads around a ridge, the clipped one onto it
    w = torch.tensor([1.0, 1.0], dtype=torch.float64, requires_grad=True)

    def loss():
        ridge = 1e4 * nn.functional.relu(0.995 - w[1]) * nn.functional.relu(w[0] - 0.9)
        return 50 * w[0] ** 2 + 0.5 * w[1] ** 2 + ridge

    before, start = loss().item(), w.detach().clone()
    free = cls([w], lr=0.01)
    free.step(loss)
    assert (free.last_step_size, free.last_checks) == (0.01, 1)
    with torch.no_grad():
        w.copy_(start - 0.01)
        assert loss().item() > before  # where the step of the true gradient leads along the clipped one
        w.copy_(start)
    optimizer = cls([w], lr=0.01)
    optimizer.step(clipping(optimizer, loss, by_value(1.0)))
    step = optimizer.last_step_size
    assert 0 < step < 0.01
    assert optimizer.last_checks >= 3
    torch.testing.assert_close(w.detach(), start - step, rtol=1e-12, atol=1e-12)
    assert loss().item() <= before - 0.1 * step * 101


def test_a_direction_that_rises_is_not_taken(row):
    w = torch.tensor([1.5, -0.5], dtype=torch.float64, requires_grad=True)
    optimizer = make(row, [w])
    optimizer.step(clipping(optimizer, lambda: bowl(w), lambda params: params[0].grad.neg_()))
    assert w.tolist() == [1.5, -0.5]
    assert optimizer.last_status is Status.NOT_DESCENT


def test_gradients_that_are_taken_away_or_hidden_in_the_closure(row):
    w, v = (torch.tensor([value], dtype=torch.float64, requires_grad=True) for value in (1.5, 2.0))
    optimizer = make(row, [w, v])

    def closure(change):
        def call():
            optimizer.zero_grad()
            loss = (3 * w**2 + v**2).sum()
            loss.backward()
            change()
            return loss

        return call

    optimizer.step(closure(lambda: setattr(v, "grad", None)))
    assert (w.item() != 1.5, v.item()) == (True, 2.0)
    alone = torch.tensor([1.5], dtype=torch.float64, requires_grad=True)
    make(row, [alone]).step(lambda: (3 * alone**2).sum() + 4.0)
    assert w.item() == pytest.approx(alone.item(), rel=1e-12)  # as if it were no parameter
    # a gradient that is not finite stays so for the rule, whatever was made of it
    before = w.item(), v.item()

    def poisoned():
        optimizer.zero_grad()
        loss = (3 * w**2 + v**2).sum()
        (loss * float("inf")).backward()
        for p in (w, v):
            p.grad.nan_to_num_(posinf=1.0)
        return loss

    optimizer.step(poisoned)
    assert optimizer.last_status is Status.NON_FINITE
    assert (w.item(), v.item()) == before


def test_two_closures_that_clip(row):
    unscaled(row)
    # the step is the second batch's, by its true gradient; the direction is the first one's, clipped
    task, judge = Task(dtype=torch.float64), Task(dtype=torch.float64)
    optimizer, alone = make(row, task.model.parameters()), make(row, judge.model.parameters())
    before = task.parameters()
    optimizer.step(
        clipping(optimizer, lambda: task.loss(0), by_norm(0.05)),
        clipping(optimizer, lambda: task.loss(3), by_norm(0.05)),
    )
    alone.step(lambda: judge.loss(3))
    assert optimizer.last_step_size == alone.last_step_size > 0
    moved = torch.cat([(p - q).flatten() for p, q in zip(before, task.parameters(), strict=True)]).norm().item()
    other = Task(dtype=torch.float64)
    free = torch.autograd.grad(other.loss(0), list(other.model.parameters()))
    length = torch.cat([g.flatten() for g in free]).norm().item()
    free = [headed(optimizer, p, g) for p, g in zip(task.model.parameters(), free, strict=True)]
    assert moved == pytest.approx(
        0.05 / length * torch.cat([d.flatten() for d in free]).norm().item() * optimizer.last_step_size, rel=1e-4
    )


def test_gradients_that_are_only_scaled_are_suspected(row, caplog):
    w = torch.tensor([1.5, -0.5], dtype=torch.float64, requires_grad=True)
    optimizer = make(row, [w])
    with caplog.at_level(logging.WARNING, logger="bisls"):
        for _ in range(6):
            optimizer.step(clipping(optimizer, lambda: bowl(w), lambda params: params[0].grad.div_(4)))
    assert len(caplog.records) == 1  # said once
    assert "by 0.25 after backward()" in caplog.text
    caplog.clear()
    task = Task()
    optimizer = make(row, task.model.parameters())
    with caplog.at_level(logging.WARNING, logger="bisls"):
        for k in range(6):
            optimizer.step(clipping(optimizer, lambda k=k: task.loss(k), by_norm(0.1)))
    assert not caplog.records


# --- the loss that comes back


def test_the_loss_comes_back_without_its_graph(row):
    task = Task()
    optimizer = make(row, task.model.parameters())
    for returned in (
        optimizer.step(task.loss),
        optimizer.step(clipping(optimizer, task.loss, lambda _: None)),
        optimizer.step(task.loss, lambda: task.loss(1)),
    ):
        assert isinstance(returned, torch.Tensor)
        assert returned.grad_fn is None
        assert not returned.requires_grad
    if not row[2]:
        optimizer.zero_grad()
        loss = task.loss()
        loss.backward()
        assert optimizer.step(loss=loss).grad_fn is None


# --- compiled models


class Net(nn.Module):
    """A module of the user's own, with statistics inside."""

    def __init__(self):
        super().__init__()
        self.first = nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7), nn.Tanh())
        self.last = nn.Linear(7, 2)

    def forward(self, x):
        return self.last(self.first(x))


def in_place(model, backend):
    model.compile(backend=backend)
    return model


COMPILED = {
    "the module": lambda model, backend: torch.compile(model, backend=backend),
    "the module in place": in_place,
    "a function": lambda model, backend: torch.compile(lambda x: model(x), backend=backend),
}


def compiled_run(how, make_optimizer, usual, steps=9):
    """The graphs that were compiled, the parameters and the statistics after some steps."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model, counter = Net(), CompileCounter()
    call = how(model, counter)
    x, y = torch.randn(16, 5), torch.randn(16, 2)
    optimizer = make_optimizer(model.parameters())

    def closure():
        loss = ((call(x) - y) ** 2).mean()
        if usual:
            optimizer.zero_grad()
            loss.backward()
        return loss

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(steps):
            optimizer.step(closure)
    return counter.frame_count, [p.detach().clone() for p in model.parameters()], list(model.buffers())


@pytest.mark.slow
@pytest.mark.parametrize("how", COMPILED)
@pytest.mark.parametrize("usual", [False, True])
def test_a_compiled_model_is_compiled_as_often_as_for_adamw(row, how, usual):
    adamw, _, _ = compiled_run(COMPILED[how], torch.optim.AdamW, usual=True)
    assert adamw == 1
    graphs, params, buffers = compiled_run(COMPILED[how], lambda p: make(row, p, lr=10.0), usual)
    assert graphs == adamw
    _, expected, statistics = compiled_run(lambda model, _: model, lambda p: make(row, p, lr=10.0), usual)
    assert same(params, expected)
    assert same(buffers, statistics)  # one forward pass a step, whatever was tried
    assert statistics[2] == 9


def test_a_compiled_function_may_be_given_another_model():
    torch._dynamo.reset()
    counter = CompileCounter()
    call = torch.compile(lambda model, x: model(x), backend=counter)
    x, y = torch.randn(16, 5), torch.randn(16, 2)
    first = Net()
    for model in (first, copy.deepcopy(first)):  # not compiled again, so nothing tells of the second one
        optimizer = optim.SLS(model.parameters(), lr=100.0)
        count = int(model.first[1].num_batches_tracked)
        optimizer.step(lambda model=model: ((call(model, x) - y) ** 2).mean())
        assert optimizer.last_checks > 1
        assert model.first[1].num_batches_tracked == count + 1


def test_calls_of_modules_are_left_as_they_were():
    call = nn.Module.__call__
    task = Task()
    run(task, optim.SLS(task.model.parameters()), 2)
    assert nn.Module.__call__ is call

    def fails():
        if len(seen) > 0:
            raise ZeroDivisionError
        seen.append(1)
        return task.loss()

    seen: list[int] = []
    with pytest.raises(ZeroDivisionError):
        optim.SLS(task.model.parameters()).step(fails)
    assert nn.Module.__call__ is call


# --- trials with the usual closure


@pytest.fixture
def uncompiled():
    """As in a process that never compiled anything: with compiled code around, backward is left as it is."""
    torch._dynamo.reset()


class Counted(torch.autograd.Function):
    """The same number; how often a gradient came through."""

    count = 0

    @staticmethod
    def forward(ctx, value):
        return value.clone()

    @staticmethod
    def backward(ctx, grad):
        Counted.count += 1
        return grad


@pytest.mark.usefixtures("uncompiled")
@pytest.mark.parametrize("clip", [lambda _: None, by_norm(0.1), lambda params: [p.grad.norm() for p in params]])
def test_trials_of_the_usual_closure_leave_its_backward_out(row, clip):
    steps, task, plain = 12, Task(), Task()
    a, b = (make(row, each.model.parameters()) for each in (task, plain))
    b.leaves_backward_out = False
    Counted.count = calls = 0
    for k in range(steps):
        a.step(clipping(a, lambda k=k: Counted.apply(task.loss(k)), clip))
        calls += a.last_checks
    assert Counted.count == steps
    assert a.leaves_backward_out
    assert (calls > 0) == row[2]
    for k in range(steps):
        b.step(clipping(b, lambda k=k: Counted.apply(plain.loss(k)), clip))
    assert same(task.parameters(), plain.parameters())
    # .grad is that of the step, as it is without a trial
    for p, q in zip(task.model.parameters(), plain.model.parameters(), strict=True):
        assert torch.equal(p.grad, q.grad)


def climbing(optimizer, loss, params):
    """Sharpness-aware: the loss that is returned stands where the gradient led uphill, and belongs to a second backward pass."""

    def closure():
        optimizer.zero_grad()
        loss().backward()
        with torch.no_grad():
            kept = [p.clone() for p in params]
            for p in params:
                p.add_(0.01 * p.grad)
        optimizer.zero_grad()
        value = loss()
        value.backward()
        with torch.no_grad():
            for p, old in zip(params, kept, strict=True):
                p.copy_(old)
        return value

    return closure


def adding(optimizer, loss, params):
    """A penalty for a large gradient, as a number: it is in what is returned."""

    def closure():
        optimizer.zero_grad()
        value = loss()
        value.backward()
        return value.detach() + 0.1 * sum(p.grad.square().sum() for p in params)

    return closure


def lacking(optimizer, loss, params):
    """Looks at what only a backward pass leaves behind."""

    def closure():
        seen = []
        optimizer.zero_grad()
        value = loss()
        value.register_hook(seen.append)
        value.backward()
        assert seen[0] == 1.0
        return value

    return closure


@pytest.mark.usefixtures("uncompiled")
@pytest.mark.parametrize("kind", [climbing, adding, lacking])
def test_a_closure_that_needs_its_gradients_has_them_in_trials(row, kind):
    found = []
    for leaves in (True, False):
        task = Task(dtype=torch.float64)
        params = list(task.model.parameters())
        optimizer = make(row, params)
        optimizer.leaves_backward_out = leaves
        for k in range(8):
            optimizer.step(kind(optimizer, lambda k=k, task=task: task.loss(k), params))
        assert optimizer.leaves_backward_out == (leaves and not row[2])
        found.append(task.parameters())
    assert same(*found)
