"""How the columns of a head lie in tiles, whose extents are powers of two."""

from __future__ import annotations

__all__ = ["chunks", "padded"]

_ONE_TILE = 64  # padded columns up to which one tile does better: measured at 40
_MOST = 256  # padded columns beyond which a result is shared by programs, or made of what is kept


def padded(size: int) -> int:
    """The extent of a tile that holds ``size`` columns: a power of two, at least 16."""
    return max(16, 1 << (size - 1).bit_length())


def chunks(size: int, whole: bool = False) -> tuple[int, int]:
    """The tiles that hold ``size`` columns in passes that can take two (``configs.IN_CHUNKS``): ``(first, second)``, 0 for none.

    Two where they leave out a fifth of the padded columns at least: 72 columns are 64 + 16, 96 are 64 + 32, 192 are 128 + 64.
    ``whole``: one tile holds them all, as where several programs share the columns of a result.
    """
    width = padded(size)
    first = width // 2
    if whole or not _ONE_TILE < width <= _MOST or size <= first:
        return width, 0
    rest = padded(size - first)
    return (first, rest) if 5 * (first + rest) <= 4 * width else (width, 0)
