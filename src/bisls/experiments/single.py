"""A single-level run: quadratics in the plane or logistic regression, by one of the step-size optimisers."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, partial
from math import ceil, cos, hypot, inf, isfinite, nan, pi, sin
from typing import Any, ClassVar, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import softplus

from bisls import optim
from bisls._check import require
from bisls.experiments.base import Config, RunRecord, versions
from bisls.experiments.method import Method
from bisls.optim import LineOptimizer
from bisls.steps import Decay, StepRule

ROWS = {"w8a": 49_749, "a9a": 32_561, "mushrooms": 8_124, "breast_cancer": 569}
SLS = Method(optim.SLS, shrink=0.9, grow=None)  # the paper's searches begin at the ceiling and shorten by w = 0.9
SLSB = Method(optim.SLSB, shrink=0.9)
KEPT = 2000  # longer curves of steps are thinned to about so many
AWAY = 4.0  # how far from the optimum the quadratics begin
FULL = 0.999  # from this share of the ceiling on, a step is said to be on it


class DecayingSGD(optim.SPSMax):
    """gamma_b0 / sqrt(k + 1), whatever the loss does; of the settings of `SPSMax` it has the ceiling alone."""

    def _rule(self, group: dict[str, Any]) -> StepRule:
        return Decay(group["lr"])


class Problem(Protocol):
    """A sum of losses, at its start."""

    x: Tensor

    def batches(self, rng: np.random.Generator) -> Iterator[Any]:
        """Batches without end."""
        ...

    def loss(self, batch: Any) -> Tensor:
        """The loss on a batch."""
        ...

    def evaluate(self) -> dict[str, float]:
        """The loss on all data, and what else can be seen at x."""
        ...


class Quadratics:
    """The paper's appendix B: ``f = f_1 + f_2, f_i = 1/2 (x - x_i*)' H_i (x - x_i*)`` in the plane, a problem for each seed.

    H_i = O_i' diag(log(1 + lambda_i)) O_i with the eigenvalues and eigenvectors of P_i' P_i; x_i* and P_i are standard normal.

    Args:
        seed: Draws the problem.
        turn: In which direction from the optimum it begins, in turns; always at the distance `AWAY`.
    """

    def __init__(self, seed: int, turn: float = 0.0):
        rng = torch.Generator().manual_seed(seed)
        self.centres = torch.randn(2, 2, generator=rng, dtype=torch.float64)
        square = torch.randn(2, 2, 2, generator=rng, dtype=torch.float64)
        values, vectors = torch.linalg.eigh(square.mT @ square)
        self.hessians = vectors @ torch.diag_embed(torch.log1p(values.clamp(min=0.0))) @ vectors.mT
        total = self.hessians.sum(0)
        self.best = torch.linalg.solve(total, (self.hessians @ self.centres[:, :, None]).sum(0)[:, 0])
        away = torch.tensor([cos(2 * pi * turn), sin(2 * pi * turn)], dtype=torch.float64)
        self.x = (self.best + AWAY * away).requires_grad_()
        self._numbers, self._star = (self.centres.tolist(), self.hessians.tolist()), self.best.tolist()

    def batches(self, rng: np.random.Generator) -> Iterator[int]:
        """One of the two, each with probability 1/2."""
        while True:
            yield from rng.integers(2, size=1024).tolist()

    def loss(self, batch: int) -> Tensor:
        """f_i."""
        away = self.x - self.centres[batch]
        return 0.5 * away @ (self.hessians[batch] @ away)

    def evaluate(self) -> dict[str, float]:
        """f, the distance to the optimum, and x itself relative to the optimum; in plain numbers, which is faster for two."""
        a, b = self.x.tolist()
        value = 0.0
        for (p, q), ((g, m), (_, h)) in zip(*self._numbers, strict=True):
            value += 0.5 * (g * (a - p) ** 2 + 2 * m * (a - p) * (b - q) + h * (b - q) ** 2)
        a, b = a - self._star[0], b - self._star[1]
        return {"loss": value, "distance": hypot(a, b), "x1": a, "x2": b}


class Logistic:
    """Logistic regression without bias or penalty; it begins at zero.

    Args:
        data: "w8a", "a9a", "mushrooms" or "breast_cancer".
        batch: Rows in a batch; every epoch goes through all rows once, in an order of its own.
    """

    def __init__(self, data: str, batch: int):
        self.rows, self.batch = signed_rows(data), batch
        self.x = torch.zeros(self.rows.shape[1]).requires_grad_()

    def batches(self, rng: np.random.Generator) -> Iterator[Tensor]:
        """Epoch after epoch; the last batch of each may be smaller."""
        while True:
            order = torch.from_numpy(rng.permutation(len(self.rows)))
            yield from torch.split(order, self.batch)

    def loss(self, batch: Tensor) -> Tensor:
        """The mean logistic loss."""
        return softplus(-(self.rows[batch] @ self.x)).mean()

    @torch.no_grad()
    def evaluate(self) -> dict[str, float]:
        """The loss on all rows."""
        return {"loss": float(softplus(-(self.rows @ self.x)).mean())}


@cache
def signed_rows(data: str) -> Tensor:
    """The rows of a data set, each multiplied by its label."""
    if data == "breast_cancer":
        from sklearn.datasets import load_breast_cancer

        x, y = load_breast_cancer(return_X_y=True)
        return torch.tensor((x - x.mean(0)) / x.std(0) * np.where(y == 1, 1, -1)[:, None], dtype=torch.float32)
    from bisls.data import load

    table = load(data)
    return torch.tensor(table.x * table.y[:, None])


@dataclass(frozen=True)
class SingleRun(Config):
    """One run.

    Attributes:
        method: How it is solved.
        problem: "quadratics", or the data of a logistic regression: "w8a", "a9a", "mushrooms", "breast_cancer".
        samples: 2 takes the step from an independent batch.
        steps: K; 0 where epochs are given.
        epochs: How often to go through the data.
        batch: Rows in a batch.
        start: For the quadratics: in which direction from the optimum to begin, in turns.
        every: Iterations between evaluations.
    """

    kind: ClassVar[str] = "single"
    method: Method[LineOptimizer]
    problem: str = "quadratics"
    samples: int = 1
    steps: int = 0
    epochs: int = 0
    batch: int = 1
    start: float = 0.0
    every: int = 1

    def __post_init__(self) -> None:
        require(self, "problem", self.problem == "quadratics" or self.problem in ROWS, "is unknown")
        require(self, "samples", self.samples in (1, 2), "must be 1 or 2")
        known = self.steps >= 1 and self.epochs == 0
        require(self, "steps", known or (self.steps == 0 and self.epochs >= 1), "or epochs must be given, one of them")
        require(self, "epochs", self.epochs == 0 or self.problem != "quadratics", "is for data sets")
        require(self, "batch", self.batch >= 1, "must be at least 1")
        require(self, "every", self.every >= 1, "must be at least 1")

    @property
    def iterations(self) -> int:
        """K."""
        return self.steps or self.epochs * ceil(ROWS[self.problem] / self.batch)

    @property
    def work(self) -> float:
        """Seconds on one core, roughly."""
        searches = self.method.make in (optim.SLS, optim.SLSB)
        checks = 0.0 if not searches else 1.5 if self.method["c"] < 0.9 else 50.0
        gradient = 2e-4 if self.problem == "quadratics" else 4e-4
        step = gradient * self.samples + 2e-4 * checks
        evaluation = 1e-5 if self.problem == "quadratics" else 3e-7 * ROWS[self.problem]
        return self.iterations * (step + evaluation / self.every)

    def make(self) -> Problem:
        """The problem at its start."""
        if self.problem == "quadratics":
            return Quadratics(self.seed, self.start)
        return Logistic(self.problem, self.batch)

    def execute(self) -> RunRecord:
        """Run, evaluating every so often; Auto is evaluated where it says: at its average."""
        torch.manual_seed(self.seed)
        problem = self.make()
        optimizer, steps = self.method([problem.x]), self.iterations
        # the judging batches come from a stream of their own: one and two samples see the same gradients
        ours, judging = (problem.batches(np.random.default_rng([self.seed, stream])) for stream in (1, 2))
        curves: dict[str, list[float]] = {}
        taken, checks, error = np.zeros(steps), 0, ""

        def evaluate(k: int) -> bool:
            optimizer.eval()
            seen = {"k": float(k), **problem.evaluate()}
            optimizer.train()
            for name, value in seen.items():
                curves.setdefault(name, []).append(value)
            return isfinite(seen["loss"])

        began = time.process_time()
        evaluate(0)
        for k in range(steps):
            closure = partial(problem.loss, next(ours))
            optimizer.step(closure, partial(problem.loss, next(judging)) if self.samples == 2 else None)
            taken[k] = optimizer.last_step_size
            checks += optimizer.last_checks
            if ((k + 1) % self.every == 0 or k + 1 == steps) and not evaluate(k + 1):
                error, taken = f"the loss is not finite after {k + 1} steps", taken[: k + 1]
                break
        seconds = time.process_time() - began
        thin = ceil(len(taken) / KEPT)
        curves["step"], curves["step_k"] = taken[::thin].tolist(), np.arange(1.0, len(taken) + 1, thin).tolist()
        counts = {"gradients": self.samples * len(taken), "values": checks}
        facts = {**versions(), "seed": self.seed, "cpu_seconds": seconds, "evaluations": counts}
        kept = {name: tuple(values) for name, values in curves.items()}
        return RunRecord(self.described(), kept, stepping(taken, self.ceiling(len(taken))), error, facts)

    def ceiling(self, steps: int) -> np.ndarray | None:
        """What no step exceeds: gamma_b0 for SPS_max and SLS, gamma_b0 / sqrt(k + 1) for the others, None for Auto."""
        if self.method.make is optim.Auto:
            return None
        power = 0.0 if self.method.make in (optim.SPSMax, optim.SLS) else -0.5
        return self.method["lr"] * np.arange(1.0, steps + 1) ** power


def stepping(steps: np.ndarray, ceiling: np.ndarray | None) -> dict[str, float]:
    """What is to be known of all steps, of which the curves may have a part only.

    Returns:
        "most" and "least": The largest and smallest share of the ceiling. "jump": the mean absolute change of log step between
        neighbours that are both below the ceiling (nan where there are none). "below": the share of steps below the ceiling.
        "late": the share of the last tenth that are on it. Without a ceiling only "jump" has a value.
    """
    moving = steps > 0
    share = steps / (inf if ceiling is None else ceiling)
    free = (share < FULL) & moving
    neighbours = free[1:] & free[:-1]
    with np.errstate(divide="ignore", invalid="ignore"):
        jumps = np.abs(np.diff(np.log(steps)))[neighbours]
    found = {"jump": float(jumps.mean()) if len(jumps) else nan}
    if ceiling is None:
        return found | dict.fromkeys(("most", "least", "below", "late"), nan)
    late = share[-max(1, len(steps) // 10) :]
    return found | {
        "most": float(share.max()),
        "least": float(share.min()),
        "below": float(np.mean(share < FULL)),
        "late": float(np.mean(late >= FULL)),
    }
