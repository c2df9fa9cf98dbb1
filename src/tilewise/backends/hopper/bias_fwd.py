"""Forward with an additive bias: ``o = softmax(sm_scale q k^T + bias) v``, ``lse``, and what the backward pass must know of a row.

``fwd.py`` tells of partitions, rings, barriers and the overlapped form; here a slot of keys holds tiles of the bias too
(``bias.py``), and ``m_i`` is a natural score.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma, warpgroup_mma_wait

from .bias import biased, fill_keys, log_sum, make_bias, natural_step
from .chunks import pass_over
from .fwd import _add_product, _add_values, _rescale_all, _scores, _wait_for_products
from .parts import LN_2, ROWS, TICKETS, WARPS, Work, for_workers, make_ring, tiles_of_program
from .terms import Own, masked

# Kernel arguments that never enter a compile key.
LENGTHS = ("heads_q", "batches", "group", "seqlen_q", "seqlen_k", "q_start", "upper", "lower", "m_blocks", "heads_total")
LENGTHS += ("heads_together",)


@gluon.jit
def locate(index, work, bias):
    """``(batch, head, first row, lo, hi)`` of tile ``index``; its keys are the tiles ``hi - 1`` down to ``lo``."""
    batch, head, m_block = bias.place(index, work.m_blocks, work.heads_together, work.LONGEST)
    start_m = m_block * work.BLOCK_M
    row_end = min(start_m + work.BLOCK_M, work.seqlen_q)
    lo, hi = tiles_of_program(
        work.q_start + start_m, work.q_start + row_end, work.seqlen_k, work.upper, work.lower, work.BLOCK_N, work.HAS_UPPER,
        work.HAS_LOWER,
    )  # fmt: skip
    return batch, head, start_m, lo, hi


@gluon.jit
def _load_tile(index, turn, step, work, group, bias, q_desc, k_desc, v_desc, bias_desc, q_ring, k_ring, v_ring):
    """Producer: fill the rings for tile ``index``. Returns the next tile, in DYNAMIC order, and the ring step after this one."""
    batch, head, start_m, lo, hi = locate(index, work, bias)
    for c in gl.static_range(work.CONSUMERS):
        q_ring.fill(q_desc, batch, head, start_m + c * ROWS, turn * work.CONSUMERS + c)
    head_kv = head // group
    count = hi - lo
    for j in range(count):
        start_n = (hi - 1 - j) * work.BLOCK_N
        fill_keys(k_ring, k_desc, bias, bias_desc, batch, head, head_kv, start_m, start_n, step)
        v_ring.fill(v_desc, batch, head_kv, start_n, step)
        step += 1
        if work.DYNAMIC:  # noqa: SIM102
            if j == max(count - 3, 0):
                index = work.issue(turn)
    return index, step


@gluon.jit
def _producer(work, group, bias, q_desc, k_desc, v_desc, bias_desc, q_ring, k_ring, v_ring):
    step = 0
    turn = 0
    index = gl.program_id(0)
    if work.DYNAMIC:
        while index < work.total():
            index, step = _load_tile(
                index, turn, step, work, group, bias, q_desc, k_desc, v_desc, bias_desc, q_ring, k_ring, v_ring
            )
            turn += 1
    else:
        _load_tile(index, turn, step, work, group, bias, q_desc, k_desc, v_desc, bias_desc, q_ring, k_ring, v_ring)


@gluon.jit
def _finish(
    acc, m_i, l_i, q, o_desc, lse_ptr, rows_ptr, work, bias, batch, head, start_row,
    S_LAYOUT: gl.constexpr, O_LAYOUT: gl.constexpr,
):  # fmt: skip
    """Write o, through the consumer's tile of queries, lse, and the reference of each row with the logarithm of the sum over it."""
    COLUMNS: gl.constexpr = o_desc.block_type.shape[-1]
    l_row = gl.convert_layout(gl.sum(l_i, 1), gl.SliceLayout(1, S_LAYOUT))
    rows = start_row + gl.arange(0, ROWS, gl.SliceLayout(1, S_LAYOUT))
    inverse = gl.convert_layout(1.0 / gl.where(l_row == 0.0, 1.0, l_row), gl.SliceLayout(1, O_LAYOUT))
    q[0].store((acc[0] * inverse[:, None]).to(o_desc.dtype))
    fence_async_shared()
    tma.async_store(o_desc, [batch, head, start_row, 0], q[0].reshape([1, 1, ROWS, COLUMNS]))
    log_l = log_sum(m_i, l_row) * LN_2
    places = (batch * work.heads_q + head).to(gl.int64) * work.seqlen_q + rows
    gl.store(lse_ptr + places, gl.where(l_row == 0.0, -float("inf"), m_i + log_l), mask=rows < work.seqlen_q)
    if bias.KEEPS_ROWS:
        gl.store(rows_ptr + places * 2, m_i, mask=rows < work.seqlen_q)
        gl.store(rows_ptr + places * 2 + 1, log_l, mask=rows < work.seqlen_q)
    tma.store_wait(0)


@gluon.jit
def _biased_scores(q, k_ring, step, bias, C: gl.constexpr, work, own, sm_scale, S_LAYOUT: gl.constexpr, PENDING: gl.constexpr):
    """Natural scores of the key tile of this ring step, whose slot is done with then."""
    s = _scores(q, k_ring.take_chunks(step), work, own, None, S_LAYOUT)
    b = bias.tile(step, C).load(S_LAYOUT)
    s = warpgroup_mma_wait(PENDING, deps=(s,))
    k_ring.release(step)
    return biased(s, b, sm_scale)


@gluon.jit
def _attend(
    index, turn, step, C: gl.constexpr, work, bias, o_desc, lse_ptr, rows_ptr, sm_scale, q_ring, k_ring, v_ring
):
    """Consumer ``C``: its 64 rows of tile ``index``. Returns the ring step after the tile."""
    COLUMNS: gl.constexpr = v_ring.tiles.type.shape[2]
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, work.BLOCK_N, 16])
    O_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, COLUMNS, 16])
    P_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, O_LAYOUT, 2)
    batch, head, start_m, lo, hi = locate(index, work, bias)
    start_row = start_m + C * ROWS
    own_lo, free_lo, free_hi, own_hi = work.own(batch, head, start_row, lo, hi)
    own = Own(batch, head, None, None, None)
    q = q_ring.take_chunks(turn * work.CONSUMERS + C)
    step = pass_over(hi - own_hi, step, k_ring, v_ring)

    s = _biased_scores(q, k_ring, step, bias, C, work, own, sm_scale, S_LAYOUT, 0)
    s = masked(s, work, own, own_hi - 1, own_hi - 1, start_row, free_lo, free_hi)
    p, _, m_i, l_i = natural_step(s, None, None, True)
    p = gl.convert_layout(p.to(o_desc.dtype), P_LAYOUT)
    acc = (gl.zeros([ROWS, COLUMNS], gl.float32, O_LAYOUT),)
    if work.OVERLAP:
        for j in range(1, own_hi - own_lo):
            n_block = own_hi - 1 - j
            s = _scores(q, k_ring.take_chunks(step + 1), work, own, None, S_LAYOUT)
            acc = _add_product(p, v_ring.take_chunks(step), acc)
            b = bias.tile(step + 1, C).load(S_LAYOUT)
            s = warpgroup_mma_wait(1, deps=(s,))
            k_ring.release(step + 1)
            s = masked(biased(s, b, sm_scale), work, own, n_block, n_block, start_row, free_lo, free_hi)
            p_next, alpha, m_i, l_i = natural_step(s, m_i, l_i, False)
            p, acc = _wait_for_products(p, acc)
            v_ring.release(step)
            p = gl.convert_layout(p_next.to(o_desc.dtype), P_LAYOUT)
            acc = _rescale_all(acc, alpha)
            step += 1
        acc, step = _add_values(p, acc, step, v_ring)
    else:
        acc, step = _add_values(p, acc, step, v_ring)
        for j in range(1, own_hi - own_lo):
            n_block = own_hi - 1 - j
            s = _biased_scores(q, k_ring, step, bias, C, work, own, sm_scale, S_LAYOUT, 0)
            s = masked(s, work, own, n_block, n_block, start_row, free_lo, free_hi)
            p_next, alpha, m_i, l_i = natural_step(s, m_i, l_i, False)
            acc = _rescale_all(acc, alpha)
            acc, step = _add_values(gl.convert_layout(p_next.to(o_desc.dtype), P_LAYOUT), acc, step, v_ring)

    step = pass_over(own_lo - lo, step, k_ring, v_ring)
    _finish(acc, m_i, l_i, q, o_desc, lse_ptr, rows_ptr, work, bias, batch, head, start_row, S_LAYOUT, O_LAYOUT)
    q_ring.give_back(turn * work.CONSUMERS + C)
    return step


@gluon.jit
def _consumer(C: gl.constexpr, work, bias, o_desc, lse_ptr, rows_ptr, sm_scale, q_ring, k_ring, v_ring):
    step = 0
    turn = 0
    index = gl.program_id(0)
    if work.DYNAMIC:
        while index < work.total():
            step = _attend(index, turn, step, C, work, bias, o_desc, lse_ptr, rows_ptr, sm_scale, q_ring, k_ring, v_ring)
            index = work.following(turn)
            turn += 1
    else:
        _attend(index, turn, step, C, work, bias, o_desc, lse_ptr, rows_ptr, sm_scale, q_ring, k_ring, v_ring)


@gluon.jit(do_not_specialize=LENGTHS)
def _fwd_bias_kernel(
    q_desc, k_desc, v_desc, o_desc, bias_desc, lse_ptr, rows_ptr, counter, sm_scale,
    heads_q, batches, group, seqlen_q, seqlen_k, q_start, upper, lower, m_blocks, heads_total, heads_together,
    HAS_UPPER: gl.constexpr, HAS_LOWER: gl.constexpr, HAS_TAIL: gl.constexpr, LONGEST: gl.constexpr,
    HEAD_DIM: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr, Q_SLOTS: gl.constexpr,
    OVERLAP: gl.constexpr, DYNAMIC: gl.constexpr, BY_BATCH: gl.constexpr, BY_HEAD: gl.constexpr, KEEPS_ROWS: gl.constexpr,
    CONSUMER_REGISTERS: gl.constexpr, PRODUCER_REGISTERS: gl.constexpr,
):  # fmt: skip
    CONSUMERS: gl.constexpr = BLOCK_M // ROWS
    MASKED: gl.constexpr = HAS_UPPER or HAS_LOWER or HAS_TAIL
    q_ring = make_ring(q_desc, ROWS, HEAD_DIM, Q_SLOTS * CONSUMERS, 1)
    k_ring = make_ring(k_desc, BLOCK_N, HEAD_DIM, STAGES, CONSUMERS * WARPS)
    v_ring = make_ring(v_desc, BLOCK_N, HEAD_DIM, STAGES, CONSUMERS * WARPS)
    bias = make_bias(bias_desc, heads_q, batches, STAGES, CONSUMERS, BY_BATCH, BY_HEAD, KEEPS_ROWS)
    ticket = gl.allocate_shared_memory(gl.int32, [TICKETS, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    issued = gl.allocate_shared_memory(gl.int64, [TICKETS, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(TICKETS):
        mbarrier.init(issued.index(i), count=1)
    work = Work(
        counter, m_blocks, heads_total, heads_together, heads_q, seqlen_q, seqlen_k, q_start, upper, lower, ticket, issued,
        BLOCK_M, BLOCK_N, HEAD_DIM, CONSUMERS, HAS_UPPER, HAS_LOWER, MASKED, False, OVERLAP, LONGEST, DYNAMIC, False, False,
        1, None, None, None, None, (), False, False, False, False, False, False,
    )  # fmt: skip
    mine = (work, bias, o_desc, lse_ptr, rows_ptr, sm_scale, q_ring, k_ring, v_ring)
    gl.static_assert(CONSUMERS >= 2 and CONSUMERS <= 4, "a program has two to four consumers")
    gl.warp_specialize(
        [(_consumer, (0,) + mine), (_consumer, (1,) + mine), (_consumer, (2,) + mine), (_consumer, (3,) + mine)][:CONSUMERS]
        + [(_producer, (work, group, bias, q_desc, k_desc, v_desc, bias_desc, q_ring, k_ring, v_ring))],
        for_workers(CONSUMERS, WARPS, 1),
        for_workers(CONSUMERS, CONSUMER_REGISTERS, PRODUCER_REGISTERS),
    )
