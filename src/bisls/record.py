"""What happened: Record of one outer iteration, History of a run."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields
from importlib import import_module
from math import isfinite, isnan, nan
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np

from bisls._check import PATH, require_argument, settled
from bisls._files import write_whole
from bisls.oracle import Cost
from bisls.status import Status


@dataclass(frozen=True)
class Record:
    """One outer iteration: losses, both steps, what the searches and the linear solve did, and what it cost.

    Attributes:
        k: The iteration, from 0.
        upper_value: f(x, y) on the upper batch, before the step.
        lower_value: g(x, y) on the lower batch of the hypergradient, after the lower loop.
        alpha: The upper step taken; 0 where none was.
        beta: The last lower step taken; 0 where none was.
        upper_checks: Trial points along the upper ray.
        lower_checks: Trial points of all lower searches of this iteration.
        hypergrad_norm: ||h||.
        residual: Relative residual of the linear system behind h; NaN where the method has none.
        status: The most serious of the three below.
        cost: Evaluations made.
        lower_steps: Lower steps taken (fewer than asked for where ``lower_tol`` ended the loop).
        lower_grad_norm: ||grad_y g|| at the end of the lower loop, on the batch of the hypergradient.
        upper_status: How the upper search ended.
        lower_status: The most serious ending of a lower search.
        linear_status: How the linear solve ended.
        view: Which problem the hypergradient saw: "implicit" (y solves the lower problem) or "t-step" (y is trained for T steps).
    """

    k: int
    upper_value: float
    lower_value: float
    alpha: float
    beta: float
    upper_checks: int
    lower_checks: int
    hypergrad_norm: float
    residual: float
    status: Status = Status.OK
    cost: Cost = field(default_factory=Cost)
    lower_steps: int = 0
    lower_grad_norm: float = nan
    upper_status: Status = Status.OK
    lower_status: Status = Status.OK
    linear_status: Status = Status.OK
    view: str = "implicit"

    @property
    def advice(self) -> str:
        """What failed at which level, and what would help; empty where nothing did."""
        parts = (
            ("upper level", self.upper_status),
            ("lower level", self.lower_status),
            ("linear solve", self.linear_status),
        )
        return "; ".join(f"{where}: {status.name}: {status.advice}" for where, status in parts if status.failed)

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers and strings, for JSON; the counts of `cost` lie beside the others."""
        row = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "cost"}
        named = {name: value.name for name, value in row.items() if isinstance(value, Status)}
        return {**row, **named, **asdict(self.cost)}

    @classmethod
    def from_dict(cls, row: Mapping[str, Any]) -> Record:
        """The record that `to_dict` wrote."""
        own = {f.name: row[f.name] for f in fields(cls) if f.name in row}
        named = {name: Status[value] for name, value in own.items() if name.endswith("status")}
        return cls(**{**own, **named, "cost": Cost(**{f.name: row[f.name] for f in fields(Cost) if f.name in row})})


class SolverError(RuntimeError):
    """The solver gave up: the message names the level, what happened and what would help.

    Attributes:
        record: The record of the iteration in which it did.
    """

    def __init__(self, text: str, record: Record):
        super().__init__(text)
        self.record = record


class History:
    """The records of a run, in order.

    Attributes:
        records: One `Record` an iteration.
        evaluations: What `Evaluate` found: a dict an evaluation, with the iteration as ``k`` and a number for each name.
        stopped: Why the run ended before all its iterations; empty where it did not.
        unsaved: Why the last checkpoint could not be written; empty where it was, or where none was asked for.

    Examples:
        >>> history = History()
        >>> history.append(Record(0, 2.5, 1.0, 0.1, 0.2, 1, 3, 0.7, 1e-4))
        >>> history.append(Record(1, 2.0, 0.9, 0.2, 0.2, 2, 3, 0.5, 1e-4))
        >>> len(history), history["upper_value"].tolist()
        (2, [2.5, 2.0])
    """

    def __init__(self, records: Iterable[Record] = (), evaluations: Iterable[dict[str, Any]] = ()):
        self.records: list[Record] = _listed("records", records, Record)
        self.evaluations: list[dict[str, Any]] = _listed("evaluations", evaluations, dict)
        self.stopped = ""
        self.unsaved = ""

    def append(self, record: Record) -> None:
        """Add the next record."""
        self.records.append(record)

    def __len__(self) -> int:
        return len(self.records)

    def __iter__(self) -> Iterator[Record]:
        return iter(self.records)

    def __getitem__(self, name: str) -> np.ndarray:
        return np.array([record.to_dict()[name] for record in self.records])

    def __repr__(self) -> str:
        last = f", last upper loss {self.records[-1].upper_value:.4g}" if self.records else ""
        stopped = f", stopped: {self.stopped}" if self.stopped else ""
        unsaved = f", unsaved: {self.unsaved}" if self.unsaved else ""
        return f"History({len(self):,} records{last}{stopped}{unsaved})"

    def to_arrays(self) -> dict[str, np.ndarray]:
        """One array a column."""
        rows = [record.to_dict() for record in self.records]
        return {name: np.array([row[name] for row in rows]) for name in (rows[0] if rows else ())}

    def to_frame(self) -> Any:
        """A pandas DataFrame with k as its index: a column for each field of a record and for each evaluation.

        Raises:
            ImportError: pandas is not installed.
        """
        pandas = _imported("pandas", "History.to_frame()", "pip install pandas")
        frame = pandas.DataFrame([record.to_dict() for record in self.records])
        if self.evaluations:
            found = pandas.DataFrame(self.evaluations)
            frame = frame.merge(found, on="k", how="left") if len(frame) else found
        return frame.set_index("k") if "k" in frame else frame

    def to_lines(self) -> list[str]:
        """Each record as a line of strict JSON: NaN is null, infinities are strings; evaluations lie under their own key.

        The last line also says why the run had ``stopped``, if it had.
        """
        found = {row["k"]: {name: value for name, value in row.items() if name != "k"} for row in self.evaluations}
        last = len(self.records) - 1
        return [
            _line(record, found.get(record.k, {}), self.stopped if i == last else "")
            for i, record in enumerate(self.records)
        ]

    def save(self, path: str | PathLike[str]) -> None:
        """Write the history as a file of JSON lines, which `History.load` reads. A file of that name is replaced in one stroke.

        Args:
            path: The file. Its folder is made if need be. An ending that names another kind of table is refused.
        """
        settled("History.save", "path", path, PATH)
        table = Path(path).suffix.lower() in _TABLES
        rule = (
            "names a table, and this writes JSON lines: end it in .jsonl, or use history.to_frame() (to_csv and others)"
        )
        require_argument("History.save", "path", path, not table, rule)
        write_whole(path, "".join(f"{line}\n" for line in self.to_lines()))

    @classmethod
    def load(cls, path: str | PathLike[str]) -> History:
        """The history in a file of JSON lines that `save` or `JSONLines` wrote. A last line that was cut off is left out.

        Raises:
            ValueError: The file holds something else; the message names the line.
        """
        history = cls()
        settled("History.load", "path", path, PATH)
        try:
            lines = Path(path).read_text(encoding="utf-8").split("\n")
        except UnicodeDecodeError as error:
            raise ValueError(
                f"`History.load(path={str(path)!r})`: the file is no text ({error}); pass a file that history.save(path) or "
                "JSONLines(path) wrote"
            ) from error
        except IsADirectoryError as error:
            raise ValueError(f"`History.load(path={str(path)!r})`: this is a folder; name a file in it") from error
        for number, line in enumerate(lines, 1):
            try:
                row = {name: _number(value) for name, value in json.loads(line).items()} if line else None
                record = Record.from_dict(row) if row else None
            except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
                if number == len(lines):
                    break  # the writer was killed in the middle of it
                raise ValueError(
                    f"`History.load({str(path)!r})`: line {number} is not a record ({error}); pass a file that "
                    "history.save(path) or JSONLines(path) wrote"
                ) from error
            if row and record:
                history.append(record)
                history.stopped = str(row.get("stopped", ""))
                if row.get("evaluations"):
                    found = {name: _number(value) for name, value in row["evaluations"].items()}
                    history.evaluations.append({"k": record.k, **found})
        return history

    def plot(self, path: str | PathLike[str] | None = None) -> Any:
        """Losses, both steps and checks over the iterations, as three panels of a matplotlib figure.

        Args:
            path: Also save it here; the ending says the format.

        Returns:
            The `matplotlib.figure.Figure`. Where no step was taken there is a gap.

        Raises:
            ImportError: matplotlib is not installed.
        """
        figure = _imported("matplotlib.figure", "History.plot()", "pip install 'bisls[cli]'").Figure(
            figsize=(7, 8), layout="tight"
        )
        losses, steps, checks = figure.subplots(3, 1, sharex=True)
        panels = (
            (losses, "loss", (("upper_value", "upper f"), ("lower_value", "lower g"))),
            (steps, "step", (("alpha", r"upper $\alpha$"), ("beta", r"lower $\beta$"))),
            (checks, "checks an iteration", (("upper_checks", "upper"), ("lower_checks", "lower"))),
        )
        columns = self.to_arrays()
        for axes, label, names in panels:
            drawn = [np.asarray(columns.get(name, ()), dtype=float) for name, _ in names]
            drawn = [np.where(np.abs(values) < 1e100, values, nan) for values in drawn]  # beyond that axes overflow
            if axes is steps:
                drawn = [np.where(values > 0, values, nan) for values in drawn]
            finite = np.concatenate([values[np.isfinite(values)] for values in drawn])
            if axes is not checks and finite.size and finite.min() > 0:
                axes.set_yscale("log")
            for values, (_, name) in zip(drawn, names, strict=True):
                # markers, so that a step between two gaps is seen
                axes.plot(columns.get("k", ()), values, ".-", label=name, linewidth=1.2, markersize=3)
            axes.set_ylabel(label)
            axes.legend()
            axes.grid(alpha=0.3)
        checks.set_xlabel("k, outer iteration")
        if path is not None:
            figure.savefig(path)
        return figure


_TABLES = (".csv", ".tsv", ".xlsx", ".xls", ".parquet", ".feather")  # what a reader of the file would take it for


def _listed(name: str, own: Any, kind: type) -> list[Any]:
    found = list(own) if isinstance(own, Iterable) and getattr(own, "ndim", 1) != 0 else None
    rule = f"must be {'records' if kind is Record else 'dicts'}, in a list"
    fits = found is not None and all(isinstance(entry, kind) for entry in found)
    require_argument("History", name, own, fits, rule)
    return found or []


def _imported(name: str, call: str, remedy: str) -> Any:
    try:
        return import_module(name)
    except ImportError as error:
        raise ImportError(f"`{call}` needs {name.split('.')[0]}: {remedy}") from error


def _line(record: Record, evaluations: Mapping[str, float], stopped: str = "") -> str:
    def strict(row: Mapping[str, Any]) -> dict[str, Any]:
        odd = {name: value for name, value in row.items() if isinstance(value, float) and not isfinite(value)}
        return {**row, **{name: None if isnan(value) else str(value) for name, value in odd.items()}}

    row = strict(record.to_dict())
    if evaluations:
        row["evaluations"] = strict(evaluations)
    if stopped:
        row["stopped"] = stopped
    return json.dumps(row, allow_nan=False)


def _number(value: Any) -> Any:
    """A value of a JSON line as it was before."""
    if value is None:
        return nan
    return float(value) if value in ("inf", "-inf") else value
