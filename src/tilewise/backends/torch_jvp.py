"""Forward mode on tiles of plain PyTorch: ``o``, ``lse`` and their derivatives along tangents, in one walk over the keys.

With ``s`` the scores after all steps, ``ts`` their derivative, and ``p = exp(s - lse)``,

    t_lse = sum_j p_j ts_j + p_sink tsink        t_o = sum_j p_j (ts_j v_j + tv_j) - t_lse o

Dropout takes weights from the sums over v and tv, not from those of t_lse. The walk is that of ``torch_tiles.forward``. Invariant
after every key tile, besides the one of that walk: ``t_i = sum exp2(s2 - m_i) ts`` and ``acc_t = sum exp2(s2 - m_i) (ts v + tv)``.
Tangents of scores are natural, whatever the unit of the scores is.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from ..plan import EMPTY, MASKED
from ..problem import Problem, Tangents
from ..spec import NO_TENSORS, Tensors
from .torch_scores import At
from .torch_tiles import _LN2, _NEG_INF, _Work

__all__ = ["jvp"]


class _Scores:
    """The derivatives of the score steps of one call."""

    def __init__(self, work: _Work, tangents: Tangents):
        self.steps = work.steps
        group = work.steps._grouped
        self.bias = group(tangents.bias)
        self.slopes = group(None if tangents.slopes is None else tangents.slopes.to(work.dtype))
        self.sink = group(None if tangents.sink is None else tangents.sink.to(work.dtype))
        self.any = any(t is not None for t in (tangents.q, tangents.k, self.bias, self.slopes))

    def apply(self, t: torch.Tensor, slopes: list[torch.Tensor | None], at: At, keys: slice) -> None:
        """Carry ``t``, the derivative of the scores before the steps, through them in place; ``slopes``: those of the steps."""
        steps = self.steps
        tile = t.view(*steps._sizes((*at, keys)))
        for step, slope in zip(steps.steps, slopes, strict=True):
            if slope is not None:
                t.mul_(slope)
            elif step == "alibi" and self.slopes is not None:
                tile.sub_(steps._part(self.slopes, at[:3])[..., None, None] * steps._distance(at[3], keys, t.device))
            elif step == "bias" and self.bias is not None:
                tile.add_(steps._part(self.bias, (*at, keys)))

    def sink_at(self, at: At, like: torch.Tensor) -> torch.Tensor | float:
        """The tangents of the sinks of a tile's rows (heads, rows, 1)."""
        if self.sink is None:
            return 0.0
        return self.steps._part(self.sink, at[:3])[..., None].expand(*self.steps._sizes(at)).reshape(like.shape)


class _Tile(NamedTuple):
    """The tensors of one tile of queries, and all keys that it may see."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    tq: torch.Tensor | None
    tk: torch.Tensor | None
    tv: torch.Tensor | None
    o: torch.Tensor
    lse: torch.Tensor
    t_o: torch.Tensor
    t_lse: torch.Tensor
    rows: torch.Tensor | None


@torch.no_grad()
def jvp(
    problem: Problem,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    o: torch.Tensor,
    lse: torch.Tensor,
    t_o: torch.Tensor,
    t_lse: torch.Tensor,
    tangents: Tangents,
    tensors: Tensors = NO_TENSORS,
    rows: torch.Tensor | None = None,
) -> None:
    """Fill ``o``, ``lse``, ``t_o`` and ``t_lse`` (backend interface)."""
    work = _Work(problem, q, tensors)
    scores = _Scores(work, tangents)
    kept = rows if problem.keeps_rows else None
    of_queries = [None if t is None else work.by_group(t) for t in (q, tangents.q, o, lse, t_o, t_lse, kept)]
    for chunk in work.chunks():
        b, h = chunk.batch, chunk.heads
        kt, vt, tk, tv = (None if t is None else t[b, h] for t in (k, v, tangents.k, tangents.v))
        for g in work.groups():
            work.enter(chunk, g)
            for m_block in range(work.plan.m_blocks):
                at = (b, h, g, work.queries(m_block))
                qt, tq, *out = (None if t is None else t[at] for t in of_queries)
                _jvp_tile(work, scores, m_block, at, _Tile(qt, kt, vt, tq, tk, tv, *out))  # type: ignore[arg-type]


def _jvp_tile(work: _Work, scores: _Scores, m_block: int, at: At, tile: _Tile) -> None:
    """All keys past one Q tile (batches, heads, group, queries, head_dim)."""
    qt = work.load(tile.q)
    tqt = None if tile.tq is None else work.load(tile.tq)
    m_i = qt.new_full((*qt.shape[:2], 1), _NEG_INF)
    l_i, t_i = torch.zeros_like(m_i), torch.zeros_like(m_i)
    acc = work.scratch("acc", *qt.shape[:2], tile.v.shape[-1]).zero_()
    acc_t = work.scratch("acc_t", *acc.shape).zero_()
    lo, free_lo, free_hi, hi = work.plan.keys_of(m_block)
    for n_block in range(lo, hi):
        kind = work.kind(m_block, n_block, free_lo <= n_block < free_hi)
        if kind == EMPTY:
            continue
        keys = work.keys(n_block)
        kt = work.load(tile.k[:, :, keys])
        s = work.scores(qt, kt)
        slopes = work.steps.apply(s, at, keys, scores.any)
        masked = kind == MASKED
        if masked:
            work.hide(s, work.queries(m_block), keys)
        m_new = torch.maximum(m_i, s.amax(-1, keepdim=True))
        pivot = m_new.masked_fill(m_new == _NEG_INF, 0.0)
        alpha = work.steps.weights(m_i, pivot)
        p = work.steps.weights(s, pivot)
        l_i.mul_(alpha).add_(p.sum(-1, keepdim=True))
        for total in (acc, acc_t, t_i):
            total.mul_(alpha)
        vt = work.load(tile.v[:, :, keys])
        dropped = work.dropped(p, at, keys)
        used = p if dropped is None else p.masked_fill(dropped, 0.0)
        torch.baddbmm(acc, used, vt, out=acc)
        if tile.tv is not None:
            torch.baddbmm(acc_t, used, work.load(tile.tv[:, :, keys]), out=acc_t)
        if scores.any:
            t = work.scratch("t", *p.shape).zero_()
            for a, b in ((tqt, kt), (qt, None if tile.tk is None else work.load(tile.tk[:, :, keys]))):
                if a is not None and b is not None:
                    torch.baddbmm(t, a, b.mT, alpha=work.problem.sm_scale, out=t)
            scores.apply(t, slopes, at, keys)
            # Keys that nobody sees may hold anything, as may the derivative of a function, and 0 * NaN is not 0.
            pt = torch.where(p == 0, 0.0, t.mul_(p))
            t_i.add_(pt.sum(-1, keepdim=True))
            if dropped is not None:
                pt = pt.masked_fill(dropped, 0.0)
            torch.baddbmm(acc_t, pt, vt, out=acc_t)
        m_i = m_new
    if work.steps.sink is not None:
        sink = work.steps.sink_at(at, m_i) * work.steps.unit
        m_new = torch.maximum(m_i, sink)
        pivot = m_new.masked_fill(m_new == _NEG_INF, 0.0)
        alpha = work.steps.weights(m_i, pivot)
        weight = work.steps.weights(sink, pivot)
        for total in (acc, acc_t, t_i, l_i):
            total.mul_(alpha)
        l_i.add_(weight)
        t_i.add_(weight * scores.sink_at(at, m_i))
        m_i = m_new
    if work.seed is not None:
        acc.mul_(work.keep_scale)
        acc_t.mul_(work.keep_scale)
    log_l = torch.log2(l_i).mul_(_LN2)
    m_i = m_i / work.steps.unit
    tile.lse.copy_((log_l + m_i).view(tile.lse.shape))
    if tile.rows is not None:
        tile.rows[..., 0].copy_(m_i.view(tile.lse.shape))
        tile.rows[..., 1].copy_(log_l.view(tile.lse.shape))
    l_i.masked_fill_(l_i == 0, 1.0)
    t_lse = t_i.div_(l_i)
    tile.t_lse.copy_(t_lse.view(tile.t_lse.shape))
    acc.div_(l_i)
    tile.o.copy_(acc.view(tile.o.shape))
    tile.t_o.copy_(acc_t.div_(l_i).sub_(acc.mul_(t_lse)).view(tile.t_o.shape))
