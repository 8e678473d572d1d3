"""Learn a representation in which a few labelled pictures a class are enough.

    python examples/representation.py
    python examples/representation.py --data mnist     12,000 pictures (fetched once, 12 MB)

A network turns a picture into eight numbers (upper level). A linear model is trained on these for five labelled pictures a class,
other ones in every step (lower level), and the network is changed so that this model reads many other pictures. Afterwards, on
pictures that took no part in it, a few labels a class are given and the rest is to be read: by the numbers learnt, by those of
the same network trained as usual, by eight principal components, by the network as it was drawn, and by the raw pixels.
"""

from __future__ import annotations

import argparse
import logging
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import torch
from sklearn.datasets import load_digits
from sklearn.decomposition import PCA
from sklearn.linear_model import LogisticRegression
from torch import nn
from torch.nn.functional import cross_entropy

import bisls
import bisls.data

SHOTS = (1, 2, 5, 10)
LOOKS = {
    "learnt for few labels": ("#d55e00", "o"),
    "network trained as usual": ("#cc79a7", "D"),
    "raw pixels": ("#0b5bb5", "s"),
    "principal components": ("#009e73", "^"),
    "random network": ("#868e98", "v"),
}


def make_data(name: str) -> tuple[np.ndarray, np.ndarray]:
    """Pictures with pixels in [0, 1], one a row, and their classes."""
    if name == "digits":
        digits = load_digits()
        return digits.data / 16, digits.target
    images = bisls.data.load(name)
    return images.train_x[:12_000].reshape(12_000, -1) / 255, images.train_y[:12_000]


def few(labels: np.ndarray, shots: int, rng: np.random.Generator) -> np.ndarray:
    """Rows of so many samples of each class."""
    return np.concatenate([rng.permutation(np.flatnonzero(labels == label))[:shots] for label in range(10)])


def accuracy(features: np.ndarray, labels: np.ndarray, shots: int) -> float:
    """A linear model of few labels a class, on all other samples; mean of 10 draws."""
    features, values = (features - features.mean(0)) / features.std(), []
    for draw in range(10):
        rows = few(labels, shots, np.random.default_rng(draw))
        rest = np.setdiff1d(np.arange(len(labels)), rows)
        model = LogisticRegression(C=10.0, max_iter=1000).fit(features[rows], labels[rows])
        values.append(model.score(features[rest], labels[rest]))
    return float(np.mean(values))


def ordinary(body, pictures: np.ndarray, labels: np.ndarray):
    """The network trained in one piece with its last layer, on all pictures of both levels."""
    model = nn.Sequential(body, nn.Linear(body[-1].out_features, 10))
    pictures, labels = torch.tensor(pictures), torch.tensor(labels)
    optimizer = bisls.optim.Auto(model.parameters())
    for _ in range(2000):
        rows = torch.randint(len(labels), (128,))
        optimizer.step(lambda rows=rows: cross_entropy(model(pictures[rows]), labels[rows]))
    optimizer.eval()
    return body


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", choices=["digits", "mnist", "fashion-mnist"], default="digits")
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--size", type=int, default=8, help="numbers that stand for a picture, at least 1")
    parser.add_argument("--out", type=Path, default=Path("out"), help="the folder of the picture")
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    torch.manual_seed(arguments.seed)
    torch.set_num_threads(1)  # the matrices are small

    pictures, labels = make_data(arguments.data)
    rng = np.random.default_rng(arguments.seed)
    order = rng.permutation(len(labels))
    pictures, labels = pictures[order].astype(np.float32), labels[order].astype(int)
    lower, upper, test = (slice(i * len(labels) // 3, (i + 1) * len(labels) // 3) for i in range(3))

    def network() -> nn.Sequential:
        return nn.Sequential(
            nn.Linear(pictures.shape[1], 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, arguments.size)
        )

    def project(network) -> np.ndarray:
        with torch.no_grad():
            return network(torch.tensor(pictures[test])).numpy()

    body, head = network(), nn.Linear(arguments.size, 10)

    def five_a_class() -> tuple[torch.Tensor, torch.Tensor]:
        rows = few(labels[lower], 5, rng)
        return torch.tensor(pictures[lower][rows]), torch.tensor(labels[lower][rows])

    def fit_loss(batch):
        return cross_entropy(head(body(batch[0])), batch[1])

    problem = bisls.Bilevel(
        upper_loss=fit_loss,
        lower_loss=lambda batch: fit_loss(batch) + 1e-3 * sum((tensor**2).sum() for tensor in head.parameters()),
        upper_params=body.parameters(),
        lower_params=head.parameters(),
    )
    features = {"random network": project(body), "raw pixels": pictures[test]}
    others = torch.tensor(pictures[upper]), torch.tensor(labels[upper])
    batches = bisls.tasks.Batches(others, batch_size=128, seed=arguments.seed)
    bisls.fit(bisls.BiSLS(problem), upper_data=batches, lower_data=five_a_class, steps=arguments.steps)

    features["learnt for few labels"] = project(body)
    features["principal components"] = (
        PCA(arguments.size, random_state=0).fit(pictures[lower]).transform(pictures[test])
    )
    features["network trained as usual"] = project(ordinary(network(), pictures[: test.start], labels[: test.start]))
    print(f"\ntest accuracy with{'':12}" + "".join(f"{shots:>10}" for shots in SHOTS) + "   labels a class")
    curves = {name: [accuracy(features[name], labels[test], shots) for shots in SHOTS] for name in LOOKS}
    for name, values in curves.items():
        print(f"{name:30}" + "".join(f"{value:10.1%}" for value in values))
    arguments.out.mkdir(parents=True, exist_ok=True)
    draw(pictures[test], features, labels[test], curves, arguments.out / "representation.png")
    print(f"\npicture: {arguments.out / 'representation.png'}")


def draw(pictures, features, labels, curves, path) -> None:
    """Ten labelled pictures, how far all test pictures are from one another, and the accuracy by the number of labels."""
    ours, raw = curves["learnt for few labels"][0], curves["raw pixels"][0]
    figure = plt.figure(figsize=(9, 5.6), layout="constrained")
    title = f"From one label a class: {ours:.0%} of new pictures read right; {raw:.0%} by raw pixels"
    figure.suptitle(title, fontsize=13, fontweight="bold")
    above, below = figure.subfigures(2, 1, height_ratios=[1, 3.6])
    above.suptitle("One draw of ten pictures, whose labels are all that the linear model is told", fontsize=10)
    side = int(pictures.shape[1] ** 0.5)
    for axes, row in zip(above.subplots(1, 10), few(labels, 1, np.random.default_rng(0)), strict=True):
        axes.imshow(pictures[row].reshape(side, side), cmap="gray_r")
        axes.set(xticks=[], yticks=[])
    order = np.concatenate([np.flatnonzero(labels == label)[:10] for label in range(10)])
    edges = np.searchsorted(labels[order], range(10))
    *maps, axes = below.subplots(1, 3)
    for panel, name in zip(maps, ("raw pixels", "learnt for few labels"), strict=True):
        points = features[name][order]
        distances = np.linalg.norm(points[:, None] - points[None], axis=2)
        panel.imshow(distances, cmap="viridis_r", vmin=0, vmax=np.quantile(distances, 0.95), interpolation="nearest")
        panel.set_xticks(edges + 4.5, range(10), fontsize=9)
        panel.set_yticks(edges + 4.5, range(10), fontsize=9)
        panel.tick_params(length=0)
        panel.set_title(f"Distances, {name}\n(bright: near)", fontsize=10)
    for name, values in curves.items():
        colour, marker = LOOKS[name]
        axes.plot(range(len(SHOTS)), 100 * np.array(values), color=colour, marker=marker, label=name)
    axes.set_xticks(range(len(SHOTS)), SHOTS)
    axes.set(xlabel="labels a class", ylim=(0, 100), box_aspect=1)
    axes.set_title("Accuracy on the others, %\n(mean of 10 draws)", fontsize=10)
    axes.spines[["top", "right"]].set_visible(False)
    below.legend(*axes.get_legend_handles_labels(), frameon=False, fontsize=9, loc="outside lower center", ncols=5)
    figure.savefig(path, dpi=100)


if __name__ == "__main__":
    main()
