"""Score functions of the user's own: what they compute, their gradients, and what becomes of calls that have no meaning."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
import triton
import triton.language as tl
from small_calls import close, draw

import tilewise as tw
from tilewise.capabilities import refuse
from tilewise.functions import find
from tilewise.select import capability
from tilewise.testing.calls import evaluate, random_call
from tilewise.testing.score_functions import EXAMPLES, example
from tilewise.testing.terms import draw_terms
from tilewise.testing.tolerance import Yardstick, raise_if_failed

BACKENDS = ("reference", "torch", "triton")
INF = float("inf")


@pytest.fixture(params=BACKENDS)
def backend(request):
    return request.param


@triton.jit
def indexed(score, batch, head, q_pos, kv_pos, table):
    return score * tl.load(table + batch * 4 + head) + q_pos * 0.25 - kv_pos * 0.5


@triton.jit
def indexed_slope(score, batch, head, q_pos, kv_pos, table):
    return tl.load(table + batch * 4 + head)


def indexed_twin(score, batch, head, q_pos, kv_pos, table):
    return score * table[batch, head] + q_pos * 0.25 - kv_pos * 0.5


@triton.jit
def doubled(score, batch, head, q_pos, kv_pos):
    return score * 2.0


@triton.jit
def two(score, batch, head, q_pos, kv_pos):
    return 2.0


@triton.jit
def shifted(score, batch, head, q_pos, kv_pos):
    return score + (kv_pos - q_pos) * 0.1


def shifted_twin(score, batch, head, q_pos, kv_pos):
    return score + (kv_pos - q_pos) * 0.1


@triton.jit
def hiding(score, batch, head, q_pos, kv_pos):
    return tl.where(q_pos == 4, -float("inf"), score)


TABLE = torch.tensor([[1.0, 0.5, -0.3, 2.0], [0.1, 0.7, 1.5, -1.0]])
Q, K, V = draw(2, 4, 5, 8, seed=1), draw(2, 2, 7, 8, seed=2), draw(2, 2, 7, 3, seed=3)


def indexed_spec(**more):
    return tw.score_fn(indexed, twin=indexed_twin, derivative=indexed_slope, tensors={"table": TABLE}, **more)


def shifted_spec(**more):
    return tw.score_fn(shifted, twin=shifted_twin, derivative=1.0, **more)


def by_hand(align):
    """Loops over Python numbers: the function's own words, not its code."""
    o, lse = torch.zeros(2, 4, 5, 3, dtype=torch.float64), torch.zeros(2, 4, 5, dtype=torch.float64)
    for b, h, i in itertools.product(range(2), range(4), range(5)):
        at = i + 2 if align == "bottom_right" else i
        weights = []
        for j in range(7):
            s = 0.4 * sum(float(x) * float(y) for x, y in zip(Q[b, h, i], K[b, h // 2, j], strict=True))
            weights.append(math.exp(s * float(TABLE[b, h]) + 0.25 * at - 0.5 * j) if j <= at else 0.0)
        lse[b, h, i] = math.log(sum(weights))
        for j, w in enumerate(weights):
            o[b, h, i] += w / sum(weights) * V[b, h // 2, j].double()
    return o, lse


@pytest.mark.parametrize("align", ["bottom_right", "top_left"])
def test_a_function_equals_loops(backend, align):
    want_o, want_lse = by_hand(align)
    spec = indexed_spec(align=align) & tw.causal(align)
    o, lse = tw.attention(Q, K, V, spec=spec, sm_scale=0.4, return_lse=True, backend=backend)
    close(o, want_o)
    close(lse, want_lse)
    close(tw.reference(Q, K, V, spec, 0.4)[0], want_o, 1e-12)


SHAPE = (2, 4, 2, 39, 71, 16, 16)
WORDS = [
    "fn:rational_cap",
    "fn:relative",
    "fn:tempered",
    "fn:sparse",
    "fn:tempered sink segment row dense",
    "softcap:2 fn:tempered alibi:bh",
    "alibi fn:rational_cap bias:b1qk",
    "bias:bhqk:-inf fn:tempered softcap:3",
    "bias:k softcap:2 fn:sparse sink:bh",
]
MASKS = {"full": tw.full(), "causal": tw.causal(), "window": tw.window(9, 20)}


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("words", WORDS)
def test_every_gradient_equals_the_oracle(backend, words, mask):
    call = random_call(SHAPE, spec=draw_terms(words, SHAPE, seed=len(words)) & MASKS[mask], dlse=True)
    raise_if_failed(Yardstick(call).judge(evaluate(call, backend), backend))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_other_dtypes(backend, dtype):
    call = random_call(SHAPE, dtype=dtype, spec=draw_terms("fn:tempered softcap:2", SHAPE) & tw.causal(), dlse=True)
    if not refuse(capability(backend), call.problem):
        raise_if_failed(Yardstick(call).judge(evaluate(call, backend), backend))


def test_the_order_of_steps_counts(backend):
    one, other = doubled_spec() & tw.softcap(1.0), tw.softcap(1.0) & doubled_spec()
    a, b = (tw.attention(Q, K, V, spec=s, backend=backend) for s in (one, other))
    assert (a - b).abs().max() > 1e-2
    close(a, tw.reference(Q, K, V, one)[0])
    close(b, tw.reference(Q, K, V, other)[0])


def doubled_spec(**more):
    return tw.score_fn(doubled, twin=lambda score, *_: score * 2.0, derivative=two, name="doubled", **more)


def test_a_derivative_may_be_a_number_of_its_own(backend):
    call = random_call((1, 2, 1, 21, 40, 16, 16), spec=doubled_spec())
    raise_if_failed(Yardstick(call).judge(evaluate(call, backend), backend))


def test_rows_that_a_function_empties(backend):
    q, k, v = (t.clone().requires_grad_() for t in (Q, K, V))
    spec = tw.score_fn(hiding, twin=lambda s, b, h, q, k: torch.where(q == 4, -INF, s), derivative=1.0, name="hiding")
    o, lse = tw.attention(q, k, v, spec=spec, return_lse=True, backend=backend)
    assert (o[:, :, 2] == 0).all()
    assert (lse[:, :, 2] == -INF).all()
    assert lse[:, :, [0, 1, 3, 4]].isfinite().all()
    (o.sum() + torch.where(lse == -INF, 0.0, lse).sum()).backward()
    assert (q.grad[:, :, 2] == 0).all()
    assert all(t.grad.isfinite().all() for t in (q, k, v))


@pytest.mark.parametrize("name", ["rational_cap", "tempered", "relative"])
def test_the_oracle_has_the_derivative_of_finite_differences(name):
    spec = example(name, 1, 2) & tw.causal()
    tensors = [draw(1, h, n, 4, seed=i, dtype=torch.float64).requires_grad_() for i, (h, n) in enumerate(((2, 3), (1, 5), (1, 5)))]
    assert torch.autograd.gradcheck(lambda q, k, v: tw.reference(q, k, v, spec), tensors)
    assert torch.autograd.gradcheck(lambda q, k, v: tw.attention(q, k, v, spec=spec, return_lse=True, backend="torch"), tensors)


def test_twin_derivative_is_used_where_it_is_given():
    calls = []

    def slope(score, *_):
        calls.append(score.shape)
        return torch.full_like(score, 2.0)

    spec = doubled_spec(twin_derivative=slope)
    call = random_call((1, 2, 1, 21, 40, 16, 16), spec=spec)
    raise_if_failed(Yardstick(call).judge(evaluate(call, "torch"), "torch"))
    assert calls


@triton.jit
def marking(score, batch, head, q_pos, kv_pos, queries, keys):
    tl.store(queries + q_pos + 64, q_pos * 0 + 1)
    tl.store(keys + kv_pos, kv_pos * 0 + 1)
    return score


@pytest.mark.parametrize("sizes", [(37, 71), (71, 37)])
def test_positions_stay_inside_the_sequences(sizes):
    """A load that is right for every pair of the call never leaves its tensor: in ragged tiles positions end with the sequences."""
    n, m = sizes
    marks = {"queries": torch.zeros(256, dtype=torch.int32), "keys": torch.zeros(256, dtype=torch.int32)}
    spec = tw.score_fn(marking, twin=lambda score, *_: score, derivative=1.0, name="marking", tensors=marks)
    call = random_call((1, 1, 1, n, m, 16, 16), spec=spec)
    raise_if_failed(Yardstick(call).judge(evaluate(call, "triton"), "triton"))
    start = 64 + m - n
    assert marks["queries"].nonzero().flatten().tolist() == list(range(start, start + n))
    assert marks["keys"].nonzero().flatten().tolist() == list(range(m))


@triton.jit
def broken(score, batch, head, q_pos, kv_pos):
    return score.no_such_thing


def test_a_function_that_fails_is_named():
    spec = tw.score_fn(broken, twin=lambda score, *_: score, derivative=1.0, name="broken")
    with pytest.raises(tw.BackendBroken, match="Is it the score function 'broken'"):
        tw.attention(Q, K, V, spec=spec, backend="triton")


# The spec


def test_a_spec_round_trips():
    spec = tw.causal() & indexed_spec() & tw.softcap(2.0)
    assert tw.Spec.parse(str(spec)) == spec.form
    assert spec.steps == ("fn", "softcap")
    assert spec.slots == ("fn0",)
    assert indexed_spec() == indexed_spec()
    assert str(spec).startswith("upper:0,align:bottom_right,fn:indexed/1@")
    call = random_call((1, 4, 2, 9, 9, 16, 16), spec=indexed_spec())
    problem = call.problem
    assert tw.Problem.parse(str(problem), problem.arch, problem.runtime) == problem


def test_a_spec_has_one_function():
    with pytest.raises(tw.InvalidInput, match=r"both have fn: a spec has at most one. Write one function that does both"):
        indexed_spec() & doubled_spec()


def test_positions_of_function_and_mask_must_agree():
    with pytest.raises(tw.InvalidInput, match="positions differ"):
        indexed_spec() & tw.causal("top_left")


@pytest.mark.parametrize("text", ["fn:x", "fn:x/1", "fn:x/9@0123456789abcdef", "fn:x y/1@0123456789abcdef", "fn"])
def test_bad_strings(text):
    with pytest.raises(tw.InvalidInput, match="unknown term"):
        tw.Spec.parse(text)


def test_a_function_of_another_process_is_refused():
    text = "fn:elsewhere/0@0123456789abcdef"
    with pytest.raises(tw.BackendRefused, match=r"has not registered the score function fn:elsewhere/0@.*tilewise\.score_fn"):
        torch.ops.tilewise.attention_forward(Q, K, V, text, None, None, "torch", "")
    with pytest.raises(tw.InvalidInput, match="has not registered"):
        tw.attention(Q, K, V, spec=tw.Spec.parse(text))


# Support


def test_the_table():
    call = random_call((1, 2, 1, 9, 9, 64, 64), dtype=torch.float16, spec=doubled_spec())
    reasons = refuse(capability("hopper"), call.problem)
    assert any(r.code == "term" and "fn" in r.text for r in reasons)
    assert "fn:doubled/0@" in tw.explain(call.q, call.k, call.v, spec=call.spec)


def test_a_function_without_a_derivative_has_no_gradient():
    spec = tw.score_fn(doubled, twin=lambda score, *_: score * 2.0, name="forward_only")
    q, k, v = (t.clone() for t in (Q, K, V))
    for backend in BACKENDS:
        close(tw.attention(q, k, v, spec=spec, backend=backend), tw.reference(q, k, v, spec)[0])
        with pytest.raises(tw.BackendRefused, match=r"'forward_only' has no derivative: give tilewise.score_fn one, or 1.0"):
            tw.attention(q.clone().requires_grad_(), k, v, spec=spec, backend=backend)
        leaf = v.clone().requires_grad_()
        tw.attention(q, k, leaf, spec=spec, backend=backend).sum().backward()
        assert leaf.grad is not None


def test_a_twin_alone_runs_on_backends_of_pytorch():
    spec = tw.score_fn(None, twin=shifted_twin)
    q = Q.clone().requires_grad_()
    tw.attention(q, K, V, spec=spec).sum().backward()
    want = Q.double().requires_grad_()
    tw.reference(want, K, V, spec)[0].sum().backward()
    close(q.grad, want.grad)
    with pytest.raises(tw.BackendRefused, match="'shifted_twin' has no Triton function"):
        tw.attention(Q, K, V, spec=spec, backend="triton")


# Transforms


def test_compiled_equals_eager(backend):
    torch._dynamo.reset()
    for spec in (indexed_spec() & tw.causal(), shifted_spec()):

        def loss(q, k, v, spec=spec):
            o, lse = tw.attention(q, k, v, spec=spec, return_lse=True, backend=backend)
            return o.square().sum() + lse.sum()

        eager, compiled = ([t.clone().requires_grad_() for t in (Q, K, V)] for _ in range(2))
        want = loss(*eager)
        want.backward()
        got = torch.compile(loss, fullgraph=True, backend="aot_eager")(*compiled)
        got.backward()
        close(got, want)
        for a, b in zip(compiled, eager, strict=True):
            close(a.grad, b.grad)


@pytest.mark.parametrize("name", ["torch", "triton"])
def test_vmap_of_a_function_that_does_not_read_batch(name):
    tensors = [torch.stack([t, t.flip(0)]) for t in (Q, K, V)]
    spec = shifted_spec() & tw.causal()

    def attend(q, k, v):
        return tw.attention(q, k, v, spec=spec, backend=name)

    def loss(q, k, v):
        return attend(q, k, v).square().sum()

    close(torch.vmap(attend)(*tensors), torch.stack([attend(*(t[i] for t in tensors)) for i in range(2)]))
    grads = torch.vmap(torch.func.grad(loss, (0, 1, 2)))(*tensors)
    for i in range(2):
        leaves = [t[i].clone().requires_grad_() for t in tensors]
        for got, want in zip(grads, torch.autograd.grad(loss(*leaves), leaves), strict=True):
            close(got[i], want)


def test_vmap_refuses_what_it_would_change():
    batches = torch.stack([Q, Q]), torch.stack([K, K]), torch.stack([V, V])
    with pytest.raises(tw.BackendRefused, match="'indexed' reads its argument batch, which vmap would change"):
        torch.vmap(lambda q, k, v: tw.attention(q, k, v, spec=indexed_spec()))(*batches)

    def own(q, table):
        spec = tw.score_fn(None, twin=lambda s, b, h, q_pos, kv_pos, table: s + table[h], tensors={"table": table}, name="own")
        return tw.attention(q, K, V, spec=spec)

    with pytest.raises(tw.BackendRefused, match="vmap maps over tensor 'table' of score function 'own'"):
        torch.vmap(own)(batches[0], torch.randn(2, 4))


def test_a_tensor_that_requires_a_gradient_is_refused(backend):
    table = TABLE.clone().requires_grad_()
    spec = tw.score_fn(indexed, twin=indexed_twin, derivative=indexed_slope, tensors={"table": table})
    match = "tensor 'table' of score function 'indexed' requires a gradient, and there is none"
    with pytest.raises(tw.BackendRefused, match=match):
        tw.attention(Q, K, V, spec=spec, backend=backend)
    with torch.no_grad():
        close(tw.attention(Q, K, V, spec=spec, backend=backend), tw.attention(Q, K, V, spec=indexed_spec(), backend=backend))
    torch._dynamo.reset()
    with pytest.raises(Exception, match=match):
        torch.compile(lambda q: tw.attention(q, K, V, spec=spec, backend=backend), fullgraph=True, backend="aot_eager")(Q)


def test_a_functorch_gradient_of_a_tensor_is_refused():
    def loss(table):
        spec = tw.score_fn(indexed, twin=indexed_twin, derivative=indexed_slope, tensors={"table": table})
        return tw.attention(Q, K, V, spec=spec).sum()

    with pytest.raises(tw.BackendRefused, match="requires a gradient"):
        torch.func.grad(loss)(TABLE)


@pytest.mark.parametrize("backend", ["reference", "torch"])
def test_a_derivative_that_is_the_score_itself(backend):
    """It is returned in the memory of the scores, which tiles write over."""
    spec = tw.score_fn(None, twin=lambda score, *_: 0.5 * score * score, twin_derivative=lambda score, *_: score, name="square")
    results = []
    for f in (lambda *t: tw.attention(*t, spec=spec, backend=backend), lambda *t: tw.reference(*t, spec)[0]):
        leaves = [t.clone().requires_grad_() for t in (Q, K, V)]
        results.append(torch.autograd.grad(f(*leaves).square().sum(), leaves))
    for got, want in zip(*results, strict=True):
        close(got, want)


# Calls that have no meaning


def same(score, batch, head, q_pos, kv_pos):
    return score


def with_table(score, batch, head, q_pos, kv_pos, table):
    return score


@triton.jit
def short(score, batch, head, q_pos):
    return score


@triton.jit
def optional(score, batch, head, q_pos, kv_pos, extra=1.0):
    return score


@triton.jit
def pair(score, batch, head, q_pos, kv_pos, a, b):
    return score


@triton.jit
def riap(score, batch, head, q_pos, kv_pos, b, a):
    return score


ONE = torch.ones(3)
MEANINGLESS = {
    "no triton function": (lambda: tw.score_fn(same, twin=same), r"fn must be a @triton.jit function, got .* of type function"),
    "no twin": (lambda: tw.score_fn(doubled, twin=doubled), "twin must be a function of PyTorch tensors"),
    "arity": (
        lambda: tw.score_fn(short, twin=same),
        r"fn takes \(score, batch, head, q_pos\), expected \(score, batch, head, q_pos, kv",
    ),
    "arity of twin": (
        lambda: tw.score_fn(indexed, twin=same, tensors={"table": TABLE}),
        r"twin takes \(score, .*\), expected .* one for each of the 1 tensors: table",
    ),
    "arity of derivative": (
        lambda: tw.score_fn(doubled, twin=same, derivative=indexed_slope),
        r"derivative takes \(score, batch, head, q_pos, kv_pos, table\), expected",
    ),
    "defaults": (lambda: tw.score_fn(optional, twin=same), "fn has parameters with defaults"),
    "names": (
        lambda: tw.score_fn(indexed, twin=with_table, tensors={"tabel": TABLE}),
        "fn takes the tensors table, but tensors holds tabel: the names must be the same",
    ),
    "order of derivative": (
        lambda: tw.score_fn(pair, twin=lambda *_: 0, derivative=riap, tensors={"a": ONE, "b": ONE}),
        "derivative takes the tensors in the order b, a, but fn in the order a, b",
    ),
    "order of twin": (
        lambda: tw.score_fn(pair, twin=lambda s, x, h, q, k, b, a: s, tensors={"a": ONE, "b": ONE}),
        "twin takes the tensors in the order b, a, but fn in the order a, b",
    ),
    "number": (
        lambda: tw.score_fn(doubled, twin=same, derivative=2.0),
        r"derivative is 2\.0, expected a @triton.jit function, or 1\.0",
    ),
    "derivative of pytorch": (
        lambda: tw.score_fn(doubled, twin=same, derivative=same),
        r"derivative must be a @triton\.jit function",
    ),
    "list": (
        lambda: tw.score_fn(None, twin=same, tensors=[ONE], name="f"),
        r"tensors must be a dict of tensors by the names that fn's parameters have, got list",
    ),
    "too many": (
        lambda: tw.score_fn(None, twin=lambda *_: 0, tensors={f"t{i}": ONE for i in range(5)}, name="f"),
        "at most 4 tensors, got 5",
    ),
    "name": (lambda: tw.score_fn(doubled, twin=same, name="a b"), "name is 'a b', expected an identifier"),
    "no tensor": (lambda: tw.score_fn(indexed, twin=with_table, tensors={"table": 3}), "must be a torch.Tensor, got int"),
    "bool": (lambda: tw.score_fn(indexed, twin=with_table, tensors={"table": ONE > 0}), r"is torch.bool: cast it, to torch.int8"),
    "strided": (
        lambda: tw.attention(Q, K, V, spec=tw.score_fn(indexed, twin=indexed_twin, derivative=1.0, tensors={"table": TABLE.mT})),
        r"tensor 'table' of score function 'indexed' has strides \(1, 4\) .* call .contiguous\(\)",
    ),
    "shape of twin": (
        lambda: tw.attention(Q, K, V, spec=tw.score_fn(None, twin=lambda s, *_: s.sum(-1), name="summed")),
        "the twin of score function 'summed' returned torch.float32 of shape .* must be elementwise",
    ),
    "dtype of twin": (
        lambda: tw.attention(Q, K, V, spec=tw.score_fn(None, twin=lambda s, *_: s > 0, name="asked")),
        "the twin of score function 'asked' returned torch.bool",
    ),
}


@pytest.mark.parametrize("case", MEANINGLESS)
def test_what_has_no_meaning_is_said(case):
    make, match = MEANINGLESS[case]
    with pytest.raises(tw.InvalidInput, match=match):
        make()


def test_contiguity_is_checked_in_every_call():
    """A binding that was made for a contiguous tensor does not serve another of the same shape."""
    square = torch.ones(4, 4)
    strided = torch.ones(4, 8)[:, ::2]
    tw.attention(Q, K, V, spec=tw.score_fn(indexed, twin=indexed_twin, derivative=indexed_slope, tensors={"table": square}))
    with pytest.raises(tw.InvalidInput, match="expected a contiguous tensor"):
        tw.attention(Q, K, V, spec=tw.score_fn(indexed, twin=indexed_twin, derivative=indexed_slope, tensors={"table": strided}))


def test_every_example_is_registered_with_its_parts():
    for name in EXAMPLES:
        found = find(example(name, 2, 2).function)
        assert found is not None
        assert found.differentiable
        assert found.name == name
