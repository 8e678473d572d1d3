"""The price of not tuning where a network is trained: the untuned default beside tuned rivals, in score and in time.

For each task, with the same number of iterations, lower steps and samples an iteration:

- plain: y trained by Adam with x as it starts, its rate tuned;
- first order: `Alternating`, only the direct gradient of the upper loss in x (and through where y starts), tuned;
- implicit: `Alternating` with Implicit(CG), Adam above, both rates tuned;
- look-ahead: `Alternating` with Lookahead(), Adam above, both rates tuned;
- BiSLS with nothing set.

Tuning: a coarse grid over both rates on seed 0, four neighbours of the best, then the best on every seed. Scored is
task.exact(), the mean of five looks over the last quarter of a run: the loss on data that neither level has seen (for
few-shot, denoising and adversarial training a function of x alone). Regret is the score of BiSLS over that of the best of
all rivals with the same seed. Beside it: y retrained from the start with the learnt x, and the time that BiSLS takes to the
best rival's score over the time of that rival: seconds of the processor without the evaluations, of one run of the rival and
not of its grid.

    python benchmarks/regret_networks.py                       all tasks whose data is there (about an hour)
    python benchmarks/regret_networks.py --tasks "few-shot"     some of them
    python benchmarks/regret_networks.py --quick               a tenth of the iterations, one seed: a look at whether it runs

The default was developed on few-shot, sample weights, architecture and the five on digits and chains; the others are
judged only. FashionMNIST comes from
`bisls data fashion-mnist`, Omniglot from the folder of BISLS_DATA; tasks whose data are not here are left out. Runs are kept in
out/regret_networks.jsonl by what they depend on, so an interrupted command goes on where it stopped. Runs of BiSLS are kept by
commit; after a change they are made again.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import time
import warnings
from bisect import bisect
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from functools import cache
from math import inf, isfinite, nan
from pathlib import Path
from statistics import mean, median
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from sklearn.datasets import load_digits

import bisls
from bisls import data, tasks
from bisls.hypergrad.base import estimated
from bisls.hypergrad.lookahead import through

LOOKS = 20  # times that a run is scored on its way
LAST = 5  # of these at its end, whose mean is its score: single iterates of a stochastic method are noisy
SEEDS = (0, 1, 2)


@cache
def digits() -> tuple[Any, Any]:
    found = load_digits()
    return found.data.reshape(-1, 8, 8) / 16.0, found.target


@cache
def fashion(count: int = 20_000) -> tuple[Any, Any]:
    images = data.load("fashion-mnist")
    return images.train_x[:count], images.train_y[:count]


@cache
def chains() -> tuple[list[str], str]:
    """Texts that are drawn letter by letter, the chances of a letter depending on the last one: five sources, and a target
    that is made of two of them."""
    draw = torch.Generator().manual_seed(0)
    letters = "abcdefghijklmnop"
    laws = [torch.softmax(2.0 * torch.randn(16, 16, generator=draw), -1) for _ in range(5)]

    def text(law: Any, length: int) -> str:
        last, found, sums = 0, [], law.cumsum(-1).tolist()
        for chance in torch.rand(length, generator=draw).tolist():
            last = min(bisect(sums[last], chance), 15)
            found.append(letters[last])
        return "".join(found)

    target = "".join(text(laws[i], 500) for _ in range(40) for i in (0, 0, 1))
    return [text(law, 20_000) for law in laws], target


def omniglot(seed: int) -> tasks.Task:
    drawings = data.load("omniglot")
    source = tasks.Pictures(drawings.x, drawings.y, ways=5)
    return tasks.few_shot(source, shots=1, queries=5, hidden=64, seed=seed)


@dataclass(frozen=True)
class Contest:
    """A task, its number of iterations, and the coarse grid that the rivals are tuned on."""

    make: Callable[[int], tasks.Task]
    steps: int
    developed: bool = False  # whether the default was developed on it; otherwise it is only judged
    needs: str | None = None
    alpha: tuple[float, ...] = (0.01, 0.1)
    beta: tuple[float, ...] = (0.003, 0.01)
    scaled: bool = True  # Adam below; otherwise plain gradient steps
    direct: bool = False  # whether a first-order gradient exists: f depends on x directly, or through where y starts
    begun: bool = False  # whether y begins anew in every iteration: the implicit view says nothing then


STARTED = {"scaled": False, "direct": True, "begun": True}
CONTESTS = {
    "few-shot": Contest(
        lambda seed: tasks.few_shot(seed=seed), 500, True, alpha=(0.003, 0.01), beta=(0.01, 0.03), **STARTED
    ),
    "sample weights": Contest(
        lambda seed: tasks.sample_weights(*digits(), seed=seed), 150, True, alpha=(0.1, 1.0), beta=(0.001, 0.003)
    ),
    "architecture": Contest(
        lambda seed: tasks.architecture(*digits(), seed=seed), 100, True, alpha=(0.01, 0.1), direct=True
    ),
    "weight network": Contest(
        lambda seed: tasks.weight_network(*fashion(), seed=seed), 100, needs="fashion-mnist", alpha=(0.001, 0.01)
    ),
    "mixture": Contest(lambda seed: tasks.mixture(seed=seed), 100, alpha=(0.01, 0.1)),
    "denoising": Contest(
        lambda seed: tasks.denoising(fashion()[0], seed=seed), 80, needs="fashion-mnist", beta=(0.1, 0.3), scaled=False
    ),
    "adversarial": Contest(
        lambda seed: tasks.adversarial(*fashion(), seed=seed),
        100, needs="fashion-mnist", alpha=(0.001, 0.003), beta=(0.1, 1.0), **STARTED,
    ),
    "decays": Contest(lambda seed: tasks.decays(*fashion(), seed=seed), 100, needs="fashion-mnist", alpha=(0.03, 0.3)),
    "few-shot omniglot": Contest(omniglot, 300, needs="omniglot", alpha=(0.001, 0.003), beta=(0.1, 0.3), **STARTED),
    "weight network, digits": Contest(
        lambda seed: tasks.weight_network(*digits(), train=900, validation=300, test_size=None, corrupted=0.4, seed=seed),
        100, True, alpha=(0.001, 0.01),
    ),
    "mixture, chains": Contest(
        lambda seed: tasks.mixture(*chains(), context=16, width=24, seed=seed), 100, True, alpha=(0.01, 0.1)
    ),
    "denoising, digits": Contest(
        lambda seed: tasks.denoising(digits()[0], train=48, test_size=48, seed=seed), 80, True, beta=(0.1, 0.3), scaled=False
    ),
    "adversarial, digits": Contest(
        lambda seed: tasks.adversarial(*digits(), train=1_200, seed=seed),
        100, True, alpha=(0.001, 0.003), beta=(0.1, 1.0), **STARTED,
    ),
    "decays, digits": Contest(
        lambda seed: tasks.decays(*digits(), train=200, validation=300, test_size=None, seed=seed), 100, True, alpha=(0.03, 0.3)
    ),
    "mixture simplex": Contest(lambda seed: tasks.mixture(simplex=True, seed=seed), 100, alpha=(0.01, 0.1)),
}  # fmt: skip
RIVALS = {"plain": "plain", "first": "first order", "implicit": "implicit", "lookahead": "look-ahead"}


@dataclass(frozen=True)
class FirstOrder(bisls.Lookahead):
    """The direct gradient of f in x, and through where y starts; the lower steps count as given."""

    def look_back(self, oracle, upper_batch, lowered, state):
        upper = oracle.upper(upper_batch)
        flat, _ = through(oracle, [], upper, self.following, lowered.began)
        oracle.problem.y.write_(lowered.y)
        return estimated(oracle, upper, flat, status=bisls.Status.OK, state={}, lower_grad_norm=nan)


@dataclass(frozen=True)
class Job:
    """One run: what it depends on is its key."""

    task: str
    method: str
    alpha: float | None
    beta: float | None
    seed: int
    steps: int
    commit: str = ""  # of BiSLS; "final" where a rival's best rates are run; empty in its grid

    @property
    def key(self) -> str:
        return json.dumps(list(asdict(self).values()))


def solver_for(job: Job, task: tasks.Task) -> bisls.Solver:
    if job.method == "bisls":
        return bisls.BiSLS(task.problem, lower_iters=task.lower_iters)
    hypergrad = {
        "first": FirstOrder(),
        "implicit": bisls.Implicit(bisls.CG(tol=1e-3, iters=20)),
        "lookahead": bisls.Lookahead(),
    }[job.method]
    return bisls.Alternating(
        task.problem,
        hypergrad=hypergrad,
        upper_step=bisls.Constant(job.alpha),
        lower_step=bisls.Constant(job.beta),
        lower_direction=bisls.Adam(search_momentum=False) if CONTESTS[job.task].scaled else bisls.Steepest(),
        lower_iters=task.lower_iters,
    )


class Looks(bisls.Callback):
    """The score on the way, and the processor's seconds up to it without the scoring."""

    def __init__(self, task: tasks.Task, steps: int, whole: bool):
        self.task, self.steps, self.every, self.curve = task, steps, max(1, steps // LOOKS), []
        self.first = 1 if whole else steps - (LAST - 1) * self.every  # of a grid only the end counts
        self.spent, self.since = 0.0, time.process_time()

    def step(self, record: Any, state: Any) -> None:
        self.look(record.k + 1)

    def look(self, k: int) -> None:
        if (self.steps - k) % self.every or k < self.first:
            return
        self.spent += time.process_time() - self.since
        self.curve.append([round(self.spent, 3), score(self.task.exact)])
        self.since = time.process_time()

    @property
    def last(self) -> list[float]:
        """The scores at the end."""
        return [value for _, value in self.curve[-LAST:]]


def score(function: Callable[[], float]) -> float:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        value = function()
    return value if isfinite(value) else inf


def plain(job: Job, task: tasks.Task, looks: Looks) -> None:
    """y trained by Adam, x as it starts."""
    optimiser = torch.optim.Adam(task.problem.y.tensors, lr=job.beta)
    for k in range(job.steps):
        for _ in range(task.lower_iters):
            batch = task.lower_data if isinstance(task.lower_data, tuple) else next(task.lower_data)
            optimiser.zero_grad()
            task.problem.lower_loss(batch).backward()
            optimiser.step()
        looks.look(k + 1)


def run(job: Job) -> dict[str, Any]:
    torch.set_num_threads(1)
    torch.manual_seed(job.seed)
    task = CONTESTS[job.task].make(job.seed)
    row = {"error": "", "start": task.exact(), "views": {}}
    looks = Looks(task, job.steps, bool(job.commit))
    try:
        if job.method == "plain":
            plain(job, task, looks)
        else:
            options = {"progress": False, "on_failure": "ignore", "tol": None, "callbacks": [looks]}
            history = bisls.fit(solver_for(job, task), task.upper_data, task.lower_data, job.steps, **options)
            views = [record.view for record in history]
            row["views"] = {view: views.count(view) for view in sorted(set(views))}
    except (bisls.SolverError, ArithmeticError) as error:
        row["error"] = str(error)
    finite = all(bool(torch.isfinite(t).all()) for t in (*task.problem.x.tensors, *task.problem.y.tensors))
    again = score(task.retrained) if task.retrained and job.commit else nan
    return {
        **row, "score": inf if row["error"] else mean(looks.last),
        "metrics": {name: round(own, 4) for name, own in task.metrics().items()},
        "finite": finite, "curve": looks.curve, "seconds": looks.curve[-1][0] if looks.curve else nan, "retrained": again,
    }  # fmt: skip


class Runs:
    """Finished runs, kept in a file by what they depend on."""

    def __init__(self, path: Path, workers: int, console: Console):
        self.path, self.workers, self.console = path, workers, console
        path.parent.mkdir(parents=True, exist_ok=True)
        lines = path.read_text().splitlines() if path.exists() else []
        self.rows = {row["key"]: row for row in (json.loads(line) for line in lines if line.endswith("}"))}

    def all(self, title: str, jobs: list[Job]) -> list[dict[str, Any]]:
        todo = [job for job in dict.fromkeys(jobs) if job.key not in self.rows]
        columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
        with Progress(*columns, console=self.console) as progress, ProcessPoolExecutor(self.workers) as pool:
            bar = progress.add_task(title, total=len(todo))
            futures = {pool.submit(run, job): job for job in todo}
            for future in as_completed(futures):
                job = futures[future]
                row = {"key": job.key, **asdict(job), **future.result()}
                self.rows[job.key] = row
                with self.path.open("a") as file:
                    file.write(json.dumps(row) + "\n")
                progress.advance(bar)
        return [self.rows[job.key] for job in jobs]


def tuned(name: str, method: str, contest: Contest, runs: Runs, seeds: tuple[int, ...], steps: int) -> dict[str, Any]:
    """The best rates of a rival: coarse grid and the neighbours of its best on seed 0, then every seed."""
    alphas = (None,) if method == "plain" else contest.alpha
    betas = (3e-4, 1e-3, 3e-3, 1e-2) if method == "plain" else contest.beta
    rows = runs.all(
        f"{name}: {method}, grid", [Job(name, method, alpha, beta, 0, steps) for alpha in alphas for beta in betas]
    )
    if method != "plain":
        best = min(rows, key=lambda row: row["score"])
        near = [(best["alpha"] * a, best["beta"] * b) for a, b in ((1 / 3, 1.0), (3.0, 1.0), (1.0, 1 / 3), (1.0, 3.0))]
        rows = rows + runs.all(f"{name}: {method}, finer", [Job(name, method, a, b, 0, steps) for a, b in near])
    best = min(rows, key=lambda row: row["score"])
    final = runs.all(
        f"{name}: {method}, seeds",
        [Job(name, method, best["alpha"], best["beta"], seed, steps, "final") for seed in seeds],
    )
    return {
        "alpha": best["alpha"], "beta": best["beta"], "grid": len(rows), "runs": final,
        "bad": sum(bool(row["error"]) or not row["finite"] or row["score"] > row["start"] for row in rows),
    }  # fmt: skip


def sooner(row: dict[str, Any], target: dict[str, Any]) -> float:
    """Seconds to the target's final score over the target's seconds; inf where it is never reached."""
    return next((at / target["seconds"] for at, value in row["curve"] if value <= target["score"]), inf)


def against(name: str, runs: Runs, seeds: tuple[int, ...], quick: bool) -> tuple[int, dict[str, Any]]:
    """The number of iterations, and every rival that fits the task, tuned."""
    contest = CONTESTS[name]
    steps = max(10, contest.steps // 10) if quick else contest.steps
    task = contest.make(0)
    trained = task.lower_data is not None and task.retrained is not None
    fits = {"plain": trained, "first": contest.direct, "implicit": not contest.begun, "lookahead": True}
    methods = [method for method in RIVALS if fits[method]]
    return steps, {method: tuned(name, method, contest, runs, seeds, steps) for method in methods}


def contested(name: str, runs: Runs, seeds: tuple[int, ...], quick: bool, commit: str) -> dict[str, Any]:
    steps, rivals = against(name, runs, seeds, quick)
    best = min(rivals, key=lambda m: mean(row["score"] for row in rivals[m]["runs"]))
    own = runs.all(f"{name}: BiSLS", [Job(name, "bisls", None, None, seed, steps, commit) for seed in seeds])
    pairs = list(zip(own, rivals[best]["runs"], strict=True))
    return {
        "steps": steps, "developed": CONTESTS[name].developed, "start": own[0]["start"],
        "rivals": rivals, "best": best, "bisls": own,
        "regrets": [mine["score"] / other["score"] for mine, other in pairs],
        "times": [sooner(mine, other) for mine, other in pairs],
    }  # fmt: skip


def cell(values: list[float], digits: int = 4) -> str:
    known = [value for value in values if value == value]
    return f"{mean(known):.{digits}g}" if known else ""


def text_table(results: dict[str, Any]) -> str:
    head = ["task", "judged only", "iterations", "start", *RIVALS.values(), "best rival, retrained"]
    head += ["BiSLS", "BiSLS, retrained", "regret: median", "worst", "time: median", "views"]
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for name, result in results.items():
        cells = [name, "" if result["developed"] else "yes", str(result["steps"]), f"{result['start']:.3g}"]
        for method in RIVALS:
            rival = result["rivals"].get(method)
            if rival is None:
                cells.append("")
                continue
            rates = " / ".join(f"{rate:.2g}" for rate in (rival["alpha"], rival["beta"]) if rate is not None)
            found = cell([row["score"] for row in rival["runs"]])
            cells.append(f"{f'**{found}**' if method == result['best'] else found} ({rates})")
        own = result["bisls"]
        views: dict[str, int] = {}
        for row in own:
            for view, count in row["views"].items():
                views[view] = views.get(view, 0) + count
        best = result["rivals"][result["best"]]["runs"]
        cells += [cell([row["retrained"] for row in best]), cell([row["score"] for row in own])]
        cells += [cell([row["retrained"] for row in own]), f"**{median(result['regrets']):.3f}**"]
        cells += [f"{max(result['regrets']):.3f}", f"{median(result['times']):.2f}"]
        cells += [", ".join(f"{view or 'none'} {count}" for view, count in views.items())]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", nargs="*", choices=list(CONTESTS), help="which (default: all whose data is there)")
    parser.add_argument("--quick", action="store_true", help="a tenth of the iterations, one seed")
    parser.add_argument(
        "--rivals", action="store_true", help="only what BiSLS is compared with: it is kept, and made once"
    )
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="processes (default: one a core)")
    parser.add_argument("--out", type=Path, default=Path("out"), help="where runs and tables go (default: out)")
    arguments = parser.parse_args()
    console = Console()
    names = arguments.tasks or list(CONTESTS)
    there = [n for n in names if CONTESTS[n].needs is None or data.where(str(CONTESTS[n].needs)) is not None]
    for name in [name for name in names if name not in there]:
        console.print(f"[yellow]left out:[/] {name}: the data set {CONTESTS[name].needs} is not here (bisls data)")
    command = ["git", "describe", "--always", "--dirty"]
    commit = subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip() or "unknown"
    runs = Runs(arguments.out / "regret_networks.jsonl", arguments.jobs, console)
    results: dict[str, Any] = {}
    if arguments.rivals:
        for name in there:
            against(name, runs, SEEDS[:1] if arguments.quick else SEEDS, arguments.quick)
        return
    for name in there:
        results[name] = contested(name, runs, SEEDS[:1] if arguments.quick else SEEDS, arguments.quick, commit)
        facts = {"commit": commit, "torch": torch.__version__, "python": platform.python_version(), "seeds": SEEDS}
        (arguments.out / "regret_networks.json").write_text(json.dumps({"facts": facts, "results": results}, indent=1))
        text = text_table(results) + f"\n\ncommit {commit}, torch {torch.__version__}\n"
        (arguments.out / "regret_networks.md").write_text(text)
    console.print(text_table(results), soft_wrap=True, markup=False)
    regrets = [regret for result in results.values() for regret in result["regrets"]]
    times = [own for result in results.values() for own in result["times"]]
    bad = sum(
        bool(row["error"]) or not row["finite"] or row["score"] > row["start"]
        for result in results.values()
        for row in result["bisls"]
    )
    if regrets:
        console.print(
            f"regret: median {median(regrets):.3f}, worst {max(regrets):.3f}; time: median {median(times):.2f}, worst "
            f"{max(times):.2f}; {bad} of {len(regrets)} runs of BiSLS ended in NaN or above where they began"
        )


if __name__ == "__main__":
    main()
