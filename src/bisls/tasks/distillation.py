"""Data distillation: a few pictures learnt so that a model trained on them does well on real ones."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from bisls._check import FINITE, number, settled, whole_number
from bisls.problem import Bilevel
from bisls.tasks.base import Task, data, streams
from bisls.tasks.inputs import classes, floating, pictures
from bisls.tasks.solve import Design, cross_entropy, softmax


def distillation(
    images: Any,
    labels: Any,
    *,
    per_class: int = 1,
    batch_size: int | None = 10,
    l2: float = math.exp(-4),
    pool: int | None = None,
    mean: float = 0.0,
    sd: float = 1.0,
    lower_iters: int = 20,
    test_size: int = 10_000,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
) -> Task:
    """The learnt pictures are x, a linear softmax model (weights and biases theta) is y.

        f(theta)    = mean cross-entropy on real pictures
        g(x, theta) = mean cross-entropy on the learnt pictures + l2 ||theta||^2

    The learnt pictures start at 0 and have the shape of the real ones, `per_class` for every class, in the order of the
    classes: ``problem.x.tensors[0]``. Their labels are fixed, and are the lower data: the lower problem is deterministic. The
    model starts at 0, and its biases are penalised with its weights.

    The rows are permuted once, by the seed: `test_size` of them go to ``metrics()["accuracy"]``, which is that of a model
    trained on the present pictures to the end (as `exact` trains it), and the others to the upper level, or the first `pool` of
    them.

    Args:
        images: N x anything, bytes (divided by 255) or floating-point numbers (used as they are); an array or a tensor.
        labels: N whole numbers 0, 1, 2, ...
        per_class: Learnt pictures a class, at least 1.
        batch_size: Real pictures in an upper batch; None takes all of them at every step.
        l2: The penalty on the model, above 0.
        pool: How many real pictures the upper level has; None for all but those of the test.
        mean: Subtracted from the real pictures, such as 0.1307 for MNIST. The learnt ones are what the model sees.
        sd: What they are divided by then, above 0.
        lower_iters: Lower steps an outer iteration, at least 1.
        test_size: Samples that neither level sees; 0 for no accuracy.
        seed: What the split and the batches are drawn from.
        dtype: The precision, torch.float32 or torch.float64.

    Examples:
        >>> import torch
        >>> draw = torch.Generator().manual_seed(2)
        >>> labels = torch.arange(3).repeat(10)
        >>> images = torch.rand(30, 4, 4, generator=draw) + labels[:, None, None]
        >>> task = distillation(images, labels, test_size=10)
        >>> task.problem.x.tensors[0].shape, [labels.tolist() for labels in task.lower_data]
        (torch.Size([3, 4, 4]), [[0, 1, 2]])
        >>> round(task.exact(), 4)  # the logarithm of 3: pictures of zeros teach nothing
        1.0986
    """
    call = "distillation"
    floating(call, dtype)
    per_class = settled(call, "per_class", per_class, whole_number(1))
    lower_iters = settled(call, "lower_iters", lower_iters, whole_number(1))
    l2 = settled(call, "l2", l2, number("(0, inf)", "must be a finite number above 0"))
    mean = settled(call, "mean", mean, FINITE)
    sd = settled(call, "sd", sd, number("(0, inf)", "must be a finite number above 0"))
    real = (pictures(call, images, dtype, (2, 3, 4), "N pictures: N x pixels, N x rows x columns, ...") - mean) / sd
    truth = classes(call, labels, len(real))
    rule = f"must be a whole number that leaves upper samples: from 0 to {len(real) - 1}"
    test_size = settled(call, "test_size", test_size, whole_number(0, rule, most=len(real) - 1))

    if pool is not None:
        rule = f"must be None or a whole number from 1 to the {len(real) - test_size} rows that the test leaves"
        pool = settled(call, "pool", pool, whole_number(1, rule, most=len(real) - test_size))

    split_rng, upper_rng = streams(call, seed, 2)
    order = torch.randperm(len(real), generator=split_rng).to(real.device)
    test_rows, upper_rows = torch.split(order, [test_size, len(order) - test_size])
    upper_rows = upper_rows[:pool]
    test = real[test_rows], truth[test_rows]
    upper = real[upper_rows], truth[upper_rows]

    kinds = int(truth.max()) + 1
    targets = torch.arange(kinds, device=real.device).repeat_interleave(per_class)
    learnt = real.new_zeros(len(targets), *real.shape[1:]).requires_grad_()
    weight = real.new_zeros(kinds, real[0].numel()).requires_grad_()
    bias = real.new_zeros(kinds).requires_grad_()

    def model(batch: Tensor) -> Tensor:
        return functional.linear(batch.flatten(1), weight, bias)

    def upper_loss(batch: tuple[Tensor, ...]) -> Tensor:
        return functional.cross_entropy(model(batch[0]), batch[1])

    def lower_loss(batch: tuple[Tensor, ...]) -> Tensor:
        return functional.cross_entropy(model(learnt), batch[0]) + l2 * ((weight * weight).sum() + (bias * bias).sum())

    def trained() -> Tensor:
        if not torch.isfinite(learnt).all():
            return torch.full((real[0].numel() + 1, kinds), torch.nan, dtype=torch.float64, device=real.device)
        return softmax(Design(learnt, bias=True), targets, l2, torch.cat([weight.T, bias[None]]))

    @torch.no_grad()
    def exact() -> float:
        return cross_entropy(Design(upper[0], bias=True), upper[1], trained())

    @torch.no_grad()
    def metrics() -> dict[str, float]:
        if not test_size:
            return {}
        guesses = Design(test[0], bias=True).times(trained()).argmax(1)
        return {"accuracy": float((guesses == test[1]).double().mean())}

    return Task(
        call,
        Bilevel(upper_loss, lower_loss, [learnt], [weight, bias]),
        data(call, upper, "batch_size", batch_size, upper_rng.initial_seed()),
        (targets,),
        lower_iters=lower_iters,
        exact=exact,
        metrics=metrics,
    )
