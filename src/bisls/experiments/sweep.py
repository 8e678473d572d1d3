"""Runs for figures: asked for, looked up, run side by side through joblib, kept, judged."""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any, Protocol

import joblib
import torch

from bisls.experiments.base import Asking, Config, Figure, Findings, Plan, RunRecord, versions
from bisls.experiments.store import Store
from bisls.outcome import Outcome

logger = logging.getLogger(__name__)
BACKENDS = ("local", "dask", "ray")


class SweepError(RuntimeError):
    """A sweep that can't be made: the message says why and what would do."""


class Watcher(Protocol):
    """Is told how a sweep goes on."""

    def wanted(self, runs: Sequence[Config], cached: int) -> None:
        """More runs are wanted; so many others were found finished."""

    def done(self, config: Config, record: RunRecord) -> None:
        """A run is finished and kept."""

    def figure(self, outcome: Outcome) -> None:
        """A figure is finished."""


@dataclass
class _Active:
    figure: Figure
    asking: Asking
    wants: Sequence[Config]
    records: list[RunRecord] = field(default_factory=list)


def run_one(config: Config) -> RunRecord:
    """One run in a process of its own, with one thread: side by side, more would only wait for each other."""
    torch.set_num_threads(1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a run that is lost warns in many ways; its record says so
        logging.getLogger("bisls").setLevel(logging.ERROR)
        return config.execute()


def _kept(config: Config) -> tuple[Config, RunRecord]:
    return config, run_one(config)


def parallel(configs: Sequence[Config], jobs: int, backend: str) -> Iterator[tuple[Config, RunRecord]]:
    """The records as they are finished, in any order."""
    if not configs:
        return
    if jobs == 1 and backend == "local":
        for config in configs:
            yield _kept(config)
        return
    if backend == "local":
        context: Any = joblib.parallel_config(backend="loky", n_jobs=jobs, inner_max_num_threads=1)
    else:
        context = _cluster(backend, jobs)
    with context:
        tasks = (joblib.delayed(_kept)(config) for config in configs)
        # one at a time: a batch of runs would be lost together when the command is stopped
        yield from joblib.Parallel(return_as="generator_unordered", batch_size=1, pre_dispatch="2*n_jobs")(tasks)


def _cluster(backend: str, jobs: int) -> Any:
    if backend == "dask":
        try:
            client_of: Any = import_module("dask.distributed").Client
        except ImportError as error:
            raise SweepError("--backend dask needs dask: pip install 'bisls[dask]'") from error
        address = os.environ.get("DASK_SCHEDULER_ADDRESS")
        # without an address, workers on this machine: the same command as on a cluster
        client = (
            client_of(address)
            if address
            else client_of(n_workers=jobs, threads_per_worker=1, dashboard_address=None, silence_logs=logging.CRITICAL)
        )
        return _Closing(joblib.parallel_config(backend="dask", n_jobs=-1, wait_for_workers_timeout=60), client.close)
    if backend == "ray":
        try:
            ray, register = import_module("ray"), import_module("ray.util.joblib").register_ray
        except ImportError as error:
            raise SweepError("--backend ray needs ray: pip install 'bisls[ray]'") from error
        address = os.environ.get("RAY_ADDRESS")
        ray.init(address=address, **({} if address else {"num_cpus": jobs}), ignore_reinit_error=True)
        register()
        return _Closing(joblib.parallel_config(backend="ray", n_jobs=-1 if address else jobs), ray.shutdown)
    raise SweepError(f"--backend {backend}: must be one of {', '.join(BACKENDS)}")


class _Closing:
    """A context that closes what it opened."""

    def __init__(self, context: Any, close: Callable[[], Any]):
        self.context, self.close = context, close

    def __enter__(self) -> None:
        self.context.__enter__()

    def __exit__(self, *error: object) -> None:
        try:
            self.context.__exit__(*error)
        finally:
            self.close()


def reproduce(
    figures: Sequence[Figure], plan: Plan, store: Store, watcher: Watcher, jobs: int = 1, backend: str = "local"
) -> list[Outcome]:
    """All figures: each asks for runs, the missing ones are run, each goes on with its records until it has its findings.

    Args:
        figures: What to reproduce.
        plan: At which scale, with how many seeds.
        store: Finished runs; new ones are put there as soon as they end.
        watcher: Is told what happens.
        jobs: Processes side by side.
        backend: "local", "dask" or "ray".
    """
    outcomes: dict[str, Outcome] = {}
    seen: dict[str, list[RunRecord]] = {figure.name: [] for figure in figures}

    def advance(one: _Active) -> bool:
        try:
            one.wants = one.asking.send(one.records) if one.records else next(one.asking)
        except StopIteration as end:
            outcomes[one.figure.name] = outcome_of(one.figure, plan, end.value, seen[one.figure.name])
            watcher.figure(outcomes[one.figure.name])
            return False
        return True

    active = [_Active(figure, figure.ask(plan), ()) for figure in figures]
    active = [one for one in active if advance(one)]
    while active:
        wanted = {config.key: config for one in active for config in one.wants}
        found = {key: store.get(config) for key, config in wanted.items()}
        missing = sorted((wanted[key] for key, record in found.items() if record is None), key=lambda c: -c.work)
        watcher.wanted(missing, len(wanted) - len(missing))
        for config, record in parallel(missing, jobs, backend):
            store.put(config, record)
            found[config.key] = store.get(config)  # as it is read back, so that a run and a cached run are the same
            watcher.done(config, record)
        for one in active:
            one.records = [known for config in one.wants if (known := found[config.key]) is not None]
            seen[one.figure.name] += one.records
        active = [one for one in active if advance(one)]
    return [outcomes[figure.name] for figure in figures]


def outcome_of(figure: Figure, plan: Plan, findings: Findings, records: Sequence[RunRecord]) -> Outcome:
    """The findings with all that the report says around them: the claim, versions, commits, counts, time."""
    runs = list({str(sorted(record.config.items())): record for record in records}.values())
    own = versions()
    totals: dict[str, int] = {}
    for record in runs:
        for name, count in record.facts.get("evaluations", {}).items():
            totals[name] = totals.get(name, 0) + int(count)
    facts = {
        "seeds": list(plan.each_seed),
        "versions": {name: value for name, value in own.items() if name != "commit"},
        "commits": sorted({str(record.facts.get("commit", "")) for record in runs}) or [own["commit"]],
        "runs": len(runs),
        "lost_runs": sum(bool(record.error) for record in runs),
        "cpu_seconds": round(sum(float(record.facts.get("cpu_seconds", 0.0)) for record in runs), 1),
        "evaluations": totals,
    }
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
        command=f"bisls reproduce {figure.name} --scale {plan.scale} --seeds {plan.seeds}",
    )
