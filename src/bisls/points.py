"""What evaluations give, and what they cost."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

from torch import Tensor

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
    def whole(self) -> bool:
        """Whether the gradient in y is still there: what looks through lower steps uses it up."""
        return self.grad_y.numel() > 0

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
        return number(self._value)

    def without_gradient(self) -> LowerPoint:
        """The same, to be kept for long."""
        return LowerPoint(self._value, self.grad.new_empty(0), self.moment, self._spacing)


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


def number(value: Tensor) -> float:
    """The mean over ranks of a scalar."""
    return mean_over_ranks(value).item()
