"""Host time of one attention call: how long Python is busy before it can go on, while the device works by itself.

    python benchmarks/host.py [--out FILE] [--shape 1x8x128x64] [--causal] [--profile triton]
    python benchmarks/host.py --specs [--shape 1x8x1024x128]

For ``tilewise.attention`` by ``auto`` and by each backend that takes the call, and for PyTorch's own attention: microseconds a
call, without a gradient and with inputs that require one (the forward call only). The calls of a batch are made without waiting
for the device, which is idle before each batch and has less to do than the host; figures are the median and the least of the
batches. All take turns, so that a change of clock meets all of them. Without a GPU the CPU does the work inside the call, and the
result says so.

``--specs`` times calls whose spec names tensors instead, causal, by ``triton`` and ``hopper``, and their backward passes; masks
have their plans made, but for "segments, no plan". Then, for 16,384 tokens of 16 heads in 64 documents (``--tokens``):
``tilewise.plan`` on the host and until the device is done, and segments by a plan, captured in a CUDA graph: what the device
alone takes.
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


def documents(tokens: int, count: int, device: torch.device) -> torch.Tensor:
    """Ids of documents of random lengths, the same in every run."""
    cuts = torch.randperm(tokens - 1, generator=torch.Generator().manual_seed(0))[: count - 1] + 1
    return torch.bucketize(torch.arange(tokens), cuts.sort().values, right=True).int().to(device)


def specs(heads: int, tokens: int, device: torch.device) -> dict[str, tilewise.Spec]:
    """What is timed with ``--specs``, by name."""
    ids = documents(tokens, 8, device)
    start = (torch.arange(tokens, device=device) // 128 * 128).int()
    made = {
        "segments": tilewise.segments(ids, ids),
        "intervals": tilewise.row_intervals(start, (start + 256).clamp(max=tokens)),
        "dense": tilewise.dense(torch.rand(tokens, tokens, device=device) < 0.5),
        "sink": tilewise.sink(torch.randn(heads, device=device)),
        "alibi": tilewise.alibi(torch.rand(heads, device=device)),
        "bias": tilewise.bias(torch.randn(heads, 1, tokens, device=device)),
    }
    return {name: tilewise.causal() & spec for name, spec in made.items()}


def spec_calls(tensors: tuple[torch.Tensor, ...], backward: bool) -> dict[str, Call]:
    """A call by each backend for each spec that it takes."""
    q, k, _ = tensors
    calls: dict[str, Call] = {}
    for backend in ("triton", "hopper"):

        def by(spec: tilewise.Spec, backend: str = backend) -> Call:
            return lambda q, k, v: tilewise.attention(q, k, v, spec=spec, backend=backend)

        for name, spec in specs(q.shape[1], q.shape[2], q.device).items():
            try:
                calls[f"{backend} {name}"] = by(tilewise.plan(q, k, spec, backend=backend, backward=backward))
            except tilewise.BackendRefused:
                continue
            if name == "segments":
                calls[f"{backend} segments, no plan"] = by(spec)
    return calls


def backward_of(call: Call) -> Call:
    """The backward pass of a call, whose forward pass was made before."""
    made: list[torch.Tensor] = []

    def back(*tensors: torch.Tensor) -> torch.Tensor:
        if not made:
            made.append(call(*tensors))  # type: ignore[call-arg]
            made.append(torch.randn_like(made[0]))
        torch.autograd.backward(made[0], made[1], retain_graph=True, inputs=tensors)
        for t in tensors:
            t.grad = None
        return made[0]

    return back


def until_done(call: Callable[[], object], wait: Callable[[], None], calls: int = 50) -> float:
    """Median microseconds of a call until the device is done with it."""
    seen = [batch(lambda: (call(), wait())[1], (), 1, wait) for _ in range(calls + 3)]  # type: ignore[arg-type, return-value]
    return round(statistics.median(seen[3:]), 1)


def on_device(call: Callable[[], object], replays: int = 20) -> float:
    """Microseconds of a call captured in a CUDA graph."""
    with torch.cuda.stream(torch.cuda.Stream()):
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    graph.replay()
    first.record()
    for _ in range(replays):
        graph.replay()
    last.record()
    torch.cuda.synchronize()
    return round(first.elapsed_time(last) / replays * 1e3, 1)


def packed_documents(tokens: int, device: torch.device, wait: Callable[[], None]) -> dict[str, dict]:
    """Plans of 64 documents, and calls by them, for each backend that takes them."""
    q, k, v = (torch.randn(1, 16, tokens, 128, device=device).bfloat16() for _ in range(3))
    ids = documents(tokens, 64, device)
    spec = tilewise.causal() & tilewise.segments(ids, ids)
    found: dict[str, dict] = {}
    for backend in ("triton", "hopper"):
        row: dict[str, float] = {}
        for name, backward in (("plan", False), ("plan_with_backward", True)):

            def make(*_: torch.Tensor, backend: str = backend, backward: bool = backward) -> tilewise.Spec:
                return tilewise.plan(q, k, spec, backend=backend, backward=backward)

            try:
                batch(make, (), 3, wait)  # type: ignore[arg-type]
            except tilewise.BackendRefused:
                break
            row[f"{name}_host_us"] = round(min(batch(make, (), 20, wait) for _ in range(10)), 1)  # type: ignore[arg-type]
            row[f"{name}_us"] = until_done(make, wait)
            if device.type == "cuda":
                row[f"{name}_device_us"] = on_device(make)
        else:
            plan = tilewise.plan(q, k, spec, backend=backend)

            def attend(plan: tilewise.Spec = plan, backend: str = backend) -> torch.Tensor:
                return tilewise.attention(q, k, v, spec=plan, backend=backend)

            row["attention_us"] = until_done(attend, wait)
            if device.type == "cuda":
                row["attention_device_us"] = on_device(attend)
            found[backend] = row
    return found


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
        "ptxas": tilewise.arch.ptxas_version(device),
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
    parser.add_argument("--specs", action="store_true", help="calls whose spec names tensors, and plans")
    parser.add_argument("--tokens", type=int, default=16384, help="of the documents of --specs (default: %(default)s)")
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
        "causal": args.causal or args.specs,
        "calls": args.calls,
        "batches": args.batches,
    }
    trained = named
    if args.specs:
        named, trained = spec_calls(plain, False), spec_calls(plain, True)
    result["without_gradient"] = measure(named, plain, args.calls, args.batches, wait)
    result["with_gradient"] = measure(trained, leaves, args.calls, args.batches, wait)
    if args.specs:
        backward = {name: backward_of(call) for name, call in trained.items()}
        result["backward"] = measure(backward, leaves, args.calls, args.batches, wait)
        result["documents"] = {"tokens": args.tokens, **packed_documents(args.tokens, device, wait)}
    text = json.dumps(result, indent=2)
    print(text)
    if args.out:
        args.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
