"""Portable Triton kernels, and the launches that bind a problem's tensors to them.

A ``Plan`` holds all of a launch but the tensors. ``forward`` and ``backward`` look up the plan of each kernel, which keeps what it
compiled; those of a call whose spec names tensors are made of ``holes`` that stand for them. The compile-only tests turn plans into
``Launch`` values and compile them for a device that is not there.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from ... import configs
from ...configs import Config, chunks, padded
from ...configs.halves import halves_of
from ...configs.wide import config_of, forward_units, units_kept
from ...functions import function_of
from ...keep import limit_of, scale_of
from ...plan import WORD, Masked, MaskTensors, Place, packed_mask, packed_of, table_of
from ...problem import Problem
from ...spec import FN_SLOTS, NO_TENSORS, SLOTS, Spec, Tensors
from ..holes import Layout, holes_of, layout_of, mask_of, there
from ..launching import Again, Kept, Launch, Plan, broadcast_strides
from ..tables import fill_table, pack_dense
from . import bwd, dbias, fwd, wide_launch
from .dq_bias_launch import launch_dq_bias
from .halves_launch import forward_operands

__all__ = [
    "Launch",
    "backward",
    "fill_table",
    "forward",
    "geometries",
    "launch_dbias",
    "launch_delta",
    "launch_dkdv",
    "launch_dq",
    "launch_dq_bias",
    "launch_fwd",
    "pack_dense",
]

LOG2_E = 1.4426950408889634
_GRID_LIMIT = 65_535  # of the second and third dim of a grid
_FAR_STRIDE = 2**22  # from here on 256 rows or keys of a bias tile reach beyond 32 bits
_DTYPES = {"float16": tl.float16, "bfloat16": tl.bfloat16, "float32": tl.float32}


def _plan(
    problem: Problem,
    kernel: Any,
    grid: tuple[int, ...],
    tiles: tuple[tuple[int, int], ...],
    numbers: tuple[Any, ...],
    options: dict[str, Any],
    rests: tuple[int, ...] = (),
    named: int = 0,
    order: tuple[int, ...] | None = None,
) -> Plan:
    """The plan of a kernel whose first tensors are read in tiles of ``(rows, columns)``: by descriptors, or with their strides.

    ``rests``: the columns of the second tile of each, 0 if there is none, for kernels with a parameter for each.
    """
    if not options["BULK"]:
        return Plan(kernel, grid, (None,) * len(tiles), (*(None for _ in rests), *numbers), options, named=named, order=order)
    blocks = tuple((1, 1, rows, columns) for rows, columns in tiles)
    again = (Again(i, (1, 1, tiles[i][0], rest)) if rest else None for i, rest in enumerate(rests))
    given = (*((0, 0, 0, 0),) * len(tiles), *again, *numbers)
    return Plan(kernel, grid, blocks, given, options, TensorDescriptor, named=named, order=order)


def _grid(tiles: int, heads: int, batch: int) -> tuple[tuple[int, ...], bool]:
    """The grid, and whether it is flat (``parts.schedule``)."""
    if heads <= _GRID_LIMIT and batch <= _GRID_LIMIT:
        return (tiles, heads, batch), False
    return (tiles * heads * batch,), True


def shares_bias(problem: Problem) -> bool:
    """Do the sequences of the batch share a bias that every head has of its own?"""
    bias = problem.operand("bias")
    return bias is not None and problem.batch > 1 and bias.has("h") and not bias.has("b")


@functools.lru_cache(maxsize=4096)
def _settings(problem: Problem, config: Config, pass_: str) -> tuple[tuple[int, ...], tuple[Any, ...], dict[str, Any]]:
    """``(grid, scalar arguments, options)`` of a launch: all that does not depend on where the tensors lie.

    The scalars are those of the kernels from ``heads_q`` to ``lower``; the number of tiles and the scales follow in the launch.
    """
    p, keys_resident = problem, pass_ in configs.KEYS_RESIDENT
    upper, lower, has_upper, has_lower = p.bounds
    if keys_resident:
        tiles, heads, tail = triton.cdiv(p.seqlen_k, config.block_n), p.heads_kv, p.seqlen_q % config.block_m != 0
    else:
        tiles, heads, tail = triton.cdiv(p.seqlen_q, config.block_m), p.heads_q, p.seqlen_k % config.block_n != 0
    grid, flat = _grid(tiles * config.split, heads, p.batch)
    if not flat and shares_bias(p):
        grid, flat = (grid[0], grid[2], grid[1]), 2
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
        "SPLIT": config.split,
        "PRECISION": precision,
        "BULK": configs.by_descriptor(p, pass_, config),
        "WIDEN": p.dtype == "bfloat16" and p.arch.kind == "cpu",
        "num_warps": config.num_warps,
        "num_stages": config.num_stages,
        "enable_fp_fusion": True,  # Triton 3.10 turns its default off
    }
    heads_of = (p.heads_q, p.heads_kv) if keys_resident else (p.heads_q,)
    return grid, (*heads_of, p.group, p.seqlen_q, p.seqlen_k, p.q_start, upper, lower), options


def _masked(problem: Problem, config: Any, mask: Masked | None) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments from ``mask`` to ``table_width``, and what they change among the options."""
    if mask is None:
        return (None, None, 0, 0, 0), {}
    # There may be masked tiles whatever the lengths are.
    return (_mask_arguments(problem, config, mask.tensors), tuple(mask.table), *mask.table.steps), {"HAS_TAIL": True}


def _mask_arguments(problem: Problem, config: Any, mask: MaskTensors) -> tuple[Any, ...]:
    tensors = tuple(t.view(torch.uint8) if t is not None and t.dtype == torch.bool else t for t in mask)
    ragged = (problem.seqlen_q % config.block_m != 0, problem.seqlen_k % config.block_n != 0)
    bounded = ragged[1] or problem.bounds[2] or problem.bounds[3]
    strides = tuple(None if t is None else broadcast_strides(t) for t in tensors)
    return tensors, strides, tuple(1 if t else None for t in (*ragged, bounded))


def packs_dense(mask: MaskTensors | None, block_n: int) -> bool:
    """Do kernels with tiles of this width read the bits of this mask's dense term, in place of its bytes?"""
    return mask is not None and mask.dense is not None and block_n % WORD == 0 and max(mask.dense.shape[:2]) <= _GRID_LIMIT


def _mask(
    problem: Problem, tensors: Tensors, config: Any, transposed: bool = False, packed: MaskTensors | None = None
) -> Masked | None:
    """The tensors of the mask and the table of their tiles for a pass; None if the mask has only bounds. ``packed``: the mask with
    the bits of its dense term, where another pass has made them."""
    mask = MaskTensors.of(tensors)
    if packs_dense(mask, config.block_n):
        mask = packed or packed_mask(problem, tensors, pack_dense)
    table = table_of(problem, tensors, config.block_m, config.block_n, transposed, fill_table, mask)
    return None if table is None else Masked(mask or MaskTensors(), table)


_PLAN = SLOTS.index("plan")
_Named = tuple[Tensors, Masked | None, list[Any], int]  # the tensors of a spec, its mask, further ones; how many are there


def _given(
    problem: Problem,
    tensors: Tensors,
    config: Config,
    *more: torch.Tensor | None,
    transposed: bool = False,
    packed: MaskTensors | None = None,
) -> tuple[list[torch.Tensor], tuple[Layout, Place | None]]:
    """The tensors that a launch names besides the kernel's own, among them the table of the mask; and what ``_named`` is told.
    ``packed``: as in ``_mask``."""
    mask = None
    if tensors.dense is not None and packs_dense(MaskTensors.of(tensors), config.block_n):
        mask = packed or packed_mask(problem, tensors, pack_dense)
    tables, place = packed_of(problem, tensors, config.block_m, config.block_n, transposed, fill_table, mask)
    if mask is not None:
        tensors = tensors._replace(dense=mask.dense)
    given = (*tensors[:_PLAN], tables, *tensors[_PLAN + 1 :], *more)
    return there(given), (layout_of(given), place)


def _named(layout: Layout, place: Place | None) -> _Named:
    """Holes for them."""
    holes = holes_of(layout)
    return *mask_of(holes, place), holes[len(SLOTS) :], len(layout) - layout.count(None)


def geometries(problem: Problem) -> list[tuple[int, int, bool]]:
    """The tables that the passes of a problem read: ``(block_m, block_n, transposed)``."""
    kept = wide_launch.geometries(problem) if set(problem.grad) & set("qkv") and units_kept(problem) else []
    forward = forward_units(problem) > 0
    passes = [*([] if forward else ["fwd"]), *(["dq"] if "q" in problem.grad and not kept else [])]
    if set(problem.grad) & set("kv") and not kept:
        passes += ["dv", "dk"] if configs.splits_dkdv(problem) else ["dkdv"]
    found = ((configs.lookup(problem, name), name in configs.KEYS_RESIDENT) for name in passes)
    tile = config_of(problem).weights
    kept = [*([(tile.block_m, tile.block_n, False)] if forward and not kept else []), *kept]
    return [*((config.block_m, config.block_n, transposed) for config, transposed in found), *kept]


@functools.lru_cache(maxsize=4096)
def _steps(problem: Problem) -> tuple[float, tuple[str, ...]]:
    """The unit of the scores (log2(e), or 1 where they are natural), and the names of the steps."""
    steps = problem.spec.steps
    return 1.0 if problem.spec.natural else LOG2_E, steps


def own_function(spec: Spec, tensors: Tensors) -> tuple[Any, ...]:
    """The user's own function as kernels take it: ``(fn, tensors, (derivative,))``; no derivative stands for 1 everywhere."""
    function = function_of(spec)
    given = tuple(getattr(tensors, slot) for slot in FN_SLOTS if slot in spec.slots)
    return function.fn, given, (() if function.derivative is None else (function.derivative,))


def _scores(problem: Problem, tensors: Tensors, config: Config) -> tuple[Any, dict[str, Any]]:
    """The argument ``score`` of the kernels, and the options of the score steps (``scores.scored``)."""
    unit, steps = _steps(problem)
    if not steps:
        return None, {"STEPS": (), "NATURAL": False, "TAILS": ()}
    cap = (problem.spec.softcap or 0.0) * unit
    given = (None if t is None else (t, broadcast_strides(t)) for t in (tensors.slopes, tensors.bias))
    if tensors.bias is not None and max(broadcast_strides(tensors.bias)[2:]) >= _FAR_STRIDE:
        steps = tuple("bias_far" if step == "bias" else step for step in steps)
    own = None
    if problem.spec.function is not None:
        own = own_function(problem.spec, tensors)
        steps = tuple(problem.spec.function if step == "fn" else step for step in steps)
    tails = (problem.seqlen_q % config.block_m != 0, problem.seqlen_k % config.block_n != 0)
    return ((cap, 1.0 / cap) if cap else None, *given, own), {"STEPS": steps, "NATURAL": unit == 1.0, "TAILS": tails}


def _sink(tensors: Tensors) -> Any:
    return None if tensors.sink is None else (tensors.sink, broadcast_strides(tensors.sink))


def _drop(problem: Problem, tensors: Tensors) -> Any:
    """The argument ``drop`` of the kernels (``drop.py``)."""
    if tensors.seed is None:
        return None
    p, seed = problem.spec.p_dropout, tensors.seed
    limit = limit_of(p)
    return seed, *broadcast_strides(seed), limit - 2**32 if limit >= 2**31 else limit, scale_of(p)


def _chunks(problem: Problem, whole: bool, names: str) -> tuple[tuple[int, ...], tuple[int, ...], dict[str, int]]:
    """The columns of the first and of the second tile of each of these tensors ("q" as wide as q and k, "v" as v, o and do), and
    the constants of a kernel that may take columns in two tiles; ``whole``: one tile holds them all."""
    (d, rest), (dv, rest_v) = chunks(problem.head_dim, whole), chunks(problem.head_dim_v, whole)
    first, second = ({"q": d, "v": dv}[name] for name in names), ({"q": rest, "v": rest_v}[name] for name in names)
    return tuple(first), tuple(second), {"BLOCK_D": d, "BLOCK_DV": dv, "REST": rest, "REST_V": rest_v}


def _columns(problem: Problem, names: str) -> tuple[int, ...]:
    """The columns of a tile of each of these tensors where one tile holds them all."""
    sizes = {"q": padded(problem.head_dim), "v": padded(problem.head_dim_v)}
    return tuple(sizes[name] for name in names)


def _fwd(
    problem: Problem,
    config: Config,
    mask: Masked | None = None,
    tensors: Tensors = NO_TENSORS,
    kept: Any = None,
    maxima: Any = None,
    named: int = 0,
) -> Plan:
    p, halves = problem, halves_of(problem, "fwd")
    grid, scalars, options = _settings(p, config, "fwd")
    masked, masked_options = _masked(p, config, mask)
    score, score_options = _scores(p, tensors, config)
    # A hidden score is -inf before it is scaled where a table lists its tile, and 0 * -inf is no score.
    scale = max(abs(p.sm_scale) * _steps(p)[0], 0.0 if mask is None else 2.0**-126)
    columns, rests, cut = _chunks(p, config.split > 1 or halves > 0, "qqvv")
    columns = (*columns[:2], columns[2] // config.split, columns[3] // config.split)
    tiles = tuple(zip((config.block_m, config.block_n, config.block_n, config.block_m), columns, strict=True))
    numbers = (
        *(*masked, score, _sink(tensors), kept, maxima, _drop(p, tensors)),
        *(*scalars, scale, triton.cdiv(p.seqlen_q, config.block_m) * config.split),
    )
    own = {**cut, "NEGATIVE": p.sm_scale < 0 and not halves, "HALVES": halves, "BLOCK_DV": columns[-1]}
    options = {**options, **masked_options, **score_options, **own}
    order = None if halves else (0, 1, 2, 3, 4, 4, 4, 4)  # whole operands have no units: lse stands for them
    return _plan(p, fwd._fwd_kernel, grid, tiles, numbers, options, rests, named, order)


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


def _dkdv(
    problem: Problem,
    config: Config,
    need_dk: bool,
    need_dv: bool,
    mask: Masked | None = None,
    tensors: Tensors = NO_TENSORS,
    named: int = 0,
) -> Plan:
    p = problem
    grid, scalars, options = _settings(p, config, "dkdv" if need_dk and need_dv else "dk" if need_dk else "dv")
    masked, masked_options = _masked(p, config, mask)
    score, score_options = _scores(p, tensors, config)
    rows = (config.block_m, config.block_n, config.block_n, config.block_m, config.block_n, config.block_n)
    columns, rests, cut = _chunks(p, config.split > 1, "qqvvqv")
    tiles = tuple(zip(rows, (*columns[:3], columns[3] // config.split, columns[4], columns[5] // config.split), strict=True))
    numbers = (
        *(*masked, score, _drop(p, tensors)),
        *(*scalars, p.sm_scale * _steps(p)[0], p.sm_scale, triton.cdiv(p.seqlen_k, config.block_n) * config.split),
    )
    options = {**options, **masked_options, **score_options, **cut, "NEED_DK": need_dk, "NEED_DV": need_dv}
    options["RAGGED"] = p.seqlen_q % config.block_m != 0
    return _plan(p, bwd._dkdv_kernel, grid, tiles, numbers, options, rests, named)


def _dq(
    problem: Problem,
    config: Config,
    need_dq: bool,
    mask: Masked | None = None,
    tensors: Tensors = NO_TENSORS,
    dslopes: Any = None,
    named: int = 0,
) -> Plan:
    p = problem
    grid, scalars, options = _settings(p, config, "dq")
    masked, masked_options = _masked(p, config, mask)
    score, score_options = _scores(p, tensors, config)
    rows = (config.block_m, config.block_n, config.block_n, config.block_m, config.block_m)
    columns, rests, cut = _chunks(p, config.split > 1, "qqvvq")
    tiles = tuple(zip(rows, columns, strict=True))
    numbers = (
        *(*masked, score, dslopes, _drop(p, tensors)),
        *(*scalars, p.sm_scale * _steps(p)[0], p.sm_scale, triton.cdiv(p.seqlen_q, config.block_m) * config.split),
    )
    own = {**cut, "NEED_DQ": need_dq, "DSLOPES": dslopes is not None}
    return _plan(p, bwd._dq_kernel, grid, tiles, numbers, {**options, **masked_options, **score_options, **own}, rests, named)


# The plans of calls without tensors in their spec.
_fwd_plan, _dkdv_plan, _dq_plan = (functools.lru_cache(maxsize=4096)(make) for make in (_fwd, _dkdv, _dq))


# Those of calls with tensors.
@functools.lru_cache(maxsize=4096)
def _fwd_named(problem: Problem, config: Config, layout: Layout, place: Place | None) -> Plan:
    tensors, mask, (kept, maxima), named = _named(layout, place)
    return _fwd(problem, config, mask, tensors, kept, maxima, named)


@functools.lru_cache(maxsize=4096)
def _dkdv_named(problem: Problem, config: Config, need_dk: bool, need_dv: bool, layout: Layout, place: Place | None) -> Plan:
    tensors, mask, _, named = _named(layout, place)
    return _dkdv(problem, config, need_dk, need_dv, mask, tensors, named)


@functools.lru_cache(maxsize=4096)
def _dq_named(problem: Problem, config: Config, need_dq: bool, layout: Layout, place: Place | None) -> Plan:
    tensors, mask, (dslopes,), named = _named(layout, place)
    return _dq(problem, config, need_dq, mask, tensors, dslopes, named)


@functools.lru_cache(maxsize=4096)
def _dbias_named(problem: Problem, config: Config, grad: tuple[Any, ...], layout: Layout) -> Plan:
    """``grad``: shape and strides of the gradient."""
    holes = holes_of(layout)
    tensors, _ = mask_of(holes, None)
    return _dbias(problem, config, *grad, tensors, MaskTensors.of(tensors), len(layout) - layout.count(None))


def launch_fwd(
    problem: Problem,
    config: Config,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    o: torch.Tensor,
    lse: torch.Tensor,
    mask: Masked | None = None,
    tensors: Tensors = NO_TENSORS,
    kept: torch.Tensor | None = None,
    maxima: torch.Tensor | None = None,
    units: tuple[torch.Tensor, ...] = (),
) -> Launch:
    """``q``, ``k``, ``v`` and ``units`` are what ``forward_operands`` makes of those of a call."""
    return _fwd(problem, config, mask, tensors, kept, maxima).launch(q, k, v, o, lse, *units)


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
    mask: Masked | None = None,
    tensors: Tensors = NO_TENSORS,
) -> Launch:
    plan = _dkdv(problem, config, dk is not None, dv is not None, mask, tensors)
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
    dq: torch.Tensor | None,
    mask: Masked | None = None,
    tensors: Tensors = NO_TENSORS,
    dslopes: torch.Tensor | None = None,
) -> Launch:
    """``dslopes`` (batch, heads_q, seqlen_q): what each row adds to the gradient of its slope."""
    plan = _dq(problem, config, dq is not None, mask, tensors, dslopes)
    return plan.launch(q, k, v, do, q if dq is None else dq, lse, delta)


def _dbias(
    problem: Problem,
    config: Config,
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    tensors: Tensors,
    mask: MaskTensors | None = None,
    named: int = 0,
) -> Plan:
    """``shape``, ``strides``: of the gradient; a stride is 0 where it broadcasts."""
    p = problem
    _, scalars, options = _settings(p, config, "dbias")
    score, score_options = _scores(p, tensors, config)
    tiles = tuple(zip((config.block_m, config.block_n, config.block_n, config.block_m), _columns(p, "qqvv"), strict=True))
    batch, heads, queries, keys = (n == 1 for n in shape)
    m_blocks, n_blocks = triton.cdiv(p.seqlen_q, config.block_m), triton.cdiv(p.seqlen_k, config.block_n)
    bias_tiles = (1 if queries else m_blocks) * (1 if keys else n_blocks)
    grid, flat = _grid(bias_tiles, shape[1], shape[0])
    heads_q, *others = scalars
    numbers = (
        *(strides, None if mask is None else _mask_arguments(p, config, mask), score, _drop(p, tensors)),
        *(heads_q, p.heads_kv, *others, p.sm_scale * _steps(p)[0]),
        *(shape[1], p.batch if batch else 1, p.heads_q if heads else 1, m_blocks, n_blocks),
    )
    own = {"SUM_Q": queries, "SUM_K": keys, "MASKS": mask is not None, "FLAT": flat}
    shared = {name: value for name, value in options.items() if name not in ("HAS_TAIL", "REVERSED", "SPLIT")}
    return _plan(p, dbias._dbias_kernel, grid, tiles, numbers, {**shared, **score_options, **own}, named=named)


def launch_dbias(
    problem: Problem,
    config: Config,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    do: torch.Tensor,
    lse: torch.Tensor,
    delta: torch.Tensor,
    grad: torch.Tensor,
    tensors: Tensors,
    mask: MaskTensors | None = None,
) -> Launch:
    plan = _dbias(problem, config, tuple(grad.shape), broadcast_strides(grad), tensors, mask)
    return plan.launch(q, k, v, do, grad, lse, delta)


_forward_units = functools.lru_cache(maxsize=4096)(forward_units)


def forward(
    problem: Problem,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    o: torch.Tensor,
    lse: torch.Tensor,
    tensors: Tensors = NO_TENSORS,
    rows: torch.Tensor | None = None,
    maxima: torch.Tensor | None = None,
) -> Kept | None:
    """Fill ``o`` and ``lse``, and ``maxima`` if given (backend interface)."""
    given = (q, k, v, o, lse)
    if maxima is None and _forward_units(problem):
        with torch.cuda.device_of(q):
            wide_launch.run_forward(problem, given, tensors, rows if problem.keeps_rows else None)
        return None
    config = configs.lookup(problem, "fwd")
    if problem.dtype == "float32":
        operands, units = forward_operands(problem, q, k, v)
        given = (*operands, o, lse, *units)
    if tensors is NO_TENSORS and maxima is None:
        kept = _fwd_plan(problem, config).run(*given)
        return None if problem.dtype == "float32" else kept  # float32 operands may be copies, made anew by every call
    named, told = _given(problem, tensors, config, rows if problem.keeps_rows else None, maxima)
    _fwd_named(problem, config, *told).run(*given, *named)
    return None


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
    # delta has no use for dv alone, but then it only has to be readable memory.
    more = any(t is not None for t in (dq, dk, grads.bias, grads.slopes, grads.sink))
    delta = torch.empty_like(lse) if more else lse
    if delta is not lse:
        _delta_plan(problem, dlse is not None).run(o, do, lse if dlse is None else dlse.contiguous(), lse, delta)
    together = [("dkdv", dk, dv)] if not configs.splits_dkdv(problem) else [("dv", None, dv), ("dk", dk, None)]
    together = [each for each in together if each[1] is not None or each[2] is not None]
    if (together or dq is not None) and units_kept(problem):
        with torch.cuda.device_of(q):
            pivots = rows if problem.keeps_rows and rows is not None else lse
            wide_launch.run(problem, (q, k, v, do, pivots, delta), dq, dk, dv, tensors)
        together, dq = [], None
    if tensors is not NO_TENSORS:
        _backward_with(problem, do, q, k, v, lse, delta, dq, together, tensors, rows, grads)
        return
    for name, dk_out, dv_out in together:
        plan = _dkdv_plan(problem, configs.lookup(problem, name), dk_out is not None, dv_out is not None)
        plan.run(q, k, v, do, *_outputs(k, v, dk_out, dv_out), lse, delta)
    if dq is not None:
        _dq_plan(problem, configs.lookup(problem, "dq"), True).run(q, k, v, do, dq, lse, delta)


def _backward_with(
    problem: Problem,
    do: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    lse: torch.Tensor,
    delta: torch.Tensor,
    dq: torch.Tensor | None,
    together: list[tuple[str, torch.Tensor | None, torch.Tensor | None]],
    tensors: Tensors,
    rows: torch.Tensor | None,
    grads: Tensors,
) -> None:
    """The rest of ``backward`` where the spec names tensors; ``together``: the passes over resident keys and their outputs."""
    # What the weights of a row are measured from (``scores.weights``).
    pivots = rows if problem.keeps_rows and rows is not None else lse
    packed = None
    if tensors.dense is not None and packs_dense(MaskTensors.of(tensors), WORD):
        packed = packed_mask(problem, tensors, pack_dense)
    for name, dk, dv in together:
        config = configs.lookup(problem, name)
        named, told = _given(problem, tensors, config, transposed=True, packed=packed)
        plan = _dkdv_named(problem, config, dk is not None, dv is not None, *told)
        plan.run(q, k, v, do, *_outputs(k, v, dk, dv), pivots, delta, *named)
    shared = configs.shared_config(problem) if dq is not None and grads.bias is not None else None
    if dq is not None and shared is not None:
        with torch.cuda.device_of(q):
            launch_dq_bias(problem, shared, q, k, v, do, pivots, delta, dq, grads.bias, tensors).run()
        return _sink_gradient(lse, delta, tensors, grads)
    if dq is not None or grads.slopes is not None:
        config = configs.lookup(problem, "dq")
        by_row = None if grads.slopes is None else torch.empty_like(lse)
        named, told = _given(problem, tensors, config, by_row, packed=packed)
        _dq_named(problem, config, dq is not None, *told).run(q, k, v, do, q if dq is None else dq, pivots, delta, *named)
        if by_row is not None:
            grads.slopes.copy_(by_row.sum(-1).sum_to_size(grads.slopes.shape))
    if grads.bias is not None:
        config, given = configs.lookup(problem, "dbias"), (*tensors[:_PLAN], None, *tensors[_PLAN + 1 :])
        grad = tuple(grads.bias.shape), broadcast_strides(grads.bias)
        plan = _dbias_named(problem, config, grad, layout_of(given))
        plan.run(q, k, v, do, grads.bias, pivots, delta, *there(given))
    _sink_gradient(lse, delta, tensors, grads)


def _sink_gradient(lse: torch.Tensor, delta: torch.Tensor, tensors: Tensors, grads: Tensors) -> None:
    if grads.sink is not None:
        # Its weight is exp(sink - lse) and its value 0; delta is 0 for a row without any logit.
        weight = torch.exp(tensors.sink[..., None].float() - lse.masked_fill(lse == float("-inf"), 0.0))
        grads.sink.copy_(-(weight * delta).sum(-1).sum_to_size(grads.sink.shape))
