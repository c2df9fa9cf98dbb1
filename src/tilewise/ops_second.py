"""Second derivatives: the registered operator ``tilewise::attention_second``, and the derivatives of derivatives made with it.

The operator gives ``t_o`` and ``t_lse``, the derivatives of the outputs along tangents, and the gradients with respect to the
inputs of ``<do, t_o> + <dlse, t_lse>`` (``backends/torch_second.py``), whatever backend made the first derivatives. Of it are made

- the backward pass of the backward pass, where what comes back for dq, dk, ... are the tangents (``backward_again``);
- the backward pass through the tangents of a forward-mode derivative (``through_tangents``);
- the forward-mode derivative of the backward pass, which by symmetry has the same formula (``moved_backward``, ``dual_backward``).

It has no derivative itself: a third one is refused.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch.autograd import forward_ad

from .backends import second_derivative_module
from .batching import second_rule
from .errors import AttentionError, BackendRefused, InvalidInput
from .operands import full_rank
from .ops import (
    _BACKWARD,
    _DEVICES,
    _LIB,
    _TENSORS,
    SECOND,
    _asks_for_all,
    _AttentionFunctorch,
    _Backward,
    _backward_autograd,
    _BackwardFunctorch,
    _broken,
    _current_graph_task,
    _empty_gradients,
    _forward_autograd,
    _refuse_functorch,
    _tensors_of,
    _views,
    _wide,
    _will_execute,
)
from .problem import GRADIENTS, Problem, Tangents, grad_letters
from .spec import NO_TENSORS, SLOTS, Spec, Tensors

__all__ = ["add", "backward_again", "dual_backward", "moved_backward", "through_tangents"]

_NAMES = tuple(GRADIENTS.values())
_LIB.define(
    "attention_second(Tensor? do, Tensor? dlse, Tensor q, Tensor k, Tensor v, str spec, float? sm_scale, str? precision,"
    f" str backend, str grad, {', '.join(f'Tensor? t{name}=None' for name in _NAMES)}, {_TENSORS})"
    f" -> ({', '.join(['Tensor'] * 8)})"
)
_SECOND = torch.ops.tilewise.attention_second
_OUTPUTS = ("o", "l", *GRADIENTS)  # t_o, t_lse and the gradients, by the letters in ``grad`` that ask for them
_FIRST = 10  # the arguments before the tangents


def _empty(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, tensors: Tensors, grad: str) -> list[torch.Tensor | None]:
    """``t_o``, ``t_lse`` and the gradients; None where nobody asks."""
    rows = (q.shape[0], q.shape[1], q.shape[2])
    t_o = q.new_empty((*rows, v.shape[3])) if "o" in grad else None
    t_lse = q.new_empty(rows, dtype=_wide(q)) if "l" in grad else None
    return [t_o, t_lse, *_empty_gradients(q, k, v, tensors, grad)]


def _packed(q: torch.Tensor, outputs: Sequence[torch.Tensor | None]) -> tuple[torch.Tensor, ...]:
    return tuple(q.new_empty(0) if t is None else t for t in outputs)


def _second(do, dlse, q, k, v, spec, sm_scale, precision, backend, grad, *given):
    tangents, tensors = Tangents(*given[: len(_NAMES)]), _tensors_of(given[len(_NAMES) :], spec)
    parsed = Spec.parse(spec)
    if parsed.plan:  # it was made for other tiles, and changes no result
        parsed, tensors = dataclasses.replace(parsed, plan=""), tensors._replace(plan=None)
    letters = "".join(letter for letter in grad if letter in GRADIENTS)
    problem = Problem.bind(q, k, v, parsed, sm_scale, precision, letters, (), tensors, tangents.letters)
    outputs = _empty(q, k, v, tensors, grad)
    named = zip(_NAMES[3:], tangents[3:], strict=True)
    tangents = Tangents(*tangents[:3], *(None if t is None else full_rank(name, t) for name, t in named))
    if problem.is_empty:
        for out in outputs:
            if out is not None:
                out.zero_()
        if outputs[1] is not None and tangents.sink is not None:
            outputs[1].copy_(tangents.sink[..., None].expand(outputs[1].shape))  # without keys lse is the sink
        return _packed(q, outputs)
    extra = () if tensors is NO_TENSORS else (_views(tensors), _views(Tensors(*outputs[5:])))
    try:
        with torch.autocast(q.device.type, enabled=False):
            second_derivative_module().second(problem, do, dlse, q, k, v, tangents, *outputs[:5], *extra)
    except (AttentionError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        raise _broken("torch", problem, "second derivative's", error) from error
    return _packed(q, outputs)


for _device in _DEVICES:
    _LIB.impl("attention_second", _second, _device)


@torch.library.register_fake("tilewise::attention_second", lib=_LIB)
def _second_fake(do, dlse, q, k, v, spec, sm_scale, precision, backend, grad, *given):
    return _packed(q, _empty(q, k, v, _tensors_of(given[len(_NAMES) :], spec), grad))


torch.library.register_vmap("tilewise::attention_second", second_rule(_SECOND), lib=_LIB)


def _refuse_third() -> BackendRefused:
    return BackendRefused(
        "tilewise.attention has no third derivative, and none is better than a wrong one. Detach what is differentiated too often, "
        "or use torch.nn.functional.scaled_dot_product_attention under sdpa_kernel(SDPBackend.MATH)."
    )


def _check_tangents(tangents: Sequence[Any], inputs: Sequence[Any], letters: str) -> None:
    """Refuse gradients of tangents that are larger than what they are tangents of, as those of a bias may be."""
    for letter, name, own, t in zip(GRADIENTS, _NAMES, inputs, tangents, strict=False):
        if letter in letters and t.shape != own.shape:
            raise InvalidInput(
                f"the tangent of {name} has shape {tuple(t.shape)} where {name} has {tuple(own.shape)}: its gradient is not known. "
                f"Give {name} that shape, with expand()."
            )


def _asked_for(ctx: Any) -> list[bool]:
    """Which arguments' gradients this backward pass asks for. Where that is not to be seen: all that need one."""
    needs = list(ctx.needs_input_grad)
    nodes: Any = getattr(ctx, "next_functions", ())
    if _will_execute is None or _current_graph_task() < 0 or _asks_for_all() or torch._C._are_functorch_transforms_active():
        return needs
    for at, (node, _) in zip(ctx.places, nodes, strict=False):
        if needs[at] and node is not None:
            with contextlib.suppress(RuntimeError):  # a leaf whose gradient torch.autograd.grad was asked for
                needs[at] = _will_execute(node)
    return needs


def _keep(ctx: Any, args: Sequence[Any], outputs: Sequence[torch.Tensor]) -> None:
    """Save the arguments of the operator in a Function's ctx."""
    given = list(args[_FIRST:]) + [None] * (len(_NAMES) + len(SLOTS) - len(args[_FIRST:]))
    ctx.count, ctx.arguments, ctx.grad = len(args), args[5:9], args[9]
    ctx.places = [at for at, t in enumerate(args) if isinstance(t, torch.Tensor)]
    ctx.save_for_backward(*args[:5], *given)
    ctx.save_for_forward(*args[:5], *given)
    ctx.mark_non_differentiable(*(out for letter, out in zip(_OUTPUTS, outputs, strict=True) if letter not in ctx.grad))
    ctx.set_materialize_grads(False)


def _backward_of_second(ctx: Any, *grads: Any) -> tuple[Any, ...]:
    """The gradients of the tangents, in which the operator is linear: by symmetry it gives them itself. All others are refused."""
    needs = _asked_for(ctx)
    if any(need for at, need in enumerate(needs) if not _FIRST <= at < _FIRST + len(_NAMES)):
        raise _refuse_third()
    do, dlse, q, k, v, *more = ctx.saved_tensors
    tangents, given = more[: len(_NAMES)], more[len(_NAMES) :]
    asked = grad_letters(*needs[_FIRST : _FIRST + len(_NAMES)])
    _check_tangents(tangents, (q, k, v, *given), asked)
    c_o, c_lse, *c = (None if t is None or letter not in ctx.grad else t for letter, t in zip(_OUTPUTS, grads, strict=True))
    found = _gradient_of_jvp(do, dlse, (q, k, v), c, given, ctx.arguments, asked)
    if c_o is not None or c_lse is not None:
        if torch._C._are_functorch_transforms_active():
            o, lse, rows, _ = _AttentionFunctorch.apply(q, k, v, *given, *ctx.arguments, asked)  # type: ignore[misc]
            backward: Any = _BackwardFunctorch.apply
        else:
            o, lse, rows, _ = _forward_autograd(q, k, v, *ctx.arguments, asked, *given)  # type: ignore[misc]
            backward = _backward_autograd
        outputs = backward(c_o, c_lse, q, k, v, o, lse, *ctx.arguments, asked, rows, *given)
        linear = zip(GRADIENTS, outputs, strict=True)
        found = {letter: add(t, found.get(letter)) for letter, t in linear if letter in asked}
    wanted = [None] * _FIRST + [found.get(letter) for letter in GRADIENTS] + [None] * len(SLOTS)
    return tuple(wanted[: ctx.count])


class _Second(torch.autograd.Function):
    """The operator inside a graph that is being recorded."""

    @staticmethod
    def forward(ctx: Any, *args: Any) -> Any:
        with torch._C._AutoDispatchBelowAutograd():
            outputs = _SECOND(*args)
        _keep(ctx, args, outputs)
        return outputs

    backward = staticmethod(_backward_of_second)  # type: ignore[assignment]


class _SecondFunctorch(torch.autograd.Function):
    """``_Second`` in the form that functorch transforms need."""

    generate_vmap_rule = True

    @staticmethod
    def forward(*args: Any) -> Any:
        return _SECOND(*args)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        _keep(ctx, inputs, output)

    backward = staticmethod(_backward_of_second)  # type: ignore[assignment]

    @staticmethod
    def jvp(ctx: Any, *moved: Any) -> Any:
        raise _refuse_third()


def _forward_mode() -> bool:
    """May a tensor have a tangent? A graph that is being traced does not tell that it is at a level of forward mode."""
    return forward_ad._current_level >= 0 or torch._C._len_torch_dispatch_stack() > 0


def _tangent(t: torch.Tensor | None) -> torch.Tensor | None:
    """The tangent of ``t`` at this level of forward mode; None if it has none, or one that is known to be zero."""
    if t is None or "Batched" in str(torch._C._dispatch_keys(t)):
        return None  # the vmap of torch.autograd.functional makes no dual of a tensor that is mapped
    _, tangent = torch._unpack_dual(t, level=0)  # type: ignore[attr-defined]
    return None if tangent is None or tangent._is_zerotensor() else tangent


def _second_autograd(*args: Any) -> Any:
    """The operator where autograd may be recording."""
    tensors = [t for t in args if isinstance(t, torch.Tensor)]
    if _forward_mode() and any(_tangent(t) is not None for t in tensors):
        raise _refuse_third()
    if torch.is_grad_enabled() and any(t.requires_grad for t in tensors):
        return _Second.apply(*args)
    with torch._C._AutoDispatchBelowAutograd():
        return _SECOND(*args)


def _second_dispatched(*args: Any) -> Any:
    _refuse_functorch()
    return _second_autograd(*args)


_LIB.impl("attention_second", _second_dispatched, "Autograd")


def _gradient_of_jvp(
    do: Any, dlse: Any, inputs: Sequence[Any], tangents: Sequence[Any], given: Sequence[Any], arguments: Sequence[Any], grad: str
) -> dict[str, Any]:
    """``t_o``, ``t_lse`` and the gradients by their letters in ``grad``; nothing where all of them are known to be zero.

    ``inputs``: q, k and v; ``given``: the tensors of the spec; ``arguments``: spec, sm_scale, precision and backend.
    """
    if do is None and dlse is None:
        grad = "".join(letter for letter in grad if letter in "ol")
    if not grad or all(t is None for t in tangents):
        return {}
    functorch = torch._C._are_functorch_transforms_active()
    call: Any = _SecondFunctorch.apply if functorch else _second_autograd
    outputs = call(do, dlse, *inputs, *arguments, grad, *tangents, *given)
    return {letter: out for letter, out in zip(_OUTPUTS, outputs, strict=True) if letter in grad}


def _unpacked(args: Sequence[Any]) -> tuple[list[Any], list[Any], Any, list[Any]]:
    """Arguments of the backward operator: the tensors do, dlse, q, k, v, o and lse; spec to grad; rows; the tensors of the spec."""
    more = list(args[13:])
    return list(args[:7]), list(args[7:12]), args[12] if len(args) > 12 else None, more + [None] * (len(SLOTS) - len(more))


def keep_arguments(ctx: Any, args: Sequence[Any], outputs: Sequence[torch.Tensor]) -> None:
    """Save the arguments of the backward operator in a Function's ctx."""
    tensors, ctx.arguments, rows, given = _unpacked(args)
    ctx.count = len(args)
    ctx.save_for_backward(*tensors, rows, *given)
    ctx.save_for_forward(*tensors, rows, *given)
    grad = ctx.arguments[-1]
    ctx.mark_non_differentiable(*(out for letter, out in zip(GRADIENTS, outputs, strict=True) if letter not in grad))
    ctx.set_materialize_grads(False)


def backward_again(ctx: Any, *grads: Any) -> tuple[Any, ...]:
    """The gradients of the backward operator's arguments. ``grads``: what came back for its outputs."""
    do, dlse, q, k, v, _, _, _, *given = ctx.saved_tensors
    *arguments, grad = ctx.arguments
    tangents = [t if letter in grad else None for letter, t in zip(GRADIENTS, grads, strict=True)]
    needs = (*ctx.needs_input_grad, *(False,) * (13 + len(SLOTS) - ctx.count))
    places = {"o": 0, "l": 1, "q": 2, "k": 3, "v": 4, "b": 13, "a": 14, "s": 15}
    letters = "".join(letter for letter, at in places.items() if needs[at])
    found = _gradient_of_jvp(do, dlse, (q, k, v), tangents, given, arguments, letters)
    out: list[Any] = [None] * max(ctx.count, 16)
    for letter, at in places.items():
        out[at] = found.get(letter)
    return tuple(out[: ctx.count])


def add(a: Any, b: Any) -> Any:
    """The sum of two gradients; None is zero."""
    return b if a is None else a if b is None else a + b


def moved_backward(saved: Sequence[Any], arguments: Sequence[Any], moved: Sequence[Any], backward: Any) -> tuple[Any, ...]:
    """The derivatives of the backward operator's outputs along tangents ``moved`` of do, dlse, q, k, v, bias, slopes and sink."""
    do, dlse, q, k, v, o, lse, rows, *given = saved
    *arguments, grad = arguments
    found = _gradient_of_jvp(do, dlse, (q, k, v), moved[2:], given, arguments, grad)
    linear: Any = dict.fromkeys(GRADIENTS)
    if moved[0] is not None or moved[1] is not None:
        outputs = backward(moved[0], moved[1], q, k, v, o, lse, *arguments, grad, rows, *given)
        linear = {letter: t for letter, t in zip(GRADIENTS, outputs, strict=True) if letter in grad}
    return tuple(add(linear.get(letter), found.get(letter)) for letter in GRADIENTS)


def moved_by_rule(ctx: Any, tangents: Sequence[Any]) -> tuple[Any, ...]:
    """``moved_backward`` for the ``jvp`` rule of the backward operator's function."""
    more = (*tangents[13:16], *(None,) * max(0, 16 - max(13, len(tangents))))
    return moved_backward(ctx.saved_tensors, ctx.arguments, (*tangents[:5], *more), _BackwardFunctorch.apply)


def dual_backward(args: Sequence[Any]) -> Any:
    """The backward operator on arguments some of which are dual tensors; None if none of them is."""
    if not _forward_mode():
        return None
    tensors, arguments, rows, given = _unpacked(args)
    movable = (*tensors[:5], *given[:3])
    moved = [_tangent(t) for t in movable]
    if all(t is None for t in moved):
        return None

    def primal(t: Any) -> Any:
        return None if t is None else forward_ad.unpack_dual(t, level=0).primal

    saved = [*map(primal, tensors), rows, *map(primal, given)]

    def backward(*own: Any) -> Any:
        if torch.is_grad_enabled():
            return _Backward.apply(*own)
        with torch._C._AutoDispatchBelowAutograd():
            return _BACKWARD(*own)

    outputs = backward(*saved[:7], *arguments, *saved[7:])
    tangents = moved_backward(saved, arguments, moved, backward)
    pairs = zip(outputs, tangents, strict=True)
    return tuple(out if t is None else forward_ad.make_dual(out, t, level=0) for out, t in pairs)


def through_tangents(
    cotangents: Sequence[Any], saved: Sequence[Any], tangents: Sequence[Any], arguments: Sequence[Any], grad: str, moved: str
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The gradients of the inputs (``grad``) and of their tangents (``moved``), from those of ``t_o`` and ``t_lse``, by letters.

    ``saved``: q, k, v, o, lse, rows and the tensors of the spec.
    """
    q, k, v, o, lse, rows, *given = saved
    do, dlse = cotangents
    _check_tangents(tangents, (q, k, v, *given), moved)
    found = _gradient_of_jvp(do, dlse, (q, k, v), tangents, given, arguments, grad)
    linear: dict[str, Any] = {}
    if moved:
        call: Any = _BackwardFunctorch.apply if torch._C._are_functorch_transforms_active() else _backward_autograd
        outputs = call(do, dlse, q, k, v, o, lse, *arguments, moved, rows, *given)
        linear = {letter: t for letter, t in zip(GRADIENTS, outputs, strict=True) if letter in moved}
    return found, linear


SECOND.update(
    backward_again=backward_again, dual_backward=dual_backward, keep_arguments=keep_arguments, moved_by_rule=moved_by_rule
)
