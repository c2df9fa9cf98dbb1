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


# The second pass


def literal(rows: list[list[float]]) -> torch.Tensor:
    return torch.tensor([[rows]], dtype=torch.float32)


LN2, LN3 = torch.log(torch.tensor(2.0)).item(), torch.log(torch.tensor(3.0)).item()


def logarithms(*weights: float) -> list[torch.Tensor]:
    """q, k and v of one head and four queries: every query scores key ``j`` with ``log(weights[j])`` at a scale of 1."""
    q, k = torch.zeros(1, 1, 4, 16), torch.zeros(1, 1, len(weights), 16)
    q[..., 0], k[..., 0] = 1.0, torch.tensor(weights).log()
    return [q, k, torch.ones(1, 1, len(weights), 16)]


# Every query weighs keys 0 to 3 as 1 : 2 : 3 : 6.
WEIGHTS = [
    (tw.full(), [[1 / 12, 2 / 12, 3 / 12, 6 / 12]] * 4),
    (tw.causal(), [[1, 0, 0, 0], [1 / 3, 2 / 3, 0, 0], [1 / 6, 2 / 6, 3 / 6, 0], [1 / 12, 2 / 12, 3 / 12, 6 / 12]]),
    (tw.window(0, 1), [[1 / 3, 2 / 3, 0, 0], [0, 2 / 5, 3 / 5, 0], [0, 0, 3 / 9, 6 / 9], [0, 0, 0, 1]]),
    (tw.window(-1, 0), [[0, 0, 0, 0]] * 4),
    (
        tw.window(1, 0) & tw.sink(torch.tensor([LN3])),
        [[1 / 4, 0, 0, 0], [1 / 6, 2 / 6, 0, 0], [0, 2 / 8, 3 / 8, 0], [0, 0, 3 / 12, 6 / 12]],
    ),
    (
        tw.segments(torch.tensor([0, 0, 1, 5]), torch.tensor([0, 1, 1, 0])),
        [[1 / 7, 0, 0, 6 / 7], [1 / 7, 0, 0, 6 / 7], [0, 2 / 5, 3 / 5, 0], [0, 0, 0, 0]],
    ),
    (
        tw.causal() & tw.row_intervals(torch.tensor([0, 0, 1, 2]), torch.tensor([4, 1, 4, 3])),
        [[1, 0, 0, 0], [1, 0, 0, 0], [0, 2 / 5, 3 / 5, 0], [0, 0, 1, 0]],
    ),
    (
        tw.causal() & tw.bias(torch.tensor([[0, LN2, 0, 0]])),
        [[1, 0, 0, 0], [1 / 5, 4 / 5, 0, 0], [1 / 8, 4 / 8, 3 / 8, 0], [1 / 14, 4 / 14, 3 / 14, 6 / 14]],
    ),
    (
        tw.causal() & tw.alibi(torch.tensor([LN2])),  # the last row: 1/8 : 2/4 : 3/2 : 6
        [[1, 0, 0, 0], [1 / 5, 4 / 5, 0, 0], [1 / 17, 4 / 17, 12 / 17, 0], [1 / 65, 4 / 65, 12 / 65, 48 / 65]],
    ),
]


@pytest.mark.parametrize("at", range(len(WEIGHTS)))
@pytest.mark.parametrize("backend", BACKENDS)
def test_weights_and_sums_by_hand(at, backend):
    spec, rows = WEIGHTS[at]
    q, k, v = logarithms(1.0, 2.0, 3.0, 6.0)
    arguments = {"spec": spec, "sm_scale": 1.0}
    o, lse = tw.attention(q, k, v, return_lse=True, backend=backend, **arguments)
    sums = tw.column_sums(q, k, lse, backend=backend, **arguments)
    torch.testing.assert_close(sums, literal(rows).sum(2))
    assert (sums == 0).equal(literal(rows).sum(2) == 0)
    second = "torch" if backend == "triton" else backend
    got = tw.attention_weights(q, k, lse, backend=second, **arguments)
    torch.testing.assert_close(got, literal(rows))
    assert (got == 0).equal(literal(rows) == 0)
    torch.testing.assert_close(got @ v, o)
    for chosen in (
        torch.tensor([3, 0, 3], dtype=torch.int32),
        slice(None, None, -2),
        slice(1, 3),
        slice(0, 0),
        torch.tensor([], dtype=torch.int64),
    ):
        numbers = chosen.tolist() if isinstance(chosen, torch.Tensor) else list(range(4))[chosen]
        part = tw.attention_weights(q, k, lse, rows=chosen, backend=second, **arguments)
        assert part.shape == (1, 1, len(numbers), 4)
        assert torch.equal(part, got[:, :, numbers])


@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize("terms", ["", "alibi:bh bias:k sink", "segment row dense softcap:2", "bias:b1qk:-inf"])
def test_sums_are_those_of_the_weights_and_repeat(terms, backend):
    shape = (2, 6, 2, 70, 130, 16, 16)
    call = random_call(shape, spec=draw_terms(terms, shape) & tw.window(100, 4))
    _, lse = tw.attention(call.q, call.k, call.v, spec=call.spec, return_lse=True, backend=backend)
    sums = tw.column_sums(call.q, call.k, lse, spec=call.spec, backend=backend)
    torch.testing.assert_close(sums, tw.attention_weights(call.q, call.k, lse, spec=call.spec).sum(2), rtol=2e-5, atol=1e-5)
    assert torch.equal(sums, tw.column_sums(call.q, call.k, lse, spec=call.spec, backend=backend))
    planned = tw.plan(call.q, call.k, call.spec, v=call.v, backend=backend, backward=True)
    assert torch.equal(sums, tw.column_sums(call.q, call.k, lse, spec=planned, backend=backend))


def test_weights_beside_all_keys_of_a_merge():
    q, k, v = qkv()
    parts = [tw.attention(q, k[:, :, s], v[:, :, s], return_lse=True) for s in (slice(0, 4), slice(4, None))]
    _, lse = tw.merge(*parts[0], *parts[1])
    weights = [tw.attention_weights(q, k[:, :, s], lse) for s in (slice(0, 4), slice(4, None))]
    torch.testing.assert_close(torch.cat(weights, -1), tw.attention_weights(q, k, tw.attention(q, k, v, return_lse=True)[1]))


@pytest.mark.parametrize("function", [tw.attention_weights, tw.column_sums])
def test_second_pass_has_no_gradient(function):
    q, k, v = qkv()
    lse = tw.attention(q, k, v, return_lse=True)[1]
    want = function(q, k, lse)
    for i in range(3):
        tensors = [t.clone().requires_grad_(i == j) for j, t in enumerate((q, k, lse))]
        with pytest.raises(tw.BackendRefused, match=rf"{function.__name__} has no derivative.*no_grad"):
            function(*tensors)
        with torch.no_grad():
            assert torch.equal(function(*tensors), want)
    with pytest.raises(tw.BackendRefused, match="has no derivative"):
        function(q, k, lse, spec=tw.bias(torch.zeros(9, 11, requires_grad=True)))
    with pytest.raises(tw.BackendRefused, match="has no derivative"):
        torch.func.grad(lambda q: function(q, k, lse).sum())(q)
    with pytest.raises(tw.BackendRefused, match=f"tilewise.{function.__name__} has no derivative, but an input has a tangent"):
        torch.func.jvp(lambda q: function(q, k, lse), (q,), (q,))


@pytest.mark.parametrize("function", [tw.attention_weights, tw.column_sums])
def test_second_pass_under_vmap_compile_and_autocast(function):
    q, k, v = qkv()
    bias = torch.randn(9, 11)

    def run(q, k, bias):
        spec = tw.bias(bias) & tw.causal()
        with torch.no_grad():
            lse = tw.attention(q, k, v, spec=spec, return_lse=True, backend="torch")[1]
            return function(q, k, lse, spec=spec, backend="torch")

    want = [run(q, k, bias), run(2 * q, k, -bias)]
    got = torch.vmap(run, (1, None, 0))(torch.stack([q, 2 * q], 1), k, torch.stack([bias, -bias]))
    torch.testing.assert_close(got, torch.stack(want))
    torch._dynamo.reset()
    assert torch.equal(torch.compile(run, fullgraph=True, backend="aot_eager")(q, k, bias), want[0])
    with torch.autocast("cpu", dtype=torch.bfloat16):
        half = run(q, k, bias)
    torch.testing.assert_close(half, want[0], rtol=0.1, atol=0.05)
    lse = tw.attention(q, k, v, return_lse=True)[1]
    arguments = (q, k, lse, None, "returns:column_sums", None, None, "torch", torch.float32)
    torch.library.opcheck(torch.ops.tilewise.second_pass.default, arguments)


def test_dtype_of_the_weights():
    q, k, v = qkv()
    lse = tw.attention(q, k, v, return_lse=True)[1]
    want = tw.attention_weights(q, k, lse)
    assert want.dtype == torch.float32
    for dtype in (torch.bfloat16, torch.float16, torch.float64):
        got = tw.attention_weights(q, k, lse, dtype=dtype)
        assert got.dtype == dtype
        assert torch.equal(got, want.to(dtype))


def test_second_pass_of_nothing():
    q, k, _ = qkv()
    assert tw.column_sums(q, k[:, :, :0], torch.zeros(2, 4, 9)).shape == (2, 4, 0)
    assert torch.equal(tw.column_sums(q[:, :, :0], k, torch.zeros(2, 4, 0)), torch.zeros(2, 4, 11))
    assert tw.attention_weights(q[:, :, :0], k, torch.zeros(2, 4, 0)).shape == (2, 4, 0, 11)


WRONG = {
    "lse of one head": (lambda q, k, lse: tw.column_sums(q, k, lse[:, :1]), r"lse is \(2, 1, 9\).*expected \(2, 4, 9\)"),
    "lse in half": (lambda q, k, lse: tw.column_sums(q, k, lse.half()), r"torch\.float16.*torch\.float32"),
    "no lse": (lambda q, k, lse: tw.column_sums(q, k, None), "lse must be a torch.Tensor"),
    "a list": (lambda q, k, lse: tw.attention_weights(q, k, lse, rows=[1, 2]), r"rows is \[1, 2\], expected a slice"),
    "two dims": (lambda q, k, lse: tw.attention_weights(q, k, lse, rows=torch.zeros(1, 1).long()), "expected a slice, or one dim"),
    "a mask": (lambda q, k, lse: tw.attention_weights(q, k, lse, rows=torch.ones(9) > 0), "expected a slice, or one dim"),
    "past the end": (lambda q, k, lse: tw.attention_weights(q, k, lse, rows=torch.tensor([0, 9])), "lie between 0 and 9"),
    "negative": (lambda q, k, lse: tw.attention_weights(q, k, lse, rows=torch.tensor([-1])), "lie between -1 and -1"),
    "a slice of words": (lambda q, k, lse: tw.attention_weights(q, k, lse, rows=slice("a")), "rows is slice"),
    "an integer dtype": (lambda q, k, lse: tw.attention_weights(q, k, lse, dtype=torch.int32), "dtype is torch.int32"),
    "a word for a dtype": (lambda q, k, lse: tw.attention_weights(q, k, lse, dtype="half"), "dtype is 'half'"),
    "spec and causal": (lambda q, k, lse: tw.column_sums(q, k, lse, causal=True, spec=tw.full()), "both given"),
    "k of another dim": (lambda q, k, lse: tw.column_sums(q, k[..., :4], lse), "head_dim"),
    "backend": (lambda q, k, lse: tw.column_sums(q, k, lse, backend="tri"), "backend is 'tri'"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_arguments_of_a_second_pass(name):
    q, k, v = qkv()
    call, words = WRONG[name]
    with pytest.raises(tw.InvalidInput, match=words):
        call(q, k, tw.attention(q, k, v, return_lse=True)[1])


def test_who_has_no_second_pass_refuses():
    q, k, v = qkv()
    lse = tw.attention(q, k, v, return_lse=True)[1]
    with pytest.raises(tw.BackendRefused, match="wants weights, it returns o, lse, max_logit, column_sums"):
        tw.attention_weights(q, k, lse, backend="triton")
    with pytest.raises(tw.BackendRefused, match="dropout takes place after the weights"):
        tw.column_sums(q, k, lse, spec=tw.Spec(dropout="0.1"))
    with pytest.raises(tw.InvalidInput, match="rows differ from sample to sample"):
        torch.vmap(lambda rows: tw.attention_weights(q, k, lse, rows=rows))(torch.tensor([[0, 1], [1, 2]]))
