"""What the code of a function names: globals, attributes, modules that it imports when it is called; names that are trusted."""

from __future__ import annotations

import dis
import functools
import importlib.util
import sys
import types
from collections.abc import Mapping
from typing import Any

# libraries that keep nothing between two calls: their functions are not looked into
TRUSTED = {
    *(
        "torch",
        "numpy",
        "builtins",
        "math",
        "cmath",
        "operator",
        "functools",
        "itertools",
        "collections",
        "typing",
        "abc",
    ),
    *(
        "types",
        "enum",
        "dataclasses",
        "copy",
        "contextlib",
        "warnings",
        "weakref",
        "numbers",
        "_weakrefset",
        "__future__",
    ),
}

OWN = __name__.split(".", 1)[0]
DRAWING = {"random", "secrets", "statistics", "tempfile", "uuid"}  # of Python's own: what draws random numbers


def root_of(module: Any) -> str:
    """The package of a module, by its name."""
    return module.split(".", 1)[0] if isinstance(module, str) else ""


@functools.lru_cache(maxsize=4096)
def trusted_name(module: Any) -> bool:
    """Whether a module of this name keeps nothing between two calls that a loss could come to depend on."""
    root = root_of(module)
    if root == OWN:  # all but ready problems, whose losses are losses like any other
        return module != f"{OWN}.tasks" and not module.startswith(f"{OWN}.tasks.")
    return root in TRUSTED or (root in sys.stdlib_module_names and root not in DRAWING)


@functools.lru_cache(maxsize=4096)
def names_in(code: types.CodeType) -> tuple[str, ...]:
    """Every global and every attribute that a function names, those of the functions inside of it too."""
    found = dict.fromkeys(code.co_names)
    for value in code.co_consts:
        if isinstance(value, types.CodeType):
            found |= dict.fromkeys(names_in(value))
    return tuple(found)


@functools.lru_cache(maxsize=4096)
def _imports(code: types.CodeType) -> tuple[tuple[str, int], ...]:
    """Names with the number of dots before them."""
    found: dict[tuple[str, int], None] = {}
    before: list[Any] = [None, None]
    for step in dis.get_instructions(code):
        if step.opname == "IMPORT_NAME":
            found[step.argval, before[-2] if isinstance(before[-2], int) else 0] = None
        before = [before[-1], step.argval]
    for value in code.co_consts:
        if isinstance(value, types.CodeType):
            found |= dict.fromkeys(_imports(value))
    return tuple(found)


def imports_in(code: types.CodeType, scope: Mapping[str, Any]) -> list[str]:
    """The full names of the modules that a function imports when it is called, also inside of its functions.

    Args:
        code: The function's.
        scope: Its globals.
    """
    found = []
    for name, level in _imports(code):
        try:
            found.append(
                importlib.util.resolve_name("." * level + name, scope.get("__package__") or "") if level else name
            )
        except ImportError:  # it will be raised where the function is called
            continue
    return found
