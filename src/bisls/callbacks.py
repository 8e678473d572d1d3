"""Callbacks of `fit`: logs, evaluation, early stopping. Any object with one of the three hooks is one."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from contextlib import suppress
from math import inf, nan
from typing import Any

from torch import Tensor

from bisls._check import FLAG, choice, either, instance, number, settled, whole_number
from bisls._check import function as callable_with
from bisls.checkpoint import place
from bisls.hooks import Callback as Callback
from bisls.hooks import FitState as FitState
from bisls.hooks import check_callbacks as check_callbacks
from bisls.logs import JSONLines as JSONLines
from bisls.logs import TensorBoard as TensorBoard
from bisls.randomness import random_state, set_random_state
from bisls.record import History, Record
from bisls.states import Anything, Each, Fields, Kind, Maybe, Number, Numbers, Whole, flat, point, read
from bisls.status import Status

logger = logging.getLogger(__name__)


class Evaluate(Callback):
    """Call a function now and then; what it returns is in ``history.evaluations``, in the logs and beside the progress bar.

    It leaves no trace in the run: the random state of torch, numpy and Python is put back, and so are the buffers of modules
    that it runs in training mode. Parameters are its own to leave alone.

    Args:
        function: Called without arguments; returns a number, or a dict of numbers by name.
        every: After every so many iterations, at least 1, and after the last (unless a callback after this one stops the run).
        name: What a single number is called.
    """

    def __init__(self, function: Callable[[], float | Mapping[str, float]], every: int = 1, name: str = "evaluation"):
        called = callable_with(0, "must be callable without arguments")
        self.function = settled("Evaluate", "function", function, called)
        self.every = settled("Evaluate", "every", every, whole_number(1))
        self.name = settled("Evaluate", "name", name, instance(str, "must be text"))

    def step(self, record: Record, state: FitState) -> None:
        """Evaluate, if it is time."""
        if state.k % self.every and state.k != state.steps and not state.reason:
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


class Averaged(Callback):
    """The mean of x over the iterations: weights of a mixture wander, and their mean is what to report.

    The mean of points inside convex bounds (`Simplex`, `Box`) is inside them. It is saved in checkpoints.

    Args:
        after: Leave out so many iterations at the beginning, at least 0.

    Attributes:
        mean: Tensors shaped like the upper parameters; None before anything was averaged.
        count: How many iterations it is the mean of.

    Examples:
        >>> import bisls
        >>> task, averaged = bisls.tasks.quadratic(), Averaged(after=3)
        >>> solver = bisls.BiSLS(task.problem, lower_iters=task.lower_iters)
        >>> history = bisls.fit(solver, task.upper_data, task.lower_data, 5, progress=False, callbacks=[averaged])
        >>> averaged.count, averaged.mean[0].shape == task.problem.x.tensors[0].shape
        (2, True)
    """

    def __init__(self, after: int = 0):
        self.after = settled("Averaged", "after", after, whole_number(0))
        self.count = 0
        self.mean: tuple[Tensor, ...] | None = None
        self._flat: Tensor | None = None

    def start(self, state: FitState) -> None:
        """One that was resumed knows its shapes again."""
        if self._flat is not None:
            self.mean = state.solver.problem.x.split(self._flat)

    def step(self, record: Record, state: FitState) -> None:
        """Note where x went."""
        if record.k < self.after:
            return
        x = state.solver.problem.x
        here = x.read()
        self.count += 1
        self._flat = here if self._flat is None else self._flat + (here - self._flat) / self.count
        self.mean = x.split(self._flat)

    def state_dict(self) -> dict[str, Any]:
        """The mean so far, and of how many."""
        return {"count": self.count, "mean": self._flat}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where `state_dict` was taken.

        Raises:
            ValueError: It is no such state; nothing was loaded.
        """
        own = read("`Averaged.load_state_dict(...)`", self.keeps(), state)
        self.count, self._flat, self.mean = own["count"], own["mean"], None

    def keeps(self, problem: Any = None) -> Fields:
        """What a state may be; with the problem, whose upper parameters the mean must fit."""
        return Fields({"count": Whole()}, {"mean": Maybe(flat(None if problem is None else problem.x))}, empty=False)


class EarlyStopping(Callback):
    """End the run when a number has not become smaller for a while.

    Args:
        patience: End after this many looks in a row without an improvement, at least 1.
        min_delta: What counts as an improvement on the smallest number so far: more than this, at least 0.
        on: A field of `Record`, such as ``"upper_value"``, or a function without arguments that returns a number, such as a
            validation loss. It leaves no trace in the random state. Losses of single batches are noisy: they need a long
            patience, or a function.
        every: Look after every so many iterations, at least 1.
        restore: Put x, y and the buffers of the problem back to the best look when the run is finished, whether it was stopped
            or not. A field of `Record` belongs to the point before the upper step, and that is the one put back. An error or an
            interrupt leaves them where they are, and so does the checkpoint, so that the run can go on.

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
        restore: bool = False,
    ):
        call = "EarlyStopping"
        names = [name for name, value in _EXAMPLE.to_dict().items() if not isinstance(value, str) and name != "k"]
        rule = f"must be a function without arguments, or one of {', '.join(names)}"
        self.patience = settled(call, "patience", patience, whole_number(1))
        self.every = settled(call, "every", every, whole_number(1))
        self.min_delta = settled(call, "min_delta", min_delta, number("[0, inf)", "must be at least 0"))
        self.on = settled(call, "on", on, either(rule, choice(*names), callable_with(0, rule)))
        self.restore = settled(call, "restore", restore, FLAG)
        self.best = inf
        self.best_k = -1
        self.waited = 0
        self._point: list[Tensor] | None = None  # x, y and the buffers at the best look
        self._state: FitState | None = None

    def start(self, state: FitState) -> None:
        """A run that had been stopped stays so when it is resumed."""
        self._state = state
        if self.restore and isinstance(self.on, str) and not hasattr(state.solver, "measured"):
            raise ValueError(
                f"`EarlyStopping(on={self.on!r}, restore=True)`: {type(state.solver).__name__} does not tell the point that its "
                "record belongs to (measured); pass a function as on"
            )
        if self.waited >= self.patience:
            self._stop(state)

    def step(self, record: Record, state: FitState) -> None:
        """Look, if it is time."""
        if state.k % self.every:
            return
        if isinstance(self.on, str):
            given_up = record.upper_status is Status.NON_FINITE  # the solver has left that point
            value = nan if given_up else float(record.to_dict()[self.on])
        else:
            value = _float(f"EarlyStopping(on={self.on!r})", "on", traceless(self.on, state.solver.problem))
        over = self.look(value, record.k)
        if self.restore and self.best_k == record.k:
            self._keep(state.solver)
        if over:
            self._stop(state)

    def _keep(self, solver: Any) -> None:
        problem = solver.problem
        x, y = solver.measured if isinstance(self.on, str) else (problem.x.read(), problem.y.read())
        self._point = [tensor.detach().clone() for tensor in (x, y, *problem.buffers)]

    def end(self, history: History) -> None:
        """Put the best point back, if that was asked for and the run is finished."""
        state, self._state = self._state, None
        if self.restore and self._point is not None and state is not None and state.finished:
            x, y, *buffers = self._point
            place(state.solver.problem, x, y, buffers)
            logger.info("x and y are those of k = %d, where %s was %.6g", self.best_k, self._what(), self.best)

    def _what(self) -> str:
        return self.on if isinstance(self.on, str) else getattr(self.on, "__name__", "the number")

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
        """The best so far, how long ago, and where, if it is to be put back."""
        return {"best": self.best, "best_k": self.best_k, "waited": self.waited, "point": self._point}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where `state_dict` was taken.

        Raises:
            ValueError: It is no such state, or the best point is to be put back, and was not kept; nothing was loaded.
        """
        call = "`EarlyStopping.load_state_dict(...)`"
        own = read(call, self.keeps(), state)
        kept = own.get("point")
        if kept is not None:
            read(call, Each([flat(), flat()]), kept[:2], "state['point']")
        if self.restore and kept is None and own["best_k"] >= 0:
            raise ValueError(
                "`EarlyStopping(restore=True)`: the state is of one that kept no point; pass restore=False, or start anew"
            )
        self.best, self.best_k, self.waited = own["best"], own["best_k"], own["waited"]
        self._point = kept if self.restore else None

    def keeps(self, problem: Any = None) -> Fields:
        """What a state may be; with the problem, which the best point must fit."""
        kept: Kind = Each(Numbers(any_value=True))
        if problem is not None:
            levels = [point(problem.x, problem.upper_bounds), point(problem.y, problem.lower_bounds)]
            kept = Each([*levels, *(Numbers.like(buffer) for buffer in problem.buffers)])
        numbers = {"best": Number(infinite=True), "best_k": Whole(-1), "waited": Whole()}
        return Fields(numbers, {"point": Maybe(kept)}, rest=Anything())


_EXAMPLE = Record(0, nan, nan, nan, nan, 0, 0, nan, nan)


def traceless(function: Callable[[], Any], problem: Any) -> Any:
    """What a function returns, called so that random states and module buffers are afterwards what they were before."""
    before = random_state()
    try:
        with problem.probing():
            return function()
    finally:
        set_random_state(before)


def _float(call: str, name: Any, value: Any) -> float:
    with suppress(TypeError, ValueError, RuntimeError):
        return float(value)
    raise ValueError(f"`{call}`: {name} must be a number, got {type(value).__name__}; return float(...)")
