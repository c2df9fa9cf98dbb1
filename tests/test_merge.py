"""``merge``: two halves of the keys make the whole."""

from __future__ import annotations

import pytest
import torch

import tilewise as tw

NEG_INF = float("-inf")


def draw(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def half(seed: int, dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, torch.Tensor]:
    return draw(2, 3, 5, 4, seed=seed, dtype=dtype), draw(2, 3, 5, seed=seed + 100, dtype=dtype)


def empty(fill: float = 0.0, dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.full((2, 3, 5, 4), fill, dtype=dtype), torch.full((2, 3, 5), NEG_INF, dtype=dtype)


@pytest.mark.parametrize("backend", ["torch", "reference"])
@pytest.mark.parametrize("split", [0, 1, 4, 9])
def test_halves_of_the_keys_make_the_whole(backend, split):
    q, k, v = (draw(1, h, 9, 6, seed=i).requires_grad_() for i, h in enumerate((4, 2, 2)))
    o, lse = tw.attention(q, k, v, return_lse=True, backend=backend)
    left = tw.attention(q, k[:, :, :split], v[:, :, :split], return_lse=True, backend=backend)
    right = tw.attention(q, k[:, :, split:], v[:, :, split:], return_lse=True, backend=backend)
    got, got_lse = tw.merge(*left, *right)
    torch.testing.assert_close(got, o)
    torch.testing.assert_close(got_lse, lse)
    want = torch.autograd.grad(o.square().sum() + lse.sin().sum(), (q, k, v))
    grads = torch.autograd.grad(got.square().sum() + got_lse.sin().sum(), (q, k, v))
    for a, b in zip(grads, want, strict=True):
        torch.testing.assert_close(a, b)


def test_causal_halves_with_rows_that_see_nothing():
    q, k, v = (draw(1, 2, 8, 6, seed=i) for i in range(3))
    whole = tw.reference(q, k, v, tw.causal())
    left = tw.attention(q, k[:, :, :5], v[:, :, :5], spec=tw.causal("top_left"), return_lse=True, backend="torch")
    # Key 5 is the first of the right half: its position 0 is position 5 of the whole.
    right = tw.attention(q, k[:, :, 5:], v[:, :, 5:], spec=tw.Spec(upper=0), return_lse=True, backend="torch")
    assert (right[1][:, :, :5] == NEG_INF).all()
    for got, want in zip(tw.merge(*left, *right), whole, strict=True):
        torch.testing.assert_close(got, want)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("fill", [0.0, float("nan"), float("inf")])
def test_empty_half_is_exactly_neutral(dtype, fill):
    o, lse = half(0, dtype)
    for got in (tw.merge(o, lse, *empty(fill, dtype)), tw.merge(*empty(fill, dtype), o, lse)):
        assert torch.equal(got[0], o)
        assert torch.equal(got[1], lse)
        assert got[0].dtype == got[1].dtype == dtype


@pytest.mark.parametrize("fill", [0.0, float("nan"), float("inf")])
def test_two_empty_halves_are_empty(fill):
    o, lse = tw.merge(*empty(fill), *empty(fill))
    assert torch.equal(o, torch.zeros_like(o))
    assert (lse == NEG_INF).all()


def test_half_precision_outputs_keep_their_dtypes():
    (o1, lse1), (o2, lse2) = half(0), half(1)
    o, lse = tw.merge(o1.bfloat16(), lse1.float(), o2.bfloat16(), lse2.float())
    assert (o.dtype, lse.dtype) == (torch.bfloat16, torch.float32)
    want, _ = tw.merge(o1.bfloat16().double(), lse1.float().double(), o2.bfloat16().double(), lse2.float().double())
    assert torch.equal(o, want.float().bfloat16())


def test_commutes_bit_for_bit_and_associates():
    a, b, c = half(0, torch.float32), half(1, torch.float32), half(2, torch.float32)
    for x, y in zip(tw.merge(*a, *b), tw.merge(*b, *a), strict=True):
        assert torch.equal(x, y)
    for x, y in zip(tw.merge(*tw.merge(*a, *b), *c), tw.merge(*a, *tw.merge(*b, *c)), strict=True):
        torch.testing.assert_close(x, y)


@pytest.mark.parametrize("shift", [-3000.0, 3000.0])
def test_far_scores_do_not_overflow(shift):
    (o1, lse1), (o2, lse2) = half(0), half(1)
    o, lse = tw.merge(o1, lse1 + shift, o2, lse2 + shift)
    want, want_lse = tw.merge(o1, lse1, o2, lse2)
    torch.testing.assert_close(o, want, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(lse, want_lse + shift)
    o, lse = tw.merge(o1, lse1, o2, lse2 + shift)
    assert torch.equal(o, o1 if shift < 0 else o2)
    assert torch.equal(lse, lse1 if shift < 0 else lse2 + shift)


def test_formula():
    (o1, lse1), (o2, lse2) = half(0), half(1)
    o, lse = tw.merge(o1, lse1, o2, lse2)
    e1, e2 = lse1.exp()[..., None], lse2.exp()[..., None]
    torch.testing.assert_close(o, (e1 * o1 + e2 * o2) / (e1 + e2))
    torch.testing.assert_close(lse, torch.logaddexp(lse1, lse2))


def test_gradients_of_first_and_second_order():
    tensors = [t[:1, :1, :2].clone().requires_grad_() for t in (*half(0), *half(1))]
    assert torch.autograd.gradcheck(tw.merge, tensors)
    assert torch.autograd.gradgradcheck(tw.merge, tensors)


@pytest.mark.parametrize("fill", [0.0, float("nan"), float("inf")])
@pytest.mark.parametrize("which", ["first", "second", "both", "rows"])
def test_gradients_of_empty_halves_are_zero(which, fill):
    o1, lse1, o2, lse2 = *half(0), *half(1)
    gone1, gone2 = (torch.zeros_like(lse1, dtype=torch.bool) for _ in range(2))
    if which in ("first", "both"):
        gone1[:] = True
    if which in ("second", "both"):
        gone2[:] = True
    if which == "rows":
        gone1[:, :, :3] = True
        gone2[:, :, 2:4] = True
    # as a kernel that never wrote the rows would leave them
    halves = [
        (o1.masked_fill(gone1[..., None], fill), lse1.masked_fill(gone1, NEG_INF)),
        (o2.masked_fill(gone2[..., None], fill), lse2.masked_fill(gone2, NEG_INF)),
    ]
    leaves = [t.clone().requires_grad_() for pair in halves for t in pair]
    o, lse = tw.merge(*leaves)
    assert o.isfinite().all()
    loss = o.square().sum() + lse.masked_fill(lse == NEG_INF, 0.0).sin().sum()
    do1, dlse1, do2, dlse2 = torch.autograd.grad(loss, leaves)
    for grad in (do1, dlse1, do2, dlse2):
        assert grad.isfinite().all()
    for grad, gone in ((do1, gone1), (dlse1, gone1), (do2, gone2), (dlse2, gone2)):
        assert not grad[gone].any()
    alone = ~gone1 & gone2
    torch.testing.assert_close(do1[alone], 2 * o1[alone])
    torch.testing.assert_close(dlse1[alone], lse1[alone].cos())


def test_a_nan_of_a_half_that_counts_is_not_hidden():
    o1, lse1, o2, lse2 = *half(0), *half(1)
    o1[0, 0, 0, 0] = float("nan")
    o, _ = tw.merge(o1, lse1 - 2000.0, o2, lse2)
    assert o.isnan().sum() == 1


def test_compiles_whole():
    torch._dynamo.reset()
    args = (*half(0), *half(1))
    for got, want in zip(torch.compile(tw.merge, fullgraph=True, backend="aot_eager")(*args), tw.merge(*args), strict=True):
        torch.testing.assert_close(got, want)


OUT, LSE = torch.zeros(2, 5, 4), torch.zeros(2, 5)


@pytest.mark.parametrize(
    "args, message",
    [
        ((None, LSE, OUT, LSE), r"o1 must be a floating-point tensor, got NoneType"),
        ((OUT, LSE, OUT, LSE.int()), r"lse2 must be a floating-point tensor, got torch\.int32"),
        ((OUT, LSE, OUT.to("meta"), LSE), r"o2 is on meta but o1 is on cpu"),
        ((OUT, LSE, OUT[:1], LSE), r"o1 and o2 must have one shape and dtype, got \(2, 5, 4\) torch\.float32 and \(1, 5, 4\)"),
        ((OUT, LSE, OUT.half(), LSE), r"o1 and o2 must have one shape and dtype, .* torch\.float16"),
        ((OUT, LSE, OUT, LSE.double()), r"lse1 and lse2 must have .* \(2, 5\), and one dtype; got .* torch\.float64"),
        ((OUT, LSE[:1], OUT, LSE), r"lse1 and lse2 must have o1's shape without its last dim, \(2, 5\).*got \(1, 5\)"),
        ((LSE.sum(), LSE.sum(), LSE.sum(), LSE.sum()), r"o1 and o2 must have"),
    ],
)
def test_bad_input_is_named(args, message):
    with pytest.raises(tw.InvalidInput, match=message):
        tw.merge(*args)
