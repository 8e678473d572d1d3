"""Which columns share a penalty: from a file, or by what the table itself says."""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

from bisls.tables.reading import TableError, must_have
from bisls.tables.recipe import Recipe

ALIKE = 3  # so many columns of numbers with the same beginning of the name are a group
PLAIN = "numbers"
ABSENT = "what is missing"


def automatic(recipe: Recipe) -> list[str]:
    """A group a feature: a text column each, numbers whose names begin alike, the other numbers, and marks of missing values.

    Examples:
        >>> from bisls.tables.recipe import Column
        >>> columns = [Column("age", "number"), *(Column(f"gene_{i}", "number") for i in range(3))]
        >>> automatic(Recipe((*columns, Column("town", "text", levels=("north", "south")))))
        ['numbers', 'gene', 'gene', 'gene', 'town', 'town']
    """
    beginnings: dict[str, list[str]] = {}
    for column in recipe.columns:
        if column.kind != "text":
            beginnings.setdefault(_beginning(column.name), []).append(column.name)
    groups: list[str] = []
    for column in recipe.columns:
        if column.kind == "text":
            groups += [column.name] * len(column.features)
            continue
        start = _beginning(column.name)
        groups.append(start if start and len(beginnings[start]) >= ALIKE else PLAIN)
        groups += [ABSENT] * column.marked
    return groups


def _beginning(name: str) -> str:
    found = re.match(r"(.*?)(?:[_.\-:/ ].*|\d+)$", name)
    return found[1] if found else ""


def from_file(path: Path, recipe: Recipe, target: str, dropped: Collection[str]) -> list[str]:
    """Groups from JSON (``{"group": ["column", ...]}``) or CSV (the columns ``column`` and ``group``).

    Columns that the file does not name are the group "rest".

    Args:
        path: The file.
        recipe: The columns that are used.
        target: The column that is predicted.
        dropped: Columns of the table that are left out; the file may name them.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise TableError(f"cannot read --groups {path}: {error.strerror or error}") from None
    except UnicodeDecodeError:
        raise TableError(f"--groups {path} is no text; it must be JSON or CSV") from None
    owner: dict[str, str] = {}
    for name, group in _json(path, text) if text.lstrip().startswith("{") else _csv(path, text):
        if name in owner:
            raise TableError(f"--groups {path}: column {name!r} is in {owner[name]!r} and in {group!r}")
        owner[name] = group
    if target in owner:
        raise TableError(f"--groups {path}: {target!r} is the target, so it is in no group")
    names = [column.name for column in recipe.columns]
    for name in owner:
        must_have([*names, *dropped], name, f"in --groups {path}:")
    groups = []
    for column in recipe.columns:
        groups += [owner.get(column.name, "rest")] * len(column.features)
    return groups


def _json(path: Path, text: str) -> Iterator[tuple[str, str]]:
    try:
        raw: Any = json.loads(text, object_pairs_hook=lambda pairs: pairs)  # a group may be there twice
    except (ValueError, RecursionError) as error:
        raise TableError(f"--groups {path} is no JSON: {error}") from None
    for group, columns in raw:
        if not isinstance(columns, list) or not all(isinstance(name, str) for name in columns):
            raise TableError(f"--groups {path}: group {group!r} must have a list of column names")
        yield from ((name, group) for name in columns)


def _csv(path: Path, text: str) -> Iterator[tuple[str, str]]:
    lines = text.splitlines()
    rows = list(csv.DictReader(lines, delimiter=max(",;\t", key=lines[0].count) if lines else ","))
    if not rows or not {"column", "group"} <= set(rows[0]):
        raise TableError(
            f'--groups {path} must be JSON, {{"group": ["column", ...]}}, or CSV with the columns "column" and "group"'
        )
    for row in rows:
        if not row["group"]:
            raise TableError(f"--groups {path}: column {row['column']!r} has no group")
        yield row["column"], row["group"]
