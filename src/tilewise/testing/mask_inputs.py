"""Masks that come as tensors, for the gauntlet: made on the CPU, and taken to the device of a call."""

from __future__ import annotations

import dataclasses

import torch

from ..masks import documents
from ..spec import Spec, Tensors
from ..terms import row_intervals, segments

__all__ = ["lengths", "own_intervals", "placed", "tiles_of_sixteen", "unsorted_ids"]


def placed(spec: Spec, device: torch.device | str) -> Spec:
    """The spec with its tensors on a device, strides and all."""
    return dataclasses.replace(spec, tensors=Tensors(*(None if t is None else t.to(device) for t in spec.tensors)))


def lengths(*sizes: int) -> Spec:
    return documents(torch.tensor(sizes, dtype=torch.int32))


def unsorted_ids(batch: int, n: int, m: int) -> Spec:
    """Ids in no order, on both sides, and one that only a query has."""
    q_ids = (torch.arange(batch * n, dtype=torch.int32) * 7 % 5).view(batch, n)
    return segments(q_ids, (torch.arange(batch * m, dtype=torch.int32) * 3 % 4).view(batch, m))


def own_intervals(heads: int, n: int, m: int) -> Spec:
    """Intervals of every head its own: they begin and end at tiles' edges and beside them, and one row in five sees nothing."""
    row = torch.arange(heads * n, dtype=torch.int32).view(heads, n)
    start = row // 16 * 16 % m + row % 3 - 1
    return row_intervals(start, start + torch.where(row % 5 == 0, 0, 16 + row % 34))


def tiles_of_sixteen(batch: int, heads: int, n: int, m: int) -> torch.Tensor:
    """A dense mask of whole tiles of 16 x 16, some seen and some hidden, with a hole of one pair in a tile here and there."""
    q, k = torch.arange(n)[:, None], torch.arange(m)[None, :]
    place = torch.arange(batch * heads).view(batch, heads, 1, 1)
    seen = (q // 16 * 5 + k // 16 * 3 + place) % 4 > 1
    return seen & ((q * 7 + k + place) % 97 > 0)
