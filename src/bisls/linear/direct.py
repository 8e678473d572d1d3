"""A Hessian factorised where that pays, and kept as a preconditioner for those that follow."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import inf

import torch
from torch import Tensor

from bisls._check import having, settle
from bisls.linear.base import LinearSolver, Operator, Solution, State
from bisls.linear.cg import CG
from bisls.operators import Learnt, Spent, as_operator, block_rows
from bisls.states import Fields
from bisls.status import Status
from bisls.vector import Vector, norm

ACCURATE = 1e-3  # the relative residual up to which a factorisation is believed
BEGIN, COLUMN = 2.0, 0.25  # what writing a Hessian out costs, in products: at all, and a column
SMALL = 64  # Hessians with at most so many rows are written out at every point: exact for the price of some products
FADE = 0.9  # how fast it is forgotten that doing without was dear


@dataclass(frozen=True)
class Direct(LinearSolver):
    """By Cholesky factorisation where that is cheaper than products, by another solver everywhere else.

    A Hessian of up to 64 rows is written out at every point: solves are exact there. One of up to 1,000 rows may be, by all its
    products in batched calls, and every solve at that point uses the same factorisation. At the points that follow it
    preconditions the other solver, which answers to its own tolerance: what is old costs products, not accuracy; and each
    product made there corrects it. It is made anew where the last point has cost as much as all have on average since (who
    keeps it longer than that loses), or where this point alone has cost as much as writing it out. Where it turned out not to be
    positive definite, twice as much is spent on products before it is written out again. Counted are products; a column of the
    Hessian counts as a quarter of one, since many are made at once.
    Of a Hessian with up to 10,000 rows the diagonal blocks are written out, as a preconditioner alone.

    Where there is no matrix, or it is not positive definite, or the solution is not accurate to 1e-3, the other solver takes
    over, with what it says about negative curvature. What is learnt is kept by whoever hands over the Hessian (a `Solver`, in its
    state), and shared by all that solve with it.

    Args:
        otherwise: The solver for everything else; `CG` can use the preconditioner.

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
        if not hessian.writable:
            return self.otherwise.solve(hessian, b, state)
        memory, price = hessian.memory, BEGIN + COLUMN * b.numel()
        if not hessian.begun:
            hessian.begun, memory.learnt = True, memory.learnt.another()
        if not hessian.written:
            if b.numel() > SMALL and not _due(memory.learnt, price):
                try:
                    return self._by_products(hessian, b, state, _patience(memory.learnt, price))
                except Spent:
                    pass
            memory.learnt = _written(memory.learnt, hessian.factor(), price)
        matrix, factor = hessian.matrix(), hessian.factor()
        if matrix is not None and factor is not None:
            z = torch.cholesky_solve(b[:, None], factor[0])[:, 0]
            scale = norm(b)
            residual = norm(b - matrix @ z) / scale if scale > 0 else 0.0
            if residual <= ACCURATE:
                return Solution(z, residual, Status.OK, state)
        return self._by_products(hessian, b, state)

    def _by_products(self, hessian: Operator, b: Tensor, state: State, price: float = inf) -> Solution:
        """By the other solver, preconditioned by what was learnt; each product teaches, and none beyond the price is made."""
        memory, pairs = hessian.memory, []

        def product(v: Tensor) -> Tensor:
            if memory.learnt.here >= price:
                raise Spent
            memory.learnt = memory.learnt.after(1)
            pairs.append((v.clone(), hessian(v)))
            return pairs[-1][1]

        known = memory.learnt
        try:
            return self.otherwise.solve(
                Operator(product, inverse=None if known.inverse is None else known.applied), b, state
            )
        finally:
            memory.learnt = memory.learnt.corrected(pairs)

    def keeps(self, vector: Vector | None) -> Fields:
        """As the other solver."""
        return self.otherwise.keeps(vector)


def due(learnt: Learnt, n: int) -> bool:
    """Whether a Hessian with n rows is to be written out, in one block, where the next solve begins."""
    return block_rows(n) == n > 0 and (n <= SMALL or _due(learnt, BEGIN + COLUMN * n))


def _due(learnt: Learnt, price: float) -> bool:
    """Whether to write the Hessian out before anything is tried."""
    if learnt.inverse is None:
        return learnt.spent >= _patience(learnt, price)
    return learnt.points > 1 and learnt.last >= (learnt.spent - learnt.here) / (learnt.points - 1)


def _patience(learnt: Learnt, price: float) -> float:
    """What may be spent on products before the Hessian is written out: twice as much after each time that it was for nothing."""
    return price if learnt.inverse is not None else max(price, learnt.last)


def _written(learnt: Learnt, factor: Tensor | None, price: float) -> Learnt:
    """What is known once the Hessian is written out; without a factor, how long to wait until it is tried again."""
    if factor is None:
        return Learnt(points=1, last=2.0 * _patience(learnt, price))
    # what it costs to go without says something only where there was an inverse to go on with
    last = 0.0 if learnt.inverse is None else max(FADE * learnt.last, learnt.here)
    return Learnt(torch.cholesky_inverse(factor), points=1, spent=price, last=last)
