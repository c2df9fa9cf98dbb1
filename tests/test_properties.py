"""Properties that hold for every exact attention, whatever computes it."""

import pytest
import torch

import tilewise
from tilewise import Spec, attention, causal, full, window
from tilewise.testing.calls import Call, evaluate, random_call
from tilewise.testing.tolerance import Yardstick, raise_if_failed

BACKENDS = ("triton", "torch", "reference")
backends = pytest.mark.parametrize("backend", BACKENDS)
SHAPE = (1, 2, 1, 66, 100, 16, 24)


@backends
@pytest.mark.parametrize("spec, at", [(full(), 37), (causal(), 37), (causal(), 90), (full(), 0), (full(), 100)])
def test_merging_the_parts_of_split_keys_equals_the_whole(backend, spec, at):
    def split(q, k, v, *, spec, sm_scale, precision):
        # The positions of the queries count from key 0 of the whole: the left part ends before them.
        left = Spec(None if spec.upper is None else spec.upper + k.shape[2] - at)
        halves = [
            attention(q, k[:, :, keys], v[:, :, keys], spec=part, return_lse=True, backend=backend)
            for keys, part in ((slice(0, at), left), (slice(at, None), spec))
        ]
        return tilewise.merge(*halves[0], *halves[1])

    call = random_call(SHAPE, spec=spec, dlse=True)
    raise_if_failed(Yardstick(call).judge(evaluate(call, split), "merged"))


@backends
def test_permuting_keys_under_no_mask_leaves_o_unchanged(backend):
    call = random_call(SHAPE, dlse=True)
    order = torch.randperm(100, generator=torch.Generator().manual_seed(1))
    got = evaluate(call.replace(k=call.k[:, :, order], v=call.v[:, :, order]), backend)
    for name in ("dk", "dv"):
        got[name] = torch.empty_like(got[name]).index_copy_(2, order, got[name])
    raise_if_failed(Yardstick(call).judge(got, "permuted"))


@backends
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_two_runs_are_bitwise_equal(backend, dtype):
    call = random_call((2, 4, 2, 66, 100, 16, 16), dtype=dtype, spec=causal(), dlse=True)
    first, again = evaluate(call, backend), evaluate(call, backend)
    assert all(torch.equal(first[name], again[name]) for name in first)


@backends
@pytest.mark.parametrize("spec", [causal(), window(20, 0)])
def test_decoding_step_equals_the_row_of_prefill(backend, spec):
    call = random_call((1, 4, 2, 70, 70, 16, 16), spec=spec).replace(do=None)
    whole = evaluate(call, backend)
    yardstick = Yardstick(call)
    for t in (0, 1, 31, 64, 69):
        step = call.replace(q=call.q[:, :, t : t + 1], k=call.k[:, :, : t + 1], v=call.v[:, :, : t + 1])
        row = evaluate(step, backend)
        got = {name: whole[name].clone() for name in ("o", "lse")}
        for name in got:
            got[name][:, :, t] = row[name][:, :, 0]
        raise_if_failed(yardstick.judge(got, f"step {t}"))


@backends
def test_heads_and_batches_are_independent(backend):
    call = random_call((2, 4, 2, 66, 70, 16, 16), spec=causal(), dlse=True)
    before = evaluate(call, backend)
    for tensor, heads in ((call.q, 2), (call.k, 1), (call.v, 1), (call.do, 2), (call.dlse, 2)):
        tensor[1] = float("nan")
        tensor[0, heads:] = float("nan")
    after = evaluate(call, backend)
    for name, heads in (("o", 2), ("lse", 2), ("dq", 2), ("dk", 1), ("dv", 1)):
        assert torch.equal(before[name][0, :heads], after[name][0, :heads]), name
        assert after[name][1].isnan().any(), name


@backends
@pytest.mark.parametrize("heads_q, heads_kv", [(6, 2), (3, 1)])
def test_groups_equal_repeated_heads(backend, heads_q, heads_kv):
    call = random_call((1, heads_q, heads_kv, 40, 70, 16, 16), spec=causal(), dlse=True)
    repeated = call.replace(**{n: getattr(call, n).repeat_interleave(heads_q // heads_kv, 1) for n in ("k", "v")})
    got = evaluate(repeated, backend)
    for name in ("dk", "dv"):
        got[name] = got[name].unflatten(1, (heads_kv, -1)).sum(2)
    raise_if_failed(Yardstick(call).judge(got, "repeated"))


@backends
@pytest.mark.parametrize("wanted", ["q", "k", "v", "qk", "kv"])
def test_a_gradient_does_not_depend_on_which_others_are_wanted(backend, wanted):
    call = random_call((1, 2, 1, 40, 50, 16, 16), spec=causal())
    everything = evaluate(call, backend)
    leaves = {n: getattr(call, n).clone().requires_grad_(n in wanted) for n in "qkv"}
    attention(*leaves.values(), causal=True, backend=backend).backward(call.do)
    for name, leaf in leaves.items():
        if name in wanted:
            assert torch.equal(leaf.grad, everything[f"d{name}"])
        else:
            assert leaf.grad is None


@backends
def test_adding_a_constant_to_every_score_shifts_lse_only(backend):
    call = random_call((1, 1, 1, 40, 50, 17, 16))
    call.q[..., 16], call.k[..., 16] = 2.0, 0.0
    base = evaluate(call, backend)
    call.k[..., 16] = 3.0
    moved: Call = call.replace(do=None)
    got = evaluate(moved, backend)
    shift = 2.0 * 3.0 * call.scale
    yardstick = Yardstick(moved)
    raise_if_failed(yardstick.judge({"o": base["o"], "lse": base["lse"] + shift}, "base"))
    raise_if_failed(yardstick.judge(got, "moved"))
