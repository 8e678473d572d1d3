"""A table fitted: penalties by group, rivals on the same folds, model and page; stages that are finished are kept in files."""

from __future__ import annotations

import hashlib
import json
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from sklearn.exceptions import ConvergenceWarning
from sklearn.model_selection import KFold, StratifiedKFold

from bisls._files import write_whole
from bisls._version import __version__
from bisls.report.table_page import write_table_page
from bisls.sklearn import GroupLogisticRegressionCV, GroupRidgeCV
from bisls.tables.grouping import automatic, from_file
from bisls.tables.reading import TableError, must_have, read_table
from bisls.tables.recipe import Recipe, as_numbers, as_text, is_boolean, kind_of, learn
from bisls.tables.rivals import LARGE, losses_of, rivals

FOLDS = 5
FEWEST = 20  # rows
CLASSES = 30  # more are no classes
LARGEST = 1e100  # of a target
DISTINCT = 10  # whole numbers with at most so many different values are classes
NAMES = {"classification": "log-loss", "regression": "squared error"}
FORMAT = 1  # of model.json

Say = Callable[[str], None]


@dataclass(frozen=True)
class Asked:
    """What the user asked for.

    Attributes:
        table: The file.
        target: The column to predict.
        groups: "auto", "none" or a file.
        unpenalised: Columns that are never penalised.
        task: "auto", "classification" or "regression".
        seed: Of the folds.
    """

    table: Path
    target: str
    groups: str = "auto"
    unpenalised: tuple[str, ...] = ()
    task: str = "auto"
    seed: int = 0


@dataclass(frozen=True)
class Prepared:
    """The table as numbers."""

    X: np.ndarray
    y: np.ndarray
    recipe: Recipe
    groups: list[str]
    factors: np.ndarray
    task: str
    folds: int
    said: list[str]

    def splits(self, seed: int) -> list[tuple[np.ndarray, np.ndarray]]:
        """The folds, of ours and of the rivals."""
        kind = StratifiedKFold if self.task == "classification" else KFold
        return list(kind(self.folds, shuffle=True, random_state=seed).split(self.X, self.y))


def run_fit(asked: Asked, out: Path, say: Say) -> tuple[Path, str]:
    """Fit the table and write ``model.json``, ``result.json`` and ``report.html`` into a folder.

    What an earlier command with the same table and options has finished is in ``stages/`` and not done again.

    Args:
        asked: What is to be done.
        out: The folder; made if need be.
        say: Is told what is going on, a line at a time.

    Returns:
        The path of the page, and the verdict.

    Raises:
        TableError: The table can't be used.
    """
    frame = read_table(asked.table)
    say(f"{asked.table.name}: {_many(len(frame), 'row')}, {_many(len(frame.columns), 'column')}")
    ready = prepare(frame, asked)
    for sentence in ready.said:
        say(sentence)
    count = len(dict.fromkeys(ready.groups))
    say(f"{ready.task}, {_many(ready.X.shape[1], 'feature')} in {_many(count, 'group')}, {ready.folds} folds")
    if ready.X.size > LARGE:
        ready.said.append(
            f"an L1 model is not shown beside it: the table has more than {LARGE:,} numbers, and it would take long"
        )
        say(ready.said[-1])
    stages = _Stages(out / "stages", _fingerprint(asked, ready), say)
    fitted = stages.made("groups", "penalties by group", lambda: _fitted(ready, asked.seed))
    beside = [
        {"name": name, **stages.made(f"rival-{number}", name, partial(_measured, rival, ready, asked.seed))}
        for number, (name, rival) in enumerate(rivals(ready.task, ready.X, ready.y), 1)
    ]
    for rival in beside:
        if "failed" in rival:
            ready.said.append(
                f"{rival['name']} is not shown, since it cannot be fitted on these folds: {rival['failed']}"
            )
            say(ready.said[-1])
    beside = [rival for rival in beside if "failed" not in rival]
    model = {
        "format": FORMAT,
        "version": __version__,
        "target": asked.target,
        "task": ready.task,
        "recipe": ready.recipe.to_dict(),
        **{key: fitted[key] for key in ("classes", "coef", "intercept")},
    }
    result = _result(asked, ready, fitted, beside, len(frame))
    write_whole(out / "model.json", json.dumps(model, indent=1, allow_nan=False))
    write_whole(out / "result.json", json.dumps(result, indent=1))
    return write_table_page(result, out / "report.html"), result["verdict"]


def _many(count: int, what: str) -> str:
    return f"{count:,} {what}{'s' * (count != 1)}"


def prepare(frame: Any, asked: Asked) -> Prepared:
    """Numbers, groups, factors and folds; sentences about everything that was done."""
    target = must_have(list(frame.columns), asked.target, "--target")
    said: list[str] = []
    gone = int(frame[target].isna().sum())
    if gone == len(frame):
        raise TableError(f"the target {target!r} has no value at all")
    if gone:
        frame = frame[frame[target].notna()]
        said.append(f"left out, since {target!r} has no value there: {_many(gone, 'row')}")
    if len(frame) < FEWEST:
        raise TableError(f"{_many(len(frame), 'row')} with a value of {target!r}: too few; {FEWEST} are the least")
    task, why = _task(frame[target], asked.task, target)
    said += [why] if why else []
    y, folds = _target(frame[target], task, target)
    others = [name for name in frame.columns if name != target]
    recipe, more = learn(frame, others)
    used = {column.name for column in recipe.columns}
    dropped = [name for name in others if name not in used]
    X = recipe.numbers(frame)[0]
    if asked.groups == "auto":
        groups = automatic(recipe)
    elif asked.groups == "none":
        groups = ["all"] * X.shape[1]
    else:
        groups = from_file(Path(asked.groups), recipe, target, dropped)
    free = _unpenalised(asked.unpenalised, others)
    factors = np.array([0.0 if column.name in free else 1.0 for column in recipe.columns for _ in column.features])
    return Prepared(X, y, recipe, groups, factors, task, folds, said + more)


def _unpenalised(given: Sequence[str], columns: Sequence[str]) -> set[str]:
    found: set[str] = set()
    for entry in given:
        names = [entry] if entry in columns else [part.strip() for part in entry.split(",") if part.strip()]
        found |= {must_have(columns, name, "--unpenalised") for name in names}
    return found


def _task(values: Any, asked: str, target: str) -> tuple[str, str]:
    numeric = kind_of(values) == "number"
    if asked != "regression" and is_boolean(values):
        return "classification", ""
    if asked == "regression" and not numeric:
        raise TableError(f"--task regression: the target {target!r} is no column of numbers")
    if asked != "auto":
        return asked, ""
    if not numeric:
        return "classification", ""
    found = as_numbers(values, "number")
    distinct = len(np.unique(found))
    if distinct <= DISTINCT and np.all(found == np.round(found)):
        more = "" if distinct <= 2 else "; --task regression takes them as numbers"
        return "classification", f"{target!r} has {distinct} different whole numbers: they are classes{more}"
    return "regression", ""


def _target(values: Any, task: str, target: str) -> tuple[np.ndarray, int]:
    if task == "regression":
        y = as_numbers(values, "number")
        if not np.all(np.isfinite(y)):
            raise TableError(f"the target {target!r} has values that are no finite numbers")
        if np.abs(y).max() > LARGEST:
            raise TableError(
                f"the target {target!r} has values above {LARGEST:g}, whose squares are no numbers: rescale it"
            )
        if np.ptp(y) == 0:
            raise TableError(f"the target {target!r} is {y[0]:g} in every row: there is nothing to predict")
        return y, FOLDS
    numeric = kind_of(values) == "number" and not is_boolean(values)
    y = as_numbers(values, "number") if numeric else as_text(values)
    if numeric and np.all(y == np.round(y)) and np.abs(y).max() < 2.0**53:
        y = y.astype(int)
    classes, counts = np.unique(y, return_counts=True)
    if len(classes) < 2:
        raise TableError(f"the target {target!r} is {classes.tolist()[0]!r} in every row: there is nothing to predict")
    if len(classes) > CLASSES:
        raise TableError(f"the target {target!r} has {len(classes)} different values; at most {CLASSES} can be classes")
    if counts.min() < 2:
        rare = classes.tolist()[int(counts.argmin())]
        raise TableError(f"the class {rare!r} of {target!r} has one row: leave it out, or join it with another")
    return y, min(FOLDS, int(counts.min()))


def _fitted(ready: Prepared, seed: int) -> dict[str, Any]:
    kind = GroupLogisticRegressionCV if ready.task == "classification" else GroupRidgeCV
    model = kind(ready.groups, penalty_factors=ready.factors, cv=ready.splits(seed))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        model.fit(ready.X, ready.y)
    top = np.maximum(np.abs(ready.X).max(0), np.finfo(float).tiny)  # squares of large numbers are none
    spread = top * np.std(ready.X / top, axis=0)
    return {
        "classes": model.classes_.tolist() if ready.task == "classification" else None,
        "coef": np.atleast_2d(model.coef_).tolist(),
        "intercept": np.atleast_1d(model.intercept_).tolist(),
        "per_sd": (np.atleast_2d(model.coef_) * spread).tolist(),
        "penalties": {str(name): penalty for name, penalty in model.group_penalties_.items()},
        "spread": model.spread_,
        "improved": model.improved_,
        "cv_loss": model.cv_loss_,
        "cv_loss_shared": model.cv_loss_shared_,
        "nested": [[width, loss, model.nested_error_[width]] for width, loss in model.nested_loss_.items()],
    }


def _measured(make: Callable[[], Any], ready: Prepared, seed: int) -> dict[str, Any]:
    try:
        each = losses_of(make, ready.task, ready.X, ready.y, ready.splits(seed))
    except ValueError as error:  # a class that its own folds lack, numbers that it cannot square
        return {"failed": str(error).strip().splitlines()[0]}
    return {"loss": float(each.mean()), "error": float(each.std(ddof=1) / len(each) ** 0.5)}


class _Stages:
    """What is finished, in files: a stage that an earlier command has made for the same numbers is read."""

    def __init__(self, folder: Path, fingerprint: str, say: Say):
        self.folder, self.fingerprint, self.say = folder, fingerprint, say

    def made(self, name: str, what: str, make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        path = self.folder / f"{name}.json"
        try:
            kept = json.loads(path.read_text(encoding="utf-8"))
            if kept["fingerprint"] == self.fingerprint and isinstance(kept["value"], dict):
                self.say(f"{what}: there from an earlier command")
                return kept["value"]
        except (OSError, ValueError, KeyError, TypeError):
            pass  # not there, or not ours
        self.say(f"{what} ...")
        value = make()
        write_whole(path, json.dumps({"fingerprint": self.fingerprint, "value": value}))
        return value


def _fingerprint(asked: Asked, ready: Prepared) -> str:
    digest = hashlib.sha256()
    digest.update(np.ascontiguousarray(ready.X).tobytes())
    said = [__version__, asked.target, asked.seed, ready.task, ready.folds, ready.groups, ready.recipe.features]
    digest.update(json.dumps([*said, ready.factors.tolist(), ready.y.tolist()]).encode())
    return digest.hexdigest()


def verdict_of(loss: str, fitted: Mapping[str, Any]) -> str:
    """What came out, in one sentence."""
    nested = {width: value for width, value, _ in fitted["nested"]}
    if not nested:
        return f"One group: one penalty is used (cross-validated {loss} {fitted['cv_loss']:.4g})."
    if fitted["improved"]:
        return f"Group penalties: nested {loss} {nested[0.0]:.4g} to {nested[fitted['spread']]:.4g}."
    best = min(value for width, value in nested.items() if width > 0)
    return f"No gain: one penalty is used (nested {loss} {nested[0.0]:.4g}; with group penalties {best:.4g})."


def _result(
    asked: Asked, ready: Prepared, fitted: Mapping[str, Any], beside: Sequence[Mapping[str, Any]], rows: int
) -> dict[str, Any]:
    sizes = np.sqrt((np.array(fitted["per_sd"]) ** 2).sum(0))  # over the classes
    signed = np.array(fitted["per_sd"])[0] if len(fitted["per_sd"]) == 1 else sizes
    order = np.argsort(-sizes)[:20]
    names = list(dict.fromkeys(ready.groups))
    at = {name: np.flatnonzero(np.array(ready.groups) == name) for name in names}
    features = ready.recipe.features
    return {
        "table": asked.table.name,
        "rows": len(ready.y),
        "rows_read": rows,
        "target": asked.target,
        "task": ready.task,
        "classes": fitted["classes"],
        "loss": NAMES[ready.task],
        "folds": ready.folds,
        "seed": asked.seed,
        "version": __version__,
        "verdict": verdict_of(NAMES[ready.task], fitted),
        "improved": fitted["improved"],
        "spread": fitted["spread"],
        "cv_loss": fitted["cv_loss"],
        "cv_loss_shared": fitted["cv_loss_shared"],
        "nested": fitted["nested"],
        "rivals": list(beside),
        "said": ready.said,
        "groups": [
            {
                "name": name,
                "features": len(at[name]),
                "free": int(np.sum(ready.factors[at[name]] == 0)),
                "penalty": fitted["penalties"].get(name, 0.0),
                "size": float(np.sqrt(np.mean(sizes[at[name]] ** 2))),
            }
            for name in names
        ],
        "coefficients": [{"feature": features[j], "group": ready.groups[j], "per_sd": float(signed[j])} for j in order],
    }
