"""The public functions."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Literal, overload

import torch

from .backends import module_of
from .batching import is_mapped
from .checks import check_backend, check_flag
from .errors import InvalidInput
from .functions import check_fresh as check_function
from .keep import chosen_rows, kept, seeded
from .operands import describe, full_rank
from .ops import attention_before, attention_op, attention_plain, attention_with_tensors, bound_problem
from .plain import are_plain, is_plain, is_unwatched
from .plan import MaskTensors, check_fresh, fill_table, planned
from .problem import Problem, check_kind, check_kinds, check_precision, check_scale, grad_letters
from .select import capability, table
from .spec import NO_TENSORS, SLOTS, Spec, Tensors, spec_of
from .tile_map import check_places, draw_call

__all__ = ["attention", "dropout_mask", "explain", "plan"]


_AUTOCAST_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def _spec(causal: bool, window: tuple[int | None, int | None] | None, align: str | None, spec: Spec | None) -> Spec:
    if spec is None:
        return spec_of(causal, window, align)
    if not isinstance(spec, Spec):
        raise InvalidInput(f"spec must be a tilewise.Spec or None, got {type(spec).__name__}: build one with tilewise.causal().")
    given = [n for n, there in (("causal", causal), ("window", window is not None), ("align", align is not None)) if there]
    if spec.returns:
        raise InvalidInput(f"spec has returns={spec.returns!r}, which the functions set themselves: call the one that returns it.")
    if spec.deterministic is not None:
        raise InvalidInput(f"spec has deterministic={spec.deterministic}, which is an argument of attention: give it there.")
    if given:
        raise InvalidInput(f"spec and {' and '.join(given)} are both given, but spec already says it all: drop one of them.")
    return spec


def _with_mode(spec: Spec, deterministic: bool | None) -> Spec:
    """The spec, with what a call says of its gradients' bits."""
    return spec if deterministic is None else dataclasses.replace(spec, deterministic=deterministic)


_WITHOUT_WINDOW = {
    (causal, mode): str(_with_mode(spec_of(causal, None, None), mode)) for causal in (False, True) for mode in (None, False, True)
}


def _known_mask(causal: bool, window: tuple[int | None, int | None] | None, align: str | None, deterministic: bool | None) -> str:
    """The string of the spec of these arguments, kept for those without a window."""
    if window is None and align is None and (causal is False or causal is True):
        return _WITHOUT_WINDOW[causal, deterministic]
    return str(_with_mode(spec_of(causal, window, align), deterministic))


def _text(spec: Spec) -> str:
    """The string of a spec, worked out once for each."""
    if torch.compiler.is_compiling():
        return str(spec)
    found = spec.__dict__.get("_text")
    if found is None:
        found = str(spec)
        object.__setattr__(spec, "_text", found)
    return found


def _returning(name: str, spec: Spec, wanted: object) -> Spec:
    """The spec of a call that also wants this output, if ``wanted``."""
    check_flag(f"return_{name}", wanted)
    return dataclasses.replace(spec, returns=name) if wanted else spec


def _check_tensors_of(spec: Spec, tensors: Tensors, plain: bool = False) -> None:
    """``plain``: they passed ``is_plain``, so that they are dense."""
    if not plain:
        for slot, t in zip(SLOTS, tensors, strict=True):
            if t is not None:
                check_kind(slot, t, "that broadcasts over the call")
    if spec.function is not None and not torch.compiler.is_compiling():
        check_function(spec)
    if spec.plan and not torch.compiler.is_compiling():
        check_fresh(spec)


def _without_a_draw(spec: Spec, q: torch.Tensor) -> Tensors:
    """The tensors of the spec; a stand-in for a seed that a call would draw."""
    drawn = spec.dropout and not isinstance(spec.tensors.seed, torch.Tensor)
    return spec.tensors._replace(seed=q.new_empty((), dtype=torch.int64)) if drawn else spec.tensors


def _autocast(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q, k and v as autocast wants them: cast to its dtype if it is on for q's device, except float64."""
    device = q.device.type
    if device == "meta" or not torch.is_autocast_enabled(device):
        return q, k, v
    dtype = torch.get_autocast_dtype(device)
    q, k, v = (t.to(dtype) if t.dtype in _AUTOCAST_DTYPES else t for t in (q, k, v))
    return q, k, v


@overload
def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: bool = ...,
    window: tuple[int | None, int | None] | None = ...,
    align: str | None = ...,
    sm_scale: float | None = ...,
    return_lse: Literal[False] = ...,
    return_max_logit: Literal[False] = ...,
    precision: str | None = ...,
    backend: str = ...,
    spec: Spec | None = ...,
    deterministic: bool | None = ...,
) -> torch.Tensor: ...


@overload
def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: bool = ...,
    window: tuple[int | None, int | None] | None = ...,
    align: str | None = ...,
    sm_scale: float | None = ...,
    return_lse: Literal[True],
    return_max_logit: Literal[False] = ...,
    precision: str | None = ...,
    backend: str = ...,
    spec: Spec | None = ...,
    deterministic: bool | None = ...,
) -> tuple[torch.Tensor, torch.Tensor]: ...


@overload
def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: bool = ...,
    window: tuple[int | None, int | None] | None = ...,
    align: str | None = ...,
    sm_scale: float | None = ...,
    return_lse: Literal[False] = ...,
    return_max_logit: Literal[True],
    precision: str | None = ...,
    backend: str = ...,
    spec: Spec | None = ...,
    deterministic: bool | None = ...,
) -> tuple[torch.Tensor, torch.Tensor]: ...


@overload
def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: bool = ...,
    window: tuple[int | None, int | None] | None = ...,
    align: str | None = ...,
    sm_scale: float | None = ...,
    return_lse: Literal[True],
    return_max_logit: Literal[True],
    precision: str | None = ...,
    backend: str = ...,
    spec: Spec | None = ...,
    deterministic: bool | None = ...,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]: ...


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: bool = False,
    window: tuple[int | None, int | None] | None = None,
    align: str | None = None,
    sm_scale: float | None = None,
    return_lse: bool = False,
    return_max_logit: bool = False,
    precision: str | None = None,
    backend: str = "auto",
    spec: Spec | None = None,
    deterministic: bool | None = None,
) -> torch.Tensor | tuple[torch.Tensor, ...]:
    """Exact softmax attention, computed on tiles.

    ``s = sm_scale * q k^T`` (``-inf`` where the mask hides the key), ``o = softmax(s) v``, ``lse = logsumexp(s)``.

    Args:
        q: (batch, heads_q, seqlen_q, head_dim), float16, bfloat16, float32 or float64; any strides, a contiguous last dim is best.
        k: (batch, heads_kv, seqlen_k, head_dim), same dtype and device; heads_q is a multiple of heads_kv, and query head h
            reads key head ``h // (heads_q // heads_kv)``.
        v: (batch, heads_kv, seqlen_k, head_dim_v); head_dim_v may differ from head_dim.
        causal: hide the keys after a query's position. Default False.
        window: ``(left, right)``: how many keys before and after its position a query sees, besides the key at it. ``None`` on a
            side is unbounded, 0 keeps self only, -1 drops self as well. Default ``None``: no window.
        align: ``"bottom_right"`` (what ``None``, the default, means): the last query sits on the last key. ``"top_left"``: the
            first query sits on the first key. They differ when seqlen_q != seqlen_k.
        sm_scale: the factor on q k^T; any finite number (of magnitude up to 2^127 but for float64), 0 and negative ones too.
            Default ``head_dim ** -0.5``.
        return_lse: also return ``lse``. Default False.
        return_max_logit: also return the largest score of each batch and head, for QK-clip. Default False.
        precision: for float32 inputs: ``"ieee"`` (what ``None``, the default, means) is as accurate as float32 products
            (on Hopper beside the largest number of each row: docs/sizes.md); ``"tf32"`` allows TF32 products on tensor cores
            (about 3 decimal digits), which are faster; products of as many bits in another form may stand for them, never of fewer.
        backend: ``"auto"``, or a name out of ``tilewise.explain(q, k, v)``. A named backend never falls back.
        spec: mask, score steps, sinks and dropout as a ``tilewise.Spec``, instead of causal, window and align:
            ``tilewise.causal() & tilewise.softcap(30.0) & tilewise.bias(t)``.
        deterministic: must the gradients have the same bits on every run? ``None`` (the default): if
            ``torch.use_deterministic_algorithms`` is on when they are computed. ``False``: no, whatever is faster. It can make a
            difference on the ``hopper`` backend only, where dq may be added up in memory (``ADDS`` in
            ``configs/hopper_backward.py``); the others are always deterministic, and take False as well.

    Returns:
        ``o`` (batch, heads_q, seqlen_q, head_dim_v) in q's dtype and memory order; with ``return_lse`` also ``lse``
        (batch, heads_q, seqlen_q), natural logarithm, float32 (float64 for float64 inputs). A row that sees no key has
        ``o = 0``, ``lse = -inf`` and zero gradients. With ``return_max_logit`` then ``max_logit`` (batch, heads_q) in lse's dtype:
        the largest ``s`` that the mask lets through, after the scale and all score steps (softcap, ALiBi, bias); sinks, which are
        no scores, do not count; ``-inf`` where no query sees a key. It has no gradient.

    Raises:
        InvalidInput: a ValueError; the message names the argument, what came, what is expected and what to do.
        BackendRefused: a NotImplementedError with every reason.

    Gradients flow to q, k and v, and to the bias, slopes and sinks of the spec, through both ``o`` and ``lse``; only those asked
    for are computed. So do forward-mode derivatives (``torch.func.jvp``, dual tensors; not of the largest score), with a backward
    pass through the outputs and their tangents. So do second derivatives (``create_graph=True``, ``torch.func.hessian``), which run
    on rows of plain PyTorch; third ones are refused. Under ``torch.autocast`` q, k and v are cast to the autocast dtype unless they
    are float64, as PyTorch's own attention does.

    Deterministic: the forward pass gives the same bits on every run of one configuration on one device, and so does the backward
    pass, but for a kernel of the ``hopper`` backend that adds dq up in memory in any order: ``deterministic`` says whether it may.

    Cost: ``4 batch heads_q seqlen_q seqlen_k head_dim`` FLOP forward (less what the mask skips), 3.5 times that backward and 3
    times that for o, lse and their forward-mode derivatives in one pass.
    Extra memory: o and lse forward; the gradients and one float32 a row backward (the torch backend also holds tiles of a fixed
    size, and float32 sums of dk and dv while it works on half-precision inputs; wide and float32 heads keep weights, in at most
    as much memory as a few copies of dq or o, or 384 MiB; on Hopper a backward pass keeps ds in at most eight float32 copies of
    dq, or sums in one; and float32 on Hopper has 4 or 6 bytes for each element of its
    operands). Nothing grows with seqlen_q * seqlen_k, but what says which tiles a mask of tensors has, and the bits of a dense
    one.

    Source: online softmax (Milakov and Gimelshein 2018, arXiv:1805.02867); tiles and recomputation in the backward pass
    (Dao et al. 2022, arXiv:2205.14135; Dao 2023, arXiv:2307.08691).
    """
    tensors, bare = NO_TENSORS, True
    plain: bool | None = None
    if deterministic is not None:
        check_flag("deterministic", deterministic, or_none=True)
    # The dispatcher would turn a bool or a tensor into a float in silence.
    if not isinstance(backend, str):
        check_backend(backend)
    if not isinstance(return_lse, bool):
        check_flag("return_lse", return_lse)
    if sm_scale is not None:
        check_scale(sm_scale, 1)
    if precision is not None:
        check_precision(precision, "float32")
    if spec is None and return_max_logit is False and is_unwatched():
        mask = _known_mask(causal, window, align, deterministic)
    else:
        whole = _with_mode(_spec(causal, window, align, spec), deterministic)
        if return_max_logit is not False:
            whole = _returning("max_logit", whole, return_max_logit)
        tensors = whole.tensors
        if whole.dropout:
            check_kinds(q, k, v)
            tensors = seeded(whole, q.device)
        named = [t for t in tensors if t is not None]
        bare = not named and whole.function is None
        plain = is_plain(q, k, v, *named) and (bool(named) or return_max_logit is False)
        _check_tensors_of(whole, tensors, plain)
        mask = _text(whole)
    if bare and plain is not False and not torch._C._is_any_autocast_enabled():
        found = attention_before(q, k, v, mask, sm_scale, precision, backend)
        if found is not None:
            return found if return_lse else found[0]
    if plain is None:  # nobody watches, and the tensors were not looked at yet
        plain = are_plain(q, k, v)
    # The dispatcher would refuse other kinds of tensors in words of its own.
    if not plain:
        check_kinds(q, k, v)
    if not plain or torch._C._is_any_autocast_enabled():
        q, k, v = _autocast(q, k, v)
    if plain and bare:
        o, lse = attention_plain(q, k, v, mask, sm_scale, precision, backend)
    else:
        call = attention_with_tensors if plain else attention_op
        o, lse, max_logit = call(q, k, v, mask, sm_scale, precision, backend, tensors)
        if return_max_logit:
            return (o, lse, max_logit) if return_lse else (o, max_logit)  # type: ignore[return-value]
    return (o, lse) if return_lse else o


def plan(
    q: torch.Tensor,
    k: torch.Tensor,
    spec: Spec,
    *,
    v: torch.Tensor | None = None,
    backend: str = "auto",
    backward: bool | None = None,
) -> Spec:
    """The same spec with its tables of tiles made, for any number of calls: the layers of a network, forward and backward.

    Which tiles a mask empties and which it leaves whole depends on its tensors (segments, row intervals, a dense mask). Without a
    plan every call finds out anew. The result is that of the plain spec, bit for bit.

    Args:
        q: (batch, heads_q, seqlen_q, head_dim), as in the calls to come; only its shape, dtype, device and strides matter.
        k: (batch, heads_kv, seqlen_k, head_dim).
        spec: the mask and all else that ``attention`` takes as ``spec``.
        v: (batch, heads_kv, seqlen_k, head_dim_v); ``None`` (the default): like k.
        backend: as in ``attention``.
        backward: also plan the backward pass. ``None`` (the default): if q, k or v requires a gradient.

    Returns:
        A spec for ``attention(..., spec=...)`` with the same batch, heads_q and lengths. A pass whose tiles have other sizes than
        those planned (another dtype or head_dim, say) makes its own table. A spec without such tensors comes back as it is, and so
        does one whose mask ``torch.func.vmap`` maps: its calls find out anew.

    Raises:
        InvalidInput, BackendRefused: as ``attention`` would. ``attention`` raises InvalidInput for a plan that was made for other
            shapes, and for one whose tensors were changed in place or got other memory since (outside compiled graphs, which do not
            look; nor is it seen what PyTorch does not count: writes of a kernel of one's own, through ``.data``, or into an
            inference tensor).

    Cost: reads the tensors of the mask once for each kind of pass (a dim of stride 0 or size 1 is read once), on their device,
    without waiting for a GPU. Memory: one int32 for each pair of tiles, for each batch and head that has a mask of its own; on the
    ``triton`` backend also one bit for each element of a dense mask.
    """
    if not isinstance(spec, Spec):
        raise InvalidInput(f"spec must be a tilewise.Spec, got {type(spec).__name__}: build one with tilewise.segments(...), say.")
    spec = _spec(False, None, None, spec)
    v = k if v is None else v
    check_kinds(q, k, v)
    mask = spec
    if spec.plan:
        mask = dataclasses.replace(spec, plan="", versions=(), tensors=spec.tensors._replace(plan=None))
    known = _without_a_draw(mask, q)
    _check_tensors_of(mask, known)
    check_backend(backend)
    if check_flag("backward", backward, or_none=True) is None:
        backward = torch.is_grad_enabled() and any(t.requires_grad for t in (q, k, v))
    q, k, v = _autocast(q, k, v)
    problem, chosen = bound_problem(q, k, v, _text(mask), backend, "qkv" if backward else "", known)
    module, tensors = module_of(chosen), MaskTensors.of(mask.tensors)
    if tensors is None or problem.is_empty or not hasattr(module, "geometries") or any(map(is_mapped, tensors)):
        return mask
    fill, pack = getattr(module, "fill_table", fill_table), getattr(module, "pack_dense", None)
    return planned(mask, tensors, problem, module.geometries(problem), fill, pack)


def dropout_mask(q: torch.Tensor, k: torch.Tensor, spec: Spec, *, rows: slice | torch.Tensor | None = None) -> torch.Tensor:
    """True where the dropout of ``attention(q, k, v, spec=spec)`` keeps a weight, whether the mask shows its key or not.

    Args:
        q: (batch, heads_q, seqlen_q, head_dim), as in the call; only its shape and device matter.
        k: (batch, heads_kv, seqlen_k, head_dim).
        spec: a spec with ``tilewise.dropout(p, seed)``, the seed a tensor. Without dropout everything is kept.
        rows: the queries to show: a slice, or their indices, an int64 tensor of one dim on q's device. Default ``None``: all.

    Returns:
        bool, (batch, heads_q, rows, seqlen_k).

    Raises:
        InvalidInput: a spec whose seed is drawn anew by every call, or one that does not fit the call.

    Cost: the mask in memory, and about 60 integer operations for four elements of it. Indices are checked, which waits for
    a GPU. No gradient.
    """
    check_kinds(q, k, k)
    if not isinstance(spec, Spec):
        raise InvalidInput(f"spec must be a tilewise.Spec, got {type(spec).__name__}: build one with tilewise.dropout(p, seed).")
    spec = _spec(False, None, None, spec)
    if spec.dropout and not isinstance(spec.tensors.seed, torch.Tensor):
        raise InvalidInput("every call draws a seed of its own for this spec: give it one, tilewise.dropout(p, seed=tensor).")
    (batch, heads, seqlen_q, _), seqlen_k = q.shape, k.shape[2]
    listed = rows if isinstance(rows, torch.Tensor) else None
    if listed is not None and (listed.dtype != torch.int64 or listed.dim() != 1 or listed.device != q.device):
        got = f"{listed.dtype} of shape {tuple(listed.shape)} on {listed.device}"
        raise InvalidInput(f"rows is {got}, expected int64 of one dim on {q.device}.")
    if listed is None and rows is not None and not isinstance(rows, slice):
        raise InvalidInput(f"rows must be a slice, an int64 tensor or None, got {type(rows).__name__}.")
    if not spec.dropout:
        whole = torch.ones((1, 1, 1, 1), dtype=torch.bool, device=q.device).expand(batch, heads, seqlen_q, seqlen_k)
        return whole if rows is None else whole[:, :, rows]
    tensors = seeded(spec, q.device)
    describe(dataclasses.replace(spec, plan=""), tensors._replace(plan=None), q, k)
    seed = full_rank("seed", tensors.seed)
    if listed is not None:
        if bool(((listed < -seqlen_q) | (listed >= seqlen_q)).any()):
            raise InvalidInput(f"rows holds indices outside of the {seqlen_q} queries, expected {-seqlen_q} to {seqlen_q - 1}.")
        return chosen_rows(seed, spec.p_dropout, batch, heads, torch.where(listed < 0, listed + seqlen_q, listed), seqlen_k)
    first, last, step = (rows if isinstance(rows, slice) else slice(None)).indices(seqlen_q)
    if step < 1:
        raise InvalidInput(f"rows is {rows}, expected a step of at least 1.")
    every = torch.arange(heads, device=q.device)
    shown = kept(seed, spec.p_dropout, slice(0, batch), every, slice(first, max(first, last)), slice(0, seqlen_k))
    return shown[:, :, ::step]


def explain(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: bool = False,
    window: tuple[int | None, int | None] | None = None,
    align: str | None = None,
    sm_scale: float | None = None,
    precision: str | None = None,
    spec: Spec | None = None,
    deterministic: bool | None = None,
    picture: str | Path | None = None,
    tiles: tuple[int, int] | None = None,
    at: tuple[int, int] = (0, 0),
) -> str:
    """Which backends take this call, and why the others do not, as text. The arguments up to deterministic are those of
    ``attention``.

    The first line is the problem string, which ``tilewise explain`` reads on the command line.

    Args:
        picture: also draw the mask of one head, as tiles (and as elements for lengths up to 128), to this file: .png, .svg or .pdf.
            Needs matplotlib. Default ``None``: no picture.
        tiles: ``(queries, keys)`` of a tile. Default ``None``: those of the forward pass of the backend that ``"auto"`` takes.
        at: ``(batch, head)`` that is drawn. Default ``(0, 0)``.
    """
    mask = _with_mode(_spec(causal, window, align, spec), check_flag("deterministic", deterministic, or_none=True))
    check_kinds(q, k, v)
    if picture is not None and not isinstance(picture, str | Path):
        raise InvalidInput(f"picture must be the name of a file or None, got {picture!r} of type {type(picture).__name__}.")
    check_places(tiles, at)
    if picture is None and (tiles is not None or tuple(at) != (0, 0)):
        raise InvalidInput("tiles and at say what picture draws, and there is none: name a file, picture='mask.png', or drop them.")
    known = _without_a_draw(mask, q)
    _check_tensors_of(mask, known)
    q, k, v = _autocast(q, k, v)
    problem = Problem.bind(
        q,
        k,
        v,
        mask,
        sm_scale,
        precision,
        grad_letters(*(t is not None and t.requires_grad for t in (q, k, v, *mask.tensors[:3]))),
        tensors=known,
    )
    text = explain_problem(problem)
    if picture is None:
        return text
    return f"{text}\n{draw_call(Path(picture), problem, mask, tiles, at)}"


def explain_problem(problem: Problem) -> str:
    """The table of ``explain`` for a problem."""
    lines = [str(problem)]
    verdicts = table(problem.key)
    chosen = next((name for name, reasons in verdicts if not reasons and capability(name).auto), None)
    for name, reasons in verdicts:
        if reasons:
            lines.append(f"  {name:<10} refused")
            lines += [f"  {'':<10}   {reason.code}: {reason.text}" for reason in reasons]
        elif name == chosen:
            lines.append(f"  {name:<10} accepted, and 'auto' takes it")
        else:
            lines.append(f"  {name:<10} accepted when named")
    return "\n".join(lines)
