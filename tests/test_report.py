"""Reports from made-up outcomes: nothing is lost, nothing is loaded, nothing breaks, the same page each time."""

from __future__ import annotations

import errno
import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from math import inf, nan
from xml.etree import ElementTree

import matplotlib as mpl
import numpy as np
import pytest
from made_up import NASTY, every_feature, facts, realistic
from typer.testing import CliRunner

from bisls.outcome import Judgement, Outcome, Panel, Series, Verdict
from bisls.report import ReportError, count, markdown_table, read_outcomes, write_markdown, write_report
from bisls.report.page import page
from bisls.report.palette import OTHERS, OURS, PAINTS, REFERENCE
from bisls.report.plots import legend, looks, panel_svg, save_panel
from bisls.report.values import LONG, thin
from bisls_cli import app

VOID = {"meta", "link", "img", "br", "hr", "input", "source"}


class Page(HTMLParser):
    """The page as a list of elements: tag, attributes, the ids of the sections around it, text."""

    def __init__(self, text):
        super().__init__()
        self.open, self.elements = [], []
        self.feed(text)
        self.close()
        assert not self.open, f"never closed: {[e['tag'] for e in self.open]}"

    def handle_starttag(self, tag, attrs):
        section = next((e["attrs"]["id"] for e in reversed(self.open) if e["tag"] == "section"), None)
        element = {"tag": tag, "attrs": dict(attrs), "section": section, "text": ""}
        self.elements.append(element)
        if tag not in VOID:
            self.open.append(element)

    def handle_startendtag(self, tag, attrs):
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.open.pop()

    def handle_endtag(self, tag):
        assert self.open.pop()["tag"] == tag

    def handle_data(self, data):
        for element in self.open:
            element["text"] += data

    def find(self, tag, section=None, **attributes):
        wanted = {name.rstrip("_").replace("_", "-"): value for name, value in attributes.items()}
        return [
            e
            for e in self.elements
            if e["tag"] == tag
            and (section is None or e["section"] == section)
            and all(value in (e["attrs"].get(name) or "").split() for name, value in wanted.items())
        ]


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    folder = tmp_path_factory.mktemp("report")
    path = write_report(every_feature(), folder, title="All <b>", expected=("demo_2", "rates"))
    assert path == folder / "report.html"
    return path


@pytest.fixture(scope="module")
def parsed(written):
    return Page(written.read_text(encoding="utf-8"))


@pytest.mark.slow
def test_every_figure_has_a_section_with_a_picture_and_its_verdicts(parsed):
    sections = [e["attrs"]["id"] for e in parsed.find("section", class_="figure")]
    outcomes = every_feature()
    assert len(sections) == len(outcomes) + 1  # one that was not run
    for section, outcome in zip(sections, outcomes, strict=False):
        pictures = parsed.find("svg", section, role="img") + parsed.find("img", section)
        assert len(pictures) == len(outcome.panels) + sum(len(row.images) for row in outcome.pictures) > 0
        badges = [e["text"] for e in parsed.find("span", section, class_="badge")]
        symbols = {"holds": "✓", "fails": "✗", "undecided": "?"}
        assert badges == [f"{symbols[v.judgement]} {v.judgement}" for v in outcome.verdicts]
        assert outcome.command in [e["text"] for e in parsed.find("code", section)] or not outcome.command
        text = " ".join(e["text"] for e in parsed.find("section", id=section))
        for words in (outcome.title, outcome.paper.split("\n")[0], outcome.seen, *outcome.settings.values()):
            assert words in text
    assert "Not run" in parsed.find("h2", sections[-1])[0]["text"]
    assert "bisls reproduce rates" in parsed.find("code", sections[-1])[0]["text"]


@pytest.mark.slow
def test_the_summary_has_all_statements_and_counts_the_two_kinds_apart(parsed):
    verdicts = [v for outcome in every_feature() for v in outcome.verdicts]
    rows = parsed.find("tr", "summary")[1:]
    assert len(rows) == len(verdicts)
    for row, verdict in zip(rows, verdicts, strict=True):
        assert verdict.statement in row["text"]
        assert verdict.numbers in row["text"]
        assert str(verdict.judgement) in row["text"]
        assert ("our default" in row["text"].replace(verdict.statement, "")) == verdict.ours
    tallies = [" ".join(e["text"].split()) for e in parsed.find("div", "summary", class_="tally")]
    for tally, ours in zip(tallies, (False, True), strict=True):
        assert str(count(verdicts, ours)).replace(",", "") in tally
    assert str(count(verdicts, ours=False)) == "5 hold, 2 fail, 1 undecided"
    assert str(count(verdicts, ours=True)) == "2 hold, 0 fail, 1 undecided"


@pytest.mark.slow
def test_verdicts_are_grey_where_they_mean_nothing():
    """At the scale "smoke", and only there; the page says why."""
    one, other = realistic()[1:3]
    for scales, grey in ((("smoke", "quick"), [True, False]), (("quick", "paper"), [False, False])):
        shown = Page(page([replace(one, scale=scales[0]), replace(other, scale=scales[1])]))
        assert [e["attrs"]["class"] == "verdicts empty" for e in shown.find("ul", class_="verdicts")] == grey
        rows = shown.find("tr", "summary")[1:]
        wanted = [grey[0]] * len(one.verdicts) + [grey[1]] * len(other.verdicts)
        assert ["empty" in e["attrs"]["class"].split() for e in rows] == wanted
        assert bool(shown.find("div", class_="tallies")[0]["attrs"]["class"] == "tallies empty") == grey[0]
        assert ("verdicts mean nothing" in shown.find("section", id="summary")[0]["text"]) == grey[0]


@pytest.mark.slow
def test_nothing_is_loaded_and_nothing_runs(written, parsed):
    assert not parsed.find("script")
    for element in parsed.elements:
        for name, value in element["attrs"].items():
            assert not name.startswith("on")
            if name in ("src", "href", "xlink:href", "srcset", "data", "action", "poster"):
                assert value.startswith(("#", "data:")), (element["tag"], name, value)
    text = written.read_text(encoding="utf-8")
    assert "@import" not in text
    assert "http:" not in text
    assert "https:" not in text
    assert all(target.startswith("#") for target in re.findall(r"url\(([^)]*)", text))


@pytest.mark.slow
def test_ids_are_unique_and_links_lead_somewhere(parsed):
    ids = [e["attrs"]["id"] for e in parsed.elements if "id" in e["attrs"]]
    assert len(ids) == len(set(ids))
    links = [e["attrs"]["href"] for e in parsed.elements if e["attrs"].get("href", "").startswith("#")]
    links += [f"#{name}" for e in parsed.elements for name in e["attrs"].get("aria-labelledby", "").split()]
    styles = [value for e in parsed.elements for value in e["attrs"].values() if value]
    links += [link for value in styles for link in re.findall(r"url\((#[^)]*)\)", value) if link != "#p1"]
    assert len(links) > 50
    assert {link[1:] for link in links} <= set(ids)


@pytest.mark.slow
def test_pictures_have_words_and_the_page_has_landmarks(parsed):
    titles = {e["attrs"].get("id"): e["text"] for e in parsed.find("title")}
    for svg in parsed.find("svg"):
        assert svg["attrs"].get("aria-hidden") == "true" or titles[svg["attrs"]["aria-labelledby"]].strip()
    assert all(e["attrs"]["alt"].strip() for e in parsed.find("img"))
    assert "A sine with one spike." in titles.values()
    assert parsed.find("html")[0]["attrs"]["lang"] == "en"
    for landmark in ("header", "nav", "main", "footer", "h1"):
        assert len(parsed.find(landmark)) == 1
    assert parsed.find("a")[0]["attrs"] == {"class": "skip", "href": "#main"}
    assert parsed.find("h1")[0]["text"] == "All <b>"


@pytest.mark.slow
def test_what_comes_from_data_stays_text(written, parsed):
    text = written.read_text(encoding="utf-8")
    assert "<script" not in text
    assert "<b>c" not in text
    seen = [e["text"].strip() for e in parsed.elements if e["text"].strip() == NASTY]
    assert len(seen) > 8


@pytest.mark.slow
def test_where_the_numbers_come_from_is_said(parsed):
    header = " ".join(parsed.find("header")[0]["text"].split())
    for words in ("paper (the paper's seeds", "quick", "2025-03-02", "torch 2.13.0", "1a2b3c4d5e-dirty"):
        assert words in header.replace("\xa0", " ")
    assert "2 different commits" in header
    assert "in no commit" in header
    assert "different scales" in header
    one = realistic()[:1]
    clean = " ".join(Page(page(one)).find("header")[0]["text"].split())
    assert "Before you trust" not in clean
    smoke = Page(
        page([replace(one[0], scale="smoke", facts={**facts(), "versions": {"torch": "2.12"}, "dirty": True})])
    )
    said = smoke.find("div", class_="warning")[0]["text"]
    assert "verdicts mean nothing" in said
    assert "in no commit" in said
    assert "torch\xa02.12" in smoke.find("header")[0]["text"]
    assert "nothing was run" in Page(page([])).find("header")[0]["text"]


@pytest.mark.slow
def test_the_same_outcomes_give_the_same_files(tmp_path):
    outcomes = realistic()[1:]
    before = dict(mpl.rcParams)
    first, second = (write_report(outcomes, tmp_path / name) for name in "ab")
    assert dict(mpl.rcParams) == before
    files = sorted(path.relative_to(tmp_path / "a") for path in (tmp_path / "a").rglob("*") if path.is_file())
    assert len(files) == 1 + 3 + 3 * 2 + 1  # page, outcomes, plots twice, pictures
    assert all((tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes() for name in files)
    again = write_report(read_outcomes(first.parent, [one.name for one in outcomes]), first.parent)
    assert again.read_bytes() == second.read_bytes()  # JSON and back changes nothing
    with mpl.rc_context({"font.size": 30, "axes.facecolor": "red", "text.usetex": True}):
        assert page(outcomes) == first.read_text(encoding="utf-8")


def test_an_outcome_that_is_there_is_kept(tmp_path):
    one = realistic()[1]
    kept = tmp_path / "outcomes" / "trajectories.json"
    kept.parent.mkdir()
    kept.write_text("kept")
    write_report([one], tmp_path)
    assert kept.read_text() == "kept"


# ---------------------------------------------------------------------------------------------------------- plots


def test_series_without_values_are_named_and_drawn_values_are_kept():
    panels = {panel.title: panel for panel in every_feature()[0].panels}
    names = {title: [entry.label for entry in legend(panel, "x")] for title, panel in panels.items()}
    assert names["gaps"] == ["gap", "all nan (not finite)", "all inf (not finite)"]
    assert names["log"] == ["to 0", "negative (no value above 0)"]
    assert names["no values"] == ["empty (no values)"]
    assert "no data" in panel_svg(panels["no series"], "x", "alt")
    assert "no value that can be drawn" in panel_svg(panels["nothing finite"], "x", "alt")


def test_a_gap_is_a_gap():
    y = [1.0, 2.0, nan, 4.0, 5.0, inf, 7.0, 8.0]
    root = ElementTree.fromstring(
        panel_svg(Panel("t", "x", "y", (Series("s", tuple(range(8)), tuple(y)),)), "a", "alt")
    )
    curves = [e.get("d") for e in root.iter("path") if f"--plot-{OTHERS[0].name}" in e.get("style", "")]
    assert max(d.count("M") for d in curves) == 3


def test_long_curves_are_thinned_and_keep_their_extremes():
    y = np.sin(np.arange(50_000) / 300)
    y[1234], y[30_001], y[40_000] = 9.0, -9.0, nan
    kept = thin(y)
    assert {0, 1234, 30_001, 40_000, 49_999} <= set(kept.tolist())
    assert len(kept) < LONG
    assert len(thin(y[:LONG])) == LONG
    series = Series("s", tuple(map(float, range(50_000))), tuple(y), low=tuple(y - 1), high=tuple(y + 1))
    assert len(panel_svg(Panel("t", "x", "y", (series,)), "a", "alt")) < 80_000


def test_looks_differ_without_colour_and_ours_is_always_the_same():
    series = [Series(f"s{i}", (), ()) for i in range(20)]
    series[7] = Series("us", (), (), ours=True)
    series[9] = Series("line", (), (), dashed=True)
    made = looks(Panel("t", "x", "y", tuple(series)))
    assert len({(look.mark, look.dash) for look in made}) == 20
    assert [i for i, look in enumerate(made) if look.paint == OURS] == [7]
    assert made[7].width > 2 * max(look.width for look in made if look.paint != OURS)
    assert made[9].paint == REFERENCE
    assert made[9].width < min(look.width for i, look in enumerate(made) if i != 9)


def luminance(colour):
    part = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    return np.dot([0.2126, 0.7152, 0.0722], [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in part])


def test_curves_stand_out_on_light_and_dark_pages():
    for paint in (OURS, REFERENCE, *OTHERS):
        assert 1.05 / (luminance(paint.light) + 0.05) >= 3.0, paint
        assert (luminance(paint.dark) + 0.05) / (luminance("#14171b") + 0.05) >= 3.0, paint
    assert len({paint.light for paint in PAINTS}) == len(PAINTS)  # the page tells them apart by it


# colour vision without the long, the middle, the short cones: Machado et al. 2009, severity 1
DEFICIENT = (
    [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
    [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]],
    [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.303900]],
)


def lab(colour, vision):
    part = np.array([int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)])
    linear = np.where(part <= 0.04045, part / 12.92, ((part + 0.055) / 1.055) ** 2.4)
    linear = np.clip(np.array(vision) @ linear, 0, 1)
    to_xyz = [[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]]
    x, y, z = np.cbrt(np.maximum(np.array(to_xyz) @ linear / [0.9505, 1.0, 1.089], 1e-6))
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_colours_differ_for_every_kind_of_colour_vision(scheme):
    colours = [getattr(paint, scheme) for paint in (OURS, *OTHERS)]
    for vision in (np.eye(3), *DEFICIENT):
        points = [lab(colour, vision) for colour in colours]
        apart = min(np.linalg.norm(a - b) for i, a in enumerate(points) for b in points[:i])
        assert apart > 13, (scheme, vision)


def test_files_are_written_whole(tmp_path, monkeypatch):
    target = tmp_path / "plot.png"
    target.write_text("old")
    monkeypatch.setattr(
        "os.replace", lambda *_: (_ for _ in ()).throw(OSError(errno.ENOSPC, "No space left on device"))
    )
    with pytest.raises(OSError):
        save_panel(realistic()[0].panels[0], tmp_path / "plot", formats=("png",))
    assert target.read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["plot.png"]


# ------------------------------------------------------------------------------------------------- reading, Markdown


def small(name, **more):
    panel = Panel("p", "x", "y", (Series("s", (1.0, 2.0), (1.0, nan)),))
    verdicts = (Verdict("it is so", Judgement.HOLDS, "1 | 2"),)
    return Outcome(name, f"About {name}", "says", "", "smoke", {"a": "b"}, (panel,), verdicts, **more)


def put(folder, *names):
    (folder / "outcomes").mkdir(parents=True, exist_ok=True)
    for name in names:
        (folder / "outcomes" / f"{name}.json").write_text(small(name).to_json(), encoding="utf-8")


def test_outcomes_come_in_the_order_wanted(tmp_path):
    put(tmp_path, "figure-10", "figure-2", "zeta", "alpha")
    assert [one.name for one in read_outcomes(tmp_path)] == ["alpha", "figure-2", "figure-10", "zeta"]
    assert [one.name for one in read_outcomes(tmp_path, ["zeta", "none"])] == ["zeta", "alpha", "figure-2", "figure-10"]


@pytest.mark.parametrize("content", ["{", "[]", "{}", '{"panels": [], "verdicts": [], "pictures": []}', "3", "\xff"])
def test_a_broken_outcome_is_named_with_what_to_do(tmp_path, content):
    put(tmp_path, "good")
    (tmp_path / "outcomes" / "demo_2.json").write_bytes(content.encode("latin-1"))
    with pytest.raises(ReportError, match=r"demo_2\.json is not an outcome .*delete .*bisls reproduce demo_2"):
        read_outcomes(tmp_path)


@pytest.mark.slow
def test_the_markdown_page_says_the_same(tmp_path):
    outcomes = every_feature()
    path = write_markdown(outcomes, tmp_path / "docs" / "reproduction.md", images="pictures")
    text = path.read_text(encoding="utf-8")
    links = re.findall(r"!\[[^\n]*\]\(([^)]*)\)", text)
    assert len(links) == sum(len(one.panels) + len(one.pictures) for one in outcomes)
    assert all((path.parent / link).read_bytes().startswith(b"\x89PNG") for link in links)
    assert markdown_table(outcomes) in text
    assert "5 hold, 2 fail, 1 undecided" in text
    assert "<script" not in re.sub(r"(?m)^    .*$", "", text)  # but as code
    rows = [line for line in markdown_table(outcomes).splitlines() if line.startswith("|")]
    assert all(len(re.findall(r"(?<!\\)\|", row)) == 6 for row in rows)
    anchors = re.findall(r'<a id="([^"]*)">', text)
    assert set(re.findall(r"\]\(#([^)]*)\)", text)) == set(anchors)
    for words in (
        "bisls reproduce datadist --scale quick",
        "torch 2.13.0",
        "1a2b3c4d5e",
        "✗ fails",
        "different scales",
    ):
        assert words in text


HELD, LOST = Verdict("a | b", Judgement.HOLDS, "1 < 2", told="9 ± 1"), Verdict("c", Judgement.FAILS, "3", ours=True)


def simple(name, *verdicts, commit="aaaa"):
    panel = Panel(f"panel of {name}", "k", "f", (Series("s", (1.0, 2.0), (3.0, 4.0)),))
    made = {"commits": [commit], "versions": {"torch": "2.13.0", "numpy": "2.4"}, "seeds": list(range(9))}
    return Outcome(name, f"On | {name}", "p", "s", "standard", {}, (panel,), verdicts, facts=made)


def test_figures_of_an_earlier_page_are_kept(tmp_path):
    path, order = tmp_path / "page.md", ("first", "second", "third")

    def write(*outcomes, **options):
        return write_markdown(outcomes, path, order=order, **options).read_text(encoding="utf-8")

    def rows(text):
        return [line for line in text.splitlines() if "](#fig-second)" in line]

    alone = write(simple("second", HELD, LOST), title="A *page*")
    others = simple("third", HELD, commit="bbbb"), simple("first", LOST, commit="bbbb")
    text = write(*others, keep=True)
    assert re.findall(r'<a id="fig-(\w+)">', text) == ["first", "second", "third"]
    assert text.splitlines()[0] == alone.splitlines()[0]
    assert "2 hold, 0 fail, 0 undecided. Our default: 0 hold, 2 fail, 0 undecided" in text
    assert "- commit: bbbb, aaaa" in text
    assert "2 different commits" in text
    assert "| seeds | 0 to 8 |" in text
    assert alone[alone.index('<a id="fig-second">') : alone.index("## How verdicts")] in text  # to the letter
    assert rows(alone) == rows(text) != []
    assert write(*others, keep=True) == text
    text = write(simple("second", LOST, LOST, commit="cccc"), keep=True)  # made anew, it takes its own place
    assert "aaaa" not in text
    assert "1 holds, 0 fail, 0 undecided. Our default: 0 hold, 3 fail, 0 undecided" in text
    assert "fig-first" not in write(simple("second", LOST))


@pytest.mark.parametrize(
    "text", ["my own notes\n", '| [x](#fig-x) | s | – | n | perhaps |\n\n<a id="fig-x"></a>\n\n## x: X\n']
)
def test_what_is_no_page_of_ours_is_left_alone(tmp_path, text):
    path = tmp_path / "page.md"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ReportError, match="to be kept"):
        write_markdown([simple("y", HELD)], path, keep=True)
    assert path.read_text(encoding="utf-8") == text
    assert not (tmp_path / "plots").exists()
    put(tmp_path, "a")
    done = command(tmp_path, "--markdown", path, "--keep")
    assert done.exit_code == 2
    assert "to be kept" in done.stderr


def test_a_page_that_is_not_there_yet_has_nothing_to_keep(tmp_path):
    text = write_markdown([simple("y", HELD)], tmp_path / "new.md", keep=True).read_text(encoding="utf-8")
    assert "fig-y" in text


def ticks(panel):
    return re.findall(r"<text[^>]*>([^<]*)</text>", panel_svg(panel, "p", "alt"))


def test_few_points_have_a_tick_each_and_short_axes_numbers():
    points = (
        Series("a", (1, 2, 5), (0.5, 0.6, 0.7), points=True),
        Series("b", (1, 2, 5), (0.8, 0.8, 0.8), points=True),
    )
    shown = ticks(Panel("t", "steps", "y", points))
    assert [text for text in shown if re.fullmatch(r"[\d.]+", text)][:3] == ["1", "2", "5"]
    line = Series("a", tuple(map(float, range(12))), tuple(2.3 * 0.8**k for k in range(12)))
    twenty = Series("a", (0.0, 5.0, 10.0, 20.0), (1.0, 1.0, 2.0, 1.0))  # iterations have no halves, so ticks have none
    assert {"5", "10", "20"} <= set(ticks(Panel("t", "iteration", "y", (twenty,))))
    assert "1" in ticks(Panel("t", "", "", (line,), yscale="log", ylim=(0.2, 3.0)))
    wide = Series("a", (0.0, 1.0, 2.0), (1e-4, 1.0, 1e3))
    assert "10⁰" in ticks(Panel("t", "", "", (wide,), yscale="log"))


# ---------------------------------------------------------------------------------------------------------- command


def command(*arguments):
    return CliRunner().invoke(app, ["report", *map(str, arguments)])


@pytest.mark.slow
def test_the_command_writes_and_counts(tmp_path, monkeypatch):
    put(tmp_path, "b", "a")
    opened = []
    monkeypatch.setattr("webbrowser.open", opened.append)
    done = command(tmp_path, "--markdown", tmp_path / "new" / "page.md")
    assert done.exit_code == 0, done.output
    assert f"page: {tmp_path / 'report.html'}" in done.stdout
    assert "the paper's claims: 2 hold, 0 fail, 0 undecided" in done.stdout
    assert (tmp_path / "new" / "plots" / "a-1.png").exists()
    assert not opened
    assert command(tmp_path, "--open").exit_code == 0
    assert opened == [(tmp_path / "report.html").as_uri()]
    assert "Examples" in command("--help").stdout


def test_the_command_explains_what_is_missing(tmp_path):
    for folder in (tmp_path, tmp_path / "nowhere"):
        done = command(folder)
        assert done.exit_code == 2
        assert "bisls reproduce" in done.stderr
    put(tmp_path, "good")
    (tmp_path / "outcomes" / "bad.json").write_text(json.dumps({"name": "bad"}))
    done = command(tmp_path)
    assert done.exit_code == 2
    assert "bad.json" in done.stderr


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EACCES, errno.EROFS])
def test_the_command_says_that_the_disk_refused(tmp_path, monkeypatch, code):
    put(tmp_path, "good")

    def refuse(*_, **__):
        raise OSError(code, "it refused", str(tmp_path / "report.html"))

    monkeypatch.setattr("os.fsync", refuse)
    done = command(tmp_path)
    assert done.exit_code == 1
    assert "report.html: it refused" in done.stderr
    assert "Traceback" not in done.output


def test_tables_and_the_numbers_of_the_paper_are_shown(tmp_path):
    (one,) = [outcome for outcome in realistic() if outcome.tables]
    text = write_markdown([one], tmp_path / "page.md").read_text(encoding="utf-8")
    assert r"| 9 \| 10 | ✓ 8 |" in text
    assert "| &lt;4&gt; | ✗ 0 |" in text
    assert "| 9 ± 1 | 2.2 against 2.4" in text
    assert "| reading | paper |" in text
    shown = page([one])
    assert '<th scope="row">&lt;4&gt;</th><td data-label="here">✗ 0</td>' in shown
    assert ">9 ± 1<" in shown
    assert Outcome.from_json(one.to_json()) == one
