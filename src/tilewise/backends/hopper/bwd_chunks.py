"""Backward where head_dim is no power of two or head_dim_v is another: ``dk`` and ``dv`` of BLOCK_N keys of one head of keys.

The form of ``bwd.py``, with tiles in parts (``chunks.py``): dk and dv are tuples with an accumulator for each part. Formulas, rows,
masks and barriers are those of ``bwd.py``; there is one loop, in which free tiles branch around the mask. At 192/128 the
accumulators take 160 registers of a thread, so the product with p is waited for before ds is made.

Arrivals that complete a phase of each barrier, with C consumers of W = 4 warps:
    keys, values         full: 1 (bytes of all parts), once
    queries, gradients   full: 1 (bytes of all parts)   empty: C * W, each warp after its last read of the tile
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma_wait

from .bwd_parts import KeptDs, Keys, hidden, rows_of, weights
from .chunks import accumulator, inner, make_part_ring, make_tiles, outer, settled, swizzled, zeros_like
from .parts import ROWS, WARPS, wait

# Kernel arguments that never enter a compile key.
LENGTHS = ("heads_kv", "group", "q_pad", "seqlen_k", "q_start", "upper", "lower", "n_blocks", "heads_total", "heads_together")
LENGTHS += ("head_first", "seqlen_q", "table_batch", "table_head", "table_width")

_TIMES = "mul.f32 a, a, $2; mul.f32 b, b, $3;"
_TIMES_BF16 = "{ .reg .b32 r; .reg .f32 a, b; shl.b32 r, $1, 16; mov.b32 a, r; and.b32 r, $1, 0xffff0000; mov.b32 b, r; " + _TIMES
_TIMES_BF16 = gl.constexpr(_TIMES_BF16 + " cvt.rn.bf16x2.f32 $0, b, a; }")
_TIMES_FP16 = "{ .reg .b16 l, h; .reg .f32 a, b; mov.b32 {l, h}, $1; cvt.f32.f16 a, l; cvt.f32.f16 b, h; " + _TIMES
_TIMES_FP16 = gl.constexpr(_TIMES_FP16 + " cvt.rn.f16x2.f32 $0, b, a; }")


@gluon.jit
def times(p16, dp, dtype: gl.constexpr):
    """ds = p (dp - delta) in the dtype of the inputs, from the rounded p, two elements a register as its product has them."""
    if dtype == gl.bfloat16:
        return gl.inline_asm_elementwise(_TIMES_BF16, "=r,r,f,f", [p16, dp], dtype=gl.bfloat16, is_pure=True, pack=2)
    else:
        return gl.inline_asm_elementwise(_TIMES_FP16, "=r,r,f,f", [p16, dp], dtype=gl.float16, is_pure=True, pack=2)


@gluon.jit
def _step(
    s, dk, dv, step, more, keys, own, k, v, q_ring, do_ring, zeros, place, free_lo, free_hi, key_row, qk_scale2, kept,
    P_LAYOUT: gl.constexpr, DS_LAYOUT: gl.constexpr,
):  # fmt: skip
    """One tile of queries, whose scores are in ``s``. Issues the scores of the tile after it, if there is one (``more``)."""
    S_LAYOUT: gl.constexpr = s.type.layout
    DTYPE: gl.constexpr = k[0].dtype
    q = q_ring.parts(step)
    p, _, m_block = weights(s, q_ring, step, keys, own, place, key_row, qk_scale2, False)
    if keys.HAS_UPPER or keys.HAS_LOWER or keys.HAS_TAIL:  # noqa: SIM102
        if (place < free_lo) | (place >= free_hi):
            p = hidden(p, keys, own, m_block, key_row)
    p16 = p.to(DTYPE)
    do = do_ring.take(step)
    if keys.NEED_DV:
        p_operand = gl.convert_layout(p16, P_LAYOUT)
        dv = outer(p_operand, do, dv)
    if keys.NEED_DK:
        dp = inner(v, do, zeros + rows_of(do_ring, step, S_LAYOUT)[None, :], False)
    if keys.NEED_DV:
        # Before ds is made, so that p and ds never take registers both.
        p_operand, dv = settled(len(v) if keys.NEED_DK else 0, p_operand, dv)
    if keys.NEED_DK:
        dp = warpgroup_mma_wait(0, deps=(dp,))
    do_ring.release(step)
    if keys.NEED_DK:
        ds = times(p16, dp, DTYPE)
        ds_operand = gl.convert_layout(ds, DS_LAYOUT)
        dk = outer(ds_operand, q, dk)
    # The last one works on a slot that is being refilled, and nobody reads its scores.
    if more:
        q_ring.arrived(step + 1)
    s_next = inner(k, q_ring.parts(step + 1), zeros, True)
    if keys.KEEPS:
        kept.put(step, ds, m_block)
    if keys.NEED_DK:
        ds_operand, dk = settled(len(k), ds_operand, dk)
    q_ring.release(step)
    s = warpgroup_mma_wait(0, deps=(s_next,))
    return s, dk, dv, step + 1


@gluon.jit
def _pass_over(count, step, q_ring, do_ring):
    """Let ``count`` tiles go by that do not see this consumer's keys."""
    for _ in range(count):
        q_ring.arrived(step)
        q_ring.release(step)
        do_ring.arrived(step)
        do_ring.release(step)
        step += 1
    return step


@gluon.jit
def _consumer(
    C: gl.constexpr, keys, dk_desc, dv_desc, k_tiles, v_tiles, kv_full, q_ring, do_ring, qk_scale2, sm_scale, ds_desc, stages
):
    S_LAYOUT: gl.constexpr = accumulator(keys.BLOCK_M)
    k = k_tiles.parts(C)
    v = v_tiles.parts(C)
    dk = zeros_like(k)
    dv = zeros_like(v)
    P_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, dv[0].type.layout, 2)
    DS_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, dk[0].type.layout, 2)
    batch, head_kv, start_n = keys.place()
    key_row = start_n + C * ROWS
    lo, hi = keys.tiles(start_n)
    own_lo, free_lo, free_hi, own_hi = keys.own(key_row, lo, hi)
    zeros = gl.zeros([ROWS, keys.BLOCK_M], gl.float32, S_LAYOUT)
    step = 0
    wait(kv_full.index(0), 0)
    wait(kv_full.index(1), 0)
    for member in range(keys.group):
        if keys.KEEPS:
            head = (batch * keys.heads_kv + head_kv - keys.head_first) * keys.group + member
            kept = KeptDs(ds_desc, stages, head, key_row, C)
            # Tiles were passed over since the last copy, so this head may begin with the slot that it still reads.
            tma.store_wait(0)
        else:
            kept = key_row
        step = _pass_over(own_lo - lo, step, q_ring, do_ring)
        own = keys.head(batch, head_kv * keys.group + member, None, qk_scale2, S_LAYOUT)
        q_ring.arrived(step)
        s = warpgroup_mma_wait(0, deps=(inner(k, q_ring.parts(step), zeros, True),))
        for place in range(own_lo, own_hi):
            s, dk, dv, step = _step(
                s, dk, dv, step, place + 1 < own_hi, keys, own, k, v, q_ring, do_ring, zeros, place, free_lo, free_hi, key_row,
                qk_scale2, kept, P_LAYOUT, DS_LAYOUT,
            )  # fmt: skip
        step = _pass_over(hi - own_hi, step, q_ring, do_ring)
    # Worked out again rather than kept in registers.
    batch, head_kv, start_n = keys.place()
    if keys.NEED_DV:
        v_tiles.write(dv, 1.0, dv_desc, batch, head_kv, start_n + C * ROWS, C)
    if keys.NEED_DK:
        k_tiles.write(dk, sm_scale, dk_desc, batch, head_kv, start_n + C * ROWS, C)
    tma.store_wait(0)


@gluon.jit
def feed_parts(keys, k_desc, v_desc, q_desc, do_desc, lse2_desc, delta_desc, k_tiles, v_tiles, kv_full, q_ring, do_ring):
    """This program's keys and values once, then every tile of queries of every head of the group."""
    CONSUMERS: gl.constexpr = keys.BLOCK_N // ROWS
    batch, head_kv, start_n = keys.place()
    lo, hi = keys.tiles(start_n)
    mbarrier.expect(kv_full.index(0), CONSUMERS * k_tiles.BOXES * k_desc.block_type.nbytes)
    for c in gl.static_range(CONSUMERS):
        k_tiles.load(k_desc, batch, head_kv, start_n + c * ROWS, c, kv_full.index(0))
    mbarrier.expect(kv_full.index(1), CONSUMERS * v_tiles.BOXES * v_desc.block_type.nbytes)
    for c in gl.static_range(CONSUMERS):
        v_tiles.load(v_desc, batch, head_kv, start_n + c * ROWS, c, kv_full.index(1))
    step = 0
    for member in range(keys.group):
        head = head_kv * keys.group + member
        rows_head = batch * keys.heads_kv * keys.group + head
        for m_block in range(lo, hi):
            # In the order in which slots come free.
            do_ring.fill(do_desc, batch, head, m_block * keys.BLOCK_M, step, delta_desc, rows_head)
            q_ring.fill(q_desc, batch, head, m_block * keys.BLOCK_M, step, lse2_desc, rows_head)
            step += 1


@gluon.jit(do_not_specialize=LENGTHS)
def _dkdv_chunks_kernel(
    k_desc, v_desc, q_desc, do_desc, lse2_desc, delta_desc, dk_desc, dv_desc, ds_desc, qk_scale2, sm_scale,
    heads_kv, group, q_pad, seqlen_k, q_start, upper, lower, n_blocks, heads_total, heads_together, head_first, seqlen_q,
    terms, table_batch, table_head, table_width,
    HAS_UPPER: gl.constexpr, HAS_LOWER: gl.constexpr, HAS_TAIL: gl.constexpr, LONGEST: gl.constexpr,
    NEED_DK: gl.constexpr, NEED_DV: gl.constexpr, KEEPS: gl.constexpr,
    HEAD_DIM: gl.constexpr, HEAD_DIM_V: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
    CONSUMER_REGISTERS: gl.constexpr, FEEDER_REGISTERS: gl.constexpr,
    STEPS: gl.constexpr, CAPPED: gl.constexpr, RAMP: gl.constexpr, LISTED: gl.constexpr, FAST: gl.constexpr,
):  # fmt: skip
    CONSUMERS: gl.constexpr = BLOCK_N // ROWS
    k_tiles = make_tiles(k_desc, HEAD_DIM, ROWS, CONSUMERS)
    v_tiles = make_tiles(v_desc, HEAD_DIM_V, ROWS, CONSUMERS)
    q_ring = make_part_ring(q_desc, BLOCK_M, HEAD_DIM, STAGES, CONSUMERS * WARPS, True)
    do_ring = make_part_ring(do_desc, BLOCK_M, HEAD_DIM_V, STAGES, CONSUMERS * WARPS, True)
    kv_full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    mbarrier.init(kv_full.index(0), count=1)
    mbarrier.init(kv_full.index(1), count=1)
    keys = Keys(
        n_blocks, heads_total, heads_together, head_first, heads_kv, group, q_pad, seqlen_k, q_start, upper, lower,
        BLOCK_M, BLOCK_N, HEAD_DIM, HAS_UPPER, HAS_LOWER, HAS_TAIL, LONGEST, NEED_DK, NEED_DV, KEEPS,
        seqlen_q, terms, table_batch, table_head, table_width, STEPS, CAPPED, RAMP, LISTED, FAST,
    )  # fmt: skip
    if KEEPS:
        stages = gl.allocate_shared_memory(k_desc.dtype, [CONSUMERS * 2, ROWS, BLOCK_M], swizzled(BLOCK_M))
    else:
        stages = kv_full
    mine = (keys, dk_desc, dv_desc, k_tiles, v_tiles, kv_full, q_ring, do_ring, qk_scale2, sm_scale, ds_desc, stages)
    copies = (keys, k_desc, v_desc, q_desc, do_desc, lse2_desc, delta_desc, k_tiles, v_tiles, kv_full, q_ring, do_ring)
    gl.static_assert(len(STEPS) == 0 and not LISTED, "no terms besides bounds")
    gl.static_assert(CONSUMERS == 2, "a program has two consumers")
    gl.warp_specialize(
        [(_consumer, (0,) + mine), (_consumer, (1,) + mine), (feed_parts, copies)],
        [WARPS, 1],
        [CONSUMER_REGISTERS, FEEDER_REGISTERS],
    )
