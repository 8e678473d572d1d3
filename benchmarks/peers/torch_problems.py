"""The two problems in torch, for the workers that use it: the same losses, start and batches for all."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

PENALTIES = {"sigmoid": torch.sigmoid, "exp": torch.exp}


class Penalties:
    """Logistic regression with one penalty a feature: x above, w below, both from 0."""

    def __init__(self, job: SimpleNamespace):
        torch.set_num_threads(job.threads)
        arrays = np.load(job.problem)
        self.train = torch.from_numpy(arrays["train_x"]), torch.from_numpy(arrays["train_y"])
        self.validation = torch.from_numpy(arrays["validation_x"]), torch.from_numpy(arrays["validation_y"])
        self.penalty = PENALTIES[job.penalty]
        self.size = self.train[0].shape[1]

    def lower(self, x: Tensor, w: Tensor) -> Tensor:
        fit = functional.binary_cross_entropy_with_logits(self.train[0] @ w, self.train[1])
        return fit + 0.5 * (self.penalty(x) * w * w).sum()

    def upper(self, w: Tensor) -> Tensor:
        return functional.binary_cross_entropy_with_logits(self.validation[0] @ w, self.validation[1])


class Representation:
    """The body of a LeNet above, its last layer below: least squares on batches, with a ridge on the last layer."""

    def __init__(self, job: SimpleNamespace):
        torch.set_num_threads(job.threads)
        arrays = np.load(job.problem)
        layers = [nn.Conv2d(1, 6, 5), nn.Conv2d(6, 16, 5), nn.Conv2d(16, 120, 5), nn.Linear(120, 84)]
        first, second, third, last = layers
        self.body = nn.Sequential(
            *(first, nn.ReLU(), nn.MaxPool2d(2)),
            *(second, nn.ReLU(), nn.MaxPool2d(2)),
            *(third, nn.ReLU(), nn.Flatten()),
            *(last, nn.ReLU()),
        )
        self.head = nn.Linear(84, 10)
        with torch.no_grad():
            for number, tensor in enumerate(self.body.parameters()):
                tensor.copy_(torch.from_numpy(arrays[f"start_{number}"]))
            for tensor in self.head.parameters():
                tensor.zero_()
        self.upper_batches = _batches(arrays, "upper", job.batch)
        self.lower_batches = _batches(arrays, "lower", job.batch)
        self.ridge = job.ridge

    def loss(self, outputs: Tensor, labels: Tensor) -> Tensor:
        gap = outputs - functional.one_hot(labels, outputs.shape[1]).to(outputs.dtype)
        return 0.5 * (gap * gap).sum() / len(outputs)

    def penalty(self) -> Tensor:
        return 0.5 * self.ridge * sum((tensor * tensor).sum() for tensor in self.head.parameters())

    def point(self) -> list[np.ndarray]:
        return [tensor.detach().numpy() for tensor in (*self.body.parameters(), *self.head.parameters())]


def _batches(arrays: np.lib.npyio.NpzFile, level: str, size: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Shuffled epochs without replacement; rows that do not fill a batch are left out of theirs."""
    pixels = torch.from_numpy(arrays[f"{level}_x"]).float() / 255.0
    images = ((functional.pad(pixels, (2, 2, 2, 2)) - 0.1307) / 0.3081).unsqueeze(1)
    labels = torch.from_numpy(arrays[f"{level}_y"]).long()
    draw = torch.Generator().manual_seed(int(arrays[f"{level}_seed"]))

    def endless() -> Iterator[tuple[Tensor, Tensor]]:
        while True:
            order = torch.randperm(len(images), generator=draw)
            for start in range(0, len(images) - size + 1, size):
                rows = order[start : start + size]
                yield images.index_select(0, rows), labels.index_select(0, rows)

    return endless()
