"""Penalties by group beside scikit-learn's one penalty: tables, ten splits each, paired differences with standard errors.

    python benchmarks/tables.py                          all tables whose data are here
    python benchmarks/tables.py --tables college a9a     some of them
    python benchmarks/tables.py --times                  how long groups and one penalty take beside scikit-learn, in turn
    python benchmarks/tables.py --fresh                  eighteen tables that nothing was chosen by
    python benchmarks/tables.py --drawn                  36 of which everything is drawn, one split each; kept nowhere
    python benchmarks/tables.py --page docs/tables.md    the tables of the page, from what is there; runs nothing
    python benchmarks/tables.py --notes                  what is not built, and when weights help: small versions of both
    python benchmarks/tables.py --quick                  two splits, small tables: a look at whether it runs

Tables of `DEVELOPMENT` were looked at while the estimators were written (the widths of the prior, how sure nested folds must be);
those of `JUDGING` chose nothing; what they were looked at for is said in docs/tables.md. scikit-learn has some, ISLP ships others
(`pip install --no-deps ISLP`), a9a and w8a come from `bisls data a9a w8a`; tables whose data are not here are left
out, and it is said. optuna and sparho are rivals where they are installed.

The score is the test log-loss (less is better) or the test R2 (more is better). Times are process times, as ratios.
Runs are kept in out/tables.jsonl, so an interrupted command goes on where it stopped.
"""

from __future__ import annotations

import argparse
import inspect
import json
import os
import platform
import subprocess
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib.metadata import version
from importlib.util import find_spec
from itertools import combinations
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before NumPy is imported
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import numpy as np
from sklearn.datasets import load_breast_cancer, load_diabetes, load_digits
from sklearn.linear_model import ARDRegression, ElasticNetCV, LassoCV, LogisticRegressionCV, RidgeCV
from sklearn.metrics import log_loss, r2_score
from sklearn.model_selection import train_test_split
from sklearn.preprocessing import StandardScaler
from table_page import commits, lasso, markdown, paired, times, written

from bisls.sklearn import GroupLogisticRegressionCV, GroupRidgeCV, WeightedLassoCV

SPLITS = 10
TRIALS = 30  # of optuna
REPEATS = 3  # of a timing
A9A = [5, 8, 5, 16, 5, 7, 14, 6, 5, 2, 2, 2, 5, 41]  # the columns that each of its fourteen fields became


@dataclass(frozen=True)
class Table:
    """Columns, target, a group a column, and how many rows are trained on."""

    X: np.ndarray
    y: np.ndarray
    groups: list[str]
    train: int

    @property
    def classifies(self) -> bool:
        return self.y.dtype.kind in "iub"


def with_noise(X: np.ndarray, y: np.ndarray, columns: int, train: int) -> Table:
    noise = np.random.default_rng(0).normal(size=(len(X), columns))
    return Table(np.hstack([X, noise]), y, ["measured"] * X.shape[1] + ["noise"] * columns, train)


def with_products(X: np.ndarray, y: np.ndarray, train: int) -> Table:
    """The columns themselves, and the products of all pairs of them: two groups that nobody would penalise alike."""
    Z = StandardScaler().fit_transform(X)
    products = np.column_stack([Z[:, i] * Z[:, j] for i, j in combinations(range(Z.shape[1]), 2)])
    return Table(np.hstack([Z, products]), y, ["itself"] * Z.shape[1] + ["product"] * products.shape[1], train)


def islp(name: str) -> Any:
    """A table that ISLP ships; the package itself is not imported."""
    import pandas as pd

    found = find_spec("ISLP")
    if found is None or not found.submodule_search_locations:
        raise FileNotFoundError("ISLP is not installed: pip install --no-deps ISLP")
    return pd.read_csv(Path(found.submodule_search_locations[0]) / "data" / f"{name}.csv")


def numbers(frame: Any) -> np.ndarray:
    import pandas as pd

    return pd.get_dummies(frame, drop_first=True, dtype=float).to_numpy(dtype=float)


def diabetes() -> Table:
    X, y = load_diabetes(return_X_y=True)
    return Table(X, y, ["age and sex"] * 2 + ["body"] * 2 + ["blood"] * 6, 300)


def diabetes_noise() -> Table:
    X, y = load_diabetes(return_X_y=True)
    return with_noise(X, y, 200, 300)


def breast() -> Table:
    X, y = load_breast_cancer(return_X_y=True)
    return Table(X, y, ["mean"] * 10 + ["error"] * 10 + ["worst"] * 10, 300)


def breast_noise() -> Table:
    X, y = load_breast_cancer(return_X_y=True)
    return with_noise(X, y, 300, 400)


def college() -> Table:
    frame = islp("College").drop(columns="Unnamed: 0", errors="ignore")
    frame = frame.select_dtypes("number").assign(private=(frame["Private"] == "Yes").astype(float))
    return with_products(frame.drop(columns="Outstate").to_numpy(float), frame["Outstate"].to_numpy(float), 300)


def hitters() -> Table:
    frame = islp("Hitters").dropna()
    return with_products(numbers(frame.drop(columns="Salary")), np.log(frame["Salary"].to_numpy(float)), 180)


def boston() -> Table:
    frame = islp("Boston").drop(columns="Unnamed: 0", errors="ignore")
    return with_products(frame.drop(columns="medv").to_numpy(float), frame["medv"].to_numpy(float), 250)


def caravan() -> Table:
    frame = islp("Caravan")
    y = (frame["Purchase"] == "Yes").to_numpy().astype(int)
    names = [name for name in frame.columns if name not in ("Purchase", "Unnamed: 0")]
    return Table(frame[names].to_numpy(float), y, [name[0] for name in names], 1500)


def juice() -> Table:
    frame = islp("OJ")
    y = (frame["Purchase"] == "CH").to_numpy().astype(int)
    table = with_products(numbers(frame.drop(columns="Purchase")), y.astype(float), 500)
    return Table(table.X, y, table.groups, 500)


def a9a() -> Table:
    X, y = _svm("a9a")
    return Table(X, y, [f"field {i}" for i, count in enumerate(A9A) for _ in range(count)], 1000)


def w8a() -> Table:
    X, y = _svm("w8a")
    return Table(X, y, [f"columns {50 * (i // 50)} and on" for i in range(X.shape[1])], 2000)


def _svm(name: str) -> tuple[np.ndarray, np.ndarray]:
    from bisls.data import load

    table = load(name)
    X, y = np.asarray(table.x, dtype=float), np.asarray(table.y)
    keep = np.random.default_rng(0).permutation(len(y))[:8000]
    return X[keep], (y[keep] > 0).astype(int)


def digits() -> Table:
    X, y = load_digits(return_X_y=True)
    keep = (y == 3) | (y == 8)
    return Table(X[keep], (y[keep] == 8).astype(int), [f"row {i // 8}" for i in range(64)], 150)


DEVELOPMENT: dict[str, Callable[[], Table]] = {
    "diabetes": diabetes,
    "diabetes + 200 noise": diabetes_noise,
    "breast": breast,
    "breast + 300 noise": breast_noise,
}
JUDGING: dict[str, Callable[[], Table]] = {
    "college, products": college,
    "hitters, products": hitters,
    "boston, products": boston,
    "juice, products": juice,
    "caravan": caravan,
    "a9a": a9a,
    "w8a": w8a,
    "digits 3 and 8": digits,
}


KINDS = {"judging": JUDGING, "development": DEVELOPMENT}


def logistic(l1: bool) -> Any:
    common: dict[str, Any] = {"scoring": "neg_log_loss", "max_iter": 1000, "random_state": 0}
    if l1:
        common |= {"solver": "liblinear", "Cs": np.logspace(-3, 1, 8), "max_iter": 50, "tol": 1e-2}
    if "use_legacy_attributes" in inspect.signature(LogisticRegressionCV).parameters:
        return LogisticRegressionCV(l1_ratios=(float(l1),), use_legacy_attributes=False, **common)
    return LogisticRegressionCV(penalty="l1" if l1 else "l2", **common)


class Optuna:
    """One penalty by optuna's sampler, five folds."""

    def __init__(self, classifies: bool):
        self.classifies = classifies

    def fit(self, X: np.ndarray, y: np.ndarray) -> Any:
        import optuna
        from sklearn.linear_model import LogisticRegression, Ridge
        from sklearn.model_selection import cross_val_score

        optuna.logging.set_verbosity(optuna.logging.ERROR)

        def model(penalty: float) -> Any:
            return LogisticRegression(C=1 / penalty, max_iter=1000) if self.classifies else Ridge(alpha=penalty)

        def value(trial: Any) -> float:
            one = model(trial.suggest_float("penalty", 1e-3, 1e5, log=True))
            scoring = "neg_log_loss" if self.classifies else "neg_mean_squared_error"
            return float(cross_val_score(one, X, y, scoring=scoring).mean())

        study = optuna.create_study(direction="maximize", sampler=optuna.samplers.TPESampler(seed=0))
        study.optimize(value, n_trials=TRIALS)
        return model(study.best_params["penalty"]).fit(X, y)


class Sparho:
    """One penalty of the lasso by sparho's implicit differentiation, five folds, its recommended search and settings."""

    def fit(self, X: np.ndarray, y: np.ndarray) -> Any:
        from sparho import L1, CrossVal, Problem, SquaredLoss, hoag_search
        from sparho.adapters import SklearnLasso

        self.middle = float(y.mean())  # it has no intercept; the columns are centred
        problem = Problem(SquaredLoss(), L1(), np.asfortranarray(X), y - self.middle)
        start = float(np.abs(X.T @ problem.target).max()) / len(y) / 10  # a tenth of what leaves no column
        folds = CrossVal.kfold(len(y), 5, shuffle=False, warm_start=True)
        found = hoag_search(problem, start, solver=SklearnLasso(tol=1e-8), criterion=folds)
        self.alpha_, self.coef_ = float(found.best_hyperparam), found.best_coef
        return self

    def predict(self, X: np.ndarray) -> np.ndarray:
        return X @ self.coef_ + self.middle


def methods(table: Table) -> dict[str, Callable[[], Any]]:
    ours = GroupLogisticRegressionCV if table.classifies else GroupRidgeCV
    common = {"random_state": 0}
    found: dict[str, Callable[[], Any]] = {
        "groups": lambda: ours(table.groups, **common),
        "features": lambda: ours("features", **common),
        "one penalty": lambda: ours(**common),
        "free": lambda: ours("features", spread=np.inf, **common),
    }
    if table.classifies:
        found |= {"LogisticRegressionCV": lambda: logistic(False), "L1": lambda: logistic(True)}
    else:
        found |= {"RidgeCV": lambda: RidgeCV(np.logspace(-3, 6, 28)), "LassoCV": lambda: LassoCV(cv=5)}
        found |= {"ElasticNetCV": lambda: ElasticNetCV(cv=5, l1_ratio=[0.1, 0.5, 0.9]), "ARD": ARDRegression}
        found |= {"lasso": lambda: WeightedLassoCV(cv=5), "lasso, groups": lambda: WeightedLassoCV(table.groups, cv=5)}
        found |= {"lasso, free": lambda: WeightedLassoCV("features", spread=np.inf, cv=5)}
        if find_spec("sparho"):
            found["sparho"] = Sparho
    if find_spec("optuna"):
        found["optuna"] = lambda: Optuna(table.classifies)
    return found


def run(table: Table, seed: int, make: Callable[[], Any]) -> dict[str, float]:
    """One method on one split; the columns are standardised for all of them."""
    parts = train_test_split(
        table.X, table.y, train_size=table.train, random_state=seed, stratify=table.y if table.classifies else None
    )
    X, new, y, truth = parts
    scaler = StandardScaler().fit(X)
    began = time.process_time()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = make().fit(scaler.transform(X), y)
    spent = time.process_time() - began
    if table.classifies:
        score = log_loss(truth, model.predict_proba(scaler.transform(new)), labels=model.classes_)
    else:
        score = r2_score(truth, model.predict(scaler.transform(new)))
    found = {"score": float(score), "seconds": spent}
    if isinstance(model, LassoCV | Sparho):
        found["alpha"] = float(model.alpha_)
    if isinstance(model, WeightedLassoCV) and len(model.group_penalties_) == 1:
        found["alpha"] = float(model.group_penalties_["all"] * np.std(y))
    if getattr(model, "spread_", None) is not None:
        found["spread"] = model.spread_
    return found


def records(out: Path) -> dict[Any, dict[str, Any]]:
    """What has been run; of what was run again the last."""
    path = out / "tables.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return {(e["table"], e["method"], e["seed"]): e for e in map(json.loads, lines)}


def measure(names: list[str], splits: int, out: Path, only: set[str], skip: set[str]) -> dict[Any, dict[str, Any]]:
    done = records(out)
    out.mkdir(parents=True, exist_ok=True)
    for name in names:
        try:
            table = {**DEVELOPMENT, **JUDGING}[name]()
        except Exception as error:  # the data are not here
            print(f"{name} is left out: {error}")
            continue
        for method, make in methods(table).items():
            for seed in range(splits):
                if (name, method, seed) in done or method in skip or (only and method not in only):
                    continue
                entry = {"table": name, "method": method, "seed": seed, **run(table, seed, make), "commit": commit()}
                done[name, method, seed] = entry
                with (out / "tables.jsonl").open("a") as file:
                    file.write(json.dumps(entry) + "\n")
        if (name, "LogisticRegressionCV" if table.classifies else "RidgeCV", splits - 1) in done:
            print(text_of(name, table.classifies, done, splits), flush=True)
    return done


def timed(names: list[str], splits: int, out: Path) -> None:
    """Process times over that of scikit-learn's one penalty: methods in turn, the smallest of some, summed over splits."""
    record = out / "tables_times.json"
    kept = json.loads(record.read_text()) if record.exists() else {}
    for name in names:
        try:
            table = {**DEVELOPMENT, **JUDGING}[name]()
        except Exception as error:  # the data are not here
            print(f"{name} is left out: {error}")
            continue
        known, rival = methods(table), "LogisticRegressionCV" if table.classifies else "RidgeCV"
        wanted = {method: known[method] for method in (rival, "groups", "one penalty")}
        if not table.classifies:
            wanted["five folds"] = lambda: RidgeCV(np.logspace(-3, 6, 28), cv=5)
            wanted |= {name: known[name] for name in ("LassoCV", "lasso", "sparho") if name in known}
        spent = dict.fromkeys(wanted, 0.0)
        for seed in range(splits):
            rounds = [{m: run(table, seed, make)["seconds"] for m, make in wanted.items()} for _ in range(REPEATS)]
            for method in wanted:
                spent[method] += min(one[method] for one in rounds)
        kept[name] = {"rival" if method == rival else method: value for method, value in spent.items()}
        kept[name]["commit"] = commit()
        record.parent.mkdir(parents=True, exist_ok=True)
        record.write_text(json.dumps(kept, indent=1))
        ratios = ", ".join(f"{method} {value / spent[rival]:.2f}" for method, value in spent.items() if method != rival)
        print(f"{name}: over {rival}: {ratios}", flush=True)


def text_of(name: str, classifies: bool, done: dict[Any, Any], splits: int) -> str:
    """A table of one table: mean scores, paired differences of groups from each rival, times."""

    def column(method: str, what: str) -> list[float]:
        return [done[name, method, seed][what] for seed in range(splits) if (name, method, seed) in done]

    rival = "LogisticRegressionCV" if classifies else "RidgeCV"
    names = list(dict.fromkeys(method for table, method, _ in done if table == name))
    names = [method for method in names if len(column(method, "score")) == splits]  # the others were interrupted
    lines = [f"{name} ({'log-loss' if classifies else 'R2'}, {splits} splits)"]
    base = np.mean(column(rival, "seconds"))
    for method in names:
        gain, error = paired(column(method, "score"), column(rival, "score"), classifies)
        spreads = column(method, "spread") if (name, method, 0) in done and "spread" in done[name, method, 0] else []
        widths = f"  widths {sorted(set(spreads))}" if spreads and method != "free" else ""
        score, times = np.mean(column(method, "score")), np.mean(column(method, "seconds")) / base
        lines.append(f"  {method:22} {score:8.4f}  better by {gain:+.4f} +- {error:.4f}  time x {times:6.1f}{widths}")
    return "\n".join(lines)


@cache
def commit() -> str:
    try:
        found = subprocess.run(["git", "rev-parse", "--short=12", "HEAD"], capture_output=True, text=True, check=True)
        return found.stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def origin() -> str:
    packages = ", ".join(f"{name} {version(name)}" for name in ("numpy", "scipy", "scikit-learn"))
    return f"python {platform.python_version()}, {packages}, one thread"


def page(out: Path, path: Path, splits: int) -> None:
    """Write the tables of the page from the records; those that are not complete are left out, and it is said."""
    from table_fresh import FRESH, HEAD

    done = records(out)
    complete = {kind: [n for n in tables if (n, "groups", splits - 1) in done] for kind, tables in KINDS.items()}
    for name in [*DEVELOPMENT, *JUDGING]:
        if not any(name in names for names in complete.values()):
            print(f"{name} is left out: it has not been run")
    kept, made = (json.loads((out / name).read_text()) for name in ("tables_times.json", "tables_fresh.json"))
    clocked = " and ".join(sorted({one.pop("commit") for one in kept.values()}))
    drawn = " and ".join(sorted({one["commit"] for one in made.values()}))

    def sources(_: str) -> str:
        scores = f"Scores of {commits(done)}; the others are older, as said below"
        scores += f"; times of {clocked}, fresh tables of {drawn}"
        return f"{scores}; one machine with other work on it; {origin()}, seeds 0 to {splits - 1} (times: 0 to 2)."

    written(
        path,
        {
            "judging": lambda old: markdown(complete["judging"], done, splits, old),
            "development": lambda old: markdown(complete["development"], done, splits, old),
            "times": lambda _: times({name: kept[name] for name in [*DEVELOPMENT, *JUDGING] if name in kept}),
            "lasso": lambda old: lasso([*DEVELOPMENT, *JUDGING], done, splits, old),
            "fresh": lambda _: "\n".join([HEAD, *(made[name]["row"] for name in FRESH if name in made)]),
            "sources": sources,
        },
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tables", nargs="*", default=None, help="some of them")
    parser.add_argument("--splits", type=int, default=SPLITS)
    parser.add_argument("--only", nargs="*", default=[], help="some methods")
    parser.add_argument("--skip", nargs="*", default=[], help="methods to leave out")
    parser.add_argument("--times", action="store_true", help="how long it takes beside scikit-learn, in turn")
    parser.add_argument("--fresh", action="store_true", help="tables that nothing was chosen by")
    parser.add_argument("--drawn", action="store_true", help="tables of which everything is drawn")
    parser.add_argument("--page", type=Path, help="write the tables of this page from what is there")
    parser.add_argument("--notes", action="store_true", help="what is not built, and when weights help")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--out", type=Path, default=Path("out"))
    arguments = parser.parse_args()
    print(f"commit {commit()}, {origin()}")
    if arguments.notes:
        from table_notes import notes

        notes(2 if arguments.quick else 5)
        return

    def ours(classifies: bool, groups: list[int]) -> Any:
        return (GroupLogisticRegressionCV if classifies else GroupRidgeCV)(groups, random_state=0)

    def rival(classifies: bool) -> Any:
        return logistic(False) if classifies else RidgeCV(np.logspace(-3, 6, 28))

    if arguments.drawn:
        from table_fresh import drawn

        drawn(3 if arguments.quick else 36, ours, rival)
        return
    if arguments.fresh:
        from table_fresh import FRESH, fresh

        record = arguments.out / "tables_fresh.json"
        rows = json.loads(record.read_text()) if record.exists() else {}
        arguments.out.mkdir(parents=True, exist_ok=True)
        for name, row in fresh(
            arguments.tables or list(FRESH),
            2 if arguments.quick else arguments.splits,
            ours,
            rival,
        ):
            rows[name] = {"row": row, "commit": commit()}
            record.write_text(json.dumps(rows, indent=1))
        return
    if arguments.page:
        page(arguments.out, arguments.page, arguments.splits)
        return
    names = arguments.tables or (["diabetes", "breast"] if arguments.quick else [*DEVELOPMENT, *JUDGING])
    unknown = [name for name in names if name not in {**DEVELOPMENT, **JUDGING}]
    if unknown:
        parser.error(f"{unknown[0]!r} is none of {', '.join([*DEVELOPMENT, *JUDGING])}")
    splits = 2 if arguments.quick else arguments.splits
    if arguments.times:
        timed(names, splits, arguments.out)
        return
    found = measure(names, splits, arguments.out, set(arguments.only), set(arguments.skip))
    for tables in (JUDGING, DEVELOPMENT):
        own = [name for name in tables if name in names and (name, "groups", splits - 1) in found]
        if own:
            print(markdown(own, found, splits))


if __name__ == "__main__":
    main()
