"""Every number that the algorithms see: evaluations of both losses, counted and averaged over ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from bisls.evaluate import Graph, lower_point, precision, requiring_grad, started, unit_vectors, upper_point, value
from bisls.operators import Memory, Operator, block_rows
from bisls.problem import Bilevel, must_be_problem
from bisls.ranks import mean_over_ranks
from bisls.still import Moment


@dataclass
class Cost:
    """How many evaluations were made, by level. Counts do not depend on the machine; times do.

    What the algorithms ask for is counted. A call that leaves no trace and decides nothing is not: the one that finds out how
    exact a loss is.
    """

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
    spacing: Callable[[], float]

    @property
    def eps(self) -> float:
        """The relative spacing of the numbers that the loss is computed in; found when somebody asks."""
        return self.spacing()


class LowerPoint:
    """g(x, y) on one batch, with its gradient in y.

    Attributes:
        grad: The gradient, flat.
        moment: The random state before the loss was called.
    """

    def __init__(self, value: Tensor, grad: Tensor, moment: Moment, spacing: Callable[[], float]):
        self.grad, self.moment = grad, moment
        self._value, self._spacing = value, spacing

    @property
    def eps(self) -> float:
        """The relative spacing of the numbers that the loss is computed in; found when somebody asks."""
        return self._spacing()

    @cached_property
    def value(self) -> float:
        """g itself; read, and averaged over ranks, only if somebody asks."""
        return _number(self._value)


class LowerGraph:
    """The graph of g's gradient at one point (x, y), on one batch; every product at that point reuses it.

    Coordinates of y that sit on a bound do not respond to x: in products they count as uncoupled, with unit curvature.
    """

    def __init__(self, oracle: Oracle, batch: Any, products: Graph):
        problem = oracle.problem
        self._oracle = oracle
        self._products = products
        self.batch = batch
        self.moment, self.random = products.moment, products.random
        self.value = _number(products.value)
        self.grad = mean_over_ranks(problem.y.join(products.grad))
        self._free = self._not_held()

    @property
    def eps(self) -> float:
        """The relative spacing of the numbers that the loss is computed in."""
        return self._oracle.precision("lower_loss", self.batch)

    def _not_held(self) -> Tensor | None:
        """1 where y is free to respond, 0 where it sits on a bound; None where none does."""
        problem = self._oracle.problem
        held = (
            None if problem.lower_bounds is None else problem.lower_bounds.held(problem.y.read(), self.grad, problem.y)
        )
        return None if held is None else (~held).to(self.grad.dtype)

    def freed(self, v: Tensor) -> Tensor:
        """A vector like y with 0 where y sits on a bound."""
        return v if self._free is None else v * self._free

    @cached_property
    def hessian(self) -> Operator:
        """The Hessian ``g_yy``: call it with a vector like y for their product."""
        y = self._oracle.problem.y
        return Operator(self._hessian, self._blocks if block_rows(y.numel) and y.alike else None, self._oracle.memory)

    def _hessian(self, v: Tensor) -> Tensor:
        self._oracle.cost.hessian_products += 1
        y, free = self._oracle.problem.y, self._free
        inner = v if free is None else v * free
        product = mean_over_ranks(y.join(self._products.hessian(y.cast(inner))))
        return product if free is None else product * free + v * (1 - free)

    def _blocks(self) -> Tensor:
        """The diagonal blocks, the last filled up with ones on its diagonal."""
        y, free = self._oracle.problem.y, self._free
        rows = block_rows(y.numel)
        self._oracle.cost.hessian_products += y.numel
        found = torch.eye(rows, dtype=y.dtype, device=y.device).repeat(-(-y.numel // rows), 1, 1)
        for block, first in zip(found, range(0, y.numel, rows), strict=True):
            last = min(first + rows, y.numel)
            units = unit_vectors(y, first, last)
            columns = [
                (torch.zeros_like(unit) if part is None else part).reshape(last - first, -1)
                for part, unit in zip(self._products.columns(units), units, strict=True)
            ]
            block[: last - first, : last - first] = mean_over_ranks(torch.cat(columns, 1)[:, first:last])
            if free is not None:
                own = free[first:last]
                block[: last - first, : last - first].mul_(own).mul_(own[:, None]).diagonal().add_(1 - own)
        return found

    def mixed(self, v: Tensor) -> Tensor:
        """The mixed product ``g_xy v`` of a vector like y: a vector like x."""
        self._oracle.cost.mixed_products += 1
        x, y = self._oracle.problem.x, self._oracle.problem.y
        inner = v if self._free is None else v * self._free
        return mean_over_ranks(x.join(self._products.mixed(y.cast(inner))))

    def both(self, v: Tensor) -> tuple[Tensor, Tensor]:
        """``g_yy v`` and ``g_xy v`` from one pass, for a step that was taken: coordinates on a bound are like any other."""
        cost, x, y = self._oracle.cost, self._oracle.problem.x, self._oracle.problem.y
        cost.hessian_products += 1
        cost.mixed_products += 1
        by_y, by_x = self._products.both(y.cast(v))
        return mean_over_ranks(y.join(by_y)), mean_over_ranks(x.join(by_x))

    def mixed_through(self, v: Tensor) -> Tensor:
        """``g_xy v`` alone, for a step that was taken."""
        self._oracle.cost.mixed_products += 1
        y = self._oracle.problem.y
        return mean_over_ranks(self._oracle.problem.x.join(self._products.mixed(y.cast(v))))

    def mixed_transposed(self, d: Tensor) -> Tensor:
        """The mixed product ``g_yx d`` of a vector like x: how the lower gradient changes along d, like y."""
        self._oracle.cost.mixed_products += 1
        x, y = self._oracle.problem.x, self._oracle.problem.y
        product = mean_over_ranks(y.join(self._products.mixed_transposed(x.cast(d))))
        return product if self._free is None else product * self._free


class MeanGraph:
    """The lower graphs of several batches at one point, seen as one: products are means over the batches.

    Args:
        graphs: At least one. Value, gradient, batch and random state are those of the first.
        hessians: Over how many of them Hessian products are averaged; a linear solve has many of these.
    """

    def __init__(self, graphs: Sequence[LowerGraph], hessians: int):
        self.graphs = list(graphs)
        self.hessians = min(hessians, len(self.graphs))
        self.value, self.grad, self.moment = graphs[0].value, graphs[0].grad, graphs[0].moment
        self.random, self.batch = graphs[0].random, graphs[0].batch

    @property
    def eps(self) -> float:
        """That of the first."""
        return self.graphs[0].eps

    @cached_property
    def hessian(self) -> Operator:
        """The mean of ``g_yy``, by products."""
        return Operator(self._hessian)

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


@dataclass(frozen=True)
class Start:
    """Where ``lower_start`` lets y begin.

    Attributes:
        y: The start, flat.
        pulled: What is owed to it -> what is owed to x.
        moment: The random state before.
    """

    y: Tensor
    pulled: Callable[[Tensor], Tensor]
    moment: Moment


class Oracle:
    """Every number that the algorithms see of a problem.

    It records no graph that it does not need, counts each evaluation in `cost`, and, where `torch.distributed` is
    initialised, averages each result over the ranks, so that every rank takes the same decision.

    Attributes:
        cost: What was evaluated so far.
        memory: What linear solves have learnt of the lower Hessian.

    Args:
        problem: The problem to look at.
    """

    def __init__(self, problem: Bilevel):
        must_be_problem("Oracle", problem)
        self.problem = problem
        self.cost = Cost()
        self.memory = Memory()
        self._eps: dict[str, float] = {}

    def upper(self, batch: Any) -> UpperPoint:
        """f and both of its partial gradients at the present (x, y): one forward and one backward pass."""
        self._must_require_grad()
        self.cost.upper_gradients += 1
        x, y = self.problem.x, self.problem.y
        found = upper_point(self.problem, batch)
        n = len(x.tensors)
        grads = mean_over_ranks(x.join(found.grad[:n])), mean_over_ranks(y.join(found.grad[n:]))
        return UpperPoint(_number(found.value), *grads, found.moment, lambda: self.precision("upper_loss", batch))

    def lower(self, batch: Any, y: Tensor | None = None, replay: Moment | None = None) -> LowerPoint:
        """g and its gradient in y at the present x; nothing is recorded of x.

        Args:
            batch: What the lower loss is called with.
            y: Where, as a flat vector that is written into the parameters; None for the present y.
            replay: Makes it a probe: with the random numbers of that moment, and without a trace.
        """
        self._must_require_grad("lower_params")  # x does not while it is held
        self.cost.lower_gradients += 1
        if y is not None:
            self.problem.y.write_(y)
        found = lower_point(self.problem, batch, replay)
        mean = mean_over_ranks(self.problem.y.join(found.grad))
        return LowerPoint(found.value, mean, found.moment, lambda: self.precision("lower_loss", batch))

    def start(self, batch: Any, graph: bool = False) -> Start:
        """Where y begins at the present x, by the problem's ``lower_start``; the parameters stay as they are.

        Args:
            batch: The lower batch, for a function that takes it.
            graph: Whether somebody will ask what is owed to x.
        """
        x, y = self.problem.x, self.problem.y
        found = started(self.problem, batch, graph)

        def pulled(owed: Tensor) -> Tensor:
            return mean_over_ranks(x.join(found.pulled(y.cast(owed))))

        return Start(mean_over_ranks(y.join(found.tensors)), pulled, found.moment)

    def lower_graph(self, batch: Any, replay: Moment | None = None) -> LowerGraph:
        """The graph of g's gradient at the present (x, y), for Hessian and mixed products.

        With a moment to replay it is a probe: built with the random numbers of that moment, and without a trace.
        """
        self.cost.lower_graphs += 1
        self._must_require_grad()
        return LowerGraph(self, batch, Graph(self.problem, batch, replay))

    def upper_value(self, batch: Any, replay: Moment | None = None) -> float:
        """f at the present (x, y) as a probe: without grad, with random state and buffers put back."""
        self.cost.upper_values += 1
        return _number(value(self.problem, "upper_loss", batch, replay))

    def lower_value(self, batch: Any, replay: Moment | None = None, y: Tensor | None = None) -> float:
        """g at the present x as a probe: without grad, with random state and buffers put back.

        Where y is given, it is written into the parameters first.
        """
        self.cost.lower_values += 1
        if y is not None:
            self.problem.y.write_(y)
        return _number(value(self.problem, "lower_loss", batch, replay))

    @contextmanager
    def unfrozen(self) -> Iterator[None]:
        """Within this context a parameter that somebody has frozen, or that a loss freezes, is named.

        Raises:
            ValueError: A parameter no longer requires grad.
        """
        self._must_require_grad()
        try:
            yield
        except RuntimeError:  # autograd would not say which
            self._must_require_grad()
            raise

    @contextmanager
    def upper_frozen(self) -> Iterator[None]:
        """Within this context x does not require grad. May be nested; a lower loop enters it once."""
        with requiring_grad(self.problem.x.tensors, False):
            yield

    def precision(self, name: str, batch: Any) -> float:
        """The relative spacing of the numbers that a loss is computed in: found by one probe."""
        if name not in self._eps:
            self._eps[name] = precision(self.problem, name, batch)
        return self._eps[name]

    def _must_require_grad(self, *names: str) -> None:
        """Refuse parameters that somebody has frozen since the problem was made; of both levels, if none is named."""
        for name in names or ("upper_params", "lower_params"):
            tensors = (self.problem.x if name == "upper_params" else self.problem.y).tensors
            for i, tensor in enumerate(tensors):
                if not tensor.requires_grad:
                    raise ValueError(
                        f"`Bilevel({name}=...)`: tensor {i} (shape {tuple(tensor.shape)}) no longer requires grad; "
                        "call requires_grad_() on it, or make the problem without it"
                    )


def _number(value: Tensor) -> float:
    return mean_over_ranks(value).item()
