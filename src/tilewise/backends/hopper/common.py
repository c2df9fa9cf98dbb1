"""What the launches of the Hopper kernels share: plans with descriptors, and the order of the work."""

from __future__ import annotations

from typing import Any

import torch
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from ...problem import Problem
from ..launching import Plan

__all__ = ["LOG2_E", "descriptor", "longest", "plan", "together"]

LOG2_E = 1.4426950408889634
# Heads whose streamed tiles fit this many bytes are worked on together, so that those stay in the L2 cache.
L2_BUDGET = 40 << 20
_ROWS_LAYOUT = gl.NVMMASharedLayout(0, 32, 2)


def descriptor(t: torch.Tensor, shape: list[int], strides: list[int], block: list[int]) -> Any:
    """A descriptor of tiles [1, ..., rows, columns], swizzled by the bytes of a row up to 128, or of float32 numbers [1, rows]."""
    layout = _ROWS_LAYOUT if len(block) == 2 else gl.NVMMASharedLayout(min(128, 2 * block[-1]), 16, len(block))
    return TensorDescriptor(t, shape, strides, block, layout)


def plan(
    kernel: Any, programs: int, blocks: tuple[tuple[int, ...], ...], numbers: tuple[Any, ...], options: dict[str, Any]
) -> Plan:
    """The launches of a kernel in a grid of one dim. ``blocks``: of the descriptors of its first tensors."""
    return Plan(kernel, (programs,), blocks, numbers, options, descriptor, "hopper")


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
