"""Backward: ``dq = sm_scale ds k`` from a ds that the kernel for dk and dv has left in memory: one product instead of three.

ds lies transposed, in tiles of 64 keys by 64 queries (``ds_tiles.py``), zero where a query may not see a key. A tile was written
if a pair of it may be seen, and only such tiles are multiplied. Partitions: BLOCK_M / 64 consumers and a producer; each fills or
reads one ring, whose slots hold ds of 64 keys by BLOCK_M queries and those keys.

Arrivals that complete a phase of each barrier, with C consumers of W = 4 warps:
    slots    full: 1 (bytes of both tiles)   empty: C * W, each warp after its last read
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from .chunks import Tiles, made, make_tiles, outer, zeros_like
from .ds_tiles import BLOCKS
from .parts import ROWS, WARPS, arrive_warp, order, tile_range, wait

# Kernel arguments that never enter a compile key.
LENGTHS = ("heads_q", "group", "seqlen_q", "seqlen_k", "q_start", "upper", "m_blocks")
LENGTHS += ("heads_total", "heads_together", "head_first")


@gluon.aggregate
class Kept:
    """What a launch has to do, as each partition sees it, and its ring."""

    m_blocks: gl.tensor
    heads_total: gl.tensor
    heads_together: gl.tensor
    seqlen_q: gl.tensor
    seqlen_k: gl.tensor
    q_start: gl.tensor
    upper: gl.tensor
    ds_tiles: gl.shared_memory_descriptor  # [STAGES, 1, BLOCK_M, 64]: a tile for each 64 queries
    k_tiles: Tiles  # STAGES of [ROWS keys, HEAD_DIM]
    full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor
    STAGES: gl.constexpr
    BLOCK_M: gl.constexpr
    HEAD_DIM: gl.constexpr
    HAS_UPPER: gl.constexpr
    LONGEST: gl.constexpr

    @gluon.jit
    def place(self):
        """``(head, counted from the launch's first, first query)`` of this program."""
        head, m_block = order(gl.program_id(0), self.m_blocks, self.heads_total, self.heads_together, self.LONGEST)
        return head, m_block * self.BLOCK_M

    @gluon.jit
    def tiles(self, row, rows):
        """How many tiles of 64 keys the queries ``row .. row + rows`` see: the first ones, since there is no lower bound."""
        first = self.q_start + row
        last = self.q_start + min(row + rows, self.seqlen_q)
        _, _, _, hi = tile_range(first, last, self.seqlen_k, self.upper, 0, ROWS, self.HAS_UPPER, False)
        return hi


@gluon.jit
def _producer(kept, ds_desc, k_desc, heads_q, group, head_first):
    head, start_m = kept.place()
    batch = (head_first + head) // heads_q
    head_kv = (head_first + head - batch * heads_q) // group
    key_tiles = (kept.seqlen_k + ROWS - 1) // ROWS
    for step in range(kept.tiles(start_m, kept.BLOCK_M)):
        slot = step % kept.STAGES
        wait(kept.empty.index(slot), ((step // kept.STAGES) & 1) ^ 1)
        full = kept.full.index(slot)
        mbarrier.expect(full, ds_desc.block_type.nbytes + kept.HEAD_DIM // kept.k_tiles.COLUMNS * k_desc.block_type.nbytes)
        tma.async_load(ds_desc, [head * key_tiles + step, start_m, 0], full, kept.ds_tiles.index(slot))
        kept.k_tiles.load(k_desc, batch, head_kv, step * ROWS, slot, full)


@gluon.jit
def _consumer(C: gl.constexpr, kept, dq_desc, out_tiles, sm_scale, heads_q, head_first):
    head, start_m = kept.place()
    total = kept.tiles(start_m, kept.BLOCK_M)
    own = min(kept.tiles(start_m + C * ROWS, ROWS), total)
    dq = zeros_like(out_tiles.parts(C))
    for step in range(own):
        slot = step % kept.STAGES
        wait(kept.full.index(slot), (step // kept.STAGES) & 1)
        ds = kept.ds_tiles.index(slot).slice(C * ROWS, ROWS, dim=1).reinterpret(dq_desc.dtype, [ROWS, ROWS], BLOCKS)
        dq = outer(ds.permute((1, 0)), kept.k_tiles.parts(slot), dq)
        dq = made(len(dq), dq)
        if step > 0:
            arrive_warp(kept.empty.index((step - 1) % kept.STAGES))
    dq = made(0, dq)
    # Slots that this consumer's rows do not see, and the last one that they saw.
    for step in range(max(own - 1, 0), total):
        slot = step % kept.STAGES
        wait(kept.full.index(slot), (step // kept.STAGES) & 1)
        arrive_warp(kept.empty.index(slot))
    batch = (head_first + head) // heads_q
    out_tiles.write(dq, sm_scale, dq_desc, batch, head_first + head - batch * heads_q, start_m + C * ROWS, C)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=LENGTHS)
def _dq_kept_kernel(
    ds_desc, k_desc, dq_desc, sm_scale,
    heads_q, group, seqlen_q, seqlen_k, q_start, upper, m_blocks, heads_total, heads_together, head_first,
    HAS_UPPER: gl.constexpr, LONGEST: gl.constexpr, HEAD_DIM: gl.constexpr, BLOCK_M: gl.constexpr, STAGES: gl.constexpr,
    CONSUMER_REGISTERS: gl.constexpr, PRODUCER_REGISTERS: gl.constexpr,
):  # fmt: skip
    CONSUMERS: gl.constexpr = BLOCK_M // ROWS
    ds_tiles = gl.allocate_shared_memory(ds_desc.dtype, [STAGES, 1, BLOCK_M, ROWS], ds_desc.layout)
    k_tiles = make_tiles(k_desc, HEAD_DIM, ROWS, STAGES)
    out_tiles = make_tiles(dq_desc, HEAD_DIM, ROWS, CONSUMERS)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=CONSUMERS * WARPS)
    kept = Kept(
        m_blocks, heads_total, heads_together, seqlen_q, seqlen_k, q_start, upper, ds_tiles, k_tiles, full, empty,
        STAGES, BLOCK_M, HEAD_DIM, HAS_UPPER, LONGEST,
    )  # fmt: skip
    mine = (kept, dq_desc, out_tiles, sm_scale, heads_q, head_first)
    copies = (kept, ds_desc, k_desc, heads_q, group, head_first)
    if CONSUMERS == 2:
        gl.warp_specialize(
            [(_consumer, (0,) + mine), (_consumer, (1,) + mine), (_producer, copies)],
            [WARPS, 1],
            [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
        )
    else:
        gl.static_assert(CONSUMERS == 4, "a program has two or four consumers")
        gl.warp_specialize(
            [
                (_consumer, (0,) + mine),
                (_consumer, (1,) + mine),
                (_consumer, (2,) + mine),
                (_consumer, (3,) + mine),
                (_producer, copies),
            ],
            [WARPS, WARPS, WARPS, 1],
            [CONSUMER_REGISTERS, CONSUMER_REGISTERS, CONSUMER_REGISTERS, PRODUCER_REGISTERS],
        )
