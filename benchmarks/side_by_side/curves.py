"""Scores along a run: which snapshots are looked at, and what is kept of them."""

from __future__ import annotations

from typing import Any

import numpy as np


def curve(kept: np.ndarray, known: dict[int, float], arrivals: list[int | None]) -> dict[str, Any]:
    order = sorted(known)
    return {
        "iterations": [int(kept[index]) for index in order],
        "values": [known[index] for index in order],
        "arrivals": [None if index is None else int(kept[index]) for index in arrivals],
    }


def thinned(count: int, share: float = 0.05) -> list[int]:
    """Indices 0 to count - 1: all at first, then ever fewer; the last one always."""
    found, index = [], 0
    while index < count - 1:
        found.append(index)
        index = max(index + 1, int(index * (1 + share)))
    return [*found, count - 1] if count else []
