"""TorchOpt: implicit differentiation by its own conjugate gradients, and its differentiable SGD and Adam unrolled."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import torch
import torchopt
from torch import Tensor, nn
from torch_problems import FewShot, Penalties, Representation, Reweighting
from work import Keep, work


class Weights(nn.Module):
    def __init__(self, size: int):
        super().__init__()
        self.w = nn.Parameter(torch.zeros(size))


def implicit(job: SimpleNamespace, keep: Keep) -> None:
    problem = Penalties(job)

    class Inner(
        torchopt.nn.ImplicitMetaGradientModule, linear_solve=torchopt.linear_solve.solve_cg(maxiter=job.cg, rtol=0.0)
    ):
        def __init__(self, x: Tensor):
            super().__init__()
            self.x = x
            self.w = nn.Parameter(torch.zeros(problem.size))

        def objective(self) -> Tensor:
            return problem.lower(self.x, self.w)

        def solve(self) -> Inner:
            optimizer = torch.optim.SGD([self.w], lr=job.beta)
            with torch.enable_grad():
                for _ in range(job.lower_iters):
                    optimizer.zero_grad()
                    self.objective().backward(inputs=[self.w])
                    optimizer.step()
            return self

    x = torch.zeros(problem.size, requires_grad=True)
    optimizer = torch.optim.Adam([x], lr=job.alpha)
    warm = torch.zeros(problem.size)
    keep(x.detach().numpy())
    while True:
        inner = Inner(x)
        with torch.no_grad():
            inner.w.copy_(warm)
        inner.solve()
        optimizer.zero_grad()
        problem.upper(inner.w).backward()
        optimizer.step()
        warm = inner.w.detach().clone()
        keep(x.detach().numpy())


def unrolled(job: SimpleNamespace, keep: Keep) -> None:
    problem = Penalties(job)
    x = torch.zeros(problem.size, requires_grad=True)
    model = Weights(problem.size)
    inner = torchopt.MetaSGD(model, lr=job.beta)
    optimizer = torch.optim.Adam([x], lr=job.alpha)
    keep(x.detach().numpy())
    while True:
        for _ in range(job.lower_iters):
            inner.step(problem.lower(x, model.w))
        optimizer.zero_grad()
        problem.upper(model.w).backward(inputs=[x])
        optimizer.step()
        torchopt.stop_gradient(model)
        torchopt.stop_gradient(inner)
        keep(x.detach().numpy())


def representation_implicit(job: SimpleNamespace, keep: Keep) -> None:
    problem = Representation(job)
    body, loss = problem.body, problem.loss

    class Inner(
        torchopt.nn.ImplicitMetaGradientModule, linear_solve=torchopt.linear_solve.solve_cg(maxiter=job.cg, rtol=0.0)
    ):
        def __init__(self, body: nn.Module, start: list[Tensor]):
            super().__init__()
            self.body = body  # given from outside: its parameters are meta-parameters
            self.weight, self.bias = (nn.Parameter(tensor.clone()) for tensor in start)

        def outputs(self, features: Tensor) -> Tensor:
            return nn.functional.linear(features, self.weight, self.bias)

        def penalty(self) -> Tensor:
            return 0.5 * problem.ridge * ((self.weight * self.weight).sum() + (self.bias * self.bias).sum())

        def objective(self, batches: list[tuple[Tensor, Tensor]]) -> Tensor:
            images, labels = batches[-1]
            return loss(self.outputs(self.body(images)), labels) + self.penalty()

        def solve(self, batches: list[tuple[Tensor, Tensor]]) -> Inner:
            parameters = [self.weight, self.bias]
            optimizer = torch.optim.SGD(parameters, lr=job.beta)
            with torch.enable_grad():
                for images, labels in batches:
                    with torch.no_grad():
                        features = self.body(images)
                    optimizer.zero_grad()
                    (loss(self.outputs(features), labels) + self.penalty()).backward(inputs=parameters)
                    optimizer.step()
            return self

    x, y = list(body.parameters()), list(problem.head.parameters())
    optimizer = torch.optim.Adam(x, lr=job.alpha)
    keep(*problem.point())
    while True:
        inner = Inner(body, [tensor.detach() for tensor in y])
        inner.solve([next(problem.lower_batches) for _ in range(job.lower_iters)])
        images, labels = next(problem.upper_batches)
        optimizer.zero_grad()
        loss(inner.outputs(body(images)), labels).backward(inputs=x)
        optimizer.step()
        with torch.no_grad():
            y[0].copy_(inner.weight)
            y[1].copy_(inner.bias)
        keep(*problem.point())


def representation_unrolled(job: SimpleNamespace, keep: Keep) -> None:
    problem = Representation(job)
    body, head, loss = problem.body, problem.head, problem.loss
    inner = torchopt.MetaSGD(head, lr=job.beta)
    x = list(body.parameters())
    optimizer = torch.optim.Adam(x, lr=job.alpha)
    keep(*problem.point())
    while True:
        for _ in range(job.lower_iters):
            images, labels = next(problem.lower_batches)
            inner.step(loss(head(body(images)), labels) + problem.penalty())
        images, labels = next(problem.upper_batches)
        optimizer.zero_grad()
        loss(head(body(images)), labels).backward(inputs=x)
        optimizer.step()
        torchopt.stop_gradient(head)
        torchopt.stop_gradient(inner)
        keep(*problem.point())


# Where a gradient is exactly 0 from the first step on, the derivative of Adam's root there is infinite, and all becomes NaN.
ROOT = 1e-16
# The first step of Adam is the sign of the gradient, and its derivative a difference of large numbers that nearly cancel: in
# single precision noise, unless the root is kept further from 0.
FIRST_ROOT = 1e-8


def few_shot(make: Callable[[nn.Module, float], torchopt.MetaOptimizer]) -> Callable[[SimpleNamespace, Keep], None]:
    """One task after another, as in its own examples."""

    def run(job: SimpleNamespace, keep: Keep) -> None:
        problem = FewShot(job)
        network, loss = problem.network(), problem.loss
        x = list(network.parameters())
        optimizer, inner = torch.optim.Adam(x, lr=job.alpha), make(network, job.beta)
        begun = [torchopt.extract_state_dict(one, by="reference", detach_buffers=True) for one in (network, inner)]
        keep(*(tensor.detach().numpy() for tensor in x))
        while True:
            optimizer.zero_grad()
            for shots, shot_labels, queries, query_labels in problem.tasks():
                for _ in range(job.lower_iters):
                    inner.step(loss(network(shots), shot_labels))
                (loss(network(queries), query_labels) / problem.count).backward(inputs=x)
                for one, state in zip((network, inner), begun, strict=True):
                    torchopt.recover_state_dict(one, state)
            optimizer.step()
            keep(*(tensor.detach().numpy() for tensor in x))

    return run


def reweighting(job: SimpleNamespace, keep: Keep) -> None:
    """Its Adam below; an upper step through the last of the lower steps."""
    problem = Reweighting(job)
    network, x = problem.network, list(problem.weighing.parameters())
    inner = torchopt.MetaAdam(network, lr=job.beta, eps_root=ROOT)
    optimizer = torch.optim.Adam(x, lr=job.alpha)
    keep(*problem.point())
    while True:
        for _ in range(job.lower_iters):
            torchopt.stop_gradient(network)
            torchopt.stop_gradient(inner)
            inner.step(problem.lower(network, next(problem.lower_batches)))
        optimizer.zero_grad()
        problem.upper(network, next(problem.upper_batches)).backward(inputs=x)
        optimizer.step()
        keep(*problem.point())


if __name__ == "__main__":
    work(
        {
            "penalties": {"CG": implicit, "unrolled": unrolled},
            "representation": {"CG": representation_implicit, "unrolled": representation_unrolled},
            "few-shot": {
                "MetaSGD": few_shot(lambda network, rate: torchopt.MetaSGD(network, lr=rate)),
                "MetaAdam": few_shot(lambda network, rate: torchopt.MetaAdam(network, lr=rate, eps_root=FIRST_ROOT)),
            },
            "weight-network": {"through one step": reweighting},
            "sample-weights": {"through one step": reweighting},
        },
        ["torchopt", "torch"],
    )
