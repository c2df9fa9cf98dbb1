"""Only the gradients that a backward pass asks for are computed, whatever else could have been asked for."""

from __future__ import annotations

import itertools

import pytest
import torch
from small_calls import BACKEND, causal, close, draw, oracle_gradients, qkv
from torch.utils.checkpoint import checkpoint

import tilewise as tw
from tilewise import ops

SUBSETS = ["".join(c) for n in (1, 2, 3) for c in itertools.combinations("qkv", n)]


@pytest.fixture
def letters(monkeypatch):
    """The letters of every backward pass that a backend runs."""
    noted, run = [], ops._run

    def note(backend, problem, direction, *tensors):
        if direction == "backward":
            noted.append(problem.grad)
        run(backend, problem, direction, *tensors)

    monkeypatch.setattr(ops, "_run", note)
    return noted


def squared(q, k, v):
    return causal(q, k, v).square().sum()


def wanted(inputs, names):
    grads = oracle_gradients(*inputs, tw.causal(), lambda o, lse: o.square().sum())
    return [grad for name, grad in zip("qkv", grads, strict=True) if name in names]


@pytest.mark.parametrize("leaves", [True, False])
@pytest.mark.parametrize("names", SUBSETS)
def test_a_part_of_the_gradients(letters, names, leaves):
    base = qkv("qkv")
    inputs = base if leaves else [t * 1.0 for t in base]
    asked = [t for name, t in zip("qkv", inputs, strict=True) if name in names]
    for more in ({}, {"create_graph": True}, {"retain_graph": True}):
        grads = torch.autograd.grad(squared(*inputs), asked, **more)
        for grad, want in zip(grads, wanted(inputs, names), strict=True):
            close(grad.detach(), want)
    assert letters == [names] * 3


@pytest.mark.parametrize("names", SUBSETS)
def test_backward_into_some_leaves(letters, names):
    base = qkv("qkv")
    squared(*(t * 1.0 for t in base)).backward(inputs=[t for name, t in zip("qkv", base, strict=True) if name in names])
    squared(*base).backward(inputs=[t for name, t in zip("qkv", base, strict=True) if name in names])
    assert letters == [names] * 2
    for name, t, want in zip("qkv", base, wanted(base, "qkv"), strict=True):
        if name in names:
            close(t.grad, 2 * want)
        else:
            assert t.grad is None


def test_backward_into_everything(letters):
    base = qkv("qkv")
    squared(*base).backward()
    assert letters == ["qkv"]
    for t, want in zip(base, wanted(base, "qkv"), strict=True):
        close(t.grad, want)


def test_one_input_behind_several(letters):
    q, _, v = qkv("qkv", n=11)
    x = q[:, :2]
    o = tw.attention(q, x * 2, v, backend=BACKEND)
    grad = torch.autograd.grad(o.square().sum(), q)[0]
    leaf = q.detach().double().requires_grad_()
    close(grad, torch.autograd.grad(tw.reference(leaf, leaf[:, :2] * 2, v)[0].square().sum(), leaf)[0])
    assert letters == ["qk"]
    # One node for three outputs: what it asks for cannot be told apart.
    y = draw(2, 2, 9, 24).requires_grad_()
    parts = y.chunk(3, dim=-1)
    grad = torch.autograd.grad(squared(*parts), parts[1])[0]
    close(grad, oracle_gradients(*parts, tw.causal(), lambda o, lse: o.square().sum())[1])
    assert letters == ["qk", "qkv"]


@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize("names", ["bias", "slopes", "sink", "bias sink", "slopes k", "v", "q sink"])
def test_tensors_of_a_spec(letters, names, backend):
    q, k, v = (t.detach()[:1, :, :, :6].requires_grad_() for t in qkv())
    held = {"bias": draw(9, 11, seed=5), "slopes": draw(4, seed=6).abs(), "sink": draw(1, 4, seed=7), "q": q, "k": k, "v": v}
    held = {name: t.detach().requires_grad_() for name, t in held.items()}

    def loss(attend, t):
        spec = tw.bias(t["bias"]) & tw.alibi(t["slopes"]) & tw.sink(t["sink"]) & tw.causal()
        o, lse = attend(t["q"], t["k"], t["v"], spec)
        return o.square().sum() + lse.sum()

    def ours(q, k, v, spec):
        return tw.attention(q, k, v, spec=spec, return_lse=True, backend=backend)

    grads = torch.autograd.grad(loss(ours, held), [held[name] for name in names.split()])
    exact = {name: t.detach().double().requires_grad_() for name, t in held.items()}
    want = torch.autograd.grad(loss(tw.reference, exact), [exact[name] for name in names.split()])
    for a, b in zip(grads, want, strict=True):
        close(a, b, 1e-4)
    by_name = {"bias": "b", "slopes": "a", "sink": "s"}
    assert letters == ["".join(sorted((by_name.get(n, n) for n in names.split()), key="qkvbas".index))]


def test_fewer_kernels_run(monkeypatch):
    triton = pytest.importorskip("tilewise.backends.triton", reason="the kernels are Triton's")
    ran, run = [], triton.Plan.run

    def note(plan, *tensors):
        ran.append((plan.kernel.__name__, plan.options.get("NEED_DK"), plan.options.get("NEED_DV")))
        run(plan, *tensors)

    monkeypatch.setattr(triton.Plan, "run", note)
    q, k, v = qkv("qkv")
    o = tw.attention(q, k, v, causal=True, backend="triton")
    seen = {}
    for names in ("q", "k", "v", "qkv"):
        ran.clear()
        torch.autograd.grad(o.sum(), [t for name, t in zip("qkv", (q, k, v), strict=True) if name in names], retain_graph=True)
        seen[names] = list(ran)
    delta, dq = ("_delta_kernel", None, None), ("_dq_kernel", None, None)
    assert seen == {
        "q": [delta, dq],
        "k": [delta, ("_dkdv_kernel", True, False)],
        "v": [("_dkdv_kernel", False, True)],
        "qkv": [delta, ("_dkdv_kernel", True, True), dq],
    }


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpoint(letters, reentrant):
    base = qkv("qkv")
    o = checkpoint(causal, *base, use_reentrant=reentrant)
    if reentrant:  # refuses torch.autograd.grad, and asks for all inside
        o.square().sum().backward()
        grad = base[1].grad
    else:
        grad = torch.autograd.grad(o.square().sum(), base[1])[0]
    close(grad, wanted(base, "k")[0])
    assert letters == ["qkv" if reentrant else "k"]


def test_compiled(letters):
    torch._dynamo.reset()
    base = qkv("qkv")
    compiled = torch.compile(squared, fullgraph=True, backend="aot_eager")
    for names in ("k", "qv"):
        asked = [t for name, t in zip("qkv", base, strict=True) if name in names]
        for grad, want in zip(torch.autograd.grad(compiled(*base), asked), wanted(base, names), strict=True):
            close(grad, want)
    assert letters == ["qkv"] * 2  # a graph is made before it is known


def test_functorch():
    base = qkv()
    for at, want in enumerate(wanted(base, "qkv")):
        close(torch.func.grad(squared, argnums=at)(*base), want)
    close(torch.func.vjp(lambda k: squared(base[0], k, base[2]), base[1])[1](torch.ones(()))[0], wanted(base, "k")[0])


def test_batched_gradients():
    q, k, v = qkv("qkv")
    o = causal(q, k, v)
    do = torch.stack([2 * o, o]).detach()
    grads = torch.autograd.grad(o, [k], do, is_grads_batched=True)[0]
    for grad, factor in zip(grads, (1.0, 0.5), strict=True):
        close(grad, factor * wanted((q, k, v), "k")[0])


def test_without_the_question_all_are_computed(letters, monkeypatch):
    monkeypatch.setattr(ops, "_will_execute", None)
    base = qkv("qkv")
    close(torch.autograd.grad(squared(*base), base[1])[0], wanted(base, "k")[0])
    assert letters == ["qkv"]
