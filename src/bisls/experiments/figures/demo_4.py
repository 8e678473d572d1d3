"""Figure demo_4: BiSLS from steps that are far too large against tuned Adam and SGD, and the steps that it finds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from bisls.experiments.base import Asking, Figure, Findings, Plan, RunRecord
from bisls.experiments.bilevel import DEFAULT, OWN, Representation, describe, shown_search
from bisls.experiments.drawing import curve, not_above_start
from bisls.experiments.judging import alike, at_most, claim, listed, mean, show, yes
from bisls.experiments.representation import (
    ALPHA,
    BETA,
    METHODS,
    SPELT,
    finals,
    learnt,
    own_at_most,
    representation,
    searched,
    tuned,
    tuned_runs,
)
from bisls.outcome import Panel, Verdict

MERGED = 2.0  # steps have merged where the largest median is at most 1 + 2 times the smallest
PARTS = {"alpha": "Upper", "beta": "Lower"}


def starts(plan: Plan) -> list[tuple[float, float]]:
    """Where BiSLS-Adam begins: alpha_b0 over three orders at beta_b0 = 100, then the other way round."""
    alphas = plan.pick((100.0,), (0.1, 100.0), (0.1, 1.0, 100.0))
    betas = plan.pick((1.0,), (1.0, 1000.0), (1.0, 10.0, 1000.0))
    return [(ALPHA, BETA), *((alpha, BETA) for alpha in alphas), *((ALPHA, beta) for beta in betas)]


def named(start: tuple[float, float]) -> str:
    """A start as legends have it."""
    return f"from {start[0]:g} / {start[1]:g}"


def compared_runs(plan: Plan) -> dict[str, Representation]:
    """The paper's searches, BiSLS-Adam from other starts, the default."""
    methods = {name: searched(plan, name) for name in METHODS}
    methods |= {named((a, b)): searched(plan, alpha=a, beta=b) for a, b in starts(plan)}
    return {name: representation(plan, 0, method) for name, method in {**methods, OWN: DEFAULT}.items()}


def ask(plan: Plan) -> Asking:
    """Searches and the default; Adam and SGD are tuned at the same time."""
    wanted = compared_runs(plan)
    best, groups = yield from tuned(plan, beside=wanted)
    compared = {name: groups[name] for name in METHODS} | tuned_runs(best)
    begun = {named(start): groups[named(start)] for start in starts(plan)}
    lines = [curve(name, runs, "loss", dashed="tuned" in name) for name, runs in compared.items()]
    lines.append(curve(OWN, groups[OWN], "loss", ours=True))
    alt = "Validation loss against iterations of BiSLS-SGD and BiSLS-Adam, tuned Adam and SGD (dashed), and the default"
    panels = [
        Panel(
            "BiSLS against tuned steps",
            "upper iteration",
            "validation loss",
            tuple(lines),
            yscale="log",
            ylim=not_above_start(lines),
            alt=alt,
        )
    ]
    for part, title in PARTS.items():
        smooth = plan.pick(1, 3, 10)
        lines = [curve(name, runs, part, None, smooth=smooth) for name, runs in begun.items()]
        lines.append(curve(OWN, groups[OWN], part, None, smooth=smooth, ours=True))
        title = f"{title} steps of BiSLS-Adam from different starts (alpha_b0 / beta_b0)"
        alt = f"Step {part} against iterations, one curve for each start of BiSLS-Adam, and that of the default"
        panels.append(Panel(title, "upper iteration", f"step {part}", tuple(lines), yscale="log", alt=alt))
    settings = describe(
        wanted["BiSLS-Adam"], **{
            "searches": shown_search(searched(plan)),
            "tuned on seed 0": "; ".join(f"{SPELT[method]}: {one}" for method, one in best.items()),
        },
    )  # fmt: skip
    return Findings(tuple(panels), judge(compared, begun, groups[OWN], best["adam"].pair[0]), settings)


def judge(
    compared: Mapping[str, Sequence[RunRecord]],
    begun: Mapping[str, Sequence[RunRecord]],
    own: Sequence[RunRecord],
    tuned_alpha: float,
) -> tuple[Verdict, ...]:
    """BiSLS-Adam against the best tuned method; its steps from different starts merge, and fall.

    Args:
        compared: The methods of the first panel; the names of tuned ones end in "tuned".
        begun: BiSLS-Adam by start.
        own: The default.
        tuned_alpha: The upper step of tuned Adam.
    """
    ends = {name: finals(runs) for name, runs in compared.items()}
    best = min((name for name in ends if name.endswith("tuned")), key=lambda name: mean(ends[name]))
    verdicts = [
        claim(
            "BiSLS-Adam ends at or below the best of tuned Adam and SGD",
            learnt(at_most(ends["BiSLS-Adam"], ends[best]), compared["BiSLS-Adam"]),
            f"{listed(ends)}; its first trial is {np.log10(ALPHA / tuned_alpha):.1f} orders above the step of tuned Adam",
            "tuned Adam: beta of order 1, alpha of order 1e-4; the start 5 orders above",
        )
    ]
    for part, title in PARTS.items():
        early = {name: [_median(run, part, 0.0, 0.1) for run in runs] for name, runs in begun.items()}
        late = {name: [_median(run, part, 0.75, 1.0) for run in runs] for name, runs in begun.items()}
        judgement, ratio = alike(late, MERGED)
        verdicts.append(
            claim(
                f"{title} steps from starts over three orders merge: over the last quarter their medians differ by less than "
                f"a factor of {1 + MERGED:g}",
                learnt(judgement, *begun.values()),
                f"{listed(late)}; largest / smallest {show(ratio)}",
                "starts that span 3 orders",
            )
        )
        falls = yes(all(mean(early[name]) > mean(late[name]) for name in begun))
        numbers = "; ".join(f"{name} {show(mean(early[name]))}, {show(mean(late[name]))}" for name in begun)
        statement = (
            f"{title} steps are large early and decay: the median of the first tenth is above that of the last quarter"
        )
        verdicts.append(
            claim(statement, learnt(falls, *begun.values()), numbers, "large early; they decay with training")
        )
    return (*verdicts, own_at_most(compared, own))


def _median(run: RunRecord, part: str, start: float, end: float) -> float:
    """The median step of a part of the run; infinite for a run that was lost."""
    steps = run.curve(part)
    first = int(start * len(steps))
    lost = run.error or not len(steps)
    return float("inf") if lost else float(np.median(steps[first : max(first + 1, round(end * len(steps)))]))


FIGURE = Figure(
    name="demo_4",
    title="BiSLS against tuned Adam and SGD (hyper-representation)",
    paper="Started five orders of magnitude above the step of tuned Adam, BiSLS-Adam ends lower than tuned Adam and SGD. From "
    "whatever start, it finds large steps early, and they decay by themselves.",
    ask=ask,
    data=("mnist",),
)
