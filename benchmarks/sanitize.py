"""A handful of small calls of one backend, forward and backward, for compute-sanitizer (``benchmarks/sanitize.sh``).

    python benchmarks/sanitize.py hopper

Ragged lengths, both causal corners, a window, groups, rows that see no key; every head_dim class of the backend. Each answer is
held against float64 too, so that a clean report is that of kernels that did their work.
"""

from __future__ import annotations

import sys

import torch

from tilewise.select import capability
from tilewise.spec import Spec, causal, window
from tilewise.testing.calls import evaluate, fit, random_call
from tilewise.testing.tolerance import compare, raise_if_failed

# (batch, heads_q, heads_kv, seqlen_q, seqlen_k), mask
CALLS = [
    ((1, 2, 1, 130, 200), causal()),
    ((1, 1, 1, 200, 130), causal()),
    ((2, 2, 2, 129, 257), Spec()),
    ((1, 4, 1, 150, 150), window(70, 3)),
    ((1, 1, 1, 192, 192), causal("top_left")),
]


def main() -> int:
    if len(sys.argv) != 2:
        print(__doc__)
        return 2
    row = capability(sys.argv[1])
    pairs = row.head_dims or ((64, 64), (80, 48), (128, 128), (256, 256))
    done = 0
    for dtype in (torch.bfloat16, torch.float16):
        for head_dim, head_dim_v in pairs:
            for seed, (shape, spec) in enumerate(CALLS):
                made = random_call((*shape, head_dim, head_dim_v), device="cuda", dtype=dtype, seed=seed, spec=spec, dlse=True)
                call = fit(made, row.backend)
                if call is not None:
                    raise_if_failed(compare(call, evaluate(call, row.backend), f"{shape} D {head_dim}/{head_dim_v} {spec}"))
                    done += 1
    torch.cuda.synchronize()
    print(f"{row.backend}: {done} calls are right", flush=True)
    return 0 if done else 1


if __name__ == "__main__":
    raise SystemExit(main())
