"""Weights on a simplex: the projection, exponentiated steps, searches that stay inside, and the mean of x."""

from __future__ import annotations

import io
import math

import pytest
import torch

import bisls
from bisls.bounds import inside
from bisls.vector import Vector


def draws(count: int = 50):
    rng = torch.Generator().manual_seed(3)
    for k in range(count):
        yield 10 ** (k % 5 - 2) * torch.randn(6, generator=rng, dtype=torch.float64)


@pytest.mark.parametrize("floor", [0.0, 1e-3, 0.1])
def test_the_projection_is_the_nearest_point(floor):
    simplex, vector = bisls.Simplex(floor), Vector([torch.zeros(6, dtype=torch.float64)])
    others = [simplex.project(v, vector) for v in draws()]
    for v, nearest in zip(draws(), others, strict=True):
        assert float(nearest.sum()) == pytest.approx(1.0, abs=1e-12)
        assert float(nearest.min()) >= floor
        assert torch.equal(simplex.project(nearest, vector), nearest)
        # the one test of a projection onto a convex set: no point of it lies at an acute angle
        assert all(float((v - nearest) @ (other - nearest)) <= 1e-9 * float(v.norm() + 1) for other in others)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_each_tensor_has_weights_of_its_own(dtype):
    tensors = [torch.full((4,), 0.25, dtype=dtype), torch.full((2, 3), 1 / 6, dtype=dtype)]
    simplex, vector = bisls.Simplex(), Vector(tensors)
    start = vector.read()
    assert torch.equal(simplex.project(start, vector), start), "what starts there may start there"
    here = simplex.project(start + torch.linspace(-1, 1, 10, dtype=dtype), vector)
    one, two = vector.split(here)
    assert two.shape == (2, 3)
    assert [float(part.sum()) for part in (one, two)] == pytest.approx([1.0, 1.0], abs=1e-6)
    assert float(here.min()) >= float(torch.tensor(1e-3, dtype=dtype))
    assert torch.equal(simplex.project(here, vector), here)


def test_a_bent_ray_ends_at_the_exponentiated_step():
    v = torch.tensor([0.5, 0.3, 0.15, 0.05], dtype=torch.float64)
    d = torch.tensor([1.0, -2.0, 0.5, 0.0], dtype=torch.float64)
    vector = Vector([v])
    for reach in (1e-6, 0.1, 1.0):
        end = v - reach * bisls.Simplex(0.0).bend(v, d, reach, vector)
        expected = v * torch.exp(-reach * d)
        assert torch.allclose(end, expected / expected.sum(), rtol=1e-9, atol=0.0)
    # a short one is the gradient in the simplex's own geometry, v (d - <v, d>), and goes downhill
    bent = bisls.Simplex().bend(v, d, 1e-6, vector)
    assert torch.allclose(bent, v * (d - v @ d), atol=1e-5)
    assert float(bent @ d) > 0
    # a long one stays above the floor, at every step before its end as well
    bent = inside(bisls.Simplex(0.02), v, d, 50.0, vector)
    for t in (0.0, 10.0, 49.0, 50.0):
        at = v - t * bent
        assert float(at.min()) >= 0.02 - 1e-15
        assert float(at.sum()) == pytest.approx(1.0, abs=1e-12)
    assert float((v - 50.0 * bent).max()) == pytest.approx(0.94)


def test_a_weight_at_the_floor_comes_back():
    v = torch.tensor([0.997, 0.001, 0.002], dtype=torch.float64)
    d = torch.tensor([1.0, -1.0, 0.0], dtype=torch.float64)
    end = v - 2.0 * bisls.Simplex().bend(v, d, 2.0, Vector([v]))
    assert float(end[1]) > 5 * 0.001


def test_a_point_that_rounding_left_outside_still_has_a_ray():
    v = torch.tensor([1.0001, -0.0001, 0.0], dtype=torch.float64)
    for floor in (0.0, 1e-3):
        bent = bisls.Simplex(floor).bend(v, torch.tensor([1.0, -1.0, 0.5], dtype=torch.float64), 1.0, Vector([v]))
        assert torch.isfinite(bent).all()
        assert float(bent.sum()) == pytest.approx(0.0, abs=1e-12)


def test_what_cannot_be_weights_is_refused():
    with pytest.raises(ValueError, match=r"`Simplex\(floor=1.0\)`: floor must lie in \[0, 1\)"):
        bisls.Simplex(1.0)
    with pytest.raises(ValueError, match=r"times the size of the parameter \(4\) must be below 1"):
        bisls.Simplex(0.3).project(torch.zeros(4), Vector([torch.zeros(4)]))
    x, y = torch.tensor([0.5, 0.6], requires_grad=True), torch.tensor([1.0], requires_grad=True)
    with pytest.raises(ValueError, match="start outside their bounds"):
        bisls.Bilevel(lambda _: (y**2).sum(), lambda _: ((y - x[0]) ** 2).sum(), [x], [y], upper_bounds=bisls.Simplex())


def mixed(noise: float = 0.0):
    """Three sources with means -1, 0.5, 2; y is their weighted mean, the target 0.8: no weight but that of the last is 0 or 1."""
    x = torch.full((3,), 1 / 3, dtype=torch.float64, requires_grad=True)
    y = torch.tensor([0.3], dtype=torch.float64, requires_grad=True)
    means = torch.tensor([-1.0, 0.5, 2.0], dtype=torch.float64)
    problem = bisls.Bilevel(
        lambda b: ((y - 1.6 - noise * b) ** 2).sum(),
        lambda b: 0.5 * (x * (y - means - noise * b) ** 2).sum(),
        [x],
        [y],
        upper_bounds=bisls.Simplex(),
    )
    rng = torch.Generator().manual_seed(1)
    return problem, lambda: torch.randn((), generator=rng, dtype=torch.float64)


@pytest.mark.parametrize("make", [bisls.BiSLS, bisls.Alternating])
def test_a_mixture_is_found_and_its_weights_stay_weights(make):
    problem, _ = mixed()
    solver = make(problem) if make is bisls.BiSLS else make(problem, upper_step=bisls.Constant(0.03))
    (x,) = problem.x.tensors
    for _ in range(100):
        solver.step(torch.zeros((), dtype=torch.float64), torch.zeros((), dtype=torch.float64))
        assert float(x.detach().sum()) == pytest.approx(1.0, abs=1e-12)
        assert float(x.detach().min()) >= 1e-3
    mean = float(x.detach() @ torch.tensor([-1.0, 0.5, 2.0], dtype=torch.float64))
    assert mean == pytest.approx(1.6, abs=0.02)


def test_the_mean_of_x_is_kept_saved_and_resumed(tmp_path):
    def run(steps, averaged, **more):
        problem, draw = mixed(noise=0.3)
        seen = []
        look = lambda record, state: seen.append(problem.x.read())  # noqa: E731
        solver = bisls.Alternating(problem, upper_step=bisls.Constant(0.02))
        options = {"progress": False, "on_failure": "ignore", "tol": None, **more}
        bisls.fit(solver, draw, draw, steps, callbacks=[averaged, look], **options)
        return seen

    whole = bisls.Averaged(after=4)
    seen = run(12, whole)
    assert whole.count == 8
    assert torch.allclose(whole.mean[0], torch.stack(seen[4:]).mean(0), rtol=1e-12)
    assert float(whole.mean[0].sum()) == pytest.approx(1.0, abs=1e-12)
    assert not torch.allclose(whole.mean[0], seen[-1], rtol=1e-4)

    first = bisls.Averaged(after=4)
    run(7, first)
    file = io.BytesIO()
    torch.save(first.state_dict(), file)
    file.seek(0)
    second = bisls.Averaged(after=4)
    second.load_state_dict(torch.load(file, weights_only=True))
    assert second.count == 3
    for k, x in enumerate(seen[7:], 7):  # go on with the points of the whole run
        problem, _ = mixed()
        problem.x.write_(x)
        state = type("State", (), {"solver": type("Made", (), {"problem": problem})})
        second.step(type("Record", (), {"k": k}), state)
    assert torch.equal(second.mean[0], whole.mean[0])
    with pytest.raises(ValueError, match="lacks count"):
        second.load_state_dict({})
    assert second.count == 8
    with pytest.raises(ValueError, match=r"`Averaged\(after=-1\)`"):
        bisls.Averaged(-1)
    assert math.isfinite(float(second.mean[0].sum()))


def test_a_run_that_is_resumed_has_the_same_mean(tmp_path):
    def run(steps, resume):
        problem, _ = mixed()
        averaged = bisls.Averaged()
        batch = torch.zeros((), dtype=torch.float64)
        solver = bisls.Alternating(problem, upper_step=bisls.Constant(0.02))
        bisls.fit(
            solver, batch, batch, steps,
            progress=False, callbacks=[averaged], checkpoint=tmp_path / f"{resume}.pt", resume=resume, tol=None,
        )  # fmt: skip
        return averaged

    whole = run(9, False)
    (tmp_path / "False.pt").unlink(missing_ok=True)
    run(5, True)
    again = run(9, True)
    assert again.count == whole.count == 9
    assert torch.equal(again.mean[0], whole.mean[0])


def test_its_coordinates_without_bounds_take_exponentiated_steps():
    simplex, vector = (
        bisls.Simplex(floor=1e-3),
        Vector([torch.zeros(4, dtype=torch.float64), torch.zeros(2, dtype=torch.float64)]),
    )
    weights = torch.tensor([0.1, 0.2, 0.3, 0.4, 0.75, 0.25], dtype=torch.float64)
    slope = torch.tensor([1.0, -2.0, 0.5, 0.0, 3.0, 1.0], dtype=torch.float64)
    free = simplex.free(weights, vector)
    assert torch.allclose(simplex.placed(free, vector), weights)
    there = simplex.placed(free - 0.7 * slope, vector)
    assert torch.allclose(there, weights - 0.7 * simplex.bend(weights, slope, 0.7, vector))
    moved = [simplex.placed(free + h * torch.eye(6, dtype=torch.float64)[1], vector) @ slope for h in (-1e-6, 1e-6)]
    assert float(simplex.pulled(weights, slope, vector)[1]) == pytest.approx(
        float(moved[1] - moved[0]) / 2e-6, rel=1e-6
    )


@pytest.mark.parametrize("bounds", [bisls.Simplex(), bisls.Box(0.0, 1.0)], ids=repr)
def test_the_first_step_of_the_walk_is_found_inside_the_bounds(bounds):
    """What all weights gain together is no gain on the simplex, and what crosses a bound is none in a box."""
    x, y = (
        torch.tensor([0.0, 0.5, 0.5] if isinstance(bounds, bisls.Box) else [0.2, 0.3, 0.5]).requires_grad_(),
        torch.zeros(3, requires_grad=True),
    )
    goal = torch.tensor([0.1, 0.6, 0.3])
    problem = bisls.Bilevel(
        lambda batch: ((y - goal) ** 2).sum() + (10.0 * x[0] if isinstance(bounds, bisls.Box) else -10.0 * x.sum()),
        lambda batch: ((y - x) ** 2).sum() + 0.1 * (y * batch).sum(),
        [x],
        [y],
        upper_bounds=bounds,
    )
    solver = bisls.BiSLS(problem, hypergrad=bisls.Lookahead())
    draw = torch.Generator().manual_seed(0)
    for _ in range(150):
        solver.step(None, [torch.randn(3, generator=draw) * 0.01 for _ in range(5)])
    found = torch.tensor([0.0, 0.6, 0.3]) if isinstance(bounds, bisls.Box) else goal
    assert torch.allclose(x.detach(), found, atol=0.05)
