"""What only a GPU can show: offsets beyond 2^31 elements, grids beyond 65,535, graphs, a busy or a second device, every config.

No dense oracle fits beside such inputs, so each is judged on parts whose answer is complete in itself: whole (batch, head) pairs,
or both ends of a long sequence under a thin window, where only the rows at the ends have a gradient.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from .. import configs
from ..configs import hopper_backward
from ..spec import Spec, causal, full
from ..terms import alibi, bias, dense, segments, sink, softcap
from .calls import Call, evaluate, fit, random_call
from .tolerance import Result, Yardstick

__all__ = ["HASTY", "LARGE", "Large", "adding", "all_configs", "busy", "free_gib", "keeping"]

Device = torch.device | str
_ENDS = 256  # rows at each end of a long sequence that have a gradient
_LEFT = 100  # keys that such a row sees before itself


@dataclass(frozen=True)
class Large:
    """One check: ``run(backend, device)`` needs ``gib`` of GPU memory."""

    name: str
    gib: float
    run: Callable[[str, Device], list[Result]]


def free_gib(device: Device) -> float:
    """GPU memory that is free for PyTorch, what it has cached included."""
    free, _ = torch.cuda.mem_get_info(device)
    cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return (free + cached) / 2**30


def _drawn(shape: tuple[int, ...], device: Device, seed: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator(device).manual_seed(seed), device=device, dtype=dtype)


def _call(shape: tuple[int, int, int, int, int], device: Device, spec: Spec) -> Call:
    """A call drawn on the device: (batch, heads, seqlen_q, seqlen_k, head_dim)."""
    batch, heads, n_q, n_k, dim = shape
    sizes = ((batch, heads, n_q, dim), (batch, heads, n_k, dim), (batch, heads, n_k, dim), (batch, heads, n_q, dim))
    q, k, v, do = (_drawn(size, device, seed) for seed, size in enumerate(sizes))
    return Call(q, k, v, spec, None, do)


def _worst(results: list[Result]) -> list[Result]:
    """For every output the result that is nearest to its bound, or beyond it."""
    outputs = dict.fromkeys(r.output for r in results)
    return [max((r for r in results if r.output == output), key=lambda r: r.used) for output in outputs]


def _corners(name: str, call: Call, got: dict[str, torch.Tensor]) -> list[Result]:
    """Judge the first, a middle and the last (batch, head)."""
    batch, heads = call.k.shape[:2]
    results = []
    for b, h in {(0, 0), (batch // 2, heads // 2), (batch - 1, heads - 1)}:
        part = call.part(slice(b, b + 1), slice(h, h + 1))
        results += Yardstick(part).judge({n: t[b : b + 1, h : h + 1] for n, t in got.items()}, f"{name} [{b}, {h}]")
    return _worst(results)


def _whole(name: str, shape: tuple[int, int, int, int, int], spec: Spec) -> Callable[[str, Device], list[Result]]:
    def run(backend: str, device: Device) -> list[Result]:
        call = fit(_call(shape, device, spec), backend)
        return [] if call is None else _corners(name, call, evaluate(call, backend))

    return run


def _with_terms(
    name: str, shape: tuple[int, int, int, int, int], terms: Callable[[Call], Spec]
) -> Callable[[str, Device], list[Result]]:
    """A causal call with terms whose tensors have a batch and a head dim, so that corners of their gradients can be cut out."""

    def run(backend: str, device: Device) -> list[Result]:
        call = _call(shape, device, causal())
        call = fit(call.replace(spec=causal() & terms(call)), backend)
        return [] if call is None else _corners(name, call, evaluate(call, backend))

    return run


def _by_head(call: Call) -> Spec:
    batch, heads = call.q.shape[:2]
    slopes, logits = (_drawn((batch, heads), call.q.device, seed, torch.float32) for seed in (4, 5))
    ids = (torch.arange(call.q.shape[2], device=call.q.device) // 3).to(torch.int32)[None].expand(batch, -1)
    return alibi(slopes.abs()) & sink(logits) & segments(ids, ids)


def _capped_long(call: Call) -> Spec:
    """A softcap under which most warps take a series and some exp2: q and k are drawn with unit variance."""
    return softcap(12.0)


def _sloped(call: Call) -> Spec:
    return alibi(_drawn(tuple(call.q.shape[:2]), call.q.device, 4, torch.float32).abs())


def _by_pair(call: Call) -> Spec:
    """A bias and a dense mask of more than 2^31 elements each, if all scores are."""
    size = (1, call.q.shape[1], call.q.shape[2], call.k.shape[2])
    seen = torch.empty(size, dtype=torch.bool, device=call.q.device)
    generator = torch.Generator(call.q.device).manual_seed(5)
    return bias(_drawn(size, call.q.device, 4)) & dense(seen.bernoulli_(0.6, generator=generator))


def _biased(
    name: str, shape: tuple[int, int, int, int, int], dims: str, spec: Spec
) -> Callable[[str, Device], list[Result]]:
    """A call with a bias in its own dtype, whose rows begin at multiples of 16 bytes: what Hopper copies in bulk. Some of its keys
    are hidden, all of one row, and a row is the lowest value throughout. Judged whole: a bias that is shared has one gradient."""

    def run(backend: str, device: Device) -> list[Result]:
        call = _call(shape, device, spec)
        batch, heads, n_q, n_k, _ = shape
        sizes = {"b": batch, "h": heads, "q": n_q, "1": 1}
        drawn = _drawn((*(sizes[d] for d in dims[:3]), -(-n_k // 8) * 8), device, 4)[..., :n_k]
        hidden = torch.rand(drawn.shape, generator=torch.Generator(device).manual_seed(5), device=device) < 0.2
        drawn.masked_fill_(hidden, float("-inf"))
        drawn[..., 5, :] = float("-inf")
        drawn[..., 7, :] = torch.finfo(drawn.dtype).min
        call = fit(call.replace(spec=spec & bias(drawn)), backend)
        return [] if call is None else Yardstick(call).judge(evaluate(call, backend), name)

    return run


def _thin(call: Call) -> Call:
    """Under a thin causal window, with a gradient at both ends only."""
    if call.do is not None:
        call.do[:, :, _ENDS:-_ENDS] = 0
    return call.replace(spec=Spec(upper=0, lower=_LEFT))


def _ends(name: str, call: Call, got: dict[str, torch.Tensor]) -> list[Result]:
    """Judge both ends of a call that ``_thin`` made, for the first and the last head."""
    results = []
    first, last, keys = slice(0, _ENDS), slice(-_ENDS, None), slice(-_ENDS - _LEFT, None)
    do = call.do
    for h in {0, call.k.shape[1] - 1}:
        head = slice(h, h + 1)
        for where, rows, cols, align in (("start", first, first, "top_left"), ("end", last, keys, "bottom_right")):
            part = Call(
                call.q[:, head, rows],
                call.k[:, head, cols],
                call.v[:, head, cols],
                Spec(upper=0, lower=_LEFT, align=align),
                call.sm_scale,
                None if do is None else do[:, head, rows],
            )
            cut = {n: t[:, head, cols if n in ("dk", "dv") else rows] for n, t in got.items()}
            results += Yardstick(part).judge(cut, f"{name}, {where}, head {h}")
    if "dq" in got and bool((got["dq"][:, :, _ENDS:-_ENDS] != 0).any()):
        results.append(Result(name, "dq", float("inf"), 0.0, False, "rows without a gradient must have dq = 0 (and no NaN)"))
    return _worst(results)


def _long_rows(name: str, rows: int, dim: int) -> Callable[[str, Device], list[Result]]:
    def run(backend: str, device: Device) -> list[Result]:
        call = fit(_thin(_call((1, 1, rows, rows, dim), device, full())), backend)
        return [] if call is None else _ends(name, call, evaluate(call, backend))

    return run


def _far_do(name: str, rows: int, heads: int, dim: int, width: int, before: int) -> Callable[[str, Device], list[Result]]:
    """``do`` is a view of ``rows`` rows of ``width`` elements that begin ``before`` rows into a larger buffer."""

    def run(backend: str, device: Device) -> list[Result]:
        drawn = _thin(_call((1, heads, rows, rows, dim), device, full()))
        held = torch.zeros((before + rows) * width, dtype=torch.bfloat16, device=device)
        far = held.as_strided((1, heads, rows, dim), (rows * width, dim, width, 1), before * width)
        if drawn.do is not None:
            far.copy_(drawn.do)
        call = fit(drawn.replace(do=far), backend)
        return [] if call is None else _ends(name, call, evaluate(call, backend))

    return run


def _graph(backend: str, device: Device) -> list[Result]:
    """Forward and backward, captured once and replayed on other numbers."""
    shape = (2, 4, 2, 200, 300, 64, 64)
    call, other = (fit(random_call(shape, device=device, dtype=torch.bfloat16, spec=causal(), seed=s), backend) for s in (0, 1))
    if call is None or other is None:
        return []
    with torch.cuda.device(device):
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):
                evaluate(call, backend)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            got = evaluate(call, backend)
        for name in ("q", "k", "v", *(["do"] if call.has_gradient else [])):
            getattr(call, name).copy_(getattr(other, name))
        graph.replay()
        torch.cuda.synchronize()
    return Yardstick(other).judge(got, "a CUDA graph, replayed")


def _bits(t: torch.Tensor) -> torch.Tensor:
    """The bits of a tensor: equal numbers may differ in them, as 0 and -0 do."""
    return t.contiguous().view(torch.uint8)


def busy(name: str, shape: tuple[int, int, int, int, int, int, int], times: int, backend: str, device: Device) -> list[Result]:
    """``times`` repeats of one problem, bit for bit equal, while another stream keeps the GPU busy."""
    call = fit(random_call(shape, device=device, dtype=torch.bfloat16, spec=causal()).replace(deterministic=True), backend)
    if call is None:
        return []
    wanted = evaluate(call, backend)
    on_gpu = torch.device(device).type == "cuda"
    with torch.cuda.device(device) if on_gpu else contextlib.nullcontext():
        stream = torch.cuda.Stream() if on_gpu else None
        with torch.cuda.stream(stream):
            load = torch.randn(2048 if on_gpu else 1, 2048 if on_gpu else 1, device=device, dtype=torch.bfloat16)
        for i in range(times):
            if on_gpu:
                with torch.cuda.stream(stream):
                    load = (load @ load).clamp_(-1, 1)
            got = evaluate(call, backend)
            differ = [n for n in wanted if not torch.equal(_bits(wanted[n]), _bits(got[n]))]
            if differ:
                return [Result(name, "repeat", float("inf"), 0.0, False, f"{', '.join(differ)} differ in repeat {i}")]
        if on_gpu:
            torch.cuda.synchronize()
    return Yardstick(call).judge(wanted, name)


def _second_device(backend: str, device: Device) -> list[Result]:
    """Tensors on another device than the current one."""
    index = torch.device(device).index
    current = torch.cuda.current_device() if index is None else index
    other = (current + 1) % torch.cuda.device_count()
    call = fit(random_call((2, 4, 2, 200, 300, 64, 64), device=f"cuda:{other}", dtype=torch.bfloat16, spec=causal()), backend)
    if call is None:
        return []
    with torch.cuda.device(current):
        got = evaluate(call, backend)
    torch.cuda.synchronize(other)
    return Yardstick(call).judge(got, f"tensors on cuda:{other} while cuda:{current} is current")


# Long enough for the kernels of the ``hopper`` backend that keep their first reference: (batch, heads, rows, head_dim).
HASTY = ((16, 8, 1024, 64), (8, 8, 1024, 128), (8, 8, 1100, 128), (4, 8, 1024, 256))

LARGE: tuple[Large, ...] = (
    Large("a CUDA graph, replayed", 1, _graph),
    Large("a second device", 1, _second_device),
    Large("case 21 batch 65,536", 6, _whole("case 21 batch 65,536", (65536, 8, 4, 4, 64), causal())),
    Large("case 21 65,536 heads", 2, _whole("case 21 65,536 heads", (1, 65536, 10, 10, 16), full())),
    Large("terms, batch 65,536", 8, _with_terms("terms, batch 65,536", (65536, 8, 4, 4, 64), _by_head)),
    Large("terms, 65,536 heads", 3, _with_terms("terms, 65,536 heads", (1, 65536, 10, 10, 16), _by_head)),
    *(
        Large(name, 2, _with_terms(name, (batch, heads, length, length, dim), terms))
        for batch, heads, length, dim in HASTY
        for kind, terms in (("softcap", _capped_long), ("alibi", _sloped))
        for name in (f"{kind}, {length} rows, head_dim {dim}",)
    ),
    *(
        Large(name, 2, _biased(name, (batch, 3, 500, length, dim), dims, spec))
        for batch, length, dim, dims, spec in (
            *((4, 1000, dim, "1hqk", full()) for dim in (64, 128)),
            (3, 1003, 64, "1hqk", causal()),
            (5, 700, 64, "11qk", causal()),
            *((2, 650, dim, "bhqk", Spec(upper=20, lower=190)) for dim in (64, 128)),
            (6, 400, 128, "b1qk", causal()),
        )
        for name in (f"a bias {dims} in bulk, batch {batch}, head_dim {dim}, {spec.form}",)
    ),
    Large("bias, dbias and dense beyond 2^31", 60, _with_terms("dbias beyond 2^31", (1, 8, 16640, 16640, 16), _by_pair)),
    Large("case 21 4,194,241 rows", 6, _long_rows("case 21 4,194,241 rows", 64 * 65535 + 1, 16)),
    Large("case 19 do beyond 2^31", 32, _far_do("case 19 do beyond 2^31", 410_923, 16, 96, 9728, 225_304)),
    Large("case 20 q beyond 2^31", 40, _whole("case 20 q beyond 2^31", (400, 4, 10496, 128, 128), full())),
)


@contextlib.contextmanager
def _forced(wanted: dict[str, configs.Config]) -> Iterator[None]:
    """Within it, ``configs.lookup`` answers with these configs for their passes."""
    original = configs.lookup

    def lookup(problem: configs.Problem, pass_: str) -> configs.Config:
        return wanted.get(pass_) or original(problem, pass_)

    configs.lookup = lookup
    try:
        yield
    finally:
        configs.lookup = original


@contextlib.contextmanager
def adding() -> Iterator[None]:
    """Within it, calls that need not be deterministic add dq up in memory on Hopper wherever the kernel can do it, in two programs:
    so each of them works on several tiles of keys."""
    originals = hopper_backward.adds, hopper_backward.ADDING
    hopper_backward.adds = lambda problem, config: True
    table = hopper_backward.ADDING.items()
    hopper_backward.ADDING = {key: tuple(dataclasses.replace(c, programs=2) for c in configs) for key, configs in table}
    try:
        yield
    finally:
        hopper_backward.adds, hopper_backward.ADDING = originals


@contextlib.contextmanager
def keeping() -> Iterator[None]:
    """Within it, backward passes on Hopper keep ds in memory wherever they can, also for problems too small to gain by it."""
    from ..backends.hopper import bwd_launch

    names = "_keeps", "fills"
    originals = [getattr(hopper_backward, name) for name in names]

    def put(functions: list[Callable[..., bool]]) -> None:
        for name, function in zip(names, functions, strict=True):
            setattr(hopper_backward, name, function)
        bwd_launch._call.cache_clear()  # the plans of a call are remembered

    put([lambda problem: not problem.bounds[3], lambda problem, heads: True])
    try:
        yield
    finally:
        put(originals)


def all_configs(backend: str, device: Device) -> Iterator[tuple[str, list[Result]]]:
    """Case 23: every legal config of the backward passes against float64, for head_dim 64, 100 and 128."""
    for dim in (64, 100, 128):
        call = random_call((1, 2, 1, 200, 300, dim, dim), device=device, dtype=torch.bfloat16, spec=causal())
        yardstick, problem = Yardstick(call), call.problem
        for m in (32, 64, 128):
            for n in (32, 64, 128):
                for warps in (2, 4, 8):
                    config = configs.Config(m, n, warps, 2)
                    wanted = {p: config for p in configs.PASSES if p != "fwd" and configs.illegal(problem, p, config) is None}
                    if wanted:
                        name = f"case 23 D {dim}, {m} x {n}, {warps} warps"
                        with _forced(wanted):
                            got = evaluate(call, backend)
                        yield name, yardstick.judge(got, name)
