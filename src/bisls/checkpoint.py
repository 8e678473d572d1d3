"""Checkpoint: the whole state of a run in one file, written so that a kill at any moment leaves a whole file behind."""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bisls._check import PATH, number, optional, require, settle, whole_number
from bisls._files import try_to_write
from bisls._version import __version__
from bisls.buffered import Buffered
from bisls.checkpoint_file import FORMAT, plain, read_file, shared, write_file
from bisls.checkpoint_file import CheckpointError as CheckpointError
from bisls.feed import Feed
from bisls.generators import Generators
from bisls.hooks import Callback
from bisls.oracle import Cost
from bisls.places import Place
from bisls.randomness import random_kind, random_state, set_random_state
from bisls.ranks import from_all_ranks, rank, world
from bisls.record import History, Record
from bisls.standstill import Standstill
from bisls.states import Anything, Each, Fields, Kind, Numbers, Unfit, Whole, point
from bisls.vector import Vector

logger = logging.getLogger(__name__)


@dataclass
class Run:
    """All that a checkpoint saves and restores."""

    solver: Any
    feeds: Mapping[str, Feed]
    history: History
    callbacks: Sequence[Any] = ()
    start: int = 0
    still: Standstill | None = None
    encoded: list[str] = field(default_factory=list)

    def records(self) -> str:
        """The records as JSON; only those that have come since the last time are encoded."""
        self.encoded += [json.dumps(record.to_dict()) for record in self.history.records[len(self.encoded) :]]
        return f"[{','.join(self.encoded)}]"


@dataclass(frozen=True)
class Checkpoint:
    """Where, and how often, `fit` saves the whole state of a run, so that ``fit(..., resume=True)`` goes on bit for bit.

    The file holds x, y and the buffers of modules (BatchNorm's statistics), the state of the solver, the place in the data,
    the random state of torch, numpy and Python and of the generators that losses and data have for their own, all records,
    and the state of callbacks that have one. It is written beside its final place and moved there when it is complete and on
    the disk, so a kill at any moment leaves the last whole file. It is read with ``weights_only=True``: a checkpoint from
    elsewhere cannot run code. Its checksums are compared first, so a file that was damaged on its way is refused. Under
    `torch.distributed` one file holds what belongs to each rank.

    Args:
        path: The file. Its folder is made if need be.
        every: Save after every so many iterations, at least 1. The end of a run, an interrupt and an error in a callback save
            too.
        seconds: Also save when the last one is older than this; None leaves it to `every`.
        extra: Further objects with ``state_dict`` and ``load_state_dict``, by name: a schedule, an average of weights.

    Examples:
        >>> Checkpoint("run.pt", every=20)
        Checkpoint(path='run.pt', every=20, seconds=None, extra={})
    """

    path: str | os.PathLike[str]
    every: int = 50
    seconds: float | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        settle(self, path=PATH, every=whole_number(1, "must be a whole number of iterations, at least 1"))
        settle(self, seconds=optional(number("(0, inf]", "must be greater than 0, or None")))
        usable = isinstance(self.extra, Mapping) and all(
            isinstance(name, str) and callable(getattr(own, "state_dict", None)) and hasattr(own, "load_state_dict")
            for name, own in self.extra.items()
        )
        require(self, "extra", usable, "must be a dict of objects that have state_dict() and load_state_dict(...)")

    def begin(self, run: Run, resume: bool, call: str = "fit") -> bool:
        """Load the run that was saved, if it is to be resumed and there is one; returns whether there was.

        Raises:
            ValueError: The path cannot be written, or there is a file and it was not said that it is to be resumed.
            CheckpointError: The file cannot be used; nothing was loaded.
        """
        path = Path(self.path)
        complaint, exists = from_all_ranks(self._usable(resume) if rank() == 0 else ("", False))[0]
        if complaint:
            more = ", resume=False" if exists and not resume else ""
            raise ValueError(f"`{call}(checkpoint={str(path)!r}{more})`: {complaint}")
        if not exists:
            if resume:
                logger.info("no checkpoint at %s yet: the run starts from its beginning", path)
            return False
        self.load(run)
        return True

    def _usable(self, resume: bool) -> tuple[str, bool]:
        """Why the path will not do, or nothing, and whether there is a file."""
        path = Path(self.path)
        try:
            if path.is_dir():
                return "this is a folder; name a file in it", False
            exists = path.exists()
            if exists and not path.is_file():  # opening a pipe would wait for ever
                return "this is not a regular file; give another path", False
            if exists and not resume:
                return "the file exists; pass resume=True to go on from it, or delete it, or give another path", True
            try_to_write(path)
        except (OSError, ValueError) as error:
            return f"this can't be written ({error}); give another path", False
        return "", exists

    def rehearse(self, run: Run) -> None:
        """Make what `save` would write, so that a state that no file can hold is found at the start and not after a day.

        Raises:
            ValueError: There is one; the message names it.
        """
        plain(self._own(run), "state")

    def _own(self, run: Run) -> dict[str, Any]:
        """What belongs to this rank."""
        solver = run.solver
        return {
            "solver": solver.state_dict(),
            "feeds": {name: own.state_dict() for name, own in run.feeds.items()},
            "random": random_state(),
            "generators": _generators(run).saved(),
            "buffers": [buffer.detach() for buffer in solver.problem.buffers],
            "modules": _modules(run).saved(),
            "callbacks": {name: own.state_dict() for name, own in _with_state(run.callbacks)},
            "extra": {name: own.state_dict() for name, own in self.extra.items()},
            "still": run.still.state_dict() if run.still else {},
        }

    def save(self, run: Run) -> None:
        """Write the state of a run. On every rank; the first one writes, and all wait for it.

        Raises:
            OSError: It could not be written; the file is the one that was there before.
        """
        solver = run.solver
        parts = from_all_ranks(plain(self._own(run), "state"))
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
                "ranks": [parts[0], *(shared(part, parts[0]) for part in parts[1:])],
            }
            try:
                write_file(self.path, content)
            except OSError as failure:
                error = f"{type(failure).__name__}: {failure}"
        error = from_all_ranks(error)[0]
        if error:
            raise OSError(f"the checkpoint {str(self.path)!r} could not be written: {error}")

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
        texts = [text for text in from_all_ranks(None if error is None else str(error)) if text]
        if error is not None:
            raise error
        if texts:
            raise CheckpointError(f"another rank: {texts[0]}")

    def _read(self, run: Run) -> dict[str, Any]:
        content = read_file(self.path, run.solver.problem.y.device)
        self._check(content, run)
        return content

    def _check(self, content: Mapping[str, Any], run: Run) -> None:
        """Whether a whole checkpoint is of this run."""
        path = str(self.path)
        for name, now in _signature(run.solver).items():
            if repr(content[name]) != repr(now):  # a forged one may hold what cannot be compared
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
        try:
            for name, kind in self._kinds(content, run).items():
                kind.read(content[name] if name in content else part[name], name)
            _modules(run).keeps().read(part.get("modules", []), "modules")
            _generators(run).keeps().read(
                part.get("generators", []), "generators"
            )  # earlier versions did not keep them
        except Unfit as error:
            raise CheckpointError(
                f"checkpoint {path!r}: {error}; make the problem and the data as they were made then, put back a copy of the "
                "file, or delete it to start from the beginning"
            ) from error

    def _kinds(self, content: Mapping[str, Any], run: Run) -> dict[str, Kind]:
        """What a checkpoint must hold beside what its owners look at when they load it."""
        solver, part = run.solver, content["ranks"][rank()]
        problem = solver.problem
        k = Whole().read(content["k"], "k")
        taken = solver.lower_iters + getattr(solver, "extra_batches", 0)
        places = {name: Place(own, k, taken) for name, own in run.feeds.items()}
        watchers = {name: own.keeps(problem) for name, own in _with_state(run.callbacks) if isinstance(own, Callback)}
        return {
            "start": Whole(0, k),
            "x": point(problem.x, problem.upper_bounds),
            "y": point(problem.y, problem.lower_bounds),
            "buffers": Each([Numbers.like(buffer) for buffer in problem.buffers]),
            "random": random_kind(),
            "feeds": Fields(places, rest=Anything()),
            "callbacks": Fields(optional=watchers, rest=Anything()),
            "still": run.still.keeps() if run.still is not None and part["still"] else Anything(),
        }

    def _restore(self, content: Mapping[str, Any], run: Run) -> None:
        solver, part = run.solver, content["ranks"][rank()]
        problem = solver.problem
        pairs = [(solver, part["solver"])]
        pairs += [(own, part["extra"][name]) for name, own in self.extra.items()]
        if run.still is not None and part["still"]:
            pairs.append((run.still, part["still"]))
        pairs += [
            (own, part["callbacks"][name]) for name, own in _with_state(run.callbacks) if name in part["callbacks"]
        ]
        at = (
            problem.x.read(),
            problem.y.read(),
            [buffer.detach().clone() for buffer in problem.buffers],
            random_state(),
        )
        drawn, modules = _generators(run), _modules(run)
        were, had = drawn.states(), modules.saved()
        # data last: an iterator whose batches were left out cannot be put back
        owners = [*(owner for owner, _ in pairs), *run.feeds.values()]
        before = [(owner, deepcopy(owner.state_dict())) for owner in owners]
        try:
            history = History(map(_record, json.loads(content["records"])))
            evaluations = [
                {**row, "k": Whole().read(row["k"], "k of an evaluation")} for row in json.loads(content["evaluations"])
            ]
            if [record.k for record in history] != list(range(content["start"], content["k"])):
                raise ValueError(f"it has {len(history)} records from k = {content['start']} to {content['k']}")
            for owner, state in pairs:
                owner.load_state_dict(state)
            if solver.k != content["k"]:
                raise ValueError(f"the solver is at k = {solver.k} after loading, the checkpoint at {content['k']}")
            place(problem, content["x"], content["y"], part["buffers"])
            for name, own in run.feeds.items():
                own.load_state_dict(part["feeds"][name])
            set_random_state(part["random"])
            drawn.load(part.get("generators", []), f"checkpoint {str(self.path)!r}: the losses")
            if "modules" in part:  # earlier versions did not keep them
                modules.load(part["modules"], f"checkpoint {str(self.path)!r}")
        except BaseException as failure:
            for owner, state in before:
                try:
                    owner.load_state_dict(state)
                except Exception:  # the others are put back all the same
                    logger.exception("%s could not be put back to what it was before", type(owner).__name__)
            place(problem, *at[:3])
            set_random_state(at[3])
            drawn.restore(were)
            modules.load(had, "the run")
            if not isinstance(failure, Exception):
                raise
            known = isinstance(failure, ValueError | RuntimeError)
            reason = str(failure) if known else f"{type(failure).__name__}: {failure}"
            reason = reason.rstrip(".").removesuffix("; nothing was loaded").removesuffix(". Nothing was loaded")
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


def _signature(solver: Any) -> dict[str, Any]:
    def shapes(tensors: Sequence[Tensor]) -> list[str]:
        return [f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}" for tensor in tensors]

    def level(vector: Vector) -> list[str]:
        return shapes(vector.tensors)

    problem = solver.problem
    parts = {"upper_params": level(problem.x), "lower_params": level(problem.y), "buffers": shapes(problem.buffers)}
    # settings at their defaults are left out, so that a setting that comes new with a version does not make another method
    method = getattr(solver, "identity", None) or re.sub(r" at 0x[0-9a-f]+", "", repr(solver))
    return {"problem": parts, "composition": method}


def place(problem: Any, x: Tensor, y: Tensor, buffers: Sequence[Tensor]) -> None:
    """Write x, y and the buffers of a problem."""
    problem.x.write_(x)
    problem.y.write_(y)
    with torch.no_grad():
        for buffer, value in zip(problem.buffers, buffers, strict=True):
            buffer.copy_(value)


def _modules(run: Run) -> Buffered:
    """The buffers of the modules that the losses reach."""
    return Buffered(run.solver.problem.around.modules)


def _generators(run: Run) -> Generators:
    """The random generators that the losses have for their own."""
    return Generators(run.solver.problem.look_around().generators)


_NUMBERS = [f.name for f in (*fields(Record), *fields(Cost)) if str(f.type) in ("float", "int")]


def _record(row: Any) -> Record:
    """A record that was saved; every number of it must be one."""
    wrong = [name for name in _NUMBERS if type(row.get(name, 0)) not in (int, float)]
    if wrong:
        raise ValueError(f"the record of k = {row.get('k')} has no number as {wrong[0]}")
    return Record.from_dict(row)


def _with_state(callbacks: Sequence[Any]) -> list[tuple[str, Any]]:
    """The callbacks that have a state, by a name that does not change from run to run."""
    named, seen = [], dict[str, int]()
    for own in callbacks:
        if callable(getattr(own, "state_dict", None)) and callable(getattr(own, "load_state_dict", None)):
            name = type(own).__name__
            seen[name] = seen.get(name, 0) + 1
            named.append((f"{name} {seen[name]}", own))
    return named
