"""Tile sizes and launch parameters of the ``hopper`` backend's forward kernel, by head_dim and head_dim_v."""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass

from ..problem import Problem
from . import records

__all__ = [
    "CHOICES",
    "FORMS",
    "LISTED",
    "PICKED",
    "HopperConfig",
    "columns",
    "few_tiles",
    "illegal",
    "lookup",
    "origin",
    "packs",
    "shared_memory",
    "softcap_bounds",
    "suits_guard",
]

# Registers of a consumer's and of the producer's threads, by consumers and programs on a multiprocessor.
_REGISTERS = {(2, 1): (240, 24), (3, 1): (160, 32), (4, 1): (112, 32), (2, 2): (104, 32)}


@dataclass(frozen=True)
class HopperConfig:
    """One config. ``block_m`` counts queries, 64 for each consumer; ``block_n`` keys; ``stages`` slots of keys and of values;
    ``q_slots`` query tiles. ``overlap``: scores of the next tile are made above the product of the last one. ``dynamic``: as many
    programs as fit on the device, which take tiles from a counter; otherwise a program a tile, longest first. ``guarded``: a hasty
    kernel, which keeps the first tile's maximum as the reference, and behind it the careful one, which does the call again if the
    hasty one says that its result may be wrong. ``resident``: programs on a multiprocessor."""

    block_m: int
    block_n: int
    stages: int
    q_slots: int
    overlap: bool
    dynamic: bool
    guarded: bool = False
    resident: int = 1

    @property
    def registers(self) -> tuple[int, int]:
        """Of each thread of a consumer and of the producer."""
        return _REGISTERS[self.block_m // 64, self.resident]


# Products of one query and one key element from which on a second launch, nearly always an empty one, is worth its microseconds.
LEAST_GUARDED_WORK = 1 << 33

# exp2(cap log2(e)) is 2^72 at the most.
LARGEST_FIXED_CAP = 50.0

# The forms of a call's kernels, by whether its config is guarded.
FORMS = {False: ("careful",), True: ("hasty", "redo")}


def _both(*sizes: int, **flags: bool) -> tuple[HopperConfig, HopperConfig]:
    """A dynamic config, careful and guarded."""
    careful = HopperConfig(*sizes, overlap=flags.get("overlap", True), dynamic=True)
    return careful, dataclasses.replace(careful, guarded=True)


# By (head_dim, head_dim_v): what may run, to be timed against one another (``benchmarks/hopper.py --every``). The first PICKED are
# those that ``lookup`` takes: a program a tile, careful, guarded, then guarded ones for the lengths where they were the fastest.
PICKED = {(64, 64): 5, (96, 96): 3, (128, 128): 4, (192, 128): 3, (192, 192): 3, (256, 256): 3}
CHOICES: dict[tuple[int, int], tuple[HopperConfig, ...]] = {
    (64, 64): (
        HopperConfig(256, 64, 4, 1, False, False),
        *_both(256, 64, 4, 2, overlap=False),
        HopperConfig(128, 64, 3, 1, False, True, True, 2),
        HopperConfig(192, 128, 2, 2, False, True, True),
        *_both(256, 64, 4, 2),
        *_both(192, 128, 2, 2),
        *_both(128, 128, 4, 2),
    ),
    (96, 96): (HopperConfig(128, 128, 3, 1, True, False), *_both(192, 64, 4, 2), *_both(128, 128, 3, 2)),
    (128, 128): (
        HopperConfig(128, 128, 2, 1, True, False),
        *_both(128, 128, 2, 2),
        HopperConfig(128, 64, 4, 2, True, True, True),
        HopperConfig(128, 64, 4, 2, True, True),
        *_both(192, 64, 3, 2),
    ),
    (192, 128): (HopperConfig(128, 128, 2, 1, True, False), *_both(128, 128, 2, 1), *_both(128, 64, 3, 2)),
    (192, 192): (HopperConfig(128, 64, 2, 1, True, False), *_both(128, 64, 2, 2)),
    (256, 256): (HopperConfig(128, 64, 2, 1, True, False), *_both(128, 64, 2, 1)),
}
# Where a list says which tiles are visited: few keys a tile, since those at the edges of a document are worked on in vain, and two
# consumers, since both work on every tile of the list. Other head dims take the careful one of CHOICES.
LISTED = {(64, 64): HopperConfig(128, 64, 4, 2, True, True), (128, 128): HopperConfig(128, 64, 4, 2, True, True)}


def columns(size: int) -> int:
    """Columns of a chunk: the largest power of two that divides ``size``, a head_dim."""
    return size & -size


def shared_memory(problem: Problem, config: HopperConfig) -> int:
    """Bytes of shared memory: the query tiles, the stages of keys and values, and 1 KB for barriers and alignment; ALiBi may need
    16 columns more beside a tile of keys."""
    queries = config.q_slots * config.block_m * problem.head_dim
    keys = config.stages * config.block_n * (problem.head_dim + problem.head_dim_v)
    ramp = config.block_n * 32 if problem.spec.steps == ("alibi",) else 0
    return (queries + keys) * problem.itemsize + ramp + 1024


def illegal(problem: Problem, config: HopperConfig) -> str | None:
    """Why this config may not run this problem; None if it may."""
    consumers = config.block_m // 64
    if config.block_m % 64 or (consumers, config.resident) not in _REGISTERS:
        return f"block_m is {config.block_m} with resident {config.resident}, expected 128 (1 or 2), 192 or 256 (1)"
    if config.block_n < 16 or config.block_n & (config.block_n - 1):
        return f"block_n is {config.block_n}, expected a power of two of at least 16"
    if config.stages < 1 or not 1 <= config.q_slots <= 3:
        return f"stages is {config.stages} and q_slots {config.q_slots}, expected at least 1 and 1 to 3"
    if config.guarded and problem.dtype != "bfloat16":
        return f"it is guarded and the dtype is {problem.dtype}: without a running maximum p needs the exponents of bfloat16"
    need = config.resident * shared_memory(problem, config)
    if need > problem.arch.shared_memory:
        return f"it needs {need} bytes of shared memory, {problem.arch.name} has {problem.arch.shared_memory}"
    return None


@functools.lru_cache(maxsize=4096)
def packs(problem: Problem, config: HopperConfig) -> int:
    """How many query heads of a group are worked on as one: all of them where that saves a tenth of the tiles, or none (1).

    Less tiles than multiprocessors save nothing: each would only take longer. Slopes and tables of tiles are those of one head.
    """
    p = problem
    if p.group not in (2, 4, 8, 16, 32, 64) or "alibi" in p.spec.steps or p.spec.segment or p.spec.row:
        return 1
    apart = p.batch * p.heads_q * -(-p.seqlen_q // config.block_m)
    packed = p.batch * p.heads_kv * -(-p.seqlen_q * p.group // config.block_m)
    return p.group if max(packed, p.arch.multiprocessors) <= 0.9 * apart else 1


def softcap_bounds(problem: Problem) -> bool:
    """Does a softcap, as the last step, keep all scores so near 0 that they need no other reference? Sums stay below 2^100."""
    p = problem
    return p.spec.steps[-1:] == ("softcap",) and (p.spec.softcap or 0.0) <= LARGEST_FIXED_CAP


def suits_guard(problem: Problem) -> bool:
    """Does the first tile of keys that 64 rows visit hold a key that each of them sees? If not, a guarded call is done twice.

    The last key of a row moves with the row, so 64 rows find theirs in one tile if the first row's is the first of 64. A list of
    tiles says nothing of the kind, and with ALiBi keys far to the right are no measure of those nearby. Where a softcap bounds the
    scores there is no first reference.
    """
    p = problem
    if softcap_bounds(p):
        return True
    upper, lower, has_upper, has_lower = p.bounds
    if p.spec.segment or p.spec.row or ("alibi" in p.spec.steps and not (has_upper and upper <= 0)):
        return False
    first, last = p.q_start, p.q_start + p.seqlen_q - 1
    if has_upper and (first + upper < 0 or (first + upper) % 64):
        return False
    return not (has_lower and (last - lower >= p.seqlen_k or (has_upper and upper < -lower)))


def _guarded_place(problem: Problem) -> int:
    """Which of CHOICES was the fastest for a long call: with an upper bound, whose tiles are of all lengths, and without."""
    p = problem
    _, _, has_upper, _ = p.bounds
    if p.head_dim == 64:
        if has_upper:
            return 3 if p.seqlen_k < 8192 else 2
        return 2 if p.seqlen_k < 8192 else 4
    if p.head_dim == 128:
        return 3 if has_upper and p.seqlen_k < 2048 else 2
    if p.head_dim == 256:
        return 2 if has_upper or p.seqlen_k >= 8192 else 1
    return 2


def few_tiles(problem: Problem) -> bool:
    """Are there no more tiles of queries than multiprocessors?"""
    p = problem
    static = CHOICES[p.head_dim, p.head_dim_v][0]
    return p.batch * p.heads_q * -(-p.seqlen_q // static.block_m) <= p.arch.multiprocessors


def _rule(problem: Problem) -> HopperConfig:
    """Guarded where that is legal, pays and suits; if not, tiles from a counter where that pays.

    It does not while the tiles are few, nor for careful long calls with an upper bound at head dims from 128 on.
    """
    p = problem
    _, _, has_upper, has_lower = p.bounds
    static, careful = CHOICES[p.head_dim, p.head_dim_v][:2]
    if p.spec.segment or p.spec.row:
        return LISTED.get((p.head_dim, p.head_dim_v), careful)
    if few_tiles(p):
        return static
    work = p.batch * p.heads_q * p.seqlen_q * p.seqlen_k * p.head_dim
    if work >= LEAST_GUARDED_WORK and suits_guard(p):
        picked = CHOICES[p.head_dim, p.head_dim_v][_guarded_place(p)]
        if illegal(p, picked) is None:
            return picked
    return static if p.head_dim >= 128 and p.seqlen_k >= 8192 and has_upper and not has_lower else careful


def _lookup(problem: Problem) -> tuple[HopperConfig, str]:
    # Records are of calls whose specs have bounds only.
    own = records.find(problem, "hopper", "fwd") if not problem.spec.terms else None
    suits = own is not None and illegal(problem, own.config) is None
    if own is not None and suits and (own.tried or not own.config.guarded or suits_guard(problem)):
        return own.config, own.origin
    return _rule(problem), records.BUILT_IN


def lookup(problem: Problem) -> HopperConfig:
    """The config for this problem: the user's record where it is legal and suits, or the built-in rule."""
    return _lookup(problem)[0]


def origin(problem: Problem) -> str:
    """Where the config of ``lookup`` comes from."""
    return _lookup(problem)[1]
