"""How the columns of a table become numbers: learnt on one table, applied to others, kept as plain data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from bisls.tables.reading import CODE, TableError, pandas, plain

LEVELS = 30  # a text column keeps so many of its values; the others are one, "other"
RARE = 5  # and those that this many rows have at least
NUMBERS = 0.9  # a text column of which this share are numbers is one of numbers
LIKE_DATE = r"\d{1,4}[./-]\d{1,2}[./-]\d{1,4}.*"
DATE = r"\s*\d{4}-\d{2}-\d{2}([T ]\d{2}:\d{2}.*)?\s*$"
OTHER, MISSING = "other", "missing"


@dataclass(frozen=True)
class Column:
    """One column of the table.

    Attributes:
        name: Its name.
        kind: "number", "time" (as days) or "text" (a 0-1 column for each level).
        fill: What stands for a missing number: the median.
        marked: Whether a 0-1 column says that a number was missing.
        levels: Of a text column.
    """

    name: str
    kind: str
    fill: float = 0.0
    marked: bool = False
    levels: tuple[str, ...] = ()

    @property
    def features(self) -> tuple[str, ...]:
        """The names of the numbers it becomes."""
        if self.kind == "text":
            return tuple(f"{self.name}={level}" for level in self.levels)
        return (self.name, f"{self.name} is missing") if self.marked else (self.name,)


@dataclass(frozen=True)
class Recipe:
    """All columns."""

    columns: tuple[Column, ...]

    @property
    def features(self) -> list[str]:
        """The names of all numbers, in order."""
        return [feature for column in self.columns for feature in column.features]

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        return {"columns": [asdict(column) for column in self.columns]}

    @staticmethod
    def from_dict(raw: Mapping[str, Any]) -> Recipe:
        """What `to_dict` gave."""
        return Recipe(tuple(Column(**{**column, "levels": tuple(column["levels"])}) for column in raw["columns"]))

    def numbers(self, frame: Any) -> tuple[np.ndarray, list[str]]:
        """The table as numbers, and sentences about what was done to it.

        Raises:
            TableError: A column is missing.
        """
        absent = [column.name for column in self.columns if column.name not in frame.columns]
        if absent:
            more = f" and {len(absent) - 5} more" if len(absent) > 5 else ""
            raise TableError(f"the table lacks columns of the model: {', '.join(map(repr, absent[:5]))}{more}")
        parts, said = [], []
        for column in self.columns:
            values = frame[column.name]
            if column.kind == "text":
                words = as_text(values)
                known = np.isin(words, column.levels)
                strange = sorted(set(words[~known].tolist()) - {MISSING})
                if strange:
                    named = ", ".join(map(repr, strange[:3])) + (", ..." if len(strange) > 3 else "")
                    where = OTHER if OTHER in column.levels else "none of its levels"
                    rows = int(np.isin(words, strange).sum())
                    said.append(
                        f"{column.name!r}: {rows} rows with values that the model does not know ({named}) count as {where}"
                    )
                if OTHER in column.levels:
                    words = np.where(known, words, OTHER)
                parts += [(words == level).astype(float) for level in column.levels]
                continue
            found = as_numbers(values, column.kind)
            gone = ~np.isfinite(found)
            if gone.any():
                said.append(
                    f"{column.name!r}: {int(gone.sum())} of {len(gone)} values are missing; the median stands for them"
                )
            parts.append(np.where(gone, column.fill, found))
            if column.marked:
                parts.append(gone.astype(float))
        return np.column_stack(parts) if parts else np.zeros((len(frame), 0)), said


def learn(frame: Any, names: Sequence[str]) -> tuple[Recipe, list[str]]:
    """How to make these columns numbers, and sentences about what was done and what was left out."""
    made: list[Column] = []
    said: list[str] = []
    dropped: dict[str, list[str]] = {}

    def drop(why: str, name: str) -> None:
        dropped.setdefault(why, []).append(name)

    for name in names:
        values, rows = frame[name], len(frame)
        if values.isna().all():
            drop("have no value at all", name)
            continue
        kind = kind_of(values)
        if kind == "text":
            words = as_text(values)
            levels, counts = np.unique(words, return_counts=True)
            if len(levels) < 2:
                drop("have one value only", name)
            elif _share(words, LIKE_DATE) >= NUMBERS:  # which of both is the month is not known
                drop("look like dates that are not written as 2024-01-31", name)
            elif len(levels) > LEVELS and counts.max() < RARE:
                drop("have another text in almost every row, as names and numbers of things have", name)
            else:
                if _are_codes(values):
                    said.append(f"{name!r} has numbers that begin with 0, as codes do: it is taken as text")
                made.append(Column(name, kind, levels=_levels(name, levels, counts, said)))
            continue
        found = as_numbers(values, kind)
        good = np.isfinite(found)
        if not good.any():
            drop("have no finite number", name)
            continue
        gone = rows - int(good.sum())
        if np.ptp(found[good]) == 0 and not gone:
            drop("have one value only", name)
            continue
        if gone:
            said.append(
                f"{name!r}: {gone} of {rows} values are missing; the median stands for them, and a column says so"
            )
        if kind == "number" and not _is_numeric(values):
            bad = int((values.notna() & ~good).sum())
            said.append(
                f"{name!r} is read as numbers" + (f"; {bad} values that are none count as missing" if bad else "")
            )
        if kind == "number" and not gone and np.all(found == np.round(found)) and np.all(np.diff(found) > 0):
            said.append(
                f"{name!r} rises from row to row, as their number does; it is used: delete it if it means nothing"
            )
        made.append(Column(name, kind, float(np.median(found[good])), bool(gone)))
    for why, which in dropped.items():
        shown = ", ".join(map(repr, which[:6])) + (f" and {len(which) - 6} more" if len(which) > 6 else "")
        said.append(f"left out, since they {why}: {shown}")
    if not made:
        raise TableError("no column beside the target can be used: " + "; ".join(said or ["there is none"]))
    return Recipe(tuple(made)), said


def _levels(name: str, levels: np.ndarray, counts: np.ndarray, said: list[str]) -> tuple[str, ...]:
    common = sorted(zip(-counts, levels.tolist(), strict=True))
    kept = [level for count, level in common[:LEVELS] if -count >= RARE or len(levels) <= 3]
    rest = len(levels) - len(kept)
    if rest:
        said.append(f"{name!r}: {rest} of {len(levels)} values are rare and count as {OTHER!r}")
        kept = [level for level in kept if level != OTHER] + [OTHER]
    return tuple(sorted(kept))


def _is_numeric(values: Any) -> bool:
    return bool(pandas().api.types.is_numeric_dtype(values))


def _is_time(values: Any) -> bool:
    return bool(pandas().api.types.is_datetime64_any_dtype(values))


def is_boolean(values: Any) -> bool:
    """Whether a column is of truth values alone."""
    return bool(pandas().api.types.is_bool_dtype(values) or np.all(np.isin(as_text(values), ("True", "False"))))


def _share(words: np.ndarray, pattern: str) -> float:
    return float(pandas().Series(words, dtype=str).str.fullmatch(pattern).mean())


def _are_codes(values: Any) -> bool:
    words = as_text(values.dropna())
    return len(words) > 0 and _share(words, CODE) > 0.0 and _share(words, r"\d+") >= NUMBERS


def kind_of(values: Any) -> str:
    """What a column is: "number", "time" or "text"."""
    types = pandas().api.types
    if types.is_bool_dtype(values) or (types.is_numeric_dtype(values) and not types.is_complex_dtype(values)):
        return "number"
    if types.is_datetime64_any_dtype(values) or types.is_timedelta64_dtype(values):
        return "time"
    there = values.dropna()
    if _are_codes(there):
        return "text"
    if len(there) and float(pandas().to_numeric(plain(there.astype(str)), errors="coerce").notna().mean()) >= NUMBERS:
        return "number"
    if len(there) and there.astype(str).str.match(DATE).all():
        return "time"
    return "text"


def as_numbers(values: Any, kind: str) -> np.ndarray:
    """A column as floats; what is none is NaN."""
    pd = pandas()
    if kind == "time":
        zero = pd.Timedelta(0) if pd.api.types.is_timedelta64_dtype(values) else None
        if zero is None:
            values = pd.to_datetime(values, errors="coerce", utc=True, format=None if _is_time(values) else "ISO8601")
            zero = pd.Timestamp(0, tz="UTC")
        return np.asarray((values - zero) / pd.Timedelta(days=1), dtype=float)
    if not pd.api.types.is_numeric_dtype(values):
        values = pd.to_numeric(plain(values.astype(str)).where(values.notna()), errors="coerce")
    found = np.array(pd.array(values).to_numpy(dtype=float, na_value=np.nan), dtype=float)
    return np.where(np.isfinite(found), found, np.nan)


def as_text(values: Any) -> np.ndarray:
    """A column as text; what is missing is `MISSING`."""
    there = values.notna().to_numpy()
    return np.where(there, values.astype(str).str.strip().to_numpy(dtype=object), MISSING).astype(str)
