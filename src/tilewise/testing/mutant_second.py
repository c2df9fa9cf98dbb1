"""The faults of second derivatives, as values (see ``mutant_list``). Their backend is "second torch"."""

from __future__ import annotations

from .mutant_list import Mutant

__all__ = ["SECOND_MUTANTS"]

ROWS = "backends/torch_second.py"
OPERATOR = "ops_second.py"

_ROWS: tuple[tuple[str, str, str, str, str, str], ...] = (
    ("mean_lost", "the normalisation does not move", ROWS, "w = kept(p * (t - m))", "w = kept(p * t)", "gqa"),
    ("mean_sign", "what moves the normalisation moves it the other way", ROWS, "u = a * -m", "u = a * m", "gqa"),
    ("dlse_sign", "the gradient of lse counts against", ROWS, "keepdim=True) - dlse", "keepdim=True) + dlse", "ragged_causal_br"),
    ("tv_lost", "the tangent of v moves no score's gradient", ROWS, "u.add_(b)", "u.add_(0.0 * b)", "mqa"),
    (
        "tv_not_in_t_o",
        "the tangent of v does not move o",
        ROWS,
        "baddbmm(t_o, kept(p), tvt,",
        "baddbmm(t_o, 0.0 * p, tvt,",
        "mqa",
    ),
    ("tk_lost", "dq without the keys' tangents", ROWS, "(g, None if tkt is None", "(0.0 * g, None if tkt is None", "gqa"),
    (
        "tq_lost",
        "dk without the queries' tangents",
        ROWS,
        "(g.mT, None if tqt is None",
        "(0.0 * g.mT, None if tqt is None",
        "gqa",
    ),
    ("dk_of_last_block", "dk of the last rows alone", ROWS, "part.add_(dk.view", "part.copy_(dk.view", "gqa"),
    ("scale_lost", "dk without the scale", ROWS, "kt, scale)\n        part", "kt, 1.0)\n        part", "odd_scale"),
    ("no_bend", "the cap has no second derivative", ROWS, "h = h.add_(g * bend)", "h = h.add_(0.0 * bend)", "softcap"),
    ("bend_sign", "the cap bends the other way", ROWS, "(-2.0 / steps.cap)", "(2.0 / steps.cap)", "softcap_bias"),
    ("no_slope_on_g", "tk's share of dq does not feel the cap", ROWS, "(g * slope)", "(g * 1.0)", "bias_softcap"),
    (
        "bend_without_tangent",
        "a function bends whatever moves",
        ROWS,
        "bend is None else bend * t",
        "bend is None else bend",
        "own_function",
    ),
    ("hidden_not_cleared", "NaN of a function where nobody looks", ROWS, "h.masked_fill_(unseen, 0.0), (g", "h, (g", "own_hidden"),
    ("sink_not_in_sum", "weights without the sink", ROWS, "keepdim=True) + p_sink).masked", "keepdim=True)).masked", "sink"),
    ("sink_sign", "the sink's tangent moves the wrong way", ROWS, "u_sink = -t_sink * delta", "u_sink = t_sink * delta", "sink"),
    ("slopes_sign", "steeper slopes raise scores", ROWS, "part.sub_(weighed", "part.add_(weighed", "alibi_both_sides"),
    ("tslopes_sign", "their tangents raise scores", ROWS, "moved.sub_(", "moved.add_(", "alibi_both_sides"),
    (
        "bias_of_last_block",
        "a bias that rows share gets the last rows' gradient",
        ROWS,
        "part.add_(h.view(sizes)",
        "part.copy_(h.view(sizes)",
        "bias_broadcast",
    ),
    ("dropout_factor", "kept weights are not scaled", ROWS, "mul_(work.keep_scale)", "mul_(1.0)", "dropout"),
    ("dropout_lost", "o and dv of all weights", ROWS, "w = kept(p * (t - m))", "w = p * (t - m)", "dropout"),
    ("no_mask", "rows without their bounds", ROWS, "(has_upper or has_lower) and not free", "False", "thin_window"),
    ("no_mask_of_tensors", "tiles of tensors taken for free", ROWS, "return keys, any(", "return keys, not any(", "row_intervals"),
    ("upstream_lost", "do has no gradient", OPERATOR, "if needs[at])", 'if needs[at] and letter != "o")', "gqa"),
)

SECOND_MUTANTS: tuple[Mutant, ...] = tuple(
    Mutant(f"second_{name}", breaks, file, old, new, (killer,), "second torch") for name, breaks, file, old, new, killer in _ROWS
)
