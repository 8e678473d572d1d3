"""Distil 1,200 pictures into ten: one for each class, from which a model learns nearly all that it learns from the 1,200.

    python examples/distil.py
    python examples/distil.py --data mnist     60,000 pictures (fetched once, 12 MB)

The ten pictures begin as real ones, drawn at random. They are changed so that a linear model trained on nothing but them does
well on all real ones. A pixel stays between black and white.
"""

from __future__ import annotations

import argparse
import logging
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import torch
from sklearn.datasets import load_digits
from torch.nn.functional import cross_entropy

import bisls
import bisls.data


def make_data(name: str) -> tuple[np.ndarray, np.ndarray]:
    """Pictures with pixels in [0, 1], one a row, and their classes."""
    if name == "digits":
        digits = load_digits()
        return digits.data / 16, digits.target
    images = bisls.data.load(name)
    pictures = np.concatenate([images.train_x, images.test_x]).reshape(70_000, -1)
    return pictures / 255, np.concatenate([images.train_y, images.test_y])


def ridge(model) -> torch.Tensor:
    """A little penalty, so that the best model is one."""
    return 1e-3 * sum((tensor**2).sum() for tensor in model.parameters())


def trained(pictures, labels) -> torch.nn.Linear:
    """The best linear model for these pictures."""
    model = torch.nn.Linear(pictures.shape[1], 10)
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=100, line_search_fn="strong_wolfe")

    def closure():
        optimizer.zero_grad()
        loss = cross_entropy(model(pictures), labels) + ridge(model)
        loss.backward()
        return loss

    optimizer.step(closure)
    return model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", choices=["digits", "mnist", "fashion-mnist"], default="digits")
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("out"), help="the folder of the picture")
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    torch.manual_seed(arguments.seed)
    torch.set_num_threads(1)  # the matrices are small

    pictures, labels = make_data(arguments.data)
    order = np.random.default_rng(arguments.seed).permutation(len(labels))
    pictures = torch.tensor(pictures[order], dtype=torch.float32)
    labels = torch.tensor(labels[order].astype(int))
    size = 1_200 if arguments.data == "digits" else 60_000
    real, test = (pictures[:size], labels[:size]), (pictures[size:], labels[size:])

    @torch.no_grad()
    def accuracy(model) -> float:
        return (model(test[0]).argmax(1) == test[1]).float().mean().item()

    classes = torch.arange(10)

    def ten_real_ones() -> torch.Tensor:
        rows = [torch.nonzero(real[1] == label)[:, 0] for label in classes]
        return real[0][torch.stack([own[torch.randint(len(own), ())] for own in rows])]

    x = ten_real_ones().requires_grad_()  # the ten pictures
    model = torch.nn.Linear(x.shape[1], 10)
    problem = bisls.Bilevel(
        upper_loss=lambda batch: cross_entropy(model(batch[0]), batch[1]),  # on real pictures
        lower_loss=lambda labels: cross_entropy(model(x), labels) + ridge(model),  # on the ten
        upper_params=[x],
        lower_params=model.parameters(),
        upper_bounds=bisls.Box(0.0, 1.0),
    )
    film = {0: x.detach().clone()}

    def keep(record, state) -> None:
        if state.k in {arguments.steps // 24, arguments.steps // 6, arguments.steps}:
            film[state.k] = x.detach().clone()

    upper = bisls.tasks.Batches(real, batch_size=min(500, size), seed=arguments.seed)
    bisls.fit(bisls.BiSLS(problem), upper, classes, steps=arguments.steps, callbacks=[keep])

    scores = {k: accuracy(trained(shots, classes)) for k, shots in film.items()}
    chance = [accuracy(trained(ten_real_ones(), classes)) for _ in range(20)]
    means = torch.stack([real[0][real[1] == label].mean(0) for label in classes])
    print(f"\n{'trained on':44}{'test accuracy':>14}")
    print(
        f"{'ten real pictures, mean of 20 draws':44}{np.mean(chance):14.1%}   ({min(chance):.1%} to {max(chance):.1%})"
    )
    print(f"{'the means of the ten classes':44}{accuracy(trained(means, classes)):14.1%}")
    print(f"{'ten learnt pictures':44}{scores[max(scores)]:14.1%}")
    everything = accuracy(trained(*real))
    print(f"{f'all {size:,} real pictures':44}{everything:14.1%}")
    arguments.out.mkdir(parents=True, exist_ok=True)
    draw(film, scores, everything, size, arguments.out / "distil.png")
    print(f"\npicture: {arguments.out / 'distil.png'}")


def draw(film, scores, everything, size, path) -> None:
    """The ten pictures on their way: a row for each time that was kept, with what a model learns from it."""
    figure, grid = plt.subplots(len(film), 10, figsize=(9, 0.8 * len(film) + 0.75), squeeze=False, layout="constrained")
    figure.suptitle("Ten pictures learn to teach", fontsize=15, fontweight="bold")
    figure.supxlabel(
        f"Per cent: the test pictures that a linear model reads when it is trained on the row alone.\n"
        f"Trained on all {size:,} real pictures it reads {everything:.1%}.",
        fontsize=10,
    )
    for row, (k, pictures) in zip(grid, film.items(), strict=True):
        side = int(pictures.shape[1] ** 0.5)
        for axes, picture in zip(row, pictures, strict=True):
            axes.imshow(picture.view(side, side), cmap="gray_r", vmin=0, vmax=1)
            axes.set(xticks=[], yticks=[])
            axes.spines[:].set_color("#c9ced4")
        what = "real pictures" if k == 0 else f"{k} steps"
        row[0].set_ylabel(f"{what}\n{scores[k]:.1%}", rotation=0, ha="right", va="center", fontsize=10, labelpad=6)
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    main()
