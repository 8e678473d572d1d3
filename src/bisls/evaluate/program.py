"""Operations of a tape as Python functions: straight calls, in stages, with no interpretation in between."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

Play = Callable[[Sequence[Tensor | None]], tuple[Any, ...]]

CONSTANT = -1  # inputs of group 0, 1, ... are -2, -3, ...


class NotPlayable(Exception):
    """The computation can't be played again from its operations: the message says why."""


@dataclass(frozen=True)
class Ref:
    """A value on the tape: output ``part`` of an operation (None: its only one), or input ``part`` of a group."""

    op: int
    part: int | None = None


@dataclass
class Op:
    """An operation: what is called with what, and which inputs it has to wait for."""

    call: Any
    args: Any
    kwargs: dict[str, Any]
    level: int
    uses: set[Ref]
    dtype: torch.dtype | None  # of the only output


class Recorded(Protocol):
    """What a program needs of a tape."""

    ops: list[Op]
    constants: list[Tensor]

    def level_of(self, ref: Ref) -> int:
        """The group of inputs that a value has to wait for; 0 for constants."""
        ...


class Program:
    """Plays some outputs of a tape: ``carry`` for each group of inputs but the last, then what is ``ready`` for that one."""

    def __init__(self, tape: Recorded, outputs: Mapping[str, Sequence[Ref | None]], last: int, quick: bool):
        self._tape, self._last, self._quick = tape, last, quick
        self._all = {name: list(refs) for name, refs in outputs.items()}
        self._names: dict[str, Any] = {f"c{i}": tensor for i, tensor in enumerate(tape.constants)}
        needed: dict[str, set[int]] = {name: self._slice(refs) for name, refs in self._all.items()}
        every = set().union(*needed.values())
        if any(tape.ops[i].level > last for i in every):
            raise NotPlayable("an output needs later inputs")
        finals = {name: [i for i in sorted(ops) if tape.ops[i].level == last] for name, ops in needed.items()}
        wanted = {ref for refs in self._all.values() for ref in refs if ref is not None}
        for ops in finals.values():
            wanted |= {ref for i in ops for ref in tape.ops[i].uses}
        self._carries: list[Callable[..., tuple[Tensor, ...]]] = []
        self._places: dict[Ref, tuple[int, int]] = {}
        stages = [[i for i in sorted(every) if tape.ops[i].level == level] for level in range(1, last)]
        for level, ops in enumerate(stages, 1):
            later = wanted | {ref for more in stages[level:] for i in more for ref in tape.ops[i].uses}
            kept = sorted(
                (ref for ref in later if tape.level_of(ref) == level), key=lambda ref: (ref.op, ref.part or 0)
            )
            self._carries.append(self._function(f"carry{level}", level, ops, kept))
            self._places |= {ref: (level, at) for at, ref in enumerate(kept)}
        self._finals = {name: self._function(f"play_{name}", last, finals[name], self._all[name]) for name in self._all}

    @property
    def names(self) -> list[str]:
        """Of the outputs that it plays."""
        return list(self._all)

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
            same_bits(self.ready(name, before)(inputs[self._last - 1]), outputs) for name, outputs in expected.items()
        )

    def _slice(self, refs: Sequence[Ref | None]) -> set[int]:
        found: set[int] = set()
        todo = [ref.op for ref in refs if ref is not None and ref.op > CONSTANT]
        while todo:
            at = todo.pop()
            if at not in found:
                found.add(at)
                todo.extend(ref.op for ref in self._tape.ops[at].uses if ref.op > CONSTANT)
        return found

    def _function(self, name: str, level: int, ops: Sequence[int], outputs: Sequence[Ref | None]) -> Callable[..., Any]:
        """Python source for one stage: straight calls, no interpretation."""
        tape, lines, here = self._tape, [], set(ops)

        def text(value: Any) -> str:
            if isinstance(value, Ref):
                return spelled(value)
            if isinstance(value, list | tuple):
                inner = ", ".join(text(entry) for entry in value)
                return f"[{inner}]" if isinstance(value, list) else f"({inner},)"
            if value is None or isinstance(value, bool | int | str):
                return repr(value)
            key = f"k{len(self._names)}"
            self._names[key] = value
            return key

        def spelled(ref: Ref) -> str:
            if ref.op == CONSTANT:
                return f"c{ref.part}"
            if ref.op == -level - 1:
                return f"i[{ref.part}]"
            if ref.op in here:
                return f"v{ref.op}" + ("" if ref.part is None else f"[{ref.part}]")
            stage, at = self._places[ref]
            return f"p{stage}[{at}]"

        def wrapped(op: Op) -> Any:
            # a number would be wrapped into a tensor at every call; the same number to the last bit in these types
            plain = (
                op.call._schema.name in _WITH_NUMBERS and op.dtype in (torch.float32, torch.float64) and not op.kwargs
            )
            if not (plain and self._quick):
                return op.args
            return [torch.tensor(float(a), dtype=op.dtype) if type(a) in (int, float) else a for a in op.args]

        for i in ops:
            op = tape.ops[i]
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


def same_bits(mine: Sequence[Tensor | None], own: Sequence[Tensor | None]) -> bool:
    """Whether tensors hold the same bits. None counts as zeros."""
    for one, two in zip(mine, own, strict=True):
        if one is None or two is None:
            there = two if one is None else one
            if there is not None and bool(there.count_nonzero()):
                return False
        elif one.dtype != two.dtype or one.shape != two.shape or not torch.equal(_bits(one), _bits(two)):
            return False
    return True


def _bits(tensor: Tensor) -> Tensor:
    kind = _INTEGERS.get(tensor.dtype)
    return tensor.detach() if kind is None else tensor.detach().view(kind)


_INTEGERS = {
    torch.float64: torch.int64,
    torch.float32: torch.int32,
    torch.float16: torch.int16,
    torch.bfloat16: torch.int16,
}


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
