"""Step-size optimisers side by side on logistic regression that no model can fit exactly.

The harness: features standardised, 10 % of the labels flipped, an L2 penalty of 1e-3 / 2 ||w||^2 in the loss, batches of 32 drawn
without replacement in each epoch, 3 seeds, 3000 iterations, all from zero. The gap is the full training loss at the iterate that
the optimiser would hand over (the average, where it keeps one) minus the optimum found by L-BFGS in float64.

    python benchmarks/optimisers.py                 everything, about half an hour on two cores
    python benchmarks/optimisers.py --iters 300 --seeds 1 --data digits       a quick look
    BISLS_DATA=folder python benchmarks/optimisers.py                         also a9a and w8a, if folder has a9a.bz2, w8a.bz2

Runs are kept in out/optimisers.jsonl by what they depend on, so an interrupted command goes on where it stopped. Times are ratios
to torch.optim.SGD measured in the same run.
"""

from __future__ import annotations

import argparse
import bz2
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from math import isfinite, nan, sqrt
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table
from scipy.optimize import minimize
from sklearn import datasets
from torch import Tensor

from bisls import optim

L2, BATCH, FLIPPED = 1e-3, 32, 0.1
KNOBS = (0.1, 1.0, 10.0, 100.0, 1000.0)
GRID = tuple(10.0 ** (power / 2) for power in range(-6, 3))
# The no-knob default was developed on DEVELOPED_ON and only judged on the others (docs/decisions.md).
DATA = ("breast_cancer", "digits", "a9a", "w8a", "wine", "mushrooms")
USUAL = DATA[:4]
DEVELOPED_ON = ("wine", "mushrooms", "a9a", "digits")


# --- data


def _file(name: str) -> Path | None:
    folder = os.environ.get("BISLS_DATA")
    return (
        next((p for p in (Path(folder) / f"{name}.bz2", Path(folder) / name) if p.exists()), None) if folder else None
    )


def available(name: str) -> bool:
    return hasattr(datasets, f"load_{name}") or _file(name) is not None


@cache
def load(name: str) -> tuple[Tensor, Tensor]:
    """Standardised features (a column of ones at the end) and labels with 10 % flipped, in float64."""
    if hasattr(datasets, f"load_{name}"):
        features, labels = getattr(datasets, f"load_{name}")(return_X_y=True)
    else:
        path = _file(name)
        assert path is not None
        with bz2.open(path) if path.suffix == ".bz2" else path.open("rb") as stream:
            sparse, labels = datasets.load_svmlight_file(stream)
        features = sparse.toarray()
    rng = np.random.RandomState(0)
    spread = features.std(0)
    features = ((features - features.mean(0)) / np.where(spread > 0, spread, 1.0))[:, spread > 0]
    _, labels = np.unique(labels, return_inverse=True)
    classes = labels.max() + 1
    flipped = rng.rand(len(labels)) < FLIPPED
    labels = np.where(flipped, (labels + rng.randint(1, classes, len(labels))) % classes, labels)
    features = np.hstack([features, np.ones((len(features), 1))])
    return torch.tensor(features), torch.tensor(labels)


def shape_of(name: str) -> tuple[int, int]:
    """Weights of the model: one column for two classes, one a class otherwise."""
    features, labels = load(name)
    classes = int(labels.max()) + 1
    return features.shape[1], 1 if classes == 2 else classes


def loss_of(w: Tensor, features: Tensor, labels: Tensor) -> Tensor:
    scores = features @ w
    if w.shape[1] == 1:
        fit = torch.nn.functional.binary_cross_entropy_with_logits(scores[:, 0], labels.to(w.dtype))
    else:
        fit = torch.nn.functional.cross_entropy(scores, labels)
    return fit + 0.5 * L2 * w.square().sum()


@cache
def optimum(name: str) -> float:
    features, labels = load(name)
    shape = shape_of(name)

    def both(flat: np.ndarray) -> tuple[float, np.ndarray]:
        w = torch.tensor(flat.reshape(shape), requires_grad=True)
        with torch.enable_grad():
            value = loss_of(w, features, labels)
        value.backward()
        assert w.grad is not None
        return value.item(), w.grad.numpy().ravel()

    flat = np.zeros(shape[0] * shape[1])
    for _ in range(3):
        found = minimize(
            both, flat, jac=True, method="L-BFGS-B", options={"maxiter": 20000, "ftol": 1e-16, "gtol": 1e-9}
        )
        flat = found.x
    return float(found.fun)


# --- optimisers


@dataclass(frozen=True)
class Entry:
    """One optimiser: how to make it from parameters and its knob, what its default is, how it wants to be called."""

    make: Callable[[list[Tensor], float], Any]
    default: float | None  # None: it has none, the best of a grid stands in for it
    call: str  # "loss": closure that returns the loss; "torch": closure with backward; "after": step(loss=...) after backward
    package: str = "bisls"
    knobs: tuple[float, ...] = KNOBS


def _decaying(make: Callable[..., Any]) -> Callable[[list[Tensor], float], Any]:
    def build(params: list[Tensor], knob: float) -> Any:
        optimizer = make(params, lr=knob)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda k: 1 / sqrt(k + 1))
        optimizer.register_step_post_hook(lambda *_: scheduler.step())
        return optimizer

    return build


def _imported(module: str, name: str, **arguments: Any) -> Callable[[list[Tensor], float], Any]:
    def build(params: list[Tensor], knob: float) -> Any:
        return getattr(__import__(module), name)(params, lr=knob, **arguments)

    return build


class _AveragedDoG:
    """DoG with the averager that its authors recommend; eval() shows the average."""

    def __init__(self, params: list[Tensor], knob: float):
        import dog

        self.model = torch.nn.ParameterList(params)
        self.optimizer = dog.DoG(self.model.parameters(), lr=knob)
        self.averager = dog.PolynomialDecayAverager(self.model)
        self.zero_grad, self.params = self.optimizer.zero_grad, params

    def step(self, closure: Callable[[], Any]) -> None:
        self.optimizer.step(closure)
        self.averager.step()

    def eval(self) -> None:
        with torch.no_grad():
            for p, average in zip(self.params, self.averager.averaged_model.parameters(), strict=True):
                p.copy_(average)


ENTRIES = {
    "bisls Auto": Entry(lambda p, knob: optim.Auto(p, lr=knob), 1.0, "loss"),
    "bisls SPSB, averaged": Entry(lambda p, knob: optim.SPSB(p, lr=knob, averaging=True), 10.0, "loss"),
    "bisls SLSB, averaged": Entry(lambda p, knob: optim.SLSB(p, lr=knob, averaging=True), 10.0, "loss"),
    "bisls SPSB": Entry(lambda p, knob: optim.SPSB(p, lr=knob), 1.0, "loss"),
    "bisls SLSB": Entry(lambda p, knob: optim.SLSB(p, lr=knob), 1.0, "loss"),
    "bisls DecSPS": Entry(lambda p, knob: optim.DecSPS(p, lr=knob), 1.0, "loss"),
    "bisls SPSMax": Entry(lambda p, knob: optim.SPSMax(p, lr=knob), 1.0, "loss"),
    "bisls SLS": Entry(lambda p, knob: optim.SLS(p, lr=knob), 1.0, "loss"),
    "schedule-free SGD": Entry(_imported("schedulefree", "SGDScheduleFree"), 1.0, "torch", "schedulefree"),
    "schedule-free AdamW": Entry(_imported("schedulefree", "AdamWScheduleFree"), 0.0025, "torch", "schedulefree"),
    "MoMo": Entry(_imported("momo", "Momo"), 1.0, "after", "momo-opt"),
    "MoMo-Adam": Entry(_imported("momo", "MomoAdam"), 0.01, "after", "momo-opt"),
    "Prodigy": Entry(_imported("prodigyopt", "Prodigy"), 1.0, "torch", "prodigyopt"),
    "DoG, averaged": Entry(_AveragedDoG, 1.0, "torch", "dog-optimizer"),
    "torch SGD, best of grid": Entry(lambda p, knob: torch.optim.SGD(p, lr=knob), None, "torch", "torch", GRID),
    "torch SGD / sqrt(k), best of grid": Entry(_decaying(torch.optim.SGD), None, "torch", "torch", GRID),
    "torch Adam, best of grid": Entry(lambda p, knob: torch.optim.Adam(p, lr=knob), None, "torch", "torch", GRID),
}
MODULES = {"schedulefree": "schedulefree", "momo-opt": "momo", "prodigyopt": "prodigyopt", "dog-optimizer": "dog"}


def missing(entry: Entry) -> str | None:
    module = MODULES.get(entry.package)
    if module and find_spec(module) is None:
        return f"{entry.package} is not installed (pip install 'bisls[bench]')"
    return None


# --- runs


def batches(n: int, iters: int, seed: int) -> Tensor:
    """Row numbers of every batch: each epoch a new permutation, its incomplete last batch left out."""
    rng = torch.Generator().manual_seed(seed)
    size = min(BATCH, n)
    per_epoch = n // size
    epochs = [torch.randperm(n, generator=rng)[: per_epoch * size] for _ in range(iters // per_epoch + 1)]
    return torch.cat(epochs).reshape(-1, size)[:iters]


def train(name: str, knob: float, data: str, seed: int, iters: int) -> dict[str, float]:
    """One run: the gap it reached, forward passes a step, and seconds a step."""
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    features, labels = load(data)
    single = features.float()
    w = torch.nn.Parameter(torch.zeros(shape_of(data)))
    entry = ENTRIES[name]
    optimizer = entry.make([w], knob)
    getattr(optimizer, "train", lambda: None)()
    forwards = 0
    rows = batches(len(labels), iters, seed)
    begin = time.perf_counter()
    for row in rows:
        x, t = single[row], labels[row]

        def closure(x: Tensor = x, t: Tensor = t) -> Tensor:
            nonlocal forwards
            forwards += 1
            if entry.call == "loss":
                return loss_of(w, x, t)
            optimizer.zero_grad()
            loss = loss_of(w, x, t)
            loss.backward()
            return loss

        if entry.call == "after":
            optimizer.step(loss=closure().detach())
        else:
            optimizer.step(closure)
    seconds = (time.perf_counter() - begin) / iters
    getattr(optimizer, "eval", lambda: None)()
    with torch.no_grad():
        gap = loss_of(w.double(), features, labels).item() - optimum(data)
    return {"gap": gap if isfinite(gap) else nan, "forwards": forwards / iters, "seconds": seconds}


def lenet_ratio(repeats: int = 40, settle: int = 32) -> dict[str, float]:
    """Time of a step on a LeNet batch of 256, relative to SGD(foreach) with the same closure, interleaved in one run.

    Mean over whole cycles of ten steps, after the first thirty in which Auto measures at every step.
    """
    torch.set_num_threads(1)
    x, t = torch.randn(256, 1, 32, 32), torch.randint(0, 10, (256,))
    makers = {
        "torch SGD(foreach)": lambda p: torch.optim.SGD(p, lr=1e-3, foreach=True),
        "bisls SPSB": lambda p: optim.SPSB(p, lr=1e-3),
        "bisls SLSB": lambda p: optim.SLSB(p, lr=1e-3),
        "bisls Auto": optim.Auto,
    }
    steps = {}
    for name, make in makers.items():
        torch.manual_seed(0)
        model = torch.nn.Sequential(
            *(torch.nn.Conv2d(1, 6, 5), torch.nn.ReLU(), torch.nn.MaxPool2d(2)),
            *(torch.nn.Conv2d(6, 16, 5), torch.nn.ReLU(), torch.nn.MaxPool2d(2)),
            *(torch.nn.Conv2d(16, 120, 5), torch.nn.ReLU(), torch.nn.Flatten()),
            *(torch.nn.Linear(120, 84), torch.nn.ReLU(), torch.nn.Linear(84, 10)),
        )
        optimizer = make(model.parameters())

        def closure(model: Any = model, optimizer: Any = optimizer) -> Tensor:
            optimizer.zero_grad()
            loss = torch.nn.functional.cross_entropy(model(x), t)
            loss.backward()
            return loss

        steps[name] = lambda optimizer=optimizer, closure=closure: optimizer.step(closure)
    times: dict[str, list[float]] = {name: [] for name in steps}
    for repeat in range(repeats + settle):
        for name, step in steps.items():
            begin = time.perf_counter()
            step()
            if repeat >= settle:
                times[name].append(time.perf_counter() - begin)
    base = np.mean(times["torch SGD(foreach)"])
    return {name: float(np.mean(values) / base) for name, values in times.items()}


# --- the table


def provenance() -> dict[str, str]:
    def installed(package: str) -> str:
        try:
            return version(package)
        except PackageNotFoundError:
            return "not installed"

    commit = subprocess.run(
        ["git", "describe", "--always", "--dirty", "--abbrev=12"],
        cwd=Path(__file__).parent,
        capture_output=True,
        text=True,
        check=False,
    ).stdout.strip()
    packages = ["bisls", "torch", "numpy", "scikit-learn", *MODULES]
    return {"commit": commit, "python": platform.python_version(), **{p: installed(p) for p in packages}}


def mean(values: list[float]) -> float:
    return float(np.mean(values)) if values else nan


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--data",
        nargs="+",
        choices=DATA,
        default=None,
        help="data sets (default: the first four, those that are present)",
    )
    parser.add_argument("--only", nargs="+", default=None, help="optimisers whose name contains one of these words")
    parser.add_argument("--iters", type=int, default=3000)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--out", type=Path, default=Path("out"))
    args = parser.parse_args()
    if min(args.iters, args.seeds, args.jobs) < 1:
        parser.error("--iters, --seeds and --jobs must be at least 1")
    console = Console(width=150 if not sys.stdout.isatty() else None)
    for name in args.data or ():
        if not available(name):
            parser.error(f"--data {name}: set BISLS_DATA to a folder that has {name}.bz2")
    sets = [name for name in args.data or USUAL if available(name)]
    left_out = [name for name in USUAL if name not in sets and not args.data]
    names = [n for n in ENTRIES if not args.only or any(word.lower() in n.lower() for word in args.only)]
    for name in list(names):
        reason = missing(ENTRIES[name])
        if reason:
            console.print(f"[yellow]left out:[/] {escape(name)}: {escape(str(reason))}")
            names.remove(name)
    if not args.only:
        console.print("[yellow]left out:[/] sls, Sps, AdaSLS: no release on the package index installs")
    if left_out:
        console.print(f"[yellow]left out:[/] {', '.join(left_out)}: set BISLS_DATA to a folder that has them")

    origin = provenance()
    args.out.mkdir(parents=True, exist_ok=True)
    log = args.out / "optimisers.jsonl"
    done: dict[tuple, dict] = {}
    failed: dict[str, str] = {}
    if log.exists():
        for line in log.read_text().splitlines():
            row = json.loads(line)
            if row["origin"] == origin:
                done[tuple(row["key"])] = row["result"]
    wanted = []
    for name in names:
        entry = ENTRIES[name]
        knobs = sorted({*entry.knobs, *([entry.default] if entry.default is not None else [])})
        wanted += [
            (name, knob, data, seed, args.iters) for knob in knobs for data in sets for seed in range(args.seeds)
        ]
    waiting = [key for key in wanted if key not in done]
    for data in sets:
        optimum(data)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console) as progress, log.open("a") as stream:
        task = progress.add_task("runs", total=len(wanted), completed=len(wanted) - len(waiting))
        with ProcessPoolExecutor(args.jobs) as pool:
            futures = {pool.submit(train, *key): key for key in waiting}
            for future in as_completed(futures):
                key = futures[future]
                try:
                    done[key] = future.result()
                except Exception as error:  # a peer that fails is a result, not the end of the benchmark
                    failed[key[0]] = f"{type(error).__name__}: {error}"
                    done[key] = {"gap": nan, "forwards": nan, "seconds": nan}
                    continue
                stream.write(json.dumps({"key": key, "result": done[key], "origin": origin}) + "\n")
                stream.flush()
                progress.advance(task)

    for name, reason in failed.items():
        console.print(f"[red]failed:[/] {escape(name)}: {escape(str(reason))}")

    def gaps(name: str, knob: float, data: str) -> float:
        return mean([done[name, knob, data, seed, args.iters]["gap"] for seed in range(args.seeds)])

    summary: dict[str, Any] = {
        "origin": origin,
        "iters": args.iters,
        "seeds": args.seeds,
        "gaps": {},
        "forwards": {},
        "failed": failed,
    }
    for data in sets:
        judged = "developed on" if data in DEVELOPED_ON else "judged only"
        table = Table(
            title=f"{data} ({judged}): gap to the optimum after {args.iters} iterations, mean of {args.seeds} seeds"
        )
        for column in ("optimiser", "default", *(f"{knob:g}" for knob in KNOBS), "worst / best", "forwards a step"):
            table.add_column(column, justify="left" if column == "optimiser" else "right")
        for name in names:
            entry = ENTRIES[name]
            row = {knob: gaps(name, knob, data) for knob in entry.knobs}
            finite = [gap for gap in row.values() if isfinite(gap)]
            if entry.default is None:
                chosen = min(row, key=lambda knob: row[knob] if isfinite(row[knob]) else float("inf"))
                default = f"{row[chosen]:.1e} (lr {chosen:.1e})"
            else:
                chosen = entry.default
                default = f"{gaps(name, chosen, data):.1e}"
            sweep = [row.get(knob) for knob in KNOBS]
            ratio = max(finite) / min(finite) if finite and len(finite) == len(row) else nan
            forwards = mean([done[name, chosen, data, seed, args.iters]["forwards"] for seed in range(args.seeds)])
            shown = [
                "" if gap is None or entry.default is None else f"{gap:.1e}" if isfinite(gap) else "NaN"
                for gap in sweep
            ]
            spread = "" if entry.default is None else f"{ratio:.1f}" if isfinite(ratio) else "NaN"
            table.add_row(name, default, *shown, spread, f"{forwards:.2f}")
            summary["gaps"].setdefault(data, {})[name] = {str(knob): gap for knob, gap in row.items()} | {
                "default": gaps(name, chosen, data)
            }
            summary["forwards"].setdefault(data, {})[name] = forwards
        console.print(table)

    console.print("Timing, one process, interleaved (ratios only) ...")
    small = {}
    timed = min(args.iters, 500)
    base = mean([train("torch SGD, best of grid", 0.1, sets[0], seed, timed)["seconds"] for seed in range(3)])
    for name in [name for name in names if name not in failed]:
        knob = ENTRIES[name].default or 0.1
        small[name] = mean([train(name, knob, sets[0], seed, timed)["seconds"] for seed in range(3)]) / base
    large = lenet_ratio(*((40, 32) if args.iters >= 100 else (2, 1)))
    table = Table(title="Time of a step, relative to torch.optim.SGD in the same run")
    for column in ("optimiser", f"logistic regression ({sets[0]})", "LeNet, batch 256"):
        table.add_column(column, justify="left" if column == "optimiser" else "right")
    for name in dict.fromkeys([*names, *large]):
        table.add_row(
            name, f"{small[name]:.2f}" if name in small else "", f"{large[name]:.2f}" if name in large else ""
        )
    console.print(table)
    summary["time"] = {sets[0]: small, "lenet": large}
    (args.out / "optimisers.json").write_text(json.dumps(summary, indent=1))
    print(f"{args.out / 'optimisers.json'}: all numbers; commit {origin['commit']}, torch {origin['torch']}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
