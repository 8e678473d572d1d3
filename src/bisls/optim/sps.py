"""Stochastic Polyak steps as optimisers: SPSMax, DecSPS, SPSB."""

from __future__ import annotations

from typing import Any, ClassVar

from bisls.directions.base import Direction
from bisls.optim.base import LineOptimizer, Params
from bisls.steps.base import StepRule
from bisls.steps.decay import Decay
from bisls.steps.envelope import Envelope
from bisls.steps.polyak import DecreasingPolyak, Polyak


class SPSMax(LineOptimizer):
    """SPS_max: ``gamma_k = min{ (f - f_min) / (c ||g||^2), lr }`` (the paper's equation 5).

    Fast where the model can fit every sample; elsewhere it does not settle, since the ceiling stays.

    Args:
        params: Parameters or groups. A group's own ``lr`` sets the ratio of its steps to the others'; one norm over all.
        lr: The ceiling gamma_b, positive. torch's schedulers act on it.
        c: Positive; larger is more careful.
        f_min: A lower bound of the loss on any batch.
        averaging: Keep an averaged iterate, to be looked at between ``eval()`` and ``train()``: True for the plain mean, or
            a power p for weights (k + 1)^p.
        weight_decay: Decoupled, as in AdamW: each parameter also goes back by its group's step times this times itself. At
            least 0; groups may differ.
        maximize: Maximise the objective (then ``f_min`` bounds its negative).
        foreach: False walks over the parameters one by one.
        direction: `bisls.Adam()` for the Adam version of the rule: steps along A^-1 m, the line's slope in that metric. The
            gradient itself by default.
    """

    _stands: ClassVar[dict[str, str]] = {"max_step": "lr"}

    def __init__(
        self,
        params: Params,
        lr: float = 1.0,
        c: float = 1.0,
        f_min: float = 0.0,
        *,
        averaging: bool | float | None = None,
        weight_decay: float = 0.0,
        maximize: bool = False,
        foreach: bool | None = None,
        direction: Direction | None = None,
    ):
        options = {"averaging": averaging, "weight_decay": weight_decay, "maximize": maximize, "foreach": foreach}
        super().__init__(params, {"lr": lr, "c": c, "f_min": f_min, **options}, direction)

    def _rule(self, group: dict[str, Any]) -> StepRule:
        return Polyak(group["c"], group["f_min"], max_step=group["lr"])


class DecSPS(SPSMax):
    """DecSPS: ``gamma_k = (1/c_k) min{ (f - f_min) / ||g||^2, c_(k-1) gamma_(k-1) }``, ``c_k = c sqrt(k + 1)`` (equation 6).

    Its steps never grow. Arguments as for `SPSMax`; ``lr`` is gamma_b0, which bounds the first step, and
    a scheduler that lowers it bounds every later one.
    """

    def _rule(self, group: dict[str, Any]) -> StepRule:
        return Envelope(DecreasingPolyak(group["c"], group["f_min"], max_step=group["lr"]), ceiling=group["lr"])


class SPSB(LineOptimizer):
    """SPSB: ``gamma_k = min{ (f - f_min) / (c ||g||^2), gamma_bk }``, ``gamma_bk = lr / (k + 1)^power`` (equation 7).

    Converges without interpolation, and survives a ceiling that is far too large. With ``averaging=True`` the averaged
    iterate is the one that Theorem 1 is about.

    Args:
        params: Parameters or groups. A group's own ``lr`` sets the ratio of its steps to the others'; one norm over all.
        lr: The ceiling gamma_b0, positive. torch's schedulers act on it.
        c: Positive; larger is more careful.
        f_min: A lower bound of the loss on any batch.
        power: How fast the ceiling decays: 0.5 for convex, 1 for strongly convex problems; 0 leaves the decay to a scheduler.
        averaging: Keep an averaged iterate, to be looked at between ``eval()`` and ``train()``: True for the plain mean, or
            a power p for weights (k + 1)^p.
        weight_decay: Decoupled, as in AdamW: each parameter also goes back by its group's step times this times itself. At
            least 0; groups may differ.
        maximize: Maximise the objective (then ``f_min`` bounds its negative).
        foreach: False walks over the parameters one by one.
        direction: `bisls.Adam()` for the Adam version of the rule: steps along A^-1 m, the line's slope in that metric. The
            gradient itself by default.

    Examples:
        >>> import torch
        >>> from bisls.optim import SPSB
        >>> w = torch.tensor([4.0, -1.0], requires_grad=True)
        >>> optimizer = SPSB([w])
        >>> loss = lambda: (3 * (w[0] - 1) ** 2 + (w[1] + 2) ** 2) / 2
        >>> first = optimizer.step(loss)
        >>> round(optimizer.last_step_size, 4)  # 14 / (9^2 + 1^2)
        0.1707
        >>> for _ in range(40):
        ...     last = optimizer.step(loss)
        >>> last.item() < 1e-3 * first.item()
        True
    """

    _stands: ClassVar[dict[str, str]] = {"step": "lr"}

    def __init__(
        self,
        params: Params,
        lr: float = 1.0,
        c: float = 1.0,
        f_min: float = 0.0,
        power: float = 0.5,
        *,
        averaging: bool | float | None = None,
        weight_decay: float = 0.0,
        maximize: bool = False,
        foreach: bool | None = None,
        direction: Direction | None = None,
    ):
        numbers = {"lr": lr, "c": c, "f_min": f_min, "power": power}
        options = {"averaging": averaging, "weight_decay": weight_decay, "maximize": maximize, "foreach": foreach}
        super().__init__(params, {**numbers, **options}, direction)

    def _rule(self, group: dict[str, Any]) -> StepRule:
        return Polyak(group["c"], group["f_min"], max_step=Decay(group["lr"], group["power"]))
