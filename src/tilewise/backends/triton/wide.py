"""Backward of wide heads: the weights and ds are made once, tile by tile, and left in memory for the products that need them.

Beyond 256 columns (64 for float32 inputs, whose operands take registers twice over) a tile of dk, dv or dq fills the registers, so
that kernels that make scores and gradients at once have small tiles, and make all scores anew for each part of the columns. Here
``_weights_kernel`` makes ``p`` and ``ds`` of a tile of queries by keys, the columns of q, k, v and do streaming past it;
``_keys_kernel`` makes ``dv = p^T do`` and ``dk = sm_scale ds^T q`` of them, and ``_queries_kernel`` ``dq = sm_scale ds k``: five
products, none of them twice. What is kept is rounded to the dtype of the inputs, as operands of those products are in any case;
float32 is kept in halves (``halves.py``), ds once for each sum, with units of that.

What is kept lies as [1, query heads, queries, keys], lengths rounded up to whole tiles, for some heads of keys from number
``first`` on (of all batches). Only tiles in which a pair may be seen are written, and no others are read. No atomics: the bits
repeat.
"""

import triton
import triton.language as tl

from .bwd import _load_pivot
from .halves import halved, in_units, load_halves, load_units, product, store_halves, transposed
from .parts import LENGTHS, allowed, key_terms, listed, of_queries, query_terms, seen, store_tile, tile_range
from .scores import before, scored, weights

_LENGTHS = (*LENGTHS, "first")


@triton.jit
def _place(first, heads_kv, group):
    """The head among those that are kept, and its ``(batch, head, head of keys)``. Second dim of the grid: query heads."""
    local = tl.program_id(1)
    unit = first + local // group
    batch = unit // heads_kv
    head_kv = unit - batch * heads_kv
    return local, batch, head_kv * group + local % group, head_kv


@triton.jit
def _streamed(
    a, b, a_strides, b_strides, batch, head, head_kv, start_m, start_n, seqlen_q, seqlen_k,
    SIZE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, CHUNK: tl.constexpr,
    PRECISION: tl.constexpr, HALVES: tl.constexpr, BULK: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """``a b^T`` of rows of queries and rows of keys, CHUNK columns at a time. Those of halves lack their units."""
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for col in tl.range(0, SIZE, CHUNK):
        a_tile = load_halves(a, a_strides, batch, head, start_m, seqlen_q, SIZE, BLOCK_M, CHUNK, BULK, WIDEN, HALVES, col)
        b_tile = load_halves(b, b_strides, batch, head_kv, start_n, seqlen_k, SIZE, BLOCK_N, CHUNK, BULK, WIDEN, HALVES, col)
        if HALVES == 2:
            acc += product(a_tile, transposed(b_tile, HALVES), True, HALVES)
        else:
            acc = tl.dot(a_tile, tl.trans(b_tile), acc, input_precision=PRECISION)
    return acc


@triton.jit(do_not_specialize=_LENGTHS)
def _weights_kernel(
    q, k, v, do, p_kept, dsk_kept, dsq_kept, lse_ptr, delta_ptr, p_units, dsk_units, dsq_units, q_units, k_units, v_units, do_units,
    q_strides, k_strides, v_strides, do_strides, p_strides, dsk_strides, dsq_strides,
    mask, table, table_batch, table_head, table_width, score,
    first, heads_q, heads_kv, group, seqlen_q, seqlen_k, q_start, upper, lower, qk_scale2, m_blocks, n_blocks,
    STEPS: tl.constexpr, NATURAL: tl.constexpr, TAILS: tl.constexpr,
    NEED_DV: tl.constexpr, NEED_DK: tl.constexpr, NEED_DQ: tl.constexpr,
    HAS_UPPER: tl.constexpr, HAS_LOWER: tl.constexpr, RAGGED: tl.constexpr,
    DTYPE: tl.constexpr, HEAD_DIM: tl.constexpr, HEAD_DIM_V: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, CHUNK: tl.constexpr,
    PRECISION: tl.constexpr, HALVES: tl.constexpr, BULK: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """p and ds of one tile. Grid: (query tiles x key tiles) x kept query heads."""
    local, batch, head, head_kv = _place(first, heads_kv, group)
    m_block = tl.program_id(0) // n_blocks
    n_block = tl.program_id(0) - m_block * n_blocks
    start_m = m_block * BLOCK_M
    if table is not None:
        tiles, _, _, _, hi = listed(table, table_batch, table_head, table_width, batch, head, m_block)
        if n_block >= hi:
            return
        n_block = tl.load(tiles + n_block)
    else:
        # Rows past the end count as rows: the walk over keys, whose tiles of queries end where these do, reads no other tiles.
        first_row = q_start + start_m
        lo, _, _, hi = tile_range(first_row, first_row + BLOCK_M, seqlen_k, upper, lower, BLOCK_N, HAS_UPPER, HAS_LOWER)
        if (n_block < lo) | (n_block >= hi):
            return
    start_n = n_block * BLOCK_N
    offs_m = start_m + tl.arange(0, BLOCK_M)
    kv_pos = start_n + tl.arange(0, BLOCK_N)
    # [BLOCK_M, BLOCK_N]
    s = _streamed(
        q, k, q_strides, k_strides, batch, head, head_kv, start_m, start_n, seqlen_q, seqlen_k,
        HEAD_DIM, BLOCK_M, BLOCK_N, CHUNK, PRECISION, HALVES, BULK, WIDEN,
    )  # fmt: skip
    if HALVES > 0:
        q_unit = load_units(q_units, batch * heads_q + head, offs_m, seqlen_q)
        k_unit = load_units(k_units, batch * heads_kv + head_kv, kv_pos, seqlen_k)
        s = in_units(s, q_unit, k_unit)
    if (NEED_DK or NEED_DQ) and HALVES == 0:
        dp = _streamed(
            do, v, do_strides, v_strides, batch, head, head_kv, start_m, start_n, seqlen_q, seqlen_k,
            HEAD_DIM_V, BLOCK_M, BLOCK_N, CHUNK, PRECISION, HALVES, BULK, WIDEN,
        )  # fmt: skip
    head_rows = (batch * heads_q + head).to(tl.int64) * seqlen_q
    pivot, log_l = _load_pivot(lse_ptr, head_rows + offs_m, offs_m < seqlen_q, NATURAL)
    if RAGGED:
        s = of_queries(s, offs_m, seqlen_q, 1)
    s, slope, _ = scored(
        s * qk_scale2, score, batch, head, start_m, start_n, q_start, seqlen_q, seqlen_k, False, True,
        STEPS, NATURAL, TAILS, DTYPE, "",
    )  # fmt: skip
    p = weights(s, pivot[:, None], log_l[:, None], NATURAL)
    ok = allowed((q_start + offs_m)[:, None], kv_pos[None, :], seqlen_k, upper, lower, HAS_UPPER, HAS_LOWER)
    if table is not None:
        of_query = query_terms(mask, batch, head, offs_m, seqlen_q)
        of_key = key_terms(mask, batch, kv_pos, seqlen_k)
        ok = seen(ok, mask, of_query, of_key, batch, head, offs_m, kv_pos, start_n, seqlen_q, seqlen_k, False)
    p = tl.where(ok, p, 0.0)
    height = m_blocks * BLOCK_M
    width = n_blocks * BLOCK_N
    here = tl.program_id(2)  # 0, as a number that is no constant
    # The units of a tile: of its keys where queries are summed up, and of its queries where keys are.
    of_keys = (local * m_blocks + m_block).to(tl.int64) * width + kv_pos
    of_queries_at = (local * n_blocks + n_block).to(tl.int64) * height + offs_m
    if NEED_DV:
        if HALVES > 0:
            do_unit = load_units(do_units, batch * heads_q + head, offs_m, seqlen_q)
            halves, unit = halved(p * do_unit[:, None], 0, HALVES)
            store_halves(p_kept, p_strides, here, local, start_m, height, halves, BLOCK_M, BLOCK_N, BULK, HALVES, start_n)
            tl.store(p_units + of_keys, unit)
        else:
            store_tile(p_kept, p_strides, here, local, start_m, height, p, BLOCK_N, BLOCK_M, BLOCK_N, BULK, WIDEN, start_n)
    if NEED_DK or NEED_DQ:
        if HALVES > 0:  # only now: the sums of halves take registers
            dp = _streamed(
                do, v, do_strides, v_strides, batch, head, head_kv, start_m, start_n, seqlen_q, seqlen_k,
                HEAD_DIM_V, BLOCK_M, BLOCK_N, CHUNK, PRECISION, HALVES, BULK, WIDEN,
            )  # fmt: skip
            do_unit = load_units(do_units, batch * heads_q + head, offs_m, seqlen_q)
            dp = in_units(dp, do_unit, load_units(v_units, batch * heads_kv + head_kv, kv_pos, seqlen_k))
        delta = tl.load(delta_ptr + head_rows + offs_m, mask=offs_m < seqlen_q, other=0.0)
        ds = p * (dp - delta[:, None])
        if len(STEPS) > 0:
            ds = before(ds, slope, score)
        if HALVES > 0:
            if NEED_DK:
                halves, unit = halved(ds * q_unit[:, None], 0, HALVES)
                store_halves(dsk_kept, dsk_strides, here, local, start_m, height, halves, BLOCK_M, BLOCK_N, BULK, HALVES, start_n)
                tl.store(dsk_units + of_keys, unit)
            if NEED_DQ:
                halves, unit = halved(ds * k_unit[None, :], 1, HALVES)
                store_halves(dsq_kept, dsq_strides, here, local, start_m, height, halves, BLOCK_M, BLOCK_N, BULK, HALVES, start_n)
                tl.store(dsq_units + of_queries_at, unit)
        else:
            store_tile(dsk_kept, dsk_strides, here, local, start_m, height, ds, BLOCK_N, BLOCK_M, BLOCK_N, BULK, WIDEN, start_n)


@triton.jit(do_not_specialize=_LENGTHS)
def _keys_kernel(
    kept, rows, out, kept_units, kept_strides, rows_strides, out_strides, table, table_batch, table_head, table_width,
    first, heads_kv, group, seqlen_q, seqlen_k, q_start, upper, lower, scale, m_blocks,
    HAS_UPPER: tl.constexpr, HAS_LOWER: tl.constexpr, SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, COLS: tl.constexpr, STEP: tl.constexpr,
    PRECISION: tl.constexpr, HALVES: tl.constexpr, BULK: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """``out = scale kept^T rows`` of one tile of keys and COLS columns. Grid: (key tiles x parts of columns) x kept key heads."""
    parts: tl.constexpr = (SIZE + COLS - 1) // COLS
    n_block = tl.program_id(0) // parts
    col = tl.program_id(0) % parts * COLS
    local = tl.program_id(1)
    batch = (first + local) // heads_kv
    head_kv = first + local - batch * heads_kv
    start_n = n_block * BLOCK_N
    row_end = min(start_n + BLOCK_N, seqlen_k)
    lo, _, _, hi = tile_range(start_n, row_end, seqlen_q, lower - q_start, upper + q_start, BLOCK_M, HAS_LOWER, HAS_UPPER)
    steps: tl.constexpr = BLOCK_M // STEP
    keys = start_n + tl.arange(0, BLOCK_N)
    width = (seqlen_k + BLOCK_N - 1) // BLOCK_N * BLOCK_N
    acc = tl.zeros([BLOCK_N, COLS], tl.float32)
    for member in range(group):
        head = head_kv * group + member
        if table is not None:
            tiles, lo, _, _, hi = listed(table, table_batch, table_head, table_width, batch, head, n_block)
        for step in tl.range(lo * steps, hi * steps):
            start_m = step * STEP
            if table is not None:
                start_m = tl.load(tiles + step // steps) * BLOCK_M + step % steps * STEP
            # [STEP, BLOCK_N]
            tile = load_halves(
                kept, kept_strides, tl.program_id(2), local * group + member, start_m, m_blocks * BLOCK_M,
                BLOCK_N, STEP, BLOCK_N, BULK, WIDEN, HALVES, start_n,
            )  # fmt: skip
            # [STEP, COLS]
            row_tile = load_halves(rows, rows_strides, batch, head, start_m, seqlen_q, SIZE, STEP, COLS, BULK, WIDEN, HALVES, col)
            if HALVES > 0:
                unit = load_units(kept_units, (local * group + member) * m_blocks + start_m // BLOCK_M, keys, width)
                acc += product(transposed(tile, HALVES), row_tile, False, HALVES) * unit[:, None]
            else:
                acc = tl.dot(tl.trans(tile), row_tile, acc, input_precision=PRECISION)
    store_tile(out, out_strides, batch, head_kv, start_n, seqlen_k, acc * scale, SIZE, BLOCK_N, COLS, BULK, WIDEN, col)


@triton.jit(do_not_specialize=_LENGTHS)
def _queries_kernel(
    kept, rows, out, kept_units, kept_strides, rows_strides, out_strides, table, table_batch, table_head, table_width,
    first, heads_kv, group, seqlen_q, seqlen_k, q_start, upper, lower, scale, m_blocks,
    REVERSED: tl.constexpr, HAS_UPPER: tl.constexpr, HAS_LOWER: tl.constexpr, SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, COLS: tl.constexpr, STEP: tl.constexpr,
    PRECISION: tl.constexpr, HALVES: tl.constexpr, BULK: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """``out = scale kept rows`` of one tile of queries, COLS columns. Grid: (query tiles x parts of columns) x kept query heads."""
    parts: tl.constexpr = (SIZE + COLS - 1) // COLS
    m_block = tl.program_id(0) // parts
    col = tl.program_id(0) % parts * COLS
    if REVERSED:
        m_block = m_blocks - 1 - m_block
    local, batch, head, head_kv = _place(first, heads_kv, group)
    start_m = m_block * BLOCK_M
    row_end = min(start_m + BLOCK_M, seqlen_q)
    lo, _, _, hi = tile_range(q_start + start_m, q_start + row_end, seqlen_k, upper, lower, BLOCK_N, HAS_UPPER, HAS_LOWER)
    if table is not None:
        tiles, lo, _, _, hi = listed(table, table_batch, table_head, table_width, batch, head, m_block)
    steps: tl.constexpr = BLOCK_N // STEP
    n_blocks = (seqlen_k + BLOCK_N - 1) // BLOCK_N
    queries = start_m + tl.arange(0, BLOCK_M)
    acc = tl.zeros([BLOCK_M, COLS], tl.float32)
    for step in tl.range(lo * steps, hi * steps):
        start_n = step * STEP
        if table is not None:
            start_n = tl.load(tiles + step // steps) * BLOCK_N + step % steps * STEP
        # [BLOCK_M, STEP]
        tile = load_halves(
            kept, kept_strides, tl.program_id(2), local, start_m, m_blocks * BLOCK_M,
            STEP, BLOCK_M, STEP, BULK, WIDEN, HALVES, start_n,
        )  # fmt: skip
        # [STEP, COLS]
        row_tile = load_halves(rows, rows_strides, batch, head_kv, start_n, seqlen_k, SIZE, STEP, COLS, BULK, WIDEN, HALVES, col)
        if HALVES > 0:
            unit = load_units(kept_units, local * n_blocks + start_n // BLOCK_N, queries, m_blocks * BLOCK_M)
            acc += product(tile, row_tile, False, HALVES) * unit[:, None]
        else:
            acc = tl.dot(tile, row_tile, acc, input_precision=PRECISION)
    store_tile(out, out_strides, batch, head, start_m, seqlen_q, acc * scale, SIZE, BLOCK_M, COLS, BULK, WIDEN, col)
