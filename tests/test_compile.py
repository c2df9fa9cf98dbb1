"""Attention under torch.compile, torch.export and autocast."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
from small_calls import BACKEND, BACKWARD, FORWARD, causal, close, draw, oracle_gradients, qkv

import tilewise as tw

# torch.compile


@pytest.fixture
def fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


CALLS = {
    "plain": {},
    "causal": {"causal": True},
    "window": {"window": (3, 0), "align": "top_left"},
    "list_window": {"window": [3, None]},
    "spec": {"spec": tw.Spec(upper=1, lower=4)},
    "scale_and_name": {"sm_scale": 0.3, "precision": "ieee", "causal": True},
}


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("return_lse", [False, True])
def test_compiled_equals_eager(fresh_compiler, call, return_lse):
    def loss(q, k, v):
        out = tw.attention(q, k, v, return_lse=return_lse, backend=BACKEND, **CALLS[call])
        return (out[0].square().sum() + out[1].sin().sum()) if return_lse else out.square().sum()

    eager, compiled = qkv("qkv"), qkv("qkv")
    want = loss(*eager)
    want.backward()
    got = torch.compile(loss, fullgraph=True, backend="aot_eager")(*compiled)
    got.backward()
    torch.testing.assert_close(got, want)
    for a, b in zip(compiled, eager, strict=True):
        torch.testing.assert_close(a.grad, b.grad)


@pytest.mark.parametrize("how", ["dynamic", "mark_dynamic"])
def test_one_graph_serves_every_length(fresh_compiler, how):
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(causal, fullgraph=True, backend=counter, dynamic=True if how == "dynamic" else None)
    for n, m in ((9, 11), (16, 16), (5, 20), (33, 17)):
        inputs, same = qkv("qkv", n=n, m=m), qkv("qkv", n=n, m=m)
        if how == "mark_dynamic":
            for t in inputs:
                torch._dynamo.mark_dynamic(t, 2)
        compiled(*inputs).square().sum().backward()
        causal(*same).square().sum().backward()
        for a, b in zip(inputs, same, strict=True):
            torch.testing.assert_close(a.grad, b.grad)
    assert counter.frame_count == 1


def test_window_and_scale_as_arguments_of_a_compiled_function(fresh_compiler):
    def windowed(q, k, v, left, scale):
        return tw.attention(q, k, v, window=(left, 0), sm_scale=scale, backend=BACKEND)

    compiled = torch.compile(windowed, fullgraph=True, backend="aot_eager")
    for left, scale in ((2, 0.5), (3, 0.25), (4, 0.125)):
        torch.testing.assert_close(compiled(*qkv(), left, scale), windowed(*qkv(), left, scale))


def test_inductor_between_products_and_transposed_heads(fresh_compiler):
    def block(x, w_q, w_kv, w_o):
        q, k, v = ((x @ w).unflatten(-1, (2, 8)).transpose(1, 2) for w in (w_q, w_kv, w_kv))
        return tw.attention(q, k, v, causal=True, backend=BACKEND).transpose(1, 2).flatten(2) @ w_o

    x, w_q, w_kv, w_o = draw(2, 6, 16), draw(16, 16, seed=1).requires_grad_(), draw(16, 16, seed=2), draw(16, 4, seed=3)
    want, got = block(x, w_q, w_kv, w_o), torch.compile(block, fullgraph=True)(x, w_q, w_kv, w_o)
    torch.testing.assert_close(got, want)
    upstream = draw(*want.shape, seed=4)
    grads = (torch.autograd.grad(out, w_q, upstream)[0] for out in (got, want))
    torch.testing.assert_close(*grads, rtol=1e-4, atol=1e-3)


FIRST_CALL = """
import warnings
import torch
import tilewise as tw
warnings.simplefilter("error")
q, k, v = (torch.randn(1, 2, 7, 8, requires_grad=True) for _ in range(3))
loss = torch.compile(lambda *t: tw.attention(*t, causal=True, backend="torch").square().sum(), fullgraph=True, backend="aot_eager")
loss(q, k, v).backward()
got = [t.grad for t in (q, k, v)]
tw.attention(q.detach(), k, v, causal=True, backend="torch")
want = torch.autograd.grad(tw.reference(q, k, v, tw.causal())[0].square().sum(), (q, k, v))
assert all(torch.allclose(a, b, atol=1e-4) for a, b in zip(got, want)), "gradients differ"
print("equal")
"""


def test_compiled_call_is_the_first_of_a_process():
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-c", FIRST_CALL], capture_output=True, text=True, env=env, timeout=120, check=False)
    assert done.stdout == "equal\n", done.stderr[-3000:]


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"window": (-3, 1)}, "window's left is -3"),
        ({"sm_scale": float("nan")}, "sm_scale is nan"),
        ({"backend": "cudnn"}, "backend is 'cudnn', expected one of 'auto'"),
        ({"precision": "fp8"}, "precision is 'fp8'"),
        ({"align": "middle"}, "align is 'middle'"),
    ],
)
def test_compiled_bad_argument_is_named(fresh_compiler, arguments, message):
    with pytest.raises(Exception, match=message):
        torch.compile(lambda *t: tw.attention(*t, **arguments), fullgraph=True, backend="aot_eager")(*qkv())


def test_compiled_bad_shape_is_named(fresh_compiler):
    q, k, v = qkv()
    with pytest.raises(Exception, match="k has 2 heads but q has 3: heads_q must be a multiple of heads_kv"):
        torch.compile(causal, fullgraph=True, backend="aot_eager")(q[:, :3], k, v)


# torch.export


class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = torch.nn.Linear(8, 8)

    def forward(self, x):
        y = self.inner(x)
        o, lse = tw.attention(y, y, y, causal=True, return_lse=True, backend=BACKEND)
        return o + lse[..., None]


@pytest.mark.parametrize("strict", [False, True])
def test_exported_module_runs_and_trains_like_eager(fresh_compiler, strict):
    torch.manual_seed(0)
    block = Block()
    length = torch.export.Dim("length", min=2, max=1000)
    program = torch.export.export(block, (draw(1, 2, 8, 8),), dynamic_shapes={"x": {2: length}}, strict=strict)
    assert any(node.target is FORWARD.default for node in program.graph.nodes)
    exported = program.module()
    for n in (8, 21):
        x = draw(1, 2, n, 8, seed=n)
        torch.testing.assert_close(exported(x), block(x))
        want = torch.autograd.grad(block(x).square().sum(), list(block.parameters()))
        got = torch.autograd.grad(exported(x).square().sum(), list(exported.parameters()))
        for a, b in zip(got, want, strict=True):
            torch.testing.assert_close(a, b)
    # Without parameters that train there is no graph.
    with torch.no_grad():
        assert not exported(draw(1, 2, 8, 8)).requires_grad


# Autocast


def test_autocast_casts_floats_and_gradients_come_back_in_their_dtype():
    q, k, v = qkv("qkv")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        o, lse = tw.attention(q, k, v, causal=True, return_lse=True, backend=BACKEND)
    assert (o.dtype, lse.dtype) == (torch.bfloat16, torch.float32)
    halves = [t.detach().bfloat16().requires_grad_() for t in (q, k, v)]
    want, want_lse = tw.attention(*halves, causal=True, return_lse=True, backend=BACKEND)
    assert torch.equal(o, want)
    assert torch.equal(lse, want_lse)
    o.float().square().sum().backward()
    want.float().square().sum().backward()
    for t, half in zip((q, k, v), halves, strict=True):
        assert t.grad.dtype == torch.float32
        assert torch.equal(t.grad, half.grad.float())


def test_autocast_takes_mixed_dtypes():
    q, k, v = qkv()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        o = causal(q, k.bfloat16(), v.half())
    assert torch.equal(o, causal(q.bfloat16(), k.bfloat16(), v.half().bfloat16()))
    with pytest.raises(tw.InvalidInput, match=r"k has dtype bfloat16 but q has float32.*torch\.autocast"):
        causal(q, k.bfloat16(), v)


def test_autocast_leaves_float64_alone():
    q, k, v = qkv("qkv", dtype=torch.float64)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        o = causal(q, k, v)
        grads = torch.autograd.grad(o.square().sum(), (q, k, v))
    assert o.dtype == torch.float64
    for grad, ref in zip(grads, oracle_gradients(q, k, v, tw.causal(), lambda o, lse: o.square().sum()), strict=True):
        close(grad, ref, 1e-10)


@pytest.mark.parametrize("backend", ["torch", "reference"])
def test_autocast_is_off_inside_a_backend(monkeypatch, backend):
    from tilewise.backends import module_of

    module, states = module_of(backend), []

    def watched(work):
        def watch(*args):
            states.append(torch.is_autocast_enabled("cpu"))
            work(*args)

        return watch

    for direction in ("forward", "backward"):
        monkeypatch.setattr(module, direction, watched(getattr(module, direction)))
    q, k, v = qkv()
    settings = ("full", None, None, backend, "qkv")
    o, lse, *_ = FORWARD(q, k, v, *settings)
    grads = BACKWARD(o, lse, q, k, v, o, lse, *settings)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(FORWARD(q, k, v, *settings)[0], o)
        for a, b in zip(BACKWARD(o, lse, q, k, v, o, lse, *settings), grads, strict=True):
            assert torch.equal(a, b)
    assert states == [False] * 4


def test_autocast_in_and_around_a_compiled_function(fresh_compiler):
    inputs = qkv()

    def inside(q, k, v):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return causal(q, k, v)

    want = inside(*inputs)
    assert torch.equal(torch.compile(inside, fullgraph=True, backend="aot_eager")(*inputs), want)
    compiled = torch.compile(causal, fullgraph=True, backend="aot_eager")
    assert compiled(*inputs).dtype == torch.float32
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(compiled(*inputs), want)
