"""Figure mnistSPS: BiSPS from several ceilings against BiSLS-SGD on distillation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from bisls.experiments.asking import gather
from bisls.experiments.base import Asking, Figure, Findings, Plan, RunRecord
from bisls.experiments.bilevel import describe
from bisls.experiments.distillation import (
    DEFAULT,
    LOWER,
    SEARCH,
    ceilings,
    enveloped,
    exacts,
    finals,
    learnt,
    losses,
    own_verdicts,
    seeds,
)
from bisls.experiments.judging import at_most, both, claim, listed, mean, show
from bisls.outcome import Verdict

SLS = "BiSLS-SGD"
FIXED, POLYAK = f"lower step {LOWER:g}", "Polyak steps below"

Readings = Mapping[str, Mapping[str, Sequence[RunRecord]]]


def ask(plan: Plan) -> Asking:
    """BiSPS with the lower step fixed and with its own below; BiSLS-SGD with both searches; the default."""
    below = {FIXED: {}, POLYAK: {"lower": "polyak", "beta": SEARCH[1]}}
    wanted = {
        f"{reading}: BiSPS, {alpha:g}": enveloped(plan, "bisps", alpha, **settings)
        for reading, settings in below.items()
        for alpha in ceilings(plan)
    }
    wanted |= {SLS: seeds(plan, "bisls-sgd"), DEFAULT: seeds(plan, DEFAULT)}
    found = yield from gather(wanted)
    readings = {
        reading: {name.split(": ")[1]: runs for name, runs in found.items() if name.startswith(reading)}
        for reading in below
    }
    panels = tuple(
        losses(
            f"BiSPS with {reading}", {**groups, SLS: found[SLS]}, found[DEFAULT],
            f"Validation loss over iterations: BiSPS from each alpha_b0 with {reading}, BiSLS-SGD and the default.",
        )
        for reading, groups in readings.items()
    )  # fmt: skip
    settings = describe(
        wanted[SLS][0],
        BiSPS=f"alpha_b0 in {', '.join(f'{a:g}' for a in ceilings(plan))}, over sqrt(k + 1)",
        BiSLS=f"reset option 3 with eta 2, w = 0.9, p = 0.1, delta = 0; searches begin at {SEARCH[0]:g} and {SEARCH[1]:g}",
        deviations="the paper does not say what BiSPS does below: once as in figure demo_3 (1e-4 for ever), once with its own "
        f"Polyak steps under {SEARCH[1]:g} / (k + 1), so that both methods set their lower steps",
    )
    return Findings(panels, judge(readings, found[SLS], found[DEFAULT]), settings)


def judge(readings: Readings, searched: Sequence[RunRecord], default: Sequence[RunRecord]) -> tuple[Verdict, ...]:
    """BiSLS-SGD against each ceiling, once for each way of taking lower steps."""
    verdicts = []
    own = f"BiSLS-SGD {show(mean(finals(searched)))} (F(x) {show(mean(exacts(searched)))})"
    for reading, groups in readings.items():
        ends = {name: finals(runs) for name, runs in groups.items()}
        judgement = learnt(both(*(at_most(finals(searched), values) for values in ends.values())), searched)
        statement = f"BiSLS-SGD ends at or below BiSPS from every alpha_b0 ({reading})"
        verdicts.append(claim(statement, judgement, f"{own}, {listed(ends)}"))
    groups = {f"{name}, {reading}": runs for reading, those in readings.items() for name, runs in those.items()}
    return (*verdicts, *own_verdicts(default, {SLS: searched, **groups}))


FIGURE = Figure(
    name="mnist_sps",
    title="BiSPS and BiSLS-SGD (distillation)",
    paper="Searching for the step does better than the Polyak step, wherever the ceiling of the latter begins.",
    ask=ask,
    data=("mnist",),
)
