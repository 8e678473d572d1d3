"""What callers hand over (arrays, labels, pictures), checked and turned into tensors."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from bisls._check import require_argument

MOST_CLASSES = 100_000  # a model has a row of weights for each: labels beyond this are names, not numbers of classes


def real(call: str, name: str, array: Any, dtype: torch.dtype, dims: tuple[int, ...], form: str) -> Tensor:
    """A finite real tensor with one of the numbers of dimensions given; `form` says which shape was expected."""
    tensor = tensor_of(call, name, array)
    if tensor.dim() not in dims or tensor.numel() == 0:
        raise ValueError(f"`{call}({name}=...)` must be {form}, got shape {tuple(tensor.shape)}")
    tensor = tensor.to(dtype)
    if not torch.isfinite(tensor).all():
        raise ValueError(f"`{call}({name}=...)` has entries that are NaN or infinite")
    return tensor


def pictures(call: str, images: Any, dtype: torch.dtype, dims: tuple[int, ...], form: str) -> Tensor:
    """Pictures: bytes become numbers in [0, 1], floating-point numbers stay as they are."""
    tensor = tensor_of(call, "images", images)
    scale = 255.0 if tensor.dtype == torch.uint8 else 1.0
    return real(call, "images", tensor, dtype, dims, form) / scale


def classes(call: str, labels: Any, rows: int, name: str = "labels") -> Tensor:
    """Whole-number labels 0, 1, 2, ..., one a row."""
    tensor = tensor_of(call, name, labels)
    if tensor.shape != (rows,):
        raise ValueError(
            f"`{call}({name}=...)` must be one label a row, shape ({rows},), got shape {tuple(tensor.shape)}"
        )
    if tensor.is_floating_point() or tensor.dtype == torch.bool:
        raise ValueError(f"`{call}({name}=...)` must be whole numbers 0, 1, 2, ..., got dtype {tensor.dtype}")
    tensor = tensor.long()
    if tensor.min() < 0 or tensor.max() < 1:
        raise ValueError(
            f"`{call}({name}=...)` must be classes 0, 1, 2, ... of at least two kinds, "
            f"got values from {int(tensor.min())} to {int(tensor.max())}"
        )
    if tensor.max() >= MOST_CLASSES:
        raise ValueError(
            f"`{call}({name}=...)` must be classes 0, 1, 2, ..., got {int(tensor.max())}; number the classes without gaps: "
            "numpy.unique(labels, return_inverse=True)[1]"
        )
    return tensor


def floating(call: str, dtype: torch.dtype) -> None:
    """Only the two precisions in which the tasks are meant to be used."""
    require_argument(
        call, "dtype", dtype, dtype is torch.float32 or dtype is torch.float64, "must be torch.float32 or torch.float64"
    )


def tensor_of(call: str, name: str, array: Any) -> Tensor:
    """A tensor that shares nothing with autograd, from an array, a list or a tensor."""
    if isinstance(array, Tensor):
        if array.is_complex() or array.layout is not torch.strided:
            kind = f"dtype {array.dtype}" if array.is_complex() else f"a tensor of layout {array.layout}"
            raise ValueError(f"`{call}({name}=...)` must be an array of real numbers, got {kind}")
        return array.detach()
    try:
        numbers = np.array(array)  # a copy: the caller's array may be read-only, or change later
        if numbers.dtype.kind in "biuf":
            return torch.from_numpy(numbers)
    except (ValueError, TypeError) as error:  # rows of different lengths; a precision that torch does not have
        raise ValueError(f"`{call}({name}=...)` must be an array of real numbers: {error}") from error
    raise ValueError(f"`{call}({name}=...)` must be an array of real numbers, got dtype {numbers.dtype}")
