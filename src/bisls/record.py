"""What happened: Status (with advice), Record of one outer iteration, History of a run."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields
from enum import IntEnum
from math import nan
from typing import Any

import numpy as np

from bisls.oracle import Cost


class Status(IntEnum):
    """How a search or a linear solve ended. `advice` says what it means and what to do."""

    OK = 0
    STATIONARY = 1
    ROUNDING = 2
    BELOW_BOUND = 3
    CAPPED = 4
    NOT_DESCENT = 5
    NON_FINITE = 6
    MAX_ITERS = 7
    NEGATIVE_CURVATURE = 8
    DIVERGED = 9
    SINGULAR = 10

    @property
    def advice(self) -> str:
        """A sentence on what happened and what would help."""
        return _ADVICE[self]

    @property
    def failed(self) -> bool:
        """Whether something went wrong, rather than being finished, undecidable or merely not worth a step."""
        return self not in (Status.OK, Status.STATIONARY, Status.ROUNDING, Status.NOT_DESCENT, Status.MAX_ITERS)


def worst(*statuses: Status) -> Status:
    """The most serious of several endings: failures before the rest."""
    return max(statuses, key=lambda status: (status.failed, status))


_ADVICE = {
    Status.OK: "all went well",
    Status.STATIONARY: "the gradient is zero, or the loss is at its lower bound: nothing to do at this point",
    Status.ROUNDING: (
        "the loss changes by no more than its own rounding error, so the search could not judge the step; the remembered "
        "step was kept. Near a solution this is as it should be; float64 would show more"
    ),
    Status.BELOW_BOUND: (
        "the loss is below the lower bound declared as f_min, so a Polyak step is not defined and none was taken; "
        "declare a smaller f_min"
    ),
    Status.CAPPED: (
        "no step passed the Armijo test within max_checks; the best trial that lowered the loss was taken, or none. "
        "The slope may not belong to the loss (noise, a gradient of another batch), or the start was far too long"
    ),
    Status.NOT_DESCENT: (
        "the direction does not descend on this batch, so no step was taken. Expected now and then with noise; "
        "if it persists, check the gradient"
    ),
    Status.NON_FINITE: (
        "a loss or gradient is NaN or infinite; the parameters were left as they were. Look for log(0), division by zero "
        "or overflow in the loss, or for bad numbers in the data"
    ),
    Status.MAX_ITERS: (
        "the linear solve used all its iterations before reaching its tolerance; allow more of them, or make the lower "
        "problem better conditioned (more regularisation)"
    ),
    Status.NEGATIVE_CURVATURE: (
        "the lower Hessian is not positive definite here, so the lower problem is not at a minimum; run more lower steps "
        "or regularise the lower loss"
    ),
    Status.DIVERGED: (
        "the Neumann series diverges: its scale is larger than 2 / (largest curvature); give a smaller scale or none, "
        "so that it is estimated"
    ),
    Status.SINGULAR: (
        "the lower Hessian is singular, so the lower solution is not unique; add a small quadratic penalty to the lower loss"
    ),
}


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


class History:
    """The records of a run, in order.

    Examples:
        >>> history = History()
        >>> history.append(Record(0, 2.5, 1.0, 0.1, 0.2, 1, 3, 0.7, 1e-4))
        >>> history.append(Record(1, 2.0, 0.9, 0.2, 0.2, 2, 3, 0.5, 1e-4))
        >>> len(history), history["upper_value"].tolist()
        (2, [2.5, 2.0])
    """

    def __init__(self, records: Iterable[Record] = ()):
        self.records = list(records)

    def append(self, record: Record) -> None:
        """Add the next record."""
        self.records.append(record)

    def __len__(self) -> int:
        return len(self.records)

    def __iter__(self) -> Iterator[Record]:
        return iter(self.records)

    def __getitem__(self, name: str) -> np.ndarray:
        return np.array([record.to_dict()[name] for record in self.records])

    def to_arrays(self) -> dict[str, np.ndarray]:
        """One array a column."""
        rows = [record.to_dict() for record in self.records]
        return {name: np.array([row[name] for row in rows]) for name in (rows[0] if rows else ())}
