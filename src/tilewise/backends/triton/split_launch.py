"""The launches that bring float32 operands into the form that tensor cores multiply fastest (``split.py``)."""

from __future__ import annotations

import functools

import torch
import triton

from ...configs import padded
from ...configs.split import parts_of, turned
from ...problem import Problem
from ..launching import Launch, Plan
from . import split

__all__ = ["forward_operands", "launch_split", "launch_turn", "split_of", "turned_of"]

_ROWS = 8192  # elements of a tile


@functools.lru_cache(maxsize=4096)
def _split_plan(batch: int, heads: int, rows: int, size: int, parts: int, sign: float) -> Plan:
    from . import _grid

    cols = padded(size)
    block = max(16, _ROWS // cols)
    blocks = triton.cdiv(rows, block)
    grid, flat = _grid(blocks, heads, batch)
    options = {"FLAT": flat, "PARTS": parts, "SIZE": size, "ROWS": block, "COLS": cols, "num_warps": 8, "enable_fp_fusion": True}
    return Plan(split._split_kernel, grid, (None, None), (heads, rows, sign, blocks), options)


def launch_split(x: torch.Tensor, made: torch.Tensor, parts: int, sign: float = 1.0) -> Launch:
    return _split_plan(*x.shape, parts, sign).launch(x, made)


def launch_turn(x: torch.Tensor, made: torch.Tensor) -> Launch:
    return _turn_plan(*x.shape).launch(x, made)


def split_of(x: torch.Tensor, parts: int, sign: float = 1.0) -> torch.Tensor:
    """``sign * x`` as parts: part i of head h lies at head ``h * parts + i``; rows are whole units of 16 bytes."""
    batch, heads, rows, size = x.shape
    dtype = torch.float32 if x.device.type == "cpu" else torch.bfloat16  # the interpreter multiplies bfloat16 wrongly
    made = torch.empty((batch, heads * parts, rows, -(-size // 8) * 8), dtype=dtype, device=x.device)[..., :size]
    _split_plan(batch, heads, rows, size, parts, sign).run(x, made)
    return made


@functools.lru_cache(maxsize=4096)
def _turn_plan(batch: int, heads: int, rows: int, size: int) -> Plan:
    from . import _grid

    blocks = triton.cdiv(rows, 64)
    grid, flat = _grid(blocks, heads, batch)
    options = {"FLAT": flat, "SIZE": size, "ROWS": 64, "COLS": padded(size), "num_warps": 8, "enable_fp_fusion": True}
    return Plan(split._turn_kernel, grid, (None, None), (heads, rows, blocks), options)


def turned_of(x: torch.Tensor) -> torch.Tensor:
    """``x`` as columns, [batch, heads, size, rows rounded up to eights], as ``split.dot_turned`` reads it."""
    batch, heads, rows, size = x.shape
    made = torch.empty((batch, heads, size, -(-rows // 8) * 8), dtype=x.dtype, device=x.device)
    _turn_plan(batch, heads, rows, size).run(x, made)
    return made


def forward_operands(
    problem: Problem, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q, k and v as the forward kernel takes them. The sign of the scale goes into the parts of q."""
    parts = parts_of(problem, "fwd")
    if parts > 1:
        sign = -1.0 if problem.sm_scale < 0 else 1.0
        return split_of(q, parts, sign), split_of(k, parts), split_of(v, parts)
    return q, k, turned_of(v) if turned(problem) else v
