"""A lasso below, a weight a group: coordinate descent beside y = u - v inside a box; what both evaluate, and how long it takes.

    python benchmarks/lasso.py

Made-up tables, as many rows held out as trained on. Both routes run `BiSLS` with nothing set, from the same weights; each once
without being timed. Counted is up to the first F within 1 % of the lower of both ends; seconds are process times of one thread.
Nothing was chosen by these tables.
"""

from __future__ import annotations

import os
import time
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

import bisls

TABLES = [  # rows, columns of each group, columns that matter, logarithm of the first weights
    (80, [6, 6], 3, -2.0),
    (150, [10, 200], 6, -2.0),
    (100, [10] * 6, 20, -2.0),
    (200, [100] * 5, 60, -2.0),
    (2000, [20] * 10, 30, -2.0),
]
STEPS, ENOUGH = 40, 1.01


def problem(rows: int, sizes: list[int], strong: int, penalty: float, split: bool) -> tuple[bisls.Bilevel, Any]:
    generator = torch.Generator().manual_seed(0)
    columns = sum(sizes)
    X = torch.randn(2 * rows, columns, dtype=torch.float64, generator=generator)
    y = X[:, :strong].sum(1) + 0.5 * torch.randn(2 * rows, dtype=torch.float64, generator=generator)
    index = torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes))
    log = torch.full((len(sizes),), penalty, dtype=torch.float64, requires_grad=True)
    parts = [torch.zeros(columns, dtype=torch.float64, requires_grad=True) for _ in range(1 + split)]

    def loss(at: slice) -> torch.Tensor:
        w = parts[0] - parts[1] if split else parts[0]
        return 0.5 * ((X[at] @ w - y[at]) ** 2).mean()

    if not split:
        return bisls.Bilevel(loss, loss, [log], parts, lower_l1=lambda: log.exp()[index]), log

    def below(at: slice) -> torch.Tensor:
        return loss(at) + (log.exp()[index] * (parts[0] + parts[1])).sum()

    return bisls.Bilevel(loss, below, [log], parts, lower_bounds=bisls.Box(low=0.0)), log


def run(table: Any, split: bool) -> list[tuple[float, float, bisls.Cost]]:
    """F, seconds and what was evaluated after each iteration."""
    rows = table[0]
    solver = bisls.BiSLS(problem(*table, split)[0])
    began, seen = time.process_time(), []
    for _ in range(STEPS):
        record = solver.step(slice(rows, 2 * rows), slice(0, rows))
        seen.append((record.upper_value, time.process_time() - began, solver.oracle.cost.copy()))
    return seen


def main() -> None:
    torch.set_num_threads(1)
    print(
        "| rows x columns, groups | route | F at the end | iterations | lower gradients | Hessian products | seconds |"
    )
    print("|---" * 7 + "|")
    for table in TABLES:
        rows, sizes = table[:2]
        for split in (False, True):
            run(table, split)
        found = {split: run(table, split) for split in (False, True)}
        ends = {split: min(value for value, _, _ in seen) for split, seen in found.items()}
        goal = ENOUGH * min(ends.values())
        for split, seen in found.items():
            at = next((k for k, (value, _, _) in enumerate(seen) if value <= goal), None)
            name = "u - v in a box" if split else "coordinate descent"
            line = f"| {rows} x {sum(sizes)}, {len(sizes)} | {name} | {ends[split]:.5f} "
            if at is None:
                print(f"{line}| not in {STEPS} | | | |", flush=True)
                continue
            _, seconds, cost = seen[at]
            gradients = cost.lower_gradients + cost.lower_graphs
            print(f"{line}| {at + 1} | {gradients} | {cost.hessian_products} | {seconds:.3f} |", flush=True)


if __name__ == "__main__":
    main()
