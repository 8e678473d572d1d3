"""What a saved state may look like: said by the part that keeps it, checked here, before anything is loaded.

A part declares its state with kinds (`Number`, `Whole`, `Numbers`, `Fields`, ...), each of which reads what it describes and
refuses all else by its place: ``state['upper']['memory']['step'] is nan; it must be a finite number, at least 0``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import inf, isfinite, isnan
from numbers import Integral, Real
from typing import Any

import torch
from torch import Tensor

ROUNDING = 64.0  # a point is on its bounds up to so many units in the last place
COUNT = 10**15  # nothing is counted that far: a larger number was not written by a run


class Unfit(ValueError):
    """A state is not what its owner keeps; the message names the place in it, and what is wrong there."""


def read(call: str, kind: Kind, state: Any, where: str = "state") -> Any:
    """A copy of a state that is what it must be.

    Args:
        call: Who loads it, for messages.
        kind: What it must be.
        state: What came.
        where: The name of the state in messages.

    Raises:
        ValueError: It is something else.
    """
    try:
        return kind.read(state, where)
    except Unfit as error:
        raise ValueError(f"{call}: {error}; nothing was loaded") from None


class Kind(ABC):
    """What one place of a state may hold."""

    @abstractmethod
    def read(self, value: Any, where: str) -> Any:
        """A copy of the value, or `Unfit` where it is of another kind."""


@dataclass(frozen=True)
class Number(Kind):
    """A number.

    Args:
        least: The smallest that it may be.
        most: The largest.
        above: Whether ``least`` itself is too small.
        infinite: Whether it may be infinite.
        any_value: Whether every number will do, NaN as well.
    """

    least: float = -inf
    most: float = inf
    above: bool = False
    infinite: bool = False
    any_value: bool = False

    def read(self, value: Any, where: str) -> float:
        """The number as a float."""
        number = isinstance(value, Real) and not isinstance(value, bool)
        try:
            own = float(value) if number else inf
        except OverflowError:
            own, number = inf, False
        if not number or not (self.any_value or self._within(own)):
            raise Unfit(f"{where} is {shown(value)}; it must be {self}")
        return own

    def _within(self, own: float) -> bool:
        if isnan(own) or not (self.infinite or isfinite(own)):
            return False
        return self.least <= own <= self.most and not (self.above and own == self.least)

    def __str__(self) -> str:
        if self.any_value:
            return "a number"
        low = "" if self.least == -inf else f", {'above' if self.above else 'at least'} {self.least:g}"
        high = "" if self.most == inf else f", at most {self.most:g}"
        return f"a {'' if self.infinite else 'finite '}number{low}{high}"


@dataclass(frozen=True)
class Whole(Kind):
    """A whole number from ``least`` to ``most``."""

    least: int = 0
    most: int = COUNT

    def read(self, value: Any, where: str) -> int:
        """The number as an int."""
        if not isinstance(value, Integral) or isinstance(value, bool) or not self.least <= int(value) <= self.most:
            raise Unfit(f"{where} is {shown(value)}; it must be a whole number from {self.least} to {self.most}")
        return int(value)


@dataclass(frozen=True)
class Choice(Kind):
    """One of a few values, of the very same type."""

    values: tuple[Any, ...]

    def read(self, value: Any, where: str) -> Any:
        """The value."""
        if not any(type(value) is type(own) and value == own for own in self.values):
            raise Unfit(f"{where} is {shown(value)}; it must be {' or '.join(map(repr, self.values))}")
        return value


FLAG = Choice((True, False))


@dataclass(frozen=True)
class Numbers(Kind):
    """A tensor of real numbers, none of them NaN.

    Args:
        shape: Its shape; a pair stands for a length from the one to the other, None for any. None in place of all leaves the
            shape open.
        dtypes: What its dtype may be; none given allows every real floating one, or all with ``any_value``.
        least: The smallest that any of them may be.
        most: The largest.
        infinite: Whether they may be infinite.
        any_value: Whether all values will do, NaN as well: data, and buffers of the user's own.
        device: Where it is to lie; None leaves it where it is.
        wrong: Says what else is wrong with it; empty where nothing is.
    """

    shape: tuple[int | tuple[int, int] | None, ...] | None = None
    dtypes: tuple[torch.dtype, ...] = ()
    least: float = -inf
    most: float = inf
    infinite: bool = False
    any_value: bool = False
    device: torch.device | None = None
    wrong: Callable[[Tensor], str] | None = None

    @classmethod
    def like(cls, tensor: Tensor) -> Numbers:
        """Any values in the form of a tensor."""
        return cls(tuple(tensor.shape), (tensor.dtype,), any_value=True)

    def read(self, value: Any, where: str) -> Tensor:
        """A copy without a graph."""
        if not isinstance(value, Tensor) or value.layout is not torch.strided or value.is_meta:
            raise Unfit(f"{where} is {shown(value)}; it must be a tensor{self._shape()}")
        real = value.dtype.is_floating_point or self.any_value
        if value.dtype not in self.dtypes and (self.dtypes or not real):
            wanted = (
                " or ".join(str(own).removeprefix("torch.") for own in self.dtypes) or "real floating-point numbers"
            )
            raise Unfit(f"{where} is {shown(value)}; it must hold {wanted}")
        if not self._fits(value.shape):
            raise Unfit(f"{where} is {shown(value)}; it must be a tensor{self._shape()}")
        own = value.detach()
        if not self.any_value:
            self._look(own, where)
        return own.clone() if self.device is None else own.to(self.device, copy=True)

    def _look(self, own: Tensor, where: str) -> None:
        if own.is_floating_point():
            bad = torch.isnan(own) if self.infinite else ~torch.isfinite(own)
            if bool(bad.any()):
                raise Unfit(f"{where} holds values that are not {'numbers' if self.infinite else 'finite'}")
        if own.numel() and (own.min().item() < self.least or own.max().item() > self.most):
            limits = [f"at least {self.least:g}"] if self.least > -inf else []
            limits += [f"at most {self.most:g}"] if self.most < inf else []
            raise Unfit(f"{where} holds values out of range; they must be {' and '.join(limits)}")
        wrong = self.wrong(own) if self.wrong else ""
        if wrong:
            raise Unfit(f"{where} {wrong}")

    def _fits(self, shape: Sequence[int]) -> bool:
        if self.shape is None:
            return True

        def fits(now: int, wanted: int | tuple[int, int] | None) -> bool:
            if isinstance(wanted, tuple):
                return wanted[0] <= now <= wanted[1]
            return wanted is None or now == wanted

        return len(shape) == len(self.shape) and all(map(fits, shape, self.shape))

    def _shape(self) -> str:
        if self.shape is None:
            return ""
        sizes = [
            f"{own[0]} to {own[1]}" if isinstance(own, tuple) else "any" if own is None else str(own)
            for own in self.shape
        ]
        return f" of shape ({', '.join(sizes)}{',' if len(sizes) == 1 else ''})"


@dataclass(frozen=True)
class Row(Kind):
    """A few numbers of different kinds, kept as one tensor in double precision.

    Args:
        kinds: What each of them may be, by name.
    """

    kinds: Mapping[str, Number]

    def read(self, value: Any, where: str) -> Tensor:
        """A copy."""
        own = Numbers((len(self.kinds),), (torch.float64,), any_value=True).read(value, where)
        for (name, kind), number in zip(self.kinds.items(), own.tolist(), strict=True):
            kind.read(number, f"{where} ({name})")
        return own


@dataclass(frozen=True)
class Maybe(Kind):
    """What it says, or None."""

    kind: Kind

    def read(self, value: Any, where: str) -> Any:
        """None, or what the kind reads."""
        return None if value is None else self.kind.read(value, where)


@dataclass(frozen=True)
class Each(Kind):
    """A list: one kind for all of its entries, or one for each.

    Args:
        kinds: A kind, or a sequence of as many kinds as there are entries.
    """

    kinds: Kind | Sequence[Kind]

    def read(self, value: Any, where: str) -> list[Any]:
        """The list."""
        if not isinstance(value, list | tuple):
            raise Unfit(f"{where} is {shown(value)}; it must be a list")
        kinds = [self.kinds] * len(value) if isinstance(self.kinds, Kind) else list(self.kinds)
        if len(value) != len(kinds):
            raise Unfit(f"{where} has {len(value)} entries; it must have {len(kinds)}")
        return [kind.read(own, f"{where}[{i}]") for i, (kind, own) in enumerate(zip(kinds, value, strict=True))]


@dataclass(frozen=True)
class Free(Kind):
    """What its owner has not described: numbers, text, None, tensors, and lists and mappings of these."""

    def read(self, value: Any, where: str) -> Any:
        """A copy, tensors without their graphs."""
        if isinstance(value, Tensor):
            return value.detach().clone()
        if isinstance(value, Mapping):
            return {name: self.read(own, f"{where}[{name!r}]") for name, own in value.items()}
        if isinstance(value, list | tuple):
            entries = [self.read(own, f"{where}[{i}]") for i, own in enumerate(value)]
            return entries if isinstance(value, list) else tuple(entries)
        if value is not None and not isinstance(value, str | Real | torch.dtype):
            raise Unfit(f"{where} is {shown(value)}; it must be a number, text, a tensor, or a mapping of these")
        return value


class Anything(Kind):
    """What nobody here reads."""

    def read(self, value: Any, where: str) -> Any:
        """The value itself."""
        return value


class Batch(Kind):
    """A batch as `bisls.batches.kept` gives it, with what `described` says of it: data, whose numbers may be any."""

    @staticmethod
    def packed(batch: Any) -> Any:
        """The batch together with its description, so that another one in its place is noticed."""
        return None if batch is None else {**batch, "like": described(batch)}

    def read(self, value: Any, where: str) -> Any:
        """The batch without the description."""
        if value is None:
            return None
        if not isinstance(value, Mapping) or not ("batch" in value or isinstance(value.get("leaves"), list | tuple)):
            raise Unfit(f"{where} is {shown(value)}; it must be a batch as state_dict() gives it")
        batch = {name: own for name, own in value.items() if name != "like"}
        if "like" in value and value["like"] != described(batch):
            raise Unfit(f"{where} is another batch than it says")
        return batch


@dataclass(frozen=True)
class Fields(Kind):
    """A mapping of names to what stands under them.

    Args:
        needed: The names that must be there.
        optional: Those that may be.
        empty: Whether the mapping may be empty, although names are needed: the state of a part that was never asked.
        rest: What may stand under any other name; None allows no other.
    """

    needed: Mapping[str, Kind] = field(default_factory=dict)
    optional: Mapping[str, Kind] = field(default_factory=dict)
    empty: bool = False
    rest: Kind | None = None

    def read(self, value: Any, where: str) -> dict[str, Any]:
        """The mapping, in the order in which it came."""
        if not isinstance(value, Mapping):
            raise Unfit(f"{where} is {shown(value)}; it must be a mapping of names")
        if not value and self.empty:
            return {}
        lacks = [name for name in self.needed if name not in value]
        if lacks:
            raise Unfit(f"{where} lacks {', '.join(lacks)}")
        known, found = {**self.needed, **self.optional}, {}
        for name, own in value.items():
            kind = known.get(name, self.rest) if isinstance(name, str) else None
            if kind is None:
                raise Unfit(f"{where} has {shown(name)}, which is not kept here")
            found[name] = kind.read(own, f"{where}[{name!r}]")
        return found

    def more(self, **kinds: Kind) -> Fields:
        """With further names that may be there."""
        return replace(self, optional={**self.optional, **kinds})


FREE = Fields(rest=Free())  # the state of a part that does not say what it looks like


def flat(vector: Any = None, **limits: Any) -> Numbers:
    """A finite flat vector like that of some parameters, a `bisls.vector.Vector`; None where they are not known."""
    if vector is None:
        return Numbers((None,), **limits)
    return Numbers((vector.numel,), **{"dtypes": (vector.dtype,), "device": vector.device, **limits})


def point(vector: Any, bounds: Any = None) -> Numbers:
    """A flat vector that is written into parameters as it is: they can hold it, and it lies within their bounds."""

    def wrong(own: Tensor) -> str:
        if not vector.holds(own):
            return "has numbers that the parameters cannot hold"
        if bounds is None:
            return ""
        away = (bounds.project(own, vector) - own).abs()
        rounding = ROUNDING * torch.finfo(own.dtype).eps * own.abs().max()  # a projection may not be exact
        return "lies outside the bounds that it has here" if bool((away > rounding).any()) else ""

    return flat(vector, wrong=wrong)


def counter(least: int = 1) -> Numbers:
    """A count that is kept as a tensor."""
    return Numbers((), (torch.int64,), least=least, most=COUNT)


def described(value: Any) -> list[str]:
    """The leaves of a nested value in words: shapes and dtypes of tensors, types of all else."""
    if isinstance(value, Tensor):
        layout = "" if value.layout is torch.strided else f" {value.layout}"
        return [
            f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}{layout}{' meta' if value.is_meta else ''}"
        ]
    if isinstance(value, Mapping):
        return [text for name, own in value.items() for text in (f"{name!r}:", *described(own))]
    if isinstance(value, list | tuple):
        return [f"{len(value)} entries:", *(text for own in value for text in described(own))]
    return [type(value).__name__]


def shown(value: Any) -> str:
    """A value in a message, short."""
    if isinstance(value, Tensor):
        return f"a tensor, {' '.join(described(value))}"
    if value is None or isinstance(value, str | Real):
        text = repr(value)
        return text if len(text) <= 40 else f"{text[:40]}..."
    return f"a {type(value).__name__}"
