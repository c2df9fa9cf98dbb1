"""dq and the gradient of a bias in one kernel, where the bias is the one step of the scores: no atomics, the same bits every time.

A program holds the same tile of queries of MEMBERS sequences (those that share the bias) and streams their keys side by
side. Each ds goes into the dq of its sequence and into the sum over the sequences, which is written once: seven products for a tile
of scores (with those of ``bwd._dkdv_kernel``) in place of the nine that a pass of its own for the bias (``dbias.py``) makes.
"""

import triton
import triton.language as tl

from .bwd import _load_pivot
from .dbias import _rounded
from .parts import LENGTHS, allowed, load_tile, operand, schedule, store_tile, tile_range
from .scores import load_bias, weights


@triton.jit
def _resident(
    q, do, lse_ptr, delta_ptr, q_strides, do_strides, batch, head, heads_q, start_m, seqlen_q,
    HEAD_DIM: tl.constexpr, HEAD_DIM_V: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    BULK: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """What a program keeps of one sequence: its tiles of q and do, what its weights are measured from, and delta."""
    offs_m = start_m + tl.arange(0, BLOCK_M)
    rows = (batch * heads_q + head).to(tl.int64) * seqlen_q + offs_m
    q_tile = load_tile(q, q_strides, batch, head, start_m, seqlen_q, HEAD_DIM, BLOCK_M, BLOCK_D, BULK, WIDEN)
    do_tile = load_tile(do, do_strides, batch, head, start_m, seqlen_q, HEAD_DIM_V, BLOCK_M, BLOCK_DV, BULK, WIDEN)
    pivot, log_l = _load_pivot(lse_ptr, rows, offs_m < seqlen_q, True)
    delta = tl.load(delta_ptr + rows, mask=offs_m < seqlen_q, other=0.0)
    return q_tile, do_tile, pivot, log_l, delta


@triton.jit
def _tile(
    dq, total, of, k, v, k_strides, v_strides, batch, head_kv, start_n, seqlen_k, scale, bias_tile, ok,
    MASKED: tl.constexpr, DTYPE: tl.constexpr, HEAD_DIM: tl.constexpr, HEAD_DIM_V: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    PRECISION: tl.constexpr, BULK: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """Add one tile of keys of one sequence to its dq and to the sum of ds."""
    k_tile = load_tile(k, k_strides, batch, head_kv, start_n, seqlen_k, HEAD_DIM, BLOCK_N, BLOCK_D, BULK, WIDEN)
    v_tile = load_tile(v, v_strides, batch, head_kv, start_n, seqlen_k, HEAD_DIM_V, BLOCK_N, BLOCK_DV, BULK, WIDEN)
    # [BLOCK_M, BLOCK_N]
    s = tl.dot(of[0], tl.trans(k_tile), input_precision=PRECISION) * scale + bias_tile
    p = weights(s, of[2][:, None], of[3][:, None], True)
    if MASKED:
        p = tl.where(ok, p, 0.0)
    dp = tl.dot(of[1], tl.trans(v_tile), input_precision=PRECISION)
    ds = p * (dp - of[4][:, None])
    dq = tl.dot(operand(ds, DTYPE, WIDEN), k_tile, dq, input_precision=PRECISION)
    return dq, total + ds


@triton.jit
def _store(dbias_ptr, dbias_strides, tile, batch, head, start_m, start_n, seqlen_q, seqlen_k, TAILS: tl.constexpr):
    """Write one tile of the gradient of the bias."""
    rows = tl.arange(0, tile.shape[0])[:, None]
    keys = tl.arange(0, tile.shape[1])[None, :]
    at = batch.to(tl.int64) * dbias_strides[0] + head.to(tl.int64) * dbias_strides[1]
    at = at + tl.cast(start_m, tl.int64) * dbias_strides[2] + tl.cast(start_n, tl.int64) * dbias_strides[3]
    ptrs = dbias_ptr + at + (rows.to(tl.int64) * dbias_strides[2] + keys.to(tl.int64) * dbias_strides[3])
    tile = _rounded(tile, dbias_ptr)
    if TAILS[0] or TAILS[1]:
        tl.store(ptrs, tile, mask=(rows < seqlen_q - start_m) & (keys < seqlen_k - start_n))
    else:
        tl.store(ptrs, tile)


@triton.jit(do_not_specialize=LENGTHS)
def _dq_bias_kernel(
    q, k, v, do, dq_out, dbias_ptr, lse_ptr, delta_ptr, q_strides, k_strides, v_strides, do_strides, dq_strides,
    dbias_strides, bias, heads_q, group, seqlen_q, seqlen_k, q_start, upper, lower, scale, sm_scale, m_blocks, n_blocks,
    MEMBERS: tl.constexpr, TAILS: tl.constexpr, FAR: tl.constexpr,
    HAS_UPPER: tl.constexpr, HAS_LOWER: tl.constexpr, REVERSED: tl.constexpr, FLAT: tl.constexpr,
    DTYPE: tl.constexpr, HEAD_DIM: tl.constexpr, HEAD_DIM_V: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    PRECISION: tl.constexpr, BULK: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """One tile of queries of MEMBERS sequences. Grid: query tiles x query heads x batch / MEMBERS."""
    m_block, head, batch = schedule(m_blocks, heads_q, REVERSED, FLAT)
    batch = batch * MEMBERS
    head_kv = head // group
    start_m = m_block * BLOCK_M
    q_pos = q_start + start_m + tl.arange(0, BLOCK_M)
    of_0 = _resident(
        q, do, lse_ptr, delta_ptr, q_strides, do_strides, batch, head, heads_q, start_m, seqlen_q,
        HEAD_DIM, HEAD_DIM_V, BLOCK_M, BLOCK_D, BLOCK_DV, BULK, WIDEN,
    )  # fmt: skip
    dq_0 = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    if MEMBERS > 1:
        of_1 = _resident(
            q, do, lse_ptr, delta_ptr, q_strides, do_strides, batch + 1, head, heads_q, start_m, seqlen_q,
            HEAD_DIM, HEAD_DIM_V, BLOCK_M, BLOCK_D, BLOCK_DV, BULK, WIDEN,
        )  # fmt: skip
        dq_1 = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    if MEMBERS > 2:
        of_2 = _resident(
            q, do, lse_ptr, delta_ptr, q_strides, do_strides, batch + 2, head, heads_q, start_m, seqlen_q,
            HEAD_DIM, HEAD_DIM_V, BLOCK_M, BLOCK_D, BLOCK_DV, BULK, WIDEN,
        )  # fmt: skip
        dq_2 = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    if MEMBERS > 3:
        of_3 = _resident(
            q, do, lse_ptr, delta_ptr, q_strides, do_strides, batch + 3, head, heads_q, start_m, seqlen_q,
            HEAD_DIM, HEAD_DIM_V, BLOCK_M, BLOCK_D, BLOCK_DV, BULK, WIDEN,
        )  # fmt: skip
        dq_3 = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)

    row_end = min(start_m + BLOCK_M, seqlen_q)
    lo, _, _, hi = tile_range(q_start + start_m, q_start + row_end, seqlen_k, upper, lower, BLOCK_N, HAS_UPPER, HAS_LOWER)
    nothing = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for n_block in tl.range(0, lo):
        _store(dbias_ptr, dbias_strides, nothing, batch, head, start_m, n_block * BLOCK_N, seqlen_q, seqlen_k, TAILS)
    for n_block in tl.range(hi, n_blocks):
        _store(dbias_ptr, dbias_strides, nothing, batch, head, start_m, n_block * BLOCK_N, seqlen_q, seqlen_k, TAILS)
    masked: tl.constexpr = HAS_UPPER or HAS_LOWER or TAILS[1]
    for n_block in tl.range(lo, hi):
        start_n = n_block * BLOCK_N
        bias_tile = load_bias(
            bias[0], bias[1], batch, head, start_m, start_n, seqlen_q, seqlen_k, BLOCK_M, BLOCK_N, 1, 0, TAILS[0], TAILS[1], FAR
        )
        ok = None
        if masked:
            kv_pos = start_n + tl.arange(0, BLOCK_N)
            ok = allowed(q_pos[:, None], kv_pos[None, :], seqlen_k, upper, lower, HAS_UPPER, HAS_LOWER)
        total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        dq_0, total = _tile(
            dq_0, total, of_0, k, v, k_strides, v_strides, batch, head_kv, start_n, seqlen_k, scale, bias_tile, ok,
            masked, DTYPE, HEAD_DIM, HEAD_DIM_V, BLOCK_N, BLOCK_D, BLOCK_DV, PRECISION, BULK, WIDEN,
        )  # fmt: skip
        if MEMBERS > 1:
            dq_1, total = _tile(
                dq_1, total, of_1, k, v, k_strides, v_strides, batch + 1, head_kv, start_n, seqlen_k, scale, bias_tile, ok,
                masked, DTYPE, HEAD_DIM, HEAD_DIM_V, BLOCK_N, BLOCK_D, BLOCK_DV, PRECISION, BULK, WIDEN,
            )  # fmt: skip
        if MEMBERS > 2:
            dq_2, total = _tile(
                dq_2, total, of_2, k, v, k_strides, v_strides, batch + 2, head_kv, start_n, seqlen_k, scale, bias_tile, ok,
                masked, DTYPE, HEAD_DIM, HEAD_DIM_V, BLOCK_N, BLOCK_D, BLOCK_DV, PRECISION, BULK, WIDEN,
            )  # fmt: skip
        if MEMBERS > 3:
            dq_3, total = _tile(
                dq_3, total, of_3, k, v, k_strides, v_strides, batch + 3, head_kv, start_n, seqlen_k, scale, bias_tile, ok,
                masked, DTYPE, HEAD_DIM, HEAD_DIM_V, BLOCK_N, BLOCK_D, BLOCK_DV, PRECISION, BULK, WIDEN,
            )  # fmt: skip
        _store(dbias_ptr, dbias_strides, total, batch, head, start_m, start_n, seqlen_q, seqlen_k, TAILS)

    store_tile(dq_out, dq_strides, batch, head, start_m, seqlen_q, dq_0 * sm_scale, HEAD_DIM, BLOCK_M, BLOCK_D, BULK, WIDEN)
    if MEMBERS > 1:
        store_tile(dq_out, dq_strides, batch + 1, head, start_m, seqlen_q, dq_1 * sm_scale, HEAD_DIM, BLOCK_M, BLOCK_D, BULK, WIDEN)
    if MEMBERS > 2:
        store_tile(dq_out, dq_strides, batch + 2, head, start_m, seqlen_q, dq_2 * sm_scale, HEAD_DIM, BLOCK_M, BLOCK_D, BULK, WIDEN)
    if MEMBERS > 3:
        store_tile(dq_out, dq_strides, batch + 3, head, start_m, seqlen_q, dq_3 * sm_scale, HEAD_DIM, BLOCK_M, BLOCK_D, BULK, WIDEN)
