"""The one form that complaints about arguments take, and what arguments may be."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from numbers import Integral, Real
from typing import Any, NamedTuple

MOST = 2**63 - 1  # whole numbers beyond it fit nowhere: neither into tensors nor into files
EXACT = 2**53  # larger whole numbers are kept as floats where any number will do
LONG = 300  # a value whose repr is longer is shown by its type alone


class Argument(NamedTuple):
    """What a complaint is about, kept with the error as its ``argument``."""

    name: str
    shown: str
    rule: str


def require(part: Any, name: str, holds: bool, rule: str) -> None:
    """Raise a ValueError that quotes the call, the rule and what came, unless the rule holds."""
    require_argument(type(part).__name__, name, getattr(part, name), holds, rule)


def require_argument(call: str, name: str, value: Any, holds: bool, rule: str) -> None:
    """The same for an argument that is not kept as an attribute of a part."""
    if not holds:
        raise complaint(call, Argument(name, shown(value), rule))


def complaint(call: str, argument: Argument) -> ValueError:
    """The error that quotes the call, the argument and the rule."""
    error = ValueError(f"`{call}({argument.name}={argument.shown})`: {argument.name} {argument.rule}")
    error.__dict__["argument"] = argument
    return error


@contextmanager
def standing_for(call: str, inner: str = "", /, **names: str) -> Iterator[None]:
    """Within this context complaints about a part that is made here name the call, and the argument, that the user wrote.

    Args:
        call: What the user called.
        inner: The name that complaints without an argument of their own begin with.
        names: The part's argument -> the user's; those with the same name can be left out.
    """
    try:
        yield
    except ValueError as error:
        argument = error.__dict__.get("argument")
        if argument is None:
            if inner and str(error).startswith(f"`{inner}("):
                raise ValueError(f"`{call}({str(error).removeprefix(f'`{inner}(')}") from None
            raise
        own = argument._replace(name=names.get(argument.name, argument.name))
        raise complaint(call, own) from None


def shown(value: Any) -> str:
    """A value as a message shows it: its repr on one line, or its type where that is long or fails."""
    try:
        text = " ".join(repr(value).split())
    except Exception:  # a repr of the user's own
        text = ""
    return text if text and len(text) <= LONG else f"{type(value).__name__}(...)"


class Wrong(Exception):
    """The value is none of its kind; the text, if any, says why."""


@dataclass(frozen=True, eq=False)
class Wanted:
    """What an argument may be.

    Args:
        rule: The end of the sentence that begins with its name: "must be positive".
        read: The value as it is kept; raises `Wrong` where it is none of this kind.
    """

    rule: str
    read: Callable[[Any], Any]


def settled(call: str, name: str, value: Any, kind: Wanted) -> Any:
    """The value of an argument as it is kept; a ValueError that quotes the call, the rule and what came where it will not do."""
    try:
        return kind.read(value)
    except Wrong as why:
        raise complaint(call, Argument(name, shown(value), f"{kind.rule}{f'; {why}' if str(why) else ''}")) from None


def settle(part: Any, **kinds: Wanted) -> None:
    """The same for the fields of a part, frozen or not, which are then as they are kept."""
    for name, kind in kinds.items():
        value = getattr(part, name)
        kept = settled(type(part).__name__, name, value, kind)
        if kept is not value:
            object.__setattr__(part, name, kept)


def real(value: Any) -> Any:
    """A real number as Python's own; NumPy's and tensors without dimensions are numbers too, text and truth values are not."""
    if type(value) not in (int, float):
        own = value
        if getattr(value, "ndim", None) == 0 and callable(getattr(value, "item", None)) and not isinstance(value, type):
            try:
                own = value.item()
            except Exception:  # a tensor on no device has none
                raise Wrong(f"this is {_a(value)} that holds no number") from None
        if isinstance(own, bool) or not isinstance(own, Real):
            raise Wrong(f"this is {_a(value)}, not a number")
        value = int(own) if isinstance(own, Integral) else float(own)
    if isinstance(value, int) and abs(value) > EXACT:
        try:
            float(value)
        except OverflowError:
            raise Wrong("this is beyond the range of numbers") from None
    return value


@cache
def number(within: str = "(-inf, inf)", rule: str | None = None) -> Wanted:
    """A number in an interval, such as ``"(0, 1]"``; NaN is in none."""
    low, high = (float(end) for end in within[1:-1].split(","))
    above, below = within[0] == "[", within[-1] == "]"

    def read(value: Any) -> Any:
        own = real(value)
        own = float(own) if isinstance(own, int) and abs(own) > EXACT else own
        if not (low < own < high or (above and own == low) or (below and own == high)):
            raise Wrong
        return own

    return Wanted(rule or f"must lie in {within}", read)


@cache
def whole_number(least: int, rule: str | None = None, most: int = MOST) -> Wanted:
    """A whole number of at least so much."""

    def read(value: Any) -> int:
        own = real(value)
        if not isinstance(own, int):
            raise Wrong
        if own > most:
            raise Wrong(f"this is more than {'2**63 - 1' if most == MOST else most}")
        if own < least:
            raise Wrong
        return own

    return Wanted(rule or f"must be a whole number, at least {least}", read)


@cache
def optional(kind: Wanted, rule: str | None = None) -> Wanted:
    """That, or None."""
    said = rule or (kind.rule if "None" in kind.rule else f"{kind.rule}, or None")
    return Wanted(said, lambda value: None if value is None else kind.read(value))


def either(rule: str, *kinds: Wanted) -> Wanted:
    """The first of several kinds that it is."""

    def read(value: Any) -> Any:
        for kind in kinds:
            try:
                return kind.read(value)
            except Wrong:
                continue
        raise Wrong

    return Wanted(rule, read)


def iterable(value: Any) -> bool:
    """Whether it can be iterated over; arrays and tensors without dimensions only look so."""
    return isinstance(value, Iterable) and getattr(value, "ndim", 1) != 0


def several(rule: str, kind: Wanted) -> Wanted:
    """At least one of a kind, in a list or another iterable; kept as a tuple."""

    def read(value: Any) -> tuple[Any, ...]:
        if isinstance(value, str | bytes | Mapping) or not iterable(value):
            raise Wrong(f"this is {_a(value)}")
        own = tuple(kind.read(entry) for entry in value)
        if not own:
            raise Wrong
        return own

    return Wanted(rule, read)


def choice(*values: Any) -> Wanted:
    """One of these: texts, numbers or other plain values of the same type."""
    listed = [f'"{value}"' if isinstance(value, str) else str(value) for value in values]
    rule = f"must be {', '.join(listed[:-1])} or {listed[-1]}"

    def read(value: Any) -> Any:
        for own in values:
            if type(value) is type(own) and value == own:
                return own
        raise Wrong

    return Wanted(rule, read)


def instance(types: type | tuple[type, ...], rule: str) -> Wanted:
    """An object of one of these types; the type itself is none."""

    def read(value: Any) -> Any:
        if not isinstance(value, types):
            raise Wrong("this is the class; call it" if isinstance(value, type) else "")
        return value

    return Wanted(rule, read)


@cache
def function(count: int, rule: str, classes: bool = False) -> Wanted:
    """Something that can be called with so many arguments; a class only where it may be one."""

    def read(value: Any) -> Any:
        if not callable(value):
            raise Wrong(f"this is {_a(value)}")
        if isinstance(value, type) and not classes:
            raise Wrong(f"this is the class {value.__name__}; pass an instance of it, or a function")
        unfit = unbound(value, count)
        if unfit:
            raise Wrong(f"this one can't be called so ({unfit})")
        return value

    return Wanted(rule, read)


def unbound(value: Any, count: int) -> str:
    """Why a callable cannot be called with so many arguments; empty where it can, or where nobody knows."""
    try:
        signature = inspect.signature(getattr(value, "forward", value))  # a module says there what it takes
    except (TypeError, ValueError):  # a builtin without a signature
        return ""
    try:
        signature.bind(*[None] * count)
    except TypeError as error:
        return str(error)
    return ""


@cache
def having(base: Any, rule: str) -> Wanted:
    """A part: what has the methods that a base class asks for, with the base's defaults for the rest."""

    def read(value: Any) -> Any:
        if not has_methods(base, value):
            raise Wrong("this is the class; call it" if isinstance(value, type) else "")
        return adopted(base, value)

    return Wanted(rule, read)


def _flag(value: Any) -> bool:
    if isinstance(value, bool):
        return value
    # NumPy's truth values, which are no Python bools
    if type(value).__name__ in ("bool", "bool_") and type(value).__module__ == "numpy":
        return bool(value)
    raise Wrong(f"this is {_a(value)}")


def _path(value: Any) -> Any:
    if not isinstance(value, str | os.PathLike):
        raise Wrong(f"this is {_a(value)}")
    text = os.fspath(value)
    if not isinstance(text, str) or not text or "\0" in text:
        raise Wrong
    return value


def _file(value: Any) -> Any:
    if os.fspath(_path(value)).endswith((os.sep, os.altsep or os.sep)):
        raise Wrong("this ends as a folder does")
    return value


def _a(value: Any) -> str:
    if isinstance(value, type):
        return f"the class {value.__name__}"
    shape = getattr(value, "shape", None)
    size = f" of shape {tuple(shape)}" if isinstance(shape, tuple) else ""
    name = type(value).__name__
    return f"{'an' if name[:1].lower() in 'aeiou' else 'a'} {name}{size}" if value is not None else "None"


FLAG = Wanted("must be True or False", _flag)
PATH = Wanted("must name a file", _file)
FOLDER = Wanted("must name a folder", _path)
POSITIVE = number("(0, inf)", "must be positive and finite")
FINITE = number("(-inf, inf)", "must be finite")
SEED = whole_number(0, "must be a whole number, at least 0")


def whole(number: Any, least: int) -> bool:
    """Whether it is a whole number (True and False are not) of at least so much."""
    return isinstance(number, int) and not isinstance(number, bool) and least <= number <= MOST


def adopted(base: Any, part: Any) -> Any:
    """A user's own part that has what the base class asks for without inheriting from it: with the base's defaults for the rest.

    This is the one place where a part is asked what it has; everywhere else it is declared. ``adopted_from`` is the part itself.
    """
    if isinstance(part, base):
        return part
    declared = {name for name in dir(base) if not name.startswith("_")}
    own = {name: getattr(part, name) for name in sorted(declared) if hasattr(part, name)}
    methods = {name: staticmethod(value) if callable(value) else value for name, value in own.items()}
    return type(type(part).__name__, (base, Adopted), {**methods, "adopted_from": part})()


class Adopted:
    """Stands for a part that does not inherit from its base class."""

    adopted_from: Any

    def __repr__(self) -> str:
        return repr(self.adopted_from)


def has_methods(base: Any, part: Any) -> bool:
    """Whether a part has what a base class asks for: its abstract methods."""
    needed = base.__abstractmethods__
    if isinstance(part, type) or hasattr(part, "__array__"):  # arrays and tensors have methods of any name
        return False
    return all(callable(getattr(part, name, None)) for name in needed)
