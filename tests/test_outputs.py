"""What attention can return besides o and lse: the largest score of each head."""

from __future__ import annotations

import pytest
import torch
from small_calls import qkv

import tilewise as tw
from tilewise.testing.calls import random_call
from tilewise.testing.terms import draw_terms

BACKENDS = ["reference", "torch", "triton"]
INF = float("inf")

# With one number for each query and key, and a scale of 1, the scores are these products.
Q = torch.tensor([1.0, -2.0, 3.0])
K = torch.tensor([2.0, 1.0, -4.0])
#            key 0   key 1   key 2
# query 0      2       1      -4
# query 1     -4      -2       8
# query 2      6       3     -12


def numbers() -> list[torch.Tensor]:
    """q, k and v of one head with these numbers in the first column, head_dim 16."""
    q, k = torch.zeros(1, 1, 3, 16), torch.zeros(1, 1, 3, 16)
    q[..., 0], k[..., 0] = Q, K
    return [q, k, torch.ones(1, 1, 3, 16)]


LITERALS = [
    (tw.full(), 8.0),
    (tw.causal(), 6.0),
    (tw.window(1, 0), 3.0),  # query 2 sees keys 1 and 2
    (tw.window(-1, 0), -INF),
    (tw.causal() & tw.sink(torch.tensor([100.0])), 6.0),
    (tw.causal() & tw.bias(torch.tensor([[0.0, 0.0, 0.0], [0.0, 11.0, 0.0], [0.0, 0.0, 50.0]])), 38.0),
    (tw.bias(torch.tensor([[-INF, 0.0, 0.0], [0.0, 0.0, -INF], [-INF, -INF, 0.0]])), 1.0),
    (tw.causal() & tw.alibi(torch.tensor([2.0])), 2.0),  # 6 - 2 * 2; query 0 has no distance
    (tw.segments(torch.tensor([7, 8, 9]), torch.tensor([9, 7, 8])), 8.0),
    (tw.dense(torch.tensor([[1, 0, 0], [1, 1, 0], [0, 0, 1]], dtype=torch.bool)), 2.0),
    (tw.row_intervals(torch.tensor([0, 0, 2]), torch.tensor([3, 2, 3])), 2.0),
]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("at", range(len(LITERALS)))
def test_largest_score_by_hand(at, backend):
    spec, want = LITERALS[at]
    o, largest = tw.attention(*numbers(), spec=spec, sm_scale=1.0, return_max_logit=True, backend=backend)
    assert o.shape == (1, 1, 3, 16)
    torch.testing.assert_close(largest, torch.tensor([[want]]))


def test_largest_score_feels_the_steps_in_their_order():
    bias, cap = tw.bias(torch.tensor([[[[0.0, 0.0, 4.0]]]])), tw.softcap(2.0)
    for spec, want in ((bias & cap, 2 * torch.tanh(torch.tensor(6.0))), (cap & bias, 2 * torch.tanh(torch.tensor(4.0)) + 4)):
        for backend in BACKENDS:
            _, largest = tw.attention(*numbers(), spec=spec, sm_scale=1.0, return_max_logit=True, backend=backend)
            torch.testing.assert_close(largest, want.view(1, 1))


def test_outputs_come_in_their_order():
    q, k, v = qkv("qkv")
    o, lse, largest = tw.attention(q, k, v, return_lse=True, return_max_logit=True)
    assert [tuple(t.shape) for t in (o, lse, largest)] == [(2, 4, 9, 6), (2, 4, 9), (2, 4)]
    assert [t.requires_grad for t in (o, lse, largest)] == [True, True, False]
    two = tw.attention(q, k, v, return_max_logit=True)
    assert torch.equal(two[0], o)
    assert torch.equal(two[1], largest)
    assert largest.dtype == torch.float32
    assert tw.attention(*(t.double() for t in (q, k, v)), return_max_logit=True)[1].dtype == torch.float64


@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize("terms", ["", "sink:bh", "bias:1hqk", "softcap:2 alibi segment", "row dense bias:b11k:-inf"])
def test_other_outputs_and_gradients_keep_their_bits(backend, terms):
    shape = (2, 4, 2, 40, 70, 16, 16)
    call = random_call(shape, spec=draw_terms(terms, shape) & tw.window(30, 4))
    results = []
    for more in (False, True):
        tensors = [t.clone().requires_grad_() for t in (call.q, call.k, call.v)]
        out = tw.attention(*tensors, spec=call.spec, return_lse=True, return_max_logit=more, backend=backend)
        results.append([*out[:2], *torch.autograd.grad(out[0], tensors, call.do)])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("n, m", [(0, 5), (5, 0)])
def test_nothing_to_see_is_minus_infinity(n, m):
    q, k, v = qkv(n=n, m=m)
    assert torch.equal(tw.attention(q, k, v, return_max_logit=True)[1], torch.full((2, 4), -INF))


def test_largest_score_under_vmap_compile_and_grad():
    q, k, v = qkv()
    stacked = torch.stack([q, 2 * q])

    def largest(q):
        return tw.attention(q, k, v, causal=True, return_max_logit=True, backend="torch")[1]

    want = torch.stack([largest(q), largest(2 * q)])
    assert torch.equal(torch.vmap(largest)(stacked), want)
    torch._dynamo.reset()
    assert torch.equal(torch.compile(largest, fullgraph=True, backend="aot_eager")(q), want[0])

    def loss(q):
        o, top = tw.attention(q, k, v, causal=True, return_max_logit=True, backend="torch")
        return o.square().sum(), top

    grad, top = torch.func.grad(loss, has_aux=True)(q)
    assert torch.equal(top, want[0])
    leaf = q.clone().requires_grad_()
    torch.testing.assert_close(grad, torch.autograd.grad(loss(leaf)[0], leaf)[0])


def test_who_cannot_say_so_refuses():
    problem = tw.Problem.parse(
        "seqlen=512 head_dim=128 mask=causal,returns:max_logit arch=sm_90", software=tw.problem.Runtime((3, 9))
    )
    reasons = {c.backend: tw.capabilities.refuse(c, problem) for c in tw.CAPABILITIES}
    assert [str(r) for r in reasons["hopper"]] == ["the call wants max_logit, it returns o, lse"]
    assert reasons["triton"] == []
    assert tw.select.choose(problem).backend == "triton"


def test_a_flag_that_is_no_flag_is_refused():
    for wrong in (1, "yes", None, torch.tensor(True)):
        with pytest.raises(tw.InvalidInput, match="return_max_logit must be True or False"):
            tw.attention(*qkv(), return_max_logit=wrong)
    with pytest.raises(tw.InvalidInput, match="which the functions set themselves"):
        tw.attention(*qkv(), spec=tw.Spec(returns="max_logit"))
    with pytest.raises(tw.InvalidInput, match="returns is 'p'"):
        tw.Spec(returns="p")
