"""Host time of one attention call: how long Python is busy before it can go on, while the device works by itself.

    python benchmarks/host.py [--out FILE] [--shape 1x8x128x64] [--causal] [--profile triton]

For ``tilewise.attention`` by ``auto`` and by each backend that takes the call, and for PyTorch's own attention: microseconds a
call, without a gradient and with inputs that require one (the forward call only). The calls of a batch are made without waiting
for the device, which is idle before each batch and has less to do than the host; figures are the median and the least of the
batches. All take turns, so that a change of clock meets all of them. Without a GPU the CPU does the work inside the call, and the
result says so.
"""

from __future__ import annotations

import argparse
import cProfile
import datetime
import json
import pathlib
import platform
import pstats
import statistics
import subprocess
import sys
import time
from collections.abc import Callable

import torch
from torch.nn.functional import scaled_dot_product_attention

import tilewise

HERE = pathlib.Path(__file__).resolve().parent
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
Call = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def providers(causal: bool) -> dict[str, Call]:
    """What is timed, by name."""

    def ours(backend: str) -> Call:
        return lambda q, k, v: tilewise.attention(q, k, v, causal=causal, backend=backend)

    named = {f"tilewise {name}": ours(name) for name in ("auto", *(row.backend for row in tilewise.CAPABILITIES))}
    return {**named, "sdpa": lambda q, k, v: scaled_dot_product_attention(q, k, v, is_causal=causal)}


def batch(call: Call, tensors: tuple[torch.Tensor, ...], calls: int, wait: Callable[[], None]) -> float:
    """Microseconds a call in one batch."""
    wait()
    start = time.perf_counter()
    for _ in range(calls):
        call(*tensors)
    seconds = time.perf_counter() - start
    wait()
    return seconds / calls * 1e6


def refusal(call: Call, tensors: tuple[torch.Tensor, ...], wait: Callable[[], None]) -> str | None:
    """Why the call is refused; None after three calls, which compile and fill every table."""
    try:
        batch(call, tensors, 3, wait)
    except tilewise.BackendRefused as refused:
        return str(refused).splitlines()[0]
    return None


def measure(named: dict[str, Call], tensors: tuple[torch.Tensor, ...], calls: int, batches: int, wait: Callable[[], None]) -> dict:
    """Median and least microseconds of each provider; the reason where it refuses."""
    times: dict[str, list[float]] = {}
    refused: dict[str, str] = {}
    for name, call in named.items():
        reason = refusal(call, tensors, wait)
        if reason is None:
            times[name] = []
        else:
            refused[name] = reason
    for _ in range(batches):
        for name, seen in times.items():
            seen.append(batch(named[name], tensors, calls, wait))
    return {
        name: {"median_us": round(statistics.median(times[name]), 2), "least_us": round(min(times[name]), 2)}
        if name in times
        else {"refused": refused[name]}
        for name in named
    }


def header(device: torch.device) -> dict:
    host = platform.processor() or platform.machine()
    info = pathlib.Path("/proc/cpuinfo")
    if info.exists():
        names = (line.split(":", 1)[1].strip() for line in info.read_text().splitlines() if line.startswith("model name"))
        host = next(names, host)
    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, cwd=HERE, check=False).stdout.strip()
    runtime = tilewise.arch.runtime().triton
    return {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "none: the CPU's work is included",
        "host": host,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": None if runtime is None else ".".join(map(str, runtime)),
        "date": datetime.date.today().isoformat(),
        "commit": commit or None,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=pathlib.Path, help="write the JSON here too")
    parser.add_argument("--shape", default="1x8x128x64", help="batch x heads x seqlen x head_dim (default: %(default)s)")
    parser.add_argument("--dtype", default="bfloat16", choices=DTYPES, help="default: %(default)s")
    parser.add_argument("--causal", action="store_true")
    parser.add_argument("--calls", type=int, default=100, help="calls in a batch (default: %(default)s)")
    parser.add_argument("--batches", type=int, default=50, help="default: %(default)s")
    parser.add_argument("--profile", metavar="BACKEND", help="print where calls by this backend spend their time, and stop")
    args = parser.parse_args()

    cuda = torch.cuda.is_available()
    device = torch.device("cuda" if cuda else "cpu")
    wait = torch.cuda.synchronize if cuda else lambda: None
    shape = tuple(int(n) for n in args.shape.split("x"))
    plain = tuple(torch.randn(shape, device=device).to(DTYPES[args.dtype]) for _ in range(3))
    leaves = tuple(t.clone().requires_grad_() for t in plain)
    named = providers(args.causal)
    if args.profile:
        call = named[f"tilewise {args.profile}"]
        batch(call, plain, 3, wait)
        profile = cProfile.Profile()
        profile.enable()
        batch(call, plain, 1000, wait)
        profile.disable()
        pstats.Stats(profile, stream=sys.stdout).sort_stats("tottime").print_stats(30)
        return
    result = {
        "header": header(device),
        "shape": list(shape),
        "dtype": args.dtype,
        "causal": args.causal,
        "calls": args.calls,
        "batches": args.batches,
        "without_gradient": measure(named, plain, args.calls, args.batches, wait),
        "with_gradient": measure(named, leaves, args.calls, args.batches, wait),
    }
    text = json.dumps(result, indent=2)
    print(text)
    if args.out:
        args.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
