"""The price of not tuning: final F of the untuned default over the best of a tuned grid, for every task and from any start.

For each task the two learning rates of `Alternating` (constant steps, SGD and Adam) are tuned: a coarse grid over both on
seed 0, a finer one around the best, then the best of all on every seed. The untuned methods are run from starting steps that
span six orders of magnitude at both levels. All have the same number of iterations, lower steps and samples an iteration.
What is compared is the exact F(x) = f(x, y*(x)) at the end: the lower problem solved tightly, both losses on all of their
data. Regret is F over the tuned F of the same seed.

    python benchmarks/regret.py                           all tasks whose data is there
    python benchmarks/regret.py --tasks penalties ridge    some of them
    python benchmarks/regret.py --quick                   fewer iterations, one seed, two starts: a look at whether it runs

MNIST and FashionMNIST come from `bisls data mnist fashion-mnist`; tasks whose data are not here are left out.

Runs are kept in out/regret.jsonl by what they depend on, so an interrupted command goes on where it stopped.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import time
import warnings
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from math import inf, isfinite, nan
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table
from sklearn.datasets import load_digits

import bisls
from bisls import data, tasks

Made = Callable[[int], tasks.Task]


def pictures(name: str) -> tuple[np.ndarray, np.ndarray]:
    """Training images and labels of MNIST or FashionMNIST."""
    images = data.load(name)
    return images.train_x, images.train_y


def small_digits(seed: int) -> tasks.Task:
    digits = load_digits()
    return tasks.cleaning(digits.data / 16.0, digits.target, train=1000, validation=400, batch_size=64, seed=seed)


@dataclass(frozen=True)
class Contest:
    """A task, its number of iterations, and the coarse grid that the baselines are tuned on."""

    make: Made
    steps: int
    developed: bool  # whether the default was developed on it; otherwise it was only judged
    needs: str | None = None
    sgd: tuple[float, ...] = (1e-3, 1e-2, 1e-1, 1.0, 10.0, 100.0, 1000.0)
    adam: tuple[float, ...] = (1e-3, 1e-2, 1e-1, 1.0)
    beta: tuple[float, ...] = (0.01, 0.1, 1.0)
    slow: bool = False  # the first three starts only


LENET = {"sgd": (1e-3, 1e-2, 1e-1), "adam": (1e-4, 1e-3, 1e-2), "beta": (0.03, 0.3), "slow": True}
CONTESTS = {
    "penalties": Contest(lambda seed: tasks.logistic_penalties(seed=seed), 200, True),
    "penalties exp": Contest(lambda seed: tasks.logistic_penalties(penalty=torch.exp, seed=seed), 200, True),
    "ridge exp": Contest(lambda seed: tasks.ridge_penalties(seed=seed), 200, False),
    "cleaning digits": Contest(small_digits, 250, True, slow=True),
    "cleaning fashion": Contest(
        lambda seed: tasks.cleaning(*pictures("fashion-mnist"), train=5000, validation=2000, seed=seed),
        200, False, "fashion-mnist", slow=True,
    ),
    "distillation 10": Contest(
        lambda seed: tasks.distillation(*pictures("mnist"), batch_size=10, seed=seed), 300, True, "mnist"
    ),
    "distillation 100": Contest(
        lambda seed: tasks.distillation(*pictures("mnist"), batch_size=100, seed=seed), 300, True, "mnist"
    ),
    "representation": Contest(
        lambda seed: tasks.hyper_representation(*pictures("mnist"), seed=seed), 60, True, "mnist", **LENET
    ),
    "representation fashion": Contest(
        lambda seed: tasks.hyper_representation(*pictures("fashion-mnist"), mean=0.2860, sd=0.3530, seed=seed),
        60, False, "fashion-mnist", **LENET,
    ),
}  # fmt: skip
# the default's own start, the corners and the middle of the square of starting steps
STARTS = [(None, None), (1e-4, 1e-3), (1e2, 1e3), (1e-4, 1e3), (1e2, 1e-3), (1e-1, 1.0)]
SEEDS = (0, 1, 2)


@dataclass(frozen=True)
class Job:
    """One run: what it depends on is its key."""

    task: str
    method: str
    alpha: float | None
    beta: float | None
    seed: int
    steps: int


def solver_for(job: Job, task: tasks.Task) -> bisls.Solver:
    problem, common = task.problem, {"lower_iters": task.lower_iters}
    if job.method in ("sgd", "adam"):
        direction = bisls.Steepest() if job.method == "sgd" else bisls.Adam(search_momentum=False)
        steps = {"upper_step": bisls.Constant(job.alpha), "lower_step": bisls.Constant(job.beta)}
        return bisls.Alternating(problem, direction=direction, **steps, **common)
    if job.method == "bisls":
        return bisls.BiSLS(problem, alpha=job.alpha, beta=job.beta, **common)
    if job.method == "paper":
        return bisls.BiSLS.paper(problem, alpha=job.alpha or 10.0, beta=job.beta or 100.0, **common)
    return bisls.BiSPS(problem, alpha=job.alpha or 1.0, beta=job.beta or 1.0, **common)


def run(job: Job) -> dict[str, Any]:
    torch.set_num_threads(1)
    torch.manual_seed(job.seed)
    task = CONTESTS[job.task].make(job.seed)
    solver = solver_for(job, task)
    before, start = task.exact(), time.process_time()
    row = {"error": "", "upper_checks": nan, "lower_checks": nan, "failed": 0}
    try:
        history = bisls.fit(
            solver, task.upper_data, task.lower_data, job.steps, progress=False, on_failure="ignore", tol=None
        )
        row |= {
            "upper_checks": float(history["upper_checks"].mean()),
            "lower_checks": float(history["lower_checks"].sum() / max(1, history["lower_steps"].sum())),
            "failed": sum(record.status is bisls.Status.NON_FINITE for record in history),
        }
    except bisls.SolverError as error:
        row["error"] = str(error)
    seconds = time.process_time() - start
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        value = task.exact()
    finite = all(bool(torch.isfinite(t).all()) for t in (*task.problem.x.tensors, *task.problem.y.tensors))
    return {**row, "F0": before, "F": value if isfinite(value) else inf, "finite": finite, "seconds": seconds}


class Runs:
    """Finished runs, kept in a file by what they depend on."""

    def __init__(self, path: Path, workers: int, console: Console):
        self.path, self.workers, self.console = path, workers, console
        path.parent.mkdir(parents=True, exist_ok=True)
        lines = path.read_text().splitlines() if path.exists() else []
        rows = [json.loads(line) for line in lines if line.endswith("}")]
        self.rows = {row["key"]: row for row in rows}

    def key(self, job: Job) -> str:
        task = CONTESTS["penalties"].make(0)
        return json.dumps([*asdict(job).values(), repr(solver_for(job, task))])

    def all(self, title: str, jobs: list[Job]) -> list[dict[str, Any]]:
        todo = [job for job in dict.fromkeys(jobs) if self.key(job) not in self.rows]
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
        )
        with Progress(*columns, console=self.console) as progress, ProcessPoolExecutor(self.workers) as pool:
            bar = progress.add_task(title, total=len(todo))
            futures = {pool.submit(run, job): job for job in todo}
            for future in as_completed(futures):
                job = futures[future]
                row = {"key": self.key(job), **asdict(job), **future.result()}
                self.rows[row["key"]] = row
                with self.path.open("a") as file:
                    file.write(json.dumps(row) + "\n")
                progress.advance(bar)
        return [self.rows[self.key(job)] for job in jobs]


def tuned(name: str, contest: Contest, runs: Runs, seeds: tuple[int, ...], steps: int) -> dict[str, Any]:
    """The best pair of learning rates: coarse grid, then finer around the best, then all seeds."""
    jobs = [
        Job(name, method, alpha, beta, 0, steps)
        for method in ("sgd", "adam")
        for alpha in getattr(contest, method)
        for beta in contest.beta
    ]
    rows = runs.all(f"{name}: coarse grid", jobs)
    around = [min((r for r in rows if r["method"] == m), key=lambda r: r["F"]) for m in ("sgd", "adam")]
    finer = [
        Job(name, row["method"], row["alpha"] * a, row["beta"] * b, 0, steps)
        for row in around
        for a, b in ((1 / 3, 1.0), (3.0, 1.0), (1.0, 1 / 3), (1.0, 3.0))
    ]
    rows += runs.all(f"{name}: finer grid", finer)
    best = {m: min((r for r in rows if r["method"] == m), key=lambda r: r["F"]) for m in ("sgd", "adam")}
    final = {}
    for method, row in best.items():
        again = [Job(name, method, row["alpha"], row["beta"], seed, steps) for seed in seeds]
        final[method] = [r["F"] for r in runs.all(f"{name}: best {method}, all seeds", again)]
    method = min(final, key=lambda m: np.mean(final[m]))
    diverged = sum(bool(r["error"]) or not isfinite(r["F"]) or r["F"] > r["F0"] for r in rows)
    return {
        "method": method, "alpha": best[method]["alpha"], "beta": best[method]["beta"], "F": final[method],
        "grid": len(rows), "diverged": diverged, "F0": rows[0]["F0"],
        "sgd": float(np.mean(final["sgd"])), "adam": float(np.mean(final["adam"])),
    }  # fmt: skip


def untuned(
    name: str, method: str, runs: Runs, seeds: tuple[int, ...], starts: list, steps: int, reference: dict
) -> dict[str, Any]:
    jobs = [Job(name, method, a, b, seed, steps) for a, b in starts for seed in seeds]
    rows = runs.all(f"{name}: {method}", jobs)
    target = dict(zip(SEEDS, reference["F"], strict=False))
    regrets = [row["F"] / target[row["seed"]] for row in rows]
    return {
        "median": median(regrets), "worst": max(regrets), "best": min(regrets), "runs": len(rows),
        "F": [row["F"] for row in rows], "no_start": [r for r, row in zip(regrets, rows, strict=True) if row["alpha"] is None],
        "upper_checks": float(np.nanmean([row["upper_checks"] for row in rows])),
        "lower_checks": float(np.nanmean([row["lower_checks"] for row in rows])),
        "bad": sum(bool(row["error"]) or not row["finite"] or row["F"] > row["F0"] for row in rows),
        "seconds": float(np.mean([row["seconds"] for row in rows])),
    }  # fmt: skip


METHODS = {"bisls": "BiSLS (untuned)", "paper": "BiSLS.paper", "bisps": "BiSPS"}


def text_table(results: dict[str, Any]) -> str:
    head = "| task | judged only | tuned: best of grid | tuned F | BiSLS median | worst | upper checks | lower checks "
    head += "| NaN or diverged | paper median | worst | BiSPS median | worst |"
    lines = [head, "|" + "---|" * 13]
    for name, result in results.items():
        t, b = result["tuned"], result["bisls"]
        best = f"{t['method']} {t['alpha']:.3g} / {t['beta']:.3g} of {t['grid']}, {t['diverged']} diverged"
        cells = [name, "" if CONTESTS[name].developed else "yes", best, f"{np.mean(t['F']):.4g}"]
        cells += [f"**{b['median']:.3f}**", f"{b['worst']:.3f}", f"{b['upper_checks']:.2f}", f"{b['lower_checks']:.2f}"]
        cells += [f"{b['bad']} of {b['runs']}"]
        for other in ("paper", "bisps"):
            cells += (
                [f"{result[other]['median']:.3g}", f"{result[other]['worst']:.3g}"] if other in result else ["", ""]
            )
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--tasks", nargs="*", choices=list(CONTESTS), help="which tasks (default: all whose data is there)"
    )
    parser.add_argument("--methods", nargs="*", default=list(METHODS), choices=list(METHODS))
    parser.add_argument("--quick", action="store_true", help="30 iterations, one seed, two starts")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="processes (default: one a core)")
    parser.add_argument("--out", type=Path, default=Path("out"), help="where runs and tables go (default: out)")
    arguments = parser.parse_args()
    console = Console()
    names = arguments.tasks or list(CONTESTS)
    there = [n for n in names if CONTESTS[n].needs is None or data.where(str(CONTESTS[n].needs)) is not None]
    for name in set(names) - set(there):
        console.print(f"[yellow]left out:[/] {name}: bisls data {CONTESTS[name].needs} would fetch what it needs")
    runs = Runs(arguments.out / "regret.jsonl", arguments.jobs, console)
    seeds, starts = (SEEDS[:1], STARTS[:2]) if arguments.quick else (SEEDS, STARTS)
    results: dict[str, Any] = {}
    for name in there:
        contest = CONTESTS[name]
        steps = 30 if arguments.quick else contest.steps
        results[name] = {"tuned": (reference := tuned(name, contest, runs, seeds, steps))}
        for method in arguments.methods:
            fewer = contest.slow or method != "bisls"  # the paper's methods: three starts and one seed
            chosen = starts[:3] if fewer else starts
            results[name][method] = untuned(
                name, method, runs, seeds if method == "bisls" else seeds[:1], chosen, steps, reference
            )
        save(arguments.out, results)
    table = Table(
        "task", "tuned F", "BiSLS regret: median", "worst", "checks up / low", "NaN or diverged", "paper", "BiSPS"
    )
    for name, result in results.items():
        if "bisls" not in result:
            continue
        b = result["bisls"]
        others = [
            f"{result[m]['median']:.2f} / {result[m]['worst']:.3g}" if m in result else "" for m in ("paper", "bisps")
        ]
        checks = f"{b['upper_checks']:.2f} / {b['lower_checks']:.2f}"
        table.add_row(
            name,
            f"{np.mean(result['tuned']['F']):.4g}",
            f"{b['median']:.3f}",
            f"{b['worst']:.3f}",
            checks,
            str(b["bad"]),
            *others,
        )
    console.print(table)
    every = [r for result in results.values() if "bisls" in result for r in [result["bisls"]["median"]]]
    if every:
        worst = max(result["bisls"]["worst"] for result in results.values())
        console.print(f"median over tasks {median(every):.3f}, worst run {worst:.3f}")


def save(out: Path, results: dict[str, Any]) -> None:
    commit = subprocess.run(
        ["git", "describe", "--always", "--dirty"], capture_output=True, text=True, check=False
    ).stdout.strip()
    facts = {
        "commit": commit,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "seeds": SEEDS,
        "starts": STARTS,
    }
    (out / "regret.json").write_text(json.dumps({"facts": facts, "results": results}, indent=1))
    if all("bisls" in result for result in results.values()):
        (out / "regret.md").write_text(text_table(results) + f"\n\ncommit {commit}, torch {torch.__version__}\n")


if __name__ == "__main__":
    main()
