"""The averaged iterate of an optimiser: kept with the parameters, shown between eval() and train()."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from bisls.optim.arithmetic import lerp_


class Averaging(torch.optim.Optimizer):
    """An optimiser whose groups share their options, and that may keep an average of its iterates."""

    @torch.no_grad()
    def eval(self) -> None:
        """Put the averaged iterate into the parameters, for evaluation or saving. Nothing happens without averaging."""
        if not self._averages() or not self.param_groups[0]["train_mode"]:
            return
        for p in self._all():
            if "average" in self.state.get(p, {}):
                self.state[p]["iterate"] = p.detach().clone()
                p.copy_(self.state[p]["average"])
        self._set(train_mode=False)

    @torch.no_grad()
    def train(self) -> None:
        """Put the iterate back into the parameters, so that training goes on."""
        if self.param_groups[0]["train_mode"]:
            return
        for p in self._all():
            if "iterate" in self.state.get(p, {}):
                p.copy_(self.state[p].pop("iterate"))
        self._set(train_mode=True)

    def _average(self, k: int) -> None:
        """Weights (k + 1)^power: power 0 is the plain mean of all iterates after a step (Theorem 1)."""
        power = self.param_groups[0]["averaging"]
        if power is None:
            return
        self._initialise()
        averages = [self.state[p]["average"] for p in self._all()]
        iterates = [p.detach().to(average.dtype) for p, average in zip(self._all(), averages, strict=True)]
        lerp_(averages, iterates, self._shares(list(self._all()), float(k) ** power), self._foreach)

    def _averages(self) -> bool:
        """Whether an averaged iterate is kept."""
        return self.param_groups[0]["averaging"] is not None

    def _shares(self, params: list[Tensor], weight: float) -> list[float]:
        """The share of the newest iterate in each average; sums are kept by parameter, since some may join later."""
        shares = []
        for p in params:
            total = self.state[p]["weight_sum"] = self.state[p].get("weight_sum", 0.0) + weight
            shares.append(weight / total if total > 0 else 0.0)
        return shares

    def _initialise(self) -> None:
        if self.param_groups[0]["averaging"] is not None:
            for p in self._all():
                if "average" not in self.state[p]:
                    wide = torch.promote_types(p.dtype, torch.float32)
                    self.state[p]["average"] = p.detach().clone().to(wide)

    # --- small things

    @property
    def _foreach(self) -> bool | None:
        return self.param_groups[0]["foreach"]

    def _all(self) -> Iterator[Tensor]:
        return chain.from_iterable(group["params"] for group in self.param_groups)

    def _set(self, **numbers: Any) -> None:
        for group in self.param_groups:
            group.update(numbers)
