"""Outcomes read from disk."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from bisls.outcome import Outcome


class ReportError(Exception):
    """There is nothing to report, or it can't be read; the text says what to do."""


def read_outcomes(folder: Path | str, order: Sequence[str] = ()) -> tuple[Outcome, ...]:
    """The outcomes that `bisls reproduce` left in ``folder/outcomes``.

    Args:
        folder: The folder given to `bisls reproduce`.
        order: Names of figures in the order wanted; the others follow by name, 2 before 10.

    Raises:
        ReportError: There are none, or a file is no outcome.
    """
    place = Path(folder) / "outcomes"
    found = [_read(path) for path in sorted(place.glob("*.json"))]
    if not found:
        raise ReportError(f"{place} has no outcomes: run `bisls reproduce` first, or name the folder it wrote to")
    ranks = {name: rank for rank, name in enumerate(order)}
    return tuple(sorted(found, key=lambda outcome: (ranks.get(outcome.name, len(ranks)), _natural(outcome.name))))


def _read(path: Path) -> Outcome:
    try:
        outcome = Outcome.from_json(path.read_text(encoding="utf-8"))
        if outcome.name != path.stem:
            raise ValueError(f"it is that of {outcome.name!r}, and has been copied or renamed")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise ReportError(
            f"{path} is not an outcome ({reason}): delete the file and run `bisls reproduce {path.stem}` again; "
            "finished runs are not repeated"
        ) from error
    return outcome


def _natural(name: str) -> list[tuple[int, str]]:
    return [(int(digits or 0), letters) for digits, letters in re.findall(r"(\d+)|(\D+)", name)]
