"""Which tiles of queries and keys each partition of a program walks: plain integer bodies, legal in Python and in Gluon.

The producer and the consumers of a program never talk about what comes next: each computes the same walk from the same numbers. So
these bodies exist once, and a model in plain Python can play a whole launch with them.
"""

# pyright: reportUndefinedVariable=false
# ("constexpr" marks what a kernel is compiled for; it is a word for Triton and Gluon, not a name here)

from __future__ import annotations

from ..bodies import tile_range

__all__ = ["order", "queries_of_consumer", "queries_of_program", "tiles_of_consumer", "tiles_of_program"]


def order(index, tiles, heads, heads_together, LONGEST: "constexpr"):  # noqa: F821, UP037
    """Place ``index`` in the order of work -> (batch * head index, query tile).

    LONGEST "any": all tiles of one head before the next. "first" or "last": that end of the tile axis has the most work, so it
    is started first, over ``heads_together`` heads at a time, as many as keep their keys and values in the L2 cache.
    """
    if LONGEST == "any":
        head = index // tiles
        tile = index - head * tiles
    else:
        together = index // (heads_together * tiles)
        rest = index - together * heads_together * tiles
        here = min(heads_together, heads - together * heads_together)
        tile = rest // here
        head = together * heads_together + rest - tile * here
        if LONGEST == "last":
            tile = tiles - 1 - tile
    return head, tile


def tiles_of_program(row_lo, row_hi, seqlen_k, upper, lower, BLOCK: "constexpr", HAS_UPPER: "constexpr", HAS_LOWER: "constexpr"):  # noqa: F821, UP037
    """The key tiles ``lo <= tile < hi`` that a program streams for its rows: at least one.

    Rows that see nothing get a tile past the last key: it reads as zeros, and the mask hides it.
    """
    lo, _, _, hi = tile_range(row_lo, row_hi, seqlen_k, upper, lower, BLOCK, HAS_UPPER, HAS_LOWER)
    beyond = (seqlen_k + BLOCK - 1) // BLOCK
    lo = max(lo, (hi <= lo) * beyond)
    return lo, max(hi, lo + 1)


def tiles_of_consumer(
    row_lo, row_hi, lo, hi, seqlen_k, upper, lower, BLOCK: "constexpr", HAS_UPPER: "constexpr", HAS_LOWER: "constexpr"  # noqa: F821, UP037
):
    """``(own_lo, free_lo, free_hi, own_hi)``: what one consumer's rows see of the program's ``[lo, hi)``; at least one tile.

    A consumer that sees nothing visits one tile all the same, outside the free range, so that the mask hides it. Whatever
    ``tile_range`` says, ``lo <= own_lo < own_hi <= hi``: every partition walks exactly ``hi - lo`` tiles.
    """
    own_lo, free_lo, free_hi, own_hi = tile_range(row_lo, row_hi, seqlen_k, upper, lower, BLOCK, HAS_UPPER, HAS_LOWER)
    own_lo = min(max(own_lo, lo), hi - 1)
    own_hi = max(min(own_hi, hi), own_lo + 1)
    return own_lo, free_lo, free_hi, own_hi


def queries_of_program(
    key_lo, key_hi, q_pad, q_start, upper, lower, BLOCK: "constexpr", HAS_UPPER: "constexpr", HAS_LOWER: "constexpr"  # noqa: F821, UP037
):
    """The query tiles ``lo <= tile < hi`` that a program streams past its keys: at least one, which the mask hides if need be.

    The plan transposed: ``kv <= q + upper`` bounds the queries from below, so the two bounds swap their roles. ``q_pad`` is the
    number of queries rounded up to whole tiles: what lies past the end adds exact zeros, without a mask.
    """
    lo, _, _, hi = tile_range(key_lo, key_hi, q_pad, lower - q_start, upper + q_start, BLOCK, HAS_LOWER, HAS_UPPER)
    tiles = q_pad // BLOCK
    lo = min(lo, tiles - 1)
    return lo, max(min(hi, tiles), lo + 1)


def queries_of_consumer(
    key_lo, key_hi, lo, hi, seqlen_k, q_pad, q_start, upper, lower,
    BLOCK: "constexpr", HAS_UPPER: "constexpr", HAS_LOWER: "constexpr",  # noqa: F821, UP037
):  # fmt: skip
    """``(own_lo, free_lo, free_hi, own_hi)``: what the keys of one consumer see of the program's ``[lo, hi)``; at least one tile.

    Free tiles need no mask; keys past the end need one everywhere. A consumer that has no free tile calls all of its tiles masked
    before the free ones if there is an upper bound, and after them otherwise: the kernel has that loop.
    """
    end = min(key_hi, seqlen_k)
    own_lo, free_lo, free_hi, own_hi = tile_range(key_lo, end, q_pad, lower - q_start, upper + q_start, BLOCK, HAS_LOWER, HAS_UPPER)
    own_lo = min(max(own_lo, lo), hi - 1)
    own_hi = max(min(own_hi, hi), own_lo + 1)
    free_lo = min(max(free_lo, own_lo), own_hi)
    free_hi = min(max(free_hi, free_lo), own_hi)
    if (free_lo >= free_hi) | (key_hi > seqlen_k):
        free_lo = own_lo
        if HAS_UPPER:
            free_lo = own_hi
        free_hi = free_lo
    return own_lo, free_lo, free_hi, own_hi
