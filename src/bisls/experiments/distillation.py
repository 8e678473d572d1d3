"""What the figures on data distillation have in common."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from bisls.experiments.base import Config, Plan, RunRecord
from bisls.experiments.bilevel import BilevelRun
from bisls.experiments.drawing import curve
from bisls.experiments.judging import at_most, mean, ours, show
from bisls.outcome import Panel, Pictures, Series, Verdict

DEFAULT = "default"
OURS = "BiSLS, nothing set"
LOWER = 1e-4  # the paper's lower step wherever it fixes one
SEARCH = (10.0, 100.0)  # where the paper's searches begin, above and below

Groups = Mapping[str, Sequence[RunRecord]]
Pairs = Sequence[tuple[float, float]]


def distillation(plan: Plan, seed: int, method: str, **settings: Any) -> BilevelRun:
    """A run at the scale of the plan: 3000 iterations at full scale, 300 at the quick one; ten real pictures a batch, T = 20."""
    own: dict[str, Any] = {
        "task": "distillation",
        "data": plan.pick("digits", "mnist", "mnist"),
        "method": method,
        "steps": plan.pick(6, 300, 3000),
        "every": plan.pick(3, 50, 100),
        "batch": 10,
        "lower_iters": plan.pick(4, 20, 20),
        "max_checks": plan.pick(20, 200, 200),
        "linear": "identity",
    }
    if method == DEFAULT:
        own |= {"linear": "cg", "terms": 0}
    if method == "bisls-sgd":
        own |= {"alpha": SEARCH[0], "beta": SEARCH[1]}
    return BilevelRun(seed, **{**own, **settings})


def ceilings(plan: Plan) -> tuple[float, ...]:
    """The values of alpha_b0 for BiSPS and decaying SGD; the paper names 10 and 50."""
    return plan.pick((10.0, 100.0), (10.0, 50.0, 100.0, 1000.0), (10.0, 50.0, 100.0, 500.0, 1000.0))


def enveloped(plan: Plan, method: str, alpha: float, **settings: Any) -> list[BilevelRun]:
    """BiSPS or decaying SGD from alpha_b0, with the lower step fixed, for every seed: the same runs in every figure."""
    fixed = {"alpha": alpha, "beta": LOWER, "lower": "constant", **settings}
    return [distillation(plan, seed, method, **fixed) for seed in plan.each_seed]


def seeds(plan: Plan, method: str, **settings: Any) -> list[BilevelRun]:
    """A run for every seed."""
    return [distillation(plan, seed, method, **settings) for seed in plan.each_seed]


def gather(
    wanted: Mapping[str, Sequence[Config]],
) -> Generator[Sequence[Config], Sequence[RunRecord], dict[str, list[RunRecord]]]:
    """Asks for named groups of runs at once, and returns the records under the same names."""
    records = iter((yield [config for group in wanted.values() for config in group]))
    return {name: [next(records) for _ in group] for name, group in wanted.items()}


@dataclass(frozen=True)
class Tuned:
    """The best constant steps of a grid.

    Attributes:
        alpha: The upper one.
        beta: The lower one.
        pairs: All that were tried.
        runs: The runs with the best pair, one for each seed.
    """

    alpha: float
    beta: float
    pairs: Pairs
    runs: Sequence[RunRecord]

    def __str__(self) -> str:
        near = [alpha for alpha, beta in self.pairs if beta == self.beta]
        edge = ", its alpha at the edge" if len(near) > 1 and self.alpha in (min(near), max(near)) else ""
        return f"alpha {self.alpha:g}, beta {self.beta:g} (best of {len(self.pairs)} pairs{edge})"


def tuned(
    plan: Plan, grids: Mapping[str, tuple[str, Pairs]], **settings: Any
) -> Generator[Sequence[Config], Sequence[RunRecord], dict[str, Tuned]]:
    """Constant steps: each pair of a grid on the first seed, then the pair that ends lowest on all of them.

    Args:
        plan: The scale.
        grids: For each name the method ("sgd" or "adam") and pairs of alpha and beta.
        settings: The same for all runs.
    """
    firsts = {
        name: [distillation(plan, 0, method, alpha=a, beta=b, **settings) for a, b in pairs]
        for name, (method, pairs) in grids.items()
    }
    found = yield from gather(firsts)
    best = {}
    for name, (_, pairs) in grids.items():
        ends = finals(found[name])
        best[name] = pairs[ends.index(min(ends))]
    chosen = {name: seeds(plan, grids[name][0], alpha=a, beta=b, **settings) for name, (a, b) in best.items()}
    runs = yield from gather(chosen)
    return {name: Tuned(*best[name], grids[name][1], runs[name]) for name in grids}


def grid(plan: Plan, method: str, beta: float | None = None) -> Pairs:
    """Pairs of constant steps for SGD or Adam; with ``beta`` only those that have it.

    A lower step as small as the paper's wants larger upper ones, so that the pairs are no product of two lists.
    """
    small = {
        "sgd": plan.pick((10.0,), (1.0, 10.0, 100.0), (0.1, 1.0, 10.0, 100.0, 1000.0)),
        "adam": plan.pick((0.1,), (0.01, 0.1, 1.0), (0.001, 0.01, 0.1, 1.0, 10.0)),
    }[method]
    usual = {
        "sgd": plan.pick((1.0,), (0.1, 1.0, 10.0), (0.01, 0.1, 1.0, 10.0, 100.0)),
        "adam": plan.pick((0.01,), (0.001, 0.01, 0.1), (0.0001, 0.001, 0.01, 0.1, 1.0)),
    }[method]
    betas = plan.pick((0.3,), (0.3,), (0.01, 0.1, 0.3, 1.0))
    pairs = [(alpha, LOWER) for alpha in small] + [(alpha, b) for b in betas for alpha in usual]
    return [pair for pair in pairs if beta is None or pair[1] == beta]


def finals(records: Sequence[RunRecord]) -> list[float]:
    """Where the validation loss ended, one number for each seed."""
    return [record.last("loss") for record in records]


def exacts(records: Sequence[RunRecord]) -> list[float]:
    """F(x) with the lower problem solved, one number for each seed."""
    return [float("inf") if record.error else record.numbers["exact"] for record in records]


def held(records: Sequence[RunRecord]) -> float:
    """In which share of the iterations the Polyak step, not its ceiling, decided."""
    shares = []
    for record in records:
        steps = record.curve("alpha")
        ceiling = record.config["alpha"] / np.sqrt(np.arange(1, len(steps) + 1))
        shares.append(float(np.mean(steps < ceiling * (1 - 1e-6))) if len(steps) else 0.0)
    return float(np.mean(shares))


def losses(title: str, lines: Groups, default: Sequence[RunRecord], alt: str, dashed: Sequence[str] = ()) -> Panel:
    """The validation loss of several methods and of the default."""
    series: list[Series] = [curve(name, runs, "loss", dashed=name in dashed) for name, runs in lines.items()]
    series.append(curve(OURS, default, "loss", ours=True))
    return Panel(
        title, "upper iteration", "validation loss f(x, y)", tuple(series), yscale="log", ylim=(0.3, 3.0), alt=alt
    )


def own_verdicts(default: Sequence[RunRecord], groups: Groups, where: str = "of the figure") -> tuple[Verdict, ...]:
    """Whether the default ends at or below the best of the groups, in what is drawn and in what is meant by it."""
    verdicts = []
    for value, shown in ((finals, "f(x, y)"), (exacts, "F(x), the lower problem solved")):
        ends = {name: value(runs) for name, runs in groups.items()}
        best = min(ends, key=lambda name: mean(ends[name]))
        numbers = f"default {show(mean(value(default)))}, best ({best}) {show(mean(ends[best]))}"
        statement = f"The default with nothing set ends at or below the best method {where}: {shown}"
        verdicts.append(ours(statement, at_most(value(default), ends[best]), numbers))
    return tuple(verdicts)


def album(title: str, record: RunRecord) -> Pictures:
    """The learnt pictures, each from its darkest to its brightest value."""
    images = []
    for flat in record.curve("pictures").reshape(10, -1):
        flat = np.nan_to_num(flat)
        low, high = flat.min(), flat.max()
        side = round(len(flat) ** 0.5)
        grey = np.round((flat - low) / (high - low if high > low else 1.0), 3).reshape(side, side)
        images.append(tuple(tuple(row) for row in grey.tolist()))
    return Pictures(title, tuple(images), tuple(str(digit) for digit in range(10)))


def recognised(learnt: np.ndarray, means: np.ndarray) -> int:
    """How many of the learnt pictures correlate most with the mean picture of their own class.

    Examples:
        >>> means = np.array([[0.0, 1.0, 3.0], [2.0, 1.0, 0.0]])
        >>> recognised(np.array([[-5.0, 1.0, 4.0], [0.0, 1.0, 2.0]]), means)
        1
    """

    def unit(rows: np.ndarray) -> np.ndarray:
        rows = np.nan_to_num(rows) - np.nan_to_num(rows).mean(axis=1, keepdims=True)
        return rows / np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), 1e-30)

    alike = unit(learnt) @ unit(means).T
    own = np.diag(alike)
    return int(np.sum((own > 0) & (own >= alike.max(axis=1))))
