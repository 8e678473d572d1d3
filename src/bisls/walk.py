"""A run with nothing set: an iterate, its average, Adam's scaling and the pace. The same walk serves both levels."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from math import isfinite, sqrt
from typing import Any

import torch
from torch import Tensor

from bisls.derivatives import floored
from bisls.pace import B2, SHARE, WORSE, Pace
from bisls.states import Number, counter, flat
from bisls.vector import Vector, dot, norm

VECTORS = ("point", "z", "average", "start", "squares")
EPS = 1e-8  # added to a root, in units of the gradient


@dataclass(frozen=True)
class Scaled:
    """A gradient in the metric of a walk.

    Attributes:
        direction: d, the gradient over the scaling.
        square: ``<g, d>``.
        scale: The scaling a.
        unit: What the gradient was divided by: the unit of the walk, and more for an outlier.
        usual: Its squared norm as it counts.
        norm: Its norm.
    """

    direction: Tensor
    square: float
    scale: Tensor
    unit: float
    usual: float
    norm: float

    def floor_(self, vector: Vector, floor: float) -> Tensor:
        """The scaling with a floor, so much of its mean over each tensor, in the square: written over it."""
        if floor > 0.0:
            for part in vector.split(self.scale):
                part.copy_(floored(part, floor))
        return self.scale


@dataclass(frozen=True)
class Room:
    """Memory that a step may write into, all of it like the point; None, wherever it is, stands for new memory.

    Attributes:
        one: For what is of use within the step alone.
        two: The same.
        squares: For the running mean of squared gradients; it may be the present one.
        scale: For the scaling.
        z: For the iterate.
        average: For the average.
        point: For the point.
    """

    one: Tensor | None = None
    two: Tensor | None = None
    squares: Tensor | None = None
    scale: Tensor | None = None
    z: Tensor | None = None
    average: Tensor | None = None
    point: Tensor | None = None


NEW = Room()


@dataclass(frozen=True)
class Walk:
    """Where a run is: ``z <- z - gamma d``, the average a weighted mean of the z's, the point between the two.

    Attributes:
        point: Where gradients are taken; what the parameters hold.
        z: The iterate.
        average: The average.
        start: Where the run began.
        squares: The running mean of squared gradients, in units.
        seen: How many they are of.
        unit: What gradients are measured in; 0 before the first.
        pace: How long the steps are.
    """

    point: Tensor
    z: Tensor
    average: Tensor
    start: Tensor
    squares: Tensor
    seen: int = 0
    unit: float = 0.0
    pace: Pace = field(default_factory=Pace)

    @classmethod
    def begin(cls, point: Tensor) -> Walk:
        """A run that begins here."""
        return cls(point, point, point, point, torch.zeros_like(point))

    def moved_to(self, point: Tensor) -> Walk:
        """After somebody else has moved the parameters: iterate and average go with them."""
        if point is self.point or torch.equal(point, self.point):
            return self
        shift = point - self.point
        return replace(self, point=point, z=self.z + shift, average=self.average + shift)

    def anew(self, point: Tensor) -> Walk:
        """Another path from another point, with the pace and the scaling of this one."""
        return replace(self, point=point, z=point, average=point)

    def died(self, loss: float) -> Walk:
        """After a gradient that was exactly zero."""
        return replace(self, pace=self.pace.died(loss))

    def lost(self) -> Walk:
        """Back to the start, with a shorter step."""
        begun = Walk.begin(self.start)
        return replace(begun, pace=self.pace.anew(), unit=self.unit)

    def pardoned(self, began: float) -> Walk:
        """After losses that were above the first one, where today's is not above that at the start today."""
        return replace(self, pace=replace(self.pace, first_loss=began, above=0))

    def shorter(self) -> Walk:
        """With a tenth of the step."""
        return replace(self, pace=replace(self.pace, ceiling=0.1 * self.pace.ceiling))

    def learn(self, gradient: Tensor, room: Room = NEW) -> tuple[Walk, Scaled]:
        """The squares of a gradient join the mean; the gradient in the metric."""
        size = norm(gradient)
        if self.unit and self.pace.outlying((size / self.unit) ** 2):
            begun = replace(Walk.begin(self.point), start=self.start, pace=self.pace.forgotten())
            return begun.learn(gradient, room)
        unit = self.unit or (size / sqrt(gradient.numel()) or 1.0)
        length = (size / unit) ** 2
        usual = self.pace.usual(length)
        tamed = unit * (sqrt(length / usual) if usual > 0 else 1.0)
        own, seen = torch.div(gradient, tamed, out=room.one), self.seen + 1
        square = torch.mul(own, own, out=room.two)
        squares = torch.lerp(self.squares, square, 1 - B2, out=room.squares)
        scale = torch.div(squares, 1 - B2**seen, out=room.scale).sqrt_().add_(EPS)
        d = torch.div(own, scale, out=square)
        return replace(self, squares=squares, seen=seen, unit=unit), Scaled(d, dot(own, d), scale, tamed, usual, size)

    def step(
        self, scaled: Scaled, bent: Callable[[Tensor, Tensor, float], Tensor] | None = None, room: Room = NEW
    ) -> tuple[Walk, float, float]:
        """One step: the walk after it, its size, and the weight of its end in the average.

        Args:
            scaled: The gradient.
            bent: (point, direction, size) -> the direction that stays inside a set.
            room: Where to write.
        """
        size, weight, pace = self.pace.stepped(scaled.square, scaled.usual)
        d = scaled.direction if bent is None else bent(self.z, scaled.direction, size)
        return replace(self.moved(d, size, weight, room), pace=pace), size, weight

    def moved(self, d: Tensor, size: float, weight: float, room: Room = NEW) -> Walk:
        """After a step of such a size along d whose end has such a weight in the average."""
        z = torch.mul(d, size, out=room.z)
        z = torch.sub(self.z, z, out=z)
        average = torch.lerp(self.average, z, weight, out=room.average)
        return replace(self, point=torch.lerp(average, z, SHARE, out=room.point), z=z, average=average)

    def voted(self, here: float, at_average: float, worse: float = WORSE) -> Walk:
        """After a look at the average on the batch of the point; a value that is not finite says nothing."""
        return replace(self, pace=self.pace.voted(here, at_average if isfinite(at_average) else here, worse))

    def begun(self, step: float) -> Walk:
        """With the step that is best for the first batch."""
        return replace(self, pace=self.pace.begun(step))

    def at(self, point: Tensor, scale: Tensor | None, loss: float) -> Walk:
        """After a step: where it led, its loss, and how far the average has come in the metric of a scaling, if one is given."""
        pace = self.pace
        if scale is not None:
            away = self.average - self.start
            reached = sqrt(max(dot(away, away * scale), 0.0))
            pace = replace(pace, distance=max(pace.distance, reached))
        return replace(self, point=point, pace=pace.noted(loss))

    @property
    def vectors(self) -> dict[str, Tensor]:
        """All that is like a point."""
        return {name: getattr(self, name) for name in VECTORS}

    def packed(self) -> dict[str, Any]:
        """Tensors and numbers, for a checkpoint."""
        return {**self.vectors, "seen": torch.tensor(self.seen), "unit": self.unit, "pace": self.pace.packed()}

    @classmethod
    def unpacked(cls, state: Mapping[str, Any]) -> Walk:
        """What `packed` gave; other entries are left alone."""
        vectors = {name: state[name] for name in VECTORS}
        return cls(**vectors, seen=int(state["seen"]), unit=state["unit"], pace=Pace.unpacked(state["pace"]))

    @staticmethod
    def kind(vector: Vector | None) -> dict[str, Any]:
        """What `packed` gives, for a state that is loaded."""
        here = {name: flat(vector) for name in ("point", "z", "average", "start")}
        own = {"squares": flat(vector, least=0.0), "seen": counter(), "unit": Number(0.0), "pace": Pace.KIND}
        return {**here, **own}
