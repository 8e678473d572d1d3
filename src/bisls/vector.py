"""A list of parameters as one flat vector: read, write in place, split into views, join."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import reduce
from math import inf, isfinite

import torch
from torch import Tensor

STILL = 64.0  # a move of so many units in the last place is rounding


class Vector:
    """A list of parameters seen as one flat vector.

    The parameters stay the user's own tensors: ``read`` copies them out, ``write_`` copies a flat vector back in place.
    The flat vector has one dtype, the widest among the parameters and at least float32, so that inner products of
    half-precision parameters are not taken in half precision.

    Args:
        tensors: The parameters; at least one, all on one device. `Bilevel` checks what users pass.

    Examples:
        >>> import torch
        >>> weights = [torch.tensor([[3.0, -1.0]], requires_grad=True), torch.tensor([0.5], requires_grad=True)]
        >>> vector = Vector(weights)
        >>> vector.read()
        tensor([ 3.0000, -1.0000,  0.5000])
        >>> vector.write_(torch.tensor([1.0, 2.0, 4.0]))
        >>> weights[0].tolist(), weights[1].tolist()
        ([[1.0, 2.0]], [4.0])
    """

    def __init__(self, tensors: Iterable[Tensor]):
        self.tensors: tuple[Tensor, ...] = tuple(tensors)
        self.sizes = [tensor.numel() for tensor in self.tensors]
        self._shapes = [tensor.shape for tensor in self.tensors]
        self.numel = sum(self.sizes)
        self.device = self.tensors[0].device
        self.dtype = reduce(torch.promote_types, (tensor.dtype for tensor in self.tensors), torch.float32)
        self.alike = all(tensor.dtype == self.dtype for tensor in self.tensors)
        self._is_flat = self.alike and len(self.tensors) == 1 and self.tensors[0].dim() == 1

    def read(self, room: Tensor | None = None) -> Tensor:
        """The parameters' present values as one flat vector: a new one, or written into one that is there."""
        room = torch.empty(self.numel, dtype=self.dtype, device=self.device) if room is None else room
        return self.join([tensor.detach() for tensor in self.tensors], room)

    @torch.no_grad()
    def write_(self, flat: Tensor) -> None:
        """Copy a flat vector into the parameters, in place."""
        for tensor, part in zip(self.tensors, self.split(flat), strict=True):
            tensor.copy_(part)

    @contextmanager
    def lent(self, flat: Tensor) -> Iterator[None]:
        """Within this context the parameters hold other values; graphs recorded before stay usable after it.

        The values come back exactly, so a graph that refers to them is still right; writing through ``.data`` tells
        autograd so.
        """
        before = [tensor.detach().clone() for tensor in self.tensors]
        try:
            for tensor, part in zip(self.tensors, self.split(flat), strict=True):
                tensor.data.copy_(part)
            yield
        finally:
            for tensor, own in zip(self.tensors, before, strict=True):
                tensor.data.copy_(own)

    def split(self, flat: Tensor) -> tuple[Tensor, ...]:
        """Views of a flat vector, shaped like the parameters."""
        if self._is_flat:
            return (flat,)
        parts = torch.split_with_sizes(flat, self.sizes) if len(self.sizes) > 1 else (flat,)
        return tuple(map(Tensor.view, parts, self._shapes))

    def cast(self, flat: Tensor) -> tuple[Tensor, ...]:
        """Like `split`, in each parameter's own dtype: what autograd asks of a vector it is to be multiplied with."""
        parts = self.split(flat)
        if self.alike:
            return parts
        return tuple(part.to(tensor.dtype) for part, tensor in zip(parts, self.tensors, strict=True))

    def join(self, tensors: Sequence[Tensor | None], room: Tensor | None = None) -> Tensor:
        """One flat vector from tensors shaped like the parameters; a missing one counts as zero.

        Args:
            tensors: The tensors.
            room: A flat vector to write it into, where memory is to be used again.
        """
        if len(tensors) == 1 and tensors[0] is not None and room is None:
            return tensors[0] if self._is_flat else tensors[0].reshape(-1).to(self.dtype)
        parts = [
            own.new_zeros(size, dtype=self.dtype) if tensor is None else tensor.reshape(-1).to(self.dtype)
            for tensor, own, size in zip(tensors, self.tensors, self.sizes, strict=True)
        ]
        return torch.cat(parts, out=room)

    def holding(self, flat: Tensor) -> bool:
        """Whether a flat vector is what the parameters hold now."""
        pairs = zip(self.tensors, self.split(flat), strict=True)
        return all(torch.equal(tensor.detach().to(self.dtype), part) for tensor, part in pairs)

    def along(self, gradient: Tensor, before: Tensor) -> float:
        """``<gradient, before - parameters>``, tensor by tensor: nothing of the size of all of them is made."""
        parts = zip(self.split(gradient), self.split(before), self.tensors, strict=True)
        return sum(dot(g.reshape(-1), (was - tensor.detach()).reshape(-1)) for g, was, tensor in parts)

    def subtract_(self, flat: Tensor, tensors: Sequence[Tensor | None]) -> None:
        """Take tensors shaped like the parameters from a flat vector, in place; a missing one counts as zero."""
        for own, tensor in zip(self.split(flat), tensors, strict=True):
            if tensor is not None:
                own.sub_(tensor.detach())

    def holds(self, flat: Tensor) -> bool:
        """Whether the parameters can hold a flat vector: finite, and within the range of each one's own precision."""
        return finite(flat) if self.alike else finite(*self.cast(flat))

    def zeros(self) -> Tensor:
        """A flat vector of zeros."""
        return torch.zeros(self.numel, dtype=self.dtype, device=self.device)


def dot(left: Tensor, right: Tensor) -> float:
    """The inner product of two flat vectors as a Python number."""
    value = torch.dot(left, right).item()
    if not 1e-30 < abs(value) < inf and left.dtype is not torch.float64:  # products that single precision cannot hold
        return torch.dot(left.double(), right.double()).item()
    return value


def norm(vector: Tensor) -> float:
    """The Euclidean norm of a flat vector as a Python number."""
    size = torch.linalg.vector_norm(vector).item()
    if not 1e-15 < size < inf and vector.dtype is not torch.float64:  # squares that single precision cannot hold
        return torch.linalg.vector_norm(vector, dtype=torch.float64).item()
    return size


def apart(one: Tensor, two: Tensor) -> bool:
    """Whether two vectors differ by more than rounding."""
    return norm(one - two) > STILL * torch.finfo(two.dtype).eps * norm(two)


def finite(*vectors: Tensor) -> bool:
    """Whether every number of every vector is finite."""
    # a sum is finite only where every number is; where it overflows, they are looked at one by one
    return all(isfinite(vector.sum().item()) or bool(torch.isfinite(vector).all()) for vector in vectors)
