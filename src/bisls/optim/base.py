"""What every step-size optimiser shares: closures, one line over all groups, trials without a trace, averaging, state."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from itertools import chain
from math import inf, isfinite
from typing import Any, ClassVar

import torch
from torch import Tensor

from bisls._check import Wrong, real, settled, standing_for
from bisls.agreement import agree, agree_on_parameters
from bisls.directions.base import Direction
from bisls.line import Line
from bisls.optim.arithmetic import Ray, add_, decay_, overflows
from bisls.optim.averaging import Averaging
from bisls.optim.closures import Closure, call_closure
from bisls.optim.evaluation import Evaluation, bent, collect, looked, suspected
from bisls.optim.groups import LATER, OPTIONS, check_group, check_keys, check_overlap, listed_params, settings_of
from bisls.optim.headings import begin, direction_of, headed, keep
from bisls.optim.states import checked_state
from bisls.optim.units import chosen, options
from bisls.ranks import meeting, together
from bisls.status import Status
from bisls.steps.base import Memory, Step, StepRule
from bisls.still import Moment
from bisls.surroundings import Surroundings

logger = logging.getLogger("bisls")

TOLD = (Status.NON_FINITE, Status.BELOW_BOUND, Status.RESTARTED, Status.RETURNED)  # in the log
Params = Any  # what torch.optim takes: tensors, named tensors, or dicts of groups


class LineOptimizer(Averaging):
    """A `torch.optim.Optimizer` whose step comes from a step rule on one line through all of its groups.

    A new optimiser is a constructor that puts numbers into ``defaults`` and a method `_rule` that makes the step rule from
    them. Everything that must survive a checkpoint lies in ``param_groups`` as numbers and in ``state`` as tensors.
    """

    _searches = False  # whether the rule evaluates the loss at trial points, so that it needs a closure
    direction: Direction | None = None  # the gradient itself; also what older pickles had
    _met = 0  # the group of processes whose parameters are known to be the same
    leaves_backward_out = True  # in trials with a closure that calls it; a closure that needs its gradients ends that
    _scale = 0.0  # by which the closure multiplied the gradient at the last step; only for a warning
    # what the optimiser itself writes into every group
    _counters: ClassVar[dict[str, Any]] = {
        "k": 0,
        "remembered": None,
        "noted": {},
        "train_mode": True,
        "last_step_size": 0.0,
        "last_checks": 0,
        "last_status": 0,
        "direction": None,
        "direction_t": 0,
    }
    _notes: ClassVar[tuple[str, ...]] = ()  # what else it writes into single groups
    _together: ClassVar[tuple[str, ...]] = ()  # what a parameter has, all of it, once it has a weight in the average
    # the arguments of the step rule -> those of the optimiser, where they differ
    _stands: ClassVar[dict[str, str]] = {}

    def __init__(self, params: Params, defaults: dict[str, Any], direction: Direction | None = None):
        name = type(self).__name__
        self.direction = direction_of(name, direction)
        defaults = {**LATER, **defaults}
        for key, wanted in OPTIONS.items():
            defaults[key] = settled(name, key, defaults[key], wanted)
        for key in defaults.keys() - OPTIONS.keys():
            with suppress(Wrong):  # what is no number is named by the rule
                defaults[key] = real(defaults[key])
        listed = listed_params(name, params)
        super().__init__(listed, {**defaults, **self._counters})
        self._named_rule(
            {**self.param_groups[0], "lr": defaults["lr"]}
        )  # a bad argument is named now, not at the first step
        if not any(p.requires_grad for p in self._all()):
            raise ValueError(f"`{name}(params=...)`: none of the tensors requires grad; call requires_grad_() on them")
        self._set(direction=None if self.direction is None else repr(self.direction))

    # --- what users call

    @together
    def step(self, closure: Closure | None = None, step_closure: Closure | None = None, *, loss: Any = None) -> Any:
        """Take one step.

        Args:
            closure: Returns the loss. It may be the usual torch closure that calls ``zero_grad`` and ``backward``; one that
                only returns the loss is a little cheaper: its trial points record no graph. Either way they run no backward
                pass, unless what comes back has gradients in it (a sharpness-aware closure, say).
            step_closure: The loss on an independent batch, which alone decides the step; the direction stays that of ``closure``.
            loss: In place of a closure, after ``loss.backward()``: for rules that need no trial points (and with GradScaler).

        A closure that clips its gradients after ``backward`` is honoured: the rule sees the gradient as backward left it, and the
        parameters move by its step times the clipped one. After ``loss=loss`` the two cannot be told apart, so do not clip there.

        Returns:
            The loss at the parameters before the step, as the closure gave it but without its graph.
        """
        name = type(self).__name__
        if not self.param_groups[0]["train_mode"]:
            raise RuntimeError(f"`{name}.step()` in evaluation mode; call optimizer.train() before training goes on")
        self._meet()
        with torch.no_grad():
            if closure is None:
                if loss is None and not self._any_gradient():
                    self._initialise()  # distributed checkpointing asks for this on zero gradients
                    return None
                if loss is None or self._searches or step_closure is not None:
                    wanted = "step(closure)" + ("" if self._searches else " or, after backward(), step(loss=loss)")
                    raise ValueError(f"`{name}.step()` sets its step from the loss: call {wanted}")
                found = self._given(loss)
                judged = found
            else:
                if loss is not None:
                    raise ValueError(f"`{name}.step(closure, loss=...)`: pass one of the two")
                # the batch that judges goes first, so that .grad ends as the main closure leaves it
                judged_first = None if step_closure is None else self._evaluate(step_closure, keep_grad=True)
                found = self._evaluate(closure)
                judged = judged_first or found
            self._advance(found, judged)
            return found.loss

    @property
    def last_step_size(self) -> float:
        """The step that was really taken last, of the first group (each group's is in ``param_groups``)."""
        return self.param_groups[0]["last_step_size"]

    @property
    def last_status(self) -> Status:
        """How the last step ended; its ``advice`` says what to do."""
        return Status(self.param_groups[0]["last_status"])

    @property
    def last_checks(self) -> int:
        """How many trial points the last step evaluated."""
        return self.param_groups[0]["last_checks"]

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group; its ``lr`` sets the ratio of its steps to those of the others, its ``weight_decay`` is its own."""
        name, options = type(self).__name__, self.defaults.keys() - self._counters.keys()
        check_keys(name, param_group, options, (*self._counters, *self._notes), tuple(self._all()))
        super().add_param_group(param_group)
        group, first = self.param_groups[-1], self.param_groups[0]
        try:
            check_group(name, group, first, options)
            devices = sorted({str(p.device) for p in self._all()})
            if len(devices) > 1:
                raise ValueError(f"`{name}(params=...)`: tensors are spread over {', '.join(devices)}; use one device")
            check_overlap(name, list(self._all()))
        except ValueError:
            self.param_groups.pop()  # what was refused must not train all the same
            raise
        group.update({key: first[key] for key in self._counters})

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a saved state. Averages of half-precision parameters keep the precision they were saved in.

        Raises:
            ValueError: The state is of another optimiser or another model, or holds what none writes (numbers that are not
                finite, or out of range); nothing was loaded.
        """
        state_dict = checked_state(self, state_dict)
        super().load_state_dict(state_dict)
        self._met = 0  # the other processes must have loaded the same
        saved = chain.from_iterable(group["params"] for group in state_dict["param_groups"])
        for index, p in zip(saved, self._all(), strict=True):
            for key, value in state_dict["state"].get(index, {}).items():
                if isinstance(value, Tensor) and value.is_floating_point() and value.dtype != p.dtype:
                    self.state[p][key] = value.to(p.device, copy=True)

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "direction": self.direction}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        for group in self.param_groups:
            for key, value in LATER.items():
                group.setdefault(key, value)

    def _meet(self) -> None:
        """Before the first step with other processes: their parameters and settings must be the same."""
        here = meeting()
        if here != self._met:
            names = [name for group in self.param_groups for name in group.get("param_names", ())]
            cure = "; DistributedDataParallel does so when it wraps a model"
            agree_on_parameters(f"{type(self).__name__}.step(...)", {"params": list(self._all())}, names, cure=cure)
            agree(type(self).__name__, **settings_of(self.param_groups))
        self._met = here

    # --- what optimisers say about themselves

    def _rule(self, group: dict[str, Any]) -> StepRule:
        """The step rule, from the numbers in the first group; its ceiling is ``lr``."""
        raise NotImplementedError

    def _named_rule(self, group: dict[str, Any], unit: float = 1.0) -> StepRule:
        """The same, in units of the loss; a number that will not do is named as the user wrote it."""
        with standing_for(type(self).__name__, **self._stands):
            return self._rule(options(group, unit))

    def _will_look(self) -> bool:
        """Whether the next step evaluates the loss at other points: then the random numbers that it draws are kept."""
        return self._searches

    # --- evaluations

    def _evaluate(self, closure: Closure, keep_grad: bool = False) -> Evaluation:
        params = [p for p in self._all() if p.requires_grad]
        moment = Moment.now(params[0].device, Surroundings(closure)) if params and self._will_look() else None
        called = call_closure(type(self).__name__, closure, params, keep_grad)
        found = self._collected(called.loss, params, called.gradient)
        if called.clipped:
            found = replace(found, moves=bent(found.gradient, [d for d in called.moves if d is not None]))
            self._scale = suspected(type(self).__name__, found.scale, self._scale)
        return replace(found, closure=closure, does_backward=called.does_backward, moment=moment)

    def _given(self, loss: Any) -> Evaluation:
        params = [p for p in self._all() if p.requires_grad]
        if all(p.grad is None for p in params):
            name = type(self).__name__
            raise ValueError(f"`{name}.step(loss=...)`: there are no gradients; call loss.backward() first")
        return self._collected(loss, params, [p.grad for p in params])

    def _collected(self, loss: Any, params: list[Tensor], grads: Sequence[Tensor | None]) -> Evaluation:
        return collect(type(self).__name__, loss, params, grads, self._ratios(), self._sign(), self._foreach)

    # --- the step

    def _advance(self, found: Evaluation, judged: Evaluation) -> None:
        """Choose the step on the judging loss, take it along the other's gradient."""
        first, clipped = self.param_groups[0], found.clipped
        kept: Mapping[str, Any] = {}
        if self.direction is not None:
            alone, clipped = found is judged, False  # what was clipped is what the direction sees
            found, kept = self._headed(found)
            judged = found if alone else self._headed(judged)[0]
        memory = Memory(first["k"], first["remembered"], dict(first["noted"]))
        if not (isfinite(found.value) and isfinite(found.gradient.slope) and isfinite(found.moves.slope)):
            step = Step(0.0, memory, status=Status.NON_FINITE)
        elif self._ceiling() == 0.0:
            step = Step(0.0, memory, status=Status.STATIONARY)
        else:
            rule = self._named_rule({**first, "lr": self._ceiling()}, judged.gradient.unit)
            step = self._choose(rule, judged, judged.gradient, memory)
            if step.size > 0.0 and clipped:
                step = self._along_clipped(rule, found, found is judged, memory, step)
        if step.size > 0.0:
            step = self._take(found, judged, step)
        if kept and step.status is not Status.NON_FINITE:
            self._set(direction_t=first["direction_t"] + 1)
            keep(self.state, kept)
        self._remember(step)

    def _initialise(self) -> None:
        super()._initialise()
        if self.direction is not None:
            begin(self.state, [p for p in self._all() if p.requires_grad])

    def _headed(self, found: Evaluation) -> tuple[Evaluation, Mapping[str, Any]]:
        """A loss with the rays of the direction, and what to remember of it."""
        assert self.direction is not None
        params = [p for p in self._all() if p.requires_grad]
        return headed(self.direction, found, params, self.state, self.param_groups[0]["direction_t"])

    def _choose(self, rule: StepRule, judged: Evaluation, ray: Ray, memory: Memory, most: float = inf) -> Step:
        with self._trials(judged, ray) as at:
            line = Line(judged.value, ray.slope, at, max_step=most, eps=judged.eps)
            return chosen(rule.choose, line, memory, ray.unit)

    def _along_clipped(self, rule: StepRule, found: Evaluation, judges: bool, memory: Memory, step: Step) -> Step:
        """The step for a clipped gradient: that of the true one, which is shorter on the clipped one by just what was clipped.

        A rule that looked along the clipped gradient would find the longer step that leads as far as the true gradient does, and
        undo the clipping. A search has tried other points than the one this leads to, so it goes on from there, never longer.
        """
        slope = found.moves.slope
        if slope >= 0.0:
            return replace(step, size=0.0, status=Status.NOT_DESCENT if slope > 0.0 else Status.STATIONARY)
        if not (judges and self._searches):
            return step
        again = self._choose(rule, found, found.moves, memory, most=step.size)
        return replace(again, memory=step.memory, checks=step.checks + again.checks)

    def _take(self, found: Evaluation, judged: Evaluation, step: Step) -> Step:
        """Move the parameters by the step and let them decay; the step that was really taken comes back."""
        ray = found.moves
        shares = self._decays(ray, step.size)
        if overflows(ray, step.size, self._sign(), ray.params, shares):
            return replace(step, size=0.0, status=Status.NON_FINITE)
        decay_(ray.params, shares)
        self._move(ray, step.size)
        self._average(step.memory.k)
        return step

    def _move(self, ray: Ray, size: float) -> None:
        """params <- params - size * ratio * d."""
        add_(ray.params, ray.tensors, [-size * r * self._sign() for r in ray.ratios], self._foreach)
        torch.clear_autocast_cache()  # where the step is taken inside autocast, its casts of the weights are now old

    def _decays(self, ray: Ray, size: float) -> list[float]:
        """The share of each parameter that decays: step * weight_decay, as AdamW has it, but never beyond 0."""
        if not any(group["weight_decay"] for group in self.param_groups):
            return [0.0] * len(ray.params)
        decay = {p: float(group["weight_decay"]) for group in self.param_groups for p in group["params"]}
        return [min(size * r * decay[p], 1.0) for p, r in zip(ray.params, ray.ratios, strict=True)]

    @contextmanager
    def _trials(self, judged: Evaluation, ray: Ray) -> Iterator[Callable[[float], float]]:
        """phi(t) of the judging loss along a ray. Afterwards the parameters are bit for bit where they were."""
        saved: list[Tensor] = []
        unchanged = [0.0] * len(ray.params)  # decay is no part of the line

        def at(t: float) -> float:
            if overflows(ray, t, self._sign(), saved or ray.params, unchanged):
                return inf
            if not saved:
                saved.extend(p.detach().clone() for p in ray.params)
            torch._foreach_copy_(ray.params, saved)
            self._move(ray, t)
            return looked(judged, list(self._all()), self._sign(), self)

        try:
            yield at
        finally:
            if saved:
                torch._foreach_copy_(ray.params, saved)

    def _remember(self, step: Step) -> None:
        before = self.last_status
        memory = step.memory
        self._set(k=memory.k, remembered=memory.step, noted=dict(memory.notes))
        self._set(last_checks=step.checks, last_status=int(step.status))
        ceiling = self._ceiling()
        for group in self.param_groups:
            group["last_step_size"] = step.size * (float(group["lr"]) / ceiling) if ceiling > 0 else 0.0
        if step.status is not before and step.status in TOLD:
            logger.warning("%s, step %d: %s", type(self).__name__, step.memory.k, step.status.advice)

    # --- small things

    def _any_gradient(self) -> bool:
        return any(p.grad is not None and bool(p.grad.any()) for p in self._all())

    def _ceiling(self) -> float:
        return max(float(group["lr"]) for group in self.param_groups)

    def _ratios(self) -> dict[Tensor, float]:
        ceiling = self._ceiling()
        return {
            p: float(group["lr"]) / ceiling if ceiling > 0 else 0.0
            for group in self.param_groups
            for p in group["params"]
        }

    def _sign(self) -> float:
        return -1.0 if self.param_groups[0]["maximize"] else 1.0
