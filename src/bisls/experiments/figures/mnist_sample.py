"""Figure mnist_sample: BiSPS with one sample and with two, and decaying steps, on distillation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from bisls.experiments.asking import gather
from bisls.experiments.base import Asking, Figure, Findings, Plan, RunRecord
from bisls.experiments.bilevel import DEFAULT, OWN, describe
from bisls.experiments.distillation import (
    LOWER,
    ceilings,
    decaying,
    finals,
    losses,
    own_verdicts,
    polyak,
    seeds,
)
from bisls.experiments.evidence import DECIDES, informative, initial, left_out, polyak_share, uninformative
from bisls.experiments.judging import alike, at_most, claim, listed
from bisls.outcome import Verdict

ONE, TWO, DECAY = "BiSPS, one sample", "BiSPS, two samples", "decaying SGD"
WITHIN = 0.1
NAMED = 50.0  # the paper calls the two alike at 10 and at 50, and in general close
NEAR, FAR = f"alpha_b0 up to {NAMED:g}, as in the paper", f"alpha_b0 above {NAMED:g}"
TOLD = {NEAR: f"alike with alpha_b0 = 10 and {NAMED:g}", FAR: "in general the difference is small"}

Runs = Mapping[float, Mapping[str, Sequence[RunRecord]]]


def ask(plan: Plan) -> Asking:
    """The three from each alpha_b0; the default."""
    wanted = {OWN: seeds(plan, DEFAULT)}
    for alpha in ceilings(plan):
        methods = {ONE: polyak(alpha), TWO: polyak(alpha, samples=2), DECAY: decaying(alpha)}
        wanted |= {f"{alpha:g}: {name}": seeds(plan, method) for name, method in methods.items()}
    found = yield from gather(wanted)
    runs = {alpha: {name: found[f"{alpha:g}: {name}"] for name in (ONE, TWO, DECAY)} for alpha in ceilings(plan)}
    panels = tuple(
        losses(
            f"alpha_b0 = {alpha:g}", groups, found[OWN],
            f"Validation loss over iterations from alpha_b0 = {alpha:g}: BiSPS with one and two samples, decaying SGD.", (DECAY,),
        )
        for alpha, groups in runs.items()
    )  # fmt: skip
    settings = describe(
        wanted[f"{ceilings(plan)[0]:g}: {ONE}"][0],
        steps=f"alpha_b0 in {', '.join(f'{a:g}' for a in runs)}, over sqrt(k + 1); below, {LOWER:g} for ever",
        samples="with two, f and ||h||^2 in the Polyak step are those of an independent upper batch",
        default="the package's BiSLS with its own steps at both levels and CG: it does not keep the small lower step",
    )
    return Findings(panels, judge(runs, found[OWN]), settings, seen=remarks(runs))


def remarks(runs: Runs) -> str:
    """From where the three are one."""
    same = [alpha for alpha, groups in runs.items() if max(polyak_share(groups[name]) for name in (ONE, TWO)) < DECIDES]
    if not same:
        return ""
    return (
        f"From alpha_b0 = {', '.join(f'{alpha:g}' for alpha in same)} the Polyak step is nearly always above its ceiling: there "
        "one sample, two samples and decaying SGD are the same run."
    )


def judge(runs: Runs, default: Sequence[RunRecord]) -> tuple[Verdict, ...]:
    """One sample and two alike at the ceilings that the paper names, and at larger ones; neither above decaying SGD.

    An alpha_b0 from which the Polyak step hardly ever decides, or none of those compared gets anywhere, is not counted.
    """
    verdicts = []
    parts = {
        NEAR: [alpha for alpha in runs if alpha <= NAMED],
        FAR: [alpha for alpha in runs if alpha > NAMED],
    }
    for where, alphas in parts.items():
        if not alphas:
            continue
        found, numbers, reasons = [], [], []
        for alpha in alphas:
            two = {name: runs[alpha][name] for name in (ONE, TWO)}
            ends = {name: finals(own) for name, own in two.items()}
            reason = uninformative(list(two.values()), initial(*two.values()), *ends.values())
            found.append((alike(ends, WITHIN)[0], reason))
            reasons.append((f"{alpha:g}", reason))
            share = " and ".join(f"{polyak_share(own):.0%}" for own in two.values())
            numbers.append(f"{alpha:g}: {listed(ends)} (Polyak decides in {share} of the iterations)")
        statement = f"BiSPS ends alike with one sample and with two, within {WITHIN:.0%} ({where}, where the Polyak step decides)"
        verdicts.append(claim(statement, informative(found), "; ".join(numbers) + left_out(reasons), TOLD[where]))
    found, reasons = [], []
    for alpha, groups in runs.items():
        for name in (ONE, TWO):
            pair = finals(groups[name]), finals(groups[DECAY])
            reason = uninformative([groups[name]], initial(groups[name], groups[DECAY]), *pair)
            found.append((at_most(*pair), reason))
            reasons.append((f"{name} from {alpha:g}", reason))
    numbers = [
        f"{alpha:g}: {listed({name: finals(own) for name, own in groups.items()})}" for alpha, groups in runs.items()
    ]
    statement = (
        "BiSPS, with one sample and with two, ends at or below decaying SGD from each alpha_b0 where the Polyak step is "
        "what decides"
    )
    verdicts.append(
        claim(statement, informative(found), "; ".join(numbers) + left_out(reasons), "better than decaying SGD")
    )
    everything = {f"{name}, {alpha:g}": own for alpha, those in runs.items() for name, own in those.items()}
    return (*verdicts, *own_verdicts(default, everything))


FIGURE = Figure(
    name="mnist_sample",
    title="BiSPS with one sample and two (distillation)",
    paper="Whether the step comes from the sample that gave the hypergradient or from an independent one makes little "
    "difference.",
    ask=ask,
    data=("mnist",),
)
