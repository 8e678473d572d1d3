"""Forged states: one place of a saved state is replaced by something else, and what was forged is loaded.

Loading must raise a ValueError (a CheckpointError for a file) and change nothing: neither parameters nor states, data or random
numbers. Or it loads, and the next two iterations run, end finite or with a SolverError, and do not go on for ever.
"""

from __future__ import annotations

import json
import logging
import random
import signal
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from functools import cache
from math import inf, isfinite, nan
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import bisls
from bisls import optim
from bisls.callbacks import EarlyStopping
from bisls.randomness import random_state, seed_everything, set_random_state
from bisls.solver import SolverError
from bisls.tasks.base import Batches

ABOUT = "forged states and checkpoints: refused with nothing changed, or the next iterations run and stay finite"
STEPS = 3  # before a state is saved
BUDGET = 20_000  # evaluations, and batches, that two iterations may take
SECONDS = 60  # a guard for what neither evaluates nor reads: no case takes a hundredth of it


class Hang(Exception):
    """Something goes on for ever."""


# --- what is put in place of something else: a function of what stood there


def _shaped(old: Any) -> Tensor:
    return old.detach() if isinstance(old, Tensor) and not old.is_meta else torch.ones(3, dtype=torch.float64)


def _spoilt(old: Any, value: float) -> Tensor:
    own = _shaped(old).clone()
    held = own.is_floating_point() and not (isfinite(value) and abs(value) > torch.finfo(own.dtype).max)
    own = own if held else own.double()
    own.view(-1)[-1:] = value
    return own


FORGERIES: dict[str, Callable[[Any], Any]] = {
    "nan": lambda old: nan,
    "inf": lambda old: inf,
    "-inf": lambda old: -inf,
    "-1": lambda old: -1,
    "-0.5": lambda old: -0.5,
    "0": lambda old: 0,
    "1e308": lambda old: 1e308,
    "1e15": lambda old: 1e15,
    "10**15": lambda old: 10**15,
    "2**70": lambda old: 2**70,
    "10**400": lambda old: 10**400,
    "'text'": lambda old: "text",
    "None": lambda old: None,
    "[]": lambda old: [],
    "{}": lambda old: {},
    "True": lambda old: True,
    "a tensor of another shape": lambda old: torch.zeros((*_shaped(old).shape, 2), dtype=_shaped(old).dtype),
    "a tensor without numbers": lambda old: torch.zeros(0, dtype=_shaped(old).dtype),
    "a complex tensor": lambda old: _shaped(old).to(torch.complex64),
    "a tensor of flags": lambda old: _shaped(old) != 0,
    "a tensor of whole numbers": lambda old: torch.ones_like(_shaped(old), dtype=torch.int32),
    "a tensor in half precision": lambda old: _shaped(old).to(torch.float16),
    "a tensor on no device": lambda old: torch.empty_like(_shaped(old), device="meta"),
    "a tensor with NaN": lambda old: _spoilt(old, nan),
    "a tensor with infinity": lambda old: _spoilt(old, -inf),
    "a tensor with 1e308": lambda old: _spoilt(old, 1e308),
    "a sparse tensor": lambda old: _shaped(old).to_sparse(),
    "a tensor that requires grad": lambda old: _shaped(old).double().clone().requires_grad_(),
}


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Every place of a nested state, containers as well; what lies in text that is JSON too."""
    if path:
        yield path
    own = _opened(value)
    if own is not None:
        for key in own if isinstance(own, dict) else range(len(own)):
            yield from places(own[key], (*path, key))


def _opened(value: Any) -> Any:
    if isinstance(value, str) and value.startswith("["):
        return json.loads(value)
    return value if isinstance(value, dict | list | tuple) else None


def forged(state: Any, path: tuple[Any, ...], change: Callable[[Any], Any]) -> Any:
    """The state with one place changed."""
    if not path:
        return change(state)
    own = _opened(state)
    entries = dict(own) if isinstance(own, dict) else list(own)
    entries[path[0]] = forged(entries[path[0]], path[1:], change)
    if isinstance(state, str):
        return json.dumps(entries, default=repr)
    return tuple(entries) if isinstance(state, tuple) else entries


def listed(value: Any) -> Any:
    """A nested state as text that shows every bit of it."""
    if isinstance(value, Tensor):
        return f"{value.dtype}{value.tolist()}"
    if isinstance(value, dict):
        return {str(name): listed(own) for name, own in value.items()}
    return [listed(own) for own in value] if isinstance(value, list | tuple) else repr(value)


# --- what has a state


class Problem:
    """f = 1/2 ||y - 1 - b||^2 + 0.05 ||x||^2 and g = 1/2 (y - Ax - b)' H (y - Ax - b) + a quartic, for a batch b."""

    def __init__(self, **bounds: Any):
        rng = torch.Generator().manual_seed(4)
        matrix = torch.randn(4, 3, generator=rng, dtype=torch.float64)
        curvature = torch.tensor([1.0, 3.0, 10.0, 30.0], dtype=torch.float64)
        self.x = torch.tensor([0.5, -1.0, 1.5], dtype=torch.float64, requires_grad=True)
        self.y = torch.tensor([0.1, 0.2, -0.3, 0.4], dtype=torch.float64, requires_grad=True)
        self.calls, self.counter = 0, torch.zeros(2)

        def upper(b: Any) -> Tensor:
            self.spend()
            return 0.5 * ((self.y - 1.0 - b) ** 2).sum() + 0.05 * (self.x**2).sum()

        def lower(b: Any) -> Tensor:
            self.spend()
            gap = self.y - matrix @ self.x - b
            return 0.5 * (curvature * gap**2).sum() + 0.01 * (gap**4).sum()

        self.problem = bisls.Bilevel(upper, lower, [self.x], [self.y], buffers=[self.counter], **bounds)

    def spend(self) -> None:
        self.calls += 1
        if self.calls > BUDGET:
            raise Hang(f"{BUDGET:,} evaluations")


def _batches(k: int, noise: float) -> tuple[Tensor, Any]:
    rng = torch.Generator().manual_seed(k if noise else 0)
    draws = [noise * torch.randn(4, generator=rng, dtype=torch.float64) for _ in range(4)]
    return draws[0], draws[1:]


def _paper(p: bisls.Bilevel, **parts: Any) -> bisls.Solver:
    return bisls.BiSLS.paper(p, lower_iters=3, max_checks=20, **parts)


def _own(p: bisls.Bilevel, **parts: Any) -> bisls.Solver:
    return bisls.BiSLS(p, lower_iters=3, **parts)


def _torch(make: Callable[..., Any], **settings: Any) -> Callable[[bisls.Bilevel], bisls.Solver]:
    return lambda p: bisls.BiSLS(p, lower_iters=3, lower_optimizer=make(p.y.tensors, **settings))


_RULE = bisls.Envelope(bisls.Armijo(), floor=1e-6, ceiling=bisls.Decay(10.0))
SOLVERS: dict[str, Callable[[bisls.Bilevel], bisls.Solver]] = {
    "BiSLS": _own,
    "BiSLS.paper": _paper,
    "BiSPS": lambda p: bisls.BiSPS(p, lower_iters=3),
    "BiSPS, two samples": lambda p: bisls.BiSPS(p, samples=2, lower_iters=3),
    "Alternating": lambda p: bisls.Alternating(
        p, lower_iters=3, upper_step=bisls.Constant(0.1), lower_step=bisls.Decay(0.01)
    ),
    "Denoised": lambda p: _own(p, direction=bisls.Denoised(b2=0.999), lower_direction=bisls.Denoised()),
    "Adam": lambda p: _own(p, direction=bisls.Adam(), lower_direction=bisls.Adam(search_momentum=False)),
    "LBFGS": lambda p: _own(p, direction=bisls.LBFGS(), lower_direction=bisls.LBFGS(history=2)),
    "Steepest, averaged": lambda p: _own(
        p, direction=bisls.Steepest(), lower_step=bisls.Constant(0.01), lower_average=True
    ),
    "Envelope": lambda p: _own(p, upper_step=_RULE, lower_step=_RULE),
    "Polyak": lambda p: _own(p, upper_step=bisls.Polyak(max_step=0.1), lower_step=bisls.DecreasingPolyak(max_step=0.1)),
    "Curvature": lambda p: _own(p, upper_step=bisls.Curvature(), lower_step=bisls.Curvature(start=None, watch=True)),
    "CG": lambda p: _own(p, hypergrad=bisls.Implicit(bisls.CG(warm=True, damp=True, stretch=3))),
    "Neumann": lambda p: _own(p, hypergrad=bisls.Implicit(bisls.Neumann(10)), polish=bisls.CG()),
    "spread": lambda p: _own(p, hypergrad=bisls.Implicit(bisls.Direct(bisls.CG()), spread=0.5)),
    "StochasticNeumann": lambda p: _own(p, hypergrad=bisls.StochasticNeumann(5)),
    "Unrolled": lambda p: _own(p, hypergrad=bisls.Unrolled(5)),
    "GradientSteps": lambda p: _own(p, response=bisls.GradientSteps(2)),
    "Resampled": lambda p: bisls.Solver(
        p,
        direction=bisls.Steepest(),
        response=bisls.Resampled(),
        hypergrad=bisls.Implicit(bisls.Neumann(9)),
        upper_step=bisls.Polyak(max_step=0.1),
        lower_step=bisls.Armijo(),
        lower_iters=3,
    ),
    "Frozen": lambda p: _own(p, response=bisls.Frozen()),
    "torch.optim.SGD": _torch(torch.optim.SGD, lr=0.01, momentum=0.9),
    "torch.optim.Adam": _torch(torch.optim.Adam, lr=0.01, amsgrad=True),
    "torch.optim.RMSprop": _torch(torch.optim.RMSprop, lr=0.01, centered=True),
    "torch.optim.Rprop": _torch(torch.optim.Rprop, lr=0.01),
    "torch.optim.Adagrad": _torch(torch.optim.Adagrad, lr=0.01),
    "torch.optim.ASGD": _torch(torch.optim.ASGD, lr=0.01),
}
NOISE = {"one batch": 0.0, "batches": 0.3}
BOUNDS = {"": {}, "bounds": {"upper_bounds": bisls.Box(-2.0, 2.0), "lower_bounds": bisls.Box(low=-1.5)}}

OPTIMISERS: dict[str, Callable[[list[Tensor]], torch.optim.Optimizer]] = {
    "Auto": optim.Auto,
    "Auto, groups": lambda own: optim.Auto([{"params": own[:1], "lr": 0.5}, {"params": own[1:]}], weight_decay=0.01),
    "SPSMax": lambda own: optim.SPSMax(own, averaging=True),
    "DecSPS": optim.DecSPS,
    "SPSB": lambda own: optim.SPSB(own, averaging=3.0),
    "SLS": lambda own: optim.SLS(own, averaging=True),
    "SLSB": lambda own: optim.SLSB(own, grow=2.0, shrink=0.5),
}


@dataclass(frozen=True)
class Case:
    """One forgery.

    Attributes:
        kind: Which row of the table it is counted in.
        subject: Whose state it is, as a name and the settings beside it.
        at: The place, as a share of all places of the state.
        forgery: What is put there.
    """

    kind: str
    subject: tuple[str, ...]
    at: float
    forgery: str

    def of(self, state: Any) -> tuple[tuple[Any, ...], Any]:
        """The place, and the forged state."""
        own = list(places(state))
        path = own[int(self.at * len(own))]
        return path, forged(state, path, FORGERIES[self.forgery])


def cases(seed: int) -> Iterator[Case]:
    """Forgeries without end."""
    rng = random.Random(seed)
    while True:
        kind = rng.choice(list(TRIED))
        subject = TRIED[kind][0](rng)
        yield Case(kind, subject, rng.random(), rng.choice(list(FORGERIES)))


def kind(case: Case) -> str:
    """The row of the table."""
    return case.kind


def tried(case: Case) -> str | None:
    """What broke."""
    before = random_state()
    seed_everything(0)
    quiet = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with warnings.catch_warnings(), _watched():
            warnings.simplefilter("ignore")
            return TRIED[case.kind][1](case)
    finally:
        logging.disable(quiet)
        set_random_state(before)


@contextmanager
def _watched() -> Iterator[None]:
    """A clock for what would go on for ever without an evaluation."""

    def late(*_: Any) -> None:
        raise Hang(f"{SECONDS} seconds")

    try:
        old = signal.signal(signal.SIGALRM, late)
    except (AttributeError, ValueError):  # no such signal, or not the main thread
        yield
        return
    signal.setitimer(signal.ITIMER_REAL, SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, old)


def _finite(*tensors: Tensor) -> bool:
    return all(bool(torch.isfinite(tensor).all()) for tensor in tensors)


def _said(path: tuple[Any, ...], what: str, error: Exception | None = None) -> str:
    place = "".join(f"[{key!r}]" for key in path)
    return f"state{place}: {what}" + (f": {type(error).__name__}: {error}" if error is not None else "")


# --- solvers


def _made(subject: tuple[str, ...]) -> tuple[Problem, bisls.Solver]:
    own = Problem(**BOUNDS[subject[2]])
    return own, SOLVERS[subject[0]](own.problem)


@cache
def _solver_state(subject: tuple[str, ...]) -> tuple[Tensor, Tensor, Any]:
    own, solver = _made(subject)
    for k in range(STEPS):
        solver.step(*_batches(k, NOISE[subject[1]]))
    return own.x.detach().clone(), own.y.detach().clone(), solver.state_dict()


def _try_solver(case: Case) -> str | None:
    x, y, state = _solver_state(case.subject)
    own, solver = _made(case.subject)
    solver.step(*_batches(7, NOISE[case.subject[1]]))
    with torch.no_grad():
        own.x.copy_(x)
        own.y.copy_(y)
    path, state = case.of(deepcopy(state))
    before = listed([solver.state_dict(), own.x, own.y])
    try:
        solver.load_state_dict(state)
    except ValueError:
        same = listed([solver.state_dict(), own.x, own.y]) == before
        return None if same else _said(path, "refused, and something was changed")
    except Exception as error:
        return _said(path, "refused by", error)
    own.calls = 0
    try:
        for k in range(2):
            solver.step(*_batches(STEPS + k, NOISE[case.subject[1]]))
    except SolverError:
        pass
    except Exception as error:
        return _said(path, "loaded, and then", error)
    return None if _finite(own.x, own.y) else _said(path, "loaded, and the parameters are not finite")


# --- optimisers


def _trained(subject: tuple[str, ...]) -> tuple[torch.optim.Optimizer, list[Tensor], Callable[[], Tensor]]:
    dtype = getattr(torch, subject[1])
    params = [torch.linspace(-1.0, 1.0, size, dtype=dtype).requires_grad_() for size in (3, 2)]
    calls = [0]

    def loss() -> Tensor:
        calls[0] += 1
        if calls[0] > BUDGET:
            raise Hang(f"{BUDGET:,} evaluations")
        return sum((((p - 0.3) ** 2).sum() for p in params), torch.zeros((), dtype=dtype))

    return OPTIMISERS[subject[0]](params), params, loss


@cache
def _optimiser_state(subject: tuple[str, ...]) -> tuple[list[Tensor], Any]:
    made, params, loss = _trained(subject)
    for _ in range(STEPS):
        made.step(loss)
    if subject[2] == "evaluated":
        made.eval()
    return [p.detach().clone() for p in params], deepcopy(made.state_dict())


def _try_optimiser(case: Case) -> str | None:
    points, state = _optimiser_state(case.subject)
    made, params, loss = _trained(case.subject)
    made.step(loss)
    with torch.no_grad():
        for p, point in zip(params, points, strict=True):
            p.copy_(point)
    path, state = case.of(deepcopy(state))
    before = listed([made.state_dict(), params])
    try:
        made.load_state_dict(state)
    except ValueError:
        same = listed([made.state_dict(), params]) == before
        return None if same else _said(path, "refused, and something was changed")
    except Exception as error:
        return _said(path, "refused by", error)
    try:
        made.train()
        for _ in range(2):
            made.step(loss)
        made.eval()
        averaged = _finite(*params)
        made.train()
    except Exception as error:
        return _said(path, "loaded, and then", error)
    return None if averaged and _finite(*params) else _said(path, "loaded, and the parameters are not finite")


# --- whole checkpoints


class Source:
    """Batches, counted."""

    def __init__(self) -> None:
        self.taken = 0

    def next(self) -> Tensor:
        self.taken += 1
        if self.taken > BUDGET:
            raise Hang(f"{BUDGET:,} batches")
        rng = torch.Generator().manual_seed(self.taken)
        return 0.3 * torch.randn(4, generator=rng, dtype=torch.float64)


class Iterated(Source):
    """An iterator."""

    def __iter__(self) -> Iterated:
        return self

    def __next__(self) -> Tensor:
        return self.next()


class Called(Source):
    """A callable that has a place."""

    def __call__(self) -> Tensor:
        return self.next()

    def state_dict(self) -> dict[str, Any]:
        return {"taken": self.taken}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if not isinstance(state["taken"], int) or state["taken"] < 0:
            raise ValueError("taken must be a whole number")
        self.taken = state["taken"]


class First(Batches):
    """Batches that are a tensor rather than a tuple of one."""

    def __next__(self) -> Tensor:  # type: ignore[override]
        return super().__next__()[0][0]


def _rows() -> Tensor:
    return 0.3 * torch.randn(24, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def _loader() -> Any:
    generator = torch.Generator().manual_seed(3)
    return torch.utils.data.DataLoader(_rows(), batch_size=None, shuffle=True, generator=generator)


DATA: dict[str, Callable[[], Any]] = {
    "one batch": lambda: torch.zeros(4, dtype=torch.float64),
    "Batches": lambda: First((_rows(),), 1, seed=3),
    "loader": _loader,
    "loader, global random numbers": lambda: torch.utils.data.DataLoader(_rows(), batch_size=None, shuffle=True),
    "iterator": Iterated,
    "callable": Called,
}


class Run:
    """A run of `fit` with all that it keeps."""

    def __init__(self, subject: tuple[str, ...], path: Path):
        self.own, self.solver = _made((subject[0], "", subject[2]))
        self.upper, self.lower = DATA[subject[1]](), DATA[subject[1]]()
        self.stopping, self.net = EarlyStopping(50, restore=True), nn.BatchNorm1d(3)
        self.path = path

    def fit(self, steps: int) -> None:
        saved = bisls.Checkpoint(self.path, extra={"net": self.net})
        callbacks = [self.stopping, bisls.callbacks.Evaluate(lambda: 1.0)]
        bisls.fit(self.solver, self.upper, self.lower, steps, False, callbacks, saved, True, "ignore")

    def traces(self) -> Any:
        stateful = [data for data in (self.upper, self.lower) if hasattr(data, "state_dict")]
        taken = [getattr(data, "taken", 0) for data in (self.upper, self.lower)]
        generators = [
            data.generator.get_state() for data in (self.upper, self.lower) if getattr(data, "generator", None)
        ]
        states = [own.state_dict() for own in (self.solver, self.stopping, self.net, *stateful)]
        return listed([self.own.x, self.own.y, self.own.counter, states, taken, generators, random_state()])


@cache
def _file_content(subject: tuple[str, ...]) -> Any:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "run.pt"
        Run(subject, path).fit(STEPS)
        return torch.load(path, weights_only=True)


def _try_file(case: Case) -> str | None:
    content = _file_content(case.subject)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "run.pt"
        path, content = case.of(deepcopy(content))
        torch.save(content, file)
        seed_everything(5)
        run = Run(case.subject, file)
        before = run.traces()
        try:
            run.fit(STEPS + 2)
        except bisls.CheckpointError:
            return None if run.traces() == before else _said(path, "refused, and something was changed")
        except SolverError:
            pass
        except Exception as error:
            return _said(path, "ended by", error)
        return None if _finite(run.own.x, run.own.y) else _said(path, "loaded, and the parameters are not finite")


def _some(*tables: Any) -> Callable[[random.Random], tuple[str, ...]]:
    return lambda rng: tuple(rng.choice(list(table)) for table in tables)


FITTED = ("BiSLS", "BiSLS.paper", "Adam", "Steepest, averaged", "torch.optim.Adam", "spread")
TRIED: dict[str, tuple[Callable[[random.Random], tuple[str, ...]], Callable[[Case], str | None]]] = {
    "states of solvers": (_some(SOLVERS, NOISE, BOUNDS), _try_solver),
    "states of optimisers": (_some(OPTIMISERS, ("float32", "float64", "bfloat16"), ("", "evaluated")), _try_optimiser),
    "checkpoint files": (_some(FITTED, DATA, BOUNDS), _try_file),
}
