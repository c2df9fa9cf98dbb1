"""Compile what the ``hopper`` backend runs for score steps, sinks and masks that come as tensors, for sm_90a and without a GPU.

``python -m tilewise.testing.compile_hopper_terms`` prints a line of JSON for each kernel (see ``compile_hopper`` and
``compile_hopper_backward``). It needs a process of its own, with TRITON_INTERPRET unset.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
from collections.abc import Iterator
from typing import Any

from ..arch import Runtime, runtime
from ..configs.hopper import CHOICES, FORMS, lookup
from ..configs.hopper_backward import in_chunks, lookup_dkdv, lookup_dq
from ..problem import Problem
from .compile_hopper import compile_forward
from .compile_hopper_backward import compile_backward
from .compile_only import use_target

__all__ = ["TERMS", "problems", "reports"]

# By name: the mask of a problem. "alibi" is added by a product, "both_sides" and "capped_alibi" score by score.
TERMS = {
    "sink": "causal,sink",
    "softcap": "causal,softcap:50.0",
    "alibi": "causal,alibi",
    "both_sides": "alibi",
    "segment": "causal,segment",
    "row": "row,sink",
    "capped_alibi": "causal,softcap:50.0,alibi,segment",
}


def problems(pairs: list[tuple[int, int]]) -> Iterator[tuple[str, Problem]]:
    """``(name in TERMS, problem)`` for these head dims: long calls, whose configs are those that matter."""
    for head_dim, head_dim_v in pairs:
        for name, words in TERMS.items():
            text = f"heads=16/8 seqlen=4096 head_dim={head_dim}/{head_dim_v} mask={words} arch=sm_90"
            yield name, Problem.parse(text, software=Runtime(runtime().triton))


def reports(name: str, problem: Problem) -> Iterator[dict[str, Any]]:
    """What the compiler made of the kernels of a problem, after ``use_target("sm_90")``."""
    config = lookup(problem)
    yield {"kernel": "fwd", **dataclasses.asdict(compile_forward(problem, config, name, FORMS[config.guarded][0]))}
    if not in_chunks(problem) and name != "sink":
        for each in (lookup_dkdv(problem), lookup_dq(problem)):
            yield dataclasses.asdict(compile_backward(problem, each, name))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("head_dim", nargs="*", help="which head dims, as 128 or 192/128 (default: 64, 128 and 256)")
    parser.add_argument("--terms", default=",".join(TERMS), help="names, by commas (default: all)")
    options = parser.parse_args()
    use_target("sm_90")
    words = [(name if "/" in name else f"{name}/{name}").split("/") for name in options.head_dim or ("64", "128", "256")]
    pairs = [(int(head_dim), int(head_dim_v)) for head_dim, head_dim_v in words]
    for name, problem in problems([pair for pair in pairs if pair in CHOICES]):
        if name in options.terms.split(","):
            for report in reports(name, problem):
                print(json.dumps(report), flush=True)
    sys.stdout.flush()
    os._exit(0)  # the compiler's bindings print pages about objects that they leak at exit


if __name__ == "__main__":
    main()
