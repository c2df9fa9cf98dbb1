"""Masks by name, made of the terms that name tensors. Each gives a ``Spec``; combine it with others by ``&``.

All but ``documents`` are row intervals, ``start <= kv_pos < end`` for each query, so one spec holds one of them.
"""

from __future__ import annotations

import torch

from .checks import check_length
from .errors import InvalidInput
from .spec import ALIGNMENTS, Spec
from .terms import row_intervals, segments

__all__ = ["chunked", "documents", "key_padding", "prefix_lm", "spans"]

Device = torch.device | str | None


def _positions(seqlen_q: int, seqlen_k: int | None, align: str, device: Device) -> torch.Tensor:
    """The positions of the queries."""
    if align not in ALIGNMENTS:
        raise InvalidInput(f"align is {align!r}, expected one of {', '.join(map(repr, ALIGNMENTS))}.")
    check_length("seqlen_q", seqlen_q)
    if seqlen_k is not None:
        check_length("seqlen_k", seqlen_k)
    shift = 0 if seqlen_k is None or align == "top_left" else seqlen_k - seqlen_q
    return torch.arange(shift, shift + seqlen_q, dtype=torch.int32, device=device)


def _ints(name: str, t: object, dims: tuple[int, ...], words: str) -> torch.Tensor:
    if not isinstance(t, torch.Tensor) or t.dtype not in (torch.int32, torch.int64) or t.dim() not in dims:
        got = f"shape {tuple(t.shape)} and dtype {t.dtype}" if isinstance(t, torch.Tensor) else type(t).__name__
        raise InvalidInput(f"{name} must be a tensor of int32 or int64 of shape {words}, got {got}.")
    return t


def key_padding(lengths: torch.Tensor) -> Spec:
    """Every query of sequence ``b`` sees the first ``lengths[b]`` keys.

    Args:
        lengths: (batch,), int32 or int64. A length of 0 sees nothing.
    """
    end = _ints("lengths", lengths, (1,), "(batch,)")[:, None, None]
    return row_intervals(torch.zeros_like(end), end)


def prefix_lm(
    prefix: int | torch.Tensor, seqlen_q: int, seqlen_k: int | None = None, align: str = "bottom_right", device: Device = None
) -> Spec:
    """Causal, and every query sees the first ``prefix`` keys.

    Args:
        prefix: how many keys, for all sequences or as a tensor (batch,) of int32 or int64.
        seqlen_q, seqlen_k: the lengths; seqlen_k ``None`` (the default) is seqlen_q.
        align: the causal corner where the lengths differ.
        device: where the intervals lie; that of a prefix that is a tensor.
    """
    if isinstance(prefix, torch.Tensor):
        first = _ints("prefix", prefix, (1,), "(batch,)")[:, None, None]
        device = prefix.device
    elif isinstance(prefix, bool) or not isinstance(prefix, int) or prefix < 0:
        raise InvalidInput(f"prefix must be an int of at least 0 or a tensor of shape (batch,), got {prefix!r}.")
    else:
        first = torch.tensor(prefix, dtype=torch.int32, device=device)
    end = torch.maximum(_positions(seqlen_q, seqlen_k, align, device) + 1, first)
    return row_intervals(torch.zeros_like(end[..., :1]), end)


def chunked(
    size: int, seqlen_q: int, seqlen_k: int | None = None, align: str = "bottom_right", device: Device = None
) -> Spec:
    """A query sees the keys of its own chunk: those at positions with the same ``position // size``.

    A decoder adds ``& causal()``.

    Args:
        size: keys of a chunk, at least 1. Chunks are counted from key 0.
        seqlen_q, seqlen_k, align, device: as in ``prefix_lm``.
    """
    if isinstance(size, bool) or not isinstance(size, int) or size < 1:
        raise InvalidInput(f"size must be an int of at least 1, got {size!r}.")
    start = _positions(seqlen_q, seqlen_k, align, device).div(size, rounding_mode="floor") * size
    return row_intervals(start, start + size)


def spans(ids: torch.Tensor) -> Spec:
    """Causal, and both ways within each span: a run of neighbours that share an id of at least 0 (an image among text, say).

    Args:
        ids: (seqlen,) or (batch, seqlen), int32 or int64, for queries and keys of one length. Negative: no span, plain causal.
    """
    ids = _ints("ids", ids, (1, 2), "(seqlen,) or (batch, seqlen)")
    after = torch.arange(1, ids.shape[-1] + 1, dtype=torch.int32, device=ids.device)
    # The end of a run is the first place, seen from its right, where the id changes.
    last = torch.ones_like(ids, dtype=torch.bool)
    last[..., :-1] = ids[..., 1:] != ids[..., :-1]
    ends = torch.where(last, after, ids.shape[-1]).flip(-1).cummin(-1).values.flip(-1)
    end = torch.where(ids >= 0, ends, after).to(torch.int32)
    end = end if ids.dim() == 1 else end[:, None]
    return row_intervals(torch.zeros_like(end[..., :1]), end)


def documents(lengths_q: torch.Tensor, lengths_k: torch.Tensor | None = None) -> Spec:
    """Documents that lie one after the other in one sequence: a query sees the keys of its own document.

    Args:
        lengths_q: (documents,), int32 or int64: how many queries each has. They sum to seqlen_q.
        lengths_k: how many keys each has; ``None`` (the default): the same.
    """

    def numbered(name: str, lengths: torch.Tensor) -> torch.Tensor:
        lengths = _ints(name, lengths, (1,), "(documents,)")
        return torch.repeat_interleave(torch.arange(len(lengths), dtype=torch.int32, device=lengths.device), lengths)

    ids = numbered("lengths_q", lengths_q)
    if lengths_k is None:
        return segments(ids, ids)
    if _ints("lengths_k", lengths_k, (1,), "(documents,)").shape != lengths_q.shape:
        shapes = f"lengths_q has shape {tuple(lengths_q.shape)} and lengths_k {tuple(lengths_k.shape)}"
        raise InvalidInput(f"{shapes}: they must be equal.")
    return segments(ids, numbered("lengths_k", lengths_k))
