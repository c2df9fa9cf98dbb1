"""Compile every config of the ``hopper`` backend for sm_90a, without a GPU, and say what the compiler made of it.

``python -m tilewise.testing.compile_hopper`` prints a line of JSON for each kernel. It needs a process of its own, with
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
from ..configs.hopper import CHOICES, FORMS, PICKED, HopperConfig, columns
from ..problem import Problem
from ..spec import NO_TENSORS
from .compile_only import _operands, _table, compiled_of, use_target

__all__ = ["IN_FULL", "MASKS", "KernelReport", "compile_forward", "loops", "main_loop"]

MASKS = {"full": "full", "tail": "full", "causal": "causal", "window": "upper:256,lower:256", "negative": "causal sm_scale=-0.3"}
# The head dims at which a choice that covers has every mask and both dtypes: what they change in a kernel is the same at all.
IN_FULL = (128, 128)


@dataclass(frozen=True)
class KernelReport:
    """What the compiler made of one kernel. ``spill``: bytes of spill stores and loads; ``loop``: instructions of the main loop,
    with the mask that free tiles branch around; ``loop_spills``: accesses to spilled registers in it."""

    head_dim: int
    head_dim_v: int
    dtype: str
    mask: str
    form: str
    config: list[object]
    shared: int
    spill: int
    serialized: bool
    loop: int
    loop_spills: int
    matrix_waits: int


def loops(sass: str, products: int) -> list[list[str]]:
    """The instructions of each innermost loop that holds at least ``products`` matrix instructions.

    A loop is what lies between a label and a later branch back to it. Waits spin in short loops of their own inside.
    """
    lines: list[str] = []
    labels: dict[str, int] = {}
    found: list[tuple[int, int]] = []
    for line in sass.splitlines():
        label = re.match(r"\s*(\.L_[\w.]+):", line)
        if label:
            labels[label.group(1)] = len(lines)
            continue
        code = re.match(r"\s*/\*[0-9a-f]{4,}\*/\s+(.*?);", line)
        if code is None:
            continue
        lines.append(code.group(1))
        target = re.search(r"\bBRA\b.*`\((\.L_[\w.]+)\)", code.group(1))
        if target and target.group(1) in labels:
            start = labels[target.group(1)]
            if sum("HGMMA" in x for x in lines[start:]) >= products and not any(first >= start for first, _ in found):
                found.append((start, len(lines)))
    return [lines[start:end] for start, end in found]


def main_loop(sass: str, products: int) -> list[str]:
    """The shortest of ``loops``; empty if there is none."""
    return min(loops(sass, products), key=len, default=[])


def compile_forward(problem: Problem, config: HopperConfig, mask: str, form: str) -> KernelReport:
    """Compile one forward kernel, of a form in ``FORMS``, after ``use_target("sm_90")``."""
    from ..backends import hopper

    p = problem
    dtype = getattr(torch, p.dtype)
    q = torch.empty((p.batch, p.heads_q, p.seqlen_q, p.head_dim), dtype=dtype)
    k = torch.empty((p.batch, p.heads_kv, p.seqlen_k, p.head_dim), dtype=dtype)
    v = torch.empty((p.batch, p.heads_kv, p.seqlen_k, p.head_dim_v), dtype=dtype)
    o = torch.empty((p.batch, p.heads_q, p.seqlen_q, p.head_dim_v), dtype=dtype)
    lse = torch.empty((p.batch, p.heads_q, p.seqlen_q), dtype=torch.float32)
    tensors = _operands(p) if p.operands else NO_TENSORS
    table = _table(p, tensors, config.block_m, config.block_n, False)
    launch = hopper.launches_fwd(p, config, q, k, v, o, lse, tensors, table)[FORMS[config.guarded].index(form)]
    compiled, log, sass = compiled_of(launch, "sm_90")
    spills = re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", log)
    body = main_loop(sass, (p.head_dim + config.block_n * (p.head_dim_v // columns(p.head_dim_v))) // 16)
    return KernelReport(
        p.head_dim,
        p.head_dim_v,
        p.dtype,
        mask,
        form,
        list(astuple(config)),
        compiled.metadata.shared,
        sum(map(int, spills.groups())) if spills else -1,
        "serialized" in log,
        len(body),
        sum(bool(re.search(r"\b(?:STL|LDL)\b", x)) for x in body),
        sum("WARPGROUP.DEPBAR" in x for x in body),
    )


def problems(
    head_dims: list[tuple[int, int]], every: bool, covering: bool = False
) -> Iterator[tuple[str, Problem, HopperConfig, str]]:
    """The kernels of the configs of these head dims. ``every``: all configs under every kind of mask, and in float16 too.

    Otherwise only what the built-in rule may pick, under every mask, and float16 under a causal one only. ``covering``: of these
    the first config of each form at ``IN_FULL`` so, and all others in bfloat16 under a causal mask, whose loop has in it what no
    mask has. "tail" is no mask with a last key tile that is not full, "negative" a causal mask with a scale below 0.
    """
    for head_dim, head_dim_v in head_dims:
        configs = CHOICES[head_dim, head_dim_v]
        for place, config in enumerate(configs):
            again = covering and config.guarded in [earlier.guarded for earlier in configs[:place]]
            alone = again or (covering and (head_dim, head_dim_v) != IN_FULL)
            for mask, words in MASKS.items():
                if place >= PICKED[head_dim, head_dim_v] and not every:
                    continue
                if alone and mask != "causal":
                    continue
                for dtype in ("bfloat16", "float16"):
                    if dtype == "float16" and (config.guarded or alone or (mask != "causal" and not every)):
                        continue
                    seqlen = 1000 if mask == "tail" else 1024
                    text = f"dtype={dtype} heads=4/2 seqlen={seqlen} head_dim={head_dim}/{head_dim_v} mask={words} arch=sm_90"
                    for form in FORMS[config.guarded]:
                        if form == "redo" and (again or mask != "causal") and not every:  # the careful kernel once more
                            continue
                        yield mask, Problem.parse(text, software=Runtime(runtime().triton)), config, form


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("head_dim", nargs="*", help="which head dims, as 128 or 192/128 (default: all)")
    parser.add_argument("--every", action="store_true", help="float16 under every mask too")
    parser.add_argument("--covering", action="store_true", help="a causal mask alone, but for head_dim 128")
    options = parser.parse_args()
    use_target("sm_90")
    words = [(name if "/" in name else f"{name}/{name}").split("/") for name in options.head_dim]
    named = [(int(head_dim), int(head_dim_v)) for head_dim, head_dim_v in words]
    for mask, problem, config, form in problems(named or sorted(CHOICES), options.every, options.covering):
        print(json.dumps(asdict(compile_forward(problem, config, mask, form))), flush=True)
    sys.stdout.flush()
    os._exit(0)  # the compiler's bindings print pages about objects that they leak at exit


if __name__ == "__main__":
    main()
