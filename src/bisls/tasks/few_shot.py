"""Few-shot learning: a start above, from which every task learns below by a few steps on a few samples."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from bisls._check import FLAG, instance, number, settle, settled, whole_number
from bisls.evaluate import gradient
from bisls.problem import Bilevel
from bisls.tasks.base import Drawn, Task, streams
from bisls.tasks.inputs import classes, floating, pictures
from bisls.tasks.training import mlp

Draw = Callable[[torch.Generator, int, int, int], tuple[Tensor, ...]]
"""Generator, tasks, shots, queries -> support inputs and targets, query inputs and targets; the first dimension is the task."""
RATES = tuple(0.64 / 2**k for k in range(12))  # of the plain steps by which new tasks are learnt, when they are judged
CHOOSING, JUDGED = 50, 100  # tasks on which the rate is chosen, and others that are judged


class Source(ABC):
    """Where tasks come from."""

    @abstractmethod
    def open(self, rng: torch.Generator) -> tuple[int, int, tuple[Draw, Draw, Draw]]:
        """The number of inputs and of outputs; what draws tasks to train on, to choose on, and to judge by.

        Args:
            rng: What a split is drawn from.
        """

    @abstractmethod
    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """The mean over tasks and rows: outputs tasks x rows x outputs."""

    def accuracy(self, outputs: Tensor, targets: Tensor) -> float | None:
        """The share of right guesses, where there is one."""
        return None


@dataclass(frozen=True)
class Sinusoids(Source):
    """Regression: a task is ``a sin(t + b)`` on t in [-5, 5], with a uniform in [0.1, 5] and b in [0, pi]."""

    def open(self, rng: torch.Generator) -> tuple[int, int, tuple[Draw, Draw, Draw]]:
        """One input, one output; new tasks are new numbers."""

        def draw(own: torch.Generator, tasks: int, shots: int, queries: int) -> tuple[Tensor, ...]:
            high, shift, at = (
                torch.rand(tasks, n, 1, generator=own, dtype=torch.float64) for n in (1, 1, shots + queries)
            )
            inputs = 10 * at - 5
            targets = (0.1 + 4.9 * high) * torch.sin(inputs + torch.pi * shift)
            return inputs[:, :shots], targets[:, :shots], inputs[:, shots:], targets[:, shots:]

        return 1, 1, (draw, draw, draw)

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Mean squared error."""
        return functional.mse_loss(outputs, targets)


@dataclass(frozen=True, eq=False)
class Pictures(Source):
    """Classification: a task is a few classes, in any order, out of many.

    Args:
        images: N x anything: bytes (divided by 255) or floating-point numbers (used as they are).
        labels: N whole numbers 0, 1, 2, ...
        ways: Classes in a task, at least 2.
        held_out: The share of classes that are kept for choosing, and again for judging, in (0, 0.5).
    """

    images: Any
    labels: Any
    ways: int = 5
    held_out: float = 0.15

    def __post_init__(self) -> None:
        settle(self, ways=whole_number(2), held_out=number("(0, 0.5)"))
        call, form = "Pictures", "N x features, N x rows x columns, ..."
        rows = pictures(call, self.images, torch.float32, (2, 3, 4), form).flatten(1)
        object.__setattr__(self, "labels", classes(call, self.labels, len(rows)))
        object.__setattr__(self, "images", rows)

    def open(self, rng: torch.Generator) -> tuple[int, int, tuple[Draw, Draw, Draw]]:
        """Three groups of classes that share none."""
        rows, truth = self.images, self.labels
        kinds = int(truth.max()) + 1
        members = [(truth == kind).nonzero().flatten() for kind in range(kinds)]
        order = torch.randperm(kinds, generator=rng).tolist()
        held = max(self.ways, round(self.held_out * kinds))
        if kinds < 2 * held + self.ways:
            raise ValueError(
                f"`Pictures(ways={self.ways})`: there must be three groups of at least so many classes, got {kinds} classes"
            )
        groups = order[: kinds - 2 * held], order[kinds - 2 * held : kinds - held], order[kinds - held :]
        train, choose, judge = (_classes(rows, [members[kind] for kind in group], self.ways) for group in groups)
        return rows.shape[1], self.ways, (train, choose, judge)

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Mean cross-entropy."""
        return functional.cross_entropy(outputs.flatten(0, 1), targets.flatten())

    def accuracy(self, outputs: Tensor, targets: Tensor) -> float:
        """The share of right guesses."""
        return float((outputs.argmax(-1) == targets).double().mean())

    def __repr__(self) -> str:
        return f"Pictures(ways={self.ways}, held_out={self.held_out})"


def _classes(rows: Tensor, members: list[Tensor], ways: int) -> Draw:
    fewest = min(len(own) for own in members)

    def draw(rng: torch.Generator, tasks: int, shots: int, queries: int) -> tuple[Tensor, ...]:
        if shots + queries > fewest:
            raise ValueError(
                f"`few_shot(shots={shots}, queries={queries})`: together at most what the smallest class has, {fewest}"
            )
        chosen = []
        for _ in range(tasks):
            for kind in torch.randperm(len(members), generator=rng)[:ways].tolist():
                own = members[kind]
                chosen.append(own[torch.randperm(len(own), generator=rng)[: shots + queries]])
        taken = rows[torch.stack(chosen)].view(
            tasks, ways, shots + queries, -1
        )  # tasks x ways x (shots + queries) x inputs
        target = torch.arange(ways, device=rows.device)[None, :, None].expand(tasks, ways, shots + queries)
        support, query = (slice(None, shots), slice(shots, None))
        return (
            *(taken[:, :, support].flatten(1, 2), target[:, :, support].flatten(1, 2)),
            *(taken[:, :, query].flatten(1, 2), target[:, :, query].flatten(1, 2)),
        )

    return draw


def few_shot(
    source: Source | None = None,
    *,
    shots: int = 5,
    queries: int = 10,
    batch_size: int = 8,
    hidden: int = 40,
    lower_iters: int = 5,
    rates: bool = False,
    proximal: float = 0.0,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
) -> Task:
    """x is where a network with two hidden layers begins; y are copies of it, one for each task of a batch, begun at x.

        f(y)    = mean over tasks of loss(y_task on the task's queries)
        g(x, y) = sum over tasks of loss(y_task on the task's shots) + proximal / 2 ||y_task - x||^2

    Every iteration has tasks of its own, and every task begins at x: ``lower_start``. The lower steps then are those of
    MAML; with `proximal` above 0 and enough of them the problem is that of implicit MAML. A batch is (support inputs, support
    targets, query inputs, query targets), and both levels get the same one: ``lower_data`` is None.

    With `rates` each tensor of the network has a learnt rate exp(r) above, beside its start: y is the change of the weights
    divided by exp(r / 2), so that a step of beta below is one of beta exp(r) in the weights. r starts at 0.

    `exact` is the loss on the queries of 100 new tasks after `lower_iters` plain gradient steps from x. It depends on x
    alone, whatever trained it: the rate of these steps is the best of twelve (0.0003 to 0.64) on 50 other tasks.
    ``metrics()`` has that rate, the loss before any step ("unadapted"), and for pictures the accuracy.

    Args:
        source: `Sinusoids()` by default, `Pictures(images, labels, ways=5)`, or a `Source` of your own.
        shots: Samples that a task learns from (of each class), at least 1.
        queries: Samples that it is judged by (of each class), at least 1.
        batch_size: Tasks in a batch, at least 1.
        hidden: The width of the two hidden layers, at least 1.
        lower_iters: Steps by which a task is learnt, at least 1.
        rates: Learn a rate for each tensor.
        proximal: The penalty on the way from x, at least 0.
        seed: What the split, the network's start and the tasks are drawn from.
        dtype: The precision, torch.float32 or torch.float64.

    Examples:
        >>> task = few_shot(hidden=6, batch_size=3)
        >>> task.problem
        Bilevel(upper_params: 6 tensors, 61 numbers; lower_params: 6 tensors, 183 numbers)
        >>> [tuple(part.shape) for part in next(task.upper_data)]
        [(3, 5, 1), (3, 5, 1), (3, 10, 1), (3, 10, 1)]
    """
    call = "few_shot"
    floating(call, dtype)
    source = Sinusoids() if source is None else source
    settled(
        call, "source", source, instance(Source, "must be a Source, such as Sinusoids() or Pictures(images, labels)")
    )
    shots, queries = (settled(call, name, n, whole_number(1)) for name, n in (("shots", shots), ("queries", queries)))
    batch_size, hidden = (
        settled(call, n, v, whole_number(1)) for n, v in (("batch_size", batch_size), ("hidden", hidden))
    )
    lower_iters = settled(call, "lower_iters", lower_iters, whole_number(1))
    rates = settled(call, "rates", rates, FLAG)
    proximal = settled(call, "proximal", proximal, number("[0, inf)"))
    split_rng, start_rng, task_rng, choose_rng, judge_rng = streams(call, seed, 5)
    width, outputs, (train, choose, judge) = source.open(split_rng)

    def drawn(draw: Draw, tasks: int) -> Callable[[torch.Generator], tuple[Tensor, ...]]:
        def batch(rng: torch.Generator) -> tuple[Tensor, ...]:
            found = draw(rng, tasks, shots, queries)
            return tuple(part.to(dtype) if part.is_floating_point() else part for part in found)

        return batch

    to_choose, to_judge = drawn(choose, CHOOSING)(choose_rng), drawn(judge, JUDGED)(judge_rng)
    start = list(mlp((width, hidden, hidden, outputs), start_rng, dtype).parameters())
    learnt = [torch.zeros((), dtype=dtype).requires_grad_() for _ in start] if rates else []
    copies = [tensor.detach().expand(batch_size, *tensor.shape).clone().requires_grad_() for tensor in start]
    if rates:
        for tensor in copies:
            tensor.data.zero_()

    def weights() -> list[Tensor]:
        if not rates:
            return copies
        return [x + torch.exp(r / 2) * z for x, r, z in zip(start, learnt, copies, strict=True)]

    def lower_start() -> list[Tensor]:
        if rates:
            return [torch.zeros_like(tensor) for tensor in copies]
        return [tensor.expand(batch_size, *tensor.shape) for tensor in start]

    def upper_loss(batch: tuple[Tensor, ...]) -> Tensor:
        return source.loss(stacked(weights(), batch[2]), batch[3])

    def lower_loss(batch: tuple[Tensor, ...]) -> Tensor:
        own = weights()
        loss = len(batch[0]) * source.loss(stacked(own, batch[0]), batch[1])
        if proximal:
            loss = loss + proximal / 2 * sum(((w - x) ** 2).sum() for w, x in zip(own, start, strict=True))
        return loss

    def adapted(batch: tuple[Tensor, ...], rate: float) -> Tensor:
        """The outputs for the queries after plain steps from x."""
        factors = [rate * float(torch.exp(r.detach())) for r in learnt] if rates else [rate] * len(start)
        own = [tensor.detach().expand(len(batch[0]), *tensor.shape).clone() for tensor in start]
        begun = [tensor.clone() for tensor in own]
        for _ in range(lower_iters):
            own = [tensor.detach().requires_grad_() for tensor in own]
            with torch.enable_grad():
                loss = len(batch[0]) * source.loss(stacked(own, batch[0]), batch[1])
                slopes = gradient(loss, own)
            with torch.no_grad():
                own = [
                    w - factor * (slope + proximal * (w - x))
                    for w, x, slope, factor in zip(own, begun, slopes, factors, strict=True)
                    if slope is not None
                ]
        with torch.no_grad():
            return stacked(own, batch[2])

    def best_rate() -> float:
        found = {rate: float(source.loss(adapted(to_choose, rate), to_choose[3])) for rate in RATES}
        return min(found, key=lambda rate: found[rate] if found[rate] == found[rate] else float("inf"))

    def exact() -> float:
        return float(source.loss(adapted(to_judge, best_rate()), to_judge[3]))

    def metrics() -> dict[str, float]:
        rate = best_rate()
        with torch.no_grad():
            plain = stacked([tensor.expand(JUDGED, *tensor.shape) for tensor in start], to_judge[2])
        found = {"rate": rate, "unadapted": float(source.loss(plain, to_judge[3]))}
        right = source.accuracy(adapted(to_judge, rate), to_judge[3])
        return found if right is None else found | {"accuracy": right}

    return Task(
        call,
        Bilevel(upper_loss, lower_loss, [*start, *learnt], copies, lower_start=lower_start),
        Drawn(drawn(train, batch_size), task_rng.initial_seed()),
        None,
        lower_iters=lower_iters,
        exact=exact,
        metrics=metrics,
    )


def stacked(weights: Sequence[Tensor], inputs: Tensor) -> Tensor:
    """Many networks at once: weights tasks x out x in, biases tasks x out, inputs tasks x rows x in."""
    here = inputs
    for i in range(0, len(weights), 2):
        here = torch.relu(here) if i else here
        here = torch.baddbmm(weights[i + 1].unsqueeze(1), here, weights[i].mT)
    return here
