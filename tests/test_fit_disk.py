"""Disks that refuse, and logs: found at the start, survived later; whatever the order of callbacks, a log has all of it."""

from __future__ import annotations

import errno
import itertools
import json
import os
import signal
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from test_fit import KINDS, outcome, solver, table

from bisls._files import replacing
from bisls.callbacks import Callback, EarlyStopping, Evaluate, JSONLines, TensorBoard
from bisls.checkpoint import Checkpoint, Run
from bisls.fit import Interrupted, fit
from bisls.progress import Progress
from bisls.record import History

resource = pytest.importorskip("resource")  # a limit on file sizes is a disk that is full


class FullDisk(Callback):
    """No file can become larger than so many bytes from one iteration on, and can again after another."""

    def __init__(self, size, first=1, last=10**9):
        self.size, self.first, self.last = size, first, last

    def step(self, record, state):
        _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        size = self.size() if callable(self.size) else self.size
        if record.k == self.first:
            resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
        if record.k == self.last:
            resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))


@pytest.fixture(autouse=True)
def unlimited():
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


def go(steps=6, callbacks=(), **options):
    torch.manual_seed(3)
    made = solver()
    history = fit(made, KINDS["loader"](), table(), steps, False, callbacks, **options)
    return made, history


# --- found at the start


def in_a_file(folder):
    (folder / "file").write_text("")
    return folder / "file" / "run.pt"


def a_folder(folder):
    return folder


def circle(folder):
    (folder / "run.pt").symlink_to(folder / "run.pt")
    return folder / "run.pt"


def into_a_file(folder):
    (folder / "run.pt").symlink_to(in_a_file(folder))
    return folder / "run.pt"


BAD = {
    "in a file": (in_a_file, "Not a directory"),
    "in /proc": (lambda folder: "/proc/none/run.pt", "No such file or directory"),
    "a file of /proc": (lambda folder: "/proc/version/run.pt", "Not a directory"),
    "a folder": (a_folder, "this is a folder; name a file in it"),
    "a device": (lambda folder: "/dev/null", "not a regular file"),
    "too long": (lambda folder: folder / ("x" * 256), "File name too long"),
    "too deep": (lambda folder: folder / "/".join(["x" * 200] * 30), "File name too long"),
    "a circle of links": (circle, "symbolic links"),
    "a link into a file": (into_a_file, "Not a directory"),
    "empty": (lambda folder: "", "must name a file"),
    "the name of a folder": (lambda folder: f"{folder}/runs/", "must name a file; this ends as a folder does"),
    "a NUL": (lambda folder: "run\0.pt", "must name a file"),
}


@pytest.mark.parametrize("resume", [False, True])
@pytest.mark.parametrize("how", BAD)
def test_a_path_that_cannot_be_is_said_before_the_first_iteration(how, resume, tmp_path):
    make, reason = BAD[how]
    path, made, seen = make(tmp_path), solver(), []
    with pytest.raises(ValueError, match=r"`fit\(checkpoint=") as caught:
        fit(made, table(), table(), 4, False, [lambda *_: seen.append(1)], path, resume)
    assert reason in str(caught.value)
    assert made.k == 0
    assert seen == []


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS, errno.EACCES, errno.EDQUOT, errno.EIO])
def test_a_disk_that_refuses_is_said_before_the_first_iteration(number, tmp_path, monkeypatch):
    def refuse(*_):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "fsync", refuse)
    made = solver()
    with pytest.raises(ValueError, match=r"`fit\(checkpoint=.*run.pt'\)`: this can't be written") as caught:
        fit(made, table(), table(), 4, False, checkpoint=Checkpoint(tmp_path / "run.pt"))
    assert os.strerror(number) in str(caught.value)
    assert made.k == 0
    assert os.listdir(tmp_path) == []


@pytest.mark.skipif(os.geteuid() == 0, reason="nothing is forbidden to root")
def test_a_folder_without_permission_is_said_before_the_first_iteration(tmp_path):
    (tmp_path / "closed").mkdir(mode=0o500)
    with pytest.raises(ValueError, match=r"`fit\(checkpoint=.*Permission denied"):
        fit(solver(), table(), table(), 4, False, checkpoint=tmp_path / "closed" / "run.pt")


def test_a_state_that_no_file_can_hold_is_said_before_the_first_iteration(tmp_path):
    class Odd(Callback):
        def start(self, state):
            self.when = object()

        def state_dict(self):
            return {"when": self.when}

        def load_state_dict(self, state):
            pass

    made = solver()
    with pytest.raises(ValueError, match=r"cannot hold state\['callbacks'\]\['Odd 1'\]\['when'\]"):
        fit(made, table(), table(), 4, False, [Odd()], tmp_path / "run.pt")
    assert made.k == 0


def test_a_try_leaves_nothing_and_touches_nothing(tmp_path):
    go(2, checkpoint=tmp_path / "new" / "folder" / "run.pt")
    before = (tmp_path / "new" / "folder" / "run.pt").stat()
    made = solver()
    run = Run(made, {}, History())
    with pytest.raises(ValueError, match="the file exists"):
        Checkpoint(tmp_path / "new" / "folder" / "run.pt").begin(run, False)
    assert os.listdir(tmp_path / "new" / "folder") == ["run.pt"]
    after = (tmp_path / "new" / "folder" / "run.pt").stat()
    assert (before.st_ino, before.st_mtime_ns) == (after.st_ino, after.st_mtime_ns)


def test_the_write_of_another_run_that_lives_is_left_alone(tmp_path):
    path = tmp_path / "run.pt"
    go(2, checkpoint=path)
    with replacing(path) as other:  # somebody else, in the middle of a write
        other.write(b"of another run")
        (name,) = (own.name for own in tmp_path.glob(".*.tmp"))
        go(4, checkpoint=path, resume=True)
        assert (tmp_path / name).exists()
    assert path.read_bytes() == b"of another run"


@pytest.mark.parametrize("kind", ["file", "dangling", "folder"])
def test_links_are_followed_and_stay(kind, tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    path, target = tmp_path / "run.pt", disk / "a.pt"
    if kind == "folder":
        (tmp_path / "link").symlink_to(disk)
        path, target = tmp_path / "link" / "a.pt", disk / "a.pt"
    else:
        path.symlink_to(Path("disk") / "a.pt")
    if kind == "file":
        go(2, checkpoint=target)
    go(4, checkpoint=path, resume=True)
    go(6, [JSONLines(path.with_name("log"))], checkpoint=path, resume=True)
    link = path if kind != "folder" else tmp_path / "link"
    assert link.is_symlink()
    assert target.is_file()
    assert not target.is_symlink()
    assert len(go(6, checkpoint=target, resume=True)[1]) == 6


# --- survived later


def test_a_disk_that_is_full_for_a_while_changes_nothing_else(tmp_path, caplog):
    whole = outcome(*go())
    caplog.clear()
    path = tmp_path / "run.pt"
    made, history = go(callbacks=[FullDisk(3000, 1, 3)], checkpoint=Checkpoint(path, every=1))
    assert outcome(made, history)[:5] == whole[:5]
    assert caplog.text.count("could not be written: OSError: [Errno 27] File too large") == 1
    assert "k = 4: the checkpoint is written again, after 2 that could not be" in caplog.text
    assert history.unsaved == ""
    assert os.listdir(tmp_path) == ["run.pt"]
    assert outcome(*go(checkpoint=path, resume=True))[:3] == whole[:3]


def test_a_disk_that_stays_full_leaves_the_last_checkpoint_and_the_run_its_history(tmp_path, caplog):
    whole = outcome(*go())
    caplog.clear()
    path = tmp_path / "run.pt"
    made, history = go(callbacks=[FullDisk(3000, 2)], checkpoint=Checkpoint(path, every=2))
    assert outcome(made, history)[:5] == whole[:5]
    assert history.unsaved == f"the checkpoint {str(path)!r} could not be written: OSError: [Errno 27] File too large"
    assert history.stopped == ""
    assert [record.levelname for record in caplog.records] == ["WARNING", "ERROR"]
    assert "the run ends at k = 6 unsaved: " in caplog.records[1].getMessage()
    assert caplog.records[1].getMessage().endswith("the file is of k = 2")
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    assert outcome(*go(checkpoint=path, resume=True))[:3] == whole[:3]


def test_an_error_is_not_hidden_by_a_disk(tmp_path):
    def fail(record, state):
        if record.k == 3:
            raise ZeroDivisionError("in a callback")

    with pytest.raises(ZeroDivisionError, match="in a callback"):
        go(callbacks=[FullDisk(3000), fail], checkpoint=tmp_path / "run.pt")


@pytest.mark.parametrize(("every", "said"), [(2, "; go on from k = 2 with fit("), (50, "File too large")])
def test_an_interrupt_says_which_iteration_is_saved(every, said, tmp_path):
    def stop(record, state):
        if record.k == 4:
            os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(Interrupted) as caught:
        go(callbacks=[FullDisk(3000, 2), stop], checkpoint=Checkpoint(tmp_path / "run.pt", every=every))
    text = str(caught.value)
    assert said in text
    assert "could not be written" in text
    assert ("resume=True" in text) == (every == 2)
    assert len(caught.value.history) == 5


def test_a_refused_checkpoint_waits_its_time_like_any_other(tmp_path, monkeypatch):
    clock, tries = itertools.count(), []

    def refuse(self, run):
        tries.append(run.solver.k)
        raise OSError(errno.ENOSPC, "full")

    monkeypatch.setattr("bisls.saving.monotonic", lambda: next(clock))
    monkeypatch.setattr(Checkpoint, "save", refuse)
    go(20, checkpoint=Checkpoint(tmp_path / "run.pt", every=1000, seconds=5))
    assert len(tries) == 4 + 1  # by the clock, and at the end


# --- logs


def test_lines_that_a_full_disk_refuses_are_written_later(tmp_path, caplog):
    go(8, [JSONLines(tmp_path / "whole")])
    caplog.clear()
    path = tmp_path / "log"
    # room for a part of a line
    go(8, [JSONLines(path), FullDisk(lambda: path.stat().st_size + 100, 2, 5)])
    assert path.read_bytes() == (tmp_path / "whole").read_bytes()
    (said,) = caplog.records
    assert said.levelname == "WARNING"
    assert f"`JSONLines({str(path)!r})` could not be written (OSError: [Errno 27] File too large" in said.getMessage()


def test_a_log_that_stays_full_ends_no_run_and_can_be_read_and_resumed(tmp_path, caplog):
    go(8, [JSONLines(tmp_path / "whole")])
    path = tmp_path / "log"
    callbacks = [JSONLines(path), FullDisk(lambda: path.stat().st_size + 100, 2)]
    made, history = go(8, callbacks, checkpoint=Checkpoint(tmp_path / "run.pt", every=1))
    assert (made.k, len(history)) == (8, 8)
    assert sum("`JSONLines" in record.getMessage() for record in caplog.records) == 2
    assert f"`JSONLines({str(path)!r})` lacks the last 6 records: history.save(path)" in caplog.text
    assert History.load(path)["k"].tolist() == [0, 1]
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    go(8, [JSONLines(path)], checkpoint=tmp_path / "run.pt", resume=True)
    assert path.read_bytes() == (tmp_path / "whole").read_bytes()


def test_a_reason_to_stop_is_in_the_last_line_also_after_a_full_disk(tmp_path):
    path = tmp_path / "log"

    def enough(record, state):
        if record.k == 3:
            state.stop("enough")

    go(8, [JSONLines(path), FullDisk(lambda: path.stat().st_size + 100, 2), enough])
    assert History.load(path).stopped == ""
    path.unlink()
    disk = FullDisk(lambda: path.stat().st_size + 100, 2)

    class Freed(Callback):
        def end(self, history):
            resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))

    go(8, [JSONLines(path), disk, enough, Freed()])
    loaded = History.load(path)
    assert (len(loaded), loaded.stopped) == (4, "enough")


def test_a_log_that_cannot_be_is_said_before_the_first_iteration_and_warned_about_in_a_resumed_run(tmp_path, caplog):
    made = solver()
    with pytest.raises(ValueError, match=r"`JSONLines\('.*run.pt'\)`: this can't be written .*Not a directory"):
        fit(made, table(), table(), 4, False, [JSONLines(in_a_file(tmp_path))])
    assert made.k == 0
    with pytest.raises(ValueError, match=r"`JSONLines\('/dev/null'\)`: this is not a regular file"):
        go(2, [JSONLines("/dev/null")])
    with pytest.raises(ValueError, match=r"`JSONLines\(path='a\\x00b'\)`: path must name a file"):
        JSONLines("a\0b")
    go(2, checkpoint=tmp_path / "run.pt")
    _, history = go(4, [JSONLines(tmp_path / "file" / "log")], checkpoint=tmp_path / "run.pt", resume=True)
    assert len(history) == 4
    assert caplog.text.count("could not be written (NotADirectoryError") == 1


class Events:
    """A writer of events that may fail."""

    def __init__(self, broken=()):
        self.points, self.broken = [], broken

    def __call__(self, folder, purge_step):
        if "open" in self.broken:
            raise FileExistsError(errno.EEXIST, "File exists", folder)
        return self

    def add_scalar(self, name, value, k):
        if k in self.broken:
            raise OSError(errno.ENOSPC, "No space left on device")
        self.points.append((name, value, k))

    def close(self):
        if "close" in self.broken:
            raise OSError(errno.ENOSPC, "No space left on device")


def board(monkeypatch, *broken):
    events = Events(broken)
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", SimpleNamespace(SummaryWriter=events))
    return TensorBoard("logs"), events


@pytest.mark.parametrize("broken", [(2,), ("close",), (1, "close")])
def test_a_board_that_fails_ends_no_run(broken, monkeypatch, caplog):
    log, events = board(monkeypatch, *broken)
    assert len(go(4, [log])[1]) == 4
    (said,) = caplog.records
    assert (
        "`TensorBoard('logs')` could not be written (OSError: [Errno 28] No space left on device)" in said.getMessage()
    )
    assert {k for *_, k in events.points} == set(range(broken[0] if broken[0] != "close" else 4))


def test_a_board_that_cannot_be_is_said_before_the_first_iteration(monkeypatch):
    log, _ = board(monkeypatch, "open")
    with pytest.raises(ValueError, match=r"`TensorBoard\('logs'\)`: this can't be written .*File exists"):
        go(4, [log])


@pytest.mark.parametrize("error", [OSError(errno.EIO, "Input/output error"), ValueError("write to closed file")])
@pytest.mark.parametrize("when", ["start", "update", "reset", "stop"])
def test_a_terminal_that_goes_away_takes_the_bar_and_not_the_run(when, error, monkeypatch, caplog):
    class Bar:
        def add_task(self, text, total, completed):
            return 0

        def __getattr__(self, name):
            def act(*_, **__):
                if name == when:
                    raise error

            return act

    monkeypatch.setattr(Progress, "_rich_bar", lambda self, console: Bar())
    with Progress(True, 4) as bar:
        bar.reach(3, "three")
        bar.begin("again", 3)
        bar.advance("one")
    assert bar.done == 1
    assert caplog.text.count(f"the progress bar could not be drawn ({type(error).__name__}: {error})") == 1
    assert len(go(2)[1]) == 2


# --- the order of callbacks


def evaluations():
    return [Evaluate(lambda: {"half": 0.5}, every=2), Evaluate(lambda: 1.0, every=3, name="one")]


def own(record, state):
    """A plain function that evaluates, too."""
    if state.history.evaluations and state.history.evaluations[-1]["k"] == record.k:
        state.history.evaluations[-1]["own"] = 2.0


@pytest.mark.parametrize("order", list(itertools.permutations(range(4))))
def test_a_line_has_the_evaluations_of_its_iteration_in_any_order(order, tmp_path):
    callbacks = [JSONLines(tmp_path / "log"), *evaluations(), EarlyStopping(100)]
    _, history = go(5, [callbacks[i] for i in order])
    assert [row["k"] for row in history.evaluations] == [1, 2, 3, 4]
    loaded = History.load(tmp_path / "log")
    assert loaded.evaluations == history.evaluations
    lines = [json.loads(line) for line in (tmp_path / "log").read_text().splitlines()]
    assert [sorted(line.get("evaluations", {})) for line in lines] == [[], ["half"], ["one"], ["half"], ["half", "one"]]


def test_what_functions_add_is_logged_and_a_resumed_run_has_the_same_log(tmp_path):
    whole = tmp_path / "whole"
    go(6, [JSONLines(whole), *evaluations(), own])
    assert History.load(whole).evaluations[0] == {"k": 1, "half": 0.5, "own": 2.0}
    for cut in (1, 2, 3, 5):
        path, checkpoint = tmp_path / f"log {cut}", tmp_path / f"run {cut}.pt"
        go(cut, [JSONLines(path), *evaluations(), own], checkpoint=checkpoint)
        _, history = go(6, [JSONLines(path), *evaluations(), own], checkpoint=checkpoint, resume=True)
        loaded = History.load(path)
        assert loaded["k"].tolist() == list(range(6))
        assert loaded.evaluations == history.evaluations
        assert {row["k"] for row in history.evaluations} == {cut - 1, 1, 2, 3, 5}


def test_a_killed_run_has_the_same_log_when_it_is_resumed(tmp_path):
    class Killed(BaseException):
        pass

    def kill(record, state):
        if record.k == 4:
            raise Killed

    go(7, [JSONLines(tmp_path / "whole"), *evaluations()])
    path = tmp_path / "log"
    with pytest.raises(Killed):
        go(7, [JSONLines(path), *evaluations(), kill], checkpoint=Checkpoint(tmp_path / "run.pt", every=3))
    go(7, [JSONLines(path), *evaluations()], checkpoint=tmp_path / "run.pt", resume=True)
    assert path.read_text() == (tmp_path / "whole").read_text()


def test_a_board_has_the_evaluations_in_any_order(monkeypatch):
    log, events = board(monkeypatch)
    go(4, [log, *evaluations()])
    assert [(name, k) for name, _, k in events.points if name.startswith("evaluation/")] == [
        ("evaluation/half", 1),
        ("evaluation/one", 2),
        ("evaluation/half", 3),
        ("evaluation/one", 3),
    ]


def test_anything_can_be_called_last():
    calls = []

    class Last:
        late = True

        def start(self, state):
            calls.append("last")

        def step(self, record, state):
            calls.append(("last", len(state.history.evaluations)))

        def end(self, history):
            calls.append("last ends")

    class First(Callback):
        def start(self, state):
            calls.append("first")

        def end(self, history):
            calls.append("first ends")

    go(1, [Last(), First(), Evaluate(lambda: 1.0)])
    assert calls == ["first", "last", ("last", 1), "first ends", "last ends"]


def test_a_log_and_a_checkpoint_in_one_file_are_refused(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "run")
    for one, two in (("run", "run"), ("run", "link"), ("./x/../run", "run")):
        made, log = solver(), JSONLines(tmp_path / one)
        for checkpoint in (str(tmp_path / two), Checkpoint(tmp_path / two)):
            with pytest.raises(
                ValueError, match=r"`fit\(checkpoint=.*, callbacks=\[JSONLines\(.*\)\]\)`: the two are one file"
            ):
                fit(made, table(), table(), 4, False, [log], checkpoint)
        assert made.k == 0
    assert not (tmp_path / "run").exists()


def test_a_folder_of_curves_may_end_as_one(monkeypatch):
    with pytest.raises(
        ValueError, match=r"`JSONLines\(path='runs/'\)`: path must name a file; this ends as a folder does"
    ):
        JSONLines("runs/")
    with pytest.raises(ValueError, match=r"`Checkpoint\(path='runs/'\)`: path must name a file"):
        Checkpoint("runs/")
    pytest.importorskip("tensorboard")
    assert TensorBoard("runs/").log_dir == "runs/"
