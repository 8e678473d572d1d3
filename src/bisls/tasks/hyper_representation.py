"""Hyper-representation: the features of a convolutional network learnt above, its last layer below."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from bisls._check import FINITE, number, require_argument, settled, whole_number
from bisls.problem import Bilevel
from bisls.tasks.base import Task, data, streams
from bisls.tasks.inputs import classes, floating, pictures
from bisls.tasks.solve import Design, ridge, softmax

_CLASSES = 10
_FEATURES = 84
_CHUNK = 500  # pictures that go through the network at a time when all of them are evaluated: they stay in the cache, 2000 do not


class HeadLoss(ABC):
    """A loss of the last layer: how far its outputs are from the labels, and which layer is the best."""

    @abstractmethod
    def __call__(self, outputs: Tensor, labels: Tensor) -> Tensor:
        """The mean over the samples of a batch: outputs D x 10, labels D."""

    @abstractmethod
    def solve(self, features: Tensor, labels: Tensor, penalty: float, start: Tensor) -> Tensor:
        """The layer (weights, then a row of biases: 85 x 10) with the least loss + penalty / 2 ||layer||^2, in float64."""


@dataclass(frozen=True)
class LeastSquares(HeadLoss):
    """``1 / (2 D) ||outputs - one-hot labels||^2``: the sum runs over the D samples of the batch and their 10 outputs."""

    def __call__(self, outputs: Tensor, labels: Tensor) -> Tensor:
        """Half the squared distance to the one-hot vector, averaged over samples and summed over classes."""
        gap = outputs - functional.one_hot(labels, outputs.shape[1]).to(outputs.dtype)
        return 0.5 * (gap * gap).sum() / len(outputs)

    def solve(self, features: Tensor, labels: Tensor, penalty: float, start: Tensor) -> Tensor:
        """The normal equations."""
        design = Design(features, bias=True)
        penalties = torch.full((design.columns,), penalty, dtype=torch.float64, device=features.device)
        return ridge(design, functional.one_hot(labels, start.shape[1]).double(), penalties)


@dataclass(frozen=True)
class CrossEntropy(HeadLoss):
    """The mean cross-entropy of the softmax of the outputs."""

    def __call__(self, outputs: Tensor, labels: Tensor) -> Tensor:
        """The mean over the samples."""
        return functional.cross_entropy(outputs, labels)

    def solve(self, features: Tensor, labels: Tensor, penalty: float, start: Tensor) -> Tensor:
        """Newton's method with conjugate gradients."""
        return softmax(Design(features, bias=True), labels, penalty / 2, start)


def hyper_representation(
    images: Any,
    labels: Any,
    *,
    lower: tuple[Any, Any] | None = None,
    lower_size: int = 10_000,
    test_size: int = 10_000,
    batch_size: int | None = 256,
    ridge: float = 1e-3,
    loss: HeadLoss = LeastSquares(),  # noqa: B008 - a frozen value
    mean: float = 0.1307,
    sd: float = 0.3081,
    evaluate_on: int = 10_000,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
) -> Task:
    """The body of a LeNet is x (60,856 numbers), its last layer is y (850 numbers, from 0).

        f(x, y) = loss(y on the features of x, upper samples)
        g(x, y) = loss(y on the features of x, lower samples) + ridge / 2 ||y||^2

    With `LeastSquares` the loss is ``1 / (2 D) sum_i ||output_i - onehot_i||^2``, where D is the number of samples in the batch:
    a mean over samples, and a sum over the ten outputs. The penalty covers weights and biases, so that g is strongly convex
    in y on every batch. The network: convolutions 1-6, 6-16 and 16-120 of 5 x 5, a linear layer 120-84, ReLU after each, 2 x 2
    max-pooling after the first two; pictures of 28 x 28 are padded by 2 and standardised.

    The rows are permuted once, by the seed: `lower_size` of them go to the lower level, `test_size` to the accuracy in
    ``metrics()``, which is that of the present x and y, and all the others to the upper level. `exact` computes the features
    of all lower samples, the best last layer for them (in closed form for least squares), and its loss on `evaluate_on`
    upper samples, always the same.

    While x stays, so do the features of a batch: the last ones are kept, so that a lower search that tries many steps on a batch
    sends it through the network once.

    Args:
        images: N x 28 x 28 bytes, or floating-point numbers in [0, 1]; an array or a tensor.
        labels: N whole numbers from 0 to 9.
        lower: Pictures and labels of the lower level, such as those of another file, in place of `lower_size` rows of `images`.
        lower_size: Samples of the lower level, at least 1; not looked at with `lower`.
        test_size: Samples that neither level sees; 0 for no accuracy.
        batch_size: Samples in a batch of either level; None takes all of them at every step.
        ridge: The penalty on the last layer, above 0.
        loss: `LeastSquares()` or `CrossEntropy()`, or a `HeadLoss` of your own.
        mean: Subtracted from the pictures; that of MNIST.
        sd: What they are divided by then, above 0; that of MNIST.
        evaluate_on: How many upper samples `exact` looks at, at most.
        seed: What the split, the network's start and the batches are drawn from.
        dtype: The precision, torch.float32 or torch.float64.

    Examples:
        >>> import torch
        >>> draw = torch.Generator().manual_seed(5)
        >>> images = torch.randint(256, (60, 28, 28), generator=draw, dtype=torch.uint8)
        >>> labels = torch.randint(10, (60,), generator=draw)
        >>> task = hyper_representation(images, labels, lower_size=20, test_size=10, batch_size=8)
        >>> task.problem
        Bilevel(upper_params: 8 tensors, 60,856 numbers; lower_params: 2 tensors, 850 numbers)
    """
    call = "hyper_representation"
    floating(call, dtype)
    lower_size = settled(call, "lower_size", lower_size, whole_number(1))
    test_size = settled(call, "test_size", test_size, whole_number(0))
    evaluate_on = settled(call, "evaluate_on", evaluate_on, whole_number(1))
    above = number("(0, inf)", "must be a finite number above 0")
    ridge, sd = settled(call, "ridge", ridge, above), settled(call, "sd", sd, above)
    mean = settled(call, "mean", mean, FINITE)
    require_argument(call, "loss", loss, isinstance(loss, HeadLoss), "must be a HeadLoss, such as LeastSquares()")
    pixels, truth = _checked(call, images, labels, dtype)
    own_size = 0 if lower is not None else lower_size
    rule = f"+ test_size={test_size!r} must leave upper samples: there are {len(pixels)} rows in all"
    require_argument(call, "lower_size", own_size, own_size + test_size < len(pixels), rule)

    split_rng, start_rng, upper_rng, lower_rng = streams(call, seed, 4)

    def standardised(pixels: Tensor) -> Tensor:
        # padded before standardising, as the edge of a digit is black; one channel
        return functional.pad(pixels, (2, 2, 2, 2)).sub_(mean).div_(sd).unsqueeze(1)

    inputs = standardised(pixels)
    order = torch.randperm(len(inputs), generator=split_rng).to(inputs.device)
    lower_rows, test_rows, upper_rows = torch.split(order, [own_size, test_size, len(order) - own_size - test_size])
    below = inputs[lower_rows], truth[lower_rows]
    if lower is not None:
        require_argument(
            call, "lower", lower, isinstance(lower, tuple) and len(lower) == 2, "must be pictures and labels"
        )
        others, known = _checked(call, *lower, dtype)
        below = standardised(others), known
    upper = inputs[upper_rows], truth[upper_rows]
    test = inputs[test_rows], truth[test_rows]

    body = _body(start_rng, dtype).to(inputs.device)
    weight = inputs.new_zeros(_CLASSES, _FEATURES).requires_grad_()
    bias = inputs.new_zeros(_CLASSES).requires_grad_()

    def outputs(pictures: Tensor) -> Tensor:
        return functional.linear(body(pictures), weight, bias)

    def upper_loss(batch: tuple[Tensor, ...]) -> Tensor:
        return loss(outputs(batch[0]), batch[1])

    kept = _Kept(body)

    def lower_loss(batch: tuple[Tensor, ...]) -> Tensor:
        return loss(functional.linear(kept(batch[0]), weight, bias), batch[1]) + 0.5 * ridge * (
            (weight * weight).sum() + (bias * bias).sum()
        )

    def features(pictures: Tensor) -> Tensor:
        return torch.cat([body(chunk) for chunk in torch.split(pictures, _CHUNK)]).double()

    @torch.no_grad()
    def exact() -> float:
        known = features(below[0])
        if not torch.isfinite(known).all():
            return float("nan")
        head = loss.solve(known, below[1], ridge, torch.cat([weight.T, bias[None]]))
        new = Design(features(upper[0][:evaluate_on]), bias=True)
        return float(loss(new.times(head), upper[1][:evaluate_on]))

    @torch.no_grad()
    def metrics() -> dict[str, float]:
        if not test_size:
            return {}
        guesses = torch.cat([outputs(chunk).argmax(1) for chunk in torch.split(test[0], _CHUNK)])
        return {"accuracy": float((guesses == test[1]).double().mean())}

    return Task(
        call,
        Bilevel(upper_loss, lower_loss, body.parameters(), [weight, bias]),
        data(call, upper, "batch_size", batch_size, upper_rng.initial_seed()),
        data(call, below, "batch_size", batch_size, lower_rng.initial_seed()),
        lower_iters=10,
        exact=exact,
        metrics=metrics,
    )


def _checked(call: str, images: Any, labels: Any, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Pictures of 28 x 28 in [0, 1] and their labels."""
    pixels = pictures(call, images, dtype, (3,), "N x 28 x 28")
    if pixels.shape[1:] != (28, 28):
        raise ValueError(f"`{call}(images=...)` must be N x 28 x 28, got shape {tuple(pixels.shape)}")
    if pixels.min() < 0 or pixels.max() > 1:
        raise ValueError(
            f"`{call}(images=...)`: floating-point pictures must lie in [0, 1], got values from {float(pixels.min()):g} "
            f"to {float(pixels.max()):g}; bytes (uint8) are divided by 255 by themselves"
        )
    truth = classes(call, labels, len(pixels))
    if truth.max() >= _CLASSES:
        raise ValueError(f"`{call}(labels=...)` must lie in 0 to 9, got {int(truth.max())}")
    return pixels, truth


class _Kept:
    """The body, which remembers the features of the last pictures while pictures and parameters are what they were.

    They are compared number by number, which costs a hundredth of the features and is never wrong. Where a gradient by the
    parameters may be asked for, the features are computed anew: those that are kept have no graph.
    """

    def __init__(self, body: nn.Module):
        self.body = body
        self.parameters = tuple(body.parameters())
        self.seen: tuple[Tensor, ...] = ()
        self.features = torch.empty(0)

    def __call__(self, pictures: Tensor) -> Tensor:
        if torch.is_grad_enabled() and any(one.requires_grad for one in self.parameters):
            return self.body(pictures)
        now = (pictures, *(one.detach() for one in self.parameters))
        if not self.seen or not all(map(torch.equal, self.seen, now)):
            with torch.no_grad():
                self.seen, self.features = tuple(one.clone() for one in now), self.body(pictures)
        return self.features


class _Pool(nn.MaxPool2d):
    """Max-pooling of 2 x 2; where no gradient is asked for, by comparing halves: the same numbers in a third of the time."""

    def forward(self, input: Tensor) -> Tensor:
        """The largest of each square."""
        if torch.is_grad_enabled() and input.requires_grad:
            return super().forward(input)
        rows = torch.maximum(input[..., ::2, :], input[..., 1::2, :])
        return torch.maximum(rows[..., ::2], rows[..., 1::2])


def _body(rng: torch.Generator, dtype: torch.dtype) -> nn.Sequential:
    """LeNet without its last layer, drawn as torch draws it (uniform in 1 / sqrt(fan-in)) but from a generator of its own."""
    layers: list[nn.Conv2d | nn.Linear] = [
        nn.Conv2d(1, 6, 5, dtype=dtype, device="meta"),  # not drawn yet: that would move torch's global generator
        nn.Conv2d(6, 16, 5, dtype=dtype, device="meta"),
        nn.Conv2d(16, 120, 5, dtype=dtype, device="meta"),
        nn.Linear(120, _FEATURES, dtype=dtype, device="meta"),
    ]
    with torch.no_grad():
        for layer in layers:
            layer.to_empty(device="cpu")
            bound = layer.weight[0].numel() ** -0.5
            for tensor in layer.parameters():
                tensor.copy_((2 * torch.rand(tensor.shape, generator=rng, dtype=torch.float64) - 1) * bound)
    first, second, third, last = layers
    return nn.Sequential(
        *(first, nn.ReLU(), _Pool(2)),
        *(second, nn.ReLU(), _Pool(2)),
        *(third, nn.ReLU(), nn.Flatten()),
        *(last, nn.ReLU()),
    )
