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
tile_range = _shared(bodies.tile_range)

# Kernel arguments that never enter a compile key, so that one kernel serves every length, every window and every number of heads.
# seqlen_q does enter, as "a multiple of 16 or not": rows of lse and delta that are known to be aligned load four at a time.
LENGTHS = ("heads_q", "heads_kv", "seqlen_k", "q_start", "upper", "lower", "m_blocks", "n_blocks")
LOG2_E: tl.constexpr = tl.constexpr(1.4426950408889634)
LN_2: tl.constexpr = tl.constexpr(0.6931471805599453)


@triton.jit
def schedule(tiles, heads, REVERSED: tl.constexpr, FLAT: tl.constexpr):
    """Which ``(tile, head, batch)`` this program works on: all tiles of a head before the next head, so that what they stream stays
    in the L2 cache; from the last tile down if REVERSED, for the longest tiles to start first.

    The grid is (tiles, heads, batch). Its last two dims end at 65,535: beyond, all three are FLAT in the first.
    """
    tile = tl.program_id(0)
    head = tl.program_id(1)
    batch = tl.program_id(2)
    if FLAT:
        head = tile // tiles
        tile -= head * tiles
        batch = head // heads
        head -= batch * heads
    if REVERSED:
        tile = tiles - 1 - tile
    return tile, head, batch


@triton.jit
def load_tile(
    src, strides, batch, head, row, row_end,
    SIZE: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, BULK: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """Rows ``row .. row + ROWS`` of one head as a tile [ROWS, COLS]; zero at rows from ``row_end`` on and columns from SIZE on."""
    if BULK:
        tile = src.load([batch, head, row, 0]).reshape([ROWS, COLS])
    else:
        offs_m = row + tl.arange(0, ROWS)
        offs_d = tl.arange(0, COLS)
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
    SIZE: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, BULK: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """The reverse of ``load_tile``; rounds the float32 tile to the tensor's dtype."""
    if WIDEN:
        tile = round_bf16(tile)
    if BULK:
        dst.store([batch, head, row, 0], tile.to(dst.dtype).reshape([1, 1, ROWS, COLS]))
    else:
        offs_m = row + tl.arange(0, ROWS)
        offs_d = tl.arange(0, COLS)
        ptrs = dst + batch.to(tl.int64) * strides[0] + head.to(tl.int64) * strides[1]
        ptrs = ptrs + offs_m.to(tl.int64)[:, None] * strides[2] + offs_d[None, :] * strides[3]
        inside = offs_m[:, None] < row_end
        if SIZE != COLS:
            inside = inside & (offs_d[None, :] < SIZE)
        tl.store(ptrs, tile.to(dst.dtype.element_ty), mask=inside)


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
def softmax_step(qk, ok, m_i, l_i, qk_scale2, MASKED: tl.constexpr):
    """One online-softmax step: ``(p, alpha, m_new, l_new)`` for raw products ``qk`` and, if MASKED, what they may see.

    m_i is the running maximum of the scores in base two, l_i the running sum of exp2(score - m_i). A row of a masked tile may have
    no maximum yet (-inf): its pivot is 0, so that no -inf - -inf arises and both p and alpha are exact zeros.
    """
    if MASKED:
        s2 = tl.where(ok, qk * qk_scale2, -float("inf"))
        m_new = tl.maximum(m_i, tl.max(s2, 1))
        pivot = tl.where(m_new == -float("inf"), 0.0, m_new)
        p = tl.math.exp2(s2 - pivot[:, None])
    else:
        m_new = tl.maximum(m_i, tl.max(qk, 1) * qk_scale2)
        pivot = m_new
        p = tl.math.exp2(qk * qk_scale2 - pivot[:, None])
    alpha = tl.math.exp2(m_i - pivot)
    l_new = l_i * alpha + tl.sum(p, 1)
    return p, alpha, m_new, l_new
