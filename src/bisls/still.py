"""Looking at a loss without leaving a trace: random generators and what modules keep are put back after a probe."""

from __future__ import annotations

import gc
import random
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from operator import is_
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.nn.parameter import is_lazy

from bisls.randomness import put_back, same_state, state_of
from bisls.surroundings import Surroundings


@dataclass(frozen=True)
class Moment:
    """The state of all random generators that a loss may draw from, at one moment, so that a mask can be drawn again."""

    index: torch.device
    cpu: Tensor
    device: Tensor | None
    others: tuple[tuple[Any, Any], ...]  # generators of NumPy, Python and the user, each with its state
    around: Surroundings | None = None  # what the loss could reach then

    @staticmethod
    def now(device: torch.device, around: Surroundings | None = None) -> Moment:
        """The present moment.

        Args:
            device: Where the parameters live: its generator counts beside that of the CPU.
            around: What the loss can reach: its own generators, and whether it may draw from the global ones of NumPy and Python.
                None where that is not known: the global ones count.
        """
        own = None
        if device.type != "cpu":  # pragma: no cover - no accelerator in continuous integration
            own = getattr(torch, device.type).get_rng_state(device)
        others = [] if around is None else list(around.generators)
        if around is None or around.numpy:
            others.append(_NUMPYS)
        if around is None or around.python:
            others.append(_PYTHONS)
        return Moment(device, torch.get_rng_state(), own, tuple((other, state_of(other)) for other in others), around)

    def again(self) -> Moment:
        """The present moment of the same generators."""
        now = Moment.now(self.index, _NOTHING_AROUND)
        return Moment(now.index, now.cpu, now.device, tuple((other, state_of(other)) for other, _ in self.others))

    @property
    def passed(self) -> bool:
        """Whether a random number has been drawn since."""
        if not torch.equal(torch.get_rng_state(), self.cpu):
            return True
        if self.device is not None:  # pragma: no cover
            now = getattr(torch, self.index.type).get_rng_state(self.index)
            if not torch.equal(now, self.device):
                return True
        return not all(same_state(state, state_of(other)) for other, state in self.others)

    def restore(self) -> None:
        """Make the generators draw again what they drew after this moment."""
        torch.set_rng_state(self.cpu)
        if self.device is not None:  # pragma: no cover
            getattr(torch, self.index.type).set_rng_state(self.device, self.index)
        for other, state in self.others:
            put_back(other, state)


_NOTHING_AROUND = Surroundings()
_NUMPYS, _PYTHONS = np.random.mtrand._rand, random._inst


@contextmanager
def still(
    device: torch.device,
    replay: Moment | None = None,
    buffers: Iterable[Tensor] = (),
    owner: object = None,
    around: Surroundings | None = None,
) -> Iterator[None]:
    """Within this context losses may be evaluated freely: nothing of it can be seen afterwards.

    Random generators continue afterwards as if nothing had been drawn. The buffers of every module that the losses can reach
    or that runs inside (BatchNorm's statistics), small tensors in reach that nobody trains, and those declared, get their
    values back; buffers and attributes that a module replaces are put back themselves. Casts that autocast keeps of weights are
    dropped, since weights may have been moved in between.

    Args:
        device: Where the parameters live.
        replay: Draw the same random numbers as at this moment (the same dropout mask on both sides of a comparison).
        buffers: Tensors to put back, beside those that are found.
        owner: Whose losses these are: the modules inside of compiled functions are looked for once for each.
        around: What the losses can reach; see `Moment.now`. None: what the moment to replay says.
    """
    before = Moment.now(device, around) if replay is None or around is not None else replay.again()
    watch = _Watch(buffers)
    within = around or (replay.around if replay is not None else None)
    if within is not None:
        watch.reach(within)
    if watch.with_parts:
        for module in _living(owner):
            watch.begins(module)
    torch.clear_autocast_cache()
    if replay is not None:
        replay.restore()
    try:
        with _announcing(watch):
            yield
    finally:
        watch.put_back()
        torch.clear_autocast_cache()
        before.restore()


def kept(buffers: Iterable[Tensor], around: Surroundings) -> Callable[[], None]:
    """What puts the buffers of all modules in reach, and those declared, back to what they are now."""
    watch = _Watch(buffers)
    watch.modules(around)
    return watch.put_back


class _Watch:
    """What modules keep, as it was before they ran.

    Args:
        buffers: Tensors that are declared.
    """

    def __init__(self, buffers: Iterable[Tensor]):
        self.with_parts = compiled() > 0
        self._values = [(buffer, buffer.detach().clone()) for buffer in buffers]
        self._running: list[tuple[nn.Module, dict[str, Any], dict[str, Any]]] = []
        self._replaced: list[
            tuple[dict[str, Any], str, Any, Any]
        ] = []  # where, by what name, what was there, what came
        self._scripted: list[tuple[nn.Module, str, Tensor]] = []
        self._tensors: list[tuple[Tensor, Tensor]] = []
        self._seen: set[int] = set()
        self._within: set[int] = set()  # watched for all of the time, whether they run or not

    def reach(self, around: Surroundings) -> None:
        """What a loss can reach may change without the call of a module: by its ``forward``, or a function of tensors."""
        self.modules(around)
        self._tensors = [(own, own.clone()) for own in around.tensors]

    def modules(self, around: Surroundings) -> None:
        """The modules in reach alone."""
        for module in around.modules:
            if not any(is_lazy(buffer) for buffer in module._buffers.values() if buffer is not None):
                self.begins(module)
                self._within.add(id(module))

    def called(self, module: nn.Module) -> None:
        """A module is about to run: those in reach are watched already."""
        if id(module) not in self._within:
            self.begins(module)

    def begins(self, module: nn.Module) -> None:
        """From now on it is watched."""
        scripted = isinstance(module, torch.jit.ScriptModule)
        # the parts of a module are not announced one by one where compiled code runs them
        for part in module.modules() if self.with_parts or scripted else (module,):
            if id(part) in self._seen:
                continue
            self._seen.add(id(part))
            if scripted:
                own = list(part.named_buffers(recurse=False))
                self._scripted.extend((part, name, buffer) for name, buffer in own)
            else:
                own = [(name, buffer) for name, buffer in part._buffers.items() if buffer is not None]
            self._values.extend((buffer, buffer.detach().clone()) for _, buffer in own)
        if not scripted:
            self._running.append((module, module.__dict__.copy(), module._buffers.copy()))

    def ends(self, module: nn.Module) -> None:
        """It has run: what it replaced is noted."""
        while self._running and id(module) not in self._within:  # one that raised has not ended
            last, attributes, buffers = self._running.pop()
            if last is module:
                self._compare(module.__dict__, attributes)
                self._compare(module._buffers, buffers)
                return

    def _compare(self, now: dict[str, Any], then: dict[str, Any]) -> None:
        if all(map(is_, now.values(), then.values())) and now.keys() == then.keys():
            return
        for name in {**then, **now}:
            was, became = then.get(name, _ABSENT), now.get(name, _ABSENT)
            if was is not became:
                self._replaced.append((now, name, was, became))

    def put_back(self) -> None:
        """Everything is as it was."""
        while self._running:  # they were cut off
            module, attributes, buffers = self._running.pop()
            self._compare(module.__dict__, attributes)
            self._compare(module._buffers, buffers)
        for place, name, was, became in reversed(self._replaced):
            # somebody else may have put another there since (a functional call gives back a module's own)
            if place.get(name, _ABSENT) is became:
                if was is _ABSENT:
                    del place[name]
                else:
                    place[name] = was
        for part, name, buffer in self._scripted:
            if getattr(part, name).data_ptr() != buffer.data_ptr():
                setattr(part, name, buffer)
        with torch.no_grad():
            for buffer, value in self._values:
                # not as a change: graphs that hold the buffer stay usable, since its value is the same
                buffer.data.copy_(value)
            for tensor, value in self._tensors:
                if not _equal(tensor, value):  # what nobody has changed may lie in memory that nobody may write to
                    tensor.data.copy_(value)


def _equal(one: Tensor, two: Tensor) -> bool:
    return torch.equal(one, two) or bool(((one == two) | ((one != one) & (two != two))).all())


_ABSENT = object()


# --- which modules run

_watchers: list[_Watch] = []
_call = nn.Module.__call__


def _announced(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """A module's call, told to those who watch."""
    watchers = () if torch.compiler.is_compiling() else tuple(_watchers)  # what is compiled here runs later, unwatched
    for watch in watchers:
        watch.called(module)
    result = _call(module, *args, **kwargs)
    for watch in watchers:
        watch.ends(module)
    return result


@contextmanager
def _announcing(watch: _Watch) -> Iterator[None]:
    """Within this context every call of a module is told, by global hooks of torch's.

    Compiled code is guarded by the hooks there are: it would be compiled again for every probe, with a warning each time. So
    where `torch.compile` has been used the call of modules is replaced for that time instead, which takes longer.
    """
    if not uses_compiler():
        handles = (
            register_module_forward_pre_hook(lambda module, _: watch.called(module)),
            register_module_forward_hook(lambda module, _, __: watch.ends(module)),
        )
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
        return
    global _call  # what is put back is what was there, which need not be torch's own
    skip = getattr(sys.modules.get("torch._dynamo.eval_frame"), "skip_code", None)
    if skip is not None:
        skip(_announced.__code__)  # it is not for the compiler to translate
    if not _watchers:
        _call = nn.Module.__call__
        nn.Module.__call__ = _announced  # type: ignore[method-assign]
    _watchers.append(watch)
    try:
        yield
    finally:
        _watchers.remove(watch)
        if not _watchers:
            nn.Module.__call__ = _call  # type: ignore[method-assign]


def uses_compiler() -> bool:
    """Whether somebody has asked for compiled code in this process, translated already or not."""
    asked = getattr(sys.modules.get("torch._dynamo.eval_frame"), "cached_backends", ())
    return len(asked) > 0 or compiled() > 0


def twice_differentiable() -> AbstractContextManager[Any]:
    """Within this context compiled code runs uncompiled: what `torch.compile` makes can be differentiated only once."""
    stance = getattr(torch.compiler, "set_stance", None)  # torch 2.6 has it first
    return nullcontext() if stance is None or not uses_compiler() else stance("force_eager")


def compiled() -> int:
    """How many pieces of code `torch.compile` has translated in this process; 0 where it was never used."""
    codes = getattr(sys.modules.get("torch._dynamo.convert_frame"), "output_codes", None)
    return len(getattr(codes, "seen", ()))


class _Living:
    """The modules that were alive when they were last looked for."""

    def __init__(self) -> None:
        self.count = 0
        self.modules: weakref.WeakSet[nn.Module] = weakref.WeakSet()


_nobody = _Living()
_by_owner: weakref.WeakKeyDictionary[Any, _Living] = weakref.WeakKeyDictionary()


def _living(owner: object) -> list[nn.Module]:
    """All modules of the process that have buffers: a compiled function announces nothing, and may run any of them.

    They are looked for again when something was compiled since, and for every owner: the same compiled function serves another
    model without being compiled again.
    """
    last = _nobody if owner is None else _by_owner.setdefault(owner, _Living())
    if last.count != compiled():
        last.count = compiled()
        # by the type, since isinstance asks the object itself, and one of them may be a proxy of something that is gone
        modules = [thing for thing in gc.get_objects() if issubclass(type(thing), nn.Module)]
        last.modules = weakref.WeakSet(module for module in modules if module.__dict__.get("_buffers"))
    return list(last.modules)


def probe(
    call: Callable[[], Any],
    device: torch.device,
    replay: Moment | None = None,
    buffers: Iterable[Tensor] = (),
    owner: object = None,
    around: Surroundings | None = None,
    recorded: bool = False,
) -> Any:
    """What ``call`` returns, evaluated without a trace and without recording a graph.

    Code that was compiled for the gradient is compiled once more where none is wanted. With ``recorded`` the graph is recorded,
    and dropped with the value.
    """

    def traceless() -> Any:
        with still(device, replay, buffers, owner, around):
            return call()

    if recorded:
        with torch.enable_grad():
            value = traceless()
        return value.detach() if isinstance(value, Tensor) else value
    return without_grad(traceless)


def without_grad(call: Callable[[], Any]) -> Any:
    """What ``call`` returns, without recording a graph.

    A loss that differentiates by itself (a gradient penalty, an inner loop) cannot run without a graph; it is called once more
    with one.
    """
    try:
        with torch.no_grad():
            return call()
    except RuntimeError as error:
        if "does not require grad" not in str(error):
            raise
    with torch.enable_grad():
        return call()
