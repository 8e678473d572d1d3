"""A computation recorded once as a list of tensor operations, and played again on other inputs, in stages."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from math import frexp
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

Play = Callable[[Sequence[Tensor | None]], tuple[Any, ...]]

LARGE = 30_000  # where an operation makes more numbers than this on average, its own arithmetic hides the cost of calling it
MOST = 4_000_000  # so many numbers may be held while a loss is recorded: 16 MB in single precision
POWERS = 2  # as powers of two, so large are the factors that may move: products keep clear of the ends of the range
_ALIASES = {"detach", "alias", "lift_fresh"}
_SHAPES_ONLY = {"ones_like", "zeros_like", "full_like", "new_zeros", "new_ones", "new_full"}


class NotPlayable(Exception):
    """The computation can't be played again from its operations: the message says why."""


@dataclass(frozen=True)
class _Ref:
    """A value on the tape: output ``part`` of an operation (None: its only one), or input ``part`` of a group."""

    op: int
    part: int | None = None


@dataclass
class _Op:
    call: Any
    args: Any
    kwargs: dict[str, Any]
    level: int
    uses: set[_Ref]
    dtype: torch.dtype | None  # of the only output


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # the guard against compiling this handler would import torch's compiler: seconds, for nothing

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: list[tuple[Any, Any, dict[str, Any], Any]] = []
        self.numbers = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.calls.append((func, args, kwargs or {}, out))
        self.numbers += sum(tensor.numel() for tensor in _tensors(out))
        # at once, since everything is kept until the end
        if self.numbers > min(LARGE * max(len(self.calls), 64), MOST):
            raise NotPlayable("its operations are large")
        return out


class Tape:
    """The operations behind some named outputs, each with the rarest-changing inputs that it needs.

    Groups of inputs are ordered by how rarely they change: what depends on the first groups alone is computed when these
    change, not at every play. The operations are those that ran, in the order in which they ran, so the results are the same
    to the last bit; nothing is recorded for autograd.

    Args:
        compute: Returns named lists of tensors (None for a missing one); runs the loss and autograd on the inputs.
        inputs: Groups of tensors that `compute` reads.

    Raises:
        NotPlayable: It draws random numbers, changes tensors in place that it did not make, reads numbers back into Python,
            or its arithmetic is so large that calling it costs nothing.
    """

    def __init__(
        self, compute: Callable[[], Mapping[str, Sequence[Tensor | None]]], inputs: Sequence[Sequence[Tensor]]
    ):
        self.levels = len(inputs)
        self._ops: list[_Op] = []
        self._constants: list[Tensor] = []
        self._refs: dict[int, _Ref] = {}
        self._numbers: dict[Any, int] = {}  # of the operations, by what they do
        self._powers: dict[_Ref, tuple[int, tuple[_Ref, ...]]] = {}
        self._twos: dict[tuple[int, torch.dtype], _Ref] = {}
        recorder = _Recorder()
        with recorder:
            found = {name: list(outputs) for name, outputs in compute().items()}
        self._inputs = {id(tensor): (group, i) for group, part in enumerate(inputs) for i, tensor in enumerate(part)}
        self._own = {_storage(tensor) for part in inputs for tensor in part}
        self.size = recorder.numbers / max(len(recorder.calls), 1)  # how many numbers an operation makes, on average
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
        del self._keep, self._refs, self._made, self._numbers, self._powers, self._twos

    @property
    def stale(self) -> bool:
        """Whether a tensor from outside has been written to since the recording."""
        return any(tensor._version != version for tensor, version in self._external)

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
            uses: set[_Ref] = set()
            new_args, new_kwargs = self._placed(args, uses), self._placed(kwargs, uses)
            level = max((self._level(ref) for ref in uses), default=0)
            if level == 0 or name in _SHAPES_ONLY:
                for tensor in _tensors(out):
                    self._refs[id(tensor)] = self._constant(
                        tensor.detach().clone() if name in _SHAPES_ONLY else tensor.detach()
                    )
                continue
            self._made |= {_storage(tensor) for tensor in _tensors(out)}
            if name in ("mul", "add") and not kwargs and self._all_alike(args, out):
                self._refs[id(out)] = self._simplified(call, new_args, out.dtype)
                continue
            at = self._added(call, new_args, new_kwargs, uses, out.dtype if isinstance(out, Tensor) else None)
            if isinstance(out, Tensor):
                self._refs[id(out)] = _Ref(at)
            else:
                for i, tensor in enumerate(out):
                    if isinstance(tensor, Tensor):
                        self._refs[id(tensor)] = _Ref(at, i)

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

    def _added(self, call: Any, args: Any, kwargs: dict[str, Any], uses: set[_Ref], dtype: torch.dtype | None) -> int:
        """The number of an operation; one that is there already, on the same values, is not made twice."""
        key = (call, _frozen(args), _frozen(kwargs))
        if key not in self._numbers:
            self._numbers[key] = len(self._ops)
            self._ops.append(_Op(call, args, kwargs, max((self._level(ref) for ref in uses), default=0), uses, dtype))
        return self._numbers[key]

    def _all_alike(self, args: Any, out: Any) -> bool:
        """Whether a product is of two tensors like the result, but for constants, which may be smaller."""
        return len(args) == 2 and out.dtype in (torch.float32, torch.float64) and all(
            isinstance(arg, Tensor) and arg.dtype == out.dtype and (arg.shape == out.shape or self._is_constant(arg))
            for arg in args
        )  # fmt: skip

    def _simplified(self, call: Any, args: Sequence[_Ref], dtype: torch.dtype) -> _Ref:
        """A product, or a sum; factors that are a power of two move to what changes most rarely.

        They change no digit wherever they stand (short of the ends of the range), and there they cost next to nothing. The
        penalty ``0.5 (w * y * y).sum()`` has the gradient ``0.5 (w y) + (0.5 y) w``: twice the same ``(0.5 w) y``, so ``w y``.
        """
        if call is not _TIMES:
            if args[0] != args[1]:
                return self._made_of(call, args, dtype)
            call, args = _TIMES, [args[0], self._two(1, dtype)]
        parts = [self._factors(ref) for ref in args]
        if sum(len(factors) for _, factors in parts) > 2:
            parts = [part if len(part[1]) < 2 else (0, (ref,)) for part, ref in zip(parts, args, strict=True)]
        power = sum(own for own, _ in parts)
        factors = sorted((ref for _, own in parts for ref in own), key=lambda ref: (self._level(ref), ref.op, ref.part))
        if abs(power) > POWERS:
            return self._made_of(call, args, dtype)
        if len(factors) == 1:
            made = self._scaled(call, factors[0], power, dtype)
        elif power and self._level(factors[0]) < self._level(factors[1]):
            made = self._made_of(call, [self._scaled(call, factors[0], power, dtype), factors[1]], dtype)
        else:
            made = self._made_of(call, args if power else factors, dtype)
        self._powers.setdefault(made, (power, tuple(factors)))
        return made

    def _factors(self, ref: _Ref) -> tuple[int, tuple[_Ref, ...]]:
        """A value as a power of two times one or two others; the power alone where it is one."""
        if ref not in self._powers:
            self._powers[ref] = 0, (ref,)
            if ref.op == _CONSTANT and ref.part is not None and (values := self._constants[ref.part]).numel():
                first = values.reshape(-1)[0]
                mantissa, exponent = frexp(first.item())
                if mantissa == 0.5 and bool((values == first).all()):
                    self._powers[ref] = exponent - 1, ()
        return self._powers[ref]

    def _scaled(self, call: Any, ref: _Ref, power: int, dtype: torch.dtype) -> _Ref:
        if power == 0:
            return ref
        if ref.op == _CONSTANT and ref.part is not None:
            return self._constant(self._constants[ref.part] * 2.0**power)
        return self._made_of(call, [ref, self._two(power, dtype)], dtype)

    def _two(self, power: int, dtype: torch.dtype) -> _Ref:
        if (power, dtype) not in self._twos:
            self._twos[power, dtype] = self._constant(torch.tensor(2.0**power, dtype=dtype))
        return self._twos[power, dtype]

    def _made_of(self, call: Any, args: Sequence[_Ref], dtype: torch.dtype) -> _Ref:
        return _Ref(self._added(call, args, {}, set(args), dtype))

    def _is_constant(self, value: Any) -> bool:
        return isinstance(value, Tensor) and self._level(self._ref(value)) == 0

    def _level(self, ref: _Ref) -> int:
        if ref.op == _CONSTANT:
            return 0
        return -ref.op - 1 if ref.op < _CONSTANT else self._ops[ref.op].level

    def _placed(self, value: Any, uses: set[_Ref]) -> Any:
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

    def _ref(self, tensor: Tensor) -> _Ref:
        if id(tensor) in self._refs:
            return self._refs[id(tensor)]
        if id(tensor) in self._inputs:
            group, i = self._inputs[id(tensor)]
            return _Ref(-group - 2, i)
        if tensor.grad_fn is not None or _storage(tensor) in self._own | self._made:
            raise NotPlayable("it uses a tensor whose origin is not on the tape")
        self._external.append((tensor, tensor._version))
        self._refs[id(tensor)] = ref = self._constant(tensor.detach())
        return ref

    def _constant(self, tensor: Tensor) -> _Ref:
        self._constants.append(tensor)
        return _Ref(_CONSTANT, len(self._constants) - 1)


_TIMES = torch.ops.aten.mul.Tensor
_CONSTANT = -1  # inputs of group 0, 1, ... are -2, -3, ...


class Program:
    """Plays some outputs of a tape: ``carry`` for each group of inputs but the last, then what is ``ready`` for that one."""

    def __init__(self, tape: Tape, outputs: Mapping[str, Sequence[_Ref | None]], last: int, quick: bool):
        self._tape, self._last, self._quick = tape, last, quick
        self._all = {name: list(refs) for name, refs in outputs.items()}
        self._names: dict[str, Any] = {f"c{i}": tensor for i, tensor in enumerate(tape._constants)}
        needed: dict[str, set[int]] = {name: self._slice(refs) for name, refs in self._all.items()}
        every = set().union(*needed.values())
        if any(tape._ops[i].level > last for i in every):
            raise NotPlayable("an output needs later inputs")
        finals = {name: [i for i in sorted(ops) if tape._ops[i].level == last] for name, ops in needed.items()}
        wanted = {ref for refs in self._all.values() for ref in refs if ref is not None}
        for ops in finals.values():
            wanted |= {ref for i in ops for ref in tape._ops[i].uses}
        self._carries: list[Callable[..., tuple[Tensor, ...]]] = []
        self._places: dict[_Ref, tuple[int, int]] = {}
        stages = [[i for i in sorted(every) if tape._ops[i].level == level] for level in range(1, last)]
        for level, ops in enumerate(stages, 1):
            later = wanted | {ref for more in stages[level:] for i in more for ref in tape._ops[i].uses}
            kept = sorted((ref for ref in later if tape._level(ref) == level), key=lambda ref: (ref.op, ref.part or 0))
            self._carries.append(self._function(f"carry{level}", level, ops, kept))
            self._places |= {ref: (level, at) for at, ref in enumerate(kept)}
        self._finals = {name: self._function(f"play_{name}", last, finals[name], self._all[name]) for name in self._all}

    def carry(self, level: int, before: tuple[Any, ...], inputs: Sequence[Tensor]) -> tuple[Any, ...]:
        """What the later groups need of this one; ``before`` holds what the earlier ones gave."""
        return (*before, self._carries[level](*before, inputs))

    def ready(self, name: str, before: tuple[Any, ...]) -> Play:
        """What gives the outputs of this name, for the inputs of the last group."""
        return partial(self._finals[name], *before)

    @torch.no_grad()
    def gives(self, expected: Mapping[str, Sequence[Tensor | None]], inputs: Sequence[Sequence[Tensor]]) -> bool:
        """Whether it plays these results from these inputs, to the last bit."""
        before: tuple[Any, ...] = ()
        for level in range(self._last - 1):
            before = self.carry(level, before, inputs[level])
        return all(
            own is None or (mine.dtype == own.dtype and torch.allclose(mine, own, 0, 0, equal_nan=True))
            for name, outputs in expected.items()
            for mine, own in zip(self.ready(name, before)(inputs[self._last - 1]), outputs, strict=True)
        )

    def _slice(self, refs: Sequence[_Ref | None]) -> set[int]:
        found: set[int] = set()
        todo = [ref.op for ref in refs if ref is not None and ref.op > _CONSTANT]
        while todo:
            at = todo.pop()
            if at not in found:
                found.add(at)
                todo.extend(ref.op for ref in self._tape._ops[at].uses if ref.op > _CONSTANT)
        return found

    def _function(
        self, name: str, level: int, ops: Sequence[int], outputs: Sequence[_Ref | None]
    ) -> Callable[..., Any]:
        """Python source for one stage: straight calls, no interpretation."""
        tape, lines, here = self._tape, [], set(ops)

        def text(value: Any) -> str:
            if isinstance(value, _Ref):
                return spelled(value)
            if isinstance(value, list | tuple):
                inner = ", ".join(text(entry) for entry in value)
                return f"[{inner}]" if isinstance(value, list) else f"({inner},)"
            if value is None or isinstance(value, bool | int | str):
                return repr(value)
            key = f"k{len(self._names)}"
            self._names[key] = value
            return key

        def spelled(ref: _Ref) -> str:
            if ref.op == _CONSTANT:
                return f"c{ref.part}"
            if ref.op == -level - 1:
                return f"i[{ref.part}]"
            if ref.op in here:
                return f"v{ref.op}" + ("" if ref.part is None else f"[{ref.part}]")
            stage, at = self._places[ref]
            return f"p{stage}[{at}]"

        def wrapped(op: _Op) -> Any:
            # a number would be wrapped into a tensor at every call; the same number to the last bit in these types
            plain = (
                op.call._schema.name in _WITH_NUMBERS and op.dtype in (torch.float32, torch.float64) and not op.kwargs
            )
            if not (plain and self._quick):
                return op.args
            return [torch.tensor(float(a), dtype=op.dtype) if type(a) in (int, float) else a for a in op.args]

        for i in ops:
            op = tape._ops[i]
            self._names[f"f{i}"] = _quick(op.call) if self._quick else op.call
            words = [text(arg) for arg in wrapped(op)] + [f"{key}={text(value)}" for key, value in op.kwargs.items()]
            lines.append(f"    v{i} = f{i}({', '.join(words)})")
        given = ", ".join([*(f"p{stage}" for stage in range(1, level)), "i"])
        results = "".join(f"{'None' if ref is None else spelled(ref)}, " for ref in outputs)
        lines.append(f"    return ({results})")
        scope: dict[str, Any] = {}
        source = f"def {name}({given}):\n" + "\n".join(lines)
        exec(compile(source, f"<{name}>", "exec"), self._names, scope)  # the source is made of names and numbers alone
        return scope[name]


def _quick(call: Any) -> Callable[..., Any]:
    """The function of the torch namespace that does the same with less ado."""
    name = call._schema.name.split("::")[1]
    return getattr(torch, name) if name in _QUICK else getattr(call, "_op", call)


_WITH_NUMBERS = {"aten::mul", "aten::div", "aten::add", "aten::sub"}
_QUICK = {
    "add", "sub", "mul", "div", "neg", "rsub", "mv", "mm", "bmm",
    "dot", "addmm", "sum", "mean", "amax", "logsumexp", "where", "exp", "log",
    "log1p", "expm1", "sqrt", "rsqrt", "square", "pow", "reciprocal", "abs", "sign",
    "sin", "cos", "sigmoid", "tanh", "relu", "clamp", "maximum", "minimum", "t",
    "transpose", "unsqueeze", "squeeze", "cat", "stack", "gather", "index_select",
}  # fmt: skip


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
