"""What ``benchmarks/sanitize.py reports`` makes of the output of compute-sanitizer."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

import tilewise

SCRIPT = Path(__file__).parents[1] / "benchmarks" / "sanitize.py"


@pytest.fixture(scope="module")
def sanitize() -> ModuleType:
    spec = importlib.util.spec_from_file_location("sanitize", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _log(*blocks: str, right: bool = True) -> str:
    lines = ["== hopper, part 0 of 1: racecheck", "========= COMPUTE-SANITIZER"]
    for block in blocks:
        lines += [*(f"========= {line}" for line in block.splitlines()), "========="]
    lines += ["hopper: 7 calls are right"] if right else []
    return "\n".join([*lines, f"========= RACECHECK SUMMARY: {len(blocks)} hazards displayed ({len(blocks)} errors, 0 warnings)"])


def _race(line: int, other: int) -> str:
    return (
        f"Error: Race reported between Read access at _fwd_kernel+0x9bc0 in fwd.py:{line}\n"
        f"    and Write access at _fwd_kernel+0xb70 in fwd.py:{other} [26 hazards]"
    )


def _def_line() -> int:
    path = Path(tilewise.__file__).parent / "backends" / "hopper" / "fwd.py"
    return path.read_text().splitlines().index("def _fwd_kernel(") + 1


def test_a_clean_log_passes(sanitize):
    assert sanitize.reports(_log()) == 0


def test_the_hand_over_of_work_to_warps_is_set_apart(sanitize, capsys):
    line = _def_line()
    assert sanitize.reports(_log(_race(line, line))) == 0
    assert "reports: 0; of Triton's hand-over: 1" in capsys.readouterr().out


def test_a_race_with_an_access_of_our_own_code_fails(sanitize, capsys):
    line = _def_line()
    assert sanitize.reports(_log(_race(line, line), _race(line - 5, line))) == 1
    assert "reports: 1; of Triton's hand-over: 1" in capsys.readouterr().out


def test_a_bad_address_fails(sanitize):
    assert sanitize.reports(_log("Invalid __global__ read of size 4 bytes\n    at _fwd_kernel+0x100 in fwd.py:200")) == 1


def test_calls_that_did_not_end_fail(sanitize):
    assert sanitize.reports(_log(right=False)) == 1


def test_errors_that_are_counted_but_not_shown_fail(sanitize):
    assert sanitize.reports(_log().replace("SUMMARY: 0", "SUMMARY: 3")) == 1
