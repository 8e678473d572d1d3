"""Problems of other kinds than classifiers that were begun well: what people bring, and what makes optimisers fail.

Most are made up, with noise, so that a loss on unseen rows stays away from 0 and ratios mean something. Each kind comes twice:
one to develop on, one to be judged by.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from itertools import pairwise

import torch
from sklearn.datasets import load_breast_cancer, load_diabetes, load_digits, load_wine
from torch import Tensor, nn
from torch.nn import functional

from training.problems import Batch, Data, Problem, digits, fashion, flipped, perceptron, table

ROWS, JUDGED = 8000, 2000


def split(x: Tensor, t: Tensor, last: int = JUDGED) -> Data:
    """The last rows are for judging."""
    return Data((x[:-last], t[:-last]), (x[-last:], t[-last:]))


def drawn(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def layers(*widths: int, between: Callable[[], nn.Module] = nn.ReLU) -> nn.Sequential:
    """Linear layers with something between them."""
    made: list[nn.Module] = []
    for n, m in pairwise(widths):
        made += [nn.Linear(n, m), between()]
    return nn.Sequential(*made[:-1])


# --- losses


def squares(model: nn.Module, batch: Batch) -> Tensor:
    return functional.mse_loss(model(batch[0]), batch[1])


def absolutes(model: nn.Module, batch: Batch) -> Tensor:
    return functional.l1_loss(model(batch[0]), batch[1])


def own(model: nn.Module, batch: Batch) -> Tensor:
    """What the model itself says."""
    return model(*batch)


def times(factor: float) -> Callable[[nn.Module, Batch], Tensor]:
    """Cross-entropy in another unit."""
    return lambda model, batch: factor * functional.cross_entropy(model(batch[0]), batch[1])


# --- regression on tables


@cache
def friedman() -> Data:
    """Friedman's first function in its own units: a mean of 14, noise of 1."""
    x = torch.rand(ROWS + JUDGED, 10, generator=drawn(0))
    y = 10 * torch.sin(math.pi * x[:, 0] * x[:, 1]) + 20 * (x[:, 2] - 0.5) ** 2 + 10 * x[:, 3] + 5 * x[:, 4]
    return split(x, (y + torch.randn(len(y), generator=drawn(1)))[:, None])


@cache
def diabetes() -> Data:
    """442 patients, the target in its own units (25 to 346)."""
    x, y = load_diabetes(return_X_y=True)
    order = torch.randperm(len(x), generator=drawn(0))
    wide = torch.tensor(x, dtype=torch.float32)[order] * len(x) ** 0.5
    return split(wide, torch.tensor(y, dtype=torch.float32)[order][:, None], 142)


@cache
def unscaled() -> Data:
    """Classes from twelve columns whose scales span six orders."""
    x = torch.randn(ROWS + JUDGED, 12, generator=drawn(2))
    t = (torch.tanh(x @ torch.randn(12, 3, generator=drawn(3))) @ torch.randn(3, 4, generator=drawn(4))).argmax(1)
    return split(x * torch.logspace(-3, 3, 12) + 10.0, flipped(t, 4))


@cache
def wine() -> Data:
    """178 wines as they were measured: columns from 0.1 to 1,700."""
    loaded = load_wine()
    order = torch.randperm(178, generator=drawn(0))
    x, t = torch.tensor(loaded.data, dtype=torch.float32)[order], torch.tensor(loaded.target)[order]
    return split(x, flipped(t, 3), 60)


@cache
def outlying() -> Data:
    """A smooth function with Cauchy noise."""
    x = torch.randn(ROWS + JUDGED, 8, generator=drawn(5))
    y = torch.sin(x[:, 0] * x[:, 1]) + x[:, 2].abs() + 0.5 * x[:, 3]
    noise = 0.2 * torch.randn(len(y), generator=drawn(6)) / torch.randn(len(y), generator=drawn(7)).abs()
    return split(x, (y + noise.clamp(-1e3, 1e3))[:, None])


@cache
def student() -> Data:
    """Many outputs with noise of three degrees of freedom, in units of a thousandth."""
    x = torch.randn(ROWS + JUDGED, 20, generator=drawn(8))
    y = torch.relu(x @ torch.randn(20, 16, generator=drawn(9))) @ torch.randn(16, 6, generator=drawn(10)) / 10
    chi = torch.randn(len(y), 6, 3, generator=drawn(12)).square().mean(2).sqrt()
    return split(x, (y + 0.3 * torch.randn(y.shape, generator=drawn(11)) / chi) / 1000)


# --- pictures


@cache
def small_digits() -> Data:
    x, t = load_digits(return_X_y=True)
    order = torch.randperm(len(x), generator=drawn(0))
    return split((torch.tensor(x, dtype=torch.float32)[order] - 4.9) / 6.0, flipped(torch.tensor(t)[order], 10), 500)


@cache
def to_itself() -> Data:
    """Half-sized digits, to be told again."""
    rows = digits()
    x, z = rows.train[0].flatten(1), rows.test[0].flatten(1)
    return Data((x, x), (z, z))


@cache
def blurred() -> Data:
    """FashionMNIST at half its size with noise, to be told without."""
    rows, draw = fashion(), drawn(0)

    def pair(x: Tensor) -> Batch:
        small = functional.avg_pool2d(x[:20000], 2)
        return small + 0.7 * torch.randn(small.shape, generator=draw), small

    return Data(pair(rows.train[0]), pair(rows.test[0][:2000]))


def doubtful(rows: Data, count: int, share: float) -> Data:
    """Many labels are wrong, in training and in judging."""
    draw = drawn(13)

    def pair(x: Tensor, t: Tensor) -> Batch:
        wrong = torch.rand(len(t), generator=draw) < share
        return x, torch.where(wrong, torch.randint(0, count, t.shape, generator=draw), t)

    return Data(pair(*rows.train), pair(*rows.test))


@cache
def turned() -> Data:
    """Digits on their side."""
    rows = digits()
    return Data((rows.train[0].rot90(1, (2, 3)), rows.train[1]), (rows.test[0].rot90(1, (2, 3)), rows.test[1]))


@cache
def negatives() -> Data:
    """FashionMNIST with black and white exchanged."""
    rows = fashion()
    return Data((-rows.train[0], rows.train[1]), (-rows.test[0], rows.test[1]))


# --- sequences


@cache
def waves() -> Data:
    """Two sines with noise, the next value to be told."""
    draw = drawn(14)
    time = torch.arange(33.0)
    rate, phase = (torch.rand(ROWS + JUDGED, 2, 1, generator=draw) for _ in range(2))
    line = torch.sin((0.2 + rate) * time + 6.3 * phase).sum(1) + 0.1 * torch.randn(len(rate), 33, generator=draw)
    return split(line[:, :-1, None], line[:, 1:, None])


@cache
def adding() -> Data:
    """Thirty numbers, two of them marked: their sum, with noise."""
    draw = drawn(15)
    count = ROWS + JUDGED
    values, marks = torch.rand(count, 30, generator=draw), torch.zeros(count, 30)
    marks.scatter_(1, torch.rand(count, 30, generator=draw).argsort(1)[:, :2], 1.0)
    total = (values * marks).sum(1) + 0.1 * torch.randn(count, generator=draw)
    return split(torch.stack([values, marks], 2), total[:, None])


class Memory(nn.Module):
    """An LSTM that tells a number at each place, or at the last one."""

    def __init__(self, width: int, inputs: int, last: bool):
        super().__init__()
        self.inner, self.leave, self.last = nn.LSTM(inputs, width, batch_first=True), nn.Linear(width, 1), last

    def forward(self, x: Tensor) -> Tensor:
        h = self.inner(x)[0]
        return self.leave(h[:, -1] if self.last else h)


@cache
def sorting() -> Data:
    return ordered(10, 6, 16)


@cache
def shifting() -> Data:
    return ordered(12, 8, 17, lambda told: (told + told.roll(1, 1)) % 12)


def ordered(symbols: int, length: int, seed: int, order: Callable[[Tensor], Tensor] = lambda t: t.sort(1)[0]) -> Data:
    """Symbols, and others that follow from them."""
    told = torch.randint(0, symbols, (ROWS + JUDGED, length), generator=drawn(seed))
    return split(told, flipped(order(told), symbols))


class PostNorm(nn.Module):
    """A transformer that normalises after each sum, as the first ones did: it wants to be warmed up."""

    def __init__(self, tokens: int, length: int, width: int, count: int):
        super().__init__()
        self.enter, self.place = nn.Embedding(tokens, width), nn.Parameter(torch.randn(length, width))
        block = {"dim_feedforward": 4 * width, "dropout": 0.0, "batch_first": True}
        self.blocks = nn.ModuleList(nn.TransformerEncoderLayer(width, 4, **block) for _ in range(count))
        self.leave = nn.Linear(width, tokens)

    def forward(self, x: Tensor) -> Tensor:
        h = self.enter(x) + self.place
        for block in self.blocks:
            h = block(h)
        return self.leave(h)


# --- losses of their own


class Spread(nn.Module):
    """Mean and logarithm of the variance; the loss is the likelihood of a Gaussian."""

    def __init__(self, inputs: int, outputs: int):
        super().__init__()
        self.inner = layers(inputs, 64, 64, 2 * outputs)

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        mean, log = self.inner(x).chunk(2, 1)
        return (0.5 * log + 0.5 * (t - mean) ** 2 * torch.exp(-log)).mean() + 2.0  # so that ratios mean something


@cache
def uneven() -> Data:
    """Noise that depends on the place."""
    x = 2 * torch.rand(ROWS + JUDGED, 3, generator=drawn(18)) - 1
    noise = torch.exp(2 * x[:, 1:2]) * torch.randn(len(x), 1, generator=drawn(19))
    return split(x, 3 * torch.sin(3 * x[:, :1]) + 0.3 * noise)


class Variational(nn.Module):
    """A variational autoencoder: the loss draws anew at each call."""

    def __init__(self, pixels: int, code: int):
        super().__init__()
        self.enter, self.leave = layers(pixels, 128, 2 * code), layers(code, 128, pixels)

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        mean, log = self.enter(x).chunk(2, 1)
        told = self.leave(mean + torch.exp(0.5 * log) * torch.randn_like(mean))
        apart = 0.5 * (mean**2 + log.exp() - log - 1).sum(1).mean()
        return (told - t).square().sum(1).mean() + apart


class Denoised(nn.Module):
    """Noise of a drawn strength, to be told: the loss of diffusion."""

    def __init__(self, pixels: int):
        super().__init__()
        self.inner = layers(pixels + 1, 256, 256, pixels, between=nn.SiLU)

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        share, noise = torch.rand(len(x), 1), torch.randn_like(x)
        seen = (1 - share).sqrt() * x + share.sqrt() * noise
        return (self.inner(torch.cat([seen, share], 1)) - noise).square().mean()


class Liked(nn.Module):
    """Who likes what, by factors of both: only the rows in the batch have gradients."""

    def __init__(self, users: int, things: int, width: int):
        super().__init__()
        self.users, self.things = nn.Embedding(users, width), nn.Embedding(things, width)
        nn.init.normal_(self.users.weight, std=0.1)
        nn.init.normal_(self.things.weight, std=0.1)
        self.level = nn.Parameter(torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        return self.level + (self.users(x[:, 0]) * self.things(x[:, 1])).sum(1, keepdim=True)


@cache
def ratings() -> Data:
    return marks(300, 200, 20)


@cache
def purchases() -> Data:
    return marks(1000, 50, 21)


def marks(users: int, things: int, seed: int) -> Data:
    draw = drawn(seed)
    left, right = torch.randn(users, 3, generator=draw), torch.randn(things, 3, generator=draw)
    rows = torch.stack([torch.randint(0, n, (3 * ROWS,), generator=draw) for n in (users, things)], 1)
    mark = (left[rows[:, 0]] * right[rows[:, 1]]).sum(1) + 3.0 + 0.5 * torch.randn(len(rows), generator=draw)
    return split(rows, mark[:, None])


# --- networks that were begun badly, or that were trained before


def begun(model: nn.Module, factor: float) -> nn.Module:
    """All matrices times a factor."""
    with torch.no_grad():
        for p in model.parameters():
            if p.ndim > 1:
                p.mul_(factor)
    return model


def picture_network(width: int = 12) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(1, width, 3, stride=2), nn.ReLU(), nn.Conv2d(width, 2 * width, 3, stride=2), nn.ReLU(),
        nn.Flatten(), nn.LazyLinear(10),
    )  # fmt: skip


def denoising() -> nn.Sequential:
    inner = [nn.Conv2d(1, 12, 3, padding=1), nn.ReLU(), nn.Conv2d(12, 12, 3, padding=1), nn.ReLU()]
    return nn.Sequential(*inner, nn.Conv2d(12, 1, 3, padding=1))


def at_half(model: nn.Sequential, pixels: int = 14) -> nn.Sequential:
    model(torch.zeros(1, 1, pixels, pixels))
    return model


@cache
def trained(kind: str) -> dict[str, Tensor]:
    """Weights after 600 steps of Adam on the pictures as they are."""
    pixels, rows = (14, digits()) if kind == "digits" else (28, fashion())
    with torch.random.fork_rng():
        torch.manual_seed(99)
        model = at_half(picture_network(), pixels)
        optimizer = torch.optim.Adam(model.parameters(), 2e-3)
        for _ in range(600):
            chosen = torch.randint(0, len(rows.train[0]), (64,))
            optimizer.zero_grad()
            functional.cross_entropy(model(rows.train[0][chosen]), rows.train[1][chosen]).backward()
            optimizer.step()
    return model.state_dict()


def tuned_further(kind: str, head: bool = False) -> nn.Module:
    """A trained network; with a new last layer, which alone learns."""
    model = at_half(picture_network(), 14 if kind == "digits" else 28)
    fresh = {name: value.clone() for name, value in model.state_dict().items()}
    model.load_state_dict(trained(kind))
    if head:
        model[:-1].requires_grad_(False)
        last = len(model) - 1
        model.load_state_dict({f"{last}.{name}": fresh[f"{last}.{name}"] for name in ("weight", "bias")}, strict=False)
    return model


def doubled(rows: Data) -> Data:
    return Data((rows.train[0].double(), rows.train[1]), (rows.test[0].double(), rows.test[1]))


@cache
def breast() -> Data:
    x, t = load_breast_cancer(return_X_y=True)
    order = torch.randperm(len(x), generator=drawn(0))
    wide = torch.tensor((x - x.mean(0)) / x.std(0))[order]
    return split(wide, flipped(torch.tensor(t)[order], 2), 169)


@cache
def function() -> Data:
    """A function of one number, without noise, on 256 points: every batch of them is all of them."""
    x = torch.linspace(-1, 1, 256)[:, None]
    z = torch.linspace(-0.99, 0.99, 200)[:, None]
    return Data((x, torch.sin(6 * x) + 0.3 * x), (z, torch.sin(6 * z) + 0.3 * z))


@cache
def surface() -> Data:
    x, z = (2 * torch.rand(n, 2, generator=drawn(22 + n)) - 1 for n in (400, 300))
    return Data(*((p, torch.exp(-4 * (p**2).sum(1, keepdim=True)) + p[:, :1] * p[:, 1:]) for p in (x, z)))


KINDS = {
    # to develop on
    "regression": Problem(lambda: layers(10, 64, 64, 1), friedman, True, None, squares),
    "unscaled": Problem(lambda: layers(12, 64, 4), unscaled, True),
    "outliers": Problem(lambda: layers(8, 64, 64, 1), outlying, True, None, absolutes),
    "autoencoder": Problem(lambda: layers(196, 64, 12, 64, 196), to_itself, True, "mnist", squares),
    "doubtful": Problem(lambda: at_half(picture_network()), lambda: doubtful(digits(), 10, 0.4), True, "mnist"),
    "turned": Problem(lambda: tuned_further("digits"), turned, True, "mnist"),
    "same again": Problem(lambda: tuned_further("digits"), digits, True, "mnist"),
    "frozen": Problem(lambda: tuned_further("digits", head=True), turned, True, "mnist"),
    "waves": Problem(lambda: Memory(24, 1, False), waves, True, None, squares),
    "post-norm": Problem(lambda: PostNorm(10, 6, 32, 4), sorting, True),
    "likelihood": Problem(lambda: Spread(3, 1), uneven, True, None, own),
    "variational": Problem(lambda: Variational(196, 8), to_itself, True, "mnist", own),
    "ratings": Problem(lambda: Liked(300, 200, 8), ratings, True, None, squares),
    "faint": Problem(lambda: begun(layers(64, *[48] * 7, 10), 0.7), small_digits, True),
    "loud": Problem(lambda: begun(layers(64, *[48] * 5, 10), 5.0), small_digits, True),
    "sigmoids": Problem(lambda: layers(64, 48, 48, 48, 10, between=nn.Sigmoid), small_digits, True),
    "huge": Problem(perceptron, table, True, "a9a", times(1e6)),
    "tiny": Problem(perceptron, table, True, "a9a", times(1e-6)),
    "double": Problem(lambda: perceptron().double(), lambda: doubled(table()), True, "a9a"),
    "function": Problem(lambda: layers(1, 32, 32, 1, between=nn.Tanh), function, True, None, squares),
    # to be judged by
    "diabetes": Problem(lambda: layers(10, 32, 1), diabetes, False, None, squares),
    "wine": Problem(lambda: layers(13, 32, 3), wine, False),
    "student": Problem(lambda: layers(20, 64, 6), student, False, None, squares),
    "blurred": Problem(denoising, blurred, False, "fashion-mnist", squares),
    "doubtful fashion": Problem(
        lambda: at_half(picture_network(8), 28), lambda: doubtful(fashion(), 10, 0.4), False, "fashion-mnist"
    ),
    "negatives": Problem(lambda: tuned_further("fashion"), negatives, False, "fashion-mnist"),
    "new head": Problem(lambda: tuned_further("fashion", head=True), negatives, False, "fashion-mnist"),
    "adding": Problem(lambda: Memory(24, 2, True), adding, False, None, squares),
    "shifting": Problem(lambda: PostNorm(12, 8, 32, 3), shifting, False),
    "diffusion": Problem(lambda: Denoised(196), to_itself, False, "mnist", own),
    "purchases": Problem(lambda: Liked(1000, 50, 4), purchases, False, None, squares),
    "faint tanh": Problem(lambda: begun(layers(30, *[32] * 6, 2, between=nn.Tanh).double(), 0.5), breast, False),
    "loud tanh": Problem(lambda: begun(layers(30, *[32] * 3, 2, between=nn.Tanh).double(), 4.0), breast, False),
    "surface": Problem(lambda: layers(2, 32, 32, 1, between=nn.SiLU), surface, False, None, squares),
    "huge student": Problem(lambda: layers(20, 64, 6), student, False, None, lambda m, b: 1e12 * squares(m, b)),
}
