"""BiSLS, BiSPS, Alternating: the paper's methods and baselines, as compositions."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

from torch.optim import Optimizer

from bisls._check import POSITIVE, settled, standing_for, whole_number
from bisls.directions.adam import Adam
from bisls.directions.base import Direction
from bisls.directions.denoised import Denoised
from bisls.directions.steepest import Steepest
from bisls.hypergrad.base import HypergradientMethod
from bisls.hypergrad.implicit import Implicit
from bisls.hypergrad.lookahead import Lookahead
from bisls.linear.base import LinearSolver
from bisls.linear.cg import CG
from bisls.linear.direct import Direct
from bisls.lower import Begun, CoordinateDescent, Held, Loop, LowerPart, Solved, Trained, UserOptimizer
from bisls.paced import Paced
from bisls.parts import Default, instead, part
from bisls.problem import Bilevel
from bisls.response.base import Response
from bisls.response.frozen import Frozen
from bisls.response.gradient_steps import GradientSteps
from bisls.response.rerun import Rerun
from bisls.response.resampled import Resampled
from bisls.response.tangent import Tangent
from bisls.smooth import Smooth
from bisls.solver import Solver
from bisls.steps.armijo import Armijo, Backtrack, Grow, Keep, Restart
from bisls.steps.base import StepRule
from bisls.steps.constant import Constant
from bisls.steps.curvature import Curvature
from bisls.steps.decay import Decay
from bisls.steps.envelope import Envelope
from bisls.steps.polyak import Polyak
from bisls.upper import Upper
from bisls.views import View

NEAR, FEW = (
    10,
    4,
)  # the T-step view looks through so many of the last lower steps: of a network, of a model that x is a part of
FLOOR = 0.3  # where a network is trained, its scaling counts as no smaller than so much of its mean: see `Lookahead`
POLISH = Direct(CG(tol=1e-2, iters=50, damp=True))


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
        lower_iters: T, lower steps an iteration; None: as many as there are batches in a list, 10 otherwise.
        lower_tol: End a lower loop where its gradient norm is at most this; None runs all T steps.
        lower_average: Use the running mean of the lower iterates as y where the lower data are batches.
        search_every: With noise, search in one iteration of so many.
        polish: Follows a lower loop that leaves y behind, where the lower data are one batch, by a Newton step.
        alpha: Where the first upper search begins; None finds it from the loss and its slope. The result hardly depends on it.
            Not with ``upper_step``.
        beta: The same below. Not with ``lower_step`` or ``lower_optimizer``.
        patience: How many iterations in a row may fail before `SolverError`.
        lower_direction: Turns lower gradients into directions, such as `Adam()`; the gradient itself by default.
        lower_optimizer: A torch optimiser of yours over the lower parameters, called as it is; then there is no ``lower_step``.

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
        lower_iters: int | None = None,
        lower_tol: float | None = None,
        lower_average: bool = False,
        search_every: int = 2,
        polish: LinearSolver | None = POLISH,
        alpha: float | None = None,
        beta: float | None = None,
        patience: int = 20,
        lower_direction: Direction | None = None,
        lower_optimizer: Optimizer | LowerPart | None = None,
    ):
        kinks = getattr(problem, "lower_l1", None) is not None
        if kinks and all(given is None for given in (lower_step, lower_direction, lower_optimizer)):
            lower_optimizer = CoordinateDescent()
        own = lower_step is None and lower_optimizer is None
        _one_of_two("BiSLS", alpha, beta, upper_step, lower_step, lower_optimizer)
        if lower_optimizer is not None and polish is POLISH:  # not asked for
            polish = None
        with standing_for("BiSLS", start="alpha"):
            search = Armijo(start=alpha, sufficient=0.5, expand=True, uphill=1.0)
        with standing_for("BiSLS", start="beta"):
            curved = Curvature(start=beta, trials=20, every=30, recent=0.05, watch=True)
        linear = Direct(CG(tol=1e-3, iters=50, damp=True, stretch=10))
        retraced = isinstance(response, Rerun)
        estimate = Lookahead(NEAR, floor=FLOOR) if retraced else Implicit(linear, spread=4.0)
        hypergrad = estimate if retraced and hypergrad is None else hypergrad
        looked = getattr(hypergrad, "following", None) is not None
        follow = Rerun() if looked or kinks else Tangent()  # the way to another sign is no tangent
        super().__init__(
            problem,
            direction=Denoised(b2=0.999) if direction is None else direction,
            response=follow if response is None else response,
            hypergrad=estimate if hypergrad is None else hypergrad,
            upper_step=search if upper_step is None else upper_step,
            lower_step=curved if own else lower_step,
            lower_iters=lower_iters,
            lower_tol=lower_tol,
            lower_average=lower_average,
            search_every=search_every,
            polish=polish,
            patience=patience,
            lower_direction=lower_direction,
            lower_optimizer=lower_optimizer,
        )
        trained = hypergrad is not None and self.hypergrad.following is not None  # the T-step view, asked for
        fixed = direction is not None or upper_step is not None or (response is not None and not trained)
        if fixed or (hypergrad is not None and not trained):
            return
        with standing_for("BiSLS", start="alpha"):
            paced = Paced(alpha)
        loop = replace(self.lower, polish=None) if isinstance(self.lower, Loop) else self.lower
        if kinks and isinstance(self.upper, Upper):
            self._offer(View(self.lower, self.hypergrad, Smooth(self.upper, POLISH)))
            return
        free = own and lower_direction is None and lower_tol is None and not lower_average
        again = problem.lower_start is not None
        with standing_for("BiSLS", start="beta"):
            own_steps = Begun(Held(beta)) if again else Trained(1.0 if beta is None else beta)
        train = own_steps if free else loop
        if trained or again:
            through = self.hypergrad if trained else Lookahead()
            others = (View(loop, through, paced),) if again and free else ()  # for a y that works against f
            self._offer(View(train, through, paced), *others)
        elif free or isinstance(self.lower, UserOptimizer):  # what is known can be looked through
            network, shared = Lookahead(NEAR, floor=FLOOR), Lookahead(FEW)
            implicit = View(self.lower, self.hypergrad, self.upper)
            if type(self.lower) is Loop and isinstance(self.upper, Upper):
                own_settings = {f.name: getattr(self.lower, f.name) for f in fields(self.lower)}
                implicit = View(Solved(**own_settings), self.hypergrad, Smooth(self.upper, POLISH))
            self._offer(implicit, View(train, network, paced), View(loop, shared, paced))

    @classmethod
    def paper(
        cls,
        problem: Bilevel,
        *,
        alpha: float = Default(10.0),
        beta: float = Default(100.0),
        direction: Direction | None = None,
        sufficient: float = 0.1,
        shrink: float = 0.9,
        restart: Restart | Keep | Grow | None = None,
        slack: float = 0.0,
        response_steps: int = 1,
        hypergrad: HypergradientMethod | None = None,
        lower_iters: int | None = None,
        lower_tol: float | None = None,
        max_checks: int = 200,
        lower_restart: Restart | Keep | Grow | None = None,
        upper_step: StepRule | None = None,
        lower_step: StepRule | None = None,
        lower_direction: Direction | None = None,
        lower_optimizer: Optimizer | LowerPart | None = None,
    ) -> Solver:
        """The paper's Algorithm 1: BiSLS-Adam, or BiSLS-SGD with ``direction=Steepest()``.

        The upper test is equation 14, with one gradient step on g standing for y*(x) at each trial point. It may never hold, so
        it ends after ``max_checks``; the best trial is taken then, or none. Where the text slips (the last lower step, the sign
        and the correction of the momentum) it is read as its equations mean it.

        Args:
            problem: The problem.
            alpha: alpha_b0, where the first upper search begins (every one, with `Restart`). Not with ``upper_step``.
            beta: beta_b0, the same below. Not with ``lower_step`` or ``lower_optimizer``.
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
            lower_restart: A reset option of its own below.
            upper_step: In place of the upper search, such as `Constant(alpha)` for a search below alone.
            lower_step: In place of the lower search.
            lower_direction: Turns lower gradients into directions; not in the paper.
            lower_optimizer: A torch optimiser of yours over the lower parameters; not in the paper.
        """
        call = "BiSLS.paper"
        most = settled(call, "max_checks", max_checks, whole_number(1))

        def rule(start: float, name: str, restart: Restart | Keep | Grow, tolerance: float) -> Armijo:
            if start is None:  # `Armijo` would find one, which is not in the paper
                start = settled(call, name, start, POSITIVE)
            with standing_for(call, factor="shrink"):
                shorten = Backtrack(shrink)
            with standing_for(call, start=name, restart="restart" if name == "alpha" else "lower_restart"):
                return Armijo(
                    start=start,
                    sufficient=sufficient,
                    shrink=shorten,
                    restart=restart,
                    slack=tolerance,
                    max_checks=most,
                    f_min=None,
                )

        own = lower_step is None and lower_optimizer is None
        _one_of_two(call, alpha, beta, upper_step, lower_step, lower_optimizer)
        instead(call, "lower_restart", lower_restart, "lower_step", lower_step)
        instead(call, "lower_restart", lower_restart, "lower_optimizer", lower_optimizer)
        restart = Grow(2.0) if restart is None else restart
        above = rule(alpha, "alpha", restart, slack)
        below = rule(beta, "beta", restart if lower_restart is None else lower_restart, 0.0)
        upper = above if upper_step is None else part(call, "upper_step", upper_step)
        with standing_for(call, n="response_steps"):
            steps = GradientSteps(response_steps)
        with standing_for(call, "Solver"):
            return Solver(
                problem,
                direction=Adam(search_momentum=False) if direction is None else direction,
                # a rule that makes no trials needs no y at them
                response=steps if upper.searches else Frozen(),
                hypergrad=Implicit(CG(iters=10)) if hypergrad is None else hypergrad,
                upper_step=upper,
                lower_step=below if own else lower_step,
                lower_iters=lower_iters,
                lower_tol=lower_tol,
                lower_direction=lower_direction,
                lower_optimizer=lower_optimizer,
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
        beta: beta_b0, the lower ceiling; not with ``lower_step`` or ``lower_optimizer``, nor is ``lower_min``.
        c: The paper's p, positive.
        upper_min: A lower bound of f on any batch.
        lower_min: A lower bound of g on any batch.
        direction: The hypergradient itself by default.
        hypergrad: Estimates the hypergradient.
        lower_step: Another rule below.
        lower_iters: T.
        lower_tol: End a lower loop early.
        lower_direction: Turns lower gradients into directions, such as `Adam()`; the gradient itself by default.
        lower_optimizer: A torch optimiser of yours over the lower parameters, in place of ``lower_step``.
    """

    def __init__(
        self,
        problem: Bilevel,
        samples: int = 1,
        *,
        alpha: float = 1.0,
        alpha_floor: float | None = None,
        beta: float = Default(1.0),
        c: float = 1.0,
        upper_min: float = 0.0,
        lower_min: float = Default(0.0),
        direction: Direction | None = None,
        hypergrad: HypergradientMethod | None = None,
        lower_step: StepRule | None = None,
        lower_iters: int | None = None,
        lower_tol: float | None = None,
        lower_direction: Direction | None = None,
        lower_optimizer: Optimizer | LowerPart | None = None,
    ):
        samples = settled("BiSPS", "samples", samples, whole_number(1, "must be 1 or 2", most=2))
        own = lower_step is None and lower_optimizer is None
        for name, value in (("beta", beta), ("lower_min", lower_min)):
            instead("BiSPS", name, value, "lower_step", lower_step)
            instead("BiSPS", name, value, "lower_optimizer", lower_optimizer)
        with standing_for("BiSPS", step="alpha", f_min="upper_min"):
            polyak, ceiling = Polyak(c=c, f_min=upper_min), Decay(alpha)
        with standing_for("BiSPS", step="alpha_floor"):
            floor = None if alpha_floor is None else Decay(alpha_floor)
        with standing_for("BiSPS", step="beta", f_min="lower_min"):
            below = Polyak(c=c, f_min=lower_min, max_step=Decay(beta, power=1.0))
        super().__init__(
            problem,
            direction=Steepest() if direction is None else direction,
            response=Resampled() if samples == 2 else Frozen(),
            hypergrad=Implicit(CG(tol=1e-3, iters=50)) if hypergrad is None else hypergrad,
            upper_step=Envelope(polyak, floor=floor, ceiling=ceiling),
            lower_step=below if own else lower_step,
            lower_iters=lower_iters,
            lower_tol=lower_tol,
            lower_direction=lower_direction,
            lower_optimizer=lower_optimizer,
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
        lower_direction: Turns lower gradients into directions, such as `Adam()`; the gradient itself by default.
        lower_optimizer: A torch optimiser of yours over the lower parameters, in place of ``lower_step``.
    """

    def __init__(
        self,
        problem: Bilevel,
        *,
        upper_step: StepRule | None = None,
        lower_step: StepRule | None = None,
        direction: Direction | None = None,
        hypergrad: HypergradientMethod | None = None,
        lower_iters: int | None = None,
        lower_tol: float | None = None,
        lower_direction: Direction | None = None,
        lower_optimizer: Optimizer | LowerPart | None = None,
    ):
        super().__init__(
            problem,
            direction=Adam(search_momentum=False) if direction is None else direction,
            response=Frozen(),
            hypergrad=Implicit(CG(tol=1e-3, iters=50)) if hypergrad is None else hypergrad,
            upper_step=Constant(1e-3) if upper_step is None else upper_step,
            lower_step=Constant(0.1) if lower_step is None and lower_optimizer is None else lower_step,
            lower_iters=lower_iters,
            lower_tol=lower_tol,
            lower_direction=lower_direction,
            lower_optimizer=lower_optimizer,
        )


def _one_of_two(call: str, alpha: Any, beta: Any, upper_step: Any, lower_step: Any, lower_optimizer: Any) -> None:
    """Refuse a first step beside the rule, or the optimiser, that would not look at it."""
    instead(call, "alpha", alpha, "upper_step", upper_step)
    instead(call, "beta", beta, "lower_step", lower_step)
    instead(call, "beta", beta, "lower_optimizer", lower_optimizer)
