"""What the backward kernels need to know of each row of queries, made once: ``lse`` in base two and ``-delta``.

    delta = sum_d do * o - dlse

Both go into rows of ``q_pad`` numbers, so that a bulk copy can take any tile of them. A row past the end, or one that saw no key,
has lse2 = +inf, so that every p of it is an exact zero, and delta = 0.
"""

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def delta_of_rows(
    o_ptr, do_ptr, dlse_ptr, o_strides, do_strides, heads_q, seqlen_q, q_pad, m_blocks,
    HAS_DLSE: tl.constexpr, HEAD_DIM_V: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_DV: tl.constexpr,
):  # fmt: skip
    """``(delta, rows, inside, padded)`` of this program's rows: their places in tensors of seqlen_q rows a head, which of them are
    inside, and their places where a head has q_pad rows. Grid: tiles of rows, one head after the other."""
    index = tl.program_id(0)
    head_index = index // m_blocks
    start_m = (index - head_index * m_blocks) * BLOCK_M
    batch = (head_index // heads_q).to(tl.int64)
    head = (head_index % heads_q).to(tl.int64)
    offs_m = start_m + tl.arange(0, BLOCK_M)
    offs_d = tl.arange(0, BLOCK_DV)
    inside = offs_m < seqlen_q
    wanted = inside[:, None] & (offs_d < HEAD_DIM_V)[None, :]
    o_rows = o_ptr + batch * o_strides[0] + head * o_strides[1] + offs_m.to(tl.int64)[:, None] * o_strides[2]
    do_rows = do_ptr + batch * do_strides[0] + head * do_strides[1] + offs_m.to(tl.int64)[:, None] * do_strides[2]
    o = tl.load(o_rows + offs_d[None, :], mask=wanted, other=0.0).to(tl.float32)
    do = tl.load(do_rows + offs_d[None, :], mask=wanted, other=0.0).to(tl.float32)
    delta = tl.sum(o * do, 1)
    rows = head_index.to(tl.int64) * seqlen_q + offs_m
    if HAS_DLSE:
        delta -= tl.load(dlse_ptr + rows, mask=inside, other=0.0)
    return delta, rows, inside, head_index.to(tl.int64) * q_pad + offs_m


@triton.jit(do_not_specialize=("heads_q", "seqlen_q", "q_pad", "m_blocks"))
def _rows_kernel(
    o_ptr, do_ptr, dlse_ptr, lse_ptr, lse2_ptr, delta_ptr, o_strides, do_strides, heads_q, seqlen_q, q_pad, m_blocks,
    HAS_DLSE: tl.constexpr, HEAD_DIM_V: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_DV: tl.constexpr,
):  # fmt: skip
    """Grid: tiles of rows, one head after the other."""
    delta, rows, inside, padded = delta_of_rows(
        o_ptr, do_ptr, dlse_ptr, o_strides, do_strides, heads_q, seqlen_q, q_pad, m_blocks, HAS_DLSE, HEAD_DIM_V, BLOCK_M, BLOCK_DV
    )
    lse = tl.load(lse_ptr + rows, mask=inside, other=-float("inf"))
    empty = lse == -float("inf")
    tl.store(lse2_ptr + padded, tl.where(empty, float("inf"), lse * LOG2_E))
    tl.store(delta_ptr + padded, tl.where(empty, 0.0, -delta))


@triton.jit(do_not_specialize=("heads_q", "seqlen_q", "q_pad", "m_blocks"))
def _zeroing_rows_kernel(
    o_ptr, do_ptr, dlse_ptr, lse_ptr, lse2_ptr, delta_ptr, sums_ptr, o_strides, do_strides, heads_q, seqlen_q, q_pad, m_blocks,
    HAS_DLSE: tl.constexpr, HEAD_DIM_V: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_DV: tl.constexpr, HEAD_DIM: tl.constexpr,
):  # fmt: skip
    """The same, and the sums of dq are set to 0, and the counter behind them."""
    if tl.program_id(0) == 0:
        tl.store(sums_ptr + tl.num_programs(0).to(tl.int64) * (BLOCK_M * HEAD_DIM), 0.0)
    offs = tl.arange(0, BLOCK_M * HEAD_DIM)
    tl.store(sums_ptr + tl.program_id(0).to(tl.int64) * (BLOCK_M * HEAD_DIM) + offs, tl.zeros([BLOCK_M * HEAD_DIM], tl.float32))
    _rows_kernel(
        o_ptr, do_ptr, dlse_ptr, lse_ptr, lse2_ptr, delta_ptr, o_strides, do_strides, heads_q, seqlen_q, q_pad, m_blocks,
        HAS_DLSE, HEAD_DIM_V, BLOCK_M, BLOCK_DV,
    )  # fmt: skip


@triton.jit(do_not_specialize=("heads_q", "seqlen_q", "m_blocks"))
def _gather_kernel(dq_ptr, sums_ptr, dq_strides, sm_scale, heads_q, seqlen_q, m_blocks, HEAD_DIM: tl.constexpr):
    """dq from the sums that ``bwd_add.py`` left in the order of accumulators. Grid: 64 rows of one head each."""
    index = tl.program_id(0)
    head_index = index // m_blocks
    start_m = (index - head_index * m_blocks) * 64
    batch = (head_index // heads_q).to(tl.int64)
    head = (head_index % heads_q).to(tl.int64)
    row = start_m + tl.arange(0, 64)
    col = tl.arange(0, HEAD_DIM)
    x = tl.load(sums_ptr + index.to(tl.int64) * (64 * HEAD_DIM) + tl.arange(0, 64 * HEAD_DIM)) * sm_scale
    # As an accumulator lies: eight columns, warp, row of eight, pair of columns, half of sixteen rows, column of the pair.
    x = tl.reshape(x, [HEAD_DIM // 8, 4, 8, 4, 2, 2])
    x = tl.reshape(tl.permute(x, (1, 4, 2, 0, 3, 5)), [64, HEAD_DIM])
    out = dq_ptr + batch * dq_strides[0] + head * dq_strides[1] + row.to(tl.int64)[:, None] * dq_strides[2]
    tl.store(out + col[None, :], x.to(dq_ptr.dtype.element_ty), mask=(row < seqlen_q)[:, None])
