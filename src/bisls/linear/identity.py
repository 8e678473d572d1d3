"""The identity in place of the inverse."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from bisls._check import POSITIVE, settle
from bisls.linear.base import LinearSolver, Operator, Solution, State
from bisls.states import Fields
from bisls.status import Status
from bisls.vector import Vector


@dataclass(frozen=True)
class Identity(LinearSolver):
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
        settle(self, scale=POSITIVE)

    def solve(self, hessian: Operator, b: Tensor, state: State) -> Solution:
        """Return scale * b. The residual is not known (it would cost a product)."""
        return Solution(b * self.scale, float("nan"), Status.OK, state)

    def keeps(self, vector: Vector | None) -> Fields:
        """Nothing."""
        return Fields()
