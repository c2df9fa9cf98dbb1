"""The inputs that broke other libraries, on every backend that takes them here (the oracle is what they are held against)."""

import pytest
import torch

from tilewise.testing.calls import evaluate
from tilewise.testing.cases import CASES, REJECTED, run_case, run_rejected
from tilewise.testing.check import accepted
from tilewise.testing.tolerance import raise_if_failed

RUNS = [
    pytest.param(case, c.backend, dtype, id=f"{c.backend}-{case}")
    for case in CASES
    for dtype in case.dtypes
    for c in accepted("cpu", dtype)
    if c.backend != "reference"
]


@pytest.mark.parametrize("case, backend, dtype", RUNS)
def test_case(case, backend, dtype):
    raise_if_failed(run_case(case, backend, "cpu", dtype, small=True))


@pytest.mark.parametrize("backend", [c.backend for c in accepted("cpu", torch.float32)])
@pytest.mark.parametrize("rejected", REJECTED, ids=str)
def test_call_without_meaning_is_rejected(rejected, backend):
    run_rejected(rejected, backend, "cpu").raise_if_failed()


def _case(number):
    return next(c for c in CASES if c.number == number)


def test_exact_expectations_can_fail():
    for number, spoil in (
        (2, lambda got: got["lse"].fill_(-1e6)),
        (4, lambda got: got["dq"].fill_(1e-30)),
        (11, lambda got: got["o"].mul_(1.001)),
    ):
        case = _case(number)
        call = case.build("cpu", case.dtypes[0], True)[0]
        got = evaluate(call, "reference")
        assert case.exact(call, got) is None
        spoil(got)
        assert case.exact(call, got)


def test_a_repeat_that_differs_fails(monkeypatch):
    from tilewise.testing import cases

    original, count = cases.evaluate, iter(range(100))

    def drifting(call, backend):
        got = original(call, backend)
        got["dk"][0, 0, 0, 0] += 1e-7 * next(count)
        return got

    monkeypatch.setattr(cases, "evaluate", drifting)
    results = run_case(_case(26), "reference", "cpu", torch.float32, small=True)
    assert [r.output for r in results if not r.ok] == ["repeat"]
