"""The derivative of one step of a torch optimiser: by its formula where that is known, by trying it on copies otherwise."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD, Adam, AdamW, Optimizer, RMSprop

from bisls.derivatives import Derivative, Factor, Following, Momentum, Probed, Squares, floored
from bisls.lower.hooked import Hooks, difference, unchanged
from bisls.vector import Vector

Coefficients = dict[str, Tensor | float]  # those of `Momentum`, for one parameter


def known(
    hooks: Hooks, gradient: Tensor, following: Following, room: Callable[[], Tensor]
) -> Callable[[], Derivative | None]:
    """To be called before a step; what it gives is to be called after it, and is the derivative of that step.

    Args:
        hooks: The optimiser whose step it is, with the hooks around it.
        gradient: That of the step, flat.
        following: What of the optimiser's state will be differentiated.
        room: Gives a flat vector to write a scaling into: it is kept for every step.
    """
    optimizer, vector = hooks.optimizer, hooks.vector
    formula = FORMULAS.get(type(optimizer))
    if formula is None or hooks.shaping:
        return _tried(hooks, gradient)
    began = {p: not optimizer.state.get(p) for group in optimizer.param_groups for p in group["params"]}

    def after() -> Derivative:
        places = {p: group for group in optimizer.param_groups for p in group["params"]}
        scaling = None if formula is _sgd else room()
        parts = [None] * len(vector.tensors) if scaling is None else vector.split(scaling)
        found = [
            formula(places[p], optimizer.state.get(p, {}), began[p], following, part)
            for p, part in zip(vector.tensors, parts, strict=True)
        ]
        return _joined(vector, found, scaling, parts)

    return after


def rate_of(optimizer: Optimizer) -> float:
    """The rate of its first group."""
    return float(optimizer.param_groups[0].get("lr", 0.0))


def _sgd(
    group: dict[str, Any], state: dict[str, Any], first: bool, following: Following, room: Tensor | None
) -> Coefficients:
    lr, b = float(group["lr"]), float(group["momentum"])
    common: Coefficients = {"scale": lr, "coupled": float(group["weight_decay"]), "sign": _sign(group)}
    if b == 0.0:
        return common
    nesterov = bool(group["nesterov"])
    share = 1.0 if first else 1.0 - float(group["dampening"])
    return {**common, "keep": b, "share": share, "own": float(nesterov), "through": b if nesterov else 1.0}


def _adam(
    group: dict[str, Any], state: dict[str, Any], first: bool, following: Following, room: Tensor | None
) -> Coefficients:
    (b1, b2), lr, t = (float(b) for b in group["betas"]), float(group["lr"]), float(state["step"])
    decay, decoupled = float(group["weight_decay"]), bool(group.get("decoupled_weight_decay"))
    in_full = following.squares and not group["amsgrad"] and (decoupled or decay == 0.0)
    squares = state["max_exp_avg_sq"] if group["amsgrad"] else state["exp_avg_sq"]
    root = torch.div(squares, 1 - b2**t, out=None if in_full else room).sqrt_()
    below = floored(root + float(group["eps"]) if in_full else root.add_(float(group["eps"])), following.floor)
    scale = torch.reciprocal(below, out=room).mul_(lr / (1 - b1**t))
    found: Coefficients = {
        "scale": scale,
        "keep": b1,
        "share": 1 - b1,
        "own": 0.0,
        "through": 1.0,
        "sign": _sign(group),
    }
    found |= {"shrink": 1 - lr * decay} if decoupled else {"coupled": decay}
    if in_full:
        found |= {"b2": b2, "by_square": scale * state["exp_avg"] / below / (2 * (1 - b2**t) * root)}
    return found


def _rmsprop(
    group: dict[str, Any], state: dict[str, Any], first: bool, following: Following, room: Tensor | None
) -> Coefficients:
    lr, b = float(group["lr"]), float(group["momentum"])
    mean = state["square_avg"]
    if group["centered"]:
        mean = mean - state["grad_avg"] ** 2
    below = floored(torch.sqrt(mean, out=room).add_(float(group["eps"])), following.floor)
    scale = torch.reciprocal(below, out=room)
    common: Coefficients = {"coupled": float(group["weight_decay"]), "sign": _sign(group)}
    if b == 0.0:
        return {**common, "scale": scale.mul_(lr)}
    return {**common, "scale": lr, "keep": b, "share": scale, "own": 0.0, "through": 1.0}


# of one parameter: its group, its state after the step, whether that was its first, and where a scaling is to be written
FORMULAS: dict[type, Callable[[dict[str, Any], dict[str, Any], bool, Following, Tensor | None], Coefficients]] = {
    SGD: _sgd,
    Adam: _adam,
    AdamW: lambda group, *rest: _adam({**group, "decoupled_weight_decay": True}, *rest),
    RMSprop: _rmsprop,
}


def _sign(group: dict[str, Any]) -> float:
    return -1.0 if group.get("maximize") else 1.0


def _joined(
    vector: Vector, found: list[Coefficients], room: Tensor | None, rooms: Sequence[Tensor | None]
) -> Derivative:
    """One derivative from those of all parameters: numbers stay numbers where all of them have the same.

    Args:
        vector: The parameters.
        found: Those of each.
        room: Where their scalings were written.
        rooms: The part of it that belongs to each.
    """
    defaults = {"keep": 0.0, "share": 1.0, "own": 1.0, "through": 0.0, "sign": 1.0, "coupled": 0.0, "shrink": 1.0}

    def joined(name: str) -> Factor:
        parts = [own.get(name, defaults.get(name, 0.0)) for own in found]
        if all(isinstance(part, float) for part in parts) and len(set(parts)) == 1:
            return parts[0]
        if room is not None and all(part is own for part, own in zip(parts, rooms, strict=True)):
            return room
        return vector.join(
            [torch.as_tensor(p).to(t).expand(t.shape) for p, t in zip(parts, vector.tensors, strict=True)]
        )

    squares = None
    if all("b2" in own for own in found) and len({own["b2"] for own in found}) == 1:
        by_square = joined("by_square")
        assert isinstance(by_square, Tensor)
        squares = Squares(float(found[0]["b2"]), by_square)
    names = ("scale", "keep", "share", "own", "through", "sign", "coupled", "shrink")
    return Momentum(**{name: joined(name) for name in names}, squares=squares)


def _tried(hooks: Hooks, gradient: Tensor) -> Callable[[], Derivative | None]:
    """By steps with gradients a little to both sides: right where the derivative of the step is symmetric.

    It is where no coordinate depends on another's gradient, and where all are divided by a common norm.
    """
    optimizer, vector = hooks.optimizer, hooks.vector
    state, y = deepcopy(optimizer.state_dict()), vector.read()

    def stepped(g: Tensor) -> Tensor:
        optimizer.load_state_dict(deepcopy(state))
        vector.write_(y)
        for tensor, part in zip(vector.tensors, vector.cast(g), strict=True):
            tensor.grad = part.clone()
        hooks.step(trial=True)
        return -vector.read()

    def product(v: Tensor) -> Tensor:
        with unchanged(optimizer, vector):
            found, closer = (difference(stepped, gradient, v, part) for part in (1.0, 0.25))
        # a jump (of a sign) is no derivative: it looks larger from closer by, or is not there
        return torch.where((found - closer).abs() <= found.abs() / 2, closer, 0.0)

    def after() -> Derivative | None:
        return Probed(product) if hooks.followable(product, gradient) else None

    return after
