"""The named parts of the Hopper kernels that hold keys: what a program has to do, its feeder, scores, weights and the mask."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma

from .. import walk
from .chunks import inner
from .parts import ROWS, _shared, allowed, order
from .terms import Own, exponents, seen, slope_of, steep_keys

# Kernel arguments that never enter a compile key.
LENGTHS = ("heads_kv", "group", "q_pad", "seqlen_k", "q_start", "upper", "lower", "n_blocks", "heads_total", "heads_together")
LENGTHS += ("head_first", "seqlen_q", "table_batch", "table_head", "table_width")

queries_of_program = _shared(walk.queries_of_program)
queries_of_consumer = _shared(walk.queries_of_consumer)


@gluon.jit
def program():
    """The number of this program. Opaque, so that what follows from it is worked out again instead of kept in registers."""
    return gl.inline_asm("mov.u32 $0, %ctaid.x;", "=r", [], gl.int32)


@gluon.jit
def publish(barrier):
    """One arrival from each warp, after all that its lanes have written."""
    gl.inline_asm(
        "{ .reg .pred p; bar.warp.sync 0xffffffff; elect.sync _|p, 0xffffffff; @p mbarrier.arrive.shared::cta.b64 _, [$0]; }",
        "r,~{memory}",
        [barrier],
    )


@gluon.aggregate
class Keys:
    """What a launch over tiles of keys has to do, as each partition sees it."""

    n_blocks: gl.tensor
    heads_total: gl.tensor  # of keys, in this launch
    heads_together: gl.tensor
    head_first: gl.tensor  # of this launch
    heads_kv: gl.tensor
    group: gl.tensor
    q_pad: gl.tensor  # seqlen_q rounded up to whole tiles
    seqlen_k: gl.tensor
    q_start: gl.tensor
    upper: gl.tensor
    lower: gl.tensor
    BLOCK_M: gl.constexpr
    BLOCK_N: gl.constexpr
    HEAD_DIM: gl.constexpr
    HAS_UPPER: gl.constexpr
    HAS_LOWER: gl.constexpr
    HAS_TAIL: gl.constexpr  # the last tile of keys is not full
    LONGEST: gl.constexpr
    NEED_DK: gl.constexpr
    NEED_DV: gl.constexpr
    KEEPS: gl.constexpr  # ds goes to memory too
    seqlen_q: object  # LISTED
    terms: object  # of the spec besides bounds: ``terms.py``
    table_batch: object  # LISTED: ``BlockTable.steps``
    table_head: object
    table_width: object
    STEPS: object
    CAPPED: gl.constexpr  # a step is a softcap
    RAMP: gl.constexpr
    LISTED: gl.constexpr  # a list for each query head says which tiles of queries the keys of a program visit
    FAST: gl.constexpr  # ``terms.capped_with_slope``
    AGAIN: gl.constexpr  # the keys of a consumer are ``Rows``, not a tuple of parts

    @gluon.jit
    def place(self):
        """``(batch, head_kv, first key)`` of this program."""
        return self.place_of(program())

    @gluon.jit
    def place_of(self, index):
        """The same of a place in the order of work."""
        head_index, n_block = order(index, self.n_blocks, self.heads_total, self.heads_together, self.LONGEST)
        head_index += self.head_first
        batch = head_index // self.heads_kv
        return batch, head_index - batch * self.heads_kv, n_block * self.BLOCK_N

    @gluon.jit
    def tiles(self, start_n):
        """The tiles of queries that are streamed past this program's keys, for each head of the group."""
        return queries_of_program(
            start_n, min(start_n + self.BLOCK_N, self.seqlen_k), self.q_pad, self.q_start, self.upper, self.lower,
            self.BLOCK_M, self.HAS_UPPER, self.HAS_LOWER,
        )  # fmt: skip

    @gluon.jit
    def listed(self, batch, head, start_n):
        """LISTED: ``(the list, how many of its tiles are free, how many are visited)``: at least one, which the mask hides if need
        be."""
        at = (batch * self.table_batch + head * self.table_head + start_n // self.BLOCK_N).to(gl.int64)
        free = gl.load(self.terms[4][0] + at * 2)
        count = max(free + gl.load(self.terms[4][0] + at * 2 + 1), 1)
        return self.terms[4][1] + at * self.table_width, free, count

    @gluon.jit
    def tile(self, own, place):
        """The tile of queries at this place."""
        if self.LISTED:
            return gl.load(own.tiles + place)
        else:
            return place

    @gluon.jit
    def rows_head(self, batch, head):
        """A query head, counted over the batch."""
        return batch * self.heads_kv * self.group + head

    @gluon.jit
    def head(self, batch, head, tiles, qk_scale2, S_LAYOUT: gl.constexpr):
        """What the terms say of a query head; ``tiles``: its list."""
        slope2 = None
        steep = None
        if self.terms is not None:  # noqa: SIM102
            if self.terms[1] is not None:
                slope2 = slope_of(self.terms, batch, head)
                if self.RAMP:
                    steep = steep_keys(slope2 / qk_scale2, S_LAYOUT)
        return Own(batch, head, slope2, steep, tiles)

    @gluon.jit
    def own(self, key_row, lo, hi):
        """``(own_lo, free_lo, free_hi, own_hi)`` of the consumer whose keys begin at ``key_row``."""
        return queries_of_consumer(
            key_row, key_row + ROWS, lo, hi, self.seqlen_k, self.q_pad, self.q_start, self.upper, self.lower,
            self.BLOCK_M, self.HAS_UPPER, self.HAS_LOWER,
        )  # fmt: skip


@gluon.jit
def rows_of(ring, step, S_LAYOUT: gl.constexpr):
    """The numbers of the rows of this step's tile, one for each column of a tile of scores."""
    rows = ring.rows.index(step % ring.SLOTS)
    return rows.reshape([rows.type.shape[1]]).load(gl.SliceLayout(0, S_LAYOUT))


@gluon.jit
def scores(k, q, zeros, keys, own, ramp):
    """Issue k q^T, [ROWS, BLOCK_M], without waiting for it."""
    if keys.AGAIN:
        k = k.parts()
    s = inner(k, q, zeros, True)
    if keys.RAMP:
        s = warpgroup_mma(own.steep, ramp.permute((1, 0)), s, is_async=True)
    return s


@gluon.jit
def weights(s, ring, step, keys, own, place, key_row, qk_scale2, MASKED: gl.constexpr):
    """``(p^T, derivative of a softcap, tile of queries)`` of products s [ROWS keys, BLOCK_M queries]; 1 without a softcap."""
    lse2 = rows_of(ring, step, s.type.layout)
    m_block = place
    if MASKED or len(keys.STEPS) > 0 or not keys.LISTED:
        m_block = keys.tile(own, place)
    first_query = keys.q_start + m_block * keys.BLOCK_M
    if keys.RAMP:
        lse2 = lse2 - own.slope2 * (key_row + ROWS // 2 - first_query - keys.BLOCK_M // 2).to(gl.float32)
    x, slope = exponents(s, lse2[None, :], keys, own.slope2, key_row, first_query, qk_scale2)
    p = gl.exp2(x)
    if MASKED:
        p = hidden(p, keys, own, m_block, key_row)
    return p, slope, m_block


@gluon.jit
def hidden(p, keys, own, m_block, key_row, POSITIONS: gl.constexpr = False):
    """p^T [ROWS keys, BLOCK_M queries] with 0 where a query may not see a key; columns as in ``terms.masked``.

    What is compared are positions, or what the compiler spills fewer registers for: numbers counted from what lies left of a
    thread's columns, less the bound. Then columns are numbers that are known beforehand for each register. Positions of columns
    would be kept in registers from one tile to the next; beside a bias, at head_dim 96 and with two bounds they are not.
    """
    x = p.reshape([ROWS, keys.BLOCK_M // 8, 4, 2])
    L: gl.constexpr = x.type.layout
    row = gl.arange(0, ROWS, gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(3, L))))
    eight = gl.arange(0, keys.BLOCK_M // 8, gl.SliceLayout(0, gl.SliceLayout(2, gl.SliceLayout(3, L))))
    quad = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(3, L))))
    pair = gl.arange(0, 2, gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, L))))
    left = keys.q_start + m_block * keys.BLOCK_M + (quad * 2)[None, None, :, None]
    column = eight[None, :, None, None] * 8 + pair[None, None, None, :]
    kv_pos = (key_row + row)[:, None, None, None]
    if keys.HAS_LOWER or POSITIONS:
        ok = allowed(left + column, kv_pos, keys.seqlen_k, keys.upper, keys.lower, keys.HAS_UPPER, keys.HAS_LOWER)
    else:
        shift = left + keys.upper
        ok = allowed(column, kv_pos - shift, keys.seqlen_k - shift, 0, 0, keys.HAS_UPPER, False)
    if keys.LISTED:
        queries = left + column - keys.q_start
        ok = seen(ok, keys.terms[3], own.batch, own.head, queries, kv_pos, keys.seqlen_q, keys.seqlen_k)
    return gl.convert_layout(gl.where(ok, x, 0.0).reshape([ROWS, keys.BLOCK_M]), p.type.layout, assert_trivial=True)


@gluon.constexpr_function
def _pack_text(outputs, inputs, kind):
    elements, words = outputs
    (p,) = inputs
    return "{" + "\n".join(
        f"cvt.rn.{kind}x2.f32 {w}, {p[2 * i + 1]}, {p[2 * i]}; mov.b32 {{{elements[2 * i]}, {elements[2 * i + 1]}}}, {w};"
        for i, w in enumerate(words)
    ) + "}"  # fmt: skip


@gluon.constexpr_function
def _pack_bf16(outputs, inputs):
    return _pack_text(outputs, inputs, "bf16")


@gluon.constexpr_function
def _pack_fp16(outputs, inputs):
    return _pack_text(outputs, inputs, "f16")


@gluon.constexpr_function
def _product_text(outputs, inputs, kind, low, high):
    (elements,) = outputs
    words, x = inputs
    lines = ["{ .reg .b32 r; .reg .b16 l, h; .reg .f32 a, b;"]
    for i, w in enumerate(words):
        lines.append(f"{low.format(w)} {high.format(w)}")
        lines.append(f"mul.f32 a, a, {x[2 * i]}; mul.f32 b, b, {x[2 * i + 1]}; cvt.rn.{kind}x2.f32 r, b, a;")
        lines.append(f"mov.b32 {{{elements[2 * i]}, {elements[2 * i + 1]}}}, r;")
    return "\n".join(lines) + "}"


@gluon.constexpr_function
def _product_bf16(outputs, inputs):
    return _product_text(outputs, inputs, "bf16", "shl.b32 r, {0}, 16; mov.b32 a, r;", "and.b32 r, {0}, 0xffff0000; mov.b32 b, r;")


@gluon.constexpr_function
def _product_fp16(outputs, inputs):
    return _product_text(outputs, inputs, "f16", "mov.b32 {{l, h}}, {0}; cvt.f32.f16 a, l;", "cvt.f32.f16 b, h;")


@gluon.jit
def packed(p, dtype: gl.constexpr):
    """``(p in the dtype of the inputs, the same packed two to a word)``: the first for a product now, the second for one later."""
    L: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, p.shape[1] // 2, 16])
    WORDS: gl.constexpr = gl.distributed_type(gl.int32, [p.shape[0], p.shape[1] // 2], L)
    TEXT: gl.constexpr = _pack_bf16 if dtype == gl.bfloat16 else _pack_fp16
    return gl.inline_asm(TEXT, ("=&h", "=&r", "f"), [p], [p.type.with_element_ty(dtype), WORDS], is_pure=True)


@gluon.jit
def product_with(words, dp, dtype: gl.constexpr):
    """ds = p (dp - delta) in the dtype of the inputs, from the rounded and packed p: half as many registers are alive."""
    TEXT: gl.constexpr = _product_bf16 if dtype == gl.bfloat16 else _product_fp16
    return gl.inline_asm(TEXT, ("=&h", "r", "f"), [words, dp], dp.type.with_element_ty(dtype), is_pure=True)


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
def rounded(p, dtype: gl.constexpr):
    """p in the dtype of the inputs."""
    return packed(p, dtype)[0]


@gluon.jit
def feed_all(keys, k_desc, v_desc, q_desc, do_desc, lse2_desc, delta_desc, k_tiles, v_tiles, kv_full, q_ring, do_ring):
    """The feeder: this program's keys and values once, then every tile of queries of every head of the group."""
    batch, head_kv, start_n = keys.place()
    if not keys.LISTED:
        lo, hi = keys.tiles(start_n)
    k_tiles.load_all(k_desc, batch, head_kv, start_n, kv_full.index(0))
    v_tiles.load_all(v_desc, batch, head_kv, start_n, kv_full.index(1))
    step = 0
    for member in range(keys.group):
        head = head_kv * keys.group + member
        if keys.LISTED:
            tiles, free, hi = keys.listed(batch, head, start_n)
            own = Own(batch, head, None, None, tiles)
            lo = free * 0
        else:
            own = keys
        for place in range(lo, hi):
            row = keys.tile(own, place) * keys.BLOCK_M
            # In the order in which slots come free.
            do_ring.fill(do_desc, batch, head, row, step, delta_desc, keys.rows_head(batch, head))
            q_ring.fill(q_desc, batch, head, row, step, lse2_desc, keys.rows_head(batch, head))
            step += 1
