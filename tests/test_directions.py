"""Directions: Adam against torch's own, L-BFGS against the inverse Hessian."""

from __future__ import annotations

import pytest
import torch

import bisls
from bisls import Line, Memory

SCALES = torch.tensor([1.0, 40.0, 7.0, 0.3], dtype=torch.float64)
CENTRE = torch.tensor([1.0, -2.0, 0.5, 3.0], dtype=torch.float64)


def gradient(x):
    return SCALES * (x - CENTRE)


def value(x):
    return 0.5 * (SCALES * (x - CENTRE) ** 2).sum().item() + 1.0


def test_steepest_is_the_gradient():
    g = torch.tensor([3.0, -1.0])
    heading = bisls.Steepest().head(g, torch.zeros(2), {})
    assert torch.equal(heading.search, g)
    assert torch.equal(heading.move, g)


@pytest.mark.parametrize("betas", [(0.9, 0.999), (0.0, 0.99), (0.5, 0.9)])
def test_adam_moves_as_torch_does(betas):
    x, theirs = torch.zeros(4, dtype=torch.float64), torch.zeros(4, dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.Adam([theirs], lr=0.05, betas=betas)
    state = {}
    for _ in range(30):
        heading = bisls.Adam(betas=betas, search_momentum=False).head(gradient(x), x, state)
        state = heading.state
        x = x - 0.05 * heading.move
        theirs.grad = gradient(theirs.detach())
        optimizer.step()
        torch.testing.assert_close(x, theirs.detach(), rtol=1e-10, atol=1e-12)


def test_adam_searches_where_it_says():
    x, state = torch.zeros(4, dtype=torch.float64), {}
    ours, paper = bisls.Adam(betas=(0.9, 0.99)), bisls.Adam(betas=(0.9, 0.99), search_momentum=False)
    first = ours.head(gradient(x), x, state)
    # a gradient that turned round: the momentum still points the other way
    turned = -0.2 * gradient(x)
    mine, theirs = ours.head(turned, x, first.state), paper.head(turned, x, first.state)
    assert turned.dot(theirs.move) < 0  # the paper's move ascends here,
    assert turned.dot(theirs.search) > 0  # though its search descends;
    assert turned.dot(mine.search) > 0  # ours searches and moves along what descends
    assert torch.equal(mine.search, mine.move)
    again = ours.head(gradient(x), x, first.state)
    assert torch.equal(again.search, again.move)  # the direction really taken
    assert torch.equal(again.move, paper.head(gradient(x), x, first.state).move)


@pytest.mark.parametrize("direction", [bisls.Steepest(), bisls.Adam(), bisls.LBFGS()], ids=repr)
def test_every_direction_descends_and_solves_with_an_untuned_search(direction):
    x, state, memory = torch.zeros(4, dtype=torch.float64), {}, Memory()
    for _ in range(300):
        g = gradient(x)
        heading = direction.head(g, x, state)
        state = heading.state
        slope = -g.dot(heading.search).item()
        assert slope <= 0
        step = bisls.Armijo().choose(Line(value(x), slope, lambda t, x=x, d=heading.search: value(x - t * d)), memory)
        memory = step.memory
        x = x - step.size * heading.move
    assert value(x) - 1.0 < 1e-6 * (value(torch.zeros_like(x)) - 1.0)


def test_lbfgs_needs_few_iterations_and_keeps_its_memory_short():
    x, state, memory = torch.zeros(4, dtype=torch.float64), {}, Memory()
    for k in range(30):
        heading = bisls.LBFGS(history=5).head(gradient(x), x, state)
        state = heading.state
        slope = -gradient(x).dot(heading.search).item()
        start = bisls.Armijo(start=1.0 if k else None, restart=bisls.Restart())
        step = start.choose(Line(value(x), slope, lambda t, x=x, d=heading.search: value(x - t * d)), memory)
        x = x - step.size * heading.move
        if value(x) - 1.0 < 1e-12:
            break
    assert k < 25
    assert len(state["moves"]) <= 5


def test_lbfgs_leaves_out_negative_curvature_and_never_ascends():
    direction, state = bisls.LBFGS(), {}
    x = torch.tensor([0.3, -0.2], dtype=torch.float64)
    for _ in range(10):
        g = torch.stack([4 * x[0] ** 3 - 2 * x[0], -torch.cos(3 * x[1]) * 3])  # not convex
        heading = direction.head(g, x, state)
        state = heading.state
        assert heading.move.dot(g) > 0
        x = x - 0.1 * heading.move
