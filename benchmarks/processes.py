"""What several processes cost and gain: the same network and global batch in 1, 2 and 4 processes, in turn.

    python benchmarks/processes.py

Each process has one thread. An iteration of `BiSLS` with an AdamW below (10 lower steps, looked through) beside 10 plain steps of
the same AdamW with DistributedDataParallel; the least of several, as ratios to one process. Beside it how many exchanges an
iteration makes and how many bytes a process hands over, counted.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from time import perf_counter

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import bisls
from bisls import ranks

ROUNDS, STEPS = 4, 10
SIZES = {"small": (64, 64, 256), "large": (512, 512, 512)}  # inputs, width, rows of the global batch


def counted() -> dict[str, int]:
    """Count what is exchanged from now on."""
    counts = {"roll calls": 0, "reductions": 0, "bytes": 0}
    gather, reduced = ranks._gather, ranks._reduced

    def counting_gather(data, *rest):
        counts["roll calls"] += 1
        counts["bytes"] += len(data)
        return gather(data, *rest)

    def counting_reduced(tensor):
        counts["reductions"] += 1
        counts["bytes"] += tensor.nbytes
        return reduced(tensor)

    ranks._gather, ranks._reduced = counting_gather, counting_reduced
    return counts


def work(size: str, out: str) -> None:
    torch.set_num_threads(1)
    world = int(os.environ.get("WORLD_SIZE", 1))
    if world > 1:
        dist.init_process_group("gloo")
    rank = dist.get_rank() if world > 1 else 0
    inputs, width, rows = SIZES[size]
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(inputs, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 10))
    network = DistributedDataParallel(model) if world > 1 else model
    draw = torch.Generator().manual_seed(1)
    own = slice(rank * rows // world, (rank + 1) * rows // world)
    images = torch.randn(STEPS, rows, inputs, generator=draw)[:, own].contiguous()
    labels = torch.randint(0, 10, (STEPS, rows), generator=draw)[:, own].contiguous()
    batches = [(images[i], labels[i]) for i in range(STEPS)]
    x = torch.zeros(10, requires_grad=True)

    def weighted(batch):
        return (10 * x.softmax(0)[batch[1]] * cross_entropy(network(batch[0]), batch[1], reduction="none")).mean()

    def plain() -> None:
        for batch in batches:
            optimizer.zero_grad()
            cross_entropy(network(batch[0]), batch[1]).backward()
            optimizer.step()

    optimizer = torch.optim.AdamW(model.parameters(), 1e-4)
    problem = bisls.Bilevel(lambda b: cross_entropy(network(b[0]), b[1]), weighted, [x], model.parameters())
    solver = bisls.BiSLS(problem, lower_optimizer=optimizer, hypergrad=bisls.Lookahead())
    for _ in range(9):  # the looks for a scale are at the beginning
        solver.step(batches[0], batches)
    optimizer.zero_grad()
    times: dict[str, list[float]] = {"plain": [], "bisls": []}
    for _ in range(ROUNDS):
        for name, call in (("plain", plain), ("bisls", lambda: solver.step(batches[0], batches))):
            if world > 1:
                dist.barrier()
            began = perf_counter()
            call()
            times[name].append(perf_counter() - began)
    counts = counted()
    solver.step(batches[0], batches)
    if rank == 0:
        found = {name: min(own) for name, own in times.items()}
        Path(out).write_text(json.dumps({**found, **counts, "parameters": problem.y.numel, "x": x.tolist()}))
    if world > 1:
        dist.barrier()
        dist.destroy_process_group()


def measured(size: str, world: int) -> dict:
    with tempfile.TemporaryDirectory() as folder:
        out = f"{folder}/out.json"
        launcher = ["-m", "torch.distributed.run", f"--nproc-per-node={world}", "--standalone"] if world > 1 else []
        command = [sys.executable, *launcher, __file__, "--work", size, out]
        subprocess.run(command, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"}, stderr=subprocess.DEVNULL)
        return json.loads(Path(out).read_text())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--worlds", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--rounds", type=int, default=2, help="how often all of them are run, in turn")
    parser.add_argument("--work", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.work:
        work(*arguments.work)
        return
    for size in SIZES:
        found: dict[int, list[dict]] = {world: [] for world in arguments.worlds}
        for _ in range(arguments.rounds):
            for world in arguments.worlds:
                found[world].append(measured(size, world))
        one = {name: min(run[name] for run in found[arguments.worlds[0]]) for name in ("plain", "bisls")}
        for world, runs in found.items():
            best = {name: min(run[name] for run in runs) for name in ("plain", "bisls")}
            first = runs[0]
            print(
                f"{size} ({first['parameters']:,} parameters), {world} process(es): plain x {best['plain'] / one['plain']:.2f}, "
                f"BiSLS x {best['bisls'] / one['bisls']:.2f}, BiSLS over plain {best['bisls'] / best['plain']:.1f}; an iteration "
                f"has {first['roll calls']} roll calls, {first['reductions']} reductions, {first['bytes'] / 1e6:.2f} MB"
            )


if __name__ == "__main__":
    main()
