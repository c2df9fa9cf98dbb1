"""The launches of the kernels in ``wide.py`` and ``wide_fwd.py``."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
import triton

from ...configs.halves import halves_of
from ...configs.wide import Walk, WideConfig, config_of, forward_units, units_kept
from ...plan import Geometry, Masked
from ...problem import Problem
from ...spec import NO_TENSORS, Tensors
from ..launching import Launch, Plan
from . import wide, wide_fwd
from .halves_launch import halve

__all__ = [
    *("Kept", "geometries", "keep", "launch_columns", "launch_tile_weights", "launch_values", "launch_weights"),
    *("run", "run_forward"),
]


def geometries(problem: Problem) -> list[Geometry]:
    """The tables that these kernels read: ``(block_m, block_n, transposed)``."""
    tile = config_of(problem).weights
    return [(tile.block_m, tile.block_n, side) for side in (False, *([True] if set(problem.grad) & set("kv") else []))]


def _constants(problem: Problem, config: WideConfig) -> dict[str, Any]:
    from . import _settings

    _, _, options = _settings(problem, config.weights, "weights")
    names = ("HAS_UPPER", "HAS_LOWER", "BLOCK_M", "BLOCK_N", "PRECISION", "BULK", "WIDEN", "enable_fp_fusion")
    return {name: options[name] for name in names}


def _blocks(problem: Problem, config: WideConfig) -> tuple[int, int]:
    return triton.cdiv(problem.seqlen_q, config.weights.block_m), triton.cdiv(problem.seqlen_k, config.weights.block_n)


@dataclass(frozen=True)
class Kept:
    """What is kept of ``heads`` query heads: p, ds as dk reads it and ds as dq does, [1, heads, queries, keys], or their halves.

    Those have ``units``, [heads, tiles, places]. One tensor stands for another that nobody ``needs`` (letters of the gradients); a
    whole ds is both.
    """

    heads: int
    needs: str
    tensors: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
    units: tuple[torch.Tensor, ...]


def keep(problem: Problem, config: WideConfig, count: int, needs: str, dtype: torch.dtype, device: torch.device) -> Kept:
    """Memory for what is kept of ``count`` heads of keys."""
    m_blocks, n_blocks = _blocks(problem, config)
    heads, height, width = count * problem.group, m_blocks * config.weights.block_m, n_blocks * config.weights.block_n
    halves = halves_of(problem, "weights")
    made = {
        name: torch.empty((1, heads * (halves or 1), height, width), dtype=dtype, device=device)
        for name in (needs if halves else {{"v": "p"}.get(letter, "ds") for letter in needs})
    }
    other = next(iter(made.values()))
    names = "vkq" if halves else ("p", "ds", "ds")
    p, dsk, dsq = (made.get(name, other) for name in names)
    if not halves:
        return Kept(heads, needs, (p, dsk, dsq), ())
    of_keys = torch.empty((2, heads, m_blocks, width), dtype=torch.float32, device=device)
    return Kept(heads, needs, (p, dsk, dsq), (*of_keys, torch.empty((heads, n_blocks, height), dtype=torch.float32, device=device)))


def _weights(
    problem: Problem,
    config: WideConfig,
    first: int,
    heads: int,
    needs: str,
    mask: Masked | None = None,
    tensors: Tensors = NO_TENSORS,
) -> Plan:
    """The plan of ``launch_weights`` for ``heads`` kept query heads. ``needs``: letters of the gradients that are made of them."""
    from . import _masked, _plan, _scores, _settings, _steps

    x, tile = problem, config.weights
    masked, _ = _masked(x, tile, mask)
    score, score_options = _scores(x, tensors, tile)
    m_blocks, n_blocks = _blocks(x, config)
    _, scalars, options = _settings(x, tile, "weights")
    heads_q, *others = scalars
    numbers = (
        *(*masked, score, first, heads_q, x.heads_kv),
        *(*others, x.sm_scale * _steps(x)[0], m_blocks, n_blocks),
    )
    halves = halves_of(x, "weights")
    own = {"CHUNK": config.chunk, "DTYPE": options["DTYPE"], "RAGGED": x.seqlen_q % tile.block_m != 0, "HALVES": halves}
    own |= {f"NEED_D{letter.upper()}": letter in needs for letter in "vkq"}
    own |= {"HEAD_DIM": x.head_dim, "HEAD_DIM_V": x.head_dim_v, "num_warps": tile.num_warps, "num_stages": tile.num_stages}
    tiles = tuple((rows, config.chunk) for rows in (tile.block_m, tile.block_n, tile.block_n, tile.block_m))
    tiles += ((tile.block_m, tile.block_n),) * 3
    grid = (m_blocks * n_blocks, heads, 1)
    # Whole operands have no units: what weights are measured from stands for them.
    order = None if halves else (*range(9), *(7,) * 7)
    options = {**_constants(x, config), **score_options, **own}
    return _plan(x, wide._weights_kernel, grid, tiles, numbers, options, order=order)


def launch_weights(
    problem: Problem,
    config: WideConfig,
    first: int,
    given: tuple[torch.Tensor, ...],
    kept: Kept,
    mask: Masked | None = None,
    tensors: Tensors = NO_TENSORS,
    units: tuple[torch.Tensor, ...] = (),
) -> Launch:
    """What is kept is that of the heads of keys from ``first`` on.

    ``given``: q, k, v, do, what weights are measured from, and delta; ``units``: those of the rows of the first four, if halves.
    """
    plan = _weights(problem, config, first, kept.heads, kept.needs, mask, tensors)
    return plan.launch(*given[:4], *kept.tensors, *given[4:], *kept.units, *units)


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
    (_, *table), _ = _masked(x, tile, mask)
    m_blocks, n_blocks = _blocks(x, config)
    _, (_, *others), options = _settings(x, tile, "weights")
    columns = min(walk.columns, max(16, triton.next_power_of_2(size)))
    parts = triton.cdiv(size, columns)
    grid = ((n_blocks if keys_resident else m_blocks) * parts, heads // x.group if keys_resident else heads, 1)
    numbers = (*table, first, x.heads_kv, *others, scale, m_blocks)
    block = tile.block_n if keys_resident else tile.block_m
    tiles = ((walk.step, block) if keys_resident else (block, walk.step), (walk.step, columns), (block, columns))
    halves = halves_of(x, "weights")
    own = {
        "HALVES": halves,
        "SIZE": size,
        "COLS": columns,
        "STEP": walk.step,
        "num_warps": walk.num_warps,
        "num_stages": walk.num_stages,
    }
    kernel = wide._keys_kernel if keys_resident else wide._queries_kernel
    own |= {} if keys_resident else {"REVERSED": options["REVERSED"]}
    order = None if halves else (0, 1, 2, 2)
    return _plan(x, kernel, grid, tiles, numbers, {**_constants(x, config), **own}, order=order)


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
    units: tuple[torch.Tensor, ...] = (),
) -> Launch:
    """``out = scale kept^T rows`` (dk, dv) if ``keys_resident``, else ``scale kept rows`` (dq), for the heads that are kept;
    ``units``: that of what is kept in halves."""
    heads = kept.shape[1] // (halves_of(problem, "weights") or 1)
    plan = _columns(problem, config, walk, first, heads, out.shape[-1], scale, keys_resident, mask)
    return plan.launch(kept, rows, out, *units)


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
    halves, units = halves_of(x, "weights"), ()
    if halves:
        operands, units = zip(*(halve(t, halves) for t in given[:4]), strict=True)
        given = (*operands, *given[4:])
    q, k, _, do = given[:4]
    by_rows = _mask(x, tensors, config.weights)
    by_keys = None if dk is None and dv is None else _mask(x, tensors, config.weights, transposed=True)
    needs = "".join(letter for letter, grad in zip("vkq", (dv, dk, dq), strict=True) if grad is not None)
    kept = keep(x, config, count, needs, q.dtype, q.device)
    products = zip(kept.tensors, kept.units or (None,) * 3, (do, q, k), (dv, dk, dq), (1.0, x.sm_scale, x.sm_scale), strict=True)
    products = [each for each in products if each[3] is not None]
    plain, heads_kv = tensors is NO_TENSORS, x.batch * x.heads_kv
    for first in range(0, heads_kv, count):
        heads = min(count, heads_kv - first) * x.group
        what = (x, config, first, heads, needs)
        made = _weights_plan(*what) if plain else _weights(*what, by_rows, tensors)
        made.run(*given[:4], *kept.tensors, *given[4:], *kept.units, *units)
        for source, unit, rows, out, scale in products:
            keys_resident = out is not dq
            walk = config.keys if keys_resident else config.queries
            what = (x, config, walk, first, heads, out.shape[-1], scale, keys_resident)
            plan = _columns_plan(*what) if plain else _columns(*what, by_keys if keys_resident else by_rows)
            plan.run(source, rows, out, *(() if unit is None else (unit,)))


def _tile_weights(
    problem: Problem, config: WideConfig, first: int, heads: int, mask: Masked | None = None, tensors: Tensors = NO_TENSORS
) -> Plan:
    """The plan of ``launch_tile_weights`` for ``heads`` kept query heads."""
    from . import _masked, _plan, _scores, _settings, _steps

    x, tile = problem, config.weights
    masked, _ = _masked(x, tile, mask)
    score, score_options = _scores(x, tensors, tile)
    m_blocks, n_blocks = _blocks(x, config)
    _, (_, *others), options = _settings(x, tile, "weights")
    numbers = (*masked, score, first, x.heads_kv, *others, x.sm_scale * _steps(x)[0], m_blocks, n_blocks)
    own = {"CHUNK": config.chunk, "DTYPE": options["DTYPE"], "HEAD_DIM": x.head_dim}
    own |= {"num_warps": tile.num_warps, "num_stages": tile.num_stages}
    tiles = ((tile.block_m, config.chunk), (tile.block_n, config.chunk))
    options = {**_constants(x, config), **score_options, **own}
    return _plan(x, wide_fwd._tile_weights_kernel, (m_blocks * n_blocks, heads, 1), tiles, numbers, options)


def launch_tile_weights(
    problem: Problem,
    config: WideConfig,
    first: int,
    q: torch.Tensor,
    k: torch.Tensor,
    p: torch.Tensor,
    pivots: torch.Tensor,
    sums: torch.Tensor,
    mask: Masked | None = None,
    tensors: Tensors = NO_TENSORS,
) -> Launch:
    """``p`` [1, kept query heads, queries, keys], and ``pivots`` and ``sums`` [kept query heads, tiles of keys, queries]."""
    return _tile_weights(problem, config, first, p.shape[1], mask, tensors).launch(q, k, p, pivots, sums)


def _values(
    problem: Problem,
    config: WideConfig,
    first: int,
    heads: int,
    mask: Masked | None = None,
    tensors: Tensors = NO_TENSORS,
    rows: torch.Tensor | None = None,
) -> Plan:
    """The plan of ``launch_values`` for ``heads`` kept query heads."""
    from . import _masked, _plan, _settings, _sink, _steps

    x, tile, walk = problem, config.weights, config.values
    (_, *table), _ = _masked(x, tile, mask)
    m_blocks, n_blocks = _blocks(x, config)
    _, scalars, options = _settings(x, tile, "weights")
    heads_q, *others = scalars
    columns = min(walk.columns, max(16, triton.next_power_of_2(x.head_dim_v)))
    grid = (m_blocks * triton.cdiv(x.head_dim_v, columns), heads, 1)
    numbers = (*table, _sink(tensors), rows, first, heads_q, x.heads_kv, *others, m_blocks, n_blocks)
    tiles = ((tile.block_m, walk.step), (walk.step, columns), (tile.block_m, columns))
    own = {"NATURAL": _steps(x)[0] == 1.0, "REVERSED": options["REVERSED"], "DTYPE": options["DTYPE"], "SIZE": x.head_dim_v}
    own |= {"COLS": columns, "STEP": walk.step, "num_warps": walk.num_warps, "num_stages": walk.num_stages}
    return _plan(x, wide_fwd._values_kernel, grid, tiles, numbers, {**_constants(x, config), **own})


def launch_values(
    problem: Problem,
    config: WideConfig,
    first: int,
    p: torch.Tensor,
    v: torch.Tensor,
    o: torch.Tensor,
    lse: torch.Tensor,
    pivots: torch.Tensor,
    sums: torch.Tensor,
    mask: Masked | None = None,
    tensors: Tensors = NO_TENSORS,
    rows: torch.Tensor | None = None,
) -> Launch:
    """``o`` and ``lse`` of the heads that are kept."""
    return _values(problem, config, first, p.shape[1], mask, tensors, rows).launch(p, v, o, lse, pivots, sums)


_tile_weights_plan, _values_plan = (functools.lru_cache(maxsize=4096)(make) for make in (_tile_weights, _values))


def run_forward(
    problem: Problem, given: tuple[torch.Tensor, ...], tensors: Tensors = NO_TENSORS, rows: torch.Tensor | None = None
) -> None:
    """Fill ``o`` and ``lse``, and ``rows`` if given. ``given``: what the kernels of narrow heads take, q, k, v, o and lse."""
    from . import _mask

    q, k, v, o, lse = given
    x, config, count = problem, config_of(problem), forward_units(problem)
    mask = _mask(x, tensors, config.weights)
    m_blocks, n_blocks = _blocks(x, config)
    queries = m_blocks * config.weights.block_m
    p = torch.empty((1, count * x.group, queries, n_blocks * config.weights.block_n), dtype=q.dtype, device=q.device)
    pivots, sums = torch.empty((2, count * x.group, n_blocks, queries), dtype=torch.float32, device=q.device)
    plain = tensors is NO_TENSORS
    for first in range(0, x.batch * x.heads_kv, count):
        heads = min(count, x.batch * x.heads_kv - first) * x.group
        made = _tile_weights_plan(x, config, first, heads) if plain else _tile_weights(x, config, first, heads, mask, tensors)
        made.run(q, k, p, pivots, sums)
        done = _values_plan(x, config, first, heads) if plain else _values(x, config, first, heads, mask, tensors, rows)
        done.run(p, v, o, lse, pivots, sums)
