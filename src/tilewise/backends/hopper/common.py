"""What the launches of the Hopper kernels share: plans with descriptors, and the order of the work."""

from __future__ import annotations

import math
from typing import Any

import torch
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from ...plan import BlockTable, MaskTensors, Place, packed_of
from ...problem import Problem
from ...spec import SLOTS, Tensors
from ..holes import Layout, holes_of, layout_of, mask_of, there
from ..launching import Plan, broadcast_strides
from ..tables import fill_table

__all__ = [
    "LOG2_E",
    "SMALLEST_SCALE",
    "cap_numbers",
    "descriptor",
    "given",
    "longest",
    "named",
    "plan",
    "term_numbers",
    "term_options",
    "together",
]

# Below this, or negative, the scale is applied before the maximum is taken: -inf times a scale that is 0 in float32 would be NaN.
SMALLEST_SCALE = 1e-30
# ALiBi is added by a product only to scores whose scale is not below this: the slope is divided by it.
SMALLEST_RAMP_SCALE = 2.0**-20
# Beyond this ratio of scale and cap the coefficients of a polynomial leave float32.
FARTHEST = 1e12

LOG2_E = 1.4426950408889634
# Heads whose streamed tiles fit this many bytes are worked on together, so that those stay in the L2 cache.
L2_BUDGET = 40 << 20
_ROWS_LAYOUT = gl.NVMMASharedLayout(0, 32, 2)
_DS_LAYOUT = gl.NVMMASharedLayout(0, 16, 3)


def descriptor(t: torch.Tensor, shape: list[int], strides: list[int], block: list[int]) -> Any:
    """A descriptor of tiles [1, ..., rows, columns], swizzled by the bytes of a row up to 128; of float32 numbers [1, rows]; or of
    tiles of ds [1, rows, 64], which are copied as they lie."""
    if len(block) == 3:
        return TensorDescriptor(t, shape, strides, block, _DS_LAYOUT)
    layout = _ROWS_LAYOUT if len(block) == 2 else gl.NVMMASharedLayout(min(128, 2 * block[-1]), 16, len(block))
    return TensorDescriptor(t, shape, strides, block, layout)


def plan(
    kernel: Any,
    programs: int,
    blocks: tuple[tuple[int, ...], ...],
    numbers: tuple[Any, ...],
    options: dict[str, Any],
    named: int = 0,
    order: tuple[int, ...] | None = None,
) -> Plan:
    """The launches of a kernel in a grid of one dim. ``blocks``: of the descriptors of its first tensors."""
    return Plan(kernel, (programs,), blocks, numbers, options, descriptor, "hopper", named, order)


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


def cap_numbers(cap2: float, factor: float) -> tuple[float, ...]:
    """What ``terms.capped`` needs to make ``cap2 tanh(factor u / cap2)`` of numbers u: ``factor / cap2``, ``cap2``, ``factor``, and
    half the cap as a |u|, up to where it takes a polynomial (-1: nowhere); and, for ``capped_with_slope``, ``1 / cap2``."""
    c = factor / cap2
    reach = -1.0 if abs(c) > FARTHEST else 0.5 / abs(c) if c else math.inf
    return tuple(max(min(x, 1e38), -1e38) for x in (c, cap2, factor, reach, 1 / cap2))


def term_options(problem: Problem) -> dict[str, Any]:
    """What the kernels are compiled for besides bounds (``terms.py``)."""
    p = problem
    steps = p.spec.steps
    _, _, has_upper, _ = p.bounds
    left = has_upper and p.bounds[0] <= 0  # no query sees a key right of it
    ramp = steps == ("alibi",) and left and p.sm_scale * LOG2_E >= SMALLEST_RAMP_SCALE
    return {"STEPS": steps, "RAMP": ramp, "HAS_SINK": p.spec.sink, "LISTED": p.spec.segment or p.spec.row}


def term_numbers(problem: Problem, tensors: Tensors, table: BlockTable | None = None) -> tuple[Any, ...]:
    """The arguments from ``terms`` to ``table_width``."""
    p = problem
    if not p.spec.terms:
        return (None,) * 4
    cap = None
    if p.spec.softcap is not None:
        cap = cap_numbers(p.spec.softcap * LOG2_E, p.sm_scale * LOG2_E if p.spec.steps[0] == "softcap" else 1.0)

    def given(t: torch.Tensor | None) -> Any:
        return None if t is None else (t, broadcast_strides(t))

    own = MaskTensors.of(tensors)
    mask = None if own is None else (tuple(own[:4]), tuple(None if t is None else broadcast_strides(t) for t in own[:4]))
    lists = (None,) * 3 if table is None else table.steps
    return (cap, given(tensors.slopes), given(tensors.sink), mask, None if table is None else tuple(table)), *lists


_PLAN = SLOTS.index("plan")


def given(
    problem: Problem, tensors: Tensors, block_m: int, block_n: int, transposed: bool = False
) -> tuple[list[torch.Tensor], tuple[Layout, Place | None]]:
    """The tensors that a launch names besides the kernel's own, among them the table of the mask; and what ``named`` is told."""
    packed, place = packed_of(problem, tensors, block_m, block_n, transposed, fill_table)
    every = (*tensors[:_PLAN], packed, *tensors[_PLAN + 1 :])
    return there(every), (layout_of(every), place)


def named(layout: Layout, place: Place | None) -> tuple[Tensors, BlockTable | None, int]:
    """Holes for the tensors of a spec and the table of its mask; how many are there."""
    tensors, mask = mask_of(holes_of(layout), place)
    return tensors, None if mask is None else mask.table, len(layout) - layout.count(None)
