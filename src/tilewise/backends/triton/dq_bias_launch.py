"""The launch of the kernel that makes dq and the gradient of a bias together."""

from __future__ import annotations

import torch
import triton

from ... import configs
from ...configs import Config
from ...problem import Problem
from ...spec import Tensors
from ..launching import Launch, broadcast_strides
from . import dq_bias

__all__ = ["launch_dq_bias"]


def launch_dq_bias(
    problem: Problem,
    config: Config,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    do: torch.Tensor,
    lse: torch.Tensor,
    delta: torch.Tensor,
    dq: torch.Tensor,
    grad: torch.Tensor,
    tensors: Tensors,
) -> Launch:
    """dq and the gradient of a bias, of as many sequences at a time as ``configs.bias_members`` says."""
    from . import _columns, _grid, _plan, _scores, _settings, _steps

    p, members = problem, configs.bias_members(problem)
    _, scalars, options = _settings(p, config, "dq")
    score, score_options = _scores(p, tensors, config)
    rows = (config.block_m, config.block_n, config.block_n, config.block_m, config.block_m)
    m_blocks, n_blocks = triton.cdiv(p.seqlen_q, config.block_m), triton.cdiv(p.seqlen_k, config.block_n)
    grid, flat = _grid(m_blocks, p.heads_q, p.batch // members)
    numbers = (
        *(broadcast_strides(grad), score[2], *scalars),
        *(p.sm_scale * _steps(p)[0], p.sm_scale, m_blocks, n_blocks),
    )
    own = {"MEMBERS": members, "TAILS": score_options["TAILS"], "FAR": "bias_far" in score_options["STEPS"], "FLAT": flat}
    shared = {name: value for name, value in options.items() if name not in ("HAS_TAIL", "SPLIT")}
    plan = _plan(p, dq_bias._dq_bias_kernel, grid, tuple(zip(rows, _columns(p, "qqvvq"), strict=True)), numbers, {**shared, **own})
    return plan.launch(q, k, v, do, dq, grad, lse, delta)
