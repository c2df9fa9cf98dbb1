"""Compile the Triton kernels of a problem's candidates beforehand, in processes that need no GPU and share Triton's cache.

A kernel that does not compile here is left to the check, which says why.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable

from ...arch import ARCHS, runtime
from ...configs import Config
from ...problem import Problem
from .candidates import candidates

__all__ = ["compile_ahead", "jobs_of"]

Job = tuple[str, str, tuple[int, ...]]  # problem, pass, config


def jobs_of(problems: list[Problem], kernels: list[str]) -> list[Job]:
    """What the candidates of these kernels need; ``problems``: the one that is timed, and small ones that are checked."""
    out: list[Job] = []
    for kernel in kernels:
        for c in candidates(problems[0], "triton", kernel):
            if c.why is None:
                sizes = (c.config.block_m, c.config.block_n, c.config.num_warps, c.config.num_stages)
                out += [(str(p), kernel, sizes) for p in problems]
    return list(dict.fromkeys(out))


def compile_ahead(
    jobs: list[Job], arch: str, step: Callable[[str], None] = lambda text: None, until: float = float("inf"), workers: int = 0
) -> int:
    """Compile these in processes of their own; how many compiled. Those still at work at ``until`` are stopped."""
    if arch not in ARCHS or ARCHS[arch].kind == "cpu" or runtime().interpret:
        return 0
    count = min(len(jobs), workers or max(1, min(16, (os.cpu_count() or 2) - 1)))
    done: list[str] = []

    def follow(process: subprocess.Popen[str], share: list[Job]) -> None:
        if process.stdin is None or process.stdout is None:
            return
        with process.stdin as jobs_in:
            jobs_in.write(json.dumps({"arch": arch, "jobs": share}))
        for line in process.stdout:
            done.extend(["ok"] if line.strip() == "ok" else [])
            step("compiled")

    command = [sys.executable, "-m", __name__]
    started = [
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        for _ in range(count)
    ]
    threads = [threading.Thread(target=follow, args=(p, jobs[i::count]), daemon=True) for i, p in enumerate(started)]
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(None if until == float("inf") else max(0.0, until - time.monotonic()))
    finally:
        for process in started:
            process.kill()  # the end of those that are done; the others have run out of time
            process.wait()
    return len(done)


def main() -> None:
    """A worker: a JSON of jobs from stdin; a line for each when it is compiled."""
    from ...testing.compile_only import launches_of, use_target

    content = json.load(sys.stdin)
    use_target(content["arch"])

    def compiled(text: str, kernel: str, sizes: tuple[int, ...]) -> str:
        try:
            _, launch = launches_of(Problem.parse(text), {kernel: Config(*sizes)})[kernel]
            launch.kernel.warmup(*launch.args, grid=launch.grid, **launch.options)
        except Exception as error:
            return type(error).__name__
        return "ok"

    for job in content["jobs"]:
        print(compiled(*job), flush=True)
    os._exit(0)  # past what the compiler says at exit


if __name__ == "__main__":
    main()
