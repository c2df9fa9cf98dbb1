"""Score steps and sinks in Triton kernels: what a spec does to a tile of scores.

``STEPS`` names the steps in their order, as a kernel is compiled for them: "softcap", "alibi", "bias" ("bias_far": its offsets
inside a tile need 64 bits); any other is a function of the user's own, by its whole step, hash included. ``score`` holds their
arguments: ``((cap, 1 / cap), (slopes, strides), (bias, strides), (fn, tensors, (derivative,)))``, None for a step that is not
there, and () for a derivative that is 1: Triton 3.6 cannot compare with None what has a None inside.
Triton hashes the source of functions that stand in such a tuple (not of those in a tuple that is a constant).

NATURAL: scores are natural and not in base two. They are where the spec has a bias or a function: times log2(e) the lowest finite
value would overflow to -inf, and a row of it would be taken for an empty one.
"""

import triton
import triton.language as tl

from ... import bodies
from .parts import LOG2_E, _shared

alibi = _shared(bodies.alibi)
softcap_slope = _shared(bodies.softcap_slope)


@triton.jit
def tanh(x, FINE: tl.constexpr):
    """tanh by exp2, right to 1e-7 of 1; to 3e-7 of itself if FINE."""
    t = 1.0 - 2.0 / (1.0 + tl.math.exp2(x * (2.0 * LOG2_E)))
    if FINE:
        # The difference of two numbers near 1 leaves little of a small x: its series does better.
        y = x * x
        series = 1.0 + y * (-1 / 3 + y * (2 / 15 + y * (-17 / 315 + y * (62 / 2835 - y * (1382 / 155925)))))
        t = tl.where(y < 0.12, x * series, t)
    return t


@triton.jit
def distances(q_pos, start_n, KEYS: tl.constexpr, Q_AXIS: tl.constexpr, K_AXIS: tl.constexpr):
    """How many positions lie between queries and the KEYS keys from ``start_n`` on, float32.

    Only rows and columns are converted, not every element: on a GPU that takes four times as long as an addition.
    """
    near = (q_pos - start_n).to(tl.float32)
    return tl.abs(tl.expand_dims(near, Q_AXIS) - tl.expand_dims(tl.arange(0, KEYS).to(tl.float32), K_AXIS))


@triton.jit
def load_bias(
    bias, strides, batch, head, start_m, start_n, seqlen_q, seqlen_k, ROWS: tl.constexpr, KEYS: tl.constexpr,
    Q_AXIS: tl.constexpr, K_AXIS: tl.constexpr, TAIL_Q: tl.constexpr, TAIL_K: tl.constexpr, FAR: tl.constexpr,
):  # fmt: skip
    """A tile of the bias in float32; 0 at queries (if TAIL_Q) and keys (if TAIL_K) past the end: there may be some."""
    rows = tl.expand_dims(tl.arange(0, ROWS), Q_AXIS)
    keys = tl.expand_dims(tl.arange(0, KEYS), K_AXIS)
    inside = None
    if TAIL_Q and TAIL_K:
        inside = (rows < seqlen_q - start_m) & (keys < seqlen_k - start_n)
    elif TAIL_Q:
        inside = rows < seqlen_q - start_m
    elif TAIL_K:
        inside = keys < seqlen_k - start_n
    if FAR:
        rows = rows.to(tl.int64)
        keys = keys.to(tl.int64)
    start = batch.to(tl.int64) * strides[0] + head.to(tl.int64) * strides[1]
    start = start + tl.cast(start_m, tl.int64) * strides[2] + tl.cast(start_n, tl.int64) * strides[3]
    ptrs = bias + start + (rows * strides[2] + keys * strides[3])
    if inside is None:
        return tl.load(ptrs).to(tl.float32)
    else:
        return tl.load(ptrs, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def scored(
    s, score, batch, head, start_m, start_n, q_start, seqlen_q, seqlen_k,
    KEYS_FIRST: tl.constexpr, MASKED: tl.constexpr, STEPS: tl.constexpr, NATURAL: tl.constexpr, TAILS: tl.constexpr,
    DTYPE: tl.constexpr, OF: tl.constexpr, slope=1.0, tangents=None,
):  # fmt: skip
    """``(scores after the steps, derivative of all steps, derivative of those after the step OF)`` of a tile [queries, keys], or
    [keys, queries] if KEYS_FIRST.

    TAILS: is the last tile of queries ragged, and that of keys? A tile of streamed keys that is not MASKED is then not the last.
    Forward mode, OF = "tangents": ``slope`` is the tangent of the scores before the steps, and ``tangents`` those of slopes and
    bias, as ``score`` has these; what comes back as the derivative is the tangent of the scores after the steps.
    """
    q_axis: tl.constexpr = 0 if KEYS_FIRST else 1
    k_axis: tl.constexpr = 1 if KEYS_FIRST else 0
    rows: tl.constexpr = s.shape[k_axis]
    keys: tl.constexpr = s.shape[q_axis]
    late = 1.0
    for i in tl.static_range(len(STEPS)):
        if STEPS[i] == "softcap":
            t = tanh(s * score[0][1], tl.float32 == DTYPE)
            s = t * score[0][0]
            by = softcap_slope(t)
            slope = by * slope
            late = by * late
        elif STEPS[i] == "alibi":
            at = score[1][0] + batch.to(tl.int64) * score[1][1][0] + head.to(tl.int64) * score[1][1][1]
            by = tl.load(at).to(tl.float32)
            if not NATURAL:
                by *= LOG2_E
            q_pos = q_start + start_m + tl.arange(0, rows)
            s = alibi(s, by, distances(q_pos, start_n, keys, q_axis, k_axis))
            if OF == "tangents":  # noqa: SIM102
                if tangents[0] is not None:
                    at = tangents[0][0] + batch.to(tl.int64) * tangents[0][1][0] + head.to(tl.int64) * tangents[0][1][1]
                    slope -= tl.load(at).to(tl.float32) * distances(q_pos, start_n, keys, q_axis, k_axis)
            if OF == "alibi":
                late = 1.0
        elif STEPS[i] == "bias" or STEPS[i] == "bias_far":
            s += load_bias(
                score[2][0], score[2][1], batch, head, start_m, start_n, seqlen_q, seqlen_k, rows, keys, q_axis, k_axis,
                TAILS[0], TAILS[1] and (MASKED or KEYS_FIRST), STEPS[i] == "bias_far",
            )  # fmt: skip
            if OF == "tangents":  # noqa: SIM102
                if tangents[1] is not None:
                    slope += load_bias(
                        tangents[1][0], tangents[1][1], batch, head, start_m, start_n, seqlen_q, seqlen_k, rows, keys,
                        q_axis, k_axis, TAILS[0], TAILS[1] and (MASKED or KEYS_FIRST), STEPS[i] == "bias_far",
                    )  # fmt: skip
            if OF == "bias":
                late = 1.0
        else:
            # Positions end with the sequences, so that what the function loads is there.
            offs_m = start_m + tl.arange(0, rows)
            offs_n = start_n + tl.arange(0, keys)
            if TAILS[0]:
                offs_m = tl.minimum(offs_m, seqlen_q - 1)
            if TAILS[1]:
                offs_n = tl.minimum(offs_n, seqlen_k - 1)
            q_pos = tl.expand_dims(q_start + offs_m, q_axis)
            kv_pos = tl.expand_dims(offs_n, k_axis)
            if len(score[3][2]) > 0:
                by = tl.cast(score[3][2][0](s, batch, head, q_pos, kv_pos, *score[3][1]), tl.float32)
                slope = by * slope
                late = by * late
            s = tl.broadcast_to(tl.cast(score[3][0](s, batch, head, q_pos, kv_pos, *score[3][1]), tl.float32), s.shape)
            if TAILS[0]:
                # Whatever it makes of the zeros past the last query must not be a NaN.
                s = tl.where(tl.expand_dims(start_m + tl.arange(0, rows), q_axis) < seqlen_q, s, 0.0)
    return s, slope, late


@triton.jit
def before(ds, slope, score):
    """The gradient of scores before steps whose derivative is ``slope``. Where a key has no weight that may be anything."""
    if score[3] is None:
        return ds * slope
    else:
        return tl.where(ds == 0.0, 0.0, ds * slope)


@triton.jit
def slope_gradient(ds, q_pos, start_n):
    """What the rows of a tile add to the gradient of the slope of ALiBi; ``ds`` is that of the scores as ALiBi left them."""
    keys: tl.constexpr = ds.shape[1]
    return -tl.sum(ds * distances(q_pos, start_n, keys, 1, 0), 1)


@triton.jit
def _in_base_two(m_i):
    """``(unit, pivot)`` of rows whose largest natural score is ``m_i``: weights are ``exp2(s unit - pivot)``.

    The unit is log2(e), and 1 for scores so large (those of the lowest finite value, say) that this factor would overflow: any two
    of them are the same or further apart than any weight knows. No branch of a row shows in the loop but its own two numbers.
    """
    unit = tl.where(tl.abs(m_i) < 1e30, LOG2_E, 1.0)
    # Through ``where``, so that the product is rounded before anything is taken from it: past and present must agree on the pivot.
    return unit, tl.where(m_i == -float("inf"), 0.0, m_i * unit)


@triton.jit
def natural_step(s, ok, m_i, l_i, MASKED: tl.constexpr):
    """``parts.softmax_step`` for natural scores. A bias of -inf may leave any row without a maximum.

    ``acc`` and ``l_i`` count weights from ``_in_base_two(m_i)``, one multiplication with an addition for each; ``settled`` says at
    the end by what they differ from ``exp(s - m_i)``.
    """
    if MASKED:
        s = tl.where(ok, s, -float("inf"))
    m_new = tl.maximum(m_i, tl.max(s, 1))
    unit, pivot = _in_base_two(m_new)
    p = tl.math.exp2(s * unit[:, None] - pivot[:, None])
    past = tl.where(m_i == -float("inf"), m_i, m_i * unit)
    alpha = tl.math.exp2(past - pivot)
    return p, alpha, m_new, l_i * alpha + tl.sum(p, 1)


@triton.jit
def settled(m_i):
    """What the weights of rows are to be multiplied by, to be ``exp(s - m_i)``: what was rounded off their pivot."""
    unit, pivot = _in_base_two(m_i)
    return tl.where(m_i == -float("inf"), 1.0, tl.math.exp2(pivot - m_i * unit))


@triton.jit
def add_sink(acc, l_i, m_i, sink, batch, head, NATURAL: tl.constexpr):
    """One more logit, whose value is 0."""
    unit: tl.constexpr = LOG2_E if NATURAL else 1.0
    logit = tl.load(sink[0] + batch.to(tl.int64) * sink[1][0] + head.to(tl.int64) * sink[1][1]).to(tl.float32)
    if not NATURAL:
        logit *= LOG2_E
    m_new = tl.maximum(m_i, logit)
    pivot = tl.where(m_new == -float("inf"), 0.0, m_new)
    alpha = tl.math.exp2((m_i - pivot) * unit)
    return acc * alpha[:, None], l_i * alpha + tl.math.exp2((logit - pivot) * unit), m_new


@triton.jit
def load_rows(rows_ptr, rows, inside):
    """``(largest score, log2 of the sum over it)`` of rows; +inf and 0 for rows without a key and rows past the end."""
    m = tl.load(rows_ptr + rows * 2, mask=inside, other=float("inf"))
    log_l = tl.load(rows_ptr + rows * 2 + 1, mask=inside, other=0.0)
    empty = m == -float("inf")
    return tl.where(empty, float("inf"), m), tl.where(empty, 0.0, log_l * LOG2_E)


@triton.jit
def weights(s, pivot, log_l, NATURAL: tl.constexpr):
    """``p`` of scores: ``pivot`` is lse2, or the largest natural score, and then ``log_l`` the log2 of the sum over it."""
    if NATURAL:
        return tl.math.exp2((s - pivot) * LOG2_E - log_l)
    else:
        return tl.math.exp2(s - pivot)
