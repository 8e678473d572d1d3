"""BiSLS, BiSPS, Alternating: the paper's methods and baselines, as compositions."""

from __future__ import annotations

from bisls._check import require_argument
from bisls.directions.adam import Adam
from bisls.directions.base import Direction
from bisls.directions.denoised import Denoised
from bisls.directions.steepest import Steepest
from bisls.hypergrad.base import HypergradientMethod
from bisls.hypergrad.implicit import Implicit
from bisls.linear.cg import CG
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
    """Bi-level optimisation with no learning rates: the recommended default. Every part can be replaced."""

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
        alpha: float | None = None,
        beta: float | None = None,
        patience: int = 20,
    ):
        super().__init__(
            problem,
            direction=direction or Denoised(b2=0.999),
            response=response or Tangent(),
            hypergrad=hypergrad or Implicit(CG(tol=1e-3, iters=50), spread=4.0),
            upper_step=upper_step or Armijo(start=alpha, sufficient=0.5, expand=True, uphill=1.0),
            lower_step=lower_step or Curvature(start=beta, trials=20, every=30, recent=0.05, watch=True),
            lower_iters=lower_iters,
            lower_tol=lower_tol,
            lower_average=lower_average,
            search_every=search_every,
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
        """The paper's Algorithm 1 to the letter: BiSLS-Adam, or BiSLS-SGD with ``direction=Steepest()``."""
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
    """Stochastic Polyak steps at both levels."""

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
    """The usual way: two learning rates, chosen by hand."""

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
