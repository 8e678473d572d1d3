"""The file of a checkpoint: what it holds, and how it is written and read so that damage and code have no chance."""

from __future__ import annotations

import os
import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, BinaryIO

import numpy as np
import torch
from torch import Tensor

from bisls._files import replacing

FORMAT = 2  # 1: the memories of rules had no names
# what a file of this format holds, and what it holds for each rank
_CONTENT: dict[str, type] = {
    "problem": dict,
    "composition": str,
    "world": int,
    "k": int,
    "start": int,
    "x": Tensor,
    "y": Tensor,
    "records": str,
    "evaluations": str,
    "ranks": list,
}
_PART: dict[str, type] = {
    "solver": dict,
    "feeds": dict,
    "random": dict,
    "buffers": list,
    "callbacks": dict,
    "extra": dict,
    "still": dict,
}


class CheckpointError(ValueError):
    """A checkpoint cannot be used here: the message says what differs and what to do. Nothing was loaded."""


def write_file(path: str | os.PathLike[str], content: Mapping[str, Any]) -> None:
    """Write the file; a kill at any moment leaves the old one or the new one."""
    try:
        with replacing(path) as file, _checksums():
            torch.save(content, file)
    except RuntimeError as failure:  # torch has an error of its own for what a full disk says
        if isinstance(failure.__context__, OSError):
            raise failure.__context__ from None
        raise


def read_file(path: str | os.PathLike[str], device: torch.device) -> dict[str, Any]:
    """What a file holds; all of it is there, undamaged, and of the right kind.

    Args:
        path: The file.
        device: Where tensors go that did not lie on the CPU.

    Raises:
        CheckpointError: It cannot be read, is damaged, or of another format.
    """
    name = str(path)
    try:
        file = open(path, "rb")  # noqa: SIM115 - what fails from here on is the content
    except OSError as failure:
        raise CheckpointError(
            f"checkpoint {name!r}: cannot be opened ({failure}); make it readable, or give another path"
        ) from failure
    try:
        with file:
            _undamaged(file)
            content: dict[str, Any] = torch.load(file, weights_only=True, map_location=_to(device))
        found = content["format"]
        if found == FORMAT:
            _complete(content, _CONTENT, "it")
            for part in content["ranks"]:
                _complete(part, _PART, "a rank")
    except Exception as failure:
        reason = str(failure).strip().split("\n")[0]
        raise CheckpointError(
            f"checkpoint {name!r}: not a whole checkpoint of bisls ({type(failure).__name__}: {reason}); put back a copy "
            "of it, or delete it to start from the beginning"
        ) from failure
    if found != FORMAT:
        raise CheckpointError(
            f"checkpoint {name!r}: its format is {found!r}, this version of bisls reads {FORMAT}; resume with the version "
            f"that wrote it ({content.get('versions')}), or delete it to start from the beginning"
        )
    return content


@contextmanager
def _checksums() -> Iterator[None]:
    """Within this context torch writes checksums, also where somebody has turned them off to save time."""
    get, put = (getattr(torch.serialization, f"{name}_crc32_options", None) for name in ("get", "set"))
    if get is None or put is None:  # torch before 2.6 always writes them
        yield
        return
    before = get()
    put(True)
    try:
        yield
    finally:
        put(before)


def _undamaged(file: BinaryIO) -> None:
    """Compare the checksums, which torch itself does not: a flipped bit would be loaded as another number.

    It also keeps the older formats that `torch.load` knows away from it.
    """
    with zipfile.ZipFile(file) as archive:
        damaged = archive.testzip()
    if damaged is not None:
        raise ValueError(f"the checksum of its part {damaged!r} is wrong, the file was damaged")
    file.seek(0)


def _complete(content: Any, wanted: Mapping[str, type], what: str) -> None:
    lacks = sorted(name for name, kind in wanted.items() if not isinstance(content.get(name), kind))
    if lacks:
        raise ValueError(f"{what} lacks {', '.join(lacks)}")


def plain(value: Any, where: str) -> Any:
    """A copy of a nested state that ``torch.load(weights_only=True)`` can read.

    Raises:
        ValueError: It holds something else; the message names the place.
    """
    if value is None or isinstance(value, bool | np.bool_):
        return None if value is None else bool(value)
    for kind in (int, float, str):
        if isinstance(value, kind):  # also the scalars of numpy and enumerations that are numbers
            return kind(value)
    if isinstance(value, np.integer | np.floating):
        return value.item()
    if isinstance(value, Tensor):
        value = value.detach()
        whole = value.untyped_storage().nbytes() == value.numel() * value.element_size()
        return value if whole else value.clone()  # a slice would be saved with all that it is a slice of
    if isinstance(value, torch.Size | torch.dtype):
        return value
    if isinstance(value, Mapping):
        return {plain(name, where): plain(entry, f"{where}[{name!r}]") for name, entry in value.items()}
    if isinstance(value, list | tuple):
        entries = [plain(entry, f"{where}[{i}]") for i, entry in enumerate(value)]
        return entries if isinstance(value, list) else tuple(entries)
    raise ValueError(
        f"the checkpoint cannot hold {where}, which is a {type(value).__name__}; a state_dict() may hold numbers, strings, None, "
        "tensors, and lists, tuples and dicts of these"
    )


def shared(value: Any, first: Any) -> Any:
    """Tensors that are the same on the first rank as the very same objects, so that the file holds them once."""
    if isinstance(value, Tensor):
        same = isinstance(first, Tensor) and first.dtype == value.dtype and first.device == value.device
        return first if same and torch.equal(first, value) else value
    if isinstance(value, dict) and isinstance(first, dict):
        return {name: shared(entry, first.get(name)) for name, entry in value.items()}
    if isinstance(value, list | tuple) and isinstance(first, list | tuple) and len(value) == len(first):
        return type(value)(shared(entry, other) for entry, other in zip(value, first, strict=True))
    return value


def _to(device: torch.device) -> Callable[[Any, str], Any]:
    """What lay on the CPU stays there, all else goes where the parameters are now."""
    return lambda storage, location: storage if location.startswith("cpu") else storage.to(device=device)
