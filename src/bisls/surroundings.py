"""What a loss can see beside its batch: generators that it may draw from.

A loss is a Python function. What it returns depends on tensors, and on whatever else it can reach: the cells it closes over, the
globals it names, the attributes of its objects. `Surroundings` walks over all that, and calls nothing of it.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import gc
import logging
import os
import random
import sys
import types
from collections import deque
from collections.abc import Callable, Sequence
from enum import Enum
from pathlib import PurePath
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from bisls.naming import TRUSTED, imports_in, names_in, root_of, trusted_name

MOST = 20_000  # things that are looked at; a container with more entries is not opened
DEEPEST = 3  # how far functions and classes of installed libraries are followed, one from the other
LARGE = 1 << 16  # bytes: a tensor that is larger is not put back
FEW = 64  # tensors that are put back

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
        cut: Whether there was more than could be looked at.
        modules: Modules of torch.

    Args:
        roots: The functions.
        trained: Tensors that are trained, whether they require grad at present or not.
    """

    def __init__(self, *roots: Any, trained: Sequence[Tensor] = ()):
        self._trained = trained
        self.generators: list[Any] = []
        self.opaque: str | None = None
        self.calls: set[str] = set()
        self.cut = False
        self.modules: list[nn.Module] = []
        self._tensors: list[Tensor] = []
        self._seen: set[int] = set()
        self._depth = 0  # how deep in installed libraries the present thing is
        self._todo: list[tuple[Any, int]] = [(root, 0) for root in roots]
        for thing, depth in self._todo:  # it grows
            self._depth = depth
            if id(thing) not in self._seen:
                self._seen.add(id(thing))
                look = _LOOKS.get(type(thing)) or _LOOKS.setdefault(type(thing), _look_for(type(thing)))
                if look is not _nothing:
                    look(self, thing)
                if len(self._seen) > MOST:
                    self.cut = True
                    self.opaque = self.opaque or f"more than {MOST:,} things"
                    break
        self._todo.clear()

    @property
    def numpy(self) -> bool:
        """Whether NumPy's global random generator may be drawn from."""
        return self.cut or self.opaque is not None or "numpy" in self.calls

    @property
    def python(self) -> bool:
        """Whether Python's global random generator may be drawn from."""
        return self.cut or self.opaque is not None or "random" in self.calls

    @functools.cached_property
    def tensors(self) -> list[Tensor]:
        """Small tensors that nobody trains, the nearest ones: a loss may keep statistics there. No views of trained ones."""
        plain = [
            own for own in self._tensors if own.layout is torch.strided and not (own.is_meta or own.is_inference())
        ]
        trained = [own for own in plain if own.requires_grad or isinstance(own, nn.Parameter)]
        memory = {own.untyped_storage().data_ptr() for own in (*trained, *self._trained)}
        small = (own for own in plain if 0 < own.nbytes <= LARGE)
        return [own for own in small if own.untyped_storage().data_ptr() not in memory][:FEW]

    def hold(self, content: tuple[Any, ...]) -> None:
        """Look at what a thing holds too."""
        self._todo.extend([(own, self._depth) for own in content])

    def enter(self, path: str) -> bool:
        """Whether what is written in a file may be followed: that of an installed library only so far."""
        if "-packages" in path and not path.startswith(_HERE):
            self._depth += 1
        if self._depth <= DEEPEST:
            return True
        self.cut = True
        self.opaque = self.opaque or "the inside of a library"
        return False

    def cannot_see(self, thing: Any) -> None:
        """Its state is hidden."""
        self.opaque = self.opaque or f"a {type(thing).__module__}.{type(thing).__qualname__}"

    def named(self, function: types.FunctionType) -> list[Any]:
        """The globals that a function names, and where one is a module, or is imported on the spot, what of it is named."""
        scope, names = function.__globals__, names_in(function.__code__)
        self.calls.update(name for name in ("numpy", "random") if name in names)
        self.cut = self.cut or "__import__" in names or "import_module" in names
        found: list[Any] = []
        modules: list[types.ModuleType] = []
        for value in (scope[name] for name in names if name in scope):
            (modules if isinstance(value, types.ModuleType) else found).append(value)
        for path in imports_in(function.__code__, scope):
            if path in sys.modules:
                modules.append(sys.modules[path])
            else:  # nobody knows what will be in it
                self.cut = True
        for module in modules:  # it grows: names may be dotted
            self.calls.add(root_of(module.__name__))
            if root_of(module.__name__) not in TRUSTED:
                content = vars(module)
                for value in (content[name] for name in names if name in content):
                    if not isinstance(value, types.ModuleType):
                        found.append(value)
                    elif not any(value is known for known in modules):
                        modules.append(value)
        return found


# --- how each type of thing is looked at

Look = Callable[[Surroundings, Any], None]


def _nothing(_: Surroundings, __: Any) -> None:
    """Nothing in it can change."""


def _tensor(found: Surroundings, tensor: Tensor) -> None:
    found._tensors.append(tensor)


def _hidden(found: Surroundings, thing: Any) -> None:
    found.cannot_see(thing)


def _generator(found: Surroundings, thing: Any) -> None:
    if isinstance(thing, random.SystemRandom):
        found.cannot_see(thing)
    elif thing is _PYTHONS or thing is _NUMPYS:
        found.calls.add("random" if thing is _PYTHONS else "numpy")
    else:
        found.generators.append(thing)


def _array(found: Surroundings, array: np.ndarray[Any, Any]) -> None:
    if array.dtype.hasobject:
        _hidden(found, array)


def _function(found: Surroundings, function: types.FunctionType) -> None:
    # by where it was written: what wraps another function has the name of the other's module
    trusted = trusted_name(function.__globals__.get("__name__"))
    if trusted and function.__closure__ is None:
        return
    if found.enter("" if trusted else function.__code__.co_filename):
        content = [] if trusted else found.named(function)
        content.extend(function.__closure__ or ())
        extras = (function.__code__, function.__defaults__, function.__kwdefaults__, function.__dict__ or None)
        found.hold((*content, *extras))


def _module(found: Surroundings, module: types.ModuleType) -> None:
    """One that an object or a closure holds: nobody knows what of it is used."""
    found.calls.add(root_of(module.__name__))
    if root_of(module.__name__) not in TRUSTED | sys.stdlib_module_names:
        found.hold(tuple(value for value in vars(module).values() if not isinstance(value, types.ModuleType)))


def _cached(found: Surroundings, function: Any) -> None:
    """A function with what it remembers."""
    found.hold(tuple(own for own in gc.get_referents(function) if own is not type(function)))


def _variable(found: Surroundings, variable: contextvars.ContextVar[Any]) -> None:
    found.hold((variable.get(None),))


def _method(found: Surroundings, method: types.MethodType) -> None:
    found.hold((method.__func__, method.__self__))


def _built_in(found: Surroundings, function: Any) -> None:
    root = str(getattr(function, "__module__", "")).split(".", 1)[0]
    own = function.__self__
    if own is _PYTHONS or own is _NUMPYS:
        found.calls.add("random" if own is _PYTHONS else "numpy")
    elif own is not None and not isinstance(own, types.ModuleType | type):
        found.hold((own,))
    elif root and root not in TRUSTED:
        _hidden(found, function)


def _partial(found: Surroundings, thing: functools.partial[Any]) -> None:
    found.hold((thing.func, thing.args, thing.keywords))


def _cell(found: Surroundings, cell: types.CellType) -> None:
    with contextlib.suppress(ValueError):  # it is empty
        found.hold((cell.cell_contents,))


def _wrapped(found: Surroundings, thing: Any) -> None:
    found.hold((thing.__func__,))


def _property(found: Surroundings, thing: property) -> None:
    found.hold((thing.fget, thing.fset))


def _class(found: Surroundings, kind: type) -> None:
    if not trusted_name(kind.__module__) and found.enter(
        getattr(sys.modules.get(kind.__module__), "__file__", "") or ""
    ):
        own = tuple(value for name, value in vars(kind).items() if name not in _OF_EVERY_CLASS)
        found.hold((*own, *kind.__bases__, type(kind)))


def _object(found: Surroundings, thing: Any) -> None:
    """A container, or an instance: what it holds, and its class."""
    content: list[Any] = []
    if thing is sys.modules:  # nobody would come to an end
        found.cut = True
        _hidden(found, thing)
        return
    if isinstance(thing, nn.Module):
        found.modules.append(thing)
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
    found.hold((*content, type(thing)) if len(content) <= MOST else ())


def _look_for(kind: type) -> Look:
    """How things of a type are looked at; asked once for each type."""
    table: list[tuple[tuple[Any, ...], Look]] = [
        ((*_PLAIN, *_DESCRIPTORS, *_TRAINERS), _nothing),
        (_GENERATORS, _generator),
        ((np.random.BitGenerator,), _hidden),
        ((nn.Parameter,), _tensor),
        ((Tensor,), _tensor if kind is Tensor else _hidden),
        ((np.ndarray,), _array),
        ((types.FunctionType,), _function),
        ((types.ModuleType,), _module),
        ((functools._lru_cache_wrapper,), _cached),
        ((contextvars.ContextVar,), _variable),
        ((types.MethodType,), _method),
        ((types.BuiltinFunctionType, types.MethodWrapperType), _built_in),
        ((functools.partial,), _partial),
        ((types.CellType,), _cell),
        ((staticmethod, classmethod), _wrapped),
        ((property,), _property),
        ((type,), _class),
    ]
    return next((look for kinds, look in table if issubclass(kind, kinds)), _object)


_HERE = os.path.dirname(__file__)
# what a closure calls to clear or scale gradients, and to say something; no loss is computed from it
_TRAINERS = (torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler, torch.amp.GradScaler, logging.Logger)
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
