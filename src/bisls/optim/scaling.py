"""Adam's scaling on lists of tensors: running means of squared gradients, their roots, and lengths in that metric."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

import torch
from torch import Tensor

from bisls.optim.arithmetic import doubles
from bisls.ranks import mean_over_ranks

EPS = 1e-8  # added to a root, in units of the gradient


def in_units(grads: Sequence[Tensor], like: Sequence[Tensor], unit: float) -> list[Tensor]:
    """Gradients over a unit, in the precision of others."""
    wide = [g.to(other.dtype) for g, other in zip(grads, like, strict=True)]
    return wide if unit == 1.0 else list(torch._foreach_mul(wide, 1.0 / unit))


def learn_(moments: list[Tensor], grads: list[Tensor], b2: float, foreach: bool | None) -> None:
    """v <- b2 v + (1 - b2) g^2."""
    if foreach is False:
        for v, g in zip(moments, grads, strict=True):
            v.mul_(b2).addcmul_(g, g, value=1.0 - b2)
        return
    torch._foreach_mul_(moments, b2)
    torch._foreach_addcmul_(moments, grads, grads, 1.0 - b2)


def roots(moments: list[Tensor], seen: Sequence[int], b2: float, foreach: bool | None) -> list[Tensor]:
    """a = sqrt(v / (1 - b2^n)) + eps, n the number of gradients that v has seen."""
    factors = [(1.0 - b2**n) ** -0.5 if n else 1.0 for n in seen]
    if foreach is False:
        return [v.sqrt().mul_(factor).add_(EPS) for v, factor in zip(moments, factors, strict=True)]
    found = torch._foreach_sqrt(moments)
    torch._foreach_mul_(found, factors[0] if len(set(factors)) == 1 else factors)
    torch._foreach_add_(found, EPS)
    return list(found)


def over(grads: list[Tensor], scales: list[Tensor], foreach: bool | None) -> list[Tensor]:
    """d = g / a."""
    if foreach is False:
        return [g / a for g, a in zip(grads, scales, strict=True)]
    return list(torch._foreach_div(grads, scales))


def filled(grads: Sequence[Tensor]) -> float:
    """The share of numbers that are not zero."""
    counts = [torch.count_nonzero(g) for g in grads]
    return int(torch.stack(counts).sum()) / max(sum(g.numel() for g in grads), 1) if counts else 1.0


def products(left: Sequence[Tensor], right: Sequence[Tensor], ratios: Sequence[float]) -> list[float]:
    """ratio <left, right> of each pair."""
    if not left:
        return []
    parts = [torch.dot(a.reshape(-1), b.reshape(-1)) for a, b in zip(left, right, strict=True)]
    return [r * part for r, part in zip(ratios, doubles(parts).tolist(), strict=True)]


def distances(points: list[Tensor], starts: list[Tensor], scales: list[Tensor], ratios: Sequence[float]) -> list[float]:
    """sqrt of the sum of a (x - x_0)^2 / ratio, of each."""
    gaps = list(torch._foreach_sub(points, starts))
    weighed = torch._foreach_mul(gaps, scales)
    squares = products(gaps, list(weighed), [1.0 / r if r > 0 else 0.0 for r in ratios])
    return [max(square, 0.0) ** 0.5 for square in squares]


def slope(grads: Sequence[Tensor], start: list[Tensor], end: list[Tensor]) -> float:
    """<g, end - start>, in the mean over the ranks: they must come to the same decision."""
    gaps = list(torch._foreach_sub(end, start))
    own = sum(products(in_units(grads, gaps, 1.0), gaps, [1.0] * len(gaps)))
    return mean_over_ranks(torch.tensor(own, dtype=torch.float64)).item()


def means(scales: Sequence[Tensor]) -> list[float]:
    """The mean of each a."""
    totals = doubles([a.sum() for a in scales]).tolist()
    return [total / max(a.numel(), 1) for total, a in zip(totals, scales, strict=True)]


def growth(before: float, now: float) -> float:
    """What a sum of lengths in one metric is to be multiplied with, to be one in another; 1 where that is not known."""
    factor = now / before if before > 0.0 else 1.0
    return factor if 0.0 < factor < inf else 1.0
