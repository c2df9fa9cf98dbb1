"""Second derivatives against autograd through the dense formula in float64, every way to ask for them, and what is refused."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from small_calls import draw
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint

import tilewise as tw
from tilewise.backends import torch_second
from tilewise.spec import Tensors
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

    assert torch.autograd.gradgradcheck(f, leaves, check_fwd_over_rev="dropout" not in words)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("backend", ["torch", "triton", "reference"])
@pytest.mark.parametrize("words", ["", "softcap:2 bias:1hqk alibi sink"])
def test_every_backend_and_dtype(backend, dtype, words):
    call = call_of(words, tw.causal(), dtype=dtype)
    raise_if_failed(run_second(call, backend, words))


@pytest.mark.parametrize("which", ["qk", "v"])
def test_garbage_behind_the_mask_stays_there(which):
    """Keys and values that nobody sees, in the blocks of those that somebody sees."""
    call = call_of("", tw.causal("top_left"), (1, 2, 1, 8, 40, 16, 8))
    tangents = draw_tangents(call, 1)
    want = evaluate_second(call, tangents, "torch")
    for name in which:
        if name != "q":
            getattr(call, name)[:, :, 8:] = 1e30
            getattr(tangents, name)[:, :, 8:] = -1e30
    got = evaluate_second(call, tangents, "torch")
    for name, t in want.items():
        torch.testing.assert_close(got[name], t, rtol=1e-12, atol=1e-12)


# Ways to ask


def small(seed: int = 0, dtype: torch.dtype = torch.float64) -> list[torch.Tensor]:
    shapes = ((2, 4, 3, 4), (2, 2, 4, 4), (2, 2, 4, 3))
    return [draw(*shape, seed=seed + i, dtype=dtype) for i, shape in enumerate(shapes)]


def ours(q, k, v):
    return tw.attention(q, k, v, causal=True, backend="torch", return_lse=True)


def dense(q, k, v):
    return tw.reference(q, k, v, tw.causal())


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
    grads, pull = torch.func.vjp(torch.func.grad(loss_of(f), (0, 1, 2)), *small())
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
    grads, push = torch.func.linearize(torch.func.grad(loss_of(f), (0, 1, 2)), *small())
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

    return torch.vmap(again, (0, None, 1))(*(torch.stack([t, t + 1], dim) if dim is not None else t for t, dim in zip(small(), (0, None, 1))))


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
    o, lse = f(q, k, v)
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
