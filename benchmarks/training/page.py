"""What `benchmarks/networks.py` found, in a file of its own, and the tables of the page that are made of it.

A row is one network, length and batch size: the best point of the grid, and the mean loss of every other optimiser. It stays
until it is measured again, so the file says for each row at which commit `Auto`, and at which all the others, were run.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from math import inf
from pathlib import Path
from statistics import median

from training.entries import KNOBS, OURS, RIVALS

COSINE = "tuned, cosine"
Cell = tuple[int, int]


@dataclass
class Row:
    """One network, length and batch size.

    Attributes:
        problem: The network.
        steps: The length of a run.
        batch: Rows a step.
        seeds: How many there were.
        tuned: The loss of the best point of the grid.
        winner: That point.
        losses: The mean loss of the others; None where a run ended in no number.
        forwards: Of `Auto`, a step.
        commits: Of `Auto`, and of the others.
    """

    problem: str
    steps: int
    batch: int
    seeds: int
    tuned: float
    winner: str
    losses: dict[str, float | None] = field(default_factory=dict)
    forwards: float | None = None
    commits: dict[str, str] = field(default_factory=dict)

    @property
    def cell(self) -> Cell:
        return self.steps, self.batch

    def ratio(self, name: str) -> float | None:
        """The loss over the tuned one; None where it was not run."""
        if name not in self.losses:
            return None
        loss = self.losses[name]
        return inf if loss is None else loss / self.tuned


@dataclass
class Found:
    """All that is known: rows, the losses for other starts over that of the default, times, and what was installed."""

    rows: list[Row] = field(default_factory=list)
    knob: dict[str, list[float]] = field(default_factory=dict)
    times: list[list[str]] = field(default_factory=list)
    facts: dict[str, str] = field(default_factory=dict)

    @classmethod
    def read(cls, path: Path) -> Found:
        if not path.exists():
            return cls()
        told = json.loads(path.read_text())
        return cls([Row(**row) for row in told["rows"]], told["knob"], told["times"], told["facts"])

    def write(self, path: Path) -> None:
        """One line a row, so that a change can be read."""
        self.rows.sort(key=lambda row: (row.batch * row.steps, row.batch, row.problem))
        rows = ",\n".join(json.dumps(asdict(row)) for row in self.rows)
        rest = {"knob": self.knob, "times": self.times, "facts": self.facts}
        tail = ",\n".join(f'"{key}": {json.dumps(value)}' for key, value in rest.items())
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f'{{"rows": [\n{rows}\n],\n{tail}}}\n')

    def row(self, problem: str, cell: Cell) -> Row | None:
        return next((row for row in self.rows if (row.problem, row.cell) == (problem, cell)), None)

    def put(self, new: Row) -> None:
        """In place of what was known of that row; entries that were not run again stay."""
        old = self.row(new.problem, new.cell)
        if old is not None:
            self.rows.remove(old)
            new.losses = {**old.losses, **new.losses}
            new.commits = {**old.commits, **new.commits}
            new.forwards = new.forwards or old.forwards
        self.rows.append(new)


# --- tables


def regrets(rows: Iterable[Row], judged: Callable[[str], bool]) -> str:
    """The loss over the tuned one, a line a row, with median and worst; in Markdown."""
    rows = list(rows)
    names = [name for name in (OURS, *RIVALS, COSINE) if any(name in row.losses for row in rows)]
    lines = [f"| network | steps x batch | tuned | {' | '.join(names)} |", "|---" * (3 + len(names)) + "|"]
    for row in rows:
        cells = [_text(row.ratio(name)) for name in names]
        title = f"{row.problem}{' (judged)' * judged(row.problem)}"
        lines.append(f"| {title} | {row.steps} x {row.batch} | {row.tuned:.4g} ({row.winner}) | {' | '.join(cells)} |")
    for title, measure in (("median", median), ("worst", max)):
        known = [[r for r in (row.ratio(name) for row in rows) if r is not None] for name in names]
        cells = [_text(measure(own)) if len(own) == len(rows) else "" for own in known]
        lines.append(f"| **{title}** | | | {' | '.join(cells)} |")
    return "\n".join(lines) + f"\n\n{_where(rows)}\n"


def summary(groups: dict[str, list[Row]]) -> str:
    """Median and worst of every optimiser, a line a table."""
    names = [OURS, *RIVALS]
    lines = [f"| | {' | '.join(names)} |", "|---" * (1 + len(names)) + "|"]
    for title, rows in groups.items():
        cells = []
        for name in names:
            known = [r for r in (row.ratio(name) for row in rows) if r is not None]
            cells.append(f"{_text(median(known))} / {_text(max(known))}" if rows and len(known) == len(rows) else "")
        lines.append(f"| {title} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def knobs(found: Found) -> str:
    """The loss for each start over that of the default: nothing should depend on it."""
    title = f"| network | {' | '.join(f'{knob:g}' for knob in KNOBS)} | worst / best |"
    lines = [title, "|---" * (2 + len(KNOBS)) + "|"]
    for problem, known in found.knob.items():
        told = " | ".join(f"{ratio:.3f}" for ratio in known)
        lines.append(f"| {problem} | {told} | {max(known) / min(known):.3f} |")
    return "\n".join(lines) + "\n"


def times(found: Found) -> str:
    title = "| network | closure that returns the loss | torch's closure | copies of the parameters |"
    return "\n".join([title, "|---|---|---|---|", *(f"| {' | '.join(row)} |" for row in found.times)]) + "\n"


def forwards(rows: Iterable[Row]) -> str:
    """Forward passes a step, by length."""
    by_length: dict[int, list[float]] = {}
    for row in rows:
        if row.forwards is not None:
            by_length.setdefault(row.steps, []).append(row.forwards)
    lengths = sorted(by_length)
    lines = [f"| steps | {' | '.join(f'{n:,}' for n in lengths)} |", "|---" * (1 + len(lengths)) + "|"]
    lines.append(f"| forward passes a step, at most | {' | '.join(f'{max(by_length[n]):.2f}' for n in lengths)} |")
    return "\n".join(lines) + "\n"


def filled(page: str, tables: dict[str, str]) -> str:
    """A page with its tables: each stands between a line that names it and one that ends it."""
    for name, text in tables.items():
        begin, end = f"<!-- {name} -->\n", f"<!-- end of {name} -->"
        before, found, rest = page.partition(begin)
        if not found or end not in rest:
            raise ValueError(f"the page has no place for {name!r}")
        page = f"{before}{begin}\n{text}\n{end}{rest.partition(end)[2]}"
    return page


def _text(ratio: float | None) -> str:
    return "" if ratio is None else "lost" if ratio == inf else f"{ratio:.3f}" if ratio < 100 else f"{ratio:.0f}"


def _where(rows: list[Row]) -> str:
    seeds = sorted({row.seeds for row in rows})
    commits = {kind: sorted({row.commits[kind] for row in rows if kind in row.commits}) for kind in (OURS, "others")}
    told = "; ".join(f"{kind} at {', '.join(own)}" for kind, own in commits.items() if own)
    return f"{' or '.join(str(n) for n in seeds)} seed{'s' * (seeds[-1:] != [1])}; {told}." if rows else ""
