"""What a call may return besides o and lse: what is right, and how far a careful backend may be from it (see ``tolerance``).

Nothing here is compared with plain PyTorch in the inputs' dtype: the bound is the rounding of the scores, carried through.
"""

from __future__ import annotations

import torch

from ..reference import masked_scores
from .calls import Call

__all__ = ["expected_of", "rounding_of"]

_NEG_INF = float("-inf")


def expected_of(call: Call, lse: torch.Tensor) -> dict[str, torch.Tensor]:
    """The output named by ``call.returns`` in float64, from the oracle's ``lse``; nothing if the call has none."""
    if not call.returns:
        return {}
    batch, heads, seqlen_q, _ = call.q.shape
    if 0 in (batch, heads, seqlen_q, call.k.shape[2]):
        return {"max_logit": lse.new_full((batch, heads), _NEG_INF)}
    s = masked_scores(call.q, call.k, call.spec, call.spec.tensors, call.scale)
    return {"max_logit": s.amax((-1, -2))}


def rounding_of(call: Call, visible: torch.Tensor, score: torch.Tensor) -> dict[str, torch.Tensor]:
    """The rounding term of that output; ``score`` is the error of each score (0 where it is not ``visible``)."""
    if not call.returns:
        return {}
    eps = torch.finfo(torch.promote_types(call.q.dtype, torch.float32)).eps
    s = masked_scores(call.q, call.k, call.spec, call.spec.tensors, call.scale)
    top = s.amax((-1, -2))
    return {"max_logit": (score * visible).amax((-1, -2)) + 2 * eps * top.masked_fill(top == _NEG_INF, 0.0).abs()}
