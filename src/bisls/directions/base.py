"""What a direction takes and gives back."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

State = Mapping[str, Tensor]


@dataclass(frozen=True)
class Heading:
    """Where to look and where to go from a point: points - t * search are tried, point - t * move is taken.

    The two differ only under the paper's Adam, which searches along A^-1 h and moves along A^-1 m.

    Attributes:
        search: The direction that the step rule sees; the slope of its line is ``-<gradient, search>``.
        move: The direction that is taken with the step found.
        state: To be given back with the next gradient (tensors, so that it can be saved).
        weigh: Where the direction learns from an independent batch: (the decrease along ``search`` that its own gradient
            promises, ``<h, d>``; the one that the other batch sees, or None where none was asked) -> (the longest step that it
            allows, the state to give back instead of ``state``).
    """

    search: Tensor
    move: Tensor
    state: State = field(default_factory=dict)
    weigh: Callable[[float, float | None], tuple[float, State]] | None = None


class Direction(Protocol):
    """Turns a gradient into a direction d; the step goes to point - t d."""

    def head(self, gradient: Tensor, point: Tensor, state: State) -> Heading:
        """The direction at a point with this gradient; ``state`` is that of the last heading, or empty."""
        ...


def squared(gradient: Tensor) -> Tensor:
    """The square of each number, in double precision where single precision cannot hold it."""
    square = gradient.square()
    if square.dtype is torch.float64 or bool(torch.isfinite(square.sum())):
        return square
    return gradient.double().square()
