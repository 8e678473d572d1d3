"""A run: its configuration, what it recorded, how a figure asks for runs and what it makes of them."""

from __future__ import annotations

import hashlib
import json
import platform
import subprocess
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cache
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import numpy as np
import torch

from bisls._version import __version__
from bisls.experiments.readings import READINGS, Reading
from bisls.outcome import Panel, Pictures, Table, Verdict
from bisls.parts import identity

REVISION = (
    3  # raised when the meaning of a configuration or a default changes, so that older runs are not taken for new ones
)
SCALES = ("smoke", "quick", "standard", "paper")
SEEDS = {"smoke": 1, "quick": 1, "standard": 3, "paper": 5}

Value = TypeVar("Value")


@dataclass(frozen=True)
class RunRecord:
    """What one run did.

    Attributes:
        config: The configuration's fields, and "kind".
        curves: Named lists of numbers. Those of one name in every record of a kind mean the same.
        numbers: Named numbers, such as counts at the end.
        error: Why the run ended early; empty where it did not.
        facts: Versions, commit, evaluations, CPU seconds.
    """

    config: Mapping[str, Any]
    curves: Mapping[str, tuple[float, ...]]
    numbers: Mapping[str, float]
    error: str = ""
    facts: Mapping[str, Any] = field(default_factory=dict)

    def curve(self, name: str) -> np.ndarray:
        """A curve as an array."""
        return np.array(self.curves[name], dtype=float)

    def first(self, name: str) -> float:
        """Where a curve began; infinite where it has no points."""
        return float(self.curves[name][0]) if self.curves[name] else float("inf")

    def last(self, name: str) -> float:
        """Where a curve ended; infinite where the run ended early, or the curve in a value that is not finite or nowhere."""
        value = float(self.curves[name][-1]) if self.curves[name] else float("inf")
        return value if not self.error and np.isfinite(value) else float("inf")


@dataclass(frozen=True)
class Config(ABC):
    """What a run depends on: all of it, and checked. Subclasses are frozen dataclasses of plain values and parts."""

    kind: ClassVar[str]
    seed: int

    @abstractmethod
    def execute(self) -> RunRecord:
        """The run. It may take minutes, and sees nothing but the configuration and the data."""

    @property
    @abstractmethod
    def work(self) -> float:
        """About how long it takes, in seconds on one core: long runs go first, and the time left is told by it."""

    def described(self) -> dict[str, Any]:
        """The fields: plain values as they are, parts as text, classes by name."""
        return {"kind": self.kind, **{f.name: _plain(getattr(self, f.name)) for f in fields(self)}}

    def set(self) -> dict[str, Any]:
        """The fields that differ from their defaults, described."""
        described = self.described()
        return {f.name: described[f.name] for f in fields(self) if getattr(self, f.name) != f.default}

    @property
    def key(self) -> str:
        """A name for the run: the same for the same configuration, and for no other.

        What equals a default has no part in it: a new option keeps the runs that were made without it.
        """
        text = json.dumps([self.kind, self.set(), __version__, REVISION], sort_keys=True)
        return f"{self.kind}-{hashlib.sha256(text.encode()).hexdigest()[:20]}"


def _plain(value: Any) -> Any:
    if value is None or isinstance(value, bool | int | float | str):
        return value
    return value.__name__ if isinstance(value, type) else identity(value)


@dataclass(frozen=True)
class Plan:
    """At which scale a figure is drawn.

    Attributes:
        scale: "smoke" (does it run?), "quick" (about an hour for all figures), "standard" (three seeds, longer runs, coarse
            grids), "paper" (the paper's seeds and grids).
        seeds: How many seeds.
        reading: How the paper's tasks are read.
    """

    scale: str
    seeds: int
    reading: Reading = READINGS["paper"]

    def __post_init__(self) -> None:
        if self.scale not in SCALES:
            raise ValueError(f"`Plan(scale={self.scale!r})` must be one of {', '.join(SCALES)}")
        if self.seeds < 1:
            raise ValueError(f"`Plan(seeds={self.seeds!r})` must be at least 1")

    def pick(self, smoke: Value, quick: Value, paper: Value, standard: Value | None = None) -> Value:
        """The value for this scale; at "standard" that of "quick", unless it has its own."""
        middle = quick if standard is None else standard
        return {"smoke": smoke, "quick": quick, "standard": middle, "paper": paper}[self.scale]

    @property
    def in_order(self) -> bool:
        """Whether figures are made one after another."""
        return self.scale == "standard"

    @property
    def each_seed(self) -> range:
        """The seeds."""
        return range(self.seeds)


@dataclass(frozen=True)
class Findings:
    """What a figure makes of its records."""

    panels: tuple[Panel, ...]
    verdicts: tuple[Verdict, ...]
    settings: Mapping[str, str]
    pictures: tuple[Pictures, ...] = ()
    seen: str = ""
    tables: tuple[Table, ...] = ()


Asking = Generator[Sequence[Config], Sequence[RunRecord], Findings]
"""A figure at work: it yields the runs that it wants next, is sent their records in that order, and returns its findings."""


@dataclass(frozen=True)
class Figure:
    """A figure of the paper, or a theorem, as something that can be run.

    Attributes:
        name: What the command calls it.
        title: What it is about.
        paper: What the paper says, in our words.
        ask: Asks for runs and judges them.
        data: The data sets that it needs at the scales "quick" and "paper".
    """

    name: str
    title: str
    paper: str
    ask: Callable[[Plan], Asking]
    data: tuple[str, ...] = ()


def from_json(config: Mapping[str, Any], raw: Mapping[str, Any]) -> RunRecord:
    """A record as the store has it.

    Raises:
        ValueError: It is none; or a KeyError, a TypeError or an AttributeError, as it comes.
    """
    if not isinstance(raw["error"], str) or not isinstance(raw["facts"], Mapping):
        raise TypeError("error must be a text, and facts must have names")
    curves = {name: tuple(float(v) for v in values) for name, values in raw["curves"].items()}
    numbers = {name: float(v) for name, v in raw["numbers"].items()}
    return RunRecord(config, curves, numbers, raw["error"], raw["facts"])


def to_json(record: RunRecord, key: str = "") -> str:
    """A record as text, with the name of its configuration; what is not finite is written by name."""
    content = {f.name: getattr(record, f.name) for f in fields(record)} | ({"key": key} if key else {})
    content["curves"] = {name: [_word(v) for v in values] for name, values in record.curves.items()}
    content["numbers"] = {name: _word(v) for name, v in record.numbers.items()}
    return json.dumps(content, allow_nan=False)


def _word(value: float) -> float | str:
    value = float(value)
    return float(f"{value:.9g}") if np.isfinite(value) else str(value)


@cache
def commit() -> str:
    """The commit of the source, with "-dirty" where it has changes; the version alone where there is no repository."""
    here = Path(__file__).parent
    try:
        found = subprocess.run(
            ["git", "describe", "--always", "--dirty", "--abbrev=10"],
            cwd=here, capture_output=True, text=True, check=False, timeout=10,
        )  # fmt: skip
    except OSError:
        return f"release {__version__}"
    return found.stdout.strip() if found.returncode == 0 and found.stdout.strip() else f"release {__version__}"


def versions() -> dict[str, str]:
    """What the numbers depend on beside the configuration."""
    return {
        "bisls": __version__,
        "commit": commit(),
        "torch": torch.__version__,
        "numpy": np.__version__,
        "python": platform.python_version(),
    }
