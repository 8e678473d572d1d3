"""One way to evaluate a loss: values, gradients and products of second derivatives, whoever computes them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bisls.still import Moment
from bisls.vector import Vector

SMALL = 64  # a Hessian with no more rows than this is written out
Parts = Sequence[Tensor | None]  # shaped like parameters; None counts as zero


class Evaluated(NamedTuple):
    """A loss and its gradient at one point.

    Attributes:
        value: Gives the loss; where it comes from a tape it is computed only if somebody asks.
        grad: The gradient, one part for each parameter.
        moment: The random state before the loss was called; None where nothing is drawn.
    """

    value: Callable[[], Tensor]
    grad: Parts
    moment: Moment | None


class Products(ABC):
    """g, its gradient in y and products of its second derivatives, all at one point (x, y) and on one batch.

    Attributes:
        value: g.
        grad: Its gradient in y.
        moment: The random state before the loss was called; None where nothing is drawn.
        random: Whether the loss has drawn random numbers.
    """

    value: Tensor
    grad: Parts
    moment: Moment | None = None
    random: bool = False

    @abstractmethod
    def hessian(self, v: Sequence[Tensor]) -> Parts:
        """``g_yy v``, for tensors like y."""

    @abstractmethod
    def mixed(self, v: Sequence[Tensor]) -> Parts:
        """``g_xy v``, for tensors like y."""

    @abstractmethod
    def mixed_transposed(self, d: Sequence[Tensor]) -> Parts:
        """``g_yx d``, for tensors like x."""

    def columns(self, units: Sequence[Tensor]) -> Parts:
        """The columns of ``g_yy``, stacked along the first axis: at once, or one by one where an operation has no rule for that.

        The two differ in their last bits, so which of them it is depends on the loss alone, not on who evaluates it.

        Args:
            units: The unit vectors, shaped like y, stacked along the first axis (`unit_vectors`).
        """
        found = self.together(units)
        if found is not None:
            return found
        products = [self.hessian(one) for one in zip(*units, strict=True)]
        return [
            torch.stack([torch.zeros_like(own[0]) if part is None else part for part in parts])
            for own, parts in zip(units, zip(*products, strict=True), strict=True)
        ]

    @abstractmethod
    def together(self, units: Sequence[Tensor]) -> Parts | None:
        """The columns of ``g_yy`` by one batched call; None where an operation has no rule for that."""


class UpperLoss(ABC):
    """The upper loss f at the present parameters."""

    @abstractmethod
    def value(self, batch: Any, replay: Moment | None) -> Tensor:
        """f as a probe: no graph, no trace; with the random numbers of a moment where one is given."""

    @abstractmethod
    def point(self, batch: Any) -> Evaluated:
        """f and its gradient in all parameters, the upper ones first."""


class LowerLoss(ABC):
    """The lower loss g at the present x.

    Where a y is given and the loss itself has to be called, y is written into the parameters first. ``held`` is a token: as
    long as it is the same object, x stays as it is.
    """

    @abstractmethod
    def value(self, batch: Any, y: Tensor | None, replay: Moment | None, held: object | None) -> Tensor:
        """g as a probe."""

    @abstractmethod
    def point(self, batch: Any, y: Tensor | None, replay: Moment | None, held: object | None) -> Evaluated:
        """g and its gradient in y; nothing is recorded of x. A probe where there is a moment to replay."""

    @abstractmethod
    def graph(self, batch: Any, replay: Moment | None) -> Products:
        """Everything at the present (x, y). A probe where there is a moment to replay."""


def unit_vectors(vector: Vector) -> list[Tensor] | None:
    """All unit vectors, shaped like the parameters and stacked along the first axis; None where there are too many of them."""
    if vector.numel > SMALL or not vector.alike:
        return None
    eye = torch.eye(vector.numel, dtype=vector.dtype, device=vector.device)
    parts = torch.split(eye, vector.sizes, 1)
    return [p.reshape(vector.numel, *t.shape) for p, t in zip(parts, vector.tensors, strict=True)]


class Outdated(Exception):
    """What was kept of a loss can't be used any more: the loss itself is to be called."""
