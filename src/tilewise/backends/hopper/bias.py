"""An additive bias in Hopper kernels: tiles of it beside the slots of a ring, natural scores, their softmax.

A tile of the bias is copied in bulk with the tile of keys (or of queries) that it belongs to, under the same barriers: 64 rows (or
columns) for each consumer. It is read while the product of the scores runs, in the layout of the scores, and is added to them with
their scale in one instruction.

Scores are natural here, not in base two: times log2(e) the lowest finite value would be -inf, and a row of it an empty one. The
weights of a row are ``exp2(s unit - pivot)``; what was rounded off the pivot is made good in lse and the sums of rows alone, since
it cancels in o.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from .parts import ROWS, order, partial_sums, wait

LOG2_E = gl.constexpr(1.4426950408889634)
# The reference of a row follows its largest score only when that has grown by more than this: p stays below 2^8.
GROWTH = gl.constexpr(5.5)
# A reference beyond this is not multiplied by log2(e): scores there are multiples of 8 from one another. Below it, what is rounded
# off the product is at most 8, so that no weight overflows, not in float16 either.
FAR = gl.constexpr(134217728.0)


@gluon.aggregate
class Bias:
    """The tiles of a bias in shared memory, and where a head finds its own: [SLOTS * CONSUMERS, rows, columns]."""

    tiles: gl.shared_memory_descriptor
    heads: gl.tensor  # of the launch, for each sequence
    batches: gl.tensor
    SLOTS: gl.constexpr
    CONSUMERS: gl.constexpr
    BY_BATCH: gl.constexpr  # every sequence has a bias of its own
    BY_HEAD: gl.constexpr
    KEEPS_ROWS: gl.constexpr  # forward: what the backward pass must know of a row is written

    @gluon.jit
    def place(self, index, tiles, heads_together, LONGEST: gl.constexpr):
        """``(batch, head, tile)`` of program ``index``: what shares a tile of the bias is worked on together."""
        FROM: gl.constexpr = "first" if LONGEST == "any" else LONGEST
        head_index, tile = order(index, tiles, self.heads * self.batches, heads_together, FROM)
        if self.BY_BATCH:
            batch = head_index // self.heads
            head = head_index - batch * self.heads
        else:
            head = head_index // self.batches
            batch = head_index - head * self.batches
        return batch, head, tile

    @gluon.jit
    def copy(self, desc, full, batch, head, row, column, step, DOWN: gl.constexpr):
        """Start the copies of the tiles of one step, whose bytes ``full`` expects: one below the other, or side by side."""
        for c in gl.static_range(self.CONSUMERS):
            tile = self.tiles.index(step % self.SLOTS * self.CONSUMERS + c)
            box = tile.reshape([1, 1, tile.type.shape[0], tile.type.shape[1]])
            at = [batch * self.BY_BATCH, head * self.BY_HEAD, row + c * ROWS * DOWN, column + c * ROWS * (1 - DOWN)]
            tma.async_load(desc, at, full, box)

    @gluon.jit
    def tile(self, step, C: gl.constexpr):
        """Of consumer ``C`` in this step."""
        return self.tiles.index(step % self.SLOTS * self.CONSUMERS + C)


@gluon.jit
def make_bias(
    desc, heads, batches, SLOTS: gl.constexpr, CONSUMERS: gl.constexpr, BY_BATCH: gl.constexpr, BY_HEAD: gl.constexpr,
    KEEPS_ROWS: gl.constexpr = False,
):  # fmt: skip
    ROWS_A_TILE: gl.constexpr = desc.block_type.shape[2]
    COLUMNS: gl.constexpr = desc.block_type.shape[3]
    LAYOUT: gl.constexpr = gl.NVMMASharedLayout(128 if COLUMNS >= 64 else 64, 16, 2)
    tiles = gl.allocate_shared_memory(desc.dtype, [SLOTS * CONSUMERS, ROWS_A_TILE, COLUMNS], LAYOUT)
    return Bias(tiles, heads, batches, SLOTS, CONSUMERS, BY_BATCH, BY_HEAD, KEEPS_ROWS)


@gluon.jit
def fill_keys(ring, desc, bias, bias_desc, batch, head, head_kv, row, start_n, step):
    """Producer: a tile of keys, and the tiles of the bias of these keys and the queries from ``row`` on."""
    slot = step % ring.SLOTS
    wait(ring.empty.index(slot), ((step // ring.SLOTS) & 1) ^ 1)
    full = ring.full.index(slot)
    mbarrier.expect(full, desc.block_type.nbytes + bias.CONSUMERS * bias_desc.block_type.nbytes)
    tile = ring.tiles.index(slot)
    tma.async_load(desc, [batch, head_kv, start_n, 0], full, tile.reshape([1, 1, tile.type.shape[0], tile.type.shape[1]]))
    bias.copy(bias_desc, full, batch, head, row, start_n, step, True)


@gluon.jit
def biased(s, b, sm_scale):
    """Natural scores of products s and a tile b of the bias."""
    return gl.fma(s, gl.zeros_like(s) + sm_scale, b.to(gl.float32))


@gluon.jit
def unit_and_pivot(m):
    """What the weights of rows with the reference m are made with: ``exp2(s unit - pivot)``."""
    unit = gl.where(gl.abs(m) < FAR, LOG2_E, 1.0)
    return unit, gl.where(m == -float("inf"), 0.0, m * unit)


@gluon.jit
def natural_step(s, m_i, l_i, FIRST: gl.constexpr):
    """``parts.softmax_step`` of natural scores: ``(p, alpha, m_new, l_new)``."""
    m_new = gl.max(s, 1)
    if not FIRST:
        m_new = gl.where(m_new - m_i > GROWTH, m_new, m_i)
    unit, pivot = unit_and_pivot(m_new)
    zeros = gl.zeros_like(s)
    p = gl.exp2(gl.fma(s, zeros + unit[:, None], zeros - pivot[:, None]))
    if FIRST:
        return p, pivot, m_new, partial_sums(p)
    else:
        # Rounded as the pivot was, so that the same reference gives 1.
        alpha = gl.where(m_new == m_i, 1.0, gl.exp2(gl.where(m_i == -float("inf"), m_i, m_i * unit) - pivot))
        factor = gl.convert_layout(alpha, gl.SliceLayout(1, l_i.type.layout), assert_trivial=False)
        return p, alpha, m_new, l_i * factor[:, None] + partial_sums(p)


@gluon.jit
def log_sum(m_i, l_row):
    """log2 of the sum of ``exp(s - m_i)`` of rows; 0 for one that saw no key."""
    unit, pivot = unit_and_pivot(m_i)
    rounded_off = gl.fma(m_i, unit, -pivot)
    return gl.where(l_row == 0.0, 0.0, gl.log2(gl.where(l_row == 0.0, 1.0, l_row)) - rounded_off)


@gluon.jit
def biased_weights(s, b, m, log_l, sm_scale):
    """Backward: ``p`` of products s, from the reference of each row and log2 of the sum over it, shaped to broadcast."""
    return gl.exp2((biased(s, b, sm_scale) - m) * LOG2_E - log_l)
