"""Second derivatives on rows of plain PyTorch, for every backend: the gradient of a forward-mode derivative.

With ``t_o`` and ``t_lse`` the derivatives of ``o`` and ``lse`` along tangents, ``second`` gives them and the gradients of

    L = <do, t_o> + <dlse, t_lse>

with respect to q, k, v, bias, slopes and sink. The gradient of a backward pass is the same: there the tangents are what came back
for dq, dk, dv, ..., ``t_o`` and ``t_lse`` are the gradients of ``do`` and ``dlse``, and the rest those of the inputs.

For one row, with ``p`` the weights (that of the sink among them, whose value is 0), ``ts`` the tangents of the scores, ``D`` the
factors of a dropout (constants), ``a = D (do . v)`` and ``b = D (do . tv)``:

    m = sum p ts                            delta = sum p a - dlse
    t_lse = m                               t_o = sum D (p (ts - m) v + p tv)
    dL/dts = g = p (a - delta)              u = ts (a - delta) - m a + b
    dL/ds  = h = p (u - sum p u)            dL/dv = D p (ts - m) do

Before a score step f, ``h`` becomes ``h f' + g ts f''`` and ``g`` becomes ``g f'``; before all of them ``s = scale q k^T`` and
``ts = scale (tq k^T + q tk^T)``, so ``dq = scale (h k + g tk)`` and ``dk = scale (h^T q + g^T tq)``.

A block holds some rows and all keys that they may see: as many rows as ``_ELEMENTS`` allows, so memory is linear in the lengths.
Scores are natural and weights are made anew from them. Sums run in one order, so the bits repeat.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from ..bodies import softcap_slope
from ..plan import EMPTY, FREE
from ..problem import Problem, Tangents
from ..spec import NO_TENSORS, Tensors
from .torch_scores import At, TileGradients
from .torch_tiles import _NEG_INF, BLOCK_M, Sizes, _sum_of, _Work

__all__ = ["second"]

_ELEMENTS = {"cpu": 1 << 20}  # of a block of scores (or one row), of which about eight are alive at once
_MORE_ELEMENTS = 1 << 23  # on other devices
_BLOCK_N = 64  # keys that are skipped or visited together
_TILES = 1 << 20  # that a mask of tensors is judged in, for each head


def _sizes(problem: Problem, device: torch.device) -> Sizes:
    """Blocks of rows, with all keys that one of them may see."""
    p, most = problem, _ELEMENTS.get(device.type, _MORE_ELEMENTS)
    upper, lower, has_upper, has_lower = p.bounds
    block_m = min(p.seqlen_q, BLOCK_M)
    band = max(1, upper + lower + block_m + 2 * _BLOCK_N) if has_upper and has_lower else p.seqlen_k
    row = min(band, p.seqlen_k) + p.head_dim + p.head_dim_v
    group = max(1, min(p.group, most // row))
    block_m = max(1, min(block_m, most // (row * group)))
    heads = max(1, most // (row * group * block_m))
    n_blocks = max(1, _TILES // -(-p.seqlen_q // block_m))
    block_n = min(p.seqlen_k, max(_BLOCK_N, -(-p.seqlen_k // n_blocks)))
    if heads >= p.heads_kv:
        return Sizes(min(p.batch, heads // p.heads_kv), p.heads_kv, group, block_m, block_n)
    return Sizes(1, heads, group, block_m, block_n)


class _Step(NamedTuple):
    """What a score step leaves behind: its derivative, and its second derivative times the tangent that came in. None: 1, and 0."""

    name: str
    slope: torch.Tensor | None
    bend: torch.Tensor | None


class _Steps:
    """The score steps of one call, with their tangents and gradients."""

    def __init__(self, work: _Work, tangents: Tangents, grads: Tensors):
        self.steps = work.steps
        group, dtype = self.steps._grouped, work.dtype
        self.bias = group(tangents.bias)
        self.slopes = group(None if tangents.slopes is None else tangents.slopes.to(dtype))
        self.sink = group(None if tangents.sink is None else tangents.sink.to(dtype))
        self.moves = any(t is not None for t in (tangents.q, tangents.k, self.bias, self.slopes))
        self.sums = TileGradients(self.steps, grads)

    def carry(self, s: torch.Tensor, t: torch.Tensor | None, at: At, keys: slice) -> list[_Step]:
        """Take scores and their tangents through all steps in place."""
        steps, done = self.steps, []
        sizes = steps._sizes((*at, keys))
        tile, moved = s.view(sizes), None if t is None else t.view(sizes)
        for name in steps.steps:
            slope = bend = None
            if name == "softcap":
                s.div_(steps.cap).tanh_()
                slope = softcap_slope(s)
                bend = None if t is None else slope * s * t * (-2.0 / steps.cap)
                s.mul_(steps.cap)
            elif name == "fn" and steps.function is not None:
                places = steps._places(at, keys, s.device)
                slope, bend = (None if d is None else d.reshape(s.shape) for d in steps.function.curves(tile, *places))
                bend = None if t is None or bend is None else bend * t
                tile.copy_(steps.function.scores(tile.clone(), *places))
            elif name == "alibi" and steps.slopes is not None:
                distance = steps._distance(at[3], keys, s.device)
                tile.sub_(steps._part(steps.slopes, at[:3])[..., None, None] * distance)
                if moved is not None and self.slopes is not None:
                    moved.sub_(steps._part(self.slopes, at[:3])[..., None, None] * distance)
            elif name == "bias" and steps.bias is not None:
                tile.add_(steps._part(steps.bias, (*at, keys)))
                if moved is not None and self.bias is not None:
                    moved.add_(steps._part(self.bias, (*at, keys)))
            if slope is not None and t is not None:
                t.mul_(slope)
            done.append(_Step(name, slope, bend))
        return done

    def back(
        self, h: torch.Tensor, g: torch.Tensor, done: list[_Step], unseen: torch.Tensor, at: At, keys: slice
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The gradients of scores and of their tangents before all steps, from those after them; sums for the spec's tensors."""
        sizes = self.steps._sizes((*at, keys))
        for name, slope, bend in reversed(done):
            if name == "alibi":
                total = self.sums._sum("slopes")
                if total is not None:
                    part = self.steps._part(total, at[:3])
                    weighed = h.view(sizes) * self.steps._distance(at[3], keys, h.device)
                    part.sub_(weighed.sum((-1, -2)).sum_to_size(part.shape))
            elif name == "bias":
                total = self.sums._sum("bias")
                if total is not None:
                    part = self.steps._part(total, (*at, keys))
                    part.add_(h.view(sizes).sum_to_size(part.shape))
            if slope is not None:
                h = h * slope
                if bend is not None:
                    h = h.add_(g * bend)
                # Where a key has no weight, derivatives of a function may be anything.
                h, g = h.masked_fill_(unseen, 0.0), (g * slope).masked_fill_(unseen, 0.0)
        return h, g

    def sink_at(self, t: torch.Tensor | None, at: At, like: torch.Tensor) -> torch.Tensor:
        """A value of each head at a tile's rows (heads, rows, 1); 0 where there is none."""
        if t is None:
            return torch.zeros_like(like)
        return self.steps._part(t, at[:3])[..., None].expand(*self.steps._sizes(at)).reshape(like.shape)

    def add_sink(self, h: torch.Tensor, at: At) -> None:
        total = self.sums._sum("sink")
        if total is not None:
            part = self.steps._part(total, at[:3])
            part.add_(h.view(self.steps._sizes(at)).sum(-1).sum_to_size(part.shape))


class _Inputs(NamedTuple):
    """What a block reads: of its queries (batches, heads, group, queries, width), of all keys (batches, heads, keys, width)."""

    q: torch.Tensor
    tq: torch.Tensor | None
    do: torch.Tensor | None
    dlse: torch.Tensor | None
    k: torch.Tensor
    v: torch.Tensor
    tk: torch.Tensor | None
    tv: torch.Tensor | None


class _Outputs(NamedTuple):
    """What a block writes, and (dk, dv) adds to. None: nobody wants it."""

    t_o: torch.Tensor | None
    t_lse: torch.Tensor | None
    dq: torch.Tensor | None
    dk: torch.Tensor | None
    dv: torch.Tensor | None


@torch.no_grad()
def second(
    problem: Problem,
    do: torch.Tensor | None,
    dlse: torch.Tensor | None,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    tangents: Tangents,
    t_o: torch.Tensor | None,
    t_lse: torch.Tensor | None,
    dq: torch.Tensor | None,
    dk: torch.Tensor | None,
    dv: torch.Tensor | None,
    tensors: Tensors = NO_TENSORS,
    grads: Tensors = NO_TENSORS,
) -> None:
    """Fill the outputs that are not None; the problem has keys and queries. ``tensors``, their tangents and ``grads`` are views
    with all dims of their slots, and have no plan."""
    work = _Work(problem, q, tensors, _sizes(problem, q.device), natural=True)
    steps = _Steps(work, tangents, grads)
    of_queries = [None if t is None else work.by_group(t) for t in (q, tangents.q, do, dlse, t_o, t_lse, dq)]
    for chunk in work.chunks():
        b, h = chunk.batch, chunk.heads
        of_keys = [None if t is None else t[b, h] for t in (k, v, tangents.k, tangents.v)]
        sums = [None if t is None else _sum_of(t[b, h], work.dtype) for t in (dk, dv)]
        for g in work.groups():
            work.enter(chunk, g)
            for m_block in range(work.plan.m_blocks):
                at = (b, h, g, work.queries(m_block))
                own = [None if t is None else t[at] for t in of_queries]
                _block(work, steps, m_block, at, _Inputs(*own[:4], *of_keys), _Outputs(*own[4:], *sums))  # type: ignore[arg-type]
        for out, total in zip((dk, dv), sums, strict=True):
            if out is not None and total is not None and total.dtype != out.dtype:
                out[b, h].copy_(total)
    steps.sums.finish()


def _visible(work: _Work, m_block: int) -> tuple[slice, bool]:
    """The keys from the first to the last tile that a block of rows may see, and whether they need the mask."""
    lo, free_lo, free_hi, hi = work.plan.keys_of(m_block)
    if work.mask is None:
        if lo >= hi:
            return slice(0, 0), False
        _, _, has_upper, has_lower = work.problem.bounds
        free = free_lo <= lo and hi <= free_hi
        return slice(work.keys(lo).start, work.keys(hi - 1).stop), (has_upper or has_lower) and not free
    kinds = {n: work.kind(m_block, n, free_lo <= n < free_hi) for n in range(lo, hi)}
    seen = [n for n, kind in kinds.items() if kind != EMPTY]
    if not seen:
        return slice(0, 0), False
    keys = slice(work.keys(seen[0]).start, work.keys(seen[-1]).stop)
    return keys, any(kinds[n] != FREE for n in range(seen[0], seen[-1] + 1))


def _products(pairs: list[tuple[torch.Tensor | None, torch.Tensor | None]], like: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
    """``scale sum a b^T`` over the pairs that are there."""
    out = torch.zeros_like(like)
    for a, b in pairs:
        if a is not None and b is not None:
            torch.baddbmm(out, a, b.mT, alpha=scale, out=out)
    return out


def _weights(s: torch.Tensor, sink: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The weights of the scores ``s`` (in their memory), those of the sinks, and which rows have neither."""
    top = torch.maximum(sink, s.amax(-1, keepdim=True)) if s.shape[-1] else sink
    empty = top == _NEG_INF
    pivot = top.masked_fill(empty, 0.0)
    p, p_sink = s.sub_(pivot).exp_(), torch.exp(sink - pivot)
    total = (p.sum(-1, keepdim=True) + p_sink).masked_fill_(empty, 1.0)
    return p.div_(total), p_sink.div_(total), empty


def _cleared(t: torch.Tensor | None, where: torch.Tensor) -> Any:
    return None if t is None else t.masked_fill(where, 0.0)


def _block(work: _Work, steps: _Steps, m_block: int, at: At, x: _Inputs, out: _Outputs) -> None:
    """All that one block of rows has to do with, by the names at the top of this file."""
    keys, masked = _visible(work, m_block)
    scale = work.problem.sm_scale
    qt, kt, vt = work.load(x.q), work.load(x.k[:, :, keys]), work.load(x.v[:, :, keys])
    tqt = None if x.tq is None else work.load(x.tq)
    tkt, tvt = (None if t is None else work.load(t[:, :, keys]) for t in (x.tk, x.tv))
    s = torch.bmm(qt, kt.mT).mul_(scale)
    t = _products([(tqt, kt), (qt, tkt)], s, scale) if steps.moves else None
    done = steps.carry(s, t, at, keys)
    if masked:
        work._masks.clear()  # those of other blocks are as large as this one's, and of no use
        work.hide(s, at[3], keys)
    row = qt.new_full((*qt.shape[:2], 1), _NEG_INF)
    sink = row if work.steps.sink is None else steps.sink_at(work.steps.sink, at, row)
    p, p_sink, empty = _weights(s, sink)

    # What the mask hides may hold anything, and 0 * NaN is not 0.
    unseen = p == 0
    if masked:
        nobody = unseen.all(1)[..., None]
        kt, vt, tkt, tvt = (_cleared(one, nobody) for one in (kt, vt, tkt, tvt))
        qt, tqt = _cleared(qt, empty), _cleared(tqt, empty)
    t = torch.zeros_like(p) if t is None else t.masked_fill_(unseen, 0.0)
    t_sink = steps.sink_at(steps.sink, at, row)
    dot = qt.new_zeros((*qt.shape[:2], vt.shape[-1])) if x.do is None else _cleared(work.load(x.do), empty)
    dlse = torch.zeros_like(row) if x.dlse is None else _cleared(work.load(x.dlse[..., None]), empty)
    dropped = work.dropped(p, at, keys)

    def kept(one: torch.Tensor) -> torch.Tensor:
        return one if dropped is None else one.masked_fill(dropped, 0.0).mul_(work.keep_scale)

    a = kept(torch.bmm(dot, vt.mT).masked_fill_(unseen, 0.0))
    b = None if tvt is None else kept(torch.bmm(dot, tvt.mT).masked_fill_(unseen, 0.0))
    m = (p * t).sum(-1, keepdim=True) + p_sink * t_sink
    delta = (p * a).sum(-1, keepdim=True) - dlse
    if out.t_lse is not None:
        out.t_lse.copy_(m.view(out.t_lse.shape))
    if out.t_o is not None or out.dv is not None:
        w = kept(p * (t - m))
        if out.t_o is not None:
            t_o = torch.bmm(w, vt)
            if tvt is not None:
                torch.baddbmm(t_o, kept(p), tvt, out=t_o)
            out.t_o.copy_(t_o.view(out.t_o.shape))
        if out.dv is not None:
            part = out.dv[:, :, keys]
            part.add_(torch.bmm(w.mT, dot).view_as(part))
        del w

    u = a * -m
    u.addcmul_(t, a.sub_(delta))
    if b is not None:
        u.add_(b)
    u_sink = -t_sink * delta
    mean = (p * u).sum(-1, keepdim=True) + p_sink * u_sink
    h, g = u.sub_(mean).mul_(p), a.mul_(p)
    steps.add_sink(p_sink * (u_sink - mean), at)
    h, g = steps.back(h, g, done, unseen, at, keys)
    if out.dq is not None:
        dq = _products([(h, kt.mT), (g, None if tkt is None else tkt.mT)], qt, scale)
        out.dq.copy_(dq.view(out.dq.shape))
    if out.dk is not None:
        dk = _products([(h.mT, qt.mT), (g.mT, None if tqt is None else tqt.mT)], kt, scale)
        part = out.dk[:, :, keys]
        part.add_(dk.view_as(part))
