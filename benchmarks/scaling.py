"""What an iteration costs: beside the usual method, in the number of parameters, and in the lengths of the inner loops.

overhead  One iteration of the untuned BiSLS over one of Alternating with Adam and constant steps, on hyper-representation (LeNet)
          with made-up pictures of ten kinds, batches of 256, T = 10: with the same ten CG steps, and each with its
          default. The two take turns; the ratio is that of the total times, since searching
          and resting iterations differ. Beside it the evaluations an iteration, and
          the share of the time that each kind takes.
sizes     Time and memory against the number of upper, then of lower parameters, on losses that cost a few passes over them and
          keep no copy, so that the library's own cost shows. Every size runs in a process of its own; memory is the peak of the
          resident set above what it was before, in copies of the parameters.
loops     Time against T (lower steps) and against CG steps, with a straight line through it; and the peak memory, in copies of
          a million lower parameters on the losses of `sizes`, each in a process of its own.
processes One process, and two that share every batch (gloo), on hyper-representation in float64 with batches of 256, T = 10, ten
          CG steps; they take turns. Wall time, since processes wait for each other; CPU time of all; peak memory of each
          process; and how far apart the two runs end.

    python benchmarks/scaling.py                          everything, about a quarter of an hour
    python benchmarks/scaling.py --parts overhead         a part of it
    python benchmarks/scaling.py --quick                  small sizes, few iterations: a look at whether it runs

One thread a process, and times are those of the process (CPU), so that other work on the machine disturbs little; not so the wall
times of `processes`, which need a core for each and a quiet machine. Only ratios mean anything on another machine.
Results: out/scaling.json, out/scaling.md, out/scaling.png.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, replace
from itertools import pairwise
from pathlib import Path
from statistics import mean, median
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from torch import Tensor

import bisls
from bisls import tasks

CG10 = bisls.Implicit(bisls.CG(iters=10, tol=0.0))
SHORT = {"upper_step": bisls.Constant(1e-5), "lower_step": bisls.Constant(1e-3)}  # steps that do not diverge
PARTS = ("overhead", "sizes", "loops", "processes")
BLOCKS = 10  # the small level of the problems for sizes has so many numbers


def representation(quick: bool, batch: int, dtype: torch.dtype = torch.float32) -> tasks.Task:
    rng = np.random.default_rng(0)
    count = 768 if quick else 4096
    # ten kinds of pictures that can be told apart, as in real data: how many batches agree decides how many are looked at
    labels = rng.integers(10, size=count)
    kinds = np.kron(rng.uniform(size=(10, 7, 7)), np.ones((4, 4)))
    images = (255 * (0.6 * kinds[labels] + 0.4 * rng.uniform(size=(count, 28, 28)))).astype(np.uint8)
    return tasks.hyper_representation(images, labels, lower_size=count // 2, test_size=0, batch_size=batch, dtype=dtype)


class Runner:
    """A solver on a task of its own, that takes one timed iteration at a time."""

    def __init__(
        self,
        task: tasks.Task,
        make: Callable[[bisls.Bilevel], bisls.Solver],
        clock: Callable[[], float] = time.process_time,
    ):
        self.task, self.solver, self.clock = task, make(task.problem), clock
        self.seconds: list[float] = []
        self.records: list[bisls.Record] = []

    def step(self) -> float:
        upper = next(self.task.upper_data)
        lower = [next(self.task.lower_data) for _ in range(self.solver.lower_iters)]
        start = self.clock()
        record = self.solver.step(upper, lower)
        self.seconds.append(self.clock() - start)
        self.records.append(record)
        return self.seconds[-1]

    def forget(self) -> None:
        self.seconds.clear()
        self.records.clear()

    def evaluations(self) -> dict[str, float]:
        costs = [asdict(record.cost) for record in self.records]
        return {name: mean(cost[name] for cost in costs) for name in costs[0]}


def shares(runner: Runner, iterations: int) -> dict[str, float]:
    """Which share of an iteration's time each kind of evaluation takes; "rest" is all that is not an evaluation."""
    spent: dict[str, float] = {}

    def timed(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            start = time.process_time()
            try:
                return call(*args, **kwargs)
            finally:
                spent[name] = spent.get(name, 0.0) + time.process_time() - start

        return wrapped

    oracle = runner.solver.oracle
    make_graph = timed("lower_graphs", oracle.lower_graph)

    def graph(*args: Any, **kwargs: Any) -> Any:
        made = make_graph(*args, **kwargs)
        made.hessian = timed("hessian_products", made.hessian)
        made.mixed = timed("mixed_products", made.mixed)
        made.mixed_transposed = timed("mixed_products", made.mixed_transposed)
        return made

    kinds = {
        "upper": "upper_gradients",
        "lower": "lower_gradients",
        "upper_value": "upper_values",
        "lower_value": "lower_values",
    }
    for method, name in kinds.items():
        setattr(oracle, method, timed(name, getattr(oracle, method)))
    oracle.lower_graph = graph
    runner.forget()
    total = sum(runner.step() for _ in range(iterations))
    for method in (*kinds, "lower_graph"):
        delattr(oracle, method)
    found = {name: seconds / total for name, seconds in spent.items()}
    return {**found, "rest": 1.0 - sum(found.values())}


def overhead(quick: bool, tick: Callable[[], None]) -> dict[str, Any]:
    warm, iterations, batch = (1, 4, 32) if quick else (5, 60, 256)
    results = {}
    for name, hypergrad in (("same CG", CG10), ("defaults", None)):
        ours = Runner(representation(quick, batch), lambda p, h=hypergrad: bisls.BiSLS(p, hypergrad=h, lower_iters=10))
        usual = Runner(
            representation(quick, batch),
            lambda p, h=hypergrad: bisls.Alternating(p, hypergrad=h, lower_iters=10, **SHORT),
        )
        for runner in (ours, usual):
            for _ in range(warm):
                runner.step()
            runner.forget()
        for _ in range(iterations):
            ours.step(), usual.step()
            tick()
        # of every two iterations one searches, so ratios of single iterations have two humps
        pairs = [[a + b for a, b in pairwise(r.seconds)][::2] for r in (ours, usual)]
        results[name] = {
            "ratio": sum(ours.seconds) / sum(usual.seconds),
            "quartiles": np.percentile(np.divide(*pairs), [25, 75]).tolist(),
            "iterations": iterations,
        }
        for label, runner in (("BiSLS", ours), ("Alternating", usual)):
            results[name][label] = {
                "solver": repr(runner.solver),
                "seconds": mean(runner.seconds),
                "evaluations": runner.evaluations(),
                "upper_checks": mean(record.upper_checks for record in runner.records),
                "lower_checks": mean(record.lower_checks for record in runner.records),
            }
            results[name][label]["shares"] = shares(runner, max(2, iterations // 4))
    return results


# --- sizes: one process each


def _inner(left: Tensor, right: Tensor) -> Tensor:
    """The inner products of the blocks of two long vectors: BLOCKS numbers, and no intermediate as long as the vectors."""
    length = left.numel() // BLOCKS
    return torch.stack([torch.dot(a, b) for a, b in zip(left.split(length), right.split(length), strict=True)])


def long_upper(n: int) -> bisls.Bilevel:
    """g = 1/2 sum_j h_j (y_j - <x_j, c_j>)^2 with the j-th of ten blocks of x, f = 1/2 ||y - t||^2 + 1/20 ||x||^2 / n."""
    x, c = torch.full((n,), 0.1), torch.full((n,), (BLOCKS / n) ** 0.5)
    x.requires_grad_()
    y = torch.zeros(BLOCKS, requires_grad=True)
    h, t = torch.logspace(-2, 0, BLOCKS), torch.linspace(-2.0, 3.0, BLOCKS)

    def lower(_: Any) -> Tensor:
        return 0.5 * (h * (y - _inner(x, c)) ** 2).sum()

    def upper(_: Any) -> Tensor:
        return 0.5 * ((y - t) ** 2).sum() + 0.05 / n * _inner(x, x).sum()

    return bisls.Bilevel(upper, lower, [x], [y])


def long_lower(n: int) -> bisls.Bilevel:
    """g = 1 + 1/2 sum_j h_j ||y_j - x_j c_j||^2 for ten blocks of y, f = 1 + 1/2 ||y - t||^2, both with the squares spelt out."""
    x = torch.linspace(-1.0, 2.0, BLOCKS).requires_grad_()
    y = torch.zeros(n, requires_grad=True)
    c, h = torch.full((n,), (BLOCKS / n) ** 0.5), torch.logspace(-2, 0, BLOCKS)

    def lower(_: Any) -> Tensor:
        return 1.0 + (0.5 * h * (_inner(y, y) - 2 * x * _inner(y, c) + x * x)).sum()

    def upper(_: Any) -> Tensor:
        return 1.0 + 0.5 * (_inner(y, y) - 2 * 0.5 * _inner(y, c) + 0.25).sum()  # t = c / 2

    return bisls.Bilevel(upper, lower, [x], [y])


PROBLEMS = {"upper": long_upper, "lower": long_lower}


def _status(field: str) -> int | None:
    """Bytes from the kernel's account of this process (VmRSS, VmHWM); None where there is none."""
    path = Path("/proc/self/status")
    if not path.exists():
        return None
    return next(int(line.split()[1]) * 1024 for line in path.read_text().splitlines() if line.startswith(field))


def _resident() -> int:
    now = _status("VmRSS")
    return _peak() if now is None else now


def _peak() -> int:
    peak = _status("VmHWM")
    if peak is not None:
        return peak
    import resource  # not on Windows

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def _forget_peak() -> None:
    with suppress(OSError):  # where it can't be done, a peak before this one may hide it
        Path("/proc/self/clear_refs").write_text("5")


def measure(level: str, n: int, iterations: int, lower_iters: int = 10, cg_steps: int = 10) -> dict[str, Any]:
    """Time and memory of an iteration of BiSLS with n parameters at one level and ten at the other."""
    torch.set_num_threads(1)
    hypergrad = bisls.Implicit(bisls.CG(iters=cg_steps, tol=0.0))

    def solver(size: int) -> bisls.Solver:
        return bisls.BiSLS(PROBLEMS[level](size), hypergrad=hypergrad, lower_iters=lower_iters)

    first = solver(1000)  # what is loaded or set up once is no part of the cost
    for _ in range(3):
        first.step(None, None)
    big = solver(n)
    before = _resident()
    _forget_peak()
    seconds, records = [], []
    for k in range(iterations + 2):
        start = time.process_time()
        records.append(big.step(None, None))
        if k >= 2:
            seconds.append(time.process_time() - start)
    costs = [asdict(record.cost) for record in records[2:]]
    return {
        "level": level, "n": n, "seconds": median(seconds), "peak_bytes": _peak() - before,
        "copies": (_peak() - before) / (4 * n), "failed": sum(record.status.failed for record in records),
        "evaluations": {name: mean(cost[name] for cost in costs) for name in costs[0]},
    }  # fmt: skip


def _measured(call: list[str], tight: bool) -> dict[str, Any]:
    """`measure` in a process of its own; with a tight allocator (glibc's) memory that was freed does not count."""
    environment = {**os.environ, **({"MALLOC_MMAP_THRESHOLD_": "65536"} if tight else {})}
    return json.loads(subprocess.run(call, capture_output=True, text=True, check=True, env=environment).stdout)


def sizes(quick: bool, tick: Callable[[], None]) -> dict[str, Any]:
    powers = {"upper": (4, 5), "lower": (4, 5)} if quick else dict.fromkeys(PROBLEMS, (4, 5, 6, 7))
    results = {}
    for level, exponents in powers.items():
        rows = []
        for power in exponents:
            call = [sys.executable, __file__, "--measure", level, str(10**power)]
            row = memory = _measured([*call, "3" if quick else "8"], tight=quick)
            if not quick:
                memory = _measured([*call, "2"], tight=True)
            rows.append({**row, "peak_bytes": memory["peak_bytes"], "copies": memory["copies"]})
            tick()
        n, t = np.array([row["n"] for row in rows]), np.array([row["seconds"] for row in rows])
        results[level] = {
            "rows": rows,
            "exponent": float(np.polyfit(np.log(n), np.log(t), 1)[0]),
            "last_exponent": float(np.log(t[-1] / t[-2]) / np.log(n[-1] / n[-2])),
        }
    return results


# --- loops


def loops(quick: bool, tick: Callable[[], None]) -> dict[str, Any]:
    counts, iterations, batch = ((2, 4, 8), 2, 32) if quick else ((5, 10, 20, 40), 12, 64)
    makers = {
        "lower_iters": lambda p, n: bisls.BiSLS(p, hypergrad=CG10, lower_iters=n),
        "cg_steps": lambda p, n: bisls.BiSLS(p, hypergrad=bisls.Implicit(bisls.CG(iters=n, tol=0.0)), lower_iters=10),
    }
    results = {}
    for index, (name, make) in enumerate(makers.items()):
        runners = [Runner(representation(quick, batch), lambda p, n=n, m=make: m(p, n)) for n in counts]
        for round_ in range(iterations + 2):
            for runner in runners:
                if round_ == 2:
                    runner.forget()
                runner.step()
            tick()
        memory = []
        for count in counts:
            lengths = [str(count if k == index else 10) for k in range(2)]
            call = [sys.executable, __file__, "--measure", "lower", str(10**5 if quick else 10**6), "2", *lengths]
            memory.append(_measured(call, tight=True))
            tick()
        seconds = [median(runner.seconds) for runner in runners]
        slope, fixed = np.polyfit(counts, seconds, 1)
        left = np.array(seconds) - (fixed + slope * np.array(counts))
        results[name] = {
            "n": list(counts),
            "seconds": seconds,
            "evaluations": [runner.evaluations() for runner in runners],
            "copies": [row["copies"] for row in memory],
            "peak_bytes": [row["peak_bytes"] for row in memory],
            "slope": float(slope),
            "fixed": float(fixed),
            "r2": float(1 - (left**2).sum() / ((np.array(seconds) - np.mean(seconds)) ** 2).sum()),
        }
    return results


# --- processes


def share(world: int, rank: int, iterations: int, folder: Path, quick: bool) -> dict[str, Any]:
    """One of `world` processes that share every batch: wall and CPU time of an iteration, memory; the parameters go to a file."""
    torch.set_num_threads(1)
    if world > 1:
        meeting = (folder / "meeting").resolve().as_uri()
        dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=world)
    task = representation(quick, 32 if quick else 256, torch.float64)
    own = {
        level: tasks.Batches(data.tensors, data.batch_size, data.seed, rank=rank, world=world)
        for level, data in (("upper_data", task.upper_data), ("lower_data", task.lower_data))
    }
    runner = Runner(
        replace(task, **own), lambda p: bisls.BiSLS(p, hypergrad=CG10, lower_iters=10), clock=time.perf_counter
    )
    start = torch.cat([runner.solver.problem.x.read(), runner.solver.problem.y.read()])
    before = _resident()
    _forget_peak()
    for _ in range(2):
        runner.step()
    runner.forget()
    began = time.process_time()
    for _ in range(iterations):
        runner.step()
    spent = time.process_time() - began
    end = torch.cat([runner.solver.problem.x.read(), runner.solver.problem.y.read()])
    torch.save((start, end), folder / f"{world}-{rank}.pt")
    found = {
        "seconds": mean(runner.seconds), "cpu_seconds": spent / iterations, "peak_bytes": _peak() - before,
        "failed": sum(record.status.failed for record in runner.records),
    }  # fmt: skip
    if world > 1:
        time.sleep(0.1)  # before torch 2.8, leaving a group may lock up while a thread of it still holds a result
        dist.destroy_process_group()
    return found


def _shared(world: int, iterations: int, quick: bool) -> dict[str, Any]:
    """`share` in as many processes."""
    with tempfile.TemporaryDirectory() as name:
        call = [sys.executable, __file__, *(["--quick"] if quick else []), "--share", name, str(iterations), str(world)]
        pipe = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        workers = [subprocess.Popen([*call, str(rank)], **pipe) for rank in range(world)]
        try:
            said = [worker.communicate(timeout=600) for worker in workers]
        finally:
            for worker in workers:
                worker.kill()  # the others wait for one that failed
        for worker, (_, complaint) in zip(workers, said, strict=True):
            if worker.returncode:
                raise RuntimeError(complaint)
        rows = [json.loads(out) for out, _ in said]
        ends = [torch.load(Path(name) / f"{world}-{rank}.pt", weights_only=True) for rank in range(world)]
    return {
        "seconds": max(row["seconds"] for row in rows), "cpu_seconds": sum(row["cpu_seconds"] for row in rows),
        "peak_bytes": max(row["peak_bytes"] for row in rows), "failed": rows[0]["failed"],
        "ranks_equal": all(torch.equal(end, ends[0][1]) for _, end in ends), "start": ends[0][0], "end": ends[0][1],
    }  # fmt: skip


def processes(quick: bool, tick: Callable[[], None]) -> dict[str, Any]:
    rounds, iterations = (1, 4) if quick else (5, 10)
    runs: dict[int, list[dict[str, Any]]] = {1: [], 2: []}
    for _ in range(rounds):
        for world, found in runs.items():
            found.append(_shared(world, iterations, quick))
            tick()
    one, two = runs[1][0], runs[2][0]
    ratios = [b["seconds"] / a["seconds"] for a, b in zip(*runs.values(), strict=True)]
    return {
        "iterations": iterations,
        "ratio": median(ratios),
        "ratios": ratios,
        "apart": float((two["end"] - one["end"]).norm() / (one["end"] - one["start"]).norm()),
        "ranks_equal": all(row["ranks_equal"] for row in runs[2]),
        "rows": [
            {"processes": world, "failed": max(row["failed"] for row in found)}
            | {key: median(row[key] for row in found) for key in ("seconds", "cpu_seconds", "peak_bytes")}
            for world, found in runs.items()
        ],
    }


# --- what comes out


def _counts(evaluations: dict[str, float]) -> list[str]:
    return [f"{value:.3g}" for value in evaluations.values()]


def tables(results: dict[str, Any]) -> list[tuple[str, list[str], list[list[str]]]]:
    """Title, head and rows of each."""
    found = []
    if "overhead" in results:
        kinds = list(results["overhead"]["same CG"]["BiSLS"]["evaluations"])
        rows, parts = [], []
        for name, row in results["overhead"].items():
            low, high = row["quartiles"]
            for method in ("BiSLS", "Alternating"):
                own = row[method]
                ratio = f"{row['ratio']:.2f} ({low:.2f} to {high:.2f})" if method == "BiSLS" else "1"
                rows.append([name, method, ratio, f"{1e3 * own['seconds']:.0f}", *_counts(own["evaluations"])])
                share = [f"{100 * own['shares'].get(kind, 0.0):.0f} %" for kind in (*kinds, "rest")]
                parts.append([name, method, *share])
        heads = [kind.replace("_", " ") for kind in kinds]
        head = ["hypergradient", "method", "total time: ratio (quartiles of pairs)", "ms", *heads]
        found.append(("Overhead: an iteration on hyper-representation, and its evaluations", head, rows))
        found.append(("Where the time goes", ["hypergradient", "method", *heads, "rest"], parts))
    if "sizes" in results:
        rows = [
            [level, f"{row['n']:.0e}", f"{1e3 * row['seconds']:.1f}", f"{1e9 * row['seconds'] / row['n']:.0f}",
             f"{row['peak_bytes'] / 1e6:.1f}", f"{row['copies']:.1f}" if row["n"] >= 1e6 else "",
             f"{each['exponent']:.2f}", f"{each['last_exponent']:.2f}"]
            for level, each in results["sizes"].items() for row in each["rows"]
        ]  # fmt: skip
        head = [
            "level",
            "parameters",
            "ms",
            "ns a parameter",
            "peak memory in MB",
            "in copies",
            "exponent",
            "of the last two",
        ]
        found.append(("Sizes", head, rows))
    if "loops" in results:
        rows = [
            [name.replace("_", " "), ", ".join(map(str, row["n"])), ", ".join(f"{1e3 * t:.0f}" for t in row["seconds"]),
             f"{1e3 * row['fixed']:.1f} + {1e3 * row['slope']:.2f} n", f"{row['r2']:.4f}",
             ", ".join(f"{copies:.1f}" for copies in row["copies"])]
            for name, row in results["loops"].items()
        ]  # fmt: skip
        found.append(("Loops", ["what", "n", "ms", "line", "R^2", "peak memory in copies"], rows))
    if "processes" in results:
        each = results["processes"]
        low, high = min(each["ratios"]), max(each["ratios"])
        said = {1: ["1", ""], 2: [f"{each['ratio']:.2f} ({low:.2f} to {high:.2f})", f"{each['apart']:.0e}"]}
        rows = [
            [str(row["processes"]), f"{1e3 * row['seconds']:.0f}", said[row["processes"]][0],
             f"{1e3 * row['cpu_seconds']:.0f}", f"{row['peak_bytes'] / 1e6:.0f}", said[row["processes"]][1]]
            for row in each["rows"]
        ]  # fmt: skip
        head = ["processes", "wall ms", "ratio (least to most)", "CPU ms of all", "peak memory in MB of each"]
        found.append(("Processes", [*head, "apart at the end, of the way gone"], rows))
    return found


def plot(results: dict[str, Any], path: Path) -> None:
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 3, figsize=(16, 4.5), constrained_layout=True)
    if "overhead" in results:
        bars = [(n, m, results["overhead"][n][m]) for n in results["overhead"] for m in ("Alternating", "BiSLS")]
        kinds = [*bars[0][2]["evaluations"], "rest"]
        base = np.zeros(len(bars))
        for kind in kinds:
            height = np.array([1e3 * own["seconds"] * own["shares"].get(kind, 0.0) for _, _, own in bars])
            axes[0].bar(
                [f"{method}\n{name}" for name, method, _ in bars], height, bottom=base, label=kind.replace("_", " ")
            )
            base += height
        axes[0].set(title="An iteration, by evaluation", ylabel="ms")
        axes[0].set_ylim(0, 1.35 * base.max())
        axes[0].legend(fontsize=7, ncols=4, loc="upper center")
    for level, each in results.get("sizes", {}).items():
        n, t = ([row[key] for row in each["rows"]] for key in ("n", "seconds"))
        axes[1].loglog(n, t, "o-", label=f"{level} parameters")
        axes[1].loglog(n, t[-1] * np.array(n) / n[-1], "k:", lw=1)
    axes[1].set(title="An iteration against the number of parameters", xlabel="parameters", ylabel="s (dotted: linear)")
    for name, row in results.get("loops", {}).items():
        (points,) = axes[2].plot(row["n"], 1e3 * np.array(row["seconds"]), "o", label=name.replace("_", " "))
        ends = np.array([0, max(row["n"])])
        axes[2].plot(ends, 1e3 * (row["fixed"] + row["slope"] * ends), color=points.get_color(), lw=1)
    axes[2].set(title="An iteration against the lengths of its loops", xlabel="steps", ylabel="ms", ylim=(0, None))
    for axis in axes[1:]:
        if axis.get_legend_handles_labels()[1]:
            axis.legend()
    figure.savefig(path, dpi=120)
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="*", default=list(PARTS), choices=PARTS)
    parser.add_argument("--quick", action="store_true", help="small sizes, few iterations")
    parser.add_argument("--out", type=Path, default=Path("out"), help="where the tables go (default: out)")
    parser.add_argument(
        "--measure",
        nargs="+",
        metavar="LEVEL N ITERATIONS",
        help="one size, as JSON (used by the command itself)",
    )
    parser.add_argument(
        "--share", nargs=4, metavar=("FOLDER", "ITERATIONS", "WORLD", "RANK"), help="one process, likewise"
    )
    arguments = parser.parse_args()
    if arguments.measure:
        level, *numbers = arguments.measure
        print(json.dumps(measure(level, *map(int, numbers))))
        return
    if arguments.share:
        folder, iterations, world, rank = arguments.share
        print(json.dumps(share(int(world), int(rank), int(iterations), Path(folder), arguments.quick)))
        return
    torch.set_num_threads(1)
    console = Console()
    arguments.out.mkdir(parents=True, exist_ok=True)
    call = ["git", "describe", "--always", "--dirty"]
    commit = subprocess.run(call, capture_output=True, text=True, check=False, cwd=Path(__file__).parent).stdout.strip()
    facts = {
        "commit": commit,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "threads": 1,
        "seeds": [0],
    }
    facts |= {"machine": platform.machine(), "quick": arguments.quick}
    file = arguments.out / "scaling.json"
    results: dict[str, Any] = {}
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    totals = {"overhead": 120, "sizes": 8, "loops": 36, "processes": 10}
    if arguments.quick:
        totals = {"overhead": 8, "sizes": 4, "loops": 14, "processes": 2}
    with Progress(*columns, console=console) as progress:
        for part in arguments.parts:
            bar = progress.add_task(part, total=totals[part])
            run = {"overhead": overhead, "sizes": sizes, "loops": loops, "processes": processes}[part]
            results[part] = run(arguments.quick, lambda bar=bar: progress.advance(bar))
            file.write_text(json.dumps({"facts": facts, "results": results}, indent=1))
    lines = []
    for title, head, rows in tables(results):
        lines += [f"## {title}", "", "| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
        lines += ["| " + " | ".join(row) + " |" for row in rows] + [""]
        table = Table(*head, title=title)
        for row in rows:
            table.add_row(*row)
        console.print(table)
    quick = ", quick" if arguments.quick else ""
    lines += [f"commit {commit}, torch {torch.__version__}, one thread a process, CPU time unless said{quick}"]
    (arguments.out / "scaling.md").write_text("\n".join(lines) + "\n")
    plot(results, arguments.out / "scaling.png")


if __name__ == "__main__":
    main()
