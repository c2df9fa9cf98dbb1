"""Forward: ``o = softmax(sm_scale q k^T) v`` and ``lse``, one program for each tile of queries of one head.

Grid: query tiles x heads x batch (``parts.schedule``). Q is loaded once and kept; K and V stream past it. With SPLIT above 1 that
many programs share the columns of one tile of o, each with scores of its own (``parts.column_part``).

Invariant after every key tile: ``m_i`` is the maximum of the scores visited so far (base two), ``l_i = sum exp2(s2 - m_i)`` and
``acc = sum exp2(s2 - m_i) v`` over the same keys. All three are float32, whatever the inputs are.

The key tiles of a query tile fall into masked edge | free middle | masked edge (``bodies.tile_range``). Tiles outside are never
visited, and all three parts run the same step. Where terms of the mask are tensors, ``table`` has a list with the free
tiles of a query tile and then its masked ones (``plan.BlockTable``).
"""

import triton
import triton.language as tl

from .drop import drop_terms, kept
from .halves import add_values, in_units, load_halves, load_units, product, transposed
from .parts import (
    LENGTHS,
    LN_2,
    allowed,
    column_part,
    key_terms,
    listed,
    load_tile,
    operand,
    query_terms,
    schedule,
    seen,
    softmax_step,
    store_tile,
    tile_range,
)
from .scores import add_sink, natural_step, scored, settled


@triton.jit
def _fwd_tiles(
    acc, acc_rest, l_i, m_i, q, q_rest, k, k_rest, v, v_rest, units, k_strides, v_strides, batch, head_kv, q_pos,
    seqlen_k, qk_scale2, upper, lower, first, last,
    tiles, mask, of_query, head, offs_m, seqlen_q, score, start_m, q_start, drop, of_batch, col,
    STEPS: tl.constexpr, NATURAL: tl.constexpr, TAILS: tl.constexpr,
    MASKED: tl.constexpr, HAS_UPPER: tl.constexpr, HAS_LOWER: tl.constexpr, DTYPE: tl.constexpr,
    HEAD_DIM: tl.constexpr, HEAD_DIM_V: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    REST: tl.constexpr, REST_V: tl.constexpr, PRECISION: tl.constexpr, HALVES: tl.constexpr,
    BULK: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """Stream the key tiles ``first .. last``, or those at these places of the list ``tiles``, past the resident query tile."""
    for n_block in tl.range(first, last):
        if tiles is not None:
            n_block = tl.load(tiles + n_block)
        start_n = n_block * BLOCK_N
        # [BLOCK_N, BLOCK_D]
        k_tile = load_halves(k, k_strides, batch, head_kv, start_n, seqlen_k, HEAD_DIM, BLOCK_N, BLOCK_D, BULK, WIDEN, HALVES)
        # [BLOCK_M, BLOCK_N]
        if HALVES > 0:
            q_unit, k_units, v_units, head_of = units
            offs_n = start_n + tl.arange(0, BLOCK_N)
            qk = product(q, transposed(k_tile, HALVES), True, HALVES)
            qk = in_units(qk, q_unit, load_units(k_units, head_of, offs_n, seqlen_k))
        else:
            qk = tl.dot(q, tl.trans(k_tile), input_precision=PRECISION)
        if REST > 0:
            k_more = load_tile(k_rest, k_strides, batch, head_kv, start_n, seqlen_k, HEAD_DIM, BLOCK_N, REST, BULK, WIDEN, BLOCK_D)
            qk = tl.dot(q_rest, tl.trans(k_more), qk, input_precision=PRECISION)
        ok = None
        if MASKED:
            kv_pos = start_n + tl.arange(0, BLOCK_N)
            ok = allowed(q_pos[:, None], kv_pos[None, :], seqlen_k, upper, lower, HAS_UPPER, HAS_LOWER)
            if tiles is not None:
                of_key = key_terms(mask, batch, kv_pos, seqlen_k)
                ok = seen(ok, mask, of_query, of_key, batch, head, offs_m, kv_pos, start_n, seqlen_q, seqlen_k, False)
        if len(STEPS) > 0:
            s, _, _ = scored(
                qk * qk_scale2, score, batch, head, start_m, start_n, q_start, seqlen_q, seqlen_k, False, MASKED,
                STEPS, NATURAL, TAILS, DTYPE, "",
            )  # fmt: skip
        if NATURAL:
            p, alpha, m_i, l_i = natural_step(s, ok, m_i, l_i, MASKED)
        elif len(STEPS) > 0:
            p, alpha, m_i, l_i = softmax_step(s, ok, m_i, l_i, 1.0, MASKED)
        else:
            p, alpha, m_i, l_i = softmax_step(qk, ok, m_i, l_i, qk_scale2, MASKED, tiles is not None)
        acc = acc * alpha[:, None]
        if drop is not None:
            p = tl.where(kept(of_batch, head, start_m, start_n, p.shape[0], BLOCK_N, False), p, 0.0)
        # [BLOCK_N, BLOCK_DV]
        v_tile = load_halves(
            v, v_strides, batch, head_kv, start_n, seqlen_k, HEAD_DIM_V, BLOCK_N, BLOCK_DV, BULK, WIDEN, HALVES, col
        )
        if HALVES > 0:
            acc = add_values(acc, p, v_tile, load_units(v_units, head_of, offs_n, seqlen_k), HALVES)
        else:
            acc = tl.dot(operand(p, DTYPE, WIDEN), v_tile, acc, input_precision=PRECISION)
        if REST_V > 0:
            v_more = load_tile(
                v_rest, v_strides, batch, head_kv, start_n, seqlen_k, HEAD_DIM_V, BLOCK_N, REST_V, BULK, WIDEN, BLOCK_DV
            )
            acc_rest = tl.dot(operand(p, DTYPE, WIDEN), v_more, acc_rest * alpha[:, None], input_precision=PRECISION)
    return acc, acc_rest, l_i, m_i


@triton.jit(do_not_specialize=LENGTHS)
def _fwd_kernel(
    q, k, v, o, lse_ptr, q_units, k_units, v_units, q_strides, k_strides, v_strides, o_strides, q_rest, k_rest, v_rest, o_rest,
    mask, table, table_batch, table_head, table_width, score, sink, rows_ptr, maxima_ptr, drop,
    heads_q, group, seqlen_q, seqlen_k, q_start, upper, lower, qk_scale2, m_blocks,
    STEPS: tl.constexpr, NATURAL: tl.constexpr, TAILS: tl.constexpr,
    NEGATIVE: tl.constexpr, HAS_UPPER: tl.constexpr, HAS_LOWER: tl.constexpr, HAS_TAIL: tl.constexpr,
    REVERSED: tl.constexpr, FLAT: tl.constexpr, SPLIT: tl.constexpr,
    DTYPE: tl.constexpr, HEAD_DIM: tl.constexpr, HEAD_DIM_V: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    REST: tl.constexpr, REST_V: tl.constexpr, PRECISION: tl.constexpr, HALVES: tl.constexpr,
    BULK: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    m_block, head, batch = schedule(m_blocks, heads_q, REVERSED, FLAT)
    m_block, col = column_part(m_block, SPLIT, BLOCK_DV)
    head_kv = head // group
    start_m = m_block * BLOCK_M
    offs_m = start_m + tl.arange(0, BLOCK_M)
    q_pos = q_start + offs_m

    m_i = tl.full([BLOCK_M], -float("inf"), tl.float32)
    l_i = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
    # [BLOCK_M, BLOCK_D]
    q_tile = load_halves(q, q_strides, batch, head, start_m, seqlen_q, HEAD_DIM, BLOCK_M, BLOCK_D, BULK, WIDEN, HALVES)
    units = l_i  # whatever it is: Triton 3.6 returns no None
    if HALVES > 0:
        q_unit = load_units(q_units, batch * heads_q + head, offs_m, seqlen_q)
        units = (q_unit, k_units, v_units, batch * (heads_q // group) + head_kv)
    if NEGATIVE:
        # max(qk) * qk_scale2 is the maximum of the scores only for a scale >= 0: the sign goes into q, which is exact.
        q_tile = -q_tile
    q_more = None
    if REST > 0:
        if not BULK:
            q_rest = q
            k_rest = k
        q_more = load_tile(q_rest, q_strides, batch, head, start_m, seqlen_q, HEAD_DIM, BLOCK_M, REST, BULK, WIDEN, BLOCK_D)
        if NEGATIVE:
            q_more = -q_more
    acc_rest = l_i  # whatever it is: Triton 3.6 returns no None
    if REST_V > 0:
        if not BULK:
            v_rest = v
            o_rest = o
        acc_rest = tl.zeros([BLOCK_M, REST_V], tl.float32)

    row_end = min(start_m + BLOCK_M, seqlen_q)
    lo, free_lo, free_hi, hi = tile_range(
        q_start + start_m, q_start + row_end, seqlen_k, upper, lower, BLOCK_N, HAS_UPPER, HAS_LOWER
    )
    of_query = None
    of_batch = None
    if drop is not None:
        of_batch = drop_terms(drop, batch)
    tiles = None
    if table is not None:
        of_query = query_terms(mask, batch, head, offs_m, seqlen_q)
        tiles, lo, free_lo, free_hi, hi = listed(table, table_batch, table_head, table_width, batch, head, m_block)
    if HAS_LOWER and table is None:
        acc, acc_rest, l_i, m_i = _fwd_tiles(
            acc, acc_rest, l_i, m_i, q_tile, q_more, k, k_rest, v, v_rest, units, k_strides, v_strides, batch,
            head_kv, q_pos, seqlen_k, qk_scale2, upper, lower, lo, free_lo, tiles, mask, of_query, head, offs_m, seqlen_q,
            score, start_m, q_start, drop, of_batch, col, STEPS, NATURAL, TAILS, True, HAS_UPPER, HAS_LOWER, DTYPE,
            HEAD_DIM, HEAD_DIM_V, BLOCK_N, BLOCK_D, BLOCK_DV, REST, REST_V, PRECISION, HALVES, BULK, WIDEN,
        )  # fmt: skip
    acc, acc_rest, l_i, m_i = _fwd_tiles(
        acc, acc_rest, l_i, m_i, q_tile, q_more, k, k_rest, v, v_rest, units, k_strides, v_strides, batch,
        head_kv, q_pos, seqlen_k, qk_scale2, upper, lower, free_lo, free_hi, tiles, mask, of_query, head, offs_m, seqlen_q,
        score, start_m, q_start, drop, of_batch, col, STEPS, NATURAL, TAILS, False, HAS_UPPER, HAS_LOWER, DTYPE,
        HEAD_DIM, HEAD_DIM_V, BLOCK_N, BLOCK_D, BLOCK_DV, REST, REST_V, PRECISION, HALVES, BULK, WIDEN,
    )  # fmt: skip
    if HAS_UPPER or HAS_TAIL:
        acc, acc_rest, l_i, m_i = _fwd_tiles(
            acc, acc_rest, l_i, m_i, q_tile, q_more, k, k_rest, v, v_rest, units, k_strides, v_strides, batch,
            head_kv, q_pos, seqlen_k, qk_scale2, upper, lower, free_hi, hi, tiles, mask, of_query, head, offs_m, seqlen_q,
            score, start_m, q_start, drop, of_batch, col, STEPS, NATURAL, TAILS, True, HAS_UPPER, HAS_LOWER, DTYPE,
            HEAD_DIM, HEAD_DIM_V, BLOCK_N, BLOCK_D, BLOCK_DV, REST, REST_V, PRECISION, HALVES, BULK, WIDEN,
        )  # fmt: skip

    if NATURAL:
        by = settled(m_i)
        acc *= by[:, None]
        if REST_V > 0:
            acc_rest *= by[:, None]
        l_i *= by
    head_rows = (batch * heads_q + head).to(tl.int64) * seqlen_q
    if maxima_ptr is not None:
        # Before the sink, which is no score.
        tl.store(maxima_ptr + head_rows + offs_m, m_i if NATURAL else m_i * LN_2, mask=offs_m < seqlen_q)
    if sink is not None:
        if REST_V > 0:
            acc_rest, _, _ = add_sink(acc_rest, l_i, m_i, sink, batch, head, NATURAL)
        acc, l_i, m_i = add_sink(acc, l_i, m_i, sink, batch, head, NATURAL)
    if drop is not None:
        acc *= drop[4]
        if REST_V > 0:
            acc_rest *= drop[4]
    # A row that saw no key has l_i = 0: o = 0 and lse = -inf.
    l_safe = tl.where(l_i == 0.0, 1.0, l_i)
    acc = acc / l_safe[:, None]
    lse = tl.where(l_i == 0.0, -float("inf"), (m_i + tl.math.log2(l_safe)) * LN_2)
    if NATURAL:
        log_l = tl.math.log2(l_safe) * LN_2
        lse = tl.where(l_i == 0.0, -float("inf"), m_i + log_l)
        if rows_ptr is not None:
            tl.store(rows_ptr + (head_rows + offs_m) * 2, m_i, mask=offs_m < seqlen_q)
            tl.store(rows_ptr + (head_rows + offs_m) * 2 + 1, log_l, mask=offs_m < seqlen_q)
    tl.store(lse_ptr + head_rows + offs_m, lse, mask=offs_m < seqlen_q)
    store_tile(o, o_strides, batch, head, start_m, seqlen_q, acc, HEAD_DIM_V, BLOCK_M, BLOCK_DV, BULK, WIDEN, col)
    if REST_V > 0:
        acc_rest = acc_rest / l_safe[:, None]
        store_tile(o_rest, o_strides, batch, head, start_m, seqlen_q, acc_rest, HEAD_DIM_V, BLOCK_M, REST_V, BULK, WIDEN, BLOCK_DV)
