"""Runs: a worker launched, timed and scored; rows kept as they come, so that nothing is lost and nothing is done twice."""

from __future__ import annotations

import json
import tempfile
import time
from dataclasses import asdict, dataclass
from math import isfinite
from pathlib import Path
from typing import Any

import numpy as np

from side_by_side.contestants import ENVIRONMENTS, PEERS, ROOT, WORKERS
from side_by_side.environments import Refused, digest, ended, plain_environment
from side_by_side.problems import Problem

Row = dict[str, Any]


@dataclass(frozen=True)
class Job:
    """One run: who, on what, with which rates, how long."""

    problem: str
    peer: str
    variant: str
    alpha: float
    beta: float
    iterations: int
    cap: float
    repeat: int = 0

    @property
    def name(self) -> str:
        """For the screen."""
        return f"{self.problem}: {PEERS[self.peer].title} {self.variant}"


class Rows:
    """The rows of a file, one JSON object a line, each written as soon as it is known."""

    def __init__(self, path: Path, fresh: bool = False):
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        if fresh and path.exists():
            path.unlink()
        lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
        self.rows: list[Row] = [json.loads(line) for line in lines if line.endswith("}")]  # a torn last line is dropped
        self.known = {row["key"]: row for row in self.rows if "key" in row}

    def add(self, row: Row) -> Row:
        """Write a row and remember it."""
        self.rows.append(row)
        if "key" in row:
            self.known[row["key"]] = row
        torn = self.path.exists() and not self.path.read_bytes().endswith(b"\n") and self.path.stat().st_size > 0
        with self.path.open("a", encoding="utf-8") as file:
            file.write(("\n" if torn else "") + json.dumps(row) + "\n")
        return row


def key_of(job: Job, problem: Problem) -> str:
    """What a run depends on: itself, its problem, its worker, its pins, and the library where it is ours."""
    peer = PEERS[job.peer]
    files = [WORKERS / peer.worker, WORKERS / "work.py", WORKERS / "torch_problems.py"]
    files += [*(ROOT / "src" / "bisls").rglob("*.py")] if peer.ours else []
    return json.dumps([*asdict(job).values(), digest(files, ENVIRONMENTS[peer.environment].installs, problem.job())])


def run(job: Job, problem: Problem, arrays: Path, python: Path, goals: list[float], threads: int) -> Row:
    """Launch the worker of a job, wait, and score what it kept. A worker that fails is a row with its error."""
    peer = PEERS[job.peer]
    environment = plain_environment() | {
        name: str(threads) for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
    }
    environment["XLA_FLAGS"] = f"--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads={threads}"
    if peer.ours:
        environment["PYTHONPATH"] = str(ROOT / "src")
    with tempfile.TemporaryDirectory() as folder:
        order, result = Path(folder) / "job.json", Path(folder) / "result.npz"
        spec = {
            **asdict(job),
            **problem.job(),
            "contest": problem.kind,
            "problem": str(arrays),
            "result": str(result),
            "threads": threads,
        }
        spec |= {"launched": time.time()}
        order.write_text(json.dumps(spec), encoding="utf-8")
        error = ""
        try:
            ended([str(python), str(WORKERS / peer.worker), str(order)], 5 * job.cap + 120.0, environment)
        except Refused as refusal:
            error = str(refusal)
        wall = time.time() - spec["launched"]
        row: Row = {"kind": "run", **asdict(job), "error": error, "wall": wall, "goals": goals}
        if not result.exists():
            return {**row, "done": 0, "final": None, "nan": None, "arrivals": [None] * len(goals)}
        with np.load(result) as found:
            return row | summary(problem, {name: found[name] for name in found.files}, goals)


def summary(problem: Problem, found: dict[str, np.ndarray], goals: list[float]) -> Row:
    """Times, and the scores of the snapshots."""
    times, kept, points = found["times"], found["kept"], found["points"]
    scored = problem.score(kept, points, goals) if len(kept) else {"iterations": [], "values": [], "arrivals": []}
    finite = bool(np.isfinite(points[-1]).all()) if len(points) else False
    later = np.diff(times[1:], axis=0) if len(times) > 2 else np.zeros((0, 2))
    final = scored.get("final", scored["values"][-1] if scored["values"] else None)
    return {
        "done": len(times) - 1,
        "final": final if final is not None and isfinite(final) else None,
        "nan": None if finite or not len(kept) else int(kept[-1]),
        "ready": times[0].tolist() if len(times) else None,
        "first": (times[1] - times[0]).tolist() if len(times) > 1 else None,
        "each": np.median(later, axis=0).tolist() if len(later) else None,
        "arrivals": [
            None if k is None else {"iteration": k, "wall": float(times[k, 0]), "cpu": float(times[k, 1])}
            for k in scored["arrivals"]
        ],
        "curve": {
            "iterations": scored["iterations"],
            "wall": [float(times[k, 0]) for k in scored["iterations"]],
            "cpu": [float(times[k, 1]) for k in scored["iterations"]],
            "values": [value if isfinite(value) else None for value in scored["values"]],
        },
        "measures": scored.get("measures", {}),
        "versions": json.loads(str(found["versions"])),
    }
