"""Figure delta_opt1: the slack delta of the upper test over six orders, reset option 1."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from bisls.experiments.base import Asking, Figure, Findings, Plan, RunRecord
from bisls.experiments.bilevel import shown_restart
from bisls.experiments.representation import all_alike, by_method, describe_restarting, own_at_most_all
from bisls.outcome import Verdict
from bisls.steps import Grow, Restart

NONE = "delta = 0"


def asking(plan: Plan, restart: Restart | Grow) -> Asking:
    """Each delta for BiSLS-SGD and BiSLS-Adam, at a reset option."""
    deltas = plan.pick((1e-2,), (1e-8, 1e-2), (1e-8, 1e-7, 1e-6, 1e-5, 1e-4, 1e-3, 1e-2))
    variants: dict[str, dict[str, Any]] = {NONE: {"restart": restart}}
    variants |= {f"delta = {delta:g}": {"restart": restart, "slack": delta} for delta in deltas}
    groups, own, panels = yield from by_method(plan, variants)
    shown = describe_restarting(
        plan,
        reset=shown_restart(restart),
        delta="the paper varies it over six orders and does not say which; 0 is beside",
    )
    return Findings(panels, judge(groups, own), shown)


def judge(groups: Mapping[str, Mapping[str, Sequence[RunRecord]]], own: Sequence[RunRecord]) -> tuple[Verdict, ...]:
    """All delta above 0 are alike."""
    verdicts = []
    for method, runs in groups.items():
        some = {name: one for name, one in runs.items() if name != NONE}
        verdicts.append(all_alike(f"{method}, delta over six orders alike", some, "very similar over 6 orders"))
    return (*verdicts, own_at_most_all(groups, own))


def ask(plan: Plan) -> Asking:
    """Option 1."""
    return asking(plan, Restart())


FIGURE = Figure(
    name="delta_opt1",
    title="The slack delta with reset option 1 (hyper-representation)",
    paper="The slack that lets a trial pass in spite of errors may vary over six orders of magnitude with hardly any effect.",
    ask=ask,
    data=("mnist",),
)
