"""Time masks, score terms, wide heads, float32 and forward mode beside the peers that have them, on one GPU, in one run.

    python benchmarks/features.py --out benchmarks/results/features-h200.json
    python benchmarks/features.py --only softcap,alibi --pass fwd --providers hopper,triton,flex
    python benchmarks/features.py --env hopper:/opt/triton39 --env triton:/opt/triton39     (PYTHONPATH of one provider)

``tilewise bench`` times plain attention on the grid of a paper; here every case is a feature at one shape. Each provider has a
process of its own. All of them first compile and are held against the float64 oracle on a smaller twin of the case; a wrong
answer is a row with an error. Then they are timed in turn after the same rest. ms is the median of ``do_bench``; tflops counts
4 batch heads N^2 D (half if causal; what a mask of tensors leaves out is not taken off), 2.5 times for backward, 3 times for jvp.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import json
import math
import multiprocessing
import os
import pathlib
import subprocess
import sys
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import torch

ERROR = {torch.bfloat16: 3e-2, torch.float32: 3e-2}  # of o, relative to its norm: TF32 counts among the latter
OURS = ("auto", "hopper", "triton")


@dataclasses.dataclass(frozen=True)
class Case:
    """One feature at one shape; ``kind`` names its terms."""

    name: str
    kind: str
    batch: int
    heads: int
    heads_kv: int
    seqlen: int
    head_dim: int
    head_dim_v: int
    peers: tuple[str, ...]
    passes: tuple[str, ...] = ("fwd", "bwd")
    causal: bool = True
    dtype: str = "bfloat16"
    precision: str | None = None

    def twin(self) -> Case:
        """The same in small, for the check."""
        return dataclasses.replace(self, seqlen=min(self.seqlen, 1024), batch=1)

    def flops(self, pass_: str) -> float:
        one = 2 * self.batch * self.heads * self.seqlen**2 * (self.head_dim + self.head_dim_v)
        if self.kind == "window":
            one *= 2 * 1025 / self.seqlen
        return one * (0.5 if self.causal else 1.0) * {"fwd": 1.0, "bwd": 2.5, "jvp": 3.0}[pass_]


def _case(kind: str, peers: str, shape: tuple[int, ...] = (1, 16, 16, 16384, 128), **more: Any) -> Case:
    name = more.pop("name", kind)
    return Case(name, kind, *shape[:5], shape[5] if len(shape) > 5 else shape[4], tuple(peers.split()), **more)


CASES = [
    _case("plain", "hopper triton flex"),
    _case("softcap", "hopper triton flex"),
    _case("sink", "hopper triton flex"),
    _case("alibi", "hopper triton flex"),
    _case("own cap", "triton flex"),
    _case("own table", "triton flex"),
    _case("segments", "hopper triton flex"),
    _case("dense", "triton flex", (1, 16, 16, 8192, 128), causal=False),
    _case("bias", "hopper triton flex efficient", (4, 16, 16, 2048, 64), causal=False),
    _case("plain", "triton efficient", (2, 4, 4, 4096, 512), name="head_dim 512"),
    _case("plain", "triton efficient math", (2, 16, 16, 4096, 128), name="float32", causal=False, dtype="float32"),
    _case("plain", "triton", (2, 16, 16, 4096, 128), name="tf32", causal=False, dtype="float32", precision="tf32"),
    _case("window", "hopper triton flex fa4", (1, 16, 16, 16384, 128)),
    _case("plain", "hopper triton flex cudnn fa4", (4, 32, 8, 4096, 128), name="gqa 32/8"),
    _case("plain", "hopper triton flex cudnn fa4", (1, 32, 8, 16384, 128), name="gqa 32/8 long"),
    _case("plain", "auto triton cudnn fa4", (2, 16, 16, 8192, 192, 128), name="192/128"),
    _case("plain", "triton", (4, 32, 32, 4096, 64), name="jvp 64", passes=("fwd", "jvp")),
    _case("plain", "triton", (4, 16, 16, 4096, 128), name="jvp 128", passes=("fwd", "jvp")),
]


def tensors(case: Case) -> dict[str, torch.Tensor]:
    """Everything that a case needs, the same in every process."""
    made = torch.Generator("cuda").manual_seed(0)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=made, device="cuda").to(getattr(torch, case.dtype))

    n, c = case.seqlen, case
    out = {
        "q": draw(c.batch, c.heads, n, c.head_dim),
        "k": draw(c.batch, c.heads_kv, n, c.head_dim),
        "v": draw(c.batch, c.heads_kv, n, c.head_dim_v),
        "do": draw(c.batch, c.heads, n, c.head_dim_v),
    }
    if case.kind == "alibi":
        out["slopes"] = torch.tensor([2.0 ** (-8 * (h + 1) / c.heads) for h in range(c.heads)], device="cuda")
    if case.kind == "own table":
        out["table"] = torch.randn(c.heads, 81, generator=made, device="cuda")
    if case.kind == "sink":
        out["sink"] = torch.randn(c.heads, generator=made, device="cuda")
    if case.kind == "bias":
        out["bias"] = draw(1, c.heads, n, n)
    if case.kind == "segments":  # 64 documents of random lengths
        cuts = torch.randperm(n - 1, generator=torch.Generator().manual_seed(0))[:63] + 1
        out["ids"] = torch.bucketize(torch.arange(n), cuts.sort().values, right=True).int().cuda()
    if case.kind == "dense":  # half of the tiles of 128 empty, a quarter random, a quarter full
        sort = torch.rand((n // 128, n // 128), generator=made, device="cuda").repeat_interleave(128, 0).repeat_interleave(128, 1)
        bits = torch.rand((n, n), generator=made, device="cuda") < 0.5
        out["mask"] = (sort > 0.5) & (bits | (sort > 0.75))
    return out


def spec_of(case: Case, t: dict[str, torch.Tensor]) -> Any:
    """The spec of a case."""
    import tilewise as tw

    def own(name: str, **tensors: torch.Tensor) -> Any:
        from tilewise.functions import function_of
        from tilewise.testing.score_functions import example

        made = function_of(example(name, case.batch, case.heads))
        slope = 1.0 if made.constant_slope else made.derivative
        return tw.score_fn(made.fn, twin=made.twin, derivative=slope, tensors=tensors)

    base = tw.causal() if case.causal else tw.full()
    return {
        "plain": lambda: base,
        "softcap": lambda: base & tw.softcap(50.0),
        "alibi": lambda: base & tw.alibi(t["slopes"]),
        "own cap": lambda: base & own("rational_cap"),
        "own table": lambda: base & own("relative", table=t["table"]),
        "sink": lambda: base & tw.sink(t["sink"]),
        "bias": lambda: base & tw.bias(t["bias"]),
        "segments": lambda: base & tw.segments(t["ids"], t["ids"]),
        "dense": lambda: base & tw.dense(t["mask"]),
        "window": lambda: tw.window(1024, 0),
    }[case.kind]()


Attend = Callable[[dict[str, torch.Tensor]], torch.Tensor]


def ours(case: Case, t: dict[str, torch.Tensor], backend: str, backward: bool) -> Attend:
    import tilewise as tw

    spec = tw.plan(t["q"], t["k"], spec_of(case, t), v=t["v"], backend=backend, backward=backward)

    def attend(t: dict[str, torch.Tensor]) -> torch.Tensor:
        given = spec if case.kind != "bias" or not backward else spec_of(case, t)
        return tw.attention(t["q"], t["k"], t["v"], spec=given, backend=backend, precision=case.precision)

    return attend


def flex(case: Case, t: dict[str, torch.Tensor], backend: str, backward: bool) -> Attend:
    import torch._dynamo.config
    import torch._functorch.config
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    torch._dynamo.config.cache_size_limit = 1000
    torch._functorch.config.donated_buffer = False
    compiled: Any = torch.compile(flex_attention, dynamic=False)
    masks: dict[str, Any] = {
        "segments": lambda b, h, i, j: (i >= j) & (t["ids"][i] == t["ids"][j]),
        "dense": lambda b, h, i, j: t["mask"][i, j],
        "window": lambda b, h, i, j: (i >= j) & (i - j <= 1024),
    }
    keep = masks.get(case.kind, (lambda b, h, i, j: i >= j) if case.causal else None)
    block = None if keep is None else create_block_mask(keep, None, None, case.seqlen, case.seqlen, device="cuda")
    score: dict[str, Any] = {
        "softcap": lambda s, b, h, i, j: 50.0 * torch.tanh(s / 50.0),
        "alibi": lambda s, b, h, i, j: s + t["slopes"][h] * (j - i),
        "own cap": lambda s, b, h, i, j: s * 3.0 / (s.abs() + 3.0),
        "own table": lambda s, b, h, i, j: s + t["table"][h, (j - i).clamp(-40, 40) + 40],
    }

    def attend(t: dict[str, torch.Tensor]) -> torch.Tensor:
        mod = score.get(case.kind)
        if case.kind == "bias":
            bias = t["bias"]
            mod = lambda s, b, h, i, j: s + bias[0, h, i, j]  # noqa: E731
        grouped = case.heads != case.heads_kv
        if case.kind != "sink":
            return compiled(t["q"], t["k"], t["v"], score_mod=mod, block_mask=block, enable_gqa=grouped)
        o, lse = compiled(t["q"], t["k"], t["v"], block_mask=block, return_lse=True)
        return o * torch.sigmoid(lse - t["sink"][:, None])[..., None].to(o.dtype)

    return attend


def sdpa(case: Case, t: dict[str, torch.Tensor], backend: str, backward: bool) -> Attend:
    from torch.nn.attention import SDPBackend, sdpa_kernel

    chosen = {"cudnn": SDPBackend.CUDNN_ATTENTION, "efficient": SDPBackend.EFFICIENT_ATTENTION, "math": SDPBackend.MATH}[backend]

    def attend(t: dict[str, torch.Tensor]) -> torch.Tensor:
        bias = t["bias"].expand(case.batch, -1, -1, -1) if case.kind == "bias" else None
        with sdpa_kernel(chosen):
            grouped: dict[str, Any] = {"enable_gqa": True} if case.heads != case.heads_kv else {}
            return torch.nn.functional.scaled_dot_product_attention(
                t["q"], t["k"], t["v"], attn_mask=bias, is_causal=case.causal and bias is None, **grouped
            )

    return attend


def fa4(case: Case, t: dict[str, torch.Tensor], backend: str, backward: bool) -> Attend:
    import flash_attn.cute as library  # type: ignore[import-not-found]

    window = {"window_size": (1024, 0)} if case.kind == "window" else {}

    def attend(t: dict[str, torch.Tensor]) -> torch.Tensor:
        out = library.flash_attn_func(*(t[n].transpose(1, 2) for n in "qkv"), causal=case.causal, **window)
        return (out[0] if isinstance(out, tuple) else out).transpose(1, 2)

    return attend


MAKERS = {"flex": flex, "cudnn": sdpa, "efficient": sdpa, "math": sdpa, "fa4": fa4, **dict.fromkeys(OURS, ours)}


def bind(case: Case, pass_: str, provider: str) -> tuple[Callable[[], Any], dict[str, torch.Tensor]]:
    """The call that is timed, and its tensors."""
    t = tensors(case)
    leaves = [n for n in ("q", "k", "v", "bias") if n in t] if pass_ == "bwd" else []
    for name in leaves:
        t[name].requires_grad_()
    attend = MAKERS[provider](case, t, provider, pass_ == "bwd")
    if pass_ == "fwd":
        return lambda: attend(t), t
    if pass_ == "jvp":
        tangents = tuple(torch.randn_like(t[n]) for n in "qkv")
        return lambda: torch.func.jvp(
            lambda *qkv: attend(dict(zip("qkv", qkv, strict=True))), tuple(t[n] for n in "qkv"), tangents
        ), t
    o = attend(t)
    return lambda: torch.autograd.grad(o, [t[n] for n in leaves], t["do"], retain_graph=True), t


def check(case: Case, pass_: str, provider: str) -> None:
    """Hold o (and for a backward pass dq) of the small twin against float64."""
    import tilewise as tw

    small = case.twin()
    with torch.set_grad_enabled(pass_ == "bwd"):
        call, t = bind(small, pass_, provider)
        got = call()
        wide = {n: x.detach().double().requires_grad_(n == "q") for n, x in t.items() if n in "qkv"}
        expected = tw.reference(wide["q"], wide["k"], wide["v"], spec_of(small, {n: x.detach() for n, x in t.items()}))[0]
        if pass_ == "bwd":
            expected = torch.autograd.grad(expected, wide["q"], t["do"].double())[0]
        result = (got[0] if isinstance(got, tuple) else got).double()
    error = ((result - expected).norm() / expected.norm()).item()
    if not error <= ERROR[t["q"].dtype]:
        raise ArithmeticError(f"wrong: relative error {error:.2g} on the small twin")


def serve(channel: Connection, provider: str) -> None:
    """The life of a provider's process: (what, case, pass) in, a dictionary out."""
    while (message := channel.recv()) is not None:
        what, case, pass_ = message
        try:
            if what == "check":
                check(case, pass_, provider)
            with torch.set_grad_enabled(pass_ == "bwd"):
                call, _ = bind(case, pass_, provider)
                call()
                torch.cuda.synchronize()
                reply: dict[str, Any] = {}
                if what == "time":
                    from triton.testing import do_bench

                    torch.cuda.reset_peak_memory_stats()
                    before = torch.cuda.memory_allocated()
                    call()
                    torch.cuda.synchronize()
                    peak = (torch.cuda.max_memory_allocated() - before) / 2**20
                    time.sleep(0.2)
                    ms = do_bench(call, warmup=25, rep=100, return_mode="median")
                    reply = {"ms": round(ms, 4), "tflops": round(case.flops(pass_) / ms / 1e9, 1), "peak_mb": round(peak, 1)}
                del call
        except Exception as error:
            lines = [line.strip() for line in str(error).splitlines() if line.strip()]
            reply = {"error": f"{type(error).__name__}: {(lines or ['no message'])[0][:200]}"}
        torch.cuda.empty_cache()
        channel.send(reply)


class Process:
    """A provider's process."""

    def __init__(self, provider: str, path: str | None):
        context = multiprocessing.get_context("spawn")
        self.channel, theirs = context.Pipe()
        self.process = context.Process(target=_entry, args=(theirs, provider, path), daemon=True)
        self.process.start()

    def ask(self, *message: Any) -> None:
        self.channel.send(message)

    def answer(self, seconds: float) -> dict[str, Any] | None:
        try:
            return self.channel.recv() if self.channel.poll(seconds) else None
        except EOFError:
            return {"error": "its process ended"}


def _entry(channel: Connection, provider: str, path: str | None) -> None:
    """A spawned process has the module path of its parent: put this provider's before it, before anything is imported."""
    if path:
        sys.path[:0] = path.split(os.pathsep)
    serve(channel, provider)


def prepare(work: list[tuple[str, Case, str]], paths: dict[str, str], jobs: int, until: float) -> dict[tuple[str, str, str], str]:
    """Check and compile everything, ``jobs`` processes at a time; what went wrong."""
    waiting, busy, wrong = work[::-1], [], {}
    while waiting or busy:
        while waiting and len(busy) < jobs and time.monotonic() < until:
            provider, case, pass_ = waiting.pop()
            process = Process(provider, paths.get(provider))
            process.ask("check", case, pass_)
            busy.append((process, (case.name, pass_, provider)))
        for entry in list(busy):
            reply = entry[0].answer(0.05)
            if reply is not None or time.monotonic() > until:
                if reply is None or "error" in reply:
                    wrong[entry[1]] = "not compiled in time" if reply is None else reply["error"]
                entry[0].process.kill()
                busy.remove(entry)
        if time.monotonic() > until:
            break
    wrong.update({(case.name, pass_, provider): "not compiled in time" for provider, case, pass_ in waiting})
    return wrong


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=pathlib.Path, help="write the JSON here")
    parser.add_argument("--only", default="", help="names of cases, joined by commas (default: all)")
    parser.add_argument("--providers", default="", help="names of providers (default: all)")
    parser.add_argument("--pass", dest="passes", default="fwd,bwd,jvp", help="default: %(default)s")
    parser.add_argument("--jobs", type=int, default=8, help="processes that compile at a time (default: %(default)s)")
    parser.add_argument("--budget", type=float, default=1e9, help="seconds for everything; three fifths at most to compile")
    parser.add_argument("--env", action="append", default=[], metavar="NAME:PATH", help="PYTHONPATH of one provider")
    parser.add_argument("--commit", help="the commit that is measured, outside of a checkout")
    args = parser.parse_args()
    began = time.monotonic()
    paths = dict(option.split(":", 1) for option in args.env)
    names, providers = (set(filter(None, text.split(","))) for text in (args.only, args.providers))
    work = [
        (provider, case, pass_)
        for case in CASES
        for pass_ in case.passes
        for provider in case.peers
        if pass_ in args.passes.split(",") and (not names or case.name in names) and (not providers or provider in providers)
    ]
    wrong = prepare(work, paths, args.jobs, began + 0.6 * args.budget)
    print(f"compiled and checked after {time.monotonic() - began:.0f} s", flush=True)
    processes: dict[str, Process] = {}
    rows = []
    commit = args.commit or subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False).stdout.strip()
    head = {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "commit": commit,
        "paths": paths,
    }
    for provider, case, pass_ in work:
        reply: dict[str, Any] | None = {"error": "left out: the time was up"}
        if (case.name, pass_, provider) in wrong:
            reply = {"error": wrong[case.name, pass_, provider]}
        elif time.monotonic() - began < args.budget:
            if provider not in processes:
                processes[provider] = Process(provider, paths.get(provider))
            processes[provider].ask("time", case, pass_)
            reply = processes[provider].answer(60)
            if reply is None or "ms" not in reply:
                processes.pop(provider).process.kill()
                reply = reply or {"error": "no answer within 60 s"}
        shape = {f: getattr(case, f) for f in ("batch", "heads", "heads_kv", "seqlen", "head_dim", "head_dim_v", "causal", "dtype")}
        row = {"case": case.name, "pass": pass_, "provider": provider, **shape, "ms": None, "tflops": None, "error": None, **reply}
        rows.append(row)
        print(
            f"{case.name:<14} {pass_} {provider:<9} {row['ms'] or math.nan:9.3f} ms {row['tflops'] or 0:6.0f} {row['error'] or ''}",
            flush=True,
        )
        if args.out:
            args.out.write_text(json.dumps({"header": head, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
