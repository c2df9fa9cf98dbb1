"""Backward: ``dq = sm_scale ds k`` of BLOCK_M queries of one head, streaming the keys as the forward pass does.

    p = exp2(s2 - lse2)        ds = p (do v^T - delta)        dq = sm_scale ds k

No gradient is added up in memory, so the bits repeat. Partitions: BLOCK_M / 64 consumers and a producer, which walk the same tiles
(``parts.Work``); queries and gradients of the output are resident. In the overlapped form dq is one tile behind: the product of the
last tile, whose ``ds`` is carried as a register operand, is issued after both products of the next tile. A tile is a row of parts,
nearly always one (``chunks.py``), and dq has an accumulator for each.

Arrivals that complete a phase of each barrier, with C consumers of W = 4 warps:
    resident        full: 1 (bytes), once for each consumer
    keys, values    full: 1 (bytes)   empty: C * W, each warp after its last read of the tile
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma, warpgroup_mma, warpgroup_mma_wait

from .chunks import accumulator, inner, make_part_ring, make_tiles, operand, outer, pass_over, settled, zeros_like
from .parts import ROWS, WARPS, Work, wait
from .terms import exponents, make_ramp, masked, own_of

# Kernel arguments that never enter a compile key.
LENGTHS = ("heads_q", "group", "seqlen_q", "seqlen_k", "q_pad", "q_start", "upper", "lower")
LENGTHS += ("m_blocks", "heads_total", "heads_together", "table_batch", "table_head", "table_width")


@gluon.jit
def _producer(work, group, q_desc, k_desc, v_desc, do_desc, q_tiles, do_tiles, resident, k_ring, v_ring):
    batch, head, start_m, lo, hi = work.locate(gl.program_id(0))
    for c in gl.static_range(work.CONSUMERS):
        full = resident.index(c)
        mbarrier.expect(full, q_tiles.BOXES * q_desc.block_type.nbytes + do_tiles.BOXES * do_desc.block_type.nbytes)
        q_tiles.load(q_desc, batch, head, start_m + c * ROWS, c, full)
        do_tiles.load(do_desc, batch, head, start_m + c * ROWS, c, full)
    head_kv = head // group
    own = own_of(work, batch, head, start_m, None, None)
    for step in range(hi - lo):
        start_n = work.tile(own, hi - 1 - step) * work.BLOCK_N
        k_ring.fill(k_desc, batch, head_kv, start_n, step)
        v_ring.fill(v_desc, batch, head_kv, start_n, step)


@gluon.jit
def _weights(s, lse2, qk_scale2, work, own, place, start_row, free_lo, free_hi):
    """p [ROWS, BLOCK_N], times the derivative of a softcap; masked after the scale, which may be negative."""
    n_block = work.tile(own, place)
    first_row = work.q_start + start_row
    first_key = n_block * work.BLOCK_N
    if work.RAMP:
        lse2 = lse2 - own.slope2 * (first_key + work.BLOCK_N // 2 - first_row).to(gl.float32)
    x, slope = exponents(s, lse2[:, None], work, own.slope2, first_row, first_key, qk_scale2)
    return gl.exp2(masked(x, work, own, place, n_block, start_row, free_lo, free_hi)) * slope


@gluon.jit
def _products(q, do, k_ring, v_ring, step, minus_delta, work, own, ramp, S_LAYOUT: gl.constexpr):
    """Issue s = q k^T and dp - delta = do v^T - delta."""
    k = k_ring.take(step)
    zeros = gl.zeros([ROWS, work.BLOCK_N], gl.float32, S_LAYOUT)
    s = inner(q, k, zeros, True)
    if work.RAMP:
        s = warpgroup_mma(own.steep, ramp.permute((1, 0)), s, is_async=True)
    dp = inner(do, v_ring.take(step), zeros + minus_delta[:, None], False)
    return s, dp


@gluon.jit
def _consumer(
    C: gl.constexpr, work, dq_desc, lse2_ptr, delta_ptr, q_pad, qk_scale2, sm_scale, q_tiles, do_tiles, resident, k_ring, v_ring,
    ramp,
):  # fmt: skip
    S_LAYOUT: gl.constexpr = accumulator(work.BLOCK_N)
    DTYPE: gl.constexpr = dq_desc.dtype
    batch, head, start_m, lo, hi = work.locate(gl.program_id(0))
    start_row = start_m + C * ROWS
    own_lo, free_lo, free_hi, own_hi = work.own(batch, head, start_row, lo, hi)
    rows = start_row + gl.arange(0, ROWS, gl.SliceLayout(1, S_LAYOUT))
    head_rows = (batch * work.heads_q + head).to(gl.int64) * q_pad
    lse2 = gl.load(lse2_ptr + head_rows + rows, mask=rows < q_pad, other=float("inf"))
    minus_delta = gl.load(delta_ptr + head_rows + rows, mask=rows < q_pad, other=0.0)
    own = own_of(work, batch, head, start_row, qk_scale2, S_LAYOUT)
    if work.RAMP:  # what the scores of a row lack
        lse2 = lse2 + own.slope2 * (rows - start_row).to(gl.float32)
    q = q_tiles.parts(C)
    do = do_tiles.parts(C)
    dq = zeros_like(q)
    wait(resident.index(C), 0)
    step = 0
    step = pass_over(hi - own_hi, step, k_ring, v_ring)
    if work.OVERLAP:
        s, dp = _products(q, do, k_ring, v_ring, step, minus_delta, work, own, ramp, S_LAYOUT)
        s = warpgroup_mma_wait(len(do), deps=(s,))
        p = _weights(s, lse2, qk_scale2, work, own, own_hi - 1, start_row, free_lo, free_hi)
        dp = warpgroup_mma_wait(0, deps=(dp,))
        v_ring.release(step)
        ds = operand((p * dp).to(DTYPE), dq)
        for j in range(1, own_hi - own_lo):
            s, dp = _products(q, do, k_ring, v_ring, step + 1, minus_delta, work, own, ramp, S_LAYOUT)
            dq = outer(ds, k_ring.take(step), dq)
            s = warpgroup_mma_wait(len(do) + len(q), deps=(s,))
            p = _weights(s, lse2, qk_scale2, work, own, own_hi - 1 - j, start_row, free_lo, free_hi)
            dp = warpgroup_mma_wait(len(q), deps=(dp,))
            v_ring.release(step + 1)
            ds_next = p * dp
            ds, dq = settled(0, ds, dq)
            k_ring.release(step)
            ds = operand(ds_next.to(DTYPE), dq)
            step += 1
        dq = outer(ds, k_ring.take(step), dq)
        ds, dq = settled(0, ds, dq)
        k_ring.release(step)
        step += 1
    else:
        for j in range(own_hi - own_lo):
            s, dp = _products(q, do, k_ring, v_ring, step, minus_delta, work, own, ramp, S_LAYOUT)
            s = warpgroup_mma_wait(len(do), deps=(s,))
            p = _weights(s, lse2, qk_scale2, work, own, own_hi - 1 - j, start_row, free_lo, free_hi)
            dp = warpgroup_mma_wait(0, deps=(dp,))
            v_ring.release(step)
            ds = operand((p * dp).to(DTYPE), dq)
            dq = outer(ds, k_ring.parts(step), dq)
            ds, dq = settled(0, ds, dq)
            k_ring.release(step)
            step += 1
    pass_over(own_lo - lo, step, k_ring, v_ring)
    q_tiles.write(dq, sm_scale, dq_desc, batch, head, start_row, C)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=LENGTHS)
def _dq_kernel(
    q_desc, k_desc, v_desc, do_desc, dq_desc, lse2_ptr, delta_ptr, qk_scale2, sm_scale,
    heads_q, group, seqlen_q, seqlen_k, q_pad, q_start, upper, lower, m_blocks, heads_total, heads_together,
    terms, table_batch, table_head, table_width,
    HAS_UPPER: gl.constexpr, HAS_LOWER: gl.constexpr, HAS_TAIL: gl.constexpr, LONGEST: gl.constexpr,
    HEAD_DIM: gl.constexpr, HEAD_DIM_V: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr,
    K_STAGES: gl.constexpr, V_STAGES: gl.constexpr,
    OVERLAP: gl.constexpr, CONSUMER_REGISTERS: gl.constexpr, PRODUCER_REGISTERS: gl.constexpr,
    STEPS: gl.constexpr, RAMP: gl.constexpr, LISTED: gl.constexpr, FAST: gl.constexpr,
):  # fmt: skip
    CONSUMERS: gl.constexpr = BLOCK_M // ROWS
    MASKED: gl.constexpr = HAS_UPPER or HAS_LOWER or HAS_TAIL or LISTED
    q_tiles = make_tiles(q_desc, HEAD_DIM, ROWS, CONSUMERS)
    do_tiles = make_tiles(do_desc, HEAD_DIM_V, ROWS, CONSUMERS)
    resident = gl.allocate_shared_memory(gl.int64, [CONSUMERS, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(CONSUMERS):
        mbarrier.init(resident.index(i), count=1)
    k_ring = make_part_ring(k_desc, BLOCK_N, HEAD_DIM, K_STAGES, CONSUMERS * WARPS, False)
    v_ring = make_part_ring(v_desc, BLOCK_N, HEAD_DIM_V, V_STAGES, CONSUMERS * WARPS, False)
    work = Work(
        lse2_ptr, m_blocks, heads_total, heads_together, heads_q, seqlen_q, seqlen_k, q_start, upper, lower, resident, resident,
        BLOCK_M, BLOCK_N, HEAD_DIM, CONSUMERS, HAS_UPPER, HAS_LOWER, MASKED, False, OVERLAP, LONGEST, False, False, False, 1,
        terms, table_batch, table_head, table_width, STEPS, RAMP, False, LISTED, False, FAST, False,
    )  # fmt: skip
    if RAMP:
        ramp = make_ramp(BLOCK_N, BLOCK_N)
        fence_async_shared()
    else:
        ramp = resident
    mine = (work, dq_desc, lse2_ptr, delta_ptr, q_pad, qk_scale2, sm_scale, q_tiles, do_tiles, resident, k_ring, v_ring, ramp)
    copies = (work, group, q_desc, k_desc, v_desc, do_desc, q_tiles, do_tiles, resident, k_ring, v_ring)
    if CONSUMERS == 2:
        gl.warp_specialize(
            [(_consumer, (0,) + mine), (_consumer, (1,) + mine), (_producer, copies)],
            [WARPS, 1],
            [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
        )
    else:
        gl.static_assert(CONSUMERS == 3, "a program has two or three consumers")
        gl.warp_specialize(
            [(_consumer, (0,) + mine), (_consumer, (1,) + mine), (_consumer, (2,) + mine), (_producer, copies)],
            [WARPS, WARPS, 1],
            [CONSUMER_REGISTERS, CONSUMER_REGISTERS, PRODUCER_REGISTERS],
        )
