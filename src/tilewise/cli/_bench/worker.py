"""One provider in a process of its own: JSON lines in from stdin, JSON lines out to what was stdout.

Messages: ``{"op": "prepare" | "measure", "case": {...}, "pass": "fwd" | "bwd", ...}``; each has one answer. The first line out
says what was imported, or why it could not be.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import queue
import statistics
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, TextIO

import torch

from ...arch import ptxas_version
from .cases import Case
from .providers import Provider, Tunable, find
from .truth import TOLERANCE, error_of, truth

__all__ = ["Session", "main", "median_ms"]

_CACHE_LIMIT = 8 << 30  # give memory that one measurement left in the allocator back beyond this


def median_ms(call: Callable[[], Any], device: torch.device, warmup_ms: float, rep_ms: float) -> float:
    """Median time of one call in milliseconds: Triton's ``do_bench`` on a GPU, repeated calls by the wall clock elsewhere."""
    if device.type == "cuda":
        from triton.testing import do_bench

        median: Any = do_bench(call, warmup=int(warmup_ms), rep=int(rep_ms), return_mode="median")
        return median
    until = time.perf_counter() + warmup_ms / 1e3
    call()
    while time.perf_counter() < until:
        call()
    times: list[float] = []
    while len(times) < 3 or sum(times) < rep_ms / 1e3:
        began = time.perf_counter()
        call()
        times.append(time.perf_counter() - began)
    return statistics.median(times) * 1e3


class Session:
    """A provider, its device, and the tensors of the case in hand."""

    def __init__(self, provider: Provider, device: str):
        self.provider = provider
        self.device = torch.device(device)
        loaded = provider.load()
        self.make, self.version = loaded.make, loaded.version
        self._case: Case | None = None
        self._tensors: tuple[torch.Tensor, ...] = ()
        self._right: dict[tuple[Case, str], float] = {}  # what this process has checked, with its error

    def hello(self) -> dict[str, Any]:
        """What works here, for the header and the rows."""
        try:
            import triton

            triton_version = triton.__version__
        except ImportError:
            triton_version = None
        cuda = self.device.type == "cuda"
        uuid = getattr(torch.cuda.get_device_properties(0), "uuid", None) if cuda else None
        return {
            "version": self.version,
            "triton": triton_version,
            "ptxas": ptxas_version(self.device),
            "torch": torch.__version__,
            "cuda": torch.version.cuda or torch.version.hip,
            "device": torch.cuda.get_device_name(0) if cuda else None,
            "uuid": str(uuid) if uuid else None,
        }

    def synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def release(self, collect: bool = False) -> None:
        """Give cached memory back to the device; ``collect`` what an exception's frames may still hold."""
        if collect:
            gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def _inputs(self, case: Case) -> tuple[torch.Tensor, ...]:
        """q, k, v and do of a case in the provider's layout: made once, kept until the next case."""
        if self._case != case:
            self._case, self._tensors = None, ()
            self.release()
            generator = torch.Generator(self.device).manual_seed(0)
            shapes = [
                (case.heads_q, case.seqlen_q, case.head_dim),
                (case.heads_kv, case.seqlen_k, case.head_dim),
                (case.heads_kv, case.seqlen_k, case.head_dim_v),
                (case.heads_q, case.seqlen_q, case.head_dim_v),
            ]
            dtype = getattr(torch, case.dtype)
            drawn = [torch.randn((case.batch, *s), generator=generator, device=self.device).to(dtype) for s in shapes]
            self._tensors = tuple(self._turn(t).contiguous() for t in drawn)
            self._case = case
        return self._tensors

    def _turn(self, t: torch.Tensor) -> torch.Tensor:
        """Between (batch, heads, seqlen, head_dim) and the provider's layout; its own inverse."""
        return t.transpose(1, 2) if self.provider.layout == "bshd" else t

    def _bind(self, case: Case, pass_: str, tune: bool) -> Callable[[], tuple[torch.Tensor, ...]] | None:
        """The call that is timed; its outputs are (o,) or (dq, dk, dv). None: only compiled, it is tuned later."""
        q, k, v, do = self._inputs(case)
        if pass_ == "bwd":
            q, k, v = (t.detach().requires_grad_() for t in (q, k, v))
        attend = self.make(case, q, k, v)
        if isinstance(attend, Tunable):
            if not tune:
                attend.compile()
                return None
            attend.tune()
        if pass_ == "fwd":
            return lambda: (attend(),)
        o = attend()
        if not o.requires_grad:
            raise NotImplementedError("it has no backward pass here")
        return lambda: torch.autograd.grad(o, (q, k, v), do, retain_graph=True)

    def _check(self, case: Case, pass_: str, call: Callable[[], tuple[torch.Tensor, ...]]) -> float:
        """Call once and hold the outputs against float64 on sampled rows; the largest error."""
        q, k, v, do = (self._turn(t) for t in self._inputs(case))
        # NaN in the blocks that the outputs are likely to get: an element that is never written is then never right.
        stale = [torch.full_like(t, float("nan")) for t in ((do,) if pass_ == "fwd" else (q, k, v))]
        del stale
        names = ("o",) if pass_ == "fwd" else ("dq", "dk", "dv")
        got: dict[str, torch.Tensor] = dict(zip(names, (self._turn(t) for t in call()), strict=True))
        worst = 0.0
        for name, (rows, expected) in truth(case, q, k, v, None if pass_ == "fwd" else do).items():
            error = error_of(got[name], rows, expected)
            if not error <= TOLERANCE[case.dtype]:
                accepted = TOLERANCE[case.dtype]
                raise ArithmeticError(f"wrong {name}: error {error:.2g} on sampled rows, at most {accepted:.2g} accepted")
            worst = max(worst, error)
        return worst

    def _checked(self, case: Case, pass_: str, tune: bool) -> Callable[[], tuple[torch.Tensor, ...]] | None:
        call = self._bind(case, pass_, tune)
        if call is not None and (case, pass_) not in self._right:
            self._right[case, pass_] = self._check(case, pass_, call)
        return call

    def prepare(self, case: Case, pass_: str) -> dict[str, Any]:
        """Compile, call once and check; other processes may be at work on the same device."""
        with torch.set_grad_enabled(pass_ == "bwd"):
            self._checked(case, pass_, tune=False)
            self.synchronize()
        return {}

    def measure(self, case: Case, pass_: str, rest: float, warmup: float, rep: float) -> dict[str, Any]:
        """Time one pass with the device to itself: warm call, peak memory, rest, median."""
        with torch.set_grad_enabled(pass_ == "bwd"):
            call = self._checked(case, pass_, tune=True)
            if call is None:
                raise NotImplementedError("it cannot be called")
            call()
            self.synchronize()
            peak = None
            if self.device.type == "cuda":
                torch.cuda.reset_peak_memory_stats()
                before = torch.cuda.memory_allocated()
                outputs = call()
                self.synchronize()
                peak = (torch.cuda.max_memory_allocated() - before) / 2**20
                del outputs
            time.sleep(rest)
            began = time.monotonic()
            ms = median_ms(call, self.device, warmup, rep)
            ended = time.monotonic()
        return {"ms": ms, "peak_mb": peak, "began": began, "ended": ended, "max_error": self._right[case, pass_]}

    def answer(self, message: dict[str, Any]) -> dict[str, Any]:
        """Do what a message asks; an exception becomes an ``error``, and ``broken`` if the device no longer works."""
        case, pass_ = Case(**message["case"]), message["pass"]
        reply: dict[str, Any] = {}
        try:
            if message["op"] == "prepare":
                reply = self.prepare(case, pass_)
            else:
                reply = self.measure(case, pass_, message["rest"], message["warmup"], message["rep"])
        except torch.OutOfMemoryError as error:
            reply = {"error": f"out of memory ({_first_line(error)})", "memory": True}
        except ArithmeticError as error:
            reply = {"error": str(error)}
        except Exception as error:
            reply = {"error": f"{type(error).__name__}: {_first_line(error)}"}
        try:
            self.synchronize()
            heavy = self.device.type == "cuda" and torch.cuda.memory_reserved() > _CACHE_LIMIT
            if heavy or "error" in reply:
                self.release(collect="error" in reply)
        except RuntimeError as error:
            reply = {"error": reply.get("error") or f"{type(error).__name__}: {_first_line(error)}", "broken": True}
        return reply


def _first_line(error: BaseException) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), "no message")[:240]


def _channel() -> tuple[TextIO, TextIO]:
    """Streams to the parent. What libraries and their children print to stdout goes to stderr, and they read nothing."""
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    source = os.fdopen(os.dup(0), encoding="utf-8")
    os.dup2(2, 1)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    sys.stdout = sys.stderr
    return source, out


def _listen(source: TextIO, messages: queue.Queue[dict[str, Any]]) -> None:
    for line in source:
        messages.put(json.loads(line))
    os._exit(0)  # the parent is gone, or done: leave even when a kernel hangs


def main(name: str, device: str) -> None:
    """Serve one provider until stdin ends."""
    source, out = _channel()
    messages: queue.Queue[dict[str, Any]] = queue.Queue()
    threading.Thread(target=_listen, args=(source, messages), daemon=True).start()

    def send(reply: dict[str, Any]) -> None:
        with contextlib.suppress(BrokenPipeError):
            out.write(json.dumps(reply) + "\n")
            out.flush()

    try:
        session = Session(find(name), device)
        send(session.hello())
    except Exception as error:
        send({"error": f"{type(error).__name__}: {_first_line(error)}"})
        return
    while True:
        reply = session.answer(messages.get())
        send(reply)
        if reply.get("broken"):
            os._exit(1)
