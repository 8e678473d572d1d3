"""Arrays, frames and series as tensors, without importing who made them."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from bisls.batches import filled, leaves


def is_array(data: Any) -> bool:
    """Whether this is no tensor, but something that numpy reads as an array: one of its own, a frame of pandas or polars."""
    return hasattr(type(data), "__array__") and not isinstance(data, Tensor | int | float | str)


def as_tensor(array: Any, where: str) -> Tensor:
    """What `torch.as_tensor` makes of an array: the precision stays, and so does the memory where that is possible.

    Args:
        array: What `is_array` says yes to.
        where: The call, for messages.

    Raises:
        ValueError: It holds no numbers.

    Examples:
        >>> as_tensor(np.array([2.0, 3.0])[::-1], "`fit(...)`")
        tensor([3., 2.], dtype=torch.float64)
    """
    try:
        own = np.asarray(array)
        # torch has no strides below 0, and would write through to what is read-only, as the columns of a frame are
        usable = own.flags.writeable and all(stride >= 0 for stride in own.strides)
        return torch.as_tensor(own if usable else own.copy())
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(
            f"{where}: this {type(array).__name__} cannot be read as numbers ({error}); make a tensor of what is meant: "
            "torch.as_tensor(...)"
        ) from error


def without_arrays(batch: Any, where: str) -> Any:
    """A batch whose arrays, wherever they lie in it, have become tensors; the batch itself where it has none."""
    if not any(is_array(leaf) for leaf in leaves(batch)):
        return batch
    return filled(batch, [as_tensor(leaf, where) if is_array(leaf) else leaf for leaf in leaves(batch)])
