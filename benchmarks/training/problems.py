"""Networks as people train them, small enough for a core: a model, a loss, batches drawn with a seed, a loss on unseen data.

Data come with Python (the text of its manual), from `bisls data mnist fashion-mnist a9a`, or are made up.
"""

from __future__ import annotations

import pydoc_data.topics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from bisls import data

Batch = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Data:
    """Rows to train on and rows to be judged on. Targets of -100 count for nothing."""

    train: Batch
    test: Batch


def entropy(model: nn.Module, batch: Batch) -> Tensor:
    """Cross-entropy over all that is predicted."""
    logits = model(batch[0])
    return functional.cross_entropy(logits.reshape(-1, logits.shape[-1]), batch[1].reshape(-1))


@dataclass(frozen=True)
class Problem:
    """A network and its data.

    Attributes:
        network: Makes the model, from torch's present random state.
        rows: Loads the data.
        needs: The data set it needs, if `bisls data` fetches it.
        developed: Whether a default was developed on it; otherwise it was only judged there.
        loss: Of the model, on a batch.
    """

    network: Callable[[], nn.Module]
    rows: Callable[[], Data]
    developed: bool
    needs: str | None = None
    loss: Callable[[nn.Module, Batch], Tensor] = entropy


def batches(rows: Batch, size: int, seed: int) -> Iterator[Batch]:
    """Batches without end, without replacement in each epoch."""
    draw = torch.Generator().manual_seed(seed)
    count = len(rows[0])
    size = min(size, count)
    while True:
        for chosen in torch.randperm(count, generator=draw)[: count - count % size].split(size):
            yield rows[0][chosen], rows[1][chosen]


@torch.no_grad()
def judged(model: nn.Module, rows: Batch, loss_of: Callable[[nn.Module, Batch], Tensor]) -> float:
    """The loss on rows in evaluation mode, the model left as it was."""
    was = model.training
    model.eval()
    total, count = 0.0, 0
    for x, t in zip(rows[0].split(1000), rows[1].split(1000), strict=True):
        seen = int((t != -100).sum())
        total, count = total + float(loss_of(model, (x, t))) * seen, count + seen
    model.train(was)
    return total / count


# --- models


class Residual(nn.Module):
    """x + f(x)."""

    def __init__(self, *layers: nn.Module):
        super().__init__()
        self.inner = nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(x)


def convolutions() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 16, 5, stride=2), nn.ReLU(), nn.Conv2d(16, 32, 5, stride=2), nn.ReLU(),
        nn.Flatten(), nn.Linear(512, 64), nn.ReLU(), nn.Linear(64, 10),
    )  # fmt: skip


def residual_with_batch_norm() -> nn.Module:
    def block() -> nn.Module:
        conv = [nn.Conv2d(24, 24, 3, padding=1, bias=False) for _ in range(2)]
        return nn.Sequential(Residual(conv[0], nn.BatchNorm2d(24), nn.ReLU(), conv[1], nn.BatchNorm2d(24)), nn.ReLU())

    return nn.Sequential(
        nn.Conv2d(1, 24, 3, padding=1, bias=False), nn.BatchNorm2d(24), nn.ReLU(), block(), nn.MaxPool2d(2), block(), block(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(24, 10),
    )  # fmt: skip


def perceptron() -> nn.Module:
    return nn.Sequential(nn.Linear(123, 128), nn.ReLU(), nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 2))


class Transformer(nn.Module):
    """Tokens to logits, looking back only (or everywhere, with the mean of all places at the end)."""

    def __init__(self, tokens: int, length: int, width: int, layers: int, heads: int = 4, pooled: int = 0):
        super().__init__()
        self.enter = nn.Linear(tokens, width) if pooled else nn.Embedding(tokens, width)
        self.place = nn.Parameter(torch.randn(length, width) * 0.02)
        block = {"dim_feedforward": 4 * width, "dropout": 0.0, "batch_first": True, "norm_first": True}
        self.blocks = nn.ModuleList(nn.TransformerEncoderLayer(width, heads, **block) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.leave = nn.Linear(width, pooled or tokens)
        self.pooled = bool(pooled)
        self.register_buffer("mask", torch.triu(torch.full((length, length), -torch.inf), 1), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        h = self.enter(x) + self.place[: x.shape[1]]
        for block in self.blocks:
            h = block(h) if self.pooled else block(h, src_mask=self.mask[: x.shape[1], : x.shape[1]])
        return self.leave(self.norm(h.mean(1) if self.pooled else h))


class Patches(nn.Module):
    """A picture as 16 patches of 7 x 7."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Transformer(49, 16, 32, 3, pooled=10)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(functional.unfold(x, 7, stride=7).transpose(1, 2))


class Recurrent(nn.Module):
    """A GRU over tokens."""

    def __init__(self, tokens: int, width: int):
        super().__init__()
        self.enter, self.inner, self.leave = (
            nn.Embedding(tokens, 24),
            nn.GRU(24, width, batch_first=True),
            nn.Linear(width, tokens),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.leave(self.inner(self.enter(x))[0])


class Words(nn.Module):
    """The next word from the mean of the words before."""

    def __init__(self, words: int, width: int):
        super().__init__()
        self.enter, self.inner, self.leave = (
            nn.EmbeddingBag(words, width, mode="mean"),
            nn.Linear(width, width),
            nn.Linear(width, words),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.leave(torch.tanh(self.inner(self.enter(x))))


# --- data


@cache
def fashion() -> Data:
    images = data.load("fashion-mnist")

    def rows(x: np.ndarray, t: np.ndarray) -> Batch:
        scaled = (torch.tensor(x, dtype=torch.float32).reshape(-1, 1, 28, 28) / 255.0 - 0.2860) / 0.3530
        return scaled, torch.tensor(t).long()

    return Data(rows(images.train_x, images.train_y), rows(images.test_x[:5000], images.test_y[:5000]))


NOISE = 0.1  # without it losses end near 0, and ratios of them mean nothing


def flipped(labels: Tensor, count: int) -> Tensor:
    """A tenth of the labels is another one."""
    draw = torch.Generator().manual_seed(1)
    other = (labels + torch.randint(1, count, labels.shape, generator=draw)) % count
    return torch.where(torch.rand(labels.shape, generator=draw) < NOISE, other, labels)


@cache
def digits() -> Data:
    """MNIST at half its size, a tenth of the labels wrong."""
    images = data.load("mnist")

    def rows(x: np.ndarray, t: np.ndarray) -> Batch:
        small = functional.avg_pool2d(torch.tensor(x, dtype=torch.float32).reshape(-1, 1, 28, 28), 2)
        return (small / 255.0 - 0.1307) / 0.3081, flipped(torch.tensor(t).long(), 10)

    return Data(rows(images.train_x, images.train_y), rows(images.test_x[:5000], images.test_y[:5000]))


@cache
def table() -> Data:
    loaded = data.load("a9a")
    order = np.random.default_rng(0).permutation(len(loaded.x))
    x = torch.as_tensor(np.asarray(loaded.x)[order], dtype=torch.float32)
    t = (torch.as_tensor(np.asarray(loaded.y)[order]) > 0).long()
    return Data((x[:24000], t[:24000]), (x[24000:], t[24000:]))


@cache
def manual() -> str:
    return "\n".join(pydoc_data.topics.topics[name] for name in sorted(pydoc_data.topics.topics))


LENGTH = 32
LETTERS = "".join(chr(code) for code in range(32, 127)) + "\n"


@cache
def characters() -> Data:
    """Pieces of 32 characters, the next one to be told at each; the last tenth is for judging."""
    known = {letter: number for number, letter in enumerate(LETTERS)}
    text = torch.tensor([known[letter] for letter in manual() if letter in known])
    pieces = text[: (len(text) - 1) // LENGTH * LENGTH + 1]
    x, t = pieces[:-1].reshape(-1, LENGTH), pieces[1:].reshape(-1, LENGTH)
    last = len(x) // 10
    return Data((x[:-last], t[:-last]), (x[-last:], t[-last:]))


WORDS = 2000


@cache
def words() -> Data:
    """The six words before and the next one; rare words are one word."""
    text = manual().lower().split()
    names, counts = np.unique(text, return_counts=True)
    common = {name: i + 1 for i, name in enumerate(names[np.argsort(-counts, kind="stable")][: WORDS - 1])}
    tokens = torch.tensor([common.get(word, 0) for word in text])
    windows = tokens.unfold(0, 7, 1)
    order = torch.randperm(len(windows), generator=torch.Generator().manual_seed(0))
    x, t = windows[order][:, :6], windows[order][:, 6]
    return Data((x[:-5000], t[:-5000]), (x[-5000:], t[-5000:]))


SYMBOLS, COPIED = 12, 8


def repeated(symbols: int, length: int, order: Callable[[Tensor], Tensor], seed: int) -> Data:
    """Symbols, a mark, and the same symbols again in some order, a tenth of them wrong, which alone are asked for."""
    draw = torch.Generator().manual_seed(seed)
    told = torch.randint(1, symbols, (22000, length), generator=draw)
    line = torch.cat([told, torch.zeros(len(told), 1, dtype=torch.long), order(told)], 1)
    x, t = line[:, :-1], line[:, 1:].clone()
    t = flipped(t, symbols)
    t[:, :length] = -100
    return Data((x[:20000], t[:20000]), (x[20000:], t[20000:]))


@cache
def copying() -> Data:
    """Eight symbols, to be told again."""
    return repeated(SYMBOLS, COPIED, lambda told: told, 0)


@cache
def reversal() -> Data:
    """Eight symbols of fifteen, to be told backwards."""
    return repeated(16, 8, lambda told: told.flip(1), 8)


@cache
def rotation() -> Data:
    """Ten symbols of seven, to be told again from the eighth on."""
    return repeated(8, 10, lambda told: told.roll(3, 1), 9)


PROBLEMS = {
    "cnn": Problem(convolutions, fashion, True, "fashion-mnist"),
    "mlp": Problem(perceptron, table, True, "a9a"),
    "characters": Problem(lambda: Transformer(len(LETTERS), LENGTH, 48, 2), characters, False),
    "recurrent": Problem(lambda: Recurrent(len(LETTERS), 64), characters, True),
    "residual": Problem(residual_with_batch_norm, digits, False, "mnist"),
    "copying": Problem(lambda: Transformer(SYMBOLS, 2 * COPIED, 32, 8), copying, False),
    "embedding": Problem(lambda: Words(WORDS, 32), words, True),
    "vit": Problem(Patches, fashion, True, "fashion-mnist"),
    "reversal": Problem(lambda: Transformer(16, 16, 32, 10), reversal, True),
    "rotation": Problem(lambda: Transformer(8, 20, 24, 10), rotation, True),
}
