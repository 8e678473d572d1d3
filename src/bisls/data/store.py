"""Files found, verified, downloaded. Nothing is used before its checksum was seen to be right."""

from __future__ import annotations

import bz2
import errno
import gzip
import hashlib
import logging
import os
import zlib
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from http.client import HTTPException
from pathlib import Path
from typing import Any, NamedTuple
from urllib.error import HTTPError, URLError
from zipfile import BadZipFile

from bisls._files import replacing
from bisls.data.errors import DataError, Unusable
from bisls.data.sources import Dataset, File, Source, Stream
from bisls.progress import Progress, Transfer

logger = logging.getLogger(__name__)

UNPACK: dict[str, Callable[[bytes], bytes]] = {"": bytes, ".gz": gzip.decompress, ".bz2": bz2.decompress}
# what reading from a server, an archive or a packed file may raise
BROKEN = (OSError, EOFError, ValueError, zlib.error, HTTPException, BadZipFile)
BLOCK = 1 << 18


class Held(NamedTuple):
    """A file that is there, and its plain contents, whose checksum is right."""

    path: Path
    contents: bytes


def own_folder() -> Path | None:
    """The folder that the user named in BISLS_DATA, if any."""
    named = os.environ.get("BISLS_DATA")
    if not named:
        return None
    folder = Path(named).expanduser()
    if not folder.is_dir():
        raise DataError(f"BISLS_DATA={named} is not a folder: create it, or unset the variable")
    return folder


def cache_folder() -> Path:
    """Where downloads go: BISLS_CACHE, or the user's folder for caches."""
    named = os.environ.get("BISLS_CACHE")
    if named:
        return Path(named).expanduser()
    try:
        from platformdirs import user_cache_path
    except ImportError as error:
        raise ImportError(
            "finding the folder for caches needs platformdirs: pip install 'bisls[cli]', or set BISLS_CACHE to a folder"
        ) from error
    return user_cache_path("bisls", appauthor=False)


def find(dataset: Dataset) -> dict[File, Held]:
    """Those files of a data set that are here already: in BISLS_DATA, in the cache, in a folder of the system.

    Raises:
        DataError: A file in BISLS_DATA is not what its name says.
    """
    found: dict[File, Held] = {}
    own = own_folder()
    for file in dataset.files:
        for path in _candidates(own, dataset, file) if own else ():
            try:
                found[file] = Held(path, _checked(file, path, path.name.removeprefix(file.name)))
            except Unusable as fault:
                raise DataError(
                    f"{path} is not the {file.name} of {dataset.name}: {fault}. It was left as it is: put the right file "
                    f"in its place, or move it out of BISLS_DATA and run `bisls data {dataset.name}` to download it"
                ) from None
            break
    for file in [file for file in dataset.files if file not in found]:
        paths = list(_candidates(cache_folder(), dataset, file))
        paths += [path for system in dataset.systems for path in _forms(system.folder, file)]
        for path in paths:
            try:
                found[file] = Held(path, _checked(file, path, path.name.removeprefix(file.name)))
                break
            except Unusable as fault:
                logger.warning("%s is not used: %s", path, fault)
    return found


def obtain(dataset: Dataset, console: Any = None) -> list[Held]:
    """All files of a data set, in order; what is not here is downloaded into the cache.

    Raises:
        DataError: A file in BISLS_DATA is wrong, no source has what is missing, or the cache cannot be written.
    """
    held = find(dataset)
    missing = [file for file in dataset.files if file not in held]
    if missing:
        held |= _download(dataset, missing, console)
    return [held[file] for file in dataset.files]


def _candidates(root: Path, dataset: Dataset, file: File) -> Iterator[Path]:
    for folder in dataset.folders:
        yield from _forms(root / folder, file)


def _forms(folder: Path, file: File) -> Iterator[Path]:
    """The file in this folder, plain or packed, as far as it is there."""
    for suffix in UNPACK:
        path = folder / f"{file.name}{suffix}"
        if os.path.isfile(path):  # unlike Path.is_file it takes a folder that may not be entered for an empty one
            yield path


def _checked(file: File, path: Path, suffix: str) -> bytes:
    """The plain contents of a file; Unusable says what is wrong with it."""
    try:
        contents = UNPACK[suffix](path.read_bytes())
    except BROKEN as error:
        raise Unusable(f"it cannot be {'unpacked' if suffix else 'read'} ({_reason(error)})") from error
    kind, _, expected = file.checksum.partition(":")
    seen = hashlib.new(kind, contents, usedforsecurity=False).hexdigest()
    if seen != expected:
        raise Unusable(f"{kind} of its {'unpacked ' if suffix else ''}contents is {seen}, expected {expected}")
    return contents


def _download(dataset: Dataset, missing: list[File], console: Any) -> dict[File, Held]:
    got: dict[File, Held] = {}
    # a system's folder that has all files was found before
    failures = [f"{system.folder}: not there, or not complete ({system.install})" for system in dataset.systems]
    failures += [dataset.note] if dataset.note else []
    with Transfer(console) as bar:
        for source in dataset.sources:
            try:
                _take(dataset, source, [file for file in missing if file not in got], got, bar)
                return got
            except (Unusable, *BROKEN) as error:
                failures.append(f"{source.name}: {_reason(error)}")
                if source is not dataset.sources[-1]:
                    logger.warning("%s, trying the next source; %s", dataset.name, failures[-1])
    lines = [f"{dataset.name} could not be downloaded:", *(f"  {failure}" for failure in failures)]
    lines += _by_hand(dataset, [file.name for file in missing if file not in got])
    raise DataError("\n".join(lines))


def _by_hand(dataset: Dataset, names: list[str]) -> list[str]:
    """Where to put which file."""
    folder = dataset.folders[0]
    own = own_folder()
    more = " and so on" if names[1:] else ""
    return [
        "Without a network, get the files elsewhere and put them here (plain, .gz or .bz2):",
        *(f"  {cache_folder() / folder / name}" for name in names),
        f"or into the folder of BISLS_DATA, as {own / folder / names[0]}{more}."
        if own
        else f"or into a folder of your own, as {Path('FOLDER', folder, names[0])}{more}, and set BISLS_DATA=FOLDER.",
    ]


def _take(dataset: Dataset, source: Source, files: list[File], got: dict[File, Held], bar: Progress) -> None:
    """All of the files from one source; those that came before it fails are kept in `got`."""
    bar.begin(f"{dataset.name} from {source.name}", None)
    with closing(source.streams(files)) as streams:
        for stream in streams:
            bar.begin(stream.file.name, stream.total)
            got[stream.file] = _save(dataset, stream, bar)


def _save(dataset: Dataset, stream: Stream, bar: Progress) -> Held:
    """Write a file under a name of its own, verify it, and only then give it its final name, in one stroke.

    Several processes may do this at the same time: each has its own temporary file, and the last one wins with the same bytes.
    """
    folder = cache_folder() / dataset.folders[0]
    final = folder / f"{stream.file.name}{stream.suffix}"
    try:
        with replacing(final) as out:
            size = 0
            for block in _blocks(stream):
                out.write(block)
                bar.advance(by=len(block))
                size += len(block)
            if stream.total is not None and size != stream.total:
                raise Unusable(f"{final.name} ended after {size} of {stream.total} bytes")
            out.flush()
            try:
                contents = _checked(stream.file, Path(out.name), stream.suffix)
            except Unusable as fault:
                raise Unusable(f"{final.name} is not the right file: {fault}") from None
    except OSError as error:  # not the source's: its own are Unusable
        raise DataError(_unwritable(folder, error)) from error
    for other in _candidates(cache_folder(), dataset, stream.file):
        if other != final:  # it was not right, or there would have been nothing to download
            with suppress(OSError):
                other.unlink()
    return Held(final, contents)


def _blocks(stream: Stream) -> Iterator[bytes]:
    try:
        while block := stream.body.read(BLOCK):
            yield block
    except BROKEN as error:
        raise Unusable(f"{stream.file.name}{stream.suffix} broke off ({_reason(error)})") from error


def _unwritable(folder: Path, error: OSError) -> str:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return f"no space left in {folder}: make room, or set BISLS_CACHE to a folder on another disk"
    return (
        f"cannot write to {folder} ({error.strerror or error}): set BISLS_CACHE to a folder that can be written, "
        "or put the files into a folder of your own and set BISLS_DATA to it"
    )


def _reason(error: BaseException) -> str:
    """What went wrong, on one line."""
    if isinstance(error, HTTPError):
        return f"HTTP {error.code} {error.reason}"
    if isinstance(error, URLError):
        return _reason(error.reason) if isinstance(error.reason, BaseException) else str(error.reason)
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return " ".join(str(error).split()) or type(error).__name__
