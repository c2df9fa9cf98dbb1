"""The schedule: every provider prepares on its own, then all are timed in turn, one at a time, after equal rests."""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import json
import os
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .cases import Case
from .pool import Worker, WorkerLost
from .providers import Provider, find
from .sampler import Sampler

__all__ = ["Progress", "Run", "Settings"]

_LOSSES_IN_A_ROW = 3  # a provider that crashes or hangs this often is not started again
_IMPORT_TIMEOUT = 180.0
_LEAST = 1.0  # seconds of budget for which nothing more is begun
_PREPARE_SHARE = 0.5  # of the budget: what is not prepared by then is prepared when its turn comes


@dataclass(frozen=True)
class Settings:
    """How the run is made. Times in seconds, except ``warmup`` and ``rep``, which are ``do_bench``'s milliseconds."""

    providers: tuple[str, ...]
    passes: tuple[str, ...]
    device: str
    rounds: int = 1
    rest: float = 0.2
    warmup: float = 25.0
    rep: float = 100.0
    timeout: float = 60.0
    prepare_timeout: float = 150.0
    budget: float | None = None
    env: dict[str, dict[str, str]] = field(default_factory=dict)


class Progress:
    """What the run says of itself while it works; the command line gives it a bar."""

    def phase(self, title: str, total: int) -> None:
        """A new phase of ``total`` steps begins."""

    def step(self, text: str) -> None:
        """One step is done."""


@dataclass
class _State:
    """One provider during the run."""

    provider: Provider
    worker: Worker
    facts: dict[str, Any] = field(default_factory=dict)
    final: dict[tuple[Case, str], str] = field(default_factory=dict)  # errors that are not worth another try
    losses: int = 0


class Run:
    """One benchmark run. ``document`` is what the JSON file holds, at any moment."""

    def __init__(self, cases: list[Case], settings: Settings, header: dict[str, Any], out: Path | None, progress: Progress):
        self.cases, self.settings, self.out, self.progress = cases, settings, out, progress
        self.document: dict[str, Any] = {"header": {**header, "absent": {}, "left_out": []}, "rows": []}
        self._rows: dict[tuple[Case, str, str], dict[str, Any]] = {}
        self._began = time.monotonic()
        self._logs = Path(tempfile.mkdtemp(prefix="tilewise-bench-"))
        self._states = [self._state(name) for name in settings.providers]
        self._stop = threading.Event()
        self._sampler = Sampler(None)

    def _state(self, name: str) -> _State:
        provider = find(name)
        worker = Worker(name, self.settings.device, self.settings.env.get(provider.name, {}), self._logs / f"{provider.name}.log")
        return _State(provider, worker)

    def _left(self) -> float:
        """Seconds until the budget ends."""
        budget = self.settings.budget
        return float("inf") if budget is None else budget - (time.monotonic() - self._began)

    def go(self) -> dict[str, Any]:
        """Run everything; returns the document. Workers are ended however this ends."""
        try:
            for state in self._states:
                state.worker.start()
            self._import_all()
            self._sampler.start()
            self._prepare_all()
            self._time_all()
        finally:
            self._stop.set()
            self._sampler.stop()
            for state in self._states:
                state.worker.kill()
            self._save()
            for log in self._logs.iterdir():
                log.unlink()
            self._logs.rmdir()
        return self.document

    # Preparation: all workers at once.

    def _import_all(self) -> None:
        self.progress.phase("import", len(self._states))

        def hello(state: _State) -> None:
            try:
                state.facts = state.worker.hello(min(_IMPORT_TIMEOUT, self._left()))
            except WorkerLost as lost:
                state.facts = {"error": str(lost)}
            if "error" in state.facts:
                state.worker.kill()
            self.progress.step(state.provider.name)

        self._each(self._states, hello)
        header = self.document["header"]
        header["absent"] = {s.provider.name: s.facts["error"] for s in self._states if "error" in s.facts}
        self._states = [s for s in self._states if "error" not in s.facts]
        header["providers"] = {s.provider.name: {"about": s.provider.about, **_kept(s.facts)} for s in self._states}
        if self._states:
            # The run's own Triton is the one that tilewise's kernels use; a provider with another says so in its rows.
            ours = next((s for s in self._states if s.provider.name.startswith("tilewise")), self._states[0]).facts
            header |= {"triton": ours["triton"], "ptxas": ours.get("ptxas"), "torch": ours["torch"], "cuda": ours["cuda"]}
            header["device"] = ours["device"] or header["device"]
            self._sampler = Sampler(ours["uuid"])
        self._save()

    def _prepare_all(self) -> None:
        ready = [s for s in self._states if s.provider.prepares]
        total = sum(len(self.cases) * len(self._passes(s)) for s in ready)
        self.progress.phase("prepare", total)
        share = self._left() * _PREPARE_SHARE
        until = time.monotonic() + share

        def prepare(state: _State) -> None:
            for case in self.cases:
                for pass_ in self._passes(state):
                    if self._stop.is_set() or state.losses >= _LOSSES_IN_A_ROW or time.monotonic() > until:
                        return
                    self._ask(state, {"op": "prepare"}, case, pass_, min(self.settings.prepare_timeout, self._left()))
                    self.progress.step(state.provider.name)

        self._each(ready, prepare)

    def _each(self, states: list[_State], work: Callable[[_State], None]) -> None:
        """``work`` on every state at once, each in a thread; ends the workers if this thread is interrupted."""
        with concurrent.futures.ThreadPoolExecutor(max(1, len(states))) as pool:
            jobs = [pool.submit(work, state) for state in states]
            try:
                for job in concurrent.futures.as_completed(jobs):
                    job.result()
            except BaseException:
                self._stop.set()
                for state in states:
                    state.worker.kill()
                raise

    def _passes(self, state: _State) -> list[str]:
        return [p for p in self.settings.passes if p in state.provider.passes]

    # Timing: one worker at a time.

    def _time_all(self) -> None:
        turns = [(c, p) for c in self.cases for p in self.settings.passes]
        todo = [(c, p, r, s) for i, (c, p) in enumerate(turns) for r in range(self.settings.rounds) for s in self._turn(p, i + r)]
        self.progress.phase("time", len(todo))
        for done, (case, pass_, _, state) in enumerate(todo):
            if self._left() < _LEAST or not self._measure(state, case, pass_):
                self._leave_out(todo[done:])
                return
            row = self._rows[case, pass_, state.provider.name]
            self.progress.step(f"{state.provider.name} {pass_} {_short(case)}: {_outcome(row)}")

    def _turn(self, pass_: str, offset: int) -> list[_State]:
        """Those that take part in a turn, each time another one first."""
        states = [s for s in self._states if pass_ in self._passes(s)]
        offset %= max(1, len(states))
        return states[offset:] + states[:offset]

    def _measure(self, state: _State, case: Case, pass_: str) -> bool:
        """One measurement into its row; False if the budget ended it."""
        settings = self.settings
        message = {"op": "measure", "rest": settings.rest, "warmup": settings.warmup, "rep": settings.rep}
        limit = settings.timeout + settings.rest
        reply = self._ask(state, message, case, pass_, min(limit, max(_LEAST, self._left())))
        if reply.get("late") and self._left() < _LEAST:
            return False
        row = self._row(state, case, pass_)
        row["error"] = reply.get("error")
        if row["error"] is None:
            row["samples_ms"].append(reply["ms"])
            mhz, watts = self._sampler.between(reply["began"], reply["ended"])
            row["mhz"], row["watts"], row["peak_mb"] = mhz, watts, reply["peak_mb"]
            row["max_error"] = reply["max_error"]
            row["ms"] = ms = statistics.median(row["samples_ms"])
            row["tflops"], row["gbps"] = case.flops(pass_) / ms / 1e9, case.bytes(pass_) / ms / 1e6
        else:
            row.update(ms=None, tflops=None, gbps=None)
        self._save()
        return True

    def _row(self, state: _State, case: Case, pass_: str) -> dict[str, Any]:
        key = (case, pass_, state.provider.name)
        if key not in self._rows:
            blank = dict.fromkeys(("ms", "tflops", "gbps", "peak_mb", "mhz", "watts", "error"))
            row = {"case": str(case), "pass": pass_, **dataclasses.asdict(case), "provider": state.provider.name, **blank}
            self._rows[key] = {**row, "triton": state.facts["triton"], "max_error": None, "samples_ms": []}
        return self._rows[key]

    def _ask(self, state: _State, message: dict[str, Any], case: Case, pass_: str, timeout: float) -> dict[str, Any]:
        """Ask a worker, starting it again if it was lost. Never raises: what goes wrong is the reply's ``error``."""
        key = (case, pass_)
        if key in state.final:
            return {"error": state.final[key]}
        if state.losses >= _LOSSES_IN_A_ROW:
            return {"error": f"given up after {state.losses} crashes or hangs in a row"}
        message = {**message, "case": dataclasses.asdict(case), "pass": pass_}
        try:
            if not state.worker.running:
                state.worker.start()
                facts = state.worker.hello(min(_IMPORT_TIMEOUT, max(_LEAST, self._left())))
                if "error" in facts:
                    raise WorkerLost(facts["error"], late=False)
            reply = state.worker.ask(message, timeout)
        except WorkerLost as lost:
            state.worker.kill()
            state.losses += 1
            state.final[key] = str(lost)
            return {"error": str(lost), "late": lost.late}
        state.losses = 0
        if reply.get("broken"):
            state.worker.kill()
        # Out of memory while others prepared beside it says nothing about its own turn.
        if "error" in reply and not (reply.get("memory") and message["op"] == "prepare"):
            state.final[key] = reply["error"]
        return reply

    def _leave_out(self, rest: list[tuple[Case, str, int, _State]]) -> None:
        names: dict[str, None] = {}
        for case, pass_, round_, state in rest:
            again = f" (round {round_ + 1})" if round_ else ""
            names[f"{state.provider.name} {pass_} {_short(case)}{again}"] = None
        self.document["header"]["left_out"] = list(names)
        self._save()

    def _save(self) -> None:
        """Rewrite the JSON file, whole or not at all."""
        places = {str(case): i for i, case in enumerate(self.cases)}
        order = {name: i for i, name in enumerate(s.provider.name for s in self._states)}
        rows = sorted(self._rows.values(), key=lambda r: (r["pass"] != "fwd", places[r["case"]], order[r["provider"]]))
        self.document["rows"] = rows
        if self.out is None:
            return
        partial = self.out.with_name(self.out.name + ".partial")
        with contextlib.suppress(FileNotFoundError):
            partial.unlink()
        partial.write_text(json.dumps(self.document, indent=1) + "\n")
        os.replace(partial, self.out)


def _kept(facts: dict[str, Any]) -> dict[str, Any]:
    return {name: facts[name] for name in ("version", "triton", "torch")}


def _short(case: Case) -> str:
    return f"D {case.head_dim}, N {case.seqlen_q}, {'causal' if case.causal else 'full'}"


def _outcome(row: dict[str, Any]) -> str:
    if row["error"] is not None:
        return str(row["error"])
    return f"{row['ms']:.3f} ms, {row['tflops']:.3g} TFLOP/s"
