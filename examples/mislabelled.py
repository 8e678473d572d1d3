"""Find the wrong labels among 1,000, with the help of 100 that were checked.

    python examples/mislabelled.py

In the handwritten digits of scikit-learn 40 % of the training labels are wrong, and wrong in a way that fools a model: a 0 is
called 1, a 1 is called 2, and so on. Every training sample gets a weight, and the weights are learnt so that a model trained with
them does well on the 100 checked samples. A sample whose weight falls below a half is taken for mislabelled.
"""

from __future__ import annotations

import argparse
import logging
from pathlib import Path

import matplotlib.pyplot as plt
import torch
from sklearn.datasets import load_digits
from torch.nn.functional import cross_entropy

import bisls


def ridge(model) -> torch.Tensor:
    """A little penalty, so that the best model is one."""
    return 1e-3 * (model.weight**2).sum()


def trained(images, labels, weights=1.0) -> torch.nn.Linear:
    """The best linear model for weighted samples."""
    model = torch.nn.Linear(64, 10)
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=200, line_search_fn="strong_wolfe")

    def closure():
        optimizer.zero_grad()
        loss = (weights * cross_entropy(model(images), labels, reduction="none")).mean() + ridge(model)
        loss.backward()
        return loss

    optimizer.step(closure)
    return model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--random", action="store_true", help="wrong labels are drawn at random")
    parser.add_argument("--out", type=Path, default=Path("out"), help="the folder of the picture")
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    torch.manual_seed(arguments.seed)
    torch.set_num_threads(1)  # the matrices are small

    digits = load_digits()
    order = torch.randperm(len(digits.target))
    images = torch.tensor(digits.data / 16, dtype=torch.float32)[order]
    truth = torch.tensor(digits.target)[order]
    train, checked, test = slice(1000), slice(1000, 1100), slice(1100, None)
    wrong = torch.rand(1000) < 0.4
    shift = torch.randint(1, 10, (1000,)) if arguments.random else 1
    given = torch.where(wrong, (truth[train] + shift) % 10, truth[train])

    x = torch.zeros(1000, requires_grad=True)  # the weight of a sample is sigmoid(x)
    model = torch.nn.Linear(64, 10)

    def lower_loss(batch):
        pictures, labels, rows = batch
        return (x[rows].sigmoid() * cross_entropy(model(pictures), labels, reduction="none")).mean() + ridge(model)

    problem = bisls.Bilevel(
        upper_loss=lambda batch: cross_entropy(model(batch[0]), batch[1]),
        lower_loss=lower_loss,
        upper_params=[x],
        lower_params=model.parameters(),
    )
    batches = bisls.tasks.Batches((images[train], given, torch.arange(1000)), batch_size=64, seed=arguments.seed)
    bisls.fit(
        bisls.BiSLS(problem), upper_data=(images[checked], truth[checked]), lower_data=batches, steps=arguments.steps
    )
    weights = x.detach().sigmoid()

    @torch.no_grad()
    def suspicion(judge) -> torch.Tensor:
        return cross_entropy(judge(images[train]), given, reduction="none")

    models = {
        "the labels as they are": trained(images[train], given),
        "the 100 checked ones alone": trained(images[checked], truth[checked]),
        "the learnt weights": trained(images[train], given, weights),
        "the true labels (out of reach)": trained(images[train], truth[train]),
    }
    accuracy = {name: (m(images[test]).argmax(1) == truth[test]).float().mean().item() for name, m in models.items()}
    first, second, third = list(models)[:3]
    ranks = {
        f"loss, model of {first}": suspicion(models[first]),
        f"loss, model of {second}": suspicion(models[second]),
        f"loss, model of {third}": suspicion(models[third]),
        "learnt weight": -weights,
    }
    flagged = int((weights < 0.5).sum())
    print(f"\n{flagged} of 1,000 samples have a weight below 1/2; {int(wrong.sum())} labels are wrong.")
    print(f"\n{f'the {flagged} most suspicious, by':50}{'precision':>10}{'recall':>10}")
    for name, rank in ranks.items():
        hits = wrong[rank.argsort(descending=True)[:flagged]].sum().item()
        print(f"{name:50}{hits / max(flagged, 1):10.1%}{hits / wrong.sum().item():10.1%}")
    print(f"\n{'trained with':50}{'test accuracy':>20}")
    for name, value in accuracy.items():
        print(f"{name:50}{value:20.1%}")
    arguments.out.mkdir(parents=True, exist_ok=True)
    draw(images, given, truth, wrong, weights, ranks, accuracy, arguments.out / "mislabelled.png")
    print(f"\npicture: {arguments.out / 'mislabelled.png'}")


def draw(images, given, truth, wrong, weights, ranks, accuracy, path) -> None:
    """The most suspicious samples, the weights of right and wrong ones, and what is found by how many checks."""
    blue, orange, grey = "#0b5bb5", "#d55e00", "#868e98"
    figure = plt.figure(figsize=(9, 6.3), layout="constrained")
    title = f"Weights learnt from 100 checked samples take the test accuracy from {accuracy['the labels as they are']:.0%} to "
    figure.suptitle(f"{title}{accuracy['the learnt weights']:.0%}", fontsize=13, fontweight="bold")
    above, below = figure.subfigures(2, 1, height_ratios=[1.2, 1])
    above.suptitle(
        "The 36 samples with the least weight, and the labels they came with (orange: wrong, blue: right)", fontsize=10
    )
    for axes, i in zip(above.subplots(3, 12).flat, weights.argsort(), strict=False):
        axes.imshow(images[i].view(8, 8), cmap="gray_r")
        axes.set_title(f"“{given[i]}”", fontsize=11, fontweight="bold", color=orange if wrong[i] else blue, pad=3)
        axes.set(xticks=[], yticks=[])
        axes.spines[:].set_color(orange if wrong[i] else blue)
    left, right = below.subplots(1, 2)
    both = [weights[wrong], weights[~wrong]]
    left.hist(both, bins=20, range=(0, 1), color=[orange, blue], label=["wrong label", "right label"])
    left.axvline(0.5, color=grey, linestyle="--")
    left.set(xlabel="learnt weight", ylabel="samples")
    left.legend(loc="upper center", framealpha=1, edgecolor="none")
    looks = ((grey, ":", 2), ("#f0c060", "-", 6), (orange, "-", 2), (blue, "-.", 2))
    for (name, rank), (colour, style, width) in zip(ranks.items(), looks, strict=True):
        found = wrong[rank.argsort(descending=True)].float().cumsum(0) / wrong.sum()
        right.plot(100 * found, color=colour, linestyle=style, linewidth=width, label=name.replace(" model of ", " "))
    right.set(xlabel="samples looked at, most suspicious first", ylabel="wrong labels found, %")
    right.legend(frameon=False, fontsize=8, loc="lower right")
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    main()
