"""The launch of the forward-mode kernel (``jvp.py``): binds tangents beside the tensors of a forward pass.

The kernel holds two accumulators. Beyond 128 columns of v they do not fit the registers: then it runs once for each part of the
columns, and makes the scores anew each time.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import torch
import triton

from ... import configs
from ...configs import Config
from ...plan import Masked
from ...problem import NO_TANGENTS, Problem, Tangents
from ...spec import NO_TENSORS, Tensors
from ..launching import Launch, Plan, broadcast_strides
from . import _FAR_STRIDE, _columns, _drop, _mask, _masked, _plan, _scores, _settings, _sink, _steps
from .jvp import _jvp_kernel

__all__ = ["COLUMNS", "jvp", "launch_jvp", "parts_of"]

COLUMNS = 128  # of v at once


def _jvp(
    problem: Problem,
    config: Config,
    mask: Masked | None = None,
    tensors: Tensors = NO_TENSORS,
    kept: torch.Tensor | None = None,
    tangents: Tangents = NO_TANGENTS,
) -> Plan:
    p, letters = problem, problem.jvp
    grid, scalars, options = _settings(p, config, False)
    masked, masked_options = _masked(p, config, mask)
    score, score_options = _scores(p, tensors, config)
    if tangents.bias is not None and max(broadcast_strides(tangents.bias)[2:]) >= _FAR_STRIDE:
        score_options["STEPS"] = tuple("bias_far" if step == "bias" else step for step in score_options["STEPS"])
    m, n = config.block_m, config.block_n
    tiles = tuple(zip((m, n, n, m, n, n, m, m), _columns(p, "qqvqqvvv"), strict=True))
    # The kernel looks into them only where the spec has such a term.
    of_terms = tuple(None if t is None else (t, broadcast_strides(t)) for t in (tangents.slopes, tangents.bias, tangents.sink))
    numbers = (
        *(*masked, score, _sink(tensors), None if tensors is NO_TENSORS else of_terms, kept, _drop(p, tensors)),
        *(*scalars, abs(p.sm_scale) * _steps(p)[0], abs(p.sm_scale), triton.cdiv(p.seqlen_q, config.block_m)),
    )
    own = {f"HAS_T{letter.upper()}": letter in letters for letter in "qkv"}
    own |= {"OF_SCORES": bool(set(letters) & set("qkba")), "NEGATIVE": p.sm_scale < 0}
    options = {name: value for name, value in options.items() if name != "SPLIT"}
    return _plan(p, _jvp_kernel, grid, tiles, numbers, {**options, **masked_options, **score_options, **own})


_jvp_plan = functools.lru_cache(maxsize=4096)(_jvp)  # of calls without tensors in their spec


def _given(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, tangents: Tangents) -> tuple[torch.Tensor, ...]:
    """A tangent that is not there gets the tensor itself in its place; the kernel does not touch it."""
    return tuple(t if tangent is None else tangent for t, tangent in zip((q, k, v), tangents[:3], strict=True))


def launch_jvp(
    problem: Problem,
    config: Config,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    o: torch.Tensor,
    lse: torch.Tensor,
    t_o: torch.Tensor,
    t_lse: torch.Tensor,
    tangents: Tangents,
    mask: Masked | None = None,
    tensors: Tensors = NO_TENSORS,
    kept: torch.Tensor | None = None,
) -> Launch:
    plan = _jvp(problem, config, mask, tensors, kept, tangents)
    return plan.launch(q, k, v, *_given(q, k, v, tangents), o, t_o, lse, t_lse)


@functools.lru_cache(maxsize=4096)
def parts_of(problem: Problem) -> tuple[tuple[Problem, slice], ...]:
    """The problem itself, or one for each part of the columns of v."""
    width = problem.head_dim_v
    if width <= COLUMNS:
        return ((problem, slice(None)),)
    cuts = [slice(first, min(first + COLUMNS, width)) for first in range(0, width, COLUMNS)]
    return tuple((dataclasses.replace(problem, head_dim_v=cut.stop - cut.start), cut) for cut in cuts)


def jvp(
    problem: Problem,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    o: torch.Tensor,
    lse: torch.Tensor,
    t_o: torch.Tensor,
    t_lse: torch.Tensor,
    tangents: Tangents,
    tensors: Tensors = NO_TENSORS,
    rows: torch.Tensor | None = None,
) -> None:
    """Fill ``o``, ``lse``, ``t_o`` and ``t_lse`` (backend interface)."""
    kept = rows if problem.keeps_rows else None
    for part, cut in parts_of(problem):
        config = configs.lookup(part, "jvp")
        own = tangents if tangents.v is None else tangents._replace(v=tangents.v[..., cut])
        outputs = (o[..., cut], lse, t_o[..., cut], t_lse)
        if tensors is NO_TENSORS:
            given: tuple[Any, ...] = (q, k, v[..., cut], *_given(q, k, v[..., cut], own))
            _jvp_plan(part, config).run(*given, outputs[0], outputs[2], lse, t_lse)
            continue
        with torch.cuda.device_of(q):
            mask = _mask(part, tensors, config)
            launch_jvp(part, config, q, k, v[..., cut], *outputs, own, mask, tensors, kept).run()
