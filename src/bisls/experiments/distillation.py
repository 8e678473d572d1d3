"""What the figures on data distillation have in common."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import torch

from bisls.directions import Steepest
from bisls.experiments.asking import Pair, Tuned, gather, over_seeds
from bisls.experiments.base import Config, Plan, RunRecord
from bisls.experiments.bilevel import DEFAULT, OWN, Distillation, constant
from bisls.experiments.drawing import curve, limits
from bisls.experiments.evidence import if_progressed, initial
from bisls.experiments.judging import at_most, mean, ours, show
from bisls.experiments.method import Method
from bisls.experiments.readings import Distilling
from bisls.hypergrad import Implicit
from bisls.linear import Identity, Neumann
from bisls.methods import Alternating, BiSLS, BiSPS
from bisls.outcome import Judgement, Panel, Pictures, Series, Verdict
from bisls.solver import Solver
from bisls.steps import Constant, Decay
from bisls.tasks import Batches

LOWER = 1e-4  # the paper's lower step wherever it fixes one
IDENTITY, NEUMANN = Implicit(Identity()), Implicit(Neumann(terms=10))
CONSTANT = {
    "Adam": Method(Alternating, hypergrad=IDENTITY),
    "SGD": Method(Alternating, direction=Steepest(), hypergrad=IDENTITY),
}

FURTHER = 3  # how often a grid may be extended

Groups = Mapping[str, Sequence[RunRecord]]
Pairs = Sequence[Pair]


def distillation(plan: Plan, seed: int, method: Method[Solver], **settings: Any) -> Distillation:
    """A run at the scale of the plan: 3000 iterations, 1000 or 300; ten real pictures a batch, T = 20."""
    own: dict[str, Any] = {
        "data": plan.pick("digits", "mnist", "mnist"),
        "steps": plan.pick(6, 300, 3000, standard=1000),
        "every": plan.pick(3, 50, 100, standard=50),
        "batch": 10,
        "lower_iters": plan.pick(4, 20, 20),
        "reading": plan.reading.distillation,
    }
    return Distillation(seed, at_fixed(method, plan.reading.distillation), **{**own, **settings})


def at_fixed(method: Method[Solver], reading: Distilling) -> Method[Solver]:
    """The method under a reading: what the paper's fixed lower rate is the rate of."""
    return method.but(**reading.fixed()) if method["lower_step"] == Constant(LOWER) else method


def seeds(plan: Plan, method: Method[Solver], **settings: Any) -> list[Distillation]:
    """A run for every seed."""
    return [distillation(plan, seed, method, **settings) for seed in plan.each_seed]


def searched(plan: Plan, **settings: Any) -> Method[Solver]:
    """BiSLS-SGD: the paper's searches from alpha_b0 = 10 and beta_b0 = 100."""
    own = {"direction": Steepest(), "hypergrad": IDENTITY, "max_checks": plan.pick(20, 200, 200)}
    return Method(BiSLS.paper, **{**own, **settings})


def ceilings(plan: Plan) -> tuple[float, ...]:
    """The values of alpha_b0 for BiSPS and decaying SGD; the paper names 10 and 50."""
    return plan.pick((10.0, 100.0), (10.0, 50.0, 100.0, 1000.0), (10.0, 50.0, 100.0, 500.0, 1000.0))


def polyak(alpha: float, **settings: Any) -> Method[Solver]:
    """BiSPS from alpha_b0, with the paper's lower step."""
    return Method(BiSPS, **{"alpha": alpha, "hypergrad": IDENTITY, "lower_step": Constant(LOWER), **settings})


def decaying(alpha: float, **settings: Any) -> Method[Solver]:
    """SGD with the ceiling of BiSPS for its steps."""
    return CONSTANT["SGD"].but(upper_step=Decay(alpha), lower_step=Constant(LOWER), **settings)


def tuned(
    plan: Plan, grids: Mapping[str, tuple[Method[Solver], Pairs]], **settings: Any
) -> Generator[Sequence[Config], Sequence[RunRecord], dict[str, Tuned]]:
    """Constant steps: each pair of a grid on the first seed, then the pair that ends lowest on all of them.

    Where the best upper step is the least or the largest of those tried with its lower step, one of a tenth or ten times as
    much is tried too, at most `FURTHER` times (not at the scale "smoke"). Lower steps are those of the grid.

    Args:
        plan: The scale.
        grids: For each name the method and pairs of alpha and beta.
        settings: The same for all runs.
    """

    def run(name: str, pair: Pair) -> Distillation:
        return distillation(plan, 0, constant(grids[name][0], *pair), **settings)

    ends: dict[str, dict[Pair, float]] = {name: {} for name in grids}
    wanted = {name: list(pairs) for name, (_, pairs) in grids.items()}
    for left in reversed(range(1 if plan.scale == "smoke" else 1 + FURTHER)):
        asked = {(name, pair): [run(name, pair)] for name, pairs in wanted.items() for pair in pairs}
        for (name, pair), runs in (yield from gather(asked)).items():
            ends[name][pair] = finals(runs)[0]
        wanted = {name: beyond(own) if left else [] for name, own in ends.items()}
    best = {name: best_of(own) for name, own in ends.items()}
    chosen = yield from over_seeds(plan.each_seed, {name: run(name, pair) for name, pair in best.items()})
    return {name: Tuned(best[name], tuple(ends[name]), chosen[name]) for name in grids}


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


def grid(plan: Plan, name: str, beta: float | None = None) -> Pairs:
    """Pairs of constant steps for "SGD" or "Adam"; with ``beta`` only those that have it.

    A lower step as small as the paper's wants larger upper ones, so that the pairs are no product of two lists.
    """
    small = {
        "SGD": plan.pick((10.0,), (1.0, 10.0, 100.0), (0.1, 1.0, 10.0, 100.0, 1000.0)),
        "Adam": plan.pick((0.1,), (0.01, 0.1, 1.0), (0.001, 0.01, 0.1, 1.0, 10.0)),
    }[name]
    usual = {
        "SGD": plan.pick((1.0,), (0.1, 1.0, 10.0), (0.01, 0.1, 1.0, 10.0, 100.0)),
        "Adam": plan.pick((0.01,), (0.001, 0.01, 0.1), (0.0001, 0.001, 0.01, 0.1, 1.0)),
    }[name]
    betas = plan.pick((0.3,), (0.3,), (0.01, 0.1, 0.3, 1.0), standard=(0.03, 0.3))
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
    series.append(curve(OWN, default, "loss", ours=True))
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
        verdicts.append(ours(statement, if_progressed(judgement, initial(default), value(default)), numbers))
    return tuple(verdicts)


def learnt(judgement: Judgement, records: Sequence[RunRecord]) -> Judgement:
    """What holds in favour of runs that got nowhere is undecided."""
    return if_progressed(judgement, initial(records), finals(records))


@cache
def reference(data: str, reading: Distilling, seed: int = 0) -> float:
    """The accuracy of a model trained to the end on the mean picture of each class, on the same unseen pictures as a run's.

    The means are of all pictures that the upper level may see, standardised where the reading has them so.
    """
    task = Distillation(seed, DEFAULT, data, reading=replace(reading, pool=None)).task()
    source = task.upper_data
    images, labels = source.tensors if isinstance(source, Batches) else source
    learnt = task.problem.x.tensors[0]
    with torch.no_grad():
        learnt.copy_(torch.stack([images[labels == digit].mean(0) for digit in range(len(learnt))]))
    return task.metrics()["accuracy"]


def album(title: str, record: RunRecord) -> Pictures:
    """The learnt pictures, each from its darkest to its brightest value; none where the run was lost before it had any."""
    images, learnt = [], learnt_pictures(record)
    side = round(learnt.shape[1] ** 0.5)
    if not side or side * side != learnt.shape[1]:
        return Pictures(title, (), ())
    for flat in learnt:
        flat = np.nan_to_num(flat)
        low, high = flat.min(), flat.max()
        grey = np.round((flat - low) / (high - low if high > low else 1.0), 3).reshape(side, side)
        images.append(tuple(tuple(row) for row in grey.tolist()))
    return Pictures(title, tuple(images), tuple(str(digit) for digit in range(10)))


def learnt_pictures(record: RunRecord) -> np.ndarray:
    """The ten learnt pictures as rows; rows without numbers where there are no ten of one size."""
    values = record.curve("pictures")
    return values.reshape(10, -1) if len(values) % 10 == 0 else np.empty((10, 0))


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
