"""Logs of a run: a line of JSON a record, curves in TensorBoard. They see what other callbacks found, and end no run."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib import import_module
from math import isfinite
from pathlib import Path
from typing import Any, BinaryIO

from bisls._check import FOLDER, PATH, settled
from bisls._files import write_whole
from bisls.hooks import Callback, FitState
from bisls.ranks import rank
from bisls.record import History, Record

logger = logging.getLogger(__name__)


class Log(Callback):
    """A callback that writes down what it sees. It is called after all others, and the first rank alone writes.

    Where it can't be written when a run begins that is a ValueError, since nothing is lost yet. Later, and where a run is
    resumed, a failure (a full disk, a folder that went away) is a warning in the log of Python, once, and the run goes on.

    Args:
        path: The file or the folder.
    """

    late = True

    def __init__(self, path: str | os.PathLike[str]):
        self._call = f"{type(self).__name__}({str(path)!r})"
        self._warned = False

    def start(self, state: FitState) -> None:
        """Open it, at the place where the run is."""
        if rank() != 0:
            return
        self._warned = False
        try:
            self._open(state)
        except OSError as error:
            if not len(state.history):
                raise ValueError(f"`{self._call}`: this can't be written ({error}); give another path") from error
            self._warn(error)

    def step(self, record: Record, state: FitState) -> None:
        """Write a record, with what was evaluated in its iteration."""
        self._try(self._add, record, state.history)

    def end(self, history: History) -> None:
        """Close it."""
        self._try(self._close, history)

    def _open(self, state: FitState) -> None:
        raise NotImplementedError

    def _add(self, record: Record, history: History) -> None:
        raise NotImplementedError

    def _close(self, history: History) -> None:
        raise NotImplementedError

    def _try(self, write: Callable[..., None], *arguments: Any) -> None:
        try:
            write(*arguments)
        except Exception as error:  # whatever a log meets, the run is worth more
            self._warn(error)

    def _warn(self, error: Exception) -> None:
        if not self._warned:
            self._warned = True
            logger.warning(
                "`%s` could not be written (%s: %s); the run goes on", self._call, type(error).__name__, error
            )


class JSONLines(Log):
    """A line of JSON for each record, written as soon as it is known; `History.load` reads it.

    A run that is resumed takes the lines back to its checkpoint, so that none is doubled or lost. Lines of earlier iterations
    stay. Whatever the order of callbacks, a line has all evaluations of its iteration. The first rank alone writes. Lines that a
    full disk refuses are written later, together with those that follow; the run goes on meanwhile.

    Args:
        path: The file. Its folder is made if need be.
    """

    def __init__(self, path: str | os.PathLike[str]):
        settled("JSONLines", "path", path, PATH)
        super().__init__(path)
        self.path = Path(path)
        self._file: BinaryIO | Any = None
        self._last = self._end = 0  # where the last line begins, and where it ends
        self._waiting: list[bytes] = []  # lines that are not in the file yet

    def _open(self, state: FitState) -> None:
        known = state.history
        first = known.records[0].k if len(known) else state.k
        exists = self.path.exists()
        if exists and not self.path.is_file():  # to read a pipe would be to wait for ever
            raise ValueError(f"`{self._call}`: this is not a regular file; give another path")
        earlier = History.load(self.path) if exists else History()
        if any(record.k >= first for record in earlier) and not state.resumed:
            raise ValueError(
                f"`{self._call}`: the file has records from iteration {first} on, of another run; give another "
                "path, delete it, or pass fit(..., resume=True) to go on with that run"
            )
        kept = History((record for record in earlier if record.k < first), earlier.evaluations)
        write_whole(self.path, "".join(f"{line}\n" for line in (*kept.to_lines(), *known.to_lines())))
        # nothing is buffered, so that what failed once is not in the file later, beside its second try
        self._file = open(self.path, "r+b", buffering=0)  # noqa: SIM115 - closed at the end of the run
        self._last = self._end = self._file.seek(0, os.SEEK_END)
        self._waiting = []

    def _add(self, record: Record, history: History) -> None:
        if self._file is not None:
            self._waiting.append(_line(record, history))
            self._write()

    def _write(self) -> None:
        """Write all lines that wait. Where it fails the next try begins at the same place, and writes as much at least."""
        left = memoryview(b"".join(self._waiting))
        self._file.seek(self._end)
        while left:
            left = left[self._file.write(left) :]
        after = self._file.tell()
        self._last, self._end = after - len(self._waiting[-1]), after
        self._waiting = []

    def _close(self, history: History) -> None:
        """Close the file; where the run has stopped early the last line says why."""
        if self._file is None:
            return
        try:
            if history.stopped and (self._waiting or self._end > self._last):
                if not self._waiting:
                    self._end = self._last
                self._waiting[-1:] = [_line(history.records[-1], history, history.stopped)]
            if self._waiting:
                self._write()
                self._file.truncate()
        finally:
            if self._waiting:
                logger.warning("`%s` lacks the last %d records: history.save(path)", self._call, len(self._waiting))
            with suppress(OSError):
                self._file.close()
            self._file = None


def check_apart(callbacks: Sequence[Any], checkpoint: str | os.PathLike[str]) -> None:
    """Refuse a log and a checkpoint in one file: each would write over the other."""
    for own in callbacks:
        if isinstance(own, JSONLines) and os.path.realpath(own.path) == os.path.realpath(checkpoint):
            raise ValueError(
                f"`fit(checkpoint={os.fspath(checkpoint)!r}, callbacks=[JSONLines({str(own.path)!r})])`: the two are one file, "
                "and each would write over the other; give them two paths"
            )


def _line(record: Record, history: History, stopped: str = "") -> bytes:
    alone = History([record], [row for row in history.evaluations[-1:] if row["k"] == record.k])
    alone.stopped = stopped
    return f"{alone.to_lines()[0]}\n".encode()


class TensorBoard(Log):
    """Records and evaluations as curves in TensorBoard. Needs the extra ``bisls[tensorboard]``. The first rank alone writes.

    Whatever the order of callbacks, evaluations of an iteration are there too. Where the disk refuses the curves end, and the
    run goes on.

    Args:
        log_dir: The folder of the event files.
    """

    def __init__(self, log_dir: str | os.PathLike[str]):
        settled("TensorBoard", "log_dir", log_dir, FOLDER)
        try:
            self._writers = import_module("torch.utils.tensorboard")
        except ImportError as error:
            raise ImportError(
                f"`TensorBoard({str(log_dir)!r})` needs the package tensorboard: pip install 'bisls[tensorboard]'"
            ) from error
        super().__init__(log_dir)
        self.log_dir = str(log_dir)
        self._writer: Any = None

    def _open(self, state: FitState) -> None:
        """Open the event file; what a resumed run had written beyond its checkpoint is no longer shown."""
        self._writer = self._writers.SummaryWriter(self.log_dir, purge_step=state.k)

    def _add(self, record: Record, history: History) -> None:
        """Add a point to each curve."""
        if self._writer is None:
            return
        writer, self._writer = self._writer, None  # one that has failed is not asked again
        for name, value in record.to_dict().items():
            if isinstance(value, int | float) and name != "k" and isfinite(value):
                writer.add_scalar(f"bisls/{name}", value, record.k)
        for row in history.evaluations[-1:]:
            if row["k"] == record.k:
                for name, value in row.items():
                    if name != "k":
                        writer.add_scalar(f"evaluation/{name}", value, record.k)
        self._writer = writer

    def _close(self, history: History) -> None:
        writer, self._writer = self._writer, None
        if writer is not None:
            writer.close()
