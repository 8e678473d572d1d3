"""sensitivity: how much does the result depend on the two first steps? A sweep on the user's own problem."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from math import inf, isfinite, nan
from typing import Any
from weakref import ref

import numpy as np
import torch
from torch import Tensor

from bisls._check import (
    FLAG,
    POSITIVE,
    SEED,
    function,
    optional,
    require_argument,
    settled,
    several,
    shown,
    unbound,
    whole_number,
)
from bisls.feed import feed
from bisls.fit import fit
from bisls.generators import of_loader
from bisls.progress import Progress
from bisls.randomness import random_state, seed_everything, set_random_state
from bisls.record import History
from bisls.sensitivity_report import SensitivityReport as SensitivityReport

logger = logging.getLogger(__name__)

MOST_STEPS = 10**9  # the curves of all runs are kept, a number for each


def sensitivity(
    make_solver: Callable[[float, float], Any],
    upper_data: Any = None,
    lower_data: Any = None,
    *,
    steps: int = 100,
    alphas: Iterable[float] = (1e-4, 1e-2, 1.0, 1e2),
    betas: Iterable[float] = (1e-3, 1e-1, 1e1, 1e3),
    seeds: Iterable[int] = (0,),
    score: Callable[[Any], float] | None = None,
    progress: bool = True,
) -> SensitivityReport:
    """Run a method from a grid of first steps on one's own problem, and report how far the results are apart.

    Every run starts from the same point on the same batches: torch, numpy and Python are seeded before it, and put back to
    where they were after the last one.

    Args:
        make_solver: ``(alpha, beta) -> solver`` on a *new* problem: modules and parameters are made inside. It may return
            ``(solver, upper_data, lower_data)`` where the data belong to the problem. Two runs that share parameters, start
            from different points or have iterations behind them are refused.
        upper_data: What `fit` takes: tensors (one batch for every step) or a DataLoader, whose own generators are put back
            before every run. An iterator would be used up by the first run, so it is passed as a function without arguments
            that makes it: ``lambda: bisls.tasks.Batches(tensors, 64)``.
        lower_data: The same.
        steps: Iterations a run, at least 1.
        alphas: Upper steps, greater than 0.
        betas: Lower steps, greater than 0.
        seeds: One run a seed for each pair.
        score: ``solver -> number`` at the end of a run, smaller is better; by default the mean upper loss of the last tenth of
            the run.
        progress: Show a progress bar.

    Returns:
        A `SensitivityReport`. A run that raises a numerical error or ends with a score that is not finite counts as inf and is
        named in it.

    Raises:
        ValueError: An argument cannot be used, or runs cannot be compared.
        RuntimeError: Every run raised; it is the error of the first.

    Examples:
        >>> import torch
        >>> from bisls.methods import BiSLS
        >>> from bisls.problem import Bilevel
        >>> def make_solver(alpha, beta):
        ...     x = torch.tensor([0.5], requires_grad=True)
        ...     y = torch.tensor([2.0, -1.0], requires_grad=True)
        ...     problem = Bilevel(
        ...         lambda batch: ((y - 3.0) ** 2).sum() + 1.0, lambda batch: ((y - x) ** 2).sum(), [x], [y]
        ...     )
        ...     return BiSLS(problem, alpha=alpha, beta=beta)
        >>> report = sensitivity(make_solver, steps=30, alphas=(0.01, 10.0), betas=(0.1, 10.0), progress=False)
        >>> report.spread < 1.1
        True
    """
    sweep = _Sweep(make_solver, {"upper_data": upper_data, "lower_data": lower_data}, steps, score)
    pairs = [_numbers(name, values) for name, values in (("alphas", alphas), ("betas", betas))]
    chosen = settled("sensitivity", "seeds", seeds, several("must be at least one whole number, none below 0", SEED))
    progress = settled("sensitivity", "progress", progress, FLAG)
    shape = (len(pairs[0]), len(pairs[1]), len(chosen))
    scores, checks, curves = np.full(shape, inf), np.full(shape, nan), np.full((*shape, steps), nan)
    failures: dict[tuple[float, float, int], str] = {}
    before = random_state()
    errors: list[Exception] = []
    try:
        with Progress(progress, int(np.prod(shape)), what="runs") as bar:
            for i, j, s in np.ndindex(*shape):
                alpha, beta, seed = pairs[0][i], pairs[1][j], chosen[s]
                try:
                    scores[i, j, s], history = sweep.run(alpha, beta, seed)
                    known = history["upper_value"]
                    curves[i, j, s, : len(known)] = known
                    checks[i, j, s] = float(np.mean(history["upper_checks"] + history["lower_checks"]))
                    if not isfinite(scores[i, j, s]):
                        failures[alpha, beta, seed] = f"ended with a score of {scores[i, j, s]:g}"
                        scores[i, j, s] = inf
                except (RuntimeError, ArithmeticError) as error:
                    errors.append(error)
                    failures[alpha, beta, seed] = f"{type(error).__name__}: {error}"
                bar.advance(f"alpha {alpha:g}  beta {beta:g}  seed {seed}  score {scores[i, j, s]:.4g}")
    finally:
        set_random_state(before)
        sweep.restore_generators()
    if len(errors) == scores.size:
        raise RuntimeError(
            f"`sensitivity(...)`: all {scores.size} runs failed, the first with: {errors[0]}"
        ) from errors[0]
    sweep.check_use()
    return SensitivityReport(pairs[0], pairs[1], chosen, scores, checks, curves, failures)


class _Sweep:
    """What is the same for all runs, and what must not be."""

    def __init__(self, make_solver: Any, data: dict[str, Any], steps: int, score: Callable[[Any], float] | None):
        rule = "must be a function of (alpha, beta) that returns a new solver on a new problem"
        settled("sensitivity", "make_solver", make_solver, function(2, rule))
        steps = settled("sensitivity", "steps", steps, whole_number(1, most=MOST_STEPS))
        settled("sensitivity", "score", score, optional(function(1, "must be a function of the solver")))
        self.make_solver = make_solver
        self.data = data
        self.steps = steps
        self.score = score
        self.alive: dict[int, Any] = {}  # storage -> the tensor of an earlier run that has it
        self.begun: dict[int, Tensor] = {}  # seed -> the start
        self.names: set[str] = set()
        self.pairs: set[tuple[float, float]] = set()
        for name, own in data.items():
            data[name] = _checked_data(own, name)
        self.own = [(generator, generator.get_state()) for own in data.values() for generator in of_loader(own)]

    def restore_generators(self) -> None:
        """Loaders draw again what they drew in the first run."""
        for generator, place in self.own:
            generator.set_state(place)

    def run(self, alpha: float, beta: float, seed: int) -> tuple[float, History]:
        """One run: its score and its history."""
        self.restore_generators()
        seed_everything(seed)
        made = self.make_solver(alpha, beta)
        data = dict(self.data)
        if isinstance(made, tuple):
            if len(made) != 3 or any(own is not None for own in data.values()):
                raise ValueError(
                    "`sensitivity(make_solver=...)`: it returned a tuple; that must be (solver, upper_data, lower_data), and "
                    "then no data may be passed to sensitivity itself"
                )
            made, data["upper_data"], data["lower_data"] = made
        else:
            data = {name: _made(own, name) for name, own in data.items()}
        self._check_fresh(made, seed)
        self.names.add(repr(made))
        self.pairs.add((alpha, beta))
        seed_everything(seed)  # the batches and the masks do not depend on what the start drew
        history = fit(made, **data, steps=self.steps, progress=False, on_failure="ignore", tol=None)
        if not len(history):
            raise ValueError("`sensitivity(...)`: the data ended before the first iteration; pass endless data")
        if self.score is not None:
            return float(self.score(made)), history
        return float(np.mean(history["upper_value"][-max(1, self.steps // 10) :])), history

    def _check_fresh(self, solver: Any, seed: int) -> None:
        call = "`sensitivity(make_solver=...)`"
        if not hasattr(solver, "problem"):
            raise ValueError(f"{call}: it must return a solver, such as BiSLS(problem), got {type(solver).__name__}")
        if solver.k != 0:
            raise ValueError(
                f"{call}: it returned a solver with {solver.k} iterations behind it; make a new one in each call"
            )
        problem = solver.problem
        for tensor in (*problem.x.tensors, *problem.y.tensors):
            place = tensor.untyped_storage().data_ptr()
            earlier = self.alive.get(place)
            if place and earlier is not None and earlier() is not None:
                raise ValueError(
                    f"{call}: two calls returned solvers with the same parameters (shape {tuple(tensor.shape)}), so the second "
                    "run would go on where the first ended; make modules and parameters inside the function, or copy them "
                    "there: copy.deepcopy(module)"
                )
        for tensor in (*problem.x.tensors, *problem.y.tensors):
            self.alive[tensor.untyped_storage().data_ptr()] = ref(tensor)
        start = torch.cat([problem.x.read().double(), problem.y.read().double()]).cpu()
        if not torch.equal(self.begun.setdefault(seed, start), start):
            raise ValueError(
                f"{call}: two calls with seed {seed} start from different points, so their results cannot be compared; draw the "
                "start from torch's, numpy's or Python's global generator (they are seeded before each call), or copy it"
            )

    def check_use(self) -> None:
        """Say so if the solvers do not differ."""
        if len(self.pairs) > 1 and len(self.names) == 1:
            logger.warning(
                "sensitivity: all solvers are alike (%s); does make_solver pass alpha and beta on?",
                next(iter(self.names)),
            )


def _checked_data(data: Any, name: str) -> Any:
    """Data that can serve every run; arrays become tensors here, once."""
    if hasattr(data, "__next__"):
        raise ValueError(
            f"`sensitivity({name}={type(data).__name__}(...))`: an iterator would go on from run to run, and each would see "
            "other batches; pass a function that makes it: lambda: ..."
        )
    if callable(data) and not hasattr(data, "__iter__"):
        return data
    found = feed(data, name, "sensitivity")
    return found.data if found.whole else data


def _made(data: Any, name: str) -> Any:
    """The data of one run: what a factory makes, or the data as they are."""
    if isinstance(data, Tensor) or not callable(data) or hasattr(data, "__iter__"):
        return data
    unfit = unbound(data, 0)
    if unfit:
        raise ValueError(
            f"`sensitivity({name}={shown(data)})`: the callable must work without arguments ({unfit}); bind them: "
            "lambda: function(...)"
        )
    made = data()
    if feed(made, name, "sensitivity").whole:
        raise ValueError(
            f"`sensitivity({name}=function)`: the function is called once a run and returned one batch, which would serve every "
            "step; return what gives batches (a DataLoader, an iterator, a callable), or pass the batch itself"
        )
    return made


def _numbers(name: str, values: Iterable[float]) -> tuple[float, ...]:
    rule = "must be at least one number, all different, finite and above 0"
    numbers = settled("sensitivity", name, values, several(rule, POSITIVE))
    require_argument("sensitivity", name, values, len(set(numbers)) == len(numbers), rule)
    return tuple(float(n) for n in numbers)
