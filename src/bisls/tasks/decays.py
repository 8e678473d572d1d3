"""A weight decay for each layer of a network, and how much its labels are smoothed, learnt from few samples."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from bisls._check import FINITE, settled
from bisls.problem import Bilevel
from bisls.tasks.base import Task, streams
from bisls.tasks.inputs import classes, floating, pictures
from bisls.tasks.training import classified, convolutional, parts


def decays(
    images: Any,
    labels: Any,
    *,
    train: int = 500,
    validation: int = 500,
    test_size: int | None = 2_000,
    batch_size: int | None = 64,
    start: float = -7.0,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
) -> Task:
    """The decay of layer l is exp(x_l), the smoothing of labels sigmoid(x_last); a convolutional network is y.

        f(y)    = mean cross-entropy on validation samples
        g(x, y) = mean cross-entropy on training samples with smoothed labels + 1/2 sum_l exp(x_l) ||y_l||^2

    A layer is its weights and biases together. Smoothing by s mixes the label with the uniform distribution, 1 - s to s.
    Decays act over far more steps than an iteration has: short looks ahead see little of them.

    `exact` is the cross-entropy of the present y on samples that neither level has seen, ``metrics()`` has the accuracy there
    and the smoothing. ``retrained()`` trains y from the start with the present decays and smoothing, by 1,000 steps of Adam.

    Args:
        images: N x rows x columns, at least 4 of each: bytes (divided by 255) or floating-point numbers (used as they are).
        labels: N whole numbers 0, 1, 2, ...
        train: Samples of the lower level, at least 1.
        validation: Samples of the upper level, at least 1.
        test_size: Samples that neither level sees; None takes all that are left.
        batch_size: Samples in a batch of either level; None takes all of them at every step.
        start: Where x begins.
        seed: What the split, the network's start and the batches are drawn from.
        dtype: The precision, torch.float32 or torch.float64.

    Examples:
        >>> import torch
        >>> draw = torch.Generator().manual_seed(5)
        >>> images, labels = torch.rand(60, 8, 8, generator=draw), torch.arange(3).repeat(20)
        >>> task = decays(images, labels, train=30, validation=20, batch_size=10)
        >>> task.problem
        Bilevel(upper_params: 1 tensor, 5 numbers; lower_params: 8 tensors, 3,427 numbers)
    """
    call = "decays"
    floating(call, dtype)
    start = settled(call, "start", start, FINITE)
    pixels = pictures(call, images, dtype, (3,), "N x rows x columns").unsqueeze(1)
    truth = classes(call, labels, len(pixels))
    split_rng, start_rng, upper_rng, lower_rng, again_rng = streams(call, seed, 5)
    lower, upper, test = parts(call, pixels, truth, train, validation, test_size, split_rng)
    network = convolutional(call, pixels, int(truth.max()) + 1, start_rng)
    layers = [own for layer in network.modules() if (own := list(layer.parameters(recurse=False)))]
    x = pixels.new_full((len(layers) + 1,), start).requires_grad_()

    def upper_loss(batch: tuple[Tensor, ...]) -> Tensor:
        return functional.cross_entropy(network(batch[0]), batch[1])

    def lower_loss(batch: tuple[Tensor, ...]) -> Tensor:
        logs = torch.log_softmax(network(batch[0]), 1)
        right, smooth = functional.nll_loss(logs, batch[1]), torch.sigmoid(x[-1])
        sizes = torch.stack([torch.stack([(tensor * tensor).sum() for tensor in layer]).sum() for layer in layers])
        return (1 - smooth) * right - smooth * logs.mean() + 0.5 * (torch.exp(x[:-1]) * sizes).sum()

    def more() -> dict[str, float]:
        return {"smoothing": float(torch.sigmoid(x.detach()[-1]))}

    problem = Bilevel(upper_loss, lower_loss, [x], network.parameters())
    rngs = lower_rng, upper_rng, again_rng
    return classified(call, problem, network, (lower, upper, test), batch_size, rngs, more)
