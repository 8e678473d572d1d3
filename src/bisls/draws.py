"""The batches of one outer iteration, drawn from the data of a run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from bisls.batches import same
from bisls.feed import Exhausted, Feed
from bisls.randomness import random_state, set_random_state
from bisls.ranks import on_any_rank


class Drawn(NamedTuple):
    """What `Solver.step` is called with.

    Attributes:
        upper: The upper batch.
        lower: A batch for each lower step, or one for all.
        judge: An upper batch that judges the step; None where the solver has one, or has no use for it.
        extra: Lower batches that no lower step sees.
    """

    upper: Any
    lower: Any
    judge: Any
    extra: list[Any]

    def step(self, solver: Any) -> Any:
        """One iteration of a solver on these."""
        more = {"extra_batches": self.extra} if self.extra else {}
        return solver.step(self.upper, self.lower, self.judge, **more)


class Draws:
    """Draws the batches of one iteration after another.

    How many are taken depends on the solver alone, never on what an iteration does with them: so a place in the data is a number
    of iterations.

    Args:
        solver: Says how many lower batches it takes, and whether a judge is of use.
        feeds: The data by name: "upper", "lower" and, where there is one, "step".
    """

    def __init__(self, solver: Any, feeds: Mapping[str, Feed]):
        self.solver, self.feeds = solver, feeds
        self.endless = not on_any_rank(not all(own.endless for own in feeds.values()))[0]
        # on all ranks or on none: with several batches on one of them, all see their noise
        single = [own.whole or is_single(own.data) for own in feeds.values()]
        self.noisy = on_any_rank(len(feeds) > 2 or not all(single))[0]
        self._watched = not self.noisy and on_any_rank(not all(own.whole for own in feeds.values()))[0]
        self._before: dict[str, Any] = {}

    def take(self) -> Drawn | str:
        """The next batches; why there are none, with the random state and the places as before, where the data have ended."""
        before = None if self.endless else random_state()
        drawn, end = None, None
        for own in () if self.endless else self.feeds.values():
            own.mark()
        try:
            drawn = self._take()
        except Exhausted as ended:
            end = ended
        if before is not None and on_any_rank(end is not None)[0]:
            set_random_state(before)
            for own in self.feeds.values():
                own.back()
            return str(end or "the data of another rank have ended")
        assert drawn is not None
        self._compare(drawn)
        return drawn

    def _take(self) -> Drawn:
        upper, lower, step = self.feeds["upper"], self.feeds["lower"], self.feeds.get("step")
        first = upper.take()
        one = lower.whole or self.solver.problem.lower_start is not None  # a start of its own: one batch, for all steps
        rest = lower.take() if one else [lower.take() for _ in range(self.solver.lower_iters)]
        extra = [] if lower.whole else [lower.take() for _ in range(extra_batches(self.solver))]
        # with one batch for every step there is no other that could judge it
        judge = step.take() if step else first if upper.whole and takes_judge(self.solver) else None
        return Drawn(first, rest, judge, extra)

    def _compare(self, drawn: Drawn) -> None:
        """A loader of one batch may shuffle it, or change its rows: then there is noise after all."""
        if not self._watched:
            return
        lower = [*drawn.lower, *drawn.extra] if isinstance(drawn.lower, list) else [drawn.lower]
        now = {"upper": [drawn.upper], "lower": lower}
        changed = any(
            not same(own[0], one) for name, own in now.items() for one in [*own[1:], *self._before.get(name, ())]
        )
        self._before = {name: own[:1] for name, own in now.items()}
        if on_any_rank(changed)[0]:
            self.noisy, self._watched, self._before = True, False, {}


def is_single(data: Any) -> bool:
    """Whether an epoch of these data is one batch: a loader over a data set with a length."""
    try:
        return not hasattr(data, "__next__") and hasattr(data, "__iter__") and len(data) == 1
    except TypeError:
        return False


def extra_batches(solver: Any) -> int:
    """How many lower batches a solver takes beside those of its lower steps."""
    return int(getattr(solver, "extra_batches", 0))


def takes_judge(solver: Any) -> bool:
    """Whether an independent upper batch is of use to a solver."""
    return bool(getattr(solver, "two_samples", True))


def number_type(problem: Any) -> torch.dtype | None:
    """The type of the numbers that arrays become: that of the lower parameters, where they have one."""
    found = {tensor.dtype for tensor in problem.y.tensors}
    return found.pop() if len(found) == 1 else None


def check_two(one: Any, other: Any, names: tuple[str, str] = ("upper_data", "lower_data")) -> None:
    """Refuse one loader for two purposes where it can be iterated over only once at a time."""
    saves = all(callable(getattr(one, name, None)) for name in ("state_dict", "load_state_dict"))
    alone = getattr(one, "persistent_workers", False) or saves
    if one is other and alone and not hasattr(one, "__next__") and not callable(one):
        shown = f"{type(one).__name__}(...)"
        raise ValueError(
            f"`fit({names[0]}={shown}, {names[1]}={shown})`: the two would share one loader, and each new epoch of one would "
            "disturb the other; make a loader for each"
        )
