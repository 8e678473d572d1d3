"""What the saved state of an optimiser may be."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from bisls.optim.groups import OWN, refuse_foreign
from bisls.states import FLAG, Each, Fields, Kind, Maybe, Number, Numbers, Unfit, Whole, shown
from bisls.status import Status

MOST_POWER = 20.0  # of the weights of an average


class Rate(Kind):
    """A learning rate: a number, or a tensor with one, at least 0."""

    def read(self, value: Any, where: str) -> float:
        """The number."""
        plain = isinstance(value, Tensor) and value.numel() == 1 and value.is_floating_point()
        usable = plain and value.layout is torch.strided and not value.is_meta
        return Number(0.0).read(value.item() if usable else value, where)


# what stands in every group: options, counters, and what torch's schedulers note there
GROUP: dict[str, Kind] = {
    "lr": Rate(),
    "weight_decay": Number(0.0),
    "averaging": Maybe(Number(0.0, MOST_POWER)),
    "maximize": FLAG,
    "foreach": Maybe(FLAG),
    "k": Whole(),
    "remembered": Maybe(Number(0.0)),
    "train_mode": FLAG,
    "last_step_size": Number(0.0),
    "last_checks": Whole(),
    "last_status": Whole(0, int(max(Status))),
    "lengths": Number(0.0),
    "unit": Maybe(Number(2.0**-1000, 2.0**1000)),
    "begun": Whole(),
    "look": Whole(),
    "gain": Number(0.0, above=True),
    "vote": Whole(-1, 1),
    **dict.fromkeys(("first_loss", "mean_loss", "last_loss", "low"), Number()),
    **dict.fromkeys(("first_step", "spread", "low_spread"), Number(0.0)),
    **dict.fromkeys(("above", "alive", "dead", "shorter", "returned"), Whole()),
    "limit": Maybe(Number(0.0, above=True)),
    "start": Number(0.0, above=True),
    "direction_t": Whole(),
    **dict.fromkeys(("initial_lr", "max_lr", "min_lr", "swa_lr"), Rate()),
}

# what is kept for each parameter and is no tensor
ENTRY: dict[str, Kind] = {
    **dict.fromkeys(("weight_sum", "noise", "metric", "distance", "share"), Number(0.0)),
    "version": Maybe(Whole()),
    "seen": Whole(),
}


def checked_state(optimizer: Any, state_dict: Any) -> dict[str, Any]:
    """A saved state that an optimiser can go on from, its tensors without graphs.

    Args:
        optimizer: A `bisls.optim.LineOptimizer`; it says what it counts, what it can be told and what belongs together.
        state_dict: What came.

    Raises:
        ValueError: It is the state of another optimiser or another model, or holds what none writes.
    """
    name, params = type(optimizer).__name__, [p for group in optimizer.param_groups for p in group["params"]]
    options = optimizer.defaults.keys() - optimizer._counters.keys()
    call = f"`{name}.load_state_dict(...)`"
    try:
        _shaped(state_dict)
        refuse_foreign(name, state_dict, optimizer.defaults.keys() | optimizer._counters.keys(), params)
        groups = state_dict["param_groups"]
        for i, group in enumerate(groups):
            for key, kind in {**GROUP, **_numbers(options)}.items():
                if key in group:
                    kind.read(group[key], f"state['param_groups'][{i}][{key!r}]")
            for key in set(options) - set(OWN):
                if group.get(key) != groups[0].get(key):
                    raise Unfit(f"state['param_groups'][{i}][{key!r}] is another than that of the first group")
        first = {**groups[0], "lr": max(Rate().read(group["lr"], "lr") for group in groups) or 1.0}
        try:
            keeps = optimizer._rule(first).keeps()
        except (ValueError, TypeError, OverflowError) as error:
            raise Unfit(f"state['param_groups'][0] cannot be used ({error})") from error
        if first.get("unit", 1.0) is None and first["lengths"] > 0.0:
            raise Unfit("state['param_groups'][0]['unit'] is None, although there were gradients")
        own_direction = optimizer.param_groups[0]["direction"]
        if first.get("direction") != own_direction:
            raise Unfit(f"the state is of direction={first.get('direction')}, this optimiser has {own_direction}")
        keeps.read(first["noted"], "state['param_groups'][0]['noted']")
        own = _entries(state_dict, params, optimizer._together)
        if not first["train_mode"] and not any("iterate" in entry for entry in own.values()):
            raise Unfit("state['param_groups'][0]['train_mode'] is False, and the iterates to go back to are not there")
    except Unfit as error:
        raise ValueError(f"{call}: {error}; nothing was loaded") from error
    return {**state_dict, "state": {**state_dict["state"], **own}}


def _shaped(state_dict: Any) -> None:
    """Refuse what is not even a mapping of parameters to mappings and a list of groups."""
    if not isinstance(state_dict, dict) or not {"state", "param_groups"} <= state_dict.keys():
        return  # said elsewhere
    Each(Fields({"params": Each(_Index())}, rest=_Index(any_value=True))).read(
        state_dict["param_groups"], "state['param_groups']"
    )
    if not state_dict["param_groups"]:
        raise Unfit("state['param_groups'] is empty")
    ids = [index for group in state_dict["param_groups"] for index in group["params"]]
    if len(set(ids)) < len(ids):
        raise Unfit("state['param_groups'] names a parameter twice")
    if not isinstance(state_dict["state"], Mapping):
        raise Unfit(f"state['state'] is {shown(state_dict['state'])}; it must be a mapping")
    for index, entry in state_dict["state"].items():
        if index in ids and not isinstance(entry, Mapping):
            raise Unfit(f"state['state'][{index!r}] is {shown(entry)}; it must be a mapping")


class _Index(Kind):
    """What stands for a parameter: its number, or its name."""

    def __init__(self, any_value: bool = False):
        self.any_value = any_value

    def read(self, value: Any, where: str) -> Any:
        """The value itself."""
        if not self.any_value and (not isinstance(value, int | str) or isinstance(value, bool)):
            raise Unfit(f"{where} is {shown(value)}; it must be the number of a parameter")
        return value


def _numbers(options: Iterable[str]) -> dict[str, Kind]:
    """The numbers that only some optimisers are told; the rule knows their ranges."""
    return {key: Maybe(Number()) for key in options if key not in GROUP}


def _entries(
    state_dict: dict[str, Any], params: Sequence[Tensor], together: Sequence[str]
) -> dict[Any, dict[str, Any]]:
    """What is kept for each parameter."""
    ids = [index for group in state_dict["param_groups"] for index in group["params"]]
    found: dict[Any, dict[str, Any]] = {}
    for index, p in zip(ids, params, strict=False):
        entry, where = state_dict["state"].get(index), f"state['state'][{index!r}]"
        if entry is None:
            continue
        found[index] = dict(entry)
        for key in ("average", "iterate", "z", "start", "squares", "direction_m", "direction_g"):
            if key in entry:
                found[index][key] = _alike(p, entry[key], f"{where}[{key!r}]", wide=key != "iterate")
        for key, kind in ENTRY.items():
            if key in entry:
                kind.read(entry[key], f"{where}[{key!r}]")
        lacks = [key for key in together if key not in entry] if entry.get("weight_sum") else []
        if lacks:
            raise Unfit(f"{where} lacks {', '.join(lacks)}")
    return found


def _alike(p: Tensor, value: Any, where: str, wide: bool) -> Tensor:
    """A point that the parameter could be put to, in single precision at least where it is averaged."""

    def wrong(own: Tensor) -> str:
        held = bool(torch.isfinite(own.to(p.dtype)).all())
        return "" if held else f"has numbers that its parameter, in {str(p.dtype).removeprefix('torch.')}, cannot hold"

    Numbers(tuple(p.shape), wrong=wrong).read(value, where)
    return value.detach().to(torch.promote_types(p.dtype, torch.float32)) if wide else value.detach()
