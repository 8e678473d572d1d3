"""F against time: the untuned default, the same with linear solves that learn nothing, tuned rivals, and L-BFGS on the exact F.

For every task: the exact F(x) (the lower problem solved tightly) along each run, at points that thin out, and the CPU time until
then; evaluating F is not counted. What is compared is the time to within 5 % and 1 % of the lowest F that any run of the task has
seen. `Alternating` is tuned on a grid of both rates (SGD and Adam); its time is shown without and with that of the grid. On
problems without noise scipy's L-BFGS minimises the exact F: the lower problem is solved by Newton's method, from where the last
one ended, or by a factorisation, in double precision, and the gradient is exact.

    python benchmarks/time.py                         all tasks whose data are there (the noisy ones take hours)
    python benchmarks/time.py --tasks "penalties 123 exp" ridge
    python benchmarks/time.py --noiseless             those without noise alone (a quarter of an hour)
    python benchmarks/time.py --sizes                 also an iteration against the number of lower parameters, 10 to 5,000
    python benchmarks/time.py --quick                 a look at whether it runs

`bisls data a9a w8a mnist fashion-mnist` fetches what some need; tasks whose data are not here are left out. Each run has a
process of its own with one thread, one after another. Runs are kept in out/time.jsonl by what they depend on, so an interrupted
command goes on where it stopped. Results: out/time.json, out/time.md, out/time.png, out/time_sizes.png.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import platform
import resource
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from math import inf, isfinite, nan
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.progress import track
from sklearn.datasets import load_diabetes, load_digits

import bisls
from bisls import data, tasks
from bisls.tasks.solve import Design, logistic, newton_solve, ridge

sys.path.insert(0, str(Path(__file__).parent))
from regret import CONTESTS

Exact = Callable[[torch.Tensor, Any], tuple[float, torch.Tensor, Any]]  # x, a start -> F, its gradient, the next start
GRID = [("sgd", a, b) for a in (1.0, 10.0, 100.0, 1000.0) for b in (0.1, 1.0)] + [
    ("adam", a, b) for a in (0.01, 0.1, 1.0) for b in (0.1, 1.0)
]


@dataclass(frozen=True)
class Race:
    """A task, its iterations, and the exact F with its gradient where scipy takes part."""

    make: Callable[[], tasks.Task]
    exact: Callable[[], Exact] | None = None
    steps: int = 200
    needs: str | None = None
    grid: tuple[tuple[str, float, float], ...] = tuple(GRID)


def rows(name: str, train: int, validation: int) -> tuple[tuple[np.ndarray, np.ndarray], ...]:
    """The first rows of a table, in an order that is always the same; labels 0 and 1."""
    table = data.load(name)
    order = np.random.RandomState(0).permutation(len(table.y))[: train + validation]
    features, labels = np.asarray(table.x[order], dtype=np.float64), (table.y[order] > 0).astype(np.float64)
    return (features[:train], labels[:train]), (features[train:], labels[train:])


def penalties(parts: Callable[[], Any] | None, s: Callable, squared: bool = False) -> dict[str, Any]:
    """One penalty a feature: the task, and the exact F in closed form but for the lower solution."""

    def make() -> tasks.Task:
        kind = tasks.ridge_penalties if squared else tasks.logistic_penalties
        return kind(penalty=s) if parts is None else kind(*parts(), penalty=s)

    def exact() -> Exact:
        task = make()
        (a, t), (b, v) = ([part.double() for part in own] for own in (task.lower_data, task.upper_data))
        train, new = Design(a), Design(b)

        def at(x: torch.Tensor, start: torch.Tensor | None) -> tuple[float, torch.Tensor, torch.Tensor]:
            x = x.clone().requires_grad_()
            now = s(x)
            (slope,) = torch.autograd.grad(now.sum(), x)
            p = now.detach()
            with torch.no_grad():
                start = torch.zeros(train.columns, dtype=torch.float64) if start is None else start
                w = ridge(train, t, p) if squared else logistic(train, t, p, start)
                scores = new.times(w)
                if squared:
                    value, error = 0.5 * (scores - v).square().mean(), (scores - v) / len(v)
                    weights = torch.full_like(t, 1 / len(t))
                else:
                    value = torch.nn.functional.binary_cross_entropy_with_logits(scores, v)
                    error, chance = (torch.sigmoid(scores) - v) / len(v), torch.sigmoid(train.times(w))
                    weights = chance * (1 - chance) / len(t)
                z = newton_solve(train.gram(weights) + torch.diag(p), new.transposed(error))
            return float(value), -slope * w * z, w

        return at

    return {"make": make, "exact": exact}


def closed(start: torch.Tensor, lower: Callable, upper: Callable, size: torch.Size, steps: int) -> dict[str, Any]:
    """A problem whose lower loss is a quadratic 1/2 <y, A(x) y> - <b(x), y>, solved by factorisation, differentiated by autograd.

    Args:
        start: x, at first.
        lower: x -> A, b; b may have several columns, each a problem of its own.
        upper: x, y -> f.
        size: The shape of y.
        steps: Iterations.
    """

    def exact() -> Exact:
        def at(x: torch.Tensor, _: None) -> tuple[float, torch.Tensor, None]:
            x = x.double().clone().requires_grad_()
            a, b = lower(x)
            factor, failed = torch.linalg.cholesky_ex(a)
            if failed:
                return nan, torch.zeros_like(x), None
            value = upper(x, torch.cholesky_solve(b.reshape(len(a), -1), factor).reshape(size))
            (gradient,) = torch.autograd.grad(value, x)
            return value.item(), gradient, None

        return at

    def make() -> tasks.Task:
        x, y = start.clone().requires_grad_(), torch.zeros(size).requires_grad_()

        def below(_: Any) -> torch.Tensor:
            a, b = lower(x)
            own = y.reshape(len(a), -1)
            return 0.5 * (own * (a @ own)).sum() - (b.reshape(len(a), -1) * own).sum()

        problem = bisls.Bilevel(lambda _: upper(x, y), below, [x], [y])
        return tasks.Task(
            "closed", problem, None, None, lower_iters=20, exact=lambda: exact()(x.detach(), None)[0], metrics=dict
        )

    return {"make": make, "exact": exact, "steps": steps}


def kernel() -> dict[str, Any]:
    """Kernel ridge regression on diabetes: ten length scales and the penalty."""
    features, target = load_diabetes(return_X_y=True)
    order = np.random.RandomState(0).permutation(len(target))
    features, target = features[order] / features.std(0), (target[order] - target.mean()) / target.std()
    a, b = (torch.from_numpy(features[cut]) for cut in (slice(0, 150), slice(150, 300)))
    t, v = (torch.from_numpy(target[cut]) for cut in (slice(0, 150), slice(150, 300)))

    def gram(x: torch.Tensor, one: torch.Tensor, two: torch.Tensor) -> torch.Tensor:
        scaled = torch.exp(0.5 * x[:10])
        one, two = one.to(x.dtype) * scaled, two.to(x.dtype) * scaled
        square = one.square().sum(1)[:, None] + two.square().sum(1) - 2 * one @ two.T
        return torch.exp(-0.5 * square)

    def lower(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return gram(x, a, a) + torch.exp(x[10]) * torch.eye(150, dtype=x.dtype), t.to(x.dtype)

    def upper(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return 0.5 * (gram(x, b, a) @ y - v.to(x.dtype)).square().mean()

    start = torch.cat([torch.full((10,), -2.3), torch.zeros(1)])
    return closed(start, lower, upper, torch.Size([150]), 200)


def image() -> dict[str, Any]:
    """Noisy digits: y is the picture cleaned, x the weights of eight filters whose answers are penalised."""
    pictures = torch.from_numpy(load_digits().images[:40] / 16.0).reshape(40, 64).T
    noisy = pictures + 0.4 * torch.from_numpy(np.random.RandomState(0).randn(64, 40))
    draw = np.random.RandomState(1)
    bank = [np.array([[1, -1, 0], [0, 0, 0], [0, 0, 0]]), np.array([[1, 0, 0], [-1, 0, 0], [0, 0, 0]])]
    bank += [draw.randn(3, 3) for _ in range(6)]
    products = []
    for kernel in bank:
        kernel = torch.from_numpy(np.asarray(kernel, dtype=np.float64))[None, None]
        matrix = torch.nn.functional.conv2d(torch.eye(64, dtype=torch.float64).view(64, 1, 8, 8), kernel, padding=1)
        matrix = matrix.reshape(64, -1).T
        products.append(matrix.T @ matrix)
    stacked = torch.stack(products)

    def lower(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        a = torch.eye(64, dtype=x.dtype) + torch.einsum("k,kij->ij", torch.exp(x), stacked.to(x.dtype))
        return a, noisy.to(x.dtype)

    def upper(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return 0.5 * (y - pictures.to(x.dtype)).square().mean()

    return closed(torch.full((8,), -3.0), lower, upper, torch.Size([64, 40]), 100)


@cache
def races() -> dict[str, Race]:
    a9a, w8a = (lambda: rows("a9a", 4000, 3000)), (lambda: rows("w8a", 8000, 6000))
    found = {
        "penalties 30": Race(**penalties(None, torch.sigmoid)),
        "penalties 30 exp": Race(**penalties(None, torch.exp)),
        "penalties 123 exp": Race(**penalties(a9a, torch.exp), needs="a9a"),
        "penalties 300": Race(**penalties(w8a, torch.sigmoid), needs="w8a"),
        "ridge": Race(**penalties(None, torch.exp, squared=True)),
        "kernel": Race(**kernel()),
        "image": Race(**image()),
    }
    for name, own in CONTESTS.items():
        if name not in ("penalties", "penalties exp", "ridge exp"):
            grid = [(m, a, b) for m in ("sgd", "adam") for a in getattr(own, m) for b in own.beta]
            found[name] = Race(lambda own=own: own.make(0), None, own.steps, own.needs, tuple(grid))
    return found


def solver_for(method: str, task: tasks.Task) -> bisls.Solver:
    """A method by its name: BiSLS, BiSLS without learning, sgd or adam with two rates."""
    kind, *rates = method.split(" ")
    common = {"lower_iters": task.lower_iters}
    if kind == "BiSLS":
        return bisls.BiSLS(task.problem, **common)
    if kind == "forgetful":
        linear = bisls.CG(tol=1e-3, iters=50, damp=True, stretch=10)
        polish = bisls.CG(tol=1e-2, iters=50, damp=True)
        return bisls.BiSLS(task.problem, hypergrad=bisls.Implicit(linear, spread=4.0), polish=polish, **common)
    alpha, beta = map(float, rates)
    direction = bisls.Steepest() if kind == "sgd" else bisls.Adam(search_momentum=False)
    steps = {"upper_step": bisls.Constant(alpha), "lower_step": bisls.Constant(beta)}
    return bisls.Alternating(task.problem, direction=direction, **steps, **common)


def peak() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def scored(steps: int) -> list[int]:
    """After which iterations F is looked at: each of the first ten, then ever more of them between."""
    return sorted({*range(1, min(10, steps) + 1), *(int(10 * 1.1**k) for k in range(60) if 10 * 1.1**k < steps), steps})


def run(name: str, method: str, steps: int) -> dict[str, Any]:
    """One run: seconds and F along it, evaluations an iteration, memory above that before the run in MB."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    warnings.simplefilter("ignore")
    race = races()[name]
    if method == "L-BFGS":
        return by_scipy(race, steps)
    task = race.make()
    solver, before, marks = solver_for(method, task), peak(), scored(steps)
    trace, spent, error = [(0.0, task.exact())], 0.0, ""
    for first, last in zip([0, *marks], marks, strict=False):
        start = time.process_time()
        try:
            fitted = {"progress": False, "on_failure": "ignore", "tol": None}
            if task.upper_data is None:
                for _ in range(last - first):
                    solver.step(None, None)
            elif isinstance(task.upper_data, tuple):
                for _ in range(last - first):
                    solver.step(task.upper_data, task.lower_data)
            else:
                bisls.fit(solver, task.upper_data, task.lower_data, last - first, **fitted)
        except (bisls.SolverError, FloatingPointError) as caught:
            error = type(caught).__name__
            break
        spent += time.process_time() - start
        trace.append((spent, task.exact()))
    cost = {name: count / max(solver.k, 1) for name, count in solver.oracle.cost.__dict__.items()}
    return {"trace": trace, "cost": cost, "memory": peak() - before, "steps": solver.k, "error": error}


def by_scipy(race: Race, steps: int) -> dict[str, Any]:
    """L-BFGS on the exact F: the lowest value so far at each evaluation."""
    from scipy.optimize import minimize

    assert race.exact is not None
    x, exact, before = race.make().problem.x.read().double(), race.exact(), peak()
    trace: list[tuple[float, float]] = []
    start, began = None, time.process_time()

    def at(point: np.ndarray) -> tuple[float, np.ndarray]:
        nonlocal start
        value, gradient, found = exact(torch.from_numpy(point).clone(), start)
        if not isfinite(value):  # too far: the search is sent back
            value, gradient, found = 10 * abs(trace[0][1]), torch.zeros_like(gradient), start
        start = found
        trace.append((time.process_time() - began, min(value, trace[-1][1]) if trace else value))
        return value, gradient.numpy()

    minimize(at, x.numpy(), jac=True, method="L-BFGS-B", options={"maxiter": steps, "maxfun": 3 * steps})
    return {"trace": trace, "cost": {}, "memory": peak() - before, "steps": len(trace), "error": ""}


def reached(trace: list[tuple[float, float]], goal: float) -> float:
    """The time at which a run is at the goal for the first time; infinite where it never is."""
    return next((seconds for seconds, value in trace if value <= goal), inf)


class Runs:
    """Finished runs, kept in a file by what they depend on; those that are missing run in a process of their own."""

    def __init__(self, path: Path):
        self.path = path
        lines = path.read_text().splitlines() if path.exists() else []
        self.rows = {row["key"]: row for row in map(json.loads, (line for line in lines if line.endswith("}")))}

    def get(self, name: str, method: str, steps: int) -> dict[str, Any]:
        made = method if method == "L-BFGS" else repr(solver_for(method, races()["ridge"].make()))
        key = json.dumps([name, method, steps, made])
        if key not in self.rows:
            with multiprocessing.get_context("fork").Pool(1) as pool:
                row = {"key": key, "commit": commit(), **pool.apply(run, (name, method, steps))}
            self.rows[key] = row
            with self.path.open("a") as file:
                file.write(json.dumps(row) + "\n")
        return self.rows[key]


def commit() -> str:
    call = ["git", "describe", "--always", "--dirty"]
    return subprocess.run(call, capture_output=True, text=True, check=False, cwd=Path(__file__).parent).stdout.strip()


def raced(name: str, runs: Runs, steps: int, quick: bool) -> dict[str, Any]:
    """All runs of a task, and when each was where."""
    race = races()[name]
    grid = [f"{kind} {alpha:g} {beta:g}" for kind, alpha, beta in (race.grid[:2] if quick else race.grid)]
    methods = ["BiSLS", "forgetful", *(["L-BFGS"] if race.exact else []), *grid]
    found = {method: runs.get(name, method, steps) for method in track(methods, name)}
    values = {method: [v for _, v in row["trace"] if isfinite(v)] for method, row in found.items()}
    best = min(min(own) for own in values.values() if own)
    # the tuned rival: of those that come within 1 % (or 5 %) the fastest, otherwise the one that gets lowest
    low = {method: min(values[method], default=inf) for method in grid}
    tuned = min(
        grid, key=lambda m: (reached(found[m]["trace"], 1.01 * best), reached(found[m]["trace"], 1.05 * best), low[m])
    )
    tuning = sum(found[method]["trace"][-1][0] for method in grid)
    table = {}
    for label, method in [(m, m) for m in methods if m not in grid] + [("tuned", tuned)]:
        row = found[method]
        table[label] = {
            "method": method,
            "within 5 %": reached(row["trace"], 1.05 * best),
            "within 1 %": reached(row["trace"], 1.01 * best),
            "F": min(values[method], default=inf),
            "seconds": row["trace"][-1][0],
            "products": row["cost"].get("hessian_products"),
            "steps": row["steps"],
            "memory": row["memory"],
            "trace": row["trace"],
            "commit": row["commit"],
        }
    return {"best": best, "tuning": tuning, "grid": len(grid), "methods": table}


def made_up(d: int, n: int = 2000) -> tasks.Task:
    """Logistic regression on d made-up columns of very different sizes."""
    draw = np.random.RandomState(0)
    features = draw.randn(n + 1000, d) * 3 * (np.arange(1, d + 1) ** -0.5)[draw.permutation(d)] + 0.5 * draw.randn(
        n + 1000, 1
    )
    truth = draw.randn(d) * (draw.rand(d) < 0.3)
    labels = (3 * features @ truth / np.sqrt(d) + draw.randn(n + 1000) > 0).astype(np.float64)
    return tasks.logistic_penalties((features[:n], labels[:n]), (features[n:], labels[n:]), penalty=torch.exp)


def size(d: int, method: str, steps: int) -> dict[str, Any]:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    task = made_up(d)
    solver, start = solver_for(method, task), time.process_time()
    for _ in range(steps):
        solver.step(task.upper_data, task.lower_data)
    seconds = (time.process_time() - start) / steps
    return {"ms": 1e3 * seconds, "products": solver.oracle.cost.hessian_products / steps, "F": task.exact()}


def sizes(ds: tuple[int, ...], steps: int) -> dict[str, list[dict[str, Any]]]:
    found: dict[str, list[dict[str, Any]]] = {"BiSLS": [], "forgetful": []}
    for d in track(ds, "sizes"):
        for method, own in found.items():
            with multiprocessing.get_context("fork").Pool(1) as pool:
                own.append({"d": d, **pool.apply(size, (d, method, steps))})
    return found


def text_of(results: dict[str, Any], by_size: dict[str, list[dict[str, Any]]], steps: int) -> str:
    def shown(seconds: float) -> str:
        return f"{seconds:.2f}" if isfinite(seconds) else "never"

    lines = [
        "| task | method | s to 5 % | s to 1 % | lowest F | products an iteration | iterations | s in all | MB more |"
    ]
    lines += ["|---|---|---|---|---|---|---|---|---|"]
    for name, own in results.items():
        for label, row in own["methods"].items():
            title = {"forgetful": "BiSLS, no learning", "L-BFGS": "L-BFGS on the exact F"}.get(label, label)
            title = f"tuned: {row['method']}, best of {own['grid']}" if label == "tuned" else title
            products = "" if row["products"] is None else f"{row['products']:.0f}"
            lines.append(
                f"| {name} | {title} | {shown(row['within 5 %'])} | {shown(row['within 1 %'])} | {row['F']:.4f} | {products} | "
                f"{row['steps']} | {row['seconds']:.2f} | {row['memory']:.0f} |"
            )
        lines.append(f"| {name} | the grid itself | | | | | | {own['tuning']:.2f} | |")
    if by_size:
        lines += [
            "",
            f"| lower parameters | ms an iteration ({steps} of them) | without learning | products | without | F | without |",
        ]
        lines += ["|---|---|---|---|---|---|---|"]
        for new, old in zip(by_size["BiSLS"], by_size["forgetful"], strict=True):
            lines.append(
                f"| {new['d']} | {new['ms']:.1f} | {old['ms']:.1f} | {new['products']:.0f} | {old['products']:.0f} | "
                f"{new['F']:.4f} | {old['F']:.4f} |"
            )
    return "\n".join(lines)


def draw(results: dict[str, Any], by_size: dict[str, list[dict[str, Any]]], out: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    colours = {"BiSLS": "#1f5aa6", "forgetful": "#8fb3dd", "L-BFGS": "#c2571a", "tuned": "#6b6b6b"}
    titles = {"forgetful": "BiSLS, no learning", "L-BFGS": "L-BFGS on the exact F"}
    if results:
        across = min(3, len(results))
        down = -(-len(results) // across)
        figure, axes = plt.subplots(
            down, across, figsize=(4.2 * across, 3.2 * down), squeeze=False, layout="constrained"
        )
        for axis in axes.flat[len(results) :]:
            axis.set_visible(False)
        for axis, (name, own) in zip(axes.flat, results.items(), strict=False):
            for label, row in own["methods"].items():
                points = [(s, v / own["best"] - 1) for s, v in row["trace"] if isfinite(v) and s > 0]
                if points:
                    seconds, above = zip(*points, strict=True)
                    floor = [max(v, 1e-4) for v in above]
                    axis.loglog(seconds, floor, color=colours[label], label=titles.get(label, label), lw=1.6)
            axis.axhline(0.01, color="#bbbbbb", lw=0.8, ls=":")
            axis.set_title(name, fontsize=10)
            axis.set_xlabel("CPU seconds")
            axis.set_ylabel("F over the lowest known, less 1")
        axes.flat[0].legend(fontsize=7)
        figure.savefig(out / "time.png", dpi=110)
    if by_size:
        figure, axis = plt.subplots(figsize=(5.4, 3.6), layout="constrained")
        for label, own in by_size.items():
            axis.loglog(
                [r["d"] for r in own],
                [r["ms"] for r in own],
                "o-",
                color=colours[label],
                label=titles.get(label, label),
                ms=3.5,
            )
        axis.set_xlabel("lower parameters")
        axis.set_ylabel("ms an iteration")
        axis.legend(fontsize=8)
        figure.savefig(out / "time_sizes.png", dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", nargs="+", choices=list(races()), help="some of them (default: all)")
    parser.add_argument("--noiseless", action="store_true", help="those without noise alone")
    parser.add_argument("--sizes", action="store_true", help="also an iteration against the number of lower parameters")
    parser.add_argument("--quick", action="store_true", help="few iterations, a grid of two")
    parser.add_argument("--out", type=Path, default=Path("out"), help="where the results go (default: out)")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    arguments.out.mkdir(parents=True, exist_ok=True)
    console, runs, results = Console(), Runs(arguments.out / "time.jsonl"), {}
    for name, race in races().items():
        if arguments.tasks is None and arguments.noiseless and race.exact is None:
            continue
        if arguments.tasks is not None and name not in arguments.tasks:
            continue
        if race.needs and data.where(race.needs) is None:
            console.print(f"{name}: left out, its data are not here (bisls data {race.needs})", markup=False)
            continue
        results[name] = raced(name, runs, 6 if arguments.quick else race.steps, arguments.quick)
    steps = 3 if arguments.quick else 30
    ds = (10, 80) if arguments.quick else (10, 30, 60, 64, 65, 70, 130, 300, 600, 1000, 1010, 2000, 3000, 5000)
    by_size = sizes(ds, steps) if arguments.sizes else {}
    facts = {"commit": commit(), "torch": torch.__version__, "python": platform.python_version(), "threads": 1}
    found = {"facts": facts, "results": results, "sizes": by_size}
    (arguments.out / "time.json").write_text(json.dumps(found, indent=1))
    text = text_of(results, by_size, steps)
    (arguments.out / "time.md").write_text(text + "\n")
    draw(results, by_size, arguments.out)
    console.print(text, markup=False, soft_wrap=True)


if __name__ == "__main__":
    main()
