"""Figure Quadratics: two quadratics in the plane that no point fits both of."""

from __future__ import annotations

from dataclasses import replace
from math import hypot, log, nan
from typing import Any

from bisls import optim
from bisls.experiments.asking import over_seeds
from bisls.experiments.base import Asking, Figure, Findings, Plan, RunRecord
from bisls.experiments.drawing import limits
from bisls.experiments.evidence import if_progressed, initial
from bisls.experiments.judging import at_most, below, both, claim, ours, show
from bisls.experiments.method import Method
from bisls.experiments.single import AWAY, SingleRun
from bisls.experiments.stochastic import (
    AUTO,
    Groups,
    curves,
    early,
    geometric,
    late,
    listed_geometric,
    paired,
    settling,
    under,
)
from bisls.outcome import Panel, Series, Verdict

METHODS = {"SPS_max": 1, "DecSPS": 1, "SPSB": 1, "SPSB, two samples": 2, "decaying SGD": 1}  # and how many samples
SETTLED = 0.8  # who ends above this share of an early distance has not settled
TOLD = {  # of ends the text says nothing: SPSB converges fast, SPS_max is unstable
    "DecSPS": "its steps may be smaller than decaying SGD's; who ends nearer is not said",
    "SPS_max": "SPS_max is unstable",
}
PROBLEMS = 240  # the log of a ratio of ends has an s.d. of 1.05 over problems: these leave an s.e. of 0.07
PATHS = 300  # points of a path that are drawn


def ask(plan: Plan) -> Asking:
    """Every method under every ceiling, and Auto, on a few random problems."""
    gammas = plan.pick((1.0,), (1.0, 10.0), (1.0, 10.0))
    problems = range(max(plan.seeds, plan.pick(1, 5, PROBLEMS, standard=PROBLEMS)))
    steps = plan.pick(40, 1000, 5000)
    common: dict[str, Any] = {"problem": "quadratics", "steps": steps, "every": plan.pick(1, 1, 5)}
    wanted = {
        f"{name} {gamma:g}": SingleRun(0, method, samples=METHODS[name], **common)
        for gamma in gammas
        for name, method in under(gamma, *METHODS).items()
    }
    wanted[AUTO] = SingleRun(0, Method(optim.Auto), **common)
    groups = yield from over_seeds(problems, wanted)
    settings = {
        "task": f"f_1 + f_2 in the plane, a random problem for each of {len(problems)} seeds; batch 1, l* = 0",
        "iterations": f"K = {steps}, from a distance of {AWAY:g} from the optimum",
        "ceilings": f"gamma_b0 = {', '.join(f'{g:g}' for g in gammas)} (the paper does not say); c = 1",
        "distance": "mean over the last tenth of the iterations; geometric mean over the problems",
        "panels": f"gamma_b0 = {gammas[-1]:g}; medians over the problems, bands their middle half; the paths are those of seed 0",
    }
    by_ceiling = {
        gamma: {name: groups[f"{name} {gamma:g}"] for name in METHODS} | {AUTO: groups[AUTO]} for gamma in gammas
    }
    verdicts = tuple(verdict for gamma, own in by_ceiling.items() for verdict in judge(own, gamma))
    return Findings(panels(by_ceiling[gammas[-1]]), verdicts, settings)


def panels(groups: Groups) -> tuple[Panel, ...]:
    """Objective, distance, step and path."""
    shown = (("Objective", "f", "loss", "k"), ("Distance to the optimum", "distance", "distance", "k"))
    drawn = []
    for title, label, y, x in (*shown, ("Step size", "gamma", "step", "step_k")):
        lines = curves(groups, y, x, typical=True)
        begun = max(run.first(y) for runs in groups.values() for run in runs)
        # who flies off first is cut off, and so is the band of a step of nothing: they would flatten all others
        cut = limits([replace(line, low=None) for line in lines], 3 * begun)
        alt = f"{title} against iterations, by method."
        drawn.append(Panel(title, "iteration", label, lines, yscale="log", ylim=cut, alt=alt))
    paths = [Series(name, *_path(runs[0]), ours=name == AUTO) for name, runs in groups.items()]
    paths.append(Series("optimum", (0.0,), (0.0,), points=True, dashed=True))
    alt = "Paths in the plane from one start; the optimum is at the origin."
    return (*drawn, Panel("Paths", "x1 - x1*", "x2 - x2*", tuple(paths), equal=True, alt=alt))


def _path(run: RunRecord) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """The first points of a path, with gaps where it is far away."""
    points = zip(run.curves["x1"][:PATHS], run.curves["x2"][:PATHS], strict=True)
    near = [(a, b) if hypot(a, b) <= 2 * AWAY else (nan, nan) for a, b in points]
    return tuple(a for a, _ in near), tuple(b for _, b in near)


def judge(groups: Groups, gamma: float) -> tuple[Verdict, ...]:
    """Distances at the end, and whether SPS_max settles, under one ceiling."""
    under = f"Under gamma_b0 = {gamma:g}"
    ends = {name: [late(run, "distance") for run in runs] for name, runs in groups.items()}
    numbers = listed_geometric(ends)
    first, verdicts = initial(*groups.values(), name="distance"), []
    for name in ("DecSPS", "SPS_max"):
        judged, ratio = paired(below, ends["SPSB"], ends[name])
        judged = if_progressed(judged, first, ends["SPSB"])
        text = f"{under}, SPSB ends nearer to the optimum than {name}"
        verdicts.append(claim(text, judged, f"{numbers}; ratio {show(ratio)}", TOLD[name]))
    soon = {name: [early(run) for run in runs] for name, runs in groups.items()}
    judged, ratio = paired(below, soon["SPSB"], soon["DecSPS"])
    text = f"{under}, SPSB is nearer than DecSPS early on: the mean over the first twentieth of the iterations"
    verdicts.append(claim(text, judged, f"{listed_geometric(soon)}; ratio {show(ratio)}", "SPSB converges fast"))
    share = [log(max(settling(run), 1e-300)) for run in groups["SPS_max"]]
    step = geometric([settling(run, "step") for run in groups["SPS_max"]])
    text = (
        f"{under}, SPS_max does not settle: in the last tenth it is above {SETTLED} of its distance in the second tenth"
    )
    moved = listed_geometric({name: [settling(run) for run in runs] for name, runs in groups.items()})
    numbers_of = f"{moved}; step of SPS_max {show(step)}"
    verdicts.append(claim(text, below([log(SETTLED)] * len(share), share), numbers_of, TOLD["SPS_max"]))
    own = [paired(at_most, ends[AUTO], ends[name])[0] for name in METHODS]
    judged = if_progressed(both(*own), first, ends[AUTO])
    verdicts.append(ours(f"{under} for the others, Auto ends at or below each of them", judged, numbers))
    return tuple(verdicts)


FIGURE = Figure(
    name="quadratics",
    title="Two quadratics in the plane",
    paper="Where no point fits both samples, SPSB converges fast and SPS_max is unstable; the steps of DecSPS, which never grow, "
    "may be smaller than those of decaying SGD. Who ends nearest to the optimum is left to the plot.",
    ask=ask,
)
