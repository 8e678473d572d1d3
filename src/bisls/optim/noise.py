"""How far noise lets each tensor go: the distance it has come, over what its own gradients add up to.

Kept with each parameter: ``noise``, the sum of <g, d>; ``metric``, the mean of a that it is measured in; ``distance``, how far
the average has been from the start in that metric; ``share``, its last step over the common one.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf, sqrt
from typing import Any

from bisls.optim import scaling

REACH = 2.2  # the step that noise allows, in units of distance / sqrt(sum of squared gradients)
JUMP = 0.25  # of what was summed before
NONE: dict[str, float] = {"noise": 0.0, "metric": 0.0, "distance": 0.0, "share": 1.0}  # nothing known yet

State = dict[str, Any]


def jumped(states: Sequence[State], squares: Sequence[float]) -> bool:
    """Whether a gradient is so large beside those so far, or the first, that the metric will have changed with it."""
    return any(square > JUMP * state["noise"] for state, square in zip(states, squares, strict=True))


def note(states: Sequence[State], squares: Sequence[float], metrics: Sequence[float] | None) -> None:
    """Add this step's <g, d>; with new metrics, what was summed before is put into them first."""
    for i, (state, square) in enumerate(zip(states, squares, strict=True)):
        if metrics is not None:
            state["noise"] *= scaling.growth(state["metric"], metrics[i])
            state["metric"] = metrics[i]
        state["noise"] += square


def common(states: Sequence[State], first: float = 0.0) -> float:
    """The step that noise allows all of them together; ``first`` stands for the distance where none is known."""
    total = sum(state["noise"] for state in states)
    away = sqrt(sum(state["distance"] * state["distance"] for state in states)) or first
    return REACH * away / sqrt(total) if total > 0.0 else inf


def shares(states: Sequence[State], squares: Sequence[float], ceiling: float, step: float) -> list[float]:
    """The step of each tensor, which its own noise and the ceiling allow, over the common one; it is kept with it."""
    for state, square in zip(states, squares, strict=True):
        away = state["distance"] or ceiling * sqrt(square)
        own = min(ceiling, REACH * away / sqrt(state["noise"])) if state["noise"] > 0.0 else step
        state["share"] = own / step if step > 0.0 else 1.0
    return [state["share"] for state in states]


def went(states: Sequence[State], distances: Sequence[float]) -> None:
    """How far the averages are from the start now."""
    for state, away in zip(states, distances, strict=True):
        state["distance"] = max(state["distance"], away)
