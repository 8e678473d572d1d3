"""Meta-Weight-Net: a small network above says what a sample weighs, from its loss; a convolutional network below."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from bisls._check import number, settled, whole_number
from bisls.problem import Bilevel
from bisls.tasks.base import Task, streams
from bisls.tasks.inputs import classes, floating, pictures
from bisls.tasks.training import Samples, auc, classified, convolutional, mislabelled, mlp, parts


def weight_network(
    images: Any,
    labels: Any,
    *,
    corrupted: float = 0.5,
    train: int = 5_000,
    validation: int = 500,
    test_size: int | None = 2_000,
    batch_size: int | None = 64,
    hidden: int = 50,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
) -> Task:
    """The weight of a sample is a function of its loss, learnt as a network x; a convolutional network is y.

        f(y)    = mean cross-entropy on clean validation samples
        g(x, y) = mean over the batch of w(l_i) l_i

    where l_i is the cross-entropy of sample i and w the sigmoid of a network with one hidden layer and weights x. As it is
    usually done, gradients in y do not go through w(l_i): otherwise y could make g small by making losses large. So the
    gradient that trains y is not quite that of the value that g has.

    The rows are permuted once, by the seed, and a share of the training labels is replaced by another class. `exact` is the
    cross-entropy of the present y on samples that neither level has seen. ``metrics()`` has the accuracy there, and "auc": the
    chance that a random clean training sample weighs more than a random corrupted one. ``retrained()`` trains y from the start
    with the present x, by 1,000 steps of Adam.

    Args:
        images: N x rows x columns, at least 4 of each: bytes (divided by 255) or floating-point numbers (used as they are).
        labels: N whole numbers 0, 1, 2, ...
        corrupted: The share of training labels that are wrong, in [0, 1].
        train: Samples of the lower level, at least 1.
        validation: Samples of the upper level, at least 1.
        test_size: Samples that neither level sees; None takes all that are left.
        batch_size: Samples in a batch of either level; None takes all of them at every step.
        hidden: The width of the upper network's one hidden layer, at least 1.
        seed: What the split, the corruption, both networks' start and the batches are drawn from.
        dtype: The precision, torch.float32 or torch.float64.

    Examples:
        >>> import torch
        >>> draw = torch.Generator().manual_seed(5)
        >>> images, labels = torch.rand(60, 8, 8, generator=draw), torch.arange(3).repeat(20)
        >>> task = weight_network(images, labels, train=30, validation=20, batch_size=10, hidden=4)
        >>> task.problem
        Bilevel(upper_params: 4 tensors, 13 numbers; lower_params: 8 tensors, 3,427 numbers)
    """
    call = "weight_network"
    floating(call, dtype)
    corrupted = settled(call, "corrupted", corrupted, number("[0, 1]"))
    hidden = settled(call, "hidden", hidden, whole_number(1))
    pixels = pictures(call, images, dtype, (3,), "N x rows x columns").unsqueeze(1)
    truth = classes(call, labels, len(pixels))
    kinds = int(truth.max()) + 1
    split_rng, corruption_rng, start_rng, upper_rng, lower_rng, again_rng = streams(call, seed, 6)
    lower, upper, test = parts(call, pixels, truth, train, validation, test_size, split_rng)
    given, wrong = mislabelled(lower.labels, kinds, corrupted, corruption_rng)
    lower = Samples(lower.features, given)
    network = convolutional(call, pixels, kinds, start_rng)
    weighing = mlp((1, hidden, 1), start_rng, dtype).to(pixels.device)

    def weights(losses: Tensor) -> Tensor:
        return torch.sigmoid(weighing(losses.detach()[:, None]).squeeze(1))

    def upper_loss(batch: tuple[Tensor, ...]) -> Tensor:
        return functional.cross_entropy(network(batch[0]), batch[1])

    def lower_loss(batch: tuple[Tensor, ...]) -> Tensor:
        losses = functional.cross_entropy(network(batch[0]), batch[1], reduction="none")
        return (weights(losses) * losses).mean()

    def more() -> dict[str, float]:
        if not 0 < int(wrong.sum()) < len(wrong):
            return {}
        with torch.no_grad():
            own = weights(functional.cross_entropy(network(lower.features), given, reduction="none"))
        return {"auc": auc(own[~wrong], own[wrong])}

    problem = Bilevel(upper_loss, lower_loss, weighing.parameters(), network.parameters())
    rngs = lower_rng, upper_rng, again_rng
    return classified(call, problem, network, (lower, upper, test), batch_size, rngs, more)
