"""``Problem``: one call as one frozen value. Everything after it, until the launch, is a pure function of it."""

from __future__ import annotations

import dataclasses
import sys
from dataclasses import dataclass
from typing import NamedTuple

import torch

from .arch import ARCHS, OTHER_KINDS, Arch, Runtime, arch_named, arch_of, runtime
from .errors import InvalidInput
from .operands import Operand, default_operand, describe, parse_operand
from .spec import SLOTS, Spec, Tensors

__all__ = ["DTYPES", "GRADIENTS", "NO_TANGENTS", "PRECISIONS", "Problem", "Tangents", "grad_letters"]

DTYPES = ("float16", "bfloat16", "float32", "float64")
PRECISIONS = ("ieee", "tf32")
# What may need a gradient, by its letter.
GRADIENTS = {"q": "q", "k": "k", "v": "v", "b": "bias", "a": "slopes", "s": "sink"}
_ITEMSIZE = {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8}
_MAX_LEN = 2**30
_MAX_SCALE = sys.float_info.max
_MAX_SCALE_32 = 2.0**127  # times log2(e) it is still a float32 number
_LAYOUT = "(batch, heads, seqlen, head_dim)"


class Tangents(NamedTuple):
    """The directions of a forward-mode derivative, in the order of ``GRADIENTS``; ``None``: this one does not move."""

    q: torch.Tensor | None = None
    k: torch.Tensor | None = None
    v: torch.Tensor | None = None
    bias: torch.Tensor | None = None
    slopes: torch.Tensor | None = None
    sink: torch.Tensor | None = None

    @property
    def letters(self) -> str:
        """Those that are there, as letters of ``GRADIENTS``."""
        return grad_letters(*(t is not None for t in self))


NO_TANGENTS = Tangents()


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def grad_letters(*needs: bool) -> str:
    """Which of q, k, v, bias, slopes and sink (in this order, as far as given) need a gradient, as letters: ``"kvb"``."""
    return "".join(letter for letter, need in zip(GRADIENTS, needs, strict=False) if need)


def keeps_rows(spec: Spec, grad: str) -> bool:
    """Does the backward pass need more of a row than lse, which cannot tell one huge negative score from several of them?"""
    return spec.natural and bool(grad)


def _shapes(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> str:
    return f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"


def bulk_copyable(t: torch.Tensor) -> bool:
    """Can a copy engine that works by descriptors read this tensor? 16-byte base and strides, contiguous last dim, no stride 0."""
    item = t.element_size()
    if t.stride(-1) != 1 or t.shape[-1] * item % 16 or t.data_ptr() % 16:
        return False
    outer = zip(t.shape[:-1], t.stride()[:-1], strict=True)
    return all(size == 1 or (stride > 0 and stride * item % 16 == 0) for size, stride in outer)


def _described(spec: Spec, tensors: Tensors, q: torch.Tensor, k: torch.Tensor) -> tuple[Operand, ...]:
    """The operands of a call; of a bias with an element for each query and key, whether rows of it can be copied in bulk."""
    operands = describe(spec, tensors, q, k)
    if tensors.bias is None or _rows_copyable(tensors.bias):
        return operands
    return tuple(o._replace(bulk=False) if o.slot == "bias" and o.dims.endswith("qk") else o for o in operands)


def _rows_copyable(t: torch.Tensor) -> bool:
    """``bulk_copyable`` of a tensor whose last extent may be anything."""
    if t.dim() == 0 or t.stride(-1) != 1 or t.data_ptr() % 16:
        return False
    outer = zip(t.shape[:-1], t.stride()[:-1], strict=True)
    return all(size == 1 or (stride > 0 and stride * t.element_size() % 16 == 0) for size, stride in outer)


@dataclass(frozen=True)
class Problem:
    """The metadata of one attention call: shapes, dtype, mask, scale, what needs a gradient, and what it runs on.

    ``str(problem)`` is a line of ``name=value`` words that ``Problem.parse`` reads back, and that errors print.
    """

    spec: Spec
    dtype: str
    batch: int
    heads_q: int
    heads_kv: int
    seqlen_q: int
    seqlen_k: int
    head_dim: int
    head_dim_v: int
    sm_scale: float
    precision: str = "ieee"
    grad: str = ""
    bulk: bool = True
    arch: Arch = ARCHS["cpu"]
    runtime: Runtime = Runtime(None)
    operands: tuple[Operand, ...] = ()
    jvp: str = ""  # the tangents of a forward-mode derivative, as letters of ``GRADIENTS``

    def __hash__(self) -> int:
        """Of all fields, worked out once: a problem is looked up in several tables during every call."""
        found = self.__dict__.get("_hash")
        if found is None:
            found = hash(tuple(getattr(self, field.name) for field in dataclasses.fields(self)))
            object.__setattr__(self, "_hash", found)
        return found

    def __getstate__(self) -> dict[str, object]:
        return {name: value for name, value in self.__dict__.items() if name != "_hash"}  # strings hash anew in every process

    @property
    def q_start(self) -> int:
        """The position of query row 0; key 0 has position 0."""
        return self.spec.q_start(self.seqlen_q, self.seqlen_k)

    @property
    def group(self) -> int:
        """Query heads for each key head."""
        return self.heads_q // self.heads_kv if self.heads_kv else 1

    @property
    def itemsize(self) -> int:
        return _ITEMSIZE[self.dtype]

    @property
    def bounds(self) -> tuple[int, int, bool, bool]:
        """``(upper, lower, has_upper, has_lower)``: the bounds that can matter between these lengths, as plain ints.

        A bound that no pair of rows and keys reaches is dropped, so that a wide window costs what no window costs.
        """
        first, last = self.q_start, self.q_start + self.seqlen_q - 1
        upper, lower = self.spec.upper, self.spec.lower
        has_upper = upper is not None and first + upper < self.seqlen_k - 1
        has_lower = lower is not None and last - lower > 0
        return (upper if has_upper else 0) or 0, (lower if has_lower else 0) or 0, has_upper, has_lower

    def operand(self, slot: str) -> Operand | None:
        """The description of the tensor in this slot; ``None`` if the spec does not name it."""
        return next((o for o in self.operands if o.slot == slot), None)

    @property
    def keeps_rows(self) -> bool:
        return keeps_rows(self.spec, self.grad)

    @property
    def key(self) -> Problem:
        """The part of the problem on which the choice of a backend depends (lengths and scale do not matter to it)."""
        spec = dataclasses.replace(self.spec, plan="") if self.spec.plan else self.spec
        return dataclasses.replace(self, spec=spec, batch=1, seqlen_q=1, seqlen_k=1, sm_scale=1.0)

    @property
    def is_empty(self) -> bool:
        """No output element depends on a key: some extent is zero."""
        return 0 in (self.batch, self.heads_q, self.seqlen_q, self.seqlen_k)

    @classmethod
    def bind(
        cls,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        spec: Spec,
        sm_scale: float | None = None,
        precision: str | None = None,
        grad: str = "",
        also: tuple[torch.Tensor, ...] = (),
        tensors: Tensors | None = None,
        jvp: str = "",
    ) -> Problem:
        """Validate one call and describe it.

        ``also``: further tensors that the kernels will read (for alignment). ``tensors``: those that the spec names (default: those
        that it holds). ``jvp``: which tangents there are (``Tangents.letters``).

        Raises:
            InvalidInput: the call has no meaning; the message names the argument, what came, what is expected.
        """
        check_tensors(q, k, v)
        dtype = dtype_name(q.dtype)
        check_precision(precision, dtype)
        return cls(
            spec=spec.form,
            dtype=dtype,
            batch=q.shape[0],
            heads_q=q.shape[1],
            heads_kv=k.shape[1],
            seqlen_q=q.shape[2],
            seqlen_k=k.shape[2],
            head_dim=q.shape[3],
            head_dim_v=v.shape[3],
            sm_scale=check_scale(sm_scale, q.shape[3], dtype_name(q.dtype)),
            precision=precision or "ieee",
            grad=grad,
            bulk=all(bulk_copyable(t) for t in (q, k, v, *also)),
            arch=arch_of(q.device),
            runtime=runtime(),
            operands=_described(spec, spec.tensors if tensors is None else tensors, q, k),
            jvp=jvp,
        )

    def __str__(self) -> str:
        words = [
            f"dtype={self.dtype}",
            f"batch={self.batch}",
            f"heads={self.heads_q}/{self.heads_kv}",
            f"seqlen={self.seqlen_q}x{self.seqlen_k}",
            f"head_dim={self.head_dim}/{self.head_dim_v}",
            f"mask={self.spec}",
            *map(str, self.operands),
            f"sm_scale={self.sm_scale!r}",
            f"arch={self.arch.name}",
        ]
        if self.precision != "ieee":
            words.append(f"precision={self.precision}")
        if self.grad:
            words.append(f"grad={self.grad}")
        if self.jvp:
            words.append(f"jvp={self.jvp}")
        if not self.bulk:
            words.append("layout=strided")
        return " ".join(words)

    @classmethod
    def parse(cls, text: str, arch: Arch | None = None, software: Runtime | None = None) -> Problem:
        """Read a problem string. Only ``seqlen`` and ``head_dim`` are required; the rest has the defaults of a call.

        Words: ``dtype=bfloat16 batch=1 heads=32/8 seqlen=4096x4096 head_dim=128/128 mask=causal sm_scale=0.08
        precision=tf32 grad=qkv jvp=qkv layout=strided arch=sm_90``. ``heads=8``, ``seqlen=4096`` and ``head_dim=64`` stand for both
        sides.
        A tensor that the mask names may be described: ``mask=causal,bias bias=float32:1hqk``.
        """
        words: dict[str, str] = {}
        for word in text.split():
            name, eq, value = word.partition("=")
            if not eq or not value:
                raise InvalidInput(f"problem {text!r}: expected words like name=value, got {word!r}.")
            if name in words:
                raise InvalidInput(f"problem {text!r}: {name!r} is given twice.")
            words[name] = value
        known = {"dtype", "batch", "heads", "seqlen", "head_dim", "mask", "sm_scale", "precision", "grad", "layout", "arch"}
        known |= {"jvp", *SLOTS}
        unknown = sorted(set(words) - known)
        if unknown:
            raise InvalidInput(f"problem {text!r}: unknown word {unknown[0]!r}. Known: {', '.join(sorted(known))}.")
        for name in ("seqlen", "head_dim"):
            if name not in words:
                raise InvalidInput(f"problem {text!r}: the word {name}=... is missing.")
        heads_q, heads_kv = _pair(text, "heads", words.get("heads", "1"), "/")
        seqlen_q, seqlen_k = _pair(text, "seqlen", words["seqlen"], "x")
        head_dim, head_dim_v = _pair(text, "head_dim", words["head_dim"], "/")
        batch = words.get("batch", "1")
        if not batch.isdecimal():
            raise InvalidInput(f"problem {text!r}: batch is {batch!r}, expected one int.")
        dtype = words.get("dtype", "bfloat16")
        if dtype not in DTYPES:
            raise InvalidInput(f"problem {text!r}: dtype is {dtype!r}, expected one of {', '.join(DTYPES)}.")
        precision = words.get("precision")
        check_precision(precision, dtype)
        check_heads(heads_q, heads_kv, f"heads={heads_q}/{heads_kv}")
        check_head_dims(head_dim, head_dim_v, f"head_dim={head_dim}/{head_dim_v}")
        check_lengths(seqlen_q, seqlen_k, f"seqlen={seqlen_q}x{seqlen_k}")
        grad, jvp = words.get("grad", ""), words.get("jvp", "")
        for name, letters in (("grad", grad), ("jvp", jvp)):
            if set(letters) - set(GRADIENTS):
                raise InvalidInput(f"problem {text!r}: {name} is {letters!r}, expected letters out of '{''.join(GRADIENTS)}'.")
        if words.get("layout", "bulk") not in ("bulk", "strided"):
            raise InvalidInput(f"problem {text!r}: layout is {words['layout']!r}, expected 'bulk' or 'strided'.")
        if "arch" in words and (arch is None or arch.name != words["arch"]):
            arch = arch_named(words["arch"])
            if arch is None:
                known_archs = ", ".join((*sorted(ARCHS), *OTHER_KINDS))
                raise InvalidInput(f"problem {text!r}: arch is {words['arch']!r}, expected one of {known_archs}.")
        elif arch is None:
            arch = arch_of(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
        try:
            scale = float(words["sm_scale"]) if "sm_scale" in words else None
        except ValueError:
            raise InvalidInput(f"problem {text!r}: sm_scale is {words['sm_scale']!r}, expected a number.") from None
        spec = Spec.parse(words.get("mask", "full"))
        stray = [slot for slot in SLOTS if slot in words and slot not in spec.slots]
        if stray:
            raise InvalidInput(f"problem {text!r}: {stray[0]!r} is described, but the mask {spec} does not name it.")
        named = (slot for slot in SLOTS if slot in spec.slots and slot != "plan")
        operands = (parse_operand(slot, words[slot]) if slot in words else default_operand(slot) for slot in named)
        return cls(
            spec=spec,
            dtype=dtype,
            batch=int(batch),
            heads_q=heads_q,
            heads_kv=heads_kv,
            seqlen_q=seqlen_q,
            seqlen_k=seqlen_k,
            head_dim=head_dim,
            head_dim_v=head_dim_v,
            sm_scale=check_scale(scale, head_dim, dtype),
            precision=precision or "ieee",
            grad=grad_letters(*(letter in grad for letter in GRADIENTS)),
            bulk=words.get("layout", "bulk") == "bulk",
            arch=arch,
            runtime=software or runtime(),
            operands=tuple(operands),
            jvp=grad_letters(*(letter in jvp for letter in GRADIENTS)),
        )


def _pair(text: str, name: str, value: str, separator: str) -> tuple[int, int]:
    parts = value.split(separator)
    if len(parts) > 2 or not all(p.isdecimal() for p in parts):
        raise InvalidInput(f"problem {text!r}: {name} is {value!r}, expected an int or two joined by {separator!r}.")
    return int(parts[0]), int(parts[-1])


def check_heads(heads_q: int, heads_kv: int, got: str) -> None:
    if (heads_kv == 0) != (heads_q == 0) or (heads_kv and heads_q % heads_kv):
        raise InvalidInput(
            f"k has {heads_kv} heads but q has {heads_q}: heads_q must be a multiple of heads_kv. Got {got}."
        )


def check_head_dims(head_dim: int, head_dim_v: int, got: str) -> None:
    for name, size in (("q and k", head_dim), ("v", head_dim_v)):
        if size < 1:
            raise InvalidInput(f"head_dim of {name} is {size}, expected at least 1. Got {got}.")


def check_lengths(seqlen_q: int, seqlen_k: int, got: str) -> None:
    for name, size in (("q", seqlen_q), ("k", seqlen_k)):
        if size >= _MAX_LEN:
            raise InvalidInput(f"{name} has length {size}, expected less than 2**30. Got {got}.")


def check_precision(precision: str | None, dtype: str) -> None:
    if precision is None:
        return
    if precision not in PRECISIONS:
        raise InvalidInput(f"precision is {precision!r}, expected None, 'ieee' or 'tf32'.")
    if dtype != "float32":
        raise InvalidInput(
            f"precision is {precision!r} but the inputs are {dtype}: it chooses how float32 products are made. "
            "Leave it at None for other dtypes."
        )


def check_scale(sm_scale: float | None, head_dim: int, dtype: str = "float64") -> float:
    if sm_scale is None:
        return head_dim**-0.5
    if isinstance(sm_scale, bool) or not isinstance(sm_scale, int | float):
        raise InvalidInput(
            f"sm_scale must be a number or None (for head_dim ** -0.5), got {sm_scale!r} of type {type(sm_scale).__name__}. "
            "A scale that is a tensor would need a gradient and a copy from the device: multiply q by it instead."
        )
    if not -_MAX_SCALE <= sm_scale <= _MAX_SCALE:  # false for NaN too
        raise InvalidInput(f"sm_scale is {sm_scale}, expected a finite number.")
    if dtype != "float64" and abs(sm_scale) > _MAX_SCALE_32:
        raise InvalidInput(
            f"sm_scale is {sm_scale}, expected at most 2^127 (1.7e38) in magnitude for {dtype} inputs, whose scores are float32: "
            "multiply q by a part of it, or give float64 inputs."
        )
    return float(sm_scale)


def check_kinds(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    """Raise InvalidInput unless q, k and v are dense tensors: what must be known before the dispatcher sees them."""
    for name, t in (("q", q), ("k", k), ("v", v)):
        check_kind(name, t, f"of shape {_LAYOUT}")
        if t.is_quantized:
            raise InvalidInput(f"{name} is quantized ({t.dtype}), expected one of {', '.join(DTYPES)}: call {name}.dequantize().")


def check_kind(name: str, t: object, what: str) -> None:
    """Raise InvalidInput unless ``t`` is a dense tensor."""
    if not isinstance(t, torch.Tensor):
        raise InvalidInput(f"{name} must be a torch.Tensor {what}, got {type(t).__name__}.")
    if t.is_nested:
        raise InvalidInput(
            f"{name} is a nested tensor, expected a dense one {what}: call {name}.to_padded_tensor(0.0), "
            "or attend to its parts one by one."
        )
    if t.layout != torch.strided:
        raise InvalidInput(f"{name} has layout {t.layout}, expected a dense (strided) tensor: call {name}.to_dense().")


def check_tensors(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    """Raise InvalidInput unless q, k and v can meet in one attention."""
    check_kinds(q, k, v)
    named = (("q", q), ("k", k), ("v", v))
    for name, t in named:
        if t.dim() != 4:
            hint = " Add the missing dims with unsqueeze." if t.dim() < 4 else ""
            raise InvalidInput(f"{name} has {t.dim()} dims, expected 4: {_LAYOUT}. Got shape {tuple(t.shape)}.{hint}")
    for name, t in named:
        if dtype_name(t.dtype) not in DTYPES:
            raise InvalidInput(f"{name} has dtype {dtype_name(t.dtype)}, expected one of {', '.join(DTYPES)}: cast it first.")
    for name, t in named[1:]:
        if t.dtype != q.dtype:
            raise InvalidInput(
                f"{name} has dtype {dtype_name(t.dtype)} but q has {dtype_name(q.dtype)}: q, k and v must share one dtype. "
                f"Cast with {name}.to(q.dtype), or run under torch.autocast."
            )
        if t.device != q.device:
            raise InvalidInput(f"{name} is on {t.device} but q is on {q.device}: move it with {name}.to(q.device).")
    shapes = _shapes(q, k, v)
    if not q.shape[0] == k.shape[0] == v.shape[0]:
        raise InvalidInput(f"q, k and v must have one batch size: use expand() to share k and v. Got {shapes}.")
    if k.shape[1] != v.shape[1]:
        raise InvalidInput(f"k has {k.shape[1]} heads but v has {v.shape[1]}: they must be equal. Got {shapes}.")
    if k.shape[2] != v.shape[2]:
        raise InvalidInput(f"k has length {k.shape[2]} but v has {v.shape[2]}: they must be equal. Got {shapes}.")
    if q.shape[3] != k.shape[3]:
        raise InvalidInput(f"q has head_dim {q.shape[3]} but k has {k.shape[3]}: they must be equal. Got {shapes}.")
    check_heads(q.shape[1], k.shape[1], shapes)
    check_head_dims(q.shape[3], v.shape[3], shapes)
    check_lengths(q.shape[2], k.shape[2], shapes)
