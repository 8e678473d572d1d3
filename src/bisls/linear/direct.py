"""A small Hessian factorised, a large one by products."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from bisls._check import having, settle
from bisls.linear.base import LinearSolver, Operator, Solution, State
from bisls.linear.cg import CG
from bisls.operators import as_operator
from bisls.states import Fields
from bisls.status import Status
from bisls.vector import Vector, norm

ACCURATE = 1e-3  # the relative residual up to which a factorisation is believed


@dataclass(frozen=True)
class Direct(LinearSolver):
    """By Cholesky factorisation where H is small and can be written out at once, by another solver everywhere else.

    A Hessian of up to 64 rows is written out, by all its products in one batched call, and every solve at that point uses
    the same factorisation. Where there is no matrix, or it is not positive definite, or the solution is not accurate to 1e-3,
    the other solver takes over, with what it says about negative curvature.

    Args:
        otherwise: The solver for everything else.

    Examples:
        >>> import torch
        >>> h = torch.tensor([[4.0, 1.0], [1.0, 3.0]])
        >>> Direct().solve(lambda v: h @ v, torch.tensor([1.0, 2.0]), {}).z  # no matrix to be had: by products
        tensor([0.0909, 0.6364])
    """

    otherwise: LinearSolver = field(default_factory=lambda: CG(tol=1e-3, iters=50))

    def __post_init__(self) -> None:
        settle(self, otherwise=having(LinearSolver, "must be a linear solver such as CG()"))

    def solve(self, hessian: Operator, b: Tensor, state: State) -> Solution:
        """Solve H z = b."""
        hessian = as_operator(hessian)
        matrix, factor = hessian.matrix(), hessian.factor()
        if matrix is not None and factor is not None:
            z = torch.cholesky_solve(b[:, None], factor)[:, 0]
            scale = norm(b)
            residual = norm(b - matrix @ z) / scale if scale > 0 else 0.0
            if residual <= ACCURATE:
                return Solution(z, residual, Status.OK, state)
        return self.otherwise.solve(hessian, b, state)

    def keeps(self, vector: Vector | None) -> Fields:
        """As the other solver."""
        return self.otherwise.keeps(vector)
