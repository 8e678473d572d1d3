"""The problems in torch, for the workers that use it: the same losses, start and batches for all."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
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
        self.upper_batches, self.lower_batches = (
            shuffled((_standardised(arrays[f"{level}_x"]), _labels(arrays, level)), arrays[f"{level}_seed"], job.batch)
            for level in ("upper", "lower")
        )
        self.ridge = job.ridge

    def loss(self, outputs: Tensor, labels: Tensor) -> Tensor:
        gap = outputs - functional.one_hot(labels, outputs.shape[1]).to(outputs.dtype)
        return 0.5 * (gap * gap).sum() / len(outputs)

    def penalty(self) -> Tensor:
        return 0.5 * self.ridge * sum((tensor * tensor).sum() for tensor in self.head.parameters())

    def point(self) -> list[np.ndarray]:
        return [tensor.detach().numpy() for tensor in (*self.body.parameters(), *self.head.parameters())]


class FewShot:
    """Where a network with two hidden layers begins, so that new tasks are learnt by a few steps; the same tasks for all."""

    def __init__(self, job: SimpleNamespace):
        torch.set_num_threads(job.threads)
        arrays = np.load(job.problem)
        self.images = torch.from_numpy(arrays["images"])
        self.parts = [torch.from_numpy(arrays[name]) for name in ("support_x", "support_y", "query_x", "query_y")]
        self.start = [torch.from_numpy(arrays[f"start_{k}"]).requires_grad_() for k in range(6)]
        self.count = self.parts[0].shape[1]  # tasks in a batch
        self.batches = (self.batch(k) for k in range(len(self.parts[0])))

    def batch(self, k: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Shots and their classes, queries and theirs: tasks x rows (x pixels)."""
        shots, shot_labels, queries, query_labels = (part[k] for part in self.parts)
        return self._pictures(shots), shot_labels.long(), self._pictures(queries), query_labels.long()

    def _pictures(self, rows: Tensor) -> Tensor:
        return self.images[rows.long()].float() / 255.0

    def tasks(self) -> Iterator[tuple[Tensor, Tensor, Tensor, Tensor]]:
        """The tasks of the next batch, one by one."""
        return zip(*next(self.batches), strict=True)

    def network(self) -> nn.Sequential:
        """One network, begun at the start."""
        layers = [nn.Linear(weight.shape[1], weight.shape[0]) for weight in self.start[::2]]
        network = nn.Sequential(layers[0], nn.ReLU(), layers[1], nn.ReLU(), layers[2])
        with torch.no_grad():
            for own, tensor in zip(network.parameters(), self.start, strict=True):
                own.copy_(tensor)
        return network

    def loss(self, outputs: Tensor, labels: Tensor) -> Tensor:
        """The mean over rows, and over tasks if there are several."""
        return functional.cross_entropy(outputs.flatten(0, -2), labels.flatten())


def stacked(weights: Sequence[Tensor], inputs: Tensor) -> Tensor:
    """As many networks as there are tasks: weights tasks x out x in, biases tasks x out, inputs tasks x rows x in."""
    for k in range(0, len(weights), 2):
        inputs = torch.relu(inputs) if k else inputs
        inputs = torch.baddbmm(weights[k + 1].unsqueeze(1), inputs, weights[k].mT)
    return inputs


class LossWeights(nn.Module):
    """The weight of a sample from its loss, by a network with one hidden layer (Meta-Weight-Net)."""

    def __init__(self, start: Sequence[Tensor]):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(1, len(start[0])), nn.ReLU(), nn.Linear(len(start[0]), 1))

    def forward(self, losses: Tensor, rows: Tensor) -> Tensor:
        return torch.sigmoid(self.layers(losses.detach()[:, None]).squeeze(1))


class RowWeights(nn.Module):
    """A number for each sample."""

    def __init__(self, start: Sequence[Tensor]):
        super().__init__()
        self.x = nn.Parameter(torch.zeros_like(start[0]))

    def forward(self, losses: Tensor, rows: Tensor) -> Tensor:
        return torch.sigmoid(self.x[rows])


def _convolutional(start: Sequence[Tensor]) -> nn.Module:
    first, second, third, last = start[::2]
    return nn.Sequential(
        *(nn.Conv2d(1, len(first), 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(len(first), len(second), 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()),
        *(nn.Linear(third.shape[1], third.shape[0]), nn.ReLU()),
        nn.Linear(last.shape[1], last.shape[0]),
    )


def _layers(start: Sequence[Tensor]) -> nn.Module:
    sizes = [tuple(weight.shape) for weight in start[::2]]
    first, second, last = (nn.Linear(inputs, outputs) for outputs, inputs in sizes)
    return nn.Sequential(nn.Flatten(), first, nn.ReLU(), second, nn.ReLU(), last)


class Reweighting:
    """Training samples weighted above, so that the network trained on them below does well on clean ones."""

    def __init__(self, job: SimpleNamespace):
        torch.set_num_threads(job.threads)
        arrays = np.load(job.problem)
        x, y = (
            [torch.from_numpy(arrays[name]) for name in sorted(arrays.files) if name.startswith(level)]
            for level in ("x_start", "y_start")
        )
        self.weighing = {"weight-network": LossWeights, "sample-weights": RowWeights}[job.contest](x)
        self.network = {"weight-network": _convolutional, "sample-weights": _layers}[job.contest](y)
        with torch.no_grad():
            for module, start in ((self.weighing, x), (self.network, y)):
                for own, tensor in zip(module.parameters(), start, strict=True):
                    own.copy_(tensor)
        lower, upper = (
            (torch.from_numpy(arrays[f"{level}_x"]), _labels(arrays, level)) for level in ("lower", "upper")
        )
        rows = torch.arange(len(lower[0]))
        self.lower_batches = shuffled((*lower, rows), arrays["lower_seed"], job.batch)
        self.upper_batches = shuffled(upper, arrays["upper_seed"], job.batch)

    def lower(
        self,
        network: Callable[[Tensor], Tensor],
        batch: tuple[Tensor, ...],
        weighing: Callable[[Tensor, Tensor], Tensor] | None = None,
    ) -> Tensor:
        """The weighted training loss; by default with the weights of the upper level."""
        losses = functional.cross_entropy(network(batch[0]), batch[1], reduction="none")
        return ((weighing or self.weighing)(losses, batch[2]) * losses).mean()

    def upper(self, network: Callable[[Tensor], Tensor], batch: tuple[Tensor, ...]) -> Tensor:
        return functional.cross_entropy(network(batch[0]), batch[1])

    def point(self) -> list[np.ndarray]:
        return [tensor.detach().numpy() for tensor in (*self.weighing.parameters(), *self.network.parameters())]


def shuffled(tensors: tuple[Tensor, ...], seed: np.ndarray, size: int) -> Iterator[tuple[Tensor, ...]]:
    """Shuffled epochs without replacement; rows that do not fill a batch are left out of theirs."""
    draw = torch.Generator().manual_seed(int(seed))
    while True:
        order = torch.randperm(len(tensors[0]), generator=draw)
        for start in range(0, len(order) - size + 1, size):
            rows = order[start : start + size]
            yield tuple(tensor.index_select(0, rows) for tensor in tensors)


def _labels(arrays: np.lib.npyio.NpzFile, level: str) -> Tensor:
    return torch.from_numpy(arrays[f"{level}_y"]).long()


def _standardised(pixels: np.ndarray) -> Tensor:
    return ((functional.pad(torch.from_numpy(pixels).float() / 255.0, (2, 2, 2, 2)) - 0.1307) / 0.3081).unsqueeze(1)
