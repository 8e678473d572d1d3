"""What every step-size optimiser shares: closures, one line over all groups, trials without a trace, averaging, state."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import chain
from math import inf, isfinite
from typing import Any, ClassVar

import torch
from torch import Tensor

from bisls._check import require_argument
from bisls.line import Line
from bisls.optim.closures import Closure, call_closure, stashed_grads
from bisls.oracle import mean_over_ranks
from bisls.record import Status
from bisls.steps.base import Memory, Step, StepRule
from bisls.still import Moment, probe, still

logger = logging.getLogger("bisls")

MOST_POWER = 20  # of the weights of an average; (k + 1)^20 can be summed for as long as anybody trains
SAFE = 10.0  # a change that leads out of no precision's range: half of the last place of the largest half is 16
Params = Any  # what torch.optim takes: tensors, named tensors, or dicts of groups


@dataclass(frozen=True)
class Evaluation:
    """A loss and its gradient at the present parameters, as one closure gave them."""

    loss: Any
    value: float
    eps: float
    params: list[Tensor]  # those that have a gradient
    grads: list[Tensor]
    ratios: list[float]  # of each parameter's step to the common one
    norms: list[float]  # of the gradients
    slope: float  # along the ratio-weighted gradient; negative or zero
    closure: Closure | None = None
    does_backward: bool = False
    moment: Moment | None = None


class LineOptimizer(torch.optim.Optimizer):
    """A `torch.optim.Optimizer` whose step comes from a step rule on one line through all of its groups.

    A new optimiser is a constructor that puts numbers into ``defaults`` and a method `_rule` that makes the step rule from
    them. Everything that must survive a checkpoint lies in ``param_groups`` as numbers and in ``state`` as tensors.
    """

    _searches = False  # whether the rule evaluates the loss at trial points, so that it needs a closure
    # what the optimiser itself writes into every group; all else but lr must be the same in all of them
    _counters: ClassVar[dict[str, Any]] = {
        "k": 0,
        "remembered": None,
        "noted": (),
        "train_mode": True,
        "last_step_size": 0.0,
        "last_checks": 0,
        "last_status": 0,
    }

    def __init__(self, params: Params, defaults: dict[str, Any]):
        name = type(self).__name__
        require_argument(name, "lr", defaults["lr"], 0 < defaults["lr"] < inf, "must be positive and finite")
        averaging = defaults["averaging"]
        if isinstance(averaging, bool):
            averaging = 0.0 if averaging else None
        fits = averaging is None or 0 <= averaging <= MOST_POWER
        rule = f"must be True, False, or a power from 0 to {MOST_POWER}"
        require_argument(name, "averaging", averaging, fits, rule)
        defaults = {**defaults, "averaging": averaging}
        if isinstance(params, Tensor):
            raise TypeError(f"`{name}(params=...)` must be an iterable of tensors or dicts; put the tensor into a list")
        params = list(params)
        if not params:
            raise ValueError(f"`{name}(params=...)` is empty; pass model.parameters() or a list of tensors")
        super().__init__(params, {**defaults, **self._counters})
        self._rule({**self.param_groups[0], "lr": defaults["lr"]})  # a bad argument is named now, not at the first step
        if not any(p.requires_grad for p in self._all()):
            raise ValueError(f"`{name}(params=...)`: none of the tensors requires grad; call requires_grad_() on them")

    # --- what users call

    def step(self, closure: Closure | None = None, step_closure: Closure | None = None, *, loss: Any = None) -> Any:
        """Take one step.

        Args:
            closure: Returns the loss. It may be the usual torch closure that calls ``zero_grad`` and ``backward``; one that
                only returns the loss is cheaper, since then trial points need no backward pass.
            step_closure: The loss on an independent batch, which alone decides the step; the direction stays that of ``closure``.
            loss: In place of a closure, after ``loss.backward()``: for rules that need no trial points (and with GradScaler).

        Returns:
            The loss at the parameters before the step, as the closure gave it.
        """
        name = type(self).__name__
        if not self.param_groups[0]["train_mode"]:
            raise RuntimeError(f"`{name}.step()` in evaluation mode; call optimizer.train() before training goes on")
        with torch.no_grad():
            if closure is None:
                if loss is None and not self._any_gradient():
                    self._initialise()  # distributed checkpointing asks for this on zero gradients
                    return None
                if loss is None or self._searches or step_closure is not None:
                    wanted = (
                        "step(closure)" if self._searches else "step(closure) or, after backward(), step(loss=loss)"
                    )
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

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group; its ``lr`` sets the ratio of its steps to those of the others."""
        super().add_param_group(param_group)
        name, group = type(self).__name__, self.param_groups[-1]
        require_argument(
            name, "lr", group["lr"], 0 <= float(group["lr"]) < inf, "of a group must be at least 0 and finite"
        )
        if len(self.param_groups) > 1:
            first = self.param_groups[0]
            group.update({key: first[key] for key in self._counters})
            for key in self.defaults.keys() - self._counters.keys() - {"lr"}:
                mine, theirs = group.get(key), first.get(key)
                require_argument(
                    name, key, mine, mine == theirs, f"must be the same in all groups ({theirs!r}); lr may differ"
                )
        for p in group["params"]:
            if not p.is_floating_point():
                raise ValueError(
                    f"`{name}(params=...)`: a tensor of shape {tuple(p.shape)} has dtype {p.dtype}; only real "
                    "floating-point parameters can be optimised (split a complex one with torch.view_as_real)"
                )
            if p.layout is not torch.strided:
                raise ValueError(f"`{name}(params=...)`: a tensor of shape {tuple(p.shape)} is sparse; use to_dense()")
        devices = sorted({str(p.device) for p in self._all()})
        if len(devices) > 1:
            raise ValueError(f"`{name}(params=...)`: tensors are spread over {', '.join(devices)}; use one device")

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a saved state. Averages of half-precision parameters keep the precision they were saved in.

        Raises:
            ValueError: The state is of another optimiser or another model; nothing was loaded.
        """
        self._refuse_foreign(state_dict)
        super().load_state_dict(state_dict)
        saved = chain.from_iterable(group["params"] for group in state_dict["param_groups"])
        for index, p in zip(saved, self._all(), strict=True):
            for key, value in state_dict["state"].get(index, {}).items():
                if isinstance(value, Tensor) and value.is_floating_point() and value.dtype != p.dtype:
                    self.state[p][key] = value.to(p.device, copy=True)

    def _refuse_foreign(self, state_dict: Any) -> None:
        call = f"`{type(self).__name__}.load_state_dict(...)`"
        if not isinstance(state_dict, dict):
            raise ValueError(f"{call}: must be what state_dict() gave, got {type(state_dict).__name__}")
        missing = [name for name in ("state", "param_groups") if name not in state_dict]
        if missing:
            raise ValueError(f"{call}: the state lacks {', '.join(missing)}; pass what state_dict() gave")
        wanted = (self.defaults.keys() | self._counters.keys()) - {"foreach"}
        groups = state_dict["param_groups"]
        lacks = sorted({name for group in groups for name in wanted - group.keys()})
        if lacks:
            raise ValueError(f"{call}: the state is of another optimiser, its groups lack {', '.join(lacks)}")
        for index, p in zip(chain.from_iterable(group["params"] for group in groups), self._all(), strict=False):
            for name, value in state_dict["state"].get(index, {}).items():
                if isinstance(value, Tensor) and value.dim() and value.shape != p.shape:
                    raise ValueError(
                        f"{call}: the state is of another model: {name} of parameter {index} has shape {tuple(value.shape)}, its "
                        f"parameter {tuple(p.shape)}"
                    )

    # --- what optimisers say about themselves

    def _rule(self, group: dict[str, Any]) -> StepRule:
        """The step rule, from the numbers in the first group; its ceiling is ``lr``."""
        raise NotImplementedError

    # --- evaluations

    def _evaluate(self, closure: Closure, keep_grad: bool = False) -> Evaluation:
        params = [p for p in self._all() if p.requires_grad]
        moment = Moment.now(params[0].device) if self._searches and params else None
        loss, grads, does_backward = call_closure(type(self).__name__, closure, params, keep_grad)
        found = self._collect(loss, params, grads)
        return replace(found, closure=closure, does_backward=does_backward, moment=moment)

    def _given(self, loss: Any) -> Evaluation:
        params = [p for p in self._all() if p.requires_grad]
        if all(p.grad is None for p in params):
            raise ValueError(
                f"`{type(self).__name__}.step(loss=...)`: there are no gradients; call loss.backward() first"
            )
        return self._collect(loss, params, [p.grad for p in params])

    def _collect(self, loss: Any, params: list[Tensor], grads: Sequence[Tensor | None]) -> Evaluation:
        name = type(self).__name__
        if (isinstance(loss, Tensor) and loss.numel() != 1) or not isinstance(loss, Tensor | float | int):
            got = f"shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
            raise ValueError(f"`{name}.step(...)`: the loss must be a scalar tensor or a number; got {got}")
        if any(grad is not None and grad.is_sparse for grad in grads):
            raise ValueError(f"`{name}` does not support sparse gradients; use dense layers (Embedding(sparse=False))")
        ratio = self._ratios()
        kept = [(p, g, ratio[p]) for p, g in zip(params, grads, strict=True) if g is not None]
        used, grads_, ratios = [p for p, _, _ in kept], [g for _, g, _ in kept], [r for _, _, r in kept]
        norms = self._norms(grads_)
        # one transfer for everything that must be known as numbers
        scalars = [norm.double() for norm in norms]
        if isinstance(loss, Tensor):
            scalars.append(mean_over_ranks(loss.detach().double().reshape(())))
        sizes = torch.stack(scalars).tolist() if scalars else []
        value = sizes.pop() if isinstance(loss, Tensor) else float(loss)
        eps = torch.finfo(loss.dtype).eps if isinstance(loss, Tensor) and loss.is_floating_point() else 2.0**-52
        slope = -sum(r * n * n for r, n in zip(ratios, sizes, strict=True))
        if not 1e-30 < -slope < inf:  # squares that single precision cannot hold
            sizes = [torch.linalg.vector_norm(g, dtype=torch.float64).item() for g in grads_]
            slope = -sum(r * n * n for r, n in zip(ratios, sizes, strict=True))
        return Evaluation(loss, self._sign() * value, eps, used, grads_, ratios, sizes, slope)

    def _norms(self, grads: list[Tensor]) -> list[Tensor]:
        if not grads:
            return []
        wide = [torch.promote_types(g.dtype, torch.float32) for g in grads]
        if self.param_groups[0]["foreach"] is not False and len(set(wide)) == 1:
            return list(torch._foreach_norm(grads, 2, dtype=wide[0]))
        return [torch.linalg.vector_norm(g, dtype=dtype) for g, dtype in zip(grads, wide, strict=True)]

    # --- the step

    def _advance(self, found: Evaluation, judged: Evaluation) -> None:
        """Choose the step on the judging loss, take it along the other's gradient."""
        first = self.param_groups[0]
        memory = Memory(first["k"], first["remembered"], tuple(first["noted"]))
        if not (isfinite(found.value) and isfinite(found.slope)):
            step = Step(0.0, memory, status=Status.NON_FINITE)
        elif self._ceiling() == 0.0:
            step = Step(0.0, memory, status=Status.STATIONARY)
        else:
            with self._trials(judged) as at:
                line = Line(judged.value, judged.slope, at, eps=judged.eps)
                step = self._rule({**first, "lr": self._ceiling()}).choose(line, memory)
        if step.size > 0.0:
            step = self._take(found, judged, step)
        self._remember(step)

    def _take(self, found: Evaluation, judged: Evaluation, step: Step) -> Step:
        """Move the parameters by the step; the step that was really taken comes back."""
        if self._overflows(found, step.size):
            return replace(step, size=0.0, status=Status.NON_FINITE)
        self._move(found, step.size)
        self._average(step)
        return step

    def _move(self, found: Evaluation, size: float) -> None:
        """params <- params - size * ratio * gradient."""
        self._add(found.params, found.grads, [-size * r * self._sign() for r in found.ratios])
        torch.clear_autocast_cache()  # where the step is taken inside autocast, its casts of the weights are now old

    def _overflows(self, found: Evaluation, size: float, points: Sequence[Tensor] | None = None) -> bool:
        """Whether a step leads out of the range of a parameter's precision; looked at only where it is that long.

        Args:
            found: The gradients.
            size: The step.
            points: Where it starts from, if not from the parameters themselves.
        """
        starts = found.params if points is None else points
        longest = size * max((r * n for r, n in zip(found.ratios, found.norms, strict=True)), default=0.0)
        if longest <= SAFE and all(start.dtype == p.dtype for start, p in zip(starts, found.params, strict=True)):
            return False
        for p, start, grad, ratio, norm in zip(
            found.params, starts, found.grads, found.ratios, found.norms, strict=True
        ):
            info = torch.finfo(p.dtype)
            # less than half a unit in the last place of the largest number rounds back to it
            if size * ratio * norm > 0.25 * info.eps * info.max or start.dtype != p.dtype:
                moved = start.double() - size * ratio * self._sign() * grad.double()
                if not bool(torch.isfinite(moved.to(p.dtype)).all()):
                    return True
        return False

    def _add(self, params: list[Tensor], tensors: list[Tensor], factors: list[float]) -> None:
        if max(map(abs, factors), default=0.0) > SAFE and any(
            abs(factor) > torch.finfo(p.dtype).max for p, factor in zip(params, factors, strict=True)
        ):
            # a factor that the precision cannot hold, times a gradient so small that the product can be
            for p, tensor, factor in zip(params, tensors, factors, strict=True):
                p.copy_(p.double().add_(tensor.double(), alpha=factor))
        elif self.param_groups[0]["foreach"] is False:
            for p, tensor, factor in zip(params, tensors, factors, strict=True):
                p.add_(tensor, alpha=factor)
        elif len(set(factors)) == 1:
            torch._foreach_add_(params, tensors, alpha=factors[0])
        else:
            torch._foreach_add_(params, torch._foreach_mul(tensors, factors))

    @contextmanager
    def _trials(self, judged: Evaluation) -> Iterator[Callable[[float], float]]:
        """phi(t) along the judging gradient. Afterwards the parameters are bit for bit where they were."""
        saved: list[Tensor] = []

        def at(t: float) -> float:
            assert judged.closure is not None
            if self._overflows(judged, t, saved or None):
                return inf
            if not saved:
                saved.extend(p.detach().clone() for p in judged.params)
            torch._foreach_copy_(judged.params, saved)
            self._move(judged, t)
            device = judged.params[0].device
            if judged.does_backward:
                with still(device, judged.moment), torch.enable_grad(), stashed_grads(list(self._all())):
                    value = judged.closure()
            else:
                value = probe(judged.closure, device, judged.moment)
            if isinstance(value, Tensor):
                value = mean_over_ranks(value.detach().double()).item()
            return self._sign() * float(value)

        try:
            yield at
        finally:
            if saved:
                torch._foreach_copy_(judged.params, saved)

    def _average(self, step: Step) -> None:
        """Weights (k + 1)^power: power 0 is the plain mean of all iterates after a step (Theorem 1)."""
        power = self.param_groups[0]["averaging"]
        if power is None:
            return
        self._initialise()
        averages = [self.state[p]["average"] for p in self._all()]
        iterates = [p.detach().to(average.dtype) for p, average in zip(self._all(), averages, strict=True)]
        self._lerp(averages, iterates, self._shares(list(self._all()), float(step.memory.k) ** power))

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

    def _lerp(self, tensors: list[Tensor], ends: list[Tensor], shares: list[float]) -> None:
        """tensors <- tensors + share * (ends - tensors)."""
        if self.param_groups[0]["foreach"] is False or len(set(shares)) > 1:
            for tensor, end, share in zip(tensors, ends, shares, strict=True):
                tensor.lerp_(end, share)
        elif tensors:
            torch._foreach_lerp_(tensors, ends, shares[0])

    def _initialise(self) -> None:
        if self.param_groups[0]["averaging"] is not None:
            for p in self._all():
                if "average" not in self.state[p]:
                    wide = torch.promote_types(p.dtype, torch.float32)
                    self.state[p]["average"] = p.detach().clone().to(wide)

    def _remember(self, step: Step) -> None:
        before = self.last_status
        memory = step.memory
        self._set(k=memory.k, remembered=memory.step, noted=memory.extra)
        self._set(last_checks=step.checks, last_status=int(step.status))
        ceiling = self._ceiling()
        for group in self.param_groups:
            group["last_step_size"] = step.size * (float(group["lr"]) / ceiling) if ceiling > 0 else 0.0
        if step.status is not before and step.status in (Status.NON_FINITE, Status.BELOW_BOUND):
            logger.warning("%s, step %d: %s", type(self).__name__, step.memory.k, step.status.advice)

    # --- small things

    def _all(self) -> Iterator[Tensor]:
        return chain.from_iterable(group["params"] for group in self.param_groups)

    def _set(self, **numbers: Any) -> None:
        for group in self.param_groups:
            group.update(numbers)

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
