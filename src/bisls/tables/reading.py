"""Tables read from disk: CSV and Parquet. What can't be used gets a sentence."""

from __future__ import annotations

import csv
import re
import warnings
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any

HEAD = 1 << 16  # bytes in which a header ends, as a rule
LOOK = 10**6  # fields that are looked at for numbers that are codes
MORE = "\0"  # no name of a column
CODE = r"0\d+"  # as 02134: no number, since it would lose its zero
GROUPED = r"[+-]?[1-9]\d{0,2}(,\d{3})+(\.\d+)?"
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


def read_table(path: Path, texts: Collection[str] = ()) -> Any:
    """A data frame from a CSV file (comma, semicolon, tab or bar; decimal commas) or a Parquet file.

    Args:
        path: The file.
        texts: Columns that are read as text, whatever they look like.

    Raises:
        TableError: There is no such file, it is neither, or it has no rows or columns.
    """
    pd = pandas()
    if not path.exists():
        raise TableError(f"there is no file {path}")
    if path.is_dir():
        raise TableError(f"{path} is a folder; a table is one file, CSV or Parquet")
    try:
        frame = _parquet(pd, path) if _is_parquet(path) else _csv(pd, path, texts)
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


def _csv(pd: Any, path: Path, texts: Collection[str]) -> Any:
    form = _form(path)
    header = form.pop("header")
    twice = _repeated(name.strip() for name in header if name.strip())
    if twice:  # pandas would call the second one by another name
        raise TableError(f"{path} has more than one column {twice[0]!r}; give them different names")

    def read(**more: Any) -> Any:
        with warnings.catch_warnings():
            warnings.simplefilter("error", pd.errors.ParserWarning)  # values that it would leave out
            return pd.read_csv(path, low_memory=False, index_col=False, **form, **more)

    def looked() -> Any:
        try:
            return read(dtype=str, nrows=max(100, LOOK // max(1, len(header))))
        except pd.errors.ParserWarning:
            if "names" in form:
                raise TableError(
                    f"{path} has rows with more values than its header has names ({len(header)})"
                ) from None
        names = [name.strip() or f"column {i}" for i, name in enumerate(header, 1)]
        form.update(header=0, names=[*names, MORE])  # a separator at the end of each row
        return looked()

    def whole() -> Any:
        some = looked()
        codes = [
            name for name in some if str(name).strip() in texts or some[name].str.strip().str.fullmatch(CODE).any()
        ]
        return read(dtype=dict.fromkeys(codes, str))

    try:
        try:
            frame = whole()
        except UnicodeDecodeError:
            form["encoding"] = "latin-1"
            frame = whole()
    except (pd.errors.ParserError, pd.errors.ParserWarning, UnicodeDecodeError) as error:
        raise TableError(f"{path} is no CSV file that can be read: {_first_line(error)}") from None
    except pd.errors.EmptyDataError:
        raise TableError(f"{path} has no columns") from None
    if MORE in frame and frame.pop(MORE).notna().any():
        raise TableError(f"{path} has rows with more values than its header has names ({len(header)})")
    unnamed = {name: f"column {i}" for i, name in enumerate(frame.columns, 1) if str(name).startswith("Unnamed: ")}
    return _with_points(pd, frame.rename(columns=unnamed), form["sep"])


def _form(path: Path) -> dict[str, Any]:
    """How the fields of a CSV file are written, as `pandas.read_csv` has it, and its header."""
    with path.open("rb") as file:
        head = file.read(HEAD)
        if b"\n" not in head:  # thousands of names; half of one may be another
            head += file.readline()
    wide = head[:2] in (b"\xff\xfe", b"\xfe\xff")  # as Excel writes "Unicode text"
    if not head.strip():
        raise TableError(f"{path} is empty")
    if not wide and b"\x00" in head:
        raise TableError(f"{path} is neither CSV nor Parquet: it has bytes that are no text")
    lines = head.decode("utf-16" if wide else "utf-8-sig", errors="replace").splitlines(keepends=True)
    said = re.fullmatch(r"sep=(.)\s*", lines[0], re.IGNORECASE)  # as Excel likes to be told
    lines = lines[1:] if said else lines
    separator = said[1] if said else max(",;\t|", key=lines[0].count)
    header = next(csv.reader(lines, delimiter=separator), []) if lines else []
    return {
        "sep": separator,
        "encoding": "utf-16" if wide else "utf-8-sig",
        "skiprows": int(said is not None),
        "header": header,
    }


def _with_points(pd: Any, frame: Any, separator: str) -> Any:
    """Decimal commas, as 3,5 or 1.234,5, made points in columns that have no other text.

    Where commas separate, 1,234 in quotes is a thousand.
    """
    for name in frame.columns:
        if pd.api.types.is_numeric_dtype(frame[name]):
            continue
        there = _unsigned(frame[name].dropna().astype(str))
        if there.str.fullmatch(WITH_COMMA).any() and there.str.fullmatch(f"{WITH_COMMA}|{WHOLE}").all():
            if separator == "," and there.str.fullmatch(f"{GROUPED}|\\d+").all():
                continue
            points = there.str.replace(".", "", regex=False).str.replace(",", ".", regex=False)
            frame[name] = pd.to_numeric(points).reindex(frame.index)
    return frame


def _unsigned(texts: Any) -> Any:
    """Texts without the signs of money and per cent at their ends."""
    found = texts.str.strip().str.replace(r"^([+-]?)\s*[$€£¥]\s*", r"\1", regex=True)
    return found.str.replace(r"\s*[%$€£¥]$", "", regex=True)


def plain(texts: Any) -> Any:
    """Texts as numbers are written: $1,234.5 is 1234.5, 7 % is 7, true is 1."""
    found = _unsigned(texts)
    found = found.where(~found.str.fullmatch(GROUPED), found.str.replace(",", "", regex=False))
    return found.replace({"True": "1", "False": "0", "TRUE": "1", "FALSE": "0", "true": "1", "false": "0"})


def _repeated(names: Iterable[str]) -> list[str]:
    return sorted(name for name, count in Counter(names).items() if count > 1)


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def must_have(columns: Sequence[str], wanted: str, what: str) -> str:
    """The name of a column, if it is there; otherwise a sentence with the nearest one."""
    if wanted in columns:
        return wanted
    near = [name for name in columns if name.lower() == wanted.lower()] or get_close_matches(wanted, columns, 1, 0.5)
    hint = f"; did you mean {near[0]!r}?" if near else f"; there are {', '.join(map(repr, columns[:8]))}"
    more = f" and {len(columns) - 8} more" if not near and len(columns) > 8 else ""
    raise TableError(f"{what} {wanted!r} is no column of the table{hint}{more}")
