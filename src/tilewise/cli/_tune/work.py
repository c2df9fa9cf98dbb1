"""Check every candidate against float64, then time those that are right, in turn."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from ...backends import forget, module_of
from ...configs import records
from ...problem import Problem
from ...spec import Spec
from ...testing.calls import Call, evaluate, random_call
from ...testing.poison import poison
from ...testing.tolerance import Yardstick
from .candidates import Candidate, candidates, picked

__all__ = ["Measured", "Progress", "Tuning", "best_of", "small_calls", "tune_kernel"]

ROUNDS = 2
REST = 0.1  # seconds before every timing: a card that is limited by its power slows down under load
LEAST_GAIN = 0.02  # below it a record is not worth keeping

Timer = Callable[[Callable[[], None]], float]
Progress = Callable[[str], None]  # told of every step


@dataclass
class Measured:
    """A candidate that was looked at. ``wrong`` says how its result is wrong, ``failed`` why it did not run; ``ms`` is its best
    median."""

    config: Any
    wrong: str = ""
    failed: str = ""
    ms: float = float("inf")


@dataclass
class Tuning:
    """One kernel for one problem: what was legal, what was wrong, what was timed."""

    problem: Problem
    backend: str
    kernel: str
    now: Any
    origin: str
    illegal: int = 0
    measured: list[Measured] = field(default_factory=list)
    complete: bool = True

    @property
    def present(self) -> Measured:
        return next(m for m in self.measured if m.config == self.now)

    @property
    def best(self) -> Measured:
        return min(self.measured, key=lambda m: m.ms)

    @property
    def gain(self) -> float:
        """How much faster than the present choice; infinite if that is wrong, 0 if nothing was timed."""
        if self.best.ms == float("inf"):
            return 0.0
        return self.present.ms / self.best.ms - 1

    @property
    def pays(self) -> bool:
        return self.best.config != self.now and self.gain >= LEAST_GAIN


def _near(bound: int | None, most: int) -> int | None:
    return None if bound is None else max(-most, min(most, bound))


def small_calls(problem: Problem, device: torch.device | str) -> list[Call]:
    """Small calls of the same kind: whole tiles, then ragged lengths both ways; bounds come nearer, so that they still matter."""
    p = problem
    on_gpu = torch.device(device).type == "cuda"
    shapes = [(512, 512), (333, 500), (500, 333)] if on_gpu else [(64, 64), (40, 72)]
    most = 100 if on_gpu else 20
    spec: Spec = dataclasses.replace(p.spec, upper=_near(p.spec.upper, most), lower=_near(p.spec.lower, most))
    group = min(p.group, 8)
    dtype = getattr(torch, p.dtype)
    precision = p.precision if p.precision != "ieee" else None
    scale = None if p.sm_scale == p.head_dim**-0.5 else p.sm_scale
    return [
        random_call(
            (1, group, 1, n_q, n_k, p.head_dim, p.head_dim_v),
            device=device,
            dtype=dtype,
            seed=seed,
            spec=spec,
            sm_scale=scale,
            precision=precision,
        )
        for seed, (n_q, n_k) in enumerate(shapes)
    ]


@contextmanager
def _on_trial(backend: str, kernel: str, config: Any) -> Iterator[None]:
    """Within it calls of this backend take this config."""
    with records.trying(backend, kernel, config):
        forget()
        try:
            yield
        finally:
            forget()


def _is_used(problem: Problem, backend: str, kernel: str, config: Any) -> bool:
    return picked(problem, backend, kernel)[0] == config


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:200]}"


def _judged(backend: str, kernel: str, config: Any, checks: list[Yardstick]) -> tuple[str, str]:
    """How the results of a config on the small calls are wrong, and why it did not run; both empty if all is well."""
    used = 0
    with _on_trial(backend, kernel, config):
        for check in checks:
            call = check.call if kernel != "fwd" else check.call.replace(do=None, dlse=None)
            if not _is_used(call.problem, backend, kernel, config):
                continue
            used += 1
            try:
                with poison():
                    got = evaluate(call, backend)
            except Exception as error:  # a candidate that does not compile is one line, not the end
                return "", _first_line(error)
            shape = f"{call.q.shape[2]}x{call.k.shape[2]}"
            bad = [r for r in check.judge(got, shape) if not r.ok and r.output in got]
            if bad:
                return str(bad[0]), ""
    return "", "" if used else "it is not legal on any small problem, so that it cannot be checked"


def _timed(problem: Problem, kernel: str, backend: str, device: torch.device | str) -> tuple[Problem, Callable[[], None]]:
    """The problem as a call binds it, and one run of this kernel on tensors of its size."""
    p = problem
    dtype = getattr(torch, p.dtype)

    def make(heads: int, rows: int, columns: int) -> torch.Tensor:
        return torch.randn((p.batch, heads, rows, columns), device=device).to(dtype)

    q, k = make(p.heads_q, p.seqlen_q, p.head_dim), make(p.heads_kv, p.seqlen_k, p.head_dim)
    v, do = make(p.heads_kv, p.seqlen_k, p.head_dim_v), make(p.heads_q, p.seqlen_q, p.head_dim_v)
    # The kernels that a record chooses are those of deterministic passes.
    spec = dataclasses.replace(p.spec, deterministic=True) if backend == "hopper" else p.spec
    bound = Problem.bind(q, k, v, spec, p.sm_scale, None if p.precision == "ieee" else p.precision, p.grad, (do,))
    module = module_of(backend)
    o, lse = torch.empty_like(do), torch.empty((p.batch, p.heads_q, p.seqlen_q), device=device)
    if kernel == "fwd":
        return bound, lambda: module.forward(bound, q, k, v, o, lse)
    module.forward(bound, q, k, v, o, lse)
    wanted = {"bwd": "qkv", "dkdv": "kv", "dk": "k", "dv": "v", "dq": "q"}[kernel]
    dq, dk, dv = (torch.empty_like(t) if letter in wanted else None for letter, t in (("q", q), ("k", k), ("v", v)))
    return bound, lambda: module.backward(bound, do, None, q, k, v, o, lse, dq, dk, dv)


def best_of(run: Callable[[], None]) -> float:
    """The median of one timing, in milliseconds."""
    from triton.testing import do_bench

    return float(do_bench(run, warmup=10, rep=40, return_mode="median"))  # type: ignore[arg-type]


def tune_kernel(
    problem: Problem,
    backend: str,
    kernel: str,
    device: torch.device | str,
    checks: list[Yardstick],
    judged: dict[tuple[Any, ...], tuple[str, str]],
    timer: Timer = best_of,
    progress: Progress = lambda text: None,
    until: float = float("inf"),
    rest: float = REST,
) -> Tuning:
    """Check and time the candidates of one kernel. ``judged``: verdicts by config, which problems of one kind share.

    ``until``: when to stop, as ``time.monotonic`` counts; what was not looked at by then is left out, ``complete`` says so.
    """
    now, origin = picked(problem, backend, kernel)
    found: list[Candidate] = candidates(problem, backend, kernel)
    out = Tuning(problem, backend, kernel, now, origin, sum(c.why is not None for c in found))
    for each in found:
        if each.why is not None:
            continue
        if time.monotonic() > until and out.measured:
            out.complete = False
            break
        key = (problem.dtype, problem.head_dim, problem.head_dim_v, problem.group, str(problem.spec), backend, kernel, each.config)
        if key not in judged:
            judged[key] = _judged(backend, kernel, each.config, checks)
        out.measured.append(Measured(each.config, *judged[key]))
        progress("checked")
    timed = [m for m in out.measured if not m.wrong and not m.failed]
    if not timed:
        return out
    try:
        bound, run = _timed(problem, kernel, backend, device)
    except torch.OutOfMemoryError as error:
        for m in timed:
            m.failed = _first_line(error)
        return out
    for turn in range(ROUNDS):
        for m in timed:
            if time.monotonic() > until and turn:
                out.complete = False
                return out
            with _on_trial(backend, kernel, m.config):
                if not _is_used(bound, backend, kernel, m.config):
                    continue
                if rest:
                    time.sleep(rest)
                try:
                    m.ms = min(m.ms, timer(run))
                except Exception as error:
                    m.failed, m.ms = _first_line(error), float("inf")
            progress("timed")
    return out
