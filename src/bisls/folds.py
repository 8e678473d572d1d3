"""The upper loss by cross-validation: every fold a lower model of its own, all of them in one batched problem."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.func import functional_call, vmap

from bisls._check import number, require_argument, settle, settled, whole_number
from bisls.batches import Minibatches
from bisls.lower.newton import Newton
from bisls.oracle import Oracle
from bisls.problem import Bilevel


@dataclass(frozen=True)
class Spread:
    """A prior on upper variables: they lie around their common mean, within about a width of it.

    ``1/2 sum_j ((x_j - mean(x)) / width)^2``

    For logarithms of penalties it is a log-normal prior around a common penalty that is learnt; it keeps many of them from
    fitting the noise of the held-out rows.

    Args:
        width: Positive; inf is no prior.

    Examples:
        >>> Spread(2.0)([torch.tensor([0.0, 4.0])])
        tensor(1.)
    """

    width: float = 1.0

    def __post_init__(self) -> None:
        settle(self, width=number("(0, inf]", "must be positive"))

    def __call__(self, upper_params: Sequence[Tensor]) -> Tensor:
        """Its value."""
        flat = torch.cat([tensor.flatten() for tensor in upper_params])
        return 0.5 * (((flat - flat.mean()) / self.width) ** 2).sum()


class CrossValidated:
    """A bi-level problem whose upper loss is the mean over the held-out rows of K folds.

    ``f = 1/n sum_k sum_{i held out of k} loss_i(y_k) + prior(x) / n``
    ``g = 1/K sum_k [mean_{i not held out of k} loss_i(y_k) + penalty(x, y_k)]``

    Every fold has a copy y_k of the model's parameters; the copies are stacked, and one batched call evaluates all of them.
    Many upper variables fit one held-out split as if it were training data: K folds make that harder, a prior prevents it.

    Args:
        model: The lower model; without layers that keep statistics of batches.
        loss: (outputs, targets) -> a loss for each row.
        data: Features and targets, all rows of them.
        upper_params: What is tuned; tensors that require grad.
        penalty: Name of a parameter -> its values, as a mapping, to what is added to the training loss: here x comes in.
        folds: How many, at least 2 and at most as many as rows.
        prior: Of the upper variables, such as `Spread(1.0)`: a function of them. None: none.
        seed: Of the folds.

    Attributes:
        problem: The problem, for `BiSLS` and `fit`; its losses take no data.
        held: Fold x row: which rows are held out.

    Examples:
        >>> import torch, bisls
        >>> _ = torch.manual_seed(0)
        >>> X = torch.randn(60, 20)
        >>> y = X[:, :2].sum(1) + torch.randn(60)
        >>> model, logs = torch.nn.Linear(20, 1), torch.zeros(2, requires_grad=True)
        >>> group = torch.tensor([0] * 2 + [1] * 18)  # two penalties: one for the first two columns, one for the others
        >>> tuned = CrossValidated(
        ...     model,
        ...     loss=lambda outputs, targets: (outputs[:, 0] - targets) ** 2,
        ...     data=(X, y),
        ...     upper_params=[logs],
        ...     penalty=lambda parameters: (logs.exp()[group] * parameters["weight"][0] ** 2).sum(),
        ...     prior=bisls.Spread(2.0),
        ... )
        >>> history = bisls.fit(bisls.BiSLS(tuned.problem), steps=30, progress=False)
        >>> tuned.refit()  # the model, trained on all rows
        >>> bool(logs[1] > logs[0] + 1), bool(model.weight[0, :2].mean() > 5 * model.weight[0, 2:].abs().mean())
        (True, True)
    """

    def __init__(
        self,
        model: torch.nn.Module,
        loss: Callable[[Any, Any], Tensor],
        data: tuple[Any, Any],
        upper_params: Sequence[Tensor],
        penalty: Callable[[Mapping[str, Tensor]], Tensor],
        folds: int = 5,
        prior: Callable[[Sequence[Tensor]], Tensor] | None = None,
        seed: int = 0,
    ):
        call = "CrossValidated"
        is_module = isinstance(model, torch.nn.Module)
        require_argument(call, "model", model, is_module, "must be a torch.nn.Module")
        folds = settled(call, "folds", folds, whole_number(2))
        features, targets = data
        rows = len(targets)
        require_argument(call, "folds", folds, folds <= rows, f"must be at most the number of rows, {rows}")
        self._model, self._loss, self._penalty, self._prior = model, loss, penalty, prior
        self._features, self._targets = features, targets
        self._upper = list(upper_params)
        order = torch.randperm(rows, generator=torch.Generator().manual_seed(seed))
        place = torch.empty_like(order)
        place[order] = torch.arange(rows)
        self.held = torch.stack([place % folds == fold for fold in range(folds)])
        self._copies = {
            name: parameter.detach().expand(folds, *parameter.shape).clone().requires_grad_()
            for name, parameter in model.named_parameters()
        }
        first = next(iter(self._copies.values()))
        self._masks = self.held.to(first), (~self.held).to(first)
        self.problem = Bilevel(
            upper_loss=lambda _: self._above(),
            lower_loss=lambda _: self._below(),
            upper_params=self._upper,
            lower_params=list(self._copies.values()),
        )

    def _each(self, parameters: Mapping[str, Tensor]) -> Tensor:
        """The loss of every row under one set of parameters."""
        found = self._loss(functional_call(self._model, dict(parameters), (self._features,)), self._targets)
        rows = len(self._targets)
        if found.shape != (rows,):
            shape = tuple(found.shape)
            raise ValueError(
                f"`CrossValidated(loss=...)`: loss must give one number a row, shape ({rows},); this has {shape}"
            )
        return found

    def _above(self) -> Tensor:
        held, rows = self._masks[0], len(self._targets)
        value = (held * vmap(self._each)(self._copies)).sum() / rows
        return value if self._prior is None else value + self._prior(self._upper) / rows

    def _below(self) -> Tensor:
        train = self._masks[1]
        losses = (train * vmap(self._each)(self._copies)).sum(1) / train.sum(1)
        return losses.mean() + vmap(self._penalty)(self._copies).mean()

    def held_out(self) -> float:
        """The mean loss on held-out rows at the present x and y, without the prior."""
        with torch.no_grad():
            return float((self._masks[0] * vmap(self._each)(self._copies)).sum()) / len(self._targets)

    def refit(self, iters: int = 100) -> None:
        """Train the model itself on all rows with the present x, by Newton's method.

        Args:
            iters: Iterations at most.
        """
        parameters = dict(self._model.named_parameters())
        with torch.no_grad():  # near: the mean of the folds
            for name, parameter in parameters.items():
                parameter.copy_(self._copies[name].mean(0))

        def whole(_: Any) -> Tensor:
            return self._each(parameters).mean() + self._penalty(parameters)

        problem = Bilevel(lambda _: self._each(parameters).mean(), whole, self._upper, list(parameters.values()))
        Newton(iters).descend(Oracle(problem), Minibatches([None]), problem.y.read(), 0, {})
