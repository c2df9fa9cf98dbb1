"""Forward of wide heads: the weights of tiles are made once and left in memory for the product with the values.

Beyond 256 columns a tile of o takes half of a multiprocessor's registers, and one program can hold so few queries that it waits for
keys and values. Here ``_tile_weights_kernel`` makes the weights of a tile of queries by keys, the columns of q and k streaming past
it, each row measured from a pivot of that tile alone; ``_values_kernel`` brings them to the pivot of the row and multiplies them
with the values, a part of the columns of o at a time. Neither product is made twice.

What is kept lies as in ``wide.py``: [1, query heads, queries, keys] in the dtype of the inputs, lengths rounded up to whole tiles,
and beside it ``pivots`` and ``sums`` [query heads, tiles of keys, queries] in float32. The pivot of base two is a whole number: the
step from that of a tile to that of the row is then a power of two, which rounds nothing.
"""

import triton
import triton.language as tl

from .parts import (
    LENGTHS,
    LN_2,
    LOG2_E,
    allowed,
    key_terms,
    listed,
    load_tile,
    operand,
    query_terms,
    seen,
    store_tile,
    tile_range,
)
from .scores import scored
from .wide import _place

_LENGTHS = (*LENGTHS, "first")


@triton.jit(do_not_specialize=_LENGTHS)
def _tile_weights_kernel(
    q, k, p_ptr, pivots_ptr, sums_ptr, q_strides, k_strides,
    mask, table, table_batch, table_head, table_width, score,
    first, heads_kv, group, seqlen_q, seqlen_k, q_start, upper, lower, qk_scale2, m_blocks, n_blocks,
    STEPS: tl.constexpr, NATURAL: tl.constexpr, TAILS: tl.constexpr, HAS_UPPER: tl.constexpr, HAS_LOWER: tl.constexpr,
    DTYPE: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, CHUNK: tl.constexpr,
    PRECISION: tl.constexpr, BULK: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """The weights of one tile, and what its rows are measured from and add up to. Grid: (query x key tiles) x kept query heads."""
    local, batch, head, head_kv = _place(first, heads_kv, group)
    m_block = tl.program_id(0) // n_blocks
    n_block = tl.program_id(0) - m_block * n_blocks
    start_m = m_block * BLOCK_M
    row_end = min(start_m + BLOCK_M, seqlen_q)
    if table is not None:
        tiles, _, _, _, hi = listed(table, table_batch, table_head, table_width, batch, head, m_block)
        if n_block >= hi:
            return
        n_block = tl.load(tiles + n_block)
    else:
        lo, _, _, hi = tile_range(q_start + start_m, q_start + row_end, seqlen_k, upper, lower, BLOCK_N, HAS_UPPER, HAS_LOWER)
        if (n_block < lo) | (n_block >= hi):
            return
    start_n = n_block * BLOCK_N
    offs_m = start_m + tl.arange(0, BLOCK_M)
    kv_pos = start_n + tl.arange(0, BLOCK_N)
    # [BLOCK_M, BLOCK_N]
    s = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for col in tl.range(0, HEAD_DIM, CHUNK):
        q_tile = load_tile(q, q_strides, batch, head, start_m, seqlen_q, HEAD_DIM, BLOCK_M, CHUNK, BULK, WIDEN, col)
        k_tile = load_tile(k, k_strides, batch, head_kv, start_n, seqlen_k, HEAD_DIM, BLOCK_N, CHUNK, BULK, WIDEN, col)
        s = tl.dot(q_tile, tl.trans(k_tile), s, input_precision=PRECISION)
    s, _, _ = scored(
        s * qk_scale2, score, batch, head, start_m, start_n, q_start, seqlen_q, seqlen_k, False, True,
        STEPS, NATURAL, TAILS, DTYPE, "",
    )  # fmt: skip
    ok = allowed((q_start + offs_m)[:, None], kv_pos[None, :], seqlen_k, upper, lower, HAS_UPPER, HAS_LOWER)
    if table is not None:
        of_query = query_terms(mask, batch, head, offs_m, seqlen_q)
        of_key = key_terms(mask, batch, kv_pos, seqlen_k)
        ok = seen(ok, mask, of_query, of_key, batch, head, offs_m, kv_pos, start_n, seqlen_q, seqlen_k, False)
    s = tl.where(ok, s, -float("inf"))
    pivot = tl.max(s, 1)
    unit: tl.constexpr = LOG2_E if NATURAL else 1.0
    if not NATURAL:
        pivot = tl.ceil(pivot)
    p = tl.math.exp2((s - tl.where(pivot == -float("inf"), 0.0, pivot)[:, None]) * unit)
    width = n_blocks * BLOCK_N
    at = tl.arange(0, BLOCK_M)[:, None] * width + tl.arange(0, BLOCK_N)[None, :]
    first_at = (local * m_blocks * BLOCK_M + start_m).to(tl.int64) * width + start_n
    tl.store(p_ptr + first_at + at, operand(p, DTYPE, WIDEN).to(p_ptr.dtype.element_ty))
    rows = (local * n_blocks + n_block).to(tl.int64) * (m_blocks * BLOCK_M) + offs_m
    tl.store(pivots_ptr + rows, pivot)
    tl.store(sums_ptr + rows, tl.sum(p, 1))


@triton.jit
def _row_pivots(
    pivots_ptr, lo, hi, tiles, head_rows, rows_each, rows, table,
    BLOCK_M: tl.constexpr,
):  # fmt: skip
    """The largest pivot of each row among the tiles ``lo .. hi``, or those at these places of the list ``tiles``."""
    largest = tl.full([BLOCK_M], -float("inf"), tl.float32)
    for n_block in tl.range(lo, hi):
        if table is not None:
            n_block = tl.load(tiles + n_block)
        largest = tl.maximum(largest, tl.load(pivots_ptr + head_rows + n_block * rows_each + rows))
    return largest


@triton.jit(do_not_specialize=_LENGTHS)
def _values_kernel(
    kept, v, o, lse_ptr, pivots_ptr, sums_ptr, kept_strides, v_strides, o_strides,
    table, table_batch, table_head, table_width, sink, rows_ptr,
    first, heads_q, heads_kv, group, seqlen_q, seqlen_k, q_start, upper, lower, m_blocks, n_blocks,
    NATURAL: tl.constexpr, REVERSED: tl.constexpr, HAS_UPPER: tl.constexpr, HAS_LOWER: tl.constexpr,
    DTYPE: tl.constexpr, SIZE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, COLS: tl.constexpr, STEP: tl.constexpr,
    PRECISION: tl.constexpr, BULK: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """COLS columns of o of one tile of queries, and its lse. Grid: (query tiles x parts of columns) x kept query heads."""
    parts: tl.constexpr = (SIZE + COLS - 1) // COLS
    m_block = tl.program_id(0) // parts
    col = tl.program_id(0) % parts * COLS
    if REVERSED:
        m_block = m_blocks - 1 - m_block
    local, batch, head, head_kv = _place(first, heads_kv, group)
    start_m = m_block * BLOCK_M
    row_end = min(start_m + BLOCK_M, seqlen_q)
    rows = start_m + tl.arange(0, BLOCK_M)
    rows_each = (m_blocks * BLOCK_M).to(tl.int64)
    kept_rows = local * n_blocks * rows_each
    lo, _, _, hi = tile_range(q_start + start_m, q_start + row_end, seqlen_k, upper, lower, BLOCK_N, HAS_UPPER, HAS_LOWER)
    tiles = None
    if table is not None:
        tiles, lo, _, _, hi = listed(table, table_batch, table_head, table_width, batch, head, m_block)
    unit: tl.constexpr = LOG2_E if NATURAL else 1.0
    m_i = _row_pivots(pivots_ptr, lo, hi, tiles, kept_rows, rows_each, rows, table, BLOCK_M)
    if sink is not None:
        logit = tl.load(sink[0] + batch.to(tl.int64) * sink[1][0] + head.to(tl.int64) * sink[1][1]).to(tl.float32)
        if not NATURAL:
            logit *= LOG2_E
        m_i = tl.maximum(m_i, logit if NATURAL else tl.ceil(logit))
    pivot = tl.where(m_i == -float("inf"), 0.0, m_i)
    l_i = tl.zeros([BLOCK_M], tl.float32)
    if sink is not None:
        l_i += tl.math.exp2((logit - pivot) * unit)
    steps: tl.constexpr = BLOCK_N // STEP
    acc = tl.zeros([BLOCK_M, COLS], tl.float32)
    for step in tl.range(lo * steps, hi * steps):
        n_block = step // steps
        if table is not None:
            n_block = tl.load(tiles + n_block)
        start_n = n_block * BLOCK_N + step % steps * STEP
        at = kept_rows + n_block * rows_each + rows
        alpha = tl.math.exp2((tl.load(pivots_ptr + at) - pivot) * unit)
        l_i += alpha * tl.load(sums_ptr + at) * (1.0 / steps)
        # [BLOCK_M, STEP]
        tile = load_tile(
            kept, kept_strides, tl.program_id(2), local, start_m, m_blocks * BLOCK_M, STEP, BLOCK_M, STEP, BULK, WIDEN, start_n
        )
        # [STEP, COLS]
        v_tile = load_tile(v, v_strides, batch, head_kv, start_n, seqlen_k, SIZE, STEP, COLS, BULK, WIDEN, col)
        acc = tl.dot(operand(tile.to(tl.float32) * alpha[:, None], DTYPE, WIDEN), v_tile, acc, input_precision=PRECISION)
    # A row that saw no key has l_i = 0: o = 0 and lse = -inf.
    l_safe = tl.where(l_i == 0.0, 1.0, l_i)
    if col == 0:
        head_rows = (batch * heads_q + head).to(tl.int64) * seqlen_q
        log_l = tl.math.log2(l_safe) * LN_2
        m_natural = m_i if NATURAL else m_i * LN_2
        tl.store(lse_ptr + head_rows + rows, tl.where(l_i == 0.0, -float("inf"), m_natural + log_l), mask=rows < seqlen_q)
        if rows_ptr is not None:
            tl.store(rows_ptr + (head_rows + rows) * 2, m_i, mask=rows < seqlen_q)
            tl.store(rows_ptr + (head_rows + rows) * 2 + 1, log_l, mask=rows < seqlen_q)
    store_tile(o, o_strides, batch, head, start_m, seqlen_q, acc / l_safe[:, None], SIZE, BLOCK_M, COLS, BULK, WIDEN, col)
