"""The two registered operators, their fake kernels, their batching rules, and the gradient.

The operators have fixed arity; the spec crosses as its string, the tensors that it names as optional arguments in the order of
``spec.SLOTS``, and gradients that nobody asked for come back with no elements.

In eager mode a Python ``autograd.Function`` stands above the operator; functorch transforms use a second one. Compiled and
exported graphs hold the operator itself, whose Autograd kernel applies the same function, so that a graph trains as eager code
does. ``torch.library.register_autograd`` is not used: it gives forward-mode derivatives of zero in silence. Here they, and second
derivatives, are refused with a clear error.
"""

from __future__ import annotations

from typing import Any

import torch

from .backends import module_of
from .batching import backward_rule, forward_rule
from .errors import AttentionError, BackendBroken, BackendRefused
from .operands import describe, full_rank
from .problem import GRADIENTS, Problem, check_precision, check_tensors, dtype_name, grad_letters, keeps_rows
from .select import capability, choose
from .spec import NO_TENSORS, SLOTS, Spec, Tensors

__all__ = ["attention_op"]

_LIB = torch.library.Library("tilewise", "DEF")
_TENSORS = ", ".join(f"Tensor? {slot}=None" for slot in SLOTS)
_LIB.define(
    "attention_forward(Tensor q, Tensor k, Tensor v, str spec, float? sm_scale, str? precision, str backend, str grad,"
    f" {_TENSORS}) -> (Tensor, Tensor, Tensor)"
)
_LIB.define(
    "attention_backward(Tensor? do, Tensor? dlse, Tensor q, Tensor k, Tensor v, Tensor o, Tensor lse, str spec,"
    f" float? sm_scale, str? precision, str backend, str grad, Tensor? rows=None, {_TENSORS})"
    " -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)"
)
_DEVICES = ("CPU", "CUDA", "XPU")
_FORWARD = torch.ops.tilewise.attention_forward
_BACKWARD = torch.ops.tilewise.attention_backward
# Real and fake kernels allocate through the same three functions, so their shapes, dtypes and strides agree.


def _like(t: torch.Tensor, heads: int, last: int) -> torch.Tensor:
    """An empty tensor (batch, heads, seqlen, last) in the memory order of ``t``: its heads stay inside its rows if they were.

    The stride of a dim of size 1 means nothing and may differ between a traced and a real tensor, so it has no say.
    """
    batch, inner, seqlen, _ = t.shape
    if inner > 1 and seqlen > 1 and t.stride(1) < t.stride(2):
        return t.new_empty((batch, seqlen, heads, last)).transpose(1, 2)
    return t.new_empty((batch, heads, seqlen, last))


def _empty_outputs(q: torch.Tensor, v: torch.Tensor, keeps_rows: bool) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """``o``, ``lse`` and ``rows``: what the backward pass must know of a row besides lse, without elements if that is nothing."""
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    shape = (q.shape[0], q.shape[1], q.shape[2])
    rows = q.new_empty((*shape, 2) if keeps_rows else (0,), dtype=wide)
    return _like(q, q.shape[1], v.shape[3]), q.new_empty(shape, dtype=wide), rows


def _empty_gradients(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, tensors: Tensors, grad: str) -> tuple[torch.Tensor, ...]:
    """In the order of ``GRADIENTS``. That of a tensor that the spec names has its very shape."""
    wanted = [_like(t, t.shape[1], t.shape[3]) if n in grad else q.new_empty((0,)) for n, t in (("q", q), ("k", k), ("v", v))]
    for letter, t in zip("bas", tensors, strict=False):
        wanted.append(t.new_empty(t.shape) if letter in grad else q.new_empty((0,)))
    return tuple(wanted)


def _run(backend: str, problem: Problem, direction: str, *tensors: Any) -> None:
    """Let a backend work, with autocast off inside: its own products have the dtypes they mean to have."""
    work = getattr(module_of(backend), direction)
    device = tensors[0].device.type
    try:
        if _autocasts(device):
            with torch.autocast(device, enabled=False):
                work(problem, *tensors)
        else:
            work(problem, *tensors)
    except (AttentionError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        raise BackendBroken(
            f"backend {backend!r} accepted the problem and then failed in its {direction} pass: {type(error).__name__}: {error}\n"
            f"Problem: {problem}"
        ) from error


def _autocasts(device: str) -> bool:
    return device in ("cpu", "cuda", "xpu") and torch.is_autocast_enabled(device)


_bound: dict[tuple[Any, ...], tuple[Problem, str]] = {}
_MOST_BOUND = 4096


def _bind(q, k, v, spec, sm_scale, precision, backend, grad, also=(), tensors=NO_TENSORS) -> tuple[Problem, str]:
    """The problem of a call and its backend. Calls that agree in all metadata, addresses modulo 16 included, share one answer."""
    metadata = [(t.shape, t.stride(), t.dtype, t.device, t.data_ptr() % 16) for t in (q, k, v, *also)]
    if tensors is not NO_TENSORS:
        metadata += [None if t is None else (t.shape, t.dtype, t.device) for t in tensors]
    key = (*metadata, spec, sm_scale, precision, backend, grad)
    found = _bound.get(key)
    if found is None:
        problem = Problem.bind(q, k, v, Spec.parse(spec), sm_scale, precision, grad, also, tensors)
        found = problem, choose(problem, backend).backend
        if len(_bound) >= _MOST_BOUND:
            _bound.clear()
        _bound[key] = found
    return found


def _tensors_of(given: tuple[torch.Tensor | None, ...]) -> Tensors:
    return Tensors(*given) if any(t is not None for t in given) else NO_TENSORS


def _views(tensors: Tensors) -> Tensors:
    """The tensors as backends take them: views with all dims of their slots."""
    return Tensors(*(None if t is None else full_rank(slot, t) for slot, t in zip(SLOTS, tensors, strict=True)))


def _forward(q, k, v, spec, sm_scale, precision, backend, grad, *given):
    tensors = _tensors_of(given)
    problem, chosen = _bind(q, k, v, spec, sm_scale, precision, backend, grad, tensors=tensors)
    o, lse, rows = _empty_outputs(q, v, problem.keeps_rows)
    if problem.is_empty:
        lse.fill_(float("-inf"))
        if tensors.sink is not None:
            lse.copy_(full_rank("sink", tensors.sink)[..., None].expand(lse.shape))
        return o.zero_(), lse, rows.zero_()
    extra = () if tensors is NO_TENSORS else (_views(tensors), rows)
    _run(chosen, problem, "forward", q, k, v, o, lse, *extra)
    return o, lse, rows


def _backward(do, dlse, q, k, v, o, lse, spec, sm_scale, precision, backend, grad, rows=None, *given):
    if do is None:
        do = torch.zeros_like(o)
    tensors = _tensors_of(given)
    problem, chosen = _bind(q, k, v, spec, sm_scale, precision, backend, grad, also=(do, o), tensors=tensors)
    grads = _empty_gradients(q, k, v, tensors, grad)
    if problem.is_empty:
        for t in grads:
            t.zero_()
        if "s" in grad and dlse is not None:
            # Without keys lse is the sink itself.
            grads[5].copy_(dlse.sum(-1).sum_to_size(full_rank("sink", grads[5]).shape).view(grads[5].shape))
        return grads
    dq, dk, dv, *more = (t if letter in grad else None for letter, t in zip(GRADIENTS, grads, strict=True))
    extra = ()
    if tensors is not NO_TENSORS:
        named = zip(("bias", "slopes", "sink"), more, strict=True)
        extra = (_views(tensors), rows, _views(Tensors(**dict(named))))
    _run(chosen, problem, "backward", do, dlse, q, k, v, o, lse, dq, dk, dv, *extra)
    return grads


for _device in _DEVICES:
    _LIB.impl("attention_forward", _forward, _device)
    _LIB.impl("attention_backward", _backward, _device)


@torch.library.register_fake("tilewise::attention_forward", lib=_LIB)
def _forward_fake(q, k, v, spec, sm_scale, precision, backend, grad, *given):
    check_tensors(q, k, v)
    check_precision(precision, dtype_name(q.dtype))
    if backend != "auto":
        capability(backend)
    parsed = Spec.parse(spec)
    describe(parsed, _tensors_of(given), q, k)
    return _empty_outputs(q, v, keeps_rows(parsed, grad))


@torch.library.register_fake("tilewise::attention_backward", lib=_LIB)
def _backward_fake(do, dlse, q, k, v, o, lse, spec, sm_scale, precision, backend, grad, rows=None, *given):
    return _empty_gradients(q, k, v, _tensors_of(given), grad)


torch.library.register_vmap("tilewise::attention_forward", forward_rule(_FORWARD), lib=_LIB)
torch.library.register_vmap("tilewise::attention_backward", backward_rule(_BACKWARD), lib=_LIB)


def _refuse_derivative(what: str) -> BackendRefused:
    return BackendRefused(
        f"tilewise.attention has no {what}, and none is better than a wrong one. "
        "Use torch.nn.functional.scaled_dot_product_attention under sdpa_kernel(SDPBackend.MATH) where you need one."
    )


def _refuse_tangents(*tensors: torch.Tensor | None) -> None:
    if torch.autograd.forward_ad._current_level < 0:
        return
    if any(t is not None and torch.autograd.forward_ad.unpack_dual(t).tangent is not None for t in tensors):
        raise _refuse_derivative("forward-mode derivative (jvp)")


def _refuse_functorch() -> None:
    if torch._C._are_functorch_transforms_active():
        raise BackendRefused(
            "torch.func's derivatives of tilewise.attention work in eager mode, not through a compiled or exported graph: "
            "call the transform outside torch.compile, or take the gradient with loss.backward() or torch.autograd.grad."
        )


class _Backward(torch.autograd.Function):
    """The backward operator inside a graph that is being recorded (``create_graph=True``): its own backward refuses."""

    @staticmethod
    def forward(ctx: Any, *args: Any) -> Any:
        with torch._C._AutoDispatchBelowAutograd():
            return _BACKWARD(*args)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise _refuse_derivative("second derivative (backward of the backward pass)")


class _BackwardFunctorch(torch.autograd.Function):
    """``_Backward`` in the form that functorch transforms need (``setup_context`` apart from ``forward``)."""

    generate_vmap_rule = True

    @staticmethod
    def forward(*args: Any) -> Any:
        return _BACKWARD(*args)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    backward = _Backward.backward

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        raise _refuse_derivative("forward-mode derivative of its backward pass")


def _backward_autograd(*args: Any) -> Any:
    """The backward operator where autograd may be recording."""
    _refuse_functorch()
    _refuse_tangents(*args[:7], *args[12:])
    if torch.is_grad_enabled():
        return _Backward.apply(*args)
    with torch._C._AutoDispatchBelowAutograd():
        return _BACKWARD(*args)


_INPUTS = 3 + len(SLOTS)
_ARGUMENTS = 5  # spec, sm_scale, precision, backend, grad


def _gradients(ctx: Any, do: torch.Tensor | None, dlse: torch.Tensor | None) -> Any:
    grad = grad_letters(*ctx.needs_input_grad[: len(GRADIENTS)])
    nothing = (None,) * (_INPUTS + _ARGUMENTS)
    if (do is None and dlse is None) or not grad:
        return nothing
    apply = _BackwardFunctorch.apply if torch._C._are_functorch_transforms_active() else _backward_autograd
    q, k, v, o, lse, rows, *tensors = ctx.saved_tensors
    more = (rows, *tensors) if any(t is not None for t in tensors) else ()
    grads = apply(do, dlse, q, k, v, o, lse, *ctx.arguments, grad, *more)
    return (*(g if name in grad else None for name, g in zip(GRADIENTS, grads, strict=True)), *nothing[len(GRADIENTS) :])


class _Attention(torch.autograd.Function):
    """The forward operator with its gradient. The arguments are q, k, v, the tensors of the spec, and then the rest."""

    @staticmethod
    def forward(ctx: Any, *args: Any) -> Any:
        inputs, rest = args[:_INPUTS], args[_INPUTS:]
        with torch._C._AutoDispatchBelowAutograd():
            o, lse, rows = _FORWARD(*inputs[:3], *rest, *inputs[3:])
        ctx.save_for_backward(*inputs[:3], o, lse, rows, *inputs[3:])
        ctx.arguments = rest[:-1]
        ctx.mark_non_differentiable(rows)
        ctx.set_materialize_grads(False)
        return o, lse, rows

    @staticmethod
    def backward(ctx: Any, do: Any, dlse: Any, _: Any) -> Any:  # type: ignore[override]
        return _gradients(ctx, do, dlse)


class _AttentionFunctorch(torch.autograd.Function):
    """``_Attention`` in the form that functorch transforms need; 21 us dearer a call, so used only under them."""

    generate_vmap_rule = True

    @staticmethod
    def forward(*args: Any) -> Any:
        return _FORWARD(*args[:3], *args[_INPUTS:], *args[3:_INPUTS])

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs[:3], *output, *inputs[3:_INPUTS])
        ctx.arguments = inputs[_INPUTS:-1]
        ctx.mark_non_differentiable(output[2])
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, do: Any, dlse: Any, _: Any) -> Any:  # type: ignore[override]
        return _gradients(ctx, do, dlse)

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        raise _refuse_derivative("forward-mode derivative (jvp)")


def _forward_autograd(q, k, v, spec, sm_scale, precision, backend, grad, *given):
    """The forward operator where autograd may be recording: then ``grad`` is found anew, as a graph's may be older than its inputs.

    Where it is not, ``grad`` stays: the forward half of a compiled graph runs without recording, for the backward half beside it.
    """
    _refuse_functorch()
    _refuse_tangents(q, k, v, *given)
    found = ""
    if torch.is_grad_enabled():
        needs = (t is not None and t.requires_grad for t in (q, k, v, *given[: len(GRADIENTS) - 3]))
        found = grad_letters(*needs)
    if found:
        grad = found
        tensors = (*given, *(None,) * (len(SLOTS) - len(given)))
        return _Attention.apply(q, k, v, *tensors, spec, sm_scale, precision, backend, grad)
    with torch._C._AutoDispatchBelowAutograd():
        return _FORWARD(q, k, v, spec, sm_scale, precision, backend, grad, *given)


_LIB.impl("attention_forward", _forward_autograd, "Autograd")
_LIB.impl("attention_backward", _backward_autograd, "Autograd")


def attention_op(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    spec: str,
    sm_scale: float | None,
    precision: str | None,
    backend: str,
    tensors: Tensors = NO_TENSORS,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``(o, lse)``, differentiable where an input needs it. The tensors have passed ``check_kinds``."""
    given = () if all(t is None for t in tensors) else tensors
    args = (q, k, v, spec, sm_scale, precision, backend, "", *given)
    if torch.compiler.is_compiling():
        o, lse, _ = _FORWARD(*args)
    elif torch._C._are_functorch_transforms_active():
        # Whether a transform outside wants a gradient is not to be seen from here.
        grad = "b" if tensors.bias is not None else ""
        o, lse, _ = _AttentionFunctorch.apply(q, k, v, *tensors, spec, sm_scale, precision, backend, grad)  # type: ignore[misc]
    else:
        # In eager mode the Autograd kernel is called by its name, which saves a trip through the dispatcher.
        o, lse, _ = _forward_autograd(*args)  # type: ignore[misc]
    return o, lse
