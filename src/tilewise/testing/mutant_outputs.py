"""The faults of what a call may return besides o and lse, as values (see ``mutant_list``)."""

from __future__ import annotations

from .mutant_list import FWD, TILES, Mutant

__all__ = ["OUTPUT_MUTANTS"]

OUTPUT_MUTANTS: tuple[Mutant, ...] = (
    Mutant(
        "max_logit_in_base_two",
        "the largest score leaves the kernel in base two",
        FWD,
        "m_i if NATURAL else m_i * LN_2",
        "m_i",
        ("max_logit",),
    ),
    Mutant(
        "max_logit_counts_the_sink",
        "a sink is taken for a score",
        FWD,
        "m_i if NATURAL else m_i * LN_2",
        "tl.maximum(m_i * LN_2, tl.load(sink[0]).to(tl.float32))",
        ("max_logit",),
    ),
    Mutant(
        "max_logit_of_natural_scores",
        "natural scores are taken for scores in base two",
        FWD,
        "m_i if NATURAL else m_i * LN_2",
        "m_i * LN_2",
        ("max_logit_bias",),
    ),
    Mutant(
        "max_logit_of_first_head",
        "all heads write where the first does",
        FWD,
        "maxima_ptr + head_rows",
        "maxima_ptr + batch.to(tl.int64) * heads_q * seqlen_q",
        ("max_logit_bias",),
    ),
    Mutant(
        "max_logit_of_first_row",
        "the largest score of a head is that of its first query",
        "ops.py",
        "by_row.amax(-1)",
        "by_row[..., 0]",
        ("max_logit",),
    ),
    Mutant(
        "torch_max_logit_in_base_two",
        "the largest score leaves a tile in base two",
        TILES,
        "maxima.copy_((m_i / work.steps.unit)",
        "maxima.copy_((m_i)",
        ("max_logit",),
        "torch",
    ),
)
