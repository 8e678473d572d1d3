"""One penalty for every feature of a linear model, chosen by the loss on validation data."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from bisls._check import function, settled
from bisls.problem import Bilevel
from bisls.tasks.base import Task, data, streams
from bisls.tasks.inputs import floating, real, tensor_of
from bisls.tasks.solve import Design, logistic, ridge

Penalty = Callable[[Tensor], Tensor]
Part = tuple[Tensor, Tensor]


def logistic_penalties(
    train: tuple[Any, Any] | None = None,
    validation: tuple[Any, Any] | None = None,
    test: tuple[Any, Any] | None = None,
    penalty: Penalty = torch.sigmoid,
    seed: int = 0,
    batch_size: int | None = None,
    lower_batch_size: int | None = None,
    dtype: torch.dtype = torch.float32,
) -> Task:
    """Logistic regression with one penalty a feature.

        f(w)    = mean log-loss on the validation part
        g(x, w) = mean log-loss on the training part + 1/2 sum_j s(x_j) w_j^2

    There is no bias; x and w start at 0. Without data of your own it is scikit-learn's breast cancer set of 569 rows and 30
    features: rows permuted by ``numpy.random.RandomState(0)`` whatever the seed, the first 40 % for training, the next 30 %
    for validation, the rest for testing, all standardised by the training part. F starts at 0.2628 with the sigmoid (0.3232
    with `torch.exp`). It is not convex, and flat far out: from 0, quasi-Newton methods on the exact F end between 0.0753 and
    0.0766 if they stay where the sigmoid is not flat, and at up to 0.084 if they do not.

    `exact` solves the lower problem by Newton's method, with a Hessian as wide as there are features. ``metrics()`` holds the
    accuracy and the loss of the present w on the test part, if there is one. A free penalty a feature fits the validation part:
    the loss on the test part says what it is worth.

    Args:
        train: ``(features, labels)`` of the lower loss, arrays or tensors: n x d numbers, used as they are, and n labels 0 or 1.
        validation: The same for the upper loss; needed where `train` is given.
        test: The same for the accuracy; may be left out.
        penalty: The function s, from x to penalties above 0, elementwise.
        seed: What the batches are drawn from.
        batch_size: Rows in an upper batch; None takes all of them at every step.
        lower_batch_size: Rows in a lower batch; None takes all of them at every step.
        dtype: The precision of data and parameters, torch.float32 or torch.float64.

    Examples:
        >>> task = logistic_penalties()
        >>> round(task.exact(), 4)
        0.2628
        >>> rows = [[0.5, 2.0], [-1.0, 1.0], [1.5, -0.5], [0.0, 3.0]]
        >>> own = logistic_penalties(train=(rows, [1, 0, 1, 0]), validation=(rows[:2], [1, 0]), penalty=torch.exp)
        >>> own.problem
        Bilevel(upper_params: 1 tensor, 2 numbers; lower_params: 1 tensor, 2 numbers)
    """
    call = "logistic_penalties"

    def labels(name: str, values: Tensor) -> None:
        found = torch.unique(values).tolist()
        if not set(found) <= {0, 1}:
            some = ", ".join(f"{value:g}" for value in found[:5]) + (", ..." if len(found) > 5 else "")
            raise ValueError(f"`{call}({name}=...)`: labels must be 0 or 1, got {some}")

    parts = _parts(call, train, validation, test, breast_cancer, dtype, labels)
    held_out = parts[2]

    def fit_loss(scores: Tensor, truth: Tensor) -> Tensor:
        return functional.binary_cross_entropy_with_logits(scores, truth)

    def solve(design: Design, truth: Tensor, penalties: Tensor, start: Tensor) -> Tensor:
        return logistic(design, truth, penalties, start)

    def metrics(w: Tensor) -> dict[str, float]:
        if held_out is None:
            return {}
        scores = held_out[0] @ w
        return {
            "accuracy": float(((scores > 0) == (held_out[1] > 0.5)).double().mean()),
            "test_loss": float(fit_loss(scores, held_out[1])),
        }

    sizes = (batch_size, lower_batch_size)
    return _task(call, parts, penalty, fit_loss, solve, metrics, seed, sizes)


def ridge_penalties(
    train: tuple[Any, Any] | None = None,
    validation: tuple[Any, Any] | None = None,
    test: tuple[Any, Any] | None = None,
    penalty: Penalty = torch.exp,
    seed: int = 0,
    batch_size: int | None = None,
    lower_batch_size: int | None = None,
    dtype: torch.dtype = torch.float32,
) -> Task:
    """Least squares with one penalty a feature.

        f(w)    = 1/2 mean squared error on the validation part
        g(x, w) = 1/2 mean squared error on the training part + 1/2 sum_j s(x_j) w_j^2

    There is no bias; x and w start at 0. Without data of your own it is scikit-learn's diabetes set of 442 rows and 10 features,
    split as in `logistic_penalties`, features and target standardised by the training part. `exact` is in closed form;
    ``metrics()`` holds the mean squared error of the present w on the test part as "mse", if there is one.

    Args:
        train: ``(features, target)`` of the lower loss, arrays or tensors: n x d and n numbers, used as they are.
        validation: The same for the upper loss; needed where `train` is given.
        test: The same for the error in `metrics`; may be left out.
        penalty: The function s, from x to penalties above 0, elementwise.
        seed: What the batches are drawn from.
        batch_size: Rows in an upper batch; None takes all of them at every step.
        lower_batch_size: Rows in a lower batch; None takes all of them at every step.
        dtype: The precision of data and parameters, torch.float32 or torch.float64.

    Examples:
        >>> task = ridge_penalties(dtype=torch.float64)
        >>> round(task.exact(), 3)
        0.332
    """
    call = "ridge_penalties"
    parts = _parts(call, train, validation, test, _diabetes, dtype, lambda name, values: None)
    held_out = parts[2]

    def fit_loss(scores: Tensor, truth: Tensor) -> Tensor:
        return 0.5 * functional.mse_loss(scores, truth)

    def solve(design: Design, truth: Tensor, penalties: Tensor, start: Tensor) -> Tensor:
        return ridge(design, truth, penalties)

    def metrics(w: Tensor) -> dict[str, float]:
        return {} if held_out is None else {"mse": float(functional.mse_loss(held_out[0] @ w, held_out[1]))}

    sizes = (batch_size, lower_batch_size)
    return _task(call, parts, penalty, fit_loss, solve, metrics, seed, sizes)


def _task(
    call: str,
    parts: tuple[Part, Part, Part | None],
    penalty: Penalty,
    fit_loss: Callable[[Tensor, Tensor], Tensor],
    solve: Callable[[Design, Tensor, Tensor, Tensor], Tensor],
    metrics: Callable[[Tensor], dict[str, float]],
    seed: int,
    sizes: tuple[int | None, int | None],
) -> Task:
    (features, truth), (new_features, new_truth), _ = parts
    x = features.new_zeros(features.shape[1]).requires_grad_()
    w = features.new_zeros(features.shape[1]).requires_grad_()
    settled(call, "penalty", penalty, function(1, "must be a callable from x to penalties"))

    def lower_loss(batch: tuple[Tensor, ...]) -> Tensor:
        return fit_loss(batch[0] @ w, batch[1]) + 0.5 * (penalty(x) * w * w).sum()

    def upper_loss(batch: tuple[Tensor, ...]) -> Tensor:
        return fit_loss(batch[0] @ w, batch[1])

    problem = Bilevel(upper_loss, lower_loss, [x], [w])

    def penalties() -> Tensor:
        with problem.probing(), torch.no_grad():  # the function is the caller's, and may be random
            return penalty(x.double())

    first = penalties()
    if first.shape != x.shape or not bool((torch.isfinite(first) & (first > 0)).all()):
        raise ValueError(
            f"`{call}(penalty=...)` must return one finite number above 0 for every entry of x; at x = 0 it returned "
            f"shape {tuple(first.shape)}, values {first.flatten()[:3].tolist()} ..."
        )

    @torch.no_grad()
    def exact() -> float:
        now = penalties()
        if not torch.isfinite(now).all():
            return float("nan")
        solution = solve(Design(features), truth.double(), now, w.double())
        return float(fit_loss(Design(new_features).times(solution), new_truth.double()))

    @torch.no_grad()
    def measured() -> dict[str, float]:
        return metrics(w)

    upper_rng, lower_rng = streams(call, seed, 2)
    return Task(
        call,
        problem,
        data(call, parts[1], "batch_size", sizes[0], upper_rng.initial_seed()),
        data(call, parts[0], "lower_batch_size", sizes[1], lower_rng.initial_seed()),
        lower_iters=20,
        exact=exact,
        metrics=measured,
    )


def _parts(
    call: str,
    train: tuple[Any, Any] | None,
    validation: tuple[Any, Any] | None,
    test: tuple[Any, Any] | None,
    default: Callable[[str], list[tuple[Any, Any]]],
    dtype: torch.dtype,
    check: Callable[[str, Tensor], None],
) -> tuple[Part, Part, Part | None]:
    floating(call, dtype)
    if train is None and validation is None and test is None:
        train, validation, test = default(call)
    if train is None or validation is None:
        raise ValueError(f"`{call}(train=..., validation=...)`: give both parts, or neither for the default data")

    def checked(name: str, part: tuple[Any, Any], columns: int | None) -> Part:
        if not isinstance(part, tuple | list) or len(part) != 2:
            raise ValueError(f"`{call}({name}=...)` must be a pair (features, labels)")
        features = real(call, name, part[0], dtype, (2,), "a pair whose features are a matrix, rows x columns")
        truth = tensor_of(call, name, part[1])
        if truth.shape != (len(features),):
            raise ValueError(
                f"`{call}({name}=...)`: {len(features)} rows need as many labels, got shape {tuple(truth.shape)}"
            )
        if columns is not None and features.shape[1] != columns:
            raise ValueError(f"`{call}({name}=...)`: {features.shape[1]} features, but train has {columns}")
        check(name, truth)
        return features, real(call, name, truth, dtype, (1,), "a pair whose labels are a vector")

    first = checked("train", train, None)
    columns = first[0].shape[1]
    held_out = None if test is None else checked("test", test, columns)
    return first, checked("validation", validation, columns), held_out


def breast_cancer(call: str) -> list[tuple[Any, Any]]:
    """Training, validation and test part of scikit-learn's breast cancer set."""
    datasets = _sklearn_datasets(call)
    return _split(*datasets.load_breast_cancer(return_X_y=True))


def _diabetes(call: str) -> list[tuple[Any, Any]]:
    features, target = _sklearn_datasets(call).load_diabetes(return_X_y=True)
    parts = _split(features, target)
    centre, spread = parts[0][1].mean(), parts[0][1].std()
    return [(rows, (values - centre) / spread) for rows, values in parts]


def _split(features: Any, target: Any) -> list[tuple[Any, Any]]:
    """40 % training, 30 % validation, 30 % test, standardised by the first of them."""
    n = len(target)
    order = np.random.RandomState(0).permutation(n)  # the split of the published comparison
    features, target = features[order], target[order]
    cuts = [slice(0, int(0.4 * n)), slice(int(0.4 * n), int(0.7 * n)), slice(int(0.7 * n), n)]
    centre, spread = features[cuts[0]].mean(0), features[cuts[0]].std(0)
    return [((features[cut] - centre) / spread, target[cut]) for cut in cuts]


def _sklearn_datasets(call: str) -> Any:
    try:
        from sklearn import datasets
    except ImportError as error:
        raise ImportError(
            f"`{call}()` without data of your own uses a set that comes with scikit-learn: pip install bisls[cli], "
            "or pass train=(features, labels) and validation=(features, labels)"
        ) from error
    return datasets
