"""A bi-level run: hyper-representation or distillation by one of the methods, evaluated every few iterations."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from math import log, nan
from typing import Any, ClassVar

import numpy as np
import torch

from bisls import tasks
from bisls._check import require
from bisls.callbacks import Callback, FitState
from bisls.directions import Adam, Direction, Steepest
from bisls.experiments.base import Config, RunRecord, versions
from bisls.fit import fit
from bisls.hypergrad import Implicit
from bisls.linear import CG, Identity, LinearSolver, Neumann
from bisls.methods import Alternating, BiSLS, BiSPS
from bisls.problem import Bilevel
from bisls.record import History, Record
from bisls.response import Frozen, GradientSteps
from bisls.solver import Solver, SolverError
from bisls.steps import Armijo, Backtrack, Constant, Decay, Grow, Keep, Restart, StepRule

METHODS = ("default", "bisls-adam", "bisls-sgd", "bisps", "adam", "sgd", "sgd-decay")
EVALUATED = 2000  # how many samples of either kind the curves are evaluated on, always the same ones


@dataclass(frozen=True)
class BilevelRun(Config):
    """One run.

    Attributes:
        task: "representation" (LeNet's body above, its last layer below) or "distillation" (ten pictures above, a linear model
            below).
        data: "mnist", "fashion-mnist", or "digits" (scikit-learn's, enlarged; for the scale "smoke").
        method: "default" (this package's `BiSLS`, nothing set), "bisls-adam" and "bisls-sgd" (the paper's), "bisps", "adam"
            and "sgd" (constant steps), "sgd-decay" (upper step / sqrt(k + 1)).
        steps: K, upper iterations.
        alpha: The upper step: constant, ceiling or where the search begins. None for "default" alone.
        beta: The same below.
        samples: 1, or 2 for steps from an independent upper batch (bisps).
        lower: "search" (the paper's search below), "constant" (beta for ever), "polyak" (BiSPS's own); "" is what the method has.
        upper_search: Whether "bisls-..." searches above; otherwise alpha is constant.
        reset: The upper reset option of the paper's searches: 1 (restart), 2 (keep), 3 (grow by eta).
        lower_reset: The lower one.
        eta: For reset option 3.
        slack: delta.
        response_steps: Gradient steps for yhat at a trial point.
        linear: "cg", "neumann", "identity".
        terms: Steps of CG (0: to a relative residual of 1e-3), terms of the Neumann sum.
        lower_iters: T.
        batch: Upper batch (and lower, for "representation").
        every: Iterations between evaluations.
        max_checks: Most checks of one of the paper's searches.
        pictures: Keep the learnt pictures (distillation).
    """

    kind: ClassVar[str] = "bilevel"
    task: str = "representation"
    data: str = "mnist"
    method: str = "default"
    steps: int = 100
    alpha: float | None = None
    beta: float | None = None
    samples: int = 1
    lower: str = ""
    upper_search: bool = True
    reset: int = 3
    lower_reset: int = 3
    eta: float = 2.0
    slack: float = 0.0
    response_steps: int = 1
    linear: str = "cg"
    terms: int = 10
    lower_iters: int = 10
    batch: int = 256
    every: int = 5
    max_checks: int = 200
    pictures: bool = False

    def __post_init__(self) -> None:
        require(self, "task", self.task in ("representation", "distillation"), "must be representation or distillation")
        require(self, "data", self.data in ("mnist", "fashion-mnist", "digits"), "is not a set of pictures")
        require(self, "method", self.method in METHODS, f"must be one of {', '.join(METHODS)}")
        require(self, "steps", self.steps >= 1, "must be at least 1")
        given = self.method == "default" or (self.alpha is not None and self.beta is not None)
        require(self, "alpha", given, "and beta must be given for every method but the default")
        for name in ("alpha", "beta"):
            value = getattr(self, name)
            require(self, name, value is None or value > 0, "must be positive")
        require(self, "samples", self.samples in (1, 2), "must be 1 or 2")
        require(self, "lower", self.lower in ("", "search", "constant", "polyak"), "is unknown")
        require(self, "reset", self.reset in (1, 2, 3), "must be 1, 2 or 3")
        require(self, "lower_reset", self.lower_reset in (1, 2, 3), "must be 1, 2 or 3")
        require(self, "eta", self.eta >= 1, "must be at least 1")
        require(self, "slack", self.slack >= 0, "must be at least 0")
        require(self, "linear", self.linear in ("cg", "neumann", "identity"), "must be cg, neumann or identity")
        for name in ("response_steps", "lower_iters", "batch", "every", "max_checks"):
            require(self, name, getattr(self, name) >= 1, "must be at least 1")
        require(self, "terms", self.terms >= (0 if self.linear == "cg" else 1), "must be at least 1 (CG: or 0)")
        # a setting that the method does not have would make two keys of one run
        searches, constant = self.method.startswith("bisls"), self.method in ("adam", "sgd", "sgd-decay")
        require(self, "samples", self.samples == 1 or self.method == "bisps", "can be 2 for bisps alone")
        require(self, "upper_search", self.upper_search or searches, "can be False for bisls-adam and bisls-sgd alone")
        allowed = {
            "": True,
            "search": searches or constant,
            "constant": self.method != "default",
            "polyak": self.method == "bisps",
        }
        require(self, "lower", allowed[self.lower], f"is nothing that {self.method} has below")
        require(self, "pictures", not self.pictures or self.task == "distillation", "are learnt in distillation alone")

    @property
    def work(self) -> float:
        """Seconds on one core, roughly."""
        if self.task == "distillation":
            return self.steps * 0.001 * self.lower_iters * (6.0 if self.method.startswith("bisls") else 1.0)
        # 22 ms for 256 pictures, a lower gradient and a check alike: what takes time is the pass through the upper layers
        forward = 1e-3 + self.batch * 8e-5
        one = forward * (self.lower_iters + 2) * (1.5 if self.method == "default" else 1.0)
        if self.method.startswith("bisls") and self.upper_search:
            checks = {1: 100.0, 2: 6.0, 3: 8.0 + 9.5 * log(self.eta)}[self.reset] + 60.0 / self.steps
            one += min(checks, self.max_checks) * forward * (1 + self.response_steps)
        if self.lower == "search" or (self.method.startswith("bisls") and not self.lower):
            begun = 9.5 * log(max(1.0, (self.beta or 1.0) / 0.5))  # 0.9^n from beta to where lower steps end
            checks = {1: 1.0 + begun, 2: 1.0, 3: 1.0 + 9.5 * log(self.eta)}[self.lower_reset]
            one += self.lower_iters * min(checks, self.max_checks) * forward
        return self.steps * one

    def execute(self) -> RunRecord:
        """Run and evaluate."""
        torch.manual_seed(self.seed)
        task = make_task(self)
        solver = make_solver(self, task)
        watch, error = Watch(task, self.every, self.steps), ""
        started = time.process_time()
        try:
            history = fit(solver, task.upper_data, task.lower_data, self.steps, False, (watch,), on_failure="ignore")
        except SolverError as failed:
            history, error = watch.history, str(failed)
        seconds = time.process_time() - started - watch.spent
        names = ("alpha", "beta", "upper_checks", "lower_checks", "lower_steps", "upper_value")
        curves = {name: tuple(float(v) for v in _column(history, name)) for name in names}
        curves |= {name: tuple(values) for name, values in watch.curves.items()}
        numbers = {"iterations": float(len(history)), "exact": watch.exact(error)}
        if self.pictures and self.task == "distillation":
            learnt = task.problem.x.tensors[0].detach().reshape(10, -1)
            curves["pictures"] = tuple(learnt.flatten().tolist())
        facts = {**versions(), "seed": self.seed, "cpu_seconds": seconds, "evaluations": asdict(solver.oracle.cost)}
        return RunRecord(self.described(), curves, numbers, error, facts)


def _column(history: History, name: str) -> Sequence[float]:
    return [] if len(history) == 0 else history[name].astype(float).tolist()


class Watch(Callback):
    """Evaluates a run: the upper loss on samples that are always the same, accuracy, CPU time without its own."""

    def __init__(self, task: tasks.Task, every: int, steps: int):
        self.task, self.every, self.steps = task, every, steps
        self.spent = 0.0
        self.curves: dict[str, list[float]] = {name: [] for name in ("k", "loss", "accuracy", "seconds")}
        self.history = History()
        data = task.upper_data
        tensors = data.tensors if isinstance(data, tasks.Batches) else data
        self.batch = tuple(tensor[:EVALUATED] for tensor in tensors)
        self.began = time.process_time()

    def start(self, state: FitState) -> None:
        """Evaluate before the first iteration."""
        self.history = state.history
        self._look(0)

    def step(self, record: Record, state: FitState) -> None:
        """Evaluate after one of so many iterations, and after the last."""
        if (record.k + 1) % self.every == 0 or record.k + 1 == self.steps:
            self._look(record.k + 1)

    def _look(self, k: int) -> None:
        began = time.process_time()
        with torch.no_grad():
            loss = float(self.task.problem.upper_loss(self.batch))
        accuracy = self.task.metrics().get("accuracy", nan)
        seen = {"k": float(k), "loss": loss, "accuracy": accuracy, "seconds": began - self.began - self.spent}
        for name, value in seen.items():
            self.curves[name].append(value)
        self.spent += time.process_time() - began

    def exact(self, error: str) -> float:
        """F(x) with the lower problem solved; infinite for a run that was lost."""
        value = float("inf") if error else self.task.exact()
        return value if np.isfinite(value) else float("inf")


def make_task(config: BilevelRun) -> tasks.Task:
    """The problem and its data, at their start."""
    images, labels, mean, sd = pictures(config.data)
    small = config.data == "digits"
    if config.task == "distillation":
        return tasks.distillation(
            images, labels, batch_size=config.batch, lower_iters=config.lower_iters,
            test_size=300 if small else EVALUATED, seed=config.seed,
        )  # fmt: skip
    return tasks.hyper_representation(
        images, labels, lower_size=500 if small else 10_000, test_size=300 if small else EVALUATED,
        batch_size=min(config.batch, 500 if small else 10_000), mean=mean, sd=sd, evaluate_on=EVALUATED, seed=config.seed,
    )  # fmt: skip


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


def make_solver(config: BilevelRun, task: tasks.Task) -> Solver:
    """The method of a configuration, as a composition."""
    problem = task.problem
    common: dict[str, Any] = {"lower_iters": config.lower_iters}
    linear: LinearSolver
    if config.linear == "cg":
        linear = CG(iters=config.terms) if config.terms else CG(tol=1e-3, iters=50)
    elif config.linear == "neumann":
        linear = Neumann(terms=config.terms)
    else:
        linear = Identity()
    hypergrad = Implicit(linear)
    if config.method == "default":
        own = None if config.linear == "cg" else hypergrad
        return BiSLS(problem, hypergrad=own, alpha=config.alpha, beta=config.beta, lower_iters=config.lower_iters)
    assert config.alpha is not None
    assert config.beta is not None
    alpha, beta = config.alpha, config.beta
    direction: Direction = Steepest() if "sgd" in config.method else Adam(search_momentum=False)
    lower: StepRule | None = Constant(beta) if config.lower == "constant" else None
    if config.method in ("adam", "sgd", "sgd-decay"):
        upper: StepRule = Decay(alpha) if config.method == "sgd-decay" else Constant(alpha)
        if config.lower == "search":
            lower = paper_rule(config, beta, config.lower_reset, 0.0)
        return Alternating(
            problem,
            upper_step=upper,
            lower_step=lower or Constant(beta),
            direction=direction,
            hypergrad=hypergrad,
            **common,
        )
    if config.method == "bisps":
        settings: dict[str, Any] = {"alpha": alpha, "beta": beta, "hypergrad": hypergrad, "lower_step": lower, **common}
        if config.samples == 1:
            return BiSPS(problem, **settings)
        return TwoSamples(problem, judges=independent(task, config), **settings)
    searched = paper_rule(config, alpha, config.reset, config.slack)
    return Solver(
        problem,
        direction=direction,
        response=GradientSteps(config.response_steps) if config.upper_search else Frozen(),
        hypergrad=hypergrad,
        upper_step=searched if config.upper_search else Constant(alpha),
        lower_step=lower or paper_rule(config, beta, config.lower_reset, 0.0),
        lower_iters=config.lower_iters,
    )


class TwoSamples(BiSPS):
    """BiSPS whose steps come from batches of their own.

    Args:
        problem: The problem.
        judges: Gives an upper batch for each step, independent of all others.
        settings: As for `BiSPS`.
    """

    def __init__(self, problem: Bilevel, judges: Iterator[Any], **settings: Any):
        super().__init__(problem, samples=2, **settings)
        self.judges = judges

    def step(self, upper_batch: Any, lower_batches: Any, step_batch: Any = None) -> Record:
        """One iteration, judged by a batch that nothing else has seen."""
        return super().step(upper_batch, lower_batches, next(self.judges))


def independent(task: tasks.Task, config: BilevelRun) -> Iterator[Any]:
    """Upper batches from a generator of their own."""
    data = task.upper_data
    assert isinstance(data, tasks.Batches)
    return tasks.Batches(data.tensors, data.batch_size, seed=data.seed + 1 + config.seed)


def paper_rule(config: BilevelRun, start: float, reset: int, slack: float) -> Armijo:
    """The paper's search: w = 0.9, p = 0.1."""
    restarts: dict[int, Restart | Keep | Grow] = {1: Restart(), 2: Keep(), 3: Grow(config.eta)}
    return Armijo(
        start=start, sufficient=0.1, shrink=Backtrack(0.9), restart=restarts[reset], slack=slack,
        max_checks=config.max_checks, f_min=None,
    )  # fmt: skip


def describe(config: BilevelRun, **names: Any) -> dict[str, str]:
    """What the page says of the settings of a figure's runs."""
    task = {
        "representation": "LeNet, least squares, last layer below (ridge 1e-3)",
        "distillation": "ten learnt pictures, linear softmax model below",
    }[config.task]
    linear = {"cg": f"CG, {config.terms} steps" if config.terms else "CG to 1e-3", "identity": "identity"}
    shown = {
        "task": f"{task}; {config.data}; upper batches of {config.batch}",
        "iterations": f"K = {config.steps}, T = {config.lower_iters}",
        "hypergradient": linear.get(config.linear, f"Neumann, {config.terms} terms"),
        "validation loss": f"f(x, y) on {EVALUATED} upper samples, the same ones always, every {config.every} iterations",
    }
    return shown | {name: str(value) for name, value in names.items()}
