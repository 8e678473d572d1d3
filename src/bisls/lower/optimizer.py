"""The user's own torch optimiser at the lower level, called as it is."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from functools import partial
from math import isfinite, nan
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from bisls.batches import Minibatches
from bisls.derivatives import Derivative, Following, Within
from bisls.lower.base import Lowered, LowerPart, State, TraceStep
from bisls.lower.hooked import Hooks, holding
from bisls.lower.known import known, rate_of
from bisls.oracle import LowerPoint, Oracle
from bisls.states import Fields, Free, Kind, Number, Unfit, shown
from bisls.status import Status
from bisls.still import Moment
from bisls.vector import Vector, finite, norm

SCHEDULED = ("lr", "betas", "momentum")  # what the schedulers of torch write into groups


class UserOptimizer(LowerPart):
    """Calls ``optimizer.step()`` once for each batch, with the gradient of the lower loss in ``.grad``.

    Its groups, state and rates are its own, and a scheduler that the user steps acts on it as ever. What it holds is saved with
    the solver. Where a step leads to numbers that are not finite, y and the optimiser go back to where the loop began.

    Args:
        optimizer: A `torch.optim.Optimizer` over the lower parameters: all of them, and nothing else.
        lower: The lower parameters.
        call: Who asks, for messages.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, lower: Vector, call: str = "Solver"):
        self.optimizer = optimizer
        where = f"`{call}(lower_optimizer=...)`"
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise ValueError(
                f"{where}: must be a torch.optim.Optimizer over the lower parameters, got {type(optimizer).__name__}; a way of "
                "your own to train y has a method descend(...), as bisls.lower.LowerPart has"
            )
        if any(kind.__name__ == "ZeroRedundancyOptimizer" for kind in type(optimizer).__mro__):
            raise ValueError(
                f"{where}: ZeroRedundancyOptimizer keeps a part of its state on each rank, which can neither be put back after a "
                "failed iteration nor saved; pass the optimiser that it wraps"
            )
        own = [p for group in optimizer.param_groups for p in group["params"]]
        missing = _without(lower.tensors, own)
        if missing:
            raise ValueError(
                f"{where}: the optimiser lacks {len(missing)} of the {len(lower.tensors)} lower parameters, the first of shape "
                f"{tuple(missing[0].shape)}; give it all of them, or leave them out of lower_params"
            )
        others = [p for p in _without(own, lower.tensors) if p.requires_grad]  # no step moves what is frozen
        if others:
            raise ValueError(
                f"{where}: the optimiser has {len(others)} parameters that are not in lower_params, the first of shape "
                f"{tuple(others[0].shape)}; it must train the lower parameters alone"
            )
        self._call, self._hooks = call, Hooks(optimizer, lower)
        self._trial = self._again = False  # steps that are only tried; the last ones, repeated
        self._rates: list[list[dict[str, Any]]] = []  # what a schedule may change, in each of the last steps
        self._described = _described(optimizer)
        self._first = self._state(0.0)
        self._began = self._first  # the state in which the last iteration began
        self._held: State | None = self._first  # the state that the optimiser is in; None in the middle of an iteration

    def __repr__(self) -> str:
        return self._described

    @property
    def settings(self) -> list[dict[str, Any]]:
        """The numbers of its groups, rates among them."""

        def plain(group: dict[str, Any]) -> dict[str, Any]:
            own = {name: value.tolist() if isinstance(value, Tensor) else value for name, value in group.items()}
            return {
                name: value
                for name, value in sorted(own.items())
                if isinstance(value, Real | tuple | list) and name != "params"
            }

        return [plain(group) for group in self.optimizer.param_groups]

    def descend(
        self,
        oracle: Oracle,
        batches: Minibatches,
        y: Tensor,
        k: int,
        state: State,
        *,
        trace: Following | bool = False,
        replay: Moment | None = None,
    ) -> Lowered:
        """One step of the optimiser for each batch."""
        vector, bounds = oracle.problem.y, oracle.problem.lower_bounds
        if self._held is self._first:  # until now the user may have loaded something into it
            self._first = self._held = self._began = self._state(0.0)
        self._settle()
        self._load(state or self._first)
        usual = float(state.get("usual", 0.0))
        self._held = None
        start, before, following = y, y, Following.of(trace)
        vector.write_(y)
        last: LowerPoint | None = None  # before the last step
        first: LowerPoint | None = None
        alive, began = 0, len(batches) if following is None else following.first(len(batches))
        rows = oracle.rooms("y", len(batches) - max(began, 1))  # where the steps begin is there already
        steps, status, promised, recorded = 0, Status.OK, 0.0, []
        grads = [tensor.grad for tensor in vector.tensors]
        room, spare = oracle.rooms("work", 2)
        try:
            with oracle.upper_frozen():
                for i, batch in enumerate(batches):
                    here = oracle.lower(batch, None, replay, room if self._hooks.lends else None)  # at the present y
                    if not finite(here.grad):
                        status = Status.NON_FINITE
                        break
                    seen = i >= began
                    if i > 0:
                        before = vector.read(rows[i - max(began, 1)] if seen else spare)
                    self._rated(i)
                    scaling = partial(_row, oracle, len(batches) - began, i - began)
                    prepared, back = self._step(here.grad, following if seen else None, scaling)
                    stepped = None
                    if bounds is not None:
                        stepped = vector.read()
                        y = bounds.project(stepped, vector)
                        vector.write_(y)
                    fall = vector.along(here.grad, before)
                    if not isfinite(fall) and not finite(*vector.tensors):
                        vector.write_(start)
                        status = Status.NON_FINITE
                        self._load(self._began)
                        break
                    if first is None:
                        first, alive = here.without_gradient(), _alive(here)
                    last, steps = here, steps + 1
                    promised += fall
                    if following is not None:
                        went = None if back is None else self._hooks.around(back(), here.grad, prepared)
                        if stepped is not None and went is not None:
                            went = Within(went, y == stepped)
                        rate = rate_of(self.optimizer)
                        recorded.append(TraceStep(before if seen else None, batch, here.moment, went, rate))
        finally:
            for tensor, own in zip(vector.tensors, grads, strict=True):
                tensor.grad = own
        y = vector.read()
        rate = rate_of(self.optimizer)
        usual = usual or (0.0 if first is None else abs(first.value))
        self._held = after = self._state(rate if steps else 0.0, usual)
        return Lowered(
            y=y,
            step=rate if steps else 0.0,
            steps=steps,
            checks=0,
            status=status,
            state=after,
            accepted=rate,
            first=first,
            alive=None if last is None else (alive, _alive(last)),
            left=nan if last is None else norm(last.grad),
            promised=promised,
            usual=usual,
            trace=tuple(recorded),
        )

    def repeated(
        self, oracle: Oracle, batches: Minibatches, lowered: Lowered, y: Tensor, moment: Moment | None
    ) -> Tensor | None:
        """Steps of the optimiser, which is afterwards in the state that it is in now."""
        with self._lent():
            return super().repeated(oracle, batches, lowered, y, moment)

    def rerun(self, oracle: Oracle, batches: Minibatches, lowered: Lowered) -> Tensor | None:
        """The steps again from the state in which they began; the optimiser is afterwards in the state that it is in now."""
        with self._lent(again=True):
            return super().rerun(oracle, batches, lowered)

    @contextmanager
    def _lent(self, again: bool = False) -> Iterator[None]:
        held, began = self._held, self._began
        try:
            self._trial, self._again = True, again
            with holding(self.optimizer):
                yield
        finally:
            self._trial = self._again = False
            self._held, self._began = held, began

    def _rated(self, i: int) -> None:
        """Before a step: note its rates, or set those that it had when it was taken. A hook may step a schedule."""
        groups = self.optimizer.param_groups
        if self._again and i < len(self._rates):
            for group, own in zip(groups, deepcopy(self._rates[i]), strict=True):
                group.update(own)
        elif not self._trial:
            now = [{name: deepcopy(group[name]) for name in SCHEDULED if name in group} for group in groups]
            self._rates[i:] = [now]

    def anew(self, state: State) -> State:
        """As it was made, but for the rates that somebody has changed since."""
        groups = deepcopy(self.optimizer.state_dict()["param_groups"])
        return {
            **self._first,
            "usual": state.get("usual", 0.0),
            "optimizer": {**self._first["optimizer"], "param_groups": groups},
        }

    def careful(self, state: State) -> State:
        """The state in which the last iteration began: what it has led to is undone."""
        return self._began

    def saved(self, state: State) -> State:
        """A copy, with the groups as they are now: a scheduler has acted on them since."""
        return state if state is not self._held else {**state, "optimizer": deepcopy(self.optimizer.state_dict())}

    def keeps(self, y: Vector | None) -> Fields:
        """What the optimiser holds, and its last rate."""
        return Fields(
            {"optimizer": Held(self.optimizer), "accepted": Number()}, optional={"usual": Number(0.0)}, empty=True
        )

    def checked(self, state: State) -> State:
        """Read a state from a file."""
        return self.keeps(None).read(state, "state")

    def _step(
        self, gradient: Tensor, seen: Following | None, room: Callable[[], Tensor]
    ) -> tuple[Tensor, Callable[[], Derivative | None] | None]:
        """One step; the gradient as the hooks left it, and what gives the derivative of the step by that, if it is seen."""
        try:
            prepared = self._hooks.prepare(gradient)
            back = None if seen is None else known(self._hooks, prepared, seen, room)
            self._hooks.step(self._trial)
        except (TypeError, ValueError, RuntimeError) as error:
            name = type(self.optimizer).__name__
            raise ValueError(
                f"`{self._call}(lower_optimizer={name}(...))`: {name}.step(), called without a closure and with the gradients in "
                f".grad, failed: {error}. Optimisers that evaluate the loss themselves can't be used here; "
                "lower_step=Armijo() and lower_direction=LBFGS() do the like"
            ) from error
        return prepared, back

    def _state(self, accepted: float, usual: float = 0.0) -> State:
        """The state that it is in; what it holds in it is a copy once `_settle` or `saved` has been asked."""
        now = self.optimizer.state_dict()
        groups = deepcopy(now["param_groups"])
        return {"optimizer": {**now, "param_groups": groups}, "accepted": accepted, "usual": usual}

    def _settle(self) -> None:
        """Before it moves on: the state that it is in is copied. Until then a copy would only be memory."""
        if self._held is not None:
            self._held["optimizer"]["state"] = deepcopy(self.optimizer.state_dict()["state"])

    def _load(self, wanted: State) -> None:
        """Put the optimiser into a state, where it is in another: after an iteration that was cut off, or from a file."""
        if wanted is not self._held:
            now = [{name: own for name, own in g.items() if name != "params"} for g in self.optimizer.param_groups]
            self.optimizer.load_state_dict(deepcopy(dict(wanted["optimizer"])))
            if (
                wanted is self._began
            ):  # the iteration is made again: rates that somebody has changed since stay as they are
                for group, own in zip(self.optimizer.param_groups, now, strict=True):
                    group.update(own)
        self._held = self._began = wanted


def _described(optimizer: torch.optim.Optimizer) -> str:
    """The optimiser as it was made: what is no default of its class, and what a group has of its own.

    What a schedule changes is left out where it changes it, in the groups: two runs of one method differ by their place in it.
    """
    defaults = inspect.signature(type(optimizer).__init__).parameters
    made = {
        name: value
        for name, value in optimizer.defaults.items()
        if name != "lr" and name in defaults and repr(value) != repr(defaults[name].default)
    }
    texts = [f"{name}={value!r}" for name, value in sorted(made.items())]
    for i, group in enumerate(optimizer.param_groups):
        own = {
            name: group[name]
            for name, value in optimizer.defaults.items()
            if name not in SCHEDULED and name in group and repr(group[name]) != repr(value)
        }
        texts += [f"group {i}: {name}={value!r}" for name, value in sorted(own.items())]
    return f"{type(optimizer).__name__}({', '.join(texts)})"


def _row(oracle: Oracle, n: int, i: int) -> Tensor:
    """Where the scaling of step i of n is kept."""
    return oracle.rooms("scale", n)[i]


def _alive(here: LowerPoint) -> int:
    return int(here.grad.count_nonzero())


def _without(tensors: Sequence[Tensor], others: Sequence[Tensor]) -> list[Tensor]:
    known = {id(tensor) for tensor in others}
    return [tensor for tensor in tensors if id(tensor) not in known]


class Held(Kind):
    """What a torch optimiser holds: groups like its own, no NaN, and such that it can take a step from there.

    Args:
        optimizer: The optimiser. What its state looks like is its own affair, so the state is tried on a copy of it.
    """

    def __init__(self, optimizer: torch.optim.Optimizer):
        self.optimizer = optimizer

    def read(self, value: Any, where: str) -> dict[str, Any]:
        """A copy of the state."""
        saved = Free().read(value, where)
        for name, kind in (("state", dict), ("param_groups", list)):
            if not isinstance(saved, dict) or not isinstance(saved.get(name), kind):
                raise Unfit(f"{where} is not what the state_dict() of an optimiser gives: it lacks {name!r}")
        groups, ours = saved["param_groups"], self.optimizer.param_groups
        for i, group in enumerate(groups):
            if not isinstance(group, dict) or not isinstance(group.get("params"), list):
                raise Unfit(f"{where}['param_groups'][{i}] is {shown(group)}; it must be a mapping that has 'params'")
        sizes = [len(group["params"]) for group in groups]
        if sizes != [len(group["params"]) for group in ours]:
            here = [len(group["params"]) for group in ours]
            raise Unfit(f"{where} is of groups of {sizes} parameters, those of the lower optimiser are of {here}")
        for i, (group, own) in enumerate(zip(groups, ours, strict=True)):
            for name in own.keys() - {"params"}:
                _like(own[name], group.get(name), f"{where}['param_groups'][{i}][{name!r}]", name == "lr")
        for place, number in _numbers(saved["state"], f"{where}['state']"):
            if isinstance(number, Tensor) and not _plain(number):
                raise Unfit(
                    f"{place} is {shown(number)}; it must be a tensor that holds its numbers one beside the other"
                )
            if isinstance(number, Tensor) and number.is_floating_point():
                wrong = bool(torch.isnan(number).any()) or (place.endswith("['step']") and bool((number < 0).any()))
            else:
                wrong = isinstance(number, Real) and (number != number or (place.endswith("['step']") and number < 0))
            if wrong:
                raise Unfit(f"{place} holds values that are no numbers, or no count")
        failed = self._tried(saved) if not self._tried(deepcopy(self.optimizer.state_dict())) else ""
        if failed:
            raise Unfit(f"{where}: {type(self.optimizer).__name__}.step() cannot go on from it ({failed})")
        return saved

    def _tried(self, state: dict[str, Any]) -> str:
        """Why a copy of the optimiser cannot take two steps from a state, along gradients of zero; empty where it can."""
        try:
            copy = deepcopy(self.optimizer)
            copy.load_state_dict(deepcopy(state))
            for group in copy.param_groups:
                for p in group["params"]:
                    p.grad = torch.zeros_like(p)
            with torch.enable_grad():
                copy.step()
                copy.step()
        except Exception as error:
            return f"{type(error).__name__}: {error}".partition("\n")[0]
        return ""


def _like(own: Any, saved: Any, where: str, rate: bool) -> None:
    """Refuse a setting that cannot stand where a number stands here."""
    if isinstance(own, bool) or not isinstance(own, Real):
        for i, part in enumerate(own if isinstance(own, tuple | list) and isinstance(saved, tuple | list) else ()):
            _like(part, saved[i] if i < len(saved) else None, f"{where}[{i}]", False)
        return
    number = saved.item() if isinstance(saved, Tensor) and saved.numel() == 1 and _plain(saved) else saved
    Number(0.0 if rate else -float("inf"), infinite=not isfinite(own)).read(number, where)


def _plain(tensor: Tensor) -> bool:
    return tensor.layout is torch.strided and not (tensor.is_meta or tensor.is_nested or tensor.is_quantized)


def _numbers(value: Any, where: str) -> Iterator[tuple[str, Any]]:
    """Every leaf of a state, with its place."""
    if isinstance(value, Mapping):
        for name, own in value.items():
            yield from _numbers(own, f"{where}[{name!r}]")
    elif isinstance(value, list | tuple):
        for i, own in enumerate(value):
            yield from _numbers(own, f"{where}[{i}]")
    else:
        yield where, value
