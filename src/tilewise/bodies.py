"""The bodies that every backend shares: written once, run as plain Python, PyTorch, Triton, Gluon and in the interpreter.

They hold operators only (no loads, no shapes, no library calls), so that one text is legal in all of those languages. Division
truncates toward zero in Triton and floors in Python: operands are made non-negative before every division.
"""

# pyright: reportUndefinedVariable=false
# ("constexpr" marks what a kernel is compiled for; it is a word for Triton and Gluon, not a name here)

from __future__ import annotations

__all__ = [
    "alibi",
    "allowed",
    "bound_tile",
    "in_row",
    "row_tile",
    "same_segment",
    "segment_tile",
    "softcap_slope",
    "tile_range",
]


def allowed(q_pos, kv_pos, kv_end, upper, lower, HAS_UPPER: "constexpr", HAS_LOWER: "constexpr"):  # noqa: F821, UP037
    """May the query at ``q_pos`` see the key at ``kv_pos``? The one mask rule, elementwise, on positions that broadcast."""
    ok = kv_pos < kv_end
    if HAS_UPPER:
        ok = ok & (kv_pos <= q_pos + upper)
    if HAS_LOWER:
        ok = ok & (kv_pos >= q_pos - lower)
    return ok


def same_segment(q_segment, k_segment):
    """Do the query and the key carry the same segment id (document)?"""
    return q_segment == k_segment


def in_row(kv_pos, row_start, row_end):
    """Does the key lie in the query's own interval ``row_start <= kv_pos < row_end``?"""
    return (kv_pos >= row_start) & (kv_pos < row_end)


def softcap_slope(t):
    """The derivative of ``cap tanh(s / cap)`` from ``t = tanh(s / cap)``."""
    return 1.0 - t * t


def alibi(s, slope, distance):
    """The score less ``slope`` for every position between query and key; ``distance`` is at least 0."""
    return s - slope * distance


def tile_range(row_lo, row_hi, col_end, upper, lower, BLOCK: "constexpr", HAS_UPPER: "constexpr", HAS_LOWER: "constexpr"):  # noqa: F821, UP037
    """Which tiles of ``BLOCK`` columns do the rows at positions ``row_lo <= row < row_hi`` see?

    Returns ``(lo, free_lo, free_hi, hi)``: tiles below ``lo`` and from ``hi`` on are empty, tiles in ``[free_lo, free_hi)`` need
    no mask, the rest need one. A row sees column ``c`` if ``row - lower <= c <= row + upper`` and ``0 <= c < col_end``.
    """
    hi = col_end
    lo = 0
    free_hi = col_end
    free_lo = 0
    if HAS_UPPER:
        hi = min(hi, max(row_hi + upper, 0))
        free_hi = min(free_hi, max(row_lo + upper + 1, 0))
    if HAS_LOWER:
        lo = max(row_lo - lower, 0)
        free_lo = max(row_hi - 1 - lower, 0)
    t_lo = lo // BLOCK
    t_hi = max((hi + BLOCK - 1) // BLOCK, t_lo)
    t_free_lo = min(max((free_lo + BLOCK - 1) // BLOCK, t_lo), t_hi)
    t_free_hi = max(min(free_hi // BLOCK, t_hi), t_free_lo)
    return t_lo, t_free_lo, t_free_hi, t_hi


# What is known of a whole tile of queries and keys: may a query see a key there, and does each see each?


def bound_tile(first_q, last_q, first_k, last_k, upper, lower, HAS_UPPER: "constexpr", HAS_LOWER: "constexpr"):  # noqa: F821, UP037
    """By the bounds, from the positions of the first and the last query and key."""
    seen = first_k <= last_k
    free = first_k <= last_k
    if HAS_UPPER:
        seen = seen & (first_k <= last_q + upper)
        free = free & (last_k <= first_q + upper)
    if HAS_LOWER:
        seen = seen & (last_k >= first_q - lower)
        free = free & (first_k >= last_q - lower)
    return seen, free


def segment_tile(q_lo, q_hi, k_lo, k_hi):
    """By the least and the largest id of either side: perhaps something in common; one and the same."""
    return (q_lo <= k_hi) & (k_lo <= q_hi), (q_lo == k_hi) & (k_lo == q_hi)


def row_tile(first_k, end_k, start_lo, start_hi, end_lo, end_hi):
    """By the union and the intersection of the queries' intervals; the keys are ``first_k <= kv < end_k``."""
    return (end_k > start_lo) & (first_k < end_hi), (first_k >= start_hi) & (end_k <= end_lo)
