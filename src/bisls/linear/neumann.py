"""The truncated Neumann series."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from bisls._check import number, optional, settle, whole_number
from bisls.linear.base import LinearSolver, Operator, Solution, State
from bisls.states import Fields, flat
from bisls.status import Status
from bisls.vector import Vector, dot, finite, norm


@dataclass(frozen=True)
class Neumann(LinearSolver):
    """The truncated Neumann series ``z = s sum_(j<terms) (I - s H)^j b``.

    The error falls as (1 - s mu)^terms, mu the smallest curvature, as long as s < 2 / L, L the largest. A term costs one
    product; what is left over, (I - s H)^terms b, is the residual itself. The terms of a series that converges never grow:
    where one does, the sum before it is returned with `Status.DIVERGED`. (If the scale was estimated, the estimate was too
    small: the series is begun again with half the scale.)

    Args:
        terms: Number of terms, at least 1.
        scale: s; None estimates 1 / L by power iteration, warm-started from the previous solve.

    Examples:
        >>> import torch
        >>> h = torch.tensor([[4.0, 1.0], [1.0, 3.0]])
        >>> Neumann(terms=60, scale=0.2).solve(lambda v: h @ v, torch.tensor([1.0, 2.0]), {}).z
        tensor([0.0909, 0.6364])
    """

    terms: int = 10
    scale: float | None = None

    def __post_init__(self) -> None:
        settle(self, terms=whole_number(1), scale=optional(number("(0, inf)", "must be positive, or None")))

    def solve(self, hessian: Operator, b: Tensor, state: State) -> Solution:
        """Sum the series."""
        size = norm(b)
        if size == 0.0:
            return Solution(torch.zeros_like(b), 0.0, Status.OK, state)
        if self.scale is not None:
            return self._sum(hessian, b, size, self.scale, state)
        curvature, vector = largest_curvature(hessian, b, state.get("vector"))
        state = {**state, "vector": vector}
        if not 0 < curvature < float("inf"):
            status = Status.NON_FINITE if curvature != curvature else Status.NEGATIVE_CURVATURE
            return Solution(torch.zeros_like(b), 1.0, status, state)
        solution = self._sum(hessian, b, size, 1.0 / curvature, state)
        for halvings in (1, 2, 3):
            if solution.status is not Status.DIVERGED:
                break
            solution = self._sum(hessian, b, size, 0.5**halvings / curvature, state)
        if solution.status is Status.DIVERGED:  # at an eighth of 1 / L only negative curvature makes terms grow
            return replace(solution, status=Status.NEGATIVE_CURVATURE)
        return solution

    def keeps(self, vector: Vector | None) -> Fields:
        """Where the next power iteration begins."""
        return Fields(optional={} if self.scale is not None else {"vector": flat(vector)})

    def _sum(self, hessian: Operator, b: Tensor, size: float, scale: float, state: State) -> Solution:
        z = torch.zeros_like(b)
        term, length = b.clone(), size
        for _ in range(self.terms):
            after = term - scale * hessian(term)
            longer = norm(after)
            if not longer < float("inf"):
                return Solution(z, length / size, Status.NON_FINITE, state)
            if longer > length * (1 + 1e-3):
                return Solution(z, length / size, Status.DIVERGED, state)
            z.add_(term, alpha=scale)
            term, length = after, longer
        return Solution(z, length / size, Status.OK, state)


def largest_curvature(
    hessian: Operator, like: Tensor, vector: Tensor | None = None, iters: int = 8
) -> tuple[float, Tensor]:
    """The largest curvature of a symmetric operator, a little high on purpose, by power iteration.

    Args:
        hessian: v -> H v.
        like: A vector of the right shape; with no ``vector`` it is where the iteration begins.
        vector: The one that an earlier call returned; two iterations are enough then.
        iters: Iterations when begun from nothing.

    Returns:
        1.1 times the estimate (power iteration comes from below; a series or a step of 1/L wants to be on the safe side),
        and the vector to begin from next time (zero for none). Negative where the operator is negative along the vector found.
    """
    warm = vector is not None and vector.shape == like.shape and bool(vector.any())
    v = vector if warm and vector is not None else like
    if not warm:
        # b alone may be orthogonal to the leading eigenvector; a fixed, structureless part makes that impossible in practice
        generator = torch.Generator(device=v.device).manual_seed(0)
        noise = torch.randn(v.shape, generator=generator, dtype=v.dtype, device=v.device)
        v = v + noise * (norm(v) / norm(noise) if norm(v) > 0 else 1.0)
    v = v / norm(v)
    curvature = 0.0
    for _ in range(2 if warm else iters):
        hv = hessian(v)
        curvature, length = dot(v, hv), norm(hv)
        if not 0 < length < float("inf"):
            return (0.0 if length == 0 else float("nan")), v if finite(v) else torch.zeros_like(v)
        v = hv / length
        curvature = max(curvature, length) if curvature > 0 else curvature
    return 1.1 * curvature, v
