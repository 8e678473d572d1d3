"""y stays where it is."""

from __future__ import annotations

from dataclasses import dataclass

from bisls.hypergrad.base import HypergradientMethod
from bisls.response.base import Ray, Response, Scene, State
from bisls.states import Fields
from bisls.vector import Vector, dot


@dataclass(frozen=True)
class Frozen(Response):
    """``yhat(t) = y``: for upper losses that depend on x directly, and for rules that look at value and slope alone.

    A search needs ``f(x, y)`` to fall along ``x``; where f depends on x only through y*(x) nothing changes along this ray
    and no search can succeed: use `Tangent` there.
    """

    @property
    def follows(self) -> bool:
        """It does not."""
        return False

    def ray(self, scene: Scene, state: State) -> Ray:
        """f(x - t d, y), with the slope -<h, d> of the hypergradient."""
        slope = -dot(scene.estimate.flat, scene.search)
        return Ray(scene.line(scene.estimate.value, slope, lambda t: scene.y, scene.sample.upper))

    def keeps(self, y: Vector | None, method: HypergradientMethod) -> Fields:
        """Nothing."""
        return Fields()
