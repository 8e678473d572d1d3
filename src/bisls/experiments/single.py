"""A single-level run: quadratics in the plane or logistic regression, by one of the step-size optimisers."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
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
from bisls.optim import LineOptimizer
from bisls.steps import Decay, StepRule

ROWS = {"w8a": 49_749, "a9a": 32_561, "mushrooms": 8_124, "breast_cancer": 569}
METHODS = ("sps_max", "decsps", "spsb", "sls", "slsb", "sgd-decay", "auto")
KEPT = 2000  # longer curves of steps are thinned to about so many
AWAY = 4.0  # how far from the optimum the quadratics begin
FULL = 0.999  # from this share of the ceiling on, a step is said to be on it


class DecayingSGD(LineOptimizer):
    """gamma_b0 / sqrt(k + 1), whatever the loss does."""

    def __init__(self, params: Any, lr: float):
        super().__init__(params, {"lr": lr, "averaging": None, "maximize": False, "foreach": None})

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

    def look(self) -> dict[str, float]:
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

    def look(self) -> dict[str, float]:
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
    def look(self) -> dict[str, float]:
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
        problem: "quadratics", or the data of a logistic regression: "w8a", "a9a", "mushrooms", "breast_cancer".
        method: "sps_max", "decsps", "spsb", "sls", "slsb", "sgd-decay" (gamma / sqrt(k + 1)), "auto" (nothing set).
        gamma: gamma_b0. None for "auto" alone.
        c: 1 for the Polyak steps and 0.1 for the searches where it is None.
        samples: 2 takes the step from an independent batch ("spsb", "slsb").
        steps: K; 0 where epochs are given.
        epochs: How often to go through the data.
        batch: Rows in a batch.
        start: For the quadratics: in which direction from the optimum to begin, in turns.
        every: Iterations between evaluations.
    """

    kind: ClassVar[str] = "single"
    problem: str = "quadratics"
    method: str = "auto"
    gamma: float | None = None
    c: float | None = None
    samples: int = 1
    steps: int = 0
    epochs: int = 0
    batch: int = 1
    start: float = 0.0
    every: int = 1

    def __post_init__(self) -> None:
        require(self, "problem", self.problem == "quadratics" or self.problem in ROWS, "is unknown")
        require(self, "method", self.method in METHODS, f"must be one of {', '.join(METHODS)}")
        given = self.gamma is not None and self.gamma > 0
        require(self, "gamma", (self.method == "auto") != given, "must be positive, and None for auto alone")
        bare = self.method in ("auto", "sgd-decay")
        require(
            self, "c", self.c is None or (self.c > 0 and not bare), "must be positive; auto and sgd-decay have none"
        )
        two = self.samples == 2 and self.method in ("spsb", "slsb")
        require(self, "samples", self.samples == 1 or two, "must be 1, or 2 for spsb and slsb")
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
        searches = self.method in ("sls", "slsb")
        checks = 0.0 if not searches else 1.5 if (self.c or 0.1) < 0.9 else 50.0
        step = 4e-4 * self.samples + 2e-4 * checks
        look = 1e-5 if self.problem == "quadratics" else 3e-7 * ROWS[self.problem]
        return self.iterations * (step + look / self.every)

    def make(self) -> Problem:
        """The problem at its start."""
        if self.problem == "quadratics":
            return Quadratics(self.seed, self.start)
        return Logistic(self.problem, self.batch)

    def optimizer(self, x: Tensor) -> LineOptimizer:
        """The method; the searches begin at the ceiling and shorten by w = 0.9, as the paper's do."""
        if self.method == "auto":
            return optim.Auto([x])
        assert self.gamma is not None
        gamma, polyak, search = self.gamma, self.c or 1.0, self.c or 0.1
        make: dict[str, Callable[[], LineOptimizer]] = {
            "sps_max": lambda: optim.SPSMax([x], gamma, polyak),
            "decsps": lambda: optim.DecSPS([x], gamma, polyak),
            "spsb": lambda: optim.SPSB([x], gamma, polyak),
            "sls": lambda: optim.SLS([x], gamma, search, shrink=0.9, grow=None),
            "slsb": lambda: optim.SLSB([x], gamma, search, shrink=0.9),
            "sgd-decay": lambda: DecayingSGD([x], gamma),
        }
        return make[self.method]()

    def execute(self) -> RunRecord:
        """Run, evaluating every so often; Auto is evaluated where it says: at its average."""
        torch.manual_seed(self.seed)
        problem = self.make()
        optimizer, steps = self.optimizer(problem.x), self.iterations
        # the judging batches come from a stream of their own: one and two samples see the same gradients
        ours, judging = (problem.batches(np.random.default_rng([self.seed, stream])) for stream in (1, 2))
        curves: dict[str, list[float]] = {}
        taken, checks, error = np.zeros(steps), 0, ""

        def look(k: int) -> bool:
            optimizer.eval()
            seen = {"k": float(k), **problem.look()}
            optimizer.train()
            for name, value in seen.items():
                curves.setdefault(name, []).append(value)
            return isfinite(seen["loss"])

        began = time.process_time()
        look(0)
        for k in range(steps):
            closure = partial(problem.loss, next(ours))
            optimizer.step(closure, partial(problem.loss, next(judging)) if self.samples == 2 else None)
            taken[k] = optimizer.last_step_size
            checks += optimizer.last_checks
            if ((k + 1) % self.every == 0 or k + 1 == steps) and not look(k + 1):
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
        if self.gamma is None:
            return None
        power = 0.0 if self.method in ("sps_max", "sls") else -0.5
        return self.gamma * np.arange(1.0, steps + 1) ** power


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
