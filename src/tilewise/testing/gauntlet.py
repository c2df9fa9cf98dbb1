"""The gauntlet: inputs with names, each there to kill named faults of an attention kernel.

They are small enough for Triton's interpreter, and cross several tiles of every size up to 64. ``python -c "from
tilewise.testing.gauntlet import GAUNTLET; print(*GAUNTLET, sep='\\n')"`` lists them with what they kill.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass

import torch

from ..masks import documents, key_padding
from ..spec import Spec, causal, window
from ..terms import dense
from .calls import Call, evaluate, random_call
from .mask_inputs import lengths, own_intervals, placed, tiles_of_sixteen, unsorted_ids
from .poison import poison
from .terms import draw_terms
from .tolerance import Result, Yardstick

__all__ = ["GAUNTLET", "Entry", "entry", "run", "run_call"]

FAR = 2**31 + 4096  # elements; beyond what 32 bits can address


# Values: each changes a drawn call in place, so that scores get the wanted shape.


def _overflow_spike(call: Call) -> None:
    """Key 0 is about 100 nats (144 in base two) ahead of all others, for every second query; the rest see an even field."""
    call.q[:, :, ::2, 0] = 8.0
    call.q[:, :, 1::2, 0] = 0.0
    call.k[..., 0] = 0.0
    call.k[:, :, 0, 0] = 12.5 / call.scale


def _late_spike(call: Call) -> None:
    """The last key is about 5 nats ahead, so that it carries about half of the weight: what came before must be scaled down."""
    call.q[..., 0] = 2.0
    call.k[..., 0] = 0.0
    call.k[:, :, -1, 0] = 2.5 / call.scale


def _very_low(call: Call) -> None:
    """Every score is near -136 (below -128 in base two): a padded key that scores 0 would take all the weight."""
    call.q[..., 0] = 16.0
    call.k[..., 0] = -8.5 / call.scale


def _overflowed_keys(call: Call) -> None:
    """The scores of the first 300 keys are -inf in float32 (very low in float16), those of the last ones are not."""
    far = 1e20 if torch.finfo(call.q.dtype).max > 1e30 else 200.0
    call.q[..., 0] = far
    call.k[..., 0] = 0.0
    call.k[:, :, :300, 0] = -far


def _beyond_cap(call: Call) -> None:
    """Scores of about 4 and up to 15: beyond a cap of 2 they are nearly flat, and some are not."""
    call.q.mul_(4.0)


def _lowest_rows(call: Call) -> None:
    """Two rows of a bias are the lowest float32 throughout (all keys weigh the same), and one is -inf (it sees no key)."""
    bias = call.spec.tensors.bias
    bias[..., 3, :] = torch.finfo(torch.float32).min
    bias[..., 40, :] = torch.finfo(torch.float32).min
    bias[..., 17, :] = float("-inf")


def _uneven_rows(call: Call) -> None:
    """Rows of many magnitudes, in which neighbours differ; those of keys past the number of queries are huge."""
    far, huge = (15, 1e20) if torch.finfo(call.q.dtype).max > 1e30 else (3, 100.0)
    for t, span in ((call.q, 3), (call.k, 3), (call.v, far), *([] if call.do is None else [(call.do, far)])):
        places = torch.arange(t.shape[2], device=t.device)
        t.mul_(torch.exp2((places * 7 % (2 * span + 1) - span).to(t.dtype))[:, None])
    for t in (call.k, call.v):
        t[:, :, call.q.shape[2] :] *= huge


def _of_one_sign(call: Call) -> None:
    """Values and gradients that are all positive, so that what a long sum loses at each step adds up."""
    call.v.abs_()
    if call.do is not None:
        call.do.abs_()


_VALUES: dict[str, Callable[[Call], None]] = {
    "beyond_cap": _beyond_cap,
    "lowest_rows": _lowest_rows,
    "uneven_rows": _uneven_rows,
    "of_one_sign": _of_one_sign,
    "overflow_spike": _overflow_spike,
    "overflowed_keys": _overflowed_keys,
    "late_spike": _late_spike,
    "very_low": _very_low,
}


# Layouts: each gives a tensor with the same elements in another place; what lies around them is NaN.


def _holder(size: int, like: torch.Tensor) -> torch.Tensor:
    return torch.full((size,), float("nan"), dtype=like.dtype, device=like.device)


def _strided(t: torch.Tensor) -> torch.Tensor:
    """(batch, seqlen, heads, dim) in memory with gaps after every row and every sequence."""
    batch, heads, seqlen, dim = t.shape
    wide = (dim + 15) // 16 * 16 + 16
    held = _holder(batch * (seqlen + 3) * heads * wide, t).view(batch, seqlen + 3, heads, wide)
    out = held[:, :seqlen, :, :dim].transpose(1, 2)
    return out.copy_(t)


def _strided_last(t: torch.Tensor) -> torch.Tensor:
    """The last dim has stride 2."""
    batch, heads, seqlen, dim = t.shape
    return _holder(t.numel() * 2, t).view(batch, heads, seqlen, dim, 2)[..., 0].copy_(t)


def _misaligned(t: torch.Tensor) -> torch.Tensor:
    """Contiguous, from an odd storage offset: no 16-byte alignment."""
    return _holder(t.numel() + 1, t)[1:].view(t.shape).copy_(t)


def _expanded(t: torch.Tensor) -> torch.Tensor:
    """The first batch entry for all, through a stride of 0."""
    return t[:1].clone().expand(t.shape)


def _far_offset(t: torch.Tensor) -> torch.Tensor:
    """The second batch entry lies more than 2^31 elements after the first."""
    batch, heads, seqlen, dim = t.shape
    held = torch.empty(FAR + t[0].numel(), dtype=t.dtype, device=t.device)
    strides = (FAR, seqlen * dim, dim, 1)
    return held.as_strided((batch, heads, seqlen, dim), strides).copy_(t)


def _in_bulk(t: torch.Tensor) -> torch.Tensor:
    """Contiguous but for a few columns after each row, so that rows begin at multiples of 16 bytes."""
    width = -(-t.shape[-1] // 8) * 8
    return _holder(t[..., :1].numel() * width, t).view(*t.shape[:-1], width)[..., : t.shape[-1]].copy_(t)


_LAYOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "strided": _strided,
    "strided_last": _strided_last,
    "misaligned": _misaligned,
    "expanded": _expanded,
    "far_offset": _far_offset,
    "in_bulk": _in_bulk,
}


def laid_out(call: Call, places: list[str], name: str) -> Call:
    """The call with these tensors, its own or the spec's, in the layout of this name."""
    layout = _LAYOUTS[name]
    own = {name: layout(getattr(call, name)) for name in places if hasattr(call, name)}
    named = {name: layout(getattr(call.spec.tensors, name)) for name in places if name not in own}
    tensors = call.spec.tensors._replace(**named)
    return call.replace(**own, spec=dataclasses.replace(call.spec, tensors=tensors))


@dataclass(frozen=True)
class Entry:
    """One named input.

    ``shape`` is (batch, heads_q, heads_kv, seqlen_q, seqlen_k, head_dim, head_dim_v). ``loss`` says which outputs have a gradient
    ("o", "lse" or "o+lse"). ``terms`` are words of ``terms.draw_terms``, which the spec has besides. ``places`` names the tensors
    whose memory ``layout`` changes. ``gpu_gib`` is the GPU memory that the entry needs; 0 means that it runs anywhere. ``returns``
    is what is wanted besides o and lse. ``precision`` holds for float32.
    """

    name: str
    kills: str
    shape: tuple[int, int, int, int, int, int, int]
    spec: Spec = Spec()
    sm_scale: float | None = None
    values: str = ""
    layout: str = ""
    places: str = "q k v do"
    loss: str = "o"
    gpu_gib: int = 0
    terms: str = ""
    returns: str = ""
    precision: str | None = None

    def __str__(self) -> str:
        return f"{self.name:<22} kills {self.kills}"

    def at_head_dims(self, head_dim: int, head_dim_v: int) -> Entry:
        """The same entry for a backend that takes this head_dim and head_dim_v and no others."""
        words = f"{head_dim}" if head_dim == head_dim_v else f"{head_dim}/{head_dim_v}"
        return dataclasses.replace(self, name=f"{self.name} D={words}", shape=(*self.shape[:5], head_dim, head_dim_v))

    def build(self, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32, seed: int = 0) -> Call:
        """The call, drawn from ``seed`` in ``dtype``."""
        spec = placed(self.spec, device)
        if self.terms:
            spec &= draw_terms(self.terms, self.shape, device, seed=seed + len(self.name))
        call = random_call(
            self.shape,
            device=device,
            dtype=dtype,
            seed=seed + sum(map(ord, self.name)),
            spec=spec,
            sm_scale=self.sm_scale,
            dlse="lse" in self.loss,
        )
        call = call.replace(returns=self.returns, precision=self.precision if dtype == torch.float32 else None)
        if self.values:
            _VALUES[self.values](call)
        if self.layout:
            call = laid_out(call, self.places.split(), self.layout)
        return call if self.loss != "lse" else call.replace(do=None)


GAUNTLET: tuple[Entry, ...] = (
    Entry(
        "ragged_full",
        "a missing mask of the tail: Nk is no multiple of any tile, and every bottom-right causal input lets that live",
        (2, 2, 2, 77, 139, 32, 32),
    ),
    Entry(
        "ragged_causal_br",
        "a causal corner that ignores Nk - Nq, with more keys than queries",
        (1, 2, 2, 70, 131, 32, 32),
        causal(),
    ),
    Entry(
        "ragged_causal_tl",
        "a causal corner that adds Nk - Nq where it must not; keys that no query sees",
        (1, 2, 2, 70, 131, 32, 32),
        causal("top_left"),
    ),
    Entry(
        "unseen_keys",
        "whole tiles of keys that no query sees: a walk that visits tiles of queries past the last one",
        (1, 2, 2, 15, 700, 32, 32),
        window(7, 0, align="top_left"),
    ),
    Entry(
        "thin_window",
        "a window that is off by one; a first tile without any key; no guard for a running maximum of -inf",
        (1, 2, 1, 150, 150, 16, 16),
        window(5, 3),
    ),
    Entry(
        "thin_window_causal",
        "a window that counts self; a lower bound that is only right without an upper",
        (1, 1, 1, 130, 171, 16, 16),
        window(4, 0),
    ),
    Entry(
        "self_only",
        "a window of (0, 0) that sees more than self: o must be v, and dq must be 0",
        (1, 1, 1, 70, 70, 16, 16),
        window(0, 0),
    ),
    Entry(
        "wide_512",
        "columns of a wide head that are made of the wrong part of v, q or k, or not at all",
        (1, 2, 1, 70, 90, 512, 512),
        causal(),
        loss="o+lse",
    ),
    Entry(
        "wide_384",
        "parts of the columns of which the last is ragged, under a window",
        (1, 2, 2, 70, 90, 384, 320),
        window(20, 3),
    ),
    Entry("wide_320_16", "one head_dim taken for the other where only one is wide", (2, 2, 1, 40, 70, 320, 16), causal()),
    Entry(
        "wide_heads_apart",
        "weights that are kept for some heads at a time and used for others",
        (2, 4, 2, 40, 90, 16, 272),
        causal(),
    ),
    Entry(
        "wide_unseen_keys",
        "weights read where none were written: tiles of queries whose only rows that see the keys lie past the end",
        (1, 2, 1, 34, 140, 16, 272),
        window(40, 20, align="top_left"),
    ),
    Entry(
        "wide_terms",
        "terms that are forgotten where weights are kept",
        (1, 2, 1, 70, 90, 272, 40),
        causal(),
        terms="softcap:2 bias:1hqk alibi segment sink",
    ),
    Entry(
        "wide_dropout",
        "a mask of dropout that differs between the parts of the columns",
        (1, 2, 1, 40, 70, 272, 272),
        causal(),
        terms="dropout:0.3",
    ),
    Entry("odd_72", "columns past the end of a head that are not zero", (1, 2, 1, 70, 90, 72, 80), causal()),
    Entry("odd_160", "columns past the end of a head that are not zero", (1, 2, 1, 70, 90, 160, 112), window(30, 9)),
    Entry(
        "two_tiles",
        "columns that are two tiles: one that is dropped, read or written at other columns, not rescaled, or not scaled",
        (1, 2, 1, 70, 137, 72, 80),
        values="late_spike",
        sm_scale=-0.29,
    ),
    Entry(
        "chunks_sink",
        "a sink, or the rate of dropout, that meets the first of two tiles of columns alone",
        (1, 2, 1, 40, 70, 80, 72),
        causal("top_left"),
        terms="sink dropout:0.3",
    ),
    Entry(
        "two_tiles_strided",
        "the second of two tiles of columns taken from rows that are packed",
        (2, 2, 1, 40, 70, 96, 72),
        window(20, 3),
        layout="strided_last",
    ),
    Entry("two_tiles_96", "the second of two tiles of columns, masked and free", (1, 2, 1, 70, 90, 96, 96), window(70, 9)),
    Entry("two_tiles_wide", "columns between two tiles and the whole", (1, 1, 1, 40, 70, 192, 144), causal()),
    Entry("wide_window", "free tiles between two masked edges", (1, 1, 1, 129, 200, 16, 32), window(70, 33, "top_left")),
    Entry(
        "tile_edge_empty",
        "a plan of tiles that is one key too short: the outermost key of the window lies alone in its tile; no tile is ragged",
        (1, 1, 1, 128, 192, 16, 16),
        window(33, 33),
    ),
    Entry(
        "tile_edge_free",
        "a free range that is one key too long: one corner of the tile is hidden; edges that are skipped where no tile is ragged",
        (1, 1, 1, 128, 192, 16, 16),
        window(62, 62),
    ),
    Entry(
        "empty_rows",
        "a finite fill of masked scores (the mean of v in rows without keys); NaN there; gradients there, also of lse",
        (1, 2, 1, 141, 66, 32, 32),
        causal(),
        loss="o+lse",
    ),
    Entry(
        "empty_tail",
        "the same at the other end: the last queries see nothing",
        (1, 1, 1, 150, 70, 32, 16),
        window(4, None, "top_left"),
        loss="o+lse",
    ),
    Entry(
        "empty_window",
        "an empty window taken for no window; memory that nobody writes when no tile is visited",
        (1, 2, 2, 70, 70, 16, 16),
        window(-1, 0),
        loss="o+lse",
    ),
    Entry(
        "overflow_spike",
        "the maximum of a block in place of the running one: 2^127 overflows",
        (1, 2, 2, 70, 140, 32, 32),
        values="overflow_spike",
    ),
    Entry("overflowed_keys", "-inf - -inf in a free tile", (1, 2, 1, 40, 333, 16, 16), values="overflowed_keys"),
    Entry("overflowed_wide", "the same in wide heads", (1, 2, 1, 40, 333, 272, 16), values="overflowed_keys"),
    Entry("late_spike", "an accumulator or a sum that is not multiplied by alpha", (1, 2, 2, 70, 137, 32, 32), values="late_spike"),
    Entry(
        "very_low", "padded keys that score 0 where every real score is below -128", (1, 2, 2, 70, 139, 32, 32), values="very_low"
    ),
    Entry("odd_scale", "a lost scale, in o, dq or dk; base e beside base two", (1, 2, 2, 70, 100, 32, 32), sm_scale=0.37),
    Entry(
        "negative_scale", "a maximum that is taken before a negative scale", (1, 2, 2, 70, 100, 32, 32), causal(), sm_scale=-0.29
    ),
    Entry(
        "zero_scale",
        "0 * inf in the mask or the maximum; a default in place of 0",
        (1, 2, 2, 70, 100, 32, 32),
        causal(),
        sm_scale=0.0,
    ),
    Entry(
        "gqa",
        "a group that is not summed into dk and dv, averaged, or read in the wrong order",
        (2, 6, 2, 66, 70, 16, 16),
        causal(),
    ),
    Entry("mqa", "the same with one key head", (2, 5, 1, 66, 70, 16, 16)),
    Entry(
        "two_odd_head_dims",
        "descriptors of shared memory that an old assembler adds up wrong where columns are cut off keys and values (Triton 3.6)",
        (1, 5, 1, 127, 256, 100, 3),
        Spec(upper=0, lower=1, align="top_left"),
    ),
    Entry(
        "odd_head_dims",
        "columns beyond head_dim; head_dim_v that is taken for head_dim; a key block read transposed",
        (1, 2, 1, 67, 70, 20, 50),
        causal(),
    ),
    Entry("one_query", "a row 0 at the wrong position in decoding", (2, 4, 2, 1, 133, 32, 32), causal()),
    Entry("one_key", "rounding up to a tile that is all padding", (2, 2, 2, 67, 1, 16, 16)),
    Entry("lse_loss", "a dlse that is ignored or has the wrong sign", (1, 2, 1, 70, 100, 32, 32), causal(), loss="o+lse"),
    Entry("lse_only", "a do that must be there; dv must be exactly 0", (1, 2, 1, 70, 100, 16, 16), loss="lse"),
    Entry("zero_len_k", "a crash or an unwritten output where there are no keys", (2, 2, 1, 5, 0, 16, 16), causal(), loss="o+lse"),
    Entry(
        "zero_len_q",
        "a crash or unwritten gradients where there are no queries",
        (2, 2, 1, 0, 67, 16, 32),
        causal("top_left"),
        loss="o+lse",
    ),
    Entry("zero_batch", "a launch with an empty grid", (0, 2, 1, 5, 7, 16, 16), loss="o+lse"),
    Entry(
        "strided",
        "addresses that assume a contiguous tensor; what lies in the gaps is NaN",
        (2, 2, 2, 67, 83, 24, 40),
        causal(),
        layout="strided",
    ),
    Entry(
        "strided_v",
        "strides of k used for v; a last dim that is taken for contiguous",
        (1, 2, 1, 66, 70, 16, 32),
        layout="strided_last",
        places="v",
    ),
    Entry(
        "strided_last",
        "a last dim that is taken for contiguous, in all tensors",
        (1, 2, 1, 66, 70, 16, 16),
        causal(),
        layout="strided_last",
    ),
    Entry("expanded", "strides of 0", (3, 2, 1, 66, 70, 16, 16), layout="expanded", places="k v do"),
    Entry(
        "misaligned",
        "a descriptor on memory that is not aligned to 16 bytes",
        (1, 2, 1, 66, 70, 16, 16),
        causal(),
        layout="misaligned",
    ),
    Entry(
        "poison",
        "outputs and scratch that are never written: queries and keys beyond both ends of the window",
        (1, 2, 1, 140, 75, 16, 16),
        Spec(upper=-20, lower=30),
    ),
    Entry(
        "softcap",
        "a derivative of the cap that is missing in dq or dk; a cap in the wrong unit",
        (1, 2, 1, 70, 100, 16, 16),
        causal(),
        values="beyond_cap",
        terms="softcap:2",
    ),
    Entry(
        "softcap_bias",
        "a bias that is capped though it comes after the cap, in o or in its gradient",
        (2, 2, 1, 70, 100, 16, 16),
        values="beyond_cap",
        terms="softcap:2 bias:1hqk",
    ),
    Entry(
        "bias_softcap",
        "a bias that comes before the cap and does not feel it; the same of slopes, and of the gradients of both",
        (2, 2, 1, 70, 100, 16, 16),
        causal(),
        values="beyond_cap",
        terms="alibi bias:b1qk softcap:2",
    ),
    Entry(
        "alibi_both_sides",
        "a distance with a sign; slopes of one batch for all; a slope's gradient without its distance",
        (2, 3, 1, 70, 100, 16, 16),
        loss="o+lse",
        terms="alibi:bh",
    ),
    Entry(
        "alibi_causal",
        "distances that are counted from another tile; what all scores of a row share and lse lacks; slopes of another head",
        (1, 4, 2, 150, 210, 16, 16),
        causal(),
        loss="o+lse",
        terms="alibi",
    ),
    Entry(
        "softcap_near",
        "a series for tanh that is used beyond its reach; a small score that loses its digits",
        (1, 2, 1, 100, 140, 16, 16),
        window(60, 10),
        values="beyond_cap",
        loss="o+lse",
        terms="softcap:20",
    ),
    Entry(
        "bias_broadcast",
        "a gradient of a bias that is not summed over batches, heads or queries, or read with the wrong stride",
        (2, 4, 2, 70, 100, 16, 16),
        causal(),
        terms="bias:k",
    ),
    Entry(
        "bias_shared",
        "dq and the gradient of a bias out of one kernel: a sequence left out, or its keys another's; tiles that no query sees",
        (4, 4, 2, 70, 150, 16, 16),
        window(60, 10),
        loss="o+lse",
        terms="bias:1hqk",
    ),
    Entry(
        "bias_alone",
        "the same of one sequence and of a bias of its own",
        (2, 2, 1, 90, 70, 16, 24),
        causal(),
        terms="bias:bhqk",
    ),
    Entry("bias_of_batches", "the same over heads and keys", (2, 4, 2, 70, 100, 16, 16), window(30, 0), terms="bias:b1q1"),
    Entry(
        "lowest_bias",
        "rows of the lowest value taken for empty ones, or weights that do not sum to 1 there in the backward pass; NaN from -inf",
        (1, 2, 1, 70, 100, 16, 16),
        values="lowest_rows",
        loss="o+lse",
        terms="bias:1hqk",
    ),
    Entry(
        "sink",
        "a sink that is not in the sum, scaled, or counted as a key; its gradient; rows that see no key but have a sink",
        (2, 4, 2, 100, 70, 16, 16),
        causal(),
        loss="o+lse",
        terms="sink",
    ),
    Entry(
        "own_function",
        "a derivative of the user's function that is missing in dq or dk, or a function that gets scores in base two",
        (1, 2, 1, 70, 100, 16, 16),
        causal(),
        values="beyond_cap",
        terms="fn:rational_cap",
    ),
    Entry(
        "own_positions",
        "positions that begin at 0 for a query, or that lie beyond the end; the head of the keys in place of that of the queries",
        (2, 4, 2, 70, 100, 16, 16),
        window(60, 20),
        loss="o+lse",
        terms="fn:relative",
    ),
    Entry(
        "own_tensors",
        "tensors of a function in the wrong order, another batch's, or a negative derivative without its sign",
        (2, 4, 2, 70, 100, 16, 16),
        terms="fn:tempered softcap:2 bias:1hqk",
    ),
    Entry(
        "own_between",
        "a bias before the function that does not feel its derivative, or slopes behind it that do",
        (2, 2, 1, 70, 100, 16, 16),
        values="beyond_cap",
        terms="bias:b1qk fn:rational_cap alibi",
    ),
    Entry(
        "own_mask",
        "rows that a function leaves without a key; what it makes of rows past the end",
        (1, 2, 1, 70, 100, 16, 16),
        loss="o+lse",
        terms="fn:sparse",
    ),
    Entry(
        "own_hidden",
        "NaN where a mask hides the pair, from the function and from its derivative",
        (1, 2, 1, 70, 100, 16, 16),
        causal(),
        terms="fn:rooted",
    ),
    Entry(
        "dropout",
        "a dropout mask that depends on the tile, or is the same for heads or batches; a lost 1 / (1 - p), in o or in a gradient; "
        "a mask that is not applied to dp, or is applied to ds; an lse that feels it",
        (2, 4, 2, 77, 139, 16, 16),
        causal(),
        loss="o+lse",
        terms="dropout:0.3",
    ),
    Entry(
        "dropout_scores",
        "the same in the gradients of biases, slopes and sinks",
        (2, 4, 2, 70, 100, 16, 16),
        loss="o+lse",
        terms="alibi softcap:2 bias:b11k sink dropout:0.6",
    ),
    Entry(
        "dropout_documents",
        "the same where lists of tiles are walked",
        (2, 2, 1, 90, 70, 16, 16),
        unsorted_ids(2, 90, 70),
        terms="dropout:0.5",
    ),
    Entry(
        "dropout_all", "a factor of 1 / 0 where everything is dropped", (1, 2, 1, 40, 70, 16, 16), loss="o+lse", terms="dropout:1"
    ),
    Entry(
        "documents",
        "a tile that is called free where two documents meet; a segment check that is lost in a pass; documents that end at tiles' "
        "edges and beside them, of one token and of none",
        (1, 2, 1, 150, 150, 16, 16),
        lengths(32, 1, 31, 0, 64, 17, 5) & causal(),
    ),
    Entry(
        "documents_full",
        "the same without a bound: tiles before and behind the document; a ragged last tile that is called free",
        (2, 2, 2, 77, 139, 16, 16),
        documents(torch.tensor((32, 13, 32), dtype=torch.int32), torch.tensor((64, 11, 64), dtype=torch.int32)),
        values="very_low",
    ),
    Entry(
        "unsorted_ids",
        "ids that are taken for sorted, or that are the same for all batches; an id without keys",
        (2, 2, 1, 90, 70, 16, 16),
        unsorted_ids(2, 90, 70),
        loss="o+lse",
    ),
    Entry(
        "row_intervals",
        "an interval that holds its end; tiles that are free for some rows only; intervals of another head; rows of no keys",
        (2, 4, 2, 100, 90, 16, 16),
        own_intervals(4, 100, 90),
        loss="o+lse",
    ),
    Entry(
        "padded_keys",
        "lengths that are read for another batch; a batch without keys",
        (3, 2, 1, 40, 70, 16, 16),
        key_padding(torch.tensor((70, 33, 0), dtype=torch.int32)) & window(40, 0, "top_left"),
    ),
    Entry(
        "dense_tiles",
        "a tile that is called free for a hole of one pair, or empty for most of it; lists of another batch or head",
        (2, 4, 2, 100, 130, 16, 16),
        dense(tiles_of_sixteen(2, 4, 100, 130)),
    ),
    Entry(
        "dense_ragged",
        "a last tile of keys that is called free because the dense mask shows all of its keys that exist",
        (1, 2, 1, 70, 139, 16, 16),
        dense(torch.arange(139) >= 20),
        values="very_low",
    ),
    Entry(
        "dense_strided",
        "a dense mask that is read as if it were contiguous, or in the other order of its dims",
        (2, 2, 1, 70, 90, 16, 16),
        dense(tiles_of_sixteen(1, 1, 90, 70).mT.expand(2, 2, 70, 90)) & causal(),
    ),
    Entry(
        "all_terms",
        "a term that is forgotten where there are others",
        (1, 2, 2, 90, 90, 16, 16),
        lengths(40, 50) & own_intervals(2, 90, 90) & dense(tiles_of_sixteen(1, 1, 90, 90)[0, 0]) & window(50, 20),
    ),
    Entry(
        "far_bias",
        "offsets of a bias in 32 bits",
        (2, 2, 1, 130, 140, 64, 64),
        causal(),
        layout="far_offset",
        places="bias",
        gpu_gib=24,
        terms="bias:bhqk",
    ),
    Entry(
        "max_logit",
        "a largest score that counts sinks, hidden keys, or keys past the end (which score 0)",
        (2, 4, 2, 70, 90, 16, 16),
        window(20, 3),
        values="very_low",
        terms="sink:bh",
        returns="max_logit",
    ),
    Entry(
        "max_logit_bias",
        "a largest score in base two where scores are natural, or before the bias; the same score for all heads",
        (2, 2, 1, 70, 90, 16, 16),
        sm_scale=-0.3,
        terms="softcap:2 bias:bhqk",
        returns="max_logit",
    ),
    Entry("max_logit_empty", "a largest score of hidden keys", (1, 2, 1, 40, 40, 16, 16), window(-1, 0), returns="max_logit"),
    Entry(
        "column_sums",
        "sums over queries of another head, of hidden keys, of queries past the end, or in which a sink has no share",
        (2, 4, 2, 70, 90, 16, 16),
        causal(),
        terms="sink:bh softcap:2",
        returns="column_sums",
    ),
    Entry(
        "column_sums_terms",
        "terms that a second pass forgets, natural scores, rows that see nothing",
        (2, 2, 1, 70, 90, 16, 16),
        window(20, 3),
        sm_scale=-0.3,
        terms="alibi bias:b1qk:-inf segment row dense",
        returns="column_sums",
    ),
    Entry("column_sums_ragged", "a missing tail mask", (1, 2, 2, 77, 139, 32, 32), values="very_low", returns="column_sums"),
    Entry(
        "weights",
        "weights of queries that do not follow one another, at the positions of others that do",
        (2, 4, 2, 70, 90, 16, 16),
        window(20, 3),
        terms="alibi:bh softcap:2 sink",
        returns="weights",
    ),
    Entry(
        "weights_terms",
        "tensors of the mask that are read at the place of a query in the choice",
        (2, 2, 1, 70, 90, 16, 16),
        causal("top_left"),
        terms="bias:bhqk segment row dense",
        returns="weights",
    ),
    Entry(
        "halves_causal",
        "a half or a product that is lost where float32 operands are halved; the sign of a scale; halves of another head",
        (2, 4, 2, 101, 139, 40, 24),
        causal(),
        sm_scale=-0.4,
        loss="o+lse",
    ),
    Entry(
        "halves_kept",
        "the same where weights are kept",
        (1, 4, 2, 98, 130, 272, 40),
        window(60, 20),
        terms="softcap:5",
    ),
    Entry(
        "halves_uneven",
        "rows in the units of others, and what a large row that nobody may see does to them",
        (1, 2, 1, 99, 131, 32, 24),
        causal("top_left"),
        values="uneven_rows",
    ),
    Entry("tf32_halves", "the same with a half alone", (2, 4, 2, 98, 139, 40, 24), window(60, 20), precision="tf32"),
    Entry("tf32_kept", "the same where weights are kept", (1, 2, 1, 98, 130, 272, 40), causal(), precision="tf32"),
    Entry("halves_long", "the same at a length of real work", (1, 4, 2, 1100, 1301, 128, 128), causal(), loss="o+lse", gpu_gib=1),
    Entry("halves_long_64", "the same in other tiles", (1, 4, 2, 1100, 1301, 64, 40), window(700, 90), gpu_gib=1),
    Entry("halves_long_256", "the same in other tiles", (1, 2, 1, 1100, 1301, 256, 192), terms="softcap:5", gpu_gib=1),
    Entry(
        "halves_long_uneven",
        "the same with uneven rows",
        (1, 4, 2, 1100, 1301, 128, 96),
        causal("top_left"),
        values="uneven_rows",
        gpu_gib=1,
    ),
    Entry("halves_steep", "sums of one sign, which are cut off", (1, 2, 2, 2048, 4096, 128, 128), values="of_one_sign", gpu_gib=1),
    Entry("tf32_long", "the same", (1, 4, 2, 1100, 1301, 128, 128), causal(), precision="tf32", loss="o+lse", gpu_gib=1),
    Entry("tf32_long_64", "the same", (1, 4, 2, 1100, 1301, 64, 40), window(700, 90), precision="tf32", gpu_gib=1),
    Entry(
        "kept_causal",
        "derivatives of scores that are kept for some heads at a time, and read as those of other heads, keys or queries",
        (4, 16, 16, 2100, 2100, 128, 128),
        causal(),
        gpu_gib=32,
    ),
    Entry("kept_full", "the same without a mask", (2, 8, 8, 2100, 2090, 128, 128), gpu_gib=8),
    Entry("far_offset", "offsets in 32 bits", (2, 2, 1, 130, 140, 64, 64), causal(), layout="far_offset", gpu_gib=24),
)

_BY_NAME = {e.name: e for e in GAUNTLET}


def entry(name: str) -> Entry:
    """The entry of this name."""
    return _BY_NAME[name]


def run(
    entry: Entry,
    backend: str | Callable[..., tuple[torch.Tensor, torch.Tensor]],
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> list[Result]:
    """Judge one backend (or a function, see ``calls.evaluate``) on one entry, every allocation poisoned: o, lse, dq, dk, dv."""
    return run_call(entry.build(device, dtype, seed), backend, entry.name)


def run_call(call: Call, backend: str | Callable[..., tuple[torch.Tensor, torch.Tensor]], name: str) -> list[Result]:
    """Judge one backend on one call, with every allocation poisoned."""
    if callable(backend):
        call = call.replace(returns="")  # a function gives o and lse
    with poison():
        got = evaluate(call, backend)
    return Yardstick(call).judge(got, name)
