"""The tiled PyTorch backend against the dense float64 oracle, on tiles small enough that small inputs cross several of them."""

from __future__ import annotations

import gc
import itertools
import threading

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import tilewise
from tilewise import Spec, causal, full, window
from tilewise.backends import torch_tiles
from tilewise.plan import TilePlan
from tilewise.problem import Problem
from tilewise.reference import reference

NEG_INF = float("-inf")
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
MASKS = {
    "full": full(),
    "causal": causal(),
    "causal top left": causal("top_left"),
    "thin window": window(3, 2),
    "window top left": window(9, 0, "top_left"),
    "left only": window(left=5),
    "strictly causal": Spec(upper=-1),
    "empty window": window(-1, 0),
    "band off the diagonal": Spec(upper=-20, lower=37),
}


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    """16 rows by 8 keys, and few heads at once: every loop runs more than once."""
    monkeypatch.setattr(torch_tiles, "BLOCK_M", 16)
    monkeypatch.setattr(torch_tiles, "BLOCK_N", 8)
    monkeypatch.setattr(torch_tiles, "TILE_ELEMENTS", 3000)


def draw(batch, heads_q, heads_kv, seqlen_q, seqlen_k, head_dim, head_dim_v, dtype, seed=0):
    gen = torch.Generator().manual_seed(seed)
    shapes = ((heads_q, seqlen_q, head_dim), (heads_kv, seqlen_k, head_dim), (heads_kv, seqlen_k, head_dim_v))
    return tuple(torch.randn(batch, *shape, generator=gen, dtype=torch.float64).to(dtype) for shape in shapes)


def run(q, k, v, spec, sm_scale, do, dlse):
    """(o, lse, dq, dk, dv) of the backend."""
    leaves = [t.detach().requires_grad_() for t in (q, k, v)]
    o, lse = tilewise.attention(*leaves, spec=spec, sm_scale=sm_scale, return_lse=True, backend="torch")
    outputs, cotangents = ((o, lse), (do, dlse)) if dlse is not None else ((o,), (do,))
    return (o.detach(), lse.detach(), *torch.autograd.grad(outputs, leaves, cotangents))


def oracle(q, k, v, spec, sm_scale, do, dlse):
    leaves = [t.detach().double().requires_grad_() for t in (q, k, v)]
    o, lse = reference(*leaves, spec, sm_scale)
    loss = (o * do.double()).sum()
    if dlse is not None:
        loss = loss + torch.where(lse == NEG_INF, 0.0, lse * dlse.double()).sum()
    return (o.detach(), lse.detach(), *torch.autograd.grad(loss, leaves))


def assert_close(got, want, dtype, factor=1.0):
    for name, a, b in zip(("o", "lse", "dq", "dk", "dv"), got, want, strict=True):
        assert a.shape == b.shape, name
        assert torch.equal(a == NEG_INF, b == NEG_INF), f"{name}: the pattern of -inf differs"
        a, b = (t.double().masked_fill(t == NEG_INF, 0.0) for t in (a, b))
        assert not torch.isnan(a).any(), f"{name} has NaN"
        # lse is float32 for half inputs; o is rounded once; gradients also see the rounded o.
        eps = torch.finfo(torch.float32 if name == "lse" and dtype.itemsize == 2 else dtype).eps
        bound = factor * eps * (8 if name == "o" else 16) * (1 + b.abs().max().item() if b.numel() else 1)
        error = (a - b).abs().max().item() if b.numel() else 0.0
        assert error <= bound, f"{name}: error {error:.2e} over {bound:.2e}"


def check(q, k, v, spec, sm_scale=0.37, with_dlse=True, factor=1.0):
    gen = torch.Generator().manual_seed(9)
    do = torch.randn(*q.shape[:3], v.shape[3], generator=gen, dtype=torch.float64).to(q.dtype)
    lse_dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    dlse = torch.randn(q.shape[:3], generator=gen, dtype=torch.float64).to(lse_dtype) if with_dlse else None
    got = run(q, k, v, spec, sm_scale, do, dlse)
    assert [t.dtype for t in got] == [q.dtype, lse_dtype, q.dtype, q.dtype, q.dtype]
    assert_close(got, oracle(q, k, v, spec, sm_scale, do, dlse), q.dtype, factor)
    return got


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("lengths", [(37, 37), (50, 21), (21, 50), (1, 33), (33, 1)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_matches_reference_for_masks_and_lengths(mask, lengths, dtype):
    check(*draw(2, 4, 2, *lengths, 16, 24, dtype), MASKS[mask])


@pytest.mark.parametrize("heads", [(3, 3), (6, 2), (5, 1), (48, 1)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_matches_reference_for_heads_and_dtypes(heads, dtype):
    check(*draw(2, *heads, 35, 42, 20, 12, dtype), causal())


@pytest.mark.parametrize("sm_scale", [0.0, -0.8, 0.37, None, 30.0])
@pytest.mark.parametrize("with_dlse", [False, True])
def test_matches_reference_for_scales(sm_scale, with_dlse):
    q, k, v = draw(1, 2, 1, 40, 33, 8, 8, torch.float32)
    check(q, k, v, causal(), sm_scale, with_dlse, factor=30.0 if sm_scale == 30.0 else 1.0)


@pytest.mark.parametrize("head_dims", [(1, 1), (1, 40), (300, 3), (64, 128)], ids=str)
def test_matches_reference_for_head_dims(head_dims):
    check(*draw(1, 2, 2, 19, 27, *head_dims, torch.float32), causal(), 0.2)


@pytest.mark.parametrize("lengths", [(0, 5), (5, 0), (0, 0), (1, 1)], ids=str)
def test_matches_reference_for_zero_and_one(lengths):
    check(*draw(1, 2, 1, *lengths, 4, 6, torch.float32), causal())


def test_default_tiles_match_reference(monkeypatch):
    monkeypatch.undo()
    assert torch_tiles.BLOCK_M > 16
    check(*draw(1, 4, 2, 600, 1100, 32, 16, torch.float32), causal())
    check(*draw(1, 2, 2, 1100, 600, 32, 16, torch.bfloat16), window(100, 7))


def test_rows_without_a_key_give_zeros():
    q, k, v = draw(1, 2, 2, 40, 11, 8, 8, torch.float32)
    o, lse, dq, dk, dv = check(q, k, v, causal())
    assert (lse[:, :, :29] == NEG_INF).all()
    assert (o[:, :, :29] == 0).all()
    assert (dq[:, :, :29] == 0).all()
    assert torch.isfinite(dk).all()
    assert torch.isfinite(dv).all()


def test_nan_cotangent_of_a_row_without_a_key_reaches_no_gradient():
    q, k, v = (t.requires_grad_() for t in draw(1, 1, 1, 20, 7, 4, 4, torch.float32))
    o = tilewise.attention(q, k, v, causal=True, backend="torch")
    do = torch.ones_like(o)
    do[:, :, :13] = float("nan")
    assert all(torch.isfinite(g).all() for g in torch.autograd.grad(o, (q, k, v), do))


def test_nan_in_a_hidden_key_reaches_no_score():
    q, k, v = draw(1, 1, 1, 20, 20, 4, 4, torch.float32)
    want = tilewise.attention(q, k, v, causal=True, backend="torch")
    k[:, :, 13:] = float("nan")
    got = tilewise.attention(q, k, v, causal=True, backend="torch")
    assert torch.equal(got[:, :, :13], want[:, :, :13])
    assert torch.isnan(got[:, :, 13:]).all()


@pytest.mark.parametrize("where", ["first tile", "last tile"])
def test_spike_in_one_tile(where):
    """A score ahead of all others by far more than 127 in log2: the running maximum and the rescaling by alpha must hold."""
    q, k, v = draw(1, 2, 2, 20, 45, 8, 8, torch.float32)
    q = q.abs() + 0.5
    k[:, :, 2 if where == "first tile" else 43] = 60.0
    check(q, k, v, full(), 1.3, factor=40.0)


def test_late_rise_keeps_the_early_keys():
    """The maximum rises in every tile by little, so that what was summed before still counts after it is rescaled."""
    q, k, v = draw(1, 1, 1, 20, 64, 8, 8, torch.float64)
    q, k = torch.full_like(q, 0.25), k * 0.1 + torch.arange(64)[:, None] * 0.02
    check(q, k, v, full(), 1.0)


def test_very_low_scores_of_a_ragged_tile():
    """Every score lies below -89: a padded key that scores 0 would take all the weight."""
    q, k, v = draw(1, 1, 1, 9, 21, 8, 8, torch.float32)
    check(q.abs() + 1, -(k.abs() + 20), v, full(), 1.0, factor=40.0)


def test_split_of_many_heads_in_chunks(monkeypatch):
    """Batches, key heads and the heads of one group are each cut in several chunks."""
    monkeypatch.setattr(torch_tiles, "BLOCK_M", 4)
    monkeypatch.setattr(torch_tiles, "TILE_ELEMENTS", 100)
    q, k, v = draw(3, 14, 2, 9, 13, 4, 4, torch.bfloat16)
    sizes = torch_tiles.tile_sizes(Problem.bind(q, k, v, causal()))
    assert (sizes.batch, sizes.heads, sizes.group) == (1, 1, 4)
    check(q, k, v, causal())


@pytest.mark.parametrize(
    "text",
    [
        "seqlen=100000 head_dim=64 heads=64",
        "seqlen=4 head_dim=64 heads=8 batch=65536",
        "seqlen=10 head_dim=16 heads=65536/1",
        "seqlen=1x1000000 head_dim=128 heads=32/8 batch=64",
        "seqlen=1000000x1 head_dim=128 heads=32/8",
    ],
)
def test_tile_size_is_bounded_whatever_the_problem(text, monkeypatch):
    monkeypatch.undo()
    p = Problem.parse(text + " dtype=float32")
    s = torch_tiles.tile_sizes(p)
    rows = s.group * s.block_m
    elements = s.batch * s.heads * (rows * s.block_n + (rows + s.block_n) * (p.head_dim + p.head_dim_v))
    assert 0 < elements <= torch_tiles.TILE_ELEMENTS
    assert s.batch <= p.batch
    assert s.heads <= p.heads_kv
    assert s.group <= p.group


def test_parts_are_even():
    assert [torch_tiles._even_part(8, most) for most in (1, 3, 5, 7, 8, 100)] == [1, 3, 4, 4, 8, 8]


def _strided(t, how):
    if how == "heads inside rows":
        return t.transpose(1, 2).contiguous().transpose(1, 2)
    if how == "last dim strided":
        return t.transpose(2, 3).contiguous().transpose(2, 3)
    return torch.nn.functional.pad(t, (3, 2, 1, 4, 1, 1))[:, 1:-1, 1:-4, 3:-2]


@pytest.mark.parametrize("how", ["heads inside rows", "last dim strided", "padded"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_strided_inputs_give_what_contiguous_ones_give(how, dtype):
    q, k, v = draw(2, 4, 2, 30, 27, 8, 12, dtype)
    do = torch.randn(2, 4, 30, 12).to(dtype)
    want = run(q, k, v, causal(), 0.37, do, None)
    got = run(*(_strided(t, how) for t in (q, k, v)), causal(), 0.37, _strided(do, how), None)
    assert_close(got, [t.double() for t in want], dtype)
    for shared in (0, 1, 2):
        some = [_strided(t, how) if i == shared else t for i, t in enumerate((q, k, v))]
        assert_close(run(*some, causal(), 0.37, do, None), [t.double() for t in want], dtype)


def test_expanded_cotangent_and_shared_keys():
    """The cotangent of o.sum() has stride 0 everywhere; k and v are expanded over the batch."""
    q, k, v = draw(3, 2, 1, 20, 17, 8, 8, torch.float32)
    k, v = k[:1].expand(3, -1, -1, -1), v[:1].expand(3, -1, -1, -1)
    do = torch.ones(()).expand(3, 2, 20, 8)
    assert_close(run(q, k, v, causal(), 0.37, do, None), oracle(q, k, v, causal(), 0.37, do, None), torch.float32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_only_the_gradients_asked_for_are_computed(dtype, monkeypatch):
    seen = []
    real = torch_tiles.backward

    def spy(*args):
        seen.append("".join(n for n, t in zip("qkv", args[-3:], strict=True) if t is not None))
        return real(*args)

    monkeypatch.setattr(torch_tiles, "backward", spy)
    q, k, v = draw(2, 4, 2, 30, 27, 8, 12, dtype)
    do = torch.ones(2, 4, 30, 12, dtype=dtype)
    want = dict(zip("qkv", run(q, k, v, causal(), 0.37, do, None)[2:], strict=True))
    for wanted in ("".join(c) for n in (1, 2, 3) for c in itertools.combinations("qkv", n)):
        seen.clear()
        leaves = {n: t.detach().requires_grad_(n in wanted) for n, t in zip("qkv", (q, k, v), strict=True)}
        o = tilewise.attention(*leaves.values(), causal=True, sm_scale=0.37, backend="torch")
        o.backward(do)
        assert seen == [wanted]
        for n, leaf in leaves.items():
            assert (leaf.grad is not None) == (n in wanted)
            assert leaf.grad is None or torch.equal(leaf.grad, want[n])


@pytest.mark.parametrize(("wanted", "products"), [("q", 3), ("k", 3), ("v", 2), ("qkv", 5), ("kv", 4)])
def test_products_per_tile_follow_the_gradients_asked_for(wanted, products):
    q, k, v = draw(1, 1, 1, 16, 8, 4, 4, torch.float32)
    problem = Problem.bind(q, k, v, full())
    o, lse = torch.empty(1, 1, 16, 4), torch.empty(1, 1, 16)
    torch_tiles.forward(problem, q, k, v, o, lse)
    grads = [torch.empty_like(t) if n in wanted else None for n, t in zip("qkv", (q, k, v), strict=True)]
    with _Count() as count:
        torch_tiles.backward(problem, o, None, q, k, v, o, lse, *grads)
    assert count.products == products


class _Count(TorchDispatchMode):
    """Counts the batched products, and the elements of their results."""

    def __init__(self):
        super().__init__()
        self.products = self.score_elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        name = str(func)
        if "bmm" in name:
            self.products += 1
            if "baddbmm" in name and (kwargs or {}).get("beta") == 0:
                self.score_elements += out.numel()
        return out


@pytest.mark.parametrize("mask", MASKS)
def test_empty_tiles_are_never_visited(mask):
    q, k, v = draw(1, 2, 2, 70, 66, 4, 4, torch.float32)
    problem = Problem.bind(q, k, v, MASKS[mask])
    sizes = torch_tiles.tile_sizes(problem)
    plan = TilePlan(problem, sizes.block_m, sizes.block_n)
    rows = [min(sizes.block_m, 70 - m * sizes.block_m) for m in range(plan.m_blocks)]
    cols = [min(sizes.block_n, 66 - n * sizes.block_n) for n in range(plan.n_blocks)]
    want = sum(2 * rows[m] * cols[n] for m, n in plan.tiles().nonzero().tolist())
    with _Count() as count:
        torch_tiles.forward(problem, q, k, v, torch.empty(1, 2, 70, 4), torch.empty(1, 2, 70))
    assert count.score_elements == want


def test_outputs_are_filled_whole():
    """Outputs that hold NaN before the call hold none after it."""
    q, k, v = draw(2, 4, 2, 33, 19, 8, 6, torch.bfloat16)
    problem = Problem.bind(q, k, v, window(2, 0))
    nan = float("nan")
    o, lse = torch.full((2, 4, 33, 6), nan, dtype=torch.bfloat16), torch.full((2, 4, 33), nan)
    torch_tiles.forward(problem, q, k, v, o, lse)
    grads = [torch.full_like(t, nan) for t in (q, k, v)]
    torch_tiles.backward(problem, torch.ones_like(o), None, q, k, v, o, lse, *grads)
    assert not any(torch.isnan(t).any() for t in (o, lse, *grads))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_repeats_bit_for_bit(dtype):
    q, k, v = draw(2, 6, 2, 50, 70, 16, 16, dtype)
    do, dlse = torch.randn(2, 6, 50, 16).to(dtype), torch.randn(2, 6, 50).to(torch.promote_types(dtype, torch.float32))
    first = run(q, k, v, causal(), 0.3, do, dlse)
    for _ in range(5):
        assert all(torch.equal(a, b) for a, b in zip(first, run(q, k, v, causal(), 0.3, do, dlse), strict=True))


def test_threads_at_once_do_not_mix():
    q, k, v = draw(1, 2, 2, 60, 60, 8, 8, torch.float32)
    want = tilewise.attention(q, k, v, causal=True, backend="torch")
    got = []
    threads = [
        threading.Thread(target=lambda: got.append(tilewise.attention(q, k, v, causal=True, backend="torch"))) for _ in range(8)
    ]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert len(got) == 8
    assert all(torch.equal(want, t) for t in got)


def test_autocast_does_not_reach_the_products():
    q, k, v = draw(1, 2, 2, 40, 40, 16, 16, torch.float32)
    problem = Problem.bind(q, k, v, causal())
    results = []
    for on in (False, True):
        o, lse, grads = torch.empty_like(q), torch.empty(1, 2, 40), [torch.empty_like(t) for t in (q, k, v)]
        with torch.autocast("cpu", torch.bfloat16, enabled=on):
            torch_tiles.forward(problem, q, k, v, o, lse)
            torch_tiles.backward(problem, o, None, q, k, v, o, lse, *grads)
        results.append((o, lse, *grads))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_float32_stays_ieee_when_the_process_allows_less(monkeypatch):
    """``set_float32_matmul_precision("medium")`` lets a CPU round float32 products to bfloat16; and it is left as it was."""
    monkeypatch.undo()
    q, k, v = draw(1, 2, 2, 256, 256, 64, 64, torch.float32)
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("medium")
        assert torch_tiles.work_dtype(torch.float32, torch.device("cpu")) == torch.float64
        assert torch_tiles.work_dtype(torch.float16, torch.device("cpu")) == torch.float64
        check(q, k, v, causal(), 0.37)
        assert torch.get_float32_matmul_precision() == "medium"
        torch.set_float32_matmul_precision("high")
        # TF32 on a GPU is too coarse for float32, but holds half-precision inputs exactly.
        assert torch_tiles.work_dtype(torch.float32, torch.device("cuda")) == torch.float64
        assert torch_tiles.work_dtype(torch.float16, torch.device("cuda")) == torch.float32
    finally:
        torch.set_float32_matmul_precision(before)
    assert torch_tiles.work_dtype(torch.float32, torch.device("cpu")) == torch.float32


class _Peak(TorchDispatchMode):
    """The most bytes that tensors born inside it hold at once."""

    def __init__(self):
        super().__init__()
        self.storages: dict[int, tuple[object, int]] = {}
        self.peak = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        given = {t.untyped_storage()._cdata for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)}
        out = func(*args, **(kwargs or {}))
        for t in tree_leaves(out):
            if isinstance(t, torch.Tensor) and t.untyped_storage()._cdata not in given:
                storage = t.untyped_storage()
                # A weak reference: a storage that nothing else holds is gone.
                self.storages[storage._cdata] = (torch.multiprocessing.reductions.StorageWeakRef(storage), storage.nbytes())
        self.storages = {key: kept for key, kept in self.storages.items() if not kept[0].expired()}  # type: ignore[attr-defined]
        self.peak = max(self.peak, sum(size for _, size in self.storages.values()))
        return out


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_memory_grows_linearly(dtype, monkeypatch):
    monkeypatch.setattr(torch_tiles, "BLOCK_M", 128)
    monkeypatch.setattr(torch_tiles, "BLOCK_N", 128)
    monkeypatch.setattr(torch_tiles, "TILE_ELEMENTS", 1 << 16)
    peaks = {}
    for length in (512, 1024, 2048):
        q, k, v = draw(1, 2, 2, length, length, 16, 16, dtype)
        problem = Problem.bind(q, k, v, causal())
        o, lse, grads = torch.empty_like(q), torch.empty(1, 2, length), [torch.empty_like(t) for t in (q, k, v)]
        gc.collect()
        with _Peak() as forward:
            torch_tiles.forward(problem, q, k, v, o, lse)
        with _Peak() as backward:
            torch_tiles.backward(problem, o, None, q, k, v, o, lse, *grads)
        peaks[length] = (forward.peak, backward.peak)
        scores = 4 * 2 * length * length
        assert peaks[length][0] > 0
        assert length < 2048 or max(peaks[length]) < scores / 10
    assert peaks[2048][0] == peaks[1024][0] == peaks[512][0]
    growth = [peaks[2 * n][1] - peaks[n][1] for n in (512, 1024)]
    # Half-precision dk and dv are summed in float32: two tensors of 4 bytes an element. Nothing else grows.
    assert growth == ([0, 0] if dtype == torch.float32 else [4 * 2 * 16 * 2 * n for n in (512, 1024)])
