"""Figure sample_hyper: BiSPS with one and with two samples against decaying SGD."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from bisls.experiments.asking import over_seeds
from bisls.experiments.base import Asking, Figure, Findings, Plan, RunRecord
from bisls.experiments.bilevel import DEFAULT, OWN, describe
from bisls.experiments.drawing import curve, not_above_start
from bisls.experiments.evidence import informative, initial, left_out, polyak_share, uninformative
from bisls.experiments.judging import claim, mean, show
from bisls.experiments.method import Method
from bisls.experiments.representation import (
    ALIKE,
    CG10,
    CONSTANT,
    finals,
    own_at_most,
    representation,
    similar,
    tuned,
)
from bisls.methods import BiSPS
from bisls.outcome import Panel, Verdict
from bisls.solver import Solver
from bisls.steps import Constant, Decay

LOWER = 10.0  # the paper's constant lower step
TOLD = "alike with beta = 10; from alpha_b0 = 0.1 two samples are even better"
Runs = Mapping[float, Mapping[str, Sequence[RunRecord]]]


def methods(alpha: float, beta: float) -> dict[str, Method[Solver]]:
    """Those that are compared, from alpha_b0, with a constant lower step."""
    lower = Constant(beta)
    one = Method(BiSPS, alpha=alpha, hypergrad=CG10, lower_step=lower)
    decaying = CONSTANT["sgd"].but(upper_step=Decay(alpha), lower_step=lower)
    return {"BiSPS, one sample": one, "BiSPS, two samples": one.but(samples=2), "decaying SGD": decaying}


def ask(plan: Plan) -> Asking:
    """Every method at every alpha_b0, with the paper's lower step and with the one that tuning finds for SGD."""
    alphas = plan.pick((0.1,), (0.1, 1.0, 10.0), (0.1, 1.0, 10.0))
    best, found = yield from tuned(plan, ("sgd",), {OWN: representation(plan, 0, DEFAULT)})
    own, second = found[OWN], best["sgd"].pair[1]
    lowers = (LOWER,) if second == LOWER else (LOWER, second)
    wanted = {
        (beta, alpha, name): representation(plan, 0, method)
        for beta in lowers for alpha in alphas for name, method in methods(alpha, beta).items()
    }  # fmt: skip
    groups = yield from over_seeds(plan.each_seed, wanted)
    by_beta: dict[float, dict[float, dict[str, list[RunRecord]]]] = {beta: {a: {} for a in alphas} for beta in lowers}
    for (beta, alpha, name), one in groups.items():
        by_beta[beta][alpha][name] = one
    panels = []
    for beta, runs in by_beta.items():
        lines = [
            curve(f"{name}, {alpha:g}", one, "loss", dashed="SGD" in name)
            for alpha, named in runs.items() for name, one in named.items()
        ]  # fmt: skip
        lines.append(curve(OWN, own, "loss", ours=True))
        title = f"Lower step {beta:g}; methods and alpha_b0"
        alt = f"Validation loss of BiSPS and decaying SGD for each alpha_b0 with constant lower step {beta:g}, and of the default"
        panels.append(
            Panel(
                title,
                "upper iteration",
                "validation loss",
                tuple(lines),
                yscale="log",
                ylim=not_above_start(lines),
                alt=alt,
            )
        )
    settings = describe(
        next(iter(wanted.values())), **{
            "methods": "alpha_k at most alpha_b0 / sqrt(k + 1); decaying SGD has that very step",
            "lower step": f"constant, {LOWER:g} as in the paper"
            + (", as tuning finds for SGD too" if second == LOWER else f", and {second:g}, which tuning finds for SGD here"),
            "two samples": "loss and hypergradient norm for the step from an independent upper batch",
        },
    )  # fmt: skip
    return Findings(tuple(panels), judge(by_beta, own), settings)


def judge(by_beta: Mapping[float, Runs], own: Sequence[RunRecord]) -> tuple[Verdict, ...]:
    """One and two samples are alike at every alpha_b0; where neither gets anywhere, or both are decaying SGD, none counts."""
    verdicts: list[Verdict] = []
    everything: dict[str, Sequence[RunRecord]] = {}
    for beta, runs in by_beta.items():
        judgements, numbers, silences = [], [], []
        for alpha, named in runs.items():
            ends = {name: finals(one) for name, one in named.items()}
            polyak = {name: one for name, one in named.items() if name.startswith("BiSPS")}
            reason = uninformative(list(polyak.values()), initial(*polyak.values()), *(ends[name] for name in polyak))
            judgements.append((similar(polyak)[0], reason))
            silences.append((f"{alpha:g}", reason))
            share = " and ".join(f"{polyak_share(one):.0%}" for one in polyak.values())
            shown = " / ".join(show(mean(values)) for values in ends.values())
            numbers.append(f"alpha_b0 = {alpha:g}: {shown} (Polyak decides in {share} of the iterations)")
            everything |= {f"{name}, beta {beta:g}, alpha_b0 {alpha:g}": one for name, one in named.items()}
        statement = (
            f"With lower step {beta:g}, one and two samples end within {ALIKE:.0%} of each other at every alpha_b0 "
            "where the Polyak step decides"
        )
        shown = f"one sample / two samples / decaying SGD: {'; '.join(numbers)}{left_out(silences)}"
        verdicts.append(claim(statement, informative(judgements), shown, TOLD if beta == LOWER else "beta = 10 alone"))
    return (*verdicts, own_at_most(everything, own))


FIGURE = Figure(
    name="sample_hyper",
    title="BiSPS with one and two samples (hyper-representation)",
    paper="Whether the step of BiSPS comes from the batch of the hypergradient or from another one makes little difference.",
    ask=ask,
    data=("mnist",),
)
