"""hypertorch: its conjugate gradients on the fixed-point map of a lower gradient step."""

from __future__ import annotations

from types import SimpleNamespace

import hypergrad
import torch
from torch import Tensor
from torch_problems import Penalties
from work import Keep, work


def implicit(job: SimpleNamespace, keep: Keep) -> None:
    problem = Penalties(job)
    x = torch.zeros(problem.size, requires_grad=True)
    w = torch.zeros(problem.size)
    optimizer = torch.optim.Adam([x], lr=job.alpha)

    def step(params: list[Tensor], hparams: list[Tensor]) -> list[Tensor]:
        (gradient,) = torch.autograd.grad(problem.lower(hparams[0], params[0]), params[0], create_graph=True)
        return [params[0] - job.beta * gradient]

    def outer(params: list[Tensor], hparams: list[Tensor]) -> Tensor:
        return problem.upper(params[0])

    keep(x.detach().numpy())
    while True:
        for _ in range(job.lower_iters):
            w = step([w.detach().requires_grad_()], [x.detach()])[0].detach()
        optimizer.zero_grad()
        hypergrad.CG([w], [x], K=job.cg, fp_map=step, outer_loss=outer)
        optimizer.step()
        keep(x.detach().numpy())


if __name__ == "__main__":
    work({"penalties": {"CG": implicit}}, ["torch"])
