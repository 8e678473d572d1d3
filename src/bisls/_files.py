"""Files that appear whole or not at all."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from hashlib import sha256
from importlib import import_module
from pathlib import Path
from secrets import token_hex
from typing import Any, BinaryIO

_fcntl: Any = import_module("fcntl") if os.name == "posix" else None


@contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[BinaryIO]:
    """A file to write to, which takes the place of ``path`` when the block ends, and is thrown away where it raises.

    Nobody ever reads a part of it, and a kill or a full disk leaves the old file. A symbolic link stays one: what it points to
    is replaced. An old file's permissions are kept; a new one has those that the user's umask gives. A pipe or a device is
    written to as it is. What killed writes of the same file have left is removed first; see `remove_unfinished`.

    Args:
        path: The file. Its folder is made if need be.
    """
    final = _final(path)
    if final.exists() and not final.is_file():
        with open(final, "wb") as pipe:
            yield pipe
        return
    _folder(final)
    remove_unfinished(final)
    temporary, out = _begin(final)
    with out:
        try:
            yield out
            out.flush()
            os.fsync(out.fileno())
            if _fcntl is None:  # Windows does not move what is open
                out.close()
            with suppress(FileNotFoundError):
                os.chmod(temporary, final.stat().st_mode & 0o7777)
            os.replace(temporary, final)  # locked until it has its name
        except BaseException:
            with suppress(OSError):
                if _fcntl is None:
                    out.close()
                temporary.unlink()
            raise
    if os.name == "posix":  # the new name must be on the disk too
        folder = os.open(final.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def write_whole(path: str | os.PathLike[str], content: bytes | str) -> None:
    """Write a file that appears whole or not at all; see `replacing`."""
    with replacing(path) as file:
        file.write(content.encode() if isinstance(content, str) else content)


def try_to_write(path: str | os.PathLike[str]) -> None:
    """Find out whether `replacing` will do: make the folder, and write a file beside the final place that goes away again.

    Args:
        path: The file. It is not touched.

    Raises:
        OSError: It can't be written; a ValueError where a path can't be that at all.
    """
    final = _final(path)
    if final.is_dir():
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    _folder(final)
    with suppress(FileNotFoundError):
        os.stat(final)  # refused for a name that is too long, where the temporary one is not
    remove_unfinished(final)
    temporary, out = _begin(final)
    try:
        with out:
            out.write(b"bisls")
            out.flush()
            os.fsync(out.fileno())
    finally:
        with suppress(OSError):
            temporary.unlink()


def remove_unfinished(path: str | os.PathLike[str]) -> None:
    """Remove what killed writes of this file have left.

    Somebody who is alive and writes the same file keeps what is written: it is locked, and only what can be locked is removed.
    """
    final = _final(path)
    ours = re.compile(rf"\.{re.escape(_stem(final))}\.\d+(-[0-9a-f]+)?\.tmp")
    with suppress(OSError):
        for name in os.listdir(final.parent):
            if ours.fullmatch(name):
                _remove(final.parent / name)


def _remove(left: Path) -> None:
    with suppress(OSError):
        if _fcntl is None:  # what is open can't be removed there
            left.unlink()
            return
        with left.open("r+b") as file:
            _fcntl.flock(file, _fcntl.LOCK_EX | _fcntl.LOCK_NB)
            left.unlink()


def _folder(final: Path) -> None:
    try:
        final.parent.mkdir(parents=True, exist_ok=True)
    except FileExistsError as error:  # a file where a folder has to be
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), error.filename) from None


def _begin(final: Path) -> tuple[Path, BinaryIO]:
    """A new file beside the final place, locked until it is closed, so that nobody takes it for one of a killed process."""
    while True:
        # a name of its own for each write: several processes may write the same file at the same time
        temporary = final.with_name(f".{_stem(final)}.{os.getpid()}-{token_hex(4)}.tmp")
        out = temporary.open("xb")
        if _fcntl is None:
            return temporary, out
        with suppress(OSError):  # a file system without locks
            _fcntl.flock(out, _fcntl.LOCK_EX)
        try:
            mine = os.path.samestat(temporary.stat(), os.fstat(out.fileno()))
        except FileNotFoundError:
            mine = False
        if mine:
            return temporary, out
        out.close()  # somebody removed it before it was locked


def _stem(final: Path) -> str:
    """What temporary names are made of: the file's name, or a short one for it where there would be no room for more."""
    name = os.fsencode(final.name)
    return final.name if len(name) <= 200 else sha256(name).hexdigest()[:32]


def _final(path: str | os.PathLike[str]) -> Path:
    """Where symbolic links lead, whether there is a file yet or not."""
    final = Path(os.path.realpath(path))
    if final.is_symlink():
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(path))
    return final
