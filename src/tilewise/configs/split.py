"""Whether float32 operands are brought into another form before their products (``backends/triton/split.py``), and into which.

It pays where a tensor core multiplies bfloat16 faster than the TF32 products that it stands for, and where copies of the operands
(6 bytes an element with three parts, 4 otherwise) are made quickly beside the products: on sm_90, from some length on. A processor
that is not in ``_LEAST`` multiplies operands as they are: by three TF32 products, or by one.
"""

from __future__ import annotations

from ..problem import Problem
from .tiles import chunks

__all__ = ["operand_bytes", "parts_of", "turned"]

# Queries and keys from which on the copies cost less than they save; in the interpreter so that tests run both ways.
_LEAST = {"sm_90": 1024, "cpu": 96}
_WIDEST = 128  # columns up to which a forward pass holds a tile of queries in this form


def _fits(problem: Problem, pass_: str) -> bool:
    sizes = (problem.head_dim, problem.head_dim_v)
    return pass_ != "fwd" or (max(sizes) <= _WIDEST and not any(chunks(size)[1] for size in sizes))


def _pays(problem: Problem) -> bool:
    p = problem
    least = _LEAST.get(p.arch.name)
    return p.dtype == "float32" and least is not None and p.bulk and min(p.seqlen_q, p.seqlen_k) >= least


def parts_of(problem: Problem, pass_: str) -> int:
    """In how many bfloat16 parts a pass takes its operands; 1: whole.

    The passes are those of a config, and of a backward pass that keeps its weights "weights" and the products with what is
    "kept". Three parts are as accurate as IEEE products; two are more exact than TF32, and read as they lie in memory.
    """
    if pass_ not in ("fwd", "weights", "kept") or not _pays(problem) or not _fits(problem, pass_):
        return 1
    if problem.precision == "ieee":
        return 3
    return 2 if pass_ == "kept" else 1


def turned(problem: Problem) -> bool:
    """Does the forward pass read v as columns, so that TF32 products are those of warpgroups?"""
    return problem.precision == "tf32" and _pays(problem) and _fits(problem, "fwd")


def operand_bytes(problem: Problem, pass_: str) -> int:
    """Bytes that an element of an operand takes in all its parts."""
    parts = parts_of(problem, pass_)
    return problem.itemsize if parts == 1 else 2 * parts
