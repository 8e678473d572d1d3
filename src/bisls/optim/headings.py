"""Gradients into directions for lists of parameters: Adam's scaling and momentum for any of the step rules."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from bisls._check import Wanted, Wrong, settled
from bisls.directions.adam import Adam
from bisls.directions.base import Direction
from bisls.directions.steepest import Steepest
from bisls.optim.arithmetic import Ray
from bisls.optim.evaluation import Evaluation

KEPT = ("m", "g")  # what `Adam` keeps of each parameter; how many steps it has made is the same for all
State = Mapping[str, Any]


def _known(value: Any) -> Any:
    if value is not None and type(value) not in (Adam, Steepest):
        raise Wrong
    return None if isinstance(value, Steepest) else value


DIRECTION = Wanted("must be Adam(...), or Steepest() or None for the gradient itself", _known)


def direction_of(call: str, value: Any) -> Direction | None:
    """The direction that a user passed; None for the gradient itself."""
    return settled(call, "direction", value, DIRECTION)


def headed(
    direction: Direction, found: Evaluation, params: list[Tensor], states: Mapping[Tensor, Any], steps: int
) -> tuple[Evaluation, State]:
    """A loss with the rays that a direction makes of its gradient, and what to remember of it.

    The rule sees the ray along ``search``, with the slope that the true gradient has there; the parameters follow ``move``. A
    gradient that was clipped in the closure is what the direction sees.

    Args:
        direction: The direction.
        found: The loss and its gradient.
        params: All parameters that are trained, whether they have a gradient now or not.
        states: What is kept of each.
        steps: How many gradients the state has seen.
    """
    wide = [torch.promote_types(p.dtype, torch.float32) for p in params]
    dtype = max(wide, key=lambda own: torch.finfo(own).bits)
    seen = dict(zip(found.moves.params, found.moves.tensors, strict=True))
    flat = torch.cat(
        [seen[p].reshape(-1).to(dtype) if p in seen else p.new_zeros(p.numel(), dtype=dtype) for p in params]
    )
    state: dict[str, Any] = {}
    if steps:
        state = {key: torch.cat([_piece(states[p], key, p, dtype) for p in params]) for key in KEPT}
        state["t"] = steps
    heading = direction.head(flat, flat, state)  # Adam does not look at the point
    search = _ray(found, params, heading.search)
    move = search if heading.move is heading.search else _ray(found, params, heading.move)
    kept = {key: dict(zip(params, _parts(heading.state[key], params), strict=True)) for key in KEPT}
    return replace(found, gradient=search, moves=move), kept


def begin(states: Mapping[Tensor, Any], params: list[Tensor]) -> None:
    """What is kept before the first gradient, for those who want to see all of a state at once."""
    for p in params:
        for key in KEPT:
            wide = torch.promote_types(p.dtype, torch.float32)
            states[p].setdefault(f"direction_{key}", torch.zeros_like(p, dtype=wide, requires_grad=False))


def keep(states: Mapping[Tensor, Any], kept: State) -> None:
    """Remember what `headed` said."""
    for key, tensors in kept.items():
        for p, tensor in tensors.items():
            states[p][f"direction_{key}"] = tensor.clone()


def _piece(state: Mapping[str, Any], key: str, p: Tensor, dtype: torch.dtype) -> Tensor:
    own = state.get(f"direction_{key}")
    return p.new_zeros(p.numel(), dtype=dtype) if own is None else own.reshape(-1).to(dtype)


def _parts(flat: Tensor, params: list[Tensor]) -> list[Tensor]:
    return [part.view(p.shape) for p, part in zip(params, torch.split(flat, [p.numel() for p in params]), strict=True)]


def _ray(found: Evaluation, params: list[Tensor], flat: Tensor) -> Ray:
    """The ray along a direction, of the parameters that have a gradient; its slope is that of the true gradient."""
    true = found.gradient
    parts = dict(zip(params, _parts(flat, params), strict=True))
    tensors = [parts[p] for p in true.params]
    products = [
        torch.dot(g.reshape(-1).to(d.dtype), d.reshape(-1)).double() for g, d in zip(true.tensors, tensors, strict=True)
    ]
    norms = [torch.linalg.vector_norm(d).double() for d in tensors]
    numbers = torch.stack([*products, *norms]).tolist() if tensors else []
    slope = -sum(r * n for r, n in zip(true.ratios, numbers[: len(tensors)], strict=True))
    return Ray(true.params, tensors, true.ratios, numbers[len(tensors) :], slope)
