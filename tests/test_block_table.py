"""The plan of masks that come as tensors: every EMPTY and every FREE is exact, and the lists hold what the kinds say."""

from __future__ import annotations

import itertools

import pytest
import torch

import tilewise as tw
from tilewise.plan import EMPTY, FREE, MASKED, MaskTensors, TilePlan, block_table, made_table, table_of, tile_kinds
from tilewise.spec import Tensors

BLOCKS = [(1, 1), (2, 3), (4, 2), (16, 16)]
BATCH, HEADS = 2, 2


def problem(spec: tw.Spec, seqlen_q: int, seqlen_k: int) -> tw.Problem:
    return tw.Problem.parse(f"batch={BATCH} heads={HEADS} seqlen={seqlen_q}x{seqlen_k} head_dim=8 mask={spec} arch=cpu")


def ints(*shape: int, high: int, seed: int) -> torch.Tensor:
    return torch.randint(0, high, shape, generator=torch.Generator().manual_seed(seed), dtype=torch.int32)


def masks(n: int, m: int) -> dict[str, MaskTensors]:
    """Every term by itself and together, broadcast in every way, sorted ids and unsorted ones."""
    sorted_q, sorted_k = (ints(BATCH, size, high=3, seed=size).sort(-1).values for size in (n, m))
    start = ints(BATCH, HEADS, n, high=m + 1, seed=3)
    end = start + ints(BATCH, HEADS, n, high=5, seed=4)
    random = torch.rand(BATCH, HEADS, n, m, generator=torch.Generator().manual_seed(5)) < 0.5
    blocks = torch.zeros(BATCH, HEADS, n, m, dtype=torch.bool)
    blocks[0, :, n // 3 :, : m // 2] = True
    keys = (ints(BATCH, m, high=2, seed=6) == 0)[:, None, None, :]
    rows = (ints(HEADS, n, high=2, seed=7) == 0)[None, :, :, None]
    shape = (BATCH, HEADS, n, m)
    every, first = (BATCH, HEADS, n), (slice(1), slice(1))
    ones = torch.ones(BATCH, n, dtype=torch.int32), torch.ones(BATCH, m, dtype=torch.int32)
    return {
        "documents": MaskTensors(segment_q=sorted_q, segment_k=sorted_k),
        "unsorted ids": MaskTensors(ints(BATCH, n, high=3, seed=1), ints(BATCH, m, high=3, seed=2)),
        "ids for all batches": MaskTensors(sorted_q[:1].expand(BATCH, n), sorted_k[:1].expand(BATCH, m)),
        "one document": MaskTensors(*ones),
        "no common document": MaskTensors(segment_q=sorted_q, segment_k=sorted_k + 7),
        "rows": MaskTensors(row_start=start, row_end=end),
        "rows for all": MaskTensors(None, None, start[first].expand(every), end[first].expand(every)),
        "key padding": MaskTensors(None, None, torch.zeros_like(start[:1, :1, :1]), end[:, :1, :1].expand(every)),
        "random": MaskTensors(dense=random),
        "dense blocks": MaskTensors(dense=blocks),
        "dense for all heads": MaskTensors(dense=blocks[:, :1].expand(shape)),
        "dense keys": MaskTensors(dense=keys.expand(shape)),
        "dense rows": MaskTensors(dense=rows.expand(shape)),
        "nothing": MaskTensors(dense=torch.zeros(1, 1, 1, 1, dtype=torch.bool).expand(shape)),
        "everything": MaskTensors(dense=torch.ones(1, 1, 1, 1, dtype=torch.bool).expand(shape)),
        "together": MaskTensors(sorted_q, sorted_k, start, end, random | blocks),
    }  # fmt: skip


def seen(spec: tw.Spec, mask: MaskTensors, n: int, m: int) -> torch.Tensor:
    """The whole mask by plain loops."""
    out = torch.zeros(BATCH, HEADS, n, m, dtype=torch.bool)
    shift = m - n if spec.align == "bottom_right" else 0
    for b, h, i, j in itertools.product(range(BATCH), range(HEADS), range(n), range(m)):
        ok = (spec.upper is None or j <= i + shift + spec.upper) and (spec.lower is None or j >= i + shift - spec.lower)
        if mask.segment_q is not None:
            ok = ok and int(mask.segment_q[b, i]) == int(mask.segment_k[b, j])
        if mask.row_start is not None:
            ok = ok and int(mask.row_start.expand(BATCH, HEADS, n)[b, h, i]) <= j < int(mask.row_end[b, h, i])
        if mask.dense is not None:
            ok = ok and bool(mask.dense[b, h, i, j])
        out[b, h, i, j] = ok
    return out


SPECS = (tw.full(), tw.causal(), tw.causal("top_left"), tw.window(3, 1))
NAMES = list(masks(1, 1))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("n, m", [(9, 13), (16, 16), (7, 4), (1, 6)])
def test_claims_are_exact(name, n, m):
    mask = masks(n, m)[name]
    for spec, (block_m, block_n), transposed in itertools.product(SPECS, BLOCKS, (False, True)):
        want = seen(spec, mask, n, m)
        kinds = tile_kinds(problem(spec, n, m), mask, block_m, block_n, transposed)
        assert kinds.dtype == torch.int8
        kinds = kinds.expand(BATCH, HEADS, -(-n // block_m), -(-m // block_n))
        for at in itertools.product(*map(range, kinds.shape)):
            b, h, r, c = at
            tile = want[b, h, r * block_m : (r + 1) * block_m, c * block_n : (c + 1) * block_n]
            # The end of what is streamed needs a mask.
            whole = tile.shape[0] == block_m if transposed else tile.shape[1] == block_n
            if kinds[at] == EMPTY:
                assert not tile.any(), (spec, at)
            if kinds[at] == FREE:
                assert tile.all(), (spec, at)
                assert whole, (spec, at)
            if (block_m, block_n) == (1, 1):  # one pair is one tile: everything is known
                assert kinds[at] == (FREE if tile.all() else EMPTY), (spec, at)


@pytest.mark.parametrize("transposed", [False, True])
def test_bounds_alone_are_those_of_the_closed_form(transposed):
    everything = masks(9, 13)["everything"]
    for spec, (block_m, block_n) in itertools.product((*SPECS, tw.Spec(upper=-3, lower=5), tw.window(0, 0)), BLOCKS):
        plan = TilePlan(problem(spec, 9, 13), block_m, block_n)
        want = plan.tiles()
        if transposed:
            want.zero_()
            for c in range(plan.n_blocks):
                lo, free_lo, free_hi, hi = plan.queries_of(c)
                want[lo:hi, c] = MASKED
                want[free_lo:free_hi, c] = FREE
        kinds = tile_kinds(plan.problem, everything, block_m, block_n, transposed)[0, 0]
        # The closed form may visit a tile between two bounds that see nothing in it; never the other way round.
        assert ((kinds == want) | ((kinds == EMPTY) & (want == MASKED))).all(), spec
        assert torch.equal(kinds == FREE, want == FREE), spec


@pytest.mark.parametrize("name", ["documents", "unsorted ids", "rows", "random", "nothing", "everything", "together"])
def test_lists_hold_the_kinds(name):
    n, m = 13, 17
    kinds = tile_kinds(problem(tw.causal(), n, m), masks(n, m)[name], 2, 3)
    for transposed in (False, True):
        table = block_table(kinds, transposed)
        grid = kinds.transpose(-1, -2) if transposed else kinds
        assert table.tiles.shape == grid.shape
        assert table.counts.shape == (*grid.shape[:3], 2)
        assert table.counts.dtype == table.tiles.dtype == torch.int32
        assert table.counts.is_contiguous()
        assert table.tiles.is_contiguous()
        for b, h, r in itertools.product(*map(range, grid.shape[:3])):
            row = grid[b, h, r].tolist()
            free, masked = table.counts[b, h, r].tolist()
            listed = table.tiles[b, h, r].tolist()
            assert listed[:free] == [c for c, kind in enumerate(row) if kind == FREE]
            assert listed[free : free + masked] == [c for c, kind in enumerate(row) if kind == MASKED]


@pytest.mark.parametrize("name", ["documents", "unsorted ids", "ids for all batches", "rows", "rows for all", "key padding"])
def test_the_kernel_makes_the_same_table(name):
    from tilewise.backends.tables import fill_table

    def by_kernel(p, mask, *geometry):
        table = table_of(p, Tensors(**mask._asdict()), *geometry, fill_table)
        assert table is not None
        return table

    from tilewise.backends import tables

    n, m = 90, 70  # more columns than few, either way
    mask = masks(n, m)[name]
    for spec, transposed in ((tw.full(), True), (tw.causal(), False), (tw.window(20, 9), True)):
        p = problem(spec, n, m)
        made = made_table(p, mask, 8, 4, transposed)
        got = by_kernel(p, mask, 8, 4, transposed)
        assert torch.equal(made.counts, got.counts), (spec, transposed)
        assert torch.equal(made.tiles, got.tiles), (spec, transposed)
    assert tables.FEW[0] < -(-m // 4) <= tables.MANY[0]
    # More than are judged at once, and few.
    wide = masks(24, 300)[name]
    full, causal = tw.full(), tw.causal()
    wide_runs = [((8, 2), full, False), ((8, 2), causal, True), ((2, 8), causal, False), ((2, 8), full, True)]
    for blocks, spec, transposed in (*wide_runs, ((8, 32), full, False), ((8, 32), causal, True)):
        p = problem(spec, 24, 300)
        made, got = made_table(p, wide, *blocks, transposed), by_kernel(p, wide, *blocks, transposed)
        assert torch.equal(made.counts, got.counts), (blocks, spec, transposed)
        assert torch.equal(made.tiles, got.tiles), (blocks, spec, transposed)
    # Three consumers of a Hopper kernel make tiles whose size is no power of two.
    p = problem(tw.causal(), n, m)
    for blocks in ((24, 4), (8, 12)):
        made, got = made_table(p, mask, *blocks, True), by_kernel(p, mask, *blocks, True)
        assert torch.equal(made.counts, got.counts), blocks
        assert torch.equal(made.tiles, got.tiles), blocks


@pytest.mark.parametrize("m", [1, 31, 32, 33, 64, 90])
def test_bits_make_the_same_table(m):
    """Packed or not, of a mask of every extent; bits past the last key are 0."""
    from tilewise.backends.tables import pack_dense

    n = 40
    for shape in ((BATCH, HEADS, n, m), (1, 1, n, m), (1, HEADS, 1, m), (BATCH, 1, n, 1)):
        dense = torch.rand(shape, generator=torch.Generator().manual_seed(m)) < 0.9
        dense[..., : n // 2, :] = True
        wide = dense.expand(*shape[:2], n, m)
        words = pack_dense(wide)
        lanes = (words[..., None] >> torch.arange(32)) & 1
        lanes = lanes.flatten(-2)
        if shape[3] == 1:
            assert (lanes == lanes[..., :1]).all()
            lanes = lanes[..., :1]
        else:
            assert not lanes[..., m:].any()
        assert torch.equal(lanes[..., :m].bool().expand(*shape[:2], -1, m).expand_as(wide), wide)
        for block_m, block_n in ((16, 32), (8, 64)):
            for transposed in (False, True):
                p = problem(tw.full(), n, m)
                bytes_, bits = (tile_kinds(p, MaskTensors(dense=t), block_m, block_n, transposed) for t in (wide, words))
                assert torch.equal(bytes_, bits), (shape, block_m, block_n, transposed)


def test_what_is_broadcast_is_read_once():
    """A mask that is the same for all batches, heads or rows makes one list for all of them."""
    shape = (BATCH, HEADS, 9, 13)
    keys = torch.zeros(1, 1, 1, 13, dtype=torch.bool).expand(shape)
    heads = torch.zeros(1, HEADS, 9, 13, dtype=torch.bool).expand(shape)
    assert tile_kinds(problem(tw.full(), 9, 13), MaskTensors(dense=keys), 2, 3).shape == (1, 1, 5, 5)
    assert tile_kinds(problem(tw.full(), 9, 13), MaskTensors(dense=heads), 2, 3).shape == (1, HEADS, 5, 5)
    ids = ints(BATCH, 9, high=3, seed=0), ints(BATCH, 13, high=3, seed=0)
    assert tile_kinds(problem(tw.full(), 9, 13), MaskTensors(*ids), 2, 3).shape == (BATCH, 1, 5, 5)
