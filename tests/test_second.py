"""Second derivatives against autograd through the dense formula in float64, every way to ask for them, and what is refused."""

from __future__ import annotations

import dataclasses
import functools

import pytest
import torch
from small_calls import dense, draw, ours
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import tilewise as tw
from tilewise.backends import torch_second
from tilewise.operands import full_rank
from tilewise.problem import Problem, Tangents
from tilewise.spec import SLOTS, Tensors
from tilewise.testing.calls import random_call
from tilewise.testing.second import SECOND_ENTRIES, SecondYardstick, evaluate_second, run_second, second_call, with_gradients
from tilewise.testing.tangents import draw_tangents
from tilewise.testing.terms import draw_terms
from tilewise.testing.tolerance import raise_if_failed

SHAPE = (2, 4, 2, 9, 13, 8, 6)


def call_of(words: str, mask: tw.Spec | None = None, shape: tuple[int, ...] = SHAPE, dtype: torch.dtype = torch.float64):
    return with_gradients(random_call(shape, dtype=dtype, seed=5, spec=draw_terms(words, shape, seed=3) & (mask or tw.full())))


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    """Blocks of few rows, so that small inputs have several."""
    monkeypatch.setitem(torch_second._ELEMENTS, "cpu", 1 << 13)


# Values


@pytest.mark.parametrize("entry", SECOND_ENTRIES, ids=lambda e: e.name)
def test_gauntlet(entry):
    results = run_second(second_call(entry), "torch", entry.name)
    raise_if_failed(results)


@pytest.mark.parametrize("letters", ["q", "k", "v", "b", "a", "s", "qk", "kv", "bas", "qbs"])
@pytest.mark.parametrize("order", ["softcap:2 bias:1hqk alibi sink", "bias:b1qk alibi:bh softcap:3 sink:bh"])
def test_any_inputs_alone(order, letters):
    """What does not need a gradient has none, and the others are what they are."""
    call = call_of(order, tw.causal())
    tangents = draw_tangents(call, 1, letters)
    got = evaluate_second(call, tangents, "torch")
    raise_if_failed(SecondYardstick(call, tangents).judge(got, letters))


@pytest.mark.parametrize("words", ["", "softcap:2 bias:1h1k sink", "alibi dropout:0.3", "segment row dense"])
@pytest.mark.parametrize("mask", [tw.full(), tw.causal(), tw.window(2, 1), tw.window(-1, 0)], ids=str)
def test_gradgradcheck(words, mask):
    call = call_of(words, mask, (1, 2, 1, 4, 5, 3, 2))
    leaves = [t.requires_grad_() for t in (call.q, call.k, call.v, *call.spec.tensors[:3]) if t is not None]

    def f(q, k, v, *given):
        given = iter(given)
        own = [None if t is None else next(given) for t in call.spec.tensors[:3]]
        spec = dataclasses.replace(call.spec, tensors=Tensors(*own, *call.spec.tensors[3:]))
        o, lse = tw.attention(q, k, v, spec=spec, return_lse=True, backend="torch")
        return o, lse.masked_fill(lse == float("-inf"), 0.0)

    assert torch.autograd.gradgradcheck(f, leaves, check_fwd_over_rev=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("backend", ["torch", "triton", "reference"])
@pytest.mark.parametrize("words", ["", "softcap:2 bias:1hqk alibi sink"])
def test_every_backend_and_dtype(backend, dtype, words):
    call = call_of(words, tw.causal(), dtype=dtype)
    raise_if_failed(run_second(call, backend, words))


@pytest.mark.parametrize("garbage", [1e30, float("inf"), float("nan")])
@pytest.mark.parametrize("terms", [tw.full(), tw.dense(torch.arange(8)[:, None] != 3) & tw.dense(torch.arange(40) != 5)])
def test_garbage_behind_the_mask_stays_there(terms, garbage):
    """Keys that nobody sees and queries that see nobody, in the blocks of others."""
    call = call_of("softcap:2 bias:1h1k", tw.causal("top_left") & terms, (2, 2, 1, 8, 40, 16, 8))
    tangents = draw_tangents(call, 1)
    want = evaluate_second(call, tangents, "torch")
    keys = [*range(8, 40), *([5] if terms.terms else [])]
    for of in (call, tangents):
        of.k[:, :, keys], of.v[:, :, keys] = garbage, -garbage
        if terms.terms:
            of.q[:, :, 3] = garbage
    got = evaluate_second(call, tangents, "torch")
    for name, t in want.items():
        torch.testing.assert_close(got[name], t, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("sink", [True, False])
@pytest.mark.parametrize("n, m, batch", [(5, 0, 2), (0, 5, 2), (0, 0, 2), (5, 5, 0)])
def test_empty_extents(n, m, batch, sink):
    raise_if_failed(run_second(call_of("sink" if sink else "", None, (batch, 2, 1, n, m, 4, 4)), "torch", "empty"))


def cubic(score, batch, head, q_pos, kv_pos):
    return 0.1 * score**3 + kv_pos * 0.1


def cubic_slope(score, batch, head, q_pos, kv_pos):
    return 0.3 * score**2


def untraceable_slope(score, batch, head, q_pos, kv_pos):
    return 0.3 * score.detach() ** 2


def half_square(score, batch, head, q_pos, kv_pos):
    return 0.5 * score * score


def itself(score, batch, head, q_pos, kv_pos):
    return score


def tripled(score, batch, head, q_pos, kv_pos):
    return 3.0 * score


def three(score, batch, head, q_pos, kv_pos):
    return torch.full_like(score.detach(), 3.0)


def shifted(score, batch, head, q_pos, kv_pos):
    return score + kv_pos


FUNCTIONS = {
    "autograd": {"twin": cubic},
    "its derivative": {"twin": cubic, "twin_derivative": cubic_slope},
    "its derivative without a trace": {"twin": cubic, "twin_derivative": untraceable_slope},
    "in the memory of the scores": {"twin": half_square, "twin_derivative": itself},
    "linear": {"twin": tripled, "twin_derivative": three},
    "constant slope": {"twin": shifted, "derivative": 1.0},
}


@pytest.mark.parametrize("words", ["", "bias:1h1k softcap:3"])
@pytest.mark.parametrize("which", FUNCTIONS)
def test_score_functions(which, words):
    call = call_of(words, tw.score_fn(None, **FUNCTIONS[which]) & tw.causal())
    raise_if_failed(run_second(call, "torch", which))


class Once(torch.autograd.Function):
    @staticmethod
    def forward(ctx, score):
        ctx.save_for_backward(score)
        return 0.1 * score**3

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):  # type: ignore[override]
        return grad * 0.3 * ctx.saved_tensors[0] ** 2


def once(score, batch, head, q_pos, kv_pos):
    return Once.apply(score)


def hidden_twin(score, batch, head, q_pos, kv_pos):
    return 0.1 * score.detach() ** 3


@pytest.mark.parametrize("functions", [{"twin": once}, {"twin": hidden_twin, "twin_derivative": untraceable_slope}])
def test_a_function_that_autograd_cannot_follow_twice_is_refused(functions):
    call = call_of("", tw.score_fn(None, **functions))
    with pytest.raises(tw.BackendRefused, match=r"has no second derivative that autograd can find: .* Write its twin, or its"):
        evaluate_second(call, draw_tangents(call), "torch")


def test_dropout_has_the_masks_of_the_forward_pass_under_vmap():
    """Samples are entries of one batch; where only directions are mapped, every one has the masks of the call alone."""
    spec = tw.dropout(0.4, torch.tensor(77)) & tw.causal()

    def hvp(f):
        return lambda *t: torch.func.vjp(torch.func.grad(loss_of(f), (0, 1, 2)), *t[:3])[1](t[3:])

    def dropped(q, k, v):
        return tw.attention(q, k, v, spec=spec, backend="torch", return_lse=True)

    def right(*tensors):
        return hvp(lambda q, k, v: tw.reference(q, k, v, spec))(*tensors)

    inputs, directions = ([torch.stack([t, 2 * t, t - 1]) for t in small(seed)] for seed in (0, 7))
    got = torch.vmap(hvp(dropped), randomness="different")(*inputs, *directions)
    for a, b in zip(got, right(*(t.flatten(0, 1) for t in (*inputs, *directions))), strict=True):
        torch.testing.assert_close(a.flatten(0, 1), b)
    got = torch.vmap(hvp(dropped), (None,) * 3 + (0,) * 3, randomness="different")(*small(), *directions)
    for i in range(3):
        for a, b in zip(got, right(*small(), *(t[i] for t in directions)), strict=True):
            torch.testing.assert_close(a[i], b)


def trained_terms(f):
    def loss(q, k, v, bias, slopes, sink):
        o, lse = f(q, k, v, tw.softcap(2.0) & tw.bias(bias) & tw.alibi(slopes) & tw.sink(sink) & tw.causal())
        return o.square().sum() + lse.sin().sum()

    return lambda *t: torch.func.jvp(torch.func.grad(loss, tuple(range(6))), t[:6], t[6:])


@pytest.mark.parametrize("mapped", ["qkvbasqkvbas", "q.....qkvbas", "...b.sqkvbas", "......qkvbas", "qkv.........", ".kvbasq..b.s"])
def test_vmap_over_the_tensors_of_a_spec(mapped):
    def six(seed):
        more = (draw(4, 3, 1, seed=seed, dtype=torch.float64), draw(4, seed=seed, dtype=torch.float64))
        return *small(seed), *more, draw(2, 4, seed=seed, dtype=torch.float64)

    dims = tuple(None if letter == "." else 0 for letter in mapped)
    samples = [[*six(i), *six(10 + i)] for i in range(3)]
    tensors = [one[0] if dim is None else torch.stack(one) for dim, one in zip(dims, zip(*samples, strict=True), strict=True)]
    attend = trained_terms(lambda q, k, v, spec: tw.attention(q, k, v, spec=spec, backend="torch", return_lse=True))
    got = torch.utils._pytree.tree_leaves(torch.vmap(attend, dims)(*tensors))
    for i in range(3):
        want = trained_terms(tw.reference)(*(t if dim is None else t[i] for t, dim in zip(tensors, dims, strict=True)))
        for a, b in zip(got, torch.utils._pytree.tree_leaves(want), strict=True):
            torch.testing.assert_close(a[i], b, rtol=1e-10, atol=1e-10)


class Largest(TorchDispatchMode):
    """The most elements that a tensor born inside it has."""

    most = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        storages = [t.untyped_storage().nbytes() // t.element_size() for t in torch.utils._pytree.tree_leaves(out)]
        self.most = max(self.most, *storages) if storages else self.most
        return out


@pytest.mark.parametrize("words", ["", "softcap:2 bias:1h1k alibi sink", "segment row", "dropout:0.3"])
def test_no_tensor_grows_with_the_product_of_the_lengths(words):
    largest = {}
    for length in (256, 512, 1024):
        call = call_of(words, tw.causal(), (1, 2, 1, length, length, 16, 16), torch.float32)
        tangents = draw_tangents(call)
        problem = Problem.bind(call.q, call.k, call.v, call.spec, grad="qkv", jvp=tangents.letters)
        tensors = Tensors(*(None if t is None else full_rank(slot, t) for slot, t in zip(SLOTS, call.spec.tensors, strict=True)))
        named = zip(SLOTS[:3], tangents[3:], strict=True)
        tangents = Tangents(*tangents[:3], *(None if t is None else full_rank(name, t) for name, t in named))
        grads = Tensors(*(None if t is None else torch.empty_like(t) for t in tensors[:3]))
        outputs = [torch.empty_like(t) for t in (call.do, call.dlse, call.q, call.k, call.v)]
        with Largest() as seen:
            torch_second.second(problem, call.do, call.dlse, call.q, call.k, call.v, tangents, *outputs, tensors, grads)
        largest[length] = seen.most
    assert largest[1024] < 1024 * 1024 / 8
    assert largest[1024] <= 2 * largest[512] <= 4 * largest[256]


# Ways to ask


def small(seed: int = 0, dtype: torch.dtype = torch.float64) -> list[torch.Tensor]:
    shapes = ((2, 4, 3, 4), (2, 2, 4, 4), (2, 2, 4, 3))
    return [draw(*shape, seed=seed + i, dtype=dtype) for i, shape in enumerate(shapes)]


def loss_of(f):
    def loss(q, k, v):
        o, lse = f(q, k, v)
        return o.square().sum() + lse.sin().sum()

    return loss


def gradient_penalty(f):
    q, k, v = (t.requires_grad_() for t in small())
    grads = torch.autograd.grad(loss_of(f)(q, k, v), (q, k, v), create_graph=True)
    (loss_of(f)(q, k, v) + sum(g.square().sum() for g in grads)).backward()
    return q.grad, k.grad, v.grad


def through_the_upstream_gradient(f):
    q, k, v = (t.requires_grad_() for t in small())
    o, lse = f(q, k, v)
    upstream = torch.ones_like(o).requires_grad_(), torch.ones_like(lse).requires_grad_()
    grads = torch.autograd.grad((o, lse), (q, k, v), upstream, create_graph=True)
    return torch.autograd.grad(sum(g.sin().sum() for g in grads), (*upstream, q, k, v))


def half_of_a_penalty(f):
    """Only dk is penalised, only q asked for."""
    q, k, v = (t.requires_grad_() for t in small())
    (dk,) = torch.autograd.grad(loss_of(f)(q, k, v), k, create_graph=True)
    return torch.autograd.grad(dk.square().sum(), q)


def by_grad_of_grad(f):
    q, k, v = small()
    return torch.func.grad(lambda q: torch.func.grad(loss_of(f), (0, 1, 2))(q, k, v)[1].square().sum())(q)


def by_vjp_of_grad(f):
    _, pull = torch.func.vjp(torch.func.grad(loss_of(f), (0, 1, 2)), *small())
    return pull(tuple(small(7)))


def by_hessian(f):
    q, k, v = (t[:1] for t in small())
    return torch.func.hessian(loss_of(f), (0, 1, 2))(q, k, v)


def by_jacrev_of_jacrev(f):
    q, k, v = (t[:1] for t in small())
    return torch.func.jacrev(torch.func.jacrev(loss_of(f), (0, 2)), (0, 1))(q, k, v)


def by_jacrev_of_jacfwd(f):
    q, k, v = (t[:1] for t in small())
    return torch.func.jacrev(torch.func.jacfwd(loss_of(f), (0, 1)), (0, 2))(q, k, v)


def by_jvp_of_grad(f):
    return torch.func.jvp(torch.func.grad(loss_of(f), (0, 1, 2)), tuple(small()), tuple(small(7)))


def by_grad_of_jvp(f):
    def moved(*tensors):
        (o, lse), (t_o, t_lse) = torch.func.jvp(f, tensors[:3], tensors[3:])
        return (o * t_o).sum() + (lse * t_lse).sum() + t_o.square().sum()

    return torch.func.grad(moved, tuple(range(6)))(*small(), *small(7))


def by_linearize_of_grad(f):
    _, push = torch.func.linearize(torch.func.grad(loss_of(f), (0, 1, 2)), *small())
    return push(*small(7))


def by_vmap_of_hvp(f):
    def hvp(*tensors):
        return torch.func.jvp(torch.func.grad(loss_of(f), (0, 1, 2)), tensors[:3], tensors[3:])

    return torch.vmap(hvp)(*(torch.stack([t, 2 * t, t - 1]) for t in (*small(), *small(7))))


def by_vmap_of_hvp_over_directions(f):
    q, k, v = small()

    def hvp(direction):
        return torch.func.jvp(lambda q: torch.func.grad(loss_of(f))(q, k, v), (q,), (direction,))[1]

    return torch.vmap(hvp)(torch.stack(small(7)[:1] * 3))


def by_vmap_of_grad_of_grad(f):
    def again(q, k, v):
        return torch.func.grad(lambda k: torch.func.grad(loss_of(f))(q, k, v).square().sum())(k)

    q, k, v = small()
    return torch.vmap(again, (0, None, 1))(torch.stack([q, q + 1]), k, torch.stack([v, v + 1], 1))


def by_jvp_of_vmap_of_grad(f):
    per_sample = torch.vmap(torch.func.grad(loss_of(f), (0, 1, 2)))
    pairs = [tuple(torch.stack([t, t + 1]) for t in small(seed)) for seed in (0, 7)]
    return torch.func.jvp(per_sample, *pairs)


def through_tangents(f, after: bool):
    leaves = [t.requires_grad_() for t in (*small(), *small(7))]
    if f is dense:  # PyTorch cannot go back through the tangents of its softmax where they come from dual tensors
        (o, lse), (t_o, t_lse) = torch.func.jvp(f, tuple(leaves[:3]), tuple(leaves[3:]))
        return torch.autograd.grad(t_o.square().sum() + (o.sum(-1) * lse * t_lse).sum(), leaves)
    with forward_ad.dual_level():
        (o, t_o), (lse, t_lse) = (forward_ad.unpack_dual(t) for t in f(*map(forward_ad.make_dual, leaves[:3], leaves[3:])))
        loss = t_o.square().sum() + (o.sum(-1) * lse * t_lse).sum()
        if not after:
            return torch.autograd.grad(loss, leaves)
    return torch.autograd.grad(loss, leaves)


def by_backward_through_a_dual(f):
    return through_tangents(f, False)


def by_backward_after_the_level(f):
    return through_tangents(f, True)


def by_backward_through_a_jvp(f):
    leaves = [t.requires_grad_() for t in (*small(), *small(7))]
    (o, lse), (t_o, t_lse) = torch.func.jvp(f, tuple(leaves[:3]), tuple(leaves[3:]))
    ((o * t_o).sum() + (lse * t_lse).sum()).backward()
    return [t.grad for t in leaves]


def by_dual_of_a_backward(f):
    """Forward over reverse: the backward pass within the level."""
    q, k, v = (t.requires_grad_() for t in small())
    with forward_ad.dual_level():
        duals = [forward_ad.make_dual(t, d) for t, d in zip((q, k, v), small(7), strict=True)]
        grads = torch.autograd.grad(loss_of(f)(*duals), duals)
        return [forward_ad.unpack_dual(g) for g in grads]


def by_dual_upstream(f):
    q, k, v = (t.requires_grad_() for t in small())
    o, _ = f(q, k, v)
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(o.detach(), o.detach().sin())
        return [forward_ad.unpack_dual(g) for g in torch.autograd.grad(o, (q, k, v), dual)]


def by_functional_hvp(f):
    return torch.autograd.functional.hvp(loss_of(f), tuple(small()), tuple(small(7)))


def by_functional_vhp(f):
    return torch.autograd.functional.vhp(loss_of(f), tuple(small()), tuple(small(7)))


def by_functional_hessian(f):
    return torch.autograd.functional.hessian(loss_of(f), tuple(t[:1] for t in small()))


def by_vectorized_functional_hessian(f):
    return torch.autograd.functional.hessian(loss_of(f), tuple(t[:1] for t in small()), vectorize=True)


def by_forward_functional_hessian(f):
    inputs = tuple(t[:1] for t in small())
    return torch.autograd.functional.hessian(loss_of(f), inputs, vectorize=True, outer_jacobian_strategy="forward-mode")


def by_checkpoint(f):
    q, k, v = (t.requires_grad_() for t in small())
    grads = torch.autograd.grad(checkpoint(loss_of(f), q, k, v, use_reentrant=False), (q, k, v), create_graph=True)
    return torch.autograd.grad(sum(g.square().sum() for g in grads), (q, k, v))


WAYS = [
    *(gradient_penalty, through_the_upstream_gradient, half_of_a_penalty, by_grad_of_grad, by_vjp_of_grad, by_hessian),
    *(by_jacrev_of_jacrev, by_jacrev_of_jacfwd, by_jvp_of_grad, by_grad_of_jvp, by_linearize_of_grad, by_vmap_of_hvp),
    *(by_vmap_of_hvp_over_directions, by_vmap_of_grad_of_grad, by_jvp_of_vmap_of_grad, by_backward_through_a_jvp),
    *(by_backward_through_a_dual, by_backward_after_the_level, by_dual_of_a_backward, by_dual_upstream, by_functional_hvp),
    *(by_functional_vhp, by_functional_hessian, by_vectorized_functional_hessian, by_forward_functional_hessian, by_checkpoint),
]


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("way", WAYS)
def test_every_way_to_ask(way):
    for a, b in zip(*(torch.utils._pytree.tree_leaves(way(f)) for f in (ours, dense)), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)


# Compiled graphs


def compiled(f):
    torch._dynamo.reset()
    return torch.compile(f, backend="aot_eager")


def same(got, want):
    for a, b in zip(*(torch.utils._pytree.tree_leaves(tree) for tree in (got, want)), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


def penalty(f):
    def step(q, k, v):
        grads = torch.autograd.grad(loss_of(f)(q, k, v), (q, k, v), create_graph=True)
        return sum(g.square().sum() for g in grads)

    return step


def dual_gradient(f):
    def step(q, k, v, direction):
        with forward_ad.dual_level():
            dual = forward_ad.make_dual(q, direction)
            return tuple(forward_ad.unpack_dual(torch.autograd.grad(loss_of(f)(dual, k, v), dual)[0]))

    return step


def moved_loss(f):
    def step(*t):
        (o, lse), (t_o, t_lse) = torch.func.jvp(f, t[:3], t[3:])
        return (o * t_o).sum() + (lse * t_lse).sum()

    return step


def test_second_derivatives_inside_a_compiled_function(monkeypatch):
    monkeypatch.setattr(torch._dynamo.config, "trace_autograd_ops", True, raising=False)
    outcomes = []
    for f, wrap in ((ours, compiled), (dense, lambda f: f)):
        leaves = [t.requires_grad_() for t in small()]
        wrap(penalty(f))(*leaves).backward()
        with_tangents = [t.requires_grad_() for t in (*small(), *small(7))]
        wrap(moved_loss(f))(*with_tangents).backward()
        moved = wrap(dual_gradient(f))(small()[0].requires_grad_(), *small()[1:], small(7)[0])
        outcomes.append((moved, [t.grad for t in (*leaves, *with_tangents)]))
    same(*outcomes)


def test_backward_twice_through_a_compiled_function_is_refused_by_pytorch():
    q, k, v = (t.requires_grad_() for t in small())
    (dq,) = torch.autograd.grad(compiled(loss_of(ours))(q, k, v), q, create_graph=True)
    with pytest.raises(RuntimeError, match="does not currently support double backward"):
        dq.sum().backward()


def test_traced_double_backward():
    def twice(f):
        def step(q, k, v):
            q = q.detach().requires_grad_()
            (dq,) = torch.autograd.grad(loss_of(f)(q, k, v), q, create_graph=True)
            return torch.autograd.grad(dq.square().sum(), q)[0]

        return step

    q, k, v = small()
    graph = make_fx(twice(ours))(q, k, v)
    assert "tilewise.attention_second" in graph.code
    same(graph(q + 1, k, v), twice(dense)(q + 1, k, v))


@pytest.mark.parametrize("grad", ["olqkv", "k", "ol"])
def test_opcheck(grad):
    (q, k, v), directions = small(), small(7)
    o, lse = ours(q, k, v)
    arguments = (q, k, v, "upper:0,align:bottom_right", None, None, "torch", grad)
    torch.library.opcheck(torch.ops.tilewise.attention_second.default, (o, lse, *arguments, *directions))
    torch.library.opcheck(torch.ops.tilewise.attention_second.default, (None, lse, *arguments, None, directions[1]))


# What is refused


def thrice_in_reverse():
    q, k, v = (t.requires_grad_() for t in small())
    (dq,) = torch.autograd.grad(loss_of(ours)(q, k, v), q, create_graph=True)
    (ddq,) = torch.autograd.grad(dq.square().sum(), q, create_graph=True)
    ddq.sum().backward()


def grad_of_hvp():
    def hvp(*t):
        return torch.func.jvp(torch.func.grad(loss_of(ours)), t, tuple(small(7)))[1].sum()

    torch.func.grad(hvp)(*small())


def jvp_of_grad_of_grad():
    q, k, v = small()

    def twice(q):
        return torch.func.grad(lambda q: torch.func.grad(loss_of(ours))(q, k, v).sum())(q)

    torch.func.jvp(twice, (q,), (q,))


def jacrev_of_hessian():
    torch.func.jacrev(torch.func.hessian(loss_of(ours)))(*(t[:1, :2, :2] for t in small()))


def dual_of_a_double_backward():
    q, k, v = (t.requires_grad_() for t in small())
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(q, small(7)[0])
        (dq,) = torch.autograd.grad(loss_of(ours)(dual, k, v), dual, create_graph=True)
        torch.autograd.grad(dq.square().sum(), k)


def backward_of_a_dual_gradient():
    q, k, v = (t.requires_grad_() for t in small())
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(q, small(7)[0])
        (dq,) = torch.autograd.grad(loss_of(ours)(dual, k, v), dual, create_graph=True)
        forward_ad.unpack_dual(dq).tangent.square().sum().backward()


@pytest.mark.parametrize(
    "attempt",
    [
        *(thrice_in_reverse, grad_of_hvp, jvp_of_grad_of_grad, jacrev_of_hessian),
        *(dual_of_a_double_backward, backward_of_a_dual_gradient),
    ],
)
def test_third_derivatives_are_refused(attempt):
    with pytest.raises(tw.BackendRefused, match=r"no third derivative.*scaled_dot_product_attention"):
        attempt()


def test_what_is_linear_may_be_differentiated_again():
    """A Hessian-vector product by its direction: the derivative of a gradient, and no third one."""

    def along(f):
        def product(direction):
            q, k, v = small()
            return torch.func.jvp(torch.func.grad(loss_of(f)), (q, k, v), (direction, *small(7)[1:]))[1].square().sum()

        return torch.func.grad(product)(small(7)[0])

    same(along(ours), along(dense))


def test_hessian_through_dropout():
    spec, (q, k, v) = tw.dropout(0.4, torch.tensor(5)), (t[:1] for t in small())

    def loss(f):
        return lambda q: f(q, k, v, spec=spec)[0].square().sum()

    attend = functools.partial(tw.attention, backend="torch", return_lse=True)
    same(torch.func.hessian(loss(attend))(q), torch.func.jacrev(torch.func.jacrev(loss(tw.reference)))(q))
    same(torch.func.jacrev(torch.func.jacrev(loss(attend)))(q), torch.func.jacrev(torch.func.jacrev(loss(tw.reference)))(q))
