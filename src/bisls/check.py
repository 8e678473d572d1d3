"""check_hypergradient: is the hypergradient of my own problem right? A test that anyone can run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import log
from typing import Any

import torch
from torch import Tensor

from bisls._check import number, optional, settled, whole_number
from bisls.agreement import agree_on_parameters
from bisls.batches import Minibatches
from bisls.hypergrad.base import HypergradientMethod, must_estimate, must_solve_kinks
from bisls.lower import CoordinateDescent, LowerPart, Newton
from bisls.lower.base import freed
from bisls.oracle import Oracle
from bisls.problem import Bilevel, must_be_problem
from bisls.ranks import together
from bisls.status import Status
from bisls.vector import dot, norm

MOST_RAYS = 1_000_000  # each takes twelve lower solves


@dataclass(frozen=True)
class HypergradientReport:
    """What `check_hypergradient` found. Print it.

    Attributes:
        passed: Whether the estimate agrees with finite differences of F.
        relative_error: The larger of two errors, each at its best step: along the estimate itself, ``|<h, d> - D_d F|``
            relative to the larger of the two; and over random rays through all coordinates, in the same way as norms over
            the rays. The second sees components that the estimate lacks.
        noise: By how much the differences themselves change from step to step, in the same units.
        rate: Observed order of the Taylor remainder ``|F(x + e d) - F(x) - e <h, d>|``: 2 where h is right, 1 where it is
            not; NaN where rounding hides it.
        hypergrad_norm: ``||h||``.
        residual: Relative residual of the linear solve behind h.
        lower_grad_norm: ``||grad_y g||`` after the lower problem was solved.
        lower_shrunk: The same as a share of what it was at the start.
        status: How the linear solve ended.
        tolerance: The relative error that passes.
        rows: For each step: the step, the error along h, the error over random rays, the Taylor remainder.
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
    rows: tuple[tuple[float, float, float, float], ...]

    def __str__(self) -> str:
        lines = [
            f"hypergradient check: {'passed' if self.passed else 'FAILED'}",
            f"  error against finite differences  {self.relative_error:.1e}  (tolerance {self.tolerance:.0e})",
            f"  noise of the differences          {self.noise:.1e}",
            f"  order of the Taylor remainder     {self.rate:.2f}  (2 where the hypergradient is right)",
            f"  norm of the hypergradient         {self.hypergrad_norm:.3e}",
            f"  residual of the linear solve      {self.residual:.1e}  ({self.status.name})",
            f"  norm of the lower gradient        {self.lower_grad_norm:.1e}  ({self.lower_shrunk:.0e} of its start)",
            "        step   along h   random rays   remainder",
        ]
        lines += [f"    {step:8.1e}  {own:8.1e}      {rays:8.1e}    {left:8.1e}" for step, own, rays, left in self.rows]
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


@together
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

    F is evaluated at x +- e d along the estimate itself and along random rays that touch every coordinate, for steps e over
    several orders; at every point the lower problem is solved again as far as its precision allows, on the same batch and with
    the same dropout masks. Parameters, buffers and random state are back where they were at the end.

    Args:
        problem: The problem.
        upper_batch: A batch for the upper loss.
        lower_batch: One batch for the lower loss (it must be the same at every evaluation, so no iterator).
        method: The hypergradient to test.
        directions: Number of random rays, from 1 to a million.
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
    call = "check_hypergradient"
    must_be_problem(call, problem)
    agree_on_parameters(f"{call}(...)", problem.levels)
    directions = settled(call, "directions", directions, whole_number(1, most=MOST_RAYS))
    lower_iters = settled(call, "lower_iters", lower_iters, whole_number(1))
    tolerance = settled(call, "tolerance", tolerance, optional(number("(0, inf)", "must be positive and finite")))
    method = must_estimate(call, method)
    must_solve_kinks(call, "method", method, problem)
    part: LowerPart = Newton(lower_iters)
    if problem.lower_l1 is not None:
        part = CoordinateDescent(lower_iters, tol=0.0)
    oracle = Oracle(problem)
    precision = torch.finfo(torch.promote_types(problem.x.dtype, problem.y.dtype)).eps
    tolerance = tolerance if tolerance is not None else (1e-5 if precision < 1e-10 else 2e-2)
    x0, y0 = problem.x.read(), problem.y.read()
    with problem.probing():
        replay = problem.moment()
        oracle.upper(upper_batch)
        masks = problem.moment()  # what the lower loss draws when a method calls it after the upper one

        def solved(x: Tensor, y: Tensor) -> tuple[float, Tensor, float]:
            """F(x), y*(x) and what is left of the lower gradient, from a guess of y."""
            problem.x.write_(x)
            lowered = part.descend(oracle, Minibatches([lower_batch]), y, 0, {}, replay=masks)
            left = norm(freed(oracle, oracle.lower(lower_batch, lowered.y, masks).grad, lowered.y))
            return oracle.upper_value(upper_batch, replay), lowered.y, left

        try:
            graph = oracle.lower_graph(lower_batch, masks)
            first = norm(graph.freed(graph.grad))
            value, y_star, left = solved(x0, y0)
            replay.restore()
            hg = method.estimate(oracle, upper_batch, lower_batch, {})
            size = norm(hg.flat)
            generator = torch.Generator(device="cpu").manual_seed(0)
            signs = [torch.randint(0, 2, x0.shape, generator=generator).to(x0) * 2 - 1 for _ in range(directions)]
            rays = [hg.flat / size if 0 < size < float("inf") else signs[0], *signs]
            rows, noise = _differences(rays, hg.flat, value, x0, precision, lambda x: solved(x, y_star)[0])
        finally:
            problem.x.write_(x0)
            problem.y.write_(y0)
    error = max(min(row[1] for row in rows), min(row[2] for row in rows))
    return HypergradientReport(
        passed=0 < size < float("inf") and error <= tolerance,
        relative_error=error,
        noise=noise,
        rate=_rate(rows),
        hypergrad_norm=size,
        residual=hg.residual,
        lower_grad_norm=left,
        lower_shrunk=left / first if first > 0 else 0.0,
        status=hg.status,
        tolerance=tolerance,
        rows=tuple(rows),
    )


def _differences(
    rays: list[Tensor], h: Tensor, value: float, x: Tensor, precision: float, at: Callable[[Tensor], float]
) -> tuple[list[tuple[float, float, float, float]], float]:
    """Central differences and Taylor remainders over steps from coarse to fine; at the finer end rounding takes over."""
    scale = max(norm(x) / len(x) ** 0.5, 1.0)
    promised = torch.tensor([dot(h, ray) for ray in rays], dtype=torch.float64)
    rows: list[tuple[float, float, float, float]] = []
    before: Tensor | None = None
    noise = float("inf")
    for power in (1 / 8, 1 / 6, 1 / 5, 1 / 4, 1 / 3, 1 / 2):
        step = scale * precision**power
        pairs = [(at(x + step * ray), at(x - step * ray)) for ray in rays]
        ahead, behind = torch.tensor(pairs, dtype=torch.float64).T
        measured = (ahead - behind) / (2 * step)
        own, random = (_error(promised[part], measured[part]) for part in (slice(0, 1), slice(1, None)))
        remainder = (ahead[0] - value - step * promised[0]).abs().item()
        rows.append((step, own, random, remainder))
        if before is not None:
            noise = min(noise, max(_error(before[part], measured[part]) for part in (slice(0, 1), slice(1, None))))
        before = measured
    return rows, noise


def _error(promised: Tensor, measured: Tensor) -> float:
    """||promised - measured|| relative to the larger of the two, so that neither a zero estimate nor a zero truth can pass."""
    largest = max(norm(promised), norm(measured))
    error = norm(promised - measured) / largest if 0 < largest < float("inf") else float("inf")
    return error if error == error else float("inf")


def _rate(rows: list[tuple[float, float, float, float]]) -> float:
    """The slope of log remainder over log step between the two coarsest steps."""
    (coarse, *_, above), (fine, *_, below) = rows[:2]
    if not 0 < min(above, below) <= max(above, below) < float("inf"):
        return float("nan")
    return log(above / below) / log(coarse / fine)
