"""Score functions that tests and ``tilewise check`` put into the kernels, each with its derivative (``testing.score_functions``).

A constant stands to the right of a tensor: in Triton's interpreter it would swallow the tensor otherwise.
"""

import triton
import triton.language as tl

CAP: tl.constexpr = tl.constexpr(3.0)
REACH: tl.constexpr = tl.constexpr(40)  # the table of relative positions holds distances from -REACH to REACH
WIDTH: tl.constexpr = tl.constexpr(81)


@triton.jit
def rational_cap(score, batch, head, q_pos, kv_pos):
    """``CAP s / (CAP + |s|)``: a cap without tanh."""
    return score * CAP / (tl.abs(score) + CAP)


@triton.jit
def rational_cap_slope(score, batch, head, q_pos, kv_pos):
    part = tl.abs(score) / CAP + 1.0
    return 1.0 / (part * part)


@triton.jit
def _place(q_pos, kv_pos):
    return tl.minimum(tl.maximum(kv_pos - q_pos, -REACH), REACH) + REACH


@triton.jit
def relative(score, batch, head, q_pos, kv_pos, table):
    """A learned number for each head and distance, far ones shared."""
    return score + tl.load(table + head * WIDTH + _place(q_pos, kv_pos)).to(tl.float32)


@triton.jit
def tempered(score, batch, head, q_pos, kv_pos, scales, offsets):
    """A factor for each head, and a number for each batch and key."""
    return score * tl.load(scales + head) + tl.load(offsets + batch * 256 + kv_pos).to(tl.float32)


@triton.jit
def tempered_slope(score, batch, head, q_pos, kv_pos, scales, offsets):
    return tl.load(scales + head)


@triton.jit
def rooted(score, batch, head, q_pos, kv_pos):
    """Scores that grow with the distance, under a causal mask: NaN for the pairs that it hides."""
    return score * tl.sqrt((q_pos - kv_pos + 1).to(tl.float32)) * 0.25


@triton.jit
def rooted_slope(score, batch, head, q_pos, kv_pos):
    return tl.sqrt((q_pos - kv_pos + 1).to(tl.float32)) * 0.25


@triton.jit
def sparse(score, batch, head, q_pos, kv_pos):
    """Hides keys by a rule of its own; every eighth query sees none. NaN for a score of 0, which is none of a real pair."""
    far = (kv_pos - q_pos + 1000) % 3 == 0
    shown = tl.where(score == 0.0, float("nan"), score - tl.abs(q_pos - kv_pos) * 0.01)
    return tl.where(far | (q_pos % 8 == 5), -float("inf"), shown)
