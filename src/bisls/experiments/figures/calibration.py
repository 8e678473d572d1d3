"""Calibration: which reading of the two tasks gives the settings that the paper itself reports.

Nothing here compares methods. What is looked at are step sizes that tuning finds, fixed steps that work or do not, and counts of
checks; each is written in the paper as a number. The reading that meets most of them is the one that the figures run as the
paper's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from math import isfinite, log10
from typing import Any

from bisls.experiments.asking import Pair, gather
from bisls.experiments.base import Asking, Config, Figure, Findings, Plan, RunRecord
from bisls.experiments.bilevel import Distillation, Representation, constant
from bisls.experiments.distillation import IDENTITY, NEUMANN, at_fixed, decaying, polyak
from bisls.experiments.evidence import DECIDES, polyak_share
from bisls.experiments.figures.sample_hyper import LOWER as TEN
from bisls.experiments.figures.sample_hyper import methods
from bisls.experiments.judging import mean, ours, show, yes
from bisls.experiments.readings import DISTILLING, READINGS, REPRESENTING, Distilling, Representing
from bisls.experiments.representation import BETA, CONSTANT, METHODS, best_pair, checks, finals, searched
from bisls.outcome import Panel, Series, Table, Verdict
from bisls.steps import Grow, Keep, Restart

FALLS = 0.8  # a run has converged where it ends at or below 80 % of where it began, as in figure demo_1
ORDER = 0.5  # of the same order of magnitude: within half of one
COUNTS = {  # checks of the upper search an iteration
    "option 1": {"BiSLS-SGD": 89.0, "BiSLS-Adam": 115.0},
    "eta = 2": {"BiSLS-SGD": 9.0, "BiSLS-Adam": 9.0},
    "eta = 1": {"BiSLS-SGD": 4.0, "BiSLS-Adam": 4.0},
}
RESETS = {"option 1": Restart(), "eta = 2": Grow(2.0), "eta = 1": Keep()}
NAMED = (10.0, 50.0)  # the values of alpha_b0 on distillation that the paper names
LINEAR = {"identity": IDENTITY, "Neumann": NEUMANN}

Runs = Mapping[str, Sequence[RunRecord]]


@dataclass(frozen=True)
class Item:
    """One thing that the paper reports, and what a reading gives.

    Attributes:
        told: What the paper reports.
        seen: What was seen, as text.
        met: Whether it agrees.
    """

    told: str
    seen: str
    met: bool


def ask(plan: Plan) -> Asking:
    """The same runs under every reading of either task; the reading of the plan is not looked at."""
    wanted: dict[tuple[str, str, str], list[Config]] = {}
    for name, reading in representing(plan).items():
        wanted |= {("r", name, run): own for run, own in representation_runs(plan, reading).items()}
    for name, how in distilling(plan).items():
        wanted |= {("d", name, run): own for run, own in distillation_runs(plan, how).items()}
    found = yield from gather(wanted)

    def runs(kind: str, name: str) -> dict[str, list[RunRecord]]:
        return {run: own for (task, reading, run), own in found.items() if (task, reading) == (kind, name)}

    above = {name: judge_representation(runs("r", name), pairs(plan)) for name in representing(plan)}
    below = {name: judge_distillation(runs("d", name)) for name in distilling(plan)}
    tables = (table("Hyper-representation", above), table("Data distillation", below))
    told = {f"hyper-representation, {name}": str(one) for name, one in representing(plan).items()}
    told |= {f"distillation, {name}": str(one) for name, one in distilling(plan).items()}
    steps = next(iter(wanted.values()))[0]
    assert isinstance(steps, Representation)
    settings = {
        "rule": f"one point for each line that is met; steps and counts within half an order and a factor of two, a run has "
        f"converged where it ends at or below {FALLS:.0%} of where it began",
        "iterations": f"hyper-representation K = {steps.steps} ({short(plan)} where checks are counted)",
        **told,
    }
    verdicts = (
        chosen("hyper-representation", above, "representation"),
        chosen("data distillation", below, "distillation"),
    )
    return Findings((panel(above, below),), verdicts, settings, tables=tables)


def representing(plan: Plan) -> Mapping[str, Representing]:
    """The readings of hyper-representation; two of them at the scale "smoke"."""
    return REPRESENTING if plan.scale != "smoke" else {n: REPRESENTING[n] for n in ("least squares", "referenced")}


def distilling(plan: Plan) -> Mapping[str, Distilling]:
    """The readings of distillation; two of them at the scale "smoke"."""
    return DISTILLING if plan.scale != "smoke" else {name: DISTILLING[name] for name in ("raw", "referenced")}


def pairs(plan: Plan) -> list[Pair]:
    """The grid for constant Adam: one value for each order of magnitude of the paper's."""
    alphas, betas = (1e-3, 1e-4, 1e-5), (10.0, 1.0, 0.1)
    return list(product(plan.pick((1e-4,), alphas, alphas), plan.pick((1.0, 0.1), betas, betas)))


def short(plan: Plan) -> int:
    """Iterations of the runs that count checks."""
    return plan.pick(2, 20, 100)


def representation_runs(plan: Plan, reading: Representing) -> dict[str, list[Config]]:
    """Those of one reading of hyper-representation, by name, one for each seed."""
    common: dict[str, Any] = {
        "data": plan.pick("digits", "mnist", "mnist"), "steps": plan.pick(4, 60, 200), "every": plan.pick(2, 10, 20),
        "batch": plan.pick(32, 256, 256), "lower_iters": plan.pick(2, 10, 10), "reading": reading,
    }  # fmt: skip
    counted = {**common, "steps": short(plan), "every": short(plan)}
    made = {f"Adam {pair}": (constant(CONSTANT["adam"], *pair), common) for pair in pairs(plan)}
    made |= {
        f"SGD {pair}": (constant(CONSTANT["sgd"], *pair), common)
        for pair in ((0.005, 0.01), (0.005, 10.0), (0.1, 0.01))
    }
    made |= {name: (method, common) for name, method in methods(0.1, TEN).items()}
    for reset, restart in RESETS.items():
        for method in METHODS:
            own = searched(plan, method, restart=restart, lower_restart=Restart(), beta=plan.pick(2.0, BETA, BETA))
            made[f"{method}, {reset}"] = own, counted
    return {name: [Representation(seed, m, **own) for seed in plan.each_seed] for name, (m, own) in made.items()}


def distillation_runs(plan: Plan, reading: Distilling) -> dict[str, list[Config]]:
    """Those of one reading of distillation: BiSPS and decaying SGD with the lower step that the paper fixes."""
    common: dict[str, Any] = {
        "data": plan.pick("digits", "mnist", "mnist"), "steps": plan.pick(6, 500, 3000), "every": plan.pick(3, 100, 100),
        "batch": 10, "lower_iters": plan.pick(4, 20, 20), "reading": reading,
    }  # fmt: skip
    made = {
        f"{name}, {alpha:g}, {linear}": method(alpha, hypergrad=hypergrad)
        for linear, hypergrad in LINEAR.items()
        for name, method in {"BiSPS": polyak, "decaying SGD": decaying}.items()
        for alpha in NAMED
    }
    return {
        name: [Distillation(seed, at_fixed(method, reading), **common) for seed in plan.each_seed]
        for name, method in made.items()
    }


def judge_representation(runs: Runs, tried: Sequence[Pair]) -> list[Item]:
    """What the paper reports of hyper-representation, line by line."""
    alpha, beta = best_pair({pair: runs[f"Adam {pair}"][0] for pair in tried})
    small, wide, long = (runs[f"SGD {pair}"] for pair in ((0.005, 0.01), (0.005, 10.0), (0.1, 0.01)))
    lost = not isfinite(mean(finals(runs[f"Adam {(alpha, beta)}"])))
    items = [
        Item("tuned Adam: beta of order 1", "none converges" if lost else f"{beta:g}", not lost and near(beta, 1.0)),
        Item(
            "tuned Adam: alpha of order 1e-4",
            "none converges" if lost else f"{alpha:g}",
            not lost and near(alpha, 1e-4),
        ),
        Item("SGD, alpha = 0.005, beta = 0.01 converges", ended(small), converged(small)),
        Item("the largest beta of its grid, 10, does not", ended(wide), not converged(wide)),
        Item("the largest alpha of its grid, 0.1, does not", ended(long), not converged(long)),
    ]
    for name in ("BiSPS, one sample", "BiSPS, two samples", "decaying SGD"):
        items.append(
            Item(f"{name}, beta = {TEN:g}, alpha_b0 = 0.1 converges", ended(runs[name]), converged(runs[name]))
        )
    for reset, by_method in COUNTS.items():
        for method, told in by_method.items():
            seen = mean(checks(runs[f"{method}, {reset}"]))
            items.append(Item(f"{method}, {reset}: {told:g} checks", f"{seen:.3g}", told / 2 <= seen <= 2 * told))
    seen = mean([mean(checks(runs[f"{method}, option 1"], "lower")) for method in METHODS])
    return [*items, Item("option 1 below: about 1 check", f"{seen:.3g} a lower step", seen <= 2)]


def judge_distillation(runs: Runs) -> list[Item]:
    """What the paper reports of distillation: the fixed lower step works, and two methods that it tells apart are two."""
    items = [
        Item(f"{name}: converges with the lower step 1e-4", ended(own), converged(own)) for name, own in runs.items()
    ]
    for name, own in runs.items():
        if name.startswith("BiSPS"):
            share = polyak_share(own)
            items.append(Item(f"{name}: is not decaying SGD", f"Polyak decides in {share:.0%}", share >= DECIDES))
    return items


def near(seen: float, told: float) -> bool:
    """Whether two numbers are of one order of magnitude.

    Examples:
        >>> near(3.0, 1.0), near(0.1, 1.0)
        (True, False)
    """
    return abs(log10(seen / told)) <= ORDER


def converged(runs: Sequence[RunRecord]) -> bool:
    """Whether the runs end far enough below where they began."""
    return mean(finals(runs)) <= FALLS * mean([run.first("loss") for run in runs])


def ended(runs: Sequence[RunRecord]) -> str:
    """Where runs began and ended."""
    return f"{show(mean([run.first('loss') for run in runs]))} to {show(mean(finals(runs)))}"


def table(title: str, items: Mapping[str, Sequence[Item]]) -> Table:
    """What the paper reports, one column for each reading, and how many lines each meets."""
    lines = next(iter(items.values()))
    rows = [
        (line.told, *(f"{'✓' if own[i].met else '✗'} {own[i].seen}" for own in items.values()))
        for i, line in enumerate(lines)
    ]
    rows.append((f"met of {len(lines)}", *(str(score(own)) for own in items.values())))
    return Table(title, ("the paper reports", *items), tuple(rows))


def score(items: Sequence[Item]) -> int:
    """How many are met."""
    return sum(item.met for item in items)


def panel(above: Mapping[str, Sequence[Item]], below: Mapping[str, Sequence[Item]]) -> Panel:
    """The scores as shares."""
    both = {"hyper-representation": above, "distillation": below}
    series = [
        Series(task, tuple(own), tuple(score(items) / len(items) for items in own.values()), points=True)
        for task, own in both.items()
    ]
    alt = "The share of the reported settings that each reading of either task gives"
    return Panel("Reported settings met", "reading", "share", tuple(series), bars=True, alt=alt)


def chosen(task: str, items: Mapping[str, Sequence[Item]], part: str) -> Verdict:
    """Whether the reading that the figures run as the paper's is the one that meets most."""
    own = getattr(READINGS["paper"], part)
    name = next((n for n, one in (REPRESENTING | DISTILLING).items() if one == own and n in items), "")
    scores = {reading: score(lines) for reading, lines in items.items()}
    shown = ", ".join(f"{reading} {points}" for reading, points in scores.items())
    return ours(
        f"The reading of {task} that is run as the paper's meets as many of the reported settings as any",
        yes(bool(name) and scores[name] == max(scores.values())),
        f"of {len(next(iter(items.values())))}: {shown}; run as the paper's: {name or 'none of these'}",
    )


FIGURE = Figure(
    name="calibration",
    title="Which reading of the tasks gives the settings that the paper reports",
    paper="Settings alone: tuned steps, fixed steps that work, counts of checks. No claim that one method is better than another "
    "enters.",
    ask=ask,
    data=("mnist",),
)
