"""The gradient itself."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from bisls.directions.base import Direction, Heading, State
from bisls.states import Fields
from bisls.vector import Vector


@dataclass(frozen=True)
class Steepest(Direction):
    """d = h: the gradient itself."""

    @property
    def plain(self) -> bool:
        """It is."""
        return True

    def head(self, gradient: Tensor, point: Tensor, state: State) -> Heading:
        """The gradient, twice."""
        return Heading(gradient, gradient, state, scale=lambda: 1.0)

    def keeps(self, vector: Vector | None) -> Fields:
        """Nothing."""
        return Fields()
