"""Tile sizes: measured records first, a sound default where nothing was measured. Nothing is searched at run time.

Order of precedence in ``lookup``: the user's own record (``records.py``), then the shipped record of this architecture, whose pass,
width, head_dim, masking and length class match; then ``default_config``. Whatever comes out has passed ``illegal``: it fits the
shared memory of the device, and no causal config has BLOCK_M < BLOCK_N.
"""

from __future__ import annotations

import functools
import importlib.resources
import json
from dataclasses import dataclass

from ..problem import Problem
from . import records
from .halves import halves_of, operand_bytes
from .terms import SHARED, TERMS, bias_members, term_of
from .tiles import chunks, padded

__all__ = [
    "PASSES",
    "Config",
    "bias_members",
    "chunks",
    "default_config",
    "forget",
    "illegal",
    "length_class",
    "lookup",
    "origin",
    "padded",
    "shared_config",
    "shared_memory",
    "splits_dkdv",
]

PASSES = ("fwd", "dkdv", "dk", "dv", "dq")  # and "dbias", which streams all that it reads, "dq_bias" (both), and "jvp"


IN_CHUNKS = ("fwd", "dkdv", "dk", "dv", "dq")  # passes that may take columns in two tiles
KEYS_RESIDENT = ("dkdv", "dk", "dv")  # passes that hold a tile of keys and stream queries


@dataclass(frozen=True)
class Config:
    """Tile sizes and launch parameters of one kernel. ``block_m`` counts queries, ``block_n`` keys.

    ``split`` programs share the columns of what the kernel makes of one tile (o, dq, dk or dv), each with scores of its own: the
    accumulator of a wide head is too large for the registers of one.
    """

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    split: int = 1


def length_class(problem: Problem, pass_: str) -> str:
    """Coarse class of the streamed length: "short" (below 2,048), "medium" (below 8,192) or "long"."""
    length = problem.seqlen_q if pass_ in KEYS_RESIDENT else problem.seqlen_k
    return "short" if length < 2048 else "medium" if length < 8192 else "long"


def shared_memory(problem: Problem, pass_: str, config: Config) -> int:
    """Bytes of shared memory that this config needs at most, as read from compiled kernels.

    Resident tiles, streamed tiles times stages, and the tile of scores where it passes through shared memory. Without a copy engine
    loads go through registers, which keeps one stage fewer; float32 operands are laid out a second time for their three products.
    """
    p, arch = problem, problem.arch
    itemsize = operand_bytes(p, pass_)
    whole = config.split > 1 or pass_ not in IN_CHUNKS or halves_of(p, pass_) > 0
    held, held_v = sum(chunks(p.head_dim, whole)), sum(chunks(p.head_dim_v, whole))
    first, second = held * itemsize, held_v * itemsize
    both = first + second
    # Where the columns of the result are split, the streamed tile is read in part, besides in whole if the scores need it so.
    read = {"fwd": first + second // config.split, "dv": first + second // config.split}.get(pass_, both)
    if config.split > 1 and pass_ in ("dk", "dq"):
        # Without stages one after another passes through the same memory.
        read = max(first, second) if config.num_stages == 1 else both + first // config.split
    keys_resident = pass_ in KEYS_RESIDENT
    rows, streamed_rows = (config.block_n, config.block_m) if keys_resident else (config.block_m, config.block_n)
    resident = rows * (first if pass_ in ("fwd", "dv") else both)
    streamed = streamed_rows * (read + (8 if keys_resident else 0))  # with lse and delta
    if pass_ == "jvp":  # every tile may have a tangent beside it
        resident, streamed = rows * first * 2, streamed_rows * both * 2
    if pass_ == "dq_bias":
        members = max(1, bias_members(p))
        resident, streamed = resident * members, streamed * members
    if pass_ == "dbias":
        resident, streamed = 0, (rows + streamed_rows) * both + rows * 16
    bias = p.operand("bias")
    if bias is not None:
        streamed += config.block_m * config.block_n * (2 if bias.dtype in ("float16", "bfloat16") else 4)
    if p.spec.function is not None:  # what a function of the user's own loads is streamed, too
        streamed += config.block_m * config.block_n * 4 * int(p.spec.function.partition("/")[2].partition("@")[0] or 0)
    if p.operand("dense") is not None:
        streamed += config.block_m * config.block_n
    scores = config.block_m * config.block_n * p.itemsize
    stages = max(1, config.num_stages)
    single = p.itemsize > 2
    if arch.kind == "hip":
        return max(resident if pass_ != "fwd" else first * rows, max(1, stages - 1) * streamed + scores)
    if pass_ == "fwd" and halves_of(p, pass_):
        return resident + stages * streamed + 1024
    if by_descriptor(p, pass_, config) and arch.bulk_copy:
        return resident + stages * streamed + ((1 if pass_ == "fwd" else 2) * scores if single else 1024)
    if single:
        return 2 * resident + (stages + (1 if arch.bulk_copy else 0)) * streamed + 2 * scores
    return resident + stages * streamed + scores


def by_descriptor(problem: Problem, pass_: str, config: Config) -> bool:
    """Do tiles travel by descriptor? Not those that a pass reads twice in two widths: a descriptor has one."""
    p = problem
    if not p.bulk or not (p.arch.bulk_copy or p.arch.kind == "cpu") or (config.split > 1 and pass_ not in ("fwd", "dv")):
        return False
    # Its products are those of single warps: a wide resident tile that came by descriptor is held in registers, where it spills.
    return not (p.arch.name == "sm_120" and max(p.head_dim, p.head_dim_v) > 256)


def splits_dkdv(problem: Problem) -> bool:
    """Must dk and dv be made by two passes? Beyond 128 columns their two float32 accumulators do not fit the registers.

    Beyond 64 for float32 inputs, whose operands take registers twice over; where columns are two tiles that products of warpgroups
    read from shared memory, beyond 320 of both together.
    """
    wide = max(padded(problem.head_dim), padded(problem.head_dim_v))
    if wide <= (64 if problem.itemsize > 2 else 128):
        return False
    return not (in_two_tiles(problem) and sum(held(problem)) <= 320)


def held(problem: Problem) -> tuple[int, int]:
    """The columns of q and k, and of v, that passes hold which can take two tiles."""
    return sum(chunks(problem.head_dim)), sum(chunks(problem.head_dim_v))


def in_two_tiles(problem: Problem) -> bool:
    """Do the configs for two tiles of columns hold (``_two_tile_ladder``)? They were measured on sm_90, by descriptors, in half
    precision."""
    if problem.arch.name != "sm_90" or not problem.bulk or problem.itemsize > 2 or max(held(problem)) > 192:
        return False
    return chunks(problem.head_dim)[1] > 0 or chunks(problem.head_dim_v)[1] > 0


def misadded(problem: Problem, by_pointers: bool) -> bool:
    """Would an old compiler get a product of warpgroups wrong?

    The ptxas 12.8 in the wheels of Triton 3.6 and 3.7 miscompiles the sum that makes the second and later shared-memory descriptors
    of such a product, in kernels that load tiles by pointers and cut columns off both of them: seen at head_dim 100 with head_dim_v
    3, 4, 8, 12 and 17. ptxas 12.9, in the wheel of Triton 3.8, gets all of them right.
    """
    p, version = problem, problem.runtime.triton
    if p.arch.name != "sm_90" or version is None or version >= (3, 8) or not by_pointers:
        return False
    return padded(p.head_dim) != p.head_dim or padded(p.head_dim_v) != p.head_dim_v


def _most_split(problem: Problem, pass_: str) -> int:
    """How many programs may share the columns of a result: each takes 16 at least."""
    if pass_ in ("dkdv", "dbias", "dq_bias", "jvp"):
        return 1
    return padded(problem.head_dim_v if pass_ in ("fwd", "dv") else problem.head_dim) // 16


def illegal(problem: Problem, pass_: str, config: Config) -> str | None:
    """Why this config may not run this problem; None if it may. The one statement of legality."""
    _, _, has_upper, _ = problem.bounds
    for name, size in (("block_m", config.block_m), ("block_n", config.block_n)):
        if size < 16 or size & (size - 1):
            return f"{name} is {size}, expected a power of two of at least 16"
    parts = _most_split(problem, pass_)
    if config.split < 1 or config.split & (config.split - 1) or config.split > parts:
        return f"split is {config.split}, expected a power of two of at most {parts}"
    if pass_ not in KEYS_RESIDENT and has_upper and config.block_m < config.block_n:
        return f"block_m {config.block_m} < block_n {config.block_n} under a causal bound: the diagonal tile would spill over"
    rows = config.block_n if pass_ in KEYS_RESIDENT else config.block_m
    if rows >= 64 and misadded(problem, not by_descriptor(problem, pass_, config)):
        return f"Triton {problem.runtime.triton} gets products of {rows} rows wrong for columns that no power of two counts"
    limit = problem.arch.shared_memory
    need = shared_memory(problem, pass_, config)
    if limit and need > limit:
        return f"it needs {need} bytes of shared memory, {problem.arch.name} has {limit}"
    return None


def default_config(problem: Problem, pass_: str) -> Config:
    """A sound config for any legal problem: the first of a list, best guess first, that is legal."""
    wide = max(padded(problem.head_dim), padded(problem.head_dim_v))
    if problem.arch.kind == "cpu":  # the interpreter: small enough for tests to cross several tiles, large enough to be quick
        split = min(2 if wide > 256 else 1, _most_split(problem, pass_))
        return Config(32, 64, 4, 1, split) if pass_ in KEYS_RESIDENT else Config(64, 32, 4, 1, split)
    single = problem.itemsize > 2
    warps = 8 if wide >= 128 else 4
    if pass_ == "fwd" and halves_of(problem, pass_):
        ladder = [*_halves_ladder(problem, wide), (64, 32, 4, 2), (32, 32, 4, 1), (16, 16, 4, 1)]
    elif wide > 256:
        ladder = _wide_ladder(problem, pass_)
    elif problem.arch.kind == "hip":
        ladder = [(128, 64, 4, 1), (64, 64, 4, 1), (64, 32, 4, 1), (32, 32, 4, 1), (32, 16, 4, 1), (16, 16, 4, 1)]
        if problem.spec.dropout and wide >= 128 and pass_ in KEYS_RESIDENT:  # the words that decide on weights take registers
            ladder = ladder[1:]
    elif single and wide >= 128 and problem.arch.name != "sm_90":  # warp-wide products: every operand sits in registers
        ladder = [(32, 32, 4, 1), (32, 16, 4, 1), (16, 16, 4, 1)]
    elif single:
        first = [(128, 64, 8, 2), (128, 32, 8, 2)] if pass_ == "fwd" and wide == 128 else []
        ladder = [*first, (64, 32, 4, 2), (64, 32, 4, 1), (32, 32, 4, 2), (32, 32, 4, 1), (32, 16, 4, 1), (16, 16, 4, 1)]
    elif pass_ == "jvp":  # two accumulators and two tiles of scores: few columns of keys where the rest takes registers
        crowded = wide > 128 or "bias" in problem.spec.steps or (wide == 128 and bool(problem.spec.steps))
        ladder = [(128, 32, 8, 2), (64, 32, 4, 2), (64, 32, 4, 1), (32, 32, 4, 1), (32, 16, 4, 1)]
        if not crowded:
            ladder = [(128, 64, 8, 2), (64, 64, 4, 2), *ladder]
        if wide >= 128 and problem.arch.name not in ("sm_90", "sm_100"):  # warp-wide products: every operand sits in registers
            ladder = [(64, 32, 8, 2), (32, 32, 4, 2), (32, 32, 4, 1), (32, 16, 4, 1)][1 if problem.arch.bulk_copy else 0 :]
    elif pass_ == "fwd":
        ladder = [(128, 64, warps, 3), (128, 64, warps, 2), (64, 64, 4, 2), (64, 32, 4, 2), (64, 32, 4, 1), (32, 32, 4, 1)]
    else:
        ladder = [(64, 64, warps, 2), (64, 32, 4, 2), (64, 32, 4, 1), (32, 32, 4, 2), (32, 32, 4, 1), (32, 16, 4, 1)]
    if pass_ in IN_CHUNKS and in_two_tiles(problem):
        ladder = [*_two_tile_ladder(problem, pass_), *ladder]
    for resident, streamed, num_warps, num_stages, *split in ladder:
        rows = (streamed, resident) if pass_ in KEYS_RESIDENT else (resident, streamed)
        config = Config(*rows, num_warps, num_stages, min(*split, _most_split(problem, pass_)) if split else 1)
        if illegal(problem, pass_, config) is None:
            return config
    return Config(16, 16, 4, 1, min(4 if wide > 256 else 1, _most_split(problem, pass_)))


def _halves_ladder(problem: Problem, wide: int) -> list[tuple[int, ...]]:
    """Configs of a forward pass whose operands are float32 in halves, best guess first: measured at 64 and 128."""
    bounded = problem.bounds[2] or problem.bounds[3]
    split = max(1, padded(problem.head_dim_v) // 128)  # programs that share the columns of o: a sum of 256 fills the registers
    if halves_of(problem, "fwd") == 1:
        first = {128: (128, 128, 8, 2), 256: (128, 64, 8, 2, split), 512: (128, 32, 8, 2, split)}
        return [first.get(wide, (64, 128, 4, 2)), (64, 64, 4, 3, split)]
    if wide > 128:
        return [(128, 32, 8, 2, split), (64, 32, 4, 2, split), (64, 16, 4, 2, split)]
    return [*([] if wide < 128 and bounded else [(128, 64, 8, 2)]), (64, 64, 4, 2)]


def _two_tile_ladder(problem: Problem, pass_: str) -> list[tuple[int, ...]]:
    """Configs where columns are two tiles, ``(resident, streamed, num_warps, num_stages)``, best guess first: measured at 72, 96,
    160 and 192/128. ``crowded``: score steps and dropout take the registers of tiles of 128 rows."""
    wide, crowded = max(held(problem)), bool(problem.spec.steps or problem.spec.dropout)
    if pass_ == "fwd":
        return [(128, 64, 4, 3), (64, 64, 4, 3)][crowded:] if wide <= 96 else [(64, 64, 4, 2)]
    if pass_ == "dq":
        return [*([(128, 64, 4, 2)] if wide <= 80 and not crowded else []), (64, 64, 4, 2)] if wide <= 96 else [(64, 32, 4, 3)]
    if pass_ != "dkdv":
        return [(64, 64, 4, 2)]
    if wide > 96:
        return [(64, 32, 4, 3)]
    if problem.spec.dropout:
        return [(64, 32, 4, 2)]
    first = [(64, 128, 4, 2)] if problem.bounds[2] and not crowded else [(64, 64, 4, 3)]
    return [*(first if wide <= 80 else []), (64, 64, 4, 2)]


def _wide_ladder(problem: Problem, pass_: str) -> list[tuple[int, ...]]:
    """Configs beyond 256 columns, ``(resident, streamed, num_warps, num_stages, split)``, best guess first."""
    if problem.itemsize > 2:
        return [(32, 16, 4, 1, 4), (16, 16, 4, 1, 4)] if pass_ not in ("dbias", "jvp") else [(16, 16, 4, 1)]
    if pass_ in ("dbias", "jvp"):
        return [(64, 32, 4, 1), (32, 32, 4, 1), (32, 16, 4, 1), (16, 16, 4, 1)]
    if problem.arch.kind == "hip":
        return [*([(64, 16, 4, 1, 2)] if pass_ == "fwd" else []), (32, 16, 4, 1, 4), (16, 16, 4, 1, 4)]
    if pass_ in ("fwd", "dv"):
        first = (64, 32, 4, 3, 2) if pass_ == "fwd" else (128, 32, 8, 2, 2)
        return [first, (64, 32, 8, 1, 2), (64, 16, 4, 2, 4), (32, 16, 4, 1, 4), (16, 16, 4, 1, 4)]
    first = (64, 32, 8, 1) if pass_ == "dk" and by_descriptor(problem, pass_, Config(32, 64, 8, 1)) else (64, 32, 4, 1, 2)
    return [first, (32, 32, 4, 1, 2), (32, 16, 4, 1, 4), (16, 16, 4, 1, 4)]


@functools.lru_cache(maxsize=64)
def _shipped(arch: str) -> tuple[str, dict[tuple[str, int, int, bool, str], Config]]:
    """The measured configs of one architecture, by (pass, bytes an element, padded head_dim, bounded mask, length class), and a
    word on where they were measured."""
    path = importlib.resources.files("tilewise.configs") / "data" / f"{arch}.json"
    if not path.is_file():
        return "", {}
    content, out = json.loads(path.read_text()), {}
    for row in content["records"]:
        key = (row["pass"], row["itemsize"], row["head_dim"], row["bounded"], row["length"])
        out[key] = Config(*row["config"])
    return f"shipped record, {content['device']}, {content['date']}", out


MEASURED_TERMS = "configs/terms.py, NVIDIA H200, 2026-11-30"


@functools.lru_cache(maxsize=4096)
def _lookup(problem: Problem, pass_: str) -> tuple[Config, str]:
    _, _, has_upper, has_lower = problem.bounds
    wide = max(padded(problem.head_dim), padded(problem.head_dim_v))
    # Ids, intervals and dense tiles take registers: forward tiles that were measured without them would spill.
    masked = pass_ == "fwd" and wide >= 128 and any(term in problem.spec.terms for term in ("segment", "row", "dense"))
    own = records.find(problem, "triton", pass_)
    if own is not None and not masked and illegal(problem, pass_, own.config) is None:
        return own.config, own.origin
    term = TERMS.get((problem.arch.name, term_of(problem) or "", problem.itemsize, wide, pass_))
    measured = term is not None and length_class(problem, pass_) != "short" and not in_two_tiles(problem)
    if term is not None and measured and illegal(problem, pass_, Config(*term)) is None:
        return Config(*term), MEASURED_TERMS
    # The words that decide on weights take registers as well: so much that the measured tiles of these passes would spill.
    masked = masked or (bool(problem.spec.dropout) and pass_ == ("fwd" if wide >= 128 else "dkdv"))
    where, shipped = _shipped(problem.arch.name)
    config = shipped.get((pass_, problem.itemsize, wide, has_upper or has_lower, length_class(problem, pass_)))
    masked = masked or (pass_ in IN_CHUNKS and in_two_tiles(problem))  # shipped records are of one tile
    if config is not None and not masked and illegal(problem, pass_, config) is None:
        return config, where
    return default_config(problem, pass_), records.BUILT_IN


def shared_config(problem: Problem) -> Config | None:
    """The config of the kernel that makes dq and the gradient of a bias together; None where each has a pass of its own."""
    members = bias_members(problem)
    if not members:
        return None
    config = Config(*SHARED[problem.arch.name][1][members - 1])
    return config if illegal(problem, "dq_bias", config) is None else None


def lookup(problem: Problem, pass_: str) -> Config:
    """The config of one pass (a name in ``PASSES``) for this problem.

    Raises:
        InvalidInput: the user's file of records cannot be used.
    """
    return _lookup(problem, pass_)[0]


def origin(problem: Problem, pass_: str) -> str:
    """Where the config of ``lookup`` comes from: the user's record, the shipped one, or the built-in rule."""
    return _lookup(problem, pass_)[1]


def forget() -> None:
    """Forget what was read and looked up, so that the next lookup sees files as they are now."""
    records.bare()
    _lookup.cache_clear()
