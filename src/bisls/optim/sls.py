"""Stochastic line search as optimisers: SLS, SLSB."""

from __future__ import annotations

from typing import Any, ClassVar

from bisls.directions.base import Direction
from bisls.optim.base import LineOptimizer, Params
from bisls.steps.armijo import Armijo, Backtrack, Grow, Interpolate, Restart
from bisls.steps.base import StepRule
from bisls.steps.decay import Decay
from bisls.steps.envelope import Envelope


class SLSB(LineOptimizer):
    """SLSB: SLS under the decaying ceiling ``gamma_bk = lr / (k + 1)^power``; converges without interpolation.

    Args:
        params: Parameters or groups. A group's own ``lr`` sets the ratio of its steps to the others'; one norm over all.
        lr: The ceiling gamma_b0, positive. torch's schedulers act on it.
        c: The share of the linear decrease that is asked for, in (0, 1).
        shrink: Factor of a failed trial, in (0, 1); None shortens by safeguarded quadratic interpolation.
        grow: Begin at ``grow`` times the last step; None begins every search at the ceiling, as the paper does.
        f_min: A lower bound of the loss; steps that could pass only below it are not tried. None where there is none.
        power: How fast the ceiling decays: 0.5 for convex, 1 for strongly convex problems; 0 leaves it to a scheduler.
        averaging: Keep an averaged iterate, to be looked at between ``eval()`` and ``train()``.
        weight_decay: Decoupled, as in AdamW: each parameter also goes back by its group's step times this times itself. At
            least 0; groups may differ.
        maximize: Maximise the objective.
        foreach: False walks over the parameters one by one.
        direction: `bisls.Adam()` for the Adam version of the rule: steps along A^-1 m, the line's slope in that metric. The
            gradient itself by default.
    """

    _searches = True
    _stands: ClassVar[dict[str, str]] = {
        "start": "lr",
        "sufficient": "c",
        "eta": "grow",
        "factor": "shrink",
        "step": "lr",
    }

    def __init__(
        self,
        params: Params,
        lr: float = 1.0,
        c: float = 0.1,
        shrink: float | None = None,
        grow: float | None = None,
        f_min: float | None = 0.0,
        power: float = 0.5,
        *,
        averaging: bool | float | None = None,
        weight_decay: float = 0.0,
        maximize: bool = False,
        foreach: bool | None = None,
        direction: Direction | None = None,
    ):
        numbers = {"lr": lr, "c": c, "shrink": shrink, "grow": grow, "f_min": f_min, "power": power}
        options = {"averaging": averaging, "weight_decay": weight_decay, "maximize": maximize, "foreach": foreach}
        super().__init__(params, {**numbers, **options}, direction)

    def _rule(self, group: dict[str, Any]) -> StepRule:
        search = Armijo(
            start=group["lr"],
            sufficient=group["c"],
            shrink=Interpolate() if group["shrink"] is None else Backtrack(group["shrink"]),
            restart=Restart() if group["grow"] is None else Grow(group["grow"]),
            f_min=group["f_min"],
        )
        return Envelope(search, ceiling=Decay(group["lr"], group["power"]))


class SLS(SLSB):
    """SLS: the largest ``gamma <= lr``, by backtracking, with ``f(x - gamma g) <= f(x) - c gamma ||g||^2`` (equation 8).

    Every trial is one forward pass of the closure on the same batch, with random state and BatchNorm's statistics put back.

    Args:
        params: Parameters or groups. A group's own ``lr`` sets the ratio of its steps to the others'; one norm over all.
        lr: The ceiling gamma_b, positive, where the first search begins. torch's schedulers act on it.
        c: The share of the linear decrease that is asked for, in (0, 1).
        shrink: Factor of a failed trial, in (0, 1); None shortens by safeguarded quadratic interpolation (fewer trials).
        grow: Begin at ``grow`` times the last step, at least 1; None begins every search at the ceiling, as the paper does.
        f_min: A lower bound of the loss; steps that could pass only below it are not tried. None where there is none.
        averaging: Keep an averaged iterate, to be looked at between ``eval()`` and ``train()``: True for the plain mean, or
            a power p for weights (k + 1)^p.
        weight_decay: Decoupled, as in AdamW: each parameter also goes back by its group's step times this times itself. At
            least 0; groups may differ.
        maximize: Maximise the objective (then ``f_min`` bounds its negative).
        foreach: False walks over the parameters one by one.
        direction: `bisls.Adam()` for the Adam version of the rule: steps along A^-1 m, the line's slope in that metric. The
            gradient itself by default.
    """

    def __init__(
        self,
        params: Params,
        lr: float = 1.0,
        c: float = 0.1,
        shrink: float | None = None,
        grow: float | None = 2.0,
        f_min: float | None = 0.0,
        *,
        averaging: bool | float | None = None,
        weight_decay: float = 0.0,
        maximize: bool = False,
        foreach: bool | None = None,
        direction: Direction | None = None,
    ):
        super().__init__(
            params,
            lr,
            c,
            shrink,
            grow,
            f_min,
            power=0.0,
            averaging=averaging,
            weight_decay=weight_decay,
            maximize=maximize,
            foreach=foreach,
            direction=direction,
        )
