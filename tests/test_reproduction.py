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


def on(page: str) -> set[str]:
    """The figures that a page has."""
    return {name.replace("\\", "") for name in NAMED.findall(page)}


def verdicts(page: str, name: str, own: bool) -> Counter:
    """How many statements of a figure hold, fail and are undecided: the paper's, or those on our default."""
    found: Counter = Counter()
    for row in page.split("## How verdicts are decided")[0].splitlines():
        named = NAMED.match(row)
        if named and named[1].replace("\\", "") == name and ("*(our default)*" in row) is own:
            found.update(cell for cell in row.split(" | ") for kind in KINDS if cell.removesuffix(" |") == kind)
    return Counter({kind: sum(n for cell, n in found.items() if cell.removesuffix(" |") == kind) for kind in KINDS})


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
    names, scale, before, now, own = row
    known = [
        name for name in names.split(", ") if any(name in on(page) for page in PAGES)
    ]  # one was part of another once
    there = [(PAGES[source(name)], name) for name in known]
    assert {SCALES[source(name)] for name in known} == {scale.split(",")[0]}
    assert told(sum((verdicts(page, name, False) for page, name in there), Counter())) == now
    assert told(sum((verdicts(page, name, True) for page, name in there), Counter())) == own
    earlier = [name for name in known if name in on(EARLIER)]
    assert told(sum((verdicts(EARLIER, name, False) for name in earlier), Counter())) == before


def test_every_figure_is_in_the_table_and_the_sums_are_right():
    *each, last = rows()
    listed = [name for row in each for name in row[0].split(", ")]
    assert len(listed) == len(set(listed))
    assert set(listed) >= set.union(*map(on, PAGES))
    for column in (2, 3, 4):
        numbers = [[int(n) for n in row[column].split(", ")] for row in each]
        assert last[column] == ", ".join(str(sum(kind)) for kind in zip(*numbers, strict=True))


def test_the_text_says_what_the_table_does():
    before, now = ([int(n) for n in rows()[-1][column].split(", ")] for column in (2, 3))
    words = " ".join(TEXT.split())
    assert f"Of the paper's {sum(now)} statements {now[0]} hold, {now[1]} fail and {now[2]} are undecided" in words
    assert f"{before[0]} held, {before[1]} failed and {before[2]} were undecided" in words
