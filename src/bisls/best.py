"""Where a noisy loss was lowest: to go back to when it has risen since."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from math import inf, isfinite, sqrt
from typing import Any

import torch
from torch import Tensor

from bisls.states import Fields, Number, Numbers, Whole, flat
from bisls.vector import Vector

WINDOW = 16  # the mean is that of so many losses
RATE = 0.1  # the weight of a new difference in the mean of what one loss differs from the next
FAR = 1.5  # the mean has risen when it is above its lowest by so many times that


@dataclass(frozen=True)
class Best:
    """The mean of the last upper losses, and the point where it was lowest.

    Attributes:
        x: Where: the upper level.
        y: The lower one.
        mid_x: Where it was half a window ago, when that is looked at: the point in the middle of the losses.
        mid_y: The same below.
        n: Losses seen.
        recent: The last losses, at most a window of them.
        spread: What one differs from the next, in the mean.
        lowest: The lowest mean of a full window.
    """

    x: Tensor
    y: Tensor
    mid_x: Tensor
    mid_y: Tensor
    n: int = 0
    recent: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.float64))
    spread: float = 0.0
    lowest: float = inf

    def seen(self, value: float, x: Tensor, y: Tensor) -> Best:
        """With the loss of another iteration, at this point."""
        if not isfinite(value):
            return self
        spread = self.spread
        if len(self.recent):
            change = sqrt(0.5) * abs(value - float(self.recent[-1]))
            spread = spread + RATE * (change - spread) if spread else change
        recent = torch.cat([self.recent, self.recent.new_tensor([value])])[-WINDOW:]
        found = replace(self, recent=recent, spread=spread, n=self.n + 1)
        if found.n % (WINDOW // 2):
            return found
        if found.full and found.mean < self.lowest:
            found = replace(found, lowest=found.mean, x=self.mid_x, y=self.mid_y)
        return replace(found, mid_x=x, mid_y=y)

    @classmethod
    def begin(cls, x: Tensor, y: Tensor) -> Best:
        """Nothing seen yet."""
        return cls(x, y, x, y)

    @property
    def full(self) -> bool:
        """Whether there is a mean to speak of."""
        return len(self.recent) == WINDOW

    @property
    def mean(self) -> float:
        """That of the last losses."""
        return float(self.recent.mean())

    @property
    def risen(self) -> bool:
        """Whether the mean has clearly risen since it was lowest."""
        return self.full and self.mean > self.lowest + FAR * self.spread

    def again(self) -> Best:
        """After going back: the losses since do not count."""
        return replace(self, recent=self.recent[:0], n=0, mid_x=self.x, mid_y=self.y)

    def packed(self) -> dict[str, Any]:
        """Tensors and numbers, for a checkpoint."""
        return {own.name: getattr(self, own.name) for own in fields(self)}

    @classmethod
    def unpacked(cls, state: Mapping[str, Any]) -> Best:
        """What `packed` gave."""
        return cls(**state)

    @staticmethod
    def kind(x: Vector | None, y: Vector | None) -> Fields:
        """What `packed` gives, for a state that is loaded."""
        recent = Numbers(((0, WINDOW),), (torch.float64,))
        numbers = {"recent": recent, "spread": Number(0.0), "lowest": Number(infinite=True)}
        places = {"x": flat(x), "y": flat(y), "mid_x": flat(x), "mid_y": flat(y)}
        return Fields({**places, "n": Whole(), **numbers})
