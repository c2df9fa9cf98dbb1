"""What a spec adds to the Hopper kernels: score steps, sinks, and masks that come as tensors.

``terms`` is None, or ``(cap, slopes, sink, mask, lists)``, each None where the spec has no such term:

    cap            numbers of a softcap (``common.cap_numbers``)
    slopes, sink   a tensor (batch, heads) and its strides
    mask           (segment_q, segment_k, row_start, row_end), each or None, and their strides
    lists          counts and tiles of a ``plan.BlockTable``

STEPS names the score steps in their order. ALiBi alone, where no key lies right of its query, is a RAMP: ``slope (kv - q)`` is
linear in the key, so one more product of 16 columns adds it to the scores of a tile, and what all scores of a row or of a tile
share goes into the reference of the softmax.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ... import bodies
from .parts import ROWS, _shared, allowed

alibi = _shared(bodies.alibi)
in_row = _shared(bodies.in_row)
same_segment = _shared(bodies.same_segment)
softcap_slope = _shared(bodies.softcap_slope)

LOG2_E = gl.constexpr(1.4426950408889634)
RAMP_GROUP = gl.constexpr(32)  # forward: columns whose places are counted from one middle
RAMP_DEPTH = gl.constexpr(16)  # columns of the operands of the product that adds a ramp


# tanh(x) / x as a polynomial in x^2 (minimax), its coefficients as PTX writes them: up to |x| = 1/4, right to 4e-7, and up to 1/2,
# to 6e-7.
NEAR = ("0f3F7FFFF9", "0fBEAA9BB1", "0f3E037F85")
MIDDLE = ("0f3F7FFFF7", "0fBEAAA179", "0f3E071192", "0fBD35DF1B")


@gluon.aggregate
class Own:
    """What the terms say of the rows that a consumer works on; constants where there are none."""

    batch: object
    head: object
    slope2: object  # of ALiBi, in base two
    steep: object  # RAMP: the left operand of the product
    tiles: object  # LISTED: the tiles that these rows visit


@gluon.jit
def slope_of(terms, batch, head):
    """The slope of a head in base two."""
    strides = terms[1][1]
    at = terms[1][0] + batch.to(gl.int64) * strides[0] + head.to(gl.int64) * strides[1]
    return gl.load(at).to(gl.float32) * LOG2_E


@gluon.jit
def thirds(x):
    """Three bfloat16 numbers whose sum is x to 24 bits, as float32."""
    high = x.to(gl.bfloat16).to(gl.float32)
    middle = (x - high).to(gl.bfloat16).to(gl.float32)
    return high, middle, (x - high - middle).to(gl.bfloat16).to(gl.float32)


@gluon.constexpr_function
def operand_layout():
    return gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 16, 16])


@gluon.jit
def steep_rows(ratio, S_LAYOUT: gl.constexpr):
    """[ROWS, RAMP_DEPTH] of which each row holds ``ratio`` in three parts, to multiply with ``ramp``."""
    L: gl.constexpr = operand_layout()
    column = gl.arange(0, RAMP_DEPTH, gl.SliceLayout(0, L))
    high, middle, low = thirds(ratio)
    row = gl.where(column == 0, high, gl.where(column == 1, middle, gl.where(column == 2, low, 0.0)))
    x = row[None, :] + gl.zeros([ROWS, RAMP_DEPTH], gl.float32, L)
    return gl.convert_layout(x.to(gl.bfloat16), gl.DotOperandLayout(0, S_LAYOUT, 2))


@gluon.jit
def own_of(work, batch, head, row, qk_scale2, S_LAYOUT: gl.constexpr):
    """What the terms say of 64 rows from ``row`` on; S_LAYOUT None: only what a producer asks."""
    slope2 = None
    steep = None
    tiles = None
    if work.LISTED:
        tiles = work.terms[4][1] + work.list_of(batch, head, row) * work.table_width
    if S_LAYOUT is not None:  # noqa: SIM102
        if work.terms is not None:  # noqa: SIM102
            if work.terms[1] is not None:
                slope2 = slope_of(work.terms, batch, head)
                if work.RAMP:
                    steep = steep_rows(slope2 / qk_scale2, S_LAYOUT)
    return Own(batch, head, slope2, steep, tiles)


@gluon.jit
def steep_keys(ratio, S_LAYOUT: gl.constexpr):
    """``steep_rows`` for rows that are keys: each holds its place, counted from the middle, times ``ratio``, and ``ratio``, in
    three parts each, to multiply with ``make_ramp(BLOCK, True)``."""
    L: gl.constexpr = operand_layout()
    column = gl.arange(0, RAMP_DEPTH, gl.SliceLayout(0, L))[None, :]
    place = (gl.arange(0, ROWS, gl.SliceLayout(1, L)) - ROWS // 2).to(gl.float32)
    high, middle, low = thirds(ratio * place)
    x = gl.where(column == 0, high[:, None], gl.where(column == 1, middle[:, None], gl.where(column == 2, low[:, None], 0.0)))
    high, middle, low = thirds(ratio)
    x = gl.where(column == 3, high, gl.where(column == 4, middle, gl.where(column == 5, low, x)))
    return gl.convert_layout(x.to(gl.bfloat16), gl.DotOperandLayout(0, S_LAYOUT, 2))


@gluon.jit
def make_ramp(BLOCK: gl.constexpr, GROUP: gl.constexpr, KEYS_FIRST: gl.constexpr = False):
    """[BLOCK, RAMP_DEPTH] in shared memory: the places of a tile's columns, counted from the middle of each GROUP, three times
    over. KEYS_FIRST: the columns are queries, which lower the scores; before them stands a 1 three times over."""
    L: gl.constexpr = gl.BlockedLayout([1, 4], [8, 4], [gl.num_warps(), 1], [1, 0])
    place = gl.arange(0, BLOCK, gl.SliceLayout(1, L)) % GROUP - GROUP // 2
    column = gl.arange(0, RAMP_DEPTH, gl.SliceLayout(0, L))
    if KEYS_FIRST:
        x = gl.where((column < 6)[None, :], -place[:, None].to(gl.float32), 0.0)
        x = gl.where((column < 3)[None, :], 1.0, x)
    else:
        x = gl.where((column < 3)[None, :], place[:, None].to(gl.float32), 0.0)
    return gl.allocate_shared_memory(gl.bfloat16, [BLOCK, RAMP_DEPTH], gl.NVMMASharedLayout(32, 16, 2), x.to(gl.bfloat16))


@gluon.constexpr_function
def _series(coefficients, out, s, exp2):
    """Lines for ``s P(c^2 s^2)`` of the elements; ``w`` holds c^2 and ``f`` the factor of the first coefficient."""
    lines = ["mov.f32 t, f;"]
    for n, a in enumerate(coefficients):
        lines.append(f"mul.f32 k{n}, t, {a}; mul.f32 t, t, w;")
    last = len(coefficients) - 1
    for o, e in zip(out, s, strict=True):
        lines.append(f"mul.ftz.f32 y, {e}, {e}; mov.f32 z, k{last};")
        lines += [f"fma.rn.ftz.f32 z, y, z, k{n};" for n in range(last - 1, -1, -1)]
        lines.append(f"mul.ftz.f32 z, z, {e}; ex2.approx.ftz.f32 {o}, z;" if exp2 else f"mul.ftz.f32 {o}, z, {e};")
    return "\n".join(lines)


@gluon.constexpr_function
def _capped(outputs, inputs, exp2):
    (out,) = outputs
    s, (c,), (cap,), (factor,), (reach,) = inputs
    lines = ["{ .reg .pred p, q; .reg .f32 a, f, t, w, y, z, k0, k1, k2, k3; .reg .b32 m, n; mov.b32 m, 0;"]
    # Two absolute values at a time, and the larger ones, which are not negative, three at a time as integers.
    for left, right in zip(s[::2], s[1::2], strict=True):
        lines.append(f"abs.f32 y, {left}; abs.f32 z, {right}; max.f32 y, y, z; mov.b32 n, y; max.s32 m, m, n;")
    lines.append(f"mov.b32 a, m; mov.f32 f, {factor}; mul.f32 w, {c}, {c}; mul.f32 t, {reach}, 0f3F000000;")
    lines.append(f"setp.gt.f32 p, a, t; setp.gt.f32 q, a, {reach}; vote.sync.any.pred p, p, 0xffffffff;")
    lines.append("vote.sync.any.pred q, q, 0xffffffff; @q bra FAR; @p bra MIDDLE;")
    lines.append(_series(NEAR, out, s, exp2))
    lines.append("bra DONE; MIDDLE:")
    lines.append(_series(MIDDLE, out, s, exp2))
    lines.append(f"bra DONE; FAR: mul.f32 w, {c}, 0f4038AA3B; mul.f32 t, {cap}, 0fC0000000;")
    for o, e in zip(out, s, strict=True):
        lines.append(f"mul.ftz.f32 y, {e}, w; ex2.approx.ftz.f32 y, y; add.ftz.f32 y, y, 0f3F800000;")
        lines.append(f"rcp.approx.ftz.f32 y, y; fma.rn.ftz.f32 y, y, t, {cap};")
        lines.append(f"ex2.approx.ftz.f32 {o}, y;" if exp2 else f"mov.f32 {o}, y;")
    return "\n".join(lines) + "\nDONE: }"


@gluon.constexpr_function
def _capped_text(outputs, inputs):
    return _capped(outputs, inputs, False)


@gluon.constexpr_function
def _exp2_capped_text(outputs, inputs):
    return _capped(outputs, inputs, True)


@gluon.jit
def capped(s, cap, EXP2: gl.constexpr):
    """``cap tanh(s / cap)`` in base two, right to 6e-7 of itself, or beyond half the cap to 2e-7 of the cap. EXP2: exp2 of it.

    The unit for exp2 is short, so a warp none of whose scores exceeds half the cap (a quarter) takes a polynomial of degree 7 (5).
    ``cap``: see ``common.cap_numbers``.
    """
    numbers = [s, cap[0], cap[1], cap[2], cap[3]]
    TEXT: gl.constexpr = _exp2_capped_text if EXP2 else _capped_text
    return gl.inline_asm(TEXT, ("=&f", "f", "f", "f", "f", "f"), numbers, s.type, is_pure=True)


@gluon.constexpr_function
def _tanh_text(outputs, inputs):
    return "\n".join(f"tanh.approx.f32 {t}, {x};" for t, x in zip(outputs[0], inputs[0], strict=True))


@gluon.jit
def capped_with_slope(s, cap, FAST: gl.constexpr):
    """``(cap tanh(s / cap), its derivative by the score)``. FAST: tanh in one instruction, right to 2^-11 of itself."""
    if FAST:
        t = gl.inline_asm(_tanh_text, ("=&f", "f"), [s * cap[0]], s.type, is_pure=True)
        return t * cap[1], softcap_slope(t)
    else:
        x = capped(s, cap, False)
        return x, softcap_slope(x * cap[4])


@gluon.jit
def distanced(x, slope2, first_row, first_column):
    """Scores [rows, columns] in base two less ``slope2`` for every position between a row and a column, with the positions of the
    first of each; columns as in ``masked``."""
    COLUMNS: gl.constexpr = x.shape[1]
    y = x.reshape([ROWS, COLUMNS // 8, 4, 2])
    L: gl.constexpr = y.type.layout
    row = gl.arange(0, ROWS, gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(3, L))))
    eight = gl.arange(0, COLUMNS // 8, gl.SliceLayout(0, gl.SliceLayout(2, gl.SliceLayout(3, L))))
    quad = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(3, L))))
    pair = gl.arange(0, 2, gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, L))))
    near = (first_row - first_column + row)[:, None, None, None] - (quad * 2)[None, None, :, None]
    place = eight[None, :, None, None] * 8 + pair[None, None, None, :]
    y = alibi(y, slope2, gl.abs(near.to(gl.float32) - place.to(gl.float32)))
    return gl.convert_layout(y.reshape([ROWS, COLUMNS]), x.type.layout, assert_trivial=True)


@gluon.jit
def scored(s, work, own, n_block, start_row, qk_scale2):
    """``(scores, factor, shift)`` of products s [ROWS, BLOCK_N]: times the factor and plus the shift (None: 0) they are in base 2.
    The shift is that of the first RAMP_GROUP of columns, and what it grows by from one to the next.

    Without steps the factor is left to the softmax: max(s) * scale is the maximum of the scaled scores only for a scale above 0.
    With a RAMP the scores lack what all keys of a row share, ``slope2`` for each place of the row. FIXED: exp2 of them comes.
    """
    if work.LEAN:
        return s, qk_scale2, (own.slope2, n_block * work.BLOCK_N - work.q_start - start_row)
    elif work.RAMP:
        middle = n_block * work.BLOCK_N + RAMP_GROUP // 2 - work.q_start - start_row
        return s, qk_scale2, (own.slope2 * middle.to(gl.float32), own.slope2 * RAMP_GROUP)
    elif len(work.STEPS) > 0:
        x = s
        for i in gl.static_range(len(work.STEPS)):
            if work.STEPS[i] == "softcap":
                x = capped(x, work.terms[0], work.FIXED and i == len(work.STEPS) - 1)
            else:
                if i == 0:
                    x = x * qk_scale2
                x = distanced(x, own.slope2, work.q_start + start_row, n_block * work.BLOCK_N)
        return x, 1.0, None
    elif work.SCALED_FIRST:
        return s * qk_scale2, 1.0, None
    else:
        return s, qk_scale2, None


@gluon.jit
def exponents(s, pivot, of, slope2, first_row, first_column, qk_scale2):
    """Backward: ``(s2 - pivot, derivative of the softcap)`` of products s of two tiles with these first positions, in base two; 1
    without a softcap. ``of``: ``Work`` or ``Keys``. With a RAMP the scores lack what the pivot lacks."""
    slope = 1.0
    if len(of.STEPS) == 0 or of.RAMP:
        x = s * qk_scale2
    else:
        x = s
        for i in gl.static_range(len(of.STEPS)):
            if of.STEPS[i] == "softcap":
                x, slope = capped_with_slope(x, of.terms[0], of.FAST)
            else:
                if i == 0:
                    x = x * qk_scale2
                x = distanced(x, slope2, first_row, first_column)
    return x - pivot, slope


@gluon.jit
def with_sink(m_i, l_row, work, batch, head, rows):
    """``(m, l, alpha)`` with one more logit in the sum, whose value is 0: alpha is for the accumulator.

    m_i: references; a row without a key (l_row = 0) has none.
    """
    sink = work.terms[2]
    at = batch.to(gl.int64) * sink[1][0] + (head.to(gl.int64) * work.PACK + rows % work.PACK) * sink[1][1]
    logit = gl.load(sink[0] + at).to(gl.float32) * LOG2_E
    m_i = gl.where(l_row == 0.0, -float("inf"), m_i)
    m_new = gl.maximum(m_i, logit)
    pivot = gl.where(m_new == -float("inf"), 0.0, m_new)
    alpha = gl.exp2(m_i - pivot)
    return m_new, l_row * alpha + gl.exp2(logit - pivot), alpha


@gluon.jit
def place(x):
    """An end of an interval as int32: no key lies beyond 2^30."""
    return gl.minimum(gl.maximum(x, -(1 << 30)), 1 << 30).to(gl.int32)


@gluon.jit
def seen(ok, mask, batch, head, queries, keys, seqlen_q, seqlen_k):
    """``ok`` and those terms of the mask that are tensors; numbers of queries and keys, shaped to broadcast."""
    tensors = mask[0]
    strides = mask[1]
    batch = batch.to(gl.int64)
    head = head.to(gl.int64)
    if tensors[0] is not None:
        of_query = gl.load(tensors[0] + batch * strides[0][0] + queries * strides[0][1], mask=queries < seqlen_q, other=0)
        of_key = gl.load(tensors[1] + batch * strides[1][0] + keys * strides[1][1], mask=keys < seqlen_k, other=0)
        ok = ok & same_segment(of_query, of_key)
    if tensors[2] is not None:
        starts = tensors[2] + batch * strides[2][0] + head * strides[2][1]
        ends = tensors[3] + batch * strides[3][0] + head * strides[3][1]
        row_start = gl.load(starts + queries * strides[2][2], mask=queries < seqlen_q, other=0)
        row_end = gl.load(ends + queries * strides[3][2], mask=queries < seqlen_q, other=0)
        ok = ok & in_row(keys, place(row_start), place(row_end))
    return ok


@gluon.jit
def masked(s, work, own, place, n_block, start_row, free_lo, free_hi, WEIGHTS: gl.constexpr = False):
    """Scores [ROWS, BLOCK_N] of tile ``n_block`` with -inf (WEIGHTS: weights with 0) where a row may not see a key. Free tiles
    branch around it: those at the places from ``free_lo`` up to ``free_hi``.

    The columns are seen as [BLOCK_N / 8, 4, 2], as a thread holds them: its place in the four is added to the position of the tile,
    and only then the constants. Added the other way round, 16 column numbers or more would be kept in registers across the loop.
    """
    if work.MASKED:  # noqa: SIM102
        if (place < free_lo) | (place >= free_hi):
            x = s.reshape([ROWS, work.BLOCK_N // 8, 4, 2])
            L: gl.constexpr = x.type.layout
            row = gl.arange(0, ROWS, gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(3, L))))
            eight = gl.arange(0, work.BLOCK_N // 8, gl.SliceLayout(0, gl.SliceLayout(2, gl.SliceLayout(3, L))))
            quad = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(3, L))))
            pair = gl.arange(0, 2, gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, L))))
            q_pos = (work.q_start + (start_row + row) // work.PACK)[:, None, None, None]
            kv_pos = (n_block * work.BLOCK_N + quad * 2)[None, None, :, None]
            kv_pos = kv_pos + eight[None, :, None, None] * 8 + pair[None, None, None, :]
            ok = allowed(q_pos, kv_pos, work.seqlen_k, work.upper, work.lower, work.HAS_UPPER, work.HAS_LOWER)
            if work.LISTED:
                rows = (start_row + row)[:, None, None, None]
                ok = seen(ok, work.terms[3], own.batch, own.head, rows, kv_pos, work.seqlen_q, work.seqlen_k)
            x = gl.where(ok, x, 0.0 if WEIGHTS else -float("inf"))
            s = gl.convert_layout(x.reshape([ROWS, work.BLOCK_N]), s.type.layout, assert_trivial=True)
    return s
