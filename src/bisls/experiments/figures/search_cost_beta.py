"""Figure search_cost_beta: what the lower search costs, by where it begins."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from bisls.experiments.asking import over_seeds
from bisls.experiments.base import Asking, Figure, Findings, Plan, RunRecord
from bisls.experiments.bilevel import DEFAULT, OWN, describe, shown_search
from bisls.experiments.drawing import dots
from bisls.experiments.judging import at_most, claim, listed, mean, ours, show, yes
from bisls.experiments.representation import METHODS, checks, learnt, restarting, short
from bisls.outcome import Panel, Verdict

ROUNDS = 1.5  # what counts as the paper's one check


def ask(plan: Plan) -> Asking:
    """BiSLS-Adam and BiSLS-SGD with reset option 1 below, from each beta_b0."""
    betas = plan.pick((1.0, 100.0), (1.0, 10.0, 100.0), (1.0, 10.0, 100.0, 1000.0))
    steps, every = plan.pick(2, 5, 1000), plan.pick(2, 5, 20)
    methods = plan.pick(("BiSLS-Adam",), ("BiSLS-Adam",), tuple(METHODS))
    wanted = {
        f"{name} {beta:g}": short(plan, restarting(plan, name, beta=beta), steps=steps, every=every)
        for name in methods for beta in betas
    }  # fmt: skip
    found = yield from over_seeds(plan.each_seed, {**wanted, OWN: short(plan, DEFAULT)})
    groups = {name: {beta: found[f"{name} {beta:g}"] for beta in betas} for name in methods}
    own = found[OWN]
    lines = [dots(name, betas, [checks(one, "lower") for one in runs.values()]) for name, runs in groups.items()]
    lines.append(dots(OWN, betas, [checks(own, "lower")] * len(betas), ours=True))
    panel = Panel(
        "Lower search, reset option 1", "beta_b0", "checks a lower step", tuple(lines), xscale="log",
        alt="Checks that one lower step takes against the step at which each lower search begins",
    )  # fmt: skip
    one = wanted[f"BiSLS-Adam {betas[0]:g}"]
    settings = describe(
        one, search=f"{shown_search(one.method)}; beta_b0 also {', '.join(f'{b:g}' for b in betas[1:])}"
    )
    return Findings((panel,), judge(groups, own), settings)


def judge(groups: Mapping[str, Mapping[float, Sequence[RunRecord]]], own: Sequence[RunRecord]) -> tuple[Verdict, ...]:
    """About one check, whatever the start; the default needs no more than the cheapest."""
    costs = {f"{name} from {beta:g}": checks(runs, "lower") for name, by in groups.items() for beta, runs in by.items()}
    longest = {f"{name} from {beta:g}": _longest(runs) for name, by in groups.items() for beta, runs in by.items()}
    verdicts = [
        claim(
            f"With option 1 a lower step takes about one check (at most {ROUNDS:g}) from every beta_b0",
            learnt(
                yes(max(map(mean, costs.values())) <= ROUNDS), *(runs for by in groups.values() for runs in by.values())
            ),
            f"{listed(costs)}; the longest step that ended an iteration: {listed(longest)}",
            "1 round an iteration",
        )
    ]
    cheapest = min(costs, key=lambda name: mean(costs[name]))
    need = checks(own, "lower")
    numbers = f"BiSLS {show(mean(need))}, {cheapest} {show(mean(costs[cheapest]))}"
    judgement = learnt(at_most(need, costs[cheapest]), own)
    verdicts.append(ours("The default needs at most as many checks a lower step as any", judgement, numbers))
    return tuple(verdicts)


def _longest(runs: Sequence[RunRecord]) -> list[float]:
    return [max(run.curves["beta"], default=float("inf")) for run in runs]


FIGURE = Figure(
    name="search_cost_beta",
    title="What the lower search costs (hyper-representation)",
    paper="Begun anew at beta_b0 for every step, the lower search takes one check on average.",
    ask=ask,
    data=("mnist",),
)
