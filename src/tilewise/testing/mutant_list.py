"""The faults, as values: which text of which file is replaced by what, and the gauntlet entries that should notice first."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["MUTANTS", "Mutant"]


@dataclass(frozen=True)
class Mutant:
    """One fault.

    ``old`` must occur exactly ``count`` times in ``file`` (below the package); every occurrence becomes ``new``. ``backend`` runs
    the entries ("merge": the two halves of the keys, merged). ``equivalent`` is the reason why no output can change; then
    ``killers`` are the entries that come nearest.
    """

    name: str
    breaks: str
    file: str
    old: str
    new: str
    killers: tuple[str, ...]
    backend: str = "triton"
    count: int = 1
    equivalent: str | None = None


PARTS = "backends/triton/parts.py"
FWD = "backends/triton/fwd.py"
BWD = "backends/triton/bwd.py"
LAUNCH = "backends/triton/__init__.py"
BODIES = "bodies.py"
TILES = "backends/torch_tiles.py"
MERGE = "merge.py"
SCORES, DBIAS = "backends/triton/scores.py", "backends/triton/dbias.py"
DQ_BIAS = "backends/triton/dq_bias.py"
TORCH_SCORES = "backends/torch_scores.py"

_STEP = (
    Mutant(
        "no_alpha_on_l",
        "the old sum keeps its old pivot",
        PARTS,
        "l_new = l_i * alpha + tl.sum(p, 1)",
        "l_new = l_i + tl.sum(p, 1)",
        ("late_spike",),
    ),
    Mutant(
        "no_alpha_on_acc",
        "the old accumulator keeps its old pivot",
        FWD,
        "acc = acc * alpha[:, None]",
        "acc = acc + 0.0",
        ("late_spike",),
    ),
    Mutant(
        "alpha_in_base_e",
        "alpha in base e beside p in base two",
        PARTS,
        "alpha = tl.math.exp2(m_i - pivot)",
        "alpha = tl.math.exp(m_i - pivot)",
        ("late_spike",),
    ),
    Mutant(
        "alpha_inverted",
        "alpha grows where it must shrink",
        PARTS,
        "alpha = tl.math.exp2(m_i - pivot)",
        'alpha = tl.math.exp2(tl.where(m_i == -float("inf"), m_i, pivot - m_i))',
        ("late_spike",),
    ),
    Mutant(
        "p_in_base_e",
        "p of free tiles in base e",
        PARTS,
        "p = tl.math.exp2(qk * qk_scale2 - pivot[:, None])",
        "p = tl.math.exp(qk * qk_scale2 - pivot[:, None])",
        ("odd_scale",),
    ),
    Mutant(
        "finite_fill",
        "masked scores are -1e6, not -inf",
        PARTS,
        'tl.where(ok, qk * qk_scale2, -float("inf"))',
        "tl.where(ok, qk * qk_scale2, -1.0e6)",
        ("empty_rows",),
    ),
    Mutant(
        "no_pivot_guard",
        "-inf - -inf in a row without a key yet",
        PARTS,
        'pivot = tl.where(m_new == -float("inf"), 0.0, m_new)\n        p = tl.math.exp2(s2',
        "pivot = m_new\n        p = tl.math.exp2(s2",
        ("thin_window",),
    ),
    Mutant(
        "no_pivot_guard_free",
        "-inf - -inf where all keys of a tile are -inf",
        PARTS,
        'pivot = tl.where(m_new == -float("inf"), 0.0, m_new)\n        p = tl.math.exp2(qk',
        "pivot = m_new\n        p = tl.math.exp2(qk",
        ("overflowed_keys",),
    ),
    Mutant(
        "block_maximum_masked",
        "the maximum of a masked tile alone",
        PARTS,
        "m_new = tl.maximum(m_i, tl.max(s2, 1))",
        "m_new = tl.max(s2, 1)",
        ("thin_window",),
    ),
    Mutant(
        "block_maximum_free",
        "the maximum of a free tile alone",
        PARTS,
        "m_new = tl.maximum(m_i, tl.max(qk, 1) * qk_scale2)",
        "m_new = tl.max(qk, 1) * qk_scale2",
        ("overflow_spike",),
    ),
    Mutant(
        "maximum_without_scale",
        "the maximum of the raw products",
        PARTS,
        "tl.max(qk, 1) * qk_scale2",
        "tl.max(qk, 1)",
        ("overflow_spike",),
    ),
    Mutant(
        "tile_order",
        "the reversed schedule starts one tile too far",
        PARTS,
        "tile = tiles - 1 - tile",
        "tile = tiles - tile",
        ("ragged_causal_br",),
    ),
)

_MASK = (
    Mutant("no_tail_mask", "padded keys are seen", BODIES, "ok = kv_pos < kv_end", "ok = kv_pos >= 0", ("very_low",)),
    Mutant(
        "causal_strict",
        "a query does not see itself",
        BODIES,
        "kv_pos <= q_pos + upper",
        "kv_pos < q_pos + upper",
        ("ragged_causal_br",),
    ),
    Mutant(
        "causal_one_too_far",
        "a query sees the next key",
        BODIES,
        "kv_pos <= q_pos + upper",
        "kv_pos <= q_pos + upper + 1",
        ("self_only",),
    ),
    Mutant(
        "window_one_short",
        "the lower bound excludes its own key",
        BODIES,
        "kv_pos >= q_pos - lower",
        "kv_pos > q_pos - lower",
        ("thin_window",),
    ),
    Mutant(
        "window_one_short_torch", "the same", BODIES, "kv_pos >= q_pos - lower", "kv_pos > q_pos - lower", ("thin_window",), "torch"
    ),
    Mutant(
        "last_tile_dropped",
        "the last tile counts only if it is whole",
        BODIES,
        "t_hi = max((hi + BLOCK - 1) // BLOCK, t_lo)",
        "t_hi = max(hi // BLOCK, t_lo)",
        ("ragged_full",),
    ),
    Mutant(
        "hi_one_short",
        "the tiles end one key too early",
        BODIES,
        "max(row_hi + upper, 0)",
        "max(row_hi + upper - 1, 0)",
        ("tile_edge_empty",),
    ),
    Mutant(
        "lo_one_late",
        "the tiles start one key too late",
        BODIES,
        "lo = max(row_lo - lower, 0)",
        "lo = max(row_lo - lower + 1, 0)",
        ("tile_edge_empty",),
    ),
    Mutant(
        "first_tile_dropped",
        "the first tile counts only if it is whole",
        BODIES,
        "t_lo = lo // BLOCK",
        "t_lo = (lo + BLOCK - 1) // BLOCK",
        ("thin_window",),
    ),
    Mutant(
        "free_one_too_many",
        "a tile that is free in part needs no mask",
        BODIES,
        "min(free_hi // BLOCK, t_hi)",
        "min((free_hi + BLOCK - 1) // BLOCK, t_hi)",
        ("ragged_causal_br",),
    ),
    Mutant(
        "free_from_too_early",
        "the same at the lower bound",
        BODIES,
        "max((free_lo + BLOCK - 1) // BLOCK, t_lo)",
        "max(free_lo // BLOCK, t_lo)",
        ("wide_window",),
    ),
    Mutant(
        "free_hi_one_far",
        "the first row sees one key more",
        BODIES,
        "max(row_lo + upper + 1, 0)",
        "max(row_lo + upper + 2, 0)",
        ("tile_edge_free",),
    ),
    Mutant(
        "free_lo_one_early",
        "the last row sees one key more",
        BODIES,
        "max(row_hi - 1 - lower, 0)",
        "max(row_hi - 2 - lower, 0)",
        ("tile_edge_free",),
    ),
    Mutant(
        "free_hi_one_short",
        "a free tile may get a mask",
        BODIES,
        "max(row_lo + upper + 1, 0)",
        "max(row_lo + upper, 0)",
        ("wide_window", "tile_edge_free"),
        equivalent="the mask of a free tile hides nothing; it costs time",
    ),
)

_FORWARD = (
    Mutant(
        "l_starts_at_one",
        "the sum starts at 1",
        FWD,
        "l_i = tl.zeros([BLOCK_M], tl.float32)",
        "l_i = tl.full([BLOCK_M], 1.0, tl.float32)",
        ("empty_rows", "empty_window"),
        equivalent="the first alpha is exp2(-inf) = 0, and a row that sees nothing has m_i = -inf and acc = 0 all the same",
    ),
    Mutant(
        "m_starts_at_zero",
        "scores below 0 never become the maximum",
        FWD,
        'm_i = tl.full([BLOCK_M], -float("inf"), tl.float32)',
        "m_i = tl.zeros([BLOCK_M], tl.float32)",
        ("very_low",),
    ),
    Mutant(
        "no_division", "the accumulator is stored as it is", FWD, "acc = acc / l_safe[:, None]", "acc = acc + 0.0", ("one_query",)
    ),
    Mutant(
        "no_guard_of_l",
        "0 / 0 in a row without keys",
        FWD,
        "l_safe = tl.where(l_i == 0.0, 1.0, l_i)",
        "l_safe = l_i",
        ("empty_rows",),
    ),
    Mutant(
        "no_guard_of_lse",
        "lse of a row without keys by the formula",
        FWD,
        'lse = tl.where(l_i == 0.0, -float("inf"), (m_i + tl.math.log2(l_safe)) * LN_2)',
        "lse = (m_i + tl.math.log2(l_safe)) * LN_2",
        ("empty_rows", "empty_window"),
        equivalent="m_i is -inf there and log2(l_safe) is 0, so the formula says -inf as well",
    ),
    Mutant(
        "lse_in_base_two",
        "lse is not brought back to base e",
        FWD,
        "(m_i + tl.math.log2(l_safe)) * LN_2",
        "m_i + tl.math.log2(l_safe)",
        ("one_query",),
    ),
    Mutant(
        "lse_without_m",
        "lse is the logarithm of the sum alone",
        FWD,
        "(m_i + tl.math.log2(l_safe)) * LN_2",
        "tl.math.log2(l_safe) * LN_2",
        ("one_query",),
    ),
    Mutant(
        "sign_of_scale_lost", "a negative scale counts as positive", FWD, "q_tile = -q_tile", "q_tile += 0.0", ("negative_scale",)
    ),
    Mutant(
        "wrong_kv_head",
        "query heads are dealt out in turn",
        FWD,
        "head_kv = head // group",
        "head_kv = head % (heads_q // group)",
        ("gqa",),
    ),
    Mutant("top_left_forward", "the corner ignores Nk - Nq", FWD, "q_start + ", "", ("ragged_causal_br",), count=3),
    Mutant(
        "key_tile_from_wrong_block",
        "tiles of keys are half a tile apart",
        FWD,
        "(k, k_strides, batch, head_kv, start_n, seqlen_k, HEAD_DIM, BLOCK_N",
        "(k, k_strides, batch, head_kv, start_n // 2, seqlen_k, HEAD_DIM, BLOCK_N",
        ("one_query",),
    ),
    Mutant(
        "stale_value_tile",
        "p meets the values of the tile before",
        FWD,
        "            v, v_strides, batch, head_kv, start_n, seqlen_k, HEAD_DIM_V, BLOCK_N, BLOCK_DV",
        "            v, v_strides, batch, head_kv, max(start_n - BLOCK_N, 0), seqlen_k, HEAD_DIM_V, BLOCK_N, BLOCK_DV",
        ("one_query",),
    ),
    Mutant("strides_of_k_for_v", "v is addressed as k", FWD, "   v, v_strides, batch", "   v, k_strides, batch", ("strided_v",)),
    Mutant(
        "no_edge_without_upper",
        "the ragged last tile is not visited",
        FWD,
        "if HAS_UPPER or HAS_TAIL:",
        "if HAS_UPPER:",
        ("ragged_full",),
    ),
    Mutant(
        "no_edge_without_tail",
        "the diagonal is not visited where no tile is ragged",
        FWD,
        "if HAS_UPPER or HAS_TAIL:",
        "if HAS_TAIL:",
        ("tile_edge_free",),
    ),
    Mutant(
        "no_lower_edge",
        "the masked tiles at the lower bound are not visited",
        FWD,
        "if HAS_LOWER and table is None:",
        "if HAS_LOWER and HAS_TAIL and table is None:",
        ("tile_edge_free",),
    ),
    Mutant(
        "forward_scale_in_base_e",
        "log2(e) is missing",
        LAUNCH,
        "abs(p.sm_scale) * _steps(p)[0]",
        "abs(p.sm_scale)",
        ("one_query",),
    ),
)

_BACKWARD = (
    Mutant("dq_without_scale", "sm_scale is lost", BWD, "dq = dq * sm_scale", "dq = dq + 0.0", ("odd_scale",)),
    Mutant("dk_without_scale", "sm_scale is lost", BWD, "dk = dk * sm_scale", "dk = dk + 0.0", ("odd_scale",)),
    Mutant("dq_scaled_twice", "sm_scale squared", BWD, "dq = dq * sm_scale", "dq = dq * sm_scale * sm_scale", ("odd_scale",)),
    Mutant("dk_scaled_twice", "sm_scale squared", BWD, "dk = dk * sm_scale", "dk = dk * sm_scale * sm_scale", ("odd_scale",)),
    Mutant(
        "dv_scaled",
        "dv takes the scale of dk",
        BWD,
        "seqlen_k, dv, HEAD_DIM_V",
        "seqlen_k, dv * sm_scale, HEAD_DIM_V",
        ("odd_scale",),
    ),
    Mutant("delta_ignored_in_dk", "ds = p dp", BWD, "ds_t = p_t * (dp_t - delta[None, :])", "ds_t = p_t * dp_t", ("odd_scale",)),
    Mutant("delta_ignored_in_dq", "ds = p dp", BWD, "ds = p * (dp - delta[:, None])", "ds = p * dp", ("odd_scale",)),
    Mutant("dlse_ignored", "the gradient of lse is lost", BWD, "delta -= tl.load(", "delta -= 0.0 * tl.load(", ("lse_loss",)),
    Mutant("dlse_sign", "the gradient of lse is added", BWD, "delta -= tl.load(", "delta += tl.load(", ("lse_loss",)),
    Mutant(
        "delta_of_empty_rows",
        "rows without keys keep their delta",
        BWD,
        'tl.where(lse == -float("inf"), 0.0, delta)',
        "delta",
        ("empty_rows", "empty_tail"),
        equivalent="every p of such a row is an exact 0, and 0 times a finite delta is 0",
    ),
    Mutant(
        "dv_averaged",
        "dv is the mean over the group",
        BWD,
        "seqlen_k, dv, HEAD_DIM_V",
        "seqlen_k, dv / group, HEAD_DIM_V",
        ("gqa",),
    ),
    Mutant("first_of_group_only", "the other heads of the group are lost", BWD, "in range(group)", "in range(1)", ("gqa",)),
    Mutant(
        "group_in_wrong_order",
        "the group strides over the heads",
        BWD,
        "head = head_kv * group + member",
        "head = member * heads_kv + head_kv",
        ("gqa",),
    ),
    Mutant(
        "wrong_kv_head_in_dq",
        "query heads are dealt out in turn",
        BWD,
        "head_kv = head // group",
        "head_kv = head % (heads_q // group)",
        ("gqa",),
    ),
    Mutant(
        "p_not_masked_in_dkdv",
        "hidden scores pass gradients",
        BWD,
        "p_t = tl.where(ok, p_t, 0.0)",
        "p_t = p_t + 0.0",
        ("ragged_causal_br",),
    ),
    Mutant(
        "p_not_masked_in_dq", "hidden scores pass gradients", BWD, "p = tl.where(ok, p, 0.0)", "p = p + 0.0", ("ragged_causal_br",)
    ),
    Mutant(
        "bounds_not_swapped",
        "the transposed plan keeps the bounds as they are",
        BWD,
        "lower - q_start, upper + q_start, BLOCK_M, HAS_LOWER, HAS_UPPER",
        "upper - q_start, lower + q_start, BLOCK_M, HAS_UPPER, HAS_LOWER",
        ("ragged_causal_br",),
    ),
    Mutant(
        "top_left_in_dkdv", "the mask ignores Nk - Nq", BWD, "(q_start + offs_m)[None, :]", "offs_m[None, :]", ("ragged_causal_br",)
    ),
    Mutant(
        "top_left_plan_in_dkdv",
        "the plan ignores Nk - Nq",
        BWD,
        "lower - q_start, upper + q_start",
        "lower, upper",
        ("ragged_causal_br", "empty_rows"),
    ),
    Mutant("top_left_in_dq", "the mask ignores Nk - Nq", BWD, "q_pos = q_start + offs_m", "q_pos = offs_m", ("ragged_causal_br",)),
    Mutant(
        "lse_of_empty_rows",
        "lse = -inf is read as it is",
        BWD,
        'tl.where(lse == -float("inf"), float("inf"), lse) * LOG2_E',
        "lse * LOG2_E",
        ("empty_rows", "empty_tail", "poison"),
        equivalent="a tile with such a row is never free, and its mask replaces every p of the row, infinite or not",
    ),
    Mutant(
        "lse_read_in_base_e",
        "log2(e) is missing",
        BWD,
        'tl.where(lse == -float("inf"), float("inf"), lse) * LOG2_E',
        'tl.where(lse == -float("inf"), float("inf"), lse)',
        ("odd_scale",),
    ),
    Mutant(
        "lse_past_the_end",
        "rows past the end have p = 1",
        BWD,
        'other=float("inf")',
        "other=0.0",
        ("ragged_full", "odd_head_dims"),
        equivalent="q and do are 0 in those rows, and so is everything that p is multiplied with",
    ),
    Mutant(
        "stale_do_tile",
        "p meets the gradients of the tile before",
        BWD,
        "        do_tile = load_tile(do, do_strides, batch, head, start_m,",
        "        do_tile = load_tile(do, do_strides, batch, head, max(start_m - BLOCK_M, 0),",
        ("odd_scale",),
    ),
    Mutant(
        "stale_value_tile_in_dq",
        "dp of the tile before",
        BWD,
        "        v_tile = load_tile(v, v_strides, batch, head_kv, start_n,",
        "        v_tile = load_tile(v, v_strides, batch, head_kv, max(start_n - BLOCK_N, 0),",
        ("odd_scale",),
    ),
    Mutant(
        "no_diagonal_in_dkdv",
        "the masked tiles at the diagonal are not visited",
        BWD,
        "        if HAS_UPPER and table is None:\n",
        "        if HAS_LOWER and table is None:\n",
        ("ragged_causal_br",),
    ),
    Mutant(
        "no_window_edge_in_dkdv",
        "the window's edge is not visited where no tile is ragged",
        BWD,
        "if HAS_LOWER or HAS_TAIL:",
        "if HAS_TAIL:",
        ("tile_edge_free",),
    ),
    Mutant(
        "no_edge_in_dq",
        "the diagonal is not visited where no tile is ragged",
        BWD,
        "if HAS_UPPER or HAS_TAIL:",
        "if HAS_TAIL:",
        ("tile_edge_free",),
    ),
    Mutant(
        "backward_scale_unsigned",
        "p is recomputed with the size of the scale",
        LAUNCH,
        "*scalars, p.sm_scale * _steps(p)[0]",
        "*scalars, abs(p.sm_scale) * _steps(p)[0]",
        ("negative_scale",),
        count=2,
    ),
)

_MERGED = (
    Mutant(
        "merge_no_pivot_guard",
        "-inf - -inf where both halves are empty",
        MERGE,
        "pivot = torch.where(pivot == minus_inf, 0.0, pivot)",
        "pivot = pivot + 0.0",
        ("empty_rows",),
        "merge",
    ),
    Mutant(
        "merge_no_guard_of_total",
        "0 / 0 where both halves are empty",
        MERGE,
        "safe = torch.where(empty, 1.0, total)",
        "safe = total",
        ("empty_rows",),
        "merge",
    ),
    Mutant(
        "merge_lse_without_pivot",
        "lse is the logarithm of the sum alone",
        MERGE,
        "pivot + torch.log(safe)",
        "torch.log(safe)",
        ("odd_scale",),
        "merge",
    ),
    Mutant("merge_not_normalised", "the weights do not sum to 1", MERGE, "((w / safe)", "((w / 1.0)", ("odd_scale",), "merge"),
    Mutant(
        "merge_pivot_of_second",
        "the pivot is the second lse: the first weight overflows",
        MERGE,
        "torch.maximum(lse1, lse2).detach()",
        "lse2.detach()",
        ("overflow_spike",),
        "merge",
    ),
)

MUTANTS: tuple[Mutant, ...] = _STEP + _MASK + _FORWARD + _BACKWARD + _MERGED
