"""What must be the same on every rank before a run begins: parameters to the last bit, settings, kinds of data."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from hashlib import blake2b
from typing import Any

import torch
from torch import Tensor

from bisls.ranks import broadcast_, from_all_ranks, world

logger = logging.getLogger(__name__)

SHOWN = 4  # tensors that a message names one by one
SHARED = "(What shares parameters out among the ranks, as ZeroRedundancyOptimizer does, cannot be used here)"
ALIKE = f"build the same model on all of them. {SHARED}"


def agree(call: str, **settings: Any) -> None:
    """Refuse settings that differ from rank to rank.

    Args:
        call: Who asks, for messages: ``fit``.
        settings: Plain values, by the name that the user knows them by.

    Raises:
        ValueError: They differ; on every rank.
    """
    if world() == 1:
        return
    everywhere = from_all_ranks({name: repr(value) for name, value in settings.items()})
    for name in settings:
        own = [ranks.get(name) for ranks in everywhere]
        if len(set(own)) > 1:
            said = ", ".join(f"{value} on {_ranks(where)}" for value, where in _sorted(own).items())
            raise ValueError(
                f"`{call}({name}=...)`: {name} is not the same on every rank ({said}); pass the same on all of them"
            )


def agree_on_parameters(
    call: str,
    parameters: Mapping[str, Sequence[Tensor]],
    names: Sequence[str] = (),
    equal: bool = False,
    cure: str = "",
) -> None:
    """Refuse parameters that are not the same on every rank, to the last bit; or make them so.

    Args:
        call: Who asks, for messages.
        parameters: Lists of tensors, by the name of the argument.
        names: What the tensors of the first list are called, where that is known.
        equal: Write rank 0's numbers into those that differ.
        cure: What would do beside broadcasting and seeds, for the message.

    Raises:
        ValueError: They differ; on every rank.
    """
    if world() == 1:
        return
    own = {name: [(str(t.dtype), tuple(t.shape), digest(t)) for t in tensors] for name, tensors in parameters.items()}
    everywhere = from_all_ranks(own)
    wrong, differing = [], []
    for argument, tensors in parameters.items():
        rows = [ranks[argument] for ranks in everywhere]
        counts = [f"{len(row)} tensors" for row in rows]
        if len(set(counts)) > 1:
            said = ", ".join(f"{count} on {_ranks(where)}" for count, where in _sorted(counts).items())
            raise ValueError(f"`{call}`: {argument} is not the same on every rank: {said}; {ALIKE}")
        for i, tensor in enumerate(tensors):
            kinds = [f"{dtype.removeprefix('torch.')}{list(shape)}" for dtype, shape, _ in (row[i] for row in rows)]
            named = f" ({names[i]})" if i < len(names) and argument == next(iter(parameters)) else ""
            if len(set(kinds)) > 1:
                said = ", ".join(f"{kind} on {_ranks(where)}" for kind, where in _sorted(kinds).items())
                raise ValueError(
                    f"`{call}`: tensor {i}{named} of {argument} is not the same on every rank: {said}; {ALIKE}"
                )
            stamps = [row[i][2] for row in rows]
            if len(set(stamps)) > 1:
                others = [rank for rank, stamp in enumerate(stamps) if stamp != stamps[0]]
                wrong.append(f"tensor {i}{named} of {argument} (shape {tuple(tensor.shape)}) on {_ranks(others)}")
                differing.append(tensor)
    if differing and equal:
        logger.info("%s: rank 0's numbers are written into %s", call, _listed(wrong))
        broadcast_(differing)
    elif differing:
        raise ValueError(
            f"`{call}`: the parameters are not the same on every rank; those of rank 0 differ from {_listed(wrong)}. Each rank "
            "would go its own way by decisions that are made together. Call torch.manual_seed with the same seed on every rank "
            f"before the model is made, or torch.distributed.broadcast each tensor from rank 0{cure}. {SHARED}"
        )


def digest(value: Any) -> bytes:
    """A checksum of tensors, numbers and dataclasses of these: the same only where they are, to the last bit."""
    stamp = blake2b(digest_size=16)
    _update(stamp, value)
    return stamp.digest()


def _update(stamp: Any, value: Any) -> None:
    if isinstance(value, Tensor):
        stamp.update(f"{value.dtype}{tuple(value.shape)}".encode())
        stamp.update(value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    elif is_dataclass(value) and not isinstance(value, type):
        stamp.update(type(value).__name__.encode())
        for field in fields(value):
            _update(stamp, getattr(value, field.name))
    elif isinstance(value, list | tuple):
        stamp.update(f"{len(value)} entries".encode())
        for entry in value:
            _update(stamp, entry)
    elif value is None or isinstance(value, int | float | str):
        stamp.update(repr(value).encode())
    else:  # of what is not known only the kind can be compared
        stamp.update(type(value).__name__.encode())


def _sorted(values: Sequence[Any]) -> dict[Any, list[int]]:
    """The ranks by what they have."""
    found: dict[Any, list[int]] = {}
    for rank, value in enumerate(values):
        found.setdefault(value, []).append(rank)
    return found


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def _listed(entries: Sequence[str]) -> str:
    rest = len(entries) - SHOWN
    return "; ".join(entries[:SHOWN]) + (f"; and {rest} more" if rest > 0 else "")
