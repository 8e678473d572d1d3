"""Turn the numbers of benchmarks/optimisers.py into docs/benchmarks.md. It runs nothing.

python benchmarks/report.py out/optimisers.json docs/benchmarks.md
"""

from __future__ import annotations

import json
import sys
from math import isfinite
from pathlib import Path
from typing import Any

import optimisers

OURS, PEER = "bisls Auto", "schedule-free SGD"
KNOBS = [str(knob) for knob in optimisers.KNOBS]

INTRODUCTION = """\
# Benchmarks

## Step-size optimisers

Logistic regression that no model can fit exactly: features standardised, 10 % of the labels flipped, L2 penalty 1e-3,
batches of 32 without replacement, {iters} iterations, {seeds}. The gap is the full training loss, at the iterate that
the optimiser hands over, minus the optimum. Repeat it with

    BISLS_DATA=folder-with-a9a-and-w8a make bench
    python benchmarks/report.py out/optimisers.json docs/benchmarks.md

The columns 0.1 to 1000 are gaps over the one knob, `lr`: for `Auto` where its first measurement begins, for the other
rules of this library the ceiling, for the peers their learning rate. Rows of torch's own optimisers are the best of a
grid of nine rates from 1e-3 to 10, chosen on the gap itself.

### Aims

| aim | measured | |
|---|---|---|
"""


def number(gap: float | None) -> str:
    if gap is None:
        return ""
    return f"{gap:.1e}" if isfinite(gap) else "NaN"


def spread(row: dict[str, float]) -> float:
    gaps = [row[knob] for knob in KNOBS if knob in row]
    return max(gaps) / min(gaps) if gaps and all(isfinite(gap) for gap in gaps) else float("nan")


def verdict(holds: bool) -> str:
    return "met" if holds else "**not met**"


def report(summary: dict[str, Any]) -> str:
    origin, gaps, time = summary["origin"], summary["gaps"], summary["time"]
    seeds = f"mean of {summary['seeds']} seeds (0 to {summary['seeds'] - 1})"
    lines = INTRODUCTION.format(iters=summary["iters"], seeds=seeds).splitlines()
    for data in ("breast_cancer", "digits"):
        if data in gaps:
            mine, theirs = gaps[data][OURS]["default"], gaps[data][PEER]["default"]
            aim = f"`Auto` at or below schedule-free's default on {data}"
            lines.append(f"| {aim} | {mine:.1e} against {theirs:.1e} | {verdict(mine <= theirs)} |")
    worst = max(spread(gaps[data][OURS]) for data in gaps)
    aim = "`Auto` never above 3 times its own best over starts 0.1 to 1000"
    lines.append(f"| {aim} | {worst:.2f} times | {verdict(worst <= 3)} |")
    ratio = time["lenet"]["bisls SPSB"]
    aim = "`SPSB`'s step at most 1.15 times that of SGD(foreach), LeNet, batch 256"
    lines.append(f"| {aim} | {ratio:.2f} times | {verdict(ratio <= 1.15)} |")
    for data, table in gaps.items():
        judged = "`Auto` was developed on it" if data in optimisers.DEVELOPED_ON else "`Auto` was only judged on it"
        lines += ["", f"### {data} ({judged})", ""]
        lines += ["| optimiser | default | 0.1 | 1 | 10 | 100 | 1000 | worst / best | forwards a step |"]
        lines += ["|---|---|---|---|---|---|---|---|---|"]
        for name, row in table.items():
            grid = "best of grid" in name
            cells = ["" if grid else number(row.get(knob)) for knob in KNOBS]
            over = "" if grid else f"{spread(row):.1f}" if isfinite(spread(row)) else "NaN"
            shown = f"**{name}**" if name == OURS else name
            forwards = summary["forwards"][data][name]
            lines.append(f"| {shown} | {number(row['default'])} | {' | '.join(cells)} | {over} | {forwards:.2f} |")
    small = next(key for key in time if key != "lenet")
    lines += ["", "### Time of a step", "", "Relative to torch.optim.SGD in the same run, one thread.", ""]
    lines += [f"| optimiser | logistic regression ({small}) | LeNet, batch 256 |", "|---|---|---|"]
    for name in dict.fromkeys([*time[small], *time["lenet"]]):
        cells = [f"{time[key][name]:.2f}" if name in time[key] else "" for key in (small, "lenet")]
        lines.append(f"| {name} | {cells[0]} | {cells[1]} |")
    versions = ", ".join(f"{name} {version}" for name, version in origin.items() if name != "commit")
    lines += ["", "### Where the numbers come from", "", f"Commit {origin['commit']}; {versions}; two cores, CPU.", ""]
    lines += ["sls, Sps and AdaSLS were left out: no release on the package index installs.", ""]
    if "note" in summary:
        lines += [summary["note"], ""]
    for name, reason in summary.get("failed", {}).items():
        lines += [f"{name} raised at some rates (NaN above): {reason}.", ""]
    return "\n".join(lines)


def main() -> int:
    if len(sys.argv) != 3 or not Path(sys.argv[1]).exists():
        print(__doc__, file=sys.stderr)
        return 2
    Path(sys.argv[2]).write_text(report(json.loads(Path(sys.argv[1]).read_text())))
    return 0


if __name__ == "__main__":
    sys.exit(main())
