"""Whether the weights of a pass are kept in memory, for how many heads at a time, and the tiles.

They are where the gradients of a tile fill the registers: beyond 256 columns, and beyond 64 for float32 inputs on a GPU.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..problem import Problem
from . import Config, misadded
from .halves import halves_of, operand_bytes

__all__ = ["Walk", "WideConfig", "config_of", "forward_units", "units_kept"]

# What of a spec these kernels know of; with anything else weights are not kept.
_KNOWN = frozenset(("softcap", "alibi", "bias", "sink", "segment", "row", "dense"))
_FLOOR = 2**28  # bytes on a GPU that are never too many: one head of 8,192 by 8,192 in half precision
NARROW = 256  # columns up to which the other kernels are the better ones for half precision
_FORWARD = ("sm_90",)  # where forward passes keep weights
# How many copies of dq in float32 may be kept, by bytes of an element: enough for a wave of programs at 4,096 keys.
_COPIES = {2: 4, 4: 8}
_COPIES_OF_HALVES = {1: 8, 2: 12}


@dataclass(frozen=True)
class Walk:
    """A kernel that holds a tile and streams ``step`` rows of the other side at a time, for ``columns`` columns of its result."""

    step: int
    columns: int
    num_warps: int
    num_stages: int


@dataclass(frozen=True)
class WideConfig:
    """``weights``: the tiles of what is kept; ``chunk`` columns of q, k, v and do stream past one of them at a time."""

    weights: Config
    chunk: int
    keys: Walk
    queries: Walk
    values: Walk


_BULK = WideConfig(Config(128, 128, 8, 4), 64, Walk(64, 128, 8, 4), Walk(64, 256, 8, 4), Walk(64, 256, 8, 3))
_POINTERS = WideConfig(Config(128, 128, 8, 2), 32, Walk(32, 128, 8, 2), Walk(32, 128, 8, 2), Walk(32, 128, 8, 2))
_SINGLE = WideConfig(Config(64, 64, 8, 2), 32, Walk(32, 64, 8, 2), Walk(32, 64, 8, 2), Walk(32, 64, 8, 2))
_SINGLE_SM_90 = WideConfig(Config(128, 128, 8, 3), 32, Walk(32, 128, 8, 3), Walk(32, 128, 8, 3), Walk(32, 128, 8, 3))
# By the number of halves; and for two of at most 128 columns, where programs wait for the first tiles rather than for products.
_HALVES = {
    1: WideConfig(Config(128, 64, 4, 3), 64, Walk(64, 128, 4, 3), Walk(64, 128, 8, 3), Walk(32, 128, 8, 3)),
    2: WideConfig(Config(128, 64, 8, 3), 64, Walk(32, 128, 4, 3), Walk(32, 128, 8, 3), Walk(32, 128, 8, 3)),
}
_SHORT_ROWS = WideConfig(Config(64, 64, 4, 3), 64, Walk(32, 128, 4, 3), Walk(32, 128, 4, 3), Walk(32, 128, 8, 3))
_INTERPRETED = WideConfig(Config(32, 64, 4, 1), 64, Walk(16, 256, 4, 1), Walk(32, 256, 4, 1), Walk(32, 256, 4, 1))


def config_of(problem: Problem) -> WideConfig:
    """The tiles of a problem. Where loads go through registers, or operands are made three of one, they are smaller."""
    if problem.arch.kind == "cpu":
        return _INTERPRETED
    halves = halves_of(problem, "weights")
    if halves:
        return _SHORT_ROWS if halves == 2 and max(problem.head_dim, problem.head_dim_v) <= 128 else _HALVES[halves]
    if problem.itemsize > 2:
        return _SINGLE_SM_90 if problem.arch.name == "sm_90" and problem.bulk else _SINGLE
    return _BULK if problem.bulk and problem.arch.bulk_copy and problem.arch.name != "sm_120" else _POINTERS


def units_kept(problem: Problem) -> int:
    """Of how many heads of keys (of all batches) weights are kept at a time; 0: they are not kept.

    They take at most as much memory as four float32 copies of dq (eight for float32 inputs), or 256 MiB, and half as much again
    where they are kept in two halves: all heads at once up to 2,048 keys at 512 columns, a part of them beyond, and none where
    not even one fits.
    """
    p = problem
    if p.itemsize not in _COPIES or set(p.spec.terms) - _KNOWN or misadded(p, not p.bulk):
        return 0
    if p.dtype == "float16" and p.arch.kind == "cpu":
        return 0  # so that the interpreter runs the other kernels as well
    if max(p.head_dim, p.head_dim_v) <= (NARROW if p.itemsize == 2 or p.arch.kind == "cpu" else NARROW // 4):
        return 0
    config = config_of(p).weights
    rows, keys = (-(-n // block) * block for n, block in ((p.seqlen_q, config.block_m), (p.seqlen_k, config.block_n)))
    halves = halves_of(p, "weights")
    # Of a pair: p and ds; of halves ds twice.
    size = 3 * operand_bytes(p, "weights") if halves else 2 * p.itemsize
    room = (_COPIES_OF_HALVES.get(halves) or _COPIES[p.itemsize]) * 4 * p.batch * p.heads_q * rows * p.head_dim
    if p.arch.kind != "cpu":
        room = max(room, _FLOOR * size // (2 * p.itemsize))
    return min(p.batch * p.heads_kv, room // (p.group * rows * keys * size))


def forward_units(problem: Problem) -> int:
    """Of how many heads of keys (of all batches) a forward pass keeps weights at a time; 0: it keeps none.

    It does beyond 256 columns on the processors ``_FORWARD``, by descriptors, in half precision, from 32 queries and keys on. The
    bound on memory is that of ``units_kept``, for one tensor in the place of two.
    """
    p = problem
    if set(p.spec.terms) - _KNOWN or p.spec.returns == "max_logit" or max(p.head_dim, p.head_dim_v) <= NARROW:
        return 0
    if p.arch.kind == "cpu":  # in the interpreter: float32 and bfloat16 alone, so that float16 runs the other kernel
        if p.dtype == "float16" or p.itemsize not in _COPIES:
            return 0
    elif p.arch.name not in _FORWARD or not p.bulk or p.itemsize > 2 or min(p.seqlen_q, p.seqlen_k) < 32:
        return 0
    config = config_of(p).weights
    rows, keys = (-(-n // block) * block for n, block in ((p.seqlen_q, config.block_m), (p.seqlen_k, config.block_n)))
    room = _COPIES[p.itemsize] * 4 * p.batch * p.heads_q * rows * p.head_dim_v
    if p.arch.kind != "cpu":
        room = max(room, _FLOOR)
    return min(p.batch * p.heads_kv, room // max(1, p.group * rows * keys * p.itemsize))
