"""A handful of small calls of one backend, forward and backward, for compute-sanitizer (``benchmarks/sanitize.sh``).

    python benchmarks/sanitize.py hopper [PART/PARTS]
    python benchmarks/sanitize.py reports <LOG

With PART/PARTS only every PARTS-th call from the PART-th on (from 0) is made, so that parts can run in processes side by side.
Ragged lengths, both causal corners, a window, groups, rows that see no key; every head_dim class of the backend. Each answer is
held against float64 too, so that a clean report is that of kernels that did their work.

``reports`` reads what a tool printed, prints what matters of it, and fails if the tool found anything. One thing is set apart: at
the head of a warp-specialized kernel Triton writes a byte a warp to shared memory, which the waiting warps read behind a barrier of
the whole program (``bar.sync 1``, reached by each kind of warp at an own instruction), and racecheck takes that for a race. Both
accesses are then at the line of the kernel's ``def``, which no instruction of the kernel's own code has.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

import torch

import tilewise
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


def _hand_overs() -> set[tuple[str, str]]:
    """(kernel, file:line) of the ``def`` of every warp-specialized kernel."""
    found = set()
    for path in (Path(tilewise.__file__).parent / "backends" / "hopper").glob("*.py"):
        for number, line in enumerate(path.read_text().splitlines(), 1):
            name = re.match(r"def (_\w+_kernel)\(", line)
            if name:
                found.add((name.group(1), f"{path.name}:{number}"))
    return found


def reports(log: str) -> int:
    """Print the first line of ``log``, each report in it that is not a hand-over, and a summary; 1 if something is wrong."""
    start = re.compile(r"(?m)^========= (?:Error|Warning|Invalid|Program)")
    blocks = [block.strip() for block in re.split(r"(?m)^=========\s*$", log) if start.search(block)]
    hand_overs = _hand_overs()
    bad = []
    for block in blocks:
        places = re.findall(r"access at (\w+)\+0x[0-9a-f]+ in ([\w.]+:\d+)", block)
        if not ("Race reported" in block and len(places) >= 2 and hand_overs.issuperset(places)):
            bad.append(block)
    summary = re.findall(r"(?m)^========= .*SUMMARY: (\d+)", log)
    right = re.findall(r"\d+ calls are right", log)
    print(log.splitlines()[0], *bad, sep="\n")
    print(
        f"   {right[0] if right else 'the calls did not end'}; reports: {len(bad)}; of Triton's hand-over: {len(blocks) - len(bad)}"
    )
    return int(bool(bad) or not summary or not right or (int(summary[-1]) > 0 and not blocks))


def main() -> int:
    if sys.argv[1:] == ["reports"]:
        return reports(sys.stdin.read())
    if len(sys.argv) not in (2, 3):
        print(__doc__)
        return 2
    row = capability(sys.argv[1])
    part, parts = (int(n) for n in (sys.argv[2] if len(sys.argv) == 3 else "0/1").split("/"))
    pairs = row.head_dims or ((64, 64), (80, 48), (128, 128), (256, 256))
    calls = [(dtype, pair, *seeded) for dtype in (torch.bfloat16, torch.float16) for pair in pairs for seeded in enumerate(CALLS)]
    done = 0
    for dtype, (head_dim, head_dim_v), seed, (shape, spec) in calls[part::parts]:
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
