"""H200: several tile configs of the forward-mode kernel against float64, then timed beside the forward pass.

    PYTHONPATH=src python .gpu_time_jvp.py [--quick]

FLOP: forward 4 B H N^2 D (half of it causal). jvp makes 6 products where the forward pass makes 2: 3 times as many.
"""
import itertools, subprocess, sys, time
import torch
import tilewise as tw
from tilewise import backends
from tilewise.configs import Config, illegal, lookup, records
from tilewise.problem import Problem
from tilewise.testing.tangents import JvpYardstick, draw_tangents, evaluate_jvp
from tilewise.testing.calls import random_call

dev = torch.device("cuda")
quick = "--quick" in sys.argv
print(torch.cuda.get_device_name(), torch.__version__, flush=True)
CONFIGS = {
    64: [(128, 64, 8, 2), (128, 64, 8, 3), (64, 64, 4, 2), (64, 32, 4, 2), (64, 32, 4, 3), (128, 32, 8, 2), (128, 32, 8, 3), (64, 64, 4, 3)],
    128: [(128, 64, 8, 2), (128, 32, 8, 2), (128, 32, 8, 3), (64, 32, 4, 2), (64, 32, 4, 3), (64, 64, 4, 2)],
}


def bench(f, seconds=0.4):
    for _ in range(3):
        f()
    torch.cuda.synchronize()
    times, began = [], time.time()
    while time.time() - began < seconds or len(times) < 5:
        a, b = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        a.record(); f(); b.record()
        torch.cuda.synchronize()
        times.append(a.elapsed_time(b))
    return sorted(times)[len(times) // 2]


def with_config(c, f):
    with records.trying("triton", "jvp", c):
        backends.forget()
        try:
            return f()
        finally:
            backends.forget()


# 1. right?
for d, conf in CONFIGS.items():
    for spec, words in ((tw.causal(), "causal"), (tw.full(), "ragged"), (tw.window(100, 7), "window")):
        call = random_call((2, 4, 2, 517, 709, d, d), device=dev, dtype=torch.bfloat16, seed=d, spec=spec)
        tangents = draw_tangents(call, seed=d + 1)
        yard = JvpYardstick(call, tangents)
        for c in conf:
            got = with_config(Config(*c), lambda: evaluate_jvp(call, tangents, "triton"))
            res = yard.judge(got)
            bad = [str(r) for r in res if not r.ok]
            print(f"D {d} {words} {c}:", "ok, of the bound used " + " ".join(f"{r.output} {r.used:.2f}" for r in res) if not bad else "WRONG " + "; ".join(bad), flush=True)
for terms in ("softcap:20 alibi sink", "bias:1hqk", "alibi bias:b1qk softcap:5", "segment", "dense"):
    from tilewise.testing.terms import draw_terms
    for d, dt in itertools.product((64, 128, 256), (torch.bfloat16, torch.float16, torch.float32)):
        shape = (2, 4, 2, 300, 517, d, d)
        spec = draw_terms(terms, shape, dev) & tw.causal()
        call = random_call(shape, device=dev, dtype=dt, seed=d, spec=spec)
        tangents = draw_tangents(call, seed=d + 1)
        try:
            res = JvpYardstick(call, tangents).judge(evaluate_jvp(call, tangents, "triton"))
            bad = [str(r) for r in res if not r.ok]
            print(f"{terms} D {d} {dt}:", "WRONG " + "; ".join(bad) if bad else f"ok {max(r.used for r in res):.2f}", flush=True)
        except Exception as e:
            print(f"{terms} D {d} {dt}: {type(e).__name__} {str(e)[:300]}", flush=True)

# 2. fast?
for d, n in itertools.product((64, 128), (4096, 16384)):
    b, h = 16384 // n, 2048 // d
    q, k, v, tq, tk, tv = (torch.randn(b, h, n, d, device=dev, dtype=torch.bfloat16) for _ in range(6))
    flop = 4 * b * h * n * n * d / 2

    def forward(backend):
        with torch.no_grad():
            return tw.attention(q, k, v, causal=True, backend=backend)

    def jvp(given=(tq, tk, tv)):
        with torch.no_grad():
            torch.ops.tilewise.attention_jvp(q, k, v, "upper:0,align:bottom_right", None, None, "triton", "", *given)

    base = {}
    for backend in ("hopper", "triton"):
        ms = bench(lambda: forward(backend))
        base[backend] = flop / ms / 1e9
        print(f"D {d} N {n} forward {backend}: {ms:.3f} ms, {base[backend]:.0f} TFLOP/s", flush=True)
    for c in CONFIGS[d]:
        p = Problem.bind(q, k, v, tw.causal(), jvp="qkv")
        why = illegal(p, "jvp", Config(*c))
        if why:
            print(f"D {d} N {n} {c}: {why}")
            continue
        try:
            ms = with_config(Config(*c), lambda: bench(jvp))
        except Exception as e:
            print(f"D {d} N {n} {c}: {type(e).__name__} {str(e)[:200]}", flush=True)
            continue
        rate = 3 * flop / ms / 1e9
        mark = " <- default" if lookup(p, "jvp") == Config(*c) else ""
        print(f"D {d} N {n} jvp {c}: {ms:.3f} ms, {rate:.0f} TFLOP/s, {rate / base['hopper']:.2f} of hopper's forward rate{mark}", flush=True)
    for name, given in (("only tv", (None, None, tv)), ("tq, tk", (tq, tk, None)), ("only tq", (tq, None, None))):
        ms = bench(lambda: jvp(given))
        print(f"D {d} N {n} jvp {name}: {ms:.3f} ms", flush=True)
    ms = bench(lambda: torch.func.jvp(lambda q, k, v: tw.attention(q, k, v, causal=True), (q, k, v), (tq, tk, tv)))
    print(f"D {d} N {n} torch.func.jvp by 'auto': {ms:.3f} ms", flush=True)
