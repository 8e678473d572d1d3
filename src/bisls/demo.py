"""The demonstration behind `bisls demo`: a bi-level problem solved with nothing set, beside a grid of tuned Adam."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import matplotlib as mpl  # here, so that a run does not end where it is missing
import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from torch.nn.functional import binary_cross_entropy_with_logits

from bisls.callbacks import Evaluate
from bisls.fit import fit
from bisls.methods import Alternating, BiSLS
from bisls.progress import Progress
from bisls.record import History
from bisls.solver import Solver, SolverError
from bisls.steps import Constant
from bisls.tasks import Task, logistic_penalties
from bisls.tasks.penalties import breast_cancer
from bisls.tasks.solve import Design, logistic

ALPHAS = (0.01, 0.1, 1.0)
BETAS = (0.02, 0.2, 2.0)
EVERY = 20


@dataclass(frozen=True)
class Run:
    """What one method did: the exact upper loss now and then, both step sizes, the loss on rows that neither level has seen."""

    name: str
    values: list[float]
    history: History
    test: float = float("nan")

    @property
    def last(self) -> float:
        """F at the end; infinite where the run ended in values that are not finite."""
        return self.values[-1] if np.isfinite(self.values[-1]) else float("inf")


def run_demo(out: Path, steps: int, seed: int, console: Console) -> Path:
    """Run all, print the table, save the plot; the path of the plot comes back."""
    torch.set_num_threads(1)  # small problems: more threads would only wait for each other
    out.mkdir(parents=True, exist_ok=True)  # before the work, so that a folder that can't be written is said at once
    makers: dict[str, Callable[[Task], Solver]] = {
        "bisls BiSLS (nothing set)": lambda task: BiSLS(task.problem, lower_iters=task.lower_iters)
    }
    for alpha, beta in product(ALPHAS, BETAS):
        makers[f"Adam {alpha:g} / {beta:g}"] = lambda task, a=alpha, b=beta: Alternating(  # type: ignore[misc]
            task.problem, upper_step=Constant(a), lower_step=Constant(b), lower_iters=task.lower_iters
        )
    runs: list[Run] = []
    with Progress(True, steps * len(makers), console=console) as bar:
        for i, (name, make) in enumerate(makers.items()):
            runs.append(_run(name, make, steps, seed, lambda *_, name=name: bar.advance(name)))
            bar.reach(steps * (i + 1))
    best = min(runs[1:], key=lambda run: run.last)
    table = Table(
        title=f"30 penalties of a logistic regression (breast cancer, scikit-learn), {steps} upper iterations; "
        f"F at the start {runs[0].values[0]:.4f}. Adam's two numbers: its step / the lower step",
        caption="checks: trial points an iteration, both levels together. Test loss: of the present weights, on a third split. "
        "As a rule many free penalties fit the split that judges them; bisls.sklearn has groups, folds and a prior against it",
    )
    for column in ("method", "F at the end", "test loss", "checks", ""):
        table.add_column(column, justify="left" if column in ("method", "") else "right")
    for run in runs:
        style = "bold" if run is runs[0] else "green" if run is best else None
        checks = run.history["upper_checks"].mean() + run.history["lower_checks"].mean() if len(run.history) else 0.0
        mark = "best of the grid" if run is best else "" if np.isfinite(run.last) else "not finite"
        table.add_row(run.name, f"{run.last:.4f}", f"{run.test:.4f}", f"{checks:.1f}", mark, style=style)
    held_out, test = _one_penalty()
    table.add_row(
        "one penalty, from a grid of 41", f"{held_out:.4f}", f"{test:.4f}", "", "F by one number", style="cyan"
    )
    console.print(table)
    return _plot(runs, best, out)


def _run(name: str, make: Callable[[Task], Solver], steps: int, seed: int, advance: Callable[..., None]) -> Run:
    torch.manual_seed(seed)
    task = logistic_penalties(seed=seed)
    values: list[float] = [task.exact()]
    solver = make(task)

    def exact() -> float:
        with warnings.catch_warnings():  # a run that is lost may leave a lower problem that can't be solved
            warnings.simplefilter("ignore")
            values.append(task.exact())
        return values[-1]

    try:
        callbacks = (Evaluate(exact, every=EVERY), advance)
        history = fit(solver, task.upper_data, task.lower_data, steps, False, callbacks, on_failure="ignore", tol=None)
    except SolverError:
        values.append(float("inf"))
        history = History()
    return Run(name, values, history, task.metrics().get("test_loss", float("nan")))


def _one_penalty() -> tuple[float, float]:
    """The best of a grid of penalties that all features share: its loss on the held-out rows that chose it, and on test rows."""
    parts = [
        (torch.as_tensor(features, dtype=torch.float64), torch.as_tensor(truth, dtype=torch.float64))
        for features, truth in breast_cancer("demo")
    ]
    (features, truth), held_out, test = parts

    def losses(penalty: float) -> tuple[float, float]:
        penalties = torch.full((features.shape[1],), penalty, dtype=torch.float64)
        w = logistic(Design(features), truth, penalties, torch.zeros_like(penalties))
        found = [float(binary_cross_entropy_with_logits(rows @ w, labels)) for rows, labels in (held_out, test)]
        return found[0], found[1]

    return min(map(losses, np.logspace(-6, 2, 41)))


def _plot(runs: list[Run], best: Run, out: Path) -> Path:
    mpl.use("Agg")
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(12, 5), constrained_layout=True)
    shades = plt.get_cmap("Greys")
    for i, run in enumerate(runs[1:]):
        lost = "" if np.isfinite(run.last) else " (not finite)"
        ks = [EVERY * n for n in range(len(run.values))]
        colour = "tab:green" if run is best else shades(0.3 + 0.06 * i)
        left.plot(ks, run.values, label=run.name + lost, color=colour, lw=1.8 if run is best else 1)
    first = runs[0]
    left.plot([EVERY * n for n in range(len(first.values))], first.values, color="tab:red", lw=2.4, label=first.name)
    title = f"One run with nothing set, {len(runs) - 1} with two guesses"
    left.set(yscale="log", xlabel="upper iteration", ylabel="F(x), lower problem solved exactly", title=title)
    finite = [value for run in runs for value in run.values if np.isfinite(value)]
    left.set_ylim(min(finite) * 0.9, first.values[0] * 2)
    figure.legend(*left.get_legend_handles_labels(), fontsize=8, ncols=4, loc="outside lower center")
    for name, colour, label in (("alpha", "tab:red", "upper step"), ("beta", "tab:blue", "lower step")):
        sizes = first.history[name].astype(float)
        right.plot(np.where(sizes > 0, sizes, np.nan), ".-", ms=3, lw=1, color=colour, label=f"{label} {name}")
    right.set(yscale="log", xlabel="upper iteration", ylabel="step size", title="The step sizes that it found")
    right.legend(fontsize=8)
    path = out / "demo.png"
    figure.savefig(path, dpi=130)
    plt.close(figure)
    return path
