"""The terms of a mask that are tensors, for tiles that hold several batches and heads at once."""

from __future__ import annotations

import torch

from ..bodies import in_row, same_segment
from ..plan import EMPTY, FREE, MASKED, MaskTensors, kinds_in, table_of, tile_kinds
from ..problem import Problem
from ..spec import Tensors

__all__ = ["TileMask"]


def _part(t: torch.Tensor, dim: int, where: slice) -> torch.Tensor:
    """A slice along a dim, or all of it where one element stands for all."""
    return t if t.shape[dim] == 1 else t[(slice(None),) * dim + (where,)]


class TileMask:
    """``batch``, ``heads`` (of keys) and ``group`` are slices: a tile holds the query heads ``group`` of each key head."""

    def __init__(self, problem: Problem, given: Tensors, block_m: int, block_n: int):
        p, tensors = problem, MaskTensors.of(given) or MaskTensors()
        self.segments = None
        if tensors.segment_q is not None and tensors.segment_k is not None:
            # (batch, heads, group, queries, keys), as all that follows
            self.segments = tensors.segment_q[:, None, None, :, None], tensors.segment_k[:, None, None, None, :]
        self.rows = None
        if tensors.row_start is not None and tensors.row_end is not None:
            self.rows = self._by_group(p, tensors.row_start[..., None]), self._by_group(p, tensors.row_end[..., None])
        self.dense = None if tensors.dense is None else self._by_group(p, tensors.dense)
        table = None if given.plan is None else table_of(p, given, block_m, block_n)
        kinds = tile_kinds(p, tensors, block_m, block_n) if table is None else kinds_in(table)
        self.kinds = self._by_group(p, kinds.cpu())

    @staticmethod
    def _by_group(problem: Problem, t: torch.Tensor) -> torch.Tensor:
        """(batch, heads_q, queries, keys) as (batch, heads_kv, group, queries, keys); sizes of 1 stay."""
        return t[:, :, None] if t.shape[1] == 1 else t.unflatten(1, (problem.heads_kv, problem.group))

    def kinds_of(self, batch: slice, heads: slice, group: slice) -> list[list[int]]:
        """The kind of each (query tile, key tile): FREE if it is free for all that the tile holds, EMPTY likewise."""
        part = _part(_part(_part(self.kinds, 0, batch), 1, heads), 2, group).flatten(0, 2)
        least, largest = part.amin(0), part.amax(0)
        out = torch.full_like(least, MASKED)
        out[least == FREE] = FREE
        out[largest == EMPTY] = EMPTY
        return out.tolist()

    def seen(self, batch: slice, heads: slice, group: slice, queries: slice, keys: slice) -> torch.Tensor:
        """Which pairs of a tile these terms let through: bool, broadcastable to (batch, heads, group, queries, keys)."""

        def part(t: torch.Tensor) -> torch.Tensor:
            for dim, where in enumerate((batch, heads, group, queries, keys)):
                t = _part(t, dim, where)
            return t

        ok = torch.ones((1,) * 5, dtype=torch.bool, device=self._device())
        if self.segments is not None:
            ok = ok & same_segment(*map(part, self.segments))
        if self.rows is not None:
            kv_pos = torch.arange(keys.start, keys.stop, device=ok.device)
            ok = ok & in_row(kv_pos, *map(part, self.rows))
        if self.dense is not None:
            ok = ok & part(self.dense)
        return ok

    def _device(self) -> torch.device:
        held = (self.segments or self.rows or (self.dense,))[0]
        return held.device  # type: ignore[union-attr]
