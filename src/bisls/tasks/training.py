"""What tasks with a network below share: networks drawn from a generator of their own, splits, wrong labels, training anew."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from bisls._check import require_argument, settled, whole_number
from bisls.evaluate import lower_point
from bisls.problem import Bilevel
from bisls.tasks.base import Batches, Data, Drawn, Task, data

CHUNK = 2000  # samples that go through a network at a time when all of them are evaluated
RATE = 3e-3  # of the Adam that trains y from the start


class Samples(NamedTuple):
    """Features (or pictures) and their labels."""

    features: Tensor
    labels: Tensor


def drawn(module: nn.Module, rng: torch.Generator, dtype: torch.dtype) -> nn.Module:
    """The module with its weights and biases drawn as torch draws them, uniform in 1 / sqrt(fan-in), but from this generator.

    Args:
        module: Made on the device "meta", so that nothing was drawn yet: that would move torch's global generator. Embeddings
            are drawn as if every row were a weight, layers that only scale begin at 1 and 0.
        rng: What is drawn from.
        dtype: The precision.
    """
    module.to(dtype).to_empty(device="cpu")
    with torch.no_grad():
        for layer in module.modules():
            own = list(layer.parameters(recurse=False))
            if isinstance(layer, nn.LayerNorm | nn.GroupNorm):
                layer.weight.fill_(1.0)
                layer.bias.fill_(0.0)
            elif own:
                bound = own[0][0].numel() ** -0.5
                for tensor in own:
                    tensor.copy_((2 * torch.rand(tensor.shape, generator=rng, dtype=torch.float64) - 1) * bound)
    return module


def mlp(sizes: tuple[int, ...], rng: torch.Generator, dtype: torch.dtype) -> nn.Module:
    """Linear layers with ReLU between them; the input is flattened."""
    layers: list[nn.Module] = [nn.Flatten()]
    for i, (wide, narrow) in enumerate(pairwise(sizes)):
        layers += [nn.ReLU()] * (i > 0) + [nn.Linear(wide, narrow, device="meta")]
    return drawn(nn.Sequential(*layers), rng, dtype)


def convolutional(call: str, pixels: Tensor, kinds: int, rng: torch.Generator) -> nn.Module:
    """Two convolutions of 3 x 3 (8 and 16 channels) with 2 x 2 max-pooling, a layer of 32, the outputs; ReLU between them.

    Args:
        call: Who asks, for messages.
        pixels: The pictures, N x 1 x rows x columns.
        kinds: The number of outputs.
        rng: What it is drawn from.
    """
    rows, columns = pixels.shape[2:]
    if min(rows, columns) < 4:
        raise ValueError(f"`{call}(images=...)` must have at least 4 x 4 pixels, got {rows} x {columns}")
    layers = (
        *(nn.Conv2d(1, 8, 3, padding=1, device="meta"), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(8, 16, 3, padding=1, device="meta"), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()),
        *(nn.Linear(16 * (rows // 4) * (columns // 4), 32, device="meta"), nn.ReLU()),
        nn.Linear(32, kinds, device="meta"),
    )
    return drawn(nn.Sequential(*layers), rng, pixels.dtype).to(pixels.device)


def parts(
    call: str,
    features: Tensor,
    labels: Tensor,
    train: int,
    validation: int,
    test_size: int | None,
    rng: torch.Generator,
    upper: bool = True,
) -> tuple[Samples, Samples, Samples]:
    """Rows for the lower level, for the upper level, and for neither, from one permutation.

    Args:
        call: Who asks, for messages.
        features: All rows.
        labels: Their labels.
        train: Rows of the lower level.
        validation: Rows of the upper level.
        test_size: Rows of neither, at most; None takes all that are left.
        rng: What the permutation is drawn from.
        upper: Whether the upper level has rows of its own; otherwise `validation` is not looked at.
    """
    train = settled(call, "train", train, whole_number(1))
    own = settled(call, "validation", validation, whole_number(1)) if upper else 0
    rule = "must be None (all samples that are left) or a whole number, at least 1"
    left = len(features) - train - own
    if test_size is not None:
        test_size = settled(call, "test_size", test_size, whole_number(1, rule))
    both = f"+ validation={own!r} " if own else ""
    said = f"{both}must leave samples that neither level sees: there are {len(features)} rows in all"
    require_argument(call, "train", train, left >= 1, said)
    order = torch.randperm(len(features), generator=rng).to(features.device)
    lower, middle, test = torch.split(order, [train, own, left])
    test = test[:test_size]
    return tuple(Samples(features[rows], labels[rows]) for rows in (lower, middle, test))  # type: ignore[return-value]


def mislabelled(labels: Tensor, kinds: int, share: float, rng: torch.Generator) -> tuple[Tensor, Tensor]:
    """The labels with a share of them replaced by another class drawn uniformly, and which those are."""
    wrong = torch.zeros(len(labels), dtype=torch.bool)
    wrong[torch.randperm(len(labels), generator=rng)[: round(share * len(labels))]] = True
    shift = torch.randint(1, kinds, (len(labels),), generator=rng) * wrong
    wrong = wrong.to(labels.device)
    return (labels + shift.to(labels.device)) % kinds, wrong


def auc(above: Tensor, below: Tensor) -> float:
    """The share of pairs in which the first number is larger, ties half: the area under the ROC curve, by ranks."""
    _, place, count = torch.unique(torch.cat([above, below]), return_inverse=True, return_counts=True)
    middle = count.cumsum(0) - (count - 1) / 2  # the mean rank of equal numbers, from 1
    ranks = middle.double()[place[: len(above)]].sum()
    return float((ranks - len(above) * (len(above) + 1) / 2) / (len(above) * len(below)))


@torch.no_grad()
def judged(network: Callable[[Tensor], Tensor], samples: Samples) -> tuple[float, float]:
    """Mean cross-entropy, and the share of right guesses."""
    outputs = torch.cat([network(chunk) for chunk in torch.split(samples.features, CHUNK)]).double()
    right = (outputs.argmax(1) == samples.labels).double().mean()
    return float(functional.cross_entropy(outputs, samples.labels)), float(right)


def classified(
    call: str,
    problem: Bilevel,
    network: nn.Module,
    samples: tuple[Samples, Samples, Samples],
    batch_size: int | None,
    rngs: tuple[torch.Generator, torch.Generator, torch.Generator],
    more: Callable[[], dict[str, float]],
    steps: int = 1_000,
    rows: bool = False,
) -> Task:
    """A task with a classifier below: scored by its cross-entropy on samples of neither level, retrained by `anew`.

    Args:
        call: Who asks, for messages, and the name of the task.
        problem: With y at its start.
        network: The classifier.
        samples: Of the lower level, of the upper level, of neither.
        batch_size: Samples in a batch of either level; None takes all of them at every step.
        rngs: What the lower batches, the upper ones, and those of retraining are drawn from.
        more: What ``metrics()`` has beside the accuracy.
        steps: Of retraining.
        rows: Whether a lower batch says which rows it has.
    """
    lower, upper, test = samples
    lower_seed, upper_seed, again_seed = (rng.initial_seed() for rng in rngs)

    def exact() -> float:
        return judged(network, test)[0]

    lower_data = data(call, lower, "batch_size", batch_size, lower_seed, rows=rows)
    return Task(
        call,
        problem,
        data(call, upper, "batch_size", batch_size, upper_seed),
        lower_data,
        lower_iters=10,
        exact=exact,
        metrics=lambda: {"accuracy": judged(network, test)[1], **more()},
        retrained=anew(problem, lower_data, exact, steps, again_seed),
    )


def anew(problem: Bilevel, lower_data: Data, score: Callable[[], float], steps: int, seed: int) -> Callable[[], float]:
    """A function that trains y from where it stands now, at the x of its call, and says what came out.

    Plain Adam at a fixed rate, a fixed number of steps, batches of its own. Afterwards both levels are as they were.

    Args:
        problem: With y at its start.
        lower_data: What y is trained on: one batch, or a `Batches` or `Drawn`, which begins anew.
        score: What is measured at the end.
        steps: How many.
        seed: What the batches are drawn from.
    """
    y, start = problem.y, problem.y.read()

    def retrained() -> float:
        batches: Data = lower_data
        if isinstance(lower_data, Batches):
            batches = Batches(lower_data.tensors, lower_data.batch_size, seed, lower_data.indices)
        elif isinstance(lower_data, Drawn):
            batches = Drawn(lower_data.make, seed)
        before = y.read()
        own = start.clone()
        optimiser = torch.optim.Adam([own], lr=RATE)
        try:
            with problem.probing():
                y.write_(own)
                for _ in range(steps):
                    batch = batches if isinstance(batches, tuple) else next(batches)
                    own.grad = y.join(lower_point(problem, batch, None).grad)
                    optimiser.step()
                    y.write_(own)
                return score()
        finally:
            y.write_(before)

    return retrained
