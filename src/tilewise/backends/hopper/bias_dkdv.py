"""Backward with an additive bias: ``dk`` and ``dv`` of BLOCK_N keys of one head of keys, streaming the queries that see them.

``bwd.py`` tells of partitions, products and barriers. A slot of queries holds tiles of the bias too, [BLOCK_M queries, 64 keys] for
each consumer, which are read transposed; and each row of queries comes with its reference, a natural score (+inf for a row that saw
no key or lies past the end), and with log2 of the sum over it.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma, warpgroup_mma_wait

from .bias import biased_weights, make_bias
from .bwd_parts import Keys, hidden, packed, product_with, program, rows_of
from .chunks import accumulator, make_part_ring, make_tiles, pass_over, zeros_like
from .parts import ROWS, WARPS, wait

# Kernel arguments that never enter a compile key.
LENGTHS = ("heads_kv", "batches", "group", "q_pad", "seqlen_k", "q_start", "upper", "lower", "n_blocks", "heads_total")
LENGTHS += ("heads_together",)


@gluon.aggregate
class Sums:
    """log2 of the sum over the reference of each row, beside the slots of queries: [SLOTS, 1, BLOCK_M]."""

    rows: gl.shared_memory_descriptor
    IN_REGISTERS: gl.constexpr  # keys and values are operands in registers: the products read less of shared memory

    @gluon.jit
    def load(self, slot, BLOCK_M: gl.constexpr, S_LAYOUT: gl.constexpr):
        return self.rows.index(slot).reshape([BLOCK_M]).load(gl.SliceLayout(0, S_LAYOUT))


@gluon.jit
def _place(keys, bias):
    """``(batch, head_kv, first key)`` of this program."""
    batch, head, n_block = bias.place(program(), keys.n_blocks, keys.heads_together, keys.LONGEST)
    return batch, head, n_block * keys.BLOCK_N


@gluon.jit
def _feed_queries(ring, desc, rows_desc, sums_desc, sums, bias, bias_desc, keys, batch, head, m_block, start_n, step):
    """Copy a tile of queries into the ring, its rows' references and sums, and the tiles of the bias of these queries and keys."""
    slot = step % ring.SLOTS
    wait(ring.empty.index(slot), ((step // ring.SLOTS) & 1) ^ 1)
    full = ring.full.index(slot)
    row = m_block * keys.BLOCK_M
    head_row = keys.rows_head(batch, head)
    OF_ROWS: gl.constexpr = 2 * rows_desc.block_type.nbytes
    mbarrier.expect(full, ring.tiles.BOXES * desc.block_type.nbytes + OF_ROWS + bias.CONSUMERS * bias_desc.block_type.nbytes)
    ring.tiles.load(desc, batch, head, row, slot, full)
    tma.async_load(rows_desc, [head_row, row], full, ring.rows.index(slot))
    tma.async_load(sums_desc, [head_row, row], full, sums.rows.index(slot))
    bias.copy(bias_desc, full, batch, head, row, start_n, step, False)


@gluon.jit
def _feeder(
    keys, bias, sums, k_desc, v_desc, q_desc, do_desc, bias_desc, rows_desc, sums_desc, delta_desc, k_tiles, v_tiles, kv_full,
    q_ring, do_ring,
):  # fmt: skip
    """This program's keys and values once, then every tile of queries of every head of the group."""
    batch, head_kv, start_n = _place(keys, bias)
    lo, hi = keys.tiles(start_n)
    k_tiles.load_all(k_desc, batch, head_kv, start_n, kv_full.index(0))
    v_tiles.load_all(v_desc, batch, head_kv, start_n, kv_full.index(1))
    step = 0
    for member in range(keys.group):
        head = head_kv * keys.group + member
        for m_block in range(lo, hi):
            do_ring.fill(do_desc, batch, head, m_block * keys.BLOCK_M, step, delta_desc, keys.rows_head(batch, head))
            _feed_queries(
                q_ring, q_desc, rows_desc, sums_desc, sums, bias, bias_desc, keys, batch, head, m_block, start_n, step
            )
            step += 1


@gluon.jit
def _scores(k_tile, q_tile, zeros):
    """Issue k q^T, [ROWS, BLOCK_M], without waiting for it."""
    return warpgroup_mma(k_tile, q_tile.permute((1, 0)), zeros, use_acc=False, is_async=True)


@gluon.jit
def _step(
    s, dk, dv, step, more, keys, bias, sums, C: gl.constexpr, k_tile, v_tile, q_ring, do_ring, zeros, m_block, key_row, sm_scale,
    MASKED: gl.constexpr, P_LAYOUT: gl.constexpr,
):  # fmt: skip
    """One tile of queries, whose products are in ``s``. Issues those of the tile after it, if there is one (``more``)."""
    S_LAYOUT: gl.constexpr = s.type.layout
    q_tile = q_ring.parts(step)[0]
    b = bias.tile(step, C).permute((1, 0)).load(S_LAYOUT)
    log_l = sums.load(step % q_ring.SLOTS, keys.BLOCK_M, S_LAYOUT)
    p = biased_weights(s, b, rows_of(q_ring, step, S_LAYOUT)[None, :], log_l[None, :], sm_scale)
    if MASKED:
        p = hidden(p, keys, None, m_block, key_row, True)
    p16, words = packed(p, q_tile.dtype)
    do_tile = do_ring.take(step)[0]
    if keys.NEED_DK:
        dp = warpgroup_mma(v_tile, do_tile.permute((1, 0)), zeros + rows_of(do_ring, step, S_LAYOUT)[None, :], is_async=True)
    if keys.NEED_DV:
        p_operand = gl.convert_layout(p16, P_LAYOUT)
        dv = warpgroup_mma(p_operand, do_tile, dv, is_async=True)
    if keys.NEED_DK:
        dp = warpgroup_mma_wait(keys.NEED_DV, deps=(dp,))
        ds = product_with(words, dp, q_tile.dtype)
        ds_operand = gl.convert_layout(ds, P_LAYOUT)
        dk = warpgroup_mma(ds_operand, q_tile, dk, is_async=True)
    if keys.NEED_DV:
        dv, p_operand = warpgroup_mma_wait(keys.NEED_DK, deps=(dv, p_operand))
    do_ring.release(step)
    # The last one works on a slot that is being refilled, and nobody reads its scores.
    if more:
        q_ring.arrived(step + 1)
    s_next = _scores(k_tile, q_ring.parts(step + 1)[0], zeros)
    if keys.NEED_DK:
        dk, ds_operand = warpgroup_mma_wait(1, deps=(dk, ds_operand))
    q_ring.release(step)
    s = warpgroup_mma_wait(0, deps=(s_next,))
    return s, dk, dv, step + 1


@gluon.jit
def _steps(
    first, last, own_hi, s, dk, dv, step, keys, bias, sums, C: gl.constexpr, k_tile, v_tile, q_ring, do_ring, zeros, key_row,
    sm_scale, MASKED: gl.constexpr, P_LAYOUT: gl.constexpr,
):  # fmt: skip
    for m_block in range(first, last):
        s, dk, dv, step = _step(
            s, dk, dv, step, m_block + 1 < own_hi, keys, bias, sums, C, k_tile, v_tile, q_ring, do_ring, zeros, m_block, key_row,
            sm_scale, MASKED, P_LAYOUT,
        )  # fmt: skip
    return s, dk, dv, step


@gluon.jit
def _consumer(C: gl.constexpr, keys, bias, sums, dk_desc, dv_desc, k_tiles, v_tiles, kv_full, q_ring, do_ring, sm_scale):
    S_LAYOUT: gl.constexpr = accumulator(keys.BLOCK_M)
    P_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, accumulator(keys.HEAD_DIM), 2)
    batch, head_kv, start_n = _place(keys, bias)
    key_row = start_n + C * ROWS
    lo, hi = keys.tiles(start_n)
    own_lo, free_lo, free_hi, own_hi = keys.own(key_row, lo, hi)
    k_tile = k_tiles.parts(C)[0]
    v_tile = v_tiles.parts(C)[0]
    dk = zeros_like(k_tiles.parts(C))[0]
    dv = zeros_like(v_tiles.parts(C))[0]
    zeros = gl.zeros([ROWS, keys.BLOCK_M], gl.float32, S_LAYOUT)
    step = 0
    wait(kv_full.index(0), 0)
    wait(kv_full.index(1), 0)
    if sums.IN_REGISTERS:
        k_operand = k_tile.load(gl.DotOperandLayout(0, S_LAYOUT, 2))
        v_operand = v_tile.load(gl.DotOperandLayout(0, S_LAYOUT, 2))
    else:
        k_operand = k_tile
        v_operand = v_tile
    for _member in range(keys.group):
        step = pass_over(own_lo - lo, step, q_ring, do_ring)
        q_ring.arrived(step)
        s = warpgroup_mma_wait(0, deps=(_scores(k_operand, q_ring.parts(step)[0], zeros),))
        if keys.HAS_UPPER:
            s, dk, dv, step = _steps(
                own_lo, free_lo, own_hi, s, dk, dv, step, keys, bias, sums, C, k_operand, v_operand, q_ring, do_ring, zeros,
                key_row, sm_scale, True, P_LAYOUT,
            )  # fmt: skip
        s, dk, dv, step = _steps(
            free_lo, free_hi, own_hi, s, dk, dv, step, keys, bias, sums, C, k_operand, v_operand, q_ring, do_ring, zeros, key_row,
            sm_scale, False, P_LAYOUT,
        )  # fmt: skip
        if keys.HAS_LOWER or keys.HAS_TAIL:
            s, dk, dv, step = _steps(
                free_hi, own_hi, own_hi, s, dk, dv, step, keys, bias, sums, C, k_operand, v_operand, q_ring, do_ring, zeros,
                key_row, sm_scale, True, P_LAYOUT,
            )  # fmt: skip
        step = pass_over(hi - own_hi, step, q_ring, do_ring)
    # Worked out again rather than kept in registers.
    batch, head_kv, start_n = _place(keys, bias)
    if keys.NEED_DV:
        v_tiles.write((dv,), 1.0, dv_desc, batch, head_kv, start_n + C * ROWS, C)
    if keys.NEED_DK:
        k_tiles.write((dk,), sm_scale, dk_desc, batch, head_kv, start_n + C * ROWS, C)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=LENGTHS)
def _dkdv_bias_kernel(
    k_desc, v_desc, q_desc, do_desc, bias_desc, rows_desc, sums_desc, delta_desc, dk_desc, dv_desc, sm_scale,
    heads_kv, batches, group, q_pad, seqlen_k, q_start, upper, lower, n_blocks, heads_total, heads_together,
    HAS_UPPER: gl.constexpr, HAS_LOWER: gl.constexpr, HAS_TAIL: gl.constexpr, LONGEST: gl.constexpr,
    NEED_DK: gl.constexpr, NEED_DV: gl.constexpr, BY_BATCH: gl.constexpr, BY_HEAD: gl.constexpr,
    HEAD_DIM: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
    CONSUMER_REGISTERS: gl.constexpr, FEEDER_REGISTERS: gl.constexpr, IN_REGISTERS: gl.constexpr,
):  # fmt: skip
    CONSUMERS: gl.constexpr = BLOCK_N // ROWS
    k_tiles = make_tiles(k_desc, HEAD_DIM, ROWS, CONSUMERS)
    v_tiles = make_tiles(v_desc, HEAD_DIM, ROWS, CONSUMERS)
    q_ring = make_part_ring(q_desc, BLOCK_M, HEAD_DIM, STAGES, CONSUMERS * WARPS, True)
    do_ring = make_part_ring(do_desc, BLOCK_M, HEAD_DIM, STAGES, CONSUMERS * WARPS, True)
    rows = gl.allocate_shared_memory(gl.float32, [STAGES, 1, BLOCK_M], gl.NVMMASharedLayout(0, 32, 2))
    sums = Sums(rows, IN_REGISTERS)
    bias = make_bias(bias_desc, heads_kv, batches, STAGES, CONSUMERS, BY_BATCH, BY_HEAD)
    kv_full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    mbarrier.init(kv_full.index(0), count=1)
    mbarrier.init(kv_full.index(1), count=1)
    keys = Keys(
        n_blocks, heads_total, heads_together, heads_total, heads_kv, group, q_pad, seqlen_k, q_start, upper, lower,
        BLOCK_M, BLOCK_N, HEAD_DIM, HAS_UPPER, HAS_LOWER, HAS_TAIL, LONGEST, NEED_DK, NEED_DV, False,
        None, None, None, None, None, (), False, False, False, False, False,
    )  # fmt: skip
    mine = (keys, bias, sums, dk_desc, dv_desc, k_tiles, v_tiles, kv_full, q_ring, do_ring, sm_scale)
    copies = (keys, bias, sums, k_desc, v_desc, q_desc, do_desc, bias_desc, rows_desc, sums_desc, delta_desc, k_tiles, v_tiles)
    copies = copies + (kv_full, q_ring, do_ring)
    if CONSUMERS == 2:
        gl.warp_specialize(
            [(_consumer, (0,) + mine), (_consumer, (1,) + mine), (_feeder, copies)],
            [WARPS, 1],
            [CONSUMER_REGISTERS, FEEDER_REGISTERS],
        )
    else:
        gl.static_assert(CONSUMERS == 3, "a program has two or three consumers")
        gl.warp_specialize(
            [(_consumer, (0,) + mine), (_consumer, (1,) + mine), (_consumer, (2,) + mine), (_feeder, copies)],
            [WARPS, WARPS, 1],
            [CONSUMER_REGISTERS, CONSUMER_REGISTERS, FEEDER_REGISTERS],
        )
