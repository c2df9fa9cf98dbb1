"""Is a provider's answer right? Sampled rows and keys of one head, computed densely in float64, beside what came back."""

from __future__ import annotations

import torch

from .cases import Case

__all__ = ["TOLERANCE", "error_of", "truth"]

# Largest accepted error beside the size of what is compared: several times what correct kernels show (float32: with TF32 products).
TOLERANCE = {"bfloat16": 3e-2, "float16": 5e-3, "float32": 5e-3, "float64": 1e-8}
_SAMPLES = 32
_CHUNK = 1024  # queries at a time: the scores of a chunk are all that is ever materialised


def _picked(length: int, device: torch.device) -> torch.Tensor:
    return torch.linspace(0, length - 1, min(_SAMPLES, length), device=device).long()


def truth(
    case: Case, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, do: torch.Tensor | None = None
) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """What o (or, with ``do``, the gradients) should be: name -> (indices of the rows, their values in float64).

    All tensors are (batch, heads, seqlen, head_dim). Looks at the last batch entry and the last key head, with the query heads
    that share it; values are (heads that share it, rows, head_dim), or (rows, head_dim) for dk and dv.
    """
    group = case.heads_q // case.heads_kv
    rows, keys = _picked(case.seqlen_q, q.device), _picked(case.seqlen_k, q.device)
    k64, v64 = k[-1, -1].detach().double(), v[-1, -1].detach().double()
    scale = case.head_dim**-0.5
    kv_pos = torch.arange(case.seqlen_k, device=q.device)
    o, dq = [], []
    dk, dv = (k64.new_zeros((keys.numel(), size)) for size in (case.head_dim, case.head_dim_v))
    for head in range(case.heads_q - group, case.heads_q):
        o_head, dq_head = [], []
        for some in [rows] if do is None else torch.arange(case.seqlen_q, device=q.device).split(_CHUNK):
            q64 = q[-1, head, some].detach().double()
            s = (q64 @ k64.T) * scale
            if case.causal:
                s.masked_fill_(kv_pos[None, :] > some[:, None] + (case.seqlen_k - case.seqlen_q), float("-inf"))
            p = torch.softmax(s, dim=-1)
            o_some = p @ v64
            o_head.append(o_some)
            if do is not None:
                do64 = do[-1, head, some].detach().double()
                ds = p * (do64 @ v64.T - (do64 * o_some).sum(-1, keepdim=True))
                dq_head.append((ds @ k64) * scale)
                dk += (ds[:, keys].T @ q64) * scale
                dv += p[:, keys].T @ do64
        o.append(torch.cat(o_head))
        if do is not None:
            dq.append(torch.cat(dq_head)[rows])
    if do is None:
        return {"o": (rows, torch.stack(o))}
    return {"dq": (rows, torch.stack(dq)), "dk": (keys, dk[None]), "dv": (keys, dv[None])}


def error_of(got: torch.Tensor, rows: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest error, each row beside its own largest value plus the root mean square of all; NaN if anything is NaN.

    ``got`` is (batch, heads, seqlen, head_dim); its last heads are the ones that ``expected`` has.
    """
    ours = got[-1, -expected.shape[0] :].detach()[:, rows].double()
    if ours.shape != expected.shape or not torch.isfinite(ours).all():
        return float("nan")
    size = expected.abs().amax(-1) + expected.square().mean().sqrt()
    return float(((ours - expected).abs().amax(-1) / size.clamp_min(1e-30)).max())
