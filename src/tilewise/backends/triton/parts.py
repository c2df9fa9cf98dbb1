"""The named parts that the Triton kernels are made of: schedule, loads, mask, online-softmax step, stores.

``BULK`` says how tiles travel. True: the arguments are tensor descriptors and a copy engine moves whole tiles (sm_90 and newer);
rows past the end of the tensor read as zero and are not written. False: the arguments are pointers with strides, and masks do the
same. Zero is not -inf: a key past the end would score 0, so every tile that reaches past the end goes through ``allowed``.

``WIDEN`` is True only for bfloat16 in Triton's interpreter, whose own bfloat16 arithmetic is wrong: tiles are widened to float32 as
they are loaded, and rounded by hand where the kernel on a GPU would round.
"""

import types

import triton
import triton.language as tl

from ... import bodies


def _shared(body):
    """A shared body as a Triton function. Triton wants to see its own language among the globals of what it compiles."""
    here = types.FunctionType(body.__code__, globals(), body.__name__)
    here.__annotations__ = body.__annotations__
    return triton.jit(here)


allowed = _shared(bodies.allowed)
in_row = _shared(bodies.in_row)
same_segment = _shared(bodies.same_segment)
tile_range = _shared(bodies.tile_range)

# Kernel arguments that never enter a compile key, so that one kernel serves every length, every window and every number of heads.
# seqlen_q does enter, as "a multiple of 16 or not": rows of lse and delta that are known to be aligned load four at a time.
LENGTHS = (
    *("heads_q", "heads_kv", "seqlen_k", "q_start", "upper", "lower", "m_blocks", "n_blocks"),
    *("table_batch", "table_head", "table_width"),
)
LOG2_E: tl.constexpr = tl.constexpr(1.4426950408889634)
LN_2: tl.constexpr = tl.constexpr(0.6931471805599453)


@triton.jit
def schedule(tiles, heads, REVERSED: tl.constexpr, FLAT: tl.constexpr):
    """Which ``(tile, head, batch)`` this program works on: all tiles of a head before the next head, so that what they stream stays
    in the L2 cache; from the last tile down if REVERSED, for the longest tiles to start first.

    The grid is (tiles, heads, batch). Its last two dims end at 65,535: beyond, all three are FLAT in the first. FLAT of 2: it is
    (tiles, batch, heads), so that sequences that share a bias read it while it is in the L2 cache.
    """
    tile = tl.program_id(0)
    head = tl.program_id(1)
    batch = tl.program_id(2)
    if FLAT == 2:
        head = tl.program_id(2)
        batch = tl.program_id(1)
    elif FLAT:
        head = tile // tiles
        tile -= head * tiles
        batch = head // heads
        head -= batch * heads
    if REVERSED:
        tile = tiles - 1 - tile
    return tile, head, batch


@triton.jit
def column_part(tile, SPLIT: tl.constexpr, COLS: tl.constexpr):
    """Which ``(tile, first column)`` a program works on where SPLIT programs share the columns of what a tile makes, COLS each."""
    if SPLIT == 1:
        return tile, 0
    else:
        return tile // SPLIT, tile % SPLIT * COLS


@triton.jit
def load_tile(
    src, strides, batch, head, row, row_end,
    SIZE: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, BULK: tl.constexpr, WIDEN: tl.constexpr, col=0,
):  # fmt: skip
    """Rows ``row .. row + ROWS`` and columns ``col .. col + COLS`` of one head as a tile [ROWS, COLS]; zero at rows from
    ``row_end`` on and columns from SIZE on."""
    if BULK:
        tile = src.load([batch, head, row, col]).reshape([ROWS, COLS])
    else:
        offs_m = row + tl.arange(0, ROWS)
        offs_d = col + tl.arange(0, COLS)
        ptrs = src + batch.to(tl.int64) * strides[0] + head.to(tl.int64) * strides[1]
        ptrs = ptrs + offs_m.to(tl.int64)[:, None] * strides[2] + offs_d[None, :] * strides[3]
        inside = offs_m[:, None] < row_end
        if SIZE != COLS:
            inside = inside & (offs_d[None, :] < SIZE)
        tile = tl.load(ptrs, mask=inside, other=0.0)
    if WIDEN:
        tile = tile.to(tl.float32)
    return tile


@triton.jit
def store_tile(
    dst, strides, batch, head, row, row_end, tile,
    SIZE: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, BULK: tl.constexpr, WIDEN: tl.constexpr, col=0,
):  # fmt: skip
    """The reverse of ``load_tile``; rounds the float32 tile to the tensor's dtype."""
    if WIDEN:
        tile = round_bf16(tile)
    if BULK:
        dst.store([batch, head, row, col], tile.to(dst.dtype).reshape([1, 1, ROWS, COLS]))
    else:
        offs_m = row + tl.arange(0, ROWS)
        offs_d = col + tl.arange(0, COLS)
        ptrs = dst + batch.to(tl.int64) * strides[0] + head.to(tl.int64) * strides[1]
        ptrs = ptrs + offs_m.to(tl.int64)[:, None] * strides[2] + offs_d[None, :] * strides[3]
        inside = offs_m[:, None] < row_end
        if SIZE != COLS:
            inside = inside & (offs_d[None, :] < SIZE)
        tl.store(ptrs, tile.to(dst.dtype.element_ty), mask=inside)


@triton.jit
def query_terms(mask, batch, head, offs_m, seqlen_q):
    """What the mask's tensors say of the queries ``offs_m``: ``(segment, row_start, row_end)``, [BLOCK_M] each, 0 if there is none.

    ``mask`` holds (segment_q, segment_k, row_start, row_end, dense), each None where the spec has no such term, and their strides.
    It is None where no term of the mask is a tensor; then there is no table either, and that is what kernels ask: Triton 3.6 cannot
    compare with None what has a None inside.
    """
    segment = 0
    row_start = 0
    row_end = 0
    tensors = mask[0]
    strides = mask[1]
    rows = offs_m < seqlen_q
    batch = batch.to(tl.int64)
    head = head.to(tl.int64)
    if tensors[0] is not None:
        segment = tl.load(tensors[0] + batch * strides[0][0] + offs_m * strides[0][1], mask=rows, other=0)
    if tensors[2] is not None:
        start_at = batch * strides[2][0] + head * strides[2][1] + offs_m * strides[2][2]
        end_at = batch * strides[3][0] + head * strides[3][1] + offs_m * strides[3][2]
        row_start = tl.load(tensors[2] + start_at, mask=rows, other=0)
        row_end = tl.load(tensors[3] + end_at, mask=rows, other=0)
    return segment, row_start, row_end


@triton.jit
def key_terms(mask, batch, offs_n, seqlen_k):
    """What the mask's tensors say of the keys ``offs_n``: their segment, [BLOCK_N], 0 if there is none."""
    segment = 0
    tensors = mask[0]
    strides = mask[1]
    if tensors[1] is not None:
        at = batch.to(tl.int64) * strides[1][0] + offs_n * strides[1][1]
        segment = tl.load(tensors[1] + at, mask=offs_n < seqlen_k, other=0)
    return segment


@triton.jit
def load_within(ptrs, rows, keys, q_end, k_end, ragged):
    """Elements at ``rows`` and ``keys``; 0 past the ends, where the last tile of queries or keys is ragged (not None)."""
    if ragged[0] is not None and ragged[1] is not None:
        return tl.load(ptrs, mask=(rows < q_end) & (keys < k_end), other=0)
    elif ragged[0] is not None:
        return tl.load(ptrs, mask=rows < q_end, other=0)
    elif ragged[1] is not None:
        return tl.load(ptrs, mask=keys < k_end, other=0)
    else:
        # No guard: elements side by side then load together.
        return tl.load(ptrs)


@triton.jit
def dense_tile(dense, strides, batch, head, offs_m, offs_n, start_n, seqlen_q, seqlen_k, ragged, KEYS_FIRST: tl.constexpr):
    """May these queries see these keys, by a dense mask? It holds one byte for each pair, or one bit: words of 32 keys, of which
    few are loaded, and a tile of scores never changes its layout for them."""
    q_axis: tl.constexpr = 0 if KEYS_FIRST else 1
    k_axis: tl.constexpr = 1 if KEYS_FIRST else 0
    packed: tl.constexpr = dense.dtype.element_ty == tl.int32
    rows = tl.expand_dims(offs_m, q_axis)
    keys = tl.expand_dims(offs_n, k_axis)
    k_end = seqlen_k
    if packed:
        words: tl.constexpr = offs_n.shape[0] // 32
        keys = tl.expand_dims(start_n // 32 + tl.arange(0, words), k_axis)
        k_end = (seqlen_k + 31) // 32
    at = batch.to(tl.int64) * strides[0] + head.to(tl.int64) * strides[1]
    at = at + rows.to(tl.int64) * strides[2] + keys.to(tl.int64) * strides[3]
    tile = load_within(dense + at, rows, keys, seqlen_q, k_end, ragged)
    if packed:
        # A dim of 32 after that of the words.
        tile = tl.expand_dims(tile, 1 if KEYS_FIRST else 2)
        place = tl.arange(0, 32)
        if KEYS_FIRST:
            bits = (tile >> place[None, :, None]) & 1
            tile = tl.reshape(bits, [words * 32, offs_m.shape[0]])
        else:
            bits = (tile >> place[None, None, :]) & 1
            tile = tl.reshape(bits, [offs_m.shape[0], words * 32])
    return tile != 0


@triton.jit
def seen(ok, mask, of_query, of_key, batch, head, offs_m, offs_n, start_n, seqlen_q, seqlen_k, KEYS_FIRST: tl.constexpr):
    """``ok`` and those terms of the mask that are tensors. The tile is [queries, keys], or [keys, queries] if KEYS_FIRST."""
    tensors = mask[0]
    strides = mask[1]
    q_axis: tl.constexpr = 0 if KEYS_FIRST else 1
    k_axis: tl.constexpr = 1 if KEYS_FIRST else 0
    if tensors[4] is not None:
        bits = dense_tile(tensors[4], strides[4], batch, head, offs_m, offs_n, start_n, seqlen_q, seqlen_k, mask[2], KEYS_FIRST)
        if mask[2][2] is not None or (KEYS_FIRST and tensors[4].dtype.element_ty != tl.int32):
            # Bytes of a tile [keys, queries] stay in shared memory only where they are compared besides.
            ok = ok & bits
        else:
            ok = bits
    if tensors[0] is not None:
        ok = ok & same_segment(tl.expand_dims(of_query[0], q_axis), tl.expand_dims(of_key, k_axis))
    if tensors[2] is not None:
        row_start = tl.expand_dims(of_query[1], q_axis)
        row_end = tl.expand_dims(of_query[2], q_axis)
        ok = ok & in_row(tl.expand_dims(offs_n, k_axis), row_start, row_end)
    return ok


@triton.jit
def listed(table, table_batch, table_head, table_width, batch, head, row):
    """The list of tiles of row tile ``row``, and ``(lo, free_lo, free_hi, hi)``: which of its places are free and which masked."""
    at = (batch * table_batch + head * table_head + row).to(tl.int64)
    free = tl.load(table[0] + at * 2)
    masked = tl.load(table[0] + at * 2 + 1)
    return table[1] + at * table_width, 0, 0, free, free + masked


@triton.jit
def of_queries(s, offs_m, seqlen_q, Q_AXIS: tl.constexpr):
    """Scores of the queries ``offs_m``, 0 for those past the end: these read as zeros, and 0 times a key of infinity is NaN, which
    their ``lse2`` of +inf does not turn into a weight of 0."""
    return tl.where(tl.expand_dims(offs_m < seqlen_q, Q_AXIS), s, 0.0)


@triton.jit
def round_bf16(x):
    """float32 -> float32 that holds the nearest bfloat16 (ties to even)."""
    bits = x.to(tl.uint32, bitcast=True)
    bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def operand(x, DTYPE: tl.constexpr, WIDEN: tl.constexpr):
    """A float32 tile as the operand of the next product, rounded to the dtype of the inputs."""
    if WIDEN:
        return round_bf16(x)
    else:
        return x.to(DTYPE)


@triton.jit
def softmax_step(qk, ok, m_i, l_i, qk_scale2, MASKED: tl.constexpr, LISTED: tl.constexpr = False):
    """One online-softmax step: ``(p, alpha, m_new, l_new)`` for raw products ``qk`` and, if MASKED, what they may see.

    m_i is the running maximum of the scores in base two, l_i the running sum of exp2(score - m_i). A row of a masked tile may have
    no maximum yet (-inf), nor may one whose keys are -inf: its pivot is 0, so that no -inf - -inf arises and both p and alpha are
    exact zeros. LISTED: the scale is not 0, so that scores may be hidden before it, and scale and pivot are one multiplication with
    an addition.
    """
    if MASKED and LISTED:
        x = tl.where(ok, qk, -float("inf"))
        m_new = tl.maximum(m_i, tl.max(x, 1) * qk_scale2)
        pivot = tl.where(m_new > -float("inf"), m_new, 0.0)
        p = tl.math.exp2(x * qk_scale2 - pivot[:, None])
    elif MASKED:
        s2 = tl.where(ok, qk * qk_scale2, -float("inf"))
        m_new = tl.maximum(m_i, tl.max(s2, 1))
        pivot = tl.where(m_new == -float("inf"), 0.0, m_new)
        p = tl.math.exp2(s2 - pivot[:, None])
    else:
        m_new = tl.maximum(m_i, tl.max(qk, 1) * qk_scale2)
        pivot = tl.where(m_new == -float("inf"), 0.0, m_new)
        p = tl.math.exp2(qk * qk_scale2 - pivot[:, None])
    alpha = tl.math.exp2(m_i - pivot)
    l_new = l_i * alpha + tl.sum(p, 1)
    return p, alpha, m_new, l_new
