"""The only place that calls autograd: values, gradients, Hessian and mixed products of both losses, counted."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import cached_property, reduce
from math import isnan
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from bisls.player import LowerPlayer, Outdated, Outputs, Played, Players, UpperPlayer
from bisls.problem import Bilevel, Loss
from bisls.still import Moment, probe, without_grad

SMALL = 64  # a Hessian with no more rows than this is written out where its products can be made at once


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
        return Cost(**self.__dict__)

    def __sub__(self, earlier: Cost) -> Cost:
        return Cost(**{name: count - getattr(earlier, name) for name, count in self.__dict__.items()})

    def __add__(self, other: Cost) -> Cost:
        return Cost(**{name: count + getattr(other, name) for name, count in self.__dict__.items()})


@dataclass(frozen=True)
class UpperPoint:
    """f(x, y) on one batch, with both partial gradients."""

    value: float
    grad_x: Tensor
    grad_y: Tensor
    moment: Moment
    eps: float


class LowerPoint:
    """g(x, y) on one batch, with its gradient in y.

    Attributes:
        grad: The gradient, flat.
        moment: The random state before the loss was called; None where it is played from a tape, which draws nothing.
        eps: The relative spacing of the numbers that the loss is computed in.
    """

    def __init__(self, value: Callable[[], float], grad: Tensor, moment: Moment | None, eps: float):
        self.grad, self.moment, self.eps = grad, moment, eps
        self._value = value

    @cached_property
    def value(self) -> float:
        """g itself; where the loss is played from its tape, it is computed only if somebody asks."""
        return self._value()


class LowerGraph:
    """The graph of g's gradient at one point (x, y), on one batch; every product at that point reuses it.

    Coordinates of y that sit on a bound do not respond to x: in products they count as uncoupled, with unit curvature.
    """

    def __init__(self, oracle: Oracle, batch: Any, products: Graph | Played, moment: Moment | None):
        problem = oracle.problem
        self._oracle = oracle
        self._products = products
        self.batch = batch
        self.moment = moment
        self.value = _number(products.value)
        self.eps = oracle.precision("lower_loss", products.value)
        parts = [None if part is None else part.detach() for part in products.grad]
        # a tape is played by one process alone
        self._mean = mean_over_ranks if isinstance(products, Graph) else _itself
        self.grad = self._mean(problem.y.join(parts))
        self._free = self._not_held()

    def _not_held(self) -> Tensor | None:
        """1 where y is free to respond, 0 where it sits on a bound; None where there are no bounds."""
        problem = self._oracle.problem
        held = getattr(problem.lower_bounds, "held", None)
        return None if held is None else (~held(problem.y.read(), self.grad, problem.y)).to(self.grad.dtype)

    @cached_property
    def hessian(self) -> Hessian:
        """The Hessian ``g_yy``: call it with a vector like y for their product."""
        return Hessian(self._hessian, self._written)

    def _hessian(self, v: Tensor) -> Tensor:
        self._oracle.cost.hessian_products += 1
        y, free = self._oracle.problem.y, self._free
        inner = v if free is None else v * free
        product = self._mean(y.join(self._products.hessian(y.cast(inner))))
        return product if free is None else product * free + v * (1 - free)

    def _written(self) -> Tensor | None:
        y = self._oracle.problem.y
        if y.numel > SMALL or not isinstance(self._products, Played) or self._free is not None or not y.alike:
            return None
        eye = torch.eye(y.numel, dtype=y.dtype, device=y.device)
        parts = self._products.columns(
            [part.reshape(-1, *t.shape) for part, t in zip(torch.split(eye, y.sizes, 1), y.tensors, strict=True)]
        )
        if parts is None or any(part is None for part in parts):
            return None
        self._oracle.cost.hessian_products += y.numel
        return torch.cat([part.reshape(y.numel, -1) for part in parts if part is not None], 1)

    def mixed(self, v: Tensor) -> Tensor:
        """The mixed product ``g_xy v`` of a vector like y: a vector like x."""
        self._oracle.cost.mixed_products += 1
        x, y = self._oracle.problem.x, self._oracle.problem.y
        inner = v if self._free is None else v * self._free
        return self._mean(x.join(self._products.mixed(y.cast(inner))))

    def mixed_transposed(self, d: Tensor) -> Tensor:
        """The mixed product ``g_yx d`` of a vector like x: how the lower gradient changes along d, like y."""
        self._oracle.cost.mixed_products += 1
        x, y = self._oracle.problem.x, self._oracle.problem.y
        product = self._mean(y.join(self._products.mixed_transposed(x.cast(d))))
        return product if self._free is None else product * self._free


class Hessian:
    """A Hessian known by its products, and as a matrix where it is small.

    Args:
        product: v -> H v.
        written: Writes the matrix out, or returns None where it is too large or its products can't be made at once.
    """

    def __init__(self, product: Callable[[Tensor], Tensor], written: Callable[[], Tensor | None]):
        self._product, self._written = product, written

    def __call__(self, v: Tensor) -> Tensor:
        """The product H v."""
        return self._product(v)

    @cached_property
    def matrix(self) -> Tensor | None:
        """The matrix, made once."""
        return self._written()

    @cached_property
    def factor(self) -> Tensor | None:
        """Its Cholesky factor, made once; None where there is no matrix, or it is not positive definite."""
        if self.matrix is None:
            return None
        factor, info = torch.linalg.cholesky_ex((self.matrix + self.matrix.T) / 2)
        return factor if int(info) == 0 else None


class Graph:
    """Products of second derivatives of g by autograd, from one graph of its gradient."""

    def __init__(self, problem: Bilevel, batch: Any, recorded: bool = False):
        self._x, self._y = problem.x.tensors, problem.y.tensors
        self._product = _product_of_scalar if recorded else _product
        with torch.enable_grad():
            self.value = _scalar("lower_loss", problem.lower_loss(batch))
            self.grad = _grad(self.value, self._y, create_graph=True)
        _must_depend("lower_loss", "lower_params", self.grad)
        self._grad_x: tuple[Tensor | None, ...] | None = None

    def hessian(self, v: Sequence[Tensor]) -> Sequence[Tensor | None]:
        """``g_yy v``."""
        return self._product(self.grad, v, self._y)

    def mixed(self, v: Sequence[Tensor]) -> Sequence[Tensor | None]:
        """``g_xy v``."""
        return self._product(self.grad, v, self._x)

    def mixed_transposed(self, d: Sequence[Tensor]) -> Sequence[Tensor | None]:
        """``g_yx d``."""
        if self._grad_x is None:
            self._grad_x = _grad(self.value, self._x, create_graph=True)
        return self._product(self._grad_x, d, self._y)


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

    @cached_property
    def hessian(self) -> Hessian:
        """The mean of ``g_yy``, by products."""
        return Hessian(self._hessian, lambda: None)

    def _hessian(self, v: Tensor) -> Tensor:
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
        tape: Play the losses from their recorded operations where that gives the same numbers (see `Bilevel`).
    """

    def __init__(self, problem: Bilevel, tape: bool = False):
        self.problem = problem
        self.cost = Cost()
        self._lower_players = Players("lower_loss", self._record_lower)
        self._upper_players = Players("upper_loss", self._record_upper)
        self._tape = tape
        self._taping = tape and _world() == 1
        self._precisions: dict[str, float] = {}
        self._frozen: object | None = None  # the same while x stays as it is

    def upper(self, batch: Any) -> UpperPoint:
        """f and both of its partial gradients at the present (x, y): one forward and one backward pass."""
        problem = self.problem
        moment = problem.moment()
        self._must_require_grad()
        self.cost.upper_gradients += 1
        n = len(problem.x.tensors)
        player = self._upper_player(batch)
        if player is not None:
            played, *own = player.play("point", batch)
            point = UpperPoint(
                played.item(),
                problem.x.join(own[:n]),
                problem.y.join(own[n:]),
                moment,
                self.precision("upper_loss", played),
            )
            self._compare(point.value, problem.upper_loss, batch)
            return point
        loss, parts = self._upper_by_loss(batch)
        grad_x, grad_y = mean_over_ranks(problem.x.join(parts[:n])), mean_over_ranks(problem.y.join(parts[n:]))
        return UpperPoint(_number(loss), grad_x, grad_y, moment, self.precision("upper_loss", loss))

    def _upper_by_loss(self, batch: Any) -> tuple[Tensor, tuple[Tensor | None, ...]]:
        problem = self.problem
        with torch.enable_grad():
            loss = _scalar("upper_loss", problem.upper_loss(batch))
        parts = _grad(loss, (*problem.x.tensors, *problem.y.tensors))
        _must_depend("upper_loss", "upper_params or lower_params", parts)
        return loss, parts

    def lower(self, batch: Any, y: Tensor | None = None, replay: Moment | None = None) -> LowerPoint:
        """g and its gradient in y at the present x; nothing is recorded of x.

        Args:
            batch: What the lower loss is called with.
            y: Where, as a flat vector; None for the present y. If the loss itself has to be called, y is written first.
            replay: Makes it a probe: with the random numbers of that moment, and without a trace.
        """
        problem = self.problem
        self.cost.lower_gradients += 1
        player = self._lower_player(batch)
        if player is not None:
            parts = problem.y.tensors if y is None else problem.y.cast(y)
            frozen, eps = self._frozen, self._precisions["lower_loss"]
            if frozen is not None and y is not None:  # neither x nor this y will change before somebody asks
                grad = problem.y.join(player.play("gradient", batch, parts, frozen))
                return LowerPoint(lambda: player.play("value", batch, parts, frozen)[0].item(), grad, None, eps)
            value, *own = player.play("point", batch, parts, frozen)
            found = value.item()
            return LowerPoint(lambda: found, problem.y.join(own), None, eps)
        if y is not None:
            problem.y.write_(y)
        with nullcontext() if replay is None else problem.probing(replay):
            moment = problem.moment()
            value, grad, eps = self._lower_by_loss(batch)
        return LowerPoint(lambda: value, grad, moment, eps)

    def _lower_by_loss(self, batch: Any) -> tuple[float, Tensor, float]:
        problem = self.problem
        with self.upper_frozen(), torch.enable_grad():
            loss = _scalar("lower_loss", problem.lower_loss(batch))
            parts = _grad(loss, problem.y.tensors)
        _must_depend("lower_loss", "lower_params", parts)
        return _number(loss), mean_over_ranks(problem.y.join(parts)), self.precision("lower_loss", loss)

    def lower_graph(self, batch: Any, replay: Moment | None = None, check: bool = True) -> LowerGraph:
        """The graph of g's gradient at the present (x, y), for Hessian and mixed products.

        With a moment to replay it is a probe: built with the random numbers of that moment, and without a trace.

        Raises:
            Outdated: The loss is played from its tape, and that gives other numbers than the loss itself does now. Without
                ``check`` nobody looks.
        """
        problem = self.problem
        self.cost.lower_graphs += 1
        self._must_require_grad()
        player = self._lower_player(batch)
        if player is not None:
            graph = LowerGraph(self, batch, player.graph(batch, problem.y.tensors), problem.moment())
            if check:
                self._compare(graph.value, problem.lower_loss, batch)
            return graph
        with nullcontext() if replay is None else problem.probing(replay):
            moment = problem.moment()
            return LowerGraph(self, batch, Graph(problem, batch), moment)

    def precision(self, name: str, loss: Tensor) -> float:
        """The relative spacing of the numbers that a loss is computed in: autocast may hand over more digits than there are.

        It is looked up where the loss is seen with its graph for the first time.
        """
        if name not in self._precisions and loss.grad_fn is not None:
            self._precisions[name] = _coarsest(loss)
        return self._precisions.get(name) or torch.finfo(loss.dtype).eps

    def _compare(self, played: float, loss: Loss, batch: Any) -> None:
        """The tape against the loss itself, at the present point: the loss may have changed since it was recorded."""
        called = _scalar("loss", without_grad(lambda: loss(batch)))
        value, eps = called.item(), torch.finfo(called.dtype).eps
        same = abs(value - played) <= 100 * eps * max(abs(value), abs(played))
        if not (same or value == played or (isnan(value) and isnan(played))):
            raise Outdated

    def _lower_player(self, batch: Any) -> LowerPlayer | None:
        """What plays the lower loss on a batch like this one, or None where the loss itself is called."""
        return self._lower_players.find(batch) if self._taping else None

    def _upper_player(self, batch: Any) -> UpperPlayer | None:
        """The same for the upper loss."""
        return self._upper_players.find(batch) if self._taping else None

    def _record_lower(self, batch: Any) -> LowerPlayer:
        x, y = self.problem.x.tensors, self.problem.y.tensors
        v, d = ([torch.ones_like(tensor).detach() for tensor in group] for group in (y, x))
        frozen = [tensor for tensor in x if not tensor.requires_grad]

        def compute() -> Outputs:
            graph = Graph(self.problem, batch, recorded=True)
            self.precision("lower_loss", graph.value)
            return {
                "value": [graph.value],
                "gradient": graph.grad,
                "point": [graph.value, *graph.grad],
                "hessian": graph.hessian(v),
                "mixed": graph.mixed(v),
                "mixed_transposed": graph.mixed_transposed(d),
            }

        for tensor in frozen:
            tensor.requires_grad_(True)
        try:
            with self.problem.probing():
                return LowerPlayer(compute, x, y, [*v, *d], batch)
        finally:
            for tensor in frozen:
                tensor.requires_grad_(False)

    def _record_upper(self, batch: Any) -> UpperPlayer:
        def compute() -> Outputs:
            loss, parts = self._upper_by_loss(batch)
            self.precision("upper_loss", loss)
            return {"value": [loss], "point": [loss, *parts]}

        with self.problem.probing():
            return UpperPlayer(compute, [*self.problem.x.tensors, *self.problem.y.tensors], batch)

    def forget(self) -> None:
        """Drop what was recorded: a loss has changed."""
        self._lower_players.forget()
        self._upper_players.forget()

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
        player = self._upper_player(batch)
        if player is not None:
            return float(player.play("value", batch)[0].item())
        return self._probe("upper_loss", lambda: self.problem.upper_loss(batch), replay)

    def lower_value(self, batch: Any, replay: Moment | None = None, y: Tensor | None = None) -> float:
        """g at the present x and at y as a probe: without grad, with random state and buffers put back.

        Where y is given and the loss itself has to be called, y is written first.
        """
        self.cost.lower_values += 1
        player = self._lower_player(batch)
        if player is not None:
            parts = self.problem.y.tensors if y is None else self.problem.y.cast(y)
            return float(player.play("value", batch, parts, self._frozen)[0].item())
        if y is not None:
            self.problem.y.write_(y)
        return self._probe("lower_loss", lambda: self.problem.lower_loss(batch), replay)

    def _probe(self, name: str, call: Callable[[], Any], replay: Moment | None) -> float:
        return _number(_scalar(name, probe(call, self.problem.y.device, replay, self.problem.buffers)))

    @contextmanager
    def upper_frozen(self) -> Iterator[None]:
        """Within this context the upper parameters do not require grad. May be nested; a lower loop enters it once."""
        frozen = [tensor for tensor in self.problem.x.tensors if tensor.requires_grad]
        outer = self._frozen
        if outer is None:
            self._frozen = object()
            if self._tape:
                self._taping = _world() == 1
                self._lower_players.refresh()
                self._upper_players.refresh()
        for tensor in frozen:
            tensor.requires_grad_(False)
        try:
            yield
        finally:
            self._frozen = outer
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


def _coarsest(loss: Tensor) -> float:
    """The eps of the coarsest numbers on the way to a loss, by its graph."""
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


def _itself(tensor: Tensor) -> Tensor:
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


def _product_of_scalar(
    outputs: Sequence[Tensor | None], vectors: Sequence[Tensor], inputs: Sequence[Tensor]
) -> Sequence[Tensor | None]:
    """The same from the scalar <outputs, vectors>, for a recording; missing parts stay missing.

    On a tape the scalar costs nothing, and without ``grad_outputs`` torch does not import the algebra system of its compiler,
    which takes longer than a small problem.
    """
    pairs = [(o, v) for o, v in zip(outputs, vectors, strict=True) if o is not None and o.requires_grad]
    if not pairs:
        return [None] * len(inputs)
    with torch.enable_grad():
        total = reduce(torch.add, [(o * v).sum() for o, v in pairs])
    return torch.autograd.grad(total, inputs, retain_graph=True, allow_unused=True)


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
