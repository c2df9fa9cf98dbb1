"""``dq`` added up in memory: the third warpgroup of the fastest backward kernel.

Each tile of keys adds its ``ds k`` [BLOCK_M queries, HEAD_DIM] to a float32 copy of dq. The adds of different programs come in any
order, so the last bits of dq may differ between runs.

The copy is kept in the order in which a warpgroup holds an accumulator: 64 rows by WIDTH columns at a time, and in these for every
8 columns the 4 numbers of each thread. So one vector instruction of a warp adds 512 bytes that lie side by side. ``dq_kernel``
(``bwd_rows.py``) puts them in their places.

Half of the slices go out by vector instructions, half through shared memory by bulk reduce-add, which runs by itself: either road
alone is slower than both together.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait

from .bwd_parts import feed, first_tiles
from .parts import ROWS, arrive_warp, wait

WIDTH = gl.constexpr(64)  # columns of a slice


@gluon.constexpr_function
def _add_text(outputs, inputs):
    x, base = inputs
    lines = [
        "{ .reg .u32 t; .reg .u64 a; mov.u32 t, %tid.x; and.b32 t, t, 127; shl.b32 t, t, 4; cvt.u64.u32 a, t;"
        f"add.u64 a, a, {base[0]};"
    ]
    for i in range(0, len(x), 4):
        four = ", ".join(x[i : i + 4])
        lines.append(f"red.relaxed.gpu.global.add.v4.f32 [a+{i * 512}], {{{four}}};")
    return "\n".join(lines) + "}"


@gluon.constexpr_function
def _stage_text(outputs, inputs):
    x, base = inputs
    lines = ["{ .reg .u32 t; mov.u32 t, %tid.x; and.b32 t, t, 127; shl.b32 t, t, 4; add.u32 t, t, " + base[0] + ";"]
    for i in range(0, len(x), 4):
        lines.append(f"st.shared.v4.f32 [t+{i * 512}], {{{', '.join(x[i : i + 4])}}};")
    return "\n".join(lines) + "fence.proxy.async.shared::cta; }"


@gluon.jit
def _add_from_registers(dq_ptr, slice_index, x):
    gl.inline_asm(_add_text, ("f", "l"), [x, dq_ptr + slice_index.to(gl.int64) * (ROWS * WIDTH)])


@gluon.jit
def _bulk_wait():
    """Until the bulk copies of the first thread have read their shared memory."""
    gl.inline_asm(
        "{ .reg .pred p; .reg .u32 t; mov.u32 t, %tid.x; and.b32 t, t, 127; setp.eq.u32 p, t, 0;"
        "@p cp.async.bulk.wait_group.read 0; }",
        "~{memory}",
    )


@gluon.jit
def _meet():
    """The 128 threads of the adder meet."""
    gl.inline_asm("bar.sync 12, 128;", "~{memory}")


@gluon.jit
def _add_in_bulk(dq_ptr, slice_index, x, stage):
    _bulk_wait()
    _meet()
    gl.inline_asm(_stage_text, ("f", "r"), [x, stage])
    _meet()
    gl.inline_asm(
        "{ .reg .pred p; .reg .u32 t; mov.u32 t, %tid.x; and.b32 t, t, 127; setp.eq.u32 p, t, 0;"
        "@p cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [$0], [$1], $2; @p cp.async.bulk.commit_group; }",
        "l,r,r,~{memory}",
        [dq_ptr + slice_index.to(gl.int64) * (ROWS * WIDTH), stage, ROWS * WIDTH * 4],
    )


@gluon.jit
def _feed_both(step, lo, count, keys, batch, head_kv, q_desc, do_desc, lse2_desc, delta_desc, q_ring, do_ring):
    member = step // count
    head = head_kv * keys.group + member
    m_block = lo + step - member * count
    feed(q_ring, q_desc, lse2_desc, keys, batch, head, m_block, step)
    feed(do_ring, do_desc, delta_desc, keys, batch, head, m_block, step)


@gluon.jit
def adder(
    keys, k_desc, v_desc, q_desc, do_desc, lse2_desc, delta_desc, k_tiles, v_tiles, kv_full, q_ring, do_ring, ds_ring, dq_ptr, stage
):
    """Feeder and adder in one: copies tiles in as slots come free, and adds ds k of each tile to memory."""
    DQ_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, WIDTH, 16])
    SLICES: gl.constexpr = keys.HEAD_DIM // WIDTH
    PIECES: gl.constexpr = keys.BLOCK_M // ROWS
    batch, head_kv, start_n = keys.place()
    lo, hi = keys.tiles(start_n)
    count = hi - lo
    first_tiles(k_desc, batch, head_kv, start_n, k_tiles, kv_full.index(0))
    first_tiles(v_desc, batch, head_kv, start_n, v_tiles, kv_full.index(1))
    total = count * keys.group
    for step in range(min(q_ring.SLOTS, total)):
        _feed_both(step, lo, count, keys, batch, head_kv, q_desc, do_desc, lse2_desc, delta_desc, q_ring, do_ring)
    wait(kv_full.index(0), 0)
    for step in range(total):
        member = step // count
        head_index = (batch * keys.heads_kv + head_kv) * keys.group + member
        tile = head_index * (keys.q_pad // keys.BLOCK_M) + lo + step - member * count
        slot = step % ds_ring.SLOTS
        wait(ds_ring.full.index(slot), (step // ds_ring.SLOTS) & 1)
        for piece in gl.static_range(PIECES):
            for part in gl.static_range(SLICES):
                zeros = gl.zeros([ROWS, WIDTH], gl.float32, DQ_LAYOUT)
                first = ds_ring.tiles.index(slot * 2).slice(piece * ROWS, ROWS, dim=1)
                second = ds_ring.tiles.index(slot * 2 + 1).slice(piece * ROWS, ROWS, dim=1)
                k_first = k_tiles.index(0).slice(part * WIDTH, WIDTH, dim=1)
                k_second = k_tiles.index(1).slice(part * WIDTH, WIDTH, dim=1)
                x = warpgroup_mma(first.permute((1, 0)), k_first, zeros, use_acc=False, is_async=True)
                x = warpgroup_mma(second.permute((1, 0)), k_second, x, is_async=True)
                x = warpgroup_mma_wait(0, deps=(x,))
                if piece == PIECES - 1 and part == SLICES - 1:
                    arrive_warp(ds_ring.empty.index(slot))
                slice_index = (tile * PIECES + piece) * SLICES + part
                if (piece + part) % 2 == 0:
                    _add_in_bulk(dq_ptr, slice_index, x, stage)
                else:
                    _add_from_registers(dq_ptr, slice_index, x)
                    # Complete long ago: a place that the next product cannot be moved above, or two slices would be alive.
                    wait(kv_full.index(0), 0)
        if step + q_ring.SLOTS < total:
            _feed_both(step + q_ring.SLOTS, lo, count, keys, batch, head_kv, q_desc, do_desc, lse2_desc, delta_desc, q_ring, do_ring)
    _bulk_wait()
    # Two partitions that end alike would be merged, and the register counts of both be lost.
    gl.inline_asm("// the adder ends", "~{memory}")
