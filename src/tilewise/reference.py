"""The oracle: the dense formula in float64, differentiable by autograd. Slow, quadratic, and right.

``s = sm_scale q k^T``, masked with -inf where ``allowed`` says no; ``lse = logsumexp(s)``; ``o = exp(s - lse) v``.
"""

from __future__ import annotations

import dataclasses

import torch

from .bodies import allowed, in_row, same_segment
from .operands import full_rank
from .problem import Problem
from .spec import NO_TENSORS, Spec, Tensors

__all__ = ["mask_of", "reference"]


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


def reference(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, spec: Spec | None = None, sm_scale: float | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Dense softmax attention in float64.

    Args:
        q: (batch, heads_q, seqlen_q, head_dim), any float dtype; widened to float64 and never rounded back.
        k: (batch, heads_kv, seqlen_k, head_dim).
        v: (batch, heads_kv, seqlen_k, head_dim_v).
        spec: the mask; ``None`` is full attention.
        sm_scale: default ``head_dim ** -0.5``.

    Returns:
        ``o`` (batch, heads_q, seqlen_q, head_dim_v) and ``lse`` (batch, heads_q, seqlen_q), both float64. A row that sees no key
        has ``o = 0``, ``lse = -inf`` and zero gradients.
    """
    spec = spec or Spec()
    scale = q.shape[-1] ** -0.5 if sm_scale is None else sm_scale
    q64, k64, v64 = q.double(), k.double(), v.double()
    group = q.shape[1] // k.shape[1] if k.shape[1] else 1
    if group != 1:
        k64, v64 = (t.repeat_interleave(group, dim=1) for t in (k64, v64))
    s = (q64 @ k64.transpose(-1, -2)) * scale
    ok = mask_of(spec, q.shape[2], k.shape[2], q.device)
    s = s.masked_fill(~ok, float("-inf"))
    empty = ~ok.any(dim=-1)
    # An empty row would be 0 / 0: give it harmless scores, and take its result and its gradient away again.
    s = s.masked_fill(empty[..., None], 0.0)
    if k.shape[2] == 0:
        lse = s.new_full(s.shape[:-1], float("-inf")) + q64.sum(-1) * 0
        return (s @ v64), lse
    lse = torch.logsumexp(s, dim=-1)
    p = torch.exp(s - lse[..., None]).masked_fill(empty[..., None], 0.0)
    return p @ v64, lse.masked_fill(empty, float("-inf"))


def forward(
    problem: Problem,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    o: torch.Tensor,
    lse: torch.Tensor,
    tensors: Tensors = NO_TENSORS,
    rows: torch.Tensor | None = None,
) -> None:
    """Fill ``o`` and ``lse`` (backend interface)."""
    o64, lse64 = reference(q, k, v, dataclasses.replace(problem.spec, tensors=tensors), problem.sm_scale)
    o.copy_(o64)
    lse.copy_(lse64)


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
    p = problem
    q64, k64, v64, do64 = (t.double() for t in (q, k, v, do))
    k64, v64 = (t.repeat_interleave(p.group, dim=1) for t in (k64, v64))
    spec = dataclasses.replace(p.spec, tensors=tensors)
    o64, lse64 = reference(q, k, v, spec, p.sm_scale)
    ok = mask_of(spec, p.seqlen_q, p.seqlen_k, q.device)
    # A row with lse = -inf has no True in its mask; its pivot only has to be finite.
    pivot = lse64.masked_fill(lse64 == float("-inf"), 0.0)[..., None]
    probs = torch.exp((q64 @ k64.transpose(-1, -2) * p.sm_scale - pivot).masked_fill(~ok, float("-inf")))
    delta = (do64 * o64).sum(-1)
    if dlse is not None:
        delta = delta - dlse.double()
    ds = probs * (do64 @ v64.transpose(-1, -2) - delta[..., None]) * p.sm_scale

    def grouped(t: torch.Tensor) -> torch.Tensor:
        return t.unflatten(1, (p.heads_kv, p.group)).sum(2)

    if dq is not None:
        dq.copy_(ds @ k64)
    if dk is not None:
        dk.copy_(grouped(ds.transpose(-1, -2) @ q64))
    if dv is not None:
        dv.copy_(grouped(probs.transpose(-1, -2) @ do64))
