"""Step rules: property tests over random convex problems, and every way in which a search can go wrong."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise, product
from math import ceil, inf, isfinite, log, nan, sqrt

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import bisls
from bisls import (
    Armijo,
    Constant,
    Curvature,
    Decay,
    DecreasingPolyak,
    Envelope,
    Grow,
    Interpolate,
    Keep,
    Line,
    Memory,
    Polyak,
    Restart,
    Status,
)

numbers = st.floats(1e-3, 1e3)


@dataclass
class Convex:
    """A random convex smooth loss in float64 at a random point: its line along the gradient, and its smoothness L."""

    line: Line
    smoothness: float


@st.composite
def convex(draw):
    """Quadratics (with a minimum above 0) and logistic losses, over several orders of curvature."""
    seed = draw(st.integers(0, 2**31))
    rng = torch.Generator().manual_seed(seed)
    n = draw(st.integers(1, 5))
    x = torch.randn(n, generator=rng, dtype=torch.float64) * draw(st.floats(0.1, 10.0))
    if draw(st.booleans()):
        scales = torch.logspace(0, draw(st.floats(0.0, 3.0)), n, dtype=torch.float64) * draw(numbers)
        centre = torch.randn(n, generator=rng, dtype=torch.float64)
        least = draw(st.floats(0.0, 10.0))

        def loss(z):
            return 0.5 * (scales * (z - centre) ** 2).sum() + least

        smoothness = scales.max().item()
    else:
        data = torch.randn(6, n, generator=rng, dtype=torch.float64)
        labels = torch.randint(0, 2, (6,), generator=rng).double() * 2 - 1

        def loss(z):
            return torch.nn.functional.softplus(-labels * (data @ z)).mean()

        smoothness = 0.25 * torch.linalg.matrix_norm(data, 2).item() ** 2 / 6
    x.requires_grad_()
    value = loss(x)
    (gradient,) = torch.autograd.grad(value, x)
    slope = -gradient.dot(gradient).item()

    def at(t):
        with torch.no_grad():
            return loss(x - t * gradient).item()

    return Convex(Line(value.item(), slope, at), smoothness)


def counting(line: Line) -> tuple[Line, list[float]]:
    tried: list[float] = []

    def at(t):
        tried.append(t)
        return line.at(t)

    return replace(line, at=at), tried


# --- Lemma 1


@given(convex(), numbers, st.integers(0, 1000), st.floats(0.1, 5.0))
def test_spsb_lies_in_its_envelope(problem, ceiling, k, c):
    line = problem.line
    bound = ceiling / sqrt(k + 1)
    step = Polyak(c=c, max_step=Decay(ceiling)).choose(line, Memory(k=k))
    if line.slope == 0.0:
        assert step.status is Status.STATIONARY
        return
    assert step.size <= min(line.value / (c * -line.slope), bound) * (1 + 1e-12)
    assert step.size >= min(1 / (2 * c * problem.smoothness), bound) * (1 - 1e-9)


@given(convex(), numbers, st.integers(0, 1000), st.floats(0.05, 0.9), st.floats(0.3, 0.95))
def test_slsb_lies_in_its_envelope(problem, ceiling, k, c, w):
    line = problem.line
    if -line.slope < 1e-9 * max(line.value, 1e-9):  # at rounding level the test below speaks
        return
    bound = ceiling / sqrt(k + 1)
    rule = Envelope(Armijo(start=ceiling, sufficient=c, shrink=w, restart=Restart()), ceiling=Decay(ceiling))
    step = rule.choose(line, Memory(k=k))
    if step.status is Status.ROUNDING:
        return
    assert step.status is Status.OK
    assert step.size <= min(line.value / (c * -line.slope), bound) * (1 + 1e-9)
    # the exact largest step is at least 2 (1 - c) / L; backtracking loses at most the factor w
    assert step.size >= min(w * 2 * (1 - c) / problem.smoothness, bound) * (1 - 1e-6)


@given(st.lists(convex(), min_size=2, max_size=12), numbers, st.floats(0.1, 5.0))
def test_decsps_is_monotone_and_below_its_ceiling(problems, ceiling, c):
    rule, memory, sizes = DecreasingPolyak(c=c, max_step=ceiling), Memory(), []
    for problem in problems:
        step = rule.choose(problem.line, memory)
        memory = step.memory
        if step.status is Status.OK:
            sizes.append(step.size)
            assert step.size <= ceiling / sqrt(len(sizes)) * (1 + 1e-12)
    assert all(later <= earlier for earlier, later in pairwise(sizes))


def test_decsps_is_its_recursion():
    ratios = [3.0, 0.2, 5.0, 0.001, 7.0]
    c, ceiling = 0.7, 2.0
    rule, memory, before = DecreasingPolyak(c=c, max_step=ceiling), Memory(), None
    for k, ratio in enumerate(ratios):
        step = rule.choose(Line(ratio, -1.0, at=float), memory)
        memory = step.memory
        c_k = c * sqrt(k + 1)
        expected = min(ratio, c * ceiling) / c if before is None else min(ratio, c * sqrt(k) * before) / c_k
        assert step.size == pytest.approx(expected, rel=1e-14)
        before = expected


@given(convex(), numbers, numbers, st.integers(0, 50))
def test_envelope_holds_both_bounds(problem, floor, ceiling, k):
    rule = Envelope(Polyak(), floor=Decay(floor), ceiling=Decay(ceiling))
    step = rule.choose(problem.line, Memory(k=k))
    if step.status is Status.OK:
        low, high = floor / sqrt(k + 1), ceiling / sqrt(k + 1)
        inner = problem.line.value / -problem.line.slope
        assert step.size == pytest.approx(min(max(min(low, high), inner), high), rel=1e-12)


# --- Armijo


@given(convex(), st.floats(1e-4, 1e4), st.floats(0.05, 0.9), st.floats(0.3, 0.95))
def test_armijo_holds_at_the_step_and_fails_one_shrink_earlier(problem, start, c, w):
    line, tried = counting(problem.line)
    step = Armijo(start=start, sufficient=c, shrink=w, f_min=None).choose(line, Memory())
    assert step.checks == len(tried)
    if step.status is not Status.OK:
        assert step.status in (Status.ROUNDING, Status.STATIONARY)
        return
    assert problem.line.at(step.size) <= line.value + c * step.size * line.slope
    assert step.value == problem.line.at(step.size)
    if step.checks > 1 and tried[0] <= start:
        longer = step.size / w
        assert not problem.line.at(longer) <= line.value + c * longer * line.slope


@given(convex(), st.floats(1e-4, 1e4), st.floats(0.05, 0.9))
def test_interpolation_is_safeguarded_and_passes_the_same_test(problem, start, c):
    line, tried = counting(problem.line)
    step = Armijo(start=start, sufficient=c).choose(line, Memory())
    assert step.checks == len(tried)
    if step.status is Status.OK:
        assert step.value <= line.value + c * step.size * line.slope
        assert all(0.1 * a <= b * (1 + 1e-12) and b <= 0.5 * a for a, b in pairwise(tried))


def test_interpolation_takes_two_checks_where_backtracking_takes_dozens():
    line = Line(8.0, -64.0, at=lambda t: 8.0 * (1 - 4 * t) ** 2)
    fast = Armijo(start=100.0, f_min=None).choose(line, Memory())
    slow = Armijo(start=100.0, shrink=0.9, f_min=None).choose(line, Memory())
    assert fast.checks <= 4
    assert slow.checks >= 40


def test_no_step_is_tried_that_cannot_pass():
    line, tried = counting(Line(8.0, -64.0, at=lambda t: 8.0 * (1 - 4 * t) ** 2))
    Armijo(start=1e30, sufficient=0.1).choose(line, Memory())
    assert tried[0] == pytest.approx(8.0 / (0.1 * 64.0))


@pytest.mark.parametrize(
    ("restart", "expected"), [(Restart(), 0.5), (Keep(), 0.05), (Grow(2.0), 0.1), (Grow(10.0), 0.5)], ids=repr
)
def test_where_the_next_search_begins(restart, expected):
    line, tried = counting(Line(1.0, -1.0, at=lambda t: 1.0 - t + t * t))
    Armijo(start=0.5, restart=restart).choose(line, Memory(k=1, step=0.05))
    assert tried[0] == pytest.approx(expected)


def test_the_first_search_begins_at_the_polyak_step():
    line, tried = counting(Line(6.0, -3.0, at=lambda t: 6.0 - 3 * t + t * t))
    Armijo(f_min=2.0).choose(line, Memory())
    assert tried[0] == pytest.approx((6.0 - 2.0) / 3.0)


@given(convex(), st.integers(-8, 8))
def test_without_a_start_the_units_of_the_loss_do_not_matter(problem, power):
    factor = 4.0**power  # a power of two, so that scaling is exact
    line = problem.line
    scaled = Line(line.value * factor, line.slope * factor, lambda t: line.at(t) * factor)
    here, there = Armijo().choose(line, Memory()), Armijo().choose(scaled, Memory())
    assert (here.size, here.checks, here.status) == (there.size, there.checks, there.status)


# --- what no search may do: run for ever, ascend, spoil its memory

VALUES = {
    "nan": lambda t: nan,
    "inf": lambda t: inf,
    "minus inf": lambda t: -inf,
    "nan beyond 1e-3": lambda t: nan if t > 1e-3 else 2.0 - t,
    "constant": lambda t: 2.0,
    "rounding noise": lambda t: 2.0 * (1 + 2.0**-52 * (hash(t) % 3 - 1)),
    "ascends": lambda t: 2.0 + t,
    "a jump": lambda t: 2.0 + 1e-3,
    "falls for ever": lambda t: 2.0 - 5 * t,
}
RULES = {
    "default": Armijo(),
    "factor": Armijo(start=1.0, shrink=0.9),
    "no bound": Armijo(start=3.0, f_min=None),
    "few checks": Armijo(max_checks=3),
    "keep": Armijo(start=1.0, restart=Keep()),
    "restart, ceiling": Armijo(start=1.0, restart=Restart(), max_step=Decay(0.5)),
    "slack": Armijo(slack=1e-6),
    "polyak": Polyak(),
    "decsps": DecreasingPolyak(),
    "envelope": Envelope(Armijo(), floor=1e-4, ceiling=2.0),
    "curvature": Curvature(),
    "curvature, far start": Curvature(start=1e8, trials=1, every=1, recent=0.5),
    "constant": Constant(0.1),
    "decay": Decay(0.1),
}


def cap(rule) -> int:
    rule = rule.rule if isinstance(rule, Envelope) else rule
    if isinstance(rule, Curvature):
        return 100
    if not isinstance(rule, Armijo):
        return 0
    slowest = rule.shrink if isinstance(rule.shrink, float) else rule.shrink.slowest
    return rule.max_checks or ceil(log(1e-12) / log(slowest))


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
@pytest.mark.parametrize("shape", VALUES)
def test_every_search_ends_within_its_cap_with_a_usable_step(rule, shape):
    memories = [Memory()] + [
        Memory(k=3, step=step, notes={"count": 2.0, "begin": 2.0}) for step in (0.25, 1e-300, 1e300, 1e308)
    ]
    slopes = [-1.0, -1e-17, -1e-300, -1e300, 0.0, 1.0, nan, -inf]
    for memory, value, slope in product(memories, [2.0, nan, inf, -1.0, 0.0], slopes):
        line, tried = counting(Line(value, slope, VALUES[shape]))
        step = rule.choose(line, memory)
        assert len(tried) == step.checks <= cap(rule)
        assert isfinite(step.size)
        assert step.size >= 0
        assert step.value is None or isfinite(step.value)
        assert all(isfinite(t) and t > 0 for t in tried)
        if not (isfinite(value) and isfinite(slope)):
            assert (step.size, step.status) == (0.0, Status.NON_FINITE)
        if isinstance(rule, Armijo | Polyak | DecreasingPolyak | Curvature) and slope >= 0:
            assert step.size == 0.0


SEARCHES = {name: rule for name, rule in RULES.items() if isinstance(rule, Armijo) and name != "slack"}


@pytest.mark.parametrize("rule", SEARCHES.values(), ids=SEARCHES)
@pytest.mark.parametrize("shape", ["nan", "inf", "minus inf", "constant", "rounding noise", "ascends", "a jump"])
@pytest.mark.parametrize("slope", [-1.0, -1e-17])
def test_a_search_that_learnt_nothing_leaves_the_memory_alone(rule, shape, slope):
    memory = Memory(k=5, step=0.25)
    for _ in range(50):
        step = rule.choose(Line(2.0, slope, VALUES[shape]), memory)
        memory = step.memory
        assert step.status in (Status.ROUNDING, Status.CAPPED, Status.NON_FINITE)
    assert memory.step == 0.25
    assert memory.k == 55


def test_below_its_bound_a_polyak_rule_takes_no_step_and_says_why():
    for rule in (Polyak(f_min=1.0), DecreasingPolyak(f_min=1.0)):
        step = rule.choose(Line(0.5, -1.0, at=float), Memory())
        assert (step.size, step.status) == (0.0, Status.BELOW_BOUND)
    assert "smaller f_min" in Status.BELOW_BOUND.advice


def test_a_loss_below_the_bound_is_still_searched():
    step = Armijo(f_min=0.0).choose(Line(-3.0, -1.0, at=lambda t: -3.0 - t + t * t), Memory())
    assert step.status is Status.OK
    assert step.size > 0.1


def quadratic_descent(dtype, rule, steps, start=None):
    """Gradient descent on an ill-conditioned quadratic whose minimum is 1, with every value rounded to ``dtype``."""
    scales = torch.tensor([1.0, 30.0], dtype=dtype)
    x = torch.tensor([3.0, -2.0], dtype=dtype)
    memory = Memory() if start is None else Memory(k=1, step=start)

    def loss(z):
        return 0.5 * (scales * z * z).sum() + 1.0

    memories = []
    for _ in range(steps):
        g = scales * x
        line = Line(
            loss(x).item(), -g.dot(g).item(), lambda t, x=x, g=g: loss(x - t * g).item(), eps=torch.finfo(dtype).eps
        )
        step = rule.choose(line, memory)
        memory = step.memory
        memories.append(memory.step)
        x = x - step.size * g
    return x, memories


@pytest.mark.parametrize("rule", [Armijo(), Armijo(shrink=0.9, start=1.0), Armijo(start=1.0, f_min=None)], ids=repr)
def test_steps_do_not_collapse_once_the_problem_is_solved_to_rounding(rule):
    x, memories = quadratic_descent(torch.float32, rule, 600)
    assert x.norm() < 1e-2
    assert min(memories[300:]) > 1e-3  # 2 / L is 0.07
    assert max(memories[300:]) < 10.0


@pytest.mark.parametrize("start", [1e-30, 1e-12, 1e-7])
def test_a_tiny_start_grows_until_it_can_be_seen(start):
    _, memories = quadratic_descent(torch.float32, Armijo(), 60, start=start)
    assert memories[-1] > 1e-3


def test_slack_lets_a_loss_rise():
    line = Line(1.0, -1e-3, at=lambda t: 1.0 + 0.01 * t)
    assert Armijo(start=1.0, slack=0.1, max_checks=1).choose(line, Memory()).status is Status.OK
    assert Armijo(start=1.0, max_checks=1).choose(line, Memory()).status is Status.CAPPED


def test_the_fall_back_is_the_best_trial_that_lowers_the_loss():
    line = Line(2.0, -100.0, at=lambda t: 2.0 - 1e-3 * t)  # falls, but never as fast as the slope promises
    step = Armijo(start=1.0, f_min=None, max_checks=4).choose(line, Memory(k=1, step=0.5))
    assert step.status is Status.CAPPED
    assert step.size == 1.0  # 2 * the remembered step, the longest tried
    assert step.memory.step == 0.5


@pytest.mark.parametrize("restart", [Restart(), Keep(), Grow(2.0)], ids=repr)
def test_a_start_that_is_far_too_long_is_worked_off_over_several_searches(restart):
    line = Line(50.0, -10000.0, at=lambda t: 50.0 * (1 - 100.0 * t) ** 2)
    memory, rule = Memory(), Armijo(start=1e12, f_min=None, shrink=0.9, restart=restart, max_checks=100)
    for _ in range(6):
        step = rule.choose(line, memory)
        memory = step.memory
        if step.status is Status.OK:
            break
        assert (step.size, memory.step) == (0.0, None)
    assert step.status is Status.OK
    assert 0.01 < step.size < 0.02


def test_a_step_hidden_by_noise_above_rounding_is_found_again():
    # a loss with cancelling parts: its noise is far above the rounding of its value
    def loss(t):
        return float(torch.tensor(1000.0 + 4.0 * (1 - 0.5 * t) ** 2, dtype=torch.float32) - 1000.0)

    memory = Memory(k=1, step=1e-9)
    for _ in range(5):
        step = Armijo().choose(Line(loss(0.0), -4.0, loss, eps=2.0**-23), memory)
        memory = step.memory
    assert memory.step > 1e-4


def test_a_ceiling_on_the_line_is_respected_by_every_rule():
    for name, rule in RULES.items():
        step = rule.choose(Line(2.0, -1.0, lambda t: 2.0 - t + 0.1 * t * t, max_step=1e-3), Memory())
        assert 0 < step.size <= 1e-3, name


# --- bad arguments

BAD = [
    (lambda: Armijo(shrink=1.2), r"`Armijo\(shrink=1.2\)`: shrink must be a number in \(0, 1\)"),
    (lambda: Armijo(shrink="fast"), "must be a number in"),
    (lambda: Armijo(sufficient=1.0), r"`Armijo\(sufficient=1.0\)`"),
    (lambda: Armijo(start=-1.0), r"`Armijo\(start=-1.0\)`: start must be positive"),
    (lambda: Armijo(f_min=None), "needs f_min"),
    (lambda: Armijo(restart=2), r"must be Restart\(\), Keep\(\) or Grow\(eta\)"),
    (lambda: Armijo(max_checks=0), "at least 1"),
    (lambda: Armijo(slack=-1e-9), "at least 0"),
    (lambda: Grow(0.5), r"`Grow\(eta=0.5\)`: eta must be at least 1"),
    (lambda: Interpolate(0.6, 0.5), "at most high"),
    (lambda: Constant(0.0), r"`Constant\(step=0.0\)`"),
    (lambda: Constant(nan), r"`Constant\(step=nan\)`"),
    (lambda: Decay(-1.0), "positive"),
    (lambda: Polyak(c=0.0), r"`Polyak\(c=0.0\)`"),
    (lambda: Polyak(f_min=-inf), "finite"),
    (lambda: Polyak(max_step=-1), "a schedule such as"),
    (lambda: DecreasingPolyak(max_step=Decay(1.0)), "must be a positive number"),
    (lambda: Envelope(3.0), "must be a step rule"),
    (lambda: Envelope(Polyak(), ceiling=0.0), "must be positive"),
    (lambda: bisls.CG(iters=0), r"`CG\(iters=0\)`"),
    (lambda: bisls.CG(tol=-1), "at least 0"),
    (lambda: bisls.Neumann(terms=0), "at least 1"),
    (lambda: bisls.Neumann(scale=0.0), "positive, or None"),
    (lambda: bisls.Identity(scale=-1.0), "positive"),
    (lambda: bisls.Implicit(bisls.CG), "linear must be a linear solver"),
    (lambda: bisls.StochasticNeumann(3, -1.0), "positive, or None"),
    (lambda: bisls.Unrolled(0), "at least 1"),
    (lambda: bisls.Adam(betas=(0.9, 1.0)), r"two numbers in \[0, 1\)"),
    (lambda: bisls.LBFGS(history=0), "at least 1"),
]


@pytest.mark.parametrize(("make", "message"), BAD)
def test_bad_arguments_are_named(make, message):
    with pytest.raises(ValueError, match=message):
        make()


settings.register_profile("bisls", max_examples=150, deadline=None, derandomize=True)
settings.load_profile("bisls")


@pytest.mark.parametrize(
    "rule", [bisls.Constant(0.5), bisls.Decay(0.5), bisls.Curvature(start=0.5, trials=1, every=50)], ids=repr
)
@pytest.mark.parametrize("ceiling", [0.1, bisls.Decay(0.1), 2.0], ids=repr)
@pytest.mark.parametrize("twice", [False, True])
def test_an_envelope_remembers_the_same_whether_it_sees_a_value_or_not(rule, ceiling, twice):
    """A lower loop asks without a value where it can: what a run remembers must not depend on that."""
    bounded = (
        bisls.Envelope(bisls.Envelope(rule, ceiling=ceiling), floor=1e-9)
        if twice
        else bisls.Envelope(rule, ceiling=ceiling)
    )
    line = Line(value=3.0, slope=-2.0, at=lambda t: 3.0 - 2.0 * t + t * t, clock=3)
    memory = Memory(k=3, step=0.4)
    seen, unseen = bounded.choose(line, memory), bounded.blind(line.slope, 3, memory)
    assert unseen is not None
    assert (unseen.size, unseen.memory) == (seen.size, seen.memory)
