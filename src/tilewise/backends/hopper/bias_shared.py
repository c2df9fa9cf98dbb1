"""dq and the gradient of an additive bias in one kernel, where MEMBERS sequences are all that share it.

A program holds BLOCK_M queries of one head, 64 for each consumer, of every sequence, and streams their keys side by side: for each
tile of the bias the tiles of keys and values of each sequence in turn. Each ds goes into the dq of its sequence and into the sum
over the sequences, which is written once, so that seven products make what takes nine apart (with the four of ``bias_dkdv.py``).

Arrivals that complete a phase of each barrier, with C consumers of W = 4 warps:
    resident            full: 1 (bytes), once
    keys and values     full: 1 (bytes)   empty: C * W, each warp after its last read of both
    biases              full: 1 (bytes)   empty: C * W
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma, warpgroup_mma, warpgroup_mma_wait

from .bias import make_bias
from .bias_dq import products, weights
from .bias_fwd import locate
from .parts import ROWS, WARPS, Ring, Work, arrive_warp, for_workers, make_ring, wait
from .terms import Own

# Kernel arguments that never enter a compile key.
LENGTHS = ("heads_q", "group", "seqlen_q", "seqlen_k", "q_start", "upper", "lower", "m_blocks", "n_blocks")


@gluon.aggregate
class Resident:
    """What a program keeps of its queries; place ``member * CONSUMERS + consumer``."""

    q: gl.shared_memory_descriptor  # [MEMBERS * CONSUMERS, ROWS, HEAD_DIM], and so is do
    do: gl.shared_memory_descriptor
    rows: gl.shared_memory_descriptor  # [MEMBERS * CONSUMERS * 3, 1, ROWS]
    full: gl.shared_memory_descriptor
    MEMBERS: gl.constexpr
    CONSUMERS: gl.constexpr
    LATE: gl.constexpr  # the product that makes dq of one sequence is waited for below those of the next

    @gluon.jit
    def fill(self, q_desc, do_desc, m_desc, log_l_desc, delta_desc, head, heads_q, start_m):
        D: gl.constexpr = self.q.type.shape[2]
        OF_ROWS: gl.constexpr = 2 * q_desc.block_type.nbytes + 3 * m_desc.block_type.nbytes
        full = self.full.index(0)
        mbarrier.expect(full, self.MEMBERS * self.CONSUMERS * OF_ROWS)
        for member in gl.static_range(self.MEMBERS):
            for c in gl.static_range(self.CONSUMERS):
                at = member * self.CONSUMERS + c
                row = start_m + c * ROWS
                tma.async_load(q_desc, [member, head, row, 0], full, self.q.index(at).reshape([1, 1, ROWS, D]))
                tma.async_load(do_desc, [member, head, row, 0], full, self.do.index(at).reshape([1, 1, ROWS, D]))
                tma.async_load(m_desc, [member * heads_q + head, row], full, self.rows.index(at * 3))
                tma.async_load(log_l_desc, [member * heads_q + head, row], full, self.rows.index(at * 3 + 1))
                tma.async_load(delta_desc, [member * heads_q + head, row], full, self.rows.index(at * 3 + 2))

    @gluon.jit
    def numbers(self, at, i: gl.constexpr, S_LAYOUT: gl.constexpr):
        """One of the three numbers of each row."""
        return self.rows.index(at * 3 + i).reshape([ROWS]).load(gl.SliceLayout(1, S_LAYOUT))


@gluon.jit
def _producer(
    work, group, bias, biases, resident, k_ring, v_ring, q_desc, k_desc, v_desc, do_desc, bias_desc, m_desc, log_l_desc, delta_desc
):
    _, head, start_m, lo, hi = locate(gl.program_id(0), work, bias)
    resident.fill(q_desc, do_desc, m_desc, log_l_desc, delta_desc, head, work.heads_q, start_m)
    head_kv = head // group
    step = 0
    for turn in range(hi - lo):
        start_n = (hi - 1 - turn) * work.BLOCK_N
        slot = turn % biases.SLOTS
        wait(biases.empty.index(slot), ((turn // biases.SLOTS) & 1) ^ 1)
        mbarrier.expect(biases.full.index(slot), bias.CONSUMERS * bias_desc.block_type.nbytes)
        bias.copy(bias_desc, biases.full.index(slot), 0, head, start_m, start_n, turn, True)
        for member in gl.static_range(resident.MEMBERS):
            slot = step % k_ring.SLOTS
            wait(k_ring.empty.index(slot), ((step // k_ring.SLOTS) & 1) ^ 1)
            full = k_ring.full.index(slot)
            mbarrier.expect(full, 2 * k_desc.block_type.nbytes)
            at = [member, head_kv, start_n, 0]
            tma.async_load(k_desc, at, full, k_ring.tiles.index(slot).reshape([1, 1, work.BLOCK_N, work.HEAD_DIM]))
            tma.async_load(v_desc, at, full, v_ring.index(slot).reshape([1, 1, work.BLOCK_N, work.HEAD_DIM]))
            step += 1


@gluon.jit
def _write(total, n_block, turn, stages, C: gl.constexpr, dbias_desc, head, start_row):
    """Start the copy of a tile of the gradient; the copy before the last has left its slot then."""
    stage = stages.index(C * 2 + (turn & 1))
    tma.store_wait(1)
    stage.store(total.to(dbias_desc.dtype))
    fence_async_shared()
    box = stage.reshape([1, 1, ROWS, total.shape[1]])
    tma.async_store(dbias_desc, [0, head, start_row, n_block * total.shape[1]], box)


@gluon.jit
def _consumer(C: gl.constexpr, work, n_blocks, bias, biases, resident, k_ring, v_ring, stages, dq_desc, dbias_desc, sm_scale):
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, work.BLOCK_N, 16])
    Q_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, work.HEAD_DIM, 16])
    P_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, Q_LAYOUT, 2)
    DTYPE: gl.constexpr = dq_desc.dtype
    _, head, start_m, lo, hi = locate(gl.program_id(0), work, bias)
    start_row = start_m + C * ROWS
    _, free_lo, free_hi, _ = work.own(None, head, start_row, lo, hi)
    own = Own(None, None, None, None, None)
    dq = (gl.zeros([ROWS, work.HEAD_DIM], gl.float32, Q_LAYOUT),) * resident.MEMBERS
    wait(resident.full.index(0), 0)
    step = 0
    for turn in range(hi - lo):
        n_block = hi - 1 - turn
        slot = turn % biases.SLOTS
        wait(biases.full.index(slot), (turn // biases.SLOTS) & 1)
        b = bias.tile(turn, C).load(S_LAYOUT)
        arrive_warp(biases.empty.index(slot))
        total = gl.zeros([ROWS, work.BLOCK_N], gl.float32, S_LAYOUT)
        moved = ()
        one = dq[0]
        operand = None
        for member in gl.static_range(resident.MEMBERS):
            at = member * resident.CONSUMERS + C
            k_tile = k_ring.take(step)
            v_tile = v_ring.index(step % k_ring.SLOTS)
            minus_delta = resident.numbers(at, 2, S_LAYOUT)
            s, dp = products(resident.q.index(at), resident.do.index(at), k_tile, v_tile, minus_delta, S_LAYOUT)
            if resident.LATE and member > 0:
                one, operand = warpgroup_mma_wait(2, deps=(one, operand))
                k_ring.release(step - 1)
                moved = moved + (one,)
            m = resident.numbers(at, 0, S_LAYOUT)
            log_l = resident.numbers(at, 1, S_LAYOUT)
            s = warpgroup_mma_wait(1, deps=(s,))
            p = weights(s, b, m, log_l, sm_scale, work, own, n_block, start_row, free_lo, free_hi)
            dp = warpgroup_mma_wait(0, deps=(dp,))
            ds = p * dp
            operand = gl.convert_layout(ds.to(DTYPE), P_LAYOUT)
            one = warpgroup_mma(operand, k_tile, dq[member], is_async=True)
            total = total + ds
            if not resident.LATE or member == resident.MEMBERS - 1:
                one, operand = warpgroup_mma_wait(0, deps=(one, operand))
                k_ring.release(step)
                moved = moved + (one,)
            step += 1
        dq = moved
        _write(total, n_block, turn, stages, C, dbias_desc, head, start_row)
    # What nobody sees gets zeros.
    nothing = gl.zeros([ROWS, work.BLOCK_N], gl.float32, S_LAYOUT)
    turn = hi - lo
    for n_block in range(0, min(lo, n_blocks)):
        _write(nothing, n_block, turn, stages, C, dbias_desc, head, start_row)
        turn += 1
    for n_block in range(hi, n_blocks):
        _write(nothing, n_block, turn, stages, C, dbias_desc, head, start_row)
        turn += 1
    for member in gl.static_range(resident.MEMBERS):
        q_tile = resident.q.index(member * resident.CONSUMERS + C)
        q_tile.store((dq[member] * sm_scale).to(DTYPE))
        fence_async_shared()
        tma.async_store(dq_desc, [member, head, start_row, 0], q_tile.reshape([1, 1, ROWS, work.HEAD_DIM]))
    tma.store_wait(0)


@gluon.jit(do_not_specialize=LENGTHS)
def _dq_dbias_kernel(
    q_desc, k_desc, v_desc, do_desc, bias_desc, dq_desc, dbias_desc, m_desc, log_l_desc, delta_desc, sm_scale,
    heads_q, group, seqlen_q, seqlen_k, q_start, upper, lower, m_blocks, n_blocks,
    HAS_UPPER: gl.constexpr, HAS_LOWER: gl.constexpr, HAS_TAIL: gl.constexpr, LONGEST: gl.constexpr, MEMBERS: gl.constexpr,
    HEAD_DIM: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr, BIAS_SLOTS: gl.constexpr,
    LATE: gl.constexpr, CONSUMER_REGISTERS: gl.constexpr, PRODUCER_REGISTERS: gl.constexpr,
):  # fmt: skip
    CONSUMERS: gl.constexpr = BLOCK_M // ROWS
    MASKED: gl.constexpr = HAS_UPPER or HAS_LOWER or HAS_TAIL
    LAYOUT: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    q = gl.allocate_shared_memory(q_desc.dtype, [MEMBERS * CONSUMERS, ROWS, HEAD_DIM], LAYOUT)
    do = gl.allocate_shared_memory(q_desc.dtype, [MEMBERS * CONSUMERS, ROWS, HEAD_DIM], LAYOUT)
    rows = gl.allocate_shared_memory(gl.float32, [MEMBERS * CONSUMERS * 3, 1, ROWS], gl.NVMMASharedLayout(0, 32, 2))
    full = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout())
    mbarrier.init(full.index(0), count=1)
    resident = Resident(q, do, rows, full, MEMBERS, CONSUMERS, LATE)
    k_ring = make_ring(k_desc, BLOCK_N, HEAD_DIM, STAGES, CONSUMERS * WARPS)
    v_ring = gl.allocate_shared_memory(q_desc.dtype, [STAGES, BLOCK_N, HEAD_DIM], LAYOUT)
    bias = make_bias(bias_desc, heads_q, heads_q * 0 + 1, BIAS_SLOTS, CONSUMERS, False, True)
    bias_full = gl.allocate_shared_memory(gl.int64, [BIAS_SLOTS, 1], mbarrier.MBarrierLayout())
    bias_empty = gl.allocate_shared_memory(gl.int64, [BIAS_SLOTS, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(BIAS_SLOTS):
        mbarrier.init(bias_full.index(i), count=1)
        mbarrier.init(bias_empty.index(i), count=CONSUMERS * WARPS)
    biases = Ring(bias.tiles, bias_full, bias_empty, BIAS_SLOTS, 1)
    stages = gl.allocate_shared_memory(
        dbias_desc.dtype, [CONSUMERS * 2, ROWS, BLOCK_N], gl.NVMMASharedLayout(128 if BLOCK_N >= 64 else 64, 16, 2)
    )
    work = Work(
        sm_scale, m_blocks, heads_q, heads_q, heads_q, seqlen_q, seqlen_k, q_start, upper, lower, full, full,
        BLOCK_M, BLOCK_N, HEAD_DIM, CONSUMERS, HAS_UPPER, HAS_LOWER, MASKED, False, False, LONGEST, False, False, False, 1,
        None, None, None, None, (), False, False, False, False, False, False,
    )  # fmt: skip
    mine = (work, n_blocks, bias, biases, resident, k_ring, v_ring, stages, dq_desc, dbias_desc, sm_scale)
    copies = (work, group, bias, biases, resident, k_ring, v_ring, q_desc, k_desc, v_desc, do_desc, bias_desc)
    copies = copies + (m_desc, log_l_desc, delta_desc)
    gl.static_assert(CONSUMERS == 2, "a program has two consumers")
    gl.warp_specialize(
        [(_consumer, (0,) + mine), (_consumer, (1,) + mine), (_producer, copies)],
        for_workers(CONSUMERS, WARPS, 1),
        for_workers(CONSUMERS, CONSUMER_REGISTERS, PRODUCER_REGISTERS),
    )
