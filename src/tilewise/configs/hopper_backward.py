"""Tile sizes and launch parameters of the ``hopper`` backend's backward kernels, by head_dim and head_dim_v."""

from __future__ import annotations

from dataclasses import dataclass

from ..problem import Problem
from . import records
from .hopper import columns

__all__ = [
    "ADDING",
    "ADDS",
    "DKDV",
    "DQ",
    "KEEPS",
    "KEPT",
    "AddingConfig",
    "BackwardConfig",
    "Dims",
    "KeptConfig",
    "KeysConfig",
    "QueriesConfig",
    "adds",
    "dims_of",
    "fills",
    "heads_kept",
    "illegal",
    "illegal_backward",
    "in_chunks",
    "lookup_adding",
    "lookup_dkdv",
    "lookup_dq",
    "lookup_kept",
    "origin",
    "padded_rows",
    "shared_memory",
    "takes_adding",
]

_BARRIERS = 1024  # bytes set aside for barriers and alignment
_TURNS = 448  # beyond them, for what a program writes down of the tiles of keys that it works on


@dataclass(frozen=True)
class KeysConfig:
    """The kernel that holds keys and makes dk and dv. ``block_n`` keys a program, 64 for each consumer; ``block_m`` queries a tile;
    ``stages`` slots of queries. With ``p_slots`` one warpgroup makes dv of 64 keys, and hands p through as many slots to another,
    which makes dk."""

    block_m: int
    block_n: int
    stages: int
    consumer_registers: int
    feeder_registers: int
    p_slots: int = 0


@dataclass(frozen=True)
class QueriesConfig:
    """The kernel that holds ``block_m`` queries, 64 for each consumer, and makes dq. ``overlap``: the product of one tile of keys
    is made below those of the next."""

    block_m: int
    block_n: int
    k_stages: int
    v_stages: int
    overlap: bool
    consumer_registers: int
    producer_registers: int


@dataclass(frozen=True)
class KeptConfig:
    """The kernel that makes dq of ``block_m`` queries, 64 for each consumer, from a ds in memory."""

    block_m: int
    stages: int
    consumer_registers: int
    producer_registers: int


@dataclass(frozen=True)
class AddingConfig:
    """The kernel that makes all three gradients and adds dq up in memory. ``ds_slots`` tiles of ds between the two consumers, of 64
    keys each, and the warpgroup that adds; ``early``: ds is handed over above the product that makes dk, rather than below it.
    ``programs`` at most share the tiles of keys; 0: one for each multiprocessor, which has no room for two."""

    block_m: int
    block_n: int
    stages: int
    ds_slots: int
    consumer_registers: int
    adder_registers: int
    early: bool
    programs: int = 0


@dataclass(frozen=True)
class BackwardConfig:
    """A whole backward pass, as a record holds it: the kernel over keys, and either the kernel that makes dq from the beginning or
    that which makes it from a ds in memory."""

    keys: KeysConfig
    queries: QueriesConfig | None = None
    kept: KeptConfig | None = None


# head_dim, or head_dim and head_dim_v where they differ.
Dims = int | tuple[int, int]

# The first of each is the default.
DKDV: dict[Dims, tuple[KeysConfig, ...]] = {
    64: (KeysConfig(64, 192, 4, 160, 32), KeysConfig(64, 128, 4, 240, 24), KeysConfig(128, 128, 3, 240, 24)),
    128: (KeysConfig(64, 128, 3, 240, 24), KeysConfig(64, 128, 2, 240, 24)),
    256: (KeysConfig(64, 64, 2, 240, 24, 2), KeysConfig(64, 64, 2, 240, 24, 1)),
    96: (KeysConfig(64, 128, 4, 240, 24), KeysConfig(64, 128, 3, 240, 24)),
    (192, 128): (KeysConfig(64, 128, 2, 240, 24), KeysConfig(64, 64, 3, 240, 24, 2)),
    192: (KeysConfig(64, 64, 3, 240, 24, 2), KeysConfig(64, 64, 2, 240, 24, 2)),
}
DQ: dict[Dims, tuple[QueriesConfig, ...]] = {
    64: (
        QueriesConfig(192, 64, 4, 4, False, 160, 32),
        QueriesConfig(192, 64, 4, 4, True, 160, 32),
        QueriesConfig(128, 128, 4, 4, False, 240, 24),
    ),
    128: (
        QueriesConfig(128, 128, 2, 2, False, 240, 24),
        QueriesConfig(128, 64, 4, 3, True, 240, 24),
        QueriesConfig(128, 64, 4, 4, False, 240, 24),
    ),
    256: (QueriesConfig(128, 64, 2, 1, False, 240, 24), QueriesConfig(128, 32, 3, 3, True, 240, 24)),
    96: (QueriesConfig(128, 128, 3, 3, False, 240, 24), QueriesConfig(128, 64, 4, 4, False, 240, 24)),
    (192, 128): (QueriesConfig(128, 64, 4, 3, False, 240, 24), QueriesConfig(128, 64, 4, 3, True, 240, 24)),
    192: (QueriesConfig(128, 64, 3, 2, False, 240, 24),),
}
# Of DQ, where a softcap or a list of tiles needs registers of its own: one with small tiles.
SMALL_TILES = {64: 0, 128: 2, 256: 0}
# Of DQ, where ALiBi does: two consumers.
RAMPS = {64: 2}
# Of DKDV, where score steps need registers of their own: two consumers.
SPACIOUS = {64: 1}

# By head_dim and whether there is an upper bound.
ADDING: dict[tuple[int, bool], tuple[AddingConfig, ...]] = {
    (64, False): (AddingConfig(128, 128, 3, 2, 216, 72, False),),
    (64, True): (AddingConfig(64, 128, 4, 2, 216, 72, True),),
    (128, False): (AddingConfig(64, 128, 3, 2, 216, 72, True),),
    (128, True): (AddingConfig(64, 128, 3, 2, 216, 72, True),),
}
KEPT: dict[Dims, tuple[KeptConfig, ...]] = {
    64: (KeptConfig(256, 4, 112, 32),),
    128: (KeptConfig(256, 3, 112, 32), KeptConfig(128, 5, 240, 24)),
    256: (KeptConfig(128, 3, 240, 24),),
    96: (KeptConfig(256, 3, 112, 32), KeptConfig(128, 4, 240, 24)),
    (192, 128): (KeptConfig(128, 4, 240, 24),),
    192: (KeptConfig(128, 4, 240, 24),),
}
# A ds in memory may take as many bytes as this many float32 copies of dq: linear in the length of a sequence.
MOST_COPIES = 8
# Where that was the faster way, by head dims and whether there is an upper bound: classes of the number of keys.
KEEPS: dict[tuple[Dims, bool], tuple[str, ...]] = {
    (64, False): (),
    (64, True): (),
    (128, False): ("short", "medium", "long"),
    (128, True): ("short", "medium", "long"),
    (256, False): ("short", "medium", "long"),
    (256, True): ("short", "medium", "long"),
    (96, False): (),
    (96, True): (),
    ((192, 128), False): ("medium",),
    ((192, 128), True): ("medium", "long"),
    (192, False): (),
    (192, True): (),
}
# Where the kernel that adds dq up in memory was faster with everything included: classes of the number of keys. An empty
# class switches it off, whatever a call asks for.
ADDS: dict[tuple[int, bool], tuple[str, ...]] = {
    (64, False): ("short", "medium", "long"),
    (64, True): ("short", "medium", "long"),
    (128, False): ("medium", "long"),
    (128, True): ("short", "medium", "long"),
}


def dims_of(problem: Problem) -> Dims:
    """Where this problem stands in the tables."""
    p = problem
    return p.head_dim if p.head_dim == p.head_dim_v else (p.head_dim, p.head_dim_v)


def in_chunks(problem: Problem) -> bool:
    """Do the tiles of this problem lie in chunks, or have two widths?"""
    return problem.head_dim != problem.head_dim_v or columns(problem.head_dim) != problem.head_dim


def padded_rows(problem: Problem) -> int:
    """Numbers kept for the rows of one head: whole tiles of queries of every config."""
    return -(-problem.seqlen_q // 128) * 128


def _never_keeps(problem: Problem) -> bool:
    """Is ds never kept in memory? A list of tiles would leave gaps in it, and beside ALiBi its copies serialise the products."""
    return problem.spec.segment or problem.spec.row or "alibi" in problem.spec.steps


def shared_memory(problem: Problem, config: KeysConfig | QueriesConfig | KeptConfig | AddingConfig) -> int:
    """Bytes of shared memory that this config needs at most; a kernel over keys with ds on its way to memory."""
    row, row_v = problem.head_dim * problem.itemsize, problem.head_dim_v * problem.itemsize
    ramp = 32 if problem.spec.steps == ("alibi",) else 0  # for each row of a streamed tile
    if isinstance(config, QueriesConfig):
        tiles = config.block_m * (row + row_v) + config.block_n * (config.k_stages * row + config.v_stages * row_v)
        return tiles + ramp * config.block_n + _BARRIERS
    if isinstance(config, AddingConfig):
        streamed = config.stages * config.block_m * (2 * row + 8)
        handed = config.ds_slots * config.block_n * config.block_m * problem.itemsize
        # Keys, values, and dk on its way to memory.
        return 3 * config.block_n * row + streamed + handed + _TURNS + _BARRIERS
    if isinstance(config, KeptConfig):
        return config.stages * 64 * (config.block_m * problem.itemsize + row) + config.block_m * row + _BARRIERS
    streamed = config.stages * config.block_m * (row + row_v + 8) + ramp * config.block_m
    handed = 64 * config.block_m * problem.itemsize
    # One consumer of 64 keys makes ds; in the form with slots for p there is one for all keys.
    kept = 0 if _never_keeps(problem) else 2 * handed * (1 if config.p_slots else config.block_n // 64)
    return config.block_n * (row + row_v) + streamed + config.p_slots * handed + kept + _BARRIERS


def illegal(problem: Problem, config: KeysConfig | QueriesConfig | KeptConfig | AddingConfig) -> str | None:
    """Why this config may not run this problem; None if it may."""
    if isinstance(config, AddingConfig):
        blocks = {"block_m": (64, 128), "block_n": (128,)}
        if not 3 <= config.stages < 8:
            return f"stages is {config.stages}, expected at least 3, as tiles are fed ahead of the adds, and fewer than 8"
    elif isinstance(config, KeysConfig):
        blocks = {"block_m": (64, 128), "block_n": (64, 128, 192)}
        if in_chunks(problem):
            blocks = {"block_m": (64,), "block_n": (64,) if config.p_slots else (128,)}
    elif isinstance(config, QueriesConfig):
        blocks = {"block_m": (128,) if in_chunks(problem) else (128, 192), "block_n": (32, 64, 128)}
    else:
        blocks = {"block_m": (128, 256)}
    for name, legal in blocks.items():
        if getattr(config, name) not in legal:
            return f"{name} is {getattr(config, name)}, expected {' or '.join(map(str, legal))}"
    need = shared_memory(problem, config)
    if need > problem.arch.shared_memory:
        return f"it needs {need} bytes of shared memory, {problem.arch.name} has {problem.arch.shared_memory}"
    return None


def illegal_backward(problem: Problem, config: BackwardConfig) -> str | None:
    """Why this way may not make the gradients of this problem; None if it may."""
    if config.kept is not None and problem.bounds[3]:
        return "ds is kept in memory and there is a lower bound: a band would fill little of that memory"
    parts = [part for part in (config.keys, config.queries, config.kept) if part is not None]
    return next((why for why in (illegal(problem, part) for part in parts) if why is not None), None)


def _length(problem: Problem) -> str:
    """The class of the number of keys, in ``KEEPS`` and ``ADDS``."""
    return "short" if problem.seqlen_k < 2048 else "medium" if problem.seqlen_k < 8192 else "long"


def _own(problem: Problem) -> records.Found | None:
    """The user's record for this problem, where it is legal. Records are of calls whose specs have bounds only."""
    if problem.spec.terms:
        return None
    own = records.find(problem, "hopper", "bwd")
    return own if own is not None and illegal_backward(problem, own.config) is None else None


def lookup_dkdv(problem: Problem) -> KeysConfig:
    """The config of the kernel that makes dk and dv."""
    own = _own(problem)
    place = SPACIOUS.get(problem.head_dim, 0) if problem.spec.steps else 0
    return DKDV[dims_of(problem)][place] if own is None else own.config.keys


def lookup_dq(problem: Problem) -> QueriesConfig:
    """The config of the kernel that makes dq."""
    own, p = _own(problem), problem
    place = 0
    if p.spec.softcap is not None or p.spec.segment or p.spec.row:
        place = SMALL_TILES[p.head_dim]
    elif p.spec.steps:
        place = RAMPS.get(p.head_dim, 0)
    return (own and own.config.queries) or DQ[dims_of(p)][place]


def takes_adding(problem: Problem) -> bool:
    """Can the kernel that adds dq up in memory do this?"""
    p = problem
    _, _, has_upper, has_lower = p.bounds
    return (p.head_dim, has_upper) in ADDING and p.head_dim_v == p.head_dim and not (p.spec.terms or has_lower)


def adds(problem: Problem, config: AddingConfig) -> bool:
    """Is dq to be added up in memory? Where that was the faster way, and the programs fill the device, as they did there.

    Not for groups at head_dim 128: 32 heads over 8, causal, took 0.86 and 0.87 of the time of ``triton`` in one run, and 0.74 and
    0.82 without (4 x 4,096 and 1 x 16,384).
    """
    if problem.group > 1 and problem.head_dim == 128:
        return False
    programs = problem.batch * problem.heads_kv * -(-problem.seqlen_k // config.block_n)
    return _length(problem) in ADDS[problem.head_dim, problem.bounds[2]] and programs >= problem.arch.multiprocessors


def lookup_adding(problem: Problem) -> AddingConfig | None:
    """The config of the kernel that makes all gradients and adds dq up in memory; None where the other kernels are as fast, or
    only they can do it."""
    if not takes_adding(problem):
        return None
    config = ADDING[problem.head_dim, problem.bounds[2]][0]
    return config if adds(problem, config) else None


def lookup_kept(problem: Problem) -> KeptConfig:
    """The config of the kernel that makes dq from a ds in memory."""
    own = _own(problem)
    return (own and own.config.kept) or KEPT[dims_of(problem)][0]


def origin(problem: Problem) -> str:
    """Where the configs come from."""
    own = _own(problem)
    return records.BUILT_IN if own is None else own.origin


def _keeps(problem: Problem) -> bool:
    """Is ds to be kept in memory? As the user's record says, or where that was the faster way."""
    p = problem
    _, _, has_upper, has_lower = p.bounds
    own = _own(p)
    if own is not None:
        return own.config.kept is not None
    return not has_lower and _length(p) in KEEPS[dims_of(p), has_upper]


def fills(problem: Problem, heads: int) -> bool:
    """Do the programs of so many heads of keys keep the device busy? With an upper bound they have work of all lengths, so there
    must be more of them than run at a time."""
    p = problem
    programs = heads * -(-p.seqlen_k // lookup_dkdv(p).block_n)
    return not p.bounds[2] or 2 * programs >= 3 * p.arch.multiprocessors or _own(p) is not None


def heads_kept(problem: Problem) -> int:
    """Of how many heads of keys ds is kept in memory at a time, a divisor of all; 0: dq is worked out from the beginning.

    Never with a lower bound: a band would fill little of its memory.
    """
    p = problem
    if _never_keeps(p) or not _keeps(p):
        return 0
    heads = p.batch * p.heads_kv
    a_head = p.group * (-(-p.seqlen_k // 64) * 64) * padded_rows(p) * p.itemsize
    fit = min(heads, MOST_COPIES * 4 * p.batch * p.heads_q * padded_rows(p) * p.head_dim // a_head)
    most = fit
    while fit and heads % fit:
        fit -= 1
    # A number of heads with few divisors would leave launches of a head or two, which fill no device.
    return fit if 2 * fit >= most and fills(p, fit) else 0
