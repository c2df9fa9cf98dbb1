"""The named parts that the Hopper kernels are made of: rings of tiles, the order of work, mask, online-softmax step.

A program is several consumers (one warpgroup of 4 warps and 64 query rows each) and one producer (one warp, which issues bulk
copies). They meet at mbarriers only. A ``Ring`` is some slots of shared memory with a "full" and an "empty" barrier each:

    producer, step i:  wait until slot i % SLOTS is empty; expect the bytes; copy   (full completes when the bytes are there)
    consumer, step i:  wait until slot i % SLOTS is full; use it; release it        (empty completes when everybody released)

Both sides count steps on their own; the parity of ``i // SLOTS`` tells one pass over the slots from the next. The producer waits
for the opposite parity, which a fresh barrier grants at once.
"""

import types

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from ... import bodies
from .. import walk
from .hasty import leaning, paired


def _shared(body):
    """A shared body as a Gluon function. Gluon wants to see its own language among the globals of what it compiles."""
    here = types.FunctionType(body.__code__, globals(), body.__name__)
    here.__annotations__ = body.__annotations__
    return gluon.jit(here)


allowed = _shared(bodies.allowed)
tile_range = _shared(bodies.tile_range)
order = _shared(walk.order)
tiles_of_program = _shared(walk.tiles_of_program)
tiles_of_consumer = _shared(walk.tiles_of_consumer)

LN_2 = gl.constexpr(0.6931471805599453)
ROWS = gl.constexpr(64)  # of queries a consumer: the height of one warpgroup product
WARPS = gl.constexpr(4)  # a consumer
# The reference of the softmax follows the running maximum only when that has grown by more than this (base two): p stays below 2^8.
GROWTH = gl.constexpr(8.0)
SAFE_SUM = "0f47800000"  # 2^16, as PTX writes it: the careful form's row sums may be as large
LARGEST_SUM = "0f71800000"  # 2^100
LEAST_SUM = "0f2F800000"  # 2^-32: where the reference is that of two rows, one of them may have a small sum
TICKETS = gl.constexpr(4)  # slots for the numbers of the next tiles; more than any ring of query tiles has


@gluon.jit
def wait(barrier, phase):
    """Wait until the phase of this parity is complete. ``mbarrier.wait`` would synchronise the whole warpgroup first."""
    gl.inline_asm(
        "{ .reg .pred p; AGAIN: mbarrier.try_wait.parity.shared::cta.b64 p, [$0], $1; @!p bra.uni AGAIN; }",
        "r,r,~{memory}",
        [barrier, phase],
    )


@gluon.constexpr_function
def for_workers(CONSUMERS, CONSUMER, HELPER, HELPERS=1):
    """A number for each partition but the first, which is a consumer: the other consumers, and who feeds them or stores."""
    return [CONSUMER] * (CONSUMERS - 1) + [HELPER] * HELPERS


@gluon.jit
def arrive_warp(barrier):
    """One arrival from each warp, without a synchronisation of the warpgroup: the barrier counts WARPS for a consumer."""
    gl.inline_asm(
        "{ .reg .pred p; elect.sync _|p, 0xffffffff; @p mbarrier.arrive.shared::cta.b64 _, [$0]; }", "r,~{memory}", [barrier]
    )


@gluon.aggregate
class Ring:
    """Slots of shared memory between the producer and the consumers.

    A slot is a tile [rows, HEAD_DIM], or, where HEAD_DIM is no power of two, CHUNKS tiles of some columns each, one after another.
    """

    tiles: gl.shared_memory_descriptor  # [SLOTS * CHUNKS, rows, columns]
    full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor
    SLOTS: gl.constexpr
    CHUNKS: gl.constexpr

    @gluon.jit
    def fill(self, desc, batch, head, row, step, PACK: gl.constexpr = 1):
        """Producer: copy the rows from ``row`` on of one head. Rows past the end read as zeros, and count as bytes.

        PACK above 1: the descriptor is of [batch, heads_kv, seqlen_q, PACK, columns], see ``Work``.
        """
        slot = step % self.SLOTS
        mbarrier.wait(self.empty.index(slot), ((step // self.SLOTS) & 1) ^ 1)
        mbarrier.expect(self.full.index(slot), self.CHUNKS * desc.block_type.nbytes)
        for c in gl.static_range(self.CHUNKS):
            tile = self.tiles.index(slot * self.CHUNKS + c)
            column = c * tile.type.shape[1]
            if PACK == 1:
                box = tile.reshape([1, 1, tile.type.shape[0], tile.type.shape[1]])
                tma.async_load(desc, [batch, head, row, column], self.full.index(slot), box)
            else:
                box = tile.reshape([1, 1, tile.type.shape[0] // PACK, PACK, tile.type.shape[1]])
                tma.async_load(desc, [batch, head, row // PACK, 0, column], self.full.index(slot), box)

    @gluon.jit
    def take(self, step):
        """Consumer: the tile of this step (the first of its chunks), once it is there."""
        slot = step % self.SLOTS
        wait(self.full.index(slot), (step // self.SLOTS) & 1)
        return self.tiles.index(slot * self.CHUNKS)

    @gluon.jit
    def take_chunks(self, step):
        """Consumer: a tuple of the chunks of the tile of this step, once they are there."""
        chunks = (self.take(step),)
        for c in gl.static_range(1, self.CHUNKS):
            chunks = chunks + (self.tiles.index(step % self.SLOTS * self.CHUNKS + c),)
        return chunks

    @gluon.jit
    def release(self, step):
        """Consumer: each warp says that it has read the tile of this step for the last time."""
        arrive_warp(self.empty.index(step % self.SLOTS))

    @gluon.jit
    def give_back(self, step):
        """Consumer: the whole warpgroup, at once, says so."""
        mbarrier.arrive(self.empty.index(step % self.SLOTS), count=1)


@gluon.jit
def make_ring(desc, ROWS_A_TILE: gl.constexpr, HEAD_DIM: gl.constexpr, SLOTS: gl.constexpr, RELEASES: gl.constexpr):
    """A ring whose slots are empty again after RELEASES arrivals. The descriptor's blocks are as wide as a chunk."""
    COLUMNS: gl.constexpr = desc.block_type.shape[-1]
    CHUNKS: gl.constexpr = HEAD_DIM // COLUMNS
    LAYOUT: gl.constexpr = gl.NVMMASharedLayout(128 if COLUMNS >= 64 else 64, 16, 2)
    tiles = gl.allocate_shared_memory(desc.dtype, [SLOTS * CHUNKS, ROWS_A_TILE, COLUMNS], LAYOUT)
    full = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(SLOTS):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=RELEASES)
    return Ring(tiles, full, empty, SLOTS, CHUNKS)


@gluon.constexpr_function
def _take_text(REDO):
    return (
        "{ .reg .pred p, last; .reg .u32 lane, t, g;"
        "mov.u32 lane, %laneid; setp.eq.u32 p, lane, 0; mov.u32 t, 0; mov.u32 g, %nctaid.x;"
        "@p atom.global.relaxed.gpu.add.u32 t, [$1], 1;"
        "setp.eq.and.u32 last, t, $2, p; @last st.global.relaxed.gpu.u32 [$1], 0; add.u32 t, t, g;"
        + ("@last st.global.relaxed.gpu.u32 [$1 + 4], 0;" if REDO else "")
        + "@p st.shared.u32 [$3], t; @p mbarrier.arrive.shared::cta.b64 _, [$4];"
        "shfl.sync.idx.b32 $0, t, 0, 31, 0xffffffff; }"
    )


@gluon.constexpr_function
def _doubt(inputs, least):
    o, l_row, (counter,) = inputs
    text = "{ .reg .pred p; .reg .f32 x;\n"
    for row in range(2):  # a thread holds two rows of o, and elements in pairs
        own = [e for n, e in enumerate(o) if (n >> 1) & 1 == row]
        enough = f"setp.ge.and.f32 p, {l_row[row]}, {least}, p; " if least else ""
        text += f"setp.lt.f32 p, {l_row[row]}, {SAFE_SUM}; {enough}@p bra FINE{row}; mov.f32 x, 0f00000000;\n"
        text += "\n".join(f"fma.rn.f32 x, {e}, 0f00000000, x;" for e in own)  # NaN if one of them is not finite
        text += f"\nsetp.num.f32 p, x, x; setp.lt.and.f32 p, {l_row[row]}, {LARGEST_SUM}, p; {enough}"
        text += f"@!p st.global.relaxed.gpu.u32 [{counter} + 4], 1;\nFINE{row}:\n"
    return text + "}"


@gluon.constexpr_function
def _doubt_text(outputs, inputs):
    return _doubt(inputs, None)


@gluon.constexpr_function
def _lean_doubt_text(outputs, inputs):
    return _doubt(inputs, LEAST_SUM)


@gluon.aggregate
class Work:
    """What a launch has to do, as each partition sees it: tiles of queries, numbered from 0, and the keys that each needs.

    PACK query heads that share a key head are worked on as one with PACK times as many rows: row r is query r // PACK of the
    r % PACK-th of them. Then ``heads_q`` counts key heads and ``seqlen_q`` those rows.
    """

    counter: gl.tensor  # int32, two words that are 0 between calls: tiles taken by programs beyond their first, and the flag
    m_blocks: gl.tensor
    heads_total: gl.tensor
    heads_together: gl.tensor
    heads_q: gl.tensor
    seqlen_q: gl.tensor
    seqlen_k: gl.tensor
    q_start: gl.tensor
    upper: gl.tensor
    lower: gl.tensor
    ticket: gl.shared_memory_descriptor
    issued: gl.shared_memory_descriptor
    BLOCK_M: gl.constexpr
    BLOCK_N: gl.constexpr
    HEAD_DIM: gl.constexpr
    CONSUMERS: gl.constexpr
    HAS_UPPER: gl.constexpr
    HAS_LOWER: gl.constexpr
    MASKED: gl.constexpr  # some tile may need a mask
    SCALED_FIRST: gl.constexpr  # the scale is applied before the maximum is taken
    OVERLAP: gl.constexpr  # scores of the next key tile above the product of the last one
    LONGEST: gl.constexpr
    DYNAMIC: gl.constexpr
    HASTY: gl.constexpr  # the first tile's maximum stays the reference; a row that this does not suit raises the flag
    REDO: gl.constexpr  # the careful launch behind a hasty one, which works only if the flag is up, and puts it down
    PACK: gl.constexpr
    terms: object  # of the spec besides bounds: ``terms.py``
    table_batch: object  # LISTED: ``BlockTable.steps``
    table_head: object
    table_width: object
    STEPS: object
    RAMP: gl.constexpr
    HAS_SINK: gl.constexpr
    LISTED: gl.constexpr  # a list says which tiles of keys a tile of queries visits: places in it stand for tiles
    FIXED: gl.constexpr  # HASTY: the reference is 0 from the start
    FAST: gl.constexpr  # ``terms.capped_with_slope``
    LEAN: gl.constexpr  # ``hasty.leaning``

    @gluon.jit
    def total(self):
        return self.m_blocks * self.heads_total

    @gluon.jit
    def locate(self, index):
        """``(batch, head, first row, lo, hi)`` of tile ``index``; its keys are the tiles ``hi - 1`` down to ``lo``."""
        head_index, m_block = order(index, self.m_blocks, self.heads_total, self.heads_together, self.LONGEST)
        batch = head_index // self.heads_q
        start_m = m_block * self.BLOCK_M
        if self.LISTED:
            head = head_index - batch * self.heads_q
            free, count = self.listed(batch, head, start_m)
            return batch, head, start_m, free * 0, count
        row_end = min(start_m + self.BLOCK_M, self.seqlen_q)
        lo, hi = tiles_of_program(
            self.q_start + start_m // self.PACK, self.q_start + (row_end - 1) // self.PACK + 1,
            self.seqlen_k, self.upper, self.lower, self.BLOCK_N, self.HAS_UPPER, self.HAS_LOWER,
        )  # fmt: skip
        return batch, head_index - batch * self.heads_q, start_m, lo, hi

    @gluon.jit
    def list_of(self, batch, head, row):
        """LISTED: the number of the list of the tile of queries that holds this row."""
        return (batch * self.table_batch + head * self.table_head + row // self.BLOCK_M).to(gl.int64)

    @gluon.jit
    def listed(self, batch, head, row):
        """LISTED: how many tiles are free, and how many are visited: at least one, which the mask hides if need be."""
        counts = self.terms[4][0] + self.list_of(batch, head, row) * 2
        free = gl.load(counts)
        return free, max(free + gl.load(counts + 1), 1)

    @gluon.jit
    def tile(self, own, place):
        """The tile of keys at this place."""
        if self.LISTED:
            return gl.load(own.tiles + place)
        else:
            return place

    @gluon.jit
    def own(self, batch, head, start_row, lo, hi):
        """``(own_lo, free_lo, free_hi, own_hi)`` of the consumer whose rows begin at ``start_row``."""
        if self.LISTED:
            return lo, lo, self.listed(batch, head, start_row)[0], hi
        row_end = min(start_row + ROWS, self.seqlen_q)
        return tiles_of_consumer(
            self.q_start + start_row // self.PACK, self.q_start + (row_end - 1) // self.PACK + 1, lo, hi,
            self.seqlen_k, self.upper, self.lower, self.BLOCK_N, self.HAS_UPPER, self.HAS_LOWER,
        )  # fmt: skip

    @gluon.jit
    def issue(self, turn):
        """Producer, DYNAMIC: lane 0 takes the next tile from the counter and publishes it to the consumers.

        A tile is taken once for each that is worked on, so the launch takes ``total()`` of them, and whoever takes the last puts
        the counter (REDO: and the flag) back to 0 for the next launch: nobody reads it after that.
        Nobody releases a ticket: its slot comes round after all have read it, since a ring of queries is shorter than TICKETS.
        """
        slot = turn % TICKETS
        inputs = [self.counter, self.total() - 1, self.ticket.index(slot), self.issued.index(slot)]
        return gl.inline_asm(_take_text(self.REDO), "=r,l,r,r,r,~{memory}", inputs, gl.int32)

    @gluon.jit
    def following(self, turn):
        """Consumer, DYNAMIC: the tile after this program's tile number ``turn``."""
        slot = turn % TICKETS
        wait(self.issued.index(slot), (turn // TICKETS) & 1)
        return gl.inline_asm("ld.shared.u32 $0, [$1];", "=r,r,~{memory}", [self.ticket.index(slot)], gl.int32)

    @gluon.jit
    def doubt(self, o, l_row, start_row):
        """HASTY: raise the flag if a row of the o [ROWS, HEAD_DIM] that is to be written may be wrong. l_row: its row sums.

        Nothing is lost below 2^100: p and l have float32's exponents (p is bfloat16), and the reference cancels. But acc may then
        leave them where small sums would not, so beyond SAFE_SUM o must be finite too. A row that saw no key in its first tile
        has the reference -inf and so a sum of inf or NaN by the next. Rows past the end are not written and not asked.
        """
        row = start_row + gl.arange(0, ROWS, gl.SliceLayout(1, o.type.layout))
        l_row = gl.convert_layout(l_row, gl.SliceLayout(1, o.type.layout))
        l_row = gl.where(row < self.seqlen_q, l_row, 1.0 if self.LEAN else 0.0)
        gl.inline_asm(_lean_doubt_text if self.LEAN else _doubt_text, ("f", "f", "l"), [o, l_row, self.counter])


@gluon.jit
def partial_sums(p):
    """Row sums [ROWS, 4] of p [ROWS, BLOCK_N], within each thread; the four threads of a row are added at the end of the tile."""
    x = p.reshape([p.shape[0], p.shape[1] // 8, 4, 2])
    return gl.sum(gl.sum(x, 3), 1)


@gluon.jit
def _shifts(y, shift):
    """What the groups of columns of y [ROWS, groups, ...] share, shaped to broadcast."""
    L: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(2, gl.SliceLayout(3, gl.SliceLayout(4, y.type.layout))))
    group = gl.arange(0, y.shape[1], L).to(gl.float32)
    return (shift[0] + shift[1] * group)[None, :, None, None, None]


@gluon.jit
def largest(s, qk_scale2, shift):
    """The largest scaled and shifted score of each row."""
    if shift is None:
        return gl.max(s, 1) * qk_scale2
    else:
        y = s.reshape([s.shape[0], s.shape[1] // 32, 4, 4, 2])
        y = gl.max(gl.max(y, 4, keep_dims=True), 2, keep_dims=True) * qk_scale2 + _shifts(y, shift)
        m = gl.max(gl.max(gl.max(gl.max(y, 4), 1), 1), 1)
        return gl.convert_layout(m, gl.SliceLayout(1, s.type.layout))


@gluon.jit
def measured(s, pivot, qk_scale2, shift):
    """The scaled and shifted scores, from the pivot of their row."""
    if shift is None:
        return s * qk_scale2 - pivot[:, None]
    else:
        y = s.reshape([s.shape[0], s.shape[1] // 32, 4, 4, 2])
        L: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(3, gl.SliceLayout(4, y.type.layout))))
        base = gl.convert_layout(pivot, L)[:, None, None, None, None] - _shifts(y, shift)
        return gl.convert_layout((y * qk_scale2 - base).reshape([s.shape[0], s.shape[1]]), s.type.layout, assert_trivial=True)


@gluon.jit
def weights(s, pivot, qk_scale2, shift, LEAN: gl.constexpr):
    """exp2 of the scaled and shifted scores, from the pivot of their row."""
    if LEAN:
        return gl.exp2(leaning(s, pivot, qk_scale2, shift))
    else:
        return gl.exp2(measured(s, pivot, qk_scale2, shift))


@gluon.jit
def softmax_step(
    s, m_i, l_i, qk_scale2, shift, FIRST: gl.constexpr, HASTY: gl.constexpr, WEIGHTS: gl.constexpr, LEAN: gl.constexpr
):
    """One online-softmax step: ``(p, alpha, m_new, l_new)`` for scores that are masked already; FIRST has no m_i and l_i to go on.

    m_i is a reference in base two: what was the running maximum once, and is at most GROWTH below it now. It cancels in acc / l_i
    and in m_i + log2(l_i); keeping it saves nearly every rescaling. A row that has seen no key yet has m_i = -inf and the pivot 0,
    so that no -inf - -inf arises. HASTY keeps the first reference for good, whatever comes (``Work.doubt``), and needs no alpha.
    WEIGHTS: s is p already; FIRST, the reference is 0 then. ``shift``: see ``terms.scored``; LEAN: see ``leaning``.
    """
    if HASTY and WEIGHTS:
        if FIRST:
            m_i = gl.zeros([s.shape[0]], gl.float32, gl.SliceLayout(1, s.type.layout))
            return s, m_i, m_i, partial_sums(s)
        else:
            return s, m_i, m_i, l_i + partial_sums(s)
    if HASTY and not FIRST:
        p = weights(s, m_i, qk_scale2, shift, LEAN)
        return p, m_i, m_i, l_i + partial_sums(p)
    if LEAN:
        none = gl.zeros([s.shape[0]], gl.float32, gl.SliceLayout(1, s.type.layout))
        m_new = paired(gl.max(leaning(s, none, qk_scale2, shift), 1))
    else:
        m_new = largest(s, qk_scale2, shift)
    if not FIRST:
        m_new = gl.where(m_new - m_i > GROWTH, m_new, m_i)
    pivot = gl.where(m_new == -float("inf"), 0.0, m_new)
    p = weights(s, pivot, qk_scale2, shift, LEAN)
    if FIRST:
        return p, pivot, m_new, partial_sums(p)
    else:
        alpha = gl.exp2(m_i - pivot)
        factor = gl.convert_layout(alpha, gl.SliceLayout(1, l_i.type.layout), assert_trivial=False)
        return p, alpha, m_new, l_i * factor[:, None] + partial_sums(p)


@gluon.constexpr_function
def _rescale_text(outputs, inputs):
    (acc,) = outputs
    old, factor = inputs
    # A thread holds two rows of the accumulator, and elements in pairs: two of the first row, two of the second.
    return (
        f"{{ .reg .pred p; setp.neu.f32 p, {factor[0]}, 0f3F800000; setp.neu.or.f32 p, {factor[1]}, 0f3F800000, p;"
        "vote.sync.any.pred p, p, 0xffffffff;\n"
        + "\n".join(f"mov.f32 {x}, {y};" for x, y in zip(acc, old, strict=True))
        + "\n@!p bra DONE;\n"
        + "\n".join(f"mul.ftz.f32 {x}, {x}, {factor[(n >> 1) & 1]};" for n, x in enumerate(acc))
        + "\nDONE: }"
    )


@gluon.jit
def rescale(acc, alpha):
    """acc * alpha[:, None]; a warp all of whose factors are 1 branches around it, which is nearly every time."""
    factor = gl.convert_layout(alpha, gl.SliceLayout(1, acc.type.layout))
    return gl.inline_asm(_rescale_text, ("=&f", "f", "f"), [acc, factor], acc.type)
