"""The problems with networks: judged by the accuracy on pictures that neither level has seen."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from math import isfinite, nan
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from bisls import data, tasks
from bisls.tasks.base import streams
from bisls.tasks.few_shot import RATES, stacked
from side_by_side.curves import curve, thinned

Arrays = dict[str, np.ndarray]


class Judged(ABC):
    """A problem that is judged by accuracies."""

    name: str
    says: str
    kind: str
    needs: str | None
    iterations: int
    lower_iters: int
    every: int
    batch: int
    cap: float
    goals: tuple[float, ...]
    race: int | None
    race_cap: float
    tune: bool
    unit = "samples"
    last = 1  # kept points at the end whose mean is the accuracy at the end

    @abstractmethod
    def write(self, path: Path) -> None:
        """The arrays for the workers."""

    @abstractmethod
    def measure(self, point: np.ndarray) -> dict[str, float]:
        """The "accuracy", and other measures, of a snapshot."""

    @abstractmethod
    def samples(self, iterations: int) -> int:
        """What so many iterations consume, the same for all."""

    @abstractmethod
    def story(self, length: int) -> str:
        """What the page says of the problem, and of runs of so many iterations."""

    def job(self) -> dict[str, Any]:
        """What a worker is told beside the rates."""
        return {"lower_iters": self.lower_iters, "every": self.every, "batch": self.batch}

    def score(self, kept: np.ndarray, points: np.ndarray, goals: list[float]) -> dict[str, Any]:
        """Accuracy along the run, and for each goal the first kept iteration that reaches it together with the next one.

        Points beyond the usual number of iterations are looked at ever more seldom, the last ones always.
        """
        usual = int((kept <= self.iterations).sum())
        ends = range(max(0, len(kept) - self.last), len(kept))
        looks = sorted({*range(usual), *(k for k in thinned(len(kept), 0.1) if k >= usual), *ends})
        found = {k: self.measure(points[k]) if np.isfinite(points[k]).all() else {"accuracy": nan} for k in looks}
        known = {k: one["accuracy"] for k, one in found.items()}
        pairs = {k: min(known[k], known[after]) for k, after in zip(looks, [*looks[1:], looks[-1]], strict=True)}
        arrivals = [next((k for k, both in pairs.items() if both >= goal), None) for goal in goals]
        final = float(np.mean([known[k] for k in ends]))
        measures = {name: value for name, value in found[looks[-1]].items() if isfinite(value)}
        return curve(kept, known, arrivals) | {"final": final, "measures": measures}


@dataclass(frozen=True)
class Representation(Judged):
    """The body of a LeNet above, its last layer below, MNIST."""

    name: str = "representation"
    says: str = "MNIST, a LeNet's body above and its last layer below"
    needs: str | None = "mnist"
    iterations: int = 200
    lower_iters: int = 10
    cg: int = 10
    every: int = 5
    batch: int = 256
    ridge: float = 1e-3
    cap: float = 150.0
    goals: tuple[float, ...] = (0.85, 0.95)
    race: int | None = None
    race_cap: float = 0.0
    tune: bool = True
    kind = "representation"

    @cached_property
    def _task(self) -> tasks.Task:
        return _mnist_task(self.batch, self.ridge)

    def job(self) -> dict[str, Any]:
        """What a worker is told beside the rates."""
        return {**super().job(), "cg": self.cg, "ridge": self.ridge}

    def write(self, path: Path) -> None:
        """Pictures as bytes, the start of the network and the seeds of the batches; all as in the library's task."""
        images, task = data.load("mnist"), self._task
        order = torch.randperm(len(images.train_x), generator=streams(task.name, 0, 4)[0]).numpy()
        rows = {"lower": order[:10_000], "upper": order[20_000:]}
        found: Arrays = {f"start_{k}": tensor.detach().numpy() for k, tensor in enumerate(task.problem.x.tensors)}
        for level, batches in (("lower", task.lower_data), ("upper", task.upper_data)):
            assert isinstance(batches, tasks.Batches)
            found[f"{level}_x"], found[f"{level}_y"] = images.train_x[rows[level]], images.train_y[rows[level]]
            found[f"{level}_seed"] = np.array(batches.seed)
            assert np.array_equal(found[f"{level}_y"], batches.tensors[1].numpy()), "the split is not the task's"
        np.savez(path, **found)

    def samples(self, iterations: int) -> int:
        """Lower and upper samples."""
        return iterations * (self.lower_iters + 1) * self.batch

    def measure(self, point: np.ndarray) -> dict[str, float]:
        """Accuracy of x and y on the held-out pictures."""
        return _measured(self._task, point)

    def story(self, length: int) -> str:
        """What the page says of it."""
        return (
            f"A LeNet. Batches of {self.batch}, T = {self.lower_iters}, {self.cg} steps of conjugate gradients, {length} "
            "iterations; 10,000 lower, 40,000 upper and 10,000 held-out pictures, the same batches for all. Accuracy is that of "
            "the present x and y on the held-out pictures."
        )


def _measured(task: tasks.Task, point: np.ndarray) -> dict[str, float]:
    """The task's own measures where its x and y are those of a snapshot."""
    tensors = (*task.problem.x.tensors, *task.problem.y.tensors)
    parts = torch.split(torch.from_numpy(point), [tensor.numel() for tensor in tensors])
    with torch.no_grad():
        for tensor, part in zip(tensors, parts, strict=True):
            tensor.copy_(part.view_as(tensor))
    return task.metrics()


@cache
def _mnist_task(batch: int, ridge: float) -> tasks.Task:
    images = data.load("mnist")
    return tasks.hyper_representation(images.train_x, images.train_y, batch_size=batch, ridge=ridge, seed=0)


@dataclass(frozen=True)
class FewShot(Judged):
    """Where a network begins above, copies of it that learn a task each below: Omniglot."""

    name: str = "few-shot"
    says: str = "Omniglot, 5 ways and 1 shot, fully connected layers"
    needs: str | None = "omniglot"
    iterations: int = 200
    lower_iters: int = 5
    cg: int = 10
    every: int = 20
    batch: int = 8
    queries: int = 5
    hidden: int = 64
    cap: float = 150.0
    goals: tuple[float, ...] = (0.60, 0.70)
    race: int | None = 2000
    race_cap: float = 15.0
    tune: bool = True
    choosing: int = 50  # tasks on which the rate of the steps from x is chosen
    judging: int = 400  # others, on which it is judged
    kind = "few-shot"
    unit = "tasks"
    last = 3

    def _made(self, images: object) -> tuple[tasks.Task, tasks.Pictures]:
        source = tasks.Pictures(images, data.load("omniglot").y, ways=5)
        sizes = {"queries": self.queries, "hidden": self.hidden, "batch_size": self.batch}
        return tasks.few_shot(source, shots=1, lower_iters=self.lower_iters, seed=0, **sizes), source

    @cached_property
    def _judges(self) -> tuple[Adapted, Adapted]:
        """Tasks to choose the rate on, and to judge by: of characters that no one trains on, and that the other has not."""
        task, source = self._made(data.load("omniglot").x)
        split, _, _, *rngs = streams(task.name, 0, 5)  # the split of the task
        _, _, (_, *draws) = source.open(split)
        counts = self.choosing, self.judging
        pairs = zip(draws, rngs, counts, strict=True)
        choose, judge = (Adapted(draw(rng, count, 1, self.queries), self.lower_iters) for draw, rng, count in pairs)
        return choose, judge

    def job(self) -> dict[str, Any]:
        """What a worker is told beside the rates."""
        return {**super().job(), "cg": self.cg}

    def write(self, path: Path) -> None:
        """Pictures as bytes, the start of the network, and which pictures are in which task; all as in the library's task."""
        images = data.load("omniglot").x
        task, _ = self._made(images)
        # the same draws, of pictures that are their own numbers
        numbers, _ = self._made(torch.arange(len(images), dtype=torch.float32)[:, None])
        batches = [next(numbers.upper_data) for _ in range(max(self.iterations, self.race or 0))]
        found: Arrays = {f"start_{k}": tensor.detach().numpy() for k, tensor in enumerate(task.problem.x.tensors)}
        for k, name in enumerate(("support_x", "support_y", "query_x", "query_y")):
            found[name] = torch.stack([batch[k] for batch in batches]).int().numpy()
            found[name] = found[name][..., 0] if name.endswith("x") else found[name]
        first = torch.from_numpy(images[found["query_x"][0]]).flatten(2).float() / 255.0
        assert torch.equal(first, next(task.upper_data)[2]), "the tasks are not those of the library's task"
        np.savez(path, images=images.reshape(len(images), -1), **found)

    def samples(self, iterations: int) -> int:
        """Tasks seen."""
        return iterations * self.batch

    def measure(self, point: np.ndarray) -> dict[str, float]:
        """Accuracy on new tasks after T plain steps from x, the rate chosen on other tasks; it depends on x alone."""
        width = data.load("omniglot").x[0].size
        shapes = [
            (self.hidden, width),
            (self.hidden,),
            (self.hidden, self.hidden),
            (self.hidden,),
            (5, self.hidden),
            (5,),
        ]
        parts = torch.split(torch.from_numpy(point), [int(np.prod(shape)) for shape in shapes])
        x = [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]
        choose, judge = self._judges
        losses = {rate: choose.judged(x, rate)[0] for rate in RATES}
        rate = min(RATES, key=lambda one: losses[one] if isfinite(losses[one]) else float("inf"))
        return {"accuracy": judge.judged(x, rate)[1], "rate": rate}

    def story(self, length: int) -> str:
        """What the page says of it."""
        return (
            f"MAML: two hidden layers of {self.hidden}; {self.batch} tasks a batch, 1 shot and {self.queries} queries of each "
            f"of 5 characters; T = {self.lower_iters}; {length} iterations, the same tasks for all. Accuracy is that on "
            f"{self.judging} tasks of characters that nobody has trained on, after {self.lower_iters} plain steps from x with "
            f"the rate, of twelve, that does best on {self.choosing} tasks of yet other characters; at the end the mean of the "
            f"last {self.last} points, {self.every} iterations apart. Rivals are Adam above and plain steps below, MetaAdam is "
            f"Adam below too. T is part of the problem, as {self.lower_iters} steps are what new tasks are learnt by: `BiSLS` is "
            "told it, and nothing else; where it is not, it takes 10, learns an x that wants 10, and is judged by "
            f"{self.lower_iters} all the same.\n\n"
            "The literature has 89.7 % (MAML) and 88.9 % (learn2learn) for 5 ways and 1 shot with fully connected layers: wider "
            "ones with BatchNorm, 32 tasks a batch and 60,000 iterations, hundreds of times the tasks seen here.\n\n"
            "Alternating, MAML in plain torch, MetaSGD, higher and learn2learn compute the same hypergradient and differ in "
            "time. Betty is run as in its own example, implicit MAML: every task has a penalty on its way from x, through "
            "which alone the hypergradient goes."
        )


class Adapted:
    """Many tasks, and networks that learn them by plain steps from the same start.

    The first layer of a task changes by its few shots alone, so that what it makes of a picture is known from the inner
    products of pictures with these: the networks are never written out.
    """

    def __init__(self, batch: Sequence[Tensor], steps: int):
        self.inputs = torch.cat([batch[0], batch[2]], dim=1)
        self.products = self.inputs @ batch[0].mT
        self.shots, self.labels, self.truth, self.steps = batch[0].shape[1], batch[1], batch[3], steps

    def judged(self, x: Sequence[Tensor], rate: float) -> tuple[float, float]:
        """The loss and the accuracy on the queries after the steps."""
        outputs = self.outputs(x, rate)[:, self.shots :].flatten(0, 1)
        truth = self.truth.flatten()
        return float(functional.cross_entropy(outputs, truth)), float((outputs.argmax(1) == truth).double().mean())

    def outputs(self, x: Sequence[Tensor], rate: float) -> Tensor:
        """Of all rows, shots first."""
        first = functional.linear(self.inputs, x[0], x[1])
        move = torch.zeros_like(first[:, : self.shots])
        rest = [tensor.expand(len(self.inputs), *tensor.shape) for tensor in x[2:]]
        for _ in range(self.steps):
            here = (first + self.products @ move + move.sum(1, keepdim=True))[:, : self.shots].requires_grad_()
            rest = [tensor.detach().requires_grad_() for tensor in rest]
            loss = functional.cross_entropy(stacked(rest, torch.relu(here)).flatten(0, 1), self.labels.flatten())
            slopes = torch.autograd.grad(len(self.inputs) * loss, [here, *rest])
            move = move - rate * slopes[0]
            rest = [tensor - rate * slope for tensor, slope in zip(rest, slopes[1:], strict=True)]
        with torch.no_grad():
            return stacked(rest, torch.relu(first + self.products @ move + move.sum(1, keepdim=True)))


@dataclass(frozen=True)
class Reweighting(Judged):
    """Wrong labels: training samples are weighted above by what the network trained on them below makes of clean ones."""

    name: str
    says: str
    make: Callable[..., tasks.Task]
    needs: str | None = "fashion-mnist"
    iterations: int = 100
    lower_iters: int = 10
    cg: int = 10
    every: int = 10
    batch: int = 32
    rows: int = 20_000
    cap: float = 150.0
    goals: tuple[float, ...] = (0.65, 0.70)
    race: int | None = None
    race_cap: float = 0.0
    tune: bool = True
    last = 3

    @property
    def kind(self) -> str:  # type: ignore[override]
        """Each has variants of its own."""
        return self.name

    @cached_property
    def _task(self) -> tasks.Task:
        images = data.load("fashion-mnist")
        return self.make(images.train_x[: self.rows], images.train_y[: self.rows], batch_size=self.batch, seed=0)

    def job(self) -> dict[str, Any]:
        """What a worker is told beside the rates."""
        return {**super().job(), "cg": self.cg}

    def write(self, path: Path) -> None:
        """The samples, the start of both levels and the seeds of the batches; all as in the library's task."""
        levels = {"x_start": self._task.problem.x.tensors, "y_start": self._task.problem.y.tensors}
        found: Arrays = {
            f"{level}_{k}": tensor.detach().numpy() for level, own in levels.items() for k, tensor in enumerate(own)
        }
        for level, batches in (("lower", self._task.lower_data), ("upper", self._task.upper_data)):
            assert isinstance(batches, tasks.Batches)
            found[f"{level}_x"], found[f"{level}_y"] = (tensor.numpy() for tensor in batches.tensors)
            found[f"{level}_seed"] = np.array(batches.seed)
        np.savez(path, **found)

    def samples(self, iterations: int) -> int:
        """Lower and upper samples."""
        return iterations * (self.lower_iters + 1) * self.batch

    def measure(self, point: np.ndarray) -> dict[str, float]:
        """Accuracy on samples of neither level, and how well weights tell wrong labels from right ones."""
        return _measured(self._task, point)

    def story(self, length: int) -> str:
        """What the page says of it."""
        lower, upper = (len(own.tensors[0]) for own in (self._task.lower_data, self._task.upper_data))  # type: ignore[union-attr]
        return (
            f"{lower:,} training samples and {upper} clean ones, batches of {self.batch}, T = {self.lower_iters}, {length} "
            "iterations, the same batches for all. Accuracy is that of the present y on 2,000 samples of neither level, at the "
            f"end the mean of the last {self.last} points, {self.every} iterations apart; AUC is the chance that a right label "
            "weighs more than a wrong one. Rivals have Adam at both levels; plain training leaves the weights as they start. "
            "AdamW below is torch's, the user's own, with torch's defaults but for the rate. The upper step after T lower ones "
            "goes through the last of them as Adam does it (TorchOpt) or as a plain step (higher, as in Meta-Weight-Net), or "
            "takes the Hessian for the identity (Betty)."
        )
