"""Forward mode: the kernels and the oracle's formula against PyTorch's own forward mode in float64, and every way to ask for it."""

from __future__ import annotations

import dataclasses
import functools

import pytest
import torch
from small_calls import dense, draw, ours
from torch.autograd import forward_ad

import tilewise as tw
from tilewise.capabilities import CAPABILITIES, refuse
from tilewise.problem import GRADIENTS, Problem, Tangents
from tilewise.testing.calls import random_call
from tilewise.testing.tangents import JVP_ENTRIES, JvpYardstick, draw_tangents, evaluate_jvp, jvp_problem, run_jvp
from tilewise.testing.terms import draw_terms
from tilewise.testing.tolerance import raise_if_failed

JVP = torch.ops.tilewise.attention_jvp
BACKENDS = ("reference", "torch", "triton")
WORDS = (
    *("", "softcap:2", "alibi", "bias:1hqk", "softcap:2 bias:b1qk alibi:bh", "alibi bias:k softcap:3"),
    *("sink", "sink:bh bias:b11k:-inf", "fn:rational_cap softcap:2 alibi", "bias:b1qk fn:tempered softcap:3"),
    *("dropout:0.3", "softcap:2 bias:1hqk sink dropout:0.6"),
)
MASKS = {"causal": tw.causal(), "window": tw.window(9, 2), "hidden": tw.window(-1, 0)}
SHAPE = (2, 2, 1, 21, 35, 16, 8)


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    from tilewise.backends import torch_tiles

    monkeypatch.setattr(torch_tiles, "BLOCK_M", 32)
    monkeypatch.setattr(torch_tiles, "BLOCK_N", 16)


def call_of(words: str = "", mask: tw.Spec | None = None, dtype: torch.dtype = torch.float32, **arguments):
    spec = draw_terms(words, SHAPE, seed=3, dtype=torch.float64 if dtype == torch.float64 else torch.float32)
    if dtype == torch.float64:
        slots = ("bias", "slopes", "sink")
        wide = {name: None if t is None else t.double() for name, t in spec.tensors._asdict().items() if name in slots}
        spec = dataclasses.replace(spec, tensors=spec.tensors._replace(**wide))
    return random_call(SHAPE, dtype=dtype, seed=5, spec=spec & (mask or tw.full()), **arguments)


# Values


@pytest.mark.parametrize("entry", JVP_ENTRIES, ids=lambda e: e.name)
@pytest.mark.parametrize("backend, dtype", [("triton", torch.float32), *(("torch", d) for d in (torch.float32, torch.float64))])
def test_gauntlet(entry, backend, dtype):
    results = run_jvp(entry.build("cpu", dtype), backend, entry.name)
    assert [r.output for r in results] == ["o", "lse", "t_o", "t_lse"]
    raise_if_failed(results)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("words", ["", "softcap:2 bias:b1qk alibi:bh"])
def test_half_precision(backend, dtype, words):
    raise_if_failed(run_jvp(call_of(words, tw.causal(), dtype), backend, words))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("words", WORDS)
def test_every_step_alone_and_with_others(backend, words):
    raise_if_failed(run_jvp(call_of(words, tw.causal(), sm_scale=-0.4), backend, words))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("letters", ["q", "k", "v", "b", "a", "s", "qk", "kv", "qv", "vbas", "qkbas"])
def test_any_tangents_may_be_missing(backend, letters):
    call = call_of("softcap:2 bias:1hqk alibi sink", tw.causal())
    tangents = draw_tangents(call, 1, letters)
    assert tangents.letters == letters
    raise_if_failed(JvpYardstick(call, tangents).judge(evaluate_jvp(call, tangents, backend), letters))


@pytest.mark.parametrize("letters", ["q", "v", "qk", "qkvbas"])
def test_no_tile_of_a_missing_tangent_is_read_and_no_product_made(letters):
    """The kernel is compiled for the tangents that are there."""
    from tilewise.backends.triton import jvp_launch
    from tilewise.configs import Config

    call = call_of("alibi bias:1hqk sink")
    tangents = draw_tangents(call, 1, letters)
    plan = jvp_launch._jvp(jvp_problem(call, tangents), Config(32, 32, 4, 1), None, call.spec.tensors, None, tangents)
    assert {name: plan.options[f"HAS_T{name.upper()}"] for name in "qkv"} == {name: name in letters for name in "qkv"}
    assert plan.options["OF_SCORES"] == bool(set(letters) & set("qkba"))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("mask", MASKS)
def test_masks_and_groups(backend, mask):
    for words, heads in (("", (2, 2)), ("segment", (4, 2)), ("row", (3, 1)), ("dense", (4, 2))):
        shape = (1, *heads, 33, 20, 16, 16)
        spec = draw_terms(words, shape, seed=2) & MASKS[mask]
        raise_if_failed(run_jvp(random_call(shape, seed=7, spec=spec), backend, words))


def test_more_columns_of_v_than_the_kernel_holds(monkeypatch):
    from tilewise.backends.triton import jvp_launch

    monkeypatch.setattr(jvp_launch, "COLUMNS", 16)
    jvp_launch.parts_of.cache_clear()
    call = random_call((1, 2, 1, 21, 35, 16, 40), seed=1, spec=tw.causal())
    assert [part.head_dim_v for part, _ in jvp_launch.parts_of(call.problem)] == [16, 16, 8]
    raise_if_failed(run_jvp(call, "triton", "wide"))
    jvp_launch.parts_of.cache_clear()


@pytest.mark.parametrize("backend", ["reference", "torch"])
@pytest.mark.parametrize("words", WORDS)
def test_finite_differences_in_float64(backend, words):
    call = call_of(words, tw.causal(), torch.float64)
    tangents, step = draw_tangents(call, 2), 1e-6
    got = evaluate_jvp(call, tangents, backend)

    def shifted(by: float):
        q, k, v = (t + by * d for t, d in zip((call.q, call.k, call.v), tangents[:3], strict=True))
        moved = {n: t + by * d for n, t, d in zip(tw.spec.SLOTS, call.spec.tensors, tangents[3:], strict=False) if t is not None}
        spec = dataclasses.replace(call.spec, tensors=call.spec.tensors._replace(**moved))
        return tw.attention(q, k, v, spec=spec, return_lse=True, backend=backend)

    for name, ahead, behind in zip(("t_o", "t_lse"), shifted(step), shifted(-step), strict=True):
        slope = torch.where(ahead == float("-inf"), 0.0, (ahead - behind) / (2 * step))
        torch.testing.assert_close(got[name], slope, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("backend", BACKENDS)
def test_nan_behind_the_mask_stays_there(backend):
    call = random_call((1, 1, 1, 8, 40, 16, 16), seed=1, spec=tw.window(0, 0, "top_left"))
    tangents = draw_tangents(call, 1, "qk")
    for t in (call.k, tangents.k):
        t[:, :, 8:] = float("nan")
    if backend != "reference":  # the oracle keeps to the formula
        assert all(t.isfinite().all() for t in evaluate_jvp(call, tangents, backend).values())


@pytest.mark.parametrize("sink", [True, False])
def test_no_keys_at_all(sink):
    call = random_call((2, 2, 1, 5, 0, 8, 8), spec=draw_terms("sink" if sink else "", (2, 2, 1, 5, 0, 8, 8)))
    tangents = draw_tangents(call)
    got = evaluate_jvp(call, tangents, "torch")
    assert not got["t_o"].any()
    want = tangents.sink[:, None].expand(2, 2, 5) if sink else torch.zeros(2, 2, 5)
    torch.testing.assert_close(got["t_lse"], want)


# Ways to ask


def small(seed: int = 0, dtype: torch.dtype = torch.float64) -> list[torch.Tensor]:
    shapes = ((2, 4, 5, 4), (2, 2, 6, 4), (2, 2, 6, 3))
    return [draw(*shape, seed=seed + i, dtype=dtype) for i, shape in enumerate(shapes)]


def same(got, want):
    for a, b in zip(torch.utils._pytree.tree_leaves(got), torch.utils._pytree.tree_leaves(want), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)


def by_jvp(f):
    return torch.func.jvp(f, tuple(small()), tuple(small(7)))


def by_dual(f):
    with forward_ad.dual_level():
        outputs = f(*(forward_ad.make_dual(t, d) for t, d in zip(small(), small(7), strict=True)))
        pairs = [forward_ad.unpack_dual(t) for t in outputs]
    return tuple(p.primal for p in pairs), tuple(p.tangent for p in pairs)


def by_dual_without_grad(f):
    with torch.no_grad():
        return by_dual(f)


def by_jacfwd(f):
    return torch.func.jacfwd(f, argnums=(0, 1, 2))(*small())


def by_vectorized_jacobian(f):
    q, k, v = small()
    return torch.autograd.functional.jacobian(lambda q: f(q, k, v)[0], q, strategy="forward-mode", vectorize=True)


def by_vmap_of_jvp(f):
    def one(*tensors):
        return torch.func.jvp(f, tensors[:3], tensors[3:])

    return torch.vmap(one)(*(torch.stack([t, 2 * t, t - 1]) for t in (*small(), *small(7))))


def by_jvp_of_vmap(f):
    tensors = [torch.stack([t, 2 * t, t - 1]) for t in (*small(), *small(7))]
    return torch.func.jvp(torch.vmap(f), tuple(tensors[:3]), tuple(tensors[3:]))


def by_jvp_of_vmap_over_queries(f):
    q, k, v = small()
    q = torch.stack([q, q + 1])
    return torch.func.jvp(torch.vmap(lambda q: f(q, k, v)), (q,), (2 * q,))


def by_jvp_inside_another(f):
    """The inner level moves v, the outer only what comes after it."""
    q, k, v = small()

    def inner(x):
        return torch.func.jvp(lambda y: f(q, k, y)[0], (v,), (v,))[1].sum() * x

    one = torch.ones((), dtype=torch.float64)
    return torch.func.jvp(inner, (one,), (one,))


def by_jvp_around_another(f):
    """The outer level moves q, the inner only what comes after it."""
    q, k, v = small()
    one = torch.ones((), dtype=torch.float64)

    def outer(x):
        return torch.func.jvp(lambda y: f(q * x, k, v)[0] * y, (one,), (one,))[1].sum()

    return torch.func.jvp(outer, (one,), (one,))


def by_linearize(f):
    q, k, v = small()
    o, pushed = torch.func.linearize(lambda q: f(q, k, v)[0], q)
    return o, pushed(2 * q)


def by_jacrev_of_the_primal(f):
    q, k, v = small()
    return torch.func.jacrev(lambda q: torch.func.jvp(lambda a: f(a, k, v), (q,), (q,))[0])(q)


WAYS = [
    *(by_jvp, by_dual, by_dual_without_grad, by_jacfwd, by_vectorized_jacobian, by_vmap_of_jvp, by_jvp_of_vmap),
    *(by_jvp_of_vmap_over_queries, by_jvp_inside_another, by_jvp_around_another, by_linearize, by_jacrev_of_the_primal),
]


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("way", WAYS)
def test_every_way_to_ask(way):
    same(way(ours), way(dense))


def test_jacfwd_along_the_tensors_of_a_spec():
    call = call_of("softcap:2 bias:1hqk alibi sink", tw.causal(), torch.float64)
    slots = ("bias", "slopes", "sink")

    def of(f):
        def along(bias, slopes, sink):
            spec = dataclasses.replace(call.spec, tensors=call.spec.tensors._replace(bias=bias, slopes=slopes, sink=sink))
            return f(call.q[:, :, :3], call.k[:, :, :5], call.v[:, :, :5], spec)[0].sum((0, 3))

        tensors = call.spec.tensors
        return torch.func.jacfwd(along, argnums=(0, 1, 2))(tensors.bias[:, :, :3, :5], *(getattr(tensors, s) for s in slots[1:]))

    same(of(lambda q, k, v, spec: tw.attention(q, k, v, spec=spec, return_lse=True, backend="torch")), of(tw.reference))


@pytest.mark.parametrize("transform", ["backward", "grad", "vmap of grad"])
def test_backward_through_the_primal_beside_its_tangent(transform):
    """A step of MeanFlow: the target holds the tangent and is detached."""
    weight, primals, tangents = draw(4, 4, seed=3, dtype=torch.float64), tuple(small()), tuple(small(7))

    def step(f, weight):
        (u, lse), (du, dlse) = torch.func.jvp(lambda q, k, v: f(q @ weight, k @ weight, v), primals, tangents)
        return (u - (1 - 2 * du).detach()).square().mean() + (lse * dlse.detach()).sum()

    def gradient(f):
        loss = functools.partial(step, f)
        if transform == "grad":
            return torch.func.grad(loss)(weight)
        if transform == "vmap of grad":
            return torch.vmap(torch.func.grad(loss))(torch.stack([weight, weight + 1]))
        leaf = weight.clone().requires_grad_()
        loss(leaf).backward()
        return leaf.grad

    same(gradient(ours), gradient(dense))


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_backward_with_a_bias_and_dual_tensors(backend):
    call = call_of("bias:1hqk softcap:2 sink", tw.causal())
    results = []
    for f in (functools.partial(tw.attention, backend=backend, return_lse=True), tw.reference):
        q, bias = (t.clone().requires_grad_() for t in (call.q, call.spec.tensors.bias))
        spec = dataclasses.replace(call.spec, tensors=call.spec.tensors._replace(bias=bias))
        with forward_ad.dual_level():
            o, lse = f(forward_ad.make_dual(q, call.q * 2), call.k, call.v, spec=spec)
            (o, t_o), lse = forward_ad.unpack_dual(o), forward_ad.unpack_dual(lse).primal
            (o.square().sum() + (lse * t_o.detach().sum(-1)).sum()).backward()
        results.append((q.grad, bias.grad))
    for got, want in zip(*results, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


# What is refused


def forward_over_forward():
    q, k, v = small()
    torch.func.jvp(lambda q: torch.func.jvp(lambda k: ours(q, k, v), (k,), (k,))[1], (q,), (q,))


def jacfwd_of_jacfwd():
    q, k, v = (t[:1, :1, :2] for t in small())
    torch.func.jacfwd(torch.func.jacfwd(lambda v: ours(q, k, v)[0]))(v)


def dual_tangents_of_the_operator():
    q, k, v = small()
    with forward_ad.dual_level():
        JVP(q, k, v, "full", None, None, "torch", "", forward_ad.make_dual(q, q))


@pytest.mark.parametrize("attempt", [forward_over_forward, jacfwd_of_jacfwd, dual_tangents_of_the_operator])
def test_a_forward_mode_derivative_of_one_is_refused(attempt):
    with pytest.raises(tw.BackendRefused, match=r"no forward-mode derivative of its forward-mode .* Take one .* in reverse"):
        attempt()


def test_a_backend_without_it_is_refused_with_the_reason():
    for row in CAPABILITIES:
        problem = Problem.parse("seqlen=64 head_dim=64 jvp=qk arch=sm_90")
        reasons = [r.code for r in refuse(row, problem)]
        assert ("jvp" in reasons) is not row.jvp
    assert [row.backend for row in CAPABILITIES if not row.jvp] == ["hopper"]
    with pytest.raises(tw.BackendRefused, match="a forward-mode derivative is asked for, it has none"):
        torch.func.jvp(lambda q: tw.attention(q, q, q, backend="hopper"), (draw(1, 1, 64, 64),), (draw(1, 1, 64, 64),))


@pytest.mark.parametrize("backend", BACKENDS)
def test_what_it_does_not_go_through_is_refused(backend):
    q, k, v = small(dtype=torch.float32)
    with pytest.raises(tw.BackendRefused, match="max_logit, of which it has no forward-mode derivative"):
        torch.func.jvp(functools.partial(tw.attention, backend=backend, return_max_logit=True), (q, k, v), (q, k, v))


@pytest.mark.parametrize("words", ["dropout:0.3", "fn:rational_cap", "bias:1hqk sink"])
@pytest.mark.parametrize("mapped", [False, True])
def test_random_and_own_steps_in_training(words, mapped):
    """The derivative and the gradient of the primal output belong to one mask of dropout, also with ``vmap`` inside of jvp."""
    call = call_of(words, tw.causal(), torch.float64)
    q = draw(*((3,) if mapped else ()), *call.q.shape).double()
    direction, step = torch.randn_like(q), 1e-6

    def one(q):
        return tw.attention(q, call.k, call.v, spec=call.spec, backend="torch")

    f = torch.vmap(one) if mapped else one
    slope = (f(q + step * direction) - f(q - step * direction)) / (2 * step)
    torch.testing.assert_close(torch.func.jvp(f, (q,), (direction,))[1], slope, rtol=1e-6, atol=1e-7)

    def loss(q):
        o, t_o = torch.func.jvp(f, (q,), (direction,))
        return (o - t_o.detach()).square().sum()

    t_o = torch.func.jvp(f, (q,), (direction,))[1]
    ahead, behind = ((f(q + by * direction) - t_o).square().sum() for by in (step, -step))
    along = (torch.func.grad(loss)(q) * direction).sum()
    torch.testing.assert_close(along, (ahead - behind) / (2 * step), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("words", ["dropout:0.4", "fn:relative", "softcap:2 bias:1hqk sink dropout:0.4"])
@pytest.mark.parametrize("way", ["jacfwd", "functional", "vmap of jvp"])
def test_many_tangents_of_one_call(words, way):
    """Whatever maps over tangents alone moves one and the same call: with one mask of dropout."""
    call = call_of(words, tw.causal(), torch.float64)
    q, directions = call.q, draw(3, *call.q.shape).double()

    def f(q):
        return tw.attention(q, call.k, call.v, spec=call.spec, backend="torch")

    want = torch.stack([torch.func.jvp(f, (q,), (direction,))[1] for direction in directions])
    if way == "vmap of jvp":
        got = torch.vmap(lambda d: torch.func.jvp(f, (q,), (d,))[1])(directions)
    else:
        whole = torch.autograd.functional.jacobian(f, q, strategy="forward-mode", vectorize=True)
        jacobian = torch.func.jacfwd(f)(q) if way == "jacfwd" else whole
        got = torch.stack([(jacobian * d).sum((-4, -3, -2, -1)) for d in directions])
    torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-10)


def test_functions_that_read_the_batch_are_refused_under_vmap():
    call = call_of("fn:tempered", tw.causal(), torch.float64)
    with pytest.raises(tw.BackendRefused, match="reads its argument batch"):
        torch.func.jacfwd(lambda q: tw.attention(q, call.k, call.v, spec=call.spec, backend="torch"))(call.q)


@pytest.mark.parametrize("backend", ["reference", "torch"])
@pytest.mark.parametrize("way", ["jvp", "jvp beside q", "dual", "rule"])
def test_tangents_of_a_functions_tensors_are_refused(backend, way):
    q, k, v = small(dtype=torch.float32)
    amount = torch.ones(q.shape[1])

    def scaled(score, batch, head, q_pos, kv_pos, amount):
        return score * amount[head]

    def f(amount, q=q):
        return tw.attention(q, k, v, spec=tw.score_fn(None, twin=scaled, tensors={"amount": amount}), backend=backend)

    def as_duals():
        with forward_ad.dual_level():
            f(forward_ad.make_dual(amount, amount))

    ways = {
        "jvp": lambda: torch.func.jvp(f, (amount,), (amount,)),
        "jvp beside q": lambda: torch.func.jvp(f, (amount, q), (amount, q)),
        "rule": lambda: torch.func.jvp(torch.vmap(f, (None, 0)), (amount, q[None]), (amount, q[None])),
        "dual": as_duals,
    }
    with pytest.raises(tw.BackendRefused, match="score function has a tangent"):
        ways[way]()


def test_problem_string_says_which_tangents_there_are():
    call = call_of("bias:1hqk")
    problem = jvp_problem(call, draw_tangents(call, letters="kb"))
    assert "jvp=kb" in str(problem)
    assert Problem.parse(str(problem)).jvp == "kb"
    assert Tangents(*[None] * len(GRADIENTS)).letters == ""
    with pytest.raises(tw.InvalidInput, match="jvp is 'x'"):
        Problem.parse("seqlen=64 head_dim=64 jvp=x")


@pytest.mark.parametrize(
    "tangents, word",
    [
        ({"tq": torch.zeros(2, 4, 5, 3)}, "tangent of q has shape"),
        ({"tk": torch.zeros(2, 2, 6, 4, dtype=torch.float16)}, "tangent of k is torch.float16"),
        ({"tbias": torch.zeros(1)}, "the call has no bias"),
    ],
)
def test_tangents_that_do_not_fit(tangents, word):
    q, k, v = small(dtype=torch.float32)
    with pytest.raises(tw.InvalidInput, match=word):
        JVP(q, k, v, "full", None, None, "torch", "", **tangents)


# Registration and compiled graphs


@pytest.mark.parametrize("letters", ["q", "qkv", "v"])
def test_opcheck(letters):
    tensors = [t.requires_grad_() for t in small(dtype=torch.float32)]
    tangents = [t if name in letters else None for name, t in zip("qkv", small(7, torch.float32), strict=True)]
    torch.library.opcheck(JVP.default, (*tensors, "upper:0", None, None, "torch", "qkv", *tangents))
    plain = [t.detach() for t in tensors]
    torch.library.opcheck(JVP.default, (*plain, "full", 0.3, None, "torch", "", *tangents))


def test_gradcheck_of_both_modes():
    tensors = [t[:1, :2].clone().requires_grad_() for t in small()]
    assert torch.autograd.gradcheck(
        lambda q, k, v: ours(q, k, v)[0], tensors, check_forward_ad=True, check_batched_forward_grad=True, check_undefined_grad=True
    )


def compiled(f):
    torch._dynamo.reset()
    return torch.compile(f, backend="aot_eager", fullgraph=True)


def test_compiled_step_of_meanflow():
    def step(f, weight, *tensors):
        u, du = torch.func.jvp(lambda q, k, v: f(q @ weight, k, v)[0], tensors[:3], tensors[3:])
        return (u - (1 - du).detach()).square().mean()

    results = []
    for f, wrap in ((ours, compiled), (dense, lambda f: f)):
        weight = draw(4, 4, seed=3, dtype=torch.float64).requires_grad_()
        loss = wrap(functools.partial(step, f))(weight, *small(), *small(7))
        loss.backward()
        results.append((loss.detach(), weight.grad))
    same(*results)


def test_compiled_jacfwd_and_dual_level():
    q, k, v = small()

    def inside(f, q, tangent):
        with forward_ad.dual_level():
            o, t_o = forward_ad.unpack_dual(f(forward_ad.make_dual(q, tangent), k, v)[0])
            return o, t_o

    same(compiled(functools.partial(inside, ours))(q, 2 * q), inside(dense, q, 2 * q))
    same(compiled(torch.func.jacfwd(lambda q: ours(q, k, v)[0]))(q), torch.func.jacfwd(lambda q: dense(q, k, v)[0])(q))


def test_jvp_of_a_compiled_function():
    torch._dynamo.reset()
    same(by_jvp(torch.compile(ours, backend="aot_eager")), by_jvp(dense))


def test_the_operator_inside_a_jvp_has_a_tangent():
    q, k, v = small()
    op = torch.ops.tilewise.attention_forward
    got = torch.func.jvp(lambda q: op(q, k, v, "full", None, None, "torch", "")[0], (q,), (2 * q,))
    same(got, torch.func.jvp(lambda q: tw.reference(q, k, v)[0], (q,), (2 * q,)))


def test_autocast_reaches_tangents():
    tensors, tangents = small(dtype=torch.float32), small(7, torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        (o, lse), (t_o, t_lse) = torch.func.jvp(ours, tuple(tensors), tuple(tangents))
    assert (o.dtype, lse.dtype, t_o.dtype, t_lse.dtype) == (torch.bfloat16, torch.float32, torch.bfloat16, torch.float32)
