"""Which weights a dropout keeps, and where its seeds come from.

The decision on a weight is made of the seed, the number of the batch entry, the query head, the query and the key, and of nothing
else: tiles, backends, devices, lengths and the number of batch entries have no say. It is 32 bits of Philox 4x32 with 7 rounds
(Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3": the fewest that pass BigCrush). The key of the generator is the
seed; its counter is

    (query without bit 3, key without bit 3, head, number of the batch entry)

and the bits are word ``2 (bit 3 of the query) + (bit 3 of the key)`` of the four that come out. These two bits of a tile of scores
lie in one thread of a GPU, whichever of queries and keys are the rows, so that no word is made for nothing.

A seed is one int64. Under ``torch.func.vmap`` a seed carries, for each entry of the folded batch, the number of this entry and how
many there are (``batching.py``): three int64 each.
"""

from __future__ import annotations

import torch

from .errors import InvalidInput
from .spec import Spec, Tensors

__all__ = ["ROUNDS", "chosen_rows", "kept", "limit_of", "philox", "scale_of", "seeded"]

ROUNDS = 7
_LOW = 0xFFFFFFFF
_MULTIPLY = (0xD2511F53, 0xCD9E8D57)
_RAISE = (0x9E3779B9, 0xBB67AE85)
# Weights decided at once: on a CPU what its cache holds, on others what fills them.
_PIECE = {"cpu": 1 << 18}
_LARGE_PIECE = 1 << 24


def limit_of(p: float) -> int:
    """A weight is kept if its 32 bits are below this."""
    return min(round((1.0 - p) * 2.0**32), _LOW)


def scale_of(p: float) -> float:
    """The factor of the weights that are kept."""
    return 1.0 / (1.0 - p) if limit_of(p) else 0.0


def philox(seed: torch.Tensor, *counter: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The four words (int64 of 32 bits) of these counters (int64 of 32 bits), in operations that every device has.

    A product of two numbers of 32 bits has 64: int64 holds them all, the sign bit among them.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = seed & _LOW, (seed >> 32) & _LOW
    for _ in range(ROUNDS):
        a, b = c0 * _MULTIPLY[0], c2 * _MULTIPLY[1]
        c0, c2 = ((b >> 32) ^ c1 ^ k0) & _LOW, ((a >> 32) ^ c3 ^ k1) & _LOW
        c1, c3 = b, a
        k0, k1 = (k0 + _RAISE[0]) & _LOW, (k1 + _RAISE[1]) & _LOW
    return c0, c1 & _LOW, c2, c3 & _LOW


def _keys_and_numbers(seed: torch.Tensor, batch: slice, heads: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Seed and number of each of (batch entries x heads), as columns."""
    size = batch.stop - batch.start
    own = (seed if seed.shape[0] > 1 else seed.expand(batch.stop, seed.shape[1]))[batch]
    numbers = own[:, 1] if seed.shape[1] > 1 else torch.arange(batch.start, batch.stop, device=seed.device)
    return tuple(t[:, None].expand(size, heads).reshape(-1, 1, 1) for t in (own[:, 0], numbers))  # type: ignore[return-value]


def _spread(first: int, last: int, device: torch.device) -> torch.Tensor:
    """The numbers without bit 3 of all groups of 16 that hold some of ``first .. last``."""
    blocks = torch.arange(first // 16, -(-last // 16), device=device)
    return (blocks[:, None] * 16 + torch.arange(8, device=device)).flatten()


def kept(seed: torch.Tensor, p: float, batch: slice, heads: torch.Tensor, queries: slice, keys: slice) -> torch.Tensor:
    """True where a weight is kept: (batch entries, heads, queries, keys).

    Args:
        seed: int64 (batch or 1, 1 or 3).
        p: the probability with which a weight is dropped.
        batch, queries, keys: from where to where, with a step of 1.
        heads: the query heads, int64, one dim.
    """
    device, limit = seed.device, limit_of(p)
    q, k = (_spread(s.start, s.stop, device) for s in (queries, keys))
    rows = heads.numel() * (batch.stop - batch.start)
    shape = (rows, len(q) // 8, 2, 8, len(k) // 8, 2, 8)
    out = torch.empty(shape, dtype=torch.bool, device=device)
    key, number = _keys_and_numbers(seed, batch, heads.numel())
    head = heads.repeat(batch.stop - batch.start).view(-1, 1, 1)
    piece = _PIECE.get(device.type, _LARGE_PIECE)
    several = max(1, piece // max(1, 4 * len(q) * len(k)))
    blocks = max(1, piece // max(1, 64 * len(k)))
    for row in range(0, rows, several):
        part = slice(row, row + several)
        for block in range(0, len(q) // 8, blocks):
            own = q[8 * block : 8 * (block + blocks), None]
            words = philox(key[part], own, k, head[part], number[part])
            for i, word in enumerate(words):
                into = out[part, block : block + blocks, i // 2, :, :, i % 2, :]
                torch.lt(word.view(into.shape), limit, out=into)
    whole = out.view(batch.stop - batch.start, heads.numel(), 2 * len(q), 2 * len(k))
    return whole[..., queries.start % 16 :, keys.start % 16 :][..., : queries.stop - queries.start, : keys.stop - keys.start]


def chosen_rows(seed: torch.Tensor, p: float, batch: int, heads: int, rows: torch.Tensor, seqlen_k: int) -> torch.Tensor:
    """``kept`` for queries in any order (int64, one dim), all batch entries, heads and keys."""
    key, number = _keys_and_numbers(seed, slice(0, batch), heads)
    head = torch.arange(heads, device=seed.device).repeat(batch).view(-1, 1, 1)
    k = torch.arange(seqlen_k, device=seed.device)
    words = philox(key, (rows & ~8)[:, None], k & ~8, head, number)
    low, high = (torch.where((rows & 8)[:, None] == 0, a, b) for a, b in (words[::2], words[1::2]))
    return (torch.where((k & 8) == 0, low, high) < limit_of(p)).view(batch, heads, len(rows), seqlen_k)


def seeded(spec: Spec, device: torch.device) -> Tensors:
    """The tensors of a spec with dropout, its seed among them: that of the spec, or a fresh one.

    Raises:
        InvalidInput: a seed that is neither a tensor of one element nor a generator of this device; a draw that vmap forbids.
    """
    seed = spec.tensors.seed
    if isinstance(seed, torch.Tensor):
        if seed.numel() != 1:
            raise InvalidInput(f"dropout's seed has shape {tuple(seed.shape)}, expected one element.")
        return spec.tensors
    if seed is not None and not isinstance(seed, torch.Generator):
        raise InvalidInput(
            f"dropout's seed must be an int64 tensor of one element, a torch.Generator or None, got {type(seed).__name__}: "
            "for a number of your own give torch.tensor(number, device=q.device)."
        )
    if seed is not None and seed.device.type != device.type:
        raise InvalidInput(f"dropout's generator is on {seed.device} but q is on {device}: make it with torch.Generator(q.device).")
    return spec.tensors._replace(seed=_draw(seed, device))


def _draw(generator: torch.Generator | None, device: torch.device) -> torch.Tensor:
    """63 random bits from a generator (default: that of the device), drawn on the device: nothing waits, and graphs may hold it."""
    if not torch.compiler.is_compiling() and torch._C._are_functorch_transforms_active():
        try:
            return torch.randint(2**63 - 1, (), device=device, generator=generator)
        except RuntimeError as error:
            raise InvalidInput(
                "dropout would draw a seed inside torch.vmap, whose randomness is 'error': give vmap randomness='different' "
                "(each example has masks of its own) or 'same', or give dropout a seed."
            ) from error
    return torch.randint(2**63 - 1, (), device=device, generator=generator)
