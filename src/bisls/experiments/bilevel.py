"""A bi-level run: hyper-representation or distillation by one of the methods, evaluated every few iterations."""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cache
from math import log, nan
from typing import Any, ClassVar

import numpy as np
import torch

from bisls import tasks
from bisls._check import require
from bisls.callbacks import Callback, FitState
from bisls.experiments.base import Config, RunRecord, versions
from bisls.experiments.method import Method
from bisls.experiments.readings import DISTILLING, REPRESENTING, Distilling, OnFixed, Plotted, Representing
from bisls.fit import fit
from bisls.linear import CG, LinearSolver, Neumann
from bisls.methods import BiSLS, BiSPS
from bisls.parts import identity
from bisls.record import History, Record
from bisls.solver import Solver, SolverError
from bisls.steps import Constant, Grow, Keep, Restart

DEFAULT = Method(BiSLS)
OWN = "BiSLS, nothing set"  # what legends call it
LOST = 100.0  # a run is lost where its loss is so many times the first one, or not finite, at two evaluations in a row
EVALUATED = 2000  # how many samples of either kind the curves are evaluated on, always the same ones


@dataclass(frozen=True)
class BilevelRun(Config):
    """One run.

    Attributes:
        method: How it is solved.
        data: "mnist", "fashion-mnist", or "digits" (scikit-learn's, enlarged; for the scale "smoke").
        steps: K, upper iterations.
        lower_iters: T.
        batch: Upper batch (and lower, for hyper-representation).
        every: Iterations between evaluations.
    """

    method: Method[Solver]
    data: str = "mnist"
    steps: int = 100
    lower_iters: int = 10
    batch: int = 256
    every: int = 5

    def __post_init__(self) -> None:
        require(self, "data", self.data in ("mnist", "fashion-mnist", "digits"), "is not a set of pictures")
        for name in ("steps", "lower_iters", "batch", "every"):
            require(self, name, getattr(self, name) >= 1, "must be at least 1")

    @property
    @abstractmethod
    def about(self) -> str:
        """The task, in a line."""

    @property
    def plotted(self) -> Plotted:
        """What is drawn as validation loss."""
        return OnFixed()

    @abstractmethod
    def task(self) -> tasks.Task:
        """The problem and its data, at their start."""

    @property
    def searches(self) -> bool:
        """Whether the method is one of the paper's searches."""
        return self.method.make == BiSLS.paper

    def execute(self) -> RunRecord:
        """Run and evaluate."""
        torch.manual_seed(self.seed)
        task = self.task()
        solver = self.method(task.problem, lower_iters=self.lower_iters)
        polyak = self.method.make is BiSPS
        judges = self.independent(task) if polyak and self.method["samples"] == 2 else None
        curves, error = Curves(task, self.every, self.steps, self.plotted), ""
        started = time.process_time()
        try:
            history = fit(
                solver, task.upper_data, task.lower_data, self.steps, False, (curves,), on_failure="ignore",
                step_data=judges, tol=None,
            )  # fmt: skip
            error = curves.lost
        except SolverError as failed:
            history, error = curves.history, str(failed)
        seconds = time.process_time() - started - curves.spent
        names = ("alpha", "beta", "upper_checks", "lower_checks", "lower_steps", "upper_value")
        kept = {name: tuple(float(v) for v in _column(history, name)) for name in names}
        kept |= {name: tuple(values) for name, values in curves.values.items()} | self.result(task)
        numbers = {"iterations": float(len(history)), "exact": curves.exact(error)}
        if polyak:
            numbers["ceiling"] = self.method["alpha"]
        facts = {**versions(), "seed": self.seed, "cpu_seconds": seconds, "evaluations": asdict(solver.oracle.cost)}
        return RunRecord(self.described(), kept, numbers, error, facts)

    def independent(self, task: tasks.Task) -> tasks.Batches:
        """Upper batches from a generator of their own, which judge the steps."""
        data = task.upper_data
        assert isinstance(data, tasks.Batches)
        return tasks.Batches(data.tensors, data.batch_size, seed=data.seed + 1 + self.seed)

    def result(self, task: tasks.Task) -> dict[str, tuple[float, ...]]:
        """What of the upper variable is to be kept."""
        return {}


@dataclass(frozen=True)
class Representation(BilevelRun):
    """Hyper-representation: LeNet's body above, its last layer below."""

    kind: ClassVar[str] = "representation"
    reading: Representing = REPRESENTING["least squares"]

    @property
    def about(self) -> str:
        """The task, in a line."""
        return f"LeNet, last layer below; {self.reading}"

    def task(self) -> tasks.Task:
        """The problem and its data."""
        images, labels, mean, sd = pictures(self.data)
        lower, test = (500, 300) if self.data == "digits" else (10_000, EVALUATED)
        return self.reading.task(
            images, labels, mean, sd, test_set(self.data), lower_size=lower, test_size=test,
            batch_size=min(self.batch, lower), evaluate_on=EVALUATED, seed=self.seed,
        )  # fmt: skip

    @property
    def work(self) -> float:
        """Seconds on one core, roughly."""
        # 5 ms for 256 pictures, a lower gradient and a pass of a check alike: what takes time are the upper layers; the gradients
        # above cost some six of them, and a lower check, whose features are known, next to nothing
        forward, method = 1e-3 + self.batch * 1.6e-5, self.method
        passes = (self.lower_iters + 6) * (1.5 if method == DEFAULT else 1.0)
        if self.searches and method["upper_step"] is None:
            checks = _checks(method["restart"], 25.0, 85.0) + 60.0 / self.steps  # some searches end at the cap only
            passes += min(checks, method["max_checks"]) * (1 + method["response_steps"])
        if self.searches and method["lower_step"] is None:
            begun = 9.5 * log(max(1.0, method["beta"] / 0.5))  # 0.9^n from beta to where lower steps end
            checks = _checks(method["lower_restart"] or method["restart"], 1.0, 1.0 + begun)
            passes += 0.08 * self.lower_iters * min(checks, method["max_checks"])
        return 3.0 + self.steps * forward * passes


@dataclass(frozen=True)
class Distillation(BilevelRun):
    """Data distillation: ten pictures above, a linear model below.

    Attributes:
        pictures: Keep the learnt pictures.
    """

    kind: ClassVar[str] = "distillation"
    pictures: bool = False
    reading: Distilling = DISTILLING["raw"]

    @property
    def about(self) -> str:
        """The task, in a line."""
        return f"ten learnt pictures, linear softmax model below; {self.reading}"

    @property
    def plotted(self) -> Plotted:
        """What is drawn as validation loss."""
        return self.reading.plotted

    def task(self) -> tasks.Task:
        """The problem and its data."""
        images, labels, mean, sd = pictures(self.data)
        return self.reading.task(
            images, labels, mean, sd, batch_size=self.batch, lower_iters=self.lower_iters,
            test_size=300 if self.data == "digits" else EVALUATED, seed=self.seed,
        )  # fmt: skip

    @property
    def work(self) -> float:
        """Seconds on one core, roughly."""
        return 0.5 + self.steps * 0.00025 * self.lower_iters * (4.0 if self.searches else 1.0)

    def result(self, task: tasks.Task) -> dict[str, tuple[float, ...]]:
        """The ten pictures, where they are to be kept."""
        learnt = task.problem.x.tensors[0].detach()
        return {"pictures": tuple(learnt.flatten().tolist())} if self.pictures else {}


def _checks(restart: Restart | Keep | Grow, kept: float, restarted: float) -> float:
    """Checks of one search, roughly."""
    return restarted if restart.factor is None else kept + 9.5 * log(restart.factor)


def _column(history: History, name: str) -> Sequence[float]:
    return [] if len(history) == 0 else history[name].astype(float).tolist()


class Curves(Callback):
    """Evaluates a run: the upper loss on samples that are always the same, accuracy, CPU time without its own."""

    def __init__(self, task: tasks.Task, every: int, steps: int, plotted: Plotted):
        self.task, self.every, self.steps, self.plotted = task, every, steps, plotted
        self.lost = ""
        self.batches: list[float] = []  # the upper losses since the last evaluation
        self.spent = 0.0
        self.values: dict[str, list[float]] = {name: [] for name in ("k", "loss", "accuracy", "seconds")}
        self.history = History()
        data = task.upper_data
        tensors = data.tensors if isinstance(data, tasks.Batches) else data
        self.batch = tuple(tensor[:EVALUATED] for tensor in tensors)
        self.began = time.process_time()

    def start(self, state: FitState) -> None:
        """Evaluate before the first iteration."""
        self.history = state.history
        self._evaluate(0)

    def step(self, record: Record, state: FitState) -> None:
        """Evaluate after one of so many iterations, and after the last."""
        self.batches.append(record.upper_value)
        if (record.k + 1) % self.every == 0 or record.k + 1 == self.steps:
            self._evaluate(record.k + 1)
            self.lost = self._lost()
            if self.lost:
                state.stop(self.lost)

    def _lost(self) -> str:
        """Why nothing that the run does from here on would be looked at; empty where it goes on."""
        first, *_, before, now = self.values["loss"][:1] + self.values["loss"][-2:]
        if any(value <= LOST * first for value in (before, now)):
            return ""
        return f"lost: a loss of {now:.3g} after {self.values['k'][-1]:.0f} iterations, {first:.3g} at the start"

    def _evaluate(self, k: int) -> None:
        began = time.process_time()
        with torch.no_grad():
            loss = self.plotted.value(float(self.task.problem.upper_loss(self.batch)), self.batches)
        self.batches = []
        accuracy = self.task.metrics().get("accuracy", nan)
        seen = {"k": float(k), "loss": loss, "accuracy": accuracy, "seconds": began - self.began - self.spent}
        for name, value in seen.items():
            self.values[name].append(value)
        self.spent += time.process_time() - began

    def exact(self, error: str) -> float:
        """F(x) with the lower problem solved; infinite for a run that was lost."""
        value = float("inf") if error else self.task.exact()
        return value if np.isfinite(value) else float("inf")


@cache
def pictures(name: str) -> tuple[np.ndarray, np.ndarray, float, float]:
    """Training pictures of 28 x 28 bytes, labels, and the mean and deviation to standardise by."""
    if name == "digits":
        from sklearn.datasets import load_digits

        digits = load_digits()
        large = np.pad(np.kron(digits.images, np.ones((1, 3, 3))), ((0, 0), (2, 2), (2, 2)))
        return (large * (255 / 16)).astype(np.uint8), digits.target, 0.2, 0.33
    from bisls.data import load

    images = load(name)
    return images.train_x, images.train_y, images.mean, images.sd


def test_set(name: str) -> tuple[np.ndarray, np.ndarray] | None:
    """Test pictures and labels; None for the small set, which has none."""
    if name == "digits":
        return None
    from bisls.data import load

    images = load(name)
    return images.test_x, images.test_y


def constant(method: Method[Solver], alpha: float, beta: float) -> Method[Solver]:
    """A method with constant steps."""
    return method.but(upper_step=Constant(alpha), lower_step=Constant(beta))


def describe(config: BilevelRun, **names: Any) -> dict[str, str]:
    """What the page says of the settings of a figure's runs."""
    shown = {
        "task": f"{config.about}; {config.data}; upper batches of {config.batch}",
        "iterations": f"K = {config.steps}, T = {config.lower_iters}",
        "hypergradient": shown_solver(config.method["hypergrad"].solver),
        "validation loss": f"f(x, y) {config.plotted.about} (at most {EVALUATED}), every {config.every} iterations",
    }
    return shown | {name: str(value) for name, value in names.items()}


def shown_solver(linear: LinearSolver) -> str:
    """A linear solver as the page has it.

    Examples:
        >>> shown_solver(CG(iters=10)), shown_solver(Neumann(terms=5))
        ('CG, 10 steps', 'Neumann, 5 terms')
    """
    if isinstance(linear, CG):
        return f"CG, {linear.iters} steps"
    if isinstance(linear, Neumann):
        return f"Neumann, {linear.terms} terms"
    return type(linear).__name__.lower() if identity(linear).endswith("()") else identity(linear)


def shown_search(method: Method[Solver]) -> str:
    """The paper's searches as the page has them.

    Examples:
        >>> shown_search(Method(BiSLS.paper, restart=Grow(10.0)))
        'alpha_b0 = 10, beta_b0 = 100, reset option 3 (eta = 10), w = 0.9, p = 0.1, delta = 0'
    """
    above, below = method["restart"] or Grow(), method["lower_restart"]
    reset = f"reset {shown_restart(above)}" + (f", {shown_restart(below)} below" if below else "")
    begun = f"alpha_b0 = {method['alpha']:g}, beta_b0 = {method['beta']:g}"
    return f"{begun}, {reset}, w = {method['shrink']:g}, p = {method['sufficient']:g}, delta = {method['slack']:g}"


def shown_restart(restart: Restart | Keep | Grow) -> str:
    """A reset option by the paper's number."""
    if isinstance(restart, Grow):
        return f"option 3 (eta = {restart.eta:g})"
    return "option 1" if isinstance(restart, Restart) else "option 2"
