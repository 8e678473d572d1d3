"""The optimisers that train: ours, torch's on a grid, and others that ask for no learning rate, at their defaults."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch
from torch import nn

from bisls import optim


@dataclass(frozen=True)
class Entry:
    """One way to train.

    Attributes:
        make: From a model and the number of steps, an optimiser.
        call: "loss": ``step`` with a closure that returns the loss; "after": ``step(loss=...)`` after backward; "torch": plain.
        package: What must be installed.
        grid: The grid it is a point of; empty for those with nothing to set.
    """

    make: Callable[[nn.Module, int], Any]
    call: str = "torch"
    package: str = "torch"
    grid: str = ""

    @property
    def installed(self) -> bool:
        return find_spec(self.package) is not None


class Averaged:
    """DoG with the averager that its authors recommend; eval() shows the average."""

    def __init__(self, model: nn.Module, layerwise: bool):
        import dog

        kind = dog.LDoG if layerwise else dog.DoG
        self.model, self.optimizer = model, kind(model.parameters())
        self.averager = dog.PolynomialDecayAverager(model)

    def zero_grad(self) -> None:
        self.optimizer.zero_grad()

    def step(self) -> None:
        self.optimizer.step()
        self.averager.step()

    @torch.no_grad()
    def eval(self) -> None:
        for p, average in zip(self.model.parameters(), self.averager.averaged_model.parameters(), strict=True):
            p.copy_(average)


def _plain(kind: Any, rate: float, cosine: bool, **settings: Any) -> Callable[[nn.Module, int], Any]:
    def make(model: nn.Module, steps: int) -> Any:
        optimizer = kind(model.parameters(), lr=rate, **settings)
        if cosine:
            scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
            optimizer.register_step_post_hook(lambda *_: scheduler.step())
        return optimizer

    return make


def _of(package: str, name: str, **settings: Any) -> Callable[[nn.Module, int], Any]:
    return lambda model, steps: getattr(__import__(package), name)(model.parameters(), **settings)


def _algoperf(model: nn.Module, steps: int) -> Any:
    """Schedule-free AdamW with the constants of AlgoPerf's self-tuning winner."""
    import schedulefree

    return schedulefree.AdamWScheduleFree(
        model.parameters(), lr=0.0025, betas=(0.9, 0.9955), weight_decay=0.081, warmup_steps=max(1, round(0.02 * steps))
    )


ADAM, SGD = (3e-4, 1e-3, 3e-3, 1e-2, 3e-2), (0.01, 0.03, 0.1, 0.3)
KNOBS = (1e-3, 1e-2, 1e-1, 1.0, 1e1, 1e2, 1e3)
ENTRIES: dict[str, Entry] = {
    "bisls Auto": Entry(lambda model, steps: optim.Auto(model.parameters()), "loss", "bisls"),
    "schedule-free AdamW": Entry(_of("schedulefree", "AdamWScheduleFree"), package="schedulefree"),
    "schedule-free, AlgoPerf": Entry(_algoperf, package="schedulefree"),
    "Prodigy": Entry(_of("prodigyopt", "Prodigy"), package="prodigyopt"),
    "D-Adaptation": Entry(_of("dadaptation", "DAdaptAdam"), package="dadaptation"),
    "MomoAdam": Entry(_of("momo", "MomoAdam"), "after", "momo"),
    "DoG, averaged": Entry(lambda model, steps: Averaged(model, False), package="dog"),
    "LDoG, averaged": Entry(lambda model, steps: Averaged(model, True), package="dog"),
}
OURS = "bisls Auto"
RIVALS = tuple(name for name in ENTRIES if name != OURS)
for _cosine in (False, True):
    _name = "tuned, cosine" if _cosine else "tuned"
    for _rate in ADAM:
        ENTRIES[f"Adam {_rate:g}{', cosine' * _cosine}"] = Entry(_plain(torch.optim.Adam, _rate, _cosine), grid=_name)
    for _rate in SGD:
        _made = _plain(torch.optim.SGD, _rate, _cosine, momentum=0.9)
        ENTRIES[f"SGD {_rate:g}{', cosine' * _cosine}"] = Entry(_made, grid=_name)
for _knob in KNOBS:  # where the first trials begin: nothing should depend on it
    ENTRIES[f"bisls Auto, lr {_knob:g}"] = Entry(
        lambda model, steps, knob=_knob: optim.Auto(model.parameters(), lr=knob), "loss", "bisls", grid="knob"
    )
