"""Parts put together: what a user passes as one, whether they fit each other, and what tells two compositions apart."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import MISSING, fields, is_dataclass
from typing import Any

from bisls._check import FLAG, Adopted, adopted, has_methods, having, number, optional, require_argument, settled, shown
from bisls.directions.base import Direction
from bisls.hypergrad.base import HypergradientMethod
from bisls.linear.base import LinearSolver
from bisls.lower import CoordinateDescent, Loop, LowerPart, UserOptimizer
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
        require_argument(call, "polish", polish, polish is None, rule)
        part_of_ones_own: LowerPart | None = (
            adopted(LowerPart, optimizer) if has_methods(LowerPart, optimizer) else None
        )
        made: LowerPart = part_of_ones_own or UserOptimizer(optimizer, problem.y, call)
        if made.solves_kinks and problem.lower_l1 is None and type(made) is CoordinateDescent:
            raise ValueError(
                f"`{call}(lower_optimizer={optimizer!r})`: it is for lower problems with an L1 term, and this one has none; "
                "declare it by Bilevel(lower_l1=...), or leave lower_optimizer out"
            )
        if problem.lower_l1 is None or made.solves_kinks:
            return made
    if problem.lower_l1 is not None:
        raise ValueError(
            f"`{call}(problem=...)`: the lower loss has an L1 term (lower_l1), and steps along gradients do not end at its "
            "zeros; pass lower_optimizer=CoordinateDescent(), and nothing else that says how lower steps are taken "
            "(BiSLS takes it by itself)"
        )
    small = optional(number("[0, inf)", "must be at least 0, or None"))
    average = settled(call, "lower_average", False if own["average"] is None else own["average"], FLAG)
    settings: dict[str, Any] = {"tol": settled(call, "lower_tol", own["tol"], small), "average": average}
    if own["direction"] is not None:
        settings["direction"] = part(call, "lower_direction", own["direction"])
    if polish is not None:
        settings["polish"] = part(call, "polish", polish)
    return Loop(part(call, "lower_step", own["step"]), **settings)


class Default(float):
    """A default that can be told from the same number given by a user."""


def instead(call: str, name: str, value: Any, other: str, part: Any) -> None:
    """Refuse a number that says where a rule begins beside the rule that stands in place of that one."""
    given = value is not None and not isinstance(value, Default) and part is not None
    if given:
        raise ValueError(
            f"`{call}({name}={shown(value)}, {other}={shown(part)})`: {name} is a setting of the rule that {other} replaces; "
            "pass one of the two"
        )


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


def identity(value: Any, within: tuple[int, ...] = ()) -> str:
    """A part and its settings, those at their defaults left out: a new setting does not make another part of an old one.

    A plain object without a repr of its own tells itself by all that it holds.

    Args:
        value: The part, or a setting of one.
        within: The ids of the plain objects that hold it, so that a circle ends.
    """
    if isinstance(value, Adopted):
        return identity(value.adopted_from, within)
    if is_dataclass(value) and not isinstance(value, type):
        own = [(f.name, getattr(value, f.name), f) for f in fields(value) if f.repr]
        changed = [f"{name}={identity(now, within)}" for name, now, f in own if identity(now, within) != _default(f)]
        return f"{_name(value)}({', '.join(changed)})"
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{key!r}: {identity(own, within)}' for key, own in value.items())}}}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(identity(own, within) for own in value)}]"
    held = _attributes(value) if getattr(type(value), "__repr__", None) is object.__repr__ else {}
    if held and id(value) not in within:
        inside = (*within, id(value))
        return f"{_name(value)}({', '.join(f'{name}={identity(now, inside)}' for name, now in held.items())})"
    return re.sub(r" at 0x[0-9a-f]+", "", repr(value))


def _attributes(value: Any) -> dict[str, Any]:
    """What a plain object holds, in its dictionary and its slots."""
    slots = [name for kind in type(value).__mro__ for name in _listed(vars(kind).get("__slots__", ()))]
    held = {name: getattr(value, name) for name in slots if not name.startswith("__") and hasattr(value, name)}
    return {**held, **getattr(value, "__dict__", {})}


def _listed(slots: Any) -> list[str]:
    return [slots] if isinstance(slots, str) else list(slots)


def _default(f: Any) -> str | None:
    if f.default is not MISSING:
        return identity(f.default)
    return identity(f.default_factory()) if f.default_factory is not MISSING else None


def _name(value: Any) -> str:
    return type(value).__name__
