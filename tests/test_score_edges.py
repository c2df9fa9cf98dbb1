"""Score steps at their edges: rows of the lowest value and of -inf, order, what is computed, transforms, determinism, errors."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from small_calls import BACKWARD, FORWARD, close, draw

import tilewise as tw
from tilewise.capabilities import refuse
from tilewise.testing.calls import TRAINED, evaluate, random_call
from tilewise.testing.terms import draw_terms

SCORES = {"softcap", "alibi", "bias", "sink"}
BACKENDS = [c.backend for c in tw.CAPABILITIES if set(c.terms) >= SCORES and c.bulk_bias is None]
FULL = "softcap:2 alibi bias sink"


@pytest.fixture(params=BACKENDS)
def backend(request):
    return request.param


def inputs(n=9, m=40, dtype=torch.float32):
    return [draw(2, h, length, 16, seed=i, dtype=dtype) for i, (h, length) in enumerate(((4, n), (2, m), (2, m)))]


def gradients(q, k, v, spec, backend, **more):
    """o, lse and the gradients of q, k, v and the spec's tensors, of ``o . do + lse . dlse`` where lse is finite."""
    leaves = [t.detach().requires_grad_() for t in (q, k, v)]
    tensors = {n: getattr(spec.tensors, n).detach().requires_grad_() for n in TRAINED if getattr(spec.tensors, n) is not None}
    spec = type(spec)(*spec._value()[:4], spec.sink, spec.segment, spec.row, spec.dense, "", spec.tensors._replace(**tensors))
    o, lse = tw.attention(*leaves, spec=spec, backend=backend, return_lse=True, **more)
    do, dlse = draw(*o.shape, seed=8).to(o.dtype), draw(*lse.shape, seed=9)
    loss = (o * do).sum() + torch.where(lse.isfinite(), lse * dlse, 0.0).sum()
    grads = torch.autograd.grad(loss, [*leaves, *tensors.values()])
    return o.detach(), lse.detach(), dict(zip(["q", "k", "v", *tensors], grads, strict=True))


# Rows of nothing but very low scores


@pytest.mark.parametrize("low", [torch.finfo(torch.float32).min, -3e38, -1e9], ids=str)
def test_a_row_of_the_lowest_value_is_uniform_and_trains_as_such(backend, low):
    """Beside the lowest float32 a score is lost: o is the mean of v, and each key weighs 1 / 40 in the backward pass too."""
    q, k, v = inputs()
    q[:, :, 3] = 0.0  # all scores of this row are equal, so that -1e9 has one right answer in every precision
    bias = draw(2, 1, 9, 40, seed=5)
    bias[:, :, 3] = low
    o, lse, grads = gradients(q, k, v, tw.bias(bias), backend)
    close(o[:, :, 3], v.mean(2).repeat_interleave(2, 1))
    torch.testing.assert_close(lse[:, :, 3], torch.full((2, 4), low))
    assert all(g.isfinite().all() for g in grads.values())
    do = draw(2, 4, 9, 16, seed=8)
    only = do.clone()
    only[:, :, [0, 1, 2, 4, 5, 6, 7, 8]] = 0.0
    leaf = v.clone().requires_grad_()
    given = tw.attention(q, k, leaf, spec=tw.bias(bias), backend=backend)
    (dv,) = torch.autograd.grad(given, leaf, only)
    close(dv, (do[:, :, 3:4] / 40).unflatten(1, (2, 2)).sum(2).expand(2, 2, 40, 16))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_a_row_of_minus_infinity_sees_no_key(backend, dtype):
    q, k, v = inputs()
    bias = draw(1, 4, 9, 40, seed=5).to(dtype)
    bias[:, 1, 3] = -torch.inf
    bias[:, :, 5, 7:30] = -torch.inf
    bias[:, :, :, 39] = -torch.inf
    o, lse, grads = gradients(q, k, v, tw.bias(bias), backend)
    assert not o[:, 1, 3].any()
    assert (lse[:, 1, 3] == -torch.inf).all()
    assert lse.isinf().sum() == 2
    assert all(g.isfinite().all() for g in grads.values())
    assert not grads["q"][:, 1, 3].any()
    assert not grads["k"][:, :, 39].any()
    assert not grads["v"][:, :, 39].any()
    assert not grads["bias"][bias == -torch.inf].any()
    assert grads["bias"].dtype == dtype


def test_an_empty_row_with_a_sink_has_its_lse(backend):
    q, k, v = inputs(n=50)
    sink = torch.tensor([0.5, -2.0, 3.0, -torch.inf])
    o, lse, grads = gradients(q, k, v, tw.causal() & tw.sink(sink), backend)
    assert not o[:, :, :10].any()
    assert torch.equal(lse[:, :, :10], sink[:, None].expand(2, 4, 10))
    assert all(g.isfinite().all() for g in grads.values())
    assert grads["sink"][3] == 0
    assert not grads["q"][:, :, :10].any()


@pytest.mark.parametrize("n, m", [(5, 0), (0, 5)])
def test_a_sink_where_there_are_no_keys_or_no_queries(backend, n, m):
    q, k, v = inputs(n, m)
    sink = torch.tensor([0.5, -2.0, 3.0, 0.0])
    o, lse, grads = gradients(q, k, v, tw.sink(sink), backend)
    assert not o.any()
    assert torch.equal(lse, sink[:, None].expand(2, 4, n))
    close(grads["sink"], draw(2, 4, n, seed=9).sum((0, 2)))


def test_a_very_low_sink_changes_nothing_and_a_high_one_takes_all(backend):
    q, k, v = inputs()
    plain = tw.attention(q, k, v, return_lse=True, backend=backend)
    for low in (-torch.inf, -1e30):
        for got, want in zip(
            tw.attention(q, k, v, spec=tw.sink(torch.full((4,), low)), return_lse=True, backend=backend), plain, strict=True
        ):
            torch.testing.assert_close(got, want)
    o, lse = tw.attention(q, k, v, spec=tw.sink(torch.full((1,), 1e4)), return_lse=True, backend=backend)
    assert not o.any()
    assert (lse == 1e4).all()


def test_bias_and_causal_with_a_score_of_distances(backend):
    """A bias of ``q - kv`` beside a causal mask, and ALiBi, which is the same for slope -1: one answer."""
    for n in (33, 65):
        q, k, v = inputs(n, n)
        distance = (torch.arange(n)[:, None] - torch.arange(n)).float()
        first = gradients(q, k, v, tw.causal() & tw.bias(distance), backend)
        second = gradients(q, k, v, tw.causal() & tw.alibi(-torch.ones(4)), backend)
        close(first[0], second[0])
        close(first[1], second[1])
        for name in "qkv":
            close(first[2][name], second[2][name], 1e-4)


# The formulas of the oracle


DERIVED = ("softcap:0.7", "alibi", "bias:bhqk", "bias:q1", "sink", FULL, "bias:h11 softcap:0.5 alibi:bh sink:bh")


@pytest.mark.parametrize("words", DERIVED)
@pytest.mark.parametrize("backend", ["reference", "torch"])
def test_finite_differences_in_float64(backend, words):
    shape = (2, 2, 1, 3, 4, 3, 2)
    call = random_call(shape, dtype=torch.float64, spec=draw_terms(words, shape, dtype=torch.float64) & tw.window(2, 1))
    names = [n for n in TRAINED if getattr(call.spec.tensors, n) is not None]
    given = [getattr(call.spec.tensors, n).double().requires_grad_() for n in names]
    leaves = [t.detach().requires_grad_() for t in (call.q, call.k, call.v)]

    def work(q, k, v, *tensors):
        named = call.spec.tensors._replace(**dict(zip(names, tensors, strict=True)))
        spec = type(call.spec)(*call.spec._value()[:4], call.spec.sink, tensors=named)
        return tw.attention(q, k, v, spec=spec, return_lse=True, backend=backend)

    assert torch.autograd.gradcheck(work, (*leaves, *given))


# Only what is asked for


@pytest.mark.parametrize("wanted", ["bias", "slopes", "sink", "q", "v", "bias sink"])
def test_only_what_is_asked_for_is_computed(backend, wanted):
    shape = (2, 4, 2, 33, 40, 16, 16)
    call = random_call(shape, spec=draw_terms(FULL, shape) & tw.causal())
    names = wanted.split()
    tensors = {n: getattr(call.spec.tensors, n).requires_grad_(n in names) for n in TRAINED}
    q, k, v = (t.requires_grad_(n in names) for n, t in zip("qkv", (call.q, call.k, call.v), strict=True))
    o = tw.attention(q, k, v, spec=call.spec, backend=backend)
    o.backward(call.do)
    every = evaluate(random_call(shape, spec=draw_terms(FULL, shape) & tw.causal()), backend)
    for name, t in {"q": q, "k": k, "v": v, **tensors}.items():
        if name in names:
            close(t.grad, every[f"d{name}"])
        else:
            assert t.grad is None


def test_gradients_repeat_bit_by_bit(backend):
    shape = (2, 4, 2, 70, 70, 16, 16)
    call = random_call(shape, dtype=torch.float16, spec=draw_terms("bias:1hqk alibi", shape) & tw.causal())
    if refuse(next(c for c in tw.CAPABILITIES if c.backend == backend), call.problem):
        return
    first, second = evaluate(call, backend), evaluate(call, backend)
    assert all(torch.equal(first[name], second[name]) for name in first)


# Shapes and strides


def test_biases_of_any_shape_give_gradients_of_theirs(backend):
    q, k, v = inputs(43, 77)
    for shape in ((77,), (43, 1), (1, 1, 43, 77), (2, 1, 1, 77), (1, 4, 43, 77), (4, 1, 1), ()):
        bias = draw(*shape, 1, seed=3)[..., 0]
        _, _, grads = gradients(q, k, v, tw.bias(bias), backend)
        full = bias.expand(2, 4, 43, 77).contiguous()
        _, _, whole = gradients(q, k, v, tw.bias(full), backend)
        assert grads["bias"].shape == shape
        close(grads["bias"], whole["bias"].sum_to_size(shape), 1e-4)


def test_strides_of_a_bias_do_not_matter(backend):
    q, k, v = inputs(33, 40)
    bias = draw(1, 4, 33, 40, seed=3)
    want = gradients(q, k, v, tw.bias(bias), backend)
    held = torch.full((1, 4, 40, 70), torch.nan)
    turned = held[..., 1:67:2].copy_(bias.transpose(2, 3)).transpose(2, 3)
    for twin in (turned, bias.double().float().transpose(1, 2).contiguous().transpose(1, 2)):
        got = gradients(q, k, v, tw.bias(twin), backend)
        assert torch.equal(got[0], want[0])
        assert torch.equal(got[2]["bias"], want[2]["bias"])
    row = draw(40, seed=4)
    expanded = row.expand(2, 4, 33, 40)
    close(
        gradients(q, k, v, tw.bias(expanded), backend)[2]["bias"],
        gradients(q, k, v, tw.bias(expanded.clone()), backend)[2]["bias"],
    )


def test_rows_of_a_bias_that_lie_far_apart(backend):
    q, k, v = inputs(3, 40)
    bias = draw(3, 40, seed=3)
    far = torch.full((3, 2**22 + 8), torch.nan)[:, 8:48].copy_(bias)
    want, got = (gradients(q, k, v, tw.bias(t), backend) for t in (bias, far))
    assert torch.equal(got[0], want[0])
    assert all(torch.equal(got[2][name], want[2][name]) for name in want[2])


def test_slopes_and_sinks_of_strides_do_not_matter(backend):
    q, k, v = inputs(33, 40)
    wide = draw(2, 8, seed=3)
    for make in (tw.alibi, tw.sink):
        want = gradients(q, k, v, make(wide[:, ::2].contiguous()), backend)
        got = gradients(q, k, v, make(wide[:, ::2]), backend)
        assert torch.equal(got[0], want[0])


# Transforms


def test_vmap_with_mapped_and_shared_tensors():
    qs, ks, vs = (torch.stack([t, 2 * t, t - 1]) for t in inputs())
    biases, slopes = draw(3, 4, 9, 40, seed=5), draw(4, seed=6).abs()

    def loss(q, k, v, bias, slopes, backend="torch"):
        o, lse = tw.attention(q, k, v, spec=tw.bias(bias) & tw.alibi(slopes), return_lse=True, backend=backend)
        return o.square().sum() + lse.sin().sum()

    ways = [((0, 0, 0, 0, None), biases), ((0, 0, 0, None, None), biases[0]), ((None, 0, 0, None, None), biases[0, :1])]
    for in_dims, given in ways:
        q = qs if in_dims[0] == 0 else qs[0]
        got = torch.vmap(torch.func.grad(loss, (0, 3, 4)), in_dims)(q, ks, vs, given, slopes)
        for i in range(3):
            args = (q[i] if in_dims[0] == 0 else q, ks[i], vs[i], given[i] if in_dims[3] == 0 else given, slopes)
            for whole, part in zip(got, torch.func.grad(loss, (0, 3, 4))(*args), strict=True):
                close(whole[i], part, 1e-4)


@pytest.mark.parametrize("words", ["bias:11qk", FULL])
def test_opcheck(words):
    shape = (2, 2, 1, 5, 7, 4, 4)
    call = random_call(shape, spec=draw_terms(words, shape) & tw.causal())
    tensors = [None if t is None or not t.is_floating_point() else t.requires_grad_() for t in call.spec.tensors]
    inputs_ = [t.requires_grad_() for t in (call.q, call.k, call.v)]
    settings = (str(call.spec), 0.3, None, "torch")
    torch.library.opcheck(FORWARD.default, (*inputs_, *settings, "qkvb", *tensors))
    detached = [None if t is None else t.detach() for t in tensors]
    grad = "".join(letter for letter, t in zip("bas", detached, strict=False) if t is not None)
    with torch.no_grad():
        o, lse, *_ = FORWARD(*inputs_, *settings, "q", *detached)
        _, _, rows, *_ = FORWARD(*inputs_, *settings, "q", *detached)
    plain = [t.detach() for t in inputs_]
    torch.library.opcheck(BACKWARD.default, (o, lse, *plain, o, lse, *settings, "qkv" + grad, rows, *detached))


def test_compiled_call_holds_its_tensors():
    q, k, v = inputs()
    bias = draw(1, 4, 9, 40, seed=5).requires_grad_()

    def work(q, k, v, bias):
        return tw.attention(q, k, v, spec=tw.softcap(3.0) & tw.bias(bias), backend="torch")

    torch._dynamo.reset()
    compiled = torch.compile(work, fullgraph=True, backend="aot_eager")
    want = work(q, k, v, bias)
    (grad,) = torch.autograd.grad(want.square().sum(), bias)
    got = compiled(q, k, v, bias)
    close(got, want)
    close(torch.autograd.grad(got.square().sum(), bias)[0], grad)


# The value


def test_strings_of_score_steps_round_trip():
    t = torch.zeros(4)
    spec = tw.causal() & tw.softcap(30) & tw.alibi(t) & tw.bias(t[0]) & tw.sink(t)
    assert str(spec) == "upper:0,align:bottom_right,softcap:30.0,alibi,bias,sink"
    assert tw.Spec.parse(str(spec)) == spec.form
    assert spec.form != spec
    assert spec == tw.causal() & tw.softcap(30) & tw.alibi(t) & tw.bias(spec.tensors.bias) & tw.sink(t)
    assert str(tw.bias(t) & tw.softcap(2)) == "bias,softcap:2.0"
    assert str(tw.softcap(2) & tw.bias(t)) == "softcap:2.0,bias"
    assert copy.copy(spec) == spec
    assert str(pickle.loads(pickle.dumps(spec))) == str(spec)
    assert str(tw.alibi(t, "top_left")) == "align:top_left,alibi"


def test_a_problem_describes_its_tensors_without_lengths():
    q, k, v = inputs()
    spec = tw.bias(torch.zeros(4, 9, 1)) & tw.alibi(torch.zeros(2, 4)) & tw.sink(torch.zeros(1).bfloat16())
    problem = tw.Problem.bind(q, k, v, spec, grad="bs")
    assert "mask=bias,alibi,sink bias=float32:1hq1 slopes=float32:bh sink=bfloat16:11" in str(problem).replace(
        "align:bottom_right,", ""
    )
    assert tw.Problem.parse(str(problem)) == problem
    longer = tw.Problem.bind(*inputs(11, 60), tw.bias(torch.zeros(4, 11, 1)) & spec.form.__class__(), grad="b")
    assert longer.operands == problem.operands[:1]
    assert all(t is None for t in problem.spec.tensors)


WRONG = {
    "cap of 0": (lambda: tw.softcap(0.0), r"softcap's cap is 0\.0, expected a finite number above 0"),
    "cap of infinity": (lambda: tw.softcap(float("inf")), "expected a finite number above 0"),
    "cap of NaN": (lambda: tw.softcap(float("nan")), "expected a finite number above 0"),
    "cap that is a tensor": (lambda: tw.softcap(torch.ones(())), "cap must be a number, got tensor"),
    "two caps": (lambda: tw.softcap(1.0) & tw.softcap(2.0), "both have softcap: a spec has at most one"),
    "two biases": (lambda: tw.bias(torch.ones(1)) & tw.bias(torch.ones(1)), "Add the biases and give one tensor"),
    "two corners": (lambda: tw.alibi(torch.ones(4), "top_left") & tw.causal(), "Build both with the same align"),
    "bias of ints": (lambda: tw.bias(torch.ones(9, 40, dtype=torch.int32)), "bias has dtype int32, expected one of float16"),
    "bias of doubles": (lambda: tw.bias(torch.ones(9, 40).double()), r"float64 but q has float32.*bias\.float\(\)"),
    "bias of a wrong length": (lambda: tw.bias(torch.ones(9, 41)), r"bias has 41 at seqlen_k, expected 40 or 1.*\(2, 4, 9, 40\)"),
    "bias of five dims": (lambda: tw.bias(torch.ones(1, 1, 1, 9, 40)), "bias has 5 dims, expected at most 4"),
    "bias elsewhere": (lambda: tw.bias(torch.ones(9, 40, device="meta")), r"bias is on meta but q is on cpu"),
    "bias that is a list": (lambda: tw.bias([1.0]), r"bias must be a torch\.Tensor .*got list"),
    "sparse bias": (lambda: tw.bias(torch.ones(9, 40).to_sparse()), r"bias has layout torch\.sparse_coo"),
    "slopes of the key heads": (lambda: tw.alibi(torch.ones(2)), "slopes has 2 at heads_q, expected 4 or 1"),
    "sinks of queries": (lambda: tw.sink(torch.ones(2, 9)), "sink has 9 at heads_q"),
    "a name without a tensor": (lambda: tw.Spec.parse("bias"), "the spec names bias but no tensor was given"),
    "a tensor without a name": (lambda: tw.Spec(tensors=tw.bias(torch.ones(1)).tensors), "but the spec does not name it"),
}


@pytest.mark.parametrize("what", WRONG)
def test_wrong_terms_are_refused(what):
    make, message = WRONG[what]
    q, k, v = inputs()
    with pytest.raises(tw.InvalidInput, match=message):
        tw.attention(q, k, v, spec=make())


@pytest.mark.parametrize(
    "text, message",
    [
        ("mask=softcap", "softcap needs a number, got ''"),
        ("mask=softcap:-1", "cap is -1.0, expected"),
        ("mask=bias,bias", "names 'bias' twice"),
        ("mask=full bias=float32:1hqk", "'bias' is described, but the mask full does not name it"),
        ("mask=bias bias=float32:hhqk", "bias has dims 'hhqk', expected 'bhqk' with a 1"),
        ("mask=bias bias=int8:1hqk", "bias has dtype 'int8'"),
    ],
)
def test_bad_problem_strings_of_terms(text, message):
    with pytest.raises(tw.InvalidInput, match=message):
        tw.Problem.parse(f"seqlen=5 head_dim=8 {text}")


def test_hopper_refuses_with_a_reason():
    problem = tw.Problem.parse("seqlen=64 head_dim=64 mask=softcap:3,bias arch=sm_90")
    row = next(c for c in tw.CAPABILITIES if c.backend == "hopper")
    reasons = [r for r in refuse(row, problem) if r.code == "term"]
    assert [str(r) for r in reasons] == ["the spec has a bias beside softcap, it takes a bias beside bounds only"]


@pytest.mark.parametrize("sm_scale", [1e-50, -1e-50, 1e-44, 0.0])
def test_a_scale_that_is_no_float32_number_hides_no_less(sm_scale):
    """A hidden score is -inf before it is scaled, where a table lists its tile."""
    q, k, v = (torch.randn(1, 1, 40, 16) for _ in range(3))
    ids = torch.arange(40).view(1, 40) // 7
    got, want = (tw.attention(q, k, v, spec=tw.segments(ids, ids), sm_scale=sm_scale, backend=b) for b in ("triton", "reference"))
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
