"""What the launches of the Hopper kernels share: descriptors of tiles, and the order of the work."""

from __future__ import annotations

from typing import Any

import torch
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from ...problem import Problem

__all__ = ["LOG2_E", "longest", "tile", "together"]

LOG2_E = 1.4426950408889634
# Heads whose streamed tiles fit this many bytes are worked on together, so that those stay in the L2 cache.
L2_BUDGET = 40 << 20
_TILE_LAYOUT = gl.NVMMASharedLayout(128, 16, 4)
_NARROW_LAYOUT = gl.NVMMASharedLayout(64, 16, 4)  # 32 columns


def tile(t: torch.Tensor, rows: int, width: int | None = None) -> Any:
    """A descriptor of tiles of ``rows`` rows of one head and ``width`` columns (default: all)."""
    columns = width or t.shape[-1]
    layout = _TILE_LAYOUT if columns >= 64 else _NARROW_LAYOUT
    # The stride of a dim of size 1 is never used, but it must be a multiple of 16 bytes like the others.
    strides = [t.shape[-1] if size == 1 else stride for size, stride in zip(t.shape[:3], t.stride()[:3], strict=True)]
    return TensorDescriptor(t, list(t.shape), [*strides, 1], [1, 1, rows, columns], layout)


def together(heads: int, sharing: int, bytes_a_head: int) -> int:
    """How many heads to work on together: a divisor of ``heads`` whose streamed tiles fit the budget."""
    fit = max(1, min(heads, sharing * max(1, L2_BUDGET // max(1, bytes_a_head))))
    groups = -(-heads // fit)
    while heads % groups:
        groups += 1
    return heads // groups


def longest(problem: Problem, keys: bool) -> str:
    """Which end of the tile axis has the most work. Over queries an upper bound alone leaves it to the last and a lower bound alone
    to the first; over keys it is the other way round."""
    _, _, has_upper, has_lower = problem.bounds
    if has_upper == has_lower:
        return "any"
    return "last" if has_upper != keys else "first"
