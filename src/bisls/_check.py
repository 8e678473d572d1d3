"""The one form that complaints about arguments take."""

from __future__ import annotations

from typing import Any


def require(part: Any, name: str, holds: bool, rule: str) -> None:
    """Raise a ValueError that quotes the call, the rule and what came, unless the rule holds."""
    require_argument(type(part).__name__, name, getattr(part, name), holds, rule)


def require_argument(call: str, name: str, value: Any, holds: bool, rule: str) -> None:
    """The same for an argument that is not kept as an attribute of a part."""
    if not holds:
        raise ValueError(f"`{call}({name}={value!r})`: {name} {rule}")


def whole(number: Any, least: int) -> bool:
    """Whether it is a whole number (True and False are not) of at least so much."""
    return isinstance(number, int) and not isinstance(number, bool) and number >= least
