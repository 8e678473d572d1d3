"""Figure app_single_level: SPSB and SLSB with one sample and with two."""

from __future__ import annotations

from math import isfinite

from bisls.experiments.base import Asking, Figure, Findings, Plan
from bisls.experiments.judging import alike, at_most, below, claim, listed, mean, ours, show, yes
from bisls.experiments.stochastic import AUTO, CEILING, Groups, classification, curves, described, grouped, late
from bisls.outcome import Judgement, Panel, Verdict

METHODS = {
    "SPSB": ("spsb", 1),
    "SPSB, two samples": ("spsb", 2),
    "SLSB": ("slsb", 1),
    "SLSB, two samples": ("slsb", 2),
    "decaying SGD": ("sgd-decay", 1),
    AUTO: ("auto", 1),
}
RULES = ("SPSB", "SLSB")
ALIKE = 0.1  # losses that differ by less than this share are alike
ENDED = 0.9  # the step has ended on the ceiling where so large a share of the last tenth is on it


def ask(plan: Plan) -> Asking:
    """Four runs with a ceiling, decaying SGD, Auto."""
    configs = [classification(plan, s, method, samples=n) for method, n in METHODS.values() for s in plan.each_seed]
    groups = grouped(tuple(METHODS), (yield configs), plan.seeds)
    settings = described(
        configs[0],
        ceiling=f"gamma_b0 = {CEILING:g}, decaying as 1 / sqrt(k + 1); c = 1 for SPSB, 0.1 for SLSB",
        samples="two samples: the gradient of one batch, the step from an independent one",
    )
    panels = (
        Panel(
            "Train loss", "iteration", "train loss", curves(groups, "loss"), yscale="log", ylim=(0.1, 2.0),
            alt="Train loss against iterations for SPSB and SLSB with one and two samples.",
        ),
        Panel(
            "Step size", "iteration", "gamma", curves(groups, "step", "step_k"), "log", "log",
            alt="Step sizes against iterations for SPSB and SLSB with one and two samples.",
        ),
    )  # fmt: skip
    return Findings(panels, judge(groups), settings)


def judge(groups: Groups) -> tuple[Verdict, ...]:
    """One and two samples alike in loss, not in the step's unrest; the ceiling at the end."""
    ends = {name: [late(run) for run in runs] for name, runs in groups.items()}
    verdicts = []
    for rule in RULES:
        pair = (rule, f"{rule}, two samples")
        judged, ratio = alike({name: ends[name] for name in pair}, ALIKE)
        text = f"{rule} with one and with two samples end alike (train losses within {ALIKE:.0%})"
        verdicts.append(claim(text, judged, f"ratio {show(ratio)}; {listed(ends)}"))
    for rule in RULES:
        pair = (rule, f"{rule}, two samples")
        jumps = {name: [run.numbers["jump"] for run in groups[name]] for name in pair}
        seen = all(isfinite(value) for values in jumps.values() for value in values)
        free = listed({name: [100 * run.numbers["below"] for run in groups[name]] for name in pair})
        verdicts.append(
            claim(
                f"The two-sample step of {rule} oscillates more: mean |change of log step| between neighbours below the ceiling",
                below(jumps[pair[0]], jumps[pair[1]]) if seen else Judgement.UNDECIDED,
                f"{listed(jumps)}; percent of all steps below the ceiling: {free}",
            )
        )
    shares = {name: [run.numbers["late"] for run in groups[name]] for name in METHODS if name.startswith(RULES)}
    text = f"The steps end on the ceiling: at least {ENDED:.0%} of the last tenth are on it, for each of the four"
    verdicts.append(claim(text, yes(all(min(values) >= ENDED for values in shares.values())), listed(shares)))
    paper = {name: values for name, values in ends.items() if name != AUTO}
    best = min(paper, key=lambda name: mean(paper[name]))
    text = f"Auto ends at or below the best of the others ({best})"
    return (*verdicts, ours(text, at_most(ends[AUTO], paper[best]), listed(ends)))


FIGURE = Figure(
    name="app_single_level",
    title="One sample or two for the step (logistic regression)",
    paper="SPSB and SLSB do as well with the gradient's own batch as with an independent one, though the steps then oscillate a "
    "little more; in both cases they end on the ceiling, as decaying SGD.",
    ask=ask,
    data=("w8a",),
)
