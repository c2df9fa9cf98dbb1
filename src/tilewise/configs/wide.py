"""Whether the weights of a backward pass beyond 256 columns are kept in memory, for how many heads at a time, and the tiles."""

from __future__ import annotations

from dataclasses import dataclass

from ..problem import Problem
from . import Config

__all__ = ["Walk", "WideConfig", "config_of", "units_kept"]

# What of a spec these kernels know of; with anything else weights are not kept.
_KNOWN = frozenset(("softcap", "alibi", "bias", "sink", "segment", "row", "dense"))
NARROW = 256  # columns up to which the other kernels are the better ones
_COPIES = 4  # of dq in float32: as much memory as what is kept may take


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


_DEFAULT = WideConfig(Config(128, 128, 8, 3), 64, Walk(64, 256, 8, 3), Walk(64, 256, 8, 3))
_INTERPRETED = WideConfig(Config(32, 64, 4, 1), 64, Walk(16, 256, 4, 1), Walk(32, 256, 4, 1))


def config_of(problem: Problem) -> WideConfig:
    return _INTERPRETED if problem.arch.kind == "cpu" else _DEFAULT


def units_kept(problem: Problem) -> int:
    """Of how many heads of keys (of all batches) weights are kept at a time; 0: they are not kept.

    They take at most as much memory as four float32 copies of dq, which is all heads at once up to 2,048 keys at 512 columns.
    """
    p = problem
    suits = p.arch.kind == "cpu" or (p.bulk and p.arch.bulk_copy and p.arch.shared_memory >= 200_000)
    if max(p.head_dim, p.head_dim_v) <= NARROW or p.itemsize > 2 or not suits or set(p.spec.terms) - _KNOWN:
        return 0
    config = config_of(p).weights
    rows, keys = (-(-n // block) * block for n, block in ((p.seqlen_q, config.block_m), (p.seqlen_k, config.block_n)))
    room = _COPIES * 4 * p.batch * p.heads_q * p.seqlen_q * p.head_dim
    return min(p.batch * p.heads_kv, room // (p.group * rows * keys * 2 * p.itemsize))
