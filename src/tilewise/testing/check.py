"""``check``: the gauntlet, the cases and random problems, on every backend that this machine accepts, against float64."""

from __future__ import annotations

import dataclasses
import itertools
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch

from ..arch import arch_of
from ..capabilities import CAPABILITIES, Capability, refuse
from ..configs.hopper_backward import ADDING, takes_adding
from ..select import capability
from ..spec import ALIGNMENTS, Spec, causal
from .calls import Call, fit, random_call
from .cases import CASES, REJECTED, Case, Rejected, run_case, run_rejected
from .gauntlet import GAUNTLET, Entry, laid_out, run_call
from .gauntlet import entry as entry_of
from .large import LARGE, adding, all_configs, busy, free_gib, keeping
from .second import SECOND_ENTRIES, run_second, second_call
from .tangents import JVP_ENTRIES, run_jvp
from .terms import draw_terms
from .tolerance import Result

__all__ = ["Job", "Row", "accepted", "check", "jobs", "random_problem"]

DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
LENGTHS = (1, 15, 16, 17, 63, 64, 65, 127, 128, 129, 255, 256, 257)
HEAD_DIMS = (1, 3, 16, 20, 32, 64, 72, 80, 96, 100, 128, 160, 192, 256, 320, 384, 512)
HEADS = ((1, 1), (2, 2), (2, 1), (4, 2), (6, 2), (3, 1), (5, 1))
_BIASES = ("bias:1hqk", "bias:bhqk:-inf", "bias:b1qk", "bias:11qk:-inf", "bias:bhqk")  # as many as no dtypes divide
REFUSED = "the capability table refuses it"
_PASS = {
    **{"t_o": "jvp", "t_lse": "jvp", "o": "forward", "lse": "forward"},
    **dict.fromkeys(("dq", "dk", "dv", "dbias", "dslopes", "dsink"), "backward"),
}


@dataclass(frozen=True)
class Row:
    """One line of the table: the output of a pass that comes nearest to its bound, or that failed.

    ``seconds`` is the time of the whole job (all its passes). A row with ``skipped`` says which hardware was missing, or that the
    capability table refuses the input for this backend.
    """

    backend: str
    dtype: str
    name: str
    pass_: str
    output: str
    error: float
    bound: float
    ok: bool
    seconds: float
    where: str = ""
    skipped: str = ""


@dataclass(frozen=True)
class Job:
    """One piece of work on one backend; ``run`` gives the results, ``gib`` is the GPU memory that it needs."""

    backend: str
    dtype: str
    name: str
    run: Callable[[], list[Result]]
    gib: float = 0.0
    devices: int = 1

    def rows(self, device: torch.device) -> list[Row]:
        """Do it. A crash is a failed row and not the end of the check."""

        def row(pass_: str, r: Result, skipped: str = "") -> Row:
            return Row(self.backend, self.dtype, r.name, pass_, r.output, r.error, r.bound, r.ok, seconds, r.where, skipped)

        seconds = 0.0
        nothing = Result(self.name, "", 0.0, 0.0, True)
        if device.type == "cuda" and self.gib > free_gib(device):
            return [row("", nothing, f"it needs {self.gib:.0f} GiB of GPU memory, {free_gib(device):.1f} are free")]
        if self.devices > 1 and torch.cuda.device_count() < self.devices:
            return [row("", nothing, f"it needs {self.devices} GPUs, {torch.cuda.device_count()} are here")]
        start = time.perf_counter()
        try:
            results = self.run()
        except Exception as error:
            seconds = time.perf_counter() - start
            text = f"{type(error).__name__}: {error}"
            return [row("", Result(self.name, "raises", float("inf"), 0.0, False, text))]
        seconds = time.perf_counter() - start
        if not results:
            return [row("", nothing, REFUSED)]
        passes: dict[str, list[Result]] = {}
        for r in results:
            passes.setdefault(_PASS.get(r.output, r.output), []).append(r)
        worst = {pass_: max(group, key=lambda r: r.used) for pass_, group in passes.items()}
        return [row(pass_, dataclasses.replace(r, name=self.name)) for pass_, r in worst.items()]


def default_device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def accepted(device: torch.device | str, dtype: torch.dtype) -> list[Capability]:
    """The rows of the capability table that take plain problems of this dtype on this device, at least forward."""

    def takes(c: Capability) -> bool:
        tensor = torch.empty(1, 1, 1, c.head_dims[0][0] if c.head_dims else 16, device=device, dtype=dtype)
        return not refuse(c, Call(tensor, tensor, tensor).problem)

    return [c for c in CAPABILITIES if takes(c)]


def random_problem(
    rng: random.Random, small: bool, pairs: tuple[tuple[int, int], ...] | None = None
) -> tuple[tuple[int, int, int, int, int, int, int], dict[str, object]]:
    """Shape and arguments of ``random_call``: lengths at the edges of tiles, groups, both corners, windows, odd head dims.

    ``pairs``: the head_dim and head_dim_v to draw from, instead of any two sizes.
    """
    lengths = [n for n in LENGTHS if n < 255] if small else LENGTHS
    heads_q, heads_kv = rng.choice(HEADS[:4] if small else HEADS)
    head_dim = rng.choice(HEAD_DIMS)
    head_dim_v = rng.choice(HEAD_DIMS) if rng.random() < 0.3 else head_dim
    if pairs is not None:
        head_dim, head_dim_v = rng.choice(pairs)
    shape = (1 if small else rng.choice((1, 2)), heads_q, heads_kv, rng.choice(lengths), rng.choice(lengths), head_dim, head_dim_v)
    align = rng.choice(ALIGNMENTS)
    reach = (None, 0, 1, 7, 31, 64, 100)
    spec = rng.choice((Spec(), causal(align), Spec(rng.choice(reach), rng.choice(reach), align), Spec(0, rng.choice(reach), align)))
    arguments: dict[str, object] = {
        "spec": spec,
        "sm_scale": rng.choice((None, None, None, 0.37, -0.2)),
        "dlse": rng.random() < 0.4,
        "amplitude": rng.choice((1.0, 1.0, 2.0)),
        "seed": rng.randrange(2**31),
    }
    return shape, arguments


def _run_fitting(build: Callable[[], Call], backend: str, name: str) -> list[Result]:
    call = fit(build(), backend)
    return [] if call is None else run_call(call, backend, name)


def _run_adding(build: Callable[[], Call], backend: str, name: str) -> list[Result]:
    """A call that need not be deterministic, by the kernel that adds dq up in memory; nothing where that kernel cannot do it."""
    with adding():
        call = fit(build().replace(deterministic=False), backend)
        return [] if call is None or not takes_adding(call.problem) else run_call(call, backend, name)


def _run_keeping(build: Callable[[], Call], backend: str, name: str) -> list[Result]:
    """A call whose backward pass keeps ds in memory."""
    with keeping():
        call = fit(build().replace(deterministic=True), backend)
        return [] if call is None else run_call(call, backend, name)


def _keeping_jobs(c: Capability, dtype: torch.dtype, entries: list[Entry], device: torch.device, seed: int) -> list[Job]:
    """Named inputs without a lower bound once more, with ds kept in memory, which only longer problems would do."""
    out = []
    for entry in entries:
        if not (entry.terms or entry.returns or entry.gpu_gib or entry.spec.terms or entry.spec.lower is not None):
            name = f"{entry.name}, ds kept"
            work = partial(_run_keeping, partial(entry.build, device, dtype, seed), c.backend, name)
            out.append(Job(c.backend, _name(dtype), name, work))
    return out


def _with_bias(build: Callable[[], Call], words: str, seed: int) -> Call:
    """A call with a bias besides, in the dtype of q and with rows that a bulk copy can reach."""
    call = build()
    shape = (*call.q.shape[:2], call.k.shape[1], call.q.shape[2], call.k.shape[2])
    spec = call.spec & draw_terms(words, shape, call.q.device, call.q.dtype, seed)
    return laid_out(call.replace(spec=spec), ["bias"], "in_bulk")


def _bias_jobs(
    c: Capability, dims: tuple[int, ...], dtypes: list[torch.dtype], device: torch.device, seed: int, randoms: int
) -> list[Job]:
    """Named inputs and random ones of bounds alone once more with a bias, for a backend that takes it in bulk only."""
    drawn: list[tuple[int, str, Callable[..., Call]]] = []  # the number says which dtype and which bias it gets
    plain = [e for e in GAUNTLET if not (e.terms or e.returns or e.gpu_gib or e.spec.terms)]
    for first, dim in enumerate(dims):  # another dtype at the next head_dim
        entries = [entry.at_head_dims(dim, dim) for entry in plain]
        drawn += [(i, entry.name, partial(entry.build, seed=seed)) for i, entry in enumerate(entries, first)]
    rng = random.Random(seed + 2)
    for i in range(randoms):
        shape, arguments = random_problem(rng, False, tuple((dim, dim) for dim in dims))
        drawn.append((i, _random_name(shape, arguments), partial(random_call, shape, **arguments)))
    out = []
    for i, name, build in drawn:
        dtype, words = dtypes[i % len(dtypes)], _BIASES[i % len(_BIASES)]
        made = partial(_with_bias, partial(build, device=device, dtype=dtype), words, seed)
        out.append(Job(c.backend, _name(dtype), f"{name}, {words}", partial(_run_fitting, made, c.backend, f"{name}, {words}")))
    return out


def _random_name(shape: tuple[int, ...], arguments: dict[str, object]) -> str:
    batch, heads_q, heads_kv, seqlen_q, seqlen_k, head_dim, head_dim_v = shape
    scale = "" if arguments["sm_scale"] is None else f" scale={arguments['sm_scale']}"
    return f"random {batch}x{heads_q}/{heads_kv} {seqlen_q}x{seqlen_k} D={head_dim}/{head_dim_v} {arguments['spec']}{scale}"


def _adding_jobs(c: Capability, dtypes: list[torch.dtype], device: torch.device, seed: int, randoms: int) -> list[Job]:
    """Named inputs and random ones without a lower bound, which that kernel does not know, once more in the other mode."""
    drawn: list[tuple[str, torch.dtype, Callable[[], Call]]] = []
    dims = sorted({dim for dim, _ in ADDING})
    for dtype, dim, entry in itertools.product(dtypes, dims, GAUNTLET):
        if not (entry.terms or entry.returns or entry.gpu_gib or entry.spec.terms):
            at = dataclasses.replace(entry.at_head_dims(dim, dim), spec=dataclasses.replace(entry.spec, lower=None))
            drawn.append((at.name, dtype, partial(at.build, device, dtype, seed)))
    rng = random.Random(seed + 1)
    for i in range(randoms):
        dtype = dtypes[i % len(dtypes)]
        shape, arguments = random_problem(rng, False, tuple((dim, dim) for dim in dims))
        spec = arguments["spec"]
        if isinstance(spec, Spec):
            arguments["spec"] = dataclasses.replace(spec, lower=None)
        drawn.append((_random_name(shape, arguments), dtype, partial(random_call, shape, device=device, dtype=dtype, **arguments)))
    return [
        Job(c.backend, _name(dtype), f"{name}, dq added up", partial(_run_adding, build, c.backend, f"{name}, dq added up"))
        for name, dtype, build in drawn
    ]


def _tf32_call(name: str, device: torch.device, seed: int) -> Call:
    return entry_of(name).build(device, torch.float32, seed).replace(precision="tf32")


def _run_tangents(entry: Entry, backend: str, device: torch.device, dtype: torch.dtype, seed: int) -> list[Result]:
    return run_jvp(entry.build(device, dtype, seed), backend, f"jvp {entry.name}", seed)


def _jvp_job(entry: Entry, backend: str, device: torch.device, dtype: torch.dtype, seed: int) -> Job:
    return Job(backend, _name(dtype), f"jvp {entry.name}", partial(_run_tangents, entry, backend, device, dtype, seed))


def _run_second(entry: Entry, backend: str, device: torch.device, dtype: torch.dtype) -> list[Result]:
    return run_second(second_call(entry, device, dtype), backend, f"second {entry.name}")


def _second_job(entry: Entry, backend: str, device: torch.device, dtype: torch.dtype) -> Job:
    return Job(backend, _name(dtype), f"second {entry.name}", partial(_run_second, entry, backend, device, dtype))


def _run_case(case: Case, backend: str, device: torch.device, dtype: torch.dtype, small: bool) -> list[Result]:
    return run_case(case, backend, device, dtype, small, lambda call: fit(call, backend))


def _random_job(c: Capability, dtype: torch.dtype, device: torch.device, rng: random.Random, small: bool) -> Job:
    shape, arguments = random_problem(rng, small, c.head_dims)
    name = _random_name(shape, arguments)
    build = partial(random_call, shape, device=device, dtype=dtype, **arguments)
    return Job(c.backend, _name(dtype), name, partial(_run_fitting, build, c.backend, name))


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def jobs(
    backends: list[str] | None = None,
    device: torch.device | str | None = None,
    quick: bool = False,
    seed: int = 0,
    randoms: int | None = None,
    configs: bool = False,
    repeats: int | None = None,
    only: str = "",
    dtype: str = "",
) -> list[Job]:
    """The work of ``check`` as a list, in order; see there. ``only``: whose name contains this; ``dtype``: of this dtype."""
    where = default_device() if device is None else torch.device(device)
    for name in backends or []:
        capability(name)
    taken = {each: accepted(where, each) for each in DTYPES}
    out: list[Job] = []
    for c in CAPABILITIES:
        all_dtypes = [each for each in DTYPES if c in taken[each]]
        if (backends and c.backend not in backends) or not all_dtypes:
            continue
        interpreted = c.interpretable and where.type == "cpu"
        dtypes = all_dtypes[:2] if quick else all_dtypes
        count = randoms if randoms is not None else (6 if interpreted else 20) * (1 if quick else 5)
        entries = [e if c.head_dims is None else e.at_head_dims(*d) for d in c.head_dims or ((0, 0),) for e in GAUNTLET]
        for each, entry in itertools.product(dtypes, entries):
            if not entry.gpu_gib or (where.type == "cuda" and not quick):
                build = partial(entry.build, where, each, seed)
                work = partial(_run_fitting, build, c.backend, entry.name)
                out.append(Job(c.backend, _name(each), entry.name, work, entry.gpu_gib))
        if c.jvp:
            out += [_jvp_job(entry, c.backend, where, each, seed) for each in dtypes for entry in JVP_ENTRIES]
        if c.backend == "torch":  # that makes the second derivatives of all
            wide = [each for each in dtypes if each in (torch.float32, torch.float64)]
            out += [_second_job(entry, c.backend, where, each) for each in wide for entry in SECOND_ENTRIES]
        if torch.float32 in dtypes and arch_of(where).kind in c.tf32_kinds:
            for name in ("ragged_full", "lse_loss"):
                work = partial(_run_fitting, partial(_tf32_call, name, where, seed), c.backend, f"{name}, tf32")
                out.append(Job(c.backend, "float32", f"{name}, tf32", work))
        if not c.always_deterministic:
            out += _adding_jobs(c, dtypes, where, seed, count)
            out += _keeping_jobs(c, dtypes[0], entries, where, seed)
        if c.bulk_bias:
            out += _bias_jobs(c, c.bulk_bias, dtypes, where, seed, count)
        small = interpreted or quick
        for case in CASES:
            for each in case.dtypes:
                if each in all_dtypes:
                    work = partial(_run_case, case, c.backend, where, each, small)
                    out.append(Job(c.backend, _name(each), str(case), work))
        out += [Job(c.backend, "float32", str(r), partial(_rejected, r, c.backend, where)) for r in REJECTED]
        rng = random.Random(seed)
        out += [_random_job(c, dtypes[i % len(dtypes)], where, rng, interpreted) for i in range(count)]
        times = (30 if where.type == "cuda" and not quick and not c.quadratic else 0) if repeats is None else repeats
        if times and torch.bfloat16 in all_dtypes:
            for dim in (64, 128, 256):
                shape = (2, 2, 1, 70, 70, dim, dim) if where.type == "cpu" else (2, 16, 2, 700, 700, dim, dim)
                name = f"{times} repeats on a busy device, D {dim}"
                out.append(Job(c.backend, "bfloat16", name, partial(busy, name, shape, times, c.backend, where), 1))
        if where.type == "cuda" and not quick and not c.quadratic and torch.bfloat16 in dtypes:
            for large in LARGE:
                devices = 2 if large.name == "a second device" else 1
                out.append(Job(c.backend, "bfloat16", large.name, partial(large.run, c.backend, where), large.gib, devices))
            if configs and c.backend == "triton":
                work = partial(_every_config, c.backend, where)
                out.append(Job(c.backend, "bfloat16", "case 23 every backward config", work))
    return [job for job in out if only in job.name and dtype in ("", job.dtype)]


def _rejected(rejected: Rejected, backend: str, device: torch.device) -> list[Result]:
    return [run_rejected(rejected, backend, device)]


def _every_config(backend: str, device: torch.device) -> list[Result]:
    return [r for _, results in all_configs(backend, device) for r in results]


def check(
    backends: list[str] | None = None,
    device: torch.device | str | None = None,
    quick: bool = False,
    seed: int = 0,
    randoms: int | None = None,
    configs: bool = False,
    repeats: int | None = None,
) -> Iterator[Row]:
    """Hold backends against float64 and yield a row for every pass of every input, as it is done.

    Args:
        backends: names; default: every backend that this machine accepts.
        device: default ``"cuda"`` if there is one, or else ``"cpu"``.
        quick: two dtypes, small cases, few random problems, nothing large.
        seed: of all inputs; a failure can be repeated with it.
        randoms: how many random problems for each backend; the default depends on how quick the backend is.
        configs: also hold every legal config of the backward passes against float64 (case 23; minutes of compilation, GPU only).
        repeats: how often one problem of each head_dim is repeated while another stream keeps the GPU busy, its bits compared.
            Default: 30 times on a GPU, unless ``quick``. On a CPU only where it is given, and nothing else runs meanwhile.

    Raises:
        InvalidInput: no backend has a given name.
    """
    where = default_device() if device is None else torch.device(device)
    for job in jobs(backends, where, quick, seed, randoms, configs, repeats):
        yield from job.rows(where)
