"""Figure mnist_sample: BiSPS with one sample and with two, and decaying steps, on distillation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from bisls.experiments.base import Asking, Figure, Findings, Plan, RunRecord
from bisls.experiments.bilevel import describe
from bisls.experiments.distillation import (
    DEFAULT,
    LOWER,
    ceilings,
    enveloped,
    finals,
    gather,
    held,
    losses,
    own_verdicts,
    seeds,
)
from bisls.experiments.judging import alike, at_most, both, claim, listed
from bisls.outcome import Verdict

ONE, TWO, DECAY = "BiSPS, one sample", "BiSPS, two samples", "decaying SGD"
WITHIN = 0.1
NAMED = 50.0  # the paper calls the two alike at 10 and at 50, and in general close

Runs = Mapping[float, Mapping[str, Sequence[RunRecord]]]


def ask(plan: Plan) -> Asking:
    """The three from each alpha_b0; the default."""
    kinds = {ONE: ("bisps", {}), TWO: ("bisps", {"samples": 2}), DECAY: ("sgd-decay", {})}
    wanted = {
        f"{alpha:g}: {name}": enveloped(plan, method, alpha, **settings)
        for alpha in ceilings(plan)
        for name, (method, settings) in kinds.items()
    }
    wanted[DEFAULT] = seeds(plan, DEFAULT)
    found = yield from gather(wanted)
    runs = {alpha: {name: found[f"{alpha:g}: {name}"] for name in kinds} for alpha in ceilings(plan)}
    panels = tuple(
        losses(
            f"alpha_b0 = {alpha:g}", groups, found[DEFAULT],
            f"Validation loss over iterations from alpha_b0 = {alpha:g}: BiSPS with one and two samples, decaying SGD.", (DECAY,),
        )
        for alpha, groups in runs.items()
    )  # fmt: skip
    settings = describe(
        next(iter(wanted.values()))[0],
        steps=f"alpha_b0 in {', '.join(f'{a:g}' for a in runs)}, over sqrt(k + 1); below, {LOWER:g} for ever",
        samples="with two, f and ||h||^2 in the Polyak step are those of the previous upper batch",
        default="the package's BiSLS with its own steps at both levels and CG: it does not keep the small lower step",
    )
    return Findings(panels, judge(runs, found[DEFAULT]), settings)


def judge(runs: Runs, default: Sequence[RunRecord]) -> tuple[Verdict, ...]:
    """One sample and two alike at the ceilings that the paper names, and at larger ones; neither above decaying SGD."""
    verdicts = []
    parts = {
        f"alpha_b0 up to {NAMED:g}, as in the paper": [alpha for alpha in runs if alpha <= NAMED],
        f"alpha_b0 above {NAMED:g}": [alpha for alpha in runs if alpha > NAMED],
    }
    for where, alphas in parts.items():
        if not alphas:
            continue
        found, numbers = [], []
        for alpha in alphas:
            ends = {name: finals(runs[alpha][name]) for name in (ONE, TWO)}
            found.append(alike(ends, WITHIN)[0])
            share = " and ".join(f"{held(runs[alpha][name]):.0%}" for name in (ONE, TWO))
            numbers.append(f"{alpha:g}: {listed(ends)} (Polyak decides in {share} of the iterations)")
        statement = f"BiSPS ends alike with one sample and with two, within {WITHIN:.0%} ({where})"
        verdicts.append(claim(statement, both(*found), "; ".join(numbers)))
    each = [at_most(finals(groups[name]), finals(groups[DECAY])) for groups in runs.values() for name in (ONE, TWO)]
    numbers = [
        f"{alpha:g}: {listed({name: finals(own) for name, own in groups.items()})}" for alpha, groups in runs.items()
    ]
    statement = "BiSPS, with one sample and with two, ends at or below decaying SGD from each alpha_b0"
    verdicts.append(claim(statement, both(*each), "; ".join(numbers)))
    groups = {f"{name}, {alpha:g}": own for alpha, those in runs.items() for name, own in those.items()}
    return (*verdicts, *own_verdicts(default, groups))


FIGURE = Figure(
    name="mnist_sample",
    title="BiSPS with one sample and two (distillation)",
    paper="Whether the step comes from the sample that gave the hypergradient or from an independent one makes little "
    "difference.",
    ask=ask,
    data=("mnist",),
)
