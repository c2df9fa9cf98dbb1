"""float32 operands as bfloat16 parts, and v as columns: against float64, at the ends of the range, and together with all else."""

from __future__ import annotations

import pytest
import torch
from small_calls import draw

import tilewise as tw
from tilewise.arch import ARCHS
from tilewise.backends.triton import split_launch, wide_launch
from tilewise.configs import lookup, split
from tilewise.configs.wide import units_kept
from tilewise.problem import Problem
from tilewise.testing.calls import evaluate, random_call
from tilewise.testing.terms import draw_terms
from tilewise.testing.tolerance import Yardstick, raise_if_failed

INF = float("inf")
LARGEST = torch.finfo(torch.float32).max
EDGES = [0.0, 1.0, -1.0, 1e-30, -1e30, 3.0e38, LARGEST, -LARGEST, 1.00390625, 2**-100 * 1.9999999, INF, -INF, float("nan")]


@pytest.fixture
def taken(monkeypatch):
    """Which forms operands were brought into."""
    found = []
    for name in ("split_of", "turned_of"):
        own = getattr(split_launch, name)
        for module in (split_launch, wide_launch):
            noted = lambda *given, own=own, name=name: (found.append(name), own(*given))[1]  # noqa: E731
            monkeypatch.setattr(module, name, noted, raising=False)
    return found


def problem(words: str, arch: str = "sm_90") -> Problem:
    return Problem.parse(f"heads=4/2 head_dim=128 dtype=float32 grad=qkv {words} arch={arch}")


@pytest.mark.parametrize("parts", [2, 3])
def test_parts_add_up_to_the_number_and_each_is_a_bfloat16(parts):
    edges = torch.tensor(EDGES)
    x = torch.cat([edges, draw(1, 1, 1, 500, seed=3).float().flatten() * 10.0 ** torch.linspace(-30, 30, 500)])[None, None, :, None]
    made = split_launch.split_of(x, parts)
    assert made.shape == (1, parts, x.shape[2], 1)
    held = made.nan_to_num(0.5, 1.0, 1.0)
    assert torch.equal(held.bfloat16().float(), held)
    total, want = made.double().sum(1).flatten(), x.double().flatten()
    finite = want.isfinite()
    assert torch.equal(total[~finite].nan_to_num(0.5), want[~finite].nan_to_num(0.5)), "infinity stays infinity"
    assert ((total - want)[finite].abs() <= 2.0 ** (-8 * parts + 1) * want[finite].abs()).all()
    assert parts == 2 or torch.equal(total[finite], want[finite])


def test_the_sign_of_a_negative_scale_goes_into_the_parts():
    x = draw(1, 2, 9, 5, seed=1).float()
    assert torch.equal(split_launch.split_of(x, 3, -1.0), -split_launch.split_of(x, 3))


def test_columns_hold_every_row_in_its_place_and_zeros_after_the_last():
    x = draw(2, 3, 21, 5, seed=1).float()
    made = split_launch.turned_of(x)
    assert made.shape == (2, 3, 5, 24)
    order = [8 * (n // 8) + (0, 2, 4, 6, 1, 3, 5, 7)[n % 8] for n in range(24)]
    for place, row in enumerate(order):
        want = x[:, :, row] if row < 21 else torch.zeros(2, 3, 5)
        assert (made[..., place] - want).abs().max() <= 2.0**-11 * x.abs().max()


# What a pass brings into another form, where all of it is: (mask or terms, scale of q, of k, of v, of do).
RANGES = {"plain": (1, 1, 1, 1), "small v": (1, 1, 1e-30, 1e-5), "large v": (1, 1, 1e30, 1e3), "far apart": (1e15, 1e-15, 1, 1)}


@pytest.mark.parametrize("name", RANGES)
@pytest.mark.parametrize("dims", [(40, 24), (272, 32)], ids=["forward", "kept weights"])
def test_three_parts_are_as_accurate_as_ieee_products(name, dims, taken):
    call = random_call((1, 2, 1, 130, 139, *dims), spec=tw.causal(), sm_scale=-0.3, seed=5)
    for t, by in zip((call.q, call.k, call.v, call.do), RANGES[name], strict=True):
        t.mul_(by)
    got = evaluate(call, "triton")
    raise_if_failed(Yardstick(call).judge(got))
    assert taken == ["split_of"] * (3 if dims[0] == 40 else 4)


@pytest.mark.parametrize("dims", [(40, 24), (272, 32)], ids=["v as columns", "kept weights"])
def test_tf32_stays_within_its_bound(dims, taken):
    call = random_call((1, 4, 2, 130, 203, *dims), spec=tw.window(60, 20), seed=6).replace(precision="tf32")
    raise_if_failed(Yardstick(call).judge(evaluate(call, "triton")))
    assert taken == (["turned_of"] if dims[0] == 40 else ["split_of"] * 3)


@pytest.mark.parametrize("precision", ["ieee", "tf32"])
def test_with_everything_else(precision, taken):
    shape = (2, 4, 2, 100, 133, 40, 24)
    spec = tw.window(70, 20) & draw_terms("softcap:5 alibi:bh bias:1hqk sink segment row dropout:0.2", shape, "cpu", seed=9)
    call = random_call(shape, spec=spec, seed=7, dlse=True).replace(precision=precision)
    raise_if_failed(Yardstick(call).judge(evaluate(call, "triton")))
    assert taken


@pytest.mark.parametrize("precision", ["ieee", "tf32"])
def test_a_key_of_minus_infinity_weighs_nothing(precision):
    q, k, v = draw(1, 2, 100, 16, seed=1).float().abs(), draw(1, 2, 110, 16, seed=2).float(), draw(1, 2, 110, 16, seed=3).float()
    k[:, :, 7] = -INF
    got = tw.attention(q, k, v, backend="triton", precision=precision)
    keep = [n for n in range(110) if n != 7]
    want = tw.attention(q, k[:, :, keep], v[:, :, keep], backend="torch")
    assert (got - want).abs().max() < (1e-5 if precision == "ieee" else 5e-3)


def test_nan_is_not_lost():
    q, k, v = (draw(1, 2, 100, 16, seed=n).float() for n in (1, 2, 3))
    for t in (q, k, v):
        for precision in ("ieee", "tf32"):
            at, t[0, 1, 50, 3] = t[0, 1, 50, 3].clone(), float("nan")
            o = tw.attention(q, k, v, backend="triton", precision=precision)
            assert o[0, 1].isnan().any()
            assert not o[0, 0].isnan().any()
            t[0, 1, 50, 3] = at


def test_only_long_float32_calls_on_hopper_take_it():
    assert split.parts_of(problem("seqlen=4096"), "fwd") == 3
    assert split.parts_of(problem("seqlen=4096 precision=tf32"), "kept") == 2
    assert split.turned(problem("seqlen=4096 precision=tf32"))
    assert split.parts_of(problem("seqlen=512"), "fwd") == 1
    assert split.parts_of(problem("seqlen=4096 layout=strided"), "fwd") == 1
    assert not split.turned(problem("seqlen=4096 layout=strided precision=tf32"))
    for arch in set(ARCHS) - {"sm_90", "cpu"}:
        for pass_ in ("fwd", "weights", "kept"):
            assert split.parts_of(problem("seqlen=4096", arch), pass_) == 1
    assert split.parts_of(Problem.parse("seqlen=4096 head_dim=128 dtype=bfloat16 arch=sm_90"), "fwd") == 1


@pytest.mark.parametrize("dims", [64, 128, 256])
@pytest.mark.parametrize("precision", ["ieee", "tf32"])
def test_tiles_of_hopper_hold_all_parts(dims, precision):
    p = Problem.parse(f"heads=4 seqlen=4096 head_dim={dims} dtype=float32 precision={precision} grad=qkv arch=sm_90")
    config = lookup(p, "fwd")
    resident = config.block_m * split.operand_bytes(p, "fwd") * dims
    assert resident + config.num_stages * config.block_n * 2 * split.operand_bytes(p, "fwd") * dims <= ARCHS["sm_90"].shared_memory
    assert dims == 64 or units_kept(p) > 0
