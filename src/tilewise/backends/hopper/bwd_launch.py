"""The launches of the Hopper backward pass: lse2 and delta of the rows, dk and dv by a kernel that holds keys, dq by one that holds
queries."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import torch

from ...configs.hopper import columns
from ...configs.hopper_backward import (
    AddingConfig,
    KeptConfig,
    KeysConfig,
    QueriesConfig,
    heads_kept,
    lookup_adding,
    lookup_dkdv,
    lookup_dq,
    lookup_kept,
    padded_rows,
)
from ...errors import BackendBroken
from ...plan import BlockTable, Place
from ...problem import Problem
from ...spec import NO_TENSORS, Tensors
from ..holes import Layout
from ..launching import Launch, Plan
from . import bwd, bwd_dq, bwd_kept, bwd_pair, bwd_rows
from .bias_launch import backward_with_bias
from .bwd_add_launch import backward_adding
from .common import LOG2_E, given, longest, named, plan, term_numbers, term_options, together

__all__ = ["backward", "geometries", "launch_dkdv", "launch_dq", "launch_dq_kept", "launch_rows"]


@functools.lru_cache(maxsize=4096)
def _rows_plan(problem: Problem, has_dlse: bool) -> Plan:
    p = problem
    block_dv = 1 << (p.head_dim_v - 1).bit_length()
    block_m = max(16, min(128, 8192 // block_dv))
    m_blocks = padded_rows(p) // block_m
    numbers = (p.heads_q, p.seqlen_q, padded_rows(p), m_blocks)
    options = {"HAS_DLSE": has_dlse, "HEAD_DIM_V": p.head_dim_v, "BLOCK_M": block_m, "BLOCK_DV": block_dv}
    options |= {"num_warps": 4, "enable_fp_fusion": True}
    return Plan(bwd_rows._rows_kernel, (m_blocks * p.batch * p.heads_q,), (None, None), numbers, options)


def _term_options(problem: Problem) -> dict[str, Any]:
    """Of the kernels that make scores again. A tanh that is right to 2^-11 will do where p is rounded to bfloat16."""
    options = term_options(problem)
    del options["HAS_SINK"]
    return {**options, "FAST": problem.dtype == "bfloat16"}


def _dkdv(
    problem: Problem,
    config: KeysConfig,
    need_dk: bool,
    need_dv: bool,
    first: int,
    heads: int,
    keeps: bool,
    tensors: Tensors = NO_TENSORS,
    table: BlockTable | None = None,
    named: int = 0,
) -> Plan:
    """For ``heads`` heads of keys from ``first`` on, counted over the batch. ``keeps``: ds goes to memory."""
    p = problem
    upper, lower, has_upper, has_lower = p.bounds
    n_blocks = -(-p.seqlen_k // config.block_n)
    streamed = padded_rows(p) * (p.head_dim + p.head_dim_v) * p.itemsize * p.group
    numbers = (
        *(p.sm_scale * LOG2_E, p.sm_scale, p.heads_kv, p.group, padded_rows(p), p.seqlen_k, p.q_start, upper, lower),
        *(n_blocks, heads, together(heads, 1, streamed), first, p.seqlen_q if p.spec.segment or p.spec.row else None),
        *term_numbers(p, tensors, table),
    )
    options = {
        **_term_options(p),
        "CAPPED": p.spec.softcap is not None,
        "HAS_UPPER": has_upper,
        "HAS_LOWER": has_lower,
        "HAS_TAIL": p.seqlen_k % config.block_n != 0,
        "LONGEST": longest(p, keys=True),
        "NEED_DK": need_dk,
        "NEED_DV": need_dv,
        "KEEPS": keeps,
        "HEAD_DIM": p.head_dim,
        "HEAD_DIM_V": p.head_dim_v,
        "BLOCK_M": config.block_m,
        "STAGES": config.stages,
        "CONSUMER_REGISTERS": config.consumer_registers,
        "FEEDER_REGISTERS": config.feeder_registers,
        "num_warps": 4,
        "enable_fp_fusion": True,
    }
    width, width_v = columns(p.head_dim), columns(p.head_dim_v)
    k_block, v_block, rows = (1, 1, 64, width), (1, 1, 64, width_v), (1, config.block_m)
    # Where ds is not kept, the output dk stands in for it and is not touched.
    kept = (1, config.block_m, 64) if keeps else k_block
    streamed = ((1, 1, config.block_m, width), (1, 1, config.block_m, width_v))
    blocks = (k_block, v_block, *streamed, rows, rows, k_block, v_block, kept)
    if config.p_slots:
        return plan(bwd_pair._dkdv_pair_kernel, n_blocks * heads, blocks, numbers, {**options, "P_SLOTS": config.p_slots}, named)
    return plan(bwd._dkdv_kernel, n_blocks * heads, blocks, numbers, {**options, "BLOCK_N": config.block_n}, named)


def _dq(
    problem: Problem, config: QueriesConfig, tensors: Tensors = NO_TENSORS, table: BlockTable | None = None, named: int = 0
) -> Plan:
    p = problem
    upper, lower, has_upper, has_lower = p.bounds
    m_blocks = -(-p.seqlen_q // config.block_m)
    heads = p.batch * p.heads_q
    numbers = (
        *(p.sm_scale * LOG2_E, p.sm_scale, p.heads_q, p.group, p.seqlen_q, p.seqlen_k, padded_rows(p), p.q_start, upper, lower),
        *(m_blocks, heads, together(heads, p.group, p.seqlen_k * (p.head_dim + p.head_dim_v) * p.itemsize)),
        *term_numbers(p, tensors, table),
    )
    options = {
        **_term_options(p),
        "HAS_UPPER": has_upper,
        "HAS_LOWER": has_lower,
        "HAS_TAIL": p.seqlen_k % config.block_n != 0,
        "LONGEST": longest(p, keys=False),
        "HEAD_DIM": p.head_dim,
        "HEAD_DIM_V": p.head_dim_v,
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
    width, width_v = columns(p.head_dim), columns(p.head_dim_v)
    q_block, k_block = (1, 1, 64, width), (1, 1, config.block_n, width)
    blocks = (q_block, k_block, (1, 1, config.block_n, width_v), (1, 1, 64, width_v), q_block)
    return plan(bwd_dq._dq_kernel, m_blocks * heads, blocks, numbers, options, named)


# The plans of calls without tensors in their spec.
_dkdv_plan, _dq_plan = (functools.lru_cache(maxsize=4096)(make) for make in (_dkdv, _dq))


def ds_shape(problem: Problem, heads: int) -> tuple[int, int, int]:
    """Of a ds in memory for so many heads of queries: tiles of 64 keys by 64 queries, for each head and 64 keys in a row."""
    return heads * -(-problem.seqlen_k // 64), padded_rows(problem), 64


def _heads_of(problem: Problem, ds: torch.Tensor) -> int:
    return ds.shape[0] // ds_shape(problem, 1)[0]


@functools.lru_cache(maxsize=4096)
def _kept_plan(problem: Problem, config: KeptConfig, first: int, heads: int) -> Plan:
    """For ``heads`` heads of queries from ``first`` on, counted over the batch."""
    p = problem
    upper, _, has_upper, _ = p.bounds
    m_blocks = -(-p.seqlen_q // config.block_m)
    numbers = (
        *(p.sm_scale, p.heads_q, p.group, p.seqlen_q, p.seqlen_k, p.q_start, upper),
        *(m_blocks, heads, together(heads, p.group, p.seqlen_k * p.head_dim * p.itemsize), first),
    )
    options = {
        "HAS_UPPER": has_upper,
        "LONGEST": longest(p, keys=False),
        "HEAD_DIM": p.head_dim,
        "BLOCK_M": config.block_m,
        "STAGES": config.stages,
        "CONSUMER_REGISTERS": config.consumer_registers,
        "PRODUCER_REGISTERS": config.producer_registers,
        "num_warps": 4,
        "enable_fp_fusion": True,
    }
    rows = (1, 1, 64, columns(p.head_dim))
    return plan(bwd_kept._dq_kept_kernel, m_blocks * heads, ((1, config.block_m, 64), rows, rows), numbers, options)


def geometries(problem: Problem) -> list[tuple[int, int, bool]]:
    """The tables that the backward passes of a problem read: ``(block_m, block_n, transposed)``."""
    found = []
    if "q" in problem.grad:
        dq = lookup_dq(problem)
        found.append((dq.block_m, dq.block_n, False))
    if set(problem.grad) & set("kv"):
        keys = lookup_dkdv(problem)
        found.append((keys.block_m, keys.block_n, True))
    return found


def launch_rows(
    problem: Problem,
    o: torch.Tensor,
    do: torch.Tensor,
    dlse: torch.Tensor | None,
    lse: torch.Tensor,
    lse2: torch.Tensor,
    minus_delta: torch.Tensor,
) -> Launch:
    return _rows_plan(problem, dlse is not None).launch(o, do, lse if dlse is None else dlse, lse, lse2, minus_delta)


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
    ds: torch.Tensor | None = None,
    first: int = 0,
    tensors: Tensors = NO_TENSORS,
    table: BlockTable | None = None,
) -> Launch:
    heads = problem.batch * problem.heads_kv if ds is None else _heads_of(problem, ds) // problem.group
    each = _dkdv(problem, config, dk is not None, dv is not None, first, heads, ds is not None, tensors, table)
    outputs = (k if dk is None else dk, v if dv is None else dv)
    return each.launch(k, v, q, do, lse2, minus_delta, *outputs, outputs[0] if ds is None else ds)


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
    tensors: Tensors = NO_TENSORS,
    table: BlockTable | None = None,
) -> Launch:
    return _dq(problem, config, tensors, table).launch(q, k, v, do, dq, lse2, minus_delta)


def launch_dq_kept(
    problem: Problem, config: KeptConfig, ds: torch.Tensor, k: torch.Tensor, dq: torch.Tensor, first: int = 0
) -> Launch:
    return _kept_plan(problem, config, first, _heads_of(problem, ds)).launch(ds, k, dq)


@dataclasses.dataclass(frozen=True)
class _Call:
    """The plans of one call. ``chunks``: for some heads at a time the kernel over keys, and that which makes dq of the ds that it
    keeps, in memory of this ``ds_shape``."""

    rows: Plan
    chunks: tuple[tuple[Plan, Plan | None], ...]
    queries: Plan | None
    ds_shape: tuple[int, int, int] | None


_Told = tuple[Layout, Place | None]  # what a kernel is told of the tensors that a spec names


def _call_of(
    problem: Problem,
    need_dq: bool,
    need_dk: bool,
    need_dv: bool,
    has_dlse: bool,
    of_keys: _Told | None = None,
    of_queries: _Told | None = None,
) -> _Call:
    p = problem

    def keys_plan(need_dk: bool, need_dv: bool, first: int, heads: int, keeps: bool) -> Plan:
        what = (p, lookup_dkdv(p), need_dk, need_dv, first, heads, keeps)
        return _dkdv_plan(*what) if of_keys is None else _dkdv(*what, *named(*of_keys))

    def queries_plan() -> Plan:
        return _dq_plan(p, lookup_dq(p)) if of_queries is None else _dq(p, lookup_dq(p), *named(*of_queries))

    rows = _rows_plan(p, has_dlse)
    heads = p.batch * p.heads_kv
    count = heads_kept(p) if need_dq and need_dk else 0
    if count:
        kept = lookup_kept(p)
        chunks = tuple(
            (keys_plan(True, need_dv, first, count, True), _kept_plan(p, kept, first * p.group, count * p.group))
            for first in range(0, heads, count)
        )
        return _Call(rows, chunks, None, ds_shape(p, count * p.group))
    keys = ((keys_plan(need_dk, need_dv, 0, heads, False), None),) if need_dk or need_dv else ()
    return _Call(rows, keys, queries_plan() if need_dq else None, None)


# Of calls without tensors in their spec, and with them.
_call, _call_named = (functools.lru_cache(maxsize=4096)(_call_of) for _ in range(2))
_keys_config, _queries_config = (functools.lru_cache(maxsize=4096)(find) for find in (lookup_dkdv, lookup_dq))


def adding_of(problem: Problem) -> AddingConfig | None:
    """The config of the kernel that adds dq up in memory, where the call allows it and it is the fastest."""
    asked = problem.spec.deterministic
    deterministic = torch.are_deterministic_algorithms_enabled() if asked is None else asked
    return None if deterministic else lookup_adding(problem)


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
    kept_rows: torch.Tensor | None = None,
    grads: Tensors = NO_TENSORS,
) -> None:
    """Fill the gradients that are not None (backend interface). The bits repeat where the spec's ``deterministic`` asks for it:
    then no gradient is added up in memory."""
    p = problem
    if tensors.bias is not None:
        if kept_rows is None:
            raise BackendBroken("a backward pass with a bias needs the rows that its forward pass returned")
        backward_with_bias(p, do, dlse, q, k, v, o, kept_rows, dq, dk, dv, tensors.bias, grads.bias)
        return
    if tensors is NO_TENSORS and dq is not None and dk is not None and dv is not None:
        adding = adding_of(p)
        if adding is not None:
            backward_adding(p, adding, do, dlse, q, k, v, o, lse, dq, dk, dv)
            return
    needs = (dq is not None, dk is not None, dv is not None, dlse is not None)
    for_keys: list[torch.Tensor] = []
    for_queries: list[torch.Tensor] = []
    if tensors is NO_TENSORS:
        call = _call(p, *needs)
    else:
        # A pass that nobody needs has no table made.
        of_keys = of_queries = None
        if dk is not None or dv is not None:
            keys_config = _keys_config(p)
            for_keys, of_keys = given(p, tensors, keys_config.block_m, keys_config.block_n, True)
        if dq is not None:
            queries_config = _queries_config(p)
            for_queries, of_queries = given(p, tensors, queries_config.block_m, queries_config.block_n)
        call = _call_named(p, *needs, of_keys, of_queries)
    lse2, minus_delta = torch.empty((2, p.batch * p.heads_q, padded_rows(p)), dtype=torch.float32, device=q.device)
    call.rows.run(o, do, lse if dlse is None else dlse.contiguous(), lse, lse2, minus_delta)
    # A gradient that nobody asked for gets its input in its place; the kernel does not touch it.
    dk_out, dv_out = k if dk is None else dk, v if dv is None else dv
    ds = dk_out if call.ds_shape is None else torch.empty(call.ds_shape, dtype=q.dtype, device=q.device)
    for keys, kept in call.chunks:
        keys.run(k, v, q, do, lse2, minus_delta, dk_out, dv_out, ds, *for_keys)
        if kept is not None:
            kept.run(ds, k, dq)
    if call.queries is not None:
        call.queries.run(q, k, v, do, dq, lse2, minus_delta, *for_queries)
    if grads.sink is not None:
        # Its weight is exp(sink - lse) and its value 0; delta is 0 for a row without any logit.
        weight = torch.exp(tensors.sink[..., None].float() - lse.masked_fill(lse == float("-inf"), 0.0))
        delta = minus_delta.view(p.batch, p.heads_q, -1)[..., : p.seqlen_q]
        grads.sink.copy_((weight * delta).sum(-1).sum_to_size(grads.sink.shape))
