"""Asking for runs by name: the records come back under the same names, as many as were asked for."""

from __future__ import annotations

from collections.abc import Collection, Generator, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from bisls.experiments.base import Config, RunRecord

Name = TypeVar("Name", bound=Hashable)
Pair = tuple[float, float]


def gather(
    wanted: Mapping[Name, Sequence[Config]],
) -> Generator[Sequence[Config], Sequence[RunRecord], dict[Name, list[RunRecord]]]:
    """Ask for named lists of runs, all at once."""
    configs = [config for group in wanted.values() for config in group]
    records = (yield configs) if configs else ()
    if len(records) != len(configs):
        raise ValueError(f"asked for {len(configs)} runs, was sent {len(records)} records")
    left = iter(records)
    return {name: [next(left) for _ in group] for name, group in wanted.items()}


def over_seeds(
    seeds: Iterable[int], wanted: Mapping[Name, Config]
) -> Generator[Sequence[Config], Sequence[RunRecord], dict[Name, list[RunRecord]]]:
    """Ask for named runs, each with every seed."""
    return (yield from gather(spread(seeds, wanted)))


def spread(seeds: Iterable[int], wanted: Mapping[Name, Config]) -> dict[Name, list[Config]]:
    """Each run with every seed, whatever its own."""
    each = tuple(seeds)
    return {name: [replace(config, seed=seed) for seed in each] for name, config in wanted.items()}


@dataclass(frozen=True)
class Tuned:
    """A method with constant steps, tuned.

    Attributes:
        pair: alpha and beta with the lowest final loss on the first seed, of those that no seed loses.
        tried: All pairs that were.
        runs: The best pair, one run for each seed.
        lost: Pairs that were better on the first seed and diverge on another.
    """

    pair: Pair
    tried: Collection[Pair]
    runs: Sequence[RunRecord]
    lost: Sequence[Pair] = ()

    def __str__(self) -> str:
        edge = at_edge(self.pair, self.tried)
        lost = "".join(f"; {alpha:g} and {beta:g} diverge on another seed" for alpha, beta in self.lost)
        return f"alpha = {self.pair[0]:g}, beta = {self.pair[1]:g} (best of {len(self.tried)} pairs{edge}{lost})"


def at_edge(best: Pair, tried: Collection[Pair]) -> str:
    """Which of a pair of steps has nothing beyond it among those that were tried, for a text; empty where neither has.

    Upper steps are compared with those that were tried with the same lower step.

    Examples:
        >>> at_edge((10.0, 0.1), [(1.0, 0.1), (10.0, 0.1)]), at_edge((2.0, 0.1), [(1.0, 0.1), (2.0, 0.1), (4.0, 0.1)])
        ('; alpha at the edge of the grid', '')
    """
    alphas = {alpha for alpha, beta in tried if beta == best[1]}
    betas = {beta for _, beta in tried}
    found = {"alpha": (best[0], alphas), "beta": (best[1], betas)}
    names = [name for name, (value, all_) in found.items() if len(all_) > 1 and value in (min(all_), max(all_))]
    return f"; {' and '.join(names)} at the edge of the grid" if names else ""
