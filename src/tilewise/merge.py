"""``merge``: two attentions over disjoint sets of keys, as the attention over all of them."""

from __future__ import annotations

import torch

from .errors import InvalidInput

__all__ = ["merge"]


def merge(o1: torch.Tensor, lse1: torch.Tensor, o2: torch.Tensor, lse2: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Combine ``(o, lse)`` of two disjoint key sets into ``(o, lse)`` of their union.

    ``lse = logaddexp(lse1, lse2)``; ``o = exp(lse1 - lse) o1 + exp(lse2 - lse) o2``, both with pivot 0 where both are ``-inf``.
    ``(0, -inf)`` is the neutral element; the merge commutes, and is associative up to rounding.

    Args:
        o1, o2: (..., head_dim_v), one shape and floating dtype. Keep partial results in float32 where rounding matters.
        lse1, lse2: (...), natural logarithm, the same shape without the last dim, floating dtype.

    Returns:
        ``o`` in o1's dtype, and ``lse`` in lse1's dtype.

    Raises:
        InvalidInput: shapes, dtypes or devices that do not fit.

    Gradients of any order flow to all four inputs (plain PyTorch operations); a half with ``lse = -inf`` gets zero, not NaN.
    Deterministic. Cost: a few passes over o; extra memory: three tensors of o's size.
    """
    for name, t in (("o1", o1), ("lse1", lse1), ("o2", o2), ("lse2", lse2)):
        if not isinstance(t, torch.Tensor) or not t.is_floating_point():
            got = t.dtype if isinstance(t, torch.Tensor) else type(t).__name__
            raise InvalidInput(f"{name} must be a floating-point tensor, got {got}.")
        if t.device != o1.device:
            raise InvalidInput(f"{name} is on {t.device} but o1 is on {o1.device}: move it there.")
    if o1.dim() < 1 or o1.shape != o2.shape or o1.dtype != o2.dtype:
        raise InvalidInput(
            f"o1 and o2 must have one shape and dtype, got {tuple(o1.shape)} {o1.dtype} and {tuple(o2.shape)} {o2.dtype}."
        )
    if not lse1.shape == lse2.shape == o1.shape[:-1] or lse1.dtype != lse2.dtype:
        raise InvalidInput(
            f"lse1 and lse2 must have o1's shape without its last dim, {tuple(o1.shape[:-1])}, and one dtype; "
            f"got {tuple(lse1.shape)} {lse1.dtype} and {tuple(lse2.shape)} {lse2.dtype}."
        )
    minus_inf = float("-inf")
    pivot = torch.maximum(lse1, lse2).detach()
    pivot = torch.where(pivot == minus_inf, 0.0, pivot)
    # exp(-inf - finite) is 0 with gradient 0; the logarithm of a sum of 0 is kept away from autograd.
    w1, w2 = torch.exp(lse1 - pivot), torch.exp(lse2 - pivot)
    total = w1 + w2
    empty = total == 0
    safe = torch.where(empty, 1.0, total)
    lse = torch.where(empty, minus_inf, pivot + torch.log(safe))
    wide = torch.promote_types(o1.dtype, lse1.dtype)
    # An empty half may hold anything, NaN too. It is replaced before the product: 0 * NaN would come back in a gradient.
    seen1, seen2 = (torch.where((t == minus_inf)[..., None], 0.0, o) for t, o in ((lse1, o1), (lse2, o2)))
    a1, a2 = ((w / safe).to(wide)[..., None] for w in (w1, w2))
    return (a1 * seen1.to(wide) + a2 * seen2.to(wide)).to(o1.dtype), lse
