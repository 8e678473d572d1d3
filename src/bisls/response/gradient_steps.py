"""The paper's response: a few gradient steps on the lower loss at the trial point."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from bisls._check import settle, whole_number
from bisls.batches import Minibatches
from bisls.hypergrad.base import HypergradientMethod
from bisls.response.base import Ray, Response, Scene, State
from bisls.states import Fields
from bisls.vector import Vector, dot


@dataclass(frozen=True)
class GradientSteps(Response):
    """``yhat(t)``: n gradient steps of the last lower step size on g(x - t d, .), begun at y (the paper's Algorithm 1, n = 1).

    With a lower direction, or a lower optimiser, they are steps of that kind. Each trial costs n lower gradients and one upper
    value. The line begins at f(x, y), as in the paper's equation 14, although yhat(0) is not y: the search may find nothing,
    however short the step. It ends after ``max_checks`` of the step rule then; y itself stays where the lower loop ended.

    Args:
        n: Number of gradient steps, at least 1.
    """

    n: int = 1

    def __post_init__(self) -> None:
        settle(self, n=whole_number(1))

    def ray(self, scene: Scene, state: State) -> Ray:
        """f(x - t d, yhat(t)), with the slope -<h, d> of the hypergradient."""
        oracle, moment = scene.oracle, scene.here.moment
        batches = Minibatches.repeated(scene.sample.lower.newest, self.n)

        def y_at(t: float) -> Tensor | None:
            oracle.problem.x.write_(scene.x - t * scene.search)
            return scene.lower.repeated(oracle, batches, scene.lowered, scene.y, moment)

        slope = -dot(scene.estimate.flat, scene.search)
        return Ray(scene.line(scene.estimate.value, slope, y_at, scene.sample.upper))

    def keeps(self, y: Vector | None, method: HypergradientMethod) -> Fields:
        """Nothing."""
        return Fields()
