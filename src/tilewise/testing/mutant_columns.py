"""The faults of heads whose columns are two tiles, as values (see ``mutant_list``)."""

from __future__ import annotations

from .mutant_list import BWD, FWD, Mutant

__all__ = ["COLUMN_MUTANTS"]

LAUNCHING = "backends/launching.py"
TILES = "configs/tiles.py"

COLUMN_MUTANTS: tuple[Mutant, ...] = (
    Mutant(
        "rest_not_in_scores",
        "scores are the products of the first columns alone",
        FWD,
        "qk = tl.dot(q_rest, tl.trans(k_more), qk, input_precision=PRECISION)",
        "qk = tl.dot(q_rest * 0.0, tl.trans(k_more), qk, input_precision=PRECISION)",
        ("two_tiles",),
    ),
    Mutant(
        "rest_of_k_from_the_first_column",
        "the second tile of k has the wrong columns",
        FWD,
        "HEAD_DIM, BLOCK_N, REST, BULK, WIDEN, BLOCK_D)",
        "HEAD_DIM, BLOCK_N, REST, BULK, WIDEN)",
        ("two_tiles",),
    ),
    Mutant(
        "rest_of_v_from_the_first_column",
        "the second tile of v has the wrong columns",
        FWD,
        "HEAD_DIM_V, BLOCK_N, REST_V, BULK, WIDEN, BLOCK_DV\n",
        "HEAD_DIM_V, BLOCK_N, REST_V, BULK, WIDEN\n",
        ("two_tiles",),
    ),
    Mutant(
        "rest_of_o_over_the_first_columns",
        "the last columns of o land on the first",
        FWD,
        "HEAD_DIM_V, BLOCK_M, REST_V, BULK, WIDEN, BLOCK_DV)",
        "HEAD_DIM_V, BLOCK_M, REST_V, BULK, WIDEN)",
        ("two_tiles",),
    ),
    Mutant(
        "rest_keeps_its_pivot",
        "the last columns of the accumulator are not rescaled",
        FWD,
        "v_more, acc_rest * alpha[:, None], input",
        "v_more, acc_rest, input",
        ("two_tiles",),
    ),
    Mutant(
        "rest_without_the_sign",
        "a negative scale turns the first columns of q alone",
        FWD,
        "q_more = -q_more",
        "q_more = q_more",
        ("two_tiles",),
    ),
    Mutant(
        "rest_without_the_sink",
        "the last columns of o do not see that a sink raised the pivot",
        FWD,
        "acc_rest, _, _ = add_sink(acc_rest, l_i, m_i, sink, batch, head, NATURAL)",
        "acc_rest, _, _ = acc_rest, l_i, m_i",
        ("chunks_sink",),
    ),
    Mutant(
        "rest_without_the_rate_of_dropout",
        "the last columns of o are not made up for what was dropped",
        FWD,
        "acc_rest *= drop[4]",
        "acc_rest *= 1.0",
        ("chunks_sink",),
    ),
    Mutant(
        "rest_not_in_weights_of_dkdv",
        "dk and dv are made of weights of the first columns alone",
        BWD,
        "qk_t = tl.dot(k_more, tl.trans(q_more), qk_t, input_precision=PRECISION)",
        "qk_t = tl.dot(k_more * 0.0, tl.trans(q_more), qk_t, input_precision=PRECISION)",
        ("two_tiles",),
    ),
    Mutant(
        "rest_not_in_dp_of_dkdv",
        "dk is made of the first columns of do and v alone",
        BWD,
        "dp_t = tl.dot(v_more, tl.trans(do_more), dp_t, input_precision=PRECISION)",
        "dp_t = tl.dot(v_more * 0.0, tl.trans(do_more), dp_t, input_precision=PRECISION)",
        ("two_tiles",),
    ),
    Mutant(
        "rest_not_in_weights_of_dq",
        "dq is made of weights of the first columns alone",
        BWD,
        "qk = tl.dot(q_more, tl.trans(k_more), qk, input_precision=PRECISION)",
        "qk = tl.dot(q_more * 0.0, tl.trans(k_more), qk, input_precision=PRECISION)",
        ("two_tiles",),
    ),
    Mutant(
        "rest_not_in_dp_of_dq",
        "dq is made of the first columns of do and v alone",
        BWD,
        "dp = tl.dot(do_more, tl.trans(v_more), dp, input_precision=PRECISION)",
        "dp = tl.dot(do_more * 0.0, tl.trans(v_more), dp, input_precision=PRECISION)",
        ("two_tiles",),
    ),
    Mutant(
        "rest_of_dk_without_scale",
        "the last columns of dk are not scaled",
        BWD,
        "dk_rest = dk_rest * sm_scale",
        "dk_rest = dk_rest * 1.0",
        ("two_tiles",),
    ),
    Mutant(
        "rest_of_dq_without_scale",
        "the last columns of dq are not scaled",
        BWD,
        "dq_rest = dq_rest * sm_scale",
        "dq_rest = dq_rest * 1.0",
        ("two_tiles",),
    ),
    Mutant(
        "rest_of_dv_without_the_rate_of_dropout",
        "the last columns of dv are not made up for what was dropped",
        BWD,
        "dv_rest *= drop[4]",
        "dv_rest *= 1.0",
        ("chunks_sink",),
    ),
    Mutant(
        "rest_too_narrow",
        "the last columns of some heads are in neither tile",
        TILES,
        "rest = padded(size - first)",
        "rest = max(16, padded(size - first) // 2)",
        ("two_tiles_wide",),
    ),
)
