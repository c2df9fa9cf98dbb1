"""The faults of tiles in plain PyTorch, as values (see ``mutant_list``)."""

from __future__ import annotations

from .mutant_list import TILES, Mutant

__all__ = ["TORCH_MUTANTS"]


def _torch(name: str, breaks: str, old: str, new: str, *killers: str, count: int = 1, equivalent: str | None = None) -> Mutant:
    return Mutant(f"torch_{name}", breaks, TILES, old, new, killers, "torch", count, equivalent)


TORCH_MUTANTS: tuple[Mutant, ...] = (
    _torch("no_alpha_on_l", "the old sum keeps its old pivot", "l_i.mul_(alpha).add_(p", "l_i.add_(p", "late_spike"),
    _torch(
        "no_alpha_on_acc",
        "the old accumulator keeps its old pivot",
        "        acc.mul_(alpha)\n        torch",
        "        torch",
        "late_spike",
    ),
    _torch(
        "alpha_in_base_e",
        "alpha in base e",
        "work.steps.weights(m_i, pivot)\n        p",
        "torch.exp(m_i - pivot)\n        p",
        "late_spike",
    ),
    _torch(
        "block_maximum",
        "the maximum of a tile alone",
        "m_new = torch.maximum(m_i, s.amax(-1, keepdim=True))",
        "m_new = s.amax(-1, keepdim=True)",
        "overflow_spike",
    ),
    _torch(
        "no_pivot_guard",
        "-inf - -inf in a row without a key yet",
        "pivot = m_new.masked_fill(m_new == _NEG_INF, 0.0)\n        alpha = work.steps.weights(m_i, pivot)\n        p =",
        "pivot = m_new\n        alpha = work.steps.weights(m_i, pivot)\n        p =",
        "thin_window",
    ),
    _torch(
        "no_pivot_guard_free",
        "-inf - -inf where all keys of a tile are -inf",
        "pivot = m_new.masked_fill(m_new == _NEG_INF, 0.0)\n        alpha = work.steps.weights(m_i, pivot)\n        p =",
        "pivot = m_new.masked_fill(m_new == _NEG_INF, 0.0) if masked else m_new\n"
        "        alpha = work.steps.weights(m_i, pivot)\n        p =",
        "overflowed_keys",
    ),
    _torch(
        "finite_fill", "masked scores are -1e6", "torch.where(ok, zero, _NEG_INF)", "torch.where(ok, zero, -1.0e6)", "empty_rows"
    ),
    _torch("no_division", "the accumulator is stored as it is", "acc.div_(l_i.masked_fill_(l_i == 0, 1.0))", "acc", "odd_scale"),
    _torch("no_guard_of_l", "0 / 0 in a row without keys", "l_i.masked_fill_(l_i == 0, 1.0)", "l_i", "empty_rows"),
    _torch("lse_in_base_two", "lse is not brought back to base e", "m_i = m_i / work.steps.unit", "m_i = m_i * 1.0", "odd_scale"),
    _torch("lse_without_m", "lse is the logarithm of the sum alone", "(log_l + m_i)", "log_l", "odd_scale"),
    _torch(
        "last_tile_dropped",
        "the last tile of keys is not visited",
        "in range(lo, hi)",
        "in range(lo, hi - 1)",
        "ragged_full",
        count=2,
    ),
    _torch("top_left", "the mask ignores Nk - Nq", "queries.start + self.problem.q_start", "queries.start", "ragged_causal_br"),
    _torch(
        "wrong_kv_head",
        "query heads are dealt out in turn",
        "t.unflatten(1, (self.problem.heads_kv, self.problem.group))",
        "t.unflatten(1, (self.problem.group, self.problem.heads_kv)).transpose(1, 2)",
        "gqa",
    ),
    _torch("dk_without_scale", "sm_scale is lost", "alpha=scale, out=part", "alpha=1.0, out=part", "odd_scale"),
    _torch("dq_without_scale", "sm_scale is lost", "alpha=scale, out=dq_acc", "alpha=1.0, out=dq_acc", "odd_scale"),
    _torch("delta_ignored", "ds = p dp", "dp.sub_(rows.delta)", "dp", "odd_scale"),
    _torch("dlse_sign", "the gradient of lse is added", "delta.sub_(", "delta.add_(", "lse_loss"),
    _torch(
        "p_not_masked_backward",
        "hidden scores pass gradients",
        "        if kind == MASKED:\n",
        "        if False:\n",
        "ragged_causal_br",
    ),
    _torch(
        "lse_of_empty_rows",
        "-inf - -inf in a row without keys",
        "pivot.masked_fill_(empty, 0.0)",
        "pivot.add_(0.0)",
        "empty_rows",
    ),
    _torch(
        "delta_of_empty_rows",
        "rows without keys keep their delta",
        "delta.masked_fill_(empty, 0.0)",
        "delta",
        "empty_rows",
        "empty_tail",
        equivalent="every p of such a row is an exact 0, and 0 times a finite delta is 0",
    ),
    Mutant(
        "torch_plan_top_left",
        "the plan ignores Nk - Nq",
        "plan.py",
        "p.q_start + first, p.q_start + last",
        "first, last",
        ("ragged_causal_br",),
        "torch",
    ),
)
