"""Backward where head_dim is no power of two or head_dim_v is another: ``dq = sm_scale ds k`` as in ``bwd_dq.py``, with tiles in
parts (``chunks.py``).

Arrivals that complete a phase of each barrier, with C consumers of W = 4 warps:
    resident        full: 1 (bytes of all parts), once for each consumer
    keys, values    full: 1 (bytes of all parts)   empty: C * W, each warp after its last read of the tile
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma_wait

from .chunks import accumulator, inner, make_part_ring, make_tiles, outer, settled, zeros_like
from .parts import ROWS, WARPS, Work, wait
from .terms import exponents, masked, own_of

# Kernel arguments that never enter a compile key.
LENGTHS = ("heads_q", "group", "seqlen_q", "seqlen_k", "q_pad", "q_start", "upper", "lower")
LENGTHS += ("m_blocks", "heads_total", "heads_together", "table_batch", "table_head", "table_width")


@gluon.jit
def _producer(work, group, q_desc, k_desc, v_desc, do_desc, q_tiles, do_tiles, resident, k_ring, v_ring):
    batch, head, start_m, lo, hi = work.locate(gl.program_id(0))
    Q_BYTES: gl.constexpr = k_ring.SIZE // q_tiles.COLUMNS * q_desc.block_type.nbytes
    DO_BYTES: gl.constexpr = v_ring.SIZE // do_tiles.COLUMNS * do_desc.block_type.nbytes
    for c in gl.static_range(work.CONSUMERS):
        full = resident.index(c)
        mbarrier.expect(full, Q_BYTES + DO_BYTES)
        q_tiles.load(q_desc, batch, head, start_m + c * ROWS, c, full)
        do_tiles.load(do_desc, batch, head, start_m + c * ROWS, c, full)
    head_kv = head // group
    for step in range(hi - lo):
        start_n = (hi - 1 - step) * work.BLOCK_N
        k_ring.fill(k_desc, batch, head_kv, start_n, step)
        v_ring.fill(v_desc, batch, head_kv, start_n, step)


@gluon.jit
def _weights(s, lse2, qk_scale2, work, own, place, start_row, free_lo, free_hi):
    """p [ROWS, BLOCK_N]; masked after the scale, which may be negative."""
    x, _ = exponents(s, lse2[:, None], work, own.slope2, work.q_start + start_row, place * work.BLOCK_N, qk_scale2)
    return gl.exp2(masked(x, work, own, place, place, start_row, free_lo, free_hi))


@gluon.jit
def _products(q, do, k_ring, v_ring, step, minus_delta, S_LAYOUT: gl.constexpr):
    """Issue s = q k^T and dp - delta = do v^T - delta."""
    k = k_ring.take(step)
    zeros = gl.zeros([ROWS, k[0].type.shape[0]], gl.float32, S_LAYOUT)
    s = inner(q, k, zeros, True)
    dp = inner(do, v_ring.take(step), zeros + minus_delta[:, None], False)
    return s, dp


@gluon.jit
def _pass_over(count, step, k_ring, v_ring):
    """Let ``count`` tiles go by that this consumer's rows do not see: the producer waits for every consumer."""
    for _ in range(count):
        k_ring.take(step)
        k_ring.release(step)
        v_ring.take(step)
        v_ring.release(step)
        step += 1
    return step


@gluon.jit
def _consumer(
    C: gl.constexpr, work, dq_desc, lse2_ptr, delta_ptr, q_pad, qk_scale2, sm_scale, q_tiles, do_tiles, resident, k_ring, v_ring
):
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
    q = q_tiles.parts(C)
    do = do_tiles.parts(C)
    dq = zeros_like(q)
    P_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, dq[0].type.layout, 2)
    wait(resident.index(C), 0)
    step = 0
    step = _pass_over(hi - own_hi, step, k_ring, v_ring)
    if work.OVERLAP:
        s, dp = _products(q, do, k_ring, v_ring, step, minus_delta, S_LAYOUT)
        s = warpgroup_mma_wait(len(do), deps=(s,))
        p = _weights(s, lse2, qk_scale2, work, own, own_hi - 1, start_row, free_lo, free_hi)
        dp = warpgroup_mma_wait(0, deps=(dp,))
        v_ring.release(step)
        ds = gl.convert_layout((p * dp).to(DTYPE), P_LAYOUT)
        for j in range(1, own_hi - own_lo):
            s, dp = _products(q, do, k_ring, v_ring, step + 1, minus_delta, S_LAYOUT)
            dq = outer(ds, k_ring.take(step), dq)
            s = warpgroup_mma_wait(len(do) + len(q), deps=(s,))
            p = _weights(s, lse2, qk_scale2, work, own, own_hi - 1 - j, start_row, free_lo, free_hi)
            dp = warpgroup_mma_wait(len(q), deps=(dp,))
            v_ring.release(step + 1)
            ds_next = p * dp
            ds, dq = settled(0, ds, dq)
            k_ring.release(step)
            ds = gl.convert_layout(ds_next.to(DTYPE), P_LAYOUT)
            step += 1
        dq = outer(ds, k_ring.take(step), dq)
        ds, dq = settled(0, ds, dq)
        k_ring.release(step)
        step += 1
    else:
        for j in range(own_hi - own_lo):
            s, dp = _products(q, do, k_ring, v_ring, step, minus_delta, S_LAYOUT)
            s = warpgroup_mma_wait(len(do), deps=(s,))
            p = _weights(s, lse2, qk_scale2, work, own, own_hi - 1 - j, start_row, free_lo, free_hi)
            dp = warpgroup_mma_wait(0, deps=(dp,))
            v_ring.release(step)
            ds = gl.convert_layout((p * dp).to(DTYPE), P_LAYOUT)
            dq = outer(ds, k_ring.take(step), dq)
            ds, dq = settled(0, ds, dq)
            k_ring.release(step)
            step += 1
    _pass_over(own_lo - lo, step, k_ring, v_ring)
    q_tiles.write(dq, sm_scale, dq_desc, batch, head, start_row, C)
    gl.static_assert(not work.LISTED, "no terms besides bounds")
    tma.store_wait(0)


@gluon.jit(do_not_specialize=LENGTHS)
def _dq_chunks_kernel(
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
    MASKED: gl.constexpr = HAS_UPPER or HAS_LOWER or HAS_TAIL
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
    mine = (work, dq_desc, lse2_ptr, delta_ptr, q_pad, qk_scale2, sm_scale, q_tiles, do_tiles, resident, k_ring, v_ring)
    copies = (work, group, q_desc, k_desc, v_desc, do_desc, q_tiles, do_tiles, resident, k_ring, v_ring)
    gl.static_assert(CONSUMERS == 2, "a program has two consumers")
    gl.warp_specialize(
        [(_consumer, (0,) + mine), (_consumer, (1,) + mine), (_producer, copies)],
        [WARPS, 1],
        [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
    )
