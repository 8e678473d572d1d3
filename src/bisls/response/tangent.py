"""The tangent response: y follows the lower solution to first order."""

from __future__ import annotations

from dataclasses import dataclass
from math import isfinite

import torch
from torch import Tensor

from bisls._check import FLAG, having, number, optional, settle
from bisls.hypergrad.base import HypergradientMethod
from bisls.linear.base import LinearSolver
from bisls.linear.cg import CG
from bisls.oracle import LowerGraph, MeanGraph
from bisls.response.base import Ray, Response, Scene, State
from bisls.states import Fields, Number, Row
from bisls.vector import Vector, dot, finite, norm

DIFFERENCE = 0.1  # the difference that stands for g_yx d is taken over this share of the last step
TRUSTED = 0.8  # a step no longer than the one compared last, or whose expected error is below this share of theta, is
AGE = 5  # not compared again, but for one in so many


@dataclass(frozen=True)
class Tangent(Response):
    """``yhat(t) = y + t u`` with ``g_yy u = g_yx d``: the first-order path of y*(x - t d).

    The line begins at f(x, y) itself and its slope is ``-<grad_x f, d> + <grad_y f, u>``, which is -<h, d> whenever the same
    symmetric solver makes h and u; so for smooth f a step always exists. A trial costs one forward pass of f and nothing of
    g. On an independent batch value and slope are those of that batch, for one gradient of f.

    The prediction is a linear one and may be believed too far. At the step chosen the lower gradient is compared with what
    it should be there, ``grad_y g + t (g_yy u - g_yx d)``; where they differ by more than ``theta t ||g_yx d||`` the step is
    shortened (the remainder is of second order, so by theta over the ratio seen). Steps that the last such comparison
    covers with room to spare are not compared again. Coordinates of y on a bound neither move nor are compared. After the step y
    is at yhat, where the next lower loop begins.

    Args:
        theta: How far the lower gradient may be from its prediction, relative to the change that x causes; positive.
        linear: Solves for u; None takes the linear solver of the hypergradient, or CG where it has none.
        exact: Take g_yx d from second derivatives always. Otherwise it is a difference of two lower gradients over a tenth of
            the last step, which costs one lower gradient where the exact product costs several.
    """

    theta: float = 0.5
    linear: LinearSolver | None = None
    exact: bool = False

    def __post_init__(self) -> None:
        solves = having(LinearSolver, "must be a linear solver such as CG()")
        settle(self, theta=number("(0, inf]", "must be positive"), linear=optional(solves), exact=FLAG)

    @property
    def two_samples(self) -> bool:
        """Value and slope of another batch cost one gradient of f."""
        return True

    def ray(self, scene: Scene, state: State) -> Ray:
        """f_j(x - t d, y + t u) on the batch j that judges the step."""
        oracle, d = scene.oracle, scene.search
        graph = scene.estimate.graph or oracle.lower_graph(scene.sample.lower.newest, scene.here.moment)
        first, *others = graph.graphs if isinstance(graph, MeanGraph) else [graph]
        pull = self._pull(scene, first)
        v = torch.stack([pull, *(self._pull(scene, other) for other in others)]).mean(0) if others else pull
        solution = self._linear(scene.method).solve(graph.hessian, v, state)
        u = solution.z
        if not finite(u):
            u = torch.zeros_like(u)
        # what the solve left over; taken now, since the graph holds only until the first trial moves the parameters
        drift = first.hessian(u) - pull
        judge = oracle.upper(scene.sample.judging) if scene.sample.judged else scene.here
        slope = -dot(judge.grad_x, d) + dot(judge.grad_y, u)
        line = scene.line(judge.value, slope, lambda t: scene.y + t * u, scene.sample.judging, judge)
        return Ray(
            line,
            follow=lambda t: scene.y + t * u,
            trust=lambda t: self._trusted(scene, first, drift, norm(pull), u, t, state.get("checked")),
            state=solution.state,
            status=solution.status,
        )

    def keeps(self, y: Vector | None, method: HypergradientMethod) -> Fields:
        """What the linear solver keeps, and the last comparison of the prediction."""
        own = {"ratio": Number(0.0), "length": Number(0.0, above=True), "age": Number(0.0)}
        return self._linear(method).keeps(y).more(checked=Row(own))

    def _linear(self, method: HypergradientMethod) -> LinearSolver:
        return self.linear or method.solver or CG(tol=1e-3)

    def _pull(self, scene: Scene, graph: LowerGraph) -> Tensor:
        """g_yx d: how the lower gradient changes along the ray."""
        problem, d = scene.oracle.problem, scene.search
        if not self.exact and scene.alpha:
            t = DIFFERENCE * scene.alpha
            x = scene.x - t * d
            if problem.x.holds(x):
                with problem.x.lent(x):
                    there = scene.oracle.lower(graph.batch, replay=graph.moment)
                change = graph.grad - there.grad
                # a change at the level of rounding shows nothing; what the gradient is made of may be larger than itself
                if isfinite(there.value) and norm(change) > 1e3 * there.eps * (norm(graph.grad) + norm(there.grad)):
                    return graph.freed(change / t)  # what sits on a bound does not follow
        return graph.mixed_transposed(d)

    def _trusted(
        self,
        scene: Scene,
        graph: LowerGraph,
        drift: Tensor,
        change: float,
        u: Tensor,
        t: float,
        last: Tensor | None,
    ) -> tuple[float, State]:
        """The longest step, of those no longer than t, at which the prediction holds: a trust-region test."""
        oracle, y = scene.oracle, scene.oracle.problem.y
        length = norm(scene.search)
        if change == 0.0:  # y does not respond: nothing is predicted
            return t, {}
        if last is not None:
            ratio, reached, age = last.tolist()
            covered = t * length <= reached or ratio * t * length / reached <= TRUSTED * self.theta
            if covered and age < AGE:
                return t, {"checked": torch.tensor([ratio, reached, age + 1], dtype=torch.float64)}
        # a lower gradient at the level of its own rounding can't be compared with anything
        unseen = 8 * torch.finfo(y.dtype).eps * (norm(graph.grad) + t * change)
        for _ in range(20):
            x_t, y_t = scene.x - t * scene.search, scene.y + t * u
            far = float("inf")
            if oracle.problem.x.holds(x_t) and y.holds(y_t):
                oracle.problem.x.write_(x_t)
                there = oracle.lower(graph.batch, y_t, replay=graph.moment)
                far = norm(graph.freed(there.grad - graph.grad - t * drift))
            ratio = far / (t * change) if t * change > 0 else float("inf")
            if far <= max(self.theta * t * change, unseen):
                known = isfinite(ratio) and t * length > 0
                return t, {"checked": torch.tensor([ratio, t * length, 0.0], dtype=torch.float64)} if known else {}
            t *= max(0.1, 0.9 * self.theta / ratio) if isfinite(ratio) else 0.1
        return 0.0, {}
