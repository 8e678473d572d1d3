"""Parts put together: what a user passes as one, whether they fit each other, and what tells two compositions apart."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import MISSING, fields, is_dataclass
from typing import Any

from bisls._check import FLAG, Adopted, having, number, optional, require_argument, settled
from bisls.directions.base import Direction
from bisls.hypergrad.base import HypergradientMethod
from bisls.linear.base import LinearSolver
from bisls.lower import Loop, LowerPart, UserOptimizer
from bisls.problem import Bilevel
from bisls.response.base import Response
from bisls.steps.base import StepRule

KINDS: dict[str, tuple[Any, str]] = {
    "direction": (Direction, "Adam()"),
    "lower_direction": (Direction, "Adam()"),
    "response": (Response, "Tangent()"),
    "hypergrad": (HypergradientMethod, "Implicit(CG())"),
    "upper_step": (StepRule, "Armijo()"),
    "lower_step": (StepRule, "Armijo()"),
    "polish": (LinearSolver, "CG()"),
}


def part(call: str, name: str, value: Any) -> Any:
    """A part that a user passed, as what it is to be; anything else is refused."""
    base, example = KINDS[name]
    (method,) = base.__abstractmethods__
    return settled(call, name, value, having(base, f"must have a method {method}(...), as {example} has"))


def lower_part(call: str, problem: Bilevel, optimizer: Any, polish: Any, own: Mapping[str, Any]) -> LowerPart:
    """What trains the lower level, from what a user passed: an optimiser, or ``own``, which says how a loop takes its steps."""
    if optimizer is not None:
        rule = "says how lower steps are taken, and lower_optimizer takes them: pass one of the two"
        for name, value in own.items():
            require_argument(call, f"lower_{name}", value, value is None, rule)
        return optimizer if isinstance(optimizer, LowerPart) else UserOptimizer(optimizer, problem.y, call)
    small = optional(number("[0, inf)", "must be at least 0, or None"))
    average = settled(call, "lower_average", False if own["average"] is None else own["average"], FLAG)
    settings: dict[str, Any] = {"tol": settled(call, "lower_tol", own["tol"], small), "average": average}
    if own["direction"] is not None:
        settings["direction"] = part(call, "lower_direction", own["direction"])
    if polish is not None:
        settings["polish"] = part(call, "polish", polish)
    return Loop(part(call, "lower_step", own["step"]), **settings)


def check_together(call: str, response: Response, upper_step: StepRule) -> None:
    """Refuse parts that cannot work with each other."""
    if upper_step.searches and not response.searchable:
        raise ValueError(
            f"`{call}(response={response!r}, upper_step={upper_step!r})`: `{_name(response)}()` gives `{_name(upper_step)}` "
            "nothing to search, because value and slope come from another direction than the trial points; use a rule that looks "
            "at value and slope alone (Polyak()), or `Tangent()`"
        )


def check_searchable(call: str, response: Response, upper_step: StepRule) -> None:
    """Refuse a search along a ray on which nothing changes: the upper loss does not depend on x but through y."""
    if upper_step.searches and not response.follows:
        raise ValueError(
            f"`{call}(response={response!r}, upper_step={upper_step!r})`: `{_name(response)}()` gives `{_name(upper_step)}` "
            "nothing to search here, because y stays where it is along the ray, and upper_loss depends on upper_params only "
            "through y; use `Tangent()`"
        )


def identity(value: Any) -> str:
    """A part and its settings, those at their defaults left out: a new setting does not make another part of an old one."""
    if isinstance(value, Adopted):
        return identity(value.adopted_from)
    if is_dataclass(value) and not isinstance(value, type):
        own = [(f.name, getattr(value, f.name), f) for f in fields(value) if f.repr]
        changed = [f"{name}={identity(now)}" for name, now, f in own if identity(now) != _default(f)]
        return f"{_name(value)}({', '.join(changed)})"
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{key!r}: {identity(own)}' for key, own in value.items())}}}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(identity(own) for own in value)}]"
    return re.sub(r" at 0x[0-9a-f]+", "", repr(value))


def _default(f: Any) -> str | None:
    if f.default is not MISSING:
        return identity(f.default)
    return identity(f.default_factory()) if f.default_factory is not MISSING else None


def _name(value: Any) -> str:
    return type(value).__name__
