"""The state of a solver: what a saved one may be, and how it is read before anything is changed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from bisls.operators import Learnt
from bisls.problem import Bilevel
from bisls.states import Anything, Batch, Each, Fields, Maybe, Whole, point, read
from bisls.trend import Trend
from bisls.views import Choice, View

# What came to the state after others had been saved, and what a state without it stands for.
LATER: Mapping[str, Any] = {
    "trend": Trend().packed(),
    "choice": Choice().packed(),
    "learnt": Learnt().packed(),
    "steady": 0,
}


@dataclass(frozen=True)
class StateReader:
    """Reads states of one composition.

    Args:
        call: Who loads, for messages.
        identity: What tells the method from another.
        problem: The problem.
        view: The parts.
    """

    call: str
    identity: str
    problem: Bilevel
    view: View

    def keeps(self) -> Fields:
        """What a state may be."""
        x, y = self.problem.x, self.problem.y
        points = (point(x, self.problem.upper_bounds), point(y, self.problem.lower_bounds))
        return Fields(
            {
                "k": Whole(),
                "upper": self.view.upper.keeps(x, y, self.view.hypergrad),
                "lower": self.view.lower.keeps(y),
                "hypergrad": self.view.hypergrad.keeps(y),
                "trend": Trend.KIND,
                "choice": Choice.KIND,
                "learnt": Learnt.keeps(y),
                "steady": Whole(),
                "failures": Whole(),
                "last_batch": Batch(),
                "good": Maybe(Each(points)),
            },
            rest=Anything(),
        )

    def read(self, state: Any) -> dict[str, Any]:
        """A copy of a state, with defaults for what came to it later.

        Raises:
            ValueError: It is the state of another method or another problem, or none at all.
        """
        call, keeps = f"`{self.call}.load_state_dict(...)`", self.keeps()
        if not isinstance(state, Mapping):
            raise ValueError(f"{call}: must be what state_dict() gave, got {type(state).__name__}")
        state = {**LATER, **state}
        missing = sorted({"method", *keeps.needed} - set(state))
        if missing:
            raise ValueError(f"{call}: not the state of a solver, it lacks {missing}")
        if not isinstance(state["method"], str) or state["method"] != self.identity:
            raise ValueError(
                f"{call}: the state is of another method, {state['method']}; this one is {self.identity}. Nothing was loaded"
            )
        good, x, y = state["good"], self.problem.x, self.problem.y
        sizes = [own.numel() for own in good if isinstance(own, Tensor)] if isinstance(good, list | tuple) else []
        if len(sizes) == 2 and sizes != [x.numel, y.numel]:
            raise ValueError(
                f"{call}: the state is of a problem with {sizes[0]} upper and {sizes[1]} lower parameters, this one has "
                f"{x.numel} and {y.numel}"
            )
        own: dict[str, Any] = read(call, keeps, state)
        try:
            own["lower"] = self.view.lower.checked(own["lower"]) if own["lower"] else {}
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{call}: state['lower'] is not usable ({error}); nothing was loaded") from error
        return own
