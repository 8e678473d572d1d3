"""The public surface under inputs that nobody would choose: shapes, precisions, scales, and losses that break half-way.

What holds whatever comes in: parameters stay finite, a call ends within a bounded number of evaluations, an exception is one
of ours and quotes the call, records hold usable numbers, and the same seed gives the same result.

The examples are always the same ones. ``BISLS_FUZZ=50 pytest tests/test_fuzz.py`` draws fifty times as many, at random.
"""

# ruff: noqa: PT017 - what is raised is part of what is asserted

from __future__ import annotations

import json
import math
import os
from dataclasses import dataclass, field
from math import inf, isfinite, nan

import pytest
import torch
from attacks.problems import LOSSES, METHODS, loss_of
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from torch import Tensor

import bisls
from bisls import Status, optim

pytestmark = pytest.mark.slow

MORE = int(os.environ.get("BISLS_FUZZ", "1"))


def fuzz(examples: int):
    return settings(
        max_examples=examples * MORE,
        derandomize=MORE == 1,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )


SHAPES = [(), (1,), (3,), (0,), (2, 2), (1, 0), (2, 1, 2), (1, 3)]
DTYPES = [torch.float64, torch.float32, torch.bfloat16]
MIXED = [*DTYPES, torch.float16]
SCALES = [1.0, 1e-30, 1e-12, 1e-6, 1e6, 1e12, 1e30]
POINTS = [0.5, 0.0, 1.0, 1e-4, 1e-30, 1e4, 1e30]
BAD = [nan, inf, -inf, 1e30, -1e30, 0.0]


@dataclass
class Fault:
    """From a certain call on, for so many calls, a loss is multiplied by something, or replaced by it."""

    start: int = 10**9
    calls: int = 0
    length: int = 0
    by: float = nan

    def __call__(self, loss: Tensor) -> Tensor:
        self.calls += 1
        return loss * self.by if self.start <= self.calls < self.start + self.length else loss


@dataclass
class Recipe:
    """All that a fuzzed problem is made from; printed by hypothesis where something fails."""

    upper: str
    lower: str
    upper_scale: float
    lower_scale: float
    shapes: tuple
    dtypes: tuple
    point: float
    odd_strides: bool
    precision: torch.dtype
    faults: tuple = ((10**9, 0, nan), (10**9, 0, nan))
    boxes: tuple = (None, None)
    direct: float = 1.0
    seed: int = 0
    made: list = field(default_factory=list, compare=False, repr=False)

    def tensors(self, level: int) -> list[Tensor]:
        rng = torch.Generator().manual_seed(self.seed + level)
        made = []
        for shape, dtype in zip(self.shapes[level], self.dtypes[level], strict=True):
            tensor = (torch.rand(shape, generator=rng, dtype=torch.float64) * self.point).to(dtype)
            if self.odd_strides and len(shape) == 2:
                tensor = tensor.t().contiguous().t()
            made.append(tensor.requires_grad_())
        return made

    def problem(self) -> bisls.Bilevel:
        x, y = self.tensors(0), self.tensors(1)
        faults = [Fault(start=start, length=length, by=by) for start, length, by in self.faults]
        self.made = faults

        def flat(tensors):
            return torch.cat([tensor.reshape(-1).to(self.precision) for tensor in tensors])

        def upper(_):
            xs, ys = flat(x), flat(y)
            return faults[0](self.upper_scale * (loss_of(self.upper, ys) + self.direct * (xs * xs).sum()))

        def lower(_):
            xs, ys = flat(x), flat(y)
            return faults[1](self.lower_scale * loss_of(self.lower, ys - 0.1 * xs.sum()))

        bounds = [None if box is None else bisls.Box(*box) for box in self.boxes]
        return bisls.Bilevel(upper, lower, x, y, upper_bounds=bounds[0], lower_bounds=bounds[1])

    @property
    def calls(self) -> int:
        return sum(fault.calls for fault in self.made)


def levels(draw, choices, least=1):
    return tuple(draw(st.lists(st.sampled_from(choices), min_size=least, max_size=4)) for _ in range(2))


@st.composite
def recipes(draw, losses=LOSSES, scales=SCALES, faults=True, boxes=True, mixed=False, points=POINTS):
    shapes = tuple([*own, draw(st.sampled_from([(), (1,), (3,), (2, 2)]))] for own in levels(draw, SHAPES, 0))
    if mixed:
        dtypes = tuple([draw(st.sampled_from(MIXED)) for _ in own] for own in shapes)
    else:
        dtypes = tuple([draw(st.sampled_from(DTYPES))] * len(own) for own in shapes)
    upper, lower = draw(st.sampled_from(losses)), draw(st.sampled_from(losses))
    lower_scale = draw(st.sampled_from(scales))
    if dtypes[1][0] is not torch.float64:  # see test_a_linear_solve_survives_almost_no_curvature_in_single_precision
        lower, lower_scale = "quadratic" if lower == "root" else lower, max(lower_scale, 1e-12)
    fault = st.tuples(st.integers(1, 60), st.sampled_from([1, 5, 10**9]), st.sampled_from(BAD))
    none = st.just((10**9, 0, nan))
    return Recipe(
        upper=upper,
        lower=lower,
        upper_scale=draw(st.sampled_from(scales)),
        lower_scale=lower_scale,
        shapes=shapes,
        dtypes=dtypes,
        point=draw(st.sampled_from(points)),
        odd_strides=draw(st.booleans()),
        precision=draw(st.sampled_from([torch.float64, torch.float32])),
        faults=tuple(draw(st.one_of(none, fault) if faults else none) for _ in range(2)),
        boxes=tuple(draw(st.sampled_from([None, None, (-1.0, 1.0), (0.0, inf)]) if boxes else st.none()) for _ in "xy"),
        direct=draw(st.sampled_from([1.0, 0.0])),
        seed=draw(st.integers(0, 5)),
    )


def ours(error: Exception) -> bool:
    """Whether an error is one that a user can read: of the right kind, quoting the call."""
    return isinstance(error, ValueError | bisls.SolverError | FloatingPointError) and "`" in str(error)


def check_record(record: bisls.Record) -> None:
    for name in ("alpha", "beta"):
        value = getattr(record, name)
        assert isfinite(value), (name, value)
        assert value >= 0, (name, value)
    for name in ("upper_checks", "lower_checks", "lower_steps"):
        assert getattr(record, name) >= 0, name
    assert all(count >= 0 for count in vars(record.cost).values())
    for status in (record.status, record.upper_status, record.lower_status, record.linear_status):
        assert len(status.advice) > 10
    assert bool(record.advice) == any(
        status.failed for status in (record.upper_status, record.lower_status, record.linear_status)
    )
    again = bisls.Record.from_dict(record.to_dict())
    assert repr(again) == repr(record)


def finite(problem: bisls.Bilevel) -> bool:
    return all(bool(torch.isfinite(tensor).all()) for tensor in (*problem.x.tensors, *problem.y.tensors))


MOST = 1500  # evaluations of losses an iteration: two searches of 100 a lower step would still be below it


def run(recipe: Recipe, name: str, steps: int = 5) -> tuple:
    """A few iterations; what holds after each of them, and what came of it."""
    torch.manual_seed(recipe.seed)
    try:
        problem = recipe.problem()
    except ValueError as error:  # a start outside its box
        assert "outside their bounds" in str(error)
        return ()
    if not finite(problem):  # a start that the precision cannot hold
        return ()
    solver = METHODS[name](problem)
    batches = [torch.tensor([float(k)]) for k in range(steps + 1)]
    records = []
    for k in range(steps):
        before = recipe.calls
        try:
            record = solver.step(batches[k], [batches[k], batches[k], batches[k + 1]])
        except Exception as error:
            assert ours(error), repr(error)
            record = None
        assert finite(problem), (k, record)
        assert recipe.calls - before <= MOST, recipe.calls - before
        if record is not None:
            check_record(record)
            records.append(repr(record))
    return records, problem.x.read().tolist(), problem.y.read().tolist()


@pytest.mark.parametrize("name", METHODS)
def test_a_method_survives_any_problem(name):
    @fuzz(10)
    @given(recipes())
    def survives(recipe):
        assert repr(run(recipe, name)) == repr(run(recipe, name))

    survives()


# --- hypergradients

HYPERGRADIENTS = {
    "CG": bisls.Implicit(bisls.CG(iters=10, tol=1e-6)),
    "CG warm": bisls.Implicit(bisls.CG(iters=3, warm=True), spread=1.0),
    "Neumann": bisls.Implicit(bisls.Neumann(8)),
    "Neumann given": bisls.Implicit(bisls.Neumann(8, scale=0.1)),
    "Identity": bisls.Implicit(bisls.Identity(0.5)),
    "Dense": bisls.Implicit(bisls.Dense()),
    "StochasticNeumann": bisls.StochasticNeumann(6),
    "StochasticNeumann given": bisls.StochasticNeumann(6, smoothness=2.0),
    "Unrolled": bisls.Unrolled(4),
    "Unrolled given": bisls.Unrolled(4, step=0.1),
}


def placed(recipe: Recipe) -> bisls.Bilevel | None:
    """The problem of a recipe, or None where its start is outside its box or beyond its precision."""
    torch.manual_seed(recipe.seed)
    try:
        problem = recipe.problem()
    except ValueError as error:
        assert "outside their bounds" in str(error)
        return None
    return problem if finite(problem) else None


@fuzz(60)
@given(recipes(), st.sampled_from(sorted(HYPERGRADIENTS)))
def test_a_hypergradient_is_finite_or_refused(recipe, name):
    problem = placed(recipe)
    if problem is None:
        return
    tensors = (*problem.x.tensors, *problem.y.tensors)
    before = [tensor.detach().clone() for tensor in tensors]
    try:
        found = bisls.hypergradient(problem, None, None, HYPERGRADIENTS[name])
    except Exception as error:
        assert ours(error), repr(error)
    else:
        assert isfinite(found.value)
        assert bool(torch.isfinite(found.flat).all())
        assert [part.shape for part in found.grads] == [tensor.shape for tensor in problem.x.tensors]
        assert len(found.status.advice) > 10
    assert recipe.calls < 200
    assert all(torch.equal(tensor, own) for tensor, own in zip(tensors, before, strict=True))
    assert all(tensor.grad is None and tensor.requires_grad for tensor in tensors)


@fuzz(12)
@given(recipes(faults=False), st.sampled_from(sorted(HYPERGRADIENTS)))
def test_a_check_reports_or_refuses(recipe, name):
    problem = placed(recipe)
    if problem is None:
        return
    tensors = (*problem.x.tensors, *problem.y.tensors)
    before = [tensor.detach().clone() for tensor in tensors]
    try:
        report = bisls.check_hypergradient(problem, None, None, HYPERGRADIENTS[name], lower_iters=20)
    except Exception as error:
        assert ours(error), repr(error)
    else:
        assert "hypergradient check" in str(report)
        assert report.relative_error >= 0
    assert all(torch.equal(tensor, own) for tensor, own in zip(tensors, before, strict=True))


# --- step rules on any line

anything = st.one_of(
    st.floats(allow_nan=True, allow_infinity=True),
    st.sampled_from([0.0, -0.0, 5e-324, 1e-300, 1e-30, 1.0, 1e30, 1e300, 1.7e308, nan, inf, -inf]),
)
positive = st.one_of(st.floats(5e-324, 1.7e308), st.sampled_from([5e-324, 1e-308, 1e-30, 1e-3, 1.0, 1e3, 1e30, 1e308]))
within = st.one_of(st.floats(1e-12, 1 - 1e-12), st.sampled_from([1e-300, 5e-324, 0.5, 1 - 2**-53]))
shrinking = st.floats(0.01, 0.97)  # what is left of a search of 0.999 a check takes too long to wait for


@st.composite
def rules(draw, depth=0):
    schedule = st.builds(bisls.Decay, positive, st.sampled_from([0.0, 0.5, 1.0, 300.0, 1e9]))
    bound = st.one_of(st.none(), positive, schedule, st.builds(bisls.Constant, positive))
    kinds = ["Constant", "Decay", "Polyak", "DecreasingPolyak", "Armijo", "Curvature", *(["Envelope"] * (depth == 0))]
    match draw(st.sampled_from(kinds)):
        case "Constant":
            return bisls.Constant(draw(positive))
        case "Decay":
            return draw(schedule)
        case "Polyak":
            return bisls.Polyak(draw(positive), draw(st.floats(-1e300, 1e300)), draw(bound))
        case "DecreasingPolyak":
            return bisls.DecreasingPolyak(draw(positive), draw(st.floats(-1e300, 1e300)), draw(positive))
        case "Curvature":
            return bisls.Curvature(
                draw(st.one_of(st.none(), positive)),
                draw(st.integers(1, 5)),
                draw(st.integers(1, 5)),
                draw(st.floats(0, 1)),
                draw(st.booleans()),
            )
        case "Envelope":
            return bisls.Envelope(draw(rules(depth=1)), draw(bound), draw(bound))
    shrink = draw(
        st.one_of(
            shrinking, st.builds(bisls.Backtrack, shrinking), st.builds(bisls.Interpolate, st.just(1e-9), shrinking)
        )
    )
    start = draw(st.one_of(st.none(), positive))
    return bisls.Armijo(
        start=start,
        sufficient=draw(within),
        shrink=shrink,
        restart=draw(st.sampled_from([bisls.Restart(), bisls.Keep(), bisls.Grow(1.0), bisls.Grow(1e300)])),
        slack=draw(st.sampled_from([0.0, 1e-300, 1.0, 1e300])),
        max_step=draw(bound),
        max_checks=draw(st.one_of(st.none(), st.integers(1, 9))),
        f_min=draw(st.sampled_from([0.0, -1e300, 1e300] if start is None else [0.0, None, 1e300])),
        expand=draw(st.booleans()),
        uphill=draw(st.sampled_from([0.0, 1.0, 1e300])),
    )


VALUES = st.one_of(
    st.sampled_from(
        [
            lambda t: nan,
            lambda t: inf,
            lambda t: -inf,
            lambda t: 2.0,
            lambda t: 2.0 - t,
            lambda t: -t * 1e300,
            lambda t: t * 1e300,
            lambda t: (t - 1.0) ** 2 if t < 1e100 else inf,
            lambda t: math.sin(1.0 / t) if t > 1e-300 else 0.0,
            lambda t: nan if t > 1e-3 else -t,
        ]
    ),
    st.lists(anything, min_size=1, max_size=6).map(lambda own: lambda t: own[hash(t) % len(own)]),
)


@fuzz(400)
@example(bisls.Armijo(shrink=0.5), 2.9e-287, -1.2e37, lambda t: 2.0, 1.0, None, None, 0)
@example(bisls.DecreasingPolyak(c=1e308, max_step=2.0), 9e307, -0.5, float, 1.0, None, None, 2)
@example(bisls.Curvature(None, 1, 1, 0.0, True), 0.0, -1.0, lambda t: nan, 1.0, None, 6e-265, 0)
@example(bisls.Decay(1.0, 1e9), 1.0, -1.0, float, 1.0, None, None, 7)
@example(bisls.Armijo(sufficient=1e-30), 1.0, -1e-299, float, 1.0, None, None, 0)
@given(
    rules(),
    anything,
    anything,
    VALUES,
    positive,
    st.one_of(st.none(), st.integers(0, 10**9)),
    st.one_of(st.none(), positive),
    st.integers(0, 10**9),
)
def test_a_step_rule_answers_any_line(rule, value, slope, at, longest, clock, remembered, k):
    tried = []

    def counted(t):
        tried.append(t)
        return at(t)

    memory = bisls.Memory(k=k, step=remembered, notes={} if remembered is None else {"count": 1.0})
    for _ in range(3):
        tried.clear()
        step = rule.choose(bisls.Line(value, slope, counted, longest, clock=clock), memory)
        assert isfinite(step.size)
        assert 0 <= step.size <= longest
        assert step.checks == len(tried) <= 1100
        assert all(isfinite(t) and t >= 0 for t in tried)
        assert step.value is None or isfinite(step.value)
        assert len(step.status.advice) > 10
        memory = step.memory
        assert memory.k >= k
        assert memory.step is None or (isfinite(memory.step) and memory.step >= 0)
        assert all(isinstance(own, float) for own in memory.notes.values())
        if not (isfinite(value) and isfinite(slope)):
            assert (step.size, step.status) == (0.0, Status.NON_FINITE)


# --- optimisers

OPTIMISERS = {
    "Auto": (optim.Auto, {}),
    "SPSMax": (optim.SPSMax, {}),
    "SPSMax huge": (optim.SPSMax, {"lr": 1e30, "averaging": 2.0}),
    "DecSPS": (optim.DecSPS, {"lr": 1e30, "c": 1e-3}),
    "SPSB": (optim.SPSB, {"averaging": True}),
    "SLS": (optim.SLS, {}),
    "SLS paper": (optim.SLS, {"shrink": 0.1, "grow": None, "f_min": None, "lr": 1e30}),
    "SLSB": (optim.SLSB, {"lr": 1e-30, "averaging": 1.0}),
    "maximize": (optim.SPSB, {"maximize": True, "f_min": -1e30, "foreach": False}),
}


def train(recipe: Recipe, name: str, kind: str, steps: int = 6):
    cls, options = OPTIMISERS[name]
    params = recipe.tensors(1)
    if not all(bool(torch.isfinite(p).all()) for p in params):
        return None
    groups = [{"params": params[:1]}, {"params": params[1:], "lr": options.get("lr", 1.0) * 0.5}]
    made = cls(groups if kind == "groups" and len(params) > 1 else params, **options)
    fault = Fault(*(recipe.faults[1][0], 0, *recipe.faults[1][1:]))
    calls = []

    def closure():
        calls.append(1)
        flat = torch.cat([p.reshape(-1).to(recipe.precision) for p in params])
        loss = fault(recipe.lower_scale * loss_of(recipe.lower, flat))
        if kind == "backward":
            made.zero_grad()
            loss.backward()
        return loss

    sizes = []
    for k in range(steps):
        calls.clear()
        try:
            made.step(closure, closure if kind == "two" and k % 2 else None)
        except Exception as error:
            assert ours(error), repr(error)
        assert len(calls) <= 250
        assert all(bool(torch.isfinite(p).all()) for p in params), (k, made.last_status)
        assert isfinite(made.last_step_size)
        assert made.last_step_size >= 0
        assert len(made.last_status.advice) > 10
        sizes.append((made.last_step_size, made.last_checks, made.last_status))
    made.eval()
    assert all(bool(torch.isfinite(p).all()) for p in params)
    made.train()
    return [p.tolist() for p in params], sizes


@pytest.mark.parametrize("name", OPTIMISERS)
def test_an_optimiser_survives_any_loss(name):
    @fuzz(25)
    @given(recipes(boxes=False, mixed=True), st.sampled_from(["plain", "backward", "groups", "two"]))
    def survives(recipe, kind):
        assert repr(train(recipe, name, kind)) == repr(train(recipe, name, kind))

    survives()


# --- precisions, scales, descent


@fuzz(15)
@given(recipes(["quadratic", "double well", "flat"], [1.0], faults=False, mixed=True, points=[0.5, 1.0]))
def test_mixed_precisions_strides_and_empty_tensors_are_moved_like_any_other(recipe):
    problem = placed(recipe)
    solver = bisls.BiSLS(problem, lower_iters=3)
    before = [(tensor.dtype, tensor.shape, tensor.stride()) for tensor in (*problem.x.tensors, *problem.y.tensors)]
    for _ in range(4):
        check_record(solver.step(None, None))
    assert finite(problem)
    after = [(tensor.dtype, tensor.shape, tensor.stride()) for tensor in (*problem.x.tensors, *problem.y.tensors)]
    assert before == after
    assert all(tensor.requires_grad and tensor.is_leaf for tensor in (*problem.x.tensors, *problem.y.tensors))


def test_half_precision_parameters_never_hold_infinity():
    x, y = (torch.full((2,), 0.5, dtype=torch.float16, requires_grad=True) for _ in range(2))
    problem = bisls.Bilevel(
        lambda _: ((y.double() - 0.7) ** 2).sum() + (x.double() ** 2).sum(),
        lambda _: ((y.double() - 0.1 * x.double()) ** 2).sum(),
        [x],
        [y],
    )
    bisls.Alternating(problem, upper_step=bisls.Constant(1e20)).step(None, None)
    assert finite(problem)


def test_a_linear_solve_survives_almost_no_curvature_in_single_precision():
    solution = bisls.CG(iters=5).solve(lambda v: 1e-40 * v, torch.ones(3), {})
    assert bool(torch.isfinite(solution.z).all())
    assert solution.status.failed


def scaled_quadratic(upper: float, lower: float, dtype=torch.float64, seed: int = 3):
    """The task of that name with both losses in other units."""
    task = bisls.tasks.quadratic(seed=seed, dtype=dtype)
    own = task.problem
    problem = bisls.Bilevel(
        lambda batch: upper * own.upper_loss(batch),
        lambda batch: lower * own.lower_loss(batch),
        own.x.tensors,
        own.y.tensors,
    )
    return task, problem


@pytest.mark.parametrize("level", ["upper", "lower"])
@pytest.mark.parametrize("power", [-98, -40, 40, 98])
def test_the_units_of_a_loss_do_not_matter_to_the_default(level, power):
    """Even powers of two change no digit, nor do their roots: the path is the same. Adam's eps has units of the upper loss."""
    found = []
    for factor in (1.0, 2.0**power):
        task, problem = scaled_quadratic(*((factor, 1.0) if level == "upper" else (1.0, factor)))
        solver, path = bisls.BiSLS(problem), []
        for _ in range(30):
            solver.step(task.upper_data, task.lower_data)
            path.append(problem.x.read())
        found.append((torch.stack(path), task.metrics()["gap"]))
    (here, gap), (there, other) = found
    assert max(gap, other) < 1e-4
    if level == "lower":
        assert torch.equal(here, there)
    elif power > 0:  # beyond the third step the rounding of a search on a parabola may decide
        assert torch.allclose(here[:3], there[:3], rtol=1e-6)


@pytest.mark.parametrize("power", [-30, -12, 0, 12, 30])
def test_single_precision_serves_over_its_whole_range(power):
    task, problem = scaled_quadratic(10.0**power, 1.0, torch.float32)
    exact, _ = scaled_quadratic(1.0, 1.0, torch.float32)
    truth = bisls.hypergradient(exact.problem, exact.upper_data, exact.lower_data, HYPERGRADIENTS["Dense"]).flat
    found = bisls.hypergradient(problem, task.upper_data, task.lower_data, HYPERGRADIENTS["CG"]).flat
    assert torch.allclose(found * 10.0**-power, truth, rtol=1e-2)
    solver = bisls.BiSLS(problem)
    for _ in range(30):
        solver.step(task.upper_data, task.lower_data)
    assert task.metrics()["gap"] < 1e-2


@fuzz(10)
@given(
    st.integers(1, 6),
    st.integers(1, 8),
    st.sampled_from([1.0, 10.0, 1e3]),
    st.integers(0, 10**6),
    st.sampled_from(SCALES),
)
def test_without_noise_the_default_never_rises_above_its_start(n_upper, n_lower, condition, seed, scale):
    """From y*(x); a lower problem that ten steps leave unsolved may mislead the first upper step."""
    task = bisls.tasks.quadratic(n_upper, n_lower, condition, seed)
    own = task.problem
    graph = bisls.Oracle(own).lower_graph(task.lower_data)
    own.y.write_(own.y.read() - bisls.Dense().solve(graph.hessian, graph.grad, {}).z)
    problem = bisls.Bilevel(lambda b: scale * own.upper_loss(b), own.lower_loss, own.x.tensors, own.y.tensors)
    solver, start = bisls.BiSLS(problem), task.exact()
    values = []
    for _ in range(12):
        check_record(solver.step(task.upper_data, task.lower_data))
        values.append(task.exact())
    assert max(values) <= start * (1 + 1e-9)
    assert values[-1] < start or task.metrics()["gap"] < 1e-9


# --- arguments: boxes, parameters, tasks, data, callbacks


def answered(call):
    """What a call returns; None where it was refused in a way that a user can read."""
    try:
        return call()
    except Exception as error:
        assert isinstance(error, ValueError), repr(error)
        assert "`" in str(error), repr(error)
        return None


sides = st.one_of(
    anything,
    st.sampled_from([None, "low", True, [], (), [1.0], torch.tensor(0.5), [torch.tensor(["x" == "y"])]]),
    st.lists(
        st.builds(
            lambda shape, value, dtype: torch.full(shape, value).to(dtype),
            st.sampled_from(SHAPES),
            st.floats(width=32),
            st.sampled_from([torch.float64, torch.float32, torch.int64, torch.complex64]),
        ),
        max_size=2,
    ),
)


@fuzz(150)
@given(sides, sides, st.sampled_from(SHAPES), st.sampled_from(SHAPES))
@example(-1.0, [torch.tensor(2.0), torch.ones(3)], (), (3,))
def test_a_box_is_usable_or_refused(low, high, first, second):
    box = answered(lambda: bisls.Box(low, high))
    if box is None:
        return
    x = [torch.full(shape, 0.5, requires_grad=True) for shape in (first, second)]
    y = torch.zeros(2, requires_grad=True)
    problem = answered(
        lambda: bisls.Bilevel(
            lambda _: ((y - 2.0) ** 2).sum(),
            lambda _: ((y - sum(t.sum() for t in x)) ** 2).sum(),
            x,
            [y],
            upper_bounds=box,
        )
    )
    if problem is None:
        return
    solver = bisls.BiSLS(problem, lower_iters=2)
    for _ in range(2):
        check_record(solver.step(None, None))
        flat = problem.x.read()
        assert finite(problem)
        assert torch.equal(box.project(flat, problem.x), flat)


BASE = torch.zeros(6)
ODD = [
    lambda: torch.zeros(2, requires_grad=True),
    lambda: torch.zeros((), dtype=torch.float64, requires_grad=True),
    lambda: torch.zeros(0, requires_grad=True),
    lambda: torch.zeros(2),
    lambda: torch.zeros(2, dtype=torch.int64),
    lambda: torch.zeros(2, dtype=torch.complex64, requires_grad=True),
    lambda: torch.zeros(1).expand(3).detach().requires_grad_(),
    lambda: torch.zeros(2, requires_grad=True) * 2,
    lambda: torch.zeros(2, 2).to_sparse().requires_grad_(),
    lambda: torch.zeros(2, requires_grad=True, device="meta"),
    lambda: BASE[:4].detach().requires_grad_(),
    lambda: BASE[3:].detach().requires_grad_(),
    lambda: BASE[4:].detach().requires_grad_(),
    lambda: torch.nn.Parameter(torch.ones(2, 3)).t().detach().requires_grad_(),
    lambda: None,
    lambda: 3.0,
    lambda: "weights",
    lambda: [torch.zeros(2, requires_grad=True)],
    lambda: torch.nn.Linear(2, 2),
]


@fuzz(150)
@given(st.lists(st.sampled_from(ODD), max_size=3), st.lists(st.sampled_from(ODD), max_size=3), st.booleans())
def test_parameters_are_usable_or_refused(upper, lower, shared):
    BASE.zero_()
    x, y = [make() for make in upper], [make() for make in lower]
    if shared and x:
        y = [*y, x[0]]

    def total(tensors):
        return sum((t.double() ** 2).sum() for t in tensors)

    problem = answered(
        lambda: bisls.Bilevel(lambda _: (total(y) - 1) ** 2 + total(x), lambda _: total(y) + total(x) * total(y), x, y)
    )
    if problem is not None and problem.y.device.type == "cpu":
        check_record(bisls.BiSLS(problem, lower_iters=2).step(None, None))
        assert finite(problem)
    for make in (optim.Auto, optim.SPSB):
        try:
            made = make(y)
        except (ValueError, TypeError) as error:  # some are torch's own words
            assert str(error)
        else:
            assert made.param_groups


@st.composite
def tables(draw):
    """Features and labels of which one thing or another is odd."""
    n, d = draw(st.sampled_from([0, 1, 2, 7, 12])), draw(st.sampled_from([0, 1, 3]))
    rng = torch.Generator().manual_seed(draw(st.integers(0, 3)))
    features = torch.randn(n, d, generator=rng, dtype=torch.float64)
    labels = torch.randint(0, 2, (n,), generator=rng)
    odd = draw(
        st.sampled_from(["none", "nan", "constant", "huge", "tiny", "flat", "deep", "text", "complex", "ragged"])
    )
    match odd:
        case "nan" if features.numel():
            features[0, 0] = nan
        case "constant":
            features[:] = 3.0
        case "huge":
            features *= 1e30
        case "tiny":
            features *= 1e-30
        case "flat":
            features = features.reshape(-1)
        case "deep":
            features = features[None]
        case "text":
            features = [["a"]]
        case "complex":
            features = features.to(torch.complex128)
        case "ragged":
            features = [[1.0, 2.0], [3.0]]
    odd = draw(st.sampled_from(["none", "none", "one kind", "negative", "many", "float", "short", "wide", "bytes"]))
    match odd:
        case "one kind":
            labels = torch.zeros(n, dtype=torch.int64)
        case "negative":
            labels = labels - 1
        case "many":
            labels = labels * 10**12
        case "float":
            labels = labels.double() + 0.5
        case "short":
            labels = labels[1:]
        case "wide":
            labels = labels[:, None]
        case "bytes":
            labels = labels.to(torch.uint8).numpy()
    return features, labels


@fuzz(100)
@given(
    tables(),
    tables(),
    st.sampled_from(["ridge", "logistic", "cleaning", "distillation"]),
    st.sampled_from([None, 1, 4]),
)
def test_a_task_is_made_or_refused(one, two, kind, batch):
    def make():
        match kind:
            case "ridge":
                return bisls.tasks.ridge_penalties(train=one, validation=two, batch_size=batch)
            case "logistic":
                return bisls.tasks.logistic_penalties(train=one, validation=two, lower_batch_size=batch)
            case "cleaning":
                return bisls.tasks.cleaning(*one, train=1, validation=1, batch_size=None)
        return bisls.tasks.distillation(*one, test_size=0, batch_size=batch)

    task = answered(make)
    if task is None:
        return
    history = bisls.fit(
        bisls.BiSLS(task.problem, lower_iters=2), task.upper_data, task.lower_data, 2, False, on_failure="ignore"
    )
    for record in history:
        check_record(record)
    assert finite(task.problem)


@fuzz(12)
@given(recipes(), st.sampled_from(["warn", "raise", "ignore"]), st.sampled_from(["tensor", "none", "empty", "stream"]))
def test_a_run_ends_and_its_records_can_be_kept(recipe, on_failure, kind):
    problem = placed(recipe)
    if problem is None:
        return
    data = {
        "tensor": torch.ones(2),
        "none": None,
        "empty": torch.zeros(0, 3),
        "stream": (torch.tensor([float(i)]) for i in range(11)),
    }[kind]
    seen = []
    callbacks = [bisls.Evaluate(lambda: {"nan": nan, "k": len(seen)}, every=2), lambda record, _: seen.append(record)]
    try:
        history = bisls.fit(bisls.BiSLS(problem, lower_iters=3), data, None, 4, False, callbacks, on_failure=on_failure)
    except bisls.FitError as error:
        assert on_failure == "raise"
        history = error.history
        assert error.level
        assert error.advice
    assert len(seen) == len(history)
    assert finite(problem)
    for record, line in zip(history, history.to_lines(), strict=True):
        check_record(record)
        json.loads(line, parse_constant=pytest.fail)  # no NaN and no Infinity, which are no JSON


@pytest.mark.parametrize("name", ["Auto", "SPSMax huge", "DecSPS", "SLS paper"])
@pytest.mark.parametrize("dtype", MIXED)
def test_a_step_that_leaves_the_range_of_a_precision_is_not_taken(name, dtype):
    """On a plateau the Polyak step is enormous; as a factor it may be more than the precision holds."""
    cls, options = OPTIMISERS[name]
    p = torch.full((3,), 1e-4 if dtype is torch.float16 else 1e-25, dtype=dtype, requires_grad=True)
    made = cls([p], **options)
    for _ in range(4):
        made.step(lambda: (1e4 * p.double()).cos().sum() + 3.1)
        assert bool(torch.isfinite(p).all())
        assert isfinite(made.last_step_size)


@pytest.mark.parametrize("power", [-100, -60, 60, 100])
@pytest.mark.parametrize("name", ["SPSMax huge", "DecSPS", "SLS", "Auto"])
def test_the_units_of_a_loss_do_not_matter_to_an_optimiser_in_single_precision(name, power):
    """Up to 2^100 = 1e30 the squares of the gradients leave single precision, the gradients do not."""
    found = []
    for factor in (1.0, 2.0**power):
        p = torch.tensor([3.0, -1.0, 0.5], requires_grad=True)
        cls, _ = OPTIMISERS[name]
        made = cls([p], **({"lr": 2.0**104} if name != "Auto" else {"lr": 1.0 / factor}))
        for _ in range(12):
            made.step(lambda p=p, factor=factor: factor * (torch.tensor([1.0, 4.0, 9.0]) * (p - 0.7) ** 2).sum())
        found.append(p.detach().clone())
    assert torch.allclose(*found, rtol=1e-4)
    assert (found[0] - 0.7).norm() < 0.9 * (torch.tensor([3.0, -1.0, 0.5]) - 0.7).norm()


@fuzz(4)
@given(recipes(scales=[1.0, 1e-30, 1e30], boxes=False, points=[0.5]))
def test_a_sweep_reports_or_says_why_not(recipe):
    def make(alpha, beta):
        return bisls.BiSLS(recipe.problem(), alpha=alpha, beta=beta, lower_iters=2)

    try:
        report = bisls.sensitivity(make, steps=2, alphas=(1e-3, 1e3), betas=(1e-2,), progress=False)
    except (ValueError, RuntimeError) as error:
        assert "`" in str(error)
    else:
        assert report.scores.shape == (2, 1, 1)
        assert str(report)
