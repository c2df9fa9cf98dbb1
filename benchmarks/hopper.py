"""Hold the hopper backend against float64 on this GPU, then time it beside the triton backend in turn.

    python benchmarks/hopper.py --out benchmarks/results/hopper-h200.json
    python benchmarks/hopper.py --every --out FILE --dims "64, 192/128"

The second checks and times every config of the backend (of these head dims), see ``hopper_every.py``.

The check covers causal in both corners, windows, ragged lengths, rows without a key, groups, scales of both signs and 0, both
dtypes and both memory orders, with outputs filled with NaN first. Times are medians of ``triton.testing.do_bench`` on 16,384 tokens
and a hidden size of 2,048, after equal rests.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import json
import pathlib
import time

import hopper_every
import torch
import triton
from triton.testing import do_bench

from tilewise.backends import hopper
from tilewise.backends import triton as portable
from tilewise.capabilities import dims_text
from tilewise.configs.hopper import CHOICES
from tilewise.problem import Problem
from tilewise.reference import reference
from tilewise.spec import Spec, causal, window

BF16, FP16 = torch.bfloat16, torch.float16
# (batch, heads_q, heads_kv, seqlen_q, seqlen_k), spec, dtype, sm_scale, rows outside heads
EVERY = [((2, 4, 2, 300, 333), causal(), None), ((1, 2, 2, 333, 300), causal(), None), ((1, 2, 1, 257, 500), Spec(), 0.37)]
EVERY += [((1, 2, 2, 130, 700), window(100, 5), None), ((1, 2, 2, 128, 128), causal("top_left"), -0.2)]
CHECKS = [(shape, spec, dtype, scale, False) for dtype in (BF16, FP16) for shape, spec, scale in EVERY]
CHECKS += [
    ((1, 3, 1, 1, 700), causal(), BF16, None, False),
    ((1, 1, 1, 700, 1), Spec(), BF16, None, False),
    ((1, 2, 2, 1000, 1000), window(-1, 0), BF16, None, False),
    ((1, 2, 2, 1000, 1000), window(64, None), BF16, None, False),
    ((4, 8, 8, 512, 512), causal(), BF16, None, True),
    ((1, 2, 2, 70, 200), causal(), BF16, 0.0, False),
    ((3, 16, 4, 1111, 1111), causal(), BF16, None, False),
    ((2, 40, 8, 640, 2048), window(700, 0), BF16, None, False),
    ((32, 32, 8, 20, 700), causal(), BF16, None, True),  # heads of a group that share their tiles of queries
    ((20, 32, 2, 3, 500), Spec(), FP16, None, False),
    ((32, 16, 8, 70, 320), window(64, 3), BF16, None, False),
]


def check(shape: tuple[int, ...], head_dim: int, spec: Spec, dtype: torch.dtype, scale: float | None, rows_outside: bool) -> dict:
    batch, heads_q, heads_kv, seqlen_q, seqlen_k = shape

    def make(heads: int, seqlen: int) -> torch.Tensor:
        size = (batch, seqlen, heads, head_dim) if rows_outside else (batch, heads, seqlen, head_dim)
        t = torch.randn(size, device="cuda").to(dtype)
        return t.transpose(1, 2) if rows_outside else t

    q, k, v = make(heads_q, seqlen_q), make(heads_kv, seqlen_k), make(heads_kv, seqlen_k)
    o, lse = torch.full_like(q, float("nan")), torch.full((batch, heads_q, seqlen_q), float("nan"), device="cuda")
    hopper.forward(Problem.bind(q, k, v, spec, scale), q, k, v, o, lse)
    true_o, true_lse = reference(q, k, v, spec, scale)
    seen = ~true_lse.isneginf()
    error = ((o.double() - true_o).norm() / true_o.norm().clamp_min(1e-30)).item()
    lse_error = (lse - true_lse)[seen].abs().max().item() if seen.any() else 0.0
    exact = torch.equal(seen, ~lse.isneginf()) and not o.isnan().any() and bool((o[~seen] == 0).all())
    ok = exact and error < (4e-3 if dtype == BF16 else 6e-4) and lse_error < 1e-4
    row = {"shape": shape, "head_dim": head_dim, "mask": str(spec), "dtype": str(dtype), "sm_scale": scale}
    return {**row, "rows_outside": rows_outside, "error": error, "lse_error": lse_error, "ok": ok}


def times(head_dim: int, seqlen: int, spec: Spec) -> dict:
    batch, heads = 16384 // seqlen, 2048 // head_dim
    q, k, v = (torch.randn((batch, heads, seqlen, head_dim), device="cuda").bfloat16() for _ in range(3))
    o, lse = torch.empty_like(q), torch.empty((batch, heads, seqlen), device="cuda")
    problem = Problem.bind(q, k, v, spec)
    flop = 4 * batch * heads * seqlen * seqlen * head_dim * (0.5 if spec.upper is not None else 1)
    row = {"head_dim": head_dim, "causal": spec.upper is not None, "seqlen": seqlen}
    for name, backend in (("hopper", hopper), ("triton", portable)):
        time.sleep(0.1)
        ms = do_bench(lambda b=backend: b.forward(problem, q, k, v, o, lse), warmup=10, rep=50, return_mode="median")
        row[name] = round(flop / ms / 1e9)
    return row


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out")
    parser.add_argument("--every", action="store_true", help="check and time every config of the backend")
    parser.add_argument("--limit", type=float, default=185, help="with --every: seconds after which no more is timed")
    parser.add_argument("--dims", default="", help='with --every: which head dims, as "64, 192/128" (default: all)')
    parser.add_argument("--compile-share", nargs=2, type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    named = {dims_text((pair,)): pair for pair in CHOICES}
    pairs = [named[word.strip()] for word in args.dims.split(",")] if args.dims else list(CHOICES)
    if args.compile_share:
        hopper_every.compile_share(CHECKS, pairs, *args.compile_share)
    if args.out is None:
        parser.error("--out is needed")
    torch.manual_seed(0)
    header = {"device": torch.cuda.get_device_name(0), "torch": torch.__version__, "triton": triton.__version__}
    header["date"] = datetime.date.today().isoformat()
    if args.every:
        checks, rows = hopper_every.every(CHECKS, pairs, args.limit)
        configs = {dims_text((pair,)): [dataclasses.asdict(config) for config in of] for pair, of in CHOICES.items()}
        wrong = [row for row in checks if not row["ok"]]
        out = {**header, "configs": configs, "checked": len(checks), "wrong": wrong, "rows": rows}
        pathlib.Path(args.out).write_text(json.dumps(out, indent=1))
        return int(bool(wrong))
    checks = []
    for head_dim in (64, 128, 256):
        for shape, spec, dtype, scale, rows_outside in CHECKS:
            checks.append(check(shape, head_dim, spec, dtype, scale, rows_outside))
            print("ok " if checks[-1]["ok"] else "BAD", checks[-1], flush=True)
    if not all(row["ok"] for row in checks):
        return 1
    rows = [times(d, n, s) for d in (64, 128, 256) for s in (Spec(), causal()) for n in (1024, 4096, 16384)]
    pathlib.Path(args.out).write_text(json.dumps({**header, "unit": "TFLOP/s", "checks": checks, "rows": rows}, indent=1))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
