"""``torch.func.vmap`` and per-sample gradients: the mapped dim is folded into the batch, and the result is that of a loop."""

from __future__ import annotations

import pytest
import torch
from small_calls import draw

import tilewise as tw
from tilewise.testing.terms import draw_terms

SIZE = 3
SHAPES = {
    "q": (2, 4, 9, 8),
    "k": (2, 2, 11, 8),
    "v": (2, 2, 11, 6),
    "bias": (4, 9, 11),
    "slopes": (4,),
    "sink": (2, 4),
    "segment_q": (9,),
    "segment_k": (11,),
    "row_start": (4, 9),
    "row_end": (1, 1, 9),
    "dense": (9, 11),
}
TRAINED = ("q", "k", "v", "bias", "slopes", "sink")
TERMS = {
    "bias": lambda t: tw.bias(t["bias"]),
    "slopes": lambda t: tw.alibi(t["slopes"]),
    "sink": lambda t: tw.sink(t["sink"]),
    "segment": lambda t: tw.segments(t["segment_q"], t["segment_k"]),
    "row": lambda t: tw.row_intervals(t["row_start"], t["row_end"]),
    "dense": lambda t: tw.dense(t["dense"]),
}
SLOTS = {"segment": ("segment_q", "segment_k"), "row": ("row_start", "row_end")}


def make(name: str, seed: int) -> torch.Tensor:
    generator, shape = torch.Generator().manual_seed(seed), SHAPES[name]
    if name.startswith("segment"):
        return torch.randint(0, 2, shape, generator=generator, dtype=torch.int32)
    if name == "row_start":
        return torch.randint(0, 4, shape, generator=generator, dtype=torch.int32)
    if name == "row_end":
        return torch.randint(5, 12, shape, generator=generator, dtype=torch.int32)
    if name == "dense":
        return torch.rand(shape, generator=generator) < 0.7
    return torch.randn(shape, generator=generator)


def names_of(terms: str) -> list[str]:
    return ["q", "k", "v", *(slot for term in terms.split() for slot in SLOTS.get(term, (term,)))]


def stacked(name: str, dim: int | None) -> torch.Tensor:
    """SIZE samples along ``dim``; one for all if it is None."""
    seed = sum(map(ord, name))
    if dim is None:
        return make(name, seed)
    return torch.stack([make(name, seed + i) for i in range(SIZE)], dim=dim)


def attend(terms: str, backend: str):
    names = names_of(terms)

    def function(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        t = dict(zip(names, tensors, strict=True))
        spec = tw.window(8, 3)
        for term in terms.split():
            spec &= TERMS[term](t)
        more = {"spec": spec, "return_lse": True, "return_max_logit": True}
        return tw.attention(t["q"], t["k"], t["v"], backend=backend, **more)

    return function


def loss_of(function):
    def loss(*tensors: torch.Tensor) -> torch.Tensor:
        o, lse, _ = function(*tensors)
        return o.square().sum() + torch.where(lse == float("-inf"), 0.0, lse).sin().sum()

    return loss


def loop(function, in_dims, tensors):
    parts = [[t if d is None else t.select(d, i) for t, d in zip(tensors, in_dims, strict=True)] for i in range(SIZE)]
    return [torch.stack(each) for each in zip(*(function(*p) for p in parts), strict=True)]


def check(terms: str, dims: dict[str, int], backend: str = "torch") -> None:
    """``dims``: the mapped dim of each tensor that is mapped."""
    names = names_of(terms)
    in_dims = tuple(dims.get(name) for name in names)
    tensors = [stacked(name, dim) for name, dim in zip(names, in_dims, strict=True)]
    function = attend(terms, backend)
    for got, want in zip(torch.vmap(function, in_dims)(*tensors), loop(function, in_dims, tensors), strict=True):
        torch.testing.assert_close(got, want)
    argnums = tuple(i for i, name in enumerate(names) if name in TRAINED)
    grad = torch.func.grad(loss_of(function), argnums=argnums)
    for at, got, want in zip(argnums, torch.vmap(grad, in_dims)(*tensors), loop(grad, in_dims, tensors), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5, msg=lambda text, at=at: f"d{names[at]}: {text}")


MAPPED = [
    {"q": 0},
    {"k": 0, "v": 0},
    {"v": 1},
    {"q": 2, "k": 1, "v": 4},
    {"q": -1, "k": 0},
    {"q": 0, "k": 0, "v": 0},
]


@pytest.mark.parametrize("mapped", MAPPED, ids=str)
def test_q_k_and_v(mapped):
    check("", mapped)


@pytest.mark.parametrize("term", TERMS)
@pytest.mark.parametrize("which", ["none", "only", "with q", "last dim", "first slot"])
def test_each_term(term, which):
    own = SLOTS.get(term, (term,))
    if which == "first slot":
        own = own[:1]
    dims = dict.fromkeys(own, -1 if which == "last dim" else 0) if which != "none" else {}
    base = {"q": 0, "k": 1, "v": 0} if which in ("none", "last dim") else {"q": 1} if which == "with q" else {}
    check(term, {**base, **dims})


@pytest.mark.parametrize("backend", ["reference", "torch", "triton"])
@pytest.mark.parametrize("mapped", [("q", "k", "v"), ("q", "bias", "row_start"), ("k", "slopes", "dense"), tuple(SHAPES)], ids=str)
def test_all_terms(mapped, backend):
    check("bias slopes sink segment row dense", {name: min(1, len(SHAPES[name])) for name in mapped}, backend)


@pytest.mark.parametrize("shape", [(11,), (1, 9, 1), (4, 1, 11), (1, 1, 1, 1), (2, 1, 9, 11), (2, 4, 9, 11)], ids=str)
def test_a_shared_bias_has_a_gradient_for_each_sample(shape):
    q, k, v = (draw(SIZE, *SHAPES[name], seed=i) for i, name in enumerate("qkv"))
    bias = draw(*shape, seed=7)

    def loss(bias, q, k, v):
        return tw.attention(q, k, v, spec=tw.bias(bias) & tw.causal(), backend="torch").square().sum()

    got = torch.vmap(torch.func.grad(loss), (None, 0, 0, 0))(bias, q, k, v)
    assert got.shape == (SIZE, *shape)
    for i in range(SIZE):
        leaf = bias.double().requires_grad_()
        exact = tw.reference(q[i].double(), k[i], v[i], tw.bias(leaf) & tw.causal())[0].square().sum()
        torch.testing.assert_close(got[i].double(), torch.autograd.grad(exact, leaf)[0], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("bias_dims", [(None, None), (0, None), (None, 0), (0, 0), (2, 1)], ids=str)
def test_nested(bias_dims):
    """Two maps around one another; ``bias_dims``: those of the bias, outermost first."""
    outer, inner = bias_dims
    q = draw(2, 3, *SHAPES["q"])  # outer at 0, inner at 0 of the rest
    k, v = draw(3, *SHAPES["k"], seed=1), draw(2, *SHAPES["v"], seed=2)
    bias = draw(*SHAPES["bias"], seed=3)
    if inner is not None:
        bias = torch.stack([bias, bias + 1, -bias], dim=inner)
    if outer is not None:
        bias = torch.stack([bias, 2 * bias], dim=outer)

    def loss(q, k, v, bias):
        o, lse = tw.attention(q, k, v, spec=tw.bias(bias) & tw.sink(bias[:, 0, 0]), return_lse=True, backend="torch")
        return o.square().sum() + lse.sum()

    grad = torch.func.grad(loss, argnums=(0, 1, 2, 3))
    got = torch.vmap(torch.vmap(grad, (0, 0, None, inner)), (0, None, 0, outer))(q, k, v, bias)
    for i in range(2):
        for j in range(3):
            at = bias if outer is None else bias.select(outer, i)
            at = at if inner is None else at.select(inner, j)
            for a, b in zip(got, grad(q[i, j], k[j], v[i], at), strict=True):
                torch.testing.assert_close(a[i, j], b, rtol=1e-4, atol=1e-5)


def test_vmap_inside_grad():
    q, k, v = (draw(SIZE, *SHAPES[name], seed=i) for i, name in enumerate("qkv"))
    bias = draw(*SHAPES["bias"], seed=7)

    def total(bias, q):
        o = torch.vmap(lambda q, k, v: tw.attention(q, k, v, spec=tw.bias(bias), backend="torch"))(q, k, v)
        return o.square().sum()

    got = torch.func.grad(total, argnums=(0, 1))(bias, q)
    leaves = [t.clone().requires_grad_() for t in (bias, q)]
    parts = [tw.attention(leaves[1][i], k[i], v[i], spec=tw.bias(leaves[0]), backend="torch").square().sum() for i in range(SIZE)]
    for a, b in zip(got, torch.autograd.grad(sum(parts), leaves), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)
    leaves = [t.clone().requires_grad_() for t in (bias, q)]
    for a, b in zip(got, torch.autograd.grad(total(*leaves), leaves), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("backend", ["reference", "torch", "triton"])
@pytest.mark.parametrize("words", ["", "bias:1hqk sink", "segment"])
@pytest.mark.parametrize("batch", [1, 2])
def test_cotangents_alone(batch, words, backend):
    """What is the same for all samples is not copied where the batch is 1: numbers of rows lie one after the other all the same."""
    spec = draw_terms(words, (batch, 2, 1, 20, 24, 16, 16), seed=3)
    q, k, v = draw(batch, 2, 20, 16, seed=1), draw(batch, 1, 24, 16, seed=2), draw(batch, 1, 24, 16, seed=3)
    (o, lse), pull = torch.func.vjp(lambda *t: tw.attention(*t, spec=spec, return_lse=True, backend=backend), q, k, v)
    many = draw(5, *o.shape, seed=4), draw(5, *lse.shape, seed=5)
    got = torch.vmap(pull)(many)
    for i in range(5):
        for a, b in zip(got, pull((many[0][i], many[1][i])), strict=True):
            torch.testing.assert_close(a[i], b, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["q", "bias", "sink"])
def test_jacrev(name):
    tensors = {n: draw(*shape, seed=i) for i, (n, shape) in enumerate([("q", (1, 2, 3, 2)), ("bias", (3, 3)), ("sink", (2,))])}
    k, v = draw(1, 1, 3, 2, seed=8), draw(1, 1, 3, 2, seed=9)

    def function(t, attend):
        held = {**tensors, name: t}
        return attend(held["q"], k, v, tw.causal() & tw.bias(held["bias"]) & tw.sink(held["sink"]))

    got = torch.func.jacrev(lambda t: function(t, lambda q, k, v, s: tw.attention(q, k, v, spec=s, backend="torch")))(tensors[name])
    want = torch.autograd.functional.jacobian(
        lambda t: function(t, lambda q, *a: tw.reference(q.double(), *a)[0]), tensors[name].double()
    )
    torch.testing.assert_close(got.double(), want, rtol=1e-4, atol=1e-5)


def test_a_plan_is_for_the_calls_that_it_was_made_for():
    q, k, v = (draw(SIZE, *SHAPES[name], seed=i) for i, name in enumerate("qkv"))
    spec = tw.segments(make("segment_q", 1), make("segment_k", 2))
    planned = tw.plan(q[0], k[0], spec, v=v[0], backend="torch", backward=True)

    def loss(spec):
        return lambda q, k, v: tw.attention(q, k, v, spec=spec, backend="torch").square().sum()

    for a, b in zip(*(torch.vmap(torch.func.grad(loss(s), argnums=(0, 1, 2)))(q, k, v) for s in (planned, spec)), strict=True):
        assert torch.equal(a, b)
