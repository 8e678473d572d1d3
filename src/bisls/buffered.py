"""The buffers of the modules that losses reach (BatchNorm's statistics), saved with a run."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from bisls.states import Kind, Unfit, shown

logger = logging.getLogger(__name__)


class Buffered:
    """What modules keep beside parameters, each once; not what they leave out of their own ``state_dict()``.

    Args:
        modules: In the order in which they are met.

    Examples:
        >>> import torch
        >>> layer = torch.nn.BatchNorm1d(2)
        >>> buffered = Buffered([layer])
        >>> saved = buffered.saved()
        >>> _ = layer(torch.tensor([[1.0, 2.0], [3.0, 5.0]]))
        >>> buffered.load(saved, "a doctest")
        >>> layer.running_mean.tolist()
        [0.0, 0.0]
    """

    def __init__(self, modules: Sequence[nn.Module]):
        found: dict[int, Tensor] = {}
        for module in modules:
            left_out = getattr(module, "_non_persistent_buffers_set", ())
            for name, own in getattr(module, "_buffers", {}).items():
                if own is not None and name not in left_out and type(own) is Tensor and own.layout is torch.strided:
                    found.setdefault(id(own), own)
        self.buffers = list(found.values())

    def saved(self) -> list[Tensor]:
        """Copies of them."""
        return [own.detach().clone() for own in self.buffers]

    def keeps(self) -> Kind:
        """What may have been saved."""
        return _Plain()

    @torch.no_grad()
    def load(self, saved: Sequence[Tensor], where: str) -> None:
        """Write what was saved into them; what is of other modules is left alone, and said.

        Args:
            saved: What `saved` gave.
            where: Who has it, for the log.
        """
        if [(buffer.shape, buffer.dtype) for buffer in self.buffers] != [(one.shape, one.dtype) for one in saved]:
            logger.warning(
                "%s has the buffers of other modules than the losses have here: theirs are left as they are", where
            )
            return
        for buffer, one in zip(self.buffers, saved, strict=True):
            buffer.copy_(one)


class _Plain(Kind):
    """A list of tensors that hold their numbers one beside the other."""

    def read(self, value: Any, where: str) -> list[Tensor]:
        """The list."""
        if not isinstance(value, list) or not all(type(one) is Tensor and one.layout is torch.strided for one in value):
            raise Unfit(f"{where} is {shown(value)}; it must be a list of tensors")
        return value
