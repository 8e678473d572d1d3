"""Batches: one walk over them, however users nest them; and those that make one outer iteration."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from copy import copy
from dataclasses import dataclass, fields, is_dataclass
from typing import Any
from zlib import crc32

import numpy as np
import torch
from torch import Tensor, nn

logger = logging.getLogger(__name__)


def children(batch: Any) -> dict[Any, Any] | None:
    """What a container holds, by key, index or field; None where it is none, so a leaf."""
    if isinstance(batch, Mapping):
        return dict(batch)
    if isinstance(batch, list | tuple):
        return dict(enumerate(batch))
    if is_dataclass(batch) and not isinstance(batch, type):
        return {field.name: getattr(batch, field.name) for field in fields(batch)}
    return None


def leaves(batch: Any) -> Iterator[Any]:
    """All that is no container, in order."""
    own = children(batch)
    if own is None:
        yield batch
    else:
        for value in own.values():
            yield from leaves(value)


def same(one: Any, two: Any) -> bool:
    """Whether two batches hold the same numbers: a copy of a batch is the same batch, and NaN is the same as NaN.

    A batch that was read from a file is never the very object that it was, so that the same object says no more than its numbers.
    """
    if one is two:
        return True
    if isinstance(one, Tensor) or isinstance(two, Tensor):
        return isinstance(one, Tensor) and isinstance(two, Tensor) and _same_tensors(one, two)
    first, second = children(one), children(two)
    if first is None or second is None:
        return first is second and _equal(one, two)
    return first.keys() == second.keys() and all(same(value, second[key]) for key, value in first.items())


def _same_tensors(one: Tensor, two: Tensor) -> bool:
    if not (_dense(one) and _dense(two)) or one.dtype != two.dtype or one.shape != two.shape:
        return False
    two = two.to(one.device)
    if torch.equal(one, two):
        return True
    numbers = one.is_floating_point() or one.is_complex()
    return numbers and bool(((one == two) | (one.isnan() & two.isnan())).all())


def _dense(tensor: Tensor) -> bool:
    """Whether it is a plain tensor, whose numbers lie in its memory as they are."""
    plain = tensor.layout is torch.strided and not (tensor.is_nested or tensor.is_quantized or tensor.is_meta)
    return plain and type(tensor) in (Tensor, nn.Parameter)


def _equal(one: Any, two: Any) -> bool:
    """Whether two leaves are equal; objects that cannot say so are not."""
    try:
        if isinstance(one, np.ndarray | np.generic):
            alike = type(one) is type(two) and one.dtype == two.dtype and one.shape == two.shape
            return alike and (bool(np.all(one == two)) or (not one.dtype.hasobject and one.tobytes() == two.tobytes()))
        if isinstance(one, float | complex) and one != one:
            return type(one) is type(two) and two != two
        return bool(one == two)
    except Exception:  # what they raise is their own affair
        return False


def fingerprint(batch: Any) -> int:
    """A number that batches of other numbers hardly ever share; 0 where a batch holds what has none."""
    found = 1
    for leaf in leaves(batch):
        if isinstance(leaf, Tensor):
            if not _dense(leaf):
                return 0
            leaf = leaf.detach().cpu().contiguous().flatten().view(torch.uint8).numpy()
        elif not isinstance(leaf, np.ndarray):
            leaf = repr(leaf).encode()
        try:
            found = crc32(leaf, found)
        except (TypeError, ValueError):
            return 0
    return found or 1


def kept(batch: Any) -> Any:
    """A batch as a checkpoint can hold it, for `restored`; None where it holds objects that can't be saved.

    Plain containers are kept as they are. Of all others only the leaves are: the next batch shows how to put them together.
    """
    own = list(leaves(batch))
    if batch is None or not all(map(_keepable, own)):
        return None
    if _builtin(batch) and all(leaf is None or isinstance(leaf, Tensor | int | float | str) for leaf in own):
        return {"batch": batch}
    try:
        filled(batch, own)
    except Exception:  # a container that nobody else can fill
        return None
    return {"leaves": [_packed(leaf) for leaf in own]}


def restored(saved: Any, like: Any) -> Any:
    """What `kept` was given, in the shape of another batch where only its leaves are known; None where they do not fit."""
    if "batch" in saved:
        return saved["batch"]
    try:
        rest = [_unpacked(leaf) for leaf in saved["leaves"]]
        return filled(like, rest) if len(rest) == sum(1 for _ in leaves(like)) else None
    except Exception as error:
        logger.warning(
            "the upper batch that was saved can't be put together again (%s); this step is judged on its own", error
        )
        return None


def filled(like: Any, rest: Sequence[Any]) -> Any:
    """A batch of the same containers, with other leaves."""
    return _filled(like, iter(rest))


# what is no number, text or tensor and can be saved all the same: the type, into something plain, and back
_PACKS: dict[type, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {
    bytes: (lambda leaf: _as_tensor(leaf), lambda own: own.numpy().tobytes()),
    complex: (lambda leaf: [leaf.real, leaf.imag], lambda own: complex(*own)),
    slice: (lambda leaf: [leaf.start, leaf.stop, leaf.step], lambda own: slice(*own)),
    range: (lambda leaf: [leaf.start, leaf.stop, leaf.step], lambda own: range(*own)),
    set: (list, set),
    frozenset: (list, frozenset),
    torch.dtype: (lambda leaf: leaf, lambda own: own),
    torch.device: (str, torch.device),
}


def _keepable(leaf: Any) -> bool:
    if isinstance(leaf, Tensor):
        return _dense(leaf)
    if isinstance(leaf, np.ndarray | np.generic):
        return leaf.dtype.kind in "biufcSUmM"  # no objects
    if isinstance(leaf, slice | set | frozenset):
        parts = [leaf.start, leaf.stop, leaf.step] if isinstance(leaf, slice) else leaf
        return all(part is None or isinstance(part, int | float | str) for part in parts)
    return leaf is None or isinstance(leaf, int | float | str) or type(leaf) in _PACKS


def _packed(leaf: Any) -> Any:
    """What a checkpoint holds in place of a leaf."""
    if isinstance(leaf, np.ndarray | np.generic):
        shape = list(leaf.shape) if isinstance(leaf, np.ndarray) else None
        return {"numpy": _as_tensor(np.ascontiguousarray(leaf).tobytes()), "dtype": leaf.dtype.str, "shape": shape}
    if type(leaf) in _PACKS:
        return {"type": type(leaf).__name__, "own": _PACKS[type(leaf)][0](leaf)}
    return leaf


def _unpacked(leaf: Any) -> Any:
    if not isinstance(leaf, dict):
        return leaf
    if "type" in leaf:
        return next(back for kind, (_, back) in _PACKS.items() if kind.__name__ == leaf["type"])(leaf["own"])
    array = np.frombuffer(leaf["numpy"].numpy().tobytes(), dtype=leaf["dtype"])
    return array[0] if leaf["shape"] is None else array.reshape(leaf["shape"]).copy()


def _as_tensor(content: bytes) -> Tensor:
    return torch.from_numpy(np.frombuffer(content, dtype=np.uint8).copy())


def _builtin(batch: Any) -> bool:
    own = children(batch)
    if own is None:
        return True
    keys = type(batch) is not dict or all(isinstance(key, str | int) for key in own)
    return type(batch) in (dict, list, tuple) and keys and all(_builtin(value) for value in own.values())


def _filled(like: Any, rest: Iterator[Any]) -> Any:
    own = children(like)
    if own is None:
        return next(rest)
    filled = {key: _filled(value, rest) for key, value in own.items()}
    if isinstance(like, Mapping):
        return _mapping(like, own, filled)
    if isinstance(like, list | tuple):
        named = hasattr(like, "_fields")  # a namedtuple takes its entries one by one
        return type(like)(*filled.values()) if named else type(like)(filled.values())
    made = copy(like)
    for name, value in filled.items():
        object.__setattr__(made, name, value)  # what is frozen, or worked out when it is made, too
    return made


def _mapping(like: Any, own: dict[Any, Any], filled: dict[Any, Any]) -> Any:
    """A mapping of the same type: a copy with other entries or, where it can't be changed, a new one."""

    def holds(mapping: Any, wanted: dict[Any, Any]) -> bool:
        now = dict(mapping)
        return now.keys() == wanted.keys() and all(now[key] is value for key, value in wanted.items())

    with suppress(Exception):
        made = copy(like)
        for name, value in getattr(made, "__dict__", {}).items():
            if isinstance(value, dict) and getattr(like, "__dict__", {}).get(name) is value:
                made.__dict__[name] = copy(value)  # what it keeps its entries in is its own
        made.update(filled)
        if holds(like, own) and holds(made, filled):
            return made
    if not holds(like, own):
        like.update(own)
    made = type(like)(filled)
    if not holds(made, filled):
        raise TypeError(f"a {type(like).__name__} does not hold what it is given")
    return made


class Minibatches(Sequence[Any]):
    """The lower batches of one outer iteration, one for each lower step, the newest last.

    A type of its own, since a single batch may well be a list.

    Args:
        batches: One for each lower step.
        several: Whether they are different batches; otherwise all steps see the same one.

    Attributes:
        steady: Whether that one is also the batch of the iteration before, as the upper one is: then nothing is noise.
    """

    def __init__(self, batches: Sequence[Any], several: bool = True):
        self._batches = list(batches)
        self.several = several and len(self._batches) > 1
        self._next = len(self._batches)
        self.steady = False

    @classmethod
    def repeated(cls, batch: Any, times: int) -> Minibatches:
        """One batch for every step."""
        return cls([batch] * times, several=False)

    def __len__(self) -> int:
        return len(self._batches)

    def __getitem__(self, index: Any) -> Any:
        return self._batches[index]

    def __iter__(self) -> Iterator[Any]:
        return iter(self._batches)

    @property
    def newest(self) -> Any:
        """The batch of the last step."""
        return self._batches[-1]

    def fresh(self) -> Any:
        """Another of the batches, the newest first, and from the newest again when all were given."""
        self._next = (self._next - 1) % len(self._batches)
        return self._batches[self._next]


class Stream:
    """Batches from an iterator, each one fresh. Has what methods ask of `Minibatches`."""

    several = True

    def __init__(self, iterator: Iterator[Any]):
        self._iterator = iterator

    def __len__(self) -> int:
        return 1  # how many there are is not known; one at a time is what it is for

    def fresh(self) -> Any:
        """The next one."""
        try:
            return next(self._iterator)
        except StopIteration:
            raise ValueError(
                "`lower_batch`: the iterator ran out of batches; give one that goes on (itertools.cycle), or a single batch"
            ) from None


def supply(lower_batch: Any) -> Minibatches | Stream:
    """Where a hypergradient takes its lower batches from: several, an iterator of them, or one for all."""
    if isinstance(lower_batch, Minibatches):
        return lower_batch
    return Stream(lower_batch) if isinstance(lower_batch, Iterator) else Minibatches([lower_batch])


@dataclass(frozen=True)
class Sample:
    """All the data of one outer iteration.

    Attributes:
        upper: The upper batch, on which the hypergradient is taken.
        lower: The lower batches, one for each lower step.
        judge: An upper batch that judges the step, independent of ``upper``; None where there is none.
        judged: Whether there is a judge; with several processes, on any of them.
        more: The lower batches with those that no lower step sees, which come first; None where there are none.
    """

    upper: Any
    lower: Minibatches
    judge: Any = None
    judged: bool = False
    more: Minibatches | None = None

    def estimating(self, several: bool) -> Any:
        """What a hypergradient is given of the lower data: the newest batch, or several to draw from."""
        return (self.more or self.lower) if several else self.lower.newest

    @property
    def judging(self) -> Any:
        """The upper batch along whose loss the step is chosen."""
        return self.judge if self.judged and self.judge is not None else self.upper
