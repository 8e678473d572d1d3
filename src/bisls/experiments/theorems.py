"""Problems that meet the assumptions of the paper's Theorems 1 to 3, with what the theorems bound in closed form."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from math import ceil, log, sqrt
from typing import Any

import torch
from torch import Tensor

from bisls.evaluate import gradient
from bisls.problem import Bilevel

# Residuals at x* that balance, 2 rho'(-r) + rho'(R) = 0 with rho' = 0.4 and 0.8, but are not symmetric: a rule whose steps do
# not tend to zero ends beside x*.
LEFT, RIGHT = 0.4 / sqrt(1 - 0.4**2), 0.8 / sqrt(1 - 0.8**2)


@dataclass(frozen=True)
class FiniteSum:
    """f(x) = mean_i rho(<a_i, x> - b_i) + ridge / 2 ||x||^2 with rho(r) = sqrt(1 + r^2) - 1, for Theorems 1 and 2.

    Each f_i is convex, smooth with L_i = ||a_i||^2 + ridge, at least 0 (so l_i* = 0), and its gradient is bounded (on the ball
    of the given radius where there is a ridge, which iterates are then projected onto).
    """

    rows: Tensor
    targets: Tensor
    best: Tensor
    ridge: float = 0.0
    radius: float | None = None

    @property
    def smoothness(self) -> float:
        """The largest L_i."""
        return float(self.rows.square().sum(1).max()) + self.ridge

    def loss(self, x: Tensor, i: int) -> Tensor:
        """f_i."""
        value = (1.0 + (self.rows[i] @ x - self.targets[i]) ** 2).sqrt() - 1.0
        return value if self.ridge == 0.0 else value + 0.5 * self.ridge * (x @ x)

    def full(self, x: Tensor) -> Tensor:
        """f."""
        residuals = self.rows @ x - self.targets
        return ((1.0 + residuals**2).sqrt() - 1.0).mean() + 0.5 * self.ridge * (x @ x)

    @torch.no_grad()
    def gap(self, x: Tensor) -> float:
        """f(x) - f*."""
        return float(self.full(x) - self.full(self.best))


def hadamard(power: int) -> Tensor:
    """Orthogonal rows of 1 and -1, 2^power of them."""
    matrix = torch.ones(1, 1, dtype=torch.float64)
    for _ in range(power):
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    return matrix


@cache
def convex() -> FiniteSum:
    """Not strongly convex, nor interpolated, with x* and f* in closed form.

    The features are the rows of a 64 x 64 Hadamard matrix whose column j is divided by j^1.5: their covariance has the
    eigenvalues 1 / j^3, down to 4e-6, far below 1 / (sum of the steps), and rho grows linearly. x*_j = 3 / sqrt j (with changing
    sign), so that much of x* lies where f is flat: there the gap falls hardly faster than 1 / sqrt K. Every row appears three
    times, with residuals that balance at x*.
    """
    index = torch.arange(1, 65, dtype=torch.float64)
    rows = hadamard(6) / index**1.5
    best = 3.0 * index**-0.5 * torch.where(index % 3 == 0, -1.0, 1.0)
    noise = torch.tensor([LEFT, LEFT, -RIGHT], dtype=torch.float64)
    targets = ((rows @ best)[:, None] + noise).reshape(-1)
    return FiniteSum(rows.repeat_interleave(3, 0), targets, best)


@cache
def strongly_convex() -> FiniteSum:
    """The same with 16 features and a ridge of mu = 0.1; x* by Newton's method."""
    index = torch.arange(1, 17, dtype=torch.float64)
    rows = hadamard(4) / index
    noise = torch.tensor([LEFT, LEFT, -RIGHT], dtype=torch.float64)
    targets = ((rows @ (3.0 / index))[:, None] + noise).reshape(-1)
    rows, mu = rows.repeat_interleave(3, 0), 0.1
    best = 3.0 / index  # where the residuals balance; the ridge moves it
    for _ in range(50):
        residuals = rows @ best - targets
        root = (1.0 + residuals**2).sqrt()
        slope = rows.T @ (residuals / root) / len(rows) + mu * best
        hessian = rows.T @ (rows / root[:, None] ** 3) / len(rows) + mu * torch.eye(16, dtype=torch.float64)
        best = best - torch.linalg.solve(hessian, slope)
    return FiniteSum(rows, targets, best, ridge=mu, radius=2.0 * float(best.norm()))


class Noisy:
    """A bi-level problem with noise at both levels and F in closed form, for Theorem 3.

        g(x, y; m, n) = 1/2 (y - A x - a - e_n)' H_m (y - A x - a - e_n),         so y*(x) = A x + a
        f(x, y; i) = sum_j rho(B y - b_i)_j + sum_j rho(x - c_i)_j

    H_m = Q diag(h_m) Q' has mean eigenvalues 1 to 2, each of them changed by up to half of itself; the e_n, b_i, c_i are
    normal, and sum_n e_n = 0. Each sampled g is convex and at least 0, which it reaches: l* = 0 is exact. rho is
    sqrt(1 + r^2) - 1, or, not convex, r^2 / (2 + 2 r^2); both have bounded first and second derivatives (|rho''| <= 1).
    A has orthogonal columns of norm 0.5, B is orthogonal. x begins at a distance of 0.5 from a stationary point of F: from
    afar the way there, which falls as 1 / K in the mean, would hide the noise, which does not.

    Args:
        convex: Which rho.
        seed: Draws the problem; it is the same one in all runs.
    """

    def __init__(self, convex: bool, seed: int = 0):
        rng = torch.Generator().manual_seed(seed)

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=rng, dtype=torch.float64)

        n_x, n_y, pairs = 5, 8, 16
        basis, _ = torch.linalg.qr(normal(n_y, n_y))
        spread = 0.5 * (2 * torch.rand(pairs // 2, n_y, generator=rng, dtype=torch.float64) - 1)
        eigenvalues = torch.linspace(1.0, 2.0, n_y, dtype=torch.float64) * (1 + torch.cat([spread, -spread]))
        self.hessians = torch.einsum("ij,mj,kj->mik", basis, eigenvalues, basis)
        self.view, _ = torch.linalg.qr(normal(n_y, n_y))
        self.response = 0.5 * torch.linalg.qr(normal(n_y, n_x))[0]
        self.offset, noise = 0.5 * normal(n_y), normal(pairs, n_y)
        self.noise = noise - noise.mean(0)
        self.targets, self.centres = (0.5 * (normal(n) + normal(pairs, n)) for n in (n_y, n_x))
        self.convex = convex
        self.curvature = float(eigenvalues.max())  # of any sampled g, in y
        start = self.stationary(normal(n_x))
        away = normal(n_x)
        self.x = (start + 0.5 * away / away.norm()).requires_grad_()
        self.y = normal(n_y).requires_grad_()
        self.problem = Bilevel(self.upper, self.lower, [self.x], [self.y])

    def rho(self, r: Tensor) -> Tensor:
        """The loss of one residual."""
        return (1 + r * r).sqrt() - 1 if self.convex else 0.5 * r * r / (1 + r * r)

    def upper_at(self, x: Tensor, y: Tensor, rows: Any) -> Tensor:
        """f on some of the samples."""
        fit = self.rho(y @ self.view.T - self.targets[rows]).sum(-1)
        return (fit + self.rho(x - self.centres[rows]).sum(-1)).mean()

    def upper(self, row: int) -> Tensor:
        """f on one sample."""
        return self.upper_at(self.x, self.y, row)

    def lower(self, batch: tuple[int, int]) -> Tensor:
        """g on one pair (m, n)."""
        m, n = batch
        gap = self.y - self.response @ self.x - self.offset - self.noise[n]
        return 0.5 * gap @ (self.hessians[m] @ gap)

    def gradient(self, x: Tensor) -> Tensor:
        """The gradient of F."""
        x = x.detach().requires_grad_()
        (found,) = gradient(self.upper_at(x, self.response @ x + self.offset, slice(None)), [x])
        assert found is not None
        return found

    def stationary(self, x: Tensor) -> Tensor:
        """A stationary point of F, by gradient descent."""
        for _ in range(500):
            x = x - self.gradient(x)
        return x

    def settings(self, steps: int) -> dict[str, float]:
        """Step sizes that meet the theorem's conditions with equality, p = 1/2, and the T that it asks for at K = steps."""
        l_y = 0.5
        l_f, l_big = l_y, l_y**2 + 1.0  # of grad_x f - g_xy g_yy^-1 grad_y f in y; of grad F
        alpha = 0.5 / (l_big + 4 * l_y**2)  # alpha_b0^2 / alpha_l0 = 2 alpha_b0 = 1 / (L_F + 4 L_y^2)
        beta, mu, smooth = 32.0, 1.0, self.curvature * (1 + l_y**2)
        least = min(1.0 / smooth, beta / steps)
        return {"alpha": alpha, "beta": beta, "T": ceil(log(alpha * l_f**2 + 2) / -log(1 - mu * least)), "terms": 10}
