"""The rates of Theorems 1 to 3, measured on problems that meet their assumptions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from bisls import optim
from bisls.experiments.asking import gather
from bisls.experiments.base import Asking, Figure, Findings, Plan, RunRecord
from bisls.experiments.drawing import curve
from bisls.experiments.judging import claim, ours
from bisls.experiments.rates import (
    CONTROLS,
    DEFAULTS,
    EXPONENTS,
    OCTAVES,
    Fit,
    RateRun,
    Rule,
    fit,
    marks,
)
from bisls.experiments.stochastic import Groups
from bisls.methods import Alternating, BiSLS, BiSPS
from bisls.outcome import Judgement, Panel, Series, Verdict

CASES: tuple[dict[str, Any], ...] = (
    *({"theorem": t, "rule": rule, "samples": n} for t in (1, 2) for rule in (optim.SPSB, optim.SLSB) for n in (2, 1)),
    *({"theorem": t, "rule": rule, "samples": 1} for t in (1, 2) for rule in (optim.SPSMax, optim.Auto)),
    *({"theorem": 3, "rule": BiSPS, "samples": n, "convex": convex} for convex in (True, False) for n in (2, 1)),
    {"theorem": 3, "rule": BiSPS, "samples": 2, "lower_iters": 10},
    {"theorem": 3, "rule": Alternating, "samples": 1, "lower_iters": 10},
    {"theorem": 3, "rule": BiSLS, "samples": 1},
)
LONG = [case for case in CASES if case["rule"] is BiSPS][1:]  # left out of the smallest scale
TITLES = {1: "Theorem 1: convex", 2: "Theorem 2: strongly convex", 3: "Theorem 3: bi-level"}
MANY = 96  # seeds that leave an s.e. of 0.025 where slopes differ by 0.24 from seed to seed
TOLD = {1: "log K / sqrt K", 2: "log K / K", 3: "log K / sqrt K"}
TURNED = {Judgement.HOLDS: Judgement.FAILS, Judgement.FAILS: Judgement.HOLDS, Judgement.UNDECIDED: Judgement.UNDECIDED}


def ask(plan: Plan) -> Asking:
    """All rules and controls; several seeds at every scale, since the standard error comes from them."""
    several, noisy = max(plan.seeds, plan.pick(2, 4, 5)), plan.pick(2, 4, MANY, standard=MANY)
    single, upper = plan.pick(2**7, 2**12, 2**13), plan.pick(2**6, 2**9, 2**10)
    cases = [case for case in CASES if plan.scale != "smoke" or case not in LONG]
    lengths = {1: single, 2: single, 3: upper}
    wanted = [RateRun(0, steps=lengths[case["theorem"]], **case) for case in cases]
    groups = yield from gather(
        {label(run): [replace(run, seed=i) for i in range(max(several, noisy if _noisy(run) else 0))] for run in wanted}
    )
    settings = {
        "iterations": f"K up to {single} (Theorems 1 and 2) and {upper} (Theorem 3)",
        "how many seeds": f"{several}, and {max(several, noisy)} of SPSB and SLSB where Theorem 2 is judged",
        "slopes": f"of log(mean over seeds) against log K over the last {OCTAVES} octaves, standard error by the jackknife",
        "holds": "where the slope is two s.e. below that of the theorem's own bound, log K and all, over these K; it fails where "
        "it is two s.e. above, and is undecided between and where a run was lost",
        **numbers(groups),
    }
    return Findings(panels(groups), judge(groups), settings, seen=remarks(groups))


def _noisy(run: RateRun) -> bool:
    """Whether slopes differ so much from seed to seed that a few say nothing."""
    return run.theorem == 2 and run.rule not in (*CONTROLS, *DEFAULTS)


def label(run: RateRun) -> str:
    """The name of a case."""
    theorem, rule, samples = run.theorem, run.rule, run.samples
    if rule in DEFAULTS:
        return f"Theorem {theorem}: {rule.__name__}, nothing set"
    name = f"Theorem {theorem}: {'constant steps' if rule is Alternating else rule.__name__}"
    if theorem == 3:
        name += f", F {'' if run.convex else 'not '}convex, T = {run.settings()['T']:g}"
    return name if rule in CONTROLS else f"{name}, {samples} sample{'s' * (samples > 1)}"


def numbers(groups: Groups) -> dict[str, str]:
    """The step sizes of the theorems' rules."""
    shown = {}
    for theorem in EXPONENTS:
        first = next(runs[0] for runs in groups.values() if runs[0].config["theorem"] == theorem)
        shown[f"theorem {theorem}"] = ", ".join(f"{name} {value:.3g}" for name, value in first.numbers.items())
    return shown


def panels(groups: Groups) -> tuple[Panel, ...]:
    """One for each theorem, with its exponent as a dashed line."""
    drawn = []
    for theorem, exponent in EXPONENTS.items():
        own = {name: runs for name, runs in groups.items() if runs[0].config["theorem"] == theorem}
        lines = [
            curve(name.split(": ", 1)[1], runs, "value", "K", ours=_among(runs, DEFAULTS), points=True)
            for name, runs in own.items()
        ]
        ks = marks(next(iter(own.values()))[0].config["steps"])
        begun = [line.y[0] for line in lines if line.y and np.isfinite(line.y[0])]
        top = 1.5 * max(begun, default=1.0)
        falls = tuple(top * (k / ks[0]) ** exponent for k in ks)
        lines.append(Series(f"K^{exponent:g}", tuple(map(float, ks)), falls, dashed=True))
        what = "mean of ||grad F||^2" if theorem == 3 else "f(mean iterate) - f*"
        alt = f"{TITLES[theorem]}: {what} against K for each rule, beside a line of slope {exponent:g}."
        drawn.append(Panel(TITLES[theorem], "K", what, tuple(lines), "log", "log", alt=alt))
    return tuple(drawn)


def _among(runs: Sequence[RunRecord], rules: Sequence[Rule]) -> bool:
    return runs[0].config["rule"] in [rule.__name__ for rule in rules]


def slope(runs: Sequence[RunRecord]) -> Fit:
    """The slope of one case; a run that was lost leaves none."""
    n = min(len(run.curves[name]) for run in runs for name in ("K", "value"))
    return fit(runs[0].curve("K")[:n], np.stack([run.curve("value")[:n] for run in runs]))


def remarks(groups: Groups) -> str:
    """The slopes of the theorems' own bounds over these K."""
    factors = {runs[0].config["theorem"]: slope(runs).log_factor for runs in groups.values()}
    shown = ", ".join(
        f"{EXPONENTS[theorem] + factor:.3f} (Theorem {theorem})"
        for theorem, factor in sorted(factors.items())
        if np.isfinite(factor)
    )
    if not shown:
        return ""
    return f"Over the K of the fits the theorems' own bounds, log K and all, have slopes of {shown}."


def told(runs: Sequence[RunRecord]) -> str:
    """What the theorem has; it asks for two samples."""
    config = runs[0].config
    return TOLD[config["theorem"]] + ("" if config["samples"] == 2 else " with two samples; one does alike")


def judge(groups: Groups) -> tuple[Verdict, ...]:
    """Each rule against its theorem's rate; controls must miss it."""
    verdicts = []
    for name, runs in groups.items():
        theorem, found = runs[0].config["theorem"], slope(runs)
        judged, text = found.judged(EXPONENTS[theorem]), f"slope {found.slope:.3f} +- {found.error:.3f}"
        if not np.isfinite(found.slope):
            text = "no slope: not all values are finite and above 0"
        if _among(runs, CONTROLS):
            verdicts.append(claim(f"{name} (control): misses {TOLD[theorem]}", TURNED[judged], text))
        elif _among(runs, DEFAULTS):
            verdicts.append(ours(f"{name}: falls at least as {TOLD[theorem]}", judged, text))
        else:
            verdicts.append(claim(f"{name}: falls at least as {TOLD[theorem]}", judged, text, told(runs)))
    return tuple(verdicts)


FIGURE = Figure(
    name="rates",
    title="Rates of convergence",
    paper="With two samples SPSB and SLSB converge as log K / sqrt K (convex) and log K / K (strongly convex), and BiSPS drives "
    "the mean squared gradient of F down as log K / sqrt K.",
    ask=ask,
)
