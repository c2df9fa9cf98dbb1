"""The spec, the mask, the tile ranges and the plan. Nothing here calls ``tilewise.bodies`` to learn what is right."""

from __future__ import annotations

import copy
import itertools
import pickle

import pytest
import torch

import tilewise as tw
from tilewise.bodies import tile_range
from tilewise.plan import EMPTY, FREE, MASKED, TilePlan
from tilewise.reference import mask_of
from tilewise.spec import spec_of

BOUNDS = (None, -1, 0, 1, 3)
SPECS = [tw.Spec(u, lo, a) for u, lo, a in itertools.product(BOUNDS, BOUNDS, ("bottom_right", "top_left"))]
LENGTHS = [(1, 1), (5, 5), (3, 7), (7, 3), (1, 6), (6, 1)]


def problem(spec: tw.Spec, seqlen_q: int, seqlen_k: int) -> tw.Problem:
    return tw.Problem.parse(f"seqlen={seqlen_q}x{seqlen_k} head_dim=8 mask={spec} arch=cpu")


def seen(spec: tw.Spec, seqlen_q: int, seqlen_k: int) -> list[list[int]]:
    """The mask by two loops and the words of the docstring."""
    rows = []
    for i in range(seqlen_q):
        position = i if spec.align == "top_left" else i + seqlen_k - seqlen_q
        row = []
        for j in range(seqlen_k):
            late = spec.upper is not None and j > position + spec.upper
            early = spec.lower is not None and j < position - spec.lower
            row.append(0 if late or early else 1)
        rows.append(row)
    return rows


def matrix(text: str) -> list[list[int]]:
    return [[int(c) for c in row] for row in text.split()]


# The value


def test_canonical_form():
    assert tw.causal() == tw.Spec(upper=0) == tw.window(right=0)
    assert tw.full() == tw.Spec() == tw.window() == tw.Spec(align="top_left")
    assert tw.window(3, 0) == tw.Spec(upper=0, lower=3)
    assert tw.causal("top_left") != tw.causal()
    assert len({tw.causal(), tw.Spec(upper=0), tw.window(None, 0)}) == 1


def test_and_takes_the_tighter_bound():
    assert tw.causal() & tw.window(4, 2) == tw.Spec(upper=0, lower=4)
    assert tw.window(4, -1) & tw.causal() == tw.Spec(upper=-1, lower=4)
    assert tw.window(4, 2) & tw.window(1, 5) == tw.window(1, 2)
    assert tw.full() & tw.causal("top_left") == tw.causal("top_left") & tw.full() == tw.causal("top_left")


@pytest.mark.parametrize("align", ["bottom_right", "top_left"])
def test_and_sees_what_both_see(align):
    pairs = itertools.product([s for s in SPECS if s.align == align or s == tw.full()], repeat=2)
    for a, b in pairs:
        both = torch.tensor(seen(a, 4, 5)) * torch.tensor(seen(b, 4, 5))
        assert torch.equal(torch.tensor(seen(a & b, 4, 5)), both), (a, b)


def test_and_refuses_two_corners_and_other_types():
    with pytest.raises(tw.InvalidInput, match=r"'bottom_right' with one aligned 'top_left'.*Build both with the same align"):
        tw.causal() & tw.window(3, align="top_left")
    with pytest.raises(TypeError):
        tw.causal() & 3


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_string_and_copies_round_trip(spec):
    assert tw.Spec.parse(str(spec)) == spec
    assert " " not in str(spec)
    for twin in (copy.copy(spec), copy.deepcopy(spec), pickle.loads(pickle.dumps(spec)), eval(repr(spec), {"Spec": tw.Spec})):
        assert twin == spec
        assert hash(twin) == hash(spec)


def test_strings_that_people_write():
    assert tw.Spec.parse("causal") == tw.causal()
    assert tw.Spec.parse("causal,align:top_left") == tw.causal("top_left")
    assert tw.Spec.parse("lower:3, upper:0") == tw.window(3, 0)
    assert str(tw.full()) == "full"
    assert str(tw.window(3, 0)) == "upper:0,lower:3,align:bottom_right"


def test_spec_is_frozen():
    with pytest.raises(AttributeError):
        tw.causal().upper = 3


def test_arguments_become_specs():
    assert spec_of(False, None, None) == tw.full()
    assert spec_of(True, None, "top_left") == tw.causal("top_left")
    assert spec_of(True, (3, 2), None) == tw.window(3, 0)
    assert spec_of(False, [3, None], None) == tw.window(3)


# The mask

LITERAL = [
    (tw.full(), 2, 3, "111 111"),
    (tw.causal(), 3, 3, "100 110 111"),
    (tw.causal(), 2, 4, "1110 1111"),
    (tw.causal("top_left"), 2, 4, "1000 1100"),
    (tw.causal(), 4, 2, "00 00 10 11"),
    (tw.causal("top_left"), 4, 2, "10 11 11 11"),
    (tw.causal(), 5, 2, "00 00 00 10 11"),
    # A window of W = 3 tokens keeps W - 1 = 2 keys besides self.
    (tw.window(2, 0), 5, 5, "10000 11000 11100 01110 00111"),
    (tw.window(0, 0), 3, 3, "100 010 001"),
    (tw.window(1, 1), 4, 4, "1100 1110 0111 0011"),
    (tw.window(-1, 0), 3, 3, "000 000 000"),
    (tw.window(0, -1), 3, 3, "000 000 000"),
    (tw.window(right=-1), 3, 3, "000 100 110"),
    (tw.window(left=-1), 3, 3, "011 001 000"),
    (tw.window(3, -1), 5, 5, "00000 10000 11000 11100 01110"),
    (tw.window(-1, 2), 4, 4, "0110 0011 0001 0000"),
    (tw.window(1, 0), 2, 4, "0110 0011"),
    (tw.window(1, 0, "top_left"), 2, 4, "1000 1100"),
    (tw.window(1, 0), 4, 2, "00 00 10 11"),
    (tw.window(1, 0, "top_left"), 4, 2, "10 11 01 00"),
    (tw.window(None, 1), 3, 3, "110 111 111"),
    (tw.window(1, None), 3, 3, "111 111 011"),
    (tw.Spec(upper=-2), 4, 4, "0000 0000 1000 1100"),
    (tw.Spec(lower=-3, upper=3), 4, 4, "0001 0000 0000 0000"),
]


@pytest.mark.parametrize("spec, seqlen_q, seqlen_k, rows", LITERAL, ids=str)
def test_mask_equals_a_matrix_written_by_hand(spec, seqlen_q, seqlen_k, rows):
    want = matrix(rows)
    assert mask_of(spec, seqlen_q, seqlen_k).int().tolist() == want
    assert seen(spec, seqlen_q, seqlen_k) == want
    q, k = torch.zeros(1, 1, seqlen_q, 4), torch.zeros(1, 1, seqlen_k, 4)
    v = torch.eye(seqlen_k)[None, None]
    # With equal scores, row i of o is the mask's row divided by its sum.
    for backend in ("torch", "reference"):
        o, lse = tw.attention(q, k, v, spec=spec, return_lse=True, backend=backend)
        counts = torch.tensor(want).sum(-1)
        torch.testing.assert_close(o[0, 0] * counts[:, None], torch.tensor(want).float())
        torch.testing.assert_close(lse[0, 0], counts.float().log())


@pytest.mark.parametrize("seqlen_q, seqlen_k", LENGTHS)
def test_mask_equals_two_loops(seqlen_q, seqlen_k):
    for spec in SPECS:
        assert mask_of(spec, seqlen_q, seqlen_k).int().tolist() == seen(spec, seqlen_q, seqlen_k), spec


@pytest.mark.parametrize("seqlen_q, seqlen_k", LENGTHS)
def test_attention_equals_pytorch_with_a_boolean_mask(seqlen_q, seqlen_k):
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 2, n, 4, generator=generator, dtype=torch.float64) for n in (seqlen_q, seqlen_k, seqlen_k))
    for spec in SPECS:
        mask = torch.tensor(seen(spec, seqlen_q, seqlen_k), dtype=torch.bool)
        some = mask.any(-1)
        want = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        for backend in ("torch", "reference"):
            o, lse = tw.attention(q, k, v, spec=spec, return_lse=True, backend=backend)
            torch.testing.assert_close(o[:, :, some], want[:, :, some], msg=lambda m, s=spec: f"{s}: {m}")
            assert not o[:, :, ~some].any()
            assert (lse[:, :, ~some] == float("-inf")).all()
            assert lse[:, :, some].isfinite().all()


def test_causal_argument_equals_pytorch_is_causal_from_the_top_left():
    q, k = torch.randn(1, 2, 4, 8), torch.randn(1, 2, 7, 8)
    want = torch.nn.functional.scaled_dot_product_attention(q, k, k, is_causal=True)
    torch.testing.assert_close(tw.attention(q, k, k, causal=True, align="top_left", backend="torch"), want)
    square = tw.attention(k, k, k, causal=True, backend="torch")
    torch.testing.assert_close(square, torch.nn.functional.scaled_dot_product_attention(k, k, k, is_causal=True))


# Tiles


def kinds(block: torch.Tensor) -> int:
    return EMPTY if not block.any() else FREE if block.all() else MASKED


@pytest.mark.parametrize("seqlen_q, seqlen_k", [*LENGTHS, (9, 13), (13, 9), (8, 8)])
@pytest.mark.parametrize("block_m, block_n", [(1, 1), (2, 3), (4, 2), (16, 16)])
def test_plan_claims_only_what_is_so(seqlen_q, seqlen_k, block_m, block_n):
    for spec in SPECS:
        mask = torch.tensor(seen(spec, seqlen_q, seqlen_k))
        plan = TilePlan(problem(spec, seqlen_q, seqlen_k), block_m, block_n)
        tiles = plan.tiles()
        assert tiles.shape == (-(-seqlen_q // block_m), -(-seqlen_k // block_n))
        both_ways = torch.zeros_like(tiles)
        for n in range(plan.n_blocks):
            lo, free_lo, free_hi, hi = plan.queries_of(n)
            assert 0 <= lo <= free_lo <= free_hi <= max(hi, lo)
            both_ways[lo:hi, n] = MASKED
            both_ways[free_lo:free_hi, n] = FREE
        for m, n in itertools.product(range(plan.m_blocks), range(plan.n_blocks)):
            block = mask[m * block_m : (m + 1) * block_m, n * block_n : (n + 1) * block_n]
            for claims, whole in ((tiles, block.shape[1] == block_n), (both_ways, block.shape[0] == block_m)):
                if claims[m, n] != MASKED:
                    assert claims[m, n] == kinds(block), (spec, m, n, claims)
                # A whole tile that needs no mask is known to need none.
                assert not (whole and kinds(block) == FREE) or claims[m, n] == FREE, (spec, m, n, claims)
        assert plan.counts() == tuple(int((tiles == kind).sum()) for kind in (EMPTY, MASKED, FREE))


@pytest.mark.parametrize("seqlen_q, seqlen_k", [(9, 13), (13, 9), (8, 8), (1, 6)])
@pytest.mark.parametrize("block_m, block_n", [(1, 1), (2, 3), (4, 2)])
def test_transposed_plan_visits_the_same_tiles(seqlen_q, seqlen_k, block_m, block_n):
    # Where every row's band is real (upper + lower >= 0) a tile is visited exactly if some pair in it is seen.
    for spec in SPECS:
        if spec.upper is not None and spec.lower is not None and spec.upper + spec.lower < 0:
            continue
        mask = torch.tensor(seen(spec, seqlen_q, seqlen_k))
        plan = TilePlan(problem(spec, seqlen_q, seqlen_k), block_m, block_n)
        by_rows = {(m, n) for m in range(plan.m_blocks) for n in range(plan.keys_of(m)[0], plan.keys_of(m)[3])}
        by_columns = {(m, n) for n in range(plan.n_blocks) for m in range(plan.queries_of(n)[0], plan.queries_of(n)[3])}
        some = {(i // block_m, j // block_n) for i, j in mask.nonzero().tolist()}
        # A row or column of tiles that sees nothing at all may still be given one tile.
        rows, columns = {m for m, _ in some}, {n for _, n in some}
        assert {t for t in by_rows if t[0] in rows} == some, spec
        assert {t for t in by_columns if t[1] in columns} == some, spec


def test_tile_range_by_brute_force():
    cases = itertools.product((0, 3, -4), (1, 2, 5), (0, 1, 7, 12), (None, -6, -1, 0, 4), (None, -6, -1, 0, 4), (1, 3, 4))
    for row_lo, rows, col_end, upper, lower, block in cases:
        lo, free_lo, free_hi, hi = tile_range(
            row_lo, row_lo + rows, col_end, upper or 0, lower or 0, block, upper is not None, lower is not None
        )
        assert 0 <= lo <= free_lo <= free_hi <= hi
        for tile in range(-(-col_end // block) + 2):
            columns = range(tile * block, (tile + 1) * block)
            ok = [
                c < col_end and (upper is None or c <= r + upper) and (lower is None or c >= r - lower)
                for r in range(row_lo, row_lo + rows)
                for c in columns
            ]
            if not lo <= tile < hi:
                assert not any(ok)
            if free_lo <= tile < free_hi:
                assert all(ok)


def test_bounds_drop_only_what_cannot_matter():
    for spec, (seqlen_q, seqlen_k) in itertools.product(SPECS, LENGTHS):
        upper, lower, has_upper, has_lower = problem(spec, seqlen_q, seqlen_k).bounds
        assert not has_upper or upper == spec.upper
        assert not has_lower or lower == spec.lower
        kept = tw.Spec(upper if has_upper else None, lower if has_lower else None, spec.align)
        # The alignment of a spec without bounds is void, so the kept bounds are compared in the loops' words.
        assert seen(kept, seqlen_q, seqlen_k) == seen(spec, seqlen_q, seqlen_k), spec
        # And each kept bound hides something by itself.
        alone_upper, alone_lower = tw.Spec(upper=spec.upper, align=spec.align), tw.Spec(lower=spec.lower, align=spec.align)
        for there, alone in ((has_upper, alone_upper), (has_lower, alone_lower)):
            assert not there or any(0 in row for row in seen(alone, seqlen_q, seqlen_k)), spec


@pytest.mark.parametrize(
    "build, message",
    [
        (lambda: tw.Spec(upper=1.5), r"upper must be an int or None, got 1\.5 of type float"),
        (lambda: tw.Spec(lower=True), r"lower must be an int or None, got True of type bool"),
        (lambda: tw.Spec(upper=2**30), r"upper is 1073741824, but bounds lie strictly between -2\*\*30 and 2\*\*30"),
        (lambda: tw.Spec(align="middle"), r"align is 'middle', expected one of 'bottom_right', 'top_left'"),
        (lambda: tw.window(-2), r"window's left is -2, expected None \(unbounded\) or an int of at least -1.*spec=Spec"),
        (lambda: tw.window(3, -7), r"window's right is -7"),
        (lambda: tw.window(2.0), r"window's left must be an int or None, got 2\.0 of type float"),
        (lambda: tw.Spec.parse("upper:1,upper:2"), r"names 'upper' twice"),
        (lambda: tw.Spec.parse("upper:x"), r"mask 'upper:x': upper needs an int, got 'x'"),
        (lambda: tw.Spec.parse("diagonal"), r"mask 'diagonal': unknown term 'diagonal'\. Expected 'full', 'causal'"),
        (lambda: tw.Spec.parse(""), r"unknown term ''"),
        (lambda: tw.Spec.parse("full:3"), r"unknown term 'full:3'"),
        (lambda: tw.Spec.parse("align:left"), r"align is 'left'"),
        (lambda: tw.Spec.parse("causal,upper:3"), r"names 'upper' twice"),
    ],
)
def test_bad_specs_are_named(build, message):
    with pytest.raises(tw.InvalidInput, match=message):
        build()
