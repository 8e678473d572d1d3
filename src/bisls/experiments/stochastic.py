"""What the single-level figures have in common."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import exp, isfinite, log
from statistics import fmean
from typing import Any

import numpy as np

from bisls import optim
from bisls.experiments.base import Plan, RunRecord
from bisls.experiments.drawing import curve
from bisls.experiments.judging import show
from bisls.experiments.method import Method
from bisls.experiments.single import SLS, SLSB, DecayingSGD, SingleRun
from bisls.optim import LineOptimizer
from bisls.outcome import Judgement, Series

AUTO = "Auto, nothing set"
CEILING = 1000.0  # gamma_b0 of the paper's figures on w8a
METHODS: dict[str, Method[LineOptimizer]] = {
    "SPS_max": Method(optim.SPSMax),
    "SLS": SLS,
    "DecSPS": Method(optim.DecSPS),
    "SPSB": Method(optim.SPSB),
    "SLSB": SLSB,
    "decaying SGD": Method(DecayingSGD),
    AUTO: Method(optim.Auto),
}

Groups = Mapping[str, Sequence[RunRecord]]


def classification(plan: Plan, seed: int, method: Method[LineOptimizer], **settings: Any) -> SingleRun:
    """Logistic regression at the scale of the plan: w8a, 35 epochs, batches of 100; a few steps of a small set for "smoke"."""
    own: dict[str, Any] = {
        "problem": plan.pick("breast_cancer", "w8a", "w8a"),
        "epochs": plan.pick(3, 35, 35),
        "batch": plan.pick(20, 100, 100),
        "every": plan.pick(5, 50, 50),
    }
    return SingleRun(seed, method, **{**own, **settings})


def under(ceiling: float, *names: str) -> dict[str, Method[LineOptimizer]]:
    """Methods by name, under a ceiling; Auto has none. "..., two samples" is the same method."""
    found = {name: METHODS[name.removesuffix(", two samples")] for name in names}
    return {name: method if name == AUTO else method.but(lr=ceiling) for name, method in found.items()}


def describe(config: SingleRun, **names: Any) -> dict[str, str]:
    """What the page says of the settings of a figure on logistic regression."""
    shown = {
        "task": f"logistic regression on {config.problem}, no bias, no penalty, from zero; batches of {config.batch}",
        "iterations": f"K = {config.iterations:,} ({config.epochs} epochs)",
        "train loss": f"on all rows, every {config.every} iterations; where a run ends is the mean over the last tenth of these",
        "searches": "SLS and SLSB begin every search at the ceiling and shorten by w = 0.9",
    }
    return shown | {name: str(value) for name, value in names.items()}


def late(record: RunRecord, name: str = "loss") -> float:
    """The mean over the last tenth of a curve; infinite where the run was lost."""
    return _mean(record, record.curve(name), 0.9, 1.0)


def early(record: RunRecord, name: str = "distance") -> float:
    """The mean over the first twentieth of a curve."""
    return _mean(record, record.curve(name), 0.0, 0.05)


def settling(record: RunRecord, name: str = "distance") -> float:
    """Where a curve is in its last tenth, as a share of where it was in its second tenth."""
    values = record.curve(name)
    now, before = _mean(record, values, 0.9, 1.0), _mean(record, values, 0.1, 0.2)
    return now / before if before else float("nan")


def _mean(record: RunRecord, values: np.ndarray, start: float, end: float) -> float:
    last = len(values)
    if record.error or not last:
        return float("inf")
    begin = min(int(start * last), last - 1)
    part = values[begin : max(begin + 1, int(end * last))]
    return float(part.mean()) if np.isfinite(part).all() else float("inf")


def wobble(record: RunRecord, name: str = "loss") -> float:
    """How erratic a curve is late: the mean absolute change of its logarithm between neighbours over the last half."""
    values = record.curve(name)[len(record.curves[name]) // 2 :]
    if record.error or not len(values) or not (np.isfinite(values).all() and (values > 0).all()):
        return float("inf")
    return float(np.abs(np.diff(np.log(values))).mean()) if len(values) > 1 else 0.0


def paired(
    rule: Callable[[Sequence[float], Sequence[float]], Judgement], one: Sequence[float], two: Sequence[float]
) -> tuple[Judgement, float]:
    """`below` or `at_most` where each seed is a problem of its own: by the ratio on each. Also its geometric mean."""
    if len(one) < 2 or not all(isfinite(v) and v > 0 for v in (*one, *two)):
        return rule(one, two), geometric(one) / geometric(two)
    ratios = [log(a / b) for a, b in zip(one, two, strict=True)]
    return rule(ratios, [0.0] * len(ratios)), exp(fmean(ratios))


def geometric(values: Sequence[float]) -> float:
    """The geometric mean; infinite where one of them is."""
    return exp(fmean([log(v) for v in values])) if all(isfinite(v) and v > 0 for v in values) else float("inf")


def listed_geometric(groups: Mapping[str, Sequence[float]]) -> str:
    """Geometric means by name, as the page shows them."""
    return ", ".join(f"{name} {show(geometric(values))}" for name, values in groups.items())


def curves(groups: Groups, y: str, x: str = "k", **options: Any) -> tuple[Series, ...]:
    """One curve for each method; Auto is marked as ours."""
    return tuple(curve(name, runs, y, x, ours=name == AUTO, **options) for name, runs in groups.items())
