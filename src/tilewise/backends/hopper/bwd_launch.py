"""The launches of the Hopper backward pass: numbers of the rows, dk and dv by a kernel that holds keys, dq by one that holds queries."""

from __future__ import annotations

import functools
from typing import Any

import torch
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from ...configs.hopper_backward import KeysConfig, QueriesConfig, lookup_adding, lookup_dkdv, lookup_dq, padded_rows
from ...problem import Problem
from ..launching import Launch
from . import bwd, bwd256, bwd_dq, bwd_rows
from .common import LOG2_E, longest, tile, together

__all__ = ["backward", "launch_dkdv", "launch_dq", "launch_gather", "launch_rows"]

_ROWS_LAYOUT = gl.NVMMASharedLayout(0, 32, 2)


def launch_rows(
    problem: Problem,
    o: torch.Tensor,
    do: torch.Tensor,
    dlse: torch.Tensor | None,
    lse: torch.Tensor,
    lse2: torch.Tensor,
    minus_delta: torch.Tensor,
    sums: torch.Tensor | None,
) -> Launch:
    p = problem
    block_dv = 1 << (p.head_dim_v - 1).bit_length()
    block_m = max(16, min(128, 8192 // block_dv))
    q_pad = lse2.shape[-1]
    m_blocks = q_pad // block_m
    tensors = (o, do, lse if dlse is None else dlse, lse, lse2, minus_delta, lse2 if sums is None else sums)
    numbers = (tuple(o.stride()[:3]), tuple(do.stride()[:3]), p.heads_q, p.seqlen_q, q_pad, m_blocks)
    options = {"HAS_DLSE": dlse is not None, "ZEROES": sums is not None, "HEAD_DIM_V": p.head_dim_v, "BLOCK_M": block_m}
    options |= {"BLOCK_DV": block_dv, "HEAD_DIM": p.head_dim, "num_warps": 4, "enable_fp_fusion": True}
    return Launch(bwd_rows._rows_kernel, (m_blocks * p.batch * p.heads_q,), (*tensors, *numbers), options)


@functools.lru_cache(maxsize=4096)
def _keys_settings(problem: Problem, config: KeysConfig) -> tuple[int, tuple[Any, ...], dict[str, Any]]:
    """``(programs, numbers, options)`` of a launch over tiles of keys."""
    p = problem
    upper, lower, has_upper, has_lower = p.bounds
    n_blocks = -(-p.seqlen_k // config.block_n)
    heads = p.batch * p.heads_kv
    streamed = padded_rows(p) * 2 * p.head_dim * p.itemsize * p.group
    numbers = (
        *(p.sm_scale * LOG2_E, p.sm_scale, p.heads_kv, p.group, padded_rows(p), p.seqlen_k, p.q_start, upper, lower),
        *(n_blocks, heads, together(heads, 1, streamed)),
    )
    options = {
        "HAS_UPPER": has_upper,
        "HAS_LOWER": has_lower,
        "HAS_TAIL": p.seqlen_k % config.block_n != 0,
        "LONGEST": longest(p, keys=True),
        "HEAD_DIM": p.head_dim,
        "BLOCK_M": config.block_m,
        "STAGES": config.stages,
        "CONSUMER_REGISTERS": config.consumer_registers,
        "FEEDER_REGISTERS": config.feeder_registers,
        "num_warps": 4,
        "enable_fp_fusion": True,
    }
    if config.p_slots:
        options["P_SLOTS"] = config.p_slots
    else:
        options["ADDS"] = config.adds
    return n_blocks * heads, numbers, options


def launch_dkdv(
    problem: Problem,
    config: KeysConfig,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    do: torch.Tensor,
    lse2: torch.Tensor,
    minus_delta: torch.Tensor,
    dk: torch.Tensor | None,
    dv: torch.Tensor | None,
    sums: torch.Tensor | None = None,
) -> Launch:
    programs, numbers, options = _keys_settings(problem, config)
    rows = [
        TensorDescriptor(t, [t.numel() // t.shape[-1], t.shape[-1]], [t.shape[-1], 1], [1, config.block_m], _ROWS_LAYOUT)
        for t in (lse2, minus_delta)
    ]
    # A gradient that nobody asked for gets its input in its place; the kernel does not touch it.
    outputs = (tile(k if dk is None else dk, 64), tile(v if dv is None else dv, 64))
    tiles = (tile(k, 64), tile(v, 64), tile(q, config.block_m), tile(do, config.block_m), *rows, *outputs)
    options = {**options, "NEED_DK": dk is not None, "NEED_DV": dv is not None}
    if config.p_slots:
        return Launch(bwd256._dkdv256_kernel, (programs,), (*tiles, *numbers), options)
    return Launch(bwd._dkdv_kernel, (programs,), (*tiles, lse2 if sums is None else sums, *numbers), options)


@functools.lru_cache(maxsize=4096)
def _queries_settings(problem: Problem, config: QueriesConfig) -> tuple[int, tuple[Any, ...], dict[str, Any]]:
    """``(programs, numbers, options)`` of a launch over tiles of queries."""
    p = problem
    upper, lower, has_upper, has_lower = p.bounds
    m_blocks = -(-p.seqlen_q // config.block_m)
    heads = p.batch * p.heads_q
    numbers = (
        *(p.sm_scale * LOG2_E, p.sm_scale, p.heads_q, p.group, p.seqlen_q, p.seqlen_k, padded_rows(p), p.q_start, upper, lower),
        *(m_blocks, heads, together(heads, p.group, p.seqlen_k * 2 * p.head_dim * p.itemsize)),
    )
    options = {
        "HAS_UPPER": has_upper,
        "HAS_LOWER": has_lower,
        "HAS_TAIL": p.seqlen_k % config.block_n != 0,
        "LONGEST": longest(p, keys=False),
        "HEAD_DIM": p.head_dim,
        "BLOCK_M": config.block_m,
        "BLOCK_N": config.block_n,
        "K_STAGES": config.k_stages,
        "V_STAGES": config.v_stages,
        "OVERLAP": config.overlap,
        "CONSUMER_REGISTERS": config.consumer_registers,
        "PRODUCER_REGISTERS": config.producer_registers,
        "num_warps": 4,
        "enable_fp_fusion": True,
    }
    return m_blocks * heads, numbers, options


def launch_dq(
    problem: Problem,
    config: QueriesConfig,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    do: torch.Tensor,
    lse2: torch.Tensor,
    minus_delta: torch.Tensor,
    dq: torch.Tensor,
) -> Launch:
    programs, numbers, options = _queries_settings(problem, config)
    tiles = (tile(q, 64), tile(k, config.block_n), tile(v, config.block_n), tile(do, 64), tile(dq, 64))
    return Launch(bwd_dq._dq_kernel, (programs,), (*tiles, lse2, minus_delta, *numbers), options)


def launch_gather(problem: Problem, sums: torch.Tensor, dq: torch.Tensor) -> Launch:
    p = problem
    q_pad = padded_rows(p)
    m_blocks = q_pad // 64
    numbers = (p.sm_scale, tuple(dq.stride()[:3]), p.heads_q, p.seqlen_q, q_pad, m_blocks)
    options = {"HEAD_DIM": p.head_dim, "WIDTH": 64, "num_warps": 4, "enable_fp_fusion": True}
    return Launch(bwd_rows._gather_kernel, (m_blocks * p.batch * p.heads_q,), (sums, dq, *numbers), options)


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
    """Fill the gradients that are not None (backend interface). The bits repeat: no gradient is added up in memory."""
    p = problem
    adding = lookup_adding(p) if dq is not None and dk is not None and dv is not None else None
    with torch.cuda.device_of(q):
        rows = p.batch * p.heads_q * padded_rows(p)
        lse2, minus_delta = torch.empty((2, p.batch * p.heads_q, padded_rows(p)), dtype=torch.float32, device=q.device)
        sums = None if adding is None else torch.empty(rows * p.head_dim, dtype=torch.float32, device=q.device)
        launch_rows(p, o, do, None if dlse is None else dlse.contiguous(), lse, lse2, minus_delta, sums).run()
        if adding is not None:
            launch_dkdv(p, adding, q, k, v, do, lse2, minus_delta, dk, dv, sums).run()
            launch_gather(p, sums, dq).run()
            return
        if dk is not None or dv is not None:
            launch_dkdv(p, lookup_dkdv(p), q, k, v, do, lse2, minus_delta, dk, dv).run()
        if dq is not None:
            launch_dq(p, lookup_dq(p), q, k, v, do, lse2, minus_delta, dq).run()
