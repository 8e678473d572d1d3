"""An ordinary training script: AdamW, a cosine schedule, BatchNorm, clipping, bfloat16 autocast, checkpoints, several processes.

    python examples/training.py
    torchrun --nproc-per-node=2 examples/training.py

Five people have labelled the digits, some of them carelessly (a 3 is called 4), and each counts alike. `training_bilevel.py` is
this script with five other lines: it learns whom to trust.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

WRONG = torch.tensor([0.0, 0.2, 0.4, 0.6, 0.8])  # how often each of the five calls a digit the next one


def digits(seed: int) -> tuple[TensorDataset, tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]]:
    """Labelled rows with the number of who labelled them, held-out rows, test rows; the latter two have true labels."""
    found, draw = load_digits(), torch.Generator().manual_seed(seed)
    order = torch.randperm(len(found.target), generator=draw)
    images = torch.tensor(found.images / 16, dtype=torch.float32)[order, None]
    labels = torch.tensor(found.target)[order]
    who = torch.arange(1000) % 5
    wrong = torch.rand(1000, generator=draw) < WRONG[who]
    given = torch.where(wrong, (labels[:1000] + 1) % 10, labels[:1000])
    rest = ((images[rows], labels[rows]) for rows in (slice(1000, 1200), slice(1200, None)))
    return TensorDataset(images[:1000], given, who), *rest


def cnn() -> nn.Module:
    first = nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2))
    second = nn.Sequential(nn.Conv2d(8, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2))
    return nn.Sequential(first, second, nn.Flatten(), nn.Dropout(0.1), nn.Linear(64, 10))


def main(given: list[str] | None = None) -> dict[str, object]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--checkpoint", type=Path, default=Path("out/training.pt"), help="goes on from it, if it exists"
    )
    parser.add_argument("--out", type=Path, help="write what each epoch came to into this file")
    arguments = parser.parse_args(given)
    path, epochs = arguments.checkpoint, arguments.epochs
    if "WORLD_SIZE" in os.environ and not dist.is_initialized():  # started by torchrun
        dist.init_process_group("gloo")
    torch.set_num_threads(1)
    torch.manual_seed(arguments.seed)
    labelled, held_out, test = digits(arguments.seed)
    model = cnn()
    network = DistributedDataParallel(model) if dist.is_initialized() else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=1e-2)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs)
    sampler = DistributedSampler(labelled) if dist.is_initialized() else None
    size = 100 // (dist.get_world_size() if dist.is_initialized() else 1)
    loader = DataLoader(labelled, size, shuffle=sampler is None, sampler=sampler)
    kept = {"model": model, "optimizer": optimizer, "schedule": schedule}
    rows: list[dict[str, object]] = []
    trust = torch.zeros(5)

    def train_loss(batch):
        images, labels, who = batch
        with torch.autocast("cpu", dtype=torch.bfloat16):
            logits = network(images)
        return (5 * trust.softmax(0)[who] * cross_entropy(logits.float(), labels, reduction="none")).mean()

    def clean_loss(batch):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return cross_entropy(network(batch[0]).float(), batch[1])

    def accuracy(images, labels):
        model.eval()
        with torch.no_grad():
            right = (model(images).argmax(1) == labels).float().mean().item()
        model.train()
        return right

    def epoch_ends(*_):
        schedule.step()
        rows.append({"accuracy": accuracy(*test), "trust": (5 * trust.detach().softmax(0)).tolist()})

    first = 0
    if path.exists():
        saved = torch.load(path)
        for name, own in kept.items():
            own.load_state_dict(saved[name])
        torch.set_rng_state(saved["random"])
        first = saved["epoch"]
    for epoch in range(first, epochs):
        if sampler is not None:
            sampler.set_epoch(epoch)
        for batch in loader:
            optimizer.zero_grad()
            loss = train_loss(batch)
            loss.backward()
            clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        epoch_ends()
        if not dist.is_initialized() or dist.get_rank() == 0:
            path.parent.mkdir(parents=True, exist_ok=True)
            states = {name: own.state_dict() for name, own in kept.items()}
            torch.save({**states, "random": torch.get_rng_state(), "epoch": epoch + 1}, path)

    if not dist.is_initialized() or dist.get_rank() == 0:
        print(f"test accuracy {accuracy(*test):.3f}, on the held-out rows {accuracy(*held_out):.3f}")
        print(f"trust in the five: {', '.join(f'{own:.2f}' for own in (5 * trust.detach().softmax(0)).tolist())}")
        if arguments.out:
            arguments.out.write_text(json.dumps(rows))
    return {**kept, "trust": trust, "rows": rows}


if __name__ == "__main__":
    main()
