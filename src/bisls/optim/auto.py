"""Auto: the recommended optimiser, with nothing to set."""

from __future__ import annotations

from dataclasses import replace
from math import sqrt
from typing import Any, ClassVar

import torch
from torch import Tensor

from bisls.optim.arithmetic import add_, decay_, lerp_, norms_of, overflows
from bisls.optim.base import LineOptimizer, Params
from bisls.optim.evaluation import Evaluation
from bisls.optim.units import options
from bisls.status import Status
from bisls.steps.base import Step, StepRule
from bisls.steps.curvature import Curvature

# Settled on the data sets that docs/decisions.md names, judged on others.
NEAR, LEAST, MOST = 0.06, 0.1, 0.2  # the share of z where gradients are taken: NEAR / (step m), between the other two
OUTLIER = 10.0  # a squared gradient norm counts for at most so many times the mean of those before
REACH = 3.0  # the step that noise allows, in units of distance / sqrt(sum of squared gradients)
SHORTEST = 1e-280  # a first trial that is too short to be measured is none
LARGEST = 1e140  # larger steps weigh no more in the average: the sum of the weights must be a number
WARM, LONGEST = 0.1, 5.0  # the step that curvature allows grows as WARM sqrt(k + 1) / m, up to LONGEST / m


class Auto(LineOptimizer):
    """The recommended default: no learning rate, no schedule, no horizon.

    Two measurements bound the step, and neither needs a scale to be given:

    1. *Curvature.* m, the mean curvature of the loss along the gradients, from one extra forward pass at each of the first
       thirty steps and at every tenth afterwards (the step rule `Curvature`). The step is at most min{0.1 sqrt(k + 1), 5} / m.
    2. *Noise.* The distance r that the average has come from the start, and the sum G of the squared gradient norms: the
       step is at most 3 r / sqrt(G). While the gradients agree, r grows and this bound stays wide; where they only differ by
       noise, r stands still and it decays as 1 / sqrt(k).

    The iterate z moves by gamma, the smaller of the two; x is the average of the z's with weights (k + 1) gamma^2, and gradients
    are taken at ``y = x + s (z - x)``. The share s is 0.06 / (gamma m), between 0.1 and 0.2: one step moves y by a small part
    of what the curvature allows. During training the parameters hold y; `eval()` puts the average x there, `train()` puts y back.

    Args:
        params: Parameters or groups. A group's own ``lr`` sets the ratio of its steps to the others'; one norm over all.
        lr: Where the first measurement begins; leave it. A scheduler that changes it scales the steps by the same factor.
        weight_decay: Decoupled, as in AdamW: z also goes back by the step times this times y. At least 0; groups may differ.
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
        >>> bool((w - torch.tensor([1.0, -2.0])).norm() < 0.05)
        True
    """

    _searches = True
    _measures = True
    _stands: ClassVar[dict[str, str]] = {"start": "lr"}
    _notes: ClassVar[tuple[str, ...]] = ("start", "unit")
    _together: ClassVar[tuple[str, ...]] = ("z", "start", "average")
    _counters: ClassVar[dict[str, Any]] = {
        **LineOptimizer._counters,
        "squares": 0.0,
        "distance": 0.0,
        "interpolation": 1.0 - MOST,
    }

    def __init__(
        self,
        params: Params,
        lr: float = 1.0,
        *,
        weight_decay: float = 0.0,
        maximize: bool = False,
        foreach: bool | None = None,
    ):
        options = {"lr": lr, "weight_decay": weight_decay, "averaging": None}
        super().__init__(params, {**options, "maximize": maximize, "foreach": foreach})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group; its ``lr`` sets the ratio of its steps to those of the others, its ``weight_decay`` is its own."""
        super().add_param_group(param_group)
        self.param_groups[-1].setdefault("start", float(self.param_groups[-1]["lr"]))

    def _rule(self, group: dict[str, Any]) -> StepRule:
        start = max(float(g.get("start", g["lr"])) for g in self.param_groups)
        return Curvature(start=max(options({"lr": start}, group.get("unit", 1.0))["lr"], SHORTEST))

    def _averages(self) -> bool:
        return True

    def _take(self, found: Evaluation, judged: Evaluation, step: Step) -> Step:
        first, k = self.param_groups[0], step.memory.k
        params = [p for p in self._all() if p.requires_grad]
        self._initialise()
        self._follow(params)
        # an outlier counts, and moves, as much as OUTLIER times the mean square so far: one batch can't end the run
        if k <= 1:  # in what gradients are measured, for the whole run
            self._set(unit=judged.gradient.unit)
        unit = first.get("unit", 1.0)
        ratio = judged.gradient.unit / unit
        square = -judged.gradient.slope * ratio * ratio  # too large for a number it is infinite, and an outlier
        usual = min(square, OUTLIER * first["squares"] / (k - 1)) if k > 1 and first["squares"] > 0 else square
        squares = first["squares"] + usual
        # at the first step there is no distance yet: what the curvature allows says how far it would go
        distance = first["distance"] or step.size * unit * sqrt(square)
        curved = min(WARM * sqrt(k), LONGEST) * step.size
        scheduled = self._ceiling() / max(group["start"] for group in self.param_groups)
        size = min(REACH * distance / sqrt(squares) / unit if squares > 0 else curved, curved) * scheduled
        share = min(max(NEAR * step.size / size, LEAST), MOST) if size > 0 else MOST

        states, ratios, ray = [self.state[p] for p in params], self._ratios(), found.moves
        iterates, averages = [s["z"] for s in states], [s["average"] for s in states]
        moving = [self.state[p]["z"] for p in ray.params]
        taken = size * sqrt(usual / square) if square > 0 else size
        shares = self._decays(ray, taken)
        if overflows(ray, taken, self._sign(), moving, shares):
            return replace(step, size=0.0, status=Status.NON_FINITE)
        decay_(moving, shares, towards=ray.params)  # of y, where the gradient was taken
        grads = [g.to(z.dtype) for z, g in zip(moving, ray.tensors, strict=True)]
        add_(moving, grads, [-taken * ratio * self._sign() for ratio in ray.ratios], self._foreach)
        away = self._distance(averages, [s["start"] for s in states], [ratios[p] for p in params])
        lerp_(averages, iterates, self._shares(params, k * min(size * unit, LARGEST) ** 2), self._foreach)
        self._set(squares=squares, distance=max(distance, away), interpolation=1.0 - share)
        for p, y in zip(params, self._points(params), strict=True):
            p.copy_(y)
            self.state[p]["version"] = p._version
        torch.clear_autocast_cache()
        return replace(step, size=taken)

    def _points(self, params: list[Tensor]) -> list[Tensor]:
        """y, where the next gradients are taken."""
        iterates, averages = ([self.state[p][key] for p in params] for key in ("z", "average"))
        share = self.param_groups[0]["interpolation"]
        if self._foreach is False:
            return [z.lerp(average, share) for z, average in zip(iterates, averages, strict=True)]
        return list(torch._foreach_lerp(iterates, averages, share))

    def _follow(self, params: list[Tensor]) -> None:
        """Where somebody else has changed a parameter since the last step (a reload, a projection), go with it."""
        moved = [p for p in params if self.state[p].get("version") not in (None, p._version)]
        for p, y in zip(moved, self._points(moved) if moved else [], strict=True):
            if not torch.equal(p, y.to(p.dtype)):
                shift = p.detach().to(y.dtype) - y
                self.state[p]["z"] += shift
                self.state[p]["average"] += shift

    def _distance(self, averages: list[Tensor], starts: list[Tensor], ratios: list[float]) -> float:
        """||x - x_0|| in the metric of the groups' ratios."""
        norms = norms_of(list(torch._foreach_sub(averages, starts)), self._foreach)
        sizes = torch.stack([norm.double() for norm in norms]).tolist()
        return sqrt(sum(size * size / ratio for size, ratio in zip(sizes, ratios, strict=True) if ratio > 0))

    def _initialise(self) -> None:
        for p in self._all():
            state = self.state[p] if p.requires_grad else {"weight_sum": 0.0}
            # until its first step a parameter may still be loaded, so its state is made anew
            if not state.get("weight_sum"):
                wide = p.detach().to(torch.promote_types(p.dtype, torch.float32))
                state.update(
                    {key: wide.clone() for key in ("z", "start", "average")}, weight_sum=0.0, version=p._version
                )
