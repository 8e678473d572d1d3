"""Plain torch, what one writes without any of the libraries: implicit differentiation with conjugate gradients, MAML with
``create_graph``, and the training of y alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace

import torch
from torch import Tensor
from torch_problems import FewShot, Penalties, Representation, Reweighting, stacked
from work import Keep, work

Vectors = list[Tensor]


def conjugate_gradients(product: Callable[[Vectors], Sequence[Tensor]], right: Sequence[Tensor], steps: int) -> Vectors:
    solution = [torch.zeros_like(part) for part in right]
    residual, direction = [part.clone() for part in right], [part.clone() for part in right]
    energy = sum((part * part).sum() for part in residual)
    for _ in range(steps):
        image = product(direction)
        step = energy / sum((a * b).sum() for a, b in zip(direction, image, strict=True))
        solution = [a + step * b for a, b in zip(solution, direction, strict=True)]
        residual = [a - step * b for a, b in zip(residual, image, strict=True)]
        energy, before = sum((part * part).sum() for part in residual), energy
        direction = [a + (energy / before) * b for a, b in zip(residual, direction, strict=True)]
    return solution


def penalties(job: SimpleNamespace, keep: Keep) -> None:
    problem = Penalties(job)
    x, w = torch.zeros(problem.size, requires_grad=True), torch.zeros(problem.size, requires_grad=True)
    optimizer = torch.optim.Adam([x], lr=job.alpha)
    keep(x.detach().numpy())
    while True:
        for _ in range(job.lower_iters):
            (gradient,) = torch.autograd.grad(problem.lower(x.detach(), w), w)
            with torch.no_grad():
                w -= job.beta * gradient
        (right,) = torch.autograd.grad(problem.upper(w), w)
        (gradient,) = torch.autograd.grad(problem.lower(x, w), w, create_graph=True)
        (solution,) = conjugate_gradients(
            lambda v, g=gradient, w=w: torch.autograd.grad(g, w, v[0], retain_graph=True), [right], job.cg
        )
        x.grad = -torch.autograd.grad(gradient, x, solution)[0]
        optimizer.step()
        keep(x.detach().numpy())


def representation(job: SimpleNamespace, keep: Keep) -> None:
    problem = Representation(job)
    body, head, loss = problem.body, problem.head, problem.loss
    x, y = list(body.parameters()), list(head.parameters())
    optimizer = torch.optim.Adam(x, lr=job.alpha)
    keep(*problem.point())
    while True:
        for _ in range(job.lower_iters):
            images, labels = next(problem.lower_batches)
            with torch.no_grad():
                features = body(images)
            gradients = torch.autograd.grad(loss(head(features), labels) + problem.penalty(), y)
            with torch.no_grad():
                for tensor, gradient in zip(y, gradients, strict=True):
                    tensor -= job.beta * gradient
        new_images, new_labels = next(problem.upper_batches)
        both = torch.autograd.grad(loss(head(body(new_images)), new_labels), [*x, *y])
        direct, right = both[: len(x)], both[len(x) :]
        below = loss(head(body(images)), labels) + problem.penalty()
        gradients = torch.autograd.grad(below, y, create_graph=True)
        solution = conjugate_gradients(
            lambda v, g=gradients: torch.autograd.grad(g, y, v, retain_graph=True), right, job.cg
        )
        indirect = torch.autograd.grad(gradients, x, solution)
        for tensor, a, b in zip(x, direct, indirect, strict=True):
            tensor.grad = a - b
        optimizer.step()
        keep(*problem.point())


def maml(job: SimpleNamespace, keep: Keep) -> None:
    """All tasks of a batch at once."""
    problem = FewShot(job)
    optimizer = torch.optim.Adam(problem.start, lr=job.alpha)
    keep(*(tensor.detach().numpy() for tensor in problem.start))
    while True:
        shots, shot_labels, queries, query_labels = next(problem.batches)
        own = [tensor.expand(problem.count, *tensor.shape) for tensor in problem.start]
        for _ in range(job.lower_iters):
            loss = problem.count * problem.loss(stacked(own, shots), shot_labels)
            gradients = torch.autograd.grad(loss, own, create_graph=True)
            own = [tensor - job.beta * gradient for tensor, gradient in zip(own, gradients, strict=True)]
        optimizer.zero_grad()
        problem.loss(stacked(own, queries), query_labels).backward()
        optimizer.step()
        keep(*(tensor.detach().numpy() for tensor in problem.start))


def plain_training(job: SimpleNamespace, keep: Keep) -> None:
    """The network trained by Adam, the weights as they start."""
    problem = Reweighting(job)
    optimizer = torch.optim.Adam(problem.network.parameters(), lr=job.beta)
    problem.weighing.requires_grad_(False)
    keep(*problem.point())
    while True:
        for _ in range(job.lower_iters):
            optimizer.zero_grad()
            problem.lower(problem.network, next(problem.lower_batches)).backward()
            optimizer.step()
        keep(*problem.point())


if __name__ == "__main__":
    work(
        {
            "penalties": {"CG": penalties},
            "representation": {"CG": representation},
            "few-shot": {"MAML": maml},
            "weight-network": {"plain training": plain_training},
            "sample-weights": {"plain training": plain_training},
        },
        ["torch"],
    )
