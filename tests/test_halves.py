"""float32 operands as float16 halves in units of their rows: against float64, at the ends of the range, and with all else."""

from __future__ import annotations

import pytest
import torch
from small_calls import draw

import tilewise as tw
from tilewise.arch import ARCHS
from tilewise.backends.triton import halves_launch, wide_launch
from tilewise.configs import halves, lookup
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
    """In how many halves operands were brought."""
    found = []
    own = halves_launch.halve
    for module in (halves_launch, wide_launch):
        monkeypatch.setattr(module, "halve", lambda x, count, *sign: (found.append(count), own(x, count, *sign))[1])
    return found


def problem(words: str, arch: str = "sm_90") -> Problem:
    return Problem.parse(f"heads=4/2 head_dim=128 dtype=float32 grad=qkv {words} arch={arch}")


@pytest.mark.parametrize("count", [1, 2])
def test_halves_add_up_to_the_number(count):
    """In a row with a large number and one of all magnitudes, and in rows of one number, which has the whole range to itself."""
    edges = torch.tensor(EDGES)
    alone = torch.cat([edges, draw(1, 1, 1, 500, seed=3).float().flatten() * 10.0 ** torch.linspace(-37, 37, 500)])
    row = draw(1, 1, 1, 500, seed=4).float().flatten() * 2.0 ** -torch.linspace(0, 60, 500)
    for x in (alone[None, None, :, None], row[None, None, None, :]):
        made, units = halves_launch.halve(x, count)
        assert made.shape == (1, count, *x.shape[2:])
        assert made.dtype == torch.float16
        assert torch.equal(units, torch.exp2(units.log2().round())), "powers of two"
        total, want = (made.double().sum(1, keepdim=True) * units[..., None].double()).flatten(), x.double().flatten()
        finite = want.isfinite()
        assert torch.equal(total[~finite].nan_to_num(0.5), want[~finite].nan_to_num(0.5)), "infinity stays infinity"
        largest = x.abs().nan_to_num(0, 0).amax(-1, keepdim=True).expand(x.shape).double().flatten()[finite]
        error = (total - want)[finite].abs()
        assert (error <= 2.0 ** (-11, -23)[count - 1] * want[finite].abs() + 2.0**-39 * largest).all()


def test_a_row_of_zeros_and_one_of_infinities_have_halves_of_their_own():
    x = torch.zeros(1, 1, 3, 4)
    x[0, 0, 1], x[0, 0, 2, 1] = INF, 5.0
    made, units = halves_launch.halve(x, 2)
    assert (made[0, :, 0] == 0).all()
    assert (made[0, 0, 1] == INF).all()
    assert (made[0, 1, 1] == 0).all()
    assert (made[0, :, 2].double().sum(0) * units[0, 0, 2]).tolist() == [0.0, 5.0, 0.0, 0.0]
    assert units.isfinite().all()


def test_the_sign_of_a_negative_scale_goes_into_the_halves():
    x = draw(1, 2, 9, 5, seed=1).float()
    assert torch.equal(halves_launch.halve(x, 2, -1.0)[0], -halves_launch.halve(x, 2)[0])


@pytest.mark.parametrize("dims", [(40, 24), (272, 32)], ids=["forward", "kept weights"])
@pytest.mark.parametrize("precision", ["ieee", "tf32"])
def test_rows_that_nobody_may_see_change_no_bit(dims, precision):
    """Keys behind a mask with numbers of any magnitude in them: not even a unit of others may depend on these."""
    call = random_call((1, 2, 1, 100, 139, *dims), spec=tw.causal("top_left"), seed=8).replace(precision=precision)
    got = evaluate(call, "triton")
    for t in (call.k, call.v):
        t[:, :, 100::2] *= 1e25
        t[:, :, 101::2] *= 1e-25
    again = evaluate(call, "triton")
    for name in ("o", "lse", "dq"):
        assert torch.equal(got[name], again[name]), name
    for name in ("dk", "dv"):
        assert torch.equal(got[name][:, :, :100], again[name][:, :, :100]), name
        assert (again[name][:, :, 100:] == 0).all()


# What a pass brings into another form, where all of it is: (mask or terms, scale of q, of k, of v, of do).
RANGES = {"plain": (1, 1, 1, 1), "small v": (1, 1, 1e-30, 1e-5), "large v": (1, 1, 1e30, 1e3), "far apart": (1e15, 1e-15, 1, 1)}


@pytest.mark.parametrize("name", RANGES)
@pytest.mark.parametrize("dims", [(40, 24), (272, 32)], ids=["forward", "kept weights"])
def test_two_halves_are_as_accurate_as_ieee_products(name, dims, taken):
    call = random_call((1, 2, 1, 130, 139, *dims), spec=tw.causal(), sm_scale=-0.3, seed=5)
    for t, by in zip((call.q, call.k, call.v, call.do), RANGES[name], strict=True):
        t.mul_(by)
    got = evaluate(call, "triton")
    raise_if_failed(Yardstick(call).judge(got))
    assert taken == [2] * (3 if dims[0] == 40 else 4)


@pytest.mark.parametrize("dims", [(40, 24), (272, 32)], ids=["forward", "kept weights"])
def test_tf32_stays_within_its_bound(dims, taken):
    call = random_call((1, 4, 2, 130, 203, *dims), spec=tw.window(60, 20), seed=6).replace(precision="tf32")
    raise_if_failed(Yardstick(call).judge(evaluate(call, "triton")))
    assert taken == [1] * (3 if dims[0] == 40 else 4)


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


def _far_apart(name, dims):
    q, k, v, do = (draw(1, 1, 96, dims, seed=n).float() for n in range(4))
    if name == "huge, in other columns":
        q.zero_()[..., 0] = 1e36
        k.zero_()[..., 1] = 1e18
    elif name == "small, beside a key of -inf":
        q = q.abs() * 1e-3
        k[:, :, 7] = -INF
    elif name == "small, beside a key with an element of -inf":
        q = q.abs() * 1e-3
        k[:, :, 7] = 0.0
        k[:, :, 7, 3] = -INF
    elif name == "huge and small":
        q, k = q * 1e32, k * 1e-32
    elif name == "small and huge":
        q, k = q * 1e-32, k * 1e32
    elif name == "values in other columns":
        v.zero_()[..., 0] = 1e25
        do.zero_()[..., 1] = 1e25
    return q, k, v, do


@pytest.mark.parametrize("dims", [16, 264], ids=["forward", "kept weights"])
@pytest.mark.parametrize("precision", ["ieee", "tf32"])
@pytest.mark.parametrize(
    "name",
    [
        *("huge, in other columns", "small, beside a key of -inf", "small, beside a key with an element of -inf", "huge and small"),
        *("small and huge", "values in other columns"),
    ],
)
def test_units_that_are_far_apart(name, precision, dims):
    q, k, v, do = _far_apart(name, dims)
    found = []
    for backend, dtype in (("triton", torch.float32), ("torch", torch.float32), ("reference", torch.float64)):
        leaves = [t.to(dtype).requires_grad_() for t in (q, k, v)]
        o = tw.attention(*leaves, precision=precision if backend == "triton" else None, backend=backend)
        found.append((o, *torch.autograd.grad(o, leaves, do.to(dtype))))
    bound = 2e-5 if precision == "ieee" else 1e-2
    for got, plain, want in zip(*found, strict=True):
        ok = want.isfinite()
        assert got[ok].isfinite().all()
        if ok.any():
            error, usual = ((t[ok] - want[ok]).abs().max() for t in (got, plain))
            assert error <= bound * want[ok].abs().max() + (2 if precision == "ieee" else 2**14) * usual


def test_a_large_scale_and_small_numbers():
    q, k = (draw(1, 1, 96, 64, seed=n).float() * 1e-19 for n in (1, 2))
    v = draw(1, 1, 96, 64, seed=3).float()
    got, want = (tw.attention(q, k, v, sm_scale=1e37, backend=b) for b in ("triton", "torch"))
    assert (got - want).abs().max() < 1e-5


@pytest.mark.parametrize("precision", ["ieee", "tf32"])
@pytest.mark.parametrize("dims", [(40, 24), (272, 32)], ids=["forward", "kept weights"])
def test_a_key_of_minus_infinity_gets_no_gradient(dims, precision):
    call = random_call((1, 2, 2, 100, 130, *dims), seed=11).replace(precision=precision)
    call.q.abs_()
    call.k[:, :, 7, 3] = -INF
    got = evaluate(call, "triton")
    keep = [n for n in range(130) if n != 7]
    less = random_call((1, 2, 2, 100, 129, *dims), seed=11).replace(precision=precision)
    for name in ("k", "v"):
        getattr(less, name).copy_(getattr(call, name)[:, :, keep])
    less.q.copy_(call.q)
    less.do.copy_(call.do)
    expected = Yardstick(less).expected
    bound = 1e-5 if precision == "ieee" else 5e-3
    for name in ("dk", "dv"):
        assert (got[name][:, :, 7] == 0).all()
        assert (got[name][:, :, keep] - expected[name]).abs().max() < bound * expected[name].abs().max()


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
    for pass_ in ("fwd", "weights"):
        assert halves.halves_of(problem("seqlen=4096"), pass_) == 2
        assert halves.halves_of(problem("seqlen=4096 precision=tf32"), pass_) == 1
        assert halves.halves_of(problem("seqlen=512"), pass_) == 0
        assert halves.halves_of(problem("seqlen=4096 layout=strided"), pass_) == 0
        for arch in set(ARCHS) - {"sm_90", "cpu"}:
            assert halves.halves_of(problem("seqlen=4096", arch), pass_) == 0
    assert halves.halves_of(problem("seqlen=4096"), "dq") == 0
    assert halves.halves_of(Problem.parse("seqlen=4096 head_dim=128 dtype=bfloat16 arch=sm_90"), "fwd") == 0


@pytest.mark.parametrize("dims", [64, 72, 128, 192, 256, 512])
@pytest.mark.parametrize("precision", ["ieee", "tf32"])
def test_tiles_of_hopper_hold_all_halves(dims, precision):
    p = Problem.parse(f"heads=4 seqlen=4096 head_dim={dims} dtype=float32 precision={precision} grad=qkv arch=sm_90")
    config, columns = lookup(p, "fwd"), 1 << (dims - 1).bit_length()
    row = halves.operand_bytes(p, "fwd") * columns
    streamed = config.num_stages * config.block_n * (row + row // config.split)
    assert config.block_m * row + streamed <= ARCHS["sm_90"].shared_memory
    assert config.split == max(1, columns // 128)
    assert dims == 64 or units_kept(p) > 0
