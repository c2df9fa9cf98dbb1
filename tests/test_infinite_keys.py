"""A key with an element of -inf has the weight 0, and its gradients are zeros, whatever rows past the end of the queries read.

Rows past the end read as zeros, and 0 times infinity is NaN: every length of queries here is ragged for the tiles of the kernels.
"""

from __future__ import annotations

import pytest
import torch

import tilewise as tw
from tilewise.testing.calls import evaluate, fit, random_call
from tilewise.testing.terms import draw_terms

INF = float("inf")
SMALL = (1, 4, 2, 40, 44, 16, 16)
pytestmark = pytest.mark.filterwarnings("ignore:invalid value encountered")
BACKENDS = [c.backend for c in tw.CAPABILITIES if c.backend in ("torch", "triton")]

# name: (shape, terms of the spec, mask, dtype)
CASES = {
    "plain": (SMALL, "", tw.Spec(), torch.float32),
    "causal": (SMALL, "", tw.causal(), torch.float32),
    "window": (SMALL, "", tw.window(9, 20, align="top_left"), torch.float16),
    "segment": (SMALL, "segment", tw.Spec(), torch.float32),
    "softcap": (SMALL, "softcap:2 alibi", tw.causal(), torch.float32),
    "bias": (SMALL, "bias:k sink", tw.Spec(), torch.float32),
    "bias of heads": (SMALL, "bias:h11 softcap:2 segment", tw.Spec(), torch.float32),
    "shared bias": ((4, 2, 2, 40, 44, 16, 16), "bias:1hqk", tw.Spec(), torch.float32),
    "dropout": (SMALL, "dropout:0.2", tw.Spec(), torch.float32),
    "parts": ((1, 2, 1, 97, 101, 16, 16), "", tw.Spec(), torch.float32),
    "wide, weights kept": ((1, 2, 1, 40, 44, 264, 16), "", tw.Spec(), torch.float32),
    "wide, columns shared": ((1, 2, 1, 40, 44, 264, 16), "", tw.causal(), torch.float16),
}


def drawn(shape, terms, mask, dtype):
    """Keys 3 and -2 have an element of -inf where every query has a positive one: their scores are -inf."""
    call = random_call(shape, dtype=dtype, spec=draw_terms(terms, shape, dtype=dtype) & mask, dlse=True)
    call.q[..., 0] = call.q[..., 0].abs() + 0.5
    call.k[..., [3, -2], 0] = -INF
    return call


def judge(call, backend, keys=(3, -2)):
    """Where the dense formula in float64 is finite, so is this backend, and close to it. Those of ``keys`` are zeros."""
    want, got = evaluate(call, "reference"), evaluate(call, backend)
    for name, expected in want.items():
        finite = expected.isfinite()
        assert got[name][finite].isfinite().all(), name
        torch.testing.assert_close(got[name][finite].double(), expected[finite].double(), rtol=2e-2, atol=2e-2, msg=name)
    if "softcap" not in call.spec.terms:
        assert not got["dk"][..., list(keys), :].any()
        assert not got["dv"][..., list(keys), :].any()
    return want


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("case", CASES)
def test_a_key_of_minus_infinity_has_no_weight_and_no_gradient(case, backend):
    call = fit(drawn(*CASES[case]), backend)
    want = judge(call, backend)
    assert want["dk"].isfinite().all()
    assert want["dv"].isfinite().all()


# The first 150 keys: whole tiles, which need no mask, in which no row has a maximum.
LONG = {
    "plain": ((1, 4, 2, 40, 170, 16, 16), "", tw.Spec(), torch.float32),
    "half": ((1, 4, 2, 40, 170, 16, 16), "", tw.Spec(), torch.float16),
    "causal": ((1, 4, 2, 40, 200, 16, 16), "", tw.causal(), torch.float32),
    "sink": ((1, 4, 2, 40, 170, 16, 16), "sink", tw.Spec(), torch.float32),
    "segment": ((1, 4, 2, 40, 170, 16, 16), "segment", tw.Spec(), torch.float32),
    "halves": ((1, 2, 1, 97, 200, 16, 16), "", tw.Spec(), torch.float32),
    "halves, weights kept": ((1, 2, 1, 97, 200, 264, 16), "", tw.Spec(), torch.float32),
    "wide": ((1, 2, 1, 40, 170, 264, 16), "", tw.Spec(), torch.float32),
    "all of them": ((1, 4, 2, 40, 150, 16, 16), "", tw.Spec(), torch.float32),
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("case", LONG)
def test_whole_tiles_of_such_keys(case, backend):
    call = fit(drawn(*LONG[case]), backend)
    call.k[:, :, :150, 0] = -INF
    judge(call, backend, list(range(150)))


@pytest.mark.parametrize("hidden", [False, True])
def test_forward_mode_along_the_queries_does_not_depend_on_tiles(hidden):
    """The tangent of the score meets the infinity; the weight is 0, so that nothing moves by it."""
    q, k, v = (torch.randn(1, 1, 64, 16).abs() for _ in range(3))
    k[:, :, 7, 0] = -INF
    ok = torch.ones(64, 64, dtype=torch.bool)
    ok[3, 5] = not hidden
    moved = {}
    for backend in ("torch", "reference"):
        f = lambda q, backend=backend: tw.attention(q, k, v, spec=tw.dense(ok), backend=backend)  # noqa: E731
        moved[backend] = torch.func.jvp(f, (q,), (torch.ones_like(q),))[1]
    assert moved["torch"].isfinite().all()
    torch.testing.assert_close(moved["torch"], moved["reference"], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("terms", ["", "softcap:2 segment", "bias:hqk"])
def test_it_adds_nothing_to_the_sums_of_weights(terms, backend):
    call = drawn(SMALL, terms, tw.causal(), torch.float32).replace(do=None, dlse=None, returns="column_sums")
    want, got = evaluate(call, "reference")["column_sums"], evaluate(call, backend)["column_sums"]
    assert want.isfinite().all()
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
