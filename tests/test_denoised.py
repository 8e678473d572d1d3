"""What noise does to a step: the denoised direction, searches that expand or go uphill, curvature steps that are watched."""

from __future__ import annotations

import io
from dataclasses import replace
from itertools import pairwise
from math import inf, nan, sqrt

import pytest
import torch

from bisls import Armijo, Backtrack, Curvature, Decay, Denoised, Line, Memory, Status

X0 = torch.tensor([0.5, -1.0, 2.0], dtype=torch.float64)


def drawn(n: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(n, 3, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


# --- Denoised


@pytest.mark.parametrize("b2", [None, 0.9])
def test_momentum_and_bound_are_the_formulas(b2):
    """A plain reference of the docstring, over ten gradients with a judge that sees other numbers."""
    direction = Denoised(b2=b2, most=0.8, eps=1e-3)
    noise = squares = weight = reached = 0.0
    m, g, x, state = torch.zeros(3).double(), torch.zeros(3).double(), X0.clone(), {}
    momenta, limits = [], []
    for k, (h, other) in enumerate(zip(drawn(10), drawn(10, seed=1), strict=True)):
        h, other = h + torch.tensor([2.0, 0.0, -1.0]), other + torch.tensor([2.0, 0.0, -1.0])
        b = min(max(noise / squares, 0.0), 0.8) if squares else 0.0
        m, weight = b * m + (1 - b) * h, b * weight + 1 - b
        g = 0.9 * g + 0.1 * h**2
        scale = torch.ones(3).double() if b2 is None else (g / (1 - 0.9 ** (k + 1))).sqrt() + 1e-3
        d = m / weight / scale
        reached = max(reached, (scale * (x - X0) ** 2).sum().sqrt().item())
        share, size = (1 - b) / weight, (h * h / scale).sum().item()
        owed = ((h @ d - other @ d) / share).item()
        noise, squares = noise + min(max(owed, -size / share), size / share), squares + size
        limit = 0.7 * reached / sqrt(min(noise, squares)) if noise > 0 and reached > 0 else inf

        heading = direction.head(h, x, state)
        torch.testing.assert_close(heading.search, d, rtol=1e-12, atol=1e-14)
        assert heading.search is heading.move
        longest, state = heading.weigh((h @ d).item(), (other @ d).item())
        assert longest == pytest.approx(limit, rel=1e-12)
        assert state["sums"].tolist() == pytest.approx([noise, squares, weight, reached], rel=1e-12)
        momenta.append(b)
        limits.append(longest)
        x = x - 0.1 * d
    assert max(momenta) > 0.1  # there was noise, and it was seen
    assert limits[0] == inf
    assert limits[-1] < inf


@pytest.mark.parametrize("b2", [None, 0.9])
def test_without_noise_it_is_the_gradient_and_there_is_no_bound(b2):
    x, state, g = X0.clone(), {}, torch.zeros(3).double()
    for k, h in enumerate(drawn(6)):
        heading = Denoised(b2=b2).head(h, x, state)
        g = 0.9 * g + 0.1 * h**2
        scale = 1.0 if b2 is None else (g / (1 - 0.9 ** (k + 1))).sqrt() + 1e-8
        torch.testing.assert_close(heading.move, h / scale, rtol=1e-12, atol=0)
        own = (h @ heading.search).item()
        longest, state = heading.weigh(own, own)
        assert longest == inf
        assert state["sums"][0].item() == 0.0
        x = x - 0.1 * heading.move


def test_a_judge_that_promises_more_than_the_gradient_counts_against_the_noise_before():
    h = torch.tensor([2.0, 0.0, 0.0]).double()
    _, state = Denoised().head(h, X0, {}).weigh(4.0, 1.0)
    assert state["sums"][0].item() == 3.0
    longest, state = Denoised().head(h, X0 + 1, state).weigh(4.0, 1e9)  # and a single one is clipped
    assert state["sums"][0].item() < 0
    assert longest == inf
    assert torch.equal(Denoised().head(h, X0, state).move, h)  # no noise is left: no momentum


def test_one_that_was_not_judged_counts_like_those_that_were():
    h = torch.tensor([2.0, 0.0, 0.0]).double()
    _, state = Denoised().head(h, X0, {}).weigh(4.0, 3.0)
    heading = Denoised().head(3 * h, X0 + 1, state)
    longest, rested = heading.weigh(12.0, None)
    assert rested["sums"][:2].tolist() == pytest.approx(
        [1.0 + 0.25 * 36.0, 4.0 + 36.0]
    )  # the share of noise is what it was
    assert longest == pytest.approx(0.7 * sqrt(3) / sqrt(10.0))
    first, state = Denoised().head(h, X0, {}).weigh(4.0, None)
    assert first == inf
    assert state["sums"][:2].tolist() == [0.0, 4.0]


@pytest.mark.parametrize("bad", [nan, inf, -inf])
@pytest.mark.parametrize("which", ["own", "judged"])
def test_a_slope_that_is_not_finite_teaches_nothing(bad, which):
    h = torch.tensor([2.0, 1.0, 0.0]).double()
    _, state = Denoised(b2=0.99).head(h, X0, {}).weigh(5.0, 3.0)
    heading = Denoised(b2=0.99).head(h, X0 + 1, state)
    longest, after = heading.weigh(*((bad, 3.0) if which == "own" else (5.0, bad)))
    assert torch.equal(after["sums"][:2], state["sums"][:2])
    assert 0 < longest < inf
    assert all(bool(torch.isfinite(tensor).all()) for tensor in after.values())


def test_the_state_survives_a_file():
    direction, x, state = Denoised(b2=0.99), X0.clone(), {}
    for h in drawn(4):
        heading = direction.head(h, x, state)
        own = (h @ heading.search).item()
        _, state = heading.weigh(own, 0.3 * own)
        x = x - 0.1 * heading.move
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)
    h = drawn(1, seed=9)[0]
    one, two = direction.head(h, x, state), direction.head(h, x, loaded)
    assert torch.equal(one.move, two.move)
    assert not torch.allclose(one.move, direction.head(h, x, {}).move, rtol=0.1)  # and it matters
    (far, after), (again, too) = one.weigh(1.0, 0.5), two.weigh(1.0, 0.5)
    assert far == again < inf
    assert all(torch.equal(after[key], too[key]) for key in after)


def test_the_state_is_not_changed_in_place():
    _, state = Denoised(b2=0.9).head(drawn(1)[0], X0, {}).weigh(1.0, 0.5)
    before = {key: tensor.clone() for key, tensor in state.items()}
    Denoised(b2=0.9).head(drawn(2)[1], X0 + 1, state).weigh(1.0, 0.5)
    assert all(torch.equal(state[key], before[key]) for key in before)


@pytest.mark.parametrize("wrong", [{"b2": 1.0}, {"most": 1.0}, {"most": -0.1}, {"eps": 0.0}])
def test_wrong_numbers_are_refused_by_name(wrong):
    (name,) = wrong
    with pytest.raises(ValueError, match=rf"`Denoised\({name}=.*{name} must"):
        Denoised(**wrong)


# --- Armijo: expand and uphill


def parabola(curvature: float = 4.0, value: float = 8.0) -> tuple[Line, list[float]]:
    """phi(t) = value (1 - curvature t)^2: its minimum, 0, is at 1 / curvature."""
    tried: list[float] = []

    def at(t: float) -> float:
        tried.append(t)
        return value * (1 - curvature * t) ** 2

    return Line(value, -2 * value * curvature, at), tried


@pytest.mark.parametrize("start", [1e-9, 3e-5, 0.1])
def test_the_first_search_doubles_a_start_that_is_too_short(start):
    line, tried = parabola()
    step = Armijo(start=start, sufficient=0.5, expand=True).choose(line, Memory())
    assert step.checks == len(tried)
    assert tried[0] == start
    assert all(b == 2 * a for a, b in pairwise(tried))
    assert (
        0.125 * (1 - 1e-12) <= step.size <= 0.25
    )  # phi falls, and passes, up to 1/4; doubling finds at least half of it
    assert step.value == pytest.approx(8 * (1 - 4 * step.size) ** 2, abs=1e-12)
    assert step.memory.step == step.size
    assert step.status is Status.OK


def test_later_searches_do_not_expand():
    rule = Armijo(start=1e-6, sufficient=0.5, expand=True)
    line, tried = parabola()
    step = rule.choose(line, Memory(k=1, step=1e-6))
    assert (step.size, step.checks, len(tried)) == (2e-6, 1, 1)
    plain, _ = parabola()
    assert replace(rule, expand=False).choose(plain, Memory()).size == 1e-6


def test_expanding_stops_at_the_ceiling_and_at_values_that_are_not_finite():
    line, tried = parabola()
    step = Armijo(start=1e-3, sufficient=0.5, expand=True, max_step=5e-3).choose(line, Memory())
    assert (step.size, step.checks) == (4e-3, 3)
    assert max(tried) <= 5e-3
    wall = replace(line, at=lambda t: nan if t > 0.01 else 8 * (1 - 4 * t) ** 2)
    step = Armijo(start=1e-3, sufficient=0.5, expand=True).choose(wall, Memory())
    assert (step.size, step.checks) == (8e-3, 5)


def test_a_first_trial_that_failed_is_not_expanded():
    line, tried = parabola()
    rule = Armijo(start=0.4, sufficient=0.5, shrink=Backtrack(0.25), f_min=None, expand=True)
    step = rule.choose(line, Memory())
    assert tried == [0.4, 0.1]
    assert (step.size, step.checks) == (0.1, 2)


def test_uphill_takes_the_remembered_step_and_says_so():
    line = Line(8.0, +3.0, lambda t: pytest.fail("nothing is to be tried"))
    memory = Memory(k=4, step=0.2)
    step = Armijo(uphill=0.5).choose(line, memory)
    assert (step.size, step.checks, step.status) == (0.1, 0, Status.NOT_DESCENT)
    assert (step.memory.step, step.memory.k) == (0.2, 5)
    assert Armijo(uphill=1.0).choose(replace(line, max_step=0.03), memory).size == 0.03
    assert Armijo(uphill=1.0, max_step=Decay(0.1)).choose(replace(line, clock=3), memory).size == pytest.approx(0.05)
    assert Armijo().choose(line, memory).size == 0.0


@pytest.mark.parametrize(
    ("line", "memory", "status"),
    [
        (Line(8.0, 3.0, lambda t: 0.0), Memory(), Status.NOT_DESCENT),  # nothing is remembered yet
        (Line(8.0, 0.0, lambda t: 0.0), Memory(k=1, step=0.2), Status.STATIONARY),
        (Line(8.0, nan, lambda t: 0.0), Memory(k=1, step=0.2), Status.NON_FINITE),
        (Line(inf, 1.0, lambda t: 0.0), Memory(k=1, step=0.2), Status.NON_FINITE),
    ],
)
def test_uphill_takes_nothing_where_nothing_is_known(line, memory, status):
    step = Armijo(uphill=1.0).choose(line, memory)
    assert (step.size, step.status, step.memory.step) == (0.0, status, memory.step)


# --- Curvature: watched


def ray(curvature: torch.Tensor, y: torch.Tensor, least: float = 0.0) -> tuple[Line, torch.Tensor]:
    """1/2 y' diag(curvature) y + least along its own gradient."""
    gradient = curvature * y

    def loss(z: torch.Tensor) -> float:
        return (0.5 * (curvature * z * z).sum()).item() + least

    return Line(loss(y), -(gradient @ gradient).item(), lambda t: loss(y - t * gradient)), gradient


CURVATURE = torch.tensor([1.0, 4.0, 10.0], dtype=torch.float64)


def test_a_gradient_at_the_level_of_rounding_gives_no_step_and_is_not_remembered():
    rule = Curvature(start=None, watch=True)
    line, _ = ray(CURVATURE, 1e-12 * X0, least=1.0)
    step = rule.choose(line, Memory())
    assert (step.size, step.status, step.memory.step) == (0.0, Status.ROUNDING, None)
    assert step.checks >= 1
    line, _ = ray(CURVATURE, X0, least=1.0)
    later = rule.choose(line, step.memory)  # the next one that can be seen sets the scale
    assert later.status is Status.OK
    assert 0.05 < later.size < 1.0
    careless = replace(rule, watch=False).choose(ray(CURVATURE, 1e-12 * X0, least=1.0)[0], Memory())
    assert careless.size > 1e6  # what it would have been


@pytest.mark.parametrize("start", [None, 1e-6, 1e6])
def test_a_thousandfold_curvature_is_followed_without_blowing_up(start):
    rule, memory, y = Curvature(start=start, trials=5, every=30, recent=0.05, watch=True), Memory(), X0.clone()
    values, checks = [], []
    for k in range(160):
        curvature = CURVATURE * (1000.0 if k >= 60 else 1.0)
        y = y + 1e-3 * drawn(1, seed=k)[0]  # it never converges entirely
        line, gradient = ray(curvature, y)
        step = rule.choose(line, memory)
        memory, y = step.memory, y - step.size * gradient
        values.append(ray(curvature, y)[0].value)
        checks.append(step.checks)
    assert step.status is Status.OK
    assert max(values[:60]) <= ray(CURVATURE, X0)[0].value * 1.1
    assert checks[60] > 0  # caught at once,
    assert max(values[60:]) < 10 * 0.5 * 1e4 * 9e-6  # and the loss stays that of the disturbance
    assert memory.step < 2.5e-3  # around 1 / 1000, between 1/L and 1/mu


def test_unwatched_the_same_blows_up():
    """So that the test above can fail."""
    rule, memory, y = Curvature(trials=5, every=30, recent=0.05), Memory(), X0.clone()
    for k in range(75):
        line, gradient = ray(CURVATURE * (1000.0 if k >= 60 else 1.0), y + 1e-3 * drawn(1, seed=k)[0])
        step = rule.choose(line, memory)
        memory, y = step.memory, y - step.size * gradient
    assert y.norm() > 1e6


def test_trials_are_as_rare_as_asked_for_on_a_steady_quadratic():
    rule, memory = Curvature(start=None, trials=20, every=30, recent=0.05, watch=True), Memory()
    checks = []
    for h in drawn(620):
        step = rule.choose(ray(CURVATURE, X0 * (1 + 0.1 * h.tanh()))[0], memory)
        memory = step.memory
        checks.append(step.checks)
    assert all(checks[:20])
    assert 600 // 30 <= sum(checks[20:]) <= 600 // 30 + 5  # a few more where a gradient jumps
    assert 1 / 10.0 < memory.step < 1.0


def test_what_a_watched_rule_remembers_is_plain_numbers():
    rule, memory = Curvature(start=None, watch=True), Memory()
    for h in drawn(5):
        memory = rule.choose(ray(CURVATURE, h)[0], memory).memory
    assert all(isinstance(number, float) for number in (memory.step, *memory.notes.values()))
    assert set(memory.notes) == {"count", "peak"}


@pytest.mark.parametrize("bad", [nan, inf, -inf])
def test_a_trial_that_is_not_finite_shortens_and_the_step_stays_finite(bad):
    rule = Curvature(start=None, trials=5, watch=True)
    line, _ = ray(CURVATURE, X0)
    memory = rule.choose(line, Memory()).memory
    wall = replace(line, at=lambda t: bad if t > 1e-3 else line.at(t))
    step = rule.choose(wall, memory)
    assert 0 < step.size <= 2e-3
    assert step.memory.step == step.size
