"""Where runs are made: processes of this machine, or a cluster; one interface, joblib's."""

from __future__ import annotations

import logging
import os
import threading
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import joblib
import torch
from joblib.externals.loky import get_reusable_executor
from joblib.parallel import LokyBackend

from bisls.experiments.base import Config, RunRecord

BACKENDS = ("local", "dask", "ray")
RETRIES = 3  # so often a run is begun again whose worker has died


class SweepError(RuntimeError):
    """A sweep that can't be made: the message says why and what would do."""


@dataclass(frozen=True)
class Failure:
    """A run that could not be made, for a reason that is not the method's."""

    reason: str


def run_one(config: Config) -> tuple[Config, RunRecord | Failure]:
    """One run in a process of its own, with one thread: side by side, more would only wait for each other."""
    logger, threads = logging.getLogger("bisls"), torch.get_num_threads()
    level = logger.level
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a run that is lost warns in many ways; its record says so
        logger.setLevel(logging.ERROR)
        torch.set_num_threads(1)
        try:
            return config, config.execute()
        except Exception as error:  # one run that fails must not take the others with it
            return config, Failure(f"{type(error).__name__}: {error}")
        finally:
            logger.setLevel(level)
            torch.set_num_threads(threads)


def end_with(parent: int) -> None:
    """End this process when its parent has ended, by a kill too: it would compute on for nobody, or wait for ever.

    Args:
        parent: The number of the process that started this one.
    """
    if os.name != "posix":  # elsewhere the number of the parent stays what it was
        return

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.2)
        os._exit(1)

    threading.Thread(target=watch, name="watches the parent", daemon=True).start()


class Workers(LokyBackend):  # type: ignore[misc]
    """Processes of joblib that end with the process that started them."""

    def configure(self, *arguments: Any, **options: Any) -> int:
        """Have each worker watch, from its first moment on."""
        workers: int = super().configure(*arguments, initializer=end_with, initargs=(os.getpid(),), **options)
        return workers


class Pool:
    """Makes runs; a context, so that processes and connections are closed with it.

    Args:
        jobs: Runs side by side.
        backend: "local", "dask" (the scheduler at ``DASK_SCHEDULER_ADDRESS``, or workers here) or "ray" (``RAY_ADDRESS``).

    Raises:
        SweepError: The backend is not installed, or does not answer.
    """

    def __init__(self, jobs: int = 1, backend: str = "local"):
        if backend not in BACKENDS:
            raise SweepError(f"--backend {backend}: must be one of {', '.join(BACKENDS)}")
        self.jobs, self.backend = jobs, backend
        self._opened = ExitStack()

    def __enter__(self) -> Pool:
        if self.backend == "dask":
            self._open_dask()
        elif self.backend == "ray":
            self._open_ray()
        elif self.jobs > 1:
            self._opened.enter_context(joblib.parallel_config(Workers(inner_max_num_threads=1), n_jobs=self.jobs))
        return self

    def __exit__(self, *error: object) -> None:
        if self.backend == "local" and self.jobs > 1:
            # workers in the middle of a run would compute on for nobody
            get_reusable_executor().shutdown(wait=False, kill_workers=error[0] is not None)
        self._opened.close()

    def runs(self, configs: Sequence[Config]) -> Iterator[tuple[Config, RunRecord | Failure]]:
        """The records as they are finished, in any order."""
        if not configs:
            return
        if self.backend == "local" and self.jobs == 1:
            yield from map(run_one, configs)
            return
        if self.backend == "ray":
            yield from self._on_ray(configs)
            return
        tasks = (joblib.delayed(run_one)(config) for config in configs)
        try:
            # one at a time: a batch of runs would be lost together when the command is stopped
            yield from joblib.Parallel(return_as="generator_unordered", batch_size=1, pre_dispatch="2*n_jobs")(tasks)
        except (RuntimeError, ConnectionError) as error:  # a worker that died, a cluster that went away
            raise SweepError(f"the {self.backend} workers are gone: {type(error).__name__}: {error}") from error

    def _open_dask(self) -> None:
        client_of: Any = self._imported("dask.distributed").Client
        address = os.environ.get("DASK_SCHEDULER_ADDRESS")
        here = {"n_workers": self.jobs, "threads_per_worker": 1, "dashboard_address": None}
        try:
            # without an address, workers on this machine: the same command as on a cluster
            client = client_of(address) if address else client_of(**here, silence_logs=logging.CRITICAL)
        except (OSError, TimeoutError) as error:
            raise SweepError(f"--backend dask: no scheduler answers at {address or 'this machine'}: {error}") from error
        self._opened.callback(client.close)
        self._opened.enter_context(joblib.parallel_config(backend="dask", n_jobs=-1, wait_for_workers_timeout=60))

    def _open_ray(self) -> None:
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # it tells nobody, unless somebody has said so
        ray = self._imported("ray")
        address = os.environ.get("RAY_ADDRESS")
        # without an address, workers on this machine: the same command as on a cluster
        here = {} if address else {"num_cpus": self.jobs, "include_dashboard": False}
        quiet = {"log_to_driver": False, "logging_level": logging.ERROR}
        try:
            ray.init(address=address, **here, **quiet, ignore_reinit_error=True)
        except (OSError, RuntimeError, ValueError, ConnectionError) as error:
            raise SweepError(f"--backend ray: no cluster answers at {address or 'this machine'}: {error}") from error
        self._opened.callback(ray.shutdown)

    def _on_ray(self, configs: Sequence[Config]) -> Iterator[tuple[Config, RunRecord | Failure]]:
        """By tasks of ray itself, which begins those again whose worker has died.

        Its backend for joblib hands over nothing before all is done.
        """
        ray = self._imported("ray")
        task = ray.remote(max_retries=RETRIES, num_cpus=1)(run_one)
        try:
            waiting = [task.remote(config) for config in configs]
            while waiting:
                ready, waiting = ray.wait(waiting)
                yield ray.get(ready[0])
        except ray.exceptions.RayError as error:  # a worker that dies again and again, a cluster that went away
            raise SweepError(f"the ray workers are gone: {type(error).__name__}: {error}") from error

    def _imported(self, module: str) -> Any:
        try:
            return import_module(module)
        except ImportError as error:
            message = f"--backend {self.backend} needs {self.backend}: pip install 'bisls[{self.backend}]'"
            raise SweepError(message) from error
