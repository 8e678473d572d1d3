"""Clipping with several processes: a mean over the ranks is no clipping, and what is clipped is clipped alike on all of them."""

from __future__ import annotations

import time

import pytest
import torch
import torch.distributed as dist
from processes import spawned
from torch import nn

from bisls import optim

pytestmark = pytest.mark.slow

OPTIMISERS = [optim.Auto, optim.SPSB, optim.SLSB]
HOW = [(wrapped, most) for wrapped in (True, False) for most in (None, 0.3)]
ROWS = {0: slice(0, 20), 1: slice(20, 40), None: slice(0, 40)}


def train(cls, rows: slice, wrapped: bool, most: float | None) -> list[float]:
    """Ten steps; the mean over the ranks is DistributedDataParallel's, or the closure's own."""
    rng = torch.Generator().manual_seed(0)
    data = torch.randn(40, 4, generator=rng, dtype=torch.float64)[rows]
    target = torch.randn(40, generator=rng, dtype=torch.float64)[rows]
    torch.manual_seed(3)
    model = nn.Linear(4, 1).double()
    several = dist.is_initialized()
    net = nn.parallel.DistributedDataParallel(model) if wrapped and several else model
    optimizer = cls(model.parameters())

    def closure():
        loss = ((net(data)[:, 0] - target) ** 2).mean()
        optimizer.zero_grad()
        loss.backward()
        if several and not wrapped:
            for p in model.parameters():
                dist.all_reduce(p.grad)
                p.grad /= 2
        if most is not None:
            nn.utils.clip_grad_norm_(model.parameters(), most)
        return loss

    for _ in range(10):
        optimizer.step(closure)
    return [*model.weight.flatten().tolist(), optimizer.last_step_size]


def work(rank: int, port: int, queue) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    queue.put((rank, [train(cls, ROWS[rank], *how) for cls in OPTIMISERS for how in HOW]))
    time.sleep(0.1)  # before torch 2.8, leaving a group may lock up while a thread of it still holds a result
    dist.destroy_process_group()


def test_two_processes_that_clip_agree_with_one_on_the_joined_batch():
    answers = dict(spawned(work))
    assert answers[0] == answers[1]
    expected = [train(cls, ROWS[None], *how) for cls in OPTIMISERS for how in HOW]
    for found, one in zip(answers[0], expected, strict=True):
        assert found == pytest.approx(one, rel=1e-8)
    for free, clipped in zip(expected[::2], expected[1::2], strict=True):
        assert free != pytest.approx(clipped, rel=1e-2)  # clipping made a difference
