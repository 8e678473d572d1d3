"""All figures at the smallest scale by the command itself, and the page of it in a browser."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from bisls.experiments import NAMES
from bisls.report import read_outcomes

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    out = tmp_path_factory.mktemp("smoke")
    command = [sys.executable, "-m", "bisls", "reproduce", "--scale", "smoke", "--jobs", "2", "--out", str(out)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "BISLS_DATA": ""}
    done = subprocess.run(command, capture_output=True, text=True, timeout=1200, env=environment)
    assert done.returncode == 0, done.stderr
    assert "the paper's claims" in done.stdout
    assert "verdicts mean nothing" in done.stdout
    return out


def test_every_figure_has_its_outcome(made):
    outcomes = {outcome.name: outcome for outcome in read_outcomes(made)}
    assert set(outcomes) == set(NAMES)
    for name, outcome in outcomes.items():
        assert outcome.panels, name
        assert outcome.verdicts, name
        if name == "calibration":  # it compares readings, no methods
            continue
        assert any(series.ours for panel in outcome.panels for series in panel.series), f"{name}: where is our default?"
        claims = [verdict for verdict in outcome.verdicts if not verdict.ours]
        assert claims, name
        for verdict in claims:
            assert verdict.told or "(control)" in verdict.statement, (
                f"{name}: what does the paper say? {verdict.statement}"
            )
        assert any(verdict.ours for verdict in outcome.verdicts), name
        assert outcome.facts["runs"] > 0
        assert outcome.facts["evaluations"], name
        assert outcome.facts["commits"]
        assert outcome.settings
        assert outcome.command.startswith(f"bisls reproduce {name} ")


def test_the_page_shows_all_of_it(made, browser):
    browser.open(made / "report.html")
    assert browser.complaints() == []
    assert browser.requests() == []
    assert browser.run("return document.querySelectorAll('.badge').length") > 0
    assert browser.run("return [...document.querySelectorAll('.badge')].every(e => e.closest('.empty'))")  # grey
    for name in NAMES:
        section = f"section.figure#fig-{name}"
        assert len(browser.sizes(section)) == 1, name
        assert browser.run(f"return document.querySelectorAll('{section} .badge').length") > 0, name
        pictures = browser.sizes(f"{section} .plot > svg, {section} .pictures img")
        assert pictures, name
        assert all(width > 60 and height > 60 for width, height in pictures), name


@pytest.mark.parametrize("dark", [False, True])
def test_a_narrow_page_does_not_scroll_sideways(made, browser, dark):
    browser.open(made / "report.html", width=360, dark=dark)
    browser.run("document.querySelectorAll('details').forEach(e => e.open = true)")
    assert browser.overflow() <= 0
    ratio, where = browser.worst_contrast()
    assert ratio >= 4.5, where
