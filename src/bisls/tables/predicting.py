"""Predictions of a model that `bisls fit` wrote. A model is plain data: reading one runs nothing."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from bisls._files import write_whole
from bisls.tables.reading import TableError, read_table
from bisls.tables.recipe import Recipe, as_numbers, as_text


def read_model(path: Path) -> dict[str, Any]:
    """The model in a file, or in a folder that `bisls fit` wrote to.

    Raises:
        TableError: There is none.
    """
    place = path / "model.json" if path.is_dir() else path
    try:
        raw = json.loads(place.read_text(encoding="utf-8"))
        Recipe.from_dict(raw["recipe"])
        coef, intercept = np.array(raw["coef"], dtype=float), np.array(raw["intercept"], dtype=float)
        features = len(Recipe.from_dict(raw["recipe"]).features)
        outputs = 1 if raw["task"] == "regression" or len(raw["classes"]) == 2 else len(raw["classes"])
        if coef.shape != (outputs, features) or intercept.shape != (outputs,):
            raise ValueError(f"its coefficients do not fit its {features} features")
        if not (np.all(np.isfinite(coef)) and np.all(np.isfinite(intercept))):
            raise ValueError("its coefficients are not finite")
    except OSError as error:
        raise TableError(f"cannot read the model {place}: {error.strerror or error}") from None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise TableError(f"{place} is no model that `bisls fit` wrote ({type(error).__name__}: {error})") from None
    return dict(raw)


def run_predict(model: Path, table: Path, out: Path, say: Callable[[str], None]) -> None:
    """Write a CSV file with a prediction a row (and a probability a class); say how good they are where the target is there.

    Raises:
        TableError: The model or the table can't be used.
    """
    raw = read_model(model)
    if out.exists() and table.exists() and out.samefile(table):
        raise TableError(f"--out {out} is the table itself; choose another file")
    recipe = Recipe.from_dict(raw["recipe"])
    texts = {column.name for column in recipe.columns if column.kind == "text"}  # a level may be a number here
    if raw["task"] == "classification" and isinstance(raw["classes"][0], str):
        texts.add(raw["target"])
    frame = read_table(table, texts)
    X, said = recipe.numbers(frame)
    for sentence in said:
        say(sentence)
    eta = X @ np.array(raw["coef"]).T + np.array(raw["intercept"])
    columns: dict[str, Any] = {}
    if raw["task"] == "regression":
        columns["prediction"] = eta[:, 0]
    else:
        if eta.shape[1] == 1:
            eta = np.column_stack([np.zeros(len(eta)), eta])
        chances = np.exp(eta - eta.max(1, keepdims=True))
        chances /= chances.sum(1, keepdims=True)
        columns["prediction"] = np.array(raw["classes"])[chances.argmax(1)]
        columns |= {f"probability of {name}": chances[:, at] for at, name in enumerate(raw["classes"])}
    write_whole(out, type(frame)(columns).to_csv(index=False))
    say(f"{len(frame):,} predictions")
    if raw["target"] in frame.columns:
        say(_how_good(raw, frame[raw["target"]], columns["prediction"]))


def _how_good(raw: dict[str, Any], truth: Any, predicted: np.ndarray) -> str:
    there = np.array(truth.notna(), dtype=bool)
    if not there.any():
        return f"the table has no value of {raw['target']!r} to compare with"
    if raw["task"] == "regression":
        found = as_numbers(truth, "number")
        there &= np.isfinite(found)
        with np.errstate(over="ignore"):
            error = float(np.mean((found[there] - predicted[there]) ** 2)) if there.any() else float("nan")
        return f"compared with {raw['target']!r} in {int(there.sum()):,} rows: mean squared error {error:.4g}"
    numeric = not isinstance(raw["classes"][0], str)  # 1.0 where a value is missing, and 1 elsewhere
    same = (
        as_numbers(truth, "number")[there] == predicted[there] if numeric else as_text(truth)[there] == predicted[there]
    )
    return f"compared with {raw['target']!r} in {int(there.sum()):,} rows: accuracy {float(same.mean()):.3f}"
