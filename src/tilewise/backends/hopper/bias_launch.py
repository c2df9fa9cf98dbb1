"""The launches of the Hopper kernels with an additive bias."""

from __future__ import annotations

import functools
from typing import Any

import torch

from ...configs.hopper import HopperConfig
from ...configs.hopper_backward import QueriesConfig, padded_rows
from ...configs.hopper_bias import DBIAS, DKDV, DQ, FWD, BiasKeysConfig, TileConfig, members, shared_config
from ...problem import Problem
from ..launching import Plan
from . import bias_dkdv, bias_dq, bias_fwd, bias_rows, bias_shared, dbias
from .common import longest, plan, together

__all__ = ["backward_with_bias", "dbias_plan", "dkdv_plan", "dq_plan", "fwd_plan", "picked_fwd", "rows_plan"]


def _of_bias(problem: Problem) -> dict[str, Any]:
    bias = problem.operand("bias")
    return {"BY_BATCH": bias is not None and bias.has("b"), "BY_HEAD": bias is not None and bias.has("h")}


def _bounds(problem: Problem, block_n: int) -> dict[str, Any]:
    _, _, has_upper, has_lower = problem.bounds
    return {"HAS_UPPER": has_upper, "HAS_LOWER": has_lower, "HAS_TAIL": problem.seqlen_k % block_n != 0}


def _together(problem: Problem, heads: int, bytes_a_head: int) -> int:
    """How many heads are worked on together: those that share tiles of the bias, as many as the L2 cache holds."""
    by = _of_bias(problem)
    sharing = heads if by["BY_BATCH"] else problem.batch
    if by["BY_BATCH"] and by["BY_HEAD"]:
        sharing = 1
    return together(sharing, 1, bytes_a_head)


@functools.lru_cache(maxsize=4096)
def fwd_plan(problem: Problem, config: HopperConfig) -> Plan:
    """Tensors: q, k, v, o, bias, lse, rows (lse where nobody keeps them), counter."""
    p = problem
    upper, lower, _, _ = p.bounds
    m_blocks = -(-p.seqlen_q // config.block_m)
    heads = p.batch * p.heads_q
    numbers = (
        *(p.sm_scale, p.heads_q, p.batch, p.group, p.seqlen_q, p.seqlen_k, p.q_start, upper, lower, m_blocks, heads),
        _together(p, p.heads_q, p.seqlen_k * (p.head_dim + p.head_dim_v) * p.itemsize),
    )
    options = {
        **_bounds(p, config.block_n),
        **_of_bias(p),
        "LONGEST": longest(p, False),
        "HEAD_DIM": p.head_dim,
        "BLOCK_M": config.block_m,
        "BLOCK_N": config.block_n,
        "STAGES": config.stages,
        "Q_SLOTS": config.q_slots,
        "OVERLAP": config.overlap,
        "DYNAMIC": config.dynamic,
        "KEEPS_ROWS": p.keeps_rows,
        "CONSUMER_REGISTERS": config.registers[0],
        "PRODUCER_REGISTERS": config.registers[1],
        "num_warps": 4,
        "enable_fp_fusion": True,
    }
    tiles = m_blocks * heads
    programs = min(tiles, p.arch.multiprocessors) if config.dynamic else tiles
    queries, keys, scores = (1, 1, 64, p.head_dim), (1, 1, config.block_n, p.head_dim), (1, 1, 64, config.block_n)
    return plan(bias_fwd._fwd_bias_kernel, programs, (queries, keys, keys, queries, scores), numbers, options)


@functools.lru_cache(maxsize=4096)
def picked_fwd(problem: Problem) -> tuple[Plan, bool]:
    """The plan of a forward pass, and whether it counts its tiles."""
    config = FWD[problem.head_dim][0]
    return fwd_plan(problem, config), config.dynamic


@functools.lru_cache(maxsize=4096)
def rows_plan(problem: Problem, has_dlse: bool) -> Plan:
    """Tensors: o, do, dlse (rows where there is none), rows, and the three numbers that are made."""
    p = problem
    block_m = max(16, min(128, 8192 // p.head_dim_v))
    m_blocks = padded_rows(p) // block_m
    options = {"HAS_DLSE": has_dlse, "HEAD_DIM_V": p.head_dim_v, "BLOCK_M": block_m, "BLOCK_DV": p.head_dim_v}
    options |= {"num_warps": 4, "enable_fp_fusion": True}
    numbers = (p.heads_q, p.seqlen_q, padded_rows(p), m_blocks)
    return Plan(bias_rows._bias_rows_kernel, (m_blocks * p.batch * p.heads_q,), (None, None), numbers, options)


@functools.lru_cache(maxsize=4096)
def dkdv_plan(problem: Problem, config: BiasKeysConfig, need_dk: bool, need_dv: bool) -> Plan:
    """Tensors: k, v, q, do, bias, references, sums, -delta, dk, dv."""
    p = problem
    upper, lower, _, _ = p.bounds
    n_blocks = -(-p.seqlen_k // config.block_n)
    heads = p.batch * p.heads_kv
    streamed = padded_rows(p) * (p.head_dim + p.head_dim_v) * p.itemsize * p.group
    numbers = (
        *(p.sm_scale, p.heads_kv, p.batch, p.group, padded_rows(p), p.seqlen_k, p.q_start, upper, lower, n_blocks, heads),
        _together(p, p.heads_kv, streamed),
    )
    options = {
        **_bounds(p, config.block_n),
        **_of_bias(p),
        "LONGEST": longest(p, keys=True),
        "NEED_DK": need_dk,
        "NEED_DV": need_dv,
        "HEAD_DIM": p.head_dim,
        "BLOCK_M": config.block_m,
        "BLOCK_N": config.block_n,
        "STAGES": config.stages,
        "CONSUMER_REGISTERS": config.consumer_registers,
        "FEEDER_REGISTERS": config.feeder_registers,
        "IN_REGISTERS": config.in_registers,
        "num_warps": 4,
        "enable_fp_fusion": True,
    }
    keys, queries, rows = (1, 1, 64, p.head_dim), (1, 1, config.block_m, p.head_dim), (1, config.block_m)
    blocks = (keys, keys, queries, queries, (1, 1, config.block_m, 64), rows, rows, rows, keys, keys)
    return plan(bias_dkdv._dkdv_bias_kernel, n_blocks * heads, blocks, numbers, options)


@functools.lru_cache(maxsize=4096)
def dq_plan(problem: Problem, config: QueriesConfig) -> Plan:
    """Tensors: q, k, v, do, bias, dq, references, sums, -delta."""
    p = problem
    upper, lower, _, _ = p.bounds
    m_blocks = -(-p.seqlen_q // config.block_m)
    heads = p.batch * p.heads_q
    numbers = (
        *(p.sm_scale, p.heads_q, p.batch, p.group, p.seqlen_q, p.seqlen_k, padded_rows(p), p.q_start, upper, lower),
        *(m_blocks, heads, _together(p, p.heads_q, p.seqlen_k * (p.head_dim + p.head_dim_v) * p.itemsize)),
    )
    options = {
        **_bounds(p, config.block_n),
        **_of_bias(p),
        "LONGEST": longest(p, keys=False),
        "HEAD_DIM": p.head_dim,
        "BLOCK_M": config.block_m,
        "BLOCK_N": config.block_n,
        "K_STAGES": config.k_stages,
        "V_STAGES": config.v_stages,
        "CONSUMER_REGISTERS": config.consumer_registers,
        "PRODUCER_REGISTERS": config.producer_registers,
        "num_warps": 4,
        "enable_fp_fusion": True,
    }
    queries, keys, scores = (1, 1, 64, p.head_dim), (1, 1, config.block_n, p.head_dim), (1, 1, 64, config.block_n)
    return plan(bias_dq._dq_bias_kernel, m_blocks * heads, (queries, keys, keys, queries, scores, queries), numbers, options)


@functools.lru_cache(maxsize=4096)
def dbias_plan(problem: Problem, config: TileConfig) -> Plan:
    """Tensors: q, k, v, do, bias, references, sums, -delta, dbias."""
    p, by = problem, _of_bias(problem)
    upper, lower, _, _ = p.bounds
    m_blocks, n_blocks = -(-p.seqlen_q // config.block_m), -(-p.seqlen_k // config.block_n)
    tiles = m_blocks * n_blocks * (p.batch if by["BY_BATCH"] else 1) * (p.heads_q if by["BY_HEAD"] else 1)
    numbers = (
        *(p.sm_scale, p.heads_q, p.batch, p.group, p.seqlen_q, p.seqlen_k, p.q_start, upper, lower, m_blocks, n_blocks, tiles),
    )
    options = {
        **_bounds(p, config.block_n),
        **by,
        "HEAD_DIM": p.head_dim,
        "BLOCK_M": config.block_m,
        "BLOCK_N": config.block_n,
        "STAGES": config.stages,
        "BIAS_SLOTS": config.bias_slots,
        "CONSUMER_REGISTERS": config.consumer_registers,
        "PRODUCER_REGISTERS": config.producer_registers,
        "num_warps": 4,
        "enable_fp_fusion": True,
    }
    queries, keys, scores = (1, 1, 64, p.head_dim), (1, 1, config.block_n, p.head_dim), (1, 1, 64, config.block_n)
    blocks = (queries, keys, keys, queries, scores, (1, 64), (1, 64), (1, 64), scores)
    return plan(dbias._dbias_kernel, min(tiles, p.arch.multiprocessors), blocks, numbers, options)


@functools.lru_cache(maxsize=4096)
def shared_plan(problem: Problem, config: TileConfig) -> Plan:
    """Tensors: q, k, v, do, bias, dq, dbias, references, sums, -delta."""
    p = problem
    upper, lower, _, _ = p.bounds
    m_blocks, n_blocks = -(-p.seqlen_q // config.block_m), -(-p.seqlen_k // config.block_n)
    numbers = (p.sm_scale, p.heads_q, p.group, p.seqlen_q, p.seqlen_k, p.q_start, upper, lower, m_blocks, n_blocks)
    options = {
        **_bounds(p, config.block_n),
        "LONGEST": longest(p, keys=False),
        "MEMBERS": members(p),
        "HEAD_DIM": p.head_dim,
        "BLOCK_M": config.block_m,
        "BLOCK_N": config.block_n,
        "STAGES": config.stages,
        "BIAS_SLOTS": config.bias_slots,
        "LATE": config.late,
        "CONSUMER_REGISTERS": config.consumer_registers,
        "PRODUCER_REGISTERS": config.producer_registers,
        "num_warps": 4,
        "enable_fp_fusion": True,
    }
    queries, keys, scores = (1, 1, 64, p.head_dim), (1, 1, config.block_n, p.head_dim), (1, 1, 64, config.block_n)
    blocks = (queries, keys, keys, queries, scores, queries, scores, (1, 64), (1, 64), (1, 64))
    return plan(bias_shared._dq_dbias_kernel, m_blocks * p.heads_q, blocks, numbers, options)


def _copyable(t: torch.Tensor) -> torch.Tensor:
    """An empty tensor of this shape whose rows a bulk copy can write; the tensor itself if that is one."""
    batch, heads, rows, columns = t.shape
    width = -(-columns // 8) * 8
    if t.is_contiguous() and width == columns:
        return t
    return torch.empty((batch, heads, rows, width), dtype=t.dtype, device=t.device)[..., :columns]


def backward_with_bias(
    problem: Problem,
    do: torch.Tensor,
    dlse: torch.Tensor | None,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    o: torch.Tensor,
    rows: torch.Tensor,
    dq: torch.Tensor | None,
    dk: torch.Tensor | None,
    dv: torch.Tensor | None,
    bias: torch.Tensor,
    grad: torch.Tensor | None,
) -> None:
    """Fill the gradients that are not None; ``grad``: that of the bias. No gradient is added up in memory: the bits repeat."""
    p = problem
    of_rows = torch.empty((3, p.batch * p.heads_q, padded_rows(p)), dtype=torch.float32, device=q.device)
    m, log_l, minus_delta = of_rows
    rows_plan(p, dlse is not None).run(o, do, rows if dlse is None else dlse.contiguous(), rows, m, log_l, minus_delta)
    if dk is not None or dv is not None:
        # A gradient that nobody asked for gets its input in its place; the kernel does not touch it.
        outputs = k if dk is None else dk, v if dv is None else dv
        each = dkdv_plan(p, DKDV[p.head_dim][0], dk is not None, dv is not None)
        each.run(k, v, q, do, bias, m, log_l, minus_delta, *outputs)
    shared = shared_config(p) if dq is not None and grad is not None else None
    if dq is not None and grad is not None and shared is not None:
        made = _copyable(grad)
        shared_plan(p, shared).run(q, k, v, do, bias, dq, made, m, log_l, minus_delta)
        if made is not grad:
            grad.copy_(made)
        return
    if dq is not None:
        dq_plan(p, DQ[p.head_dim][0]).run(q, k, v, do, bias, dq, m, log_l, minus_delta)
    if grad is not None:
        made = _copyable(grad)
        dbias_plan(p, DBIAS[p.head_dim][0]).run(q, k, v, do, bias, m, log_l, minus_delta, made)
        if made is not grad:
            grad.copy_(made)
