"""``tilewise.plan``: the same bits as without, one plan for many calls, and no use of a plan that does not fit."""

from __future__ import annotations

import copy
import dataclasses
import importlib

import pytest
import torch

import tilewise as tw
from tilewise.plan import MaskTensors, block_table, kinds_in, packed_mask, table_of, tile_kinds

N = 90
BACKENDS = ("torch", "triton")


def qkv(grad: bool = True, dtype: torch.dtype = torch.float32, head_dim: int = 16) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = ((2, 4, N, head_dim), (2, 2, N, head_dim), (2, 2, N, head_dim))
    return [torch.randn(s, generator=generator).to(dtype).requires_grad_(grad) for s in shapes]


def documents() -> tw.Spec:
    ids = (torch.arange(N) // 35).to(torch.int32)
    return tw.segments(ids, ids.clone()) & tw.causal()


def dense() -> tw.Spec:
    return tw.dense(torch.rand(2, 1, N, N, generator=torch.Generator().manual_seed(1)) < 0.3)


@pytest.fixture(autouse=True)
def _small_tiles(monkeypatch):
    from tilewise.backends import torch_tiles

    monkeypatch.setattr(torch_tiles, "BLOCK_M", 64)
    monkeypatch.setattr(torch_tiles, "BLOCK_N", 16)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("spec", [documents(), dense()], ids=["documents", "dense"])
def test_same_bits_with_and_without(spec, backend):
    q, k, v = qkv()
    planned = tw.plan(q, k, spec, backend=backend)
    assert planned.plan
    assert planned != spec
    results = []
    for s in (spec, planned, planned):
        o, lse = tw.attention(q, k, v, spec=s, return_lse=True, backend=backend)
        results.append((o, lse, *torch.autograd.grad(o.square().sum(), (q, k, v))))
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_plan_is_used(backend, monkeypatch):
    """With a plan no table is made during the calls, forward or backward."""
    q, k, v = qkv()
    planned = tw.plan(q, k, documents(), backend=backend)

    def never(*args):
        raise RuntimeError("a table is made")

    for name in ("tilewise.plan", "tilewise.backends.tile_mask", "tilewise.backends.tables"):
        module = importlib.import_module(name)
        monkeypatch.setattr(module, "_table_plan" if hasattr(module, "_table_plan") else "tile_kinds", never)
    tw.attention(q, k, v, spec=planned, backend=backend).sum().backward()
    with pytest.raises(tw.BackendBroken, match="a table is made"):
        tw.attention(q, k, v, spec=documents(), backend=backend)


def test_a_pass_that_was_not_planned_makes_its_own_table():
    q, k, v = qkv()
    forward_only = tw.plan(q, k, documents(), backend="triton", backward=False)
    both = tw.plan(q, k, documents(), backend="triton")
    assert forward_only.tensors.plan.numel() < both.tensors.plan.numel()
    grads = [
        torch.autograd.grad(tw.attention(q, k, v, spec=s, backend="triton").sum(), (q, k, v)) for s in (forward_only, both)
    ]
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))
    # A plan for one backend serves another, which has tiles of other sizes.
    o, other = (tw.attention(q, k, v, spec=both, backend=backend) for backend in BACKENDS)
    torch.testing.assert_close(o, other)


def test_tables_come_out_as_they_went_in():
    from tilewise.backends.tables import pack_dense

    q, k, _ = qkv()
    spec = tw.plan(q, k, dense(), backend="triton")
    problem = tw.Problem.bind(q, k, k, spec, grad="qkv")
    mask = MaskTensors(dense=spec.tensors.dense)
    bits, *found = spec.plan.split("/")[2:]
    assert bits.endswith("b")
    packed = packed_mask(problem, spec.tensors, pack_dense)
    assert packed is not None
    assert packed.dense is not None
    assert torch.equal(packed.dense, pack_dense(spec.tensors.dense))
    assert packed.dense.untyped_storage().data_ptr() == spec.tensors.plan.untyped_storage().data_ptr()
    assert len(found) == 2
    for m, n in (part.split("x") for part in found):
        transposed, block_m, block_n = n.endswith("t"), int(m), int(n.rstrip("t"))
        kinds = tile_kinds(problem, mask, block_m, block_n, transposed)
        made, kept = block_table(kinds, transposed), table_of(problem, spec.tensors, block_m, block_n, transposed)
        assert kept is not None
        assert torch.equal(made.counts, kept.counts)
        assert torch.equal(made.tiles, kept.tiles)
        assert kept.tiles.untyped_storage().data_ptr() == spec.tensors.plan.untyped_storage().data_ptr()
        assert torch.equal(kinds_in(kept), kinds.transpose(-1, -2) if transposed else kinds)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("slot", ["segment_q", "segment_k"])
def test_a_stale_plan_is_refused(slot, backend):
    q, k, v = qkv(grad=False)
    planned = tw.plan(q, k, documents(), backend=backend)
    tw.attention(q, k, v, spec=planned, backend=backend)
    getattr(planned.tensors, slot)[3:50] += 1
    with pytest.raises(tw.InvalidInput, match=rf"this spec is stale: {slot} changed in place.*tilewise\.plan\(q, k, spec\)"):
        tw.attention(q, k, v, spec=planned, backend=backend)
    again = tw.plan(q, k, planned, backend=backend)
    want = tw.attention(q, k, v, spec=again, backend="reference")
    torch.testing.assert_close(tw.attention(q, k, v, spec=again, backend=backend), want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda t: t[:1], r"made for batch 2 where the call has 1: make one for this call"),
        (lambda t: t[:, :2], r"made for heads_q 4 where the call has 2"),
        (lambda t: t[:, :, :70], r"made for seqlen_q 90 where the call has 70, seqlen_k 90 where the call has 70"),
    ],
)
def test_a_plan_for_other_shapes_is_refused(change, message):
    q, k, v = qkv(grad=False)
    spec = tw.plan(q, k, tw.dense(torch.ones(1, 1, 1, 1, dtype=torch.bool)) & tw.causal(), backend="torch")
    with pytest.raises(tw.InvalidInput, match=message):
        tw.attention(*map(change, (q, k, v)), spec=spec, backend="torch")


def test_another_head_dim_or_dtype_is_right_all_the_same():
    q, k, _ = qkv(grad=False)
    spec = tw.plan(q, k, documents(), backend="triton")
    for other in (qkv(False, torch.float16), qkv(False, head_dim=64)):
        want = tw.attention(*other, spec=spec, backend="reference")
        torch.testing.assert_close(tw.attention(*other, spec=spec, backend="triton"), want, rtol=2e-3, atol=2e-3)


def test_a_combined_spec_loses_its_plan():
    q, k, _ = qkv(grad=False)
    planned = tw.plan(q, k, documents())
    both = planned & tw.window(5, 5)
    assert both.plan == ""
    assert both.tensors.plan is None
    assert copy.copy(planned) == planned


def test_nothing_to_plan():
    q, k, _ = qkv(grad=False)
    for spec in (tw.full(), tw.window(3, 3), tw.softcap(3.0)):
        assert tw.plan(q, k, spec) == spec
    assert tw.plan(q, k, documents(), backend="reference").plan == ""
    with pytest.raises(tw.InvalidInput, match=r"spec must be a tilewise\.Spec, got NoneType"):
        tw.plan(q, k, None)
    with pytest.raises(tw.InvalidInput, match="segment_q has 40 at seqlen_q, expected 90 or 1"):
        tw.plan(q, k, tw.segments(torch.zeros(40).int(), torch.zeros(90).int()))
    with pytest.raises(tw.BackendRefused, match="the tensors are on cpu"):
        tw.plan(q, k, documents(), backend="hopper")


def test_a_plan_crosses_a_compiled_graph():
    torch._dynamo.reset()
    q, k, v = qkv(grad=False)
    spec = tw.plan(q, k, documents(), backend="torch")

    def layer(q, k, v):
        return tw.attention(q, k, v, spec=spec, backend="torch")

    torch.testing.assert_close(torch.compile(layer, fullgraph=True, backend="aot_eager")(q, k, v), layer(q, k, v))
    torch._dynamo.reset()


def test_under_vmap_the_folded_call_makes_its_own_table():
    q, k, v = (t.detach() for t in qkv(grad=False))
    plain = documents()
    planned = tw.plan(q[:1], k[:1], plain, backend="torch")

    def mapped(spec):
        return torch.func.vmap(lambda *t: tw.attention(*(x[None] for x in t), spec=spec, backend="torch"))(q, k, v)

    assert torch.equal(mapped(planned), mapped(plain))


def test_a_spec_that_already_says_what_is_returned_gets_no_plan():
    q, k, _ = (t.detach() for t in qkv(grad=False))
    with pytest.raises(tw.InvalidInput, match="returns='max_logit'"):
        tw.plan(q, k, dataclasses.replace(documents(), returns="max_logit"), backend="torch")


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_a_plan_does_not_outlive_other_strides_at_the_same_address(backend):
    q, k, _ = torch.randn(3, 1, 1, 40, 16).unbind()
    mask = torch.rand(40, 40) < 0.4
    planned = tw.plan(q, k, tw.dense(mask), backend=backend)
    mask.data = mask.data.T
    with pytest.raises(tw.InvalidInput, match="this spec is stale: dense changed in place or got other memory"):
        tw.attention(q, k, k, spec=planned, backend=backend)


@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize("make", [lambda t: tw.dense(t > 0), lambda t: tw.segments((t[:, 0] > 0).int(), (t[:, 0] > 0).int())])
def test_a_plan_of_a_mapped_mask_leaves_the_tables_to_the_calls(backend, make):
    q, k, v = torch.randn(3, 1, 2, 40, 16).unbind()
    given = torch.randn(3, 40, 40)
    found = torch.func.vmap(lambda t: tw.attention(q, k, v, spec=tw.plan(q, k, make(t), backend=backend), backend=backend))(given)
    wanted = torch.stack([tw.attention(q, k, v, spec=make(t), backend=backend) for t in given])
    torch.testing.assert_close(found, wanted)
