"""Time and peak memory of the ``torch`` backend on this CPU, beside PyTorch's own attention.

    python benchmarks/cpu.py [--quick] [--out benchmarks/results/cpu.json]

Time: ``tilewise.attention(backend="torch")`` and ``scaled_dot_product_attention`` in turn in one process, float32, batch 1,
8 heads, seqlen 4096, head_dim 64; the median of the runs, and the ratio of the medians. Both run with
``OMP_WAIT_POLICY=passive``: with the default, threads that wait for one another spin, and on a machine that is shared with other
programs that alone decides the time.

Memory: the most resident memory that one call adds, outputs included. Each number comes from a fresh process that reads
``VmHWM`` after it has reset it through ``/proc/self/clear_refs`` (Linux), so it counts what every allocator below Python takes.
Materialised scores are PyTorch's math attention; where its scores do not fit they are not run, and only their size is given.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import pathlib
import platform
import statistics
import subprocess
import sys
import time

HERE = pathlib.Path(__file__).resolve().parent
BATCH, HEADS, HEAD_DIM = 1, 8, 64
TIMED_LENGTH = 4096
LENGTHS = (2048, 4096, 8192, 16384)
# Score matrices alive at once in math attention: scores and softmax; and backward their gradients as well.
SCORE_COPIES = {"forward": 2, "forward+backward": 4}


def tensors(length: int):
    import torch

    gen = torch.Generator().manual_seed(0)
    return tuple(torch.randn(BATCH, HEADS, length, HEAD_DIM, generator=gen) for _ in range(4))


def call_of(provider: str, causal: bool):
    """A function of q, k and v."""
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.functional import scaled_dot_product_attention

    import tilewise

    def materialised(q, k, v):
        with sdpa_kernel(SDPBackend.MATH):
            return scaled_dot_product_attention(q, k, v, is_causal=causal)

    return {
        "tilewise": lambda q, k, v: tilewise.attention(q, k, v, causal=causal, backend="torch"),
        "sdpa": lambda q, k, v: scaled_dot_product_attention(q, k, v, is_causal=causal),
        "materialised": materialised,
    }[provider]


def run_once(call, which: str, q, k, v, do) -> None:
    if which == "forward":
        call(q, k, v)
    else:
        leaves = [t.detach().requires_grad_() for t in (q, k, v)]
        call(*leaves).backward(do)


def child_time(causal: bool, which: str, repeats: int) -> dict:
    """Milliseconds of each run of both providers, taken in turn."""
    q, k, v, do = tensors(TIMED_LENGTH)
    calls = {name: call_of(name, causal) for name in ("tilewise", "sdpa")}
    times: dict[str, list[float]] = {name: [] for name in calls}
    for i in range(repeats + 1):
        for name, call in calls.items():
            start = time.perf_counter()
            run_once(call, which, q, k, v, do)
            if i:
                times[name].append((time.perf_counter() - start) * 1e3)
    return times


def resident(field: str) -> int:
    for line in pathlib.Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {field}: peak memory is measured on Linux only")


def child_memory(provider: str, length: int, which: str) -> dict:
    """Bytes that one call adds to the process at its peak."""
    q, k, v, do = tensors(length)
    call = call_of(provider, False)
    # Threads, code and lazily made buffers of the library are not the call's.
    run_once(call, which, *(t[:, :, :64] for t in (q, k, v, do)))
    before = resident("VmRSS")
    pathlib.Path("/proc/self/clear_refs").write_text("5")
    run_once(call, which, q, k, v, do)
    return {"bytes": max(resident("VmHWM") - before, 0)}


def child(**arguments) -> dict:
    """Run one measurement in a fresh process."""
    command = [sys.executable, __file__, "--child", json.dumps(arguments)]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "OMP_WAIT_POLICY": "passive"})
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed with status {done.returncode}:\n{done.stderr}")
    return json.loads(done.stdout.splitlines()[-1])


def header() -> dict:
    import torch

    import tilewise

    cpu = platform.processor() or platform.machine()
    info = pathlib.Path("/proc/cpuinfo")
    if info.exists():
        cpu = next((line.split(":", 1)[1].strip() for line in info.read_text().splitlines() if line.startswith("model name")), cpu)
    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, cwd=HERE).stdout.strip()
    return {
        "device": cpu,
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "torch": torch.__version__,
        "tilewise": tilewise.__version__,
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "commit": commit or None,
        "load_average": os.getloadavg()[0],
        "omp_wait_policy": "passive",
        "memory_method": "VmHWM less VmRSS before the call, in a fresh process, reset through /proc/self/clear_refs",
    }


def available_bytes() -> int:
    for line in pathlib.Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return 0


def measure_time(repeats: int) -> list[dict]:
    rows = []
    shape = f"float32, batch {BATCH}, heads {HEADS}, seqlen {TIMED_LENGTH}, head_dim {HEAD_DIM}"
    print(f"time, {shape}: median of {repeats} runs, in turn")
    print(f"  {'case':<26} {'tilewise':>10} {'sdpa':>10} {'ratio':>7}")
    for causal in (False, True):
        for which in SCORE_COPIES:
            times = child(what="time", causal=causal, which=which, repeats=repeats)
            ours, theirs = (statistics.median(times[name]) for name in ("tilewise", "sdpa"))
            case = f"{'causal' if causal else 'full'}, {which}"
            print(f"  {case:<26} {ours:>7.0f} ms {theirs:>7.0f} ms {ours / theirs:>7.2f}", flush=True)
            for name, ms in (("tilewise", ours), ("sdpa", theirs)):
                rows.append(
                    {
                        "case": "causal" if causal else "full",
                        "pass": which,
                        "seqlen": TIMED_LENGTH,
                        "provider": name,
                        "ms": round(ms, 2),
                        "runs_ms": [round(t, 2) for t in times[name]],
                        "ratio_to_sdpa": round(ms / theirs, 3),
                    }
                )
    return rows


def measure_memory(lengths: tuple[int, ...]) -> list[dict]:
    rows = []
    print("peak memory that one call adds, full attention, MB")
    print(f"  {'seqlen':>7} {'pass':<17} {'tilewise':>10} {'materialised':>14} {'scores alone':>14}")
    for which, copies in SCORE_COPIES.items():
        for length in lengths:
            scores = 4 * BATCH * HEADS * length * length
            fits = (copies + 2) * scores < available_bytes() / 2
            peaks = {
                name: child(what="memory", provider=name, length=length, which=which)["bytes"]
                for name in ("tilewise", "materialised")
                if name == "tilewise" or fits
            }
            shown = f"{peaks['materialised'] / 1e6:.0f}" if fits else "not run"
            print(f"  {length:>7} {which:<17} {peaks['tilewise'] / 1e6:>10.1f} {shown:>14} {scores / 1e6:>14.0f}", flush=True)
            for name in ("tilewise", "materialised"):
                peak = round(peaks[name] / 1e6, 2) if name in peaks else None
                rows.append(
                    {
                        "case": "full",
                        "pass": which,
                        "seqlen": length,
                        "provider": name,
                        "peak_mb": peak,
                        "scores_mb": round(scores / 1e6, 2),
                    }
                )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=pathlib.Path, default=HERE / "results" / "cpu.json", help="the JSON file to write")
    parser.add_argument("--quick", action="store_true", help="3 runs, and memory up to 4096 only")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        arguments = json.loads(args.child)
        what = arguments.pop("what")
        print(json.dumps((child_time if what == "time" else child_memory)(**arguments)))
        return
    head = header()
    print(", ".join(f"{name} {head[name]}" for name in ("device", "threads", "torch", "date", "load_average")))
    time_rows = measure_time(3 if args.quick else 7)
    memory_rows = measure_memory(LENGTHS[:2] if args.quick else LENGTHS)
    shape = {"dtype": "float32", "batch": BATCH, "heads": HEADS, "head_dim": HEAD_DIM}
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps({"header": head, "shape": shape, "time": time_rows, "memory": memory_rows}, indent=1) + "\n")
    print(f"written: {args.out}")


if __name__ == "__main__":
    main()
