"""Backward, the fastest form: ``dq``, ``dk`` and ``dv`` by one kernel of five products; ``dq`` is added up in float32 in memory.

The kernel of ``bwd.py`` with another warpgroup in the feeder's place, the adder. The consumers hand it their ds^T through shared
memory; it makes ``ds k`` [BLOCK_M queries, HEAD_DIM] of each tile and adds it to sums in memory. The adds of different programs
come in any order, so the last bits of dq may differ between runs.

The sums lie in the order in which a warpgroup holds an accumulator: for each 64 rows and each 8 columns, the 4 numbers of every
thread. So one vector instruction of a warp adds 512 bytes that lie side by side; ``_gather_kernel`` (``bwd_rows.py``) puts them in
their places.

A consumer whose keys a tile of queries does not see hands over zeros, so that the product of all keys is right.

The adder feeds as well: the next tile is copied in before the adds of a step, into the slot that the step before has left. With
fewer than three slots the consumers would wait for a tile that is fed after the ds that they have yet to hand on.

A program works on one tile of keys after another (``turns.py``), and its queries are fed across the border: the first of the next
keys while the last adds of these are made. The steps of the rings go on; the other barriers have a phase for each turn.

Arrivals that complete a phase of each barrier, with C consumers of W = 4 warps, beyond those of ``bwd.py``:
    keys, values  full: 1 (bytes), each turn
    ds            full: C * W, each warp after its last write   empty: W, each warp of the adder after its last product
    left          C * W: the consumers' dv and dk have left shared memory, dv by the place of the values
Nobody waits to copy the next keys in but the adder for its own last product: by then the consumers have made all products with the
keys of this turn, but for one behind the last tile of queries that nobody reads.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma, warpgroup_mma, warpgroup_mma_wait

from .bwd import _steps
from .bwd_parts import Keys, publish, scores
from .chunks import Rows, accumulator, make_part_ring, pass_over, zeros_like
from .ds_tiles import BLOCKS_OF_TWO, put
from .parts import ROWS, WARPS, arrive_warp, wait
from .turns import SLOTS, make_turns

WIDTH = gl.constexpr(64)  # columns that the adder makes at a time

# Kernel arguments that never enter a compile key.
LENGTHS = ("heads_kv", "group", "q_pad", "seqlen_k", "q_start", "upper", "n_blocks", "heads_total", "heads_together")


@gluon.aggregate
class DsRing:
    """Slots of ds^T on their way to the adder, ROWS keys from each consumer."""

    tiles: gl.shared_memory_descriptor  # [SLOTS * BLOCK_M / 64, BLOCK_N keys, 64 queries]: a tile of ``ds_tiles.py`` a consumer
    full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor
    SLOTS: gl.constexpr
    EARLY: gl.constexpr  # as ``KeptDs.EARLY``

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
    EARLY: gl.constexpr

    @gluon.jit
    def put(self, step, ds, m_block):
        ring = self.ring
        slot = step % ring.SLOTS
        wait(ring.empty.index(slot), ((step // ring.SLOTS) & 1) ^ 1)
        put(ds, ring.tiles.index(slot * (ds.shape[1] // ROWS)).slice(self.C * ROWS, ROWS, dim=0), True)
        publish(ring.full.index(slot))

    @gluon.jit
    def pass_over(self, count, step, q_ring, do_ring, BLOCK_M: gl.constexpr):
        """Let ``count`` tiles of queries go by that do not see this consumer's keys: their ds is 0."""
        for _ in range(count):
            step = pass_over(1, step, q_ring, do_ring)
            self.put(step - 1, gl.zeros([ROWS, BLOCK_M], self.ring.tiles.dtype, accumulator(BLOCK_M)), 0)
        return step


@gluon.jit
def make_ds_ring(dtype: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, SLOTS: gl.constexpr, EARLY: gl.constexpr):
    tiles = gl.allocate_shared_memory(dtype, [SLOTS * (BLOCK_M // ROWS), BLOCK_N, ROWS], gl.NVMMASharedLayout(0, 16, 2))
    full = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(SLOTS):
        mbarrier.init(full.index(i), count=BLOCK_N // ROWS * WARPS)
        mbarrier.init(empty.index(i), count=WARPS)
    return DsRing(tiles, full, empty, SLOTS, EARLY)


@gluon.jit
def _write(tile, acc, scale, desc, batch, head, row):
    """Start the copy of ``acc * scale`` to memory, through a tile [ROWS, HEAD_DIM] that nobody reads any more."""
    tile.store((acc * scale).to(desc.dtype))
    fence_async_shared()
    tma.async_store(desc, [batch, head, row, 0], tile.reshape([1, 1, ROWS, tile.type.shape[1]]))


@gluon.jit
def _differentiate(
    turn, step, C: gl.constexpr, keys, dk_desc, dv_desc, k_tiles, v_tiles, dk_tiles, kv_full, left, q_ring, do_ring,
    ds_ring, turns, qk_scale2, sm_scale,
):  # fmt: skip
    """Consumer ``C``: dk and dv of its ROWS keys of this turn's tile. Returns the ring step after it."""
    S_LAYOUT: gl.constexpr = accumulator(keys.BLOCK_M)
    batch, head_kv, start_n = turns.place(turn)
    key_row = start_n + C * ROWS
    k = Rows(k_tiles, C * ROWS) if keys.AGAIN else (k_tiles.index(0).slice(C * ROWS, ROWS, dim=0),)
    v = (v_tiles.index(C),)
    handed = Handed(ds_ring, C, ds_ring.EARLY)
    dk = zeros_like(v)
    dv = zeros_like(v)
    zeros = gl.zeros([ROWS, keys.BLOCK_M], gl.float32, S_LAYOUT)
    own = keys.head(batch, head_kv, None, qk_scale2, S_LAYOUT)
    wait(kv_full.index(0), turn & 1)
    wait(kv_full.index(1), turn & 1)
    for _ in range(keys.group):
        lo, hi = turns.tiles(turn)
        own_lo, free_lo, free_hi, own_hi = turns.own(turn, C)
        step = handed.pass_over(own_lo - lo, step, q_ring, do_ring, keys.BLOCK_M)
        q_ring.arrived(step)
        s = warpgroup_mma_wait(0, deps=(scores(k, q_ring.parts(step), zeros, keys, own, left),))
        if keys.HAS_UPPER:
            s, dk, dv, step = _steps(
                own_lo, free_lo, own_hi, s, dk, dv, step, keys, own, left, k, v, q_ring, do_ring, zeros, key_row,
                qk_scale2, handed, True,
            )  # fmt: skip
        s, dk, dv, step = _steps(
            free_lo, free_hi, own_hi, s, dk, dv, step, keys, own, left, k, v, q_ring, do_ring, zeros, key_row,
            qk_scale2, handed, False,
        )  # fmt: skip
        if keys.HAS_TAIL:
            s, dk, dv, step = _steps(
                free_hi, own_hi, own_hi, s, dk, dv, step, keys, own, left, k, v, q_ring, do_ring, zeros, key_row,
                qk_scale2, handed, True,
            )  # fmt: skip
        lo, hi = turns.tiles(turn)
        own_lo, free_lo, free_hi, own_hi = turns.own(turn, C)
        step = handed.pass_over(hi - own_hi, step, q_ring, do_ring, keys.BLOCK_M)
    batch, head_kv, start_n = turns.place(turn)
    _write(v[0], dv[0], 1.0, dv_desc, batch, head_kv, start_n + C * ROWS)
    _write(dk_tiles.index(C), dk[0], sm_scale, dk_desc, batch, head_kv, start_n + C * ROWS)
    tma.store_wait(0)
    arrive_warp(left)
    return step


@gluon.jit
def _consumer(
    C: gl.constexpr, keys, dk_desc, dv_desc, k_tiles, v_tiles, dk_tiles, kv_full, left, q_ring, do_ring, ds_ring, turns,
    qk_scale2, sm_scale,
):  # fmt: skip
    step = 0
    turn = 0
    turns.arrived(turn)
    while turns.ask(turn, 3) < turns.ask(turn, 4):
        step = _differentiate(
            turn, step, C, keys, dk_desc, dv_desc, k_tiles, v_tiles, dk_tiles, kv_full, left, q_ring, do_ring,
            ds_ring, turns, qk_scale2, sm_scale,
        )  # fmt: skip
        turn += 1
        turns.arrived(turn)


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


@gluon.jit
def _add_tile(tile, slot, keys, k_tiles, kv_full, turn, ds_ring, sums_ptr):
    """Add ds k of a tile of queries, whose number is counted over all heads, to the sums: ROWS by WIDTH at a time.

    All keys of the program in one product: each wait of the adder for the matrix units is behind the products of the consumers.
    """
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, WIDTH, 16])
    PARTS: gl.constexpr = keys.HEAD_DIM // WIDTH
    SLICES: gl.constexpr = keys.BLOCK_M // ROWS * PARTS
    for i in gl.static_range(SLICES):
        zeros = gl.zeros([ROWS, WIDTH], gl.float32, LAYOUT)
        ds = ds_ring.tiles.index(slot * (keys.BLOCK_M // ROWS) + i // PARTS)
        ds = ds.reinterpret(ds.dtype, [keys.BLOCK_N, ROWS], BLOCKS_OF_TWO)
        k = k_tiles.index(0).slice((i % PARTS) * WIDTH, WIDTH, dim=1)
        x = warpgroup_mma(ds.permute((1, 0)), k, zeros, use_acc=False, is_async=True)
        x = warpgroup_mma_wait(0, deps=(x,))
        if i + 1 == SLICES:
            arrive_warp(ds_ring.empty.index(slot))
        gl.inline_asm(_add_text, ("f", "l"), [x, sums_ptr + (tile * SLICES + i).to(gl.int64) * (ROWS * WIDTH)])
        # Complete long ago: a place that the next product cannot be moved above, or two accumulators would be alive.
        wait(kv_full.index(0), turn & 1)


@gluon.jit
def _load(desc, batch, head, row, tile, full):
    tma.async_load(desc, [batch, head, row, 0], full, tile.reshape([1, 1, tile.type.shape[0], tile.type.shape[1]]))


@gluon.jit
def _first_of(keys, turns, turn):
    """``(batch, head, lo, hi, ahead)`` of this turn: the first query head, the tiles of queries of each, and how many there are in
    all: none, if there is no such turn."""
    turns.tell(turn, keys)
    turns.arrived(turn)
    lo, hi = turns.tiles(turn)
    return turns.ask(turn, 0), turns.ask(turn, 1) * keys.group, lo, hi, (hi - lo) * keys.group


@gluon.jit
def _feed(fed, turn, batch, head, block, lo, hi, ahead, keys, turns, q_desc, do_desc, lse2_desc, delta_desc, q_ring, do_ring):
    """Copy the next tile of queries in, if there is one, and go on behind it: to the next head, or to the next turn."""
    if ahead > 0:
        do_ring.fill(do_desc, batch, head, block * keys.BLOCK_M, fed, delta_desc, keys.rows_head(batch, head))
        q_ring.fill(q_desc, batch, head, block * keys.BLOCK_M, fed, lse2_desc, keys.rows_head(batch, head))
        fed += 1
        block += 1
        ahead -= 1
        if block == hi:
            block = lo
            head += 1
        if ahead == 0:
            turn += 1
            batch, head, lo, hi, ahead = _first_of(keys, turns, turn)
            block = lo
    return fed, turn, batch, head, block, lo, hi, ahead


@gluon.jit
def _adder(
    keys, k_desc, v_desc, q_desc, do_desc, lse2_desc, delta_desc, k_tiles, v_tiles, kv_full, left, q_ring, do_ring, ds_ring,
    turns, sums_ptr,
):  # fmt: skip
    """Copies tiles in, one fewer ahead than there are slots, and adds ds k of each tile to memory."""
    tiles = keys.q_pad // keys.BLOCK_M
    turns.begin()
    turn = 0
    step = 0
    fed = 0
    fed_turn = 0
    batch, head, lo, hi, ahead = _first_of(keys, turns, 0)
    block = lo
    own_lo, own_hi = turns.tiles(0)
    while own_lo < own_hi:
        own_batch, head_kv, start_n = turns.place(turn)
        mbarrier.expect(kv_full.index(0), k_desc.block_type.nbytes)
        _load(k_desc, own_batch, head_kv, start_n, k_tiles.index(0), kv_full.index(0))
        wait(left, (turn & 1) ^ 1)  # granted at once the first time
        mbarrier.expect(kv_full.index(1), keys.BLOCK_N // ROWS * v_desc.block_type.nbytes)
        for c in gl.static_range(keys.BLOCK_N // ROWS):
            _load(v_desc, own_batch, head_kv, start_n + c * ROWS, v_tiles.index(c), kv_full.index(1))
        if turn == 0:
            for _ in range(q_ring.SLOTS - 1):
                fed, fed_turn, batch, head, block, lo, hi, ahead = _feed(
                    fed, fed_turn, batch, head, block, lo, hi, ahead, keys, turns, q_desc, do_desc, lse2_desc, delta_desc, q_ring,
                    do_ring,
                )  # fmt: skip
        wait(kv_full.index(0), turn & 1)
        # The tile of queries whose dq is added to, counted over all heads.
        number = (own_batch * keys.heads_kv + head_kv) * keys.group * tiles + own_lo
        for _ in range(keys.group):
            for _ in range(own_lo, own_hi):
                slot = ds_ring.take(step)
                fence_async_shared()
                fed, fed_turn, batch, head, block, lo, hi, ahead = _feed(
                    fed, fed_turn, batch, head, block, lo, hi, ahead, keys, turns, q_desc, do_desc, lse2_desc, delta_desc, q_ring,
                    do_ring,
                )  # fmt: skip
                _add_tile(number, slot, keys, k_tiles, kv_full, turn, ds_ring, sums_ptr)
                number += 1
                step += 1
            number += tiles - (own_hi - own_lo)
        turn += 1
        own_lo, own_hi = turns.tiles(turn)
    # Two partitions that end alike would be merged, and the register counts of both be lost.
    gl.inline_asm("// the adder ends", "~{memory}")


@gluon.jit(do_not_specialize=LENGTHS)
def _dkdvdq_kernel(
    k_desc, v_desc, q_desc, do_desc, lse2_desc, delta_desc, dk_desc, dv_desc, sums_ptr, qk_scale2, sm_scale,
    heads_kv, group, q_pad, seqlen_k, q_start, upper, n_blocks, heads_total, heads_together,
    HAS_UPPER: gl.constexpr, HAS_TAIL: gl.constexpr, LONGEST: gl.constexpr,
    HEAD_DIM: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr, DS_SLOTS: gl.constexpr,
    EARLY: gl.constexpr,
    CONSUMER_REGISTERS: gl.constexpr, ADDER_REGISTERS: gl.constexpr, STEPS: gl.constexpr,
):  # fmt: skip
    CONSUMERS: gl.constexpr = BLOCK_N // ROWS
    AGAIN: gl.constexpr = HEAD_DIM == 128 and (HAS_UPPER or HAS_TAIL)  # these spill otherwise
    gl.static_assert(CONSUMERS == 2, "beside the adder there are two consumers")
    gl.static_assert(STAGES > 2, "feeding ahead of the adds needs three slots")
    gl.static_assert(STAGES < SLOTS, "turns would be told before those that are read")
    K_LAYOUT: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    k_tiles = gl.allocate_shared_memory(k_desc.dtype, [1, BLOCK_N, HEAD_DIM], K_LAYOUT)
    v_tiles = gl.allocate_shared_memory(k_desc.dtype, [CONSUMERS, ROWS, HEAD_DIM], K_LAYOUT)
    dk_tiles = gl.allocate_shared_memory(k_desc.dtype, [CONSUMERS, ROWS, HEAD_DIM], K_LAYOUT)
    q_ring = make_part_ring(q_desc, BLOCK_M, HEAD_DIM, STAGES, CONSUMERS * WARPS, True)
    do_ring = make_part_ring(do_desc, BLOCK_M, HEAD_DIM, STAGES, CONSUMERS * WARPS, True)
    ds_ring = make_ds_ring(k_desc.dtype, BLOCK_M, BLOCK_N, DS_SLOTS, EARLY)
    kv_full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    left = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout()).index(0)
    mbarrier.init(kv_full.index(0), count=1)
    mbarrier.init(kv_full.index(1), count=1)
    mbarrier.init(left, count=CONSUMERS * WARPS)
    turns = make_turns(sums_ptr + heads_total.to(gl.int64) * group * q_pad * HEAD_DIM)
    # No lower bound, no terms, all heads in one launch; KEEPS: ds is handed on.
    none = heads_total * 0
    keys = Keys(
        n_blocks, heads_total, heads_together, none, heads_kv, group, q_pad, seqlen_k, q_start, upper, none,
        BLOCK_M, BLOCK_N, HEAD_DIM, HAS_UPPER, False, HAS_TAIL, LONGEST, True, True, True,
        None, None, None, None, None, STEPS, False, False, False, False, AGAIN,
    )  # fmt: skip
    barriers = (kv_full, left, q_ring, do_ring, ds_ring, turns)
    mine = (keys, dk_desc, dv_desc, k_tiles, v_tiles, dk_tiles) + barriers + (qk_scale2, sm_scale)
    copies = (keys, k_desc, v_desc, q_desc, do_desc, lse2_desc, delta_desc, k_tiles, v_tiles) + barriers + (sums_ptr,)
    gl.warp_specialize(
        [(_consumer, (0,) + mine), (_consumer, (1,) + mine), (_adder, copies)],
        [WARPS, WARPS],
        [CONSUMER_REGISTERS, ADDER_REGISTERS],
    )
