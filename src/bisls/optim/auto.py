"""Auto: the recommended optimiser, with nothing to set."""

from __future__ import annotations

from dataclasses import replace
from math import inf, isfinite, sqrt
from typing import Any, ClassVar

import torch
from torch import Tensor

from bisls.line import Line
from bisls.optim import noise, scaling
from bisls.optim.arithmetic import Ray, add_, decay_, lerp_, overflows
from bisls.optim.base import LineOptimizer, Params
from bisls.optim.evaluation import Evaluation, looked
from bisls.optim.units import unit_of
from bisls.pace import (
    ABOVE,
    AGAIN,
    AHEAD,
    B2,
    CLEARLY,
    FIRST,
    FORGET,
    GAIN,
    OUTLIER,
    SHARE,
    START,
    WORSE,
    Ceiling,
    differing,
    next_look,
)
from bisls.status import Status
from bisls.steps.base import Memory, Step, StepRule
from bisls.steps.curvature import Curvature

# Settled on the problems that docs/decisions.md names, judged on others; what a walk in a bi-level run shares is in `bisls.pace`.
OPENING = 5  # gradients before this step are forgotten if their mean square is so many times that of this one
DEAD = 10  # steps with half of the gradients zero: begin anew
PART = 0.2  # a rise by less of what was gained is none
SHORTER = 0.3  # steps after a rise, in units of the one that led there
OFTEN = 4  # so often a run goes back; streams that change their task look lost for ever
SHORTEST = 1e-280  # a first trial that is too short to be measured is none
LARGEST = 1e140  # larger steps weigh no more in the average: the sum of the weights must be a number


class Auto(LineOptimizer):
    """The recommended default: no learning rate, no schedule, no horizon.

    Gradients are scaled as Adam scales them, ``d = g / a``, ``a = sqrt(v^) + eps``, v the running mean of the squares. An
    iterate z moves along them, ``z <- z - gamma d``; x is the average of the z's with weights (k + 1) gamma^2; gradients are
    taken between the two, at ``y = x + 0.2 (z - x)``. Two measurements bound gamma, and neither needs a scale to be given:

    1. *A line between average and iterate.* z - x comes from earlier batches, so a new batch judges it without bias: now and
       then, where the slope in y leaves it open, the loss is looked at in x as well. Where f(y) is above f(x), by more than a
       tenth of what batches differ by, z goes too far, and the ceiling of gamma falls; otherwise it rises. It begins at a third
       of the step that is best for the first batch along d, found by a few trials.
    2. *Noise.* With r the distance of x from the start, in the metric a, and G the sum of ``<g, d>`` in that metric, gamma is at
       most ``2.2 r / sqrt(G)``. While gradients agree, r grows and this bound stays wide; where they differ by noise alone, r
       stands still and it decays as 1 / sqrt(k). Each tensor has its own.

    During training the parameters hold y; `eval()` puts the average x there, `train()` puts y back. A run that is lost (thirty
    losses in a row above the first one, and above that of the start on the same batch; gradients that have become exactly zero
    for half of the parameters) goes back to the start with a tenth of the step, and `last_status` says `Status.RESTARTED`. Where
    the losses have risen far above their lowest level, and two looks in a row said shorter, it goes back to the average or to the
    start, whichever is lower, and steps are never longer than a third of the last from then on: `Status.RETURNED`.

    Args:
        params: Parameters or groups. A group's own ``lr`` sets the ratio of its steps to the others'; one line through all.
        lr: Where the first trials begin; leave it. A scheduler that changes it scales the steps by the same factor.
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
    _stands: ClassVar[dict[str, str]] = {"start": "lr"}
    _notes: ClassVar[tuple[str, ...]] = ("start",)
    _together: ClassVar[tuple[str, ...]] = ("z", "start", "average", "squares", "noise", "metric", "distance")
    _counters: ClassVar[dict[str, Any]] = {
        **LineOptimizer._counters,
        "unit": None,  # what gradients are measured in, for the whole run
        "begun": 0,  # the step before the first, or before the first after going back to the start
        "look": 0,  # the step at which the average is looked at next
        "gain": GAIN,
        "vote": 0,
        "lengths": 0.0,
        "first_step": 0.0,
        "first_loss": 0.0,
        "low": 0.0,  # the lowest running mean of the losses, and what batches differed by then
        "low_spread": 0.0,
        "mean_loss": 0.0,
        "last_loss": 0.0,
        "spread": 0.0,
        "above": 0,
        "alive": 0,
        "dead": 0,
        "shorter": 0,  # looks in a row that said so
        "returned": 0,
        "limit": None,  # of steps, since one led astray
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
        """Finds the scale of the first step."""
        return Curvature(start=max(max(float(g.get("start", g["lr"])) for g in self.param_groups), SHORTEST))

    def _averages(self) -> bool:
        return True

    def _will_look(self) -> bool:
        first = self.param_groups[0]
        due = first["remembered"] is None or first["k"] - first["begun"] + 1 >= first["look"]
        return due or self._suspect() is not Status.OK

    # --- the step

    def _advance(self, found: Evaluation, judged: Evaluation) -> None:
        first = self.param_groups[0]
        memory = Memory(first["k"], first["remembered"])
        finite = isfinite(found.value) and isfinite(found.gradient.slope) and isfinite(found.moves.slope)
        if not finite or not isfinite(judged.value):
            self._remember(Step(0.0, memory, status=Status.NON_FINITE))
        elif self._ceiling() == 0.0:
            self._remember(Step(0.0, memory.later(), status=Status.STATIONARY))
        else:
            back, looks = self._back(found, judged, memory)
            step = back or self._stepped(found, judged, memory)
            self._remember(replace(step, checks=step.checks + looks))

    def _stepped(self, found: Evaluation, judged: Evaluation, memory: Memory) -> Step:
        first, k = self.param_groups[0], memory.k - self.param_groups[0]["begun"] + 1
        self._initialise()
        self._follow([p for p in self._all() if p.requires_grad])
        unit = first["unit"] or unit_of(found.gradient.norms)
        ratio = found.gradient.unit / unit
        length = -found.gradient.slope * ratio * ratio  # too large for a number it is infinite, and an outlier
        if k == OPENING and first["lengths"] > FIRST * (k - 1) * length > 0.0:
            k = self._anew(memory.k)
        # what looks at other points comes first: a closure that raises leaves everything as it was
        ceiling, checks = Ceiling(memory.step or 0.0, first["gain"], first["vote"]), 0
        due = memory.step is not None and k >= first["look"]
        if due:
            longer, checks = self._vote(judged, WORSE * first["spread"])
            ceiling = ceiling.voted(longer)
        # an outlier counts, and moves, as much as OUTLIER times the mean square so far: one batch can't end the run
        usual = min(length, OUTLIER * first["lengths"] / (k - 1)) if k > 1 and first["lengths"] > 0 else length
        ray, scales, squares = self._scaled(found.gradient, unit * sqrt(length / usual) if usual > 0 else unit)
        if ray.slope >= 0.0:
            if memory.step is not None:
                self._note(found, k)
            return Step(0.0, memory.later(), checks, Status.STATIONARY)
        if memory.step is None:
            step = self._first_step(judged, memory)
            if step.size == 0.0:
                return step
            share, checks = scaling.filled(judged.gradient.tensors), step.checks
            ceiling = replace(ceiling, size=START * share * step.size)
            self._set(first_step=ceiling.size)
        ceiling = replace(ceiling, size=min(ceiling.size, first["limit"] or inf))
        states = [self.state[p] for p in ray.params]
        anew = due or noise.jumped(states, squares)
        noise.note(states, squares, scaling.means(scales) if anew else None)
        size = min(ceiling.size, noise.common(self._known(), first=ceiling.size * sqrt(-ray.slope)))
        taken = size * self._ceiling() / max(group["start"] for group in self.param_groups)
        moves = self._clipped(found, ray, scales, unit) if found.clipped else ray
        if moves.slope >= 0.0:
            return Step(0.0, memory.later(), checks, Status.NOT_DESCENT if moves.slope > 0.0 else Status.STATIONARY)
        shares = noise.shares(states, squares, ceiling.size, size)
        moves = replace(moves, ratios=[r * share for r, share in zip(ray.ratios, shares, strict=True)])
        if not self._move_all(moves, taken, k * min(taken, LARGEST) ** 2):
            return Step(0.0, memory.later(), checks, Status.NON_FINITE)
        if due or memory.step is None:
            averages, starts = ([state[key] for state in states] for key in ("average", "start"))
            noise.went(states, scaling.distances(averages, starts, scales, ray.ratios))
            self._set(look=next_look(k), gain=ceiling.gain, vote=ceiling.vote)
            self._set(shorter=first["shorter"] + 1 if ceiling.vote < 0 else 0)
        self._set(unit=unit, lengths=first["lengths"] + usual)
        self._note(found, k)
        return Step(taken, Memory(memory.k + 1, min(ceiling.size, AHEAD * size)), checks)

    def _vote(self, judged: Evaluation, worse: float) -> tuple[bool, int]:
        """Whether a longer step is worth trying, f(y) <= f(x) + worse, and how often the loss was looked at for it.

        A loss that bends upwards between the two cannot fall by more than its slope at y says: where that is little, no look.
        """
        iterates, averages = ([self.state[p][key] for p in judged.gradient.params] for key in ("z", "average"))
        slope = self._sign() * scaling.slope(judged.gradient.tensors, averages, iterates)
        if SHARE * slope <= worse:
            return True, 0
        return judged.value - self._at("average", judged) <= worse, 1

    def _known(self) -> list[dict[str, Any]]:
        """What is kept for the parameters that have moved."""
        return [self.state[p] for p in self._all() if "noise" in self.state.get(p, {})]

    def _scaled(self, gradient: Ray, unit: float) -> tuple[Ray, list[Tensor], list[float]]:
        """The ray along d, its slope in units of the gradient, a, and <g, d> by tensor; this gradient is learnt."""
        states = [self.state[p] for p in gradient.params]
        for state in states:
            state["seen"] += 1
        moments, seen = [state["squares"] for state in states], [state["seen"] for state in states]
        grads = scaling.in_units(gradient.tensors, moments, unit)
        scaling.learn_(moments, grads, B2, self._foreach)
        scales = scaling.roots(moments, seen, B2, self._foreach)
        tensors = scaling.over(grads, scales, self._foreach)
        # no number of d is larger than this
        norms = [sqrt((1.0 - B2**n) / (1.0 - B2) * g.numel()) for n, g in zip(seen, grads, strict=True)]
        squares = scaling.products(grads, tensors, gradient.ratios)
        return Ray(gradient.params, tensors, gradient.ratios, norms, -sum(squares)), scales, squares

    def _clipped(self, found: Evaluation, ray: Ray, scales: list[Tensor], unit: float) -> Ray:
        """The ray along what the closure made of its gradient, scaled as the gradient: shorter by what was clipped."""
        tensors = scaling.over(scaling.in_units(found.moves.tensors, scales, unit), scales, self._foreach)
        true = scaling.in_units(found.gradient.tensors, scales, unit)
        slope = -sum(scaling.products(true, tensors, ray.ratios))
        return replace(ray, tensors=tensors, norms=[float(d.norm()) for d in tensors], slope=slope)

    def _first_step(self, judged: Evaluation, memory: Memory) -> Step:
        """The step along the first direction, d = g / (|g| + eps), that is best for its own batch."""
        own, unit = judged.gradient, unit_of(judged.gradient.norms)
        grads = scaling.in_units(own.tensors, [self.state[p]["squares"] for p in own.params], unit)
        tensors = scaling.over(grads, [g.abs().add_(scaling.EPS) for g in grads], self._foreach)
        slope = -sum(scaling.products(grads, tensors, own.ratios))
        ray = replace(own, tensors=tensors, norms=[sqrt(g.numel()) for g in grads], slope=slope, unit=1.0)
        with self._trials(judged, ray) as at:
            line = Line(judged.value / unit, slope, lambda t: at(t) / unit, eps=judged.eps)
            return self._named_rule(self.param_groups[0]).choose(line, memory)

    def _at(self, point: str, judged: Evaluation) -> float:
        """The judging loss in the average, or at the start, on the same batch and random numbers."""
        params = [p for p in self._all() if "average" in self.state.get(p, {})]
        saved = [p.detach().clone() for p in params]
        try:
            torch._foreach_copy_(params, [self.state[p][point] for p in params])
            torch.clear_autocast_cache()
            value = looked(judged, list(self._all()), self._sign(), self)
        finally:
            torch._foreach_copy_(params, saved)
        return value if isfinite(value) else judged.value

    def _move_all(self, ray: Ray, taken: float, weight: float) -> bool:
        """z, the average and y after the step; False, and nothing moved, where it leads out of the numbers."""
        params = [p for p in self._all() if p.requires_grad]
        moving = [self.state[p]["z"] for p in ray.params]
        shares = self._decays(ray, taken)
        if overflows(ray, taken, self._sign(), moving, shares):
            return False
        decay_(moving, shares, towards=ray.params)  # of y, where the gradient was taken
        add_(moving, ray.tensors, [-taken * ratio * self._sign() for ratio in ray.ratios], self._foreach)
        iterates, averages = ([self.state[p][key] for p in params] for key in ("z", "average"))
        lerp_(averages, iterates, self._shares(params, weight), self._foreach)
        self._place(params)
        return True

    def _place(self, params: list[Tensor]) -> None:
        """Put y into the parameters."""
        torch._foreach_copy_(params, self._points(params))
        for p in params:
            self.state[p]["version"] = p._version
        torch.clear_autocast_cache()

    def _points(self, params: list[Tensor]) -> list[Tensor]:
        """y, where the next gradients are taken."""
        iterates, averages = ([self.state[p][key] for p in params] for key in ("z", "average"))
        if self._foreach is False:
            return [average.lerp(z, SHARE) for z, average in zip(iterates, averages, strict=True)]
        return list(torch._foreach_lerp(averages, iterates, SHARE))

    def _follow(self, params: list[Tensor]) -> None:
        """Where somebody else has changed a parameter since the last step (a reload, a projection), go with it."""
        moved = [p for p in params if self.state[p].get("version") not in (None, p._version)]
        for p, y in zip(moved, self._points(moved) if moved else [], strict=True):
            if not torch.equal(p, y.to(p.dtype)):
                shift = p.detach().to(y.dtype) - y
                self.state[p]["z"] += shift
                self.state[p]["average"] += shift

    def _anew(self, begun: int) -> int:
        """Forget the first gradients, which were far larger than what came after; where it is counted from now on."""
        for p in self._all():
            if "squares" in self.state.get(p, {}):
                self.state[p]["squares"].zero_()
                self.state[p].update(seen=0, **noise.NONE)
        self._set(begun=begun, look=3, lengths=0.0)
        return 1

    # --- runs that are lost

    def _note(self, found: Evaluation, k: int) -> None:
        """Losses and gradients of late: what batches differ by, and whether the run may be lost."""
        first, value = self.param_groups[0], found.value
        if k == 1:
            alive = sum(norm > 0.0 for norm in found.gradient.norms)
            start = min(value, first["first_loss"]) if first["begun"] else value
            self._set(first_loss=start, mean_loss=value, last_loss=value, spread=0.0, above=0, alive=alive, dead=0)
            self._set(low=value, low_spread=0.0)
            return
        weight, spread = max(FORGET, 1.0 / k), first["spread"]
        tamed = min(value, first["mean_loss"] + OUTLIER * spread) if spread > 0.0 else value
        mean = first["mean_loss"] + weight * (tamed - first["mean_loss"])
        spread = differing(spread, value, first["last_loss"], weight)
        self._set(mean_loss=mean, last_loss=value, spread=spread)
        if k <= DEAD or mean < first["low"]:
            self._set(low=mean, low_spread=spread)
        self._set(above=first["above"] + 1 if value > first["first_loss"] else 0)
        self._set(dead=first["dead"] + 1 if self._dying(found.gradient) else 0)

    def _dying(self, gradient: Ray) -> bool:
        """Whether half of the gradients are exactly zero that were not."""
        return 2 * sum(norm > 0.0 for norm in gradient.norms) <= self.param_groups[0]["alive"]

    def _suspect(self) -> Status:
        """What the losses so far speak for: going on, back to the start, or back to where it is better."""
        first = self.param_groups[0]
        if first["k"] - first["begun"] < DEAD:
            return Status.OK
        if first["dead"] >= DEAD:
            return Status.RESTARTED
        if first["returned"] >= OFTEN:
            return Status.OK
        mean, gained = first["mean_loss"], first["first_loss"] - first["low"]
        if first["above"] >= ABOVE and mean > first["first_loss"] + CLEARLY * first["spread"]:
            return Status.RESTARTED
        risen = mean - first["low"] > max(CLEARLY * first["low_spread"], PART * gained)
        return Status.RETURNED if risen and first["shorter"] >= 2 else Status.OK

    def _back(self, found: Evaluation, judged: Evaluation, memory: Memory) -> tuple[Step | None, int]:
        """The step back where the run is lost, or None; and how often the loss was looked at for it."""
        first, status = self.param_groups[0], self._suspect()
        if status is Status.OK:
            return None, 0
        start = first["first_loss"]
        if first["dead"] >= DEAD:
            gone = self._dying(found.gradient) and found.value > start - 0.1 * abs(start)
            again = AGAIN * first["first_step"]
            return self._from("start", again, Status.RESTARTED, memory) if gone else None, 0
        there = self._at("start", judged)
        if status is Status.RESTARTED and not judged.value > there + first["spread"]:
            self._set(above=0, first_loss=first["mean_loss"])  # the first batch was an easy one
            return None, 1
        if status is Status.RESTARTED:
            return self._from("start", AGAIN * first["first_step"], status, memory), 1
        limit = max(SHORTER * min(memory.step or 0.0, noise.common(self._known())), SHORTEST)
        self._set(limit=limit)
        if there < self._at("average", judged):
            return self._from("start", min(limit, first["first_step"]), status, memory), 2
        return self._from("average", limit, status, memory), 2

    def _from(self, point: str, step: float, status: Status, memory: Memory) -> Step:
        """Begin anew from a point, with another first step."""
        first, step = self.param_groups[0], max(step, SHORTEST)
        for p in self._all():
            state = self.state.get(p, {})
            if "start" in state:
                p.copy_(state[point])
                del state["start"], state["z"], state["average"], state["squares"], state["noise"]
                state["weight_sum"] = 0.0
        self._set(begun=first["k"] + 1, look=3, gain=GAIN, vote=0, lengths=0.0)
        self._set(above=0, dead=0, shorter=0, returned=first["returned"] + 1, first_step=step)
        return Step(0.0, Memory(memory.k + 1, step), status=status)

    def _initialise(self) -> None:
        for p in self._all():
            state = self.state[p] if p.requires_grad else {"weight_sum": 0.0}
            # until its first step a parameter may still be loaded, so its state is made anew
            if not state.get("weight_sum"):
                wide = p.detach().to(torch.promote_types(p.dtype, torch.float32))
                points = {key: wide.clone() for key in ("z", "start", "average")}
                known = {"weight_sum": 0.0, "version": p._version, **noise.NONE}
                state.update(points, squares=torch.zeros_like(wide), seen=0, **known)
