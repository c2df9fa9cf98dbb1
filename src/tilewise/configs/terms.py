"""Tiles that were measured where the mask or the bias is a tensor, and where dq and the gradient of a bias share a kernel.

Times are those of kernels on an H200 (Triton 3.9): a dense mask of 1 x 16 x 8192 x 128, half of whose tiles of 128 are empty and a
quarter random, and a bias of 4 x 16 x 2048 x 64 that the batch shares; ``docs/performance/features.md`` has all that were timed.
"""

from __future__ import annotations

from ..problem import Problem

__all__ = ["MEMBERS", "SHARED", "TERMS", "bias_members", "term_of"]

Tile = tuple[int, int, int, int]  # block_m, block_n, num_warps, num_stages

# By (architecture, the one term besides bounds, bytes an element, padded head_dim, pass). Lengths from 2,048 on: shorter ones lack
# the tiles to fill the device with larger ones.
TERMS: dict[tuple[str, str, int, int, str], Tile] = {
    # Two programs share a processor, and that is worth the 250 bytes that the loop with a mask spills: 0.596 ms; 128 x 64 with
    # eight warps 0.779, 64 x 64 0.648.
    ("sm_90", "dense", 2, 128, "fwd"): (128, 64, 4, 2),
    ("sm_90", "dense", 2, 128, "dq"): (64, 64, 4, 2),  # 0.681; 128 x 32 0.831, 128 x 64 0.793
    ("sm_90", "dense", 2, 128, "dkdv"): (64, 64, 4, 2),  # 0.950; 64 x 128, the measured tile without a mask, 1.073
    # Ids and intervals (2026-12-01), 1 x 16 x 16384 x 128 in documents of 256, 1,024 and 4,096 tokens, causal: smaller tiles waste
    # less at the ends of documents. 0.148, 0.272 and 0.764 ms; 128 x 64 with eight warps 0.149, 0.293 and 0.854.
    ("sm_90", "ids", 2, 128, "fwd"): (64, 64, 4, 2),
    ("sm_90", "ids", 2, 128, "dq"): (64, 64, 4, 2),  # 0.134, 0.265 and 0.811; 128 x 64 with eight warps 0.161, 0.311 and 0.917
    # More rows for every tile of keys that is read, the bias apart: 0.271 ms; 64 x 64 0.296.
    ("sm_90", "bias", 2, 64, "dq"): (128, 64, 8, 2),
    # Few rows at a time leave registers for four programs: 0.459; 64 x 64 0.561, 64 x 128 0.651.
    ("sm_90", "bias", 2, 64, "dkdv"): (32, 64, 4, 2),
}

MEMBERS = 4  # sequences that one program can hold side by side (``dq_bias.py``)

# Where dq and the gradient of a bias come from one kernel: by architecture, the widest head and the tiles for 1 to MEMBERS
# sequences. Without an entry the gradient of the bias has a pass of its own.
SHARED: dict[str, tuple[int, tuple[Tile, ...]]] = {
    "cpu": (1024, ((32, 32, 4, 1),) * MEMBERS),
    # Four: 0.583 ms; dq and a pass of its own 0.271 + 0.429. The others were not timed: one has the tile of dq by itself, two and
    # three have that of four.
    "sm_90": (64, ((128, 64, 8, 2), *((128, 32, 8, 2),) * (MEMBERS - 1))),
}


def term_of(problem: Problem) -> str | None:
    """What tensors the spec has, bounds and sink apart: a "bias", a "dense" mask, or "ids" of documents and intervals; None for
    several of them, and beside other steps."""
    spec = problem.spec
    tensors = [term for term in ("segment", "row", "dense") if term in spec.terms]
    if spec.dropout:
        return None
    if tensors == ["dense"] and not spec.steps:
        return "dense"
    if tensors and "dense" not in tensors and not spec.steps:
        return "ids"
    return "bias" if spec.steps == ("bias",) and not tensors else None


def bias_members(problem: Problem) -> int:
    """How many sequences a program of ``dq_bias.py`` holds; 0 where the gradient of the bias has a pass of its own.

    The bias must be the one step of the scores and have an element for each of them, but that sequences may share it.
    """
    p, bias = problem, problem.operand("bias")
    if bias is None or term_of(p) != "bias" or not {"q", "b"} <= set(p.grad):
        return 0
    if not (bias.has("h") or p.heads_q == 1) or not bias.has("q") or not bias.has("k"):
        return 0
    if p.itemsize > 2 and p.arch.kind != "cpu":  # their products take registers twice over
        return 0
    members = 1 if bias.has("b") or p.batch == 1 else p.batch
    entry = SHARED.get(p.arch.name)
    if members > MEMBERS or entry is None or max(p.head_dim, p.head_dim_v) > entry[0]:
        return 0
    return members
