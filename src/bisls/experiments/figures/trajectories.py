"""Figure trajS: paths on the quadratics from several starts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import hypot, isfinite

from bisls.experiments.asking import over_seeds
from bisls.experiments.base import Asking, Figure, Findings, Plan, RunRecord
from bisls.experiments.judging import below, claim, ours, show, yes
from bisls.experiments.single import AWAY, Quadratics, SingleRun
from bisls.experiments.stochastic import AUTO, geometric, late, listed_geometric, paired, under
from bisls.outcome import Panel, Series, Verdict

METHODS = {"SPSB": 1, "SPSB, two samples": 2, "SPS_max": 1, "DecSPS": 1, AUTO: 1}  # and how many samples
GAMMA = 1.0
NEAR = 0.1  # who ends within this share of the distance of x_1* and x_2* has reached the optimum
POINTS = 250  # of a path that are drawn, ever further apart

Ends = Mapping[str, Sequence[Sequence[float]]]
"""By method and problem: the distance at the end from each start, as a share of the distance of the two samples' solutions."""


def ask(plan: Plan) -> Asking:
    """A problem for each seed, starts all around its optimum."""
    starts = plan.pick(2, 5, 8)
    steps = plan.pick(40, 2000, 10_000)
    wanted = {
        (name, i): SingleRun(
            0, method, samples=METHODS[name], steps=steps, start=i / starts, every=plan.pick(1, 1, 5)
        )
        for name, method in under(GAMMA, *METHODS).items() for i in range(starts)
    }  # fmt: skip
    found = yield from over_seeds(plan.each_seed, wanted)
    drawn = []
    for name in METHODS:
        lines = [path(f"start {i + 1}", found[name, i][0], name == AUTO) for i in range(starts)]
        lines.append(Series("optimum", (0.0,), (0.0,), points=True, dashed=True))
        alt = f"Paths of {name} in the plane from {starts} starts; the optimum is at the origin."
        drawn.append(Panel(name, "x1 - x1*", "x2 - x2*", tuple(lines), equal=True, alt=alt))
    scale = [apart(seed) for seed in plan.each_seed]
    ends = {
        name: [[late(found[name, i][seed], "distance") / scale[seed] for i in range(starts)] for seed in plan.each_seed]
        for name in METHODS
    }
    settings = {
        "task": f"the quadratics of seeds 0 to {plan.seeds - 1}, {starts} starts around each optimum at a distance of {AWAY:g}; "
        "batch 1; the paths are those of seed 0",
        "iterations": f"K = {steps}",
        "ceilings": f"gamma_b0 = {GAMMA:g} (the paper does not say); c = 1",
        "distance": "mean over the last tenth of the iterations, as a share of ||x_1* - x_2*|| = "
        + ", ".join(f"{value:.3g}" for value in scale),
    }
    return Findings(tuple(drawn), judge(ends), settings, seen=remarks(ends))


def apart(seed: int) -> float:
    """The distance of the two samples' solutions."""
    one, two = Quadratics(seed).centres
    return hypot(*(one - two).tolist())


def path(label: str, run: RunRecord, ours: bool) -> Series:
    """A path; late iterations, which lie close together, are drawn ever more sparsely."""
    length = min(len(run.curves["x1"]), len(run.curves["x2"]))
    if not length:
        return Series(label, (), (), ours=ours)
    kept = sorted({min(length - 1, round(length ** (i / POINTS)) - 1) for i in range(POINTS + 1)})
    x1, x2 = run.curves["x1"], run.curves["x2"]
    return Series(label, tuple(x1[i] for i in kept), tuple(x2[i] for i in kept), ours=ours)


def judge(ends: Ends) -> tuple[Verdict, ...]:
    """From every start, the end is near the optimum; that of SPS_max is farther off than that of SPSB.

    The starts of one problem see its samples in the same order and mostly end together, so that each problem counts once.
    """
    furthest = {name: max(value for problem in by for value in problem) for name, by in ends.items()}
    numbers = "furthest end: " + ", ".join(f"{name} {show(value)}" for name, value in furthest.items())
    reach = f"reaches the optimum from every start: it ends within {NEAR} of the distance of the two samples' solutions"
    verdicts = [
        claim(f"{name} {reach}", yes(furthest[name] <= NEAR), numbers, "converges to the optimum from each start")
        for name in ("SPSB", "SPSB, two samples")
    ]
    means = {name: [geometric(problem) for problem in ends[name]] for name in ("SPSB", "SPS_max")}
    judged, ratio = paired(below, means["SPSB"], means["SPS_max"])
    farther = sum(
        a < b for one, two in zip(ends["SPSB"], ends["SPS_max"], strict=True) for a, b in zip(one, two, strict=True)
    )
    shown = (
        f"mean over starts and problems: {listed_geometric(means)}, SPSB / SPS_max {show(ratio)}; SPS_max is farther from "
        f"{farther} of {sum(map(len, ends['SPSB']))} starts"
    )
    verdicts.append(
        claim(
            "SPS_max ends farther from the optimum than SPSB (the mean over starts, problem by problem)",
            judged,
            shown,
            "SPS_max is unstable",
        )
    )
    return (*verdicts, ours(f"Auto {reach}", yes(furthest[AUTO] <= NEAR), numbers))


def remarks(ends: Ends) -> str:
    """How far the starts matter."""
    ratios = [max(problem) / min(problem) for problem in ends["SPSB"] if min(problem) > 0]
    if not ratios or not isfinite(max(ratios)):
        return ""
    return (
        f"All starts of a problem see its samples in the same order; for SPSB the farthest end of a problem is {max(ratios):.3g} "
        "times the nearest one at most. So each problem counts once, not each start."
    )


FIGURE = Figure(
    name="trajectories",
    title="Paths on the quadratics from several starts",
    paper="SPSB, whether the step comes from the gradient's own sample or from another one, goes to the optimum from any start.",
    ask=ask,
)
