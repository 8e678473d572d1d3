"""Tune 576 penalties at once: one for every pixel of a picture.

    python examples/penalties.py

The handwritten digits of scikit-learn are pasted, always at the same place, into pieces of its two photographs. A linear model
reads them from 500 examples with 576 pixels each. One penalty for all weights can't tell the digit from the scenery; one for
every pixel can, and the gradient of the held-out loss through the training finds them all at once.

No penalty may be less than the best shared one. Without this floor 576 numbers fit the held-out rows, and the test suffers.
"""

from __future__ import annotations

import argparse
import logging
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import torch
from sklearn.datasets import load_digits, load_sample_images
from torch.nn.functional import cross_entropy

import bisls

SIDE, TOP, LEFT = 24, 11, 5  # the picture, and where the digit is


def make_data(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """1,797 digits (8 x 8) in pieces of photographs (24 x 24), in random order."""
    rng = np.random.default_rng(seed)
    digits = load_digits()
    photos = [photo.mean(2) / 255 for photo in load_sample_images().images]
    pictures = np.empty((len(digits.target), SIDE, SIDE), dtype=np.float32)
    for i, digit in enumerate(digits.images):
        photo = photos[rng.integers(2)][::3, ::3]
        row, column = rng.integers(photo.shape[0] - SIDE), rng.integers(photo.shape[1] - SIDE)
        pictures[i] = photo[row : row + SIDE, column : column + SIDE]
        window = pictures[i, TOP : TOP + 8, LEFT : LEFT + 8]
        np.maximum(window, digit / 16, out=window)
    order = rng.permutation(len(pictures))
    return torch.tensor(pictures[order]).flatten(1), torch.tensor(digits.target[order])


def trained(penalties, batch) -> torch.nn.Linear:
    """The linear model with the least loss and penalty."""
    model = torch.nn.Linear(SIDE**2, 10)
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=150, line_search_fn="strong_wolfe")

    def closure():
        optimizer.zero_grad()
        loss = cross_entropy(model(batch[0]), batch[1]) + (penalties * model.weight**2).sum()
        loss.backward()
        return loss

    optimizer.step(closure)
    return model


@torch.no_grad()
def scores(model, batch) -> tuple[float, float]:
    """Loss and accuracy."""
    outputs = model(batch[0])
    return cross_entropy(outputs, batch[1]).item(), (outputs.argmax(1) == batch[1]).float().mean().item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--free", action="store_true", help="no floor: penalties may go anywhere")
    parser.add_argument("--out", type=Path, default=Path("out"), help="the folder of the picture")
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    torch.manual_seed(arguments.seed)
    torch.set_num_threads(1)  # the matrices are small

    pictures, labels = make_data(arguments.seed)
    inputs = pictures - pictures[:500].mean(0)
    train, held_out, test = ((inputs[rows], labels[rows]) for rows in (slice(500), slice(500, 1200), slice(1200, None)))
    everything = inputs[:1200], labels[:1200]

    print("one penalty for all weights, by a grid ...")
    grid = [10.0**exponent for exponent in np.arange(-5, 1.1, 0.5)]
    shared = min(grid, key=lambda penalty: scores(trained(penalty, train), held_out)[0])

    print("one penalty for every pixel ...")
    model = torch.nn.Linear(SIDE**2, 10)
    start = float(np.log(shared))
    x = torch.full((SIDE**2,), start, requires_grad=True)  # logarithms

    def fit_loss(batch):
        return cross_entropy(model(batch[0]), batch[1])

    problem = bisls.Bilevel(
        upper_loss=fit_loss,
        lower_loss=lambda batch: fit_loss(batch) + (x.exp() * model.weight**2).sum(),
        upper_params=[x],
        lower_params=model.parameters(),
        upper_bounds=None if arguments.free else bisls.Box(start, start + np.log(1e4)),
    )
    bisls.fit(bisls.BiSLS(problem), upper_data=held_out, lower_data=train, steps=arguments.steps)
    learnt = x.detach().exp()

    print(f"\n{'':28}{'held-out loss':>14}{'test loss':>11}{'test accuracy':>15}{'trained on all 1,200':>22}")
    results = {}
    names = ("no penalty", f"one penalty, {shared:.2g}", "576 penalties")
    for name, penalties in zip(names, (1e-8, shared, learnt), strict=True):
        known, more = trained(penalties, train), trained(penalties * 500 / 1200, everything)  # a mean of more rows
        results[name] = known, scores(known, test)[1], scores(more, test)[1]
        loss, accuracy = scores(known, test)
        print(f"{name:28}{scores(known, held_out)[0]:14.3f}{loss:11.3f}{accuracy:15.1%}{results[name][2]:22.1%}")
    arguments.out.mkdir(parents=True, exist_ok=True)
    draw(pictures, labels, learnt / shared, results, arguments.out / "penalties.png")
    print(f"\npicture: {arguments.out / 'penalties.png'}")


def draw(pictures, labels, ratio, results, path) -> None:
    """Examples, the penalties as a picture, and the weights of two classes with one penalty and with many."""
    figure = plt.figure(figsize=(9, 6.4), layout="constrained")
    figure.suptitle("576 penalties find where the digit is", fontsize=15, fontweight="bold")
    above, below = figure.subfigures(2, 1, height_ratios=[1, 2.4])
    above.suptitle("What the model sees: a digit, always at the same place, in a piece of a photograph", fontsize=10)
    for i, axes in enumerate(above.subplots(1, 8)):
        axes.imshow(pictures[i].view(SIDE, SIDE), cmap="gray", vmin=0, vmax=1)
        axes.set_title(f"{labels[i]}", fontsize=10)
        axes.axis("off")
    left, middle, right = below.subfigures(1, 3, width_ratios=[1.5, 1.25, 1])
    axes = left.subplots()
    image = axes.imshow(ratio.log10().view(SIDE, SIDE), cmap="viridis", vmin=0)
    axes.add_patch(plt.Rectangle((LEFT - 0.5, TOP - 0.5), 8, 8, fill=False, color="white", linestyle="--", linewidth=2))
    axes.set_title("Learnt penalties, as multiples of the\nbest shared one; dashed: the digit", fontsize=10)
    axes.axis("off")
    bar = left.colorbar(image, ax=axes, orientation="horizontal", shrink=0.8, aspect=25, pad=0.02)
    ticks = np.arange(0, int(image.get_clim()[1]) + 1)
    bar.set_ticks(ticks, labels=[f"{10**tick:g}" for tick in ticks])
    grid = middle.subplots(2, 2)
    for row, name in zip(grid, list(results)[1:], strict=True):
        weights = results[name][0].weight.detach()
        for axes, digit in zip(row, (0, 3), strict=True):
            limit = weights[digit].abs().max()
            axes.imshow(weights[digit].view(SIDE, SIDE), cmap="RdBu_r", vmin=-limit, vmax=limit)
            axes.set_title(f"{name.split(',')[0]}: “{digit}”", fontsize=9)
            axes.axis("off")
    middle.suptitle("Weights of the model", fontsize=10)
    axes = right.subplots()
    for column, what, colour, marker in ((2, "all 1,200 rows", "#e69f00", "s"), (1, "500 rows", "#0b5bb5", "o")):
        values = [100 * result[column] for result in results.values()]
        axes.plot(range(3), values, marker, color=colour, markersize=9, label=f"trained on {what}")
        for i, value in enumerate(values):
            axes.annotate(f"{value:.1f}", (i, value), (0, 9), textcoords="offset points", ha="center", fontsize=9)
    axes.set_xticks(range(3), ["no\npenalty", "one", "576"], fontsize=9)
    axes.margins(x=0.25, y=0.15)
    axes.set_title("Test accuracy, %", fontsize=10)
    axes.spines[["top", "right"]].set_visible(False)
    right.legend(fontsize=9, frameon=False, loc="outside lower center")
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    main()
