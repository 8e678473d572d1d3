"""check_hypergradient: is the hypergradient of my own problem right? A test that anyone can run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bisls.directions.base import State
from bisls.directions.lbfgs import LBFGS
from bisls.hypergrad.base import HypergradientMethod
from bisls.line import Line
from bisls.linear.cg import CG
from bisls.oracle import LowerGraph, Oracle
from bisls.problem import Bilevel
from bisls.record import Status
from bisls.steps.armijo import Armijo
from bisls.steps.base import Memory
from bisls.vector import dot, norm


@dataclass(frozen=True)
class HypergradientReport:
    """What `check_hypergradient` found. Print it.

    Attributes:
        passed: Whether the estimate agrees with finite differences of F.
        relative_error: The largest |<h, d> - D_d F| over the directions tried, relative to ||h|| ||d||, D_d F by differences.
        noise: The error that the finite differences themselves may have, in the same units.
        rate: Observed order of the Taylor remainder |F(x + e d) - F(x) - e <h, d>|: 2 where h is right, 1 where it is not;
            NaN where rounding hides it.
        hypergrad_norm: ||h||.
        residual: Relative residual of the linear solve behind h.
        lower_grad_norm: ||grad_y g|| after the lower problem was solved, as a share of what it was at the start.
        status: How the linear solve ended.
        rows: For each step e: the largest relative error and the remainder, for reading.
    """

    passed: bool
    relative_error: float
    noise: float
    rate: float
    hypergrad_norm: float
    residual: float
    lower_grad_norm: float
    lower_shrunk: float
    status: Status
    tolerance: float
    rows: tuple[tuple[float, float, float], ...]

    def __str__(self) -> str:
        lines = [
            f"hypergradient check: {'passed' if self.passed else 'FAILED'}",
            f"  error against finite differences  {self.relative_error:.1e}  (tolerance {self.tolerance:.0e})",
            f"  noise of the differences          {self.noise:.1e}",
            f"  order of the Taylor remainder     {self.rate:.2f}  (2 where the hypergradient is right)",
            f"  norm of the hypergradient         {self.hypergrad_norm:.3e}",
            f"  residual of the linear solve      {self.residual:.1e}  ({self.status.name})",
            f"  norm of the lower gradient        {self.lower_grad_norm:.1e}  ({self.lower_shrunk:.0e} of its start)",
            "        step       error   remainder",
        ]
        lines += [f"    {step:8.1e}    {error:8.1e}    {remainder:8.1e}" for step, error, remainder in self.rows]
        if not self.passed:
            lines.append(f"  {self._advice()}")
        return "\n".join(lines)

    def _advice(self) -> str:
        if self.status is not Status.OK:
            return f"advice: {self.status.advice}"
        if self.hypergrad_norm == 0.0:
            return "advice: the estimate is zero; does the lower loss depend on the upper parameters?"
        if self.noise > self.tolerance:
            return (
                "advice: the lower problem could not be solved, or the losses not be evaluated, precisely enough to "
                "tell; use float64, or regularise the lower loss"
            )
        return "advice: the method does not give the gradient of F here; try Implicit(CG()) for comparison"


def check_hypergradient(
    problem: Bilevel,
    upper_batch: Any,
    lower_batch: Any,
    method: HypergradientMethod,
    *,
    directions: int = 3,
    tolerance: float | None = None,
    lower_iters: int = 500,
) -> HypergradientReport:
    """Test a hypergradient against finite differences of ``F(x) = f(x, y*(x))``, the lower problem solved tightly.

    F is evaluated at x +- e d for random directions d, the estimate's own among them, and steps e over several orders; at
    every point the lower problem is solved again as far as its precision allows. Parameters, buffers and random state
    are back where they were at the end.

    Args:
        problem: The problem.
        upper_batch: A batch for the upper loss.
        lower_batch: One batch for the lower loss (it must be the same at every evaluation, so no iterator).
        method: The hypergradient to test.
        directions: Number of directions, at least 1.
        tolerance: Relative error that passes; None takes 1e-5 in double, 2e-2 in single precision.
        lower_iters: Most iterations of each lower solve.

    Returns:
        A report that prints well.

    Examples:
        >>> import torch, bisls
        >>> x = torch.tensor([0.5, 1.5], dtype=torch.float64, requires_grad=True)
        >>> y = torch.zeros(2, dtype=torch.float64, requires_grad=True)
        >>> problem = bisls.Bilevel(
        ...     lambda _: (y[0] - 3.0) ** 2 + y[1] ** 3, lambda _: ((y - x * x) ** 2).sum() + y[0] * y[1], [x], [y]
        ... )
        >>> bisls.check_hypergradient(problem, None, None, bisls.Implicit(bisls.CG())).passed
        True
        >>> bisls.check_hypergradient(problem, None, None, bisls.Implicit(bisls.Identity())).passed
        False
    """
    if directions < 1:
        raise ValueError(f"`check_hypergradient(directions={directions})`: directions must be at least 1")
    oracle = Oracle(problem)
    precision = torch.finfo(torch.promote_types(problem.x.dtype, problem.y.dtype)).eps
    tolerance = tolerance if tolerance is not None else (1e-5 if precision < 1e-10 else 2e-2)
    x0, y0 = problem.x.read(), problem.y.read()
    with problem.probing():
        replay = problem.moment()

        def solved(x: Tensor, y: Tensor) -> tuple[float, Tensor, float]:
            """F(x), y*(x) and what is left of the lower gradient, from a guess of y."""
            problem.x.write_(x)
            problem.y.write_(y)
            left = _solve_lower(oracle, lower_batch, lower_iters)
            return oracle.upper_value(upper_batch, replay), problem.y.read(), left

        try:
            first = norm(oracle.lower(lower_batch).grad)
            value, y_star, left = solved(x0, y0)
            replay.restore()
            hg = method.estimate(oracle, upper_batch, lower_batch, {})
            h, size = hg.flat, norm(hg.flat)
            generator = torch.Generator(device=x0.device).manual_seed(0)
            rays = [h / size] if size > 0 else []
            while len(rays) < directions:
                ray = torch.randn(x0.shape, generator=generator, dtype=x0.dtype, device=x0.device)
                rays.append(ray / norm(ray))
            rows, noise, remainders = _differences(
                rays, h, size, value, x0, y_star, precision, lambda x: solved(x, y_star)[0]
            )
        finally:
            problem.x.write_(x0)
            problem.y.write_(y0)
    error = min(row[1] for row in rows)
    finite = error < float("inf") and size < float("inf")
    return HypergradientReport(
        passed=finite and size > 0 and error <= tolerance,
        relative_error=error,
        noise=noise,
        rate=_rate(rows, remainders),
        hypergrad_norm=size,
        residual=hg.residual,
        lower_grad_norm=left,
        lower_shrunk=left / first if first > 0 else 0.0,
        status=hg.status,
        tolerance=tolerance,
        rows=tuple(rows),
    )


def _differences(
    rays: list[Tensor],
    h: Tensor,
    size: float,
    value: float,
    x: Tensor,
    y: Tensor,
    precision: float,
    at: Callable[[Tensor], float],
) -> tuple[list[tuple[float, float, float]], float, list[float]]:
    """Central differences and Taylor remainders over steps from coarse to fine; the finer end is where rounding takes over."""
    scale = max(norm(x) / len(x) ** 0.5, 1.0)
    steps = [scale * precision**power for power in (1 / 8, 1 / 6, 1 / 5, 1 / 4, 1 / 3)]
    slopes = [dot(h, ray) for ray in rays]
    truth: list[float] = []
    rows, remainders, noise = [], [], float("inf")
    for step in steps:
        worst, remainder, measured = 0.0, 0.0, []
        for ray, slope in zip(rays, slopes, strict=True):
            ahead, behind = at(x + step * ray), at(x - step * ray)
            measured.append((ahead - behind) / (2 * step))
            worst = max(worst, abs(measured[-1] - slope)) if measured[-1] == measured[-1] else float("inf")
            remainder = max(remainder, abs(ahead - value - step * slope))
        # relative to the larger of the two norms, so that neither a zero estimate nor a zero truth can pass for agreement
        largest = max([size, *(abs(m) for m in measured)])
        rows.append((step, worst / largest if largest > 0 else float("inf"), remainder))
        remainders.append(remainder)
        if truth:
            change = max(abs(a - b) for a, b in zip(truth, measured, strict=True))
            noise = min(noise, change / largest if largest > 0 else float("inf"))
        truth = measured
    return rows, noise, remainders


def _rate(rows: list[tuple[float, float, float]], remainders: list[float]) -> float:
    """The slope of log remainder over log step between the two coarsest steps."""
    if min(remainders[0], remainders[1]) <= 0 or not max(remainders[:2]) < float("inf"):
        return float("nan")
    ratio = torch.tensor([remainders[0] / remainders[1], rows[0][0] / rows[1][0]], dtype=torch.float64).log()
    return (ratio[0] / ratio[1]).item()


def _solve_lower(oracle: Oracle, batch: Any, iters: int) -> float:
    """Minimise g over y from the present y as far as its precision allows; the norm of the gradient that is left."""
    vector = oracle.problem.y
    newton, quasi, rule = CG(iters=max(50, min(vector.numel, 500)), tol=1e-3), LBFGS(), Armijo(start=1.0, f_min=None)
    state: State = {}
    y = vector.read()
    best, smallest, stalled = y.clone(), float("inf"), 0
    for _ in range(iters):
        graph = oracle.lower_graph(batch)
        size = norm(graph.grad)
        if not size < float("inf"):
            break
        if size < smallest:
            best, smallest, stalled = y.clone(), size, 0
        else:
            stalled += 1
        if size == 0.0 or stalled >= 3:
            break
        solution = newton.solve(graph.hessian, graph.grad, {})
        d = solution.z
        if solution.status is Status.NEGATIVE_CURVATURE or dot(d, graph.grad) <= 0:
            heading = quasi.head(graph.grad, y, state)
            d, state = heading.search, heading.state

        def at(t: float, y: Tensor = y, d: Tensor = d, graph: LowerGraph = graph) -> float:
            vector.write_(y - t * d)
            return oracle.lower_value(batch, graph.moment)

        line = Line(graph.value, -dot(graph.grad, d), at, eps=graph.eps)
        step = rule.choose(line, Memory())
        # where values can't tell any more, a full Newton step still shrinks the gradient: the gradient judges it above
        y = y - (step.size if step.size > 0 else 1.0) * d
        vector.write_(y)
    vector.write_(best)
    return smallest
