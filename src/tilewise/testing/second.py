"""Second derivatives under test: the gradient of a backward pass, what a backend makes of it, and what is right.

Along directions of dq, dk, dv, ... (``draw_tangents``), the gradient of ``sum <direction, gradient>`` with respect to the upstream
gradients ``do`` and ``dlse`` and to all inputs. What is right comes from autograd through the dense formula in float64.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch

from ..api import attention
from ..problem import Tangents
from ..reference import reference
from ..spec import SLOTS, Spec
from .calls import Call
from .gauntlet import GAUNTLET, Entry
from .poison import poison
from .tangents import _moving, draw_tangents
from .tolerance import Result

__all__ = ["SECOND_ENTRIES", "SecondYardstick", "evaluate_second", "run_second", "second_call", "with_gradients"]

_CHOSEN = (
    "ragged_causal_br ragged_causal_tl thin_window empty_rows empty_window overflow_spike late_spike very_low odd_scale "
    "negative_scale gqa mqa odd_head_dims one_query one_key zero_len_k zero_len_q strided_last expanded softcap softcap_bias "
    "bias_softcap alibi_both_sides bias_broadcast bias_of_batches lowest_bias sink own_function own_between own_mask own_hidden "
    "dropout dropout_scores documents unsorted_ids row_intervals padded_keys dense_tiles all_terms"
)
SECOND_ENTRIES: tuple[Entry, ...] = tuple(e for e in GAUNTLET if e.name in _CHOSEN.split())


def with_gradients(call: Call) -> Call:
    """The call with a gradient of both outputs; one in float64 gets bias, slopes and sink in float64."""
    spec, generator = call.spec, torch.Generator().manual_seed(call.q.shape[2])
    if call.q.dtype == torch.float64:
        wide = {name: t.double() for name, t in zip(SLOTS, spec.tensors[:3], strict=False) if t is not None}
        spec = dataclasses.replace(spec, tensors=spec.tensors._replace(**wide))
    rows = call.q.shape[:3]
    do, dlse = (torch.randn(size, generator=generator).to(call.q) for size in ((*rows, call.v.shape[3]), rows))
    return call.replace(spec=spec, do=do, dlse=dlse.to(torch.promote_types(dlse.dtype, torch.float32)))


def second_call(entry: Entry, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float64) -> Call:
    """The call of an entry with a gradient of both outputs."""
    return with_gradients(entry.build(device, dtype))


def _again(
    f: Callable[..., tuple[torch.Tensor, torch.Tensor]], call: Call, tangents: Tangents, dtype: torch.dtype
) -> dict[str, torch.Tensor]:
    """The gradients of ``sum <tangent, gradient>`` of ``f(q, k, v, spec)``, by the name of what they are gradients of."""
    leaves = {name: t.to(dtype).requires_grad_() for name, t in _moving(call).items()}
    q, k, v = (leaves[name] for name in "qkv")
    tensors = call.spec.tensors._replace(**{name: t for name, t in leaves.items() if len(name) > 1})
    o, lse = f(q, k, v, dataclasses.replace(call.spec, tensors=tensors))
    upstream = {"do": call.do.to(o.dtype).requires_grad_(), "dlse": call.dlse.to(lse.dtype).requires_grad_()}  # type: ignore[union-attr]
    first = torch.autograd.grad((o, lse), list(leaves.values()), list(upstream.values()), create_graph=True, allow_unused=True)
    along = [getattr(tangents, name) for name in leaves]
    pairs = [(g, t.to(g.dtype)) for g, t in zip(first, along, strict=True) if g is not None and t is not None]
    wanted = upstream | leaves
    found = torch.autograd.grad([g for g, _ in pairs], list(wanted.values()), [t for _, t in pairs], allow_unused=True)
    return {name: torch.zeros_like(t) if g is None else g for (name, t), g in zip(wanted.items(), found, strict=True)}


def evaluate_second(call: Call, tangents: Tangents, backend: str) -> dict[str, torch.Tensor]:
    """Those gradients as a backend's calls compute them."""

    def run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, spec: Spec) -> tuple[torch.Tensor, torch.Tensor]:
        return attention(q, k, v, spec=spec, sm_scale=call.sm_scale, return_lse=True, backend=backend)

    return _again(run, call, tangents, call.q.dtype)


class SecondYardstick:
    """What is right for one call along some directions, and how far an answer may be from it."""

    def __init__(self, call: Call, tangents: Tangents):
        self.call, self.tangents = call, tangents
        self.expected = _again(lambda q, k, v, spec: reference(q, k, v, spec, call.scale), call, tangents, torch.float64)

    def judge(self, got: dict[str, torch.Tensor], name: str = "call") -> list[Result]:
        return [self._judge(name, output, got[output]) for output in self.expected]

    def _judge(self, name: str, output: str, got: torch.Tensor) -> Result:
        want = self.expected[output]
        if got.shape != want.shape:
            return Result(name, output, float("inf"), 0.0, False, f"shape {tuple(got.shape)}, expected {tuple(want.shape)}")
        if not want.numel():
            return Result(name, output, 0.0, 0.0, True)
        eps = torch.finfo(self.call.q.dtype).eps
        bound = (2 if eps > 1e-4 else 256) * eps * (1.0 + float(want.abs().max()))
        difference = (got.double() - want).abs()
        error = float("nan") if bool(difference.isnan().any()) else float(difference.max())
        ok = error <= bound
        return Result(name, output, error, bound, ok, "" if ok else f"{output} is wrong")


def run_second(call: Call, backend: str, name: str, seed: int = 0) -> list[Result]:
    """Judge one backend along directions of everything, with every allocation poisoned."""
    tangents = draw_tangents(call, seed)
    with poison():
        got = evaluate_second(call, tangents, backend)
    return SecondYardstick(call, tangents).judge(got, name)
