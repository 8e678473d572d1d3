"""Conjugate gradients."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from bisls._check import require
from bisls.linear.base import Operator, Solution, State
from bisls.record import Status
from bisls.vector import dot, norm


@dataclass(frozen=True)
class CG:
    r"""Conjugate gradients for H z = b with H symmetric positive definite.

    It stops when ||b - H z|| <= tol ||b||. Each iteration costs one Hessian product and nothing else does: the residual
    reported is that of the z returned, taken from the products already made. Where a search direction p has
    <p, H p> <= 0 the solve stops with the last iterate and says `Status.NEGATIVE_CURVATURE`.

    Args:
        iters: Most iterations, at least 1.
        tol: Relative residual at which to stop, at least 0. In single precision anything below 1e-6 means "as far as it goes".
        warm: Start from the solution of the previous, similar system (one more product).

    Examples:
        >>> import torch
        >>> h = torch.tensor([[4.0, 1.0], [1.0, 3.0]], dtype=torch.float64)
        >>> solution = CG(iters=10).solve(lambda v: h @ v, torch.tensor([1.0, 2.0], dtype=torch.float64), {})
        >>> solution.z * 11, solution.status.name
        (tensor([1., 7.], dtype=torch.float64), 'OK')
    """

    iters: int = 50
    tol: float = 1e-10
    warm: bool = False

    def __post_init__(self) -> None:
        require(self, "iters", self.iters >= 1, "must be at least 1")
        require(self, "tol", self.tol >= 0, "must be at least 0")

    def solve(self, hessian: Operator, b: Tensor, state: State) -> Solution:
        """Solve H z = b."""
        scale = norm(b)
        if scale == 0.0:
            return Solution(torch.zeros_like(b), 0.0, Status.OK, state)
        # Hz is kept beside z: the residual of what is returned costs no further product, and r alone would drift from it
        z, hz, r = torch.zeros_like(b), torch.zeros_like(b), b.clone()
        if self.warm and "z" in state and state["z"].shape == b.shape:
            guess = hessian(state["z"])
            if norm(b - guess) <= scale:  # otherwise it is worse than nothing
                z, hz, r = state["z"].clone(), guess.clone(), b - guess
        p = r.clone()
        rr = dot(r, r)
        pp = rr
        eps = torch.finfo(b.dtype).eps
        status = Status.MAX_ITERS
        for _ in range(self.iters):
            if rr**0.5 <= self.tol * scale:
                status = Status.OK
                break
            hp = hessian(p)
            curvature = dot(p, hp)
            if not abs(curvature) < float("inf"):
                status = Status.NON_FINITE
                break
            # this is zero curvature up to the rounding of the product
            if curvature <= eps * pp**0.5 * norm(hp):
                status = Status.NEGATIVE_CURVATURE
                break
            a = rr / curvature
            z.add_(p, alpha=a)
            hz.add_(hp, alpha=a)
            r.sub_(hp, alpha=a)
            rr, before = dot(r, r), rr
            torch.add(r, p, alpha=rr / before, out=p)
            pp = rr + (rr / before) ** 2 * pp  # r is orthogonal to the p before
        else:
            if rr**0.5 <= self.tol * scale:
                status = Status.OK
        return Solution(z, norm(b - hz) / scale, status, {**state, "z": z.clone()} if self.warm else state)
