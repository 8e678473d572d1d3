"""Value and slope from a hypergradient on an independent batch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from bisls.line import Line
from bisls.response.base import Ray, Scene, State
from bisls.vector import dot


@dataclass(frozen=True)
class Resampled:
    """Two samples in the paper's way: f and ||h||^2 both from the independent upper batch, the direction from the other.

    It costs a second hypergradient. For rules that look at value and slope alone (`Polyak`).
    """

    two_samples: ClassVar[bool] = True

    def ray(self, scene: Scene, state: State) -> Ray:
        """The value and the squared norm that the independent batch gives."""
        estimate = scene.estimate
        if scene.independent:
            estimate = scene.method.estimate(scene.oracle, scene.step_batch, scene.lower_batch, state)
        line = Line(
            estimate.value,
            -dot(estimate.flat, estimate.flat),
            lambda t: scene.value_at(scene.step_batch, scene.here.moment, t, scene.y),
            scene.max_step,
            scene.here.eps,
        )
        return Ray(line, state=estimate.state, status=estimate.status)
