"""Hooks: what `fit` calls before, during and after a run, and in which order."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from bisls._check import iterable, shown
from bisls.record import History, Record
from bisls.states import Anything, Kind


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
        finished: Whether the run has come to its end: all iterations, a stop, or the end of the data. False while it goes on, and
            where an error or an interrupt ends it.
    """

    solver: Any
    history: History
    steps: int
    resumed: bool = False
    shown: dict[str, float] = field(default_factory=dict)
    reason: str = ""
    finished: bool = False

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
    the checkpoint is written first. Those of this package that only write logs raise nothing once the run is under way.

    Attributes:
        late: Whether it is called after all that are not, whatever their order in the list: a log does so, to see what the others
            have found in the same iteration, and also where one of them raises. Both kinds keep the order of the list.
    """

    late: bool = False

    def start(self, state: FitState) -> None:
        """Before the first iteration, after a checkpoint was loaded."""

    def step(self, record: Record, state: FitState) -> None:
        """After each iteration."""

    def end(self, history: History) -> None:
        """At the end of the run, also where it ended by an error or an interrupt."""

    def keeps(self, problem: Any) -> Kind:
        """What its state may be with this problem, for one that is loaded; anything, where it does not say."""
        return Anything()


def check_callbacks(callbacks: Any, call: str = "fit") -> list[Any]:
    """The callbacks as a list; a plain function is one whose hook is `step`."""
    single = any(callable(getattr(callbacks, hook, None)) for hook in ("start", "step", "end")) or callable(callbacks)
    if single or isinstance(callbacks, str | Mapping) or not iterable(callbacks):
        raise ValueError(f"`{call}(callbacks={shown(callbacks)})`: callbacks must be a list of callbacks: [callback]")
    found = []
    for own in callbacks:
        if isinstance(own, type):
            raise ValueError(
                f"`{call}(callbacks=[{own.__name__}])`: this is a class; pass an instance: {own.__name__}(...)"
            )
        hooks = any(callable(getattr(own, hook, None)) for hook in ("start", "step", "end"))
        if not hooks and not callable(own):
            raise ValueError(
                f"`{call}(callbacks=[{shown(own)}])`: a callback has at least one of start(state), step(record, state) and "
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


def in_order(callbacks: Sequence[Any]) -> list[Any]:
    """As they are called: those that want to see what the others have found come last.

    Examples:
        >>> log, other = Callback(), Callback()
        >>> log.late = True
        >>> in_order([log, other]) == [other, log]
        True
    """
    return sorted(callbacks, key=is_late)


def is_late(callback: Any) -> bool:
    """Whether a callback is called after the others, and also where one of them has raised."""
    return getattr(callback, "late", False) is True
