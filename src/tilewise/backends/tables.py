"""What kernels read of masks that are tensors, each in one kernel: the table of tiles of ids and intervals
(``plan.block_table(plan.tile_kinds(...))``) and the bits of a dense mask."""

from __future__ import annotations

import functools
import types
from typing import Any

import torch
import triton
import triton.language as tl

from .. import bodies
from ..plan import WORD, BlockTable, Geometry, MaskTensors, Place, collapsed
from ..plan import fill_table as fill_by_torch
from ..problem import Problem
from .holes import Layout, holes_of, layout_of, table_of_holes, there
from .launching import Launch, Plan, broadcast_strides

__all__ = ["fill_table", "launch_pack", "launch_table", "pack_dense"]


def _shared(body):
    """A shared body as a Triton function. Triton wants to see its own language among the globals of what it compiles."""
    here = types.FunctionType(body.__code__, globals(), body.__name__)
    here.__annotations__ = body.__annotations__
    return triton.jit(here)


bound_tile = _shared(bodies.bound_tile)
row_tile = _shared(bodies.row_tile)
segment_tile = _shared(bodies.segment_tile)

# Kernel arguments that never enter a compile key.
LENGTHS = ("seqlen_q", "seqlen_k", "q_start", "upper", "lower", "table_batch", "table_head", "table_width")
# How many tiles of columns are judged at once, and by how many warps: by few where there are few.
FEW, MANY = (16, 4), (128, 8)
_GRID_LIMIT = 65_535


@triton.jit
def _least_and_largest(ptr, stride, tiles, length, BLOCK: tl.constexpr, LANES: tl.constexpr):
    """Of each tile: [TILES] each. Lanes past the end of a tile or of all read the last element once more."""
    offs = tiles[:, None] * BLOCK + tl.minimum(tl.arange(0, LANES), BLOCK - 1)[None, :]
    values = tl.load(ptr + tl.minimum(offs, length - 1) * stride)
    return tl.min(values, 1), tl.max(values, 1)


@triton.jit
def _judge(
    mask, batch, head, q_tiles, k_tiles, seqlen_q, seqlen_k, q_start, upper, lower,
    HAS_UPPER: tl.constexpr, HAS_LOWER: tl.constexpr, TRANSPOSED: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    LANES_M: tl.constexpr, LANES_N: tl.constexpr,
):  # fmt: skip
    """Of each pair of tiles: may a query see a key there, and does each see each? One of ``q_tiles`` and ``k_tiles`` has size 1."""
    tensors = mask[0]
    strides = mask[1]
    end_q = tl.minimum(q_tiles * BLOCK_M + BLOCK_M, seqlen_q)
    end_k = tl.minimum(k_tiles * BLOCK_N + BLOCK_N, seqlen_k)
    first_k = k_tiles * BLOCK_N
    seen, free = bound_tile(
        q_start + q_tiles * BLOCK_M, q_start + end_q - 1, first_k, end_k - 1, upper, lower, HAS_UPPER, HAS_LOWER
    )
    # The end of what is streamed needs the mask.
    if TRANSPOSED:
        free = free & (end_q == q_tiles * BLOCK_M + BLOCK_M)
    else:
        free = free & (end_k == first_k + BLOCK_N)
    if tensors[0] is not None:
        q_lo, q_hi = _least_and_largest(tensors[0] + batch * strides[0][0], strides[0][1], q_tiles, seqlen_q, BLOCK_M, LANES_M)
        k_lo, k_hi = _least_and_largest(tensors[1] + batch * strides[1][0], strides[1][1], k_tiles, seqlen_k, BLOCK_N, LANES_N)
        some, every = segment_tile(q_lo, q_hi, k_lo, k_hi)
        seen = seen & some
        free = free & every
    if tensors[2] is not None:
        starts = tensors[2] + batch * strides[2][0] + head * strides[2][1]
        ends = tensors[3] + batch * strides[3][0] + head * strides[3][1]
        start_lo, start_hi = _least_and_largest(starts, strides[2][2], q_tiles, seqlen_q, BLOCK_M, LANES_M)
        end_lo, end_hi = _least_and_largest(ends, strides[3][2], q_tiles, seqlen_q, BLOCK_M, LANES_M)
        some, every = row_tile(first_k, end_k, start_lo, start_hi, end_lo, end_hi)
        seen = seen & some
        free = free & every
    return seen, seen & free


@triton.jit
def _kinds(
    mask, batch, head, row, columns, table_width, seqlen_q, seqlen_k, q_start, upper, lower,
    HAS_UPPER: tl.constexpr, HAS_LOWER: tl.constexpr, TRANSPOSED: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, LANES_M: tl.constexpr, LANES_N: tl.constexpr,
):  # fmt: skip
    """Of these columns, as 0 or 1: free, and masked. Beyond the last column neither."""
    own = tl.full([1], 0, tl.int32) + row
    q_tiles = columns if TRANSPOSED else own
    k_tiles = own if TRANSPOSED else columns
    seen, free = _judge(
        mask, batch, head, q_tiles, k_tiles, seqlen_q, seqlen_k, q_start, upper, lower,
        HAS_UPPER, HAS_LOWER, TRANSPOSED, BLOCK_M, BLOCK_N, LANES_M, LANES_N,
    )  # fmt: skip
    inside = columns < table_width
    return (free & inside).to(tl.int32), (seen & (free == 0) & inside).to(tl.int32)


@triton.jit
def _list(tiles, columns, table_width, is_free, is_masked, to_free, to_masked, to_empty):
    """Write the columns into the list that begins at ``tiles``; ``to_...``: where the next of each kind goes."""
    inside = columns < table_width
    is_empty = ((is_free + is_masked == 0) & inside).to(tl.int32)
    place = tl.where(is_free == 1, to_free + tl.cumsum(is_free, 0), to_masked + tl.cumsum(is_masked, 0))
    place = tl.where(is_empty == 1, to_empty + tl.cumsum(is_empty, 0), place) - 1
    tl.store(tiles + place, columns, mask=inside)
    return to_free + tl.sum(is_free, 0), to_masked + tl.sum(is_masked, 0), to_empty + tl.sum(is_empty, 0)


@triton.jit(do_not_specialize=LENGTHS)
def _table_kernel(
    mask, counts, tiles, table_batch, table_head, table_width, seqlen_q, seqlen_k, q_start, upper, lower,
    HAS_UPPER: tl.constexpr, HAS_LOWER: tl.constexpr, TRANSPOSED: tl.constexpr, ONCE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, LANES_M: tl.constexpr, LANES_N: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """The list of one tile of rows. Grid: row tiles x heads x batch. ``ONCE``: a chunk holds all columns, which are judged once."""
    row = tl.program_id(0)
    head = tl.program_id(1).to(tl.int64)
    batch = tl.program_id(2).to(tl.int64)
    at = batch * table_batch + head * table_head + row
    chunk = tl.arange(0, CHUNK)
    if ONCE:
        is_free, is_masked = _kinds(
            mask, batch, head, row, chunk, table_width, seqlen_q, seqlen_k, q_start, upper, lower,
            HAS_UPPER, HAS_LOWER, TRANSPOSED, BLOCK_M, BLOCK_N, LANES_M, LANES_N,
        )  # fmt: skip
        n_free = tl.sum(is_free, 0)
        n_masked = tl.sum(is_masked, 0)
    else:
        n_free = 0
        n_masked = 0
        for first in tl.range(0, table_width, CHUNK):
            is_free, is_masked = _kinds(
                mask, batch, head, row, first + chunk, table_width, seqlen_q, seqlen_k, q_start, upper, lower,
                HAS_UPPER, HAS_LOWER, TRANSPOSED, BLOCK_M, BLOCK_N, LANES_M, LANES_N,
            )  # fmt: skip
            n_free += tl.sum(is_free, 0)
            n_masked += tl.sum(is_masked, 0)
    tl.store(counts + at * 2, n_free)
    tl.store(counts + at * 2 + 1, n_masked)
    # Where the next free, masked and empty tile goes.
    to_free = 0
    to_masked = n_free
    to_empty = n_free + n_masked
    own = tiles + at * table_width
    if ONCE:
        _list(own, chunk, table_width, is_free, is_masked, to_free, to_masked, to_empty)
    else:
        for first in tl.range(0, table_width, CHUNK):
            is_free, is_masked = _kinds(
                mask, batch, head, row, first + chunk, table_width, seqlen_q, seqlen_k, q_start, upper, lower,
                HAS_UPPER, HAS_LOWER, TRANSPOSED, BLOCK_M, BLOCK_N, LANES_M, LANES_N,
            )  # fmt: skip
            to_free, to_masked, to_empty = _list(own, first + chunk, table_width, is_free, is_masked, to_free, to_masked, to_empty)


def _table(problem: Problem, mask: MaskTensors, geometry: Geometry, table: BlockTable, named: int = 0) -> Plan:
    p = problem
    block_m, block_n, transposed = geometry
    upper, lower, has_upper, has_lower = p.bounds
    batch, heads, rows, width = table.tiles.shape
    chunk, warps = FEW if width <= FEW[0] else MANY
    tensors = ((*mask[:4],), tuple(None if t is None else broadcast_strides(t) for t in mask[:4]))
    numbers = (tensors, *table, *table.steps, p.seqlen_q, p.seqlen_k, p.q_start, upper, lower)
    options = {"HAS_UPPER": has_upper, "HAS_LOWER": has_lower, "TRANSPOSED": transposed, "BLOCK_M": block_m, "BLOCK_N": block_n}
    options |= {"LANES_M": triton.next_power_of_2(block_m), "LANES_N": triton.next_power_of_2(block_n)}
    options |= {"ONCE": width <= chunk, "CHUNK": chunk, "num_warps": warps, "enable_fp_fusion": True}
    return Plan(_table_kernel, (rows, heads, batch), (), numbers, options, named=named)


def launch_table(problem: Problem, mask: MaskTensors, block_m: int, block_n: int, transposed: bool, table: BlockTable) -> Launch:
    return _table(problem, mask, (block_m, block_n, transposed), table).launch()


@functools.lru_cache(maxsize=4096)
def _table_plan(problem: Problem, layout: Layout, geometry: Geometry, place: Place) -> Plan:
    """``layout``: of the mask's tensors and the one that holds the table."""
    *mask, packed = holes_of(layout)
    return _table(problem, MaskTensors(*mask), geometry, table_of_holes(packed, place), sum(t is not None for t in layout))


def fill_table(problem: Problem, mask: MaskTensors, geometry: Geometry, packed: torch.Tensor, place: Place) -> None:
    """Write the table of a mask for these tile sizes into its place."""
    if mask.dense is not None or max(place.shape[:2]) > _GRID_LIMIT:
        fill_by_torch(problem, mask, geometry, packed, place)
        return
    given = (*mask, packed)
    _table_plan(problem, layout_of(given), geometry, place).run(*there(given))


@triton.jit
def _pack_kernel(
    dense, words, batch_stride, head_stride, q_stride, k_stride, heads, seqlen_q, seqlen_k, width,
    ROWS: tl.constexpr, WORDS: tl.constexpr, WORD: tl.constexpr,
):  # fmt: skip
    """WORDS words of ROWS rows. Grid: (row tiles x word tiles) x heads x batch."""
    tiles = tl.cdiv(width, WORDS)
    row = tl.program_id(0) // tiles
    first = (tl.program_id(0) - row * tiles) * WORDS
    rows = row * ROWS + tl.arange(0, ROWS)
    keys = first * WORD + tl.arange(0, WORDS * WORD)
    head = tl.program_id(1).to(tl.int64)
    batch = tl.program_id(2).to(tl.int64)
    at = batch * batch_stride + head * head_stride
    at = at + rows.to(tl.int64)[:, None] * q_stride + keys.to(tl.int64)[None, :] * k_stride
    seen = tl.load(dense + at, mask=(rows[:, None] < seqlen_q) & (keys[None, :] < seqlen_k), other=0) != 0
    bits = tl.reshape(seen.to(tl.int32), [ROWS, WORDS, WORD]) << tl.arange(0, WORD)[None, None, :]
    columns = first + tl.arange(0, WORDS)
    to = words + ((batch * heads + head) * seqlen_q + rows.to(tl.int64)[:, None]) * width + columns[None, :]
    tl.store(to, tl.sum(bits, 2), mask=(rows[:, None] < seqlen_q) & (columns[None, :] < width))


def _pack(dense: Any, words: Any, named: int = 0) -> Plan:
    batch, heads, rows, keys = dense.shape
    width = words.shape[3]
    numbers = (dense.view(torch.uint8), words, *dense.stride(), heads, rows, keys, width)
    options = {"ROWS": 16, "WORDS": 8, "WORD": WORD, "num_warps": 4}
    return Plan(_pack_kernel, (triton.cdiv(rows, 16) * triton.cdiv(width, 8), heads, batch), (), numbers, options, named=named)


def launch_pack(dense: torch.Tensor, words: torch.Tensor) -> Launch:
    return _pack(dense, words).launch()


@functools.lru_cache(maxsize=4096)
def _pack_plan(layout: Layout) -> Plan:
    """``layout``: of the mask and its bits."""
    return _pack(*holes_of(layout), 2)


def pack_dense(dense: torch.Tensor) -> torch.Tensor:
    """The bits of a dense mask (``plan.WORD``), extent 1 along dims that it broadcasts in: all bits of a word where those are its
    keys."""
    dense = collapsed(dense)
    if dense.shape[3] == 1:
        return -dense.to(torch.int32)
    words = torch.empty((*dense.shape[:3], triton.cdiv(dense.shape[3], WORD)), dtype=torch.int32, device=dense.device)
    _pack_plan(layout_of((dense, words))).run(dense, words)
    return words
