"""The oracle: the dense formula in float64, differentiable by autograd. Slow, quadratic, and right.

``s = sm_scale q k^T``, changed by the score steps in their order, masked with -inf where ``allowed`` says no, the sink as one more
column; ``lse = logsumexp(s)``; ``o = (softmax(s) * factor) v``, where the factor of a dropout is 0 or ``1 / (1 - p)``.
"""

from __future__ import annotations

import dataclasses

import torch

from .bodies import alibi, allowed, in_row, same_segment, softcap_slope
from .errors import InvalidInput
from .functions import function_of
from .keep import kept, scale_of, seeded
from .operands import describe, full_rank
from .problem import Problem, Tangents, check_scale
from .spec import FN_SLOTS, NO_TENSORS, Spec, Tensors

__all__ = ["distance_of", "factor_of", "mask_of", "masked_scores", "places_of", "reference", "scored", "softmax_of"]


def mask_of(
    spec: Spec, seqlen_q: int, seqlen_k: int, device: torch.device | str = "cpu", tensors: Tensors | None = None
) -> torch.Tensor:
    """The boolean mask of a spec (with its own tensors by default): True where the query sees the key.

    (seqlen_q, seqlen_k), or (batch or 1, heads_q or 1, seqlen_q, seqlen_k) where terms of the spec are tensors.
    """
    q_pos = torch.arange(seqlen_q, device=device)[:, None] + spec.q_start(seqlen_q, seqlen_k)
    kv_pos = torch.arange(seqlen_k, device=device)[None, :]
    ok = allowed(
        q_pos, kv_pos, seqlen_k, spec.upper, spec.lower, spec.upper is not None, spec.lower is not None
    )
    t = spec.tensors if tensors is None else tensors
    if spec.segment:
        q_ids, k_ids = full_rank("segment_q", t.segment_q), full_rank("segment_k", t.segment_k)
        ok = ok & same_segment(q_ids[:, None, :, None], k_ids[:, None, None, :])
    if spec.row:
        start, end = full_rank("row_start", t.row_start), full_rank("row_end", t.row_end)
        ok = ok & in_row(kv_pos, start[..., None], end[..., None])
    if spec.dense:
        ok = ok & full_rank("dense", t.dense)
    return ok.expand(*ok.shape[:-2], seqlen_q, seqlen_k)


def distance_of(spec: Spec, seqlen_q: int, seqlen_k: int, device: torch.device | str = "cpu") -> torch.Tensor:
    """How many positions lie between each query and each key (seqlen_q, seqlen_k)."""
    q_pos = torch.arange(seqlen_q, device=device)[:, None] + spec.q_start(seqlen_q, seqlen_k)
    return (q_pos - torch.arange(seqlen_k, device=device)).abs()


def places_of(spec: Spec, s: torch.Tensor, tensors: Tensors) -> tuple[torch.Tensor | None, ...]:
    """What a score function takes beside the scores (batch, heads, seqlen_q, seqlen_k)."""
    batch, head, query, key = (
        torch.arange(n, device=s.device).view([-1 if dim == at else 1 for dim in range(4)]) for at, n in enumerate(s.shape)
    )
    given = (getattr(tensors, slot) for slot in FN_SLOTS if slot in spec.slots)
    return batch, head, query + spec.q_start(s.shape[2], s.shape[3]), key, *given


def scored(s: torch.Tensor, spec: Spec, tensors: Tensors) -> torch.Tensor:
    """The scores (batch, heads, seqlen_q, seqlen_k) after the spec's steps, in the dtype of ``s``."""
    for step in spec.steps:
        if step == "softcap":
            cap = spec.softcap or 0.0
            s = cap * torch.tanh(s / cap)
        elif step == "alibi":
            slopes = full_rank("slopes", tensors.slopes)[..., None, None].to(s.dtype)
            s = alibi(s, slopes, distance_of(spec, s.shape[2], s.shape[3], s.device))
        elif step == "fn":
            s = _own(spec, s, tensors)
        else:
            s = s + full_rank("bias", tensors.bias).to(s.dtype)
    return s


def _own(spec: Spec, s: torch.Tensor, tensors: Tensors) -> torch.Tensor:
    """The scores after the spec's function. Where no gradient comes back, as for hidden keys, its derivative may be NaN."""
    s = s.clone()
    out = function_of(spec).scores(s, *places_of(spec, s, tensors))
    if s.requires_grad and out.requires_grad:
        back: list[torch.Tensor | None] = []  # the gradient of out, on its way
        out.register_hook(back.append)
        s.register_hook(lambda g: g if g is None or (after := back.pop()) is None else torch.where(after == 0, 0.0, g))
    return out


def softmax_of(s: torch.Tensor, sink: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """``(p, lse)`` of masked scores: ``sink`` (batch or 1, heads or 1) is one more logit. A row without any has 0 and -inf."""
    keys = s.shape[-1]
    if sink is not None:
        s = torch.cat([s, sink[..., None, None].to(s.dtype).expand(*s.shape[:-1], 1)], dim=-1)
    if s.shape[-1] == 0:
        return s, s.new_full(s.shape[:-1], float("-inf")) + s.sum(-1)
    empty = (s == float("-inf")).all(-1)
    # An empty row would be 0 / 0: give it harmless scores, and take its result and its gradient away again.
    s = s.masked_fill(empty[..., None], 0.0)
    p = torch.softmax(s, dim=-1).masked_fill(empty[..., None], 0.0)
    # Not torch.logsumexp, whose derivative exp(s - lse) is 1 for each of several equal scores near the lowest value.
    top = s.amax(-1, keepdim=True).detach()
    lse = top[..., 0] + torch.log(torch.exp(s - top).sum(-1))
    return p[..., :keys], lse.masked_fill(empty, float("-inf"))


def factor_of(spec: Spec, tensors: Tensors, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor | float:
    """What dropout multiplies the weights by: (batch, heads_q, seqlen_q, seqlen_k) of 0 and ``1 / (1 - p)``, float64; or 1."""
    if not spec.dropout:
        return 1.0
    batch, heads, seqlen_q, _ = q.shape
    seed, each = full_rank("seed", tensors.seed), torch.arange(heads, device=q.device)
    keep = kept(seed, spec.p_dropout, slice(0, batch), each, slice(0, seqlen_q), slice(0, k.shape[2]))
    return keep * torch.tensor(scale_of(spec.p_dropout), dtype=torch.float64, device=q.device)


def reference(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, spec: Spec | None = None, sm_scale: float | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Dense softmax attention in float64.

    Args:
        q: (batch, heads_q, seqlen_q, head_dim), any float dtype; widened to float64 and never rounded back.
        k: (batch, heads_kv, seqlen_k, head_dim).
        v: (batch, heads_kv, seqlen_k, head_dim_v).
        spec: mask, score steps, sinks and dropout (which draws a seed as ``attention`` does); ``None`` is full attention.
        sm_scale: default ``head_dim ** -0.5``.

    Returns:
        ``o`` (batch, heads_q, seqlen_q, head_dim_v) and ``lse`` (batch, heads_q, seqlen_q), both float64. A row that sees no key
        has ``o = 0``, ``lse = -inf`` (or the sink) and zero gradients.
    """
    if not isinstance(spec, Spec | None):
        raise InvalidInput(f"spec must be a tilewise.Spec or None, got {type(spec).__name__}: build one with tilewise.causal().")
    spec, scale = spec or Spec(), check_scale(sm_scale, q.shape[-1])
    tensors = seeded(spec, q.device) if spec.dropout else spec.tensors
    describe(spec, tensors, q, k)
    return _reference(q, k, v, spec, tensors, scale)


def _reference(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, spec: Spec, tensors: Tensors, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    v64 = v.double()
    group = q.shape[1] // k.shape[1] if k.shape[1] else 1
    if group != 1:
        v64 = v64.repeat_interleave(group, dim=1)
    sink = None if tensors.sink is None else full_rank("sink", tensors.sink)
    p, lse = softmax_of(masked_scores(q, k, spec, tensors, scale), sink)
    return (p * factor_of(spec, tensors, q, k)) @ v64, lse


def masked_scores(q: torch.Tensor, k: torch.Tensor, spec: Spec, tensors: Tensors, scale: float) -> torch.Tensor:
    """All scores after the steps, float64, -inf where the mask hides the key (batch, heads_q, seqlen_q, seqlen_k)."""
    q64, k64 = q.double(), k.double()
    group = q.shape[1] // k.shape[1] if k.shape[1] else 1
    if group != 1:
        k64 = k64.repeat_interleave(group, dim=1)
    s = scored((q64 @ k64.transpose(-1, -2)) * scale, spec, tensors)
    return s.masked_fill(~mask_of(spec, q.shape[2], k.shape[2], q.device, tensors), float("-inf"))


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
    """Fill ``o`` and ``lse``, and ``maxima`` if given (backend interface). ``rows`` stays: the backward pass begins anew."""
    if maxima is not None:
        maxima.copy_(masked_scores(q, k, problem.spec, tensors, problem.sm_scale).amax(-1))
    o64, lse64 = _reference(q, k, v, problem.spec, tensors, problem.sm_scale)
    o.copy_(o64)
    lse.copy_(lse64)


def _weights(problem: Problem, q: torch.Tensor, k: torch.Tensor, lse: torch.Tensor, tensors: Tensors) -> torch.Tensor:
    """``exp(s - lse)`` of all pairs; 0 where lse is -inf."""
    pivot = lse.double().masked_fill(lse == float("-inf"), float("inf"))
    return torch.exp(masked_scores(q, k, problem.spec, tensors, problem.sm_scale) - pivot[..., None])


def weights(
    problem: Problem,
    q: torch.Tensor,
    k: torch.Tensor,
    lse: torch.Tensor,
    rows: torch.Tensor,
    out: torch.Tensor,
    tensors: Tensors = NO_TENSORS,
) -> None:
    """Fill ``out`` (batch, heads_q, rows, seqlen_k) for the queries ``rows`` (backend interface)."""
    out.copy_(_weights(problem, q, k, lse, tensors).index_select(2, rows))


def column_sums(
    problem: Problem, q: torch.Tensor, k: torch.Tensor, lse: torch.Tensor, out: torch.Tensor, tensors: Tensors = NO_TENSORS
) -> None:
    """Fill ``out`` (batch, heads_q, seqlen_k) with the sums over the queries (backend interface)."""
    out.copy_(_weights(problem, q, k, lse, tensors).sum(2))


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
    """Fill ``o``, ``lse`` and their derivatives ``t_o`` and ``t_lse`` along ``tangents`` (backend interface)."""
    p, t = problem, tangents
    q64, k64, v64 = (x.double() for x in (q, k, v))
    tq, tk, tv = (torch.zeros_like(x) if own is None else own.double() for x, own in zip((q64, k64, v64), t[:3], strict=True))
    k64, v64, tk, tv = (x.repeat_interleave(p.group, dim=1) for x in (k64, v64, tk, tv))
    s = q64 @ k64.mT * p.sm_scale
    ts = (tq @ k64.mT + q64 @ tk.mT) * p.sm_scale
    for step in p.spec.score:
        one = dataclasses.replace(p.spec, score=(step,))
        before, s = s, scored(s, one, tensors)
        if one.softcap is not None:
            ts = ts * softcap_slope(s / one.softcap)
        elif one.function is not None:
            slopes = function_of(one).slopes(before, *places_of(one, before, tensors))
            ts = ts if slopes is None else ts * slopes
        elif step == "alibi" and t.slopes is not None:
            ts = alibi(ts, t.slopes[..., None, None].double(), distance_of(p.spec, p.seqlen_q, p.seqlen_k, q.device))
        elif step == "bias" and t.bias is not None:
            ts = ts + t.bias.double()
    ok = mask_of(p.spec, p.seqlen_q, p.seqlen_k, q.device, tensors)
    sink = None if tensors.sink is None else full_rank("sink", tensors.sink)
    probs, lse64 = softmax_of(s.masked_fill(~ok, float("-inf")), sink)
    pt = torch.where(probs == 0, 0.0, probs * ts)  # where a key has no weight the derivative may be anything
    moved = pt.sum(-1)
    if sink is not None and t.sink is not None:
        moved = moved + torch.exp(sink.double()[..., None] - lse64.masked_fill(lse64 == float("-inf"), 0.0)) * t.sink[..., None]
    factor = factor_of(p.spec, tensors, q, k)
    o64 = (probs * factor) @ v64
    o.copy_(o64)
    lse.copy_(lse64)
    t_o.copy_((pt * factor) @ v64 + (probs * factor) @ tv - moved[..., None] * o64)
    t_lse.copy_(moved)


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
    """Fill the gradients that are not None (backend interface), by the formulas: autograd does not record inside an operator."""
    p = problem
    q64, k64, v64, do64 = (t.double() for t in (q, k, v, do))
    k64, v64 = (t.repeat_interleave(p.group, dim=1) for t in (k64, v64))
    # The scores before the first step and after each.
    chain = [q64 @ k64.transpose(-1, -2) * p.sm_scale]
    for step in p.spec.score:
        chain.append(scored(chain[-1], dataclasses.replace(p.spec, score=(step,)), tensors))
    ok = mask_of(p.spec, p.seqlen_q, p.seqlen_k, q.device, tensors)
    sink = None if tensors.sink is None else full_rank("sink", tensors.sink)
    probs, lse64 = softmax_of(chain[-1].masked_fill(~ok, float("-inf")), sink)
    factor = factor_of(p.spec, tensors, q, k)
    delta = (do64 * ((probs * factor) @ v64)).sum(-1)
    if dlse is not None:
        delta = delta - dlse.double().masked_fill(lse64 == float("-inf"), 0.0)
    ds = probs * (factor * (do64 @ v64.transpose(-1, -2)) - delta[..., None])
    if sink is not None and grads.sink is not None:
        weight = torch.exp(sink.double()[..., None] - lse64.masked_fill(lse64 == float("-inf"), 0.0))
        grads.sink.copy_(-(weight * delta).sum(-1).sum_to_size(grads.sink.shape))
    for step, after, before in zip(p.spec.steps[::-1], chain[:0:-1], chain[-2::-1], strict=True):
        if step == "softcap":
            ds = ds * softcap_slope(after / (p.spec.softcap or 1.0))
        elif step == "fn":
            slopes = function_of(p.spec).slopes(before, *places_of(p.spec, before, tensors))
            # Where a key has no weight the derivative may be anything.
            ds = ds if slopes is None else torch.where(ds == 0, 0.0, ds * slopes)
        elif step == "alibi" and grads.slopes is not None:
            by_distance = (ds * distance_of(p.spec, p.seqlen_q, p.seqlen_k, q.device)).sum((-1, -2))
            grads.slopes.copy_(-by_distance.sum_to_size(grads.slopes.shape))
        elif step == "bias" and grads.bias is not None:
            grads.bias.copy_(ds.sum_to_size(grads.bias.shape))

    def grouped(t: torch.Tensor) -> torch.Tensor:
        return t.unflatten(1, (p.heads_kv, p.group)).sum(2)

    if dq is not None:
        dq.copy_(p.sm_scale * (ds @ k64))
    if dk is not None:
        dk.copy_(p.sm_scale * grouped(ds.transpose(-1, -2) @ q64))
    if dv is not None:
        dv.copy_(grouped((probs * factor).transpose(-1, -2) @ do64))
