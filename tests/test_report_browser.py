"""The page of a report as Chromium shows it: wide, narrow, light, dark."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from made_up import every_feature, realistic

from bisls.report.page import page

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module", params=[realistic, every_feature], ids=["realistic", "every_feature"])
def written(request, tmp_path_factory):
    outcomes = request.param()
    path = tmp_path_factory.mktemp("page") / "report.html"
    path.write_text(page(outcomes, expected=("rates",)), encoding="utf-8")
    return outcomes, path


def test_everything_is_shown_and_nothing_complains(browser, written):
    outcomes, path = written
    browser.open(path)
    assert browser.complaints() == []
    assert browser.requests() == []
    assert len(browser.sizes("section.figure")) == len(outcomes) + 1
    assert len(browser.sizes("section.figure .plot > svg")) == sum(len(one.panels) for one in outcomes)
    assert len(browser.sizes(".pictures img")) == sum(len(row.images) for one in outcomes for row in one.pictures)
    for selector in ("section.figure .plot > svg", ".pictures img"):
        assert all(width > 60 and height > 60 for width, height in browser.sizes(selector)), selector
    assert all(width > 20 and height > 8 for width, height in browser.sizes(".legend svg"))
    curves = browser.run(
        "return [...document.querySelectorAll('.plot > svg path[style*=\"--plot-series-1\"]')]"
        ".map(e => getComputedStyle(e).stroke)"
    )
    assert "rgb(11, 91, 181)" in curves


@pytest.mark.parametrize("width", [320, 360, 768, 1280])
def test_no_width_scrolls_sideways(browser, written, width):
    browser.open(written[1], width=width)
    assert browser.run("return window.innerWidth") == width
    assert browser.overflow() <= 0
    browser.run("document.querySelectorAll('details').forEach(e => e.open = true)")
    assert browser.overflow() <= 0


@pytest.mark.parametrize("width", [360, 1280])
def test_text_is_readable_in_both_schemes(browser, written, width):
    backgrounds = []
    for dark in (False, True):
        browser.open(written[1], width=width, dark=dark)
        browser.run("document.querySelectorAll('details').forEach(e => e.open = true)")
        ratio, where = browser.worst_contrast()
        assert ratio >= 4.5, (dark, where)
        backgrounds.append(browser.background())
    assert backgrounds[0] == "rgb(255, 255, 255)"
    assert backgrounds[1] == "rgb(20, 23, 27)"


@pytest.mark.parametrize("dark", [False, True])
def test_a_failure_is_red_unless_it_means_nothing(browser, tmp_path, dark):
    paint = "return [...document.querySelectorAll('.badge.fails, .tally .fails b')].map(e => getComputedStyle(e).color)"
    seen = {}
    for scale in ("smoke", "quick"):
        path = tmp_path / f"{scale}.html"
        path.write_text(page([replace(realistic()[2], scale=scale)]), encoding="utf-8")
        browser.open(path, dark=dark)
        colours = {tuple(map(int, re.findall(r"\d+", colour))) for colour in browser.run(paint)}
        (seen[scale],) = colours
    assert max(seen["smoke"]) - min(seen["smoke"]) < 25  # grey, a little bluish as all soft text
    red, *rest = seen["quick"]
    assert red > max(rest) + 80


def test_a_narrow_table_says_which_column_a_cell_is_of(browser, written):
    """Columns stand below each other there, without the line of their names."""
    outcomes, path = written
    browser.open(path, width=390)
    said = browser.run(
        "return [...document.querySelectorAll('table.plain td')].map(e => getComputedStyle(e, '::before').content)"
    )
    named = [
        f'"{name}: "' for one in outcomes for table in one.tables for _ in table.rows for name in table.columns[1:]
    ]
    assert sorted(said) == sorted(named)


def test_the_keyboard_reaches_the_report(browser, written):
    from selenium.webdriver.common.keys import Keys

    browser.open(written[1])
    browser.driver.find_element("tag name", "body").send_keys(Keys.TAB)
    assert browser.run("return document.activeElement.className") == "skip"
    assert browser.run("return document.activeElement.getBoundingClientRect().left") >= 0
    browser.driver.switch_to.active_element.send_keys(Keys.ENTER)
    assert browser.run("return location.hash") == "#main"


def test_statements_are_filtered_by_verdict_and_by_whose_they_are(browser, written):
    outcomes, path = written
    browser.open(path)
    verdicts = [verdict for one in outcomes for verdict in one.verdicts]
    shown = "return [...document.querySelectorAll('.scroll tbody tr')].filter(e => e.offsetParent !== null).length"
    for whose in ("paper", "own", "both"):
        browser.run(f"document.querySelector('.filter input[value={whose}]').click()")
        meant = [verdict for verdict in verdicts if whose == "both" or verdict.ours == (whose == "own")]
        for name in ("fails", "undecided", "holds", "all"):
            browser.run(f"document.querySelector('.filter input[value={name}]').click()")
            expected = [verdict for verdict in meant if name in ("all", str(verdict.judgement))]
            assert browser.run(shown) == len(expected), (whose, name)
