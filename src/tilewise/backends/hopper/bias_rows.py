"""What the backward kernels with a bias need to know of each row of queries, made once, in rows of ``q_pad`` numbers.

The reference of its natural scores, log2 of the sum over it, and ``-delta`` (``bwd_rows.py``). A row past the end, or one that saw
no key, has the reference +inf, so that every p of it is an exact zero, and 0 and 0.
"""

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit(do_not_specialize=("heads_q", "seqlen_q", "q_pad", "m_blocks"))
def _bias_rows_kernel(
    o_ptr, do_ptr, dlse_ptr, rows_ptr, m_ptr, log_l_ptr, delta_ptr, o_strides, do_strides, heads_q, seqlen_q, q_pad, m_blocks,
    HAS_DLSE: tl.constexpr, HEAD_DIM_V: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_DV: tl.constexpr,
):  # fmt: skip
    """Grid: tiles of rows, one head after the other."""
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
    m = tl.load(rows_ptr + rows * 2, mask=inside, other=-float("inf"))
    log_l = tl.load(rows_ptr + rows * 2 + 1, mask=inside, other=0.0)
    empty = m == -float("inf")
    padded = head_index.to(tl.int64) * q_pad + offs_m
    tl.store(m_ptr + padded, tl.where(empty, float("inf"), m))
    tl.store(log_l_ptr + padded, tl.where(empty, 0.0, log_l * LOG2_E))
    tl.store(delta_ptr + padded, tl.where(empty, 0.0, -delta))
