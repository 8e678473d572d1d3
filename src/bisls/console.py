"""What the long commands show: figures done, runs done, time left; and what they do when something is missing."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, Task, TextColumn, TimeElapsedColumn
from rich.text import Text

from bisls import tasks
from bisls._files import write_whole
from bisls.data import DataError, fetch
from bisls.directions import Steepest
from bisls.experiments import NAMES, Figure, Plan, Store, figure, reproduce
from bisls.experiments.base import Config, RunRecord
from bisls.methods import Alternating, BiSLS, BiSPS
from bisls.outcome import Judgement, Outcome
from bisls.report import write_report
from bisls.sensitivity import SensitivityReport, sensitivity
from bisls.solver import Solver
from bisls.steps import Constant

MARKS = {
    Judgement.HOLDS: "[green]holds[/]",
    Judgement.FAILS: "[red]fails[/]",
    Judgement.UNDECIDED: "[yellow]undecided[/]",
}


class UsageError(ValueError):
    """The command was called in a way that can't be meant."""


class _TimeLeft(ProgressColumn):
    """The time left, by the work that is done: runs differ a hundredfold in length."""

    def render(self, task: Task) -> Text:
        left = task.fields.get("left")
        return Text("" if left is None else f"about {_duration(left)} left", style="progress.remaining")


class Display:
    """Shows a sweep: a bar in a terminal, a line now and then in a log. Writes each figure's outcome as soon as it is there.

    Args:
        console: Where to.
        figures: How many figures.
        out: The folder of the outcomes.
    """

    def __init__(self, console: Console, figures: int, out: Path):
        self.console, self.out = console, out
        self.progress = Progress(
            TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), _TimeLeft(),
            console=console,
        )  # fmt: skip
        self.figures = self.progress.add_task("figures", total=figures)
        self.runs = self.progress.add_task("runs", total=0, left=None)
        self.work_done, self.work_all, self.cached, self.finished, self.all = 0.0, 0.0, 0, 0, 0
        self.lost = 0
        self.began = time.monotonic()

    def wanted(self, runs: Sequence[Config], cached: int) -> None:
        """More runs."""
        self.cached += cached
        self.all += len(runs)
        self.work_all += sum(config.work for config in runs)
        self.progress.update(self.runs, total=self.all)
        if cached:
            self.progress.console.print(f"{cached} runs were done before, {len(runs)} are to be done")

    def done(self, config: Config, record: RunRecord) -> None:
        """A run is finished."""
        self.finished += 1
        self.lost += bool(record.error)
        self.work_done += config.work
        elapsed = time.monotonic() - self.began
        left = elapsed * (self.work_all - self.work_done) / self.work_done if self.work_done > 0 else None
        self.progress.update(self.runs, advance=1, left=left)
        if not self.console.is_terminal and self.finished % 10 == 0:
            self.console.print(f"{self.finished} of {self.all} runs done, about {_duration(left or 0.0)} left")

    def figure(self, outcome: Outcome) -> None:
        """A figure is finished: keep it, and say what it came to."""
        write_whole(self.out / "outcomes" / f"{outcome.name}.json", outcome.to_json())
        self.progress.advance(self.figures)
        said = ", ".join(MARKS[verdict.judgement] for verdict in outcome.verdicts)
        self.progress.console.print(f"[bold]{escape(outcome.name)}[/]: {said}")


def _duration(seconds: float) -> str:
    minutes = int(seconds // 60)
    return (
        f"{minutes // 60} h {minutes % 60} min"
        if minutes >= 60
        else f"{minutes} min"
        if minutes
        else f"{int(seconds)} s"
    )


def chosen_figures(names: Sequence[str]) -> list[Figure]:
    """The figures of these names, or all of them."""
    for name in names:
        if name not in NAMES:
            near = get_close_matches(name, NAMES, 1, 0.5)
            hint = f" (did you mean {near[0]}?)" if near else ""
            raise UsageError(f"there is no figure {name!r}{hint}. Known: {', '.join(NAMES)}")
    return [figure(name) for name in dict.fromkeys(names or NAMES)]


def with_data(figures: Sequence[Figure], plan: Plan, console: Console) -> tuple[list[Figure], list[str]]:
    """The figures whose data are there or could be fetched, and the names of those that have to be left out."""
    if plan.scale == "smoke":  # made of what scikit-learn ships
        return list(figures), []
    missing: set[str] = set()
    for name in sorted({name for one in figures for name in one.data}):
        try:
            fetch(name, console)
        except DataError as error:
            missing.add(name)
            console.print(f"[yellow]{escape(name)} can't be had:[/] {escape(str(error))}", soft_wrap=True)
    left_out = [one.name for one in figures if missing & set(one.data)]
    return [one for one in figures if one.name not in left_out], left_out


def run_reproduce(
    figures: Sequence[Figure], plan: Plan, out: Path, jobs: int, backend: str, console: Console
) -> tuple[list[Outcome], Display]:
    """Run what is missing, judge, write outcomes and the page."""
    display = Display(console, len(figures), out)
    store = Store(out / "runs")
    with display.progress:
        outcomes = reproduce(figures, plan, store, display, jobs, backend)
    return outcomes, display


def write_page(outcomes: Sequence[Outcome], out: Path) -> Path:
    """The page and the plots of these outcomes."""
    return write_report(outcomes, out)


def tally(outcomes: Sequence[Outcome], ours: bool) -> str:
    """How many statements hold, fail, are undecided."""
    verdicts = [verdict for outcome in outcomes for verdict in outcome.verdicts if verdict.ours is ours]
    counts = {kind: sum(verdict.judgement is kind for verdict in verdicts) for kind in Judgement}
    return (
        f"{counts[Judgement.HOLDS]} hold, {counts[Judgement.FAILS]} fail, {counts[Judgement.UNDECIDED]} are undecided"
    )


SWEPT = {
    "bisls": "BiSLS",
    "paper": "BiSLS as in the paper",
    "bisps": "BiSPS",
    "adam": "Adam with constant steps",
    "sgd": "SGD with constant steps",
}


def _cleaning() -> tasks.Task:
    from sklearn.datasets import load_digits

    digits = load_digits()
    return tasks.cleaning(digits.data / 16.0, digits.target, train=1000, validation=400, batch_size=64)


TASKS: dict[str, Callable[[], tasks.Task]] = {
    "penalties": tasks.logistic_penalties,
    "penalties-exp": lambda: tasks.logistic_penalties(penalty=torch.exp),
    "ridge": tasks.ridge_penalties,
    "cleaning": _cleaning,
    "quadratic": tasks.quadratic,
}


def run_sensitivity(name: str, method: str, steps: int, seeds: int) -> SensitivityReport:
    """Sweep both first steps of a method on a ready task; the score is the exact F at the end."""
    for value, known in ((name, TASKS), (method, SWEPT)):
        if value not in known:
            raise UsageError(f"{value!r} is none of {', '.join(known)}")
    current: dict[int, tasks.Task] = {}

    def make(alpha: float, beta: float) -> tuple[Solver, Any, Any]:
        task = TASKS[name]()
        current.clear()
        common: dict[str, Any] = {"lower_iters": task.lower_iters}
        constant: dict[str, Any] = {"upper_step": Constant(alpha), "lower_step": Constant(beta)}
        makers: dict[str, Callable[[], Solver]] = {
            "bisls": lambda: BiSLS(task.problem, alpha=alpha, beta=beta, **common),
            "paper": lambda: BiSLS.paper(task.problem, alpha=alpha, beta=beta, **common),
            "bisps": lambda: BiSPS(task.problem, alpha=alpha, beta=beta, **common),
            "adam": lambda: Alternating(task.problem, **constant, **common),
            "sgd": lambda: Alternating(task.problem, direction=Steepest(), **constant, **common),
        }
        solver = makers[method]()
        current[id(solver)] = task
        return solver, task.upper_data, task.lower_data

    def score(solver: Any) -> float:
        with warnings.catch_warnings():  # a run that is lost may leave a lower problem that can't be solved
            warnings.simplefilter("ignore")
            return current[id(solver)].exact()

    torch.set_num_threads(1)
    return sensitivity(make, steps=steps, seeds=range(seeds), score=score)
