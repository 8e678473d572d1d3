"""learn2learn: its MAML, one task after another."""

from __future__ import annotations

from types import SimpleNamespace

import learn2learn
import torch
from torch_problems import FewShot
from work import Keep, work


def maml(job: SimpleNamespace, keep: Keep) -> None:
    problem = FewShot(job)
    network, loss = problem.network(), problem.loss
    learner = learn2learn.algorithms.MAML(network, lr=job.beta)
    optimizer = torch.optim.Adam(learner.parameters(), lr=job.alpha)
    keep(*(tensor.detach().numpy() for tensor in network.parameters()))
    while True:
        optimizer.zero_grad()
        for shots, shot_labels, queries, query_labels in problem.tasks():
            own = learner.clone()
            for _ in range(job.lower_iters):
                own.adapt(loss(own(shots), shot_labels))
            (loss(own(queries), query_labels) / problem.count).backward()
        optimizer.step()
        keep(*(tensor.detach().numpy() for tensor in network.parameters()))


if __name__ == "__main__":
    work({"few-shot": {"MAML": maml}}, ["learn2learn", "torch"])
