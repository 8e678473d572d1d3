"""Modules in `DistributedDataParallel`: what they would exchange by themselves is exchanged here, once an iteration."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from bisls.ranks import broadcast_, world


@contextmanager
def quiet(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Within this context wrapped modules exchange nothing by themselves; at its end they have the buffers of the first rank.

    Gradients are averaged here, so they need not be there. And a module that waits for the buffers of another rank, in every
    forward pass, would wait for one that has failed, and could not be told.

    Args:
        modules: Those that the losses can reach.
    """
    found = [own for own in modules if isinstance(own, DistributedDataParallel)] if world() > 1 else []
    before = [(own.require_backward_grad_sync, own.require_forward_param_sync) for own in found]
    try:
        for own in found:
            own.require_backward_grad_sync = own.require_forward_param_sync = False
        yield
    finally:
        for own, (gradients, buffers) in zip(found, before, strict=True):
            own.require_backward_grad_sync, own.require_forward_param_sync = gradients, buffers
    shared = [own for own in found if getattr(own, "forward_sync_buffers", getattr(own, "broadcast_buffers", True))]
    if any(True for own in shared for _ in own.buffers()):
        broadcast_([buffer for own in shared for buffer in own.buffers()])
