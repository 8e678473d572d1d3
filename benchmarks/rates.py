"""Measured rates of convergence against the paper's Theorems 1 to 3, on problems that meet their assumptions.

Theorem 1 (convex, not strongly): E f(mean iterate) - f* = O(log K / sqrt K) with the ceiling gamma_b0 / sqrt(k + 1).
Theorem 2 (strongly convex): O(log K / K) with the ceiling gamma_b0 / (k + 1), gamma_b0 = 1 / mu, and the mean from k_0 on.
Theorem 3 (bi-level, BiSPS): mean over k of E ||grad F(x_k)||^2 = O(log K / sqrt K).

A run gives the quantity at every K = 2^5, 2^6, ...; the slope is that of the straight line through log(mean over seeds)
against log K over the last four octaves, its standard error that of the jackknife over seeds. The theorems bound from above, so
a steeper slope is no fault:

    holds      slope <= exponent + 0.05 + 2 s.e.
    undecided  above that, but by no more than the theorem's factor log K explains over these K; or the s.e. exceeds 0.1
    fails      above that too

Theorem 3 asks for T >= log(alpha_b0 L_f^2 + 2) / -log(1 - mu_g C), where C = min(1 / (2 p L_g), beta_b0 / K): with beta_b0
fixed T has to grow like K, and the bound, which has T as a factor where the lower level is noisy, then does not fall. The runs
take the T that is asked for at the largest K (with beta_b0 = 32), and T = 10 beside it, which is too few by that condition.

The rules are SPSB, SLSB and BiSPS with two samples, as the theorems ask, and with one. Rules whose ceiling does not decay
are run beside them: a check that they pass would be no check at all.

    python benchmarks/rates.py              about a quarter of an hour on one core
    python benchmarks/rates.py --quick      fewer iterations and seeds: a look at whether it runs

Runs are kept in out/rates.jsonl by what they depend on (the commit among it), so an interrupted command goes on where it stopped.
Results: out/rates.json, out/rates.md, out/rates.png.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from functools import cache
from math import ceil, isfinite, log, sqrt
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table
from torch import Tensor

import bisls
from bisls import optim

FIRST = 5  # the smallest K looked at is 2^FIRST
OCTAVES = 4  # slopes are taken over the last so many doublings of K: a rate says nothing about the start


# --- Theorems 1 and 2: a finite sum of smooth convex losses


@dataclass(frozen=True)
class FiniteSum:
    """f(x) = mean_i rho(<a_i, x> - b_i) + ridge / 2 ||x||^2 with rho(r) = sqrt(1 + r^2) - 1.

    Each f_i is convex, smooth with L_i = ||a_i||^2 + ridge, at least 0 (so l_i* = 0), and its gradient is bounded (on the ball
    of the given radius where there is a ridge, which iterates are then projected onto).
    """

    rows: Tensor
    targets: Tensor
    best: Tensor
    ridge: float = 0.0
    radius: float | None = None

    @property
    def smoothness(self) -> float:
        return float(self.rows.square().sum(1).max()) + self.ridge

    def loss(self, x: Tensor, i: int) -> Tensor:
        value = (1.0 + (self.rows[i] @ x - self.targets[i]) ** 2).sqrt() - 1.0
        return value if self.ridge == 0.0 else value + 0.5 * self.ridge * (x @ x)

    def full(self, x: Tensor) -> Tensor:
        residuals = self.rows @ x - self.targets
        return ((1.0 + residuals**2).sqrt() - 1.0).mean() + 0.5 * self.ridge * (x @ x)

    def gap(self, x: Tensor) -> float:
        return float(self.full(x) - self.full(self.best))


def hadamard(power: int) -> Tensor:
    matrix = torch.ones(1, 1, dtype=torch.float64)
    for _ in range(power):
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    return matrix


# Residuals at x* that balance, 2 rho'(-r) + rho'(R) = 0 with rho' = 0.4 and 0.8, but are not symmetric: a rule whose steps do
# not tend to zero ends beside x*.
LEFT, RIGHT = 0.4 / sqrt(1 - 0.4**2), 0.8 / sqrt(1 - 0.8**2)


@cache
def convex() -> FiniteSum:
    """Not strongly convex, nor interpolated, with x* and f* in closed form.

    The features are the rows of a 64 x 64 Hadamard matrix whose column j is divided by j^1.5: their covariance has the
    eigenvalues 1 / j^3, down to 4e-6, far below 1 / (sum of the steps), and rho grows linearly. x*_j = 3 / sqrt j (with changing
    sign), so that much of x* lies where f is flat: there the gap falls hardly faster than 1 / sqrt K. Every row appears three
    times, with residuals that balance at x*.
    """
    index = torch.arange(1, 65, dtype=torch.float64)
    rows = hadamard(6) / index**1.5
    best = 3.0 * index**-0.5 * torch.where(index % 3 == 0, -1.0, 1.0)
    noise = torch.tensor([LEFT, LEFT, -RIGHT], dtype=torch.float64)
    targets = ((rows @ best)[:, None] + noise).reshape(-1)
    return FiniteSum(rows.repeat_interleave(3, 0), targets, best)


@cache
def strongly_convex() -> FiniteSum:
    """The same with 16 features and a ridge of mu = 0.1; x* by Newton's method."""
    index = torch.arange(1, 17, dtype=torch.float64)
    rows = hadamard(4) / index
    noise = torch.tensor([LEFT, LEFT, -RIGHT], dtype=torch.float64)
    targets = ((rows @ (3.0 / index))[:, None] + noise).reshape(-1)
    rows, mu = rows.repeat_interleave(3, 0), 0.1
    best = 3.0 / index  # where the residuals balance; the ridge moves it
    for _ in range(50):
        residuals = rows @ best - targets
        root = (1.0 + residuals**2).sqrt()
        gradient = rows.T @ (residuals / root) / len(rows) + mu * best
        hessian = rows.T @ (rows / root[:, None] ** 3) / len(rows) + mu * torch.eye(16, dtype=torch.float64)
        best = best - torch.linalg.solve(hessian, gradient)
    assert float(gradient.norm()) < 1e-12
    return FiniteSum(rows, targets, best, ridge=mu, radius=2.0 * float(best.norm()))


@dataclass(frozen=True)
class Single:
    """A single-level run: which rule, with one sample or two, under a ceiling that decays with this power."""

    theorem: int
    rule: str
    samples: int
    control: bool = False

    @property
    def exponent(self) -> float:
        return -0.5 if self.theorem == 1 else -1.0

    def problem(self) -> FiniteSum:
        return convex() if self.theorem == 1 else strongly_convex()

    def settings(self) -> dict[str, Any]:
        """gamma_b0 and where the mean begins; c = 1/2, as in the rates that the paper spells out."""
        problem = self.problem()
        if self.theorem == 1:
            return {"gamma_b0": 2.0, "c": 0.5, "mean_from": 0}
        ceiling = 1.0 / problem.ridge
        return {"gamma_b0": ceiling, "c": 0.5, "mean_from": max(1, ceil(ceiling * problem.smoothness) - 1)}

    def optimizer(self, x: Tensor) -> torch.optim.Optimizer:
        numbers = {"lr": self.settings()["gamma_b0"], "c": self.settings()["c"]}
        if not self.control:
            numbers["power"] = -self.exponent
        return getattr(optim, self.rule)([x], **numbers)

    def run(self, seed: int, steps: int, start: float = 0.0) -> list[float]:
        """f(mean iterate) - f* at K = 2^FIRST, ..., steps; from start times x*."""
        problem, rng = self.problem(), np.random.default_rng(seed)
        x = (start * problem.best).requires_grad_()
        optimizer = self.optimizer(x)
        picks = rng.integers(len(problem.rows), size=(steps, 2)).tolist()
        total, count, gaps, begin = torch.zeros_like(problem.best), 0, [], self.settings()["mean_from"]
        for k, (i, j) in enumerate(picks):
            if k >= begin:
                total += x.detach()
                count += 1
            if self.samples == 2:
                optimizer.step(lambda i=i: problem.loss(x, i), lambda j=j: problem.loss(x, j))
            else:
                optimizer.step(lambda i=i: problem.loss(x, i))
            if problem.radius is not None:
                with torch.no_grad():
                    x.mul_(min(1.0, problem.radius / max(1e-300, float(x.norm()))))
            if k + 1 in marks(steps):
                gaps.append(problem.gap(total / count))
        return gaps


# --- Theorem 3: a stochastic bi-level problem


class Noisy:
    """A bi-level problem with noise at both levels and F in closed form.

        g(x, y; m, n) = 1/2 (y - A x - a - e_n)' H_m (y - A x - a - e_n),         so y*(x) = A x + a
        f(x, y; i) = sum_j rho(B y - b_i)_j + sum_j rho(x - c_i)_j

    H_m = Q diag(h_m) Q' has mean eigenvalues 1 to 2, each of them changed by up to half of itself; the e_n, b_i, c_i are
    normal, and sum_n e_n = 0. Each sampled g is convex and at least 0, which it reaches: l* = 0 is exact. rho is
    sqrt(1 + r^2) - 1, or, not convex, r^2 / (2 + 2 r^2); both have bounded first and second derivatives (|rho''| <= 1).
    A has orthogonal columns of norm 0.5, B is orthogonal. x begins at a distance of 0.5 from a stationary point of F: from
    afar the way there, which falls as 1 / K in the mean, would hide the noise, which does not.
    """

    def __init__(self, convex: bool, seed: int = 0):
        rng = torch.Generator().manual_seed(seed)

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=rng, dtype=torch.float64)

        n_x, n_y, pairs = 5, 8, 16
        basis, _ = torch.linalg.qr(normal(n_y, n_y))
        spread = 0.5 * (2 * torch.rand(pairs // 2, n_y, generator=rng, dtype=torch.float64) - 1)
        eigenvalues = torch.linspace(1.0, 2.0, n_y, dtype=torch.float64) * (1 + torch.cat([spread, -spread]))
        self.hessians = torch.einsum("ij,mj,kj->mik", basis, eigenvalues, basis)
        self.view, _ = torch.linalg.qr(normal(n_y, n_y))
        self.response = 0.5 * torch.linalg.qr(normal(n_y, n_x))[0]
        self.offset, noise = 0.5 * normal(n_y), normal(pairs, n_y)
        self.noise = noise - noise.mean(0)
        self.targets, self.centres = (0.5 * (normal(n) + normal(pairs, n)) for n in (n_y, n_x))
        self.convex = convex
        self.curvature = float(eigenvalues.max())  # of any sampled g, in y
        start = self.stationary(normal(n_x))
        away = normal(n_x)
        self.x = (start + 0.5 * away / away.norm()).requires_grad_()
        self.y = normal(n_y).requires_grad_()
        self.problem = bisls.Bilevel(self.upper, self.lower, [self.x], [self.y])

    def rho(self, r: Tensor) -> Tensor:
        return (1 + r * r).sqrt() - 1 if self.convex else 0.5 * r * r / (1 + r * r)

    def upper_at(self, x: Tensor, y: Tensor, rows: Any) -> Tensor:
        fit = self.rho(y @ self.view.T - self.targets[rows]).sum(-1)
        return (fit + self.rho(x - self.centres[rows]).sum(-1)).mean()

    def upper(self, row: int) -> Tensor:
        return self.upper_at(self.x, self.y, row)

    def lower(self, batch: Any) -> Tensor:
        """One pair (m, n); an iterator of pairs is drawn from, so that every lower step and every factor has a fresh one."""
        m, n = next(batch) if isinstance(batch, Iterator) else batch
        gap = self.y - self.response @ self.x - self.offset - self.noise[n]
        return 0.5 * gap @ (self.hessians[m] @ gap)

    def gradient(self, x: Tensor) -> Tensor:
        """The gradient of F."""
        x = x.detach().requires_grad_()
        return torch.autograd.grad(self.upper_at(x, self.response @ x + self.offset, slice(None)), x)[0]

    def stationary(self, x: Tensor) -> Tensor:
        """A stationary point of F, by gradient descent."""
        for _ in range(500):
            x = x - self.gradient(x)
        return x

    def settings(self, steps: int) -> dict[str, float]:
        """Step sizes that meet the theorem's conditions with equality, p = 1/2, and the T that it asks for at K = steps."""
        l_y = 0.5
        l_f, l_big = l_y, l_y**2 + 1.0  # of grad_x f - g_xy g_yy^-1 grad_y f in y; of grad F
        alpha = 0.5 / (l_big + 4 * l_y**2)  # alpha_b0^2 / alpha_l0 = 2 alpha_b0 = 1 / (L_F + 4 L_y^2)
        beta, mu, smooth = 32.0, 1.0, self.curvature * (1 + l_y**2)
        least = min(1.0 / smooth, beta / steps)
        return {"alpha": alpha, "beta": beta, "T": ceil(log(alpha * l_f**2 + 2) / -log(1 - mu * least)), "terms": 10}


@dataclass(frozen=True)
class Upper:
    """A bi-level run: which F, BiSPS with one sample or two, and T (None: as the theorem asks)."""

    shape: str
    samples: int
    lower_iters: int | None = None
    control: bool = False
    theorem: int = 3
    exponent: float = -0.5

    @property
    def rule(self) -> str:
        return f"{'constant steps' if self.control else 'BiSPS'}, F {self.shape}"

    def settings(self, steps: int) -> dict[str, float]:
        settings = Noisy(self.shape == "convex").settings(steps)
        return settings if self.lower_iters is None else {**settings, "T": self.lower_iters}

    def solver(self, task: Noisy, steps: int) -> bisls.Solver:
        settings = self.settings(steps)
        parts = {
            "direction": bisls.Steepest(),
            "hypergrad": bisls.StochasticNeumann(settings["terms"], task.curvature),
            "lower_iters": settings["T"],
        }
        if self.control:
            steps_ = {"upper_step": bisls.Constant(settings["alpha"]), "lower_step": bisls.Constant(1 / task.curvature)}
            return bisls.Alternating(task.problem, **steps_, **parts)
        alpha, beta = settings["alpha"], settings["beta"]
        return bisls.BiSPS(task.problem, self.samples, alpha=alpha, alpha_floor=alpha / 2, beta=beta, c=0.5, **parts)

    def run(self, seed: int, steps: int) -> list[float]:
        """The mean of ||grad F(x_k)||^2 over k < K, at K = 2^FIRST, ..., steps."""
        torch.manual_seed(seed)  # the random lengths of the Neumann products
        task, rng = Noisy(self.shape == "convex"), np.random.default_rng(seed)
        solver, draws = self.solver(task, steps), pairs(rng, len(task.noise))
        total, means = 0.0, []
        for k in range(steps):
            total += float(task.gradient(task.x).square().sum())
            i, j = rng.integers(len(task.targets), size=2).tolist()
            solver.step(i, draws, step_batch=j if self.samples == 2 else None)
            if k + 1 in marks(steps):
                means.append(total / (k + 1))
        return means


def pairs(rng: np.random.Generator, n: int) -> Iterator[tuple[int, int]]:
    while True:
        yield from map(tuple, rng.integers(n, size=(1024, 2)).tolist())


# --- slopes


@cache
def marks(steps: int) -> tuple[int, ...]:
    return tuple(2**power for power in range(FIRST, steps.bit_length()))


@dataclass(frozen=True)
class Fit:
    slope: float
    error: float
    log_factor: float  # what a factor log K adds to the slope over the same K

    def verdict(self, exponent: float) -> str:
        if not (isfinite(self.slope) and isfinite(self.error)):
            return "fails"
        if self.slope <= exponent + 0.05 + 2 * self.error:
            return "holds" if self.error <= 0.1 else "undecided"
        return "undecided" if self.slope <= exponent + self.log_factor + 2 * self.error or self.error > 0.1 else "fails"


def fit(ks: np.ndarray, values: np.ndarray, octaves: int = OCTAVES) -> Fit:
    """The slope of log(mean over seeds) against log K over the last octaves; its error by leaving out one seed at a time.

    Args:
        ks: K.
        values: Seeds by K.
        octaves: How many doublings of K, up to the last one.
    """
    kept = ks >= ks[-1] / 2**octaves
    ks, values = np.log(ks[kept]), values[:, kept]

    def slope(rows: np.ndarray) -> float:
        return (
            float(np.polyfit(ks, np.log(rows.mean(0)), 1)[0])
            if (rows > 0).all() and np.isfinite(rows).all()
            else float("nan")
        )

    n = len(values)
    left_out = np.array([slope(np.delete(values, i, 0)) for i in range(n)]) if n > 1 else np.array([float("nan")])
    error = sqrt((n - 1) / n * float(((left_out - left_out.mean()) ** 2).sum())) if n > 1 else float("nan")
    return Fit(slope(values), error, float(np.polyfit(ks, np.log(ks), 1)[0]))


Case = Single | Upper
CASES: tuple[Case, ...] = (
    *(Single(t, rule, samples) for t in (1, 2) for rule in ("SPSB", "SLSB") for samples in (2, 1)),
    *(Single(t, "SPSMax", 1, control=True) for t in (1, 2)),
    *(Upper(shape, samples) for shape in ("convex", "not convex") for samples in (2, 1)),
    Upper("convex", 2, lower_iters=10),
    Upper("convex", 1, lower_iters=10, control=True),
)


def length(case: Case, quick: bool) -> int:
    if isinstance(case, Single):
        return 2**9 if quick else 2**13
    return 2**7 if quick else 2**10


def one(case: Case, seed: int, steps: int) -> dict[str, Any]:
    torch.set_num_threads(1)
    start = time.process_time()
    values = case.run(seed, steps)
    return {"values": values, "seconds": time.process_time() - start}


def described(case: Case, steps: int) -> str:
    settings = case.settings() if isinstance(case, Single) else case.settings(steps)
    return f"{case!r} {json.dumps(settings)}"


def commit() -> str:
    call = ["git", "describe", "--always", "--dirty"]
    return subprocess.run(call, capture_output=True, text=True, check=False, cwd=Path(__file__).parent).stdout.strip()


def run_all(
    cases: tuple[Case, ...], seeds: int, quick: bool, version: str, path: Path, workers: int, console: Console
) -> dict[str, dict[str, Any]]:
    """All runs, those in the file excepted."""
    rows: dict[str, dict[str, Any]] = {}
    if path.exists():
        rows = {
            row["key"]: row
            for row in map(json.loads, filter(lambda line: line.endswith("}"), path.read_text().splitlines()))
        }
    jobs = {
        json.dumps([version, described(case, length(case, quick)), seed, length(case, quick)]): (
            case,
            seed,
            length(case, quick),
        )
        for case in cases
        for seed in range(seeds)
    }
    todo = {key: job for key, job in jobs.items() if key not in rows}
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console) as progress, path.open("a") as file:
        bar = progress.add_task("runs", total=len(todo))

        def keep(key: str, result: dict[str, Any]) -> None:
            rows[key] = {"key": key, **result}
            file.write(json.dumps(rows[key]) + "\n")
            file.flush()
            progress.advance(bar)

        if workers == 1:
            for key, job in todo.items():
                progress.update(bar, description=f"theorem {job[0].theorem}: {job[0].rule}, {job[0].samples} sample(s)")
                keep(key, one(*job))
        else:
            with ProcessPoolExecutor(workers) as pool:
                futures = {pool.submit(one, *job): key for key, job in todo.items()}
                for future in as_completed(futures):
                    keep(futures[future], future.result())
    return {key: rows[key] for key in jobs}


def results_of(
    cases: tuple[Case, ...], seeds: int, quick: bool, rows: dict[str, dict[str, Any]]
) -> list[dict[str, Any]]:
    listed = list(rows.values())
    results = []
    for n, case in enumerate(cases):
        steps = length(case, quick)
        mine = listed[n * seeds : (n + 1) * seeds]
        ks, values = np.array(marks(steps)), np.array([row["values"] for row in mine])
        found = fit(ks, values)
        results.append(
            {
                "theorem": case.theorem, "rule": case.rule, "samples": case.samples, "control": case.control,
                "settings": case.settings() if isinstance(case, Single) else case.settings(steps),
                "K": ks.tolist(), "values": values.tolist(), "slope": found.slope, "error": found.error,
                "log_factor": found.log_factor, "exponent": case.exponent, "verdict": found.verdict(case.exponent),
                "seconds": float(np.mean([row["seconds"] for row in mine])),
            }
        )  # fmt: skip
    return results


def cells(result: dict[str, Any]) -> list[str]:
    settings = ", ".join(f"{name} {value:.3g}" for name, value in result["settings"].items())
    rule = result["rule"] + (" (control)" if result["control"] else "")
    slope = f"{result['slope']:.3f} +- {result['error']:.3f}"
    return [
        str(result["theorem"]),
        rule,
        str(result["samples"]),
        settings,
        slope,
        f"{result['exponent']:g}",
        result["verdict"],
    ]


HEAD = ("theorem", "rule", "samples", "settings", "slope +- s.e.", "exponent", "verdict")


def plot(results: list[dict[str, Any]], path: Path) -> None:
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 3, figsize=(16, 5), constrained_layout=True)
    titles = {1: "Theorem 1: convex", 2: "Theorem 2: strongly convex", 3: "Theorem 3: bi-level"}
    for theorem, axis in zip((1, 2, 3), axes, strict=True):
        top, ks = 0.0, np.array([1.0])
        for number, result in enumerate(r for r in results if r["theorem"] == theorem):
            ks, mean = np.array(result["K"]), np.mean(result["values"], 0)
            label = f"{result['rule']}, {result['samples']} sample{'s' * (result['samples'] > 1)}"
            if theorem == 3:
                label += f", T = {result['settings']['T']}"
            style = "k:" if result["control"] else ("-" if result["samples"] == 2 else "--")
            colour = {} if result["control"] else {"color": f"C{number}"}
            axis.loglog(ks, mean, style, marker="o", ms=3, label=f"{label}: {result['slope']:.2f}", **colour)
            top = max(top, mean[0])
        exponent = -1.0 if theorem == 2 else -0.5
        axis.loglog(ks, 1.5 * top * (ks / ks[0]) ** exponent, color="grey", lw=3, alpha=0.4, label=f"K^{exponent:g}")
        axis.set(
            title=titles[theorem], xlabel="K", ylabel="mean ||grad F||^2" if theorem == 3 else "f(mean iterate) - f*"
        )
        axis.legend(fontsize=7)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="K up to 2^9 (bi-level 2^7), 2 seeds")
    parser.add_argument("--theorems", nargs="*", type=int, default=[1, 2, 3], choices=[1, 2, 3])
    parser.add_argument("--seeds", type=int, default=None, help="seeds a case, at least 2 (default: 5)")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="processes (default: one a core)")
    parser.add_argument("--out", type=Path, default=Path("out"), help="where runs and tables go (default: out)")
    arguments = parser.parse_args()
    seeds = arguments.seeds or (2 if arguments.quick else 5)
    if seeds < 2:
        parser.error("--seeds must be at least 2: the standard error comes from them")
    torch.set_num_threads(1)
    console = Console()
    arguments.out.mkdir(parents=True, exist_ok=True)
    cases = tuple(case for case in CASES if case.theorem in arguments.theorems)
    version = commit()  # once: the tree may change while it runs
    rows = run_all(cases, seeds, arguments.quick, version, arguments.out / "rates.jsonl", arguments.jobs, console)
    results = results_of(cases, seeds, arguments.quick, rows)
    facts = {
        "commit": version,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "seeds": list(range(seeds)),
    }
    facts["quick"] = arguments.quick
    (arguments.out / "rates.json").write_text(json.dumps({"facts": facts, "results": results}, indent=1))
    lines = ["| " + " | ".join(HEAD) + " |", "|" + "---|" * len(HEAD)]
    lines += ["| " + " | ".join(cells(result)) + " |" for result in results]
    text = f"commit {facts['commit']}, torch {facts['torch']}, seeds 0 to {seeds - 1}" + (
        ", quick" if arguments.quick else ""
    )
    (arguments.out / "rates.md").write_text("\n".join(lines) + f"\n\n{text}\n")
    plot(results, arguments.out / "rates.png")
    table = Table(*HEAD)
    for result in results:
        table.add_row(*cells(result))
    console.print(table)


if __name__ == "__main__":
    main()
