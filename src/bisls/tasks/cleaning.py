"""Data hyper-cleaning: one weight for every training sample, so that wrong labels are found and left out."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from bisls._check import number, require_argument, settled, whole_number
from bisls.problem import Bilevel
from bisls.tasks.base import Task, data, streams
from bisls.tasks.inputs import classes, floating, pictures
from bisls.tasks.solve import Design, cross_entropy, softmax
from bisls.tasks.training import auc, mislabelled


def cleaning(
    images: Any,
    labels: Any,
    *,
    corrupted: float = 0.5,
    train: int = 20_000,
    validation: int = 5_000,
    batch_size: int | None = 64,
    l2: float = 1e-3,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
) -> Task:
    """The weights of the training samples are sigmoid(x_i), a linear softmax model (weights and biases w) is y.

        f(w)    = mean cross-entropy on clean validation samples
        g(x, w) = mean over the batch of sigmoid(x_i) cross-entropy_i + l2 ||w||^2

    Both x and w start at 0, and the biases are penalised with the weights. A lower batch is (features, labels, indices): the
    indices say which entries of x it uses.

    The rows are permuted once, by the seed: `train` of them go to the lower level, `validation` to the upper level, and the
    rest to the accuracy of the present model in ``metrics()``. A share of the training labels is replaced once by another class
    drawn uniformly. ``metrics()["auc"]`` is the chance that a random clean training sample weighs more than a random corrupted
    one (ties count half): 0.5 at the start, 1 when the two are told apart.

    Args:
        images: N x anything: bytes (divided by 255) or floating-point numbers (used as they are); an array or a tensor.
        labels: N whole numbers 0, 1, 2, ...
        corrupted: The share of training labels that are wrong, in [0, 1].
        train: Samples of the lower level, at least 1.
        validation: Samples of the upper level, at least 1.
        batch_size: Samples in a batch of either level; None takes all of them at every step.
        l2: The penalty on the model, above 0. The 0.2 often seen with this task underfits: on Fashion-MNIST with half the labels
            wrong F starts at 1.80, against 1.17 with 1e-3. Less gains little (1.15 with 1e-4) and conditions g worse.
        seed: What the split, the corruption and the batches are drawn from.
        dtype: The precision, torch.float32 or torch.float64.

    Examples:
        >>> import torch
        >>> draw = torch.Generator().manual_seed(4)
        >>> labels = torch.arange(3).repeat(20)
        >>> features = torch.randn(60, 5, generator=draw) + labels[:, None]
        >>> task = cleaning(features, labels, corrupted=0.3, train=30, validation=20, batch_size=None)
        >>> sorted(task.metrics()), task.metrics()["auc"]
        (['accuracy', 'auc'], 0.5)
    """
    call = "cleaning"
    floating(call, dtype)
    corrupted = settled(call, "corrupted", corrupted, number("[0, 1]"))
    l2 = settled(call, "l2", l2, number("(0, inf)", "must be a finite number above 0"))
    train = settled(call, "train", train, whole_number(1))
    validation = settled(call, "validation", validation, whole_number(1))
    features = pictures(call, images, dtype, (2, 3, 4), "N x features, N x rows x columns, ...").flatten(1)
    truth = classes(call, labels, len(features))
    rule = f"+ validation={validation!r} must be at most the number of rows, {len(features)}"
    require_argument(call, "train", train, train + validation <= len(features), rule)

    split_rng, corruption_rng, upper_rng, lower_rng = streams(call, seed, 4)
    order = torch.randperm(len(features), generator=split_rng).to(features.device)
    lower_rows, upper_rows, test_rows = torch.split(order, [train, validation, len(order) - train - validation])
    kinds = int(truth.max()) + 1
    given, wrong = mislabelled(truth[lower_rows], kinds, corrupted, corruption_rng)
    lower = features[lower_rows], given
    upper = features[upper_rows], truth[upper_rows]
    test = features[test_rows], truth[test_rows]

    x = features.new_zeros(train).requires_grad_()
    weight = features.new_zeros(kinds, features.shape[1]).requires_grad_()
    bias = features.new_zeros(kinds).requires_grad_()

    def upper_loss(batch: tuple[Tensor, ...]) -> Tensor:
        return functional.cross_entropy(functional.linear(batch[0], weight, bias), batch[1])

    def lower_loss(batch: tuple[Tensor, ...]) -> Tensor:
        rows, given, indices = batch
        each = functional.cross_entropy(functional.linear(rows, weight, bias), given, reduction="none")
        return (torch.sigmoid(x[indices]) * each).mean() + l2 * ((weight * weight).sum() + (bias * bias).sum())

    @torch.no_grad()
    def exact() -> float:
        if torch.isnan(x).any():
            return float("nan")
        start = torch.cat([weight.T, bias[None]])
        solution = softmax(Design(lower[0], bias=True), lower[1], l2, start, weights=torch.sigmoid(x.double()))
        return cross_entropy(Design(upper[0], bias=True), upper[1], solution)

    @torch.no_grad()
    def metrics() -> dict[str, float]:
        found = {}
        if len(test[1]):
            guesses = functional.linear(test[0], weight, bias).argmax(1)
            found["accuracy"] = float((guesses == test[1]).double().mean())
        if 0 < int(wrong.sum()) < train:
            found["auc"] = auc(x[~wrong], x[wrong])
        return found

    return Task(
        call,
        Bilevel(upper_loss, lower_loss, [x], [weight, bias]),
        data(call, upper, "batch_size", batch_size, upper_rng.initial_seed()),
        data(call, lower, "batch_size", batch_size, lower_rng.initial_seed(), rows=True),
        lower_iters=10,
        exact=exact,
        metrics=metrics,
    )
