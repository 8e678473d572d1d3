"""The lower level: directions and optimisers against torch's own, the trace against autograd, what is left after a failure."""

from __future__ import annotations

import io
from itertools import pairwise, product

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import bisls
from bisls.batches import Minibatches
from bisls.derivatives import Adjoint, Following
from bisls.hypergrad.lookahead import through
from bisls.lower import Loop, Lowered, LowerPart, Newton, UserOptimizer
from bisls.status import Status

EXACT = bisls.Implicit(bisls.CG(iters=200, tol=1e-12))


def toy(**settings) -> tuple[bisls.Bilevel, Tensor, tuple[Tensor, Tensor]]:
    """Two lower tensors of different shapes, a quartic, batches that shift the target; float64."""
    rng = torch.Generator().manual_seed(1)
    matrix = torch.randn(5, 3, generator=rng, dtype=torch.float64)
    x = torch.tensor([0.5, -1.0, 1.5], dtype=torch.float64, requires_grad=True)
    y = torch.tensor([[0.1, 0.2], [-0.3, 0.4]], dtype=torch.float64, requires_grad=True)
    z = torch.tensor([0.7], dtype=torch.float64, requires_grad=True)
    scales = torch.tensor([1.0, 3.0, 10.0, 0.3, 2.0], dtype=torch.float64)

    def lower(batch: Tensor) -> Tensor:
        gap = torch.cat([y.flatten(), z]) - matrix @ x - batch
        return 0.5 * (scales * gap**2).sum() + 0.05 * (gap**4).sum()

    def upper(batch: Tensor) -> Tensor:
        return 0.5 * ((torch.cat([y.flatten(), z]) - 1.0 - batch) ** 2).sum() + 0.05 * (x**2).sum()

    return bisls.Bilevel(upper, lower, [x], [y, z], **settings), x, (y, z)


def batches(k: int, n: int = 4) -> list[Tensor]:
    rng = torch.Generator().manual_seed(k)
    return [0.3 * torch.randn(5, generator=rng, dtype=torch.float64) for _ in range(n)]


def plain_loop(optimizer_of, steps: int, between=None) -> tuple[Tensor, Tensor]:
    """Alternating with torch's own optimiser below: nothing of the package but the hypergradient and Adam above."""
    problem, x, ys = toy()
    lower, upper = optimizer_of(list(ys)), torch.optim.Adam([x], lr=0.01)
    for k in range(steps):
        first, *rest = batches(k)
        for batch in rest:
            lower.zero_grad()
            problem.lower_loss(batch).backward(inputs=list(ys))
            lower.step()
        if between is not None:
            between(lower)
        x.grad = bisls.hypergradient(problem, first, rest[-1], EXACT).flat
        upper.step()
    return problem.x.read(), problem.y.read()


def alternating(settings, steps: int = 8, between=None) -> tuple[Tensor, Tensor]:
    problem, _, _ = toy()
    solver = bisls.Alternating(problem, upper_step=bisls.Constant(0.01), hypergrad=EXACT, **settings(problem))
    for k in range(steps):
        first, *rest = batches(k)
        solver.step(first, rest)
        if between is not None:
            between(solver.lower.optimizer)
    return problem.x.read(), problem.y.read()


# --- a lower direction


@pytest.mark.parametrize(
    ("direction", "optimizer_of"),
    [
        (bisls.Adam(search_momentum=False), lambda ys: torch.optim.Adam(ys, lr=0.02)),
        (bisls.Adam(), lambda ys: torch.optim.Adam(ys, lr=0.02)),
        (bisls.Adam((0.0, 0.9), eps=1e-3), lambda ys: torch.optim.Adam(ys, lr=0.02, betas=(0.0, 0.9), eps=1e-3)),
        (bisls.Steepest(), lambda ys: torch.optim.SGD(ys, lr=0.02)),
    ],
    ids=["Adam of the paper", "Adam", "no momentum", "Steepest"],
)
def test_a_lower_direction_moves_as_torch_does(direction, optimizer_of):
    x, y = alternating(lambda _: {"lower_direction": direction, "lower_step": bisls.Constant(0.02)})
    x2, y2 = plain_loop(optimizer_of, 8)
    torch.testing.assert_close(y, y2, rtol=0, atol=1e-12)
    torch.testing.assert_close(x, x2, rtol=0, atol=1e-12)
    assert (y - toy()[0].y.read()).abs().max() > 0.1  # it has moved far beyond the tolerance


METHODS = {
    "BiSLS": bisls.BiSLS,
    "BiSLS, paper's response": lambda p, **s: bisls.BiSLS(p, response=bisls.GradientSteps(2), **s),
    "BiSLS, frozen": lambda p, **s: bisls.BiSLS(p, response=bisls.Frozen(), upper_step=bisls.Polyak(max_step=0.1), **s),
    "BiSLS, search below": lambda p, **s: bisls.BiSLS(p, lower_step=bisls.Armijo(), **s),
    "Unrolled": lambda p, **s: bisls.BiSLS(p, hypergrad=bisls.Unrolled(20), **s),
    "averaged": lambda p, **s: bisls.BiSLS(p, lower_average=True, **s),
    "BiSLS.paper": lambda p, **s: bisls.BiSLS.paper(p, **s),
    "BiSPS": lambda p, **s: bisls.BiSPS(p, alpha=0.3, **s),
    "BiSPS, two samples": lambda p, **s: bisls.BiSPS(p, samples=2, alpha=0.3, **s),
    "Alternating": lambda p, **s: bisls.Alternating(
        p, upper_step=bisls.Constant(0.02), lower_step=bisls.Constant(0.02), **s
    ),
}
DIRECTIONS = {"Adam": bisls.Adam(), "Steepest": bisls.Steepest(), "LBFGS": bisls.LBFGS()}


@pytest.mark.slow
@pytest.mark.parametrize(("method", "direction"), list(product(METHODS, DIRECTIONS)))
def test_a_lower_direction_works_with_every_method_and_response(method, direction):
    problem, x, _ = toy()
    solver = METHODS[method](problem, lower_direction=DIRECTIONS[direction])
    batch = torch.zeros(5, dtype=torch.float64)

    def exact() -> float:
        """F at the present x."""
        with problem.probing(), problem.y.lent(problem.y.read()):
            y = problem.y.read()
            Newton().descend(bisls.Oracle(problem), Minibatches([batch]), y, 0, {})
            value = problem.upper_loss(batch).item()
            problem.y.write_(y)
        return value

    start = exact()
    for _ in range(40):
        record = solver.step(batch, batch)
        assert record.status is not Status.NON_FINITE
    assert exact() < 0.7 * start
    assert torch.isfinite(x).all()


def test_newton_ends_at_the_gradient_that_was_asked_for():
    steps = []
    for tol in (1e-2, 0.0):
        problem, *_ = toy()
        oracle, batch = bisls.Oracle(problem), torch.zeros(5, dtype=torch.float64)
        first = oracle.lower(batch).grad.norm()
        steps.append(Newton(tol=tol).descend(oracle, Minibatches([batch]), problem.y.read(), 0, {}).steps)
        assert oracle.lower(batch).grad.norm() <= max(tol, 1e-12) < first
    assert 0 < steps[0] < steps[1]


def test_a_trial_of_the_papers_response_is_a_step_of_the_lower_direction():
    problem, *_ = toy()
    lower = Loop(bisls.Constant(0.05), bisls.Adam())
    oracle = bisls.Oracle(problem)
    batch = batches(0)[0]
    with torch.no_grad():
        lowered = lower.descend(oracle, Minibatches.repeated(batch, 3), problem.y.read(), 0, {})
        before = (problem.y.read(), repr(lowered.state))
        again = lower.repeated(oracle, Minibatches.repeated(batch, 2), lowered, lowered.y, None)
    twin, _, ys = toy()
    adam = torch.optim.Adam(list(ys), lr=0.05)
    for _ in range(5):
        adam.zero_grad()
        twin.lower_loss(batch).backward(inputs=list(ys))
        adam.step()
    torch.testing.assert_close(again, twin.y.read(), rtol=0, atol=1e-12)
    problem.y.write_(before[0])
    assert repr(lowered.state) == before[1]  # nothing of it is remembered


# --- the trace

STILL = Following(momentum=False)  # the state of the direction held still


@pytest.mark.parametrize("direction", [bisls.Steepest(), bisls.Adam(), bisls.Adam((0.0, 0.99))], ids=repr)
def test_the_trace_is_what_differentiating_through_the_steps_needs(direction):
    """Against autograd through the same steps, Adam's state held still; every step on a batch of its own."""
    problem, x, _ = toy()
    oracle, rows, start = bisls.Oracle(problem), batches(3, 6), problem.y.read()
    with torch.no_grad():
        lowered = Loop(bisls.Constant(0.03), direction).descend(oracle, Minibatches(rows), start, 0, {}, trace=True)
        assert [step.batch for step in lowered.trace] == rows
        assert torch.equal(lowered.trace[0].y, start)
        upper = oracle.upper(rows[0])
        flat, _ = through(oracle, lowered.trace, upper, STILL)

    ones = Adjoint(torch.ones_like(start))
    scales = [step.derivative.back(ones, lambda: start, STILL)[1] for step in lowered.trace]
    offsets = []  # the part of a step that does not depend on its gradient: momentum of earlier ones
    ends = [*(step.y for step in lowered.trace[1:]), lowered.y]
    for step, end in zip(lowered.trace, ends, strict=True):
        problem.y.write_(step.y)
        offsets.append(end - step.y + scales[len(offsets)] * oracle.lower(step.batch).grad)

    def run(x_: Tensor) -> Tensor:
        y_ = start
        for row, scale, offset in zip(rows, scales, offsets, strict=True):
            (g,) = torch.autograd.grad(lower_loss(x_, y_, row), y_, create_graph=True)
            y_ = y_ - scale * g + offset
        return upper_loss(x_, y_, rows[0])

    lower_loss, upper_loss = functions()
    start = start.clone().requires_grad_()
    there = x.detach().clone().requires_grad_()
    (truth,) = torch.autograd.grad(run(there), there)
    assert truth.norm() > 0.1
    torch.testing.assert_close(flat, truth, rtol=1e-12, atol=1e-12)


def functions():
    """The losses of `toy` as functions of x and y."""
    rng = torch.Generator().manual_seed(1)
    matrix = torch.randn(5, 3, generator=rng, dtype=torch.float64)
    scales = torch.tensor([1.0, 3.0, 10.0, 0.3, 2.0], dtype=torch.float64)

    def lower(x: Tensor, y: Tensor, batch: Tensor) -> Tensor:
        gap = y - matrix @ x - batch
        return 0.5 * (scales * gap**2).sum() + 0.05 * (gap**4).sum()

    def upper(x: Tensor, y: Tensor, batch: Tensor) -> Tensor:
        return 0.5 * ((y - 1.0 - batch) ** 2).sum() + 0.05 * (x**2).sum()

    return lower, upper


def test_the_trace_has_the_random_numbers_of_every_step():
    """The masks of the steps taken are drawn again on the way back."""
    torch.manual_seed(0)
    head, scale = nn.Linear(6, 2).double(), torch.ones(6, dtype=torch.float64, requires_grad=True)
    rows, labels = torch.randn(8, 6, dtype=torch.float64), torch.arange(8) % 2
    seen: list[Tensor] = []

    def lower(_: object) -> Tensor:
        mask = (torch.rand(8, 6) > 0.5).double()
        seen.append(mask)
        return functional.cross_entropy(head(rows * scale * mask), labels)

    problem = bisls.Bilevel(lambda _: functional.cross_entropy(head(rows), labels), lower, [scale], head.parameters())
    oracle = bisls.Oracle(problem)
    with torch.no_grad():
        lowered = Loop(bisls.Constant(0.1)).descend(
            oracle, Minibatches.repeated(None, 3), problem.y.read(), 0, {}, trace=True
        )
        taken = list(seen)
        seen.clear()
        through(oracle, lowered.trace, oracle.upper(None))
    assert len(taken) == len(seen) == 3
    assert all(torch.equal(a, b) for a, b in zip(taken, reversed(seen), strict=True))
    assert not torch.equal(taken[0], taken[1])


def test_no_trace_is_kept_that_nobody_asked_for():
    problem, *_ = toy()
    with torch.no_grad():
        lowered = Loop(bisls.Constant(0.03)).descend(
            bisls.Oracle(problem), Minibatches(batches(0)), problem.y.read(), 0, {}
        )
    assert lowered.trace == ()
    assert (lowered.steps, lowered.step, lowered.status) == (4, 0.03, Status.OK)


# --- the user's own optimiser

OPTIMIZERS = {
    "SGD": lambda ys: torch.optim.SGD(ys, lr=0.02),
    "momentum": lambda ys: torch.optim.SGD(ys, lr=0.01, momentum=0.9, nesterov=True, weight_decay=0.01),
    "AdamW by groups": lambda ys: torch.optim.AdamW(
        [{"params": ys[:1], "weight_decay": 0.1}, {"params": ys[1:], "lr": 0.005, "weight_decay": 0.0}], lr=0.02
    ),
    "RMSprop": lambda ys: torch.optim.RMSprop(ys, lr=0.01),
    "Adagrad": lambda ys: torch.optim.Adagrad(ys, lr=0.05),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_lower_optimiser_is_called_as_it_is(name):
    def scheduled(optimizer: torch.optim.Optimizer) -> None:
        for group in optimizer.param_groups:
            group["lr"] *= 0.9

    x, y = alternating(lambda p: {"lower_optimizer": OPTIMIZERS[name](p.y.tensors)}, between=scheduled)
    x2, y2 = plain_loop(OPTIMIZERS[name], 8, between=scheduled)
    torch.testing.assert_close(y, y2, rtol=0, atol=1e-12)
    torch.testing.assert_close(x, x2, rtol=0, atol=1e-12)
    assert (y - toy()[0].y.read()).abs().max() > 1e-2


@pytest.mark.slow
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize(
    "make",
    [bisls.BiSLS, bisls.BiSLS.paper, bisls.Alternating],
    ids=["BiSLS", "paper", "Alternating"],
)
def test_a_run_with_a_lower_optimiser_is_resumed_bit_for_bit(name, make):
    def made():
        problem, *_ = toy()
        return make(problem, lower_optimizer=OPTIMIZERS[name](problem.y.tensors))

    def run(solver, ks) -> list:
        seen = []
        for k in ks:
            first, *rest = batches(k)
            record = solver.step(first, rest)
            seen.append((repr(record), solver.problem.x.read().tolist(), solver.problem.y.read().tolist()))
        return seen

    whole = run(made(), range(6))
    half = made()
    run(half, range(3))
    file = io.BytesIO()
    torch.save(half.state_dict(), file)
    file.seek(0)
    again = made()
    again.problem.x.write_(half.problem.x.read())
    again.problem.y.write_(half.problem.y.read())
    again.load_state_dict(torch.load(file, weights_only=True))
    assert run(again, range(3, 6)) == whole[3:]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_iteration_that_is_cut_off_leaves_the_optimiser_as_it_was(name):
    """A loss that raises in the middle of the lower loop: the next iteration is as if nothing had been tried."""
    runs = []
    for fails in (False, True):
        problem, *_ = toy()
        loss, calls, broken = problem.lower_loss, [], set()

        def failing(batch, loss=loss, calls=calls, broken=broken):
            calls.append(1)
            if len(calls) in broken:
                raise KeyboardInterrupt
            return loss(batch)

        problem.lower_loss = failing
        solver = bisls.Alternating(problem, lower_optimizer=OPTIMIZERS[name](problem.y.tensors), hypergrad=EXACT)
        for k in range(4):
            first, *rest = batches(k)
            if fails:
                broken.add(len(calls) + 3)
                with pytest.raises(KeyboardInterrupt):
                    solver.step(first, rest)
            solver.step(first, rest)
        runs.append((problem.x.read(), problem.y.read(), repr(solver.lower.optimizer.state_dict())))
        assert all(p.grad is None for p in problem.y.tensors)
    assert torch.equal(runs[0][0], runs[1][0])
    assert torch.equal(runs[0][1], runs[1][1])
    assert runs[0][2] == runs[1][2]


def test_a_step_of_the_optimiser_that_is_not_finite_is_undone():
    problem, *_ = toy()
    optimizer = torch.optim.SGD(problem.y.tensors, lr=1e308, momentum=0.9)
    solver = bisls.Alternating(problem, lower_optimizer=optimizer)
    start = problem.y.read()
    first, *rest = batches(0)
    record = solver.step(first, rest)
    assert record.lower_status is Status.NON_FINITE
    assert torch.equal(problem.y.read(), start)
    assert all(
        torch.isfinite(v).all() for s in optimizer.state_dict()["state"].values() for v in s.values() if v is not None
    )
    optimizer.param_groups[0]["lr"] = 1e-3  # what a user would do about it
    assert solver.step(first, rest).lower_status is Status.OK


def test_a_lower_optimiser_stays_inside_the_bounds():
    problem, _, (y, z) = toy(lower_bounds=bisls.Box(-0.5, 0.75))
    solver = bisls.Alternating(problem, lower_optimizer=torch.optim.SGD([y, z], lr=0.05))
    for k in range(10):
        first, *rest = batches(k)
        solver.step(first, rest)
        assert -0.5 <= problem.y.read().min() <= problem.y.read().max() <= 0.75
    assert problem.y.read().max() == 0.75


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda x, y, z: {"lower_optimizer": torch.optim.SGD([y], lr=0.1)}, r"lacks 1 of the 2 lower parameters"),
        (
            lambda x, y, z: {"lower_optimizer": torch.optim.SGD([x, y, z], lr=0.1)},
            r"1 parameters that are not in lower",
        ),
        (
            lambda x, y, z: {"lower_optimizer": torch.optim.SGD([y, z], lr=0.1), "lower_step": bisls.Armijo()},
            r"lower_step says how lower steps are taken, and lower_optimizer takes them: pass one of the two",
        ),
        (
            lambda x, y, z: {"lower_optimizer": torch.optim.SGD([y, z], lr=0.1), "lower_direction": bisls.Adam()},
            r"lower_direction says how",
        ),
        (
            lambda x, y, z: {"lower_optimizer": bisls.Adam()},
            r"must be a torch.optim.Optimizer .*, got Adam; a way of your own to train y has a method descend\(...\)",
        ),
        (
            lambda x, y, z: {"lower_optimizer": torch.optim.SGD([y, z], lr=0.1), "polish": bisls.CG()},
            r"`BiSLS\(polish=CG\(.*\)\)`: polish says how lower steps are taken, and lower_optimizer takes them",
        ),
        (
            lambda x, y, z: {"lower_optimizer": torch.optim.SGD([y, z], lr=0.1), "beta": 0.5},
            r"`BiSLS\(beta=0.5, lower_optimizer=SGD.*\)`: beta is a setting of the rule that lower_optimizer replaces",
        ),
    ],
)
def test_an_optimiser_that_does_not_fit_is_refused(make, message):
    problem, x, (y, z) = toy()
    with pytest.raises(ValueError, match=message):
        bisls.BiSLS(problem, **make(x, y, z))


def test_an_optimiser_that_wants_the_loss_is_answered():
    problem, _, ys = toy()
    solver = bisls.BiSLS(problem, lower_optimizer=torch.optim.LBFGS(list(ys)))
    before = problem.y.read()
    with pytest.raises(
        ValueError, match=r"LBFGS.step\(\), called without a closure .* lower_direction=LBFGS\(\) do the like"
    ):
        solver.step(*batches(0)[:2])
    assert torch.equal(problem.y.read(), before)


def test_the_state_of_another_optimiser_is_refused():
    problem, _, ys = toy()
    solver = bisls.BiSLS(problem, lower_optimizer=torch.optim.Adam(list(ys)))
    solver.step(*batches(0)[:2])
    other, _, theirs = toy()
    for optimizer in (torch.optim.SGD(list(theirs), lr=0.1), torch.optim.Adam(list(theirs), betas=(0.5, 0.9))):
        twin = bisls.BiSLS(other, lower_optimizer=optimizer)
        with pytest.raises(ValueError, match="the state is of another method"):
            twin.load_state_dict(solver.state_dict())


def test_an_optimiser_is_known_by_what_it_was_made_with():
    problem, _, ys = toy()

    def known(optimizer) -> str:
        return repr(UserOptimizer(optimizer, problem.y))

    assert known(torch.optim.AdamW(list(ys))) == "AdamW()"
    assert known(torch.optim.AdamW(list(ys), lr=0.3)) == "AdamW()"  # a rate is what one would change
    assert known(torch.optim.SGD(list(ys), lr=0.1, momentum=0.9)) == "SGD(momentum=0.9)"
    groups = [{"params": ys[:1], "weight_decay": 0.1}, {"params": ys[1:], "lr": 0.005}]
    assert known(torch.optim.AdamW(groups, lr=0.02)) == "AdamW(group 0: weight_decay=0.1)"
    assert known(torch.optim.AdamW(list(ys), betas=(0.5, 0.9), eps=1e-6)) == "AdamW(betas=(0.5, 0.9), eps=1e-06)"


SCHEDULES = {
    "OneCycleLR, AdamW": lambda ys: (
        (o := torch.optim.AdamW(ys, lr=0.01)),
        torch.optim.lr_scheduler.OneCycleLR(o, max_lr=0.01, total_steps=50),
    ),
    "OneCycleLR, SGD": lambda ys: (
        (o := torch.optim.SGD(ys, lr=0.01, momentum=0.9)),
        torch.optim.lr_scheduler.OneCycleLR(o, max_lr=0.01, total_steps=50),
    ),
    "CosineAnnealingLR": lambda ys: (
        (o := torch.optim.Adam(ys, lr=0.01)),
        torch.optim.lr_scheduler.CosineAnnealingLR(o, 50),
    ),
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_run_whose_schedule_changes_the_optimiser_is_resumed(name, tmp_path):
    """The place in a schedule is no part of the method: neither rates nor betas nor momentum, at any time."""

    class Stepped(bisls.Callback):
        def __init__(self, scheduler):
            self.scheduler = scheduler

        def step(self, record, state):
            self.scheduler.step()

        def state_dict(self):
            return self.scheduler.state_dict()

        def load_state_dict(self, state):
            self.scheduler.load_state_dict(state)

    def run(steps: int, path) -> list:
        problem, *_ = toy()
        optimizer, scheduler = SCHEDULES[name](problem.y.tensors)
        solver = bisls.Alternating(problem, lower_optimizer=optimizer, lower_iters=2)
        row = batches(0)
        bisls.fit(solver, row[0], row[1], steps, False, [Stepped(scheduler)], checkpoint=path, resume=True, tol=None)
        return [problem.x.read().tolist(), problem.y.read().tolist()]

    for steps in (2, 5, 9):
        last = run(steps, tmp_path / "run.pt")
    assert last == run(9, tmp_path / "whole.pt")


class Alone:
    """Trains y, and inherits from nothing."""

    def __init__(self, step: float):
        self.step = step

    def descend(self, oracle, batches, y, k, state, *, trace=False, replay=None):
        return Loop(bisls.Constant(self.step)).descend(oracle, batches, y, k, state, trace=trace, replay=replay)


def test_a_lower_part_that_inherits_from_nothing_is_adopted():
    runs = []
    for own in (Alone(0.02), Loop(bisls.Constant(0.02))):
        problem, *_ = toy()
        solver = bisls.BiSLS(problem, lower_optimizer=own)
        first, *rest = batches(0)
        runs.append([repr(solver.step(first, rest)), problem.y.read().tolist()])
    assert runs[0] == runs[1]
    solver = bisls.BiSLS(toy()[0], lower_optimizer=Alone(0.02))
    state = solver.state_dict()
    with pytest.raises(ValueError, match=r"of another method, .*Alone\(step=0.02\).*Alone\(step=0.03\)"):
        bisls.BiSLS(toy()[0], lower_optimizer=Alone(0.03)).load_state_dict(state)


class Around(LowerPart):
    """A wrapper as a user would write it: hands everything on."""

    def __init__(self, inner: LowerPart):
        self.inner = inner

    def descend(self, *args, **kwargs):
        return self.inner.descend(*args, **kwargs)

    def repeated(self, *args):
        return self.inner.repeated(*args)

    def followed(self, *args):
        return self.inner.followed(*args)

    def rerun(self, *args):
        return self.inner.rerun(*args)

    def anew(self, *args):
        return self.inner.anew(*args)

    def taught(self, *args):
        return self.inner.taught(*args)

    def careful(self, *args):
        return self.inner.careful(*args)

    def saved(self, *args):
        return self.inner.saved(*args)

    def checked(self, *args):
        return self.inner.checked(*args)


LOWER = {
    "loop": lambda p: Loop(bisls.Armijo()),
    "averaged": lambda p: Loop(bisls.Constant(0.01), bisls.Adam(), average=True),
    "polished": lambda p: Loop(bisls.Constant(0.01), polish=bisls.CG()),
    "optimiser": lambda p: UserOptimizer(torch.optim.Adam(p.y.tensors), p.y),
    "Newton": lambda p: Newton(),
}


@pytest.mark.parametrize("name", LOWER)
def test_a_lower_part_of_ones_own_serves_a_solver_as_it_is_and_in_a_wrapper(name):
    runs = []
    for around in (lambda part: part, Around):
        problem, *_ = toy()
        solver = bisls.BiSLS(problem, lower_optimizer=around(LOWER[name](problem)), hypergrad=EXACT)
        seen = []
        for k in range(6):
            first, *rest = batches(k)
            seen.append((repr(solver.step(first, rest)), problem.x.read().tolist(), problem.y.read().tolist()))
        runs.append(seen)
    assert runs[0] == runs[1]
    assert runs[0][0][1] != runs[0][-1][1]


@pytest.mark.parametrize("wrapped", [False, True], ids=["itself", "wrapped"])
@pytest.mark.parametrize("name", LOWER)
def test_a_lower_part_does_what_it_says(name, wrapped):
    """The parameters are where `y` says, steps are counted, and the state survives a file."""
    problem, *_ = toy()
    part, oracle = Around(LOWER[name](problem)) if wrapped else LOWER[name](problem), bisls.Oracle(problem)
    rows = Minibatches(batches(0)) if name != "Newton" else Minibatches.repeated(batches(0)[0], 4)
    with torch.no_grad():
        first = problem.lower_loss(rows.newest).item()
        lowered = part.descend(oracle, rows, problem.y.read(), 0, {})
        assert torch.equal(problem.y.read(), lowered.y)
        assert problem.lower_loss(rows.newest).item() < first
        assert lowered.steps >= 1
        file = io.BytesIO()
        torch.save(dict(lowered.state), file)
        file.seek(0)
        state = part.checked(torch.load(file, weights_only=True)) if lowered.state else {}
        twice = [part.descend(oracle, rows, lowered.y, 1, own).y for own in (lowered.state, state)]
        again = part.repeated(oracle, Minibatches.repeated(rows.newest, 2), lowered, lowered.y, None)
    assert torch.equal(*twice)
    assert again is not None
    assert torch.isfinite(again).all()


class Forgetful(Around):
    """A part that says nothing but where y is, as one in a few lines would."""

    def descend(self, *args, **kwargs):
        own = self.inner.descend(*args, **kwargs)
        return Lowered(own.y, own.step, own.steps, own.checks, own.status, own.state, own.accepted)


RISING = {
    "loop": lambda p: Loop(bisls.Constant(1.5)),
    "optimiser": lambda p: UserOptimizer(torch.optim.SGD(p.y.tensors, lr=1.5), p.y),
    "by itself": lambda p: Uphill(),
}
LOOKING = {
    "Implicit": EXACT,
    "over batches": bisls.Implicit(bisls.CG(), spread=0.5),
    "StochasticNeumann": bisls.StochasticNeumann(4),
    "Unrolled": bisls.Unrolled(5, step=0.01),
}


class Uphill(LowerPart):
    """Goes the wrong way."""

    def descend(self, oracle, batches, y, k, state, *, trace=False, replay=None):
        for batch in batches:
            y = y + 0.1 * oracle.lower(batch, y, replay).grad
        oracle.problem.y.write_(y)
        return Lowered(y, 0.1, len(batches), 0, Status.OK, {}, 0.1)


@pytest.mark.parametrize("noisy", [False, True], ids=["one batch", "batches"])
@pytest.mark.parametrize("around", [lambda part: part, Around, Forgetful], ids=["itself", "wrapped", "forgetful"])
@pytest.mark.parametrize("looking", LOOKING)
@pytest.mark.parametrize("name", RISING)
def test_a_lower_part_that_raises_the_loss_is_noticed_whoever_it_is(name, looking, around, noisy):
    problem, *_ = toy(tape=False)
    solver = bisls.Alternating(
        problem,
        lower_optimizer=around(RISING[name](problem)),
        hypergrad=LOOKING[looking],
        upper_step=bisls.Constant(1e-6),
        lower_iters=2,
    )
    calls = []
    loss = problem.lower_loss
    problem.lower_loss = lambda batch: calls.append(1) or loss(batch)
    first, *rest = batches(0, 3)
    before = problem.lower_loss(rest[-1]).item()
    calls.clear()
    record = solver.step(first, rest if noisy else rest[-1])
    assert record.lower_status in (Status.LOWER_ROSE, Status.LOWER_LOST)  # that of an optimiser is undone
    assert record.status.failed
    assert record.lower_value > 2 * before
    cost = record.cost
    assert len(calls) - 1 <= cost.lower_values + cost.lower_gradients + cost.lower_graphs  # 1: how exact the loss is


@pytest.mark.slow
@pytest.mark.parametrize("noisy", [False, True], ids=["one batch", "batches"])
@pytest.mark.parametrize("around", [Around, Forgetful], ids=["wrapped", "forgetful"])
@pytest.mark.parametrize("looking", LOOKING)
@pytest.mark.parametrize("name", LOWER)
def test_a_lower_part_that_lowers_the_loss_is_not_blamed(name, looking, around, noisy):
    problem, *_ = toy()
    solver = bisls.Alternating(
        problem,
        lower_optimizer=around(LOWER[name](problem)),
        hypergrad=LOOKING[looking],
        upper_step=bisls.Constant(1e-3),
    )
    for k in range(30):
        first, *rest = batches(k if noisy else 0)
        assert solver.step(first, rest if noisy else rest[-1]).lower_status not in (
            Status.LOWER_ROSE,
            Status.LOWER_LOST,
        ), k


@pytest.mark.parametrize("forgetful", [False, True])
def test_a_lower_loss_that_draws_is_compared_on_the_same_draw(forgetful):
    """Dropout makes a loss rise and fall by itself, also where nobody has a graph that would know."""
    torch.manual_seed(0)
    head, scale = nn.Linear(6, 2).double(), torch.ones(6, dtype=torch.float64, requires_grad=True)
    rows, labels = torch.randn(8, 6, dtype=torch.float64), torch.arange(8) % 2

    def lower(_: object) -> Tensor:
        mask = (torch.rand(8, 6) > 0.5).double()
        return functional.cross_entropy(head(rows * scale * mask), labels) + 0.1 * head.weight.square().sum()

    problem = bisls.Bilevel(lambda _: functional.cross_entropy(head(rows), labels), lower, [scale], head.parameters())
    own = Loop(bisls.Constant(0.05))
    solver = bisls.Alternating(
        problem, lower_optimizer=Forgetful(own) if forgetful else own, hypergrad=bisls.Unrolled(3, step=0.05)
    )
    records = [solver.step(None, None) for _ in range(40)]
    assert not any(record.lower_status.failed for record in records)
    values = [record.lower_value for record in records]
    assert any(later > earlier for earlier, later in pairwise(values))


@pytest.mark.parametrize("looking", LOOKING)
def test_an_x_that_does_not_reach_y_is_noticed_by_every_hypergradient(looking):
    x = torch.ones(2, dtype=torch.float64, requires_grad=True)
    y = torch.tensor([1.0, -2.0], dtype=torch.float64, requires_grad=True)
    apart = bisls.Bilevel(
        lambda _: (y - 3.0).square().sum(), lambda _: 0.5 * (y - 1.0).square().sum() + 0.0 * x.sum(), [x], [y]
    )
    record = bisls.BiSLS(apart, hypergrad=LOOKING[looking], polish=None).step(None, None)
    assert record.hypergrad_norm == 0.0
    assert record.upper_status is Status.NO_INFLUENCE
    # where x reaches y, a zero at a solution is none
    joined = bisls.Bilevel(lambda _: (y - 3.0).square().sum(), lambda _: 0.5 * (y - x).square().sum(), [x], [y])
    with torch.no_grad():
        x.fill_(3.0), y.fill_(3.0)
    record = bisls.BiSLS(joined, hypergrad=LOOKING[looking]).step(None, None)
    assert record.hypergrad_norm == 0.0
    assert not record.status.failed
