"""The two registered operators, their fake kernels, and the autograd function above them.

The operators have fixed arity; the spec crosses as its string and gradients that nobody asked for come back with no elements.
A Python ``autograd.Function`` stands above them (not ``register_autograd``) because that one gives forward-mode derivatives of
zero in silence; this one refuses them, and a second derivative, with a clear error.
"""

from __future__ import annotations

from typing import Any

import torch

from .backends import module_of
from .errors import BackendRefused, InvalidInput
from .problem import Problem, check_tensors, grad_letters
from .select import choose
from .spec import Spec

__all__ = ["attention_op"]

_LIB = torch.library.Library("tilewise", "DEF")
_LIB.define(
    "attention_forward(Tensor q, Tensor k, Tensor v, str spec, float? sm_scale, str? precision, str backend, str grad)"
    " -> (Tensor, Tensor)"
)
_LIB.define(
    "attention_backward(Tensor? do, Tensor? dlse, Tensor q, Tensor k, Tensor v, Tensor o, Tensor lse, str spec,"
    " float? sm_scale, str? precision, str backend, str grad) -> (Tensor, Tensor, Tensor)"
)
_DEVICES = ("CPU", "CUDA", "XPU")


def _like(t: torch.Tensor, heads: int, last: int) -> torch.Tensor:
    """An empty tensor (batch, heads, seqlen, last) in the memory order of ``t``: its heads stay inside its rows if they were."""
    batch, _, seqlen, _ = t.shape
    if t.stride(1) < t.stride(2):
        return t.new_empty((batch, seqlen, heads, last)).transpose(1, 2)
    return t.new_empty((batch, heads, seqlen, last))


def _empty_outputs(q: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    lse = q.new_empty((q.shape[0], q.shape[1], q.shape[2]), dtype=torch.float64 if q.dtype == torch.float64 else torch.float32)
    return _like(q, q.shape[1], v.shape[3]), lse


def _empty_gradients(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, grad: str) -> tuple[torch.Tensor, ...]:
    named = (("q", q), ("k", k), ("v", v))
    return tuple(_like(t, t.shape[1], t.shape[3]) if n in grad else t.new_empty((0,)) for n, t in named)


def _forward(q, k, v, spec, sm_scale, precision, backend, grad):
    problem = Problem.bind(q, k, v, Spec.parse(spec), sm_scale, precision, grad)
    choice = choose(problem, backend)
    o, lse = _empty_outputs(q, v)
    if problem.is_empty:
        return o.zero_(), lse.fill_(float("-inf"))
    module_of(choice.backend).forward(problem, q, k, v, o, lse)
    return o, lse


def _backward(do, dlse, q, k, v, o, lse, spec, sm_scale, precision, backend, grad):
    if do is None:
        do = torch.zeros_like(o)
    problem = Problem.bind(q, k, v, Spec.parse(spec), sm_scale, precision, grad, also=(do, o))
    choice = choose(problem, backend)
    grads = _empty_gradients(q, k, v, grad)
    if problem.is_empty:
        return tuple(t.zero_() for t in grads)
    wanted = (t if name in grad else None for name, t in zip("qkv", grads, strict=True))
    module_of(choice.backend).backward(problem, do, dlse, q, k, v, o, lse, *wanted)
    return grads


for _device in _DEVICES:
    _LIB.impl("attention_forward", _forward, _device)
    _LIB.impl("attention_backward", _backward, _device)


@torch.library.register_fake("tilewise::attention_forward", lib=_LIB)
def _forward_fake(q, k, v, spec, sm_scale, precision, backend, grad):
    check_tensors(q, k, v)
    return _empty_outputs(q, v)


@torch.library.register_fake("tilewise::attention_backward", lib=_LIB)
def _backward_fake(do, dlse, q, k, v, o, lse, spec, sm_scale, precision, backend, grad):
    return _empty_gradients(q, k, v, grad)


def _refuse_derivative(what: str) -> BackendRefused:
    return BackendRefused(
        f"tilewise.attention has no {what}: it would be silently wrong, so it is refused. "
        "Use torch.nn.functional.scaled_dot_product_attention under sdpa_kernel(SDPBackend.MATH) where you need one."
    )


class _Backward(torch.autograd.Function):
    """The backward operator inside a graph that is being recorded (``create_graph=True``): its own backward refuses."""

    @staticmethod
    def forward(ctx: Any, *args: Any) -> Any:
        return torch.ops.tilewise.attention_backward(*args)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise _refuse_derivative("second derivative (backward of the backward pass)")

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        raise _refuse_derivative("forward-mode derivative of its backward pass")


class _BackwardFunctorch(torch.autograd.Function):
    """``_Backward`` in the form that functorch transforms need (``setup_context`` apart from ``forward``)."""

    generate_vmap_rule = True

    @staticmethod
    def forward(*args: Any) -> Any:
        return torch.ops.tilewise.attention_backward(*args)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    backward = _Backward.backward
    jvp = _Backward.jvp


def _backward_of(function: type, ctx: Any, do: torch.Tensor | None, dlse: torch.Tensor | None) -> Any:
    q, k, v, o, lse = ctx.saved_tensors
    spec, sm_scale, precision, backend = ctx.arguments
    grad = grad_letters(*ctx.needs_input_grad[:3])
    if (do is None and dlse is None) or not grad:
        return (None,) * 8
    args = (do, dlse, q, k, v, o, lse, spec, sm_scale, precision, backend, grad)
    if function is _Backward and not torch.is_grad_enabled():
        grads = torch.ops.tilewise.attention_backward(*args)
    else:
        grads = function.apply(*args)
    return (*(g if name in grad else None for name, g in zip("qkv", grads, strict=True)), *(None,) * 5)


class _Attention(torch.autograd.Function):
    """The forward operator with its gradient."""

    @staticmethod
    def forward(ctx: Any, q, k, v, spec, sm_scale, precision, backend, grad) -> Any:
        o, lse = torch.ops.tilewise.attention_forward(q, k, v, spec, sm_scale, precision, backend, grad)
        ctx.save_for_backward(q, k, v, o, lse)
        ctx.arguments = (spec, sm_scale, precision, backend)
        ctx.set_materialize_grads(False)
        return o, lse

    @staticmethod
    def backward(ctx: Any, do: Any, dlse: Any) -> Any:  # type: ignore[override]
        return _backward_of(_Backward, ctx, do, dlse)

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        raise _refuse_derivative("forward-mode derivative (jvp)")


class _AttentionFunctorch(torch.autograd.Function):
    """``_Attention`` in the form that functorch transforms need; 21 us dearer a call, so used only under them."""

    generate_vmap_rule = True

    @staticmethod
    def forward(q, k, v, spec, sm_scale, precision, backend, grad) -> Any:
        return torch.ops.tilewise.attention_forward(q, k, v, spec, sm_scale, precision, backend, grad)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        q, k, v, spec, sm_scale, precision, backend, _ = inputs
        ctx.save_for_backward(q, k, v, *output)
        ctx.arguments = (spec, sm_scale, precision, backend)
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, do: Any, dlse: Any) -> Any:  # type: ignore[override]
        return _backward_of(_BackwardFunctorch, ctx, do, dlse)

    jvp = _Attention.jvp


def _has_tangent(*tensors: torch.Tensor) -> bool:
    if torch.autograd.forward_ad._current_level < 0:
        return False
    return any(torch.autograd.forward_ad.unpack_dual(t).tangent is not None for t in tensors)


def attention_op(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, spec: str, sm_scale: float | None, precision: str | None, backend: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """``(o, lse)``, differentiable where an input needs it."""
    for name, t in (("q", q), ("k", k), ("v", v)):
        if not isinstance(t, torch.Tensor):
            raise InvalidInput(f"{name} must be a torch.Tensor of shape (batch, heads, seqlen, head_dim), got {type(t).__name__}.")
    args = (q, k, v, spec, sm_scale, precision, backend)
    if torch._C._are_functorch_transforms_active():
        return _AttentionFunctorch.apply(*args, "qkv")  # type: ignore[return-value]
    needs = torch.is_grad_enabled()
    grad = grad_letters(needs and q.requires_grad, needs and k.requires_grad, needs and v.requires_grad)
    if not grad and not _has_tangent(q, k, v):
        return torch.ops.tilewise.attention_forward(*args, "")
    return _Attention.apply(*args, grad)  # type: ignore[return-value]
