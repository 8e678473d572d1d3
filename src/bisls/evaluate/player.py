"""Losses played from their tapes: values, gradients and products, with no Python between the operations of a loss."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from bisls.batches import kind, says_all, tensors
from bisls.evaluate.autograd import (
    CalledLower,
    CalledUpper,
    Graph,
    lower_by_autograd,
    requiring_grad,
    scalar,
    upper_by_autograd,
)
from bisls.evaluate.base import Evaluated, LowerLoss, Outdated, Parts, Products, UpperLoss, unit_vectors
from bisls.evaluate.program import NotPlayable, Play, Program, same_bits
from bisls.evaluate.tape import Tape
from bisls.problem import Bilevel
from bisls.still import Moment, without_grad
from bisls.surroundings import Surroundings
from bisls.vector import Vector

logger = logging.getLogger(__name__)

KINDS = 4  # a tape for each kind of batch (the last one of an epoch may be shorter), so many at most
CHANGES = 3  # a loss that has changed so often since it was recorded is not recorded again
_FAILURES = (RuntimeError, TypeError, IndexError, ValueError)

_PRODUCTS = ("mixed", "hessian", "mixed_transposed")

Outputs = Mapping[str, Parts]


@dataclass(frozen=True, slots=True)
class _Ready:
    """What plays an output on one batch, at one x."""

    batch: Any
    play: Play
    held: object | None = None
    x: tuple[Any, ...] = ()


class Player(ABC):
    """Plays a loss on batches of one kind. To be used where autograd records nothing (`torch.no_grad`).

    There is a tape for each way in which a loss is evaluated, recorded while it is evaluated in just that way, since torch has
    other operations for a value alone, for a gradient and for a gradient that will be differentiated.

    Args:
        problem: Whose losses these are.
        batch: A batch of this kind.

    Raises:
        NotPlayable: It can't be played, or not with the same numbers to the last bit; the message says why.
    """

    def __init__(self, problem: Bilevel, batch: Any):
        self._problem, self._kind = problem, kind(batch)
        self._tapes: list[Tape] = []
        self._kept: dict[str, _Ready] = {}
        with problem.probing():
            before, moment = Surroundings(problem.upper_loss, problem.lower_loss), problem.moment()
            if before.opaque is not None:
                raise NotPlayable(f"it can reach {before.opaque}, whose state can't be seen")
            if before.shares((*problem.x.tensors, *problem.y.tensors)):
                raise NotPlayable("it can read a parameter's memory as an array, which no operation shows")
            self._record(batch)
            for tape in self._tapes:
                tape.finish()
            if not self.agrees(batch, at_first=True):
                raise NotPlayable("it gives other numbers when it is called again")
            if moment.passed:
                raise NotPlayable("it draws random numbers")
            if not before.same(Surroundings(problem.upper_loss, problem.lower_loss)):
                raise NotPlayable("it changes something that outlives the call")

    @abstractmethod
    def _record(self, batch: Any) -> None:
        """Make the tapes and the programs."""

    @abstractmethod
    def agrees(self, batch: Any, at_first: bool = False) -> bool:
        """Whether it gives what the loss itself gives at the present point, to the last bit.

        Compared are gradients and products, at first everything. The loss is called as a probe.
        """

    @property
    def stale(self) -> bool:
        """Whether a tensor that the loss reads beside its batch and parameters has been written to."""
        return any(tape.stale for tape in self._tapes)

    def fits(self, batch: Any) -> bool:
        """Whether the batch is of this kind: the same shapes, and the same of everything that is not a tensor."""
        return bool(kind(batch) == self._kind)

    def release(self) -> None:
        """Let go of what was kept for this batch and this x."""
        self._kept.clear()

    def _taped(
        self, compute: Callable[[], Outputs], inputs: Sequence[Sequence[Tensor]], batched: Callable[[], Outputs] = dict
    ) -> Tape:
        self._tapes.append(Tape(compute, inputs, batched))
        return self._tapes[-1]


class PlayedUpper(Player, UpperLoss):
    """The upper loss, from its tapes."""

    def _record(self, batch: Any) -> None:
        problem = self._problem
        self._parameters = [*problem.x.tensors, *problem.y.tensors]

        def value() -> Outputs:
            return {"value": [scalar("upper_loss", without_grad(lambda: problem.upper_loss(batch)))]}

        def point() -> Outputs:
            loss, parts = upper_by_autograd(problem, batch, recorded=True)
            return {"point": [loss, *parts]}

        inputs = [tensors(batch), self._parameters]
        self._programs = {
            name: self._taped(compute, inputs).program(name) for name, compute in (("value", value), ("point", point))
        }

    def agrees(self, batch: Any, at_first: bool = False) -> bool:
        """Value and gradient; at first also the value alone."""
        called = CalledUpper(self._problem)
        with self._problem.probing():
            mine, own = self.point(batch), called.point(batch)
            same = same_bits([mine.value(), *mine.grad], [own.value(), *own.grad])
            return same and (not at_first or same_bits([self.value(batch, None)], [called.value(batch, None)]))

    def value(self, batch: Any, replay: Moment | None) -> Tensor:
        """f; nothing is drawn, so there is nothing to replay."""
        return _first(self._play("value", batch))

    def point(self, batch: Any) -> Evaluated:
        """f and its gradient in all parameters."""
        moment = self._problem.moment()
        value, *parts = self._play("point", batch)
        return Evaluated(lambda: value, parts, moment)

    def _play(self, name: str, batch: Any) -> tuple[Any, ...]:
        program = self._programs[name]
        try:
            kept = self._kept.get(name)
            if kept is None or kept.batch is not batch:
                self._kept[name] = kept = _Ready(batch, program.ready(name, program.carry(0, (), tensors(batch))))
            return kept.play(self._parameters)
        except _FAILURES as error:
            raise Outdated from error


class PlayedLower(Player, LowerLoss):
    """The lower loss, its gradient in y and products of its second derivatives, from their tapes."""

    def _record(self, batch: Any) -> None:
        problem = self._problem
        x, y = problem.x.tensors, problem.y.tensors
        v, d = _direction(problem.y), _direction(problem.x)
        self._directions = {"mixed": v, "hessian": v, "mixed_transposed": d}
        self._turn = 0
        units = unit_vectors(problem.y) or []
        graphs: list[Graph] = []

        def value() -> Outputs:
            return {"value": [scalar("lower_loss", without_grad(lambda: problem.lower_loss(batch)))]}

        def point() -> Outputs:
            loss, parts = lower_by_autograd(problem, batch, recorded=True)
            return {"point_value": [loss], "gradient": parts, "point": [loss, *parts]}

        def graph() -> Outputs:
            made = Graph(problem, batch, recorded=True)
            graphs.append(made)
            products = {
                "hessian": made.hessian(v),
                "mixed": made.mixed(v),
                "mixed_transposed": made.mixed_transposed(d),
            }
            return {"point": [made.value, *made.grad], **products}

        def columns() -> Outputs:
            # recorded as torch itself runs the batched call, so that it plays what a called loss gives
            found = graphs[0].together(units) if units else None
            return {} if found is None else {"columns": found}

        self._programs: dict[str, Program] = {}
        for compute in (value, point):
            tape = self._taped(compute, [x, tensors(batch), y])
            self._programs |= {name: tape.program(name) for name in tape.names}
        with requiring_grad(x, True):
            tape = self._taped(graph, [x, tensors(batch), y, [*v, *d, *units]], columns)
        self._graph = tape.program(*tape.names)

    def agrees(self, batch: Any, at_first: bool = False) -> bool:
        """Value, gradient and a product, of another kind each time; at first all products, and the value and gradient alone."""
        problem, called = self._problem, CalledLower(self._problem)
        self._turn = (self._turn + 1) % len(_PRODUCTS)
        with problem.probing(), requiring_grad(problem.x.tensors, True):
            mine, own = self.graph(batch, None), called.graph(batch, None)
            same = same_bits([mine.value, *mine.grad], [own.value, *own.grad])
            for name in _PRODUCTS if at_first else _PRODUCTS[self._turn :][:1]:
                direction = self._directions[name]
                same = same and same_bits(getattr(mine, name)(direction), getattr(own, name)(direction))
            if same and at_first:
                units = unit_vectors(problem.y)
                one, two = self.point(batch, None, None, None), called.point(batch, None, None, None)
                same = (
                    same_bits([self.value(batch, None, None, None)], [called.value(batch, None, None, None)])
                    and same_bits([one.value(), *one.grad], [two.value(), *two.grad])
                    and same_bits(self._play("point_value", batch, problem.y.tensors, None), [two.value()])
                    and (units is None or same_bits(mine.columns(units), own.columns(units)))
                )
            return same

    def value(self, batch: Any, y: Tensor | None, replay: Moment | None, held: object | None) -> Tensor:
        """g; nothing is drawn, so there is nothing to replay."""
        return _first(self._play("value", batch, self._parts(y), held))

    def point(self, batch: Any, y: Tensor | None, replay: Moment | None, held: object | None) -> Evaluated:
        """g and its gradient in y."""
        parts = self._parts(y)
        if held is not None and y is not None:  # neither x nor this y will change before somebody asks
            own = self._play("gradient", batch, parts, held)
            return Evaluated(lambda: _first(self._play("point_value", batch, parts, held)), own, None)
        value, *rest = self._play("point", batch, parts, held)
        return Evaluated(lambda: value, rest, None)

    def graph(self, batch: Any, replay: Moment | None) -> Products:
        """Everything at the present (x, y)."""
        program, x, y = self._graph, self._problem.x.tensors, self._problem.y.tensors
        try:
            before = program.carry(1, program.carry(0, (), x), tensors(batch))
            made = _Played(program, program.carry(2, before, y), len(y), len(x))
        except _FAILURES as error:
            raise Outdated from error
        made.moment = self._problem.moment()
        return made

    def _parts(self, y: Tensor | None) -> Sequence[Tensor]:
        return self._problem.y.tensors if y is None else self._problem.y.cast(y)

    def _play(self, name: str, batch: Any, y: Sequence[Tensor], held: object | None) -> tuple[Any, ...]:
        program = self._programs[name]
        try:
            kept = self._kept.get(name)
            if kept is None or held is None or kept.held is not held or kept.batch is not batch:
                known = kept is not None and held is not None and kept.held is held
                x = kept.x if kept is not None and known else program.carry(0, (), self._problem.x.tensors)
                ready = program.ready(name, program.carry(1, x, tensors(batch)))
                self._kept[name] = kept = _Ready(batch, ready, held, x)
            return kept.play(y)
        except _FAILURES as error:
            raise Outdated from error


class _Played(Products):
    """Value, gradient and products of second derivatives at one point, from a tape."""

    def __init__(self, program: Program, before: tuple[Any, ...], lower: int, upper: int):
        self._before_d: tuple[Tensor | None, ...] = (None,) * lower
        self._before_units: tuple[Tensor | None, ...] = (None,) * (lower + upper)
        self._play = {name: program.ready(name, before) for name in program.names if name != "point"}
        self.value, *self.grad = program.ready("point", before)(())

    def hessian(self, v: Sequence[Tensor]) -> Parts:
        """``g_yy v``."""
        return self._product("hessian", v)

    def mixed(self, v: Sequence[Tensor]) -> Parts:
        """``g_xy v``."""
        return self._product("mixed", v)

    def mixed_transposed(self, d: Sequence[Tensor]) -> Parts:
        """``g_yx d``."""
        return self._product("mixed_transposed", (*self._before_d, *d))

    def together(self, units: Sequence[Tensor]) -> Parts | None:
        """The columns of ``g_yy``."""
        return self._product("columns", (*self._before_units, *units)) if "columns" in self._play else None

    def _product(self, name: str, inputs: Parts) -> Parts:
        try:
            return self._play[name](inputs)
        except _FAILURES as error:
            raise Outdated from error


P = TypeVar("P", bound=Player)


class Players(Generic[P]):
    """The tapes of a loss, one set for each kind of batch, made when a kind is met.

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

    def begin(self, batches: Iterable[Any]) -> None:
        """An iteration begins: what plays its batches is compared with the loss, and forgotten where it differs."""
        self.release()
        if not self._players:
            return
        found = [(batch, self._fitting(batch)) for batch in {id(batch): batch for batch in batches}.values()]
        to_compare = {id(player): (player, batch) for batch, player in found if player is not None}
        if not all(not player.stale and self._agrees(player, batch) for player, batch in to_compare.values()):
            self.forget()
        self.release()

    def _agrees(self, player: P, batch: Any) -> bool:
        try:
            return player.agrees(batch)
        except Exception:  # whatever it is: if the loss itself has failed, it will again when it is called
            return False

    def find(self, batch: Any) -> P | None:
        """What plays the loss on this batch; None where the loss itself is to be called."""
        if not self._on:
            return None
        if self._last is not None and self._last[0] is batch:
            return self._last[1]
        found = self._fitting(batch) or self._recorded(batch)
        self._last = None if found is None else (batch, found)
        return found

    def _fitting(self, batch: Any) -> P | None:
        return next((player for player in self._players if player.fits(batch)), None)

    def _recorded(self, batch: Any) -> P | None:
        if len(self._players) == KINDS or not says_all(batch, also=(slice,)):
            return None
        try:
            self._players.append(self._make(batch))
        except Exception as reason:  # whatever it is: if the loss itself has failed, it will again when it is called
            logger.debug("%s is called each time: %s", self._name, reason)
            self._players.clear()
            self._on = False
            return None
        return self._players[-1]

    def release(self) -> None:
        """Nothing of the batch and the x of before is kept."""
        self._last = None
        for player in self._players:
            player.release()

    def forget(self) -> None:
        """Drop the tapes: the loss has changed. After a few times they are not made again."""
        if self._players:
            self._changes += 1
        self._players.clear()
        self._last = None
        if self._changes >= CHANGES and self._on:
            logger.debug("%s is called each time: it keeps changing", self._name)
            self._on = False


def _direction(vector: Vector) -> list[Tensor]:
    """Some direction, shaped like the parameters, with no zeros in it."""
    angles = torch.arange(1, vector.numel + 1, dtype=vector.dtype, device=vector.device)
    return list(vector.cast(angles.cos()))


def _first(parts: Any) -> Tensor:
    return parts[0]
