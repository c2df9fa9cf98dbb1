"""The operators: registration, gradients, what is refused, and torch.func's transforms."""

from __future__ import annotations

import pickle

import pytest
import torch
from small_calls import BACKEND, BACKWARD, FORWARD, causal, close, draw, oracle_gradients, qkv
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint

import tilewise as tw


class Spy(torch.utils._python_dispatch.TorchDispatchMode):
    """Records the ``grad`` letters and the outputs of every operator call."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if func.namespace == "tilewise":
            self.calls.append((func.name().split("::")[1].split(".")[0], args[-1], out))
        return out


# Gradients


@pytest.mark.parametrize("backend", ["torch", "reference"])
@pytest.mark.parametrize("spec", [tw.full(), tw.causal(), tw.causal("top_left"), tw.window(2, 1), tw.window(-1, 0)], ids=str)
@pytest.mark.parametrize("use", ["o", "lse", "both"])
def test_gradient_through_each_output(backend, spec, use):
    def loss(o, lse):
        lse = torch.where(lse == float("-inf"), 0.0, lse)
        return {"o": o.square().sum(), "lse": lse.sin().sum(), "both": o.square().sum() + lse.sin().sum()}[use]

    q, k, v = qkv("qkv", n=11, m=9)
    o, lse = tw.attention(q, k, v, spec=spec, return_lse=True, backend=backend)
    o64, lse64 = tw.reference(q, k, v, spec)
    close(o, o64)
    close(lse, lse64)
    # ``allow_unused``: lse does not depend on v
    grads = torch.autograd.grad(loss(o, lse), (q, k, v), allow_unused=True)
    leaves = [t.detach().double().requires_grad_() for t in (q, k, v)]
    want = torch.autograd.grad(loss(*tw.reference(*leaves, spec)), leaves, allow_unused=True)
    for t, grad, ref in zip((q, k, v), grads, want, strict=True):
        close(torch.zeros_like(t) if grad is None else grad, torch.zeros_like(t) if ref is None else ref)


@pytest.mark.parametrize("backend", ["torch", "reference"])
@pytest.mark.parametrize("mask", [{}, {"causal": True}, {"window": (1, 0)}, {"window": (-1, 0)}])
def test_gradcheck_in_float64(backend, mask):
    q, k, v = (draw(1, h, n, 3, seed=i, dtype=torch.float64).requires_grad_() for i, (h, n) in enumerate(((2, 5), (1, 4), (1, 4))))

    def finite(q, k, v):
        o, lse = tw.attention(q, k, v, return_lse=True, backend=backend, sm_scale=-0.7, **mask)
        return o, lse.masked_fill(lse == float("-inf"), 0.0)

    assert torch.autograd.gradcheck(finite, (q, k, v))


@pytest.mark.parametrize("grad", ["q", "k", "v", "qk", "qv", "kv", "qkv"])
def test_only_gradients_of_inputs_that_need_one_are_computed(grad):
    inputs = qkv(grad)
    with Spy() as spy:
        causal(*inputs).square().sum().backward()
    (_, forward_letters, _), (name, letters, outputs) = spy.calls
    assert (name, letters, forward_letters) == ("attention_backward", grad, grad)
    assert [out.numel() > 0 for out in outputs] == [name in grad for name in "qkvbas"]
    want = oracle_gradients(*inputs, tw.causal(), lambda o, lse: o.square().sum())
    for name, t, ref in zip("qkv", inputs, want, strict=True):
        if name in grad:
            close(t.grad, ref)
        else:
            assert t.grad is None


def test_one_tensor_as_q_k_and_v_gets_the_sum_of_its_gradients():
    x = draw(1, 2, 7, 8).requires_grad_()
    causal(x, x, x).square().sum().backward()
    close(x.grad, sum(oracle_gradients(x, x, x, tw.causal(), lambda o, lse: o.square().sum())))


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_no_graph_where_gradients_are_off(context):
    q, k, v = qkv("qkv")
    with context():
        o, lse = tw.attention(q, k, v, return_lse=True, backend=BACKEND)
    assert not o.requires_grad
    assert not lse.requires_grad
    assert o.is_inference() == (context is torch.inference_mode)
    close(o, tw.reference(q, k, v)[0])


def test_empty_extents_have_zero_gradients():
    for n, m in ((0, 5), (5, 0), (0, 0)):
        q, k, v = qkv("qkv", n=n, m=m)
        o, lse = tw.attention(q, k, v, return_lse=True, backend=BACKEND)
        assert not o.any()
        assert (lse == float("-inf")).all()
        o.sum().backward()
        for t in (q, k, v):
            assert t.grad.shape == t.shape
            assert not t.grad.any()


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpoint(reentrant):
    inputs = qkv("qkv")
    checkpoint(causal, *inputs, use_reentrant=reentrant).square().sum().backward()
    for t, ref in zip(inputs, oracle_gradients(*inputs, tw.causal(), lambda o, lse: o.square().sum()), strict=True):
        close(t.grad, ref)


# What is refused


def squared(q, k, v):
    return causal(q, k, v).square().sum()


def test_create_graph_alone_gives_the_first_derivative():
    q, k, v = qkv("qkv")
    grads = torch.autograd.grad(squared(q, k, v), (q, k, v), create_graph=True)
    for grad, ref in zip(grads, oracle_gradients(q, k, v, tw.causal(), lambda o, lse: o.square().sum()), strict=True):
        close(grad.detach(), ref)


def forward_by_operator(q, k, v):
    with forward_ad.dual_level():
        return FORWARD(forward_ad.make_dual(q, q), k, v, "full", None, None, BACKEND, "")


def forward_by_compiled_function(q, k, v):
    torch._dynamo.reset()
    compiled = torch.compile(causal, fullgraph=True, backend="aot_eager")
    compiled(q, k, v)
    with forward_ad.dual_level():
        return compiled(forward_ad.make_dual(q, q), k, v)


@pytest.mark.parametrize("attempt", [forward_by_operator, forward_by_compiled_function])
def test_dual_tensors_that_reach_a_graph_are_refused(attempt):
    with pytest.raises(tw.BackendRefused, match=r"dual tensors .* compiled .*torch\.func\.jvp"):
        attempt(*qkv())


def test_primal_without_tangent_passes_inside_a_dual_level():
    q, k, v = qkv()
    with forward_ad.dual_level():
        close(causal(q, k, v), tw.reference(q, k, v, tw.causal())[0])


# torch.func


def test_func_grad_and_vjp():
    q, k, v = qkv()
    want = oracle_gradients(q, k, v, tw.causal(), lambda o, lse: o.square().sum())
    for grad, ref in zip(torch.func.grad(squared, argnums=(0, 1, 2))(q, k, v), want, strict=True):
        close(grad, ref)
    o, pull = torch.func.vjp(causal, q, k, v)
    for grad, ref in zip(pull(2 * o), want, strict=True):
        close(grad, ref)


@pytest.mark.parametrize("in_dims", [(0, 0, 0), (0, None, None), (None, 0, 0), (2, 1, 0)], ids=str)
def test_vmap_and_vmap_of_grad_equal_a_loop(in_dims):
    tensors = [torch.stack([t, 2 * t, t - 1], dim=dim) if dim is not None else t for t, dim in zip(qkv(), in_dims, strict=True)]
    parts = [[t if dim is None else t.select(dim, i) for t, dim in zip(tensors, in_dims, strict=True)] for i in range(3)]

    def both(q, k, v):
        return tw.attention(q, k, v, causal=True, return_lse=True, backend=BACKEND)

    for got, want in zip(torch.vmap(both, in_dims)(*tensors), zip(*(both(*p) for p in parts), strict=True), strict=True):
        torch.testing.assert_close(got, torch.stack(want))
    grad = torch.func.grad(lambda *t: both(*t)[0].square().sum() + both(*t)[1].sum(), argnums=(0, 1, 2))
    for got, want in zip(torch.vmap(grad, in_dims)(*tensors), zip(*(grad(*p) for p in parts), strict=True), strict=True):
        torch.testing.assert_close(got, torch.stack(want))


def test_vmap_inside_ordinary_autograd():
    tensors = [torch.stack([t, 2 * t]).requires_grad_() for t in qkv()]
    torch.vmap(causal)(*tensors).square().sum().backward()
    for i in range(2):
        want = oracle_gradients(*(t[i] for t in tensors), tw.causal(), lambda o, lse: o.square().sum())
        for t, ref in zip(tensors, want, strict=True):
            close(t.grad[i], ref, 1e-4)


def test_jacrev_equals_autograd():
    q, k, v = (draw(1, 1, 3, 2, seed=i, dtype=torch.float64) for i in range(3))
    got = torch.func.jacrev(lambda q: causal(q, k, v))(q)
    close(got, torch.autograd.functional.jacobian(lambda q: tw.reference(q, k, v, tw.causal())[0], q), 1e-10)


def test_func_derivative_of_the_bare_operator_is_refused():
    q, k, v = qkv()
    with pytest.raises(tw.BackendRefused, match="work in eager mode"):
        torch.func.grad(lambda q: FORWARD(q, k, v, "full", None, None, BACKEND, "")[0].sum())(q)


# Registration

LAYOUTS = {
    "contiguous": lambda b, h, n, d: draw(b, h, n, d),
    "transposed": lambda b, h, n, d: draw(b, n, h, d).transpose(1, 2),
    "batch_inside": lambda b, h, n, d: draw(n, b, h, d).permute(1, 2, 0, 3),
    "last_dim_strided": lambda b, h, n, d: draw(b, h, d, n).transpose(2, 3),
    "padded": lambda b, h, n, d: draw(b, h, n + 1, 2 * d)[:, :, 1:, 1::2],
    "expanded": lambda b, h, n, d: draw(1, 1, n, d).expand(b, h, n, d),
}
SIZES = [  # batch, heads_q, heads_kv, seqlen_q, seqlen_k
    *[(2, 4, 2, 5, 7), (1, 1, 1, 5, 7), (2, 4, 2, 1, 1), (1, 4, 1, 1, 7)],
    *[(0, 4, 2, 5, 7), (2, 4, 2, 0, 7), (2, 4, 2, 5, 0), (2, 2, 2, 1, 0), (2, 0, 0, 5, 7)],
]


def metadata(outputs):
    return [(t.shape, t.dtype, t.stride(), t.device.type) for t in outputs]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_fake_kernels_have_the_strides_of_the_real_ones(layout):
    for batch, heads_q, heads_kv, n, m in SIZES:
        make = LAYOUTS[layout]
        tensors = [make(batch, heads_q, n, 4), make(batch, heads_kv, m, 4), LAYOUTS["transposed"](batch, heads_kv, m, 3)]
        settings = ("full", None, None, BACKEND)
        real = FORWARD(*tensors, *settings, "qkv")
        real_grads = [BACKWARD(*real[:2], *tensors, *real[:2], *settings, grad) for grad in ("qkv", "q", "kv")]
        with torch._subclasses.FakeTensorMode() as mode:
            fake_inputs = [mode.from_tensor(t) for t in tensors]
            fake = FORWARD(*fake_inputs, *settings, "qkv")
            fake_grads = [BACKWARD(fake[0], None, *fake_inputs, *fake[:2], *settings, grad) for grad in ("qkv", "q", "kv")]
        for ours, theirs in zip((fake, *fake_grads), (real, *real_grads), strict=True):
            assert metadata(ours) == metadata(theirs)


@pytest.mark.parametrize("heads, seqlen", [(1, 5), (4, 1), (1, 1)])
def test_stride_of_a_dim_of_size_one_changes_nothing(heads, seqlen):
    shape = (2, heads, seqlen, 4)
    plain = draw(*shape)
    odd = [3 if size == 1 else stride for size, stride in zip(shape, plain.stride(), strict=True)]
    twin = plain.as_strided(shape, odd)
    results = []
    for t in (plain, twin):
        outputs = FORWARD(t, t, t, "full", None, None, BACKEND, "qkv")[:2]
        results.append((*outputs, *BACKWARD(*outputs, t, t, t, *outputs, "full", None, None, BACKEND, "qkv")))
    assert metadata(results[0]) == metadata(results[1])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_output_keeps_the_memory_order_of_q():
    q, k, v = (draw(2, n, h, 8).transpose(1, 2) for n, h in ((5, 4), (7, 2), (7, 2)))
    o = tw.attention(q, k, v, backend=BACKEND)
    assert o.transpose(1, 2).is_contiguous()
    assert tw.attention(q.contiguous(), k, v, backend=BACKEND).is_contiguous()


@pytest.mark.parametrize("grad", ["", "qkv", "k"])
@pytest.mark.parametrize("layout", ["contiguous", "transposed", "padded"])
def test_opcheck_forward(layout, grad):
    tensors = [LAYOUTS[layout](2, h, n, 4).detach() for h, n in ((4, 5), (2, 7), (2, 7))]
    inputs = [t.requires_grad_(name in grad) for name, t in zip("qkv", tensors, strict=True)]
    for mask in ("full", "upper:0,align:bottom_right"):
        torch.library.opcheck(FORWARD.default, (*inputs, mask, 0.3, None, BACKEND, grad))


def test_opcheck_backward():
    tensors = qkv()
    o, lse, *_ = FORWARD(*tensors, "full", None, None, BACKEND, "qkv")
    for do, dlse, grad in ((o, lse, "qkv"), (None, lse, "k"), (o, None, "v")):
        torch.library.opcheck(BACKWARD.default, (do, dlse, *tensors, o, lse, "full", None, None, BACKEND, grad))


def test_a_fault_inside_a_backend_names_the_backend_and_the_problem(monkeypatch):
    from tilewise.backends import module_of

    def fail(*args):
        raise ValueError("tile of 3 rows")

    monkeypatch.setattr(module_of(BACKEND), "forward", fail)
    with pytest.raises(tw.BackendBroken, match=r"'torch' accepted .* forward pass: ValueError: tile of 3 rows\nProblem: dtype="):
        causal(*qkv())


def test_calls_share_a_binding_only_if_their_alignment_agrees():
    from tilewise import ops

    storage = torch.randn(2 * 16 * 16 + 1)
    aligned, shifted = (storage[start : start + 512].view(1, 2, 16, 16) for start in (0, 1))
    assert aligned.data_ptr() % 16 == 0
    assert shifted.data_ptr() % 16 != 0
    arguments = ("full", None, None, "torch", "")
    first = ops._bind(aligned, aligned, aligned, *arguments)
    again = ops._bind(aligned, aligned, aligned, *arguments)
    other = ops._bind(aligned, shifted, aligned, *arguments)
    assert again is first
    assert first.problem.bulk
    assert not other.problem.bulk
    scaled = ops._bind(aligned, aligned, aligned, "full", 0.5, None, "torch", "")
    assert scaled.problem.sm_scale == 0.5


def test_remembered_bindings_are_bounded(monkeypatch):
    from tilewise import ops

    monkeypatch.setattr(ops, "_bound", {})
    monkeypatch.setattr(ops, "_MOST_BOUND", 3)
    for n in range(1, 9):
        t = torch.randn(1, 1, n, 4)
        ops._bind(t, t, t, "full", None, None, "torch", "")
        assert len(ops._bound) <= 3


def test_problem_keeps_its_hash_to_its_own_process():
    t = torch.randn(1, 1, 4, 4)
    problem = tw.Problem.bind(t, t, t, tw.full())
    copy = pickle.loads(pickle.dumps(problem))
    assert hash(problem) == hash(copy)
    assert copy == problem
    assert "_hash" not in pickle.loads(pickle.dumps(problem)).__dict__
