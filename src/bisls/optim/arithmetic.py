"""The arithmetic on lists of tensors that every step-size optimiser shares; each takes ``foreach``, False for one by one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

SAFE = 10.0  # a change that leads out of no precision's range: half of the last place of the largest half is 16


@dataclass(frozen=True)
class Ray:
    """A direction through the parameters. A step t along it is ``p <- p - t ratio d`` (plus, where the objective is maximised).

    Attributes:
        params: The parameters that move.
        tensors: d, one for each.
        ratios: Of each parameter's step to the common one.
        norms: ||d|| of each.
        slope: Of the loss along it, both in units.
        unit: What the loss and d are measured in: 1, unless no number holds their squares.
    """

    params: list[Tensor]
    tensors: list[Tensor]
    ratios: list[float]
    norms: list[float]
    slope: float
    unit: float = 1.0

    @property
    def square(self) -> float:
        """The sum of ratio ||d||^2, in units."""
        return sum(r * (n / self.unit) * (n / self.unit) for r, n in zip(self.ratios, self.norms, strict=True))


def norms_of(tensors: list[Tensor], foreach: bool | None) -> list[Tensor]:
    """The norm of each, at least in single precision."""
    if not tensors:
        return []
    wide = [torch.promote_types(tensor.dtype, torch.float32) for tensor in tensors]
    if foreach is not False and len(set(wide)) == 1:
        return list(torch._foreach_norm(tensors, 2, dtype=wide[0]))
    return [torch.linalg.vector_norm(tensor, dtype=dtype) for tensor, dtype in zip(tensors, wide, strict=True)]


def doubles(scalars: Sequence[Tensor]) -> Tensor:
    """Scalars as one tensor in double precision; those of one type are widened together, not one by one."""
    if len({scalar.dtype for scalar in scalars}) == 1:
        return torch.stack(list(scalars)).double()
    return torch.stack([scalar.double() for scalar in scalars])


def dot(left: Tensor, right: Tensor) -> Tensor:
    """<left, right> in double precision."""
    return torch.dot(left.detach().double().reshape(-1), right.detach().double().reshape(-1))


def add_(params: list[Tensor], tensors: list[Tensor], factors: list[float], foreach: bool | None) -> None:
    """params <- params + factor * tensor."""
    if max(map(abs, factors), default=0.0) > SAFE and any(
        abs(factor) > torch.finfo(p.dtype).max for p, factor in zip(params, factors, strict=True)
    ):
        # a factor that the precision cannot hold, times a gradient so small that the product can be
        for p, tensor, factor in zip(params, tensors, factors, strict=True):
            p.copy_(p.double().add_(tensor.double(), alpha=factor))
    elif len(set(factors)) == 1:
        if foreach is not False:
            torch._foreach_add_(params, tensors, alpha=factors[0])
            return
        for p, tensor in zip(params, tensors, strict=True):
            p.add_(tensor, alpha=factors[0])
    elif foreach is False:  # rounded twice, as together
        for p, tensor, factor in zip(params, tensors, factors, strict=True):
            p.add_(tensor * factor)
    elif params:
        torch._foreach_add_(params, torch._foreach_mul(tensors, factors))


def lerp_(tensors: list[Tensor], ends: list[Tensor], shares: list[float], foreach: bool | None) -> None:
    """tensors <- tensors + share * (end - tensor)."""
    if foreach is False or len(set(shares)) > 1:
        for tensor, end, share in zip(tensors, ends, shares, strict=True):
            tensor.lerp_(end, share)
    elif tensors:
        torch._foreach_lerp_(tensors, ends, shares[0])


def decay_(points: Sequence[Tensor], shares: list[float], towards: Sequence[Tensor] | None = None) -> None:
    """points <- points - share * points; those without a share are not touched.

    Args:
        points: What decays.
        shares: From 0 to 1, one for each.
        towards: What the share is taken of, where it is not the points themselves.
    """
    for i, (point, share) in enumerate(zip(points, shares, strict=True)):
        if share > 0.0 and towards is None:
            point.mul_(1.0 - share)
        elif share > 0.0 and towards is not None:
            point.sub_(towards[i].to(point.dtype), alpha=share)


def overflows(ray: Ray, size: float, sign: float, points: Sequence[Tensor], shares: Sequence[float]) -> bool:
    """Whether a step leads out of the range of a parameter's precision; looked at only where it is that long.

    Args:
        ray: The direction.
        size: The step.
        sign: -1 where the objective is maximised.
        points: Where it starts from: the parameters, or what stands for them.
        shares: How much of each parameter decays.
    """
    longest = size * max((r * n for r, n in zip(ray.ratios, ray.norms, strict=True)), default=0.0)
    if longest <= SAFE and all(point.dtype == p.dtype for point, p in zip(points, ray.params, strict=True)):
        return False
    for p, start, d, ratio, norm, share in zip(
        ray.params, points, ray.tensors, ray.ratios, ray.norms, shares, strict=True
    ):
        info = torch.finfo(p.dtype)
        # less than half a unit in the last place of the largest number rounds back to it
        if size * ratio * norm > 0.25 * info.eps * info.max or start.dtype != p.dtype:
            moved = start.double() - share * p.double() - size * ratio * sign * d.double()
            if not bool(torch.isfinite(moved.to(p.dtype)).all()):
                return True
    return False
