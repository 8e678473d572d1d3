"""Tables read from disk: CSV and Parquet. What can't be used gets a sentence."""

from __future__ import annotations

import csv
from collections import Counter
from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any

WITH_COMMA = r"[+-]?(\d+|\d{1,3}(\.\d{3})+),\d+([eE][+-]?\d+)?"
WHOLE = r"[+-]?(\d+|\d{1,3}(\.\d{3})+)"
NEEDS = "reading a table needs {}: pip install 'bisls[tables]'"


class TableError(Exception):
    """A table, or what was said about it, can't be used; the text says why and what would help."""


def pandas() -> Any:
    """The module, or an ImportError that says how to get it."""
    try:
        import pandas as module
    except ModuleNotFoundError as error:
        raise ImportError(NEEDS.format("pandas")) from error
    return module


def read_table(path: Path) -> Any:
    """A data frame from a CSV file (comma, semicolon, tab or bar; with decimal commas unless they separate) or a Parquet file.

    Raises:
        TableError: There is no such file, it is neither, or it has no rows or columns.
    """
    pd = pandas()
    if not path.exists():
        raise TableError(f"there is no file {path}")
    if path.is_dir():
        raise TableError(f"{path} is a folder; a table is one file, CSV or Parquet")
    try:
        frame = _parquet(pd, path) if _is_parquet(path) else _csv(pd, path)
    except OSError as error:
        raise TableError(f"cannot read {path}: {error.strerror or error}") from None
    frame.columns = [str(name).strip() for name in frame.columns]
    twice = _repeated(frame.columns)
    if twice:
        raise TableError(f"{path} has more than one column {twice[0]!r}; give them different names")
    if not len(frame.columns):
        raise TableError(f"{path} has no columns")
    if not len(frame):
        raise TableError(f"{path} has a header and no rows")
    return frame


def _is_parquet(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(4) == b"PAR1"


def _parquet(pd: Any, path: Path) -> Any:
    try:
        frame = pd.read_parquet(path)
        return frame.reset_index(
            drop=all(name is None for name in frame.index.names)
        )  # an index with a name is a column
    except ImportError as error:
        raise ImportError(NEEDS.format("pyarrow")) from error
    except OSError:
        raise
    except Exception as error:  # whatever the reader of a damaged file says
        raise TableError(f"{path} is no Parquet file that can be read: {_first_line(error)}") from None


def _csv(pd: Any, path: Path) -> Any:
    with path.open("rb") as file:
        head = file.read(1 << 16)
        if b"\n" not in head:  # thousands of names; half of one may be another
            head += file.readline()
    if not head.strip():
        raise TableError(f"{path} is empty")
    if b"\x00" in head:
        raise TableError(f"{path} is neither CSV nor Parquet: it has bytes that are no text")
    line = head.splitlines()[0]
    separator = max([b",", b";", b"\t", b"|"], key=line.count).decode()
    header = next(csv.reader([line.decode("utf-8-sig", errors="replace")], delimiter=separator), [])
    twice = _repeated(name.strip() for name in header if name.strip())
    if twice:  # pandas would call the second one by another name
        raise TableError(f"{path} has more than one column {twice[0]!r}; give them different names")
    try:
        frame = pd.read_csv(path, sep=separator, encoding="utf-8-sig", low_memory=False, index_col=False)
    except UnicodeDecodeError:
        frame = pd.read_csv(path, sep=separator, encoding="latin-1", low_memory=False, index_col=False)
    except pd.errors.ParserError as error:
        raise TableError(f"{path} is no CSV file that can be read: {_first_line(error)}") from None
    except pd.errors.EmptyDataError:
        raise TableError(f"{path} has no columns") from None
    unnamed = {name: f"column {i}" for i, name in enumerate(frame.columns, 1) if str(name).startswith("Unnamed: ")}
    frame = frame.rename(columns=unnamed)
    return frame if separator == "," else _with_points(pd, frame)


def _with_points(pd: Any, frame: Any) -> Any:
    """Decimal commas, as 3,5 or 1.234,5, made points in columns that have no other text."""
    for name in frame.columns:
        if pd.api.types.is_numeric_dtype(frame[name]):
            continue
        there = frame[name].dropna().astype(str).str.strip()
        if there.str.fullmatch(WITH_COMMA).any() and there.str.fullmatch(f"{WITH_COMMA}|{WHOLE}").all():
            points = there.str.replace(".", "", regex=False).str.replace(",", ".", regex=False)
            frame[name] = pd.to_numeric(points).reindex(frame.index)
    return frame


def _repeated(names: Iterable[str]) -> list[str]:
    return sorted(name for name, count in Counter(names).items() if count > 1)


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def must_have(columns: Sequence[str], wanted: str, what: str) -> str:
    """The name of a column, if it is there; otherwise a sentence with the nearest one."""
    if wanted in columns:
        return wanted
    near = get_close_matches(wanted, columns, 1, 0.5)
    hint = f"; did you mean {near[0]!r}?" if near else f"; there are {', '.join(map(repr, columns[:8]))}"
    more = f" and {len(columns) - 8} more" if not near and len(columns) > 8 else ""
    raise TableError(f"{what} {wanted!r} is no column of the table{hint}{more}")
