"""A learnt regulariser: filters above, such that pictures cleaned of noise with their help are near the true ones."""

from __future__ import annotations

from math import log10
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from bisls._check import POSITIVE, require_argument, settled, whole_number
from bisls.problem import Bilevel
from bisls.tasks.base import Task, streams
from bisls.tasks.inputs import floating, pictures

ROUND = 0.02  # below it the penalty on a filter's answer is a parabola


def denoising(
    images: Any,
    *,
    train: int = 16,
    test_size: int = 16,
    noise: float = 0.15,
    size: int = 3,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
) -> Task:
    """Filters k_j and their weights exp(a_j) are x, the cleaned pictures themselves are y: a convex lower problem.

        f(y)    = mean over pictures of 1/2 ||y - true||^2
        g(x, y) = 1/2 ||y - noisy||^2 + sum_j exp(a_j) sum over pixels of phi((k_j * y)),    phi(t) = sqrt(t^2 + 0.02^2) - 0.02

    The filters start as the cosine basis of `size` x `size` without its constant, all with weight 0.01; y starts at the
    noisy pictures. Both levels have all of their pictures at every step.

    `exact` is f on pictures that were never trained on, cleaned with the present filters: g is solved tightly for them, so it
    depends on x alone. ``metrics()`` has "psnr" there, in decibels (pictures in [0, 1]).

    Args:
        images: N x rows x columns, at least `size` of each: bytes (divided by 255) or floating-point numbers (used as they are).
        train: Pictures to learn from, at least 1.
        test_size: Pictures to judge by, at least 1.
        noise: Its standard deviation, above 0.
        size: Of the filters, at least 2.
        seed: What the choice of pictures and the noise are drawn from.
        dtype: The precision, torch.float32 or torch.float64.

    Examples:
        >>> import torch
        >>> images = torch.linspace(0, 1, 64).reshape(8, 8).repeat(6, 1, 1)
        >>> task = denoising(images, train=3, test_size=2)
        >>> task.problem
        Bilevel(upper_params: 2 tensors, 80 numbers; lower_params: 1 tensor, 192 numbers)
    """
    call = "denoising"
    floating(call, dtype)
    noise = settled(call, "noise", noise, POSITIVE)
    size = settled(call, "size", size, whole_number(2))
    train = settled(call, "train", train, whole_number(1))
    test_size = settled(call, "test_size", test_size, whole_number(1))
    pixels = pictures(call, images, dtype, (3,), "N x rows x columns").unsqueeze(1)
    require_argument(
        call, "size", size, size <= min(pixels.shape[2:]), f"must fit into pictures {tuple(pixels.shape[2:])}"
    )
    rule = f"+ test_size={test_size!r} must be at most the number of pictures, {len(pixels)}"
    require_argument(call, "train", train, train + test_size <= len(pixels), rule)
    split_rng, noise_rng = streams(call, seed, 2)
    chosen = pixels[torch.randperm(len(pixels), generator=split_rng)[: train + test_size].to(pixels.device)]
    spoilt = chosen + noise * torch.randn(chosen.shape, generator=noise_rng, dtype=torch.float64).to(chosen)
    (true, true_test), (noisy, noisy_test) = (torch.split(own, [train, test_size]) for own in (chosen, spoilt))

    filters = _cosines(size).to(pixels).requires_grad_()
    logs = pixels.new_full((len(filters),), -4.6).requires_grad_()
    y = noisy.clone().requires_grad_()

    def upper_loss(batch: tuple[Tensor, ...]) -> Tensor:
        gap = y - batch[0]
        return 0.5 * (gap * gap).sum() / len(gap)

    def lower_loss(batch: tuple[Tensor, ...]) -> Tensor:
        gap, answers = y - batch[0], functional.conv2d(y, filters)
        each = (torch.sqrt(answers * answers + ROUND**2) - ROUND).sum((0, 2, 3))
        return 0.5 * (gap * gap).sum() + (torch.exp(logs) * each).sum()

    @torch.no_grad()
    def exact() -> float:
        if not (torch.isfinite(filters).all() and torch.isfinite(logs).all()):
            return float("nan")
        gap = _cleaned(noisy_test.double(), filters.double(), torch.exp(logs.double())) - true_test.double()
        return float(0.5 * (gap * gap).sum() / test_size)

    def metrics() -> dict[str, float]:
        pixel = 2 * exact() / true_test[0].numel()
        return {"psnr": -10 * log10(pixel)} if pixel > 0 else {}

    return Task(
        call,
        Bilevel(upper_loss, lower_loss, [filters, logs], [y]),
        (true,),
        (noisy,),
        lower_iters=10,
        exact=exact,
        metrics=metrics,
    )


def _cosines(size: int) -> Tensor:
    """The two-dimensional cosine basis without its constant: (size^2 - 1) x 1 x size x size, each of norm 1."""
    at = (torch.arange(size, dtype=torch.float64) + 0.5) * torch.pi / size
    lines = torch.stack([torch.cos(k * at) for k in range(size)])
    lines = lines / lines.norm(dim=1, keepdim=True)
    both = torch.einsum("ai,bj->abij", lines, lines).reshape(size * size, 1, size, size)
    return both[1:].contiguous()


def _cleaned(noisy: Tensor, filters: Tensor, weights: Tensor) -> Tensor:
    """The minimiser of g, by L-BFGS with the gradient written out."""
    y = noisy.clone()
    optimiser = torch.optim.LBFGS(
        [y], max_iter=500, tolerance_grad=1e-8, tolerance_change=0.0, history_size=20, line_search_fn="strong_wolfe"
    )

    def closure() -> Tensor:
        gap, answers = y - noisy, functional.conv2d(y, filters)
        rounded, own = torch.sqrt(answers * answers + ROUND**2), weights[None, :, None, None]
        y.grad = gap + functional.conv_transpose2d(own * answers / rounded, filters)
        return 0.5 * (gap * gap).sum() + (own * (rounded - ROUND)).sum()

    optimiser.step(closure)  # type: ignore[no-untyped-call]
    return y
