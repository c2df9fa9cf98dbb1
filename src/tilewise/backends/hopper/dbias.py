"""The gradient of an additive bias: ds summed over the sequences and heads that share a tile of it, in registers and in one order.

A program works on tiles [BLOCK_M queries, BLOCK_N keys] of the bias, 64 rows for each consumer. The tiles of q, do, k and v of a
head that reads it are one slot of a ring ("a visit"), together with three numbers for each row of queries (``bias_rows.py``). The
gradient leaves through the tile of the bias itself, which nobody reads any more.

Arrivals that complete a phase of each barrier, with C consumers of W = 4 warps:
    visits   full: 1 (bytes)   empty: C * W, each warp after its last read
    biases   full: 1 (bytes)   empty: C, by each consumer once its rows of the gradient have left the slot
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma, warpgroup_mma_wait

from .bias import make_bias
from .bias_dq import products, weights
from .parts import ROWS, WARPS, Ring, Work, arrive_warp, for_workers, tile_range, wait
from .terms import Own

# Kernel arguments that never enter a compile key.
LENGTHS = ("heads_q", "batches", "group", "seqlen_q", "seqlen_k", "q_start", "upper", "lower", "m_blocks", "n_blocks", "tiles")


@gluon.aggregate
class Visits:
    """A ring of what one head brings to a tile of the bias."""

    q: gl.shared_memory_descriptor  # [SLOTS * CONSUMERS, ROWS, HEAD_DIM], and so is do
    do: gl.shared_memory_descriptor
    k: gl.shared_memory_descriptor  # [SLOTS, BLOCK_N, HEAD_DIM], and so is v
    v: gl.shared_memory_descriptor
    rows: gl.shared_memory_descriptor  # [SLOTS * CONSUMERS * 3, 1, ROWS]
    full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor
    SLOTS: gl.constexpr
    CONSUMERS: gl.constexpr

    @gluon.jit
    def fill(self, q_desc, k_desc, v_desc, do_desc, m_desc, log_l_desc, delta_desc, batch, head, head_kv, heads_q, row, key, step):
        D: gl.constexpr = self.q.type.shape[2]
        slot = step % self.SLOTS
        wait(self.empty.index(slot), ((step // self.SLOTS) & 1) ^ 1)
        full = self.full.index(slot)
        OF_ROWS: gl.constexpr = 2 * q_desc.block_type.nbytes + 3 * m_desc.block_type.nbytes
        mbarrier.expect(full, self.CONSUMERS * OF_ROWS + 2 * k_desc.block_type.nbytes)
        for c in gl.static_range(self.CONSUMERS):
            at = slot * self.CONSUMERS + c
            first = row + c * ROWS
            tma.async_load(q_desc, [batch, head, first, 0], full, self.q.index(at).reshape([1, 1, ROWS, D]))
            tma.async_load(do_desc, [batch, head, first, 0], full, self.do.index(at).reshape([1, 1, ROWS, D]))
            tma.async_load(m_desc, [batch * heads_q + head, first], full, self.rows.index(at * 3))
            tma.async_load(log_l_desc, [batch * heads_q + head, first], full, self.rows.index(at * 3 + 1))
            tma.async_load(delta_desc, [batch * heads_q + head, first], full, self.rows.index(at * 3 + 2))
        k = self.k.index(slot)
        box: gl.constexpr = [1, 1, k.type.shape[0], k.type.shape[1]]
        tma.async_load(k_desc, [batch, head_kv, key, 0], full, k.reshape(box))
        tma.async_load(v_desc, [batch, head_kv, key, 0], full, self.v.index(slot).reshape(box))

    @gluon.jit
    def numbers(self, step, C: gl.constexpr, i: gl.constexpr, S_LAYOUT: gl.constexpr):
        """One of the three numbers of each row."""
        rows = self.rows.index((step % self.SLOTS * self.CONSUMERS + C) * 3 + i)
        return rows.reshape([ROWS]).load(gl.SliceLayout(1, S_LAYOUT))


@gluon.jit
def _tile_of(index, work, bias, n_blocks):
    """``(batch, head, first row, tile of keys, heads that read it)`` of tile ``index`` of the bias; batch and head the first."""
    row = index // n_blocks
    n_block = index - row * n_blocks
    of_bias = row // work.m_blocks
    start_m = (row - of_bias * work.m_blocks) * work.BLOCK_M
    if bias.BY_BATCH and bias.BY_HEAD:
        batch = of_bias // bias.heads
        head = of_bias - batch * bias.heads
        visits = 1
    elif bias.BY_HEAD:
        batch = of_bias * 0
        head = of_bias
        visits = bias.batches
    elif bias.BY_BATCH:
        batch = of_bias
        head = of_bias * 0
        visits = bias.heads
    else:
        batch = of_bias * 0
        head = of_bias * 0
        visits = bias.heads * bias.batches
    row_end = min(start_m + work.BLOCK_M, work.seqlen_q)
    lo, _, _, hi = tile_range(
        work.q_start + start_m, work.q_start + row_end, work.seqlen_k, work.upper, work.lower, work.BLOCK_N, work.HAS_UPPER,
        work.HAS_LOWER,
    )  # fmt: skip
    return batch, head, start_m, n_block, visits * ((n_block >= lo) & (n_block < hi))


@gluon.jit
def _visitor(batch, head, visit, bias):
    """``(batch, head)`` that reads the tile of these first ones as number ``visit``."""
    if bias.BY_HEAD:
        return batch + visit, head
    elif bias.BY_BATCH:
        return batch, head + visit
    else:
        return visit // bias.heads, visit % bias.heads


@gluon.jit
def _producer(
    work, group, n_blocks, tiles, bias, biases, visits, q_desc, k_desc, v_desc, do_desc, bias_desc, m_desc, log_l_desc, delta_desc
):
    step = 0
    turn = 0
    for index in range(gl.program_id(0), tiles, gl.num_programs(0)):
        batch, head, start_m, n_block, count = _tile_of(index, work, bias, n_blocks)
        slot = turn % biases.SLOTS
        wait(biases.empty.index(slot), ((turn // biases.SLOTS) & 1) ^ 1)
        mbarrier.expect(biases.full.index(slot), bias.CONSUMERS * bias_desc.block_type.nbytes)
        bias.copy(bias_desc, biases.full.index(slot), batch, head, start_m, n_block * work.BLOCK_N, turn, True)
        turn += 1  # noqa: SIM113
        for visit in range(count):
            b, h = _visitor(batch, head, visit, bias)
            visits.fill(
                q_desc, k_desc, v_desc, do_desc, m_desc, log_l_desc, delta_desc, b, h, h // group, work.heads_q, start_m,
                n_block * work.BLOCK_N, step,
            )  # fmt: skip
            step += 1


@gluon.jit
def _give_back(biases, turn):
    """The gradient of tile number ``turn`` has left its slot, if there was such a tile."""
    tma.store_wait(0)
    if turn >= 0:
        mbarrier.arrive(biases.empty.index(turn % biases.SLOTS), count=1)


@gluon.jit
def _consumer(C: gl.constexpr, work, n_blocks, tiles, bias, biases, visits, dbias_desc, sm_scale):
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, work.BLOCK_N, 16])
    own = Own(None, None, None, None, None)
    step = 0
    turn = 0
    for index in range(gl.program_id(0), tiles, gl.num_programs(0)):
        batch, head, start_m, n_block, count = _tile_of(index, work, bias, n_blocks)
        start_row = start_m + C * ROWS
        free_lo = n_block * 0
        free_hi = free_lo
        if work.MASKED:
            row_end = min(start_row + ROWS, work.seqlen_q)
            _, free_lo, free_hi, _ = tile_range(
                work.q_start + start_row, work.q_start + row_end, work.seqlen_k, work.upper, work.lower, work.BLOCK_N,
                work.HAS_UPPER, work.HAS_LOWER,
            )  # fmt: skip
        total = gl.zeros([ROWS, work.BLOCK_N], gl.float32, S_LAYOUT)
        tile = bias.tile(turn, C)
        wait(biases.full.index(turn % biases.SLOTS), (turn // biases.SLOTS) & 1)
        for visit in range(count):
            slot = step % visits.SLOTS
            wait(visits.full.index(slot), (step // visits.SLOTS) & 1)
            at = slot * visits.CONSUMERS + C
            minus_delta = visits.numbers(step, C, 2, S_LAYOUT)
            k_tile = visits.k.index(slot)
            s, dp = products(visits.q.index(at), visits.do.index(at), k_tile, visits.v.index(slot), minus_delta, S_LAYOUT)
            b = tile.load(S_LAYOUT)
            m = visits.numbers(step, C, 0, S_LAYOUT)
            log_l = visits.numbers(step, C, 1, S_LAYOUT)
            s = warpgroup_mma_wait(1, deps=(s,))
            p = weights(s, b, m, log_l, sm_scale, work, own, n_block, start_row, free_lo, free_hi)
            dp = warpgroup_mma_wait(0, deps=(dp,))
            arrive_warp(visits.empty.index(slot))
            total = gl.fma(p, dp, total)
            step += 1
            if biases.SLOTS > 1:  # noqa: SIM102
                if visit == 0:  # not before: the copy of the last tile has had the time of a visit
                    _give_back(biases, turn - 1)
        if biases.SLOTS > 1:  # noqa: SIM102
            if count == 0:
                _give_back(biases, turn - 1)
        tile.store(total.to(dbias_desc.dtype))
        fence_async_shared()
        box = tile.reshape([1, 1, ROWS, work.BLOCK_N])
        tma.async_store(dbias_desc, [batch, head, start_row, n_block * work.BLOCK_N], box)
        if biases.SLOTS == 1:
            _give_back(biases, turn)
        turn += 1  # noqa: SIM113
    tma.store_wait(0)


@gluon.jit(do_not_specialize=LENGTHS)
def _dbias_kernel(
    q_desc, k_desc, v_desc, do_desc, bias_desc, m_desc, log_l_desc, delta_desc, dbias_desc, sm_scale,
    heads_q, batches, group, seqlen_q, seqlen_k, q_start, upper, lower, m_blocks, n_blocks, tiles,
    HAS_UPPER: gl.constexpr, HAS_LOWER: gl.constexpr, HAS_TAIL: gl.constexpr,
    BY_BATCH: gl.constexpr, BY_HEAD: gl.constexpr,
    HEAD_DIM: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr, BIAS_SLOTS: gl.constexpr,
    CONSUMER_REGISTERS: gl.constexpr, PRODUCER_REGISTERS: gl.constexpr,
):  # fmt: skip
    CONSUMERS: gl.constexpr = BLOCK_M // ROWS
    MASKED: gl.constexpr = HAS_UPPER or HAS_LOWER or HAS_TAIL
    LAYOUT: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    q = gl.allocate_shared_memory(q_desc.dtype, [STAGES * CONSUMERS, ROWS, HEAD_DIM], LAYOUT)
    do = gl.allocate_shared_memory(q_desc.dtype, [STAGES * CONSUMERS, ROWS, HEAD_DIM], LAYOUT)
    k = gl.allocate_shared_memory(q_desc.dtype, [STAGES, BLOCK_N, HEAD_DIM], LAYOUT)
    v = gl.allocate_shared_memory(q_desc.dtype, [STAGES, BLOCK_N, HEAD_DIM], LAYOUT)
    rows = gl.allocate_shared_memory(gl.float32, [STAGES * CONSUMERS * 3, 1, ROWS], gl.NVMMASharedLayout(0, 32, 2))
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=CONSUMERS * WARPS)
    visits = Visits(q, do, k, v, rows, full, empty, STAGES, CONSUMERS)
    bias = make_bias(bias_desc, heads_q, batches, BIAS_SLOTS, CONSUMERS, BY_BATCH, BY_HEAD)
    bias_full = gl.allocate_shared_memory(gl.int64, [BIAS_SLOTS, 1], mbarrier.MBarrierLayout())
    bias_empty = gl.allocate_shared_memory(gl.int64, [BIAS_SLOTS, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(BIAS_SLOTS):
        mbarrier.init(bias_full.index(i), count=1)
        mbarrier.init(bias_empty.index(i), count=CONSUMERS)
    biases = Ring(bias.tiles, bias_full, bias_empty, BIAS_SLOTS, 1)
    work = Work(
        sm_scale, m_blocks, tiles, tiles, heads_q, seqlen_q, seqlen_k, q_start, upper, lower, full, full,
        BLOCK_M, BLOCK_N, HEAD_DIM, CONSUMERS, HAS_UPPER, HAS_LOWER, MASKED, False, False, "any", False, False, False, 1,
        None, None, None, None, (), False, False, False, False, False, False,
    )  # fmt: skip
    mine = (work, n_blocks, tiles, bias, biases, visits, dbias_desc, sm_scale)
    copies = (work, group, n_blocks, tiles, bias, biases, visits, q_desc, k_desc, v_desc, do_desc, bias_desc, m_desc, log_l_desc)
    copies = copies + (delta_desc,)
    gl.static_assert(CONSUMERS == 2 or CONSUMERS == 3, "a program has two or three consumers")
    gl.warp_specialize(
        [(_consumer, (0,) + mine), (_consumer, (1,) + mine), (_consumer, (2,) + mine)][:CONSUMERS] + [(_producer, copies)],
        for_workers(CONSUMERS, WARPS, 1),
        for_workers(CONSUMERS, CONSUMER_REGISTERS, PRODUCER_REGISTERS),
    )
