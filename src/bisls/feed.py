"""Data as an endless row of batches whose place can be saved."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from bisls._check import unbound
from bisls.arrays import as_tensor, is_array, without_arrays
from bisls.batches import leaves
from bisls.generators import Generators, of_loader, samplers
from bisls.randomness import random_state, set_random_state


class Exhausted(Exception):
    """An iterator has no batch left; `taken` counts those it gave."""

    def __init__(self, call: str, taken: int):
        super().__init__(
            f"{call}: the iterator ended after {taken} batches; for more, pass a DataLoader (it begins again by itself) or "
            "an endless iterator, such as itertools.cycle(...)"
        )
        self.taken = taken


class Feed(ABC):
    """Batches, one after another; made by `feed`.

    Attributes:
        whole: Whether one batch serves every step (deterministic data).
        endless: Whether there is always another batch.
    """

    whole = False
    endless = True

    def __init__(self, data: Any, call: str):
        self.data = data
        self.call = call
        self.others = Generators(
            ()
        )  # random generators of the data's own, but for those that a loader is known to have
        self._marked: dict[str, Any] = {}
        self._told: dict[str, Any] | None = None  # the place to be told instead of the present one

    def take(self) -> Any:
        """The next batch. Raises `Exhausted` where there is none."""
        self._told = None
        return self._next()

    def mark(self) -> None:
        """Remember this place: an iteration begins."""
        self._marked = self._place()

    def back(self) -> None:
        """What was taken since `mark` has not been used, for other data have ended: `state_dict` gives the place there."""
        self._told = self._marked

    def state_dict(self) -> dict[str, Any]:
        """The place in the data: plain values and tensors."""
        return {"kind": type(self).__name__, **(self._place() if self._told is None else self._told)}

    @abstractmethod
    def _next(self) -> Any:
        """The next batch."""

    def _place(self) -> dict[str, Any]:
        """Where the data are now."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a place that `state_dict` gave. The data must be the same, and as fresh as they were then."""
        if state["kind"] != type(self).__name__:
            raise ValueError(
                f"{self.call}: the place that was saved is that of {_KINDS.get(state['kind'], state['kind'])}, these data are "
                f"{_KINDS[type(self).__name__]}; pass the same kind of data again"
            )


class _Whole(Feed):
    whole = True

    def _next(self) -> Any:
        return self.data


class _Calls(Feed):
    endless = False  # a callable may raise StopIteration

    def __init__(self, data: Any, call: str):
        super().__init__(data, call)
        self._taken = 0
        self.others = Generators(()) if _stateful(data) else Generators.of(data)

    def _next(self) -> Any:
        try:
            batch = self.data()
        except StopIteration:
            raise Exhausted(self.call, self._taken) from None
        if hasattr(type(batch), "__next__") or isinstance(batch, DataLoader):
            raise ValueError(
                f"{self.call}: the callable is called for each batch, and returned a {type(batch).__name__}; pass what it "
                "returns rather than the callable"
            )
        self._taken += 1
        return batch

    def _place(self) -> dict[str, Any]:
        own = deepcopy(self.data.state_dict()) if _stateful(self.data) else None
        return {"taken": self._taken, "own": own, "others": self.others.saved()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self._taken = state["taken"]
        if state["own"] is not None:
            self.data.load_state_dict(state["own"])
        self.others.load(state.get("others", []), self.call)


class _Stateful(Feed):
    """An iterator, or a loader, that saves its own place."""

    def __init__(self, data: Any, call: str):
        super().__init__(data, call)
        self._once = hasattr(data, "__next__")
        self.endless = not self._once
        self._iterator: Iterator[Any] | None = data if self._once else None
        self._taken = 0
        self._fresh = True  # the present pass has given no batch yet

    def _next(self) -> Any:
        for _ in range(3):  # the pass that was resumed may be at its end; the one after it must give something
            if self._iterator is None:
                self._iterator, self._fresh = iter(self.data), True
            try:
                batch = next(self._iterator)
            except StopIteration:
                if self._once:
                    raise Exhausted(self.call, self._taken) from None
                self._iterator = None
                continue
            self._taken, self._fresh = self._taken + 1, False
            return batch
        raise _empty(self.call)

    def _place(self) -> dict[str, Any]:
        return {"taken": self._taken, "begun": not self._fresh, "own": deepcopy(self.data.state_dict())}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self.data.load_state_dict(state["own"])
        self._taken = state["taken"]
        if state["begun"] and not self._once:
            # now, so that what this draws is drawn before the random state is put back
            self._iterator, self._fresh = iter(self.data), False
        # until a batch is taken: a pass that was begun may say less of itself
        self._told = {name: state[name] for name in ("taken", "begun", "own")}


class _Loader(Feed):
    """Epochs of a re-iterable, one after another. An epoch is begun again from its random state to find the place."""

    def __init__(self, data: Any, call: str):
        super().__init__(data, call)
        self._iterator: Iterator[Any] | None = None
        self._epoch = self._taken = self._total = 0
        self._start: dict[str, Any] | None = None
        self.others = Generators.of(data, without=of_loader(data))

    def _next(self) -> Any:
        for _ in range(2):
            if self._iterator is None:
                self._begin()
            assert self._iterator is not None
            try:
                batch = next(self._iterator)
            except StopIteration:
                self._ended()
                continue
            self._taken, self._total = self._taken + 1, self._total + 1
            return batch
        raise _empty(self.call)

    def _ended(self) -> None:
        if self._taken == 0:
            raise _empty(self.call)
        self._iterator, self._epoch, self._taken = None, self._epoch + 1, 0

    def _begin(self) -> None:
        own = {"generators": [own.get_state() for own in of_loader(self.data)], "others": self.others.saved()}
        self._start = {"random": random_state(), **own}
        self._iterator = self._epoch_iterator()

    def _epoch_iterator(self) -> Iterator[Any]:
        for sampler in samplers(self.data):  # DistributedSampler shuffles by the epoch it is told
            if callable(getattr(sampler, "set_epoch", None)):
                sampler.set_epoch(self._epoch)
        return iter(self.data)

    def _place(self) -> dict[str, Any]:
        return {
            "epoch": self._epoch,
            "taken": self._taken,
            "total": self._total,
            "start": self._start,
            "length": _length(self.data),
            "generators": [own.get_state() for own in of_loader(self.data)],
            "others": self.others.saved(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        own = of_loader(self.data)
        if len(own) != len(state["generators"]):
            raise ValueError(
                f"{self.call}: the loader had {len(state['generators'])} generators of its own when its place was saved, and "
                f"has {len(own)}; make it as it was made then"
            )
        if state["length"] != _length(self.data):
            raise ValueError(
                f"{self.call}: an epoch had {state['length']} batches when the place was saved, and has {_length(self.data)}; "
                "pass the same data, batch_size and drop_last"
            )
        self._epoch, self._total = state["epoch"], state["total"]
        self._taken, self._start = 0, state["start"]
        if self._start is not None:
            self._again(state["taken"])
        for generator, place in zip(own, state["generators"], strict=True):
            generator.set_state(place.cpu())
        self.others.load(state.get("others", []), self.call)

    def _again(self, taken: int) -> None:
        """Begin the epoch again from its random state, and leave out the batches that were taken."""
        assert self._start is not None
        before = random_state()
        try:
            if self._epoch and getattr(self.data, "persistent_workers", False):
                iter(self.data)  # workers that persist are started, and their seed is drawn, in the first epoch only
            set_random_state(self._start["random"])
            for generator, place in zip(of_loader(self.data), self._start["generators"], strict=True):
                generator.set_state(place.cpu())
            self.others.load(self._start.get("others", []), "")  # of the place that follows it is said
            self._iterator = self._epoch_iterator()
            for self._taken in range(1, taken + 1):
                if next(self._iterator, _NOTHING) is _NOTHING:
                    raise ValueError(
                        f"{self.call}: {taken} batches had been taken when the place was saved, but the data end after "
                        f"{self._taken - 1}; pass the same data, and a new iterator rather than one that was used"
                    )
        finally:
            set_random_state(before)


class _Iterator(_Loader):
    """An iterator: a single epoch."""

    endless = False

    def _ended(self) -> None:
        raise Exhausted(self.call, self._taken)


_NOTHING = object()
_KINDS = {
    "_Whole": "one batch for every step",
    "_Calls": "a callable",
    "_Stateful": "an iterator or a loader with a state_dict",
    "_Loader": "a loader",
    "_Iterator": "an iterator",
}


def feed(data: Any, name: str, call: str = "fit", dtype: torch.dtype | None = None) -> Feed:
    """The batches of what a user passes as data.

    Args:
        data: One of

            - a tensor, a tuple or dict of tensors, or None: one batch for every step. NumPy arrays, and the frames and series of
              pandas and polars, become tensors once, as `torch.as_tensor` makes them; floating-point numbers of theirs as
              ``dtype`` says (float64 is numpy's default, float32 torch's), tensors stay as they are;
            - a torch DataLoader, or anything else that can be iterated over again and again: its epochs one after another. The
              place is saved as the epoch and the batches taken in it, with the random state at the epoch's start; to resume,
              the epoch is begun again from that state and the taken batches are read and left out, so the order is the same
              bit for bit. (Random transforms inside ``persistent_workers`` are the exception.) A sampler with a ``set_epoch``
              is told the epoch;
            - an iterator or a loader with ``state_dict`` and ``load_state_dict`` (`bisls.tasks.Batches`, torchdata's
              ``StatefulDataLoader``): these save its place;
            - any other iterator, such as a generator: taken as it comes. To resume, pass a new one: as many batches as were
              taken are left out. A run ends where it does;
            - a callable without arguments: called for each batch. Where it has ``state_dict`` and ``load_state_dict`` these are
              saved; otherwise it resumes exactly if all that changes is random generators, the global ones or its own.

            Batches that a loader, an iterator or a callable gives go to the losses as they are. A list is refused: it may be
            one batch (a DataLoader makes lists) or a list of batches. Nor is a dataset taken, which has samples and no batches.
        name: The argument, for messages.
        call: The function, for messages.
        dtype: What floating-point numbers of arrays become; None leaves them.

    Examples:
        >>> import torch
        >>> rows = torch.utils.data.DataLoader(torch.tensor([2.0, 3.0, 5.0, 7.0]), batch_size=2)
        >>> batches = feed(rows, "upper_data")
        >>> [batches.take().tolist() for _ in range(3)]
        [[2.0, 3.0], [5.0, 7.0], [2.0, 3.0]]
        >>> feed([torch.ones(2), torch.ones(2)], "upper_data")
        Traceback (most recent call last):
        ...
        ValueError: `fit(upper_data=[...])`: a list may mean one batch or several; pass tuple(...) for one batch that serves \
every step, or itertools.cycle(...) for batches one after another
    """
    where = f"`{call}({name}={_short(data)})`"
    if data is None or isinstance(data, Tensor):
        return _Whole(data, where)
    if is_array(data):
        return _Whole(as_tensor(data, where, dtype), where)
    if isinstance(data, tuple | Mapping):
        data = without_arrays(data, where, dtype)
        wrong = _not_tensor(data)
        if wrong is not None or not data:
            kind = "tuple" if isinstance(data, tuple) else "dict"
            raise ValueError(
                f"{where}: a {kind} is one batch and must hold tensors, {f'found {wrong}' if data else 'this one is empty'}; "
                "for batches one after another pass a DataLoader, an iterator or a callable"
            )
        return _Whole(data, where)
    advice = _advice(data)
    if advice:
        raise ValueError(f"{where}: {advice}")
    if hasattr(data, "__next__") or hasattr(data, "__iter__"):
        other = _Iterator if hasattr(data, "__next__") else _Loader
        return _Stateful(data, where) if _stateful(data) else other(data, where)
    return _Calls(data, where)


def _advice(data: Any) -> str | None:
    """What to pass in place of data that cannot be used; None where they can."""
    if isinstance(data, list):
        return (
            "a list may mean one batch or several; pass tuple(...) for one batch that serves every step, or "
            "itertools.cycle(...) for batches one after another"
        )
    if isinstance(data, type):
        return "this is a class; pass an instance of it"
    if isinstance(data, Dataset):
        return "a dataset has samples, not batches; wrap it: torch.utils.data.DataLoader(dataset, batch_size=..., shuffle=True)"
    usable = "a tensor, a tuple of tensors, a DataLoader, an iterator, or a callable that returns a batch"
    if isinstance(data, str | bytes) or not (hasattr(data, "__iter__") or hasattr(data, "__next__") or callable(data)):
        return f"cannot be read as data; pass {usable}"
    if not hasattr(data, "__iter__") and not hasattr(data, "__next__"):
        unfit = unbound(data, 0)
        if unfit:
            return f"the callable must work without arguments ({unfit}); bind them: lambda: function(...)"
    return None


def _not_tensor(batch: Any) -> str | None:
    """What a batch holds beside tensors (numbers and text may lie beside them); None where it is one."""
    plain = (Tensor, int, float, str, type(None))
    return next((f"a {type(leaf).__name__}" for leaf in leaves(batch) if not isinstance(leaf, plain)), None)


def _short(data: Any) -> str:
    if data is None or isinstance(data, str | int | float | bool):
        return repr(data)
    return "[...]" if isinstance(data, list) else f"{type(data).__name__}(...)"


def _empty(call: str) -> ValueError:
    return ValueError(
        f"{call}: an epoch gave no batch; the data are empty, or drop_last=True drops a batch_size larger than the data"
    )


def _stateful(data: Any) -> bool:
    return callable(getattr(data, "state_dict", None)) and callable(getattr(data, "load_state_dict", None))


def _length(data: Any) -> int | None:
    try:
        return len(data)
    except TypeError:  # also a DataLoader over an iterable dataset
        return None
