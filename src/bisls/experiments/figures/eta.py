"""Figure eta: by how much the upper step may grow, reset option 3."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from bisls.experiments.base import Asking, Figure, Findings, Plan, RunRecord
from bisls.experiments.judging import below, both, claim, listed
from bisls.experiments.representation import all_alike, by_method, describe_restarting, finals, learnt, own_at_most_all
from bisls.outcome import Verdict
from bisls.steps import Grow, Keep

KEPT = "eta = 1"


def growth(plan: Plan) -> dict[str, Keep | Grow]:
    """Values of eta; 1 is option 2, so that figure opt shares its runs."""
    values = plan.pick((2.0, 10.0), (2.0, 10.0), (2.0, 5.0, 10.0))
    return {KEPT: Keep(), **{f"eta = {eta:g}": Grow(eta) for eta in values}}


def ask(plan: Plan) -> Asking:
    """Each eta for BiSLS-SGD and BiSLS-Adam."""
    groups, own, panels = yield from by_method(
        plan, {name: {"restart": restart} for name, restart in growth(plan).items()}
    )
    return Findings(panels, judge(groups, own), describe_restarting(plan, reset="option 3; eta = 1 is option 2"))


def judge(groups: Mapping[str, Mapping[str, Sequence[RunRecord]]], own: Sequence[RunRecord]) -> tuple[Verdict, ...]:
    """All eta above 1 are alike; eta = 1 is slower than each of them."""
    verdicts = []
    for method, runs in groups.items():
        ends = {name: finals(one) for name, one in runs.items()}
        grown = {name: one for name, one in runs.items() if name != KEPT}
        verdicts.append(all_alike(f"{method}, every eta above 1 alike", grown, "all do equally well"))
        slower = both(*(learnt(below(ends[name], ends[KEPT]), runs[name]) for name in grown))
        verdicts.append(
            claim(
                f"{method}: eta = 1 is slower than every larger eta",
                slower,
                listed(ends),
                "slower; elsewhere: equally well",
            )
        )
    return (*verdicts, own_at_most_all(groups, own))


FIGURE = Figure(
    name="eta",
    title="The growth factor eta of the upper search (hyper-representation)",
    paper="Any factor eta above 1 does equally well. With eta = 1 the step never grows; the text has it both as good as the "
    "others and slower.",
    ask=ask,
    data=("mnist",),
)
