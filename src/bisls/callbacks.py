"""Callbacks of `fit`: logs, evaluation, early stopping. Any object with one of the three hooks is one."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from importlib import import_module
from math import inf, isfinite, nan
from pathlib import Path
from typing import Any, TextIO

from bisls._check import require_argument, whole
from bisls.checkpoint import rank
from bisls.feed import random_state, set_random_state
from bisls.record import History, Record

logger = logging.getLogger(__name__)


@dataclass
class FitState:
    """What callbacks see of a run, beside the record.

    Attributes:
        solver: The solver.
        history: All records up to now, with evaluations.
        steps: The iteration at which the run will end.
        resumed: Whether the run is, or would have been, resumed: ``fit(resume=True)``.
        shown: What the progress bar shows beside the rest; callbacks may put numbers in.
        reason: Why the run is to stop; empty where it is not.
    """

    solver: Any
    history: History
    steps: int
    resumed: bool = False
    shown: dict[str, float] = field(default_factory=dict)
    reason: str = ""

    @property
    def k(self) -> int:
        """Iterations done."""
        return self.solver.k

    def stop(self, reason: str) -> None:
        """End the run after this iteration."""
        self.reason = reason


class Callback:
    """Something that watches a run. The three hooks are optional, and so is this base class.

    A callback that has ``state_dict`` and ``load_state_dict`` as well is saved in checkpoints. One that raises ends the run;
    the checkpoint is written first.
    """

    def start(self, state: FitState) -> None:
        """Before the first iteration, after a checkpoint was loaded."""

    def step(self, record: Record, state: FitState) -> None:
        """After each iteration."""

    def end(self, history: History) -> None:
        """At the end of the run, also where it ended by an error or an interrupt."""


class JSONLines(Callback):
    """A line of JSON for each record, flushed as soon as it is known; `History.load` reads it.

    A run that is resumed takes the lines back to its checkpoint, so that none is doubled or lost. Lines of earlier iterations
    stay. The first rank alone writes.

    Args:
        path: The file. Its folder is made if need be.
    """

    def __init__(self, path: str | os.PathLike[str]):
        usable = isinstance(path, str | os.PathLike) and str(path) != ""
        require_argument("JSONLines", "path", path, usable, "must name a file")
        self.path = Path(path)
        self._file: TextIO | None = None

    def start(self, state: FitState) -> None:
        """Open the file, at the place where the run is."""
        if rank() != 0:
            return
        known = state.history
        first = known.records[0].k if len(known) else state.k
        earlier = History.load(self.path) if self.path.exists() else History()
        if any(record.k >= first for record in earlier) and not state.resumed:
            raise ValueError(
                f"`JSONLines({str(self.path)!r})`: the file has records from iteration {first} on, of another run; give another "
                "path, delete it, or pass fit(..., resume=True) to go on with that run"
            )
        kept = History((record for record in earlier if record.k < first), earlier.evaluations)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        temporary = self.path.with_name(f".{self.path.name}.tmp")
        temporary.write_text("".join(f"{line}\n" for line in (*kept.to_lines(), *known.to_lines())), encoding="utf-8")
        os.replace(temporary, self.path)
        self._file = open(self.path, "a", encoding="utf-8")  # noqa: SIM115 - closed at the end of the run

    def step(self, record: Record, state: FitState) -> None:
        """Write the line of a record, with what was evaluated before it."""
        if self._file is not None:
            found = [row for row in state.history.evaluations[-1:] if row["k"] == record.k]
            self._file.write(f"{History([record], found).to_lines()[0]}\n")
            self._file.flush()

    def end(self, history: History) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()
            self._file = None


class TensorBoard(Callback):
    """Records and evaluations as curves in TensorBoard. Needs the extra ``bisls[tensorboard]``. The first rank alone writes.

    Args:
        log_dir: The folder of the event files.
    """

    def __init__(self, log_dir: str | os.PathLike[str]):
        try:
            self._writers = import_module("torch.utils.tensorboard")
        except ImportError as error:
            raise ImportError(
                f"`TensorBoard({str(log_dir)!r})` needs the package tensorboard: pip install 'bisls[tensorboard]'"
            ) from error
        self.log_dir = str(log_dir)
        self._writer: Any = None

    def start(self, state: FitState) -> None:
        """Open the event file; what a resumed run had written beyond its checkpoint is no longer shown."""
        if rank() == 0:
            self._writer = self._writers.SummaryWriter(self.log_dir, purge_step=state.k)

    def step(self, record: Record, state: FitState) -> None:
        """Add a point to each curve."""
        if self._writer is None:
            return
        for name, value in record.to_dict().items():
            if isinstance(value, int | float) and name != "k" and isfinite(value):
                self._writer.add_scalar(f"bisls/{name}", value, record.k)
        for row in state.history.evaluations[-1:]:
            if row["k"] == record.k:
                for name, value in row.items():
                    if name != "k":
                        self._writer.add_scalar(f"evaluation/{name}", value, record.k)

    def end(self, history: History) -> None:
        """Close the event file."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None


class Evaluate(Callback):
    """Call a function now and then; what it returns is in ``history.evaluations``, in the logs and beside the progress bar.

    It leaves no trace in the run: the random state of torch, numpy and Python is put back, and so are the buffers of modules
    that it runs in training mode. Parameters are its own to leave alone.

    Args:
        function: Called without arguments; returns a number, or a dict of numbers by name.
        every: After every so many iterations, at least 1, and after the last.
        name: What a single number is called.
    """

    def __init__(self, function: Callable[[], float | Mapping[str, float]], every: int = 1, name: str = "evaluation"):
        require_argument("Evaluate", "function", function, callable(function), "must be callable without arguments")
        _require_count("Evaluate", "every", every)
        self.function = function
        self.every = every
        self.name = name

    def step(self, record: Record, state: FitState) -> None:
        """Evaluate, if it is time."""
        if state.k % self.every and state.k != state.steps:
            return
        value = traceless(self.function, state.solver.problem)
        found = value if isinstance(value, Mapping) else {self.name: value}
        row = {str(name): _float(f"Evaluate(function={self.function!r})", name, own) for name, own in found.items()}
        evaluations = state.history.evaluations
        if evaluations and evaluations[-1]["k"] == record.k:
            evaluations[-1].update(row)
        else:
            evaluations.append({"k": record.k, **row})
        state.shown.update(row)
        logger.info("k = %d: %s", record.k, ", ".join(f"{name} {own:.6g}" for name, own in row.items()))


class EarlyStopping(Callback):
    """End the run when a number has not become smaller for a while.

    Args:
        patience: End after this many looks in a row without an improvement, at least 1.
        min_delta: What counts as an improvement on the smallest number so far: more than this, at least 0.
        on: A field of `Record`, such as ``"upper_value"``, or a function without arguments that returns a number, such as a
            validation loss. It leaves no trace in the random state. Losses of single batches are noisy: they need a long
            patience, or a function.
        every: Look after every so many iterations, at least 1.

    Examples:
        >>> stopping = EarlyStopping(patience=2, min_delta=0.1)
        >>> [stopping.look(value, k) for k, value in enumerate((3.0, 2.0, 1.95, 2.5))]
        [False, False, False, True]
    """

    def __init__(
        self,
        patience: int = 50,
        min_delta: float = 0.0,
        on: str | Callable[[], float] = "upper_value",
        every: int = 1,
    ):
        _require_count("EarlyStopping", "patience", patience)
        _require_count("EarlyStopping", "every", every)
        require_argument("EarlyStopping", "min_delta", min_delta, 0 <= min_delta < inf, "must be at least 0")
        names = [name for name, value in _EXAMPLE.to_dict().items() if not isinstance(value, str) and name != "k"]
        rule = f"must be a function without arguments, or one of {', '.join(names)}"
        require_argument("EarlyStopping", "on", on, callable(on) or on in names, rule)
        self.patience = patience
        self.min_delta = min_delta
        self.on = on
        self.every = every
        self.best = inf
        self.best_k = -1
        self.waited = 0

    def start(self, state: FitState) -> None:
        """A run that had been stopped stays so when it is resumed."""
        if self.waited >= self.patience:
            self._stop(state)

    def step(self, record: Record, state: FitState) -> None:
        """Look, if it is time."""
        if state.k % self.every:
            return
        if isinstance(self.on, str):
            value = float(record.to_dict()[self.on])
        else:
            value = _float(f"EarlyStopping(on={self.on!r})", "on", traceless(self.on, state.solver.problem))
        if self.look(value, record.k):
            self._stop(state)

    def look(self, value: float, k: int) -> bool:
        """Note the value of iteration k; returns whether patience is at its end."""
        if value < self.best - self.min_delta:
            self.best, self.best_k, self.waited = value, k, 0
        else:
            self.waited += 1
        return self.waited >= self.patience

    def _stop(self, state: FitState) -> None:
        state.stop(f"no improvement on {self.best:.6g} (k = {self.best_k}) in {self.waited} looks")

    def state_dict(self) -> dict[str, Any]:
        """The best so far, and how long ago."""
        return {"best": self.best, "best_k": self.best_k, "waited": self.waited}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where `state_dict` was taken."""
        self.best, self.best_k, self.waited = float(state["best"]), int(state["best_k"]), int(state["waited"])


_EXAMPLE = Record(0, nan, nan, nan, nan, 0, 0, nan, nan)


def traceless(function: Callable[[], Any], problem: Any) -> Any:
    """What a function returns, called so that random states and module buffers are afterwards what they were before."""
    before = random_state()
    try:
        with problem.probing():
            return function()
    finally:
        set_random_state(before)


def check_callbacks(callbacks: Any, call: str = "fit") -> list[Any]:
    """The callbacks as a list; a plain function is one whose hook is `step`."""
    single = any(callable(getattr(callbacks, hook, None)) for hook in ("start", "step", "end")) or callable(callbacks)
    if single or isinstance(callbacks, str | Mapping):
        raise ValueError(f"`{call}(callbacks={callbacks!r})`: callbacks must be a list of callbacks: [callback]")
    found = []
    for own in callbacks:
        if isinstance(own, type):
            raise ValueError(
                f"`{call}(callbacks=[{own.__name__}])`: this is a class; pass an instance: {own.__name__}(...)"
            )
        hooks = any(callable(getattr(own, hook, None)) for hook in ("start", "step", "end"))
        if not hooks and not callable(own):
            raise ValueError(
                f"`{call}(callbacks=[{own!r}])`: a callback has at least one of start(state), step(record, state) and "
                "end(history), or is a function of (record, state)"
            )
        found.append(own if hooks else _Function(own))
    return found


class _Function(Callback):
    """A plain function as a callback."""

    def __init__(self, function: Callable[[Record, FitState], Any]):
        self.function = function

    def step(self, record: Record, state: FitState) -> None:
        self.function(record, state)


def _require_count(call: str, name: str, value: Any) -> None:
    require_argument(call, name, value, whole(value, 1), "must be a whole number, at least 1")


def _float(call: str, name: Any, value: Any) -> float:
    with suppress(TypeError, ValueError, RuntimeError):
        return float(value)
    raise ValueError(f"`{call}`: {name} must be a number, got {type(value).__name__}; return float(...)")
