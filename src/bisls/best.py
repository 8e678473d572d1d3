"""Where a noisy loss was lowest: to go back to when it has risen since."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from math import isfinite
from typing import Any

import torch
from torch import Tensor

from bisls.states import Fields, Number, Numbers, flat
from bisls.vector import Vector

WINDOW, SHORT = 8, 2  # a rise is looked for in so many comparisons, a fall in at least so many
RISEN, FALLEN = 2.0, 0.5  # how far their mean must be from 0, in units of what they differ by
PART = 0.03  # and a rise must undo so much of what had been gained


@dataclass(frozen=True)
class Best:
    """A point that later ones are compared with, each time on the batch of the present: the best one so far.

    Attributes:
        x: The point: the upper level.
        y: The lower one.
        gained: How much the loss had fallen up to there, added up from the means of comparisons: rather too little.
        recent: By how much the last losses were above those at the point, on the same batches.
        step: How long the lower steps were there.
    """

    x: Tensor
    y: Tensor
    gained: float = 0.0
    recent: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.float64))
    step: float = 0.0

    def seen(self, value: float, there: float, x: Tensor, y: Tensor, step: float = 0.0) -> Best:
        """With the loss of another iteration at its point, and that of the best one on the same batch."""
        if not isfinite(value - there):
            return self
        found = replace(self, recent=torch.cat([self.recent, self.recent.new_tensor([value - there])])[-WINDOW:])
        last = found.recent
        if len(last) >= SHORT and float(last.mean()) < -FALLEN * float(last.std()):
            return Best(x, y, found.gained - float(last.mean()), step=step)
        return found

    @property
    def doubtful(self) -> bool:
        """Whether the last loss was above that at the point."""
        return bool(len(self.recent)) and float(self.recent[-1]) > 0.0

    @property
    def risen(self) -> bool:
        """Whether the loss had fallen, and has clearly risen since."""
        mean = float(self.recent.mean()) if len(self.recent) == WINDOW else 0.0
        return mean > PART * self.gained > 0.0 and mean > RISEN * float(self.recent.std())

    def again(self) -> Best:
        """After going back: the losses since do not count."""
        return replace(self, recent=self.recent[:0])

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
        return Fields(
            {"x": flat(x), "y": flat(y), "gained": Number(0.0), "recent": Numbers(((0, WINDOW),), (torch.float64,))},
            {"step": Number(0.0)},
        )
