"""Every Python block of every page is run, page by page, in order."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_code_on_the_page_runs(page):
    blocks = re.findall(r"^```python\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)
    names: dict = {"__name__": "__main__"}
    for block in blocks:
        exec(compile(block, str(page), "exec", dont_inherit=True), names)


def test_there_is_code_to_run():
    assert sum("```python" in page.read_text() for page in PAGES) >= 5
