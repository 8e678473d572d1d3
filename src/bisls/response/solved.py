"""The upper loss along a ray with the lower problem solved at every trial: the exact F, where that is cheap."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from bisls.linear.base import LinearSolver
from bisls.linear.direct import SMALL
from bisls.lower.solved import solvable, solved
from bisls.operators import Inverse
from bisls.oracle import LowerGraph
from bisls.response.base import Ray, Scene
from bisls.vector import dot, norm

SHARE = 0.05  # y is solved for up to so much of the way that it goes along the ray


def on_solutions(scene: Scene, graph: LowerGraph, ray: Ray, linear: LinearSolver) -> Ray:
    """The same ray, y solved for at every trial from where it is predicted; as it is where no inverse Hessian is known.

    What is predicted is right to first order, and along flat directions of g (a penalty that vanishes) its gradient does not
    tell how far off it is. The slope of the line is that of F, as the hypergradient has it.

    Args:
        scene: The iteration.
        graph: The lower graph at (x, y).
        ray: As the tangent lays it.
        linear: Makes Newton steps.
    """
    oracle, problem, follow = scene.oracle, scene.oracle.problem, ray.follow
    if follow is None or not solvable(oracle):
        return ray
    way, seen = norm(follow(1.0) - scene.y), dict[float, Tensor | None]()
    inverse = _inverse(scene, graph)

    def y_at(t: float) -> Tensor | None:
        if t not in seen:
            x, y = scene.x - t * scene.search, follow(t)
            found = None
            if problem.x.holds(x) and problem.y.holds(y):
                problem.x.write_(x)
                found = solved(oracle, graph.batch, y, SHARE * t * way, linear, inverse, graph.moment)
            seen[t] = None if found is None else found.y
        return seen[t]

    def arrived(t: float) -> Tensor:
        y = y_at(t)
        return follow(t) if y is None else y

    slope = -dot(scene.estimate.flat, scene.search)
    line = scene.line(scene.estimate.value, slope, y_at, scene.sample.judging, scene.here)
    return replace(ray, line=line, follow=arrived, trust=lambda t: (t, {}))


def _inverse(scene: Scene, graph: LowerGraph) -> Inverse | None:
    """The inverse Hessian at (x, y), or one from before; none where a new one is cheap: it sees directions that became flat."""
    if scene.oracle.problem.y.numel <= SMALL:
        return None
    factor = graph.hessian.factor() if graph.hessian.written else None
    if factor is None:
        return scene.oracle.memory.learnt.applied
    return lambda v: torch.cholesky_solve(v[:, None], factor[0])[:, 0]
