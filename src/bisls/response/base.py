"""What a response sees of an outer iteration, and what it gives back."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from math import inf
from typing import Any

from torch import Tensor

from bisls.batches import Sample
from bisls.hypergrad.base import Hypergradient, HypergradientMethod
from bisls.line import Line
from bisls.lower import Lowered, LowerPart
from bisls.oracle import Oracle, UpperPoint
from bisls.states import FREE, Fields
from bisls.status import Status
from bisls.vector import Vector

State = Mapping[str, Tensor]


@dataclass(frozen=True)
class Scene:
    """One outer iteration after its lower loop, as a response sees it.

    Attributes:
        oracle: Evaluates both losses.
        method: The hypergradient method.
        estimate: The hypergradient at (x, y).
        search: The direction of the trial points, ``x - t search``.
        x: The upper variable, flat.
        y: The lower variable after the lower loop, flat.
        sample: The batches of the iteration; ``sample.judge`` judges the step, where ``sample.judged``.
        lower: What trains y.
        lowered: What it did in this iteration.
        alpha: The last upper step that was taken; None before the first.
        max_step: How far the ray may be followed (the border of a box).
    """

    oracle: Oracle
    method: HypergradientMethod
    estimate: Hypergradient
    search: Tensor
    x: Tensor
    y: Tensor
    sample: Sample
    lower: LowerPart
    lowered: Lowered
    alpha: float | None
    max_step: float

    @cached_property
    def here(self) -> UpperPoint:
        """f and its gradients at (x, y) on the batch of the hypergradient, which has them already in most cases."""
        upper = self.estimate.upper
        return upper if upper is not None and upper.whole else self.oracle.upper(self.sample.upper)

    def line(
        self,
        value: float,
        slope: float,
        y_at: Callable[[float], Tensor | None],
        batch: Any,
        point: UpperPoint | None = None,
    ) -> Line:
        """f along ``x - t search`` on one batch, with y as it responds.

        Args:
            value: phi(0).
            slope: phi'(0).
            y_at: t -> y at the trial point; None where there is none that is finite.
            batch: The upper batch of the trial points.
            point: f at (x, y) on that batch, whose random numbers are drawn again; that of the hypergradient if none is given.
        """
        point = point or self.estimate.upper or self.here
        problem = self.oracle.problem

        def at(t: float) -> float:
            x = self.x - t * self.search
            y = y_at(t) if problem.x.holds(x) else None
            if y is None or not problem.y.holds(y):  # a point that is not finite is not written anywhere
                return inf
            problem.x.write_(x)
            problem.y.write_(y)
            return self.oracle.upper_value(batch, point.moment)

        return Line(value, slope, at, self.max_step, point.eps)


def _as_chosen(t: float) -> tuple[float, State]:
    return t, {}


@dataclass(frozen=True)
class Ray:
    """The upper loss along the ray, and where y goes with the step that is taken.

    Attributes:
        line: What the step rule sees.
        follow: t -> the lower variable after a step of t; None leaves it where the lower loop ended.
        trust: The step chosen -> the step to take, where the response's own prediction holds only for a shorter one (a
            trust-region test); and what is to be remembered of that.
        state: What the next ray may start from (tensors, so that it can be saved).
        status: How the response's own linear solve ended.
    """

    line: Line
    follow: Callable[[float], Tensor] | None = None
    trust: Callable[[float], tuple[float, State]] = _as_chosen
    state: State = field(default_factory=dict)
    status: Status = Status.OK


class Response(ABC):
    """Says what the upper loss is along the ray ``x - t d``."""

    @abstractmethod
    def ray(self, scene: Scene, state: State) -> Ray:
        """The ray of this iteration; ``state`` is that of the last one, or empty."""

    @property
    def two_samples(self) -> bool:
        """Whether an independent upper batch is of use."""
        return False

    @property
    def searchable(self) -> bool:
        """Whether the values along the ray belong to its slope, so that a search means something."""
        return True

    @property
    def follows(self) -> bool:
        """Whether y responds to x along the ray."""
        return True

    @property
    def retraces(self) -> bool:
        """Whether it repeats the lower steps, so that their trace is needed."""
        return False

    def keeps(self, y: Vector | None, method: HypergradientMethod) -> Fields:
        """What its state may be with these lower parameters and this hypergradient; anything, where it does not say."""
        return FREE
