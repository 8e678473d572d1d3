"""Calling the user's closure: the usual kind that runs backward, or one that only returns the loss."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.variable import Variable
from torch.overrides import TorchFunctionMode

from bisls._check import shown, unbound
from bisls.evaluate import gradient
from bisls.ranks import mean_over_ranks, on_any_rank, world

Closure = Callable[[], Any]


@dataclass(frozen=True)
class Called:
    """What a closure gave.

    Attributes:
        loss: As it was returned.
        gradient: Of each parameter, as backward left it; None where there is none.
        moves: ``.grad`` as the closure left it, where it changed them afterwards (by clipping); otherwise the gradient.
        clipped: Whether it did.
        does_backward: Whether it is the usual kind.
    """

    loss: Any
    gradient: Sequence[Tensor | None]
    moves: Sequence[Tensor | None]
    clipped: bool
    does_backward: bool


def call_closure(name: str, closure: Closure, params: list[Tensor], keep_grad: bool) -> Called:
    """Call a closure of either kind.

    Args:
        name: The optimiser's, for messages.
        closure: The closure.
        params: The parameters that require grad.
        keep_grad: Leave ``.grad`` as it was, whatever the closure does.
    """
    argument = "step_closure" if keep_grad else "closure"
    if not callable(closure):
        raise ValueError(_wrong(name, argument, closure))
    backward = _Backward(params)
    hooks = [_on_accumulation(p, backward.heard) for p in params]
    with stashed_grads(params if keep_grad else []):
        try:
            with torch.enable_grad():
                loss = closure()
        except TypeError as error:
            unfit = unbound(closure, 0)
            if not unfit:
                raise
            raise ValueError(f"{_wrong(name, argument, closure)}; this one can't be called so ({unfit})") from error
        finally:
            for hook in hooks:
                hook.remove()
        if not backward.ran:
            grads = _own_gradient(f"`{name}.step({argument})`", argument, loss, params)
            return Called(loss, grads, grads, clipped=False, does_backward=False)
        moves = [p.grad for p in params]
        true = backward.gradient()
        return Called(loss, true or moves, moves, clipped=true is not None, does_backward=True)


def _wrong(name: str, argument: str, closure: Any) -> str:
    """What is said of a closure that is none; only then is it shown, since the repr of a method shows all that its object has."""
    return f"`{name}.step({argument}={shown(closure)})`: {argument} must be a function without arguments that returns the loss"


class _Backward:
    """Keeps the gradients as backward leaves them, so that a closure that changes them later is noticed."""

    def __init__(self, params: list[Tensor]):
        self.params = params
        self.ran = False
        self._due = False
        self._kept: list[tuple[Tensor, int, Tensor] | None] = []  # .grad, its version, and a copy of it

    def heard(self, _: Tensor) -> None:
        """A gradient arrived: look at all of them when this backward is done."""
        self.ran = True
        if not self._due:
            self._due = True
            # twice: DistributedDataParallel writes the mean over the ranks at the end as well, and asks for it later
            _when_done(lambda: _when_done(self._keep))

    def gradient(self) -> list[Tensor | None] | None:
        """The gradients as backward left them, or None where they are still the same."""
        true = [self._true(i, p.grad) for i, p in enumerate(self.params)]
        changed = any(mine is not p.grad for mine, p in zip(true, self.params, strict=True))
        if world() > 1 and on_any_rank(changed)[0]:
            # who averages the gradients in the closure has not clipped them: all ranks compare with the same mean
            true = [None if g is None else mean_over_ranks(g) for g in true]
            changed = any(_differ(g, p.grad) for g, p in zip(true, self.params, strict=True))
        return true if changed else None

    def _keep(self) -> None:
        self._due = False
        self._kept = [
            None if p.grad is None else (p.grad, p.grad._version, p.grad.detach().clone()) for p in self.params
        ]

    def _true(self, i: int, grad: Tensor | None) -> Tensor | None:
        kept = self._kept[i] if i < len(self._kept) else None
        if (
            grad is None or kept is None
        ):  # what the closure took away does not move; what it put there itself is believed
            return grad
        tensor, version, copy = kept
        same = (grad is tensor and grad._version == version) or torch.equal(grad, copy)
        return grad if same else copy


@contextmanager
def stashed_grads(params: list[Tensor]) -> Iterator[None]:
    """Within this context ``.grad`` is empty and may be written; afterwards it is what it was."""
    grads = [p.grad for p in params]
    for p in params:
        p.grad = None
    try:
        yield
    finally:
        for p, grad in zip(params, grads, strict=True):
            p.grad = grad


_BACKWARD = vars(Tensor)["backward"]  # to know it by: only `bisls.evaluate` calls it


class Unheard(TorchFunctionMode):
    """Within this context ``backward`` computes nothing; what stands in ``.grad`` afterwards are copies of given gradients.

    Only the value of a loss is wanted, and closures of the usual kind run backward for it. What such a closure does with the
    gradients, clipping them say, it does with the copies.

    Args:
        params: The parameters.
        grads: One for each, or None.
    """

    def __init__(self, params: list[Tensor], grads: Sequence[Tensor | None]):
        super().__init__()
        self._pairs = list(zip(params, grads, strict=True))
        self._losses: list[Tensor] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call anything but ``Tensor.backward``."""
        if func is not _BACKWARD:
            return func(*args, **(kwargs or {}))
        self._losses.append(args[0].detach().clone())
        for p, grad in self._pairs:
            p.grad = None if grad is None else grad.clone()
        return None

    @property
    def called(self) -> bool:
        """Whether it was: what a closure raises from then on may be for want of its gradients."""
        return bool(self._losses)

    def stands(self, value: Any) -> bool:
        """Whether the closure's value is that of the one loss that ``backward`` was called on, so that no gradient is in it."""
        return len(self._losses) == 1 and self._losses[0].numel() == 1 and float(self._losses[0]) == float(value)


def _on_accumulation(p: Tensor, hook: Callable[[Tensor], None]) -> Any:
    return p.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]


def _when_done(call: Callable[[], None]) -> None:
    """Call this at the end of the backward pass that is running, after what was asked for before."""
    Variable._execution_engine.queue_callback(call)


def _differ(left: Tensor | None, right: Tensor | None) -> bool:
    """Whether two gradients differ by more than the rounding of a sum over ranks."""
    if left is None or right is None:
        return False
    gap, size = (torch.linalg.vector_norm(tensor.double()).item() for tensor in (left - right, left))
    return not gap <= 100 * torch.finfo(left.dtype).eps * size


def _own_gradient(where: str, argument: str, loss: Any, params: list[Tensor]) -> Sequence[Tensor | None]:
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        got = f"shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
        raise ValueError(f"{where}: {argument} must return the loss, a scalar tensor; got {got}")
    if not loss.requires_grad:
        raise ValueError(
            f"{where}: the loss has no gradient and the closure did not call backward(). Look for "
            ".detach(), .item() or no_grad() in the closure, and that it uses the parameters given to the optimiser."
        )
    grads = gradient(loss, params)
    if all(grad is None for grad in grads):
        raise ValueError(f"{where}: the loss does not depend on the parameters of the optimiser")
    return grads
