"""The upper loss along a ray with the lower problem solved at every trial: the exact F, where that is cheap."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from bisls.linear.base import LinearSolver
from bisls.lower.solved import Goal, inverse_of, solved, whole
from bisls.oracle import LowerGraph
from bisls.response.base import Ray, Scene
from bisls.vector import dot, norm

SHARE = 0.05  # y is solved for up to so much of the way that it goes along the ray
ROUNDING = 8.0  # f is looked at up to so many units in its last place
FAILURES = 2  # trials at which g could not be solved, and none is tried after them


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
    if follow is None or whole(oracle) is None:
        return ray
    way, slope = norm(follow(1.0) - scene.y), -dot(scene.estimate.flat, scene.search)
    inverse, here = inverse_of(graph, oracle), scene.here
    assert inverse is not None
    left = inverse(graph.grad)  # how far off y is here, and f with it: a trial can't be closer
    off, least = norm(left), max(abs(dot(here.grad_y, left)), ROUNDING * here.eps * abs(here.value))
    if off > SHARE * way and least > SHARE * -slope:
        return ray
    seen, failures = dict[float, Tensor | None](), 0

    def y_at(t: float) -> Tensor | None:
        nonlocal inverse, failures
        if t not in seen:
            x, y = scene.x - t * scene.search, follow(t)
            found = None
            if problem.x.holds(x) and problem.y.holds(y) and failures < FAILURES:
                problem.x.write_(x)
                goal = Goal(max(SHARE * t * way, off), here.grad_y, max(SHARE * t * -slope, least))
                found = solved(oracle, graph.batch, y, goal, linear, inverse, graph.moment)
                inverse = inverse if found is None else found.inverse  # the next trial is nearer to this one
            failures += found is None or not found.done
            seen[t] = found.y if found is not None and found.done else None
        return seen[t]

    def arrived(t: float) -> Tensor:
        y = y_at(t)
        return follow(t) if y is None else y

    line = scene.line(scene.estimate.value, slope, y_at, scene.sample.judging, scene.here)
    return replace(ray, line=line, follow=arrived, trust=lambda t: (t, {}))
