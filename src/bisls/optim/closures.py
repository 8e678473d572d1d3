"""Calling the user's closure: the usual kind that runs backward, or one that only returns the loss."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from bisls.oracle import gradient

Closure = Callable[[], Any]


def call_closure(
    name: str, closure: Closure, params: list[Tensor], keep_grad: bool
) -> tuple[Any, Sequence[Tensor | None], bool]:
    """Call a closure of either kind; the loss, the gradients, and whether it ran backward come back.

    Args:
        name: The optimiser's, for messages.
        closure: The closure.
        params: The parameters that require grad.
        keep_grad: Leave ``.grad`` as it was, whatever the closure does.
    """
    ran_backward: list[bool] = []
    hooks = [_on_accumulation(p, lambda _: ran_backward.append(True)) for p in params]
    with stashed_grads(params if keep_grad else []):
        try:
            with torch.enable_grad():
                loss = closure()
        finally:
            for hook in hooks:
                hook.remove()
        grads = [p.grad for p in params] if ran_backward else _own_gradient(name, loss, params)
    return loss, grads, bool(ran_backward)


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


def _on_accumulation(p: Tensor, hook: Callable[[Tensor], None]) -> Any:
    return p.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]


def _own_gradient(name: str, loss: Any, params: list[Tensor]) -> Sequence[Tensor | None]:
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        got = f"shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
        raise ValueError(f"`{name}.step(closure)`: closure must return the loss, a scalar tensor; got {got}")
    if not loss.requires_grad:
        raise ValueError(
            f"`{name}.step(closure)`: the loss has no gradient and the closure did not call backward(). Look for "
            ".detach(), .item() or no_grad() in the closure, and that it uses the parameters given to the optimiser."
        )
    grads = gradient(loss, params)
    if all(grad is None for grad in grads):
        raise ValueError(f"`{name}.step(closure)`: the loss does not depend on the parameters of the optimiser")
    return grads
