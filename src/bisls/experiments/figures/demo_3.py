"""Figure demo_3: BiSPS against SGD with decaying steps on distillation, over where both begin."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import inf, isfinite

from bisls.experiments.asking import gather
from bisls.experiments.base import Asking, Figure, Findings, Plan, RunRecord
from bisls.experiments.bilevel import DEFAULT, OWN, describe
from bisls.experiments.distillation import (
    IDENTITY,
    LOWER,
    NEUMANN,
    ceilings,
    decaying,
    exacts,
    finals,
    losses,
    own_verdicts,
    polyak,
    seeds,
)
from bisls.experiments.evidence import DECIDES, informative, initial, left_out, polyak_share, uninformative
from bisls.experiments.judging import at_most, below, claim, listed, mean, show
from bisls.outcome import Verdict

SPS, SGD = "BiSPS", "decaying SGD"
METHODS = {SPS: polyak, SGD: decaying}
LINEAR = {"identity": IDENTITY, "Neumann": NEUMANN}

Runs = Mapping[tuple[str, str, float], Sequence[RunRecord]]
ByCeiling = Mapping[float, Sequence[RunRecord]]


def ask(plan: Plan) -> Asking:
    """Both methods from each alpha_b0 with both hypergradients; the default with nothing set."""
    keys = [(linear, method, alpha) for linear in LINEAR for method in METHODS for alpha in ceilings(plan)]
    wanted = {_name(*key): seeds(plan, METHODS[key[1]](key[2], hypergrad=LINEAR[key[0]])) for key in keys}
    wanted[OWN] = seeds(plan, DEFAULT)
    found = yield from gather(wanted)
    runs = {key: found[_name(*key)] for key in keys}
    panels = []
    for linear in LINEAR:
        lines = {f"{m}, {a:g}": own for (which, m, a), own in runs.items() if which == linear}
        alt = f"Validation loss over iterations for each alpha_b0 and both methods, {linear}; BiSPS full, SGD dashed."
        dashed = [name for name in lines if name.startswith(SGD)]
        panels.append(
            losses(f"{linear.capitalize()}: BiSPS and decaying SGD by alpha_b0", lines, found[OWN], alt, dashed)
        )
    settings = describe(
        wanted[_name(*keys[0])][0],
        hypergradient="H^-1 taken for the identity, and the sum of 10 Neumann terms (scaled by a measured 1/L)",
        steps=f"alpha_b0 in {', '.join(f'{a:g}' for a in ceilings(plan))}, over sqrt(k + 1); below, {LOWER:g} for ever",
        default="the package's BiSLS with its own steps at both levels and CG: it does not keep the small lower step",
        deviations="the paper names 10 and 50 alone; with a lower step of 1e-4 y follows x slowly, so F(x) is judged too",
    )
    return Findings(tuple(panels), judge(runs, found[OWN]), settings, seen=remarks(runs))


def remarks(runs: Runs) -> str:
    """From where the two methods are one."""
    same = sorted({alpha for (_, method, alpha), own in runs.items() if method == SPS and polyak_share(own) < DECIDES})
    if not same:
        return ""
    return (
        f"From alpha_b0 = {', '.join(f'{alpha:g}' for alpha in same)} the Polyak step is nearly always above its ceiling (with "
        "one hypergradient at least): there BiSPS is decaying SGD, and a comparison says nothing."
    )


def _name(linear: str, method: str, alpha: float) -> str:
    return f"{linear}: {method}, {alpha:g}"


def judge(runs: Runs, default: Sequence[RunRecord]) -> tuple[Verdict, ...]:
    """At each alpha_b0 one end against the other, in f(x, y) and in F(x); the range of the ends over alpha_b0, seed by seed."""
    verdicts = []
    for linear in LINEAR:
        sps, sgd = (
            {alpha: own for (which, m, alpha), own in runs.items() if (which, m) == (linear, method)}
            for method in METHODS
        )
        verdicts += [
            _each(sps, sgd, finals, f"{linear}; f(x, y)"),
            _each(sps, sgd, exacts, f"{linear}; F(x), the lower problem solved"),
            _spread(sps, sgd, linear),
        ]
    return (*verdicts, *own_verdicts(default, {_name(*key): own for key, own in runs.items()}))


def _each(sps: ByCeiling, sgd: ByCeiling, value: Callable[[Sequence[RunRecord]], list[float]], what: str) -> Verdict:
    """An alpha_b0 from which the Polyak step hardly ever decides, or neither method gets anywhere, is not counted."""
    ends = {
        name: {alpha: value(own) for alpha, own in by.items()} for name, by in zip(METHODS, (sps, sgd), strict=True)
    }
    reasons, judgements = [], []
    for alpha, own in sps.items():
        pair = ends[SPS][alpha], ends[SGD][alpha]
        reason = uninformative([own], initial(own, sgd[alpha]), *pair)
        reasons.append((f"{alpha:g}", reason))
        judgements.append((at_most(*pair), reason))
    numbers = "; ".join(
        f"{name} {listed({f'{alpha:g}:': values for alpha, values in by.items()})}" for name, by in ends.items()
    )
    statement = f"BiSPS ends at or below decaying SGD from each alpha_b0 where the Polyak step decides ({what})"
    return claim(
        statement, informative(judgements), f"{numbers}; {_shares(sps)}{left_out(reasons)}", "better than decaying SGD"
    )


def _spread(sps: ByCeiling, sgd: ByCeiling, what: str) -> Verdict:
    """Undecided where the Polyak step hardly ever decides from any alpha_b0, or BiSPS gets nowhere from all of them."""
    ends = {alpha: finals(own) for alpha, own in sps.items()}
    wide, other = spread(ends), spread({alpha: finals(own) for alpha, own in sgd.items()})
    reason = uninformative(list(sps.values()), initial(*sps.values()), *ends.values())
    statement = f"The final losses of BiSPS spread less over alpha_b0 than those of decaying SGD ({what})"
    numbers = f"BiSPS {show(mean(wide))}, decaying SGD {show(mean(other))}; {_shares(sps)}"
    shown = numbers + left_out([("all", reason)])
    return claim(statement, informative([(below(wide, other), reason)]), shown, "varies less over alpha_b0")


def _shares(sps: ByCeiling) -> str:
    return (
        f"iterations below the ceiling (Polyak decides) {', '.join(f'{polyak_share(own):.0%}' for own in sps.values())}"
    )


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
