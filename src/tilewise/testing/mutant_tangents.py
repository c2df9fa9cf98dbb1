"""The faults of forward mode, as values (see ``mutant_list``). Their backend is "jvp triton" or "jvp torch"."""

from __future__ import annotations

from .mutant_list import Mutant

__all__ = ["TANGENT_MUTANTS"]

SCORES = "backends/triton/scores.py"
KERNEL = "backends/triton/jvp.py"
LAUNCH = "backends/triton/jvp_launch.py"
TILES = "backends/torch_jvp.py"

_ROWS: tuple[tuple[str, str, str, str, str, str], ...] = (
    (
        "without_t_lse_o",
        "the normalisation does not move",
        KERNEL,
        "acc_t / l_safe[:, None] - t_lse[:, None] * acc",
        "acc_t / l_safe[:, None]",
        "gqa",
    ),
    (
        "no_softcap_slope",
        "tangents do not feel the cap",
        SCORES,
        "by = softcap_slope(t)\n            slope = by * slope",
        "by = softcap_slope(t)\n            slope = 1.0 * slope",
        "softcap",
    ),
    (
        "no_function_slope",
        "tangents do not feel the function",
        SCORES,
        "slope = by * slope\n                late",
        "late",
        "own_function",
    ),
    ("drop_in_t_lse", "t_lse feels dropout", KERNEL, "+ tl.sum(pt, 1)", "+ tl.sum(tl.where(used, pt, 0.0), 1)", "dropout"),
    ("drop_not_pt", "dropped weights move", KERNEL, "pt = tl.where(used, pt, 0.0)", "pt = tl.where(used, pt, pt)", "dropout"),
    ("drop_scale_of_t_o", "t_o is not brought back to its mean", KERNEL, "acc_t *= drop[4]", "acc_t *= 1.0", "dropout"),
    ("scale_lost", "tangents of scores without the scale", KERNEL, "            t *= scale", "            t *= 1.0", "odd_scale"),
    (
        "no_alpha_on_acc_t",
        "the old tangents keep their pivot",
        KERNEL,
        "acc_t = acc_t * alpha[:, None]",
        "acc_t = acc_t + 0.0",
        "late_spike",
    ),
    (
        "no_alpha_on_t_i",
        "the old sum of tangents keeps its pivot",
        KERNEL,
        "t_i = t_i * alpha + tl.sum(pt, 1)",
        "t_i = t_i + tl.sum(pt, 1)",
        "late_spike",
    ),
    ("tq_by_tk", "both factors move at once", KERNEL, "t = tl.dot(q, tl.trans(tk_tile)", "t = tl.dot(tq, tl.trans(tk_tile)", "gqa"),
    (
        "tq_lost",
        "the tangent of q is q",
        KERNEL,
        "t = tl.dot(tq, tl.trans(k_tile)",
        "t = tl.dot(q, tl.trans(k_tile)",
        "gqa",
    ),
    (
        "tv_weighed_by_tangents",
        "tv has the weights of v",
        KERNEL,
        "acc_t = tl.dot(weights, tv_tile",
        "acc_t = tl.dot(weights_t, tv_tile",
        "mqa",
    ),
    (
        "tv_of_first_head",
        "tv of the wrong head",
        KERNEL,
        "load_tile(tv, tv_strides, batch, head_kv,",
        "load_tile(tv, tv_strides, batch, head_kv * 0,",
        "gqa",
    ),
    (
        "tbias_always_capped",
        "a bias behind the cap feels its derivative",
        SCORES,
        "slope += load_bias(",
        "slope += by * load_bias(",
        "softcap_bias",
    ),
    ("tslopes_sign", "steeper slopes raise scores", SCORES, "slope -= tl.load(at)", "slope += tl.load(at)", "alibi_both_sides"),
    ("tsink_without_weight", "the sink moves lse as it is", KERNEL, "t_i += weight * by", "t_i += by", "sink"),
    ("sink_no_alpha_on_t_i", "tangents keep their pivot", KERNEL, "    t_i = t_i * alpha\n", "    t_i = t_i + 0.0\n", "sink"),
    ("terms_not_seen", "hidden keys move the output", KERNEL, "ok = seen(", "_ = seen(", "row_intervals"),
    ("negative_scale", "the sign reaches only q", KERNEL, "tq_tile = -tq_tile", "tq_tile = tq_tile", "negative_scale"),
    ("scale_twice_signed", "the sign counts twice", LAUNCH, "abs(p.sm_scale), triton", "p.sm_scale, triton", "negative_scale"),
    ("torch_without_t_lse_o", "the normalisation does not move", TILES, ".sub_(acc.mul_(t_lse))", "", "gqa"),
    ("torch_no_softcap_slope", "tangents do not feel the cap", TILES, "t.mul_(slope)", "t.mul_(1.0)", "softcap"),
    (
        "torch_scale_lost",
        "tangents of scores without the scale",
        TILES,
        "alpha=work.problem.sm_scale, out=t",
        "alpha=1.0, out=t",
        "odd_scale",
    ),
    (
        "torch_no_alpha_on_t_i",
        "the old sum of tangents keeps its pivot",
        TILES,
        "for total in (acc, acc_t, t_i):",
        "for total in (acc, acc_t):",
        "late_spike",
    ),
    (
        "torch_tsink_without_weight",
        "the sink moves lse as it is",
        TILES,
        "t_i.add_(weight * scores",
        "t_i.add_(1.0 * scores",
        "sink",
    ),
    ("torch_drop_not_pt", "dropped weights move", TILES, "pt = pt.masked_fill(dropped, 0.0)", "pt = pt.clone()", "dropout"),
    ("torch_drop_not_tv", "tv of dropped weights", TILES, "torch.baddbmm(acc_t, used,", "torch.baddbmm(acc_t, p,", "dropout"),
)

TANGENT_MUTANTS: tuple[Mutant, ...] = tuple(
    Mutant(f"jvp_{name}", breaks, file, old, new, (killer,), "jvp torch" if file == TILES else "jvp triton")
    for name, breaks, file, old, new, killer in _ROWS
)
