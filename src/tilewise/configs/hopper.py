"""Tile sizes and launch parameters of the ``hopper`` backend's forward kernel, by head_dim."""

from __future__ import annotations

from dataclasses import dataclass

from ..problem import Problem

__all__ = ["CHOICES", "HopperConfig", "illegal", "lookup", "shared_memory"]


@dataclass(frozen=True)
class HopperConfig:
    """One config. ``block_m`` counts queries, 64 for each consumer; ``block_n`` keys; ``stages`` slots of keys and of values;
    ``q_slots`` query tiles. ``overlap``: scores of the next tile are made above the product of the last one. ``dynamic``: as many
    programs as multiprocessors, which take tiles from a counter; otherwise a program a tile, longest first."""

    block_m: int
    block_n: int
    stages: int
    q_slots: int
    overlap: bool
    dynamic: bool
    consumer_registers: int
    producer_registers: int


# By head_dim. The first is the default.
CHOICES: dict[int, tuple[HopperConfig, ...]] = {
    64: (HopperConfig(256, 64, 4, 1, False, False, 112, 32), HopperConfig(256, 64, 4, 2, False, True, 112, 32)),
    128: (HopperConfig(128, 128, 2, 1, True, False, 240, 24), HopperConfig(128, 128, 2, 2, True, True, 240, 24)),
    256: (HopperConfig(128, 64, 2, 1, True, False, 240, 24), HopperConfig(128, 64, 2, 1, True, True, 240, 24)),
}


def shared_memory(problem: Problem, config: HopperConfig) -> int:
    """Bytes of shared memory: the query tiles, the stages of keys and values, and 1 KB for barriers and alignment."""
    rows = config.q_slots * config.block_m + config.stages * 2 * config.block_n
    return rows * problem.head_dim * problem.itemsize + 1024


def illegal(problem: Problem, config: HopperConfig) -> str | None:
    """Why this config may not run this problem; None if it may."""
    if config.block_m not in (128, 256):
        return f"block_m is {config.block_m}, expected 128 or 256: two or four consumers of 64 rows"
    if config.block_n < 16 or config.block_n & (config.block_n - 1):
        return f"block_n is {config.block_n}, expected a power of two of at least 16"
    if config.stages < 1 or not 1 <= config.q_slots <= 3:
        return f"stages is {config.stages} and q_slots {config.q_slots}, expected at least 1 and 1 to 3"
    need = shared_memory(problem, config)
    if need > problem.arch.shared_memory:
        return f"it needs {need} bytes of shared memory, {problem.arch.name} has {problem.arch.shared_memory}"
    return None


def lookup(problem: Problem) -> HopperConfig:
    """The config for this problem."""
    return CHOICES[problem.head_dim][0]
