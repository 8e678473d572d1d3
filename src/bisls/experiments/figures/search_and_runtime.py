"""Figure search_and_runtime, a and c: how well yhat must be solved, how soon 85 % are reached. Its b is `search_cost`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import inf

import numpy as np

from bisls.experiments.asking import over_seeds
from bisls.experiments.base import Asking, Figure, Findings, Plan, RunRecord
from bisls.experiments.bilevel import DEFAULT, OWN, constant, describe
from bisls.experiments.drawing import dots
from bisls.experiments.judging import at_most, both, claim, listed, mean, ours, show
from bisls.experiments.representation import (
    CONSTANT,
    errors,
    learnt,
    representation,
    searched,
    tuned,
)
from bisls.hypergrad import Implicit
from bisls.linear import CG
from bisls.outcome import Panel, Verdict

LEVEL = 0.85  # the accuracy to be reached
ENOUGH = 0.02  # one step for yhat is enough where the share of errors is at most so much above the best
TOLD = {"seconds": "BiSLS-Adam takes less time", "k": "time alone"}
MACHINE = "times of one machine; the counts beside them are of no machine"

Runs = Mapping[str, Sequence[RunRecord]]
ByNumber = Mapping[int, Sequence[RunRecord]]


def ask(plan: Plan) -> Asking:
    """Steps for yhat, steps of CG; the default beside each."""
    responses, conjugate = (
        plan.pick((1, 2), (1, 2, 5), (1, 2, 5, 10, 20)),
        plan.pick((5, 10), (5, 10), (5, 10, 20, 50)),
    )
    steps = plan.pick(4, 20, 1000)
    solvers = {n: Implicit(CG(iters=n)) for n in conjugate}
    wanted = {f"yhat {n}": representation(plan, 0, searched(plan, response_steps=n), steps=steps) for n in responses}
    wanted |= {f"cg {n}": representation(plan, 0, searched(plan, hypergrad=own)) for n, own in solvers.items()}
    wanted |= {OWN: representation(plan, 0, DEFAULT), "short": representation(plan, 0, DEFAULT, steps=steps)}
    best, found = yield from tuned(plan, ("adam",), wanted)
    method = constant(CONSTANT["adam"], *best["adam"].pair)
    adam = {n: representation(plan, 0, method.but(hypergrad=own)) for n, own in solvers.items()}
    timed: dict[str, ByNumber] = {"BiSLS-Adam": {n: found[f"cg {n}"] for n in conjugate}}
    timed["tuned Adam"] = yield from over_seeds(plan.each_seed, adam)
    yhat = {n: found[f"yhat {n}"] for n in responses}
    panels = (*_yhat(yhat, found["short"]), *_timed(timed, found[OWN]))
    verdicts = judge_yhat(yhat) + judge_timed(timed, found[OWN])
    settings = describe(
        wanted["cg 10"],
        a=f"K = {steps}, reset option 3 (eta = 2) at both levels",
        c=f"CPU seconds without evaluation; Adam tuned with 10 steps of CG: {best['adam']}, tuning not counted",
    )
    return Findings(panels, verdicts, settings)


def _yhat(yhat: ByNumber, own: Sequence[RunRecord]) -> list[Panel]:
    panels = []
    for name, label in (("accuracy", "test accuracy"), ("seconds", "CPU seconds")):
        lines = [
            dots("BiSLS-Adam", tuple(yhat), [ended(runs, name) for runs in yhat.values()]),
            dots(OWN, tuple(yhat), [ended(own, name)] * len(yhat), ours=True),
        ]
        alt = f"{label} at the end of a run against the number of gradient steps that stand for y* at a trial point"
        panels.append(Panel(_title(label, "at the end"), "gradient steps for yhat", label, tuple(lines), alt=alt))
    return panels


def _timed(timed: Mapping[str, ByNumber], own: Sequence[RunRecord]) -> list[Panel]:
    panels = []
    for name, label in (("seconds", "CPU seconds"), ("k", "upper iterations")):
        numbers = tuple(next(iter(timed.values())))
        lines = [dots(method, numbers, [reached(one, name) for one in by.values()]) for method, by in timed.items()]
        lines.append(dots(OWN, numbers, [reached(own, name)] * len(numbers), ours=True))
        alt = f"{label} until an accuracy of {LEVEL:.0%} against the number of CG steps; a gap where it is not reached"
        panels.append(Panel(_title(label, f"to {LEVEL:.0%}"), "CG steps", label, tuple(lines), alt=alt))
    return panels


def _title(label: str, rest: str) -> str:
    return f"{label[0].upper()}{label[1:]} {rest}"


def reached(records: Sequence[RunRecord], name: str) -> list[float]:
    """CPU seconds ("seconds") or iterations ("k") until the accuracy is first `LEVEL`; infinite where it never is."""
    found = []
    for record in records:
        values = record.curve(name)
        there = np.flatnonzero(record.curve("accuracy")[: len(values)] >= LEVEL)
        found.append(float(values[there[0]]) if len(there) else inf)
    return found


def ended(records: Sequence[RunRecord], name: str) -> list[float]:
    """Where a curve ends, of runs that were lost too; infinite where it has no points."""
    return [record.curves[name][-1] if record.curves[name] else inf for record in records]


def evaluations(groups: Runs) -> str:
    """Evaluations an iteration, for the numbers beside a time: values, gradients and products at both levels, counted alike."""
    shown = {}
    for name, runs in groups.items():
        if all(run.facts.get("evaluations") and run.numbers.get("iterations") for run in runs):
            shown[name] = [sum(run.facts["evaluations"].values()) / run.numbers["iterations"] for run in runs]
    return f"; evaluations an iteration: {listed(shown)}" if shown else ""


def judge_yhat(yhat: ByNumber) -> tuple[Verdict, ...]:
    """One step for yhat is enough: hardly less accurate than more of them, and no slower."""
    wrong = {f"{n} steps": errors(runs) for n, runs in yhat.items()}
    seconds = {f"{n} steps": ended(runs, "seconds") for n, runs in yhat.items()}
    one, best = next(iter(wrong)), min(wrong, key=lambda name: mean(wrong[name]))
    enough = at_most([value - ENOUGH for value in wrong[one]], wrong[best])
    quick = both(*(at_most(seconds[one], values) for values in seconds.values()))
    first = next(iter(yhat.values()))
    statement = f"One gradient step for yhat is enough: its share of errors is within {ENOUGH} of the best"
    return (
        claim(statement, learnt(enough, first), f"share of errors {listed(wrong)}", "one step is sufficient"),
        claim(
            "One gradient step for yhat takes the least time",
            learnt(quick, first),
            f"CPU seconds {listed(seconds)} ({MACHINE}){evaluations({f'{n} steps': runs for n, runs in yhat.items()})}",
            "more steps cost more time than they gain",
        ),
    )


def judge_timed(timed: Mapping[str, ByNumber], own: Sequence[RunRecord]) -> tuple[Verdict, ...]:
    """BiSLS-Adam reaches 85 % in less time than tuned Adam at each number of CG steps; the default is sooner than either."""
    verdicts = []
    everything = {f"{m}, CG {n}": runs for m, by in timed.items() for n, runs in by.items()} | {OWN: own}
    steps = ", ".join(f"{key} {_shown(reached(runs, 'k'))}" for key, runs in everything.items())
    for name, label in (("seconds", "CPU time"), ("k", "iterations")):
        beside = f" ({MACHINE}); iterations: {steps}{evaluations(everything)}" if name == "seconds" else ""
        at = {method: {n: reached(runs, name) for n, runs in by.items()} for method, by in timed.items()}
        each = [at_most(at["BiSLS-Adam"][n], at["tuned Adam"][n]) for n in at["tuned Adam"]]
        shown = {f"{m}, CG {n}": values for m, by in at.items() for n, values in by.items()}
        numbers = ", ".join(f"{key} {_shown(values)}" for key, values in shown.items()) + beside
        statement = f"BiSLS-Adam reaches {LEVEL:.0%} in no more {label} than tuned Adam at each number of CG steps"
        verdicts.append(claim(statement, both(*each), numbers, TOLD[name]))
        best = min(shown, key=lambda key: mean(shown[key]))
        numbers = f"BiSLS {_shown(reached(own, name))}, {best} {_shown(shown[best])}{beside}"
        statement = f"The default reaches {LEVEL:.0%} in no more {label} than any of them"
        verdicts.append(ours(statement, at_most(reached(own, name), shown[best]), numbers))
    return tuple(verdicts)


def _shown(values: Sequence[float]) -> str:
    return "never" if mean(values) == inf else show(mean(values))


FIGURE = Figure(
    name="search_and_runtime",
    title="What the upper search saves (hyper-representation)",
    paper="One gradient step for yhat is enough. BiSLS-Adam reaches 85 % sooner than tuned Adam, whatever the number of CG "
    "steps.",
    ask=ask,
    data=("mnist",),
)
