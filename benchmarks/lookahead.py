"""What looking through the lower steps costs: time of an iteration over plain training of the same steps, and memory in copies.

    python benchmarks/lookahead.py            times (in turn, one process) and peaks (a process each)

A network of about a million parameters with two hidden layers below, 128 rows a batch, a weight for each of 2,000 samples above.
Plain training is `torch.optim` alone on the same batches. A copy is the memory of the network's parameters.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from statistics import median
from typing import Any

import torch
from scaling import _forget_peak as forget_peak
from scaling import _peak as highest
from scaling import _resident as resident
from torch import nn
from torch.nn import functional

import bisls

WIDTH, ROWS, BATCH = 900, 2000, 128


def problem() -> tuple[bisls.Bilevel, nn.Module, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(200, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 10))
    rows, weights = torch.randn(ROWS, 200), torch.zeros(ROWS, requires_grad=True)
    labels = rows[:, :10].argmax(1)

    def lower(chosen: torch.Tensor) -> torch.Tensor:
        losses = functional.cross_entropy(model(rows[chosen]), labels[chosen], reduction="none")
        return (weights[chosen].sigmoid() * losses).mean()

    upper = lambda chosen: functional.cross_entropy(model(rows[chosen]), labels[chosen])  # noqa: E731
    return bisls.Bilevel(upper, lower, [weights], model.parameters()), model, rows, labels


def batches(k: int, steps: int) -> list[torch.Tensor]:
    rng = torch.Generator().manual_seed(k)
    return [torch.randperm(ROWS, generator=rng)[:BATCH] for _ in range(steps + 1)]


def made(name: str, steps: int) -> Any:
    """An iteration, as a function of its number."""
    task, model, _, _ = problem()
    optimizers = {
        "SGD": lambda: torch.optim.SGD(model.parameters(), 0.05),
        "Adam": lambda: torch.optim.Adam(model.parameters(), 1e-3),
    }
    kind, _, below = name.partition(", ")
    if kind == "plain":
        optimizer = optimizers[below]()

        def iteration(k: int) -> None:
            for batch in batches(k, steps)[1:]:
                optimizer.zero_grad()
                task.lower_loss(batch).backward(inputs=list(model.parameters()))
                optimizer.step()

        return iteration
    lower = {"lower_optimizer": optimizers[below]()} if below in optimizers else {}
    if kind == "BiSLS":
        solver = bisls.BiSLS(task, **lower)
    else:
        method = bisls.Lookahead(None if kind == "all steps" else int(kind.split()[0]))
        solver = bisls.Alternating(task, upper_step=bisls.Constant(0.01), hypergrad=method, **lower)

    def step(k: int) -> None:
        first, *rest = batches(k, steps)
        solver.step(first, rest)

    return step


def times(steps: int, rounds: int) -> dict[str, float]:
    names = [f"{kind}, {below}" for below in ("SGD", "Adam") for kind in ("plain", "1 step", "all steps", "BiSLS")] + [
        "BiSLS"
    ]
    calls = {name: made(name, steps) for name in names}
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for k in range(10 + rounds):
        for name, call in calls.items():
            start = time.perf_counter()
            call(k)
            if k >= 10:  # the first iterations look for the scale of a step
                seconds[name].append(time.perf_counter() - start)
    found = {name: median(own) for name, own in seconds.items()}
    return {name: found[name] / found[f"plain, {name.partition(', ')[2] or 'Adam'}"] for name in names}


def peak(name: str, steps: int) -> float:
    """The memory of a few iterations beyond what was there before, in copies of the network; in a process of its own."""
    call = made(name, steps)
    copy = sum(tensor.numel() * 4 for tensor in problem()[0].y.tensors)
    forget_peak()
    before = resident()
    for k in range(4):
        call(k)
    return (highest() - before) / copy


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--peak", nargs=2, metavar=("NAME", "STEPS"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.peak:
        print(json.dumps(peak(arguments.peak[0], int(arguments.peak[1]))))
        return
    print(
        "time over plain training, T = 10: "
        + ", ".join(f"{n}: {t:.2f}" for n, t in times(10, arguments.rounds).items())
    )
    for name in ("all steps, SGD", "all steps, Adam", "10 steps, Adam", "BiSLS, SGD", "BiSLS, Adam", "BiSLS"):
        run = subprocess.run(
            [sys.executable, __file__, "--peak", name, "20"], capture_output=True, text=True, check=True
        )
        print(f"peak, T = 20, {name}: {json.loads(run.stdout):.1f} copies")


if __name__ == "__main__":
    main()
