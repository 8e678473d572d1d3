"""Value and slope from a hypergradient on an independent batch."""

from __future__ import annotations

from dataclasses import dataclass

from bisls.hypergrad.base import HypergradientMethod
from bisls.response.base import Ray, Response, Scene, State
from bisls.states import Fields
from bisls.vector import Vector, dot


@dataclass(frozen=True)
class Resampled(Response):
    """Two samples in the paper's way: f and ||h||^2 both from the independent upper batch, the direction from the other.

    It costs a second hypergradient. For rules that look at value and slope alone (`Polyak`).
    """

    @property
    def two_samples(self) -> bool:
        """That is what it is for."""
        return True

    @property
    def searchable(self) -> bool:
        """The slope is that of another direction."""
        return False

    @property
    def follows(self) -> bool:
        """It does not."""
        return False

    def ray(self, scene: Scene, state: State) -> Ray:
        """The value and the squared norm that the independent batch gives."""
        estimate, sample = scene.estimate, scene.sample
        if sample.judged:
            lower = sample.estimating(scene.method.several)
            estimate = scene.method.estimate(scene.oracle, sample.judging, lower, state)
        slope = -dot(estimate.flat, estimate.flat)
        line = scene.line(estimate.value, slope, lambda t: scene.y, sample.judging)
        return Ray(line, state=estimate.state, status=estimate.status)

    def keeps(self, y: Vector | None, method: HypergradientMethod) -> Fields:
        """As the hypergradient."""
        return method.keeps(y)
