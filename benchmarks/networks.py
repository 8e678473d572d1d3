"""Training networks with nothing set, beside tuned grids and beside others that ask for no learning rate.

Ten small networks (benchmarks/training/problems.py), runs of 100 to 3,000 steps, batches of 8 to 1,024; and problems of other
kinds (benchmarks/training/kinds.py). What is compared is the loss on unseen data at the end. Regret is that loss over the tuned
one: the best of a grid of constant rates for Adam and for SGD with momentum (chosen by the mean over the seeds, on that same
loss, for each problem, length and batch).

    python benchmarks/networks.py                                   everything: days on two cores, goes on where it stopped
    python benchmarks/networks.py --cells 300x16 300x128 1000x16    some lengths and batches
    python benchmarks/networks.py --problems cnn mlp --seeds 1      a quick look
    python benchmarks/networks.py --entries "bisls Auto" --again    some optimisers, made anew; what else is there stays
    python benchmarks/networks.py --kinds --cells 100x16 300x16 1000x16 --seeds 1      the other kinds
    python benchmarks/networks.py --only time                       the time of a step over AdamW's, and memory
    python benchmarks/networks.py --only page                       the tables of docs/networks.md, of what is known

Networks with BatchNorm are judged with the statistics that training left, for everybody. Runs are kept in out/networks.jsonl;
what is known is kept in benchmarks/results/networks.json, with commits. Data: `bisls data mnist fashion-mnist a9a`.
"""

from __future__ import annotations

import argparse
import copy
import functools
import json
import os
import platform
import subprocess
import time
import warnings
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor, as_completed
from importlib.metadata import PackageNotFoundError, version
from math import inf, isfinite
from pathlib import Path
from statistics import fmean, median
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from torch import nn
from training.entries import ENTRIES, KNOBS, OURS, RIVALS
from training.kinds import KINDS
from training.page import COSINE, Cell, Found, Row, filled, forwards, knobs, regrets, summary, times
from training.problems import PROBLEMS as NETWORKS
from training.problems import batches, judged

import bisls
from bisls import data, optim

HERE = Path(__file__).parent
PROBLEMS = {**NETWORKS, **KINDS}
PLATEAUS = ("reversal", "rotation")
CELLS = tuple((steps, batch) for batch in (16, 128, 1024) for steps in (300, 1000, 3000))
KNOB_CELL = (300, 16)  # where the knob is turned
Job = tuple[str, str, int, int, int]  # entry, problem, steps, batch, seed


def run(job: Job) -> dict[str, Any]:
    """One run: the loss on unseen data at the end, and forward passes a step."""
    name, problem, steps, size, seed = job
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    entry, own = ENTRIES[name], PROBLEMS[problem]
    rows = own.rows()
    torch.manual_seed(seed)
    model = own.network()
    optimizer = entry.make(model, steps)
    getattr(optimizer, "train", lambda: None)()
    drawn, forwards, start = batches(rows.train, size, seed + 1000), 0, time.process_time()
    loss = inf
    try:
        for _ in range(steps):
            batch = next(drawn)

            def closure(batch: Any = batch) -> torch.Tensor:
                nonlocal forwards
                forwards += 1
                return own.loss(model, batch)

            if entry.call == "loss":
                optimizer.step(closure)
                continue
            optimizer.zero_grad()
            value = closure()
            value.backward()
            optimizer.step(**({"loss": value.detach()} if entry.call == "after" else {}))
        getattr(optimizer, "eval", lambda: None)()
        loss = judged(model, rows.test, own.loss)
    except Exception as error:  # a rival that fails has lost, and the others go on
        return {"loss": inf, "forwards": 0.0, "seconds": 0.0, "error": repr(error)}
    seconds = time.process_time() - start
    return {"loss": loss if isfinite(loss) else inf, "forwards": forwards / steps, "seconds": seconds, "error": ""}


class Store:
    """Runs by what they depend on, in a file that only grows."""

    def __init__(self, path: Path):
        self.path, self.rows = path, {}
        path.parent.mkdir(parents=True, exist_ok=True)
        for line in path.read_text().splitlines() if path.exists() else []:
            row = json.loads(line)
            self.rows[tuple(row["job"])] = row

    def add(self, job: Job, found: dict[str, Any]) -> None:
        self.rows[job] = {"job": job, **found}
        with self.path.open("a") as file:
            file.write(json.dumps(self.rows[job]) + "\n")

    def loss(self, name: str, problem: str, cell: tuple[int, int], seeds: int) -> float | None:
        """The mean over the seeds; None where one is missing."""
        found = [self.rows.get((name, problem, *cell, seed)) for seed in range(seeds)]
        return None if any(row is None for row in found) else fmean(row["loss"] for row in found if row)


# --- what comes out


def gathered(store: Store, known: Found, problem: str, cell: Cell, seeds: int) -> None:
    """What the runs say about one row, into what is known."""

    def mean(name: str) -> float | None:
        return store.loss(name, problem, cell, seeds)

    def commit(names: Iterable[str]) -> str:
        told = {store.rows[name, problem, *cell, seed].get("commit", "") for name in names for seed in range(seeds)}
        return ", ".join(sorted(told))

    grids = {grid: [name for name, e in ENTRIES.items() if e.grid == grid] for grid in ("tuned", COSINE)}
    tuned = [(loss, name) for name in grids["tuned"] if (loss := mean(name)) is not None]
    old = known.row(problem, cell)
    if len(tuned) == len(grids["tuned"]):
        losses = {name: loss for name in RIVALS if (loss := mean(name)) is not None}
        row = Row(problem, *cell, seeds, *min(tuned), losses, None, {"others": commit([*grids["tuned"], *losses])})
        cosine = [loss for name in grids[COSINE] if (loss := mean(name)) is not None]
        if len(cosine) == len(grids[COSINE]):
            row.losses[COSINE] = min(cosine)
    elif old is not None and old.seeds == seeds:
        row = Row(problem, *cell, seeds, old.tuned, old.winner)
    else:
        return
    ours = mean(OURS)
    if ours is not None:
        row.losses[OURS], row.commits[OURS] = ours, commit([OURS])
        row.forwards = round(fmean(store.rows[OURS, problem, *cell, seed]["forwards"] for seed in range(seeds)), 3)
    row.losses = {name: None if loss is None or loss == inf else round_to(loss) for name, loss in row.losses.items()}
    row.tuned = round_to(row.tuned)
    known.put(row)


def round_to(loss: float) -> float:
    return float(f"{loss:.6g}")


def turned(store: Store, known: Found, problem: str) -> None:
    """The loss for each start over that of the default, where all of them were run."""
    usual = store.loss(OURS, problem, KNOB_CELL, 1)
    losses = [store.loss(f"{OURS}, lr {knob:g}", problem, KNOB_CELL, 1) for knob in KNOBS]
    if usual is not None and all(loss is not None for loss in losses):
        known.knob[problem] = [round(loss / usual, 4) for loss in losses if loss is not None]


def tables(known: Found) -> dict[str, str]:
    """Everything on the page that is a number."""
    plain = [row for row in known.rows if row.problem in NETWORKS and row.problem not in PLATEAUS]
    cells = sorted({row.cell for row in plain}, key=lambda cell: (cell[1], cell[0]))
    groups = {f"{n:,} steps of {m:,}": [row for row in plain if row.cell == (n, m)] for n, m in cells}

    def judged(problem: str) -> bool:
        return not PROBLEMS[problem].developed

    found = {f"{n} x {m}": regrets(groups[f"{n:,} steps of {m:,}"], judged) for n, m in cells}
    found["summary"] = summary({f"{title} ({len(own)} networks)": own for title, own in groups.items()})
    found["plateaus"] = regrets([row for row in known.rows if row.problem in PLATEAUS], judged)
    order = list(KINDS)
    kinds = sorted(
        (row for row in known.rows if row.problem in KINDS), key=lambda row: (order.index(row.problem), row.steps)
    )
    for title, own in (("developed", False), ("judged", True)):
        rows = [row for row in kinds if judged(row.problem) is own]
        lengths = {f"{n:,} steps": [row for row in rows if row.steps == n] for n in sorted({row.steps for row in rows})}
        found[f"other kinds, {title}"] = regrets(rows, lambda _: False)
        found[f"other kinds, {title}, by length"] = summary(lengths)
    found |= {"knob": knobs(known), "times": times(known), "forwards": forwards([*plain, *kinds])}
    return found


def timed(repeats: int = 12, turn: int = 24) -> list[list[str]]:
    """The time of a step over AdamW(foreach=True)'s, taking turns, and what is kept in copies of the parameters."""
    lenet = nn.Sequential(
        nn.Conv2d(1, 6, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(6, 16, 5), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(16, 120, 4), nn.ReLU(), nn.Flatten(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, 10),
    )  # fmt: skip
    cases = {"LeNet, batches of 256": (lenet, PROBLEMS["cnn"], 256)}
    cases["transformer, batches of 32"] = (PROBLEMS["characters"].network(), PROBLEMS["characters"], 32)
    lines = []
    for title, (model, problem, size) in cases.items():
        rows = problem.rows()
        makes = [lambda m: torch.optim.AdamW(m.parameters(), foreach=True), *[lambda m: optim.Auto(m.parameters())] * 2]
        runs = []
        for i, make in enumerate(makes):
            own = copy.deepcopy(model)
            runs.append((functools.partial(problem.loss, own), make(own), batches(rows.train, size, 0), i))

        def one(own: Any, optimizer: Any, drawn: Any, kind: int) -> float:
            batch, start = next(drawn), time.perf_counter()

            def closure() -> torch.Tensor:
                if kind == 1:
                    return own(batch)
                optimizer.zero_grad()
                loss = own(batch)
                loss.backward()
                return loss

            optimizer.step(closure)
            return time.perf_counter() - start

        for _ in range(4 * turn):  # past the first looks, which are more frequent
            for each in runs:
                one(*each)
        spent = [[sum(one(*each) for _ in range(turn)) for each in runs] for _ in range(repeats)]
        ratios = [median(row[i] / row[0] for row in spent) for i in (1, 2)]
        kept = sum(t.numel() for s in runs[1][1].state.values() for t in s.values() if isinstance(t, torch.Tensor))
        copies = kept / sum(p.numel() for p in model.parameters())
        lines.append([title, f"{ratios[0]:.2f}", f"{ratios[1]:.2f}", f"{copies:.1f}"])
    return lines


def facts() -> dict[str, Any]:
    def git(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(["git", *words], capture_output=True, text=True, check=False, cwd=HERE.parent)

    changed = git("diff", "--quiet", "HEAD", "--", "*.py").returncode == 1  # the results and the page change on the way
    commit = git("rev-parse", "--short", "HEAD").stdout.strip() + "-dirty" * changed
    found = {
        "commit": commit,
        "bisls": bisls.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
    }
    for name in ("schedulefree", "prodigyopt", "dadaptation", "momo-opt", "dog-optimizer"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "not installed"
    return {**found, "machine": platform.machine()}


# --- the command


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    usual = [f"{steps}x{batch}" for steps, batch in CELLS]
    parser.add_argument(
        "--problems", nargs="+", choices=list(PROBLEMS), metavar="NAME", help="which (default: the ten)"
    )
    parser.add_argument("--kinds", action="store_true", help="the problems of other kinds in place of the ten networks")
    parser.add_argument("--cells", nargs="+", default=usual, help="STEPSxBATCH, such as 300x16 (default: all nine)")
    parser.add_argument(
        "--entries", nargs="+", choices=list(ENTRIES), metavar="NAME", help="which optimisers (default: all)"
    )
    parser.add_argument("--again", action="store_true", help="also what was run before")
    parser.add_argument("--seeds", type=int, default=3, help="0, 1, ... (default: 3)")
    parser.add_argument(
        "--only", choices=("runs", "time", "page"), help="runs without times, times alone, or the page of what is there"
    )
    parser.add_argument("--no-cosine", action="store_true", help="leave out the grid with a schedule, half of the work")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="processes (default: one a core)")
    parser.add_argument("--out", type=Path, default=Path("out"), help="where runs and tables go (default: out)")
    parser.add_argument("--results", type=Path, default=HERE / "results" / "networks.json", help="what is known")
    parser.add_argument("--page", type=Path, default=HERE.parent / "docs" / "networks.md", help="the page")
    asked = parser.parse_args()
    asked.problems = asked.problems or list(KINDS if asked.kinds else NETWORKS)
    try:
        asked.cells = [tuple(int(part) for part in cell.split("x")) for cell in asked.cells]
        if asked.seeds < 1 or any(len(cell) != 2 or min(cell) < 1 for cell in asked.cells):
            raise ValueError
    except ValueError:
        parser.error("--cells wants STEPSxBATCH, such as 300x16, and --seeds at least 1")
    return asked


def jobs_of(asked: argparse.Namespace, store: Store, problems: list[str]) -> list[Job]:
    names = [
        n
        for n, e in ENTRIES.items()
        if e.installed and e.grid != "knob" and not (asked.no_cosine and "cosine" in e.grid)
    ]
    names = asked.entries or names
    wanted = [(n, p, *cell, s) for cell in asked.cells for p in problems for s in range(asked.seeds) for n in names]
    if KNOB_CELL in asked.cells and not asked.entries:
        wanted += [(n, p, *KNOB_CELL, 0) for n, e in ENTRIES.items() if e.grid == "knob" for p in problems]
    wanted.sort(key=lambda job: job[2] * job[3])
    return [job for job in wanted if asked.again or job not in store.rows]


def main() -> None:
    asked, console = parsed(), Console()
    torch.set_num_threads(1)
    store = Store(asked.out / "networks.jsonl")
    there = [name for name in asked.problems if PROBLEMS[name].needs is None or data.where(PROBLEMS[name].needs)]
    for name in asked.problems:
        if name not in there:
            console.print(f"left out: {name}; get its data by 'bisls data {PROBLEMS[name].needs}'")
    missing = sorted({entry.package for entry in ENTRIES.values() if not entry.installed})
    if missing:
        console.print(f"not installed, left out: {', '.join(missing)} (pip install 'bisls[bench]')")
    if asked.only in (None, "runs"):
        todo, commit = jobs_of(asked, store, there), facts()["commit"]
        columns = (TextColumn("runs"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
        with ProcessPoolExecutor(asked.jobs) as pool, Progress(*columns, console=console) as bar:
            task = bar.add_task("runs", total=len(todo))
            waiting = {pool.submit(run, job): job for job in todo}
            for done in as_completed(waiting):
                store.add(waiting[done], {**done.result(), "commit": commit})
                bar.advance(task)
    known = Found.read(asked.results)
    if asked.only in (None, "runs"):
        for cell in asked.cells:
            for problem in there:
                gathered(store, known, problem, cell, asked.seeds)
        for problem in there:
            turned(store, known, problem)
    if asked.only in (None, "time"):
        known.times = timed()
    if asked.only != "page":
        known.facts = facts()
        known.write(asked.results)
    made = tables(known)
    page = asked.page.read_text()
    asked.page.write_text(filled(page, {name: text for name, text in made.items() if f"<!-- {name} -->" in page}))
    console.print(made["summary"], markup=False, soft_wrap=True, highlight=False)


if __name__ == "__main__":
    main()
