"""Data sets by name: where they are, fetched, loaded."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any, Literal, overload

from bisls._check import require_argument
from bisls.data import store
from bisls.data.formats import Drawings, Images, Table
from bisls.data.sources import DATASETS, Dataset


@overload
def load(name: Literal["mnist", "fashion-mnist"]) -> Images: ...
@overload
def load(name: Literal["w8a", "a9a", "mushrooms"]) -> Table: ...
@overload
def load(name: Literal["omniglot"]) -> Drawings: ...
@overload
def load(name: str) -> Any: ...  # one or the other: the caller knows which
def load(name: str) -> Images | Table | Drawings:
    """A data set as arrays; it is downloaded if it is not here, verified, and kept for the next call.

    Args:
        name: One of `DATASETS`: mnist, fashion-mnist (`Images`), w8a, a9a, mushrooms (`Table`), omniglot (`Drawings`).

    Raises:
        DataError: It cannot be had, or a file is not what it should be; the message says what to do.
        ImportError: A package is missing; the message says which.
        ValueError: There is no such data set.
    """
    return _read(_known("load", name))


def fetch(name: str, console: Any = None) -> list[Path]:
    """The verified files of a data set, downloaded into the cache unless they are here.

    Args:
        name: One of `DATASETS`.
        console: The `rich.console.Console` that shows progress; standard error if None. Only a terminal shows any.

    Raises:
        DataError: It cannot be had; the message lists each source with its failure and says where to put the files.
    """
    return [held.path for held in store.obtain(_known("fetch", name), console)]


def where(name: str) -> list[Path] | None:
    """The verified files of a data set if all of them are here, else None. Nothing is downloaded.

    Args:
        name: One of `DATASETS`.

    Raises:
        DataError: A file in the folder of BISLS_DATA is not what its name says.
    """
    dataset = _known("where", name)
    held = store.find(dataset)
    return [held[file].path for file in dataset.files] if len(held) == len(dataset.files) else None


def _known(call: str, name: str) -> Dataset:
    require_argument(
        call, "name", name, isinstance(name, str) and name in DATASETS, f"must be one of {', '.join(DATASETS)}"
    )
    return DATASETS[name]


@cache
def _read(dataset: Dataset) -> Images | Table | Drawings:
    names = [file.name for file in dataset.files]
    return dataset.format.read(names, [held.contents for held in store.obtain(dataset)])
