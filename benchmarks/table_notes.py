"""What is not built for tables, and when weights of rows do help: small versions on the digits, a number each.

python benchmarks/tables.py --notes
"""

from __future__ import annotations

import logging
import warnings
from collections import defaultdict
from typing import Any

import numpy as np
import torch
from sklearn.cluster import KMeans
from sklearn.datasets import load_digits
from sklearn.ensemble import RandomForestClassifier
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import roc_auc_score
from sklearn.model_selection import cross_val_predict
from sklearn.neighbors import KNeighborsClassifier
from torch.nn.functional import cross_entropy

import bisls

ROWS, TRUSTED, SOURCES = 1000, 100, 10
STEPS = 60


def data(seed: int) -> tuple[np.ndarray, np.ndarray, np.random.Generator]:
    X, y = load_digits(return_X_y=True)
    rng = np.random.default_rng(seed)
    order = rng.permutation(len(y))
    return X[order] / 16.0, y[order], rng


def spoilt(y: np.ndarray, wrong: np.ndarray, rng: np.random.Generator, by_class: bool) -> np.ndarray:
    """Wrong labels: the next class, which fools a model, or any other."""
    step = np.ones(len(y), dtype=int) if by_class else rng.integers(1, 10, len(y))
    return np.where(wrong, (y + step) % 10, y)


def weighted(
    X: np.ndarray, y: np.ndarray, owner: np.ndarray, trusted: tuple[np.ndarray, np.ndarray]
) -> tuple[np.ndarray, torch.nn.Linear]:
    """A weight for each owner of rows, so that a model trained with them does well on trusted rows."""
    torch.manual_seed(0)
    logits = torch.zeros(int(owner.max()) + 1, requires_grad=True)
    model = torch.nn.Linear(X.shape[1], 10)
    rows = torch.tensor(X, dtype=torch.float32), torch.tensor(y), torch.tensor(owner)
    checked = torch.tensor(trusted[0], dtype=torch.float32), torch.tensor(trusted[1])

    def lower(batch: Any) -> torch.Tensor:
        losses = cross_entropy(model(batch[0]), batch[1], reduction="none")
        return (logits.sigmoid()[batch[2]] * losses).mean() + 1e-3 * (model.weight**2).sum()

    problem = bisls.Bilevel(lambda batch: cross_entropy(model(batch[0]), batch[1]), lower, [logits], model.parameters())
    bisls.fit(bisls.BiSLS(problem), checked, rows, steps=STEPS, progress=False, on_failure="ignore")
    return logits.detach().sigmoid().numpy(), model


def accuracy(X: np.ndarray, y: np.ndarray, new: np.ndarray, truth: np.ndarray, weights: Any = None) -> float:
    return float(LogisticRegression(C=1.0, max_iter=2000).fit(X, y, sample_weight=weights).score(new, truth))


def wrong_labels(seed: int, by_class: bool, found: dict[str, list[float]]) -> None:
    """Which ranking finds the wrong labels: AUC."""
    X, truth, rng = data(seed)
    wrong = rng.random(ROWS) < (0.4 if by_class else 0.2)
    y = spoilt(truth[:ROWS], wrong, rng, by_class)
    trusted = X[ROWS : ROWS + TRUSTED], truth[ROWS : ROWS + TRUSTED]
    chances = cross_val_predict(LogisticRegression(C=1.0, max_iter=2000), X[:ROWS], y, method="predict_proba")
    weights, model = weighted(X[:ROWS], y, np.arange(ROWS), trusted)
    with torch.no_grad():
        loss = cross_entropy(model(torch.tensor(X[:ROWS], dtype=torch.float32)), torch.tensor(y), reduction="none")
    kind = "class-dependent, 40 %" if by_class else "symmetric, 20 %"
    found[f"wrong labels, {kind}: out-of-fold probability, AUC"].append(
        roc_auc_score(wrong, -chances[np.arange(ROWS), y])
    )
    found[f"wrong labels, {kind}: learnt weight, AUC"].append(roc_auc_score(wrong, -weights))
    found[f"wrong labels, {kind}: loss of the model trained with weights, AUC"].append(
        roc_auc_score(wrong, loss.numpy())
    )


def sources(seed: int, found: dict[str, list[float]]) -> None:
    """A weight a source of rows: half of ten sources call 80 % of their rows by the next class; accuracy on new rows."""
    X, truth, rng = data(seed)
    owner = np.arange(ROWS) % SOURCES
    bad = owner < SOURCES // 2
    y = spoilt(truth[:ROWS], bad & (rng.random(ROWS) < 0.8), rng, True)
    trusted = X[ROWS : ROWS + TRUSTED], truth[ROWS : ROWS + TRUSTED]
    new = X[ROWS + TRUSTED :], truth[ROWS + TRUSTED :]
    weights, _ = weighted(X[:ROWS], y, owner, trusted)
    both = np.vstack([X[:ROWS], trusted[0]]), np.concatenate([y, trusted[1]])
    found["sources: all rows, accuracy"].append(accuracy(*both, *new))
    found["sources: trusted rows alone, accuracy"].append(accuracy(*trusted, *new))
    found["sources: a weight a source, accuracy"].append(
        accuracy(*both, *new, np.append(weights[owner], np.ones(TRUSTED)))
    )
    found["sources: the good ones known, accuracy"].append(
        accuracy(*both, *new, np.append(~bad, np.ones(TRUSTED)).astype(float))
    )
    folds = np.arange(ROWS) // SOURCES % 2 == 0  # noisy rows judge, in place of trusted ones
    noisy, _ = weighted(X[:ROWS][folds], y[folds], owner[folds], (X[:ROWS][~folds], y[~folds]))
    found["sources: weights judged by rows that nobody checked, accuracy"].append(
        accuracy(X[:ROWS], y, *new, noisy[owner] + 1e-6)
    )


def distilled(seed: int, found: dict[str, list[float]]) -> None:
    """Ten learnt rows in place of a thousand: for the linear model that they were learnt for, and for others."""
    X, y, _ = data(seed)
    task = bisls.tasks.distillation(X, y, per_class=1, test_size=len(y) - ROWS, seed=seed)
    bisls.fit(
        bisls.BiSLS(task.problem, lower_iters=task.lower_iters),
        task.upper_data,
        task.lower_data,
        200,
        False,
        on_failure="ignore",
    )
    small = task.problem.x.tensors[0].detach().numpy().reshape(10, -1)
    new = X[ROWS:], y[ROWS:]
    centres = np.vstack([KMeans(1, n_init=1).fit(X[:ROWS][y[:ROWS] == c]).cluster_centers_ for c in range(10)])
    found["ten rows, learnt: the linear model, accuracy"].append(task.metrics()["accuracy"])
    for name, model in (
        ("a forest", RandomForestClassifier(random_state=0)),
        ("one neighbour", KNeighborsClassifier(1)),
    ):
        found[f"ten rows, learnt: {name}, accuracy"].append(float(model.fit(small, np.arange(10)).score(*new)))
    found["ten rows, means of classes: one neighbour, accuracy"].append(
        float(KNeighborsClassifier(1).fit(centres, np.arange(10)).score(*new))
    )
    found["a thousand rows: the linear model, accuracy"].append(accuracy(X[:ROWS], y[:ROWS], *new))


def notes(seeds: int) -> None:
    """All of it, printed: mean and standard error over the seeds."""
    torch.set_num_threads(1)
    logging.getLogger("bisls").setLevel(logging.ERROR)
    found: dict[str, list[float]] = defaultdict(list)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for seed in range(seeds):
            wrong_labels(seed, False, found)
            wrong_labels(seed, True, found)
            sources(seed, found)
            distilled(seed, found)
    for name, values in found.items():
        error = np.std(values, ddof=1) / len(values) ** 0.5
        print(f"{name:82} {np.mean(values):.3f} +- {error:.3f}")
