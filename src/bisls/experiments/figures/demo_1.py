"""Figure demo_1: constant steps on hyper-representation, and how badly they may be chosen."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import isfinite

from bisls.experiments.asking import over_seeds
from bisls.experiments.base import Asking, Figure, Findings, Plan, RunRecord
from bisls.experiments.bilevel import DEFAULT, OWN, constant, describe
from bisls.experiments.drawing import curve, not_above_start
from bisls.experiments.judging import below, claim, listed, mean, ours, show, yes
from bisls.experiments.representation import CONSTANT, finals, learnt, representation
from bisls.outcome import Judgement, Panel, Verdict

ALPHA, BETA = 0.005, 0.01  # what is held fixed while the other one varies
TOLD = {
    name: f"a large {name} diverges; the other step {fixed:g}" for name, fixed in (("beta", ALPHA), ("alpha", BETA))
}


def ask(plan: Plan) -> Asking:
    """The lower step over its grid with the upper one fixed, then the other way round; the default with nothing set."""
    betas = plan.pick((10.0, 0.01), (10.0, 1.0, 0.1, 0.01), (10.0, 5.0, 1.0, 0.5, 0.1, 0.05, 0.01))
    alphas = plan.pick((0.1, 0.001), (0.1, 0.05, 0.01, 0.001), (0.1, 0.05, 0.01, 0.005, 0.0025, 0.001))
    pairs = {f"beta {beta:g}": (ALPHA, beta) for beta in betas} | {
        f"alpha {alpha:g}": (alpha, BETA) for alpha in alphas
    }
    wanted = {name: representation(plan, 0, constant(CONSTANT["sgd"], a, b)) for name, (a, b) in pairs.items()}
    shown = describe(next(iter(wanted.values())), method="SGD with constant steps")
    wanted[OWN] = representation(plan, 0, DEFAULT)
    groups = yield from over_seeds(plan.each_seed, wanted)
    panels = []
    for title, start in (
        (f"Lower step beta (alpha = {ALPHA})", "beta"),
        (f"Upper step alpha (beta = {BETA})", "alpha"),
    ):
        lines = [curve(name, runs, "loss") for name, runs in groups.items() if name.startswith(start)]
        lines.append(curve(OWN, groups[OWN], "loss", ours=True))
        ylim = not_above_start(lines)
        panels.append(Panel(title, "upper iteration", "validation loss", tuple(lines), yscale="log", ylim=ylim))
    return Findings(tuple(panels), judge(groups), shown)


def judge(groups: Mapping[str, Sequence[RunRecord]]) -> tuple[Verdict, ...]:
    """Over each grid one value diverges or stalls (less than a fifth of the best one's fall) while another converges."""
    verdicts = []
    for name in ("beta", "alpha"):
        ends = {label: finals(runs) for label, runs in groups.items() if label.startswith(name)}
        start = mean([run.first("loss") for run in groups[OWN]])
        best, worst = min(map(mean, ends.values())), max(map(mean, ends.values()))
        spread = yes(best < 0.8 * start and worst > start - 0.2 * (start - best))
        if not isfinite(start):  # nobody knows where they began
            spread = Judgement.UNDECIDED
        statement = f"Over the grid of {name}, one value diverges or stalls while another converges"
        numbers = f"loss at the start {show(start)}; at the end {listed(ends)}"
        verdicts.append(claim(statement, spread, numbers, TOLD[name]))
    ends = {label: finals(runs) for label, runs in groups.items() if label != OWN}
    best_name = min(ends, key=lambda label: mean(ends[label]))
    own = finals(groups[OWN])
    numbers = f"BiSLS {show(mean(own))}, best of both grids ({best_name}) {show(mean(ends[best_name]))}"
    judgement = learnt(below(own, ends[best_name]), groups[OWN])
    verdicts.append(ours("The default ends below every value of both grids", judgement, numbers))
    return tuple(verdicts)


FIGURE = Figure(
    name="demo_1",
    title="Constant steps are unstable (hyper-representation)",
    paper="Unless both steps are tuned with care, SGD with constant steps diverges or stalls: a large lower step or a large "
    "upper step is enough.",
    ask=ask,
    data=("mnist",),
)
