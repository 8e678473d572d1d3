"""Several processes: every rank takes the same decisions, and the result is that of one process on the joined batch."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from processes import spawned
from torch import nn

import bisls
from bisls import optim

pytestmark = pytest.mark.slow

METHODS = [bisls.Implicit(bisls.CG()), bisls.Implicit(bisls.Neumann(20)), bisls.StochasticNeumann(5), bisls.Unrolled(4)]
OPTIMISERS = [optim.Auto, optim.SPSB, optim.SLSB]
ROWS = {0: slice(0, 20), 1: slice(20, 40), None: slice(0, 40)}


def regression(rows: slice):
    rng = torch.Generator().manual_seed(0)
    data = torch.randn(40, 4, generator=rng, dtype=torch.float64)[rows]
    target = torch.randn(40, generator=rng, dtype=torch.float64)[rows]
    return data, target


def bilevel(rows: slice) -> bisls.Bilevel:
    data, target = regression(rows)
    x = torch.zeros(4, dtype=torch.float64, requires_grad=True)
    y = torch.tensor([0.3, -0.2, 0.1, 0.7], dtype=torch.float64, requires_grad=True)
    return bisls.Bilevel(
        lambda _: ((data @ y - target) ** 2).mean(),
        lambda _: ((data @ y + target) ** 2).mean() + (x.exp() * y**2).sum(),
        [x],
        [y],
    )


def train(cls, rows: slice, wrapped: bool) -> list[float]:
    """Ten steps; with DistributedDataParallel and a torch closure, or with a closure that only returns the loss."""
    data, target = regression(rows)
    torch.manual_seed(3)
    model = nn.Linear(4, 1).double()
    net = nn.parallel.DistributedDataParallel(model) if wrapped else model
    optimizer = cls(model.parameters())

    def closure():
        loss = ((net(data)[:, 0] - target) ** 2).mean()
        if wrapped:
            optimizer.zero_grad()
            loss.backward()
        return loss

    for _ in range(10):
        optimizer.step(closure)
    return [*model.weight.flatten().tolist(), optimizer.last_step_size]


def work(rank: int, port: int, queue) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    torch.manual_seed(rank)  # ranks draw different numbers; decisions must not depend on it
    found = [bisls.hypergradient(bilevel(ROWS[rank]), None, None, method) for method in METHODS]
    trained = [train(cls, ROWS[rank], wrapped) for cls in OPTIMISERS for wrapped in (False, True)]
    queue.put((rank, [hg.flat.tolist() for hg in found], [hg.value for hg in found], trained))
    time.sleep(0.1)  # before torch 2.8, leaving a group may lock up while a thread of it still holds a result
    dist.destroy_process_group()


def test_two_processes_agree_with_one_on_the_joined_batch():
    answers = {rank: rest for rank, *rest in spawned(work)}
    assert answers[0] == answers[1]
    flats, values, trained = answers[0]
    for index in (0, 1, 3):  # the stochastic one draws its length, so only the ranks can be compared
        whole = bisls.hypergradient(bilevel(ROWS[None]), None, None, METHODS[index])
        torch.testing.assert_close(torch.tensor(flats[index], dtype=torch.float64), whole.flat, rtol=1e-7, atol=0)
        assert values[index] == pytest.approx(whole.value, rel=1e-12)
    for index, cls in enumerate(OPTIMISERS):
        expected = train(cls, ROWS[None], wrapped=False)
        assert trained[2 * index] == pytest.approx(expected, rel=1e-8)
        assert trained[2 * index + 1] == pytest.approx(expected, rel=1e-8)


def to_the_end(rank: int, port: int, queue) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    ends = []
    for offset in (0.0, 7.3):
        x = torch.tensor([0.5], requires_grad=True)
        y = torch.tensor([2.0, -1.0], requires_grad=True)
        target = 3.0 + (rank - 0.5) * (offset > 0)  # the mean over the ranks is 3
        problem = bisls.Bilevel(
            lambda _, y=y, target=target: ((y - target) ** 2).sum(), lambda _, x=x, y=y: ((y - x) ** 2).sum(), [x], [y]
        )
        history = bisls.fit(bisls.BiSLS(problem), steps=300, progress=False)
        ends.append((len(history), history.stopped, x.item()))
    # one rank in batches: no rank stops; a loader of one batch is none
    rows = torch.full((2,), 3.0)
    problem.upper_loss = lambda batch: ((y - batch) ** 2).sum()
    lengths = []
    for size in (1, 2):
        data = rows if rank == 0 else torch.utils.data.DataLoader(rows, size)
        lengths.append(len(bisls.fit(bisls.BiSLS(problem), data, None, 60, False)))
    queue.put((rank, ends, lengths))
    time.sleep(0.1)
    dist.destroy_process_group()


def test_all_ranks_stop_where_nothing_can_be_gained():
    answers = {rank: rest for rank, *rest in spawned(to_the_end)}
    assert answers[0] == answers[1]
    ends, (batches, one) = answers[0]
    for steps, reason, x in ends:
        assert 10 < steps < 300
        assert reason
        assert x == pytest.approx(3.0, abs=2e-3)
    assert "no change" in ends[0][1]
    assert batches == 60
    assert 10 < one < 60


def default_run() -> list[object]:
    """Twelve iterations of the default, whose small Hessians are written out."""
    problem = bilevel(ROWS[None])
    solver = bisls.BiSLS(problem)
    records = [solver.step(None, None) for _ in range(12)]
    return [repr([replace(record, cost=None) for record in records]), problem.x.read().tolist()]


def work_default(rank: int, port: int, queue) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    queue.put((rank, default_run()))
    time.sleep(0.1)
    dist.destroy_process_group()


def test_two_processes_with_the_same_data_take_the_decisions_of_one_to_the_last_bit():
    """The mean over two equal ranks is exact."""
    answers = dict(spawned(work_default))
    assert answers[0] == answers[1] == default_run()


def test_a_bilevel_run_under_torchrun_equals_one_process_on_the_joined_batches(tmp_path):
    """The example script, as its text says to run it."""
    script, results = str(Path(__file__).parent.parent / "examples" / "data_parallel.py"), {}
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    for name, launcher in {
        "one": [sys.executable],
        "two": [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone"],
    }.items():
        command = [*launcher, script, "--steps", "12", "--out", str(tmp_path / name)]
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
        assert done.returncode == 0, done.stderr
        results[name] = [json.loads(path.read_text()) for path in sorted(tmp_path.glob(f"{name}.*.json"))]
    (one,), (first, second) = results["one"], results["two"]
    assert first == second  # every rank has taken the same decisions, to the last bit
    for key in ("x", "w", "alpha", "beta"):
        assert one[key] == pytest.approx(first[key], rel=1e-8, abs=1e-10), key
    assert max(abs(number) for number in one["x"]) > 0.01  # and it has moved
