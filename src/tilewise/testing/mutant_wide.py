"""The faults of wide heads, as values (see ``mutant_list``)."""

from __future__ import annotations

from .mutant_list import FWD, PARTS, Mutant

__all__ = ["WIDE_MUTANTS"]

WIDE = "backends/triton/wide.py"
WIDE_FWD = "backends/triton/wide_fwd.py"

WIDE_MUTANTS: tuple[Mutant, ...] = (
    Mutant(
        "split_first_part_twice",
        "every program that shares columns makes the first of them",
        PARTS,
        "return tile // SPLIT, tile % SPLIT * COLS",
        "return tile // SPLIT, 0",
        ("wide_dropout",),
    ),
    Mutant(
        "split_v_whole",
        "the columns of v are always the first",
        FWD,
        "BLOCK_N, BLOCK_DV, BULK, WIDEN, HALVES, col\n",
        "BLOCK_N, BLOCK_DV, BULK, WIDEN, HALVES\n",
        ("wide_dropout",),
    ),
    Mutant(
        "wide_rows_end_early",
        "weights are not written for tiles that only rows past the end see, but read there",
        WIDE,
        "first_row + BLOCK_M, seqlen_k",
        "min(first_row + BLOCK_M, q_start + seqlen_q), seqlen_k",
        ("wide_unseen_keys",),
    ),
    Mutant(
        "wide_first_head_for_all",
        "the heads that come later are those that came first",
        WIDE,
        "unit = first + local // group",
        "unit = local // group",
        ("wide_heads_apart",),
    ),
    Mutant(
        "wide_group_of_one",
        "dk and dv of a group are those of its last head",
        WIDE,
        "acc = tl.dot(tl.trans(tile), row_tile, acc, input_precision=PRECISION)",
        "acc = tl.dot(tl.trans(tile), row_tile, acc if step > lo * steps else acc * 0.0, input_precision=PRECISION)",
        ("wide_heads_apart", "wide_512"),
    ),
    Mutant(
        "wide_dp_is_lost",
        "ds without the gradient of the weights",
        WIDE,
        "ds = p * (dp - delta[:, None])",
        "ds = p * (0.0 * dp - delta[:, None])",
        ("wide_512",),
    ),
    Mutant(
        "wide_softcap_slope",
        "the softcap's derivative is left out where weights are kept",
        WIDE,
        "            ds = before(ds, slope, score)\n",
        "            ds = ds\n",
        ("wide_terms",),
    ),
    Mutant(
        "wide_mask_lost",
        "tensors of the mask are not asked where weights are kept",
        WIDE,
        "ok = seen(ok, mask, of_query, of_key, batch, head, offs_m, kv_pos, start_n, seqlen_q, seqlen_k, False)",
        "ok = ok",
        ("wide_terms",),
    ),
    Mutant(
        "wide_scale_lost",
        "dk and dq without the scale",
        WIDE,
        "acc * scale",
        "acc",
        ("wide_512",),
        count=2,
    ),
    Mutant(
        "wide_tile_keeps_its_pivot",
        "weights of a tile meet the values as they were kept, whatever the pivot of the row is",
        WIDE_FWD,
        "operand(tile.to(tl.float32) * alpha[:, None], DTYPE, WIDEN)",
        "operand(tile.to(tl.float32), DTYPE, WIDEN)",
        ("wide_512", "wide_384"),
    ),
    Mutant(
        "wide_sum_keeps_its_pivot",
        "the sum of a tile counts as it was kept",
        WIDE_FWD,
        "l_i += alpha * tl.load(sums_ptr + at) * (1.0 / steps)",
        "l_i += tl.load(sums_ptr + at) * (1.0 / steps)",
        ("wide_512", "wide_384"),
    ),
    Mutant(
        "wide_sink_not_counted",
        "a sink takes no weight from wide heads",
        WIDE_FWD,
        "l_i += tl.math.exp2((logit - pivot) * unit)",
        "l_i += 0.0 * tl.math.exp2((logit - pivot) * unit)",
        ("wide_terms",),
    ),
    Mutant(
        "wide_v_of_the_first_columns",
        "every part of the columns of o is made of the first columns of v",
        WIDE_FWD,
        "SIZE, STEP, COLS, BULK, WIDEN, col)",
        "SIZE, STEP, COLS, BULK, WIDEN)",
        ("wide_512",),
    ),
    Mutant(
        "wide_forward_mask_lost",
        "tensors of the mask are not asked where forward weights are kept",
        WIDE_FWD,
        "ok = seen(ok, mask, of_query, of_key, batch, head, offs_m, kv_pos, start_n, seqlen_q, seqlen_k, False)",
        "ok = ok",
        ("wide_terms",),
    ),
)
