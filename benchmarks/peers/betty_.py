"""Betty: its engine with conjugate gradients, the Neumann series and finite differences."""

from __future__ import annotations

import logging
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from betty.configs import Config, EngineConfig
from betty.engine import Engine
from betty.problems import ImplicitProblem
from torch import Tensor, nn
from torch_problems import FewShot, Penalties, Representation, Reweighting, stacked
from work import Keep, work

Batch = tuple[Tensor, ...]


class Vector(nn.Module):
    def __init__(self, size: int):
        super().__init__()
        self.v = nn.Parameter(torch.zeros(size))

    def forward(self) -> Tensor:
        return self.v


def _config(kind: str, job: SimpleNamespace) -> Config:
    """Of the lower problem: how often it steps, and how its best response is differentiated."""
    own: dict[str, Any] = {
        "cg": {"cg_iterations": job.cg, "cg_alpha": 1.0},
        "neumann": {"neumann_iterations": job.cg, "neumann_alpha": job.beta},
        "darts": {},
    }[kind]
    return Config(type=kind, unroll_steps=job.lower_iters, **own)


def _run(upper: ImplicitProblem, lower: ImplicitProblem, job: SimpleNamespace) -> None:
    logging.disable(logging.INFO)
    engine = Engine(
        config=EngineConfig(train_iters=job.iterations * job.lower_iters, valid_step=10**9, strategy="cpu"),
        problems=[upper, lower],
        dependencies={"u2l": {upper: [lower]}, "l2u": {lower: [upper]}},
    )
    engine.run()


def penalties(kind: str) -> Callable[[SimpleNamespace, Keep], None]:
    def run(job: SimpleNamespace, keep: Keep) -> None:
        problem = Penalties(job)
        x, w = Vector(problem.size), Vector(problem.size)

        class Upper(ImplicitProblem):
            def training_step(self, batch: Batch) -> Tensor:
                return problem.upper(self.lower())

            def get_batch(self) -> Batch:
                return problem.validation

            def param_callback(self) -> None:
                keep(x.v.detach().numpy())

        class Lower(ImplicitProblem):
            def training_step(self, batch: Batch) -> Tensor:
                return problem.lower(self.upper(), self.module())

            def get_batch(self) -> Batch:
                return problem.train

        upper = Upper("upper", Config(), module=x, optimizer=torch.optim.Adam(x.parameters(), lr=job.alpha))
        lower = Lower("lower", _config(kind, job), module=w, optimizer=torch.optim.SGD(w.parameters(), lr=job.beta))
        keep(x.v.detach().numpy())
        _run(upper, lower, job)

    return run


def representation(kind: str) -> Callable[[SimpleNamespace, Keep], None]:
    def run(job: SimpleNamespace, keep: Keep) -> None:
        problem = Representation(job)
        body, head = problem.body, problem.head

        class Upper(ImplicitProblem):
            def training_step(self, batch: Batch) -> Tensor:
                return problem.loss(self.lower(self.module(batch[0])), batch[1])

            def get_batch(self) -> Batch:
                return next(problem.upper_batches)

            def param_callback(self) -> None:
                keep(*problem.point())

        class Lower(ImplicitProblem):
            def training_step(self, batch: Batch) -> Tensor:
                return problem.loss(self.module(self.upper(batch[0])), batch[1]) + problem.penalty()

            def get_batch(self) -> Batch:
                return next(problem.lower_batches)

        above = Config(retain_graph=True)  # the upper loss depends on x itself and through the last layer
        upper = Upper("upper", above, module=body, optimizer=torch.optim.Adam(body.parameters(), lr=job.alpha))
        lower = Lower(
            "lower", _config(kind, job), module=head, optimizer=torch.optim.SGD(head.parameters(), lr=job.beta)
        )
        keep(*problem.point())
        _run(upper, lower, job)

    return run


class Start(nn.Module):
    def __init__(self, tensors: list[Tensor], copies: int | None = None):
        super().__init__()
        shape = () if copies is None else (copies,)
        self.tensors = nn.ParameterList(tensor.detach().expand(*shape, *tensor.shape).clone() for tensor in tensors)

    def forward(self, inputs: Tensor) -> Tensor:
        return stacked(list(self.tensors), inputs)


def few_shot(kind: str) -> Callable[[SimpleNamespace, Keep], None]:
    """Implicit MAML, as in its own example: every task is tied to the start by a penalty, through which it is differentiated."""

    def run(job: SimpleNamespace, keep: Keep) -> None:
        problem = FewShot(job)
        x, y = Start(problem.start), Start(problem.start, problem.count)
        batch: list[Tensor] = []

        class Upper(ImplicitProblem):
            def training_step(self, batch: Batch) -> Tensor:
                return problem.loss(self.lower(batch[2]), batch[3])

            def get_batch(self) -> Batch:
                return tuple(batch)

            def param_callback(self) -> None:
                keep(*(tensor.detach().numpy() for tensor in x.tensors))

        class Lower(ImplicitProblem):
            def training_step(self, batch: Batch) -> Tensor:
                pairs = zip(self.module.tensors, self.upper.module.tensors, strict=True)
                way = sum(((own - start) ** 2).sum() for own, start in pairs)
                return problem.count * problem.loss(self.module(batch[0]), batch[1]) + 0.5 * way

            def get_batch(self) -> Batch:
                return tuple(batch)

            def on_inner_loop_start(self) -> None:
                batch[:] = next(problem.batches)
                with torch.no_grad():
                    for own, start in zip(y.tensors, x.tensors, strict=True):
                        own.copy_(start.expand_as(own))

        upper = Upper("upper", Config(), module=x, optimizer=torch.optim.Adam(x.parameters(), lr=job.alpha))
        lower = Lower("lower", _config(kind, job), module=y, optimizer=torch.optim.SGD(y.parameters(), lr=job.beta))
        keep(*(tensor.detach().numpy() for tensor in x.tensors))
        _run(upper, lower, job)

    return run


def reweighting(kind: str) -> Callable[[SimpleNamespace, Keep], None]:
    def run(job: SimpleNamespace, keep: Keep) -> None:
        problem = Reweighting(job)
        x, y = problem.weighing, problem.network

        class Upper(ImplicitProblem):
            def training_step(self, batch: Batch) -> Tensor:
                return problem.upper(self.lower, batch)

            def get_batch(self) -> Batch:
                return next(problem.upper_batches)

            def param_callback(self) -> None:
                keep(*problem.point())

        class Lower(ImplicitProblem):
            def training_step(self, batch: Batch) -> Tensor:
                return problem.lower(self.module, batch, self.upper)

            def get_batch(self) -> Batch:
                return next(problem.lower_batches)

        upper = Upper("upper", Config(), module=x, optimizer=torch.optim.Adam(x.parameters(), lr=job.alpha))
        lower = Lower("lower", _config(kind, job), module=y, optimizer=torch.optim.Adam(y.parameters(), lr=job.beta))
        keep(*problem.point())
        _run(upper, lower, job)

    return run


KINDS = {"CG": "cg", "Neumann": "neumann", "finite differences": "darts"}

if __name__ == "__main__":
    makers = {
        "penalties": penalties,
        "representation": representation,
        "few-shot": few_shot,
        "weight-network": reweighting,
        "sample-weights": reweighting,
    }
    work(
        {contest: {name: make(kind) for name, kind in KINDS.items()} for contest, make in makers.items()},
        ["betty-ml", "torch"],
    )
