"""Files that appear whole or not at all: what killed writers leave goes, what living ones write stays; links, long names."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

import bisls._files
from bisls._files import remove_unfinished, replacing, write_whole

WRITER = """
import sys
from bisls._files import replacing
with replacing(sys.argv[1]) as file:
    file.write(b"from another process")
    file.flush()
    print("writing", flush=True)
    sys.stdin.readline()
"""


def leftovers(folder):
    return sorted(path.name for path in Path(folder).glob(".*.tmp"))


def writer(path):
    """A process in the middle of a write."""
    process = subprocess.Popen(
        [sys.executable, "-c", WRITER, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(bisls._files.__file__).parents[1]), *sys.path])},
    )  # fmt: skip
    assert process.stdout.readline() == "writing\n"
    return process


@pytest.fixture(scope="module")
def slow_writer(tmp_path_factory):
    """One process for the tests that need another one, since starting it imports torch."""
    path = tmp_path_factory.mktemp("shared") / "run.pt"
    process = writer(path)
    yield path, process
    process.kill()
    process.communicate()


def test_another_live_write_stays_and_a_killed_one_goes(slow_writer):
    path, process = slow_writer
    mine = leftovers(path.parent)
    assert len(mine) == 1
    remove_unfinished(path)
    write_whole(path, "from here")
    assert leftovers(path.parent) == mine
    process.kill()
    process.wait()
    assert leftovers(path.parent) == mine
    write_whole(path, "again")
    assert leftovers(path.parent) == []
    assert path.read_text() == "again"


def test_two_threads_that_write_one_file_do_not_disturb_each_other(tmp_path):
    errors = []

    def write(who):
        try:
            for i in range(20):
                write_whole(tmp_path / "a", f"{who} {i}" * 100)
        except OSError as error:
            errors.append(error)

    threads = [threading.Thread(target=write, args=(who,)) for who in "bcde"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert os.listdir(tmp_path) == ["a"]
    assert len((tmp_path / "a").read_text()) in (300, 400)


def test_one_who_sweeps_between_making_and_locking_only_makes_the_writer_begin_again(tmp_path, monkeypatch):
    fcntl = pytest.importorskip("fcntl")
    lock, swept = fcntl.flock, []

    def late(file, how):
        if not swept and how == fcntl.LOCK_EX:
            swept.extend(leftovers(tmp_path))
            remove_unfinished(tmp_path / "a")
        lock(file, how)

    monkeypatch.setattr(fcntl, "flock", late)
    write_whole(tmp_path / "a", "whole")
    assert len(swept) == 1
    assert (tmp_path / "a").read_text() == "whole"
    assert os.listdir(tmp_path) == ["a"]


def test_a_file_system_without_locks_will_do(tmp_path, monkeypatch):
    fcntl = pytest.importorskip("fcntl")

    def none(file, how):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", none)
    (tmp_path / ".a.77-abc.tmp").write_text("perhaps somebody writes it")
    write_whole(tmp_path / "a", "whole")
    assert (tmp_path / "a").read_text() == "whole"
    assert leftovers(tmp_path) == [".a.77-abc.tmp"]


def test_leftovers_of_a_longer_name_are_not_those_of_a_shorter_one(tmp_path):
    for name in (".a.pt.77-abc.tmp", ".a.pt.old.77-abc.tmp", ".a.pt.notes.tmp"):
        (tmp_path / name).write_text("")
    remove_unfinished(tmp_path / "a.pt")
    assert leftovers(tmp_path) == [".a.pt.notes.tmp", ".a.pt.old.77-abc.tmp"]


def test_a_long_name_has_room_for_its_temporary_one(tmp_path):
    path = tmp_path / ("é" * 125 + ".pt")  # 253 of 255 bytes

    def killed():
        with replacing(path):
            assert len(leftovers(tmp_path)) == 1
            os.rename(tmp_path / leftovers(tmp_path)[0], tmp_path / "kept")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        killed()
    write_whole(path, "whole")
    assert path.read_text() == "whole"


def test_links_stay_links(tmp_path):
    (tmp_path / "disk").mkdir()
    (tmp_path / "folder").symlink_to(tmp_path / "disk")
    (tmp_path / "deep").symlink_to(Path("folder") / "new" / "run.pt")  # neither the folder nor the file is there yet
    for content in ("one", "two"):
        write_whole(tmp_path / "deep", content)
        assert (tmp_path / "disk" / "new" / "run.pt").read_text() == content
    assert (tmp_path / "deep").is_symlink()
    assert (tmp_path / "folder").is_symlink()


def test_a_circle_of_links_is_refused_and_stays(tmp_path):
    (tmp_path / "a").symlink_to(tmp_path / "b")
    (tmp_path / "b").symlink_to(tmp_path / "a")
    with pytest.raises(OSError, match="symbolic links"):
        write_whole(tmp_path / "a", "content")
    assert (tmp_path / "a").is_symlink()
    assert sorted(os.listdir(tmp_path)) == ["a", "b"]
