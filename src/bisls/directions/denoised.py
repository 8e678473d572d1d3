"""The mean of recent gradients, over as many of them as the noise asks for."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf, isfinite, sqrt

import torch
from torch import Tensor

from bisls._check import POSITIVE, number, optional, settle
from bisls.directions.base import Direction, Heading, State, squared, squares
from bisls.states import Fields, Number, Row, counter, flat
from bisls.vector import Vector, dot

REACH = 0.7  # the bound that noise sets on a step, in units of distance / sqrt(N)


@dataclass(frozen=True)
class Denoised(Direction):
    """Momentum as long as the noise asks for, and a bound on the step that noise allows: both measured, neither set.

    On an independent batch j the slope along d is ``-<h_j, d>``, on the gradient's own batch it is ``-<h, d>``; their difference
    is what the direction owes to the noise of its batch. With N the sum of these differences (each divided by the share
    that h has in d) and S the sum of ||h||^2:

    - the momentum is ``m <- b m + (1 - b) h`` with ``b = N / S``, the share of noise, between 0 and ``most``;
    - no step goes beyond ``0.7 ||x - x_0|| / sqrt(N)``: while the gradients agree the distance grows and the bound is wide, where
      they differ by noise it decays as 1 / sqrt(k).

    A deterministic problem has N = 0: the direction is the gradient itself (scaled, with ``b2``) and there is no bound.

    Args:
        b2: Adam's scaling by ``A = sqrt(mean of h^2) + eps``, with this rate, in [0, 1), and norms are those of A then; None
            leaves the gradient unscaled.
        most: The largest momentum, in [0, 1).
        eps: Added to the root; positive.

    Examples:
        >>> import torch
        >>> direction, x = Denoised(), torch.zeros(2)
        >>> first = direction.head(torch.tensor([2.0, 0.0]), x, {})
        >>> step, state = first.weigh(4.0, 1.0)  # promised 4, judged 1: three quarters of the gradient were noise
        >>> direction.head(torch.tensor([0.0, 2.0]), x, state).move  # m of the two, with b = 3/4
        tensor([1.5000, 0.5000])
    """

    b2: float | None = None
    most: float = 0.9
    eps: float = 1e-8

    def __post_init__(self) -> None:
        settle(
            self, b2=optional(number("[0, 1)"), "must lie in [0, 1), or be None"), most=number("[0, 1)"), eps=POSITIVE
        )

    def head(self, gradient: Tensor, point: Tensor, state: State) -> Heading:
        """The mean of recent gradients; what the judged slope is worth comes with it."""
        zeros = torch.zeros(4, dtype=torch.float64)
        noise, squares, weight, reached = state["sums"].tolist() if state else zeros.tolist()
        b = min(max(noise / squares, 0.0), self.most) if squares > 0 else 0.0
        m = state["m"] * b + gradient * (1 - b) if state else gradient * (1 - b)
        weight = b * weight + (1 - b)
        start = state["start"] if state else point.clone()
        kept = {"m": m, "start": start}
        scale: Tensor | None = None
        if self.b2 is not None:
            t = int(state["t"]) + 1 if state else 1
            square = squared(gradient) * (1 - self.b2)
            kept["g"] = state["g"] * self.b2 + square if state else square
            kept["t"] = torch.tensor(t)
            scale = self.scaling(kept).to(gradient.dtype)
        d = m / weight if scale is None else m / weight / scale
        size = dot(gradient, gradient if scale is None else gradient / scale)
        away = point - start
        reached = max(reached, sqrt(dot(away, away if scale is None else away * scale)))
        share = (1 - b) / weight

        def weigh(own: float, judged: float | None) -> tuple[float, State]:
            more, total = noise, squares
            if judged is None:  # not judged: it counts like those that were
                more += noise / squares * size if squares > 0 else 0.0
                total += size
            elif isfinite(judged) and isfinite(own) and isfinite(size):
                more += min(max((own - judged) / share, -size / share), size / share)
                total += size
            seen = min(max(more, 0.0), total)
            limit = REACH * reached / sqrt(seen) if seen > 0 and reached > 0 else inf
            return limit, {**kept, "sums": torch.tensor([more, total, weight, reached], dtype=torch.float64)}

        return Heading(
            d, d, {**kept, "sums": torch.tensor([noise, squares, weight, reached], dtype=torch.float64)}, weigh
        )

    def scaling(self, state: State) -> Tensor:
        """Adam's scaling A, as a state with squares knows it."""
        assert self.b2 is not None
        return (state["g"] / (1 - self.b2 ** int(state["t"]))).sqrt_().add_(self.eps)

    def keeps(self, vector: Vector | None) -> Fields:
        """The mean, where it began, N, S, the weight of the mean and the distance; with ``b2`` Adam's squares as well."""
        own = {"noise": Number(), "squares": Number(0.0), "weight": Number(0.0, above=True), "reached": Number(0.0)}
        scaled = {} if self.b2 is None else {"g": squares(vector), "t": counter()}
        return Fields({"m": flat(vector), "start": flat(vector), "sums": Row(own), **scaled}, empty=True)
