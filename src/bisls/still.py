"""Looking at a loss without leaving a trace: random state and module buffers are put back after a probe."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook


@dataclass(frozen=True)
class Moment:
    """The state of torch's random generators at one moment, so that a dropout mask can be drawn again."""

    cpu: Tensor
    device: Tensor | None
    index: torch.device

    @staticmethod
    def now(device: torch.device) -> Moment:
        """The present moment, for the CPU and, where the parameters live on another device, for that one."""
        own = None
        if device.type != "cpu":  # pragma: no cover - no accelerator in continuous integration
            own = getattr(torch, device.type).get_rng_state(device)
        return Moment(torch.get_rng_state(), own, device)

    def restore(self) -> None:
        """Make the generators draw again what they drew after this moment."""
        torch.set_rng_state(self.cpu)
        if self.device is not None:  # pragma: no cover
            getattr(torch, self.index.type).set_rng_state(self.device, self.index)


@contextmanager
def still(device: torch.device, replay: Moment | None = None, buffers: Iterable[Tensor] = ()) -> Iterator[None]:
    """Within this context losses may be evaluated freely: nothing of it can be seen afterwards.

    Random generators continue afterwards as if nothing had been drawn. The buffers of every module in training mode that
    runs inside (BatchNorm's statistics), and those declared, get their values back. Casts that autocast keeps of weights are
    dropped, since weights may have been moved in between.

    Args:
        device: Where the parameters live.
        replay: Draw the same random numbers as at this moment (the same dropout mask on both sides of a comparison).
        buffers: Tensors to put back, beside those that are found.
    """
    before = Moment.now(device)
    declared = [(buffer, buffer.detach().clone()) for buffer in buffers]
    found: list[tuple[Tensor, Tensor]] = []
    seen: set[int] = set()

    def remember(module: nn.Module, _: object) -> None:
        # a compiled module's parts are not announced one by one
        for part in module.modules() if hasattr(module, "_orig_mod") else (module,):
            if part.training and id(part) not in seen:
                seen.add(id(part))
                found.extend(
                    (buffer, buffer.detach().clone()) for buffer in part._buffers.values() if buffer is not None
                )

    handle = register_module_forward_pre_hook(remember)
    torch.clear_autocast_cache()
    if replay is not None:
        replay.restore()
    try:
        yield
    finally:
        handle.remove()
        with torch.no_grad():
            for buffer, value in (*declared, *found):
                buffer.data.copy_(
                    value
                )  # not as a change: graphs that hold the buffer stay usable, since its value is the same
        torch.clear_autocast_cache()
        before.restore()


def probe(
    call: Callable[[], Any], device: torch.device, replay: Moment | None = None, buffers: Iterable[Tensor] = ()
) -> Any:
    """What ``call`` returns, evaluated without a trace and without recording a graph."""

    def traceless() -> Any:
        with still(device, replay, buffers):
            return call()

    return without_grad(traceless)


def without_grad(call: Callable[[], Any]) -> Any:
    """What ``call`` returns, without recording a graph.

    A loss that differentiates by itself (a gradient penalty, an inner loop) cannot run without a graph; it is called once more
    with one.
    """
    try:
        with torch.no_grad():
            return call()
    except RuntimeError as error:
        if "does not require grad" not in str(error):
            raise
    with torch.enable_grad():
        return call()
