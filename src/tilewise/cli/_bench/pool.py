"""The parent's end of a worker process: start it, ask it with a time limit, end it."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

__all__ = ["Worker", "WorkerLost"]

# The package's own folder goes last, so that it shadows nothing that PYTHONPATH put there for this provider.
_BOOT = "import sys; sys.path.append(sys.argv[3]); from tilewise.cli._bench.worker import main; main(*sys.argv[1:3])"
_ROOT = Path(__file__).resolve().parents[3]


class WorkerLost(Exception):
    """The process ended or did not answer in time. It has been killed; ``late`` says which."""

    def __init__(self, message: str, late: bool):
        super().__init__(message)
        self.late = late


class Worker:
    """One provider's process. ``start`` returns at once; ``hello`` waits until its imports are done."""

    def __init__(self, name: str, device: str, env: dict[str, str], log: Path):
        self.name = name
        self._device, self._env, self._log = device, env, log
        self._process: subprocess.Popen[str] | None = None
        self._lines: queue.Queue[str | None] = queue.Queue()

    @property
    def running(self) -> bool:
        return self._process is not None

    def start(self) -> None:
        env = {**os.environ, **self._env}
        if "PYTHONPATH" in self._env and os.environ.get("PYTHONPATH"):
            env["PYTHONPATH"] = os.pathsep.join((self._env["PYTHONPATH"], os.environ["PYTHONPATH"]))
        command = [sys.executable, "-c", _BOOT, self.name, self._device, str(_ROOT)]
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, env=env, text=True, start_new_session=True
            )
        self._lines = queue.Queue()
        threading.Thread(target=_forward, args=(self._process, self._lines), daemon=True).start()

    def hello(self, timeout: float) -> dict[str, Any]:
        """What the worker says of itself when its imports are done."""
        return self._answer(timeout)

    def ask(self, message: dict[str, Any], timeout: float) -> dict[str, Any]:
        """Send one message and wait for its answer."""
        if self._process is None or self._process.stdin is None:
            raise WorkerLost("the process is not running", late=False)
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps(message) + "\n")
            self._process.stdin.flush()
        return self._answer(timeout)

    def _answer(self, timeout: float) -> dict[str, Any]:
        began = time.monotonic()
        try:
            line = self._lines.get(timeout=max(0.0, timeout))
        except queue.Empty:
            self.kill()
            raise WorkerLost(f"no answer within {time.monotonic() - began:.0f} s", late=True) from None
        if line is None:
            raise WorkerLost(self._epitaph(), late=False)
        return json.loads(line)

    def _epitaph(self) -> str:
        process, code = self._process, None
        if process is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                code = process.wait(timeout=5)
        self.kill()
        how = f"exit status {code}"
        if code is not None and code < 0:
            with contextlib.suppress(ValueError):
                how = signal.Signals(-code).name
        lines = [line.strip() for line in self._log.read_text(errors="replace").splitlines() if line.strip()]
        return f"the process ended ({how})" + (f": {lines[-1][:200]}" if lines else "")

    def kill(self) -> None:
        """End the process and all its children. Calling it again does nothing."""
        process, self._process = self._process, None
        if process is None:
            return
        with contextlib.suppress(ProcessLookupError, PermissionError):
            if hasattr(os, "killpg"):
                os.killpg(process.pid, signal.SIGKILL)
            else:
                process.kill()
        process.wait()
        for stream in (process.stdin, process.stdout):
            with contextlib.suppress(OSError, ValueError):
                if stream is not None:
                    stream.close()


def _forward(process: subprocess.Popen[str], lines: queue.Queue[str | None]) -> None:
    with contextlib.suppress(ValueError, OSError):  # the stream is closed under us when the worker is killed
        for line in process.stdout or ():
            lines.put(line)
    lines.put(None)
