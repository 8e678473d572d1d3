"""Which columns share a penalty: from a file, or by what the table itself says."""

from __future__ import annotations

import csv
import json
import re
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


def from_file(path: Path, recipe: Recipe) -> list[str]:
    """Groups from JSON (``{"group": ["column", ...]}``) or CSV (the columns ``column`` and ``group``).

    Columns that the file does not name are the group "rest".
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise TableError(f"cannot read --groups {path}: {error.strerror or error}") from None
    except UnicodeDecodeError:
        raise TableError(f"--groups {path} is no text; it must be JSON or CSV") from None
    owner = _json(path, text) if text.lstrip().startswith("{") else _csv(path, text)
    names = [column.name for column in recipe.columns]
    for name in owner.keys() - set(names):
        must_have(names, name, f"in --groups {path}: ")
    groups = []
    for column in recipe.columns:
        groups += [owner.get(column.name, "rest")] * len(column.features)
    return groups


def _json(path: Path, text: str) -> dict[str, str]:
    try:
        raw: Any = json.loads(text)
    except ValueError as error:
        raise TableError(f"--groups {path} is no JSON: {error}") from None
    owner: dict[str, str] = {}
    for group, columns in raw.items():
        if not isinstance(columns, list) or not all(isinstance(name, str) for name in columns):
            raise TableError(f"--groups {path}: group {group!r} must have a list of column names")
        for name in columns:
            if name in owner:
                raise TableError(f"--groups {path}: column {name!r} is in {owner[name]!r} and in {group!r}")
            owner[name] = str(group)
    return owner


def _csv(path: Path, text: str) -> dict[str, str]:
    rows = list(csv.DictReader(text.splitlines()))
    if not rows or not {"column", "group"} <= set(rows[0]):
        raise TableError(
            f'--groups {path} must be JSON, {{"group": ["column", ...]}}, or CSV with the columns "column" and "group"'
        )
    return {str(row["column"]): str(row["group"]) for row in rows}
