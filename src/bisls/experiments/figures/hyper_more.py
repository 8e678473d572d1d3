"""Figure hyper_more: search on which level, accuracy, and where the searches begin."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from bisls.experiments.asking import over_seeds
from bisls.experiments.base import Asking, Figure, Findings, Plan, RunRecord
from bisls.experiments.bilevel import OWN, describe, shown_search
from bisls.experiments.drawing import curve, not_above_start
from bisls.experiments.figures.demo_4 import compared_runs, named, starts
from bisls.experiments.judging import at_most, below, both, claim, listed, mean, ours, show
from bisls.experiments.representation import (
    ALPHA,
    BETA,
    METHODS,
    all_alike,
    errors,
    finals,
    learnt,
    own_at_most,
    representation,
    searched,
    tuned,
    tuned_runs,
)
from bisls.outcome import Panel, Verdict
from bisls.steps import Constant

Runs = Mapping[str, Sequence[RunRecord]]
LEVELS = ("both levels", "lower only", "upper only", "none (tuned Adam)")


def ask(plan: Plan) -> Asking:
    """The runs of figure demo_4, then a search on one level only, with the constant step of tuned Adam on the other."""
    wanted = compared_runs(plan)
    best, groups = yield from tuned(plan, beside=wanted)
    alpha, beta = best["adam"].pair
    one_level = yield from over_seeds(
        plan.each_seed,
        {
            "lower only": representation(plan, 0, searched(plan, upper_step=Constant(alpha))),
            "upper only": representation(plan, 0, searched(plan, lower_step=Constant(beta))),
        },
    )
    both_levels = groups["BiSLS-Adam"]
    by_level = dict(zip(LEVELS, (both_levels, *one_level.values(), best["adam"].runs), strict=True))
    compared = {name: groups[name] for name in METHODS} | tuned_runs(best)
    alphas = {f"alpha_b0 = {a:g}": groups[named((a, b))] for a, b in sorted(starts(plan)) if b == BETA}
    betas = {f"beta_b0 = {b:g}": groups[named((a, b))] for a, b in sorted(starts(plan)) if a == ALPHA}
    own = groups[OWN]
    panels = (
        _panel("Search at", by_level, own, "loss"),
        _panel("Accuracy", compared, own, "accuracy"),
        _panel(f"Starts alpha_b0 (beta_b0 = {BETA:g})", alphas, own, "loss"),
        _panel(f"Starts beta_b0 (alpha_b0 = {ALPHA:g})", betas, own, "loss"),
    )
    settings = describe(
        wanted["BiSLS-Adam"], **{
            "searches": shown_search(searched(plan)),
            "one level only": f"the other has the step of tuned Adam: {best['adam']}",
            "tuned SGD": str(best["sgd"]),
            "accuracy": "on test samples that neither level sees",
        },
    )  # fmt: skip
    return Findings(panels, judge(by_level, compared, alphas, betas, own), settings)


def _panel(title: str, groups: Runs, own: Sequence[RunRecord], name: str) -> Panel:
    lines = [curve(label, runs, name, dashed="tuned" in label) for label, runs in groups.items()]
    lines.append(curve(OWN, own, name, ours=True))
    loss = name == "loss"
    label = "validation loss" if loss else "test accuracy"
    alt = f"{label} against iterations: {', '.join(groups)}, and the default".capitalize()
    cut = not_above_start(lines) if loss else None
    return Panel(title, "upper iteration", label, tuple(lines), yscale="log" if loss else "linear", ylim=cut, alt=alt)


def judge(by_level: Runs, compared: Runs, alphas: Runs, betas: Runs, own: Sequence[RunRecord]) -> tuple[Verdict, ...]:
    """Search above pays, accuracy is as good as that of tuned methods, starts don't matter.

    Args:
        by_level: BiSLS-Adam by the levels that are searched, as in `LEVELS`.
        compared: The methods of the accuracy panel; the names of tuned ones end in "tuned".
        alphas: BiSLS-Adam by alpha_b0.
        betas: BiSLS-Adam by beta_b0.
        own: The default.
    """
    ends = {name: finals(runs) for name, runs in by_level.items()}
    two, lower, upper, none = (ends[name] for name in LEVELS)
    wrong = {name: errors(runs) for name, runs in compared.items()}
    best = min((name for name in wrong if name.endswith("tuned")), key=lambda name: mean(wrong[name]))
    shares = f"share of errors {listed(wrong)}"
    verdicts = [
        claim(
            "The upper search is what matters: with it the final loss is below that without, whether or not the lower level is "
            "searched",
            both(
                learnt(below(two, lower), by_level["both levels"]), learnt(below(upper, none), by_level["upper only"])
            ),
            listed(ends),
            "the upper search is essential",
        ),
        *(
            claim(
                f"{name} is at least as accurate as the best of tuned Adam and SGD",
                learnt(at_most(wrong[name], wrong[best]), compared[name]),
                shares,
                "generalises well",
            )
            for name in METHODS
        ),
        all_alike("BiSLS-Adam from alpha_b0 over three orders", alphas, told="hardly depends on the start"),
        all_alike("BiSLS-Adam from beta_b0 over three orders", betas, told="hardly depends on the start"),
    ]
    best = min(wrong, key=lambda name: mean(wrong[name]))
    numbers = f"share of errors: BiSLS {show(mean(errors(own)))}, best of the others ({best}) {show(mean(wrong[best]))}"
    judgement = learnt(at_most(errors(own), wrong[best]), own)
    accurate = ours("The default is at least as accurate as the best of the others", judgement, numbers)
    return (*verdicts, accurate, own_at_most({**by_level, **alphas, **betas}, own))


FIGURE = Figure(
    name="hyper_more",
    title="Which level to search, accuracy, and starts (hyper-representation)",
    paper="A search at the upper level is essential, one at the lower level less so. BiSLS generalises at least as well as tuned "
    "methods, and hardly depends on where its searches begin.",
    ask=ask,
    data=("mnist",),
)
