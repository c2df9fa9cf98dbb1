"""Tile sizes and launch parameters of the ``hopper`` backend's kernels with an additive bias, by head_dim."""

from __future__ import annotations

from dataclasses import dataclass

from ..problem import Problem
from .hopper import HopperConfig
from .hopper_backward import QueriesConfig

__all__ = [
    "DBIAS",
    "DKDV",
    "DQ",
    "FWD",
    "SHARED",
    "BiasKeysConfig",
    "TileConfig",
    "illegal",
    "members",
    "shared_config",
    "shared_memory",
]

_BARRIERS = 1024  # bytes set aside for barriers and alignment


@dataclass(frozen=True)
class TileConfig:
    """A kernel that makes the gradient of a bias from tiles of it, ``block_m`` queries (64 for each consumer) by ``block_n`` keys.
    ``stages`` slots of what a head brings, ``bias_slots`` of tiles of the bias. ``late``, where it makes dq as well: the product
    for one sequence is waited for below those of the next."""

    block_m: int
    block_n: int
    stages: int
    bias_slots: int
    consumer_registers: int
    producer_registers: int
    late: bool = False


@dataclass(frozen=True)
class BiasKeysConfig:
    """The kernel that holds keys, 64 for each consumer, and makes dk and dv. ``in_registers``: keys and values are operands in
    registers, so that the products read less of shared memory."""

    block_m: int
    block_n: int
    stages: int
    in_registers: bool
    consumer_registers: int
    feeder_registers: int


# The first of each is taken; the others are there to be timed. Times are those of one kernel on an H200 (Triton 3.9), of
# 4 x 16 x 2048 x 64, or x 128, in bfloat16 with one bias for the batch; ``docs/performance/features.md`` has all that were timed.
FWD: dict[int, tuple[HopperConfig, ...]] = {
    64: (
        HopperConfig(256, 64, 3, 1, False, True),  # 0.205 ms; a program a tile 0.207, 192 x 64 0.232, 128 x 64 0.250
        HopperConfig(256, 64, 3, 2, False, True),
        HopperConfig(128, 128, 3, 1, True, True),  # 0.220; without the overlap 0.231
        HopperConfig(192, 128, 2, 1, False, True),  # 0.222
    ),
    128: (
        HopperConfig(128, 128, 2, 1, True, True),  # 0.308
        HopperConfig(128, 64, 3, 2, True, True),
        HopperConfig(128, 64, 4, 1, True, True),  # 0.324; a program a tile 0.340
    ),
}
DKDV: dict[int, tuple[BiasKeysConfig, ...]] = {
    64: (
        BiasKeysConfig(64, 192, 4, False, 160, 32),  # 0.349
        BiasKeysConfig(64, 128, 4, True, 240, 24),
        BiasKeysConfig(128, 128, 2, False, 240, 24),
        BiasKeysConfig(64, 128, 4, False, 240, 24),  # 0.361; three stages 0.355
    ),
    128: (BiasKeysConfig(64, 128, 2, False, 240, 24), BiasKeysConfig(64, 128, 3, False, 240, 24)),  # 0.511, 0.533
}
DQ: dict[int, tuple[QueriesConfig, ...]] = {
    64: (
        QueriesConfig(128, 128, 2, 2, False, 240, 24),  # 0.241
        QueriesConfig(192, 64, 4, 4, False, 160, 32),  # 0.257; 128 x 64 0.258
    ),
    128: (QueriesConfig(128, 64, 2, 2, False, 240, 24), QueriesConfig(128, 64, 3, 2, False, 240, 24)),  # 0.390, 0.391
}
DBIAS: dict[int, tuple[TileConfig, ...]] = {
    64: (
        TileConfig(128, 128, 2, 2, 240, 24),  # 0.224
        TileConfig(192, 64, 2, 2, 160, 32),  # 0.235; one slot for the bias 0.281, and 128 x 64 with one 0.309
    ),
    128: (TileConfig(128, 64, 2, 1, 240, 24),),  # 0.417
}

MEMBERS = 4  # sequences that one program can hold
# Where sequences share a bias of each head, and one kernel makes dq and its gradient; ``stages`` slots of keys and values.
SHARED: dict[int, tuple[TileConfig, ...]] = {
    64: (
        TileConfig(128, 32, 8, 1, 240, 24),  # 0.292; dq and the gradient apart 0.241 + 0.224
        TileConfig(128, 32, 8, 1, 240, 24, True),
        TileConfig(128, 32, 6, 2, 240, 24),  # 0.308; four slots of keys 0.307
    )
}


def members(problem: Problem) -> int:
    """How many sequences share the bias, if a program can hold them all; 0 if not."""
    p, bias = problem, problem.operand("bias")
    if bias is None or p.head_dim not in SHARED or p.batch > MEMBERS or not (bias.has("h") or p.heads_q == 1):
        return 0
    return 0 if bias.has("b") and p.batch > 1 else p.batch


def shared_config(problem: Problem) -> TileConfig | None:
    """The config of the kernel that makes dq and the gradient of the bias; None where there are two."""
    return SHARED[problem.head_dim][0] if {"q", "b"} <= set(problem.grad) and members(problem) > 1 else None


def shared_memory(problem: Problem, config: HopperConfig | BiasKeysConfig | QueriesConfig | TileConfig) -> int:
    """Bytes of shared memory that this config needs at most."""
    row, item = problem.head_dim * problem.itemsize, problem.itemsize
    if isinstance(config, HopperConfig):
        slot = config.block_n * (2 * row + config.block_m * item)
        return config.q_slots * config.block_m * row + config.stages * slot + _BARRIERS
    if isinstance(config, BiasKeysConfig):
        slot = config.block_m * (2 * row + 12 + config.block_n * item)
        return 2 * config.block_n * row + config.stages * slot + _BARRIERS
    if isinstance(config, QueriesConfig):
        keys = config.block_n * (config.k_stages * (row + config.block_m * item) + config.v_stages * row)
        return 2 * config.block_m * row + keys + _BARRIERS
    if config in SHARED.get(problem.head_dim, ()):
        resident = members(problem) * config.block_m * (2 * row + 12)
        streamed = config.stages * config.block_n * 2 * row
        return resident + streamed + (config.bias_slots + 2) * config.block_m * config.block_n * item + _BARRIERS
    visit = 2 * row * (config.block_m + config.block_n) + 12 * config.block_m
    return config.stages * visit + config.bias_slots * config.block_m * config.block_n * item + _BARRIERS


def illegal(problem: Problem, config: HopperConfig | BiasKeysConfig | QueriesConfig | TileConfig) -> str | None:
    """Why this config may not run this problem; None if it may."""
    need = shared_memory(problem, config)
    if need > problem.arch.shared_memory:
        return f"it needs {need} bytes of shared memory, {problem.arch.name} has {problem.arch.shared_memory}"
    return None
