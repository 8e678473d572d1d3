"""Tables that nothing was chosen by or tuned on: made up anew for each split, and small ones of scikit-learn's.

python benchmarks/tables.py --fresh
python benchmarks/tables.py --drawn     36 more, of which size, groups, noise and classes are drawn as well
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from sklearn.datasets import load_diabetes, load_digits, load_iris, load_wine, make_classification, make_friedman1
from sklearn.datasets import make_regression as made
from sklearn.metrics import log_loss, r2_score
from sklearn.model_selection import train_test_split
from sklearn.preprocessing import StandardScaler

Numbers = np.random.Generator
Drawn = tuple[np.ndarray, np.ndarray, list[int], int]  # columns, target, a group a column, rows to train on
NEW = 500  # rows that judge the tables of which everything is drawn
SMALL = 0.01  # seconds; what the rival takes less time for is said


def alike(groups: int, columns: int) -> list[int]:
    return [number for number in range(groups) for _ in range(columns)]


def blocks(r: Numbers) -> Drawn:
    X = r.normal(size=(650, 60))
    return X, X[:, :10] @ r.normal(size=10) + 2 * r.normal(size=650), alike(6, 10), 150


def wide(r: Numbers) -> Drawn:
    X = r.normal(size=(600, 500))
    return X, X[:, :100] @ r.normal(0, 0.3, size=100) + r.normal(size=600), alike(5, 100), 100


def wide_all(r: Numbers) -> Drawn:
    X = r.normal(size=(600, 500))
    return X, X @ r.normal(0, 0.15, size=500) + r.normal(size=600), alike(5, 100), 100


def correlated(r: Numbers) -> Drawn:
    Z = r.normal(size=(700, 6))
    X = np.hstack([Z[:, [g]] + 0.5 * r.normal(size=(700, 15)) for g in range(6)])
    return X, Z[:, 0] - Z[:, 1] + 0.3 * X[:, 50] + r.normal(size=700), alike(6, 15), 200


def nothing(r: Numbers) -> Drawn:
    return r.normal(size=(600, 40)), r.normal(size=600), alike(4, 10), 150


def squares(r: Numbers) -> Drawn:
    X, y = load_diabetes(return_X_y=True)
    Z = StandardScaler().fit_transform(X)
    return np.hstack([Z, Z**2]), y, alike(2, 10), 250


def friedman(r: Numbers) -> Drawn:
    X, y = make_friedman1(600, noise=1.0, random_state=int(r.integers(10**6)))
    return np.hstack([X, X**2, X[:, :5] * X[:, 5:]]), y, [*alike(2, 10), *[2] * 5], 200


def low_rank(r: Numbers) -> Drawn:
    seed = int(r.integers(10**6))
    X, y = made(600, 200, n_informative=20, effective_rank=15, noise=1.0, random_state=seed, shuffle=False)
    return 20 * X, y, alike(10, 20), 150


def few_rows(r: Numbers) -> Drawn:
    X = r.normal(size=(500, 30))
    return X, 2 * X[:, 0] + X[:, 1] + r.normal(size=500), alike(30, 1), 40


def tiny(r: Numbers) -> Drawn:
    X = r.normal(size=(300, 4))
    return X, X[:, 0] + r.normal(size=300), alike(2, 2), 20


def wine(r: Numbers) -> Drawn:
    X, y = load_wine(return_X_y=True)
    return X, y, [j % 3 for j in range(13)], 90


def iris(r: Numbers) -> Drawn:
    X, y = load_iris(return_X_y=True)
    return X, y, alike(2, 2), 75


def ten_digits(r: Numbers) -> Drawn:
    X, y = load_digits(return_X_y=True)
    return X, y, alike(8, 8), 400


def rare(r: Numbers) -> Drawn:
    X = r.normal(size=(2500, 40))
    eta = 0.8 * X[:, :5].sum(1) - 4.2
    return X, (eta + r.logistic(size=2500) > 0).astype(int), alike(8, 5), 500


def wide_classes(r: Numbers) -> Drawn:
    X = r.normal(size=(800, 500))
    eta = X[:, :50] @ r.normal(0, 0.4, size=50)
    return X, (eta + r.logistic(size=800) > 0).astype(int), [0] * 50 + [1] * 150 + [2] * 300, 100


def counts(r: Numbers) -> Drawn:
    X = r.poisson(0.05, size=(1200, 300)).astype(float)
    eta = X[:, :30] @ r.normal(0, 2.0, size=30)
    return X, (eta + 0.5 * r.logistic(size=1200) > 0).astype(int), [0] * 30 + [1] * 270, 400


def nothing_classes(r: Numbers) -> Drawn:
    return r.normal(size=(700, 40)), r.integers(0, 2, 700), alike(4, 10), 200


def three(r: Numbers) -> Drawn:
    seed = int(r.integers(10**6))
    X, y = make_classification(700, 60, n_informative=8, n_redundant=4, n_classes=3, shuffle=False, random_state=seed)
    return X, y, [0] * 12 + [1] * 48, 200


FRESH: dict[str, Callable[[Numbers], Drawn]] = {
    "one block of six matters": blocks,
    "500 columns, 100 rows, one block of five": wide,
    "500 columns, 100 rows, all alike": wide_all,
    "correlated blocks": correlated,
    "nothing but noise": nothing,
    "diabetes and its squares": squares,
    "Friedman's function": friedman,
    "low rank": low_rank,
    "40 rows, 30 groups": few_rows,
    "20 rows, 4 columns": tiny,
    "wine, arbitrary groups": wine,
    "iris": iris,
    "ten digits, rows of pixels": ten_digits,
    "one row in twenty is of the class": rare,
    "500 columns, 100 rows, classes": wide_classes,
    "counts of rare words": counts,
    "nothing but noise, classes": nothing_classes,
    "three classes, 48 columns of noise": three,
}


def anything(number: int) -> Drawn:
    """A table of which everything is drawn: rows, columns, groups, what matters, how much noise, a number or classes."""
    r = np.random.default_rng([2026, number])
    rows, columns = (int(np.exp(r.uniform(*np.log(ends)))) for ends in ((40, 800), (6, 400)))
    count = int(min(columns, np.exp(r.uniform(*np.log((2, 60))))))
    groups = np.sort(np.concatenate([np.arange(count), r.integers(0, count, columns - count)]))
    classes, total = int(r.choice([0, 0, 2, 3, 5])), rows + NEW
    X = r.normal(size=(total, columns))
    if r.random() < 0.4:
        X += r.normal(size=(total, count))[:, groups]
    size = np.exp(r.normal(0, r.choice([0.0, 1.0, 2.0]), size=count)) * (r.random(count) < r.choice([0.2, 0.6, 1.0]))
    size = size if size.any() else np.ones(count)
    eta = X @ (r.normal(size=(columns, max(1, classes))) * size[groups][:, None])
    eta /= eta.std()
    if classes == 0:
        return X, eta[:, 0] + r.choice([0.5, 1, 2]) * r.normal(size=total), groups.tolist(), rows
    if classes == 2:
        return X, (2 * eta[:, 0] + r.logistic(size=total) > 0).astype(int), groups.tolist(), rows
    return X, (2 * eta + r.gumbel(size=eta.shape)).argmax(1), groups.tolist(), rows


def drawn(count: int, ours: Callable[[bool, list[int]], Any], rival: Callable[[bool], Any]) -> None:
    """A line a table, and what they come to: the ratio of process times (the smaller of two), the gain on new rows."""
    print("| rows x columns | groups | classes | gain | time over theirs | width |\n" + "|---" * 6 + "|")
    gains: dict[bool, list[float]] = {False: [], True: []}
    ratios = []
    for number in range(count):
        X, y, groups, rows = anything(number)
        classifies = y.dtype.kind in "iu"
        scores, spent, width = [], [], 0.0
        for make in (lambda: ours(classifies, groups), lambda: rival(classifies)):  # noqa: B023
            times = []
            for _ in range(2):
                began = time.process_time()
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    model = make().fit(X[:rows], y[:rows])
                times.append(time.process_time() - began)
            spent.append(min(times))
            width = getattr(model, "spread_", width)
            if not classifies:
                scores.append(r2_score(y[rows:], model.predict(X[rows:])))
                continue
            known = np.isin(y[rows:], model.classes_)  # a rare class may have no rows to learn from
            scores.append(-log_loss(y[rows:][known], model.predict_proba(X[rows:][known]), labels=model.classes_))
        gains[classifies].append(scores[0] - scores[1])
        ratios.append(spent[0] / spent[1])
        sizes = f"{rows} x {X.shape[1]} | {max(groups) + 1} | {len(np.unique(y)) if classifies else 0}"
        note = f" (of {1e3 * spent[1]:.0f} ms)" if spent[1] < SMALL else ""
        print(f"| {sizes} | {gains[classifies][-1]:+.4f} | {ratios[-1]:.1f}{note} | {width:g} |", flush=True)
    for classifies, own in gains.items():
        error = np.std(own, ddof=1) / len(own) ** 0.5 if len(own) > 1 else np.nan
        what = "log-loss" if classifies else "R2"
        print(f"{what}: better by {np.mean(own):+.4f} +- {error:.4f} over {len(own)}, worst {min(own):+.4f}")
    print(f"within five times on {sum(ratio <= 5 for ratio in ratios)} of {count}, worst {max(ratios):.1f}")


HEAD = "| | groups | RidgeCV / LogisticRegressionCV | better by | time over theirs | groups used |\n" + "|---" * 6 + "|"


def fresh(
    names: list[str], splits: int, ours: Callable[[bool, list[int]], Any], rival: Callable[[bool], Any]
) -> Iterator[tuple[str, str]]:
    """Name and row of each table: scores of both, their paired difference, the ratio of process times (the smaller of two), how
    often groups were used."""
    print(HEAD)
    for number, (name, draw) in enumerate(FRESH.items()):
        if name not in names:
            continue
        scores, times, used = ([], []), ([], []), 0
        for seed in range(splits):
            X, y, groups, rows = draw(np.random.default_rng([number, seed]))
            classifies = y.dtype.kind in "iu"
            parts = train_test_split(X, y, train_size=rows, random_state=seed, stratify=y if classifies else None)
            scaler = StandardScaler().fit(parts[0])
            train, new = scaler.transform(parts[0]), scaler.transform(parts[1])
            for place, make in enumerate((lambda: ours(classifies, groups), lambda: rival(classifies))):  # noqa: B023
                spent = []
                for _ in range(2):
                    began = time.process_time()
                    with warnings.catch_warnings():
                        warnings.simplefilter("ignore")
                        model = make().fit(train, parts[2])
                    spent.append(time.process_time() - began)
                times[place].append(min(spent))
                if classifies:
                    scores[place].append(log_loss(parts[3], model.predict_proba(new), labels=model.classes_))
                else:
                    scores[place].append(r2_score(parts[3], model.predict(new)))
                used += int(place == 0 and model.spread_ > 0)
        gain = np.subtract(*scores) * (-1.0 if classifies else 1.0)
        error, base = gain.std(ddof=1) / splits**0.5, float(np.mean(times[1]))
        note = f" (of {1e3 * base:.0f} ms)" if base < SMALL else ""
        line = (
            f"| {name} ({'log-loss' if classifies else 'R2'}) | {np.mean(scores[0]):.4f} | {np.mean(scores[1]):.4f} "
            f"| {gain.mean():+.4f} ± {error:.4f} | {sum(times[0]) / sum(times[1]):.1f}{note} | {used} of {splits} |"
        )
        print(line, flush=True)
        yield name, line
