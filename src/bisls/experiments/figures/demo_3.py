"""Figure demo_3: BiSPS against SGD with decaying steps on distillation, over where both begin."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import inf, isfinite

from bisls.experiments.base import Asking, Figure, Findings, Plan, RunRecord
from bisls.experiments.bilevel import describe
from bisls.experiments.distillation import (
    DEFAULT,
    LOWER,
    ceilings,
    enveloped,
    finals,
    gather,
    held,
    losses,
    own_verdicts,
    seeds,
)
from bisls.experiments.judging import at_most, below, both, claim, listed, mean, show
from bisls.outcome import Verdict

METHODS = {"bisps": "BiSPS", "sgd-decay": "decaying SGD"}
LINEAR = {"identity": "identity", "neumann": "Neumann"}

Runs = Mapping[tuple[str, str, float], Sequence[RunRecord]]


def ask(plan: Plan) -> Asking:
    """Both methods from each alpha_b0 with both hypergradients; the default with nothing set."""
    keys = [(linear, method, alpha) for linear in LINEAR for method in METHODS for alpha in ceilings(plan)]
    wanted = {_name(*key): enveloped(plan, key[1], key[2], linear=key[0]) for key in keys}
    wanted[DEFAULT] = seeds(plan, DEFAULT)
    found = yield from gather(wanted)
    runs = {key: found[_name(*key)] for key in keys}
    panels = []
    for linear, shown in LINEAR.items():
        lines = {f"{METHODS[m]}, {a:g}": own for (which, m, a), own in runs.items() if which == linear}
        alt = f"Validation loss over iterations for each alpha_b0 and both methods, {shown}; BiSPS full, SGD dashed."
        dashed = [name for name in lines if name.startswith(METHODS["sgd-decay"])]
        panels.append(
            losses(f"{shown.capitalize()}: BiSPS and decaying SGD by alpha_b0", lines, found[DEFAULT], alt, dashed)
        )
    settings = describe(
        wanted[_name(*keys[0])][0],
        hypergradient="H^-1 taken for the identity, and the sum of 10 Neumann terms (scaled by a measured 1/L)",
        steps=f"alpha_b0 in {', '.join(f'{a:g}' for a in ceilings(plan))}, over sqrt(k + 1); below, {LOWER:g} for ever",
        default="the package's BiSLS with its own steps at both levels and CG: it does not keep the small lower step",
        deviations="the paper names 10 and 50 alone; with a lower step of 1e-4 y follows x slowly, so F(x) is judged too",
    )
    return Findings(tuple(panels), judge(runs, found[DEFAULT]), settings)


def _name(linear: str, method: str, alpha: float) -> str:
    return f"{LINEAR[linear]}: {METHODS[method]}, {alpha:g}"


def judge(runs: Runs, default: Sequence[RunRecord]) -> tuple[Verdict, ...]:
    """At each alpha_b0 one end against the other; the range of the ends over alpha_b0, seed by seed."""
    verdicts = []
    for linear, shown in LINEAR.items():
        ends = {
            method: {alpha: finals(own) for (which, m, alpha), own in runs.items() if (which, m) == (linear, method)}
            for method in METHODS
        }
        sps, sgd = ends["bisps"], ends["sgd-decay"]
        shares = ", ".join(f"{held(runs[linear, 'bisps', alpha]):.0%}" for alpha in sps)
        numbers = "; ".join(
            f"{METHODS[method]} {listed({f'{alpha:g}:': values for alpha, values in own.items()})}"
            for method, own in ends.items()
        )
        each = both(*(at_most(sps[alpha], sgd[alpha]) for alpha in sps))
        statement = f"BiSPS ends at or below decaying SGD from each alpha_b0 ({shown})"
        verdicts.append(claim(statement, each, f"{numbers}; iterations below the ceiling (Polyak decides) {shares}"))
        wide = {method: spread(own) for method, own in ends.items()}
        text = f"BiSPS {show(mean(wide['bisps']))}, decaying SGD {show(mean(wide['sgd-decay']))}"
        statement = f"The final losses of BiSPS spread less over alpha_b0 than those of decaying SGD ({shown})"
        verdicts.append(claim(statement, below(wide["bisps"], wide["sgd-decay"]), text))
    return (*verdicts, *own_verdicts(default, {_name(*key): own for key, own in runs.items()}))


def spread(ends: Mapping[float, Sequence[float]]) -> list[float]:
    """The largest less the smallest end over alpha_b0, for each seed; infinite where a run was lost."""
    columns = zip(*ends.values(), strict=True)
    return [max(column) - min(column) if all(map(isfinite, column)) else inf for column in columns]


FIGURE = Figure(
    name="demo_3",
    title="BiSPS and decaying steps (distillation)",
    paper="With Polyak steps under a decaying ceiling the loss falls further than with the ceiling itself as the step, and it "
    "depends less on where the ceiling begins; so with the identity as with the Neumann series for the inverse Hessian.",
    ask=ask,
    data=("mnist",),
)
