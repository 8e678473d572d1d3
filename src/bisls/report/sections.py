"""What a Markdown page has of one figure: written now, or read back from the page as it was written before."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from bisls.outcome import Judgement, Verdict
from bisls.report.files import ReportError
from bisls.report.summary import SYMBOLS

DECIDED = "## How verdicts are decided"
OWN = "*(our default)*"


@dataclass(frozen=True)
class Section:
    """One figure on a page.

    Attributes:
        name: Its name for links.
        rows: Its lines in the table of all statements.
        lines: What stands under its heading, the heading among it.
        scale: At which scale it was made.
        facts: Commits and versions, as an outcome has them.
        verdicts: The statements; those read back have no words, only what is counted.
    """

    name: str
    rows: tuple[str, ...]
    lines: tuple[str, ...]
    scale: str
    facts: Mapping[str, Any]
    verdicts: tuple[Verdict, ...]


def anchor(name: str) -> str:
    """What links to a figure lead to."""
    return f'<a id="fig-{name}"></a>'


def sections_of(page: str) -> tuple[Section, ...]:
    """The figures of a page that `write_markdown` wrote.

    Raises:
        ReportError: There are none, or what is found of one can't be read.
    """
    parts = re.split(r'(?m)^<a id="fig-([^"]+)"></a>\n', page.split(f"\n{DECIDED}\n")[0])
    if len(parts) < 3:
        raise ReportError("the page to be kept has no figures: it was not written by `bisls report --markdown`")
    table = parts[0].splitlines()
    return tuple(
        _section(name, [row for row in table if f"](#fig-{name}) | " in row], text.rstrip("\n").split("\n"))
        for name, text in zip(parts[1::2], parts[2::2], strict=True)
    )


def _section(name: str, rows: list[str], lines: list[str]) -> Section:
    settings = {found[1]: found[2] for line in lines if (found := re.fullmatch(r"\| ([^|]+) \| (.*) \|", line))}
    versions = dict(
        pair for pair in (part.split(" ", 1) for part in settings.get("versions", "").split(", ")) if len(pair) == 2
    )
    facts = {"commits": [one for one in settings.get("commits", "").split(", ") if one], "versions": versions}
    verdicts = tuple(Verdict("", _judgement(row), "", ours=f"{OWN} |" in row) for row in rows)
    return Section(name, tuple(rows), (anchor(name), *lines, ""), settings.get("scale", ""), facts, verdicts)


def _judgement(row: str) -> Judgement:
    for judgement, symbol in SYMBOLS.items():
        if row.endswith(f"| {symbol} {judgement} |"):
            return judgement
    raise ReportError(f"the page to be kept has a statement without a verdict: {row[:80]}")
