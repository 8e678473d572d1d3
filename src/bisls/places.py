"""The place in the data as a checkpoint has it: what each kind of `Feed` may find there."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from bisls.feed import Feed
from bisls.generators import of_loader
from bisls.randomness import random_kind
from bisls.states import FLAG, Anything, Choice, Each, Fields, Kind, Maybe, Numbers, Unfit, Whole

AHEAD = 1000  # no iteration takes more batches than this, or than it says


class Place(Kind):
    """What the place in some data may be after k iterations.

    Args:
        feed: The data.
        k: Iterations that were made: so many at most have taken batches, which are to be left out one by one.
        lower_iters: Lower batches an iteration.
    """

    def __init__(self, feed: Feed, k: int, lower_iters: int):
        self.feed = feed
        self.kind = _kind(feed, k, lower_iters)

    def read(self, value: Any, where: str) -> Any:
        """The place; that of another kind of data is refused in the words of the data."""
        if isinstance(value, Mapping) and isinstance(value.get("kind"), str):
            try:
                Feed.load_state_dict(self.feed, value)
            except ValueError as error:
                raise Unfit(str(error)) from error
        return self.kind.read(value, where)


def _kind(feed: Feed, k: int, lower_iters: int) -> Kind:
    name, most = type(feed).__name__, (k + 1) * max(lower_iters, AHEAD)
    own = {"kind": Choice((name,))}
    others = {"others": feed.others.keeps()}  # which earlier versions did not keep
    if name == "_Calls":
        return Fields({**own, "taken": Whole(), "own": Anything()}, others)
    if name == "_Stateful":
        return Fields({**own, "taken": Whole(), "begun": FLAG, "own": Anything()})
    if name not in ("_Loader", "_Iterator"):
        return Fields(own, rest=Anything())
    sizes = {len(one.get_state()) for one in of_loader(feed.data)}
    # that there are others than then is said by the feed
    places = Each(Numbers((sizes.pop() if len(sizes) == 1 else None,), (torch.uint8,)))
    counts = {"epoch": Whole(0, most), "taken": Whole(0, most), "total": Whole(0, most), "length": Maybe(Whole())}
    start = Maybe(Fields({"random": random_kind(), "generators": places}, others))
    return _Epoch({**own, **counts, "start": start, "generators": places}, others)


class _Epoch(Fields):
    """A place within an epoch, whose counts belong together."""

    def read(self, value: Any, where: str) -> dict[str, Any]:
        """The place."""
        own = super().read(value, where)
        if own["start"] is not None and len(own["start"]["generators"]) != len(own["generators"]):
            raise Unfit(f"{where} has another number of generators at the start of its epoch")
        if own["taken"] > own["total"] or own["epoch"] > own["total"] or (own["start"] is None) != (own["total"] == 0):
            raise Unfit(
                f"{where} does not add up: {own['taken']} batches of epoch {own['epoch']}, {own['total']} in all, from "
                f"{'no' if own['start'] is None else 'a'} random state"
            )
        return own
