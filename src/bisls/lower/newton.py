"""The lower problem solved tightly: Newton's method by conjugate gradients, for checks rather than for training."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import inf

from torch import Tensor

from bisls._check import require, whole
from bisls.batches import Minibatches
from bisls.derivatives import Following
from bisls.directions.lbfgs import LBFGS
from bisls.linear.base import LinearSolver
from bisls.linear.cg import CG
from bisls.lower.base import Lowered, LowerPart, State, lower_line, moved
from bisls.oracle import Oracle
from bisls.states import Fields
from bisls.status import Status
from bisls.steps.armijo import Armijo
from bisls.steps.base import Memory
from bisls.still import Moment
from bisls.vector import Vector, dot, norm

STALLED = 3  # so many iterations in a row that do not shrink the gradient end the solve


@dataclass(frozen=True)
class Newton(LowerPart):
    """Minimise g over y on one batch as far as its precision allows, by Newton's method with a search.

    Where the Hessian is not positive definite a quasi-Newton direction stands in. It ends at the smallest gradient seen.

    Args:
        iters: Most iterations, at least 1.
        linear: Solves for the Newton step; None takes conjugate gradients with as many iterations as there are unknowns, 500 at
            most.
        tol: The norm of the gradient at which it ends, at least 0; 0 goes on as far as the precision allows.
    """

    iters: int = 500
    linear: LinearSolver | None = None
    search: Armijo = field(default_factory=lambda: Armijo(start=1.0, f_min=None))
    tol: float = 0.0

    def __post_init__(self) -> None:
        require(self, "iters", whole(self.iters, 1), "must be a whole number, at least 1")
        require(self, "tol", 0 <= self.tol < inf, "must be a number of at least 0")

    def descend(
        self,
        oracle: Oracle,
        batches: Minibatches,
        y: Tensor,
        k: int,
        state: State,
        *,
        trace: Following | bool = False,
        replay: Moment | None = None,
    ) -> Lowered:
        """Solve on the newest batch. There is no trace: the end does not depend on the way."""
        vector, batch = oracle.problem.y, batches.newest
        linear = self.linear or CG(iters=max(50, min(vector.numel, 500)), tol=1e-3)
        best, smallest, stalled, steps, checks, size = y, inf, 0, 0, 0, 0.0
        quasi: State = {}
        vector.write_(y)
        for _ in range(self.iters):
            graph = oracle.lower_graph(batch, replay)
            grad = graph.freed(graph.grad)
            length = norm(grad)
            if not length < inf:
                break
            best, smallest, stalled = (y, length, 0) if length < smallest else (best, smallest, stalled + 1)
            if length <= self.tol or stalled >= STALLED:
                break
            solution = linear.solve(graph.hessian, grad, {})
            d = solution.z
            if solution.status is Status.NEGATIVE_CURVATURE or dot(d, grad) <= 0:
                heading = LBFGS().head(grad, y, quasi)
                d, quasi = heading.search, heading.state
            here = y
            line = lower_line(oracle, graph, batch, -dot(grad, d), lambda t, y=here, d=d: moved(oracle, y, d, t), None)
            step = self.search.choose(line, Memory())
            steps, checks = steps + 1, checks + step.checks
            # where values can't tell any more, a full Newton step still shrinks the gradient: the gradient judges it above
            size = step.size if step.size > 0 else 1.0
            y = moved(oracle, y, d, size)
            vector.write_(y)
        vector.write_(best)
        return Lowered(best, size, steps, checks, Status.OK if smallest < inf else Status.NON_FINITE, {}, size)

    def keeps(self, y: Vector | None) -> Fields:
        """Nothing."""
        return Fields()
