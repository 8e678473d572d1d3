"""Figure trajS: paths on the quadratics from several starts."""

from __future__ import annotations

from math import hypot

from bisls.experiments.base import Asking, Figure, Findings, Plan, RunRecord
from bisls.experiments.judging import claim, ours, show, yes
from bisls.experiments.single import AWAY, Quadratics, SingleRun
from bisls.experiments.stochastic import AUTO, Groups, grouped, late
from bisls.outcome import Panel, Series, Verdict

METHODS = {
    "SPSB": ("spsb", 1),
    "SPSB, two samples": ("spsb", 2),
    "SPS_max": ("sps_max", 1),
    "DecSPS": ("decsps", 1),
    AUTO: ("auto", 1),
}
GAMMA, PROBLEM = 1.0, 0
NEAR = 0.1  # who ends within this share of the distance of x_1* and x_2* has reached the optimum
POINTS = 250  # of a path that are drawn, ever further apart


def ask(plan: Plan) -> Asking:
    """One problem, starts all around its optimum."""
    starts = plan.pick(2, 5, 8)
    steps = plan.pick(40, 2000, 10_000)
    configs = [
        SingleRun(
            PROBLEM, problem="quadratics", method=method, gamma=None if method == "auto" else GAMMA, samples=samples,
            steps=steps, start=i / starts, every=plan.pick(1, 1, 5),
        )
        for method, samples in METHODS.values() for i in range(starts)
    ]  # fmt: skip
    groups = grouped(tuple(METHODS), (yield configs), starts)
    task = Quadratics(PROBLEM)
    apart = hypot(*(task.centres[0] - task.centres[1]).tolist())
    drawn = []
    for name, runs in groups.items():
        lines = [path(f"start {i + 1}", run, name == AUTO) for i, run in enumerate(runs)]
        lines.append(Series("optimum", (0.0,), (0.0,), points=True))
        alt = f"Paths of {name} in the plane from {starts} starts; the optimum is at the origin."
        drawn.append(Panel(name, "x1 - x1*", "x2 - x2*", tuple(lines), equal=True, alt=alt))
    settings = {
        "task": f"the quadratics of seed {PROBLEM}, {starts} starts around the optimum at a distance of {AWAY:g}; batch 1",
        "iterations": f"K = {steps}",
        "ceilings": f"gamma_b0 = {GAMMA:g} (the paper does not say); c = 1",
        "distance": f"mean over the last tenth of the iterations, as a share of ||x_1* - x_2*|| = {apart:.3g}",
    }
    return Findings(tuple(drawn), judge(groups, apart), settings)


def path(label: str, run: RunRecord, ours: bool) -> Series:
    """A path; late iterations, which lie close together, are drawn ever more sparsely."""
    length = len(run.curves["x1"])
    kept = sorted({min(length - 1, round(length ** (i / POINTS)) - 1) for i in range(POINTS + 1)})
    x1, x2 = run.curves["x1"], run.curves["x2"]
    return Series(label, tuple(x1[i] for i in kept), tuple(x2[i] for i in kept), ours=ours)


def judge(groups: Groups, apart: float) -> tuple[Verdict, ...]:
    """From every start, the end is near the optimum."""
    ends = {name: [late(run, "distance") / apart for run in runs] for name, runs in groups.items()}
    furthest = {name: max(values) for name, values in ends.items()}
    numbers = "furthest end: " + ", ".join(f"{name} {show(value)}" for name, value in furthest.items())
    reach = f"reaches the optimum from every start: it ends within {NEAR} of the distance of the two samples' solutions"
    verdicts = [
        claim(f"{name} {reach}", yes(furthest[name] <= NEAR), numbers) for name in ("SPSB", "SPSB, two samples")
    ]
    missed = sum(value > NEAR for value in ends["SPS_max"])
    text = "SPS_max does not: from at least half of the starts it ends farther off"
    found = f"{missed} of {len(ends['SPS_max'])} starts; {numbers}"
    verdicts.append(claim(text, yes(missed >= 0.5 * len(ends["SPS_max"])), found))
    return (*verdicts, ours(f"Auto {reach}", yes(furthest[AUTO] <= NEAR), numbers))


FIGURE = Figure(
    name="trajectories",
    title="Paths on the quadratics from several starts",
    paper="SPSB, whether the step comes from the gradient's own sample or from another one, goes to the optimum from any start.",
    ask=ask,
)
