"""Ranks that do not fit together: every one of them ends, by itself and within seconds, with words that say why."""

from __future__ import annotations

import time
from copy import deepcopy
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from processes import spawned
from torch import nn
from torch.utils.data import DataLoader

import bisls
from bisls import optim
from bisls.ranks import RankError

pytestmark = pytest.mark.slow

WITHIN = 120.0  # seconds for all that a pair of busy processes tries, with their start; the group waits ten minutes


def problem(start: float = 0.0, rows: int = 8, upper=None, lower=None) -> bisls.Bilevel:
    rng = torch.Generator().manual_seed(0)
    data, target = torch.randn(rows, 3, generator=rng), torch.randn(rows, generator=rng)
    x = torch.full((3,), start, requires_grad=True)
    y = torch.tensor([0.3, -0.2, 0.1], requires_grad=True)
    return bisls.Bilevel(
        upper or (lambda _: ((data @ y - target) ** 2).mean()),
        lower or (lambda _: ((data @ y + target) ** 2).mean() + (x.exp() * y**2).sum()),
        [x],
        [y],
    )


def said(call) -> str:
    """What a call raises, or that it ended."""
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "ended"


def failing(rank: int, wrong: int, after: int):
    """A loss that raises on one rank, at its call of that number."""
    calls = []

    def loss(_):
        calls.append(1)
        if rank == wrong and len(calls) > after:
            raise ZeroDivisionError("the well is dry")

    return loss


def broken_loss(rank: int, level: str) -> bisls.Bilevel:
    fail, made = failing(rank, 1, 5), problem()
    original = getattr(made, f"{level}_loss")

    def loss(batch):
        fail(batch)
        return original(batch)

    setattr(made, f"{level}_loss", loss)
    return made


class Breaks(bisls.Callback):
    """A callback that raises on one rank."""

    def __init__(self, rank: int, hook: str):
        setattr(self, hook, self.fail if rank == 1 else lambda *_: None)

    def fail(self, *_):
        raise ZeroDivisionError("the bell is cracked")


def run(made: bisls.Bilevel, upper=None, lower=None, **more) -> None:
    more = {"steps": 6, "progress": False, **more}
    bisls.fit(bisls.BiSLS(made, lower_iters=2), upper, lower, **more)


def batches(rank: int):
    """A loader on the first rank, an iterator that ends on the other."""
    rows = torch.arange(8.0)
    return DataLoader(rows, 2) if rank == 0 else iter(DataLoader(rows, 2))


def trained(rank: int, params, fail: bool = False) -> None:
    optimizer = optim.SPSB(params)
    check = failing(rank, 1 if fail else -1, 2)

    def closure():
        check(None)
        return sum((p - rank) @ (p - rank) for p in params)

    for _ in range(4):
        optimizer.step(closure)


def with_settings(rank: int, cls, **options) -> None:
    w = torch.zeros(2, requires_grad=True)
    cls([w], **options).step(lambda: ((w - 1) ** 2).sum())


def grouped(rank: int) -> None:
    a, b = torch.zeros(2, requires_grad=True), torch.zeros(2, requires_grad=True)
    optimizer = optim.SPSB([{"params": [a], "lr": 0.1}, {"params": [b], "lr": 0.1 * (1 + rank)}])
    optimizer.step(lambda: ((a + b - 1) ** 2).sum())


def below(rank: int, **options) -> None:
    made = problem()
    run_with(bisls.BiSLS(made, lower_iters=2, lower_optimizer=torch.optim.SGD(made.y.tensors, **options)))


def run_with(solver: bisls.Solver) -> None:
    bisls.fit(solver, steps=3, progress=False)


def reloaded(rank: int, everywhere: bool) -> None:
    """The state of another iteration, on one rank, in mid-run."""
    made = problem()
    solver = bisls.BiSLS(made, lower_iters=2)
    first = solver.state_dict()
    solver.step(None, None)
    if everywhere or rank == 1:
        solver.load_state_dict(first if rank == 1 else solver.state_dict())
    solver.step(None, None)


def optimiser_reloaded(rank: int) -> None:
    w = torch.zeros(2, requires_grad=True)
    optimizer = optim.SPSB([w])
    states = []
    for _ in range(2):
        optimizer.step(lambda: ((w - 1) ** 2).sum())
        states.append(deepcopy(optimizer.state_dict()))
    optimizer.load_state_dict(states[1 - rank])
    optimizer.step(lambda: ((w - 1) ** 2).sum())


def zero():
    from torch.distributed.optim import ZeroRedundancyOptimizer  # it scripts, which warns

    return ZeroRedundancyOptimizer


def redundant(rank: int) -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
    optimizer = zero()(model.parameters(), optim.SPSB, lr=1.0)
    optimizer.step(lambda: model(torch.ones(1, 2)).square().sum())


def redundant_below(rank: int) -> None:
    made = problem()
    bisls.BiSLS(made, lower_optimizer=zero()(made.y.tensors, torch.optim.Adam, lr=0.1))


def cut_up(rank: int):
    from torch.distributed.fsdp import fully_shard

    return fully_shard(nn.Linear(4, 4), mesh=dist.device_mesh.init_device_mesh("cpu", (2,)))


CASES = {
    "x differs": lambda rank: run(problem(start=0.1 * rank)),
    "x differs, step": lambda rank: bisls.BiSLS(problem(start=0.1 * rank)).step(None, None),
    "x differs, hypergradient": lambda rank: bisls.hypergradient(
        problem(start=0.1 * rank), None, None, bisls.Implicit(bisls.CG())
    ),
    "x differs, optimiser": lambda rank: trained(rank, [torch.full((2,), float(rank), requires_grad=True)]),
    "shapes differ, optimiser": lambda rank: trained(rank, [torch.zeros(2 + rank, requires_grad=True)]),
    "another method": lambda rank: bisls.BiSLS(problem(), lower_iters=2 + rank).step(None, None),
    "a rate": lambda rank: with_settings(rank, optim.SPSB, lr=0.01 * (1 + rank)),
    "a decay": lambda rank: with_settings(rank, optim.Auto, weight_decay=0.5 * rank),
    "a direction": lambda rank: with_settings(rank, optim.SLSB, maximize=rank == 1),
    "a rate of a group": grouped,
    "a rate below": lambda rank: below(rank, lr=0.1 * (1 + rank)),
    "a rate below, a tensor": lambda rank: below(rank, lr=torch.tensor(0.1 + 1e-6 * rank)),
    "another momentum below": lambda rank: below(rank, lr=0.1, momentum=0.5 * rank),
    "another iteration": lambda rank: reloaded(rank, True),
    "another iteration on one rank": lambda rank: reloaded(rank, False),
    "another step of an optimiser": optimiser_reloaded,
    "more steps": lambda rank: run(problem(), steps=3 + rank),
    "the upper loss raises": lambda rank: run(broken_loss(rank, "upper")),
    "the lower loss raises": lambda rank: run(broken_loss(rank, "lower")),
    "a closure raises": lambda rank: trained(rank, [torch.zeros(2, requires_grad=True)], fail=True),
    "a callback raises": lambda rank: run(problem(), callbacks=[Breaks(rank, "step")]),
    "a callback raises at the start": lambda rank: run(problem(), callbacks=[Breaks(rank, "start")]),
    "a callback raises at the end": lambda rank: run(problem(), callbacks=[Breaks(rank, "end")]),
    "an argument of one rank": lambda rank: run(problem(), on_failure="warn" if rank == 0 else "stop"),
    "an iterator and a loader": lambda rank: run(problem(), batches(rank)),
    "an iterator and a loader below": lambda rank: run(problem(), None, batches(rank)),
    "ZeroRedundancyOptimizer": redundant,
    "ZeroRedundancyOptimizer below": redundant_below,
    "FSDP2": lambda rank: bisls.Bilevel(
        lambda _: 0.0, lambda _: 0.0, cut_up(rank).parameters(), [torch.zeros(1, requires_grad=True)]
    ),
    "FSDP2, optimiser": lambda rank: optim.Auto(cut_up(rank).parameters()),
}


def work(rank: int, port: int, queue) -> None:
    torch.set_num_threads(1)
    where = f"tcp://127.0.0.1:{port}"
    dist.init_process_group("gloo", init_method=where, rank=rank, world_size=2, timeout=timedelta(minutes=10))
    answers = {}
    for name, case in CASES.items():
        began = time.monotonic()
        answers[name] = (said(lambda case=case: case(rank)), time.monotonic() - began)
    # after all that the group is still of use
    made = problem(start=0.5 * rank)
    run(made, broadcast=True)
    answers["broadcast"] = (str(made.x.read().tolist()), 0.0)
    queue.put((rank, answers))
    time.sleep(0.1)
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def answers():
    return dict(spawned(work, within=WITHIN))


BOTH = {
    "x differs": "ValueError: `fit(...)`: the parameters are not the same on every rank; those of rank 0 differ from tensor 0 "
    "of upper_params (shape (3,)) on rank 1.",
    "x differs, step": "ValueError: `BiSLS.step(...)`: the parameters are not the same on every rank",
    "x differs, hypergradient": "ValueError: `hypergradient(...)`: the parameters are not the same on every rank",
    "x differs, optimiser": "ValueError: `SPSB.step(...)`: the parameters are not the same on every rank",
    "shapes differ, optimiser": "ValueError: `SPSB.step(...)`: tensor 0 of params is not the same on every rank: float32[2] on "
    "rank 0, float32[3] on rank 1",
    "another method": "ValueError: `BiSLS.step(method=...)`: method is not the same on every rank",
    "a rate": "ValueError: `SPSB(lr=...)`: lr is not the same on every rank (0.01 on rank 0, 0.02 on rank 1); pass the same on",
    "a decay": "ValueError: `Auto(weight_decay=...)`: weight_decay is not the same on every rank (0.0 on rank 0, 0.5 on rank 1)",
    "a direction": "ValueError: `SLSB(maximize=...)`: maximize is not the same on every rank (False on rank 0, True on rank 1)",
    "a rate of a group": "ValueError: `SPSB(lr=...)`: lr is not the same on every rank ([0.1, 0.1] on rank 0, [0.1, 0.2] on",
    "a rate below": "ValueError: `BiSLS.step(lower_optimizer=...)`: lower_optimizer is not the same on every rank",
    "a rate below, a tensor": "ValueError: `BiSLS.step(lower_optimizer=...)`: lower_optimizer is not the same on every rank",
    "another momentum below": "ValueError: `BiSLS.step(method=...)`: method is not the same on every rank",
    "another iteration": "ValueError: `BiSLS.step(k=...)`: k is not the same on every rank (1 on rank 0, 0 on rank 1)",
    "another iteration on one rank": "RankError: the ranks are out of step",
    "another step of an optimiser": "ValueError: `SPSB(k=...)`: k is not the same on every rank (2 on rank 0, 1 on rank 1)",
    "more steps": "ValueError: `fit(steps=...)`: steps is not the same on every rank (3 on rank 0, 4 on rank 1)",
    "ZeroRedundancyOptimizer": "ZeroRedundancyOptimizer does, cannot be used here",
    "ZeroRedundancyOptimizer below": "ValueError: `BiSLS(lower_optimizer=...)`: ZeroRedundancyOptimizer keeps a part of its ",
    "FSDP2": "ValueError: `Bilevel(upper_params=...)`: tensor 0 (shape (4, 4)) is a DTensor (fully_shard of FSDP2",
    "FSDP2, optimiser": "ValueError: `Auto(params=...)`: tensor 0 (shape (4, 4)) is a DTensor (fully_shard of FSDP2",
}


@pytest.mark.parametrize("name", BOTH)
def test_what_does_not_fit_is_refused_on_every_rank(answers, name):
    if "FSDP2" in name and torch.__version__ < "2.6":
        pytest.skip("torch.distributed.fsdp has no fully_shard")
    for rank in range(2):
        text, seconds = answers[rank][name]
        assert BOTH[name] in text
        assert seconds < WITHIN / 2  # who waits for the other rank waits for ten minutes


RAISED = {
    "the upper loss raises": "ZeroDivisionError: the well is dry",
    "the lower loss raises": "ZeroDivisionError: the well is dry",
    "a closure raises": "ZeroDivisionError: the well is dry",
    "a callback raises": "ZeroDivisionError: the bell is cracked",
    "a callback raises at the start": "ZeroDivisionError: the bell is cracked",
    "a callback raises at the end": "ZeroDivisionError: the bell is cracked",
    "an argument of one rank": "ValueError: `fit(on_failure='stop')`: on_failure must be",
}


@pytest.mark.parametrize("name", RAISED)
def test_what_one_rank_raises_is_heard_by_the_other(answers, name):
    own, heard = answers[1][name], answers[0][name]
    assert own[0].startswith(RAISED[name])
    assert heard[0].startswith(f"{RankError.__name__}: rank 1 raised {RAISED[name]}")
    assert max(own[1], heard[1]) < 8.0  # nobody waited for a time-out


@pytest.mark.parametrize("name", ["an iterator and a loader", "an iterator and a loader below"])
def test_data_that_end_on_one_rank_end_the_run_on_all(answers, name):
    assert [answers[rank][name][0] for rank in range(2)] == ["ended", "ended"]


def test_parameters_can_be_made_the_same_on_request(answers):
    assert answers[0]["broadcast"] == answers[1]["broadcast"]


def silent(rank: int, port: int, queue) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    solver = bisls.BiSLS(problem())
    solver.step(None, None)
    if rank == 1:  # a process that ends without a word, in the middle of somebody else's iteration
        queue.put((rank, ""))
        time.sleep(1.0)
        return
    queue.put((rank, said(lambda: solver.step(None, None))))


def test_a_rank_that_ends_without_a_word_is_missed():
    text = dict(spawned(silent, within=WITHIN))[0]
    assert text.startswith("RankError: another rank has ended, or cannot be reached")
