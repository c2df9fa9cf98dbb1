"""The gradient of a bias: one kernel, no atomics, the same bits on every run.

``dbias`` is ds summed over the dims in which the bias broadcasts. A program owns one tile of the bias and visits, in a fixed order,
all tiles of scores that read it: (batches) x (heads) x (query tiles) x (key tiles), each one or all.
"""

import triton
import triton.language as tl

from .bwd import _load_pivot
from .drop import drop_terms, kept
from .parts import LENGTHS, allowed, key_terms, load_tile, of_queries, query_terms, round_bf16, schedule, seen, tile_range
from .scores import before, scored, weights


@triton.jit(do_not_specialize=LENGTHS)
def _dbias_kernel(
    q, k, v, do, dbias_ptr, lse_ptr, delta_ptr, q_strides, k_strides, v_strides, do_strides, dbias_strides,
    mask, score, drop, heads_q, heads_kv, group, seqlen_q, seqlen_k, q_start, upper, lower, qk_scale2,
    bias_heads, over_batch, over_heads, m_blocks, n_blocks,
    STEPS: tl.constexpr, NATURAL: tl.constexpr, TAILS: tl.constexpr, SUM_Q: tl.constexpr, SUM_K: tl.constexpr,
    MASKS: tl.constexpr, HAS_UPPER: tl.constexpr, HAS_LOWER: tl.constexpr, FLAT: tl.constexpr,
    DTYPE: tl.constexpr, HEAD_DIM: tl.constexpr, HEAD_DIM_V: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    PRECISION: tl.constexpr, BULK: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """One tile of dbias. Grid: tiles of the bias x its heads x its batches; ``over_*``: how many of each read it."""
    tiles_n = 1 if SUM_K else n_blocks
    over_m = m_blocks if SUM_Q else 1
    over_n = n_blocks if SUM_K else 1
    tile, bias_head, bias_batch = schedule((1 if SUM_Q else m_blocks) * tiles_n, bias_heads, False, FLAT)
    first_m = tile // tiles_n
    first_n = tile - first_m * tiles_n
    visits = over_batch * over_heads * over_m * over_n
    if not SUM_Q and not SUM_K:
        row_end = min(first_m * BLOCK_M + BLOCK_M, seqlen_q)
        lo, _, _, hi = tile_range(
            q_start + first_m * BLOCK_M, q_start + row_end, seqlen_k, upper, lower, BLOCK_N, HAS_UPPER, HAS_LOWER
        )
        visits = tl.where((first_n >= lo) & (first_n < hi), visits, 0)
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for visit in tl.range(0, visits):
        rest = visit // over_n
        start_n = (first_n + visit - rest * over_n) * BLOCK_N
        by_head = rest // over_m
        start_m = (first_m + rest - by_head * over_m) * BLOCK_M
        by_batch = by_head // over_heads
        head = bias_head + by_head - by_batch * over_heads
        batch = bias_batch + by_batch
        head_kv = head // group
        offs_m = start_m + tl.arange(0, BLOCK_M)
        kv_pos = start_n + tl.arange(0, BLOCK_N)
        head_rows = (batch * heads_q + head).to(tl.int64) * seqlen_q
        q_tile = load_tile(q, q_strides, batch, head, start_m, seqlen_q, HEAD_DIM, BLOCK_M, BLOCK_D, BULK, WIDEN)
        k_tile = load_tile(k, k_strides, batch, head_kv, start_n, seqlen_k, HEAD_DIM, BLOCK_N, BLOCK_D, BULK, WIDEN)
        do_tile = load_tile(do, do_strides, batch, head, start_m, seqlen_q, HEAD_DIM_V, BLOCK_M, BLOCK_DV, BULK, WIDEN)
        v_tile = load_tile(v, v_strides, batch, head_kv, start_n, seqlen_k, HEAD_DIM_V, BLOCK_N, BLOCK_DV, BULK, WIDEN)
        pivot, log_l = _load_pivot(lse_ptr, head_rows + offs_m, offs_m < seqlen_q, NATURAL)
        delta = tl.load(delta_ptr + head_rows + offs_m, mask=offs_m < seqlen_q, other=0.0)
        # [BLOCK_M, BLOCK_N]
        s = tl.dot(q_tile, tl.trans(k_tile), input_precision=PRECISION) * qk_scale2
        if SUM_Q and TAILS[0]:
            s = of_queries(s, offs_m, seqlen_q, 1)
        s, _every_slope, slope = scored(
            s, score, batch, head, start_m, start_n, q_start, seqlen_q, seqlen_k, False, True, STEPS, NATURAL, TAILS, DTYPE, "bias"
        )
        p = weights(s, pivot[:, None], log_l[:, None], NATURAL)
        ok = allowed((q_start + offs_m)[:, None], kv_pos[None, :], seqlen_k, upper, lower, HAS_UPPER, HAS_LOWER)
        if MASKS:
            of_query = query_terms(mask, batch, head, offs_m, seqlen_q)
            of_key = key_terms(mask, batch, kv_pos, seqlen_k)
            ok = seen(ok, mask, of_query, of_key, batch, head, offs_m, kv_pos, start_n, seqlen_q, seqlen_k, False)
        p = tl.where(ok, p, 0.0)
        dp = tl.dot(do_tile, tl.trans(v_tile), input_precision=PRECISION)
        if drop is not None:
            keep = kept(drop_terms(drop, batch), head, start_m, start_n, BLOCK_M, BLOCK_N, False)
            dp = tl.where(keep, dp * drop[4], 0.0)
        ds = p * (dp - delta[:, None])
        total += before(ds, slope, score)

    rows = first_m * BLOCK_M + tl.arange(0, BLOCK_M)
    keys = first_n * BLOCK_N + tl.arange(0, BLOCK_N)
    at = dbias_ptr + bias_batch.to(tl.int64) * dbias_strides[0] + bias_head.to(tl.int64) * dbias_strides[1]
    if SUM_Q and SUM_K:
        tl.store(at, _rounded(tl.sum(tl.sum(total, 1), 0), dbias_ptr))
    elif SUM_Q:
        ptrs = at + keys.to(tl.int64) * dbias_strides[3]
        tl.store(ptrs, _rounded(tl.sum(total, 0), dbias_ptr), mask=keys < seqlen_k)
    elif SUM_K:
        ptrs = at + rows.to(tl.int64) * dbias_strides[2]
        tl.store(ptrs, _rounded(tl.sum(total, 1), dbias_ptr), mask=rows < seqlen_q)
    else:
        ptrs = at + rows.to(tl.int64)[:, None] * dbias_strides[2] + keys.to(tl.int64)[None, :] * dbias_strides[3]
        inside = (rows[:, None] < seqlen_q) & (keys[None, :] < seqlen_k)
        tl.store(ptrs, _rounded(total, dbias_ptr), mask=inside)


@triton.jit
def _rounded(x, dst):
    """float32 in the dtype of what ``dst`` points to; to bfloat16 by hand, which the interpreter would truncate to."""
    if dst.dtype.element_ty == tl.bfloat16:
        x = round_bf16(x)
    return x.to(dst.dtype.element_ty)
