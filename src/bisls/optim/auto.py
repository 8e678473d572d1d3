"""Auto: the recommended optimiser, with nothing to set."""

from __future__ import annotations

from dataclasses import replace
from math import sqrt
from typing import Any

import torch

from bisls.optim.base import Evaluation, LineOptimizer, Params
from bisls.steps.base import Step, StepRule
from bisls.steps.curvature import Curvature

# How much of the average the point where gradients are taken contains, and how far the distance may count.
# Settled on the data sets that docs/decisions.md names, judged on others.
INTERPOLATION = 0.8
REACH = 1.0


class Auto(LineOptimizer):
    r"""The recommended default: no learning rate, no schedule, no horizon.

    Three measurements, none of which needs a scale to be given:

    1. the mean curvature m of the loss along the gradients, by one extra forward pass at each of the first thirty steps
       and at every tenth afterwards (the step rule `Curvature`);
    2. the furthest distance r from the start, and the sum G of the squared gradient norms so far: r / sqrt(G) is the step that
       would be right for a loss without curvature and with that much noise;
    3. the step taken is the geometric mean of the two answers, \gamma = sqrt( (1/m) (r / sqrt(G)) ): long while the
       gradients agree, decaying as G grows where they do not.

    The iterate z moves by this step; gradients are taken at y = 0.2 z + 0.8 x, x the average of the z's with weights
    (k + 1) \gamma^2. During training the parameters hold y; `eval()` puts the average x there, `train()` puts y back.

    Args:
        params: Parameters or groups. A group's own ``lr`` sets the ratio of its steps to the others'; one norm over all.
        lr: Where the first measurement begins; leave it. A scheduler that changes it scales the steps by the same factor.
        maximize: Maximise the objective.
        foreach: False walks over the parameters one by one.

    Examples:
        >>> import torch
        >>> from bisls.optim import Auto
        >>> w = torch.tensor([4.0, -1.0], requires_grad=True)
        >>> optimizer = Auto([w])
        >>> for _ in range(200):
        ...     loss = optimizer.step(lambda: (300 * (w[0] - 1) ** 2 + 10 * (w[1] + 2) ** 2) / 2)
        >>> optimizer.eval()  # look at the average; optimizer.train() before going on
        >>> bool((w - torch.tensor([1.0, -2.0])).norm() < 1e-2)
        True
    """

    _searches = True

    def __init__(self, params: Params, lr: float = 1.0, *, maximize: bool = False, foreach: bool | None = None):
        numbers = {"lr": lr, "squares": 0.0, "distance": 0.0, "interpolation": INTERPOLATION, "averaging": None}
        super().__init__(params, {**numbers, "maximize": maximize, "foreach": foreach})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group; its ``lr`` sets the ratio of its steps to those of the others."""
        super().add_param_group(param_group)
        self.param_groups[-1].setdefault("start", float(self.param_groups[-1]["lr"]))

    def _rule(self, group: dict[str, Any]) -> StepRule:
        return Curvature(start=max(float(g.get("start", g["lr"])) for g in self.param_groups))

    def _take(self, found: Evaluation, judged: Evaluation, step: Step) -> Step:
        first = self.param_groups[0]
        self._initialise()
        squares = first["squares"] - judged.slope
        # before the first step there is no distance yet: the step by curvature says how far it would go
        distance = first["distance"] or step.size * sqrt(-judged.slope)
        scheduled = self._ceiling() / max(group["start"] for group in self.param_groups)
        size = sqrt(step.size * REACH * distance / sqrt(squares)) * scheduled
        weight = step.memory.k * size**2
        total = first["weight_sum"] + weight

        every = [p for p in self._all() if p in self.state]
        states = [self.state[p] for p in every]
        iterates, averages = [s["z"] for s in states], [s["average"] for s in states]
        grads = [g.to(self.state[p]["z"].dtype) for p, g in zip(found.params, found.grads, strict=True)]
        factors = [-size * ratio * self._sign() for ratio in found.ratios]
        self._add([self.state[p]["z"] for p in found.params], grads, factors)
        away = self._distance(iterates, [s["start"] for s in states], [self._ratios()[p] for p in every])
        if first["foreach"] is False:
            for p, z, average in zip(every, iterates, averages, strict=True):
                average.lerp_(z, weight / total if total > 0 else 0.0)
                p.copy_(z.lerp(average, first["interpolation"]))
        else:
            torch._foreach_lerp_(averages, iterates, weight / total if total > 0 else 0.0)
            torch._foreach_copy_(every, torch._foreach_lerp(iterates, averages, first["interpolation"]))
        torch.clear_autocast_cache()
        self._set(squares=squares, distance=max(first["distance"], away), weight_sum=total)
        return replace(step, size=size)

    def _distance(self, iterates: list[torch.Tensor], starts: list[torch.Tensor], ratios: list[float]) -> float:
        """||z - z_0|| in the metric of the groups' ratios."""
        norms = self._norms(list(torch._foreach_sub(iterates, starts)))
        sizes = torch.stack([norm.double() for norm in norms]).tolist()
        return sqrt(sum(size * size / ratio for size, ratio in zip(sizes, ratios, strict=True) if ratio > 0))

    def _initialise(self) -> None:
        for p in self._all():
            if p not in self.state:
                wide = p.detach().to(torch.promote_types(p.dtype, torch.float32))
                self.state[p].update({key: wide.clone() for key in ("z", "start", "average")})
