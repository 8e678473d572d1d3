"""An iteration on 30 penalties beside AID-CG written in plain torch: what is left when the arithmetic is next to nothing.

Plain torch is what most libraries come down to: T = 20 lower steps, ten conjugate gradients by autograd, Adam above. All take
turns of ten iterations in one process with one thread, so that the ratios depend little on what else the machine does. (With
turns of one iteration, `--turn 1`, each finds the processor's caches full of the others' code, as no run of its own does.)

    python benchmarks/small.py                 about a minute
    python benchmarks/small.py --iterations 5  a look at whether it runs
    python benchmarks/small.py --compile       also what torch.compile would make of the lower loop (needs a C++ compiler)

Results: out/small.json, out/small.md.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from statistics import mean

import numpy as np
import torch
from rich.console import Console
from rich.progress import track

import bisls
from bisls import tasks

CG10 = bisls.Implicit(bisls.CG(iters=10, tol=0.0))
METHODS: dict[str, Callable[[bisls.Bilevel], bisls.Solver]] = {
    "Alternating, T = 20, CG 10, the same rates": lambda p: bisls.Alternating(
        p, lower_iters=20, lower_step=bisls.Constant(0.2), upper_step=bisls.Constant(0.1), hypergrad=CG10
    ),
    "BiSLS, T = 20, CG 10": lambda p: bisls.BiSLS(p, lower_iters=20, hypergrad=CG10),
    "BiSLS, nothing set": bisls.BiSLS,
}


def lower_steps(loss: Callable[[], torch.Tensor], y: torch.Tensor) -> None:
    """The lower loop of plain torch."""
    for _ in range(20):
        (gradient,) = torch.autograd.grad(loss(), y)
        with torch.no_grad():
            y.sub_(gradient, alpha=0.2)


def plain_torch(task: tasks.Task) -> Callable[[], None]:
    """One iteration of approximate implicit differentiation, as one would write it."""
    upper_loss, lower_loss = task.problem.upper_loss, task.problem.lower_loss
    (x,), (y,) = task.problem.x.tensors, task.problem.y.tensors
    adam = torch.optim.Adam([x], 0.1)

    def iterate() -> None:
        lower_steps(lambda: lower_loss(task.lower_data), y)
        (b,) = torch.autograd.grad(upper_loss(task.upper_data), y)
        (gradient,) = torch.autograd.grad(lower_loss(task.lower_data), y, create_graph=True)
        z, r, p = torch.zeros_like(b), b.clone(), b.clone()
        rr = r @ r
        for _ in range(10):
            (hp,) = torch.autograd.grad(gradient, y, p, retain_graph=True)
            a = rr / (p @ hp)
            z, r = z + a * p, r - a * hp
            rr, before = r @ r, rr
            p = r + rr / before * p
        (mixed,) = torch.autograd.grad(gradient, x, z)
        x.grad = -mixed
        adam.step()

    return iterate


def compiled_loop() -> str:
    """The 20 lower steps as one function given to torch.compile, beside the loop of plain torch: in words."""
    task = tasks.logistic_penalties()
    (features, labels), x = task.lower_data, task.problem.x.read()

    def loss(y: torch.Tensor) -> torch.Tensor:
        fit = torch.nn.functional.binary_cross_entropy_with_logits(features @ y, labels)
        return fit + 0.5 * (torch.sigmoid(x) * y * y).sum()

    def loop(y: torch.Tensor) -> torch.Tensor:
        for _ in range(20):
            y = y - 0.2 * torch.func.grad(loss)(y)
        return y

    def plain(y: torch.Tensor) -> torch.Tensor:
        y = y.clone().requires_grad_()
        lower_steps(lambda: loss(y), y)
        return y.detach()

    def milliseconds(call: Callable[[torch.Tensor], torch.Tensor], repeats: int) -> float:
        start = time.process_time()
        for _ in range(repeats):
            call(y)
        return 1e3 * (time.process_time() - start) / repeats

    y = task.problem.y.read()
    before, own = plain(y), milliseconds(plain, 100)
    os.environ["TORCHINDUCTOR_FORCE_DISABLE_CACHES"] = "1"  # nothing is left over from a run before
    start, quick = time.time(), torch.compile(loop, fullgraph=True)
    gap = float((quick(y) - before).abs().max())
    cold = time.time() - start
    return (
        f"torch.compile of the 20 lower steps: {cold:.0f} s until the first result, then "
        f"{own / milliseconds(quick, 200):.1f} times as fast as plain torch; largest difference {gap:.1e}"
    )


def contestants() -> dict[str, tuple[tasks.Task, Callable[[], object]]]:
    task = tasks.logistic_penalties()
    found: dict[str, tuple[tasks.Task, Callable[[], object]]] = {"AID-CG in plain torch": (task, plain_torch(task))}
    for name, make in METHODS.items():
        task = tasks.logistic_penalties()
        solver = make(task.problem)
        found[name] = (task, lambda s=solver, t=task: s.step(t.upper_data, t.lower_data))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--iterations", type=int, default=200, help="iterations of each (default: 200)")
    parser.add_argument("--turn", type=int, default=10, help="iterations a turn (default: 10)")
    parser.add_argument("--out", type=Path, default=Path("out"), help="where the table goes (default: out)")
    parser.add_argument("--compile", action="store_true", help="also give the lower loop to torch.compile")
    arguments = parser.parse_args()
    for name in ("iterations", "turn"):
        if getattr(arguments, name) < 1:
            parser.error(f"--{name} must be at least 1, got {getattr(arguments, name)}")
    torch.set_num_threads(1)
    running = contestants()
    seconds: dict[str, list[float]] = {name: [] for name in running}
    for done in track(range(0, arguments.iterations, arguments.turn), "taking turns"):
        for name, (_task, iterate) in running.items():
            for _ in range(min(arguments.turn, arguments.iterations - done)):
                start = time.process_time()
                iterate()
                seconds[name].append(time.process_time() - start)
    (plain, *_) = seconds.values()
    results = {
        name: {
            "ratio": sum(plain) / sum(spent),
            "quartiles": np.percentile(np.divide(plain, spent), [25, 75]).tolist(),
            "milliseconds": 1e3 * mean(spent),
            "F": running[name][0].exact(),
        }
        for name, spent in seconds.items()
    }
    call = ["git", "describe", "--always", "--dirty"]
    commit = subprocess.run(call, capture_output=True, text=True, check=False, cwd=Path(__file__).parent).stdout.strip()
    facts = {"commit": commit, "torch": torch.__version__, "python": platform.python_version(), "threads": 1}
    facts |= {"machine": platform.machine(), "iterations": arguments.iterations, "turn": arguments.turn}
    arguments.out.mkdir(parents=True, exist_ok=True)
    (arguments.out / "small.json").write_text(json.dumps({"facts": facts, "results": results}, indent=1))
    lines = [
        f"| an iteration | times as fast as plain torch (quartiles) | ms here | exact F after {arguments.iterations} |"
    ]
    lines += ["|---|---|---|---|"]
    for name, row in results.items():
        low, high = row["quartiles"]
        lines.append(
            f"| {name} | {row['ratio']:.2f} ({low:.2f} to {high:.2f}) | {row['milliseconds']:.2f} | {row['F']:.4f} |"
        )
    if arguments.compile:
        lines += ["", compiled_loop()]
    text = "\n".join(lines)
    (arguments.out / "small.md").write_text(text + "\n")
    Console().print(text, markup=False, soft_wrap=True)


if __name__ == "__main__":
    main()
