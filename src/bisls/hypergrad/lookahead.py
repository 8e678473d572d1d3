"""Differentiation through the lower steps that were really taken."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import nan
from typing import Any

from torch import Tensor

from bisls._check import FLAG, number, optional, settle, whole_number
from bisls.derivatives import Adjoint, Following
from bisls.hypergrad.base import Hypergradient, HypergradientMethod, estimated
from bisls.linear.base import State
from bisls.lower import Began, Effect, Lowered, TraceStep
from bisls.oracle import Oracle, UpperPoint
from bisls.states import Fields
from bisls.status import Status, worst
from bisls.vector import Vector, finite, norm


@dataclass(frozen=True)
class Lookahead(HypergradientMethod):
    """The gradient of the T-step objective ``x -> f(x, y_T(x))``, through the lower steps that this iteration has taken.

    ``l_T = grad_y f(x, y_T)``, ``h = grad_x f(x, y_T)``; then back over the steps, D_t the derivative of step t by its gradient,

        v = D_t l_(t+1),   h <- h - g_xy(x, y_t) v,   l_t = l_(t+1) - g_yy(x, y_t) v,

    on the batch of each step and with its random numbers. Where y began at ``lower_start``, what is left of l goes through that
    function as well. It belongs to problems whose lower level is *trained*, not solved: a network, a few steps from a common
    start (meta-learning). Where the lower problem is solved, `Implicit` looks further than T steps do.

    A step back costs one lower graph, one Hessian product and one mixed product, in one pass; one graph is alive at a time, so
    that memory is T copies of y (two for each step where the steps are scaled, as Adam's are).

    The lower steps may be those of a loop, of torch's SGD (momentum, Nesterov), Adam, AdamW or RMSprop, whose formulas are known,
    or of another optimiser whose coordinates do not mix: it is tried on copies. Step sizes, and decays, count as given.

    Args:
        steps: How many of the last steps to look through, at least 1; None: all of them. 1 costs one mixed product.
        momentum: Follow what gradients leave in a momentum. Otherwise that is held still.
        squares: Follow what they leave in Adam's mean of squares, too. It may be huge or negative where a gradient is far above
            those before it.
        floor: Adam's scaling counts as no smaller than so much of its mean over each tensor, in the square; at least 0. Where
            gradients have hardly ever been seen a step is scaled up by far more than a derivative can be trusted, and products of
            such steps explode. 0 is exact.

    Examples:
        >>> import torch, bisls
        >>> x = torch.tensor([2.0], requires_grad=True)
        >>> y = torch.tensor([0.0], requires_grad=True)
        >>> problem = bisls.Bilevel(lambda _: ((y - 1) ** 2).sum(), lambda _: ((y - x) ** 2 / 2).sum(), [x], [y])
        >>> rules = {"lower_step": bisls.Constant(0.5), "upper_step": bisls.Constant(0.1), "direction": bisls.Steepest()}
        >>> solver = bisls.Alternating(problem, hypergrad=bisls.Lookahead(), lower_iters=2, **rules)
        >>> record = solver.step(None, None)  # y_2 = 3/4 x, so h = 2 (3/4 x - 1) 3/4
        >>> record.view, record.hypergrad_norm
        ('t-step', 0.75)
    """

    steps: int | None = None
    momentum: bool = True
    squares: bool = False
    floor: float = 0.0

    def __post_init__(self) -> None:
        settle(self, steps=optional(whole_number(1)), momentum=FLAG, squares=FLAG, floor=number("[0, inf)"))

    @property
    def following(self) -> Following:
        """What of the lower state it differentiates: it looks through the steps."""
        return Following(self.momentum, self.squares, self.floor, self.steps)

    def estimate(self, oracle: Oracle, upper_batch: Any, lower_batch: Any, state: State) -> Hypergradient:
        """There is none without lower steps."""
        raise ValueError(
            "`Lookahead()` looks through the lower steps of an iteration, and here there are none: a solver "
            "(Solver, BiSLS, Alternating) hands them over; for steps that it takes itself from the present y, use Unrolled(iters)"
        )

    def look_back(self, oracle: Oracle, upper_batch: Any, lowered: Lowered, state: State) -> Hypergradient:
        """The hypergradient at the present x and the y that the steps led to."""
        y, (owed, spare) = oracle.problem.y, oracle.rooms("work", 2)
        upper = oracle.upper(upper_batch, owed)
        trace = lowered.trace if self.steps is None else lowered.trace[-self.steps :]
        whole = len(trace) == len(lowered.trace)
        try:
            began = lowered.began if whole else None
            flat, effect = through(oracle, trace, upper, self.following, began, lowered.learns, spare)
        finally:
            y.write_(lowered.y)
        status = Status.OK if finite(flat) else worst(lowered.status, Status.NON_FINITE)
        upper = replace(upper, grad_y=upper.grad_y.new_empty(0))  # what there was has been used up
        found = estimated(oracle, upper, flat, status=status, state={}, lower_grad_norm=lowered.left)
        return replace(found, effect=effect)

    def keeps(self, y: Vector | None) -> Fields:
        """Nothing."""
        return Fields()


def through(
    oracle: Oracle,
    trace: Sequence[TraceStep],
    upper: UpperPoint,
    following: Following | None = None,
    began: Began | None = None,
    sloped: bool = False,
    spare: Tensor | None = None,
) -> tuple[Tensor, Effect]:
    """The gradient of f through lower steps that were taken, going back over them.

    Beside it, where that is wanted, what the steps do to f.

    The random numbers of every step are drawn again, and y is left at the first point.

    Args:
        oracle: Evaluates the lower loss.
        trace: The steps.
        upper: f and its gradients where they ended; that in y is given away, and written over.
        following: What of the state of the steps is differentiated.
        began: How they began, where y may have begun at a function of x.
        sloped: Whether anybody wants to know what the steps do.
        spare: Memory like y that nobody needs.
    """
    following = following or Following()
    flat, owed, slope = upper.grad_x.clone(), Adjoint(upper.grad_y, spare=spare), 0.0
    started = began is not None and began.y is None
    ended, growth = norm(upper.grad_y) if sloped and started else 0.0, nan
    for i in range(len(trace) - 1, -1, -1):
        taken = trace[i]
        if taken.derivative is None:
            raise ValueError(
                "the lower steps cannot be differentiated: their direction is not linear in the gradient (LBFGS, a part of "
                "your own without a derivative), or they look at the signs of gradients alone (Lion, Rprop), or mix them (Muon); "
                "use hypergrad=Implicit(), or gradient steps, Adam() or an optimiser of torch's below"
            )
        assert taken.y is not None
        oracle.problem.y.write_(taken.y)
        graph = oracle.step_back(taken.batch, taken.moment, taken.derivative.looks(following))
        owed, v = taken.derivative.back(owed, partial(getattr, graph, "grad"), following)
        # where y itself began at a point that x has no part in, nothing is owed to it
        slope -= graph.take(v, flat, owed.y if i > 0 or started else None, sloped)
        owed = replace(owed, spare=v)
        del graph  # one at a time
    if started and began is not None:
        with oracle.problem.probing(began.moment):
            start = oracle.start(began.batch, graph=True)
            # an average and an iterate begin at y as well
            left = owed.whole()
            through_start = start.pulled(left)
            if ended > 0.0 and bool(through_start.any()):  # of a start without x nothing goes into the hypergradient
                growth = norm(left) / ended
            flat += through_start
    return flat, Effect(slope if sloped else nan, growth, len(trace))
