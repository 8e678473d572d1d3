"""The paper's response: a few gradient steps on the lower loss at the trial point."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from bisls._check import require
from bisls.line import Line
from bisls.response.base import Ray, Scene, State
from bisls.vector import dot


@dataclass(frozen=True)
class GradientSteps:
    """``yhat(t)``: n gradient steps of the last lower step size on g(x - t d, .), begun at y (the paper's Algorithm 1, n = 1).

    Each trial costs n lower gradients and one upper value. The line begins at f(x, y), as in the paper's equation 14,
    although yhat(0) is not y: the search may find nothing, however short the step. It ends after ``max_checks``
    of the step rule then; y itself stays where the lower loop ended.

    Args:
        n: Number of gradient steps, at least 1.
    """

    n: int = 1
    two_samples: ClassVar[bool] = False

    def __post_init__(self) -> None:
        require(self, "n", self.n >= 1, "must be at least 1")

    def ray(self, scene: Scene, state: State) -> Ray:
        """f(x - t d, yhat(t)), with the slope -<h, d> of the hypergradient."""
        estimate, oracle = scene.estimate, scene.oracle

        def at(t: float) -> float:
            x, y = scene.x - t * scene.search, scene.y
            for _ in range(self.n):
                if not (oracle.problem.x.holds(x) and oracle.problem.y.holds(y)):
                    return float("inf")
                oracle.problem.x.write_(x)
                y = y - scene.beta * oracle.lower(scene.lower_batch, y, replay=scene.here.moment).grad
            return scene.value_at(scene.upper_batch, scene.here.moment, t, y)

        slope = -dot(estimate.flat, scene.search)
        return Ray(Line(estimate.value, slope, at, scene.max_step, scene.here.eps))
