"""Backward: ``dk`` and ``dv`` of BLOCK_N keys of one head of keys, 64 for each consumer, streaming the queries that see them.

With ``p = exp2(s2 - lse2)`` recomputed under the same mask and ``delta = sum_d do * o - dlse`` for each row,

    dv = p^T do        dp = do v^T        ds = p (dp - delta)        dk = sm_scale ds^T q        dq = sm_scale ds k

Partitions: BLOCK_N / 64 consumers, and a feeder that copies tiles of queries past them. Everything is transposed: rows are keys,
columns are queries, so that p^T and ds^T are register operands as they come out of the products before. The scores of the next tile
are issued before the work on this one ends. A tile is a row of parts, nearly always one (``chunks.py``); dk and dv have an
accumulator for each.

The rows arrive with their tiles: ``lse2``, +inf for a row that saw no key or lies past the end (every p of it is an exact zero, so
ragged queries need no mask), and ``-delta``, from which the accumulator of dp starts.

Arrivals that complete a phase of each barrier, with C consumers of W = 4 warps:
    keys, values         full: 1 (bytes), once
    queries, gradients   full: 1 (bytes)   empty: C * W, each warp after its last read of the tile
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma, warpgroup_mma_wait

from .bwd_parts import LENGTHS, Keys, feed_all, hidden, packed, product_with, rows_of, scores, times, weights
from .chunks import Rows, accumulator, inner, make_part_ring, make_tiles, operand, outer, pass_over, settled, zeros_like
from .ds_tiles import KeptDs, make_ds_slots, store_all
from .parts import ROWS, WARPS, for_workers, wait
from .terms import make_ramp


@gluon.jit
def _step(
    s, dk, dv, step, more, keys, own, ramp, k, v, q_ring, do_ring, zeros, place, key_row, qk_scale2, kept,
    MASKED: gl.constexpr,
):  # fmt: skip
    """One tile of queries, whose scores are in ``s``. Issues the scores of the tile after it, if there is one (``more``)."""
    S_LAYOUT: gl.constexpr = s.type.layout
    DTYPE: gl.constexpr = v[0].dtype
    q = q_ring.parts(step)
    p, slope, m_block = weights(s, q_ring, step, keys, own, place, key_row, qk_scale2, MASKED)
    p16, words = packed(p, DTYPE)
    if keys.CAPPED:
        words = packed(p * slope, DTYPE)[1]
    do = do_ring.take(step)
    if keys.NEED_DK:
        dp = inner(v, do, zeros + rows_of(do_ring, step, S_LAYOUT)[None, :], False)
    if keys.NEED_DV:
        p_operand = operand(p16, dv)
        dv = outer(p_operand, do, dv)
    if keys.NEED_DK:
        dp = warpgroup_mma_wait(len(v) if keys.NEED_DV else 0, deps=(dp,))
        ds = product_with(words, dp, DTYPE)
        if keys.KEEPS:  # noqa: SIM102 (both are constants, and only then there is the second)
            if kept.EARLY:
                kept.put(step, ds, m_block)
        ds_operand = operand(ds, dk)
        dk = outer(ds_operand, q, dk)
    if keys.NEED_DV:
        p_operand, dv = settled(len(v) if keys.NEED_DK else 0, p_operand, dv)
    do_ring.release(step)
    # The last one works on a slot that is being refilled, and nobody reads its scores.
    if more:
        q_ring.arrived(step + 1)
    s_next = scores(k, q_ring.parts(step + 1), zeros, keys, own, ramp)
    if keys.KEEPS:  # noqa: SIM102
        if not kept.EARLY:
            kept.put(step, ds, m_block)
    if keys.NEED_DK:
        ds_operand, dk = settled(len(v), ds_operand, dk)
    q_ring.release(step)
    s = warpgroup_mma_wait(0, deps=(s_next,))
    return s, dk, dv, step + 1


@gluon.jit
def _steps(
    first, last, own_hi, s, dk, dv, step, keys, own, ramp, k, v, q_ring, do_ring, zeros, key_row, qk_scale2, kept,
    MASKED: gl.constexpr,
):  # fmt: skip
    for place in range(first, last):
        s, dk, dv, step = _step(
            s, dk, dv, step, place + 1 < own_hi, keys, own, ramp, k, v, q_ring, do_ring, zeros, place, key_row,
            qk_scale2, kept, MASKED,
        )  # fmt: skip
    return s, dk, dv, step


@gluon.jit
def _crowded_steps(
    own_lo, free_lo, free_hi, own_hi, s, dk, dv, step, keys, own, ramp, k, v, q_ring, do_ring, zeros, key_row, qk_scale2, kept,
):  # fmt: skip
    """All tiles of queries of one head in one loop, where dk and dv lie in parts: their accumulators leave few registers.

    Free tiles branch around the mask. The product with p is waited for before ds is made, so that p and ds never take registers
    both.
    """
    S_LAYOUT: gl.constexpr = s.type.layout
    DTYPE: gl.constexpr = k[0].dtype
    gl.static_assert(len(keys.STEPS) == 0 and not keys.LISTED, "no terms besides bounds")
    for place in range(own_lo, own_hi):
        q = q_ring.parts(step)
        p, _, m_block = weights(s, q_ring, step, keys, own, place, key_row, qk_scale2, False)
        if keys.HAS_UPPER or keys.HAS_LOWER or keys.HAS_TAIL:  # noqa: SIM102
            if (place < free_lo) | (place >= free_hi):
                p = hidden(p, keys, own, m_block, key_row, keys.HEAD_DIM == 96)
        p16 = p.to(DTYPE)
        do = do_ring.take(step)
        if keys.NEED_DV:
            p_operand = operand(p16, dv)
            dv = outer(p_operand, do, dv)
        if keys.NEED_DK:
            dp = inner(v, do, zeros + rows_of(do_ring, step, S_LAYOUT)[None, :], False)
        if keys.NEED_DV:
            p_operand, dv = settled(len(v) if keys.NEED_DK else 0, p_operand, dv)
        if keys.NEED_DK:
            dp = warpgroup_mma_wait(0, deps=(dp,))
        do_ring.release(step)
        if keys.NEED_DK:
            ds = times(p16, dp, DTYPE)
            ds_operand = operand(ds, dk)
            dk = outer(ds_operand, q, dk)
        if place + 1 < own_hi:
            q_ring.arrived(step + 1)
        s_next = scores(k, q_ring.parts(step + 1), zeros, keys, own, ramp)
        if keys.KEEPS:
            kept.put(step, ds, m_block)
        if keys.NEED_DK:
            ds_operand, dk = settled(len(k), ds_operand, dk)
        q_ring.release(step)
        s = warpgroup_mma_wait(0, deps=(s_next,))
        step += 1
    return s, dk, dv, step


@gluon.jit
def _consumer(
    C: gl.constexpr, keys, dk_desc, dv_desc, k_tiles, v_tiles, kv_full, q_ring, do_ring, qk_scale2, sm_scale, ds_slots, ramp
):
    S_LAYOUT: gl.constexpr = accumulator(keys.BLOCK_M)
    batch, head_kv, start_n = keys.place()
    key_row = start_n + C * ROWS
    if not keys.LISTED:
        lo, hi = keys.tiles(start_n)
        own_lo, free_lo, free_hi, own_hi = keys.own(key_row, lo, hi)
    k = Rows(k_tiles.wide, C * ROWS) if keys.AGAIN else k_tiles.parts(C)
    v = v_tiles.parts(C)
    dk = zeros_like(k_tiles.parts(C))
    dv = zeros_like(v)
    zeros = gl.zeros([ROWS, keys.BLOCK_M], gl.float32, S_LAYOUT)
    step = 0
    wait(kv_full.index(0), 0)
    wait(kv_full.index(1), 0)
    for member in range(keys.group):
        if keys.KEEPS:
            kept = KeptDs(ds_slots, member * (own_hi - own_lo) - own_lo, C, True)
        else:
            kept = key_row
        tiles = None
        if keys.LISTED:
            tiles, free_hi, own_hi = keys.listed(batch, head_kv * keys.group + member, start_n)
            free_lo = free_hi * 0
        else:
            step = pass_over(own_lo - lo, step, q_ring, do_ring)
        own = keys.head(batch, head_kv * keys.group + member, tiles, qk_scale2, S_LAYOUT)
        q_ring.arrived(step)
        s = warpgroup_mma_wait(0, deps=(scores(k, q_ring.parts(step), zeros, keys, own, ramp),))
        if len(dk) > 1:
            s, dk, dv, step = _crowded_steps(
                own_lo, free_lo, free_hi, own_hi, s, dk, dv, step, keys, own, ramp, k, v, q_ring, do_ring, zeros, key_row,
                qk_scale2, kept,
            )  # fmt: skip
        else:
            if keys.HAS_UPPER and not keys.LISTED:
                s, dk, dv, step = _steps(
                    own_lo, free_lo, own_hi, s, dk, dv, step, keys, own, ramp, k, v, q_ring, do_ring, zeros, key_row,
                    qk_scale2, kept, True,
                )  # fmt: skip
            s, dk, dv, step = _steps(
                free_lo, free_hi, own_hi, s, dk, dv, step, keys, own, ramp, k, v, q_ring, do_ring, zeros, key_row,
                qk_scale2, kept, False,
            )  # fmt: skip
            if keys.HAS_LOWER or keys.HAS_TAIL or keys.LISTED:
                s, dk, dv, step = _steps(
                    free_hi, own_hi, own_hi, s, dk, dv, step, keys, own, ramp, k, v, q_ring, do_ring, zeros, key_row,
                    qk_scale2, kept, True,
                )  # fmt: skip
        if not keys.LISTED:
            step = pass_over(hi - own_hi, step, q_ring, do_ring)
    # Worked out again rather than kept in registers.
    batch, head_kv, start_n = keys.place()
    if keys.NEED_DV:
        v_tiles.write(dv, 1.0, dv_desc, batch, head_kv, start_n + C * ROWS, C)
    if keys.NEED_DK:
        k_tiles.write(dk, sm_scale, dk_desc, batch, head_kv, start_n + C * ROWS, C)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=LENGTHS)
def _dkdv_kernel(
    k_desc, v_desc, q_desc, do_desc, lse2_desc, delta_desc, dk_desc, dv_desc, ds_desc, qk_scale2, sm_scale,
    heads_kv, group, q_pad, seqlen_k, q_start, upper, lower, n_blocks, heads_total, heads_together, head_first, seqlen_q,
    terms, table_batch, table_head, table_width,
    HAS_UPPER: gl.constexpr, HAS_LOWER: gl.constexpr, HAS_TAIL: gl.constexpr, LONGEST: gl.constexpr,
    NEED_DK: gl.constexpr, NEED_DV: gl.constexpr, KEEPS: gl.constexpr,
    HEAD_DIM: gl.constexpr, HEAD_DIM_V: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
    CONSUMER_REGISTERS: gl.constexpr, FEEDER_REGISTERS: gl.constexpr,
    STEPS: gl.constexpr, CAPPED: gl.constexpr, RAMP: gl.constexpr, LISTED: gl.constexpr, FAST: gl.constexpr,
):  # fmt: skip
    CONSUMERS: gl.constexpr = BLOCK_N // ROWS
    AGAIN: gl.constexpr = HEAD_DIM == 128 and HEAD_DIM_V == 128 and (HAS_UPPER or HAS_TAIL)  # these spill otherwise
    k_tiles = make_tiles(k_desc, HEAD_DIM, ROWS, CONSUMERS)
    v_tiles = make_tiles(v_desc, HEAD_DIM_V, ROWS, CONSUMERS)
    q_ring = make_part_ring(q_desc, BLOCK_M, HEAD_DIM, STAGES, CONSUMERS * WARPS, True)
    do_ring = make_part_ring(do_desc, BLOCK_M, HEAD_DIM_V, STAGES, CONSUMERS * WARPS, True)
    kv_full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    mbarrier.init(kv_full.index(0), count=1)
    mbarrier.init(kv_full.index(1), count=1)
    keys = Keys(
        n_blocks, heads_total, heads_together, head_first, heads_kv, group, q_pad, seqlen_k, q_start, upper, lower,
        BLOCK_M, BLOCK_N, HEAD_DIM, HAS_UPPER, HAS_LOWER, HAS_TAIL, LONGEST, NEED_DK, NEED_DV, KEEPS,
        seqlen_q, terms, table_batch, table_head, table_width, STEPS, CAPPED, RAMP, LISTED, FAST, AGAIN,
    )  # fmt: skip
    if KEEPS:
        ds_slots = make_ds_slots(k_desc.dtype, BLOCK_M, CONSUMERS)
    else:
        ds_slots = kv_full
    if RAMP:
        ramp = make_ramp(BLOCK_M, BLOCK_M, True)
        fence_async_shared()
    else:
        ramp = kv_full
    mine = (keys, dk_desc, dv_desc, k_tiles, v_tiles, kv_full, q_ring, do_ring, qk_scale2, sm_scale, ds_slots, ramp)
    copies = (keys, k_desc, v_desc, q_desc, do_desc, lse2_desc, delta_desc, k_tiles, v_tiles, kv_full, q_ring, do_ring)
    if CONSUMERS == 2:
        gl.warp_specialize(
            [(_consumer, (0,) + mine), (_consumer, (1,) + mine), (feed_all, copies)]
            + ([(store_all, (keys, ds_desc, ds_slots))] if KEEPS else []),
            for_workers(2, WARPS, 1, 1 + KEEPS),
            for_workers(2, CONSUMER_REGISTERS, FEEDER_REGISTERS, 1 + KEEPS),
        )
    else:
        gl.static_assert(CONSUMERS == 3, "a program has two or three consumers")
        gl.warp_specialize(
            [(_consumer, (0,) + mine), (_consumer, (1,) + mine), (_consumer, (2,) + mine), (feed_all, copies)]
            + ([(store_all, (keys, ds_desc, ds_slots))] if KEEPS else []),
            for_workers(3, WARPS, 1, 1 + KEEPS),
            for_workers(3, CONSUMER_REGISTERS, FEEDER_REGISTERS, 1 + KEEPS),
        )
