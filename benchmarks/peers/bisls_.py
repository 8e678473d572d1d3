"""This library: untuned, with an optimiser of the user's below, the paper's algorithm, and two learning rates by hand."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import torch
from torch_problems import FewShot, Penalties, Representation, Reweighting, stacked
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


def few_shot(make: Make) -> Callable[[SimpleNamespace, Keep], None]:
    def run(job: SimpleNamespace, keep: Keep) -> None:
        data = FewShot(job)
        start = data.start
        copies = [tensor.detach().expand(data.count, *tensor.shape).clone().requires_grad_() for tensor in start]
        problem = bisls.Bilevel(
            upper_loss=lambda batch: data.loss(stacked(copies, batch[2]), batch[3]),
            lower_loss=lambda batch: data.count * data.loss(stacked(copies, batch[0]), batch[1]),
            upper_params=start,
            lower_params=copies,
            lower_start=lambda: [tensor.expand(data.count, *tensor.shape) for tensor in start],
        )
        solver = make(problem, job)
        keep(*(tensor.detach().numpy() for tensor in start))
        while True:
            batch = next(data.batches)
            solver.step(batch, batch)
            keep(*(tensor.detach().numpy() for tensor in start))

    return run


def same_steps(problem: bisls.Bilevel, job: SimpleNamespace) -> bisls.Solver:
    return bisls.BiSLS(problem, lower_iters=job.lower_iters)


def looking_back(problem: bisls.Bilevel, job: SimpleNamespace) -> bisls.Solver:
    return bisls.Alternating(
        problem,
        upper_step=bisls.Constant(job.alpha),
        lower_step=bisls.Constant(job.beta),
        hypergrad=bisls.Lookahead(),
        lower_iters=job.lower_iters,
    )


def reweighting(make: Make) -> Callable[[SimpleNamespace, Keep], None]:
    def run(job: SimpleNamespace, keep: Keep) -> None:
        data = Reweighting(job)
        problem = bisls.Bilevel(
            upper_loss=lambda batch: data.upper(data.network, batch),
            lower_loss=lambda batch: data.lower(data.network, batch),
            upper_params=data.weighing.parameters(),
            lower_params=data.network.parameters(),
        )
        solver = make(problem, job)
        keep(*data.point())
        while True:
            solver.step(next(data.upper_batches), [next(data.lower_batches) for _ in range(job.lower_iters)])
            keep(*data.point())

    return run


def own_optimiser(problem: bisls.Bilevel, job: SimpleNamespace) -> bisls.Solver:
    return bisls.BiSLS(problem, lower_optimizer=torch.optim.AdamW(problem.y.tensors, lr=job.beta))


METHODS = {"BiSLS": default, "BiSLS, same loops": same_loops, "BiSLS.paper": paper, "Alternating": alternating}
REWEIGHTING = {
    name: reweighting(make) for name, make in {"BiSLS": default, "BiSLS, AdamW below": own_optimiser}.items()
}

if __name__ == "__main__":
    work(
        {
            "penalties": {name: penalties(make) for name, make in METHODS.items()},
            "representation": {name: representation(make) for name, make in METHODS.items()},
            "few-shot": {
                "BiSLS": few_shot(same_steps),  # by how many steps new tasks are learnt is part of the problem
                "BiSLS, T not told": few_shot(default),
                "Alternating": few_shot(looking_back),
            },
            "weight-network": REWEIGHTING,
            "sample-weights": REWEIGHTING,
        },
        ["torch"],
    )
