"""This library: untuned, the paper's algorithm, and two learning rates chosen by hand."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import torch
from torch_problems import Penalties, Representation
from work import Keep, work

import bisls

Make = Callable[[bisls.Bilevel, SimpleNamespace], bisls.Solver]


def default(problem: bisls.Bilevel, job: SimpleNamespace) -> bisls.Solver:
    return bisls.BiSLS(problem)


def same_loops(problem: bisls.Bilevel, job: SimpleNamespace) -> bisls.Solver:
    return bisls.BiSLS(problem, lower_iters=job.lower_iters, hypergrad=_hypergrad(job))


def paper(problem: bisls.Bilevel, job: SimpleNamespace) -> bisls.Solver:
    return bisls.BiSLS.paper(problem, lower_iters=job.lower_iters, hypergrad=_hypergrad(job))


def alternating(problem: bisls.Bilevel, job: SimpleNamespace) -> bisls.Solver:
    return bisls.Alternating(
        problem,
        upper_step=bisls.Constant(job.alpha),
        lower_step=bisls.Constant(job.beta),
        hypergrad=_hypergrad(job),
        lower_iters=job.lower_iters,
    )


def _hypergrad(job: SimpleNamespace) -> bisls.Implicit:
    return bisls.Implicit(bisls.CG(iters=job.cg, tol=0.0))


def penalties(make: Make) -> Callable[[SimpleNamespace, Keep], None]:
    def run(job: SimpleNamespace, keep: Keep) -> None:
        data = Penalties(job)
        x, w = torch.zeros(data.size, requires_grad=True), torch.zeros(data.size, requires_grad=True)
        problem = bisls.Bilevel(lambda _: data.upper(w), lambda _: data.lower(x, w), [x], [w])
        solver = make(problem, job)
        keep(x.detach().numpy())
        while True:
            solver.step(None, None)
            keep(x.detach().numpy())

    return run


def representation(make: Make) -> Callable[[SimpleNamespace, Keep], None]:
    def run(job: SimpleNamespace, keep: Keep) -> None:
        data = Representation(job)
        body, head = data.body, data.head
        problem = bisls.Bilevel(
            upper_loss=lambda batch: data.loss(head(body(batch[0])), batch[1]),
            lower_loss=lambda batch: data.loss(head(body(batch[0])), batch[1]) + data.penalty(),
            upper_params=body.parameters(),
            lower_params=head.parameters(),
        )
        solver = make(problem, job)
        keep(*data.point())
        while True:
            solver.step(next(data.upper_batches), [next(data.lower_batches) for _ in range(job.lower_iters)])
            keep(*data.point())

    return run


METHODS = {"BiSLS": default, "BiSLS, same loops": same_loops, "BiSLS.paper": paper, "Alternating": alternating}

if __name__ == "__main__":
    work(
        {name: penalties(make) for name, make in METHODS.items()}
        | {f"representation {name}": representation(make) for name, make in METHODS.items()},
        ["torch"],
    )
