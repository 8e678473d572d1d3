"""Figure mnistSPS: BiSPS from several ceilings against BiSLS-SGD on distillation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from bisls.experiments.asking import gather
from bisls.experiments.base import Asking, Figure, Findings, Plan, RunRecord
from bisls.experiments.bilevel import DEFAULT, OWN, describe, shown_search
from bisls.experiments.distillation import (
    LOWER,
    ceilings,
    exacts,
    finals,
    learnt,
    losses,
    own_verdicts,
    polyak,
    searched,
    seeds,
)
from bisls.experiments.judging import at_most, both, claim, listed, mean, show
from bisls.outcome import Verdict

SLS = "BiSLS-SGD"
BETA = 100.0  # the ceiling of Polyak steps below, where the searches begin too
FIXED, POLYAK = f"lower step {LOWER:g}", "Polyak steps below"

Readings = Mapping[str, Mapping[str, Sequence[RunRecord]]]


def ask(plan: Plan) -> Asking:
    """BiSPS with the lower step fixed and with its own below; BiSLS-SGD with both searches; the default."""
    below: dict[str, dict[str, Any]] = {FIXED: {}, POLYAK: {"lower_step": None, "beta": BETA}}
    wanted = {
        f"{reading}: BiSPS, {alpha:g}": seeds(plan, polyak(alpha, **settings))
        for reading, settings in below.items()
        for alpha in ceilings(plan)
    }
    wanted |= {SLS: seeds(plan, searched(plan)), OWN: seeds(plan, DEFAULT)}
    found = yield from gather(wanted)
    readings = {
        reading: {name.split(": ")[1]: runs for name, runs in found.items() if name.startswith(reading)}
        for reading in below
    }
    panels = tuple(
        losses(
            f"BiSPS with {reading}", {**groups, SLS: found[SLS]}, found[OWN],
            f"Validation loss over iterations: BiSPS from each alpha_b0 with {reading}, BiSLS-SGD and the default.",
        )
        for reading, groups in readings.items()
    )  # fmt: skip
    settings = describe(
        wanted[SLS][0],
        BiSPS=f"alpha_b0 in {', '.join(f'{a:g}' for a in ceilings(plan))}, over sqrt(k + 1)",
        BiSLS=shown_search(searched(plan)),
        deviations="the paper does not say what BiSPS does below: once as in figure demo_3 (1e-4 for ever), once with its own "
        f"Polyak steps under {BETA:g} / (k + 1), so that both methods set their lower steps",
    )
    return Findings(panels, judge(readings, found[SLS], found[OWN]), settings)


def judge(readings: Readings, searches: Sequence[RunRecord], default: Sequence[RunRecord]) -> tuple[Verdict, ...]:
    """BiSLS-SGD against each ceiling, once for each way of taking lower steps."""
    verdicts = []
    own = f"BiSLS-SGD {show(mean(finals(searches)))} (F(x) {show(mean(exacts(searches)))})"
    for reading, groups in readings.items():
        ends = {name: finals(runs) for name, runs in groups.items()}
        judgement = learnt(both(*(at_most(finals(searches), values) for values in ends.values())), searches)
        statement = f"BiSLS-SGD ends at or below BiSPS from every alpha_b0 ({reading})"
        verdicts.append(claim(statement, judgement, f"{own}, {listed(ends)}", "BiSLS-SGD does better"))
    groups = {f"{name}, {reading}": runs for reading, those in readings.items() for name, runs in those.items()}
    return (*verdicts, *own_verdicts(default, {SLS: searches, **groups}))


FIGURE = Figure(
    name="mnist_sps",
    title="BiSPS and BiSLS-SGD (distillation)",
    paper="Searching for the step does better than the Polyak step, wherever the ceiling of the latter begins.",
    ask=ask,
    data=("mnist",),
)
