# ruff: noqa: E501
"""Outcomes that nobody measured: every feature of a report, and some that look like results."""

from __future__ import annotations

from math import inf, nan

import numpy as np

from bisls.outcome import Judgement, Outcome, Panel, Pictures, Series, Table, Verdict

HOLDS, FAILS, UNDECIDED = Judgement.HOLDS, Judgement.FAILS, Judgement.UNDECIDED
NASTY = "<script>alert('x')</script> & \"quotes\" | `code` $\\frac{$ url(#p1) 步长 αβ ∇f ☃"


def facts(commit="1a2b3c4d5e", **more):
    return {
        "bisls": "0.1.0", "torch": "2.13.0", "numpy": "2.3.1", "python": "3.12.4", "commit": commit,
        "newest": "2025-03-02", "seeds": [0, 1, 2], "runs": 42, "CPU seconds": 1234.5678, **more,
    }  # fmt: skip


def curve(label, rate, noise=0.05, seed=0, n=400, floor=0.02, **more):
    draw = np.random.default_rng(seed)
    k = np.arange(1, n + 1)
    y = floor + np.exp(-rate * k / n) * np.exp(noise * draw.standard_normal(n)) + noise * 0.02
    more = {"low": tuple(y * 0.8), "high": tuple(y * 1.25), **more}
    return Series(label, tuple(map(float, k)), tuple(y), **more)


def realistic() -> tuple[Outcome, ...]:
    """What a reproduction may look like."""
    draw = np.random.default_rng(1)
    losses = Panel(
        "Training loss on w8a",
        "iteration",
        "f(x) − f*",
        (
            curve("SGD, γ = 0.1", 2.0, seed=1),
            curve("SGD, γ = 1", 4.0, 0.3, seed=2, floor=0.06),
            curve("SPSmax", 3.0, 0.5, seed=3, floor=0.1),
            curve("DecSPS", 3.4, 0.1, seed=4),
            curve("SPSB", 5.0, 0.1, seed=5, floor=0.012),
            curve("Auto (nothing set)", 6.0, 0.05, seed=6, floor=0.008, ours=True),
            Series("1/√k", tuple(np.arange(1.0, 401)), tuple(1 / np.sqrt(np.arange(1.0, 401))), dashed=True),
        ),
        yscale="log",
    )
    rule = np.geomspace(1e-4, 10, 11)
    starts = Panel(
        "Sensitivity to the first step",
        "first upper step α₀",
        "validation loss at the end",
        (
            Series("Adam", tuple(rule), tuple(0.3 + 0.25 * np.log10(rule / 0.02) ** 2), points=True),
            Series("SGD", tuple(rule[:8]) + tuple(rule[8:]), (*(0.5 + 0.2 * np.log10(rule[:8] / 0.1) ** 2), nan, nan, inf), points=True),
            Series("BiSLS-Adam", tuple(rule), tuple(0.31 + 0.01 * draw.random(11)), points=True, ours=True),
        ),
        xscale="log",
        ylim=(0.2, 1.6),
    )  # fmt: skip
    angle = np.linspace(0, 9, 120)
    path = Panel(
        "Paths in the plane",
        "x₁",
        "x₂",
        (
            Series("gradient descent", tuple(np.cos(angle) * np.exp(-angle / 6)), tuple(np.sin(angle) * np.exp(-angle / 6))),
            Series("BiSLS", (1.0, 0.3, 0.1, 0.0), (0.0, 0.2, 0.05, 0.0), points=True, ours=True),
            Series("solution", (0.0,), (0.0,), points=True),
        ),
        equal=True,
    )  # fmt: skip
    cost = Panel(
        "Evaluations of the lower loss an iteration",
        "method",
        "evaluations",
        (
            Series("option 1", ("reset", "keep", "grow 1.1", "grow 2"), (14.0, 6.1, 3.2, 2.4), low=(12.0, 5.5, 3.0, 2.2), high=(15.5, 7.0, 3.5, 2.7)),
            Series("option 3", ("reset", "keep", "grow 1.1", "grow 2"), (11.0, 4.0, nan, 2.2)),
            Series("our default", ("reset", "keep", "grow 1.1", "grow 2"), (9.0, 3.0, 2.5, 1.9), ours=True),
        ),
        bars=True,
    )  # fmt: skip
    grid = Panel(
        "Fourteen settings of the grid",
        "upper iteration",
        "validation loss",
        (
            *(
                curve(f"Adam α = {a:g}, β = {b:g}", 1 + i / 3, 0.1, seed=i, low=None, high=None, n=2500)
                for i, (a, b) in enumerate((a, b) for a in (1e-4, 1e-3, 1e-2, 0.1, 1) for b in (0.01, 0.1, 1))
                if i < 13
            ),
            curve("BiSLS (nothing set)", 6, 0.05, seed=30, n=2500, ours=True),
        ),
        yscale="log",
    )
    digits = tuple(
        tuple(map(tuple, np.clip(np.hypot(*(np.indices((28, 28)) - 13.5)) / 14 * draw.random((28, 28)), 0, 1)))
        for _ in range(10)
    )
    return (
        Outcome(
            "demo_2", "SPSB and SLSB against tuned SGD on convex losses",
            "Without interpolation SPSmax stalls at a noise floor. With a ceiling that decays as 1/√k, SPSB converges, and its ceiling can be far too large without harm.",
            "The noise floor of SPSmax is clear on both data sets; DecSPS is slower because its steps can only shrink.",
            "quick", {"data": "w8a, ijcnn1", "batch": "128", "iterations": "5000", "steps": "γ from 1e-3 to 1e3, eleven values"},
            (losses, starts),
            (
                Verdict("SPSB ends below SPSmax.", HOLDS, "0.012 ± 0.001 against 0.102 ± 0.004"),
                Verdict("SPSB ends at or below the best constant step of the grid.", UNDECIDED, "0.0121 ± 0.0010 against 0.0118 ± 0.0009 (γ = 1)"),
                Verdict("The untuned default is within 10 % of the best of all.", HOLDS, "0.0083 against 0.0118", ours=True),
            ),
            facts=facts(), command="bisls reproduce demo_2 --scale quick --seeds 3",
        ),
        Outcome(
            "trajectories", "What a line search does in two dimensions", "The searched path needs fewer iterations.", "",
            "quick", {"start": "(1, 0)"}, (path,), (Verdict("BiSLS arrives in fewer iterations.", HOLDS, "4 against 120"),),
            facts=facts(), command="bisls reproduce trajectories --scale quick",
        ),
        Outcome(
            "search_cost_beta", "What the search costs, and how the restart decides it",
            "Growing the last step instead of starting over makes the search cost one extra evaluation.\n\nOption 3 is the cheapest.",
            "Growing by 2 costs least at every setting.", "quick", {"η": "1.1, 2"}, (cost, grid),
            (
                Verdict("Option 3 needs fewer evaluations than option 1 under every restart rule that was tried.", FAILS, "2.2 against 2.4 (grow 2); no value for grow 1.1", told="9 ± 1"),
                Verdict("Our default needs the fewest.", HOLDS, "1.9 against 2.2", ours=True),
            ),
            facts=facts("1a2b3c4d5e-dirty"), command="bisls reproduce search_cost_beta --scale quick",
            tables=(Table("Counts", ("told", "here"), (("9 | 10", "✓ 8"), ("<4>", "✗ 0"))),), reading="paper",
        ),
        Outcome(
            "datadist", "Ten pictures distilled from the digits", "The distilled pictures look like digits.", "They do, more or less.",
            "quick", {"pictures": "one a class"}, (),
            (Verdict("A model trained on the ten pictures reads digits better than one trained on ten real ones.", HOLDS, "accuracy 0.81 against 0.52"),),
            (Pictures("Distilled digits", digits, tuple(map(str, range(10)))),),
            facts(), "bisls reproduce datadist --scale quick",
        ),
    )  # fmt: skip


def every_feature() -> tuple[Outcome, ...]:
    """What may break a report."""
    long = np.sin(np.arange(9000.0) / 500)
    long[4321] = 7.0
    panels = (
        Panel(NASTY, NASTY, NASTY, (Series(NASTY, (1.0, 2.0), (3.0, 4.0)), Series("$", (1.0,), (2.0,)))),
        Panel("log", "k", "f", (Series("to 0", (0.0, 1.0, 2.0, 3.0), (1.0, 0.1, 0.0, -1.0)), Series("negative", (1.0, 2.0), (-1.0, 0.0))), "log", "log"),
        Panel("gaps", "k", "f", (Series("gap", (1.0, 2.0, 3.0, 4.0), (1.0, nan, inf, 2.0)), Series("all nan", (1.0, 2.0), (nan, nan)), Series("all inf", (1.0, 2.0), (inf, -inf), ours=True))),
        Panel("nothing finite", "k", "f", (Series("lost", (1.0, 2.0), (nan, inf)),), yscale="log"),
        Panel("no series", "k", "f", ()),
        Panel("no values", "k", "f", (Series("empty", (), ()),), xscale="log"),
        Panel("bars", "m", "n", (Series("one", ("a", "<b>"), (1.0, nan), low=(0.5, nan), high=(2.0, nan)), Series("two", ("<b>", "c"), (2.0, inf), ours=True))),
        Panel("log bars", "m", "n", tuple(Series(f"s{i}", tuple(f"a long name of {j}" for j in range(8)), tuple(10.0 ** (i - j) for j in range(8))) for i in range(9)), yscale="log", bars=True, ylim=(1e-6, 1e7)),
        Panel("bars without any", "m", "n", (Series("one", ("a",), (nan,)),), bars=True, yscale="log"),
        Panel("equal", "x", "y", (Series("path", tuple(np.cos(long)), tuple(long)), Series("point", (0.0,), (0.0,), points=True)), equal=True, ylim=(-2.0, 2.0)),
        Panel("bands", "k", "f", (curve("band", 3.0), Series("down to 0", (1.0, 2.0, 3.0), (1.0, 0.5, 0.1), (0.0, -1.0, nan), (2.0, 1.0, nan)), Series("line", (1.0, 400.0), (0.1, 0.1), dashed=True)), yscale="log"),
        Panel("fourteen", "k", "f", tuple(curve(f"setting {i}", 1.0 + i, seed=i) for i in range(14)), "log", "log"),
        Panel("long", "k", "f", (Series("long", tuple(np.arange(9000.0)), tuple(long)),), alt="A sine with one spike."),
        Panel("huge", "k", "f", (Series("huge", (1.0, 2.0, 3.0), (1e308, -1e308, 1.0)), Series("flat", (1.0, 2.0), (0.0, 0.0)))),
        Panel("names", "k", "f", (Series("points", ("a", "b", "a"), (1.0, 2.0, 3.0), points=True, ours=True), Series("uneven", ("b", "c"), (1.0, 2.0, 3.0)))),
        Panel("bad limits", "k", "f", (Series("flat", (1.0, 2.0), (1.0, 1.0)),), yscale="log", ylim=(0.0, inf)),
    )  # fmt: skip
    panels = tuple(p if p.title != "bars" else Panel(p.title, p.xlabel, p.ylabel, p.series, bars=True) for p in panels)
    verdicts = (
        Verdict(NASTY, HOLDS, NASTY),
        Verdict("this fails", FAILS, ""),
        Verdict("nobody knows", UNDECIDED, "1 against 1", ours=True),
    )
    pictures = (
        Pictures(NASTY, (((0.0, 1.0), (0.5, nan)), ((2.0, -1.0), (0.0, inf))), (NASTY, "b")),
        Pictures("none", (), ()),
    )
    whole = Outcome(
        "figure/1 ü",
        NASTY,
        NASTY,
        NASTY,
        "paper",
        {NASTY: NASTY},
        panels,
        verdicts,
        pictures,
        facts(odd={"a": [1, True]}),
        NASTY,
    )
    bare = Outcome(
        "bare", "Nothing but a name", "", "", "paper", {}, (Panel("p", "x", "y", ()),), (Verdict("so", HOLDS, ""),)
    )
    return whole, bare, *realistic()  # fmt: skip
