"""The launches that bring float32 operands into the form that tensor cores multiply fastest (``halves.py``)."""

from __future__ import annotations

import functools

import torch
import triton

from ...configs import padded
from ...configs.halves import halves_of
from ...problem import Problem
from ..launching import Launch, Plan
from . import halves

__all__ = ["forward_operands", "halve", "launch_halve"]

_ROWS = 8192  # elements of a tile


@functools.lru_cache(maxsize=4096)
def _plan(batch: int, heads: int, rows: int, size: int, count: int, sign: float) -> Plan:
    from . import _grid

    cols = padded(size)
    block = max(16, _ROWS // cols)
    blocks = triton.cdiv(rows, block)
    grid, flat = _grid(blocks, heads, batch)
    options = {"FLAT": flat, "HALVES": count, "SIZE": size, "ROWS": block, "COLS": cols, "num_warps": 8, "enable_fp_fusion": True}
    return Plan(halves._halve_kernel, grid, (None, None), (heads, rows, sign, blocks), options)


def launch_halve(x: torch.Tensor, made: torch.Tensor, units: torch.Tensor, count: int, sign: float = 1.0) -> Launch:
    return _plan(*x.shape, count, sign).launch(x, made, units)


def halve(x: torch.Tensor, count: int, sign: float = 1.0) -> tuple[torch.Tensor, torch.Tensor]:
    """``count`` halves of ``sign * x``, that number i of head h at head ``h * count + i``, in rows of whole 16 bytes; and the units
    of the rows."""
    batch, heads, rows, size = x.shape
    made = torch.empty((batch, heads * count, rows, -(-size // 8) * 8), dtype=torch.float16, device=x.device)[..., :size]
    units = torch.empty((batch, heads, rows), dtype=torch.float32, device=x.device)
    _plan(batch, heads, rows, size, count, sign).run(x, made, units)
    return made, units


def forward_operands(problem: Problem, *operands: torch.Tensor) -> tuple[tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]]:
    """q, k and v as the forward kernel takes them, and the units of their rows if they are halves. The sign of the scale goes into
    the halves of q."""
    count = halves_of(problem, "fwd")
    if not count:
        return operands, ()
    signs = (-1.0 if problem.sm_scale < 0 else 1.0, 1.0, 1.0)
    made, units = zip(*(halve(t, count, sign) for t, sign in zip(operands, signs, strict=True)), strict=True)
    return made, units
