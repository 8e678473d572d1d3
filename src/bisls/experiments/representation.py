"""What the figures on hyper-representation have in common."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from itertools import product
from math import inf, isfinite
from typing import Any

import numpy as np

from bisls.directions import Adam, Direction, Steepest
from bisls.experiments.asking import Pair, Tuned, gather, over_seeds, spread
from bisls.experiments.base import Config, Plan, RunRecord
from bisls.experiments.bilevel import DEFAULT, OWN, Representation, constant, describe, shown_restart
from bisls.experiments.drawing import curve, not_above_start
from bisls.experiments.evidence import if_progressed, initial, progressed
from bisls.experiments.judging import alike, at_most, claim, listed, mean, ours, show
from bisls.experiments.method import Method
from bisls.hypergrad import Implicit
from bisls.linear import CG
from bisls.methods import Alternating, BiSLS
from bisls.outcome import Judgement, Panel, Verdict
from bisls.solver import Solver
from bisls.steps import Grow, Restart

METHODS: dict[str, Direction] = {"BiSLS-SGD": Steepest(), "BiSLS-Adam": Adam(search_momentum=False)}
CG10 = Implicit(CG(iters=10))
CONSTANT = {
    "adam": Method(Alternating, hypergrad=CG10),
    "sgd": Method(Alternating, direction=Steepest(), hypergrad=CG10),
}
SPELT = {"adam": "Adam", "sgd": "SGD"}  # as the page has them
ALPHA, BETA = 10.0, 100.0  # alpha_b0 and beta_b0, where the paper's searches begin
ALIKE = 0.25  # final losses are alike where the largest is at most 25 % above the smallest
DIVERGED = 10.0
BETAS = (10.0, 5.0, 1.0, 0.5, 0.1, 0.05, 0.01)
ALPHAS = {"adam": (1e-2, 1e-3, 5e-4, 1e-4, 5e-5, 1e-5), "sgd": (0.1, 0.05, 0.01, 0.005, 0.0025, 0.001)}

Groups = dict[str, list[RunRecord]]
"""Runs by name, one for each seed."""


def representation(plan: Plan, seed: int, method: Method[Solver], **settings: Any) -> Representation:
    """A run at the scale of the plan: 1000 iterations, 200 or 60; the rest as the paper has it."""
    own: dict[str, Any] = {
        "data": plan.pick("digits", "mnist", "mnist"),
        "steps": plan.pick(4, 60, 1000, standard=200),
        "every": plan.pick(2, 5, 20, standard=10),
        "batch": plan.pick(32, 256, 256),
        "lower_iters": plan.pick(2, 10, 10),
        "reading": plan.reading.representation,
    }
    return Representation(seed, method, **{**own, **settings})


def searched(plan: Plan, name: str = "BiSLS-Adam", **settings: Any) -> Method[Solver]:
    """The paper's searches from alpha_b0 = 10 and beta_b0 = 100, reset option 3 with eta = 2 at both levels."""
    own = {"direction": METHODS[name], "hypergrad": CG10, "restart": Grow(2.0), "max_checks": plan.pick(10, 200, 200)}
    return Method(BiSLS.paper, **{"alpha": ALPHA, "beta": BETA, **own, **settings})


def restarting(plan: Plan, name: str, **settings: Any) -> Method[Solver]:
    """The same with reset option 1 below, from 100; from 2 at the scale "smoke"."""
    return searched(plan, name, **{"beta": plan.pick(2.0, BETA, BETA), "lower_restart": Restart(), **settings})


def short(plan: Plan, method: Method[Solver], **settings: Any) -> Representation:
    """A run beside those of `restarting`, whose iterations are expensive: 20 of them, or 50 ("standard")."""
    own: dict[str, Any] = {"steps": plan.pick(2, 20, 1000, standard=50), "every": plan.pick(2, 5, 20)}
    return representation(plan, 0, method, **{**own, **settings})


def tuned(
    plan: Plan, methods: Sequence[str] = ("adam", "sgd"), beside: Mapping[str, Representation] | None = None
) -> Generator[Sequence[Config], Sequence[RunRecord], tuple[dict[str, Tuned], Groups]]:
    """Tune constant steps on seed 0 by the final loss, then run the best pair on all seeds; one that a seed loses is no rival.

    At full scale the paper's grid is run. At the quick one three values of each step, and then the neighbours on the paper's
    grid of the best pair until it is the best of its neighbours.

    Args:
        plan: The scale.
        methods: Names, of `CONSTANT`.
        beside: Other runs, which are asked for at the same time.
    """

    def run(method: str, pair: Pair) -> Representation:
        return representation(plan, 0, constant(CONSTANT[method], *pair))

    others = spread(plan.each_seed, beside or {})
    tried: dict[str, dict[Pair, RunRecord]] = {method: {} for method in methods}
    groups: Groups = {}
    wanted = [(method, pair) for method in methods for pair in first_pairs(plan, method)]
    while wanted or others:
        asked = {(method, pair): [run(method, pair)] for method, pair in wanted}
        found: dict[Any, list[RunRecord]] = yield from gather({**asked, **others})
        for method, pair in wanted:
            (tried[method][pair],) = found[method, pair]
        groups |= {name: found[name] for name in others}
        others = {}
        wanted = [] if plan.scale == "smoke" else [(m, p) for m in methods for p in neighbours(m, tried[m])]
    best: dict[str, Tuned] = {}
    lost: dict[str, list[Pair]] = {method: [] for method in methods}
    while left := [method for method in methods if method not in best]:
        pairs = {m: best_pair({pair: one for pair, one in tried[m].items() if pair not in lost[m]}) for m in left}
        runs = yield from over_seeds(plan.each_seed, {method: run(method, pair) for method, pair in pairs.items()})
        for method, pair in pairs.items():
            first, *further = finals(runs[method])
            if isfinite(first) and not all(map(isfinite, further)) and len(lost[method]) + 1 < len(tried[method]):
                lost[method].append(pair)
            else:
                best[method] = Tuned(pair, tuple(tried[method]), runs[method], tuple(lost[method]))
    return {method: best[method] for method in methods}, groups


def tuned_runs(best: Mapping[str, Tuned]) -> Groups:
    """The runs of tuned methods under names that end in "tuned"."""
    return {f"{SPELT[method]}, tuned": list(one.runs) for method, one in best.items()}


def first_pairs(plan: Plan, method: str) -> list[Pair]:
    """The pairs that tuning begins with."""
    alphas = plan.pick(ALPHAS[method][1:4:2], ALPHAS[method][1::2], ALPHAS[method])
    return list(product(alphas, plan.pick(BETAS[4:5], BETAS[2::2], BETAS)))


def best_pair(grid: Mapping[Pair, RunRecord]) -> Pair:
    """The pair with the lowest final loss; the smallest steps where none is finite."""
    return min(grid, key=lambda pair: (finals([grid[pair]])[0], pair))


def neighbours(method: str, grid: Mapping[Pair, RunRecord]) -> list[Pair]:
    """The pairs next to the best one on the paper's grid that have not been tried."""
    alpha, beta = best_pair(grid)
    i, j = ALPHAS[method].index(alpha), BETAS.index(beta)
    near = [(i - 1, j), (i + 1, j), (i, j - 1), (i, j + 1)]
    inside = [(a, b) for a, b in near if 0 <= a < len(ALPHAS[method]) and 0 <= b < len(BETAS)]
    return [pair for a, b in inside if (pair := (ALPHAS[method][a], BETAS[b])) not in grid]


def finals(records: Sequence[RunRecord], name: str = "loss") -> list[float]:
    """Where the runs ended, one number for each seed; a loss of more than `DIVERGED` times the first counts as infinite."""
    values = [record.last(name) for record in records]
    if name == "loss":
        return [v if v <= DIVERGED * r.first(name) else inf for v, r in zip(values, records, strict=True)]
    return values


def errors(records: Sequence[RunRecord]) -> list[float]:
    """The share of test samples that are wrong at the end; infinite for a run that was lost."""
    return [1 - value if isfinite(value) else inf for value in finals(records, "accuracy")]


def checks(records: Sequence[RunRecord], level: str = "upper") -> list[float]:
    """Checks of the upper search in an iteration, or of the lower search in a lower step."""
    found = []
    for record in records:
        steps = len(record.curves["upper_checks"]) if level == "upper" else np.sum(record.curve("lower_steps"))
        found.append(float(np.sum(record.curve(f"{level}_checks")) / max(1.0, float(steps))))
    return found


def similar(groups: Mapping[str, Sequence[RunRecord]], within: float = ALIKE) -> tuple[Judgement, float]:
    """Whether final losses are alike, and their ratio; undecided where no run got anywhere, for then all are alike in that."""
    ends = {name: finals(runs) for name, runs in groups.items()}
    judgement, ratio = alike(ends, within)
    return (judgement if progressed(initial(*groups.values()), *ends.values()) else Judgement.UNDECIDED), ratio


def learnt(judgement: Judgement, *groups: Sequence[RunRecord]) -> Judgement:
    """What holds of runs of which none got progressed is undecided."""
    return if_progressed(judgement, initial(*groups), *map(finals, groups))


def all_alike(what: str, groups: Mapping[str, Sequence[RunRecord]], told: str = "", within: float = ALIKE) -> Verdict:
    """The claim that final losses are alike."""
    judgement, ratio = similar(groups, within)
    statement = f"{what}: the largest final loss is at most {within:.0%} above the smallest"
    ends = {name: finals(runs) for name, runs in groups.items()}
    return claim(statement, judgement, f"{listed(ends)}; largest / smallest {show(ratio)}", told)


def own_at_most(groups: Mapping[str, Sequence[RunRecord]], own: Sequence[RunRecord]) -> Verdict:
    """Our default ends at or below the best of the others."""
    ends = {name: finals(runs) for name, runs in groups.items()}
    best = min(ends, key=lambda name: mean(ends[name]))
    numbers = f"BiSLS {show(mean(finals(own)))}, best of the others ({best}) {show(mean(ends[best]))}"
    return ours(
        "The default, with nothing set, ends at or below the best of the others",
        learnt(at_most(finals(own), ends[best]), own),
        numbers,
    )


def own_at_most_all(groups: Mapping[str, Mapping[str, Sequence[RunRecord]]], own: Sequence[RunRecord]) -> Verdict:
    """The same for runs by method and variant, as `by_method` gives them."""
    flat = {f"{method}, {name}": one for method, runs in groups.items() for name, one in runs.items()}
    return own_at_most(flat, own)


def by_method(
    plan: Plan, variants: Mapping[str, Mapping[str, Any]]
) -> Generator[Sequence[Config], Sequence[RunRecord], tuple[dict[str, Groups], list[RunRecord], tuple[Panel, ...]]]:
    """Variants of BiSLS-SGD and of BiSLS-Adam with reset option 1 below, and the default.

    Args:
        plan: The scale.
        variants: Settings by name.

    Returns:
        The runs by method and variant, those of the default, and a panel of validation losses for each method.
    """
    wanted = {f"{m} {v}": short(plan, restarting(plan, m, **own)) for m in METHODS for v, own in variants.items()}
    found = yield from over_seeds(plan.each_seed, {**wanted, OWN: short(plan, DEFAULT)})
    groups = {method: {name: found[f"{method} {name}"] for name in variants} for method in METHODS}
    panels = []
    for method, runs in groups.items():
        lines = [curve(name, one, "loss") for name, one in runs.items()]
        lines.append(curve(OWN, found[OWN], "loss", ours=True))
        alt = f"Validation loss of {method} against iterations, one curve for each of {', '.join(runs)}, and of the default"
        cut = not_above_start(lines)
        panels.append(
            Panel(method, "upper iteration", "validation loss", tuple(lines), yscale="log", ylim=cut, alt=alt)
        )
    return groups, found[OWN], tuple(panels)


def describe_restarting(plan: Plan, **names: str) -> dict[str, str]:
    """The settings of the runs of `restarting`."""
    method = restarting(plan, "BiSLS-Adam")
    below = f"reset {shown_restart(method['lower_restart'])} from beta_b0 = {method['beta']:g}"
    searches = {"upper search": f"from alpha_b0 = {method['alpha']:g}", "lower search": below}
    return describe(short(plan, method), **{**searches, **names})
