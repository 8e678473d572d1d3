"""Figure opt: where the upper search begins, options 1 (restart), 2 (keep) and 3 (grow)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from bisls.experiments.base import Asking, Figure, Findings, Plan, RunRecord
from bisls.experiments.judging import below, both, claim, listed
from bisls.experiments.representation import all_alike, by_method, describe_restarting, finals, learnt, own_at_most_all
from bisls.outcome import Verdict
from bisls.steps import Grow, Keep, Restart

OPTIONS: dict[str, Restart | Keep | Grow] = {"option 1": Restart(), "option 2": Keep(), "option 3": Grow(2.0)}


def ask(plan: Plan) -> Asking:
    """Each option for BiSLS-SGD and BiSLS-Adam."""
    groups, own, panels = yield from by_method(plan, {name: {"restart": restart} for name, restart in OPTIONS.items()})
    return Findings(panels, judge(groups, own), describe_restarting(plan, option_3="eta = 2"))


def judge(groups: Mapping[str, Mapping[str, Sequence[RunRecord]]], own: Sequence[RunRecord]) -> tuple[Verdict, ...]:
    """Options 1 and 3 are alike, option 2 is worse than either."""
    verdicts = []
    for method, runs in groups.items():
        ends = {name: finals(one) for name, one in runs.items()}
        verdicts.append(
            all_alike(
                f"{method}, options 1 and 3 alike", {n: runs[n] for n in ("option 1", "option 3")}, "nearly the same"
            )
        )
        worse = both(*(learnt(below(ends[name], ends["option 2"]), runs[name]) for name in ("option 1", "option 3")))
        verdicts.append(
            claim(
                f"{method}: option 2 ends above options 1 and 3",
                worse,
                listed(ends),
                "option 2 does worse than 1 and 3",
            )
        )
    return (*verdicts, own_at_most_all(groups, own))


FIGURE = Figure(
    name="opt",
    title="Reset options of the upper search (hyper-representation)",
    paper="Beginning each upper search at the first start (option 1) or a little above the last step (option 3) does equally "
    "well; beginning at the last step (option 2), which never grows, does worse.",
    ask=ask,
    data=("mnist",),
)
