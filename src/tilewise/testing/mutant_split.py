"""The faults of float32 operands that are brought into another form, as values (see ``mutant_list``)."""

from __future__ import annotations

from .mutant_list import Mutant

__all__ = ["SPLIT_MUTANTS"]

SPLIT = "backends/triton/split.py"
SPLIT_LAUNCH = "backends/triton/split_launch.py"

SPLIT_MUTANTS: tuple[Mutant, ...] = (
    Mutant(
        "split_parts_lost",
        "the parts of q, k, v and do after the first are zero",
        SPLIT,
        "x = tl.where(tl.abs(x) == float(\"inf\"), 0.0, x - rounded)",
        "x = x * 0.0",
        ("split_causal",),
    ),
    Mutant(
        "split_third_part_lost",
        "p without its third part",
        SPLIT,
        "return x0.to(like.dtype), x1.to(like.dtype), x2.to(like.dtype)",
        "return x0.to(like.dtype), x1.to(like.dtype), (x2 * 0.0).to(like.dtype)",
        ("thin_window", "split_causal"),
    ),
    Mutant(
        "split_cross_product_lost",
        "no product of the second part of the left operand with the first of the right one",
        SPLIT,
        "    rest = tl.dot(a[1], b[0], rest)\n    if GUARD",
        "    if GUARD",
        ("split_causal",),
    ),
    Mutant(
        "split_middle_product_lost",
        "no product of the second parts",
        SPLIT,
        "        rest = tl.dot(a[1], b[1], rest)\n        rest = tl.dot(a[0], b[1], rest)",
        "        rest = tl.dot(a[0], b[1], rest)",
        ("split_causal",),
    ),
    Mutant(
        "split_kept_product_lost",
        "the same where weights are kept",
        SPLIT,
        "return tl.dot(a[1], b[0], rest)",
        "return rest",
        ("split_kept", "tf32_kept"),
    ),
    Mutant(
        "split_kept_part_lost",
        "kept weights whose later parts are zero",
        SPLIT,
        "x = tl.where(tl.abs(rest) < float(\"inf\"), rest, 0.0)",
        "x = x * 0.0",
        ("tf32_kept", "split_kept"),
    ),
    Mutant(
        "split_part_of_another_head",
        "the third part is that of the next head",
        SPLIT,
        "head * 3 + 2, row",
        "head * 3 + 3, row",
        ("split_causal",),
    ),
    Mutant(
        "split_sign_lost",
        "the sign of a negative scale does not reach the parts of q",
        SPLIT_LAUNCH,
        "sign = -1.0 if problem.sm_scale < 0 else 1.0",
        "sign = 1.0",
        ("split_causal",),
    ),
    Mutant(
        "turned_p_in_order",
        "p is multiplied with keys in another order",
        SPLIT,
        "tl.dot(in_turn(to_tf32(p)), tl.trans(v_tile), acc",
        "tl.dot(to_tf32(p), tl.trans(v_tile), acc",
        ("tf32_columns",),
    ),
    Mutant(
        "turned_last_keys_lost",
        "the columns of the last keys are not written",
        SPLIT,
        "(rows + 7) // 8 * 8",
        "rows // 8 * 8",
        ("tf32_columns",),
    ),
)
