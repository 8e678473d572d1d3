"""Random losses under probes: looking leaves no trace, and two looks from one moment see the same random numbers.

A probe is what a search does at a trial point: a value, a gradient or a graph for products, with the random numbers of a moment.
Compared to the last bit: the parameters and their `.grad`, the random states of torch, NumPy, Python and of the generators that
the losses own, and all buffers before and after; and what two probes from one moment gave.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import bisls
from attacks.operations import BUFFERS, ONCE, RANDOM, READS, TENSOR, WIDTH, Operation

ABOUT = "random losses under probes: no trace in parameters, random states and buffers; one moment, the same numbers"

# kind of case: the operations of which it has at least one, beside those of TENSOR
KINDS: dict[str, dict[str, Operation]] = {
    "tensor operations": TENSOR,
    "numbers read back": READS,
    "random numbers": RANDOM,
    "buffers": BUFFERS,
}
Loss = Callable[[Any], Tensor]
OPERATIONS = {f"{kind}: {name}": own for kind, table in KINDS.items() for name, own in table.items()}
DTYPES = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class Losses:
    """Two losses, and all that they are made from."""

    kind: str
    upper: tuple[str, ...]
    lower: tuple[str, ...]
    rows: tuple[int, int]  # of the upper and of the lower batch
    params: tuple[tuple[int, ...], tuple[int, ...]]  # the sizes of the tensors of each level
    dtypes: tuple[str, str, str, str]  # of x, y, the batches, and what is computed in
    seed: int


def cases(seed: int) -> Iterator[Losses]:
    """Endless; the kinds take turns."""
    number = 0
    while True:
        rng = random.Random(f"{seed}/{number}")
        kind = list(KINDS)[number % len(KINDS)]
        number += 1
        levels = []
        odd = rng.choice([(0,), (1,), (1,), (0, 1)])  # the levels at which the operations of its kind are
        for level in range(2):
            known = sorted(TENSOR.keys() - ONCE if level == 1 else TENSOR.keys())
            names = [f"tensor operations: {rng.choice(known)}" for _ in range(rng.randint(0, 3))]
            if level in odd:
                own = known if kind == "tensor operations" else sorted(KINDS[kind])
                names.insert(rng.randint(0, len(names)), f"{kind}: {rng.choice(own)}")
            levels.append(tuple(names))
        yield Losses(
            kind=kind,
            upper=levels[0],
            lower=levels[1],
            rows=(rng.choice((1, 2, 3, 5, 8, 9, 17, 40)), rng.choice((1, 2, 3, 5, 8, 9, 17, 40))),
            params=tuple((4, *(rng.choice((1, 4)) for _ in range(rng.randint(0, 2)))) for _ in range(2)),
            dtypes=(
                *(rng.choice(["float64", "float64", "float32", "float32", "bfloat16"]) for _ in range(3)),
                rng.choice(["float64", "float32"]),
            ),
            seed=rng.randrange(10**6),
        )


def kind(case: Losses) -> str:
    return case.kind


Batch = tuple[Tensor, Tensor, Tensor]


class Own:
    """What the losses keep from call to call: those of `tools` that an operation names, and modules."""

    def __init__(self, dtype: torch.dtype, tools: dict[str, Any]):
        self.dtype = dtype
        self.modules: dict[str, nn.Module] = {}
        vars(self).update(tools)

    def module(self, name: str, make: Callable[[], nn.Module]) -> nn.Module:
        """A module, made at its first use with numbers that depend on nothing else."""
        if name not in self.modules:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(1)
                self.modules[name] = make().to(self.dtype if name != "jit" else torch.float32)
        return self.modules[name]


class Call:
    """One call of a loss: its batch, and the parameters as rows and matrices of four."""

    def __init__(self, own: Own, x: list[Tensor], y: list[Tensor], mixture: Tensor, batch: Batch):
        self.own, (self.features, target, self.index) = own, batch
        self.module = own.module
        self.up, self.low = _sum(x, own.dtype), _sum(y, own.dtype)
        self.matrix = self.low[:, None] * mixture
        self.target = target.to(own.dtype)

    def fitted(self, operations: tuple[Operation, ...]) -> Tensor:
        """The mean square of what the operations make of the rows."""
        h = self.features.to(self.own.dtype)
        for operation in operations:
            h = operation(h, self)
        return ((h @ self.low - self.target) ** 2).mean()


def _sum(tensors: list[Tensor], dtype: torch.dtype) -> Tensor:
    first, *rest = (tensor.to(dtype) for tensor in tensors)
    return sum(rest, first)


def upper_loss(operations: tuple[Operation, ...], own: Own, x: list[Tensor], y: list[Tensor], mixture: Tensor) -> Loss:
    def loss(batch: Batch) -> Tensor:
        call = Call(own, x, y, mixture, batch)
        return call.fitted(operations) + 0.01 * (call.up**2).sum()

    return loss


def lower_loss(operations: tuple[Operation, ...], own: Own, x: list[Tensor], y: list[Tensor], mixture: Tensor) -> Loss:
    def loss(batch: Batch) -> Tensor:
        call = Call(own, x, y, mixture, batch)
        penalty = 0.1 * (torch.exp(0.3 * call.up) * call.low**2).sum()
        return call.fitted(operations) + penalty + 0.05 * sum((tensor.to(own.dtype) ** 2).sum() for tensor in y)

    return loss


def tools(seed: int, y: list[Tensor]) -> dict[str, Any]:
    """All that an operation may keep, by name."""
    whole = [tensor for tensor in y if tensor.dtype is not torch.bfloat16]
    return {
        "memory": whole[0].detach().numpy() if whole else np.zeros(1),
        "generator": torch.Generator().manual_seed(seed),
        "numpy": np.random.default_rng(seed),
        "python": random.Random(seed),
        "running": torch.zeros(WIDTH),
    }


class World:
    """The problem of one case, and what its losses keep."""

    def __init__(self, case: Losses):
        torch.manual_seed(case.seed)
        np.random.seed(case.seed)  # noqa: NPY002
        random.seed(case.seed)
        make = torch.Generator().manual_seed(case.seed)
        dtype = DTYPES[case.dtypes[3]]
        self.x, self.y = (
            [(0.5 * torch.randn(n, generator=make)).to(DTYPES[own]).requires_grad_() for n in sizes]
            for sizes, own in zip(case.params, case.dtypes, strict=False)
        )
        mixture = torch.randn(WIDTH, WIDTH, generator=make).to(dtype)
        levels = [tuple(OPERATIONS[name] for name in names) for names in (case.upper, case.lower)]
        named = {name for own in levels for operation in own for name in operation.__code__.co_names}
        self.own = Own(dtype, {name: tool for name, tool in tools(case.seed, self.y).items() if name in named})
        losses = [
            make_loss(operations, self.own, self.x, self.y, mixture)
            for make_loss, operations in zip((upper_loss, lower_loss), levels, strict=True)
        ]
        self.batches = [_batch(rows, DTYPES[case.dtypes[2]], make) for rows in case.rows]
        for loss, batch in zip(losses, self.batches, strict=True):  # modules are made at their first use
            loss(batch)
        declared = [vars(self.own)["running"]] if "running" in vars(self.own) else []
        self.problem = bisls.Bilevel(*losses, self.x, self.y, declared)

    def state(self) -> dict[str, Any]:
        """All that a probe could leave a trace in, by name; everything can be compared by its `repr`."""
        own, modules = vars(self.own), self.own.modules.items()
        found: dict[str, Any] = {
            f"{name}[{i}]": (tensor.tolist(), tensor.grad, tensor.requires_grad)
            for name, tensors in (("x", self.x), ("y", self.y))
            for i, tensor in enumerate(tensors)
        }
        found |= {f"buffer {name}.{part}": b.tolist() for name, module in modules for part, b in module.named_buffers()}
        if "running" in own:
            found["the declared buffer"] = own["running"].tolist()
        found |= {
            "torch's random state": torch.get_rng_state().tolist(),
            "NumPy's random state": str(np.random.get_state()),  # noqa: NPY002
            "Python's random state": random.getstate(),
        }
        states = {
            "generator": lambda own: own.get_state().tolist(),
            "numpy": lambda own: str(own.bit_generator.state),
            "python": lambda own: own.getstate(),
        }
        return found | {f"the state of its own {name}": read(own[name]) for name, read in states.items() if name in own}


def _batch(rows: int, dtype: torch.dtype, make: torch.Generator) -> Batch:
    features = torch.randn(rows, WIDTH, generator=make).to(dtype)
    return features, torch.randn(rows, generator=make).to(dtype), torch.randint(0, WIDTH, (rows,), generator=make)


Look = Callable[[], Any]


def looks(world: World) -> dict[str, Look]:
    """Every kind of probe, all from the present moment."""
    problem, (upper, lower), moment = world.problem, world.batches, world.problem.moment()
    oracle = bisls.Oracle(problem)

    def gradient() -> Any:
        point = oracle.lower(lower, replay=moment)
        return point.value, point.grad.tolist()

    def graph() -> Any:
        made = oracle.lower_graph(lower, moment)
        v = torch.linspace(1.0, 2.0, problem.y.numel).to(problem.y.dtype)
        return made.value, made.grad.tolist(), made.hessian(v).tolist(), made.mixed(v).tolist()

    return {
        "upper_value": lambda: oracle.upper_value(upper, moment),
        "lower_value": lambda: oracle.lower_value(lower, moment),
        "lower": gradient,
        "lower_graph": graph,
    }


@torch.no_grad()
def tried(case: Losses) -> str | None:
    world = World(case)
    before = world.state()
    for name, look in looks(world).items():
        seen = [_outcome(look) for _ in range(2)]
        if seen[0] != seen[1]:
            return f"two probes {name} from one moment differ: {_short(seen[0])}, {_short(seen[1])}"
        after = world.state()
        for what, own in before.items():
            if repr(after[what]) != repr(own):
                return (
                    f"the probe {name} leaves a trace: {what} was {_short(repr(own))}, is {_short(repr(after[what]))}"
                )
    if case.kind != "buffers":  # a loss that reads what it has changed is another one the second time
        return again(world)
    return None


def again(world: World) -> str | None:
    """Whether a gradient that is no probe and a probe of its moment see the same random numbers."""
    oracle = bisls.Oracle(world.problem)
    try:
        here = oracle.lower(world.batches[1])
    except Exception:
        return None  # the loss itself fails: that both probes failed alike was seen
    there = oracle.lower(world.batches[1], replay=here.moment)
    if repr((here.value, here.grad.tolist())) != repr((there.value, there.grad.tolist())):
        return f"a probe does not see what the call saw: {here.value}, {there.value}"
    return None


def _outcome(look: Look) -> str:
    """What a look gave, or how it failed: in some types torch has no kernel."""
    try:
        return repr(look())
    except Exception as error:
        return f"{type(error).__name__}: {error}".partition("\n")[0]


def _short(text: str) -> str:
    return text if len(text) <= 300 else f"{text[:300]}..."
