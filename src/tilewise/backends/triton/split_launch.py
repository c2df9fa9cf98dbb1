"""The launch that writes the bfloat16 parts of a tensor."""

from __future__ import annotations

import functools

import torch
import triton

from ...configs import padded
from ...problem import Problem
from ..launching import Plan
from . import split

__all__ = ["split_of"]

_ROWS = 8192  # elements of a tile


@functools.lru_cache(maxsize=4096)
def _plan(problem: Problem, heads: int, rows: int, size: int, parts: int, sign: float) -> Plan:
    from . import _grid

    cols = padded(size)
    block = max(16, _ROWS // cols)
    blocks = triton.cdiv(rows, block)
    grid, flat = _grid(blocks, heads, problem.batch)
    options = {"FLAT": flat, "PARTS": parts, "SIZE": size, "ROWS": block, "COLS": cols, "num_warps": 8, "enable_fp_fusion": True}
    return Plan(split._split_kernel, grid, (None, None), (heads, rows, sign, blocks), options)


def split_of(problem: Problem, x: torch.Tensor, parts: int, sign: float = 1.0) -> torch.Tensor:
    """``sign * x`` as parts: part i of head h lies at head ``h * parts + i``; rows are whole units of 16 bytes."""
    batch, heads, rows, size = x.shape
    dtype = torch.float32 if x.device.type == "cpu" else torch.bfloat16  # the interpreter multiplies bfloat16 wrongly
    made = torch.empty((batch, heads * parts, rows, -(-size // 8) * 8), dtype=dtype, device=x.device)[..., :size]
    _plan(problem, heads, rows, size, parts, sign).run(x, made)
    return made
