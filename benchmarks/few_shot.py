"""Few shots of Omniglot with nothing set, at several T and numbers of shots, beside MAML at tuned rates.

Networks with two hidden layers of 64, 5 ways, 5 queries of each character, 8 tasks an iteration. Accuracy is that on 100
tasks of characters that nobody has trained on, after T plain steps from x with the rate that does best on 50 tasks of yet
others. MAML is `Alternating` with Lookahead(), Adam above and plain steps below, tuned by the loss after 300 iterations on
seed 0 over 0.001, 0.003, 0.01 above with 0.3 below, 0.003 with 0.1 and 1, 0.01 with 0.1.

    python benchmarks/few_shot.py                    T of 1, 5, 10; 1 and 5 shots; three seeds (about ten minutes)
    python benchmarks/few_shot.py --steps 5 --shots 1 --seeds 0

Omniglot comes from the folder of BISLS_DATA. Runs are kept in out/few_shot.jsonl, those of BiSLS by commit.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import mean
from typing import Any

import torch

import bisls
from bisls import data, tasks

PAIRS = ((0.001, 0.3), (0.003, 0.3), (0.01, 0.3), (0.003, 0.1), (0.003, 1.0), (0.01, 0.1))
LOOKS = (50, 100, 200, 300)


class Looks(bisls.Callback):
    """Loss and accuracy on new tasks, and the processor's seconds up to there without this."""

    def __init__(self, task: tasks.Task):
        self.task, self.seen, self.spent, self.since = task, [], 0.0, time.process_time()

    def step(self, record: Any, state: Any) -> None:
        if record.k + 1 in LOOKS:
            self.spent += time.process_time() - self.since
            accuracy = self.task.metrics()["accuracy"]
            self.seen.append((round(accuracy, 4), round(self.task.exact(), 4), round(self.spent, 2)))
            self.since = time.process_time()


def run(steps: int, shots: int, seed: int, rates: Sequence[float] | None) -> dict[str, Any]:
    drawings = data.load("omniglot")
    source = tasks.Pictures(drawings.x, drawings.y, ways=5)
    task = tasks.few_shot(source, shots=shots, queries=5, hidden=64, lower_iters=steps, seed=seed)
    torch.manual_seed(seed)
    if rates is None:
        solver: bisls.Solver = bisls.BiSLS(task.problem, lower_iters=steps)
    else:
        parts = {"upper_step": bisls.Constant(rates[0]), "lower_step": bisls.Constant(rates[1])}
        solver = bisls.Alternating(task.problem, hypergrad=bisls.Lookahead(), lower_iters=steps, **parts)
    looks = Looks(task)
    history = bisls.fit(solver, task.upper_data, None, LOOKS[-1], progress=False, callbacks=[looks])
    return {"seen": looks.seen, "statuses": sorted({record.status.name for record in history})}


class Runs:
    """What was run before is not run again."""

    def __init__(self, path: Path, commit: str):
        path.parent.mkdir(parents=True, exist_ok=True)
        lines = path.read_text().splitlines() if path.exists() else []
        self.path, self.commit = path, commit
        self.rows = {row["key"]: row for row in map(json.loads, lines)}

    def get(self, steps: int, shots: int, seed: int, rates: Sequence[float] | None) -> list[list[float]]:
        key = json.dumps([steps, shots, seed, rates or self.commit])
        if key not in self.rows:
            row = self.rows[key] = {"key": key, **run(steps, shots, seed, rates)}
            with self.path.open("a") as file:
                file.write(json.dumps(row) + "\n")
        return self.rows[key]["seen"]


def line(steps: int, shots: int, seeds: Sequence[int], name: str, runs: list[list[list[float]]]) -> str:
    means = [f"{mean(seen[i][0] for seen in runs):.3f}" for i in range(len(LOOKS))]
    worst = min(seen[-1][0] for seen in runs)
    cells = [str(steps), str(shots), name, *means, f"{worst:.3f}", f"{mean(seen[-1][2] for seen in runs):.1f}"]
    return "| " + " | ".join(cells) + " |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", nargs="*", type=int, default=[1, 5, 10], help="T (default: 1 5 10)")
    parser.add_argument("--shots", nargs="*", type=int, default=[1, 5], help="samples of a character (default: 1 5)")
    parser.add_argument("--seeds", nargs="*", type=int, default=[0, 1, 2], help="default: 0 1 2")
    parser.add_argument("--out", type=Path, default=Path("out"), help="where runs are kept (default: out)")
    arguments = parser.parse_args()
    command = ["git", "describe", "--always", "--dirty"]
    commit = subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip() or "unknown"
    runs = Runs(arguments.out / "few_shot.jsonl", commit)
    head = ["T", "shots", "", *(f"after {k}" for k in LOOKS), f"worst after {LOOKS[-1]}", "CPU seconds"]
    print("| " + " | ".join(head) + " |\n" + "|---" * len(head) + "|")
    for steps in arguments.steps:
        for shots in arguments.shots:
            own = [runs.get(steps, shots, seed, None) for seed in arguments.seeds]
            print(line(steps, shots, arguments.seeds, "BiSLS", own), flush=True)
            best = min(PAIRS, key=lambda pair: runs.get(steps, shots, 0, pair)[-1][1])
            tuned = [runs.get(steps, shots, seed, best) for seed in arguments.seeds]
            print(line(steps, shots, arguments.seeds, f"MAML, {best[0]} / {best[1]}", tuned), flush=True)
    print(f"\ncommit {commit}, torch {torch.__version__}")


if __name__ == "__main__":
    main()
