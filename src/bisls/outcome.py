"""What a figure came to: curves to draw, pictures, verdicts on statements, and where the numbers come from. Plain data."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any


class Judgement(StrEnum):
    """What the records say of a statement."""

    HOLDS = "holds"
    FAILS = "fails"
    UNDECIDED = "undecided"


@dataclass(frozen=True)
class Verdict:
    """A statement that can fail, and what the records say of it.

    Attributes:
        statement: What would be true, in one sentence.
        judgement: Whether it is.
        numbers: The numbers that decide, as text.
        ours: Whether it is about this package's default and no claim of the paper.
        told: The numbers that the paper itself has for it, as text; empty where it has none.
    """

    statement: str
    judgement: Judgement
    numbers: str
    ours: bool = False
    told: str = ""


@dataclass(frozen=True)
class Series:
    """One curve, or one row of bars where the panel has bars.

    Attributes:
        label: Its name in the legend.
        x: Where; for bars, the names of the bars.
        y: The values; nan or inf leaves a gap.
        low: The lower edge of a band around y; None for none.
        high: The upper edge.
        ours: Whether it is this package's default, which is drawn so that the eye finds it.
        dashed: Whether it is a reference line.
        points: Draw marks at the values.
    """

    label: str
    x: tuple[float | str, ...]
    y: tuple[float, ...]
    low: tuple[float, ...] | None = None
    high: tuple[float, ...] | None = None
    ours: bool = False
    dashed: bool = False
    points: bool = False


@dataclass(frozen=True)
class Panel:
    """One pair of axes.

    Attributes:
        title: What it shows.
        xlabel: The name of the x axis.
        ylabel: The name of the y axis.
        series: The curves.
        xscale: "linear" or "log".
        yscale: "linear" or "log".
        bars: Draw bars, one group for each entry of x.
        equal: One unit is as long on both axes (paths in the plane).
        ylim: The range of the y axis; None lets the values decide.
        alt: The panel in words, for those who can't see it; the title and the labels where it is empty.
    """

    title: str
    xlabel: str
    ylabel: str
    series: tuple[Series, ...]
    xscale: str = "linear"
    yscale: str = "linear"
    bars: bool = False
    equal: bool = False
    ylim: tuple[float, float] | None = None
    alt: str = ""


@dataclass(frozen=True)
class Pictures:
    """Pictures in grey, side by side.

    Attributes:
        title: What they are.
        images: Each a tuple of rows of numbers from 0 (black) to 1 (white).
        labels: One for each.
    """

    title: str
    images: tuple[tuple[tuple[float, ...], ...], ...]
    labels: tuple[str, ...]


@dataclass(frozen=True)
class Table:
    """A table of texts.

    Attributes:
        title: What it shows.
        columns: The names of its columns.
        rows: As many texts as there are columns, each.
    """

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class Outcome:
    """All that a report says of one figure.

    Attributes:
        name: The figure's name, as the command knows it.
        title: What it is about.
        paper: What the paper says, in our words.
        seen: What we saw, in a sentence or two beyond the verdicts; may be empty.
        scale: "smoke", "quick", "standard" or "paper".
        settings: What was run, as pairs of a name and a text.
        panels: What to draw.
        verdicts: The statements.
        pictures: Rows of pictures.
        facts: Seeds, versions, commits, number of runs, evaluations, time.
        command: What runs it again.
        tables: Tables.
        reading: How the paper's tasks were read, by name; empty where the figure has none of them.
    """

    name: str
    title: str
    paper: str
    seen: str
    scale: str
    settings: Mapping[str, str]
    panels: tuple[Panel, ...]
    verdicts: tuple[Verdict, ...]
    pictures: tuple[Pictures, ...] = ()
    facts: Mapping[str, Any] = field(default_factory=dict)
    command: str = ""
    tables: tuple[Table, ...] = ()
    reading: str = ""

    def to_json(self) -> str:
        """As text; what is not finite becomes null, inf and -inf their names, so that any reader of JSON can read it."""
        return json.dumps(_plain(asdict(self)), allow_nan=False, indent=1)

    @classmethod
    def from_json(cls, text: str) -> Outcome:
        """Read back what `to_json` wrote.

        Examples:
            >>> one = Outcome("a", "A", "", "", "smoke", {}, (Panel("t", "x", "y", (Series("s", (1, 2), (3.0, 4.0)),)),), ())
            >>> Outcome.from_json(one.to_json()) == one
            True
        """
        raw = json.loads(text)
        panels = tuple(
            Panel(**{**panel, "series": tuple(_series(s) for s in panel["series"]), "ylim": _pair(panel["ylim"])})
            for panel in raw["panels"]
        )
        verdicts = tuple(Verdict(**{**v, "judgement": Judgement(v["judgement"])}) for v in raw["verdicts"])
        pictures = tuple(
            Pictures(p["title"], tuple(tuple(tuple(row) for row in image) for image in p["images"]), tuple(p["labels"]))
            for p in raw["pictures"]
        )
        tables = tuple(
            Table(t["title"], tuple(t["columns"]), tuple(tuple(row) for row in t["rows"]))
            for t in raw.get("tables", ())
        )
        return cls(**{**raw, "panels": panels, "verdicts": verdicts, "pictures": pictures, "tables": tables})


def _series(raw: dict[str, Any]) -> Series:
    bands = {name: None if raw[name] is None else _numbers(raw[name]) for name in ("low", "high")}
    return Series(**{**raw, "x": tuple(raw["x"]), "y": _numbers(raw["y"]), **bands})


def _numbers(values: list[Any]) -> tuple[float, ...]:
    return tuple(math.nan if v is None else float(v) for v in values)


def _pair(raw: list[Any] | None) -> tuple[float, float] | None:
    if raw is None:
        return None
    low, high = _numbers(raw)
    return low, high


def _plain(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None if math.isnan(value) else str(value)
    if isinstance(value, dict):
        return {str(key): _plain(entry) for key, entry in value.items()}
    return [_plain(entry) for entry in value] if isinstance(value, list | tuple) else value
