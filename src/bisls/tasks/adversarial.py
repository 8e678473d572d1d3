"""Adversarial training as a minimax problem: the network above, the perturbations of a batch below."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from bisls._check import number, settled, whole_number
from bisls.bounds import Box
from bisls.evaluate import gradient
from bisls.problem import Bilevel
from bisls.tasks.base import Batches, Task, streams
from bisls.tasks.inputs import classes, floating, pictures
from bisls.tasks.training import Samples, convolutional, judged, parts

ATTACK = 10  # sign steps, each a fifth of the reach, by which the network is judged


def adversarial(
    images: Any,
    labels: Any,
    *,
    reach: float = 0.1,
    train: int = 10_000,
    test_size: int | None = 500,
    batch_size: int = 64,
    lower_iters: int = 5,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
) -> Task:
    """A convolutional network is x, what is added to the pictures of a batch is y, in a box around 0.

        f(x, y) = mean cross-entropy of the network on pictures + y
        g(x, y) = - sum over the batch of the same

    A problem with fresh y for every batch: it begins at 0 (``lower_start``), and both levels get the same batch. Since g is
    -f up to a factor, where y is at its best on the box the hypergradient is the plain gradient of f in x.

    `exact` is the mean cross-entropy on pictures that were never trained on, attacked by ten sign steps of a fifth of `reach`:
    it depends on x alone. ``metrics()`` has the accuracy there, "robust" under that attack and "accuracy" without one.

    Args:
        images: N x rows x columns, at least 4 of each: bytes (divided by 255) or floating-point numbers (used as they are).
        labels: N whole numbers 0, 1, 2, ...
        reach: How far a pixel may be moved, above 0.
        train: Samples that are trained on, at least 1.
        test_size: Samples that are not; None takes all that are left.
        batch_size: Samples in a batch, at least 1.
        lower_iters: Steps of an attack in training, at least 1.
        seed: What the split, the network's start and the batches are drawn from.
        dtype: The precision, torch.float32 or torch.float64.

    Examples:
        >>> import torch
        >>> draw = torch.Generator().manual_seed(5)
        >>> images, labels = torch.rand(60, 8, 8, generator=draw), torch.arange(3).repeat(20)
        >>> task = adversarial(images, labels, train=30, batch_size=10)
        >>> task.problem
        Bilevel(upper_params: 8 tensors, 3,427 numbers; lower_params: 1 tensor, 640 numbers)
        >>> sorted(task.metrics())
        ['accuracy', 'robust']
    """
    call = "adversarial"
    floating(call, dtype)
    reach = settled(call, "reach", reach, number("(0, inf)", "must be a finite number above 0"))
    lower_iters = settled(call, "lower_iters", lower_iters, whole_number(1))
    pixels = pictures(call, images, dtype, (3,), "N x rows x columns").unsqueeze(1)
    truth = classes(call, labels, len(pixels))
    split_rng, start_rng, batch_rng = streams(call, seed, 3)
    known, _, test = parts(call, pixels, truth, train, 0, test_size, split_rng, upper=False)
    rule = f"must be a whole number from 1 to the number of rows, {len(known.labels)}"
    batch_size = settled(call, "batch_size", batch_size, whole_number(1, rule, most=len(known.labels)))
    network = convolutional(call, pixels, int(truth.max()) + 1, start_rng)
    moved = pixels.new_zeros(batch_size, *pixels.shape[1:]).requires_grad_()

    def upper_loss(batch: tuple[Tensor, ...]) -> Tensor:
        return functional.cross_entropy(network(batch[0] + moved), batch[1])

    def lower_loss(batch: tuple[Tensor, ...]) -> Tensor:
        return -functional.cross_entropy(network(batch[0] + moved), batch[1], reduction="sum")

    def attacked() -> Samples:
        shift = torch.zeros_like(test.features)
        for _ in range(ATTACK):
            shift = shift.detach().requires_grad_()
            with torch.enable_grad():
                loss = functional.cross_entropy(network(test.features + shift), test.labels)
                (uphill,) = gradient(loss, [shift])
            if uphill is not None:
                shift = (shift.detach() + reach / 5 * uphill.sign()).clamp(-reach, reach)
        return Samples(test.features + shift.detach(), test.labels)

    def exact() -> float:
        return judged(network, attacked())[0]

    def metrics() -> dict[str, float]:
        return {"accuracy": judged(network, test)[1], "robust": judged(network, attacked())[1]}

    problem = Bilevel(
        upper_loss,
        lower_loss,
        network.parameters(),
        [moved],
        lower_bounds=Box(-reach, reach),
        lower_start=lambda: [torch.zeros_like(moved)],
    )
    upper_data = Batches(known, batch_size, batch_rng.initial_seed())
    return Task(call, problem, upper_data, None, lower_iters=lower_iters, exact=exact, metrics=metrics)
