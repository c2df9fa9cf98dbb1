"""Kept launches of calls whose specs name tensors: what is kept is made of holes, and every call fills them anew."""

from __future__ import annotations

import dataclasses
import gc
import weakref
from types import SimpleNamespace

import pytest
import torch

import tilewise as tw
from tilewise import ops
from tilewise.arch import ARCHS, Runtime
from tilewise.plan import Place
from tilewise.spec import SLOTS, Tensors

pytest.importorskip("triton", reason="kept launches are launches of Triton kernels")

from tilewise.backends import holes, launching
from tilewise.backends.launching import Plan

N, HEADS = 128, 4


class Kernel:
    """A Triton function with these parameters, whose ordinary launches and kept ones are noted."""

    pre_run_hooks = ()

    def __init__(self, names):
        self.params = [SimpleNamespace(name=n, do_not_specialize=False) for n in names]
        self.launches = []

    def __getitem__(self, grid):
        def launch(*args, **options):
            self.launches.append(("ordinary", args))
            run = lambda *given: self.launches.append(("kept", given[9:]))  # noqa: E731
            return SimpleNamespace(run=run, function=1, packed_metadata=(4, 1, 0), metadata=None)

        return launch

    @property
    def roads(self):
        return [road for road, _ in self.launches]


@pytest.fixture
def device(monkeypatch):
    """CPU tensors pass for tensors of an H200, whose kernels are never run."""
    from tilewise.backends import hopper, tables, triton
    from tilewise.backends.hopper import bwd_launch

    software = Runtime((3, 9))
    monkeypatch.setattr("tilewise.problem.arch_of", lambda device: ARCHS["sm_90"])
    monkeypatch.setattr("tilewise.problem.runtime", lambda: software)
    monkeypatch.setattr(launching, "runtime", lambda: software)
    monkeypatch.setattr(launching, "_compiled", {})
    monkeypatch.setattr(launching, "_current_device", lambda: 0)
    monkeypatch.setattr(launching, "_current_stream", lambda device: 0)
    monkeypatch.setattr(launching, "_direct", lambda *_: None)
    for name in ("_bound", "_before", "_problems"):
        monkeypatch.setattr(ops, name, {})
    monkeypatch.setattr(torch.Tensor, "get_device", lambda _: 0)
    monkeypatch.setattr(hopper, "_counter", lambda device: torch.zeros(2, dtype=torch.int32))
    kernels = {}
    modules = (triton.fwd, triton.bwd, triton.dbias, hopper.fwd, bwd_launch.bwd, bwd_launch.bwd_dq, bwd_launch.bwd_rows, tables)
    for module in modules:
        for name, kernel in list(vars(module).items()):
            if name.endswith("_kernel") and hasattr(kernel, "arg_names"):
                kernels[f"{module.__name__.removeprefix('tilewise.backends.')}.{name}"] = made = Kernel(kernel.arg_names)
                monkeypatch.setattr(module, name, made)
    caches = [v for m in (triton, hopper, bwd_launch, tables) for v in vars(m).values() if hasattr(v, "cache_clear")]
    for cache in caches:
        cache.cache_clear()
    yield kernels
    for cache in caches:
        cache.cache_clear()


def numbers_in(value):
    """All numbers in nested tuples."""
    return [x for v in value for x in numbers_in(v)] if isinstance(value, tuple | list) else [value]


def qkv(grad=False):
    return [torch.randn(1, HEADS, N, 64, dtype=torch.bfloat16, requires_grad=grad) for _ in range(3)]


def aligned(t, off=0):
    """The same tensor at an address that is ``off`` elements beyond a multiple of 16 bytes."""
    room = torch.zeros(t.numel() + 32, dtype=t.dtype)
    first = (-room.data_ptr() % 64) // t.element_size() + off
    return room[first : first + t.numel()].view(t.shape).copy_(t)


def ids(dtype=torch.int32, off=0):
    return aligned((torch.arange(N) // 32).to(dtype), off)


SPECS = {
    "segments": lambda: tw.causal() & tw.segments(ids(), ids()),
    "intervals": lambda: tw.row_intervals(torch.zeros(N, dtype=torch.int32), torch.full((N,), N, dtype=torch.int32)),
    "sink": lambda: tw.causal() & tw.sink(torch.randn(HEADS)),
    "alibi": lambda: tw.causal() & tw.alibi(torch.rand(HEADS)),
    "bias": lambda: tw.bias(torch.randn(HEADS, 1, N)),
    "dense": lambda: tw.dense(torch.rand(N, N) < 0.5),
    "dropout": lambda: tw.dropout(0.1, torch.tensor(3)),
}
CASES = [(b, s) for b in ("triton", "hopper") for s in SPECS if b == "triton" or s not in ("bias", "dense", "dropout")]


def roads(kernels):
    return [road for kernel in kernels.values() for road in kernel.roads]


@pytest.mark.parametrize("backend, name", CASES)
@pytest.mark.parametrize("planned", [False, True])
def test_the_second_call_launches_what_was_kept(device, backend, name, planned):
    spec = SPECS[name]()
    for t in spec.tensors[:3]:
        if t is not None and (backend, name) != ("hopper", "alibi"):  # it has no gradient of slopes
            t.requires_grad_()
    inputs = qkv(grad=True)
    spec = tw.plan(*inputs[:2], spec, backend=backend) if planned else spec
    leaves = [t for t in spec.tensors[:3] if t is not None and t.requires_grad]

    def call(inputs):
        o, lse = tw.attention(*inputs, spec=spec, backend=backend, return_lse=True)
        torch.autograd.grad((o.float().sum() + lse.sum()), [*inputs, *leaves])

    for _ in range(3):  # the second takes up what the first compiled
        call(inputs)
    before = len(roads(device))
    call(qkv(grad=True))
    assert len(roads(device)) > before
    for kernel in device.values():
        kernel.launches.clear()
    call(inputs)
    assert roads(device)
    assert set(roads(device)) == {"kept"}


@pytest.mark.parametrize("backend", ["triton", "hopper"])
def test_a_call_hands_over_the_addresses_of_its_own_tensors(device, backend):
    kernel = device["triton.fwd._fwd_kernel" if backend == "triton" else "hopper.fwd._fwd_kernel"]
    inputs = qkv()
    for _ in range(4):
        first, second = ids(), ids()
        spec = tw.plan(*inputs[:2], tw.causal() & tw.segments(first, second), backend=backend)
        tw.attention(*inputs, spec=spec, backend=backend)
        given = numbers_in(kernel.launches[-1][1])
        places = [t.data_ptr() for t in (first, second)]
        if kernel.launches[-1][0] == "kept":
            assert set(places) <= {x for x in given if isinstance(x, int)}
            table, rows = spec.tensors.plan.data_ptr(), N // int(spec.plan.split("/")[2].split("x")[0])
            assert {table, table + 4 * 2 * rows} <= {x for x in given if isinstance(x, int)}
        else:
            assert set(places) <= {x.data_ptr() for x in given if isinstance(x, torch.Tensor)}
    assert kernel.roads[-1] == "kept"


CHANGES = {
    "dtype": lambda: ids(torch.int64),
    "alignment": lambda: ids(off=1),
    "strides": lambda: ids().repeat_interleave(3)[::3],
    "broadcast": lambda: torch.zeros(1, dtype=torch.int32).expand(N),
}


@pytest.mark.parametrize("backend", ["triton", "hopper"])
@pytest.mark.parametrize("change", CHANGES)
def test_another_kernel_is_compiled_after_a_change_of(change, device, backend):
    kernel = device["triton.fwd._fwd_kernel" if backend == "triton" else "hopper.fwd._fwd_kernel"]
    inputs = qkv()
    for _ in range(2):
        tw.attention(*inputs, spec=tw.segments(ids(), ids()), backend=backend)
    assert kernel.roads[-1] == "kept"
    kernel.launches.clear()
    for _ in range(2):
        other = CHANGES[change]()
        tw.attention(*inputs, spec=tw.segments(other, other), backend=backend)
    assert "ordinary" in kernel.roads
    kernel.launches.clear()
    tw.attention(*inputs, spec=tw.segments(ids(), ids()), backend=backend)
    assert set(kernel.roads) == {"kept"}


def test_nothing_holds_the_tensors_of_a_spec(device):
    inputs = qkv()
    spec = tw.plan(*inputs[:2], SPECS["segments"]() & SPECS["sink"](), backend="triton")
    for _ in range(3):
        tw.attention(*inputs, spec=spec, backend="triton")
    watched = [weakref.ref(t) for t in (*spec.tensors, *inputs) if t is not None]
    assert len(watched) == 7
    for kernel in device.values():
        kernel.launches.clear()
    del spec, inputs
    gc.collect()
    assert [w() for w in watched] == [None] * 7


def test_holes_in_nested_tuples_are_filled():
    x, table = torch.zeros(4), torch.arange(10, dtype=torch.int32)
    layout = holes.layout_of((x, None, table))
    first, nothing, packed = holes.holes_of(layout)
    assert nothing is None
    assert (first.place, first.dtype, first.stride(), packed.place) == (0, torch.float32, (1,), 1)
    kernel = Kernel(("pair", "number"))
    lists = holes.table_of_holes(packed, Place(2, (1, 1, 2, 2)))
    plan = Plan(kernel, (1,), (), ((first, (None, lists.tiles, 7)), 5), {}, named=2)
    pair, number = plan.args((x, table))
    assert pair[0] is x
    assert (pair[1][0], pair[1][2], number) == (None, 7, 5)
    assert pair[1][1].tolist() == [6, 7, 8, 9]
    assert holes.addressed(plan.numbers, [16, 32]) == ((16, (None, 32 + 4 * 6, 7)), 5)
    assert holes.has_holes(plan.numbers)
    assert not holes.has_holes((1, (2, None)))


def test_a_table_is_found_where_it_was_written():
    holes_ = holes.holes_of(holes.layout_of((*(None,) * SLOTS.index("plan"), torch.zeros(20, dtype=torch.int32), *(None,) * 4)))
    tensors, mask = holes.mask_of(holes_, Place(3, (1, 2, 2, 3)))
    assert tensors == Tensors()
    assert mask is not None
    assert mask.table.steps == (0, 2, 3)
    assert (mask.table.counts.offset, mask.table.tiles.offset) == (12, 12 + 4 * 8)


# The road around the dispatcher.


@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("grad", [False, True])
def test_specs_with_tensors_skip_the_dispatcher(name, grad, monkeypatch):
    q, k, v = (t.float().detach().requires_grad_(grad) for t in qkv())
    spec = SPECS[name]()
    want = tw.attention(q, k, v, spec=spec, return_lse=True, backend="torch")
    with monkeypatch.context() as patch:
        patch.setattr("tilewise.api.attention_op", None)
        got = tw.attention(q, k, v, spec=spec, return_lse=True, backend="torch")
    assert all(torch.equal(a, b) and a.requires_grad == grad for a, b in zip(want, got, strict=True))


class Own(torch.Tensor):
    pass


@pytest.mark.parametrize("change", [lambda t: t.as_subclass(Own), torch._neg_view], ids=["subclass", "negated view"])
def test_one_unusual_tensor_of_the_spec_goes_by_the_dispatcher(change, monkeypatch):
    q, k, v = (t.float() for t in qkv())
    sink = torch.randn(HEADS)
    want = tw.attention(q, k, v, spec=tw.sink(change(sink.clone())), backend="torch")
    seen = []
    plain = ops.attention_op
    monkeypatch.setattr("tilewise.api.attention_op", lambda *a: seen.append(1) or plain(*a))
    got = tw.attention(q, k, v, spec=tw.sink(change(sink)), backend="torch")
    assert seen == [1]
    torch.testing.assert_close(got, want)
    monkeypatch.setattr("tilewise.api.is_plain", lambda *_: False)
    negated = -sink if change is torch._neg_view else sink
    torch.testing.assert_close(tw.attention(q, k, v, spec=tw.sink(negated), backend="torch"), want)


def test_second_derivatives_are_right_and_edits_before_the_backward_pass_refused():
    q, k, v = (t.float().requires_grad_() for t in qkv())
    sink = torch.randn(HEADS, requires_grad=True)
    own = ids()
    spec = tw.segments(own, own) & tw.sink(sink)
    o = tw.attention(q, k, v, spec=spec, backend="torch")
    seconds = []
    for out in (o, tw.reference(q, k, v, spec)[0]):
        (dq,) = torch.autograd.grad(out.square().sum(), q, create_graph=True)
        seconds.append(torch.autograd.grad(dq.square().sum(), sink, retain_graph=True)[0])
    torch.testing.assert_close(*seconds, rtol=1e-4, atol=1e-4)
    own += 1
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        o.sum().backward()


def test_a_plan_whose_tensor_got_other_memory_is_stale():
    """``data`` is replaced without a count of changes: the address tells."""
    q, k, v = qkv()
    own = ids()
    spec = tw.plan(q, k, tw.segments(own, own), backend="torch")
    tw.attention(q, k, v, spec=spec, backend="torch")
    own.data = torch.zeros(N, dtype=torch.int32)
    with pytest.raises(tw.InvalidInput, match="stale: segment_q, segment_k changed"):
        tw.attention(q, k, v, spec=spec, backend="torch")


def test_an_edited_mask_without_a_plan_is_read_anew():
    q, k, v = (t.float() for t in qkv())
    own = ids()
    spec = tw.segments(own, own)
    for high in (4, 2, 9):
        own.copy_(torch.randint(0, high, (N,)))
        want = tw.attention(q, k, v, spec=dataclasses.replace(spec, tensors=Tensors(segment_q=own.clone(), segment_k=own.clone())))
        assert torch.equal(tw.attention(q, k, v, spec=spec), want)
