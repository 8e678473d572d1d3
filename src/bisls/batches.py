"""Batches: one walk over them, however users nest them; and those that make one outer iteration."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor


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


def tensors(batch: Any) -> list[Tensor]:
    """The tensors of a batch, in order."""
    return [leaf for leaf in leaves(batch) if isinstance(leaf, Tensor)]


def kind(batch: Any) -> Any:
    """What two batches have in common if they differ only in the numbers of their tensors."""
    if isinstance(batch, Tensor):
        return (batch.shape, batch.dtype, batch.device, batch.requires_grad)
    own = children(batch)
    return (type(batch), batch if own is None else [(key, kind(value)) for key, value in own.items()])


def says_all(batch: Any, also: Sequence[type] = ()) -> bool:
    """Whether a batch is made of tensors, numbers and text, and of ``also``; any other object may hide more than it shows."""
    return all(leaf is None or isinstance(leaf, (Tensor, int, float, str, *also)) for leaf in leaves(batch))


def same(one: Any, two: Any) -> bool:
    """Whether two batches hold the same numbers: a copy of a batch is the same batch."""
    if one is two:
        return True
    if isinstance(one, Tensor) or isinstance(two, Tensor):
        alike = isinstance(one, Tensor) and isinstance(two, Tensor)
        if not alike or one.dtype != two.dtype or one.shape != two.shape:
            return False
        return one.layout == two.layout == torch.strided and torch.equal(one, two.to(one.device))
    first, second = children(one), children(two)
    if first is None or second is None:
        return first is second and _equal(one, two)
    return first.keys() == second.keys() and all(same(value, second[key]) for key, value in first.items())


def _equal(one: Any, two: Any) -> bool:
    """Whether two leaves are equal; objects that cannot say so are not."""
    if isinstance(one, np.ndarray) or isinstance(two, np.ndarray):
        alike = type(one) is type(two) and one.dtype == two.dtype
        return alike and np.array_equal(one, two)
    try:
        return bool(one == two)
    except (TypeError, ValueError, RuntimeError):
        return False


def kept(batch: Any) -> Any:
    """A batch as a checkpoint can hold it, for `restored`; None where it holds objects that can't be saved.

    Plain containers are kept as they are. Of all others only the leaves are: the next batch shows how to put them together.
    """
    if batch is None or not says_all(batch, also=(np.ndarray, np.generic)):
        return None
    own = list(leaves(batch))
    if any(isinstance(leaf, np.ndarray | np.generic) and leaf.dtype.kind not in "biuf" for leaf in own):
        return None  # text and objects in arrays
    plain = _builtin(batch) and says_all(batch) and not any(isinstance(leaf, np.generic) for leaf in own)
    return {"batch": batch} if plain else {"leaves": [_packed(leaf) for leaf in own]}


def restored(saved: Any, like: Any) -> Any:
    """What `kept` was given, in the shape of another batch where only its leaves are known; None where they do not fit."""
    if "batch" in saved:
        return saved["batch"]
    rest = [_unpacked(leaf) for leaf in saved["leaves"]]
    if len(rest) != sum(1 for _ in leaves(like)):
        return None
    return filled(like, rest)


def filled(like: Any, rest: Sequence[Any]) -> Any:
    """A batch of the same containers, with other leaves."""
    return _filled(like, iter(rest))


def _packed(leaf: Any) -> Any:
    """NumPy's arrays and numbers as tensors, which a checkpoint holds."""
    if not isinstance(leaf, np.ndarray | np.generic):
        return leaf
    numbers = np.frombuffer(np.ascontiguousarray(leaf).tobytes(), dtype=np.uint8)
    shape = list(leaf.shape) if isinstance(leaf, np.ndarray) else None
    return {"numpy": torch.from_numpy(numbers.copy()), "dtype": leaf.dtype.str, "shape": shape}


def _unpacked(leaf: Any) -> Any:
    if not isinstance(leaf, dict):
        return leaf
    array = np.frombuffer(leaf["numpy"].numpy().tobytes(), dtype=leaf["dtype"])
    return array[0] if leaf["shape"] is None else array.reshape(leaf["shape"]).copy()


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
        made = copy(like)
        made.update(filled)  # type: ignore[attr-defined]
        return made
    if isinstance(like, list | tuple):
        named = hasattr(like, "_fields")  # a namedtuple takes its entries one by one
        return type(like)(*filled.values()) if named else type(like)(filled.values())
    return replace(like, **filled)


class Minibatches(Sequence[Any]):
    """The lower batches of one outer iteration, one for each lower step, the newest last.

    A type of its own, since a single batch may well be a list.

    Args:
        batches: One for each lower step.
        several: Whether they are different batches; otherwise all steps see the same one.
    """

    def __init__(self, batches: Sequence[Any], several: bool = True):
        self._batches = list(batches)
        self.several = several and len(self._batches) > 1
        self._next = len(self._batches)

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
