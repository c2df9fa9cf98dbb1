"""The tensors that a spec names: what they must look like in a call, and how a ``Problem`` describes them.

Each broadcasts to extents of the call, aligned at the last dim as in PyTorch. An ``Operand`` says of every extent whether the
tensor has it (its letter) or broadcasts in it (``1``): ``1hqk`` is a bias shared by the batch. So no length enters the description.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from .errors import InvalidInput
from .functions import function_of
from .spec import FN_SLOTS, SLOTS, Spec, Tensors

__all__ = ["DIMS", "Operand", "default_operand", "describe", "expanded", "full_rank", "parse_operand"]

_FLOAT = ("float16", "bfloat16", "float32", "float64")
_INT = ("int32", "int64")
# Extents and dtypes, by slot. Letters: batch, heads_q, queries, keys; the numbers of a seed (``keep.py``).
DIMS = {
    "bias": "bhqk",
    "slopes": "bh",
    "sink": "bh",
    "segment_q": "bq",
    "segment_k": "bk",
    "row_start": "bhq",
    "row_end": "bhq",
    "dense": "bhqk",
    "seed": "bn",
    "plan": "",
    **dict.fromkeys(FN_SLOTS, ""),  # their functions know their shapes
}
_DTYPES = {
    **dict.fromkeys(("bias", "slopes", "sink"), _FLOAT),
    **dict.fromkeys(("segment_q", "segment_k", "row_start", "row_end"), _INT),
    "dense": ("bool",),
    "seed": ("int64",),
    **dict.fromkeys(FN_SLOTS, (*_FLOAT, "int8", "uint8", "int16", *_INT)),
}
_DEFAULTS = {
    "bias": ("float32", "1hqk"),
    "slopes": ("float32", "1h"),
    "sink": ("float32", "1h"),
    "segment_q": ("int32", "bq"),
    "segment_k": ("int32", "bk"),
    "row_start": ("int32", "b1q"),
    "row_end": ("int32", "b1q"),
    "dense": ("bool", "b1qk"),
    "seed": ("int64", "11"),
    **dict.fromkeys(FN_SLOTS, ("float32", "")),
}
_WORDS = {"b": "batch", "h": "heads_q", "q": "seqlen_q", "k": "seqlen_k", "n": "numbers"}


class Operand(NamedTuple):
    """One tensor of a spec as a problem sees it: slot, dtype, and a letter or ``1`` for every extent.

    ``bulk``: a copy engine that works by descriptors can read it; asked only of a bias that has an element for each query and key.
    """

    slot: str
    dtype: str
    dims: str
    bulk: bool = True

    def __str__(self) -> str:
        return f"{self.slot}={self.dtype}:{self.dims}{'' if self.bulk else ':strided'}"

    def has(self, letter: str) -> bool:
        """Does the tensor vary along this extent?"""
        return letter in self.dims


def default_operand(slot: str) -> Operand:
    """What a problem string means that names a slot in its mask and does not describe it."""
    return Operand(slot, *_DEFAULTS[slot])


def parse_operand(slot: str, text: str) -> Operand:
    """Read ``float32:1hqk``, or ``float32:1hqk:strided`` of a tensor that cannot be copied in bulk."""
    dtype, _, dims = text.partition(":")
    strided = dims.endswith(":strided")
    dims = dims.removesuffix(":strided")
    if dtype not in _DTYPES[slot]:
        raise InvalidInput(f"{slot} has dtype {dtype!r}, expected one of {', '.join(_DTYPES[slot])}.")
    if len(dims) != len(DIMS[slot]) or any(have not in ("1", want) for have, want in zip(dims, DIMS[slot], strict=False)):
        raise InvalidInput(f"{slot} has dims {dims!r}, expected {DIMS[slot]!r} with a 1 for each dim that it broadcasts in.")
    return Operand(slot, dtype, dims, not strided)


def _extents(slot: str, q: torch.Tensor, k: torch.Tensor) -> tuple[int, ...]:
    sizes = {"b": q.shape[0], "h": q.shape[1], "q": q.shape[2], "k": k.shape[2], "n": 3}
    return tuple(sizes[letter] for letter in DIMS[slot])


def _describe(slot: str, t: torch.Tensor | None, q: torch.Tensor, k: torch.Tensor) -> Operand:
    if t is None:
        raise InvalidInput(f"the spec names {slot} but no tensor was given for it: build the spec with tilewise's constructors.")
    names = tuple(_WORDS[letter] for letter in DIMS[slot])
    words = f"({', '.join(names)})"
    dtype = str(t.dtype).removeprefix("torch.")
    if dtype not in _DTYPES[slot]:
        raise InvalidInput(f"{slot} has dtype {dtype}, expected one of {', '.join(_DTYPES[slot])}.")
    if dtype == "float64" and q.dtype != torch.float64:
        narrow = str(q.dtype).removeprefix("torch.")
        raise InvalidInput(f"{slot} has dtype float64 but q has {narrow}, which would round it: cast it with {slot}.float().")
    if t.device != q.device:
        raise InvalidInput(f"{slot} is on {t.device} but q is on {q.device}: move it with {slot}.to(q.device).")
    extents = _extents(slot, q, k)
    got = f"Got shape {tuple(t.shape)}, {words} is {extents}."
    if t.dim() > len(extents):
        raise InvalidInput(f"{slot} has {t.dim()} dims, expected at most {len(extents)}: {words}. {got}")
    sizes = (1,) * (len(extents) - t.dim()) + tuple(t.shape)
    for name, size, extent in zip(names, sizes, extents, strict=True):
        if size not in (1, extent):
            raise InvalidInput(f"{slot} has {size} at {name}, expected {extent} or 1: it must broadcast to {words}. {got}")
    dims = "".join("1" if size == 1 else letter for letter, size in zip(DIMS[slot], sizes, strict=True))
    return Operand(slot, dtype, dims)


def _describe_own(spec: Spec, slot: str, t: torch.Tensor | None, q: torch.Tensor) -> Operand:
    """A tensor of the spec's score function, which alone knows what shape it must have."""
    function = function_of(spec)
    at = FN_SLOTS.index(slot)
    called = f"tensor {function.tensors[at]!r} of score function {function.name!r}"
    if t is None:
        raise InvalidInput(f"{called} was not given: build the spec with tilewise.score_fn.")
    dtype = str(t.dtype).removeprefix("torch.")
    if dtype not in _DTYPES[slot]:
        raise InvalidInput(f"{called} has dtype {dtype}, expected one of {', '.join(_DTYPES[slot])}.")
    if t.device != q.device:
        raise InvalidInput(f"{called} is on {t.device} but q is on {q.device}: move it with .to(q.device).")
    if not t.is_contiguous():
        raise InvalidInput(
            f"{called} has strides {t.stride()} for shape {tuple(t.shape)}, expected a contiguous tensor, which the function reads "
            "by index arithmetic: call .contiguous()."
        )
    return Operand(slot, dtype, "")


def _check_plan(spec: Spec, t: torch.Tensor | None, q: torch.Tensor, k: torch.Tensor) -> None:
    """Raise InvalidInput unless the plan was made for a call of this shape, on this device."""
    made_for = tuple(map(int, spec.plan.split("/")[0].split("x")))
    here = (q.shape[0], q.shape[1], q.shape[2], k.shape[2])
    if made_for != here:
        words = ("batch", "heads_q", "seqlen_q", "seqlen_k")
        differ = ", ".join(f"{w} {a} where the call has {b}" for w, a, b in zip(words, made_for, here, strict=True) if a != b)
        raise InvalidInput(f"the plan of this spec was made for {differ}: make one for this call with tilewise.plan(q, k, spec).")
    if t is None or t.device != q.device:
        where = "nowhere" if t is None else t.device
        raise InvalidInput(f"the plan of this spec is on {where} but q is on {q.device}: make one with tilewise.plan(q, k, spec).")


def describe(spec: Spec, tensors: Tensors, q: torch.Tensor, k: torch.Tensor) -> tuple[Operand, ...]:
    """The operands of a call, in the order of the slots.

    Raises:
        InvalidInput: a tensor that is missing, that the spec does not name, or that does not fit the call.
    """
    if spec.plan:
        _check_plan(spec, tensors.plan, q, k)
    named = spec.slots
    for slot, t in zip(SLOTS, tensors, strict=True):
        if t is not None and slot not in named:
            raise InvalidInput(f"a tensor was given for {slot}, but the spec does not name it: {spec}.")
    return tuple(
        _describe_own(spec, slot, t, q) if slot in FN_SLOTS else _describe(slot, t, q, k)
        for slot, t in zip(SLOTS, tensors, strict=True)
        if slot in named and slot != "plan"
    )


def full_rank(slot: str, t: torch.Tensor) -> torch.Tensor:
    """The tensor as a view with all dims of its slot; those that it lacks have size 1."""
    for _ in range(len(DIMS[slot]) - t.dim()):
        t = t.unsqueeze(0)
    return t


def expanded(slot: str, t: torch.Tensor, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """The tensor as a view over all its extents: stride 0 where it broadcasts."""
    return full_rank(slot, t).expand(_extents(slot, q, k))
