"""A symmetric matrix known by its products, and what is remembered of those before it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import ceil
from typing import Any

import torch
from torch import Tensor

from bisls.states import Fields, Maybe, Number, Numbers, Whole
from bisls.vector import Vector, finite

Inverse = Callable[[Tensor], Tensor]
NUMBERS = 1_000_000  # so many numbers of a Hessian are written out at most
CONJUGATE = 0.1  # a vector that is less than this apart from those before adds nothing but rounding
LEAST = 100  # and no blocks with fewer rows than this, of one that is larger


def block_rows(n: int) -> int:
    """How many rows the diagonal blocks of a Hessian with n rows have where it is written out; 0: it is too large for that.

    Up to 1,000 rows it is one block, the Hessian itself.

    Examples:
        >>> [block_rows(n) for n in (10, 1000, 2000, 5000, 20_000)]
        [10, 1000, 500, 200, 0]
    """
    most = min(n, NUMBERS // max(n, 1))
    return 0 if most < min(n, LEAST) or n == 0 else ceil(n / ceil(n / most))


@dataclass(frozen=True)
class Learnt:
    """What is remembered of the Hessians before: an approximate inverse, and what solving has cost since it was made.

    Attributes:
        inverse: Of the diagonal blocks of the Hessian written out last, stacked; where it is one block, corrected by the products
            made since. None where there is none that is positive definite.
        points: The points since it was written out, its own included.
        spent: What was spent at them, in products.
        here: What was spent at the last of them.
        last: What was spent at the last one that did without writing the Hessian out; without an inverse, what to spend before
            it is written out again.
    """

    inverse: Tensor | None = None
    points: int = 0
    spent: float = 0.0
    here: float = 0.0
    last: float = 0.0

    def another(self) -> Learnt:
        """At the next point."""
        without = self.inverse is not None and self.points > 1  # the last point did without writing the Hessian out
        return replace(self, points=self.points + 1, here=0.0, last=self.here if without else self.last)

    def after(self, products: int) -> Learnt:
        """After so many more products at this point."""
        return replace(self, spent=self.spent + products, here=self.here + products)

    def applied(self, v: Tensor) -> Tensor:
        """The approximate inverse times a vector."""
        assert self.inverse is not None
        if len(self.inverse) == 1:
            return self.inverse[0] @ v
        parts = torch.split(
            v, self.inverse.shape[1]
        )  # one by one: a batched product with vectors takes ten times as long
        return torch.cat([block[: len(own), : len(own)] @ own for block, own in zip(self.inverse, parts, strict=True)])

    def corrected(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> Learnt:
        """With an inverse that is right along the vectors v of these pairs (v, H v), where it is one block.

        They are what one solve has multiplied H with, so that no v is a combination of others; the update of BFGS, all at once.
        """
        if self.inverse is None or len(self.inverse) > 1 or not pairs:
            return self
        b, s, y = self.inverse[0], *(torch.stack(own, 1) for own in zip(*pairs, strict=True))
        size = (s * y).sum(0).clamp(min=0).rsqrt()
        s, y = s * size, y * size
        factor, _ = torch.linalg.cholesky_ex(s.T @ y)
        # rounding spoils the last of many: those before are kept
        kept = int((torch.nan_to_num(factor.diagonal()) > CONJUGATE).long().cumprod(0).sum())
        if not kept:
            return self
        s, y, factor = s[:, :kept], y[:, :kept], factor[:kept, :kept]
        by, w = b @ y, torch.cholesky_solve(s.T, factor)
        change = by @ w
        found = b - change - change.T + w.T @ (y.T @ by) @ w + s @ w
        return replace(self, inverse=found[None]) if finite(found) else self

    def packed(self) -> dict[str, Any]:
        """Numbers and a tensor, for a checkpoint."""
        return dict(self.__dict__)

    @classmethod
    def unpacked(cls, state: Mapping[str, Any]) -> Learnt:
        """What `packed` gave."""
        return cls(**state)

    @staticmethod
    def keeps(y: Vector) -> Fields:
        """What `packed` may be with these lower parameters."""
        rows = block_rows(y.numel)
        blocks = ceil(y.numel / rows) if rows else 0
        counts = {name: Number(0.0) for name in ("spent", "here", "last")}
        inverse = Numbers((blocks, rows, rows), (y.dtype,), device=y.device)
        return Fields({"inverse": Maybe(inverse), "points": Whole(), **counts})


@dataclass
class Memory:
    """Where operators at successive points keep what they learn."""

    learnt: Learnt = Learnt()


class Spent(Exception):
    """No more products are allowed."""


class Operator:
    """A symmetric matrix H known by its products: call it with a vector v for H v.

    Args:
        product: v -> H v.
        blocks: Writes the diagonal blocks of H out, once, where somebody asks: stacked, the last one filled up with those of the
            identity. None where it is too large for that.
        memory: What was learnt at other points, and where this one adds to it; its own by default.
        inverse: An approximate inverse, symmetric and positive definite, for solvers that can use one.

    Examples:
        >>> h = torch.tensor([[4.0, 1.0], [1.0, 3.0]])
        >>> Operator(lambda v: h @ v)(torch.tensor([1.0, 2.0]))
        tensor([6., 7.])
    """

    def __init__(
        self,
        product: Callable[[Tensor], Tensor],
        blocks: Callable[[], Tensor] | None = None,
        memory: Memory | None = None,
        inverse: Inverse | None = None,
    ):
        self._product, self._write = product, blocks
        self.memory, self.inverse = memory or Memory(), inverse
        self.begun = False  # whether anything was solved at this point

    def __call__(self, v: Tensor) -> Tensor:
        """The product H v."""
        return self._product(v)

    @property
    def writable(self) -> bool:
        """Whether it can be written out."""
        return self._write is not None

    @property
    def written(self) -> bool:
        """Whether it has been written out."""
        return "_blocks" in self.__dict__

    def matrix(self) -> Tensor | None:
        """H written out, where it is small enough to be one block."""
        return None if self._blocks is None or len(self._blocks) > 1 else self._blocks[0]

    def factor(self) -> Tensor | None:
        """The Cholesky factors of the blocks; None where they are not written out, or not positive definite."""
        return self._factor

    @cached_property
    def _blocks(self) -> Tensor | None:
        return None if self._write is None else self._write()

    @cached_property
    def _factor(self) -> Tensor | None:
        if self._blocks is None:
            return None
        factor, info = torch.linalg.cholesky_ex((self._blocks + self._blocks.mT) / 2)
        return None if bool(info.any()) else factor


def as_operator(hessian: Operator | Callable[[Tensor], Tensor]) -> Operator:
    """An operator, from one or from a plain function v -> H v."""
    return hessian if isinstance(hessian, Operator) else Operator(hessian)
