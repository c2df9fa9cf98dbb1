"""Compile the ``hopper`` backend's kernels with an additive bias for sm_90a, without a GPU, and say what came of it.

``python -m tilewise.testing.compile_hopper_bias`` prints a line of JSON for each kernel. It needs a process of its own, with
TRITON_INTERPRET unset.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
from collections.abc import Iterator
from dataclasses import asdict, astuple, dataclass
from typing import Any

import torch

from ..arch import Runtime, runtime
from ..configs.hopper_backward import padded_rows
from ..configs.hopper_bias import DBIAS, DKDV, DQ, FWD, SHARED, members, shared_memory
from ..problem import Problem
from .compile_hopper import loops
from .compile_only import _assemble, _operands, use_target

__all__ = ["KERNELS", "MASKS", "BiasReport", "compile_biased", "problems"]

KERNELS = {"fwd": FWD, "dkdv": DKDV, "dq": DQ, "dbias": DBIAS, "shared": SHARED}
MASKS = {"full": "bias", "causal": "causal,bias"}
_SPILLED = re.compile(r"\b(?:STL|LDL)\b")


@dataclass(frozen=True)
class BiasReport:
    """What the compiler made of one kernel. ``kernel``: a name in ``KERNELS``; ``predicted``: bytes of shared memory that the
    config says it needs; ``spill``: bytes of spill stores and loads; ``loops``: instructions of the shortest loop of each consumer;
    ``loop_spills``: accesses to spilled registers in them."""

    kernel: str
    head_dim: int
    dtype: str
    mask: str
    config: list[object]
    shared: int
    predicted: int
    spill: int
    serialized: bool
    loops: list[int]
    loop_spills: int


def _products(problem: Problem, kernel: str, config: Any) -> int:
    """Matrix instructions of a consumer for one tile."""
    deep = problem.head_dim // 16
    if kernel == "fwd":
        return deep + config.block_n // 16
    if kernel == "dkdv":
        return 2 * (deep + config.block_m // 16)
    if kernel == "dbias":
        return 2 * deep
    return (2 * deep + config.block_n // 16) * (members(problem) if kernel == "shared" else 1)


def compile_biased(problem: Problem, kernel: str, config: Any, mask: str) -> BiasReport:
    """Compile one kernel, after ``use_target("sm_90")``."""
    from ..backends.hopper import bias_launch as launches

    p = problem
    dtype = getattr(torch, p.dtype)
    q = torch.empty((p.batch, p.heads_q, p.seqlen_q, p.head_dim), dtype=dtype)
    k = torch.empty((p.batch, p.heads_kv, p.seqlen_k, p.head_dim), dtype=dtype)
    lse = torch.empty((p.batch, p.heads_q, p.seqlen_q), dtype=torch.float32)
    rows = torch.empty((p.batch, p.heads_q, p.seqlen_q, 2), dtype=torch.float32)
    by_row = (torch.empty((p.batch * p.heads_q, padded_rows(p)), dtype=torch.float32),) * 3
    bias = _operands(p).bias
    if kernel == "fwd":
        counter = torch.empty(2, dtype=torch.int32)
        launch = launches.fwd_plan(p, config).launch(q, k, k, q, bias, lse, rows, counter)
    elif kernel == "dkdv":
        launch = launches.dkdv_plan(p, config, True, True).launch(k, k, q, q, bias, *by_row, k, k)
    elif kernel == "dq":
        launch = launches.dq_plan(p, config).launch(q, k, k, q, bias, q, *by_row)
    elif kernel == "dbias":
        launch = launches.dbias_plan(p, config).launch(q, k, k, q, bias, *by_row, bias)
    else:
        launch = launches.shared_plan(p, config).launch(q, k, k, q, bias, q, bias, *by_row)
    compiled = launch.kernel.warmup(*launch.args, grid=launch.grid, **launch.options)
    log, sass = _assemble(compiled, "sm_90")
    spills = re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", log)
    consumers = (config.block_n if kernel == "dkdv" else config.block_m) // 64
    found = sorted(loops(sass, _products(p, kernel, config)), key=len)[:consumers]
    return BiasReport(
        kernel,
        p.head_dim,
        p.dtype,
        mask,
        list(astuple(config)),
        compiled.metadata.shared,
        shared_memory(p, config),
        sum(map(int, spills.groups())) if spills else -1,
        "serialized" in log,
        [len(body) for body in found],
        sum(bool(_SPILLED.search(line)) for body in found for line in body),
    )


def problems(head_dim: int, every: bool, covering: bool = False) -> Iterator[tuple[str, Problem, str, Any]]:
    """``(name in MASKS, problem, kernel, config)``: the configs that are taken, or every one of the tables.

    ``covering``: beyond the first head dim a causal mask alone, whose kernel has in it what that without has.
    """
    for mask, words in MASKS.items():
        if covering and mask != "causal" and head_dim != min(FWD):
            continue
        for kernel, table in KERNELS.items():
            for config in table.get(head_dim, ())[: None if every else 1]:
                text = f"batch=4 heads=16/8 seqlen=2048 head_dim={head_dim} mask={words} bias=bfloat16:1hqk grad=qkvb arch=sm_90"
                yield mask, Problem.parse(text, software=Runtime(runtime().triton)), kernel, config


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("head_dim", nargs="*", type=int, help="which head dims (default: all)")
    parser.add_argument("--every", action="store_true", help="every config of the tables")
    parser.add_argument("--covering", action="store_true", help="beyond the first head dim a causal mask alone")
    options = parser.parse_args()
    use_target("sm_90")
    for head_dim in options.head_dim or sorted(FWD):
        for mask, problem, kernel, config in problems(head_dim, options.every, options.covering):
            print(json.dumps(asdict(compile_biased(problem, kernel, config, mask))), flush=True)
    sys.stdout.flush()
    os._exit(0)  # the compiler's bindings print pages about objects that they leak at exit


if __name__ == "__main__":
    main()
