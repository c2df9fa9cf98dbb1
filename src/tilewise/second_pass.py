"""A second pass over the scores, from a known lse: the weights of chosen queries, and the sum of the weights that each key gets.

One operator computes either; ``Spec.returns`` says which. It has no derivative, and refuses where one would be wanted.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from .api import _autocast, _check_tensors_of, _spec
from .batching import second_pass_rule
from .checks import check_backend
from .errors import BackendRefused, InvalidInput
from .operands import describe
from .ops import _DEVICES, _LIB, _TENSORS, _bind, _run, _tensors_of, _views
from .problem import DTYPES, check_kind, check_kinds, check_precision, check_scale, check_tensors, dtype_name
from .spec import Spec

__all__ = ["attention_weights", "column_sums"]

_LIB.define(
    "second_pass(Tensor q, Tensor k, Tensor lse, Tensor? rows, str spec, float? sm_scale, str? precision, str backend,"
    f" ScalarType dtype, {_TENSORS}) -> Tensor"
)
_STEPS_OF_ROWS = ("softcap", "alibi", "bias")  # those that know the positions of queries that do not follow one another
_OPERATOR = torch.ops.tilewise.second_pass


def _empty_output(q: torch.Tensor, k: torch.Tensor, rows: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
    chosen = () if rows is None else (rows.shape[0],)
    return q.new_empty((*q.shape[:2], *chosen, k.shape[2]), dtype=dtype)


def _second_pass(q, k, lse, rows, spec, sm_scale, precision, backend, dtype, *given):
    tensors = _tensors_of(given, spec)
    bound = _bind(q, k, k, spec, sm_scale, precision, backend, "", tensors=tensors)
    out = _empty_output(q, k, rows, dtype)
    if bound.is_empty or out.numel() == 0:
        return out.zero_()
    views = tensors if all(t is None for t in tensors) else _views(tensors)
    chosen = () if rows is None else (rows,)
    _run(bound.backend, bound.problem, bound.problem.spec.returns, q, k, lse.contiguous(), *chosen, out, views)
    return out


def _without_gradient(*args):
    q, k, lse, _, spec, *_ = args
    tensors = (q, k, lse, *args[9:])
    name = {"weights": "attention_weights"}.get(Spec.parse(spec).returns, "column_sums")
    unpack: Any = torch._unpack_dual  # type: ignore[attr-defined]
    if any(t is not None and unpack(t, level=0)[1] is not None for t in tensors):
        raise BackendRefused(f"tilewise.{name} has no derivative, but an input has a tangent: give it detached tensors.")
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors):
        raise BackendRefused(
            f"tilewise.{name} has no derivative, but an input requires a gradient: "
            "call it under torch.no_grad(), or give it detached tensors."
        )
    with torch._C._AutoDispatchBelowAutograd():
        return _OPERATOR(*args)


for _device in _DEVICES:
    _LIB.impl("second_pass", _second_pass, _device)
_LIB.impl("second_pass", _without_gradient, "Autograd")
torch.library.register_vmap("tilewise::second_pass", second_pass_rule(_OPERATOR), lib=_LIB)


@torch.library.register_fake("tilewise::second_pass", lib=_LIB)
def _second_pass_fake(q, k, lse, rows, spec, sm_scale, precision, backend, dtype, *given):
    check_tensors(q, k, k)
    describe(Spec.parse(spec), _tensors_of(given, spec), q, k)
    return _empty_output(q, k, rows, dtype)


def _check_lse(q: torch.Tensor, lse: torch.Tensor) -> None:
    check_kind("lse", lse, "as tilewise.attention(..., return_lse=True) gives it")
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    if lse.shape != q.shape[:3] or lse.dtype != dtype or lse.device != q.device:
        raise InvalidInput(
            f"lse is {tuple(lse.shape)}, {lse.dtype}, on {lse.device}; expected {tuple(q.shape[:3])}, {dtype}, on {q.device}: "
            "give the lse of tilewise.attention(..., return_lse=True) for the same q, k and spec."
        )


def _rows_of(rows: slice | torch.Tensor | None, q: torch.Tensor) -> torch.Tensor:
    """The chosen queries as an int64 tensor."""
    length = q.shape[2]
    if rows is None or isinstance(rows, slice):
        try:
            return torch.arange(*(rows or slice(None)).indices(length), device=q.device)
        except TypeError as error:
            raise InvalidInput(f"rows is {rows}: {error}.") from None
    if not isinstance(rows, torch.Tensor) or rows.dtype not in (torch.int32, torch.int64) or rows.dim() != 1:
        got = f"a tensor {tuple(rows.shape)} {rows.dtype}" if isinstance(rows, torch.Tensor) else repr(rows)
        raise InvalidInput(f"rows is {got}, expected a slice, or one dim of int32 or int64 indices of queries.")
    if rows.device != q.device:
        raise InvalidInput(f"rows is on {rows.device} but q is on {q.device}: call rows.to(q.device).")
    looked_at = rows.device.type == "cpu" and not torch.compiler.is_compiling() and not torch._C._are_functorch_transforms_active()
    if looked_at and rows.numel() and not 0 <= int(rows.min()) <= int(rows.max()) < length:
        raise InvalidInput(f"rows lie between {int(rows.min())} and {int(rows.max())}, expected at least 0 and below {length}.")
    return rows.long()


def _call(
    returns: str,
    q: torch.Tensor,
    k: torch.Tensor,
    lse: torch.Tensor,
    spec: Spec,
    rows: Any,
    dtype: torch.dtype | None,
    sm_scale: float | None,
    precision: str | None,
    backend: str,
) -> torch.Tensor:
    check_kinds(q, k, k)
    _check_tensors_of(spec, spec.tensors)
    if spec.dropout:
        raise BackendRefused("dropout takes place after the weights: give the spec without it for the weights before it.")
    strange = [step for step in spec.steps if step not in _STEPS_OF_ROWS]
    if strange and returns == "weights":
        raise BackendRefused(f"attention_weights takes the score steps {', '.join(_STEPS_OF_ROWS)}; the spec has {strange[0]}.")
    check_backend(backend)
    if sm_scale is not None:
        check_scale(sm_scale, 1)
    q, k, _ = _autocast(q, k, k)
    check_tensors(q, k, k)
    check_precision(precision, dtype_name(q.dtype))
    _check_lse(q, lse)
    chosen = _rows_of(rows, q) if returns == "weights" else None
    out = lse.dtype if dtype is None else dtype
    if not isinstance(out, torch.dtype) or dtype_name(out) not in DTYPES:
        raise InvalidInput(f"dtype is {dtype!r}, expected None or one of {', '.join(f'torch.{name}' for name in DTYPES)}.")
    text = str(dataclasses.replace(spec, returns=returns))
    return _OPERATOR(q, k, lse, chosen, text, sm_scale, precision, backend, out, *spec.tensors)


def attention_weights(
    q: torch.Tensor,
    k: torch.Tensor,
    lse: torch.Tensor,
    *,
    rows: slice | torch.Tensor | None = None,
    causal: bool = False,
    window: tuple[int | None, int | None] | None = None,
    align: str | None = None,
    sm_scale: float | None = None,
    dtype: torch.dtype | None = None,
    precision: str | None = None,
    backend: str = "auto",
    spec: Spec | None = None,
) -> torch.Tensor:
    """The attention weights ``p = exp(s - lse)`` of chosen queries, from a second pass over their scores.

    Args:
        q, k: as in ``attention``.
        lse: what ``attention(..., return_lse=True)`` gave for them, (batch, heads_q, seqlen_q). Where it is that of more keys
            (merged partial results), the weights are relative to all of those.
        rows: the queries: a slice, or one dim of int32 or int64 indices (each at least 0 and below seqlen_q; on a GPU, PyTorch's
            indexing traps others). Default ``None``: all of them, which is the whole matrix.
        causal, window, align, sm_scale, precision, spec: as in the call that gave lse.
        dtype: of the result. Default ``None``: that of lse.
        backend: ``"auto"``, ``"torch"`` or ``"reference"``. A named backend never falls back.

    Returns:
        (batch, heads_q, n_rows, seqlen_k); an exact 0 where the mask hides the key. The weights of a row sum to 1 (with a sink, to
        1 less the sink's share; to 0 where nothing is seen).

    Raises:
        InvalidInput: as ``attention``, and for rows, lse or dtype.
        BackendRefused: as ``attention``; where an input requires a gradient (there is none: call it under ``torch.no_grad()``, or
            give detached tensors); and for a spec with dropout, which takes place after the weights.

    lse holds 24 bits, so the relative error of a weight is about ``|lse| * 6e-8``: where all scores of a row lie beyond 1e6 in size
    (a row of a bias that is the lowest finite value, say) the weights are not those that ``attention`` used.

    Cost: 2 batch heads_q n_rows seqlen_k head_dim FLOP, and the result. Nothing else grows with seqlen_k.
    """
    whole = _spec(causal, window, align, spec)
    return _call("weights", q, k, lse, whole, rows, dtype, sm_scale, precision, backend)


def column_sums(
    q: torch.Tensor,
    k: torch.Tensor,
    lse: torch.Tensor,
    *,
    causal: bool = False,
    window: tuple[int | None, int | None] | None = None,
    align: str | None = None,
    sm_scale: float | None = None,
    precision: str | None = None,
    backend: str = "auto",
    spec: Spec | None = None,
) -> torch.Tensor:
    """How much weight each key gets: ``sum over queries of exp(s - lse)``, for key importance as in H2O (Zhang et al. 2023).

    Args:
        q, k: as in ``attention``.
        lse: what ``attention(..., return_lse=True)`` gave for them, (batch, heads_q, seqlen_q).
        causal, window, align, sm_scale, precision, spec: as in the call that gave lse.
        backend: as in ``attention``.

    Returns:
        (batch, heads_q, seqlen_k), float32 (float64 for float64 inputs): of each query head; sum over the heads of a group for one
        number a key head. A key that nobody sees has an exact 0.

    Raises:
        InvalidInput, BackendRefused: as ``attention_weights``, whose remark on huge scores holds here, too.

    Deterministic: the same bits on every run; no atomics.

    Cost: 2 batch heads_q seqlen_q seqlen_k head_dim FLOP, less what the mask skips (half of a forward pass), in linear memory.
    """
    whole = _spec(causal, window, align, spec)
    return _call("column_sums", q, k, lse, whole, None, None, sm_scale, precision, backend)
