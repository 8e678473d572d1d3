"""higher: the lower steps unrolled through its differentiable optimiser."""

from __future__ import annotations

from types import SimpleNamespace

import higher
import torch
from torch import Tensor, nn
from torch_problems import Penalties
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


if __name__ == "__main__":
    work({"unrolled": unrolled}, ["higher", "torch"])
