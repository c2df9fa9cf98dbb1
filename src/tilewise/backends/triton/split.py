"""float32 operands in the form that tensor cores multiply fastest: bfloat16 parts, or a transposed copy for TF32.

Three parts of a float32 number hold it (8 bits of mantissa each): ``x = x0 + x1 + x2``. A product of two numbers is then nine, of
which the three smallest, below 2^-24 of it, are left out: ``a b = a0 b0 + a0 b1 + a1 b0 + a1 b1 + a0 b2 + a2 b0``. Two parts hold
16 bits and leave three products, more exact than TF32, which reads 11 bits of an operand.

``_split_kernel`` writes the parts of q, k, v and do once for a pass; kernels read part i of head h as head ``h * PARTS + i``. What
a kernel makes itself (p, ds) is split there. PARTS = 1 stands for whole operands: the code is then what it was without parts.

The parts of infinity are itself and zeros. Small products that are not finite count for nothing (``finite_or_zero``), so that a key
of -inf has the weight 0; only in ``p v`` and in the long sums of gradients, where nothing asks, what meets an infinity is NaN and
not infinity. Below 2^-109 the last part is rounded to what bfloat16 can hold, 2^-133.

A warpgroup multiplies TF32 operands only if both lie along the dim of the sum, which v does not in ``p v``. If TURNED,
``_turn_kernel`` has written v as columns, in each eight keys in the order 0 2 4 6 1 3 5 7: that in which a thread that holds keys
2 a and 2 a + 1 of the scores is to hold them as an operand, so that p stays in its registers.
"""

import triton
import triton.language as tl

from .parts import load_tile, schedule


@triton.jit
def finite_or_zero(x):
    return tl.where(tl.abs(x) < float("inf"), x, 0.0)


@triton.jit
def split(x, like, PARTS: tl.constexpr):
    """The parts of a float32 tile, in the dtype of the tile ``like``, largest first."""
    x0 = x.to(tl.bfloat16)
    r = x - x0.to(tl.float32)
    x1 = r.to(tl.bfloat16)
    if PARTS == 2:
        return x0.to(like.dtype), x1.to(like.dtype)
    else:
        x2 = (r - x1.to(tl.float32)).to(tl.bfloat16)
        return x0.to(like.dtype), x1.to(like.dtype), x2.to(like.dtype)


@triton.jit
def load_parts(
    src, strides, batch, head, row, row_end,
    SIZE: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, BULK: tl.constexpr, WIDEN: tl.constexpr, PARTS: tl.constexpr, col=0,
):  # fmt: skip
    """``load_tile``, or a tuple of the parts of a tile."""
    if PARTS == 1:
        return load_tile(src, strides, batch, head, row, row_end, SIZE, ROWS, COLS, BULK, WIDEN, col)
    elif PARTS == 2:
        x0 = load_tile(src, strides, batch, head * 2, row, row_end, SIZE, ROWS, COLS, BULK, WIDEN, col)
        x1 = load_tile(src, strides, batch, head * 2 + 1, row, row_end, SIZE, ROWS, COLS, BULK, WIDEN, col)
        return x0, x1
    else:
        x0 = load_tile(src, strides, batch, head * 3, row, row_end, SIZE, ROWS, COLS, BULK, WIDEN, col)
        x1 = load_tile(src, strides, batch, head * 3 + 1, row, row_end, SIZE, ROWS, COLS, BULK, WIDEN, col)
        x2 = load_tile(src, strides, batch, head * 3 + 2, row, row_end, SIZE, ROWS, COLS, BULK, WIDEN, col)
        return x0, x1, x2


@triton.jit
def transposed(x, PARTS: tl.constexpr):
    """The transposes of the parts of a tile."""
    if PARTS == 2:
        return tl.trans(x[0]), tl.trans(x[1])
    else:
        return tl.trans(x[0]), tl.trans(x[1]), tl.trans(x[2])


@triton.jit
def _add_rest(a, b, rest, PARTS: tl.constexpr):
    """``rest`` and all products of parts but the large one, smallest first."""
    if PARTS == 3:
        rest = tl.dot(a[0], b[2], rest)
        rest = tl.dot(a[2], b[0], rest)
        rest = tl.dot(a[1], b[1], rest)
    rest = tl.dot(a[0], b[1], rest)
    return tl.dot(a[1], b[0], rest)


@triton.jit
def product(a, b, PARTS: tl.constexpr, GUARD: tl.constexpr):
    """``a b`` of parts, added up from the smallest; GUARD: the small ones count for nothing where an operand is not finite."""
    rest = tl.dot(a[0], b[PARTS - 1])
    if PARTS == 3:
        rest = tl.dot(a[2], b[0], rest)
        rest = tl.dot(a[1], b[1], rest)
        rest = tl.dot(a[0], b[1], rest)
    rest = tl.dot(a[1], b[0], rest)
    if GUARD:
        rest = finite_or_zero(rest)
    return tl.dot(a[0], b[0], rest)


@triton.jit
def add_parts(a, b, acc, rest, PARTS: tl.constexpr, LONG: tl.constexpr):
    """``acc + a b``: the large product of the parts goes to ``acc``, the others to ``rest``. A tensor core does not round a sum but
    cuts it off, each time: a LONG sum of three parts is added up outside, the products of a step together. (A lone product that is
    added to ``acc`` would be made on top of it by the compiler.)"""
    if LONG and PARTS == 3:
        return acc + product(a, b, PARTS, False), rest
    else:
        rest = _add_rest(a, b, rest, PARTS)
        return tl.dot(a[0], b[0], acc), rest


@triton.jit
def dot_t(a, b, PRECISION: tl.constexpr, PARTS: tl.constexpr):
    """``a b^T`` of two tiles with a row for each query or key."""
    if PARTS == 1:
        return tl.dot(a, tl.trans(b), input_precision=PRECISION)
    else:
        return product(a, transposed(b, PARTS), PARTS, True)


@triton.jit
def dot_add(a, b, acc, PRECISION: tl.constexpr, PARTS: tl.constexpr):
    """``acc + a b`` of a float32 tile and a tile or its parts."""
    if PARTS == 1:
        return tl.dot(a, b, acc, input_precision=PRECISION)
    else:
        return acc + product(split(a, b[0], PARTS), b, PARTS, False)


@triton.jit
def joined(acc, rest, PARTS: tl.constexpr):
    """The sum of the large product and the others, which count for nothing where an operand was not finite."""
    if PARTS == 1:
        return acc
    else:
        return acc + finite_or_zero(rest)


@triton.jit
def store_parts(ptrs, x, plane, PARTS: tl.constexpr):
    """A float32 tile, or its parts ``plane`` elements from one another."""
    for part in tl.static_range(PARTS):
        rounded = x.to(ptrs.dtype.element_ty)
        tl.store(ptrs + part * plane, rounded)
        if part + 1 < PARTS:
            rest = x - rounded.to(tl.float32)
            x = tl.where(tl.abs(rest) < float("inf"), rest, 0.0)


@triton.jit(do_not_specialize=("heads", "rows", "blocks"))
def _split_kernel(
    src, dst, src_strides, dst_strides, heads, rows, sign, blocks,
    FLAT: tl.constexpr, PARTS: tl.constexpr, SIZE: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """The parts of ``sign`` times a tensor. Grid: tiles of rows x heads x batch."""
    block, head, batch = schedule(blocks, heads, False, FLAT)
    x = load_tile(src, src_strides, batch, head, block * ROWS, rows, SIZE, ROWS, COLS, False, False) * sign
    offs_m = block * ROWS + tl.arange(0, ROWS)
    offs_d = tl.arange(0, COLS)
    at = batch.to(tl.int64) * dst_strides[0] + (head * PARTS).to(tl.int64) * dst_strides[1]
    ptrs = dst + at + offs_m.to(tl.int64)[:, None] * dst_strides[2] + offs_d[None, :]
    inside = (offs_m[:, None] < rows) & (offs_d[None, :] < SIZE)
    for part in tl.static_range(PARTS):
        rounded = x.to(tl.bfloat16).to(tl.float32)
        # The largest numbers must not round up to infinity, and what is infinite has no rest.
        cut = (x.to(tl.uint32, bitcast=True) & 0xFFFF0000).to(tl.float32, bitcast=True)
        rounded = tl.where(tl.abs(rounded) == float("inf"), cut, rounded)
        tl.store(ptrs + part * dst_strides[1], rounded.to(dst.dtype.element_ty), mask=inside)
        x = tl.where(tl.abs(x) == float("inf"), 0.0, x - rounded)


@triton.jit
def in_turn(x):
    """The columns of a tile, each eight of them in the order 0 2 4 6 1 3 5 7."""
    eights = tl.reshape(x, (x.shape[0], x.shape[1] // 8, 4, 2))
    return tl.reshape(tl.permute(eights, (0, 1, 3, 2)), (x.shape[0], x.shape[1]))


@triton.jit
def to_tf32(x):
    """The nearest number of 11 bits: a tensor core reads no more of an operand, and would cut off the others. NaN is lost."""
    bits = (x.to(tl.uint32, bitcast=True) + 0x1000) & 0xFFFFE000
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def dot_turned(p, v, v_strides, batch, head, row, acc, ROWS: tl.constexpr, COLS: tl.constexpr, col, PRECISION: tl.constexpr):
    """``acc + p v`` where ``v`` describes what ``_turn_kernel`` wrote. The sum of a row's p keeps a NaN that ``to_tf32`` loses."""
    v_tile = v.load([batch, head, col, row]).reshape([COLS, ROWS])
    return tl.dot(in_turn(to_tf32(p)), tl.trans(v_tile), acc, input_precision=PRECISION)


@triton.jit(do_not_specialize=("heads", "rows", "blocks"))
def _turn_kernel(
    src, dst, src_strides, dst_strides, heads, rows, blocks,
    FLAT: tl.constexpr, SIZE: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """A tensor transposed for ``dot_turned``, its rows rounded up to eights with zeros. Grid: tiles of rows x heads x batch."""
    block, head, batch = schedule(blocks, heads, False, FLAT)
    x = load_tile(src, src_strides, batch, head, block * ROWS, rows, SIZE, ROWS, COLS, False, False)
    # [COLS, ROWS]
    x = in_turn(tl.trans(tl.where(x == x, to_tf32(x), x)))
    offs_m = block * ROWS + tl.arange(0, ROWS)
    offs_d = tl.arange(0, COLS)
    at = batch.to(tl.int64) * dst_strides[0] + head.to(tl.int64) * dst_strides[1]
    ptrs = dst + at + offs_d.to(tl.int64)[:, None] * dst_strides[2] + offs_m[None, :]
    tl.store(ptrs, x, mask=(offs_d[:, None] < SIZE) & (offs_m[None, :] < (rows + 7) // 8 * 8))
