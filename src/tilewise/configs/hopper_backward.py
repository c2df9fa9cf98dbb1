"""Tile sizes and launch parameters of the ``hopper`` backend's backward kernels, by head_dim."""

from __future__ import annotations

from dataclasses import dataclass

from ..problem import Problem
from . import records

__all__ = [
    "DKDV",
    "DQ",
    "EARLY",
    "KEEPS",
    "KEPT",
    "BackwardConfig",
    "KeptConfig",
    "KeysConfig",
    "QueriesConfig",
    "fuses",
    "heads_kept",
    "illegal",
    "illegal_backward",
    "lookup_dkdv",
    "lookup_dq",
    "lookup_kept",
    "origin",
    "padded_rows",
    "shared_memory",
]

_BARRIERS = 1024  # bytes set aside for barriers and alignment


@dataclass(frozen=True)
class KeysConfig:
    """The kernel that holds keys and makes dk and dv. ``block_n`` keys a program, 64 for each consumer; ``block_m`` queries a tile;
    ``stages`` slots of queries. In the form for head_dim 256 one warpgroup makes dv of 64 keys, and hands p through ``p_slots``
    slots to another, which makes dk."""

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
class BackwardConfig:
    """A whole backward pass, as a record holds it: the kernel over keys, and either the kernel that makes dq from the beginning or
    that which makes it from a ds in memory."""

    keys: KeysConfig
    queries: QueriesConfig | None = None
    kept: KeptConfig | None = None


# By head_dim. The first is the default.
DKDV: dict[int, tuple[KeysConfig, ...]] = {
    64: (KeysConfig(64, 192, 4, 160, 32), KeysConfig(64, 128, 4, 240, 24), KeysConfig(128, 128, 3, 240, 24)),
    128: (KeysConfig(64, 128, 3, 240, 24), KeysConfig(64, 128, 2, 240, 24)),
    256: (KeysConfig(64, 64, 2, 240, 24, 2), KeysConfig(64, 64, 2, 240, 24, 1)),
}
DQ: dict[int, tuple[QueriesConfig, ...]] = {
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
}
# Of DQ, where a softcap or a list of tiles needs registers of its own: one with small tiles.
SMALL_TILES = {64: 0, 128: 2, 256: 0}
# Of DQ, where FUSED makes do with fewer.
CAPPED = {64: 0, 128: 0, 256: 0}
# A softcap alone, in bfloat16: weights and its derivative in one block of instructions, score by score (``terms.capped_weights``).
FUSED = True
# dq: weights are made before they are masked; then exp2 runs under the product that makes dp.
EARLY = False
# Of DQ, where ALiBi does: two consumers.
RAMPS = {64: 2}
# Of DKDV, where score steps need registers of their own: two consumers.
SPACIOUS = {64: 1}

KEPT: dict[int, tuple[KeptConfig, ...]] = {
    64: (KeptConfig(256, 4, 112, 32),),
    128: (KeptConfig(256, 3, 112, 32), KeptConfig(128, 5, 240, 24)),
    256: (KeptConfig(128, 3, 240, 24),),
}
# A ds in memory may take as many bytes as this many float32 copies of dq: linear in the length of a sequence.
MOST_COPIES = 4
# Where that was the faster way, by (head_dim, with an upper bound): classes of the number of keys.
KEEPS: dict[tuple[int, bool], tuple[str, ...]] = {
    (64, False): (),
    (64, True): (),
    (128, False): ("short", "medium", "long"),
    (128, True): ("medium",),
    (256, False): ("short",),
    (256, True): ("short", "medium"),
}


def padded_rows(problem: Problem) -> int:
    """Numbers kept for the rows of one head: whole tiles of queries of every config."""
    return -(-problem.seqlen_q // 128) * 128


def _never_keeps(problem: Problem) -> bool:
    """Is ds never kept in memory? A list of tiles would leave gaps in it, and beside ALiBi its copies serialise the products."""
    return problem.spec.segment or problem.spec.row or "alibi" in problem.spec.steps


def shared_memory(problem: Problem, config: KeysConfig | QueriesConfig | KeptConfig) -> int:
    """Bytes of shared memory that this config needs at most; a kernel over keys with ds on its way to memory."""
    row = problem.head_dim * problem.itemsize
    ramp = 32 if problem.spec.steps == ("alibi",) else 0  # for each row of a streamed tile
    if isinstance(config, QueriesConfig):
        tiles = (2 * config.block_m + (config.k_stages + config.v_stages) * config.block_n) * row
        return tiles + ramp * config.block_n + _BARRIERS
    if isinstance(config, KeptConfig):
        return config.stages * 64 * (config.block_m * problem.itemsize + row) + config.block_m * row + _BARRIERS
    streamed = config.stages * config.block_m * (2 * row + 8) + ramp * config.block_m
    handed = 64 * config.block_m * problem.itemsize
    # One consumer of 64 keys makes ds; in the form with slots for p there is one for all keys.
    kept = 0 if _never_keeps(problem) else 2 * handed * (1 if config.p_slots else config.block_n // 64)
    return 2 * config.block_n * row + streamed + config.p_slots * handed + kept + _BARRIERS


def illegal(problem: Problem, config: KeysConfig | QueriesConfig | KeptConfig) -> str | None:
    """Why this config may not run this problem; None if it may."""
    if isinstance(config, KeysConfig):
        blocks = {"block_m": (64, 128), "block_n": (64, 128, 192)}
    elif isinstance(config, QueriesConfig):
        blocks = {"block_m": (128, 192), "block_n": (32, 64, 128)}
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
    return DKDV[problem.head_dim][place] if own is None else own.config.keys


def fuses(problem: Problem) -> bool:
    """Are the weights of a softcap made in one block of instructions?"""
    return FUSED and problem.dtype == "bfloat16" and problem.spec.steps == ("softcap",)


def lookup_dq(problem: Problem) -> QueriesConfig:
    """The config of the kernel that makes dq."""
    own, p = _own(problem), problem
    place = 0
    if fuses(p) and not (p.spec.segment or p.spec.row):
        place = CAPPED[p.head_dim]
    elif p.spec.softcap is not None or p.spec.segment or p.spec.row:
        place = SMALL_TILES[p.head_dim]
    elif p.spec.steps:
        place = RAMPS.get(p.head_dim, 0)
    return (own and own.config.queries) or DQ[p.head_dim][place]


def lookup_kept(problem: Problem) -> KeptConfig:
    """The config of the kernel that makes dq from a ds in memory."""
    own = _own(problem)
    return (own and own.config.kept) or KEPT[problem.head_dim][0]


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
    length = "short" if p.seqlen_k < 2048 else "medium" if p.seqlen_k < 8192 else "long"
    return not has_lower and length in KEEPS[p.head_dim, has_upper]


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
    return fit if 2 * fit >= most else 0
