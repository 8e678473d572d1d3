"""Small bi-level problems with closed forms, in float64, off-centre and anisotropic."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from sklearn.datasets import load_diabetes
from torch import Tensor

import bisls
from bisls.lower import Loop, Lowered
from bisls.status import Status


@dataclass
class Case:
    """A problem placed at y = y*(x), with the true value and gradient of F there."""

    problem: bisls.Bilevel
    hypergradient: Tensor
    hessian: Tensor
    mixed: Tensor  # n_x by n_y
    grad_x: Tensor
    grad_y: Tensor


def quadratic(n_x: int = 7, n_y: int = 12, condition: float = 50.0, seed: int = 0) -> Case:
    """g = 1/2 (y - A x - a)' H (y - A x - a), f = 1/2 ||B y - b||^2 + 1/2 x' D x + x' C y: dense coupling of x and y."""
    rng = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=rng, dtype=torch.float64)

    basis, _ = torch.linalg.qr(normal(n_y, n_y))
    hessian = (
        basis
        @ torch.diag(torch.logspace(0, float(torch.tensor(condition).log10()), n_y, dtype=torch.float64))
        @ basis.T
    )
    hessian = (hessian + hessian.T) / 2
    a_matrix, a, b_matrix, b = normal(n_y, n_x), normal(n_y), normal(n_y, n_y), normal(n_y)
    c_matrix, d_matrix = normal(n_x, n_y), normal(n_x, n_x)
    d_matrix = d_matrix @ d_matrix.T
    # two tensors a level, of different shapes, so that splitting and joining is tested on the way
    x = normal(n_x)
    y = a_matrix @ x + a
    x1, x2 = x[:2].clone().requires_grad_(), x[2:].reshape(1, -1).clone().requires_grad_()
    y1, y2 = y[:4].reshape(2, 2).clone().requires_grad_(), y[4:].clone().requires_grad_()

    def xs() -> Tensor:
        return torch.cat([x1, x2.reshape(-1)])

    def ys() -> Tensor:
        return torch.cat([y1.reshape(-1), y2])

    def lower(_: object) -> Tensor:
        gap = ys() - a_matrix @ xs() - a
        return 0.5 * gap @ hessian @ gap

    def upper(_: object) -> Tensor:
        return 0.5 * ((b_matrix @ ys() - b) ** 2).sum() + 0.5 * xs() @ d_matrix @ xs() + xs() @ c_matrix @ ys()

    grad_x = d_matrix @ x + c_matrix @ y
    grad_y = b_matrix.T @ (b_matrix @ y - b) + c_matrix.T @ x
    mixed = -a_matrix.T @ hessian
    truth = grad_x + a_matrix.T @ grad_y
    problem = bisls.Bilevel(upper, lower, [x1, x2], [y1, y2])
    return Case(problem, truth, hessian, mixed, grad_x, grad_y)


def ridge() -> Case:
    """Ridge regression on diabetes with one penalty exp(x_j) a feature; f is the loss on the held-out part."""
    features, target = load_diabetes(return_X_y=True)
    features = torch.tensor(features, dtype=torch.float64)
    features = (features - features.mean(0)) / features.std(0)
    target = torch.tensor(target, dtype=torch.float64)
    target = (target - target.mean()) / target.std()
    (a, av), (b, bv) = (features[:250], features[250:]), (target[:250], target[250:])
    x = torch.linspace(-2.0, 1.0, 10, dtype=torch.float64).requires_grad_()
    hessian = a.T @ a / len(a) + torch.diag(x.detach().exp())
    solution = torch.linalg.solve(hessian, a.T @ b / len(a))
    y = solution.clone().requires_grad_()

    def lower(_: object) -> Tensor:
        return 0.5 * ((a @ y - b) ** 2).mean() + 0.5 * (x.exp() * y * y).sum()

    def upper(_: object) -> Tensor:
        return 0.5 * ((av @ y - bv) ** 2).mean()

    grad_y = av.T @ (av @ solution - bv) / len(av)
    mixed = torch.diag(x.detach().exp() * solution)
    truth = -mixed @ torch.linalg.solve(hessian, grad_y)
    return Case(
        bisls.Bilevel(upper, lower, [x], [y]), truth, hessian, mixed, torch.zeros(10, dtype=torch.float64), grad_y
    )


def lowered(problem: bisls.Bilevel, beta: float) -> dict[str, object]:
    """What a scene has of a lower loop that took its last step with this size."""
    loop = Loop(bisls.Constant(beta))
    return {"lower": loop, "lowered": Lowered(problem.y.read(), beta, 1, 0, Status.OK, {"direction": {}}, beta)}


CASES = {"quadratic": quadratic, "ridge": ridge}
