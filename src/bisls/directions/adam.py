"""Adam's diagonal scaling, with or without momentum."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from bisls._check import FLAG, POSITIVE, Wanted, Wrong, number, settle
from bisls.derivatives import Derivative, Following, Momentum, Squares
from bisls.directions.base import Direction, Heading, State, squared, squares
from bisls.states import Fields, counter, flat
from bisls.vector import Vector


def _pair(value: Any) -> Any:
    if not isinstance(value, tuple | list) or len(value) != 2:
        raise Wrong
    one = number("[0, 1)")
    kept = tuple(one.read(beta) for beta in value)
    return value if all(mine is own for mine, own in zip(kept, value, strict=True)) else kept


@dataclass(frozen=True)
class Adam(Direction):
    """Adam's direction: ``A^-1 h``, or ``A^-1 m^`` with momentum, ``A = sqrt(G^) + eps``.

    G <- b2 G + (1 - b2) h^2 and m <- b1 m + (1 - b1) h are kept raw and corrected when used: G^ = G / (1 - b2^t),
    m^ = m / (1 - b1^t), t = 1 at the first step. (The paper's text has the correction inside the recursion, and a sign
    that ascends; both are slips.) The slope of the line is ``-<h, A^-1 h>``, so every step rule works unchanged.

    Args:
        betas: (b1, b2), both in [0, 1). b1 = 0 is Adam without momentum.
        eps: Added to the root; positive.
        search_momentum: Search along the direction really taken, A^-1 m, wherever it descends, and where it does not, search
            and move along A^-1 h. False is the paper's way: search along A^-1 h, move along A^-1 m.

    Examples:
        >>> import torch
        >>> h = torch.tensor([0.3, -20.0])
        >>> Adam().head(h, torch.zeros(2), {}).move  # the first step has the same length in each coordinate
        tensor([ 1., -1.])
    """

    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    search_momentum: bool = True

    def __post_init__(self) -> None:
        settle(self, betas=Wanted("must be two numbers in [0, 1)", _pair), eps=POSITIVE, search_momentum=FLAG)

    def head(self, gradient: Tensor, point: Tensor, state: State) -> Heading:
        """The scaled gradient and the scaled momentum."""
        b1, b2 = self.betas
        t = int(state["t"]) + 1 if state else 1
        m = gradient * (1 - b1) if not state else state["m"] * b1 + gradient * (1 - b1)
        square = squared(gradient) * (1 - b2)
        g = square if not state else state["g"] * b2 + square
        scale = (g / (1 - b2**t)).sqrt_().add_(self.eps).to(gradient.dtype)
        search = gradient / scale
        kept = {"m": m, "g": g, "t": torch.tensor(t)}
        correction = (1 - b1**t, 1 - b2**t)

        def derivative(moved: Tensor, through: float) -> Callable[[float, Following], Derivative]:
            def made(size: float, following: Following) -> Derivative:
                d = size / scale / (correction[0] if through else 1.0)
                if not following.squares:  # it would hold two more vectors
                    return Momentum(d, b1, 1 - b1, 1.0 - through, through)
                root = scale - self.eps
                squares = Squares(b2, size * moved / scale / (2 * correction[1] * root))
                return Momentum(d, b1, 1 - b1, 1.0 - through, through, squares=squares)

            return made

        plain = Heading(search, search, kept, derivative=derivative(search, 0.0))
        if b1 == 0:
            return plain
        move = m / correction[0] / scale
        momentum = Heading(search, move, kept, derivative=derivative(move, 1.0))
        if not self.search_momentum:
            return momentum
        if torch.dot(gradient, move).item() > 0:
            return replace(momentum, search=move)
        return replace(plain, unsearched=momentum)

    def keeps(self, vector: Vector | None) -> Fields:
        """Both means, and how many steps they are of."""
        return Fields({"m": flat(vector), "g": squares(vector), "t": counter()}, empty=True)
