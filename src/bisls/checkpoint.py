"""Checkpoint: the whole state of a run in one file, written so that a kill at any moment leaves a whole file behind."""

from __future__ import annotations

import json
import logging
import os
import re
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from copy import deepcopy
from dataclasses import dataclass, field
from glob import escape
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from bisls._check import require, whole
from bisls._version import __version__
from bisls.feed import Feed, random_state, set_random_state
from bisls.record import History, Record
from bisls.vector import Vector, finite

logger = logging.getLogger(__name__)

FORMAT = 1
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
}


class CheckpointError(ValueError):
    """A checkpoint cannot be used here: the message says what differs and what to do. Nothing was loaded."""


@dataclass
class Run:
    """All that a checkpoint saves and restores."""

    solver: Any
    feeds: Mapping[str, Feed]
    history: History
    callbacks: Sequence[Any] = ()
    start: int = 0
    encoded: list[str] = field(default_factory=list)

    def records(self) -> str:
        """The records as JSON; only those that have come since the last time are encoded."""
        self.encoded += [json.dumps(record.to_dict()) for record in self.history.records[len(self.encoded) :]]
        return f"[{','.join(self.encoded)}]"


@dataclass(frozen=True)
class Checkpoint:
    """Where, and how often, `fit` saves the whole state of a run, so that ``fit(..., resume=True)`` goes on bit for bit.

    The file holds x, y and buffers, the state of the solver, the place in the data, the random state of torch, numpy and
    Python, all records, and the state of callbacks that have one. It is written beside its final place and moved there when it
    is complete and on the disk, so a kill at any moment leaves the last whole file. It is read with ``weights_only=True``: a
    checkpoint from elsewhere cannot run code. Its checksums are compared first, so a file that was damaged on its way is
    refused. Under `torch.distributed` one file holds what belongs to each rank.

    Args:
        path: The file. Its folder is made if need be.
        every: Save after every so many iterations, at least 1. The end of a run, an interrupt and an error in a callback save
            too.
        seconds: Also save when the last one is older than this; None leaves it to `every`.
        extra: Further objects with ``state_dict`` and ``load_state_dict``, by name: a module with BatchNorm, an average of
            weights.

    Examples:
        >>> Checkpoint("run.pt", every=20)
        Checkpoint(path='run.pt', every=20, seconds=None, extra={})
    """

    path: str | os.PathLike[str]
    every: int = 50
    seconds: float | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        named = isinstance(self.path, str | os.PathLike) and str(self.path) != "" and "\0" not in str(self.path)
        require(self, "path", named, "must name a file")
        require(self, "every", whole(self.every, 1), "must be a whole number of iterations, at least 1")
        require(self, "seconds", self.seconds is None or self.seconds > 0, "must be greater than 0, or None")
        usable = isinstance(self.extra, Mapping) and all(
            isinstance(name, str) and callable(getattr(own, "state_dict", None)) and hasattr(own, "load_state_dict")
            for name, own in self.extra.items()
        )
        require(self, "extra", usable, "must be a dict of objects that have state_dict() and load_state_dict(...)")

    def begin(self, run: Run, resume: bool, call: str = "fit") -> bool:
        """Load the run that was saved, if it is to be resumed and there is one; returns whether there was.

        Raises:
            ValueError: There is a file, and it was not said that it is to be resumed.
            CheckpointError: The file cannot be used; nothing was loaded.
        """
        path = Path(self.path)
        if path.is_dir():
            raise ValueError(f"`{call}(checkpoint={str(path)!r})`: this is a folder; name a file in it")
        exists = bool(everywhere(path.exists())[0])
        if exists and not path.is_file():  # opening a pipe would wait for ever
            raise ValueError(f"`{call}(checkpoint={str(path)!r})`: this is not a regular file; give another path")
        if exists and not resume:
            raise ValueError(
                f"`{call}(checkpoint={str(path)!r}, resume=False)`: the file exists; pass resume=True to go on from it, or "
                "delete it, or give another path"
            )
        if rank() == 0:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._clean()
        if not exists:
            if resume:
                logger.info("no checkpoint at %s yet: the run starts from its beginning", path)
            return False
        self.load(run)
        return True

    def save(self, run: Run) -> None:
        """Write the state of a run. On every rank; the first one writes, and all wait for it."""
        solver = run.solver
        own = {
            "solver": solver.state_dict(),
            "feeds": {name: own.state_dict() for name, own in run.feeds.items()},
            "random": random_state(),
            "buffers": [buffer.detach() for buffer in solver.problem.buffers],
            "callbacks": {name: own.state_dict() for name, own in _with_state(run.callbacks)},
            "extra": {name: own.state_dict() for name, own in self.extra.items()},
        }
        parts = everywhere(plain(own, "state"))
        error: str | None = None
        if rank() == 0:
            content = {
                **_signature(solver),
                "format": FORMAT,
                "versions": {"bisls": __version__, "torch": str(torch.__version__)},
                "world": world(),
                "k": solver.k,
                "start": run.start,
                "x": solver.problem.x.read(),
                "y": solver.problem.y.read(),
                "records": run.records(),
                "evaluations": json.dumps(run.history.evaluations),
                "ranks": [parts[0], *(_shared(part, parts[0]) for part in parts[1:])],
            }
            try:
                self._write(content)
            except OSError as failure:
                error = f"{type(failure).__name__}: {failure}"
        error = everywhere(error)[0]
        if error:
            raise OSError(f"the checkpoint {str(self.path)!r} could not be written: {error}")

    def _write(self, content: Mapping[str, Any]) -> None:
        path = Path(self.path)
        temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
        try:
            with open(temporary, "wb") as file, _checksums():
                torch.save(content, file)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
        except BaseException:
            with suppress(OSError):
                temporary.unlink()
            raise
        if os.name == "posix":  # the new name must be on the disk too
            folder = os.open(path.parent, os.O_RDONLY)
            try:
                os.fsync(folder)
            finally:
                os.close(folder)

    def _clean(self) -> None:
        """Remove what a killed write has left. Such a file is never read."""
        path = Path(self.path)
        for left in path.parent.glob(f".{escape(path.name)}.*.tmp"):
            with suppress(OSError):
                left.unlink()

    def load(self, run: Run) -> None:
        """Restore a run. All is checked before anything is changed, and put back if something fails all the same.

        Raises:
            CheckpointError: The file is damaged, or of another problem, method, format or number of processes.
        """
        error: CheckpointError | None = None
        try:
            content = self._read(run)
        except CheckpointError as refused:
            error = refused
        self._agree(error)
        try:
            self._restore(content, run)
        except CheckpointError as refused:
            error = refused
        self._agree(error)

    def _agree(self, error: CheckpointError | None) -> None:
        """All ranks load, or none."""
        texts = [text for text in everywhere(None if error is None else str(error)) if text]
        if error is not None:
            raise error
        if texts:
            raise CheckpointError(f"another rank: {texts[0]}")

    def _read(self, run: Run) -> dict[str, Any]:
        path, device = str(self.path), run.solver.problem.y.device
        try:
            file = open(self.path, "rb")  # noqa: SIM115 - what fails from here on is the content
        except OSError as failure:
            raise CheckpointError(
                f"checkpoint {path!r}: cannot be opened ({failure}); make it readable, or give another path"
            ) from failure
        try:
            with file:
                _undamaged(file)
                content = torch.load(file, weights_only=True, map_location=_to(device))
            found = content["format"]
            if found == FORMAT:
                _complete(content, _CONTENT, "it")
                for part in content["ranks"]:
                    _complete(part, _PART, "a rank")
        except Exception as failure:
            reason = str(failure).strip().split("\n")[0]
            raise CheckpointError(
                f"checkpoint {path!r}: not a whole checkpoint of bisls ({type(failure).__name__}: {reason}); put back a copy "
                "of it, or delete it to start from the beginning"
            ) from failure
        if found != FORMAT:
            raise CheckpointError(
                f"checkpoint {path!r}: its format is {found!r}, this version of bisls reads {FORMAT}; resume with the version "
                f"that wrote it ({content.get('versions')}), or delete it to start from the beginning"
            )
        self._check(content, run)
        return content

    def _check(self, content: Mapping[str, Any], run: Run) -> None:
        """Whether a whole checkpoint is of this run."""
        path, problem = str(self.path), run.solver.problem
        for name, now in _signature(run.solver).items():
            if content[name] != now:
                raise CheckpointError(
                    f"checkpoint {path!r} is of another {_WHAT[name]}: it has {content[name]}, here it is {now}; make "
                    f"{'the solver' if name == 'composition' else 'the problem'} as it was made then, or give another path"
                )
        if content["world"] != world() or len(content["ranks"]) != world():
            raise CheckpointError(
                f"checkpoint {path!r} was written by {content['world']} processes, here there are {world()}; each has its own "
                "place in the data and its own random state, so start as many as then"
            )
        part = content["ranks"][rank()]
        if set(part["extra"]) != set(self.extra):
            raise CheckpointError(
                f"checkpoint {path!r} has extra={sorted(map(str, part['extra']))}, `Checkpoint(extra=...)` has "
                f"{sorted(self.extra)}; pass the same names"
            )
        for name, vector, bounds in (("x", problem.x, problem.upper_bounds), ("y", problem.y, problem.lower_bounds)):
            flat = content[name]
            wrong = ""
            if flat.shape != (vector.numel,) or flat.dtype != vector.dtype:
                wrong = (
                    f"is {flat.dtype} of shape {tuple(flat.shape)}, not the {vector.numel:,} numbers of its parameters"
                )
            elif not finite(flat):
                wrong = "has numbers that are not finite"
            elif bounds is not None and not torch.equal(bounds.project(flat, vector), flat):
                wrong = "lies outside the bounds that it has here"
            if wrong:
                raise CheckpointError(
                    f"checkpoint {path!r}: {name} {wrong}; make the problem as it was made then, put back a copy of the file, or "
                    "delete it to start from the beginning"
                )

    def _restore(self, content: Mapping[str, Any], run: Run) -> None:
        solver, part = run.solver, content["ranks"][rank()]
        problem = solver.problem
        pairs = [(solver, part["solver"])]
        pairs += [(own, part["extra"][name]) for name, own in self.extra.items()]
        pairs += [
            (own, part["callbacks"][name]) for name, own in _with_state(run.callbacks) if name in part["callbacks"]
        ]
        at = (
            problem.x.read(),
            problem.y.read(),
            [buffer.detach().clone() for buffer in problem.buffers],
            random_state(),
        )
        # data last: an iterator whose batches were left out cannot be put back
        owners = [*(owner for owner, _ in pairs), *run.feeds.values()]
        before = [(owner, deepcopy(owner.state_dict())) for owner in owners]
        try:
            history = History(Record.from_dict(row) for row in json.loads(content["records"]))
            evaluations = [{"k": int(row["k"]), **row} for row in json.loads(content["evaluations"])]
            if len(history) != content["k"] - content["start"] or content["start"] < 0:
                raise ValueError(f"it has {len(history)} records from k = {content['start']} to {content['k']}")
            for owner, state in pairs:
                owner.load_state_dict(state)
            if solver.k != content["k"]:
                raise ValueError(f"the solver is at k = {solver.k} after loading, the checkpoint at {content['k']}")
            _place(problem, content["x"], content["y"], part["buffers"])
            for name, own in run.feeds.items():
                own.load_state_dict(part["feeds"][name])
            set_random_state(part["random"])
        except BaseException as failure:
            for owner, state in before:
                try:
                    owner.load_state_dict(state)
                except Exception:  # the others are put back all the same
                    logger.exception("%s could not be put back to what it was before", type(owner).__name__)
            _place(problem, *at[:3])
            set_random_state(at[3])
            if not isinstance(failure, Exception):
                raise
            known = isinstance(failure, ValueError | RuntimeError)
            reason = (str(failure) if known else f"{type(failure).__name__}: {failure}").rstrip(".")
            raise CheckpointError(
                f"checkpoint {str(self.path)!r} cannot be resumed here: {reason}. Nothing was loaded; make solver, data and "
                "callbacks as they were made then, or give another path"
            ) from failure
        for name, _ in _with_state(run.callbacks):
            if name not in part["callbacks"]:
                logger.info("the checkpoint has no state of the callback %s: it starts anew", name)
        run.start = content["start"]
        run.history.records[:] = history.records
        run.history.evaluations[:] = evaluations


_WHAT = {"problem": "problem", "composition": "method (composition of the solver)"}


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


def _signature(solver: Any) -> dict[str, Any]:
    def shapes(tensors: Sequence[Tensor]) -> list[str]:
        return [f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}" for tensor in tensors]

    def level(vector: Vector) -> list[str]:
        return shapes(vector.tensors)

    problem = solver.problem
    parts = {"upper_params": level(problem.x), "lower_params": level(problem.y), "buffers": shapes(problem.buffers)}
    return {"problem": parts, "composition": re.sub(r" at 0x[0-9a-f]+", "", repr(solver))}


def _place(problem: Any, x: Tensor, y: Tensor, buffers: Sequence[Tensor]) -> None:
    problem.x.write_(x)
    problem.y.write_(y)
    with torch.no_grad():
        for buffer, value in zip(problem.buffers, buffers, strict=True):
            buffer.copy_(value)


def _with_state(callbacks: Sequence[Any]) -> list[tuple[str, Any]]:
    """The callbacks that have a state, by a name that does not change from run to run."""
    named, seen = [], dict[str, int]()
    for own in callbacks:
        if callable(getattr(own, "state_dict", None)) and callable(getattr(own, "load_state_dict", None)):
            name = type(own).__name__
            seen[name] = seen.get(name, 0) + 1
            named.append((f"{name} {seen[name]}", own))
    return named


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


def _shared(value: Any, first: Any) -> Any:
    """Tensors that are the same on the first rank as the very same objects, so that the file holds them once."""
    if isinstance(value, Tensor):
        same = isinstance(first, Tensor) and first.dtype == value.dtype and first.device == value.device
        return first if same and torch.equal(first, value) else value
    if isinstance(value, dict) and isinstance(first, dict):
        return {name: _shared(entry, first.get(name)) for name, entry in value.items()}
    if isinstance(value, list | tuple) and isinstance(first, list | tuple) and len(value) == len(first):
        return type(value)(_shared(entry, other) for entry, other in zip(value, first, strict=True))
    return value


def _to(device: torch.device) -> Callable[[Any, str], Any]:
    """What lay on the CPU stays there, all else goes where the parameters are now."""
    return lambda storage, location: storage if location.startswith("cpu") else storage.to(device=device)


def world() -> int:
    """The number of processes of `torch.distributed`; 1 without it."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def rank() -> int:
    """The number of this process; 0 without `torch.distributed`."""
    return dist.get_rank() if world() > 1 else 0


def everywhere(value: Any) -> list[Any]:
    """What each rank gave, on every rank; also a barrier."""
    if world() == 1:
        return [value]
    values: list[Any] = [None] * world()
    dist.all_gather_object(values, value)
    return values
