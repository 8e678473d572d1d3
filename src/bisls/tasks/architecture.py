"""A small architecture search: which operation where is x, the weights of all of them are y."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from bisls._check import settled, whole_number
from bisls.problem import Bilevel
from bisls.tasks.base import Task, streams
from bisls.tasks.inputs import classes, floating, pictures
from bisls.tasks.training import classified, drawn, parts

OPERATIONS = ("conv3", "conv5", "average", "skip", "none")


def architecture(
    images: Any,
    labels: Any,
    *,
    train: int = 900,
    validation: int = 500,
    test_size: int | None = None,
    batch_size: int | None = 64,
    places: int = 3,
    channels: int = 8,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
) -> Task:
    """At each of a few places in a convolutional network five operations are mixed; their weights are the softmax of x.

        f(x, y) = mean cross-entropy on validation samples
        g(x, y) = mean cross-entropy on training samples

    The operations: a convolution of 3 x 3 or 5 x 5 with ReLU, the average of 3 x 3, the input itself, and nothing. Before the
    places stands a convolution of 3 x 3 with ReLU (every second pixel where pictures have 16 rows or more), after the first
    two of them 2 x 2 max-pooling, at the end a linear layer. x starts at 0: all operations weigh the same.

    `exact` is the cross-entropy of the present network on samples that neither level has seen. ``metrics()`` has the accuracy
    there, and "entropy": that of the mixtures, in nats, averaged over the places; log 5 at the start, 0 where one operation is
    left. ``retrained()`` trains y from the start with the present mixtures, by 600 steps of Adam.

    Args:
        images: N x rows x columns, at least 8 of each: bytes (divided by 255) or floating-point numbers (used as they are).
        labels: N whole numbers 0, 1, 2, ...
        train: Samples of the lower level, at least 1.
        validation: Samples of the upper level, at least 1.
        test_size: Samples that neither level sees; None takes all that are left.
        batch_size: Samples in a batch of either level; None takes all of them at every step.
        places: Where operations are mixed, at least 1.
        channels: Of every convolution, at least 1.
        seed: What the split, the network's start and the batches are drawn from.
        dtype: The precision, torch.float32 or torch.float64.

    Examples:
        >>> import torch
        >>> draw = torch.Generator().manual_seed(5)
        >>> images, labels = torch.rand(60, 8, 8, generator=draw), torch.arange(3).repeat(20)
        >>> task = architecture(images, labels, train=30, validation=20, batch_size=10, channels=4)
        >>> task.problem
        Bilevel(upper_params: 1 tensor, 15 numbers; lower_params: 16 tensors, 1,747 numbers)
        >>> round(task.metrics()["entropy"], 4)
        1.6094
    """
    call = "architecture"
    floating(call, dtype)
    places = settled(call, "places", places, whole_number(1))
    channels = settled(call, "channels", channels, whole_number(1))
    pixels = pictures(call, images, dtype, (3,), "N x rows x columns")
    if min(pixels.shape[1:]) < 8:
        raise ValueError(f"`{call}(images=...)` must have at least 8 x 8 pixels, got shape {tuple(pixels.shape)}")
    truth = classes(call, labels, len(pixels))
    split_rng, start_rng, upper_rng, lower_rng, again_rng = streams(call, seed, 5)
    lower, upper, test = parts(call, pixels.unsqueeze(1), truth, train, validation, test_size, split_rng)

    x = pixels.new_zeros(places, len(OPERATIONS)).requires_grad_()
    network = Mixed(x, int(truth.max()) + 1, (pixels.shape[1], pixels.shape[2]), channels)
    drawn(network, start_rng, dtype).to(pixels.device)

    def loss(batch: tuple[Tensor, ...]) -> Tensor:
        return functional.cross_entropy(network(batch[0]), batch[1])

    def more() -> dict[str, float]:
        shares = torch.log_softmax(x.detach().double(), 1)
        return {"entropy": float(-(shares.exp() * shares).sum(1).mean())}

    problem = Bilevel(loss, loss, [x], network.parameters())
    rngs = lower_rng, upper_rng, again_rng
    return classified(call, problem, network, (lower, upper, test), batch_size, rngs, more, steps=600)


class Mixed(nn.Module):
    """A convolutional network in which operations are mixed by the softmax of logits that are none of its parameters."""

    def __init__(self, logits: Tensor, kinds: int, size: tuple[int, int], channels: int):
        super().__init__()
        self._logits = (logits,)  # in a tuple, so that no one takes it for a buffer or a parameter of the module
        stride = 2 if min(size) >= 16 else 1

        def convolution(wide: int) -> nn.Conv2d:
            return nn.Conv2d(channels, channels, wide, padding=wide // 2, device="meta")

        self.stem = nn.Conv2d(1, channels, 3, stride=stride, padding=1, device="meta")
        self.three = nn.ModuleList(convolution(3) for _ in range(len(logits)))
        self.five = nn.ModuleList(convolution(5) for _ in range(len(logits)))
        pooled = 2 ** min(2, len(logits))
        left = [(-(-side // stride)) // pooled for side in size]
        self.head = nn.Linear(channels * left[0] * left[1], kinds, device="meta")

    def forward(self, pictures: Tensor) -> Tensor:
        """The outputs for pictures N x 1 x rows x columns."""
        here = torch.relu(self.stem(pictures))
        for i, shares in enumerate(torch.softmax(self._logits[0], 1)):
            average = functional.avg_pool2d(here, 3, stride=1, padding=1, count_include_pad=False)
            three, five = torch.relu(self.three[i](here)), torch.relu(self.five[i](here))
            here = shares[0] * three + shares[1] * five + shares[2] * average + shares[3] * here
            if i < 2:
                here = functional.max_pool2d(here, 2)
        outputs: Tensor = self.head(here.flatten(1))
        return outputs
