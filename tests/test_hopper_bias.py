"""An additive bias on the ``hopper`` backend: what it takes, and its kernels against float64, run as Python on the CPU."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tilewise import bias as biased
from tilewise.arch import Runtime, runtime
from tilewise.capabilities import CAPABILITIES, refuse
from tilewise.cli.explain import _hopper_passes, work
from tilewise.configs.hopper_bias import DBIAS, DKDV, DQ, FWD, SHARED, illegal, members, shared_config, shared_memory
from tilewise.errors import InvalidInput
from tilewise.operands import Operand, parse_operand
from tilewise.problem import Problem
from tilewise.select import choose
from tilewise.spec import Tensors

ROW = next(row for row in CAPABILITIES if row.backend == "hopper")
SCRIPT = Path(__file__).with_name("bias_on_cpu.py")


def _problem(text):
    return Problem.parse(f"{text} arch=sm_90", software=Runtime((3, 9)))


# What it takes


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("mask", ["bias", "causal,bias", "upper:3,lower:9,bias"])
@pytest.mark.parametrize("dims", ["bhqk", "1hqk", "b1qk", "11qk"])
def test_it_takes_a_bias_with_an_element_for_each_score(dtype, head_dim, mask, dims):
    words = f"dtype={dtype} batch=3 heads=8/2 seqlen=300x1001 head_dim={head_dim} mask={mask} bias={dtype}:{dims}"
    for grad in ("", " grad=q", " grad=b", " grad=kv", " grad=qkvb"):
        assert choose(_problem(words + grad)).backend == "hopper"


@pytest.mark.parametrize(
    "text, code, word",
    [
        ("head_dim=64 mask=bias", "dtype", "float32"),
        ("head_dim=64 mask=bias bias=float16:1hqk", "dtype", "float16"),
        ("head_dim=64 mask=bias bias=bfloat16:1hqk:strided", "layout", "16 bytes"),
        ("head_dim=64 mask=bias bias=bfloat16:1h1k", "term", "a single query"),
        ("head_dim=64 mask=bias bias=bfloat16:1hq1", "term", "a single key"),
        ("head_dim=256 mask=bias bias=bfloat16:1hqk", "term", "at head_dim 64, 128"),
        ("head_dim=192/128 mask=bias bias=bfloat16:1hqk", "term", "at head_dim 64, 128"),
        ("head_dim=64 mask=softcap:3,bias bias=bfloat16:1hqk", "term", "beside softcap"),
        ("head_dim=64 mask=bias,segment,sink bias=bfloat16:1hqk", "term", "beside"),
    ],
)
def test_it_refuses_with_the_reason_and_auto_goes_to_triton(text, code, word):
    problem = _problem(f"seqlen=300 {text}")
    (reason,) = refuse(ROW, problem)
    assert reason.code == code
    assert word in reason.text
    assert choose(problem).backend == "triton"


def test_a_bias_is_described_with_whether_it_can_be_copied_in_bulk():
    q = torch.zeros(2, 4, 24, 64, dtype=torch.bfloat16)
    rows = torch.zeros(4, 24, 32, dtype=torch.bfloat16)
    good = (rows[..., :24], rows[..., :24].transpose(0, 1)[:, :1].transpose(0, 1), rows[..., :21], rows[0, :, :24])
    bad = (rows[..., 1:25], rows.view(-1)[: 4 * 24 * 21].view(4, 24, 21), rows[:1, :, :24].expand(4, -1, -1), rows[..., :24].mT)
    for t, bulk in [(t, True) for t in good] + [(t, False) for t in bad]:
        keys = q[:, :, : t.shape[-1]]
        problem = Problem.bind(q, keys, keys, biased(t))
        assert problem.operand("bias").bulk is bulk
        assert Problem.parse(str(problem), problem.arch, problem.runtime) == problem
    assert str(Operand("bias", "float16", "1hqk", False)) == "bias=float16:1hqk:strided"
    with pytest.raises(InvalidInput, match="dims"):
        parse_operand("bias", "float16:1hqk:wide")


def test_calls_that_differ_only_in_where_the_bias_lies_are_bound_apart():
    from tilewise.ops import bound_problem

    q = torch.zeros(1, 2, 16, 64, dtype=torch.bfloat16)
    memory = torch.zeros(2 * 16 * 16 + 8, dtype=torch.bfloat16)
    found = []
    for start in (0, 1, 8):
        spec = biased(memory[start : start + 512].view(2, 16, 16))
        found.append(bound_problem(q, q, q, str(spec), "auto", "", Tensors(bias=spec.tensors.bias))[0].operand("bias").bulk)
    assert found == [True, False, True]


# Configs


@pytest.mark.parametrize("head_dim", FWD)
def test_every_config_is_legal(head_dim):
    problem = _problem(f"batch=4 seqlen=300 head_dim={head_dim} mask=bias bias=bfloat16:1hqk grad=qkvb")
    every = [config for table in (FWD, DKDV, DQ, DBIAS, SHARED) for config in table.get(head_dim, ())]
    assert [illegal(problem, config) for config in every] == [None] * len(every)
    large = FWD[head_dim][0].__class__(256, 128, 4, 2, False, False)
    assert "shared memory" in illegal(problem, large)
    assert shared_memory(problem, large) > 232_448
    assert set(FWD) == set(DKDV) == set(DQ) == set(DBIAS) == set(ROW.bulk_bias)


@pytest.mark.parametrize(
    "text, count",
    [
        ("batch=4 heads=8 head_dim=64 bias=bfloat16:1hqk", 4),
        ("batch=2 heads=8/2 head_dim=64 bias=bfloat16:1hqk", 2),
        ("batch=4 heads=1 head_dim=64 bias=bfloat16:11qk", 4),
        ("batch=4 heads=8 head_dim=64 bias=bfloat16:11qk", 0),
        ("batch=4 heads=8 head_dim=64 bias=bfloat16:bhqk", 0),
        ("batch=5 heads=8 head_dim=64 bias=bfloat16:1hqk", 0),
        ("batch=4 heads=8 head_dim=128 bias=bfloat16:1hqk", 0),
    ],
)
def test_one_kernel_makes_dq_and_dbias_where_a_program_holds_all_that_share_the_bias(text, count):
    problem = _problem(f"{text} seqlen=300 mask=bias grad=qkvb")
    assert members(problem) == count
    assert (shared_config(problem) is not None) == (count > 1)
    assert shared_config(_problem(f"{text} seqlen=300 mask=bias grad=qkv")) is None


@pytest.mark.parametrize(
    "text, names",
    [
        ("batch=4 grad=qkvb", ["forward", "backward dk, dv", "backward dq, dbias"]),
        ("batch=9 grad=qkvb", ["forward", "backward dk, dv", "backward dq", "backward dbias"]),
        ("batch=4 grad=b", ["forward", "backward dbias"]),
    ],
)
def test_explain_names_the_kernels_of_a_bias(text, names):
    problem = _problem(f"{text} heads=8 seqlen=300 head_dim=64 mask=bias bias=bfloat16:1hqk")
    assert [each.name for each in _hopper_passes(problem)] == names
    assert [each.name for each in work(problem)] == ["forward", "backward"]


# Numbers


def _lines(*command):
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, *command]
    done = subprocess.run(command, env=environment, cwd=SCRIPT.parent, capture_output=True, text=True, timeout=600, check=False)
    return [json.loads(line) for line in done.stdout.splitlines()], done.stderr


needs_gluon = pytest.mark.skipif((runtime().triton or (0, 0)) < (3, 9), reason="Gluon for Hopper needs Triton 3.9")


@needs_gluon
@pytest.mark.parametrize("head_dim", FWD)
def test_every_config_makes_o_and_the_gradients(head_dim):
    lines, errors = _lines(SCRIPT.name, str(head_dim))
    assert len(lines) >= 14, errors[-2000:]
    assert [line for line in lines if not line["ok"]] == []


FAULTS = {
    "scores in base two, whatever they are": """
given = bias.unit_and_pivot
bias.unit_and_pivot = lambda m: (bias.gl.zeros_like(m) + bias.LOG2_E, m * bias.LOG2_E)
""",
    "the sum of a row lost beside its reference": "bias_fwd.log_sum = lambda m, l_row: l_row * 0.0",
    "a tile that is read as it lies": """
given = bias_dkdv.biased_weights
bias_dkdv.biased_weights = lambda s, b, *rest: given(s, b.mT, *rest)
""",
    "the bias of the first head for all": """
given = bias.Bias.copy
bias.Bias.copy = lambda self, desc, full, batch, head, *rest: given(self, desc, full, batch, head * 0, *rest)
""",
    "one sequence for all that share the bias": "dbias._visitor = lambda batch, head, visit, bias: (batch, head)",
    "a sum over the sequences that lacks the last": """
given = bias_shared._write
bias_shared._write = lambda total, *rest: given(total * 0.75, *rest)
""",
}


@needs_gluon
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_found(fault):
    script = f"""
import bias_on_cpu
bias_on_cpu.gluon_on_cpu.install()
from tilewise.backends.hopper import bias, bias_dkdv, bias_fwd, bias_shared, dbias
{FAULTS[fault]}
bias_on_cpu.compare_all(["64"], bias_on_cpu.CASES[:5], most=1, until_wrong=True)
"""
    lines, errors = _lines("-c", script)
    assert lines, errors[-2000:]
    assert not all(line["ok"] for line in lines)
