"""What a response sees of an outer iteration, and what it gives back."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar, Protocol

from torch import Tensor

from bisls.hypergrad.base import Hypergradient, HypergradientMethod
from bisls.line import Line
from bisls.oracle import Oracle, UpperPoint
from bisls.record import Status
from bisls.still import Moment

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
        upper_batch: The batch of the hypergradient.
        step_batch: An independent upper batch that judges the step; the same object where there is none.
        lower_batch: The lower batch of the hypergradient.
        beta: The last lower step that was accepted.
        alpha: The last upper step that was taken; None before the first.
        max_step: How far the ray may be followed (the border of a box).
        judged: Whether ``step_batch`` judges the step; None finds out by comparing the two batches.
    """

    oracle: Oracle
    method: HypergradientMethod
    estimate: Hypergradient
    search: Tensor
    x: Tensor
    y: Tensor
    upper_batch: Any
    step_batch: Any
    lower_batch: Any
    beta: float
    alpha: float | None
    max_step: float
    judged: bool | None = None

    @property
    def independent(self) -> bool:
        """Whether another batch judges the step; with several processes, on any of them."""
        return self.step_batch is not self.upper_batch if self.judged is None else self.judged

    @cached_property
    def here(self) -> UpperPoint:
        """f and its gradients at (x, y) on the batch of the hypergradient, which has them already in most cases."""
        return self.estimate.upper or self.oracle.upper(self.upper_batch)

    def value_at(self, batch: Any, moment: Moment, t: float, y: Tensor) -> float:
        """f on one batch at ``x - t search`` and the y given; a point that is not finite is not written anywhere."""
        x = self.x - t * self.search
        problem = self.oracle.problem
        if not (problem.x.holds(x) and problem.y.holds(y)):
            return float("inf")
        problem.x.write_(x)
        problem.y.write_(y)
        return self.oracle.upper_value(batch, moment)


def _as_chosen(t: float) -> tuple[float, State]:
    return t, {}


@dataclass(frozen=True)
class Ray:
    """The upper loss along the ray, and where y goes with the step that is taken.

    Attributes:
        line: What the step rule sees.
        follow: t -> the lower variable after a step of t; None leaves it where the lower loop ended.
        settle: The step chosen -> the step to take, where the response's own prediction holds only for a shorter one; and
            what is to be remembered of that.
        state: What the next ray may start from (tensors, so that it can be saved).
        status: How the response's own linear solve ended.
    """

    line: Line
    follow: Callable[[float], Tensor] | None = None
    settle: Callable[[float], tuple[float, State]] = _as_chosen
    state: State = field(default_factory=dict)
    status: Status = Status.OK


class Response(Protocol):
    """Says what the upper loss is along the ray ``x - t d``."""

    two_samples: ClassVar[bool]  # whether an independent upper batch is of use

    def ray(self, scene: Scene, state: State) -> Ray:
        """The ray of this iteration; ``state`` is that of the last one, or empty."""
        ...
