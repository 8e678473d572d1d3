"""Limited-memory BFGS, for deterministic problems."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from bisls._check import settle, whole_number
from bisls.directions.base import Direction, Heading, State
from bisls.states import Fields, flat
from bisls.vector import Vector, dot, norm


@dataclass(frozen=True)
class LBFGS(Direction):
    """Limited-memory BFGS: d = B h, B built from the last changes of point and gradient by the two-loop recursion.

    For problems whose loss does not change between calls (one batch for all). A pair without positive curvature is left
    out, and where the direction would not descend the memory is dropped and the gradient taken.

    Args:
        history: Number of pairs kept, at least 1.
    """

    history: int = 10

    def __post_init__(self) -> None:
        settle(self, history=whole_number(1))

    def head(self, gradient: Tensor, point: Tensor, state: State) -> Heading:
        """The quasi-Newton direction."""
        moves, turns = gradient.new_zeros(0, gradient.numel()), gradient.new_zeros(0, gradient.numel())
        if state:
            moves, turns = state["moves"], state["turns"]
            moved, turned = point - state["point"], gradient - state["gradient"]
            if dot(moved, turned) > 1e-10 * norm(moved) * norm(turned):
                moves = torch.cat([moves, moved[None]])[-self.history :]
                turns = torch.cat([turns, turned[None]])[-self.history :]
        d = two_loops(gradient, moves, turns)
        if not 0 < dot(d, gradient) < float("inf"):
            d, moves, turns = gradient, moves[:0], turns[:0]
        kept = {"moves": moves, "turns": turns, "point": point.clone(), "gradient": gradient.clone()}
        return Heading(d, d, kept)

    def keeps(self, vector: Vector | None) -> Fields:
        """The pairs, and point and gradient of the last step."""
        here = flat(vector)
        pairs = replace(here, shape=((0, self.history), None if vector is None else vector.numel))
        return Fields({"moves": pairs, "turns": pairs, "point": here, "gradient": here}, empty=True)


def two_loops(gradient: Tensor, moves: Tensor, turns: Tensor, scale: Tensor | None = None) -> Tensor:
    """B h, B built from pairs on a multiple of the identity; or of the inverse of ``diag(scale)``."""
    q = gradient.clone()
    inverse = (1.0 / (moves * turns).sum(1)).tolist()
    factors = []
    for s, y, rho in zip(moves.flip(0), turns.flip(0), reversed(inverse), strict=True):
        factors.append(rho * dot(s, q))
        q.sub_(y * factors[-1])  # not by alpha: torch refuses one that the precision cannot hold
    if len(moves):
        turned = turns[-1] if scale is None else turns[-1] / scale
        q = (q if scale is None else q / scale) * (dot(moves[-1], turns[-1]) / dot(turns[-1], turned))
    for s, y, rho, a in zip(moves, turns, inverse, reversed(factors), strict=True):
        q.add_(s * (a - rho * dot(y, q)))
    return q
