"""The gradient itself."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from bisls.directions.base import Heading, State


@dataclass(frozen=True)
class Steepest:
    """d = h: the gradient itself."""

    def head(self, gradient: Tensor, point: Tensor, state: State) -> Heading:
        """The gradient, twice."""
        return Heading(gradient, gradient, state)
