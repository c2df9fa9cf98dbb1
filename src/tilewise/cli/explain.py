"""``tilewise explain PROBLEM``: which backend and why, tiles, bytes, FLOP and the roofline time of a problem, before it runs."""

from __future__ import annotations

import argparse
import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from .. import tile_map
from ..api import explain_problem
from ..configs import lookup, origin, splits_dkdv
from ..errors import BackendRefused, InvalidInput
from ..plan import TilePlan
from ..problem import Problem
from ..reference import mask_of
from ..select import choose
from ..spec import Spec

__all__ = ["PEAKS", "Peak", "Work", "add_parser", "pairs", "run", "work"]

_DESCRIPTION = """\
Explain a problem without running it: which backend takes it and why the others do not, its tiles (empty, masked, free), the
bytes that must move, the FLOP, and the least time that a processor of that architecture could need.

PROBLEM is the line of name=value words that every error message of tilewise prints; paste it back in quotes.
"""
_EXAMPLES = """\
words of a problem (only seqlen and head_dim are required):
  dtype=bfloat16       float16, bfloat16, float32 or float64              (default: bfloat16)
  batch=2              sequences                                          (default: 1)
  heads=32/8           query heads / key heads; heads=8 is 8/8            (default: 1)
  seqlen=512x4096      queries x keys; seqlen=4096 is 4096x4096
  head_dim=128/64      of q and k / of v; head_dim=128 is 128/128
  mask=causal          or full, or upper:INT, lower:INT and align:top_left joined by commas   (default: full)
                       upper:U lets key j be seen by query i if j <= i + U, lower:L if j >= i - L, as positions
  sm_scale=0.5  precision=tf32  grad=qkv  layout=strided
  arch=sm_90           cpu, sm_80, sm_86, sm_89, sm_90, sm_100, sm_103, sm_120, gfx942, gfx950    (default: this machine's)

examples:
  tilewise explain "dtype=bfloat16 heads=32/8 seqlen=4096 head_dim=128 mask=causal arch=sm_90"
  tilewise explain "seqlen=4096 head_dim=64 mask=upper:0,lower:1023 grad=qkv" --picture window.png
  tilewise explain "seqlen=24x40 head_dim=16 mask=causal" --tiles 8x8 --picture small.png
"""


@dataclass(frozen=True)
class Peak:
    """Peak figures of one card, from its data sheet: dense tensor-core TFLOPS (float32 accumulation) and memory bandwidth."""

    card: str
    half_tflops: float
    tf32_tflops: float
    gbps: float


PEAKS: dict[str, tuple[Peak, ...]] = {
    "sm_80": (Peak("A100 SXM 80 GB", 312, 156, 2039),),
    "sm_86": (Peak("A40", 149.7, 74.8, 696), Peak("RTX 3090", 71, 35.6, 936)),
    "sm_89": (Peak("L40S", 362, 183, 864), Peak("RTX 4090", 165.2, 82.6, 1008)),
    "sm_90": (Peak("H100 SXM", 989.4, 494.7, 3350), Peak("H200 SXM", 989.4, 494.7, 4800)),
    "sm_100": (Peak("B200", 2250, 1125, 8000),),
    "sm_120": (Peak("RTX 5090", 209.5, 104.8, 1792),),
    "gfx942": (Peak("MI300X", 1307.4, 653.7, 5300),),
}


@dataclass(frozen=True)
class Work:
    """What one pass must do at least: FLOP on the pairs that the mask lets through, and bytes to and from memory."""

    name: str
    flop: int
    bytes: int


def pairs(problem: Problem) -> int:
    """How many (query, key) pairs of one head the mask lets through: exactly, from the bounds."""
    spec = problem.spec
    position = torch.arange(problem.seqlen_q, dtype=torch.int64) + problem.q_start
    last = torch.full_like(position, problem.seqlen_k - 1) if spec.upper is None else position + spec.upper
    first = torch.zeros_like(position) if spec.lower is None else position - spec.lower
    return int((last.clamp(max=problem.seqlen_k - 1) - first.clamp(min=0) + 1).clamp(min=0).sum())


def work(problem: Problem) -> list[Work]:
    """Forward, and backward where a gradient is asked for.

    FLOP count products only, two a multiply-add. Forward: ``q k^T`` and ``p v``. Backward: ``q k^T`` again, ``do v^T`` for dq
    and dk, and one product for each gradient. Bytes count every input and output once.
    """
    p = problem
    seen = pairs(p) * p.batch * p.heads_q
    d, dv = p.head_dim, p.head_dim_v
    q, o = (p.batch * p.heads_q * p.seqlen_q * size * p.itemsize for size in (d, dv))
    k, v = (p.batch * p.heads_kv * p.seqlen_k * size * p.itemsize for size in (d, dv))
    lse = p.batch * p.heads_q * p.seqlen_q * (8 if p.dtype == "float64" else 4)
    out = [Work("forward", 2 * seen * (d + dv), q + k + v + o + lse)]
    if p.grad:
        columns = d + (dv if set(p.grad) & set("qk") else 0) + sum({"q": d, "k": d, "v": dv}.get(letter, 0) for letter in p.grad)
        written = sum({"q": q, "k": k, "v": v}.get(letter, 0) for letter in p.grad)
        out.append(Work("backward", 2 * seen * columns, q + k + v + 2 * o + lse + written))
    return out


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "explain",
        help="which backend takes a problem and why, its tiles, bytes, FLOP and roofline time",
        description=_DESCRIPTION,
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("problem", nargs="+", metavar="PROBLEM", help="name=value words, in one pair of quotes or in none")
    parser.add_argument("--backend", default="auto", metavar="NAME", help="explain the tiles of this backend (default: auto)")
    parser.add_argument("--tiles", type=_tiles, metavar="MxN", help="count tiles of M queries by N keys instead of the backend's")
    parser.add_argument("--picture", type=Path, metavar="FILE", help="draw the forward tile map of one head (.png, .svg or .pdf)")
    parser.add_argument(
        "--deterministic",
        choices=("yes", "no"),
        help="must gradients have the same bits on every run? as mask=...,deterministic:yes (default: as PyTorch's setting says)",
    )
    parser.set_defaults(func=run)


def _tiles(text: str) -> tuple[int, int]:
    m, x, n = text.partition("x")
    if not x or not m.isdigit() or not n.isdigit() or not int(m) or not int(n):
        raise argparse.ArgumentTypeError(f"{text!r} is not MxN with two positive integers, such as 128x64")
    return int(m), int(n)


@dataclass(frozen=True)
class _Pass:
    """The tiles of one kernel, what else its config says, and where that comes from."""

    name: str
    plan: TilePlan
    source: str
    origin: str = ""


def _passes(problem: Problem, backend: str | None, tiles: tuple[int, int] | None) -> list[_Pass]:
    if tiles is not None:
        return [_Pass("forward", TilePlan(problem, *tiles), "given by --tiles")]
    if problem.is_empty or backend in (None, "reference"):
        return []
    if backend == "torch":
        from ..backends.torch_tiles import tile_sizes

        sizes = tile_sizes(problem)
        return [_Pass("every pass", TilePlan(problem, sizes.block_m, sizes.block_n), "sized for a CPU's caches")]
    if backend == "hopper":
        return _hopper_passes(problem)
    named = [("fwd", "forward")]
    if problem.grad:
        if splits_dkdv(problem):
            named += [(f"d{letter}", f"backward d{letter}") for letter in "kv" if letter in problem.grad]
        else:
            named += [("dkdv", "backward dk, dv")] if set(problem.grad) & set("kv") else []
        named += [("dq", "backward dq")] if "q" in problem.grad else []
    out = []
    for pass_, name in named:
        config = lookup(problem, pass_)
        launch = f"{config.num_warps} warps, {config.num_stages} stage{'s' * (config.num_stages != 1)}"
        out.append(_Pass(name, TilePlan(problem, config.block_m, config.block_n), launch, origin(problem, pass_)))
    return out


def _hopper_passes(problem: Problem) -> list[_Pass]:
    from ..configs import hopper, hopper_backward
    from ..configs.records import BUILT_IN

    if "bias" in problem.spec.steps:
        return _bias_passes(problem)
    config = hopper.lookup(problem)
    forms = ", ".join([f"{config.stages} stages", *(n for n in ("dynamic", "guarded") if getattr(config, n))])
    out = [_Pass("forward", TilePlan(problem, config.block_m, config.block_n), forms, hopper.origin(problem))]
    source = hopper_backward.origin(problem) if problem.grad else ""
    adding = None if problem.spec.deterministic or set(problem.grad) != set("qkv") else hopper_backward.lookup_adding(problem)
    if adding is not None:
        tiles = TilePlan(problem, adding.block_m, adding.block_n)
        return [*out, _Pass("backward", tiles, "dq added up in memory, in any order", BUILT_IN)]
    if set(problem.grad) & set("kv"):
        keys = hopper_backward.lookup_dkdv(problem)
        out.append(_Pass("backward dk, dv", TilePlan(problem, keys.block_m, keys.block_n), f"{keys.stages} stages", source))
    if "q" in problem.grad:
        if "k" in problem.grad and hopper_backward.heads_kept(problem):
            kept = hopper_backward.lookup_kept(problem)
            out.append(_Pass("backward dq", TilePlan(problem, kept.block_m, 64), "from ds in memory", source))
        else:
            queries = hopper_backward.lookup_dq(problem)
            stages = f"{queries.k_stages} stages of k, {queries.v_stages} of v"
            out.append(_Pass("backward dq", TilePlan(problem, queries.block_m, queries.block_n), stages, source))
    return out


def _asked(words: list[str], deterministic: str | None) -> Problem:
    """The problem of these words, with what ``--deterministic`` says."""
    problem = Problem.parse(" ".join(words))
    if deterministic is None:
        return problem
    wanted = deterministic == "yes"
    if problem.spec.deterministic is not None and problem.spec.deterministic is not wanted:
        raise InvalidInput(f"--deterministic is {deterministic}, and the mask {problem.spec} says otherwise: drop one of them.")
    return dataclasses.replace(problem, spec=dataclasses.replace(problem.spec, deterministic=wanted))


def _bias_passes(problem: Problem) -> list[_Pass]:
    from ..configs.hopper_bias import DBIAS, DKDV, DQ, FWD, shared_config
    from ..configs.records import BUILT_IN

    shared = shared_config(problem)
    named = [("forward", FWD, True), ("backward dk, dv", DKDV, bool(set(problem.grad) & set("kv")))]
    if shared is None:
        named += [("backward dq", DQ, "q" in problem.grad), ("backward dbias", DBIAS, "b" in problem.grad)]
    chosen: list[tuple[str, Any]] = [(name, table[problem.head_dim][0]) for name, table, wanted in named if wanted]
    if shared is not None:
        chosen.append(("backward dq, dbias", shared))
    return [_Pass(name, TilePlan(problem, c.block_m, c.block_n), "tiles of the bias beside them", BUILT_IN) for name, c in chosen]


def run(args: argparse.Namespace) -> int:
    problem = _asked(args.problem, args.deterministic)
    refusal = None
    try:
        backend = choose(problem, args.backend).backend
    except BackendRefused as error:
        backend, refusal = None, error
    print(explain_problem(problem))
    if refusal is not None:
        print(f"\n{str(refusal).splitlines()[0]}")
    elif args.backend != "auto":
        print(f"\nbackend {backend!r} was asked for and accepts.")

    passes = _passes(problem, backend, args.tiles)
    unseen = [term for term in ("segment", "row", "dense") if term in problem.spec.terms]
    if unseen:
        print(f"\nThe tensors of {', '.join(unseen)} are not in a problem's words: pairs and tiles below are those of its bounds.")
        print("tilewise.explain(q, k, v, spec=..., picture=...) draws the whole mask.")
    seen, total = pairs(problem), problem.seqlen_q * problem.seqlen_k
    print(f"\nPairs of a query and a key, one head: {seen:,} of {total:,} seen ({seen / max(1, total):.1%})")
    if passes:
        print("Tiles of queries x keys, one head:")
        print(f"  {'':<17}{'size':>9}{'empty':>12}{'masked':>12}{'free':>12}   pairs visited")
    for p in passes:
        empty, masked, free = p.plan.counts()
        visited = (masked + free) * p.plan.block_m * p.plan.block_n
        size = f"{p.plan.block_m}x{p.plan.block_n}"
        over = f"{visited / seen:.2f} x the pairs seen" if seen else "none seen"
        print(f"  {p.name:<17}{size:>9}{empty:>12,}{masked:>12,}{free:>12,}   {over}   ({p.source})")
    for where in dict.fromkeys(p.origin for p in passes if p.origin):
        print(f"Config of {', '.join(p.name for p in passes if p.origin == where)}: {where}.")
    if not passes:
        why = "the whole score matrix at once" if backend else "the backend refuses"
        print(f"No tiles: {'an extent is zero' if problem.is_empty else why}.")
    _print_work(problem)
    if args.picture:
        _draw(args.picture, problem, passes)
    return 0 if backend else 1


def _print_work(problem: Problem) -> None:
    print("\nLeast work, all heads (products on the pairs seen; each input and output moved once):")
    passes = work(problem)
    for w in passes:
        intensity = f"{w.flop / w.bytes:,.0f} FLOP a byte" if w.bytes else "nothing to move"
        print(f"  {w.name:<10}{w.flop:>24,} FLOP{w.bytes:>18,} bytes   {intensity}")
    if problem.grad:
        print("  (Kernels that make dk, dv and dq apart compute q k^T and do v^T twice: more than this least.)")
    peaks = PEAKS.get(problem.arch.name, ())
    if not peaks or problem.dtype == "float64":
        what = "float64" if peaks else f"arch {problem.arch.name}"
        print(f"\nNo roofline time: no peak figures are kept for {what}. Kept for: {', '.join(sorted(PEAKS))}.")
        return
    print("\nRoofline time, the larger of FLOP / peak rate and bytes / peak bandwidth (data-sheet peaks, full clock):")
    for peak in peaks:
        tflops, how = _rate(problem, peak)
        print(f"  {peak.card}: {tflops:,.0f} TFLOPS ({how}), {peak.gbps:,.0f} GB/s")
        for w in passes:
            compute, memory = w.flop / tflops / 1e12, w.bytes / peak.gbps / 1e9
            bound = "compute" if compute >= memory else "memory"
            print(f"    {w.name:<10}{max(compute, memory) * 1e6:>14,.2f} us   bound by {bound}")


def _rate(problem: Problem, peak: Peak) -> tuple[float, str]:
    if problem.itemsize == 2:
        return peak.half_tflops, f"dense {problem.dtype}, float32 accumulation"
    if problem.precision == "tf32":
        return peak.tf32_tflops, "dense TF32"
    return peak.tf32_tflops / 3, "a third of dense TF32: three TF32 products, or six of bfloat16, make one float32 product"


def _bounds_of(spec: Spec) -> Spec:
    return Spec(upper=spec.upper, lower=spec.lower, align=spec.align)


def _draw(path: Path, problem: Problem, passes: list[_Pass]) -> None:
    if not passes or problem.is_empty:
        raise InvalidInput("--picture needs tiles, and this problem has none on this backend: give --tiles MxN and lengths > 0.")
    if path.suffix not in tile_map.SUFFIXES:
        raise InvalidInput(f"--picture is {str(path)!r}, expected a name that ends in {', '.join(tile_map.SUFFIXES)}.")
    plan, p = passes[0].plan, problem
    small = max(p.seqlen_q, p.seqlen_k) <= tile_map.SMALL
    mask = mask_of(_bounds_of(p.spec), p.seqlen_q, p.seqlen_k) if small else None
    lengths = f"{problem.seqlen_q:,} queries x {problem.seqlen_k:,} keys"
    title = f"mask {problem.spec}\n{lengths}, tiles of {plan.block_m} x {plan.block_n}"
    tile_map.draw(path, tile_map.TileMap(plan.tiles(), mask, p.seqlen_q, p.seqlen_k, plan.block_m, plan.block_n), title)
    print(f"\nPicture: {path}")
