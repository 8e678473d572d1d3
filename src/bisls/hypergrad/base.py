"""What a hypergradient method takes and gives back, and the call that users make."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from bisls.linear.base import State
from bisls.oracle import LowerGraph, MeanGraph, Oracle, UpperPoint
from bisls.problem import Bilevel
from bisls.record import Status


@dataclass(frozen=True)
class Hypergradient:
    """An estimate of the gradient of ``F(x) = f(x, y*(x))``.

    Attributes:
        value: f(x, y) on the upper batch.
        flat: The estimate as one vector.
        grads: The same, shaped like the upper parameters.
        residual: Relative residual of the linear system; NaN where the method has none.
        status: How the linear solve ended.
        lower_grad_norm: ||grad_y g(x, y)||: the formula assumes that it is small.
        state: What the next estimate may start from.
        graph: The lower graph at (x, y), for further products at the same point.
        upper: f and its gradients at (x, y), where the method evaluated them there.
    """

    value: float
    flat: Tensor
    grads: tuple[Tensor, ...]
    residual: float
    status: Status
    lower_grad_norm: float
    state: State = field(default_factory=dict, repr=False)
    graph: LowerGraph | MeanGraph | None = field(default=None, repr=False)
    upper: UpperPoint | None = field(default=None, repr=False)


class Several:
    """The different batches of one lower loop, the newest last, for methods that look at more than one of them.

    A type of its own, since a single batch may well be a list.
    """

    def __init__(self, batches: Sequence[Any]):
        self.batches = list(batches)
        self._next = len(self.batches)

    def fresh(self) -> Any:
        """Another of the batches, the newest first, over and over."""
        self._next = (self._next - 1) % len(self.batches)
        return self.batches[self._next]


class HypergradientMethod(Protocol):
    """Estimates the hypergradient at the present (x, y)."""

    def estimate(self, oracle: Oracle, upper_batch: Any, lower_batch: Any, state: State) -> Hypergradient:
        """Estimate it; ``state`` is that of an earlier estimate, or empty."""
        ...


def hypergradient(problem: Bilevel, upper_batch: Any, lower_batch: Any, method: HypergradientMethod) -> Hypergradient:
    """The hypergradient of a problem at its present (x, y).

    ``grad F(x) ~ grad_x f - g_xy g_yy^-1 grad_y f`` (the paper's equation 2; g_xy, g_yy second derivatives of g)

    The parameters are not moved, nor is their ``.grad`` touched.

    Args:
        problem: The problem.
        upper_batch: What the upper loss is called with.
        lower_batch: What the lower loss is called with; an iterator of batches where the method draws fresh ones.
        method: `Implicit`, `StochasticNeumann` or `Unrolled`.

    Returns:
        A `Hypergradient` with ``value``, ``grads``, ``flat`` and ``residual``.

    Raises:
        FloatingPointError: A loss or the estimate is not finite at this point.

    Examples:
        >>> import torch, bisls
        >>> x = torch.tensor([0.5], requires_grad=True)
        >>> y = torch.tensor([0.5, 0.5], requires_grad=True)  # y*(x) = (x, x)
        >>> problem = bisls.Bilevel(lambda _: ((y - 3.0) ** 2).sum(), lambda _: ((y - x) ** 2).sum(), [x], [y])
        >>> bisls.hypergradient(problem, None, None, bisls.Implicit(bisls.CG(iters=10))).flat  # 4 (x - 3)
        tensor([-10.])
    """
    must_estimate("hypergradient", method)
    hg = method.estimate(Oracle(problem), upper_batch, lower_batch, {})
    if not abs(hg.value) < float("inf"):
        raise FloatingPointError(
            f"`hypergradient(...)`: upper_loss is {hg.value} at the present parameters. {Status.NON_FINITE.advice}"
        )
    if not bool(torch.isfinite(hg.flat).all()):
        raise FloatingPointError(f"`hypergradient(...)`: the estimate is not finite. {Status.NON_FINITE.advice}")
    return hg


def must_estimate(call: str, method: Any) -> None:
    """Refuse what is no hypergradient method; a linear solver is shown how to become one."""
    if not callable(getattr(method, "estimate", None)) or isinstance(method, type):
        wrap = f"; wrap the linear solver: `Implicit({method!r})`" if hasattr(method, "solve") else ""
        raise ValueError(f"`{call}(method={method!r})`: method must be a hypergradient such as `Implicit(CG())`{wrap}")


def next_batch(batch: Any) -> Any:
    """A fresh batch where an iterator or several batches were given, the same one otherwise."""
    if isinstance(batch, Several):
        return batch.fresh()
    if not isinstance(batch, Iterator):
        return batch
    try:
        return next(batch)
    except StopIteration:
        raise ValueError(
            "`lower_batch`: the iterator ran out of batches; give one that goes on (itertools.cycle), or a single batch"
        ) from None
