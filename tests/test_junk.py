"""Wrong types and odd numbers: named by the argument that the user wrote, or worked with."""

from __future__ import annotations

from itertools import islice

import numpy as np
import pytest
import torch
from attacks import junk

import bisls
from bisls import optim


def test_every_public_call_is_attacked():
    assert junk.unlisted() == []


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("part", range(8))
def test_a_seeded_slice_of_the_junk(part):
    broken = [
        (case, text) for case in islice(junk.cases(2026), 60 * part, 60 * (part + 1)) if (text := junk.tried(case))
    ]
    assert broken == []


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda p: optim.SPSB([p], lr="1e-3"), "`SPSB(lr='1e-3')`: lr must be"),
        (lambda p: bisls.BiSLS(problem(), alpha=-1), "`BiSLS(alpha=-1)`: alpha must be"),
        (lambda p: bisls.BiSLS(problem(), beta="x"), "`BiSLS(beta='x')`: beta must be"),
        (lambda p: bisls.BiSLS.paper(problem(), shrink=2), "`BiSLS.paper(shrink=2)`: shrink must"),
        (lambda p: bisls.BiSPS(problem(), c=0), "`BiSPS(c=0)`: c must be"),
    ],
)
def test_an_argument_is_named_as_the_user_wrote_it(call, words):
    with pytest.raises(ValueError) as caught:
        call(torch.zeros(2, requires_grad=True))
    assert str(caught.value).startswith(words)


NONE = [torch.ones((), device="meta"), torch.ones(1, device="meta").squeeze()]
SINGLE = [torch.tensor(float("nan")), np.array(0.1), torch.ones((), requires_grad=True), torch.ones((), device="meta")]


@pytest.mark.parametrize("value", NONE)
@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda value: bisls.fit(bisls.BiSLS(problem()), steps=value), "`fit(steps="),
        (lambda value: bisls.BiSLS(problem(), lower_iters=value), "`BiSLS(lower_iters="),
        (lambda value: optim.SPSB([torch.zeros(2, requires_grad=True)], lr=value), "`SPSB(lr="),
        (lambda value: bisls.Armijo(slack=value), "`Armijo(slack="),
    ],
)
def test_a_tensor_on_no_device_is_no_number(call, words, value):
    with pytest.raises(ValueError, match="that holds no number") as caught:
        call(value)
    assert str(caught.value).startswith(words)


@pytest.mark.parametrize("value", SINGLE)
@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda value: bisls.fit(bisls.BiSLS(problem()), callbacks=value), "`fit(callbacks="),
        (optim.Auto, "`Auto(params=...)`"),
        (optim.SPSB, "`SPSB(params=...)`"),
        (lambda value: optim.Auto([{"params": value}]), "`Auto(params="),
        (
            lambda value: bisls.Bilevel(abs, abs, value, [torch.zeros(1, requires_grad=True)]),
            "`Bilevel(upper_params=...)`",
        ),
        (
            lambda value: bisls.Bilevel(abs, abs, [torch.zeros(1, requires_grad=True)], value),
            "`Bilevel(lower_params=...)`",
        ),
    ],
)
def test_a_single_number_is_no_list(call, words, value):
    if words == "`Auto(params=" and isinstance(value, torch.Tensor) and value.requires_grad:
        return  # torch takes a single tensor as the parameters of a group
    with pytest.raises(ValueError) as caught:
        call(value)
    assert str(caught.value).startswith(words)


def problem() -> bisls.Bilevel:
    x, y = torch.ones(2, requires_grad=True), torch.zeros(2, requires_grad=True)
    return bisls.Bilevel(lambda _: ((y - 1) ** 2).sum(), lambda _: ((y - x) ** 2).sum(), [x], [y])


def test_parameters_that_share_memory_through_a_transpose_are_refused():
    whole = torch.randn(3, 4)
    above, below = whole.requires_grad_(), whole.detach().T.requires_grad_()
    with pytest.raises(
        ValueError, match=r"tensor 0 \(shape \(4, 3\)\) shares its memory with tensor 0 of upper_params"
    ):
        bisls.Bilevel(lambda _: above.sum(), lambda _: below.sum(), [above], [below])
    with pytest.raises(ValueError, match="shares its memory with tensor 0"):
        optim.Auto([above, below])
    columns = [whole.detach()[:, i].requires_grad_() for i in range(4)]  # neighbours that have no number in common
    assert optim.Auto(columns)


def test_a_parameter_that_is_frozen_in_mid_run_is_named_and_nothing_moves():
    made = problem()
    solver = bisls.BiSLS(made)
    solver.step(None, None)
    made.y.tensors[0].requires_grad_(False)
    before = made.x.read().clone(), made.y.read().clone()
    with pytest.raises(
        ValueError, match=r"`Bilevel\(lower_params=...\)`: tensor 0 \(shape \(2,\)\) no longer requires grad"
    ):
        solver.step(None, None)
    assert torch.equal(made.x.read(), before[0])
    assert torch.equal(made.y.read(), before[1])
    made.y.tensors[0].requires_grad_(True)
    assert solver.step(None, None).k == 1


@pytest.mark.parametrize("scale", [1e-30, 1e-12, 1e12, 1e30])
def test_auto_trains_whatever_the_unit_of_the_loss(scale):
    w = torch.tensor([3.0, -2.0], dtype=torch.float64, requires_grad=True)
    curvature = torch.tensor([1.0, 5.0], dtype=torch.float64)
    optimizer = optim.Auto([w])
    for _ in range(200):
        optimizer.step(lambda: scale * (curvature * w**2).sum())
    optimizer.eval()
    assert w.norm().item() < 0.1


def test_an_f_that_is_infinite_where_the_lower_problem_leads_ends_in_an_error():
    """Not in a circle: every second iteration succeeds from the point that the others go back to."""
    x, y = torch.ones(1, requires_grad=True), torch.zeros(1, requires_grad=True)
    made = bisls.Bilevel(
        lambda _: torch.where(y < 0.5, y**2 + x**2, torch.full_like(y, torch.inf)).sum(),
        lambda _: ((y - 1.0 - 0.0 * x) ** 2).sum() + 1e-3 * (x**2 * y**2).sum(),
        [x],
        [y],
    )
    with pytest.raises(bisls.SolverError, match="not finite"):
        bisls.fit(bisls.BiSLS(made, patience=5), steps=500, progress=False, on_failure="ignore")
    assert torch.isfinite(made.x.read()).all()
    assert torch.isfinite(made.y.read()).all()
