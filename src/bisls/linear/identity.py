"""The identity in place of the inverse."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from bisls._check import require
from bisls.linear.base import Operator, Solution, State
from bisls.record import Status


@dataclass(frozen=True)
class Identity:
    """z = scale * b: the inverse Hessian replaced by a multiple of the identity. No product is made.

    Args:
        scale: A positive number. It multiplies the implicit part of the hypergradient, so it changes what an upper step means.

    Examples:
        >>> import torch
        >>> Identity(0.5).solve(lambda v: v, torch.tensor([2.0, -6.0]), {}).z
        tensor([ 1., -3.])
    """

    scale: float = 1.0

    def __post_init__(self) -> None:
        require(self, "scale", 0 < self.scale < float("inf"), "must be positive and finite")

    def solve(self, hessian: Operator, b: Tensor, state: State) -> Solution:
        """Return scale * b. The residual is not known (it would cost a product)."""
        return Solution(b * self.scale, float("nan"), Status.OK, state)
