"""Compilers in processes of their own, each printing a line of JSON for a kernel.

A module of tests says in ``COMMANDS`` what it wants compiled: ``{name: arguments of Python}``, what takes longest first. Those of
all modules that were chosen wait in one line, and every core takes the next one.
"""

import concurrent.futures
import itertools
import json
import os
import subprocess
import sys

# ``./dev test --every`` compiles all that the built-in rules may pick; without it a choice that covers them (CONTRIBUTING.md).
EVERY = os.environ.get("TILEWISE_TEST_EVERY", "") not in ("", "0")
CHOICE = () if EVERY else ("--covering",)
CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
PROCESSES = int(os.environ.get("TILEWISE_TEST_COMPILERS", min(CORES, 4)))

_pool = concurrent.futures.ThreadPoolExecutor(PROCESSES)
_waiting = {}  # by the arguments of a command: the future of its reports


def _run(arguments):
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, *arguments], env=environment, capture_output=True, text=True, timeout=1800, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(arguments)} failed:\n{done.stderr[-3000:]}")
    return [json.loads(line) for line in done.stdout.splitlines()]


def put_in_line(tables):
    """Start the commands of these tables: the first of each, then the second of each."""
    for row in itertools.zip_longest(*(table.values() for table in tables)):
        for command in row:
            if command is not None and command not in _waiting:
                _waiting[command] = _pool.submit(_run, command)


def reports_of(*arguments):
    """What a command printed; it is started where it was not."""
    put_in_line([{"": arguments}])
    return _waiting[arguments].result()


def give_up():
    """Nobody asks any more for what has not begun."""
    _pool.shutdown(cancel_futures=True)
