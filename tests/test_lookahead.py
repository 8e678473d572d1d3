"""Through the steps that were taken: against autograd, along the ray, from a start that depends on x, with every optimiser."""

from __future__ import annotations

import io

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import bisls
from bisls.lower import Trained

ROWS = [0.3 * torch.randn(5, generator=torch.Generator().manual_seed(i), dtype=torch.float64) for i in range(6)]
MATRIX = torch.randn(5, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
SCALES = torch.tensor([1.0, 3.0, 10.0, 0.3, 2.0], dtype=torch.float64)
RATE = 0.05


def lower_loss(x: Tensor, y: Tensor, batch: Tensor) -> Tensor:
    gap = y - MATRIX @ x - batch
    return 0.5 * (SCALES * gap**2).sum() + 0.05 * (gap**4).sum()


def upper_loss(x: Tensor, y: Tensor, batch: Tensor) -> Tensor:
    return 0.5 * ((y - 1.0 - batch) ** 2).sum() + 0.05 * (x**2).sum()


def start_of(x: Tensor) -> Tensor:
    return torch.cat([x.sin(), x[:2] ** 2])


def made(started: bool = False, bounds: bisls.Box | None = None) -> tuple[bisls.Bilevel, Tensor, Tensor]:
    x = torch.tensor([0.5, -1.0, 1.5], dtype=torch.float64, requires_grad=True)
    y = torch.tensor([0.1, 0.2, -0.3, 0.4, 0.7], dtype=torch.float64, requires_grad=True)
    problem = bisls.Bilevel(
        lambda batch: upper_loss(x, y, batch),
        lambda batch: lower_loss(x, y, batch),
        [x],
        [y],
        lower_bounds=bounds,
        lower_start=(lambda: [start_of(x)]) if started else None,
    )
    return problem, x, y


def hypergradient(method: bisls.Lookahead, lower, started: bool = False, bounds=None) -> tuple[Tensor, bisls.Record]:
    """What a step of length 1 along the hypergradient moves x by."""
    problem, x, y = made(started, bounds)
    settings = {"upper_step": bisls.Constant(1.0), "direction": bisls.Steepest(), "lower_iters": len(ROWS)}
    solver = bisls.Alternating(problem, hypergrad=method, **settings, **lower(y))
    before = x.detach().clone()
    record = solver.step(ROWS[0], list(ROWS))
    return before - x.detach(), record


def truth(step, started: bool = False) -> Tensor:
    """The same by autograd through the steps: ``step(t, y, g) -> y``, which may keep what it likes."""
    _, x, y = made()
    here = start_of(x) if started else y
    for t, row in enumerate(ROWS, 1):
        (g,) = torch.autograd.grad(lower_loss(x, here, row), here, create_graph=True)
        here = step(t, here, g)
    (h,) = torch.autograd.grad(upper_loss(x, here, ROWS[0]), x)
    assert h.norm() > 0.1  # far above the tolerance
    return h


def sgd(decay: float = 0.0):
    return lambda t, y, g: y - RATE * (g + decay * y)


def momentum(nesterov: bool = False, still: bool = False, decay: float = 0.0, dampening: float = 0.0):
    kept = {"m": torch.zeros(5, dtype=torch.float64)}

    def step(t: int, y: Tensor, g: Tensor) -> Tensor:
        p = g + decay * y
        m = kept["m"].detach() if still else kept["m"]
        kept["m"] = p if t == 1 else 0.9 * m + (1 - dampening) * p
        return y - RATE * (p + 0.9 * kept["m"] if nesterov else kept["m"])

    return step


def adam(still: bool = False, squares: bool = False, decoupled: float = 0.0, decay: float = 0.0):
    kept = {"m": torch.zeros(5, dtype=torch.float64), "v": torch.zeros(5, dtype=torch.float64)}

    def step(t: int, y: Tensor, g: Tensor) -> Tensor:
        p = g + decay * y
        m, square = kept["m"].detach() if still else kept["m"], p**2 if squares else (p**2).detach()
        kept["m"], kept["v"] = 0.9 * m + 0.1 * p, 0.999 * kept["v"] + 0.001 * square
        root = (kept["v"] / (1 - 0.999**t)).sqrt()
        return (1 - RATE * decoupled) * y - RATE * kept["m"] / (1 - 0.9**t) / (root + 1e-8)

    return step


def rmsprop():
    kept = {"m": torch.zeros(5, dtype=torch.float64), "v": torch.zeros(5, dtype=torch.float64)}

    def step(t: int, y: Tensor, g: Tensor) -> Tensor:
        kept["v"] = 0.99 * kept["v"] + 0.01 * (g**2).detach()
        kept["m"] = 0.9 * kept["m"] + g / (kept["v"].sqrt() + 1e-8)
        return y - RATE * kept["m"]

    return step


def by(optimizer, **settings):
    return lambda y: {"lower_optimizer": optimizer([y], lr=RATE, **settings)}


def loop(direction=None):
    return lambda y: {"lower_step": bisls.Constant(RATE), "lower_direction": direction or bisls.Steepest()}


SGD, ADAM, ADAMW, RMSPROP = torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.RMSprop
STILL, FULL = bisls.Lookahead(momentum=False), bisls.Lookahead(squares=True)
CASES = {
    "gradient steps": (loop(), sgd, bisls.Lookahead()),
    "SGD with decay": (by(SGD, weight_decay=0.1), lambda: sgd(0.1), bisls.Lookahead()),
    "momentum": (by(SGD, momentum=0.9, dampening=0.3), lambda: momentum(dampening=0.3), bisls.Lookahead()),
    "momentum held still": (by(SGD, momentum=0.9), lambda: momentum(still=True), STILL),
    "Nesterov": (by(SGD, momentum=0.9, nesterov=True, weight_decay=0.1), lambda: momentum(True, decay=0.1), bisls.Lookahead()),
    "Adam": (by(ADAM, weight_decay=0.1), lambda: adam(decay=0.1), bisls.Lookahead()),
    "Adam held still": (by(ADAM), lambda: adam(still=True), STILL),
    "Adam in full": (by(ADAM), lambda: adam(squares=True), FULL),
    "AdamW": (by(ADAMW, weight_decay=0.1), lambda: adam(decoupled=0.1), bisls.Lookahead()),
    "AdamW in full": (by(ADAMW, weight_decay=0.1), lambda: adam(squares=True, decoupled=0.1), FULL),
    "RMSprop": (by(RMSPROP, momentum=0.9), rmsprop, bisls.Lookahead()),
    "Adam's direction": (loop(bisls.Adam(search_momentum=False)), adam, bisls.Lookahead()),
    "Adam's direction in full": (loop(bisls.Adam(search_momentum=False)), lambda: adam(squares=True), FULL),
}  # fmt: skip


@pytest.mark.parametrize("started", [False, True], ids=["from y", "from a start"])
@pytest.mark.parametrize("case", CASES)
def test_it_is_autograd_through_the_steps(case, started):
    lower, step, method = CASES[case]
    found, record = hypergradient(method, lower, started)
    torch.testing.assert_close(found, truth(step(), started), rtol=1e-10, atol=1e-10)
    assert record.view == "t-step"


def test_what_it_costs():
    """T graphs, T mixed products and T - 1 Hessian products: the first y does not depend on x."""
    _, record = hypergradient(bisls.Lookahead(), loop())
    cost = record.cost
    assert (cost.lower_graphs, cost.mixed_products, cost.hessian_products) == (6, 6, 5)
    _, record = hypergradient(bisls.Lookahead(), loop(), started=True)
    assert (record.cost.mixed_products, record.cost.hessian_products) == (6, 6)
    _, record = hypergradient(bisls.Lookahead(1), loop())
    assert (record.cost.lower_graphs, record.cost.mixed_products, record.cost.hessian_products) == (1, 1, 0)


def test_fewer_steps_are_the_last_ones():
    """Through the last two: the first four count as given, and nothing of them is kept."""
    found, _ = hypergradient(bisls.Lookahead(2), loop())
    _, x, y = made()
    here = y
    for t, row in enumerate(ROWS):
        if t == 4:
            here = here.detach().requires_grad_()
        (g,) = torch.autograd.grad(lower_loss(x, here, row), here, create_graph=True)
        here = here - RATE * g
    (h,) = torch.autograd.grad(upper_loss(x, here, ROWS[0]), x)
    torch.testing.assert_close(found, h, rtol=1e-10, atol=1e-10)


def test_a_step_that_was_cut_off_at_a_bound_moves_nothing():
    box = bisls.Box(low=-0.35, high=0.6)
    _, x, y = made()
    y = y.detach().clamp(-0.35, 0.6).requires_grad_()
    here = y
    for row in ROWS:
        (g,) = torch.autograd.grad(lower_loss(x, here, row), here, create_graph=True)
        here = (here - RATE * g).clamp(-0.35, 0.6)
    assert ((here == -0.35) | (here == 0.6)).any()
    (h,) = torch.autograd.grad(upper_loss(x, here, ROWS[0]), x)
    problem, x2, y2 = made()
    with torch.no_grad():
        y2.clamp_(-0.35, 0.6)
    bounded = bisls.Bilevel(problem.upper_loss, problem.lower_loss, [x2], [y2], lower_bounds=box)
    solver = bisls.Alternating(
        bounded, hypergrad=bisls.Lookahead(), upper_step=bisls.Constant(1.0), direction=bisls.Steepest(), **loop()(y2)
    )
    before = x2.detach().clone()
    solver.step(ROWS[0], list(ROWS))
    torch.testing.assert_close(before - x2.detach(), h, rtol=1e-10, atol=1e-10)


class Sign(torch.optim.Optimizer):
    """An element-wise optimiser that nobody knows: steps along g / (1 + |g|)."""

    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(group["lr"] * p.grad / (1 + p.grad.abs()))


class Normed(Sign):
    """One that divides all coordinates by a common norm: steps along g / ||g||, whose derivative is symmetric."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(group["lr"] * p.grad / p.grad.norm())


class Mixing(Sign):
    """One whose coordinates mix, each with those before it."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(group["lr"] * p.grad.cumsum(0))


class Signs(Sign):
    """One that looks at signs alone."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(group["lr"] * p.grad.sign())


@pytest.mark.parametrize("started", [False, True], ids=["from y", "from a start"])
def test_an_optimiser_that_nobody_knows_is_tried(started):
    found, _ = hypergradient(bisls.Lookahead(), by(Sign), started)
    torch.testing.assert_close(found, truth(signs, started), rtol=1e-5, atol=1e-5)
    found, _ = hypergradient(bisls.Lookahead(), by(Normed), started)
    torch.testing.assert_close(found, truth(lambda t, y, g: y - RATE * g / g.norm(), started), rtol=1e-5, atol=1e-5)


def clipped(g: Tensor, most: float = 0.3) -> Tensor:
    return g * (most / (g.norm() + 1e-6)).clamp(max=1.0)


def hooked(made, hook):
    def build(y):
        built = made(y)
        built["lower_optimizer"].register_step_pre_hook(lambda *_: hook(y))
        return built

    return build


def clip(y: Tensor) -> None:
    torch.nn.utils.clip_grad_norm_([y], 0.3)


def clip_values(y: Tensor) -> None:
    torch.nn.utils.clip_grad_value_([y], 0.2)


def unscale(y: Tensor) -> None:
    y.grad /= 8.0


def signs(t: int, y: Tensor, g: Tensor) -> Tensor:
    return y - RATE * g / (1 + g.abs())


def after(change, step):
    return lambda: (lambda made: lambda t, y, g: made(t, y, change(g)))(step())


HOOKED = {
    "clipped gradient steps": (hooked(by(SGD), clip), after(clipped, sgd), bisls.Lookahead()),
    "clipped momentum": (hooked(by(SGD, momentum=0.9), clip), after(clipped, momentum), bisls.Lookahead()),
    "clipped AdamW": (hooked(by(ADAMW, weight_decay=0.1), clip), after(clipped, lambda: adam(decoupled=0.1)), bisls.Lookahead()),
    "clipped Adam in full": (hooked(by(ADAM), clip), after(clipped, lambda: adam(squares=True)), FULL),
    "clipped values": (hooked(by(SGD), clip_values), after(lambda g: g.clamp(-0.2, 0.2), sgd), bisls.Lookahead()),
    "unscaled": (hooked(by(ADAM), unscale), after(lambda g: g / 8, adam), bisls.Lookahead()),
    "clipped and unknown": (hooked(by(Sign), clip), after(clipped, lambda: signs), bisls.Lookahead()),
}  # fmt: skip


@pytest.mark.parametrize("case", HOOKED)
def test_hooks_that_change_gradients_are_looked_through(case):
    lower, step, method = HOOKED[case]
    found, _ = hypergradient(method, lower)
    wanted = truth(step())
    assert wanted.norm() > 1e-2
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-7)
    bare, _ = hypergradient(method, by(SGD))
    assert (bare - wanted).norm() > 1e-2 * wanted.norm()  # it makes a difference


def test_hooks_that_mix_gradients_count_as_scaling(caplog):
    def reverse(y: Tensor) -> None:
        y.grad = y.grad.cumsum(0)

    with caplog.at_level("INFO", logger="bisls"):
        found, _ = hypergradient(bisls.Lookahead(), hooked(by(SGD), reverse))
    assert "count as scaling" in caplog.text
    assert torch.isfinite(found).all()


def test_a_schedule_and_an_average_in_hooks_see_every_step_once():
    """Steps that are tried or repeated are nobody's business; repeated ones have the rates that they had."""
    _, x, y = made()
    optimizer = SGD([y], lr=RATE)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    rates: list[float] = []
    optimizer.register_step_post_hook(lambda *_: rates.append(optimizer.param_groups[0]["lr"]))
    optimizer.register_step_post_hook(lambda *_: schedule.step())
    problem = bisls.Bilevel(lambda r: upper_loss(x, y, r), lambda r: lower_loss(x, y, r), [x], [y])
    solver = bisls.BiSLS(problem, lower_optimizer=optimizer, hypergrad=bisls.Lookahead())
    before = solver.k
    record = solver.step(ROWS[0], list(ROWS))
    assert record.upper_checks > 0  # steps were repeated
    assert rates == pytest.approx([RATE * 0.9**i for i in range(len(ROWS))])
    assert (schedule.last_epoch, optimizer.param_groups[0]["lr"], before) == (6, pytest.approx(RATE * 0.9**6), 0)


def test_what_cannot_be_differentiated_is_said():
    for lower in (by(Mixing), by(Signs)):
        with pytest.raises(ValueError, match="cannot be differentiated"):
            hypergradient(bisls.Lookahead(), lower)
    with pytest.raises(ValueError, match="cannot be differentiated"):
        hypergradient(bisls.Lookahead(), loop(bisls.LBFGS()))
    problem, *_ = made()
    with pytest.raises(ValueError, match="here there are none"):
        bisls.hypergradient(problem, ROWS[0], ROWS[1], bisls.Lookahead())


LOWER = {
    "gradient steps": loop(),
    "searched steps": lambda y: {"lower_step": bisls.Armijo()},
    "Adam's direction": loop(bisls.Adam(search_momentum=False)),
    "SGD": by(SGD, momentum=0.9),
    "Adam": by(ADAM),
    "trained": lambda y: {"lower_optimizer": Trained()},
}
EXACT = ("gradient steps", "searched steps", "SGD")  # nothing of their state is held still


@pytest.mark.parametrize("started", [False, True], ids=["from y", "from a start"])
@pytest.mark.parametrize("name", LOWER)
def test_the_line_of_repeated_steps_begins_where_the_steps_ended(name, started):
    """phi(0) is f(x, y_T) to the last bit; where all of the state is followed the slope is that of the line."""
    problem, _, y = made(started)
    seen = {}

    class Look(bisls.StepRule):
        def choose(self, line, memory):
            seen["again"] = line.at(0.0), line.at(1e-300)
            seen["value"], seen["slope"] = line.value, line.slope
            seen["difference"] = (line.at(1e-5) - line.at(-1e-5)) / 2e-5
            return bisls.Step(0.0, memory.later())

        searches = True

    parts = {"direction": bisls.Steepest(), "response": bisls.Rerun(), "hypergrad": bisls.Lookahead()}
    solver = bisls.Solver(problem, upper_step=Look(), lower_iters=6, **parts, **LOWER[name](y))
    for _ in range(3):
        record = solver.step(ROWS[0], list(ROWS))
        assert seen["again"][0] == seen["again"][1] == seen["value"] == record.upper_value
        if name in EXACT:
            assert seen["difference"] == pytest.approx(seen["slope"], rel=1e-6)
        assert seen["slope"] < -0.01


def test_masks_are_drawn_again_along_the_line():
    torch.manual_seed(0)
    head, scale = nn.Linear(6, 2).double(), torch.ones(6, dtype=torch.float64, requires_grad=True)
    rows, labels = torch.randn(8, 6, dtype=torch.float64), torch.arange(8) % 2

    def lower(_: object) -> Tensor:
        return functional.cross_entropy(head(functional.dropout(rows * scale, 0.5)), labels)

    problem = bisls.Bilevel(
        lambda _: functional.cross_entropy(head(rows * scale), labels), lower, [scale], head.parameters()
    )
    values = []

    class Look(bisls.StepRule):
        def choose(self, line, memory):
            values.append((line.value, line.at(1e-300), line.at(1e-300)))
            return bisls.Step(0.0, memory.later())

        searches = True

    for lower_part in (lambda: {"lower_step": bisls.Constant(0.1)}, lambda: {"lower_optimizer": Trained()}):
        parts = {"direction": bisls.Steepest(), "response": bisls.Rerun(), "hypergrad": bisls.Lookahead()}
        bisls.Solver(problem, upper_step=Look(), **parts, **lower_part()).step(None, None)
        assert len(set(values[-1])) == 1


# --- a start of one's own


def test_every_iteration_begins_at_the_start_and_momentum_is_forgotten():
    problem, x, y = made(started=True)
    seen = []
    inner = problem.lower_loss
    problem.lower_loss = lambda batch: seen.append(y.detach().clone()) or inner(batch)
    solver = bisls.Alternating(
        problem,
        hypergrad=bisls.Lookahead(),
        upper_step=bisls.Constant(0.01),
        lower_optimizer=torch.optim.SGD([y], 0.05, 0.9),
    )
    ends = []
    for _ in range(2):
        seen.clear()
        before = x.detach().clone()
        solver.step(ROWS[0], ROWS[1])
        assert torch.equal(seen[0], start_of(before))
        ends.append(y.detach().clone())
    # the same from a solver that has never taken a step: nothing of the first iteration's path is left
    twin, x2, y2 = made(started=True)
    with torch.no_grad():
        x2.copy_(before)
    lone = bisls.Alternating(
        twin,
        hypergrad=bisls.Lookahead(),
        upper_step=bisls.Constant(0.01),
        lower_optimizer=torch.optim.SGD([y2], 0.05, 0.9),
    )
    lone.step(ROWS[0], ROWS[1])
    assert torch.equal(y2.detach(), ends[1])


@pytest.mark.parametrize(
    ("start", "message"),
    [
        (3, "must be a function of nothing"),
        (lambda a, b: None, "must be a function of nothing"),
        (lambda: None, r"must return tensors like lower_params, got NoneType"),
        (lambda: [torch.zeros(4, dtype=torch.float64)], r"of shapes \[\(5,\)\]; it returned \[\(4,\)\]"),
        (lambda: [torch.full((5,), float("nan"), dtype=torch.float64)], "not finite"),
    ],
)
def test_a_start_that_is_none_is_refused(start, message):
    problem, x, y = made()
    with pytest.raises(ValueError, match=message):
        bisls.BiSLS(
            bisls.Bilevel(problem.upper_loss, problem.lower_loss, [x], [y], lower_start=start), lower_iters=2
        ).step(ROWS[0], ROWS[1])


def test_a_start_may_take_the_batch_and_the_upper_batch_is_that_of_the_lower_level():
    problem, x, y = made()
    seen = []
    begun = bisls.Bilevel(
        problem.upper_loss,
        problem.lower_loss,
        [x],
        [y],
        lower_start=lambda batch: seen.append(batch) or [batch + x.sum()],
    )
    bisls.fit(bisls.BiSLS(begun, lower_iters=2), iter(ROWS), None, steps=3, progress=False)
    # the start is computed again for the gradient through it, and for trials; always with the batch of its iteration
    assert {id(batch) for batch in seen} == {id(row) for row in ROWS[:3]}


# --- which view


def network(seed: int = 0) -> tuple[bisls.Bilevel, Tensor]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 3))
    rows, weights = torch.randn(64, 6), torch.zeros(64, requires_grad=True)
    labels = rows[:, :3].argmax(1)

    def lower(chosen: Tensor) -> Tensor:
        losses = functional.cross_entropy(model(rows[chosen]), labels[chosen], reduction="none")
        return (weights[chosen].sigmoid() * losses).mean()

    problem = bisls.Bilevel(
        lambda _: functional.cross_entropy(model(rows), labels), lower, [weights], model.parameters()
    )
    return problem, weights


def drawn(k: int) -> list[Tensor]:
    rng = torch.Generator().manual_seed(k)
    return [torch.randperm(64, generator=rng)[:16] for _ in range(5)]


def test_a_network_is_trained_and_a_convex_problem_is_solved():
    problem, _ = network()
    solver = bisls.BiSLS(problem)
    records = [solver.step(None, drawn(k)) for k in range(30)]
    assert {record.view for record in records} == {"t-step"}
    assert records[-1].upper_value < 0.5 * records[0].upper_value
    convex, *_ = made()
    solver = bisls.BiSLS(convex)
    assert {solver.step(ROWS[0], ROWS[0]).view for _ in range(10)} == {"implicit"}


@pytest.mark.parametrize(
    ("settings", "view"),
    [
        ({"hypergrad": bisls.Implicit()}, "implicit"),
        ({"response": bisls.Tangent()}, "implicit"),
        ({"direction": bisls.Adam()}, "implicit"),
        ({"hypergrad": bisls.Lookahead()}, "t-step"),
        ({"response": bisls.Rerun()}, "t-step"),
        ({"hypergrad": bisls.Lookahead(1), "response": bisls.Rerun()}, "t-step"),
    ],
)
def test_both_views_by_hand(settings, view):
    problem, _ = network()
    solver = bisls.BiSLS(problem, **settings)
    assert {solver.step(None, drawn(k)).view for k in range(4)} == {view}


def test_a_view_may_change_and_the_run_is_resumed_bit_for_bit():
    """Convex at the start, a double well later: three bent solves in a row, and y is trained from then on."""

    def bent() -> bisls.Solver:
        x = torch.tensor([1.5], dtype=torch.float64, requires_grad=True)
        y = torch.tensor([2.0, 2.5], dtype=torch.float64, requires_grad=True)
        shift = torch.tensor([0.0], dtype=torch.float64)

        def lower(batch: float) -> Tensor:
            return 0.25 * (y**4).sum() * shift - (shift - 0.5) * (y**2).sum() + 0.1 * (x * y).sum() + batch * y.sum()

        problem = bisls.Bilevel(lambda _: ((y - x) ** 2).sum(), lower, [x], [y], buffers=[shift])
        solver = bisls.BiSLS(problem, lower_iters=1, beta=1e-3)
        solver.shift = shift
        return solver

    def run(solver: bisls.Solver, ks: range) -> list:
        seen = []
        for k in ks:
            solver.shift.fill_(0.0 if k < 3 else 1.0)
            record = solver.step(None, [0.01 * k])
            seen.append((record.view, repr(record), solver.problem.x.read().tolist(), solver.problem.y.read().tolist()))
            if k == 3:
                solver.problem.y.write_(torch.tensor([0.05, 0.02], dtype=torch.float64))
        return seen

    whole = run(bent(), range(14))
    views = [view for view, *_ in whole]
    assert views[0] == "implicit"
    assert views[-1] == "t-step"
    assert views == sorted(views)  # it changes once
    for cut in (2, views.index("t-step"), 11):
        half = bent()
        first = run(half, range(cut))
        file = io.BytesIO()
        torch.save(half.state_dict(), file)
        file.seek(0)
        again = bent()
        again.problem.x.write_(half.problem.x.read())
        again.problem.y.write_(half.problem.y.read())
        again.load_state_dict(torch.load(file, weights_only=True))
        assert first + run(again, range(cut, 14)) == whole


def test_a_network_is_resumed_bit_for_bit():
    def run(solver: bisls.Solver, ks: range) -> list:
        return [(repr(solver.step(None, drawn(k))), solver.problem.x.read().tolist()) for k in ks]

    whole = run(bisls.BiSLS(network()[0]), range(16))
    for cut in (1, 3, 9):
        half = bisls.BiSLS(network()[0])
        first = run(half, range(cut))
        file = io.BytesIO()
        torch.save(half.state_dict(), file)
        file.seek(0)
        again = bisls.BiSLS(network()[0])
        again.problem.x.write_(half.problem.x.read())
        again.problem.y.write_(half.problem.y.read())
        again.load_state_dict(torch.load(file, weights_only=True))
        assert first + run(again, range(cut, 16)) == whole


def test_the_users_optimiser_trains_the_network_and_keeps_its_schedule():
    problem, _ = network()
    optimizer = torch.optim.AdamW(problem.y.tensors, lr=0.02)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 30)
    solver = bisls.BiSLS(problem, lower_optimizer=optimizer)
    rates = []
    for k in range(30):
        record = solver.step(None, drawn(k))
        schedule.step()
        rates.append(record.beta)
        assert record.view == "t-step"
    assert rates == pytest.approx(
        [0.01 * (1 + torch.cos(torch.tensor(k * torch.pi / 30)).item()) for k in range(30)], rel=1e-4
    )
    assert record.upper_value < 0.5


def test_what_is_tried_above_leaves_y_where_the_lower_steps_led_it(monkeypatch):
    """Trials and looks at the average write x and y; afterwards y's own progress stays."""
    problem, _ = network()
    solver, ends, inner = bisls.BiSLS(problem), [], Trained.descend
    monkeypatch.setattr(Trained, "descend", lambda *args, **kwargs: ends.append(inner(*args, **kwargs)) or ends[-1])
    checks = 0
    for k in range(12):
        checks += solver.step(None, drawn(k)).upper_checks
        assert torch.equal(problem.y.read(), ends[-1].y)
    assert len(ends) == 13  # one for each iteration, after a look at where the first steps lead
    assert checks > 12
