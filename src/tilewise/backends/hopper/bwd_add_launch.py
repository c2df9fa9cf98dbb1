"""The launches of the fastest backward pass: the numbers of the rows and sums set to 0, all three gradients, dq out of the sums."""

from __future__ import annotations

import functools

import torch

from ...configs.hopper_backward import AddingConfig, padded_rows
from ...problem import Problem
from ..launching import Plan
from . import bwd_add, bwd_rows
from .common import LOG2_E, longest, plan, together

__all__ = ["adding_plans", "backward_adding"]


def _zeroing_rows(problem: Problem, has_dlse: bool) -> Plan:
    p = problem
    block_m = max(16, min(128, 8192 // p.head_dim))
    m_blocks = padded_rows(p) // block_m
    options = {"HAS_DLSE": has_dlse, "HEAD_DIM_V": p.head_dim, "BLOCK_M": block_m, "BLOCK_DV": p.head_dim, "HEAD_DIM": p.head_dim}
    options |= {"num_warps": 4, "enable_fp_fusion": True}
    numbers = (p.heads_q, p.seqlen_q, padded_rows(p), m_blocks)
    return Plan(bwd_rows._zeroing_rows_kernel, (m_blocks * p.batch * p.heads_q,), (None, None), numbers, options)


def _gradients(problem: Problem, config: AddingConfig) -> Plan:
    p = problem
    n_blocks = -(-p.seqlen_k // config.block_n)
    heads = p.batch * p.heads_kv
    upper, _, has_upper, _ = p.bounds
    streamed = padded_rows(p) * p.head_dim * (2 * p.itemsize + 4) * p.group  # queries, their gradients, and the sums of dq
    numbers = (
        *(p.sm_scale * LOG2_E, p.sm_scale, p.heads_kv, p.group, padded_rows(p), p.seqlen_k, p.q_start, upper),
        *(n_blocks, heads, together(heads, 1, streamed)),
    )
    options = {
        "HAS_UPPER": has_upper,
        "HAS_TAIL": p.seqlen_k % config.block_n != 0,
        "LONGEST": longest(p, keys=True),
        "HEAD_DIM": p.head_dim,
        "BLOCK_M": config.block_m,
        "BLOCK_N": config.block_n,
        "STAGES": config.stages,
        "DS_SLOTS": config.ds_slots,
        "EARLY": config.early,
        "CONSUMER_REGISTERS": config.consumer_registers,
        "ADDER_REGISTERS": config.adder_registers,
        "STEPS": (),
        "num_warps": 4,
        "enable_fp_fusion": True,
    }
    resident, streamed, rows = (1, 1, config.block_n, p.head_dim), (1, 1, config.block_m, p.head_dim), (1, config.block_m)
    output = (1, 1, 64, p.head_dim)
    blocks = (resident, output, streamed, streamed, rows, rows, output, output)
    programs = min(n_blocks * heads, config.programs or p.arch.multiprocessors)
    return plan(bwd_add._dkdvdq_kernel, programs, blocks, numbers, options)


def _gather(problem: Problem) -> Plan:
    p = problem
    m_blocks = padded_rows(p) // 64
    options = {"HEAD_DIM": p.head_dim, "num_warps": 4, "enable_fp_fusion": True}
    grid = (m_blocks * p.batch * p.heads_q,)
    return Plan(bwd_rows._gather_kernel, grid, (None,), (p.sm_scale, p.heads_q, p.seqlen_q, m_blocks), options)


@functools.lru_cache(maxsize=4096)
def adding_plans(problem: Problem, config: AddingConfig, has_dlse: bool) -> tuple[Plan, Plan, Plan]:
    """Rows and zeros; all three gradients, dq as sums; dq out of the sums."""
    return _zeroing_rows(problem, has_dlse), _gradients(problem, config), _gather(problem)


def backward_adding(
    problem: Problem,
    config: AddingConfig,
    do: torch.Tensor,
    dlse: torch.Tensor | None,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    o: torch.Tensor,
    lse: torch.Tensor,
    dq: torch.Tensor,
    dk: torch.Tensor,
    dv: torch.Tensor,
) -> None:
    """Fill all three gradients; the last bits of dq may differ from run to run."""
    p = problem
    rows, gradients, gather = adding_plans(p, config, dlse is not None)
    n = p.batch * p.heads_q * padded_rows(p)
    lse2, minus_delta = torch.empty((2, p.batch * p.heads_q, padded_rows(p)), dtype=torch.float32, device=q.device)
    sums = torch.empty(n * p.head_dim + 1, dtype=torch.float32, device=q.device)
    rows.run(o, do, lse if dlse is None else dlse.contiguous(), lse, lse2, minus_delta, sums)
    gradients.run(k, v, q, do, lse2, minus_delta, dk, dv, sums)
    gather.run(dq, sums)
