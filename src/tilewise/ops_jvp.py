"""Forward mode: the registered operator ``tilewise::attention_jvp``, and how tangents find their way to it.

The operator gives ``o``, ``lse`` and ``rows`` as the forward operator does, and the derivatives of the first two along tangents of
q, k, v, bias, slopes and sink, any of which may be missing. Tangents come by four roads, which all end there:

- dual tensors (``torch.autograd.forward_ad``): ``dual_forward`` takes them apart and makes duals of the outputs;
- ``torch.func.jvp`` as the innermost transform: ``fused`` does the same;
- other transforms in between (``vmap`` inside of ``jvp``): the ``jvp`` rule of the forward operator's function, which computes
  ``o`` a second time;
- graphs that are being traced with either of the first two in them: ``traced``.

All outputs may be differentiated again in reverse: ``o`` and ``lse`` whatever tangents there are, ``t_o`` and ``t_lse`` by the
inputs and by the tangents (``ops_second``). A jvp of a jvp is refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.autograd import forward_ad

from .batching import jvp_rule
from .errors import BackendRefused, InvalidInput
from .operands import DIMS, full_rank
from .ops import (
    _ARGUMENTS,
    _DEVICES,
    _FORWARD,
    _INPUTS,
    _LIB,
    _TENSORS,
    FORWARD_MODE,
    _bind,
    _empty_outputs,
    _empty_rows,
    _forward_autograd,
    _forward_fake,
    _gradients,
    _refuse_functorch,
    _run,
    _tensors_of,
    _views,
)
from .ops_second import add, through_tangents
from .problem import GRADIENTS, Tangents, grad_letters
from .spec import NO_TENSORS, SLOTS

__all__ = ["dual_forward", "fused", "tangents_of", "traced"]

_MOVED = tuple(GRADIENTS.values())  # what may have a tangent: q, k, v and three slots
_LIB.define(
    "attention_jvp(Tensor q, Tensor k, Tensor v, str spec, float? sm_scale, str? precision, str backend, str grad,"
    f" {', '.join(f'Tensor? t{name}=None' for name in _MOVED)}, {_TENSORS}) -> (Tensor, Tensor, Tensor, Tensor, Tensor)"
)
_LEVEL = 0  # PyTorch has no other; a graph that is being traced does not tell that it is in it
_JVP = torch.ops.tilewise.attention_jvp


def _filled(given: Sequence[torch.Tensor | None]) -> tuple[torch.Tensor | None, ...]:
    """All tensors of the spec: the dispatcher drops those at the end that are None."""
    return (*given, *(None,) * (len(SLOTS) - len(given)))


def _check(tangents: Tangents, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, given: Sequence[torch.Tensor | None]) -> None:
    """Raise InvalidInput unless each tangent fits what it is a tangent of."""
    sizes = {"b": q.shape[0], "h": q.shape[1], "q": q.shape[2], "k": k.shape[2]}
    for name, own, t in zip(_MOVED, (q, k, v, *_filled(given)[:3]), tangents, strict=True):
        if t is None:
            continue
        if own is None:
            raise InvalidInput(f"a tangent was given for {name}, but the call has no {name}.")
        if t.dtype != own.dtype or t.device != own.device:
            raise InvalidInput(f"the tangent of {name} is {t.dtype} on {t.device}, expected {own.dtype} on {own.device}.")
        if name in DIMS:  # it may vary where the tensor itself does not
            fits = t.dim() <= len(DIMS[name])
            extents = [sizes[letter] for letter in DIMS[name][len(DIMS[name]) - t.dim() :]] if fits else []
            fits = fits and all(n in (1, extent) for n, extent in zip(t.shape, extents, strict=True))
        else:
            fits = t.shape == own.shape
        if not fits:
            raise InvalidInput(f"the tangent of {name} has shape {tuple(t.shape)}, expected that of {name}: {tuple(own.shape)}.")


def _jvp(q, k, v, spec, sm_scale, precision, backend, grad, *given):
    tangents, given = Tangents(*given[: len(_MOVED)]), given[len(_MOVED) :]
    _check(tangents, q, k, v, given)
    tensors = _tensors_of(given, spec)
    also = tuple(t for t in tangents[:3] if t is not None)
    bound = _bind(q, k, v, spec, sm_scale, precision, backend, grad, also, tensors, tangents.letters)
    o, lse = bound.empty_outputs(q, v)
    t_o, t_lse = torch.empty_like(o), torch.empty_like(lse)
    rows = _empty_rows(q, bound.problem.keeps_rows)
    named = zip(_MOVED[3:], tangents[3:], strict=True)
    tangents = Tangents(*tangents[:3], *(None if t is None else full_rank(name, t) for name, t in named))
    if bound.is_empty:
        lse.fill_(float("-inf"))
        t_lse.zero_()
        for logit, out in ((tensors.sink, lse), (tangents.sink, t_lse)):
            if logit is not None:
                out.copy_(full_rank("sink", logit)[..., None].expand(out.shape))
        return o.zero_(), lse, rows.zero_(), t_o.zero_(), t_lse
    extra = () if tensors is NO_TENSORS else (_views(tensors), rows)
    _run(bound.backend, bound.problem, "jvp", q, k, v, o, lse, t_o, t_lse, tangents, *extra)
    return o, lse, rows, t_o, t_lse


for _device in _DEVICES:
    _LIB.impl("attention_jvp", _jvp, _device)


@torch.library.register_fake("tilewise::attention_jvp", lib=_LIB)
def _jvp_fake(q, k, v, spec, sm_scale, precision, backend, grad, *given):
    outputs = _forward_fake(q, k, v, spec, sm_scale, precision, backend, grad, *given[len(_MOVED) :])
    return *outputs[:3], *_empty_outputs(q, v)


torch.library.register_vmap("tilewise::attention_jvp", jvp_rule(_JVP), lib=_LIB)


def _refuse_second() -> BackendRefused:
    return BackendRefused(
        "tilewise.attention has no forward-mode derivative of its forward-mode derivative. Take one of the two in reverse "
        "(torch.func.hessian, or jvp of grad), or use torch.nn.functional.scaled_dot_product_attention under "
        "sdpa_kernel(SDPBackend.MATH)."
    )


def _jvp_gradients(ctx: Any, do: Any, dlse: Any, dt_o: Any, dt_lse: Any, static: bool) -> Any:
    """The gradient through o and lse, and that through their tangents."""
    saved, tangents = ctx.saved_tensors[: 3 + _INPUTS], ctx.saved_tensors[3 + _INPUTS :]
    marked = None if static or ctx.level is None else _moved(ctx.level)
    grads = list(_gradients(ctx, do, dlse, static, saved if marked is None else _as_duals(saved, tangents)))
    if dt_o is None and dt_lse is None:
        return tuple(grads)
    of_inputs, of_tangents = (grad_letters(*ctx.needs_input_grad[at : at + len(_MOVED)]) for at in (0, _INPUTS))
    found, linear = through_tangents((dt_o, dt_lse), saved, tangents, ctx.arguments, of_inputs, of_tangents)
    for at, letter in enumerate(GRADIENTS):
        grads[at] = add(grads[at], found.get(letter))
        grads[_INPUTS + at] = linear.get(letter)
    return tuple(grads)


def _as_duals(saved: Sequence[Any], tangents: Sequence[Any]) -> tuple[Any, ...]:
    """What was saved (q, k, v, o, lse, rows, tensors of the spec) as the dual tensors that the inputs were."""
    duals = list(saved)
    for at, t in zip((0, 1, 2, 6, 7, 8), tangents, strict=True):
        if t is not None:
            duals[at] = forward_ad.make_dual(saved[at], t, level=_LEVEL)
    return tuple(duals)


def _jvp_backward(ctx: Any, do: Any, dlse: Any, _: Any, dt_o: Any, dt_lse: Any) -> Any:
    return _jvp_gradients(ctx, do, dlse, dt_o, dt_lse, False)


def _jvp_backward_functorch(ctx: Any, do: Any, dlse: Any, _: Any, dt_o: Any, dt_lse: Any) -> Any:
    """The same for ``_JvpFunctorch``, whose ctx has no nodes of its own."""
    return _jvp_gradients(ctx, do, dlse, dt_o, dt_lse, True)


def _level() -> torch.Tensor | None:
    """A dual tensor of the level of forward mode that is open: it loses its tangent where that ends. None under functorch."""
    if torch._C._are_functorch_transforms_active():
        return None
    return forward_ad.make_dual(torch.zeros(()), torch.zeros(()), level=_LEVEL)


def _ordered(args: Sequence[Any]) -> tuple[Any, ...]:
    """The arguments of the operator from those of the functions: q, k, v and the spec's tensors, the tangents, then the rest."""
    inputs, tangents, rest = args[:_INPUTS], args[_INPUTS : _INPUTS + len(_MOVED)], args[_INPUTS + len(_MOVED) :]
    return (*inputs[:3], *rest, *tangents, *inputs[3:])


class _Jvp(torch.autograd.Function):
    """The operator with its gradient. The last argument is ``_level()`` in a tuple, or ``(None,)``."""

    @staticmethod
    def forward(ctx: Any, *args: Any) -> Any:
        with torch._C._AutoDispatchBelowAutograd():
            o, lse, rows, t_o, t_lse = _JVP(*_ordered(args[:-1]))
        ctx.save_for_backward(*args[:3], o, lse, rows, *args[3 : _INPUTS + len(_MOVED)])
        ctx.arguments = args[-1 - _ARGUMENTS : -2]
        (ctx.level,) = args[-1]
        ctx.mark_non_differentiable(rows)
        ctx.set_materialize_grads(False)
        return o, lse, rows, t_o, t_lse

    backward = staticmethod(_jvp_backward)  # type: ignore[assignment]


class _BesideTangents(torch.autograd.Function):
    """The forward operator with the gradient of ``_Jvp`` and with its arguments."""

    @staticmethod
    def forward(ctx: Any, *args: Any) -> Any:
        with torch._C._AutoDispatchBelowAutograd():
            o, lse, rows, _ = _FORWARD(*args[:3], *args[-1 - _ARGUMENTS : -1], *args[3:_INPUTS])
        ctx.save_for_backward(*args[:3], o, lse, rows, *args[3 : _INPUTS + len(_MOVED)])
        ctx.arguments = args[-1 - _ARGUMENTS : -2]
        (ctx.level,) = args[-1]
        ctx.mark_non_differentiable(rows)
        ctx.set_materialize_grads(False)
        return o, lse, rows

    @staticmethod
    def backward(ctx: Any, do: Any, dlse: Any, _: Any) -> Any:  # type: ignore[override]
        return _jvp_gradients(ctx, do, dlse, None, None, False)


class _JvpFunctorch(torch.autograd.Function):
    """``_Jvp`` in the form that functorch transforms need."""

    generate_vmap_rule = True

    @staticmethod
    def forward(*args: Any) -> Any:
        return _JVP(*_ordered(args))

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        saved = (*inputs[:3], *output[:3], *inputs[3 : _INPUTS + len(_MOVED)])
        ctx.save_for_backward(*saved)
        ctx.save_for_forward(*saved)  # a vmap around it wants that of a jvp rule, though this one refuses
        ctx.arguments = inputs[-_ARGUMENTS:-1]
        ctx.mark_non_differentiable(output[2])
        ctx.set_materialize_grads(False)

    backward = staticmethod(_jvp_backward_functorch)  # type: ignore[assignment]

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        raise _refuse_second()


def _moved(t: torch.Tensor | None) -> torch.Tensor | None:
    """The tangent of ``t``; None if it has none, or one that is known to be zero."""
    if t is None:
        return None
    # What forward_ad.unpack_dual calls, which takes 5 times as long.
    _, tangent = torch._unpack_dual(t, level=_LEVEL)  # type: ignore[attr-defined]
    return None if tangent is None or tangent._is_zerotensor() else tangent


def _refuse_others(tangents: Sequence[torch.Tensor | None]) -> None:
    """Refuse tangents of those tensors of the spec that have none: of a score function's, in fact, since others are no numbers."""
    if any(t is not None for t in tangents):
        raise BackendRefused(
            "a tensor of the spec's score function has a tangent, and there is no derivative by such tensors: give it without one "
            "(detach()), or make it a step that has one (tilewise.bias, tilewise.alibi)."
        )


def tangents_of(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, given: Sequence[torch.Tensor | None]) -> Tangents | None:
    """The tangents of the inputs of a call at the innermost level of forward mode; None if nothing moves."""
    _refuse_others([_moved(t) for t in _filled(given)[3:]])
    found = [_moved(t) for t in (q, k, v, *_filled(given)[:3])]
    return Tangents(*found) if any(t is not None for t in found) else None


def _primals(*tensors: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
    return tuple(None if t is None else forward_ad.unpack_dual(t, level=_LEVEL).primal for t in tensors)


def is_jvp_level() -> bool:
    """Is the innermost functorch transform a jvp?"""
    if not torch._C._are_functorch_transforms_active():
        return False
    functorch: Any = torch._C._functorch  # type: ignore[attr-defined]
    innermost = functorch.peek_interpreter_stack()
    return innermost is not None and innermost.key() == functorch.TransformType.Jvp


def _recording(inputs: Sequence[Any], tangents: Tangents) -> str:
    """Which inputs need a gradient, or have tangents that need one."""
    if not torch.is_grad_enabled() or is_jvp_level():
        return ""
    return grad_letters(*(any(t is not None and t.requires_grad for t in pair) for pair in zip(inputs, tangents, strict=True)))


def _recorded(q, k, v, spec, sm_scale, precision, backend, grad, tangents: Tangents, given, at_level: bool):
    """The operator where autograd may be recording; see ``ops._forward_autograd``. ``at_level``: for dual tensors."""
    found = _recording((q, k, v, *given[:3]), tangents)
    if found:
        return _Jvp.apply(q, k, v, *given, *tangents, spec, sm_scale, precision, backend, found, (_level() if at_level else None,))
    with torch._C._AutoDispatchBelowAutograd():
        return _JVP(q, k, v, spec, sm_scale, precision, backend, grad, *tangents, *given)


def dual_forward(q, k, v, spec, sm_scale, precision, backend, grad, given, tangents: Tangents):
    """What the forward operator gives, ``o`` and ``lse`` as dual tensors, outside of functorch transforms."""
    q, k, v, *given = _primals(q, k, v, *_filled(given))
    o, lse, rows, t_o, t_lse = _recorded(q, k, v, spec, sm_scale, precision, backend, grad, tangents, given, True)
    if any(t is not None and "Batched" in str(torch._C._dispatch_keys(t)) for t in tangents):
        # torch.autograd.functional maps over tangents alone, and its vmap makes no dual of a tensor that is mapped itself.
        found = _recording((q, k, v, *given[:3]), tangents)
        if found:
            own = (q, k, v, *given, *tangents, spec, sm_scale, precision, backend, found, (_level(),))
            o, lse, rows = _BesideTangents.apply(*own)  # type: ignore[misc]
        else:
            o, lse, rows, _ = _forward_autograd(q, k, v, spec, sm_scale, precision, backend, grad, *given)
    duals = forward_ad.make_dual(o, t_o, level=_LEVEL), forward_ad.make_dual(lse, t_lse, level=_LEVEL)
    return *duals, rows, o.new_empty(0)


def traced(q, k, v, spec, sm_scale, precision, backend, grad, given):
    """What the forward operator gives where the dispatcher called it and forward mode has to do with it; None where not."""
    tangents = tangents_of(q, k, v, given)
    if is_jvp_level():
        if tangents is None:
            with torch._C._AutoDispatchBelowAutograd():
                return _FORWARD(q, k, v, spec, sm_scale, precision, backend, grad, *given)
    elif tangents is None or torch._C._are_functorch_transforms_active():
        return None
    elif torch._C._len_torch_dispatch_stack() == 0:
        raise BackendRefused(
            "dual tensors reached tilewise.attention through a compiled or exported graph, whose own code loses tangents: take the "
            "forward-mode derivative inside of the compiled function (torch.func.jvp), or call tilewise.attention outside of one."
        )
    return dual_forward(q, k, v, spec, sm_scale, precision, backend, grad, given, tangents)


def _jvp_autograd(q, k, v, spec, sm_scale, precision, backend, grad, *given):
    """The operator itself, called or in a graph."""
    _refuse_functorch()
    tangents, given = Tangents(*given[: len(_MOVED)]), _filled(given[len(_MOVED) :])
    if tangents_of(q, k, v, given) is not None or any(_moved(t) is not None for t in tangents):
        raise _refuse_second()
    return _recorded(q, k, v, spec, sm_scale, precision, backend, grad, tangents, given, False)


_LIB.impl("attention_jvp", _jvp_autograd, "Autograd")


def fused(q, k, v, given, *arguments):
    """``(o, lse)`` of a call inside functorch transforms; None unless the innermost is a jvp that moves one of the inputs."""
    tangents = tangents_of(q, k, v, given) if is_jvp_level() else None
    if tangents is None:
        return None
    o, lse, _, t_o, t_lse = _JvpFunctorch.apply(*_primals(q, k, v, *_filled(given)), *tangents, *arguments)  # type: ignore[misc]
    return forward_ad.make_dual(o, t_o, level=_LEVEL), forward_ad.make_dual(lse, t_lse, level=_LEVEL)


def by_rule(ctx: Any, tangents: Sequence[Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """``(t_o, t_lse)`` for the ``jvp`` rule of the forward operator's function."""
    q, k, v, _, _, _, *given = ctx.saved_tensors
    moved = tangents[: len(_MOVED)]
    _refuse_others(tangents[len(_MOVED) : _INPUTS])
    _, _, _, t_o, t_lse = _JvpFunctorch.apply(q, k, v, *given, *moved, *ctx.arguments, "")  # type: ignore[misc]
    return t_o, t_lse


FORWARD_MODE.update(by_rule=by_rule, dual_forward=dual_forward, fused=fused, tangents_of=tangents_of, traced=traced)
