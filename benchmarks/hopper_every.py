"""Check every config of the hopper backend against float64 on this GPU, then time each: ``python benchmarks/hopper.py --every``.

Kernels are compiled first, by processes that need no GPU and share Triton's cache with this one. The inputs in ``GUARDS`` are there
to deceive a guarded config: each says whether the hasty kernel must raise the flag.
"""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from triton.testing import do_bench

from tilewise.arch import ARCHS
from tilewise.backends import hopper
from tilewise.capabilities import dims_text
from tilewise.configs.hopper import CHOICES, HopperConfig, illegal, lookup
from tilewise.problem import Problem
from tilewise.reference import reference
from tilewise.spec import Spec, causal, window

BF16 = torch.bfloat16
Pair = tuple[int, int]  # head_dim, head_dim_v
Shape = tuple[int, int, int, int, int]  # batch, heads_q, heads_kv, seqlen_q, seqlen_k


@dataclasses.dataclass(frozen=True)
class Guard:
    """Inputs made to deceive: ``change`` edits q, k and v; ``raises`` says whether the flag must be up after the hasty kernel."""

    name: str
    shape: Shape
    spec: Spec
    change: Callable[..., None]
    raises: bool


def _push(bits: float, begin: int | None, end: int | None) -> Callable[..., None]:
    """Raise (lower, if negative) the scores of the keys in ``[begin, end)`` by so many bits, for every query."""

    def change(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        q[..., 0], k[..., 0] = 16.0, 0.0
        k[:, :, begin:end, 0] = bits / (16 * q.shape[-1] ** -0.5 * hopper.LOG2_E)

    return change


def _slope(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    """Scores that grow from the first visited key to the last, by 300 bits."""
    q[..., 0] = 16.0
    steps = torch.linspace(1, 0, k.shape[2], device=k.device)
    k[..., 0] = (300 * steps / (16 * q.shape[-1] ** -0.5 * hopper.LOG2_E)).to(k.dtype)


def _large_values(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    _push(60.0, 0, 256)(q, k, v)
    v *= 1e30


def _nan_query(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    q[0, 0, 5, 3] = float("nan")


def _nan_key(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    k[0, 0, 100, 3] = float("nan")


def _infinite_key(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    q[..., 0] = 1.0
    k[0, 0, 100, 0] = float("inf")


def _scores_of_minus_infinity(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    q[..., 0] = 1.0
    k[:, :, -256:, 0] = float("-inf")


def _nothing(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    pass


SQUARE = (1, 2, 1, 1024, 1024)
GUARDS = [
    Guard("plain", SQUARE, Spec(), _nothing, False),
    Guard("plain, causal", SQUARE, causal(), _nothing, False),
    Guard("ragged window", (1, 2, 1, 1000, 1000), window(300, 0), _nothing, False),
    Guard("first tile 60 bits above the rest", SQUARE, Spec(), _push(60, -256, None), False),
    Guard("first tile 200 bits above the rest", SQUARE, Spec(), _push(200, -256, None), False),
    Guard("first tile 60 bits below the rest", SQUARE, Spec(), _push(60, 0, 768), False),
    Guard("first tile 130 bits below the rest", SQUARE, Spec(), _push(130, 0, 768), True),
    Guard("one key 130 bits above the rest", SQUARE, causal(), _push(130, 3, 4), True),
    Guard("scores that grow to the last tile", SQUARE, Spec(), _slope, True),
    Guard("large sums times large values", SQUARE, Spec(), _large_values, True),
    Guard("rows that see nothing of their first tile", (1, 2, 1, 512, 549), causal(), _nothing, True),
    Guard("rows that see nothing", (1, 2, 1, 500, 200), causal(), _nothing, True),
    Guard("a query that is NaN", SQUARE, causal(), _nan_query, True),
    Guard("a key that is NaN", SQUARE, causal(), _nan_key, True),
    Guard("a key that is infinite", SQUARE, causal(), _infinite_key, True),
    Guard("a first tile of scores of -inf", SQUARE, Spec(), _scores_of_minus_infinity, True),
]


def _sizes(pair: Pair) -> dict[str, int]:
    return {"head_dim": pair[0], "head_dim_v": pair[1]}


@dataclasses.dataclass(frozen=True)
class Point:
    """What is timed. ``work``: pairs of a query and a key, over all heads."""

    what: str
    pair: Pair
    shape: Shape
    spec: Spec
    work: float


def _points(pairs: list[Pair]) -> Iterator[Point]:
    """16,384 tokens with 2,048 columns of v in all heads, full and causal; at D 128 groups, a window, short queries."""
    for pair in pairs:
        for seqlen in (1024, 4096, 8192, 16384) if pair == (192, 128) else (1024, 4096, 16384):
            batch, heads = 16384 // seqlen, 2048 // pair[1]
            shape, work = (batch, heads, heads, seqlen, seqlen), batch * heads * seqlen**2
            yield Point("full", pair, shape, Spec(), work)
            yield Point("causal", pair, shape, causal(), work / 2)
    if (128, 128) in pairs:
        for seqlen in (4096, 16384):
            batch = 16384 // seqlen
            yield Point("causal, 32 heads over 8", (128, 128), (batch, 32, 8, seqlen, seqlen), causal(), batch * 16 * seqlen**2)
        reach = 1024
        work = 16 * (16384 * (reach + 1) - reach * (reach + 1) / 2)
        yield Point("causal window of 1,024", (128, 128), (1, 16, 16, 16384, 16384), window(reach, 0), work)
        yield Point("20 queries, 32 heads over 8", (128, 128), (64, 32, 8, 20, 4000), Spec(), 64 * 32 * 20 * 4000)


def _tensors(shape: Shape, pair: Pair, dtype: torch.dtype, device: str) -> list[torch.Tensor]:
    batch, heads_q, heads_kv, seqlen_q, seqlen_k = shape
    sizes = [(heads_q, seqlen_q, pair[0]), (heads_kv, seqlen_k, pair[0]), (heads_kv, seqlen_k, pair[1])]
    make = torch.empty if device == "cpu" else torch.randn
    return [make((batch, *size), dtype=dtype, device=device) for size in sizes]


def _outputs(q: torch.Tensor, v: torch.Tensor) -> list[torch.Tensor]:
    o = torch.full((*q.shape[:3], v.shape[3]), float("nan"), dtype=q.dtype, device=q.device)
    return [o, torch.full(q.shape[:3], float("nan"), device=q.device)]


def compile_share(checks: list[tuple[Any, ...]], pairs: list[Pair], index: int, count: int) -> None:
    """Compile every ``count``-th kernel that the checks and the timings need, without a GPU."""
    from tilewise.testing.compile_only import use_target

    use_target("sm_90")
    calls = [(shape, pair, spec, dtype, scale) for pair in pairs for shape, spec, dtype, scale, _ in checks]
    calls += [(guard.shape, pair, guard.spec, BF16, None) for pair in pairs for guard in GUARDS]
    calls += [(point.shape, point.pair, point.spec, BF16, None) for point in _points(pairs)]
    launches = {}
    for shape, pair, spec, dtype, scale in calls:
        q, k, v = _tensors(shape, pair, dtype, "cpu")
        problem = dataclasses.replace(Problem.bind(q, k, v, spec, scale), arch=ARCHS["sm_90"])
        for config in CHOICES[pair]:
            if illegal(problem, config) is None:
                o, lse = q.new_empty((*q.shape[:3], pair[1])), torch.empty(q.shape[:3])
                for launch in hopper.launches_fwd(problem, config, q, k, v, o, lse):
                    launches.setdefault((str(launch.options), dtype), launch)
    for launch in list(launches.values())[index::count]:
        launch.kernel.warmup(*launch.args, grid=launch.grid, **launch.options)
    os._exit(0)  # past the compiler's complaints at exit


def _compile_all(pairs: list[Pair]) -> None:
    count = max(1, (os.cpu_count() or 2) - 2)
    script = os.path.join(os.path.dirname(os.path.abspath(__file__)), "hopper.py")
    command = [sys.executable, script, "--dims", dims_text(tuple(pairs)), "--compile-share"]
    started = [subprocess.Popen([*command, str(i), str(count)]) for i in range(count)]
    for process in started:
        if process.wait():
            raise RuntimeError("a process that compiles kernels has failed")


def _errors(o: torch.Tensor, lse: torch.Tensor, true_o: torch.Tensor, true_lse: torch.Tensor, dtype: torch.dtype) -> dict[str, Any]:
    """How far from the truth, and whether NaN, -inf and rows of zeros are where they should be."""
    seen, number = ~true_lse.isneginf(), ~true_o.isnan()
    exact = torch.equal(seen, ~lse.isneginf()) and torch.equal(number, ~o.isnan()) and bool((o[~seen] == 0).all())
    norm = true_o[number].norm().clamp_min(1e-30)
    error = ((o[number].double() - true_o[number]).norm() / norm).item()
    both = seen & ~true_lse.isnan() & true_lse.isfinite()
    off = ((lse - true_lse)[both].abs() / true_lse[both].abs().clamp_min(1)).max().item() if both.any() else 0.0
    return {"error": error, "lse_error": off, "ok": exact and error < (4e-3 if dtype == BF16 else 6e-4) and off < 1e-4}


def _flag() -> int:
    return int(max((int(words[1]) for words in hopper._counters.values()), default=0))


def _at_rest() -> bool:
    return not any(words.any() for words in hopper._counters.values())


def _run(problem: Problem, config: HopperConfig, q: Any, k: Any, v: Any, o: Any, lse: Any) -> bool:
    """Run the launches of one call; was the flag up after the first of two?"""
    launches = hopper.launches_fwd(problem, config, q, k, v, o, lse)
    launches[0].run()
    raised = len(launches) == 2 and _flag() == 1
    for launch in launches[1:]:
        launch.run()
    return raised


def check_all(checks: list[tuple[Any, ...]], pairs: list[Pair]) -> list[dict[str, Any]]:
    """Every config on every problem of ``checks`` and on every input of ``GUARDS``; the rows that are wrong are printed."""
    rows = []

    def judge(row: dict[str, Any]) -> None:
        rows.append(row)
        if not row["ok"]:
            print("BAD", row, flush=True)

    for pair in pairs:
        configs = CHOICES[pair]
        for shape, spec, dtype, scale, rows_outside in checks:
            q, k, v = _tensors(shape, pair, dtype, "cuda")
            if rows_outside:
                q, k, v = (t.transpose(1, 2).contiguous().transpose(1, 2) for t in (q, k, v))
            problem, truth = Problem.bind(q, k, v, spec, scale), reference(q, k, v, spec, scale)
            for place, config in enumerate(configs):
                if illegal(problem, config) is None:
                    o, lse = _outputs(q, v)
                    _run(problem, config, q, k, v, o, lse)
                    what = {**_sizes(pair), "config": place, "shape": shape, "mask": str(spec), "dtype": str(dtype)}
                    judge({**what, "sm_scale": scale, **_errors(o, lse, *truth, dtype)})
        for guard in GUARDS:
            q, k, v = _tensors(guard.shape, pair, BF16, "cuda")
            guard.change(q, k, v)
            problem, truth = Problem.bind(q, k, v, guard.spec), reference(q, k, v, guard.spec)
            for place, config in enumerate(configs):
                o, lse = _outputs(q, v)
                raised = _run(problem, config, q, k, v, o, lse)
                row = {**_sizes(pair), "config": place, "input": guard.name, **_errors(o, lse, *truth, BF16)}
                wrong_flag = config.guarded and raised != guard.raises
                judge({**row, "raised": raised, "ok": row["ok"] and not wrong_flag and _at_rest()})
        for place, config in enumerate(configs):
            if config.dynamic:
                judge({**_sizes(pair), "config": place, "input": "graph", "ok": _graph_is_right(pair, config)})
                judge({**_sizes(pair), "config": place, "input": "streams", "ok": _streams_are_right(pair, config)})
    return rows


def _calm_and_wild(pair: Pair, count: int) -> list[tuple[list[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]]:
    """Inputs and truths, in turn such as leave the flag alone and such as raise it."""
    out = []
    for i in range(count):
        q, k, v = _tensors(SQUARE, pair, BF16, "cuda")
        if i % 2:
            _slope(q, k, v)
        out.append(([q, k, v], reference(q, k, v, Spec())))
    return out


def _graph_is_right(pair: Pair, config: HopperConfig) -> bool:
    """A captured call, replayed on inputs that raise the flag and on inputs that do not."""
    inputs = _calm_and_wild(pair, 4)
    q, k, v = (t.clone() for t in inputs[0][0])
    o, lse = _outputs(q, v)
    problem = Problem.bind(q, k, v, Spec())
    _run(problem, config, q, k, v, o, lse)  # compiled and loaded before the capture
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for launch in hopper.launches_fwd(problem, config, q, k, v, o, lse):
            launch.run()
    right = True
    for (new_q, new_k, new_v), truth in [*inputs, *inputs]:
        q.copy_(new_q), k.copy_(new_k), v.copy_(new_v)
        o.fill_(float("nan")), lse.fill_(float("nan"))
        graph.replay()
        right = right and _errors(o, lse, *truth, BF16)["ok"]
    return right


def _streams_are_right(pair: Pair, config: HopperConfig) -> bool:
    """Four streams at once, two with inputs that raise the flag."""
    inputs = _calm_and_wild(pair, 4)
    outputs = [_outputs(q, v) for (q, _, v), _ in inputs]
    streams = [torch.cuda.Stream() for _ in inputs]
    torch.cuda.synchronize()
    for _ in range(10):
        for stream, ((q, k, v), _), (o, lse) in zip(streams, inputs, outputs, strict=True):
            with torch.cuda.stream(stream):
                for launch in hopper.launches_fwd(Problem.bind(q, k, v, Spec()), config, q, k, v, o, lse):
                    launch.run()
    torch.cuda.synchronize()
    right = [_errors(o, lse, *truth, BF16)["ok"] for (o, lse), (_, truth) in zip(outputs, inputs, strict=True)]
    return all(right) and _at_rest()


def time_all(pairs: list[Pair], deadline: float) -> list[dict[str, Any]]:
    """Medians at every point for every config that may run there, until the deadline."""
    rows = []
    for point in _points(pairs):
        q, k, v = _tensors(point.shape, point.pair, BF16, "cuda")
        o, lse = _outputs(q, v)
        problem = Problem.bind(q, k, v, point.spec)
        for place, config in enumerate(CHOICES[point.pair]):
            if illegal(problem, config) is None and time.time() < deadline:
                launches = hopper.launches_fwd(problem, config, q, k, v, o, lse)
                time.sleep(0.05)
                ms = do_bench(lambda: [launch.run() for launch in launches], warmup=10, rep=50, return_mode="median")  # noqa: B023
                row = {**_sizes(point.pair), "what": point.what, "causal": point.spec.upper == 0, "seqlen": problem.seqlen_k}
                row |= {"config": place, "picked": config == lookup(problem), "ms": round(ms, 5)}
                rows.append({**row, "tflops": round(2 * point.work * sum(point.pair) / ms / 1e9)})
                print(rows[-1], flush=True)
    return rows


def every(checks: list[tuple[Any, ...]], pairs: list[Pair], limit: float) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """``(checks, timings)``, the second until ``limit`` seconds from now."""
    begin = time.time()
    _compile_all(pairs)
    print(f"compiled after {time.time() - begin:.0f} s", flush=True)
    checked = check_all(checks, pairs)
    print(f"checked after {time.time() - begin:.0f} s: {sum(not row['ok'] for row in checked)} of {len(checked)} wrong", flush=True)
    return checked, time_all(pairs, begin + limit)
