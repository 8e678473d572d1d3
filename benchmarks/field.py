"""Side by side with the other libraries: quality after equal iterations, time from a cold start, with and without tuning.

Each library runs in an environment of its own, made here with the pins of side_by_side/contestants.py; one that cannot be
installed or imported is left out, with the reason. A worker (peers/) is one process: it reads the problem from a file, keeps
x after every iteration with the time since it was launched, and this command scores all of them the same way, with the exact
F(x). So imports and compiling count. One process at a time, one thread.

    python benchmarks/field.py                                        everything (hours; goes on where it stopped)
    python benchmarks/field.py --problems plain exp --peers bisls torch
    python benchmarks/field.py --quick                                few iterations, no grids: a look at whether it runs
    python benchmarks/field.py --rates 0.003/0.03 --peers bisls torchopt --problems representation   one pair, no grid
    python benchmarks/field.py --page docs/field.md                   only the page and its plots, from the rows of --out;
                                                                      problems without rows stay as the page has them

Rows go to out/field.jsonl as they come, tables and plots to out/field.md and out/field-*.png.
"""

from __future__ import annotations

import argparse
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from side_by_side import page
from side_by_side.contestants import ENVIRONMENTS, PEERS, ROOT, Variant
from side_by_side.environments import Refused, digest, made
from side_by_side.networks import Judged
from side_by_side.problems import PROBLEMS, Penalties, Problem
from side_by_side.runs import Job, Row, Rows, key_of, run

from bisls import data

DEFAULT = ("plain", "exp", "w8a", "representation", "few-shot", "weight-network", "sample-weights")


class Contest:
    """All runs of one command."""

    def __init__(self, arguments: argparse.Namespace, console: Console):
        self.arguments, self.console = arguments, console
        self.rows = Rows(arguments.out / "field.jsonl", arguments.fresh)
        self.session = facts(arguments)
        self.rows.add({"kind": "facts", **self.session})
        self.pythons: dict[str, Path | None] = {}
        self.progress = Progress(
            TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), console=console
        )

    def interpreter(self, peer: str) -> Path | None:
        """The interpreter of a peer, or None (with a row that says why) where it has none."""
        name = PEERS[peer].environment
        if name not in self.pythons:
            if self.arguments.here:
                self.pythons[name] = Path(sys.executable)
            else:
                self.progress.console.print(f"environment for {escape(name)} ...")
                try:
                    self.pythons[name] = made(name, ENVIRONMENTS[name], self.arguments.envs)
                except Refused as refusal:
                    self.pythons[name] = None
                    self.rows.add({"kind": "skipped", "environment": name, "reason": str(refusal)})
                    self.progress.console.print(f"[yellow]left out:[/] {escape(name)}: {escape(str(refusal))}")
                else:
                    self.rows.add({"kind": "made", "environment": name})
        return self.pythons[name]

    def settled(self, problem: Problem) -> Problem:
        """The problem at the size that was asked for."""
        if self.arguments.quick:
            problem = replace(problem, iterations=10, race=None, tune=False)
        if self.arguments.iterations:
            problem = replace(problem, iterations=self.arguments.iterations)
        return problem

    def goals(self, problem: Problem) -> list[float]:
        """F within 5 % of the reference, or the accuracies."""
        if isinstance(problem, Judged):
            return list(problem.goals)
        key = f"reference {problem.name} " + digest([Path(sys.modules[Penalties.__module__].__file__ or "")])
        if key not in self.rows.known:
            begun = time.time()
            found = problem.reference(lambda text: self.progress.console.print(escape(text)))
            row = {"kind": "reference", "key": key, "problem": problem.name, **found, "wall": time.time() - begun}
            self.rows.add(row)
        return [1.05 * self.rows.known[key]["F"]]

    def all(self, title: str, jobs: list[Job], problem: Problem, arrays: Path, goals: list[float]) -> list[Row]:
        """The rows of jobs: those that are known, and the others run now, one at a time."""
        bar = self.progress.add_task(title, total=len(jobs))
        found = []
        for job in jobs:
            python = self.interpreter(job.peer)
            if python is None:
                self.progress.advance(bar)
                continue
            key = key_of(job, problem)
            if key not in self.rows.known:
                self.progress.update(bar, description=f"{title} ({job.name})")
                row = run(job, problem, arrays, python, goals, self.arguments.threads)
                self.rows.add({"key": key, "session": self.session["started"], **row})
                self.progress.console.print(line(row))
            found.append(self.rows.known[key])
            self.progress.advance(bar)
        self.progress.update(bar, description=title)
        return found

    def contest(self, problem: Problem) -> None:
        """Everything on one problem, whose arrays are there for the workers meanwhile."""
        goals = self.goals(problem)
        with tempfile.TemporaryDirectory() as folder:
            arrays = Path(folder) / "problem.npz"
            problem.write(arrays)
            self.stages(problem, arrays, goals)

    def stages(self, problem: Problem, arrays: Path, goals: list[float]) -> None:
        """Equal iterations first, then longer runs for those that did not arrive, then the grids."""

        def job(peer: str, variant: Variant, pair: tuple[float, float], repeat: int = 0, long: bool = False) -> Job:
            iterations = problem.race if long and problem.race else problem.iterations
            cap = problem.race_cap if long else problem.cap
            return Job(problem.name, peer, variant.name, *pair, iterations, cap, repeat)

        def longer(peer: str, variant: Variant, rows: list[Row], pair: tuple[float, float]) -> list[Job]:
            # where accuracies are compared after equal times, all run until then
            arrived = isinstance(problem, Penalties) and any(row["arrivals"][-1] for row in rows)
            lost = any(row["nan"] is not None or row["error"] for row in rows)
            return [] if not rows or arrived or lost or not problem.race else [job(peer, variant, pair, long=True)]

        chosen = self.arguments.variants
        entries = [
            (peer, variant)
            for peer in self.arguments.peers
            for variant in PEERS[peer].variants(problem.kind)
            if not chosen or variant.name in chosen
        ]
        shared = [(peer, v) for peer, v in entries if isinstance(problem, Penalties) or not v.grid]
        repeats = 1 if self.arguments.quick else self.arguments.repeats
        jobs = [job(peer, v, v.base, repeat) for repeat in range(repeats) for peer, v in shared]
        rows = self.all(f"{problem.name}: equal iterations", jobs, problem, arrays, goals)

        def of(peer: str, variant: Variant, found: list[Row]) -> list[Row]:
            return [row for row in found if (row["peer"], row["variant"]) == (peer, variant.name)]

        jobs = [one for peer, v in shared for one in longer(peer, v, of(peer, v, rows), v.base)]
        self.all(f"{problem.name}: longer", jobs, problem, arrays, goals)
        if problem.tune:
            tuned = [(peer, v) for peer, v in entries if v.grid]
            own = [(peer, v) for peer, v in tuned if not v.tuned_as]
            # in turns, so that a run that is cut short has as many rates of each
            turns = zip_longest(*([(peer, v, pair) for pair in self.arguments.rates or v.pairs] for peer, v in own))
            jobs = [job(*one) for turn in turns for one in turn if one]
            rows = self.all(f"{problem.name}: grids", jobs, problem, arrays, goals)
            jobs = []
            for peer, v in tuned:
                if v.tuned_as:
                    found = page.best(
                        [row for row in rows if (row["peer"], row["variant"]) == v.tuned_as], problem.kind
                    )
                    jobs.append(job(peer, v, (found["alpha"], found["beta"]) if found else v.base))
            rows += self.all(f"{problem.name}: with the rates of others", jobs, problem, arrays, goals)
            again = []
            for peer, v in tuned:
                best = page.best(of(peer, v, rows), problem.kind)
                if best is not None:
                    pair = best["alpha"], best["beta"]
                    again += longer(peer, v, [best], pair)
                    again += [job(peer, v, pair, repeat) for repeat in range(1, repeats)]
            self.all(f"{problem.name}: best of the grids", again, problem, arrays, goals)
        elif isinstance(problem, Judged):
            jobs = [job(peer, v, v.base) for peer, v in entries if v.grid]
            self.all(f"{problem.name}: one rate each", jobs, problem, arrays, goals)


def line(row: Row) -> str:
    """A finished run, for the screen."""
    job = Job(**{name: row[name] for name in Job.__dataclass_fields__})
    arrivals = ", ".join("never" if a is None else f"{a['wall']:.1f} s" for a in row["arrivals"])
    final = "NaN" if row["nan"] is not None else "-" if row["final"] is None else f"{row['final']:.4f}"
    rates = f" {row['alpha']:g}/{row['beta']:g}" if any(v.grid for v in _variants(row)) else ""
    return escape(f"{job.name}{rates}: {final}, goal {arrivals}, {row['wall']:.1f} s {row['error'][:100]}")


def _variants(row: Row) -> Iterator[Variant]:
    variants = PEERS[row["peer"]].variants(PROBLEMS[row["problem"]].kind)
    return (v for v in variants if v.name == row["variant"])


def facts(arguments: argparse.Namespace) -> dict[str, Any]:
    """The machine, the versions and the commit."""
    call = ["git", "describe", "--always", "--dirty"]
    commit = subprocess.run(call, capture_output=True, text=True, check=False, cwd=ROOT).stdout.strip()
    return {
        "started": time.strftime("%Y-%m-%d %H:%M:%S"),
        "commit": commit,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "system": f"{platform.system()} {platform.machine()}",
        "processor": _processor(),
        "cores": os.cpu_count(),
        "threads": arguments.threads,
        "quick": arguments.quick,
    }


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8", errors="replace").splitlines() if info.exists() else []
    return next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.processor())


def _pair(text: str) -> tuple[float, float]:
    above, below = text.split("/")
    return float(above), float(below)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--problems", nargs="*", default=list(DEFAULT), choices=list(PROBLEMS))
    parser.add_argument("--peers", nargs="*", default=list(PEERS), choices=list(PEERS))
    parser.add_argument("--variants", nargs="*", metavar="NAME", help="only these of each library, such as BiSLS or CG")
    parser.add_argument(
        "--rates", nargs="*", type=_pair, metavar="A/B", help="rates above and below, in place of the grids"
    )
    parser.add_argument("--quick", action="store_true", help="10 iterations, one repeat, no grids")
    parser.add_argument("--iterations", type=int, help="upper iterations (default: 200)")
    parser.add_argument("--repeats", type=int, default=3, help="of the runs whose time is reported (default: 3)")
    parser.add_argument("--threads", type=int, default=1, help="threads of each worker (default: 1)")
    parser.add_argument("--out", type=Path, default=Path("out"), help="where rows and tables go (default: out)")
    parser.add_argument("--envs", type=Path, help="where environments are made (default: envs inside --out)")
    parser.add_argument("--here", action="store_true", help="make no environments: this interpreter for all")
    parser.add_argument("--fresh", action="store_true", help="forget the rows of earlier runs")
    parser.add_argument("--page", type=Path, help="only write this page, and its plots into plots/ beside it")
    arguments = parser.parse_args()
    arguments.envs = (arguments.envs or arguments.out / "envs").absolute()
    arguments.out = arguments.out.absolute()
    torch.set_num_threads(arguments.threads)
    console = Console()
    if arguments.page:
        arguments.page.parent.mkdir(parents=True, exist_ok=True)
        rows = Rows(arguments.out / "field.jsonl").rows
        before = arguments.page.read_text(encoding="utf-8") if arguments.page.exists() else ""
        text = page.render(rows, arguments.page.parent / "plots", "plots/", before)
        arguments.page.write_text(text, encoding="utf-8")
        return
    usual = signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # as Ctrl-C: through the blocks that end the child
    contest = Contest(arguments, console)
    try:
        with contest.progress:
            for name in arguments.problems:
                problem = PROBLEMS[name]
                if problem.needs and data.where(problem.needs) is None:
                    contest.rows.add(
                        {
                            "kind": "left out",
                            "problem": name,
                            "reason": f"`bisls data {problem.needs}` fetches its data",
                        }
                    )
                    console.print(f"[yellow]left out:[/] {name}: bisls data {problem.needs} would fetch what it needs")
                    continue
                contest.contest(contest.settled(problem))
    except KeyboardInterrupt:
        console.print("stopped; all finished runs are kept, and the same command goes on from here")
        raise SystemExit(130) from None
    finally:
        signal.signal(signal.SIGTERM, usual)
        text = page.render(contest.rows.rows, arguments.out, "")
        (arguments.out / "field.md").write_text(text, encoding="utf-8")
    print(f"tables in {arguments.out / 'field.md'}")


if __name__ == "__main__":
    main()
