"""higher: the lower steps unrolled through its differentiable optimiser."""

from __future__ import annotations

from types import SimpleNamespace

import higher
import torch
from torch import Tensor, nn
from torch_problems import FewShot, Penalties, Reweighting
from work import Keep, work


class Weights(nn.Module):
    def __init__(self, size: int):
        super().__init__()
        self.w = nn.Parameter(torch.zeros(size))

    def forward(self) -> Tensor:
        return self.w


def unrolled(job: SimpleNamespace, keep: Keep) -> None:
    problem = Penalties(job)
    x = torch.zeros(problem.size, requires_grad=True)
    model = Weights(problem.size)
    inner = torch.optim.SGD(model.parameters(), lr=job.beta)
    optimizer = torch.optim.Adam([x], lr=job.alpha)
    keep(x.detach().numpy())
    while True:
        with higher.innerloop_ctx(model, inner, copy_initial_weights=True) as (patched, steps):
            for _ in range(job.lower_iters):
                steps.step(problem.lower(x, patched()))
            optimizer.zero_grad()
            problem.upper(patched()).backward(inputs=[x])
            optimizer.step()
            with torch.no_grad():
                model.w.copy_(patched.w)
        keep(x.detach().numpy())


def maml(job: SimpleNamespace, keep: Keep) -> None:
    """One task after another, as in its own example."""
    problem = FewShot(job)
    network, loss = problem.network(), problem.loss
    inner = torch.optim.SGD(network.parameters(), lr=job.beta)
    optimizer = torch.optim.Adam(network.parameters(), lr=job.alpha)
    keep(*(tensor.detach().numpy() for tensor in network.parameters()))
    while True:
        optimizer.zero_grad()
        for shots, shot_labels, queries, query_labels in problem.tasks():
            with higher.innerloop_ctx(network, inner, copy_initial_weights=False) as (patched, steps):
                for _ in range(job.lower_iters):
                    steps.step(loss(patched(shots), shot_labels))
                (loss(patched(queries), query_labels) / problem.count).backward()
        optimizer.step()
        keep(*(tensor.detach().numpy() for tensor in network.parameters()))


def reweighting(job: SimpleNamespace, keep: Keep) -> None:
    """torch's Adam below. The upper gradient goes through one plain step from before the last one, as in Meta-Weight-Net."""
    problem = Reweighting(job)
    network, x = problem.network, list(problem.weighing.parameters())
    y = list(network.parameters())
    inner, plain = torch.optim.Adam(y, lr=job.beta), torch.optim.SGD(y, lr=job.beta)
    optimizer = torch.optim.Adam(x, lr=job.alpha)
    keep(*problem.point())
    while True:
        for number in range(job.lower_iters):
            batch = next(problem.lower_batches)
            if number == job.lower_iters - 1:
                with higher.innerloop_ctx(network, plain) as (patched, steps):
                    steps.step(problem.lower(patched, batch))
                    loss = problem.upper(patched, next(problem.upper_batches))
                    gradients = torch.autograd.grad(loss, x)
            inner.zero_grad()
            problem.lower(network, batch).backward(inputs=y)
            inner.step()
        for tensor, gradient in zip(x, gradients, strict=True):
            tensor.grad = gradient
        optimizer.step()
        keep(*problem.point())


if __name__ == "__main__":
    work(
        {
            "penalties": {"unrolled": unrolled},
            "few-shot": {"MAML": maml},
            "weight-network": {"through one plain step": reweighting},
            "sample-weights": {"through one plain step": reweighting},
        },
        ["higher", "torch"],
    )
