"""What the figures on data distillation have in common."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch

from bisls.experiments.asking import Pair, at_edge, gather, over_seeds
from bisls.experiments.base import Config, Plan, RunRecord
from bisls.experiments.bilevel import BilevelRun, make_task
from bisls.experiments.drawing import curve, limits
from bisls.experiments.judging import at_most, mean, ours, show
from bisls.experiments.progress import begun, earned
from bisls.outcome import Judgement, Panel, Pictures, Series, Verdict
from bisls.tasks import Batches

DEFAULT = "default"
OURS = "BiSLS, nothing set"
LOWER = 1e-4  # the paper's lower step wherever it fixes one
SEARCH = (10.0, 100.0)  # where the paper's searches begin, above and below

FURTHER = 3  # how often a grid may be extended

Groups = Mapping[str, Sequence[RunRecord]]
Pairs = Sequence[Pair]


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
        edge = at_edge((self.alpha, self.beta), self.pairs)
        return f"alpha {self.alpha:g}, beta {self.beta:g} (best of {len(self.pairs)} pairs{edge})"


def tuned(
    plan: Plan, grids: Mapping[str, tuple[str, Pairs]], **settings: Any
) -> Generator[Sequence[Config], Sequence[RunRecord], dict[str, Tuned]]:
    """Constant steps: each pair of a grid on the first seed, then the pair that ends lowest on all of them.

    Where the best upper step is the least or the largest of those tried with its lower step, one of a tenth or ten times as
    much is tried too, at most `FURTHER` times (not at the scale "smoke"). Lower steps are those of the grid.

    Args:
        plan: The scale.
        grids: For each name the method ("sgd" or "adam") and pairs of alpha and beta.
        settings: The same for all runs.
    """
    ends: dict[str, dict[Pair, float]] = {name: {} for name in grids}
    wanted = {name: list(pairs) for name, (_, pairs) in grids.items()}
    for left in reversed(range(1 if plan.scale == "smoke" else 1 + FURTHER)):
        asked = {
            (name, a, b): [distillation(plan, 0, grids[name][0], alpha=a, beta=b, **settings)]
            for name, pairs in wanted.items()
            for a, b in pairs
        }
        for (name, a, b), runs in (yield from gather(asked)).items():
            ends[name][a, b] = finals(runs)[0]
        wanted = {name: beyond(own) if left else [] for name, own in ends.items()}
    best = {name: best_of(own) for name, own in ends.items()}
    again = {name: distillation(plan, 0, grids[name][0], alpha=a, beta=b, **settings) for name, (a, b) in best.items()}
    chosen = yield from over_seeds(plan.each_seed, again)
    return {name: Tuned(*best[name], tuple(ends[name]), chosen[name]) for name in grids}


def best_of(ends: Mapping[Pair, float]) -> Pair:
    """The pair with the lowest end; the smallest steps where several have it, or none a finite one."""
    return min(ends, key=lambda pair: (ends[pair], pair))


def beyond(ends: Mapping[Pair, float]) -> list[Pair]:
    """The pair with the next upper step, where that of the best pair has none beyond it among those tried with its lower step.

    Examples:
        >>> beyond({(1.0, 0.3): 0.5, (10.0, 0.3): 0.4}), beyond({(1.0, 0.3): 0.5, (10.0, 0.3): 0.4, (100.0, 0.3): 0.6})
        ([(100.0, 0.3)], [])
    """
    alpha, beta = best_of(ends)
    tried = [a for a, b in ends if b == beta]
    steps = [alpha * 10] * (alpha == max(tried)) + [alpha / 10] * (alpha == min(tried))
    return [(float(f"{step:.6g}"), beta) for step in steps]


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
    """F(x) with the lower problem solved, one number for each seed; at the start it is what f(x, y) is, log 10."""
    return [float("inf") if record.error else record.numbers["exact"] for record in records]


def losses(title: str, lines: Groups, default: Sequence[RunRecord], alt: str, dashed: Sequence[str] = ()) -> Panel:
    """The validation loss of several methods and of the default."""
    series: list[Series] = [curve(name, runs, "loss", dashed=name in dashed) for name, runs in lines.items()]
    series.append(curve(OURS, default, "loss", ours=True))
    return Panel(
        title,
        "upper iteration",
        "validation loss f(x, y)",
        tuple(series),
        yscale="log",
        ylim=limits(series, 3.0),
        alt=alt,
    )


def own_verdicts(default: Sequence[RunRecord], groups: Groups, where: str = "of the figure") -> tuple[Verdict, ...]:
    """Whether the default ends at or below the best of the groups, in what is drawn and in what is meant by it."""
    verdicts = []
    for value, shown in ((finals, "f(x, y)"), (exacts, "F(x), the lower problem solved")):
        ends = {name: value(runs) for name, runs in groups.items()}
        best = min(ends, key=lambda name: mean(ends[name]))
        numbers = f"default {show(mean(value(default)))}, best ({best}) {show(mean(ends[best]))}"
        statement = f"The default with nothing set ends at or below the best method {where}: {shown}"
        judgement = at_most(value(default), ends[best])
        verdicts.append(ours(statement, earned(judgement, begun(default), value(default)), numbers))
    return tuple(verdicts)


def learnt(judgement: Judgement, records: Sequence[RunRecord]) -> Judgement:
    """What holds in favour of runs that got nowhere is undecided."""
    return earned(judgement, begun(records), finals(records))


@cache
def reference(data: str, seed: int = 0) -> float:
    """The accuracy of a model trained to the end on the mean picture of each class, on the same unseen pictures as a run's.

    The means are of the pictures that the upper level sees.
    """
    task = make_task(BilevelRun(seed, task="distillation", data=data))
    source = task.upper_data
    images, labels = source.tensors if isinstance(source, Batches) else source
    learnt = task.problem.x.tensors[0]
    with torch.no_grad():
        learnt.copy_(torch.stack([images[labels == digit].mean(0) for digit in range(len(learnt))]))
    return task.metrics()["accuracy"]


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
