"""What a call may return besides o and lse: what is right, and how far a careful backend may be from it.

Nothing here is compared with plain PyTorch in the inputs' dtype: the bound is the rounding of the scores, carried through (see
``tolerance``).
"""

from __future__ import annotations

import torch

from ..reference import masked_scores
from .calls import Call, chosen_rows

__all__ = ["expected_of", "rounding_of", "silent_of"]

_NEG_INF = float("-inf")


def expected_of(call: Call, lse: torch.Tensor) -> dict[str, torch.Tensor]:
    """The output named by ``call.returns`` in float64, from the oracle's ``lse``; nothing if the call has none."""
    if not call.returns:
        return {}
    batch, heads, seqlen_q, _ = call.q.shape
    if call.returns == "max_logit" and 0 in (batch, heads, seqlen_q, call.k.shape[2]):
        return {"max_logit": lse.new_full((batch, heads), _NEG_INF)}
    s = masked_scores(call.q, call.k, call.spec, call.spec.tensors, call.scale)
    if call.returns == "max_logit":
        return {"max_logit": s.amax((-1, -2))}
    p = torch.exp(s - lse.masked_fill(lse == _NEG_INF, float("inf"))[..., None])
    return {call.returns: p.sum(2) if call.returns == "column_sums" else p[:, :, chosen_rows(call)]}


def rounding_of(
    call: Call, score: torch.Tensor, p: torch.Tensor, row: torch.Tensor, expected: dict[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """The rounding term of that output. ``score`` is the error of each visible score (0 elsewhere), ``row`` that of lse."""
    if not call.returns:
        return {}
    eps = torch.finfo(torch.promote_types(call.q.dtype, torch.float32)).eps
    size = expected[call.returns].abs()
    if call.returns == "max_logit":
        return {"max_logit": score.amax((-1, -2)) + 2 * eps * torch.where(size.isinf(), 0.0, size)}
    error = p * (score + row + 4 * eps)
    if call.returns == "weights":
        return {"weights": error[:, :, chosen_rows(call)]}
    return {"column_sums": error.square().sum(2).sqrt() + eps * (1 + call.q.shape[2] ** 0.5 / 4) * size}


def silent_of(call: Call, visible: torch.Tensor) -> dict[str, torch.Tensor]:
    """Where that output must be exactly 0: hidden keys, and keys that nobody sees."""
    if call.returns == "weights":
        return {"weights": ~visible[:, :, chosen_rows(call)]}
    return {"column_sums": ~visible.any(2)} if call.returns == "column_sums" else {}
