"""The Hopper backward kernels against float64, run as Python on the CPU (``gluon_on_cpu.py``), with every config that ships."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", minversion="3.9", reason="Gluon for Hopper needs Triton 3.9")

from tilewise.configs.hopper_backward import DKDV
from tilewise.testing.compile_hopper_backward import words

SCRIPT = Path(__file__).with_name("gluon_on_cpu.py")


def _lines(*command):
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, *command]
    done = subprocess.run(command, env=environment, cwd=SCRIPT.parent, capture_output=True, text=True, timeout=600, check=False)
    return [json.loads(line) for line in done.stdout.splitlines()], done.stderr


@pytest.mark.parametrize("dims", [words(dims) for dims in DKDV])
def test_every_config_makes_the_gradients(dims):
    lines, errors = _lines(SCRIPT.name, dims)
    assert len(lines) >= 12, errors[-2000:]
    assert [line for line in lines if not line["ok"]] == []


FAULTS = {
    "a product that lacks the last part": """
given = bwd_parts.inner
bwd_parts.inner = lambda a, b, *rest: given(a[:1], b[:1], *rest)
""",
    "copies that take the first columns for all parts": """
given = chunks.tma.async_load
chunks.tma.async_load = lambda desc, place, *rest: given(desc, [*place[:3], 0][: len(place)], *rest)
""",
    "a mask that hides nothing": "bwd.hidden = lambda p, *rest: p",
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_found(fault):
    script = f"""
import gluon_on_cpu
gluon_on_cpu.install()
from tilewise.backends.hopper import bwd, bwd_parts, chunks
{FAULTS[fault]}
gluon_on_cpu.CASES = gluon_on_cpu.CASES[:1]
gluon_on_cpu.compare_all(["192/128"])
"""
    lines, errors = _lines("-c", script)
    assert lines, errors[-2000:]
    assert not all(line["ok"] for line in lines)


ADDING_FAULTS = {
    "positions of columns counted from the next one": """
given = bwd_parts.allowed
bwd_parts.allowed = lambda column, *rest: given(column + 1, *rest)
""",
    "a second consumer that walks the tiles of the first": """
given = turns.Turns.own
turns.Turns.own = lambda self, turn, C: given(self, turn, 0)
""",
    "keys of the first consumer for both": """
given = bwd_add.Rows
bwd_add.Rows = lambda tiles, start: given(tiles, 0)
""",
    "dv and dk of both consumers in the rows of the first": """
given = bwd_add._write
bwd_add._write = lambda tile, acc, scale, desc, batch, head, row: given(tile, acc, scale, desc, batch, head, row // 128 * 128)
""",
}


@pytest.mark.parametrize("fault", ADDING_FAULTS)
def test_a_fault_of_the_kernel_that_adds_is_found(fault):
    """Causal, several tiles of keys a program."""
    script = f"""
import gluon_on_cpu
gluon_on_cpu.install()
from tilewise.backends.hopper import bwd_add, bwd_parts, turns
from tilewise.configs.hopper_backward import ADDING
{ADDING_FAULTS[fault]}
found = gluon_on_cpu.errors((128, 128), (1, 2, 1, 200, 500), "causal", "bfloat16", ADDING[128, True][0], 2)
print(str(all(error < gluon_on_cpu.LIMITS["bfloat16"] for error in found.values())).lower())
"""
    right = script.replace(ADDING_FAULTS[fault], "")
    assert [_lines("-c", text)[0] for text in (right, script)] == [[True], [False]]
