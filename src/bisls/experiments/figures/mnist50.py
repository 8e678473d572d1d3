"""Figure mnist50: the comparison of figure datadist with more lower steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from bisls.experiments.asking import gather
from bisls.experiments.base import Asking, Figure, Findings, Plan, RunRecord
from bisls.experiments.bilevel import DEFAULT, OWN, describe, shown_search
from bisls.experiments.distillation import (
    CONSTANT,
    LOWER,
    exacts,
    finals,
    grid,
    learnt,
    losses,
    own_verdicts,
    searched,
    seeds,
    tuned,
)
from bisls.experiments.judging import below, both, claim, listed, mean, show
from bisls.outcome import Verdict
from bisls.steps import Constant

SLS, SLS_FIXED = "BiSLS-SGD", f"BiSLS-SGD, beta {LOWER:g}"


def ask(plan: Plan) -> Asking:
    """Upper steps of Adam and SGD tuned with the lower one fixed; BiSLS-SGD with and without a search below; the default."""
    own = {"lower_iters": plan.pick(6, 50, 50)}
    grids = {name: (method, grid(plan, name, LOWER)) for name, method in CONSTANT.items()}
    best = yield from tuned(plan, grids, **own)
    wanted = {
        SLS: seeds(plan, searched(plan), **own),
        SLS_FIXED: seeds(plan, searched(plan, lower_step=Constant(LOWER)), **own),
        OWN: seeds(plan, DEFAULT, **own),
    }
    found = yield from gather(wanted)
    rivals = {name: one.runs for name, one in best.items()}
    searches = {name: found[name] for name in (SLS, SLS_FIXED)}
    alt = "Validation loss over iterations: BiSLS-SGD with a search below and with a fixed lower step, tuned Adam and SGD."
    panel = losses(f"Identity, T = {own['lower_iters']}", {**searches, **rivals}, found[OWN], alt, (SLS_FIXED,))
    settings = describe(
        wanted[SLS][0],
        tuned="; ".join(f"{name} {one}" for name, one in best.items()) + "; by the final loss on the first seed",
        BiSLS=shown_search(searched(plan)),
        deviations=f"the paper fixes beta at {LOWER:g}, and does not say whether BiSLS-SGD then searches below: both are run",
    )
    return Findings((panel,), judge(searches, rivals, found[OWN]), settings)


def judge(
    searches: Mapping[str, Sequence[RunRecord]],
    rivals: Mapping[str, Sequence[RunRecord]],
    default: Sequence[RunRecord],
) -> tuple[Verdict, ...]:
    """Each reading of BiSLS-SGD against both tuned methods."""
    ends = {name: finals(runs) for name, runs in rivals.items()}
    verdicts = []
    for name, runs in searches.items():
        judgement = learnt(both(*(below(finals(runs), values) for values in ends.values())), runs)
        where = "searching at both levels" if name == SLS else f"searching above alone, with the same beta = {LOWER:g}"
        numbers = f"{name} {show(mean(finals(runs)))} (F(x) {show(mean(exacts(runs)))}), {listed(ends)}"
        statement = f"BiSLS-SGD, {where}, ends below Adam and SGD with tuned upper steps and beta = {LOWER:g}"
        verdicts.append(claim(statement, judgement, numbers, "BiSLS-SGD does better with T = 50 too"))
    return (*verdicts, *own_verdicts(default, {**searches, **rivals}))


FIGURE = Figure(
    name="mnist50",
    title="Fifty lower steps (distillation)",
    paper="With T = 50 as with T = 20, BiSLS-SGD does better than Adam and SGD with upper steps that were tuned.",
    ask=ask,
    data=("mnist",),
)
