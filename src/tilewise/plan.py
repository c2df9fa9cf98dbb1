"""Which tiles of the score matrix are empty, which need the mask and which do not.

EMPTY and FREE are exact claims (no pair, every pair of the tile is seen); MASKED is always allowed. ``TilePlan`` says it in closed
form for the bounds of a spec: the kernels call the same ``bodies.tile_range`` for themselves, so that plan is for pictures, counts,
schedules and tests. ``BlockTable`` says it for masks that come as tensors (segments, rows, a dense mask): lists of tiles, built on
the tensors' device, that kernels walk.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from .bodies import bound_tile, row_tile, segment_tile, tile_range
from .errors import InvalidInput
from .operands import full_rank
from .problem import Problem
from .spec import SLOTS, Spec, Tensors

__all__ = [
    "EMPTY",
    "FREE",
    "MASKED",
    "WORD",
    "BlockTable",
    "MaskTensors",
    "Masked",
    "Place",
    "TilePlan",
    "block_table",
    "check_fresh",
    "collapsed",
    "extents_of",
    "fill_table",
    "kinds_in",
    "made_table",
    "packed_mask",
    "packed_of",
    "planned",
    "table_in",
    "table_of",
    "tile_kinds",
]

# In this order, the kind of a conjunction is the least kind of its terms.
EMPTY, MASKED, FREE = 0, 1, 2

WORD = 32  # keys in a word of a packed dense mask, the first in its lowest bit; those past the last key are 0


@dataclass(frozen=True)
class TilePlan:
    """The tiles of one problem for tiles of ``block_m`` queries by ``block_n`` keys."""

    problem: Problem
    block_m: int
    block_n: int

    @property
    def m_blocks(self) -> int:
        return -(-self.problem.seqlen_q // self.block_m)

    @property
    def n_blocks(self) -> int:
        return -(-self.problem.seqlen_k // self.block_n)

    def keys_of(self, m_block: int) -> tuple[int, int, int, int]:
        """``(lo, free_lo, free_hi, hi)`` of the key tiles that query tile ``m_block`` visits."""
        p = self.problem
        upper, lower, has_upper, has_lower = p.bounds
        first = m_block * self.block_m
        last = min(first + self.block_m, p.seqlen_q)
        return tile_range(
            p.q_start + first, p.q_start + last, p.seqlen_k, upper, lower, self.block_n, has_upper, has_lower
        )

    def queries_of(self, n_block: int) -> tuple[int, int, int, int]:
        """The same for the query tiles that key tile ``n_block`` visits: the transposed plan of the backward pass.

        ``kv <= q + upper`` bounds queries from below by ``kv - upper``, so the two bounds swap their roles.
        """
        p = self.problem
        upper, lower, has_upper, has_lower = p.bounds
        first = n_block * self.block_n
        last = min(first + self.block_n, p.seqlen_k)
        return tile_range(
            first, last, p.seqlen_q, lower - p.q_start, upper + p.q_start, self.block_m, has_lower, has_upper
        )

    def tiles(self) -> torch.Tensor:
        """An int8 tensor (m_blocks, n_blocks) of EMPTY, MASKED or FREE."""
        out = torch.zeros(self.m_blocks, self.n_blocks, dtype=torch.int8)
        for m in range(self.m_blocks):
            lo, free_lo, free_hi, hi = self.keys_of(m)
            out[m, lo:hi] = MASKED
            out[m, free_lo:free_hi] = FREE
        return out

    def counts(self) -> tuple[int, int, int]:
        """How many tiles are empty, masked and free (for one head)."""
        free = masked = 0
        for m in range(self.m_blocks):
            lo, free_lo, free_hi, hi = self.keys_of(m)
            free += free_hi - free_lo
            masked += (hi - lo) - (free_hi - free_lo)
        return self.m_blocks * self.n_blocks - masked - free, masked, free


class MaskTensors(NamedTuple):
    """The tensors of a mask. A dim along which one is the same has size 1 or stride 0."""

    segment_q: torch.Tensor | None = None  # integers (batch, seqlen_q)
    segment_k: torch.Tensor | None = None  # integers (batch, seqlen_k)
    row_start: torch.Tensor | None = None  # integers (batch, heads_q, seqlen_q)
    row_end: torch.Tensor | None = None  # integers (batch, heads_q, seqlen_q)
    dense: torch.Tensor | None = None  # bool (batch, heads_q, seqlen_q, seqlen_k), or its bits: int32, WORD keys in each

    @classmethod
    def of(cls, tensors: Tensors) -> MaskTensors | None:
        """Those of a spec; ``None`` if its mask has only bounds."""
        own = tensors[_MASK]
        if all(t is None for t in own):
            return None
        return cls(*(None if t is None else full_rank(slot, t) for slot, t in zip(cls._fields, own, strict=True)))


class BlockTable(NamedTuple):
    """The tiles that each tile of rows visits, as lists. A batch or head extent of 1 stands for all.

    ``tiles[..., r, :]`` holds the free tiles of row tile ``r``, then its masked ones, then the rest, each in ascending order;
    ``counts[..., r, :]`` says how many are free and how many masked.
    """

    counts: torch.Tensor  # int32 (batch or 1, heads or 1, row tiles, 2)
    tiles: torch.Tensor  # int32 (batch or 1, heads or 1, row tiles, column tiles)

    @property
    def steps(self) -> tuple[int, int, int]:
        """How many lists lie between two batches and between two heads (0: they share theirs), and the length of a list."""
        batch, heads, rows, width = self.tiles.shape
        return (heads * rows if batch > 1 else 0), (rows if heads > 1 else 0), width


class Masked(NamedTuple):
    """What a kernel reads of a mask that comes as tensors."""

    tensors: MaskTensors
    table: BlockTable


Geometry = tuple[int, int, bool]  # block_m, block_n, transposed


def made_table(problem: Problem, mask: MaskTensors, block_m: int, block_n: int, transposed: bool) -> BlockTable:
    """The table of a mask for these tile sizes, in PyTorch operations."""
    return block_table(tile_kinds(problem, mask, block_m, block_n, transposed), transposed)


def extents_of(mask: MaskTensors) -> tuple[int, int]:
    """How many batches and heads have a table of their own."""
    known = [t for t in mask if t is not None]
    batch = max(1 if t.stride(0) == 0 else t.shape[0] for t in known)
    return batch, max((1 if t.stride(1) == 0 else t.shape[1] for t in known if t.dim() > 2), default=1)


class Place(NamedTuple):
    """Where a table lies in a packed tensor of int32: its counts begin at ``at``, its lists, of this ``shape``, after them."""

    at: int
    shape: tuple[int, int, int, int]

    @property
    def rows(self) -> int:
        """How many lists there are."""
        return self.shape[0] * self.shape[1] * self.shape[2]

    @property
    def end(self) -> int:
        return self.at + self.rows * (2 + self.shape[3])


def _place(at: int, extents: tuple[int, int], seqlen_q: int, seqlen_k: int, geometry: Geometry) -> Place:
    block_m, block_n, transposed = geometry
    m_blocks, n_blocks = -(-seqlen_q // block_m), -(-seqlen_k // block_n)
    return Place(at, (*extents, n_blocks, m_blocks) if transposed else (*extents, m_blocks, n_blocks))


def table_in(packed: torch.Tensor, place: Place) -> BlockTable:
    """The table at this place of a packed tensor."""
    lists = place.at + 2 * place.rows
    return BlockTable(packed[place.at : lists].view(*place.shape[:3], 2), packed[lists : place.end].view(place.shape))


def fill_table(problem: Problem, mask: MaskTensors, geometry: Geometry, packed: torch.Tensor, place: Place) -> None:
    """Write the table of a mask for these tile sizes into its place, by PyTorch operations."""
    for into, made in zip(table_in(packed, place), made_table(problem, mask, *geometry), strict=True):
        into.copy_(made)


def planned(
    spec: Spec,
    mask: MaskTensors,
    problem: Problem,
    geometries: Iterable[Geometry],
    fill: Callable[..., None] = fill_table,
    pack: Callable[[torch.Tensor], torch.Tensor] | None = None,
) -> Spec:
    """The spec with a table for each of these tile sizes: ``problem`` is the call that they are for. ``pack`` makes the bits of a
    dense mask, which the plan then holds, too."""
    extents, device = extents_of(mask), next(t.device for t in mask if t is not None)
    words = None if mask.dense is None or pack is None else pack(mask.dense)
    layout = _layout(problem, tuple(sorted(set(geometries))), extents, None if words is None else tuple(words.shape))
    if layout is None:
        return spec
    places = _places(layout, problem.seqlen_q, problem.seqlen_k)
    tables = {geometry: place for geometry, place in places.items() if isinstance(place, Place)}
    packed = torch.empty(max(place.end for place in tables.values()), dtype=torch.int32, device=device)
    if words is not None:
        packed[: words.numel()].copy_(words.flatten())
        mask = mask._replace(dense=words)
    for geometry, place in tables.items():
        fill(problem, mask, geometry, packed, place)
    tensors = spec.tensors._replace(plan=packed)
    return dataclasses.replace(spec, plan=layout, tensors=tensors, versions=versions_of(tensors))


@functools.lru_cache(maxsize=256)
def _layout(
    problem: Problem, geometries: tuple[Geometry, ...], extents: tuple[int, int], bits: tuple[int, ...] | None
) -> str | None:
    """The string of a plan: what it was made for, its tables, and before them the bits of a dense mask."""
    p = problem
    names = [] if bits is None else ["x".join(map(str, bits)) + "b"]
    names += [f"{block_m}x{block_n}{'t' if transposed else ''}" for block_m, block_n, transposed in geometries]
    made_for = f"{p.batch}x{p.heads_q}x{p.seqlen_q}x{p.seqlen_k}"
    return "/".join((made_for, f"{extents[0]}x{extents[1]}", *names)) if geometries else None


_MASK = slice(SLOTS.index(MaskTensors._fields[0]), SLOTS.index(MaskTensors._fields[-1]) + 1)


def versions_of(tensors: Tensors) -> tuple[Any, ...]:
    """Where and how each tensor of the mask lies, and how often it was changed in place (inference tensors do not count)."""
    return tuple(
        [None if t is None else (t.data_ptr(), t.stride(), -1 if t.is_inference() else t._version) for t in tensors[_MASK]]
    )


def check_fresh(spec: Spec) -> None:
    """Raise InvalidInput if a tensor of the mask was changed in place since the spec's plan was made."""
    now = versions_of(spec.tensors)
    if now != spec.versions:
        names = MaskTensors._fields
        changed = [n for n, a, b in zip(names, spec.versions, now, strict=True) if a != b] if spec.versions else names
        raise InvalidInput(
            f"the plan of this spec is stale: {', '.join(changed)} changed in place or got other memory, "
            "or the spec was copied or unpickled, since it was made. "
            "Make a new one with tilewise.plan(q, k, spec)."
        )


@functools.lru_cache(maxsize=256)
def _places(plan: str, seqlen_q: int, seqlen_k: int) -> dict[Any, Any]:
    """Where each table of a plan lies, by its ``Geometry``; where its "bits" begin, and their shape."""
    _, extents, *names = plan.split("/")
    batch, heads = map(int, extents.split("x"))
    places: dict[Any, Any] = {}
    at = 0
    for name in names:
        if name.endswith("b"):
            b, h, rows, words = map(int, name[:-1].split("x"))
            places["bits"] = at, (b, h, rows, words)
            at += b * h * rows * words
            continue
        block_m, block_n = map(int, name.rstrip("t").split("x"))
        geometry = block_m, block_n, name.endswith("t")
        places[geometry] = _place(at, (batch, heads), seqlen_q, seqlen_k, geometry)
        at = places[geometry].end
    return places


def packed_of(
    problem: Problem,
    tensors: Tensors,
    block_m: int,
    block_n: int,
    transposed: bool = False,
    fill: Callable[..., None] = fill_table,
    mask: MaskTensors | None = None,
) -> tuple[torch.Tensor | None, Place | None]:
    """A tensor that holds the table of a call for these tile sizes, and where: the spec's plan if it has it, else a new one; None
    without such a mask. ``mask``: what a new one is made of, if not the tensors as they are."""
    packed, geometry = tensors.plan, (block_m, block_n, transposed)
    if packed is not None:
        place = _places(problem.spec.plan, problem.seqlen_q, problem.seqlen_k).get(geometry)
        if place is not None:
            return packed, place
    mask = mask or MaskTensors.of(tensors)
    if mask is None:
        return None, None
    place = _place(0, extents_of(mask), problem.seqlen_q, problem.seqlen_k, geometry)
    packed = torch.empty(place.end, dtype=torch.int32, device=next(t.device for t in mask if t is not None))
    fill(problem, mask, geometry, packed, place)
    return packed, place


def packed_mask(problem: Problem, tensors: Tensors, pack: Callable[[torch.Tensor], torch.Tensor]) -> MaskTensors | None:
    """The mask of a call with the bits of its dense term: those of the spec's plan if it has them, else new ones."""
    mask = MaskTensors.of(tensors)
    if mask is None or mask.dense is None:
        return mask
    found = None
    if tensors.plan is not None:
        found = _places(problem.spec.plan, problem.seqlen_q, problem.seqlen_k).get("bits")
    if tensors.plan is None or found is None:
        return mask._replace(dense=pack(mask.dense))
    at, shape = found
    return mask._replace(dense=tensors.plan[at : at + math.prod(shape)].view(shape))


def table_of(
    problem: Problem,
    tensors: Tensors,
    block_m: int,
    block_n: int,
    transposed: bool = False,
    fill: Callable[..., None] = fill_table,
    mask: MaskTensors | None = None,
) -> BlockTable | None:
    """The same as a table."""
    packed, place = packed_of(problem, tensors, block_m, block_n, transposed, fill, mask)
    return None if packed is None or place is None else table_in(packed, place)


def tile_kinds(problem: Problem, mask: MaskTensors, block_m: int, block_n: int, transposed: bool = False) -> torch.Tensor:
    """An int8 tensor (batch or 1, heads or 1, m_blocks, n_blocks) of EMPTY, MASKED or FREE, on the device of the mask's tensors.

    ``transposed``: the tiles are for a kernel that holds keys and streams queries. It needs the mask where a tile of queries, not
    of keys, reaches past the end.
    """
    p = problem
    device = next(t.device for t in mask if t is not None)
    upper, lower, has_upper, has_lower = p.bounds
    kinds = _bound_kinds(
        p.seqlen_q, p.seqlen_k, p.q_start, upper if has_upper else None, lower if has_lower else None,
        block_m, block_n, transposed, device,
    )  # fmt: skip
    if mask.segment_q is not None and mask.segment_k is not None:
        kinds = torch.minimum(kinds, _segment_kinds(mask.segment_q, mask.segment_k, block_m, block_n))
    if mask.row_start is not None and mask.row_end is not None:
        kinds = torch.minimum(kinds, _row_kinds(mask.row_start, mask.row_end, p.seqlen_k, block_m, block_n))
    if mask.dense is not None:
        kinds = torch.minimum(kinds, _dense_kinds(mask.dense, p.seqlen_k, block_m, block_n))
    return kinds


def block_table(kinds: torch.Tensor, transposed: bool = False) -> BlockTable:
    """The lists of column tiles of each row tile; ``transposed``: those of row tiles of each column tile."""
    if transposed:
        kinds = kinds.transpose(-1, -2).contiguous()
    free, masked = (kinds == FREE).sum(-1, dtype=torch.int32), (kinds == MASKED).sum(-1, dtype=torch.int32)
    order = kinds.argsort(dim=-1, descending=True, stable=True)
    return BlockTable(torch.stack((free, masked), -1), order.to(torch.int32))


def kinds_in(table: BlockTable) -> torch.Tensor:
    """The kinds that a table was made of, (batch or 1, heads or 1, row tiles, column tiles)."""
    place = torch.arange(table.tiles.shape[-1], device=table.tiles.device)
    free, masked = (n[..., None] for n in table.counts.unbind(-1))
    kind = (place < free + masked).to(torch.int8) + (place < free).to(torch.int8)
    return torch.empty_like(kind).scatter_(-1, table.tiles.long(), kind)


@functools.lru_cache(maxsize=32)
def _bound_kinds(
    seqlen_q: int,
    seqlen_k: int,
    q_start: int,
    upper: int | None,
    lower: int | None,
    block_m: int,
    block_n: int,
    transposed: bool,
    device: torch.device,
) -> torch.Tensor:
    """The kinds of tiles that bounds and ends alone make, (1, 1, m_blocks, n_blocks): what ``TilePlan`` says."""
    first_q = torch.arange(0, seqlen_q, block_m, device=device)[:, None]
    first_k = torch.arange(0, seqlen_k, block_n, device=device)[None, :]
    end_q, end_k = first_q + block_m, first_k + block_n
    whole = end_q <= seqlen_q if transposed else end_k <= seqlen_k
    last_q, last_k = end_q.clamp(max=seqlen_q) - 1 + q_start, end_k.clamp(max=seqlen_k) - 1
    seen, free = bound_tile(first_q + q_start, last_q, first_k, last_k, upper, lower, upper is not None, lower is not None)
    seen = seen.expand(first_q.shape[0], first_k.shape[1])
    return _kinds(seen, free & seen & whole)[None, None]


def _kinds(seen: torch.Tensor, free: torch.Tensor) -> torch.Tensor:
    """Kinds out of "some pair may be seen" and "all pairs are seen"; the second implies the first."""
    return seen.to(torch.int8) + free.to(torch.int8)


def collapsed(t: torch.Tensor) -> torch.Tensor:
    """The same tensor with extent 1 where its stride is 0: nothing that is broadcast is read twice."""
    for dim, stride in enumerate(t.stride()):
        if stride == 0 and t.shape[dim] > 1:
            t = t.narrow(dim, 0, 1)
    return t


def _by_tile(t: torch.Tensor, dim: int, block: int, reduce: Callable[[torch.Tensor, int], torch.Tensor]) -> torch.Tensor:
    """``t`` with every ``block`` elements along ``dim`` (from the left) reduced to one. The last tile may be smaller."""
    whole, rest = divmod(t.shape[dim], block)
    parts = []
    if whole:
        parts.append(reduce(t.narrow(dim, 0, whole * block).unflatten(dim, (whole, block)), dim + 1))
    if rest:
        parts.append(reduce(t.narrow(dim, whole * block, rest), dim).unsqueeze(dim))
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim)


def _least(t: torch.Tensor, dim: int) -> torch.Tensor:
    return t.amin(dim)


def _largest(t: torch.Tensor, dim: int) -> torch.Tensor:
    return t.amax(dim)


def _segment_kinds(segment_q: torch.Tensor, segment_k: torch.Tensor, block_m: int, block_n: int) -> torch.Tensor:
    """By the least and the largest id of a tile: apart, one and the same, or perhaps something in common."""
    segment_q, segment_k = collapsed(segment_q), collapsed(segment_k)
    q_lo, q_hi = (_by_tile(segment_q, 1, block_m, f)[:, None, :, None] for f in (_least, _largest))
    k_lo, k_hi = (_by_tile(segment_k, 1, block_n, f)[:, None, None, :] for f in (_least, _largest))
    return _kinds(*segment_tile(q_lo, q_hi, k_lo, k_hi))


def _row_kinds(row_start: torch.Tensor, row_end: torch.Tensor, seqlen_k: int, block_m: int, block_n: int) -> torch.Tensor:
    """By the union and the intersection of the intervals of a tile's queries."""
    row_start, row_end = collapsed(row_start), collapsed(row_end)
    start_lo, start_hi = (_by_tile(row_start, 2, block_m, f)[..., None] for f in (_least, _largest))
    end_lo, end_hi = (_by_tile(row_end, 2, block_m, f)[..., None] for f in (_least, _largest))
    first = torch.arange(0, seqlen_k, block_n, device=row_start.device)
    end = (first + block_n).clamp(max=seqlen_k)
    return _kinds(*row_tile(first, end, start_lo, start_hi, end_lo, end_hi))


@functools.lru_cache(maxsize=32)
def _full_words(seqlen_k: int, device: torch.device) -> torch.Tensor:
    """The words of a row that sees every key."""
    words = torch.full((-(-seqlen_k // WORD),), -1, dtype=torch.int32, device=device)
    if seqlen_k % WORD:
        words[-1] = (1 << seqlen_k % WORD) - 1
    return words


def _dense_kinds(dense: torch.Tensor, seqlen_k: int, block_m: int, block_n: int) -> torch.Tensor:
    """By "any" and "all" over the elements of each tile, keys first, so that what is left for queries is small."""
    dense = collapsed(dense)
    some = every = dense
    if dense.dtype == torch.int32:
        some, every, block_n = dense != 0, dense == _full_words(seqlen_k, dense.device)[: dense.shape[3]], block_n // WORD
        if dense.shape[3] == 1:  # perhaps the same for all keys
            every = every | (dense == -1)

    def over(t: torch.Tensor, reduce: Callable[[torch.Tensor, int], torch.Tensor]) -> torch.Tensor:
        return _by_tile(_by_tile(t, 3, block_n, reduce), 2, block_m, reduce)

    return _kinds(over(some, torch.any), over(every, torch.all))
