"""One long sequence: tiles beside materialised scores. Time, peak memory, and errors against float64.

Peak memory is measured, not computed. On CUDA it is the allocator's own peak. On a CPU a process of its own
(``python -m tilewise.cli.longseq``) makes each run and reads its peak resident memory from Linux (``VmHWM``, reset before each
run); where there is no Linux, the allocations that PyTorch's profiler records are added up.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

import tilewise

__all__ = ["PROVIDERS", "Case", "dense_bytes", "errors", "free_bytes", "how_measured", "memory", "run_once"]

PROVIDERS = ("tilewise", "materialised")
_STATUS, _CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")


@dataclass(frozen=True)
class Case:
    """One causal attention on ``seqlen`` tokens, and where it runs."""

    seqlen: int
    heads_q: int
    heads_kv: int
    head_dim: int
    dtype: str
    device: str
    seed: int
    backend: str = "auto"

    def inputs(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """q, k, v (which need gradients) and do, drawn on the CPU in the dtype of the case."""
        generator = torch.Generator().manual_seed(self.seed)

        def draw(heads: int) -> torch.Tensor:
            t = torch.randn(1, heads, self.seqlen, self.head_dim, generator=generator)
            return t.to(self.device, getattr(torch, self.dtype))

        q, k, v = (draw(h).requires_grad_() for h in (self.heads_q, self.heads_kv, self.heads_kv))
        return q, k, v, draw(self.heads_q)

    def synchronize(self) -> None:
        if self.device == "cuda":
            torch.cuda.synchronize()


def _materialised(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Causal attention as the formula says it: all scores at once, in plain PyTorch."""
    group = q.shape[1] // k.shape[1]
    k, v = (t.repeat_interleave(group, dim=1) for t in (k, v))
    s = (q * q.shape[-1] ** -0.5) @ k.transpose(-1, -2)
    hidden = torch.ones(s.shape[-2:], dtype=torch.bool, device=s.device).triu(1)
    return torch.softmax(s.masked_fill(hidden, float("-inf")), dim=-1) @ v


def method(provider: str, case: Case) -> Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]:
    """The attention of a provider, as a function of q, k and v."""
    if provider == "materialised":
        return _materialised
    return functools.partial(tilewise.attention, causal=True, backend=case.backend)


def dense_bytes(case: Case) -> int:
    """What materialised scores will need, about: six tensors of seqlen x seqlen for each head (scores, mask, p, dp, ds, copies)."""
    return 6 * case.heads_q * case.seqlen**2 * getattr(torch, case.dtype).itemsize


def free_bytes(device: str) -> int:
    """Memory that is free on the device; on Linux, the limit of the container counts."""
    if device == "cuda":
        return torch.cuda.mem_get_info()[0]
    free = []
    with contextlib.suppress(OSError, ValueError):
        free.append(int(re.findall(r"MemAvailable:\s+(\d+)", Path("/proc/meminfo").read_text())[0]) * 1024)
    with contextlib.suppress(OSError, ValueError):
        group = Path("/sys/fs/cgroup")
        free.append(int((group / "memory.max").read_text()) - int((group / "memory.current").read_text()))
    if not free and hasattr(os, "sysconf"):
        free.append(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2)
    return min(free, default=4 * 2**30)


def run_once(provider: str, case: Case, backward: bool) -> tuple[float, float]:
    """Seconds of one forward and of one backward pass (0 where it is not asked for)."""
    q, k, v, do = case.inputs()
    attend = method(provider, case)
    case.synchronize()
    began = time.perf_counter()
    o = attend(q, k, v)
    case.synchronize()
    middle = time.perf_counter()
    if backward:
        torch.autograd.grad(o, (q, k, v), do)
        case.synchronize()
    return middle - began, time.perf_counter() - middle


def errors(case: Case, providers: tuple[str, ...], on_chunk: Callable[[], None], chunk: int) -> dict[str, dict[str, float]]:
    """Largest absolute error of o, lse, dq, dk and dv of each provider against the float64 oracle.

    The oracle is dense, so it walks over ``chunk`` queries at a time. Rows ``a`` to ``b`` of a causal attention are a causal
    attention of these queries on the keys before ``b``: their last query sits on the last of those keys.
    """
    q, k, v, do = case.inputs()
    results: dict[str, dict[str, torch.Tensor]] = {}
    for provider in providers:
        o = method(provider, case)(q, k, v)
        grads = torch.autograd.grad(o, (q, k, v), do)
        results[provider] = dict(zip(("o", "dq", "dk", "dv"), (o.detach(), *grads), strict=True))
        if provider == "tilewise":
            with torch.no_grad():
                results[provider]["lse"] = tilewise.attention(q, k, v, causal=True, backend=case.backend, return_lse=True)[1]
    wide = [t.detach().double().requires_grad_() for t in (q, k, v)]
    worst: dict[str, dict[str, float]] = {provider: dict.fromkeys(found, 0.0) for provider, found in results.items()}

    def compare(name: str, exact: torch.Tensor, rows: slice) -> None:
        for provider, found in results.items():
            if name in found:
                error = (found[name][:, :, rows].double() - exact).abs().max().item()
                worst[provider][name] = max(worst[provider][name], error)

    for first in range(0, case.seqlen, chunk):
        rows, keys = slice(first, first + chunk), slice(0, first + chunk)
        o64, lse64 = tilewise.reference(wide[0][:, :, rows], wide[1][:, :, keys], wide[2][:, :, keys], tilewise.causal())
        o64.backward(do[:, :, rows].double())
        compare("o", o64.detach(), rows)
        compare("lse", lse64.detach(), rows)
        on_chunk()
    for name, t in zip(("dq", "dk", "dv"), wide, strict=True):
        compare(name, torch.zeros_like(t) if t.grad is None else t.grad, slice(None))
    return worst


def _resident(name: str) -> int:
    return int(re.findall(name + r":\s+(\d+)", _STATUS.read_text())[0]) * 1024


def _peak_resident(call: Callable[[], object]) -> int:
    _CLEAR.write_text("5")  # resets VmHWM to what is resident now
    before = _resident("VmRSS")
    call()
    return max(0, _resident("VmHWM") - before)


def _peak_allocated(call: Callable[[], object]) -> int:
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        call()
    results: Any = recorded.profiler
    events = [e for e in results.kineto_results.events() if e.name() == "[memory]"]
    held = peak = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    return peak


def _peak_cuda(call: Callable[[], object]) -> int:
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def how_measured(device: str) -> str:
    """How ``peak`` measures on this machine, for people."""
    if device == "cuda":
        return "the peak of PyTorch's CUDA allocator"
    if _CLEAR.exists():
        return "the peak resident memory of a process of its own (VmHWM)"
    return "the allocations that PyTorch's profiler records"


def peak(provider: str, case: Case, backward: bool) -> int:
    """Bytes that one forward (and backward) pass needed at once, above its inputs."""
    q, k, v, do = case.inputs()
    attend = method(provider, case)

    def call() -> None:
        o = attend(q, k, v)
        if backward:
            torch.autograd.grad(o, (q, k, v), do)

    gc.collect()
    if case.device == "cuda":
        return _peak_cuda(call)
    return _peak_resident(call) if _CLEAR.exists() else _peak_allocated(call)


def memory(runs: list[tuple[str, Case, bool]]) -> Iterator[int]:
    """The peak of each run, one after another: in a process of its own on a CPU, here on a GPU."""
    if runs and runs[0][1].device == "cuda":
        yield from (peak(*run) for run in runs)
        return
    request = json.dumps({"threads": torch.get_num_threads(), "runs": [(p, asdict(c), b) for p, c, b in runs]})
    # Every tensor gets pages of its own and gives them back when it dies, so that the resident memory says what is alive.
    quiet = {"MALLOC_MMAP_THRESHOLD_": "65536", "KINETO_LOG_LEVEL": "99", "OMP_WAIT_POLICY": "PASSIVE"}
    command = [sys.executable, "-m", "tilewise.cli.longseq", request]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ, **quiet}) as worker:
        yield from (int(line) for line in worker.stdout or ())
    if worker.returncode:
        raise RuntimeError(f"the process that measures memory ended with status {worker.returncode}: {' '.join(command[:3])}")


def _worker(request: str) -> None:
    asked = json.loads(request)
    torch.set_num_threads(asked["threads"])
    runs = [(provider, Case(**case), backward) for provider, case, backward in asked["runs"]]
    for provider, case, _ in runs:  # first calls load libraries and start threads: that is not the attention's memory
        run_once(provider, Case(**{**asdict(case), "seqlen": 256}), backward=True)
    for run in runs:
        print(peak(*run), flush=True)


if __name__ == "__main__":
    _worker(sys.argv[1])
