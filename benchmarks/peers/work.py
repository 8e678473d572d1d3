"""What every worker shares: its job, the clock and the snapshots. NumPy alone, so that a library pays for its own imports."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Sequence
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import numpy as np


class Over(Exception):
    """The run is over: all iterations done, its time is up, or x is not finite any more."""


class Keep:
    """Snapshots of the unknowns with the time since the process was launched: call it at the start and after each iteration.

    Wall time counts from the moment the driver launched the process, CPU time is all of the process; so the interpreter, the
    imports and what is compiled are in both.
    """

    def __init__(self, job: SimpleNamespace):
        self.job = job
        self.times: list[tuple[float, float]] = []
        self.kept: list[int] = []
        self.points: list[np.ndarray] = []

    def __call__(self, *tensors: np.ndarray) -> None:
        now = time.time() - self.job.launched, time.process_time()
        done = len(self.times)
        self.times.append(now)
        # the cap is CPU time, so that a busy machine does not cut runs short; wall time only where it is far off
        last = done >= self.job.iterations or now[1] > self.job.cap or now[0] > 5 * self.job.cap
        if last or done % self.job.every == 0:
            point = np.concatenate([np.array(tensor, dtype=np.float32).ravel() for tensor in tensors])
            self.kept.append(done)
            self.points.append(point)
            if not np.isfinite(point).all():
                raise Over
        if last:
            raise Over

    def save(self, packages: Sequence[str]) -> None:
        versions = {name: metadata.version(name) for name in (*packages, "numpy")}
        np.savez(
            self.job.result,
            times=np.array(self.times, dtype=np.float64).reshape(-1, 2),
            kept=np.array(self.kept, dtype=np.int64),
            points=np.array(self.points, dtype=np.float32),
            versions=json.dumps(versions),
        )


Run = Callable[[SimpleNamespace, Keep], None]


def work(contests: dict[str, dict[str, Run]], packages: Sequence[str]) -> None:
    """Read the job, run it, write what was kept; also where it ends in an error, which the driver then reports.

    `contests` has the variants of each kind of problem.
    """
    job = SimpleNamespace(**json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")))
    keep = Keep(job)
    try:
        contests[job.contest][job.variant](job, keep)
    except Over:
        pass
    finally:
        keep.save(packages)
