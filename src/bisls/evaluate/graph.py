"""Products of second derivatives of the lower loss, from one graph of its gradient."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import _engine_run_backward

from bisls.evaluate.lean import Lean
from bisls.evaluate.losses import Parts, grad, must_depend, replayed, scalar
from bisls.problem import Bilevel
from bisls.still import Moment, twice_differentiable
from bisls.vector import Vector

TOGETHER = 128  # so many columns of a Hessian are made at once


class Graph:
    """g, its gradient in y and products of its second derivatives, all at the present (x, y) and on one batch.

    One forward and one backward pass that is recorded; every product reuses it.

    Attributes:
        value: g.
        grad: Its gradient in y; without what lean layers have left out.
        moment: The random state before the loss was called.
        random: Whether the loss has drawn random numbers.

    Args:
        problem: The problem.
        batch: What the lower loss is called with.
        replay: Makes it a probe, with the random numbers of that moment.
        lean: Makes it one for a single product (`last`), with layers that cost less.
    """

    def __init__(self, problem: Bilevel, batch: Any, replay: Moment | None, lean: Lean | None = None):
        self._x, self._y = problem.x.tensors, problem.y.tensors
        self._lean = lean
        with replayed(problem, replay):
            self.moment = problem.moment()
            with twice_differentiable(), torch.enable_grad():
                with lean or nullcontext():
                    self._loss = scalar("lower_loss", problem.lower_loss(batch))
                with lean.recording() if lean else nullcontext():
                    self._graph = grad(self._loss, self._y, True)
            must_depend("lower_loss", "lower_params", self._graph)
            self.random = self.moment.passed
        self.value = self._loss.detach()
        self.grad: Parts = [None if part is None else part.detach() for part in self._graph]
        if lean is not None:
            self.grad = [None if part is None or lean.left_out(part) else part for part in self.grad]
        self._grad_x: Parts | None = None

    def hessian(self, v: Sequence[Tensor]) -> Parts:
        """``g_yy v``, for tensors like y."""
        return _product(self._graph, v, self._y)

    def mixed(self, v: Sequence[Tensor]) -> Parts:
        """``g_xy v``, for tensors like y."""
        return _product(self._graph, v, self._x)

    def last(self, v: Sequence[Tensor], both: bool, target: Sequence[Tensor] | None = None) -> tuple[Parts, Parts]:
        """``g_yy v``, if wanted, and ``g_xy v`` from one pass that uses the graph up.

        Args:
            v: Tensors like y.
            both: Whether the former is wanted.
            target: Tensors like y from which lean layers take their part of it themselves; it is missing in what comes back.
        """
        pairs, lean = _pairs(self._graph, v), self._lean
        if not pairs:
            return [None] * (len(self._y) if both else 0), [None] * len(self._x)
        inputs = (*self._y, *self._x) if both else self._x
        if lean is not None:
            lean.end(both, () if target is None else zip(self._y, target, strict=True))
        found: Parts = _backward([o for o, _ in pairs], [own for _, own in pairs], inputs, keep=False)
        return found[: -len(self._x)], found[-len(self._x) :]

    @property
    def slope(self) -> float:
        """``<g, v>`` of the last product, as far as it belongs to what lean layers have left out."""
        return 0.0 if self._lean is None else self._lean.slope

    def mixed_transposed(self, d: Sequence[Tensor]) -> Parts:
        """``g_yx d``, for tensors like x."""
        if self._grad_x is None:
            self._grad_x = grad(self._loss, self._x, True)
        return _product(self._grad_x, d, self._y)

    def columns(self, units: Sequence[Tensor]) -> Parts:
        """The columns of ``g_yy``, stacked along the first axis: at once, or one by one where an operation has no rule for that.

        Args:
            units: The unit vectors, shaped like y, stacked along the first axis (`unit_vectors`).
        """
        found = self._together(units)
        if found is not None:
            return found
        products = [self.hessian(one) for one in zip(*units, strict=True)]
        return [torch.stack(parts) for parts in zip(*products, strict=True)]

    def _together(self, units: Sequence[Tensor]) -> Parts | None:
        """The columns by one batched call; None where an operation has no rule for that."""
        pairs = _pairs(self._graph, units)
        if not pairs:
            return [None] * len(self._y)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("error")  # an operation without a rule for batches says so in a warning
                return _batched_product([o for o, _ in pairs], [v for _, v in pairs], self._y)
        except (RuntimeError, UserWarning):
            return None


def unit_vectors(vector: Vector, first: int = 0, last: int | None = None) -> list[Tensor]:
    """Unit vectors shaped like the parameters, stacked along the first axis: all, or some of them."""
    last = vector.numel if last is None else last
    units = torch.zeros(last - first, vector.numel, dtype=vector.dtype, device=vector.device)
    units.diagonal(first).fill_(1.0)
    parts = torch.split(units, vector.sizes, 1)
    return [p.reshape(last - first, *t.shape) for p, t in zip(parts, vector.tensors, strict=True)]


def _pairs(outputs: Parts, vectors: Sequence[Tensor]) -> list[tuple[Tensor, Tensor]]:
    """What there is to differentiate: outputs that are not constant, each with its vector."""
    return [(o, v) for o, v in zip(outputs, vectors, strict=True) if o is not None and o.requires_grad]


def _product(outputs: Parts, vectors: Sequence[Tensor], inputs: Sequence[Tensor]) -> list[Tensor]:
    """vectors' d outputs / d inputs; an output that is constant contributes nothing."""
    pairs = _pairs(outputs, vectors)
    if not pairs:
        return [torch.zeros_like(tensor) for tensor in inputs]
    parts = _backward([o for o, _ in pairs], [v for _, v in pairs], inputs)
    return [torch.zeros_like(t) if p is None else p for p, t in zip(parts, inputs, strict=True)]


def _batched_product(outputs: Sequence[Tensor], vectors: Sequence[Tensor], inputs: Sequence[Tensor]) -> Parts:
    """``torch.autograd.grad(outputs, inputs, vectors, is_grads_batched=True)``, some at a time.

    By the newer rules of `torch.func`: they make one product of matrices, where those behind ``is_grads_batched`` take ten times
    as long as the columns one by one.
    """
    used: list[bool] = []

    def one(own: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        parts = _backward(outputs, own, inputs)
        used[:] = [part is not None for part in parts]
        return tuple(part for part in parts if part is not None)

    found = iter(torch.func.vmap(one, chunk_size=TOGETHER)(tuple(vectors)))
    return [next(found) if there else None for there in used]


def _backward(outputs: Sequence[Tensor], vectors: Sequence[Tensor], inputs: Sequence[Tensor], keep: bool = True) -> Any:
    """``torch.autograd.grad(outputs, inputs, vectors)``, which would import an algebra system to compare their shapes."""
    return _engine_run_backward(tuple(outputs), tuple(vectors), keep, False, tuple(inputs), True, accumulate_grad=False)
