"""Where a variable may go: boxes, and the direction that stays inside."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from math import inf
from typing import Any

import torch
from torch import Tensor

from bisls._check import Wanted, Wrong, number, require, settle
from bisls.vector import Vector


class Bounds(ABC):
    """A closed convex set, known by its projection."""

    @abstractmethod
    def project(self, flat: Tensor, vector: Vector) -> Tensor:
        """The nearest point of the set to a flat vector; ``vector`` knows the shapes (``vector.split(flat)``)."""

    def held(self, flat: Tensor, gradient: Tensor, vector: Vector) -> Tensor | None:
        """Which coordinates sit on a bound that the descent direction would cross; None where that is not known."""
        return None


def _side(value: Any) -> Any:
    if not isinstance(value, list | tuple):
        return number("[-inf, inf]").read(value)
    if not value or not all(isinstance(tensor, Tensor) and tensor.is_floating_point() for tensor in value):
        raise Wrong
    if any(bool(tensor.isnan().any()) for tensor in value):
        raise Wrong("one of them has NaN")
    return value


_SIDE = Wanted("must be a number, or a list of tensors shaped like the parameters, none of it NaN", _side)


@dataclass(frozen=True)
class Box(Bounds):
    """``low <= v <= high`` in every coordinate.

    Args:
        low: A number, or one tensor for each parameter, shaped like it; -inf for none.
        high: The same above; inf for none.

    Examples:
        >>> import torch
        >>> box = Box(low=0.0, high=1.0)
        >>> box.project(torch.tensor([-0.5, 0.25, 3.0]), Vector([torch.zeros(3)]))
        tensor([0.0000, 0.2500, 1.0000])
    """

    low: Any = -inf
    high: Any = inf

    def __post_init__(self) -> None:
        settle(self, low=_SIDE, high=_SIDE)
        if isinstance(self.low, int | float) and isinstance(self.high, int | float):
            require(self, "low", self.low < self.high, f"must be below high ({self.high!r})")

    def project(self, flat: Tensor, vector: Vector) -> Tensor:
        """Clip each coordinate."""
        low, high = self._sides(flat, vector)
        return torch.minimum(torch.maximum(flat, low), high)

    def held(self, flat: Tensor, gradient: Tensor, vector: Vector) -> Tensor:
        """Which coordinates sit on a bound that the descent direction would cross."""
        low, high = self._sides(flat, vector)
        return ((flat <= low) & (gradient > 0)) | ((flat >= high) & (gradient < 0))

    def _sides(self, flat: Tensor, vector: Vector) -> tuple[Tensor, Tensor]:
        def side(value: Any) -> Tensor:
            if isinstance(value, int | float):
                return flat.new_tensor(value)
            if len(value) != len(vector.tensors) or any(
                v.shape != t.shape for v, t in zip(value, vector.tensors, strict=True)
            ):
                shapes = [tuple(t.shape) for t in vector.tensors]
                raise ValueError(f"`Box(...)`: one tensor for each parameter is needed, shaped {shapes}")
            return vector.join(list(value)).to(flat)

        return side(self.low), side(self.high)


def inside(bounds: Bounds | None, point: Tensor, direction: Tensor, reach: float, vector: Vector) -> Tensor:
    """A direction whose ray stays inside the set up to ``reach``: ``(point - P(point - reach d)) / reach``.

    The set is convex and the point inside it, so every shorter step stays inside as well.
    """
    if bounds is None:
        return direction
    target = point - reach * direction
    nearest = bounds.project(target, vector)
    # where nothing is in the way the direction itself, not a difference that rounding may swallow
    return torch.where(nearest == target, direction, (point - nearest) / reach)
