"""Losses called as they are, and differentiated by autograd."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import reduce
from typing import Any

import torch
from torch import Tensor
from torch._vmap_internals import _vmap
from torch.autograd.graph import _engine_run_backward

from bisls.evaluate.base import Evaluated, LowerLoss, Parts, Products, UpperLoss
from bisls.problem import Bilevel
from bisls.ranks import mean_over_ranks
from bisls.still import Moment, probe


class CalledUpper(UpperLoss):
    """The upper loss, called."""

    def __init__(self, problem: Bilevel):
        self._problem = problem

    def value(self, batch: Any, replay: Moment | None) -> Tensor:
        """f as a probe."""
        return _probed("upper_loss", self._problem, self._problem.upper_loss, batch, replay)

    def point(self, batch: Any) -> Evaluated:
        """One forward and one backward pass."""
        problem, moment = self._problem, self._problem.moment()
        loss, parts = upper_by_autograd(problem, batch)
        value = loss.detach()  # the graph goes with this call
        return Evaluated(lambda: value, parts, moment)


class CalledLower(LowerLoss):
    """The lower loss, called."""

    def __init__(self, problem: Bilevel):
        self._problem = problem

    def value(self, batch: Any, y: Tensor | None, replay: Moment | None, held: object | None) -> Tensor:
        """g as a probe."""
        if y is not None:
            self._problem.y.write_(y)
        return _probed("lower_loss", self._problem, self._problem.lower_loss, batch, replay)

    def point(self, batch: Any, y: Tensor | None, replay: Moment | None, held: object | None) -> Evaluated:
        """One forward and one backward pass."""
        problem = self._problem
        if y is not None:
            problem.y.write_(y)
        with nullcontext() if replay is None else problem.probing(replay):
            moment = problem.moment()
            loss, parts = lower_by_autograd(problem, batch)
        value = loss.detach()
        return Evaluated(lambda: value, parts, moment)

    def graph(self, batch: Any, replay: Moment | None) -> Products:
        """One forward and one backward pass that is recorded; every product reuses it."""
        with nullcontext() if replay is None else self._problem.probing(replay):
            moment = self._problem.moment()
            made = Graph(self._problem, batch, moment)
            made.random = moment.passed
        return made


class Graph(Products):
    """Products of second derivatives of g by autograd, from one graph of its gradient.

    Args:
        problem: The problem.
        batch: What the lower loss is called with.
        moment: The random state before the call.
        recorded: Whether a tape listens: then products are made from a scalar, which costs nothing there, and missing
            parts stay missing.
    """

    def __init__(self, problem: Bilevel, batch: Any, moment: Moment | None = None, recorded: bool = False):
        self._x, self._y = problem.x.tensors, problem.y.tensors
        self._product = _product_of_scalar if recorded else _product
        self._grad = _recorded_grad if recorded else grad
        self.moment = moment
        with torch.enable_grad():
            self.loss = scalar("lower_loss", problem.lower_loss(batch))
            self._graph = self._grad(self.loss, self._y, True)
        must_depend("lower_loss", "lower_params", self._graph)
        self.value = self.loss if recorded else self.loss.detach()
        self.grad = self._graph if recorded else [None if part is None else part.detach() for part in self._graph]
        self._grad_x: Parts | None = None

    def hessian(self, v: Sequence[Tensor]) -> Parts:
        """``g_yy v``."""
        return self._product(self._graph, v, self._y)

    def together(self, units: Sequence[Tensor]) -> Parts | None:
        """The columns of ``g_yy`` by one batched call."""
        pairs = _pairs(self._graph, units)
        if not pairs:
            return [None] * len(self._y)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("error")  # an operation without a rule for batches says so in a warning
                return _batched_product([o for o, _ in pairs], [v for _, v in pairs], self._y)
        except (RuntimeError, UserWarning):
            return None

    def mixed(self, v: Sequence[Tensor]) -> Parts:
        """``g_xy v``."""
        return self._product(self._graph, v, self._x)

    def mixed_transposed(self, d: Sequence[Tensor]) -> Parts:
        """``g_yx d``."""
        if self._grad_x is None:
            with torch.enable_grad():
                self._grad_x = self._grad(self.loss, self._x, True)
        return self._product(self._grad_x, d, self._y)


def gradient(loss: Tensor, tensors: Sequence[Tensor]) -> tuple[Tensor | None, ...]:
    """The gradient of a scalar loss, averaged over ranks; None where it does not depend on a tensor. ``.grad`` is left alone."""
    return tuple(None if part is None else mean_over_ranks(part) for part in grad(loss, tensors))


def upper_by_autograd(problem: Bilevel, batch: Any, recorded: bool = False) -> tuple[Tensor, Parts]:
    """f with its graph, and its gradient in all parameters."""
    with torch.enable_grad():
        loss = scalar("upper_loss", problem.upper_loss(batch))
        parts = (_recorded_grad if recorded else grad)(loss, (*problem.x.tensors, *problem.y.tensors))
    must_depend("upper_loss", "upper_params or lower_params", parts)
    return loss, parts


def lower_by_autograd(problem: Bilevel, batch: Any, recorded: bool = False) -> tuple[Tensor, Parts]:
    """g with its graph, and its gradient in y; x is no part of the graph."""
    with requiring_grad(problem.x.tensors, False), torch.enable_grad():
        loss = scalar("lower_loss", problem.lower_loss(batch))
        parts = (_recorded_grad if recorded else grad)(loss, problem.y.tensors)
    must_depend("lower_loss", "lower_params", parts)
    return loss, parts


def precision(problem: Bilevel, name: str, batch: Any) -> float:
    """The relative spacing of the coarsest numbers on the way from x and y to a loss, found by a probe."""
    parameters = (*problem.x.tensors, *problem.y.tensors)
    with problem.probing(), requiring_grad(parameters, True), torch.enable_grad():
        return coarsest(scalar(name, getattr(problem, name)(batch)))


@contextmanager
def requiring_grad(tensors: Sequence[Tensor], wanted: bool) -> Iterator[None]:
    """Within this context the tensors require grad, or do not. May be nested."""
    others = [tensor for tensor in tensors if tensor.requires_grad is not wanted]
    for tensor in others:
        tensor.requires_grad_(wanted)
    try:
        yield
    finally:
        for tensor in others:
            tensor.requires_grad_(not wanted)


def coarsest(loss: Tensor) -> float:
    """The eps of the coarsest numbers on the way to a loss, by its graph: autocast may hand over more digits than there are."""
    eps, todo = torch.finfo(loss.dtype).eps, [loss.grad_fn]
    seen: set[Any] = set()
    while todo and len(seen) < 10_000:
        node = todo.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        made = [
            torch.finfo(part.dtype).eps for part in getattr(node, "_input_metadata", ()) if part.dtype.is_floating_point
        ]
        eps = max(eps, *made, 0.0)
        todo.extend(following for following, _ in node.next_functions)
    return eps


def grad(loss: Tensor, tensors: Sequence[Tensor], create_graph: bool = False) -> tuple[Tensor | None, ...]:
    """The gradient of a scalar; None where it does not depend on a tensor."""
    if not loss.requires_grad:
        return (None,) * len(tensors)
    with torch.enable_grad():
        return torch.autograd.grad(
            loss, tensors, create_graph=create_graph, retain_graph=create_graph, allow_unused=True
        )


def _recorded_grad(loss: Tensor, tensors: Sequence[Tensor], create_graph: bool = False) -> tuple[Tensor | None, ...]:
    """The same while somebody watches what is called: autograd's engine is started directly, so that he sees what it runs."""
    if not loss.requires_grad:
        return (None,) * len(tensors)
    ones = torch.ones_like(loss)
    return _engine_run_backward(
        (loss,), (ones,), create_graph, create_graph, tuple(tensors), True, accumulate_grad=False
    )


def _probed(name: str, problem: Bilevel, loss: Callable[[Any], Any], batch: Any, replay: Moment | None) -> Tensor:
    return scalar(
        name, probe(lambda: loss(batch), problem.y.device, replay, problem.buffers, problem, problem.around)
    ).detach()


def _pairs(outputs: Parts, vectors: Sequence[Tensor]) -> list[tuple[Tensor, Tensor]]:
    """What there is to differentiate: outputs that are not constant, each with its vector."""
    return [(o, v) for o, v in zip(outputs, vectors, strict=True) if o is not None and o.requires_grad]


def _product(outputs: Parts, vectors: Sequence[Tensor], inputs: Sequence[Tensor]) -> Parts:
    """vectors' d outputs / d inputs; an output that is constant contributes nothing."""
    pairs = _pairs(outputs, vectors)
    if not pairs:
        return [torch.zeros_like(tensor) for tensor in inputs]
    parts = torch.autograd.grad(
        [o for o, _ in pairs], inputs, [v for _, v in pairs], retain_graph=True, allow_unused=True
    )
    return [torch.zeros_like(t) if p is None else p for p, t in zip(parts, inputs, strict=True)]


def _product_of_scalar(outputs: Parts, vectors: Sequence[Tensor], inputs: Sequence[Tensor]) -> Parts:
    """The same from the scalar <outputs, vectors>, for a recording; missing parts stay missing.

    On a tape the scalar costs nothing, and without ``grad_outputs`` torch does not import the algebra system of its compiler,
    which takes longer than a small problem.
    """
    pairs = _pairs(outputs, vectors)
    if not pairs:
        return [None] * len(inputs)
    with torch.enable_grad():
        total = reduce(torch.add, [(o * v).sum() for o, v in pairs])
    ones = torch.ones_like(total)
    return _engine_run_backward((total,), (ones,), True, False, tuple(inputs), True, accumulate_grad=False)


def _batched_product(outputs: Sequence[Tensor], vectors: Sequence[Tensor], inputs: Sequence[Tensor]) -> Parts:
    """``torch.autograd.grad(outputs, inputs, vectors, is_grads_batched=True)``, without its import of torch's algebra system."""

    def one(vector: Sequence[Tensor]) -> Any:
        return _engine_run_backward(tuple(outputs), vector, True, False, tuple(inputs), True, accumulate_grad=False)

    return _vmap(one, 0, 0, allow_none_pass_through=True)(tuple(vectors))


def scalar(name: str, loss: Any) -> Tensor:
    """What a loss returned, as a tensor without dimensions; anything but a real scalar is refused."""
    call = f"`Bilevel({name}=...)`"
    if not isinstance(loss, Tensor):
        raise ValueError(f"{call} must return a scalar tensor, got {type(loss).__name__}")
    if loss.numel() != 1:
        raise ValueError(f"{call} must return a scalar tensor, got shape {tuple(loss.shape)}; reduce it: loss.mean()")
    if not loss.is_floating_point():
        raise ValueError(f"{call} must return a real floating-point scalar, got dtype {loss.dtype}")
    return loss.reshape(())


def must_depend(name: str, on: str, parts: Parts) -> None:
    """Refuse a loss that is constant in all of its parameters, or whose gradient is sparse."""
    for part in parts:
        if part is not None and part.layout is not torch.strided:
            raise ValueError(f"`Bilevel({name}=...)` has a sparse gradient; use dense layers (Embedding(sparse=False))")
    if all(part is None for part in parts):
        raise ValueError(
            f"`Bilevel({name}=...)` does not depend on {on}: the loss it returned has no gradient there. Look for a "
            ".detach(), a no_grad() or a copy of the parameters between them and the loss."
        )
