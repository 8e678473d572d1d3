"""A symmetric matrix known by its products."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property

import torch
from torch import Tensor


class Operator:
    """A symmetric matrix H known by its products: call it with a vector v for H v.

    Args:
        product: v -> H v.
        matrix: Writes H out, once, where somebody asks; None where it is too large for that.

    Examples:
        >>> h = torch.tensor([[4.0, 1.0], [1.0, 3.0]])
        >>> Operator(lambda v: h @ v)(torch.tensor([1.0, 2.0]))
        tensor([6., 7.])
    """

    def __init__(self, product: Callable[[Tensor], Tensor], matrix: Callable[[], Tensor | None] = lambda: None):
        self._product, self._write = product, matrix

    def __call__(self, v: Tensor) -> Tensor:
        """The product H v."""
        return self._product(v)

    def matrix(self) -> Tensor | None:
        """H written out, where it is small."""
        return self._matrix

    def factor(self) -> Tensor | None:
        """The Cholesky factor of H; None where it is not written out, or not positive definite."""
        return self._factor

    @cached_property
    def _matrix(self) -> Tensor | None:
        return self._write()

    @cached_property
    def _factor(self) -> Tensor | None:
        if self._matrix is None:
            return None
        factor, info = torch.linalg.cholesky_ex((self._matrix + self._matrix.T) / 2)
        return factor if int(info) == 0 else None


def as_operator(hessian: Operator | Callable[[Tensor], Tensor]) -> Operator:
    """An operator, from one or from a plain function v -> H v."""
    return hessian if isinstance(hessian, Operator) else Operator(hessian)
