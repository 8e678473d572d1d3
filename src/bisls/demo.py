"""The demonstration behind `bisls demo`: a classifier trained with no learning rate, beside a grid of SGD."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from torch import Tensor, nn

from bisls import optim

GRID = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0)
BATCH = 32


@dataclass(frozen=True)
class Run:
    """What one optimiser did: training loss over the epochs, steps taken, and accuracy on data not seen."""

    name: str
    losses: list[float]
    steps: list[float]
    accuracy: float


def run_demo(out: Path, epochs: int, seed: int, console: Console) -> Path:
    """Train all, print the table, save the plot; the path of the plot comes back."""
    out.mkdir(parents=True, exist_ok=True)  # before the work, so that a folder that can't be written is said at once
    train, test = _digits(seed)
    makers: dict[str, Callable[[list[Tensor]], Any]] = {"bisls Auto (nothing to set)": optim.Auto}
    makers |= {f"SGD, lr = {lr:g}": partial(torch.optim.SGD, lr=lr) for lr in GRID}
    columns = (TextColumn("{task.description:<28}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("training", total=epochs * len(makers))
        runs = []
        for name, make in makers.items():
            progress.update(task, description=name)
            runs.append(_train(name, make, train, test, epochs, seed, lambda: progress.advance(task)))
    table = Table(title=f"Handwritten digits (scikit-learn), two-layer network, {epochs} epochs, batch {BATCH}")
    for column in ("optimiser", "training loss", "test accuracy"):
        table.add_column(column, justify="left" if column == "optimiser" else "right")
    best = min(runs[1:], key=lambda run: run.losses[-1] if run.losses[-1] == run.losses[-1] else float("inf"))
    for run in runs:
        style = "bold" if run is runs[0] else "green" if run is best else None
        mark = "  (best of the grid)" if run is best else ""
        table.add_row(run.name + mark, f"{run.losses[-1]:.2g}", f"{run.accuracy:.1%}", style=style)
    console.print(table)
    return _plot(runs, best, out)


def _digits(seed: int) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    from sklearn.datasets import load_digits

    features, labels = load_digits(return_X_y=True)
    x, t = torch.tensor(features, dtype=torch.float32) / 16.0, torch.tensor(labels)
    order = torch.randperm(len(t), generator=torch.Generator().manual_seed(seed))
    return (x[order[:1440]], t[order[:1440]]), (x[order[1440:]], t[order[1440:]])


def _train(
    name: str,
    make: Callable[[list[Tensor]], Any],
    train: tuple[Tensor, Tensor],
    test: tuple[Tensor, Tensor],
    epochs: int,
    seed: int,
    advance: Callable[[], None],
) -> Run:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = make(list(model.parameters()))
    switch = isinstance(optimizer, optim.Auto)
    order = torch.Generator().manual_seed(seed)
    losses, steps = [], []
    for _ in range(epochs):
        for rows in torch.split(torch.randperm(len(train[1]), generator=order), BATCH):

            def closure(rows: Tensor = rows) -> Tensor:
                loss = nn.functional.cross_entropy(model(train[0][rows]), train[1][rows])
                if not switch:
                    optimizer.zero_grad()
                    loss.backward()  # type: ignore[no-untyped-call]
                return loss

            optimizer.step(closure)
            steps.append(optimizer.last_step_size if switch else optimizer.param_groups[0]["lr"])
        if switch:
            optimizer.eval()
        with torch.no_grad():
            losses.append(nn.functional.cross_entropy(model(train[0]), train[1]).item())
            hits = (model(test[0]).argmax(1) == test[1]).float().mean().item()
        if switch:
            optimizer.train()
        advance()
    return Run(name, losses, steps, hits)


def _plot(runs: list[Run], best: Run, out: Path) -> Path:
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(12, 5), constrained_layout=True)
    shades = plt.get_cmap("Greys")
    for i, run in enumerate(runs[1:]):
        style: dict[str, Any] = (
            {"color": "tab:green", "lw": 1.8} if run is best else {"color": shades(0.3 + 0.06 * i), "lw": 1}
        )
        left.plot(range(1, len(run.losses) + 1), run.losses, label=run.name, **style)
    left.plot(range(1, len(runs[0].losses) + 1), runs[0].losses, color="tab:red", lw=2.4, label=runs[0].name)
    left.set(
        yscale="log", xlabel="epoch", ylabel="training loss", title="One run with nothing to set, nine with a guess"
    )
    finite = [loss for run in runs for loss in run.losses if 0 < loss < float("inf")]
    left.set_ylim(max(min(finite) / 2, 1e-6), 10)
    figure.legend(*left.get_legend_handles_labels(), fontsize=8, ncols=4, loc="outside lower center")
    right.plot(runs[0].steps, color="tab:red", lw=1.2, label=runs[0].name)
    right.axhline(best.steps[0], color="tab:green", label=best.name + " (best of the grid)")
    right.set(yscale="log", xlabel="step", ylabel="step size", title="The step size it found")
    right.legend(fontsize=8)
    path = out / "demo.png"
    figure.savefig(path, dpi=130)
    plt.close(figure)
    return path
