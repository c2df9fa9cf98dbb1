"""Forward: ``o = softmax(sm_scale q k^T) v`` and ``lse``, one program for tiles of BLOCK_M queries of one head.

Partitions: BLOCK_M / 64 consumers and a producer, which walk the same tiles (``parts.Work``) and meet in three rings: queries (a
slot for each consumer of a tile), keys, values. The key tiles of a query tile go from right to left: the diagonal comes first.

Invariant after every key tile: with the reference ``m_i`` (``parts.softmax_step``), ``l_i = sum exp2(s2 - m_i)`` and
``acc = sum exp2(s2 - m_i) v`` over the keys visited so far. In the overlapped form ``acc`` is one tile behind: the product of the
last tile, whose ``p`` is carried as a register operand, is issued after the scores of the next tile, so that the tensor cores work
on it while the softmax of those scores runs.

Arrivals that complete a phase of each barrier, with C consumers of W = 4 warps:
    queries  full: 1 (bytes)   empty: 1, by the consumer that owns the slot, once its output has left the slot
    keys     full: 1 (bytes)   empty: C * W, each warp after its last read of the tile
    values   the same
    tickets  issued: 1, by the producer (DYNAMIC only)
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma, warpgroup_mma, warpgroup_mma_wait

from .chunks import pass_over
from .parts import LN_2, ROWS, TICKETS, WARPS, Work, for_workers, make_ring, rescale, softmax_step, weights
from .terms import RAMP_GROUP, make_ramp, masked, own_of, scored, with_sink

# Kernel arguments that never enter a compile key: one kernel serves every length, window and number of heads.
LENGTHS = ("heads_q", "group", "seqlen_q", "seqlen_k", "q_start", "upper", "lower", "m_blocks", "heads_total", "heads_together")
LENGTHS += ("table_batch", "table_head", "table_width")


@gluon.jit
def _load_tile(index, turn, step, work, group, q_desc, k_desc, v_desc, q_ring, k_ring, v_ring):
    """Producer: fill the rings for tile ``index``. Returns the next tile, in DYNAMIC order, and the ring step after this one.

    The next tile is taken late: one taken at the start of a long tile would wait for its end.
    """
    batch, head, start_m, lo, hi = work.locate(index)
    for c in gl.static_range(work.CONSUMERS):
        q_ring.fill(q_desc, batch, head, start_m + c * ROWS, turn * work.CONSUMERS + c, work.PACK)
    head_kv = head // group
    count = hi - lo
    own = own_of(work, batch, head, start_m, None, None)
    for j in range(count):
        start_n = work.tile(own, hi - 1 - j) * work.BLOCK_N
        k_ring.fill(k_desc, batch, head_kv, start_n, step)
        v_ring.fill(v_desc, batch, head_kv, start_n, step)
        step += 1
        if work.DYNAMIC:  # noqa: SIM102
            if j == max(count - 3, 0):
                index = work.issue(turn)
    return index, step


@gluon.jit
def _producer(work, group, q_desc, k_desc, v_desc, q_ring, k_ring, v_ring):
    step = 0
    turn = 0
    index = gl.program_id(0)
    if work.DYNAMIC:
        while index < work.total():
            index, step = _load_tile(index, turn, step, work, group, q_desc, k_desc, v_desc, q_ring, k_ring, v_ring)
            turn += 1
    else:
        _load_tile(index, turn, step, work, group, q_desc, k_desc, v_desc, q_ring, k_ring, v_ring)


@gluon.jit
def _scores(q, k, work, own, ramp, S_LAYOUT: gl.constexpr):
    """Issue q k^T, [ROWS, BLOCK_N], without waiting for it: a product for each chunk of q and k, and one for a RAMP."""
    s = gl.zeros([ROWS, k[0].type.shape[0]], gl.float32, S_LAYOUT)
    for c in gl.static_range(len(k)):
        s = warpgroup_mma(q[c], k[c].permute((1, 0)), s, use_acc=c > 0, is_async=True)
    if work.RAMP:
        s = warpgroup_mma(own.steep, ramp.permute((1, 0)), s, is_async=True)
    return s


@gluon.jit
def _add_product(p, v, acc):
    """Issue acc + p v, a tuple of [ROWS, columns] with a product for each chunk of v, without waiting for it."""
    out = ()
    for c in gl.static_range(len(v)):
        out = out + (warpgroup_mma(p, v[c], acc[c], is_async=True),)
    return out


@gluon.jit
def _wait_for_products(p, acc):
    """``(p, acc)`` once all products are made; p is an operand of the last and is kept until then."""
    done = warpgroup_mma_wait(0, deps=(p,) + acc)
    return done[0], done[1:]


@gluon.jit
def _rescale_all(acc, alpha):
    out = ()
    for c in gl.static_range(len(acc)):
        out = out + (rescale(acc[c], alpha),)
    return out


@gluon.jit
def _overlapped_step(
    p, acc, m_i, l_i, step, q, k_ring, v_ring, work, own, ramp, place, start_row, free_lo, free_hi, qk_scale2,
    S_LAYOUT: gl.constexpr, P_LAYOUT: gl.constexpr,
):  # fmt: skip
    """Scores of the key tile at ``place`` (ring step + 1) above the pending product of p and the values of ring step ``step``."""
    WEIGHTS: gl.constexpr = work.FIXED or work.LEAN  # what is masked
    n_block = work.tile(own, place)
    s = _scores(q, k_ring.take_chunks(step + 1), work, own, ramp, S_LAYOUT)
    acc = _add_product(p, v_ring.take_chunks(step), acc)
    s = warpgroup_mma_wait(v_ring.CHUNKS, deps=(s,))
    k_ring.release(step + 1)
    s, scale, shift = scored(s, work, own, n_block, start_row, qk_scale2)
    if work.LEAN:  # above the mask: exp2 runs under the product of the last tile
        s = weights(s, m_i, scale, shift, True)
    s = masked(s, work, own, place, n_block, start_row, free_lo, free_hi, WEIGHTS)
    p_next, alpha, m_i, l_i = softmax_step(s, m_i, l_i, scale, shift, False, work.HASTY, WEIGHTS, work.LEAN)
    p, acc = _wait_for_products(p, acc)
    v_ring.release(step)
    p = gl.convert_layout(p_next.to(p.dtype), P_LAYOUT)
    if not work.HASTY:
        acc = _rescale_all(acc, alpha)
    return p, acc, m_i, l_i, step + 1


@gluon.jit
def _serial_step(
    acc, m_i, l_i, step, q, k_ring, v_ring, work, own, ramp, place, start_row, free_lo, free_hi, qk_scale2,
    S_LAYOUT: gl.constexpr, P_LAYOUT: gl.constexpr,
):  # fmt: skip
    """Scores, softmax and product of the key tile at ``place`` (ring step ``step``) in turn: the other consumers overlap."""
    n_block = work.tile(own, place)
    s = warpgroup_mma_wait(0, deps=(_scores(q, k_ring.take_chunks(step), work, own, ramp, S_LAYOUT),))
    k_ring.release(step)
    s, scale, shift = scored(s, work, own, n_block, start_row, qk_scale2)
    s = masked(s, work, own, place, n_block, start_row, free_lo, free_hi, work.FIXED)
    p, alpha, m_i, l_i = softmax_step(s, m_i, l_i, scale, shift, False, work.HASTY, work.FIXED, work.LEAN)
    if not work.HASTY:
        acc = _rescale_all(acc, alpha)
    acc, step = _add_values(gl.convert_layout(p.to(q[0].dtype), P_LAYOUT), acc, step, v_ring)
    return acc, m_i, l_i, step


@gluon.jit
def _add_values(p, acc, step, v_ring):
    """acc + p v for the values of ring step ``step``, which is done with then."""
    acc = _add_product(p, v_ring.take_chunks(step), acc)
    p, acc = _wait_for_products(p, acc)
    v_ring.release(step)
    return acc, step + 1


@gluon.jit
def _finish(
    acc, m_i, l_i, q, o_desc, lse_ptr, work, own, batch, head, start_row, S_LAYOUT: gl.constexpr, O_LAYOUT: gl.constexpr
):
    """Write o, through the consumer's tile of queries, and lse. A row that saw no key has l_i = 0: o = 0 and lse = -inf.

    A part of acc passes through the chunk of q that has its columns, or, if it is twice as wide, through two.
    """
    COLUMNS: gl.constexpr = o_desc.block_type.shape[-1]
    PACK: gl.constexpr = work.PACK
    HALVES: gl.constexpr = acc[0].shape[1] // COLUMNS
    l_own = gl.convert_layout(gl.sum(l_i, 1), gl.SliceLayout(1, S_LAYOUT))
    l_row = l_own
    rows = start_row + gl.arange(0, ROWS, gl.SliceLayout(1, S_LAYOUT))
    if work.RAMP or work.LEAN:  # what the scores of a row lack
        m_i = m_i - own.slope2 * (rows - start_row).to(gl.float32)
    if work.HAS_SINK:
        m_i, l_row, alpha = with_sink(m_i, l_own, work, batch, head, rows)
    l_safe = gl.where(l_row == 0.0, 1.0, l_row)
    inverse = alpha / l_safe if work.HAS_SINK else 1.0 / l_safe
    inverse = gl.convert_layout(inverse, gl.SliceLayout(1, O_LAYOUT))
    for c in gl.static_range(len(acc)):
        o = acc[c] * inverse[:, None]
        if work.HASTY:
            work.doubt(o, l_own, start_row)
        if HALVES == 2:
            left, right = gl.split(o.to(o_desc.dtype).reshape([ROWS, 2, COLUMNS]).permute((0, 2, 1)))
            q[2 * c].store(left)
            q[2 * c + 1].store(right)
        else:
            q[c].store(o.to(o_desc.dtype))
    fence_async_shared()
    for c in gl.static_range(len(acc) * HALVES):
        if PACK == 1:
            tma.async_store(o_desc, [batch, head, start_row, c * COLUMNS], q[c].reshape([1, 1, ROWS, COLUMNS]))
        else:
            box = q[c].reshape([1, 1, ROWS // PACK, PACK, COLUMNS])
            tma.async_store(o_desc, [batch, head, start_row // PACK, 0, c * COLUMNS], box)
    lse = gl.where(l_row == 0.0, -float("inf"), (m_i + gl.log2(l_safe)) * LN_2)
    head_rows = (batch * work.heads_q + head).to(gl.int64) * work.seqlen_q
    places = rows if PACK == 1 else rows % PACK * (work.seqlen_q // PACK) + rows // PACK
    gl.store(lse_ptr + head_rows + places, lse, mask=rows < work.seqlen_q)
    tma.store_wait(0)


@gluon.jit
def _attend(index, turn, step, C: gl.constexpr, work, o_desc, lse_ptr, qk_scale2, q_ring, k_ring, v_ring, ramp):
    """Consumer ``C``: its 64 rows of tile ``index``. Returns the ring step after the tile."""
    COLUMNS: gl.constexpr = v_ring.tiles.type.shape[2]
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, work.BLOCK_N, 16])
    O_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, COLUMNS, 16])
    P_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, O_LAYOUT, 2)
    batch, head, start_m, lo, hi = work.locate(index)
    start_row = start_m + C * ROWS
    own_lo, free_lo, free_hi, own_hi = work.own(batch, head, start_row, lo, hi)
    own = own_of(work, batch, head, start_row, qk_scale2, S_LAYOUT)
    q = q_ring.take_chunks(turn * work.CONSUMERS + C)
    step = pass_over(hi - own_hi, step, k_ring, v_ring)

    # The first key tile: nothing to rescale yet.
    n_block = work.tile(own, own_hi - 1)
    s = warpgroup_mma_wait(0, deps=(_scores(q, k_ring.take_chunks(step), work, own, ramp, S_LAYOUT),))
    k_ring.release(step)
    s, scale, shift = scored(s, work, own, n_block, start_row, qk_scale2)
    s = masked(s, work, own, own_hi - 1, n_block, start_row, free_lo, free_hi, work.FIXED)
    p, _, m_i, l_i = softmax_step(s, None, None, scale, shift, True, work.HASTY, work.FIXED, work.LEAN)
    p = gl.convert_layout(p.to(o_desc.dtype), P_LAYOUT)
    acc = (gl.zeros([ROWS, COLUMNS], gl.float32, O_LAYOUT),) * v_ring.CHUNKS

    if work.OVERLAP:
        for j in range(1, own_hi - own_lo):
            p, acc, m_i, l_i, step = _overlapped_step(
                p, acc, m_i, l_i, step, q, k_ring, v_ring, work, own, ramp, own_hi - 1 - j, start_row, free_lo, free_hi, qk_scale2,
                S_LAYOUT, P_LAYOUT,
            )  # fmt: skip
        acc, step = _add_values(p, acc, step, v_ring)
    else:
        acc, step = _add_values(p, acc, step, v_ring)
        for j in range(1, own_hi - own_lo):
            acc, m_i, l_i, step = _serial_step(
                acc, m_i, l_i, step, q, k_ring, v_ring, work, own, ramp, own_hi - 1 - j, start_row, free_lo, free_hi, qk_scale2,
                S_LAYOUT, P_LAYOUT,
            )  # fmt: skip

    step = pass_over(own_lo - lo, step, k_ring, v_ring)
    _finish(acc, m_i, l_i, q, o_desc, lse_ptr, work, own, batch, head, start_row, S_LAYOUT, O_LAYOUT)
    q_ring.give_back(turn * work.CONSUMERS + C)
    return step


@gluon.jit
def _consumer(C: gl.constexpr, work, o_desc, lse_ptr, qk_scale2, q_ring, k_ring, v_ring, ramp):
    step = 0
    turn = 0
    index = gl.program_id(0)
    if work.DYNAMIC:
        while index < work.total():
            step = _attend(index, turn, step, C, work, o_desc, lse_ptr, qk_scale2, q_ring, k_ring, v_ring, ramp)
            index = work.following(turn)
            turn += 1
    else:
        _attend(index, turn, step, C, work, o_desc, lse_ptr, qk_scale2, q_ring, k_ring, v_ring, ramp)


@gluon.jit(do_not_specialize=LENGTHS)
def _fwd_kernel(
    q_desc, k_desc, v_desc, o_desc, lse_ptr, counter, qk_scale2,
    heads_q, group, seqlen_q, seqlen_k, q_start, upper, lower, m_blocks, heads_total, heads_together,
    terms, table_batch, table_head, table_width,
    HAS_UPPER: gl.constexpr, HAS_LOWER: gl.constexpr, HAS_TAIL: gl.constexpr, SCALED_FIRST: gl.constexpr, LONGEST: gl.constexpr,
    HEAD_DIM: gl.constexpr, HEAD_DIM_V: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
    Q_SLOTS: gl.constexpr, OVERLAP: gl.constexpr, DYNAMIC: gl.constexpr, HASTY: gl.constexpr, REDO: gl.constexpr,
    PACK: gl.constexpr, CONSUMER_REGISTERS: gl.constexpr, PRODUCER_REGISTERS: gl.constexpr,
    STEPS: gl.constexpr, RAMP: gl.constexpr, HAS_SINK: gl.constexpr, LISTED: gl.constexpr, FIXED: gl.constexpr,
    LEAN: gl.constexpr,
):  # fmt: skip
    CONSUMERS: gl.constexpr = BLOCK_M // ROWS
    MASKED: gl.constexpr = HAS_UPPER or HAS_LOWER or HAS_TAIL or LISTED
    q_ring = make_ring(q_desc, ROWS, HEAD_DIM, Q_SLOTS * CONSUMERS, 1)
    k_ring = make_ring(k_desc, BLOCK_N, HEAD_DIM, STAGES, CONSUMERS * WARPS)
    v_ring = make_ring(v_desc, BLOCK_N, HEAD_DIM_V, STAGES, CONSUMERS * WARPS)
    ticket = gl.allocate_shared_memory(gl.int32, [TICKETS, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    issued = gl.allocate_shared_memory(gl.int64, [TICKETS, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(TICKETS):
        mbarrier.init(issued.index(i), count=1)
    if REDO:  # the flag is read once, before the partitions go their own ways: 0 or 1
        heads_total = heads_total * gl.load(counter + 1)
    work = Work(
        counter, m_blocks, heads_total, heads_together, heads_q, seqlen_q, seqlen_k, q_start, upper, lower, ticket, issued,
        BLOCK_M, BLOCK_N, HEAD_DIM, CONSUMERS, HAS_UPPER, HAS_LOWER, MASKED, SCALED_FIRST, OVERLAP, LONGEST, DYNAMIC, HASTY, REDO,
        PACK, terms, table_batch, table_head, table_width, STEPS, RAMP, HAS_SINK, LISTED, FIXED, False, LEAN,
    )  # fmt: skip
    if RAMP:
        ramp = make_ramp(BLOCK_N, RAMP_GROUP)
        fence_async_shared()
    else:
        ramp = issued
    gl.static_assert(CONSUMERS >= 2 and CONSUMERS <= 4, "a program has two to four consumers")
    gl.warp_specialize(
        [
            (_consumer, (0, work, o_desc, lse_ptr, qk_scale2, q_ring, k_ring, v_ring, ramp)),
            (_consumer, (1, work, o_desc, lse_ptr, qk_scale2, q_ring, k_ring, v_ring, ramp)),
            (_consumer, (2, work, o_desc, lse_ptr, qk_scale2, q_ring, k_ring, v_ring, ramp)),
            (_consumer, (3, work, o_desc, lse_ptr, qk_scale2, q_ring, k_ring, v_ring, ramp)),
        ][:CONSUMERS]
        + [(_producer, (work, group, q_desc, k_desc, v_desc, q_ring, k_ring, v_ring))],
        for_workers(CONSUMERS, WARPS, 1),
        for_workers(CONSUMERS, CONSUMER_REGISTERS, PRODUCER_REGISTERS),
    )
