"""Conjugate gradients."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from bisls._check import FLAG, number, settle, whole_number
from bisls.linear.base import LinearSolver, Operator, Solution, State
from bisls.operators import Inverse
from bisls.states import Fields, Kind, Numbers, flat
from bisls.status import Status
from bisls.vector import Vector, dot, finite, norm

MOST = 1e150  # the largest s: its products must be numbers
ROUGH = 0.01  # a relative residual above this is too much for a hypergradient


@dataclass(frozen=True)
class CG(LinearSolver):
    r"""Conjugate gradients for H z = b with H symmetric positive definite.

    It stops when ``||b - H z|| <= tol ||b||``. Each iteration costs one Hessian product and nothing else does: the residual
    reported is that of the z returned, taken from the products already made. Where a search direction p has
    ``<p, H p> <= 0`` the solve stops with the last iterate and says `Status.NEGATIVE_CURVATURE`; or, damped, it begins again
    with H + s I, s from the curvature met (`Status.DAMPED`): that is how the minimiser of ``g + s/2 ||y - y_k||^2`` near the
    present y_k responds, and y_k is no minimiser of g where H is not positive definite. The next solve begins with half the s.
    An operator that brings an approximate inverse with it (`Direct` sees to that) is preconditioned by it: other iterates, fewer
    of them, and the same test at the end.

    Args:
        iters: Most iterations, at least 1; damped, at least ten more for each new s.
        tol: Relative residual at which to stop, at least 0. In single precision anything below 1e-6 means "as far as it goes".
        warm: Start from the solution of the previous, similar system (one more product).
        damp: Where H is not positive definite, solve with H + s I.
        stretch: Where the residual is above 1e-2 after ``iters``, and there still is progress, go on: up to so many times
            ``iters``, at least 1. A solution that is too rough may point uphill.

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
    damp: bool = False
    stretch: int = 1

    def __post_init__(self) -> None:
        settle(self, iters=whole_number(1), stretch=whole_number(1), warm=FLAG, damp=FLAG)
        settle(self, tol=number("[0, inf)", "must be at least 0"))

    def solve(self, hessian: Operator, b: Tensor, state: State) -> Solution:
        """Solve H z = b."""
        scale, inverse = norm(b), getattr(hessian, "inverse", None)
        if scale == 0.0:
            return Solution(torch.zeros_like(b), 0.0, Status.OK, state)
        # Hz is kept beside z: the residual of what is returned costs no further product, and r alone would drift from it
        z, hz = torch.zeros_like(b), torch.zeros_like(b)
        if self.warm and "z" in state and state["z"].shape == b.shape:
            guess = hessian(state["z"])
            if norm(b - guess) <= scale:  # otherwise it is worse than nothing
                z, hz = state["z"].clone(), guess.clone()
        damping = min(float(state["damping"]) / 2, MOST) if self.damp and "damping" in state else 0.0
        status, left, known = Status.NEGATIVE_CURVATURE, self.iters, 0.0
        while True:
            most = max(left, 10) if known else left
            status, used, curvature, largest = self._iterate(hessian, inverse, b, z, hz, damping, most)
            left, known = left - used, max(known, largest)
            if not (self.damp and status is Status.NEGATIVE_CURVATURE and known > 0):
                break
            damping = max(2.0 * abs(curvature), 4.0 * damping, 1e-3 * known)
            if not damping < MOST:  # no number is large enough
                break
            z, hz = torch.zeros_like(b), torch.zeros_like(b)
        if damping > 0 and status in (Status.OK, Status.MAX_ITERS):
            status = Status.DAMPED
        kept = {**state, **({"z": z.clone()} if self.warm and finite(z) else {})}
        if self.damp and (damping > 0 or "damping" in state):
            small = damping < 1e-6 * known or not damping < MOST  # nothing was met for a long time
            kept["damping"] = torch.tensor(0.0 if small else damping, dtype=torch.float64)
        return Solution(z, norm(b - hz) / scale, status, kept)

    def keeps(self, vector: Vector | None) -> Fields:
        """The last solution, where it is to begin there, and the last s."""
        warm: dict[str, Kind] = {"z": flat(vector)} if self.warm else {}
        damped: dict[str, Kind] = {"damping": Numbers((), (torch.float64,), least=0.0)} if self.damp else {}
        return Fields(optional={**warm, **damped})

    def _iterate(
        self,
        hessian: Operator,
        inverse: Inverse | None,
        b: Tensor,
        z: Tensor,
        hz: Tensor,
        damping: float,
        iters: int,
    ) -> tuple[Status, int, float, float]:
        """Improve z, and Hz with it, in place. Returns also the products made, the last and the largest curvature met."""
        scale, eps, most = norm(b), torch.finfo(b.dtype).eps, torch.finfo(b.dtype).max
        r = b - hz if not damping else b - hz - damping * z
        rr = dot(r, r)
        s, rs, inverse = _preconditioned(r, rr, inverse)
        p = s.clone()
        pp = rr if inverse is None else dot(p, p)
        largest, gained, mark = 0.0, 0.0, 0.0
        for used in range(iters * self.stretch):
            if rr**0.5 <= self.tol * scale:
                return Status.OK, used, 0.0, largest
            if used and used % iters == 0:
                # the residual may rise on the way; <z, H z> / 2 - <z, b> falls with every iteration
                if rr**0.5 <= ROUGH * scale or gained - mark <= 1e-4 * gained:
                    return Status.MAX_ITERS, used, 0.0, largest
                mark = gained
            hp = hessian(p)
            curvature, length = dot(p, hp), norm(hp)
            if not abs(curvature) < float("inf"):
                return Status.NON_FINITE, used + 1, curvature, largest
            largest = max(largest, length / pp**0.5)
            damped = curvature + damping * pp
            # this is zero curvature up to the rounding of the product
            if damped <= max(eps * pp**0.5 * length, 1e-2 * damping * pp):
                return Status.NEGATIVE_CURVATURE, used + 1, curvature / pp, largest
            a = rs / damped
            if not a < most:  # as good as no curvature: not a number of this precision
                return Status.NEGATIVE_CURVATURE, used + 1, 0.0, largest
            gained += a * rs
            z.add_(p, alpha=a)
            hz.add_(hp, alpha=a)
            r.sub_(hp, alpha=a)
            if damping:
                r.sub_(p, alpha=a * damping)
            rr, before = dot(r, r), rs
            s, rs, kept = _preconditioned(r, rr, inverse)
            if kept is not inverse:  # it was not positive definite: from here on without it
                p.zero_()
            inverse = kept
            if not rs / before < most:  # it diverges
                return Status.NON_FINITE, used + 1, 0.0, largest
            torch.add(s, p, alpha=rs / before, out=p)
            # without a preconditioner r is orthogonal to the p before
            pp = rr + (rs / before) ** 2 * pp if inverse is None else dot(p, p)
        return Status.OK if rr**0.5 <= self.tol * scale else Status.MAX_ITERS, iters * self.stretch, 0.0, largest


def _preconditioned(r: Tensor, rr: float, inverse: Inverse | None) -> tuple[Tensor, float, Inverse | None]:
    """The residual as the preconditioner sees it, and their inner product; one that is not positive there is given up."""
    if inverse is not None:
        s = inverse(r)
        rs = dot(r, s)
        if 0.0 < rs < float("inf") and finite(s):
            return s, rs, inverse
    return r, rr, None
