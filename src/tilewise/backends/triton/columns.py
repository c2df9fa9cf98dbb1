"""Sums of the weights over all queries, one for each key: the loop of dk and dv without v.

A program owns a tile of keys of one query head and streams the queries that see it, in a fixed order:
``out = sum over queries of exp(s - lse)``. Nothing is added up in memory. Rows with lse = -inf have no weights: their lse is read
as +inf.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import torch
import triton
import triton.language as tl

from ... import configs
from ...plan import Masked
from ...problem import Problem
from ...spec import NO_TENSORS, Tensors
from ..launching import Launch, Plan
from . import _grid, _mask, _masked, _plan, _scores, _settings, _steps
from .parts import LENGTHS, LOG2_E, allowed, key_terms, listed, load_tile, of_queries, query_terms, schedule, seen, tile_range
from .scores import scored, weights

__all__ = ["column_sums", "launch_column_sums"]


@triton.jit
def _column_tiles(
    total, k_tile, q, lse_ptr, q_strides, batch, head, head_rows, kv_pos,
    seqlen_q, seqlen_k, q_start, upper, lower, qk_scale2, first, last, tiles, mask, of_key, score, start_n,
    STEPS: tl.constexpr, NATURAL: tl.constexpr, TAILS: tl.constexpr, RAGGED: tl.constexpr,
    MASKED: tl.constexpr, HAS_UPPER: tl.constexpr, HAS_LOWER: tl.constexpr,
    DTYPE: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr,
    PRECISION: tl.constexpr, BULK: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """Stream the query tiles ``first .. last`` (or at these places of a list) of one head past the resident key tile."""
    for m_block in tl.range(first, last):
        if tiles is not None:
            m_block = tl.load(tiles + m_block)
        start_m = m_block * BLOCK_M
        offs_m = start_m + tl.arange(0, BLOCK_M)
        q_tile = load_tile(q, q_strides, batch, head, start_m, seqlen_q, HEAD_DIM, BLOCK_M, BLOCK_D, BULK, WIDEN)
        # [BLOCK_N, BLOCK_M]
        s_t = tl.dot(k_tile, tl.trans(q_tile), input_precision=PRECISION) * qk_scale2
        if MASKED and RAGGED:
            s_t = of_queries(s_t, offs_m, seqlen_q, 0)
        if len(STEPS) > 0:
            s_t = scored(
                s_t, score, batch, head, start_m, start_n, q_start, seqlen_q, seqlen_k, True, MASKED,
                STEPS, NATURAL, TAILS, DTYPE, "",
            )[0]  # fmt: skip
        pivot = tl.load(lse_ptr + head_rows + offs_m, mask=offs_m < seqlen_q, other=float("inf"))
        pivot = tl.where(pivot == -float("inf"), float("inf"), pivot)
        if not NATURAL:
            pivot *= LOG2_E
        p_t = weights(s_t, pivot[None, :], 0.0, NATURAL)
        if MASKED:
            ok = allowed((q_start + offs_m)[None, :], kv_pos[:, None], seqlen_k, upper, lower, HAS_UPPER, HAS_LOWER)
            if tiles is not None:
                of_query = query_terms(mask, batch, head, offs_m, seqlen_q)
                ok = seen(ok, mask, of_query, of_key, batch, head, offs_m, kv_pos, start_n, seqlen_q, seqlen_k, True)
            p_t = tl.where(ok, p_t, 0.0)
        total += tl.sum(p_t, 1)
    return total


@triton.jit(do_not_specialize=LENGTHS)
def _column_kernel(
    q, k, lse_ptr, out_ptr, q_strides, k_strides, mask, table, table_batch, table_head, table_width, score,
    heads_q, group, seqlen_q, seqlen_k, q_start, upper, lower, qk_scale2, n_blocks,
    STEPS: tl.constexpr, NATURAL: tl.constexpr, TAILS: tl.constexpr, RAGGED: tl.constexpr,
    HAS_UPPER: tl.constexpr, HAS_LOWER: tl.constexpr, HAS_TAIL: tl.constexpr, REVERSED: tl.constexpr, FLAT: tl.constexpr,
    DTYPE: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    PRECISION: tl.constexpr, BULK: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """The sums of one tile of keys. Grid: key tiles x query heads x batch."""
    n_block, head, batch = schedule(n_blocks, heads_q, REVERSED, FLAT)
    start_n = n_block * BLOCK_N
    kv_pos = start_n + tl.arange(0, BLOCK_N)
    k_tile = load_tile(k, k_strides, batch, head // group, start_n, seqlen_k, HEAD_DIM, BLOCK_N, BLOCK_D, BULK, WIDEN)
    total = tl.zeros([BLOCK_N], tl.float32)
    # The plan transposed, as for dk and dv: the bounds swap their roles.
    row_end = min(start_n + BLOCK_N, seqlen_k)
    lo, free_lo, free_hi, hi = tile_range(
        start_n, row_end, seqlen_q, lower - q_start, upper + q_start, BLOCK_M, HAS_LOWER, HAS_UPPER
    )
    head_of_all = (batch * heads_q + head).to(tl.int64)
    head_rows = head_of_all * seqlen_q
    of_key = None
    tiles = None
    if table is not None:
        of_key = key_terms(mask, batch, kv_pos, seqlen_k)
        tiles, lo, free_lo, free_hi, hi = listed(table, table_batch, table_head, table_width, batch, head, n_block)
    if HAS_UPPER and table is None:
        total = _column_tiles(
            total, k_tile, q, lse_ptr, q_strides, batch, head, head_rows, kv_pos,
            seqlen_q, seqlen_k, q_start, upper, lower, qk_scale2, lo, free_lo, tiles, mask, of_key, score, start_n,
            STEPS, NATURAL, TAILS, RAGGED, True, HAS_UPPER, HAS_LOWER, DTYPE, HEAD_DIM, BLOCK_M, BLOCK_D, PRECISION, BULK, WIDEN,
        )  # fmt: skip
    total = _column_tiles(
        total, k_tile, q, lse_ptr, q_strides, batch, head, head_rows, kv_pos,
        seqlen_q, seqlen_k, q_start, upper, lower, qk_scale2, free_lo, free_hi, tiles, mask, of_key, score, start_n,
        STEPS, NATURAL, TAILS, RAGGED, False, HAS_UPPER, HAS_LOWER, DTYPE, HEAD_DIM, BLOCK_M, BLOCK_D, PRECISION, BULK, WIDEN,
    )  # fmt: skip
    if HAS_LOWER or HAS_TAIL:
        total = _column_tiles(
            total, k_tile, q, lse_ptr, q_strides, batch, head, head_rows, kv_pos,
            seqlen_q, seqlen_k, q_start, upper, lower, qk_scale2, free_hi, hi, tiles, mask, of_key, score, start_n,
            STEPS, NATURAL, TAILS, RAGGED, True, HAS_UPPER, HAS_LOWER, DTYPE, HEAD_DIM, BLOCK_M, BLOCK_D, PRECISION, BULK, WIDEN,
        )  # fmt: skip
    tl.store(out_ptr + head_of_all * seqlen_k + kv_pos, total, mask=kv_pos < seqlen_k)


def _columns(problem: Problem, config: configs.Config, mask: Masked | None = None, tensors: Tensors = NO_TENSORS) -> Plan:
    p = problem
    _, scalars, options = _settings(p, dataclasses.replace(config, split=1), "dv")
    masked, masked_options = _masked(p, config, mask)
    score, score_options = _scores(p, tensors, config)
    n_blocks, wide = triton.cdiv(p.seqlen_k, config.block_n), options["BLOCK_D"]
    grid, flat = _grid(n_blocks, p.heads_q, p.batch)
    heads_q, _, *others = scalars
    numbers = (*masked, score, heads_q, *others, p.sm_scale * _steps(p)[0], n_blocks)
    shared = {name: value for name, value in options.items() if name not in ("HEAD_DIM_V", "BLOCK_DV", "SPLIT")}
    return _plan(
        p, _column_kernel, grid, ((config.block_m, wide), (config.block_n, wide)), numbers,
        {**shared, **masked_options, **score_options, "FLAT": flat, "RAGGED": p.seqlen_q % config.block_m != 0},
    )  # fmt: skip


_columns_plan: Any = functools.lru_cache(maxsize=4096)(_columns)


def launch_column_sums(
    problem: Problem,
    config: configs.Config,
    q: torch.Tensor,
    k: torch.Tensor,
    lse: torch.Tensor,
    out: torch.Tensor,
    mask: Masked | None = None,
    tensors: Tensors = NO_TENSORS,
) -> Launch:
    return _columns(problem, config, mask, tensors).launch(q, k, lse, out)


def column_sums(
    problem: Problem, q: torch.Tensor, k: torch.Tensor, lse: torch.Tensor, out: torch.Tensor, tensors: Tensors = NO_TENSORS
) -> None:
    """Fill ``out`` (batch, heads_q, seqlen_k), float32, contiguous; so is ``lse``."""
    config = configs.lookup(problem, "dv")
    if tensors is NO_TENSORS:
        _columns_plan(problem, config).run(q, k, lse, out)
        return
    with torch.cuda.device_of(q):
        mask = _mask(problem, tensors, config, transposed=True)
        launch_column_sums(problem, config, q, k, lse, out, mask, tensors).run()
