"""Score steps and sinks: every formula by plain loops that import nothing from the package's own arithmetic."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from small_calls import close, draw

import tilewise as tw
from tilewise.capabilities import refuse
from tilewise.select import capability
from tilewise.testing.calls import evaluate, random_call
from tilewise.testing.terms import draw_terms
from tilewise.testing.tolerance import Yardstick, raise_if_failed

INF = float("inf")


def loops(q, k, v, scale, step, hidden=lambda i, j: False, sink=None):
    """Attention by loops over Python numbers. ``step(s, b, h, i, j)`` changes a score, ``sink(b, h)`` is one more logit."""
    batch, heads, n, _ = q.shape
    group = heads // k.shape[1]
    o, lse = torch.zeros(batch, heads, n, v.shape[3], dtype=torch.float64), torch.zeros(batch, heads, n, dtype=torch.float64)
    for b, h, i in itertools.product(range(batch), range(heads), range(n)):
        scores = []
        for j in range(k.shape[2]):
            s = scale * sum(float(x) * float(y) for x, y in zip(q[b, h, i], k[b, h // group, j], strict=True))
            scores.append(-INF if hidden(i, j) else step(s, b, h, i, j))
        extra = [] if sink is None else [sink(b, h)]
        top = max([*scores, *extra])
        if top == -INF:
            lse[b, h, i] = -INF
            continue
        weights = [math.exp(s - top) for s in scores]
        total = sum(weights) + sum(math.exp(s - top) for s in extra)
        lse[b, h, i] = top + math.log(total)
        for j, w in enumerate(weights):
            o[b, h, i] += w / total * v[b, h // group, j].double()
    return o, lse


SLOPES = torch.tensor([0.5, 0.03, 0.0, -0.2])
PAIRED = torch.tensor([[0.5, 0.03, 0.1, -0.2], [1.0, 0.7, 0.0, 0.25]])
LOGITS = torch.tensor([0.3, -1.0, 2.5, -INF])
Q, K, V = draw(2, 4, 5, 8, seed=1) * 4, draw(2, 2, 7, 8, seed=2), draw(2, 2, 7, 3, seed=3)
BIAS = draw(1, 4, 5, 7, seed=4) * 3
CAP = 1.5


def cap(s):
    return CAP * math.tanh(s / CAP)


# Queries 0 .. 4 stand at positions 2 .. 6 of the 7 keys.
FORMULAS = {
    "softcap": (tw.softcap(CAP), lambda s, b, h, i, j: cap(s)),
    "alibi": (tw.alibi(SLOPES), lambda s, b, h, i, j: s - float(SLOPES[h]) * abs(i + 2 - j)),
    "alibi of batches": (tw.alibi(PAIRED), lambda s, b, h, i, j: s - float(PAIRED[b, h]) * abs(i + 2 - j)),
    "alibi from the first key": (tw.alibi(SLOPES, "top_left"), lambda s, b, h, i, j: s - float(SLOPES[h]) * abs(i - j)),
    "bias": (tw.bias(BIAS), lambda s, b, h, i, j: s + float(BIAS[0, h, i, j])),
    "bias of keys": (tw.bias(BIAS[0, 0, 0]), lambda s, b, h, i, j: s + float(BIAS[0, 0, 0, j])),
    "bias of queries": (tw.bias(BIAS[0, :, :, :1]), lambda s, b, h, i, j: s + float(BIAS[0, h, i, 0])),
    "softcap, bias": (tw.softcap(CAP) & tw.bias(BIAS), lambda s, b, h, i, j: cap(s) + float(BIAS[0, h, i, j])),
    "bias, softcap": (tw.bias(BIAS) & tw.softcap(CAP), lambda s, b, h, i, j: cap(s + float(BIAS[0, h, i, j]))),
    "alibi, softcap, bias": (
        tw.alibi(SLOPES) & tw.softcap(CAP) & tw.bias(BIAS),
        lambda s, b, h, i, j: cap(s - float(SLOPES[h]) * abs(i + 2 - j)) + float(BIAS[0, h, i, j]),
    ),
}
BACKENDS = [c.backend for c in tw.CAPABILITIES if {"softcap", "alibi", "bias", "sink"} <= set(c.terms) and c.bulk_bias is None]


@pytest.fixture(params=BACKENDS)
def backend(request):
    return request.param


def judged(backend, spec, step, hidden=lambda i, j: False, sink=None, scale=0.4):
    want_o, want_lse = loops(Q, K, V, scale, step, hidden, sink)
    o, lse = tw.attention(Q, K, V, spec=spec, sm_scale=scale, return_lse=True, backend=backend)
    close(o, want_o)
    close(lse, want_lse)
    o, lse = tw.reference(Q, K, V, spec, scale)
    close(o, want_o, 1e-12)
    close(lse, want_lse, 1e-12)


@pytest.mark.parametrize("name", FORMULAS)
def test_score_steps_equal_loops(backend, name):
    judged(backend, *FORMULAS[name])


@pytest.mark.parametrize("name", ["softcap", "alibi", "bias", "alibi, softcap, bias"])
def test_score_steps_under_a_mask_and_with_a_sink_equal_loops(backend, name):
    spec, step = FORMULAS[name]
    mask = tw.causal() if spec.align == "bottom_right" else tw.causal("top_left")
    judged(backend, spec & mask & tw.sink(LOGITS), step, lambda i, j: j > i + 2, lambda b, h: float(LOGITS[h]))


@pytest.mark.parametrize("logits", [LOGITS, LOGITS[:1], draw(2, 4, seed=8), draw(2, 1, seed=9)], ids=lambda t: str(tuple(t.shape)))
def test_sinks_equal_loops(backend, logits):
    full = logits.expand(2, 4)
    judged(backend, tw.sink(logits), lambda s, *_: s, sink=lambda b, h: float(full[b, h]))


# Gradients: against the oracle's, which autograd takes of the dense formula in float64.

SHAPE = (2, 4, 2, 39, 71, 16, 16)
TERMS = [
    "softcap:1.5",
    "alibi",
    "alibi:bh",
    "sink",
    "sink:bh",
    "bias",
    "bias:bhqk",
    "bias:b1qk",
    "bias:11qk",
    "bias:qk",
    "bias:b11k",
    "bias:k",
    "bias:h1k",
    "bias:bhq1",
    "bias:b1q1",
    "bias:1h11",
    "bias:1",
    "bias:bhqk:-inf",
    "bias:q1:-inf",
    "softcap:2 bias sink",
    "bias softcap:2 sink",
    "alibi softcap:2 bias",
    "bias:b1qk:-inf alibi:bh softcap:3 sink",
    "softcap:1 alibi sink:b1",
    "alibi bias:11qk",
]
MASKS = {"full": tw.full(), "causal": tw.causal(), "window": tw.window(9, 20)}


def call_of(words, mask=None, dtype=torch.float32, bias_dtype=torch.float32, shape=SHAPE, **more):
    spec = draw_terms(words, shape, dtype=bias_dtype, seed=len(words)) & (mask or tw.full())
    return random_call(shape, dtype=dtype, spec=spec, dlse=True, **more)


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("words", TERMS)
def test_every_gradient_equals_the_oracle(backend, words, mask):
    call = call_of(words, MASKS[mask])
    raise_if_failed(Yardstick(call).judge(evaluate(call, backend), backend))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("words", ["softcap:2 bias sink", "bias:11qk alibi softcap:3", "bias:b11k:-inf"])
def test_other_dtypes(backend, words, dtype):
    for bias_dtype in {torch.float32, dtype}:
        call = call_of(words, tw.causal(), dtype, bias_dtype)
        if not refuse(capability(backend), call.problem):
            raise_if_failed(Yardstick(call).judge(evaluate(call, backend), backend))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device: an interpreted exponent is rounded twice")
@pytest.mark.parametrize("head_dim_v", [64, 72, 160])
def test_far_scores_weigh_all_columns_alike(head_dim_v):
    """What was rounded off a row's pivot is put right in every tile of columns: seen on a GPU, where exponents round once."""
    q, k = torch.zeros(1, 1, 20, 16, device="cuda"), torch.zeros(1, 1, 40, 16, device="cuda")
    v = torch.rand(1, 1, 40, head_dim_v, device="cuda") + 1
    shift = torch.linspace(-23456.7, -12345.6, 20, device="cuda")[:, None].expand(20, 40)
    o = tw.attention(q, k, v, spec=tw.bias(shift), backend="triton")
    torch.testing.assert_close(o, v.mean(2, keepdim=True).expand_as(o), rtol=2e-6, atol=0)
