"""Whether parameters lie in the same memory, so that moving one would move another."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import reduce
from math import gcd

import torch
from torch import Tensor

LARGEST = 2**31  # places: beyond so many it is not looked which of them a tensor has, and neighbours count as one


def overlapping(tensors: Sequence[Tensor]) -> tuple[int, int] | None:
    """Two tensors that have a number in common, the earlier one first; one of them twice where its own numbers share a place.

    Ranges of memory that do not touch are told apart by their ends. Where they do (columns of one matrix, a transpose) each
    number's place is looked at, so tensors that only lie between each other's numbers are apart.
    """
    spans = sorted(_spans(tensors))
    for cluster in _clusters(spans):
        found = _shared(tensors, cluster)
        if found is not None:
            return found
    return None


Span = tuple[str, int, int, int]  # device, first byte, the byte after the last, which tensor


def _spans(tensors: Sequence[Tensor]) -> Iterator[Span]:
    for i, tensor in enumerate(tensors):
        if tensor.numel() == 0 or tensor.layout is not torch.strided:
            continue
        try:
            first = tensor.data_ptr()
        except RuntimeError:  # a tensor without memory of its own
            continue
        if first:
            reach = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
            yield str(tensor.device), first, first + (reach + 1) * tensor.element_size(), i


def _clusters(spans: list[Span]) -> Iterator[list[Span]]:
    """Spans that touch each other, from one end of memory to the other."""
    cluster: list[Span] = []
    end = 0
    for span in spans:
        if cluster and (span[0] != cluster[0][0] or span[1] >= end):
            yield cluster
            cluster, end = [], 0
        cluster.append(span)
        end = max(end, span[2])
    if cluster:
        yield cluster


def _shared(tensors: Sequence[Tensor], cluster: list[Span]) -> tuple[int, int] | None:
    own = [(begin, tensors[i], i) for _, begin, _, i in sorted(cluster, key=lambda span: span[3])]
    if len(own) == 1 and _nested(own[0][1]):
        return None
    first, last = min(span[1] for span in cluster), max(span[2] for span in cluster)
    unit = reduce(gcd, [begin - first for begin, _, _ in own] + [tensor.element_size() for _, tensor, _ in own])
    places = (last - first) // unit
    if places > LARGEST:
        return own[0][2], own[-1][2]
    taken = torch.zeros(places, dtype=torch.int32)
    for begin, tensor, i in own:
        width = tensor.element_size() // unit
        mine = taken.as_strided(
            (*tensor.shape, width), (*(stride * width for stride in tensor.stride()), 1), (begin - first) // unit
        )
        other = int(mine.max())
        if other:
            return other - 1, i
        mine.fill_(i + 1)
        if not _nested(tensor) and int((taken == i + 1).sum()) < tensor.numel() * width:
            return i, i
    return None


def _nested(tensor: Tensor) -> bool:
    """Whether each stride leads beyond all that the shorter ones reach: then no two numbers have one place."""
    reached = 0
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1 and stride <= reached:
            return False
        reached += (size - 1) * stride
    return True
