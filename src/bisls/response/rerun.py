"""The lower steps of the iteration, repeated at the trial point."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from bisls.hypergrad.base import HypergradientMethod
from bisls.response.base import Ray, Response, Scene, State
from bisls.states import Fields
from bisls.vector import Vector, dot


@dataclass(frozen=True)
class Rerun(Response):
    """``yhat(t) = y_T(x - t d)``: the same lower steps, on the same batches and random numbers and of the same sizes, at x - t d.

    The line begins at f(x, y_T), and with `Lookahead()` its slope is ``-<h, d>`` exactly, as long as nothing of the lower state
    is held still. A trial costs T lower gradients and one upper value. After the step y is where the repeated steps ended.
    """

    @property
    def retraces(self) -> bool:
        """The steps are needed."""
        return True

    def ray(self, scene: Scene, state: State) -> Ray:
        """f(x - t d, y_T(x - t d)), with the slope -<h, d> of the hypergradient."""
        oracle, problem = scene.oracle, scene.oracle.problem
        ends: dict[float, Tensor | None] = {0.0: scene.y}  # the rule asks for what it takes, as a rule

        def y_at(t: float) -> Tensor | None:
            if t not in ends:
                problem.x.write_(scene.x - t * scene.search)
                ends[t] = scene.lower.rerun(oracle, scene.sample.lower, scene.lowered)
            return ends[t]

        def follow(t: float) -> Tensor:
            """Where y goes; a rule that has not tried its step leaves it where it is: the next lower loop is not far."""
            found = ends.get(t)
            return scene.y if found is None else found

        slope = -dot(scene.estimate.flat, scene.search)
        return Ray(scene.line(scene.estimate.value, slope, y_at, scene.sample.upper), follow=follow)

    def keeps(self, y: Vector | None, method: HypergradientMethod) -> Fields:
        """Nothing."""
        return Fields()
