"""Whether float32 operands are split into bfloat16 parts (``backends/triton/split.py``), in how many, and the tiles.

It pays where a tensor core multiplies bfloat16 faster than the products of TF32 that it stands for, and where copies of the operands
(6 bytes an element with three parts, 4 with two) are made quickly beside the products: on sm_90, from some length on.
"""

from __future__ import annotations

from ..problem import Problem

__all__ = ["operand_bytes", "parts_of"]

_LEAST = 1024  # queries and keys below which the copies cost more than they save


def parts_of(problem: Problem, pass_: str) -> int:
    """In how many parts a pass (``"fwd"`` or ``"wide"``) of a problem takes its operands; 1: whole."""
    return _parts(problem, pass_)


def _parts(problem: Problem, pass_: str) -> int:
    p = problem
    if p.dtype != "float32" or p.arch.name != "sm_90" or not p.bulk or min(p.seqlen_q, p.seqlen_k) < _LEAST:
        return 1
    if max(p.head_dim, p.head_dim_v) > 256:
        return 1
    return 3 if p.precision == "ieee" else 2


def operand_bytes(problem: Problem, pass_: str) -> int:
    """Bytes of shared memory that an element of q, k or v takes in all its parts."""
    parts = parts_of(problem, pass_)
    return problem.itemsize if parts == 1 else 2 * parts
