"""bisls: optimisation whose step sizes set themselves. Two losses and no learning rates."""

import sys as _sys
from importlib import import_module as _import
from types import ModuleType as _ModuleType
from typing import TYPE_CHECKING
from typing import Any as _Any

from bisls._version import __version__ as __version__

if TYPE_CHECKING:
    from bisls._names import *  # noqa: F403

# The names come from `_names` when the first of them is asked for, and with them torch: `bisls.sklearn` and the command
# do without it.


def __getattr__(name: str) -> _Any:
    if name.startswith("_") and name != "__all__":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    names = _import("bisls._names")
    if name == "__all__":
        return [one for one in vars(names) if not one.startswith("_")]
    for place in (vars(names), globals()):  # the second has the modules that came with the first
        if name in place:
            return place[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *vars(_import("bisls._names"))})


class _Package(_ModuleType):
    """`fit` and `sensitivity` are functions and modules: the package has the functions, whatever is imported first."""

    def __setattr__(self, name: str, value: _Any) -> None:
        if name in ("fit", "sensitivity") and isinstance(value, _ModuleType):
            value = getattr(value, name)
        super().__setattr__(name, value)


_sys.modules[__name__].__class__ = _Package
