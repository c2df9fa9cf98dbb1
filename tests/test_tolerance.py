"""The comparison accepts what is right and, above all, fails on what is wrong."""

import math

import pytest
import torch

from tilewise import alibi, causal
from tilewise.arch import ARCHS, arch_of
from tilewise.testing.calls import OUTPUTS, Call, evaluate, random_call
from tilewise.testing.poison import poison
from tilewise.testing.terms import draw_terms
from tilewise.testing.tolerance import Mismatch, Yardstick, plain, raise_if_failed, round_to_tf32

DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
# More queries than keys: rows 0..29 see nothing.
SHAPE = (2, 4, 2, 90, 60, 32, 24)


def _judged(dtype, change, precision=None):
    """The outputs that failed after ``change(call, outputs)`` spoiled what the oracle gave."""
    call = random_call(SHAPE, dtype=dtype, spec=causal(), dlse=True, precision=precision)
    got = evaluate(call.replace(precision=None), "reference")
    change(call, got)
    return {r.output: r for r in Yardstick(call).judge(got) if not r.ok}


@pytest.mark.parametrize("dtype", DTYPES)
def test_right_outputs_pass(dtype):
    assert _judged(dtype, lambda call, got: None) == {}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("output", OUTPUTS)
def test_scaled_output_fails(output, dtype):
    failed = _judged(dtype, lambda call, got: got[output].mul_(1.06))
    assert set(failed) == {output}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("output", OUTPUTS)
def test_one_element_off_fails_and_is_named(output, dtype):
    at = (1, 1, 44) if output == "lse" else (1, 1, 44, 5)

    def change(call, got):
        got[output][at] += 0.2

    failed = _judged(dtype, change)
    assert set(failed) == {output}
    assert f"{output}{list(at)} is " in failed[output].where


@pytest.mark.parametrize("output", OUTPUTS)
def test_nan_fails(output):
    def change(call, got):
        got[output][0, 0, 40] = math.nan

    assert "NaN" in _judged(torch.float32, change)[output].where


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_lse_in_base_two_fails(dtype):
    assert set(_judged(dtype, lambda call, got: got["lse"].div_(math.log(2)))) == {"lse"}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_mean_of_v_in_empty_rows_fails(dtype):
    def change(call, got):
        got["o"][:, :, :30] = call.v.repeat_interleave(2, 1).mean(2, keepdim=True)

    failed = _judged(dtype, change)
    assert set(failed) == {"o"}
    assert "exactly 0" in failed["o"].where


def test_least_number_in_an_empty_row_fails():
    for output in ("o", "dq"):

        def change(call, got, output=output):
            got[output][0, 0, 3, 1] = torch.finfo(torch.float32).tiny

        assert "exactly 0" in _judged(torch.float32, change)[output].where


def test_finite_lse_in_an_empty_row_fails():
    def change(call, got):
        got["lse"][0, 0, 0] = -1e6

    assert "infinity in the wrong place" in _judged(torch.float32, change)["lse"].where


def test_infinite_lse_in_a_row_with_keys_fails():
    def change(call, got):
        got["lse"][1, 3, -1] = -math.inf

    assert "lse[1, 3, 89] is -inf" in _judged(torch.float32, change)["lse"].where


def test_wrong_shape_and_dtype_fail():
    def shape(call, got):
        got["lse"] = got["lse"][..., None]

    def dtype(call, got):
        got["o"] = got["o"].double()

    def missing(call, got):
        del got["dk"]

    assert set(_judged(torch.float32, shape)) == {"lse"}
    assert set(_judged(torch.float32, dtype)) == {"o"}
    assert set(_judged(torch.float32, missing)) == {"dk"}


def test_error_in_one_head_below_the_maximum_fails_by_rms():
    def change(call, got):
        bound = Yardstick(call).bound["o"]
        got["o"][1, 2, 30:] += 0.9 * bound * torch.sign(torch.randn(60, 24, generator=torch.Generator().manual_seed(0)))

    failed = _judged(torch.float32, change)
    assert "RMS error of (batch, head) [1, 2]" in failed["o"].where


def test_float32_bound_is_about_one_millionth():
    call = random_call((1, 1, 1, 128, 128, 32, 32), spec=causal())
    bound = Yardstick(call).bound
    assert bound["o"] < 1.5e-5
    assert bound["lse"] < 5e-6
    assert max(bound.values()) < 5e-5


def test_tf32_products_fail_the_float32_bound_and_pass_their_own():
    call = random_call((1, 1, 1, 128, 128, 32, 32), spec=causal())
    rounded = plain(call.replace(precision="tf32"))
    assert [r.output for r in Yardstick(call).judge(rounded) if not r.ok] == list(OUTPUTS)
    raise_if_failed(Yardstick(call.replace(precision="tf32")).judge(rounded))


def test_tf32_bound_is_no_blank_cheque():
    def change(call, got):
        for name in OUTPUTS:
            got[name] *= 1.03

    assert set(_judged(torch.float32, change, precision="tf32")) == set(OUTPUTS)


def test_round_to_tf32_keeps_ten_bits_of_mantissa():
    values = torch.tensor([1.0, 1 + 2**-10, 1 + 2**-11, 1 + 3 * 2**-11, 1 + 2**-12, -(1 + 2**-11 + 2**-20), 0.0, 3.0e38])
    exact = torch.tensor([1.0, 1 + 2**-10, 1.0, 1 + 2 * 2**-10, 1.0, -(1 + 2**-10), 0.0])
    assert torch.equal(round_to_tf32(values)[:7], exact)
    assert abs(round_to_tf32(values)[7] / 3.0e38 - 1) < 2**-11


@pytest.mark.parametrize(
    "dtype, arch, wrong", [(torch.float32, "sm_90", True), (torch.bfloat16, "cpu", True), (torch.bfloat16, "sm_90", False)]
)
def test_slopes_may_be_counted_from_the_border_of_a_tile_on_hopper(monkeypatch, dtype, arch, wrong):
    """Rounded there, they move lse by no more than the slope of 64 rows is rounded."""
    monkeypatch.setattr("tilewise.testing.tolerance.arch_of", lambda device: ARCHS["sm_90"] if arch == "sm_90" else arch_of(device))
    call = random_call(SHAPE, dtype=dtype, spec=causal() & alibi(torch.full((4,), 2.0)))
    got = evaluate(call, "reference")
    assert not [r for r in Yardstick(call).judge(got) if not r.ok]
    off = 0.8 * 2.0 * 64 * 2.0**-24
    got["lse"][..., 30:] += off
    assert any(r.output == "lse" and not r.ok for r in Yardstick(call).judge(got)) is wrong
    got["lse"][..., 30:] += 3 * off
    assert any(r.output == "lse" and not r.ok for r in Yardstick(call).judge(got))


def test_plain_overflow_leaves_a_finite_bound():
    call = random_call((1, 1, 1, 20, 20, 64, 64), dtype=torch.float16, amplitude=60.0)
    assert not plain(call)["o"].isfinite().all()
    assert all(math.isfinite(b) for b in Yardstick(call).bound.values())


def test_raise_if_failed_names_every_failure():
    call = random_call((1, 1, 1, 8, 8, 4, 4))
    got = evaluate(call, "reference")
    got["o"] += 1
    got["dv"] += 1
    results = Yardstick(call).judge(got, "mine")
    with pytest.raises(Mismatch, match=r"(?s)mine o: .*mine dv: "):
        raise_if_failed(results)
    with pytest.raises(Mismatch, match="mine o"):
        results[0].raise_if_failed()
    results[1].raise_if_failed()


def test_own_function_can_be_judged():
    call = random_call(SHAPE, spec=causal(), dlse=True)

    def wrong_scale(q, k, v, *, spec, sm_scale, precision):
        import tilewise

        return tilewise.reference(q.float(), k.float(), v.float(), spec, 0.3)

    got = {n: t.float() for n, t in evaluate(call, wrong_scale).items()}
    assert all(not r.ok for r in Yardstick(call).judge(got))


def test_part_is_the_attention_of_its_heads():
    call = random_call(SHAPE, spec=causal(), dlse=True)
    whole = evaluate(call, "reference")
    part = call.part(slice(1, 2), slice(1, 2))
    assert isinstance(part, Call)
    assert part.q.shape[1] == 2
    got = evaluate(part, "reference")
    assert torch.equal(got["dq"], whole["dq"][1:2, 2:4])
    assert torch.equal(got["dk"], whole["dk"][1:2, 1:2])


@pytest.mark.parametrize("words", ["bias:1hqk:-inf softcap:2 alibi", "softcap:2 alibi bias:1hqk:-inf"])
def test_a_bias_of_minus_infinity_hides_unless_a_softcap_follows(words):
    call = random_call(SHAPE, spec=draw_terms(words, SHAPE, seed=1), dlse=True)
    call.spec.tensors.bias[..., 5, :] = float("-inf")
    got = evaluate(call, "reference")
    assert all(r.ok for r in Yardstick(call).judge(got))
    got["o"][:, :, 5] += 1e-3
    assert not all(r.ok for r in Yardstick(call).judge(got))


def test_poison_fills_what_is_allocated_and_is_put_back():
    before = torch.are_deterministic_algorithms_enabled()
    like = torch.ones(4, 3).t()
    with poison():
        made = (torch.empty(3), like.new_empty(5), torch.empty_like(like), torch.empty(3, dtype=torch.bfloat16))
    assert all(bool(t.isnan().all()) for t in made)
    assert torch.are_deterministic_algorithms_enabled() == before


def test_poison_reaches_the_outputs_of_an_operator(monkeypatch):
    from tilewise import reference as _  # noqa: F401 - the package must be there before its module is patched
    from tilewise.backends import module_of

    monkeypatch.setattr(module_of("reference"), "forward", lambda problem, q, k, v, o, lse: None)
    call = random_call((1, 1, 1, 8, 8, 16, 16)).replace(do=None)
    with poison():
        got = evaluate(call, "reference")
    assert all("NaN" in r.where for r in Yardstick(call).judge(got))
