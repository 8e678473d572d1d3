"""What the long commands show: figures done, runs done, time left; and what they do when something is missing."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.markup import escape
from rich.table import Column, Table

from bisls import data, tasks
from bisls._files import write_whole
from bisls.data import DataError, fetch, where
from bisls.directions import Steepest
from bisls.experiments import BACKENDS, NAMES, READINGS, SCALES, SEEDS, Figure, Plan, Store, figure, reproduce
from bisls.experiments.base import Config, RunRecord
from bisls.interrupts import stopped_alike
from bisls.methods import Alternating, BiSLS, BiSPS
from bisls.outcome import Judgement, Outcome
from bisls.progress import Sweep
from bisls.report import read_outcomes, write_report
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


class Display:
    """Shows a sweep: a bar in a terminal, a line a minute in a log. Writes each figure's outcome as soon as it is there.

    Args:
        console: Where to.
        figures: How many figures.
        out: The folder of the outcomes.
    """

    def __init__(self, console: Console, figures: int, out: Path):
        self.console, self.out = console, out
        self.progress = Sweep(console, figures)
        self.found, self.finished, self.all, self.lost = 0, 0, 0, 0
        self.broken: list[str] = []

    def wanted(self, runs: Sequence[Config], found: int) -> None:
        """More runs."""
        self.found += found
        self.all += len(runs)
        self.progress.wanted(len(runs), sum(config.work for config in runs))
        if runs or found:
            earlier = f", {found} are there from earlier commands" if found else ""
            self.console.print(f"{len(runs)} runs are to be made{earlier}")

    def done(self, config: Config, record: RunRecord) -> None:
        """A run is finished."""
        self.finished += 1
        self.lost += bool(record.error)
        self.progress.ran(config.work)

    def failed(self, config: Config, reason: str) -> None:
        """A run could not be made: say which, and why."""
        self.console.print(f"[red]a run could not be made:[/] {escape(str(config))}: {escape(reason)}")

    def figure(self, outcome: Outcome) -> None:
        """A figure is finished: keep it, and say what it came to."""
        write_whole(self.out / "outcomes" / f"{outcome.name}.json", outcome.to_json())
        self.progress.drew()
        said = ", ".join(MARKS[verdict.judgement] for verdict in outcome.verdicts)
        self.console.print(f"[bold]{escape(outcome.name)}[/]: {said}")

    def dropped(self, figure: Figure, reason: str) -> None:
        """A figure can't be finished."""
        self.broken.append(figure.name)
        self.console.print(f"[red]{escape(figure.name)} is left out:[/] {escape(reason)}")


def show_data(console: Console) -> None:
    """The data sets, and where they are."""
    table = Table("name", "rows x features", Column("where", overflow="fold"), "to get it")
    for name, dataset in data.DATASETS.items():
        try:
            paths = where(name)
            place = "not here" if paths is None else str(paths[0] if len(paths) == 1 else paths[0].parent)
        except DataError as error:
            paths, place = None, str(error)
        table.add_row(
            name, f"{dataset.rows:,} x {dataset.features}", escape(place), "" if paths else f"bisls data {name}"
        )
    console.print(table)


def show_figures(console: Console) -> None:
    """The figures, what they are about, which data they need, and about how long they take at each scale."""
    scales = [scale for scale in SCALES if scale != "smoke"]
    table = Table(Column("figure", no_wrap=True), "about", "data", *(f"{scale}, h" for scale in scales), box=None)
    asked: dict[str, dict[str, float]] = {scale: {} for scale in scales}
    for name in NAMES:
        one, hours = figure(name), []
        for scale in scales:
            runs = {config.key: config.work for config in next(one.ask(Plan(scale, SEEDS[scale])))}
            asked[scale] |= runs
            hours.append(_hours(runs))
        table.add_row(name, one.title, ", ".join(one.data) or "none", *hours)
    table.add_row("all", "what several ask for is run once", "", *(_hours(asked[scale]) for scale in scales))
    console.print(table)
    console.print(
        "h: core-hours of the runs that a figure asks for first, estimated; tuning may ask for more by what it finds."
    )


def _hours(runs: Mapping[str, float]) -> str:
    return f"{sum(runs.values()) / 3600:.2g}"


def planned(scale: str, seeds: int | None, reading: str, backend: str) -> Plan:
    """The plan of a command; what is not known is refused by the name of its option."""
    options = (("--scale", scale, SCALES), ("--reading", reading, READINGS), ("--backend", backend, BACKENDS))
    for option, value, known in options:
        if value not in known:
            raise UsageError(f"{option} {value!r} is none of {', '.join(known)}")
    return Plan(scale, seeds or SEEDS[scale], READINGS[reading])


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


def of_one_kind(out: Path, scale: str, reading: str) -> None:
    """Refuse a folder with outcomes of another scale or reading: one page, one of each."""
    if not any((out / "outcomes").glob("*.json")):  # none yet, or a command was killed before its first
        return
    for outcome in read_outcomes(out):
        for what, there, asked in (("scale", outcome.scale, scale), ("reading", outcome.reading, reading)):
            if there and there != asked:
                raise UsageError(f"{out} has outcomes of the {what} {there!r}; give another --out for {asked!r}")


def run_reproduce(
    figures: Sequence[Figure], plan: Plan, out: Path, jobs: int, backend: str, console: Console
) -> tuple[list[Outcome], Display]:
    """Make what is missing, judge, write outcomes."""
    display = Display(console, len(figures), out)
    with display.progress, stopped_alike():
        outcomes = reproduce(figures, plan, Store(out / "runs"), display, jobs, backend)
    return outcomes, display


def write_page(out: Path) -> tuple[Path, tuple[Outcome, ...]]:
    """The page and the plots of all outcomes in the folder, those of earlier commands too."""
    outcomes = read_outcomes(out, NAMES)
    return write_report(outcomes, out), outcomes


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
