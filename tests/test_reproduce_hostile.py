"""What is left of runs: files without points, files of other runs, runs that are all lost, and names that look like markup."""

from __future__ import annotations

import json
import shutil
import warnings
from collections import defaultdict
from math import nan

import pytest
from test_reproduce import ONE, TWO, Made, forget, invoke
from watching import Quiet

from bisls import console
from bisls.experiments import NAMES, Plan, Store, figure, reproduce
from bisls.experiments.base import Figure, Findings, RunRecord
from bisls.experiments.drawing import curve
from bisls.experiments.judging import claim, yes
from bisls.experiments.sweep import outcome_of
from bisls.outcome import Judgement, Outcome, Panel, Pictures
from bisls.record import History
from bisls.report.files import ReportError, read_outcomes
from bisls.report.plots import legend, panel_svg, save_panel, save_pictures

pytestmark = pytest.mark.slow  # `make quick` leaves it out

__all__ = ["forget"]  # a fixture for every test

LOST = {
    "no points": ((), ""),
    "no points, and lost": ((), "diverged"),
    "nothing that is finite": ((nan,) * 4, "diverged"),
    "one point, and lost": ((1.0,), "diverged"),
    "nothing but zeros": ((0.0,) * 4, ""),
}


def findings(name, values, error):
    """A figure whose runs have all come to the same."""
    plan, sent = Plan("smoke", 1), []
    asking = figure(name).ask(plan)
    wanted = next(asking)
    while True:
        # whatever curve is asked for
        made = [
            RunRecord(run.described(), defaultdict(lambda: values), defaultdict(lambda: nan), error) for run in wanted
        ]
        sent += made
        try:
            wanted = asking.send(made)
        except StopIteration as end:
            return outcome_of(figure(name), plan, end.value, sent)


@pytest.mark.parametrize("name", NAMES)
def test_a_figure_whose_runs_are_all_lost_is_judged_and_drawn(name):
    for values, error in LOST.values():
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            outcome = Outcome.from_json(findings(name, values, error).to_json())
            for panel in outcome.panels[:2]:
                assert "<svg" in panel_svg(panel, "a", "b")
                assert len(legend(panel, "a")) == len(panel.series)
        assert all(isinstance(verdict.judgement, Judgement) for verdict in outcome.verdicts)


def test_a_curve_without_points_is_a_curve():
    empty = RunRecord({}, {"loss": (), "k": ()}, {})
    assert (empty.first("loss"), empty.last("loss")) == (float("inf"), float("inf"))
    for smooth in (1, 5):
        assert curve("a", [empty, empty], "loss", smooth=smooth).y == ()
        assert curve("a", [], "loss", smooth=smooth).y == ()
    whole = RunRecord({}, {"loss": (2.0, nan, 4.0, nan), "k": (0.0, 1.0, 2.0, 3.0)}, {})
    assert curve("a", [whole, empty], "loss").x == (0.0, 1.0, 2.0, 3.0)
    lost = RunRecord({}, {"loss": (2.0, nan, nan, nan), "k": (0.0, 1.0, 2.0, 3.0)}, {})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert str(curve("a", [lost], "loss", smooth=2).y) == "(2.0, nan)"


def test_panels_and_pictures_without_anything_are_saved(tmp_path):
    for bars in (False, True):
        save_panel(Panel("none", "x", "y", (), "log", "log", bars=bars), tmp_path / "a", ("svg",))
    save_pictures(Pictures("none", (), ()), tmp_path / "b.png")
    assert (tmp_path / "b.png").stat().st_size > 0


def test_a_figure_that_cannot_be_judged_is_left_out_and_no_other(tmp_path):
    def divide(plan):
        records = yield [Made(0, 1.0)]
        return Findings((), (claim("", yes(records[0].numbers["end"] / 0 > 1), ""),), {})

    watcher = Quiet()
    outcomes = reproduce([Figure("bad", "", "", divide), TWO], Plan("smoke", 1), Store(tmp_path), watcher)
    assert [outcome.name for outcome in outcomes] == ["two"]
    (left,) = watcher.left_out
    assert left == ("bad", "its records can't be judged: ZeroDivisionError: float division by zero")


# --- files of other runs


def test_a_file_with_the_content_of_another_run_is_refused_by_name_and_made_again(tmp_path, caplog):
    store, one, two = Store(tmp_path), Made(0, 1.0), Made(0, 2.0)
    for config in (one, two):
        store.put(config, config.execute())
    Made.made.clear()
    shutil.copy(store.path(two), store.path(one))
    assert store.get(one) is None
    assert f"{store.path(one)} holds another run (of the name {two.key}): it is made again" in caplog.text
    watcher = Quiet()
    reproduce([ONE], Plan("smoke", 1), store, watcher)
    assert [run.value for run in Made.made] == [1.0]
    assert store.get(one).numbers["end"] == 1.0


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"value": 2.0}, "value is 2.0, not 1.0"),
        ({"seed": 7}, "seed is 7, not 0"),
        ({"kind": "other"}, "kind is 'other', not 'made'"),
        ({"more": 3}, "more is 3, not None"),
    ],
)
def test_a_file_of_an_earlier_version_is_known_by_its_configuration(tmp_path, caplog, change, said):
    store, config = Store(tmp_path), Made(0, 1.0)
    store.put(config, config.execute())
    raw = json.loads(store.path(config).read_text())
    assert raw.pop("key") == config.key
    store.path(config).write_text(json.dumps(raw))
    assert store.get(config) is not None
    del raw["config"]["value"]  # an option that it did not know, at its default
    store.path(config).write_text(json.dumps(raw))
    assert store.get(config) is not None
    store.path(config).write_text(json.dumps({**raw, "config": {**raw["config"], **change}}))
    assert store.get(config) is None
    assert said in caplog.text


@pytest.mark.parametrize("change", [{"facts": []}, {"error": None}, {"curves": {"loss": [[1.0]]}}, {"config": None}])
def test_a_file_that_was_changed_is_no_run(tmp_path, caplog, change):
    store, config = Store(tmp_path), Made(0, 1.0)
    store.put(config, config.execute())
    raw = json.loads(store.path(config).read_text())
    store.path(config).write_text(json.dumps({**raw, **change}))
    assert store.get(config) is None
    assert "it is made again" in caplog.text


@pytest.mark.parametrize("text", ["[" * 200_000, '{"a":' * 200_000, "\0" * 100, "[]"])
def test_a_file_that_holds_anything_is_no_run(tmp_path, caplog, text):
    store, config = Store(tmp_path), Made(0, 1.0)
    store.path(config).write_text(text)
    assert store.get(config) is None
    assert "it is made again" in caplog.text
    (tmp_path / "outcomes").mkdir()
    (tmp_path / "outcomes" / "a.json").write_text(text)
    with pytest.raises(ReportError, match=r"a\.json is not an outcome"):
        read_outcomes(tmp_path)
    (tmp_path / "log.jsonl").write_text(f"{text}\n\n")
    with pytest.raises(ValueError, match=r"`History\.load\(.*\)`: line 1 is not a record"):
        History.load(tmp_path / "log.jsonl")


def test_an_outcome_with_the_content_of_another_is_refused_by_name(tmp_path):
    (tmp_path / "outcomes").mkdir()
    text = Outcome("a", "A", "", "", "smoke", {}, (), ()).to_json()
    (tmp_path / "outcomes" / "b.json").write_text(text)
    result = invoke("report", str(tmp_path))
    assert result.exit_code == 2
    assert "b.json is not an outcome (ValueError: it is that of 'a', and has been copied or renamed)" in result.output


@pytest.mark.slow
def test_files_without_points_give_a_page_and_files_without_names_leave_their_figure_out(tmp_path):
    """The command, with all its run files emptied."""
    command = ["reproduce", "trajectories", "--scale", "smoke", "--jobs", "1", "--out", str(tmp_path)]
    assert invoke(*command).exit_code == 0

    def change(**more):
        for path in (tmp_path / "runs").glob("*.json"):
            raw = json.loads(path.read_text())
            more.setdefault("curves", {name: [] for name in raw["curves"]})
            path.write_text(json.dumps(raw | more))

    for error in ("", "diverged"):
        change(error=error)
        result = invoke(*command)
        assert result.exit_code == 0, result.output
        assert "0 runs made" in result.output
        assert "page:" in result.output
    change(curves={})
    result = invoke(*command)
    assert result.exit_code == 1
    assert isinstance(result.exception, SystemExit)
    assert "trajectories is left out: its records can't be judged: KeyError" in result.output


# --- names that look like markup

ODD = ["o[/b]", "[bold]", "[/]", "[red]o", "o[link=x]y", "a[b", "[[", "\\[x]", ":smile:"]


@pytest.mark.parametrize("name", ODD)
def test_a_folder_may_have_any_name(name, tmp_path, monkeypatch):
    monkeypatch.setattr(console, "chosen_figures", lambda names: [ONE])
    out = tmp_path / name
    result = invoke("reproduce", "--scale", "smoke", "--jobs", "1", "--out", str(out))
    assert result.exit_code == 0, result.output
    assert f"page: {out / 'report.html'}" in result.output
    again = invoke("report", str(out))
    assert again.exit_code == 0
    assert f"page: {out / 'report.html'}" in again.output
    (out / "outcomes" / "one.json").write_text("{")
    bad = invoke("report", str(out))
    assert bad.exit_code == 2
    assert str(out) in bad.output


@pytest.mark.parametrize("name", ODD)
def test_any_word_is_answered(name, tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "400")
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text("")
    (tmp_path / "paper" / name / "outcomes").mkdir(parents=True)
    text = Outcome("a", "A", "", "", "paper", {}, (), ()).to_json()
    (tmp_path / "paper" / name / "outcomes" / "a.json").write_text(text)
    for arguments in (
        ["reproduce", name],
        ["reproduce", "--scale", name],
        ["reproduce", "--backend", name],
        ["reproduce", "quadratics", "--scale", "smoke", "--out", str(tmp_path / name)],
        ["reproduce", "quadratics", "--scale", "smoke", "--out", str(tmp_path / name / "below")],
        ["reproduce", "quadratics", "--scale", "smoke", "--out", str(tmp_path / "paper" / name)],
        ["data", name],
        ["report", str(tmp_path / name)],
        ["report", str(tmp_path / "none" / name)],
        ["sensitivity", name],
        ["sensitivity", "--method", name],
        ["sensitivity", "--out", str(tmp_path / name / "below")],
        ["demo", "--steps", "1", "--out", str(tmp_path / name / "below")],
        ["bench", name],
        [name],
    ):
        result = invoke(*arguments)
        assert result.exit_code in (1, 2), (arguments, result.output)
        assert isinstance(result.exception, SystemExit), (arguments, result.exception)
        shown = next(word for word in arguments if name in word)
        said = result.output.replace("\n", "").replace("\\\\", "\\")  # some messages quote a backslash
        assert shown in said, (arguments, result.output)


def test_whatever_a_sweep_says_is_said_as_it_is(tmp_path):
    from io import StringIO

    from rich.console import Console

    out = StringIO()
    shown = console.Display(Console(file=out, width=200), 1, tmp_path)
    shown.failed(Made(0, 1.0), "OSError: [/b] [red]x")
    shown.dropped(Figure("f[/i]", "", "", lambda plan: None), "why [/]")
    shown.figure(Outcome("n[/]", "", "", "", "smoke", {}, (), ()))
    for text in ("[/b] [red]x", "f[/i] is left out: why [/]", "n[/]:"):
        assert text in out.getvalue()
