"""The Hessian written out and factorised: for small problems and for tests."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from bisls._check import settle, whole_number
from bisls.linear.base import LinearSolver, Operator, Solution, State
from bisls.states import Fields
from bisls.status import Status
from bisls.vector import Vector, norm


@dataclass(frozen=True)
class Dense(LinearSolver):
    """H written out, one product a column, then a Cholesky factorisation.

    A Hessian that is not positive definite is said (`Status.NEGATIVE_CURVATURE`) and solved by LU; a singular one
    (`Status.SINGULAR`) by least squares.

    Args:
        max_size: Refuse larger lower problems than this many numbers; n products and n^2 memory are for small n.

    Examples:
        >>> import torch
        >>> h = torch.tensor([[4.0, 1.0], [1.0, 3.0]])
        >>> Dense().solve(lambda v: h @ v, torch.tensor([1.0, 2.0]), {}).z
        tensor([0.0909, 0.6364])
    """

    max_size: int = 5000

    def __post_init__(self) -> None:
        settle(self, max_size=whole_number(1))

    def solve(self, hessian: Operator, b: Tensor, state: State) -> Solution:
        """Solve H z = b."""
        n = b.numel()
        if n > self.max_size:
            raise ValueError(
                f"`Dense(max_size={self.max_size})`: the lower problem has {n:,} numbers; use `CG()`, or allow that size"
            )
        h = torch.stack([hessian(column) for column in torch.eye(n, dtype=b.dtype, device=b.device)])
        h = (h + h.T) / 2
        if not torch.isfinite(h).all():
            return Solution(torch.zeros_like(b), float("nan"), Status.NON_FINITE, state)
        factor, info = torch.linalg.cholesky_ex(h)
        if int(info) == 0:
            z, status = torch.cholesky_solve(b[:, None], factor)[:, 0], Status.OK
        else:
            status = Status.NEGATIVE_CURVATURE
            z, info = torch.linalg.solve_ex(h, b)
        spectrum = torch.linalg.eigvalsh(h).abs()
        if int(info) != 0 or spectrum.min() <= n * torch.finfo(b.dtype).eps * spectrum.max():
            z, status = torch.linalg.pinv(h, hermitian=True) @ b, Status.SINGULAR
        scale = norm(b)
        return Solution(z, norm(b - h @ z) / scale if scale > 0 else 0.0, status, state)

    def keeps(self, vector: Vector | None) -> Fields:
        """Nothing."""
        return Fields()
