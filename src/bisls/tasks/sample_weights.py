"""A weight for each sample, with a network below: wrong labels are found by what the network makes of clean samples."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from bisls._check import FLAG, number, settled, whole_number
from bisls.problem import Bilevel
from bisls.tasks.base import Task, streams
from bisls.tasks.inputs import classes, floating, pictures
from bisls.tasks.training import Samples, auc, classified, mislabelled, mlp, parts


def sample_weights(
    images: Any,
    labels: Any,
    *,
    corrupted: float = 0.4,
    train: int = 1_000,
    validation: int = 300,
    test_size: int | None = None,
    batch_size: int | None = 64,
    hidden: int = 64,
    normalised: bool = False,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
) -> Task:
    """The weights of the training samples are sigmoid(x_i), a network with two hidden layers is y.

        f(y)    = mean cross-entropy on clean validation samples
        g(x, y) = mean over the batch of w_i cross-entropy_i,    w_i = sigmoid(x_i)

    x starts at 0. Nothing but the number of steps keeps y from learning the wrong labels by heart: it is trained, not solved
    for. With `normalised` the weights of a batch are divided by their mean, so that x cannot act as a learning rate of y.

    The rows are permuted once, by the seed. `exact` is the cross-entropy of the present y on samples that neither level has
    seen. ``metrics()`` has the accuracy there, and "auc": the chance that a random clean training sample weighs more than a
    random corrupted one. ``retrained()`` trains y from the start with the present weights, by 1,000 steps of Adam.

    Args:
        images: N x anything: bytes (divided by 255) or floating-point numbers (used as they are); an array or a tensor.
        labels: N whole numbers 0, 1, 2, ...
        corrupted: The share of training labels that are wrong, in [0, 1].
        train: Samples of the lower level, at least 1.
        validation: Samples of the upper level, at least 1.
        test_size: Samples that neither level sees; None takes all that are left.
        batch_size: Samples in a batch of either level; None takes all of them at every step.
        hidden: The width of the two hidden layers, at least 1.
        normalised: Divide the weights of a batch by their mean.
        seed: What the split, the corruption, the network's start and the batches are drawn from.
        dtype: The precision, torch.float32 or torch.float64.

    Examples:
        >>> import torch
        >>> draw = torch.Generator().manual_seed(4)
        >>> labels = torch.arange(3).repeat(20)
        >>> features = torch.randn(60, 5, generator=draw) + labels[:, None]
        >>> task = sample_weights(features, labels, train=30, validation=20, batch_size=10, hidden=8)
        >>> task.problem
        Bilevel(upper_params: 1 tensor, 30 numbers; lower_params: 6 tensors, 147 numbers)
        >>> sorted(task.metrics()), task.metrics()["auc"]
        (['accuracy', 'auc'], 0.5)
    """
    call = "sample_weights"
    floating(call, dtype)
    corrupted = settled(call, "corrupted", corrupted, number("[0, 1]"))
    hidden = settled(call, "hidden", hidden, whole_number(1))
    normalised = settled(call, "normalised", normalised, FLAG)
    features = pictures(call, images, dtype, (2, 3, 4), "N x features, N x rows x columns, ...").flatten(1)
    truth = classes(call, labels, len(features))
    kinds = int(truth.max()) + 1
    split_rng, corruption_rng, start_rng, upper_rng, lower_rng, again_rng = streams(call, seed, 6)
    lower, upper, test = parts(call, features, truth, train, validation, test_size, split_rng)
    given, wrong = mislabelled(lower.labels, kinds, corrupted, corruption_rng)
    lower = Samples(lower.features, given)

    network = mlp((features.shape[1], hidden, hidden, kinds), start_rng, dtype).to(features.device)
    x = features.new_zeros(len(given)).requires_grad_()

    def upper_loss(batch: tuple[Tensor, ...]) -> Tensor:
        return functional.cross_entropy(network(batch[0]), batch[1])

    def lower_loss(batch: tuple[Tensor, ...]) -> Tensor:
        rows, own, indices = batch
        weights = torch.sigmoid(x[indices])
        if normalised:
            weights = weights / weights.mean()
        return (weights * functional.cross_entropy(network(rows), own, reduction="none")).mean()

    def more() -> dict[str, float]:
        seen = 0 < int(wrong.sum()) < len(wrong)
        return {"auc": auc(x.detach()[~wrong], x.detach()[wrong])} if seen else {}

    problem = Bilevel(upper_loss, lower_loss, [x], network.parameters())
    rngs = lower_rng, upper_rng, again_rng
    return classified(call, problem, network, (lower, upper, test), batch_size, rngs, more, rows=True)
