"""Masks that come as tensors, on every backend. What is right is written by hand, or by loops that import nothing of the rule."""

from __future__ import annotations

import itertools

import pytest
import torch

import tilewise as tw
from tilewise.reference import mask_of
from tilewise.testing.calls import evaluate, random_call
from tilewise.testing.tolerance import Yardstick, raise_if_failed

BACKENDS = ("reference", "torch", "triton")


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def matrix(text: str) -> list[list[int]]:
    return [[int(c) for c in row] for row in text.split()]


def shown(spec: tw.Spec, seqlen_q: int, seqlen_k: int, backend: str, batch: int = 1, heads: int = 1) -> torch.Tensor:
    """The mask as a backend obeys it: with equal scores and v the identity, row i of o is the mask's row divided by its sum."""
    q, k = torch.zeros(batch, heads, seqlen_q, 4), torch.zeros(batch, heads, seqlen_k, 4)
    v = torch.eye(seqlen_k).expand(batch, heads, seqlen_k, seqlen_k)
    o, lse = tw.attention(q, k, v, spec=spec, return_lse=True, backend=backend)
    counts = torch.where(lse == float("-inf"), 0.0, lse.exp())
    return (o * counts[..., None]).round().int()


LITERAL = {
    "segments": (tw.segments(ints(0, 0, 1, 1, 1), ints(0, 0, 1, 1, 1)), "11000 11000 00111 00111 00111"),
    "segments, causal": (tw.segments(ints(0, 0, 1, 1, 1), ints(0, 0, 1, 1, 1)) & tw.causal(), "10000 11000 00100 00110 00111"),
    "segments, not sorted": (tw.segments(ints(2, 0, 2, 5), ints(0, 2, 2, 0, 9)), "01100 10010 01100 00000"),
    "segments, negative ids": (tw.segments(ints(-1, 3, -7), ints(-1, -7, 3)), "100 001 010"),
    "documents": (tw.documents(ints(1, 0, 2), ints(2, 1, 1)), "1100 0001 0001"),
    "documents, one length": (tw.documents(ints(2, 1)), "110 110 001"),
    "rows": (tw.row_intervals(ints(0, 1, 3, 2), ints(2, 4, 3, 9)), "1100 0111 0000 0011"),
    "rows, windowed": (tw.row_intervals(ints(0, 0, 1, 0), ints(4, 1, 4, 4)) & tw.window(1, 1), "1100 1000 0111 0011"),
    "key padding": (tw.key_padding(ints(2)), "1100 1100 1100"),
    "prefix-LM": (tw.prefix_lm(2, 4), "1100 1100 1110 1111"),
    "prefix-LM, more keys": (tw.prefix_lm(1, 2, 4), "1110 1111"),
    "prefix-LM, top left": (tw.prefix_lm(2, 2, 4, align="top_left"), "1100 1100"),
    "prefix-LM, more queries": (tw.prefix_lm(1, 4, 2), "10 10 10 11"),
    "prefix 0 is causal": (tw.prefix_lm(0, 3), "100 110 111"),
    "chunked": (tw.chunked(2, 5), "11000 11000 00110 00110 00001"),
    "chunked, causal": (tw.chunked(2, 5) & tw.causal(), "10000 11000 00100 00110 00001"),
    "chunked, more keys": (tw.chunked(2, 2, 5) & tw.causal(), "00110 00001"),
    "spans": (tw.spans(ints(-1, 4, 4, -1, 5, 5)), "100000 111000 111000 111100 111111 111111"),
    "spans, side by side": (tw.spans(ints(4, 4, 5, 5)), "1100 1100 1111 1111"),
    "dense": (tw.dense(torch.tensor(matrix("101 000 011"), dtype=torch.bool)), "101 000 011"),
    "dense, causal": (tw.dense(torch.tensor(matrix("111 101 011"), dtype=torch.bool)) & tw.causal(), "100 100 011"),
    "dense, of keys": (tw.dense(torch.tensor([True, False, True])), "101 101"),
    "dense, of queries": (tw.dense(torch.tensor([[True], [False]])), "111 000"),
    "segments and rows": (
        tw.segments(ints(0, 0, 1, 1), ints(0, 0, 1, 1)) & tw.row_intervals(ints(1, 0, 0, 3), ints(4, 1, 9, 4)),
        "0100 1000 0011 0001",
    ),
    "all terms": (
        tw.segments(ints(0, 0, 0, 1), ints(0, 0, 0, 1))
        & tw.row_intervals(ints(0, 0, 1, 0), ints(4, 4, 4, 4))
        & tw.dense(torch.tensor(matrix("1111 1011 1111 0001"), dtype=torch.bool))
        & tw.window(1, 0),
        "1000 1000 0110 0001",
    ),
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", LITERAL)
def test_mask_equals_a_matrix_written_by_hand(name, backend):
    spec, rows = LITERAL[name]
    want = matrix(rows)
    got = shown(spec, len(want), len(want[0]), backend)
    assert got[0, 0].tolist() == want


@pytest.mark.parametrize("backend", BACKENDS)
def test_each_batch_and_head_has_its_own(backend):
    two = torch.tensor([[0, 0, 1], [0, 1, 1]], dtype=torch.int32)
    got = shown(tw.segments(two, two), 3, 3, backend, batch=2)
    assert got[:, 0].tolist() == [matrix("110 110 001"), matrix("100 011 011")]
    got = shown(tw.key_padding(torch.tensor([1, 0])), 2, 3, backend, batch=2)
    assert got[:, 0].tolist() == [matrix("100 100"), matrix("000 000")]
    got = shown(tw.prefix_lm(torch.tensor([0, 2]), 3), 3, 3, backend, batch=2)
    assert got[:, 0].tolist() == [matrix("100 110 111"), matrix("110 110 111")]
    got = shown(tw.spans(torch.tensor([[0, 0, -1], [-1, 0, 0]])), 3, 3, backend, batch=2)
    assert got[:, 0].tolist() == [matrix("110 110 111"), matrix("100 111 111")]
    got = shown(tw.row_intervals(torch.tensor([[0, 1], [1, 0]]), torch.tensor([2])), 2, 2, backend, heads=2)
    assert got[0].tolist() == [matrix("11 01"), matrix("01 11")]
    both = torch.tensor([[[[1, 0]], [[0, 1]]], [[[1, 1]], [[0, 0]]]], dtype=torch.bool)  # (batch, heads, 1, keys)
    got = shown(tw.dense(both), 2, 2, backend, batch=2, heads=2)
    assert got.tolist() == [[matrix("10 10"), matrix("01 01")], [matrix("11 11"), matrix("00 00")]]


# Two loops, and PyTorch

N, M, GROUPS = 45, 70, (2, 4, 2)  # batch, heads_q, heads_kv


def _random(*shape: int, high: int, seed: int) -> torch.Tensor:
    return torch.randint(0, high, shape, generator=torch.Generator().manual_seed(seed), dtype=torch.int32)


def _bool(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed)) < 0.4


def terms(n: int, m: int) -> dict[str, tw.Spec]:
    """One spec of every kind, with documents that begin and end at tiles' edges and beside them."""
    batch, heads, _ = GROUPS
    q_ids, k_ids = (torch.arange(size, dtype=torch.int32) // 16 for size in (n, m))
    odd_q, odd_k = (_random(batch, size, high=4, seed=size).sort(-1).values for size in (n, m))
    start = _random(batch, heads, n, high=m, seed=1)
    rows = tw.row_intervals(start, start + _random(batch, heads, n, high=m // 2, seed=2))
    return {
        "edges": tw.segments(q_ids, k_ids),
        "documents": tw.segments(odd_q, odd_k),
        "unsorted": tw.segments(_random(batch, n, high=3, seed=5), _random(batch, m, high=3, seed=6).long()),
        "rows": rows,
        "padding": tw.key_padding(torch.tensor([m - 3, 0])),
        "prefix": tw.prefix_lm(torch.tensor([20, 33]), n, m),
        "chunks": tw.chunked(32, n, m),
        "dense": tw.dense(_bool(batch, heads, n, m)),
        "dense, one head": tw.dense(_bool(batch, 1, n, m, seed=1).expand(batch, heads, n, m)),
        "dense keys": tw.dense(_bool(m, seed=2)),
        "dense strided": tw.dense(_bool(m, n, seed=3).t()),
        "two terms": tw.segments(q_ids, k_ids) & rows,
        "three terms": tw.segments(odd_q, odd_k) & rows & tw.dense(_bool(heads, 1, m, seed=4)),
    }


BOUNDS = {"alone": tw.full(), "causal": tw.causal(), "window": tw.window(19, 6), "top left": tw.causal("top_left")}


def looped(spec: tw.Spec, n: int, m: int) -> torch.Tensor:
    """(batch, heads_q, n, m) by loops over elements, from the words of the docstrings."""
    batch, heads, _ = GROUPS
    t = spec.tensors
    shift = m - n if spec.align == "bottom_right" else 0
    rows = [None if x is None else x.expand(batch, heads, n).tolist() for x in (t.row_start, t.row_end)]
    ids = [None if x is None else x.expand(batch, s).tolist() for x, s in ((t.segment_q, n), (t.segment_k, m))]
    dense = None if t.dense is None else t.dense.expand(batch, heads, n, m).tolist()
    out = torch.zeros(batch, heads, n, m, dtype=torch.bool)
    for b, h, i, j in itertools.product(range(batch), range(heads), range(n), range(m)):
        if spec.upper is not None and j > i + shift + spec.upper:
            continue
        if spec.lower is not None and j < i + shift - spec.lower:
            continue
        if ids[0] is not None and ids[0][b][i] != ids[1][b][j]:
            continue
        if rows[0] is not None and not rows[0][b][h][i] <= j < rows[1][b][h][i]:
            continue
        if dense is not None and not dense[b][h][i][j]:
            continue
        out[b, h, i, j] = True
    return out


def inputs(n: int, m: int, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    batch, heads, heads_kv = GROUPS
    generator = torch.Generator().manual_seed(0)
    shapes = ((batch, heads, n, 16), (batch, heads_kv, m, 16), (batch, heads_kv, m, 24))
    return [torch.randn(s, generator=generator, dtype=torch.float64).to(dtype).requires_grad_() for s in shapes]


@pytest.fixture(autouse=True)
def _small_tiles(monkeypatch):
    """The PyTorch tiles of real work would hold each of these calls in one."""
    from tilewise.backends import torch_tiles

    monkeypatch.setattr(torch_tiles, "BLOCK_M", 64)
    monkeypatch.setattr(torch_tiles, "BLOCK_N", 16)


KINDS = list(terms(2, 2))
# The interpreter is slow: there each kind of term meets one bound, and each bound several kinds.
RUNS = [
    *((backend, name, bound) for backend in ("reference", "torch") for name in KINDS for bound in BOUNDS),
    *(("triton", name, list(BOUNDS)[i % len(BOUNDS)]) for i, name in enumerate(KINDS)),
]


@pytest.mark.parametrize("backend, name, bound", RUNS)
def test_equals_pytorch_with_a_boolean_mask(backend, name, bound):
    spec = terms(N, M)[name] & BOUNDS[bound]
    mask = looped(spec, N, M)
    some = mask.any(-1, keepdim=True)
    wide = inputs(N, M, torch.float64)
    want = torch.nn.functional.scaled_dot_product_attention(*wide, attn_mask=mask | ~some, enable_gqa=True) * some
    upstream = torch.randn(want.shape, generator=torch.Generator().manual_seed(9), dtype=torch.float64)
    grads = torch.autograd.grad(want, wide, upstream)
    mine = inputs(N, M)
    o, lse = tw.attention(*mine, spec=spec, return_lse=True, backend=backend)
    assert torch.equal(lse == float("-inf"), ~some[..., 0])
    assert not (o * ~some).any()
    torch.testing.assert_close(o.double(), want, rtol=1e-4, atol=1e-5)
    got = torch.autograd.grad(o, mine, upstream.float())
    for a, b in zip(got, grads, strict=True):
        torch.testing.assert_close(a.double(), b, rtol=1e-3, atol=1e-4)


# The one comparison, over pairs of features

SHAPES = {
    "ragged": (1, 2, 2, 45, 70, 16, 16),
    "gqa": (2, 4, 2, 40, 40, 16, 24),
    "one query": (2, 2, 1, 1, 37, 16, 16),
    "one key": (2, 2, 1, 33, 1, 16, 16),
}


def _term(name: str, batch: int, heads: int, n: int, m: int) -> tw.Spec:
    start = _random(batch, 1, n, high=m, seed=7)
    q_ids, k_ids = (_random(batch, size, high=3, seed=size).sort(-1).values for size in (n, m))
    return {
        "segment": tw.segments(q_ids, k_ids),
        "row": tw.row_intervals(start, start + 17),
        "dense": tw.dense(_bool(heads, n, m)),
    }[name]


TERMS = [*itertools.combinations(("segment", "row", "dense"), 2), ("segment", ""), ("row", ""), ("dense", "")]
FORMS = itertools.cycle(itertools.product((torch.float32, torch.float16), SHAPES))
PAIRS = [(*terms_of, bound, *form) for (terms_of, bound), form in zip(itertools.product(TERMS, BOUNDS), FORMS, strict=False)]


@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize("a, b, bound, dtype, shape", PAIRS)
def test_pairs_match_the_oracle(a, b, bound, dtype, shape, backend):
    batch, heads, _, n, m, *_ = SHAPES[shape]
    spec = _term(a, batch, heads, n, m) & BOUNDS[bound]
    if b:
        spec &= _term(b, batch, heads, n, m)
    call = random_call(SHAPES[shape], dtype=dtype, spec=spec, dlse=True, sm_scale=0.37)
    raise_if_failed(Yardstick(call).judge(evaluate(call, backend), backend))


@pytest.mark.parametrize("backend", BACKENDS)
def test_no_keys_and_no_queries(backend):
    for n, m in ((0, 5), (5, 0), (0, 0)):
        q, k = torch.zeros(1, 2, n, 8), torch.zeros(1, 2, m, 8)
        for spec in (
            tw.segments(torch.zeros(n, dtype=torch.int32), torch.zeros(m, dtype=torch.int32)),
            tw.dense(torch.ones(n, m, dtype=torch.bool)),
            tw.row_intervals(torch.zeros(n, dtype=torch.int32), torch.full((n,), 9)),
        ):
            o, lse = tw.attention(q, k, k, spec=tw.plan(q, k, spec, backend=backend), return_lse=True, backend=backend)
            assert not o.any()
            assert (lse == float("-inf")).all()


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_documents_equal_a_loop_over_them(backend):
    """Packed documents, an empty one and one of a single token among them, against one call for each."""
    lengths = (17, 0, 32, 1, 20)
    n = sum(lengths)
    q, k, v = (torch.randn(1, 2, n, 16, generator=torch.Generator().manual_seed(i)) for i in range(3))
    spec = tw.documents(torch.tensor(lengths)) & tw.causal()
    whole = tw.attention(q, k, v, spec=spec, backend=backend)
    first = 0
    for length in lengths:
        part = slice(first, first + length)
        alone = tw.attention(q[:, :, part], k[:, :, part], v[:, :, part], causal=True, backend="reference")
        torch.testing.assert_close(whole[:, :, part], alone, rtol=1e-4, atol=1e-5)
        first += length


def test_a_broadcast_mask_is_never_expanded():
    """A mask of stride 0 whose whole extent would not fit any memory."""
    n = 2**16
    mask = torch.ones(1, 1, 1, n, dtype=torch.bool).expand(64, 64, n, n)
    spec = tw.plan(torch.zeros(64, 64, 1, 1).expand(64, 64, n, 16), torch.zeros(64, 64, 1, 1).expand(64, 64, n, 16), tw.dense(mask))
    assert spec.tensors.plan is not None
    assert spec.tensors.plan.numel() < 2**22  # one list of tiles for all batches and heads


# torch.compile and torch.func


def test_compiled_and_mapped():
    torch._dynamo.reset()
    n = 12
    ids = torch.arange(n, dtype=torch.int32) // 5
    mask = _bool(2, 1, n, n)

    def loss(q, k, v, ids, mask):
        return tw.attention(q, k, v, spec=tw.segments(ids, ids) & tw.dense(mask) & tw.causal(), backend="torch").square().sum()

    first, second = inputs(n, n), inputs(n, n)
    want = torch.autograd.grad(loss(*first, ids, mask), first)
    got = torch.autograd.grad(torch.compile(loss, fullgraph=True, backend="aot_eager")(*second, ids, mask), second)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b)

    def one(q, k, v, mask):
        spec = tw.segments(ids, ids) & tw.dense(mask)
        return tw.attention(q[None], k[None], v[None], spec=spec, backend="torch")[0]

    q, k, v = (t.detach() for t in inputs(n, n))
    mapped = torch.func.vmap(one)(q, k, v, mask)
    torch.testing.assert_close(mapped, torch.stack([one(*x) for x in zip(q, k, v, mask, strict=True)]))
    torch._dynamo.reset()


# What has no meaning

Q = torch.zeros(2, 4, 6, 8)
K = torch.zeros(2, 2, 7, 8)


@pytest.mark.parametrize(
    "build, message",
    [
        (lambda: tw.segments(torch.zeros(6), torch.zeros(7)), r"segment_q has dtype float32, expected one of int32, int64"),
        (lambda: tw.segments(torch.zeros(6).int(), torch.zeros(6).int()), r"segment_k has 6 at seqlen_k, expected 7 or 1"),
        (lambda: tw.row_intervals(torch.zeros(3, 1, 6).int(), torch.zeros(6).int()), r"row_start has 3 at batch, expected 2 or 1"),
        (lambda: tw.dense(torch.zeros(6, 7)), r"dense has dtype float32, expected one of bool"),
        (lambda: tw.dense(torch.zeros(7, 6).bool()), r"dense has 7 at seqlen_q, expected 6 or 1"),
        (lambda: tw.dense(torch.zeros(1, 1, 1, 6, 7).bool()), r"dense has 5 dims, expected at most 4"),
        (lambda: tw.key_padding(torch.zeros(2, 1).int()), r"lengths must be a tensor of int32 .* \(batch,\), got shape \(2, 1\)"),
        (lambda: tw.key_padding(torch.zeros(3).int()), r"row_end has 3 at batch, expected 2 or 1|row_start has 3 at batch"),
        (lambda: tw.prefix_lm(-1, 6), r"prefix must be an int of at least 0 or a tensor of shape \(batch,\), got -1"),
        (lambda: tw.prefix_lm(1, 6, align="middle"), r"align is 'middle'"),
        (lambda: tw.chunked(0, 6), r"size must be an int of at least 1, got 0"),
        (lambda: tw.spans([1, 2]), r"ids must be a tensor of int32 or int64 of shape \(seqlen,\) or \(batch, seqlen\), got list"),
        (lambda: tw.documents(ints(1, 5), ints(7)), r"lengths_q has shape \(2,\) and lengths_k \(1,\): they must be equal"),
        (lambda: tw.documents(ints(1, 4), ints(1, 6)), r"segment_q has 5 at seqlen_q, expected 6 or 1"),
        (lambda: tw.dense(torch.ones(6, 7).bool()) & tw.dense(torch.ones(5).bool()), r"both have dense: got \(6, 7\).*\(5,\)"),
        (lambda: tw.dense([True]) & tw.dense(torch.ones(5).bool()), r"both have dense: got \(\) on list"),
        (lambda: tw.dense(torch.ones(5)) & tw.dense(torch.ones(5).bool()), r"both have dense where one is torch\.float32"),
        (lambda: tw.segments(*[ints(1).long()] * 2) & tw.segments(*[ints(1)] * 2), r"ids are torch\.int64.*int\(\)"),
    ],
)  # fmt: skip
def test_bad_masks_are_named(build, message):
    with pytest.raises(tw.InvalidInput, match=message):
        tw.attention(Q, K, K, spec=build(), backend="torch")


def test_hopper_says_why_not():
    spec = tw.segments(torch.zeros(6).int(), torch.zeros(7).int()) & tw.dense(torch.ones(7).bool())
    with pytest.raises(tw.BackendRefused, match=r"the spec has dense, it takes bounds, softcap, alibi, bias, sink, segment, row"):
        tw.attention(Q, K, K, spec=spec, backend="hopper")


# The picture


@pytest.mark.parametrize("tiles", [None, (16, 8)])
def test_explain_draws_a_mask_that_is_a_tensor(tmp_path, tiles):
    pytest.importorskip("matplotlib")
    q, k, v = (t.detach() for t in inputs(N, M))
    spec = terms(N, M)["two terms"]
    path = tmp_path / "made" / "mask.png"
    text = tw.explain(q, k, v, spec=spec, picture=path, tiles=tiles, at=(1, 3))
    assert path.read_bytes().startswith(b"\x89PNG")
    assert text.startswith(tw.explain(q, k, v, spec=spec))
    assert "batch 1, head 3" in text
    if tiles is not None:
        mask = looped(spec, N, M)[1, 3]
        whole = sum(bool(mask[r : r + 16, c : c + 8].all()) for r in range(0, N, 16) for c in range(0, M // 8 * 8, 8))
        free = int(text.splitlines()[-1].split(" free")[0].split()[-1])
        assert free == whole


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"picture": "mask.txt"}, r"picture is 'mask.txt', expected a name that ends in .png, .svg, .pdf"),
        ({"picture": "mask.png", "at": (2, 0)}, r"at is \(2, 0\), expected \(batch, head\) below \(2, 4\)"),
        ({"picture": "mask.png", "tiles": (0, 8)}, r"tiles is \(0, 8\), expected two ints of at least 1"),
    ],
)
def test_explain_names_what_it_cannot_draw(arguments, message):
    pytest.importorskip("matplotlib")
    with pytest.raises(tw.InvalidInput, match=message):
        tw.explain(Q, K, K, spec=tw.dense(torch.ones(7).bool()), **arguments)


# Two of a kind

TWO = {
    "rows": (
        tw.row_intervals(ints(0, 1, 2, 0), ints(3, 4, 4, 2)),
        tw.row_intervals(ints(1), ints(4, 3, 4, 1)[None]),
        ["0110", "0110", "0011", "0000"],
    ),
    "dense": (
        tw.dense(torch.tensor([1, 1, 0, 1]).bool()),
        tw.dense(torch.tensor([[1, 1, 1, 0], [0, 1, 1, 1], [1, 0, 0, 1], [0, 0, 1, 0]]).bool()),
        ["1100", "0101", "1001", "0000"],
    ),
    "segments": (
        tw.segments(ints(0, 0, -1, -1), ints(0, -1, 0, -1)),
        tw.segments(ints(7, -1, 7, -1), ints(7, -1, -1, 7)),
        ["1000", "0010", "0001", "0100"],
    ),
    "all": (
        tw.segments(ints(0, 0, 1, 1), ints(0, 0, 1, 1)) & tw.causal() & tw.row_intervals(ints(0), ints(3)),
        tw.row_intervals(ints(0, 1, 1, 2), ints(9)) & tw.segments(ints(5, 5, 5, 6), ints(5, 5, 5, 5)) & tw.window(1, 9),
        ["1000", "0100", "0010", "0000"],
    ),
}


@pytest.mark.parametrize("name", TWO)
def test_two_masks_of_one_kind_by_hand(name):
    first, second, want = TWO[name]
    literal = torch.tensor([[digit == "1" for digit in row] for row in want])
    q, k, v = (torch.randn(1, 1, 4, 16, generator=torch.Generator().manual_seed(i)) for i in range(3))
    exact, _ = tw.reference(q, k, v, tw.dense(literal))
    for spec in (first & second, second & first):
        mask = mask_of(spec, 4, 4)
        assert mask.expand(1, 1, 4, 4)[0, 0].tolist() == literal.tolist()
        assert torch.equal(mask, mask_of(first, 4, 4) & mask_of(second, 4, 4))
        for backend in ("torch", "triton"):
            torch.testing.assert_close(tw.attention(q, k, v, spec=spec, backend=backend).double(), exact, rtol=1e-5, atol=1e-5)


def test_a_conjunction_is_no_larger_than_it_must_be():
    row = (torch.arange(7) > 2).expand(2, 3, 6, 7)
    both = tw.dense(row) & tw.dense(torch.ones(6, 1).bool().expand(2, 3, 6, 7))
    assert both.tensors.dense.shape == (1, 1, 6, 7)
    tw.attention(torch.zeros(2, 3, 6, 8), *[torch.zeros(2, 3, 7, 8)] * 2, spec=both)
    planned = tw.plan(torch.zeros(2, 3, 6, 8), torch.zeros(2, 3, 7, 8), both, backend="torch")
    assert planned.plan
    again = planned & tw.dense(row)
    assert (again.plan, again.tensors.plan) == ("", None)
