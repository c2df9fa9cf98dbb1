"""What the backward kernels with a bias need to know of each row of queries, made once, in rows of ``q_pad`` numbers.

The reference of its natural scores, log2 of the sum over it, and ``-delta`` (``bwd_rows.py``). A row past the end, or one that saw
no key, has the reference +inf, so that every p of it is an exact zero, and 0 and 0.
"""

import triton
import triton.language as tl

from .bwd_rows import delta_of_rows

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit(do_not_specialize=("heads_q", "seqlen_q", "q_pad", "m_blocks"))
def _bias_rows_kernel(
    o_ptr, do_ptr, dlse_ptr, rows_ptr, m_ptr, log_l_ptr, delta_ptr, o_strides, do_strides, heads_q, seqlen_q, q_pad, m_blocks,
    HAS_DLSE: tl.constexpr, HEAD_DIM_V: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_DV: tl.constexpr,
):  # fmt: skip
    """Grid: tiles of rows, one head after the other."""
    delta, rows, inside, padded = delta_of_rows(
        o_ptr, do_ptr, dlse_ptr, o_strides, do_strides, heads_q, seqlen_q, q_pad, m_blocks, HAS_DLSE, HEAD_DIM_V, BLOCK_M, BLOCK_DV
    )
    m = tl.load(rows_ptr + rows * 2, mask=inside, other=-float("inf"))
    log_l = tl.load(rows_ptr + rows * 2 + 1, mask=inside, other=0.0)
    empty = m == -float("inf")
    tl.store(m_ptr + padded, tl.where(empty, float("inf"), m))
    tl.store(log_l_ptr + padded, tl.where(empty, 0.0, log_l * LOG2_E))
    tl.store(delta_ptr + padded, tl.where(empty, 0.0, -delta))
