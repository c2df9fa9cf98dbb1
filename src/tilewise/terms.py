"""Constructors of the terms that name tensors, and of the score steps. Each gives a ``Spec``; combine them with ``&``.

The scores are ``s = sm_scale q k^T``; the steps of a spec then change them in the order in which the spec gives them, and the mask
comes last. ``softcap(30.0) & alibi(slopes)`` caps first, ``alibi(slopes) & softcap(30.0)`` caps the sum.
"""

from __future__ import annotations

from typing import Any

from .checks import check_cap, check_dropout
from .spec import Spec, Tensors

__all__ = ["alibi", "bias", "dense", "dropout", "row_intervals", "segments", "sink", "softcap"]


def softcap(cap: float) -> Spec:
    """Score step ``s -> cap tanh(s / cap)``: scores stay between ``-cap`` and ``cap``.

    Args:
        cap: a finite number above 0.

    Raises:
        InvalidInput: any other cap.
    """
    return Spec(score=(f"softcap:{check_cap(cap)!r}",))


def alibi(slopes: Any, align: str = "bottom_right") -> Spec:
    """Score step ``s -> s - slope |q_pos - kv_pos|``: linear biases by distance (Press et al. 2022, arXiv:2108.12409).

    Under a causal mask this is the ``slope (kv_pos - q_pos)`` of the paper.

    Args:
        slopes: (heads_q,) or (batch, heads_q), positive for scores that fall with the distance; float32 or half (float64 only for
            float64 inputs). A size of 1 stands for all. Gets a gradient if it requires one.
        align: which key the position of a query is counted from; that of the mask.
    """
    return Spec(align=align, score=("alibi",), tensors=Tensors(slopes=slopes))


def bias(tensor: Any) -> Spec:
    """Score step ``s -> s + bias``.

    Args:
        tensor: broadcastable to (batch, heads_q, seqlen_q, seqlen_k), of any rank up to 4 and with any strides, 0 too; float32 or
            half (float64 only for float64 inputs). An element of ``-inf`` hides its key; a row of nothing else sees no key. Gets a
            gradient in its own shape, summed in float32 over the dims that it broadcasts in, if it requires one.
    """
    return Spec(score=("bias",), tensors=Tensors(bias=tensor))


def sink(logits: Any) -> Spec:
    """One more logit in each softmax, whose value is zero: ``lse = log(exp(sink) + sum exp(s))``.

    A row that sees no key has ``o = 0`` and ``lse = sink``.

    Args:
        logits: (heads_q,) or (batch, heads_q); float32 or half (float64 only for float64 inputs). Score steps do not apply to it.
            Gets a gradient if it requires one.
    """
    return Spec(sink=True, tensors=Tensors(sink=logits))


def segments(q_ids: Any, k_ids: Any) -> Spec:
    """A query sees the keys of its own segment: those whose id equals its own.

    Args:
        q_ids: (seqlen_q,) or (batch, seqlen_q), int32 or int64.
        k_ids: (seqlen_k,) or (batch, seqlen_k), int32 or int64.
    """
    return Spec(segment=True, tensors=Tensors(segment_q=q_ids, segment_k=k_ids))


def row_intervals(start: Any, end: Any) -> Spec:
    """A query sees the keys ``start <= kv < end`` of its own interval.

    Args:
        start, end: broadcastable to (batch, heads_q, seqlen_q), int32 or int64.
    """
    return Spec(row=True, tensors=Tensors(row_start=start, row_end=end))


def dense(mask: Any) -> Spec:
    """A query sees the keys at which a boolean tensor is True.

    Args:
        mask: broadcastable to (batch, heads_q, seqlen_q, seqlen_k), bool, any strides, 0 too. It is read as it is.
    """
    return Spec(dense=True, tensors=Tensors(dense=mask))


def dropout(p: float, seed: Any = None) -> Spec:
    """Drop each weight of the softmax with probability ``p`` and multiply the others by ``1 / (1 - p)``; ``lse`` is unaffected.

    Whether a weight is dropped depends on the seed, the batch entry, the query head, the query and the key only: not on tiles,
    backend or device, and not on how many batch entries there are. ``tilewise.dropout_mask`` shows it. The backward pass uses the
    seed of its forward pass.

    Under ``torch.func.vmap`` the mapped dim is folded into the batch, and the entries of the folded batch are counted: each example
    has masks of its own. With a seed that is mapped, each example has the masks that it would have alone. With
    ``randomness="same"`` and a seed that is not mapped, all examples have the same masks.

    Args:
        p: from 0 (no dropout at all) to 1 (zeros).
        seed: an int64 tensor of one element on q's device; or a ``torch.Generator`` of this device, from which every call draws; or
            ``None``, the default: every call draws from the device's default generator, as ``torch.nn.Dropout`` does, so that
            ``torch.manual_seed`` repeats it and ``torch.utils.checkpoint`` recomputes the same. Nothing is drawn where p is 0.
    """
    text = repr(check_dropout(p))
    return Spec(dropout=text, tensors=Tensors(seed=seed)) if float(text) else Spec()
