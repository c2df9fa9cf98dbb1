"""Portable Triton kernels, and the launches that bind a problem's tensors to them.

``forward`` and ``backward`` look up the plan of each kernel, which keeps what it compiled, and run it on their tensors; the
compile-only tests turn the same plans into ``Launch`` values and compile them for a device that is not there.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from ... import configs
from ...configs import Config, padded
from ...problem import Problem
from ..launching import Launch, Plan
from . import bwd, fwd

__all__ = ["Launch", "backward", "forward", "launch_delta", "launch_dkdv", "launch_dq", "launch_fwd"]

LOG2_E = 1.4426950408889634
_GRID_LIMIT = 65_535  # of the second and third dim of a grid
_DTYPES = {"float16": tl.float16, "bfloat16": tl.bfloat16, "float32": tl.float32}


def _plan(
    problem: Problem,
    kernel: Any,
    grid: tuple[int, ...],
    tiles: tuple[tuple[int, int], ...],
    numbers: tuple[Any, ...],
    options: dict[str, Any],
) -> Plan:
    """The plan of a kernel whose first tensors are read in tiles of ``(rows, columns)``: by descriptors, or with their strides."""
    if not _bulk(problem):
        return Plan(kernel, grid, (None,) * len(tiles), numbers, options)
    blocks = tuple((1, 1, rows, columns) for rows, columns in tiles)
    return Plan(kernel, grid, blocks, (*((0, 0, 0, 0),) * len(tiles), *numbers), options, TensorDescriptor)


def _bulk(problem: Problem) -> bool:
    return problem.bulk and (problem.arch.bulk_copy or problem.arch.kind == "cpu")


def _grid(tiles: int, heads: int, batch: int) -> tuple[tuple[int, ...], bool]:
    """The grid, and whether it is flat (``parts.schedule``)."""
    if heads <= _GRID_LIMIT and batch <= _GRID_LIMIT:
        return (tiles, heads, batch), False
    return (tiles * heads * batch,), True


@functools.lru_cache(maxsize=4096)
def _settings(problem: Problem, config: Config, keys_resident: bool) -> tuple[tuple[int, ...], tuple[Any, ...], dict[str, Any]]:
    """``(grid, scalar arguments, options)`` of a launch: all that does not depend on where the tensors lie.

    The scalars are those of the kernels from ``heads_q`` to ``lower``; the number of tiles and the scales follow in the launch.
    """
    p = problem
    upper, lower, has_upper, has_lower = p.bounds
    if keys_resident:
        tiles, heads, tail = triton.cdiv(p.seqlen_k, config.block_n), p.heads_kv, p.seqlen_q % config.block_m != 0
    else:
        tiles, heads, tail = triton.cdiv(p.seqlen_q, config.block_m), p.heads_q, p.seqlen_k % config.block_n != 0
    grid, flat = _grid(tiles, heads, p.batch)
    precision = p.precision
    if p.dtype == "float32" and precision == "ieee" and p.arch.kind == "cuda":
        precision = "tf32x3"  # three TF32 products: as accurate as IEEE ones, and several times faster
    options = {
        "HAS_UPPER": has_upper,
        "HAS_LOWER": has_lower,
        "HAS_TAIL": tail,
        # An upper bound alone leaves the most work to the last queries and to the first keys, a lower bound alone the reverse.
        "REVERSED": has_upper != has_lower and has_upper != keys_resident,
        "FLAT": flat,
        "DTYPE": _DTYPES[p.dtype],
        "HEAD_DIM": p.head_dim,
        "HEAD_DIM_V": p.head_dim_v,
        "BLOCK_M": config.block_m,
        "BLOCK_N": config.block_n,
        "BLOCK_D": padded(p.head_dim),
        "BLOCK_DV": padded(p.head_dim_v),
        "PRECISION": precision,
        "BULK": _bulk(p),
        "WIDEN": p.dtype == "bfloat16" and p.arch.kind == "cpu",
        "num_warps": config.num_warps,
        "num_stages": config.num_stages,
        "enable_fp_fusion": True,  # Triton 3.10 turns its default off
    }
    heads_of = (p.heads_q, p.heads_kv) if keys_resident else (p.heads_q,)
    return grid, (*heads_of, p.group, p.seqlen_q, p.seqlen_k, p.q_start, upper, lower), options


def _columns(problem: Problem, names: str) -> tuple[int, ...]:
    """The width of a tile of each of these tensors: "q" stands for all that are as wide as q and k, "v" for v, o and do."""
    return tuple(padded(problem.head_dim if name == "q" else problem.head_dim_v) for name in names)


@functools.lru_cache(maxsize=4096)
def _fwd_plan(problem: Problem, config: Config) -> Plan:
    p = problem
    grid, scalars, options = _settings(p, config, False)
    tiles = tuple(zip((config.block_m, config.block_n, config.block_n, config.block_m), _columns(p, "qqvv"), strict=True))
    numbers = (*scalars, abs(p.sm_scale) * LOG2_E, triton.cdiv(p.seqlen_q, config.block_m))
    return _plan(p, fwd._fwd_kernel, grid, tiles, numbers, {**options, "NEGATIVE": p.sm_scale < 0})


@functools.lru_cache(maxsize=4096)
def _delta_plan(problem: Problem, has_dlse: bool) -> Plan:
    p = problem
    block_dv = padded(p.head_dim_v)
    block_m = max(16, 4096 // block_dv)
    m_blocks = triton.cdiv(p.seqlen_q, block_m)
    grid, flat = _grid(m_blocks, p.heads_q, p.batch)
    options = {"FLAT": flat, "HAS_DLSE": has_dlse, "HEAD_DIM_V": p.head_dim_v, "BLOCK_M": block_m, "BLOCK_DV": block_dv}
    options |= {"num_warps": 4, "enable_fp_fusion": True}
    return Plan(bwd._delta_kernel, grid, (None, None), (p.heads_q, p.seqlen_q, m_blocks), options)


@functools.lru_cache(maxsize=4096)
def _dkdv_plan(problem: Problem, config: Config, need_dk: bool, need_dv: bool) -> Plan:
    p = problem
    grid, scalars, options = _settings(p, config, True)
    rows = (config.block_m, config.block_n, config.block_n, config.block_m, config.block_n, config.block_n)
    tiles = tuple(zip(rows, _columns(p, "qqvvqv"), strict=True))
    numbers = (*scalars, p.sm_scale * LOG2_E, p.sm_scale, triton.cdiv(p.seqlen_k, config.block_n))
    return _plan(p, bwd._dkdv_kernel, grid, tiles, numbers, {**options, "NEED_DK": need_dk, "NEED_DV": need_dv})


@functools.lru_cache(maxsize=4096)
def _dq_plan(problem: Problem, config: Config) -> Plan:
    p = problem
    grid, scalars, options = _settings(p, config, False)
    rows = (config.block_m, config.block_n, config.block_n, config.block_m, config.block_m)
    tiles = tuple(zip(rows, _columns(p, "qqvvq"), strict=True))
    numbers = (*scalars, p.sm_scale * LOG2_E, p.sm_scale, triton.cdiv(p.seqlen_q, config.block_m))
    return _plan(p, bwd._dq_kernel, grid, tiles, numbers, options)


def launch_fwd(
    problem: Problem, config: Config, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, o: torch.Tensor, lse: torch.Tensor
) -> Launch:
    return _fwd_plan(problem, config).launch(q, k, v, o, lse)


def launch_delta(
    problem: Problem, o: torch.Tensor, do: torch.Tensor, dlse: torch.Tensor | None, lse: torch.Tensor, delta: torch.Tensor
) -> Launch:
    return _delta_plan(problem, dlse is not None).launch(o, do, lse if dlse is None else dlse, lse, delta)


def _outputs(
    k: torch.Tensor, v: torch.Tensor, dk: torch.Tensor | None, dv: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """A gradient that nobody asked for gets its input in its place; the kernel does not touch it."""
    return (k if dk is None else dk, v if dv is None else dv)


def launch_dkdv(
    problem: Problem,
    config: Config,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    do: torch.Tensor,
    lse: torch.Tensor,
    delta: torch.Tensor,
    dk: torch.Tensor | None,
    dv: torch.Tensor | None,
) -> Launch:
    plan = _dkdv_plan(problem, config, dk is not None, dv is not None)
    return plan.launch(q, k, v, do, *_outputs(k, v, dk, dv), lse, delta)


def launch_dq(
    problem: Problem,
    config: Config,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    do: torch.Tensor,
    lse: torch.Tensor,
    delta: torch.Tensor,
    dq: torch.Tensor,
) -> Launch:
    return _dq_plan(problem, config).launch(q, k, v, do, dq, lse, delta)


def forward(problem: Problem, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, o: torch.Tensor, lse: torch.Tensor) -> None:
    """Fill ``o`` and ``lse`` (backend interface)."""
    _fwd_plan(problem, configs.lookup(problem, "fwd")).run(q, k, v, o, lse)


def backward(
    problem: Problem,
    do: torch.Tensor,
    dlse: torch.Tensor | None,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    o: torch.Tensor,
    lse: torch.Tensor,
    dq: torch.Tensor | None,
    dk: torch.Tensor | None,
    dv: torch.Tensor | None,
) -> None:
    """Fill the gradients that are not None (backend interface)."""
    # delta has no use for dv alone, but then it only has to be readable memory.
    delta = torch.empty_like(lse) if dq is not None or dk is not None else lse
    if delta is not lse:
        _delta_plan(problem, dlse is not None).run(o, do, lse if dlse is None else dlse.contiguous(), lse, delta)
    together = [("dkdv", dk, dv)] if not configs.splits_dkdv(problem) else [("dv", None, dv), ("dk", dk, None)]
    for name, dk_out, dv_out in together:
        if dk_out is not None or dv_out is not None:
            plan = _dkdv_plan(problem, configs.lookup(problem, name), dk_out is not None, dv_out is not None)
            plan.run(q, k, v, do, *_outputs(k, v, dk_out, dv_out), lse, delta)
    if dq is not None:
        _dq_plan(problem, configs.lookup(problem, "dq")).run(q, k, v, do, dq, lse, delta)
