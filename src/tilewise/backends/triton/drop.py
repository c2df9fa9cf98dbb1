"""Dropout in Triton kernels: which weights of a tile are kept. The rule is that of ``keep.py``, bit for bit.

``drop`` is None without dropout, or holds ``(seeds, stride, number, limit, scale)``: the seed of each batch entry, how far behind
it its number lies (0: its number is its place), ``limit`` as an int32 of the same bits. All but the pointer are run-time numbers,
so that one kernel serves every probability.
"""

import triton
import triton.language as tl

from ...keep import ROUNDS as _ROUNDS

ROUNDS: tl.constexpr = tl.constexpr(_ROUNDS)
MULTIPLY_A: tl.constexpr = tl.constexpr(0xD2511F53)
MULTIPLY_B: tl.constexpr = tl.constexpr(0xCD9E8D57)
RAISE_A: tl.constexpr = tl.constexpr(0x9E3779B9)
RAISE_B: tl.constexpr = tl.constexpr(0xBB67AE85)


@triton.jit
def drop_terms(drop, batch):
    """``(seed, number of the batch entry, limit)`` of a program."""
    at = drop[0] + batch.to(tl.int64) * drop[1]
    number = tl.where(tl.cast(drop[2], tl.int32) == 0, batch, tl.load(at + drop[2]).to(tl.int32))
    return tl.load(at), number, tl.cast(drop[3], tl.int32)


@triton.jit
def wide_product(x, by):
    """``(high, low)`` 32 bits of the product: one instruction, which the compiler does not always find in two."""
    product = x.to(tl.uint64) * by
    return (product >> 32).to(tl.uint32), product.to(tl.uint32)


@triton.jit
def philox(seed, c0, c1, c2, c3):
    """The four words of these counters (``keep.philox``)."""
    k0 = seed.to(tl.uint32)
    k1 = (seed >> 32).to(tl.uint32)
    c0 = c0.to(tl.uint32, bitcast=True)
    c1 = c1.to(tl.uint32, bitcast=True)
    c2 = c2.to(tl.uint32, bitcast=True)
    c3 = c3.to(tl.uint32, bitcast=True)
    for _ in tl.static_range(ROUNDS):
        high_a, low_a = wide_product(c0, MULTIPLY_A)
        high_b, low_b = wide_product(c2, MULTIPLY_B)
        c0 = high_b ^ c1 ^ k0
        c2 = high_a ^ c3 ^ k1
        c1 = low_b
        c3 = low_a
        k0 = tl.add(k0, RAISE_A, sanitize_overflow=False)
        k1 = tl.add(k1, RAISE_B, sanitize_overflow=False)
    return c0, c1, c2, c3


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
    w0, w1, w2, w3 = philox(
        of_batch[0], tl.cast(start_m, tl.int32) + (rows & ~8), tl.cast(start_n, tl.int32) + (keys & ~8), head, of_batch[1]
    )
    low = tl.where((keys & 8) == 0, w0, w1)
    high = tl.where((keys & 8) == 0, w2, w3)
    return tl.where((rows & 8) == 0, low, high) < of_batch[2].to(tl.uint32, bitcast=True)
