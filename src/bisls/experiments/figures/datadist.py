"""Figure datadist: BiSLS-SGD against tuned Adam and SGD on distillation, and the learnt pictures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from math import inf, isfinite

import numpy as np

from bisls.experiments.asking import gather
from bisls.experiments.base import Asking, Figure, Findings, Plan, RunRecord
from bisls.experiments.bilevel import DEFAULT, OWN, describe, pictures, shown_search, shown_solver
from bisls.experiments.distillation import (
    CONSTANT,
    IDENTITY,
    LOWER,
    NEUMANN,
    Groups,
    album,
    distillation,
    exacts,
    finals,
    grid,
    learnt,
    learnt_pictures,
    losses,
    own_verdicts,
    recognised,
    reference,
    searched,
    seeds,
    tuned,
)
from bisls.experiments.drawing import curve
from bisls.experiments.judging import at_most, below, both, claim, listed, mean, ours, show, yes
from bisls.outcome import Panel, Verdict

SLS = "BiSLS-SGD"
LINEAR = {"Neumann": NEUMANN, "identity": IDENTITY}
LONG = {SLS: f"{SLS}, long", OWN: f"{OWN}, long"}  # the runs for the pictures
FIXED, FREE = f"with beta = {LOWER:g}", "with both steps tuned"
MOST = 8  # of ten pictures


def ask(plan: Plan) -> Asking:
    """Adam and SGD tuned with either hypergradient, BiSLS-SGD with it, the default; two long runs for the pictures."""
    rivals: dict[str, dict[str, Groups]] = {}
    chosen = []
    for linear, hypergrad in LINEAR.items():
        grids = {
            f"{name}, {short}": (method.but(hypergrad=hypergrad), grid(plan, name, beta))
            for short, beta in ((f"beta {LOWER:g}", LOWER), ("tuned", None))
            for name, method in CONSTANT.items()
        }
        best = yield from tuned(plan, grids)
        chosen += [f"{linear}: {name} {one}" for name, one in best.items()]
        rivals[linear] = {
            reading: {name: one.runs for name, one in best.items() if name.endswith("tuned") == (reading == FREE)}
            for reading in (FIXED, FREE)
        }
    long = {"steps": plan.pick(12, 600, 3000, standard=3000), "every": plan.pick(6, 100, 250), "pictures": True}
    wanted = {linear: seeds(plan, searched(plan, hypergrad=hypergrad)) for linear, hypergrad in LINEAR.items()}
    wanted[OWN] = seeds(plan, DEFAULT)
    both_long = {SLS: searched(plan), OWN: DEFAULT}
    wanted |= {LONG[name]: [distillation(plan, 0, method, **long)] for name, method in both_long.items()}
    found = yield from gather(wanted)
    panels = [
        losses(
            linear.capitalize(), {SLS: found[linear], **rivals[linear][FIXED], **rivals[linear][FREE]}, found[OWN],
            f"Validation loss over iterations, {linear}: BiSLS-SGD, Adam and SGD with tuned steps, and the default.",
            tuple(rivals[linear][FIXED]),
        )
        for linear in LINEAR
    ]  # fmt: skip
    lines = tuple(curve(name, found[LONG[name]], "accuracy", ours=name == OWN) for name in LONG)
    alt = "Accuracy on unseen digits of a model trained to the end on the learnt pictures, over the iterations of the long runs."
    panels.append(
        Panel("Training on the learnt pictures", "upper iteration", "accuracy on unseen digits", lines, alt=alt)
    )
    after = f"after {long['steps']} iterations"
    longs = {name: found[own][0] for name, own in LONG.items()}
    albums = tuple(album(f"{name} {after}", record) for name, record in longs.items())
    verdicts = judge_losses(rivals, {linear: found[linear] for linear in LINEAR}, found[OWN])
    data = wanted[OWN][0].data
    verdicts += judge_pictures(longs, class_means(data), reference(data, plan.reading.distillation))
    settings = describe(
        wanted["identity"][0],
        hypergradient=f"(a) {shown_solver(NEUMANN.linear)}, (b) identity, (c) identity; the default uses CG throughout",
        tuned="; ".join(chosen) + "; by the final loss on the first seed",
        BiSLS=shown_search(searched(plan)),
        pictures=f"{after} (3000 in the paper), one seed, each drawn from its darkest to its brightest value",
        deviations=f"the paper does not say whether the tuned methods have beta = {LOWER:g} here as in its figure for T = 50: "
        "both are run; it does not say which hypergradient made the pictures",
    )
    return Findings(tuple(panels), verdicts, settings, albums)


def class_means(data: str) -> np.ndarray:
    """The mean picture of each class, one a row."""
    images, labels, _, _ = pictures(data)
    return np.stack([images[labels == digit].mean(axis=0).ravel() for digit in range(10)])


def judge_losses(
    rivals: Mapping[str, Mapping[str, Groups]], searches: Groups, default: Sequence[RunRecord]
) -> tuple[Verdict, ...]:
    """BiSLS-SGD against the tuned methods at the last iteration, for each hypergradient and each way of tuning."""
    verdicts, everything = [], {}
    for linear, readings in rivals.items():
        runs = searches[linear]
        everything[f"{SLS}, {linear}"] = runs
        for reading, groups in readings.items():
            ends = {name: finals(own) for name, own in groups.items()}
            judgement = learnt(both(*(below(finals(runs), values) for values in ends.values())), runs)
            statement = f"BiSLS-SGD ends below Adam and SGD {reading} ({linear})"
            numbers = f"{SLS} {show(mean(finals(runs)))} (F(x) {show(mean(exacts(runs)))}), {listed(ends)}"
            verdicts.append(claim(statement, judgement, numbers, "BiSLS-SGD converges much faster"))
            everything |= {f"{name}, {linear}": own for name, own in groups.items()}
    return (*verdicts, *own_verdicts(default, everything))


def judge_pictures(runs: Mapping[str, RunRecord], means: np.ndarray, plain: float) -> tuple[Verdict, ...]:
    """What "looks like its digit" is taken for: the own class mean is the nearest one; and a model can be trained on them.

    Args:
        runs: The long run of each method.
        means: The mean picture of each class.
        plain: The accuracy of a model that was trained on mean pictures.
    """
    verdicts = []
    for name, record in runs.items():
        say = ours if name == OWN else partial(claim, told="realistic digits after 3000 iterations")
        rows = learnt_pictures(record)
        lost = record.error or rows.shape != means.shape
        count = 0 if lost else recognised(rows, means)
        statement = (
            f"{name}: at least {MOST} of the 10 learnt pictures correlate most with the mean picture of their own digit"
        )
        verdicts.append(say(statement, yes(count >= MOST), f"{count} of 10"))
        reached = record.last("accuracy")
        statement = (
            f"{name}: a model trained on the learnt pictures reads at least as many unseen digits as one trained on the ten "
            "class means (our reference, not the paper's)"
        )
        shown = f"accuracy {show(reached)}, of the class means {show(plain)}"
        verdicts.append(say(statement, at_most([wrong(reached)], [wrong(plain)]), shown))
    return tuple(verdicts)


def wrong(accuracy: float) -> float:
    """The share of errors; infinite for a run that was lost."""
    return 1 - accuracy if isfinite(accuracy) else inf


FIGURE = Figure(
    name="datadist",
    title="BiSLS-SGD and tuned steps; the learnt pictures (distillation)",
    paper="BiSLS-SGD converges much faster than Adam and SGD with tuned steps, with the Neumann series as with the identity, and "
    "the ten pictures that it learns look like digits.",
    ask=ask,
    data=("mnist",),
)
