"""``TilePlan``: which tiles of the score matrix are empty, which need the mask and which do not, in closed form.

EMPTY and FREE are exact claims (no pair, every pair of the tile is seen); MASKED is always allowed. The kernels call the same
``bodies.tile_range`` for themselves, so the plan here is for pictures, counts, schedules and tests.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .bodies import tile_range
from .problem import Problem

__all__ = ["EMPTY", "FREE", "MASKED", "TilePlan"]

EMPTY, MASKED, FREE = 0, 1, 2


@dataclass(frozen=True)
class TilePlan:
    """The tiles of one problem for tiles of ``block_m`` queries by ``block_n`` keys."""

    problem: Problem
    block_m: int
    block_n: int

    @property
    def m_blocks(self) -> int:
        return -(-self.problem.seqlen_q // self.block_m)

    @property
    def n_blocks(self) -> int:
        return -(-self.problem.seqlen_k // self.block_n)

    def keys_of(self, m_block: int) -> tuple[int, int, int, int]:
        """``(lo, free_lo, free_hi, hi)`` of the key tiles that query tile ``m_block`` visits."""
        p = self.problem
        upper, lower, has_upper, has_lower = p.bounds
        first = m_block * self.block_m
        last = min(first + self.block_m, p.seqlen_q)
        return tile_range(
            p.q_start + first, p.q_start + last, p.seqlen_k, upper, lower, self.block_n, has_upper, has_lower
        )

    def queries_of(self, n_block: int) -> tuple[int, int, int, int]:
        """The same for the query tiles that key tile ``n_block`` visits: the transposed plan of the backward pass.

        ``kv <= q + upper`` bounds queries from below by ``kv - upper``, so the two bounds swap their roles.
        """
        p = self.problem
        upper, lower, has_upper, has_lower = p.bounds
        first = n_block * self.block_n
        last = min(first + self.block_n, p.seqlen_k)
        return tile_range(
            first, last, p.seqlen_q, lower - p.q_start, upper + p.q_start, self.block_m, has_lower, has_upper
        )

    def tiles(self) -> torch.Tensor:
        """An int8 tensor (m_blocks, n_blocks) of EMPTY, MASKED or FREE."""
        out = torch.zeros(self.m_blocks, self.n_blocks, dtype=torch.int8)
        for m in range(self.m_blocks):
            lo, free_lo, free_hi, hi = self.keys_of(m)
            out[m, lo:hi] = MASKED
            out[m, free_lo:free_hi] = FREE
        return out

    def counts(self) -> tuple[int, int, int]:
        """How many tiles are empty, masked and free (for one head)."""
        free = masked = 0
        for m in range(self.m_blocks):
            lo, free_lo, free_hi, hi = self.keys_of(m)
            free += free_hi - free_lo
            masked += (hi - lo) - (free_hi - free_lo)
        return self.m_blocks * self.n_blocks - masked - free, masked, free
