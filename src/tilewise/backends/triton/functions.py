"""A score function alone, on scores in memory: what ``testing.check_score_fn`` runs."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ...functions import function_of
from ...spec import Spec, Tensors
from . import scores
from .parts import LENGTHS

__all__ = ["apply"]


@triton.jit(do_not_specialize=LENGTHS)
def _apply_kernel(
    s_ptr, out_ptr, slope_ptr, score, heads_q, seqlen_q, seqlen_k, q_start,
    STEPS: tl.constexpr, KEYS_FIRST: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Tiles of one batch and head. Grid: query tiles x key tiles x (heads and batches)."""
    head = tl.program_id(2) % heads_q
    batch = tl.program_id(2) // heads_q
    start_m = tl.program_id(0) * BLOCK_M
    start_n = tl.program_id(1) * BLOCK_N
    q_axis: tl.constexpr = 0 if KEYS_FIRST else 1
    k_axis: tl.constexpr = 1 if KEYS_FIRST else 0
    offs_m = tl.expand_dims(start_m + tl.arange(0, BLOCK_M), q_axis)
    offs_n = tl.expand_dims(start_n + tl.arange(0, BLOCK_N), k_axis)
    at = (tl.program_id(2).to(tl.int64) * seqlen_q + offs_m) * seqlen_k + offs_n
    inside = (offs_m < seqlen_q) & (offs_n < seqlen_k)
    s = tl.load(s_ptr + at, mask=inside, other=0.0)
    out, slope, _ = scores.scored(
        s, score, batch, head, start_m, start_n, q_start, seqlen_q, seqlen_k, KEYS_FIRST, True,
        STEPS, True, (True, True), tl.float32, "",
    )  # fmt: skip
    tl.store(out_ptr + at, out, mask=inside)
    if slope_ptr is not None:
        tl.store(slope_ptr + at, tl.broadcast_to(tl.cast(slope, tl.float32), out.shape), mask=inside)


def apply(spec: Spec, s: torch.Tensor, keys_first: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The function of a spec and its derivative at the scores ``s`` (batch, heads, seqlen_q, seqlen_k), float32 and contiguous."""
    from . import own_function

    batch, heads, seqlen_q, seqlen_k = s.shape
    out = torch.empty_like(s)
    slope = None if function_of(spec).derivative is None else torch.empty_like(s)
    block_m, block_n = 16, 32
    grid = (triton.cdiv(seqlen_q, block_m), triton.cdiv(seqlen_k, block_n), batch * heads)
    score = (None, None, None, own_function(spec, Tensors(*spec.tensors)))
    with torch.cuda.device_of(s):
        _apply_kernel[grid](
            s, out, slope, score, heads, seqlen_q, seqlen_k, spec.q_start(seqlen_q, seqlen_k),
            STEPS=(spec.function,), KEYS_FIRST=keys_first, BLOCK_M=block_m, BLOCK_N=block_n, enable_fp_fusion=True,
        )  # fmt: skip
    return out, slope
