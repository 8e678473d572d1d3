"""Losses so small, or so large, that no number holds their squared gradients: seen in units in which both are near 1.

The unit u is a power of two, so nothing is rounded. In units of u a loss is ``f / u``, its gradient ``g / u``, and a step along
it is u times as long as along g itself: a rule that does not care about the scale of a loss takes the same steps.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import frexp, inf, isfinite
from typing import Any

import torch
from torch import Tensor

from bisls.line import Line
from bisls.status import Status
from bisls.steps.base import Memory, Step

LEAST, MOST = 1e-200, 1e200  # squared gradient norms between these need no unit
LARGEST = 1e308


def unit_of(sizes: list[float]) -> float:
    """The power of two above the largest of some norms; 1 where there is none."""
    largest = max(sizes, default=0.0)
    if not 0.0 < largest < inf:
        return 1.0
    return 2.0 ** min(max(frexp(largest)[1], -1000), 1000)


def norm_of(tensor: Tensor) -> float:
    """The norm of a tensor, in double precision, whose squares need not be numbers."""
    peak = tensor.detach().abs().max().item() if tensor.numel() else 0.0
    if not 0.0 < peak < inf:
        return peak
    return float(torch.linalg.vector_norm(tensor.detach().double() / peak).item() * peak)


def options(group: dict[str, Any], unit: float) -> dict[str, Any]:
    """The numbers that a rule is made of, in units."""
    if unit == 1.0:
        return group
    own = {**group, "lr": min(max(float(group["lr"]) * unit, 5e-324), LARGEST)}
    if group.get("f_min") is not None:
        own["f_min"] = min(max(group["f_min"] / unit, -LARGEST), LARGEST)
    return own


def chosen(choose: Callable[[Line, Memory], Step], line: Line, memory: Memory, unit: float) -> Step:
    """The step of a rule that sees a line in units; the line's slope is in units already, its value and its steps are not.

    A step that is no number outside of them is none.
    """
    if unit == 1.0:
        return choose(line, memory)
    at = line.at
    own = replace(line, value=line.value / unit, at=lambda t: at(t / unit) / unit, max_step=line.max_step * unit)
    step = choose(own, _times(memory, unit))
    kept = _times(step.memory, 1.0 / unit)
    size, value = step.size / unit, None if step.value is None else step.value * unit
    if not isfinite(size):
        return Step(0.0, memory, step.checks, Status.STATIONARY)
    return replace(step, size=size, memory=kept, value=value)


def _times(memory: Memory, factor: float) -> Memory:
    """The remembered steps in other units."""

    def longer(step: float) -> float:
        return min(step * factor, LARGEST)

    notes = {name: longer(note) if name == "begin" else note for name, note in memory.notes.items()}
    return Memory(memory.k, None if memory.step is None else longer(memory.step), notes)
