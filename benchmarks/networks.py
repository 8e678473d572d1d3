"""Training networks with nothing set, beside tuned grids and beside others that ask for no learning rate.

Ten small networks (benchmarks/training/problems.py), runs of 300, 1,000 and 3,000 steps, batches of 16, 128 and 1,024. What is
compared is the loss on unseen data at the end. Regret is that loss over the tuned one: the best of a grid of constant rates
for Adam and for SGD with momentum (chosen by the mean over the seeds, on that same loss, for each problem, length and batch).

    python benchmarks/networks.py                                   everything: days on two cores, goes on where it stopped
    python benchmarks/networks.py --cells 300x16 300x128 1000x16    some lengths and batches
    python benchmarks/networks.py --problems cnn mlp --seeds 1      a quick look
    python benchmarks/networks.py --entries "bisls Auto"            some optimisers; what else is there stays
    python benchmarks/networks.py --only time                       the time of a step over AdamW's, and memory

Networks with BatchNorm are judged with the statistics that training left, for everybody. Runs are kept in out/networks.jsonl by
what they depend on. Results: out/networks.json, out/networks.md. Data: `bisls data mnist fashion-mnist a9a`.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import platform
import subprocess
import time
import warnings
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
from training.problems import PROBLEMS, batches, judged, loss_of

import bisls
from bisls import data, optim

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
                return loss_of(model, batch)

            if entry.call == "loss":
                optimizer.step(closure)
                continue
            optimizer.zero_grad()
            value = closure()
            value.backward()
            optimizer.step(**({"loss": value.detach()} if entry.call == "after" else {}))
        getattr(optimizer, "eval", lambda: None)()
        loss = judged(model, rows.test)
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


def best(store: Store, grid: str, problem: str, cell: tuple[int, int], seeds: int) -> tuple[float, str] | None:
    names = [name for name, entry in ENTRIES.items() if entry.grid == grid]
    found = [(store.loss(name, problem, cell, seeds), name) for name in names]
    return (
        None
        if any(loss is None for loss, _ in found)
        else min((loss, name) for loss, name in found if loss is not None)
    )


def table(store: Store, cells: list[tuple[int, int]], problems: list[str], seeds: int) -> tuple[str, dict[str, Any]]:
    """Regret, a row for each problem, length and batch, in Markdown; and the numbers behind it."""
    shown = [OURS, *RIVALS, "tuned, cosine"]
    lines = [f"| network | steps x batch | tuned | {' | '.join(shown)} |", "|---" * (3 + len(shown)) + "|"]
    regrets: dict[str, list[float]] = {name: [] for name in shown}
    for problem in problems:
        for cell in cells:
            tuned = best(store, "tuned", problem, cell, seeds)
            if tuned is None:
                continue
            row = {name: store.loss(name, problem, cell, seeds) for name in shown[:-1]}
            cosine = best(store, "tuned, cosine", problem, cell, seeds)
            row["tuned, cosine"] = None if cosine is None else cosine[0]
            texts = []
            for name in shown:
                loss = row[name]
                if loss is None:
                    texts.append("")
                    continue
                regrets[name].append(loss / tuned[0])
                texts.append("lost" if loss == inf else f"{loss / tuned[0]:.3f}")
            kind = "" if PROBLEMS[problem].developed else " (judged)"
            lines.append(
                f"| {problem}{kind} | {cell[0]} x {cell[1]} | {tuned[0]:.4f} ({tuned[1]}) | {' | '.join(texts)} |"
            )
    for name, measure in (("median", median), ("worst", max)):
        parts = [f"{measure(own):.3f}" if own else "" for own in regrets.values()]
        lines.append(f"| **{name}** | | | {' | '.join(parts)} |")
    return "\n".join(lines) + "\n", {
        name: {"median": median(own), "worst": max(own)} for name, own in regrets.items() if own
    }


def knob_table(store: Store, problems: list[str]) -> str:
    """The loss for each start over that of the default: nothing should depend on it."""
    lines = [
        f"| network | {' | '.join(f'{knob:g}' for knob in KNOBS)} | worst / best |",
        "|---" * (2 + len(KNOBS)) + "|",
    ]
    for problem in problems:
        usual = store.loss(OURS, problem, KNOB_CELL, 1)
        found = [store.loss(f"{OURS}, lr {knob:g}", problem, KNOB_CELL, 1) for knob in KNOBS]
        if usual is None or any(loss is None for loss in found):
            continue
        known = [loss for loss in found if loss is not None]
        lines.append(
            f"| {problem} | {' | '.join(f'{loss / usual:.3f}' for loss in known)} | {max(known) / min(known):.3f} |"
        )
    return "\n".join(lines) + "\n"


def times(repeats: int = 12, turn: int = 24) -> str:
    """The time of a step over AdamW(foreach=True)'s, taking turns, and what is kept in copies of the parameters."""
    lenet = nn.Sequential(
        nn.Conv2d(1, 6, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(6, 16, 5), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(16, 120, 4), nn.ReLU(), nn.Flatten(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, 10),
    )  # fmt: skip
    cases = {"LeNet, batches of 256": (lenet, PROBLEMS["cnn"], 256)}
    cases["transformer, batches of 32"] = (PROBLEMS["characters"].network(), PROBLEMS["characters"], 32)
    lines = [
        "| network | closure that returns the loss | torch's closure | copies of the parameters |",
        "|---|---|---|---|",
    ]
    for title, (model, problem, size) in cases.items():
        rows = problem.rows()
        makes = [lambda m: torch.optim.AdamW(m.parameters(), foreach=True), *[lambda m: optim.Auto(m.parameters())] * 2]
        runs = []
        for i, make in enumerate(makes):
            own = copy.deepcopy(model)
            runs.append((own, make(own), batches(rows.train, size, 0), i))

        def one(own: nn.Module, optimizer: Any, drawn: Any, kind: int) -> float:
            batch, start = next(drawn), time.perf_counter()

            def closure() -> torch.Tensor:
                if kind == 1:
                    return loss_of(own, batch)
                optimizer.zero_grad()
                loss = loss_of(own, batch)
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
        lines.append(f"| {title} | {ratios[0]:.2f} | {ratios[1]:.2f} | {copies:.1f} |")
    return "\n".join(lines) + "\n"


def facts() -> dict[str, Any]:
    call = ["git", "describe", "--always", "--dirty"]
    commit = subprocess.run(call, capture_output=True, text=True, check=False, cwd=Path(__file__).parent).stdout.strip()
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
    parser.add_argument("--problems", nargs="+", choices=list(PROBLEMS), default=list(PROBLEMS), help="which networks")
    parser.add_argument("--cells", nargs="+", default=usual, help="STEPSxBATCH, such as 300x16 (default: all nine)")
    parser.add_argument(
        "--entries", nargs="+", choices=list(ENTRIES), metavar="NAME", help="which optimisers (default: all)"
    )
    parser.add_argument("--seeds", type=int, default=3, help="0, 1, ... (default: 3)")
    parser.add_argument(
        "--only", choices=("runs", "time", "page"), help="runs without times, times alone, or the page of what is there"
    )
    parser.add_argument("--no-cosine", action="store_true", help="leave out the grid with a schedule, half of the work")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="processes (default: one a core)")
    parser.add_argument("--out", type=Path, default=Path("out"), help="where runs and tables go (default: out)")
    asked = parser.parse_args()
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
    return [job for job in wanted if job not in store.rows]


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
        todo = jobs_of(asked, store, there)
        columns = (TextColumn("runs"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
        with ProcessPoolExecutor(asked.jobs) as pool, Progress(*columns, console=console) as bar:
            task = bar.add_task("runs", total=len(todo))
            waiting = {pool.submit(run, job): job for job in todo}
            for done in as_completed(waiting):
                store.add(waiting[done], done.result())
                bar.advance(task)
    page, summary = table(store, asked.cells, there, asked.seeds)
    page += "\n" + knob_table(store, there)
    if asked.only in (None, "time"):
        page += "\n" + times()
    own = facts()
    page += "\n" + ", ".join(f"{name} {value}" for name, value in own.items()) + f"; seeds 0 to {asked.seeds - 1}.\n"
    (asked.out / "networks.md").write_text(page)
    (asked.out / "networks.json").write_text(json.dumps({"facts": own, "regret": summary}, indent=1))
    console.print(page, markup=False, soft_wrap=True, highlight=False)


if __name__ == "__main__":
    main()
