"""What a direction takes and gives back."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from bisls.derivatives import Derivative, Following, Plain
from bisls.states import FREE, Fields, Numbers, flat
from bisls.vector import Vector

State = Mapping[str, Tensor]


@dataclass(slots=True)  # not frozen: one is made at every lower step, and freezing it costs more than all else of it
class Heading:
    """Where to look and where to go from a point: points - t * search are tried, point - t * move is taken.

    The two differ only under the paper's Adam, which searches along A^-1 h and moves along A^-1 m.

    Attributes:
        search: The direction that the step rule sees; the slope of its line is ``-<gradient, search>``.
        move: The direction that is taken with the step found.
        state: To be given back with the next gradient (tensors, so that it can be saved).
        unsearched: The heading for a step that was settled beforehand, if it is another: Adam turns back from a momentum that
            ascends only where somebody searches along it.
        scale: Gives what a change of the gradient is multiplied with in ``move``, the state held still: a number, or one for each
            coordinate. None where ``move`` is not linear in the gradient like this.
        derivative: (The step size, what of the state is followed) -> the step as going back through it needs it, where ``scale``
            does not say all: momentum that comes from earlier gradients, squares of them. None: ``scale`` stands for it.
        weigh: Where the direction learns from an independent batch: (the decrease along ``search`` that its own gradient
            promises, ``<h, d>``; the one that the other batch sees, or None where none was asked) -> (the longest step that it
            allows, the state to give back instead of ``state``).
    """

    search: Tensor
    move: Tensor
    state: State = field(default_factory=dict)
    weigh: Callable[[float, float | None], tuple[float, State]] | None = None
    unsearched: Heading | None = None
    scale: Callable[[], Tensor | float] | None = None
    derivative: Callable[[float, Following], Derivative] | None = None

    def back(self, size: float, following: Following) -> Derivative | None:
        """The derivative of a step of this size; None where nobody knows it."""
        if self.derivative is not None:
            return self.derivative(size, following)
        return None if self.scale is None else Plain(size * self.scale())


class Direction(ABC):
    """Turns a gradient into a direction d; the step goes to point - t d."""

    @abstractmethod
    def head(self, gradient: Tensor, point: Tensor, state: State) -> Heading:
        """The direction at a point with this gradient; ``state`` is that of the last heading, or empty."""

    @property
    def plain(self) -> bool:
        """Whether it is the gradient itself, always: then a loop of many short steps need not ask."""
        return False

    def keeps(self, vector: Vector | None) -> Fields:
        """What its state may be for these parameters (None: any), where one is loaded; anything, where it does not say."""
        return FREE


def squared(gradient: Tensor) -> Tensor:
    """The square of each number, in double precision where single precision cannot hold it."""
    square = gradient.square()
    if square.dtype is torch.float64 or bool(torch.isfinite(square.sum())):
        return square
    return gradient.double().square()


def squares(vector: Vector | None) -> Numbers:
    """What a mean of `squared` gradients may be."""
    return flat(vector, least=0.0, **({"dtypes": (vector.dtype, torch.float64)} if vector else {}))
