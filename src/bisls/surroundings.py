"""What a loss can see beside its batch: generators that it may draw from.

A loss is a Python function. What it returns depends on tensors, and on whatever else it can reach: the cells it closes over, the
globals it names, the attributes of its objects. `Surroundings` walks over all that, and calls nothing of it.
"""

from __future__ import annotations

import functools
import random
import types
from collections import deque
from collections.abc import Callable
from enum import Enum
from pathlib import PurePath
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

MOST = 20_000  # things that are looked at; a container with more entries is not opened

# libraries that keep nothing between two calls: their functions are not looked into
_TRUSTED = {
    "torch",
    "builtins",
    "math",
    "cmath",
    "operator",
    "functools",
    "itertools",
    "collections",
    "typing",
    "abc",
    "numpy",
}
_TRUSTED |= {
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
}
_PLAIN: tuple[Any, ...] = (
    bool,
    int,
    float,
    complex,
    str,
    bytes,
    type(None),
    type(...),
    type(NotImplemented),
    range,
    slice,
    Enum,
    PurePath,
)
_PLAIN += (
    torch.dtype,
    torch.device,
    torch.layout,
    torch.memory_format,
    torch.Size,
    np.generic,
    np.dtype,
    types.CodeType,
)
_DESCRIPTORS: tuple[Any, ...] = (
    types.GetSetDescriptorType,
    types.MemberDescriptorType,
    types.ClassMethodDescriptorType,
    types.MethodDescriptorType,
    types.WrapperDescriptorType,
    types.ModuleType,
    types.GenericAlias,
    np.ufunc,
)
_CONTAINERS = (dict, list, tuple, set, frozenset, deque)
_OF_EVERY_CLASS = {"__doc__", "__module__", "__qualname__", "__annotations__", "__dict__", "__weakref__", "__slots__"}


class Surroundings:
    """All that some functions can reach, as it is now.

    Attributes:
        generators: Random generators that belong to nobody else, in the order in which they are met.
        opaque: Something whose state nobody can see (an open file, a running generator); None where there is nothing like that.
        calls: The libraries whose functions are named.

    Args:
        roots: The functions.
    """

    def __init__(self, *roots: Any):
        self.generators: list[Any] = []
        self.opaque: str | None = None
        self.calls: set[str] = set()
        self._seen: set[int] = set()
        self._todo: list[Any] = list(roots)
        for thing in self._todo:  # it grows
            if id(thing) not in self._seen:
                self._seen.add(id(thing))
                look = _LOOKS.get(type(thing)) or _LOOKS.setdefault(type(thing), _look_for(type(thing)))
                if look is not _nothing:
                    look(self, thing)
                if len(self._seen) > MOST:
                    self.opaque = self.opaque or f"more than {MOST:,} things"
                    break
        self._todo.clear()

    @property
    def numpy(self) -> bool:
        """Whether NumPy's global random generator may be drawn from."""
        return self.opaque is not None or "numpy" in self.calls

    @property
    def python(self) -> bool:
        """Whether Python's global random generator may be drawn from."""
        return self.opaque is not None or "random" in self.calls

    def hold(self, thing: Any, content: tuple[Any, ...]) -> None:
        """Look at what a thing holds too."""
        self._todo.extend(content)

    def cannot_see(self, thing: Any) -> None:
        """Its state is hidden."""
        self.opaque = self.opaque or f"a {type(thing).__module__}.{type(thing).__qualname__}"

    def named(self, scope: dict[str, Any], names: tuple[str, ...]) -> list[Any]:
        """The globals of these names, and where one is a module, what of it is named."""
        found = []
        for value in [scope[name] for name in names if name in scope]:
            if not isinstance(value, types.ModuleType):
                found.append(value)
                continue
            root = value.__name__.split(".", 1)[0]
            self.calls.add(root)
            if root not in _TRUSTED:
                content = vars(value)
                found.extend(content[name] for name in names if name in content)
        self.calls.update(name for name in ("numpy", "random") if name in names)  # imported on the spot
        return found


# --- how each type of thing is looked at

Look = Callable[[Surroundings, Any], None]


def _nothing(_: Surroundings, __: Any) -> None:
    """Nothing in it can change."""


def _itself(found: Surroundings, thing: Any) -> None:
    """It is there; what it holds is not looked at."""
    found.hold(thing, ())


def _hidden(found: Surroundings, thing: Any) -> None:
    found.cannot_see(thing)
    found.hold(thing, ())


def _generator(found: Surroundings, thing: Any) -> None:
    if isinstance(thing, random.SystemRandom):
        found.cannot_see(thing)
    elif thing is _PYTHONS or thing is _NUMPYS:
        found.calls.add("random" if thing is _PYTHONS else "numpy")
    else:
        found.generators.append(thing)
    found.hold(thing, ())


def _array(found: Surroundings, array: np.ndarray[Any, Any]) -> None:
    if array.dtype.hasobject:
        _hidden(found, array)


def _function(found: Surroundings, function: types.FunctionType) -> None:
    if not _trusted(function.__module__):
        content = found.named(function.__globals__, _names(function.__code__))
        content.extend(function.__closure__ or ())
        extras = (function.__code__, function.__defaults__, function.__kwdefaults__, function.__dict__ or None)
        found.hold(function, (*content, *extras))


def _method(found: Surroundings, method: types.MethodType) -> None:
    found.hold(None, (method.__func__, method.__self__))  # the method itself is made anew whenever it is asked for


def _built_in(found: Surroundings, function: Any) -> None:
    root = str(getattr(function, "__module__", "")).split(".", 1)[0]
    own = function.__self__
    if own is _PYTHONS or own is _NUMPYS:
        found.calls.add("random" if own is _PYTHONS else "numpy")
    elif own is not None and not isinstance(own, types.ModuleType | type):
        found.hold(None, (own,))
    elif root and root not in _TRUSTED:
        _hidden(found, function)


def _partial(found: Surroundings, thing: functools.partial[Any]) -> None:
    found.hold(thing, (thing.func, thing.args, thing.keywords))


def _cell(found: Surroundings, cell: types.CellType) -> None:
    try:
        found.hold(cell, (cell.cell_contents,))
    except ValueError:  # it is empty
        found.hold(cell, ())


def _wrapped(found: Surroundings, thing: Any) -> None:
    found.hold(thing, (thing.__func__,))


def _property(found: Surroundings, thing: property) -> None:
    found.hold(thing, (thing.fget, thing.fset))


def _class(found: Surroundings, kind: type) -> None:
    if not _trusted(kind.__module__):
        own = tuple(value for name, value in vars(kind).items() if name not in _OF_EVERY_CLASS)
        found.hold(kind, (*own, *kind.__bases__))


def _object(found: Surroundings, thing: Any) -> None:
    """A container, or an instance: what it holds, and its class."""
    content: list[Any] = []
    known = isinstance(thing, _CONTAINERS)
    if isinstance(thing, dict):
        content.extend(dict.keys(thing))
        content.extend(dict.values(thing))
    elif known:
        content.extend(thing)
    try:
        content.extend(object.__getattribute__(thing, "__dict__").values())
        known = True
    except AttributeError:
        pass
    kind: Any = type(thing)
    for descriptor in _slots(kind):
        known = True
        try:
            content.append(descriptor.__get__(thing))
        except AttributeError:
            content.append(None)
    # what gives its values one after another, and what runs as compiled code, has a state that nobody sees
    unseen = hasattr(type(thing), "__next__") or isinstance(thing, torch.jit.ScriptModule | torch.jit.ScriptFunction)
    if not known or unseen or len(content) > MOST:
        found.cannot_see(thing)
    found.hold(thing, (*content, type(thing)) if len(content) <= MOST else ())


def _look_for(kind: type) -> Look:
    """How things of a type are looked at; asked once for each type."""
    table: list[tuple[tuple[Any, ...], Look]] = [
        ((*_PLAIN, *_DESCRIPTORS), _nothing),
        (_GENERATORS, _generator),
        ((np.random.BitGenerator,), _hidden),
        ((nn.Parameter,), _itself),
        ((Tensor,), _itself if kind is Tensor else _hidden),
        ((np.ndarray,), _array),
        ((types.FunctionType,), _function),
        ((types.MethodType,), _method),
        ((types.BuiltinFunctionType, types.MethodWrapperType), _built_in),
        ((functools.partial,), _partial),
        ((types.CellType,), _cell),
        ((staticmethod, classmethod), _wrapped),
        ((property,), _property),
        ((type,), _class),
    ]
    return next((look for kinds, look in table if issubclass(kind, kinds)), _object)


_GENERATORS = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)
_PYTHONS, _NUMPYS = random._inst, np.random.mtrand._rand
_LOOKS: dict[type, Look] = {}


@functools.lru_cache(maxsize=4096)
def _slots(kind: type) -> tuple[Any, ...]:
    found = []
    for base in kind.__mro__:
        slots = vars(base).get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            descriptor = vars(base).get(name)
            if isinstance(descriptor, types.MemberDescriptorType):
                found.append(descriptor)
    return tuple(found)


@functools.lru_cache(maxsize=4096)
def _names(code: types.CodeType) -> tuple[str, ...]:
    """Every global and every attribute that a function names, those of the functions inside of it too."""
    found = dict.fromkeys(code.co_names)
    for value in code.co_consts:
        if isinstance(value, types.CodeType):
            found |= dict.fromkeys(_names(value))
    return tuple(found)


def _trusted(module: Any) -> bool:
    return isinstance(module, str) and module.split(".", 1)[0] in _TRUSTED
