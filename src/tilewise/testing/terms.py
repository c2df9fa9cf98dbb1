"""Random terms of a spec from a line of words, so that inputs can be listed, combined and drawn alike on every device."""

from __future__ import annotations

import dataclasses

import torch

from ..operands import DIMS
from ..spec import SLOTS, Spec, Tensors
from ..terms import alibi, bias, dense, dropout, row_intervals, segments, sink, softcap

__all__ = ["draw_terms"]


def draw_terms(
    words: str,
    shape: tuple[int, ...],
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> Spec:
    """The spec of words like ``"bias:1hqk softcap:5 alibi sink segment dropout:0.2"``, in their order.

    After the name of a tensor stands a letter for each dim that it has and a 1 for each that it broadcasts in.
    ``dtype`` is that of the biases, in which a word ``bias:...:-inf`` hides about one key in four. ``shape`` is that of a call:
    (batch, heads_q, heads_kv, seqlen_q, seqlen_k, ...).
    """
    generator = torch.Generator().manual_seed(seed)
    sizes = {"b": shape[0], "h": shape[1], "q": shape[3], "k": shape[4], "1": 1}

    def normal(dims: str) -> torch.Tensor:
        return torch.randn([sizes[letter] for letter in dims], generator=generator)

    def whole(dims: str, end: int) -> torch.Tensor:
        return torch.randint(0, max(1, end), [sizes[letter] for letter in dims], generator=generator, dtype=torch.int32)

    spec = Spec()
    for word in words.split():
        name, dims, extra = (*word.split(":"), "", "")[:3]
        if name == "softcap":
            spec &= softcap(float(dims))
        elif name == "alibi":
            spec &= alibi(normal(dims or "h").abs() * 0.2)
        elif name == "bias":
            drawn = normal(dims or "1hqk") * 2
            if extra:
                drawn = drawn.masked_fill(torch.rand(drawn.shape, generator=generator) < 0.25, float(extra))
            spec &= bias(drawn.to(dtype))
        elif name == "sink":
            spec &= sink(normal(dims or "h") * 2)
        elif name == "dropout":
            spec &= dropout(float(dims), torch.randint(2**62, (), generator=generator))
        elif name == "segment":
            spec &= segments(whole(dims or "bq", 3).sort(-1).values, whole((dims or "bq").replace("q", "k"), 3).sort(-1).values)
        elif name == "row":
            start = whole(dims or "b1q", sizes["k"] // 2)
            spec &= row_intervals(start, start + whole(dims or "b1q", sizes["k"]))
        else:
            spec &= dense(torch.rand([sizes[letter] for letter in dims or DIMS["dense"]], generator=generator) < 0.6)
    placed = (None if t is None else t.to(device) for t in spec.tensors)
    return dataclasses.replace(spec, tensors=Tensors(**dict(zip(SLOTS, placed, strict=True))))
