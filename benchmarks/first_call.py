"""Time of the first attention call of a fresh process, with an empty and with a warm disk cache of compiled kernels.

    python benchmarks/first_call.py [--out FILE] [--shape 1x8x1024x128] [--causal] [--repeats 3]

Every figure is that of a process of its own, which imports everything, wakes the device and lets PyTorch make a first backward pass
of its own before (which imports SymPy: half a second to two): seconds from the call until its result is there, for the forward pass
without a gradient, and for forward and backward of inputs that require one. "empty" has a cache folder with nothing in it, "warm"
the folder that the process before it left. Figures are medians.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time

from host import DTYPES, header

CHILD = "--child"


def child(shape: tuple[int, ...], dtype: str, causal: bool, backend: str, backward: bool) -> float:
    """Seconds of the first call in this process."""
    import torch

    import tilewise

    device = "cuda" if torch.cuda.is_available() else "cpu"
    q, k, v = (torch.randn(shape, device=device).to(DTYPES[dtype]).requires_grad_(backward) for _ in range(3))
    do = torch.ones_like(q)

    def now() -> float:
        if device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()

    woken = torch.ones(2, device=device, requires_grad=True)
    (woken * 2).backward(torch.ones_like(woken))
    (do * 2).sum().item()
    start = now()
    o = tilewise.attention(q, k, v, causal=causal, backend=backend)
    if backward:
        o.backward(do)
    return now() - start


def measure(arguments: list[str], backward: bool, repeats: int) -> dict[str, float]:
    """Median seconds, by the state of the cache."""
    seconds: dict[str, list[float]] = {"empty": [], "warm": []}
    for _ in range(repeats):
        with tempfile.TemporaryDirectory() as folder:
            for found in seconds.values():
                done = subprocess.run(
                    [sys.executable, __file__, CHILD, *arguments, *(["--backward"] if backward else [])],
                    env={**os.environ, "TRITON_CACHE_DIR": folder},
                    stdout=subprocess.PIPE,
                    text=True,
                    check=True,
                )
                found.append(float(done.stdout.split()[-1]))
    return {name: round(statistics.median(found), 3) for name, found in seconds.items()}


def main() -> None:
    import torch

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=pathlib.Path, help="write the JSON here too")
    parser.add_argument("--shape", default="1x8x1024x128", help="batch x heads x seqlen x head_dim (default: %(default)s)")
    parser.add_argument("--dtype", default="bfloat16", choices=DTYPES, help="default: %(default)s")
    parser.add_argument("--causal", action="store_true")
    parser.add_argument("--backend", default="auto", help="default: %(default)s")
    parser.add_argument("--repeats", type=int, default=3, help="processes for each figure (default: %(default)s)")
    parser.add_argument("--backward", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument(CHILD, action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    shape = tuple(int(n) for n in args.shape.split("x"))
    if args.child:
        print(child(shape, args.dtype, args.causal, args.backend, args.backward))
        return
    arguments = ["--shape", args.shape, "--dtype", args.dtype, "--backend", args.backend, *(["--causal"] if args.causal else [])]
    result = {
        "header": header(torch.device("cuda" if torch.cuda.is_available() else "cpu")),
        "shape": list(shape),
        "dtype": args.dtype,
        "causal": args.causal,
        "backend": args.backend,
        "forward_s": measure(arguments, False, args.repeats),
        "forward_and_backward_s": measure(arguments, True, args.repeats),
    }
    text = json.dumps(result, indent=2)
    print(text)
    if args.out:
        args.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
