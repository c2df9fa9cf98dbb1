"""Tiles in plain PyTorch: K and V stream past a resident Q tile, so the score matrix never exists. The CPU's default.

Invariant of the forward loop, per query row: ``m_i`` is the maximum of the visited scores (in base two, ``s2 = scale log2(e)
q k^T``), ``l_i = sum exp2(s2 - m_i)``, ``acc = sum exp2(s2 - m_i) v``. A row that has seen no key has ``m_i = -inf`` and zeros.

A tile holds several heads at once, so that one batched product fills all cores; the query heads that share a key head lie as
rows below one another, so K and V are never repeated. Scores and sums are float32 for float16, bfloat16 and float32 inputs and
float64 for float64 inputs. Scratch has a constant size, whatever the lengths. Base two because ``exp2`` is 3 times as fast as
``exp`` on a CPU (0.29 against 0.89 ns an element; 0.3 against 4.6 where the mask left -inf).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch

from ..bodies import allowed
from ..keep import kept, scale_of
from ..plan import EMPTY, FREE, MASKED, MaskTensors, TilePlan
from ..problem import Problem
from ..spec import NO_TENSORS, Tensors
from .tile_mask import TileMask
from .torch_scores import At, TileGradients, TileScores

__all__ = ["backward", "forward", "geometries", "tile_sizes", "work_dtype"]

# Measured on 2 CPU cores at seqlen 4096, head_dim 64.
BLOCK_M = 512  # rows of one head's score tile: the query heads of a group, times queries
BLOCK_N = 512  # keys of a tile
TILE_ELEMENTS = 1 << 21  # of the score tile of all heads together, with its q, k, v and accumulators

_LOG2E = math.log2(math.e)
_LN2 = math.log(2.0)
_NEG_INF = float("-inf")
_KEPT_MASKS = 4


class Sizes(NamedTuple):
    """What one tile holds: batches, key heads, query heads of each key head, queries, keys."""

    batch: int
    heads: int
    group: int
    block_m: int
    block_n: int


class _Chunk(NamedTuple):
    """Slices of one chunk of batches and key heads, and how many of each."""

    batch: slice
    heads: slice
    n_batch: int
    n_heads: int


def tile_sizes(problem: Problem) -> Sizes:
    """Tiles of at most ``TILE_ELEMENTS`` elements (or one head's tile), whatever the lengths, batch and heads."""
    p = problem
    group = min(p.group, BLOCK_M)
    block_m = min(p.seqlen_q, max(1, BLOCK_M // group))
    # Few rows (decoding) take more keys at once: fewer, longer tiles.
    block_n = min(p.seqlen_k, BLOCK_N * min(8, max(1, BLOCK_M // (group * block_m))))
    rows, width = group * block_m, p.head_dim + p.head_dim_v
    heads = max(1, TILE_ELEMENTS // (rows * block_n + (rows + block_n) * width))
    if heads >= p.heads_kv:
        return Sizes(_even_part(p.batch, heads // p.heads_kv), p.heads_kv, group, block_m, block_n)
    return Sizes(1, _even_part(p.heads_kv, heads), group, block_m, block_n)


def geometries(problem: Problem) -> list[tuple[int, int, bool]]:
    """The tables that the passes of a problem read: ``(block_m, block_n, transposed)``."""
    sizes = tile_sizes(problem)
    return [(sizes.block_m, sizes.block_n, False)]


def _even_part(total: int, most: int) -> int:
    """The size of the fewest parts of at most ``most``, made as equal as they can be: 8 by at most 5 is 4 and 4."""
    return -(-total // -(-total // most))


def _reduced_precision(device: torch.device) -> str:
    """``"tf32"`` or ``"bf16"`` if the process allows that in float32 products on this device, else ``""``."""
    if hasattr(torch._C, "_get_fp32_precision_getter"):
        allowed_now = torch._C._get_fp32_precision_getter("cuda" if device.type == "cuda" else "mkldnn", "matmul")
    elif device.type == "cuda":
        allowed_now = "tf32" if torch.backends.cuda.matmul.allow_tf32 else ""
    else:
        allowed_now = {"high": "tf32", "medium": "bf16"}.get(torch.get_float32_matmul_precision(), "")
    return allowed_now if allowed_now in ("tf32", "bf16") else ""


def work_dtype(dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """The dtype of the products and sums for inputs of ``dtype``.

    Where the process allows less than IEEE float32 products, float64 keeps the promise without touching a global switch.
    float16 and bfloat16 values are exact in TF32, so they stay in float32 there.
    """
    if dtype == torch.float64:
        return dtype
    reduced = _reduced_precision(device)
    if reduced == "bf16" or (reduced == "tf32" and dtype == torch.float32):
        return torch.float64
    return torch.float32


class _Work:
    """What one call works with: tile sizes, plan, scratch, masks."""

    def __init__(self, problem: Problem, q: torch.Tensor, tensors: Tensors, sizes: Sizes | None = None, natural: bool = False):
        self.problem = problem
        self.device = q.device
        self.dtype = work_dtype(q.dtype, q.device)
        self.sizes = sizes or tile_sizes(problem)
        self.plan = TilePlan(problem, self.sizes.block_m, self.sizes.block_n)
        self.steps = TileScores(problem, tensors, self.dtype, natural)
        self.scale = problem.sm_scale * self.steps.unit
        self.seed = tensors.seed
        self.keep_scale = scale_of(problem.spec.p_dropout)
        self._scratch: dict[str, torch.Tensor] = {}
        self._masks: dict[tuple[int, int, int], tuple[torch.Tensor, torch.Tensor]] = {}
        self.mask = None
        if MaskTensors.of(tensors) is not None:
            self.mask = TileMask(problem, tensors, self.sizes.block_m, self.sizes.block_n)
        self._part = (slice(None),) * 3
        self._kinds: list[list[int]] = []

    def chunks(self) -> Iterator[_Chunk]:
        p, s = self.problem, self.sizes
        for b in range(0, p.batch, s.batch):
            for h in range(0, p.heads_kv, s.heads):
                b_end, h_end = min(b + s.batch, p.batch), min(h + s.heads, p.heads_kv)
                yield _Chunk(slice(b, b_end), slice(h, h_end), b_end - b, h_end - h)

    def groups(self) -> Iterator[slice]:
        for g in range(0, self.problem.group, self.sizes.group):
            yield slice(g, min(g + self.sizes.group, self.problem.group))

    def queries(self, m_block: int) -> slice:
        first = m_block * self.sizes.block_m
        return slice(first, min(first + self.sizes.block_m, self.problem.seqlen_q))

    def keys(self, n_block: int) -> slice:
        first = n_block * self.sizes.block_n
        return slice(first, min(first + self.sizes.block_n, self.problem.seqlen_k))

    def by_group(self, t: torch.Tensor) -> torch.Tensor:
        """(batch, heads_q, ...) as (batch, heads_kv, group, ...): a view."""
        return t.unflatten(1, (self.problem.heads_kv, self.problem.group))

    def load(self, t: torch.Tensor) -> torch.Tensor:
        """A tile (batches, heads, [group,] rows, width) as (batches * heads, [group *] rows, width): a view where possible."""
        t = t.reshape(t.shape[0] * t.shape[1], -1, t.shape[-1]).to(self.dtype)
        return t if t.stride(-1) == 1 else t.contiguous()

    def scratch(self, name: str, *shape: int) -> torch.Tensor:
        """Uninitialised memory that every tile uses again."""
        size = math.prod(shape)
        kept = self._scratch.get(name)
        if kept is None or kept.numel() < size:
            kept = self._scratch[name] = torch.empty(size, dtype=self.dtype, device=self.device)
        return kept[:size].view(shape)

    def enter(self, chunk: _Chunk, group: slice) -> None:
        """All tiles that follow belong to these batches and heads."""
        if self.mask is not None:
            self._part = (chunk.batch, chunk.heads, group)
            self._kinds = self.mask.kinds_of(*self._part)

    def kind(self, m_block: int, n_block: int, free: bool) -> int:
        """EMPTY, MASKED or FREE. Tiles are cut at seqlen_k, so without a bound or a mask that is a tensor every tile is free."""
        if self.mask is not None:
            return self._kinds[m_block][n_block]
        _, _, has_upper, has_lower = self.problem.bounds
        return MASKED if not free and (has_upper or has_lower) else FREE

    def scores(self, qt: torch.Tensor, kt: torch.Tensor) -> torch.Tensor:
        """``scale q k^T`` (heads, rows, keys) in the unit of the scores, in scratch."""
        s = self.scratch("s", qt.shape[0], qt.shape[1], kt.shape[1])
        # out= also keeps autocast away from the product.
        return torch.baddbmm(s, qt, kt.transpose(1, 2), beta=0, alpha=self.scale, out=s)

    def hide(self, s: torch.Tensor, queries: slice, keys: slice) -> None:
        """Put -inf where the query does not see the key."""
        rows, cols = queries.stop - queries.start, keys.stop - keys.start
        keep, fill = self._mask(queries.start + self.problem.q_start - keys.start, rows, cols)
        if self.mask is not None:
            batch, heads, group = self._part
            ok = (keep != 0) & self.mask.seen(batch, heads, group, queries, keys)
            s.view(batch.stop - batch.start, heads.stop - heads.start, -1, rows, cols).masked_fill_(~ok, _NEG_INF)
            return
        bits = s.view(s.shape[0], -1, rows, cols).view(keep.dtype)
        # On the bits this is 4 times as fast as masked_fill_ with a mask that broadcasts, and hides a NaN as well.
        bits.bitwise_and_(keep).bitwise_or_(fill)

    def dropped(self, p: torch.Tensor, at: At, keys: slice) -> torch.Tensor | None:
        """True where dropout takes a weight of the tile ``p``; None if the spec has none."""
        if self.seed is None:
            return None
        batch, heads, group, queries = at
        each, members = (torch.arange(s.start, s.stop, device=self.device) for s in (heads, group))
        owners = (each[:, None] * self.problem.group + members).flatten()
        return kept(self.seed, self.problem.spec.p_dropout, batch, owners, queries, keys).logical_not().reshape(p.shape)

    def _mask(self, offset: int, rows: int, cols: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Bits to keep and bits to set, for a tile whose row 0 stands ``offset`` after its key 0 (all its keys exist)."""
        found = self._masks.get((offset, rows, cols))
        if found is None:
            upper, lower, has_upper, has_lower = self.problem.bounds
            q_pos = torch.arange(offset, offset + rows, device=self.device)[:, None]
            kv_pos = torch.arange(cols, device=self.device)[None, :]
            ok = allowed(q_pos, kv_pos, cols, upper, lower, has_upper, has_lower)
            integer = torch.int64 if self.dtype == torch.float64 else torch.int32
            zero = torch.zeros((), dtype=self.dtype, device=self.device)
            found = (ok.to(integer).neg_(), torch.where(ok, zero, _NEG_INF).view(integer))
            if len(self._masks) >= _KEPT_MASKS:
                del self._masks[next(iter(self._masks))]
            self._masks[offset, rows, cols] = found
        return found


@torch.no_grad()
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
) -> None:
    """Fill ``o`` and ``lse``, and ``maxima`` if given (backend interface)."""
    work = _Work(problem, q, tensors)
    q, o, lse = (work.by_group(t) for t in (q, o, lse))
    maxima = None if maxima is None else work.by_group(maxima)
    rows = work.by_group(rows) if problem.keeps_rows and rows is not None else None
    for chunk in work.chunks():
        b, h = chunk.batch, chunk.heads
        for g in work.groups():
            work.enter(chunk, g)
            for m_block in range(work.plan.m_blocks):
                at = (b, h, g, work.queries(m_block))
                kept, top = (None if t is None else t[at] for t in (rows, maxima))
                _forward_tile(work, m_block, at, q[at], k[b, h], v[b, h], o[at], lse[at], kept, top)


def _forward_tile(
    work: _Work,
    m_block: int,
    at: At,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    o: torch.Tensor,
    lse: torch.Tensor,
    rows: torch.Tensor | None,
    maxima: torch.Tensor | None,
) -> None:
    """All keys past one Q tile (batches, heads, group, queries, head_dim)."""
    qt = work.load(q)
    m_i = qt.new_full((*qt.shape[:2], 1), _NEG_INF)
    l_i = torch.zeros_like(m_i)
    acc = work.scratch("acc", *qt.shape[:2], v.shape[-1]).zero_()
    lo, free_lo, free_hi, hi = work.plan.keys_of(m_block)
    for n_block in range(lo, hi):
        kind = work.kind(m_block, n_block, free_lo <= n_block < free_hi)
        if kind == EMPTY:
            continue
        keys = work.keys(n_block)
        s = work.scores(qt, work.load(k[:, :, keys]))
        work.steps.apply(s, at, keys)
        masked = kind == MASKED
        if masked:
            work.hide(s, work.queries(m_block), keys)
        m_new = torch.maximum(m_i, s.amax(-1, keepdim=True))
        # A row without a key yet has no maximum: exp2(-inf - 0) is 0 where exp2(-inf - -inf) is NaN.
        pivot = m_new.masked_fill(m_new == _NEG_INF, 0.0)
        alpha = work.steps.weights(m_i, pivot)
        p = work.steps.weights(s, pivot)
        l_i.mul_(alpha).add_(p.sum(-1, keepdim=True))
        dropped = work.dropped(p, at, keys)
        if dropped is not None:
            p.masked_fill_(dropped, 0.0)
        acc.mul_(alpha)
        torch.baddbmm(acc, p, work.load(v[:, :, keys]), out=acc)
        m_i = m_new
    if maxima is not None:
        maxima.copy_((m_i / work.steps.unit).view(lse.shape))  # before the sink, which is no score
    if work.steps.sink is not None:
        sink = work.steps.sink_at(at, m_i) * work.steps.unit
        m_new = torch.maximum(m_i, sink)
        pivot = m_new.masked_fill(m_new == _NEG_INF, 0.0)
        alpha = work.steps.weights(m_i, pivot)
        l_i.mul_(alpha).add_(work.steps.weights(sink, pivot))
        acc.mul_(alpha)
        m_i = m_new
    if work.seed is not None:
        acc.mul_(work.keep_scale)
    log_l = torch.log2(l_i).mul_(_LN2)
    m_i = m_i / work.steps.unit
    lse.copy_((log_l + m_i).view(lse.shape))
    if rows is not None:
        rows[..., 0].copy_(m_i.view(lse.shape))
        rows[..., 1].copy_(log_l.view(lse.shape))
    o.copy_(acc.div_(l_i.masked_fill_(l_i == 0, 1.0)).view(o.shape))


@torch.no_grad()
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
    work = _Work(problem, q, tensors)
    more = TileGradients(work.steps, grads)
    q, do, o, lse = (work.by_group(t) for t in (q, do, o, lse))
    dlse, dq = (None if t is None else work.by_group(t) for t in (dlse, dq))
    kept = work.by_group(rows) if problem.keeps_rows and rows is not None else None
    for chunk in work.chunks():
        b, h = chunk.batch, chunk.heads
        dk_sum, dv_sum = (None if t is None else _sum_of(t[b, h], work.dtype) for t in (dk, dv))
        for g in work.groups():
            work.enter(chunk, g)
            for m_block in range(work.plan.m_blocks):
                at = (b, h, g, work.queries(m_block))
                extra = (None if t is None else t[at] for t in (dlse, kept))
                tile = _Rows.of(work, at, q[at], do[at], o[at], lse[at], *extra)
                if grads.sink is not None:
                    natural = work.load(lse[at][..., None])
                    more.add_sink(work.steps.sink_at(at, natural), natural, tile.delta, at)
                dq_tile = None if dq is None else dq[at]
                _backward_tile(work, m_block, tile, k[b, h], v[b, h], dq_tile, dk_sum, dv_sum, more)
        for out, total in ((dk, dk_sum), (dv, dv_sum)):
            if out is not None and total is not None and total.dtype != out.dtype:
                out[b, h].copy_(total)
    more.finish()


def _sum_of(out: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Zeros to sum into: the output itself where it is wide enough, so that it is rounded once."""
    return out.zero_() if out.dtype == dtype else torch.zeros(out.shape, dtype=dtype, device=out.device)


class _Rows(NamedTuple):
    """What the backward pass keeps of a Q tile: (heads, rows, width) each, or (heads, rows, 1).

    ``p = exp(s - pivot - log_l)``, in the unit of the scores and in base two. Where the spec has no bias, ``pivot`` is lse.
    """

    at: At
    q: torch.Tensor
    do: torch.Tensor
    pivot: torch.Tensor
    log_l: torch.Tensor | None
    delta: torch.Tensor

    @classmethod
    def of(
        cls,
        work: _Work,
        at: At,
        q: torch.Tensor,
        do: torch.Tensor,
        o: torch.Tensor,
        lse: torch.Tensor,
        dlse: torch.Tensor | None,
        kept: torch.Tensor | None,
    ) -> _Rows:
        """``delta = sum_d do o - dlse`` carries the gradients of both outputs. A row that sees no key gets none."""
        dot = work.load(do)
        pivot = work.load(lse[..., None] if kept is None else kept[..., :1]) * work.steps.unit
        log_l = None if kept is None else work.load(kept[..., 1:]) * _LOG2E
        delta = (dot * work.load(o)).sum(-1, keepdim=True)
        if dlse is not None:
            delta.sub_(work.load(dlse[..., None]))
        empty = pivot == _NEG_INF
        pivot.masked_fill_(empty, 0.0)
        if log_l is not None:
            log_l.masked_fill_(empty, 0.0)
        return cls(at, work.load(q), dot.masked_fill(empty, 0.0), pivot, log_l, delta.masked_fill_(empty, 0.0))


def _backward_tile(
    work: _Work,
    m_block: int,
    rows: _Rows,
    k: torch.Tensor,
    v: torch.Tensor,
    dq: torch.Tensor | None,
    dk_sum: torch.Tensor | None,
    dv_sum: torch.Tensor | None,
    more: TileGradients,
) -> None:
    """All keys past one Q tile: recompute p, sum into dk, dv and the gradients of the spec's tensors, and write dq."""
    scale = work.problem.sm_scale
    heads, n_rows, head_dim = rows.q.shape
    if dq is not None:
        dq_acc = work.scratch("acc", heads, n_rows, head_dim).zero_()
    lo, free_lo, free_hi, hi = work.plan.keys_of(m_block)
    for n_block in range(lo, hi):
        kind = work.kind(m_block, n_block, free_lo <= n_block < free_hi)
        if kind == EMPTY:
            continue
        keys = work.keys(n_block)
        kt, vt = work.load(k[:, :, keys]), work.load(v[:, :, keys])
        s = work.scores(rows.q, kt)
        slopes = work.steps.apply(s, rows.at, keys, backward=True)
        if kind == MASKED:
            work.hide(s, work.queries(m_block), keys)
        p = work.steps.weights(s, rows.pivot, rows.log_l)
        dropped = work.dropped(p, rows.at, keys)
        if dv_sum is not None:
            part = work.scratch("dv", *vt.shape)
            used = p if dropped is None else p.masked_fill(dropped, 0.0).mul_(work.keep_scale)
            torch.bmm(used.transpose(1, 2), rows.do, out=part)
            dv_sum[:, :, keys].add_(part.view_as(dv_sum[:, :, keys]))
        if dq is None and dk_sum is None and not more.of_scores:
            continue
        dp = torch.bmm(rows.do, vt.transpose(1, 2), out=work.scratch("dp", *p.shape))
        if dropped is not None:
            dp.masked_fill_(dropped, 0.0).mul_(work.keep_scale)
        ds = p.mul_(dp.sub_(rows.delta))
        more.add(ds, slopes, rows.at, keys)
        ds = work.steps.before(ds, slopes)
        if dk_sum is not None:
            part = work.scratch("dk", *kt.shape)
            torch.baddbmm(part, ds.transpose(1, 2), rows.q, beta=0, alpha=scale, out=part)
            dk_sum[:, :, keys].add_(part.view_as(dk_sum[:, :, keys]))
        if dq is not None:
            torch.baddbmm(dq_acc, ds, kt, alpha=scale, out=dq_acc)
    if dq is not None:
        dq.copy_(dq_acc.view(dq.shape))
