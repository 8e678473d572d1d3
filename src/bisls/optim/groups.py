"""What a parameter group, or a saved state, must be before an optimiser takes it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from bisls._check import FLAG, POSITIVE, Wanted, iterable, number, optional, require_argument, settled, shown
from bisls.overlap import overlapping
from bisls.ranks import WHOLE, sharded

MOST_POWER = 20  # of the weights of an average; (k + 1)^20 can be summed for as long as anybody trains
DECAY = number("[0, inf)", "must be a number, at least 0 and finite")


def _power(value: Any) -> Any:
    if value is None or isinstance(value, bool):
        return 0.0 if value else None
    return number(f"[0, {MOST_POWER}]").read(value)


# what every optimiser can be told
OPTIONS: dict[str, Wanted] = {
    "lr": POSITIVE,
    "averaging": Wanted(f"must be True, False, or a power from 0 to {MOST_POWER}", _power),
    "weight_decay": DECAY,
    "maximize": FLAG,
    "foreach": optional(FLAG),
}
OWN = ("lr", "weight_decay")  # the options that may differ from group to group
# what may stand in a group without being an option: names, and what torch's schedulers note there
NOTES = {"params", "param_names", "name", "initial_lr", "max_lr", "min_lr", "swa_lr"}
LATER = {
    "weight_decay": 0.0,
    "direction": None,
    "direction_t": 0,
}  # options that older states do not have, and what they then were


def listed_params(name: str, params: Any) -> list[Any]:
    """What torch takes as parameters, as a list: tensors, named tensors, or groups."""
    where = f"`{name}(params=...)`"
    if isinstance(params, Tensor):
        raise ValueError(f"{where} must be an iterable of tensors or dicts; put the tensor into a list: [tensor]")
    if isinstance(params, torch.nn.Module):
        raise ValueError(f"{where} must be an iterable of tensors or dicts, got a module; pass module.parameters()")
    if isinstance(params, str | bytes | Mapping | Set) or not iterable(params):
        raise ValueError(
            f"{where} must be a list of tensors or dicts, or model.parameters(); got {type(params).__name__}"
        )
    listed = list(params)
    if not listed:
        raise ValueError(f"{where} is empty; pass model.parameters() or a list of tensors")
    if not any(isinstance(own, dict) for own in listed):
        check_tensors(where, listed)
    return listed


def check_tensors(where: str, tensors: Sequence[Any]) -> None:
    """Refuse what is no tensor, or a tensor that torch would refuse, with the names that belong to it."""
    for i, own in enumerate(tensors):
        tensor = own[1] if isinstance(own, tuple) and len(own) == 2 and isinstance(own[0], str) else own
        if not isinstance(tensor, Tensor):
            raise ValueError(f"{where}: entry {i} is a {type(own).__name__}, not a tensor")
        if sharded(tensor):
            raise ValueError(f"{where}: tensor {i} (shape {tuple(tensor.shape)}) is {sharded(tensor)}: {WHOLE}")
        if not (tensor.is_leaf or tensor.retains_grad):
            raise ValueError(
                f"{where}: tensor {i} (shape {tuple(tensor.shape)}) is the result of a computation, not a leaf; optimise the "
                "tensor it was computed from"
            )


def settings_of(groups: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The options and counts of groups by name: the value, or a list of one for each group where there are several."""
    names = sorted({name for group in groups for name in group} - {"params", "param_names", "foreach", "name"})
    return {name: [group.get(name) for group in groups] if len(groups) > 1 else groups[0][name] for name in names}


def check_overlap(name: str, tensors: Sequence[Tensor]) -> None:
    """Refuse two parameters that lie in the same memory: moving one would move the other."""
    shared = overlapping(tensors)
    if shared is not None:
        i, j = shared
        what = f"`{name}(params=...)`: tensor {j} (shape {tuple(tensors[j].shape)})"
        with_whom = "has numbers that share one place in" if i == j else f"shares its memory with tensor {i}, whose"
        end = " memory" if i == j else f" shape is {tuple(tensors[i].shape)}"
        raise ValueError(f"{what} {with_whom}{end}; copy it: tensor.detach().clone().requires_grad_()")


def check_keys(
    name: str, group: Any, options: Iterable[str], kept: Iterable[str], known: Sequence[Tensor] = ()
) -> None:
    """Refuse what is no group, and a key that nobody would read.

    Args:
        name: The optimiser's.
        group: The group as the user gave it.
        options: What the optimiser can be told.
        kept: What it writes into groups by itself.
        known: The tensors that the optimiser has already.
    """
    if not isinstance(group, dict) or "params" not in group:
        what = f"must be a dict such as {{'params': [...]}}, got {shown(group)}"
        call = f"`{name}.add_param_group(param_group=...)`" if known else f"`{name}(params=[...])`"
        raise ValueError(f"{call}: a group {what}")
    own = group["params"]
    if isinstance(own, str | bytes | Mapping | Set) or not (isinstance(own, Tensor) or iterable(own)):
        raise ValueError(f"`{name}(params=[{{'params': {shown(own)}}}])`: params of a group must be a list of tensors")
    if not isinstance(own, Tensor | list | tuple):
        group["params"] = own = list(own)
    where = f"`{name}(params=...)`"
    check_tensors(where, [own] if isinstance(own, Tensor) else own)
    there = {id(tensor) for tensor in known}
    for i, entry in enumerate([own] if isinstance(own, Tensor) else own):
        if id(entry[1] if isinstance(entry, tuple) else entry) in there:
            raise ValueError(
                f"{where}: tensor {i} of a group is in another group already; each parameter belongs to one"
            )
    unknown = sorted(str(key) for key in group.keys() - set(options) - set(kept) - NOTES)
    if unknown:
        key = unknown[0]
        shared = ", ".join(sorted(set(options) - set(OWN)))
        raise ValueError(
            f"`{name}(params=[{{{key!r}: {group[key]!r}, ...}}])`: {key} is no option of {name}. A group may have params, name, "
            f"{' and '.join(OWN)} of its own; {shared} are the same in all groups"
        )


def check_group(name: str, group: dict[str, Any], first: dict[str, Any], options: Iterable[str]) -> None:
    """Refuse numbers and tensors that the optimiser cannot work with."""
    group["lr"] = settled(name, "lr", group["lr"], number("[0, inf)", "of a group must be at least 0 and finite"))
    group["weight_decay"] = settled(name, "weight_decay", group["weight_decay"], DECAY)
    for key in sorted(set(options) - set(OWN)):
        if key in OPTIONS:
            group[key] = settled(name, key, group.get(key), OPTIONS[key])
        mine, theirs = group.get(key), first.get(key)
        rule = f"must be the same in all groups ({theirs!r}); {' and '.join(OWN)} may differ"
        require_argument(name, key, mine, mine is theirs or (type(mine) in (int, float, bool) and mine == theirs), rule)
    for p in group["params"]:
        if not p.is_floating_point():
            raise ValueError(
                f"`{name}(params=...)`: a tensor of shape {tuple(p.shape)} has dtype {p.dtype}; only real "
                "floating-point parameters can be optimised (split a complex one with torch.view_as_real)"
            )
        if p.layout is not torch.strided:
            raise ValueError(f"`{name}(params=...)`: a tensor of shape {tuple(p.shape)} is sparse; use to_dense()")


def refuse_foreign(name: str, state_dict: Any, wanted: Iterable[str], params: Iterable[Tensor]) -> None:
    """Raise where a saved state is none, is of another optimiser, or of another model."""
    call = f"`{name}.load_state_dict(...)`"
    if not isinstance(state_dict, dict):
        raise ValueError(f"{call}: must be what state_dict() gave, got {type(state_dict).__name__}")
    missing = [key for key in ("state", "param_groups") if key not in state_dict]
    if missing:
        raise ValueError(f"{call}: the state lacks {', '.join(missing)}; pass what state_dict() gave")
    needed = set(wanted) - {"foreach"} - LATER.keys()
    groups = state_dict["param_groups"]
    lacks = sorted({key for group in groups for key in needed - group.keys()})
    if lacks:
        raise ValueError(f"{call}: the state is of another optimiser, its groups lack {', '.join(lacks)}")
    for index, p in zip(chain.from_iterable(group["params"] for group in groups), params, strict=False):
        for key, value in state_dict["state"].get(index, {}).items():
            if isinstance(value, Tensor) and value.dim() and value.shape != p.shape:
                raise ValueError(
                    f"{call}: the state is of another model: {key} of parameter {index} has shape {tuple(value.shape)}, its "
                    f"parameter {tuple(p.shape)}"
                )
