"""ds^T on its way out of the registers of a consumer: to memory, by the storer, or to the warpgroup that adds dq up.

A tile is 64 keys by 64 queries: 64 blocks of 8 x 8 numbers, 128 bytes each, in the order in which an accumulator has them. So a
warp writes its part with four instructions at fixed distances, without a bank conflict, and no warp waits for another. The tensor
cores read such blocks as they are (``BLOCKS``), a copy of them is linear, and in memory a tile is 8 KB in a row.

What is written like this is seen by copies and products after a fence. It stands behind the barrier, with those who read: it takes
as long as half of the products of a tile, for which the consumers would wait.

Arrivals that complete a phase of each barrier, with W = 4 warps:
    ds kept    full: W, each warp after its last write   empty: 1, the storer, whose copy has read the slot
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from .bwd_parts import publish
from .parts import ROWS, WARPS, arrive_warp, wait

DS_SLOTS = gl.constexpr(2)  # of each consumer, where ds is kept
_TILE_BYTES = 64 * 64 * 2

_BLOCKS = [[0, 1], [0, 2], [0, 4], [1, 0], [2, 0], [4, 0], [8, 0], [0, 8], [0, 16], [0, 32], [16, 0], [32, 0]]
# The layouts of one tile, and of two for 128 keys one after another: [keys, queries].
BLOCKS = gl.constexpr(gl.SharedLinearLayout(_BLOCKS))
BLOCKS_OF_TWO = gl.constexpr(gl.SharedLinearLayout([*_BLOCKS, [64, 0]]))


@gluon.constexpr_function
def _put_text(inputs, apart):
    ds, tile = inputs
    lines = [
        "{ .reg .b32 t, u, w<4>; mov.u32 t, %tid.x; and.b32 u, t, 96; and.b32 t, t, 31; shl.b32 t, t, 4;",
        f"mad.lo.u32 t, u, 64, t; add.u32 t, t, {tile[0]};",
    ]
    for i in range(len(ds) // 8):
        at = i % 4 * 512 + i // 4 * apart
        lines += [f"mov.b32 w{j}, {{{ds[8 * i + 2 * j]}, {ds[8 * i + 2 * j + 1]}}};" for j in range(4)]
        lines.append(f"stmatrix.sync.aligned.m8n8.x4.shared.b16 [t+{at}], {{w0, w1, w2, w3}};")
    return "\n".join(lines) + "}"


@gluon.constexpr_function
def _put_in_a_row(outputs, inputs):
    return _put_text(inputs, _TILE_BYTES)


@gluon.constexpr_function
def _put_apart(outputs, inputs):
    return _put_text(inputs, 2 * _TILE_BYTES)


@gluon.jit
def put(ds, tile, APART: gl.constexpr):
    """Write ds^T [ROWS, BLOCK_M] into the shared memory of this tile and, for each further 64 queries, of the tile after it, or of
    the second after it (APART)."""
    TEXT: gl.constexpr = _put_apart if APART else _put_in_a_row
    gl.inline_asm(TEXT, ("h", "r"), [ds, tile])


@gluon.aggregate
class DsSlots:
    """Slots of ds^T between the consumers, who fill them, and the storer: DS_SLOTS for each consumer."""

    tiles: gl.shared_memory_descriptor  # [consumers * DS_SLOTS, 1, BLOCK_M, 64]: BLOCK_M / 64 tiles
    full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor


@gluon.jit
def make_ds_slots(dtype: gl.constexpr, BLOCK_M: gl.constexpr, CONSUMERS: gl.constexpr):
    SLOTS: gl.constexpr = CONSUMERS * DS_SLOTS
    tiles = gl.allocate_shared_memory(dtype, [SLOTS, 1, BLOCK_M, ROWS], gl.NVMMASharedLayout(0, 16, 3))
    full = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(SLOTS):
        mbarrier.init(full.index(i), count=WARPS)
        mbarrier.init(empty.index(i), count=1)
    return DsSlots(tiles, full, empty)


@gluon.aggregate
class KeptDs:
    """The way of one consumer's ds^T of one head to the storer."""

    slots: DsSlots
    before: gl.tensor  # tiles that this consumer has put for earlier heads, less the number of its first tile
    C: gl.constexpr
    EARLY: gl.constexpr  # ``bwd._step`` alone asks: above the product that makes dk, rather than below it

    @gluon.jit
    def put(self, step, ds, m_block):
        """Hand over ds^T [ROWS, BLOCK_M] of one tile of queries."""
        count = self.before + m_block
        slot = self.C * DS_SLOTS + count % DS_SLOTS
        wait(self.slots.empty.index(slot), ((count // DS_SLOTS) & 1) ^ 1)
        put(ds, self.slots.tiles.index(slot), False)
        publish(self.slots.full.index(slot))


@gluon.jit
def store_all(keys, ds_desc, slots):
    """The storer: every tile of ds^T of every head of the group to memory, as soon as it is there.

    In memory they lie as [heads of the launch, tiles of keys, tiles of queries].
    """
    CONSUMERS: gl.constexpr = slots.tiles.type.shape[0] // DS_SLOTS
    batch, head_kv, start_n = keys.place()
    lo, hi = keys.tiles(start_n)
    key_tiles = (keys.seqlen_k + ROWS - 1) // ROWS
    head = (batch * keys.heads_kv + head_kv - keys.head_first) * keys.group
    for member in range(keys.group):
        for m_block in range(lo, hi):
            for c in gl.static_range(CONSUMERS):
                own_lo = lo
                own_hi = hi
                if CONSUMERS > 1:
                    own_lo, _, _, own_hi = keys.own(start_n + c * ROWS, lo, hi)
                if (m_block >= own_lo) & (m_block < own_hi):
                    count = member * (own_hi - own_lo) + m_block - own_lo
                    slot = c * DS_SLOTS + count % DS_SLOTS
                    wait(slots.full.index(slot), (count // DS_SLOTS) & 1)
                    key_tile = start_n // ROWS + c
                    if key_tile < key_tiles:
                        fence_async_shared()
                        row = (head + member) * key_tiles + key_tile
                        tma.async_store(ds_desc, [row, m_block * keys.BLOCK_M, 0], slots.tiles.index(slot))
                        tma.store_wait(0)
                    arrive_warp(slots.empty.index(slot))
