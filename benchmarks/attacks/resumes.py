"""Random runs of `fit`, cut anywhere and resumed in fresh objects: what comes out is the run that was never cut, bit for bit.

A run is a composition: a method, two losses with what they draw and keep, a way to put a batch together, data for each level,
callbacks, a checkpoint now and then. It is ended by fewer steps, by an interrupt, by a callback that raises or in the middle
of an iteration by a loss that does; then everything is made anew, with another random state, and goes on from the file.
Compared: x, y, records, evaluations, the lines of the log, buffers, and the random state afterwards.
"""

from __future__ import annotations

import itertools
import random
import tempfile
from collections import OrderedDict, UserDict, namedtuple
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import bisls
from attacks.problems import METHODS, loss_of

ABOUT = "runs of fit, cut at random places and resumed in fresh objects, beside the whole run: bit for bit"

SIZE, ROWS = 3, 24
Pair = namedtuple("Pair", ["features", "target"])


@dataclass
class Both:
    """A batch as a dataclass."""

    features: Any
    target: Any


# a way to put a batch together, and to open it again
CONTAINERS: dict[str, tuple[Callable[[Tensor, Tensor], Any], Callable[[Any], tuple[Any, Any]]]] = {
    "tuple": (lambda f, t: (f, t), lambda b: (b[0], b[1])),
    "dict": (lambda f, t: {"f": f, "t": t}, lambda b: (b["f"], b["t"])),
    "dict by number": (lambda f, t: {0: f, 7: t}, lambda b: (b[0], b[7])),
    "OrderedDict": (lambda f, t: OrderedDict(f=f, t=t), lambda b: (b["f"], b["t"])),
    "UserDict": (lambda f, t: UserDict(f=f, t=t), lambda b: (b["f"], b["t"])),
    "namedtuple": (Pair, lambda b: (b.features, b.target)),
    "dataclass": (Both, lambda b: (b.features, b.target)),
    "nested": (lambda f, t: {"in": (f, [t, "text", 3]), "rest": None}, lambda b: (b["in"][0], b["in"][1][0])),
    "arrays": (lambda f, t: (f.numpy(), t.numpy()), lambda b: (b[0], b[1])),
    "an array and a tensor": (lambda f, t: {"f": f.numpy(), "t": t}, lambda b: (b["f"], b["t"])),
    "namedtuple of arrays": (lambda f, t: Pair(f.numpy(), t.numpy()), lambda b: (b.features, b.target)),
    "beside other things": (lambda f, t: (f, t, b"id", 1j, slice(2), {3}, f.shape, f.dtype, ["u"]), lambda b: b[:2]),
    "labels that are missing": (lambda f, t: (f, t, torch.tensor(float("nan"))), lambda b: b[:2]),
    "one tensor": (lambda f, t: torch.cat([f, t[:, None]], dim=1), lambda b: (b[:, :SIZE], b[:, SIZE])),
}


def table(seed: int) -> tuple[Tensor, Tensor]:
    rng = torch.Generator().manual_seed(seed)
    features = torch.randn(ROWS, SIZE, generator=rng, dtype=torch.float64)
    return features, features @ torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64) + torch.randn(ROWS, generator=rng)


class Source:
    """The rows of one level, and how a batch of some of them is put together."""

    def __init__(self, seed: int, container: str, sizes: tuple[int, ...]):
        self.features, self.target = table(seed)
        self.container, self.sizes = container, sizes
        self.pack = CONTAINERS[container][0]

    def batch(self, rows: Any) -> Any:
        return self.pack(self.features[rows].clone(), self.target[rows].clone())

    def numbered(self, n: int) -> Any:
        """The batch of that number: its size and its rows depend on nothing else."""
        rng = torch.Generator().manual_seed(1000 + n)
        return self.batch(torch.randint(ROWS, (self.sizes[n % len(self.sizes)],), generator=rng))


class Rows(Dataset):
    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, i: int) -> int:
        return i


class Counting:
    """A callable, an iterator or a loader that saves its own place; it may end."""

    def __init__(self, source: Source, end: int | None = None):
        self.source, self.end, self.place = source, end, 0

    def __call__(self) -> Any:
        if self.end is not None and self.place >= self.end:
            raise StopIteration
        self.place += 1
        return self.source.numbered(self.place)

    def state_dict(self) -> dict[str, Any]:
        return {"place": self.place}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.place = state["place"]


class Iterating(Counting):
    def __iter__(self) -> Iterating:
        return self

    def __next__(self) -> Any:
        return self()


class Sized:
    """A loader of the user's own: batches of several sizes, in an order from NumPy's and Python's generators."""

    def __init__(self, source: Source):
        self.source = source

    def __iter__(self) -> Iterator[Any]:
        order = np.random.permutation(7).tolist()  # noqa: NPY002
        random.shuffle(order)
        yield from (self.source.numbered(n) for n in order)


class Noisy(Rows):
    """Rows in an order that a generator of its own changes."""

    def __init__(self) -> None:
        self.rng = np.random.default_rng(8)

    def __getitem__(self, i: int) -> int:
        return (i + int(self.rng.integers(3))) % ROWS


def drawn(source: Source) -> Callable[[], Any]:
    own = random.Random(8)
    return lambda: source.numbered(own.randrange(9))


def generated(source: Source) -> Iterator[Any]:
    for n in itertools.count():
        yield source.numbered(n + int(torch.randint(5, ()).item()))


def loader(source: Source, **options: Any) -> DataLoader:
    return DataLoader(Rows(), source.sizes[0], collate_fn=source.batch, **options)


def unshuffled(source: Source) -> DataLoader:
    return DataLoader(Rows(), ROWS, collate_fn=source.batch)


DATA: dict[str, Callable[[Source], Any]] = {
    "one batch": lambda source: CONTAINERS["tuple"][0](source.features, source.target),
    "fresh and equal": lambda source: lambda: source.batch(slice(0, ROWS)),
    "a loader of one batch": unshuffled,
    "a loader": lambda source: loader(source, shuffle=True),
    "a loader with a generator": lambda source: loader(
        source, shuffle=True, generator=torch.Generator().manual_seed(4)
    ),
    "a loader of its own": Sized,
    "a callable": lambda source: lambda: source.batch(torch.randint(ROWS, (source.sizes[0],))),
    "a callable of numpy": lambda source: lambda: source.batch(np.random.randint(ROWS, size=source.sizes[0])),  # noqa: NPY002
    "a callable of python": lambda source: lambda: source.numbered(random.randrange(9)),
    "a callable with a generator": drawn,
    "a loader of rows with a generator": lambda source: DataLoader(
        Noisy(), source.sizes[0], collate_fn=source.batch, shuffle=True
    ),
    "a callable with a state": Counting,
    "an iterator": generated,
    "an iterator with a state": Iterating,
}
# the same, but they end: the run ends with them, and goes on with longer ones
ENDING: dict[str, Callable[[Source, int], Any]] = {
    "an iterator": lambda source, end: itertools.islice(generated(source), end),
    "a callable with a state": Counting,
    "an iterator with a state": Iterating,
}


class Losses:
    """Both losses, with what they draw, keep and are told."""

    def __init__(self, case: Composition):
        self.case = case
        dtype = torch.float64 if case.double else torch.float32
        self.x = torch.full((SIZE,), -1.0, dtype=dtype, requires_grad=True)
        self.y = torch.linspace(-0.5, 1.0, SIZE, dtype=dtype).requires_grad_()
        self.norm = nn.BatchNorm1d(SIZE, affine=False, dtype=dtype)
        self.running = torch.zeros(SIZE, dtype=dtype)
        self.generator = torch.Generator().manual_seed(3)
        self.numpy = np.random.default_rng(3)
        self.weight = 1.0
        self.left: int | None = None  # calls until the lower loss raises

    def seen(self, batch: Any) -> tuple[Tensor, Tensor]:
        parts = batch[:2] if type(batch) is tuple else CONTAINERS[self.case.container][1](batch)
        features, target = (torch.as_tensor(part).to(self.y.dtype) for part in parts)
        extras = self.case.extras
        if "dropout" in extras:
            features = torch.dropout(features, 0.2, True)
        if "batch norm" in extras:
            features = self.norm(torch.cat([features, torch.zeros_like(features[:1])]))[:-1]
        if "declared buffer" in extras:
            with torch.no_grad():
                self.running.mul_(0.9).add_(0.1 * features.mean(0))
            features = features - 0.1 * self.running
        if "numpy" in extras:
            features = features * (1.0 + 0.1 * float(np.random.randn()))  # noqa: NPY002
        if "python" in extras:
            features = features * (1.0 + 0.1 * random.random())
        if "own generator" in extras:
            features = features + 0.05 * torch.randn(SIZE, generator=self.generator).to(features.dtype)
        if "own numpy" in extras:
            features = features + 0.05 * float(self.numpy.standard_normal())
        if "annealed" in extras:
            features = features * self.weight
        if "read back" in extras:
            target = target * (1.0 + 0.01 * len(set(np.asarray(target.detach()).round().tolist())))
        return features, target

    def fitted(self, batch: Any) -> Tensor:
        features, target = self.seen(batch)
        return ((features @ self.y - target) ** 2).mean()

    def upper(self, batch: Any) -> Tensor:
        return self.fitted(batch) + 0.01 * loss_of(self.case.upper, self.y) + 0.001 * (self.x**2).sum()

    def lower(self, batch: Any) -> Tensor:
        if self.left is not None:
            self.left -= 1
            if self.left < 0:
                raise Crash("the loss")
        return self.fitted(batch) + 0.01 * loss_of(self.case.lower, self.y) + (self.x.exp() * self.y**2).sum()

    def state_dict(self) -> dict[str, Any]:
        """What the losses keep beside x, y, declared buffers and generators, for `Checkpoint(extra=...)`."""
        return self.norm.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.norm.load_state_dict(state)


class Crash(Exception):
    """Somebody pulls the plug."""


class Anneal(bisls.Callback):
    """Makes the losses' weight smaller by its own count of iterations, which it saves."""

    def __init__(self, losses: Losses):
        self.losses, self.count = losses, 0

    def step(self, record: bisls.Record, state: Any) -> None:
        self.count += 1
        self.losses.weight *= 0.95 if self.count % 2 else 1.01

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count, "weight": self.losses.weight}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count, self.losses.weight = state["count"], state["weight"]


class Cut(bisls.Callback):
    """Ends a run after an iteration."""

    def __init__(self, k: int, error: type[BaseException]):
        self.k, self.error = k, error

    def step(self, record: bisls.Record, state: Any) -> None:
        if record.k + 1 >= self.k:
            raise self.error("the callback")


@dataclass(frozen=True)
class Composition:
    """One run, and where it is cut."""

    method: str
    upper: str
    lower: str
    extras: tuple[str, ...]
    container: str
    upper_data: str
    lower_data: str
    step_data: str | None
    sizes: tuple[int, ...]
    steps: int
    every: int
    cuts: tuple[tuple[int, str], ...]
    bounded: bool
    double: bool
    evaluate: int
    seed: int


EXTRAS = (
    "dropout",
    "batch norm",
    "declared buffer",
    "numpy",
    "python",
    "own generator",
    "own numpy",
    "annealed",
    "read back",
)
KINDS = {
    "wall",
    "logarithm",
    "nan",
    "inf",
    "far",
    "exponential",
    "linear",
    "negative",
}  # nothing to see after they fail
SMOOTH = ("quadratic", "double well", "flat", "quartic", "constant", "absolute", "cosine")


def cases(seed: int) -> Iterator[Composition]:
    """Endless."""
    for number in itertools.count():
        rng = random.Random(f"{seed}/{number}")
        steps = rng.randint(4, 9)
        extras = tuple(sorted(rng.sample(EXTRAS, rng.choice((0, 1, 1, 2, 3)))))
        kinds = [rng.choice(sorted(DATA)) for _ in range(2)]
        ways = ["steps", "interrupt", "callback", "loss"]
        if any(own in ENDING for own in kinds):
            ways.append("end of data")
        every = rng.choice((0, 1, 3))
        if every > 1:
            ways.remove("steps")  # a run that has come to its end is evaluated once more
        places = sorted({rng.randint(1, steps - 1) for _ in range(rng.choice((1, 1, 2, 3)))})
        cuts = [(place, rng.choice(ways)) for place in places]
        if any(way == "loss" for _, way in cuts):  # that one may be further than the data would last
            cuts = [(place, "interrupt" if way == "end of data" else way) for place, way in cuts]
        yield Composition(
            method=rng.choice(sorted(METHODS)),
            upper=rng.choice(SMOOTH),
            lower=rng.choice(SMOOTH),
            extras=extras,
            container=rng.choice(sorted(CONTAINERS)),
            upper_data=kinds[0],
            lower_data=kinds[1],
            step_data=rng.choice([None, None, None, *sorted(DATA)]),
            sizes=tuple(rng.sample((2, 3, 4, 5, 6, 7, 8, 9), rng.choice((1, 2, 6, 7)))),
            steps=steps,
            every=rng.choice((1, 1, 2, 3)),
            cuts=tuple(cuts),
            bounded=rng.random() < 0.2,
            double=rng.random() < 0.7,
            evaluate=every,
            seed=rng.randrange(10**6),
        )


def kind(case: Composition) -> str:
    drawn = {"numpy", "python", "own generator", "own numpy", "dropout"} & set(case.extras)
    return "random numbers in the losses" if drawn else "losses that draw nothing"


class Run:
    """Everything of a run but the file, made anew."""

    def __init__(self, case: Composition, folder: Path, seed: int, cut: tuple[int, str] | None):
        torch.manual_seed(seed)
        np.random.seed(seed)  # noqa: NPY002
        random.seed(seed)
        self.case, self.cut, self.folder = case, cut, folder
        self.losses = losses = Losses(case)
        box = bisls.Box(-1.5, 1.5) if case.bounded else None
        self.problem = bisls.Bilevel(
            losses.upper, losses.lower, [losses.x], [losses.y], [losses.running], upper_bounds=box
        )
        self.solver = METHODS[case.method](self.problem)
        how = cut[1] if cut else ""
        self.data = {
            name: self._data(own, i, how)
            for i, (name, own) in enumerate(
                (("upper_data", case.upper_data), ("lower_data", case.lower_data), ("step_data", case.step_data))
            )
            if own is not None and (name != "step_data" or self.solver.two_samples)
        }
        self.log = folder / "log.jsonl"
        self.callbacks: list[Any] = [bisls.JSONLines(self.log)]
        if case.evaluate:
            self.callbacks.append(bisls.Evaluate(self._evaluated, every=case.evaluate))
        if "annealed" in case.extras:
            self.callbacks.append(Anneal(losses))
        if how == "interrupt":
            self.callbacks.append(Cut(cut[0], KeyboardInterrupt))
        if how == "callback":
            self.callbacks.append(Cut(cut[0], Crash))

    def _data(self, own: str, i: int, how: str) -> Any:
        source = Source(self.case.seed + i, self.case.container, self.case.sizes)
        if how == "end of data" and own in ENDING and i < 2:
            assert self.cut is not None
            a_step = 1 if i == 0 else self.solver.lower_iters + self.solver.extra_batches
            # the lower data may end in the middle of an iteration
            return ENDING[own](source, self.cut[0] * a_step + (self.case.seed % a_step))
        return DATA[own](source)

    def _evaluated(self) -> dict[str, float]:
        return {
            "f": self.losses.fitted(Source(0, self.case.container, (4,)).numbered(1)).item(),
            "drawn": random.random(),
            "from the data": self._drawn(),
        }

    def _drawn(self) -> float:
        """A batch of the run's own data, where these are called for it: a callback may take one too."""
        data = self.data["upper_data"]
        return self.losses.fitted(data()).item() if callable(data) and self.case.upper_data not in ENDING else 0.0

    def go(self, resume: bool) -> bisls.History | None:
        """`fit`, to the end or to the cut; None where something was thrown."""
        steps = self.case.steps
        if self.cut is not None and self.cut[1] == "steps":
            steps = self.cut[0]
        if self.cut is not None and self.cut[1] == "loss":
            self.losses.left = 11 * self.cut[0] + self.case.seed % 10
        checkpoint = bisls.Checkpoint(self.folder / "run.pt", every=self.case.every, extra={"losses": self.losses})
        try:
            return bisls.fit(
                self.solver,
                steps=steps,
                progress=False,
                callbacks=self.callbacks,
                checkpoint=checkpoint,
                resume=resume,
                on_failure="ignore",
                tol=None,
                **self.data,
            )
        except (Crash, KeyboardInterrupt):
            return None

    def outcome(self, history: bisls.History) -> dict[str, Any]:
        """All that a run leaves."""
        return {
            "x": self.losses.x.tolist(),
            "y": self.losses.y.tolist(),
            "records": [record.to_dict() for record in history],
            "evaluations": history.evaluations,
            "stopped": history.stopped,
            "log": self.log.read_text(),
            "buffers": [self.losses.running.tolist(), [own.tolist() for own in self.losses.norm.buffers()]],
            "the weight": self.losses.weight,
            "random numbers": [torch.rand(2).tolist(), np.random.rand(), random.random()],  # noqa: NPY002
            "own random numbers": [torch.rand(2, generator=self.losses.generator).tolist(), self.numpy()],
        }

    def numpy(self) -> float:
        return float(self.losses.numpy.standard_normal())


def tried(case: Composition) -> str | None:
    whole = _whole(case)
    if isinstance(whole, str):
        again = _whole(case)
        return None if whole == again else f"the same run ends in two ways: {whole}; {again}"
    with tempfile.TemporaryDirectory() as name:
        for number, cut in enumerate((*case.cuts, None)):
            # whatever the random state is when the run is started again; without a file yet it starts from its beginning
            again = (Path(name) / "run.pt").exists()
            last = Run(case, Path(name), 99 + number if again else case.seed, cut)
            history = last.go(resume=number > 0)
        assert history is not None
        found = last.outcome(history)
    for entry, own in whole.items():
        if repr(found[entry]) != repr(own):
            return f"{entry}: {_first(own, found[entry])}"
    return None


def _whole(case: Composition) -> dict[str, Any] | str:
    """What the run that is never cut leaves, or the error that it ends with."""
    with tempfile.TemporaryDirectory() as name:
        run = Run(case, Path(name), case.seed, None)
        try:
            history = run.go(resume=False)
        except (ValueError, RuntimeError) as error:
            return f"{type(error).__name__}: {error}".partition("\n")[0]
        assert history is not None
        return run.outcome(history)


def _first(whole: Any, cut: Any) -> str:
    if isinstance(whole, list) and isinstance(cut, list) and len(whole) == len(cut):
        for i, (one, two) in enumerate(zip(whole, cut, strict=True)):
            if repr(one) != repr(two):
                return f"[{i}] {_first(one, two)}"
    if isinstance(whole, dict) and isinstance(cut, dict):
        for name, one in whole.items():
            if repr(one) != repr(cut.get(name)):
                return f"{name}: {_first(one, cut.get(name))}"
    return f"{repr(whole)[-200:]} in the whole run, {repr(cut)[-200:]} in the one that was cut"
