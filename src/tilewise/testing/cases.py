"""Inputs that broke other attention libraries, with what is right for each beyond the common bound.

Packed sequences appear as one dense call for each sequence, on views into one buffer whose spare rows hold NaN. ``small=True``
keeps the kind of a case (its ratios, its raggedness) at a size that Triton's interpreter takes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from ..api import attention
from ..errors import InvalidInput
from ..select import capability
from ..spec import causal, window
from .calls import Call, evaluate, random_call
from .poison import poison
from .tolerance import Result, Yardstick

__all__ = ["CASES", "REJECTED", "Case", "Rejected", "run_case", "run_rejected"]

Device = torch.device | str
Build = Callable[[Device, torch.dtype, bool], list[Call]]
Outputs = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Case:
    """One case: its calls, and ``exact``, which says what is wrong with the outputs of a call (``None``: nothing)."""

    number: int
    name: str
    build: Build
    dtypes: tuple[torch.dtype, ...]
    exact: Callable[[Call, Outputs], str | None] = lambda call, got: None
    repeats: int = 1

    def __str__(self) -> str:
        return f"case {self.number:02d} {self.name}"


@dataclass(frozen=True)
class Rejected:
    """A call without meaning: every backend must raise ``InvalidInput`` whose message holds ``word``."""

    number: int
    name: str
    word: str
    call: Callable[[Device, str], object]

    def __str__(self) -> str:
        return f"case {self.number:02d} {self.name}"


HALF = (torch.float16,)
BRAIN = (torch.bfloat16,)
SINGLE = (torch.float32,)


def _packed(
    lengths: list[tuple[int, int]], heads: tuple[int, int], dim: int, device: Device, dtype: torch.dtype, amplitude: float = 1.0,
    spare: int = 2,
) -> list[Call]:  # fmt: skip
    """One causal call for each (seqlen_q, seqlen_k): views into buffers with ``spare`` rows of NaN behind the last sequence."""
    total = sum(n for n, _ in lengths), sum(n for _, n in lengths)
    whole = random_call((1, heads[0], heads[1], total[0], total[1], dim, dim), device=device, dtype=dtype, amplitude=amplitude)
    held: dict[str, torch.Tensor] = {}
    for name in ("q", "k", "v", "do"):
        t = getattr(whole, name)
        held[name] = t.new_full((1, t.shape[1], t.shape[2] + spare, dim), float("nan"))
        held[name][:, :, : t.shape[2]] = t
    calls, at_q, at_k = [], 0, 0
    for n_q, n_k in lengths:
        rows, keys = slice(at_q, at_q + n_q), slice(at_k, at_k + n_k)
        calls.append(
            Call(held["q"][:, :, rows], held["k"][:, :, keys], held["v"][:, :, keys], causal(), None, held["do"][:, :, rows])
        )
        at_q, at_k = at_q + n_q, at_k + n_k
    return calls


def _few_keys(device: Device, dtype: torch.dtype, small: bool) -> list[Call]:
    calls = _packed([(76, 1), (34, 1), (146, 1)], (1, 1), 32, device, dtype, amplitude=3.0)
    return [c.replace(do=torch.ones_like(c.q)) for c in calls]


def _more_queries(device: Device, dtype: torch.dtype, small: bool) -> list[Call]:
    n_q, n_k = (160, 80) if small else (2048, 1024)
    shapes = [((1, 1, 1, n_q, n_k, 32, 32), c) for c in ("bottom_right", "top_left")] + [((1, 1, 1, 5, 2, 32, 32), "bottom_right")]
    return [random_call(shape, device=device, dtype=dtype, spec=causal(corner), dlse=True) for shape, corner in shapes]


def _first_rows_empty(call: Call, got: Outputs) -> str | None:
    n_q, n_k = call.q.shape[2], call.k.shape[2]
    first = max(n_q - n_k, 0) if call.spec.align == "bottom_right" else 0
    if not bool((got["lse"][:, :, :first] == float("-inf")).all()) or bool((got["o"][:, :, :first] != 0).any()):
        return f"the first {first} rows must be o = 0, lse = -inf"
    if not bool(got["lse"][:, :, first:].isfinite().all()):
        return f"every row from {first} on sees a key, so its lse must be finite"
    return None


def _no_keys(device: Device, dtype: torch.dtype, small: bool) -> list[Call]:
    shapes = [(2, 2, 1, 5, 0, 16, 16), (0, 0, 0, 2, 0, 16, 16), (1, 2, 2, 0, 0, 32, 16)]
    corners = ("bottom_right", "top_left")
    return [random_call(s, device=device, dtype=dtype, spec=causal(c), dlse=True) for s in shapes for c in corners]


def _all_nothing(call: Call, got: Outputs) -> str | None:
    if call.q.shape[2] and call.k.shape[2]:
        return None
    wrong = [n for n in ("o", "dq", "dk", "dv") if n in got and bool((got[n] != 0).any())]
    if not bool((got["lse"] == float("-inf")).all()):
        wrong.append("lse")
    return f"{', '.join(wrong)} must be 0 (lse: -inf)" if wrong else None


def _empty_segments(device: Device, dtype: torch.dtype, small: bool) -> list[Call]:
    lengths = [(0, 38), (30, 42), (21, 20), (0, 32)] if small else [(0, 2538), (1208, 1742), (840, 840), (0, 3072)]
    return _packed(lengths, (4, 1), 256, device, dtype)


def _long_buffers(device: Device, dtype: torch.dtype, small: bool) -> list[Call]:
    lengths = [(14, 14), (29, 29), (51, 51)] if small else [(144, 144), (288, 288), (512, 512)]
    return _packed(lengths, (2, 2) if small else (16, 16), 64, device, dtype)


def _very_negative(device: Device, dtype: torch.dtype, small: bool) -> list[Call]:
    heads, dim, calls = (4 if small else 16), 128, []
    for level in (-1e3, -3e4, -2.5e5):
        call = random_call((1, heads, 1, 3, 64, dim, dim), device=device, dtype=dtype, sm_scale=1.0)
        steps = torch.linspace(1.0, 1.05, 64, device=device)[:, None] * level / dim
        calls.append(call.replace(q=torch.ones_like(call.q), k=steps.to(dtype).expand(1, 1, 64, dim)))
    one = random_call((1, heads, 1, 3, 1, dim, dim), device=device, dtype=dtype, sm_scale=1.0)
    return [*calls, one.replace(q=torch.ones_like(one.q), k=torch.full_like(one.k, -524288 / dim))]


def _single_key_is_v(call: Call, got: Outputs) -> str | None:
    if call.k.shape[2] == 1 and not bool((got["o"] == call.v).all()):
        return "with a single key o must equal v, bit for bit"
    return None


def _times_three(device: Device, dtype: torch.dtype, small: bool) -> list[Call]:
    n = 150 if small else 1024
    return [random_call((1, 1, 1, n, n, 128, 128), device=device, dtype=dtype, spec=causal(), amplitude=3.0)]


def _nan_slots(device: Device, dtype: torch.dtype, small: bool) -> list[Call]:
    calls = []
    for sizes, slots, heads, n_q in (((1, 3), 3, 1, 3), ((32, 64, 96, 48), 128, 2 if small else 8, 1)):
        drawn = random_call((len(sizes), heads, heads, n_q, slots, 64, 64), device=device, dtype=dtype)
        for i, used in enumerate(sizes):
            drawn.k[i, :, used:] = float("nan")
            drawn.v[i, :, used:] = float("nan")
            one = drawn.part(slice(i, i + 1), slice(0, heads))
            calls.append(one.replace(k=one.k[:, :, :used], v=one.v[:, :, :used], spec=causal()))
    return calls


def _self_only(device: Device, dtype: torch.dtype, small: bool) -> list[Call]:
    return [random_call((1, 1, 1, 70, 70, 16, 16), device=device, dtype=dtype, spec=window(0, 0))]


def _o_is_v(call: Call, got: Outputs) -> str | None:
    return None if bool((got["o"] == call.v).all()) else "a window of (0, 0) keeps self only: o must equal v, bit for bit"


def _of_shape(*shapes: tuple[int, ...], small: tuple[tuple[int, ...], ...] = (), **arguments: object) -> Build:
    def build(device: Device, dtype: torch.dtype, is_small: bool) -> list[Call]:
        chosen = small if is_small and small else shapes
        return [random_call(s, device=device, dtype=dtype, **arguments) for s in chosen]  # type: ignore[arg-type]

    return build


def _strange_v(device: Device, dtype: torch.dtype, small: bool) -> list[Call]:
    heads = 2 if small else 16
    call = random_call((1, heads, heads, 62, 62, 128, 128), device=device, dtype=dtype)
    rows = call.v.transpose(1, 2).reshape(1, 62, heads * 128)
    turned = call.v.transpose(2, 3).contiguous().transpose(2, 3)
    return [call.replace(v=rows.view(1, 62, heads, 128).transpose(1, 2)), call.replace(v=turned)]


def _no_keys_for_one(device: Device, dtype: torch.dtype, small: bool) -> list[Call]:
    return _packed([(1, 0), (1, 5)], (4, 2), 64, device, dtype)


CASES: tuple[Case, ...] = (
    Case(1, "more queries than keys, packed", _few_keys, HALF),
    Case(2, "first rows see nothing", _more_queries, HALF, _first_rows_empty),
    Case(4, "no keys at all, both corners (also 3)", _no_keys, SINGLE, _all_nothing),
    Case(5, "no queries at head and tail", _empty_segments, BRAIN, _all_nothing),
    Case(6, "buffers longer than the sequences", _long_buffers, HALF),
    Case(8, "very negative scores", _very_negative, BRAIN, _single_key_is_v),
    Case(9, "inputs times three", _times_three, HALF),
    Case(10, "unused slots hold NaN", _nan_slots, HALF),
    Case(11, "a window that keeps self only", _self_only, HALF, _o_is_v),
    Case(
        13,
        "two backward runs are equal",
        _of_shape((2, 4, 4, 1024, 1024, 128, 128), small=((1, 2, 1, 130, 130, 64, 64),), spec=causal()),
        BRAIN,
        repeats=2,
    ),
    Case(
        16,
        "a window beside unequal lengths",
        _of_shape(
            (1, 2, 2, 129, 187, 64, 64),
            (1, 2, 2, 129, 90, 64, 64),
            small=((1, 1, 1, 129, 187, 32, 32), (1, 1, 1, 129, 90, 32, 32)),
            spec=window(32, 64),
        ),
        HALF,
    ),
    Case(17, "only v has strange strides", _strange_v, BRAIN),
    Case(22, "not causal, and columns beyond 64", _of_shape((1, 2, 2, 128, 128, 64, 64), (1, 1, 1, 77, 131, 128, 128)), HALF),
    Case(24, "float32 is float32", _of_shape((1, 1, 1, 128, 128, 32, 32), spec=causal()), SINGLE),
    Case(
        25,
        "decoding with groups",
        _of_shape(
            (1, 12, 2, 1, 4096, 16, 16),
            (1, 28, 4, 1, 4096, 16, 16),
            (1, 48, 1, 1, 4096, 16, 16),
            small=((1, 6, 1, 1, 300, 16, 16), (1, 14, 2, 1, 70, 16, 16)),
            spec=causal(),
        ),
        HALF,
    ),
    Case(
        26,
        "repeats are equal",
        _of_shape(
            (2, 12, 12, 1024, 1024, 64, 64),
            (2, 8, 8, 512, 512, 64, 64),
            (2, 16, 2, 512, 512, 128, 128),
            small=((1, 4, 1, 70, 100, 64, 64),),
        ),
        HALF,
        repeats=30,
    ),
    Case(30, "one of two decoding sequences has no keys", _no_keys_for_one, HALF),
)


def _call_of(q: tuple[int, ...], k: tuple[int, ...], v: tuple[int, ...], **arguments: object) -> Callable[[Device, str], object]:
    def call(device: Device, backend: str) -> object:
        tensors = (torch.zeros(shape, device=device) for shape in (q, k, v))
        return attention(*tensors, backend=backend, **arguments)  # type: ignore[call-overload]

    return call


REJECTED: tuple[Rejected, ...] = (
    Rejected(4, "head_dim 0", "head_dim", _call_of((0, 0, 2, 0), (0, 0, 2, 0), (0, 0, 2, 0))),
    Rejected(11, "a window of (-1, -3)", "window", _call_of((1, 1, 4, 16), (1, 1, 4, 16), (1, 1, 4, 16), window=(-1, -3))),
    Rejected(25, "33 query heads for 2", "multiple", _call_of((1, 33, 1, 16), (1, 2, 8, 16), (1, 2, 8, 16))),
    Rejected(25, "3 query heads for 2", "multiple", _call_of((1, 3, 1, 16), (1, 2, 8, 16), (1, 2, 8, 16))),
    Rejected(29, "5 keys and 6 values", "length", _call_of((1, 2, 4, 16), (1, 2, 5, 16), (1, 2, 6, 16))),
)


def run_case(
    case: Case,
    backend: str,
    device: Device,
    dtype: torch.dtype,
    small: bool,
    take: Callable[[Call], Call | None] = lambda call: call,
) -> list[Result]:
    """Judge one backend on one case: the common bound, the case's own exact expectation, and equality of repeats bit for bit.

    ``take`` chooses what of a call is run; ``None`` leaves the call out.
    """
    results = []
    for i, made in enumerate(case.build(device, dtype, small)):
        call = take(made)
        if call is None:
            continue
        name = f"{case} [{i}]"
        with poison():
            got = evaluate(call, backend)
        results += Yardstick(call).judge(got, name)
        complaint = case.exact(call, got)
        if complaint:
            results.append(Result(name, "exact", float("inf"), 0.0, False, complaint))
        # Two repeats tell the kind; thirty need a device that is quick. Gradients have equal bits where that is asked for,
        # or always.
        if case.repeats > 1 and not (backend == "auto" or capability(backend).always_deterministic):
            again, call = evaluate(call, backend), call.replace(deterministic=True)
            results += _differences(name, {n: got[n] for n in ("o", "lse")}, again)
            got = evaluate(call, backend)
        for _ in range(min(case.repeats, 3) - 1 if small else case.repeats - 1):
            found = _differences(name, got, evaluate(call, backend))
            results += found
            if found:
                break
    return results


def _differences(name: str, got: Outputs, again: Outputs) -> list[Result]:
    """A failure that names what has other bits in a second run; nothing, if nothing has."""
    differ = [n for n in got if not torch.equal(got[n], again[n])]
    text = f"{', '.join(differ)} differ between two runs"
    return [Result(name, "repeat", float("inf"), 0.0, False, text)] if differ else []


def run_rejected(rejected: Rejected, backend: str, device: Device) -> Result:
    """Does this backend raise InvalidInput, with a message that names the fault?"""
    try:
        rejected.call(device, backend)
    except InvalidInput as error:
        ok = rejected.word in str(error)
        return Result(str(rejected), "raises", 0.0, 0.0, ok, "" if ok else f"the message does not name {rejected.word!r}: {error}")
    return Result(str(rejected), "raises", float("inf"), 0.0, False, "expected InvalidInput, nothing was raised")
