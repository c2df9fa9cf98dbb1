"""Compilers in processes of their own, each printing a line of JSON for a kernel."""

import json
import os
import subprocess
import sys

# ``./dev test --every`` compiles all that the built-in rules may pick; without it a choice that covers them (CONTRIBUTING.md).
EVERY = os.environ.get("TILEWISE_TEST_EVERY", "") not in ("", "0")
CHOICE = () if EVERY else ("--covering",)


def start(*arguments):
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    return subprocess.Popen(
        [sys.executable, *arguments], env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )


def reports_of(process):
    out, errors = process.communicate(timeout=1800)
    assert process.returncode == 0, errors[-2000:]
    return [json.loads(line) for line in out.splitlines()]
