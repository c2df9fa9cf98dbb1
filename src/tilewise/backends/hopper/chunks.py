"""Tiles as rows of parts, one where a head dim is a power of two: places and rings for them, and products that take one part after
another. A tuple of one stands for a tile in one part."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma, warpgroup_mma, warpgroup_mma_wait

from .parts import ROWS, arrive_warp, wait


@gluon.constexpr_function
def swizzled(columns):
    """The layout of tiles whose rows are this many numbers of two bytes."""
    return gl.NVMMASharedLayout(min(128, 2 * columns), 16, 2)


@gluon.aggregate
class Tiles:
    """Places for tiles in shared memory. A tile is a row of parts: WIDE of them, and a narrow one beside them if NARROW.

    192 columns are 128 and 64, 96 are three times 32. Copies move boxes of COLUMNS, of which a part may have two. Few wide parts
    are better: a product from registers copies its left operand for every part but the first.
    """

    wide: gl.shared_memory_descriptor  # [places * WIDE, rows, columns]
    narrow: gl.shared_memory_descriptor  # [places, rows, COLUMNS]; NARROW
    WIDE: gl.constexpr
    NARROW: gl.constexpr
    COLUMNS: gl.constexpr
    BOXES: gl.constexpr  # of a tile

    @gluon.jit
    def parts(self, place):
        """A tuple of the parts of the tile at this place."""
        parts = ()
        for i in gl.static_range(self.WIDE):
            parts = parts + (self.wide.index(place * self.WIDE + i),)
        if self.NARROW:
            parts = parts + (self.narrow.index(place),)
        return parts

    @gluon.jit
    def boxes(self, place):
        """A tuple of the boxes of the tile at this place."""
        ROWS_A_TILE: gl.constexpr = self.wide.type.shape[1]
        WIDTH: gl.constexpr = self.wide.type.shape[2]
        boxes = ()
        for i in gl.static_range(self.WIDE):
            part = self.wide.index(place * self.WIDE + i)
            if WIDTH == self.COLUMNS:
                boxes = boxes + (part,)
            else:
                halves = part.reinterpret(part.dtype, [WIDTH // self.COLUMNS, ROWS_A_TILE, self.COLUMNS], swizzled(self.COLUMNS))
                for j in gl.static_range(WIDTH // self.COLUMNS):
                    boxes = boxes + (halves.index(j),)
        if self.NARROW:
            boxes = boxes + (self.narrow.index(place),)
        return boxes

    @gluon.jit
    def load(self, desc, batch, head, row, place, full):
        """Start the copies of the tile whose first row this is."""
        boxes = self.boxes(place)
        for c in gl.static_range(len(boxes)):
            box = boxes[c].reshape([1, 1, boxes[c].type.shape[0], self.COLUMNS])
            tma.async_load(desc, [batch, head, row, c * self.COLUMNS], full, box)

    @gluon.jit
    def load_all(self, desc, batch, head, row, full):
        """Fill all places with the rows from this one on."""
        PLACES: gl.constexpr = self.wide.type.shape[0] // self.WIDE
        mbarrier.expect(full, PLACES * self.BOXES * desc.block_type.nbytes)
        for place in gl.static_range(PLACES):
            self.load(desc, batch, head, row + place * self.wide.type.shape[1], place, full)

    @gluon.jit
    def write(self, parts, scale, desc, batch, head, row, place):
        """Start the copies of ``parts * scale``, ROWS high, to memory, through a place that nobody reads any more."""
        here = self.parts(place)
        for c in gl.static_range(len(parts)):
            part = here[c].slice(0, ROWS, dim=0) if here[c].type.shape[0] > ROWS else here[c]
            part.store((parts[c] * scale).to(desc.dtype))
        fence_async_shared()
        boxes = self.boxes(place)
        for c in gl.static_range(len(boxes)):
            box = boxes[c].reinterpret(desc.dtype, [1, 1, ROWS, self.COLUMNS], desc.layout)
            tma.async_store(desc, [batch, head, row, c * self.COLUMNS], box)


@gluon.aggregate
class Rows:
    """ROWS of a tile in one part that stays. Each product finds them again: addresses, once known, would be kept in registers."""

    tiles: gl.shared_memory_descriptor  # [tiles, rows, columns]
    START: gl.constexpr  # of the rows of all tiles

    @gluon.jit
    def parts(self):
        """A tuple of one: the rows."""
        A_TILE: gl.constexpr = self.tiles.type.shape[1]
        opaque = gl.inline_asm("mov.u32 $0, 0;", "=r,~{memory}", [], gl.int32)
        return (self.tiles.index(opaque + self.START // A_TILE).slice(self.START % A_TILE, ROWS, dim=0),)


@gluon.jit
def make_tiles(desc, SIZE: gl.constexpr, ROWS_A_TILE: gl.constexpr, PLACES: gl.constexpr):
    """PLACES for tiles of SIZE columns, which come through this descriptor."""
    COLUMNS: gl.constexpr = desc.block_type.shape[-1]
    NARROW: gl.constexpr = SIZE == 192
    WIDTH: gl.constexpr = 128 if NARROW else COLUMNS
    WIDE: gl.constexpr = SIZE // WIDTH
    wide = gl.allocate_shared_memory(desc.dtype, [PLACES * WIDE, ROWS_A_TILE, WIDTH], swizzled(WIDTH))
    if NARROW:
        narrow = gl.allocate_shared_memory(desc.dtype, [PLACES, ROWS_A_TILE, COLUMNS], swizzled(COLUMNS))
    else:
        narrow = wide
    return Tiles(wide, narrow, WIDE, NARROW, COLUMNS, SIZE // COLUMNS)


@gluon.aggregate
class PartRing:
    """Slots of shared memory: a tile in parts, and a number for each row if there is ``rows``."""

    tiles: Tiles
    rows: object  # [SLOTS, 1, rows]
    full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor
    SLOTS: gl.constexpr

    @gluon.jit
    def parts(self, step):
        """A tuple of the parts of the tile of this step."""
        return self.tiles.parts(step % self.SLOTS)

    @gluon.jit
    def arrived(self, step):
        """Wait until the tile of this step is there."""
        wait(self.full.index(step % self.SLOTS), (step // self.SLOTS) & 1)

    @gluon.jit
    def take(self, step):
        self.arrived(step)
        return self.parts(step)

    @gluon.jit
    def release(self, step):
        """Each warp says that it has read the tile of this step for the last time."""
        arrive_warp(self.empty.index(step % self.SLOTS))

    @gluon.jit
    def fill(self, desc, batch, head, row, step, rows_desc=None, rows_head=None):
        """Copy the tile whose first row this is, once the slot is empty, and the numbers of its rows, which are those of
        ``rows_head``."""
        slot = step % self.SLOTS
        wait(self.empty.index(slot), ((step // self.SLOTS) & 1) ^ 1)
        full = self.full.index(slot)
        BYTES: gl.constexpr = self.tiles.BOXES * desc.block_type.nbytes
        if rows_desc is None:
            mbarrier.expect(full, BYTES)
        else:
            mbarrier.expect(full, BYTES + rows_desc.block_type.nbytes)
        self.tiles.load(desc, batch, head, row, slot, full)
        if rows_desc is not None:
            tma.async_load(rows_desc, [rows_head, row], full, self.rows.index(slot))


@gluon.jit
def make_part_ring(
    desc, ROWS_A_TILE: gl.constexpr, SIZE: gl.constexpr, SLOTS: gl.constexpr, RELEASES: gl.constexpr, HAS_ROWS: gl.constexpr
):
    """A ring of tiles [ROWS_A_TILE, SIZE] whose slots are empty again after RELEASES arrivals."""
    tiles = make_tiles(desc, SIZE, ROWS_A_TILE, SLOTS)
    rows = None
    if HAS_ROWS:
        rows = gl.allocate_shared_memory(gl.float32, [SLOTS, 1, ROWS_A_TILE], gl.NVMMASharedLayout(0, 32, 2))
    full = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(SLOTS):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=RELEASES)
    return PartRing(tiles, rows, full, empty, SLOTS)


@gluon.jit
def pass_over(count, step, first, second):
    """Let ``count`` tiles of both rings go by that this consumer does not need: the producer waits for every consumer."""
    for _ in range(count):
        first.take(step)
        first.release(step)
        second.take(step)
        second.release(step)
        step += 1
    return step


@gluon.constexpr_function
def accumulator(columns):
    return gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, columns, 16])


@gluon.jit
def zeros_like(parts):
    """An accumulator [ROWS, columns] for each of these parts, which are 0."""
    out = ()
    for c in gl.static_range(len(parts)):
        out = out + (gl.zeros([ROWS, parts[c].type.shape[1]], gl.float32, accumulator(parts[c].type.shape[1])),)
    return out


@gluon.jit
def operand(x, acc):
    """x as the left operand of a product into this accumulator."""
    return gl.convert_layout(x, gl.DotOperandLayout(0, acc[0].type.layout, 2))


@gluon.jit
def inner(a, b, acc, FRESH: gl.constexpr):
    """Issue acc + a b^T for tuples of chunks, without waiting for it. FRESH: acc is 0."""
    for c in gl.static_range(len(a)):
        acc = warpgroup_mma(a[c], b[c].permute((1, 0)), acc, use_acc=not (FRESH and c == 0), is_async=True)
    return acc


@gluon.jit
def outer(a, b, acc):
    """Issue acc + a b, a part for each chunk of b, without waiting for it."""
    out = ()
    for c in gl.static_range(len(b)):
        out = out + (warpgroup_mma(a, b[c], acc[c], is_async=True),)
    return out


@gluon.jit
def settled(pending: gl.constexpr, left, acc):
    """``(left, acc)`` once all but the last ``pending`` products are made; left, their operand, is kept until then."""
    done = warpgroup_mma_wait(pending, deps=(left,) + acc)
    return done[0], done[1:]


@gluon.jit
def made(pending: gl.constexpr, acc):
    """``acc`` once all but the last ``pending`` products are made."""
    done = warpgroup_mma_wait(pending, deps=acc)
    if len(acc) == 1:
        return (done,)
    else:
        return done
