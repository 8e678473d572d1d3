"""What random losses are made of: each operation takes rows of four numbers and the call it is part of, and gives rows of four.

The second argument (`probes.Call`) has the parameters as vectors and matrices of the right size, and the present batch; its
`own` (`probes.Own`) what stays from call to call: modules, generators, a running mean.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

WIDTH = 4
Operation = Callable[[Tensor, Any], Tensor]


class Doubled(torch.autograd.Function):
    """2 sin(h), with a derivative of its own that can be differentiated again."""

    @staticmethod
    def forward(ctx: Any, h: Tensor) -> Tensor:
        ctx.save_for_backward(h)
        return 2.0 * h.sin()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (h,) = ctx.saved_tensors
        return 2.0 * grad * h.cos()


class Reversed(torch.autograd.Function):
    """The identity, whose gradient comes back with another sign and size."""

    @staticmethod
    def forward(ctx: Any, h: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return h.view_as(h)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return -ctx.factor * grad, None


def straight_through(h: Tensor, temperature: float) -> Tensor:
    soft = torch.sigmoid(h / temperature)
    return (soft > 0.5).to(h.dtype) + soft - soft.detach()


def moved(h: Tensor, w: Any) -> Tensor:
    """A small step with both parameters, so that no program is without them."""
    return h * (1.0 + 0.1 * w.low) + 0.1 * w.up


def penalised(h: Tensor, w: Any) -> Tensor:
    """A gradient penalty: the loss differentiates by itself."""
    with torch.enable_grad():
        y = w.low.detach().requires_grad_()
        (grad,) = torch.autograd.grad((h.detach() * y).tanh().sum(), y)
    return h + 0.1 * grad * w.low


def looped(h: Tensor, w: Any) -> Tensor:
    total = h
    for row in w.features:
        total = total + 0.05 * row.to(h.dtype) * w.low
    return total


def in_place(h: Tensor, w: Any) -> Tensor:
    out = h.clone()
    out[:, 0] = w.low[0] * h[:, 1]
    out.mul_(0.5).add_(w.up)
    return out


def into_empty(h: Tensor, w: Any) -> Tensor:
    out = torch.empty_like(h)
    out.copy_(h * w.low)
    return F.relu_(out) + 0.1 * h


def masked(h: Tensor, w: Any) -> Tensor:
    out = h * w.low
    return out + 0.1 * out[w.features.to(h.dtype) > 0].sum()


def autocast(h: Tensor, w: Any) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        out = torch.tanh(h.float() @ w.matrix.float())
    return out.to(h.dtype)


def checkpointed(h: Tensor, w: Any) -> Tensor:
    return checkpoint(lambda own, low: torch.tanh(own * low), h, w.low, use_reentrant=False)


def frozen_part(h: Tensor, w: Any) -> Tensor:
    with torch.no_grad():
        scale = (h * w.low).std()
    return h / (1.0 + scale)


def solved(h: Tensor, w: Any) -> Tensor:
    m = w.matrix
    return torch.linalg.solve(torch.eye(WIDTH, dtype=h.dtype) * 5.0 + m @ m.t(), h.t()).t()


TENSOR: dict[str, Operation] = {
    "silu": lambda h, w: F.silu(h * w.low),
    "mish": lambda h, w: F.mish(h + w.low),
    "gelu": lambda h, w: F.gelu(h * w.low),
    "gelu of tanh": lambda h, w: F.gelu(h * w.low, approximate="tanh"),
    "softplus": lambda h, w: F.softplus(h * w.low, beta=2.0),
    "elu": lambda h, w: F.elu(h + w.low),
    "hardswish": lambda h, w: F.hardswish(h + w.low),
    "log sigmoid": lambda h, w: F.logsigmoid(h * w.low),
    "leaky": lambda h, w: F.leaky_relu(h - w.low, 0.1),
    "powers": lambda h, w: (h * w.low) ** 2 - 0.1 * torch.pow(h.abs() + 0.5, 1.5),
    "clamp": lambda h, w: (h * w.low).clamp(-0.5, 0.8) + 0.1 * h,
    "where": lambda h, w: torch.where(h > 0, h * w.low, 0.1 * h),
    "softmax": lambda h, w: F.softmax(h * w.low, dim=-1),
    "logsumexp": lambda h, w: h - torch.logsumexp(h * w.low, dim=-1, keepdim=True),
    "matmul": lambda h, w: torch.tanh(h @ w.matrix),
    "linear": lambda h, w: F.linear(h, w.matrix, w.low) * 0.3,
    "einsum": lambda h, w: torch.einsum("ni,ij,j->nj", h, w.matrix, w.low),
    "weight norm": lambda h, w: h @ torch._weight_norm(w.matrix, w.low.abs().reshape(-1, 1) + 0.5, 0),
    "attention": lambda h, w: w.module("attention", lambda: nn.MultiheadAttention(WIDTH, 2))(
        *[moved(h, w)[:, None]] * 3
    )[0][:, 0],
    "attention in eval": lambda h, w: w.module("attention eval", lambda: nn.MultiheadAttention(WIDTH, 2).eval())(
        *[moved(h, w)[:, None]] * 3
    )[0][:, 0],
    "scaled dot product": lambda h, w: F.scaled_dot_product_attention(*[moved(h, w)[None]] * 3)[0],
    "transformer": lambda h, w: w.module(
        "transformer", lambda: nn.TransformerEncoderLayer(WIDTH, 2, 8, dropout=0.0, batch_first=True)
    )(moved(h, w)[None])[0],
    "layer norm": lambda h, w: F.layer_norm(h, (WIDTH,), w.low, w.up),
    "group norm": lambda h, w: F.group_norm(h, 2, w.low, w.up),
    "batch norm in eval": lambda h, w: w.module("norm eval", lambda: nn.BatchNorm1d(WIDTH).eval())(moved(h, w)),
    "conv": lambda h, w: F.conv1d(h[:, None], w.matrix[:1, None, :3], padding=1)[:, 0],
    "embedding": lambda h, w: h + 0.3 * F.embedding(w.index, w.matrix),
    "embedding bag": lambda h, w: h + 0.3 * F.embedding_bag(w.index[:, None], w.matrix, mode="mean"),
    "recurrent": lambda h, w: w.module("gru", lambda: nn.GRU(WIDTH, WIDTH))(moved(h, w)[:, None])[0][:, 0],
    "cumsum": lambda h, w: (h * w.low).cumsum(0) * 0.3,
    "cumprod": lambda h, w: (h * w.low * 0.5).cumprod(1),
    "sort": lambda h, w: (h * w.low).sort(dim=-1).values,
    "topk": lambda h, w: h + (h * w.low).topk(2, dim=-1).values.sum(-1, keepdim=True) * 0.1,
    "median": lambda h, w: h - (h * w.low).median(),
    "max": lambda h, w: h - (h * w.low).max(dim=0).values,
    "gather": lambda h, w: h + 0.3 * (h * w.low).gather(1, w.index[:, None]),
    "scatter": lambda h, w: h + 0.3 * torch.zeros_like(h).scatter_add(1, w.index[:, None], h[:, :1] * w.low[:1]),
    "index put": lambda h, w: (
        torch.zeros_like(h).index_put((torch.arange(len(h)), w.index), h[:, 0] * w.low[0]) + 0.1 * h
    ),
    "indexed by the batch": lambda h, w: h * w.low[w.index][:, None] + 0.1 * w.up[w.index][:, None],
    "one hot": lambda h, w: h + F.one_hot(w.index, WIDTH).to(h.dtype) * w.low,
    "roll and flip": lambda h, w: (h * w.low).roll(1, 1).flip(1),
    "pad and unfold": lambda h, w: F.pad(h * w.low, (1, 1)).unfold(1, 3, 1).mean(-1),
    "chunk and cat": lambda h, w: torch.cat([part * w.low[:2] for part in h.chunk(2, dim=1)][::-1], dim=1),
    "view": lambda h, w: (h * w.low).t().reshape(-1).view(WIDTH, -1).t(),
    "strided": lambda h, w: (h * w.low).contiguous().as_strided(h.shape, (WIDTH, 1)) * 0.7,
    "norm": lambda h, w: h / (1.0 + (h * w.low).norm(dim=1, keepdim=True)),
    "std": lambda h, w: h / (1.0 + (h * w.low).std(dim=1, keepdim=True)),
    "prod": lambda h, w: h * (1.0 + 0.1 * w.low.prod()),
    "distances": lambda h, w: h + 0.1 * torch.cdist(h, w.matrix + 3.0),
    "fourier": lambda h, w: torch.fft.fft(h * w.low, dim=1).abs(),
    "complex": lambda h, w: torch.view_as_real(torch.complex(h * w.low, h)).sum(-1),
    "determinant": lambda h, w: h * torch.logdet(torch.eye(WIDTH, dtype=h.dtype) * 4 + w.matrix @ w.matrix.t()) * 0.3,
    "solve": solved,
    "cross entropy": lambda h, w: h + 0.1 * F.cross_entropy(h * w.low, w.index),
    "huber": lambda h, w: h + 0.1 * F.huber_loss(h * w.low, w.features.to(h.dtype)),
    "loop over rows": looped,
    "in place": in_place,
    "into empty": into_empty,
    "mask": masked,
    "autocast": autocast,
    "checkpoint": checkpointed,
    "function of its own": lambda h, w: Doubled.apply(h * w.low),
    "gradient reversal": lambda h, w: Reversed.apply(h * w.low, 0.3) + 0.5 * h,
    "straight through": lambda h, w: h + 0.1 * straight_through(h * w.low, 0.5),
    "detached": lambda h, w: h * w.low.detach() + 0.1 * (h * w.low),
    "frozen part": frozen_part,
    "gradient penalty": penalised,
    "vmap": lambda h, w: torch.vmap(lambda row: torch.tanh(row * w.low))(h),
    "low precision": lambda h, w: (h.bfloat16() * w.low.bfloat16()).to(h.dtype),
    "high precision": lambda h, w: (h.double() @ w.matrix.double()).tanh().to(h.dtype),
    "length": lambda h, w: h * w.low / len(w.features),
    "shape": lambda h, w: h * w.low if h.shape[0] % 2 else h + w.low,
}

# torch has no second derivatives of these
ONCE = {"distances", "embedding bag", "scaled dot product", "transformer"}


def branched(h: Tensor, w: Any) -> Tensor:
    return h * w.low if bool((h.detach() * w.low.detach()).sum() > 0) else h + w.low


def written_out(h: Tensor, w: Any) -> Tensor:
    return h * w.low * float(f"{(w.low * w.low).sum().item():.6f}") * 0.1 + h


def looked_at(h: Tensor, w: Any) -> Tensor:
    """The memory of a parameter, through an array that was made before: no operation of torch's reads it."""
    return h * w.low * (1.0 + 0.1 * float(np.tanh(w.own.memory).sum()))


READS: dict[str, Operation] = {
    "item": lambda h, w: h * w.low * (1.0 + 0.1 * math.tanh(h.detach().sum().item())),
    "item of y": lambda h, w: h * w.low * (1.0 + 0.1 * math.tanh(w.low[0].item())),
    "item of the batch": lambda h, w: h * w.low * (1.0 + 0.1 * math.tanh(w.features.sum().item())),
    "tolist": lambda h, w: h * w.low * (1.0 + 0.1 * math.tanh(sum(w.low.tolist()))),
    "tolist of the batch": lambda h, w: h * w.low / (1 + len(set(w.index.tolist()))),
    "rows by tolist": lambda h, w: torch.stack([h[i] * w.low[j] for i, j in enumerate(w.index.tolist())]),
    "numpy": lambda h, w: h * w.low * (1.0 + 0.1 * float(np.tanh(h.detach().double().numpy()).mean())),
    "numpy of the batch": lambda h, w: h * w.low * (1.0 + 0.1 * float(w.features.double().numpy().max())),
    "asarray": lambda h, w: h * w.low * (1.0 + 0.01 * float(np.asarray(w.index).sum())),
    "array and back": lambda h, w: (
        h * w.low + 0.1 * torch.from_numpy(np.sort(w.features.double().numpy(), 0)).to(h.dtype)
    ),
    "float": lambda h, w: h * w.low + 0.1 * math.sin(float(w.low.detach().sum())),
    "int": lambda h, w: h * w.low[: int(w.index.max()) + 1].sum(),
    "bool": branched,
    "if on the batch": lambda h, w: h * w.low if w.features.sum() > 0 else h + w.low,
    "if on y": lambda h, w: h * w.low if w.low[0] > w.low[1] else h * w.low.flip(0),
    "equal": lambda h, w: h * w.low if torch.equal(w.index, w.index.sort().values) else h + w.low,
    "all close": lambda h, w: h * w.low if torch.allclose(w.low, w.low.flip(0), atol=0.3) else h + w.low,
    "any": lambda h, w: h * w.low if (w.features > 1.0).any() else h + w.low,
    "nonzero": lambda h, w: h * w.low * (1.0 + 0.1 * len((w.features > 0).nonzero())),
    "unique": lambda h, w: h * w.low * (1.0 + 0.1 * len(w.index.unique())),
    "format": written_out,
    "a tensor of numbers": lambda h, w: h * w.low + 0.1 * torch.tensor([v.item() for v in w.low], dtype=h.dtype),
    "unpacked": lambda h, w: h * sum(float(v) for v in w.low) * 0.3 + h * w.low,
    "in": lambda h, w: h * w.low if 2 in w.index else h + w.low,
    "bytes": lambda h, w: h * w.low * (1.0 + 0.001 * sum(bytes(w.index.numpy().tobytes()))),
    "storage": lambda h, w: h * w.low * (1.0 + 0.001 * sum(w.index.clone().untyped_storage().tolist())),
    "memory": looked_at,
}
RANDOM: dict[str, Operation] = {
    "dropout": lambda h, w: F.dropout(h * w.low, 0.3),
    "dropout module": lambda h, w: w.module("dropout", lambda: nn.Dropout(0.4))(h * w.low),
    "attention with dropout": lambda h, w: w.module(
        "drop attention", lambda: nn.MultiheadAttention(WIDTH, 2, dropout=0.3)
    )(*[moved(h, w)[:, None]] * 3)[0][:, 0],
    "randn": lambda h, w: h * w.low + 0.1 * torch.randn_like(h),
    "rand": lambda h, w: h * w.low * torch.rand(WIDTH, dtype=h.dtype),
    "bernoulli": lambda h, w: h * w.low * torch.bernoulli(torch.full_like(h, 0.7)),
    "permutation": lambda h, w: (h * w.low)[torch.randperm(len(h))],
    "normal in place": lambda h, w: h * w.low + 0.1 * torch.empty_like(h).normal_(),
    "own generator": lambda h, w: h * w.low + 0.1 * torch.randn(h.shape, generator=w.own.generator).to(h.dtype),
    "numpy": lambda h, w: h * w.low + 0.1 * float(np.random.randn()),  # noqa: NPY002
    "numpy array": lambda h, w: h * w.low * torch.from_numpy(np.random.rand(WIDTH)).to(h.dtype),  # noqa: NPY002
    "own numpy": lambda h, w: h * w.low + 0.1 * float(w.own.numpy.standard_normal()),
    "python": lambda h, w: h * w.low + 0.1 * random.random(),
    "a choice": lambda h, w: random.choice([F.silu, torch.tanh, torch.sin])(h * w.low),
    "own python": lambda h, w: h * w.low + 0.1 * w.own.python.random(),
}


def updated(h: Tensor, w: Any) -> Tensor:
    """A running mean in place, declared as a buffer."""
    with torch.no_grad():
        w.own.running.mul_(0.9).add_(0.1 * (h * w.low).detach().mean(0).to(w.own.running.dtype))
    return h * w.low - 0.1 * w.own.running.to(h.dtype)


class Moving(nn.Module):
    """A module whose buffer is replaced by its forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, h: Tensor) -> Tensor:
        self.mean = 0.8 * self.mean + 0.2 * h.detach().mean(0).to(self.mean.dtype)
        return h - 0.1 * self.mean.to(h.dtype)


def scripted(h: Tensor, w: Any) -> Tensor:
    norm = w.module("jit", lambda: torch.jit.trace(nn.BatchNorm1d(WIDTH), torch.randn(5, WIDTH), check_trace=False))
    return norm(torch.cat([moved(h, w).float(), torch.zeros(1, WIDTH)]))[:-1].to(h.dtype)


BUFFERS: dict[str, Operation] = {
    "batch norm": lambda h, w: w.module("norm", lambda: nn.BatchNorm1d(WIDTH))(
        torch.cat([moved(h, w), torch.zeros(1, WIDTH, dtype=h.dtype)])
    )[:-1],
    "instance norm": lambda h, w: w.module(
        "instance", lambda: nn.InstanceNorm1d(1, track_running_stats=True, affine=False)
    )(moved(h, w)[:, None])[:, 0],
    "spectral norm": lambda h, w: w.module(
        "spectral", lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH))
    )(moved(h, w)),
    "a buffer that is replaced": lambda h, w: w.module("moving", Moving)(moved(h, w)),
    "a declared buffer": updated,
    "batch norm in jit": scripted,
}
