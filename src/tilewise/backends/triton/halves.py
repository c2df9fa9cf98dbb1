"""float32 operands as float16 halves in units of their rows: the form that tensor cores multiply fastest.

A row is multiplied by the power of two that brings its largest number to 2^14 or above, but below 2^15; its ``unit`` is the
inverse. A number is then ``(high + low) * unit`` with 11 bits in each half: 22 bits and the sign of ``low``, as many as float32 has
but for half a unit in its last place. (Of numbers 2^17 times smaller than the largest of their row, what lies below 2^-40 of that
is lost.) A product of two numbers is three: ``high high + high low + low high``, and what is left out is below 2^-24 of it.
HALVES = 2 stands for that. HALVES = 1 keeps ``high`` alone, which has the 11 bits that TF32 reads of an operand; HALVES = 0 is for
whole operands.

Units are powers of two, so nothing is rounded where they are multiplied. In a product ``a b^T`` of rows they are factors of the
result. Where rows are summed up (those of v in ``p v``, of q in ``ds^T q``) they go into the weights, which get units of their own:
one for each row of the result in each tile (``halved``). So a row that nobody may see has no part in the digits of others.

Infinity is its own high half, with 0 as the low one, and small products that are not finite count for nothing (GUARD), so that a
key of -inf has the weight 0. Where rows are summed up nothing asks: what meets an infinity there is NaN.

A tensor core cuts off where float32 rounds, each time: a product starts from zero, with the small ones, and is added up outside.
"""

import triton
import triton.language as tl

from .parts import load_tile, schedule, store_tile


@triton.jit
def finite_or_zero(x):
    return tl.where(tl.abs(x) < float("inf"), x, 0.0)


@triton.jit
def unit_of(largest):
    """``(by, unit)`` of rows with these largest magnitudes: what they are multiplied by, and its inverse, both powers of two."""
    exponent = (largest.to(tl.uint32, bitcast=True) >> 23).to(tl.int32)
    by = tl.minimum(14 + 2 * 127 - exponent, 253)  # so that the inverse is no subnormal number
    return (by << 23).to(tl.float32, bitcast=True), ((254 - by) << 23).to(tl.float32, bitcast=True)


@triton.jit
def load_units(units, head, rows, row_end):
    """The units of these rows of a head, counted over the batch; 0 past the end."""
    return tl.load(units + head.to(tl.int64) * row_end + rows, mask=rows < row_end, other=0.0)


@triton.jit
def in_units(x, of_row, of_column):
    """Products ``x`` of halves, times the units of their rows and columns. Those may be as far apart as 2^-126 and 2^113: the unit
    of a row is taken in two steps, so that nothing is infinite or 0 on the way that is not at the end."""
    near = tl.minimum(tl.maximum(of_row, 2.0**-60), 2.0**60)
    return x * near[:, None] * of_column[None, :] * (of_row / near)[:, None]


@triton.jit
def load_halves(
    src, strides, batch, head, row, row_end,
    SIZE: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
    BULK: tl.constexpr, WIDEN: tl.constexpr, HALVES: tl.constexpr, col=0,
):  # fmt: skip
    """``load_tile``, or the two halves of a tile: those of head h lie at 2 h and 2 h + 1."""
    if HALVES == 2:
        high = load_tile(src, strides, batch, head * 2, row, row_end, SIZE, ROWS, COLS, BULK, WIDEN, col)
        low = load_tile(src, strides, batch, head * 2 + 1, row, row_end, SIZE, ROWS, COLS, BULK, WIDEN, col)
        return high, low
    else:
        return load_tile(src, strides, batch, head, row, row_end, SIZE, ROWS, COLS, BULK, WIDEN, col)


@triton.jit
def transposed(x, HALVES: tl.constexpr):
    if HALVES == 2:
        return tl.trans(x[0]), tl.trans(x[1])
    else:
        return tl.trans(x)


@triton.jit
def product(a, b, GUARD: tl.constexpr, HALVES: tl.constexpr):
    """``a b`` of halves, added up from the smallest; GUARD: the small ones count for nothing where an operand is not finite."""
    if HALVES == 2:
        rest = tl.dot(a[1], b[0])
        rest = tl.dot(a[0], b[1], rest)
        if GUARD:
            rest = finite_or_zero(rest)
        return tl.dot(a[0], b[0], rest)
    else:
        return tl.dot(a, b)


@triton.jit
def halved(x, AXIS: tl.constexpr, HALVES: tl.constexpr):
    """``(halves, unit)`` of a float32 tile that is summed up along AXIS, with a unit for each place of the other one."""
    by, unit = unit_of(tl.max(tl.abs(x), AXIS))
    x *= tl.expand_dims(by, AXIS)
    high = x.to(tl.float16)
    if HALVES == 2:
        return (high, (x - high.to(tl.float32)).to(tl.float16)), unit
    else:
        return high, unit


@triton.jit
def add_values(acc, p, v, v_unit, HALVES: tl.constexpr):
    """``acc + p v`` of weights in float32 and rows v in these units."""
    p, unit = halved(p * v_unit[None, :], 1, HALVES)
    return acc + product(p, v, False, HALVES) * unit[:, None]


@triton.jit
def store_halves(
    dst, strides, batch, head, row, row_end, tile,
    ROWS: tl.constexpr, COLS: tl.constexpr, BULK: tl.constexpr, HALVES: tl.constexpr, col,
):  # fmt: skip
    """The reverse of ``load_halves``, for whole tiles of columns."""
    if HALVES == 2:
        store_tile(dst, strides, batch, head * 2, row, row_end, tile[0], COLS, ROWS, COLS, BULK, False, col)
        store_tile(dst, strides, batch, head * 2 + 1, row, row_end, tile[1], COLS, ROWS, COLS, BULK, False, col)
    else:
        store_tile(dst, strides, batch, head, row, row_end, tile, COLS, ROWS, COLS, BULK, False, col)


@triton.jit(do_not_specialize=("heads", "rows", "blocks"))
def _halve_kernel(
    src, dst, units, src_strides, dst_strides, heads, rows, sign, blocks,
    FLAT: tl.constexpr, HALVES: tl.constexpr, SIZE: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """The halves of ``sign`` times a tensor, and the units of its rows. Grid: tiles of rows x heads x batch."""
    block, head, batch = schedule(blocks, heads, False, FLAT)
    x = load_tile(src, src_strides, batch, head, block * ROWS, rows, SIZE, ROWS, COLS, False, False) * sign
    by, unit = unit_of(tl.max(finite_or_zero(tl.abs(x)), 1))
    x *= by[:, None]
    offs_m = block * ROWS + tl.arange(0, ROWS)
    offs_d = tl.arange(0, COLS)
    at = batch.to(tl.int64) * dst_strides[0] + (head * HALVES).to(tl.int64) * dst_strides[1]
    ptrs = dst + at + offs_m.to(tl.int64)[:, None] * dst_strides[2] + offs_d[None, :]
    inside = (offs_m[:, None] < rows) & (offs_d[None, :] < SIZE)
    high = x.to(tl.float16)
    tl.store(ptrs, high, mask=inside)
    if HALVES == 2:
        # Infinity has no rest; that of NaN is NaN.
        low = tl.where(tl.abs(x) == float("inf"), 0.0, x - high.to(tl.float32))
        tl.store(ptrs + dst_strides[1], low.to(tl.float16), mask=inside)
    tl.store(units + (batch * heads + head).to(tl.int64) * rows + offs_m, unit, mask=offs_m < rows)
