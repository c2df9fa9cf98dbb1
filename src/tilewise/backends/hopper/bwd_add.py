"""Backward, the fastest form: ``dq``, ``dk`` and ``dv`` by one kernel of five products; ``dq`` is added up in float32 in memory.

The kernel of ``bwd.py`` with another warpgroup in the feeder's place, the adder. The consumers hand it their ds^T through shared
memory; it makes ``ds k`` [BLOCK_M queries, HEAD_DIM] of each tile and adds it to sums in memory. The adds of different programs
come in any order, so the last bits of dq may differ between runs.

The sums lie in the order in which a warpgroup holds an accumulator: for each 64 rows and each 8 columns, the 4 numbers of every
thread. So one vector instruction of a warp adds 512 bytes that lie side by side; ``_gather_kernel`` (``bwd_rows.py``) puts them in
their places. The first BULK slices of a tile go out through shared memory by one bulk reduce-add, which runs by itself; the others
by vector instructions from registers.

Arrivals that complete a phase of each barrier, with C consumers of W = 4 warps, beyond those of ``bwd.py``:
    ds      full: C * W, each warp after its last write   empty: W, each warp of the adder after its last product
    left    C * W, once: the consumers are done with the tiles of queries
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma, warpgroup_mma, warpgroup_mma_wait

from .bwd import _scores, _steps
from .bwd_parts import Keys, feed, first_tiles, make_row_ring, publish, write_tile
from .parts import ROWS, WARPS, arrive_warp, wait

# Kernel arguments that never enter a compile key.
LENGTHS = ("heads_kv", "group", "q_pad", "seqlen_k", "q_start", "upper", "lower", "n_blocks", "heads_total", "heads_together")
LENGTHS += ("head_first",)


@gluon.aggregate
class DsRing:
    """Slots of ds^T, [ROWS keys, BLOCK_M queries] of each consumer, on their way to the adder."""

    tiles: gl.shared_memory_descriptor  # [SLOTS * consumers, ROWS, BLOCK_M]
    full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor
    SLOTS: gl.constexpr
    CONSUMERS: gl.constexpr

    @gluon.jit
    def take(self, step):
        """Adder: the slot of this step, once all consumers have written it."""
        slot = step % self.SLOTS
        wait(self.full.index(slot), (step // self.SLOTS) & 1)
        return slot


@gluon.aggregate
class Handed:
    """The way of one consumer's ds^T to the adder."""

    ring: DsRing
    C: gl.constexpr

    @gluon.jit
    def put(self, step, ds, m_block):
        ring = self.ring
        slot = step % ring.SLOTS
        wait(ring.empty.index(slot), ((step // ring.SLOTS) & 1) ^ 1)
        ring.tiles.index(slot * ring.CONSUMERS + self.C).store(ds)
        fence_async_shared()
        publish(ring.full.index(slot))


@gluon.jit
def make_ds_ring(dtype: gl.constexpr, BLOCK_M: gl.constexpr, SLOTS: gl.constexpr, CONSUMERS: gl.constexpr):
    tiles = gl.allocate_shared_memory(dtype, [SLOTS * CONSUMERS, ROWS, BLOCK_M], gl.NVMMASharedLayout(128, 16, 2))
    full = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(SLOTS):
        mbarrier.init(full.index(i), count=CONSUMERS * WARPS)
        mbarrier.init(empty.index(i), count=WARPS)
    return DsRing(tiles, full, empty, SLOTS, CONSUMERS)


@gluon.jit
def _pass_over(count, step, q_ring, do_ring, handed, zeros):
    """Let ``count`` tiles go by that do not see this consumer's keys: its ds is 0 there."""
    for _ in range(count):
        q_ring.arrived(step)
        q_ring.release(step)
        do_ring.arrived(step)
        do_ring.release(step)
        handed.put(step, zeros.to(q_ring.tiles.dtype), step)
        step += 1
    return step


@gluon.jit
def _opaque(x):
    """The same number. What follows from it is worked out where it is needed, and not above the loop."""
    return gl.inline_asm("mov.u32 $0, $1;", "=r,r", [x], gl.int32)


@gluon.jit
def _ranges(keys, C: gl.constexpr):
    """``(lo, own_lo, free_lo, free_hi, own_hi, hi)`` of a consumer, worked out again rather than kept in registers."""
    _, _, start_n = keys.place()
    lo, hi = keys.tiles(start_n)
    own_lo, free_lo, free_hi, own_hi = keys.own(start_n + C * ROWS, lo, hi)
    return lo, own_lo, free_lo, free_hi, own_hi, hi


@gluon.jit
def _consumer(
    C: gl.constexpr, keys, dk_desc, dv_desc, k_tiles, v_tiles, kv_full, q_ring, do_ring, ds_ring, left, qk_scale2, sm_scale
):
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, keys.BLOCK_M, 16])
    D_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, keys.HEAD_DIM, 16])
    P_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, D_LAYOUT, 2)
    batch, head_kv, start_n = keys.place()
    key_row = start_n + C * ROWS
    k_tile = k_tiles.index(C)
    v_tile = v_tiles.index(C)
    handed = Handed(ds_ring, C)
    dk = gl.zeros([ROWS, keys.HEAD_DIM], gl.float32, D_LAYOUT)
    dv = gl.zeros([ROWS, keys.HEAD_DIM], gl.float32, D_LAYOUT)
    zeros = gl.zeros([ROWS, keys.BLOCK_M], gl.float32, S_LAYOUT)
    step = 0
    wait(kv_full.index(0), 0)
    wait(kv_full.index(1), 0)
    own = keys.head(batch, head_kv, None, qk_scale2, S_LAYOUT)
    for _ in range(keys.group):
        lo, own_lo, free_lo, free_hi, own_hi, hi = _ranges(keys, C)
        step = _pass_over(own_lo - lo, step, q_ring, do_ring, handed, zeros)
        q_ring.arrived(step)
        s = warpgroup_mma_wait(0, deps=(_scores(k_tile, q_ring.tile(step), zeros, keys, own, left),))
        if keys.HAS_UPPER:
            s, dk, dv, step = _steps(
                own_lo, free_lo, own_hi, s, dk, dv, step, keys, own, left, k_tile, v_tile, q_ring, do_ring, zeros, _opaque(key_row),
                qk_scale2, handed, True, P_LAYOUT,
            )  # fmt: skip
        lo, own_lo, free_lo, free_hi, own_hi, hi = _ranges(keys, C)
        s, dk, dv, step = _steps(
            free_lo, free_hi, own_hi, s, dk, dv, step, keys, own, left, k_tile, v_tile, q_ring, do_ring, zeros, key_row,
            qk_scale2, handed, False, P_LAYOUT,
        )  # fmt: skip
        lo, own_lo, free_lo, free_hi, own_hi, hi = _ranges(keys, C)
        if keys.HAS_LOWER or keys.HAS_TAIL:
            s, dk, dv, step = _steps(
                free_hi, own_hi, own_hi, s, dk, dv, step, keys, own, left, k_tile, v_tile, q_ring, do_ring, zeros, _opaque(key_row),
                qk_scale2, handed, True, P_LAYOUT,
            )  # fmt: skip
        lo, own_lo, free_lo, free_hi, own_hi, hi = _ranges(keys, C)
        step = _pass_over(hi - own_hi, step, q_ring, do_ring, handed, zeros)
    # The adder still reads the keys, so dk leaves through a slot of queries.
    arrive_warp(left)
    wait(left, 0)
    # Worked out again rather than kept in registers.
    batch, head_kv, start_n = keys.place()
    write_tile(dv, dv_desc, v_tile, batch, head_kv, start_n + C * ROWS)
    write_tile(dk * sm_scale, dk_desc, q_ring.tiles.index(C), batch, head_kv, start_n + C * ROWS)
    tma.store_wait(0)


@gluon.constexpr_function
def _add_text(outputs, inputs):
    x, base = inputs
    lines = [
        "{ .reg .u32 t; .reg .u64 a; mov.u32 t, %tid.x; and.b32 t, t, 127; shl.b32 t, t, 4; cvt.u64.u32 a, t;"
        f"add.u64 a, a, {base[0]};"
    ]
    add = "red.relaxed.gpu.global.add.v4.f32"
    lines += [f"{add} [a+{i * 512}], {{{', '.join(x[i : i + 4])}}};" for i in range(0, len(x), 4)]
    return "\n".join(lines) + "}"


@gluon.constexpr_function
def _stage_text(outputs, inputs):
    x, base = inputs
    lines = ["{ .reg .u32 t; mov.u32 t, %tid.x; and.b32 t, t, 127; shl.b32 t, t, 4; add.u32 t, t, " + base[0] + ";"]
    lines += [f"st.shared.v4.f32 [t+{i * 512}], {{{', '.join(x[i : i + 4])}}};" for i in range(0, len(x), 4)]
    return "\n".join(lines) + "fence.proxy.async.shared::cta; }"


@gluon.constexpr_function
def _nothing_text(outputs, inputs):
    return "// dropped"


@gluon.jit
def _bulk_wait():
    """Until the bulk copies of the first thread have read their shared memory."""
    gl.inline_asm(
        "{ .reg .pred p; .reg .u32 t; mov.u32 t, %tid.x; and.b32 t, t, 127; setp.eq.u32 p, t, 0;"
        "@p cp.async.bulk.wait_group.read 0; }",
        "~{memory}",
    )


@gluon.jit
def _meet():
    """The 128 threads of the adder meet."""
    gl.inline_asm("bar.sync 12, 128;", "~{memory}")


@gluon.jit
def _add_bulk(ptr, stage, BYTES: gl.constexpr):
    """One bulk reduce-add of a staged slice, by the first thread."""
    gl.inline_asm(
        "{ .reg .pred p; .reg .u32 t; mov.u32 t, %tid.x; and.b32 t, t, 127; setp.eq.u32 p, t, 0;"
        "@p cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [$0], [$1], $2; @p cp.async.bulk.commit_group; }",
        "l,r,r,~{memory}",
        [ptr, stage, BYTES],
    )


@gluon.aggregate
class Sums:
    """The sums of dq in memory, and how this launch adds to them."""

    ptr: gl.tensor
    stages: gl.shared_memory_descriptor  # [BULK, ROWS, WIDTH]
    WIDTH: gl.constexpr  # columns of a slice, an accumulator of the adder
    BULK: gl.constexpr  # slices of a tile that go out in bulk, the first ones
    EARLY: gl.constexpr  # tiles are fed before the adds of a step

    @gluon.jit
    def add(self, slice_index, x, NUMBER: gl.constexpr):
        """Add a slice [ROWS, WIDTH], the NUMBER-th of its tile."""
        ptr = self.ptr + slice_index.to(gl.int64) * (ROWS * self.WIDTH)
        if self.BULK < 0:
            gl.inline_asm(_nothing_text, ("f",), [x])
        elif NUMBER < self.BULK:
            if NUMBER == 0:
                _bulk_wait()
                _meet()
            gl.inline_asm(_stage_text, ("f", "r"), [x, self.stages.index(NUMBER)])
            _meet()
            _add_bulk(ptr, self.stages.index(NUMBER), ROWS * self.WIDTH * 4)
        else:
            gl.inline_asm(_add_text, ("f", "l"), [x, ptr])

    @gluon.jit
    def add_tile(self, tile, slot, keys, k_tiles, kv_full, ds_ring):
        """Add ds k of a tile of queries, whose number is counted over all heads, WIDTH columns at a time."""
        LAYOUT: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, self.WIDTH, 16])
        PIECES: gl.constexpr = keys.BLOCK_M // ROWS
        PARTS: gl.constexpr = keys.HEAD_DIM // self.WIDTH
        for piece in gl.static_range(PIECES):
            for part in gl.static_range(PARTS):
                x = gl.zeros([ROWS, self.WIDTH], gl.float32, LAYOUT)
                for c in gl.static_range(ds_ring.CONSUMERS):
                    ds = ds_ring.tiles.index(slot * ds_ring.CONSUMERS + c).slice(piece * ROWS, ROWS, dim=1)
                    k = k_tiles.index(c).slice(part * self.WIDTH, self.WIDTH, dim=1)
                    x = warpgroup_mma(ds.permute((1, 0)), k, x, use_acc=c > 0, is_async=True)
                x = warpgroup_mma_wait(0, deps=(x,))
                if piece == PIECES - 1 and part == PARTS - 1:
                    arrive_warp(ds_ring.empty.index(slot))
                self.add(tile * (PIECES * PARTS) + piece * PARTS + part, x, piece * PARTS + part)
                # Complete long ago: a place that the next product cannot be moved above, or two accumulators would be alive.
                wait(kv_full.index(0), 0)

    @gluon.jit
    def end(self):
        if self.BULK > 0:
            _bulk_wait()
        # Two partitions that end alike would be merged, and the register counts of both be lost.
        gl.inline_asm("// the adder ends", "~{memory}")


@gluon.jit
def _adder(keys, k_desc, v_desc, q_desc, do_desc, lse2_desc, delta_desc, k_tiles, v_tiles, kv_full, q_ring, do_ring, ds_ring, sums):
    """Feeder and adder in one. EARLY: a tile is fed before the adds of a step, into the slot that the step before has left."""
    batch, head_kv, start_n = keys.place()
    lo, hi = keys.tiles(start_n)
    first_tiles(k_desc, batch, head_kv, start_n, k_tiles, kv_full.index(0))
    first_tiles(v_desc, batch, head_kv, start_n, v_tiles, kv_full.index(1))
    total = (hi - lo) * keys.group
    AHEAD: gl.constexpr = q_ring.SLOTS - 1 if sums.EARLY else q_ring.SLOTS
    fed = 0
    feed_head = head_kv * keys.group
    feed_block = lo
    for _ in range(min(AHEAD, total)):
        feed(do_ring, do_desc, delta_desc, keys, batch, feed_head, feed_block, fed)
        feed(q_ring, q_desc, lse2_desc, keys, batch, feed_head, feed_block, fed)
        fed += 1
        feed_block += 1
        if feed_block == hi:
            feed_block = lo
            feed_head += 1
    wait(kv_full.index(0), 0)
    step = 0
    for member in range(keys.group):
        head = (batch * keys.heads_kv + head_kv) * keys.group + member
        first = head * (keys.q_pad // keys.BLOCK_M)
        for m_block in range(lo, hi):
            slot = ds_ring.take(step)
            if not sums.EARLY:
                sums.add_tile(first + m_block, slot, keys, k_tiles, kv_full, ds_ring)
            if fed < total:
                feed(do_ring, do_desc, delta_desc, keys, batch, feed_head, feed_block, fed)
                feed(q_ring, q_desc, lse2_desc, keys, batch, feed_head, feed_block, fed)
                fed += 1
                feed_block += 1
                if feed_block == hi:
                    feed_block = lo
                    feed_head += 1
            if sums.EARLY:
                sums.add_tile(first + m_block, slot, keys, k_tiles, kv_full, ds_ring)
            step += 1
    sums.end()


@gluon.jit(do_not_specialize=LENGTHS)
def _dkdvdq_kernel(
    k_desc, v_desc, q_desc, do_desc, lse2_desc, delta_desc, dk_desc, dv_desc, sums_ptr, qk_scale2, sm_scale,
    heads_kv, group, q_pad, seqlen_k, q_start, upper, lower, n_blocks, heads_total, heads_together, head_first,
    HAS_UPPER: gl.constexpr, HAS_LOWER: gl.constexpr, HAS_TAIL: gl.constexpr, LONGEST: gl.constexpr,
    HEAD_DIM: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
    DS_SLOTS: gl.constexpr, WIDTH: gl.constexpr, BULK: gl.constexpr, EARLY: gl.constexpr,
    CONSUMER_REGISTERS: gl.constexpr, ADDER_REGISTERS: gl.constexpr,
    STEPS: gl.constexpr,
):  # fmt: skip
    CONSUMERS: gl.constexpr = BLOCK_N // ROWS
    K_LAYOUT: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    k_tiles = gl.allocate_shared_memory(k_desc.dtype, [CONSUMERS, ROWS, HEAD_DIM], K_LAYOUT)
    v_tiles = gl.allocate_shared_memory(k_desc.dtype, [CONSUMERS, ROWS, HEAD_DIM], K_LAYOUT)
    q_ring = make_row_ring(q_desc, BLOCK_M, HEAD_DIM, STAGES, CONSUMERS * WARPS)
    do_ring = make_row_ring(do_desc, BLOCK_M, HEAD_DIM, STAGES, CONSUMERS * WARPS)
    ds_ring = make_ds_ring(k_desc.dtype, BLOCK_M, DS_SLOTS, CONSUMERS)
    kv_full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    left = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(kv_full.index(0), count=1)
    mbarrier.init(kv_full.index(1), count=1)
    mbarrier.init(left, count=CONSUMERS * WARPS)
    if BULK > 0:
        stages = gl.allocate_shared_memory(gl.float32, [BULK, ROWS, WIDTH], gl.NVMMASharedLayout(0, 32, 2))
    else:
        stages = kv_full
    keys = Keys(
        n_blocks, heads_total, heads_together, head_first, heads_kv, group, q_pad, seqlen_k, q_start, upper, lower,
        BLOCK_M, BLOCK_N, HEAD_DIM, HAS_UPPER, HAS_LOWER, HAS_TAIL, LONGEST, True, True, True,
        None, None, None, None, None, STEPS, False, False, False, False,
    )  # fmt: skip
    sums = Sums(sums_ptr, stages, WIDTH, BULK, EARLY)
    mine = (keys, dk_desc, dv_desc, k_tiles, v_tiles, kv_full, q_ring, do_ring, ds_ring, left, qk_scale2, sm_scale)
    copies = (keys, k_desc, v_desc, q_desc, do_desc, lse2_desc, delta_desc, k_tiles, v_tiles, kv_full, q_ring, do_ring)
    if CONSUMERS == 2:
        gl.warp_specialize(
            [(_consumer, (0,) + mine), (_consumer, (1,) + mine), (_adder, copies + (ds_ring, sums))],
            [WARPS, WARPS],
            [CONSUMER_REGISTERS, ADDER_REGISTERS],
        )
    else:
        gl.static_assert(CONSUMERS == 3, "beside the adder there are two or three consumers")
        gl.warp_specialize(
            [
                (_consumer, (0,) + mine),
                (_consumer, (1,) + mine),
                (_consumer, (2,) + mine),
                (_adder, copies + (ds_ring, sums)),
            ],
            [WARPS, WARPS, WARPS],
            [CONSUMER_REGISTERS, CONSUMER_REGISTERS, ADDER_REGISTERS],
        )
