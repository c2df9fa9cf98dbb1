"""The backends. Each has ``forward(problem, q, k, v, o, lse)`` and ``backward(problem, do, dlse, q, k, v, o, lse, dq, dk, dv)``.

A backend that takes specs that name tensors has three more arguments, given only for such specs: ``tensors``, views with all dims
of their slots; ``rows`` (batch, heads_q, seqlen_q, 2), the largest score of a row and the logarithm of its sum over that one, which
only problems with ``keeps_rows`` need; ``maxima`` (batch, heads_q, seqlen_q), forward, given only if the spec's ``returns`` asks
for the largest score; and, backward, ``grads``, the gradients of bias, slopes and sink that are wanted.

A backend may have ``column_sums(problem, q, k, lse, out, tensors)`` and ``weights(problem, q, k, lse, rows, out, tensors)`` besides
(``Capability.returns`` says so). One with forward-mode derivatives has
``jvp(problem, q, k, v, o, lse, t_o, t_lse, tangents)``, with ``tensors`` and ``rows`` for such specs, in the module that ``_JVP``
names.

``forward`` may return a launch that is all it did, if it may be repeated (``launching.Kept``: ``stream`` says whether now, and
``launch`` takes the addresses of q, k, v, o and lse), and must return None otherwise.

All fill tensors that the caller allocated. They know nothing of autograd, of one another, or of fallback; imports happen here,
on first use, so that a machine without Triton can import tilewise.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from types import ModuleType

from .. import configs
from ..errors import BackendBroken

__all__ = ["forget", "forgetters", "jvp_module_of", "module_of", "second_derivative_module", "second_pass_of"]

_MODULES = {
    "hopper": "tilewise.backends.hopper",
    "triton": "tilewise.backends.triton",
    "torch": "tilewise.backends.torch_tiles",
    "reference": "tilewise.reference",
}
# Second passes over the scores are kept apart.
_SECOND = {"triton": "tilewise.backends.triton.columns", "torch": "tilewise.backends.torch_weights"}
_JVP = {
    "triton": "tilewise.backends.triton.jvp_launch",
    "torch": "tilewise.backends.torch_jvp",
    "reference": "tilewise.reference",
}
_loaded: dict[str, ModuleType] = {}
# What else keeps something that was made with a config, above the backends.
forgetters: list[Callable[[], None]] = []


def second_pass_of(backend: str) -> ModuleType:
    """The module that has ``weights`` or ``column_sums`` of a backend."""
    return importlib.import_module(_SECOND[backend]) if backend in _SECOND else module_of(backend)


def module_of(backend: str) -> ModuleType:
    """The module of a backend that ``select.choose`` named."""
    return _loaded.get(backend) or _load(backend, backend, _MODULES[backend])


def jvp_module_of(backend: str) -> ModuleType:
    """The module with the forward-mode derivative of a backend that has one."""
    return _loaded.get(f"{backend} jvp") or _load(f"{backend} jvp", backend, _JVP[backend])


def second_derivative_module() -> ModuleType:
    """The module with the second derivatives of all backends."""
    return _loaded.get("second") or _load("second", "torch", "tilewise.backends.torch_second")


def _load(key: str, backend: str, name: str) -> ModuleType:
    try:
        module = _loaded[key] = importlib.import_module(name)
    except ImportError as error:
        raise BackendBroken(f"backend {backend!r} accepted the problem but cannot be imported: {error}") from error
    return module


def forget() -> None:
    """Forget every config that was looked up, and what was made of it, so that the next call sees records as they are now."""
    configs.forget()
    for name in {*_MODULES.values(), *_JVP.values()}:
        own = getattr(sys.modules.get(name), "forget", None)
        if own is not None:
            own()
    for each in forgetters:
        each()
