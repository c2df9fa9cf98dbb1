"""Dropout in Triton kernels: which weights of a tile are kept. The rule is that of ``keep.py``, bit for bit.

``drop`` is None without dropout, or holds ``(seeds, stride, numbers, limit, scale)``: the seed of each batch entry, and its number
(``numbers`` None: its place), ``limit`` as an int32 of the same bits. All but the pointers are run-time numbers, so that one kernel
serves every probability.
"""

import triton
import triton.language as tl

from ...keep import ROUNDS as _ROUNDS

ROUNDS: tl.constexpr = tl.constexpr(_ROUNDS)


@triton.jit
def drop_terms(drop, batch):
    """``(seed, number of the batch entry, limit)`` of a program, 0 if there is no dropout."""
    seed = 0
    number = 0
    limit = 0
    if drop is not None:
        at = batch.to(tl.int64) * drop[1]
        seed = tl.load(drop[0] + at)
        number = batch
        if drop[2] is not None:
            number = tl.load(drop[2] + at).to(tl.int32)
        limit = tl.cast(drop[3], tl.int32)
    return seed, number, limit


@triton.jit
def kept(of_batch, head, start_m, start_n, ROWS: tl.constexpr, KEYS: tl.constexpr, KEYS_FIRST: tl.constexpr):
    """True where a weight of the tile [ROWS, KEYS] ([KEYS, ROWS] if KEYS_FIRST) is kept.

    The tile begins at multiples of 16, so its counters are a start and an index without bit 3: four elements that lie in one thread
    have the same, and the compiler makes their four words once.
    """
    q_axis: tl.constexpr = 0 if KEYS_FIRST else 1
    k_axis: tl.constexpr = 1 if KEYS_FIRST else 0
    rows = tl.expand_dims(tl.arange(0, ROWS), q_axis)
    keys = tl.expand_dims(tl.arange(0, KEYS), k_axis)
    w0, w1, w2, w3 = tl.philox(
        of_batch[0], tl.cast(start_m, tl.int32) + (rows & ~8), tl.cast(start_n, tl.int32) + (keys & ~8), head, of_batch[1], ROUNDS
    )
    low = tl.where((keys & 8) == 0, w0, w1)
    high = tl.where((keys & 8) == 0, w2, w3)
    return tl.where((rows & 8) == 0, low, high) < of_batch[2].to(tl.uint32, bitcast=True)
