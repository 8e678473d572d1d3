"""A lower step as going back through it needs it: what of y' and of the optimiser's state came from y, g and the state."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace

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
        iterate: The derivative by an iterate that is not y itself; None where there is none.
        spare: Memory of the same form that nobody needs any more, for the next step back; None where there is none.
    """

    y: Tensor
    momentum: Tensor | None = None
    squares: Tensor | None = None
    average: Tensor | None = None
    iterate: Tensor | None = None
    spare: Tensor | None = None

    def whole(self) -> Tensor:
        """All that is owed to y where the steps began: an average, and an iterate that is not y itself, began there as well."""
        others = (own for own in (self.average, self.iterate) if own is not None)
        return sum(others, self.y)


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

    def first(self, steps: int) -> int:
        """The first of so many steps that is looked through."""
        return 0 if self.last is None else max(steps - self.last, 0)


def times(factor: Factor, v: Tensor, room: Tensor | None = None) -> Tensor | None:
    """``factor v``: v itself where the factor is one, None where it is nothing. New memory costs more than the product."""
    return None if _is(factor, 0.0) else v if _is(factor, 1.0) else torch.mul(v, factor, out=room)


def _is(factor: Factor, number: float) -> bool:
    return not isinstance(factor, Tensor) and factor == number


def _sum(one: Tensor | None, two: Tensor | None) -> Tensor | None:
    return two if one is None else one if two is None else one + two


def floored(scale: Tensor, floor: float) -> Tensor:
    """The scaling of one tensor with a floor: so much of its mean, in the square."""
    if floor == 0.0:
        return scale
    squares = scale.square()
    return (squares + floor**2 * squares.mean()).sqrt_()


class Derivative(ABC):
    """One step, to be gone back through."""

    def looks(self, following: Following) -> bool:
        """Whether going back looks at the gradient of the step."""
        return False

    @abstractmethod
    def back(self, after: Adjoint, gradient: Callable[[], Tensor], following: Following) -> tuple[Adjoint, Tensor]:
        """From what is owed to the end of the step to what is owed to its beginning.

        Args:
            after: Owed to y and the state after the step. Its tensors are given away: they may be overwritten, or come back.
            gradient: Gives g, where the step was taken.
            following: What of the state is differentiated.

        Returns:
            What is owed to y (its part through the gradient left out) and to the state before the step; and v, what is owed to
            *minus* the gradient, so that ``g_yy v`` is still to be taken from the former, and ``g_xy v`` from h. v has memory of
            its own.
        """


@dataclass(frozen=True)
class Plain(Derivative):
    """``y' = y - D g``, D settled beforehand.

    Args:
        scale: D.
    """

    scale: Factor

    def back(self, after: Adjoint, gradient: Callable[[], Tensor], following: Following) -> tuple[Adjoint, Tensor]:
        """``v = D l``."""
        return after, torch.mul(after.y, self.scale, out=after.spare)


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

    def looks(self, following: Following) -> bool:
        """Where the mean of squares is followed."""
        return self.squares is not None and following.squares

    def back(self, after: Adjoint, gradient: Callable[[], Tensor], following: Following) -> tuple[Adjoint, Tensor]:
        """Back through the move, the momentum, the squares and the decays."""
        moved = torch.mul(after.y, self.scale, out=after.spare)
        owed = times(self.through, moved)  # to minus m'
        if following.momentum and after.momentum is not None:
            owed = after.momentum if owed is None else after.momentum.add_(owed)
        room = moved if _is(self.own, 0.0) and owed is not moved else None
        p = _sum(times(self.own, moved), None if owed is None else times(self.share, owed, room))  # owed to minus p
        p = torch.zeros_like(moved) if p is None else p
        squares = after.squares
        if self.squares is not None and following.squares:
            own, part = self.squares, self.squares.by_square * after.y
            squares = part if squares is None else squares.add_(part)
            p = p - 2 * (1 - own.b2) * self.sign * gradient() * squares
            squares = squares.mul_(own.b2)
        y = after.y if _is(self.shrink, 1.0) else after.y.mul_(self.shrink)
        if not _is(self.coupled, 0.0):
            y.sub_(self.coupled * p)
        v = p if _is(self.sign, 1.0) else self.sign * p
        held = None
        if following.momentum and owed is not None and not _is(self.keep, 0.0):
            held = self.keep * owed if owed is v else owed.mul_(self.keep)
        return Adjoint(y, held, squares), v


@dataclass(frozen=True)
class Averaged(Derivative):
    """``z' = z - D g``, ``m' = m + w (z' - m)``, ``y' = m' + s (z' - m')``: an iterate, its mean, a point between.

    Args:
        scale: D.
        weight: w, of the new iterate in the mean.
        share: s, of the way from the mean to the iterate.
    """

    scale: Factor
    weight: float
    share: float

    def back(self, after: Adjoint, gradient: Callable[[], Tensor], following: Following) -> tuple[Adjoint, Tensor]:
        """Back through the point, the mean and the iterate."""
        mean = torch.mul(after.y, 1 - self.share, out=after.spare)
        mean = mean if after.average is None else mean.add_(after.average)
        part = torch.mul(mean, self.weight, out=after.average)
        iterate = after.y.mul_(self.share).add_(part)  # owed to z'
        iterate = iterate if after.iterate is None else iterate.add_(after.iterate)
        v = torch.mul(iterate, self.scale, out=after.iterate)
        return Adjoint(part.zero_(), average=mean.mul_(1 - self.weight), iterate=iterate), v


@dataclass(frozen=True)
class Within(Derivative):
    """A step that was cut off where it would have left a set: what was cut off moves y no more.

    Args:
        inner: The step.
        free: Which coordinates were not cut off.
    """

    inner: Derivative
    free: Tensor

    def looks(self, following: Following) -> bool:
        """As the step does."""
        return self.inner.looks(following)

    def back(self, after: Adjoint, gradient: Callable[[], Tensor], following: Following) -> tuple[Adjoint, Tensor]:
        """Nothing is owed through what was cut off."""
        return self.inner.back(replace(after, y=after.y.mul_(self.free)), gradient, following)


@dataclass(frozen=True)
class Probed(Derivative):
    """A step of an optimiser that nobody knows: ``D v`` by a function that tries it.

    Args:
        product: v -> D v, D symmetric.
    """

    product: Callable[[Tensor], Tensor]

    def back(self, after: Adjoint, gradient: Callable[[], Tensor], following: Following) -> tuple[Adjoint, Tensor]:
        """``v = D l``; what the step does to y beside the gradient counts as nothing."""
        return after, self.product(after.y)
