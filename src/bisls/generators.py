"""Random generators that losses and data bring with them: found, saved, and put back where they are the same as then."""

from __future__ import annotations

import logging
import random
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from bisls.randomness import packed, packed_kind, put_back, state_of, unpacked
from bisls.states import Anything, Each, Fields, Kind, Unfit, shown
from bisls.surroundings import Surroundings

logger = logging.getLogger(__name__)


class Generators:
    """Generators in the order in which they are met. Those whose state is not like that of their kind are left out.

    Args:
        found: The generators.
    """

    def __init__(self, found: Sequence[Any]):
        self.own = [generator for generator in found if _plain(generator)]

    @classmethod
    def of(cls, *roots: Any, without: Sequence[Any] = ()) -> Generators:
        """Those that some data or functions can reach, but for some that are known already."""
        known = {id(generator) for generator in without}
        return cls([generator for generator in Surroundings(*roots).generators if id(generator) not in known])

    @property
    def kinds(self) -> list[str]:
        """What they are, in words."""
        return [_named(generator) for generator in self.own]

    def states(self) -> list[Any]:
        """Where they are, for `saved` and `restore`."""
        return [state_of(generator) for generator in self.own]

    def saved(self, states: Sequence[Any] | None = None) -> list[dict[str, Any]]:
        """Where they are, or were, as a checkpoint holds it."""
        now = self.states() if states is None else states
        return [{"kind": kind, "state": packed(own)} for kind, own in zip(self.kinds, now, strict=True)]

    def restore(self, states: Sequence[Any]) -> None:
        """Put them back to what `states` gave."""
        for generator, state in zip(self.own, states, strict=True):
            put_back(generator, state)

    def load(self, saved: Sequence[Mapping[str, Any]], whose: str) -> None:
        """Put them back to what `saved` gave; left as they are, with a warning, where they were others.

        Args:
            saved: As `keeps` reads it.
            whose: Who has them, for the warning; nobody warns where this is empty.
        """
        then = [str(own["kind"]) for own in saved]
        if then == self.kinds:
            self.restore([unpacked(own["state"]) for own in saved])
        elif whose:
            logger.warning(
                "%s: the random generators in reach were %s when the run was saved, and are %s; they stay as they are, and draw "
                "other numbers than the run would have drawn",
                whose,
                ", ".join(then) or "none",
                ", ".join(self.kinds) or "none",
            )

    def keeps(self) -> Kind:
        """What a checkpoint may hold of them."""
        return _Saved(self)


class _Saved(Kind):
    """Where generators were: like the present states, if these are the same generators."""

    def __init__(self, now: Generators):
        self.now = now

    def read(self, value: Any, where: str) -> list[Any]:
        if not isinstance(value, list) or not all(isinstance(own, Mapping) for own in value):
            raise Unfit(f"{where} is {shown(value)}; it must be a list of what generators were and where")
        for i, own in enumerate(value):
            if own.keys() != {"kind", "state"} or not isinstance(own["kind"], str):
                raise Unfit(f"{where}[{i}] is {shown(own)}; it must have a kind, which is text, and a state")
        if [own["kind"] for own in value] != self.now.kinds:
            return value  # that they are others is said when they are to be put back
        kinds = [Fields({"kind": Anything(), "state": packed_kind(own["state"])}) for own in self.now.saved()]
        return Each(kinds).read(value, where)


def of_loader(loader: Any) -> list[torch.Generator]:
    """The generators that a loader and its samplers bring with them, each once."""
    found = [getattr(part, "generator", None) for part in (loader, *samplers(loader))]
    return list({id(own): own for own in found if isinstance(own, torch.Generator)}.values())


def samplers(loader: Any) -> list[Any]:
    """The samplers of a loader of torch, each once."""
    batch_sampler = getattr(loader, "batch_sampler", None)
    found = (getattr(loader, "sampler", None), batch_sampler, getattr(batch_sampler, "sampler", None))
    return list({id(sampler): sampler for sampler in found if sampler is not None}.values())


def _named(generator: Any) -> str:
    name = f"{type(generator).__module__}.{type(generator).__qualname__}"
    if isinstance(generator, torch.Generator):
        return f"torch.Generator on {generator.device.type}"
    if isinstance(generator, np.random.Generator):
        return f"numpy.random.Generator of {type(generator.bit_generator).__name__}"
    return "numpy.random.RandomState" if isinstance(generator, np.random.RandomState) else name


def _plain(generator: Any) -> bool:
    """Whether the state of a generator is one that `packed` knows; a user's own kind may have any."""
    if isinstance(generator, random.Random):
        own = type(generator)
        return own.getstate is random.Random.getstate and own.setstate is random.Random.setstate
    return True
