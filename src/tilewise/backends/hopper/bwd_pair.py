"""Backward at head_dim 256 and 192: ``dk`` and ``dv`` of 64 keys of one head of keys, by two warpgroups one after the other.

The accumulators of dk and dv fill the registers of a warpgroup each, so they lie in two: the first makes s^T, p^T and dv, and hands
p^T through shared memory to the second, which makes dp^T, ds^T and dk. Each issues its first product of the next tile of queries
before it finishes this one. Formulas, rows, masks and tiles are those of ``bwd.py``.

Arrivals that complete a phase of each barrier, with W = 4 warps a group:
    keys, values         full: 1 (bytes), once
    queries, gradients   full: 1 (bytes)   empty: 2 W, each warp of both groups after its last read (W if nobody asks for dk)
    p                    full: W, each warp of the first after its last write   empty: W, each warp of the second
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma, warpgroup_mma_wait

from .bwd_parts import LENGTHS, Keys, feed_all, publish, rounded, rows_of, scores, weights
from .chunks import Tiles, accumulator, inner, make_part_ring, make_tiles, operand, outer, settled, swizzled, zeros_like
from .ds_tiles import KeptDs, make_ds_slots, store_all
from .parts import ROWS, WARPS, arrive_warp, for_workers, wait
from .terms import make_ramp


@gluon.aggregate
class PRing:
    """Slots of p^T [ROWS keys, BLOCK_M queries] between the two groups."""

    tiles: gl.shared_memory_descriptor
    full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor
    SLOTS: gl.constexpr

    @gluon.jit
    def put(self, step, p):
        slot = step % self.SLOTS
        wait(self.empty.index(slot), ((step // self.SLOTS) & 1) ^ 1)
        self.tiles.index(slot).store(p)
        publish(self.full.index(slot))

    @gluon.jit
    def get(self, step, LAYOUT: gl.constexpr):
        slot = step % self.SLOTS
        wait(self.full.index(slot), (step // self.SLOTS) & 1)
        return self.tiles.index(slot).load(LAYOUT)

    @gluon.jit
    def release(self, step):
        arrive_warp(self.empty.index(step % self.SLOTS))


@gluon.jit
def _make_p_ring(dtype: gl.constexpr, BLOCK_M: gl.constexpr, SLOTS: gl.constexpr):
    tiles = gl.allocate_shared_memory(dtype, [SLOTS, ROWS, BLOCK_M], swizzled(BLOCK_M))
    full = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(SLOTS):
        mbarrier.init(full.index(i), count=WARPS)
        mbarrier.init(empty.index(i), count=WARPS)
    return PRing(tiles, full, empty, SLOTS)


@gluon.jit
def _value_steps(
    first, last, hi, s, dv, step, keys, own, ramp, k, q_ring, do_ring, p_ring, zeros, start_n, qk_scale2,
    MASKED: gl.constexpr,
):  # fmt: skip
    """First group: the tiles ``first .. last`` of queries, whose scores are in ``s``; those of the next tile are issued early."""
    for place in range(first, last):
        p, slope, _ = weights(s, q_ring, step, keys, own, place, start_n, qk_scale2, MASKED)
        q_ring.release(step)
        p16 = rounded(p, k[0].dtype)
        do = do_ring.take(step)
        if keys.NEED_DV:
            p_operand = operand(p16, dv)
            dv = outer(p_operand, do, dv)
        # The last one works on a slot that is being refilled, and nobody reads its scores.
        if place + 1 < hi:
            q_ring.arrived(step + 1)
        s_next = scores(k, q_ring.parts(step + 1), zeros, keys, own, ramp)
        if keys.NEED_DK:
            # The second group needs p for ds alone.
            p_ring.put(step, rounded(p * slope, k[0].dtype) if keys.CAPPED else p16)
        if keys.NEED_DV:
            p_operand, dv = settled(len(k), p_operand, dv)
        do_ring.release(step)
        s = warpgroup_mma_wait(0, deps=(s_next,))
        step += 1
    return s, dv, step


@gluon.jit
def _value_group(keys, dv_desc, k_tiles, v_tiles, kv_full, q_ring, do_ring, p_ring, qk_scale2, ramp):
    S_LAYOUT: gl.constexpr = accumulator(keys.BLOCK_M)
    batch, head_kv, start_n = keys.place()
    if not keys.LISTED:
        lo, hi = keys.tiles(start_n)
        _, free_lo, free_hi, _ = keys.own(start_n, lo, hi)  # both groups walk from lo to hi
    k = k_tiles.parts(0)
    dv = zeros_like(v_tiles.parts(0))
    zeros = gl.zeros([ROWS, keys.BLOCK_M], gl.float32, S_LAYOUT)
    step = 0
    wait(kv_full.index(0), 0)
    for member in range(keys.group):
        tiles = None
        if keys.LISTED:
            tiles, free_hi, hi = keys.listed(batch, head_kv * keys.group + member, start_n)
            free_lo = free_hi * 0
        own = keys.head(batch, head_kv * keys.group + member, tiles, qk_scale2, S_LAYOUT)
        s = warpgroup_mma_wait(0, deps=(scores(k, q_ring.take(step), zeros, keys, own, ramp),))
        if keys.HAS_UPPER and not keys.LISTED:
            s, dv, step = _value_steps(
                lo, free_lo, hi, s, dv, step, keys, own, ramp, k, q_ring, do_ring, p_ring, zeros, start_n,
                qk_scale2, True,
            )  # fmt: skip
        s, dv, step = _value_steps(
            free_lo, free_hi, hi, s, dv, step, keys, own, ramp, k, q_ring, do_ring, p_ring, zeros, start_n,
            qk_scale2, False,
        )  # fmt: skip
        if keys.HAS_LOWER or keys.HAS_TAIL or keys.LISTED:
            s, dv, step = _value_steps(
                free_hi, hi, hi, s, dv, step, keys, own, ramp, k, q_ring, do_ring, p_ring, zeros, start_n,
                qk_scale2, True,
            )  # fmt: skip
    # The second group reads the values until it is done; the keys are read here only, and are at least as wide.
    batch, head_kv, start_n = keys.place()
    if keys.NEED_DV:
        out = Tiles(k_tiles.wide, k_tiles.narrow, v_tiles.WIDE, v_tiles.NARROW, v_tiles.COLUMNS, v_tiles.BOXES)
        out.write(dv, 1.0, dv_desc, batch, head_kv, start_n, 0)
        tma.store_wait(0)


@gluon.jit
def _key_group(keys, dk_desc, k_tiles, v_tiles, kv_full, q_ring, do_ring, p_ring, sm_scale, ds_slots):
    S_LAYOUT: gl.constexpr = accumulator(keys.BLOCK_M)
    if keys.NEED_DK:
        batch, head_kv, start_n = keys.place()
        if keys.LISTED:
            total = 0
            for member in range(keys.group):
                _, _, count = keys.listed(batch, head_kv * keys.group + member, start_n)
                total += count
        else:
            lo, hi = keys.tiles(start_n)
            total = (hi - lo) * keys.group
        step = 0
        v = v_tiles.parts(0)
        dk = zeros_like(k_tiles.parts(0))
        zeros = gl.zeros([ROWS, keys.BLOCK_M], gl.float32, S_LAYOUT)
        wait(kv_full.index(1), 0)
        dp = inner(v, do_ring.take(0), zeros + rows_of(do_ring, 0, S_LAYOUT)[None, :], False)
        dp = warpgroup_mma_wait(0, deps=(dp,))
        do_ring.release(0)
        for member in range(keys.group):
            if keys.KEEPS:
                kept = KeptDs(ds_slots, member * (hi - lo) - lo, 0, True)
            if keys.LISTED:
                _, lo, hi = keys.listed(batch, head_kv * keys.group + member, start_n)
                lo = hi * 0
            for m_block in range(lo, hi):
                p16 = p_ring.get(step, S_LAYOUT)
                ds = (p16.to(gl.float32) * dp).to(v[0].dtype)
                p_ring.release(step)
                if keys.KEEPS:
                    kept.put(step, ds, m_block)
                ds_operand = operand(ds, dk)
                dk = outer(ds_operand, q_ring.take(step), dk)
                # The last one works on a slot that is being refilled, and nobody reads its result.
                if step + 1 < total:
                    do_ring.arrived(step + 1)
                minus_delta = rows_of(do_ring, step + 1, S_LAYOUT)
                dp_next = inner(v, do_ring.parts(step + 1), zeros + minus_delta[None, :], False)
                ds_operand, dk = settled(len(v), ds_operand, dk)
                q_ring.release(step)
                dp = warpgroup_mma_wait(0, deps=(dp_next,))
                if step + 1 < total:
                    do_ring.release(step + 1)
                step += 1
        batch, head_kv, start_n = keys.place()
        # Nobody needs the queries any more: this group is the last to read them.
        q_ring.tiles.write(dk, sm_scale, dk_desc, batch, head_kv, start_n, 0)
        tma.store_wait(0)


@gluon.jit(do_not_specialize=LENGTHS)
def _dkdv_pair_kernel(
    k_desc, v_desc, q_desc, do_desc, lse2_desc, delta_desc, dk_desc, dv_desc, ds_desc, qk_scale2, sm_scale,
    heads_kv, group, q_pad, seqlen_k, q_start, upper, lower, n_blocks, heads_total, heads_together, head_first, seqlen_q,
    terms, table_batch, table_head, table_width,
    HAS_UPPER: gl.constexpr, HAS_LOWER: gl.constexpr, HAS_TAIL: gl.constexpr, LONGEST: gl.constexpr,
    NEED_DK: gl.constexpr, NEED_DV: gl.constexpr, KEEPS: gl.constexpr,
    HEAD_DIM: gl.constexpr, HEAD_DIM_V: gl.constexpr, BLOCK_M: gl.constexpr, STAGES: gl.constexpr, P_SLOTS: gl.constexpr,
    CONSUMER_REGISTERS: gl.constexpr, FEEDER_REGISTERS: gl.constexpr,
    STEPS: gl.constexpr, CAPPED: gl.constexpr, RAMP: gl.constexpr, LISTED: gl.constexpr, FAST: gl.constexpr,
):  # fmt: skip
    READERS: gl.constexpr = 2 * WARPS if NEED_DK else WARPS
    k_tiles = make_tiles(k_desc, HEAD_DIM, ROWS, 1)
    v_tiles = make_tiles(v_desc, HEAD_DIM_V, ROWS, 1)
    q_ring = make_part_ring(q_desc, BLOCK_M, HEAD_DIM, STAGES, READERS, True)
    do_ring = make_part_ring(do_desc, BLOCK_M, HEAD_DIM_V, STAGES, READERS, True)
    p_ring = _make_p_ring(k_desc.dtype, BLOCK_M, P_SLOTS)
    kv_full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    mbarrier.init(kv_full.index(0), count=1)
    mbarrier.init(kv_full.index(1), count=1)
    keys = Keys(
        n_blocks, heads_total, heads_together, head_first, heads_kv, group, q_pad, seqlen_k, q_start, upper, lower,
        BLOCK_M, ROWS, HEAD_DIM, HAS_UPPER, HAS_LOWER, HAS_TAIL, LONGEST, NEED_DK, NEED_DV, KEEPS,
        seqlen_q, terms, table_batch, table_head, table_width, STEPS, CAPPED, RAMP, LISTED, FAST, False,
    )  # fmt: skip
    if KEEPS:
        ds_slots = make_ds_slots(k_desc.dtype, BLOCK_M, 1)
    else:
        ds_slots = kv_full
    if RAMP:
        ramp = make_ramp(BLOCK_M, BLOCK_M, True)
        fence_async_shared()
    else:
        ramp = kv_full
    tiles = (k_tiles, v_tiles, kv_full, q_ring, do_ring, p_ring)
    gl.warp_specialize(
        [
            (_value_group, (keys, dv_desc) + tiles + (qk_scale2, ramp)),
            (_key_group, (keys, dk_desc) + tiles + (sm_scale, ds_slots)),
            (feed_all, (keys, k_desc, v_desc, q_desc, do_desc, lse2_desc, delta_desc) + tiles[:5]),
        ]
        + ([(store_all, (keys, ds_desc, ds_slots))] if KEEPS else []),
        for_workers(2, WARPS, 1, 1 + KEEPS),
        for_workers(2, CONSUMER_REGISTERS, FEEDER_REGISTERS, 1 + KEEPS),
    )
