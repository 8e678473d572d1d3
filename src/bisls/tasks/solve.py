"""Linear models solved to rounding error in float64: what the exact value of a task rests on.

Their gradients and Hessians are written out, so that nothing here needs autograd and nothing leaves a trace.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

_ROWS = 8192  # rows that are turned into another precision at a time: all of them at once would take much memory


class Design:
    """The rows of a linear model, with a column of ones where it has a bias; products in the precision of the other factor."""

    def __init__(self, features: Tensor, bias: bool = False):
        self._features = features.detach().flatten(1)
        self._bias = bias
        self.rows = len(self._features)
        self.columns = self._features.shape[1] + bias
        self.dtype = self._features.dtype

    def _chunks(self, dtype: torch.dtype) -> Iterator[tuple[slice, Tensor]]:
        size = self.rows if self.dtype == dtype else _ROWS
        for start in range(0, self.rows, size):
            rows = slice(start, start + size)
            yield rows, self._features[rows].to(dtype)

    def times(self, weights: Tensor) -> Tensor:
        """A w, for a vector or a matrix w with a row for every column of A."""
        if self._bias:
            return torch.cat([chunk @ weights[:-1] + weights[-1] for _, chunk in self._chunks(weights.dtype)])
        return torch.cat([chunk @ weights for _, chunk in self._chunks(weights.dtype)])

    def transposed(self, values: Tensor) -> Tensor:
        """A' v, for a vector or a matrix v with a row for every row of A."""
        product = values.new_zeros(self._features.shape[1], *values.shape[1:])
        for rows, chunk in self._chunks(values.dtype):
            product += chunk.T @ values[rows]
        return torch.cat([product, values.sum(0, keepdim=True)]) if self._bias else product

    def gram(self, weights: Tensor) -> Tensor:
        """A' diag(weights) A."""
        total = weights.new_zeros(self.columns, self.columns)
        for rows, chunk in self._chunks(weights.dtype):
            wide = self._wide(chunk)
            total += wide.T @ (weights[rows, None] * wide)
        return total

    def every(self, stride: int) -> Design:
        """A part of the rows, one in `stride`."""
        return Design(self._features[::stride], self._bias)

    def narrowed(self) -> tuple[Design, Tensor]:
        """The same rows in an orthonormal basis of their own span, and that basis: fewer columns when rows are few."""
        basis, triangle = torch.linalg.qr(self._wide(self._features.double()).T)
        return Design(triangle.T), basis

    def _wide(self, chunk: Tensor) -> Tensor:
        return torch.cat([chunk, chunk.new_ones(len(chunk), 1)], dim=1) if self._bias else chunk


@dataclass(frozen=True)
class Local:
    """A smooth convex function at one point: its value, its gradient, and the Newton direction (approximately)."""

    value: float
    gradient: Tensor
    newton: Callable[[], Tensor]


def minimise(at: Callable[[Tensor], Local], start: Tensor, max_steps: int = 200) -> Tensor:
    """Damped Newton from the better of `start` and zero, until the expected decrease is far below rounding error."""
    point, here = torch.zeros_like(start), at(torch.zeros_like(start))
    if torch.isfinite(start).all():
        warm = at(start)
        if warm.value < here.value:
            point, here = start.clone(), warm
    for _ in range(max_steps):
        direction = here.newton()
        decrement = -float((here.gradient * direction).sum())
        if not decrement >= 0.0:
            break
        if decrement <= 1e-16 * (1.0 + abs(here.value)):
            return point + direction  # from an error of 1e-8 or less to one of rounding
        step = 1.0
        # the slack is the rounding error of the values, without which the last steps could not be judged
        slack = 1e-13 * (1.0 + abs(here.value))
        while not (there := at(point + step * direction)).value <= here.value - 1e-4 * step * decrement + slack:
            step /= 2
            if step < 1e-12:
                break
        if step < 1e-12:
            break
        point, here = point + step * direction, there
    warnings.warn(
        "the lower problem could not be solved tightly, so the exact value is nan", RuntimeWarning, stacklevel=2
    )
    return torch.full_like(start, torch.nan)


def ridge(design: Design, targets: Tensor, penalties: Tensor) -> Tensor:
    """argmin 1/(2n) ||A w - b||^2 + 1/2 sum_j penalties_j w_j^2; the targets may have several columns."""
    n = design.rows
    hessian = design.gram(penalties.new_full((n,), 1.0 / n)) + torch.diag(penalties)
    return newton_solve(hessian, design.transposed(targets.double()) / n)


def logistic(design: Design, labels: Tensor, penalties: Tensor, start: Tensor) -> Tensor:
    """argmin mean log-loss(A w, labels) + 1/2 sum_j penalties_j w_j^2 for labels 0 and 1, by Newton's method."""
    n, labels = design.rows, labels.double()

    def at(weights: Tensor) -> Local:
        scores = design.times(weights)
        value = functional.binary_cross_entropy_with_logits(scores, labels) + 0.5 * (penalties * weights**2).sum()
        chance = torch.sigmoid(scores)
        gradient = design.transposed(chance - labels) / n + penalties * weights

        def newton() -> Tensor:
            hessian = design.gram(chance * (1 - chance) / n) + torch.diag(penalties)
            return -newton_solve(hessian, gradient)

        return Local(float(value), gradient, newton)

    return minimise(at, start.double())


def softmax(design: Design, labels: Tensor, l2: float, start: Tensor, weights: Tensor | None = None) -> Tensor:
    """argmin 1/n sum_i weights_i CE(A_i w, labels_i) + l2 ||w||^2, a matrix (columns x classes), by Newton-CG.

    The Hessian (columns * classes wide) is never formed. Values and gradients are in float64; the products with the Hessian in
    the precision of the data, as they only make a direction. They are preconditioned by A' diag(p (1 - p)) A + 2 l2 I on a part
    of the rows, with one p for all classes. With fewer rows than columns the solution lies in the span of the rows (the penalty
    is the same in all directions), and is sought there.
    """
    start = start.double()
    if design.rows < design.columns:
        narrow, basis = design.narrowed()
        return basis @ softmax(narrow, labels, l2, basis.T @ start, weights)
    start = start - start.mean(
        1, keepdim=True
    )  # costs no fit and saves penalty: the solution has this mean, 0, as well
    n, kinds = design.rows, start.shape[1]
    share = torch.full((n, 1), 1.0 / n, dtype=torch.float64, device=labels.device)
    if weights is not None:
        share = share * weights.double()[:, None]
    truth = functional.one_hot(labels, kinds).double()
    stride = max(1, n // (4 * design.columns))

    def at(point: Tensor) -> Local:
        logs = torch.log_softmax(design.times(point), dim=1)
        value = -float((share * truth * logs).sum()) + l2 * float((point**2).sum())
        chance = logs.exp()
        gradient = design.transposed(share * (chance - truth)) + 2 * l2 * point

        def newton() -> Tensor:
            spread = (share * chance * (1 - chance)).mean(1)[::stride]
            curvature = design.every(stride).gram(spread * stride)
            curvature.diagonal().add_(2 * l2)
            factor, failed = torch.linalg.cholesky_ex(curvature)
            if failed.any():  # singular within rounding error, or not finite
                return torch.full_like(gradient, torch.nan)
            factor = factor.to(design.dtype)
            chances, shares = chance.to(design.dtype), share.to(design.dtype)

            def product(v: Tensor) -> Tensor:
                change = chances * design.times(v)
                change = shares * (change - chances * change.sum(1, keepdim=True))
                return design.transposed(change) + 2 * l2 * v

            # scaled to 1 first, as the last gradients are too small for the squares of float32
            size = float(torch.linalg.vector_norm(gradient)) or 1.0
            solution = _conjugate_gradients(product, (gradient / size).to(design.dtype), factor, min(0.1, size))
            return -size * solution.double()

        return Local(value, gradient, newton)

    return minimise(at, start)


def cross_entropy(design: Design, labels: Tensor, solution: Tensor) -> float:
    """The mean cross-entropy of a linear model on all rows, in float64."""
    return float(functional.cross_entropy(design.times(solution), labels))


def newton_solve(hessian: Tensor, right: Tensor) -> Tensor:
    """H^-1 b for a positive definite H, scaled to a unit diagonal first: penalties may lie many orders apart."""
    scale = hessian.diagonal().rsqrt()
    factor, failed = torch.linalg.cholesky_ex(hessian * scale * scale[:, None])
    if failed.any():  # singular within rounding error, or not finite
        return torch.full_like(right, torch.nan)
    columns = right.reshape(len(right), -1)
    return (scale[:, None] * torch.cholesky_solve(scale[:, None] * columns, factor)).reshape(right.shape)


def _conjugate_gradients(product: Callable[[Tensor], Tensor], right: Tensor, factor: Tensor, accuracy: float) -> Tensor:
    """H^-1 b by preconditioned conjugate gradients, to a relative accuracy no finer than the precision allows."""
    solution, residual = torch.zeros_like(right), right.clone()
    ready = torch.cholesky_solve(residual, factor)
    direction, energy = ready.clone(), float((residual * ready).sum())
    goal = energy * max(accuracy, 10 * torch.finfo(right.dtype).eps ** 0.75) ** 2
    for _ in range(1000):
        if energy <= goal or energy == 0.0:
            break
        image = product(direction)
        step = energy / float((direction * image).sum())
        solution += step * direction
        residual -= step * image
        ready = torch.cholesky_solve(residual, factor)
        energy, before = float((residual * ready).sum()), energy
        direction = ready + (energy / before) * direction
    return solution
