"""Forward mode: ``o``, ``lse`` and their derivatives ``t_o`` and ``t_lse`` along tangents of what goes into them, in one pass.

With ``s`` the scores after all steps, ``ts`` their derivative, and ``p = exp(s - lse)``,

    ts = sm_scale (tq k^T + q tk^T), through the derivative of every score step
    t_lse = sum_j p_j ts_j + p_sink tsink        t_o = sum_j p_j (ts_j v_j + tv_j) - t_lse o

Dropout takes weights from the sums over v and tv, not from those of t_lse. Grid and walk are those of the forward kernel
(``fwd.py``); K, V and their tangents stream past Q and its tangent. Invariant after every key tile, besides that of the forward
kernel: ``t_i = sum exp2(s2 - m_i) ts`` and ``acc_t = sum exp2(s2 - m_i) (ts v + tv)``. Tangents of scores are natural, whatever the
unit of the scores is.

A tangent that is not there (``HAS_TQ`` and so on) costs nothing: its tiles are not read, its products not made.
"""

import triton
import triton.language as tl

from .drop import drop_terms, kept
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
    schedule,
    seen,
    softmax_step,
    store_tile,
    tile_range,
)
from .scores import before, natural_step, scored, settled


@triton.jit
def _jvp_tiles(
    acc, acc_t, l_i, t_i, m_i, q, tq, k, v, tk, tv, k_strides, v_strides, tk_strides, tv_strides,
    batch, head_kv, q_pos, seqlen_k, qk_scale2, scale, upper, lower, first, last,
    tiles, mask, of_query, head, offs_m, seqlen_q, score, tangents, start_m, q_start, drop, of_batch,
    HAS_TQ: tl.constexpr, HAS_TK: tl.constexpr, HAS_TV: tl.constexpr, OF_SCORES: tl.constexpr,
    STEPS: tl.constexpr, NATURAL: tl.constexpr, TAILS: tl.constexpr,
    MASKED: tl.constexpr, HAS_UPPER: tl.constexpr, HAS_LOWER: tl.constexpr, DTYPE: tl.constexpr,
    HEAD_DIM: tl.constexpr, HEAD_DIM_V: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    PRECISION: tl.constexpr, BULK: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """Stream the key tiles ``first .. last``, or those at these places of the list ``tiles``, past the resident query tile."""
    for n_block in tl.range(first, last):
        if tiles is not None:
            n_block = tl.load(tiles + n_block)
        start_n = n_block * BLOCK_N
        # [BLOCK_N, BLOCK_D]
        k_tile = load_tile(k, k_strides, batch, head_kv, start_n, seqlen_k, HEAD_DIM, BLOCK_N, BLOCK_D, BULK, WIDEN)
        # [BLOCK_M, BLOCK_N]
        qk = tl.dot(q, tl.trans(k_tile), input_precision=PRECISION)
        t = tl.zeros_like(qk)
        if OF_SCORES:
            if HAS_TQ:
                t = tl.dot(tq, tl.trans(k_tile), t, input_precision=PRECISION)
            if HAS_TK:
                tk_tile = load_tile(tk, tk_strides, batch, head_kv, start_n, seqlen_k, HEAD_DIM, BLOCK_N, BLOCK_D, BULK, WIDEN)
                t = tl.dot(q, tl.trans(tk_tile), t, input_precision=PRECISION)
            t *= scale
        ok = None
        if MASKED:
            kv_pos = start_n + tl.arange(0, BLOCK_N)
            ok = allowed(q_pos[:, None], kv_pos[None, :], seqlen_k, upper, lower, HAS_UPPER, HAS_LOWER)
            if tiles is not None:
                of_key = key_terms(mask, batch, kv_pos, seqlen_k)
                ok = seen(ok, mask, of_query, of_key, batch, head, offs_m, kv_pos, start_n, seqlen_q, seqlen_k, False)
        if len(STEPS) > 0:
            s, t, _ = scored(
                qk * qk_scale2, score, batch, head, start_m, start_n, q_start, seqlen_q, seqlen_k, False, MASKED,
                STEPS, NATURAL, TAILS, DTYPE, "tangents", t, tangents,
            )  # fmt: skip
        if NATURAL:
            p, alpha, m_i, l_i = natural_step(s, ok, m_i, l_i, MASKED)
        elif len(STEPS) > 0:
            p, alpha, m_i, l_i = softmax_step(s, ok, m_i, l_i, 1.0, MASKED)
        else:
            p, alpha, m_i, l_i = softmax_step(qk, ok, m_i, l_i, qk_scale2, MASKED)
        acc = acc * alpha[:, None]
        acc_t = acc_t * alpha[:, None]
        # [BLOCK_N, BLOCK_DV]
        v_tile = load_tile(v, v_strides, batch, head_kv, start_n, seqlen_k, HEAD_DIM_V, BLOCK_N, BLOCK_DV, BULK, WIDEN)
        used = None
        if drop is not None:
            used = kept(of_batch, head, start_m, start_n, p.shape[0], BLOCK_N, False)
            weights = operand(tl.where(used, p, 0.0), DTYPE, WIDEN)
        else:
            weights = operand(p, DTYPE, WIDEN)
        acc = tl.dot(weights, v_tile, acc, input_precision=PRECISION)
        if OF_SCORES:  # between two products, so that the first of them goes on meanwhile
            if len(STEPS) > 0:
                pt = before(p, t, score)
            else:
                pt = p * t
            if MASKED:
                # Keys that nobody sees may hold anything, and 0 * NaN is not 0.
                pt = tl.where(ok, pt, 0.0)
            t_i = t_i * alpha + tl.sum(pt, 1)
            if drop is not None:
                pt = tl.where(used, pt, 0.0)
            weights_t = operand(pt, DTYPE, WIDEN)
        if HAS_TV:
            tv_tile = load_tile(tv, tv_strides, batch, head_kv, start_n, seqlen_k, HEAD_DIM_V, BLOCK_N, BLOCK_DV, BULK, WIDEN)
            acc_t = tl.dot(weights, tv_tile, acc_t, input_precision=PRECISION)
        if OF_SCORES:
            acc_t = tl.dot(weights_t, v_tile, acc_t, input_precision=PRECISION)
    return acc, acc_t, l_i, t_i, m_i


@triton.jit
def _with_sink(acc, acc_t, l_i, t_i, m_i, sink, tsink, batch, head, NATURAL: tl.constexpr):
    """One more logit, whose value is 0 and whose derivative is ``tsink``."""
    unit: tl.constexpr = LOG2_E if NATURAL else 1.0
    logit = tl.load(sink[0] + batch.to(tl.int64) * sink[1][0] + head.to(tl.int64) * sink[1][1]).to(tl.float32)
    if not NATURAL:
        logit *= LOG2_E
    m_new = tl.maximum(m_i, logit)
    pivot = tl.where(m_new == -float("inf"), 0.0, m_new)
    alpha = tl.math.exp2((m_i - pivot) * unit)
    weight = tl.math.exp2((logit - pivot) * unit)
    t_i = t_i * alpha
    if tsink is not None:
        by = tl.load(tsink[0] + batch.to(tl.int64) * tsink[1][0] + head.to(tl.int64) * tsink[1][1]).to(tl.float32)
        t_i += weight * by
    return acc * alpha[:, None], acc_t * alpha[:, None], l_i * alpha + weight, t_i, m_new


@triton.jit(do_not_specialize=LENGTHS)
def _jvp_kernel(
    q, k, v, tq, tk, tv, o, t_o, lse_ptr, t_lse_ptr,
    q_strides, k_strides, v_strides, tq_strides, tk_strides, tv_strides, o_strides, t_o_strides,
    mask, table, table_batch, table_head, table_width, score, sink, tangents, rows_ptr, drop,
    heads_q, group, seqlen_q, seqlen_k, q_start, upper, lower, qk_scale2, scale, m_blocks,
    HAS_TQ: tl.constexpr, HAS_TK: tl.constexpr, HAS_TV: tl.constexpr, OF_SCORES: tl.constexpr,
    STEPS: tl.constexpr, NATURAL: tl.constexpr, TAILS: tl.constexpr,
    NEGATIVE: tl.constexpr, HAS_UPPER: tl.constexpr, HAS_LOWER: tl.constexpr, HAS_TAIL: tl.constexpr,
    REVERSED: tl.constexpr, FLAT: tl.constexpr,
    DTYPE: tl.constexpr, HEAD_DIM: tl.constexpr, HEAD_DIM_V: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    PRECISION: tl.constexpr, BULK: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    m_block, head, batch = schedule(m_blocks, heads_q, REVERSED, FLAT)
    head_kv = head // group
    start_m = m_block * BLOCK_M
    offs_m = start_m + tl.arange(0, BLOCK_M)
    q_pos = q_start + offs_m

    m_i = tl.full([BLOCK_M], -float("inf"), tl.float32)
    l_i = tl.zeros([BLOCK_M], tl.float32)
    t_i = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
    acc_t = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
    # [BLOCK_M, BLOCK_D]
    q_tile = load_tile(q, q_strides, batch, head, start_m, seqlen_q, HEAD_DIM, BLOCK_M, BLOCK_D, BULK, WIDEN)
    tq_tile = q_tile
    if HAS_TQ:
        tq_tile = load_tile(tq, tq_strides, batch, head, start_m, seqlen_q, HEAD_DIM, BLOCK_M, BLOCK_D, BULK, WIDEN)
    if NEGATIVE:
        # As in the forward kernel: the sign of the scale goes into q, and so into its tangent.
        q_tile = -q_tile
        tq_tile = -tq_tile

    row_end = min(start_m + BLOCK_M, seqlen_q)
    lo, free_lo, free_hi, hi = tile_range(
        q_start + start_m, q_start + row_end, seqlen_k, upper, lower, BLOCK_N, HAS_UPPER, HAS_LOWER
    )
    of_query = None
    tiles = None
    of_batch = None
    if drop is not None:
        of_batch = drop_terms(drop, batch)
    if table is not None:
        of_query = query_terms(mask, batch, head, offs_m, seqlen_q)
        tiles, lo, free_lo, free_hi, hi = listed(table, table_batch, table_head, table_width, batch, head, m_block)
    if HAS_LOWER and table is None:
        acc, acc_t, l_i, t_i, m_i = _jvp_tiles(
            acc, acc_t, l_i, t_i, m_i, q_tile, tq_tile, k, v, tk, tv, k_strides, v_strides, tk_strides, tv_strides,
            batch, head_kv, q_pos, seqlen_k, qk_scale2, scale, upper, lower, lo, free_lo,
            tiles, mask, of_query, head, offs_m, seqlen_q, score, tangents, start_m, q_start, drop, of_batch,
            HAS_TQ, HAS_TK, HAS_TV, OF_SCORES, STEPS, NATURAL, TAILS, True, HAS_UPPER, HAS_LOWER, DTYPE,
            HEAD_DIM, HEAD_DIM_V, BLOCK_N, BLOCK_D, BLOCK_DV, PRECISION, BULK, WIDEN,
        )  # fmt: skip
    acc, acc_t, l_i, t_i, m_i = _jvp_tiles(
        acc, acc_t, l_i, t_i, m_i, q_tile, tq_tile, k, v, tk, tv, k_strides, v_strides, tk_strides, tv_strides,
        batch, head_kv, q_pos, seqlen_k, qk_scale2, scale, upper, lower, free_lo, free_hi,
        tiles, mask, of_query, head, offs_m, seqlen_q, score, tangents, start_m, q_start, drop, of_batch,
        HAS_TQ, HAS_TK, HAS_TV, OF_SCORES, STEPS, NATURAL, TAILS, False, HAS_UPPER, HAS_LOWER, DTYPE,
        HEAD_DIM, HEAD_DIM_V, BLOCK_N, BLOCK_D, BLOCK_DV, PRECISION, BULK, WIDEN,
    )  # fmt: skip
    if HAS_UPPER or HAS_TAIL:
        acc, acc_t, l_i, t_i, m_i = _jvp_tiles(
            acc, acc_t, l_i, t_i, m_i, q_tile, tq_tile, k, v, tk, tv, k_strides, v_strides, tk_strides, tv_strides,
            batch, head_kv, q_pos, seqlen_k, qk_scale2, scale, upper, lower, free_hi, hi,
            tiles, mask, of_query, head, offs_m, seqlen_q, score, tangents, start_m, q_start, drop, of_batch,
            HAS_TQ, HAS_TK, HAS_TV, OF_SCORES, STEPS, NATURAL, TAILS, True, HAS_UPPER, HAS_LOWER, DTYPE,
            HEAD_DIM, HEAD_DIM_V, BLOCK_N, BLOCK_D, BLOCK_DV, PRECISION, BULK, WIDEN,
        )  # fmt: skip

    if drop is not None:
        acc *= drop[4]
        acc_t *= drop[4]
    if NATURAL:
        rest = settled(m_i)
        acc *= rest[:, None]
        acc_t *= rest[:, None]
        l_i *= rest
        t_i *= rest
    if sink is not None:
        acc, acc_t, l_i, t_i, m_i = _with_sink(acc, acc_t, l_i, t_i, m_i, sink, tangents[2], batch, head, NATURAL)
    # A row that saw no key has l_i = 0: o = 0, lse = -inf, and nothing changes with any tangent.
    l_safe = tl.where(l_i == 0.0, 1.0, l_i)
    acc = acc / l_safe[:, None]
    t_lse = t_i / l_safe
    acc_t = acc_t / l_safe[:, None] - t_lse[:, None] * acc
    lse = tl.where(l_i == 0.0, -float("inf"), (m_i + tl.math.log2(l_safe)) * LN_2)
    head_rows = (batch * heads_q + head).to(tl.int64) * seqlen_q
    if NATURAL:
        log_l = tl.math.log2(l_safe) * LN_2
        lse = tl.where(l_i == 0.0, -float("inf"), m_i + log_l)
        if rows_ptr is not None:
            tl.store(rows_ptr + (head_rows + offs_m) * 2, m_i, mask=offs_m < seqlen_q)
            tl.store(rows_ptr + (head_rows + offs_m) * 2 + 1, log_l, mask=offs_m < seqlen_q)
    tl.store(lse_ptr + head_rows + offs_m, lse, mask=offs_m < seqlen_q)
    tl.store(t_lse_ptr + head_rows + offs_m, t_lse, mask=offs_m < seqlen_q)
    store_tile(o, o_strides, batch, head, start_m, seqlen_q, acc, HEAD_DIM_V, BLOCK_M, BLOCK_DV, BULK, WIDEN)
    store_tile(t_o, t_o_strides, batch, head, start_m, seqlen_q, acc_t, HEAD_DIM_V, BLOCK_M, BLOCK_DV, BULK, WIDEN)
