"""Figure app_single_level: SPSB and SLSB with one sample and with two."""

from __future__ import annotations

from collections.abc import Sequence
from math import expm1, inf, isfinite, log1p

import numpy as np

from bisls.experiments.asking import over_seeds
from bisls.experiments.base import Asking, Figure, Findings, Plan, RunRecord
from bisls.experiments.drawing import limits
from bisls.experiments.evidence import if_progressed, initial
from bisls.experiments.judging import alike, at_most, below, both, claim, listed, mean, ours, show, yes
from bisls.experiments.stochastic import AUTO, CEILING, Groups, classification, curves, describe, late, under
from bisls.outcome import Judgement, Panel, Verdict

ALONE = "decaying SGD"  # the ceiling without the rule
METHODS = {  # and how many samples
    "SPSB": 1,
    "SPSB, two samples": 2,
    "SLSB": 1,
    "SLSB, two samples": 2,
    ALONE: 1,
    AUTO: 1,
}
RULES = ("SPSB", "SLSB")
ALIKE = 0.1  # losses that differ by less than this share are alike
ENDED = 0.9  # the step has ended on the ceiling where so large a share of the last tenth is on it


def ask(plan: Plan) -> Asking:
    """Four runs with a ceiling, decaying SGD, Auto."""
    methods = under(CEILING, *METHODS)
    wanted = {name: classification(plan, 0, method, samples=METHODS[name]) for name, method in methods.items()}
    groups = yield from over_seeds(plan.each_seed, wanted)
    settings = describe(
        wanted["SPSB"],
        ceiling=f"gamma_b0 = {CEILING:g}, decaying as 1 / sqrt(k + 1); c = 1 for SPSB, 0.1 for SLSB",
        samples="two samples: the gradient of one batch, the step from an independent one",
    )
    losses = curves(groups, "loss")
    panels = (
        Panel(
            "Train loss", "iteration", "train loss", losses, yscale="log", ylim=limits(losses, 2.0),
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
    free = {name: [run.numbers["below"] for run in groups[name]] for name in METHODS if name.startswith(RULES)}
    matters = {name: mean(course(groups[name], groups[ALONE])) > log1p(ALIKE) for name in free}
    first, verdicts = initial(*groups.values()), []
    for rule in RULES:
        pair = (rule, f"{rule}, two samples")
        judged, ratio = alike({name: ends[name] for name in pair}, ALIKE)
        apart = course(*(groups[name] for name in pair))
        judged = both(judged, at_most(apart, [log1p(ALIKE)] * len(apart)))
        judged = if_progressed(judged, first, *(ends[name] for name in pair))
        if not any(matters[name] for name in pair):  # then all are decaying SGD
            judged = Judgement.UNDECIDED
        text = f"{rule} with one and with two samples are alike: train losses within {ALIKE:.0%} over the run and at the end"
        sgd = ", ".join(f"{name} {show(expm1(mean(course(groups[name], groups[ALONE]))))}" for name in pair)
        numbers = (
            f"apart {show(expm1(mean(apart)))} on average, at the end a ratio of {show(ratio)}; from {ALONE}, which has the same "
            f"ceiling, on average {sgd}; ends {listed(ends)}"
        )
        verdicts.append(claim(text, judged, numbers, "two samples do as well as one"))
    for rule in RULES:
        pair = (rule, f"{rule}, two samples")
        jumps = {name: [run.numbers["jump"] for run in groups[name]] for name in pair}
        seen = all(isfinite(value) for values in jumps.values() for value in values)
        shares = listed({name: [100 * share for share in free[name]] for name in pair})
        verdicts.append(
            claim(
                f"The two-sample step of {rule} oscillates more: mean |change of log step| between neighbours below the ceiling",
                below(jumps[pair[0]], jumps[pair[1]]) if seen else Judgement.UNDECIDED,
                f"{listed(jumps)}; percent of all steps below the ceiling: {shares}",
                "two samples oscillate slightly more",
            )
        )
    ended = {name: [run.numbers["late"] for run in groups[name]] for name in METHODS if name.startswith(RULES)}
    judged = yes(all(min(values) >= ENDED for values in ended.values()))
    if not all(matters.values()):  # then one of them never left it to any effect
        judged = Judgement.UNDECIDED
    text = f"The steps end on the ceiling: at least {ENDED:.0%} of the last tenth are on it, for each of the four"
    shares = listed({name: [100 * share for share in values] for name, values in free.items()})
    verdicts.append(
        claim(
            text,
            judged,
            f"{listed(ended)}; percent of all steps below the ceiling: {shares}",
            "in the end decaying SGD",
        )
    )
    paper = {name: values for name, values in ends.items() if name != AUTO}
    best = min(paper, key=lambda name: mean(paper[name]))
    text = f"Auto ends at or below the best of the others ({best})"
    own = if_progressed(at_most(ends[AUTO], paper[best]), first, ends[AUTO])
    return (*verdicts, ours(text, own, listed(ends)))


def course(one: Sequence[RunRecord], two: Sequence[RunRecord]) -> list[float]:
    """How far two curves are apart, for each seed: the mean |log ratio| of the losses; infinite where a run was lost."""
    apart = []
    for a, b in zip(one, two, strict=True):
        x, y = a.curve("loss"), b.curve("loss")
        whole = not (a.error or b.error) and 0 < len(x) == len(y)
        usable = whole and np.isfinite([x, y]).all() and (np.minimum(x, y) > 0).all()
        apart.append(float(np.abs(np.log(x / y)).mean()) if usable else inf)
    return apart


FIGURE = Figure(
    name="app_single_level",
    title="One sample or two for the step (logistic regression)",
    paper="SPSB and SLSB do as well with the gradient's own batch as with an independent one, though the steps then oscillate a "
    "little more; in both cases they end on the ceiling, as decaying SGD.",
    ask=ask,
    data=("w8a",),
)
