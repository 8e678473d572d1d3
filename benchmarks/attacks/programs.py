"""Random programs as losses, played from a tape and called: whatever a loss does, `tape=` must not change the run.

Compared to the last bit: x, y, every record with its counts, the random states of torch, NumPy, Python and of the generators
that the losses own, and all buffers afterwards. Where both runs end with the same error, that is the same run too.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import bisls
from attacks.operations import ANNEALED, BUFFERS, COUNTED, ONCE, RANDOM, READS, TENSOR, WIDTH, Operation

ABOUT = "random losses, with tape=True and with tape=False: x, y, records, random states and buffers to the last bit"

# kind of case: the operations of which it has at least one, beside those of TENSOR
KINDS: dict[str, dict[str, Operation]] = {
    "tensor operations": TENSOR,
    "numbers read back": READS,
    "random numbers": RANDOM,
    "buffers": BUFFERS,
    "changed between iterations": ANNEALED,
    "changed within an iteration": COUNTED,
}
Loss = Callable[[Any], Tensor]
UNPROMISED = ("changed within an iteration",)
OPERATIONS = {f"{kind}: {name}": own for kind, table in KINDS.items() for name, own in table.items()}
DTYPES = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16}
METHODS: dict[str, Callable[[bisls.Bilevel], bisls.Solver]] = {
    "BiSLS": lambda p: bisls.BiSLS(p, lower_iters=3),
    "BiSLS, CG": lambda p: bisls.BiSLS(p, lower_iters=3, hypergrad=bisls.Implicit(bisls.CG(iters=3)), polish=None),
    "BiSLS, unrolled": lambda p: bisls.BiSLS(p, lower_iters=3, hypergrad=bisls.Unrolled(3)),
    "BiSLS.paper": lambda p: bisls.BiSLS.paper(p, lower_iters=3, max_checks=20),
    "BiSPS": lambda p: bisls.BiSPS(p, samples=2, lower_iters=3),
    "Alternating": lambda p: bisls.Alternating(p, lower_iters=3),
}


@dataclass(frozen=True)
class Program:
    """One problem, and all that its run is made from."""

    kind: str
    upper: tuple[str, ...]
    lower: tuple[str, ...]
    rows: tuple[int, ...]
    params: tuple[tuple[int, ...], tuple[int, ...]]  # the sizes of the tensors of each level
    dtypes: tuple[str, str, str, str]  # of x, y, the batches, and what is computed in
    method: str
    several: bool
    judge: bool
    iterations: int
    seed: int


def cases(seed: int) -> Iterator[Program]:
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
        shapes = [rng.choice((1, 2, 3, 5, 8, 9, 17, 40)) for _ in range(rng.randint(1, 6))]
        yield Program(
            kind=kind,
            upper=levels[0],
            lower=levels[1],
            rows=tuple(shapes),
            params=tuple((4, *(rng.choice((1, 4)) for _ in range(rng.randint(0, 2)))) for _ in range(2)),
            dtypes=(
                *(rng.choice(["float64", "float64", "float32", "float32", "bfloat16"]) for _ in range(3)),
                _compute(rng),
            ),
            method=rng.choice([*["BiSLS"] * 4, *METHODS]),
            several=rng.random() < 0.6,
            judge=rng.random() < 0.3,
            iterations=rng.randint(6, 10),
            seed=rng.randrange(10**6),
        )


def _compute(rng: random.Random) -> str:
    return rng.choice(["float64", "float32"])


def kind(case: Program) -> str:
    return case.kind


def promised(case: Program) -> bool:
    return case.kind not in UNPROMISED


Batch = tuple[Tensor, Tensor, Tensor]


class Own:
    """What the losses of a run keep from call to call: those of `tools` that an operation names, and modules."""

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
        "ema": torch.zeros(WIDTH),
        "running": torch.zeros(WIDTH),
        "weight": 1.0,
        "calls": 0,
        "list": [1.0],
        "knob": torch.ones(WIDTH),
        "other": torch.ones(WIDTH),
        "mask": torch.ones(WIDTH),
        "function": torch.tanh,
    }


class World:
    """The problem of one run, and what its losses keep."""

    def __init__(self, case: Program):
        self.case = case
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
        self.losses = [
            make_loss(operations, self.own, self.x, self.y, mixture)
            for make_loss, operations in zip((upper_loss, lower_loss), levels, strict=True)
        ]
        for loss in self.losses:  # modules are made at their first use
            loss(self.batch(0))

    def problem(self, tape: bool) -> bisls.Bilevel:
        declared = [vars(self.own)["running"]] if "running" in vars(self.own) else []
        return bisls.Bilevel(*self.losses, self.x, self.y, declared, tape=tape)

    def batch(self, place: int) -> Batch:
        rows = self.case.rows[place % len(self.case.rows)]
        make = torch.Generator().manual_seed(1000 * self.case.seed + place)
        dtype = DTYPES[self.case.dtypes[2]]
        features = torch.randn(rows, WIDTH, generator=make).to(dtype)
        return features, torch.randn(rows, generator=make).to(dtype), torch.randint(0, WIDTH, (rows,), generator=make)

    def between(self, k: int) -> None:
        """What a callback would do after iteration k."""
        own = vars(self.own)
        changed = {
            "weight": lambda old: 1.0 + 0.3 * (k + 1) if k < 3 else old,
            "list": lambda old: [*old, 0.1 * k],
            "other": lambda old: old * 0.97,
            "mask": lambda old: (torch.arange(WIDTH) != k % WIDTH).float(),
            "function": lambda old: (torch.tanh, torch.sin, nn.functional.silu)[k % 3],
        }
        own.update({name: change(own[name]) for name, change in changed.items() if name in own})
        if "knob" in own:
            with torch.no_grad():
                own["knob"].mul_(1.05)
        if "switched" in self.own.modules and k == 2:
            self.own.modules["switched"].eval()

    def afterwards(self) -> dict[str, Any]:
        """All that a run may have changed beside the parameters."""
        own, modules = vars(self.own), self.own.modules.items()
        found = {f"buffer {name}.{part}": b.tolist() for name, module in modules for part, b in module.named_buffers()}
        found |= {f"the tensor {name}": own[name].tolist() for name in ("ema", "running") if name in own}
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


def run(case: Program, tape: bool, world: World | None = None) -> dict[str, Any]:
    """What came of a run, by name; everything can be compared by its `repr`."""
    world = world or World(case)
    solver = METHODS[case.method](world.problem(tape))
    found: dict[str, Any] = {}
    place = 0
    for k in range(case.iterations):
        if case.several:
            upper, lower = world.batch(place), [world.batch(place + 1 + i) for i in range(3)]
            place += 4
        else:
            upper, lower = world.batch(0), world.batch(1)
        judge = world.batch(10**5 + k) if case.judge else None
        try:
            found[f"record {k}"] = solver.step(upper, lower, judge)
        except Exception as error:
            found[f"error {k}"] = f"{type(error).__name__}: {error}".partition("\n")[0]
        found[f"x after {k}"], found[f"y after {k}"] = ([t.tolist() for t in own] for own in (world.x, world.y))
        world.between(k)
    return found | world.afterwards()


def played(case: Program) -> bool:
    """Whether the tape saves calls of the losses: otherwise the case says nothing about it.

    They are counted from outside: a loss that counts its own calls is none that could be recorded.
    """
    counts = []
    for tape in (True, False):
        world, calls = World(case), 0
        codes = {loss.__code__ for loss in world.losses}

        def count(frame: Any, event: str, _: Any, codes: set[Any] = codes) -> None:
            nonlocal calls
            calls += event == "call" and frame.f_code in codes

        sys.setprofile(count)
        try:
            run(case, tape, world)
        finally:
            sys.setprofile(None)
        counts.append(calls)
    return counts[0] < counts[1]


def difference(one: dict[str, Any], two: dict[str, Any]) -> str | None:
    """The first entry in which two runs differ."""
    for name in dict.fromkeys([*one, *two]):
        first, second = repr(one.get(name)), repr(two.get(name))
        if first != second:
            return f"{name}: {_short(first)} with the tape, {_short(second)} without"
    return None


def _short(text: str) -> str:
    return text if len(text) <= 300 else f"{text[:300]}..."


def trace(case: Program) -> str | None:
    """What a probe leaves behind, or what two probes from one moment do not agree on."""
    world = World(case)
    problem, losses = world.problem(tape=False), world.losses
    before, moment = world.afterwards(), problem.moment()
    values = []
    for _ in range(2):
        with problem.probing(moment):
            values.append([loss(world.batch(i)).item() for i, loss in enumerate(losses)])
    after = world.afterwards()
    for name, own in before.items():
        if repr(after[name]) != repr(own):
            return f"a probe leaves a trace: {name} was {_short(repr(own))}, is {_short(repr(after[name]))}"
    if repr(values[0]) != repr(values[1]):
        return f"two probes from one moment differ: {values[0]}, {values[1]}"
    return None


def tried(case: Program) -> str | None:
    left = trace(case)
    if left is not None:
        return left
    called = run(case, tape=False)
    found = difference(run(case, tape=True), called)
    if found is not None and difference(run(case, tape=False), called) is not None:
        return None  # the program itself never gives the same numbers twice
    return found


def smaller(case: Program) -> Iterator[Program]:
    """Cases with something left out, for those who look for the cause."""
    for level in ("upper", "lower"):
        names = getattr(case, level)
        for i in range(len(names)):
            yield replace(case, **{level: names[:i] + names[i + 1 :]})
    if len(case.rows) > 1:
        yield replace(case, rows=case.rows[:1])
    if case.several:
        yield replace(case, several=False)
    if case.judge:
        yield replace(case, judge=False)
    if case.method != "BiSLS":
        yield replace(case, method="BiSLS")
    if case.iterations > 1:
        yield replace(case, iterations=case.iterations // 2)
    if any(own != "float64" for own in case.dtypes):
        yield replace(case, dtypes=("float64",) * 4)
    if case.params != ((4,), (4,)):
        yield replace(case, params=((4,), (4,)))
