"""The launches of the kernels in ``wide.py``."""

from __future__ import annotations

import functools
from typing import Any

import torch
import triton

from ...configs.split import parts_of
from ...configs.wide import Walk, WideConfig, config_of, units_kept
from ...plan import Geometry, Masked
from ...problem import Problem
from ...spec import NO_TENSORS, Tensors
from ..launching import Launch, Plan
from . import wide
from .split_launch import split_of

__all__ = ["geometries", "launch_columns", "launch_weights", "run"]


def geometries(problem: Problem) -> list[Geometry]:
    """The tables that these kernels read: ``(block_m, block_n, transposed)``."""
    tile = config_of(problem).weights
    return [(tile.block_m, tile.block_n, side) for side in (False, *([True] if set(problem.grad) & set("kv") else []))]


def _constants(problem: Problem, config: WideConfig) -> dict[str, Any]:
    from . import _settings

    _, _, options = _settings(problem, config.weights, "weights")
    names = ("HAS_UPPER", "HAS_LOWER", "BLOCK_M", "BLOCK_N", "PRECISION", "BULK", "WIDEN", "enable_fp_fusion")
    return {**{name: options[name] for name in names}, "PARTS": parts_of(problem, "kept")}


def _blocks(problem: Problem, config: WideConfig) -> tuple[int, int]:
    return triton.cdiv(problem.seqlen_q, config.weights.block_m), triton.cdiv(problem.seqlen_k, config.weights.block_n)


def _weights(
    problem: Problem,
    config: WideConfig,
    first: int,
    heads: int,
    need_p: bool,
    need_ds: bool,
    mask: Masked | None = None,
    tensors: Tensors = NO_TENSORS,
) -> Plan:
    """The plan of ``launch_weights`` for ``heads`` kept query heads."""
    from . import _masked, _plan, _scores, _settings, _steps

    x, tile = problem, config.weights
    masked, _ = _masked(mask)
    score, score_options = _scores(x, tensors, tile)
    m_blocks, n_blocks = _blocks(x, config)
    _, scalars, options = _settings(x, tile, "weights")
    heads_q, *others = scalars
    numbers = (
        *(*masked, score, first, heads_q, x.heads_kv),
        *(*others, x.sm_scale * _steps(x)[0], m_blocks, n_blocks),
    )
    own = {"NEED_P": need_p, "NEED_DS": need_ds, "CHUNK": config.chunk, "DTYPE": options["DTYPE"]}
    own |= {"KEPT": parts_of(x, "kept"), "PARTS": parts_of(x, "weights")}
    own |= {"HEAD_DIM": x.head_dim, "HEAD_DIM_V": x.head_dim_v, "num_warps": tile.num_warps, "num_stages": tile.num_stages}
    tiles = tuple((rows, config.chunk) for rows in (tile.block_m, tile.block_n, tile.block_n, tile.block_m))
    grid = (m_blocks * n_blocks, heads, 1)
    return _plan(x, wide._weights_kernel, grid, tiles, numbers, {**_constants(x, config), **score_options, **own})


def launch_weights(
    problem: Problem,
    config: WideConfig,
    first: int,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    do: torch.Tensor,
    pivots: torch.Tensor,
    delta: torch.Tensor,
    p: torch.Tensor | None,
    ds: torch.Tensor | None,
    mask: Masked | None = None,
    tensors: Tensors = NO_TENSORS,
) -> Launch:
    """``p`` and ``ds`` [1, kept query heads, queries, keys] from the head of keys ``first`` on; None is not made."""
    kept = next(t for t in (p, ds) if t is not None)
    heads = kept.shape[1] // parts_of(problem, "kept")
    plan = _weights(problem, config, first, heads, p is not None, ds is not None, mask, tensors)
    return plan.launch(q, k, v, do, pivots, delta, kept if p is None else p, kept if ds is None else ds)


def _columns(
    problem: Problem,
    config: WideConfig,
    walk: Walk,
    first: int,
    heads: int,
    size: int,
    scale: float,
    keys_resident: bool,
    mask: Masked | None = None,
) -> Plan:
    """The plan of ``launch_columns`` for ``heads`` kept query heads and a result of ``size`` columns."""
    from . import _masked, _plan, _settings

    x, tile = problem, config.weights
    (_, *table), _ = _masked(mask)
    m_blocks, n_blocks = _blocks(x, config)
    _, (_, *others), _ = _settings(x, tile, "weights")
    columns = min(walk.columns, max(16, triton.next_power_of_2(size)))
    parts = triton.cdiv(size, columns)
    grid = ((n_blocks if keys_resident else m_blocks) * parts, heads // x.group if keys_resident else heads, 1)
    numbers = (*table, first, x.heads_kv, *others, scale, m_blocks)
    block = tile.block_n if keys_resident else tile.block_m
    tiles = ((walk.step, block) if keys_resident else (block, walk.step), (walk.step, columns), (block, columns))
    own = {"SIZE": size, "COLS": columns, "STEP": walk.step, "num_warps": walk.num_warps, "num_stages": walk.num_stages}
    kernel = wide._keys_kernel if keys_resident else wide._queries_kernel
    return _plan(x, kernel, grid, tiles, numbers, {**_constants(x, config), **own})


def launch_columns(
    problem: Problem,
    config: WideConfig,
    walk: Walk,
    first: int,
    kept: torch.Tensor,
    rows: torch.Tensor,
    out: torch.Tensor,
    scale: float,
    keys_resident: bool,
    mask: Masked | None = None,
) -> Launch:
    """``out = scale kept^T rows`` (dk, dv) if ``keys_resident``, else ``scale kept rows`` (dq), for the heads that are kept."""
    heads = kept.shape[1] // parts_of(problem, "kept")
    plan = _columns(problem, config, walk, first, heads, out.shape[-1], scale, keys_resident, mask)
    return plan.launch(kept, rows, out)


# The plans of calls without tensors in their spec, which keep what they compiled.
_weights_plan, _columns_plan = (functools.lru_cache(maxsize=4096)(make) for make in (_weights, _columns))


def run(
    problem: Problem,
    given: tuple[torch.Tensor, ...],
    dq: torch.Tensor | None,
    dk: torch.Tensor | None,
    dv: torch.Tensor | None,
    tensors: Tensors = NO_TENSORS,
) -> None:
    """Fill the gradients that are not None. ``given``: q, k, v, do, what weights are measured from, and delta."""
    from . import _mask

    x, config, count = problem, config_of(problem), units_kept(problem)
    q, k, v, do, *others = given
    parts, dtype = parts_of(x, "kept"), q.dtype
    if parts > 1:
        whole = parts_of(x, "weights") == 1
        q, k, do = (split_of(t, parts) for t in (q, k, do))
        given, dtype = given if whole else (q, k, split_of(v, parts), do, *others), q.dtype
    by_rows = _mask(x, tensors, config.weights)
    by_keys = None if dk is None and dv is None else _mask(x, tensors, config.weights, transposed=True)
    m_blocks, n_blocks = _blocks(x, config)
    units = x.batch * x.heads_kv
    shape = (1, count * x.group * parts, m_blocks * config.weights.block_m, n_blocks * config.weights.block_n)
    p = None if dv is None else torch.empty(shape, dtype=dtype, device=q.device)
    ds = None if dq is None and dk is None else torch.empty(shape, dtype=dtype, device=q.device)
    products = [(p, do, dv, 1.0, True), (ds, q, dk, x.sm_scale, True), (ds, k, dq, x.sm_scale, False)]
    kept = next(t for t in (p, ds) if t is not None)
    plain = tensors is NO_TENSORS
    for first in range(0, units, count):
        heads = min(count, units - first) * x.group
        need = (heads, p is not None, ds is not None)
        made = _weights_plan(x, config, first, *need) if plain else _weights(x, config, first, *need, by_rows, tensors)
        made.run(*given, kept if p is None else p, kept if ds is None else ds)
        for source, rows, out, scale, keys_resident in products:
            if source is not None and out is not None:
                walk = config.keys if keys_resident else config.queries
                what = (x, config, walk, first, heads, out.shape[-1], scale, keys_resident)
                plan = _columns_plan(*what) if plain else _columns(*what, by_keys if keys_resident else by_rows)
                plan.run(source, rows, out)
