"""The faults of score functions of the user's own, as values (see ``mutant_list``)."""

from __future__ import annotations

from .mutant_list import SCORES, TORCH_SCORES, Mutant

__all__ = ["FUNCTION_MUTANTS"]

FUNCTION_MUTANTS: tuple[Mutant, ...] = (
    Mutant(
        "function_no_slope",
        "the derivative of the user's function is ignored",
        SCORES,
        "                slope = by * slope",
        "                slope = slope * 1.0",
        ("own_function",),
    ),
    Mutant(
        "function_no_slope_in_dbias",
        "a bias before the function does not feel it",
        SCORES,
        "                late = by * late",
        "                late = late * 1.0",
        ("own_between",),
    ),
    Mutant(
        "function_slope_elsewhere",
        "the derivative is taken at another score",
        SCORES,
        "score[3][2][0](s, batch",
        "score[3][2][0](s * 0.5, batch",
        ("own_function",),
    ),
    Mutant(
        "function_rows_for_positions",
        "a query's position is its row",
        SCORES,
        "q_pos = tl.expand_dims(q_start + offs_m, q_axis)",
        "q_pos = tl.expand_dims(offs_m, q_axis)",
        ("own_positions",),
    ),
    Mutant(
        "function_one_head",
        "the function gets head 0 for all",
        SCORES,
        "score[3][0](s, batch, head, ",
        "score[3][0](s, batch, head * 0, ",
        ("own_positions",),
    ),
    Mutant(
        "function_one_batch",
        "the function gets batch 0 for all",
        SCORES,
        "score[3][0](s, batch, ",
        "score[3][0](s, batch * 0, ",
        ("own_tensors",),
    ),
    Mutant(
        "function_in_base_two",
        "the function gets scores in base two",
        "spec.py",
        'name in ("bias", "fn") for name',
        'name in ("bias",) for name',
        ("own_function",),
    ),
    Mutant(
        "function_past_the_end",
        "what the function makes of rows past the end reaches the keys",
        SCORES,
        "s = tl.where(tl.expand_dims(start_m + tl.arange(0, rows), q_axis) < seqlen_q, s, 0.0)",
        "s = s * 1.0",
        ("own_mask",),
    ),
    Mutant(
        "function_slope_of_hidden",
        "the derivative of a hidden pair reaches the gradients",
        SCORES,
        "tl.where(ds == 0.0, 0.0, ds * slope)",
        "ds * slope",
        ("own_hidden",),
    ),
    Mutant(
        "torch_function_no_slope",
        "the derivative of the user's function is ignored",
        TORCH_SCORES,
        "ds = torch.where(ds == 0, 0.0, ds * slope)",
        "ds = torch.where(ds == 0, 0.0, ds * 1.0)",
        ("own_function",),
        "torch",
    ),
    Mutant(
        "torch_function_slope_of_hidden",
        "the derivative of a hidden pair reaches the gradients",
        TORCH_SCORES,
        "ds = torch.where(ds == 0, 0.0, ds * slope)",
        "ds = ds * slope",
        ("own_hidden",),
        "torch",
    ),
    Mutant(
        "torch_function_heads",
        "the function gets the head of the keys",
        TORCH_SCORES,
        "h * self.problem.group + g",
        "h + g * 0",
        ("own_positions",),
        "torch",
    ),
    Mutant(
        "torch_function_rows",
        "a query's position is its row",
        TORCH_SCORES,
        "q_pos = q + self.problem.q_start if",
        "q_pos = q if",
        ("own_positions",),
        "torch",
    ),
)
