"""The picture of docs/own_problem.md: a training script as it is and with an upper level, three seeds.

    python benchmarks/four_lines.py --out out

It runs examples/training.py and examples/training_bilevel.py, from their beginning, and draws test accuracy and trust by epoch.
"""

from __future__ import annotations

import argparse
import importlib.util
import logging
import tempfile
from pathlib import Path
from statistics import mean

import matplotlib.pyplot as plt

EXAMPLES = Path(__file__).parent.parent / "examples"
WRONG = (0, 20, 40, 60, 80)  # percent of the labels of each of the five


def rows_of(name: str, seed: int, epochs: int) -> list[dict]:
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    with tempfile.TemporaryDirectory() as folder:
        found = module.main(["--seed", str(seed), "--epochs", str(epochs), "--checkpoint", f"{folder}/run.pt"])
    return found["rows"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument("--out", type=Path, default=Path("out"), help="the folder of the picture")
    arguments = parser.parse_args()
    logging.disable(logging.INFO)
    seeds = range(arguments.seeds)
    runs = {name: [rows_of(name, s, arguments.epochs) for s in seeds] for name in ("training", "training_bilevel")}
    figure, (left, right) = plt.subplots(1, 2, figsize=(9.6, 3.6), layout="constrained")
    for name, label, colour in (
        ("training", "as it is", "#777777"),
        ("training_bilevel", "with an upper level", "#0b63a5"),
    ):
        curves = [[row["accuracy"] for row in run] for run in runs[name]]
        for i, curve in enumerate(curves):
            left.plot(range(1, len(curve) + 1), curve, color=colour, alpha=0.9, lw=1.6, label=label if i == 0 else None)
        ends = [curve[-1] for curve in curves]
        print(f"{label}: test accuracy {mean(ends):.3f} ({', '.join(f'{end:.3f}' for end in ends)})")
    left.set(xlabel="epoch", ylabel="test accuracy", title="A training script, three seeds", ylim=(0, 1))
    left.legend(loc="lower right", frameon=False)
    colours = plt.get_cmap("viridis")([0.05, 0.25, 0.5, 0.72, 0.9])
    for i, wrong in enumerate(WRONG):
        curve = [mean(run[k]["trust"][i] for run in runs["training_bilevel"]) for k in range(arguments.epochs)]
        right.plot(range(1, len(curve) + 1), curve, color=colours[i], lw=1.8, label=f"{wrong} % wrong")
    right.axhline(1.0, color="#999999", lw=0.8, ls="--")
    right.set(xlabel="epoch", ylabel="weight of a person's labels", title="Trust in five people, mean over seeds")
    right.legend(frameon=False)
    arguments.out.mkdir(parents=True, exist_ok=True)
    path = arguments.out / "four_lines.png"
    figure.savefig(path, dpi=110)
    trusts = [mean(run[-1]["trust"][i] for run in runs["training_bilevel"]) for i in range(5)]
    print(f"trust at the end, mean: {', '.join(f'{own:.2f}' for own in trusts)}; picture: {path}")


if __name__ == "__main__":
    main()
