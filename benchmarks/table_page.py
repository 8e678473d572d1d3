"""The measured tables of docs/tables.md, written from the records of `tables.py`: between marks, the words around them stay.

python benchmarks/tables.py --page docs/tables.md
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

ROWS = {
    "groups": "**a penalty a group, nothing set**",
    "features": "a penalty a feature, prior by nested folds",
    "one penalty": "one penalty",
    "free": "a free penalty a feature, K folds",
    "RidgeCV": "RidgeCV / LogisticRegressionCV",
    "LassoCV": "LassoCV / L1",
    "ElasticNetCV": "ElasticNetCV",
    "ARD": "ARDRegression",
    "optuna": "one penalty by optuna, 30 trials",
}
SAME = {"RidgeCV": "LogisticRegressionCV", "LassoCV": "L1"}
LASSO = {"LassoCV": "LassoCV", "lasso": "`WeightedLassoCV`, one penalty", "lasso, groups": "a penalty a group"}
LASSO |= {"sparho": "sparho, one penalty", "lasso, free": "a free penalty a feature"}
TIMES = {
    "groups": "groups over RidgeCV (leave-one-out) / LogisticRegressionCV",
    "five folds": "groups over RidgeCV with five folds",
    "one penalty": "one penalty over RidgeCV (leave-one-out) / LogisticRegressionCV",
    "lasso": "lasso, one penalty, over LassoCV",
    "sparho": "sparho over LassoCV",
}
BELOW = {"lasso": "LassoCV", "sparho": "LassoCV"}

Records = dict[Any, dict[str, Any]]


def paired(ours: list[float], theirs: list[float], classifies: bool) -> tuple[float, float]:
    """By how much ours are better, and the standard error of that."""
    gain = np.subtract(theirs, ours) if classifies else np.subtract(ours, theirs)
    return float(gain.mean()), float(gain.std(ddof=1) / len(gain) ** 0.5) if len(gain) > 1 else float("nan")


def column(done: Records, name: str, method: str, what: str, splits: int) -> list[float]:
    """What a method had on each split of a table; under the name that it has for classes, if need be."""
    found = [done.get((name, method, seed)) or done.get((name, SAME.get(method, ""), seed)) for seed in range(splits)]
    return [entry[what] for entry in found if entry is not None]


def cells_of(block: str) -> dict[tuple[str, str], str]:
    """Row and column of a table in markdown -> what stands there."""
    lines = [
        [cell.strip() for cell in line.strip().strip("|").split("|")] for line in block.splitlines() if "|" in line
    ]
    return {(row[0], head): cell for row in lines[2:] for head, cell in zip(lines[0][1:], row[1:], strict=False)}


def markdown(names: list[str], done: Records, splits: int, old: str = "") -> str:
    """A column a table, a row a method; below, by how much groups are better than one penalty.

    What has not been run on all splits stays as it is.
    """
    classifies = {name: (name, "LogisticRegressionCV", 0) in done for name in names}
    heads = [f"{name} ({'log-loss' if classifies[name] else 'R2'})" for name in names]
    lines, known = [f"| | {' | '.join(heads)} |", "|---" * (len(names) + 1) + "|"], cells_of(old)
    for method, label in ROWS.items():
        runs = [column(done, name, method, "score", splits) for name in names]
        cells = [
            f"{np.mean(run):.4f}" if len(run) == splits else known.get((label, head), "")
            for run, head in zip(runs, heads, strict=True)
        ]
        lines.append(f"| {label} | {' | '.join(cells)} |")
    gains = [
        paired(column(done, n, "groups", "score", splits), column(done, n, "RidgeCV", "score", splits), classifies[n])
        for n in names
    ]
    lines.append(
        f"| groups better than RidgeCV / LogisticRegressionCV by | {' | '.join(f'{g:+.4f} ± {e:.4f}' for g, e in gains)} |"
    )
    return "\n".join(lines)


def lasso(names: list[str], done: Records, splits: int, old: str = "") -> str:
    """The lasso beside LassoCV: scores, and the penalty as a ratio, its geometric mean over the splits.

    What has not been run on all splits stays as it is.
    """
    known = cells_of(old)
    heads = {name: f"{name} (R2)" for name in names}
    heads = {
        name: head
        for name, head in heads.items()
        if (name, "lasso", splits - 1) in done or any(head == own for _, own in known)
    }
    lines = [f"| | {' | '.join(heads.values())} |", "|---" * (len(heads) + 1) + "|"]

    def score(name: str, method: str) -> str:
        run = column(done, name, method, "score", splits)
        return f"{np.mean(run):.4f}" if len(run) == splits else ""

    def ratio(name: str, method: str) -> str:
        one, theirs = (column(done, name, which, "alpha", splits) for which in (method, "LassoCV"))
        complete = len(one) == len(theirs) == splits
        return f"{np.exp(np.mean(np.log(one) - np.log(theirs))):.2f}" if complete else ""

    rows = [(label, method, score) for method, label in LASSO.items()]
    rows += [("our one penalty over LassoCV's", "lasso", ratio), ("sparho's over LassoCV's", "sparho", ratio)]
    for label, method, cell in rows:
        cells = [cell(name, method) or known.get((label, head), "") for name, head in heads.items()]
        lines += [f"| {label} | {' | '.join(cells)} |"] if any(cells) else []
    return "\n".join(lines)


def times(spent: dict[str, dict[str, float]]) -> str:
    """Ratios of process times."""

    def ratio(one: dict[str, float], row: str) -> str:
        top, below = ("groups", row) if row == "five folds" else (row, BELOW.get(row, "rival"))
        return f"{one[top] / one[below]:.2g}" if top in one and below in one else ""

    lines = [f"| | {' | '.join(spent)} |", "|---" * (len(spent) + 1) + "|"]
    for row, label in TIMES.items():
        cells = [ratio(one, row) for one in spent.values()]
        lines += [f"| {label} | {' | '.join(cells)} |"] if any(cells) else []
    return "\n".join(lines)


def commits(done: Records) -> str:
    """Which commits the scores are of, and of which methods."""
    found: dict[str, dict[str, None]] = {}
    for (_, method, _), entry in done.items():
        found.setdefault(entry.get("commit", "unknown"), {})[method] = None
    return "; ".join(f"{', '.join(methods)} are of commit {commit}" for commit, methods in found.items())


def written(page: Path, blocks: dict[str, Callable[[str], str]]) -> None:
    """The page with what stands between its marks, ``<!-- name -->`` and ``<!-- end of name -->``, made anew."""
    text = page.read_text(encoding="utf-8")
    for name, make in blocks.items():
        begin, end = f"<!-- {name} -->", f"<!-- end of {name} -->"
        if begin not in text or end not in text:
            raise SystemExit(f"{page} has no marks {begin} and {end}")
        old = text.partition(begin)[2].partition(end)[0]
        made = f"{begin}\n\n{make(old)}\n\n{end}"
        text = re.sub(re.escape(begin) + ".*?" + re.escape(end), lambda _, made=made: made, text, flags=re.DOTALL)
    page.write_text(text, encoding="utf-8")
