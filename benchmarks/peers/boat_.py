"""BOAT: naive gradient descent below, with conjugate gradients or reverse automatic differentiation above."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import boat_torch
import torch
from torch import Tensor, nn
from torch_problems import Penalties
from work import Keep, work

PROBLEM: list[Penalties] = []  # BOAT looks the two losses up by the name of their module


class Vector(nn.Module):
    def __init__(self, size: int):
        super().__init__()
        self.v = nn.Parameter(torch.zeros(size))

    def forward(self) -> Tensor:
        return self.v


def lower_loss(feed: Any, upper: nn.Module, lower: nn.Module, params: Any = None, **_: Any) -> Tensor:
    return PROBLEM[0].lower(upper(), lower() if params is None else lower(params=params))


def upper_loss(feed: Any, upper: nn.Module, lower: nn.Module, params: Any = None, **_: Any) -> Tensor:
    return PROBLEM[0].upper(lower() if params is None else lower(params=params))


def run(operation: str) -> Callable[[SimpleNamespace, Keep], None]:
    def go(job: SimpleNamespace, keep: Keep) -> None:
        PROBLEM.append(Penalties(job))
        x, w = Vector(PROBLEM[0].size), Vector(PROBLEM[0].size)
        inner = torch.optim.SGD(w.parameters(), lr=job.beta)
        outer = torch.optim.Adam(x.parameters(), lr=job.alpha)
        config = {
            "fo_op": None, "gm_op": ["NGD"], "na_op": [operation],
            "lower_level_model": w, "upper_level_model": x,
            "lower_level_var": list(w.parameters()), "upper_level_var": list(x.parameters()),
            "lower_level_opt": inner, "upper_level_opt": outer,
            "lower_iters": job.lower_iters, "device": "cpu", "loss_log_path": os.devnull,
            "accumulate_grad": False, "return_grad": False, "copy_last_param": True, "fo_ol_batch_input": False,
            "CG": {"tolerance": 1e-10, "k": job.cg},
            "GDA": {"alpha_init": 0.0, "alpha_decay": 0.0}, "RGT": {"truncate_iter": 0}, "DI": {"lr": 0.0},
        }  # fmt: skip
        here = "__main__" if __name__ == "__main__" else __name__
        losses = {
            "lower_level_loss": {"function": f"{here}.lower_loss"},
            "upper_level_loss": {"function": f"{here}.upper_loss"},
        }
        problem = boat_torch.Problem(config, losses)
        problem.build_ll_solver().build_ul_solver()
        feed = {"data": PROBLEM[0].train[0]}, {"data": PROBLEM[0].validation[0]}
        keep(x.v.detach().numpy())
        for k in range(job.iterations):
            problem.run_iter(*feed, current_iter=k)
            keep(x.v.detach().numpy())

    return go


if __name__ == "__main__":
    sys.modules.setdefault("boat_", sys.modules["__main__"])
    work({"penalties": {"CG": run("CG"), "unrolled": run("RAD")}}, ["boat-torch", "torch"])
