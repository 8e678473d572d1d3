"""A lower step as going back through it needs it: what of y' and of the optimiser's state came from y, g and the state."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

Factor = Tensor | float  # one number, or one for each coordinate


@dataclass(frozen=True)
class Adjoint:
    """What the upper loss owes to a lower point and to the state of what trains it.

    Attributes:
        y: The derivative by y.
        momentum: The derivative by minus the momentum; None where there is none.
        squares: The derivative by the mean of squared gradients; None where nobody follows it.
        average: The derivative by an average of iterates; None where there is none.
    """

    y: Tensor
    momentum: Tensor | None = None
    squares: Tensor | None = None
    average: Tensor | None = None

    def whole(self) -> Tensor:
        """All that is owed to y where the steps began: an average, and an iterate that is not y itself, began there as well."""
        if self.average is None:
            return self.y
        return self.y + self.average if self.momentum is None else self.y + self.average - self.momentum


@dataclass(frozen=True)
class Following:
    """How much of the optimiser's state is differentiated; the rest of it is held still.

    Attributes:
        momentum: The momentum, which is linear in the gradients.
        squares: Adam's mean of squared gradients too.
        floor: A scaling counts as no smaller than so much of its mean over its tensor: where gradients have hardly ever been
            seen, a step is scaled up by far more than it can be trusted.
        last: How many of the last steps are looked through; None: all.
    """

    momentum: bool = True
    squares: bool = False
    floor: float = 0.0
    last: int | None = None

    @staticmethod
    def of(trace: Following | bool) -> Following | None:
        """What somebody who asks for a trace wants: True is what is usual, False nothing."""
        return Following() if trace is True else trace or None

    def sees(self, left: int) -> bool:
        """Whether a step is looked through when so many, itself among them, are left."""
        return self.last is None or left <= self.last


def floored(scale: Tensor, floor: float) -> Tensor:
    """The scaling of one tensor with a floor: so much of its mean, in the square."""
    if floor == 0.0:
        return scale
    squares = scale.square()
    return (squares + floor**2 * squares.mean()).sqrt_()


class Derivative(ABC):
    """One step, to be gone back through."""

    @abstractmethod
    def back(self, after: Adjoint, gradient: Tensor, following: Following) -> tuple[Adjoint, Tensor]:
        """From what is owed to the end of the step to what is owed to its beginning.

        Args:
            after: Owed to y and the state after the step.
            gradient: g, where the step was taken.
            following: What of the state is differentiated.

        Returns:
            What is owed to y (its part through the gradient left out) and to the state before the step; and v, what is owed to
            *minus* the gradient, so that ``g_yy v`` is still to be taken from the former, and ``g_xy v`` from h.
        """


@dataclass(frozen=True)
class Plain(Derivative):
    """``y' = y - D g``, D settled beforehand.

    Args:
        scale: D.
    """

    scale: Factor

    def back(self, after: Adjoint, gradient: Tensor, following: Following) -> tuple[Adjoint, Tensor]:
        """``v = D l``."""
        return after, self.scale * after.y


@dataclass(frozen=True)
class Squares:
    """The part of an Adam step that comes from its mean of squared gradients, ``V' = b2 V + (1 - b2) p^2``.

    Args:
        b2: How long they are remembered.
        by_square: The derivative of y' by V'.
    """

    b2: float
    by_square: Tensor


@dataclass(frozen=True)
class Momentum(Derivative):
    """``p = c g + w y``, ``m' = b m + s p``, ``y' = k y - D (n p + r m')``: the form of torch's SGD, Adam, AdamW and RMSprop.

    Args:
        scale: D.
        keep: b.
        share: s.
        own: n, by which p moves y itself (1 without momentum, and in Nesterov's way).
        through: r, by which the momentum moves it.
        sign: c, -1 where the loss is maximised.
        coupled: w, a decay that is part of the gradient.
        shrink: k, a decay that is not.
        squares: Where V' is known as well; there is no coupled decay then.
    """

    scale: Factor
    keep: Factor = 0.0
    share: Factor = 1.0
    own: Factor = 1.0
    through: Factor = 0.0
    sign: Factor = 1.0
    coupled: Factor = 0.0
    shrink: Factor = 1.0
    squares: Squares | None = None

    def back(self, after: Adjoint, gradient: Tensor, following: Following) -> tuple[Adjoint, Tensor]:
        """Back through the move, the momentum, the squares and the decays."""
        moved = self.scale * after.y
        owed = self.through * moved  # to minus m'
        if following.momentum and after.momentum is not None:
            owed = owed + after.momentum
        p = self.own * moved + self.share * owed  # owed to minus p
        squares = after.squares
        if self.squares is not None and following.squares:
            own, part = self.squares, self.squares.by_square * after.y
            squares = part if squares is None else squares + part
            p = p - 2 * (1 - own.b2) * self.sign * gradient * squares
            squares = own.b2 * squares
        y = self.shrink * after.y - self.coupled * p
        held = self.keep * owed if following.momentum else None
        return Adjoint(y, held, squares), self.sign * p


@dataclass(frozen=True)
class Averaged(Derivative):
    """``z' = z - c g / a``, ``m' = m + w (z' - m)``, ``y' = m' + s (z' - m')``: an iterate, its mean, a point between.

    ``momentum`` of an adjoint is what is owed to minus z here.

    Args:
        size: c.
        weight: w, of the new iterate in the mean.
        share: s, of the way from the mean to the iterate.
        scale: a.
    """

    size: float
    weight: float
    share: float
    scale: Factor = 1.0

    @property
    def factor(self) -> Factor:
        """c / a, by which the gradient moves the iterate."""
        return self.size / self.scale

    def back(self, after: Adjoint, gradient: Tensor, following: Following) -> tuple[Adjoint, Tensor]:
        """Back through the point, the mean and the iterate."""
        mean = (1 - self.share) * after.y
        mean = mean if after.average is None else mean + after.average
        iterate = self.share * after.y + self.weight * mean  # owed to z'
        iterate = iterate if after.momentum is None else iterate - after.momentum
        return Adjoint(torch.zeros_like(after.y), -iterate, None, (1 - self.weight) * mean), self.factor * iterate


@dataclass(frozen=True)
class Within(Derivative):
    """A step that was cut off where it would have left a set: what was cut off moves y no more.

    Args:
        inner: The step.
        free: Which coordinates were not cut off.
    """

    inner: Derivative
    free: Tensor

    def back(self, after: Adjoint, gradient: Tensor, following: Following) -> tuple[Adjoint, Tensor]:
        """Nothing is owed through what was cut off."""
        kept = Adjoint(after.y * self.free, after.momentum, after.squares, after.average)
        return self.inner.back(kept, gradient, following)


@dataclass(frozen=True)
class Probed(Derivative):
    """A step of an optimiser that nobody knows: ``D v`` by a function that tries it.

    Args:
        product: v -> D v, D symmetric.
    """

    product: Callable[[Tensor], Tensor]

    def back(self, after: Adjoint, gradient: Tensor, following: Following) -> tuple[Adjoint, Tensor]:
        """``v = D l``; what the step does to y beside the gradient counts as nothing."""
        return after, self.product(after.y)
