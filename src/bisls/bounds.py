"""Where a variable may go: boxes, simplices, and the direction that stays inside."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
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

    def free(self, flat: Tensor, vector: Vector) -> Tensor | None:
        """A point of the set in coordinates of its own that have no bounds, for a long walk; None where it has none."""
        return None

    def placed(self, free: Tensor, vector: Vector) -> Tensor:
        """The point of the set that belongs to such coordinates; where there are none, the nearest point."""
        return self.project(free, vector)

    def pulled(self, flat: Tensor, gradient: Tensor, vector: Vector) -> Tensor:
        """A gradient by such coordinates; where there are none, the gradient."""
        return gradient

    def bend(self, point: Tensor, direction: Tensor, reach: float, vector: Vector) -> Tensor:
        """A direction d whose ray ``point - t d`` stays inside the set up to ``t = reach``.

        By default ``(point - P(point - reach direction)) / reach``. The set is convex and the point inside it, so every shorter
        step stays inside as well. A set with a geometry of its own may lay its rays towards another point of it.

        Args:
            point: Where the ray begins, inside the set.
            direction: What it would be without bounds; the step is taken against it.
            reach: How far, above 0.
            vector: Knows the shapes.
        """
        target = point - reach * direction
        nearest = self.project(target, vector)
        # where nothing is in the way the direction itself, not a difference that rounding may swallow
        return torch.where(nearest == target, direction, (point - nearest) / reach)


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


@dataclass(frozen=True)
class Simplex(Bounds):
    """Weights: in each parameter tensor ``v >= floor`` and ``sum v = 1``.

    As ``upper_bounds`` it is for mixtures: of sources of data, of losses, of operations. Rays are laid by exponentiated steps,

        v'_i = v_i exp(-t d_i) / sum_j v_j exp(-t d_j),    t the reach,

    brought back above the floor: x moves along the chord from v to v'. Such steps are as long for a weight of 0.01 as for one
    of 0.9, relative to it. The floor keeps every weight alive: one that is 0 has no gradient of its own to come back by.

    Args:
        floor: The least that a weight may be, in [0, 1); times the size of the tensor it must be below 1.

    Examples:
        >>> import torch
        >>> simplex = Simplex(floor=0.1)
        >>> weights = Vector([torch.zeros(3)])
        >>> simplex.project(torch.tensor([0.7, 0.9, -2.0]), weights)
        tensor([0.3500, 0.5500, 0.1000])
        >>> simplex.bend(torch.tensor([0.2, 0.3, 0.5]), torch.tensor([0.0, 0.0, 1.0]), 0.5, weights)
        tensor([-0.0980, -0.1470,  0.2449])
    """

    floor: float = 1e-3

    def __post_init__(self) -> None:
        settle(self, floor=number("[0, 1)"))

    def project(self, flat: Tensor, vector: Vector) -> Tensor:
        """The nearest weights; those that are weights already, up to rounding, as they are."""
        return vector.join([self._nearest(part.reshape(-1)) for part in vector.split(flat)])

    def free(self, flat: Tensor, vector: Vector) -> Tensor:
        """The logarithms of the weights."""
        return torch.log(flat.clamp(min=max(self.floor, torch.finfo(flat.dtype).tiny)))

    def placed(self, free: Tensor, vector: Vector) -> Tensor:
        """The softmax, brought back above the floor."""
        parts = (torch.softmax(part.reshape(-1).double(), 0).to(part) for part in vector.split(free))
        return self.project(vector.join(list(parts)), vector)

    def pulled(self, flat: Tensor, gradient: Tensor, vector: Vector) -> Tensor:
        """``v_i (g_i - <v, g>)``: steps along it are exponentiated steps in the weights."""
        pairs = zip(vector.split(flat), vector.split(gradient), strict=True)
        return vector.join([v * (g - (v * g).sum()) for v, g in pairs])

    def bend(self, point: Tensor, direction: Tensor, reach: float, vector: Vector) -> Tensor:
        """The chord to where an exponentiated step of length ``reach`` leads."""
        chords = []
        for part, along in zip(vector.split(point), vector.split(direction), strict=True):
            # with all digits: the difference is divided by a reach that may be small; rounding may have left the set
            own = part.reshape(-1).double().clamp(min=self.floor)
            own = own / own.sum()
            end = self._nearest(torch.softmax(torch.log(own) - reach * along.reshape(-1).double(), 0))
            chords.append(((own - end) / reach).to(part))
        return vector.join(chords)

    def _nearest(self, own: Tensor) -> Tensor:
        count, eps = own.numel(), torch.finfo(own.dtype).eps
        if count == 0:
            return own
        require(self, "floor", self.floor * count < 1, f"times the size of the parameter ({count}) must be below 1")
        low = own.new_tensor(self.floor)
        if bool((own >= low).all()) and abs(float(own.double().sum()) - 1) <= max(4, count) * eps:
            return own
        # subtract the one number that leaves a sum of 1 where what falls below the floor is held there
        above = own.double() - self.floor
        mass = 1 - self.floor * count
        ordered = above.sort(descending=True).values
        excess = (ordered.cumsum(0) - mass) / torch.arange(1, count + 1, device=own.device)
        kept = int((ordered > excess).sum())
        free = (above - excess[max(kept, 1) - 1]).clamp(min=0)
        free = free * (mass / free.sum())  # from far away the difference has lost digits
        return torch.maximum((free + self.floor).to(own), low)


@dataclass(frozen=True)
class Kinks(Bounds):
    """No bounds, but what an L1 term holds at zero: such coordinates do not respond, as those on a bound do not.

    Args:
        weights: The weight of the absolute value of each coordinate, flat; one of weight 0 is never held.
    """

    weights: Callable[[], Tensor]

    def project(self, flat: Tensor, vector: Vector) -> Tensor:
        """Every point is allowed."""
        return flat

    def held(self, flat: Tensor, gradient: Tensor, vector: Vector) -> Tensor:
        """What is exactly zero, where the lower problem has been solved."""
        return (flat == 0) & (self.weights() > 0)


def inside(bounds: Bounds | None, point: Tensor, direction: Tensor, reach: float, vector: Vector) -> Tensor:
    """A direction whose ray stays inside the set up to ``reach``, see `Bounds.bend`; where there is no set, the direction."""
    return direction if bounds is None else bounds.bend(point, direction, reach, vector)
