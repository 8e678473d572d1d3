"""sensitivity: how much does the result depend on the two first steps? A sweep on the user's own problem."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from math import inf, isfinite, isnan, nan
from os import PathLike
from typing import Any
from weakref import ref

import numpy as np
import torch
from torch import Tensor

from bisls._check import require_argument, whole
from bisls.feed import feed, generators, random_state, seed_everything, set_random_state
from bisls.fit import Progress, fit
from bisls.record import History

logger = logging.getLogger(__name__)

_FAR = 1e6  # plots end this many times beyond what is typical


@dataclass(frozen=True)
class Cell:
    """One pair of first steps, and the mean score over the seeds."""

    alpha: float
    beta: float
    score: float


@dataclass(frozen=True)
class SensitivityReport:
    """What `sensitivity` found. Print it.

    Attributes:
        alphas: The upper steps that were tried.
        betas: The lower steps that were tried.
        seeds: The seeds.
        scores: The score of each run, smaller is better: alphas x betas x seeds. A run that failed has inf.
        checks: Trial points an iteration, both levels together, in the same shape.
        curves: The upper loss over the iterations: alphas x betas x seeds x steps; NaN where a run had ended.
        failures: Why runs failed, by (alpha, beta, seed).
    """

    alphas: tuple[float, ...]
    betas: tuple[float, ...]
    seeds: tuple[int, ...]
    scores: np.ndarray
    checks: np.ndarray
    curves: np.ndarray
    failures: dict[tuple[float, float, int], str] = field(default_factory=dict)

    @property
    def means(self) -> np.ndarray:
        """The scores averaged over the seeds: alphas x betas."""
        return self.scores.mean(axis=2)

    @property
    def best(self) -> Cell:
        """The pair with the smallest mean score."""
        return self._cell(int(self.means.argmin()))

    @property
    def worst(self) -> Cell:
        """The pair with the largest mean score."""
        return self._cell(int(self.means.argmax()))

    @property
    def median(self) -> float:
        """The median of the mean scores: what a pair picked blindly gives."""
        return float(np.median(np.sort(self.means, axis=None)))

    @property
    def spread(self) -> float:
        """Worst over best: 1 where the first steps do not matter, inf where some pair fails; NaN for scores below 0."""
        best, worst = self.best.score, self.worst.score
        if best == worst:
            return nan if best == inf else 1.0
        if best == 0 or worst == inf:
            return inf
        return worst / best if best > 0 else nan

    def _cell(self, index: int) -> Cell:
        i, j = divmod(index, len(self.betas))
        return Cell(self.alphas[i], self.betas[j], float(self.means[i, j]))

    def __str__(self) -> str:
        best, worst = self.best, self.worst
        seeds = f"{len(self.seeds)} seed{'s' if len(self.seeds) > 1 else ''}"
        title = "alpha \\ beta"
        lines = [
            f"sensitivity to the first steps: mean score over {seeds}, {self.curves.shape[-1]} iterations a run",
            f"  {title:>12}" + "".join(f"{beta:>12.3g}" for beta in self.betas),
        ]
        for alpha, row in zip(self.alphas, self.means, strict=True):
            lines.append(f"  {alpha:>12.3g}" + "".join(f"{score:>12.4g}" for score in row))
        lines += [
            f"  best    {best.score:.4g}  (alpha {best.alpha:g}, beta {best.beta:g})",
            f"  worst   {worst.score:.4g}  (alpha {worst.alpha:g}, beta {worst.beta:g})",
            f"  median  {self.median:.4g}",
            f"  spread  {self.spread:.3g}  (worst / best)",
            f"  checks  {np.nanmean(self.checks) if np.isfinite(self.checks).any() else nan:.1f} an iteration",
        ]
        for (alpha, beta, seed), reason in self.failures.items():
            lines.append(f"  failed: alpha {alpha:g}, beta {beta:g}, seed {seed}: {reason}")
        return "\n".join(lines)

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers, strings and lists; NaN is None and infinities are strings, so that it is strict JSON."""

        def plain(value: Any) -> Any:
            if isinstance(value, list | tuple):
                return [plain(entry) for entry in value]
            if isinstance(value, float) and not isfinite(value):
                return None if isnan(value) else str(value)
            return value

        cells = {name: getattr(self, name) for name in ("best", "worst")}
        return {
            "alphas": list(self.alphas),
            "betas": list(self.betas),
            "seeds": list(self.seeds),
            "scores": plain(self.scores.tolist()),
            "checks": plain(self.checks.tolist()),
            "curves": plain(self.curves.tolist()),
            **{name: {"alpha": c.alpha, "beta": c.beta, "score": plain(c.score)} for name, c in cells.items()},
            "median": plain(self.median),
            "spread": plain(self.spread),
            "failures": [
                {"alpha": alpha, "beta": beta, "seed": seed, "reason": reason}
                for (alpha, beta, seed), reason in self.failures.items()
            ],
        }

    def plot(self, path: str | PathLike[str] | None = None) -> Any:
        """A heat map of the scores, and the upper loss of every run, as a matplotlib figure.

        Args:
            path: Also save it here; the ending says the format.

        Raises:
            ImportError: matplotlib is not installed.
        """
        try:
            figures, colors = import_module("matplotlib.figure"), import_module("matplotlib.colors")
        except ImportError as error:
            raise ImportError("`SensitivityReport.plot()` needs matplotlib: pip install 'bisls[cli]'") from error
        figure = figures.Figure(figsize=(11, 4.5), layout="tight")
        heat, lines = figure.subplots(1, 2)
        means = self.means
        finite = means[np.isfinite(means)]
        apart = finite.size > 0 and finite.min() > 0 and finite.max() > finite.min()
        norm = colors.LogNorm(finite.min(), min(finite.max(), _FAR * finite.min())) if apart else None
        shown = heat.imshow(np.ma.masked_invalid(means), norm=norm, cmap="viridis_r", aspect="auto", origin="lower")
        figure.colorbar(shown, ax=heat, label="score (smaller is better)")
        heat.set_xticks(range(len(self.betas)), [f"{beta:g}" for beta in self.betas])
        heat.set_yticks(range(len(self.alphas)), [f"{alpha:g}" for alpha in self.alphas])
        heat.set_xlabel(r"lower first step $\beta$")
        heat.set_ylabel(r"upper first step $\alpha$")
        for i, j in np.ndindex(*means.shape):
            text = f"{means[i, j]:.3g}" if isfinite(means[i, j]) else "failed"
            box = {"facecolor": "white", "alpha": 0.6, "edgecolor": "none", "pad": 1.5}
            heat.text(j, i, text, ha="center", va="center", fontsize=8, bbox=box)
        starts = self.curves[..., 0]
        typical = np.nanmedian(np.abs(starts)) if np.isfinite(starts).any() else 1.0
        curves = np.where(
            np.abs(self.curves) <= _FAR * typical, self.curves, nan
        )  # a run that diverges leaves the picture
        best = (self.alphas.index(self.best.alpha), self.betas.index(self.best.beta))
        for i, j in np.ndindex(*means.shape):
            for s, curve in enumerate(curves[i, j]):
                own = (
                    {"color": "C1", "zorder": 3, "label": "best pair"}
                    if (i, j) == best
                    else {"color": "C0", "alpha": 0.4}
                )
                lines.plot(curve, linewidth=1.0, **(own if s == 0 else {**own, "label": None}))
        drawn = curves[np.isfinite(curves)]
        if drawn.size and drawn.min() > 0:
            lines.set_yscale("log")
        lines.set_xlabel("k, outer iteration")
        lines.set_ylabel("upper loss f")
        lines.legend()
        lines.grid(alpha=0.3)
        if path is not None:
            figure.savefig(path)
        return figure


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
    chosen = tuple(seeds)
    usable = len(chosen) > 0 and all(isinstance(seed, int) and seed >= 0 for seed in chosen)
    require_argument("sensitivity", "seeds", chosen, usable, "must be at least one whole number, none below 0")
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
        callable_class = callable(make_solver) and not isinstance(make_solver, type)
        rule = "must be a function of (alpha, beta) that returns a new solver on a new problem"
        require_argument("sensitivity", "make_solver", make_solver, callable_class, rule)
        require_argument("sensitivity", "steps", steps, whole(steps, 1), "must be a whole number, at least 1")
        require_argument(
            "sensitivity", "score", score, score is None or callable(score), "must be a function of the solver"
        )
        self.make_solver = make_solver
        self.data = data
        self.steps = steps
        self.score = score
        self.alive: dict[int, Any] = {}  # storage -> the tensor of an earlier run that has it
        self.begun: dict[int, Tensor] = {}  # seed -> the start
        self.names: set[str] = set()
        self.pairs: set[tuple[float, float]] = set()
        for name, own in data.items():
            _check_data(own, name)
        self.own = [(generator, generator.get_state()) for own in data.values() for generator in generators(own)]

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
        history = fit(made, **data, steps=self.steps, progress=False, on_failure="ignore")
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


def _check_data(data: Any, name: str) -> None:
    if hasattr(data, "__next__"):
        raise ValueError(
            f"`sensitivity({name}={type(data).__name__}(...))`: an iterator would go on from run to run, and each would see "
            "other batches; pass a function that makes it: lambda: ..."
        )
    if not callable(data) or hasattr(data, "__iter__"):
        feed(data, name, "sensitivity")


def _made(data: Any, name: str) -> Any:
    """The data of one run: what a factory makes, or the data as they are."""
    if isinstance(data, Tensor) or not callable(data) or hasattr(data, "__iter__"):
        return data
    made = data()
    if feed(made, name, "sensitivity").whole:
        raise ValueError(
            f"`sensitivity({name}=function)`: the function is called once a run and returned one batch, which would serve every "
            "step; return what gives batches (a DataLoader, an iterator, a callable), or pass the batch itself"
        )
    return made


def _numbers(name: str, values: Iterable[float]) -> tuple[float, ...]:
    numbers: Sequence[Any] = tuple(values) if isinstance(values, Iterable) else ()
    usable = len(numbers) > 0 and all(isinstance(n, int | float) and 0 < n < inf for n in numbers)
    usable = usable and len(set(numbers)) == len(numbers)
    require_argument(
        "sensitivity", name, values, usable, "must be at least one number, all different, finite and above 0"
    )
    return tuple(float(n) for n in numbers)
