"""Who is timed. A provider imports its library in ``load`` (inside its own process) and returns a function that binds a case.

That function, ``make(case, q, k, v)``, returns a callable without arguments that gives o. ``layout`` says how the provider
likes its tensors: "bhsd" (batch, heads, seqlen, head_dim) or "bshd" (batch, seqlen, heads, head_dim).
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional as F

import tilewise

from ...capabilities import CAPABILITIES
from ...errors import InvalidInput
from .cases import PASSES, Case

__all__ = ["PROVIDERS", "Loaded", "Provider", "Tunable", "default_names", "find"]

Attend = Callable[[], torch.Tensor]
Make = Callable[[Case, torch.Tensor, torch.Tensor, torch.Tensor], Attend]


class Tunable:
    """An ``Attend`` that chooses between kernels by timing them: compiled beside others, tuned alone on the device."""

    def compile(self) -> None:
        """Make ready whatever needs no quiet device."""
        raise NotImplementedError

    def tune(self) -> None:
        """Choose. Called before the first call."""
        raise NotImplementedError

    def __call__(self) -> torch.Tensor:
        raise NotImplementedError


@dataclass(frozen=True)
class Loaded:
    """An imported provider: how to bind a case, and the version of what does the work."""

    make: Make
    version: str | None = None


@dataclass(frozen=True)
class Provider:
    """``prepares``: its first call of a case takes long (it compiles), so it is made ahead of the timing."""

    name: str
    about: str
    load: Callable[[], Loaded]
    layout: str = "bhsd"
    passes: tuple[str, ...] = PASSES
    devices: tuple[str, ...] = ("cuda",)
    prepares: bool = True


def _sdpa(backend: str | None) -> Callable[[], Loaded]:
    """PyTorch's scaled_dot_product_attention: its own choice, or held to one of its backends."""

    def load() -> Loaded:
        from torch.nn.attention import SDPBackend, sdpa_kernel

        chosen = getattr(SDPBackend, backend) if backend else None

        def make(case: Case, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Attend:
            grouped: dict[str, Any] = {"enable_gqa": True} if case.heads_q != case.heads_kv else {}

            def attend() -> torch.Tensor:
                if chosen is None:
                    return F.scaled_dot_product_attention(q, k, v, is_causal=case.causal, **grouped)
                with sdpa_kernel(chosen):
                    return F.scaled_dot_product_attention(q, k, v, is_causal=case.causal, **grouped)

            return attend

        return Loaded(make, f"cuDNN {torch.backends.cudnn.version()}" if backend == "CUDNN_ATTENTION" else torch.__version__)

    return load


def _flex() -> Loaded:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    dynamo: Any = importlib.import_module("torch._dynamo.config")
    functorch: Any = importlib.import_module("torch._functorch.config")
    dynamo.cache_size_limit = 1000
    functorch.donated_buffer = False  # its backward pass is called many times on one graph
    compiled: Any = torch.compile(flex_attention, dynamic=False)
    masks: dict[tuple[int, int], Any] = {}

    def causal(batch: Any, head: Any, q_index: Any, kv_index: Any) -> Any:
        return q_index >= kv_index

    def make(case: Case, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Attend:
        lengths = (case.seqlen_q, case.seqlen_k)
        if case.causal and lengths not in masks:
            masks[lengths] = create_block_mask(causal, None, None, *lengths, device=str(q.device))
        mask = masks[lengths] if case.causal else None
        return lambda: compiled(q, k, v, block_mask=mask, enable_gqa=case.heads_q != case.heads_kv)

    return Loaded(make, torch.__version__)


def _flash_attn(module: str) -> Callable[[], Loaded]:
    def load() -> Loaded:
        library = importlib.import_module(module)

        def make(case: Case, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Attend:
            def attend() -> torch.Tensor:
                out = library.flash_attn_func(q, k, v, causal=case.causal)
                return out[0] if isinstance(out, tuple) else out

            return attend

        return Loaded(make, getattr(library, "__version__", None))

    return load


def _seed() -> Loaded:
    import triton

    from .seed import Seed

    return Loaded(Seed, triton.__version__)


def _tilewise(backend: str) -> Callable[[], Loaded]:
    def load() -> Loaded:
        def make(case: Case, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Attend:
            return lambda: tilewise.attention(q, k, v, causal=case.causal, backend=backend)

        return Loaded(make, tilewise.__version__)

    return load


def _custom(target: str) -> Callable[[], Loaded]:
    module_name, _, function_name = target.partition(":")

    def load() -> Loaded:
        module = importlib.import_module(module_name)
        function = getattr(module, function_name)

        def make(case: Case, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Attend:
            return lambda: function(q, k, v, case.causal)

        return Loaded(make, getattr(module, "__version__", None))

    return load


_ANY = ("cuda", "cpu")
PROVIDERS: tuple[Provider, ...] = (
    Provider("tilewise", "tilewise.attention, backend='auto'", _tilewise("auto"), devices=_ANY),
    Provider("seed", "a plain tutorial-style Triton kernel, tuned for each case", _seed, passes=("fwd",)),
    Provider("flex", "torch.compile(flex_attention)", _flex),
    Provider("flash", "scaled_dot_product_attention, FlashAttention-2", _sdpa("FLASH_ATTENTION"), devices=_ANY),
    Provider("cudnn", "scaled_dot_product_attention, cuDNN", _sdpa("CUDNN_ATTENTION")),
    Provider("efficient", "scaled_dot_product_attention, memory-efficient", _sdpa("EFFICIENT_ATTENTION"), prepares=False),
    # It materialises the scores: made ahead beside the others it could take the memory that they need.
    Provider("math", "scaled_dot_product_attention, plain formula", _sdpa("MATH"), devices=_ANY, prepares=False),
    Provider("sdpa", "scaled_dot_product_attention, PyTorch's own choice", _sdpa(None), devices=_ANY),
    Provider("fa3", "FlashAttention-3 (flash_attn_interface)", _flash_attn("flash_attn_interface"), layout="bshd"),
    Provider("fa4", "FlashAttention-4 (flash_attn.cute)", _flash_attn("flash_attn.cute"), layout="bshd"),
)


def default_names(device: str) -> list[str]:
    """The providers of a run that names none."""
    if device == "cpu":
        return ["tilewise", "sdpa", "math"]
    return [p.name for p in PROVIDERS if p.name != "sdpa"]


def find(name: str) -> Provider:
    """The provider of a name, of ``tilewise-BACKEND``, or of ``NAME=MODULE:FUNCTION``."""
    label, given, target = name.partition("=")
    if given:
        if not label.isidentifier() or target.count(":") != 1 or not all(target.split(":")):
            raise InvalidInput(f"provider {name!r}: expected NAME=MODULE:FUNCTION, with FUNCTION(q, k, v, causal) -> o.")
        return Provider(label, f"{target}(q, k, v, causal)", _custom(target), devices=_ANY)
    for provider in PROVIDERS:
        if provider.name == name:
            return provider
    backends = [row.backend for row in CAPABILITIES]
    if name.startswith("tilewise-"):
        backend = name.removeprefix("tilewise-")
        if backend in backends:
            return Provider(name, f"tilewise.attention, backend={backend!r}", _tilewise(backend), devices=_ANY)
    known = [p.name for p in PROVIDERS] + [f"tilewise-{b}" for b in backends]
    raise InvalidInput(f"provider is {name!r}, expected one of {', '.join(known)}, or NAME=MODULE:FUNCTION.")
