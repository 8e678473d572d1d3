"""The only place that calls autograd: values, gradients, Hessian and mixed products of both losses, counted."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, fields
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from bisls.problem import Bilevel
from bisls.still import Moment, probe


@dataclass
class Cost:
    """How many evaluations were made, by level. Counts do not depend on the machine; times do."""

    upper_values: int = 0
    upper_gradients: int = 0
    lower_values: int = 0
    lower_gradients: int = 0
    lower_graphs: int = 0
    hessian_products: int = 0
    mixed_products: int = 0

    def copy(self) -> Cost:
        """The counts as they stand now."""
        return Cost(*(getattr(self, field.name) for field in fields(self)))

    def __sub__(self, earlier: Cost) -> Cost:
        return Cost(*(getattr(self, field.name) - getattr(earlier, field.name) for field in fields(self)))

    def __add__(self, other: Cost) -> Cost:
        return Cost(*(getattr(self, field.name) + getattr(other, field.name) for field in fields(self)))


@dataclass(frozen=True)
class UpperPoint:
    """f(x, y) on one batch, with both partial gradients."""

    value: float
    grad_x: Tensor
    grad_y: Tensor
    moment: Moment
    eps: float


@dataclass(frozen=True)
class LowerPoint:
    """g(x, y) on one batch, with its gradient in y."""

    value: float
    grad: Tensor
    moment: Moment
    eps: float


class LowerGraph:
    """The graph of g's gradient at one point (x, y), on one batch; every product at that point reuses it.

    Coordinates of y that sit on a bound do not respond to x: in products they count as uncoupled, with unit curvature.
    """

    def __init__(self, oracle: Oracle, batch: Any):
        problem = oracle.problem
        self._oracle = oracle
        self.batch = batch
        self.moment = problem.moment()
        with torch.enable_grad():
            loss = _scalar("lower_loss", problem.lower_loss(batch))
            gradient = _grad(loss, problem.y.tensors, create_graph=True)
        _must_depend("lower_loss", "lower_params", gradient)
        self._loss = loss
        self._grad_y = gradient
        self._grad_x: tuple[Tensor | None, ...] | None = None
        self.value = _number(loss)
        self.eps = torch.finfo(loss.dtype).eps
        self.grad = mean_over_ranks(problem.y.join([None if part is None else part.detach() for part in gradient]))
        self._free = self._not_held()

    def _not_held(self) -> Tensor | None:
        """1 where y is free to respond, 0 where it sits on a bound; None where there are no bounds."""
        problem = self._oracle.problem
        held = getattr(problem.lower_bounds, "held", None)
        return None if held is None else (~held(problem.y.read(), self.grad, problem.y)).to(self.grad.dtype)

    def hessian(self, v: Tensor) -> Tensor:
        """The Hessian product ``g_yy v``, a vector like y."""
        self._oracle.cost.hessian_products += 1
        y, free = self._oracle.problem.y, self._free
        inner = v if free is None else v * free
        product = mean_over_ranks(y.join(_product(self._grad_y, y.cast(inner), y.tensors)))
        return product if free is None else product * free + v * (1 - free)

    def mixed(self, v: Tensor) -> Tensor:
        """The mixed product ``g_xy v`` of a vector like y: a vector like x."""
        self._oracle.cost.mixed_products += 1
        x, y = self._oracle.problem.x, self._oracle.problem.y
        inner = v if self._free is None else v * self._free
        return mean_over_ranks(x.join(_product(self._grad_y, y.cast(inner), x.tensors)))

    def mixed_transposed(self, d: Tensor) -> Tensor:
        """The mixed product ``g_yx d`` of a vector like x: how the lower gradient changes along d, like y."""
        self._oracle.cost.mixed_products += 1
        x, y = self._oracle.problem.x, self._oracle.problem.y
        if self._grad_x is None:
            self._grad_x = _grad(self._loss, x.tensors, create_graph=True)
        product = mean_over_ranks(y.join(_product(self._grad_x, x.cast(d), y.tensors)))
        return product if self._free is None else product * self._free


class MeanGraph:
    """The lower graphs of several batches at one point, seen as one: products are means over the batches.

    Args:
        graphs: At least one. Value, gradient and random state are those of the first.
        hessians: Over how many of them Hessian products are averaged; a linear solve has many of these.
    """

    def __init__(self, graphs: Sequence[LowerGraph], hessians: int):
        self.graphs = list(graphs)
        self.hessians = min(hessians, len(self.graphs))
        self.value, self.grad, self.eps, self.moment = graphs[0].value, graphs[0].grad, graphs[0].eps, graphs[0].moment

    def hessian(self, v: Tensor) -> Tensor:
        """The mean of ``g_yy v``, a vector like y."""
        return _mean([graph.hessian(v) for graph in self.graphs[: self.hessians]])

    def mixed(self, v: Tensor) -> Tensor:
        """The mean of ``g_xy v``, a vector like x."""
        return _mean([graph.mixed(v) for graph in self.graphs])

    def mixed_transposed(self, d: Tensor) -> Tensor:
        """The mean of ``g_yx d``, a vector like y."""
        return _mean([graph.mixed_transposed(d) for graph in self.graphs])


def _mean(tensors: Sequence[Tensor]) -> Tensor:
    return tensors[0] if len(tensors) == 1 else torch.stack(list(tensors)).mean(0)


class Oracle:
    """Every number that the algorithms see of a problem.

    It records no graph that it does not need, counts each evaluation in `cost`, and, where `torch.distributed` is
    initialised, averages each result over the ranks, so that every rank takes the same decision.

    Args:
        problem: The problem to look at.
    """

    def __init__(self, problem: Bilevel):
        self.problem = problem
        self.cost = Cost()

    def upper(self, batch: Any) -> UpperPoint:
        """f and both of its partial gradients at the present (x, y): one forward and one backward pass."""
        problem = self.problem
        moment = problem.moment()
        self._must_require_grad()
        self.cost.upper_gradients += 1
        with torch.enable_grad():
            loss = _scalar("upper_loss", problem.upper_loss(batch))
        parts = _grad(loss, (*problem.x.tensors, *problem.y.tensors))
        _must_depend("upper_loss", "upper_params or lower_params", parts)
        n = len(problem.x.tensors)
        grad_x, grad_y = mean_over_ranks(problem.x.join(parts[:n])), mean_over_ranks(problem.y.join(parts[n:]))
        return UpperPoint(_number(loss), grad_x, grad_y, moment, torch.finfo(loss.dtype).eps)

    def lower(self, batch: Any) -> LowerPoint:
        """g and its gradient in y at the present (x, y); nothing is recorded of x."""
        problem = self.problem
        moment = problem.moment()
        self.cost.lower_gradients += 1
        with self.upper_frozen(), torch.enable_grad():
            loss = _scalar("lower_loss", problem.lower_loss(batch))
            parts = _grad(loss, problem.y.tensors)
        _must_depend("lower_loss", "lower_params", parts)
        grad = mean_over_ranks(problem.y.join(parts))
        return LowerPoint(_number(loss), grad, moment, torch.finfo(loss.dtype).eps)

    def lower_graph(self, batch: Any, replay: Moment | None = None) -> LowerGraph:
        """The graph of g's gradient at the present (x, y), for Hessian and mixed products.

        With a moment to replay it is a probe: built with the random numbers of that moment, and without a trace.
        """
        self.cost.lower_graphs += 1
        self._must_require_grad()
        with nullcontext() if replay is None else self.problem.probing(replay):
            return LowerGraph(self, batch)

    def _must_require_grad(self) -> None:
        for name, vector in (("upper_params", self.problem.x), ("lower_params", self.problem.y)):
            for i, tensor in enumerate(vector.tensors):
                if not tensor.requires_grad:
                    raise ValueError(
                        f"`Bilevel({name}=...)`: tensor {i} (shape {tuple(tensor.shape)}) no longer requires grad; "
                        "call requires_grad_() on it, or make the problem without it"
                    )

    def upper_value(self, batch: Any, replay: Moment | None = None) -> float:
        """f at the present (x, y) as a probe: without grad, with random state and buffers put back."""
        self.cost.upper_values += 1
        return self._probe("upper_loss", lambda: self.problem.upper_loss(batch), replay)

    def lower_value(self, batch: Any, replay: Moment | None = None) -> float:
        """g at the present (x, y) as a probe: without grad, with random state and buffers put back."""
        self.cost.lower_values += 1
        return self._probe("lower_loss", lambda: self.problem.lower_loss(batch), replay)

    def _probe(self, name: str, call: Callable[[], Any], replay: Moment | None) -> float:
        return _number(_scalar(name, probe(call, self.problem.y.device, replay, self.problem.buffers)))

    @contextmanager
    def upper_frozen(self) -> Iterator[None]:
        """Within this context the upper parameters do not require grad. May be nested; a lower loop enters it once."""
        frozen = [tensor for tensor in self.problem.x.tensors if tensor.requires_grad]
        for tensor in frozen:
            tensor.requires_grad_(False)
        try:
            yield
        finally:
            for tensor in frozen:
                tensor.requires_grad_(True)

    def anywhere(self, here: bool) -> bool:
        """Whether it holds on any rank: what differs from rank to rank must be decided together."""
        if _world() == 1:
            return here
        flag = torch.tensor(float(here), device=self.problem.y.device)
        dist.all_reduce(flag, op=dist.ReduceOp.MAX)
        return bool(flag)

    def draw(self, n: int) -> int:
        """A whole number uniform on 0 .. n - 1 from torch's generator, the same on every rank."""
        number = torch.randint(n, (1,))
        if _world() > 1:
            number = number.to(self.problem.y.device)
            dist.broadcast(number, src=0)
        return int(number)


def mean_over_ranks(tensor: Tensor) -> Tensor:
    """The mean over the processes of `torch.distributed`, the same on each; the tensor itself where there is one process."""
    if _world() > 1:
        tensor = tensor.clone()
        dist.all_reduce(tensor)
        tensor /= _world()
    return tensor


def gradient(loss: Tensor, tensors: Sequence[Tensor]) -> tuple[Tensor | None, ...]:
    """The gradient of a scalar loss, averaged over ranks; None where it does not depend on a tensor. ``.grad`` is left alone."""
    return tuple(None if part is None else mean_over_ranks(part) for part in _grad(loss, tensors))


def _number(loss: Tensor) -> float:
    return mean_over_ranks(loss.detach()).item()


def _world() -> int:
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def _grad(loss: Tensor, tensors: Sequence[Tensor], create_graph: bool = False) -> tuple[Tensor | None, ...]:
    if not loss.requires_grad:
        return (None,) * len(tensors)
    with torch.enable_grad():
        return torch.autograd.grad(
            loss, tensors, create_graph=create_graph, retain_graph=create_graph, allow_unused=True
        )


def _product(
    outputs: Sequence[Tensor | None], vectors: Sequence[Tensor], inputs: Sequence[Tensor]
) -> Sequence[Tensor | None]:
    """vectors' d outputs / d inputs; an output that is constant contributes nothing."""
    pairs = [(o, v) for o, v in zip(outputs, vectors, strict=True) if o is not None and o.requires_grad]
    if not pairs:
        return [torch.zeros_like(tensor) for tensor in inputs]
    parts = torch.autograd.grad(
        [o for o, _ in pairs], inputs, [v for _, v in pairs], retain_graph=True, allow_unused=True
    )
    return [torch.zeros_like(t) if p is None else p for p, t in zip(parts, inputs, strict=True)]


def _scalar(name: str, loss: Any) -> Tensor:
    call = f"`Bilevel({name}=...)`"
    if not isinstance(loss, Tensor):
        raise ValueError(f"{call} must return a scalar tensor, got {type(loss).__name__}")
    if loss.numel() != 1:
        raise ValueError(f"{call} must return a scalar tensor, got shape {tuple(loss.shape)}; reduce it: loss.mean()")
    if not loss.is_floating_point():
        raise ValueError(f"{call} must return a real floating-point scalar, got dtype {loss.dtype}")
    return loss.reshape(())


def _must_depend(name: str, on: str, parts: Sequence[Tensor | None]) -> None:
    for part in parts:
        if part is not None and part.layout is not torch.strided:
            raise ValueError(f"`Bilevel({name}=...)` has a sparse gradient; use dense layers (Embedding(sparse=False))")
    if all(part is None for part in parts):
        raise ValueError(
            f"`Bilevel({name}=...)` does not depend on {on}: the loss it returned has no gradient there. Look for a "
            ".detach(), a no_grad() or a copy of the parameters between them and the loss."
        )
