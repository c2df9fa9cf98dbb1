"""Portable Triton kernels, and the launches that bind a problem's tensors to them.

A ``Launch`` is a value: the kernel, its grid and its arguments. ``forward`` and ``backward`` make launches and run them; the
compile-only tests make the same launches and compile them for a device that is not there.
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
from ...plan import Masked, MaskTensors, block_table, tile_kinds
from ...problem import Problem
from ...spec import NO_TENSORS, Tensors
from ..launching import Launch, broadcast_strides
from . import bwd, fwd

__all__ = ["Launch", "backward", "forward", "launch_delta", "launch_dkdv", "launch_dq", "launch_fwd"]

LOG2_E = 1.4426950408889634
_GRID_LIMIT = 65_535  # of the second and third dim of a grid
_DTYPES = {"float16": tl.float16, "bfloat16": tl.bfloat16, "float32": tl.float32}


def _tile(problem: Problem, t: torch.Tensor, rows: int) -> tuple[Any, tuple[int, ...]]:
    """``(source, strides)`` for tiles of ``rows`` rows of ``t``: a descriptor, or the tensor with its strides."""
    if not _bulk(problem):
        return t, tuple(t.stride())
    # The stride of a dim of size 1 is never used, but it must be a multiple of 16 bytes like the others.
    strides = [t.shape[-1] if size == 1 else stride for size, stride in zip(t.shape[:3], t.stride()[:3], strict=True)]
    return TensorDescriptor(t, list(t.shape), [*strides, 1], [1, 1, rows, padded(t.shape[-1])]), (0, 0, 0, 0)


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


def _masked(mask: Masked | None) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments from ``mask`` to ``table_width``, and what they change among the options."""
    if mask is None:
        return (None, None, 0, 0, 0), {}
    tensors = tuple(t.view(torch.uint8) if t is not None and t.dtype == torch.bool else t for t in mask.tensors)
    strides = tuple(None if t is None else broadcast_strides(t) for t in tensors)
    # There may be masked tiles whatever the lengths are.
    return ((tensors, strides), tuple(mask.table), *mask.table.steps), {"HAS_TAIL": True}


def _mask(problem: Problem, tensors: Tensors, config: Config, transposed: bool = False) -> Masked | None:
    """The tensors of the mask and the table of their tiles for a pass; None if the mask has only bounds."""
    own = MaskTensors.of(tensors)
    if own is None:
        return None
    return Masked(own, block_table(tile_kinds(problem, own, config.block_m, config.block_n, transposed), transposed))


def launch_fwd(
    problem: Problem,
    config: Config,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    o: torch.Tensor,
    lse: torch.Tensor,
    mask: Masked | None = None,
) -> Launch:
    p = problem
    grid, scalars, options = _settings(p, config, False)
    masked, masked_options = _masked(mask)
    rows = (config.block_m, config.block_n, config.block_n, config.block_m)
    tiles = [_tile(p, t, r) for t, r in zip((q, k, v, o), rows, strict=True)]
    args = (
        *(source for source, _ in tiles),
        lse,
        *(strides for _, strides in tiles),
        *masked,
        *(*scalars, abs(p.sm_scale) * LOG2_E, triton.cdiv(p.seqlen_q, config.block_m)),
    )
    return Launch(fwd._fwd_kernel, grid, args, {**options, **masked_options, "NEGATIVE": p.sm_scale < 0})


def launch_delta(
    problem: Problem, o: torch.Tensor, do: torch.Tensor, dlse: torch.Tensor | None, lse: torch.Tensor, delta: torch.Tensor
) -> Launch:
    p = problem
    block_dv = padded(p.head_dim_v)
    block_m = max(16, 4096 // block_dv)
    m_blocks = triton.cdiv(p.seqlen_q, block_m)
    rows = (lse if dlse is None else dlse, lse, delta)
    args = (o, do, *rows, tuple(o.stride()), tuple(do.stride()), p.heads_q, p.seqlen_q, m_blocks)
    grid, flat = _grid(m_blocks, p.heads_q, p.batch)
    options = {"FLAT": flat, "HAS_DLSE": dlse is not None, "HEAD_DIM_V": p.head_dim_v, "BLOCK_M": block_m, "BLOCK_DV": block_dv}
    return Launch(bwd._delta_kernel, grid, args, {**options, "num_warps": 4, "enable_fp_fusion": True})


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
    mask: Masked | None = None,
) -> Launch:
    p = problem
    grid, scalars, options = _settings(p, config, True)
    masked, masked_options = _masked(mask)
    # A gradient that nobody asked for gets its input in its place; the kernel does not touch it.
    outputs = (k if dk is None else dk, v if dv is None else dv)
    rows = (config.block_m, config.block_n, config.block_n, config.block_m, config.block_n, config.block_n)
    tiles = [_tile(p, t, r) for t, r in zip((q, k, v, do, *outputs), rows, strict=True)]
    args = (
        *(source for source, _ in tiles),
        *(lse, delta),
        *(strides for _, strides in tiles),
        *masked,
        *(*scalars, p.sm_scale * LOG2_E, p.sm_scale, triton.cdiv(p.seqlen_k, config.block_n)),
    )
    return Launch(bwd._dkdv_kernel, grid, args, {**options, **masked_options, "NEED_DK": dk is not None, "NEED_DV": dv is not None})


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
    mask: Masked | None = None,
) -> Launch:
    p = problem
    grid, scalars, options = _settings(p, config, False)
    masked, masked_options = _masked(mask)
    rows = (config.block_m, config.block_n, config.block_n, config.block_m, config.block_m)
    tiles = [_tile(p, t, r) for t, r in zip((q, k, v, do, dq), rows, strict=True)]
    args = (
        *(source for source, _ in tiles),
        *(lse, delta),
        *(strides for _, strides in tiles),
        *masked,
        *(*scalars, p.sm_scale * LOG2_E, p.sm_scale, triton.cdiv(p.seqlen_q, config.block_m)),
    )
    return Launch(bwd._dq_kernel, grid, args, {**options, **masked_options})


def forward(
    problem: Problem,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    o: torch.Tensor,
    lse: torch.Tensor,
    tensors: Tensors = NO_TENSORS,
    rows: torch.Tensor | None = None,
) -> None:
    """Fill ``o`` and ``lse`` (backend interface)."""
    with torch.cuda.device_of(q):
        config = configs.lookup(problem, "fwd")
        launch_fwd(problem, config, q, k, v, o, lse, _mask(problem, tensors, config)).run()


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
    tensors: Tensors = NO_TENSORS,
    rows: torch.Tensor | None = None,
    grads: Tensors = NO_TENSORS,
) -> None:
    """Fill the gradients that are not None (backend interface)."""
    with torch.cuda.device_of(q):
        # delta has no use for dv alone, but then it only has to be readable memory.
        delta = torch.empty_like(lse) if dq is not None or dk is not None else lse
        if delta is not lse:
            launch_delta(problem, o, do, None if dlse is None else dlse.contiguous(), lse, delta).run()
        together = [("dkdv", dk, dv)] if not configs.splits_dkdv(problem) else [("dv", None, dv), ("dk", dk, None)]
        for name, dk_out, dv_out in together:
            if dk_out is not None or dv_out is not None:
                config = configs.lookup(problem, name)
                mask = _mask(problem, tensors, config, transposed=True)
                launch_dkdv(problem, config, q, k, v, do, lse, delta, dk_out, dv_out, mask).run()
        if dq is not None:
            config = configs.lookup(problem, "dq")
            launch_dq(problem, config, q, k, v, do, lse, delta, dq, _mask(problem, tensors, config)).run()
