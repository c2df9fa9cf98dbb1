"""The two registered operators, their fake kernels, their batching rules, and the gradient.

The operators have fixed arity; the spec crosses as its string, the tensors that it names as optional arguments in the order of
``spec.SLOTS``, and gradients that nobody asked for come back with no elements.

In eager mode a Python ``autograd.Function`` stands above the operator; functorch transforms use a second one. A plain call
(``is_plain`` of all its tensors) skips the dispatcher, which would do nothing for it but call the operator's kernel.
Compiled and exported graphs hold the operator itself, whose Autograd kernel applies the same function, so that a graph trains as
eager code does. ``torch.library.register_autograd`` is not used: it gives forward-mode derivatives of zero in silence. Here they
have an operator of their own (``ops_jvp``), and so have second derivatives (``ops_second``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from .backends import forgetters, jvp_module_of, module_of, second_pass_of
from .batching import backward_rule, forward_rule
from .errors import AttentionError, BackendBroken, BackendRefused
from .functions import find, function_of, names_function
from .operands import describe, full_rank
from .plain import check_of, have_strides, is_plain, quick_empty
from .problem import GRADIENTS, Problem, check_precision, check_tensors, dtype_name, grad_letters, keeps_rows
from .select import capability, choose
from .spec import FN_SLOTS, NO_TENSORS, SLOTS, Spec, Tensors

__all__ = ["attention_before", "attention_op", "attention_plain", "attention_with_tensors", "bound_problem"]

_LIB = torch.library.Library("tilewise", "DEF")
_TENSORS = ", ".join(f"Tensor? {slot}=None" for slot in SLOTS)
_LIB.define(
    "attention_forward(Tensor q, Tensor k, Tensor v, str spec, float? sm_scale, str? precision, str backend, str grad,"
    f" {_TENSORS}) -> (Tensor, Tensor, Tensor, Tensor)"
)
_LIB.define(
    "attention_backward(Tensor? do, Tensor? dlse, Tensor q, Tensor k, Tensor v, Tensor o, Tensor lse, str spec,"
    f" float? sm_scale, str? precision, str backend, str grad, Tensor? rows=None, {_TENSORS})"
    " -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)"
)
_WANTS_MAXIMA = "returns:max_logit"
_DEVICES = ("CPU", "CUDA", "XPU")
_FORWARD = torch.ops.tilewise.attention_forward
_BACKWARD = torch.ops.tilewise.attention_backward
# The roads of tangents by name: ``ops_jvp``, which builds on this module, puts them here when it is imported.
FORWARD_MODE: dict[str, Callable[..., Any]] = {}
# And those of the derivatives of the backward pass: ``ops_second``.
SECOND: dict[str, Callable[..., Any]] = {}
# Real and fake kernels allocate through the same functions, so their shapes, dtypes and strides agree.


def _like(t: torch.Tensor, heads: int, last: int) -> torch.Tensor:
    """An empty tensor (batch, heads, seqlen, last) in the memory order of ``t``: its heads stay inside its rows if they were.

    The stride of a dim of size 1 means nothing and may differ between a traced and a real tensor, so it has no say.
    """
    batch, inner, seqlen, _ = t.shape
    if inner > 1 and seqlen > 1 and t.stride(1) < t.stride(2):
        return t.new_empty((batch, seqlen, heads, last)).transpose(1, 2)
    return t.new_empty((batch, heads, seqlen, last))


def _wide(q: torch.Tensor) -> torch.dtype:
    return torch.float64 if q.dtype == torch.float64 else torch.float32


def _empty_outputs(q: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return _like(q, q.shape[1], v.shape[3]), q.new_empty((q.shape[0], q.shape[1], q.shape[2]), dtype=_wide(q))


def _empty_rows(q: torch.Tensor, kept: bool) -> torch.Tensor:
    """What the backward pass must know of a row besides lse; no elements if that is nothing."""
    return q.new_empty((q.shape[0], q.shape[1], q.shape[2], 2) if kept else (0,), dtype=_wide(q))


def _empty_maxima(q: torch.Tensor, wanted: bool) -> torch.Tensor:
    """The largest score of each head (batch, heads_q); no elements if nobody asked for it."""
    return q.new_empty((q.shape[0], q.shape[1]) if wanted else (0,), dtype=_wide(q))


def _empty_gradients(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, tensors: Tensors, grad: str) -> list[Any]:
    """In the order of ``GRADIENTS``; ``None`` where nobody asks. That of a tensor that the spec names has its very shape."""
    wanted: list[Any] = [_like(t, t.shape[1], t.shape[3]) if name in grad else None for name, t in (("q", q), ("k", k), ("v", v))]
    return wanted + [t.new_empty(t.shape) if letter in grad else None for letter, t in zip("bas", tensors, strict=False)]


def _run(backend: str, problem: Problem, direction: str, *tensors: Any) -> Any:
    """Let a backend work, with autocast off inside: its own products have the dtypes they mean to have."""
    if direction in ("forward", "backward"):
        work = getattr(module_of(backend), direction)
    else:
        work = getattr((jvp_module_of if direction == "jvp" else second_pass_of)(backend), direction)
    try:
        if torch._C._is_any_autocast_enabled():
            with torch.autocast(tensors[0].device.type, enabled=False):
                return work(problem, *tensors)
        return work(problem, *tensors)
    except (AttentionError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        raise _broken(backend, problem, direction, error) from error


def _broken(backend: str, problem: Problem, direction: str, error: Exception) -> BackendBroken:
    own = problem.spec.function
    hint = f"Is it the score function {function_of(problem.spec).name!r}? check_score_fn runs it alone.\n" if own else ""
    return BackendBroken(
        f"backend {backend!r} accepted the problem and then failed in its {direction} pass: {type(error).__name__}: {error}\n"
        f"{hint}Problem: {problem}"
    )


@dataclass(slots=True)
class _Binding:
    """What is known of all calls with the same metadata: the problem, its backend, the outputs once they were made, and what the
    forward pass launched if it may be repeated."""

    problem: Problem
    backend: str
    is_empty: bool
    keeps_rows: bool
    wants_maxima: bool
    lacking: tuple[int, ...] | None = None  # the tensors of the spec that lack dims of their slots
    outputs: tuple[Any, ...] | None = None  # size, stride and dtype of each, which a pass makes
    kept: Any = None  # the launch, if it is all of the forward pass (``backends/__init__.py``)
    empty: Any = None  # allocates on the device of that launch while it is the current one
    arguments: tuple[Any, ...] = ()  # spec, sm_scale, precision and backend
    check: Any = None  # of calls like this one (``plain.check_of``)

    def empty_outputs(self, q: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if self.outputs is None:
            o, lse = _empty_outputs(q, v)
            self.outputs = tuple((tuple(t.shape), t.stride(), t.dtype) for t in (o, lse))
            return o, lse
        (size, stride, dtype), (lse_size, lse_stride, lse_dtype) = self.outputs
        device = q.device
        o = torch.empty_strided(size, stride, dtype=dtype, device=device)
        return o, torch.empty_strided(lse_size, lse_stride, dtype=lse_dtype, device=device)

    def empty_gradients(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, tensors: Tensors, grad: str) -> list[Any]:
        if self.outputs is None:
            grads = _empty_gradients(q, k, v, tensors, grad)
            self.outputs = tuple([None if t is None else (tuple(t.shape), t.stride(), t.dtype) for t in grads])
            return grads
        device = q.device
        return [
            None if form is None else torch.empty_strided(form[0], form[1], dtype=form[2], device=device) for form in self.outputs
        ]

    def views(self, tensors: Tensors) -> Tensors:
        """The tensors of the spec as backends take them."""
        if self.lacking is None:
            named = ((i, slot, t) for i, (slot, t) in enumerate(zip(SLOTS, tensors, strict=True)) if t is not None)
            self.lacking = tuple(i for i, slot, t in named if full_rank(slot, t) is not t)
        if not self.lacking:
            return tensors
        whole = list(tensors)
        for i in self.lacking:
            whole[i] = full_rank(SLOTS[i], whole[i])
        return Tensors(*whole)


_bound: dict[tuple[Any, ...], _Binding] = {}
_problems: dict[Problem, Problem] = {}
_MOST_BOUND = 4096
# The bindings of the last plain calls by all that is no tensor, latest first.
_before: dict[tuple[Any, ...], tuple[_Binding, ...]] = {}
_MOST_TRIED = 8


def _forget() -> None:
    """Forget all bindings: what they launch was made with configs."""
    _bound.clear()
    _before.clear()
    _problems.clear()


forgetters.append(_forget)


def _bind(q, k, v, spec, sm_scale, precision, backend, grad, also=(), tensors=NO_TENSORS, jvp="") -> _Binding:
    """The binding of a call. Calls that agree in all metadata, addresses modulo 16 included, share one."""
    key = (
        q.shape, q.stride(), q.dtype, q.device, q.data_ptr() % 16,
        k.shape, k.stride(), k.dtype, k.device, k.data_ptr() % 16,
        v.shape, v.stride(), v.dtype, v.device, v.data_ptr() % 16,
        spec, sm_scale, precision, backend, grad, jvp,
    )  # fmt: skip
    if also:
        key = (*key, *[(t.shape, t.stride(), t.dtype, t.device, t.data_ptr() % 16) for t in also])
    if tensors is not NO_TENSORS:
        key = (*key, *[t if t is None else (t.shape, t.stride(), t.dtype, t.device) for t in tensors])
        if tensors.bias is not None:
            key = (*key, tensors.bias.data_ptr() % 16)
    found = _bound.get(key)
    if found is None:
        problem = Problem.bind(q, k, v, Spec.parse(spec), sm_scale, precision, grad, also, tensors, jvp)
        # Equal problems become one object, which tables find without comparing fields.
        problem = _problems.setdefault(problem, problem)
        wants_maxima = problem.spec.returns == "max_logit"
        found = _Binding(problem, choose(problem, backend).backend, problem.is_empty, problem.keeps_rows, wants_maxima)
        found.arguments = (spec, sm_scale, precision, backend)
        if len(_bound) >= _MOST_BOUND:
            _forget()
        _bound[key] = found
    return found


def bound_problem(q, k, v, spec, backend, grad, tensors) -> tuple[Problem, str]:
    """The problem of a call, and its backend."""
    bound = _bind(q, k, v, spec, None, None, backend, grad, tensors=tensors)
    return bound.problem, bound.backend


def _tensors_of(given: tuple[torch.Tensor | None, ...], spec: str) -> Tensors:
    """The tensors of a call. A spec with a function but without tensors takes the road of those that have some."""
    return Tensors(*given) if names_function(spec) or any(t is not None for t in given) else NO_TENSORS


def _views(tensors: Tensors) -> Tensors:
    """The tensors as backends take them: views with all dims of their slots."""
    return Tensors(*(None if t is None else full_rank(slot, t) for slot, t in zip(SLOTS, tensors, strict=True)))


def _forward_plain(q, k, v, bound):
    """``(o, lse)`` of a call whose spec names no tensor."""
    kept = bound.kept
    # Memory that PyTorch's deterministic mode fills comes from its own function.
    if kept is not None and not _deterministic():
        stream = kept.stream()
        if stream is not None:
            (size, stride, dtype), (lse_size, lse_stride, lse_dtype) = bound.outputs
            o, lse = bound.empty(size, stride, dtype), bound.empty(lse_size, lse_stride, lse_dtype)
            to_o, to_lse = o.data_ptr(), lse.data_ptr()
            if not (to_o | to_lse) % 16:
                try:
                    kept.launch(stream, (q.data_ptr(), k.data_ptr(), v.data_ptr(), to_o, to_lse))
                except Exception as error:
                    raise _broken(bound.backend, bound.problem, "forward", error) from error
                return o, lse
    o, lse = bound.empty_outputs(q, v)
    if bound.is_empty:
        return o.zero_(), lse.fill_(float("-inf"))
    kept = _run(bound.backend, bound.problem, "forward", q, k, v, o, lse)
    if kept is not None and not (o.data_ptr() | lse.data_ptr()) % 16:
        bound.empty = quick_empty(q.device)
        bound.kept = None if bound.empty is None else kept
    return o, lse


def _forward_with(q, k, v, spec, sm_scale, precision, backend, grad, tensors):
    """``(o, lse, rows, maxima)`` of a call whose spec names tensors or more outputs; ``None`` for what is not wanted."""
    bound = _bind(q, k, v, spec, sm_scale, precision, backend, grad, tensors=tensors)
    o, lse = bound.empty_outputs(q, v)
    rows = _empty_rows(q, True) if bound.keeps_rows else None
    if bound.is_empty:
        lse.fill_(float("-inf"))
        if tensors.sink is not None:
            lse.copy_(full_rank("sink", tensors.sink)[..., None].expand(lse.shape))
        maxima = _empty_maxima(q, True).fill_(float("-inf")) if bound.wants_maxima else None
        return o.zero_(), lse, None if rows is None else rows.zero_(), maxima
    views = tensors if tensors is NO_TENSORS else bound.views(tensors)
    if not bound.wants_maxima:
        _run(bound.backend, bound.problem, "forward", q, k, v, o, lse, views, rows)
        return o, lse, rows, None
    by_row = torch.empty_like(lse)
    _run(bound.backend, bound.problem, "forward", q, k, v, o, lse, views, rows, by_row)
    return o, lse, rows, by_row.amax(-1)


def _forward(q, k, v, spec, sm_scale, precision, backend, grad, *given):
    tensors = _tensors_of(given, spec)
    rows = maxima = None
    if tensors is NO_TENSORS and _WANTS_MAXIMA not in spec:
        o, lse = _forward_plain(q, k, v, _bind(q, k, v, spec, sm_scale, precision, backend, grad))
    else:
        o, lse, rows, maxima = _forward_with(q, k, v, spec, sm_scale, precision, backend, grad, tensors)
    return o, lse, _empty_rows(q, False) if rows is None else rows, _empty_maxima(q, False) if maxima is None else maxima


def _backward_plain(do, dlse, q, k, v, o, lse, spec, sm_scale, precision, backend, grad, rows=None, *given):
    """The gradients in the order of ``GRADIENTS``; ``None`` for those that nobody asked for."""
    if do is None:
        do = torch.zeros_like(o)
    tensors = _tensors_of(given, spec)
    bound = _bind(q, k, v, spec, sm_scale, precision, backend, grad, also=(do, o), tensors=tensors)
    grads = bound.empty_gradients(q, k, v, tensors, grad)
    if bound.is_empty:
        for t in grads:
            if t is not None:
                t.zero_()
        if "s" in grad and dlse is not None:
            # Without keys lse is the sink itself.
            grads[5].copy_(dlse.sum(-1).sum_to_size(full_rank("sink", grads[5]).shape).view(grads[5].shape))
        return grads
    extra = ()
    if tensors is not NO_TENSORS:
        extra = (bound.views(tensors), rows, _views(Tensors(*grads[3:])))
    _run(bound.backend, bound.problem, "backward", do, dlse, q, k, v, o, lse, *grads[:3], *extra)
    return grads


def _backward(do, dlse, q, *args):
    return tuple(q.new_empty((0,)) if t is None else t for t in _backward_plain(do, dlse, q, *args))


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
    describe(parsed, _tensors_of(given, spec), q, k)
    return *_empty_outputs(q, v), _empty_rows(q, keeps_rows(parsed, grad)), _empty_maxima(q, parsed.returns == "max_logit")


@torch.library.register_fake("tilewise::attention_backward", lib=_LIB)
def _backward_fake(do, dlse, q, k, v, o, lse, spec, sm_scale, precision, backend, grad, rows=None, *given):
    grads = _empty_gradients(q, k, v, _tensors_of(given, spec), grad)
    return tuple(q.new_empty((0,)) if t is None else t for t in grads)


torch.library.register_vmap("tilewise::attention_forward", forward_rule(_FORWARD), lib=_LIB)
torch.library.register_vmap("tilewise::attention_backward", backward_rule(_BACKWARD), lib=_LIB)


def _refuse_trained(spec: str, given: tuple[torch.Tensor | None, ...]) -> None:
    """Refuse tensors of a score function that require a gradient."""
    if not names_function(spec) or not torch.is_grad_enabled():
        return
    trained = [slot for slot, t in zip(SLOTS, given, strict=False) if slot in FN_SLOTS and t is not None and t.requires_grad]
    if trained:
        function = function_of(Spec.parse(spec))
        name = function.tensors[FN_SLOTS.index(trained[0])]
        raise BackendRefused(
            f"tensor {name!r} of score function {function.name!r} requires a gradient, and there is none for such tensors: give "
            f"{name}.detach(), or make it a step that has one (tilewise.bias, tilewise.alibi)."
        )


def _refuse_functorch() -> None:
    if torch._C._are_functorch_transforms_active():
        raise BackendRefused(
            "torch.func's derivatives of tilewise.attention work in eager mode, not through a compiled or exported graph: "
            "call the transform outside torch.compile, or take the gradient with loss.backward() or torch.autograd.grad."
        )


class _Backward(torch.autograd.Function):
    """The backward operator inside a graph that is being recorded (``create_graph=True``), with its own gradient."""

    @staticmethod
    def forward(ctx: Any, *args: Any) -> Any:
        with torch._C._AutoDispatchBelowAutograd():
            grads = _BACKWARD(*args)
        SECOND["keep_arguments"](ctx, args, grads)
        return grads

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return SECOND["backward_again"](ctx, *grads)


class _BackwardFunctorch(torch.autograd.Function):
    """``_Backward`` in the form that functorch transforms need (``setup_context`` apart from ``forward``)."""

    generate_vmap_rule = True

    @staticmethod
    def forward(*args: Any) -> Any:
        return _BACKWARD(*args)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        SECOND["keep_arguments"](ctx, inputs, output)

    backward = _Backward.backward

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        return SECOND["moved_by_rule"](ctx, tangents)


def _backward_autograd(*args: Any) -> Any:
    """The backward operator where autograd may be recording."""
    duals = SECOND["dual_backward"](args)
    if duals is not None:
        return duals
    if torch.is_grad_enabled():
        return _Backward.apply(*args)
    with torch._C._AutoDispatchBelowAutograd():
        return _BACKWARD(*args)


def _backward_dispatched(*args: Any) -> Any:
    """The same where the dispatcher calls it."""
    _refuse_functorch()
    return _backward_autograd(*args)


_INPUTS = 3 + len(SLOTS)
_TRAINED = len(GRADIENTS) - 3  # the first slots, whose tensors may get a gradient
_ARGUMENTS = 5  # spec, sm_scale, precision, backend, grad; ``_Plain`` has one, the binding


# Does the backward pass that runs now go on to this node? PyTorch's own functions ask the same.
_will_execute: Callable[[Any], bool] | None = getattr(torch._C, "_will_engine_execute_node", None)
_current_graph_task: Callable[[], int] = getattr(torch._C, "_current_graph_task_id", lambda: -1)
# Does it go on to every node, as loss.backward() without inputs does? Then nothing is to be asked.
_asks_for_all: Callable[[], bool] = getattr(torch.autograd.Variable._execution_engine, "is_checkpoint_valid", lambda: False)


def _asked(ctx: Any, grad: str, given: Sequence[torch.Tensor | None]) -> str:
    """Those of the gradients ``grad`` that this very backward pass asks for.

    ``needs_input_grad`` says which inputs had to be differentiable when the graph was made: all of them, though
    ``torch.autograd.grad(loss, k)`` or ``loss.backward(inputs=[k])`` wants only one.
    """
    if len(grad) < 2 or _will_execute is None or _current_graph_task() < 0 or _asks_for_all():
        return grad
    # A node for each argument that is a tensor. Asking takes 0.1 us, or 10 to 20 where PyTorch answers by an error.
    names = [*"qkv", *(letter for letter, t in zip("bas", given, strict=False) if t is not None)]
    unwanted = ""
    for name, (node, _) in zip(names, ctx.next_functions, strict=False):
        if name in grad and node is not None:
            try:
                unwanted += "" if _will_execute(node) else name
            except RuntimeError:
                continue  # a leaf whose gradient torch.autograd.grad was asked for
    return "".join(letter for letter in grad if letter not in unwanted) if unwanted else grad


def _gradients(ctx: Any, do: torch.Tensor | None, dlse: torch.Tensor | None, static: bool = False, saved: Any = None) -> Any:
    """The gradients of a Function's arguments; ``static``: of all that may be asked for, since ``ctx`` has no nodes of its own.

    ``saved``: what stands for ``ctx.saved_tensors``.
    """
    nothing = (None,) * len(ctx.needs_input_grad)
    differentiable = min(max(3, len(nothing) - _ARGUMENTS), len(GRADIENTS))  # q, k and v are always there
    grad = grad_letters(*ctx.needs_input_grad[:differentiable])
    if (do is None and dlse is None) or not grad:
        return nothing
    q, k, v, o, lse, *more = ctx.saved_tensors if saved is None else saved
    given = more if any(t is not None for t in more[1:]) or names_function(ctx.arguments[0]) else ()
    if not static:
        grad = _asked(ctx, grad, more[1:])
    if torch._C._are_functorch_transforms_active():
        apply = _BackwardFunctorch.apply
    elif not torch.is_grad_enabled() and is_plain(*(t for t in (do, dlse, q, k, v, o, lse, *given) if t is not None)):
        apply = _backward_plain
    else:
        apply = _backward_autograd
    grads = apply(do, dlse, q, k, v, o, lse, *ctx.arguments, grad, *given)
    wanted = [g if name in grad else None for name, g in zip(GRADIENTS, grads, strict=True)]
    return (*wanted[:differentiable], *nothing[differentiable:])


class _Plain(torch.autograd.Function):
    """The kernel of the forward operator with its gradient, for a plain call."""

    @staticmethod
    def forward(ctx: Any, q, k, v, bound) -> Any:
        o, lse = _forward_plain(q, k, v, bound)
        ctx.save_for_backward(q, k, v, o, lse)
        ctx.arguments = bound.arguments
        ctx.set_materialize_grads(False)
        return o, lse

    @staticmethod
    def backward(ctx: Any, do: Any, dlse: Any) -> Any:  # type: ignore[override]
        return _gradients(ctx, do, dlse)


class _PlainWithTensors(torch.autograd.Function):
    """The same for a plain call whose spec names tensors: ``others`` are those that get no gradient."""

    @staticmethod
    def forward(ctx: Any, q, k, v, bias, slopes, sink, others, spec, sm_scale, precision, backend, grad) -> Any:
        tensors = Tensors(bias, slopes, sink, *others)
        o, lse, rows, maxima = _forward_with(q, k, v, spec, sm_scale, precision, backend, grad, tensors)
        ctx.save_for_backward(q, k, v, o, lse, rows, *tensors)
        ctx.arguments = (spec, sm_scale, precision, backend)
        if maxima is not None:
            ctx.mark_non_differentiable(maxima)
        ctx.set_materialize_grads(False)
        return o, lse, maxima

    @staticmethod
    def backward(ctx: Any, do: Any, dlse: Any, *_: Any) -> Any:  # type: ignore[override]
        return _gradients(ctx, do, dlse)


class _Attention(torch.autograd.Function):
    """The forward operator with its gradient. The arguments are q, k, v, the tensors of the spec, and then the rest."""

    @staticmethod
    def forward(ctx: Any, *args: Any) -> Any:
        inputs, rest = args[:_INPUTS], args[_INPUTS:]
        with torch._C._AutoDispatchBelowAutograd():
            o, lse, rows, maxima = _FORWARD(*inputs[:3], *rest, *inputs[3:])
        ctx.save_for_backward(*inputs[:3], o, lse, rows, *inputs[3:])
        ctx.arguments = rest[:-1]
        ctx.mark_non_differentiable(rows, maxima)
        ctx.set_materialize_grads(False)
        return o, lse, rows, maxima

    @staticmethod
    def backward(ctx: Any, do: Any, dlse: Any, *_: Any) -> Any:  # type: ignore[override]
        return _gradients(ctx, do, dlse)


class _AttentionFunctorch(torch.autograd.Function):
    """``_Attention`` in the form that functorch transforms need; 21 us dearer a call, so used only under them."""

    generate_vmap_rule = True

    @staticmethod
    def forward(*args: Any) -> Any:
        return _FORWARD(*args[:3], *args[_INPUTS:], *args[3:_INPUTS])

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        saved = (*inputs[:3], *output[:3], *inputs[3:_INPUTS])
        ctx.save_for_backward(*saved)
        ctx.save_for_forward(*saved)
        ctx.arguments = inputs[_INPUTS:-1]
        ctx.mark_non_differentiable(output[3])
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, do: Any, dlse: Any, *_: Any) -> Any:  # type: ignore[override]
        return _gradients(ctx, do, dlse, static=True)

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        # Rows have no derivative, but under vmap PyTorch would forget that, and break for want of one.
        return *FORWARD_MODE["by_rule"](ctx, tangents), torch.zeros_like(ctx.saved_tensors[5]), None


def _forward_autograd(q, k, v, spec, sm_scale, precision, backend, grad, *given):
    """The forward operator where autograd may be recording: then ``grad`` is found anew, as a graph's may be older than its inputs.

    Where it is not, ``grad`` stays: the forward half of a compiled graph runs without recording, for the backward half beside it.
    """
    _refuse_trained(spec, given)
    if torch.autograd.forward_ad._current_level >= 0:
        tangents = FORWARD_MODE["tangents_of"](q, k, v, given)
        if tangents is not None:
            return FORWARD_MODE["dual_forward"](q, k, v, spec, sm_scale, precision, backend, grad, given, tangents)
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


def _forward_dispatched(q, k, v, spec, sm_scale, precision, backend, grad, *given):
    """The same where the dispatcher calls it: in a graph, while that is traced, or by its own name."""
    found = FORWARD_MODE["traced"](q, k, v, spec, sm_scale, precision, backend, grad, given)
    if found is not None:
        return found
    _refuse_functorch()
    return _forward_autograd(q, k, v, spec, sm_scale, precision, backend, grad, *given)


_LIB.impl("attention_forward", _forward_dispatched, "Autograd")
_LIB.impl("attention_backward", _backward_dispatched, "Autograd")


def attention_op(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    spec: str,
    sm_scale: float | None,
    precision: str | None,
    backend: str,
    tensors: Tensors = NO_TENSORS,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """``(o, lse)``, differentiable where an input needs it, and the largest score of each head (no elements if the spec's
    ``returns`` does not ask for it). The tensors have passed ``check_kinds``."""
    given = () if all(t is None for t in tensors) else tensors
    args = (q, k, v, spec, sm_scale, precision, backend, "", *given)
    if torch.compiler.is_compiling():
        o, lse, _, maxima = _FORWARD(*args)
    elif torch._C._are_functorch_transforms_active():
        # Whether a transform outside wants a gradient is not to be seen from here.
        _refuse_trained(spec, tensors)
        function = find(Spec.parse(spec).function or "")
        grad = "q" if tensors.bias is not None or (function is not None and function.differentiable) else ""
        if torch.autograd.forward_ad._current_level >= 0:
            found = FORWARD_MODE["fused"](q, k, v, tensors, spec, sm_scale, precision, backend, grad)
            if found is not None:
                return (*found, q.new_empty(0))
        o, lse, _, maxima = _AttentionFunctorch.apply(q, k, v, *tensors, spec, sm_scale, precision, backend, grad)  # type: ignore[misc]
    else:
        # In eager mode the Autograd kernel is called by its name, which saves a trip through the dispatcher.
        o, lse, _, maxima = _forward_autograd(*args)  # type: ignore[misc]
    return o, lse, maxima


_deterministic: Callable[[], bool] = torch._C._get_deterministic_algorithms
_grad_enabled = torch.is_grad_enabled


def attention_before(
    q: Any, k: Any, v: Any, spec: str, sm_scale: float | None, precision: str | None, backend: str
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """``attention_plain`` for a call like one of the last that it took. ``None`` where this one may be of another kind: q, k and v
    may be anything. The thread ``is_unwatched``, the other arguments are valid, and autocast is off."""
    tried = _before.get((spec, sm_scale, precision, backend, _grad_enabled()))
    if tried is None or not have_strides(q, k, v):
        return None
    for bound in tried:
        if bound.check(q, k, v):
            # The check looks at no addresses. Those of a binding that has one are multiples of 16.
            return None if (q.data_ptr() | k.data_ptr() | v.data_ptr()) % 16 else _attend(q, k, v, bound)
    return None


def _remember(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bound: _Binding) -> None:
    """Let ``attention_before`` find the binding of this plain call, if its tensors are aligned and three objects: a check refuses
    one object in two places."""
    if (q.data_ptr() | k.data_ptr() | v.data_ptr()) % 16 or q is k or q is v or k is v:
        return
    # One that refuses this call was made where the thread had other keys (in inference mode, say).
    if bound.check is None or not bound.check(q, k, v):
        bound.check = check_of(q, k, v)
        if bound.check is None:
            return
    key = *bound.arguments, _grad_enabled()
    if len(_before) >= _MOST_BOUND:
        _before.clear()
    _before[key] = (bound, *[b for b in _before.get(key, ()) if b is not bound])[:_MOST_TRIED]


def _attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bound: _Binding) -> tuple[torch.Tensor, torch.Tensor]:
    """A plain call, with its gradient if the problem asks for one."""
    return _apply_plain(q, k, v, bound) if bound.problem.grad else _forward_plain(q, k, v, bound)


# What ``Function.apply`` comes to where no functorch transform is active, as in every plain call.
_apply_plain: Callable[..., Any] = super(torch.autograd.Function, _Plain).apply  # type: ignore[misc]


def attention_plain(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, spec: str, sm_scale: float | None, precision: str | None, backend: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """``attention_op`` for a call that ``is_plain`` and whose spec names no tensor."""
    grad = grad_letters(q.requires_grad, k.requires_grad, v.requires_grad) if _grad_enabled() else ""
    bound = _bind(q, k, v, spec, sm_scale, precision, backend, grad)
    if not torch._C._is_any_autocast_enabled():  # calls under autocast are not looked for
        _remember(q, k, v, bound)
    return _attend(q, k, v, bound)


def attention_with_tensors(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    spec: str,
    sm_scale: float | None,
    precision: str | None,
    backend: str,
    tensors: Tensors,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """The same for a spec that names tensors, which are plain too; the last output is the largest score of each head, if wanted."""
    if torch.is_grad_enabled():
        _refuse_trained(spec, tensors)
        trained, others = tensors[:_TRAINED], tensors[_TRAINED:]
        grad = grad_letters(*[t is not None and t.requires_grad for t in (q, k, v, *trained)])
        if grad:
            return _PlainWithTensors.apply(q, k, v, *trained, others, spec, sm_scale, precision, backend, grad)  # type: ignore
    o, lse, _, maxima = _forward_with(q, k, v, spec, sm_scale, precision, backend, "", tensors)
    return o, lse, maxima
