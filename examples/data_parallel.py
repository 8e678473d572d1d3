"""Several processes on one problem: every rank takes the same decisions, and nothing in the code changes but the launcher.

    torchrun --nproc-per-node=2 examples/data_parallel.py
    python examples/data_parallel.py                       the same problem in one process: the same result

Thirty penalties of a logistic regression (breast cancer data of scikit-learn) are tuned on batches. Each rank draws its own share
of every batch; losses, gradients and products are averaged over the ranks, so a run with two processes equals one process on the
joined batches.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path

import torch
import torch.distributed as dist
from sklearn.datasets import load_breast_cancer
from torch.nn.functional import binary_cross_entropy_with_logits as log_loss

import bisls


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--checkpoint", help="save to this file, and go on from it where it exists")
    parser.add_argument("--out", type=Path, help="write the result of each rank to OUT.rank.json")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if "WORLD_SIZE" in os.environ:  # started by torchrun
        dist.init_process_group("gloo")
    rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)

    features, labels = load_breast_cancer(return_X_y=True)
    features = torch.tensor((features - features.mean(0)) / features.std(0))
    labels = torch.tensor(labels, dtype=torch.float64)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    train, held_out = order[:320], order[320:]

    x = torch.zeros(30, dtype=torch.float64, requires_grad=True)  # one penalty a feature
    w = torch.zeros(30, dtype=torch.float64, requires_grad=True)  # the model
    problem = bisls.Bilevel(
        upper_loss=lambda batch: log_loss(batch[0] @ w, batch[1]),
        lower_loss=lambda batch: log_loss(batch[0] @ w, batch[1]) + 0.5 * ((0.1 + x.sigmoid()) * w**2).sum(),
        upper_params=[x],
        lower_params=[w],
    )
    share = {"rank": rank, "world": world}  # each rank sees its part of the same global batch
    upper = bisls.tasks.Batches((features[held_out], labels[held_out]), batch_size=128, seed=1, **share)
    lower = bisls.tasks.Batches((features[train], labels[train]), batch_size=128, seed=2, **share)

    resume = {"checkpoint": arguments.checkpoint, "resume": True} if arguments.checkpoint else {}
    history = bisls.fit(bisls.BiSLS(problem), upper, lower, steps=arguments.steps, **resume)
    with torch.no_grad():
        value = log_loss(features[held_out] @ w, labels[held_out]).item()
    if rank == 0:
        print(
            f"{world} process(es): held-out loss {value:.6f}, last steps {history['alpha'][-1]:.3g}, {history['beta'][-1]:.3g}"
        )
    if arguments.out:
        result = {
            "x": x.tolist(),
            "w": w.tolist(),
            "alpha": history["alpha"].tolist(),
            "beta": history["beta"].tolist(),
        }
        arguments.out.with_suffix(f".{rank}.json").write_text(json.dumps(result))
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
