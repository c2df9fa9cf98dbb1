"""Hopper kernels in Gluon (sm_90a): a producer warp that copies in bulk and warpgroups that compute.

A ``Launch`` is a value, as in every backend: the compile-only tests make the launches of a real call and compile them for a device
that is not there.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import torch

from ...configs.hopper import FORMS, HopperConfig, columns, lookup, packs, softcap_bounds
from ...plan import BlockTable, Place
from ...problem import Problem
from ...spec import NO_TENSORS, Tensors
from ..holes import Layout
from ..launching import Kept, Launch, Plan
from ..tables import fill_table
from . import bias_launch, bwd_launch, fwd
from .bwd_launch import backward
from .common import LOG2_E, SMALLEST_SCALE, given, longest, named, plan, term_numbers, term_options, together

__all__ = ["backward", "fill_table", "forget", "forward", "geometries", "launches_fwd"]


def _fwd(
    problem: Problem,
    config: HopperConfig,
    form: str,
    tensors: Tensors = NO_TENSORS,
    table: BlockTable | None = None,
    named: int = 0,
) -> Plan:
    p = problem
    order = None if _counts(config) else (0, 1, 2, 3, 4, 4)  # without a counter lse stands for it
    if form == "redo":  # it puts the flag down as the counter comes round, and is there to be right
        config = dataclasses.replace(config, dynamic=True, resident=1)
    upper, lower, has_upper, has_lower = p.bounds
    pack = packs(p, config)
    rows, heads_q, group = p.seqlen_q * pack, p.heads_q // pack, p.group // pack
    m_blocks = -(-rows // config.block_m)
    heads = p.batch * heads_q
    tiles = m_blocks * heads
    qk_scale2 = p.sm_scale * LOG2_E
    numbers = (
        *(qk_scale2, heads_q, group, rows, p.seqlen_k, p.q_start, upper, lower),
        *(m_blocks, heads, together(heads, group, p.seqlen_k * (p.head_dim + p.head_dim_v) * p.itemsize)),
        *term_numbers(p, tensors, table),
    )
    terms = term_options(p)
    options = {
        **terms,
        "RAMP": terms["RAMP"] and form != "hasty",
        "LEAN": terms["RAMP"] and form == "hasty",
        "FIXED": form == "hasty" and softcap_bounds(p),
        "HAS_UPPER": has_upper,
        "HAS_LOWER": has_lower,
        "HAS_TAIL": p.seqlen_k % config.block_n != 0,
        "SCALED_FIRST": qk_scale2 < SMALLEST_SCALE,
        "LONGEST": longest(p, False),
        "HEAD_DIM": p.head_dim,
        "HEAD_DIM_V": p.head_dim_v,
        "BLOCK_M": config.block_m,
        "BLOCK_N": config.block_n,
        "STAGES": config.stages,
        "Q_SLOTS": config.q_slots,
        "OVERLAP": config.overlap,
        "DYNAMIC": config.dynamic,
        "HASTY": form == "hasty",
        "REDO": form == "redo",
        "PACK": pack,
        "CONSUMER_REGISTERS": config.registers[0],
        "PRODUCER_REGISTERS": config.registers[1],
        "num_warps": 4,
        "enable_fp_fusion": True,  # Triton 3.10 turns its default off
    }
    if config.resident > 1:
        options["maxnreg"] = 65536 // (config.resident * 32 * (config.block_m // 16 + 4)) // 8 * 8
    programs = min(tiles, config.resident * p.arch.multiprocessors) if config.dynamic else tiles
    width, width_v = columns(p.head_dim), columns(p.head_dim_v)
    queries = (1, 1, 64) if pack == 1 else (1, 1, 64 // pack, pack)
    keys = (1, 1, config.block_n)
    blocks = ((*queries, width), (*keys, width), (*keys, width_v), (*queries, min(width, width_v)))
    return plan(fwd._fwd_kernel, programs, blocks, numbers, options, named, order)


def _counts(config: HopperConfig) -> bool:
    """Do its launches read the counter or the flag behind it?"""
    return config.dynamic or config.guarded


# The plans of calls without tensors in their spec.
_fwd_plan = functools.lru_cache(maxsize=4096)(_fwd)
_counters: dict[tuple[int, int], torch.Tensor] = {}


def _segments() -> list[dict[str, Any]]:
    """The allocator's segments; none where it does not tell (``cudaMallocAsync``)."""
    try:
        return torch.cuda.memory_snapshot()
    except RuntimeError:
        return []


def in_common_pool(address: int, segments: list[dict[str, Any]]) -> bool:
    """Does this address lie in memory of the allocator's common pool?"""
    for segment in segments:
        if segment["address"] <= address < segment["address"] + segment["total_size"]:
            return tuple(segment.get("segment_pool_id", (-1, -1))) == (0, 0)
    return False


def _counter(device: torch.device) -> torch.Tensor:
    """The tile counter and the flag for a call on the current stream: 0 before it, and put back to 0 by it.

    Calls on one stream run in turn and share them; calls on two streams may overlap. A captured graph has its own, zeroed by
    each replay, since it may be replayed on any stream. So has a call whose memory comes from a private pool, as in the run that
    warms a graph up: whoever owns the pool counts what lives in it.
    """
    if device.type != "cuda" or torch.cuda.is_current_stream_capturing():
        return torch.zeros(2, dtype=torch.int32, device=device)
    index = torch.cuda.current_device() if device.index is None else device.index
    key = index, torch._C._cuda_getCurrentRawStream(index)  # a fiftieth of the time of torch.cuda.current_stream
    found = _counters.get(key)
    if found is None:
        found = torch.zeros(2, dtype=torch.int32, device=device)
        if in_common_pool(found.data_ptr(), _segments()):
            found = _counters.setdefault(key, found)
    return found


@functools.lru_cache(maxsize=4096)
def _plans(problem: Problem, config: HopperConfig) -> tuple[tuple[Plan, ...], bool, int]:
    """The plans of one call, by the forms in ``FORMS``; whether they count; heads packed.

    "careful"; or "hasty", which raises the flag if its result may be wrong, and "redo", careful, which works only if that is up.
    A careful kernel in static order looks neither at the counter nor at the flag.
    """
    plans = tuple(_fwd_plan(problem, config, form) for form in FORMS[config.guarded])
    return plans, _counts(config), packs(problem, config)


@functools.lru_cache(maxsize=4096)
def _picked(problem: Problem) -> tuple[tuple[Plan, ...], bool, int]:
    """``_plans`` with the config of the problem."""
    return _plans(problem, lookup(problem))


_config = functools.lru_cache(maxsize=4096)(lookup)


@functools.lru_cache(maxsize=4096)
def _plans_named(problem: Problem, config: HopperConfig, layout: Layout, place: Place | None) -> tuple[tuple[Plan, ...], bool, int]:
    """The same for a call whose spec names tensors."""
    holes = named(layout, place)
    plans = tuple(_fwd(problem, config, form, *holes) for form in FORMS[config.guarded])
    return plans, _counts(config), packs(problem, config)


def _packed(t: torch.Tensor, pack: int) -> torch.Tensor:
    """q or o as the descriptors of a packed launch see it: [batch, heads_kv, seqlen_q, group, columns]."""
    return t if pack == 1 else t.unflatten(1, (-1, pack)).transpose(2, 3)


def launches_fwd(
    problem: Problem,
    config: HopperConfig,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    o: torch.Tensor,
    lse: torch.Tensor,
    tensors: Tensors = NO_TENSORS,
    table: BlockTable | None = None,
) -> tuple[Launch, ...]:
    """The launches of one call, in this order."""
    if tensors is NO_TENSORS:
        plans, counts, pack = _plans(problem, config)
    else:
        plans = tuple(_fwd(problem, config, form, tensors, table) for form in FORMS[config.guarded])
        counts, pack = _counts(config), packs(problem, config)
    counter = (_counter(lse.device),) if counts else ()
    return tuple(each.launch(_packed(q, pack), k, v, _packed(o, pack), lse, *counter) for each in plans)


def geometries(problem: Problem) -> list[tuple[int, int, bool]]:
    """The tables that the passes of a problem read: ``(block_m, block_n, transposed)``."""
    config = lookup(problem)
    return [(config.block_m, config.block_n, False), *bwd_launch.geometries(problem)]


def forward(
    problem: Problem,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    o: torch.Tensor,
    lse: torch.Tensor,
    tensors: Tensors = NO_TENSORS,
    rows: torch.Tensor | None = None,
) -> Kept | None:
    """Fill ``o`` and ``lse`` (backend interface)."""
    if tensors.bias is not None:
        plan, counts = bias_launch.picked_fwd(problem)
        counter = _counter(lse.device) if counts else lse
        plan.run(q, k, v, o, tensors.bias, lse, lse if rows is None else rows, counter)
        return None
    extras: list[torch.Tensor] = []
    if tensors is NO_TENSORS:
        plans, counts, pack = _picked(problem)
    else:
        config = _config(problem)
        extras, told = given(problem, tensors, config.block_m, config.block_n)
        plans, counts, pack = _plans_named(problem, config, *told)
    if pack > 1:
        q, o = _packed(q, pack), _packed(o, pack)
    if not counts:  # one launch, of which q and o have the same addresses packed as not
        kept = plans[0].run(q, k, v, o, lse, *extras)
        return None if extras else kept
    counter = _counter(lse.device)
    for each in plans:
        each.run(q, k, v, o, lse, counter, *extras)
    return None


def forget() -> None:
    """Forget which config a problem gets (``backends.forget``)."""
    for kept in (_picked, _config, bwd_launch._call, bwd_launch._call_named, bwd_launch._keys_config, bwd_launch._queries_config):
        kept.cache_clear()
