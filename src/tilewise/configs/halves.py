"""Whether float32 operands are brought into float16 halves before their products (``backends/triton/halves.py``), and how many.

It pays where a tensor core multiplies float16 faster than the TF32 products that it stands for, and where copies of the operands
(4 bytes an element with two halves, 2 with one) are made quickly beside the products: on sm_90, from some length on. A processor
that is not in ``_LEAST`` multiplies operands as they are: by three TF32 products, or by one.
"""

from __future__ import annotations

from ..problem import Problem

__all__ = ["halves_of", "operand_bytes"]

# Queries and keys from which on the copies cost less than they save; in the interpreter so that tests run both ways.
_LEAST = {"sm_90": 1024, "cpu": 96}
_WIDEST = 512  # columns up to which a forward pass holds a tile of queries in this form, in one tile whatever their number is


def halves_of(problem: Problem, pass_: str) -> int:
    """In how many float16 halves a pass takes its operands; 0: whole.

    The passes are "fwd", and "weights" of a backward pass that keeps these, with the products of what is kept. Two halves are as
    accurate as IEEE products; one has as many bits as TF32 reads.
    """
    p, least = problem, _LEAST.get(problem.arch.name)
    if p.dtype != "float32" or least is None or not p.bulk or min(p.seqlen_q, p.seqlen_k) < least:
        return 0
    if pass_ not in ("fwd", "weights") or (pass_ == "fwd" and max(p.head_dim, p.head_dim_v) > _WIDEST):
        return 0
    return 1 if p.precision == "tf32" else 2


def operand_bytes(problem: Problem, pass_: str) -> int:
    """Bytes that an element of an operand takes in all its halves."""
    return 2 * halves_of(problem, pass_) or problem.itemsize
