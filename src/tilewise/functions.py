"""Score functions of the user's own: ``score_fn`` checks one, keeps it in a registry, and gives the spec of its step.

A spec crosses the operators as a string, so a step is a key: ``fn:NAME/TENSORS@HASH``. The hash is of all that the function, its
derivative and its twin are made of: their source, that of what they call, and the values of globals that they read. So an edited
function is another step, with kernels, bindings and choices of its own; nothing that was kept for the old one can serve it.
``Watched`` holds what may change behind a spec's back, and a call whose function changed since is refused.
"""

from __future__ import annotations

import dis
import hashlib
import inspect
import types
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from .errors import BackendRefused, InvalidInput
from .spec import FN_SLOTS, Spec, Tensors

__all__ = ["ScoreFunction", "check_fresh", "find", "function_of", "names_function", "score_fn"]

_POSITIONAL = ("score", "batch", "head", "q_pos", "kv_pos")
_EXAMPLE = "(score, batch, head, q_pos, kv_pos, *tensors)"
_KNOWN_LIBRARIES = ("triton", "torch", "math", "numpy", "builtins", "operator", "functools")
Watched = tuple[dict[str, Any], str, Any]  # the namespace, a name in it, and what it held


@dataclass(frozen=True, eq=False)
class ScoreFunction:
    """One registered function. ``fn`` and ``derivative`` are Triton functions, ``None`` where there is none.

    ``constant_slope``: the derivative is 1 everywhere. ``tensors``: the names of those that it takes, in order. ``uses_batch``:
    does any of its parts read the index of the batch?
    """

    step: str
    name: str
    fn: Any
    derivative: Any
    constant_slope: bool
    twin: Callable[..., torch.Tensor]
    twin_derivative: Callable[..., torch.Tensor] | None
    tensors: tuple[str, ...]
    uses_batch: bool
    watched: tuple[Watched, ...]

    @property
    def differentiable(self) -> bool:
        """Is it said what its derivative is? Of a twin without a Triton function autograd knows it."""
        return self.fn is None or self.constant_slope or self.derivative is not None

    def scores(self, s: torch.Tensor, *places: torch.Tensor | None) -> torch.Tensor:
        """The twin's scores. ``places``: batch, head, q_pos and kv_pos, which broadcast to ``s``, and the tensors."""
        return self._checked(self.twin(s, *places), s, "twin")

    def slopes(self, s: torch.Tensor, *places: torch.Tensor | None) -> torch.Tensor | None:
        """The derivative at the scores ``s``; ``None`` stands for 1 everywhere."""
        if self.constant_slope:
            return None
        if self.twin_derivative is not None:
            return self._given_slopes(s, places)
        with _Recording():
            at = s.detach().requires_grad_()
            out = self.scores(at, *places)
            (slopes,) = torch.autograd.grad(out.sum(), at, allow_unused=True) if out.requires_grad else (None,)
        return torch.zeros_like(s) if slopes is None else slopes

    def curves(self, s: torch.Tensor, *places: torch.Tensor | None) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """The first and the second derivative at the scores ``s``; ``None`` stands for 1 everywhere, and for 0.

        Raises:
            BackendRefused: autograd cannot differentiate the twin, or its derivative, once more.
        """
        if self.constant_slope:
            return None, None
        try:
            with _Recording():
                at = s.detach().requires_grad_()
                if self.twin_derivative is None:
                    return self._curves_of_twin(at, places)
                slopes = self._given_slopes(at, places)
                if slopes.requires_grad:
                    return slopes.detach(), torch.autograd.grad(slopes.sum(), at, allow_unused=True)[0]
                # It does not depend on the score, or does so in secret: the twin tells.
                return slopes, self._curves_of_twin(at, places, needed=True)[1]
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            raise BackendRefused(
                f"score function {self.name!r} has no second derivative that autograd can find: {error}. Write its twin, or its "
                "twin_derivative, in PyTorch operations that can be differentiated again."
            ) from error

    def _given_slopes(self, s: torch.Tensor, places: tuple[torch.Tensor | None, ...]) -> torch.Tensor:
        """What ``twin_derivative`` says, never in the memory of the scores, which its callers write over."""
        out = self._checked(self.twin_derivative(s, *places), s, "twin_derivative")  # type: ignore[misc]
        return out.clone() if out.untyped_storage().data_ptr() == s.untyped_storage().data_ptr() else out

    def _curves_of_twin(
        self, at: torch.Tensor, places: tuple[torch.Tensor | None, ...], needed: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """What autograd finds. ``needed``: a twin of which it knows nothing is an error, and not a constant."""
        out = self.scores(at, *places)
        if not out.requires_grad:
            if needed:
                raise RuntimeError("neither twin nor twin_derivative leaves a trace of what it does to the score")
            return torch.zeros_like(at), None
        upstream = torch.ones_like(out).requires_grad_()
        (slopes,) = torch.autograd.grad(out, at, upstream, create_graph=True)
        bends, followed = torch.autograd.grad(slopes.sum(), (at, upstream), allow_unused=True)
        if followed is None:  # every derivative is linear in its upstream gradient, so this one hides what it does
            raise RuntimeError("the derivative of twin cannot be differentiated")
        return slopes.detach(), bends

    def _checked(self, out: Any, s: torch.Tensor, what: str) -> torch.Tensor:
        if not isinstance(out, torch.Tensor):
            out = torch.as_tensor(out, dtype=s.dtype, device=s.device)
        fits = out.dim() <= s.dim() and all(n in (1, m) for n, m in zip(reversed(out.shape), reversed(s.shape), strict=False))
        if not out.is_floating_point() or not fits:
            raise InvalidInput(
                f"the {what} of score function {self.name!r} returned {out.dtype} of shape {tuple(out.shape)} for scores of shape "
                f"{tuple(s.shape)}: it must be elementwise, on arguments that broadcast (of any number of dims)."
            )
        return out.to(s.dtype).expand(s.shape)


class _Recording:
    """Lets autograd record, also inside an operator, where the dispatcher passes it by: its keys are no longer left out."""

    def __enter__(self) -> None:
        left_out = torch._C._dispatch_tls_local_exclude_set()
        for key in ("AutogradCPU", "AutogradCUDA", "AutogradXPU", "AutogradOther", "ADInplaceOrView"):
            left_out = left_out.remove(getattr(torch._C.DispatchKey, key))
        included = torch._C._dispatch_tls_local_include_set().add(torch._C.DispatchKey.ADInplaceOrView)
        self._held = (
            torch.inference_mode(False),
            torch._C._ForceDispatchKeyGuard(included, left_out),
            torch.enable_grad(),
        )
        for context in self._held:
            context.__enter__()

    def __exit__(self, *error: Any) -> None:
        for context in reversed(self._held):
            context.__exit__(*error)


_registry: dict[str, ScoreFunction] = {}


def find(step: str) -> ScoreFunction | None:
    """The function of a step that this process registered."""
    return _registry.get(step)


def names_function(spec: str) -> bool:
    """Does the string of a spec name a score function?"""
    return "fn:" in spec


def function_of(spec: Spec) -> ScoreFunction:
    """The function of a spec that has one.

    Raises:
        InvalidInput: this process has not registered it.
    """
    found = _registry.get(spec.function or "")
    if found is None:
        raise InvalidInput(
            f"the spec names the score function {spec.function!r}, which this process has not registered: build the spec with "
            "tilewise.score_fn. The string of a spec holds the hash of a function, not the function; an edited one has another."
        )
    return found


def check_fresh(spec: Spec) -> None:
    """Raise InvalidInput if anything that the spec's function was registered with has been changed since."""
    found = function_of(spec)
    for namespace, name, held in found.watched:
        now = namespace.get(name)
        if now is not held and not _same(now, held):
            raise InvalidInput(
                f"the score function {found.name!r} uses {name}, which has changed since tilewise.score_fn was called: call that "
                "again, so that kernels are made anew."
            )


def _same(a: Any, b: Any) -> bool:
    a, b = (getattr(x, "value", x) for x in (a, b))
    return type(a) is type(b) and isinstance(a, int | float | str | bool | tuple) and a == b


def _is_jit(thing: Any) -> bool:
    """Is this a ``@triton.jit`` function, of the compiler or of the interpreter?"""
    return type(thing).__module__.partition(".")[0] == "triton" and type(thing).__name__ in ("JITFunction", "InterpretedFunction")


def _function(thing: Any) -> Any:
    """The Python function behind a Triton function, or the thing itself."""
    return thing.fn if _is_jit(thing) else thing


class _Reader:
    """Reads what functions are made of: a text to hash, and what of it may change."""

    def __init__(self) -> None:
        self.text: list[str] = []
        self.watched: list[Watched] = []
        self._seen: set[int] = set()

    def read(self, thing: Any) -> None:
        """Add a function, what it calls, and the values of the globals that it reads."""
        if id(thing) in self._seen:
            return
        self._seen.add(id(thing))
        function = _function(thing)
        code = getattr(function, "__code__", None)
        if code is None:
            self.text.append(f"{type(thing).__qualname__} {id(thing)}")
            return
        self.text.append(_code_text(code))
        if _is_jit(thing):
            # Triton compiles the text. Its own key knows all that it would compile anew for.
            self.text.append(getattr(thing, "src", None) or inspect.getsource(function))
            self.text.append(str(getattr(thing, "cache_key", "")))
        self.text.append(repr((function.__defaults__, function.__kwdefaults__)))
        names = set(_names(code))
        for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
            self._value(name, cell.cell_contents, names)
        namespace = function.__globals__
        for name in sorted(names & namespace.keys()):
            if self._value(name, namespace[name], names) and _is_jit(thing):
                self.watched.append((namespace, name, namespace[name]))

    def _value(self, name: str, value: Any, names: set[str]) -> bool:
        """Add what a name stands for; False for libraries and whatever else does not change."""
        if isinstance(value, types.ModuleType):
            if value.__name__.partition(".")[0] not in _KNOWN_LIBRARIES:
                for inner in sorted(names & vars(value).keys()):
                    self._value(f"{name}.{inner}", vars(value)[inner], names - {inner})
            return False
        if _is_jit(value) or isinstance(value, types.FunctionType):
            if (_function(value).__module__ or "").partition(".")[0] in _KNOWN_LIBRARIES:
                return False
            self.text.append(name)
            self.read(value)
            return True
        if value is None or isinstance(value, int | float | str | bool | tuple) or type(value).__name__ == "constexpr":
            self.text.append(f"{name} = {value!r}")
            return True
        if not isinstance(value, type | types.BuiltinFunctionType):
            self.text.append(f"{name} is {type(value).__qualname__} {id(value)}")
        return False


def _code_text(code: types.CodeType) -> str:
    constants = (_code_text(c) if isinstance(c, types.CodeType) else repr(c) for c in code.co_consts)
    return " ".join((code.co_code.hex(), *constants, *code.co_names, *code.co_varnames, *code.co_freevars))


def _names(code: types.CodeType) -> Iterator[str]:
    """The names of globals and attributes that a function's code reads, that of functions inside it included."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names(constant)


def _reads_batch(thing: Any) -> bool:
    """Does a function read its second argument? True where that is not to be seen."""
    code = getattr(_function(thing), "__code__", None)
    if code is None or code.co_argcount < 2:
        return True
    name = code.co_varnames[1]
    reads = (i.argval for i in dis.get_instructions(code) if i.opname.startswith("LOAD"))
    return name in code.co_cellvars or any(name == read or (isinstance(read, tuple) and name in read) for read in reads)


def _tensor_names(what: str, thing: Any, given: tuple[str, ...]) -> tuple[str, ...]:
    """The names of the tensors that a function takes, from its signature."""
    parameters = inspect.signature(_function(thing)).parameters.values()
    plain = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    wrong = [p.name for p in parameters if p.kind is p.KEYWORD_ONLY and p.default is p.empty]
    rest = any(p.kind is p.VAR_POSITIONAL for p in parameters)
    if _is_jit(thing) and (rest or any(p.default is not p.empty for p in parameters)):
        raise InvalidInput(f"{what} has parameters with defaults or *args, expected {_EXAMPLE} with each tensor by its name.")
    own = tuple(plain[len(_POSITIONAL) :])
    wanted = len(_POSITIONAL) + len(given)
    if wrong or (len(plain) > wanted if rest else len(plain) != wanted):
        raise InvalidInput(
            f"{what} takes ({', '.join((*plain, *wrong))}), expected {_EXAMPLE}: {len(_POSITIONAL)} arguments and one for each of "
            f"the {len(given)} tensors{': ' + ', '.join(given) if given else ''}."
        )
    if set(own) == set(given) and own != given and not _is_jit(thing):
        raise InvalidInput(f"{what} takes the tensors in the order {', '.join(own)}, but fn in the order {', '.join(given)}.")
    return own


def _check_fn(what: str, thing: Any, given: tuple[str, ...]) -> tuple[str, ...]:
    """Check a Triton function and give the names of its tensors, which must be those that are given."""
    if not _is_jit(thing):
        raise InvalidInput(
            f"{what} must be a @triton.jit function, got {thing!r} of type {type(thing).__name__}. One of PyTorch goes into twin."
        )
    own = _tensor_names(what, thing, given)
    if set(own) != set(given):
        names = f"{', '.join(own)}, but tensors holds {', '.join(given)}"
        raise InvalidInput(f"{what} takes the tensors {names}: the names must be the same.")
    return own


def score_fn(
    fn: Any,
    *,
    twin: Callable[..., torch.Tensor],
    derivative: Any = None,
    twin_derivative: Callable[..., torch.Tensor] | None = None,
    tensors: dict[str, torch.Tensor] | None = None,
    name: str | None = None,
    align: str = "bottom_right",
) -> Spec:
    """Score step ``s -> fn(s, batch, head, q_pos, kv_pos, *tensors)``: a function of the user's own inside the kernels.

    Elementwise: in a kernel ``score`` is a float32 tile (natural units, after sm_scale and the steps before), ``batch`` and
    ``head`` (of queries) are scalars, ``q_pos`` and ``kv_pos`` are int32 and broadcast to the tile. A result of ``-inf`` hides the
    key; a row of nothing else sees no key. The function is also called for pairs that the mask hides, and what it says of them is
    thrown away; positions never lie beyond the ends of the sequences, so a load that is right for every pair of the call is right.

    Args:
        fn: a ``@triton.jit`` function ``(score, batch, head, q_pos, kv_pos, *tensors) -> score``. ``None``: there is none, and only
            the backends that are written in PyTorch take the spec.
        twin: the same in PyTorch: elementwise on tensors that broadcast, of any number of dims, in place of nothing. ``score`` is
            float32 or float64. The CPU and the oracle use it, and ``tilewise.testing.check_score_fn`` holds fn to it.
        derivative: d fn / d score, a ``@triton.jit`` function with the arguments of fn; or 1.0 where fn only adds what does not
            depend on the score (or hides keys). ``None`` (the default): gradients through the step are refused.
        twin_derivative: the same in PyTorch. ``None`` (the default): autograd takes the derivative of twin.
        tensors: up to 4, by the names that fn's parameters have after the first five. Each is contiguous and reaches fn as a
            pointer to its first element, for loads with index arithmetic of its own; twin gets the tensor. Any dtype but bool and
            complex. None of them gets a gradient, and one that requires it is refused.
        name: an identifier, for strings and messages. Default: that of fn, or of twin.
        align: which key the position of a query is counted from; that of the mask.

    Returns:
        A spec to combine with others. Its string names the function by a hash of its source, callees and globals.

    Raises:
        InvalidInput: fn or derivative is no ``@triton.jit`` function, a function has other arguments, tensors has other names.
    """
    if not isinstance(tensors, Mapping | None):
        raise InvalidInput(
            f"tensors must be a dict of tensors by the names that fn's parameters have, got {type(tensors).__name__}: "
            'give tensors={"table": table}.'
        )
    given = dict(tensors or {})
    names = tuple(given)
    if len(names) > len(FN_SLOTS):
        raise InvalidInput(f"a score function takes at most {len(FN_SLOTS)} tensors, got {len(names)}: pack them into fewer.")
    if fn is not None:
        names = _check_fn("fn", fn, names)
    if not callable(twin) or _is_jit(twin):
        raise InvalidInput(f"twin must be a function of PyTorch tensors, got {twin!r} of type {type(twin).__name__}.")
    _tensor_names("twin", twin, names)
    constant = isinstance(derivative, int | float) and not isinstance(derivative, bool)
    if constant and derivative != 1:
        raise InvalidInput(f"derivative is {derivative}, expected a @triton.jit function, or 1.0 where fn only adds to the score.")
    if derivative is not None and not constant:
        own = _check_fn("derivative", derivative, names)
        if own != names:
            orders = f"{', '.join(own)}, but fn in the order {', '.join(names)}"
            raise InvalidInput(f"derivative takes the tensors in the order {orders}.")
    if twin_derivative is not None:
        if not callable(twin_derivative) or _is_jit(twin_derivative):
            raise InvalidInput(f"twin_derivative must be a function of PyTorch tensors, got {twin_derivative!r}.")
        _tensor_names("twin_derivative", twin_derivative, names)
    called = name if name is not None else getattr(twin if fn is None else fn, "__name__", "score_fn").strip("<>")
    if not isinstance(called, str) or not called.isidentifier() or not called.isascii():
        raise InvalidInput(f"name is {called!r}, expected an identifier: letters, digits and _.")
    for tensor_name, t in given.items():
        _check_tensor(called, tensor_name, t)
    parts = (fn, None if constant else derivative, twin, twin_derivative)
    step, watched = _identified(called, parts, names, constant)
    _registry[step] = ScoreFunction(
        step,
        called,
        fn,
        None if constant else derivative,
        constant,
        twin,
        twin_derivative,
        names,
        any(_reads_batch(part) for part in parts if part is not None),
        watched,
    )
    held = {slot: given[n] for slot, n in zip(FN_SLOTS, names, strict=False)}
    return Spec(align=align, score=(step,), tensors=Tensors(**held))


def _check_tensor(called: str, name: str, t: Any) -> None:
    """What can be known of a tensor before a call."""
    if not isinstance(t, torch.Tensor):
        raise InvalidInput(f"tensor {name!r} of score function {called!r} must be a torch.Tensor, got {type(t).__name__}.")
    if t.dtype == torch.bool or t.is_complex():
        raise InvalidInput(f"tensor {name!r} of score function {called!r} is {t.dtype}: cast it, to torch.int8 say.")


def _identified(name: str, parts: tuple[Any, ...], tensors: tuple[str, ...], constant: bool) -> tuple[str, tuple[Watched, ...]]:
    """The step, and what must stay as it is for the step to mean what it says."""
    reader = _Reader()
    try:
        for part in parts:
            reader.text.append("--")
            if part is not None:
                reader.read(part)
    except (OSError, RuntimeError, TypeError) as error:
        raise InvalidInput(f"the source of score function {name!r} cannot be read: {error}") from error
    text = "\n".join((name, str(constant), *tensors, *reader.text))
    digest = hashlib.sha256(text.encode()).hexdigest()[:16]
    return f"fn:{name}/{len(tensors)}@{digest}", tuple(reader.watched)
