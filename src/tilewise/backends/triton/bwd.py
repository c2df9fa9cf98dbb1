"""Backward: three kernels, no atomics, the same bits on every run.

With ``p = exp2(s2 - lse2)`` recomputed under the same mask, and ``delta = sum_d do * o - dlse`` for each row,

    dv = p^T do        dp = do v^T        ds = p (dp - delta)        dk = sm_scale ds^T q        dq = sm_scale ds k

``_delta_kernel`` makes delta. ``_dkdv_kernel`` holds a tile of keys and streams the queries that see it (the plan transposed), all
query heads of the group in a fixed order. ``_dq_kernel`` holds a tile of queries and streams keys, as the forward pass does. Scores
are computed twice, which costs 7 products of a tile instead of 5; no gradient is ever added up in memory. With SPLIT
above 1 that many programs share the columns of a tile of dq, dk or dv, each with scores of its own; ``wide.py`` has a better way.

Rows with lse = -inf saw no key: their lse is read as +inf, which makes every p of theirs an exact zero.
"""

import triton
import triton.language as tl

from .drop import drop_terms, kept
from .parts import (
    LENGTHS,
    LOG2_E,
    allowed,
    column_part,
    key_terms,
    listed,
    load_tile,
    of_queries,
    operand,
    query_terms,
    schedule,
    seen,
    store_tile,
    tile_range,
)
from .scores import before, load_rows, scored, slope_gradient, weights


@triton.jit(do_not_specialize=LENGTHS)
def _delta_kernel(
    o, do, dlse_ptr, lse_ptr, delta_ptr, o_strides, do_strides, heads_q, seqlen_q, m_blocks,
    FLAT: tl.constexpr, HAS_DLSE: tl.constexpr, HEAD_DIM_V: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_DV: tl.constexpr,
):  # fmt: skip
    """delta[row] = sum_d do * o - dlse, and 0 for a row that saw no key. Grid: query tiles x heads x batch."""
    m_block, head, batch = schedule(m_blocks, heads_q, False, FLAT)
    start_m = m_block * BLOCK_M
    offs_m = start_m + tl.arange(0, BLOCK_M)
    rows = (batch * heads_q + head).to(tl.int64) * seqlen_q + offs_m
    o_tile = load_tile(o, o_strides, batch, head, start_m, seqlen_q, HEAD_DIM_V, BLOCK_M, BLOCK_DV, False, False)
    do_tile = load_tile(do, do_strides, batch, head, start_m, seqlen_q, HEAD_DIM_V, BLOCK_M, BLOCK_DV, False, False)
    delta = tl.sum(o_tile.to(tl.float32) * do_tile.to(tl.float32), 1)
    if HAS_DLSE:
        delta -= tl.load(dlse_ptr + rows, mask=offs_m < seqlen_q, other=0.0)
    lse = tl.load(lse_ptr + rows, mask=offs_m < seqlen_q, other=0.0)
    tl.store(delta_ptr + rows, tl.where(lse == -float("inf"), 0.0, delta), mask=offs_m < seqlen_q)


@triton.jit
def _load_lse2(lse_ptr, rows, inside):
    """lse in base two, +inf for rows that saw no key and rows past the end."""
    lse = tl.load(lse_ptr + rows, mask=inside, other=float("inf"))
    return tl.where(lse == -float("inf"), float("inf"), lse) * LOG2_E


@triton.jit
def _load_pivot(lse_ptr, rows, inside, NATURAL: tl.constexpr):
    """What the weights of rows are measured from: ``(lse2, 0)``, or what ``lse_ptr`` holds of natural scores."""
    if NATURAL:
        return load_rows(lse_ptr, rows, inside)
    else:
        lse2 = _load_lse2(lse_ptr, rows, inside)
        return lse2, tl.zeros_like(lse2)


@triton.jit
def _dkdv_tiles(
    dk, dk_rest, dv, dv_rest, k_tile, k_more, v_tile, v_more, q, q_rest, do, do_rest, lse_ptr, delta_ptr,
    q_strides, do_strides, batch, head, head_rows, kv_pos,
    seqlen_q, seqlen_k, q_start, upper, lower, qk_scale2, first, last,
    tiles, mask, of_key, score, start_n, drop, of_batch, col,
    STEPS: tl.constexpr, NATURAL: tl.constexpr, TAILS: tl.constexpr, RAGGED: tl.constexpr,
    MASKED: tl.constexpr, NEED_DK: tl.constexpr, NEED_DV: tl.constexpr, HAS_UPPER: tl.constexpr, HAS_LOWER: tl.constexpr,
    DTYPE: tl.constexpr, HEAD_DIM: tl.constexpr, HEAD_DIM_V: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, SPLIT: tl.constexpr,
    REST: tl.constexpr, REST_V: tl.constexpr, PRECISION: tl.constexpr, BULK: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """Stream the query tiles ``first .. last`` (or at these places of a list) of one head past the resident key tile."""
    for m_block in tl.range(first, last):
        if tiles is not None:
            m_block = tl.load(tiles + m_block)
        start_m = m_block * BLOCK_M
        offs_m = start_m + tl.arange(0, BLOCK_M)
        q_tile = load_tile(q, q_strides, batch, head, start_m, seqlen_q, HEAD_DIM, BLOCK_M, BLOCK_D, BULK, WIDEN)
        # k q^T rather than the transpose of q k^T: a transposed result of one product as operand of the next is miscompiled by some
        # versions of Triton.                                                                       [BLOCK_N, BLOCK_M]
        qk_t = tl.dot(k_tile, tl.trans(q_tile), input_precision=PRECISION)
        if REST > 0:
            q_more = load_tile(q_rest, q_strides, batch, head, start_m, seqlen_q, HEAD_DIM, BLOCK_M, REST, BULK, WIDEN, BLOCK_D)
            qk_t = tl.dot(k_more, tl.trans(q_more), qk_t, input_precision=PRECISION)
        if MASKED and RAGGED:
            qk_t = of_queries(qk_t, offs_m, seqlen_q, 0)
        if len(STEPS) > 0:
            lse2, log_l = _load_pivot(lse_ptr, head_rows + offs_m, offs_m < seqlen_q, NATURAL)
            s_t, slope, _ = scored(
                qk_t * qk_scale2, score, batch, head, start_m, start_n, q_start, seqlen_q, seqlen_k, True, MASKED,
                STEPS, NATURAL, TAILS, DTYPE, "",
            )  # fmt: skip
            p_t = weights(s_t, lse2[None, :], log_l[None, :], NATURAL)
        else:
            lse2 = _load_lse2(lse_ptr, head_rows + offs_m, offs_m < seqlen_q)
            p_t = tl.math.exp2(qk_t * qk_scale2 - lse2[None, :])
        if MASKED:
            ok = allowed((q_start + offs_m)[None, :], kv_pos[:, None], seqlen_k, upper, lower, HAS_UPPER, HAS_LOWER)
            if tiles is not None:
                of_query = query_terms(mask, batch, head, offs_m, seqlen_q)
                ok = seen(ok, mask, of_query, of_key, batch, head, offs_m, kv_pos, start_n, seqlen_q, seqlen_k, True)
            p_t = tl.where(ok, p_t, 0.0)
        if NEED_DK or SPLIT == 1:
            do_tile = load_tile(do, do_strides, batch, head, start_m, seqlen_q, HEAD_DIM_V, BLOCK_M, BLOCK_DV, BULK, WIDEN)
        if REST_V > 0:
            do_more = load_tile(
                do_rest, do_strides, batch, head, start_m, seqlen_q, HEAD_DIM_V, BLOCK_M, REST_V, BULK, WIDEN, BLOCK_DV
            )
        signed_t = p_t
        if drop is not None:
            # The sign of a weight says until the end of the step whether it is dropped: a mask of its own would take registers.
            signed_t = tl.where(kept(of_batch, head, start_m, start_n, BLOCK_M, p_t.shape[0], True), p_t, -p_t)
            p_t = tl.where(signed_t < 0.0, 0.0, signed_t)
        if NEED_DV:
            if SPLIT == 1:
                do_part = do_tile
            else:
                cols_v: tl.constexpr = BLOCK_DV // SPLIT
                do_part = load_tile(do, do_strides, batch, head, start_m, seqlen_q, HEAD_DIM_V, BLOCK_M, cols_v, BULK, WIDEN, col)
            dv = tl.dot(operand(p_t, DTYPE, WIDEN), do_part, dv, input_precision=PRECISION)
            if REST_V > 0:
                dv_rest = tl.dot(operand(p_t, DTYPE, WIDEN), do_more, dv_rest, input_precision=PRECISION)
        if NEED_DK:
            dp_t = tl.dot(v_tile, tl.trans(do_tile), input_precision=PRECISION)
            if REST_V > 0:
                dp_t = tl.dot(v_more, tl.trans(do_more), dp_t, input_precision=PRECISION)
            if drop is not None:
                dp_t = tl.where(signed_t < 0.0, 0.0, dp_t * drop[4])
                p_t = tl.abs(signed_t)
            delta = tl.load(delta_ptr + head_rows + offs_m, mask=offs_m < seqlen_q, other=0.0)
            ds_t = p_t * (dp_t - delta[None, :])
            if len(STEPS) > 0:
                ds_t = before(ds_t, slope, score)
            if SPLIT == 1:
                q_part = q_tile
            else:
                cols: tl.constexpr = BLOCK_D // SPLIT
                q_part = load_tile(q, q_strides, batch, head, start_m, seqlen_q, HEAD_DIM, BLOCK_M, cols, BULK, WIDEN, col)
            dk = tl.dot(operand(ds_t, DTYPE, WIDEN), q_part, dk, input_precision=PRECISION)
            if REST > 0:
                dk_rest = tl.dot(operand(ds_t, DTYPE, WIDEN), q_more, dk_rest, input_precision=PRECISION)
    return dk, dk_rest, dv, dv_rest


@triton.jit(do_not_specialize=LENGTHS)
def _dkdv_kernel(
    q, k, v, do, dk_out, dv_out, lse_ptr, delta_ptr, q_strides, k_strides, v_strides, do_strides, dk_strides, dv_strides,
    q_rest, k_rest, v_rest, do_rest, dk_out_rest, dv_out_rest, mask, table, table_batch, table_head, table_width, score, drop,
    heads_q, heads_kv, group, seqlen_q, seqlen_k, q_start, upper, lower, qk_scale2, sm_scale, n_blocks,
    STEPS: tl.constexpr, NATURAL: tl.constexpr, TAILS: tl.constexpr, NEED_DK: tl.constexpr, NEED_DV: tl.constexpr,
    HAS_UPPER: tl.constexpr, HAS_LOWER: tl.constexpr, HAS_TAIL: tl.constexpr, RAGGED: tl.constexpr, REVERSED: tl.constexpr,
    FLAT: tl.constexpr, SPLIT: tl.constexpr, DTYPE: tl.constexpr, HEAD_DIM: tl.constexpr, HEAD_DIM_V: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    REST: tl.constexpr, REST_V: tl.constexpr, PRECISION: tl.constexpr, BULK: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """dk and dv of one tile of keys. Grid: key tiles x key heads x batch. RAGGED: the last tile of queries is not full."""
    n_block, head_kv, batch = schedule(n_blocks, heads_kv, REVERSED, FLAT)
    n_block, col = column_part(n_block, SPLIT, (BLOCK_D if NEED_DK else BLOCK_DV) // SPLIT)
    start_n = n_block * BLOCK_N
    kv_pos = start_n + tl.arange(0, BLOCK_N)
    k_tile = load_tile(k, k_strides, batch, head_kv, start_n, seqlen_k, HEAD_DIM, BLOCK_N, BLOCK_D, BULK, WIDEN)
    v_tile = load_tile(v, v_strides, batch, head_kv, start_n, seqlen_k, HEAD_DIM_V, BLOCK_N, BLOCK_DV, BULK, WIDEN)
    dk = tl.zeros([BLOCK_N, BLOCK_D // SPLIT], tl.float32)
    dv = tl.zeros([BLOCK_N, BLOCK_DV // SPLIT], tl.float32)
    k_more, v_more, dk_rest, dv_rest = None, None, kv_pos, kv_pos  # whatever they are: Triton 3.6 returns no None
    if REST > 0:
        if not BULK:
            q_rest, k_rest, dk_out_rest = q, k, dk_out
        k_more = load_tile(k_rest, k_strides, batch, head_kv, start_n, seqlen_k, HEAD_DIM, BLOCK_N, REST, BULK, WIDEN, BLOCK_D)
        dk_rest = tl.zeros([BLOCK_N, REST], tl.float32)
    if REST_V > 0:
        if not BULK:
            do_rest, v_rest, dv_out_rest = do, v, dv_out
        v_more = load_tile(v_rest, v_strides, batch, head_kv, start_n, seqlen_k, HEAD_DIM_V, BLOCK_N, REST_V, BULK, WIDEN, BLOCK_DV)
        dv_rest = tl.zeros([BLOCK_N, REST_V], tl.float32)

    # The plan transposed: key rows, query columns. kv <= q + upper bounds the queries from below, so the bounds swap roles.
    row_end = min(start_n + BLOCK_N, seqlen_k)
    lo, free_lo, free_hi, hi = tile_range(
        start_n, row_end, seqlen_q, lower - q_start, upper + q_start, BLOCK_M, HAS_LOWER, HAS_UPPER
    )
    of_key = None
    if table is not None:
        of_key = key_terms(mask, batch, kv_pos, seqlen_k)
    of_batch = None
    if drop is not None:
        of_batch = drop_terms(drop, batch)
    for member in range(group):
        head = head_kv * group + member
        head_rows = (batch * heads_q + head).to(tl.int64) * seqlen_q
        tiles = None
        if table is not None:
            tiles, lo, free_lo, free_hi, hi = listed(table, table_batch, table_head, table_width, batch, head, n_block)
        if HAS_UPPER and table is None:
            dk, dk_rest, dv, dv_rest = _dkdv_tiles(
                dk, dk_rest, dv, dv_rest, k_tile, k_more, v_tile, v_more, q, q_rest, do, do_rest, lse_ptr, delta_ptr,
                q_strides, do_strides, batch, head, head_rows, kv_pos,
                seqlen_q, seqlen_k, q_start, upper, lower, qk_scale2, lo, free_lo, tiles, mask, of_key, score, start_n,
                drop, of_batch, col, STEPS, NATURAL, TAILS, RAGGED, True, NEED_DK, NEED_DV, HAS_UPPER, HAS_LOWER,
                DTYPE, HEAD_DIM, HEAD_DIM_V, BLOCK_M, BLOCK_D, BLOCK_DV, SPLIT, REST, REST_V, PRECISION, BULK, WIDEN,
            )  # fmt: skip
        dk, dk_rest, dv, dv_rest = _dkdv_tiles(
            dk, dk_rest, dv, dv_rest, k_tile, k_more, v_tile, v_more, q, q_rest, do, do_rest, lse_ptr, delta_ptr,
            q_strides, do_strides, batch, head, head_rows, kv_pos,
            seqlen_q, seqlen_k, q_start, upper, lower, qk_scale2, free_lo, free_hi, tiles, mask, of_key, score, start_n,
            drop, of_batch, col, STEPS, NATURAL, TAILS, RAGGED, False, NEED_DK, NEED_DV, HAS_UPPER, HAS_LOWER,
            DTYPE, HEAD_DIM, HEAD_DIM_V, BLOCK_M, BLOCK_D, BLOCK_DV, SPLIT, REST, REST_V, PRECISION, BULK, WIDEN,
        )  # fmt: skip
        if HAS_LOWER or HAS_TAIL:
            dk, dk_rest, dv, dv_rest = _dkdv_tiles(
                dk, dk_rest, dv, dv_rest, k_tile, k_more, v_tile, v_more, q, q_rest, do, do_rest, lse_ptr, delta_ptr,
                q_strides, do_strides, batch, head, head_rows, kv_pos,
                seqlen_q, seqlen_k, q_start, upper, lower, qk_scale2, free_hi, hi, tiles, mask, of_key, score, start_n,
                drop, of_batch, col, STEPS, NATURAL, TAILS, RAGGED, True, NEED_DK, NEED_DV, HAS_UPPER, HAS_LOWER,
                DTYPE, HEAD_DIM, HEAD_DIM_V, BLOCK_M, BLOCK_D, BLOCK_DV, SPLIT, REST, REST_V, PRECISION, BULK, WIDEN,
            )  # fmt: skip
    if NEED_DK:
        dk = dk * sm_scale
        cols: tl.constexpr = BLOCK_D // SPLIT
        store_tile(dk_out, dk_strides, batch, head_kv, start_n, seqlen_k, dk, HEAD_DIM, BLOCK_N, cols, BULK, WIDEN, col)
        if REST > 0:
            dk_rest = dk_rest * sm_scale
            store_tile(
                dk_out_rest, dk_strides, batch, head_kv, start_n, seqlen_k, dk_rest, HEAD_DIM, BLOCK_N, REST, BULK, WIDEN, BLOCK_D
            )
    if NEED_DV:
        if drop is not None:
            dv *= drop[4]
        cols_v: tl.constexpr = BLOCK_DV // SPLIT
        store_tile(dv_out, dv_strides, batch, head_kv, start_n, seqlen_k, dv, HEAD_DIM_V, BLOCK_N, cols_v, BULK, WIDEN, col)
        if REST_V > 0:
            if drop is not None:
                dv_rest *= drop[4]
            store_tile(
                dv_out_rest,
                dv_strides,
                batch,
                head_kv,
                start_n,
                seqlen_k,
                dv_rest,
                HEAD_DIM_V,
                BLOCK_N,
                REST_V,
                BULK,
                WIDEN,
                BLOCK_DV,
            )


@triton.jit
def _dq_tiles(
    dq, dq_rest, dslope, q_tile, q_more, do_tile, do_more, lse2, log_l, delta, k, k_rest, v, v_rest, k_strides, v_strides,
    batch, head_kv, q_pos, seqlen_k, upper, lower, qk_scale2, first, last,
    tiles, mask, of_query, head, offs_m, seqlen_q, score, start_m, q_start, drop, of_batch, col,
    STEPS: tl.constexpr, NATURAL: tl.constexpr, TAILS: tl.constexpr, NEED_DQ: tl.constexpr, DSLOPES: tl.constexpr,
    MASKED: tl.constexpr, HAS_UPPER: tl.constexpr, HAS_LOWER: tl.constexpr,
    DTYPE: tl.constexpr, HEAD_DIM: tl.constexpr, HEAD_DIM_V: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, SPLIT: tl.constexpr,
    REST: tl.constexpr, REST_V: tl.constexpr, PRECISION: tl.constexpr, BULK: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """Stream the key tiles ``first .. last``, or those at these places of the list ``tiles``, past the resident query tile."""
    for n_block in tl.range(first, last):
        if tiles is not None:
            n_block = tl.load(tiles + n_block)
        start_n = n_block * BLOCK_N
        k_tile = load_tile(k, k_strides, batch, head_kv, start_n, seqlen_k, HEAD_DIM, BLOCK_N, BLOCK_D, BULK, WIDEN)
        v_tile = load_tile(v, v_strides, batch, head_kv, start_n, seqlen_k, HEAD_DIM_V, BLOCK_N, BLOCK_DV, BULK, WIDEN)
        # [BLOCK_M, BLOCK_N]
        qk = tl.dot(q_tile, tl.trans(k_tile), input_precision=PRECISION)
        if REST > 0:
            k_more = load_tile(k_rest, k_strides, batch, head_kv, start_n, seqlen_k, HEAD_DIM, BLOCK_N, REST, BULK, WIDEN, BLOCK_D)
            qk = tl.dot(q_more, tl.trans(k_more), qk, input_precision=PRECISION)
        if len(STEPS) > 0:
            s, slope, late = scored(
                qk * qk_scale2, score, batch, head, start_m, start_n, q_start, seqlen_q, seqlen_k, False, MASKED,
                STEPS, NATURAL, TAILS, DTYPE, "alibi",
            )  # fmt: skip
            p = weights(s, lse2[:, None], log_l[:, None], NATURAL)
        else:
            p = tl.math.exp2(qk * qk_scale2 - lse2[:, None])
        if MASKED:
            kv_pos = start_n + tl.arange(0, BLOCK_N)
            ok = allowed(q_pos[:, None], kv_pos[None, :], seqlen_k, upper, lower, HAS_UPPER, HAS_LOWER)
            if tiles is not None:
                of_key = key_terms(mask, batch, kv_pos, seqlen_k)
                ok = seen(ok, mask, of_query, of_key, batch, head, offs_m, kv_pos, start_n, seqlen_q, seqlen_k, False)
            p = tl.where(ok, p, 0.0)
        dp = tl.dot(do_tile, tl.trans(v_tile), input_precision=PRECISION)
        if REST_V > 0:
            v_more = load_tile(
                v_rest, v_strides, batch, head_kv, start_n, seqlen_k, HEAD_DIM_V, BLOCK_N, REST_V, BULK, WIDEN, BLOCK_DV
            )
            dp = tl.dot(do_more, tl.trans(v_more), dp, input_precision=PRECISION)
        if drop is not None:
            dp = tl.where(kept(of_batch, head, start_m, start_n, dp.shape[0], BLOCK_N, False), dp * drop[4], 0.0)
        ds = p * (dp - delta[:, None])
        if DSLOPES:
            dslope += slope_gradient(before(ds, late, score), q_pos, start_n)
        if len(STEPS) > 0:
            ds = before(ds, slope, score)
        if NEED_DQ:
            if SPLIT == 1:
                k_part = k_tile
            else:
                cols: tl.constexpr = BLOCK_D // SPLIT
                k_part = load_tile(k, k_strides, batch, head_kv, start_n, seqlen_k, HEAD_DIM, BLOCK_N, cols, BULK, WIDEN, col)
            dq = tl.dot(operand(ds, DTYPE, WIDEN), k_part, dq, input_precision=PRECISION)
            if REST > 0:
                dq_rest = tl.dot(operand(ds, DTYPE, WIDEN), k_more, dq_rest, input_precision=PRECISION)
    return dq, dq_rest, dslope


@triton.jit(do_not_specialize=LENGTHS)
def _dq_kernel(
    q, k, v, do, dq_out, lse_ptr, delta_ptr, q_strides, k_strides, v_strides, do_strides, dq_strides,
    q_rest, k_rest, v_rest, do_rest, dq_out_rest, mask, table, table_batch, table_head, table_width, score, dslopes_ptr, drop,
    heads_q, group, seqlen_q, seqlen_k, q_start, upper, lower, qk_scale2, sm_scale, m_blocks,
    STEPS: tl.constexpr, NATURAL: tl.constexpr, TAILS: tl.constexpr, NEED_DQ: tl.constexpr, DSLOPES: tl.constexpr,
    HAS_UPPER: tl.constexpr, HAS_LOWER: tl.constexpr, HAS_TAIL: tl.constexpr, REVERSED: tl.constexpr, FLAT: tl.constexpr,
    SPLIT: tl.constexpr, DTYPE: tl.constexpr, HEAD_DIM: tl.constexpr, HEAD_DIM_V: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    REST: tl.constexpr, REST_V: tl.constexpr, PRECISION: tl.constexpr, BULK: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """dq of one tile of queries, and what its rows add to the gradient of a slope. Grid: query tiles x query heads x batch."""
    m_block, head, batch = schedule(m_blocks, heads_q, REVERSED, FLAT)
    m_block, col = column_part(m_block, SPLIT, BLOCK_D // SPLIT)
    head_kv = head // group
    start_m = m_block * BLOCK_M
    offs_m = start_m + tl.arange(0, BLOCK_M)
    q_pos = q_start + offs_m
    head_rows = (batch * heads_q + head).to(tl.int64) * seqlen_q
    q_tile = load_tile(q, q_strides, batch, head, start_m, seqlen_q, HEAD_DIM, BLOCK_M, BLOCK_D, BULK, WIDEN)
    do_tile = load_tile(do, do_strides, batch, head, start_m, seqlen_q, HEAD_DIM_V, BLOCK_M, BLOCK_DV, BULK, WIDEN)
    lse2, log_l = _load_pivot(lse_ptr, head_rows + offs_m, offs_m < seqlen_q, NATURAL)
    delta = tl.load(delta_ptr + head_rows + offs_m, mask=offs_m < seqlen_q, other=0.0)
    dslope = tl.zeros([BLOCK_M], tl.float32)
    dq = tl.zeros([BLOCK_M, BLOCK_D // SPLIT], tl.float32)
    q_more, do_more, dq_rest = None, None, q_pos  # whatever it is: Triton 3.6 returns no None
    if REST > 0:
        if not BULK:
            q_rest, k_rest, dq_out_rest = q, k, dq_out
        q_more = load_tile(q_rest, q_strides, batch, head, start_m, seqlen_q, HEAD_DIM, BLOCK_M, REST, BULK, WIDEN, BLOCK_D)
        dq_rest = tl.zeros([BLOCK_M, REST], tl.float32)
    if REST_V > 0:
        if not BULK:
            do_rest, v_rest = do, v
        do_more = load_tile(do_rest, do_strides, batch, head, start_m, seqlen_q, HEAD_DIM_V, BLOCK_M, REST_V, BULK, WIDEN, BLOCK_DV)

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
        dq, dq_rest, dslope = _dq_tiles(
            dq, dq_rest, dslope, q_tile, q_more, do_tile, do_more, lse2, log_l, delta, k, k_rest, v, v_rest, k_strides, v_strides,
            batch, head_kv, q_pos, seqlen_k, upper, lower, qk_scale2, lo, free_lo, tiles, mask, of_query, head, offs_m, seqlen_q,
            score, start_m, q_start, drop, of_batch, col, STEPS, NATURAL, TAILS, NEED_DQ, DSLOPES, True,
            HAS_UPPER, HAS_LOWER, DTYPE, HEAD_DIM, HEAD_DIM_V, BLOCK_N, BLOCK_D, BLOCK_DV, SPLIT,
            REST, REST_V, PRECISION, BULK, WIDEN,
        )  # fmt: skip
    dq, dq_rest, dslope = _dq_tiles(
        dq, dq_rest, dslope, q_tile, q_more, do_tile, do_more, lse2, log_l, delta, k, k_rest, v, v_rest, k_strides, v_strides,
        batch, head_kv, q_pos, seqlen_k, upper, lower, qk_scale2, free_lo, free_hi, tiles, mask, of_query, head, offs_m, seqlen_q,
        score, start_m, q_start, drop, of_batch, col, STEPS, NATURAL, TAILS, NEED_DQ, DSLOPES, False,
        HAS_UPPER, HAS_LOWER, DTYPE, HEAD_DIM, HEAD_DIM_V, BLOCK_N, BLOCK_D, BLOCK_DV, SPLIT,
        REST, REST_V, PRECISION, BULK, WIDEN,
    )  # fmt: skip
    if HAS_UPPER or HAS_TAIL:
        dq, dq_rest, dslope = _dq_tiles(
            dq, dq_rest, dslope, q_tile, q_more, do_tile, do_more, lse2, log_l, delta, k, k_rest, v, v_rest, k_strides, v_strides,
            batch, head_kv, q_pos, seqlen_k, upper, lower, qk_scale2, free_hi, hi, tiles, mask, of_query, head, offs_m, seqlen_q,
            score, start_m, q_start, drop, of_batch, col, STEPS, NATURAL, TAILS, NEED_DQ, DSLOPES, True,
            HAS_UPPER, HAS_LOWER, DTYPE, HEAD_DIM, HEAD_DIM_V, BLOCK_N, BLOCK_D, BLOCK_DV, SPLIT,
            REST, REST_V, PRECISION, BULK, WIDEN,
        )  # fmt: skip
    if DSLOPES:
        tl.store(dslopes_ptr + head_rows + offs_m, dslope, mask=offs_m < seqlen_q)
    if NEED_DQ:
        dq = dq * sm_scale
        store_tile(dq_out, dq_strides, batch, head, start_m, seqlen_q, dq, HEAD_DIM, BLOCK_M, BLOCK_D // SPLIT, BULK, WIDEN, col)
        if REST > 0:
            dq_rest = dq_rest * sm_scale
            store_tile(
                dq_out_rest, dq_strides, batch, head, start_m, seqlen_q, dq_rest, HEAD_DIM, BLOCK_M, REST, BULK, WIDEN, BLOCK_D
            )
