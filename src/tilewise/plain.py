"""Which calls are plain: nothing stands between them and an operator's kernel; and which are like one that was made before.

The dispatcher reads two sets of keys, that of each tensor and that of the thread, and only the keys listed here lead to the kernel
alone. Whatever else may happen to a call has a key of its own: functorch transforms, dispatch modes (fake tensors,
functionalization, export, checkpointing policies), tracing, subclasses, sparse, nested and quantized tensors, views that negate,
tensors known to be zero, other devices.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

__all__ = ["are_plain", "check_of", "have_strides", "is_plain", "is_unwatched", "quick_empty"]

_PLAIN_TENSOR = frozenset(("CPU", "CUDA", "ADInplaceOrView", "AutogradCPU", "AutogradCUDA", "AutocastCPU", "AutocastCUDA"))
_PLAIN_THREAD = frozenset(("BackendSelect", "ADInplaceOrView"))
_PLAIN_TYPES = (torch.Tensor, torch.nn.Parameter)
_keys_of = torch._C._dispatch_keys
_keys_of_thread = torch._C._dispatch_tls_local_include_set
_torch_functions = torch._C._len_torch_function_stack
_profiled: Callable[[], bool] = torch.autograd._profiler_enabled  # type: ignore[attr-defined]
_forward_ad: Any = torch.autograd.forward_ad
_plain_tensors: dict[int, bool] = {}
_plain_threads: dict[int, bool] = {}


def _judge(keys: Any, plain: frozenset[str], known: dict[int, bool]) -> bool:
    """Are all of these keys plain? The answer is kept in ``known``."""
    names = str(keys).removeprefix("DispatchKeySet(").removesuffix(")").split(", ")
    answer = known[keys.raw_repr()] = plain.issuperset(names)
    return answer


def is_unwatched() -> bool:
    """Does nobody watch or change the operators that this thread calls?"""
    if torch.compiler.is_compiling():
        return False
    keys = _keys_of_thread()
    known = _plain_threads.get(keys.raw_repr())
    if not (_judge(keys, _PLAIN_THREAD, _plain_threads) if known is None else known):
        return False
    return _torch_functions() == 0 and _forward_ad._current_level < 0 and not _profiled()  # a profiler's table shows the operator


def are_plain(*tensors: Any) -> bool:
    """Are all of these dense tensors of their own type?"""
    for t in tensors:
        if type(t) not in _PLAIN_TYPES:
            return False
        keys = _keys_of(t)
        known = _plain_tensors.get(keys.raw_repr())
        if not (_judge(keys, _PLAIN_TENSOR, _plain_tensors) if known is None else known):
            return False
    return True


def is_plain(*tensors: Any) -> bool:
    """May a call with these skip the dispatcher? Autocast must be applied before."""
    return is_unwatched() and are_plain(*tensors)


def have_strides(q: Any, k: Any, v: Any) -> bool:
    """Are these tensors of plain types with as many strides each? Then they may be given to a check of ``check_of``."""
    if type(q) not in _PLAIN_TYPES or type(k) not in _PLAIN_TYPES or type(v) not in _PLAIN_TYPES:
        return False
    try:
        return len(q.stride()) == len(k.stride()) == len(v.stride())
    except RuntimeError:  # nested and sparse tensors have none
        return False


def check_of(*tensors: torch.Tensor) -> Callable[..., bool] | None:
    """A check whether other tensors have the types, the dispatch keys (with those that the thread adds and excludes), dtypes,
    devices, shapes, strides and ``requires_grad`` of these; addresses have no say. It refuses one object in two places.

    It is what a compiled graph asks before it runs: 0.4 us for three tensors whose keys and metadata take Python 4 us to read. It
    reads strides first, and a nested tensor, which has none, ends the process there: hence ``have_strides``. It is no public part
    of PyTorch: ``None`` where there is none of this form, and every call takes the longer way.
    """
    guards: Any = torch._C._dynamo.guards  # type: ignore[attr-defined]
    try:
        return guards.TensorGuards(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None).check
    except (AttributeError, TypeError):
        return None


def quick_empty(device: torch.device) -> Callable[[tuple[int, ...], tuple[int, ...], torch.dtype], torch.Tensor] | None:
    """``torch.empty_strided`` on the current device of this type as compiled graphs call it, which takes 0.5 us of the host instead
    of 1.1. It does not fill memory in PyTorch's deterministic mode."""
    guards: Any = torch._C._dynamo.guards  # type: ignore[attr-defined]
    return getattr(guards, f"_empty_strided_{device.type}", None)
