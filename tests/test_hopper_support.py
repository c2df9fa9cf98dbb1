"""What the ``hopper`` backend takes and refuses, and which configs are legal. Nothing here needs a GPU or Triton."""

import dataclasses

import pytest

from tilewise import BackendRefused
from tilewise.arch import ARCHS, Runtime
from tilewise.capabilities import CAPABILITIES, refuse
from tilewise.configs.hopper import CHOICES, HopperConfig, illegal, lookup, shared_memory
from tilewise.problem import Problem
from tilewise.select import choose

ROW = next(row for row in CAPABILITIES if row.backend == "hopper")


def _problem(text, triton=(3, 9)):
    return Problem.parse(text, software=Runtime(triton))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("mask", ["full", "causal", "upper:3,lower:5"])
def test_it_takes(dtype, head_dim, mask):
    assert not refuse(ROW, _problem(f"dtype={dtype} seqlen=7x300 heads=8/2 head_dim={head_dim} mask={mask} arch=sm_90"))


@pytest.mark.parametrize(
    "text, code",
    [
        ("seqlen=64 head_dim=64 arch=sm_80", "arch"),
        ("seqlen=64 head_dim=64 arch=sm_100", "arch"),
        ("seqlen=64 head_dim=64 arch=cpu", "device"),
        ("seqlen=64 head_dim=64 arch=sm_90 dtype=float32", "dtype"),
        ("seqlen=64 head_dim=96 arch=sm_90", "head_dim"),
        ("seqlen=64 head_dim=128/64 arch=sm_90", "head_dim"),
        ("seqlen=64 head_dim=64 arch=sm_90 layout=strided", "layout"),
        ("seqlen=64 head_dim=64 arch=sm_90 grad=k", "gradient"),
    ],
)
def test_it_refuses_for_one_reason(text, code):
    assert [reason.code for reason in refuse(ROW, _problem(text))] == [code]


@pytest.mark.parametrize("triton", [None, (3, 6), (3, 8)])
def test_it_refuses_an_older_triton(triton):
    assert [reason.code for reason in refuse(ROW, _problem("seqlen=64 head_dim=64 arch=sm_90", triton))] == ["triton"]


def test_training_is_refused_by_name_and_goes_elsewhere_by_auto():
    problem = _problem("seqlen=64 head_dim=64 arch=sm_90 grad=qkv")
    with pytest.raises(BackendRefused, match="a gradient of q, k, v is asked for"):
        choose(problem, "hopper")
    assert choose(problem).backend == "triton"


@pytest.mark.parametrize("head_dim", CHOICES)
def test_every_choice_is_legal(head_dim):
    problem = _problem(f"seqlen=64 head_dim={head_dim} arch=sm_90")
    assert [illegal(problem, config) for config in CHOICES[head_dim]] == [None] * len(CHOICES[head_dim])
    assert lookup(problem) == CHOICES[head_dim][0]


@pytest.mark.parametrize(
    "change, word",
    [({"block_m": 192}, "block_m"), ({"block_n": 80}, "block_n"), ({"q_slots": 4}, "q_slots"), ({"stages": 4}, "shared memory")],
)
def test_an_illegal_config_is_named(change, word):
    problem = _problem("seqlen=64 head_dim=256 arch=sm_90")
    assert word in illegal(problem, dataclasses.replace(CHOICES[256][0], **change))


def test_shared_memory_counts_queries_and_stages():
    config = HopperConfig(128, 64, 2, 1, True, False, 240, 24)
    problem = _problem("seqlen=64 head_dim=256 arch=sm_90")
    assert shared_memory(problem, config) == (128 + 2 * 2 * 64) * 256 * 2 + 1024 <= ARCHS["sm_90"].shared_memory
