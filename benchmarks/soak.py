"""Does memory stay flat? Twenty thousand iterations of small problems, and what is still alive after each stretch of them.

step      BiSLS, one batch for all steps, `solver.step` in a loop
batches   BiSLS, a batch for each step, `solver.step` in a loop
fit       BiSLS, batches, through `fit` with callbacks; the history keeps a record an iteration, which is told apart
bisps     BiSPS with two samples, batches
auto      bisls.optim.Auto on batches

    python benchmarks/soak.py                      all of them, 20,000 iterations each
    python benchmarks/soak.py --kinds step auto    some of them
    python benchmarks/soak.py --quick              a few hundred iterations: a look at whether it runs

Every kind runs in a process of its own. After a tenth of the iterations (allocators and caches have filled by then), and ten
times more, three things are counted after a collection: blocks of Python memory, which sees every object down to a number;
objects that the collector tracks, tensors among them; and the resident set, which alone sees what C++ holds, such as a
graph of autograd. A leak of one object an iteration would show as 1 or more in the first column. Results: out/soak.json,
out/soak.md.
"""

from __future__ import annotations

import argparse
import gc
import json
import platform
import subprocess
import sys
import tempfile
import time
import tracemalloc
from array import array
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

import bisls
from bisls import tasks

KINDS = ("step", "batches", "fit", "bisps", "auto")
BLOCKS, OBJECTS, BYTES = 0.05, 0.05, 30.0  # what may be left over an iteration: noise of the counts, not a leak
SAMPLES = 10
COUNTED = ("k", "blocks", "objects", "resident")


def alive() -> tuple[int, int, int, int]:
    """Nothing, blocks of Python memory, objects that the collector tracks, and bytes of the resident set."""
    gc.collect()
    resident = 0
    with suppress(OSError, ValueError):  # elsewhere than on Linux the first two have to do
        resident = int(Path("/proc/self/statm").read_text().split()[1]) * 4096
    return 0, sys.getallocatedblocks(), len(gc.get_objects()), resident


def small(batch_size: int | None) -> tasks.Task:
    rng = torch.Generator().manual_seed(0)
    features = torch.randn(48, 3, generator=rng)
    target = features @ torch.tensor([1.0, -2.0, 0.5]) + 0.3 * torch.randn(48, generator=rng)
    parts = (features[:24], target[:24]), (features[24:], target[24:])
    return tasks.ridge_penalties(
        train=parts[0], validation=parts[1], batch_size=batch_size, lower_batch_size=batch_size
    )


def run(kind: str, iterations: int, watch: Callable[[int], None]) -> bisls.History | None:
    """So many iterations; `watch` is called after each. What a user keeps of it comes back."""
    torch.manual_seed(0)
    if kind == "auto":
        return _auto(iterations, watch)
    task = small(None if kind == "step" else 8)
    make = (lambda p: bisls.BiSPS(p, samples=2, lower_iters=2)) if kind == "bisps" else None
    solver = make(task.problem) if make else bisls.BiSLS(task.problem, lower_iters=2)
    if kind != "fit":
        upper, lower = task.upper_data, task.lower_data
        for k in range(1, iterations + 1):
            if kind == "step":
                solver.step(upper, lower, upper)
            else:
                solver.step(next(upper), [next(lower), next(lower)])
            watch(k)
        return None
    with tempfile.TemporaryDirectory() as folder:
        callbacks = [
            bisls.JSONLines(Path(folder) / "log.jsonl"),
            bisls.EarlyStopping(patience=10**9),
            lambda record, state: watch(record.k + 1),
        ]
        return bisls.fit(
            solver, task.upper_data, task.lower_data, iterations, False, callbacks, on_failure="ignore", tol=None
        )


def _auto(iterations: int, watch: Callable[[int], None]) -> None:
    rng = torch.Generator().manual_seed(0)
    features = torch.randn(64, 3, generator=rng)
    target = features @ torch.tensor([1.0, -2.0, 0.5]) + 0.3
    batches = tasks.Batches((features, target), 8)
    model = torch.nn.Linear(3, 1)
    made = bisls.optim.Auto(model.parameters())

    def loss() -> torch.Tensor:
        return ((model(rows)[:, 0] - truth) ** 2).mean()

    for k in range(1, iterations + 1):
        rows, truth = next(batches)
        made.step(loss)
        watch(k)


def soak(kind: str, iterations: int, samples: int = SAMPLES, warm: int | None = None) -> dict[str, Any]:
    """Run, and count what is alive after the first tenth and at equal distances from there on."""
    warm = warm or max(iterations // 10, 1)
    every = max((iterations - warm) // samples, 1)
    # room for the counts is made before, so that they do not count themselves
    counts = array("q", [0] * 4 * (samples + 2))
    taken = 0
    begun = time.process_time()

    def watch(k: int) -> None:
        nonlocal taken
        if k == warm:  # the first counts make room for their own lists
            for _ in range(3):
                alive()
        if k >= warm and (k - warm) % every == 0:
            for i, number in enumerate(alive()):
                counts[4 * taken + i] = k if i == 0 else number
            taken += 1

    history = run(kind, iterations, watch)
    seconds = time.process_time() - begun
    found = [dict(zip(COUNTED, counts[4 * i : 4 * i + 4], strict=True)) for i in range(taken)]
    span = max(found[-1]["k"] - found[0]["k"], 1)
    growth = {name: (found[-1][name] - found[0][name]) / span for name in COUNTED[1:]}
    records, kept = len(history) if history is not None else 0, 0.0
    if history is not None:  # what the history holds is given back with it
        full = alive()
        del history
        empty = alive()
        for name, i in (("blocks", 1), ("objects", 2)):
            growth[name] -= (full[i] - empty[i]) / records
        kept = kept_bytes()
    flat = growth["blocks"] <= BLOCKS and growth["objects"] <= OBJECTS and growth["resident"] <= BYTES + 1.5 * kept
    return {
        "kind": kind,
        "iterations": iterations,
        "records": records,
        "kept": kept,
        "seconds": seconds,
        "growth": growth,
        "flat": flat,
        "samples": found,
    }


def kept_bytes(iterations: int = 300) -> float:
    """The bytes that the history of `fit` keeps an iteration, as Python's allocator counts them."""
    kept: list[int] = []

    def watch(k: int) -> None:
        if k in (iterations // 3, iterations):
            gc.collect()
            kept.append(tracemalloc.get_traced_memory()[0])

    tracemalloc.start()
    try:
        run("fit", iterations, watch)
    finally:
        tracemalloc.stop()
    return (kept[1] - kept[0]) / (iterations - iterations // 3)


def facts() -> dict[str, Any]:
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "bisls": bisls.__version__,
        "commit": commit.stdout.strip(),
    }


def table(results: list[dict[str, Any]]) -> str:
    lines = [
        "| run | iterations | blocks an iteration | objects | resident bytes | resident at first and last count, MB | flat |",
        "|---|---|---|---|---|---|---|",
    ]
    for own in results:
        each, first, last = own["growth"], own["samples"][0], own["samples"][-1]
        ends = f"{first['resident'] / 1e6:.1f}, {last['resident'] / 1e6:.1f}"
        kept = f" (of which the history keeps {own['kept']:.0f})" if own["kept"] else ""
        lines.append(
            f"| {own['kind']} | {own['iterations']:,} | {each['blocks']:.3f} | {each['objects']:.3f} | "
            f"{each['resident']:.0f}{kept} | {ends} | {'yes' if own['flat'] else '**no**'} |"
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--iterations", type=int, default=20_000)
    parser.add_argument("--quick", action="store_true", help="a few hundred iterations")
    parser.add_argument("--out", type=Path, default=Path("out"))
    parser.add_argument("--one", choices=KINDS, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    iterations = 300 if asked.quick else asked.iterations
    if asked.one:
        print(json.dumps(soak(asked.one, iterations)))
        return
    asked.out.mkdir(parents=True, exist_ok=True)
    results = []
    for kind in asked.kinds:
        call = [sys.executable, __file__, "--one", kind, "--iterations", str(iterations)]
        done = subprocess.run(call, capture_output=True, text=True, check=False)
        if done.returncode:
            sys.exit(f"{kind}: {done.stderr}")
        results.append(json.loads(done.stdout.splitlines()[-1]))
        print(table(results[-1:]).splitlines()[-1], flush=True)
        (asked.out / "soak.json").write_text(json.dumps({"facts": facts(), "results": results}, indent=1))
        (asked.out / "soak.md").write_text(table(results))
    # a run of a few hundred iterations is too short for a verdict
    sys.exit(0 if asked.quick or all(own["flat"] for own in results) else 1)


if __name__ == "__main__":
    main()
