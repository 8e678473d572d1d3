"""The problems: their arrays for the workers, and the exact score of what comes back."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import product
from math import isfinite, nan
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy.optimize import minimize
from sklearn.datasets import load_breast_cancer

from bisls import data, tasks
from bisls.tasks.solve import Design, logistic, newton_solve
from side_by_side.curves import curve, thinned
from side_by_side.networks import FewShot, Judged, Representation, Reweighting

Arrays = dict[str, np.ndarray]


def split(features: np.ndarray, labels: np.ndarray) -> Arrays:
    """Permuted by RandomState(0); the first 40 % train, the next 30 % validate; z-scored by the training part."""
    n = len(labels)
    order = np.random.RandomState(0).permutation(n)
    features, labels = features[order], labels[order]
    train, validation = slice(0, int(0.4 * n)), slice(int(0.4 * n), int(0.7 * n))
    centre, spread = features[train].mean(0), features[train].std(0)
    features = (features - centre) / np.where(spread > 0, spread, 1.0)
    return {
        "train_x": features[train].astype(np.float32),
        "train_y": labels[train].astype(np.float32),
        "validation_x": features[validation].astype(np.float32),
        "validation_y": labels[validation].astype(np.float32),
    }


def breast_cancer() -> Arrays:
    return split(*load_breast_cancer(return_X_y=True))


def w8a() -> Arrays:
    """20,000 rows, drawn by RandomState(1) and then split as the others: 8,000 train, 6,000 validate."""
    table = data.load("w8a")
    rows = np.random.RandomState(1).permutation(len(table.y))[:20_000]
    return split(table.x[rows].astype(np.float64), (table.y[rows] > 0).astype(np.float64))


def tiny() -> Arrays:
    draw = np.random.RandomState(1)
    features = draw.randn(300, 5) * np.array([1.0, 2.0, 0.5, 1.0, 3.0])
    return split(features, (features @ np.array([1.0, -1.0, 0.5, 0.0, 0.0]) + 2 * draw.randn(300) > 0).astype(float))


@dataclass(frozen=True)
class Penalties:
    """A penalty for each feature of a logistic regression: judged by the exact F, the lower problem solved by Newton."""

    name: str
    arrays: Callable[[], Arrays]
    penalty: str
    says: str
    needs: str | None = None
    iterations: int = 200
    lower_iters: int = 20
    cg: int = 10
    every: int = 1
    cap: float = 120.0
    race: int | None = 2000  # iterations for those that did not arrive, None for no such run
    race_cap: float = 60.0
    tune: bool = True
    boxes: tuple[float, ...] = (8.0, 10.0, 12.0, np.inf)  # |x| at most so much, in the search for the reference
    starts: int = 4  # 0, and x drawn from the normal distribution
    reference_iterations: int = 300
    share: float = 0.05  # how fast the schedule of scored iterations thins out
    kind = "penalties"

    @cached_property
    def _data(self) -> tuple[Design, torch.Tensor, Design, torch.Tensor]:
        found = {name: torch.from_numpy(array) for name, array in self.arrays().items()}
        return (
            Design(found["train_x"].double()),
            found["train_y"].double(),
            Design(found["validation_x"].double()),
            found["validation_y"].double(),
        )

    def job(self) -> dict[str, Any]:
        """What a worker is told beside the rates."""
        return {"penalty": self.penalty, "lower_iters": self.lower_iters, "cg": self.cg, "every": self.every}

    def write(self, path: Path) -> None:
        """The arrays for the workers."""
        np.savez(path, **self.arrays())

    def exact(self, x: np.ndarray, start: torch.Tensor | None = None) -> tuple[float, torch.Tensor]:
        """F(x) and the lower solution, from which the next one may start."""
        train, truth, new, new_truth = self._data
        start = torch.zeros(train.columns, dtype=torch.float64) if start is None else start
        with np.errstate(over="ignore"):
            penalties = _penalty(self.penalty, torch.from_numpy(np.asarray(x, dtype=np.float64)))
        if not torch.isfinite(penalties).all():
            return nan, start
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            w = logistic(train, truth, penalties, start)
        if not torch.isfinite(w).all():
            return nan, start
        return float(torch.nn.functional.binary_cross_entropy_with_logits(new.times(w), new_truth)), w

    def value_and_gradient(
        self, x: np.ndarray, start: torch.Tensor | None = None
    ) -> tuple[float, np.ndarray, torch.Tensor]:
        """The exact F, its exact gradient, and the lower solution."""
        train, _, new, new_truth = self._data
        value, w = self.exact(x, start)
        if not isfinite(value):
            return 1e10, np.zeros_like(x), w
        point = torch.from_numpy(np.asarray(x, dtype=np.float64)).requires_grad_()
        penalties = _penalty(self.penalty, point)
        chance = torch.sigmoid(train.times(w))
        hessian = train.gram(chance * (1 - chance) / train.rows) + torch.diag(penalties.detach())
        right = new.transposed(torch.sigmoid(new.times(w)) - new_truth) / new.rows
        implicit = -(w * newton_solve(hessian, right))
        (gradient,) = torch.autograd.grad(penalties, point, implicit)
        return value, gradient.numpy(), w

    def reference(self, tick: Callable[[str], None] = lambda _: None) -> dict[str, Any]:
        """The least exact F that L-BFGS with exact gradients finds, in boxes of several sizes and from several starts."""
        size = self._data[0].columns
        best: dict[str, Any] = {"F0": self.exact(np.zeros(size))[0], "F": np.inf}
        warm: list[torch.Tensor | None] = [None]

        def both(x: np.ndarray) -> tuple[float, np.ndarray]:
            value, gradient, warm[0] = self.value_and_gradient(x, warm[0])
            return value, gradient

        options = {"maxiter": self.reference_iterations, "ftol": 1e-10, "gtol": 1e-7}
        for seed, box in product(range(self.starts), self.boxes):
            tick(f"{self.name}: reference in |x| <= {box:g}, start {seed}")
            start = np.random.RandomState(seed).randn(size) if seed else np.zeros(size)
            bounds = None if box == np.inf else [(-box, box)] * size
            found = minimize(both, start, jac=True, method="L-BFGS-B", bounds=bounds, options=options)
            if found.fun < best["F"]:
                best |= {"F": float(found.fun), "box": None if box == np.inf else box, "start": seed}
        return best

    def score(self, kept: np.ndarray, points: np.ndarray, goals: list[float]) -> dict[str, Any]:
        """F along the run, and for each goal the first iteration from which on F stays at or below it.

        F is computed on a schedule that thins out, and by bisection around the place where a goal is reached.
        """
        known: dict[int, float] = {}
        start: torch.Tensor | None = None

        def at(index: int) -> float:
            nonlocal start
            if index not in known:
                known[index], start = self.exact(points[index], start)
            return known[index]

        for index in thinned(len(points), self.share):
            at(index)
        return curve(kept, known, [_arrival(at, known, goal) for goal in goals])


def _arrival(at: Callable[[int], float], known: dict[int, float], goal: float) -> int | None:
    """The first index from which on all known values are within the goal, refined by bisection."""
    order = sorted(known)
    if not known[order[-1]] <= goal:
        return None
    first = next(reversed([i for i, index in enumerate(order) if not known[index] <= goal]), None)
    if first is None:
        return order[0]
    outside, inside = order[first], order[first + 1]
    while inside - outside > 1:
        middle = (inside + outside) // 2
        if at(middle) <= goal:
            inside = middle
        else:
            outside = middle
    return inside


def _penalty(name: str, x: torch.Tensor) -> torch.Tensor:
    return torch.sigmoid(x) if name == "sigmoid" else torch.exp(x)


Problem = Penalties | Judged
PROBLEMS: dict[str, Problem] = {
    "plain": Penalties("plain", breast_cancer, "sigmoid", "breast cancer, 30 penalties sigmoid(x)"),
    "exp": Penalties("exp", breast_cancer, "exp", "breast cancer, 30 penalties exp(x)"),
    "w8a": Penalties(
        "w8a",
        w8a,
        "sigmoid",
        "20,000 rows of w8a, 300 penalties sigmoid(x)",
        needs="w8a",
        cap=150.0,
        race_cap=100.0,
        tune=False,
        boxes=(10.0, 12.0),
        starts=1,
        share=0.25,
        reference_iterations=150,
    ),
    "representation": Representation(),
    "few-shot": FewShot(),
    "weight-network": Reweighting(
        "weight-network",
        "FashionMNIST, half of 5,000 labels wrong: a sample's weight from its loss, a convolutional network below",
        partial(tasks.weight_network, corrupted=0.5, train=5_000, validation=500),
    ),
    "sample-weights": Reweighting(
        "sample-weights",
        "FashionMNIST, 40 % of 1,000 labels wrong: a weight for each sample, a network with two hidden layers below",
        partial(tasks.sample_weights, corrupted=0.4, train=1_000, validation=300, test_size=2_000),
        iterations=150,
    ),
    "tiny": Penalties(
        "tiny",
        tiny,
        "sigmoid",
        "300 made-up rows, 5 penalties: a look at whether it runs",
        boxes=(4.0,),
        starts=1,
    ),
}
