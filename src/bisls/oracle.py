"""Every number that the algorithms see: evaluations of both losses, counted and averaged over ranks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from functools import cached_property
from math import nan
from typing import Any

import torch
from torch import Tensor

from bisls.evaluate import (
    Graph,
    Lean,
    lower_point,
    precision,
    requiring_grad,
    started,
    unit_vectors,
    upper_point,
    value,
)
from bisls.operators import Memory, Operator, block_rows
from bisls.points import Cost as Cost
from bisls.points import LowerPoint as LowerPoint
from bisls.points import Start as Start
from bisls.points import UpperPoint as UpperPoint
from bisls.points import number
from bisls.problem import Bilevel, must_be_problem
from bisls.ranks import mean_over_ranks, world
from bisls.still import Moment
from bisls.vector import dot

ALIGNED = 64  # numbers


class LowerGraph:
    """The graph of g's gradient at one point (x, y), on one batch; every product at that point reuses it.

    Coordinates of y that sit on a bound do not respond to x: in products they count as uncoupled, with unit curvature.
    """

    def __init__(self, oracle: Oracle, batch: Any, products: Graph):
        self._oracle = oracle
        self._products = products
        self.batch = batch
        self.moment, self.random = products.moment, products.random
        self._free = self._not_held()

    @cached_property
    def value(self) -> float:
        """g itself."""
        return number(self._products.value)

    @cached_property
    def grad(self) -> Tensor:
        """Its gradient in y, flat."""
        return mean_over_ranks(self._oracle.problem.y.join(self._products.grad))

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

    @property
    def unheld(self) -> LowerGraph:
        """The same graph with all coordinates free, those on a bound as well."""
        found = copy(self)
        found.__dict__.pop("hessian", None)
        found._free = None
        return found

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

    def mixed_transposed(self, d: Tensor) -> Tensor:
        """The mixed product ``g_yx d`` of a vector like x: how the lower gradient changes along d, like y."""
        self._oracle.cost.mixed_products += 1
        x, y = self._oracle.problem.x, self._oracle.problem.y
        product = mean_over_ranks(y.join(self._products.mixed_transposed(x.cast(d))))
        return product if self._free is None else product * self._free


class StepBack:
    """The graph of g's gradient where a lower step was taken, for one pass. Coordinates on a bound are like any other."""

    def __init__(self, oracle: Oracle, products: Graph):
        self._oracle, self._products = oracle, products

    @cached_property
    def grad(self) -> Tensor:
        """The gradient, flat; where it was asked for as numbers."""
        return mean_over_ranks(self._oracle.problem.y.join(self._products.grad))

    def take(self, v: Tensor, from_x: Tensor, from_y: Tensor | None, sloped: bool) -> float:
        """Take ``g_xy v`` from one vector like x and, if it is there, ``g_yy v`` from one like y, in place.

        Returns:
            ``<g, v>``, where that is wanted.
        """
        cost, x, y = self._oracle.cost, self._oracle.problem.x, self._oracle.problem.y
        cost.mixed_products += 1
        cost.hessian_products += from_y is not None
        alone = world() == 1
        by_y, by_x = self._products.last(
            y.cast(v), from_y is not None, y.split(from_y) if alone and from_y is not None else None
        )
        for vector, flat, parts in ((y, from_y, by_y), (x, from_x, by_x)):
            if flat is not None:
                vector.subtract_(flat, parts if alone else vector.split(mean_over_ranks(vector.join(parts))))
        return self._slope(v) if sloped else nan

    def _slope(self, v: Tensor) -> float:
        pairs = zip(self._oracle.problem.y.split(v), self._products.grad, strict=True)
        own = sum(dot(own.reshape(-1), part.reshape(-1).to(v.dtype)) for own, part in pairs if part is not None)
        return number(torch.tensor(own + self._products.slope, dtype=torch.float64))


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
        self._rooms: dict[str, Tensor] = {}

    def rooms(self, name: str, n: int) -> Tensor:
        """So many flat vectors like y to write into: the same memory for all who ask for that name, one after another.

        New memory would take more time than what is written into it, and lie scattered. "y" and "scale" are for the trace of an
        iteration, "work" for what nobody needs any more when a part has done its work.
        """
        there, y = self._rooms.get(name), self.problem.y
        if there is None or len(there) < n:
            self._rooms.pop(name, None)  # freed before the new ones are there
            wide = -(-y.numel // ALIGNED) * ALIGNED  # each begins where one of its own would: sums are added up alike
            there = self._rooms[name] = torch.empty(n, wide, dtype=y.dtype, device=y.device)[:, : y.numel]
        return there[:n]

    def upper(self, batch: Any, room: Tensor | None = None) -> UpperPoint:
        """f and both of its partial gradients at the present (x, y): one forward and one backward pass.

        Args:
            batch: What the upper loss is called with.
            room: Where the gradient in y is to be written, for somebody who uses it up.
        """
        self._must_require_grad()
        self.cost.upper_gradients += 1
        x, y = self.problem.x, self.problem.y
        found = upper_point(self.problem, batch)
        n = len(x.tensors)
        grads = mean_over_ranks(x.join(found.grad[:n])), mean_over_ranks(y.join(found.grad[n:], room))
        return UpperPoint(number(found.value), *grads, found.moment, lambda: self.precision("upper_loss", batch))

    def lower(
        self, batch: Any, y: Tensor | None = None, replay: Moment | None = None, room: Tensor | None = None
    ) -> LowerPoint:
        """g and its gradient in y at the present x; nothing is recorded of x.

        Args:
            batch: What the lower loss is called with.
            y: Where, as a flat vector that is written into the parameters; None for the present y.
            replay: Makes it a probe: with the random numbers of that moment, and without a trace.
            room: Where the gradient is to be written, for one that is of no use after the next.
        """
        self._must_require_grad("lower_params")  # x does not while it is held
        self.cost.lower_gradients += 1
        if y is not None:
            self.problem.y.write_(y)
        found = lower_point(self.problem, batch, replay)
        mean = mean_over_ranks(self.problem.y.join(found.grad, room))
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

    def step_back(self, batch: Any, replay: Moment | None, valued: bool) -> StepBack:
        """The same for a lower step that was taken, and for one pass.

        Args:
            batch: The batch of the step.
            replay: Its random numbers.
            valued: Whether somebody will look at the gradient.
        """
        self.cost.lower_graphs += 1
        self._must_require_grad()
        return StepBack(self, Graph(self.problem, batch, replay, Lean(self.problem.y.tensors, valued)))

    def upper_value(self, batch: Any, replay: Moment | None = None) -> float:
        """f at the present (x, y) as a probe: without grad, with random state and buffers put back."""
        self.cost.upper_values += 1
        return number(value(self.problem, "upper_loss", batch, replay))

    def lower_value(self, batch: Any, replay: Moment | None = None, y: Tensor | None = None) -> float:
        """g at the present x as a probe: without grad, with random state and buffers put back.

        Where y is given, it is written into the parameters first.
        """
        self.cost.lower_values += 1
        if y is not None:
            self.problem.y.write_(y)
        return number(value(self.problem, "lower_loss", batch, replay))

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
