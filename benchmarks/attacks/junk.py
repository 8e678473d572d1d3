"""Junk for every argument of every public call: each is refused by the name that the user wrote, or can be worked with.

A case is a call, an argument and a value. The call must raise a ValueError whose text begins with the call and names the argument;
or take the value, where the argument's kind has room for it, and then work: two iterations, two steps, what the thing is for.
"""

from __future__ import annotations

import inspect
import logging
import os
import random
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from math import inf, nan
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch

import bisls
from bisls import data, optim, tasks
from bisls.randomness import random_state, set_random_state

ABOUT = "junk for every argument: refused by the name that the user wrote, or taken and worked with"


class Junk:
    """A class where an instance is meant."""


def exhausted() -> Iterator[Any]:
    """A generator that has nothing left."""
    empty: tuple[Any, ...] = ()
    gone = (item for item in empty)
    next(gone, None)
    return gone


# name -> what makes it: each case has a value of its own
JUNK: dict[str, Callable[[], Any]] = {
    "None": lambda: None,
    "'1e-3'": lambda: "1e-3",
    "''": lambda: "",
    "b'x'": lambda: b"x",
    "object()": object,
    "[]": list,
    "{}": dict,
    "(1,)": lambda: (1,),
    "-1": lambda: -1,
    "0": lambda: 0,
    "nan": lambda: nan,
    "inf": lambda: inf,
    "-inf": lambda: -inf,
    "2**70": lambda: 2**70,
    "10**400": lambda: 10**400,
    "1.5": lambda: 1.5,
    "True": lambda: True,
    "1j": lambda: 1j,
    "tensor of 3": lambda: torch.tensor([1.0, 2.0, 3.0]),
    "NaN tensor": lambda: torch.tensor(nan),
    "a tensor on no device": lambda: torch.ones((), device="meta"),
    "an array without dimensions": lambda: np.array(nan),
    "int tensor": lambda: torch.tensor([1, 2]),
    "a class": lambda: Junk,
    "an instance": Junk,
    "lambda of four": lambda: lambda a, b, c, d: a,
    "exhausted generator": exhausted,
    "np.nan": lambda: np.float32(nan),
    "np.array": lambda: np.array([1.0, 2.0]),
    "Path": lambda: Path("nowhere") / "at all",
    "NUL": lambda: "a\0b",
    "[object()]": lambda: [object()],
    "{1: 2}": lambda: {1: 2},
    "a module": lambda: torch.nn.Linear(2, 1),
    "set": lambda: {1.0, 2.0},
}

# which of these an argument of a kind may take at all; whether it does is its own affair
NUMBERS = {
    "-1",
    "0",
    "nan",
    "inf",
    "-inf",
    "2**70",
    "10**400",
    "1.5",
    "NaN tensor",
    "np.nan",
    "an array without dimensions",
}
MAY_TAKE: dict[str, set[str]] = {
    "number": NUMBERS,
    "whole": {"-1", "0", "2**70", "10**400"},
    "flag": {"True"},
    "part": set(),
    "function": set(),
    "tensors": set(),
    "path": {"'1e-3'", "Path"},
    "choice": set(),
    "loss": {"a module"},
    "tensor": {"tensor of 3", "NaN tensor"},
    "data": {"a tensor on no device", "an array without dimensions"}
    | {"None", "(1,)", "{1: 2}", "tensor of 3", "NaN tensor", "int tensor", "np.nan", "np.array", "set"}
    | {
        "exhausted generator",
        "'1e-3'",
        "''",
        "b'x'",
        "-1",
        "0",
        "nan",
        "inf",
        "-inf",
        "2**70",
        "10**400",
        "1.5",
        "True",
        "1j",
    },
    "array": {"tensor of 3", "int tensor", "np.array", "NaN tensor", "np.nan", *NUMBERS},
    "list": {"(1,)", "set"},
    "text": {"'1e-3'", "''", "NUL"},
    "any": set(JUNK),
}


@dataclass(frozen=True)
class Call:
    """A public call.

    Attributes:
        name: As it stands at the beginning of a message.
        call: What is called.
        kinds: argument -> its kind; a question mark allows None, two kinds are joined by a bar.
        rest: The other arguments, made anew for each call.
        use: What is done with the result; None where nothing can be.
    """

    name: str
    call: Callable[..., Any]
    kinds: Mapping[str, str]
    rest: Callable[[], dict[str, Any]] = dict
    use: Callable[[Any], Any] | None = None


@dataclass(frozen=True)
class Case:
    """One argument of one call, and the name of the junk in it."""

    call: str
    argument: str
    junk: str
    options: Mapping[str, Any] = field(default_factory=dict, repr=False)


def problem() -> bisls.Bilevel:
    """A small problem."""
    x = torch.tensor([0.5], requires_grad=True)
    y = torch.tensor([2.0, -1.0], requires_grad=True)
    return bisls.Bilevel(
        lambda batch: ((y - 3.0) ** 2).sum() + 0.1 * (x * x).sum(),
        lambda batch: ((y - x) ** 2).sum() + 0.1 * y[0] * y[1],
        [x],
        [y],
    )


def leaf() -> torch.Tensor:
    """A parameter."""
    return torch.tensor([0.5, 2.0], requires_grad=True)


def steps(solver: Any) -> None:
    """Two iterations."""
    for _ in range(2):
        solver.step(None, None)


def rule(made: Any) -> None:
    """A step rule at both levels."""
    steps(bisls.Solver(problem(), direction=bisls.Steepest(), response=bisls.Tangent(), hypergrad=bisls.Implicit(),
                       upper_step=made, lower_step=made, lower_iters=3))  # fmt: skip


def schedule(made: Any) -> None:
    """A part of a step rule."""
    kind = {"Backtrack": "shrink", "Interpolate": "shrink", "Grow": "restart"}[type(made).__name__]
    rule(bisls.Armijo(**{kind: made}))


def direction(made: Any) -> None:
    """A direction at both levels."""
    steps(bisls.BiSLS(problem(), direction=made, lower_direction=made, lower_step=bisls.Armijo(), lower_iters=3))


def linear(made: Any) -> None:
    """A linear solver."""
    steps(bisls.BiSLS(problem(), hypergrad=bisls.Implicit(made), polish=made, lower_iters=2))


def hypergrad(made: Any) -> None:
    """A hypergradient method."""
    steps(bisls.BiSLS(problem(), hypergrad=made, lower_iters=2))


def response(made: Any) -> None:
    """A response."""
    steps(bisls.BiSLS(problem(), response=made, lower_iters=2))


def bounded(made: Any) -> None:
    """A box: the nearest point in it."""
    made.project(problem().y.read(), problem().y)


def optimised(made: Any) -> None:
    """Two steps of an optimiser."""
    w = made.param_groups[0]["params"]
    for _ in range(2):
        made.step(lambda: sum(((p - 1.0) ** 2).sum() for p in w))


def ran(made: Any) -> None:
    """A callback, or a checkpoint, in a run."""
    own = {"checkpoint": made} if isinstance(made, bisls.Checkpoint) else {"callbacks": [made]}
    bisls.fit(bisls.BiSLS(problem(), lower_iters=2), steps=2, progress=False, **own)


def evaluated(made: tasks.Task) -> None:
    """A task: one iteration on its data."""
    bisls.fit(bisls.BiSLS(made.problem, lower_iters=1), made.upper_data, made.lower_data, steps=1, progress=False)


def solver(a: float = 1.0, b: float = 1.0) -> bisls.Solver:
    """A solver on a problem of its own."""
    return bisls.BiSLS(problem(), alpha=a, beta=b, lower_iters=2)


PARTS = {
    "direction": "part?", "response": "part?", "hypergrad": "part?", "upper_step": "part?", "lower_step": "part?",
    "lower_iters": "whole?", "lower_tol": "number?", "lower_average": "flag?", "search_every": "whole", "polish": "part?",
    "patience": "whole", "lower_direction": "part?", "lower_optimizer": "part?",
}  # fmt: skip
OPTIONS = {"params": "tensors", "lr": "number", "weight_decay": "number", "maximize": "flag", "foreach": "flag?"}
AVERAGED = {**OPTIONS, "averaging": "flag?|number", "direction": "part?"}
NETWORK = {"images": "array", "labels": "array", "train": "whole", "validation": "whole", "test_size": "whole?",
           "batch_size": "whole?", "seed": "whole", "dtype": "choice"}  # fmt: skip
SEARCHED = {**AVERAGED, "c": "number", "shrink": "number?", "grow": "number?", "f_min": "number?"}
POLYAK = {**AVERAGED, "c": "number", "f_min": "number"}


def picked(*names: str, **more: str) -> dict[str, str]:
    """Some of the kinds of the parts, and more."""
    return {**{name: PARTS[name] for name in names}, **more}


def pictures() -> dict[str, Any]:
    """A few pictures with labels."""
    labels = torch.arange(3).repeat(10)
    draw = torch.Generator().manual_seed(2)
    return {"images": torch.rand(30, 4, 4, generator=draw) + labels[:, None, None], "labels": labels}


@cache
def digits() -> dict[str, Any]:
    """A few large pictures with labels."""
    draw = torch.Generator().manual_seed(5)
    return {"images": torch.rand(12, 28, 28, generator=draw), "labels": torch.arange(12) % 10}


def grey() -> dict[str, Any]:
    """A few pictures of 8 x 8 with labels, and how they are shared out."""
    labels = torch.arange(3).repeat(10)
    draw = torch.Generator().manual_seed(3)
    own = {"images": torch.rand(30, 8, 8, generator=draw) + labels[:, None, None], "labels": labels}
    return {**own, "train": 12, "validation": 9, "batch_size": 4}


def drawn() -> dict[str, Any]:
    """The same, in a dict of its own."""
    return dict(digits())


def table(rows: int, kinds: int | None) -> tuple[Any, Any]:
    """Features and labels."""
    draw = torch.Generator().manual_seed(rows)
    features = torch.randn(rows, 3, generator=draw)
    return features, features.sum(1) if kinds is None else (features.sum(1) > 0).long()


def penalties(kinds: int | None) -> dict[str, Any]:
    """The two parts of a penalty task."""
    return {"train": table(12, kinds), "validation": table(8, kinds)}


def optimiser(kind: Callable[..., Any]) -> Callable[[], dict[str, Any]]:
    """The parameters of an optimiser."""
    return lambda: {"params": [leaf()]}


def stepped(**given: Any) -> Any:
    """optimizer.step with one argument."""
    own = {"closure": None if "loss" in given else lambda: (w * w).sum(), **given}
    w = leaf()
    made = optim.SPSB([w])
    if "loss" in given:
        (w * w).sum().backward()
    return made.step(**own)


def grouped(**given: Any) -> Any:
    """A group that joins."""
    made = optim.SPSB([leaf()])
    made.add_param_group(given["param_group"] if "param_group" in given else {"params": [leaf()], **given})
    return made


def loaded(make: Callable[[], Any]) -> Callable[..., Any]:
    """load_state_dict of a thing."""
    return lambda state: make().load_state_dict(state)


def one_box(**given: Any) -> Any:
    """Box with the other side open."""
    return bisls.Box(**given)


@cache
def calls() -> dict[str, Call]:
    """All of them, by name."""
    folder = TemporaryDirectory(prefix="bisls-junk-")
    _FOLDERS.append(folder)
    inside = Path(folder.name)
    count = iter(range(10**9))

    def file() -> str:
        return str(inside / f"{next(count)}.out")

    def given() -> dict[str, Any]:
        return {"problem": problem()}

    def whole_solver() -> dict[str, Any]:
        return {
            "problem": problem(), "direction": bisls.Steepest(), "response": bisls.Tangent(), "hypergrad": bisls.Implicit(),
            "upper_step": bisls.Armijo(), "lower_step": bisls.Armijo(),
        }  # fmt: skip

    required = {
        "direction": "part",
        "response": "part",
        "hypergrad": "part",
        "upper_step": "part",
        "lower_step": "part",
    }
    losses = {"upper_loss": "loss", "lower_loss": "loss"}
    x, y = (lambda: torch.tensor([0.5], requires_grad=True)), (lambda: torch.tensor([2.0, -1.0], requires_grad=True))

    def bilevel(**own: Any) -> bisls.Bilevel:
        a, b = x(), y()
        return bisls.Bilevel(
            **{
                "upper_loss": lambda batch: ((b - 3.0) ** 2).sum(),
                "lower_loss": lambda batch: ((b - a) ** 2).sum(),
                "upper_params": [a],
                "lower_params": [b],
                **own,
            }
        )

    # ruff: noqa: E501
    rows = [
        Call("Bilevel", bilevel, {**losses, "upper_params": "tensors", "lower_params": "tensors", "buffers": "tensors|empty",
             "upper_bounds": "part?", "lower_bounds": "part?", "lower_start": "loss?", "lower_l1": "loss?", "tape": "flag?"}, use=lambda made: steps(bisls.BiSLS(made, lower_iters=2))),
        Call("Simplex", bisls.Simplex, {"floor": "number"}),
        Call("CoordinateDescent", bisls.CoordinateDescent, {"iters": "whole", "tol": "number"}),
        Call("Box", one_box, {"low": "number", "high": "number"}, use=bounded),
        Call("BiSLS", bisls.BiSLS, {**PARTS, "problem": "part", "alpha": "number?", "beta": "number?"}, given, steps),
        Call("BiSLS.paper", bisls.BiSLS.paper, picked("direction", "hypergrad", "lower_iters", "lower_tol", "upper_step", "lower_step",
             "lower_direction", "lower_optimizer", problem="part", alpha="number", beta="number", sufficient="number",
             shrink="number", restart="part?", slack="number", response_steps="whole", max_checks="whole",
             lower_restart="part?"), given, steps),
        Call("BiSPS", bisls.BiSPS, picked("direction", "hypergrad", "lower_step", "lower_iters", "lower_tol", "lower_direction",
             "lower_optimizer", problem="part", samples="whole", alpha="number", alpha_floor="number?", beta="number", c="number",
             upper_min="number", lower_min="number"), given, steps),
        Call("Alternating", bisls.Alternating, picked("upper_step", "lower_step", "direction", "hypergrad", "lower_iters", "lower_tol",
             "lower_direction", "lower_optimizer", problem="part"), given, steps),
        Call("Solver", bisls.Solver, {**PARTS, **required, "problem": "part"}, whole_solver, steps),
        Call("fit", bisls.fit, {"solver": "part", "upper_data": "data", "lower_data": "data", "steps": "whole", "progress": "flag",
             "callbacks": "tensors|empty", "checkpoint": "path?", "resume": "flag", "broadcast": "flag", "on_failure": "choice", "step_data": "data",
             "tol": "number?"},
             lambda: {"solver": solver(), "steps": 1, "progress": False}, lambda made: None),
        Call("Checkpoint", bisls.Checkpoint, {"path": "path", "every": "whole", "seconds": "number?", "extra": "tensors|empty"},
             lambda: {"path": file()}, ran),
        Call("JSONLines", bisls.JSONLines, {"path": "path"}, use=ran),
        Call("Evaluate", bisls.Evaluate, {"function": "function", "every": "whole", "name": "text"}, lambda: {"function": lambda: 1.0}, ran),
        Call("EarlyStopping", bisls.EarlyStopping, {"patience": "whole", "min_delta": "number", "on": "choice", "every": "whole",
             "restore": "flag"}, use=ran),
        Call("Averaged", bisls.Averaged, {"after": "whole"}, use=ran),
        Call("Averaged.load_state_dict", loaded(bisls.Averaged), {"state": "choice"}),
        Call("TensorBoard", bisls.TensorBoard, {"log_dir": "path"}),
        Call("sensitivity", bisls.sensitivity, {"make_solver": "function", "upper_data": "data", "lower_data": "data", "steps": "whole",
             "alphas": "array|list", "betas": "array|list", "seeds": "array|list", "score": "loss?", "progress": "flag"},
             lambda: {"make_solver": solver, "steps": 1, "alphas": (1.0,), "betas": (1.0,), "progress": False}, str),
        Call("hypergradient", bisls.hypergradient, {"problem": "part", "method": "part"},
             lambda: {"problem": problem(), "upper_batch": None, "lower_batch": None, "method": bisls.Implicit()}),
        Call("check_hypergradient", bisls.check_hypergradient, {"problem": "part", "method": "part", "directions": "whole",
             "tolerance": "number?", "lower_iters": "whole"},
             lambda: {"problem": problem(), "upper_batch": None, "lower_batch": None, "method": bisls.Implicit(), "lower_iters": 2}, str),
        Call("Implicit", bisls.Implicit, {"linear": "part", "spread": "number?"}, use=hypergrad),
        Call("StochasticNeumann", bisls.StochasticNeumann, {"terms": "whole", "smoothness": "number?"}, use=hypergrad),
        Call("Unrolled", bisls.Unrolled, {"iters": "whole", "step": "number?"}, use=hypergrad),
        Call("CG", bisls.CG, {"iters": "whole", "tol": "number", "warm": "flag", "damp": "flag", "stretch": "whole"}, use=linear),
        Call("Neumann", bisls.Neumann, {"terms": "whole", "scale": "number?"}, use=linear),
        Call("Identity", bisls.Identity, {"scale": "number"}, use=linear),
        Call("Dense", bisls.Dense, {"max_size": "whole"}, use=linear),
        Call("Direct", bisls.Direct, {"otherwise": "part"}, use=linear),
        Call("Constant", bisls.Constant, {"step": "number"}, use=rule),
        Call("Decay", bisls.Decay, {"step": "number", "power": "number"}, lambda: {"step": 1.0}, rule),
        Call("Polyak", bisls.Polyak, {"c": "number", "f_min": "number", "max_step": "number?"}, use=rule),
        Call("DecreasingPolyak", bisls.DecreasingPolyak, {"c": "number", "f_min": "number", "max_step": "number"}, use=rule),
        Call("Armijo", bisls.Armijo, {"start": "number?", "sufficient": "number", "shrink": "number", "restart": "part", "slack": "number",
             "max_step": "number?", "max_checks": "whole?", "f_min": "number?", "expand": "flag", "uphill": "number"}, use=rule),
        Call("Interpolate", bisls.Interpolate, {"low": "number", "high": "number"}, use=schedule),
        Call("Backtrack", bisls.Backtrack, {"factor": "number"}, use=schedule),
        Call("Grow", bisls.Grow, {"eta": "number"}, use=schedule),
        Call("Curvature", bisls.Curvature, {"start": "number?", "trials": "whole", "every": "whole", "recent": "number", "watch": "flag"},
             use=rule),
        Call("Envelope", bisls.Envelope, {"rule": "part", "floor": "number?", "ceiling": "number?"}, lambda: {"rule": bisls.Polyak()}, rule),
        Call("Denoised", bisls.Denoised, {"b2": "number?", "most": "number", "eps": "number"}, use=direction),
        Call("Adam", bisls.Adam, {"betas": "choice", "eps": "number", "search_momentum": "flag"}, use=direction),
        Call("LBFGS", bisls.LBFGS, {"history": "whole"}, use=direction),
        Call("Tangent", bisls.Tangent, {"theta": "number", "linear": "part?", "exact": "flag"}, use=response),
        Call("GradientSteps", bisls.GradientSteps, {"n": "whole"}, use=response),
        Call("Oracle", bisls.Oracle, {"problem": "part"}, given),
        Call("History", bisls.History, {"records": "tensors|empty", "evaluations": "tensors?|empty"}, use=lambda made: (str(made), made.to_lines())),
        Call("History.load", bisls.History.load, {"path": "path"}),
        Call("Auto", optim.Auto, OPTIONS, optimiser(optim.Auto), optimised),
        Call("SPSB", optim.SPSB, {**POLYAK, "power": "number"}, optimiser(optim.SPSB), optimised),
        Call("SLSB", optim.SLSB, {**SEARCHED, "power": "number"}, optimiser(optim.SLSB), optimised),
        Call("SPSMax", optim.SPSMax, POLYAK, optimiser(optim.SPSMax), optimised),
        Call("SLS", optim.SLS, SEARCHED, optimiser(optim.SLS), optimised),
        Call("DecSPS", optim.DecSPS, POLYAK, optimiser(optim.DecSPS), optimised),
        Call("SPSB.step", stepped, {"closure": "function?", "step_closure": "function?", "loss": "number"}),
        Call("SPSB.add_param_group", grouped, {"param_group": "choice"}, use=optimised),
        Call("SPSB", grouped, {"lr": "number", "weight_decay": "number", "maximize": "flag", "params": "tensors|tensor|empty"}, use=optimised),
        Call("BiSLS.load_state_dict", loaded(solver), {"state": "choice"}),
        Call("SPSB.load_state_dict", loaded(lambda: optim.SPSB([leaf()])), {"state": "choice"}),
        Call("Auto.load_state_dict", loaded(lambda: optim.Auto([leaf()])), {"state": "choice"}),
        Call("Batches.load_state_dict", loaded(lambda: tasks.Batches((torch.ones(5, 2),), 2)), {"state": "choice"}),
        Call("EarlyStopping.load_state_dict", loaded(bisls.EarlyStopping), {"state": "choice"}),
        Call("BiSLS.step", lambda **own: bisls.BiSLS(problem(), lower_iters=2).step(**{"upper_batch": None, "lower_batches": None, **own}),
             {"upper_batch": "any", "lower_batches": "any", "step_batch": "any"}),
        Call("Batches", tasks.Batches, {"tensors": "tensors", "batch_size": "whole", "seed": "whole", "indices": "flag", "rank": "whole",
             "world": "whole"}, lambda: {"tensors": (torch.ones(6, 2),), "batch_size": 2}, next),
        Call("quadratic", tasks.quadratic, {"n_upper": "whole", "n_lower": "whole", "condition": "number", "seed": "whole", "dtype": "choice"},
             use=evaluated),
        Call("logistic_penalties", tasks.logistic_penalties, {"train": "choice?", "validation": "choice?", "test": "choice?",
             "penalty": "loss", "batch_size": "whole?", "lower_batch_size": "whole?", "seed": "whole", "dtype": "choice"},
             lambda: penalties(2), evaluated),
        Call("ridge_penalties", tasks.ridge_penalties, {"train": "choice?", "validation": "choice?", "test": "choice?",
             "penalty": "loss", "batch_size": "whole?", "lower_batch_size": "whole?", "seed": "whole", "dtype": "choice"},
             lambda: penalties(None), evaluated),
        Call("cleaning", tasks.cleaning, {"images": "array", "labels": "array", "corrupted": "number", "train": "whole", "validation": "whole",
             "batch_size": "whole?", "l2": "number", "seed": "whole", "dtype": "choice"},
             lambda: {**pictures(), "train": 12, "validation": 9, "batch_size": 4}, evaluated),
        Call("distillation", tasks.distillation, {"images": "array", "labels": "array", "per_class": "whole", "batch_size": "whole?",
             "l2": "number", "pool": "whole?", "mean": "number", "sd": "number", "lower_iters": "whole", "test_size": "whole",
             "seed": "whole", "dtype": "choice"},
             lambda: {**pictures(), "test_size": 10, "batch_size": 4}, evaluated),
        Call("hyper_representation", tasks.hyper_representation, {"images": "array", "labels": "array", "lower": "choice?", "loss": "part", "lower_size": "whole",
             "test_size": "whole", "batch_size": "whole?", "ridge": "number", "mean": "number", "sd": "number",
             "evaluate_on": "whole", "seed": "whole", "dtype": "choice"},
             lambda: {**drawn(), "lower_size": 5, "test_size": 2, "batch_size": 2, "evaluate_on": 3}),
        Call("Drawn", tasks.Drawn, {"make": "loss", "seed": "whole"}, lambda: {"make": lambda rng: (torch.rand(2, generator=rng),)}, next),
        Call("Drawn.load_state_dict", loaded(lambda: tasks.Drawn(lambda rng: ())), {"state": "choice"}),
        Call("Pictures", tasks.Pictures, {"images": "array", "labels": "array", "ways": "whole", "held_out": "number"}, pictures),
        Call("few_shot", tasks.few_shot, {"source": "part?", "shots": "whole", "queries": "whole", "batch_size": "whole", "hidden": "whole",
             "lower_iters": "whole", "rates": "flag", "proximal": "number", "seed": "whole", "dtype": "choice"},
             lambda: {"hidden": 2, "batch_size": 2}, evaluated),
        Call("sample_weights", tasks.sample_weights, {**NETWORK, "corrupted": "number", "hidden": "whole", "normalised": "flag"}, grey, evaluated),
        Call("architecture", tasks.architecture, {**NETWORK, "places": "whole", "channels": "whole"}, grey, evaluated),
        Call("weight_network", tasks.weight_network, {**NETWORK, "corrupted": "number", "hidden": "whole"}, grey, evaluated),
        Call("decays", tasks.decays, {**NETWORK, "start": "number"}, grey, evaluated),
        Call("adversarial", tasks.adversarial, {**{name: own for name, own in NETWORK.items() if name != "validation"}, "reach": "number",
             "batch_size": "whole", "lower_iters": "whole"}, lambda: {name: own for name, own in grey().items() if name != "validation"}, evaluated),
        Call("denoising", tasks.denoising, {"images": "array", "train": "whole", "test_size": "whole", "noise": "number", "size": "whole",
             "seed": "whole", "dtype": "choice"}, lambda: {"images": grey()["images"], "train": 2, "test_size": 2}, evaluated),
        Call("mixture", tasks.mixture, {"sources": "choice", "target": "choice", "simplex": "flag", "context": "whole", "windows": "whole",
             "width": "whole", "layers": "whole", "seed": "whole", "dtype": "choice"},
             lambda: {"sources": ["to be or not " * 100, "1 2 3 4 5 " * 100], "target": "not to be " * 100, "context": 4, "width": 4, "layers": 1},
             evaluated),
        Call("load", data.load, {"name": "choice"}),
        Call("fetch", data.fetch, {"name": "choice"}),
        Call("where", data.where, {"name": "choice"}),
    ]  # fmt: skip
    found: dict[str, Call] = {}
    for row in rows:
        found[row.name if row.name not in found else f"{row.name} (group)"] = row
    return found


_FOLDERS: list[TemporaryDirectory[str]] = []


def calls_folder() -> str:
    """An empty folder for one case."""
    _FOLDERS[1:] = [TemporaryDirectory(prefix="bisls-junk-")]
    return _FOLDERS[1].name


def every() -> list[Case]:
    """All cases, in order."""
    return [Case(name, argument, junk) for name, call in calls().items() for argument in call.kinds for junk in JUNK]


def cases(seed: int) -> Iterator[Case]:
    """All of them once, in an order of the seed's."""
    order = every()
    random.Random(seed).shuffle(order)
    yield from order


def kind(case: Case) -> str:
    """The call."""
    return case.call


def allowed(case: Case) -> bool:
    """Whether the argument has room for a value of that kind."""
    return any(_has_room(own, case.junk) for own in calls()[case.call].kinds[case.argument].split("|"))


def _has_room(own: str, junk: str) -> bool:
    if own.endswith("?") and junk == "None":
        return True
    if own == "empty":  # nothing in it
        return junk in ("[]", "{}", "''", "exhausted generator")
    return junk in MAY_TAKE[own.rstrip("?")]


def told(text: str, case: Case, call: Call) -> str | None:
    """What is wrong with a message, or None."""
    begin = f"`{call.name}("
    if not text.startswith(begin):
        return f"it does not begin with the call: {text}"
    head = text[: text.find("`", 1) + 1]
    if case.argument not in head and "load_state_dict" not in begin and case.argument not in text:
        return f"it does not name {case.argument}: {text}"
    return None


def tried(case: Case) -> str | None:
    """Make the call; None where it is refused as it should be, or taken and worked with."""
    call = calls()[case.call]
    values = {**call.rest(), case.argument: JUNK[case.junk]()}
    state = random_state()
    here = os.getcwd()
    os.chdir(calls_folder())  # a path that is taken is written to
    logging.disable(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return _tried(case, call, values)
    finally:
        os.chdir(here)
        logging.disable(logging.NOTSET)
        set_random_state(state)


def _tried(case: Case, call: Call, values: dict[str, Any]) -> str | None:
    try:
        made = call.call(**values)
    except ValueError as error:
        wrong = told(str(error), case, call)
        return None if wrong is None else f"inner: {wrong}"
    except (data.DataError, bisls.SolverError, bisls.FitError, FileNotFoundError) as error:
        return None if allowed(case) else f"raw: {type(error).__name__}: {error}"
    except ImportError as error:
        return None if call.name in str(error) else f"raw: ImportError: {error}"
    except Exception as error:
        own = case.junk == "a module" and allowed(case)
        return None if own else f"raw: {type(error).__name__}: {error}"
    if case.junk == "a module" and allowed(
        case
    ):  # it takes one argument, as it should: what it says to this one is its own affair
        return None
    if not allowed(case):
        return f"accepted: {made!r:.100}"
    if call.use is not None:
        try:
            call.use(made)
        except (bisls.SolverError, bisls.FitError):
            return None
        except ValueError as error:
            # what only the problem, or the data, can show is refused by name all the same
            text = str(error)
            return None if text.startswith("`") and case.argument in text else f"late: ValueError: {error}"
        except Exception as error:
            return f"late: {type(error).__name__}: {error}"
    return None


def unlisted() -> list[str]:
    """Arguments of the calls above that the table leaves out, so that a new one can't be forgotten."""
    left_out = {("hypergradient", "upper_batch"), ("hypergradient", "lower_batch"), ("fetch", "console")}
    left_out |= {("check_hypergradient", "upper_batch"), ("check_hypergradient", "lower_batch")}
    wrapped = {"Bilevel": bisls.Bilevel, "Box": bisls.Box}
    found = []
    for name, call in calls().items():
        if "." in name or "(" in name:
            continue
        for argument in inspect.signature(wrapped.get(name, call.call)).parameters:
            if argument not in call.kinds and (name, argument) not in left_out:
                found.append(f"{name}({argument})")
    return found
