"""Measured rates of convergence: runs, slopes and what they say of an exponent.

Theorem 1 (convex, not strongly): E f(mean iterate) - f* = O(log K / sqrt K) with the ceiling gamma_b0 / sqrt(k + 1).
Theorem 2 (strongly convex): O(log K / K) with the ceiling gamma_b0 / (k + 1), gamma_b0 = 1 / mu, and the mean from k_0 on.
Theorem 3 (bi-level, BiSPS): mean over k of E ||grad F(x_k)||^2 = O(log K / sqrt K).

Theorem 3 asks for T >= log(alpha_b0 L_f^2 + 2) / -log(1 - mu_g C), where C = min(1 / (2 p L_g), beta_b0 / K): with beta_b0
fixed T has to grow like K, and the bound, which has T as a factor where the lower level is noisy, then does not fall. The runs
take the T that is asked for at the largest K (with beta_b0 = 32), or a T that is given.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from functools import cache, partial
from math import ceil, isfinite, sqrt
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from bisls import optim
from bisls._check import require
from bisls.directions import Steepest
from bisls.experiments.base import Config, RunRecord, versions
from bisls.experiments.theorems import FiniteSum, Noisy, convex, strongly_convex
from bisls.hypergrad import Hypergradient, HypergradientMethod, StochasticNeumann
from bisls.linear.base import State
from bisls.methods import Alternating, BiSLS, BiSPS
from bisls.optim import LineOptimizer
from bisls.oracle import Oracle
from bisls.outcome import Judgement
from bisls.solver import Solver
from bisls.steps import Constant

Rule = type[LineOptimizer] | type[Solver]

FIRST = 5  # the smallest K looked at is 2^FIRST
OCTAVES = 4  # slopes are taken over the last so many doublings of K: a rate says nothing about the start
EXPONENTS = {1: -0.5, 2: -1.0, 3: -0.5}
CONTROLS: tuple[Rule, ...] = (optim.SPSMax, Alternating)
DEFAULTS: tuple[Rule, ...] = (optim.Auto, BiSLS)


@cache
def marks(steps: int) -> tuple[int, ...]:
    """The K that are looked at: powers of 2 up to the number of steps."""
    return tuple(2**power for power in range(FIRST, steps.bit_length()))


@cache
def _bilevel_settings(convex: bool, steps: int) -> dict[str, float]:
    return Noisy(convex).settings(steps)


@dataclass(frozen=True)
class RateRun(Config):
    """One run: what the theorem bounds, at K = 2^5, 2^6, ..., steps.

    Attributes:
        theorem: 1, 2 or 3.
        rule: `SPSB` and `SLSB` for Theorems 1 and 2, `BiSPS` for Theorem 3; `SPSMax` and `Alternating` are controls, whose
            ceiling or step does not decay; `Auto` and `BiSLS` are this package's defaults, with nothing set.
        samples: 2, as the theorems ask, or 1.
        steps: K.
        convex: Whether F is (Theorem 3).
        lower_iters: T; 0 is what Theorem 3 asks for.
        start: Theorems 1 and 2 begin at so many times x*.
    """

    kind: ClassVar[str] = "rate"
    theorem: int = 1
    rule: Rule = optim.SPSB
    samples: int = 2
    steps: int = 2**10
    convex: bool = True
    lower_iters: int = 0
    start: float = 0.0

    def __post_init__(self) -> None:
        require(self, "theorem", self.theorem in EXPONENTS, "must be 1, 2 or 3")
        fits = issubclass(self.rule, Solver) == (self.theorem == 3)
        require(self, "rule", fits, f"must be a {'Solver' if self.theorem == 3 else 'LineOptimizer'} for this theorem")
        require(self, "samples", self.samples in (1, 2), "must be 1 or 2")
        require(self, "steps", self.steps >= 2**FIRST, f"must be at least {2**FIRST}")
        require(self, "lower_iters", self.lower_iters >= 0, "must be at least 0")

    @property
    def work(self) -> float:
        """Seconds on one core, roughly."""
        if self.theorem != 3:
            return self.steps * 4e-4 * self.samples
        return self.steps * (6e-3 + 5e-4 * (self.lower_iters or self.settings()["T"]))

    def sum(self) -> FiniteSum:
        """The problem of Theorem 1 or 2."""
        return convex() if self.theorem == 1 else strongly_convex()

    def settings(self) -> dict[str, float]:
        """Ceilings, where the mean begins, T; c = 1/2, as in the rates that the paper spells out. Nothing for the defaults."""
        if self.rule in DEFAULTS:
            return {"mean_from": 0} if self.theorem != 3 else {"T": 10}
        if self.theorem == 1:
            return {"gamma_b0": 2.0, "c": 0.5, "mean_from": 0}
        if self.theorem == 2:
            ceiling = 1.0 / self.sum().ridge
            return {"gamma_b0": ceiling, "c": 0.5, "mean_from": max(1, ceil(ceiling * self.sum().smoothness) - 1)}
        settings = _bilevel_settings(self.convex, self.steps)
        return {**settings, "T": self.lower_iters} if self.lower_iters else settings

    def execute(self) -> RunRecord:
        """The run."""
        torch.manual_seed(self.seed)  # the random lengths of the Neumann products
        began = time.process_time()
        values, evaluations = self._upper() if self.theorem == 3 else self._single()
        seconds = time.process_time() - began
        error = "" if all(map(isfinite, values)) else "not finite"
        curves = {"K": tuple(map(float, marks(self.steps))), "value": tuple(values)}
        facts = {**versions(), "seed": self.seed, "cpu_seconds": seconds, "evaluations": evaluations}
        return RunRecord(self.described(), curves, self.settings(), error, facts)

    def optimizer(self, x: Tensor) -> LineOptimizer:
        """The single-level rule."""
        settings: dict[str, Any] = {}
        if self.rule not in DEFAULTS:
            settings = {"lr": self.settings()["gamma_b0"], "c": self.settings()["c"]}
        if self.rule in (optim.SPSB, optim.SLSB):
            settings["power"] = -EXPONENTS[self.theorem]
        assert issubclass(self.rule, LineOptimizer)
        return self.rule([x], **settings)

    def _single(self) -> tuple[list[float], dict[str, int]]:
        """f(mean iterate) - f*; Auto has a mean of its own."""
        problem, rng = self.sum(), np.random.default_rng(self.seed)
        x = (self.start * problem.best).requires_grad_()
        optimizer, automatic = self.optimizer(x), self.rule is optim.Auto
        picks = rng.integers(len(problem.rows), size=(self.steps, 2)).tolist()
        total, count, gaps, checks = torch.zeros_like(problem.best), 0, [], 0
        begin, seen = self.settings()["mean_from"], marks(self.steps)
        for k, (i, j) in enumerate(picks):
            if k >= begin:
                total += x.detach()
                count += 1
            judge = partial(problem.loss, x, j) if self.samples == 2 else None
            optimizer.step(partial(problem.loss, x, i), judge)
            checks += optimizer.last_checks
            if problem.radius is not None and not automatic:
                with torch.no_grad():
                    x.mul_(min(1.0, problem.radius / max(1e-300, float(x.norm()))))
            if k + 1 in seen:
                optimizer.eval()
                gaps.append(problem.gap(x if automatic else total / count))
                optimizer.train()
        return gaps, {"gradients": self.samples * self.steps, "values": checks}

    def solver(self, task: Noisy, draws: Iterator[tuple[int, int]]) -> Solver:
        """The bi-level method."""
        settings = self.settings()
        if self.rule is BiSLS:
            return BiSLS(task.problem)
        parts: dict[str, Any] = {
            "direction": Steepest(),
            "hypergrad": Independent(StochasticNeumann(int(settings["terms"]), task.curvature), draws),
            "lower_iters": int(settings["T"]),
        }
        alpha, beta = settings["alpha"], settings["beta"]
        if self.rule is Alternating:
            upper, lower = Constant(alpha), Constant(1 / task.curvature)
            return Alternating(task.problem, upper_step=upper, lower_step=lower, **parts)
        return BiSPS(task.problem, self.samples, alpha=alpha, alpha_floor=alpha / 2, beta=beta, c=0.5, **parts)

    def _upper(self) -> tuple[list[float], dict[str, int]]:
        """The mean of ||grad F(x_k)||^2 over k < K."""
        task, rng = Noisy(self.convex), np.random.default_rng(self.seed)
        draws = _pairs(rng, len(task.noise))
        solver = self.solver(task, draws)
        total, means = 0.0, []
        for k in range(self.steps):
            total += float(task.gradient(task.x).square().sum())
            i, j = rng.integers(len(task.targets), size=2).tolist()
            lower = [next(draws) for _ in range(solver.lower_iters)]
            solver.step(i, lower, step_batch=j if self.samples == 2 else None)
            if k + 1 in marks(self.steps):
                means.append(total / (k + 1))
        return means, asdict(solver.oracle.cost)


@dataclass(frozen=True)
class Independent(HypergradientMethod):
    """A hypergradient method on lower samples of its own, which no lower step has seen, as Theorem 3 has it.

    Args:
        method: Draws as many as it wants.
        draws: Samples without end.
    """

    method: HypergradientMethod
    draws: Iterator[Any] = field(repr=False)

    def estimate(self, oracle: Oracle, upper_batch: Any, lower_batch: Any, state: State) -> Hypergradient:
        """That of the method, whatever the lower steps saw."""
        return self.method.estimate(oracle, upper_batch, self.draws, state)


def _pairs(rng: np.random.Generator, n: int) -> Iterator[tuple[int, int]]:
    while True:
        yield from ((int(m), int(e)) for m, e in rng.integers(n, size=(1024, 2)))


@dataclass(frozen=True)
class Fit:
    """A slope in the log-log plane.

    Attributes:
        slope: Of the straight line.
        error: Its standard error.
        log_factor: What a factor log K adds to the slope over the same K.
    """

    slope: float
    error: float
    log_factor: float

    def judged(self, exponent: float) -> Judgement:
        """Whether log K times K^exponent, the rate of the theorem, is reached; it bounds from above, so steeper is no fault.

        Over the K of the fit that rate is a line with the slope ``exponent + log_factor``. It is reached where the slope is at
        least two s.e. below, missed where it is two s.e. above, and undecided between. Without a slope or an error, as where
        a run was lost, it is undecided.
        """
        above = self.slope - exponent - self.log_factor
        if above + 2 * self.error <= 0:
            return Judgement.HOLDS
        return Judgement.FAILS if above - 2 * self.error > 0 else Judgement.UNDECIDED


def fit(ks: np.ndarray, values: np.ndarray, octaves: int = OCTAVES) -> Fit:
    """The slope of log(mean over seeds) against log K over the last octaves; its error by leaving out one seed at a time.

    Args:
        ks: K.
        values: Seeds by K.
        octaves: How many doublings of K, up to the last one.
    """
    if len(ks) < 2 or not (ks > 0).all():  # runs that were lost
        return Fit(float("nan"), float("nan"), float("nan"))
    kept = ks >= ks[-1] / 2**octaves
    ks, values = np.log(ks[kept]), values[:, kept]

    def slope(rows: np.ndarray) -> float:
        usable = (rows > 0).all() and np.isfinite(rows).all()
        return float(np.polyfit(ks, np.log(rows.mean(0)), 1)[0]) if usable else float("nan")

    n = len(values)
    left_out = np.array([slope(np.delete(values, i, 0)) for i in range(n)]) if n > 1 else np.array([float("nan")])
    error = sqrt((n - 1) / n * float(((left_out - left_out.mean()) ** 2).sum())) if n > 1 else float("nan")
    return Fit(slope(values), error, float(np.polyfit(ks, np.log(ks), 1)[0]))
