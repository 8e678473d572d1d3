"""Arrays, frames and series as tensors, without importing who made them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bisls.batches import filled, leaves


def is_array(data: Any) -> bool:
    """Whether this is no tensor, but something that numpy reads as an array: one of its own, a frame of pandas or polars."""
    return hasattr(type(data), "__array__") and not isinstance(data, Tensor | int | float | str)


def as_tensor(array: Any, where: str, dtype: torch.dtype | None = None) -> Tensor:
    """What `torch.as_tensor` makes of an array; the memory is shared where that is possible.

    Args:
        array: What `is_array` says yes to.
        where: The call, for messages.
        dtype: What floating-point numbers become; None leaves them as they are. Whole numbers and truth values stay.

    Raises:
        ValueError: It holds no numbers.

    Examples:
        >>> as_tensor(np.array([2.0, 3.0])[::-1], "`fit(...)`")
        tensor([3., 2.], dtype=torch.float64)
        >>> as_tensor(np.array([2.0, 3.0]), "`fit(...)`", torch.float32)
        tensor([2., 3.])
    """
    try:
        own = np.asarray(array)
        # torch has no strides below 0, and would write through to what is read-only, as the columns of a frame are
        usable = own.flags.writeable and all(stride >= 0 for stride in own.strides)
        made = torch.as_tensor(own if usable else own.copy())
        return made if dtype is None or not made.is_floating_point() else made.to(dtype)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(
            f"{where}: this {type(array).__name__} cannot be read as numbers ({error}); make a tensor of what is meant: "
            "torch.as_tensor(...)"
        ) from error


def without_arrays(batch: Any, where: str, dtype: torch.dtype | None = None) -> Any:
    """A batch whose arrays, wherever they lie in it, have become tensors; the batch itself where it has none."""
    if not any(is_array(leaf) for leaf in leaves(batch)):
        return batch
    return filled(batch, [as_tensor(leaf, where, dtype) if is_array(leaf) else leaf for leaf in leaves(batch)])


@contextmanager
def naming_arrays(call: str, *batches: Any) -> Iterator[None]:
    """Within this context a loss that fails on a batch with arrays in it is answered with what to pass instead.

    Losses that work on arrays are called with them as they are.
    """
    try:
        yield
    except (TypeError, RuntimeError) as error:
        array = next((leaf for batch in batches for leaf in leaves(batch) if is_array(leaf)), None)
        if array is None:
            raise
        reason = str(error).partition("\n")[0]
        raise ValueError(
            f"`{call}(...)`: a loss failed on a batch with a {type(array).__name__} in it ({type(error).__name__}: {reason}); "
            "batches go to the losses as they are: make tensors of the parameters' type, torch.as_tensor(..., dtype=...)"
        ) from error
