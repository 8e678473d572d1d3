"""A loss and its gradient as numbers and rays: what a step is chosen by and taken along."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import Any

import torch
from torch import Tensor

from bisls._check import Wanted, real, settled
from bisls.optim.arithmetic import Ray, dot, doubles, norms_of
from bisls.optim.closures import Closure, Unheard, stashed_grads
from bisls.optim.units import LEAST, MOST, norm_of, unit_of
from bisls.ranks import mean_over_ranks, world
from bisls.still import Moment, compiled, probe, still

logger = logging.getLogger("bisls")


@dataclass(frozen=True)
class Evaluation:
    """A loss and its gradient at the present parameters, as one closure gave them.

    Attributes:
        loss: As it is handed back: without its graph.
        value: As a number; the negative where it is maximised.
        eps: The relative spacing of the numbers it was computed in.
        gradient: The ray along the gradient, which the step rule sees.
        moves: The ray that the parameters follow: the same, unless the closure clipped its gradients.
        closure: To evaluate it again; None where there is none.
        does_backward: Whether the closure runs backward.
        moment: The random state before it was called.
    """

    loss: Any
    value: float
    eps: float
    gradient: Ray
    moves: Ray
    closure: Closure | None = None
    does_backward: bool = False
    moment: Moment | None = None

    @property
    def clipped(self) -> bool:
        """Whether the closure changed its gradients after backward."""
        return self.moves is not self.gradient

    @property
    def scale(self) -> float:
        """By what all gradients were multiplied alike after backward; 0 where they were not."""
        g, d = self.gradient, self.moves
        lengths = g.square * d.square
        if not self.clipped or not 0.0 < lengths < inf or abs(d.slope * d.slope - lengths) > 1e-5 * lengths:
            return 0.0
        return d.slope / g.slope


def collect(
    name: str,
    loss: Any,
    params: list[Tensor],
    grads: Sequence[Tensor | None],
    ratio: Mapping[Tensor, float],
    sign: float,
    foreach: bool | None,
) -> Evaluation:
    """A loss and the gradients that belong to it, with one transfer for all that must be known as numbers.

    Args:
        name: The optimiser's, for messages.
        loss: A scalar tensor or a number.
        params: The parameters.
        grads: One for each; None where there is none.
        ratio: Of each parameter's step to the common one.
        sign: -1 where the loss is maximised.
        foreach: False walks over the tensors one by one.
    """
    loss = _scalar(name, loss)
    if any(grad is not None and grad.is_sparse for grad in grads):
        raise ValueError(f"`{name}` does not support sparse gradients; use dense layers (Embedding(sparse=False))")
    kept = [(p, g, ratio[p]) for p, g in zip(params, grads, strict=True) if g is not None]
    used, tensors, ratios = [p for p, _, _ in kept], [g for _, g, _ in kept], [r for _, _, r in kept]
    norms = norms_of(tensors, foreach)
    scalars = [doubles(norms)] if norms else []
    if isinstance(loss, Tensor):
        loss = loss.detach()  # its graph is not needed any more, neither here nor by who gets it back
        scalars.append(mean_over_ranks(loss.double().reshape(())).reshape(1))
    sizes = torch.cat(scalars).tolist() if scalars else []
    value = sizes.pop() if isinstance(loss, Tensor) else float(loss)
    eps = torch.finfo(loss.dtype).eps if isinstance(loss, Tensor) and loss.is_floating_point() else 2.0**-52
    slope = -sum(r * n * n for r, n in zip(ratios, sizes, strict=True))
    if not 1e-30 < -slope < inf:  # squares that single precision cannot hold
        sizes = [torch.linalg.vector_norm(g, dtype=torch.float64).item() for g in tensors]
        slope = -sum(r * n * n for r, n in zip(ratios, sizes, strict=True))
    ray = Ray(used, tensors, ratios, sizes, slope)
    if not LEAST < -slope < MOST:  # squares that no precision can hold
        sizes = [norm_of(g) for g in tensors]
        ray = Ray(used, tensors, ratios, sizes, slope, unit_of(sizes))
        ray = replace(ray, slope=-ray.square)
    return Evaluation(loss, sign * value, eps, ray, ray)


def _scalar(name: str, loss: Any) -> Any:
    """The loss, if it is one: a real tensor with one number, or a number."""
    if not isinstance(loss, Tensor):
        return settled(f"{name}.step", "loss", loss, _LOSS)
    if loss.numel() != 1 or loss.is_complex() or loss.is_meta:
        got = f"dtype {loss.dtype}" if loss.is_complex() else f"shape {tuple(loss.shape)}"
        got = "one on no device, which holds no number" if loss.is_meta else got
        raise ValueError(f"`{name}.step(loss=...)`: the loss must be a scalar tensor or a number; got {got}")
    return loss


_LOSS = Wanted("must be a scalar tensor or a number", real)


def looked(judged: Evaluation, params: list[Tensor], sign: float, owner: Any) -> float:
    """The loss at the present parameters, on its batch and random numbers, leaving no trace.

    Args:
        judged: The loss as it was evaluated.
        params: All parameters; their ``.grad`` stays as it is.
        sign: -1 where it is maximised.
        owner: The optimiser.
    """
    assert judged.closure is not None
    device = params[0].device
    if judged.does_backward:
        value = _unheard(judged, params, owner)
        if value is None:
            with still(device, judged.moment, owner=owner), torch.enable_grad(), stashed_grads(params):
                value = judged.closure()
    else:
        value = probe(judged.closure, device, judged.moment, owner=owner, recorded=compiled() > 0)
    if isinstance(value, Tensor):
        value = mean_over_ranks(value.detach().double()).item()
    return sign * float(value)


def _unheard(judged: Evaluation, params: list[Tensor], owner: Any) -> Any:
    """The value of a closure whose backward is left out; None where that can't be, or where gradients may be in the value.

    Code that is compiled would be translated again, and ranks may meet in a backward pass.
    """
    assert judged.closure is not None
    if not owner.leaves_backward_out or compiled() > 0 or world() > 1:
        return None
    unheard = Unheard(params, [p.grad for p in params])
    try:
        with still(params[0].device, judged.moment, owner=owner), torch.enable_grad(), stashed_grads(params), unheard:
            value = judged.closure()
        if unheard.stands(value):
            return value
    except Exception:
        if not unheard.called:
            raise
    owner.leaves_backward_out = False
    return None


def bent(gradient: Ray, moves: list[Tensor]) -> Ray:
    """The ray along what a closure made of its gradient by clipping."""
    unit = gradient.unit
    if unit != 1.0:
        pairs = zip(gradient.tensors, moves, gradient.ratios, strict=True)
        slope = -sum(r * dot(g.double() / unit, d.double() / unit).item() for g, d, r in pairs)
        return replace(gradient, tensors=moves, norms=[norm_of(d) for d in moves], slope=slope)
    products = [dot(g, d) for g, d in zip(gradient.tensors, moves, strict=True)]
    norms = [torch.linalg.vector_norm(d, dtype=torch.float64) for d in moves]
    numbers = torch.stack([*products, *norms]).tolist()
    slope = -sum(r * product for r, product in zip(gradient.ratios, numbers[: len(moves)], strict=True))
    return replace(gradient, tensors=moves, norms=numbers[len(moves) :], slope=slope)


def suspected(name: str, scale: float, last: float) -> float:
    """Say so where a closure scales its gradients, which is no clipping: it does so by the same factor every time.

    Args:
        name: The optimiser's.
        scale: By which the closure multiplied the gradient at this step.
        last: What this returned at the step before, or 0.
    """
    if last < 0.0:  # it was said
        return last
    if not scale or abs(scale - last) > 1e-5 * scale:
        return scale
    logger.warning(
        "%s: the closure multiplied its gradients by %.6g after backward(), in two steps in a row. That is taken for clipping, "
        "so it shortens the steps; to average over batches, divide the loss before backward() instead",
        name,
        scale,
    )
    return -1.0
