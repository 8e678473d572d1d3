"""Where a variable may go: boxes, and the direction that stays inside."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from typing import Any, Protocol

import torch
from torch import Tensor

from bisls._check import require
from bisls.vector import Vector


class Bounds(Protocol):
    """A closed convex set, known by its projection."""

    def project(self, flat: Tensor, vector: Vector) -> Tensor:
        """The nearest point of the set to a flat vector; ``vector`` knows the shapes (``vector.split(flat)``)."""
        ...


@dataclass(frozen=True)
class Box:
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
        for name in ("low", "high"):
            side = getattr(self, name)
            holds = isinstance(side, int | float | list | tuple) and not isinstance(side, bool)
            rule = "must be a number, or a list of tensors shaped like the parameters"
            require(self, name, holds, rule)
            for tensor in side if isinstance(side, list | tuple) else ():
                real = isinstance(tensor, Tensor) and tensor.is_floating_point()
                require(self, name, real and not bool(tensor.isnan().any()), f"{rule}, none of it NaN")
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
