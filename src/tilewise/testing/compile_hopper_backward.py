"""Compile every config of the ``hopper`` backend's backward kernels for sm_90a, without a GPU, and say what came of it.

``python -m tilewise.testing.compile_hopper_backward`` prints a line of JSON for each kernel. It needs a process of its own, with
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

import torch

from ..arch import Runtime, runtime
from ..capabilities import dims_text
from ..configs.hopper import columns
from ..configs.hopper_backward import (
    ADDING,
    DKDV,
    DQ,
    KEEPS,
    KEPT,
    AddingConfig,
    Dims,
    KeptConfig,
    KeysConfig,
    QueriesConfig,
    padded_rows,
    shared_memory,
    takes_adding,
)
from ..problem import Problem
from ..spec import NO_TENSORS
from .compile_hopper import loops
from .compile_only import _operands, _table, compiled_of, use_target

__all__ = ["IN_FULL", "MASKS", "BackwardReport", "compile_backward", "problems", "words"]

MASKS = {"full": "full", "tail": "full", "causal": "causal", "window": "upper:256,lower:256"}
# The head dim at which a choice that covers has every mask and both dtypes.
IN_FULL = 128
SPILLED = re.compile(r"\b(?:STL|LDL)\b")


@dataclass(frozen=True)
class BackwardReport:
    """What the compiler made of one kernel. ``kernel``: dkdv, keeps (dkdv that writes ds as well), dq, kept (dq of a ds in memory)
    or adds (all three gradients); ``predicted``: bytes of shared memory that the config says it needs; ``spill``: bytes
    of spill stores and loads; ``free_loops``: instructions of the loops of the consumers that run without a mask (dq has one loop,
    in which free tiles branch around the mask); ``free_spills``: accesses to spilled registers in them; ``masked_spills``: in the
    other loops that multiply as much."""

    kernel: str
    head_dim: int
    head_dim_v: int
    dtype: str
    mask: str
    config: list[object]
    shared: int
    predicted: int
    spill: int
    serialized: bool
    free_loops: list[int]
    free_spills: int
    masked_spills: int


_Config = KeysConfig | QueriesConfig | KeptConfig | AddingConfig


def _products(problem: Problem, config: _Config) -> tuple[int, int]:
    """``(groups, products)``: warpgroups that multiply, and matrix instructions of each for one tile."""
    deep, deep_v = problem.head_dim // 16, problem.head_dim_v // 16
    # A product with a tile of keys or queries is one for each of its parts.
    parts, parts_v = (2 if d == 192 else d // columns(d) for d in (problem.head_dim, problem.head_dim_v))
    if isinstance(config, KeptConfig):
        return config.block_m // 64, 64 // 16 * parts
    if isinstance(config, QueriesConfig):
        return config.block_m // 64, deep + deep_v + config.block_n // 16 * parts
    if isinstance(config, KeysConfig) and config.p_slots:
        return 2, min(deep + config.block_m // 16 * parts_v, deep_v + config.block_m // 16 * parts)
    return config.block_n // 64, deep + deep_v + config.block_m // 16 * (parts + parts_v)


def compile_backward(problem: Problem, config: _Config, mask: str, keeps: bool = False) -> BackwardReport:
    """Compile the kernel of one config, after ``use_target("sm_90")``. ``keeps``: a kernel over keys writes ds to memory too."""
    from ..backends.hopper import bwd_add_launch, bwd_launch

    p = problem
    dtype = getattr(torch, p.dtype)
    q = torch.empty((p.batch, p.heads_q, p.seqlen_q, p.head_dim), dtype=dtype)
    k = torch.empty((p.batch, p.heads_kv, p.seqlen_k, p.head_dim), dtype=dtype)
    v = torch.empty((p.batch, p.heads_kv, p.seqlen_k, p.head_dim_v), dtype=dtype)
    do = torch.empty((p.batch, p.heads_q, p.seqlen_q, p.head_dim_v), dtype=dtype)
    rows = torch.empty((p.batch * p.heads_q, padded_rows(p)), dtype=torch.float32)
    ds = torch.empty(bwd_launch.ds_shape(p, p.batch * p.heads_q), dtype=dtype)
    tensors = _operands(p) if p.operands else NO_TENSORS
    if isinstance(config, KeysConfig):
        name = "keeps" if keeps else "dkdv"
        table = _table(p, tensors, config.block_m, config.block_n, True)
        given = (q, k, v, do, rows, rows, k, v, ds if keeps else None)
        launch = bwd_launch.launch_dkdv(p, config, *given, tensors=tensors, table=table)
    elif isinstance(config, AddingConfig):
        gradients = bwd_add_launch.adding_plans(p, config, False)[1]
        sums = torch.empty(rows.numel() * p.head_dim, dtype=torch.float32)
        name, launch = "adds", gradients.launch(k, k, q, q, rows, rows, k, k, sums)
    elif isinstance(config, KeptConfig):
        name, launch = "kept", bwd_launch.launch_dq_kept(p, config, ds, k, q)
    else:
        table = _table(p, tensors, config.block_m, config.block_n, False)
        name, launch = "dq", bwd_launch.launch_dq(p, config, q, k, v, do, rows, rows, q, tensors, table)
    compiled, log, sass = compiled_of(launch, "sm_90")
    spills = re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", log)
    groups, products = _products(p, config)
    found = sorted(loops(sass, products), key=len)
    spilled = [sum(bool(SPILLED.search(line)) for line in body) for body in found]
    return BackwardReport(
        name,
        p.head_dim,
        p.head_dim_v,
        p.dtype,
        mask,
        list(astuple(config)),
        compiled.metadata.shared,
        shared_memory(p, config),
        sum(map(int, spills.groups())) if spills else -1,
        "serialized" in log,
        [len(body) for body in found[:groups]],
        sum(spilled[:groups]),
        sum(spilled[groups:]),
    )


def words(dims: Dims) -> str:
    """A key of the tables of configs as a problem has it."""
    return dims_text((dims if isinstance(dims, tuple) else (dims, dims),))


def problems(head_dims: list[Dims], every: bool, covering: bool = False) -> Iterator[tuple[str, Problem, _Config, bool]]:
    """The kernels of these head dims: ``(mask, problem, config, keeps)``. The default config, the first, meets every mask, the
    others no mask and a causal one; the kernels that write ds or read it know those two only.

    ``every``: all of them meet every mask that they know, in float16 too. ``covering``: only what the built-in rules may take for a
    call without terms, the default config and not the candidates of ``tilewise tune``; and where a causal mask is known it alone,
    whose kernel has in it what that without has, in bfloat16. At ``IN_FULL`` dkdv and dq meet every mask and both dtypes. "tail" is
    no mask with a last tile of keys that is not full.
    """
    for dims in head_dims:
        kept_by_rule = any(KEEPS[dims, bounded] for bounded in (False, True))
        tables = [(DKDV[dims], False, tuple(MASKS)), (DQ[dims], False, tuple(MASKS))]
        tables += [(DKDV[dims], True, ("full", "causal")), (KEPT[dims], True, ("full", "causal"))]
        if isinstance(dims, int):
            tables += [(ADDING.get((dims, False), ()), False, ("full", "tail")), (ADDING.get((dims, True), ()), False, ("causal",))]
        for configs, keeps, masks in tables:
            for place, config in enumerate(configs):
                if keeps and place and isinstance(config, KeysConfig) and not every:
                    continue
                known = [mask for mask in masks if every or not place or mask not in ("tail", "window")]
                of_kept = keeps or isinstance(config, KeptConfig)
                if covering and (place or (of_kept and not kept_by_rule)):
                    continue
                in_full = dims == IN_FULL and not of_kept
                if covering and "causal" in known and not in_full:
                    known = ["causal"]
                in_float16 = "causal" if "causal" in known else "full"
                for mask in known:
                    # A multiple of 64, 128 and 192, or of none of them.
                    seqlen = 1000 if mask == "tail" else 1152
                    for dtype in ("bfloat16", "float16"):
                        if dtype == "float16" and (place or keeps or mask != in_float16) and not every:
                            continue
                        if dtype == "float16" and covering and not in_full:
                            continue
                        text = f"dtype={dtype} heads=4/2 seqlen={seqlen} head_dim={words(dims)} mask={MASKS[mask]} arch=sm_90"
                        problem = Problem.parse(text, software=Runtime(runtime().triton))
                        if not isinstance(config, AddingConfig) or takes_adding(problem):
                            yield mask, problem, config, keeps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("head_dim", nargs="*", help="which head dims, as 128 or 192/128 (default: all)")
    parser.add_argument("--every", action="store_true", help="every config under every mask, in float16 too")
    parser.add_argument("--covering", action="store_true", help="default configs alone, under a causal mask but for head_dim 128")
    options = parser.parse_args()
    use_target("sm_90")
    known = {words(dims): dims for dims in DKDV}
    for mask, problem, config, keeps in problems([known[x] for x in options.head_dim or known], options.every, options.covering):
        print(json.dumps(asdict(compile_backward(problem, config, mask, keeps))), flush=True)
    sys.stdout.flush()
    os._exit(0)  # the compiler's bindings print pages about objects that they leak at exit


if __name__ == "__main__":
    main()
