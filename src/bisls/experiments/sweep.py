"""Runs for figures: asked for, looked up, made, kept, judged."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from bisls.experiments.backends import Failure, Pool
from bisls.experiments.base import Asking, Config, Figure, Findings, Plan, RunRecord
from bisls.experiments.readings import READINGS
from bisls.experiments.store import Store
from bisls.outcome import Outcome

logger = logging.getLogger(__name__)

ORDER = (  # which figures decide most for the time that they take, and which need the runs of others
    "calibration",
    "sample_hyper",
    "demo_3",
    "mnist_sample",
    "mnist_sps",
    "search_cost",
    "search_and_runtime",
    "datadist",
    "mnist50",
    "demo_4",
    "hyper_more",
    "demo_1",
    "eta",
    "opt",
    "search_cost_beta",
    "demo_2",
)


class Watcher(Protocol):
    """Is told how a sweep goes on."""

    def wanted(self, runs: Sequence[Config], found: int) -> None:
        """More runs are to be made; so many others were there from earlier commands."""

    def done(self, config: Config, record: RunRecord) -> None:
        """A run is finished and kept."""

    def failed(self, config: Config, reason: str) -> None:
        """A run could not be made."""

    def figure(self, outcome: Outcome) -> None:
        """A figure is finished."""

    def dropped(self, figure: Figure, reason: str) -> None:
        """A figure can't be finished, since a run that it asks for could not be made, or can't be judged."""


@dataclass
class _Active:
    """A figure at work."""

    figure: Figure
    asking: Asking
    started: bool = False
    wants: Sequence[Config] = ()
    records: list[RunRecord] = field(default_factory=list)  # all that it was sent

    def go_on(self, known: dict[str, RunRecord]) -> Findings | Failure | None:
        """Send it what it asked for; its findings if that was all, or why it can make nothing of its records."""
        records = [known[config.key] for config in self.wants]
        self.records += records
        try:
            self.wants = self.asking.send(records) if self.started else next(self.asking)
        except StopIteration as end:
            return end.value
        except Exception as error:  # records that say something else than they should: the other figures go on
            logger.debug("%s", self.figure.name, exc_info=True)
            return Failure(f"its records can't be judged: {type(error).__name__}: {error}")
        self.started = True
        return None


def reproduce(
    figures: Sequence[Figure], plan: Plan, store: Store, watcher: Watcher, jobs: int = 1, backend: str = "local"
) -> list[Outcome]:
    """All figures: each asks for runs, the missing ones are made, each goes on with its records until it has its findings.

    At the scale "standard" one figure follows another, those first that decide most (`ORDER`), so that a command that is stopped
    has left as many verdicts as could be. At the others all runs that are known go side by side, the long ones first.

    A run that can't be made (an exception that is not the method's) drops the figures that ask for it, and no other.

    Args:
        figures: What to reproduce.
        plan: At which scale, with how many seeds.
        store: Finished runs; new ones are put there as soon as they end.
        watcher: Is told what happens.
        jobs: Processes side by side.
        backend: "local", "dask" or "ray".
    """
    outcomes: dict[str, Outcome] = {}
    known: dict[str, RunRecord] = {}
    failures: dict[str, Failure] = {}

    def advance(active: list[_Active]) -> list[_Active]:
        """Let those go on whose records are all there; those that are not finished remain."""
        remaining = []
        for one in active:
            findings = None
            while findings is None and all(config.key in known for config in one.wants):
                findings = one.go_on(known)
            broken = next((failures[config.key] for config in one.wants if config.key in failures), None)
            if isinstance(findings, Failure):
                watcher.dropped(one.figure, findings.reason)
            elif findings is not None:
                outcomes[one.figure.name] = outcome_of(one.figure, plan, findings, one.records)
                watcher.figure(outcomes[one.figure.name])
            elif broken is not None:
                watcher.dropped(one.figure, broken.reason)
            else:
                remaining.append(one)
        return remaining

    with Pool(jobs, backend) as pool:
        queue = sorted(figures, key=_rank) if plan.in_order else figures
        active = advance([_Active(figure, figure.ask(plan)) for figure in queue])
        while active:
            ahead = active[:1] if plan.in_order else active
            wanted = {config.key: config for one in ahead for config in one.wants if config.key not in known}
            found = {key: record for key, config in wanted.items() if (record := store.get(config)) is not None}
            known |= found
            missing = sorted((config for key, config in wanted.items() if key not in found), key=lambda c: -c.work)
            watcher.wanted(missing, len(found))
            for config, made in pool.runs(missing):
                if isinstance(made, Failure):
                    failures[config.key] = made
                    watcher.failed(config, made.reason)
                else:
                    store.put(config, made)
                    known[config.key] = store.read(config)  # as it is read back: made or found is the same then
                    watcher.done(config, made)
                active = advance(active)  # figures are finished as early as they can be
            active = advance(active)
    return [outcomes[figure.name] for figure in figures if figure.name in outcomes]


def _rank(figure: Figure) -> int:
    return ORDER.index(figure.name) if figure.name in ORDER else len(ORDER)


def outcome_of(figure: Figure, plan: Plan, findings: Findings, records: Sequence[RunRecord]) -> Outcome:
    """The findings with all that the report says around them: the claim, versions, commits, counts, time."""
    runs = list({str(sorted(record.config.items())): record for record in records}.values())
    totals: dict[str, int] = {}
    versions: dict[str, set[str]] = {}
    for record in runs:
        for name, count in record.facts.get("evaluations", {}).items():
            totals[name] = totals.get(name, 0) + int(count)
        for name in ("bisls", "torch", "numpy", "python"):
            versions.setdefault(name, set()).add(str(record.facts.get(name, "unknown")))
    facts: dict[str, Any] = {
        "seeds": sorted({record.config["seed"] for record in runs}),
        "versions": {name: ", ".join(sorted(several)) for name, several in versions.items()},
        "commits": sorted({str(record.facts.get("commit", "unknown")) for record in runs}),
        "runs": len(runs),
        "lost_runs": sum(bool(record.error) for record in runs),
        "cpu_seconds": round(sum(float(record.facts.get("cpu_seconds", 0.0)) for record in runs), 1),
        "evaluations": totals,
    }
    reading = "" if plan.reading == READINGS["paper"] else f" --reading {plan.reading.name}"
    return Outcome(
        name=figure.name,
        title=figure.title,
        paper=figure.paper,
        seen=findings.seen,
        scale=plan.scale,
        settings=findings.settings,
        panels=findings.panels,
        verdicts=findings.verdicts,
        pictures=findings.pictures,
        facts=facts,
        command=f"bisls reproduce {figure.name} --scale {plan.scale} --seeds {plan.seeds}{reading}",
        tables=findings.tables,
        reading=plan.reading.name,
    )
