"""The losses played from their tapes: values, gradients and products, with no Python between the operations of a loss."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from bisls.tape import Play, Program, Tape

logger = logging.getLogger(__name__)

KINDS = 4  # a tape for each kind of batch (the last one of an epoch may be shorter), so many at most
CHANGES = 3  # a loss that has changed so often since it was recorded is not recorded again
BATCHED = 100_000  # many products at once must make no more numbers than this: beyond, their arithmetic is what costs
_FAILURES = (RuntimeError, TypeError, IndexError, ValueError)

Tensors = Sequence[Tensor]
Outputs = Mapping[str, Sequence[Tensor | None]]


class Outdated(Exception):
    """A tape gives other numbers than the loss does now."""


@dataclass(frozen=True, slots=True)
class _Ready:
    """What plays an output on one batch, at one x."""

    batch: Any
    play: Play
    frozen: object | None = None
    x: tuple[Any, ...] = ()


class Player:
    """Plays a loss on batches of one kind. To be used where autograd records nothing (`torch.no_grad`).

    Args:
        batch: A batch of this kind.
        tape: The loss on it, with an output ``value``.
    """

    def __init__(self, batch: Any, tape: Tape):
        self._kind, self._tape = _kind(batch), tape
        self._kept: dict[str, _Ready] = {}

    @property
    def stale(self) -> bool:
        """Whether a tensor that the loss reads beside its batch and parameters has been written to."""
        return self._tape.stale

    def fits(self, batch: Any) -> bool:
        """Whether the batch is of this kind: the same shapes, and the same of everything that is not a tensor."""
        return bool(_kind(batch) == self._kind)

    def release(self) -> None:
        """Let go of what was kept for this batch and this x."""
        self._kept.clear()


class UpperPlayer(Player):
    """Plays an upper loss.

    Args:
        compute: Returns ``value`` and ``point`` (the value, then the gradient in all parameters) at the present parameters.
        parameters: Upper and lower ones.
        batch: A batch of this kind.

    Raises:
        NotPlayable: It can't be played; the message says why.
    """

    def __init__(self, compute: Callable[[], Outputs], parameters: Tensors, batch: Any):
        super().__init__(batch, Tape(compute, [_leaves(batch), parameters]))
        self._parameters = parameters
        self._programs = {name: self._tape.program(name) for name in ("value", "point")}
        self._tape.finish()

    def play(self, name: str, batch: Any) -> tuple[Any, ...]:
        """An output at the present parameters."""
        program = self._programs[name]
        try:
            kept = self._kept.get(name)
            if kept is None or kept.batch is not batch:
                self._kept[name] = kept = _Ready(batch, program.ready(name, program.carry(0, (), _leaves(batch))))
            return kept.play(self._parameters)
        except _FAILURES as error:
            raise Outdated from error


class LowerPlayer(Player):
    """Plays a lower loss, its gradient in y and products of its second derivatives.

    Args:
        compute: Returns ``value``, ``gradient``, ``point`` (both), ``hessian``, ``mixed`` and ``mixed_transposed`` at the present
            parameters.
        x: The upper parameters.
        y: The lower parameters.
        vectors: What `compute` multiplies: tensors like y, then like x.
        batch: A batch of this kind.

    Raises:
        NotPlayable: It can't be played; the message says why.
    """

    def __init__(self, compute: Callable[[], Outputs], x: Tensors, y: Tensors, vectors: Tensors, batch: Any):
        super().__init__(batch, Tape(compute, [x, _leaves(batch), y, vectors]))
        self._x, self._n = x, len(y)
        self._programs = {name: self._tape.program(name, last=3) for name in ("value", "gradient", "point")}
        self._graph = self._tape.program("point", "hessian", "mixed", "mixed_transposed")
        self._tape.finish()

    def play(self, name: str, batch: Any, y: Tensors, frozen: object | None) -> tuple[Any, ...]:
        """An output at the present x and this y. While ``frozen`` is the same object, x is taken to be the same."""
        try:
            kept = self._kept.get(name)
            if kept is None or frozen is None or kept.frozen is not frozen:
                self._kept[name] = kept = self._ready(name, batch, frozen, self._programs[name].carry(0, (), self._x))
            elif kept.batch is not batch:
                self._kept[name] = kept = self._ready(name, batch, frozen, kept.x)
            return kept.play(y)
        except _FAILURES as error:
            raise Outdated from error

    def _ready(self, name: str, batch: Any, frozen: object | None, x: tuple[Any, ...]) -> _Ready:
        program = self._programs[name]
        return _Ready(batch, program.ready(name, program.carry(1, x, _leaves(batch))), frozen, x)

    def graph(self, batch: Any, y: Tensors) -> Played:
        """Everything at the present x and this y."""
        program = self._graph
        try:
            before = program.carry(1, program.carry(0, (), self._x), _leaves(batch))
            return Played(program, program.carry(2, before, y), self._n, self._tape.size)
        except _FAILURES as error:
            raise Outdated from error


class Played:
    """Value, gradient and products of second derivatives at one point, from a tape."""

    def __init__(self, program: Program, before: tuple[Any, ...], lower: int, size: float):
        self._size = size
        self._none: tuple[Tensor | None, ...] = (None,) * lower
        self._play = {name: program.ready(name, before) for name in ("hessian", "mixed", "mixed_transposed")}
        self.value, *self.grad = program.ready("point", before)(())

    def hessian(self, v: Tensors) -> Sequence[Tensor | None]:
        """``g_yy v``."""
        return self._product("hessian", v)

    def mixed(self, v: Tensors) -> Sequence[Tensor | None]:
        """``g_xy v``."""
        return self._product("mixed", v)

    def mixed_transposed(self, d: Tensors) -> Sequence[Tensor | None]:
        """``g_yx d``."""
        return self._product("mixed_transposed", (*self._none, *d))

    def columns(self, v: Tensors) -> Sequence[Tensor | None] | None:
        """``g_yy v`` for several v at once, along the first axis; None where one by one is as quick or the only way."""
        if len(v[0]) * self._size > BATCHED:
            return None
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("error")  # an operation without a rule for batches says so in a warning
                return torch.func.vmap(lambda *one: self._play["hessian"](one))(*v)
        except (*_FAILURES, UserWarning):
            return None

    def _product(self, name: str, inputs: Sequence[Tensor | None]) -> Sequence[Tensor | None]:
        try:
            return self._play[name](inputs)
        except _FAILURES as error:
            raise Outdated from error


P = TypeVar("P", bound=Player)


class Players(Generic[P]):
    """The tapes of a loss, one for each kind of batch, made when a kind is met.

    Args:
        name: What the loss is called in the log.
        make: Records the loss on a batch.
    """

    def __init__(self, name: str, make: Callable[[Any], P]):
        self._name, self._make = name, make
        self._players: list[P] = []
        self._last: tuple[Any, P] | None = None
        self._changes = 0
        self._on = True

    def find(self, batch: Any) -> P | None:
        """What plays the loss on this batch; None where the loss itself is to be called."""
        if not self._on:
            return None
        if self._last is not None and self._last[0] is batch:
            return self._last[1]
        found = next((player for player in self._players if player.fits(batch)), None) or self._recorded(batch)
        self._last = None if found is None else (batch, found)
        return found

    def _recorded(self, batch: Any) -> P | None:
        if len(self._players) == KINDS or not _plain(batch):
            return None
        try:
            self._players.append(self._make(batch))
        except Exception as reason:  # whatever it is: if the loss itself has failed, it will again when it is called
            logger.debug("%s is called each time: %s", self._name, reason)
            self._on = False
            return None
        return self._players[-1]

    def refresh(self) -> None:
        """Nothing of the batch and the x of before is kept, and tapes that read tensors written to since are dropped."""
        self._last = None
        for player in self._players:
            player.release()
        if any(player.stale for player in self._players):
            self.forget()

    def forget(self) -> None:
        """Drop the tapes: the loss has changed. After a few times they are not made again."""
        self._players.clear()
        self._last = None
        self._changes += 1
        if self._changes >= CHANGES:
            logger.debug("%s is called each time: it keeps changing", self._name)
            self._on = False


def _leaves(batch: Any) -> list[Tensor]:
    """The tensors of a batch, in order."""
    if isinstance(batch, Tensor):
        return [batch]
    if isinstance(batch, Mapping):
        return [leaf for value in batch.values() for leaf in _leaves(value)]
    if isinstance(batch, list | tuple):
        return [leaf for value in batch for leaf in _leaves(value)]
    return []


def _kind(batch: Any) -> Any:
    """What two batches must have in common to be played from one tape."""
    if isinstance(batch, Tensor):
        return (batch.shape, batch.dtype, batch.device, batch.requires_grad)
    if isinstance(batch, Mapping):
        return (type(batch), [(key, _kind(value)) for key, value in batch.items()])
    if isinstance(batch, list | tuple):
        return (type(batch), [_kind(value) for value in batch])
    return (type(batch), batch)


def _plain(batch: Any) -> bool:
    """Whether a batch says all of itself; any other object (an iterator, a loader) may be another one at the next call."""
    if isinstance(batch, Mapping):
        return all(_plain(value) for value in batch.values())
    if isinstance(batch, list | tuple):
        return all(_plain(value) for value in batch)
    return isinstance(batch, Tensor | int | float | str | slice | None)
