"""Backward with an additive bias: ``dq`` of BLOCK_M queries of one head, streaming the keys as the forward pass does.

``bwd_dq.py`` tells of partitions and barriers; a slot of keys holds tiles of the bias too (``bias.py``).
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma, warpgroup_mma, warpgroup_mma_wait

from .bias import biased, fill_keys, make_bias
from .bias_fwd import locate
from .chunks import pass_over
from .parts import ROWS, WARPS, Work, for_workers, make_ring, wait
from .terms import LOG2_E, Own, masked

# Kernel arguments that never enter a compile key.
LENGTHS = ("heads_q", "batches", "group", "seqlen_q", "seqlen_k", "q_pad", "q_start", "upper", "lower", "m_blocks", "heads_total")
LENGTHS += ("heads_together",)


@gluon.jit
def load_resident(work, batch, head, start_m, q_desc, do_desc, q_tiles, do_tiles, resident):
    """Producer: the queries of each consumer and their gradients of o."""
    for c in gl.static_range(work.CONSUMERS):
        full = resident.index(c)
        mbarrier.expect(full, 2 * q_desc.block_type.nbytes)
        tma.async_load(q_desc, [batch, head, start_m + c * ROWS, 0], full, q_tiles.index(c).reshape([1, 1, ROWS, work.HEAD_DIM]))
        tma.async_load(do_desc, [batch, head, start_m + c * ROWS, 0], full, do_tiles.index(c).reshape([1, 1, ROWS, work.HEAD_DIM]))


@gluon.jit
def _producer(
    work, group, bias, q_desc, k_desc, v_desc, do_desc, bias_desc, q_tiles, do_tiles, resident, k_ring, v_ring
):
    batch, head, start_m, lo, hi = locate(gl.program_id(0), work, bias)
    load_resident(work, batch, head, start_m, q_desc, do_desc, q_tiles, do_tiles, resident)
    head_kv = head // group
    for step in range(hi - lo):
        start_n = (hi - 1 - step) * work.BLOCK_N
        fill_keys(k_ring, k_desc, bias, bias_desc, batch, head, head_kv, start_m, start_n, step)
        v_ring.fill(v_desc, batch, head_kv, start_n, step)


@gluon.jit
def products(q_tile, do_tile, k_tile, v_tile, minus_delta, S_LAYOUT: gl.constexpr):
    """Issue q k^T and do v^T - delta."""
    zeros = gl.zeros([ROWS, k_tile.type.shape[0]], gl.float32, S_LAYOUT)
    s = warpgroup_mma(q_tile, k_tile.permute((1, 0)), zeros, use_acc=False, is_async=True)
    return s, warpgroup_mma(do_tile, v_tile.permute((1, 0)), zeros + minus_delta[:, None], is_async=True)


@gluon.jit
def weights(s, b, m, log_l, sm_scale, work, own, n_block, start_row, free_lo, free_hi):
    """p [ROWS, BLOCK_N]."""
    x = (biased(s, b, sm_scale) - m[:, None]) * LOG2_E - log_l[:, None]
    return gl.exp2(masked(x, work, own, n_block, n_block, start_row, free_lo, free_hi))


@gluon.jit
def load_rows(m_ptr, log_l_ptr, delta_ptr, places, inside):
    """The reference of rows, log2 of the sum over it, and -delta."""
    m = gl.load(m_ptr + places, mask=inside, other=float("inf"))
    return m, gl.load(log_l_ptr + places, mask=inside, other=0.0), gl.load(delta_ptr + places, mask=inside, other=0.0)


@gluon.jit
def _consumer(
    C: gl.constexpr, work, bias, dq_desc, m_ptr, log_l_ptr, delta_ptr, q_pad, sm_scale, q_tiles, do_tiles, resident, k_ring, v_ring
):
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, work.BLOCK_N, 16])
    Q_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, work.HEAD_DIM, 16])
    P_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, Q_LAYOUT, 2)
    DTYPE: gl.constexpr = dq_desc.dtype
    batch, head, start_m, lo, hi = locate(gl.program_id(0), work, bias)
    start_row = start_m + C * ROWS
    own_lo, free_lo, free_hi, own_hi = work.own(batch, head, start_row, lo, hi)
    own = Own(batch, head, None, None, None)
    rows = start_row + gl.arange(0, ROWS, gl.SliceLayout(1, S_LAYOUT))
    head_rows = (batch * work.heads_q + head).to(gl.int64) * q_pad
    m, log_l, minus_delta = load_rows(m_ptr, log_l_ptr, delta_ptr, head_rows + rows, rows < q_pad)
    q_tile = q_tiles.index(C)
    do_tile = do_tiles.index(C)
    dq = gl.zeros([ROWS, work.HEAD_DIM], gl.float32, Q_LAYOUT)
    wait(resident.index(C), 0)
    step = 0
    step = pass_over(hi - own_hi, step, k_ring, v_ring)
    for j in range(own_hi - own_lo):
        n_block = own_hi - 1 - j
        k_tile = k_ring.take(step)
        s, dp = products(q_tile, do_tile, k_tile, v_ring.take(step), minus_delta, S_LAYOUT)
        b = bias.tile(step, C).load(S_LAYOUT)
        s = warpgroup_mma_wait(1, deps=(s,))
        p = weights(s, b, m, log_l, sm_scale, work, own, n_block, start_row, free_lo, free_hi)
        dp = warpgroup_mma_wait(0, deps=(dp,))
        v_ring.release(step)
        ds = gl.convert_layout((p * dp).to(DTYPE), P_LAYOUT)
        dq = warpgroup_mma(ds, k_tile, dq, is_async=True)
        dq, ds = warpgroup_mma_wait(0, deps=(dq, ds))
        k_ring.release(step)
        step += 1
    pass_over(own_lo - lo, step, k_ring, v_ring)
    q_tile.store((dq * sm_scale).to(DTYPE))
    fence_async_shared()
    tma.async_store(dq_desc, [batch, head, start_row, 0], q_tile.reshape([1, 1, ROWS, work.HEAD_DIM]))
    tma.store_wait(0)


@gluon.jit(do_not_specialize=LENGTHS)
def _dq_bias_kernel(
    q_desc, k_desc, v_desc, do_desc, bias_desc, dq_desc, m_ptr, log_l_ptr, delta_ptr, sm_scale,
    heads_q, batches, group, seqlen_q, seqlen_k, q_pad, q_start, upper, lower, m_blocks, heads_total, heads_together,
    HAS_UPPER: gl.constexpr, HAS_LOWER: gl.constexpr, HAS_TAIL: gl.constexpr, LONGEST: gl.constexpr,
    BY_BATCH: gl.constexpr, BY_HEAD: gl.constexpr,
    HEAD_DIM: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, K_STAGES: gl.constexpr, V_STAGES: gl.constexpr,
    CONSUMER_REGISTERS: gl.constexpr, PRODUCER_REGISTERS: gl.constexpr,
):  # fmt: skip
    CONSUMERS: gl.constexpr = BLOCK_M // ROWS
    MASKED: gl.constexpr = HAS_UPPER or HAS_LOWER or HAS_TAIL
    Q_LAYOUT: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    q_tiles = gl.allocate_shared_memory(q_desc.dtype, [CONSUMERS, ROWS, HEAD_DIM], Q_LAYOUT)
    do_tiles = gl.allocate_shared_memory(q_desc.dtype, [CONSUMERS, ROWS, HEAD_DIM], Q_LAYOUT)
    resident = gl.allocate_shared_memory(gl.int64, [CONSUMERS, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(CONSUMERS):
        mbarrier.init(resident.index(i), count=1)
    k_ring = make_ring(k_desc, BLOCK_N, HEAD_DIM, K_STAGES, CONSUMERS * WARPS)
    v_ring = make_ring(v_desc, BLOCK_N, HEAD_DIM, V_STAGES, CONSUMERS * WARPS)
    bias = make_bias(bias_desc, heads_q, batches, K_STAGES, CONSUMERS, BY_BATCH, BY_HEAD)
    work = Work(
        m_ptr, m_blocks, heads_total, heads_together, heads_q, seqlen_q, seqlen_k, q_start, upper, lower, resident, resident,
        BLOCK_M, BLOCK_N, HEAD_DIM, CONSUMERS, HAS_UPPER, HAS_LOWER, MASKED, False, False, LONGEST, False, False, False, 1,
        None, None, None, None, (), False, False, False, False, False, False,
    )  # fmt: skip
    mine = (work, bias, dq_desc, m_ptr, log_l_ptr, delta_ptr, q_pad, sm_scale, q_tiles, do_tiles, resident, k_ring, v_ring)
    copies = (work, group, bias, q_desc, k_desc, v_desc, do_desc, bias_desc, q_tiles, do_tiles, resident, k_ring, v_ring)
    gl.static_assert(CONSUMERS == 2 or CONSUMERS == 3, "a program has two or three consumers")
    gl.warp_specialize(
        [(_consumer, (0,) + mine), (_consumer, (1,) + mine), (_consumer, (2,) + mine)][:CONSUMERS] + [(_producer, copies)],
        for_workers(CONSUMERS, WARPS, 1),
        for_workers(CONSUMERS, CONSUMER_REGISTERS, PRODUCER_REGISTERS),
    )
