"""The one form that complaints about arguments take."""

from __future__ import annotations

from typing import Any


def require(part: Any, name: str, holds: bool, rule: str) -> None:
    """Raise a ValueError that quotes the call, the rule and what came, unless the rule holds."""
    if not holds:
        raise ValueError(f"`{type(part).__name__}({name}={getattr(part, name)!r})`: {name} {rule}")
