"""What every part promises, by one table for each protocol: with the part itself, a wrapper around it, and a look-alike."""

from __future__ import annotations

import io
from dataclasses import dataclass, field, replace
from math import inf

import pytest
import torch
from torch import Tensor

import bisls
from bisls._check import adopted
from bisls.bounds import Bounds
from bisls.directions.base import Direction
from bisls.hypergrad.base import HypergradientMethod
from bisls.linear.base import LinearSolver
from bisls.parts import identity
from bisls.response.base import Response
from bisls.steps.base import StepRule
from bisls.vector import Vector

RULES = {
    "Armijo": bisls.Armijo(),
    "Armijo from 1": bisls.Armijo(start=1.0, restart=bisls.Keep(), f_min=None),
    "Armijo of the default": bisls.Armijo(sufficient=0.5, expand=True, uphill=1.0),
    "Polyak": bisls.Polyak(max_step=0.1),
    "DecreasingPolyak": bisls.DecreasingPolyak(max_step=0.1),
    "Curvature": bisls.Curvature(),
    "Curvature of the default": bisls.Curvature(start=None, trials=3, every=4, recent=0.05, watch=True),
    "Constant": bisls.Constant(0.01),
    "Decay": bisls.Decay(0.01),
    "Envelope": bisls.Envelope(bisls.Armijo(), floor=1e-6, ceiling=bisls.Decay(10.0)),
    "Envelope twice": bisls.Envelope(bisls.Envelope(bisls.Curvature(start=None), ceiling=5.0), floor=1e-9),
}
DIRECTIONS = {
    "Steepest": bisls.Steepest(),
    "Adam": bisls.Adam(),
    "Adam of the paper": bisls.Adam(search_momentum=False),
    "Adam without momentum": bisls.Adam(betas=(0.0, 0.99)),
    "Denoised": bisls.Denoised(b2=0.999),
    "LBFGS": bisls.LBFGS(),
}
LINEAR = {
    "CG": bisls.CG(tol=1e-6),
    "CG damped": bisls.CG(tol=1e-3, iters=50, damp=True, stretch=10),
    "Neumann": bisls.Neumann(30),
    "Identity": bisls.Identity(0.05),
    "Dense": bisls.Dense(),
    "Direct": bisls.Direct(bisls.CG()),
}
HYPERGRADIENTS = {
    "Implicit": bisls.Implicit(bisls.CG(tol=1e-6)),
    "Implicit over batches": bisls.Implicit(bisls.Direct(bisls.CG()), spread=0.5),
    "StochasticNeumann": bisls.StochasticNeumann(5),
    "Unrolled": bisls.Unrolled(5),
}
RESPONSES = {
    "Tangent": bisls.Tangent(),
    "Tangent exact": bisls.Tangent(linear=bisls.CG(), exact=True),
    "GradientSteps": bisls.GradientSteps(2),
    "Frozen": bisls.Frozen(),
    "Resampled": bisls.Resampled(),
}
BOUNDS = {
    "Box": bisls.Box(-2.0, 2.0),
    "Box with one side": bisls.Box(low=-1.5),
    "Simplex": bisls.Simplex(floor=0.01),
}


def forwarding(base: type) -> type:
    """A wrapper of this protocol, written as a user would: it inherits from the base and hands everything on."""

    def forward(name: str):
        own = vars(base).get(name)
        if isinstance(own, property):
            return property(lambda self: getattr(self.inner, name))
        return lambda self, *args, **kwargs: getattr(self.inner, name)(*args, **kwargs)

    names = [name for name in vars(base) if not name.startswith("_")]
    body = {"__annotations__": {"inner": object}, "inner": field(), **{name: forward(name) for name in names}}
    return dataclass(frozen=True)(type(f"Wrapped{base.__name__}", (base,), body))


class LookAlike:
    """Has what a part has, and inherits from nothing."""

    def __init__(self, inner):
        self._inner = inner

    def __getattr__(self, name: str):
        return getattr(self._inner, name)

    def __repr__(self) -> str:
        return f"LookAlike({self._inner!r})"


PROTOCOLS = {
    StepRule: RULES,
    Direction: DIRECTIONS,
    LinearSolver: LINEAR,
    HypergradientMethod: HYPERGRADIENTS,
    Response: RESPONSES,
    Bounds: BOUNDS,
}
NOISE = [pytest.param(0.0, id="one batch", marks=pytest.mark.slow), pytest.param(0.3, id="batches")]
TABLE = [(base, name, part) for base, rows in PROTOCOLS.items() for name, part in rows.items()]
IDS = [f"{base.__name__}-{name}" for base, name, _ in TABLE]


def data(noise: float, k: int) -> tuple[Tensor, list[Tensor]]:
    rng = torch.Generator().manual_seed(k if noise else 0)
    draws = [noise * torch.randn(4, generator=rng, dtype=torch.float64) for _ in range(4)]
    return draws[0], draws[1:]


def problem(**bounds) -> bisls.Bilevel:
    """f = 1/2 ||y - 1 - b||^2 + 0.05 ||x||^2, g = 1/2 (y - Ax - b)' H (y - Ax - b) + a quartic, for a batch b."""
    rng = torch.Generator().manual_seed(4)
    matrix = torch.randn(4, 3, generator=rng, dtype=torch.float64)
    curvature = torch.tensor([1.0, 3.0, 10.0, 30.0], dtype=torch.float64)
    x = torch.tensor([0.5, -1.0, 1.5], dtype=torch.float64, requires_grad=True)
    y = torch.tensor([0.1, 0.2, -0.3, 0.4], dtype=torch.float64, requires_grad=True)
    for tensor, own in ((x, bounds.get("upper_bounds")), (y, bounds.get("lower_bounds"))):
        if own is not None:  # begin inside
            tensor.data.copy_(own.project(0.3 * tensor.detach(), Vector([tensor])))

    def lower(b: Tensor) -> Tensor:
        gap = y - matrix @ x - b
        return 0.5 * (curvature * gap**2).sum() + 0.01 * (gap**4).sum()

    return bisls.Bilevel(lambda b: 0.5 * ((y - 1.0 - b) ** 2).sum() + 0.05 * (x**2).sum(), lower, [x], [y], **bounds)


def solver(base: type, part) -> bisls.Solver:
    """A method with this part wherever one of its kind stands."""
    settings: dict = {"lower_iters": 3}
    if base is StepRule:
        settings |= {"upper_step": part, "lower_step": part}
    elif base is Direction:
        settings |= {"direction": part, "lower_direction": part}
    elif base is LinearSolver:
        settings |= {"hypergrad": bisls.Implicit(part), "polish": part}
    elif base is HypergradientMethod:
        settings |= {"hypergrad": part}
    elif base is Response:
        settings |= {"response": part, "upper_step": bisls.Polyak(max_step=0.1)}
    else:
        return bisls.BiSLS(problem(upper_bounds=part, lower_bounds=part), **settings)
    return bisls.BiSLS(problem(), **settings)


def run(made: bisls.Solver, noise: float, steps: range = range(6)) -> list:
    seen = []
    for k in steps:
        upper, lower = data(noise, k)
        torch.manual_seed(k)
        seen.append(made.step(upper, lower if noise else lower[0]))
        seen.append([made.problem.x.read().tolist(), made.problem.y.read().tolist()])
    return seen


def same(one: list, two: list) -> bool:
    """Bit for bit; a NaN (a residual that nobody knows) is a NaN."""
    return repr(one) == repr(two)


@pytest.mark.slow
@pytest.mark.parametrize("noise", NOISE)
@pytest.mark.parametrize(("base", "name", "part"), TABLE, ids=IDS)
def test_a_wrapper_and_a_look_alike_run_as_the_part_itself(base, name, part, noise):
    own = run(solver(base, part), noise)
    assert all(torch.isfinite(torch.tensor(point)).all() for points in own[1::2] for point in points)
    assert own[-1][0] != own[1][0] or base is Response  # x moves
    for around in (forwarding(base), LookAlike):
        assert same(run(solver(base, around(part)), noise), own), around


@pytest.mark.parametrize(("base", "name", "part"), TABLE, ids=IDS)
def test_wrappers_say_what_the_part_says(base, name, part):
    capabilities = [name for name, own in vars(base).items() if isinstance(own, property)]
    for around in (forwarding(base)(part), adopted(base, LookAlike(part))):
        assert isinstance(around, base)
        for capability in capabilities:
            assert getattr(around, capability) == getattr(part, capability)


@pytest.mark.slow
@pytest.mark.parametrize("noise", NOISE)
@pytest.mark.parametrize(("base", "name", "part"), TABLE, ids=IDS)
def test_a_saved_state_goes_on_bit_for_bit(base, name, part, noise):
    whole = run(solver(base, part), noise)
    first = solver(base, part)
    run(first, noise, range(3))
    file = io.BytesIO()
    torch.save(first.state_dict(), file)
    file.seek(0)
    second = solver(base, part)
    second.problem.x.write_(first.problem.x.read())
    second.problem.y.write_(first.problem.y.read())
    second.load_state_dict(torch.load(file, weights_only=True))
    assert same(run(second, noise, range(3, 6)), whole[6:])


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_an_envelope_without_bounds_changes_nothing(rule):
    """Wrappers forward what a rule can do: the default rests in every other iteration, and so does one in an envelope."""
    own = run(solver(StepRule, rule), 0.3, range(20))
    assert same(run(solver(StepRule, bisls.Envelope(rule)), 0.3, range(20)), own)


@pytest.mark.parametrize(("base", "name", "part"), TABLE, ids=IDS)
def test_parts_are_frozen_and_tell_themselves_by_what_was_set(base, name, part):
    assert identity(part) == identity(replace(part))
    assert identity(part) != identity(bisls.BiSLS)
    with pytest.raises(AttributeError):
        part.anything = 1.0


@pytest.mark.parametrize("base", [StepRule, object], ids=["inherits", "look-alike"])
def test_a_new_setting_with_a_default_does_not_make_another_part_of_an_old_one(base):
    @dataclass(frozen=True)
    class Rule(base):
        size: float = 0.1

        def choose(self, line, memory):
            return bisls.Step(self.size, memory.later(self.size))

    old = bisls.Alternating(problem(), upper_step=Rule(0.2), lower_step=Rule())
    old.step(*[data(0.0, 0)[0]] * 2)
    state = old.state_dict()

    @dataclass(frozen=True)
    class Longer(Rule):
        factor: float = 1.0

    Longer.__name__ = "Rule"
    new = bisls.Alternating(problem(), upper_step=Longer(0.2), lower_step=Longer())
    new.load_state_dict(state)
    assert new.k == 1
    for other in (
        bisls.Alternating(problem(), upper_step=Longer(0.2, factor=2.0), lower_step=Longer()),
        bisls.Alternating(problem(), upper_step=Longer(0.3), lower_step=Longer()),
        bisls.BiSLS(problem()),
    ):
        before = repr(other.state_dict())
        with pytest.raises(
            ValueError, match=r"load_state_dict\(...\)`: the state is of another method, .* Nothing was loaded"
        ):
            other.load_state_dict(state)
        assert repr(other.state_dict()) == before


# --- parts that do not fit each other, or are none


class Nothing:
    """A response that a user wrote with one method, and nothing else."""

    def ray(self, scene, state):
        return bisls.Frozen().ray(scene, state)


def test_a_response_with_one_method_of_its_own_runs():
    made = bisls.BiSLS(problem(), response=Nothing(), upper_step=bisls.Polyak(max_step=0.1))
    assert made.step(*[data(0.3, 0)[0]] * 2).alpha > 0
    assert made.step(*[data(0.3, 1)[0]] * 2).cost.upper_gradients == 1  # it does not say two_samples, so nobody judges


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"polish": "newton"}, r"`BiSLS\(polish='newton'\)`: polish must have a method solve"),
        ({"polish": bisls.CG}, r"polish must have a method solve"),
        ({"lower_direction": bisls.Armijo()}, r"lower_direction must have a method head\(...\), as Adam\(\) has"),
        ({"lower_step": bisls.Steepest()}, r"lower_step must have a method choose"),
        (
            {"response": bisls.Resampled()},
            r"`Resampled\(\)` gives `Armijo` nothing to search, because value and slope come from another direction",
        ),
        (
            {"lower_optimizer": "adam"},
            r"lower_optimizer=...\)`: must be a torch.optim.Optimizer over the lower parameters, got str",
        ),
    ],
)
def test_parts_that_do_not_fit_are_refused_when_they_are_put_together(settings, message):
    with pytest.raises(ValueError, match=message):
        bisls.BiSLS(problem(), **settings)


HALF = bisls.Constant(0.5)


@pytest.mark.parametrize(
    ("make", "settings", "names"),
    [
        (bisls.BiSLS, {"alpha": 1.0, "upper_step": HALF}, ("alpha", "upper_step")),
        (bisls.BiSLS, {"beta": 1.0, "lower_step": HALF}, ("beta", "lower_step")),
        (bisls.BiSLS.paper, {"alpha": 10.0, "upper_step": HALF}, ("alpha", "upper_step")),
        (bisls.BiSLS.paper, {"beta": 100.0, "lower_step": HALF}, ("beta", "lower_step")),
        (bisls.BiSLS.paper, {"lower_restart": bisls.Keep(), "lower_step": HALF}, ("lower_restart", "lower_step")),
        (bisls.BiSPS, {"beta": 1.0, "lower_step": HALF}, ("beta", "lower_step")),
        (bisls.BiSPS, {"lower_min": 0.0, "lower_step": HALF}, ("lower_min", "lower_step")),
    ],
)
def test_a_setting_that_nobody_would_look_at_is_refused(make, settings, names):
    one, other = names
    with pytest.raises(
        ValueError, match=rf"{one}=.*, {other}=Constant\(step=0.5\)\)`: {one} is a setting of the rule that"
    ):
        make(problem(), **settings)
    for name in names:
        make(problem(), **{name: settings[name]})


class Held:
    """A rule as somebody writes one in a few lines: no dataclass, no repr."""

    def __init__(self, size: float, rest=None):
        self.size, self.rest_of_it = size, rest

    def choose(self, line, memory):
        return bisls.Step(self.size, memory.later(self.size))


class Slotted(Held):
    __slots__ = ("_own",)

    def __init__(self, size: float):
        super().__init__(0.1)
        self._own = size


@pytest.mark.parametrize(
    "kind", [Held, Slotted, lambda size: bisls.Envelope(Held(size)), lambda size: Held(0.1, Held(size))]
)
def test_a_part_that_is_no_dataclass_tells_itself_by_what_it_holds(kind):
    made = bisls.Alternating(problem(), upper_step=kind(0.1))
    state = made.state_dict()
    bisls.Alternating(problem(), upper_step=kind(0.1)).load_state_dict(state)
    with pytest.raises(ValueError, match="the state is of another method"):
        bisls.Alternating(problem(), upper_step=kind(0.9)).load_state_dict(state)


def test_a_part_that_holds_itself_or_counts_still_tells_itself():
    def circle(size: float) -> Held:
        own = Held(size)
        own.rest_of_it = own
        return own

    assert identity(circle(0.1)) == identity(circle(0.1)) != identity(circle(0.2))
    counting = Held(0.1)
    made = bisls.Alternating(problem(), upper_step=counting)
    counting.calls = 7  # what a part keeps while it runs is no setting
    bisls.Alternating(problem(), upper_step=Held(0.1)).load_state_dict(made.state_dict())


@pytest.mark.parametrize(
    "rule", [bisls.Armijo(), bisls.Envelope(bisls.Armijo(), ceiling=1.0)], ids=["plain", "wrapped"]
)
def test_a_search_along_a_ray_on_which_nothing_changes_is_refused(rule):
    x = torch.tensor([0.5], dtype=torch.float64, requires_grad=True)
    y = torch.tensor([0.2], dtype=torch.float64, requires_grad=True)
    through_y = bisls.Bilevel(lambda _: (y - 1.0).pow(2).sum(), lambda _: (y - x).pow(2).sum(), [x], [y])
    made = bisls.BiSLS(through_y, response=bisls.Frozen(), upper_step=rule)
    with pytest.raises(
        ValueError, match=r"`Frozen\(\)` gives `(Armijo|Envelope)` nothing to search here, because y stays"
    ):
        made.step(None, None)
    assert (x.item(), y.item()) == (0.5, 0.2)
    directly = bisls.Bilevel(lambda _: (x - 3.0).pow(2).sum() + y.sum(), lambda _: (y - x).pow(2).sum(), [x], [y])
    assert bisls.BiSLS(directly, response=bisls.Frozen(), upper_step=rule).step(None, None).alpha > 0


# --- nothing depends on whether two batches are the same object


def copied(batch):
    return [one.clone() for one in batch] if isinstance(batch, list) else batch.clone()


@pytest.mark.slow
@pytest.mark.parametrize(
    "make",
    [bisls.BiSLS, lambda p: bisls.BiSPS(p, samples=2), lambda p: bisls.BiSLS(p, hypergrad=bisls.StochasticNeumann(4))],
    ids=["BiSLS", "BiSPS", "StochasticNeumann"],
)
@pytest.mark.parametrize("kind", ["one for all", "list of one", "list of the same", "list", "given judge"])
def test_copies_of_batches_give_the_same_run(make, kind):
    def batches(k: int, fresh: bool):
        noise = 0.3 if kind in ("list", "given judge") else 0.0
        upper, lower = data(noise, k)
        lower = {"one for all": lower[0], "list of one": lower[:1], "list of the same": [lower[0]] * 3}.get(kind, lower)
        judge = upper if kind == "given judge" else None
        return [copied(one) if fresh and one is not None else one for one in (upper, lower, judge)]

    runs = []
    for fresh in (False, True):
        made, seen = make(problem()), []
        for k in range(5):
            torch.manual_seed(k)
            seen.append((made.step(*batches(k, fresh)), made.problem.x.read().tolist()))
        runs.append(seen)
    assert same(*runs)


def test_a_list_decides_how_many_lower_steps_are_taken_unless_that_was_said():
    upper, lower = data(0.3, 0)
    made = bisls.Alternating(problem(), lower_step=bisls.Constant(0.01))
    assert [made.step(upper, lower[:n]).lower_steps for n in (1, 3, 2)] == [1, 3, 2]
    assert made.step(upper, lower[0]).lower_steps == 10
    made = bisls.Alternating(problem(), lower_step=bisls.Constant(0.01), lower_iters=3)
    assert made.step(upper, lower).lower_steps == 3
    with pytest.raises(ValueError, match=r"one batch for each of the lower_iters = 3 lower steps, got 2"):
        made.step(upper, lower[:2])
    with pytest.raises(ValueError, match=r"got 0"):
        bisls.Alternating(problem()).step(upper, [])


# --- what goes wrong without an error


def test_what_the_default_handles_is_no_failure_and_what_it_cannot_is():
    """A dead lower model, a lower loss that rises, an upper loss that rises for long: each is noticed and said."""
    x = torch.ones(1, dtype=torch.float64, requires_grad=True)
    y = torch.tensor([-1.0], dtype=torch.float64, requires_grad=True)  # the unit is off

    def model() -> Tensor:
        return torch.relu(y * 2.0)

    dead = bisls.Bilevel(
        lambda _: (y - 2.0).pow(2).sum(),
        lambda _: (model() - x).pow(2).sum() + 0.5 * (y + 1.0).pow(2).sum(),
        [x],
        [y],
    )
    record = bisls.BiSLS(dead).step(None, None)
    assert record.hypergrad_norm == 0.0
    assert record.upper_status is bisls.Status.NO_INFLUENCE
    assert record.status.failed
    assert "x does not reach y" in record.advice

    x = torch.tensor([0.5], requires_grad=True)
    y = torch.tensor([2.0, -1.0], requires_grad=True)
    solved = bisls.Bilevel(lambda _: ((y - 3.0) ** 2).sum(), lambda _: ((y - x) ** 2).sum(), [x], [y])
    made = bisls.BiSLS(solved)
    records = [made.step(None, None) for _ in range(40)]
    assert any(record.hypergrad_norm == 0.0 for record in records)  # terms that cancel at the solution are no failure
    assert not any(record.status.failed for record in records)

    far = bisls.Alternating(problem(), lower_step=bisls.Constant(0.08), upper_step=bisls.Constant(1e-4))
    record = far.step(*[data(0.0, 0)[0]] * 2)  # 2 / 30 is the longest step that does not raise g
    assert record.lower_status is bisls.Status.LOWER_ROSE
    assert record.status.failed

    upward = bisls.Alternating(problem(), upper_step=bisls.Constant(1e-3), lower_step=bisls.Constant(0.01))
    upward.upper = replace(upward.upper, direction=Backwards())
    statuses = [upward.step(*[data(0.0, 0)[0]] * 2).upper_status for _ in range(120)]
    assert bisls.Status.UPPER_ROSE in statuses
    assert bisls.Status.UPPER_ROSE not in statuses[:40]


class Backwards(Direction):
    """Ascends."""

    def head(self, gradient, point, state):
        return bisls.Heading(-gradient, -gradient)


def test_healthy_runs_raise_nothing():
    for noise in (0.0, 0.3):
        made = bisls.BiSLS(problem(), lower_iters=3)
        for k in range(60):
            upper, lower = data(noise, k)
            record = made.step(upper, lower if noise else lower[0])
            assert not record.status.failed, record
            assert record.residual < inf
