"""Losses at the present parameters: their values, their gradients, and how exact they are."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bisls.problem import Bilevel
from bisls.ranks import mean_over_ranks
from bisls.still import Moment, probe

Parts = Sequence[Tensor | None]  # shaped like parameters; None counts as zero


class Evaluated(NamedTuple):
    """A loss and its gradient at one point.

    Attributes:
        value: The loss, without its graph.
        grad: The gradient, one part for each parameter.
        moment: The random state before the loss was called.
    """

    value: Tensor
    grad: Parts
    moment: Moment


def value(problem: Bilevel, name: str, batch: Any, replay: Moment | None) -> Tensor:
    """A loss as a probe: no graph, no trace; with the random numbers of a moment where one is given.

    Args:
        problem: Whose loss it is.
        name: Which: "upper_loss" or "lower_loss".
        batch: What it is called with.
        replay: The moment.
    """
    loss = getattr(problem, name)
    found = probe(lambda: loss(batch), problem.y.device, replay, problem.buffers, problem, problem.around)
    return scalar(name, found).detach()


def upper_point(problem: Bilevel, batch: Any) -> Evaluated:
    """f and its gradient in all parameters, the upper ones first: one forward and one backward pass."""
    moment = problem.moment()
    with torch.enable_grad():
        loss = scalar("upper_loss", problem.upper_loss(batch))
        parts = grad(loss, (*problem.x.tensors, *problem.y.tensors))
    must_depend("upper_loss", "upper_params or lower_params", parts)
    return Evaluated(loss.detach(), parts, moment)


def lower_point(problem: Bilevel, batch: Any, replay: Moment | None) -> Evaluated:
    """g and its gradient in y; x is no part of the graph. A probe where there is a moment to replay."""
    with replayed(problem, replay):
        moment = problem.moment()
        with requiring_grad(problem.x.tensors, False), torch.enable_grad():
            loss = scalar("lower_loss", problem.lower_loss(batch))
            parts = grad(loss, problem.y.tensors)
        must_depend("lower_loss", "lower_params", parts)
    return Evaluated(loss.detach(), parts, moment)


class Started(NamedTuple):
    """Where y begins, and what is owed to x through it.

    Attributes:
        tensors: The start, without its graph, one for each lower parameter.
        pulled: Tensors like the start -> what is owed to each upper parameter; None for those that it does not depend on.
        moment: The random state before the function was called.
    """

    tensors: Parts
    pulled: Callable[[Sequence[Tensor]], Parts]
    moment: Moment


def started(problem: Bilevel, batch: Any, graph: bool) -> Started:
    """What ``lower_start`` gives at the present x; with its graph where somebody will go back through it."""
    moment, x = problem.moment(), problem.x.tensors
    with torch.enable_grad() if graph else torch.no_grad():
        found = problem.start(batch)

    def pulled(owed: Sequence[Tensor]) -> Parts:
        pairs = [(t, v) for t, v in zip(found, owed, strict=True) if t.requires_grad]
        if not pairs:
            return [None] * len(x)
        return torch.autograd.grad([t for t, _ in pairs], x, [v for _, v in pairs], allow_unused=True)

    return Started([tensor.detach() for tensor in found], pulled, moment)


def gradient(loss: Tensor, tensors: Sequence[Tensor]) -> tuple[Tensor | None, ...]:
    """The gradient of a scalar loss, averaged over ranks; None where it does not depend on a tensor. ``.grad`` is left alone."""
    return tuple(None if part is None else mean_over_ranks(part) for part in grad(loss, tensors))


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


def replayed(problem: Bilevel, moment: Moment | None) -> AbstractContextManager[None]:
    """A probe with the random numbers of a moment; nothing, where there is none."""
    return nullcontext() if moment is None else problem.probing(moment)


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
    return torch.autograd.grad(loss, tensors, create_graph=create_graph, allow_unused=True)


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
