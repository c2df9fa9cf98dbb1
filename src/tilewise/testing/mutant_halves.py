"""The faults of float32 operands that are brought into halves, as values (see ``mutant_list``)."""

from __future__ import annotations

from .mutant_list import FWD, Mutant

__all__ = ["HALVES_MUTANTS"]

HALVES = "backends/triton/halves.py"
LAUNCH = "backends/triton/halves_launch.py"
WIDE = "backends/triton/wide.py"

HALVES_MUTANTS: tuple[Mutant, ...] = (
    Mutant(
        "halves_low_lost",
        "the low halves of q, k, v and do are zero",
        HALVES,
        "tl.where(tl.abs(x) == float(\"inf\"), 0.0, x - high.to(tl.float32))",
        "x * 0.0",
        ("halves_causal",),
    ),
    Mutant(
        "halves_low_of_weights_lost",
        "weights without their low halves",
        HALVES,
        "return (high, (x - high.to(tl.float32)).to(tl.float16)), unit",
        "return (high, (x * 0.0).to(tl.float16)), unit",
        ("halves_causal", "halves_kept"),
    ),
    Mutant(
        "halves_product_lost",
        "no product of the low half of the left operand with the high one of the right",
        HALVES,
        "        rest = tl.dot(a[1], b[0])\n        rest = tl.dot(a[0], b[1], rest)",
        "        rest = tl.dot(a[0], b[1])",
        ("halves_causal", "halves_kept"),
    ),
    Mutant(
        "halves_other_product_lost",
        "no product of the high half of the left operand with the low one of the right",
        HALVES,
        "        rest = tl.dot(a[0], b[1], rest)\n",
        "",
        ("halves_causal", "halves_kept"),
    ),
    Mutant(
        "halves_of_another_head",
        "the low half is that of the next head",
        HALVES,
        "head * 2 + 1, row, row_end, SIZE",
        "head * 2 + 3, row, row_end, SIZE",
        ("halves_causal",),
    ),
    Mutant(
        "halves_sign_lost",
        "the sign of a negative scale does not reach the halves of q",
        LAUNCH,
        "signs = (-1.0 if problem.sm_scale < 0 else 1.0, 1.0, 1.0)",
        "signs = (1.0, 1.0, 1.0)",
        ("halves_causal",),
    ),
    Mutant(
        "halves_unit_of_another_key",
        "the unit of a key is that of the one before",
        FWD,
        "load_units(k_units, head_of, offs_n, seqlen_k)",
        "load_units(k_units, head_of, offs_n - 1, seqlen_k)",
        ("halves_uneven",),
    ),
    Mutant(
        "halves_unit_of_v_lost",
        "weights do not take the units of the rows of v",
        HALVES,
        "halved(p * v_unit[None, :], 1, HALVES)",
        "halved(p, 1, HALVES)",
        ("halves_causal",),
    ),
    Mutant(
        "halves_kept_by_tile",
        "a kept weight is read in the unit of the first tile of queries",
        WIDE,
        "(local * group + member) * m_blocks + start_m // BLOCK_M, keys",
        "(local * group + member) * m_blocks, keys",
        ("halves_kept", "tf32_kept"),
    ),
    Mutant(
        "halves_kept_unit_of_dq",
        "ds is kept for dq without the units of k",
        WIDE,
        "halved(ds * k_unit[None, :], 1, HALVES)",
        "halved(ds, 1, HALVES)",
        ("halves_kept", "tf32_kept"),
    ),
)
