"""Many columns: both levels by `bisls.BiSLS`, all folds in one batched problem. It imports torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from bisls.batches import Minibatches
from bisls.callbacks import EarlyStopping
from bisls.fit import fit
from bisls.lower.newton import Newton
from bisls.methods import BiSLS
from bisls.oracle import Oracle
from bisls.problem import Bilevel
from bisls.sklearn.lower import Array, Logistic, Loss, Multinomial, Rows, Solved
from bisls.sklearn.tuning import LOOSE, REACH, RISES, SHORT, Grouping, Index, Search, Splits, Tuned
from bisls.status import Status

SOLVED = 60  # Newton iterations where the folds are solved for their own sake
LOWER = 20  # lower steps of an upper iteration
PATIENCE = 5  # upper iterations in a row whose value does not fall by the tolerance end a search
COARSE, CLOSE = (
    1e-4,
    1e-8,
)  # the gradient of the folds, by the weight of the rows, at which they are solved: coarse search, else


@dataclass
class BatchedFolds:
    """Held-out losses as a function of the penalties, as `tuning.Folds` has them, by autograd.

    Args:
        loss: The loss of both levels.
        rows: All rows.
        splits: Pairs of training and held-out rows.
        grouping: The groups.
        search: How the upper level is minimised.
    """

    loss: Loss
    rows: Rows
    splits: Splits
    grouping: Grouping
    search: Search
    closed: bool = True
    w: Tensor = field(init=False)

    def __post_init__(self) -> None:
        X, s = torch.from_numpy(self.rows.X), torch.from_numpy(self.rows.s)
        self.X, self.y = X, torch.from_numpy(self.rows.y)
        self.index = torch.from_numpy(self.grouping.index.astype(np.int64))
        self.factors = torch.from_numpy(self.grouping.factors)
        self.train, self.held = (torch.zeros(len(self.splits), len(X), dtype=torch.float64) for _ in range(2))
        for fold, pair in enumerate(self.splits):
            for mask, at in zip((self.train, self.held), pair, strict=True):
                mask[fold, torch.from_numpy(np.asarray(at, dtype=np.int64))] = s[at]
        self.weight = float(self.held.sum())
        self.w = torch.zeros(len(self.splits), X.shape[1], self.loss.outputs, dtype=torch.float64, requires_grad=True)

    def each_row(self, w: Tensor) -> Tensor:
        """The loss of every row under the coefficients of every fold."""
        eta = torch.einsum("np,kpc->knc", self.X, w)
        if isinstance(self.loss, Multinomial):
            target = self.y.long().expand(len(w), -1)
            return functional.cross_entropy(eta.transpose(1, 2), target, reduction="none")
        if isinstance(self.loss, Logistic):
            return functional.softplus(eta[:, :, 0]) - self.y * eta[:, :, 0]
        return 0.5 * (eta[:, :, 0] - self.y) ** 2

    def lower(self, theta: Tensor) -> Tensor:
        """The sum of the folds' lower problems, by the weight of the rows."""
        penalties = self.factors * theta[self.index].exp()
        penalised = 0.5 * (penalties[None, :, None] * self.w**2).sum()
        return ((self.train * self.each_row(self.w)).sum() + penalised) / self.rows.weight

    def value(self, theta: Array, close: float = CLOSE) -> float:
        """The mean held-out loss, the folds solved."""
        at = torch.from_numpy(np.asarray(theta, dtype=float)).requires_grad_()
        self._solve(lambda _: self.lower(at), at, self.w, close)
        return self._held()

    def _held(self) -> float:
        return float((self.held * self.each_row(self.w)).sum().detach()) / self.weight

    def _solve(self, lower: Callable[[Any], Tensor], above: Tensor, w: Tensor, close: float) -> None:
        problem = Bilevel(lambda _: (w * w).sum(), lower, [above], [w])
        batches = Minibatches([None])
        done = Newton(iters=SOLVED, tol=close).descend(Oracle(problem), batches, problem.y.read(), 0, {})
        self.closed = self.closed and done.steps < SOLVED and done.status is Status.OK

    def common(self, near: float | None = None) -> Tuned:
        """One penalty for all: a coarse search from above, then downhill."""
        ones = np.ones(self.grouping.count)
        if near is None:
            best, risen = np.inf, 0
            for share in self.loss.coarse:
                start = float(np.log(share * self.loss.unit(self.rows)))
                value = self.value(start * ones, COARSE)
                best, near, risen = (value, start, 0) if value < best else (best, near, risen + 1)
                if risen >= RISES:
                    break
        assert near is not None
        mu = torch.tensor([near], dtype=torch.float64, requires_grad=True)
        expanded = torch.ones(self.grouping.count, dtype=torch.float64)
        return self._tuned([mu], lambda: mu * expanded, lambda: mu.new_zeros(()), 0.0, 1.0, ())

    def widened(self, before: Tuned, spread: float, scale: float) -> Tuned:
        """A penalty a group under a prior of this width, from where a narrower one ended."""
        free = not np.isfinite(spread)
        tau = 1.0 if free else spread
        mu = torch.tensor([before.common], dtype=torch.float64, requires_grad=True)
        z = torch.from_numpy((before.theta - before.common) / tau).requires_grad_()

        def prior() -> Tensor:
            off = (mu[0] - before.origin) / tau
            return z.new_zeros(()) if free else 0.5 * ((z * z).sum() + off * off) * scale / self.weight

        found = self._tuned([mu, z], lambda: mu + (tau * z).clamp(-REACH, REACH), prior, spread, scale, before.history)
        return replace(found, centre=before.origin)

    def _tuned(
        self,
        upper: list[Tensor],
        theta: Callable[[], Tensor],
        prior: Callable[[], Tensor],
        spread: float,
        scale: float,
        history: tuple[dict[str, float], ...],
    ) -> Tuned:
        self.value(theta().detach().numpy())  # y begins at its solution, not where an earlier search left it
        problem = Bilevel(
            upper_loss=lambda _: (self.held * self.each_row(self.w)).sum() / self.weight + prior(),
            lower_loss=lambda _: self.lower(theta()),
            upper_params=upper,
            lower_params=[self.w],
        )
        solver = BiSLS(problem, lower_iters=LOWER)
        tol, most = max(self.search.tol, 1e-5), self.search.max_iter
        enough = EarlyStopping(PATIENCE, min_delta=tol * self._held())
        done = fit(solver, steps=most, progress=False, on_failure="ignore", tol=tol, callbacks=[enough])
        found = theta().detach().numpy().copy()
        value = self.value(found)
        seen = tuple({"spread": spread, "cv_loss": float(record)} for record in done["upper_value"])
        converged = len(done) < most
        return Tuned(found, spread, value, len(done), converged, (*history, *seen))

    def at(self, theta: Array) -> float:
        """The mean held-out loss."""
        return self.value(theta)

    def each(self, theta: Array) -> tuple[Array, Array, Index]:
        """The losses of all held-out rows, their weights, and which rows they are."""
        self.value(theta)
        losses = self.each_row(self.w).detach().numpy()
        values = [losses[fold, held] for fold, (_, held) in enumerate(self.splits)]
        rows = np.concatenate([held for _, held in self.splits])
        return np.concatenate(values), self.rows.s[rows], rows


@dataclass(frozen=True)
class Batched:
    """Both levels by `BiSLS`, folds in one batched problem.

    Args:
        loss: The loss of both levels.
        rows: All rows.
        grouping: The groups.
        search: How the upper level is minimised.
    """

    loss: Loss
    rows: Rows
    grouping: Grouping
    search: Search

    def on(self, splits: Splits, nested: bool = False) -> BatchedFolds:
        """The folds as a function of the penalties."""
        search = Search(LOOSE, min(self.search.max_iter, 2 * SHORT)) if nested else self.search
        return BatchedFolds(self.loss, self.rows, splits, self.grouping, search)

    def fitted(self, theta: Array) -> Solved:
        """The coefficients on all rows."""
        every = np.arange(len(self.rows.y))
        folds = BatchedFolds(self.loss, self.rows, [(every, every)], self.grouping, self.search)
        folds.value(theta, 0.0)
        w = folds.w.detach().numpy()[0].copy()
        if isinstance(self.loss, Multinomial):  # the mean over the classes, which the loss does not see
            free = self.grouping.penalties(theta) == 0
            w[free] -= w[free].mean(1, keepdims=True)
        return Solved(w, lambda v: v, closed=folds.closed)
