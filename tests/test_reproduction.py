"""The page on the reproduction counts what the pages of the runs say: no verdict of before the last run stays behind."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[1] / "docs"
PAGES = [  # where a figure is counted: on the first of these that has it
    (DOCS / f"reproduction_{name}.md").read_text("utf-8") for name in ("standard", "reading", "quick")
]
EARLIER = PAGES[-1]
SCALES = ("standard", "quick", "quick")
TEXT = (DOCS / "reproduction.md").read_text("utf-8")
KINDS = ("✓ holds", "✗ fails", "? undecided")
NAMED = re.compile(r"^\| \[([^\]]+)\]\(#fig-", re.MULTILINE)


def statements(page: str) -> list[tuple[str, str]]:
    """The lines of the table of all statements, with the figure that each belongs to."""
    found = []
    for row in page.split("## How verdicts are decided")[0].splitlines():
        if named := NAMED.match(row):
            name = named[1].replace("\\", "")
            # on older pages the counts of checks are a part of another figure
            found.append(
                ("search_cost" if name == "search_and_runtime" and "checks" in row.split(" | ")[1] else name, row)
            )
    return found


def on(page: str) -> set[str]:
    """The figures that a page has."""
    return {name for name, _ in statements(page)}


def verdicts(page: str, name: str, own: bool) -> Counter:
    """How many statements of a figure hold, fail and are undecided: the paper's, or those on our default."""
    rows = [row for figure, row in statements(page) if figure == name and ("*(our default)*" in row) is own]
    cells = [cell.removesuffix(" |") for row in rows for cell in row.split(" | ")]
    return Counter({kind: cells.count(kind) for kind in KINDS})


def rows():
    """The table: figures, scale, verdicts before and now, and those on the default."""
    table = TEXT.split("| figure | scale, seeds |")[1].split("\n\n")[0].splitlines()[2:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table]


def told(counts: Counter) -> str:
    return ", ".join(str(counts[kind]) for kind in KINDS)


def source(name: str) -> int:
    return next(i for i, page in enumerate(PAGES) if name in on(page))


@pytest.mark.parametrize("row", rows()[:-1], ids=lambda row: row[0])
def test_each_figure_is_counted_as_its_page_has_it(row):
    name, scale, before, now, own = row
    page = PAGES[source(name)]
    assert SCALES[source(name)] == scale.split(",")[0]
    assert told(verdicts(page, name, False)) == now
    assert told(verdicts(page, name, True)) == own
    assert told(verdicts(EARLIER, name, False)) == before


def test_every_figure_is_in_the_table_and_the_sums_are_right():
    *each, last = rows()
    assert sorted(row[0] for row in each) == sorted(set.union(*map(on, PAGES)))
    for column in (2, 3, 4):
        numbers = [[int(n) for n in row[column].split(", ")] for row in each]
        assert last[column] == ", ".join(str(sum(kind)) for kind in zip(*numbers, strict=True))


def test_the_text_says_what_the_table_does():
    before, now = ([int(n) for n in rows()[-1][column].split(", ")] for column in (2, 3))
    words = " ".join(TEXT.split())
    assert f"Of the paper's {sum(now)} statements {now[0]} hold, {now[1]} fail and {now[2]} are undecided" in words
    assert f"{before[0]} held, {before[1]} failed and {before[2]} were undecided" in words
