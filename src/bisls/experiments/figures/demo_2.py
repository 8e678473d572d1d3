"""Figure demo_2: logistic regression on w8a under a ceiling that is far too large."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from bisls.experiments.asking import over_seeds
from bisls.experiments.base import Asking, Figure, Findings, Plan, RunRecord
from bisls.experiments.drawing import dots, limits
from bisls.experiments.evidence import if_progressed, initial
from bisls.experiments.judging import at_most, below, both, claim, listed, mean, ours, show, yes
from bisls.experiments.stochastic import (
    AUTO,
    CEILING,
    METHODS,
    Groups,
    classification,
    curves,
    describe,
    late,
    under,
    wobble,
)
from bisls.outcome import Judgement, Panel, Verdict

STRICT, EPOCHS = "SLS, c = 0.999", 4  # a search of a hundred checks a step, so not all epochs
SWEPT = ("decaying SGD", "SPSB")
OTHERS = ("SPS_max", "SLS", "DecSPS", "decaying SGD")
C = (
    "1 for the Polyak steps, 0.1 for SLS and SLSB. The paper's 1 for SLS can't hold for a convex loss, which no step decreases "
    "as fast as its slope promises; 0.999 stands for it, beside the others, over the first epochs"
)
SHORT = 0.01  # a median step below this share of another is no step worth having
ERRATIC = 2.0  # so many times as erratic counts as erratic
Sweep = Mapping[str, Sequence[Sequence[RunRecord]]]


def ask(plan: Plan) -> Asking:
    """Two methods over ceilings, all methods under the ceiling 1000, Auto without one."""
    gammas = plan.pick(
        (1.0, CEILING), (1.0, 10.0, 100.0, CEILING, 1e4), (1.0, 3.0, 10.0, 30.0, 100.0, 300.0, CEILING, 3e3, 1e4)
    )
    methods = {(name, CEILING): method for name, method in under(CEILING, *METHODS).items()}
    methods |= {(name, gamma): method for gamma in gammas for name, method in under(gamma, *SWEPT).items()}
    wanted = {key: classification(plan, 0, method) for key, method in methods.items()}
    first, strict = wanted["SPSB", CEILING], methods["SLS", CEILING].but(c=0.999)
    wanted[STRICT, CEILING] = classification(plan, 0, strict, epochs=min(EPOCHS, first.epochs))
    found = yield from over_seeds(plan.each_seed, wanted)
    groups = {name: found[name, CEILING] for name in (*METHODS, STRICT)}
    sweep = {name: [found[name, gamma] for gamma in gammas] for name in SWEPT}
    ceilings = f"(a) gamma_b0 = {', '.join(f'{g:g}' for g in gammas)}; (b, c) gamma_b0 = {CEILING:g}"
    settings = describe(first, ceilings=ceilings, c=C)
    return Findings(panels(groups, sweep, gammas), judge(groups, sweep), settings)


def panels(groups: Groups, sweep: Sweep, gammas: Sequence[float]) -> tuple[Panel, ...]:
    """(a), (b), (c)."""
    lines = [dots(name, gammas, [lowest(runs) for runs in row]) for name, row in sweep.items()]
    lines.append(dots(AUTO, gammas, [lowest(groups[AUTO])] * len(gammas), ours=True))
    losses = curves(groups, "loss")
    alt = "The lowest train loss of decaying SGD and SPSB for several ceilings; Auto, which has none, is level."
    return (
        Panel("(a) Lowest train loss", "gamma_b0", "train loss", tuple(lines), "log", "log", alt=alt),
        Panel(
            "(b) Train loss", "iteration", "train loss", losses, yscale="log", ylim=limits(losses, 2.0),
            alt=f"Train loss against iterations, all methods under the ceiling {CEILING:g}.",
        ),
        Panel(
            "(c) Step size", "iteration", "gamma", curves(groups, "step", "step_k"), "log", "log",
            alt=f"Step sizes against iterations, all methods under the ceiling {CEILING:g}.",
        ),
    )  # fmt: skip


def lowest(runs: Sequence[RunRecord]) -> list[float]:
    """The lowest loss of each run; infinite where the run was lost."""
    return [float("inf") if run.error else min(run.curves["loss"], default=float("inf")) for run in runs]


def ahead(runs: Sequence[RunRecord], others: Sequence[RunRecord]) -> float:
    """At which share of the evaluations the loss of a run is below that of another, on average over seeds."""
    shares = [
        np.mean([a < b for a, b in zip(*(r.curves["loss"] for r in pair), strict=False)] or [np.nan])
        for pair in zip(runs, others, strict=True)
    ]
    return float(np.mean(shares))


def shortened(run: RunRecord, other: RunRecord) -> float:
    """The median step of a run over that of another, over the iterations that both have; not a number where they have none."""
    both = [list(zip(r.curves["step_k"], r.curves["step"], strict=False)) for r in (run, other)]
    last = min((steps[-1][0] if steps else float("-inf") for steps in both), default=float("-inf"))
    mine, theirs = ([step for k, step in steps if k <= last] for steps in both)
    return float(np.median(mine) / np.median(theirs)) if mine and theirs and np.median(theirs) else float("nan")


def judge(groups: Groups, sweep: Sweep) -> tuple[Verdict, ...]:
    """Spread over ceilings, order at the end, unrest late, DecSPS's ceiling, the paper's c, and Auto."""
    spreads = {
        name: [max(each) / min(each) if min(each) else float("inf") for each in zip(*map(lowest, row), strict=True)]
        for name, row in sweep.items()
    }
    first = initial(*groups.values())
    ends = {name: [late(run) for run in groups[name]] for name in METHODS}
    unrest = {name: [wobble(run) for run in groups[name]] for name in (*OTHERS, "SPSB", "SLSB")}
    calm = {name: [ERRATIC * value for value in unrest[name]] for name in ("SPSB", "SLSB")}
    erratic = [
        if_progressed(below(calm[steady], unrest[name]), first, ends[steady])
        for name in ("SPS_max", "SLS")
        for steady in calm
    ]
    best = [if_progressed(at_most(ends[name], ends[other]), first, ends[name]) for name in calm for other in OTHERS]
    most = max(run.numbers["most"] for run in groups["DecSPS"])
    least = min(run.numbers["least"] for run in groups["DecSPS"])
    paper = {name: ends[name] for name in METHODS if name != AUTO}
    leader = min(paper, key=lambda name: mean(paper[name]))
    strict = [shortened(run, other) for run, other in zip(groups[STRICT], groups["SLS"], strict=True)]
    numbers = f"ends: {listed(ends)}"
    return (
        claim(
            "(a) Over the ceilings, the lowest train loss of SPSB spreads less than that of decaying SGD (largest / smallest)",
            if_progressed(below(spreads["SPSB"], spreads["decaying SGD"]), first, *map(lowest, sweep["SPSB"])),
            listed(spreads),
            "SPSB is far more robust to gamma_b0",
        ),
        claim(
            f"(b) SPSB and SLSB end at or below {', '.join(OTHERS)}",
            both(*best),
            numbers,
            "SPSB is fast and stays regular; SLSB alike",
        ),
        claim(
            "(b) DecSPS ends above SPS_max",
            if_progressed(below(ends["SPS_max"], ends["DecSPS"]), first, ends["SPS_max"]),
            f"{numbers}; lowest {listed({name: lowest(groups[name]) for name in ('SPS_max', 'DecSPS')})}; SPS_max is lower at "
            f"{ahead(groups['SPS_max'], groups['DecSPS']):.0%} of the evaluations",
            "DecSPS does worse than SPS_max",
        ),
        claim(
            f"(b) Late, SPS_max and SLS are at least {ERRATIC:g} times as erratic as SPSB and SLSB (mean |change of log loss| "
            "between evaluations, last half)",
            both(*erratic),
            listed(unrest),
            "SPS_max becomes unstable near a solution",
        ),
        claim(
            "(c) The step of DecSPS is at or below gamma_b0 / sqrt(k + 1), always (so by construction: a check of the code)",
            yes(most <= 1 + 1e-6),
            f"between {show(least)} and {show(most)} of it",
            "like decaying SGD's, or much smaller",
        ),
        claim(
            f"SLS with c = 0.999, in place of the paper's 1, hardly moves: its median step is below {SHORT} of that with c = 0.1",
            yes(max(strict) < SHORT) if np.isfinite(strict).all() else Judgement.UNDECIDED,
            f"{listed({'share': strict})}; lowest loss {listed({STRICT: lowest(groups[STRICT]), 'SLS': lowest(groups['SLS'])})}",
            "c = 1",
        ),
        ours(
            f"Auto, with no ceiling to set, ends at or below the best of the others ({leader})",
            if_progressed(at_most(ends[AUTO], paper[leader]), first, ends[AUTO]),
            numbers,
        ),
    )


FIGURE = Figure(
    name="demo_2",
    title="Logistic regression under a ceiling that is far too large",
    paper="On w8a, which no linear model fits, SPSB is far less sensitive to the ceiling than decaying SGD; SPSB and SLSB do "
    "best, SPS_max and SLS turn unstable, and DecSPS, whose step is at most that of decaying SGD, is slower than SPS_max.",
    ask=ask,
    data=("w8a",),
)
