"""The work of ``check`` in several processes on one device: kernels compile side by side, and a crash or a hang costs one input.

Every worker builds the same list of jobs and is told the places of those that it shall do. A kernel that faults leaves its process
unable to use the GPU, and one that never ends cannot be stopped from inside: such a worker is replaced.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection, wait

import torch

from ..errors import BackendBroken
from .check import Job, Row

__all__ = ["in_processes"]

_START = 120.0  # seconds that a worker may take to import and to reach the device
_POLL = 0.2


def _usable(device: torch.device) -> bool:
    """Does the device still answer this process?"""
    if device.type == "cuda":
        try:
            torch.cuda.synchronize(device)
            torch.cuda.empty_cache()
        except RuntimeError:
            return False
    return True


def _work(channel: Connection, build: Callable[[], list[Job]], device: str) -> None:
    """The life of a worker: it gets places of jobs and answers with their rows."""
    torch.set_num_threads(1)
    where = torch.device(device)
    with contextlib.suppress(EOFError):  # nobody asks any more
        listed = build()
        channel.send(None)
        usable = True
        while usable:
            rows = listed[channel.recv()].rows(where)
            usable = _usable(where)
            channel.send((rows, usable))


class _Worker:
    """A process and what it is doing: ``place`` is that of its job."""

    def __init__(self, build: Callable[[], list[Job]], device: str):
        context = multiprocessing.get_context("spawn")
        self.channel, theirs = context.Pipe()
        self.process = context.Process(target=_work, args=(theirs, build, device), daemon=True)
        self.process.start()
        theirs.close()
        self.place: int | None = None
        self.ready = False
        self.since = time.monotonic()

    def give(self, place: int) -> None:
        self.place, self.since = place, time.monotonic()
        with contextlib.suppress(BrokenPipeError):  # it has ended: ``take`` will say so
            self.channel.send(place)

    def take(self) -> tuple[list[Row], bool] | None:
        """Its answer: rows, and whether it can go on. None: it is ready."""
        answer = self.channel.recv()
        if answer is None:
            self.ready, self.since = True, time.monotonic()
        else:
            self.place = None
        return answer

    def fault(self, limit: float) -> str:
        """What is wrong with a worker that has not answered; "" if nothing is."""
        passed = time.monotonic() - self.since
        if not self.ready:
            return f"it did not start within {_START:.0f} s" if passed > _START else ""
        return f"not done after {passed:.0f} s, and was stopped" if self.place is not None and passed > limit else ""

    def end(self) -> None:
        self.process.kill()
        self.process.join()
        self.channel.close()


def _failed(job: Job, why: str, seconds: float) -> list[Row]:
    return [Row(job.backend, job.dtype, job.name, "", "raises", float("inf"), 0.0, False, seconds, why)]


def in_processes(
    build: Callable[[], list[Job]], device: torch.device, processes: int, limit: float
) -> Iterator[tuple[Job, list[Row]]]:
    """Every job with its rows as it is done, in any order.

    Args:
        build: makes the list of jobs, the same in every process; it is sent to the workers.
        device: what they all work on.
        processes: how many workers. The first takes the inputs that need much memory, one after another, before others.
        limit: seconds that one job may take. After them its worker is killed, and the job has failed.

    Raises:
        BackendBroken: a worker does not come to its first job.
    """
    listed = build()
    apart = [i for i, job in enumerate(listed) if job.gib or job.devices > 1][::-1]
    rest = [i for i, job in enumerate(listed) if not job.gib and job.devices == 1][::-1]
    left = len(listed)
    workers = [_Worker(build, str(device)) for _ in range(min(processes, left))]
    try:
        while left:
            for i, worker in enumerate(workers):
                queue = apart if i == 0 and apart else rest
                if worker.ready and worker.place is None and queue:
                    worker.give(queue.pop())
            heard = wait([w.channel for w in workers], _POLL)
            for i, worker in enumerate(workers):
                place, fault = worker.place, worker.fault(limit)
                if worker.channel in heard:
                    try:
                        answer = worker.take()
                    except (EOFError, ConnectionError):
                        worker.process.join()
                        fault = f"its process ended with status {worker.process.exitcode}"
                    else:
                        if answer is None or place is None:
                            continue
                        left -= 1
                        yield listed[place], answer[0]
                        if answer[1]:
                            continue
                        fault = "the device does not answer it any more"
                        place = None
                if not fault:
                    continue
                if place is not None:
                    left -= 1
                    yield listed[place], _failed(listed[place], fault, time.monotonic() - worker.since)
                elif not worker.ready:
                    raise BackendBroken(f"a process of tilewise check came to no job: {fault}.")
                worker.end()
                workers[i] = _Worker(build, str(device))
    finally:
        for worker in workers:
            worker.end()
