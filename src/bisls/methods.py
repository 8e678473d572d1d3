"""BiSLS, BiSPS, Alternating: the paper's methods and baselines, as compositions."""

from __future__ import annotations

from bisls._check import require_argument
from bisls.directions.adam import Adam
from bisls.directions.base import Direction
from bisls.directions.denoised import Denoised
from bisls.directions.steepest import Steepest
from bisls.hypergrad.base import HypergradientMethod
from bisls.hypergrad.implicit import Implicit
from bisls.linear.base import LinearSolver
from bisls.linear.cg import CG
from bisls.linear.direct import Direct
from bisls.problem import Bilevel
from bisls.response.base import Response
from bisls.response.frozen import Frozen
from bisls.response.gradient_steps import GradientSteps
from bisls.response.resampled import Resampled
from bisls.response.tangent import Tangent
from bisls.solver import Solver
from bisls.steps.armijo import Armijo, Backtrack, Grow, Keep, Restart
from bisls.steps.base import StepRule
from bisls.steps.constant import Constant
from bisls.steps.curvature import Curvature
from bisls.steps.decay import Decay
from bisls.steps.envelope import Envelope
from bisls.steps.polyak import Polyak


class BiSLS(Solver):
    """Bi-level optimisation with no learning rates: the recommended default. Every part can be replaced.

    What it is made of, when nothing is set:

    - *lower steps*: one over the mean curvature along the gradients, measured now and then (`Curvature`);
    - *hypergradient*: implicit, by conjugate gradients to a relative residual of 1e-3 (damped where the lower problem is not
      convex, by a factorisation where it is small), with mixed products over as many of the lower batches as their
      spread asks for (`Implicit`, `CG`, `Direct`);
    - *direction*: Adam's scaling with as much momentum as the measured noise asks for, and a bound on the step that noise allows
      (`Denoised`);
    - *upper steps*: a line search along the tangent of the lower solution (`Tangent`, `Armijo`), judged on the previous upper
      batch or on ``step_batch``; the whole line where the data is one batch.

    Args:
        problem: The problem.
        direction: Turns the hypergradient into a direction.
        response: What y does along the upper ray.
        hypergrad: Estimates the hypergradient.
        upper_step: Chooses alpha.
        lower_step: Chooses beta.
        lower_iters: T, lower steps an iteration.
        lower_tol: End a lower loop where its gradient norm is at most this; None runs all T steps.
        lower_average: Use the running mean of the lower iterates as y where the lower data are batches.
        search_every: With noise, search in one iteration of so many.
        polish: Follows a lower loop that leaves y behind, where the lower data are one batch, by a Newton step.
        alpha: Where the first upper search begins; None finds it from the loss and its slope. The result hardly depends on it.
        beta: The same below.
        patience: How many iterations in a row may fail before `SolverError`.

    Examples:
        >>> import torch, bisls
        >>> x = torch.tensor([0.5], requires_grad=True)
        >>> y = torch.tensor([2.0, -1.0], requires_grad=True)
        >>> problem = bisls.Bilevel(
        ...     upper_loss=lambda batch: ((y - 3.0) ** 2).sum(),
        ...     lower_loss=lambda batch: ((y - x) ** 2).sum(),
        ...     upper_params=[x],
        ...     lower_params=[y],
        ... )
        >>> solver = bisls.BiSLS(problem)
        >>> for _ in range(20):
        ...     record = solver.step(upper_batch=None, lower_batches=None)
        >>> round(x.item(), 3)
        3.0
    """

    def __init__(
        self,
        problem: Bilevel,
        *,
        direction: Direction | None = None,
        response: Response | None = None,
        hypergrad: HypergradientMethod | None = None,
        upper_step: StepRule | None = None,
        lower_step: StepRule | None = None,
        lower_iters: int = 10,
        lower_tol: float | None = None,
        lower_average: bool = False,
        search_every: int = 2,
        polish: LinearSolver | None = Direct(CG(tol=1e-2, iters=50, damp=True)),  # noqa: B008 - frozen
        alpha: float | None = None,
        beta: float | None = None,
        patience: int = 20,
    ):
        super().__init__(
            problem,
            direction=direction or Denoised(b2=0.999),
            response=response or Tangent(),
            hypergrad=hypergrad or Implicit(Direct(CG(tol=1e-3, iters=50, damp=True, stretch=10)), spread=4.0),
            upper_step=upper_step or Armijo(start=alpha, sufficient=0.5, expand=True, uphill=1.0),
            lower_step=lower_step or Curvature(start=beta, trials=20, every=30, recent=0.05, watch=True),
            lower_iters=lower_iters,
            lower_tol=lower_tol,
            lower_average=lower_average,
            search_every=search_every,
            polish=polish,
            patience=patience,
        )

    @classmethod
    def paper(
        cls,
        problem: Bilevel,
        *,
        alpha: float = 10.0,
        beta: float = 100.0,
        direction: Direction | None = None,
        sufficient: float = 0.1,
        shrink: float = 0.9,
        restart: Restart | Keep | Grow | None = None,
        slack: float = 0.0,
        response_steps: int = 1,
        hypergrad: HypergradientMethod | None = None,
        lower_iters: int = 10,
        lower_tol: float | None = None,
        max_checks: int = 200,
    ) -> Solver:
        """The paper's Algorithm 1: BiSLS-Adam, or BiSLS-SGD with ``direction=Steepest()``.

        The upper test is equation 14, with one gradient step on g standing for y*(x) at each trial point. It may never hold, so
        it ends after ``max_checks``; the best trial is taken then, or none. Where the text slips (the last lower step, the sign
        and the correction of the momentum) it is read as its equations mean it.

        Args:
            problem: The problem.
            alpha: alpha_b0, where the first upper search begins (every one, with `Restart`).
            beta: beta_b0, the same below.
            direction: `Adam` as in the paper (search along A^-1 h, move along A^-1 m) by default.
            sufficient: p, the share of the linear decrease that is asked for, at both levels.
            shrink: w, the factor of a failed check.
            restart: Reset option 1 `Restart()`, 2 `Keep()`, 3 `Grow(eta)`, at both levels.
            slack: delta of the upper test.
            response_steps: Gradient steps on g at each upper trial point.
            hypergrad: Estimates the hypergradient; 10 steps of CG by default.
            lower_iters: T.
            lower_tol: End a lower loop early; not in the paper.
            max_checks: Most trials a search.
        """
        restart = restart or Grow(2.0)

        def rule(start: float, tolerance: float) -> Armijo:
            return Armijo(
                start=start,
                sufficient=sufficient,
                shrink=Backtrack(shrink),
                restart=restart,
                slack=tolerance,
                max_checks=max_checks,
                f_min=None,
            )

        return Solver(
            problem,
            direction=direction or Adam(search_momentum=False),
            response=GradientSteps(response_steps),
            hypergrad=hypergrad or Implicit(CG(iters=10)),
            upper_step=rule(alpha, slack),
            lower_step=rule(beta, 0.0),
            lower_iters=lower_iters,
            lower_tol=lower_tol,
        )


class BiSPS(Solver):
    """BiSPS: stochastic Polyak steps at both levels, inside envelopes that decay (the paper's equations 10 to 12).

    ``alpha_k = min{ max{ alpha_l0 / sqrt(k+1), (f - f_min) / (c ||h||^2) }, alpha_b0 / sqrt(k+1) }`` above, and SPS with the
    ceiling ``beta_b0 / (k+1)`` below.

    Args:
        problem: The problem.
        samples: 1, or 2 for f and ||h||^2 from an independent upper batch (``step_batch``, or the previous one).
        alpha: alpha_b0, the ceiling.
        alpha_floor: alpha_l0, the floor; None for none.
        beta: beta_b0, the lower ceiling.
        c: The paper's p, positive.
        upper_min: A lower bound of f on any batch.
        lower_min: A lower bound of g on any batch.
        direction: The hypergradient itself by default.
        hypergrad: Estimates the hypergradient.
        lower_step: Another rule below.
        lower_iters: T.
        lower_tol: End a lower loop early.
    """

    def __init__(
        self,
        problem: Bilevel,
        samples: int = 1,
        *,
        alpha: float = 1.0,
        alpha_floor: float | None = None,
        beta: float = 1.0,
        c: float = 1.0,
        upper_min: float = 0.0,
        lower_min: float = 0.0,
        direction: Direction | None = None,
        hypergrad: HypergradientMethod | None = None,
        lower_step: StepRule | None = None,
        lower_iters: int = 10,
        lower_tol: float | None = None,
    ):
        require_argument("BiSPS", "samples", samples, samples in (1, 2), "must be 1 or 2")
        super().__init__(
            problem,
            direction=direction or Steepest(),
            response=Resampled() if samples == 2 else Frozen(),
            hypergrad=hypergrad or Implicit(CG(tol=1e-3, iters=50)),
            upper_step=Envelope(
                Polyak(c=c, f_min=upper_min),
                floor=None if alpha_floor is None else Decay(alpha_floor),
                ceiling=Decay(alpha),
            ),
            lower_step=lower_step or Polyak(c=c, f_min=lower_min, max_step=Decay(beta, power=1.0)),
            lower_iters=lower_iters,
            lower_tol=lower_tol,
        )


class Alternating(Solver):
    """The usual way, for comparison: two learning rates, chosen by hand.

    Args:
        problem: The problem.
        upper_step: Constant(alpha) or Decay(alpha).
        lower_step: Constant(beta) or Decay(beta); schedules count outer iterations.
        direction: Adam as torch has it by default; `Steepest()` for SGD.
        hypergrad: Estimates the hypergradient.
        lower_iters: T.
        lower_tol: End a lower loop early.
    """

    def __init__(
        self,
        problem: Bilevel,
        *,
        upper_step: StepRule | None = None,
        lower_step: StepRule | None = None,
        direction: Direction | None = None,
        hypergrad: HypergradientMethod | None = None,
        lower_iters: int = 10,
        lower_tol: float | None = None,
    ):
        super().__init__(
            problem,
            direction=direction or Adam(search_momentum=False),
            response=Frozen(),
            hypergrad=hypergrad or Implicit(CG(tol=1e-3, iters=50)),
            upper_step=upper_step or Constant(1e-3),
            lower_step=lower_step or Constant(0.1),
            lower_iters=lower_iters,
            lower_tol=lower_tol,
        )
