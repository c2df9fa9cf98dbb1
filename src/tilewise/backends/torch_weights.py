"""Weights of chosen queries, and their sums over all queries, in plain PyTorch: a second pass over the scores, from a known lse.

``p = exp(s - lse)``, tile by tile; scratch has a constant size. A row whose lse is -inf has no weights: its pivot is +inf, which
makes every p of it an exact zero.
"""

from __future__ import annotations

import dataclasses

import torch

from ..operands import DIMS
from ..plan import EMPTY, MASKED
from ..problem import Problem
from ..spec import NO_TENSORS, SLOTS, Tensors
from .torch_tiles import _Work as Work

__all__ = ["column_sums", "weights"]


def _pivot(work: Work, lse: torch.Tensor) -> torch.Tensor:
    """lse in the unit of the scores (heads, rows, 1)."""
    pivot = work.load(lse[..., None]) * work.steps.unit
    return pivot.masked_fill_(pivot == float("-inf"), float("inf"))


@torch.no_grad()
def column_sums(
    problem: Problem, q: torch.Tensor, k: torch.Tensor, lse: torch.Tensor, out: torch.Tensor, tensors: Tensors = NO_TENSORS
) -> None:
    """Fill ``out`` (batch, heads_q, seqlen_k), summed over the queries in their order."""
    work = Work(problem, q, tensors)
    total = out.zero_() if out.dtype == work.dtype else torch.zeros(out.shape, dtype=work.dtype, device=out.device)
    q, lse, sums = (work.by_group(t) for t in (q, lse, total))
    for chunk in work.chunks():
        b, h = chunk.batch, chunk.heads
        for g in work.groups():
            work.enter(chunk, g)
            for m_block in range(work.plan.m_blocks):
                at = (b, h, g, work.queries(m_block))
                pivot, here = _pivot(work, lse[at]), sums[b, h, g]
                for keys, p in _tiles(work, m_block, at, work.load(q[at]), pivot, k[b, h]):
                    here[..., keys].add_(p.view(*here.shape[:3], -1, p.shape[-1]).sum(3))
    if total is not out:
        out.copy_(total)


@torch.no_grad()
def weights(
    problem: Problem,
    q: torch.Tensor,
    k: torch.Tensor,
    lse: torch.Tensor,
    rows: torch.Tensor,
    out: torch.Tensor,
    tensors: Tensors = NO_TENSORS,
) -> None:
    """Fill ``out`` (batch, heads_q, rows, seqlen_k) for the queries ``rows``."""
    problem, positions, tensors = _of_rows(problem, rows, tensors)
    q, lse = q.index_select(2, rows), lse.index_select(2, rows)
    work = Work(problem, q, tensors)
    work.steps.positions = positions
    q, lse, out = (work.by_group(t) for t in (q, lse, out.zero_()))
    for chunk in work.chunks():
        b, h = chunk.batch, chunk.heads
        for g in work.groups():
            work.enter(chunk, g)
            for m_block in range(work.plan.m_blocks):
                at = (b, h, g, work.queries(m_block))
                for keys, p in _tiles(work, m_block, at, work.load(q[at]), _pivot(work, lse[at]), k[b, h]):
                    part = out[at][..., keys]
                    part.copy_(p.view(part.shape))


def _tiles(work: Work, m_block: int, at: tuple[slice, ...], qt: torch.Tensor, pivot: torch.Tensor, k: torch.Tensor):
    """``(keys, p)`` of each tile of keys that a tile of queries sees; p (heads, rows, keys) is scratch of the next."""
    lo, free_lo, free_hi, hi = work.plan.keys_of(m_block)
    for n_block in range(lo, hi):
        kind = work.kind(m_block, n_block, free_lo <= n_block < free_hi)
        if kind == EMPTY:
            continue
        keys = work.keys(n_block)
        s = work.scores(qt, work.load(k[:, :, keys]))
        work.steps.apply(s, at, keys)  # type: ignore[arg-type]
        if kind == MASKED:
            work.hide(s, work.queries(m_block), keys)
        yield keys, work.steps.weights(s, pivot)


def _of_rows(problem: Problem, rows: torch.Tensor, tensors: Tensors) -> tuple[Problem, torch.Tensor, Tensors]:
    """The problem of these queries alone, their positions, and their part of the tensors.

    They need not follow one another, so the bounds of the mask become intervals of their own.
    """
    p = problem
    chosen = {}
    for slot, t in zip(SLOTS, tensors, strict=True):
        dim = DIMS[slot].find("q")
        if t is not None and slot != "plan":
            chosen[slot] = t if dim < 0 or t.shape[dim] == 1 else t.index_select(dim, rows)
    tensors, positions = Tensors(**chosen), rows + p.q_start
    upper, lower, has_upper, has_lower = p.bounds
    if has_upper or has_lower:
        start = positions - lower if has_lower else torch.zeros_like(positions)
        end = positions + upper + 1 if has_upper else torch.full_like(positions, p.seqlen_k)
        start, end = start[None, None], end[None, None]
        if tensors.row_start is not None and tensors.row_end is not None:
            start, end = torch.maximum(start, tensors.row_start), torch.minimum(end, tensors.row_end)
        tensors = tensors._replace(row_start=start, row_end=end)
    spec = dataclasses.replace(p.spec, upper=None, lower=None, row=tensors.row_start is not None, plan="")
    return dataclasses.replace(p, spec=spec, seqlen_q=rows.shape[0]), positions, tensors
