"""What the attacks and tests/test_fuzz.py share: losses of a flat vector, and methods by name."""

from __future__ import annotations

from collections.abc import Callable
from math import inf, nan

import torch
from torch import Tensor

import bisls

LOSSES = (
    "quadratic",
    "far",
    "linear",
    "exponential",
    "negative",
    "double well",
    "flat",
    "quartic",
    "constant",
    "root",
    "logarithm",
    "wall",
    "absolute",
    "cosine",
    "nan",
    "inf",
)


def loss_of(kind: str, z: Tensor) -> Tensor:
    """A scalar of a flat vector: with a minimum, without one, not convex, with a singular Hessian, or not finite."""
    weights = torch.arange(1, z.numel() + 1, dtype=z.dtype)
    match kind:
        case "quadratic":
            return (weights * (z - 0.7) ** 2).sum() + 0.25
        case "far":
            return (weights * (z - 1e4) ** 2).sum()
        case "linear":
            return (weights * z).sum()
        case "exponential":
            return z.exp().sum()
        case "negative":
            return -(weights * z * z).sum()
        case "double well":
            return ((z * z - 1.0) ** 2).sum()
        case "flat":
            return (z.sum() - 1.0) ** 2
        case "quartic":
            return (z**4).sum()
        case "constant":
            return (0.0 * z).sum() + 3.0
        case "root":
            return (z * z).sum().sqrt()
        case "logarithm":
            return -z.log().sum()
        case "wall":
            return torch.where(z.abs() < 0.9, z * z, z * inf).sum()
        case "absolute":
            return (z - 0.3).abs().sum()
        case "cosine":
            return (3.0 * z).cos().sum()
        case "nan":
            return (z * nan).sum()
        case "inf":
            return (z.abs() + inf).sum()
    raise AssertionError(kind)


METHODS: dict[str, Callable[[bisls.Bilevel], bisls.Solver]] = {
    "BiSLS": lambda problem: bisls.BiSLS(problem, lower_iters=3),
    "BiSLS averaged": lambda problem: bisls.BiSLS(problem, lower_iters=3, lower_average=True),
    "BiSLS far starts": lambda problem: bisls.BiSLS(problem, lower_iters=3, alpha=1e20, beta=1e-20),
    "BiSLS no search": lambda problem: bisls.BiSLS(
        problem, lower_iters=3, upper_step=bisls.Constant(1e-3), response=bisls.Frozen()
    ),
    "BiSLS L-BFGS": lambda problem: bisls.BiSLS(problem, lower_iters=3, direction=bisls.LBFGS()),
    "BiSLS unrolled": lambda problem: bisls.BiSLS(problem, lower_iters=3, hypergrad=bisls.Unrolled(3)),
    "BiSLS paper": lambda problem: bisls.BiSLS.paper(problem, lower_iters=3, max_checks=40),
    "BiSPS": lambda problem: bisls.BiSPS(problem, lower_iters=3),
    "BiSPS two": lambda problem: bisls.BiSPS(problem, samples=2, alpha_floor=1e-3, lower_iters=3),
    "Alternating": lambda problem: bisls.Alternating(problem, lower_iters=3),
    "Alternating huge": lambda problem: bisls.Alternating(
        problem, upper_step=bisls.Constant(1e20), lower_step=bisls.Constant(1e20), lower_iters=3
    ),
}
