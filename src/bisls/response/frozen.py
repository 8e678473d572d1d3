"""y stays where it is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from bisls.line import Line
from bisls.response.base import Ray, Scene, State
from bisls.vector import dot


@dataclass(frozen=True)
class Frozen:
    """``yhat(t) = y``: for upper losses that depend on x directly, and for rules that look at value and slope alone.

    A search needs ``f(x, y)`` to fall along ``x``; where f depends on x only through y*(x) nothing changes along this ray
    and no search can succeed: use `Tangent` there.
    """

    two_samples: ClassVar[bool] = False

    def ray(self, scene: Scene, state: State) -> Ray:
        """f(x - t d, y), with the slope -<h, d> of the hypergradient."""
        estimate = scene.estimate
        line = Line(
            estimate.value,
            -dot(estimate.flat, scene.search),
            lambda t: scene.value_at(scene.upper_batch, scene.here.moment, t, scene.y),
            scene.max_step,
            scene.here.eps,
        )
        return Ray(line)
