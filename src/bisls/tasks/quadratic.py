"""A bi-level quadratic whose solution is known."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from bisls._check import number, settled, whole_number
from bisls.problem import Bilevel
from bisls.tasks.base import Task, streams
from bisls.tasks.inputs import floating
from bisls.tasks.solve import newton_solve


def quadratic(
    n_upper: int = 5,
    n_lower: int = 8,
    condition: float = 10.0,
    seed: int = 0,
    dtype: torch.dtype = torch.float64,
) -> Task:
    """A random bi-level quadratic with dense coupling, off-centre and anisotropic.

        g(x, y) = 1/2 (y - A x - a)' H (y - A x - a),        so y*(x) = A x + a
        f(x, y) = 1/2 ||B y - b||^2 + 1/2 (x - c)' D (x - c)

    H and D are rotated diagonals whose eigenvalues are spread evenly in the logarithm, from 1 to `condition` and from
    ``1 / condition`` to 1. The vector b is the upper data and a the lower data; f is never negative. `exact` is in closed form,
    and ``metrics()["gap"]`` is F(x) - F*.

    Args:
        n_upper: Numbers in x, at least 1.
        n_lower: Numbers in y, at least 1.
        condition: The condition number of the lower Hessian, at least 1.
        seed: What the problem and its start are drawn from.
        dtype: The precision, torch.float32 or torch.float64.

    Examples:
        >>> task = quadratic(n_upper=3, n_lower=4, seed=1)
        >>> task
        Task(quadratic: Bilevel(upper_params: 1 tensor, 3 numbers; lower_params: 1 tensor, 4 numbers), lower_iters=10)
        >>> task.metrics()["gap"] > 0.1
        True
    """
    n_upper = settled("quadratic", "n_upper", n_upper, whole_number(1))
    n_lower = settled("quadratic", "n_lower", n_lower, whole_number(1))
    condition = settled("quadratic", "condition", condition, number("[1, inf)", "must be a finite number, at least 1"))
    floating("quadratic", dtype)
    (rng,) = streams("quadratic", seed, 1)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=rng, dtype=torch.float64).to(dtype)

    def rotated(size: int, low: float, high: float) -> Tensor:
        basis, _ = torch.linalg.qr(normal(size, size))
        return basis @ torch.diag(torch.logspace(math.log10(low), math.log10(high), size, dtype=dtype)) @ basis.T

    lower_hessian, upper_hessian = rotated(n_lower, 1.0, condition), rotated(n_upper, 1.0 / condition, 1.0)
    response, offset = normal(n_lower, n_upper) / math.sqrt(n_upper), normal(n_lower)
    view, target = normal(n_lower, n_lower) / math.sqrt(n_lower), normal(n_lower)
    centre = normal(n_upper)
    x, y = normal(n_upper).requires_grad_(), normal(n_lower).requires_grad_()

    def lower_loss(batch: tuple[Tensor, ...]) -> Tensor:
        gap = y - response @ x - batch[0]
        return 0.5 * gap @ (lower_hessian @ gap)

    def upper_loss(batch: tuple[Tensor, ...]) -> Tensor:
        away = x - centre
        return 0.5 * ((view @ y - batch[0]) ** 2).sum() + 0.5 * away @ (upper_hessian @ away)

    # F(x) = 1/2 ||M x - m||^2 + 1/2 (x - c)' D (x - c), from the very numbers that the losses use
    chain = view.double() @ response.double()
    aim = target.double() - view.double() @ offset.double()
    curvature = chain.T @ chain + upper_hessian.double()
    best = newton_solve(curvature, chain.T @ aim + upper_hessian.double() @ centre.double())

    @torch.no_grad()
    def exact() -> float:
        away = x.double() - centre
        return float(0.5 * ((chain @ x.double() - aim) ** 2).sum() + 0.5 * away @ (upper_hessian.double() @ away))

    @torch.no_grad()
    def metrics() -> dict[str, float]:
        away = x.double() - best
        return {"gap": float(0.5 * away @ (curvature @ away))}

    problem = Bilevel(upper_loss, lower_loss, [x], [y])
    return Task("quadratic", problem, (target,), (offset,), lower_iters=10, exact=exact, metrics=metrics)
