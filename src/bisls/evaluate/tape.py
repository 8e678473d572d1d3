"""A computation recorded once as a list of tensor operations, and played again on other inputs, in stages."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from bisls.evaluate.program import CONSTANT, NotPlayable, Op, Program, Ref
from bisls.still import uses_compiler

LARGE = 30_000  # where an operation makes more numbers than this on average, its own arithmetic hides the cost of calling it
MOST = 4_000_000  # so many numbers may be held while a loss is recorded: 16 MB in single precision
_ALIASES = {"detach", "alias", "lift_fresh"}
_SHAPES_ONLY = {"ones_like", "zeros_like", "full_like", "new_zeros", "new_ones", "new_full"}


# what may be asked of a tensor and is answered by its shape, its type or its place, not by its numbers
_ABOUT_SHAPES = {
    "size", "dim", "ndimension", "numel", "nelement", "stride", "storage_offset", "is_contiguous", "element_size",
    "is_floating_point", "is_complex", "is_signed", "is_conj", "is_neg", "is_inference", "is_same_size", "get_device",
    "type", "has_names", "_is_view", "_has_compatible_shallow_copy_type", "__len__", "__iter__", "__hash__", "__dir__",
    "register_hook", "retain_grad", "split_with_sizes", "can_cast", "result_type", "promote_types", "broadcast_shapes",
}  # fmt: skip


Compute = Callable[[], Mapping[str, Sequence[Tensor | None]]]


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # the guard against compiling this handler would import torch's compiler: seconds, for nothing

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: list[tuple[Any, Any, dict[str, Any], Any]] = []
        self.numbers = 0
        self.average = True  # whether the average size of an operation matters, beside the sum

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.calls.append((func, args, kwargs or {}, out))
        self.numbers += sum(tensor.numel() for tensor in _tensors(out))
        # at once, since everything is kept until the end
        if self.numbers > (min(LARGE * max(len(self.calls), 64), MOST) if self.average else MOST):
            raise NotPlayable("its operations are large")
        return out


class _Reading(TorchFunctionMode):
    """Notices whoever takes numbers out of a tensor into Python, which no operation shows (``tolist``, ``numpy``)."""

    def __init__(self) -> None:
        super().__init__()
        self.noticed: str | None = (
            None  # said afterwards: who asks may be torch's own code, which an exception would upset
        )

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = getattr(func, "__name__", "")
        if name in ("__get__", "__set__"):  # of a property
            harmless = "interface" not in getattr(func.__self__, "__name__", "")
        else:
            harmless = name in _ABOUT_SHAPES or name.startswith("is_")
        asked = any(isinstance(arg, Tensor) for arg in (*args, *(kwargs or {}).values()))
        if asked and not (harmless or _made_of_tensors(out)):
            self.noticed = self.noticed or name
        return out


def _undisturbed(mode: Any, handler: str) -> Any:
    """A mode whose handler torch.compile leaves alone, where it is at work."""
    if not uses_compiler():
        return mode
    return type(mode.__name__, (mode,), {handler: torch._dynamo.disable(getattr(mode, handler))})  # type: ignore[no-untyped-call]


def _made_of_tensors(out: Any) -> bool:
    if isinstance(out, list | tuple):
        return all(entry is None or _made_of_tensors(entry) for entry in out)
    return isinstance(out, Tensor)


class Tape:
    """The operations behind some named outputs, each with the rarest-changing inputs that it needs.

    Groups of inputs are ordered by how rarely they change: what depends on the first groups alone is computed when these
    change, not at every play. The operations are those that ran, in the order in which they ran, so the results are the same
    to the last bit; nothing is recorded for autograd.

    Args:
        compute: Returns named lists of tensors (None for a missing one); runs the loss and autograd on the inputs.
        inputs: Groups of tensors that `compute` reads.
        batched: Further outputs, made of many products at once: their operations may be large.

    Raises:
        NotPlayable: It draws random numbers, changes tensors in place that it did not make, reads numbers back into Python,
            or its arithmetic is so large that calling it costs nothing.
    """

    def __init__(self, compute: Compute, inputs: Sequence[Sequence[Tensor]], batched: Compute = dict):
        self.levels = len(inputs)
        self.ops: list[Op] = []
        self.constants: list[Tensor] = []
        self._refs: dict[int, Ref] = {}
        self._numbers: dict[Any, int] = {}  # of the operations, by what they do
        recorder = _undisturbed(_Recorder, "__torch_dispatch__")()
        with recorder, _undisturbed(_Reading, "__torch_function__")() as reading:
            found = {name: list(outputs) for name, outputs in compute().items()}
            recorder.average = False
            found |= {name: list(outputs) for name, outputs in batched().items()}
        if reading.noticed:
            raise NotPlayable(f"{reading.noticed} reads numbers back into Python")
        self._inputs = {id(tensor): (group, i) for group, part in enumerate(inputs) for i, tensor in enumerate(part)}
        self._own = {_storage(tensor) for part in inputs for tensor in part}
        self._external: list[tuple[Tensor, int]] = []
        self._keep = recorder.calls  # identities stay unique while the calls are alive
        self._copied(recorder.calls)
        self._outputs = {
            name: [None if out is None else self._ref(out) for out in outputs] for name, outputs in found.items()
        }
        self._expected = {
            name: [None if out is None else out.detach() for out in outputs] for name, outputs in found.items()
        }
        self._example = [tuple(tensor.detach().clone() for tensor in part) for part in inputs]
        del self._keep, self._refs, self._made, self._numbers

    @property
    def stale(self) -> bool:
        """Whether a tensor from outside has been written to since the recording."""
        return any(tensor._version != version for tensor, version in self._external)

    @property
    def names(self) -> list[str]:
        """Of the outputs."""
        return list(self._outputs)

    def finish(self) -> None:
        """Let go of what only the making of programs needs."""
        self._example, self._expected = [], {}

    def program(self, *names: str, last: int | None = None) -> Program:
        """What plays these outputs, from the inputs of the groups up to ``last``."""
        outputs = {name: self._outputs[name] for name in names}
        expected = {name: self._expected[name] for name in names}
        for quick in (True, False):
            with suppress(RuntimeError, TypeError, IndexError, ValueError, AttributeError):
                made = Program(self, outputs, self.levels if last is None else last, quick)
                if made.gives(expected, self._example):
                    return made
        raise NotPlayable(f"{' and '.join(names)} can't be played with the same result")

    def _copied(self, calls: Sequence[tuple[Any, Any, dict[str, Any], Any]]) -> None:
        self._made: set[int] = set()  # storages of what the inputs decide
        for func, args, kwargs, out in calls:
            name = func._schema.name.split("::")[1]
            self._must_be_playable(func, name)
            if name in _ALIASES:
                self._refs[id(out)] = self._ref(args[0])
                continue
            call = func
            if func._schema.is_mutable:
                call = self._out_of_place(func, name, args, out)
            uses: set[Ref] = set()
            new_args, new_kwargs = self._placed(args, uses), self._placed(kwargs, uses)
            level = max((self.level_of(ref) for ref in uses), default=0)
            if level == 0 or name in _SHAPES_ONLY:
                for tensor in _tensors(out):
                    self._refs[id(tensor)] = self._constant(
                        tensor.detach().clone() if name in _SHAPES_ONLY else tensor.detach()
                    )
                continue
            self._made |= {_storage(tensor) for tensor in _tensors(out)}
            at = self._added(call, new_args, new_kwargs, uses, out.dtype if isinstance(out, Tensor) else None)
            if isinstance(out, Tensor):
                self._refs[id(out)] = Ref(at)
            else:
                for i, tensor in enumerate(out):
                    if isinstance(tensor, Tensor):
                        self._refs[id(tensor)] = Ref(at, i)

    def _must_be_playable(self, func: Any, name: str) -> None:
        if func.namespace != "aten":
            raise NotPlayable(f"it calls {func}, which is not known to be free of side effects")
        for tag, why in (
            (torch.Tag.nondeterministic_seeded, "draws random numbers"),
            (torch.Tag.data_dependent_output, "reads numbers back into Python"),
            (torch.Tag.dynamic_output_shape, "has a shape that depends on numbers"),
        ):
            if tag in func.tags:
                raise NotPlayable(f"{name} {why}")
        if "batch_norm" in name:  # its running statistics change without its schema saying so
            raise NotPlayable(f"{name} may change buffers")

    def _out_of_place(self, func: Any, name: str, args: Any, out: Any) -> Any:
        """The operation that returns what this one writes; only onto a tensor of the tape's own that nothing else sees."""
        written = [
            value
            for value, spec in zip(args, func._schema.arguments, strict=False)
            if spec.alias_info and spec.alias_info.is_write
        ]
        plain = getattr(getattr(torch.ops.aten, name.rstrip("_"), None), func._overloadname, None)
        fits = name.endswith("_") and len(written) == 1 and written[0] is out and plain is not None
        mine = fits and id(out) in self._refs and not self._seen_elsewhere(out)
        if not mine:
            raise NotPlayable(f"{name} writes into a tensor")
        return plain

    def _seen_elsewhere(self, out: Tensor) -> bool:
        return any(
            tensor is not out and _storage(tensor) == _storage(out)
            for _, _, _, made in self._keep
            for tensor in _tensors(made)
        )

    def _added(self, call: Any, args: Any, kwargs: dict[str, Any], uses: set[Ref], dtype: torch.dtype | None) -> int:
        """The number of an operation; one that is there already, on the same values, is not made twice."""
        key = (call, _frozen(args), _frozen(kwargs))
        if key not in self._numbers:
            self._numbers[key] = len(self.ops)
            self.ops.append(Op(call, args, kwargs, max((self.level_of(ref) for ref in uses), default=0), uses, dtype))
        return self._numbers[key]

    def level_of(self, ref: Ref) -> int:
        """The group of inputs that a value has to wait for; 0 for constants."""
        if ref.op == CONSTANT:
            return 0
        return -ref.op - 1 if ref.op < CONSTANT else self.ops[ref.op].level

    def _placed(self, value: Any, uses: set[Ref]) -> Any:
        """Arguments with tensors replaced by references."""
        if isinstance(value, Tensor):
            ref = self._ref(value)
            uses.add(ref)
            return ref
        if isinstance(value, list | tuple):
            return type(value)(self._placed(entry, uses) for entry in value)
        if isinstance(value, dict):
            return {key: self._placed(entry, uses) for key, entry in value.items()}
        return value

    def _ref(self, tensor: Tensor) -> Ref:
        if id(tensor) in self._refs:
            return self._refs[id(tensor)]
        if id(tensor) in self._inputs:
            group, i = self._inputs[id(tensor)]
            return Ref(-group - 2, i)
        if tensor.grad_fn is not None or _storage(tensor) in self._own | self._made:
            raise NotPlayable("it uses a tensor whose origin is not on the tape")
        self._external.append((tensor, tensor._version))
        self._refs[id(tensor)] = ref = self._constant(tensor.detach())
        return ref

    def _constant(self, tensor: Tensor) -> Ref:
        self.constants.append(tensor)
        return Ref(CONSTANT, len(self.constants) - 1)


def _frozen(value: Any) -> Any:
    """Arguments as something that can be looked up."""
    if isinstance(value, list | tuple):
        return (type(value), *(_frozen(entry) for entry in value))
    if isinstance(value, dict):
        return tuple((key, _frozen(entry)) for key, entry in value.items())
    return type(value), value if value.__hash__ else id(value)


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for entry in value:
            yield from _tensors(entry)


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata
